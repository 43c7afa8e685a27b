"""Drafts tokens with Gemma 4's assistant model (layers/gemma4_assistant.py).

It reads the model's KV cache, and its last hidden states, which the model records by position. It
has no cache of its own and does not read the prompt.

    batch = SpeculativeBatch(model, sampler, steps, AssistantDrafter(model, assistant), …)
"""

import torch
import torch.nn.functional as F

import tp
from generate import bucket
from gpt_faster.layers.gemma4_assistant import Assistant
from model import Transformer, row_index
from sampling import Sampler
from speculate import Drafter, Rows, draw_draft, joined


class AssistantDrafter(Drafter):
    """Drafts tokens one by one, all at the position of the last known token."""

    varies = False

    def __init__(self, model: Transformer, assistant: Assistant):
        assistant.join(model)
        self.model, self.assistant = model, assistant

    def setup(self, n_row: int, max_length: int, longest_call: int) -> None:
        self.model.record_hidden(self.model.cfg.n_layer)

    def propose(self, rows: Rows, k: int, sampler: Sampler) -> tuple:
        model, n_vocab = self.model, sampler.n_vocab
        kv_len = bucket(max(rows.lengths), model.max_seq_length)
        pos = rows.pos.view(-1, 1)
        inputs = self.assistant.inputs(pos, kv_len, rows.batch_idx)
        before = (pos - 1).clamp(min=0)            # the last token whose hidden state is known
        states = model.hidden[model.cfg.n_layer]
        hidden = model.norm(states[row_index(before, rows.batch_idx), before])
        token = rows.token
        drafts, dists = token.repeat(1, k), []     # filled from the left
        for i in range(k):
            logits, hidden = self.assistant(token, hidden, inputs, rows.batch_idx)
            logits = F.pad(logits[:, -1], (0, n_vocab - logits.shape[-1]), value=-torch.inf)
            token, *dist = draw_draft(logits, pos + i, drafts, sampler, rows.batch_idx)
            token = tp.broadcast(token)
            drafts[:, i] = token[:, 0]
            dists.append(dist)
        return drafts, *joined(dists, n_vocab)
