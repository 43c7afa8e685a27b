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


# ---- Calls in JSON ------------------------------------------------------------------------------
# Each parser reads the text between a call's markers; tools: by name. ValueError if it is no call.

def json_calls(text: str, tools: dict[str, dict]) -> list[Call]:
    """{"name": …, "arguments" or "parameters": {…}}: one, several in sequence, or a list."""
    decoder, values, at = json.JSONDecoder(), [], 0
    while at < len(text):
        if text[at] in " \n\t\r;,":
            at += 1
            continue
        value, at = decoder.raw_decode(text, at)
        values += value if isinstance(value, list) else [value]
    return checked([json_call(value, tools) for value in values], tools)


def json_call(value, tools: dict[str, dict]) -> Call:
    if not isinstance(value, dict):
        raise ValueError("not an object")
    if len(value) == 1 and (name := next(iter(value))) in tools:
        return name, value[name]                   # {name: arguments} (Apertus)
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return value.get("name", value.get("tool_name")), arguments


def checked(calls: list[Call], tools: dict[str, dict]) -> list[Call]:
    if not calls or not all(isinstance(name, str) and name in tools and isinstance(arguments, dict)
                            for name, arguments in calls):
        raise ValueError("no call")
    return calls


def named_json_calls(pattern: str) -> Callable:
    """A parser of calls whose name stands before the JSON: groups name and arguments."""
    pattern = re.compile(pattern, re.S)

    def calls(text: str, tools: dict[str, dict]) -> list[Call]:
        found = pattern.finditer(text)
        return checked([(call["name"], json.loads(call["arguments"])) for call in found], tools)
    return calls


deepseek_calls = named_json_calls(
    r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>(?P<old>))?\s*(?P<name>[\w.-]+)\s*"
    r"(?(old)```json|<｜tool▁sep｜>)(?P<arguments>.*?)(?:```\s*)?(?:<｜tool▁call▁end｜>|$)")
kimi_calls = named_json_calls(
    r"<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[\w.-]+?)(?::\d+)?\s*"
    r"<\|tool_call_argument_begin\|>(?P<arguments>.*?)(?:<\|tool_call_end\|>|$)")
named_mistral_calls = named_json_calls(
    r"(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?P<arguments>\{.*?)"
    r"(?:\[TOOL_CALLS\]|$)")


def mistral_calls(text: str, tools: dict[str, dict]) -> list[Call]:
    """A JSON list, or from 2025 on name[ARGS]{…}[TOOL_CALLS]name[ARGS]{…}."""
    is_json = text.lstrip().startswith(("[", "{"))
    return (json_calls if is_json else named_mistral_calls)(text, tools)


# ---- Calls in XML -------------------------------------------------------------------------------

def tagged_calls(call: str, argument: str) -> Callable:
    """A parser of calls (groups name, body) with arguments (groups key, value) as text."""
    call, argument = re.compile(call, re.S), re.compile(argument, re.S)

    def calls(text: str, tools: dict[str, dict]) -> list[Call]:
        found = []
        for one in call.finditer(text):
            parameters = tools.get(one["name"], {}).get("parameters") or {}
            arguments = {each["key"]: parse_argument(each["value"], each["key"], parameters)
                         for each in argument.finditer(one["body"])}
            found.append((one["name"], arguments))
        return checked(found, tools)
    return calls


xml_calls = tagged_calls(                          # Qwen3-Coder, Seed-OSS
    r"<function=(?P<name>[^>\s]+)>(?P<body>.*?)(?:</function>|$)",
    r"<parameter=(?P<key>[^>\s]+)>\n?(?P<value>.*?)\n?</parameter>")
invoke_calls = tagged_calls(                       # MiniMax M2, DeepSeek V3.2
    r'<(?:｜DSML｜)?invoke name="?(?P<name>[^">\s]+)"?>(?P<body>.*?)(?:</(?:｜DSML｜)?invoke>|$)',
    r'<(?:｜DSML｜)?parameter name="?(?P<key>[^">\s]+)"?[^>]*>\n?(?P<value>.*?)\n?'
    r"</(?:｜DSML｜)?parameter>")
