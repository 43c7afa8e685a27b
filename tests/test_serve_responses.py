"""/v1/responses: items and tools are translated onto chats, events are OpenAI's, and conversations are kept and reuse their prefix."""

import copy
import json
import subprocess
from types import SimpleNamespace
from typing import Annotated

import openai
import pydantic
import pytest
from conftest import ROOT, SMOLLM2
from openai.types.responses import Response, ResponseItem, ResponseStreamEvent
from test_serve import Process

from gpt_faster.decoding.scheduler import Event, Logprobs
from gpt_faster.server import answers
from gpt_faster.server.parsing import TOOL_FORMATS, AnswerParser
from gpt_faster.server.protocol import ApiError, ChatRequest, parse
from gpt_faster.server.response_store import KeptResponse, ResponseStore
from gpt_faster.server.responses import (
    RESPONSES,
    PreparedResponse,
    ResponsesAnswer,
    ResponsesPreparer,
    ResponsesRequest,
    Tools,
    encoded,
    input_item_list,
)

NAME = SMOLLM2.name
CITY = dict(type="object", properties=dict(city=dict(type="string", maxLength=12)), required=["city"], additionalProperties=False)
WEATHER = dict(type="function", name="get_weather", description="The weather of a city.", parameters=CITY, strict=True)
EVENTS, ITEMS = pydantic.TypeAdapter(ResponseStreamEvent), pydantic.TypeAdapter(ResponseItem)


# ---- Translation, without a process --------------------------------------------------------------

class FakePreparer:
    """In place of a RequestPreparer: keeps the chat that it is given."""

    name, tokenizer = "model", SimpleNamespace(encode=lambda text, bos: text.split())

    def __init__(self, error=None):
        self.error = error

    def prepare_chat(self, chat):
        self.chat = chat
        if self.error:
            raise self.error
        generation = SimpleNamespace(prompt_ids=[1, 2, 3], ids=[], n_reused=2, finish_reason=None, user_data=SimpleNamespace(index=0),
                                     params=SimpleNamespace(temperature=0.5, top_p=0.9))
        tools = [tool.model_dump(exclude_none=True) for tool in chat.tools or []]
        prepared = PreparedResponse([generation], True, 1, parsers=[AnswerParser(TOOL_FORMATS["hermes"], tools)])
        return SimpleNamespace(**{name: getattr(prepared, name) for name in ("generations", "generates", "n_choices", "prompts", "parsers", "headers")})

    def token_bytes(self, i):
        return bytes([i])


def store():
    return ResponseStore(10, 1_000_000, 60)


def chat(kept=None, **fields):
    """-> the ChatRequest that these fields of a response are translated to."""
    preparer = FakePreparer()
    request = parse(ResponsesRequest, json.dumps(dict(dict(input="Hi"), **fields)).encode(), 100)
    ResponsesPreparer(preparer, kept or store()).prepare(request)
    assert isinstance(preparer.chat, ChatRequest)
    return preparer.chat


def messages(**fields):
    plain = []
    for message in chat(**fields).messages:
        message = message.model_dump(exclude_none=True)
        if isinstance(message.get("content"), list):
            message["content"] = "".join(part["text"] for part in message["content"])
        plain.append({key: value for key, value in message.items() if value not in ("", [])})
    return plain


def refused(param, match, status=400, kept=None, **fields):
    with pytest.raises(ApiError, match=match or None) as e:
        chat(kept, **fields)
    assert e.value.status == status and e.value.error["param"] == param, e.value.error
    return e.value.error


USER, AGAIN = dict(role="user", content="Hi"), dict(role="user", content="Again")
CALL = dict(type="function_call", call_id="c1", name="get_weather", arguments='{"city": "Rome"}', id="fc_1", status="completed")
OUTPUT = dict(type="function_call_output", call_id="c1", output="18")
THOUGHT = dict(type="reasoning", id="rs_1", summary=[], content=[dict(type="reasoning_text", text="Hm.")], encrypted_content=None)
SAID = dict(type="message", role="assistant", id="msg_1", status="completed", phase="final_answer",
            content=[dict(type="output_text", text="It is 18.", annotations=[], logprobs=[])])


def test_a_string_or_items_with_and_without_type():
    for given in ("Hi", [USER], [dict(USER, type="message")], [dict(USER, content=[dict(type="input_text", text="Hi")])]):
        assert messages(input=given) == [USER]
    assert messages(input=[USER, SAID, AGAIN]) == [USER, dict(role="assistant", content="It is 18."), AGAIN]
    assert messages(input=[USER, dict(role="assistant", content="It is 18."), AGAIN])[1]["content"] == "It is 18."


