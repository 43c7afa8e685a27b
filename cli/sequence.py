"""Sequence: what one prompt has got so far, its ids and text, and when it stops.

    sequence = Sequence(tokenizer, prompt_ids, eos_ids={2}, stops=["\\n\\n"], max_new=100)
    while not sequence.finish_reason: print(sequence.push(next_id), end="")
"""

from tokenizer import Detokenizer


def n_common(a: list[int], b: list[int]) -> int:
    """How many ids two lists begin with alike."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i, pair in enumerate(zip(a, b)) if pair[0] != pair[1])


def n_common_end(text: str, stop: str) -> int:
    """How many characters of `stop`, but not all, the text ends with."""
    start = max(0, len(text) - len(stop) + 1)
    at = text.find(stop[0], start)
    while at >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at = text.find(stop[0], at + 1)
    return 0


class Sequence:
    """One sequence of a batch: collects its new ids and text, knows when to stop.

    finish_reason: "stop", an end-of-sequence token or a stop string, "length", after max_new ids,
    or what finish() was told; None: not yet.
    """

    def __init__(self, tokenizer, prompt_ids: list[int], eos_ids: set[int] = frozenset(),
                 stops: list[str] = (), max_new: int | None = None):
        self.detokenizer, self.prompt_ids = Detokenizer(tokenizer, prompt_ids), prompt_ids
        self.eos_ids, self.stops, self.max_new = eos_ids, stops, max_new
        self.ids, self.text, self.shown, self.finish_reason = [], "", 0, None

    def push(self, token_id: int) -> str:
        """-> text to show now. What may turn out to be the beginning of a stop string waits."""
        if self.finish_reason:
            return ""
        self.ids.append(token_id)
        if token_id in self.eos_ids:
            return self.finish("stop")
        searched = max(0, len(self.text) - max(map(len, self.stops), default=0))
        self.text += self.detokenizer.push(token_id)
        found = [at for at in (self.text.find(s, searched) for s in self.stops) if at >= 0]
        if found:
            self.text, self.finish_reason = self.text[:min(found)], "stop"
            return self._show(len(self.text))
        if len(self.ids) == self.max_new:
            return self.finish("length")
        n_begun = max((n_common_end(self.text, s) for s in self.stops), default=0)
        return self._show(len(self.text) - n_begun)

    def finish(self, reason: str) -> str:
        """-> what was still held back."""
        if self.finish_reason is None:
            self.finish_reason = reason
            self.text += self.detokenizer.flush()
        return self._show(len(self.text))

    def _show(self, end: int) -> str:
        piece, self.shown = self.text[self.shown:end], max(self.shown, end)
        return piece
