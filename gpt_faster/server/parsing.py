"""What of an answer is thinking, text or a tool call, as the text comes in.

It owns the formats in which models call tools and the grammar that forces a call; it knows no
model and no HTTP. <think> … </think> becomes reasoning_content, as llama.cpp and vLLM do.

    parser = AnswerParser(FORMATS["hermes"], tools)
    for delta in parser.push("<tool_call>{…"): ...          # {"content": …} or {"tool_calls": […]}
"""

import ast
import json
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Call = tuple[str, dict]                            # a tool's name, and its arguments


# ---- The formats --------------------------------------------------------------------------------
# Each takes the text within a call's markers, and the tools by name -> the calls. ValueError where
# it is none.

def json_calls(text: str, tools: dict[str, dict]) -> list[Call]:
    """{"name": …, "arguments" or "parameters": {…}}; several after each other, or in a list."""
    decoder, calls, at = json.JSONDecoder(), [], 0
    while at < len(text):
        if text[at] in " \n\t\r;,":
            at += 1
            continue
        value, at = decoder.raw_decode(text, at)
        calls += value if isinstance(value, list) else [value]
    found = []
    for call in calls:
        if not isinstance(call, dict):
            raise ValueError("no object")
        arguments = call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        name = call.get("name")
        if not isinstance(name, str) or name not in tools or not isinstance(arguments, dict):
            raise ValueError("no call")
        found.append((name, arguments))
    if not found:
        raise ValueError("no call")
    return found