def test_thoughts_text_and_calls_that_follow_each_other_are_one_message():
    call = dict(id="c1", type="function", function=dict(name="get_weather", arguments='{"city": "Rome"}'))
    other = dict(CALL, call_id="c2", arguments=dict(city="Oslo"))
    got = messages(input=[USER, THOUGHT, SAID, CALL, other, OUTPUT, dict(OUTPUT, call_id="c2"), dict(THOUGHT), SAID])
    assert [m["role"] for m in got] == ["user", "assistant", "tool", "tool", "assistant"]
    first = got[1]
    assert first["reasoning_content"] == "Hm." and first["content"] == "It is 18."
    assert first["tool_calls"][0] == call and json.loads(first["tool_calls"][1]["function"]["arguments"]) == dict(city="Oslo")
    assert got[2] == dict(role="tool", tool_call_id="c1", content="18") and got[4]["reasoning_content"] == "Hm."
    interleaved = messages(input=[USER, THOUGHT, CALL, THOUGHT, other, OUTPUT, dict(OUTPUT, call_id="c2")])
    assert [m["role"] for m in interleaved] == ["user", "assistant", "assistant", "tool", "tool"]


@pytest.mark.parametrize("item", [
    dict(THOUGHT, content=None, summary=[dict(type="summary_text", text="Hm.")]), dict(THOUGHT, content=None, encrypted_content=encoded("Hm.")),
    dict(THOUGHT, content=None, encrypted_content="gAAAA", summary=[dict(type="summary_text", text="Hm.")])])
def test_thoughts_come_back_by_each_way(item):
    assert messages(input=[USER, item, SAID])[1]["reasoning_content"] == "Hm."


def test_thoughts_that_only_another_server_reads_are_refused():
    item = dict(type="reasoning", summary=[], encrypted_content="gAAAA")
    assert refused("input.1.encrypted_content", "another server", input=[USER, item])["code"] == "invalid_encrypted_content"
    assert messages(input=[USER, dict(type="reasoning", summary=[]), SAID])[1] == dict(role="assistant", content="It is 18.")


def test_system_messages_at_the_beginning_are_one():
    system, developer = dict(role="system", content="B"), dict(role="developer", content="C")
    assert messages(instructions="A", input=[system, developer, USER]) == [dict(role="system", content="A\n\nB\n\nC"), USER]
    assert messages(instructions="A", input=[USER, developer])[1:] == [USER, developer]


def test_fields_are_translated():
    schema = dict(type="object", properties={})
    got = chat(max_output_tokens=7, temperature=0.5, top_p=0.9, seed=3, stop=["x"], parallel_tool_calls=False, top_logprobs=2,
               include=["message.output_text.logprobs"], text=dict(format=dict(type="json_schema", name="n", schema=schema, strict=True)))
    assert (got.max_completion_tokens, got.temperature, got.top_p, got.seed, got.parallel_tool_calls) == (7, 0.5, 0.9, 3, False)
    assert got.logprobs and got.top_logprobs == 2 and got.response_format.json_schema.schema_ == schema and got.stop == ["x"]
    assert chat(text=dict(format=dict(type="json_object"))).response_format.type == "json_object"
    assert chat(top_logprobs=2).logprobs is None
    assert chat(reasoning=dict(effort="low", summary="auto")).reasoning_effort == "low"
    assert chat(reasoning=dict(effort="none")).reasoning_effort == "none"


def test_what_cannot_change_the_text_is_accepted_and_nulls_are_absent():
    got = chat(store=False, truncation="auto", service_tier="auto", metadata=dict(a="b"), user="u", safety_identifier="s", prompt_cache_key="k",
               prompt_cache_retention="24h", include=["reasoning.encrypted_content", "web_search_call.action.sources"], background=False,
               stream_options=dict(include_obfuscation=False), max_tool_calls=3, client_metadata=dict(a=1), text=dict(verbosity="medium"))
    nulls = [name for name in ResponsesRequest.model_fields if name not in ("input", "model")]
    assert got == chat() == chat(**dict.fromkeys(nulls))


