"""Requests as clients write them: what is right is answered, what has no effect is accepted, all else is refused by name.

Without a process: parse() and RequestPreparer, with a tokenizer of bytes. The server in this process samples what was accepted.
"""

import copy
import itertools
import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from openai.types.chat import ChatCompletionMessage, completion_create_params
from openai.types.completion_create_params import CompletionCreateParamsBase
from test_serve_safety import CHAT, COMPLETIONS, InProcess, byte_tokenizer

from gpt_faster.decoding.grammar import Grammars
from gpt_faster.decoding.scheduler import Event
from gpt_faster.server.answers import ChatAnswer
from gpt_faster.server.fields import FIELDS, OFF, NoEffect, Refused
from gpt_faster.server.names import model_names
from gpt_faster.server.parsing import TOOL_FORMATS, written_call
from gpt_faster.server.prepare import RequestPreparer
from gpt_faster.server.protocol import ApiError, ChatRequest, CompletionRequest, parse
from gpt_faster.text.reasoning import thoughts_of

LENGTH, N_VOCAB = 1000, 260
TEMPLATE = ("{% if documents %}D{{ documents | tojson }}{% endif %}{% if tools %}T{{ tools | tojson }}{% endif %}"
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
            "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}")
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
EFFORT = "{% if not reasoning_effort is defined %}{% set reasoning_effort = 'medium' %}{% endif %}R{{ reasoning_effort }}<think>" + PLAIN
ALWAYS = "<think>" + PLAIN                          # a model that thinks, without a switch


