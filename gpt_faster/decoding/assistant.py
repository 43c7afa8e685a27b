"""Drafts by Gemma 4's own drafter (layers/gemma4_assistant.py), which reads the model's keys.

It needs the model's hidden state before the last token: the model's calls are listened to where
they end. It has no cache, and nothing of a prompt to read.

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


class HiddenStateRecorder:
    """In place of a model's unembed: keeps what it was called with."""

    def __init__(self, model: Transformer):
        self.unembed, self.x = model.unembed, None

    def __call__(self, x: Tensor) -> Tensor:
        self.x = x
        return self.unembed(x)


class AssistantDrafter:
    """Each draft follows from the one before it, at the same position."""

    def __init__(self, model: Transformer, assistant: Assistant):
        assistant.join(model)
        self.model, self.assistant = model, assistant
        self.first = 0                             # position of the last call's first token

    def begin(self, n_same: int, max_length: int, chunk: int) -> None:
        """A new prompt; by now the model is compiled, if it is."""
        if not isinstance(self.model.unembed, HiddenStateRecorder):
            self.model.unembed = HiddenStateRecorder(self.model)

    def find(self, history: Tensor, n: Tensor) -> Tensor | None:
        return None

    def propose(self, history: Tensor, n: int, k: int, sampler: Sampler) -> tuple:
        """What follows the first n tokens of history -> tokens [1, k], probs [k, C] and ids."""
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
        self.first = n - 1                         # the next call's, which verifies these
        return drafts, *joined(dists, n_vocab)

    def hidden_before(self, n: int) -> Tensor:
        """Of the position before the last of n tokens [1, 1, D], behind the last norm."""
        x = self.model.unembed.x
        at = 0 if x.shape[1] == 1 else n - 2 - self.first
        return self.model.norm(x[:, at:at + 1].to(self.model.dtype))

    def accepted(self, n: int, at: int | None) -> None:
        """The drafts that do not hold were nowhere but in the model's cache."""
