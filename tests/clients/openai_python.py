"""openai-python: chat completions, responses, parse, tools, streams, and the asynchronous client."""

import json

import openai
from steps import ASK, MODEL, QUESTIONS, TOO_LONG, Trip, main, raises, raises_async, step

client = openai.OpenAI()
book = openai.pydantic_function_tool(Trip, name="book", description="Book a trip.")
book_response = {"type": "function", **book["function"]}
QUESTION = {"role": "user", "content": ASK}


# ---- Chat completions -----------------------------------------------------------------------------

@step("chat", "chat")
def a_conversation_with_usage():
    messages = [{"role": "developer", "content": "Answer in one word."}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        answer = client.chat.completions.create(model=MODEL, messages=messages)
        assert answer.choices[0].message.content and answer.choices[0].finish_reason == "stop"
        assert answer.usage.prompt_tokens + answer.usage.completion_tokens == answer.usage.total_tokens > 0
        messages.append(answer.choices[0].message.model_dump())       # with its nulls: annotations, refusal, audio, …


@step("chat", "stream")
def a_stream_with_usage():
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    whole = client.chat.completions.create(model=MODEL, messages=messages)
    chunks = list(client.chat.completions.create(model=MODEL, messages=messages, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


@step("chat", "stream")
def the_stream_helper():
    with client.chat.completions.stream(model=MODEL, messages=[QUESTION], response_format=Trip) as stream:
        kinds = {event.type for event in stream}
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert isinstance(stream.get_final_completion().choices[0].message.parsed, Trip)


@step("chat", "tools")
def a_tool_loop():
    messages = [QUESTION]
    for choice in ("required", {"type": "function", "function": {"name": "book"}}):
        message = client.chat.completions.parse(model=MODEL, messages=messages, tools=[book], tool_choice=choice).choices[0].message
        call = message.tool_calls[0]
        assert isinstance(call.function.parsed_arguments, Trip)
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "booked: " + call.function.arguments}]
    messages.append({"role": "user", "content": QUESTIONS[0]})
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=[book], tool_choice="none")
    assert answer.choices[0].message.content and not answer.choices[0].message.tool_calls


@step("chat", "tools")
def a_streamed_tool_call():
    chunks = client.chat.completions.create(model=MODEL, messages=[QUESTION], tools=[book], tool_choice="required", stream=True)
    calls = [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or []]
    assert calls[0].id and calls[0].function.name == "book"
    Trip.model_validate_json("".join(call.function.arguments or "" for call in calls))


@step("chat", "structured")
def parse_a_nested_and_recursive_type():
    answer = client.chat.completions.parse(model=MODEL, messages=[QUESTION], response_format=Trip)
    assert isinstance(answer.choices[0].message.parsed, Trip)


@step("chat", "structured")
def json_object():
    answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "An empty JSON object: {}"}],
                                            response_format={"type": "json_object"}, max_completion_tokens=40)
    assert answer.choices[0].finish_reason == "length" or isinstance(json.loads(answer.choices[0].message.content), dict)


@step("chat", "errors")
def a_wrong_name_and_a_long_prompt():
    raises(openai.NotFoundError, lambda: client.chat.completions.create(model="gpt-9", messages=[QUESTION]), "gpt-9")
    too_long = [{"role": "user", "content": TOO_LONG}]
    raises(openai.BadRequestError, lambda: client.chat.completions.create(model=MODEL, messages=too_long), "tokens")
    raises(openai.BadRequestError, lambda: client.chat.completions.create(model=MODEL, messages=too_long, stream=True), "tokens")
    raises(openai.BadRequestError, lambda: client.chat.completions.create(model=MODEL, messages=[]), "messages")


