"""Anthropic's Messages API, translated: requests to ChatRequests, and a chat's events to answers.

It owns the schema, the translation, the answer's blocks, and the form of errors and streams. It
knows no template and no tokens: those are prepare.py's.

    chat = chat_request(request, variables)        # MessagesRequest -> ChatRequest
    n = count_tokens(preparer, request)            # /v1/messages/count_tokens
"""

import json
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from gpt_faster.decoding.scheduler import Event
from gpt_faster.server.answers import Answer
from gpt_faster.server.prepare import PreparedRequest, RequestPreparer
from gpt_faster.server.protocol import ApiError, ChatRequest, Lenient, Strict, found, ranged
from gpt_faster.server.request_id import current
from gpt_faster.server.wire import OpenAIWire
from gpt_faster.text.chat_template import TemplateError, render, template_variables
from tokenizer import Tokenizer

ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error",
               408: "timeout_error", 413: "request_too_large", 429: "rate_limit_error",
               503: "overloaded_error", 504: "timeout_error", 529: "overloaded_error"}
OUR_NAMES = {"stop": "stop_sequences", "response_format": "output_config.format"}
SIGNATURE = "gpt-faster"                           # of thinking blocks: clients drop those without
# The first line of Claude Code's system prompt: it holds a checksum that changes with each request,
# so the cached prefix would end there.
BILLING_HEADER = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
# Types of content blocks, and the fields that each must have.
BLOCKS = {"text": ("text",), "thinking": ("thinking",), "redacted_thinking": (),
          "tool_use": ("id", "name", "input"), "tool_result": ("tool_use_id",),
          "tool_reference": ("tool_name",)}
ALLOWED_BLOCKS = {"system": {"text"}, "user": {"text", "tool_result"},
                  "assistant": {"text", "thinking", "redacted_thinking", "tool_use"},
                  "tool_result": {"text", "tool_reference"}}
REFUSED_BLOCKS = {
    "image": "images are not supported: this server's models read text only",
    "document": "documents are not supported: send the document's text in a text block",
    "search_result": "search results are not supported: send their text in a text block"}


# ---- Requests -----------------------------------------------------------------------------------

def as_blocks(content):
    """A string is short for one text block."""
    if isinstance(content, str):
        return [dict(type="text", text=content)]
    if isinstance(content, list):
        return content
    raise ValueError(f"expected a string or a list of content blocks, got {found(content)}")


class Block(Lenient):
    """A content block of any type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    tool_name: str | None = None
    content: "Blocks | None" = None
    is_error: bool | None = None

    @model_validator(mode="after")
    def check(self):
        if self.type not in BLOCKS:
            raise ValueError(REFUSED_BLOCKS.get(
                self.type, f"blocks of type '{self.type[:60]}' are not supported"))
        for name in BLOCKS[self.type]:
            if getattr(self, name) is None:
                raise ValueError(f"a {self.type} block needs '{name}'")
        check_blocks(self.content or [], "tool_result", "the content of a tool_result")
        return self


Blocks = Annotated[list[Block], BeforeValidator(as_blocks)]


def check_blocks(blocks: list[Block], place: str, name: str) -> None:
    """ValueError if a block's type is not allowed in this place."""
    for i, block in enumerate(blocks):
        if block.type not in ALLOWED_BLOCKS[place]:
            raise ValueError(f"content.{i}: {name} cannot have blocks of type '{block.type}'")


def checked_system(blocks: list[Block]) -> list[Block]:
    check_blocks(blocks, "system", "system")
    return blocks


class Message(Lenient):
    role: Literal["user", "assistant", "system"]
    content: Blocks

    @model_validator(mode="after")
    def check(self):
        check_blocks(self.content, self.role, f"a message of the role '{self.role}'")
        return self


def checked_tool(tool):
    """ValueError for a tool of Anthropic's, which a type names and no schema describes."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind != "custom":
        raise ValueError(f"the tool '{kind[:60]}' is not supported: it is run or defined by "
                         "Anthropic's service. Define a custom tool with an input_schema")
    return tool


class ToolFields(Lenient):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    input_schema: dict[str, Any]


Tool = Annotated[ToolFields, BeforeValidator(checked_tool)]


class ToolChoice(Lenient):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def check(self):
        if self.type == "tool" and self.name is None:
            raise ValueError("the type 'tool' needs 'name'")
        return self


class Thinking(Lenient):
    """budget_tokens is accepted and not enforced: the model ends its thoughts."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Lenient):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Lenient):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Edit(Lenient):
    """clear_thinking drops earlier thoughts; here the chat template decides which it keeps."""

    type: Literal["clear_thinking_20251015"]


class ContextManagement(Lenient):
    edits: list[Edit] | None = None


