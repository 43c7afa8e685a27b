"""Chat templates: render in a sandbox, and encode so that messages cannot inject special tokens.

    text = render(tokenizer, messages)             # messages: [{role, content}, …]
    ids = encode_chat(tokenizer, messages)         # "<|im_end|>" in a message stays text
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
THOUGHTS = ("reasoning_content", "thinking", "reasoning")      # keys of a message
ESCAPE = "\ufdd0"                                  # a Unicode noncharacter: never in text
FIRST_PLACEHOLDER = 0xf0000                               # private-use characters, one per token
CONTINUED = "\ufdd1 "                              # its space tells whether the template strips


class TemplateError(ValueError):
    """The template cannot render these messages."""


class TemplateRefusal(TemplateError):
    """The template called raise_exception()."""


def render(tokenizer: Tokenizer, messages: list[dict], /, continue_final_message: bool = False,
           **more) -> str:
    """Render the chat template for messages [{role, content}], with the generation prompt.

    continue_final_message: end with the last message's content (a string) instead, as with
    transformers' argument.
    Runs in jinja2's sandbox with time and size limits (sandbox.py) and transformers' globals.
    TemplateError: the template refuses the messages or fails.
    """
    from gpt_faster.text.sandbox import render as render_limited
    try:
        more = dict(add_generation_prompt=True, tools=None, documents=None) | tokenizer.names | more
        messages = [normalized(message) for message in messages]
        if continue_final_message:
            more["add_generation_prompt"], content = False, messages[-1]["content"]
            messages[-1] = dict(messages[-1], content=content + CONTINUED)
        template = more.get("tools") and tokenizer.tool_template or tokenizer.chat_template
        text = render_limited(_compiled(template), messages=messages, **more)
        return until_content(text, content) if continue_final_message else text
    except TemplateRefusal:
        raise
    except Exception as e:                         # template expressions may raise anything
        raise TemplateError(f"the chat template does not render: {first_line(e)}") from None


def until_content(text: str, content: str) -> str:
    """A rendered chat up to the end of the last message's content. TemplateRefusal if the template
    shows only a part of it."""
    at = text.rfind(CONTINUED.strip())
    if at < 0 or content.strip() not in text:
        raise TemplateRefusal("the last message cannot be continued: the chat template changes its "
                              "content")
    return text[:at] if text.startswith(CONTINUED, at) else text[:at].rstrip()


@lru_cache(8)
def _variables(template: str) -> frozenset[str]:
    import jinja2.meta
    environment = new_environment()
    return frozenset(jinja2.meta.find_undeclared_variables(environment.parse(template)))


def template_variables(tokenizer: Tokenizer, with_tools: bool = False) -> frozenset[str]:
    """Names that the chat template reads, such as enable_thinking. Empty if it is not valid."""
    template = with_tools and tokenizer.tool_template or tokenizer.chat_template
    try:
        return _variables(template)
    except Exception:                              # render() explains it
        return frozenset()


def normalized(message: dict) -> dict:
    """As in transformers: without keys whose value is None, and with the names of the thoughts that
    templates read (reasoning_content, gpt-oss's thinking) if any of THOUGHTS is there."""
    message = {key: value for key, value in message.items() if value is not None}
    given = [message[name] for name in THOUGHTS if name in message]
    if not given:
        return message
    return {"thinking": given[0], **message, "reasoning_content": given[0]}


@lru_cache(8)
def _compiled(template: str):
    """A jinja2.Template. jinja2 is imported only when a template is used."""
    return new_environment().from_string(template)


def new_environment():
    """The templates' environment, for one template: its deadline begins now.

    It is transformers' (utils/chat_template_utils.py): tests/test_template_environment compares
    them.
    """
    import jinja2.ext

    from gpt_faster.text.sandbox import LimitedEnvironment

    def raise_exception(message):
        raise TemplateRefusal(f"the chat template refuses: {message}")

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                          sort_keys=sort_keys)

    class Generation(jinja2.ext.Extension):    # marks answers for training: render its body
        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_body")       # a scope of its own, as in transformers
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _body(self, caller):
            return caller()

    environment = LimitedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                     extensions=[Generation, jinja2.ext.loopcontrols])
    environment.add_filter("tojson", tojson)
    environment.globals.update(raise_exception=raise_exception,
                               strftime_now=lambda f: datetime.datetime.now().strftime(f))
    environment.begin()                            # constant folding runs filters: set the deadline
    return environment


class SpecialTokenEscaper:
    """Replaces special tokens in messages by placeholders that no text contains, and back."""

    def __init__(self, names: list[str]):
        self.names = names
        self.placeholders = {name: ESCAPE + chr(FIRST_PLACEHOLDER + i)
                             for i, name in enumerate(names)}
        self.pattern = re.compile("|".join(map(re.escape, names)) or "(?!)")

    def escape(self, value):
        """Escape a string, or all strings in a list or dict."""
        if isinstance(value, list):
            return [self.escape(x) for x in value]
        if isinstance(value, dict):
            return {self.escape(key): self.escape(x) for key, x in value.items()}
        if not isinstance(value, str):
            return value
        value = value.replace(ESCAPE, "")
        return self.pattern.sub(lambda match: self.placeholders[match[0]], value)

    def unescape(self, text: str) -> str:
        return re.sub(ESCAPE + "(.)",
                      lambda match: self.names[ord(match[1]) - FIRST_PLACEHOLDER], text)


def encode_chat(tokenizer: Tokenizer, messages: list[dict], /, **more) -> list[int]:
    """Token ids of render(). Only the template's special tokens become special tokens."""
    names, special = special_tokens(tokenizer.backend)
    escaper = SpecialTokenEscaper(names)
    messages = escaper.escape(messages)
    more = {key: escaper.escape(value) if key in ("tools", "documents") else value
            for key, value in more.items()}
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
    """-> texts of the special tokens, longest first; a pattern that matches any of them."""
    if backend.kind == "sentencepiece":
        tokens = {text: t for text, t in backend.tokens.items() if t.special}
    else:
        tokens = {t.content: AddedToken(i, t.content, True, t.lstrip, t.rstrip)
                  for i, t in backend.fast.get_added_tokens_decoder().items() if t.special}
    return sorted(tokens, key=len, reverse=True), token_pattern(list(tokens.values()))


@lru_cache(2)                                      # parsing tokenizer.json again is slow
def continuation_backend(backend: Backend) -> Backend:
    """A backend for text that continues another: it adds no space in front."""
    if backend.kind == "sentencepiece" and backend.after_space:
        return backend
    if backend.kind == "sentencepiece":
        later = copy(backend)
        later.at_start = False
        return later
    data = re.sub(r'("prepend_scheme":\s*)"first"', r'\1"never"', backend.state())
    return backend if data == backend.state() else TokenizersBackend(data)
