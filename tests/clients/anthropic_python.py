"""anthropic (Python): messages, streams, tools with a nested type, structured output, count_tokens."""

import anthropic
from steps import ASK, MODEL, QUESTIONS, TOO_LONG, Trip, main, raises, step

client = anthropic.Anthropic()
book = {"name": "book", "description": "Book a trip.", "input_schema": Trip.model_json_schema()}


def text(message):
    return "".join(block.text for block in message.content if block.type == "text")


@step("messages", "chat")
def a_conversation_with_usage():
    messages = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        answer = client.messages.create(model=MODEL, max_tokens=100, system="Answer in one word.", messages=messages)
        assert text(answer) and answer.stop_reason == "end_turn"
        assert answer.usage.input_tokens > 0 < answer.usage.output_tokens
        messages.append({"role": "assistant", "content": answer.content})
    counted = client.messages.count_tokens(model=MODEL, system="Answer in one word.", messages=messages[:-1])
    assert counted.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)


@step("messages", "stream")
def a_stream():
    fields = dict(model=MODEL, max_tokens=100, messages=[{"role": "user", "content": QUESTIONS[0]}])
    whole = client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        assert "".join(stream.text_stream) == text(whole)
    final = stream.get_final_message()
    assert text(final) == text(whole) and final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    events = [event.type for event in client.messages.create(**fields, stream=True)]
    assert events[0] == "message_start" and events[-1] == "message_stop"


@step("messages", "tools")
def a_tool_loop():
    messages = [{"role": "user", "content": ASK}]
    for choice in ({"type": "any"}, {"type": "tool", "name": "book"}):
        answer = client.messages.create(model=MODEL, max_tokens=200, messages=messages, tools=[book], tool_choice=choice)
        call = answer.content[-1]
        assert call.type == "tool_use" and call.name == "book" and answer.stop_reason == "tool_use"
        Trip.model_validate(call.input)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "booked"}]}
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    messages[-1]["content"].append({"type": "text", "text": QUESTIONS[0]})
    answer = client.messages.create(model=MODEL, max_tokens=100, messages=messages, tools=[book], tool_choice={"type": "none"})
    assert text(answer)


@step("messages", "tools")
def a_streamed_tool_call():
    with client.messages.stream(model=MODEL, max_tokens=200, messages=[{"role": "user", "content": ASK}], tools=[book],
                                tool_choice={"type": "any"}) as stream:
        kinds = {event.type for event in stream}
    assert "input_json" in kinds
    Trip.model_validate(stream.get_final_message().content[-1].input)


@step("messages", "structured")
def parse_a_nested_and_recursive_type():
    answer = client.messages.parse(model=MODEL, max_tokens=200, messages=[{"role": "user", "content": ASK}], output_format=Trip)
    assert isinstance(answer.parsed_output, Trip)


@step("messages", "errors")
def a_wrong_name_and_a_long_prompt():
    def ask(model=MODEL, content="Hello", **fields):
        return client.messages.create(model=model, max_tokens=10, messages=[{"role": "user", "content": content}], **fields)
    raises(anthropic.NotFoundError, lambda: ask(model="claude-9"), "claude-9")
    raises(anthropic.BadRequestError, lambda: ask(content=TOO_LONG), "tokens")
    raises(anthropic.BadRequestError, lambda: ask(content=TOO_LONG, stream=True), "tokens")


main("anthropic-python", "anthropic")
