"""Generate text: prefill the prompts, then decode a token at a time. Also the command.

It composes the other files. No file formats, no math of its own, no flags. cli/batch.py drives the
same Batch where many prompts take turns.

    python generate.py --compile --checkpoint_path org/name --prompt "Hello, my name is"
"""

import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

if __name__ == "__main__":
    from kernels.quick_import import import_torch
    import_torch()
import torch
import torch.nn.functional as F
from torch import Tensor

import tp
from formats.load import load_model as load_weights
from formats.load import open_checkpoint
from formats.quantized import quantized
from formats.tokenizer_files import load_for
from kernels.attention import use_fused_attention
from kernels.compile import WhileAsRead, compile_model, compiled, prepare_for_cuda
from kernels.cuda_graph import CudaGraph
from kernels.upload import to_device
from model import Transformer
from sampling import Sampler, SamplingParams

# ---- The two steps ------------------------------------------------------------------------------

def prefill(model, tokens, pos, last, kv_len, sampler, batch_idx) -> Tensor:
    """Run prompts [b, T]; sample one token per row from the logits at index `last` [b, 1].

    batch_idx [b]: which rows of the cache these are; None: all.
    """
    logits = model(tokens, pos, last, kv_len, batch_idx)
    rows = slice(None) if batch_idx is None else batch_idx
    sampler.note(logits[:, -1], rows)
    at = pos.expand(len(last), -1).gather(1, last)
    return sampler(logits[:, -1], rows, at)


def decode_one_token(model, token, pos, kv_len, sampler) -> Tensor:
    """token [B, 1] at pos [1] or [B, 1] -> the next token [B, 1].

    kv_len: positions to attend to. Traced whole on a GPU: no Python state and no prints in here.
    """
    logits = model(token, pos, 1, kv_len)
    sampler.note(logits[:, -1])
    return tp.broadcast(sampler(logits[:, -1], pos=pos))


class Steps(NamedTuple):
    """The two steps, compiled or not; pad: round prompts up, so that few lengths are compiled."""

    prefill: Callable = prefill
    decode: Callable = decode_one_token
    pad: bool = False
    min_kv_len: int = 256                          # a step attends to


def compile_steps(model: Transformer, compile_prefill: bool = False) -> Steps:
    """On a GPU the whole step becomes one CUDA graph.

    On a CPU the model is changed instead, so that its layers run in C++ (kernels/compile.py).
    """
    if model.freq.device.type == "cpu":
        compile_model(model)
        return Steps()
    min_kv_len = prepare_for_cuda(model)
    first = prefill
    if compile_prefill:
        first = compiled(prefill)
        first = WhileAsRead(first, prefill)
    return Steps(first, as_one_graph(decode_one_token), compile_prefill, min_kv_len)


def as_one_graph(step: Callable) -> Callable:
    """Compiled whole, and on a GPU replayed as a CUDA graph."""
    graph = CudaGraph(compiled(step))
    return WhileAsRead(graph, step)


# ---- The loop -----------------------------------------------------------------------------------

def bucket(n: int, limit: int, minimum: int = 256) -> int:
    """n rounded up to a power of two: attention reads the live cache only, in few shapes."""
    return min(limit, max(minimum, 1 << (n - 1).bit_length()))


