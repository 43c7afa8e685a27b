"""Anthropic's API by Anthropic's client: against serve.py, and against a server whose model says what a test tells it to."""

import asyncio
import json
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import anthropic
import httpx
import jsonschema
import pydantic
import pytest
import torch
import uvicorn
from test_serve import NAME, Process
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, pre_tokenizers

from gpt_faster.cli.options import Options
from gpt_faster.decoding.request_sampler import GREEDY
from gpt_faster.decoding.scheduler import Scheduler
from gpt_faster.formats.known_shapes import with_random_weights
from gpt_faster.server import main as serve
from gpt_faster.server.app import HttpServer
from gpt_faster.server.engine import Engine
from gpt_faster.server.messages import (
    CountRequest,
    MessagesRequest,
    chat_request,
)
from gpt_faster.server.metrics import Metrics
from gpt_faster.server.protocol import ApiError, parse
from gpt_faster.text.token_bytes import unicode_to_bytes
from model import ModelConfig
from sampling import Processor
from tokenizer import Tokenizer, TokenizersBackend

ASK = [dict(role="user", content="Name three colours.")]


# ---- Translation ---------------------------------------------------------------------------------

def translate(variables=frozenset(), late_system=True, kind=MessagesRequest, **fields):
    """-> the ChatRequest's fields that are set."""
    body = json.dumps(dict(max_tokens=9, messages=ASK) | fields)
    request = parse(kind, body.encode(), 512)
    got = chat_request(request, variables, late_system).model_dump(exclude_none=True, exclude_unset=True, by_alias=True)
    for message in got["messages"]:
        message["content"] = "".join(part["text"] for part in message["content"])
    return got


def messages_of(*messages, **fields):
    return translate(messages=list(messages), **fields)["messages"]


def refusal(match, kind=MessagesRequest, **fields):
    with pytest.raises(ApiError, match=match) as caught:
        translate(kind=kind, **fields)
    assert caught.value.status == 400
    return caught.value.error


def text(text, **more):
    return dict(type="text", text=text, **more)


def use(name, **arguments):
    return dict(type="tool_use", id=f"toolu_{name}", name=name, input=arguments)


def result(name, content=None, **more):
    return dict(type="tool_result", tool_use_id=f"toolu_{name}", **({} if content is None else dict(content=content)), **more)


def test_a_conversation_with_tools_and_thoughts():
    got = messages_of(
        dict(role="user", content=[text("<reminder>", cache_control=dict(type="ephemeral")), text("Weather?", citations=None)]),
        dict(role="assistant", content=[
            dict(type="thinking", thinking="I call it.", signature="x"), dict(type="redacted_thinking", data="zzz"), text("Let me see."),
            use("weather", city="Łódź", deep=dict(n=[1, None]))]),
        dict(role="user", content=[result("weather", [text("12 "), text("degrees")], cache_control=dict(type="ephemeral")), text("And?")]),
        system=[text("Be brief.", cache_control=dict(type="ephemeral", ttl="1h")), text("\nBe kind.")])
    assert [m["role"] for m in got] == ["system", "user", "assistant", "tool", "user"]
    assert got[0]["content"] == "Be brief.\nBe kind." and got[1]["content"] == "<reminder>Weather?"
    assert got[2]["content"] == "Let me see." and got[2]["reasoning_content"] == "I call it."
    [call] = got[2]["tool_calls"]
    assert call == dict(id="toolu_weather", function=dict(name="weather", arguments=dict(city="Łódź", deep=dict(n=[1, None]))))
    assert got[3] == dict(role="tool", tool_call_id="toolu_weather", content="12 degrees") and got[4]["content"] == "And?"


@pytest.mark.parametrize("content, fields, expected", [
    ("ok", {}, "ok"), (None, {}, ""), ([], {}, ""), ("File not found", dict(is_error=True), "Error: File not found"),
    ("<tool_use_error>No such file</tool_use_error>", dict(is_error=True), "<tool_use_error>No such file</tool_use_error>"),
    (None, dict(is_error=True), "Error: "), ("fine", dict(is_error=False), "fine"),
    ([dict(type="tool_reference", tool_name="Read")], {}, "Read")])
def test_what_a_tool_returned(content, fields, expected):
    assert messages_of(dict(role="user", content=[result("a", content, **fields)]))[0]["content"] == expected


def test_turns_of_one_role_are_one():
    got = messages_of(dict(role="user", content="a"), dict(role="user", content=[text("b")]), dict(role="assistant", content=[text("c")]),
                      dict(role="assistant", content=[use("f"), use("g")]), dict(role="user", content=[result("f", "1"), result("g", "2")]))
    assert [m["role"] for m in got] == ["user", "assistant", "tool", "tool"]
    assert got[0]["content"] == "a\n\nb" and got[1]["content"] == "c" and len(got[1]["tool_calls"]) == 2


def test_a_system_message_in_the_conversation_stays_there_or_becomes_a_users():
    said = [dict(role="user", content="a"), dict(role="assistant", content="b"), dict(role="system", content="New rule."), dict(role="user", content="c")]
    assert [m["role"] for m in messages_of(*said)] == ["user", "assistant", "system", "user"]
    got = messages_of(*said, late_system=False)
    assert [m["role"] for m in got] == ["user", "assistant", "user"] and got[2]["content"] == "New rule.\n\nc"
    second = messages_of(said[0], said[2], said[3], late_system=False)
    assert [m["role"] for m in second] == ["user"] and second[0]["content"] == "a\n\nNew rule.\n\nc"
    first = messages_of(dict(role="system", content="S"), *said[:1], late_system=False, system="T")
    assert [m["role"] for m in first] == ["system", "user"] and first[0]["content"] == "T\n\nS"


