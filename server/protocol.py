"""What a request may say: OpenAI's fields and the common additions, each checked; nothing ignored.

It knows types and limits, no model. A field that is not here is refused by its name.

    asked = parse(ChatRequest, body)               # Refused has OpenAI's error object
"""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError


class Refused(Exception):
    """An answer that is an error, as OpenAI writes them."""

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


Bias = Annotated[float, Field(ge=-100, le=100)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Id = Annotated[int, Field(ge=0)]


class Request(Strict):
    """What chats and completions share. None: as the flags say, or off."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: str | list[str] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[str, Bias] | None = None
    seed: int | None = None
    regex: str | None = None
    grammar: str | None = None
    ignore_eos: bool | None = None                 # go on after an end, for benchmarks
    user: str | None = None                        # says who asks; changes nothing, by its meaning


class CompletionRequest(Request):
    prompt: str | list[str] | list[Id] | list[list[Id]]
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


def parse(kind: type[Request], body: bytes) -> Request:
    """Refused where the body is no JSON, or says something that is not of this kind."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as e:
        raise Refused(400, f"the body is not valid JSON: {str(e)[:200]}") from None
    if not isinstance(fields, dict):
        raise Refused(400, "the body is JSON, but no object")
    try:
        return kind.model_validate(fields)
    except ValidationError as e:
        first = e.errors(include_url=False, include_context=False, include_input=False)[0]
        names = [str(part) for part in first["loc"]]
        param = ".".join(names[:1] if len(names) > 4 else names)
        if first["type"] == "extra_forbidden":
            raise Refused(400, f"the field '{param}' is not supported: leave it out", param=param,
                          code="unsupported_parameter") from None
        raise Refused(400, f"{param}: {first['msg']}", param=param) from None
    except RecursionError:
        raise Refused(400, "the body is nested too deeply") from None
