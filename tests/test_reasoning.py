"""Thoughts apart from the answer: every format, however the text comes, wherever it is cut off."""

import json
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import SMOLLM2
from test_chat import TEMPLATES, bpe, user, write  # noqa: F401
from test_errors import run
from tokenizers import Tokenizer as Fast
from tokenizers import models, pre_tokenizers

from generate import Sequence
from gpt_faster.cli import batch, chat
from gpt_faster.cli.session import Session
from gpt_faster.cli.thoughts import ThoughtPrinter, with_thoughts
from gpt_faster.decoding.scheduler import Event, Generation
from gpt_faster.formats.load import read_checkpoint
from gpt_faster.server.answers import ChatAnswer
from gpt_faster.server.engine import Engine
from gpt_faster.server.parsing import TOOL_FORMATS, AnswerParser, detect_tool_format
from gpt_faster.server.prepare import PreparedRequest
from gpt_faster.text import tokenizer_files
from gpt_faster.text.chat_template import encode_chat
from gpt_faster.text.reasoning import (
    HARMONY,
    PAIRS,
    HarmonySplitter,
    PairSplitter,
    ThoughtFormat,
    find_format,
    separate,
    thoughts_key,
    thoughts_of,
)

HARMONY_TEMPLATE = """{% for m in messages %}{% if m.role == 'assistant' %}{% if m.thinking and loop.last and not add_generation_prompt %}
<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}
<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}
{% if add_generation_prompt %}<|start|>assistant{% endif %}""".replace("\n", "")
HARMONY_ANSWER = "<|channel|>analysis<|message|>They say hello.<|end|><|start|>assistant<|channel|>final<|message|>Hi!"


def split(splitter, text, size=1000):
    """-> the thoughts, and the answer."""
    parts = [part for i in range(0, len(text), size) for part in splitter.push(text[i:i + size])]
    parts += splitter.finish()
    return tuple("".join(text for is_thought, text in parts if is_thought == kind) for kind in (True, False))


def pair(start, prompt="", **shown):
    return PairSplitter(ThoughtFormat({start: PAIRS[start]}, {1: start, 2: PAIRS[start]} if shown else {}), prompt)


# ---- Markers -------------------------------------------------------------------------------------

@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize("start", PAIRS)
def test_a_pair_of_markers(start, size):
    end = PAIRS[start]
    whole = f"{start}\nHm, 1 < 2.\n\nSo?\n{end}\n\nYes, a <b>.\n"
    expected = "Hm, 1 < 2.\n\nSo?", "Yes, a <b>.\n"
    assert split(pair(start), whole, size) == expected
    assert split(pair(start), "\n " + whole, size) == expected
    opened = whole.removeprefix(start)
    assert split(pair(start, f"x{start}\n"), opened, size) == expected            # the prompt opened it
    assert split(pair(start, f"x{start}\n"), whole, size) == expected             # and the model did so again
    assert split(pair(start, f"{start}\n\n{end}\n\n"), "Yes.", size) == ("", "Yes.")     # and closed it
    assert split(pair(start), f"{start}{end}Yes.", size) == split(pair(start), "Yes.", size) == ("", "Yes.")
    assert split(pair(start), f"  Yes: {start} begins it.", size) == ("", f"  Yes: {start} begins it.")
    assert split(pair(start), f"{start}a{end}\n{start}b{end}c", size) == ("a\n\nb", "c")


@pytest.mark.parametrize("start", PAIRS)
def test_a_thought_that_is_cut_off_is_all_thoughts(start):
    end, whole = PAIRS[start], f"{start}\nHm, 1 < 2.\n{PAIRS[start]}\n\nYes."
    for n in range(len(whole)):
        thoughts, answer = split(pair(start), whole[:n])
        assert "Hm, 1 < 2.".startswith(thoughts.rstrip("<[◁")) or thoughts in whole[len(start):n], n
        assert answer == "" or len(answer) < 3 and n < 3 or "Yes.".startswith(answer), (n, answer)
        for text in (thoughts, answer):
            assert not any(marker[:3] in text for marker in (start, end)), (n, text)


def test_a_special_token_counts_anywhere():
    text = "First. [THINK]Hm.[/THINK]Then."
    assert split(pair("[THINK]", hidden=True), text, 1) == ("Hm.", "First. Then.")
    assert split(pair("[THINK]"), text, 1) == ("", text)


