"""litellm: completion, stream, tools, structured output, responses and anthropic_messages."""

import asyncio
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"         # else it asks GitHub for prices as it is imported

import litellm  # noqa: E402
from pydantic import BaseModel  # noqa: E402
from steps import ASK, BASE_URL, KEY, MODEL, QUESTIONS, SERVER, TOO_LONG, Trip, main, raises, step  # noqa: E402

litellm.suppress_debug_info = True
NAME = "hosted_vllm/" + MODEL                          # any server with OpenAI's API
ADDRESS = dict(api_base=BASE_URL, api_key=KEY)
QUESTION = [{"role": "user", "content": ASK}]
book = {"type": "function", "function": {"name": "book", "description": "Book a trip.", "parameters": Trip.model_json_schema()}}


class Booking(BaseModel):
    trip: Trip


def complete(messages, **fields):
    return litellm.completion(**{**dict(model="openai/" + MODEL, messages=messages, **ADDRESS), **fields})


@step("chat", "chat")
def a_conversation_with_usage():
    messages = [{"role": "system", "content": "Answer in one word."}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        answer = complete(messages)
        assert answer.choices[0].message.content and answer.usage.total_tokens > 0
        messages.append(answer.choices[0].message.model_dump())
    assert complete(messages[:2], model=NAME).choices[0].message.content


@step("chat", "chat")
def the_asynchronous_call():
    answer = asyncio.run(litellm.acompletion(model="openai/" + MODEL, messages=[{"role": "user", "content": QUESTIONS[0]}], **ADDRESS))
    assert answer.choices[0].message.content


@step("chat", "stream")
def a_stream():
    chunks = list(complete([{"role": "user", "content": QUESTIONS[0]}], stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert litellm.stream_chunk_builder(chunks).usage.completion_tokens > 0


@step("chat", "tools")
def a_tool_loop():
    messages = list(QUESTION)
    for choice in ("required", {"type": "function", "function": {"name": "book"}}):
        message = complete(messages, tools=[book], tool_choice=choice, reasoning_effort="low").choices[0].message
        call = message.tool_calls[0]
        Trip.model_validate_json(call.function.arguments)
        messages += [message, {"role": "tool", "tool_call_id": call.id, "name": "book", "content": "booked"}]
    messages.append({"role": "user", "content": QUESTIONS[0]})
    assert complete(messages, tools=[book], tool_choice="none").choices[0].message.content


@step("chat", "structured")
def a_nested_and_recursive_type():
    answer = complete(QUESTION, response_format=Trip)
    Trip.model_validate_json(answer.choices[0].message.content)


@step("chat", "errors")
def a_wrong_name_and_a_long_prompt():
    raises(litellm.NotFoundError, lambda: complete(QUESTION, model="openai/gpt-9"), "gpt-9")
    raises(litellm.ContextWindowExceededError, lambda: complete([{"role": "user", "content": TOO_LONG}]), "tokens")


@step("responses", "chat")
def responses():
    answer = litellm.responses(model="openai/" + MODEL, input=QUESTIONS[0], **ADDRESS)
    assert answer.output[-1].content[0].text and answer.usage.total_tokens > 0


@step("responses", "stream")
def streamed_responses():
    kinds = [event.type for event in litellm.responses(model="openai/" + MODEL, input=QUESTIONS[0], stream=True, **ADDRESS)]
    assert kinds[-1] == "response.completed" and "response.output_text.delta" in kinds


@step("messages", "chat")
def anthropic_messages():
    call = litellm.anthropic_messages(model="anthropic/" + MODEL, max_tokens=100, api_base=SERVER, api_key=KEY,
                                      messages=[{"role": "user", "content": QUESTIONS[0]}])
    answer = asyncio.run(call)
    assert answer["content"][0]["text"] and answer["usage"]["output_tokens"] > 0


@step("messages", "tools")
def completion_by_messages():
    """litellm drops the $ref at the root of a recursive type's schema: an object around it has none."""
    tool = {"type": "function", "function": {"name": "book", "parameters": Booking.model_json_schema()}}
    answer = litellm.completion(model="anthropic/" + MODEL, messages=QUESTION, tools=[tool], tool_choice="required", api_base=SERVER,
                                api_key=KEY)
    Booking.model_validate_json(answer.choices[0].message.tool_calls[0].function.arguments)


main("litellm", "litellm")
