"""Parse streamed answers into content and tool calls; thoughts are text/reasoning.py's.

It owns the tool-call formats and the grammar that forces a call; it knows no model and no HTTP.

    parser = AnswerParser(TOOL_FORMATS["hermes"], tools)
    for delta in parser.push("<tool_call>{…"): ...          # {"content": …} or {"tool_calls": […]}
"""

import ast
import json
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from generate import log
from gpt_faster.decoding.json_schema import Bundle
from gpt_faster.text.reasoning import partial_marker_length, speaks_harmony

Call = tuple[str, dict]                            # a tool's name, and its arguments


# ---- The formats --------------------------------------------------------------------------------
# Each parses the text between a call's markers; tools: by name. ValueError if it is not a call.

def json_calls(text: str, tools: dict[str, dict]) -> list[Call]:
    """{"name": …, "arguments" or "parameters": {…}}: one, several in sequence, or a list."""
    decoder, values, at = json.JSONDecoder(), [], 0
    while at < len(text):
        if text[at] in " \n\t\r;,":
            at += 1
            continue
        value, at = decoder.raw_decode(text, at)
        values += value if isinstance(value, list) else [value]
    calls = []
    for call in values:
        if not isinstance(call, dict):
            raise ValueError("not an object")
        arguments = call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        name = call.get("name")
        if not isinstance(name, str) or name not in tools or not isinstance(arguments, dict):
            raise ValueError("no call")
        calls.append((name, arguments))
    if not calls:
        raise ValueError("no call")
    return calls


