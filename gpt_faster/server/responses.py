"""OpenAI's /v1/responses, translated onto a ChatRequest: schema, tools, items, answers, stream.

The prompt, the sampling and the grammars are prepare.py's; what is kept of earlier responses is
response_store.py's. Hosted tools, images, files and stored prompts are refused by name.

    prepared = ResponsesPreparer(preparer, store).prepare(request)
    answer = ResponsesAnswer(preparer, request, prepared)      # as in answers.py
"""

import base64
import copy
import hashlib
import json
import re
import secrets
import time
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from gpt_faster.decoding.scheduler import Event
from gpt_faster.server.answers import Answer
from gpt_faster.server.prepare import PreparedRequest, RequestPreparer
from gpt_faster.server.protocol import (
    EFFORTS,
    ApiError,
    ChatRequest,
    CompletionRequest,
    Request,
    Strict,
    ranged,
    validate,
)
from gpt_faster.server.response_store import KeptResponse, ResponseStore
from gpt_faster.server.wire import OpenAIWire

# ---- The schema ---------------------------------------------------------------------------------

# Fields of OpenAI's API that would change the answer, and what to do instead.
REFUSED = {
    "background": "send the request without it, and wait for the answer or stream it",
    "conversation": "use previous_response_id, or send all items in input",
    "prompt": "the templates are stored at OpenAI: send instructions and input",
    "context_management": "the server does not shorten conversations",
    "moderation": "the server has no moderation model",
    "max_tokens": "use max_output_tokens",
    "max_completion_tokens": "use max_output_tokens",
    "messages": "use input, or POST /v1/chat/completions",
    "response_format": "use text.format",
}
LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
Include = Literal[                                 # the others belong to hosted tools and images:
    LOGPROBS, ENCRYPTED, "file_search_call.results",           # no answer has any
    "web_search_call.results", "web_search_call.action.sources", "code_interpreter_call.outputs",
    "message.input_image.image_url", "computer_call_output.output.image_url"]
Metadata = Annotated[dict[Annotated[str, Field(max_length=64)],
                          Annotated[str, Field(max_length=512)]], Field(max_length=16)]
Summary = Literal["auto", "concise", "detailed", "none"]


class Reasoning(Strict):
    effort: Literal[EFFORTS] | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None        # the older name


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(Strict):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesStreamOptions(Strict):
    include_obfuscation: bool | None = None        # pads events against eavesdroppers: never done


class ResponsesRequest(Request):
    """input, tools and tool_choice are checked as they are translated."""

    elsewhere = frozenset(ChatRequest.model_fields) | frozenset(CompletionRequest.model_fields)

    input: Any = None
    instructions: str | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: ranged("max_tokens") | None = None
    top_logprobs: ranged("top_logprobs") | None = None
    include: list[Include] | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    metadata: Metadata | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    stream_options: ResponsesStreamOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None      # a prompt too long gets 400
    max_tool_calls: int | None = None              # counts calls of hosted tools
    n: Literal[1] | None = None
    # No effect on the text: billing, routing, caching and statistics at OpenAI.
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Any = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    user: str | None = None
    client_metadata: Any = None                    # Codex's
    # In REFUSED.
    background: Any = None
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    messages: Any = None
    response_format: Any = None


def bad(path: str, problem: str, status: int = 400, code: str | None = None) -> ApiError:
    return ApiError(status, f"{path}: {problem}", param=path, code=code)


def unsupported(path: str, problem: str) -> ApiError:
    return bad(path, problem, code="unsupported_parameter")


def string(fields: dict, name: str, path: str) -> str:
    """A required string of an item or a tool."""
    if not isinstance(fields.get(name), str):
        raise bad(f"{path}.{name}", "expected a string")
    return fields[name]


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


# ---- Tools --------------------------------------------------------------------------------------

MAX_NAME = 64                                      # characters of a function's name


