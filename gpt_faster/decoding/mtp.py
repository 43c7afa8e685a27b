"""Drafts tokens with the checkpoint's MTP head (layers/mtp_head.py), one extra layer.

The head reads the model's hidden states, which the model records by position, and has its own KV
cache. Its slot p holds the token at p + 1 with the hidden state at p, so rejected drafts are
overwritten and a conversation's next turn reuses both, as it does the model's cache.

    head.join(model); batch = SpeculativeBatch(model, sampler, steps, MTPDrafter(model, head), …)
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tp
from generate import bucket
from gpt_faster.kernels.cpu.linears import NATIVE_KERNEL, OperationsLinear, is_packed
from gpt_faster.layers.mtp_head import MTPConfig, MTPHead
from model import Transformer
from sampling import Sampler
from speculate import draw_draft, joined

MAX_DRAFT = 4                                      # the head's own hidden states drift after that
DRAFT_VOCAB = 65_536                               # lowest ids, which are the most frequent tokens
PUBLISHED_ACCEPTANCE = 0.8                         # of Qwen3.5's first draft token


def draft_one_token(head, tokens, hidden, pos, kv_len, drafts, sampler) -> tuple:
    """MTPHead.forward(), then draft one more token after `drafts` [1, k] -> the token, its
    distribution (probs, ids) and its hidden state [1, 1, D]."""
    logits, hidden = head(tokens, hidden, pos, 1, kv_len)
    missing = sampler.n_vocab - logits.shape[-1]   # tokens outside the head's vocabulary
    logits = F.pad(logits[:, -1], (0, missing), value=-torch.inf)
    return *draw_draft(logits, pos[-1:] + 1, drafts, sampler), hidden


def hidden_bytes(sources: list, length: int, dtype: torch.dtype) -> int:
    """Bytes of the hidden states of `length` positions, for each MTP head among the checkpoints."""
    heads = [source.cfg for source in sources if isinstance(source.cfg, MTPConfig)]
    return sum(length * cfg.dim * dtype.itemsize for cfg in heads)


def first_rows(linear: nn.Module, n: int) -> nn.Module | None:
    """A view of the linear's first n outputs; None if its memory layout has no such slice."""
    if linear.bias is not None or linear._forward_hooks or tp.shared_by(linear):
        return None
    if type(linear) is nn.Linear:
        new = nn.Linear(linear.weight.shape[1], n, bias=False, device="meta")
        new.weight = nn.Parameter(linear.weight[:n], requires_grad=False)
        return new
    if not is_packed(linear) or n % linear.packed.shape[2]:
        return None
    weight = linear.packed
    new = OperationsLinear(torch.Size((n, linear.shape[1])), None, NATIVE_KERNEL)
    n_block, scales = n // weight.shape[2], linear.scales
    if scales is not None:                         # int4 group scales are blocked like the weight
        scales = scales[:n_block if scales.dim() == 3 else n]
    new.set_tensors((weight[:n_block], scales, None))
    return new


class MTPDrafter:
    """Drafts the first token from the model's hidden state, each further one from the head's."""

    min_kv_len = 256

    def __init__(self, model: Transformer, head: MTPHead, step: Callable = draft_one_token,
                 max_draft: int = MAX_DRAFT):
        """step: draft_one_token, compiled or not. Call head.join(model) first.

        In one CPU process the head uses only the first DRAFT_VOCAB rows of a large output layer:
        the drafts it misses cost less than reading all rows. Not measured on GPUs or on ranks.
        """
        self.model, self.head, self.step = model, head, step
        measured = model.freq.device.type == "cpu" and tp.world() == 1
        if measured and model.cfg.vocab_size > 2 * DRAFT_VOCAB:
            head.head = first_rows(model.head, DRAFT_VOCAB) or head.head
        self.max_draft = max_draft                 # fixed width of `drafts`: fewer compiled shapes
        self.n_cached = 0                          # valid slots of the head's cache

    def begin(self, n_same: int, max_length: int, chunk: int) -> None:
        """Start a new prompt that shares its first n_same tokens with the last one."""
        head = self.head
        if (head.max_batch_size, head.max_seq_length) != (1, max_length):
            head.setup_cache(1, max_length, chunk)
            self.n_cached = 0
        self.model.record_hidden(self.model.cfg.n_layer)
        self.n_cached = max(0, min(self.n_cached, n_same - 1))

    def find(self, history: Tensor, n: Tensor) -> Tensor | None:
        return None

    def propose(self, history: Tensor, n: int, k: int, sampler: Sampler) -> tuple:
        """Draft k tokens after the first n of history -> tokens [1, k], probs [k, C] and ids."""
        slots = torch.arange(n + k, device=history.device)
        drafts = history[:, n - 1:n].repeat(1, self.max_draft)             # filled from the left
        self._catch_up(history, n - 1, slots, self.max_draft + 1)
        tokens = history[:, self.n_cached + 1:n]
        hidden, pos = self.hidden_states(self.n_cached, n - 1), slots[self.n_cached:n - 1]
        dists = []
        for i in range(k):
            args = tokens, hidden, pos, self.kv_len(n - 1 + i), drafts, sampler
            tokens, probs, ids, hidden = self.step(self.head, *args)
            tokens = tp.broadcast(tokens)
            drafts[:, i] = tokens[:, 0]
            pos = slots[n - 1 + i:n + i]
            dists.append((probs, ids))
        self.n_cached = n - 1                      # later slots are from the head's hidden states
        return drafts[:, :k], *joined(dists, sampler.n_vocab)

    def _catch_up(self, history: Tensor, end: int, slots: Tensor, max_left: int) -> None:
        """Fill the slots of a prompt and of plain decode steps, up to the last max_left."""
        while end - self.n_cached > max_left:
            a = self.n_cached
            b = min(a + self.head.longest_call, end - 1)
            self.head(history[:, a + 1:b + 1], self.hidden_states(a, b), slots[a:b], 1, b)
            self.n_cached = b

    def hidden_states(self, a: int, b: int) -> Tensor:
        """The model's normalized hidden states of positions [a, b), [1, b - a, D]."""
        return self.model.norm(self.model.hidden[self.model.cfg.n_layer][:, a:b])

    def kv_len(self, n: int) -> int:
        return bucket(n, self.head.max_seq_length, self.min_kv_len)

    def draft_for_timing(self, k: int, n: int, kv_len: int, sampler: Sampler) -> tuple:
        """The work of k drafts after a round that added n tokens -> probs [k, C] and ids.

        Overwrites the beginning of the cache.
        """
        drafts = torch.zeros(1, self.max_draft, dtype=torch.int64, device=self.model.freq.device)
        tokens, pos = drafts.new_zeros(1, n), torch.arange(n, device=drafts.device)
        hidden, dists = self.hidden_states(0, n), []
        for _ in range(k):
            args = tokens, hidden, pos, kv_len, drafts, sampler
            tokens, probs, ids, hidden = self.step(self.head, *args)
            pos = pos[-1:]
            dists.append((probs, ids))
        return joined(dists, sampler.n_vocab)

    def accepted(self, n: int, match: int | None) -> None:
        """Nothing to do: the head reads the accepted drafts from the history."""
