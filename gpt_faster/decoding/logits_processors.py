"""Logits processors of requests: logprobs, count penalties, logit bias, grammar mask.

The interface is sampling.Processor; sampling.RepetitionPenalty is the simplest example.
"""

import torch
from torch import Tensor

from sampling import Processor, counts_so_far


class LogitsRecorder(Processor):
    """Records the model's logits for logprobs, unchanged. Must be the first processor.

    Used by rows with params.logprobs. logits [n_row, n_place, V]: of one token of each row, or of a
    round of drafts.
    """

    def __init__(self, n_row: int, n_place: int, n_vocab: int, device):
        super().__init__()
        self.register_buffer("logits", torch.zeros(n_row, n_place, n_vocab, device=device))

    def begin(self, row: int, prompt: list[int], params) -> None:
        self.use(row, getattr(params, "logprobs", False))

    def forward(self, logits: Tensor, rows, draft_tokens: Tensor | None = None) -> Tensor:
        n_place = 1 if draft_tokens is None else len(logits) // len(draft_tokens)
        if draft_tokens is None:
            self.logits[rows, 0] = logits
        elif n_place > 1:                          # a verification; a drafter's logits have 1 place
            self.logits[rows[::n_place], :n_place] = logits.unflatten(0, (-1, n_place))
        return logits


class CountPenalty(Processor):
    """OpenAI's presence_penalty (once per token) and frequency_penalty (per occurrence).

    As in OpenAI's reference, prompt tokens do not count.
    """

    def __init__(self, n_row: int, n_vocab: int, device):
        super().__init__()
        for name in ("presence", "frequency"):
            self.register_buffer(name, torch.zeros(n_row, 1, device=device))
        self.register_buffer("count", torch.zeros(n_row, n_vocab, device=device))

    def begin(self, row: int, prompt: list[int], params) -> None:
        for name in ("presence", "frequency"):
            getattr(self, name)[row] = getattr(params, f"{name}_penalty", 0.0)
        self.use(row, bool(self.presence[row] != 0 or self.frequency[row] != 0))
        self.count[row] = 0

    def observe(self, token: Tensor, rows: Tensor | None = None) -> None:
        if rows is None:
            self.count.scatter_add_(1, token, torch.ones_like(token, dtype=self.count.dtype))
        else:
            self.count[rows[:, None], token] += 1

    def forward(self, logits: Tensor, rows, draft_tokens: Tensor | None = None) -> Tensor:
        """As RepetitionPenalty.forward()."""
        count = self.count[rows]
        if draft_tokens is not None:
            count = count + counts_so_far(draft_tokens, *logits.shape)
        return logits - self.frequency[rows] * count - self.presence[rows] * (count > 0)


class LogitBias(Processor):
    """Adds params.logit_bias, pairs (id, bias), to the logits."""

    def __init__(self, n_row: int, n_vocab: int, device):
        super().__init__()
        self.register_buffer("bias", torch.zeros(n_row, n_vocab, device=device))

    def begin(self, row: int, prompt: list[int], params) -> None:
        pairs = getattr(params, "logit_bias", ())
        if row in (self.users or ()):
            self.bias[row] = 0
        self.use(row, bool(pairs))
        for i, value in pairs:
            self.bias[row, i] = value

    def forward(self, logits: Tensor, rows, draft_tokens: Tensor | None = None) -> Tensor:
        return logits + self.bias[rows]


class TokenMask(Processor):
    """Masks all tokens that a row's grammar does not allow next.

    Its rows have no drafts: the mask after a draft would need the draft on the host.

    One bit per token, in a buffer at a fixed address that a compiled step can read. A matcher has
    begin(prompt), advance(id) and fill(words), which writes the bits of the next token. It needs
    the last token on the host, so a GPU synchronizes in each step while some row has a grammar.
    """

    follows_drafts = False

    def __init__(self, n_row: int, n_vocab: int, device, matcher_of):
        """matcher_of(params) -> a matcher, or None."""
        super().__init__()
        n_word = -(-n_vocab // 32)
        self.matcher_of, self.matchers = matcher_of, {}
        self.words = torch.full((n_row, n_word), -1, dtype=torch.int32)    # on the host
        self.register_buffer("allowed", self.words.to(device, copy=True))
        self.register_buffer("bit", torch.arange(32, dtype=torch.int32, device=device))

    def begin(self, row: int, prompt: list[int], params) -> None:
        self.end(row)
        matcher = self.matcher_of(params)
        self.use(row, matcher is not None)
        if matcher:
            self.matchers[row] = matcher
            matcher.begin(prompt)
            matcher.fill(self.words[row])
            self.allowed[row] = self.words[row].to(self.allowed.device)

    def end(self, row: int) -> None:
        """On a CPU the row's last token would be observed in each of the other rows' steps."""
        if self.matchers.pop(row, None):
            self.words[row] = -1
            self.allowed[row] = self.words[row].to(self.allowed.device)

    def observe(self, token: Tensor, rows: Tensor | None = None) -> None:
        if not self.matchers:
            return
        index = range(len(token)) if rows is None else rows.tolist()
        places = [i for i, row in enumerate(index) if row in self.matchers]
        if not places:
            return
        rows = [index[i] for i in places]
        for row, i in zip(rows, token[places, 0].tolist()):
            self.matchers[row].advance(i)
            self.matchers[row].fill(self.words[row])
        self.allowed[rows] = self.words[rows].to(self.allowed.device)

    def forward(self, logits: Tensor, rows, draft_tokens: Tensor | None = None) -> Tensor:
        allowed = (self.allowed[rows][..., None] >> self.bit) & 1          # [b, words, 32]
        allowed = allowed.flatten(1)[:, :logits.shape[1]]
        return torch.where(allowed > 0, logits, -torch.inf)