@pytest.mark.parametrize("fields, param, match", [
    (dict(background=True), "background", "not supported"), (dict(conversation="conv_1"), "conversation", "previous_response_id"),
    (dict(prompt=dict(id="pmpt_1")), "prompt", "instructions"), (dict(max_tokens=5), "max_tokens", "max_output_tokens"),
    (dict(max_completion_tokens=5), "max_completion_tokens", "max_output_tokens"), (dict(messages=[USER]), "messages", "input"),
    (dict(response_format=dict(type="json_object")), "response_format", r"text\.format"), (dict(n=2), "n", ""),
    (dict(text=dict(verbosity="low")), "text.verbosity", "instructions"), (dict(include=["all"]), "include.0", ""),
    (dict(text=dict(format=dict(type="json_schema", name="n"))), "text.format.schema", "schema"),
    (dict(metadata={"k" * 65: "v"}), None, "metadata"), (dict(max_output_tokens=-2), "max_output_tokens", ""),
    (dict(input=None), "input", "string or a list"), (dict(input=[]), "input", ""), (dict(input=5), "input", ""), (dict(input=[5]), "input.0", "object"),
    (dict(input=[dict(role="tool", content="x")]), "input.0.role", "assistant"), (dict(input=[dict(role="user")]), "input.0.content", ""),
    (dict(input=[USER, dict(role="user", content=[dict(type="input_text", text="a"), dict(type="input_image", image_url="data:")])]),
     "input.1.content.1.type", "'input_image' is not supported: the server reads text only"),
    (dict(input=[dict(role="user", content=[dict(type="input_file", file_id="f")])]), "input.0.content.0.type", "input_file"),
    (dict(input=[dict(role="user", content=[dict(type="input_text", text=5)])]), "input.0.content.0.text", "string"),
    (dict(input=[dict(role="user", content=[dict(type=["x"], text="a")])]), "input.0.content.0.type", ""), (dict(input=[dict(role="user", content=["a"])]), "input.0.content.0", "object"),
    (dict(input=[USER, dict(type="web_search_call", id="ws")]), "input.1.type", "web_search_call"),
    (dict(input=[dict(type="local_shell_call", id="x")]), "input.0.type", "local_shell_call"), (dict(input=[dict(type=["a"])]), "input.0.type", ""),
    (dict(input=[USER, OUTPUT]), "input.1.call_id", "no call has the id 'c1'"), (dict(input=[USER, CALL, dict(OUTPUT, output=5)]), "input.2.output", ""),
    (dict(input=[USER, CALL, dict(OUTPUT, output=[dict(type="input_image")])]), "input.2.output.0.type", "input_image"),
    (dict(input=[USER, dict(CALL, arguments=5)]), "input.1.arguments", "JSON"), (dict(input=[USER, dict(CALL, name=None)]), "input.1.name", "string"),
    (dict(tools=[WEATHER, dict(type="function", name="get_weather")]), "tools.1.name", "two tools"), (dict(tools=[5]), "tools.0.type", ""),
    (dict(tools=[dict(type="function", name="a b")]), "tools.0.name", ""), (dict(tools=[dict(type="function")]), "tools.0.name", "string"),
    (dict(tools=[dict(WEATHER, parameters=5)]), "tools.0.parameters", "schema"), (dict(tools=[dict(WEATHER, description=5)]), "tools.0.description", "string"),
    (dict(tools=[WEATHER, dict(type="namespace", name="a", tools=[WEATHER, dict(WEATHER, name="b c")])]), "tools.1.tools.1.name", "letters"),
    (dict(tools=[dict(type="custom", name="a", format=dict(type="xml"))]), "tools.0.format.type", "grammar"),
    (dict(tools=[dict(type="namespace", name="a")]), "tools.0.tools", "list"),
    (dict(tools=[dict(type="namespace", name="a", tools=[dict(type="namespace", name="b", tools=[])])]), "tools.0.tools.0.type", "namespace"),
    (dict(tools=[WEATHER], tool_choice=dict(type="function", name="no")), "tool_choice", "no tool is named 'no'"),
    (dict(tools=[WEATHER], tool_choice=dict(type="web_search_preview")), "tool_choice.type", "web_search_preview"),
    (dict(tools=[WEATHER], tool_choice="sometimes"), "tool_choice", "required"), (dict(tool_choice=5), "tool_choice", ""),
    (dict(tools=[WEATHER], tool_choice=dict(type="allowed_tools", mode="auto", tools=[dict(type="mcp")])), "tool_choice.tools.0.type", "mcp")])
def test_what_is_not_supported_or_wrong_is_named(fields, param, match):
    if param is None:
        with pytest.raises(ApiError, match=match):
            chat(**fields)
    else:
        refused(param, match, **fields)


@pytest.mark.parametrize("kind", ["file_search", "mcp", "computer_use_preview", "local_shell", "shell", "apply_patch", "tool_search", "web_search_x"])
def test_tools_that_are_not_functions_are_refused_by_name(kind):
    error = refused("tools.1.type", f"the tool '{kind}' is not supported", tools=[WEATHER, dict(type=kind)])
    assert error["code"] == "unsupported_parameter"


@pytest.mark.parametrize("kind", ["web_search", "web_search_preview", "web_search_2025_08_26", "code_interpreter", "image_generation"])
def test_what_the_model_may_do_without_is_left_out_beside_functions_and_said(kind):
    asked = chat(tools=[WEATHER, dict(type=kind)])
    assert [tool.function.name for tool in asked.tools] == ["get_weather"] and asked._unknown == [f"tools.{kind}"]
    refused("tools", f"the tool {kind} is not supported", tools=[dict(type=kind)])
    refused("tool_choice.type", kind, tools=[WEATHER, dict(type=kind)], tool_choice=dict(type=kind))


def test_custom_tools_and_namespaces_are_functions():
    grammar = dict(type="grammar", syntax="lark", definition="start: /.+/")
    given = [dict(type="custom", name="patch", description="Change files.", format=grammar),
             dict(type="namespace", name="mcp", description="Mail.", tools=[dict(WEATHER), dict(type="custom", name="raw")]), WEATHER]
    tools = Tools(given)
    assert list(tools.names) == ["patch", "mcp__get_weather", "mcp__raw", "get_weather"]
    patch, weather, raw, _ = [each["function"] for each in tools.functions]
    assert patch["parameters"]["required"] == ["input"] and "start: /.+/" in patch["description"] and "Change files." in patch["description"]
    assert weather["description"] == "Mail.\n\nThe weather of a city." and weather["parameters"] == CITY and raw["description"] is None
    items = [USER, dict(type="custom_tool_call", call_id="c1", name="patch", input='a "b"'), dict(type="custom_tool_call_output", call_id="c1", output="ok"),
             dict(CALL, call_id="c2", namespace="mcp"), dict(OUTPUT, call_id="c2", output=[dict(type="input_text", text="18")])]
    got = messages(input=items, tools=given)
    assert json.loads(got[1]["tool_calls"][0]["function"]["arguments"]) == dict(input='a "b"')
    assert got[3]["tool_calls"][0]["function"]["name"] == "mcp__get_weather" and got[4]["content"] == "18"