class CountRequest(Strict):
    """Fields of /v1/messages/count_tokens. An unknown one is an error that names it; a null is
    absent."""

    messages: Annotated[list[Message], Field(min_length=1)]
    model: str | None = None
    system: Annotated[Blocks, AfterValidator(checked_system)] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None      # an earlier name of output_config.format
    context_management: ContextManagement | None = None
    # Accepted: they cannot change the text.
    betas: Any = None
    billing_policy: Any = None
    cache_control: Any = None
    diagnostics: Any = None
    fallback_credit_token: Any = None
    fallbacks: Any = None
    inference_geo: Any = None
    metadata: Any = None
    service_tier: Any = None
    speed: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None


class MessagesRequest(CountRequest):
    """max_tokens 0: only compute the prompt, so that the next request finds it in the cache."""

    max_tokens: Annotated[ranged("max_tokens"), Field(ge=0)]
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: ranged("temperature") | None = None
    top_p: ranged("top_p") | None = None
    top_k: ranged("top_k") | None = None


# ---- Translation --------------------------------------------------------------------------------

def chat_request(request: CountRequest, variables: frozenset[str],
                 late_system: bool) -> ChatRequest:
    """The same request of the chat API.

    variables: those that the chat template reads. late_system: whether it renders a system message
    after the first message; if not, the message becomes a user's.
    """
    messages = chat_messages(request, late_system)
    fields = dict(messages=messages, **thinking_fields(request, variables))
    if messages[-1]["role"] == "assistant":
        if "tool_calls" in messages[-1]:
            raise ApiError(400, f"messages.{len(request.messages) - 1}: a final tool_use needs its "
                           "tool_result in a user message", param="messages")
        fields["continue_final_message"] = True
    if request.tools:
        fields["tools"] = [dict(type="function", function=dict(
            name=tool.name, description=tool.description, parameters=tool.input_schema))
            for tool in request.tools]
    if choice := request.tool_choice:
        named = dict(type="function", function=dict(name=choice.name))
        fields["tool_choice"] = dict(auto="auto", any="required", none="none",
                                     tool=named)[choice.type]
        if choice.disable_parallel_tool_use:
            fields["parallel_tool_calls"] = False
    form = request.output_config and request.output_config.format
    if form and request.output_format:
        raise ApiError(400, "set only one of output_config.format and output_format",
                       param="output_format")
    if form := form or request.output_format:
        fields["response_format"] = dict(type="json_schema", json_schema=dict(schema=form.schema_))
    if isinstance(request, MessagesRequest):
        fields.update(max_tokens=request.max_tokens or 1, stream=request.stream,
                      stop=request.stop_sequences, temperature=request.temperature,
                      top_p=request.top_p, top_k=request.top_k)
    return ChatRequest.model_validate(fields)


def thinking_fields(request: CountRequest, variables: frozenset[str]) -> dict:
    """The chat API's fields about thinking, where the chat template reads such variables."""
    fields = {}
    if request.thinking and {"enable_thinking", "thinking"} & variables:
        fields["enable_thinking"] = request.thinking.type != "disabled"
    if request.output_config and "reasoning_effort" in variables:
        fields["reasoning_effort"] = request.output_config.effort
    return fields


def chat_messages(request: CountRequest, late_system: bool) -> list[dict]:
    """Messages in turns: consecutive ones of one role are one."""
    texts = [BILLING_HEADER.sub("", block.text) for block in request.system or []]
    messages = [dict(role="system", content="".join(texts))] if any(texts) else []
    for message in request.messages:
        for new in turns(message):
            is_late = messages and messages[-1]["role"] != "system"
            if new["role"] == "system" and is_late and not late_system:
                new["role"] = "user"
            if messages and messages[-1]["role"] == new["role"] != "tool":
                extend(messages[-1], new)
            else:
                messages.append(new)
    return messages


def turns(message: Message) -> list[dict]:
    """The chat's messages of one message: a user's tool results are messages of their own."""
    if message.role == "assistant":
        return [assistant_turn(message.content)]
    found = []
    for block in message.content:
        if block.type == "tool_result":
            found.append(dict(role="tool", tool_call_id=block.tool_use_id,
                              content=result_text(block)))
        elif found and found[-1]["role"] == message.role:
            found[-1]["content"] += block.text
        else:
            found.append(dict(role=message.role, content=block.text))
    return found or [dict(role=message.role, content="")]


def assistant_turn(blocks: list[Block]) -> dict:
    turn = dict(role="assistant", content=joined(blocks, "text"))
    if thoughts := joined(blocks, "thinking"):
        turn["reasoning_content"] = thoughts
    calls = [dict(id=block.id, function=dict(name=block.name, arguments=block.input))
             for block in blocks if block.type == "tool_use"]
    if calls:
        turn["tool_calls"] = calls
    return turn


