"""Drafts tokens with Gemma 4's assistant model (layers/gemma4_assistant.py).

It reads the model's KV cache and its last layer's hidden states, which the model records by
position. It has no cache of its own and does not read the prompt.

    batch = SpeculativeBatch(model, sampler, steps, AssistantDrafter(model, assistant), …)
"""

import torch
import torch.nn.functional as F
from torch import Tensor

import tp
from generate import bucket
from gpt_faster.layers.gemma4_assistant import Assistant
from model import Transformer
from sampling import Sampler
from speculate import draw_draft, joined


class AssistantDrafter:
    """Drafts tokens one by one, all at the position of the last known token."""

    def __init__(self, model: Transformer, assistant: Assistant):
        assistant.join(model)
        self.model, self.assistant = model, assistant

    def begin(self, n_same: int, max_length: int, chunk: int) -> None:
        """Start a new prompt."""
        self.model.record_hidden(self.model.cfg.n_layer)

    def find(self, history: Tensor, n: Tensor) -> Tensor | None:
        return None

    def propose(self, history: Tensor, n: int, k: int, sampler: Sampler) -> tuple:
        """Draft k tokens after the first n of history -> tokens [1, k], probs [k, C] and ids."""
        model, n_vocab = self.model, sampler.n_vocab
        kv_len = bucket(n, model.max_seq_length)
        inputs = self.assistant.inputs(torch.tensor([n - 1], device=history.device), kv_len)
        hidden, token = self.hidden_before(n), history[:, n - 1:n]
        drafts, dists = token.repeat(1, k), []     # filled from the left
        for i in range(k):
            logits, hidden = self.assistant(token, hidden, inputs)
            logits = F.pad(logits[:, -1], (0, n_vocab - logits.shape[-1]), value=-torch.inf)
            token, *dist = draw_draft(logits, inputs[0][1] + i, drafts, sampler)
            token = tp.broadcast(token)
            drafts[:, i] = token[:, 0]
            dists.append(dist)
        return drafts, *joined(dists, n_vocab)

    def hidden_before(self, n: int) -> Tensor:
        """The normalized hidden state [1, 1, D] of the token before the last of n tokens."""
        return self.model.norm(self.model.hidden[self.model.cfg.n_layer][:, n - 2:n - 1])

    def accepted(self, n: int, match: int | None) -> None:
        """Nothing to do: rejected drafts are in the model's cache only."""
