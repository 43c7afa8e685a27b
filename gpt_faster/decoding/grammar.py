"""Structured output: the tokens that a grammar allows next, by the library llguidance.

Compiles each JSON schema, regular expression or Lark grammar once, and makes a matcher for each row
(decoding/logits_processors.py, TokenMask). It knows no model and no request.

    grammars = Grammars(tokenizer, eos_ids, n_vocab)
    grammars.check(("json_schema", '{"type": "object"}'))      # ValueError if invalid
    matcher = grammars.matcher(spec)
"""

import json
import re
import threading

import torch

from generate import log
from gpt_faster.decoding.after_thoughts import AfterThoughts, Vocabulary
from gpt_faster.decoding.json_schema import rewrite, rewrite_in_lark
from gpt_faster.text.chat_template import continuation_backend
from gpt_faster.text.reasoning import ThoughtFormat
from gpt_faster.text.token_bytes import token_bytes

KINDS = ("json_schema", "regex", "grammar")
INSTALL = "pip install -r requirements-serve.txt"
MAX_COMPILED = 256                                 # cached grammars; one long unused goes first
MAX_TEXT = {"regex": 4000, "grammar": 20_000}      # characters: llguidance needs up to 3 s
OVERLAP = '"oneOf" is supported if no value can match two of its options'
STACK = 512 << 20                                  # bytes: llguidance recurses along references


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

    def begin(self, prompt: list[int]) -> None:
        """The answer follows this prompt, which the grammar does not depend on."""

    def advance(self, token_id: int) -> None:
        if not self.matcher.is_stopped():
            self.matcher.consume_token(token_id)

    def try_advance(self, token_id: int) -> bool:
        """Whether the grammar allows the token; advances if so."""
        return self.matcher.try_consume_tokens([token_id]) == 1

    def fill(self, words: torch.Tensor) -> None:
        """Set the allowed tokens' bits in words int32 [V / 32]. Only the end-of-sequence tokens
        once the match is complete. ValueError if llguidance's limits are exceeded."""
        self.matcher.unsafe_compute_mask_ptr(words.data_ptr(), 4 * words.numel())
        if self.matcher.is_error():                # else an incomplete text would end here
            raise ValueError(f"the grammar cannot go on: {self.matcher.get_error()[:300]}")


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
        self.vocabulary_args, self.vocabulary = (tokenizer, n_vocab, eos_ids), None

    def matcher(self, spec: tuple[str, str] | None) -> Matcher | None:
        """spec: one of KINDS, and its text. ValueError if it is invalid, with one line."""
        if spec is None:
            return None
        with self.lock:
            compiled = self.compiled.pop(spec, None)
            if compiled is not None:
                self.compiled[spec] = compiled     # the last one used
        if compiled is None:                       # slow, so outside the lock
            compiled = with_deep_stack(lambda: self._compile(*spec))
            with self.lock:
                while len(self.compiled) >= MAX_COMPILED:
                    del self.compiled[next(iter(self.compiled))]
                self.compiled[spec] = compiled
        return Matcher(compiled.deep_copy())

    check = matcher

    def matcher_after_thoughts(self, spec: tuple[str, str], form: ThoughtFormat) -> AfterThoughts:
        """A matcher for the answer of a model that may think first."""
        if self.vocabulary is None or self.vocabulary.form != form:
            self.vocabulary = Vocabulary(*self.vocabulary_args, form)
        return AfterThoughts(self.matcher(spec), self.vocabulary)

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
            reason = re.sub("^panic: .*", "the grammar is too large", reason)
            reason = re.sub("^oneOf constraints are not supported.*", OVERLAP, reason)
            raise ValueError(f"{kind}: {reason[:300]}")
        return matcher


def with_deep_stack(function):
    """function() in a thread of its own, whose stack bears a long chain of references."""
    results = []

    def run():
        try:
            results.append((function(), None))
        except Exception as e:
            results.append((None, e))
    with STACK_LOCK:                               # the size is the process's
        before = threading.stack_size(STACK)
        try:
            thread = threading.Thread(target=run, daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    [(value, error)] = results
    if error is not None:
        raise error
    return value


STACK_LOCK = threading.Lock()


def regex(text: str) -> tuple[str, str]:
    return "regex", of_limited_size("regex", text)


def lark(text: str) -> tuple[str, str]:
    """The spec of a grammar in llguidance's dialect of Lark. ValueError if a %json is invalid."""
    return "grammar", rewrite_in_lark(of_limited_size("grammar", text))


def of_limited_size(kind: str, text: str) -> str:
    if len(text) > MAX_TEXT[kind]:
        raise ValueError(f"{kind}: at most {MAX_TEXT[kind]:,} characters are supported")
    return text


def json_schema(text: str) -> tuple[str, str]:
    """The spec of a JSON schema given as text. ValueError if it is not a JSON object."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"not valid JSON ({e})") from None
    if not isinstance(schema, dict):
        raise ValueError(f"a JSON schema must be an object, got {type(schema).__name__}")
    document, notes = rewrite(schema)
    for note in notes[:1]:
        log(f"note: {note}")
    return "json_schema", json.dumps(document)
