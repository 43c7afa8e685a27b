"""The two libraries that tokenize, in one shape: tokenizers and sentencepiece.

A backend encodes plain text with or without special tokens, decodes, and says what its data say of
the beginning and the end of a sequence. It decides nothing: tokenizer.py does.
"""

import base64
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

from formats.messages import first_line

SLOWEST = 0.25                                     # seconds for a short text: a thousand times ours
LONG = 10_000                                      # characters


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


class SentencePieceBackend:
    """data: a model's bytes; control: id -> text of the tokens that are no text, if known."""

    kind = "sentencepiece"
    adds_bos = True

    def __init__(self, data: bytes, control: dict[int, str] | None = None):
        from sentencepiece import SentencePieceProcessor
        try:
            self.processor = SentencePieceProcessor(model_proto=data)
        except RuntimeError as e:
            raise ValueError(f"not a readable SentencePiece model: {str(e).strip()}") from None
        processor = self.processor
        self.data = data
        self.n_vocab = processor.get_piece_size()
        self.bos_id = processor.bos_id() if processor.bos_id() >= 0 else None
        self.eos_ids = [i for i in [processor.eos_id()] if i >= 0]
        try:
            self.control = control or {i: processor.id_to_piece(i) for i in range(self.n_vocab)
                                       if processor.is_control(i)}
        except UnicodeDecodeError:
            raise ValueError("a SentencePiece model with tokens that are no UTF-8") from None
        self.ids = {text: i for i, text in self.control.items()}
        names = sorted(self.ids, key=len, reverse=True)
        self.names = names
        self.pattern = re.compile("(" + ("|".join(map(re.escape, names)) or "(?!)") + ")")

    def encode(self, text: str, special: bool) -> list[int]:
        """special: whether "<s>" and the like are tokens, not text."""
        if not special or not self.names:
            return self.processor.encode(text)
        ids = []
        for piece in self.pattern.split(text):
            ids += [self.ids[piece]] if piece in self.ids else self.processor.encode(piece)
        return ids

    def decode(self, ids: list[int]) -> str:
        known = [i for i in ids if i < self.n_vocab and i not in self.control]
        with library("a SentencePiece model of UTF-8"):
            return self.processor.decode(known)

    def piece(self, i: int) -> str | None:
        with library("a SentencePiece model of UTF-8"):
            return self.processor.id_to_piece(i)

    def special_tokens(self) -> tuple[list[str], re.Pattern]:
        """The longest first; and what matches any."""
        return self.names, self.pattern

    def continued(self) -> "SentencePieceBackend":
        return self

    def state(self) -> str:
        return base64.b64encode(self.data).decode()
