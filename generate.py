"""Generate text: prefill the prompts, then decode one token at a time. Also the command line.

Composes the other files; has no file formats and no math of its own. The full command, with every
format and the fast kernels, is gpt_faster/cli/session.py and calls the functions below.

    python generate.py --compile --checkpoint_path org/name --prompt "Hello, my name is"
"""

import argparse
import math
import os
import re
import resource
import select
import stat
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from weakref import ref

if __name__ == "__main__" and (Path(__file__).parent / "gpt_faster/cli/start.py").exists():
    # The full command: it extends the flags below and calls the functions below.
    from gpt_faster.cli.start import generate
    sys.exit(generate())

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import tp
from checkpoint import Unforeseen, first_line, is_out_of_memory, open_checkpoint
from checkpoint import load_model as load_weights
from model import MoE, Transformer
from quantize import quantized
from sampling import RANGES, Sampler, SamplingParams
from tokenizer import Detokenizer, differ, load_for

# ---- The two steps ------------------------------------------------------------------------------

def prefill(model, tokens, pos, last, kv_len, sampler, batch_idx) -> Tensor:
    """Run prompts [b, T]; sample one token per row from the logits at index `last` [b, 1].

    batch_idx [b]: the cache rows of these prompts; None: all.
    """
    logits = model(tokens, pos, last, kv_len, batch_idx)
    rows = slice(None) if batch_idx is None else batch_idx
    sampler.note(logits[:, -1], rows)
    at = pos.expand(len(last), -1).gather(1, last)
    return sampler.sample(logits[:, -1], rows, at)


def decode_one_token(model, token, pos, kv_len, sampler) -> Tensor:
    """token [B, 1] at pos [1] or [B, 1] -> the next token [B, 1].

    kv_len: cache entries to attend to. Traced as one graph on a GPU: no Python state, no prints.
    """
    logits = model(token, pos, 1, kv_len)
    sampler.note(logits[:, -1])
    return tp.broadcast(sampler.sample(logits[:, -1], slice(None), pos))


class Steps(NamedTuple):
    """The two steps, compiled or not. pad: round prompts up, so that few lengths are compiled."""

    prefill: Callable = prefill
    decode: Callable = decode_one_token
    pad: bool = False
    min_kv_len: int = 256                          # a decode step attends to at least this many
                                                   # entries: fewer graphs


def compile_steps(model: Transformer, compile_prefill: bool = False) -> Steps:
    """The engine torch_compile: the code of this file and model.py, through torch.compile alone.

    On a GPU a step becomes one CUDA graph. All layers are traced in sequence: compiling a large
    model takes a minute or two the first time.
    """
    first = CompiledStep(prefill, mode=None, dynamic=True) if compile_prefill else prefill
    return Steps(first, CompiledStep(decode_one_token), pad=compile_prefill)


class CompiledStep:
    """A step compiled as one graph.

    The next replay of a CUDA graph overwrites the outputs of this one, so they are cloned. Tensors
    that a hook keeps would be overwritten too, so a model with hooks runs without a CUDA graph.
    """

    def __init__(self, step: Callable, mode: str | None = "reduce-overhead", **options):
        torch._dynamo.config.recompile_limit = 64              # one per kv_len
        torch._dynamo.config.skip_nnmodule_hook_guards = False     # notice hooks added later
        self.graph = torch.compile(step, mode=mode, fullgraph=True, **options)
        self.without_graph = torch.compile(step, fullgraph=True, **options)
        self.kinds, self.hooked = set(), False
        self.checked = None                        # hook counter and models at the last check
        self.known = []                            # methods and global hooks at the last call

    def __call__(self, *args):
        models = [arg for arg in args if isinstance(arg, nn.Module)]
        now = RemovableHandle.next_id, *map(ref, models)
        if now != self.checked:
            self.checked = now
            self._check(models)
        of_all = hooks_of_all()
        known = [*methods_of(self.kinds), *of_all]
        if self.known and known != self.known:     # torch.compile does not guard on these
            torch.compiler.reset()
        self.known = known
        step = self.without_graph if self.hooked or of_all else self.graph
        output = step(*args)
        if isinstance(output, Tensor):
            return output.clone()
        return tuple(t if t is None else t.clone() for t in output)

    def _check(self, models: list[nn.Module]) -> None:
        modules = [m for model in models for m in model.modules()]
        self.kinds.update(map(type, modules))
        self.hooked = any(m._forward_hooks or m._forward_pre_hooks for m in modules)


def methods_of(kinds: set[type]) -> list:
    """The current attributes of these classes and their bases, without torch's own classes."""
    classes = {base for kind in kinds for base in kind.__mro__
               if not base.__module__.startswith("torch.")}
    return [f for base in classes for f in vars(base).values()]


def hooks_of_all() -> list:
    """Global module hooks."""
    hooks = [value for name, value in vars(nn.modules.module).items() if name.endswith("_hooks")]
    return [hook for of_all in hooks if isinstance(of_all, dict) for hook in of_all.values()]


# ---- The loop -----------------------------------------------------------------------------------