# ---- Harmony -------------------------------------------------------------------------------------

MESSAGES = [
    (HARMONY_ANSWER + "<|return|>", "They say hello.", "Hi!"),
    ("<|channel|>final<|message|>Hi!", "", "Hi!"),
    ("<|message|>Hi!<|end|>", "", "Hi!"),
    ("Hi!", "", "Hi!"), ("a <|b", "", "a <|b"), ("<b>", "", "<b>"), ("", "", ""),
    ("<|channel|>analysis<|message|> One. <|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|>"
     "<|start|>assistant<|channel|>final<|message|>Hi!", "One.\n\nTwo.", "Hi!"),
    ("<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|>Hi!", "", "I look.\n\nHi!"),
    ("<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Hi!", "Hm.", "Hi!"),
    ("<|channel|>commentary to=python code<|message|>1 + 1<|call|>", "1 + 1", ""),
    ("<|channel|>final <|constrain|>json<|message|>{}", "", "{}"),
    ("<|channel|>analysis<|message|>They", "They", ""), ("<|channel|>ana", "", ""), ("<|start|>assi", "", ""),
    ("<|channel|>final Hello", "", " Hello"), ("<|channel|>final" + " word" * 100, "", " word" * 100),
]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("text, thoughts, answer", MESSAGES)
def test_channels(text, thoughts, answer, size):
    for prompt in ("", "<|end|><|start|>assistant", "<|start|>user<|message|>Hello<|end|><|start|>assistant"):
        assert split(HarmonySplitter(prompt), text, size) == (thoughts, answer)


def test_a_prompt_that_begins_a_channel():
    assert split(HarmonySplitter("<|start|>assistant<|channel|>analysis<|message|>"), "Hm.<|end|>Hi") == ("Hm.", "Hi")
    assert split(HarmonySplitter("<|start|>assistant<|channel|>final<|message|>"), "Hi") == ("", "Hi")


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("head", ["<|channel|>commentary to=functions.weather <|constrain|>json<|message|>",
                                  " to=functions.weather<|channel|>commentary json<|message|>",
                                  "<|start|>assistant to=functions.weather<|channel|>commentary <|constrain|>json<|message|>"])
@pytest.mark.parametrize("body, arguments", [('{"city": "Rome"}', {"city": "Rome"}), ("", {})])
def test_a_function_call_is_a_tool_call(head, body, arguments, size):
    thought = "<|channel|>analysis<|message|>I look.<|end|>" + ("<|start|>assistant" if head[0] == " " else "")
    thoughts, answer = split(HarmonySplitter("<|start|>assistant"), thought + head + body + "<|call|>", size)
    if head[0] == " ":
        assert thoughts == "I look."
    tools = [dict(type="function", function=dict(name="weather"))]
    parser = AnswerParser(detect_tool_format(HARMONY_TEMPLATE + "{{ tools }}"), tools)
    deltas = [*parser.push(answer), *parser.finish("stop")]
    [call] = [c["function"] for d in deltas for c in d.get("tool_calls", [])]
    assert (call["name"], json.loads(call["arguments"])) == ("weather", arguments)
    assert not "".join(d.get("content", "") for d in deltas).strip()
    assert "<|" not in answer


# ---- A tokenizer's format ------------------------------------------------------------------------

def made(path, text, template, special, added=()):
    return tokenizer_files.load(write(path, text, template, special, added=added))


TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
AROUND = """{%- for m in messages %}{% if m.role == 'assistant' %}<|begin|>assistant{% if m.reasoning_content %}
{{- '<|muse|>' + m.reasoning_content + '<|stop|><|begin|>assistant' }}{% endif %}<|say|>{{ m.content }}<|stop|>
{%- else %}<|begin|>user<|say|>{{ m.content }}<|stop|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|begin|>assistant{% endif %}"""
ALWAYS = ("{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}<ponder:1>{{ m.reasoning_content or '' }}</ponder:1>{% endif %}"
          "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|><ponder:1>{% endif %}")