def joined(blocks: list[Block], kind: str) -> str:
    return "".join(getattr(block, kind) for block in blocks if block.type == kind)


def result_text(block: Block) -> str:
    """A tool's result as text, which says so if the tool failed."""
    text = "".join(part.text if part.type == "text" else part.tool_name
                   for part in block.content or [])
    if block.is_error and "error" not in text.lower():
        text = f"Error: {text}"
    return text


def extend(turn: dict, new: dict) -> None:
    """Append a message of the same role."""
    for name in ("content", "reasoning_content"):
        texts = [text for text in (turn.get(name), new.get(name)) if text]
        if texts or name in turn:
            turn[name] = "\n\n".join(texts)
    if calls := turn.get("tool_calls", []) + new.get("tool_calls", []):
        turn["tool_calls"] = calls


def prepare_messages(preparer: RequestPreparer, request: MessagesRequest) -> PreparedRequest:
    with anthropic_names():
        return preparer.prepare_chat(translated(preparer, request))


def count_tokens(preparer: RequestPreparer, request: CountRequest) -> dict:
    """The number of prompt tokens, also of a prompt that is too long for a slot."""
    with anthropic_names():
        parts = preparer.chat_parts(translated(preparer, request))
        return dict(input_tokens=len(preparer.chat_ids(*parts)))


def translated(preparer: RequestPreparer, request: CountRequest) -> ChatRequest:
    if preparer.tokenizer.chat_template is None:
        raise ApiError(400, "this model has no chat template: use /v1/completions")
    return chat_request(request, template_variables(preparer.tokenizer, bool(request.tools)),
                        takes_late_system(preparer.tokenizer))


@lru_cache(4)
def takes_late_system(tokenizer: Tokenizer) -> bool:
    """Whether the chat template renders a system message after the first message."""
    rule, names = "Answer in French.", ("user", "assistant", "system", "user")
    messages = [dict(role=role, content=rule if role == "system" else "Yes?") for role in names]
    try:
        return rule in render(tokenizer, messages)
    except TemplateError:
        return False


@contextmanager
def anthropic_names() -> Iterator[None]:
    """An ApiError about a field of the chat API names Anthropic's field."""
    try:
        yield
    except ApiError as e:
        param, message = e.error["param"], e.error["message"]
        if name := OUR_NAMES.get(param):
            message = message.removeprefix(f"{param}: ")
            e.error.update(param=name, message=f"{name}: {message}")
        raise


# ---- Answers ------------------------------------------------------------------------------------