def test_what_changes_with_each_request_of_claude_code_is_not_in_the_prompt():
    header = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={};"
    alone, joined = ([m["content"] for m in messages_of(*ASK, system=system)] for system in
                     ([text(header.format("fa690")), text("You help.")], header.format("00000") + "\nYou help."))
    assert alone == joined == ["You help.", "Name three colours."]
    assert [m["role"] for m in messages_of(*ASK, system=[text(header)])] == ["user"]
    assert messages_of(*ASK, system="About x-anthropic-billing-header: …")[0]["content"] == "About x-anthropic-billing-header: …"


def test_the_last_assistants_message_is_continued():
    got = translate(messages=[*ASK, dict(role="assistant", content="{")])
    assert got["continue_final_message"] is True and got["messages"][-1]["content"] == "{"
    assert "continue_final_message" not in translate()
    refusal("messages.1: a final tool_use needs its tool_result", messages=[*ASK, dict(role="assistant", content=[use("f")])])


def test_tools_and_the_choice_of_one():
    schema = dict(type="object", properties=dict(a={"$ref": "#/$defs/a"}), **{"$defs": dict(a=dict(type="string"))})
    tool = dict(name="mcp__" + "n" * 100, description="d", input_schema=schema, cache_control=dict(type="ephemeral"), type="custom",
                defer_loading=True, eager_input_streaming=True, input_examples=[{}], allowed_callers=["direct"])
    got = translate(tools=[tool, dict(name="f", input_schema={}, strict=True)])
    assert got["tools"][0]["function"] == dict(name=tool["name"], description="d", parameters=schema)
    assert got["tools"][1]["function"] == dict(name="f", parameters={}) and "tool_choice" not in got

    def choice(**fields):
        got = translate(tools=[tool], tool_choice=fields)
        return got["tool_choice"]["mode"], got["tool_choice"].get("names"), got.get("parallel_tool_calls")
    assert choice(type="auto") == ("auto", None, None) and choice(type="none") == ("none", None, None)
    assert choice(type="any", disable_parallel_tool_use=True) == ("required", None, False)
    assert choice(type="tool", name="f") == ("required", ["f"], None)


@pytest.mark.parametrize("thinking, variables, expected", [
    (dict(type="enabled", budget_tokens=1024), {"enable_thinking"}, dict(enable_thinking=True)),
    (dict(type="adaptive", display="omitted"), {"thinking", "messages"}, dict(enable_thinking=True)),
    (dict(type="disabled"), {"enable_thinking"}, dict(enable_thinking=False)), (dict(type="enabled", budget_tokens=9), {"messages"}, {}),
    (None, {"enable_thinking", "thinking"}, {})])
def test_thinking_is_the_templates_argument_where_it_has_one(thinking, variables, expected):
    got = translate(variables, thinking=thinking)
    assert {name: got[name] for name in ("enable_thinking", "reasoning_effort") if name in got} == expected


def test_effort_is_the_templates_too():
    config = dict(effort="xhigh")
    assert translate({"reasoning_effort"}, output_config=config)["reasoning_effort"] == "xhigh"
    assert "reasoning_effort" not in translate(output_config=config)


def test_a_structured_answer():
    schema = dict(type="object", properties={})
    expected = dict(type="json_schema", json_schema=dict(schema=schema))
    form = dict(type="json_schema", schema=schema)
    assert translate(output_config=dict(format=form))["response_format"] == translate(output_format=form)["response_format"] == expected
    refusal("only one of output_config.format and output_format", output_format=form, output_config=dict(format=form))


def test_what_cannot_change_the_text_is_accepted():
    plain = translate()
    for fields in (dict(metadata=dict(user_id="user_1_account_2_session_3")), dict(service_tier="auto"), dict(cache_control=dict(type="ephemeral")),
                   dict(betas=["a"]), dict(speed="fast"), dict(inference_geo="eu"), dict(diagnostics=dict(previous_message_id=None)),
                   dict(context_management=dict(edits=[dict(type="clear_thinking_20251015", keep="all")])),
                   dict(container=None, mcp_servers=None, system=None, tools=None, stop_sequences=None, temperature=None)):
        assert translate(**fields) == plain, fields


IMAGE = dict(type="image", source=dict(type="base64", media_type="image/png", data="AAAA"))


@pytest.mark.parametrize("fields, match", [
    (dict(messages=[dict(role="user", content=[text("What is it?"), IMAGE])]), r"^messages\.0\.content\.1: images are not supported"),
    (dict(messages=[dict(role="user", content=[dict(type="document", source={})])]), r"content\.0: documents are not supported: send the document's text"),
    (dict(messages=[dict(role="user", content=[dict(type="container_upload", file_id="f")])]), "blocks of type 'container_upload' are not supported"),
    (dict(messages=[dict(role="user", content=[result("f", [IMAGE])])]), "images are not supported"),
    (dict(messages=[dict(role="user", content=[use("f")])]), r"messages\.0: content\.0: a message of the role 'user' cannot have blocks of type 'tool_use'"),
    (dict(messages=[dict(role="assistant", content=[result("f")])]), "'assistant' cannot have blocks of type 'tool_result'"),
    (dict(messages=[dict(role="user", content=[dict(type="text")])]), r"messages\.0\.content\.0: a text block needs 'text'"),
    (dict(messages=[dict(role="assistant", content=[dict(type="tool_use", id="i", name="f")])]), "a tool_use block needs 'input'"),
    (dict(messages=[dict(role="user", content=3)]), "expected a string or a list of content blocks"),
    (dict(messages=[dict(role="tool", content="x")]), r"messages\.0\.role"), (dict(messages=[]), "messages"),
    (dict(system=[IMAGE]), "system.0: images are not supported"), (dict(system=[use("f")]), "system: content.0: system cannot have"),
    (dict(tools=[dict(type="web_search_20250305", name="web_search", max_uses=5)]), r"^tools\.0: the tool 'web_search_20250305' is not supported"),
    (dict(tools=[dict(type="bash_20250124", name="bash")]), "the tool 'bash_20250124' is not supported"),
    (dict(tools=[dict(name="f")]), r"tools\.0\.input_schema: is missing"), (dict(tools=[3]), r"tools\.0"),
    (dict(tools=[dict(name="a b", input_schema={})]), r"tools\.0\.name"), (dict(tool_choice=dict(type="tool")), "needs 'name'"),
    (dict(thinking=dict(type="between_tools")), r"thinking\.type"), (dict(container="c"), "the field 'container' is not supported"),
    (dict(mcp_servers=[dict(type="url", url="http://x", name="x")]), "the field 'mcp_servers' is not supported"),
    (dict(context_management=dict(edits=[dict(type="compact_20260112")])), r"context_management\.edits|context_management"),
    (dict(max_tokens=-1), "max_tokens"), (dict(max_tokens=None), "max_tokens: is missing"), (dict(temperature=1e308), "temperature"),
    (dict(top_k=10**30), "top_k"), (dict(stop_sequences="x"), "stop_sequences")])