def answered(tokenizer, text, stops=(), n=None, eos=frozenset(), prompt=None, max_new=None):
    """-> (thoughts, answer, how it ended); what is streamed is the same."""
    heard = []
    sequence = Sequence(tokenizer, prompt or encode_chat(tokenizer, [user("Hi")]), eos, stops, max_new)
    separate(sequence, find_format(tokenizer), heard.append)
    pieces = [sequence.push(i) for i in tokenizer.encode(text, bos=False)[:n]]
    pieces.append(sequence.finish("length"))
    assert "".join(pieces) == sequence.text and "".join(heard) == thoughts_of(sequence)
    assert heard[-1:] in ([], [""]) and sequence.detokenizer.take() == thoughts_of(sequence)
    return thoughts_of(sequence), sequence.text, sequence.finish_reason


def test_formats_of_tokenizers(bpe, tmp_path):  # noqa: F811
    for i, (start, end) in enumerate(PAIRS.items()):
        for j, special in enumerate(([], [start, end])):
            tokenizer = made(tmp_path / f"{i}-{j}", bpe, TURNS + f"{{# {start} #}}", ["[user]", *special])
            form = find_format(tokenizer)
            assert form.pairs == {start: end} and [*form.shown.values()] == sorted(special, key=len, reverse=True)
            assert answered(tokenizer, f"{start}\nHm é.\n{end}\n\nYes é.") == ("Hm é.", "Yes é.", "length")
    for i, added in enumerate((["<think>", "</think>"], ["[THINK]", "[/THINK]"])):
        for special, more in ((added, []), ([], added)):           # in the vocabulary only
            tokenizer = made(tmp_path / f"v{i}{len(more)}", bpe, TURNS, ["[user]", *special], more)
            assert answered(tokenizer, f"{added[0]}Hm.{added[1]}Yes.") == ("Hm.", "Yes.", "length")
    assert find_format(made(tmp_path / "none", bpe, TURNS, ["[user]"])) is None
    assert find_format(SimpleNamespaceWithHash(chat_template=None)) is None


class SimpleNamespaceWithHash(SimpleNamespace):
    __hash__ = object.__hash__


def test_what_the_template_writes_around_thoughts(bpe, tmp_path):  # noqa: F811
    special = ["<|begin|>", "<|muse|>", "<|say|>", "<|stop|>"]
    tokenizer = made(tmp_path / "around", bpe, AROUND, special)
    assert find_format(tokenizer).pairs == {"<|muse|>": "<|stop|><|begin|>assistant<|say|>"}
    text = "<|muse|>Hm.<|stop|><|begin|>assistant<|say|>Yes."
    assert answered(tokenizer, text) == ("Hm.", "Yes.", "length")
    tokenizer = made(tmp_path / "always", bpe, ALWAYS, ["<|user|>", "<|assistant|>"])
    assert find_format(tokenizer).pairs == {"<|assistant|><ponder:1>": "</ponder:1>"} or find_format(tokenizer).pairs == {
        "<ponder:1>": "</ponder:1>"}
    assert answered(tokenizer, "Hm.</ponder:1>Yes.") == ("Hm.", "Yes.", "length")


def test_harmony_of_a_tokenizer(bpe, tmp_path):  # noqa: F811
    tokenizer = made(tmp_path, bpe, HARMONY_TEMPLATE, HARMONY)
    eos = {tokenizer.encode("<|return|>")[0]}
    assert find_format(tokenizer).is_harmony
    assert answered(tokenizer, HARMONY_ANSWER + "<|return|>", eos=eos) == ("They say hello.", "Hi!", "stop")
    n_token = len(tokenizer.encode(HARMONY_ANSWER))
    for n in range(n_token):
        thoughts, answer, _ = answered(tokenizer, HARMONY_ANSWER, n=n)
        assert "They say hello.".startswith(thoughts) and "Hi!".startswith(answer), n
    told = dict(role="assistant", content="Hi!", thinking="They say hello.")
    again = tokenizer.decode(encode_chat(tokenizer, [user("Hi"), told, user("And?")]))
    assert "Hi!" in again and "They say" not in again


def test_stop_strings_end_the_answer_and_no_thought(bpe, tmp_path):  # noqa: F811
    tokenizer = made(tmp_path, bpe, HARMONY_TEMPLATE, HARMONY)
    assert answered(tokenizer, HARMONY_ANSWER, ["hello", "say"]) == ("They say hello.", "Hi!", "length")
    assert answered(tokenizer, HARMONY_ANSWER + " They say", ["hello", "say"]) == ("They say hello.", "Hi! They ", "stop")