def xml_calls(text: str, tools: dict[str, dict]) -> list[Call]:
    """<function=name><parameter=key>value</parameter></function> (Qwen3-Coder)."""
    calls = []
    for name, body in re.findall(r"<function=([^>\s]+)>(.*?)(?:</function>|$)", text, re.S):
        if name not in tools:
            raise ValueError("no call")
        types = (tools[name].get("parameters") or {}).get("properties") or {}
        arguments = {}
        for key, value in re.findall(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", body, re.S):
            arguments[key] = parse_argument(value, types.get(key))
        calls.append((name, arguments))
    if not calls:
        raise ValueError("no call")
    return calls


def parse_argument(text: str, schema):
    """A parameter's text as JSON, unless its schema says string or it is not valid JSON."""
    if not isinstance(schema, dict) or schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def hermes_calls(text: str, tools: dict[str, dict]) -> list[Call]:
    return (xml_calls if "<function=" in text else json_calls)(text, tools)


def python_calls(text: str, tools: dict[str, dict]) -> list[Call]:
    """name(key=value, …) with literal values (Gemma 3's tool_code), or JSON."""
    text = text.strip()
    if text.startswith(("{", "[{")):
        return json_calls(text, tools)
    try:
        tree = ast.parse(text, mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List) else [tree]
        calls = []
        for node in nodes:
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
                [node] = node.args                 # print(call(…)) is also accepted
            name = ast.unparse(node.func).removeprefix("default_api.")
            if name not in tools or node.args or any(k.arg is None for k in node.keywords):
                raise ValueError("no call")
            calls.append((name, {k.arg: ast.literal_eval(k.value) for k in node.keywords}))
        return calls
    except (SyntaxError, AttributeError, TypeError, RecursionError, MemoryError) as e:
        raise ValueError("no call") from e


@dataclass(frozen=True)
class ToolFormat:
    """markers: start -> end; bare_json: output that starts with { or [{ is a call too."""

    name: str
    markers: dict[str, str]
    calls: Callable
    bare_json: bool = False
    arguments: str = "arguments"                   # the arguments' key in a JSON call


TOOL_FORMATS = {f.name: f for f in (
    ToolFormat("hermes", {"<tool_call>": "</tool_call>"}, hermes_calls),
    ToolFormat("qwen_xml", {"<tool_call>": "</tool_call>", "<function=": "</function>"},
               hermes_calls),
    ToolFormat("llama", {"<|python_tag|>": "<|eom_id|>"}, json_calls, True, "parameters"),
    ToolFormat("gemma", {"```tool_code": "```", "```json": "```"}, python_calls, True,
               "parameters"),
)}


def detect_tool_format(template: str | None) -> ToolFormat | None:
    """The format that a chat template describes; None if it does not support tools."""
    if template is None or "tools" not in template:
        return None
    if speaks_harmony(template):
        return TOOL_FORMATS["hermes"]              # as text/reasoning.py passes calls on
    if "<function=" in template:
        return TOOL_FORMATS["qwen_xml"]
    if "tool_code" in template:
        return TOOL_FORMATS["gemma"]
    if "<|python_tag|>" in template or '"parameters"' in template:
        return TOOL_FORMATS["llama"]
    return TOOL_FORMATS["hermes"]


def tool_instructions(tools: list[dict], tool_format: ToolFormat) -> str:
    """A system prompt for --tool_format with a chat template that does not support tools."""
    listed = "\n".join(json.dumps(tool["function"]) for tool in tools)
    example = json.dumps({"name": "…", tool_format.arguments: {}}, ensure_ascii=False)
    if tool_format.name == "gemma":
        example = "```tool_code\nname(argument=value)\n```"
    elif not tool_format.bare_json:
        example = f"<tool_call>\n{example}\n</tool_call>"
    return f"You have these functions:\n{listed}\nTo call one, answer with only:\n{example}"


def tool_call_grammar(tools: list[dict], tool_format: ToolFormat) -> tuple[str, str]:
    """A grammar for exactly one call of one of these tools. ValueError for the XML format."""
    if tool_format.name == "qwen_xml":
        raise ValueError("tool_choice cannot be forced with XML tool calls: use auto, or start "
                         "the server with --tool_format hermes")
    bundle, calls = Bundle(), []
    for i, tool in enumerate(tools):
        parameters = tool["function"].get("parameters") or {"type": "object"}
        arguments = bundle.add(parameters, f"tools.{i}.function.parameters")
        calls.append(dict(type="object", additionalProperties=False,
                          required=["name", tool_format.arguments],
                          properties={"name": {"const": tool["function"]["name"]},
                                      tool_format.arguments: arguments}))
    for note in bundle.notes[:1]:
        log(f"serve.py: note: {note}")
    document = bundle.document(calls[0] if len(calls) == 1 else {"anyOf": calls})
    if tool_format.bare_json:
        return "json_schema", json.dumps(document)
    options = dict(whitespace_flexible=False, item_separator=", ", key_separator=": ")
    schema = json.dumps({"x-guidance": options, **document})
    return "grammar", f'start: "<tool_call>\\n" call "\\n</tool_call>"\ncall: %json {schema}\n'


# ---- Streaming ---------------------------------------------------------------------------------

class AnswerParser:
    """Parses one choice. Text that may be the start of a marker is held back."""

    def __init__(self, tool_format: ToolFormat | None = None, tools: list[dict] = (),
                 single_call: bool = False):
        """single_call: at most one tool call."""
        self.format = tool_format if tools else None
        self.tools = {tool["function"]["name"]: tool["function"] for tool in tools}
        self.state, self.single_call = "start", single_call
        self.buffer, self.start_marker, self.n_call = "", "", 0

    def push(self, text: str) -> list[dict]:
        """-> deltas of the message."""
        self.buffer += text
        return list(self._parsed(False))

    def finish(self) -> list[dict]:
        """-> deltas of the text held back."""
        return list(self._parsed(True))

    def _parsed(self, is_final: bool) -> Iterator[dict]:
        while True:
            before = self.state, len(self.buffer)
            yield from getattr(self, f"_{self.state}")(is_final)
            if (self.state, len(self.buffer)) == before:
                return

    def _start(self, is_final: bool) -> Iterator[dict]:
        """Only whitespace so far: choose the next state."""
        text = self.buffer.lstrip()
        if self.format and self.format.bare_json and text.startswith(("{", "[{")):
            self.start_marker, self.state = "", "call"
        elif not is_final and (not text or self.format and self.format.bare_json and text == "["):
            return
        else:
            self.state = "text"
        yield from ()

    def _text(self, is_final: bool) -> Iterator[dict]:
        markers = self.format.markers if self.format else {}
        places = [(self.buffer.find(m), m) for m in markers if m in self.buffer]
        if places:
            at, self.start_marker = min(places)
            text, self.buffer = self.buffer[:at], self.buffer[at + len(self.start_marker):]
            self.state = "call"
            text = text.rstrip("\n") if not text.strip() else text
        else:
            n = 0 if is_final else partial_marker_length(self.buffer, markers)
            text = self.buffer[:len(self.buffer) - n]
            self.buffer = self.buffer[len(text):]
        if text:
            yield dict(content=text)

    def _call(self, is_final: bool) -> Iterator[dict]:
        end_marker = self.format.markers.get(self.start_marker)
        body, closed, rest = self.buffer, "", ""
        if end_marker:
            body, closed, rest = self.buffer.partition(end_marker)
        if not closed and not is_final:
            return
        text = self.start_marker + body + closed
        opened = self.start_marker if self.start_marker == "<function=" else ""
        try:
            calls = self.format.calls(opened + body + (closed if opened else ""), self.tools)
        except (ValueError, RecursionError):
            calls = []
        self.buffer, self.state = rest, "text"
        if not calls:
            yield dict(content=text)               # not a valid call: pass on as content
        elif rest and not rest.strip():
            self.buffer = ""
        for name, arguments in calls[:1 - self.n_call if self.single_call else None]:
            function = dict(name=name, arguments=json.dumps(arguments, ensure_ascii=False))
            yield dict(tool_calls=[dict(index=self.n_call, id=f"call_{secrets.token_hex(12)}",
                                        type="function", function=function)])
            self.n_call += 1