def test_what_is_not_supported_is_refused_by_name(fields, match):
    refusal(match, **fields)


EVERYTHING = dict(
    model="tiny", max_tokens=9, stream=False, stop_sequences=["x"], temperature=0.5, top_p=0.9, top_k=5, metadata=dict(user_id="u"), system=[text("s")],
    thinking=dict(type="enabled", budget_tokens=1024, display="summarized"), output_config=dict(effort="low", format=dict(type="json_schema", schema=dict(type="object"))),
    tools=[dict(name="f", description="d", input_schema=dict(type="object", properties=dict(a=dict(type="string"))))], tool_choice=dict(type="tool", name="f"),
    context_management=dict(edits=[dict(type="clear_thinking_20251015")]), messages=[
        dict(role="user", content="a"), dict(role="assistant", content=[dict(type="thinking", thinking="t", signature="s"), text("b"), use("f", a="b")]),
        dict(role="user", content=[result("f", [text("r")], is_error=True), text("c")])])
HOSTILE = [None, True, 0, -1, 1.5, 10**30, "", "\0", [], {}, [None], [[]], [{}], {"": None}, dict(type="text"), "x" * 2000, [3], dict(type=[]), dict(role={})]


def places(value, path=()):
    yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*path, key))


@pytest.mark.parametrize("path", [path for path in places(EVERYTHING) if path], ids=lambda path: ".".join(map(str, path)))
def test_a_hostile_value_anywhere_is_refused_or_read(path):
    """ApiError or a ChatRequest, never another error; an error names the place or what it is in."""
    for value in HOSTILE:
        body = json.loads(json.dumps(EVERYTHING))
        *inner, last = path
        place = body
        for key in inner:
            place = place[key]
        place[last] = value
        for kind in (MessagesRequest, CountRequest):
            fields = body if kind is MessagesRequest else {k: v for k, v in body.items() if k in CountRequest.model_fields}
            if kind is CountRequest and path[0] not in fields:
                continue
            try:
                chat_request(parse(kind, json.dumps(fields).encode(), 512), frozenset(["enable_thinking", "reasoning_effort"]), False)
            except ApiError as e:
                assert e.status == 400 and str(path[0]) in e.error["message"], (value, e.error)


# ---- A server whose model says what it is told to ------------------------------------------------

TEMPLATE = """
{%- if tools or messages[0].role == 'system' %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}
{% endif %}{% for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}
{%- if m.role != 'system' %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}{{ '\n' if m.content or not loop.first }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
CFG = ModelConfig(dim=32, n_layer=2, n_head=2, n_kv_head=1, head_dim=16, ffn_dim=48, vocab_size=260, context=32768)
END = 257


def byte_tokenizer():
    """A token for each byte, and the two that the template needs."""
    fast = Fast(models.BPE(vocab={sign: byte for sign, byte in unicode_to_bytes().items()}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return Tokenizer(TokenizersBackend(fast), None, False, TEMPLATE, eos_ids=[END])


class Script(Processor):
    """Only the script's next token is possible; texts: what the following answers say."""

    def __init__(self, tokenizer, n_row):
        super().__init__()
        self.tokenizer, self.texts, self.ids = tokenizer, [], [[] for _ in range(n_row)]
        self.prompts = []

    def begin(self, row, prompt, params):
        is_whole = params is not GREEDY            # else a chunk of a prompt, or a row without one
        self.use(row, is_whole)
        if is_whole:
            self.prompts.append(self.tokenizer.decode(prompt))
            self.ids[row] = [*self.tokenizer.encode(self.texts.pop(0) if self.texts else ""), END]

    def observe(self, token):
        self.ids = [ids[1:] for ids in self.ids]

    def forward(self, logits, rows, draft_tokens=None):
        out = torch.full_like(logits, -torch.inf)
        for i, ids in enumerate([self.ids[row] for row in range(len(self.ids))][rows] if isinstance(rows, slice) else
                                [self.ids[row] for row in torch.as_tensor(rows).tolist()]):
            out[i, ids[0] if ids else END] = 0
        return out


