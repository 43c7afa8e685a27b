"""The request schema: OpenAI's fields and common extensions, each checked before it is used.

It knows types and limits, no model. A null is an absent field. Top-level fields that are not in the
schema are decided about in fields.py; extra keys inside of messages and tools are ignored.

    request = parse(ChatRequest, body, n_position)     # ApiError has OpenAI's error object
"""

import json
import re
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)

from gpt_faster.decoding.request_sampler import REQUEST_RANGES
from gpt_faster.server.fields import UnsupportedField, translate
from sampling import Range

MAX_PROMPTS, MAX_CONTAINERS = 128, 50_000
MAX_INT = (1 << 63) - 1
JSON_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.S)    # optional end: no backtracking

# Of all numbers of a request. max_tokens is also cut to the room that the prompt leaves.
LIMITS = REQUEST_RANGES | {
    "n": Range(int, 1, 128), "best_of": Range(int, 1, 128), "max_tokens": Range(int, -1, MAX_INT),
    "logprobs": Range(int, 0, 20), "top_logprobs": Range(int, 0, 20),
    "token id": Range(int, 0, MAX_INT)}


class ApiError(Exception):
    """An error response in OpenAI's format."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error",
                 param: str | None = None, code: str | None = None, retry_after: int | None = None):
        super().__init__(message)
        self.status, self.retry_after = status, retry_after
        self.error = dict(message=message, type=kind, param=param, code=code)


class Strict(BaseModel):
    """No coercions; a null is as good as absent."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False,
                              protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def without_nulls(cls, fields):
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None}


class Lenient(Strict):
    """A part of a message or a tool: clients send back whatever a server has written into it."""

    model_config = ConfigDict(extra="ignore")


# ---- Types ---------------------------------------------------------------------------------------

def ranged(name: str):
    """A pydantic type: a number within its range. 40.0 is an integer, as in JSON Schema."""
    return Annotated[LIMITS[name].kind, BeforeValidator(partial(number, name)), stated(name)]


def stated(name: str, minimum: int | None = None) -> Any:
    """The range in the API's description (openapi.py); validators do not state theirs."""
    allowed = LIMITS[name]
    low = "exclusiveMinimum" if allowed.above else "minimum"
    return Field(json_schema_extra={low: allowed.minimum if minimum is None else minimum,
                                    "maximum": allowed.maximum})


def number(name: str, value) -> int | float:
    """The value within its range in LIMITS. ValueError states the range."""
    if type(value) not in (int, float):
        what = "an integer" if LIMITS[name].kind is int else "a number"
        raise ValueError(f"expected {what}, got {found(value)}")
    return LIMITS[name].of(value)


def checked_top_k(top_k):
    """-1 disables top_k, as in vLLM."""
    return 0 if top_k == -1 else number("top_k", top_k)


def checked_seed(seed):
    """-1 is a random seed, as in vLLM and llama.cpp."""
    return None if seed == -1 else number("seed", seed)


def checked_logprobs(logprobs):
    """Of a completion. Chats have a boolean: its false means none here too."""
    return None if logprobs is False else number("logprobs", logprobs)


def as_list(value):
    return [value] if isinstance(value, str) else value


Prompt = str | list[str] | list[int] | list[list[int]]


def checked_prompt(prompt):
    """A string, token ids, or a list of either; ValueError otherwise. Not a pydantic union: that
    would try each member on each item."""
    items = prompt if isinstance(prompt, list) else []
    kinds = set(map(type, items))
    if isinstance(prompt, str) or kinds == {int}:
        return prompt
    are_lists = kinds == {list} and all(set(map(type, ids)) <= {int} for ids in items)
    if (kinds == {str} or are_lists) and len(items) <= MAX_PROMPTS:
        return prompt
    raise ValueError(f"expected a string, a list of token ids, or a list of 1 to {MAX_PROMPTS} "
                     "strings or lists of token ids")


# ---- Both endpoints ------------------------------------------------------------------------------

class StreamOptions(Lenient):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None     # vLLM's: usage in each chunk


