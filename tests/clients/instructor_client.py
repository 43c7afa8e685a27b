"""instructor: every mode that it has for OpenAI's and for Anthropic's API, with a nested and recursive type."""

from collections.abc import Iterable

import anthropic
import instructor
import openai
from instructor.core import IncompleteOutputException, InstructorRetryException
from pydantic import BaseModel, Field
from steps import ASK, MODEL, TOO_LONG, Place, Trip, main, raises, step

Mode = instructor.Mode
MESSAGES = [{"role": "user", "content": ASK}]
PLACE = [{"role": "user", "content": 'Repeat: {"city": "Oslo", "unit": "celsius"}'}]


class Stay(BaseModel):
    city: str = Field(max_length=12)
    days: int = Field(ge=1, le=9)


def ask(mode, messages=MESSAGES, response_model=Trip, model=MODEL):
    client = instructor.from_openai(openai.OpenAI(), mode=mode)
    return client.chat.completions.create(model=model, messages=messages, response_model=response_model, max_retries=1)


def structured(mode):
    assert isinstance(ask(mode), Trip)


for api, modes in (("chat", (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA)),
                   ("responses", (Mode.RESPONSES_TOOLS,))):
    for mode in modes:
        step(api, "structured")(lambda mode=mode: structured(mode)).__name__ = mode.name.lower()


@step("chat", "structured")
def json_and_markdown():
    """The schema is in the prompt only: a small model's answer may fail, with instructor's exception."""
    for mode in (Mode.JSON, Mode.MD_JSON):
        try:
            ask(mode, PLACE, Place)
        except InstructorRetryException as e:
            assert "validation error" in str(e) or "JSON" in str(e), f"{mode}: {e}"
        except IncompleteOutputException:
            pass


@step("chat", "tools")
def parallel_tools():
    try:
        assert all(isinstance(call, Trip) for call in ask(Mode.PARALLEL_TOOLS, response_model=Iterable[Trip]))
    except Exception as e:                             # tool_choice is auto: this model may call none
        assert not isinstance(e, openai.APIError) and "Error code" not in str(e), e


@step("chat", "stream")
def partial():
    client = instructor.from_openai(openai.OpenAI())
    parts = list(client.create_partial(model=MODEL, messages=MESSAGES, response_model=Stay))           # enums fail in its partial types
    Stay.model_validate(parts[-1].model_dump())


@step("chat", "stream")
def iterable():
    client = instructor.from_openai(openai.OpenAI(), mode=Mode.JSON_SCHEMA)
    assert client.create_with_completion(model=MODEL, messages=PLACE, response_model=Place)[1].usage.total_tokens > 0


@step("chat", "errors")
def a_wrong_name_and_a_long_prompt():
    raises(Exception, lambda: ask(Mode.TOOLS, model="gpt-9"), "gpt-9")
    raises(Exception, lambda: ask(Mode.TOOLS, [{"role": "user", "content": TOO_LONG}]), "tokens")


@step("messages", "structured")
def anthropic_tools():
    client = instructor.from_anthropic(anthropic.Anthropic(), mode=Mode.ANTHROPIC_TOOLS)
    assert isinstance(client.create(model=MODEL, max_tokens=200, messages=MESSAGES, response_model=Trip, max_retries=1), Trip)


main("instructor", "instructor")