class Preparer(RequestPreparer):
    """The server's, for a session that has no model."""

    fingerprint = "fp_1"

    def __init__(self, template=TEMPLATE, **options):
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = template
        grammars = Grammars(tokenizer, {257}, N_VOCAB)
        defaults = dict(served_name=None, checkpoint_path=None, tool_format=None, system_prompt=None, chat_template_kwargs=None,
                        temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
        super().__init__(SimpleNamespace(
            options=SimpleNamespace(**{**defaults, **options}), tokenizer=tokenizer, length=LENGTH, eos_ids={257}, drafter=None,
            model=SimpleNamespace(cfg=SimpleNamespace(vocab_size=N_VOCAB)), source=SimpleNamespace(path=Path("/m/tiny.gguf")), grammars=lambda: grammars))

    def of(self, kind, fields):
        body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
        request = parse(kind, body, LENGTH)
        self.check_name(request.model)
        return (self.prepare_chat if kind is ChatRequest else self.prepare_completion)(request)

    def chat(self, **fields):
        return self.of(ChatRequest, {"messages": USER, **fields})

    def complete(self, **fields):
        return self.of(CompletionRequest, {"prompt": "a", **fields})

    def prompt(self, **fields):
        """The rendered prompt of a chat."""
        ids = self.chat(**fields).generations[0].prompt_ids
        pieces = [self.tokenizer.piece(i) if i > 255 else None for i in ids]
        return b"".join(piece.encode() if piece else self.token_bytes(i) for i, piece in zip(ids, pieces)).decode()


USER = [dict(role="user", content="Hi")]
TOOL = dict(type="function", function=dict(name="f", description="d", parameters=dict(type="object", properties=dict(x=dict(type="integer")))))
OTHER = dict(type="function", function=dict(name="g"))


@pytest.fixture(scope="module")
def preparer():
    return Preparer()


def what_runs(prepared):
    """All that decides the text."""
    return [(g.prompt_ids, g.params, g.eos_ids, g.stops, g.max_new) for g in prepared.generations]


def refused(param, call, **fields):
    with pytest.raises(ApiError) as e:
        call(**fields)
    assert e.value.status == 400 and e.value.error["param"] == param, e.value.error
    return e.value.error["message"]


# ---- Top-level fields ----------------------------------------------------------------------------

def test_each_of_openais_fields_is_decided_about():
    for kind, theirs in ((ChatRequest, completion_create_params.CompletionCreateParamsBase), (CompletionRequest, CompletionCreateParamsBase)):
        unknown = set(theirs.__annotations__) - set(kind.model_fields) - set(FIELDS)
        assert not unknown
    assert not set(FIELDS) & (set(ChatRequest.model_fields) & set(CompletionRequest.model_fields))
    assert all(rule.reason for rule in FIELDS.values() if isinstance(rule, NoEffect | Refused))


@pytest.mark.parametrize("kind, base", [(ChatRequest, dict(messages=USER, seed=1)), (CompletionRequest, dict(prompt="a", seed=1))])
def test_what_cannot_change_the_text_is_accepted_and_the_rest_is_refused_by_name(preparer, kind, base):
    plain = what_runs(preparer.of(kind, base))
    for name, rule in FIELDS.items():
        if name in kind.model_fields:
            continue
        assert what_runs(preparer.of(kind, {**base, name: None})) == plain
        if isinstance(rule, NoEffect):
            for value in ("x", True, 3, {"a": ["b"]}, [1]):
                assert what_runs(preparer.of(kind, {**base, name: value})) == plain, name
        elif isinstance(rule, Refused):
            for value in (*rule.neutral, *([[], {}] if rule.neutral is OFF else [])):
                assert what_runs(preparer.of(kind, {**base, name: value})) == plain, name
            with pytest.raises(ApiError, match=f"the field '{name}' is not supported: ") as e:
                preparer.of(kind, {**base, name: {"some": "value"}, "presence_penalty": 1})
            assert e.value.error["param"] == name and e.value.error["code"] == "unsupported_parameter"
    for value in (1, 0.5, [1], "x", True):
        with pytest.raises(ApiError, match="mirostat"):
            preparer.of(kind, {**base, "mirostat": value})


def test_other_names_of_what_we_have(preparer):
    def same(theirs, ours, call=preparer.chat):
        assert what_runs(call(seed=1, **theirs)) == what_runs(call(seed=1, **ours)), theirs
    schema = dict(type="object", properties=dict(a=dict(type="integer")), required=["a"])
    form = dict(response_format=dict(type="json_schema", json_schema=dict(name="n", strict=True, schema=schema)))
    for call in (preparer.chat, preparer.complete):
        for name in ("n_predict", "max_new_tokens", "max_output_tokens", "num_predict"):
            same({name: 7}, dict(max_tokens=7), call)
        same(dict(n_predict=-1), dict(max_tokens=-1), call)
        same(dict(n_predict=-2), dict(max_tokens=-1), call)
        same(dict(repeat_penalty=1.2), dict(repetition_penalty=1.2), call)
        same(dict(stop_sequences=["x"]), dict(stop="x"), call)
        for regex in (dict(guided_regex="a+"), dict(structured_outputs=dict(regex="a+", json=None, disable_any_whitespace=True))):
            same(regex, dict(regex="a+"), call)
        for json_schema in (dict(guided_json=schema), dict(guided_json=json.dumps(schema)), dict(json_schema=schema), dict(structured_outputs=dict(json=schema)),
                            dict(response_format=dict(type="json_object", schema=schema)), dict(response_format=dict(type="json_schema", schema=schema))):
            same(json_schema, form, call)
        same(dict(structured_outputs=dict(json_object=True)), dict(response_format=dict(type="json_object")), call)
        same(dict(structured_outputs=True), {}, call)
    assert preparer.chat(random_seed=3).generations[0].params.seed == 3
    assert "contradict" in refused("n_predict", preparer.chat, max_tokens=3, n_predict=4)
    assert preparer.chat(max_tokens=3, n_predict=3).generations[0].max_new == 3
    assert "at least -1" in refused("n_predict", preparer.chat, n_predict=-5)
    for wrong in (5, "{", [1], dict(grammar="root ::= x"), dict(json=5), dict(choice=[]), dict(choice="a"), dict(regex=5)):
        with pytest.raises(ApiError, match="structured_outputs"):
            preparer.chat(structured_outputs=wrong)


def test_a_choice_is_one_of_the_strings_whatever_their_signs(preparer):
    options = ["a.b", "(x|y)", "é ü", "\\d", "[", "\n", '"', "😀"]
    kind, regex = preparer.chat(guided_choice=options).generations[0].params.grammar
    for text in (*options, "aXb", "x", "5"):
        matcher = preparer.session.grammars().library.LLMatcher
        grammar = matcher.grammar_from_regex(regex)
        one = matcher(preparer.session.grammars().tokenizer, grammar)
        ids = preparer.tokenizer.encode(text, bos=False)
        assert (one.try_consume_tokens(ids) == len(ids) and one.is_accepting()) == (text in options), text


def test_an_unknown_field_is_accepted_and_reported_but_not_a_misspelt_one(preparer, capsys):
    base = what_runs(preparer.chat(seed=1))
    prepared = preparer.chat(seed=1, brand_new=[{"a": 1}], x=3)
    assert what_runs(prepared) == base and prepared.headers == {"x-ignored-fields": "brand_new, x"}
    preparer.chat(brand_new=1)
    assert capsys.readouterr().err.count("brand_new") == 1
    odd = preparer.chat(**{"é\r\nset-cookie: a": 1, "z" * 500: 2}).headers["x-ignored-fields"]
    assert odd.isascii() and "\n" not in odd and len(odd) < 100
    for typo, name in dict(temperatur="temperature", max_token="max_tokens", topP="top_p", top_ks="top_k", maxTokens="max_tokens", tool="tools",
                           respone_format="response_format", stops="stop", seeds="seed", minp="min_p", logitbias="logit_bias",
                           repetition_penality="repetition_penalty", reasoning_efort="reasoning_effort", guided_jsn="guided_json").items():
        assert refused(typo, preparer.chat, **{typo: 1}) == f"the field '{typo}' is unknown: did you mean '{name}'?"
    for name in ("model_name", "users", "trace_id", "conversation_id", "chat_id", "features", "params", "tool_ids", "files", "timeout", "type", "id", "title", "context", "thread", "tags", "mode"):
        preparer.chat(**{name: "x"})


def test_a_field_of_the_other_route_is_refused_unless_it_asks_for_nothing(preparer):
    for call, fields in ((preparer.chat, dict(prompt="a")), (preparer.complete, dict(tools=[TOOL])), (preparer.complete, dict(messages=USER)),
                         (preparer.complete, dict(reasoning_effort="low")), (preparer.chat, dict(echo=True)), (preparer.chat, dict(best_of=2))):
        [name] = fields
        assert "not supported" in refused(name, call, **fields)
    for name in ("extra_body", "options", "parameters"):
        assert "into the request itself" in refused(name, preparer.chat, **{name: dict(temperature=0)})
    preparer.complete(tools=[], logprobs=False, parallel_tool_calls=False)
    preparer.chat(echo=False, best_of=1, suffix="", logprobs=False, top_logprobs=0)


def test_the_window_of_a_penalty_matters_only_with_a_penalty(preparer):
    preparer.chat(repeat_last_n=64, repeat_penalty=1.0, presence_penalty=0)
    preparer.chat(repeat_last_n=-1, repeat_penalty=1.1)
    assert "penalties count the whole text" in refused("repeat_last_n", preparer.chat, repeat_last_n=64, repeat_penalty=1.1)


# ---- Nulls and extra keys, everywhere --------------------------------------------------------------

FULL = dict(
    model="tiny.gguf", stream=True, stream_options=dict(include_usage=True), n=2, stop=["x"], max_tokens=5, temperature=1, top_p=0.9, top_k=5, min_p=0.1,
    repetition_penalty=1.1, frequency_penalty=0.1, presence_penalty=0.1, logit_bias={"5": 1}, seed=3, logprobs=True, top_logprobs=2, stop_token_ids=[7],
    tools=[TOOL, OTHER], tool_choice="auto", parallel_tool_calls=False, reasoning_effort="low", documents=[dict(title="t")],
    chat_template_kwargs=dict(a=1), messages=[
        dict(role="system", content="S"),
        dict(role="user", content=[dict(type="text", text="Weather?"), dict(type="text", text=" Now?")], name="bo"),
        dict(role="assistant", content="", reasoning_content="Hm", tool_calls=[dict(id="c", type="function", function=dict(name="f", arguments='{"x": 1}'))]),
        dict(role="tool", tool_call_id="c", content=[dict(type="text", text="sunny")]),
        dict(role="user", content="So?")])
FREE = {"parameters", "chat_template_kwargs", "documents", "logit_bias", "schema"}      # the client's own content


def models(value, path=()):
    """The objects of a request that have a schema: their paths."""
    if isinstance(value, dict):
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        if key not in FREE:
            yield from models(inner, (*path, key))


def at(value, path):
    for key in path:
        value = value[key]
    return value


FIELD_NAMES = {name for kind in ChatRequest.__subclasses__() + [ChatRequest] for name in kind.model_fields}
INNER = {"name", "refusal", "annotations", "audio", "function_call", "tool_calls", "reasoning", "thinking", "reasoning_content", "index", "strict", "cache_control",
         "description", "parameters", "tool_call_id", "prefix", "include_usage", "include_obfuscation"}


def test_a_null_is_an_absent_field_everywhere(preparer):
    expected = what_runs(preparer.of(ChatRequest, FULL))
    request = copy.deepcopy(FULL)
    for path in list(models(request)):
        part = at(request, path)
        part.update({name: None for name in (INNER if path else FIELD_NAMES | set(FIELDS)) if name not in part})
    assert what_runs(preparer.of(ChatRequest, request)) == expected
    assert "is missing" in refused("messages", preparer.of, kind=ChatRequest, fields=dict(messages=None))
    assert what_runs(preparer.chat(messages=[dict(role="user", content=None)])) == what_runs(preparer.chat(messages=[dict(role="user")]))


def test_extra_keys_in_messages_and_tools_are_ignored(preparer):
    expected = what_runs(preparer.of(ChatRequest, FULL))
    for path in list(models(FULL)):
        if not path:
            continue
        for name, value in itertools.product(("extra_content", "cache_control", "x"), ({}, {"type": "ephemeral"}, 3, ["a"], "s")):
            request = copy.deepcopy(FULL)
            at(request, path)[name] = value
            assert what_runs(preparer.of(ChatRequest, request)) == expected, (path, name)


def test_a_history_of_openais_own_objects(preparer):
    call = dict(id="c1", type="function", function=dict(name="f", arguments='{"x": 2}'))
    for message in (dict(content="hello"), dict(content=None, tool_calls=[call]), dict(content="", tool_calls=[]), dict(content="hello", refusal="", annotations=[])):
        dumped = ChatCompletionMessage(role="assistant", **message).model_dump()
        short = {k: v for k, v in dict(message, role="assistant").items() if k in ("role", "content", "tool_calls") and v}
        assert preparer.prompt(messages=[*USER, dumped, *USER]) == preparer.prompt(messages=[*USER, short, *USER])


MESSAGES = {                                       # an assistant's message, and what the template gets of it
    "no id": (dict(tool_calls=[dict(function=dict(name="f", arguments="{}"))]), '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
    "an object": (dict(content=None, tool_calls=[dict(id="1", function=dict(name="f", arguments=dict(x=1)))]), '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'),
    "no arguments": (dict(tool_calls=[dict(id="1", function=dict(name="f", arguments=""))]), '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
    "legacy": (dict(content=None, function_call=dict(name="f", arguments="{}")), '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
    "parts": (dict(content=[dict(type="text", text="a"), dict(type="output_text", text="b", annotations=[]), "c"]), "abc"),
    "no parts": (dict(content=[]), ""),
    "a refusal": (dict(content=None, refusal="No."), "No."),
    "a refusal's part": (dict(content=[dict(type="refusal", refusal="No.")]), "No."),
    "thoughts": (dict(content="b", reasoning="a"), "<think>a</think>b"),
    "thoughts as a part": (dict(content=[dict(type="thinking", thinking=[dict(type="text", text="a")]), dict(type="text", text="b")]), "<think>a</think>b"),
    "thoughts as text": (dict(content=[dict(type="thinking", thinking="a", signature="s"), dict(type="text", text="b")]), "<think>a</think>b"),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_an_assistants_message(preparer, name):
    message, text = MESSAGES[name]
    prompt = preparer.prompt(messages=[*USER, dict(role="assistant", **message), *USER])
    assert prompt.split("<|im_start|>")[2] == f"assistant\n{text}<|im_end|>\n"


def test_roles(preparer):
    assert "<|im_start|>system\nBe brief." in preparer.prompt(messages=[dict(role="developer", content="Be brief."), *USER])
    assert "<|im_start|>tool\n5<|im_end|>" in preparer.prompt(messages=[*USER, dict(role="function", name="f", content="5")])
    assert "must be" in refused("messages.0.role", preparer.chat, messages=[dict(role="robot", content="x")])


# ---- Errors name the part --------------------------------------------------------------------------

def with_value(path, value):
    request = copy.deepcopy(FULL)
    at(request, path[:-1])[path[-1]] = value
    return request


PART = ("messages", 1, "content", 1)
WRONG = [
    ((*PART, "type"), "image_url", "'image_url' parts are not supported: this server reads text only"), ((*PART, "type"), "input_audio", "reads text only"),
    ((*PART, "type"), "file", "reads text only"), ((*PART, "type"), 5, "reads text only"), ((*PART, "text"), 5, "expected a string, got 5"), (PART, 5, "expected an object, got 5"),
    (PART[:-1], 5, "expected a string or a list of parts, got 5"), (PART[:-1], {"a": 1}, "got an object"), (("messages", 1), "x", "expected an object, got 'x'"),
    (("messages",), [], "needs at least 1"), (("messages",), "x", "expected a list"), (("messages", 2, "audio"), {"id": "a"}, "reads text only"),
    (("messages", 2, "tool_calls", 0, "function", "arguments"), 5, "expected JSON text or an object"), (("messages", 2, "tool_calls", 0, "function", "name"), 5, "a string"),
    (("messages", 2, "tool_calls", 0, "type"), "custom", "must be 'function', got 'custom'"), (("messages", 2, "tool_calls"), 5, "expected a list"),
    (("tools", 0, "type"), "web_search", "must be 'function'"), (("tools", 1, "function", "name"), "a b", "1 to 128 letters"), (("tools", 0, "function", "parameters"), [], "expected an object"),
    (("tools", 0, "function"), None, "is missing"), (("stop",), 5, "a list"), (("stop", 0), 5, "expected a string"), (("logit_bias", "5"), "x", "expected a number"),
    (("temperature",), "1", "expected a number, got '1'"), (("top_k",), True, "expected an integer, got true"), (("seed",), [1], "got a list"), (("stream",), 1, "expected true or false, got 1"), (("stream_options", "include_usage"), "yes", "true or false"),
    (("stop_token_ids", 0), -1, "at least 0"), (("documents", 0), 5, "expected an object"), (("chat_template_kwargs",), [1], "expected an object"), (("reasoning_effort",), "huge", "must be 'none'"),
    (("response_format",), {"type": "xml"}, "must be 'text', 'json_object' or 'json_schema'"), (("tool_choice",), "maybe", "must be 'none', 'auto', 'required'")]


@pytest.mark.parametrize("path, value, match", WRONG)
def test_an_error_names_the_part(preparer, path, value, match):
    message = refused(".".join(map(str, path)) + (".type" if path == ("response_format",) else ""), preparer.of, kind=ChatRequest, fields=with_value(path, value))
    assert match in message and "Input should" not in message and "\n" not in message


def test_bodies(preparer):
    def error(body):
        with pytest.raises(ApiError) as e:
            preparer.of(ChatRequest, body)
        assert e.value.status == 400
        return e.value.error["message"]
    assert "empty" in error(b"") and "empty" in error(b"  \n") and "object" in error(b"[]") and "object" in error(b"5") and "object" in error(b"null")
    assert "occurs twice" in error(b'{"messages": [], "seed": 1, "seed": 2}') and "occurs twice" in error(b'{"messages": [{"role": "user", "role": "user"}]}')
    for body in (b"{", b"\xff\xfe{}", b'{"seed": 1e}', b'{"messages": [}', b"\x00", b'{"a": "\x00"}', "﻿﻿{}".encode(), b'{"seed": 1' + b"0" * 5000 + b"}"):
        assert "not valid JSON" in error(body)


# ---- Tools -----------------------------------------------------------------------------------------

def tools_of(prepared):
    return list(prepared.parsers[0].tools)


def test_allowed_tools_in_both_spellings_and_others_of_tool_choice(preparer):
    def choose(choice):
        prepared = preparer.chat(tools=[TOOL, OTHER], tool_choice=choice)
        return tools_of(prepared), prepared.generations[0].params.grammar is not None
    named = dict(type="function", function=dict(name="f"))
    for mode, forced in (("auto", False), ("required", True)):
        for choice in (dict(type="allowed_tools", allowed_tools=dict(mode=mode, tools=[named])), dict(type="allowed_tools", mode=mode, tools=[dict(type="function", name="f")])):
            assert choose(choice) == (["f"], forced)
    assert choose(named) == choose(dict(type="function", name="f")) == (["f"], True)
    for choice, expected in (("auto", (["f", "g"], False)), ("none", ([], False)), ("required", (["f", "g"], True)), ("any", (["f", "g"], True)),
                             (dict(type="auto"), (["f", "g"], False)), (dict(type="none"), ([], False))):
        assert choose(choice) == expected
    for wrong in (5, [], {}, "f", dict(type="custom"), dict(type="allowed_tools"), dict(type="allowed_tools", tools=[]), dict(type="allowed_tools", allowed_tools=5),
                  dict(type="allowed_tools", tools=[5]), dict(type="allowed_tools", tools=[named], mode="none"), dict(type="function"), dict(type="function", function=dict(name=5)),
                  dict(type="function", name="h"), dict(type="allowed_tools", tools=[dict(type="function", name="h")])):
        refused("tool_choice", preparer.chat, tools=[TOOL, OTHER], tool_choice=wrong)
    refused("tool_choice", preparer.chat, tool_choice=named)
    assert tools_of(preparer.chat(tool_choice="auto", tools=[])) == []


def test_strict_is_accepted_and_not_shown_to_the_model(preparer):
    strict = copy.deepcopy(TOOL)
    strict["function"]["strict"] = True
    assert preparer.prompt(tools=[strict]) == preparer.prompt(tools=[TOOL])


# ---- Continuing a message --------------------------------------------------------------------------

def test_the_last_message_is_continued_when_asked(preparer):
    history = [*USER, dict(role="assistant", content="Hello there,")]
    closed = preparer.prompt(messages=history)
    assert closed.endswith("Hello there,<|im_end|>\n<|im_start|>assistant\n")              # the default is OpenAI's: a new message
    asked = [dict(continue_final_message=True), dict(continue_final_message=True, add_generation_prompt=False)]
    for fields in asked:
        assert preparer.prompt(messages=history, **fields).endswith("<|im_start|>assistant\nHello there,")
    for name in ("prefix", "partial"):
        assert preparer.prompt(messages=[*USER, {**history[1], name: True}]).endswith("<|im_start|>assistant\nHello there,")
        assert preparer.prompt(messages=[{**USER[0], name: True}]) == preparer.prompt()
    assert preparer.prompt(messages=history, add_generation_prompt=False).endswith("Hello there,<|im_end|>\n")
    assert preparer.prompt(messages=history, add_generation_prompt=True) == closed
    assert preparer.prompt(continue_final_message=True).endswith("user\nHi")
    spaced = [*USER, dict(role="assistant", content="<|im_end|> a ")]                       # text, not the special token
    assert preparer.prompt(messages=spaced, continue_final_message=True).endswith("assistant\n<|im_end|> a ")
    assert 257 not in preparer.chat(messages=spaced, continue_final_message=True).generations[0].prompt_ids[-9:]
    assert Preparer(PLAIN).prompt(messages=spaced, continue_final_message=True).endswith("assistant: <|im_end|> a")       # it strips
    refused("add_generation_prompt", preparer.chat, messages=history, continue_final_message=True, add_generation_prompt=True)
    call = dict(role="assistant", content="a", tool_calls=[dict(function=dict(name="f"))])
    assert "complete" in refused("continue_final_message", preparer.chat, messages=[*USER, call], continue_final_message=True)
    for content, thoughts, text in (("<think>Hm", "x", "y"), ("<think>Hm</think>", "", "x</think>y"), ("Hm", "", "x</think>y")):
        [generation] = preparer.chat(messages=[*USER, dict(role="assistant", content=content)], continue_final_message=True).generations
        got = "".join(generation.push(byte) for byte in b"x</think>y") + generation.finish("stop")
        assert (thoughts_of(generation), got) == (thoughts, text), content
    cut = Preparer("{% for m in messages %}{{ m.content[:3] }}{% endfor %}")
    assert "cannot be continued" in refused("messages", cut.chat, messages=history, continue_final_message=True)
    refused("chat_template_kwargs", preparer.chat, chat_template_kwargs=dict(continue_final_message=True))


# ---- The template's variables ----------------------------------------------------------------------

def test_reasoning_effort_reaches_the_template_that_has_it():
    switch, effort, always, plain = (Preparer(t) for t in (TEMPLATE, EFFORT, ALWAYS, PLAIN))
    off, on = switch.prompt(reasoning_effort="none"), switch.prompt()
    assert off.endswith("<think></think>") and not on.endswith("<think></think>")
    for fields in (dict(enable_thinking=False), dict(thinking=dict(type="disabled")), dict(thinking=False), dict(think=False), dict(reasoning=dict(enabled=False)), dict(reasoning=dict(effort="none")),
                   dict(chat_template_kwargs=dict(enable_thinking=False)), dict(reasoning_effort="high", chat_template_kwargs=dict(enable_thinking=False))):
        assert switch.prompt(**fields) == off, fields
    for fields in (dict(reasoning_effort="high"), dict(reasoning_effort="minimal"), dict(think=True), dict(think="low"), dict(enable_thinking=True), dict(thinking=dict(type="enabled"))):
        assert switch.prompt(**fields) == on, fields
    assert [effort.prompt(reasoning_effort=e)[:5] for e in ("low", "medium", "high", "minimal", "xhigh", "max")] == ["Rlow<", "Rmedi", "Rhigh", "Rlow<", "Rhigh", "Rhigh"]
    assert effort.prompt()[:5] == "Rmedi" and Preparer(EFFORT + "{# 'max' #}").prompt(reasoning_effort="max")[:5] == "Rmax<"
    for preparer in (effort, always):
        assert "cannot be switched off" in refused("reasoning_effort", preparer.chat, reasoning_effort="none")
        assert "cannot be switched off" in refused("enable_thinking", preparer.chat, enable_thinking=False)
    for e in ("none", "low", "high"):
        assert plain.prompt(reasoning_effort=e) == plain.prompt()           # this model has no thoughts
    assert always.prompt(reasoning_effort="high") == always.prompt()
    for wrong in (5, "x", dict(type="x"), [], dict(type="enabled", budget_tokens=5)):
        refused("thinking", switch.chat, thinking=wrong)
    refused("reasoning", switch.chat, reasoning=dict(max_tokens=5))


def test_documents_reach_the_template_that_reads_them(preparer):
    assert preparer.prompt(documents=[dict(title="t")]).startswith('D[{"title": "t"}]') and preparer.prompt(documents=[]) == preparer.prompt()
    assert "does not read any" in refused("documents", Preparer(PLAIN).chat, documents=[dict(title="t")])


def test_thoughts_may_be_left_out_and_usage_be_in_each_chunk(preparer):
    for shows in (True, False):
        body = json.dumps(dict(messages=USER, stream=True, include_reasoning=shows, stream_options=dict(include_usage=True, continuous_usage_stats=True, include_obfuscation=False)))
        request = parse(ChatRequest, body.encode(), LENGTH)
        prepared = preparer.prepare_chat(request)
        generation = prepared.generations[0]
        generation.user_data, generation.n_reused = SimpleNamespace(index=0), 0
        events = ChatAnswer(preparer, request, prepared).add(Event(generation, text="b", thoughts="a"))
        assert [list(e["choices"][0]["delta"]) for e in events] == ([["reasoning_content", "reasoning"], ["content"]] if shows else [["content"]])
        assert all(e["usage"]["prompt_tokens"] == len(generation.prompt_ids) for e in events)


# ---- max_tokens ------------------------------------------------------------------------------------

def test_max_tokens_is_cut_to_the_room(preparer):
    room = LENGTH - len(preparer.chat().generations[0].prompt_ids)
    for fields, n_new, header in (({}, room, None), (dict(max_tokens=None), room, None), (dict(max_tokens=-1), room, None), (dict(max_completion_tokens=-1), room, None),
                                  (dict(max_tokens=5), 5, None), (dict(max_completion_tokens=5), 5, None), (dict(max_tokens=5, max_completion_tokens=5), 5, None),
                                  (dict(max_tokens=5, max_completion_tokens=9), 5, None), (dict(max_tokens=-1, max_completion_tokens=9), 9, None), (dict(max_tokens=room), room, None),
                                  (dict(max_tokens=room + 1), room, str(room)), (dict(max_tokens=4096), room, str(room)), (dict(max_tokens=(1 << 63) - 1), room, str(room))):
        prepared = preparer.chat(**fields)
        assert prepared.generations[0].max_new == n_new and prepared.headers.get("x-max-tokens") == header, fields
    two = preparer.complete(prompt=["a", "bcd"], max_tokens=5000)
    assert [g.max_new for g in two.generations] == [LENGTH - 1, LENGTH - 3] and two.headers == {"x-max-tokens": str(LENGTH - 3)}
    assert preparer.complete().generations[0].max_new == 16 and preparer.complete(max_tokens=-1).generations[0].max_new == LENGTH - 1
    for fields in (dict(max_tokens=0), dict(max_completion_tokens=0), dict(max_tokens=5, max_completion_tokens=0)):
        refused("max_tokens", preparer.chat, **fields)
    refused("max_tokens", preparer.complete, max_tokens=0)
    assert not preparer.complete(max_tokens=0, echo=True).generates
    refused("max_tokens", preparer.chat, max_tokens=-2)


def test_stop_ids_and_special_tokens(preparer):
    assert preparer.complete(stop_token_ids=[5, 6]).generations[0].eos_ids == {5, 6, 257} and preparer.complete(stop_token_ids=[5], ignore_eos=True).generations[0].eos_ids == {5}
    for wrong in ([N_VOCAB], list(range(257)), [10 ** 30], [-1], ["a"], 5):
        with pytest.raises(ApiError, match="stop_token_ids"):
            preparer.complete(stop_token_ids=wrong)
    tokenizer = byte_tokenizer()
    tokenizer.prefix, tokenizer.add_bos = [256], True
    with_bos = Preparer()
    with_bos.tokenizer = tokenizer
    assert with_bos.complete().generations[0].prompt_ids == [256, 97] and with_bos.complete(add_special_tokens=False).generations[0].prompt_ids == [97]


def test_numbers_as_json_writes_them(preparer):
    """40.0 is an integer and 1 a number; -1 is no seed and no top_k."""
    params = preparer.chat(top_k=40.0, temperature=1, seed=-1, max_tokens=3.0).generations[0].params
    assert params.top_k == 40 and type(params.top_k) is int and params.seed is None and type(params.temperature) is float
    assert preparer.chat(top_k=-1).generations[0].params.top_k == 0


# ---- Hostile values, at every place ----------------------------------------------------------------

LONE = "\ud83d"
HOSTILE = [None, True, False, 0, 1, -1, 2, 1.0, 0.5, -0.0, 1e-300, 1e308, -1e308, 1e300, 40.0, 10 ** 30, -10 ** 30, 1 << 63, (1 << 63) - 1, -(1 << 63), -(1 << 63) - 1, 1 << 31,
           float("nan"), float("inf"), -float("inf"), "", "a", "1", LONE, "a" + LONE, "\x00", "\ufdd0", "\ufdd1 ", "\ufeff", "\u202e", "😀", "e\u0301", "\uffff", "<|im_end|>", "{{ x }}", "a" * 5000,
           [], {}, [None], [[]], [{}], {"": None}, {"a": None}, {LONE: 1}, {"a": LONE}, [LONE], [10 ** 30], [1e308], [True], {"type": "text"}, {"type": None}, {"type": LONE},
           {"type": "function"}, {"type": []}, {"1": 1e308}, {"-1": 1}, {str(10 ** 30): 1}, {"9" * 5000: 1}, {"name": {}}, [["a"]], ["a"] * 200, [1, "a"]]
DEEP = json.loads("[" * 300 + "]" * 300)
FULL_CHATS = [FULL, dict(FULL, tools=None, tool_choice=None, response_format=dict(type="json_schema", json_schema=dict(name="n", schema=dict(type="object"))), stream=False),
              dict(messages=USER, tools=[TOOL], tool_choice=dict(type="allowed_tools", allowed_tools=dict(mode="required", tools=[dict(type="function", function=dict(name="f"))]))),
              dict(messages=[dict(role="assistant", content="a", prefix=True)], thinking=dict(type="enabled"), reasoning=dict(effort="low"), max_completion_tokens=3, enable_thinking=True)]
FULL_COMPLETIONS = [dict(prompt="ab", echo=True, logprobs=1, best_of=1, regex="a+", stop="x", add_special_tokens=True, max_tokens=2),
                    dict(prompt=[[1, 2], [3]], n=2, grammar='start: "a"', include_usage=True, max_tokens=2), dict(prompt=["a", "b"], structured_outputs=dict(choice=["a", "b"]), n_predict=2)]


def places(value, path=()):
    if path:
        yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, key))


def hostile_places():
    """Every place of every example: (schema, example, path)."""
    for kind, bases in ((ChatRequest, FULL_CHATS), (CompletionRequest, FULL_COMPLETIONS)):
        every_field = {**dict.fromkeys([*kind.model_fields, *FIELDS, "unknown_one"]), **bases[0]}
        for base in (*bases, every_field):
            yield from ((kind, base, path) for path in places(base))


def hostile_requests(places, values, keys):
    for kind, base, path in places:
        for value in values:
            request = copy.deepcopy(base)
            at(request, path[:-1])[path[-1]] = value
            yield kind, path, value, request
        for key in keys if isinstance(at(base, path), dict) else ():
            request = copy.deepcopy(base)
            at(request, path)[key] = 1
            yield kind, path, key, request


PLACES = list(hostile_places())
KEYS = [LONE, "", "a" * 300, "\x00", "é"]


def some_hostile_requests(seed, n):
    g = random.Random(seed)
    for _ in range(n):
        yield next(hostile_requests([g.choice(PLACES)], [g.choice([*HOSTILE, DEEP])], KEYS))
        yield from itertools.islice(hostile_requests([g.choice(PLACES)], [], g.sample(KEYS, 1)), 1)


def every_place():
    """With a third of the values each."""
    for i, place in enumerate(PLACES):
        yield from hostile_requests([place], [*HOSTILE, DEEP][i % 3::3], KEYS)


@pytest.mark.parametrize("seed", [*range(2), pytest.param("all", marks=pytest.mark.slow)])
def test_a_hostile_value_anywhere_is_accepted_or_refused_by_name(preparer, seed):
    n_refused = n = 0
    for kind, path, value, request in every_place() if seed == "all" else some_hostile_requests(seed, 500):
        n += 1
        try:
            prepared = preparer.of(kind, request)
        except ApiError as e:
            n_refused += 1
            assert e.status in (400, 404), (path, value, e.error)
            text = json.dumps(e.error, ensure_ascii=False).encode().decode()               # it can be sent
            assert e.error["message"] and len(text) < 1500 and "Input should" not in text and "pydantic" not in text, (path, text)
        else:
            assert all(v.isascii() and v.isprintable() for v in prepared.headers.values())
            for generation in prepared.generations:
                assert generation.params and 1 <= generation.max_new <= LENGTH and 0 <= min(generation.prompt_ids) <= max(generation.prompt_ids) < N_VOCAB
    assert 0.3 < n_refused / n < 0.95


def test_a_forced_tool_has_no_format_and_a_free_choice_is_between_both(preparer):
    form = dict(type="json_schema", json_schema=dict(name="n", schema=dict(type="object")))
    grammars = {}
    for choice in ("required", dict(type="function", function=dict(name="f")), "auto", None, "none"):
        asked = dict(tools=[TOOL, OTHER], response_format=form, **(dict(tool_choice=choice) if choice else {}))
        grammars[str(choice)] = preparer.chat(**asked).generations[0].params.grammar
    forced = preparer.chat(tools=[TOOL, OTHER], tool_choice="required").generations[0].params.grammar
    assert grammars["required"] == forced and grammars["none"] == preparer.chat(response_format=form).generations[0].params.grammar
    assert grammars["auto"] == grammars["None"] and grammars["auto"][1].startswith("start: call | answer")
    xml = Preparer("{{ tools }}<|tool_call>" + PLAIN)
    with pytest.raises(ApiError, match="^response_format beside tools: a call cannot be forced in the tool format gemma4"):
        xml.chat(tools=[TOOL], response_format=form)


@pytest.mark.parametrize("name", ["hermes", "llama", "qwen_xml", "mistral_args"])
def test_a_template_without_tools_still_shows_earlier_calls(name):
    preparer = Preparer(PLAIN, tool_format=name)
    call = dict(id="c", type="function", function=dict(name="f", arguments='{"x": 3}'))
    history = [*USER, dict(role="assistant", content="I look.", tool_calls=[call]), dict(role="tool", tool_call_id="c", content="9")]
    text = preparer.prompt(messages=history, tools=[TOOL])
    written = written_call(dict(name="f", arguments=dict(x=3)), TOOL_FORMATS[name])
    assert f"assistant: I look.\n{written.strip()}<|im_end|>" in text and "tool: 9" in text
    assert "<tool_call>" not in Preparer(PLAIN).prompt(messages=history)


@pytest.fixture(scope="module")
def server():
    server = InProcess("--max_queue", "2000")
    yield server
    server.stop()


@pytest.mark.parametrize("seed", [1, 2])
def test_what_is_accepted_can_be_sampled(server, seed):
    requests = []
    for kind, _, _, request in some_hostile_requests(seed, 90):
        if kind is ChatRequest:
            request = {**request, "messages": USER, "tools": None, "tool_choice": None, "documents": None, "reasoning_effort": None}
        request = {**request, "model": None, "n": None, "best_of": None, **dict.fromkeys(("n_predict", "max_completion_tokens")), "max_tokens": 2}
        requests.append((CHAT if kind is ChatRequest else COMPLETIONS, request))
    responses = server.ask(*requests)
    codes = [r.status_code for r in responses]
    assert set(codes) <= {200, 400} and codes.count(200) > 10, [r.text for r in responses if r.status_code not in (200, 400)][:3]


def test_the_response_says_what_was_not_done(server):
    for stream in (False, True):
        [response] = server.ask((CHAT, dict(messages=USER, max_tokens=4096, brand_new=1, stream=stream, temperature=0)))
        assert response.status_code == 200 and response.headers["x-ignored-fields"] == "brand_new" and 0 < int(response.headers["x-max-tokens"]) < 96
    [response] = server.ask((CHAT, dict(messages=USER, max_tokens=2)))
    assert "x-max-tokens" not in response.headers and "x-ignored-fields" not in response.headers


# ---- The model's names -----------------------------------------------------------------------------

def test_the_models_names(tmp_path):
    def made(name, *parts):
        path = tmp_path.joinpath(*parts, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        return path
    weights = made("model.safetensors", "Qwen3-4B")
    for path in (weights, made("model.safetensors.index.json", "Qwen3-4B"), made("pytorch_model.bin", "Qwen3-4B"), made("consolidated.00.pth", "Qwen3-4B"), weights.parent):
        names = model_names(path, str(path.parent))
        assert names[0] == "Qwen3-4B" and str(path.parent) in names
    cached = made("model.safetensors", "hub", "models--Qwen--Qwen3-4B", "snapshots", "0123abc")
    for asked in ("Qwen/Qwen3-4B", str(cached.parent)):
        names = model_names(cached, asked)
        assert names[0] == "Qwen/Qwen3-4B" and "Qwen3-4B" in names
    assert model_names(made("model.pth", "checkpoints", "org", "name"))[0] == "org/name"
    gguf = made("SmolLM2.Q4_1.gguf", "SmolLM2")
    names = model_names(gguf, str(gguf))
    assert names[0] == "SmolLM2.Q4_1.gguf" and {"SmolLM2.Q4_1", "SmolLM2", str(gguf)} <= set(names)
    assert model_names(made("weird.safetensors", "Dir"))[0] == "weird.safetensors" and "" not in names
    assert set(model_names(gguf, str(gguf), "org/prod")) == {"org/prod", "prod"}
    preparer = Preparer(served_name="org/prod")
    for name in ("org/prod", "prod", "", None):
        preparer.check_name(name)
    for name in ("tiny.gguf", "gpt-4", "/m/tiny.gguf", "a" * 500):
        with pytest.raises(ApiError, match="does not exist") as e:
            preparer.check_name(name)
        assert e.value.status == 404 and len(e.value.error["message"]) < 200