def test_long_names_of_namespaces_are_shortened_and_answered_in_full():
    tools = [dict(type="namespace", name="mcp__" + "server" * 8, description="", tools=[dict(WEATHER, name="get_weather" + c) for c in "ab"])]
    names = Tools(tools).names
    assert len(names) == 2 and all(len(name) == 64 for name in names)
    call = dict(CALL, name="get_weatherb", namespace=tools[0]["name"])
    assert messages(input=[USER, call], tools=tools)[1]["tool_calls"][0]["function"]["name"] == list(names)[1]
    text = CALLED.replace("get_weather", list(names)[1])
    _, response = answered([dict(text=text), dict(finish_reason="stop")], tools=tools)
    assert (response["output"][0]["namespace"], response["output"][0]["name"]) == (tools[0]["name"], "get_weatherb")


@pytest.mark.parametrize("choice, expected, n", [
    (None, None, 2), ("auto", "auto", 2), ("none", "none", 2), ("required", "required", 2),
    (dict(type="function", name="get_weather"), "get_weather", 2), (dict(type="function", function=dict(name="get_weather")), "get_weather", 2),
    (dict(type="custom", name="patch"), "patch", 2), (dict(type="allowed_tools", mode="auto", tools=[dict(type="custom", name="patch")]), "auto", 1),
    (dict(type="allowed_tools", mode="required", tools=[dict(type="function", name="get_weather")]), "required", 1)])
def test_tool_choice_in_all_its_spellings(choice, expected, n):
    got, functions = Tools([WEATHER, dict(type="custom", name="patch")]).choose(choice)
    assert (got["function"]["name"] if isinstance(got, dict) else got) == expected and len(functions) == n


def test_errors_of_the_chat_have_this_apis_names():
    for param, message, ours in (("messages", "messages: the chat template refuses", "input"), ("max_tokens", "max_tokens 5 exceed", "max_output_tokens"),
                                 ("response_format", "response_format: bad", "text.format"), ("prompt", "the prompt has 9 tokens", "input")):
        preparer = FakePreparer(ApiError(400, message, param=param))
        with pytest.raises(ApiError) as e:
            ResponsesPreparer(preparer, store()).prepare(parse(ResponsesRequest, b'{"input": "Hi"}', 100))
        assert e.value.error["param"] == ours and (param == "prompt" or param not in e.value.error["message"])


# ---- Events and the object -----------------------------------------------------------------------

def answered(events, **fields):
    """Events of the engine -> the events of a stream, each checked against OpenAI's models; the response."""
    kept, request = store(), parse(ResponsesRequest, json.dumps(dict(dict(input="Hi", stream=True), **fields)).encode(), 100)
    preparer = FakePreparer()
    prepared = ResponsesPreparer(preparer, kept).prepare(request)
    answer, [generation] = ResponsesAnswer(preparer, request, prepared), prepared.generations
    sent = answer.begin()
    sent = copy.deepcopy(sent)
    for event in events:
        generation.ids += [1, 2]
        sent += copy.deepcopy(answer.add(Event(generation, **event)))
    sent += copy.deepcopy(answer.end())
    for event in sent:
        EVENTS.validate_python(event)
        name, data = RESPONSES.frame(event).split("\n")[:2]
        assert name == f"event: {event['type']}" and json.loads(data.removeprefix("data: ")) == event
    assert [event["sequence_number"] for event in sent] == list(range(len(sent)))
    response = sent[-1]["response"]
    Response.model_validate(response)
    assert (kept.get(response["id"]) is not None) == response["store"]
    return sent, response


def kinds(sent):
    return [event["type"].removeprefix("response.") for event in sent]


BEGIN, PART = ["created", "in_progress"], ["output_item.added", "content_part.added"]
TEXT_END = ["output_text.done", "content_part.done", "output_item.done"]
CALLED = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def test_events_of_text():
    sent, response = answered([dict(text="It is "), dict(text="18."), dict(finish_reason="stop")])
    assert kinds(sent) == [*BEGIN, *PART, "output_text.delta", "output_text.delta", *TEXT_END, "completed"]
    [item] = response["output"]
    assert response["status"] == item["status"] == "completed" and item["content"][0]["text"] == "It is 18." and item["id"].startswith("msg_")
    assert sent[2]["item"]["content"] == [] and sent[2]["item"]["status"] == "in_progress" and sent[0]["response"]["output"] == []
    assert response["usage"] == dict(input_tokens=3, output_tokens=6, total_tokens=9, input_tokens_details=dict(cached_tokens=2, cache_write_tokens=0),
                                     output_tokens_details=dict(reasoning_tokens=0))