@dataclass(frozen=True)
class ToolName:
    """How a client names a tool that is a plain function for the model."""

    type: str                                      # function or custom
    name: str
    namespace: str | None = None

    @property
    def flat(self) -> str:
        """The function's name for the model, of at most MAX_NAME characters."""
        flat = f"{self.namespace}__{self.name}" if self.namespace else self.name
        if not self.namespace or len(flat) <= MAX_NAME:
            return flat
        digest = hashlib.sha256(flat.encode()).hexdigest()[:8]
        return f"{flat[:MAX_NAME - 9]}_{digest}"


# What OpenAI's service runs and a model may do without: agents offer it beside their own tools. The
# server leaves it out then; what gives access to the user's data (file_search, mcp) it refuses.
ABILITIES = re.compile(r"web_search(_preview)?(_\d{4}_\d\d_\d\d)?|image_generation|"
                       "code_interpreter")


class Tools:
    """A request's tools as functions: custom ones get one string, `input`."""

    def __init__(self, tools: list):
        self.functions, self.names = [], {}        # names: the function's name -> ToolName
        self.left_out = []                         # types
        for i, tool in enumerate(tools):
            self._add(tool, f"tools.{i}")
        if self.left_out and not self.functions:
            raise unsupported("tools", f"the tool {self.left_out[0]} is not supported: this server "
                              "runs none itself. Send function tools, or no tools")

    def _add(self, tool, path: str, namespace: str | None = None, about: str = "") -> None:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == "namespace" and namespace is None:
            self._add_namespace(tool, path)
        elif kind in ("function", "custom"):
            self._add_function(tool, path, namespace, about)
        elif isinstance(kind, str) and ABILITIES.fullmatch(kind):
            self.left_out.append(kind)
        else:
            shown = ascii(kind)[:60]
            raise unsupported(f"{path}.type", f"the tool {shown} is not supported: only function, "
                              "custom and namespace tools are. Leave it out of the request")

    def _add_namespace(self, tool: dict, path: str) -> None:
        name, about = string(tool, "name", path), description(tool, path)
        inner = tool.get("tools")
        if not isinstance(inner, list):
            raise bad(f"{path}.tools", "expected a list")
        for i, each in enumerate(inner):           # its description once: it may be long
            self._add(each, f"{path}.tools.{i}", name, "" if i else about)

    def _add_function(self, tool: dict, path: str, namespace: str | None, about: str) -> None:
        name = ToolName(tool["type"], string(tool, "name", path), namespace)
        if len(name.flat) > MAX_NAME or not re.fullmatch("[a-zA-Z0-9_.-]+", name.flat):
            raise bad(f"{path}.name", f"must be 1 to {MAX_NAME} letters, digits, dots, dashes or "
                      "underscores")
        if name.flat in self.names:
            raise bad(f"{path}.name", f"two tools are named '{name.flat}'")
        texts = [about, description(tool, path)]
        if name.type == "function":
            parameters = tool.get("parameters")
            if not isinstance(parameters, dict | None):
                raise bad(f"{path}.parameters", "expected a JSON schema")
        else:
            parameters = dict(type="object", additionalProperties=False, required=["input"],
                              properties=dict(input=dict(type="string")))
            texts.append(input_format(tool.get("format"), f"{path}.format"))
        function = dict(name=name.flat, parameters=parameters, strict=tool.get("strict"),
                        description="\n\n".join(filter(None, texts)) or None)
        self.names[name.flat] = name
        self.functions.append(dict(type="function", function=function))

    def choose(self, choice) -> tuple[str | dict | None, list[dict]]:
        """-> the chat's tool_choice, and the functions that may be called."""
        if choice in (None, "none", "auto", "required"):
            return choice, self.functions
        if not isinstance(choice, dict):
            raise bad("tool_choice", "expected none, auto, required or an object")
        if choice.get("type") != "allowed_tools":
            function = dict(name=self._chosen(choice, "tool_choice"))
            return dict(type="function", function=function), self.functions
        if choice.get("mode") not in ("auto", "required"):
            raise bad("tool_choice.mode", "expected auto or required")
        allowed = choice.get("tools")
        if not isinstance(allowed, list) or not allowed:
            raise bad("tool_choice.tools", "expected a list of tools")
        names = {self._chosen(each, f"tool_choice.tools.{i}") for i, each in enumerate(allowed)}
        functions = [each for each in self.functions if each["function"]["name"] in names]
        return choice["mode"], functions

    def _chosen(self, choice, path: str) -> str:
        """The name of the function that {"type": "function" or "custom", "name": …} means."""
        kind = choice.get("type") if isinstance(choice, dict) else None
        if kind not in ("function", "custom"):
            raise unsupported(f"{path}.type", f"the tool {ascii(kind)[:60]} is not supported: only "
                              "function and custom tools are")
        if isinstance(choice.get("function"), dict):           # as in chat completions
            choice = choice["function"]
        name = ToolName(kind, string(choice, "name", path), choice.get("namespace")).flat
        if name not in self.names:
            raise bad(path, f"no tool is named '{name[:100]}'")
        return name


