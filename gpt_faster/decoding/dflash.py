"""Drafts a block of tokens in one call of a DFlash drafter (layers/dflash.py).

The drafter's cache holds keys and values of the target's hidden states, which the target records by
position: rejected drafts are overwritten, and a conversation's next turn reuses both. Drafts at
different positions are independent of each other, so each has its own distribution.

    draft.join(model); drafter = DFlashDrafter(model, draft)
    batch = SpeculativeBatch(model, sampler, steps, drafter, FixedLength(15), 15)
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import tp
from generate import bucket, to_device
from gpt_faster.decoding.mtp import DRAFT_VOCAB, first_rows
from gpt_faster.layers.dflash import DFlash, DFlashConfig
from model import Transformer, row_index
from sampling import Sampler, draw
from speculate import Drafter, Rows, draw_draft, joined, missing

PUBLISHED_ACCEPTANCE = 0.855                       # of each draft: 6.36 tokens a round of 15 drafts
                                                   # (Qwen3-8B on GSM8K, SGLang PR 16818)


def draft_block(draft, states, state_pos, token, pos, kv_len, sampler, batch_idx=None) -> tuple:
    """Add states [b, T, K D'] at state_pos [T] or [b, T] to the drafter's context, then draft a
    token for each position after the first of pos [1 + k] or [b, 1 + k], where token [b, 1] is ->
    drafts [b, k], and the distributions they were drawn from, probs [b, k, C] and ids."""
    draft.add_context(states, state_pos, kv_len, batch_idx)
    masks = token.new_full((len(token), pos.shape[-1] - 1), draft.cfg.mask_id)
    logits = draft(torch.cat((token, masks), dim=1), pos, kv_len, batch_idx)
    logits = of_all_tokens(logits, draft.tokens.ids, sampler.n_vocab)
    return draw_block(logits, pos[..., :-1].expand(len(token), -1), sampler, batch_idx)


def of_all_tokens(logits: Tensor, ids: Tensor | None, n_vocab: int) -> Tensor:
    """Logits [b, k, V'] of the tokens ids [V'] (None: the first V') -> [b, k, n_vocab]."""
    if ids is None:
        return F.pad(logits, (0, n_vocab - logits.shape[-1]), value=-torch.inf)
    everything = logits.new_full((*logits.shape[:2], n_vocab), -torch.inf)
    return everything.index_copy(2, ids.long(), logits)


def draw_block(logits: Tensor, pos: Tensor, sampler: Sampler,
               batch_idx: Tensor | None = None) -> tuple:
    """Sample a token after each of pos [b, k] from logits [b, k, V] -> drafts [b, k], probs
    [b, k, C], ids."""
    b, k = pos.shape
    if len(sampler.processors):                    # penalties depend on the drafts before
        drafts, dists = pos[:, :0], []
        for i in range(k):
            token, *dist = draw_draft(logits[:, i], pos[:, i:i + 1], drafts, sampler, batch_idx)
            drafts = torch.cat((drafts, token), dim=1)
            dists.append(dist)
        return drafts, *joined(dists, sampler.n_vocab)
    rows = torch.arange(b, device=pos.device) if batch_idx is None else batch_idx
    each = rows.repeat_interleave(k)                                       # [b k]
    probs, ids = sampler.distribution(sampler.processed(logits.flatten(0, 1), each), each)
    drafts = draw(probs, ids, sampler.noise(each, pos.reshape(-1, 1), ids, draft=True))
    ids = None if ids is None else ids.view(b, k, -1)
    return drafts.view(b, k), probs.view(b, k, -1), ids


def state_bytes(sources: list, length: int, dtype: torch.dtype) -> int:
    """Bytes of the hidden states that a target records of `length` positions for DFlash drafters
    among the checkpoints."""
    configs = [source.cfg for source in sources if isinstance(source.cfg, DFlashConfig)]
    return sum(length * len(set(cfg.taps)) * cfg.target_dim * dtype.itemsize for cfg in configs)


class DFlashDrafter(Drafter):
    """Drafts up to block_size - 1 tokens of each row at once."""

    min_kv_len = 256

    def __init__(self, model: Transformer, draft: DFlash, step: Callable = draft_block,
                 window: int | None = None):
        """step: draft_block, compiled or not. window: the number of states in each call of it, so
        that one graph serves all; None: as many as are new. Call draft.join(model) first.

        In one CPU process the drafter uses only the first DRAFT_VOCAB rows of a large output layer
        of the target, as MTP heads do.
        """
        self.model, self.draft, self.step, self.window = model, draft, step, window
        on_cpu = model.freq.device.type == "cpu" and tp.world() == 1
        if on_cpu and not draft.cfg.own_head and model.cfg.vocab_size > 2 * DRAFT_VOCAB:
            draft.head = first_rows(model.head, DRAFT_VOCAB) or draft.head

    def setup(self, n_row: int, max_length: int, longest_call: int) -> None:
        draft = self.draft
        length = max_length + draft.cfg.block_size             # for blocks of rows at their end
        if (draft.max_batch_size, draft.max_seq_length) != (n_row, length):
            draft.setup_cache(n_row, length, longest_call)
        self.model.record_hidden(*draft.cfg.taps)
        self.n_cached = [0] * n_row                # context positions of each row in its cache

    def begin(self, row: int, n_same: int) -> None:
        self.n_cached[row] = min(self.n_cached[row], n_same)

    def propose(self, rows: Rows, k: int, sampler: Sampler) -> tuple:
        self._catch_up(rows)
        device, b = rows.pos.device, len(rows.index)
        starts = [min(self.n_cached[row], n - 1) if is_drafting else n - 1
                  for row, n, is_drafting in zip(rows.index, rows.lengths, rows.drafting)]
        n_new = max(1, *(n - 1 - start for n, start in zip(rows.lengths, starts)))
        place = torch.arange(self.window or n_new, device=device)
        # a row's states from its last token on are padding: the block replaces or masks their keys
        first = to_device(starts, device).view_as(rows.pos)
        state_pos = first + place                                          # [T] or [b, T]
        states = self.states(rows.batch_idx, state_pos.expand(b, -1))
        pos = rows.pos + torch.arange(k + 1, device=device)
        kv_len = self.kv_len(max(rows.lengths) + k)
        drafts, *dist = self.step(self.draft, states, state_pos, rows.token, pos, kv_len, sampler,
                                  rows.batch_idx)
        for row, n, is_drafting in zip(rows.index, rows.lengths, rows.drafting):
            self.n_cached[row] = n - 1 if is_drafting else min(self.n_cached[row], n - 1)
        return tp.broadcast(drafts), *dist

    def _catch_up(self, rows: Rows) -> None:
        """Add the context of a prompt and of plain decode steps, but for the last few positions."""
        draft, most = self.draft, self.window or self.draft.cfg.block_size
        for _, batch_idx, pos, _ in missing(rows, self.n_cached, 2, most - 1, draft.longest_call):
            states = self.states(batch_idx, pos)
            if draft.max_batch_size == 1:
                draft.add_context(states, pos[0])
            else:
                draft.add_context(states, pos, None, batch_idx)

    def states(self, batch_idx: Tensor | None, pos: Tensor) -> Tensor:
        """The target's hidden states at pos [b, T] of these rows: [b, T, K D']."""
        pos = pos.clamp(max=self.model.max_seq_length - 1)
        row, hidden = row_index(pos, batch_idx), self.model.hidden
        return torch.cat([hidden[tap][row, pos] for tap in self.draft.cfg.taps], dim=-1)

    def kv_len(self, n: int) -> int:
        return bucket(n, self.draft.max_seq_length, self.min_kv_len)

    def resume(self, row: int, n: int, n_new: int, k: int) -> None:
        self.n_cached[row] = max(0, n - 1 - n_new)
