"""The two libraries that tokenize, in one shape: tokenizers and sentencepiece.

A backend encodes plain text with or without special tokens, decodes, and says what its data say of
the beginning and the end of a sequence. It decides nothing: tokenizer.py does.
"""

import base64
import copy
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple
from functools import cached_property

from checkpoint import first_line
from formats.added_tokens import AddedToken

SLOWEST = 0.25                                     # seconds for a short text: a thousand times ours
LONG = 10_000                                      # characters
NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"              # normalizer_spec { add_dummy_prefix: false }
BEFORE = "<unk>"                                   # any letters that no piece joins with a space


@contextmanager
def library(what: str) -> Iterator[None]:
    """tokenizers raises bare Exceptions, and panics where a regular expression takes too long."""
    try:
        yield
    except BaseException as e:
        foreseen = type(e) is Exception or isinstance(e, UnicodeError)
        if not foreseen and type(e).__name__ != "PanicException":
            raise
        raise ValueError(f"not {what}: {first_line(e)}") from None


class TokenizersBackend:
    """Hugging Face's tokenizers; data: the text of a tokenizer.json, or what it made of one."""

    kind = "json"

    def __init__(self, data):
        from tokenizers import Tokenizer
        with library("a readable tokenizer.json"):
            self.fast = Tokenizer.from_str(data) if isinstance(data, str) else data
        self.data = data
        self._continued = None
        self.control = {}                          # it finds them by itself
        self.eos_ids = []
        self.n_vocab = self.fast.get_vocab_size()
        self.fast.no_truncation()                  # fine-tuning scripts leave these behind
        self.fast.no_padding()
        prefix = self._prefix()
        self.bos_id = prefix[0] if prefix else None
        self.adds_bos = bool(prefix)

    def _prefix(self) -> list[int]:
        """What its post-processor puts first."""
        with library("a tokenizer.json that encodes"):
            plain, whole = (self.fast.encode("a", add_special_tokens=s).ids
                            for s in (False, True))
        starts = [i for i in range(len(whole)) if whole[i:i + len(plain)] == plain]
        return whole[:starts[0]] if starts else []

    def check_speed(self) -> None:
        """ValueError where its regular expressions take longer and longer for longer texts.

        Each doubling is tried for itself, so that this ends where they do not.
        """
        for sign in (" ", "a", "1", "\n", "!"):
            for n in (32, 64, 128, 256):
                start = time.perf_counter()
                self.encode(sign * n + "~é", special=True)
                took = time.perf_counter() - start
                if took > SLOWEST:
                    raise ValueError(f"its regular expressions take {took:.1f} seconds to split "
                                     f"{n} times {sign!r}")

    def encode(self, text: str, special: bool) -> list[int]:
        """special: whether "<s>" and the like are tokens, not text."""
        fast = self.fast if special else self.plain
        with library("a tokenizer that encodes this text"):
            if len(text) < LONG:
                return fast.encode(text, add_special_tokens=False).ids
            [encoding] = fast.encode_batch_fast([text], add_special_tokens=False)
            return encoding.ids                    # encode() would keep the GIL all the time

    @cached_property
    def plain(self):
        """A copy that reads "<s>" as text. What is changed while another thread encodes raises, so
        nothing is changed after it is made."""
        from tokenizers import Tokenizer
        with library("a readable tokenizer.json"):
            plain = Tokenizer.from_str(self.fast.to_str())
        plain.encode_special_tokens = True
        return plain

    def decode(self, ids: list[int]) -> str:
        return self.fast.decode(ids, skip_special_tokens=True)

    def piece(self, i: int) -> str | None:
        return self.fast.id_to_token(i)

    def id_of(self, text: str) -> int | None:
        return self.fast.token_to_id(text)

    def special_tokens(self) -> tuple[list[str], re.Pattern]:
        """The longest first; and what matches any, with spaces that it swallows."""
        tokens = [t for t in self.fast.get_added_tokens_decoder().values() if t.special]
        tokens.sort(key=lambda t: -len(t.content))
        names = []
        for t in tokens:
            before = r"\s*" if t.lstrip else ""
            after = r"\s*" if t.rstrip else ""
            names.append(before + re.escape(t.content) + after)
        return [t.content for t in tokens], re.compile("(" + "|".join(names) + ")")

    def continued(self) -> "TokenizersBackend":
        """For text that goes on: some put a space in front of the first piece only."""
        if self._continued is None:
            data = re.sub(r'("prepend_scheme":\s*)"first"', r'\1"never"', self.state())
            self._continued = self if data == self.state() else TokenizersBackend(data)
        return self._continued

    def state(self) -> str:
        return self.data if isinstance(self.data, str) else self.data.to_str()

    def more_state(self) -> dict:
        return dict(control=self.control)