class Batch:
    """Sequences that are generated side by side, each in a row of the model's KV cache."""

    def __init__(self, model: Transformer, sampler: Sampler, steps: Steps = Steps()):
        """The model has a cache for as many rows as the sampler (Transformer.setup_cache)."""
        self.model, self.sampler, self.steps = model, sampler, steps
        self.device = sampler.noise.device
        self.n_row = len(sampler.noise)
        self.max_length = model.max_seq_length
        self.chunk = model.longest_call            # prompt tokens per call of the model
        self.length = [0] * self.n_row             # tokens in each row's cache; 0: not in use
        self.token = to_device([[0]] * self.n_row, self.device)
        self._set_pos()

    @torch.inference_mode()
    def prefill(self, rows: list[int], prompts: list[list[int]], n_cached: int = 0,
                params: list[SamplingParams] | None = None) -> Tensor:
        """Begin a new sequence in each of `rows` -> their first tokens, in those rows of [B, 1].

        n_cached: prompt tokens that are in the cache already; params: None keeps the rows' own.
        """
        prompt_of = dict(zip(rows, prompts))
        for i, (row, prompt) in enumerate(prompt_of.items()):
            self.sampler.begin(row, prompt, params[i] if params else None)
            self.length[row] = len(prompt)
        max_tokens = 0 if self.steps.pad else self.chunk       # padded: one by one, in few shapes
        for group in group_by_length(prompt_of, max_tokens, self.n_row):
            tokens = pad_batch([prompt_of[row] for row in group], self.device)
            first = self._run_prompts(group, tokens, n_cached)
            index = to_device(group, self.device)
            first = tp.broadcast(first)
            self.token = self.token.index_copy(0, index, first)
        self._set_pos()
        return self.token

    def _run_prompts(self, rows: list[int], tokens: Tensor, n_cached: int = 0) -> Tensor:
        """tokens [b, W], padded on the right -> the token after each row's end [b, 1].

        Padding is written at the row's next position, and overwritten by the next token.
        """
        lengths = [self.length[row] for row in rows]
        longest = max(lengths)
        end = to_device(lengths, self.device)[:, None]
        stop = end
        batch_idx = to_device(rows, self.device)
        if rows == list(range(self.n_row)):
            batch_idx = None
            if longest == min(lengths):
                stop = end[0]                      # one pos [T] for all
        self.sampler.draw_noise(rows)
        token = tokens[:, :1]
        for at in range(n_cached, longest, self.chunk):        # rows end in different chunks
            T = min(longest - at, self.chunk)
            width, kv_len = T, at + T
            if self.steps.pad:
                width = bucket(T, self.chunk, 32)
                kv_len = bucket(at + width, self.max_length)
            piece = F.pad(tokens[:, at:at + T], (0, width - T))
            pos = torch.arange(at, at + width, device=self.device)
            last = (end - 1 - at).clamp(0, T - 1)
            new = self.steps.prefill(self.model, piece, pos.minimum(stop), last, kv_len,
                                     self.sampler, batch_idx)
            token = torch.where(end > at, new, token)
        return token

    @torch.inference_mode()
    def step(self) -> Tensor:
        """One more token for every row, without a host sync -> [B, 1]."""
        self.sampler.observe(self.token)
        self.sampler.draw_noise()
        kv_len = self.kv_len(max(self.length) + 1)
        args = self.token, self.pos, kv_len, self.sampler
        self.token = self.steps.decode(self.model, *args)
        self.advance(1)
        return self.token

    def kv_len(self, n: int) -> int:
        """Positions to attend to where n are in use: few different numbers."""
        return bucket(min(n, self.max_length), self.max_length, self.steps.min_kv_len)

    def advance(self, n: int) -> None:
        """Every row in use has n more tokens in the cache."""
        self.length = [length + n if length else 0 for length in self.length]
        self.pos = self.pos.add(self.in_use, alpha=n)

    def end(self, row: int) -> None:
        """The row's sequence is over: its tokens mean nothing until the next one begins."""
        self.length[row] = 0
        self._set_pos()

    def _set_pos(self) -> None:
        pos = to_device(self.length, self.device)
        pos = pos.clamp(max=self.max_length - 1)
        self.pos = pos if self.n_row == 1 else pos[:, None]    # [1] or [B, 1]
        self.in_use = (self.pos > 0).long()


def generate(batch: Batch, prompts: list[list[int]], max_new_tokens: int,
             n_cached: int = 0) -> Iterator[Tensor]:
    """Yield max_new_tokens times the next token of each row, [B, 1]. Stop by leaving the loop.

    prompts: ids, one prompt for each row of the batch, of any lengths; n_cached: prompt tokens that
    are in the cache already. ValueError where prompt and new tokens exceed the cache.
    """
    n, limit = max(map(len, prompts)), batch.max_length
    if n + max_new_tokens > limit:
        raise ValueError(f"{n} + {max_new_tokens} tokens exceed {limit} positions")
    yield batch.prefill(range(len(prompts)), prompts, n_cached)
    for _ in range(max_new_tokens - 1):
        yield batch.step()


def pad_batch(prompts: list[list[int]], device) -> Tensor:
    """[B, W]; shorter rows are padded on the right."""
    W = max(map(len, prompts))
    rows = [ids + [0] * (W - len(ids)) for ids in prompts]
    return to_device(rows, device)


def group_by_length(prompt_of: dict[int, list[int]], max_tokens: int, n_row: int) -> list:
    """Group rows of similar length so that rows x padded length <= max_tokens.

    Prompts of one length, in all n_row rows of the batch, are one group whatever max_tokens is.
    """
    rows = sorted(prompt_of, key=lambda row: len(prompt_of[row]))
    lengths = {len(prompt) for prompt in prompt_of.values()}
    if len(rows) == n_row and len(lengths) == 1:
        return [sorted(rows)]
    groups = [[]]
    for row in rows:                               # the shortest first
        n_tokens = (len(groups[-1]) + 1) * len(prompt_of[row])
        if groups[-1] and n_tokens > max_tokens:
            groups.append([])
        groups[-1].append(row)
    return [sorted(group) for group in groups]


# ---- Loading ------------------------------------------------------------------------------------

def load_model(path: str | None = None, device="cpu", dtype: torch.dtype = torch.bfloat16,
               scheme: str | None = None, head: str = "int8") -> tuple:
    """A path or hub name, None for the default model -> model, checkpoint, tokenizer.

    scheme: int8, int4-g32, …: round the weights while loading, and the head as int8, int4 or none.
    FileNotFoundError, ValueError or OSError say in one line what was found and what to do.
    """
    source = open_checkpoint(path)
    tokenizer = load_for(source)
    if scheme:
        source = quantized(source, scheme, head=head, device=device)
    return load_shard(source, dtype, device), source, tokenizer


def load_shard(source, dtype: torch.dtype, device) -> Transformer:
    """This rank's part of a model, joined to the others'; alone, the whole."""
    model = load_weights(tp.shard(source), dtype, device)
    use_fused_attention(model)
    return tp.parallelize(model, source.cfg.vocab_size)


if __name__ == "__main__":
    sys.modules["generate"] = sys.modules["__main__"]      # imported below: one module, not two
    from cli.session import main
    sys.exit(main())
