"""Chat templates: rendered in a sandbox, and encoded so that no message forges a special token.

    text = render(tokenizer, messages)             # messages: [{role, content}, …]
    ids = encode_chat(tokenizer, messages)         # the message's "<|im_end|>" is text
"""

import datetime
import json
import re
from copy import copy
from functools import lru_cache

from checkpoint import first_line
from tokenizer import (
    AddedToken,
    SentencePieceBackend,
    Tokenizer,
    TokenizersBackend,
    token_pattern,
)

Backend = TokenizersBackend | SentencePieceBackend
ESCAPE = "\ufdd0"                                  # not a character, by Unicode's promise
FIRST_PLACEHOLDER = 0xf0000                               # of the characters that stand for tokens


class TemplateError(ValueError):
    """A template that does not render these messages."""


class TemplateRefusal(TemplateError):
    """What a template says by raise_exception()."""


def render(tokenizer: Tokenizer, messages: list[dict], /, **more) -> str:
    """The chat template's text for messages [{role, content}], ready for the next answer.

    In jinja2's sandbox, with what transformers gives a template, and an end (sandbox.py).
    TemplateError where it refuses, or goes wrong.
    """
    from gpt_faster.text.sandbox import render as render_limited
    try:
        more = dict(add_generation_prompt=True, tools=None, documents=None) | tokenizer.names | more
        return render_limited(_compiled(tokenizer.chat_template), messages=messages, **more)
    except TemplateRefusal:
        raise
    except Exception as e:                         # its expressions may raise anything
        raise TemplateError(f"the chat template does not render: {first_line(e)}") from None


@lru_cache(8)
def _compiled(template: str):
    """A jinja2.Template; jinja2 is imported when there is one."""
    import jinja2.ext

    from gpt_faster.text.sandbox import LimitedEnvironment

    def raise_exception(message):
        raise TemplateRefusal(f"the chat template refuses: {message}")

    class Generation(jinja2.ext.Extension):    # marks answers for training: only its inside
        tags = {"generation"}

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = LimitedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                     extensions=["jinja2.ext.loopcontrols", Generation])
    environment.filters["tojson"] = lambda x, **k: json.dumps(x, ensure_ascii=False, **k)
    environment.globals.update(raise_exception=raise_exception,
                               strftime_now=lambda f: datetime.datetime.now().strftime(f))
    environment.begin()                            # constants are folded by filters that look at it
    return environment.from_string(template)


class SpecialTokenEscaper:
    """Replaces special tokens in a message by placeholders that no text has, and brings them back."""

    def __init__(self, names: list[str]):
        self.names = names
        self.placeholders = {name: ESCAPE + chr(FIRST_PLACEHOLDER + i) for i, name in enumerate(names)}
        self.pattern = re.compile("|".join(map(re.escape, names)) or "(?!)")

    def escape(self, value):
        """In a text, and in all texts of a list or an object."""
        if isinstance(value, list):
            return [self.escape(x) for x in value]
        if isinstance(value, dict):
            return {self.escape(key): self.escape(x) for key, x in value.items()}
        if not isinstance(value, str):
            return value
        return self.pattern.sub(lambda match: self.placeholders[match[0]], value.replace(ESCAPE, ""))

    def unescape(self, text: str) -> str:
        return re.sub(ESCAPE + "(.)", lambda match: self.names[ord(match[1]) - FIRST_PLACEHOLDER], text)


def encode_chat(tokenizer: Tokenizer, messages: list[dict], /, **more) -> list[int]:
    """The ids of render(), in which special tokens are the template's: a message's are text."""
    names, special = special_tokens(tokenizer.backend)
    escaper = SpecialTokenEscaper(names)
    messages = escaper.escape(messages)
    more = {key: escaper.escape(value) if key == "tools" else value for key, value in more.items()}
    text = render(tokenizer, messages, **more).encode("utf-8", "replace").decode()
    if ESCAPE not in text:
        return tokenizer.encode(text, bos=False)
    first, *pieces = special.split(text)           # text, special, text, …
    ids = tokenizer.backend.encode(escaper.unescape(first), special=False)
    later = continuation_backend(tokenizer.backend)
    for i, piece in enumerate(pieces):
        ids += later.encode(escaper.unescape(piece), special=i % 2 == 0)
    return ids


def special_tokens(backend: Backend) -> tuple[list[str], re.Pattern]:
    """Their texts, the longest first; and a pattern that matches any of them."""
    if backend.kind == "sentencepiece":
        tokens = {text: t for text, t in backend.tokens.items() if t.special}
    else:
        tokens = {t.content: AddedToken(i, t.content, True, t.lstrip, t.rstrip)
                  for i, t in backend.fast.get_added_tokens_decoder().items() if t.special}
    return sorted(tokens, key=len, reverse=True), token_pattern(list(tokens.values()))


@lru_cache(2)                                      # to read a tokenizer.json again takes a while
def continuation_backend(backend: Backend) -> Backend:
    """A backend for text that continues another: some put a space before a text's first piece."""
    if backend.kind == "sentencepiece" and backend.after_space:
        return backend
    if backend.kind == "sentencepiece":
        later = copy(backend)
        later.at_start = False
        return later
    data = re.sub(r'("prepend_scheme":\s*)"first"', r'\1"never"', backend.state())
    return backend if data == backend.state() else TokenizersBackend(data)