class SentencePieceBackend:
    """data: a model's bytes; control: id -> text of the tokens that are no text, if known.

    added: tokens beside the model's pieces, or instead of some; text between them is encoded piece
    by piece. after_space: each such text begins with the model's space (legacy in transformers, and
    llama.cpp), else only the first one does.
    """

    kind = "sentencepiece"
    adds_bos = True

    def __init__(self, data: bytes, control: dict[int, str] | None = None,
                 added: list[AddedToken] = (), after_space: bool = True):
        from sentencepiece import SentencePieceProcessor
        try:
            self.processor = SentencePieceProcessor(model_proto=data)
            self.continuing = SentencePieceProcessor(model_proto=data + NO_DUMMY_PREFIX)
        except RuntimeError as e:
            raise ValueError(f"not a readable SentencePiece model: {str(e).strip()}") from None
        processor = self.processor
        self.data, self.added, self.after_space = data, list(added), after_space
        self.at_start = True                       # of a text: False for what goes on
        self.n_piece = processor.get_piece_size()
        self.n_vocab = max([self.n_piece, *(t.id + 1 for t in added)])
        self.bos_id = processor.bos_id() if processor.bos_id() >= 0 else None
        self.eos_ids = [i for i in [processor.eos_id()] if i >= 0]
        try:
            control = control or {i: processor.id_to_piece(i) for i in range(self.n_piece)
                                  if processor.is_control(i)}
        except UnicodeDecodeError:
            raise ValueError("a SentencePiece model with tokens that are no UTF-8") from None
        self.texts = {t.id: t.text for t in added}
        tokens = {text: AddedToken(i, text) for i, text in control.items() if i not in self.texts}
        tokens |= {t.text: t for t in added}
        self.control = {t.id: text for text, t in tokens.items() if t.special}
        self.ids = {text: t.id for text, t in tokens.items()}
        self.names = sorted(tokens, key=len, reverse=True)
        self.special_names = [text for text in self.names if tokens[text].special]
        self.pattern = _pattern(tokens, self.names)
        self.special_pattern = _pattern(tokens, self.special_names)
        self.plain_pattern = _pattern(tokens, [t for t in self.names if not tokens[t].special])

    def encode(self, text: str, special: bool) -> list[int]:
        """special: whether "<s>" and the like are tokens, not text."""
        pattern = self.pattern if special else self.plain_pattern
        ids, end = [], 0
        for match in pattern.finditer(text):
            ids += self._encode_between(text[end:match.start()], end == 0)
            ids.append(self.id_of(match[0]))
            end = match.end()
        return ids + self._encode_between(text[end:], end == 0)

    def _encode_between(self, text: str, is_first: bool) -> list[int]:
        """Text before, between or behind added tokens."""
        if self.after_space or is_first and self.at_start:
            return self.processor.encode(text)
        if not text.startswith((" ", "\N{LOWER ONE EIGHTH BLOCK}")):
            return self.continuing.encode(text)
        n = len(self.continuing.encode(BEFORE))    # a model's normalizer may strip a first space
        return self.continuing.encode(BEFORE + text)[n:]

    def id_of(self, text: str) -> int | None:
        """Of a token, which a match may have with the spaces that it swallows."""
        if text in self.ids:
            return self.ids[text]
        name = next((name for name in self.names if name in text), None)
        if name is not None:
            return self.ids[name]
        i = self.processor.piece_to_id(text)
        return i if self.processor.id_to_piece(i) == text else None

    def decode(self, ids: list[int]) -> str:
        runs, texts = [[]], []                     # of pieces; of added tokens, one behind each run
        for i in ids:
            if i in self.control or i not in self.texts and i >= self.n_piece:
                continue
            if i in self.texts:
                texts.append(self.texts[i])
                runs.append([])
            else:
                runs[-1].append(i)
        with library("a SentencePiece model of UTF-8"):
            text = self.processor.decode(runs[0])
            for added, run in zip(texts, runs[1:]):
                text += added + self.continuing.decode(run)
        return text

    def piece(self, i: int) -> str | None:
        if i in self.texts or i >= self.n_piece:
            return self.texts.get(i)
        with library("a SentencePiece model of UTF-8"):
            return self.processor.id_to_piece(i)

    def special_tokens(self) -> tuple[list[str], re.Pattern]:
        """The longest first; and what matches any, with spaces that it swallows."""
        return self.special_names, self.special_pattern

    def continued(self) -> "SentencePieceBackend":
        """For text that goes on."""
        if self.after_space:
            return self
        later = copy.copy(self)
        later.at_start = False
        return later

    def state(self) -> str:
        return base64.b64encode(self.data).decode()

    def more_state(self) -> dict:
        """Beside the model's bytes: what a directory's other files say."""
        return dict(control=self.control, after_space=self.after_space,
                    added=[list(astuple(t)) for t in self.added])


def _pattern(tokens: dict[str, AddedToken], names: list[str]) -> re.Pattern:
    """Matches any of these tokens, with the spaces that it swallows."""
    parts = []
    for name in names:
        t = tokens[name]
        part = re.escape(name)
        if t.single_word:
            part = rf"(?<!\w){part}(?!\w)"
        parts.append((r"\s*" if t.lstrip else "") + part + (r"\s*" if t.rstrip else ""))
    return re.compile("(" + ("|".join(parts) or "(?!)") + ")")