def description(tool: dict, path: str) -> str:
    return "" if tool.get("description") is None else string(tool, "description", path)


def input_format(form, path: str) -> str:
    """What tells the model of a custom tool's format: a grammar does not constrain its calls."""
    kind = form.get("type") if isinstance(form, dict) else None
    if form is None or kind == "text":
        return ""
    if kind != "grammar":
        raise bad(f"{path}.type", "expected text or grammar")
    syntax = string(form, "syntax", path)
    return f"The input must match this {syntax} grammar:\n{string(form, 'definition', path)}"


# ---- Items --------------------------------------------------------------------------------------

TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal",
              "summary_text": "text", "reasoning_text": "text"}        # type -> key of the text
ID_PREFIX = {"message": "msg", "function_call": "fc", "function_call_output": "fco",
             "custom_tool_call": "ctc", "custom_tool_call_output": "cto", "reasoning": "rs"}
PLAIN = "plain:"                                   # begins our encrypted_content, which is base64


def text_of(content, path: str) -> str:
    """The text of a message or a tool's output: a string, or a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad(path, "expected a string or a list of parts")
    texts = []
    for i, part in enumerate(content):
        if not isinstance(part, dict):
            raise bad(f"{path}.{i}", "expected an object with a type")
        kind = part.get("type")
        key = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if key is None:
            raise bad(f"{path}.{i}.type", f"{ascii(kind)[:60]} is not supported: the server reads "
                      "text only", code="unsupported_content")
        texts.append(string(part, key, f"{path}.{i}"))
    return "".join(texts)


def item_type(item, path: str) -> str:
    """ApiError names an item that cannot be translated."""
    if not isinstance(item, dict):
        raise bad(path, "expected an object")
    kind = item.get("type")
    if kind is None:                               # both may leave it out
        kind = "message" if "role" in item else "item_reference" if "id" in item else None
    if kind != "item_reference" and (not isinstance(kind, str) or kind not in ID_PREFIX):
        raise unsupported(f"{path}.type", f"the item {ascii(kind)[:60]} is not supported: only "
                          f"{', '.join(ID_PREFIX)} and item_reference are")
    return kind


def with_id(item: dict, kind: str) -> dict:
    """An input item as GET …/input_items returns it: with a type, an id, and parts."""
    item = {**item, "type": kind}
    if not isinstance(item.get("id"), str):
        item["id"] = new_id(ID_PREFIX[kind])
    if kind == "message" and isinstance(item.get("content"), str):
        part = dict(type="input_text", text=item["content"])
        if item.get("role") == "assistant":
            part = dict(type="output_text", text=item["content"], annotations=[])
        item["content"] = [part]
    if kind != "reasoning":
        item.setdefault("status", "completed")
    return item


class Conversation:
    """The chat messages of a list of items. An assistant's items that follow each other, thoughts,
    text and calls, are one message."""

    def __init__(self, instructions: str | None):
        self.messages = [dict(role="system", content=instructions)] if instructions else []
        self.call_ids = set()

    def add(self, item: dict, path: str) -> None:
        getattr(self, f"_{item['type']}")(item, path)

    def merged(self) -> list[dict]:
        """The messages, the system messages at the beginning as one: many templates allow one."""
        n = 0
        while n < len(self.messages) and self.messages[n]["role"] in ("system", "developer"):
            n += 1
        if n < 2:
            return self.messages
        text = "\n\n".join(message["content"] for message in self.messages[:n])
        return [dict(role="system", content=text), *self.messages[n:]]

    def _assistant(self, is_new=lambda message: False) -> dict:
        """The assistant's message that the next item belongs to."""
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant" or is_new(last):
            self.messages.append(dict(role="assistant", content=""))
        return self.messages[-1]

    def _message(self, item: dict, path: str) -> None:
        role, text = item.get("role"), text_of(item.get("content"), f"{path}.content")
        if role not in ("user", "assistant", "system", "developer"):
            raise bad(f"{path}.role", "expected user, assistant, system or developer")
        if role != "assistant":
            self.messages.append(dict(role=role, content=text))
            return
        message = self._assistant(lambda last: last["content"] and "tool_calls" not in last)
        message["content"] += "\n\n" + text if message["content"] else text

    def _reasoning(self, item: dict, path: str) -> None:
        thoughts = (text_of(item.get("content") or [], f"{path}.content")
                    or decoded(item.get("encrypted_content"))
                    or text_of(item.get("summary") or [], f"{path}.summary"))
        if not thoughts and item.get("encrypted_content"):
            raise bad(f"{path}.encrypted_content", "it was written by another server, and the item "
                      "has neither content nor summary: leave the item out",
                      code="invalid_encrypted_content")
        if thoughts:
            message = self._assistant(lambda last: last["content"] or "tool_calls" in last)
            earlier = message.get("reasoning_content")
            message["reasoning_content"] = f"{earlier}\n\n{thoughts}" if earlier else thoughts

    def _function_call(self, item: dict, path: str) -> None:
        arguments = item.get("arguments")
        if isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif not isinstance(arguments, str):
            raise bad(f"{path}.arguments", "expected a string of JSON")
        self._call(item, path, arguments)

    def _custom_tool_call(self, item: dict, path: str) -> None:
        text = string(item, "input", path)
        self._call(item, path, json.dumps(dict(input=text), ensure_ascii=False))

    def _call(self, item: dict, path: str, arguments: str) -> None:
        call_id = string(item, "call_id", path)
        name = ToolName("function", string(item, "name", path), item.get("namespace")).flat
        self.call_ids.add(call_id)
        self._assistant().setdefault("tool_calls", []).append(dict(
            id=call_id, type="function", function=dict(name=name, arguments=arguments)))

    def _function_call_output(self, item: dict, path: str) -> None:
        call_id = string(item, "call_id", path)
        if call_id not in self.call_ids:
            raise bad(f"{path}.call_id", f"no call has the id '{call_id[:100]}': send the call's "
                      "item too, or previous_response_id")
        text = text_of(item.get("output"), f"{path}.output")
        self.messages.append(dict(role="tool", tool_call_id=call_id, content=text))

    _custom_tool_call_output = _function_call_output


