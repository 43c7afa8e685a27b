"""The formats in which models write tool calls: each parsed in pieces, cut off, detected and forced."""

import json
import random

import jsonschema
import pytest
from test_serve_schema import Walker

from gpt_faster.decoding.grammar import json_schema
from gpt_faster.server.parsing import (
    TOOL_FORMATS,
    AnswerParser,
    call_or_json,
    detect_tool_format,
    tool_call_grammar,
    tool_instructions,
    written_call,
)

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["c", "f"]}, "deep": {"anyOf": [{"$ref": "#/$defs/L"}, {"type": "null"}]},
                                               "id": {"type": ["string", "null"]}},
              "required": ["city", "days"], "additionalProperties": False, "$defs": {"L": {"type": "array", "items": {"type": "number"}}}}
TOOLS = [dict(type="function", function=dict(name=name, parameters=parameters)) for name, parameters in
         (("weather", PARAMETERS), ("weather_at", {"type": "object", "properties": {"a": {"type": "boolean"}}, "additionalProperties": False}), ("ping", {"type": "object", "properties": {}}))]
ONE, TWO = ("weather", {"city": "Zürich <b> {x}", "days": 3}), ("weather_at", {"a": True})
J = json.dumps(ONE[1], ensure_ascii=False)
CALLS = [                                              # as the families' chat templates write them
    ("seed", "<seed:tool_call>\n<function=weather>\n<parameter=city>Zürich <b> {x}</parameter>\n<parameter=days>3</parameter>\n</function>\n</seed:tool_call>", [ONE]),
    ("qwen_xml", "<tool_call>\n<function=weather>\n<parameter=city>\nZürich <b> {x}\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n"
                 "<tool_call>\n<function=weather_at>\n<parameter=a>\ntrue\n</parameter>\n</function>\n</tool_call>", [ONE, TWO]),
    ("minimax", '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Zürich <b> {x}</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n'
                '<invoke name="weather_at">\n<parameter name="a">true</parameter>\n</invoke>\n</minimax:tool_call>', [ONE, TWO]),
    ("deepseek_dsml", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Zürich <b> {x}</｜DSML｜parameter>\n'
                      '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>', [ONE]),
    ("deepseek_v3", f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{J}\n```<｜tool▁call▁end｜>\n"
                    '<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather_at\n```json\n{"a": true}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>', [ONE, TWO]),
    ("deepseek", f'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{J}<｜tool▁call▁end｜><｜tool▁call▁begin｜>weather_at<｜tool▁sep｜>{{"a": true}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>', [ONE, TWO]),
    ("kimi", f"<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{J}<|tool_call_end|>"
             '<|tool_call_begin|>functions.weather_at:1<|tool_call_argument_begin|>{"a": true}<|tool_call_end|><|tool_calls_section_end|>', [ONE, TWO]),
    ("glm", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Zürich <b> {x}</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>ping\n</tool_call>", [ONE, ("ping", {})]),
    ("mistral", f'[TOOL_CALLS] [{{"name": "weather", "arguments": {J}, "id": "abcdefghi"}}, {{"name": "weather_at", "arguments": {{"a": true}}, "id": "123456789"}}]', [ONE, TWO]),
    ("mistral_args", f'[TOOL_CALLS]weather[ARGS]{J}[TOOL_CALLS]weather_at[CALL_ID]abcdefghi[ARGS]{{"a": true}}', [ONE, TWO]),
    ("command", f'<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "weather", "parameters": {J}}},\n    {{"tool_call_id": "1", "tool_name": "weather_at", "parameters": {{"a": true}}}}\n]<|END_ACTION|>', [ONE, TWO]),
    ("phi", f'<|tool_call|>{{"name": "weather", "arguments": {J}}}<|/tool_call|>', [ONE]), ("granite", f'<|tool_call|>[{{"name": "weather", "arguments": {J}}}]', [ONE]),
    ("lfm", '<|tool_call_start|>[weather(city="Zürich <b> {x}", days=3), weather_at(a=true)]<|tool_call_end|>', [ONE, TWO]),
    ("lfm", f'<|tool_call_start|>[{{"name": "weather", "arguments": {J}, "id": "1"}}]<|tool_call_end|>', [ONE]),
    ("apertus", f'<|tools_prefix|>[{{"weather": {J}}}, {{"weather_at": {{"a": true}}}}]<|tools_suffix|>', [ONE, TWO]),
    ("nemotron", f'<TOOLCALL>[{{"name": "weather", "arguments": {J}}}]</TOOLCALL>', [ONE]),
    ("olmo", '<function_calls>\nweather(city="Zürich <b> {x}", days=3)\nweather_at(a=True)\n</function_calls>', [ONE, TWO]),
    ("gemma4", '<|tool_call>call:weather{city:<|"|>Zürich <b> {x}<|"|>,days:3}<tool_call|><|tool_call>call:weather_at{a:true}<tool_call|>', [ONE, TWO]),
    ("gemma4", '<|tool_call>call:weather{city:<|"|>a,b:c "q"<|"|>,days:3,deep:[1,2.5],id:null}<tool_call|>', [("weather", {"city": 'a,b:c "q"', "days": 3, "deep": [1, 2.5], "id": None})]),
    ("function_gemma", "<start_function_call>call:weather{city:<escape>Zürich <b> {x}<escape>,days:3}<end_function_call>", [ONE]),
    ("pythonic", '[weather(city="Zürich <b> {x}", days=3), weather_at(a=True)]', [ONE, TWO]), ("pythonic", "<|python_start|>[weather_at(a=True)]<|python_end|>", [TWO]),
    ("llama", f'<|python_tag|>{{"name": "weather", "parameters": {J}}}', [ONE]), ("hermes", f'<tool_call>\n{{"name": "weather", "arguments": {J}}}\n</tool_call>', [ONE]),
    ("gemma", '```tool_code\nweather(city="Zürich <b> {x}", days=3)\n```', [ONE]),
]


def parsed(form, pieces, reason="stop", **how):
    parser = AnswerParser(TOOL_FORMATS[form], TOOLS, **how)
    deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.finish(reason)
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", [])]
    return [(call["name"], call["arguments"]) for call in calls], "".join(delta.get("content", "") for delta in deltas)


def split(text, seed):
    rng, at = random.Random(seed), 0
    while at < len(text):
        n = rng.choice([1, 2, 5, 20, 1000])
        yield text[at:at + n]
        at += n


def test_every_format_has_an_example():
    assert {form for form, *_ in CALLS} == set(TOOL_FORMATS)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("form, text, calls", CALLS)
def test_calls_are_found_however_they_come(form, text, calls, seed):
    before = "" if TOOL_FORMATS[form].bare else "I look: "
    found, content = parsed(form, split(before + text, seed))
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls and content.strip() == before.strip()


@pytest.mark.parametrize("form, text, calls", CALLS)
def test_a_call_of_no_tool_is_text(form, text, calls):
    text = text.replace("weather", "wether").replace("ping", "pong")
    found, content = parsed(form, split(text, 0))
    assert found == [] and content.replace("\n", "") == text.replace("\n", "")


@pytest.mark.parametrize("form, text, calls", CALLS)
def test_what_came_of_a_call_that_is_cut_is_no_content(form, text, calls):
    """A forced one has no content at all; another one none from the tool's name on."""
    known = min(i for i in (text.find("weather_at"), text.find("weather")) if i >= 0) + len(calls[0][0]) + 1
    for end in range(1, len(text)):
        found, content = parsed(form, split(text[:end], end), "length", is_forced=True)
        assert content.strip() == "" and [name for name, _ in found] in ([name for name, _ in calls][:n] for n in range(3)), text[:end]
        if end > known:
            assert found, text[:end]


def test_a_cut_answer_about_tags_is_text():
    for text in ("if a < b and <tool_call> is a tag", '{"topic": "weather", "a": 1', "<tool_call>"):
        for form in ("hermes", "llama"):
            assert parsed(form, [text], "length") == ([], text)


SIGNS = {"mistral_args": "[TOOL_CALLS][ARGS]", "deepseek_v3": "<｜tool▁calls▁begin｜>```json\n", "hermes": "<tool_call>", "gemma": "tool_code"}


@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_templates_tell_their_format(form):
    sign = SIGNS.get(form, TOOL_FORMATS[form].signs[0] if TOOL_FORMATS[form].signs else "")
    assert detect_tool_format("{% for tool in tools %}" + sign).name == form
    assert detect_tool_format(sign.replace("tools", "")) is None or "tools" in sign


def test_arguments_keep_the_type_that_their_schema_allows():
    text = "<tool_call>\n<function=weather>\n" + "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in (("city", "12"), ("days", "3"), ("unit", "c"), ("id", "123"), ("deep", "null"))) + "</function>\n</tool_call>"
    [(_, arguments)], _ = parsed("qwen_xml", [text])
    assert json.loads(arguments) == {"city": "12", "days": 3, "unit": "c", "id": "123", "deep": None}


# ---- Forced calls --------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def walker():
    return Walker()


UNFORCED = ("deepseek_dsml", "apertus", "olmo", "gemma4", "function_gemma")


@pytest.mark.parametrize("form", [name for name in TOOL_FORMATS if name not in UNFORCED])
def test_a_forced_call_is_parsed_and_valid(walker, form):
    names = set()
    for text in walker.texts(tool_call_grammar(TOOLS[:2], TOOL_FORMATS[form]), 10, n_token=250):
        [(name, arguments)], content = parsed(form, split(text, 0))
        [schema] = [tool["function"]["parameters"] for tool in TOOLS if tool["function"]["name"] == name]
        jsonschema.validate(json.loads(arguments), schema)
        assert not content
        names.add(name)
    assert names


@pytest.mark.parametrize("form", UNFORCED)
def test_other_formats_are_refused_by_name(form):
    with pytest.raises(ValueError, match=f"forced in the tool format {form}"):
        tool_call_grammar(TOOLS, TOOL_FORMATS[form])


def test_markers_that_are_special_tokens_are_drawn_as_such(walker):
    """SmolLM2's special tokens 3 to 8 stand for DeepSeek's."""
    shown = {marker: 3 + i for i, marker in enumerate(TOOL_FORMATS["deepseek"].tokens())}
    matcher = walker.grammars.matcher(tool_call_grammar(TOOLS[1:2], TOOL_FORMATS["deepseek"], shown))
    begin, sep = (shown[f"<｜tool▁{name}｜>"] for name in ("calls▁begin", "sep"))
    assert walker.allowed(matcher).nonzero()[0].tolist() == [begin]
    for token in (begin, shown["<｜tool▁call▁begin｜>"], *walker.tokenizer.backend.encode("weather_at", special=False), sep):
        assert walker.allowed(matcher)[token]
        matcher.advance(token)


def test_strings_with_restrictions_are_refused_in_xml():
    tool = dict(type="function", function=dict(name="f", parameters={"type": "object", "properties": {"s": {"type": "string", "maxLength": 3}}}))
    with pytest.raises(ValueError, match="tools.0.function.parameters.s: a string with restrictions"):
        tool_call_grammar([tool], TOOL_FORMATS["qwen_xml"])


@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_instructions_show_a_call(form):
    assert "weather" in tool_instructions(TOOLS, TOOL_FORMATS[form])


# ---- A call or an answer, and calls of a history ---------------------------------------------------

ANSWER = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"], "additionalProperties": False}


@pytest.mark.parametrize("form", [name for name in TOOL_FORMATS if name not in UNFORCED])
def test_either_a_call_or_json_of_the_schema(walker, form):
    spec = call_or_json(tool_call_grammar(TOOLS[1:], TOOL_FORMATS[form]), json_schema(json.dumps(ANSWER)))
    assert walker.accepts(spec, '{"answer": 7}') and not walker.accepts(spec, '{"answer": "7"}') and not walker.accepts(spec, "7")
    call = written_call(dict(name="weather_at", arguments={"a": True}), TOOL_FORMATS[form])
    assert walker.accepts(spec, call) and not walker.accepts(spec, call.replace("weather_at", "wether"))
    assert parsed(form, ['{"answer": 7}']) == ([], '{"answer": 7}')


@pytest.mark.parametrize("form", [name for name in TOOL_FORMATS if name not in (*UNFORCED, "apertus")])
def test_a_call_of_a_history_is_written_as_the_model_writes_it(form):
    for name, arguments in (ONE, TWO, ("ping", {})):
        [(found, text)], content = parsed(form, [written_call(dict(name=name, arguments=arguments), TOOL_FORMATS[form])])
        assert (found, json.loads(text), content) == (name, arguments, "")


@pytest.mark.parametrize("n", range(1, 40))
def test_line_breaks_before_a_call_do_not_depend_on_the_pieces(n):
    text = 'Let me see.\n\n<tool_call>\n{"name": "weather_at", "arguments": {"a": true}}\n</tool_call>\n'
    for whole, content in ((text, "Let me see."), ("a\n\nb\n", "a\n\nb\n")):
        assert parsed("hermes", [whole[i:i + n] for i in range(0, len(whole), n)])[1] == content