class MessageAnswer(Answer):
    """A message of content blocks: thinking, text, tool_use, in the order in which they come."""

    def __init__(self, *args):
        super().__init__(*args)
        self.id = f"msg_{secrets.token_hex(12)}"
        [self.generation], [self.parser] = self.prepared.generations, self.prepared.parsers
        self.blocks, self.is_open = [], False      # is_open: the last block may grow
        self.blank = ""                            # white space that may precede more text
        self.shows_thoughts = not (self.request.thinking and
                                   self.request.thinking.display == "omitted")

    def message(self, usage: dict, stop_reason: str | None, stop_sequence: str | None) -> dict:
        return dict(id=self.id, type="message", role="assistant", model=self.preparer.name,
                    content=self.blocks, stop_reason=stop_reason, stop_sequence=stop_sequence,
                    usage=usage)

    def whole(self) -> dict:
        return self.message(self.usage(), *self.stop())

    def begin(self) -> list[dict]:
        """The prompt's length is known by now; what the cache has of it, only in end()."""
        usage = dict(self.usage(), output_tokens=0)
        message = self.message(usage, None, None)
        return [dict(type="message_start", message=dict(message, content=[])), dict(type="ping")]

    def add(self, event: Event) -> list[dict]:
        if self.request.max_tokens == 0:
            return []
        deltas = self.parser.push(event.text) if event.text else []
        if event.finish_reason:
            deltas += self.parser.finish(event.finish_reason)
        frames = self.grow("thinking", event.thoughts) if event.thoughts else []
        for delta in deltas:
            for call in delta.get("tool_calls", []):
                frames += self.add_call(call)
            if text := delta.get("content"):
                frames += self.add_text(text)
        if event.finish_reason:
            if self.blank and not self.has_calls():
                frames += self.grow("text", self.blank)
            frames += self.close()
        return frames

    def end(self) -> list[dict]:
        stop_reason, stop_sequence = self.stop()
        delta = dict(stop_reason=stop_reason, stop_sequence=stop_sequence)
        return [dict(type="message_delta", delta=delta, usage=self.usage()),
                dict(type="message_stop")]

    def usage(self) -> dict:
        """input_tokens are those that the cache did not have."""
        usage = super().usage()
        n_cached = usage["prompt_tokens_details"]["cached_tokens"]
        n_new, n_thought = 0, 0
        if self.request.max_tokens:
            n_new = usage["completion_tokens"]
            n_thought = usage["completion_tokens_details"]["reasoning_tokens"]
        return dict(input_tokens=usage["prompt_tokens"] - n_cached, cache_creation_input_tokens=0,
                    cache_read_input_tokens=n_cached, output_tokens=n_new,
                    output_tokens_details=dict(thinking_tokens=n_thought))

    def stop(self) -> tuple[str, str | None]:
        """-> stop_reason, stop_sequence."""
        generation = self.generation
        if generation.finish_reason == "length" or self.request.max_tokens == 0:
            n_all = len(generation.prompt_ids) + len(generation.ids)
            is_clipped = len(generation.ids) < self.request.max_tokens
            if is_clipped and n_all >= self.preparer.limit:
                return "model_context_window_exceeded", None
            return "max_tokens", None
        if self.has_calls():
            return "tool_use", None
        if generation.stop is not None:
            return "stop_sequence", generation.stop
        return "end_turn", None

    def has_calls(self) -> bool:
        return any(block["type"] == "tool_use" for block in self.blocks)

    # ---- Blocks ---------------------------------------------------------------------------------

    def add_text(self, text: str) -> list[dict]:
        """White space at the end waits for more text: before a tool call it is left out."""
        text = self.blank + text
        if self.blocks and not self.grows("text"):
            text = text.lstrip()
        body = text.rstrip()
        frames = self.grow("text", body) if body else []
        self.blank = text[len(body):]
        return frames

    def add_call(self, call: dict) -> list[dict]:
        """A tool call, which comes in one piece. The input of one that was cut off is empty; a
        stream has what came of it."""
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        block = dict(type="tool_use", id="toolu_" + call["id"].removeprefix("call_"), name=name,
                     input={})
        frames = self.open(block)
        with suppress(ValueError):
            block["input"] = json.loads(arguments)
        return [*frames, self.delta("input_json_delta", partial_json=arguments), *self.close()]

    def grows(self, kind: str) -> bool:
        return self.is_open and self.blocks[-1]["type"] == kind

    def grow(self, kind: str, text: str) -> list[dict]:
        """Append to a block of text or thoughts: to the last one, or else to a new one."""
        frames = []
        if not self.grows(kind):
            block = {"type": kind, kind: ""}
            if kind == "thinking":
                block["signature"] = ""
            frames = self.open(block)
        if kind == "thinking" and not self.shows_thoughts:
            return frames
        self.blocks[-1][kind] += text
        return [*frames, self.delta(f"{kind}_delta", **{kind: text})]

    def open(self, block: dict) -> list[dict]:
        frames = self.close()
        self.blocks.append(block)
        self.is_open, self.blank = True, ""
        return [*frames, dict(type="content_block_start", index=len(self.blocks) - 1,
                              content_block=dict(block))]

    def close(self) -> list[dict]:
        if not self.is_open:
            return []
        frames = []
        if self.blocks[-1]["type"] == "thinking":
            self.blocks[-1]["signature"] = SIGNATURE
            frames = [self.delta("signature_delta", signature=SIGNATURE)]
        self.is_open = False
        return [*frames, dict(type="content_block_stop", index=len(self.blocks) - 1)]

    def delta(self, kind: str, **fields) -> dict:
        return dict(type="content_block_delta", index=len(self.blocks) - 1,
                    delta=dict(type=kind, **fields))


class AnthropicWire(OpenAIWire):
    """Errors as {"type": "error", …}; server-sent events with their type as name."""

    end = ""

    def error(self, error: ApiError) -> dict:
        kind = ERROR_TYPES.get(error.status)
        if kind is None:
            kind = "api_error" if error.status >= 500 else "invalid_request_error"
        return dict(type="error", error=dict(type=kind, message=error.error["message"]),
                    request_id=current.get())

    def frame(self, event: dict) -> str:
        return f"event: {event['type']}\n{super().frame(event)}"


ANTHROPIC = AnthropicWire()


def model_info(card: dict) -> dict:
    """A model as GET /v1/models describes it. card: the same in OpenAI's form."""
    created = datetime.fromtimestamp(card["created"], timezone.utc)
    return dict(type="model", id=card["id"], display_name=card["id"],
                created_at=created.isoformat(), lifecycle="active",
                max_input_tokens=card["max_model_len"], max_tokens=card["max_model_len"])


def model_list(card: dict) -> dict:
    return dict(data=[model_info(card)], has_more=False, first_id=card["id"], last_id=card["id"])