def encoded(thoughts: str) -> str:
    """Our encrypted_content. It hides nothing: it lets clients that send back only this field (the
    AI SDK with store: false) return the thoughts."""
    return PLAIN + base64.b64encode(thoughts.encode()).decode()


def decoded(text) -> str:
    """The thoughts in our encrypted_content; empty for that of another server."""
    if not isinstance(text, str) or not text.startswith(PLAIN):
        return ""
    try:
        return base64.b64decode(text.removeprefix(PLAIN), validate=True).decode()
    except ValueError:
        return ""


# ---- The request --------------------------------------------------------------------------------

@dataclass
class PreparedResponse(PreparedRequest):
    """A chat, and what its answer needs: the tools' names by those that the model knows, the items
    of this request and of earlier turns (history), and the bytes of both."""

    names: dict[str, ToolName] = field(default_factory=dict)
    input_items: list[dict] = field(default_factory=list)
    history: list[dict] = field(default_factory=list)
    n_bytes: int = 0
    store: ResponseStore | None = None


class ResponsesPreparer:
    """Translates requests for a RequestPreparer."""

    def __init__(self, preparer: RequestPreparer, store: ResponseStore):
        self.preparer, self.store = preparer, store

    def prepare(self, request: ResponsesRequest) -> PreparedResponse:
        for name, advice in REFUSED.items():
            if getattr(request, name):
                raise ApiError(400, f"the field '{name}' is not supported: {advice}", param=name,
                               code="unsupported_parameter")
        if request.text and request.text.verbosity not in (None, "medium"):
            raise unsupported("text.verbosity", "no model here has such a setting: ask for it in "
                              "the instructions")
        tools = Tools(request.tools or [])
        history, earlier_bytes = self.history(request.previous_response_id)
        items = self.input_items(request.input)
        conversation = Conversation(request.instructions)
        for item in history:
            conversation.add(item, "previous_response_id")
        for i, item in enumerate(items):
            conversation.add(item, f"input.{i}")
        if not history and not items:
            raise bad("input", "expected a string or a list of items")
        try:
            chat = validate(ChatRequest, chat_fields(request, conversation.merged(), tools))
            chat._unknown = [*request._unknown, *(f"tools.{kind}" for kind in tools.left_out)]
            prepared = self.preparer.prepare_chat(chat)
        except ApiError as e:
            raise in_our_words(e) from None
        n_bytes = earlier_bytes + len(json.dumps(items))
        return PreparedResponse(**vars(prepared), names=tools.names, input_items=items,
                                history=history, n_bytes=n_bytes, store=self.store)

    def history(self, response_id: str | None) -> tuple[list[dict], int]:
        """The items up to the end of an earlier response, and their bytes."""
        if response_id is None:
            return [], 0
        kept = self.store.get(response_id)
        if kept is None:
            raise ApiError(404, f"Previous response with id '{response_id[:100]}' not found: it "
                           "was never kept, or is no longer (--keep_responses, --keep_minutes)",
                           param="previous_response_id", code="previous_response_not_found")
        return kept.conversation(), kept.n_bytes

    def input_items(self, given) -> list[dict]:
        """The items with ids; references replaced by what they refer to."""
        if isinstance(given, str):
            given = [dict(role="user", content=given)]
        if not isinstance(given, list | None):
            raise bad("input", "expected a string or a list of items")
        items = []
        for i, item in enumerate(given or []):
            kind = item_type(item, f"input.{i}")
            if kind != "item_reference":
                items.append(with_id(item, kind))
                continue
            item_id = string(item, "id", f"input.{i}")
            referred = self.store.item(item_id)
            if referred is None:
                raise bad(f"input.{i}.id", f"Item with id '{item_id[:100]}' not found: only items "
                          "of stored responses can be referred to", 404)
            items.append(referred)
        return items