glm_calls = tagged_calls(
    r"^\s*(?P<name>[\w.-]+)\s*(?P<body>.*)$",
    r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>\n?(?P<value>.*?)\n?</arg_value>")


def parse_argument(text: str, key: str, parameters: dict):
    """A parameter's text as JSON, if that has a type that its schema allows; else the text."""
    properties = parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, dict) else None
    kinds = allowed_types(schema, parameters)
    if kinds == {"string"} or schema is None:
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    kind = JSON_TYPES[type(value)]
    is_allowed = not kinds or kind in kinds or kind == "integer" and "number" in kinds
    return text if "string" in kinds and not is_allowed else value


JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array",
              dict: "object", type(None): "null"}


def allowed_types(schema, root: dict, depth: int = 0) -> set[str]:
    """The types of value that a parameter's schema names; none: any, or not known here."""
    if not isinstance(schema, dict) or depth > 8:
        return set()
    kinds = schema.get("type", [])
    kinds = {kinds} if isinstance(kinds, str) else {k for k in kinds if isinstance(k, str)}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and not kinds:
        kinds = {JSON_TYPES[type(value)] for value in values}
    for key in ("anyOf", "oneOf"):
        for option in schema.get(key) or []:
            kinds |= allowed_types(option, root, depth + 1)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        for name in reference[2:].split("/"):
            root = root.get(name, {}) if isinstance(root, dict) else {}
        kinds |= allowed_types(root, {}, depth + 1)
    return kinds


# ---- Other calls --------------------------------------------------------------------------------

def hermes_calls(text: str, tools: dict[str, dict]) -> list[Call]:
    return (xml_calls if "<function=" in text else json_calls)(text, tools)


def python_calls(text: str, tools: dict[str, dict]) -> list[Call]:
    """name(key=value, …) with literal values, several in lines or a list; or JSON."""
    text = text.strip()
    if text.startswith(("{", "[{")):
        return json_calls(text, tools)
    try:
        calls = []
        for statement in ast.parse(text).body:
            tree = statement.value
            for node in tree.elts if isinstance(tree, ast.List) else [tree]:
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
                    [node] = node.args             # print(call(…)) is also accepted
                name = ast.unparse(node.func).removeprefix("default_api.")
                if node.args or any(k.arg is None for k in node.keywords):
                    raise ValueError("no call")
                calls.append((name, {k.arg: literal(k.value) for k in node.keywords}))
        return checked(calls, tools)
    except (SyntaxError, AttributeError, TypeError, RecursionError, MemoryError) as e:
        raise ValueError("no call") from e


class JsonNames(ast.NodeTransformer):
    """JSON's true, false and null as Python's."""

    values = {"true": True, "false": False, "null": None}

    def visit_Name(self, node):
        return ast.Constant(self.values[node.id]) if node.id in self.values else node


def literal(node: ast.expr):
    return ast.literal_eval(JsonNames().visit(node))


def gemma_calls(text: str, tools: dict[str, dict]) -> list[Call]:
    """call:name{key:<|"|>text<|"|>,other:3} (Gemma 4), or with <escape> (FunctionGemma)."""
    found = re.fullmatch(r"\s*call:([\w.-]+)(\{.*\})\s*", text, re.S)
    if not found:
        raise ValueError("no call")

    def in_json(part):
        if part["key"]:
            return f"{part['before']}{json.dumps(part['key'])}:"
        return json.dumps(part["text"])
    arguments = re.sub(r'(?P<quote><\|"\|>|<escape>)(?P<text>.*?)(?P=quote)'
                       r"|(?P<before>[{,]\s*)(?P<key>[^\s:,{}\[\]<>\"]+)\s*:", in_json, found[2],
                       flags=re.S)
    return checked([(found[1], json.loads(arguments))], tools)


# ---- The table ----------------------------------------------------------------------------------

@dataclass(frozen=True)
class ToolFormat:
    """How a model writes its calls.

    markers: start -> end, "": the end of the answer. calls: parses what is between. inner: other
    special tokens in it. bare: text that may be a call if an answer begins with it. signs: what
    tells of the format in a chat template. forced: the text of one call, for a grammar, with
    {name}, {arguments} and {call}, which is both as JSON; or with {parameters}, each as parameter
    with {key} and {value}.
    """

    name: str
    markers: dict[str, str]
    calls: Callable
    signs: tuple[str, ...] = ()
    forced: str | None = None
    parameter: str = ""
    inner: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()
    keys: tuple[str, str] = ("name", "arguments")  # of a JSON call

    def tokens(self) -> list[str]:
        return [*self.markers, *filter(None, self.markers.values()), *self.inner]