def test_the_prompt_opens_the_thoughts(bpe, tmp_path):  # noqa: F811
    template = TEMPLATES["qwen3"][0] + "{% if not enable_thinking is defined %}{{ '<think>\\n' }}{% endif %}"
    tokenizer = made(tmp_path, bpe, template, TEMPLATES["qwen3"][1], ["<think>", "</think>"])
    assert answered(tokenizer, "Hm.\n</think>\n\nYes.") == ("Hm.", "Yes.", "length")
    assert answered(tokenizer, "Hm. I was cut") == ("Hm. I was cut", "", "length")
    prompt = encode_chat(tokenizer, [user("Hi")], enable_thinking=False)
    assert answered(tokenizer, "Yes.", prompt=prompt) == ("", "Yes.", "length")


def test_bytes_of_a_character_before_a_marker(bpe, tmp_path):  # noqa: F811
    tokenizer = made(tmp_path, bpe, TURNS, ["[user]", "[THINK]", "[/THINK]"])
    ids = [*tokenizer.encode("[THINK]é🙂", bos=False)[:-1], *tokenizer.encode("[/THINK]ü", bos=False)]
    sequence = separate(Sequence(tokenizer, [0]), find_format(tokenizer))
    for i in ids:
        sequence.push(i)
    sequence.finish("length")
    assert thoughts_of(sequence).startswith("é") and sequence.text == "ü"


@pytest.mark.parametrize("template, key", [
    ("{{ m.reasoning_content }}", "reasoning_content"), ("{{ m['thinking'] }}{{ m.reasoning }}", "thinking"), ("{{ m.reasoning }}", "reasoning"),
    ("{{ enable_thinking }}{{ reasoning_effort }}", None), ("{% if 'reasoning_content' in m %}", "reasoning_content")])
def test_the_key_that_a_template_reads(template, key):
    assert thoughts_key(template) == key


# ---- Where it is shown ---------------------------------------------------------------------------

