"""Structured output: which tokens may come next, by the library llguidance.

It owns compiling a JSON schema, a regular expression or a Lark grammar, once each, and a matcher
for each row (decoding/logits_processors.py, TokenMask). It knows no model and no request.

    grammars = Grammars(tokenizer, eos_ids)
    grammars.check(("json_schema", '{"type": "object"}'))      # ValueError says what is wrong
    matcher = grammars.matcher(spec)
"""

import json
import threading

import torch

from gpt_faster.text.chat_template import continuation_backend
from gpt_faster.text.token_bytes import token_bytes

KINDS = ("json_schema", "regex", "grammar")
INSTALL = "pip install -r requirements-serve.txt"
COMPILED_AT_MOST = 64                              # kept; the oldest goes first


def import_llguidance():
    try:
        import llguidance
    except ImportError as e:
        raise ImportError(f"structured output needs llguidance: {INSTALL}") from e
    return llguidance


class _Vocabulary:
    """What llguidance asks of a tokenizer. Special tokens are no text of any grammar's."""

    bos_token_id = None

    def __init__(self, tokenizer, n_vocab: int, eos_id: int):
        pieces = token_bytes(tokenizer)[:n_vocab]
        pieces += [None] * (n_vocab - len(pieces))
        self.eos_token_id = eos_id
        self.special_token_ids = [i for i, piece in enumerate(pieces) if piece is None]
        # llguidance's mark of a special token is a first byte that no UTF-8 has
        self.tokens = [b"\xff<special %d>" % i if piece is None else piece
                       for i, piece in enumerate(pieces)]
        self.backend = continuation_backend(tokenizer.backend)

    def __call__(self, text: str) -> list[int]:
        return self.backend.encode(text, special=False)


class Matcher:
    """A row's place in a grammar."""

    def __init__(self, matcher):
        self.matcher = matcher

    def advance(self, token_id: int) -> None:
        if not self.matcher.is_stopped():
            self.matcher.consume_token(token_id)

    def fill(self, words: torch.Tensor) -> None:
        """words int32 [V / 32], a bit for each token. A grammar that has ended, or whose limits are
        exceeded, leaves nothing to choose from: the end-of-sequence tokens alone."""
        self.matcher.unsafe_compute_mask_ptr(words.data_ptr(), 4 * words.numel())


class Grammars:
    """Compiled grammars of one vocabulary, by their kind and text."""

    def __init__(self, tokenizer, eos_ids, n_vocab: int):
        """n_vocab: the model's. ValueError where the model has no end-of-sequence token."""
        self.library = import_llguidance()
        if not eos_ids:
            raise ValueError("structured output needs an end-of-sequence token, and this model "
                             "names none")
        eos_ids = sorted(eos_ids)
        vocabulary = _Vocabulary(tokenizer, n_vocab, eos_ids[0])
        wrapper = self.library.TokenizerWrapper(vocabulary)
        self.tokenizer = self.library.LLTokenizer(wrapper, eos_token=eos_ids)
        self.compiled, self.lock = {}, threading.Lock()

    def matcher(self, spec: tuple[str, str] | None) -> Matcher | None:
        """spec: one of KINDS, and its text. ValueError says in one line what is wrong with it."""
        if spec is None:
            return None
        compiled = self.compiled.get(spec)
        if compiled is None:
            compiled = self._compile(*spec)        # takes long: others have no lock to wait for
            with self.lock:
                while len(self.compiled) >= COMPILED_AT_MOST:
                    del self.compiled[next(iter(self.compiled))]
                self.compiled[spec] = compiled
        return Matcher(compiled.deep_copy())

    check = matcher

    def _compile(self, kind: str, text: str):
        make = self.library.LLMatcher
        try:
            if kind == "json_schema":              # compact: white space could go on for ever
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
    """The spec of a schema's text. ValueError where it is no JSON object or truth value."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"not valid JSON ({e})") from None
    if not isinstance(schema, dict):
        raise ValueError("a JSON schema is an object")
    return "json_schema", json.dumps(schema)