class Scripted:
    """The server of a tiny model on a socket; say() sets its next answers."""

    def __init__(self, *argv):
        args = serve.check_options(Options.parse(serve.build_parser(), [
            "--device", "cpu", "--batch_size", "2", "--max_seq_length", "32768", "--served_name", "tiny", *argv]))
        torch.manual_seed(0)
        source = with_random_weights(Path("tiny"), CFG)
        tokenizer = byte_tokenizer()
        source.eos_ids = tokenizer.eos_ids
        self.session = serve.ServerSession(args, source, tokenizer, torch.device("cpu"), torch.float32, "kv_cache", 0.0)
        self.script = Script(tokenizer, 2)
        self.session.batch.sampler.processors.append(self.script)
        self.engine = Engine(Scheduler(self.session.batch, self.session.model.longest_call, reuse=True), args.max_queue, Metrics())
        self.http = HttpServer(self.session, self.engine, Metrics())
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.server = uvicorn.Server(uvicorn.Config(self.http.app, log_level="warning", lifespan="off"))
        self.server.install_signal_handlers = lambda: None

        async def run():
            self.http.loop = asyncio.get_running_loop()
            await self.server.serve(sockets=[listener])
        self.threads = [threading.Thread(target=self.engine.run, daemon=True), threading.Thread(target=asyncio.run, args=(run(),), daemon=True)]
        for thread in self.threads:
            thread.start()
        self.client = anthropic.Anthropic(base_url=self.url, api_key="none")

    def say(self, *texts):
        self.script.texts, self.script.prompts = list(texts), []

    def stop(self):
        self.engine.drain()
        self.server.should_exit = True
        for thread in self.threads:
            thread.join(20)
            assert not thread.is_alive()


@pytest.fixture(scope="module")
def scripted():
    server = Scripted()
    yield server
    server.stop()


def ask(server, *said, messages=ASK, **fields):
    server.say(*said)
    return server.client.messages.create(**dict(model="tiny", max_tokens=400, messages=messages) | fields)


def streamed(server, *said, messages=ASK, **fields):
    """-> the final message of the client's helper, and the raw events."""
    server.say(*said)
    fields = dict(model="tiny", max_tokens=400, messages=messages) | fields
    with server.client.messages.stream(**fields) as stream:
        final = stream.get_final_message()
    server.say(*said)
    return final, list(server.client.messages.create(**fields, stream=True))