@pytest.mark.parametrize("is_terminal", [True, False])
def test_thoughts_are_printed_apart(is_terminal, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    printer = ThoughtPrinter()
    for text in ("", "Hm", ".", "", ""):
        printer(text)
    shown = capsys.readouterr().out
    assert shown == ("\x1b[2mHm.\x1b[22m\n\n" if is_terminal else "<think>\nHm.\n</think>\n\n")
    assert with_thoughts("Hm.", "Yes") == "<think>\nHm.\n</think>\n\nYes" and with_thoughts("", "Yes") == with_thoughts(None, "Yes") == "Yes"


@pytest.mark.parametrize("stream", [True, False])
def test_the_server_sends_them_apart(stream, bpe, tmp_path):  # noqa: F811
    """Events of several steps are merged as the engine does."""
    tokenizer = made(tmp_path, bpe, HARMONY_TEMPLATE, HARMONY)
    generation = Generation(tokenizer, encode_chat(tokenizer, [user("Hi")]), max_new=99, user_data=SimpleNamespace(index=0))
    separate(generation, find_format(tokenizer))
    prepared = PreparedRequest([generation], True, 1, parsers=[AnswerParser(TOOL_FORMATS["hermes"])])
    answer = ChatAnswer(SimpleNamespace(name="m", fingerprint="fp_1"), SimpleNamespace(stream=stream, stream_options=None, logprobs=None), prepared)
    engine, events = SimpleNamespace(events={}), []
    ids = tokenizer.encode(HARMONY_ANSWER, bos=False)
    for i, token in enumerate(ids):
        text = generation.push(token)
        last = i == len(ids) - 1
        text += generation.finish("stop") if last else ""
        Engine._add(engine, Event(generation, text=text, thoughts=generation.detokenizer.take(), finish_reason="stop" if last else None))
        if i % 5 == 0 or last:
            events += answer.add(engine.events.pop(generation))
    if stream:
        deltas = [event["choices"][0]["delta"] for event in events]
        message = {key: "".join(d.get(key) or "" for d in deltas) for key in ("content", "reasoning_content", "reasoning")}
        assert not any("content" in d and "reasoning_content" in d for d in deltas)
    else:
        message = answer.whole()["choices"][0]["message"]
    assert (message["reasoning_content"], message["reasoning"], message["content"]) == ("They say hello.", "They say hello.", "Hi!")
    assert not re.search(r"[<|>]", json.dumps(events))


# ---- The command ---------------------------------------------------------------------------------

WORDS = ["?", "<s>", "</s>", "Hm", ".", "Yes", "[user]", "[assistant]", "Hi", "<think>", "</think>"]
SAID = [WORDS.index(word) for word in ("<think>", "Hm", ".", "</think>", "Yes", ".", "</s>")]


@pytest.fixture
def scripted(families, tmp_path, monkeypatch, capsys):
    """A model that says SAID. flags -> the command's stdout."""
    shutil.copytree(families("llama2")[0], tmp_path / "m")
    fast = Fast(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast.add_special_tokens(["</s>"])
    fast.save(str(tmp_path / "m/tokenizer.json"))
    template = "{% for m in messages %} [{{ m.role }}] {{ m.content }}{% endfor %} [assistant] {# <think> #}"
    (tmp_path / "m/tokenizer_config.json").write_text(json.dumps(dict(chat_template=template, eos_token="</s>")))
    monkeypatch.setattr(Session, "tokens", lambda self, prompts, n_new, n_cached=0, draft=True: iter(
        [torch.tensor([[i]] * len(prompts)) for i in SAID[:n_new]]))

    def serve(batch, work):
        for i, generation in enumerate(work):
            for token in SAID:
                generation.push(token)
            generation.start_s, generation.first_s, generation.last_s = 0, 1, 2
            yield generation, i
    monkeypatch.setattr(batch, "serve", serve)

    def get(*flags):
        status, out, err = run(capsys, "-m", tmp_path / "m", "--device", "cpu", *flags)
        assert status == 0, err
        return out
    return get


def test_the_command_shows_them_apart(scripted, tmp_path):
    framed = "<think>\nHm .\n</think>\n\nYes .\n"
    assert scripted("--chat", "--prompt", "Hi") == framed
    assert scripted("--chat", "--prompt", "Hi", "--hide_thoughts") == "Yes .\n"
    assert scripted("--chat", "--prompt", "Hi", "--max_new_tokens", "2") == "<think>\nHm\n</think>\n\n\n"
    result = json.loads(scripted("--chat", "--prompt", "Hi", "--json"))
    assert (result["text"], result["reasoning_content"], result["new_ids"]) == ("Yes .", "Hm .", SAID)
    assert "reasoning_content" not in json.loads(scripted("--prompt", "Hi", "--json"))       # no chat: the text as it is
    assert scripted("--chat", "--prompt", "Hi", "--batch_size", "2") == f"--- row 0 ---\n{framed}--- row 1 ---\n{framed}"


def test_many_prompts_show_them_apart(scripted, tmp_path):
    framed = "<think>\nHm .\n</think>\n\nYes .\n"
    many = ("--chat", "--prompt", "Hi", "--prompt", "Hm")
    assert scripted(*many) == f"--- 0 ---\n{framed}--- 1 ---\n{framed}"
    assert scripted(*many, "--hide_thoughts") == "--- 0 ---\nYes .\n--- 1 ---\nYes .\n"
    scripted(*many, "--output", tmp_path / "out.jsonl")
    results = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(r["text"], r["reasoning_content"]) for r in results] == [("Yes .", "Hm .")] * 2


def test_a_chat_shows_them_apart(scripted, tmp_path, monkeypatch):
    prompts = []
    encode = chat.encode_chat
    monkeypatch.setattr(chat, "encode_chat", lambda tokenizer, messages, **more: prompts.append(messages) or encode(tokenizer, messages, **more))
    for flags, shown in ((), "<think>\nHm .\n</think>\n\nYes .\n"), (("--hide_thoughts",), "Yes .\n"):
        monkeypatch.setattr("builtins.input", lambda prompt, lines=iter(["Hi", "Hm", EOFError]): raised(next(lines)))
        assert scripted("--interactive", *flags) == 2 * shown
        assert prompts[-1] == [user("Hi"), dict(role="assistant", content="Yes ."), user("Hm")]


def raised(line):
    if isinstance(line, str):
        return line
    raise line


def test_a_replaced_template_is_seen():
    """The format is of the template that renders now."""
    tokenizer = tokenizer_files.load(read_checkpoint(SMOLLM2).tokenizer)
    for template, pairs in (("<think> </think>", {"<think>": "</think>"}), ("[THINK] [/THINK]", {"[THINK]": "[/THINK]"})):
        tokenizer.chat_template = template
        assert find_format(tokenizer).pairs == pairs
    tokenizer.chat_template = None
    assert find_format(tokenizer) is None