class JsonSchema(Lenient):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Lenient):
    """OpenAI's json_schema; llama.cpp and others write the schema next to the type."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class Request(Strict):
    """Fields of both endpoints. None: the server's flag, or off."""

    elsewhere: ClassVar[frozenset[str]] = frozenset()      # fields of other routes
    _unknown: list[str] = PrivateAttr(default_factory=list)    # names of ignored fields

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: ranged("n") | None = None
    stop: Annotated[list[str], BeforeValidator(
        as_list, json_schema_input_type=str | list[str])] | None = None
    stop_token_ids: list[ranged("token id")] | None = None
    max_tokens: ranged("max_tokens") | None = None         # -1: no limit
    temperature: ranged("temperature") | None = None
    top_p: ranged("top_p") | None = None
    top_k: Annotated[int, BeforeValidator(checked_top_k), stated("top_k", -1)] | None = None
    min_p: ranged("min_p") | None = None
    repetition_penalty: ranged("repetition_penalty") | None = None
    frequency_penalty: ranged("frequency_penalty") | None = None
    presence_penalty: ranged("presence_penalty") | None = None
    logit_bias: Annotated[dict[str, ranged("logit_bias")], Field(max_length=4096)] | None = None
    seed: Annotated[int | None, PlainValidator(checked_seed, json_schema_input_type=int),
                    stated("seed")] = None
    regex: str | None = None
    grammar: str | None = None
    response_format: ResponseFormat | None = None
    ignore_eos: bool | None = None                 # generate past EOS, for benchmarks

    @property
    def limit(self) -> int | None:
        """Max new tokens; None: as many as fit, or the endpoint's default."""
        return self.max_tokens


class CompletionRequest(Request):
    prompt: Annotated[Any, PlainValidator(checked_prompt, json_schema_input_type=Prompt)]
    echo: bool | None = None
    logprobs: Annotated[int | None, PlainValidator(checked_logprobs, json_schema_input_type=int),
                        stated("logprobs")] = None
    best_of: ranged("best_of") | None = None
    add_special_tokens: bool | None = None         # false: no BOS in front of the prompt


# ---- Chats ---------------------------------------------------------------------------------------

TEXTS = ("text", "input_text", "output_text")      # the last two are /v1/responses' names
THOUGHTS = ("thinking", "reasoning")               # Magistral's parts


def checked_part_type(kind):
    if kind not in (*TEXTS, *THOUGHTS, "refusal"):
        kind = ascii(str(kind)[:40])[1:-1]
        raise ValueError(f"'{kind}' parts are not supported: this server reads text only")
    return kind


class Part(Lenient):
    """A part of a message's content."""

    type: Annotated[Any, AfterValidator(checked_part_type)]
    text: str | None = None
    refusal: str | None = None
    thinking: "Content | None" = None

    @field_validator("thinking", mode="before")
    @classmethod
    def thoughts_as_parts(cls, thinking):
        return as_parts(thinking)

    @model_validator(mode="after")
    def with_text(self):
        """`text` holds the text of every kind."""
        if self.type == "refusal":
            self.text = self.refusal
        elif self.type in THOUGHTS and self.thinking is not None:
            self.text = text_of(self.thinking)
        if self.text is None:
            raise ValueError("text is missing")
        return self


def as_parts(content):
    """A string, or a list of parts or strings -> a list of parts."""
    if isinstance(content, str):
        content = [content]
    if not isinstance(content, list):
        raise ValueError(f"expected a string or a list of parts, got {found(content)}")
    return [dict(type="text", text=part) if isinstance(part, str) else part for part in content]


Content = list[Part]


def text_of(parts: list[Part], kinds: tuple[str, ...] | None = None) -> str:
    return "".join(part.text for part in parts if kinds is None or part.type in kinds)


class FunctionCall(Lenient):
    """arguments: JSON text; an object is accepted too."""

    name: str
    arguments: str | dict[str, Any] = "{}"

    @field_validator("arguments", mode="wrap")
    @classmethod
    def text_or_object(cls, arguments, handler):
        if isinstance(arguments, str | dict):
            return arguments
        raise ValueError(f"expected JSON text or an object, got {found(arguments)}")