def test_events_of_thoughts_text_and_calls(monkeypatch):
    monkeypatch.setattr(answers, "n_thought_tokens", lambda generation: 3)
    events = [dict(thoughts="Let me "), dict(thoughts="see."), dict(text="I look.\n"), dict(text=CALLED), dict(text="\n" + CALLED), dict(finish_reason="stop")]
    sent, response = answered(events, tools=[WEATHER])
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    thoughts = [*PART, "reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done", "content_part.done", "output_item.done"]
    assert kinds(sent) == [*BEGIN, *thoughts, *PART, "output_text.delta", *TEXT_END, *call, *call, "completed"]
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert response["output"][0]["content"] == [dict(type="reasoning_text", text="Let me see.")] and response["usage"]["output_tokens_details"]["reasoning_tokens"] == 3
    assert [event["output_index"] for event in sent if event["type"] == "response.output_item.added"] == [0, 1, 2, 3]
    done = [event["item"] for event in sent if event["type"] == "response.output_item.done"]
    assert done == response["output"] and json.loads(done[2]["arguments"]) == dict(city="Rome") and done[2]["call_id"] != done[3]["call_id"]


def test_a_call_that_is_cut_off_is_an_incomplete_item_and_no_text():
    sent, response = answered([dict(text=CALLED[:-20]), dict(finish_reason="length")], tools=[WEATHER])
    [item] = response["output"]
    assert (item["type"], item["name"], item["status"], response["status"]) == ("function_call", "get_weather", "incomplete", "incomplete")
    assert item["arguments"] and CALLED.count(item["arguments"]) == 1 and "output_text.delta" not in kinds(sent)


def test_thoughts_are_the_summary_where_one_is_asked_for():
    sent, response = answered([dict(thoughts="Hm."), dict(text="18."), dict(finish_reason="stop")], reasoning=dict(summary="auto"),
                              include=["reasoning.encrypted_content"], store=False)
    assert kinds(sent)[2:8] == ["output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta", "reasoning_summary_text.done",
                                "reasoning_summary_part.done", "output_item.done"]
    item = response["output"][0]
    assert item["summary"] == [dict(type="summary_text", text="Hm.")] and "content" not in item and response["store"] is False
    without = dict(type="reasoning", summary=[], encrypted_content=item["encrypted_content"])
    assert messages(input=[USER, without, SAID])[1]["reasoning_content"] == "Hm."


def test_a_custom_tools_call_has_its_text_and_a_namespaces_its_name():
    call = '<tool_call>\n{"name": "patch", "arguments": {"input": "a\\nb"}}\n</tool_call>'
    sent, response = answered([dict(text=call), dict(finish_reason="stop")], tools=[dict(type="custom", name="patch")])
    assert kinds(sent) == [*BEGIN, "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done", "completed"]
    assert response["output"][0]["type"] == "custom_tool_call" and response["output"][0]["input"] == "a\nb"
    call = CALLED.replace("get_weather", "mcp__get_weather")
    _, response = answered([dict(text=call), dict(finish_reason="stop")], tools=[dict(type="namespace", name="mcp", description="", tools=[WEATHER])])
    assert (response["output"][0]["namespace"], response["output"][0]["name"]) == ("mcp", "get_weather")


def test_an_answer_that_is_cut_is_incomplete_and_an_empty_one_has_a_message():
    sent, response = answered([dict(text="It"), dict(finish_reason="length")])
    assert kinds(sent)[-1] == "incomplete" and response["incomplete_details"] == dict(reason="max_output_tokens")
    assert response["output"][0]["status"] == "incomplete"
    _, response = answered([dict(thoughts="Hm"), dict(finish_reason="length")])
    assert [item["type"] for item in response["output"]] == ["reasoning"] and response["output"][0]["status"] == "incomplete"
    for events in ([dict(finish_reason="stop")], [dict(thoughts="Hm."), dict(finish_reason="stop")]):
        _, response = answered(events)
        assert response["output"][-1]["content"][0]["text"] == "" and response["status"] == "completed"
    _, response = answered([dict(text="\n"), dict(text=CALLED), dict(finish_reason="stop")], tools=[WEATHER])
    assert [item["type"] for item in response["output"]] == ["function_call"]
    _, response = answered([dict(text=" \n"), dict(text="x"), dict(finish_reason="stop")])
    assert response["output"][0]["content"][0]["text"] == " \nx"


def test_logprobs_are_the_texts():
    def token(i):
        return i, Logprobs(-0.5, [(i, -0.5)])
    events = [dict(thoughts="Hm", logprobs=(token(72),)), dict(thoughts=".", text="ab", logprobs=tuple(map(token, (46, 97, 98)))),
              dict(text="c", logprobs=(token(99),)), dict(finish_reason="stop")]
    sent, response = answered(events, include=["message.output_text.logprobs"], top_logprobs=1)
    deltas = [event["logprobs"] for event in sent if event["type"] == "response.output_text.delta"]
    assert [[entry["token"] for entry in entries] for entries in deltas] == [["a", "b"], ["c"]]
    assert response["output"][1]["content"][0]["logprobs"] == sum(deltas, [])


def test_a_failed_answer_ends_its_stream_with_response_failed():
    preparer, request = FakePreparer(), parse(ResponsesRequest, b'{"input": "Hi", "stream": true}', 100)
    answer = ResponsesAnswer(preparer, request, ResponsesPreparer(preparer, store()).prepare(request))
    [*_, failed] = [*answer.begin(), *answer.fail(ApiError(504, "it took too long"), RESPONSES)]
    EVENTS.validate_python(failed)
    assert failed["type"] == "response.failed" and failed["sequence_number"] == 2 and failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == dict(code="server_error", message="it took too long")