def call(name, **arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'


WEATHER = dict(name="weather", description="The weather of a place", input_schema=dict(
    type="object", required=["place"], additionalProperties=False, properties=dict(
        place={"$ref": "#/$defs/place"}, days=dict(type="array", items=dict(type="integer"), maxItems=3)),
    **{"$defs": dict(place=dict(type="object", required=["city"], additionalProperties=False, properties=dict(
        city=dict(type="string", maxLength=12), within=dict(anyOf=[{"$ref": "#/$defs/place"}, dict(type="null")]))))}))
ADD = dict(name="add", input_schema=dict(type="object", properties=dict(a=dict(type="integer"))))


@pytest.mark.parametrize("said, kinds", [
    ("Grün <b> ☃ 1 < 2.", ["text"]), ("<think>\nHm, 1 < 2.\n</think>\n\nYes.", ["thinking", "text"]),
    ("Let me see.\n" + call("weather", place=dict(city="Łódź", within=None)), ["text", "tool_use"]),
    ("<think>\nI call two.\n</think>\n\n" + call("add", a=1) + "\n" + call("add", a=2) + "\n", ["thinking", "tool_use", "tool_use"]),
    (call("add", a=1) + "\nDone.", ["tool_use", "text"]), (call("add") + "  \n ", ["tool_use"]), ("", []), (" \n ", ["text"])])
def test_blocks_whole_and_streamed(scripted, said, kinds):
    whole = ask(scripted, said, tools=[WEATHER, ADD])
    assert whole.type == "message" and whole.role == "assistant" and whole.model == "tiny" and whole.id.startswith("msg_") and whole._request_id.startswith("req_")
    n_thought = whole.usage.output_tokens_details.thinking_tokens
    assert n_thought == 0 if "thinking" not in kinds else 5 < n_thought < 40
    assert [block.type for block in whole.content] == kinds
    assert [block.text for block in whole.content if block.type == "text"] in ([], ["Grün <b> ☃ 1 < 2."], ["Yes."], ["Let me see."], ["Done."], [" \n "])
    assert whole.stop_reason == ("tool_use" if "tool_use" in kinds else "end_turn") and whole.stop_sequence is None
    final, events = streamed(scripted, said, tools=[WEATHER, ADD])
    for block, other in zip(whole.content, final.content, strict=True):
        block, other = ({k: v for k, v in b.to_dict().items() if k not in ("id", "parsed_output")} for b in (block, other))
        assert block == other
    assert final.stop_reason == whole.stop_reason and final.usage.output_tokens == whole.usage.output_tokens == len(said.encode()) + 1
    assert events[0].type == "message_start" and events[0].message.content == [] and events[0].message.stop_reason is None
    assert [e.type for e in events[-2:]] == ["message_delta", "message_stop"]
    assert total(events[0].message.usage) == total(events[-2].usage) == total(whole.usage)
    open_blocks, n = set(), 0                      # each block is opened once, in order, and closed before the next
    for event in events[1:-2]:
        if event.type == "content_block_start":
            assert event.index == n and not open_blocks
            open_blocks, n = {n}, n + 1
        else:
            assert open_blocks == {event.index}
            open_blocks -= {event.index} if event.type == "content_block_stop" else set()
    assert not open_blocks and n == len(kinds)


def total(usage):
    return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


def test_the_events_as_they_are_sent(scripted):
    scripted.say("<think>\nHm.\n</think>\n\nYes.\n" + call("add", a=1))
    body = dict(model="tiny", max_tokens=200, messages=ASK, tools=[ADD], stream=True)
    answer = httpx.post(f"{scripted.url}/v1/messages?beta=true", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    frames = [frame.split("\n") for frame in answer.text.strip("\n").split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in frames]
    assert [name for name, _ in frames] == [f"event: {event['type']}" for event in events]
    assert events[1] == dict(type="ping")
    deltas = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
    assert list(dict.fromkeys(deltas)) == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta"]
    start = [e["content_block"] for e in events if e["type"] == "content_block_start"]
    assert start[:2] == [dict(type="thinking", thinking="", signature=""), dict(type="text", text="")]
    assert start[2]["input"] == {} and start[2]["id"].startswith("toolu_")
    assert events[-2]["delta"] == dict(stop_reason="tool_use", stop_sequence=None)


def test_why_an_answer_ends(scripted):
    got = ask(scripted, "One, two; three", stop_sequences=[";", "three", ","])
    assert (got.stop_reason, got.stop_sequence, got.content[0].text) == ("stop_sequence", ",", "One")
    got = ask(scripted, "One, two; three", stop_sequences=["four", "two;"])
    assert (got.stop_reason, got.stop_sequence, got.content[0].text) == ("stop_sequence", "two;", "One, ")
    got = ask(scripted, "One", stop_sequences=["<|im_end|>"])
    assert (got.stop_reason, got.stop_sequence, got.content[0].text) == ("stop_sequence", "<|im_end|>", "One")
    got = ask(scripted, "One, two", max_tokens=4)
    assert (got.stop_reason, got.stop_sequence, got.content[0].text, got.usage.output_tokens) == ("max_tokens", None, "One,", 4)
    final, _ = streamed(scripted, "One, two; three", stop_sequences=["tw"])
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", "tw")
    got = ask(scripted, "One, two" + call("add", a=1), tools=[ADD], stop_sequences=['"a"'])         # cut in the call
    assert got.stop_reason == "stop_sequence" and [b.type for b in got.content] == ["text"]


def test_a_call_that_is_cut_off_is_a_block_and_no_text(scripted):
    """Whole, its input cannot be shown; a stream has what came of it."""
    text = call("add", a=12345678901234567890)
    said = dict(tools=[ADD], max_tokens=len(text) - 25)                # a token is a character
    got = ask(scripted, text, **said)
    assert [block.type for block in got.content] == ["tool_use"] and got.content[0].input == {} and got.stop_reason == "max_tokens"
    _, events = streamed(scripted, text, **said)
    parts = [event.delta.partial_json for event in events if event.type == "content_block_delta"]
    assert parts and "".join(parts) in text and '{"a": 123' in "".join(parts)


def test_only_the_prompt(scripted):
    """max_tokens 0 fills the cache."""
    messages = [dict(role="user", content="A prompt that no other test has.")]
    got = ask(scripted, "One", messages=messages, max_tokens=0)
    assert got.content == [] and got.usage.output_tokens == 0 and got.stop_reason == "max_tokens"
    final, _ = streamed(scripted, "One", messages=messages, max_tokens=0)
    assert final.content == [] and final.usage.input_tokens == 1


def test_thoughts_are_asked_for_hidden_and_sent_back(scripted):
    said = "<think>\nHm.\n</think>\n\nYes."
    for thinking, begins in ((dict(type="disabled"), False), (dict(type="enabled", budget_tokens=1024), True), (dict(type="adaptive"), True)):
        ask(scripted, "Yes." if not begins else said, extra_body=dict(thinking=thinking))
        assert scripted.script.prompts[0].endswith("assistant\n" if begins else "assistant\n<think>\n\n</think>\n\n")
    got = ask(scripted, said, thinking=dict(type="adaptive", display="omitted"))
    assert (got.content[0].thinking, got.content[1].text) == ("", "Yes.") and got.content[0].signature
    final, _ = streamed(scripted, said, thinking=dict(type="adaptive", display="omitted"))
    assert (final.content[0].thinking, final.content[1].text) == ("", "Yes.") and final.content[0].signature
    got = ask(scripted, said, thinking=dict(type="adaptive"))
    assert got.content[0].thinking == "Hm." and got.content[0].signature
    ask(scripted, "Bye.", messages=[*ASK, got.to_param(), dict(role="user", content="And?")])
    assert "<think>\nHm.\n</think>\n\nYes." in scripted.script.prompts[0]


def test_a_loop_of_tools(scripted):
    """Two turns; what the model said is read back as it was, so the cached prefix covers all of it."""
    messages = [dict(role="user", content="Weather?")]
    first = ask(scripted, "I look.\n" + call("weather", place=dict(city="Łódź", within=dict(city="PL")), days=[1, 2]), messages=messages, tools=[WEATHER])
    assert first.stop_reason == "tool_use" and first.content[1].input == dict(place=dict(city="Łódź", within=dict(city="PL")), days=[1, 2])
    messages += [first.to_param(), dict(role="user", content=[
        dict(type="tool_result", tool_use_id=first.content[1].id, content=[text('{"t": 12}')]), text("<system-reminder>Be brief.</system-reminder>")])]
    second, _ = streamed(scripted, call("weather", place=dict(city="Oslo")), messages=messages, tools=[WEATHER])
    assert second.content[0].name == "weather"
    assert scripted.script.prompts[0].endswith('user\nWeather?\nassistant\nI look.\n' + call("weather", place=dict(city="Łódź", within=dict(city="PL")), days=[1, 2]) + (
        '\ntool\n{"t": 12}\nuser\n<system-reminder>Be brief.</system-reminder>\nassistant\n'))
    assert second.usage.cache_read_input_tokens >= total(first.usage) + first.usage.output_tokens - 2
    messages += [second.to_param(), dict(role="user", content=[dict(type="tool_result", tool_use_id=second.content[0].id, is_error=True, content="no such city")])]
    third = ask(scripted, "It is 12 degrees.", messages=messages, tools=[WEATHER])
    assert third.stop_reason == "end_turn" and third.content[0].text == "It is 12 degrees." and "Error: no such city" in scripted.script.prompts[0]
    assert third.usage.cache_read_input_tokens >= total(second.usage) + second.usage.output_tokens - 2


def test_prefill_begins_the_answer(scripted):
    got = ask(scripted, '"a": 1}', messages=[*ASK, dict(role="assistant", content="{")])
    assert got.content[0].text == '"a": 1}' and scripted.script.prompts[0].endswith("assistant\n{")


def test_count_tokens_is_what_messages_counts(scripted):
    prefix = [dict(role="user", content=[text("Weather?")]), dict(role="assistant", content=[dict(type="thinking", thinking="a", signature=""), use("weather", place={})]),
              dict(role="user", content=[result("weather", "12")])]
    for fields in (dict(messages=ASK), dict(messages=ASK, system=[text("Be brief.")]), dict(messages=ASK, tools=[WEATHER, ADD]),
                   dict(messages=prefix, tools=[WEATHER], tool_choice=dict(type="none")), dict(messages=prefix, tools=[WEATHER], thinking=dict(type="disabled")),
                   dict(messages=[*ASK, dict(role="assistant", content="{")])):
        n = scripted.client.messages.count_tokens(model="tiny", **fields).input_tokens
        assert n == total(ask(scripted, "x", **fields).usage)
        assert n == scripted.client.beta.messages.count_tokens(model="tiny", betas=["a-2025"], **fields).input_tokens
    long = [dict(role="user", content="word " * 8000)]
    assert scripted.client.messages.count_tokens(model="tiny", messages=long).input_tokens > 40000          # more than a slot has
    with pytest.raises(anthropic.BadRequestError, match="the prompt is too long"):
        ask(scripted, "x", messages=long)


def test_models_in_both_forms(scripted):
    [model] = scripted.client.models.list()
    assert (model.id, model.type, model.display_name, model.lifecycle) == ("tiny", "model", "tiny", "active") and model.max_input_tokens == 32768
    assert model.created_at.tzinfo and scripted.client.models.retrieve("tiny") == model
    assert httpx.get(f"{scripted.url}/v1/models").json()["object"] == "list"
    with pytest.raises(anthropic.NotFoundError, match="the model 'claude-opus-5' does not exist: this server serves 'tiny'"):
        scripted.client.models.retrieve("claude-opus-5")


def form_of(error, kind):
    assert set(error) == {"type", "error", "request_id"} and error["request_id"].startswith("req_") and error["type"] == "error" and error["error"]["type"] == kind and error["error"]["message"], error


def test_errors_are_the_clients_classes(scripted, monkeypatch):
    client = scripted.client.with_options(max_retries=0)

    def fails(kind, of_class, match, **fields):
        fields = dict(model="tiny", max_tokens=4, messages=ASK) | fields
        for send in (client.messages.create, lambda **more: client.messages.create(**more, stream=True), client.beta.messages.create):
            with pytest.raises(of_class, match=match) as caught:
                send(**fields)
            form_of(caught.value.body, kind)
            assert caught.value.request_id == caught.value.body["request_id"]
    fails("invalid_request_error", anthropic.BadRequestError, r"messages\.0\.content\.0: images", messages=[dict(role="user", content=[IMAGE])])
    fails("invalid_request_error", anthropic.BadRequestError, "stop_sequences: at most 16", stop_sequences=["x" * 300])
    fails("invalid_request_error", anthropic.BadRequestError, r"output_config\.format: .*nope", extra_body=dict(
        output_config=dict(format=dict(type="json_schema", schema=dict(type="nope")))))
    fails("not_found_error", anthropic.NotFoundError, "this server serves 'tiny'", model="claude-opus-5")
    with monkeypatch.context() as patch:
        patch.setattr(scripted.http, "engine", SimpleNamespace(draining=True))
        fails("overloaded_error", anthropic.InternalServerError, "shutting down")
    with monkeypatch.context() as patch:
        patch.setattr(scripted.engine, "load", lambda: (0, 10**6))
        fails("rate_limit_error", anthropic.RateLimitError, "queue full")
    for path, body, status, kind in (("/v1/messages", "{", 400, "invalid_request_error"), ("/v1/messages", json.dumps(dict(max_tokens=1, messages=[dict(role="user", content="\ud800")])), 400, "invalid_request_error"),
                                     ("/v1/messages", "x" * 9_000_000, 413, "request_too_large"), ("/v1/messages/count_tokens", "{}", 400, "invalid_request_error")):
        answer = httpx.post(scripted.url + path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == status
        form_of(answer.json(), kind)
    answer = httpx.post(f"{scripted.url}/v1/messages/batches", json={}, headers={"anthropic-version": "2023-06-01"})
    assert answer.status_code == 404
    form_of(answer.json(), "not_found_error")
    form_of(httpx.get(f"{scripted.url}/v1/messages").json(), "invalid_request_error")


def test_an_error_inside_a_stream(scripted, monkeypatch):
    def broken(*args):
        raise RuntimeError("secret")
    with monkeypatch.context() as patch:
        patch.setattr(scripted.script, "forward", broken)
        with pytest.raises(anthropic.APIStatusError) as caught:
            list(scripted.client.with_options(max_retries=0).messages.create(model="tiny", max_tokens=4, messages=[dict(role="user", content="new")], stream=True))
    form_of(caught.value.body, "api_error")
    assert "secret" not in str(caught.value)
    assert ask(scripted, "Well.").content[0].text == "Well."


# ---- Claude Code ---------------------------------------------------------------------------------

CACHED = dict(cache_control=dict(type="ephemeral"))
BETAS = ["claude-code-20250219", "interleaved-thinking-2025-05-14", "context-management-2025-06-27", "effort-2025-11-24"]


def agent_tool(name, **properties):
    return dict(name=name, description=f"{name} works on the user's files. " + "Prefer it to the shell. It fails if a path is not absolute. " * 3,
                input_schema={"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "additionalProperties": False,
                              "properties": {k: dict(v, description=f"The {k} that {name} takes") for k, v in properties.items()},
                              "required": list(properties)[:1]})


STRING, NUMBER, FLAG = dict(type="string"), dict(type="number", exclusiveMinimum=0), dict(type="boolean", default=False)
AGENT_TOOLS = [
    agent_tool("Bash", command=STRING, timeout=NUMBER, run_in_background=FLAG), agent_tool("Read", file_path=STRING, offset=NUMBER, limit=NUMBER),
    agent_tool("Edit", file_path=STRING, old_string=STRING, new_string=STRING, replace_all=FLAG), agent_tool("Write", file_path=STRING, content=STRING),
    agent_tool("Glob", pattern=STRING, path=STRING), agent_tool("Grep", pattern=STRING, output_mode=dict(type="string", enum=["content", "count"])),
    agent_tool("Task", prompt=STRING, subagent_type=STRING), agent_tool("WebFetch", url=dict(type="string", format="uri"), prompt=STRING),
    agent_tool("WebSearch", query=dict(type="string", minLength=2), allowed_domains=dict(type="array", items=STRING)),
    agent_tool("TodoWrite", todos=dict(type="array", items=dict(type="object", additionalProperties=False, required=["content", "status"], properties=dict(
        content=dict(type="string", minLength=1), status=dict(type="string", enum=["pending", "in_progress", "completed"]))))),
    agent_tool("NotebookEdit", notebook_path=STRING, cell_id=STRING), agent_tool("ExitPlanMode", plan=STRING), agent_tool("BashOutput", bash_id=STRING),
    agent_tool("KillShell", shell_id=STRING), agent_tool("mcp__" + "long_server_name_" * 4 + "__query", rows=dict(type="object", propertyNames=dict(pattern="^[a-z]+$"), additionalProperties={})),
]


def agent_request(n, messages, **fields):
    """As an agent sends its n-th request: marks of the cache on the last blocks, and a checksum that changes."""
    return dict(dict(
        model="tiny", max_tokens=32000, messages=messages, tools=AGENT_TOOLS, metadata=dict(user_id="user_ab_account_cd_session_ef"), betas=BETAS,
        thinking=dict(type="adaptive"), output_config=dict(effort="medium"), context_management=dict(edits=[dict(type="clear_thinking_20251015", keep="all")]),
        system=[text(f"x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={n * 7919:05x};"), text("You are a coding agent.", **CACHED),
                text("\nYou help with software. " + "Answer in few words. " * 40 + "\nToday's date: 2026-11-30", **CACHED)]), **fields)


@pytest.fixture
def fresh():
    server = Scripted()
    yield server
    server.stop()


def test_conversations_keep_their_slots(fresh):
    """Two that begin with the same tokens, over two slots."""
    said = {name: [] for name in ("a", "b")}
    for i in range(4):
        for name in said:
            said[name].append(dict(role="user", content=f"{name * 300} {i}"))
            got = ask(fresh, f"Answer {i}.", messages=said[name])
            assert got.usage.input_tokens < 400 and (i == 0 or got.usage.cache_read_input_tokens > 300 * i), (name, i, got.usage)
            said[name].append(got.to_param())


def test_a_short_request_takes_the_slot_that_loses_least(fresh):
    long = [dict(role="user", content="x" * 3000)]
    ask(fresh, "One.", messages=long)
    for i in range(5):
        ask(fresh, "Two.", messages=[dict(role="user", content=f"{i}?")])
        assert ask(fresh, "One.", messages=long).usage.cache_read_input_tokens > 3000


def test_a_conversation_as_claude_code_has_it(fresh):
    """Side requests, then three turns with tools; each turn computes only what is new."""
    scripted = fresh
    client, said = scripted.client.beta.messages, []

    def turn(messages, answer):
        scripted.say(answer)
        with client.stream(**agent_request(len(messages), messages)) as stream:
            said.append(stream.get_final_message())
        return said[-1]

    def is_cached(message, before):
        return message.usage.cache_read_input_tokens >= total(before.usage) + before.usage.output_tokens - 2

    scripted.say("#")
    quota = client.create(model="tiny", max_tokens=1, messages=[dict(role="user", content="quota")], metadata=dict(user_id="u"), betas=BETAS[:1])
    assert quota.stop_reason == "max_tokens" and quota.usage.output_tokens == 1
    assert client.count_tokens(model="tiny", messages=[dict(role="user", content="foo")], tools=AGENT_TOOLS[-1:], betas=BETAS).input_tokens > 500
    topic = dict(model="tiny", max_tokens=512, messages=[dict(role="user", content="Fix the bug in add.py"), dict(role="assistant", content="{")], system=[
        text("Is this a new topic? Answer as JSON with isNewTopic and title.", **CACHED)], betas=BETAS[:1], extra_body=dict(temperature=0))
    scripted.say('"isNewTopic": true, "title": "Fix add.py"}')
    assert json.loads("{" + client.create(**topic).content[0].text) == dict(isNewTopic=True, title="Fix add.py")

    messages = [dict(role="user", content=[text("<system-reminder>\nThe project's notes: none.\n</system-reminder>\n"), text("Fix the bug in add.py", **CACHED)])]
    first = turn(messages, "<think>\nI read it first.\n</think>\n\nI read the file.\n" + call("Read", file_path="/src/add.py"))
    assert [b.type for b in first.content] == ["thinking", "text", "tool_use"] and first.stop_reason == "tool_use"
    messages += [dict(role="assistant", content=[b.to_dict() for b in first.content]), dict(role="user", content=[
        dict(type="tool_result", tool_use_id=first.content[2].id, content="     1→def add(a, b):\n     2→    return a - b\n"),
        text("<system-reminder>\nThe list of tasks is empty.\n</system-reminder>", **CACHED)])]
    second = turn(messages, call("Edit", file_path="/src/add.py", old_string="a - b", new_string="a + b") + "\n" + call("Bash", command="pytest -q"))
    assert [b.name for b in second.content] == ["Edit", "Bash"] and is_cached(second, first)
    scripted.say('"isNewTopic": false, "title": null}')        # in between, with another prompt
    client.create(**topic)
    messages += [dict(role="assistant", content=[b.to_dict() for b in second.content]), dict(role="user", content=[
        dict(type="tool_result", tool_use_id=second.content[0].id, content=[text("The file was updated.")]),
        dict(type="tool_result", tool_use_id=second.content[1].id, is_error=True, content="Exit code 1\n1 failed", **CACHED)])]
    third = turn(messages, "It is fixed.")
    assert third.content[0].text == "It is fixed." and third.stop_reason == "end_turn" and is_cached(third, second)
    assert "Error: Exit code 1\n1 failed" in scripted.script.prompts[0] and "cch=" not in scripted.script.prompts[0]
    assert total(third.usage) == client.count_tokens(**{k: v for k, v in agent_request(9, messages).items() if k not in ("max_tokens", "metadata")}).input_tokens
    assert third.usage.input_tokens < 200 < 5000 < third.usage.cache_read_input_tokens
    late = [*messages, dict(role="assistant", content="It is fixed."), dict(role="system", content="The user is away."), dict(role="user", content="Go on.")]
    assert turn(late, "Yes.").content[0].text == "Yes." and is_cached(said[-1], third)
    with pytest.raises(anthropic.BadRequestError, match=r"tools\.15: the tool 'web_search_20250305' is not supported"):
        client.create(**agent_request(1, messages, tools=[*AGENT_TOOLS, dict(type="web_search_20250305", name="web_search", max_uses=8)]), stream=True)


# ---- serve.py ------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def server():
    process = Process("--tool_format", "hermes", n_rows=2, length=1024)
    process.anthropic = anthropic.Anthropic(base_url=f"http://127.0.0.1:{process.port}", api_key="none")
    yield process
    assert process.stop() == 0 and not [line for line in process.lines if "Traceback" in line]


GREEDILY = dict(temperature=0)


def test_the_text_is_the_chats(server):
    asked = dict(model=NAME, max_tokens=24, messages=ASK)
    chat = server.client.chat.completions.create(**asked, temperature=0)
    whole = server.anthropic.messages.create(**asked, extra_body=GREEDILY)
    with server.anthropic.messages.stream(**asked, extra_body=GREEDILY) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert chat.choices[0].message.content == whole.content[0].text == final.content[0].text == "".join(pieces)
    assert total(whole.usage) == total(final.usage) == chat.usage.prompt_tokens and whole.usage.output_tokens == chat.usage.completion_tokens
    assert final.usage.cache_read_input_tokens == total(final.usage) - 1 and len(pieces) > 1
    words = whole.content[0].text.split(" ")
    begun = server.anthropic.messages.create(model=NAME, max_tokens=12, messages=[*ASK, dict(role="assistant", content=" ".join(words[:5]))], extra_body=GREEDILY)
    assert " ".join(words[5:9]) in begun.content[0].text


def test_max_tokens_is_cut_to_the_room(server):
    one = server.anthropic.messages.count_tokens(model=NAME, messages=[dict(role="user", content="a")]).input_tokens
    messages = [dict(role="user", content="a" + " a" * (1016 - one))]
    assert server.anthropic.messages.count_tokens(model=NAME, messages=messages).input_tokens == 1016
    got = server.anthropic.messages.create(model=NAME, max_tokens=8000, messages=messages, extra_body=GREEDILY)
    assert (got.stop_reason, got.usage.output_tokens) in [("model_context_window_exceeded", 8)] or got.stop_reason == "end_turn" and got.usage.output_tokens < 8
    got = server.anthropic.messages.create(model=NAME, max_tokens=2, messages=messages, extra_body=GREEDILY)
    assert got.stop_reason == "max_tokens" and got.usage.output_tokens == 2


def test_a_forced_tool_with_a_nested_schema(server):
    place = dict(type="object", required=["city"], additionalProperties=False, properties=dict(city=dict(type="string", enum=["Oslo", "Bern"])))
    weather = dict(name="weather", input_schema=dict(type="object", required=["place", "days"], additionalProperties=False, properties=dict(
        place=dict(place, properties=dict(place["properties"], within=dict(anyOf=[place, dict(type="null")]))), days=dict(type="array", items=dict(enum=[1, 2]), maxItems=3))))
    for choice in (dict(type="any"), dict(type="tool", name="weather", disable_parallel_tool_use=True)):
        with server.anthropic.messages.stream(model=NAME, max_tokens=400, messages=[dict(role="user", content="Weather in Oslo?")], tools=[weather],
                                              tool_choice=choice, extra_body=GREEDILY) as stream:
            final = stream.get_final_message()
        [block] = final.content
        assert final.stop_reason == "tool_use" and block.name == "weather"
        jsonschema.validate(block.input, weather["input_schema"])


def test_a_structured_answer_of_the_client(server):
    class Colour(pydantic.BaseModel):
        name: Literal["red", "green", "blue"]
        is_warm: bool

    class Pair(pydantic.BaseModel):
        first: Colour
        second: Colour

    got = server.anthropic.messages.parse(model=NAME, max_tokens=100, messages=[dict(role="user", content="Name two colours.")],
                                          output_format=Pair, extra_body=GREEDILY)
    assert got.stop_reason == "end_turn" and isinstance(got.parsed_output, Pair)


def test_over_http_a_client_that_leaves_frees_its_slot(server):
    with server.anthropic.messages.stream(model=NAME, max_tokens=900, messages=ASK, extra_body=GREEDILY) as stream:
        next(iter(stream.text_stream))
    server.wait_until((0, 0))
