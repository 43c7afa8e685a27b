"""Drafts tokens with an EAGLE-3 drafter (layers/eagle3.py), which reads the model's hidden states.

As an MTP head: slot p of its cache holds the token at p + 1 with the state at p. States of known
tokens are fused from the model's hidden states; drafts continue from the drafter's own states.

    eagle.join(model); drafter = Eagle3Drafter(model, eagle)
    batch = SpeculativeBatch(model, sampler, steps, drafter, …)
"""

from collections.abc import Callable

from torch import Tensor

from gpt_faster.decoding.mtp import MTPDrafter, draft_one_token
from gpt_faster.layers.eagle3 import Eagle3
from model import Transformer, row_index

MAX_DRAFT = 5
PUBLISHED_ACCEPTANCE = 0.79                        # of each draft: 2.9 tokens a round of 3 drafts


class Eagle3Drafter(MTPDrafter):
    """Drafts a chain of tokens: the first from the model's hidden states."""

    def __init__(self, model: Transformer, eagle: Eagle3, step: Callable = draft_one_token,
                 max_draft: int = MAX_DRAFT):
        """step: mtp.draft_one_token, compiled or not. Call eagle.join(model) first."""
        super().__init__(model, eagle, step, max_draft)

    def record(self) -> None:
        self.model.record_hidden(*self.head.target_layers)

    def hidden_states(self, batch_idx: Tensor | None, slots: Tensor) -> Tensor:
        """The first states at positions slots [b, T] -> [b, T, D]."""
        row = row_index(slots, batch_idx)
        states = [self.model.hidden[k][row, slots] for k in self.head.target_layers]
        if self.head.fc is None:
            states = [self.model.norm(states[0])]
        return self.head.features(states)