def xml_calls(text: str, tools: dict[str, dict]) -> list[Call]:
    """<function=name><parameter=key>value</parameter></function>, Qwen3-Coder's."""
    found = []
    for name, body in re.findall(r"<function=([^>\s]+)>(.*?)(?:</function>|$)", text, re.S):
        if name not in tools:
            raise ValueError("no call")
        types = (tools[name].get("parameters") or {}).get("properties") or {}
        arguments = {}
        for key, value in re.findall(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", body, re.S):
            arguments[key] = typed(value, types.get(key))
        found.append((name, arguments))
    if not found:
        raise ValueError("no call")
    return found


def typed(text: str, schema):
    """Text of a parameter: what its schema says, where it is that."""
    if not isinstance(schema, dict) or schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def hermes_calls(text: str, tools: dict[str, dict]) -> list[Call]:
    return (xml_calls if "<function=" in text else json_calls)(text, tools)


def python_calls(text: str, tools: dict[str, dict]) -> list[Call]:
    """name(key=value, …), a literal each: what Gemma 3 writes as tool_code; or JSON."""
    text = text.strip()
    if text.startswith(("{", "[{")):
        return json_calls(text, tools)
    try:
        tree = ast.parse(text, mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List) else [tree]
        found = []
        for node in nodes:
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
                [node] = node.args                 # tool_code may print what it calls
            name = ast.unparse(node.func).removeprefix("default_api.")
            if name not in tools or node.args or any(k.arg is None for k in node.keywords):
                raise ValueError("no call")
            found.append((name, {k.arg: ast.literal_eval(k.value) for k in node.keywords}))
        return found
    except (SyntaxError, AttributeError, TypeError, RecursionError, MemoryError) as e:
        raise ValueError("no call") from e


@dataclass(frozen=True)
class Format:
    """markers: what a call stands between; whole: an answer that begins as JSON is one, too."""

    name: str
    markers: dict[str, str]
    calls: Callable
    whole: bool = False
    arguments: str = "arguments"                   # the key of a call that is JSON


FORMATS = {f.name: f for f in (
    Format("hermes", {"<tool_call>": "</tool_call>"}, hermes_calls),
    Format("qwen_xml", {"<tool_call>": "</tool_call>", "<function=": "</function>"}, hermes_calls),
    Format("llama", {"<|python_tag|>": "<|eom_id|>"}, json_calls, True, "parameters"),
    Format("gemma", {"```tool_code": "```", "```json": "```"}, python_calls, True, "parameters"),
)}


def detect(template: str | None) -> Format | None:
    """The format that a chat template teaches; None: it knows no tools."""
    if template is None or "tools" not in template:
        return None
    if "<function=" in template:
        return FORMATS["qwen_xml"]
    if "tool_code" in template:
        return FORMATS["gemma"]
    if "<|python_tag|>" in template or '"parameters"' in template:
        return FORMATS["llama"]
    return FORMATS["hermes"]


def instructions(tools: list[dict], form: Format) -> str:
    """For a chat template that knows no tools, where --tool_format says how to call them."""
    listed = "\n".join(json.dumps(tool["function"]) for tool in tools)
    example = json.dumps({"name": "…", form.arguments: {}}, ensure_ascii=False)
    if form.name == "gemma":
        example = "```tool_code\nname(argument=value)\n```"
    elif not form.whole:
        example = f"<tool_call>\n{example}\n</tool_call>"
    return f"You have these functions:\n{listed}\nTo call one, answer with only:\n{example}"


def forced(tools: list[dict], form: Format) -> tuple[str, str]:
    """The grammar of exactly one call of one of these tools. ValueError where the format is XML."""
    if form.name == "qwen_xml":
        raise ValueError("this model calls tools in XML, which a tool_choice cannot force: use "
                         "auto, or --tool_format hermes")
    calls = [dict(type="object", required=["name", form.arguments], additionalProperties=False,
                  properties={"name": {"const": tool["function"]["name"]}, form.arguments:
                              tool["function"].get("parameters") or {"type": "object"}})
             for tool in tools]
    schema = json.dumps(calls[0] if len(calls) == 1 else {"anyOf": calls})
    if form.whole:
        return "json_schema", schema
    options = '"x-guidance": {"whitespace_flexible": false, "item_separator": ", ", ' \
              '"key_separator": ": "}'
    schema = "{" + options + ", " + schema[1:]
    return "grammar", f'start: "<tool_call>\\n" call "\\n</tool_call>"\ncall: %json {schema}\n'


# ---- The text as it comes -----------------------------------------------------------------------

class AnswerParser:
    """Splits one answer. A marker that may have begun is held back until it is certain."""

    def __init__(self, form: Format | None = None, tools: list[dict] = (),
                 thinks: bool = False, inside: bool = False, one_call: bool = False):
        """thinks: may begin with <think>; inside: the prompt has opened it; one_call: no more."""
        self.form = form if tools else None
        self.tools = {tool["function"]["name"]: tool["function"] for tool in tools}
        self.state = "thinking" if inside else "start"
        self.thinks, self.one_call = thinks, one_call
        self.buffer, self.opener, self.n_call = "", "", 0

    def push(self, text: str) -> list[dict]:
        """-> deltas of an answer's message."""
        self.buffer += text
        return list(self._parsed(False))

    def finish(self) -> list[dict]:
        """-> what was held back."""
        return list(self._parsed(True))

    def _parsed(self, end: bool) -> Iterator[dict]:
        while True:
            before = self.state, len(self.buffer)
            yield from getattr(self, f"_{self.state}")(end)
            if (self.state, len(self.buffer)) == before:
                return

    def _start(self, end: bool) -> Iterator[dict]:
        """Nothing but white space so far: it decides what the answer is."""
        text = self.buffer.lstrip()
        if self.thinks and text.startswith("<think>"):
            self.buffer, self.state = text.removeprefix("<think>").lstrip("\n"), "thinking"
        elif self.thinks and not end and "<think>".startswith(text):
            return
        elif self.form and self.form.whole and text.startswith(("{", "[{")):
            self.opener, self.state = "", "call"
        elif not end and (not text or self.form and self.form.whole and text == "["):
            return
        else:
            self.state = "text"
        yield from ()

    def _thinking(self, end: bool) -> Iterator[dict]:
        text, closed, rest = self.buffer.partition("</think>")
        if closed:
            self.buffer, self.state = rest.lstrip("\n"), "after"
        else:
            n = 0 if end else held_back(text, ["</think>"])
            self.buffer, text = text[len(text) - n:], text[:len(text) - n]
        if text:
            yield dict(reasoning_content=text)

    def _after(self, end: bool) -> Iterator[dict]:
        """Behind the thinking: an answer begins, without the empty lines before it."""
        self.buffer, self.thinks = self.buffer.lstrip("\n"), False
        if self.buffer:
            self.state = "start"
        yield from ()

    def _text(self, end: bool) -> Iterator[dict]:
        markers = self.form.markers if self.form else {}
        places = [(self.buffer.find(m), m) for m in markers if m in self.buffer]
        if places:
            at, self.opener = min(places)
            text, self.buffer = self.buffer[:at], self.buffer[at + len(self.opener):]
            self.state = "call"
            text = text.rstrip("\n") if not text.strip() else text
        else:
            n = 0 if end else held_back(self.buffer, markers)
            text = self.buffer[:len(self.buffer) - n]
            self.buffer = self.buffer[len(text):]
        if text:
            yield dict(content=text)

    def _call(self, end: bool) -> Iterator[dict]:
        closer = self.form.markers.get(self.opener)
        body, closed, rest = self.buffer.partition(closer) if closer else (self.buffer, "", "")
        if not closed and not end:
            return
        whole = self.opener + body + closed
        opened = self.opener if self.opener == "<function=" else ""
        try:
            calls = self.form.calls(opened + body + (closed if opened else ""), self.tools)
        except (ValueError, RecursionError):
            calls = []
        self.buffer, self.state = rest, "text"
        if not calls:
            yield dict(content=whole)              # text that is no call stays text
        elif rest and not rest.strip():
            self.buffer = ""
        for name, arguments in calls[:1 - self.n_call if self.one_call else None]:
            function = dict(name=name, arguments=json.dumps(arguments, ensure_ascii=False))
            yield dict(tool_calls=[dict(index=self.n_call, id=f"call_{secrets.token_hex(12)}",
                                        type="function", function=function)])
            self.n_call += 1


def held_back(text: str, markers) -> int:
    """How many characters at the end may begin a marker."""
    return max((n for m in markers for n in range(1, len(m)) if text.endswith(m[:n])), default=0)