BARE_JSON = ("{", "[{")
XML_PARAMETER = "<parameter={key}>\n{value}\n</parameter>\n"
DEEPSEEK = {"<｜tool▁calls▁begin｜>": "<｜tool▁calls▁end｜>"}
DEEPSEEK_INNER = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
# The first row with a sign in the template is its format.
TOOL_FORMATS = {f.name: f for f in (
    ToolFormat("seed", {"<seed:tool_call>": "</seed:tool_call>"}, xml_calls, ("<seed:tool_call>",),
               "<seed:tool_call>\n<function={name}>\n{parameters}</function>\n</seed:tool_call>",
               "<parameter={key}>{value}</parameter>\n"),
    ToolFormat("qwen_xml", {"<tool_call>": "</tool_call>", "<function=": "</function>"},
               hermes_calls, ("<function=",),
               "<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>",
               XML_PARAMETER),
    ToolFormat("minimax", {"<minimax:tool_call>": "</minimax:tool_call>"}, invoke_calls,
               ("<minimax:tool_call>",),
               '<minimax:tool_call>\n<invoke name="{name}">\n{parameters}</invoke>\n'
               "</minimax:tool_call>", '<parameter name="{key}">{value}</parameter>\n'),
    ToolFormat("deepseek_dsml", {"<｜DSML｜function_calls>": "</｜DSML｜function_calls>"},
               invoke_calls, ("｜DSML｜",), inner=("｜DSML｜",)),
    ToolFormat("deepseek_v3", DEEPSEEK, deepseek_calls, ("```json\\n", "```json\n"),
               "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n"
               "{arguments}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>", inner=DEEPSEEK_INNER),
    ToolFormat("deepseek", DEEPSEEK, deepseek_calls, ("<｜tool▁calls▁begin｜>",),
               "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}"
               "<｜tool▁call▁end｜><｜tool▁calls▁end｜>", inner=DEEPSEEK_INNER),
    ToolFormat("kimi", {"<|tool_calls_section_begin|>": "<|tool_calls_section_end|>"}, kimi_calls,
               ("<|tool_calls_section_begin|>",),
               "<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0"
               "<|tool_call_argument_begin|>{arguments}<|tool_call_end|><|tool_calls_section_end|>",
               inner=("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")),
    ToolFormat("glm", {"<tool_call>": "</tool_call>"}, glm_calls, ("<arg_key>",),
               "<tool_call>{name}\n{parameters}</tool_call>",
               "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
               inner=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")),
    ToolFormat("mistral_args", {"[TOOL_CALLS]": ""}, mistral_calls, ("[ARGS]",),
               "[TOOL_CALLS]{name}[ARGS]{arguments}", inner=("[ARGS]", "[CALL_ID]")),
    ToolFormat("mistral", {"[TOOL_CALLS]": ""}, mistral_calls, ("[TOOL_CALLS]",),
               "[TOOL_CALLS][{call}]", inner=("[ARGS]", "[CALL_ID]")),
    ToolFormat("command", {"<|START_ACTION|>": "<|END_ACTION|>"}, json_calls,
               ("<|START_ACTION|>",), "<|START_ACTION|>[\n{call}\n]<|END_ACTION|>",
               keys=("tool_name", "parameters")),
    ToolFormat("phi", {"<|tool_call|>": "<|/tool_call|>"}, json_calls, ("<|/tool_call|>",),
               "<|tool_call|>{call}<|/tool_call|>"),
    ToolFormat("granite", {"<|tool_call|>": ""}, json_calls, ("<|tool_call|>",),
               "<|tool_call|>[{call}]"),
    ToolFormat("lfm", {"<|tool_call_start|>": "<|tool_call_end|>"}, python_calls,
               ("<|tool_call_start|>", "<|tool_list_start|>"),
               "<|tool_call_start|>[{call}]<|tool_call_end|>"),
    ToolFormat("apertus", {"<|tools_prefix|>": "<|tools_suffix|>"}, json_calls,
               ("<|tools_prefix|>",)),
    ToolFormat("nemotron", {"<TOOLCALL>": "</TOOLCALL>"}, json_calls, ("<TOOLCALL>",),
               "<TOOLCALL>[{call}]</TOOLCALL>"),
    ToolFormat("olmo", {"<function_calls>": "</function_calls>"}, python_calls,
               ("<function_calls>",)),
    ToolFormat("gemma4", {"<|tool_call>": "<tool_call|>"}, gemma_calls, ("<|tool_call>",),
               inner=('<|"|>',)),
    ToolFormat("function_gemma", {"<start_function_call>": "<end_function_call>"}, gemma_calls,
               ("<start_function_call>",), inner=("<escape>",)),
    ToolFormat("gemma", {"```tool_code": "```", "```json": "```"}, python_calls, ("tool_code",),
               bare=BARE_JSON, keys=("name", "parameters")),
    ToolFormat("pythonic", {"<|python_start|>": "<|python_end|>"}, python_calls,
               ("<|python_start|>", "[func_name1("), bare=("[", "{")),
    ToolFormat("llama", {"<|python_tag|>": "<|eom_id|>"}, json_calls,
               ("<|python_tag|>", '"parameters"'), bare=BARE_JSON, keys=("name", "parameters")),
    ToolFormat("hermes", {"<tool_call>": "</tool_call>"}, hermes_calls, (),
               "<tool_call>\n{call}\n</tool_call>"),
)}


def detect_tool_format(template: str | None) -> ToolFormat | None:
    """The format that a chat template describes; None if it does not support tools."""
    if template is None or "tools" not in template:
        return None
    if speaks_harmony(template):
        return TOOL_FORMATS["hermes"]              # as text/reasoning.py passes calls on
    for form in TOOL_FORMATS.values():
        has_marker = form.name != "deepseek_v3" or "<｜tool▁calls▁begin｜>" in template
        if has_marker and any(sign in template for sign in form.signs):
            return form
    return TOOL_FORMATS["hermes"]


def tool_instructions(tools: list[dict], tool_format: ToolFormat) -> str:
    """A system prompt for --tool_format with a chat template that does not support tools."""
    listed = "\n".join(json.dumps(tool["function"]) for tool in tools)
    name, arguments = tool_format.keys
    call = json.dumps({name: "…", arguments: {}}, ensure_ascii=False)
    if tool_format.name == "gemma":
        call = "```tool_code\nname(argument=value)\n```"
    elif tool_format.forced:
        parameter = filled(tool_format.parameter, key="argument", value="value")
        call = filled(tool_format.forced, name="…", arguments="{}", call=call,
                      parameters=parameter)
    return f"You have these functions:\n{listed}\nTo call one, answer with only:\n{call}"


def written_call(function: dict, tool_format: ToolFormat) -> str:
    """A call of an earlier message as the model would have written it, for --tool_format with a
    chat template that does not render calls."""
    name, arguments = function["name"], function["arguments"]
    call = json.dumps(dict(zip(tool_format.keys, (name, arguments))), ensure_ascii=False)
    if not tool_format.forced:
        return call
    listed = arguments.items() if isinstance(arguments, dict) else ()
    parameters = "".join(filled(tool_format.parameter, key=key, value=value if isinstance(
        value, str) else json.dumps(value, ensure_ascii=False)) for key, value in listed)
    return filled(tool_format.forced, name=name, call=call, parameters=parameters,
                  arguments=json.dumps(arguments, ensure_ascii=False))


def filled(template: str, **values: str) -> str:
    """The template with values for its {names}; other braces stay."""
    return re.sub(r"\{(\w+)\}", lambda name: values.get(name[1], name[0]), template)


# ---- A call that is forced ----------------------------------------------------------------------

def tool_call_grammar(tools: list[dict], tool_format: ToolFormat,
                      shown: dict[str, int] | None = None) -> tuple[str, str]:
    """A grammar for exactly one call of one of these tools. ValueError if it cannot be written.

    shown: the ids of markers that are special tokens.
    """
    if not tool_format.forced and not tool_format.bare:
        raise ValueError(f"tool_choice cannot be forced in the tool format {tool_format.name}: use "
                         "auto, or start the server with --tool_format hermes")
    writer = CallWriter(tool_format, shown or {})
    for i, tool in enumerate(tools):
        writer.add(tool["function"], f"tools.{i}.function.parameters")
    for note in writer.bundle.notes[:1]:
        log(f"serve.py: note: {note}")
    return writer.spec()


def call_or_json(call: tuple[str, str], answer: tuple[str, str]) -> tuple[str, str]:
    """A grammar of either a call, as of tool_call_grammar(), or the JSON of a schema."""
    kind, text = call
    rules = f"call: {as_json(json.loads(text))}\n" if kind == "json_schema" else (
        "call:" + text.removeprefix("start:"))
    return "grammar", f"start: call | answer\n{rules}answer: {as_json(json.loads(answer[1]))}\n"


def as_json(document: dict) -> str:
    """Compact JSON of a schema, in a Lark grammar."""
    options = dict(whitespace_flexible=False, item_separator=", ", key_separator=": ")
    return "%json " + json.dumps({"x-guidance": options, **document})


class CallWriter:
    """Writes a Lark grammar of calls, or a JSON schema where a call is nothing but JSON."""

    def __init__(self, tool_format: ToolFormat, shown: dict[str, int]):
        self.format, self.shown = tool_format, shown
        self.bundle, self.calls, self.rules = Bundle(), [], []

    def add(self, function: dict, path: str) -> None:
        parameters, name = function.get("parameters") or {"type": "object"}, function["name"]
        if self.format.parameter:
            self.calls.append(self.lark(filled(self.format.forced, name=name), {
                "parameters": self.parameters(parameters, path)}))
            return
        arguments = self.bundle.add(parameters, path)
        keys = self.format.keys
        call = dict(type="object", additionalProperties=False, required=[*keys],
                    properties={keys[0]: {"const": name}, keys[1]: arguments})
        if not self.format.forced:
            self.calls.append(call)
        else:
            text = filled(self.format.forced, name=name)
            value = call if "{call}" in text else arguments
            self.calls.append(self.lark(text, dict.fromkeys(("call", "arguments"), value)))

    def spec(self) -> tuple[str, str]:
        if not self.format.forced:
            call = self.calls[0] if len(self.calls) == 1 else {"anyOf": self.calls}
            return "json_schema", json.dumps(self.bundle.document(call))
        rules = [f"{name}: {self.json(rule) if isinstance(rule, (dict, bool)) else rule}"
                 for name, rule in self.rules]
        return "grammar", "\n".join([f"start: {' | '.join(self.calls)}", *rules, ""])

    def json(self, schema: dict | bool) -> str:
        return as_json(self.bundle.document(schema))

    def rule(self, rule) -> str:
        self.rules.append((name := f"rule_{len(self.rules)}", rule))
        return name

    def lark(self, text: str, values: dict) -> str:
        """A sequence of literals, special tokens and values: rules' names, or JSON schemas."""
        parts = []
        special = sorted(self.shown, key=len, reverse=True)
        for part in re.split("|".join([r"(\{\w+\}", *map(re.escape, special)]) + ")", text):
            if part in self.shown:
                parts.append(f"<[{self.shown[part]}]>")
            elif part[1:-1] in values and part.startswith("{"):
                value = values[part[1:-1]]
                parts.append(value if isinstance(value, str) else self.rule(value))
            elif part:
                parts.append(json.dumps(part))
        return " ".join(filter(None, parts)) or '""'

    def parameters(self, schema: dict, path: str) -> str:
        """The parameters of a call as text, in their order."""
        properties = schema.get("properties") or {}
        required = schema.get("required") or []
        beside = set(schema) & {"$ref", "allOf", "anyOf", "oneOf", "not", "if", "minProperties"}
        if beside or not set(required) <= set(properties):
            raise ValueError(f"{path}: a forced call in the tool format {self.format.name} needs "
                             "plain properties; use auto")
        parts = []
        for key, value in properties.items():
            form = filled(self.format.parameter, key=key)
            part = self.lark(form, {"value": self.value(schema, key, value, f"{path}.{key}")})
            parts.append(part if key in required else f"({part})?")
        return " ".join(parts)

    def value(self, schema: dict, key: str, value, path: str) -> str | dict | bool:
        """Text for strings, JSON for others."""
        kept = self.bundle.add_part(schema, value, path)
        if allowed_types(value, schema) != {"string"}:
            return kept
        listed = [value["const"]] if "const" in value else value.get("enum")
        if listed:
            return self.rule(" | ".join(json.dumps(str(each)) for each in listed))
        limits = {"pattern", "format", "minLength", "maxLength"} & set(kept) or "$ref" in kept
        if limits:
            raise ValueError(f"{path}: a string with restrictions is not supported in a forced "
                             f"call of the tool format {self.format.name}; use auto")
        end = self.format.parameter.rpartition("{value}")[2].strip()
        term = f"TEXT_{len(self.rules)}"
        escaped = re.escape(end).replace("/", r"\/")
        self.rules.append((term, rf"/(?s:.*)/ & ~/(?s:.*){escaped}(?s:.*)/"))
        return term


# ---- Streaming ---------------------------------------------------------------------------------

class AnswerParser:
    """Parses one choice. Text that may be the start of a marker is held back."""

    def __init__(self, tool_format: ToolFormat | None = None, tools: list[dict] = (),
                 single_call: bool = False, is_forced: bool = False):
        """single_call: at most one tool call. is_forced: a grammar lets the text be a call only."""
        self.format = tool_format if tools else None
        self.tools = {tool["function"]["name"]: tool["function"] for tool in tools}
        self.state, self.single_call = "start", single_call
        self.buffer, self.start_marker, self.n_call = "", "", 0
        self.is_forced, self.is_cut = is_forced and bool(tools), False

    def push(self, text: str) -> list[dict]:
        """-> deltas of the message."""
        self.buffer += text
        return list(self._parsed(False))

    def finish(self, reason: str) -> list[dict]:
        """-> deltas of the text held back. reason: "length" if the text was cut off."""
        self.is_cut = reason == "length"
        deltas = list(self._parsed(True))
        if self.is_forced and self.is_cut:         # the rest is the beginning of a call's markup
            deltas = [delta for delta in deltas if "content" not in delta]
        return deltas

    def _parsed(self, is_final: bool) -> Iterator[dict]:
        while True:
            before = self.state, len(self.buffer)
            yield from getattr(self, f"_{self.state}")(is_final)
            if (self.state, len(self.buffer)) == before:
                return

    def _start(self, is_final: bool) -> Iterator[dict]:
        """Only whitespace so far: choose the next state."""
        text = self.buffer.lstrip()
        if self.format and text.startswith(self.format.bare):
            self.start_marker, self.state = "", "call"
        elif not is_final and (not text or self.format and any(
                bare.startswith(text) for bare in self.format.bare)):
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
            text = text.rstrip("\n")               # it belongs to the call
        else:
            n = 0 if is_final else partial_marker_length(self.buffer, markers)
            text = self.buffer[:len(self.buffer) - n]
            if markers and not is_final:
                text = text.rstrip("\n")           # a call may follow
            self.buffer = self.buffer[len(text):]
            if is_final and self.n_call and not text.strip():
                text = ""
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
        if not calls and self.is_cut and not closed and (
                begun := begun_call(body, self.tools, bool(self.start_marker))):
            yield self._delta(*begun)
        elif not calls:
            yield dict(content=text)               # not a valid call: pass on as content
        elif rest and not rest.strip():
            self.buffer = ""
        for name, arguments in calls[:1 - self.n_call if self.single_call else None]:
            yield self._delta(name, json.dumps(arguments, ensure_ascii=False))

    def _delta(self, name: str, arguments: str) -> dict:
        call = dict(index=self.n_call, id=f"call_{secrets.token_hex(12)}", type="function",
                    function=dict(name=name, arguments=arguments))
        self.n_call += 1
        return dict(tool_calls=[call])


def begun_call(text: str, tools: dict[str, dict], is_marked: bool) -> tuple[str, str] | None:
    """The name of a call that was cut off, and what came of its arguments as JSON.

    is_marked: a marker came before.
    """
    names = "|".join(sorted(map(re.escape, tools), key=len, reverse=True)) or "(?!)"
    if re.match(r"\s*\[?\s*\{", text):
        key = r'(?:"tool_call_id"[^,]*,\s*)?"(?:tool_)?name"\s*:\s*'
        key = f"(?:{key})?" if is_marked else key
        pattern = rf'[\[\s]*\{{\s*{key}"({names})"'
    else:                                          # not long after other markup
        pattern = rf'(?:[^\n]{{0,80}}["=.:>\[(\n])??\s*({names})(?=[^\w.-])'
    found = re.match(pattern, text)
    if not found:
        return None
    name, rest = found[1], text[found.end():]
    in_json = re.search(r'(?:arguments"|parameters"|\[ARGS\]|<｜tool▁sep｜>|```json|'
                        r"<\|tool_call_argument_begin\|>)[\s:]*(\{.*)|^\s*(\{.*)", rest, re.S)
    return name, (in_json[1] or in_json[2]) if in_json else ""