@step("chat", "chat")
async def the_asynchronous_client():
    async with openai.AsyncOpenAI() as client:
        messages = [{"role": "user", "content": QUESTIONS[0]}]
        whole = await client.chat.completions.create(model=MODEL, messages=messages)
        stream = await client.chat.completions.create(model=MODEL, messages=messages, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
        assert text == whole.choices[0].message.content
        await raises_async(openai.NotFoundError, client.chat.completions.create(model="gpt-9", messages=messages), "gpt-9")


# ---- Completions ----------------------------------------------------------------------------------

@step("completions", "chat")
def a_completion():
    answer = client.completions.create(model=MODEL, prompt="Once upon a time")
    assert answer.choices[0].text and answer.usage.completion_tokens == 16


@step("completions", "stream")
def a_streamed_completion():
    chunks = list(client.completions.create(model=MODEL, prompt="Once upon a time", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)


@step("completions", "errors")
def a_wrong_name():
    raises(openai.NotFoundError, lambda: client.completions.create(model="gpt-9", prompt="Once"), "gpt-9")


# ---- Responses ------------------------------------------------------------------------------------

@step("responses", "chat")
def a_conversation_by_previous_response_id():
    before = None
    for question in QUESTIONS:
        answer = client.responses.create(model=MODEL, input=question, instructions="Answer in one word.", previous_response_id=before)
        assert answer.output_text and answer.status == "completed"
        assert answer.usage.input_tokens + answer.usage.output_tokens == answer.usage.total_tokens > 0
        before = answer.id
    assert client.responses.retrieve(before).output_text == answer.output_text


@step("responses", "chat")
def a_conversation_by_its_items():
    items = [{"role": "user", "content": QUESTIONS[0]}]
    answer = client.responses.create(model=MODEL, input=items, store=False)
    items += answer.output
    items.append({"role": "user", "content": [{"type": "input_text", "text": QUESTIONS[1]}]})
    assert client.responses.create(model=MODEL, input=items, store=False).output_text


@step("responses", "stream")
def a_streamed_response():
    question = QUESTIONS[0]
    whole = client.responses.create(model=MODEL, input=question)
    events = list(client.responses.create(model=MODEL, input=question, stream=True))
    assert events[0].type == "response.created" and events[-1].type == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    with client.responses.stream(model=MODEL, input=question) as stream:
        assert "response.output_text.delta" in [event.type for event in stream]
    assert stream.get_final_response().output_text == whole.output_text


@step("responses", "tools")
def a_tool_loop_of_items():
    items = [QUESTION]
    for choice in ("required", {"type": "function", "name": "book"}):
        answer = client.responses.create(model=MODEL, input=items, tools=[book_response], tool_choice=choice)
        call = answer.output[-1]
        assert call.type == "function_call" and call.name == "book"
        Trip.model_validate_json(call.arguments)
        items += [*answer.output, {"type": "function_call_output", "call_id": call.call_id, "output": "booked: " + call.arguments}]
    items.append({"role": "user", "content": QUESTIONS[0]})
    answer = client.responses.create(model=MODEL, input=items, tools=[book_response], tool_choice="none")
    assert answer.output_text


@step("responses", "tools")
def a_streamed_call():
    events = list(client.responses.create(model=MODEL, input=[QUESTION], tools=[book_response], tool_choice="required", stream=True))
    deltas = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert deltas == done[0].arguments
    Trip.model_validate_json(deltas)


@step("responses", "structured")
def parse_responses():
    assert isinstance(client.responses.parse(model=MODEL, input=[QUESTION], text_format=Trip).output_parsed, Trip)
    with client.responses.stream(model=MODEL, input=[QUESTION], text_format=Trip) as stream:
        stream.until_done()
    assert isinstance(stream.get_final_response().output_parsed, Trip)


@step("responses", "errors")
def a_wrong_name_a_long_prompt_and_an_unknown_id():
    raises(openai.NotFoundError, lambda: client.responses.create(model="gpt-9", input="Hello"), "gpt-9")
    raises(openai.BadRequestError, lambda: client.responses.create(model=MODEL, input=TOO_LONG), "tokens")
    raises(openai.APIStatusError, lambda: client.responses.create(model=MODEL, input="Hello", previous_response_id="resp_9"), "resp_9")


main("openai-python", "openai")