def chat_fields(request: ResponsesRequest, messages: list[dict], tools: Tools) -> dict:
    """The ChatRequest's fields."""
    own = {"model", "stream", "stream_options", "n", "max_tokens", "user"}
    fields = {name: getattr(request, name) for name in Request.model_fields if name not in own}
    choice, functions = tools.choose(request.tool_choice)
    fields.update(messages=messages, tools=functions or None, tool_choice=choice,
                  parallel_tool_calls=request.parallel_tool_calls,
                  max_completion_tokens=request.max_output_tokens)
    form = request.text and request.text.format
    if form and form.type == "json_schema":
        if form.schema_ is None:
            raise bad("text.format.schema", "expected a JSON schema")
        schema = dict(name=form.name, description=form.description, schema=form.schema_,
                      strict=form.strict)
        fields["response_format"] = dict(type="json_schema", json_schema=schema)
    elif form:
        fields["response_format"] = dict(type=form.type)
    if LOGPROBS in (request.include or []):
        fields.update(logprobs=True, top_logprobs=request.top_logprobs)
    fields["reasoning_effort"] = request.reasoning and request.reasoning.effort
    fields["chat_template_kwargs"] = request.chat_template_kwargs
    return fields


CHAT_NAMES = {"messages": "input", "prompt": "input", "response_format": "text.format",
              "max_completion_tokens": "max_output_tokens", "max_tokens": "max_output_tokens",
              "reasoning_effort": "reasoning.effort", "logprobs": "include"}