class ToolCall(Lenient):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Lenient):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[Content, BeforeValidator(
        as_parts, json_schema_input_type=str | Content)] = []
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None                   # other names of it
    thinking: str | None = None
    refusal: str | None = None
    function_call: FunctionCall | None = None      # of an old history
    audio: None = None
    prefix: bool | None = None                     # DeepSeek's, Mistral's: continue this message
    partial: bool | None = None                    # Kimi's and Qwen's name of it

    @field_validator("audio", mode="before")
    @classmethod
    def no_audio(cls, audio):
        raise ValueError("sound is not supported: this server reads text only")

    def continues(self) -> bool:
        return self.role == "assistant" and bool(self.prefix or self.partial)


class Function(Lenient):
    """strict is accepted: a forced call always matches its parameters, others never have to."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Lenient):
    type: Literal["function"]
    function: Function


class ToolChoice(Lenient):
    """names: the only tools to offer; None: all."""

    mode: Literal["none", "auto", "required"]
    names: list[str] | None = None


def checked_tool_choice(choice):
    """A mode, a named tool or allowed_tools, in the spelling of chats or of /v1/responses."""
    modes = dict(none="none", auto="auto", required="required", any="required")
    if isinstance(choice, ToolChoice):
        return choice
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if isinstance(kind, str) and kind in modes:
        return ToolChoice(mode=modes[kind])
    if isinstance(choice, dict) and kind == "function":
        return ToolChoice(mode="required", names=[tool_name(choice)])
    if isinstance(choice, dict) and kind == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        tools = allowed.get("tools") if isinstance(allowed, dict) else None
        if not isinstance(tools, list) or not tools:
            raise ValueError("allowed_tools needs a list of tools")
        mode = allowed.get("mode", "auto")
        if mode not in ("auto", "required"):
            raise ValueError(f"mode must be 'auto' or 'required', got {found(mode)}")
        return ToolChoice(mode=mode, names=[tool_name(tool) for tool in tools])
    raise ValueError("must be 'none', 'auto', 'required', a function or allowed_tools, got "
                     f"{found(choice)}")


def tool_name(tool) -> str:
    """Of {"function": {"name": …}} or {"name": …}."""
    if isinstance(tool, dict) and tool.get("type", "function") == "function":
        inner = tool.get("function", tool)
        if isinstance(inner, dict) and isinstance(inner.get("name"), str):
            return inner["name"]
    raise ValueError("a tool is named by {\"type\": \"function\", \"function\": {\"name\": …}}")


Choice = Literal["none", "auto", "required"] | dict[str, Any]
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class ChatRequest(Request):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: ranged("max_tokens") | None = None
    logprobs: bool | None = None
    top_logprobs: ranged("top_logprobs") | None = None
    tools: list[Tool] | None = None
    tool_choice: Annotated[ToolChoice, BeforeValidator(
        checked_tool_choice, json_schema_input_type=Choice)] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None          # for templates that read them
    reasoning_effort: Literal[EFFORTS] | None = None
    enable_thinking: bool | None = None
    include_reasoning: bool | None = None          # false: the response has no thoughts
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    @property
    def limit(self) -> int | None:
        """Clients send both names: the smaller one counts. -1: no limit."""
        given = [n for n in (self.max_tokens, self.max_completion_tokens) if n not in (None, -1)]
        return min(given, default=None)

    def forces_call(self) -> bool:
        return self.tool_choice is not None and self.tool_choice.mode == "required"

    def continues(self) -> bool:
        """Whether the answer continues the last message."""
        return bool(self.continue_final_message) or self.messages[-1].continues()


CompletionRequest.elsewhere = frozenset(ChatRequest.model_fields)
ChatRequest.elsewhere = frozenset(CompletionRequest.model_fields)


# ---- Bytes to a request --------------------------------------------------------------------------

def parse(kind: type[Request], body: bytes, n_position: int) -> Request:
    """Parse and validate a JSON body. ApiError if it is not valid.

    n_position: positions of a slot, which bounds the number of token ids.
    """
    if not body.strip():
        raise ApiError(400, "the body is empty: send a JSON object")
    try:
        text = body.decode("utf-8-sig")
        check_size(text, MAX_CONTAINERS + MAX_PROMPTS * n_position)
        fields = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as e:
        reason = ascii(str(e)[:200])[1:-1]
        raise ApiError(400, f"the body is not valid JSON: {reason}") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "the body must be a JSON object")
    check_values(fields)
    if isinstance(messages := fields.get("messages"), list) and len(messages) > n_position:
        raise ApiError(400, f"messages: the prompt is too long: {len(messages):,} messages "
                       "exceed the context of "
                       f"{n_position} tokens", param="messages", code="context_length_exceeded")
    return validate(kind, fields)


def validate(kind: type[Strict], fields: dict) -> Strict:
    """JSON's fields -> a request. ApiError names the part that is not valid."""
    try:
        if not issubclass(kind, Request):
            return kind.model_validate(fields)
        names = set(kind.model_fields)
        fields, origins, unknown = translate(fields, names, kind.elsewhere - names)
    except UnsupportedField as e:
        raise ApiError(400, str(e), param=e.param, code="unsupported_parameter") from None
    except ValidationError as e:
        raise explained(e, {}) from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    try:
        request = kind.model_validate(fields)
    except ValidationError as e:
        raise explained(e, origins) from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    request._unknown = unknown
    return request


