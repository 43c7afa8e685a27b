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
from generate import bucket, to_device
from gpt_faster.kernels.cpu.linears import NATIVE_KERNEL, OperationsLinear, is_packed
from gpt_faster.layers.eagle3 import Eagle3Config
from gpt_faster.layers.gemma4_assistant import AssistantConfig
from gpt_faster.layers.mtp_head import MTPConfig, MTPHead
from model import Transformer, row_index
from sampling import Sampler
from speculate import Drafter, Rows, draw_draft, joined, missing

MAX_DRAFT = 4                                      # the head's own hidden states drift after that
DRAFT_VOCAB = 65_536                               # lowest ids, which are the most frequent tokens
PUBLISHED_ACCEPTANCE = 0.8                         # of Qwen3.5's first draft token


def draft_one_token(head, tokens, hidden, pos, last, kv_len, drafts, sampler,
                    batch_idx=None) -> tuple:
    """MTPHead.forward(), then draft one more token after `drafts` [b, k] and the one at index
    `last` [b, 1] -> the token, its distribution (probs, ids) and its hidden state [b, 1, D]."""
    logits, hidden = head(tokens, hidden, pos, last, kv_len, batch_idx)
    missing = sampler.n_vocab - logits.shape[-1]   # tokens outside the head's vocabulary
    logits = F.pad(logits[:, -1], (0, missing), value=-torch.inf)
    at = pos.expand(len(tokens), -1).gather(1, last) + 1
    return *draw_draft(logits, at, drafts, sampler, batch_idx), hidden


def hidden_bytes(sources: list, length: int, dtype: torch.dtype) -> int:
    """Bytes of the hidden states of `length` positions, if a drafter among the checkpoints reads
    them."""
    widths = {MTPConfig: lambda cfg: cfg.dim, AssistantConfig: lambda cfg: cfg.backbone_dim,
              Eagle3Config: lambda cfg: max(1, cfg.n_state) * cfg.target_dim}
    dims = [width(source.cfg) for source in sources for kind, width in widths.items()
            if isinstance(source.cfg, kind)]
    return sum(length * dim * dtype.itemsize for dim in dims)


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


class MTPDrafter(Drafter):
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
        if measured and head.head is model.head and model.cfg.vocab_size > 2 * DRAFT_VOCAB:
            head.head = first_rows(model.head, DRAFT_VOCAB) or head.head
        self.max_draft = max_draft                 # fixed width of `drafts`: fewer compiled shapes

    def setup(self, n_row: int, max_length: int, longest_call: int) -> None:
        head = self.head
        if (head.max_batch_size, head.max_seq_length) != (n_row, max_length):
            head.setup_cache(n_row, max_length, longest_call)
        self.record()
        self.n_cached = [0] * n_row                # valid slots of each row in the head's cache

    def record(self) -> None:
        """Let the model record what hidden_states() reads."""
        self.model.record_hidden(self.model.cfg.n_layer)

    def begin(self, row: int, n_same: int) -> None:
        self.n_cached[row] = max(0, min(self.n_cached[row], n_same - 1))

    def propose(self, rows: Rows, k: int, sampler: Sampler) -> tuple:
        end = self.head.max_seq_length - 1
        self._catch_up(rows)
        # new slots of each row, the last of them for its last token; the others get padding
        n_new = [max(1, n - 1 - self.n_cached[row]) if is_drafting else 1
                 for row, n, is_drafting in zip(rows.index, rows.lengths, rows.drafting)]
        longest, last = max(n_new), to_device(n_new, rows.pos.device)[:, None] - 1     # [b, 1]
        place = torch.arange(longest, device=rows.pos.device)
        slots = rows.pos - 1 - last.view_as(rows.pos) + place              # [T] or [b, T]
        slots = slots.minimum(rows.pos).clamp(min=0)
        each = slots.expand(len(last), -1)
        tokens = rows.history.gather(1, each + 1)
        hidden, pos = self.hidden_states(rows.batch_idx, each), slots
        drafts, dists = rows.token.repeat(1, self.max_draft), []           # filled from the left
        for i in range(k):
            kv_len = self.kv_len(max(rows.lengths) - 1 + i)
            args = tokens, hidden, pos, last, kv_len, drafts, sampler, rows.batch_idx
            tokens, probs, ids, hidden = self.step(self.head, *args)
            tokens = tp.broadcast(tokens)
            drafts[:, i] = tokens[:, 0]
            dists.append((probs, ids))
            pos, last = (rows.pos + i).clamp(max=end), torch.zeros_like(last)
        # later slots are from the head's hidden states
        for row, n, is_drafting in zip(rows.index, rows.lengths, rows.drafting):
            n_cached = n - 1 if is_drafting else min(self.n_cached[row], n - 2)
            self.n_cached[row] = max(0, n_cached)
        return drafts[:, :k], *joined(dists, sampler.n_vocab)

    def _catch_up(self, rows: Rows) -> None:
        """Fill the slots of a prompt and of plain decode steps, up to the last max_draft + 1."""
        head = self.head
        calls = missing(rows, self.n_cached, 2, self.max_draft, head.longest_call)
        for which, batch_idx, slots, kv_len in calls:
            args = rows.history[which].gather(1, slots + 1), self.hidden_states(batch_idx, slots)
            if head.max_batch_size == 1:
                head(*args, slots[0], 1, kv_len)
            else:
                head(*args, slots, 1, kv_len, batch_idx)

    def hidden_states(self, batch_idx: Tensor | None, slots: Tensor) -> Tensor:
        """The model's normalized hidden states at positions slots [b, T] -> [b, T, D]."""
        states = self.model.hidden[self.model.cfg.n_layer]
        return self.model.norm(states[row_index(slots, batch_idx), slots])

    def kv_len(self, n: int) -> int:
        return bucket(n, self.head.max_seq_length, self.min_kv_len)

    def resume(self, row: int, n: int, n_new: int, k: int) -> None:
        self.n_cached[row] = max(0, n - 1 - n_new)
