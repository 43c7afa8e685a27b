"""The request schema: OpenAI's fields and common extensions, all validated, none ignored.

It knows types and limits, no model. An unknown field is an error that names it.

    request = parse(ChatRequest, body, n_position)     # ApiError has OpenAI's error object
"""

import json
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, ValidationError

from gpt_faster.decoding.request_sampler import REQUEST_RANGES

MAX_PROMPTS, MAX_CONTAINERS = 128, 50_000
JSON_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.S)    # optional end: no backtracking


class ApiError(Exception):
    """An error response in OpenAI's format."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error",
                 param: str | None = None, code: str | None = None, retry_after: int | None = None):
        super().__init__(message)
        self.status, self.retry_after = status, retry_after
        self.error = dict(message=message, type=kind, param=param, code=code)


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False,
                              protected_namespaces=())


class StreamOptions(Strict):
    include_usage: bool | None = None


def ranged(name: str):
    """A pydantic type: a sampling parameter within its range."""
    allowed = REQUEST_RANGES[name]
    return Annotated[allowed.kind, AfterValidator(allowed.check)]


def checked_top_k(top_k: int) -> int:
    """-1 disables top_k, as in vLLM."""
    return 0 if top_k == -1 else REQUEST_RANGES["top_k"].check(top_k)


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


class Request(Strict):
    """Fields of both endpoints. None: the server's flag, or off."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: str | list[str] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: ranged("temperature") | None = None
    top_p: ranged("top_p") | None = None
    top_k: Annotated[int, AfterValidator(checked_top_k)] | None = None
    min_p: ranged("min_p") | None = None
    repetition_penalty: ranged("repetition_penalty") | None = None
    frequency_penalty: ranged("frequency_penalty") | None = None
    presence_penalty: ranged("presence_penalty") | None = None
    logit_bias: Annotated[dict[str, ranged("logit_bias")], Field(max_length=4096)] | None = None
    seed: ranged("seed") | None = None
    regex: str | None = None
    grammar: str | None = None
    ignore_eos: bool | None = None                 # generate past EOS, for benchmarks
    user: str | None = None                        # accepted, has no effect


class CompletionRequest(Request):
    prompt: Annotated[Any, PlainValidator(checked_prompt)]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: int | None = None


class TextPart(Strict):
    type: Literal["text"]
    text: str


class FunctionCall(Strict):
    name: str
    arguments: str


class ToolCall(Strict):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None                   # other names of it
    thinking: str | None = None
    refusal: None = None


class Function(Strict):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


class JsonSchema(Strict):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")   # llama.cpp's place for it


class ChatRequest(Request):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def parse(kind: type[Request], body: bytes, n_position: int) -> Request:
    """Parse and validate a JSON body. ApiError if it is not valid.

    n_position: positions of a slot, which bounds the number of token ids.
    """
    try:
        text = body.decode("utf-8-sig")
        check_size(text, MAX_CONTAINERS + MAX_PROMPTS * n_position)
        fields = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ApiError(400, f"the body is not valid JSON: {str(e)[:200]}") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "the body must be a JSON object")
    check_values(fields)
    try:
        return kind.model_validate(fields)
    except ValidationError as e:
        first = e.errors(include_url=False, include_context=False, include_input=False)[0]
        names = [str(part)[:100] for part in first["loc"]]
        param = ".".join(names[:1] if len(names) > 4 else names)
        if first["type"] == "extra_forbidden":
            raise ApiError(400, f"the field '{param}' is not supported", param=param,
                           code="unsupported_parameter") from None
        reason = first["msg"].removeprefix("Value error, ")
        raise ApiError(400, f"{param}: {reason}", param=param) from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None


def check_size(text: str, max_values: int) -> None:
    """ApiError if parsing the body would block the event loop for long: pydantic needs about 20 µs
    per object, list and key. Other values, such as token ids, are cheaper."""
    without_strings = JSON_STRING.sub("", text)
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