def test_the_response_repeats_the_request():
    given = dict(instructions="Be brief.", metadata=dict(a="b"), tools=[WEATHER], tool_choice="none", max_output_tokens=9, user="u", safety_identifier="s",
                 prompt_cache_key="k", truncation="auto", text=dict(format=dict(type="json_object")), parallel_tool_calls=False, store=False)
    _, response = answered([dict(text="{}"), dict(finish_reason="stop")], **given)
    assert {name: response[name] for name in given} == given
    assert (response["temperature"], response["top_p"], response["model"]) == (0.5, 0.9, "model")


# ---- The store -----------------------------------------------------------------------------------

def kept_response(i, n_bytes=10):
    return KeptResponse(dict(id=f"resp_{i}", output=[dict(id=f"msg_{i}")]), [dict(id=f"in_{i}")], [], n_bytes)


def test_the_store_is_bounded_by_number_bytes_and_age():
    now = [0.0]
    kept = ResponseStore(3, 100, 60, lambda: now[0])
    assert all(kept.put(kept_response(i)) for i in range(3))
    assert kept.get("resp_0") and kept.put(kept_response(3)) and list(kept.kept) == ["resp_2", "resp_0", "resp_3"]       # 1 was the least recent
    assert not kept.put(kept_response(4, 101)) and kept.get("resp_4") is None
    assert kept.put(kept_response(5, 90)) and list(kept.kept) == ["resp_3", "resp_5"] and kept.n_bytes == 100
    assert kept.item("in_3") == dict(id="in_3") and kept.item("msg_5") == dict(id="msg_5") and kept.item("msg_0") is None
    planted = KeptResponse(dict(id="resp_6", output=[]), [dict(id="msg_5", text="planted")], [], 0)
    assert kept.put(planted) and kept.item("msg_5") == dict(id="msg_5") and kept.delete("resp_6")
    now[0] = 59
    assert kept.get("resp_3")
    now[0] = 61
    assert kept.get("resp_5") is None and kept.get("resp_3") and kept.n_bytes == 10
    assert kept.delete("resp_3") and not kept.delete("resp_3") and kept.n_bytes == 0
    assert not ResponseStore(0, 100, 60).put(kept_response(1))


def test_pages_of_input_items():
    items = [dict(id=f"i{i}") for i in range(25)]
    first = input_item_list(items, None, None, None)
    assert [first["first_id"], first["last_id"], first["has_more"]] == ["i24", "i5", True]
    assert [item["id"] for item in input_item_list(items, "3", "asc", "i22")["data"]] == ["i23", "i24"]
    for bad in (("0", None, None), ("x", None, None), (None, "up", None), (None, None, "no")):
        with pytest.raises(ApiError):
            input_item_list(items, *bad)


# ---- A process and OpenAI's client ---------------------------------------------------------------

@pytest.fixture(scope="module")
def server():
    process = Process("--tool_format", "hermes", "--keep_responses", "20", n_rows=2, length=2048)
    yield process
    assert process.stop() == 0 and not [line for line in process.lines if "Traceback" in line or "error" in line]


@pytest.fixture(scope="module")
def responses(server):
    return server.client.responses