def bucket(n: int, limit: int, minimum: int = 256) -> int:
    """Round n up to a power of two, so that attention reads the used part of the cache in few
    shapes."""
    return min(limit, max(minimum, 1 << (n - 1).bit_length()))


class Batch:
    """Sequences that are generated together, each in one row of the KV cache."""

    n_beyond = 1                                   # cache positions written past a sequence's end
    # Of a SpeculativeBatch, whose round gives a row several tokens:
    has_ready = False                              # whether the next step's tokens are computed
    place = 0                                      # index of the last step's tokens in their round

    def __init__(self, model: Transformer, sampler: Sampler, steps: Steps = Steps()):
        """The model's cache must have as many rows as the sampler (Transformer.setup_cache)."""
        self.model, self.sampler, self.steps = model, sampler, steps
        self.device = sampler.seeds.device
        self.n_row = sampler.n_row
        self.max_length = model.max_seq_length
        self.chunk = model.longest_call            # prompt tokens per call of the model
        self.length = [0] * self.n_row             # tokens in each row's cache; 0: row not in use
        self.kept = [0] * self.n_row               # of a row not in use: positions to preserve
        self.token = to_device([[0]] * self.n_row, self.device)
        self.new_rows = []                         # rows to which the last step gave a token
        self.row_stats = [(0, 0)] * self.n_row     # rounds with drafts, accepted drafts
        self.plain_rows = set()                    # rows that must not draft
        self._set_pos()

    @torch.inference_mode()
    def prefill(self, rows: list[int], prompts: list[list[int]], n_cached: int = 0,
                params: list[SamplingParams] | None = None) -> Tensor:
        """Begin a new sequence in each of `rows` -> tokens [B, 1], the first new one in these rows.

        n_cached: prompt tokens already in the cache. params: None keeps the rows' parameters.
        ValueError: the sequence in a row has overwritten keys that windows at n_cached include.
        """
        last = max(self.length[row] for row in rows) if n_cached and self.model.rings else 0
        if last - n_cached > self.model.longest_call:          # see model.n_slots
            raise ValueError(f"n_cached {n_cached}: the cache of sliding windows, written up to "
                             f"position {last}, goes back {self.model.longest_call}: use 0")
        prompt_of = dict(zip(rows, prompts))
        for i, (row, prompt) in enumerate(prompt_of.items()):
            self.sampler.begin(row, prompt, params[i] if params else None)
            self.length[row] = len(prompt)
        max_tokens = 0 if self.steps.pad else self.chunk       # padded: one row per call
        for group in group_by_length(prompt_of, max_tokens, self.n_row):
            tokens = pad_batch([prompt_of[row] for row in group], self.device)
            first = self._run_prompts(group, tokens, n_cached)
            index = to_device(group, self.device)
            first = tp.broadcast(first)
            self.token = self.token.index_copy(0, index, first)
        self._set_pos()
        return self.token

    def _run_prompts(self, rows: list[int], tokens: Tensor, n_cached: int = 0) -> Tensor:
        """tokens [b, W], padded on the right -> the token after each row's last, [b, 1].

        Padding is written at the row's next position and overwritten by the next token.
        """
        lengths = [self.length[row] for row in rows]
        longest = max(lengths)
        end = to_device(lengths, self.device)[:, None]
        stop = end
        batch_idx = to_device(rows, self.device)
        if rows == list(range(self.n_row)):
            batch_idx = None
            if longest == min(lengths):
                stop = end[0]                      # one pos [T] for all rows
        token = tokens[:, :1]
        for at in range(n_cached, longest, self.chunk):        # rows may end in different chunks
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
        """Decode one token for every row -> [B, 1], without a host sync."""
        self.sampler.observe(self.token)
        self.token = self._decode()
        self.advance(1)
        return self.token

    def _decode(self) -> Tensor:
        args = self.token, self.pos, self.kv_len(max(self.length) + 1), self.sampler
        return self.steps.decode(self.model, *args)

    def active_rows(self) -> list[int]:
        """The rows that a step computes: all, since a compiled step has a fixed shape."""
        return list(range(self.n_row))

    def kv_len(self, n: int) -> int:
        """Cache entries to attend to when n are in use, rounded up to few distinct values."""
        return bucket(n, self.max_length, self.steps.min_kv_len)

    def advance(self, n: int) -> None:
        """Record n more tokens in the cache of every row in use."""
        self.new_rows = [row for row, length in enumerate(self.length) if length]
        self.length = [length + n if length else 0 for length in self.length]
        self.pos = self.pos.add(self.in_use, alpha=n)

    def end(self, row: int, n_kept: int = 0) -> None:
        """End the row's sequence: its tokens are meaningless until prefill() begins a new one.

        n_kept: cache positions to preserve. A step writes to every row; in a row that is not in use
        it writes after them.
        """
        self.length[row], self.kept[row] = 0, n_kept
        self.sampler.end(row)
        self._set_pos()

    def _set_pos(self) -> None:
        pos = to_device([n or kept for n, kept in zip(self.length, self.kept)], self.device)
        in_use = to_device([int(n > 0) for n in self.length], self.device)
        pos = pos.clamp(max=self.max_length - 1)
        self.pos = pos if self.n_row == 1 else pos[:, None]    # [1] or [B, 1]
        self.in_use = in_use.view_as(self.pos)