def in_our_words(error: ApiError) -> ApiError:
    """An error about a chat's field, with the name of the field in this API."""
    param, message = error.error["param"], error.error["message"]
    top = (param or "").partition(".")[0]
    ours = CHAT_NAMES.get(top, param)
    if message.startswith(f"{param}:"):
        message = message.replace(param, ours, 1)
    if top in CHAT_NAMES and "_" in top:           # not a word of English
        message = message.replace(top, ours)
    error.error.update(message=message, param=ours)
    return error


# ---- The answer ---------------------------------------------------------------------------------

class TextItem:
    """A message or the thoughts: an item with one part, and the events of its text."""

    def __init__(self, item: dict, part: dict, parts: str, part_event: str, text_event: str):
        """parts: the item's key of the list of parts."""
        self.item, self.part, self.parts = item, part, parts
        self.part_event, self.text_event = part_event, text_event
        self.index = {"summary_index" if parts == "summary" else "content_index": 0}

    def begin(self):
        yield f"{self.part_event}.added", dict(part=dict(self.part), **self.index)

    def push(self, text: str, logprobs: list[dict]):
        self.part["text"] += text
        more = {}
        if self.item["type"] == "message":
            self.part["logprobs"] += logprobs
            more = dict(logprobs=logprobs)
        yield f"{self.text_event}.delta", dict(delta=text, **self.index, **more)

    def end(self):
        more = {}
        if self.item["type"] == "message":
            more = dict(logprobs=self.part["logprobs"])
        yield f"{self.text_event}.done", dict(text=self.part["text"], **self.index, **more)
        yield f"{self.part_event}.done", dict(part=self.part, **self.index)
        self.item[self.parts] = [self.part]


class CallItem:
    """A call of a function or of a custom tool, and the events of its arguments."""

    def __init__(self, item: dict):
        self.item, self.arguments = item, ""

    def begin(self):
        return ()

    def push(self, arguments: str, logprobs: list[dict]):
        self.arguments += arguments
        if self.item["type"] == "function_call":
            yield "response.function_call_arguments.delta", dict(delta=arguments)

    def end(self):
        if self.item["type"] == "function_call":
            self.item["arguments"] = self.arguments
            yield "response.function_call_arguments.done", dict(arguments=self.arguments,
                                                                name=self.item["name"])
            return
        text = self.item["input"] = custom_input(self.arguments)
        yield "response.custom_tool_call_input.delta", dict(delta=text)
        yield "response.custom_tool_call_input.done", dict(input=text)


def custom_input(arguments: str) -> str:
    """The text of a custom tool's call: the string `input`, else the arguments as they are."""
    try:
        text = json.loads(arguments)["input"]
    except (ValueError, KeyError, TypeError):
        text = None
    return text if isinstance(text, str) else arguments


