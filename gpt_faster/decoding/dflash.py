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
from generate import bucket
from gpt_faster.decoding.mtp import DRAFT_VOCAB, first_rows
from gpt_faster.layers.dflash import DFlash, DFlashConfig
from model import Transformer
from sampling import Sampler, draw
from speculate import draw_draft, joined

PUBLISHED_ACCEPTANCE = 0.855                       # of each draft: 6.36 tokens a round of 15 drafts
                                                   # (Qwen3-8B on GSM8K, SGLang PR 16818)


def draft_block(draft, states, state_pos, token, pos, kv_len, sampler) -> tuple:
    """Add states [1, T, K D'] at state_pos [T] to the drafter's context, then draft a token for
    each position after the first of pos [1 + k], where token [1, 1] is -> drafts [1, k], and the
    distributions they were drawn from, probs [k, C] and ids."""
    draft.add_context(states, state_pos, kv_len)
    masks = token.new_full((1, pos.shape[0] - 1), draft.cfg.mask_id)
    logits = draft(torch.cat((token, masks), dim=1), pos, kv_len)[0]       # [k, V']
    logits = of_all_tokens(logits, draft.tokens.ids, sampler.n_vocab)
    return draw_block(logits, pos[:-1], sampler)


def of_all_tokens(logits: Tensor, ids: Tensor | None, n_vocab: int) -> Tensor:
    """Logits [k, V'] of the tokens ids [V'] (None: the first V') -> [k, n_vocab]."""
    if ids is None:
        return F.pad(logits, (0, n_vocab - logits.shape[-1]), value=-torch.inf)
    everything = logits.new_full((len(logits), n_vocab), -torch.inf)
    return everything.index_copy(1, ids.long(), logits)


def draw_block(logits: Tensor, pos: Tensor, sampler: Sampler) -> tuple:
    """Sample a token after each of pos [k] from logits [k, V] -> drafts [1, k], probs, ids."""
    if not len(sampler.processors):                # all at once
        probs, ids = sampler.distribution(sampler.processed(logits))
        drafts = draw(probs, ids, sampler.noise(slice(None), pos, ids, draft=True))
        return drafts.T, probs, ids
    drafts, dists = logits.new_zeros(1, 0, dtype=torch.int64), []
    for i in range(len(logits)):                   # penalties depend on the drafts before
        token, *dist = draw_draft(logits[i:i + 1], pos[i:i + 1], drafts, sampler)
        drafts = torch.cat((drafts, token), dim=1)
        dists.append(dist)
    return drafts, *joined(dists, sampler.n_vocab)


def state_bytes(sources: list, length: int, dtype: torch.dtype) -> int:
    """Bytes of the hidden states that the target records for DFlash drafters among the
    checkpoints, at `length` positions."""
    configs = [source.cfg for source in sources if isinstance(source.cfg, DFlashConfig)]
    return sum(length * len(set(cfg.taps)) * cfg.target_dim * dtype.itemsize for cfg in configs)


class DFlashDrafter:
    """Drafts up to block_size - 1 tokens at once."""

    min_kv_len = 256

    def __init__(self, model: Transformer, draft: DFlash, step: Callable = draft_block,
                 window: int | None = None):
        """step: draft_block, compiled or not. window: the number of states in each call of it, so
        that one graph serves all; None: those that are new. Call draft.join(model) first.

        In one CPU process the drafter uses only the first DRAFT_VOCAB rows of a large output layer
        of the target, as MTP heads do.
        """
        self.model, self.draft, self.step, self.window = model, draft, step, window
        on_cpu = model.freq.device.type == "cpu" and tp.world() == 1
        if on_cpu and not draft.cfg.own_head and model.cfg.vocab_size > 2 * DRAFT_VOCAB:
            draft.head = first_rows(model.head, DRAFT_VOCAB) or draft.head
        self.n_cached = 0                          # context positions in the drafter's cache

    def begin(self, n_same: int, max_length: int, chunk: int) -> None:
        """Start a new prompt that shares its first n_same tokens with the last one."""
        draft = self.draft
        if (draft.max_batch_size, draft.max_seq_length) != (1, max_length):
            draft.setup_cache(1, max_length, chunk)
            self.n_cached = 0
        self.model.record_hidden(*draft.cfg.taps)
        self.n_cached = min(self.n_cached, n_same)

    def find(self, history: Tensor, n: Tensor) -> Tensor | None:
        return None

    def propose(self, history: Tensor, n: int, k: int, sampler: Sampler) -> tuple:
        """Draft k tokens after the first n of history -> tokens [1, k], probs [k, C] and ids."""
        slots = torch.arange(max(n + k, self.draft.max_seq_length), device=history.device)
        a, b = self._catch_up(n - 1, slots)
        args = self.states(a, b), slots[a:b], history[:, n - 1:n], slots[n - 1:n + k]
        drafts, *dist = self.step(self.draft, *args, self.kv_len(n + k), sampler)
        self.n_cached = n - 1
        return tp.broadcast(drafts), *dist

    def _catch_up(self, end: int, slots: Tensor) -> tuple[int, int]:
        """Add the context of a prompt and of plain decode steps before `end`, up to the last few
        positions -> the range [a, b) of the positions that the next call of the step adds.

        With a fixed window the range may begin with positions that were added before, and end
        behind `end`: these are overwritten or masked.
        """
        draft = self.draft
        most = self.window or 1 + draft.cfg.block_size
        while end - self.n_cached > most:
            a = self.n_cached
            b = min(a + draft.longest_call, end - 1)
            draft.add_context(self.states(a, b), slots[a:b], b)
            self.n_cached = b
        if self.window is None:
            return self.n_cached, end
        a = min(self.n_cached, draft.max_seq_length - self.window)
        return a, a + self.window

    def states(self, a: int, b: int) -> Tensor:
        """The target's hidden states at positions [a, b): [1, b - a, K D']."""
        hidden = self.model.hidden
        return torch.cat([hidden[k][:, a:b] for k in self.draft.cfg.taps], dim=-1)

    def kv_len(self, n: int) -> int:
        return bucket(n, self.draft.max_seq_length, self.min_kv_len)

    def draft_for_timing(self, k: int, n: int, kv_len: int, sampler: Sampler) -> tuple:
        """The work of k drafts after a round that added n tokens -> probs [k, C] and ids.

        Overwrites the beginning of the cache.
        """
        n = self.window or n
        slots = torch.arange(max(n, k + 1), device=self.model.freq.device)
        args = self.states(0, n), slots[:n], slots[None, :1], slots[:k + 1]
        _, probs, ids = self.step(self.draft, *args, kv_len, sampler)
        return probs, ids

    def accepted(self, n: int, match: int | None) -> None:
        """Nothing to do: the states of accepted drafts are those that the target recorded."""