def generate(batch: Batch, prompts: list[list[int]], max_new_tokens: int,
             n_cached: int = 0) -> Iterator[Tensor]:
    """Yield the next token of each row, [B, 1], until each has max_new_tokens. Stop by leaving the
    loop.

    prompts: token ids of any lengths, one prompt for each of the first rows of the batch; n_cached:
    prompt tokens already in the cache. A row ends when its cache is full; its tokens after that are
    meaningless. Rows of a speculative batch have different numbers of tokens: -1 means none now.
    ValueError if every row would end early, or a prompt alone fills the cache.
    """
    lengths, limit = [len(prompt) for prompt in prompts], batch.max_length
    for n, n_new in ((min(lengths), max_new_tokens), (max(lengths), 1)):
        if n + n_new > limit:
            raise ValueError(f"{n} + {n_new} tokens exceed {limit} positions")
    yield batch.prefill(range(len(prompts)), prompts, n_cached)
    n_left = [max_new_tokens - 1] * len(prompts)
    while any(n and length for n, length in zip(n_left, batch.length)):
        for row, length in enumerate(batch.length):
            if length == limit and not batch.has_ready:
                batch.end(row)
        yield batch.step()
        for row in batch.new_rows:
            if row < len(n_left) and n_left[row]:
                n_left[row] -= 1
                if not n_left[row] and any(n_left):        # speculation: others have fewer
                    batch.end(row, batch.length[row])


def pad_batch(prompts: list[list[int]], device) -> Tensor:
    """Token ids -> [B, W], padded on the right."""
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


def to_device(values: list, device: torch.device) -> Tensor:
    """torch.tensor(values) on the device; pinned, so that the copy to a GPU does not wait."""
    t = torch.tensor(values)
    return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t.to(device)


# ---- Output: token ids on the host, text, stop conditions ----------------------------------------

class NotFinite(ValueError):
    """A row's logits are NaN or infinite, so its tokens are meaningless."""

    def __init__(self, what: str, dtype: torch.dtype):
        why = "a weight is damaged, or the model needs --dtype float32"
        if dtype == torch.float16:
            why = "activations exceed float16's range, use --dtype bfloat16 or float32"
        super().__init__(f"{what}: the logits are NaN or infinite: {why}")


def read_late(tokens: Iterable[tuple[Tensor, object]], not_finite: Tensor | None = None
              ) -> Iterator[tuple[list[int | None], object]]:
    """(token [B, 1], tag) -> (ids, tag), one step late: a GPU computes the next token meanwhile.

    not_finite: Sampler.not_finite [B, 1]; a row with invalid logits gets the id None.
    """
    waiting = deque()
    for token, tag in tokens:
        copied, flags = None, not_finite
        if token.is_cuda:
            token, flags = _on_host(token), None if flags is None else _on_host(flags)
            copied = torch.cuda.Event()
            copied.record()
        waiting.append((token, flags, copied, tag))
        if len(waiting) > (copied is not None):
            yield _read(*waiting.popleft())
    for item in waiting:
        yield _read(*item)


def _on_host(t: Tensor) -> Tensor:
    """Copy to pinned memory without waiting; valid once the GPU has done its work so far."""
    host = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
    return host.copy_(t, non_blocking=True)


def _read(token: Tensor, flags: Tensor | None, copied, tag) -> tuple[list[int | None], object]:
    if copied is not None:
        copied.synchronize()
    ids = token[:, 0].tolist()
    if flags is not None and any(flags := flags[:, 0].tolist()):           # NaN counts as true
        ids = [None if math.isnan(flag) else i for i, flag in zip(ids, flags)]
    return ids, tag