def explained(error: ValidationError, origins: dict[str, str]) -> ApiError:
    """The first of pydantic's errors in our words. origins: our name -> the client's."""
    first = error.errors(include_url=False)[0]
    names = [ascii(str(part)[:100])[1:-1] for part in first["loc"] if part != "[key]"]
    if names:
        names[0] = origins.get(names[0], names[0])
    param = ".".join(names)
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"the field '{param}' is not supported", param=param,
                        code="unsupported_parameter")
    return ApiError(400, f"{param}: {reason_of(first)}", param=param)


EXPECTED = {"string_type": "a string", "bool_type": "true or false", "list_type": "a list",
            "dict_type": "an object", "model_type": "an object", "int_type": "an integer",
            "float_type": "a number", "model_attributes_type": "an object", "none_required": "null"}


def reason_of(error: dict) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "missing":
        return "is missing"
    if kind in EXPECTED:
        return f"expected {EXPECTED[kind]}, got {found(error['input'])}"
    if kind == "literal_error":
        return f"must be {context['expected']}, got {found(error['input'])}"
    if kind == "too_short":
        return f"needs at least {context['min_length']}, got {context['actual_length']}"
    if kind == "too_long":
        return f"may have at most {context['max_length']}"
    if kind == "string_pattern_mismatch":
        return ("must be 1 to 128 letters, digits, dots, dashes or underscores, got "
                f"{found(error['input'])}")
    return error["msg"].removeprefix("Value error, ")


def found(value) -> str:
    """A value of a request, in a message."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return ascii(value[:40]) if isinstance(value, str) else json.dumps(value)[:40]


def unique_keys(pairs: list[tuple[str, Any]]) -> dict:
    """ValueError if a key occurs twice: JSON does not say which one counts."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key '{twice[:40]}' occurs twice")
    return fields


def check_size(text: str, max_values: int) -> None:
    """ApiError if parsing the body would block the event loop for long: pydantic needs about 20 µs
    per object, list and key. Other values, such as token ids, are cheaper."""
    if sum(map(text.count, "[{:")) <= MAX_CONTAINERS and text.count(",") <= max_values:
        return                                     # even if all were outside of strings
    without_strings = JSON_STRING.sub("", text)    # 40 ms per MB
    if sum(map(without_strings.count, "[{:")) > MAX_CONTAINERS:
        raise ApiError(400, f"the body has more than {MAX_CONTAINERS:,} objects, lists and keys")
    if without_strings.count(",") > max_values:
        raise ApiError(400, f"the body has more than {max_values:,} values")


def check_values(fields: dict) -> None:
    """ApiError names a field that holds a lone surrogate, NaN or infinity.

    Python's json accepts them. A lone surrogate cannot be encoded as UTF-8 in a response; NaN and
    infinity could reach JSON schemas and template arguments, whose values are not validated.
    """
    for name, value in fields.items():
        try:
            json.dumps([name, value], ensure_ascii=False, allow_nan=False).encode()
        except (UnicodeEncodeError, ValueError) as e:
            reason = "NaN and infinite numbers are not accepted"
            if isinstance(e, UnicodeEncodeError):
                reason = "contains a lone surrogate (half of a UTF-16 pair)"
            name = ascii(name[:40])[1:-1]
            raise ApiError(400, f"{name}: {reason}", param=name) from None
        except RecursionError:
            raise ApiError(400, "the body is nested too deeply") from None
