"""A grammar that begins where a model's thoughts end (text/reasoning.py): these are free.

    matcher = AfterThoughts(grammars.matcher(spec), vocabulary)
    matcher.begin(prompt)                          # and so on: as decoding/grammar.py's Matcher
"""

from functools import lru_cache

import numpy as np
import torch

from gpt_faster.text.reasoning import (
    N_TAIL,
    AnswerDetokenizer,
    ThoughtFormat,
    partial_marker_length,
)
from gpt_faster.text.token_bytes import token_bytes

MAX_BLANKS = 2                                     # tokens between the thoughts and the answer


class Vocabulary:
    """Sets of a tokenizer's tokens, as the words of a mask."""

    def __init__(self, tokenizer, n_vocab: int, eos_ids, form: ThoughtFormat):
        self.tokenizer, self.n_vocab, self.form = tokenizer, n_vocab, form
        pieces = token_bytes(tokenizer)[:n_vocab]
        pieces += [None] * (n_vocab - len(pieces))
        self.pieces = [(form.shown.get(i, "").encode() or piece or b"")
                       for i, piece in enumerate(pieces)]
        ends = set(eos_ids)
        self.any = self.words(i for i in range(n_vocab) if i not in ends)
        self.whole = self.words(range(n_vocab))
        self.blank = self.words(i for i, piece in enumerate(self.pieces)
                                if piece and not piece.strip(b" \n"))
        self.none = self.words([])
        self.headers = self.words(i for i, text in form.shown.items()
                                  if text in ("<|start|>", "<|channel|>"))
        self.opening = lru_cache(256)(self._opening)
        self.not_past = lru_cache(256)(self._not_past)

    def words(self, ids) -> torch.Tensor:
        bits = np.zeros(32 * -(-self.n_vocab // 32), bool)
        bits[list(ids)] = True
        return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))

    def _opening(self, begun: str) -> torch.Tensor:
        """The tokens that continue a start marker of which this has come."""
        rests = [start[len(begun):].encode() for start in self.form.pairs if
                 start.startswith(begun)]
        return self.words(i for i, piece in enumerate(self.pieces) if piece and any(
            rest.startswith(piece) or piece.startswith(rest) for rest in rests if rest))

    def _not_past(self, rest: str) -> torch.Tensor:
        """All tokens but those that end the answer, or go on after the rest of an end marker."""
        rest = rest.encode()
        past = {i for i, piece in enumerate(self.pieces)
                if piece.startswith(rest) and piece[len(rest):].strip()}
        return self.any & ~self.words(past)


class AfterThoughts:
    """Allows any token in the thoughts, but none that ends the answer; then what the grammar does.

    A model that need not think may begin with the answer.
    """

    def __init__(self, matcher, vocabulary: Vocabulary):
        """matcher: as decoding/grammar.py's, in its first state."""
        self.matcher, self.vocabulary = matcher, vocabulary
        self.has_begun, self.n_blank = False, 0

    def begin(self, prompt: list[int]) -> None:
        form = self.vocabulary.form
        self.detokenizer = AnswerDetokenizer(self.vocabulary.tokenizer, prompt, form)
        self.splitter = self.detokenizer.splitter
        tail = self.detokenizer.text_of(prompt[-N_TAIL:]).rstrip()
        self.is_closed = tail.endswith(tuple(form.pairs.values()))    # thinking is off

    def advance(self, token_id: int) -> None:
        if self.has_begun:
            self.matcher.advance(token_id)
            return
        may_begin = self._may_begin()
        self.detokenizer.push(token_id)
        if may_begin and self.splitter.state != "thinking":
            self.has_begun = self.matcher.try_advance(token_id)
            self.n_blank += self.splitter.state == "between"

    def fill(self, words: torch.Tensor) -> None:
        if self.has_begun:
            self.matcher.fill(words)
            return
        words[:] = 0
        if self._may_begin():
            self.matcher.fill(words)
        words |= self._free()

    def _may_begin(self) -> bool:
        """Whether the answer may begin with the next token."""
        if self.vocabulary.form.is_harmony:
            return self.splitter.state == "body" and self.splitter.kind == "final"
        return self.splitter.state in ("start", "between") and not self.splitter.buffer

    def _free(self) -> torch.Tensor:
        """The tokens that are allowed beside the grammar's."""
        vocabulary, splitter = self.vocabulary, self.splitter
        if vocabulary.form.is_harmony:
            return self._free_in_harmony()
        if splitter.state == "thinking":
            n = partial_marker_length(splitter.buffer, [splitter.end])
            return vocabulary.not_past(splitter.end[n:])
        if splitter.state == "between":
            return vocabulary.blank if self.n_blank < MAX_BLANKS else vocabulary.none
        return vocabulary.none if self.is_closed else vocabulary.opening(splitter.buffer.strip())

    def _free_in_harmony(self) -> torch.Tensor:
        vocabulary, splitter = self.vocabulary, self.splitter
        if splitter.state == "open":               # no text without a header
            return vocabulary.any if splitter.buffer else vocabulary.headers
        if splitter.state == "body" and splitter.kind == "final":
            return vocabulary.none
        is_call = splitter.state == "body" and splitter.kind == "call"
        return vocabulary.whole if is_call else vocabulary.any
