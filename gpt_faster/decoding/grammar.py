"""Structured output: the tokens that a grammar allows next, by the library llguidance.

Compiles each JSON schema, regular expression or Lark grammar once, and makes a matcher for each row
(decoding/logits_processors.py, TokenMask). It knows no model and no request.

    grammars = Grammars(tokenizer, eos_ids, n_vocab)
    grammars.check(("json_schema", '{"type": "object"}'))      # ValueError if invalid
    matcher = grammars.matcher(spec)
"""

import json
import threading

import torch

from gpt_faster.text.chat_template import continuation_backend
from gpt_faster.text.token_bytes import token_bytes

KINDS = ("json_schema", "regex", "grammar")
INSTALL = "pip install -r requirements-serve.txt"
MAX_COMPILED = 128                                 # cached grammars: all that wait in a queue


def import_llguidance():
    try:
        import llguidance
    except ImportError as e:
        raise ImportError(f"structured output needs llguidance: {INSTALL}") from e
    return llguidance


class _Vocabulary:
    """A tokenizer with llguidance's interface. Special tokens match no text."""

    bos_token_id = None

    def __init__(self, tokenizer, n_vocab: int, eos_id: int):
        pieces = token_bytes(tokenizer)[:n_vocab]
        pieces += [None] * (n_vocab - len(pieces))
        self.eos_token_id = eos_id
        self.special_token_ids = [i for i, piece in enumerate(pieces) if piece is None]
        # llguidance marks a special token by a first byte that is invalid in UTF-8
        self.tokens = [b"\xff<special %d>" % i if piece is None else piece
                       for i, piece in enumerate(pieces)]
        self.backend = continuation_backend(tokenizer.backend)

    def __call__(self, text: str) -> list[int]:
        return self.backend.encode(text, special=False)


class Matcher:
    """The state of one row's match against a grammar."""

    def __init__(self, matcher):
        self.matcher = matcher

    def advance(self, token_id: int) -> None:
        if not self.matcher.is_stopped():
            self.matcher.consume_token(token_id)

    def fill(self, words: torch.Tensor) -> None:
        """Set the allowed tokens' bits in words int32 [V / 32]. Only the end-of-sequence tokens
        once the match is complete, or llguidance's limits are exceeded."""
        self.matcher.unsafe_compute_mask_ptr(words.data_ptr(), 4 * words.numel())


class Grammars:
    """Compiled grammars of one vocabulary, by kind and text."""

    def __init__(self, tokenizer, eos_ids, n_vocab: int):
        """n_vocab: the model's vocabulary size. ValueError if it has no end-of-sequence token."""
        self.library = import_llguidance()
        if not eos_ids:
            raise ValueError("structured output needs an end-of-sequence token, and this model has "
                             "none")
        eos_ids = sorted(eos_ids)
        vocabulary = _Vocabulary(tokenizer, n_vocab, eos_ids[0])
        wrapper = self.library.TokenizerWrapper(vocabulary)
        self.tokenizer = self.library.LLTokenizer(wrapper, eos_token=eos_ids)
        self.compiled, self.lock = {}, threading.Lock()

    def matcher(self, spec: tuple[str, str] | None) -> Matcher | None:
        """spec: one of KINDS, and its text. ValueError if it is invalid, with one line."""
        if spec is None:
            return None
        compiled = self.compiled.get(spec) or self._compile(*spec)     # slow: outside the lock
        with self.lock:
            self.compiled.pop(spec, None)
            self.compiled[spec] = compiled         # the last one used is the last one evicted
            while len(self.compiled) > MAX_COMPILED:
                del self.compiled[next(iter(self.compiled))]
        return Matcher(compiled.deep_copy())

    check = matcher

    def _compile(self, kind: str, text: str):
        make = self.library.LLMatcher
        try:
            if kind == "json_schema":              # compact: white space could be endless
                grammar = make.grammar_from_json_schema(text, defaults=dict(
                    whitespace_flexible=False, item_separator=", ", key_separator=": "))
            elif kind == "regex":
                grammar = make.grammar_from_regex(text)
            else:
                grammar = make.grammar_from_lark(text)
            matcher = make(self.tokenizer, grammar, log_level=0)
        except ValueError as e:
            raise ValueError(f"{kind}: {e}") from None
        if matcher.is_error():
            reason = " ".join(matcher.get_error().split())
            raise ValueError(f"{kind}: {reason[:300]}")
        return matcher


def json_schema(text: str) -> tuple[str, str]:
    """The spec of a JSON schema given as text. ValueError if it is not a JSON object."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"not valid JSON ({e})") from None
    if not isinstance(schema, dict):
        raise ValueError(f"a JSON schema must be an object, got {type(schema).__name__}")
    return "json_schema", json.dumps(schema)