class ResponsesAnswer(Answer):
    """One response: its items as they come, and the events of a stream."""

    def __init__(self, preparer: RequestPreparer, request: ResponsesRequest,
                 prepared: PreparedResponse):
        super().__init__(preparer, request, prepared)
        self.id = new_id("resp")
        self.output, self.open, self.open_key = [], None, None    # open: what is being written
        self.n_event = 0
        self.pending_logprobs, self.blank = [], ""
        reasoning = request.reasoning or Reasoning()
        self.summary = reasoning.summary or reasoning.generate_summary
        self.keeps = request.store is not False

    # ---- Events ----

    def new(self, kind: str, **fields) -> dict:
        self.n_event += 1
        return dict(type=kind, sequence_number=self.n_event - 1, **fields)

    def begin(self) -> list[dict]:
        return [self.new(f"response.{kind}", response=self.response("in_progress"))
                for kind in ("created", "in_progress")]

    def add(self, event: Event) -> list[dict]:
        parser, events = self.prepared.parsers[0], []
        deltas = parser.push(event.text) if event.text else []
        if event.finish_reason:
            deltas += parser.finish(event.finish_reason)
        has_text = any("content" in delta for delta in deltas)
        logprobs = self.text_logprobs(event, has_text)
        if event.thoughts:
            events += self.write("thoughts", event.thoughts, [])
        for delta in deltas:
            if delta.get("content"):
                events += self.write("text", delta["content"], logprobs)
                logprobs = []
            for call in delta.get("tool_calls", ()):
                events += self.write_call(call)
        if event.finish_reason:
            self.finish_reasons[0] = event.finish_reason
            has_calls = any("call_id" in item for item in [*self.output, self.open_item()])
            if not has_calls and (self.blank or event.finish_reason == "stop"):
                events += self.write("text", "", [], is_last=True)     # clients expect a message
            events += self.close(self.item_status())
        return events

    def text_logprobs(self, event: Event, has_text: bool) -> list[dict]:
        """The log-probabilities to send with the event's text: not those of thoughts."""
        self.pending_logprobs += [self.logprob(*token) for token in event.logprobs]
        if event.thoughts and not has_text:
            self.pending_logprobs = []
        if not has_text:
            return []
        logprobs, self.pending_logprobs = self.pending_logprobs, []
        if event.thoughts:                         # the last tokens, which make up the text
            n_bytes, n = len(event.text.encode()), 0
            while n < len(logprobs) and n_bytes > 0:
                n += 1
                n_bytes -= len(logprobs[-n]["bytes"])
            logprobs = logprobs[len(logprobs) - n:]
        return logprobs

    def open_item(self) -> dict:
        return self.open.item if self.open else {}

    def write(self, key: str, text: str, logprobs: list[dict], is_last: bool = False) -> list[dict]:
        """Events of new text of the item `key`, which is begun if another one is open. White space
        begins none: calls may follow it."""
        events = []
        if key == "text" and self.open_key != key:
            self.blank += text
            if not self.blank.strip() and not is_last:
                return []
            text, self.blank = self.blank, ""
        if self.open_key != key:
            events += self.close("completed")
            events += self.start(key, self.new_text_item(key))
        if text:
            events += self.item_events(self.open.push(text, logprobs))
        return events

    def new_text_item(self, key: str) -> TextItem:
        if key == "text":
            item = dict(id=new_id("msg"), type="message", status="in_progress", role="assistant",
                        content=[])
            part = dict(type="output_text", text="", annotations=[], logprobs=[])
            return TextItem(item, part, "content", "response.content_part", "response.output_text")
        item = dict(id=new_id("rs"), type="reasoning", status="in_progress", summary=[])
        if self.summary not in (None, "none"):     # the thoughts in full
            part = dict(type="summary_text", text="")
            return TextItem(item, part, "summary", "response.reasoning_summary_part",
                            "response.reasoning_summary_text")
        item["content"] = []
        return TextItem(item, dict(type="reasoning_text", text=""), "content",
                        "response.content_part", "response.reasoning_text")

    def write_call(self, call: dict) -> list[dict]:
        events, key, function = [], f"call {call['index']}", call["function"]
        if self.open_key != key:
            name = self.prepared.names.get(function["name"]) or ToolName("function",
                                                                         function["name"])
            item = dict(id=new_id("fc"), type="function_call", status="in_progress",
                        call_id=call["id"], name=name.name, arguments="")
            if name.type == "custom":
                item = dict(id=new_id("ctc"), type="custom_tool_call", status="in_progress",
                            call_id=call["id"], name=name.name, input="")
            if name.namespace:
                item["namespace"] = name.namespace
            self.blank = ""
            events += self.close("completed")
            events += self.start(key, CallItem(item))
        return events + self.item_events(self.open.push(function.get("arguments") or "", []))

    def start(self, key: str, item: TextItem | CallItem) -> list[dict]:
        self.open, self.open_key = item, key
        added = self.new("response.output_item.added", output_index=len(self.output),
                         item=copy.deepcopy(item.item))
        return [added, *self.item_events(item.begin())]

    def close(self, status: str) -> list[dict]:
        """End the open item, if there is one."""
        if self.open is None:
            return []
        events, item = self.item_events(self.open.end()), self.open.item
        item["status"] = status
        if item["type"] == "reasoning" and ENCRYPTED in (self.request.include or []):
            item["encrypted_content"] = encoded(self.open.part["text"])
        events.append(self.new("response.output_item.done", output_index=len(self.output),
                               item=item))
        self.output.append(item)
        self.open = self.open_key = None
        return events

    def item_events(self, events) -> list[dict]:
        return [self.new(kind, item_id=self.open.item["id"], output_index=len(self.output),
                         **fields) for kind, fields in events]

    def item_status(self) -> str:
        return "incomplete" if self.finish_reasons[0] == "length" else "completed"

    def end(self) -> list[dict]:
        response = self.whole()
        return [self.new(f"response.{response['status']}", response=response)]

    def fail(self, error: ApiError, wire: OpenAIWire) -> list[dict]:
        response = self.response("failed")
        response.update(store=False, error=dict(code="server_error", message=str(error)))
        return [self.new("response.failed", response=response)]

    # ---- The object ----

    def whole(self) -> dict:
        """The response, which is kept for previous_response_id."""
        response = self.response(self.item_status())
        response.update(completed_at=int(time.time()), usage=self.usage())
        if response["status"] == "incomplete":
            response["incomplete_details"] = dict(reason="max_output_tokens")
        if self.keeps:
            kept = KeptResponse(response, self.prepared.input_items, self.prepared.history,
                                self.prepared.n_bytes + len(json.dumps(self.output)))
            response["store"] = self.prepared.store.put(kept)
        return response

    def response(self, status: str) -> dict:
        request, params = self.request, self.prepared.generations[0].params
        text = request.text.model_dump(exclude_none=True, by_alias=True) if request.text else {}
        reasoning = request.reasoning or Reasoning()
        return dict(
            id=self.id, object="response", created_at=self.created, completed_at=None,
            status=status, background=False, error=None, incomplete_details=None,
            instructions=request.instructions, max_output_tokens=request.max_output_tokens,
            max_tool_calls=request.max_tool_calls, metadata=request.metadata or {},
            model=self.preparer.name, output=self.output,
            parallel_tool_calls=request.parallel_tool_calls is not False,
            previous_response_id=request.previous_response_id,
            prompt_cache_key=request.prompt_cache_key,
            reasoning=dict(effort=reasoning.effort, summary=self.summary),
            safety_identifier=request.safety_identifier, service_tier="default",
            store=self.keeps, temperature=params.temperature,
            text={"format": dict(type="text"), **text},
            tool_choice=request.tool_choice or "auto", tools=request.tools or [],
            top_logprobs=request.top_logprobs or 0, top_p=params.top_p,
            truncation=request.truncation or "disabled", usage=None, user=request.user)

    def usage(self) -> dict:
        chat = super().usage()
        n_cached = chat["prompt_tokens_details"]["cached_tokens"]
        return dict(
            input_tokens=chat["prompt_tokens"],
            input_tokens_details=dict(cached_tokens=n_cached, cache_write_tokens=0),
            output_tokens=chat["completion_tokens"],
            output_tokens_details=chat["completion_tokens_details"],
            total_tokens=chat["total_tokens"])


class ResponsesWire(OpenAIWire):
    """Server-sent events with their type as name; response.completed is the last one."""

    end = ""

    def frame(self, event: dict) -> str:
        return f"event: {event['type']}\n{super().frame(event)}"


RESPONSES = ResponsesWire()


# ---- Kept responses -----------------------------------------------------------------------------

def input_item_list(items: list[dict], limit: str | None, order: str | None,
                    after: str | None) -> dict:
    """GET /v1/responses/{id}/input_items: a page of at most `limit` items, the last ones first
    unless order is asc, after the item with the id `after`."""
    if limit is not None and not (limit.isascii() and limit.isdigit() and 1 <= int(limit) <= 100):
        raise bad("limit", "expected an integer from 1 to 100")
    if order not in (None, "asc", "desc"):
        raise bad("order", "expected asc or desc")
    items = items if order == "asc" else items[::-1]
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise bad("after", f"no item has the id '{after[:100]}'")
        items = items[ids.index(after) + 1:]
    page = items[:int(limit or 20)]
    return dict(object="list", data=page, first_id=page[0]["id"] if page else None,
                last_id=page[-1]["id"] if page else None, has_more=len(page) < len(items))