def test_whole_and_streamed_are_the_chats_text(server, responses):
    asked = dict(model=NAME, temperature=0, max_output_tokens=12)
    whole = responses.create(**asked, instructions="Be brief.", input="Name three colours.")
    messages = [dict(role="system", content="Be brief."), dict(role="user", content="Name three colours.")]
    expected = server.client.chat.completions.create(model=NAME, temperature=0, max_tokens=12, messages=messages)
    assert whole.output_text == expected.choices[0].message.content and whole.usage.output_tokens == expected.usage.completion_tokens
    assert whole.usage.input_tokens == expected.usage.prompt_tokens
    events = list(responses.create(**asked, instructions="Be brief.", input="Name three colours.", stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[0].type == "response.created" and events[-1].type == f"response.{whole.status}"
    with responses.stream(model=NAME, input="Say hello.", temperature=0, max_output_tokens=60) as stream:
        list(stream)
        assert stream.get_final_response().output_text
    _, headers, body = server.raw("POST", "/v1/responses", json.dumps(dict(input="Hi", max_output_tokens=1, stream=True)))
    frames = body.decode().rstrip("\n").split("\n\n")
    assert "text/event-stream" in headers["content-type"] and all(frame.startswith("event: response.") for frame in frames if not frame.startswith(":"))
    assert frames[-1].startswith("event: response.incomplete")                                  # and no [DONE]


def test_a_conversation_is_continued_by_id_and_its_prefix_reused(server, responses):
    asked = dict(model=NAME, temperature=0, max_output_tokens=16)
    first = responses.create(**asked, input="Tell me about the harbour of Genoa, its ships and its cranes.", metadata=dict(a="b"))
    second = responses.create(**asked, input="And the lighthouse?", previous_response_id=first.id)
    third = responses.create(**asked, input="And the fish?", previous_response_id=second.id)
    for before, after in ((first, second), (second, third)):                                    # all of the earlier prompt and its answer
        assert after.usage.input_tokens_details.cached_tokens >= before.usage.total_tokens - 1
        assert after.previous_response_id == before.id
    items = [dict(role="user", content="Tell me about the harbour of Genoa, its ships and its cranes."), *first.output,
             dict(role="user", content="And the lighthouse?")]
    assert responses.create(**asked, input=items, store=False).output_text == second.output_text
    by_reference = [items[0], dict(type="item_reference", id=first.output[0].id), items[2]]
    assert responses.create(**asked, input=by_reference).output_text == second.output_text
    assert responses.retrieve(first.id).output_text == first.output_text and responses.retrieve(first.id).metadata == dict(a="b")
    [item] = responses.input_items.list(second.id).data
    assert ITEMS.validate_python(item.to_dict()) and item.content[0].text == "And the lighthouse?"
    responses.delete(first.id)
    for gone in (first.id, responses.create(**asked, input="Hi", store=False).id, "resp_0"):
        with pytest.raises(openai.NotFoundError):
            responses.retrieve(gone)
        with pytest.raises(openai.NotFoundError) as e:
            responses.create(**asked, input="Hi", previous_response_id=gone)
        assert e.value.code == "previous_response_not_found" and e.value.param == "previous_response_id"
    assert responses.create(**asked, input="And the fish?", previous_response_id=second.id).output_text == third.output_text
    with pytest.raises(openai.BadRequestError, match="background"):
        responses.cancel(second.id)
    for _ in range(20):
        responses.create(model=NAME, input="Hi", max_output_tokens=1)
    with pytest.raises(openai.NotFoundError):                                                   # --keep_responses 20
        responses.retrieve(second.id)


class Tag(pydantic.BaseModel):
    name: Annotated[str, pydantic.Field(max_length=8)]


class Person(pydantic.BaseModel):
    name: Annotated[str, pydantic.Field(max_length=8)]
    age: Annotated[int, pydantic.Field(ge=0, le=150)]
    tags: Annotated[list[Tag], pydantic.Field(max_length=2)]


def test_parse_and_a_loop_of_tools(responses):
    got = responses.parse(model=NAME, input="Invent a person.", text_format=Person, temperature=1, max_output_tokens=120, store=False)
    assert isinstance(got.output_parsed, Person)
    asked = dict(model=NAME, tools=[WEATHER], temperature=0, max_output_tokens=40)
    first = responses.create(**asked, input="What is the weather in Paris?", tool_choice="required")
    [call] = first.output
    assert call.type == "function_call" and set(json.loads(call.arguments)) == {"city"}
    output = dict(type="function_call_output", call_id=call.call_id, output="18 degrees")
    by_id = responses.create(**asked, input=[output], previous_response_id=first.id)
    again = responses.create(**asked, input=[dict(role="user", content="What is the weather in Paris?"), *first.output, output])
    assert by_id.output_text == again.output_text != "" and by_id.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens - 1
    events = list(responses.create(**asked, input="Weather in Rome?", stream=True, tool_choice=dict(type="function", name="get_weather")))
    assert [e.arguments for e in events if e.type == "response.function_call_arguments.done"] == [events[-1].response.output[0].arguments]


def test_errors_are_openais(server, responses):
    with pytest.raises(openai.BadRequestError) as e:
        responses.create(model=NAME, input=[dict(role="user", content=[dict(type="input_image", image_url="data:,")])])
    assert e.value.param == "input.0.content.0.type" and e.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as e:
        responses.create(model=NAME, input="word " * 4000)
    assert e.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        responses.create(model="other", input="Hi")
    for method, path in (("GET", "/v1/responses"), ("GET", "/v1/responses/x/cancel"), ("POST", "/v1/responses/x")):
        status, _, body = server.raw(method, path)
        assert status in (404, 405) and set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


# As Codex builds them: instructions, all items each time, store false, a stream; its shell, its custom patch tool, a server's tools, web search.
CODEX_TOOLS = [
    dict(type="function", name="shell", description="Runs a shell command and returns its output.", strict=False, parameters=dict(
        type="object", required=["command"], additionalProperties=False, properties=dict(
            command=dict(type="array", items=dict(type="string"), description="The command to execute"), workdir=dict(type="string"),
            timeout_ms=dict(type="number")))),
    dict(type="function", name="update_plan", description="Updates the task plan.", strict=False, parameters=dict(
        type="object", required=["plan"], additionalProperties=False, properties=dict(plan=dict(type="array", items=dict(
            type="object", required=["step", "status"], additionalProperties=False, properties=dict(step=dict(type="string"), status=dict(type="string"))))))),
    dict(type="custom", name="apply_patch", description="Edit files.", format=dict(type="grammar", syntax="lark", definition='start: "*** Begin Patch" /.+/')),
    dict(type="namespace", name="mcp__docs", description="Tools of the documentation.", tools=[
        dict(type="function", name="search", description="Search.", strict=False, parameters=dict(type="object", properties=dict(q=dict(type="string"))))]),
    dict(type="web_search", external_web_access=False)]


def codex_turns():
    """-> the items that each turn adds."""
    def said(text):
        return dict(type="message", role="assistant", content=[dict(type="output_text", text=text)])

    def asked(role, *texts):
        return dict(type="message", id="msg_01a2", role=role, content=[dict(type="input_text", text=text) for text in texts])

    def thought(text):
        return dict(type="reasoning", summary=[dict(type="summary_text", text=text)], content=None, encrypted_content=encoded(text))
    yield [asked("developer", "<permissions instructions>\nSandbox: workspace-write.\n</permissions instructions>"),
           asked("user", "# AGENTS.md instructions\n\nRun the tests.", "<environment_context>\n  <cwd>/repo</cwd>\n  <shell>bash</shell>\n</environment_context>"),
           asked("user", "Fix the failing test.")]
    yield [thought("**Looking**"), dict(type="function_call", name="shell", arguments='{"command":["bash","-lc","pytest -q"]}', call_id="call_1"),
           dict(type="function_call_output", call_id="call_1", output="Exit code: 1\nOutput:\nE  assert 1 == 2\n" + "line\n" * 40)]
    yield [said("I see the fault."), dict(type="custom_tool_call", status="completed", call_id="call_2", name="apply_patch",
                                          input="*** Begin Patch\n*** Update File: a.py\n@@\n-x = 1\n+x = 2\n*** End Patch"),
           dict(type="custom_tool_call_output", call_id="call_2", output="Success. Updated the following files:\nM a.py\n")]
    yield [dict(type="function_call", namespace="mcp__docs", name="search", arguments='{"q":"x"}', call_id="call_3"),
           dict(type="function_call_output", call_id="call_3", output=[dict(type="input_text", text="Nothing found.")])]
    yield [said("It is fixed."), asked("user", "Thanks. Now the docs.")]


def test_a_conversation_as_codex_has_it(server):
    items, n_before, n_cached = [], 0, []
    for turn in codex_turns():
        items += turn
        body = dict(model=NAME, instructions="You are a coding agent. " * 20, input=items, tools=CODEX_TOOLS, tool_choice="auto", parallel_tool_calls=False,
                    reasoning=dict(effort="medium", summary="auto"), store=False, stream=True, include=["reasoning.encrypted_content"],
                    prompt_cache_key="0198a4f6", client_metadata={"x-codex-installation-id": "1"}, max_output_tokens=4)
        status, _, text = server.raw("POST", "/v1/responses", json.dumps(body),
                                     {"Accept": "text/event-stream", "originator": "codex_cli_rs", "session_id": "0198a4f6"})
        events = [json.loads(line.removeprefix("data: ")) for line in text.decode().splitlines() if line.startswith("data: ")]
        assert status == 200, text
        for event in events:
            EVENTS.validate_python(event)
        usage = events[-1]["response"]["usage"]
        n_cached.append(usage["input_tokens_details"]["cached_tokens"])
        assert usage["input_tokens"] > n_before and n_cached[-1] >= n_before - 4, n_cached     # but for the header of the next answer
        n_before = usage["input_tokens"]
    assert n_before > 400 and sum(n_cached[1:]) > 1500


AGENTS = '''
import asyncio, sys
from agents import Agent, ModelSettings, Runner, function_tool, set_default_openai_client, set_tracing_disabled
from openai import AsyncOpenAI
from pydantic import BaseModel
url, name = sys.argv[1:]
set_default_openai_client(AsyncOpenAI(base_url=url, api_key="none", max_retries=0))
set_tracing_disabled(True)
cities = []

@function_tool
def weather(city: str) -> str:
    "The weather of a city."
    cities.append(city)
    return "18 degrees"

class Answer(BaseModel):
    degrees: int
    is_warm: bool

async def main():
    short = dict(temperature=0, extra_body=dict(stop=[".", "!"]))
    agent = Agent(name="a", instructions="Be brief.", model=name, tools=[weather], model_settings=ModelSettings(tool_choice="required", **short))
    first = await Runner.run(agent, "What is the weather in Paris?")
    assert cities == ["Paris"] and first.final_output, cities
    await Runner.run(agent, [*first.to_input_list(), dict(role="user", content="And in Rome?")])
    assert len(cities) == 2
    streamed = Runner.run_streamed(agent, "What is the weather in Oslo?")
    async for event in streamed.stream_events():
        pass
    assert streamed.final_output and len(cities) == 3
    typed = Agent(name="b", model=name, output_type=Answer, model_settings=ModelSettings(temperature=0))
    got = await Runner.run(typed, "It has 18 degrees in Paris.")
    assert isinstance(got.final_output, Answer)
    again = await Runner.run(typed, "And now?", previous_response_id=got.last_response_id)
    assert isinstance(again.final_output, Answer)
asyncio.run(main())
'''


@pytest.mark.skipif(not (ROOT / ".venv-clients/bin/python").exists(), reason="needs .venv-clients with openai-agents")
def test_openai_agents_with_its_default_model(server):
    got = subprocess.run([ROOT / ".venv-clients/bin/python", "-c", AGENTS, f"http://127.0.0.1:{server.port}/v1", NAME], capture_output=True, text=True, timeout=120)
    assert got.returncode == 0, got.stderr[-3000:]