def n_common_end(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that the text ends with."""
    start = max(0, len(text) - len(stop) + 1)
    at = text.find(stop[0], start)
    while at >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at = text.find(stop[0], at + 1)
    return 0


def split_stops(tokenizer, stops: list[str]) -> tuple[list[str], set[int]]:
    """Stop strings -> those to find in the text, and the ids of those that are a special token.

    A text has no special tokens. ValueError: a stop string with one and more could never be found.
    """
    texts, ids = [], set()
    for stop in stops:
        special = tokenizer.special_ids(stop)
        if not special:
            texts.append(stop)
        elif tokenizer.piece(special[0]) == stop:
            ids.add(special[0])
        else:
            token = tokenizer.piece(special[0])
            raise ValueError(f"the stop string {stop!r} has the special token {token!r}, which is "
                             f"no part of a text: stop at {token!r} alone")
    return texts, ids


class Sequence:
    """One sequence of a batch: collects new token ids and text, and decides when to stop.

    finish_reason: "stop" (an end-of-sequence token or a stop string), "length" (max_new tokens), or
    the argument of finish(); None while it runs.
    """

    def __init__(self, tokenizer, prompt_ids: list[int], eos_ids: set[int] = frozenset(),
                 stops: list[str] = (), max_new: int | None = None):
        """ValueError: a stop string with a special token and more."""
        self.detokenizer, self.prompt_ids = Detokenizer(tokenizer, prompt_ids), prompt_ids
        self.stops, stop_ids = split_stops(tokenizer, stops)
        self.stop_tokens = {i: tokenizer.piece(i) for i in stop_ids}
        self.eos_ids, self.max_new = {*eos_ids, *stop_ids}, max_new
        self.ids, self.text, self.shown, self.finish_reason = [], "", 0, None
        self.stop = None                           # the stop string that ended it

    def push(self, token_id: int) -> str:
        """Add a token -> the text to show now. A possible start of a stop string is held back."""
        if self.finish_reason:
            return ""
        self.ids.append(token_id)
        if token_id in self.eos_ids:
            self.stop = self.stop_tokens.get(token_id)
            return self.finish("stop")
        self._add(self.detokenizer.push(token_id))
        if self.finish_reason:
            return self._show(len(self.text))
        if len(self.ids) == self.max_new:
            return self.finish("length")
        n_begun = max((n_common_end(self.text, s) for s in self.stops), default=0)
        return self._show(len(self.text) - n_begun)

    def finish(self, reason: str) -> str:
        """End the sequence -> the text that was held back."""
        if self.finish_reason is None:
            self._add(self.detokenizer.flush())
            self.finish_reason = self.finish_reason or reason
        return self._show(len(self.text))

    def _add(self, text: str) -> None:
        """Append text; end the sequence before a stop string."""
        searched = max(0, len(self.text) - max(map(len, self.stops), default=0))
        self.text += text
        found = [(at, s) for s in self.stops if (at := self.text.find(s, searched)) >= 0]
        if found:
            at, self.stop = min(found)
            self.text, self.finish_reason = self.text[:at], "stop"

    def _show(self, end: int) -> str:
        piece, self.shown = self.text[self.shown:end], max(self.shown, end)
        return piece


def follow(tokens: Iterator[Tensor], rows: list[Sequence], shown: str | None,
           batch: Batch | None = None) -> tuple[list[float], bool]:
    """Run a generation to its end, streaming the text of rows[0] to stdout.

    shown: text to print first; None: print nothing. batch: where the tokens come from; if a row's
    logits are not finite, NotFinite names it. -> the times before the first step and after each
    token, and whether Ctrl-C ended the generation.
    """
    def show(text):
        if shown is not None:
            print(text, end="", flush=True)

    show(shown)
    times, reason = [time.perf_counter()], "length"
    try:
        not_finite = batch and batch.sampler.not_finite
        for ids, _ in read_late(((token, None) for token in tokens), not_finite):
            times.append(time.perf_counter())
            for row, token_id in zip(rows, ids):
                if token_id is None and row.finish_reason is None:
                    what = f"row {rows.index(row)}" if len(rows) > 1 else "the model"
                    raise NotFinite(what, batch.model.dtype)
                if token_id == -1:                 # none for this row: see generate()
                    continue
                piece = row.push(token_id)
                if row is rows[0]:
                    show(piece)
            if all(row.finish_reason for row in rows):
                break
    except KeyboardInterrupt:
        reason = "interrupted"
    for row in rows:
        piece = row.finish(reason)
        if row is rows[0]:
            show(piece + "\n")
    return times, reason == "interrupted"


# ---- Figures ------------------------------------------------------------------------------------

def figures(times: list[float], n_prompt: int, n_new: list[int], read_bytes: int) -> dict:
    """Speeds from follow()'s times. Prefill ends with the first token; the rest is decoding.

    n_prompt: tokens of all prompts; n_new: new tokens of each row. decode_tok_s is the longest
    row's.
    bandwidth_gb_s (1e9 bytes) counts the weights that each step reads; with read_bytes 0 it is
    omitted (a speculative step gives several tokens).
    """
    ttft_s = times[1] - times[0] if len(times) > 1 else None
    decode_s = times[-1] - times[1] if len(times) > 2 else 0
    step_s = decode_s / (max(n_new) - 1) if decode_s and max(n_new) > 1 else None
    n_decoded = sum(n - 1 for n in n_new if n)
    return dict(ttft_s=ttft_s, prefill_tok_s=n_prompt / ttft_s if ttft_s else None,
                decode_tok_s=1 / step_s if step_s else None,
                decode_tok_s_total=n_decoded / decode_s if decode_s else None,
                bandwidth_gb_s=read_bytes / step_s / 1e9 if step_s and read_bytes else None)


def describe(f: dict) -> str:
    """figures() as one line of text."""
    if f["ttft_s"] is None:
        return "no token"
    line = f"time to first token {f['ttft_s']:.3f} s, prefill {f['prefill_tok_s']:.1f} tok/s"
    if f["decode_tok_s"]:
        line += f", decode {f['decode_tok_s']:.2f} tok/s"
        line += f", bandwidth {f['bandwidth_gb_s']:.1f} GB/s" if f["bandwidth_gb_s"] else ""
        if f["decode_tok_s_total"] > 1.001 * f["decode_tok_s"]:
            line += f" ({f['decode_tok_s_total']:.2f} tok/s in all rows)"
    return line


def weight_bytes(model: Transformer) -> tuple[int, int]:
    """Bytes of all weights, and of those that a one-row step reads: only the active experts, and no
    embedding unless it is tied."""
    def size(parameters):
        return sum(p.numel() * p.element_size() for p in parameters)

    total = size(model.parameters())
    read = {id(p) for p in model.head.parameters()}
    idle = size(p for p in model.embed.parameters() if id(p) not in read)
    for moe in (module for module in model.modules() if isinstance(module, MoE)):
        experts = size(p for part in (moe.gate, moe.up, moe.down) for p in part.parameters())
        idle += experts * (moe.n_expert - moe.n_active) // moe.n_expert
    return total, total - idle


def summarize(batch, speeds: list[float], where: str = "") -> None:
    """Log gpt-fast's last lines. speeds: tok/s of the samples; where: suffix of the memory line."""
    log("==========")
    rounds = sum(getattr(batch, "accept_counts", ()))
    if rounds:
        shares = [round(n / rounds, 4) for n in batch.accept_counts]
        log(f"Acceptance probs: {shares}")
        log(f"Mean Accepted: {batch.mean_accepted():.4f}")
    if speeds:
        log(f"Average tokens/sec: {sum(speeds) / len(speeds):.2f}")
    log(f"Memory used: {peak_memory(batch.device) / 1e9:.2f} GB{where}")


def peak_memory(device: torch.device) -> int:
    """Peak bytes allocated on a GPU, or the process's peak resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "linux":                            # ru_maxrss starts at the parent's value
        stated = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
        if stated:                                         # missing in some sandboxes
            return 1024 * int(stated[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024)


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def traced(path: Path | None):
    """Context manager that writes a Chrome trace, one file per rank. path None: no trace."""
    if path is None:
        yield
        return
    with torch.profiler.profile() as trace:
        yield
    path = trace_file(path)
    path.unlink(missing_ok=True)
    trace.export_chrome_trace(str(path))
    if not path.is_file():                                 # torch only logs a failure
        raise OSError(f"{path}: the trace could not be written")
    log(f"Trace written to {path}")


def trace_file(path: Path) -> Path:
    """The file of --profile FILE: FILE.json, FILE.rank1.json, …"""
    rank = f".rank{tp.rank()}" if tp.rank() else ""
    return path.with_name(path.name.removesuffix(".json") + rank + ".json")


# ---- Loading ------------------------------------------------------------------------------------

def load_model(path: str, device="cpu", dtype: torch.dtype = torch.bfloat16,
               scheme: str | None = None, head: str = "int8") -> tuple:
    """A path or hub name -> the model (this rank's part), the checkpoint, the tokenizer.

    scheme: int8, int4-g32, …: quantize the weights while loading; head: int8, int4 or none.
    FileNotFoundError, ValueError or OSError say in one line what was found and what to do.
    """
    source = open_checkpoint(path)
    tokenizer = load_for(source)
    if scheme:
        source = quantized(source, scheme, head=head, device=device)
    model = load_weights(tp.shard(source), dtype, device)
    return tp.parallelize(model, source.cfg.vocab_size), source, tokenizer


# ---- The command --------------------------------------------------------------------------------

HELLO = "Hello, my name is"
PIPE_WAIT = 5                                      # seconds for a prompt from stdin
PREFILL_CHUNK = 512                                # prompt tokens per call of the model
CHECKPOINTS = "a Hugging Face directory, a .pth that quantize.py wrote, or a hub name org/name"
DTYPES = {"fp16": "float16", "half": "float16", "f16": "float16", "bf16": "bfloat16",
          "fp32": "float32", "float": "float32", "f32": "float32"}


def dtype_name(text: str) -> str:
    """An argparse type: also the short names of a dtype, as fp16 and half."""
    name = text.lower().removeprefix("torch.")
    return DTYPES.get(name, name)


def add_flags(p: argparse.ArgumentParser, checkpoints: str = CHECKPOINTS) -> dict:
    """Add gpt-fast's flags and a few more -> the argument groups by name.

    checkpoints: the kinds of checkpoint that the command reads, for --help.
    """
    names = "model", "text", "sampling", "speed", "output"
    groups = {name: p.add_argument_group(name) for name in names}
    add_model_flags(groups["model"], checkpoints)
    add_text_flags(groups["text"])
    add_sampling_flags(groups["sampling"])
    add_speed_flags(groups["speed"])
    add_output_flags(groups["output"])
    groups["sampling"].add_argument(               # not a flag of serve.py
        "--top_n_sigma", type=SAMPLING["top_n_sigma"], default=0.0,
        help="only tokens whose logits are at most this many standard deviations below the "
             "maximum; 0: all")
    return groups


def add_model_flags(group, checkpoints: str) -> None:
    """Flags of every command that loads a model."""
    add = group.add_argument
    add("--checkpoint_path", "--model", "-m", metavar="PATH_OR_NAME", help=checkpoints)
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps, xpu")
    add("--dtype", default="auto", choices=["auto", "bfloat16", "float16", "float32"],
        type=dtype_name,
        help="dtype of weights and activations; auto: bfloat16, or float16 on a GPU without it")


def add_text_flags(group) -> None:
    add = group.add_argument
    add("--prompt", action="append", default=[],
        help="text, or an integer for a synthetic prompt of that many random tokens; -: read the "
             f"text from stdin; repeatable; default: what is piped into stdin, or else {HELLO}")
    add("--max_new_tokens", type=number(int, 1), default=200,
        help="maximum number of new tokens")
    add("--num_samples", type=number(int, 1), default=1,
        help="number of samples, generated one after another")
    add("--batch_size", type=number(int, 1), default=1,
        help="one prompt: copies that are generated together; several prompts: how many run at "
             "a time")
    add("--stop", action="append", default=[], metavar="TEXT",
        help="stop before this text, or at this special token (repeatable)")
    add("--ignore_eos", action="store_true", help="continue after an end-of-sequence token")


def add_sampling_flags(group) -> None:
    add = group.add_argument
    add("--temperature", type=SAMPLING["temperature"], default=0.8, help="0: greedy")
    add("--top_k", type=SAMPLING["top_k"], default=200,
        help="only the k most likely tokens; 0: all")
    add("--top_p", type=SAMPLING["top_p"], default=1.0,
        help="only the most likely tokens whose probabilities sum to this")
    add("--min_p", type=SAMPLING["min_p"], default=0.0,
        help="only tokens at least this fraction as likely as the most likely one")
    add("--repetition_penalty", type=SAMPLING["repetition_penalty"], default=1.0,
        help="above 1: make tokens that already appeared less likely")
    add("--seed", type=SAMPLING["seed"], default=1234, help="seed of the random draws")


def add_speed_flags(group) -> None:
    """Flags of every command that generates text."""
    add = group.add_argument
    add("--compile", action="store_true", help="compile the decode step")
    add("--compile_prefill", action="store_true", help="compile prefill too; implies --compile")
    add("--draft_checkpoint_path", "--draft_model", metavar="PATH_OR_NAME",
        help="draft model: a smaller model with the same vocabulary")
    add("--speculate_k", type=number(int, 1), metavar="K",
        help="number of tokens to draft per step (5)")


def add_output_flags(group) -> None:
    add = group.add_argument
    add("--profile", type=Path, metavar="FILE",
        help="write a Chrome trace of the last sample to FILE.json")


def number(kind, minimum, maximum=None, above=False) -> Callable:
    """An argparse type: a finite int or float from `minimum` (or above it) to `maximum`."""
    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            what = "an integer" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"expected {what}, got '{text}'") from None
        large_enough = value > minimum if above else value >= minimum
        if large_enough and (value < math.inf if maximum is None else value <= maximum):
            return value
        bounds = f"{'above' if above else 'at least'} {minimum}"
        bounds += f", at most {maximum}" if maximum else " and finite" if value == math.inf else ""
        raise argparse.ArgumentTypeError(f"must be {bounds}, got {text}")
    return parse


SAMPLING = {name: number(*allowed) for name, allowed in RANGES.items()}


def sampling_params(args, **overrides) -> SamplingParams:
    """Sampling parameters of the flags, with the overrides of a request."""
    names = SAMPLING.keys() - {"seed"}             # --seed seeds all rows together
    return SamplingParams(**{**{name: getattr(args, name) for name in names}, **overrides})


def flag_prompts(args) -> list[tuple[str, int | None]]:
    """The text of each --prompt, or of stdin, or the default -> with it the length of gpt-fast's
    synthetic prompt (--prompt 512), None for text. Digits from stdin are text."""
    if not args.prompt and is_piped():
        return [(piped_text() or HELLO, None)]
    return [(read_stdin(), None) if text == "-" else (text, synthetic_length(text))
            for text in args.prompt or [HELLO]]


def is_piped() -> bool:
    """Whether stdin is a pipe or a file: not a terminal, and not /dev/null."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):  # closed, or not a file
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def piped_text() -> str | None:
    """The text piped into stdin. None with a note if there is none: programs that start this one
    may give it a pipe to which they write nothing, or leave it open."""
    if not select.select([sys.stdin], [], [], PIPE_WAIT)[0]:
        log(f"note: nothing came from stdin in {PIPE_WAIT} seconds: the prompt is {HELLO!r} "
            "(--prompt - waits longer)")
        return None
    text = read_stdin(required=False)
    if not text:
        log(f"note: stdin is empty: the prompt is {HELLO!r}")
    return text or None


def read_stdin(required: bool = True) -> str:
    """The text of stdin without its last line break. ValueError if it is not UTF-8, or empty and
    required."""
    if not sys.stdin:
        raise ValueError("stdin is closed: give the text with --prompt")
    if sys.stdin.isatty():
        log("note: reading the prompt from the terminal: end it with Ctrl-D")
    elif is_piped() and not select.select([sys.stdin], [], [], 2)[0]:
        log("note: waiting for the prompt on stdin, which is a pipe (--prompt gives it directly)")
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise ValueError(f"stdin: not UTF-8 text: {e.reason} at byte {e.start}") from None
    if not text.strip():
        if required:
            raise ValueError("the prompt is empty: stdin has no text")
        return ""
    return text.removesuffix("\n").removesuffix("\r")


def prompt_ids(prompt: str, n_random: int | None, tokenizer, cfg, seed: int) -> list[int]:
    """Token ids of a prompt. ValueError if it is empty, too long, or has ids out of range.

    n_random: that many random tokens instead.
    """
    if n_random is not None:
        log(f"note: --prompt {prompt}: {SYNTHETIC}")
        return random_prompt(n_random, cfg, seed)
    ids = tokenizer.encode(prompt)
    if not ids or not prompt:
        raise ValueError("the prompt is empty: give it some text")
    check_ids(ids, cfg.vocab_size)
    check_length(len(ids), cfg.context, "the model's context")
    return ids


SYNTHETIC = "an integer means a synthetic prompt of that many random tokens"


def synthetic_length(text: str) -> int | None:
    """The length of gpt-fast's synthetic prompt, --prompt 512; None: the prompt is text."""
    return int(text) if re.fullmatch(r"[+-]?[0-9]{1,18}", text) else None


def random_prompt(n: int, cfg, seed: int) -> list[int]:
    """n random token ids. ValueError if n is less than 1 or exceeds the model's context."""
    if n < 1:
        raise ValueError(f"{n}: a synthetic prompt needs at least 1 token")
    check_length(n, cfg.context, "the model's context")
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(min(1024, cfg.vocab_size), (n,), generator=generator).tolist()


def check_ids(ids: list[int], n_vocab: int) -> None:
    """ValueError if a token id exceeds the model's vocabulary."""
    if max(ids, default=0) >= n_vocab:
        raise ValueError(f"token id {max(ids)} is out of range: the model has {n_vocab} tokens, so "
                         "this is not its tokenizer")


def check_length(n: int, limit: int, what: str) -> None:
    if n >= limit:
        raise ValueError(f"the prompt has {n} tokens and {what} is {limit}, which leaves no room "
                         "for new tokens: shorten the prompt")


def main(argv: list[str] | None = None) -> int:
    """The command of the core alone -> exit status. Bad input: one line on stderr, status 2."""
    if hasattr(sys.stdout, "reconfigure"):         # the terminal may not be UTF-8
        sys.stdout.reconfigure(errors="replace")
    try:
        return run(argv)
    except BrokenPipeError:                        # the reader of stdout is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        log("interrupted")
        return 130
    except Exception as e:
        sys.stderr = sys.__stderr__                # ranks above 0 had it redirected to nowhere
        what = first_line(e, 1000)
        foreseen = isinstance(e, OSError | ValueError | ImportError | Unforeseen)
        if not foreseen and not is_out_of_memory(e):
            if tp.world() == 1 or not isinstance(e, RuntimeError):
                raise
            what = f"another rank ended or does not answer: {what}"
        log(f"rank {tp.rank()}: {what}" if tp.rank() else f"generate.py: error: {what}")
        return 2
    finally:
        tp.end()


def run(argv: list[str] | None) -> int:
    tp.start()
    parser = argparse.ArgumentParser(
        description="Generate text from an open-weight transformer. Text goes to stdout, "
                    "everything else to stderr. Sampling defaults come from the model's "
                    "generation_config.json, if it has one.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add_flags(parser)
    args = parser.parse_args(argv)
    check(args)
    if tp.world() > 1:                             # which rank would read stdin?
        args.prompt = args.prompt or [HELLO]
        if "-" in args.prompt:
            raise ValueError("--prompt -: under torchrun give the text itself")
    prompts, n_random = zip(*flag_prompts(args))
    device = pick_device(tp.local_device(args.device))
    dtype = pick_dtype(args.dtype, device)
    start = time.perf_counter()
    model, source, tokenizer = load_model(args.checkpoint_path, device, dtype)
    draft = load_draft(args, tokenizer, dtype, device)
    log(f"Time to load model: {time.perf_counter() - start:.2f} seconds")
    parser.set_defaults(**source.defaults)         # the model's, for flags that are not given
    args = parser.parse_args(argv)

    ids = [prompt_ids(prompt, n, tokenizer, source.cfg, args.seed)
           for prompt, n in zip(prompts, n_random)]
    rows = range(len(prompts)) if len(prompts) > 1 else [0] * args.batch_size
    groups = [rows[i:i + args.batch_size] for i in range(0, len(rows), args.batch_size)]
    work = groups * args.num_samples
    wanted = max(map(len, ids)) + args.max_new_tokens
    longest = min(wanted, source.cfg.context)
    if longest < wanted:
        log(f"note: the context is limited to {longest} tokens, the model's maximum")
    batch = build_batch(args, model, draft, len(groups[0]), longest)
    eos_ids = set() if args.ignore_eos else set(source.eos_ids)
    speeds, interrupted = [], False
    for i, group in enumerate(work):
        names = [str(row) for row in group] if len(prompts) > 1 else [
            f"row {row}" for row in range(len(group)) if len(group) > 1]
        with traced(args.profile if i == len(work) - 1 else None):
            f, interrupted = show(args, batch, [prompts[row] for row in group],
                                  [ids[row] for row in group], names, tokenizer, eos_ids)
        log(f"Sample {i // len(groups) + 1}: {describe(f)}")
        speeds += [f["decode_tok_s_total"]] if f["decode_tok_s"] else []
        if interrupted:
            break
    summarize(batch, speeds)
    return 130 if interrupted else 0


def pick_device(name: str) -> torch.device:
    """auto: the first accelerator, else the CPU. ValueError lists this machine's devices."""
    kinds = {"cuda": torch.cuda, "mps": torch.backends.mps, "xpu": torch.xpu}
    here = [kind for kind, module in kinds.items() if module.is_available()] + ["cpu"]
    kind, _, index = (here[0] if name == "auto" else name).partition(":")
    count = kinds[kind].device_count() if kind in ("cuda", "xpu") else 1
    if kind not in here or (index and not (index.isdigit() and int(index) < count)):
        raise ValueError(f"device '{name}' not found; available: {', '.join(here)}")
    device = torch.device(kind, int(index)) if index else torch.device(kind)
    if kind == "cuda" and index:
        torch.cuda.set_device(device)                      # for streams, events and graphs
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """auto: bfloat16, or float16 on a GPU without it. ValueError if bfloat16 is given there."""
    old_gpu = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
    if name == "bfloat16" and old_gpu:
        raise ValueError(f"{torch.cuda.get_device_name(device)} does not support bfloat16: "
                         "use --dtype float16 or float32")
    if name == "auto":
        name = "float16" if old_gpu else "bfloat16"
    return getattr(torch, name)


def check(args) -> None:
    """ValueError if flags contradict each other."""
    if args.checkpoint_path is None:
        raise ValueError(f"--checkpoint_path is required: {CHECKPOINTS}")
    if args.speculate_k and not args.draft_checkpoint_path:
        raise ValueError("--speculate_k requires --draft_checkpoint_path")
    check_output(args)


def check_output(args) -> None:
    """ValueError if --stop is empty or the file of --profile cannot be written."""
    if not all(args.stop):
        raise ValueError("--stop must not be empty")
    if args.profile and (trace_file(args.profile).is_dir()
                         or not args.profile.absolute().parent.is_dir()):
        raise ValueError(f"--profile {args.profile}: expected a file in an existing directory")


def load_draft(args, tokenizer, dtype: torch.dtype, device) -> Transformer | None:
    """The draft model. ValueError if its vocabulary differs."""
    if args.draft_checkpoint_path is None:
        return None
    draft, source, other = load_model(args.draft_checkpoint_path, device, dtype)
    if difference := differ(tokenizer, other):
        raise ValueError(f"{source.path} cannot draft for this model: {difference}")
    return draft


def build_batch(args, model: Transformer, draft: Transformer | None, n_row: int,
                length: int) -> Batch:
    """A batch as the flags ask for it: compiled or not, speculative if there is a draft model."""
    device, k = model.freq.device, min(args.speculate_k or 5, length - 1)
    model.setup_cache(n_row, length, max(PREFILL_CHUNK, k + 1), max_rejected=k if draft else 0)
    generator = torch.Generator(device).manual_seed(args.seed)
    rows = [sampling_params(args)] * n_row
    sampler = Sampler(rows, model.cfg.vocab_size, device, generator)
    compiles = args.compile or args.compile_prefill
    log(f"Engine: {'torch_compile' if compiles else 'kv_cache'}")
    steps = compile_steps(model, args.compile_prefill) if compiles else Steps()
    if draft:
        from speculate import build_speculative  # it imports this file
        batch = build_speculative(model, sampler, steps, draft, k, compiles)
    else:
        batch = Batch(model, sampler, steps)
    if compiles:
        start = time.perf_counter()
        n_new = min(k + 3, length - 1)
        for _ in generate(batch, [[0]] * n_row, n_new):
            pass
        generator.manual_seed(args.seed)           # undo the draws of the warm-up
        if draft:
            batch.reset_stats()
        log(f"Compilation time: {time.perf_counter() - start:.2f} seconds")
    return batch


def show(args, batch: Batch, prompts: list[str], ids: list[list[int]], names: list[str],
         tokenizer, eos_ids: set[int]) -> tuple[dict, bool]:
    """Generate and print a text for each prompt -> the figures, and whether Ctrl-C ended it.

    names: headings, printed if there are several texts.
    """
    n_new = [min(args.max_new_tokens, batch.max_length - len(prompt)) for prompt in ids]
    sequences = [Sequence(tokenizer, prompt, eos_ids, args.stop, n)
                 for prompt, n in zip(ids, n_new)]
    for row in range(len(ids), batch.n_row):       # the last group may be smaller
        batch.end(row)
    titles = [f"--- {name} ---\n{prompt}" for name, prompt in zip(names, prompts)] or prompts
    times, interrupted = follow(generate(batch, ids, max(n_new)), sequences, titles[0], batch)
    for title, sequence in zip(titles[1:], sequences[1:]):
        print(f"{title}{sequence.text}", flush=True)
    read_bytes = 0 if args.draft_checkpoint_path else weight_bytes(batch.model)[1]
    return figures(times, sum(map(len, ids)), [len(s.ids) for s in sequences],
                   read_bytes), interrupted


if __name__ == "__main__":                         # only without gpt_faster/
    sys.modules["generate"] = sys.modules["__main__"]      # speculate.py imports generate
    sys.exit(main())
