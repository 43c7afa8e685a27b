"""Thoughts apart from the answer: each family's way of writing them, in any pieces, and as the server sends and counts them."""

import json
import random

import pytest
import torch
from test_serve_safety import CHAT, InProcess, unicode_to_bytes
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, pre_tokenizers

from generate import Sequence
from gpt_faster.decoding.logits_processors import Processor
from gpt_faster.text.chat_template import encode_chat
from gpt_faster.text.reasoning import (
    ANSWER_TAGS,
    PAIRS,
    find_format,
    n_thought_tokens,
    separate,
    thoughts_of,
)
from tokenizer import Tokenizer, TokenizersBackend

HI = [dict(role="user", content="Hi")]
TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
OPENED = "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}"
THINK = ("<think>", "</think>")

# family: what its template says beside the turns, special tokens, how it answers
FAMILIES = {
    "Qwen3, SmolLM3, EXAONE 4, K-EXAONE, MiMo": ("{# </think> #}", [], "<think>\n{t}\n</think>\n\n{a}"),
    "QwQ, Qwen3 Thinking, MiniMax M2, Olmo 3 Think": ("<think>\n", [], "{t}\n</think>\n\n{a}"),
    "DeepSeek R1, its distilled ones": ("<think>\n", THINK, "{t}\n</think>\n\n{a}"),
    "DeepSeek V3.1": ("{# </think> #}<think>", THINK, "{t}</think>{a}"),
    "GLM-4.5 to 4.7, Kimi K2 Thinking": ("{# <think></think> #}", THINK, "\n<think>{t}</think>\n{a}"),
    "GLM-4.1V Thinking": ("{# <think> <answer> #}", THINK, "<think>{t}</think><answer>{a}</answer>"),
    "Phi-4 reasoning": ("{# Thought section: <think> {Thought section} </think> #}", [], "<think>\n{t}\n</think>\n\n{a}"),
    "Nemotron Nano": ("{# </think> #}", [], "<think>\n{t}\n</think>\n\n{a}"),
    "Magistral, Ministral 3": ("{# [THINK] #}", ["[THINK]", "[/THINK]"], "[THINK]{t}[/THINK]{a}"),
    "Seed-OSS": ("{# <seed:think> #}", ["<seed:think>", "</seed:think>"], "<seed:think>{t}</seed:think>{a}"),
    "Hunyuan A13B, dense": ("{# </think> <answer> </answer> #}", [], "<think>\n{t}\n</think>\n<answer>\n{a}\n</answer>"),
    "Hunyuan, its thoughts off": ("{# <answer> #}<think>\n\n</think>\n", [], "<answer>\n{a}\n</answer>"),
    "ERNIE 4.5 Thinking": ("{# <response> #}<think>\n", [], "{t}\n</think>\n\n<response>\n{a}\n</response>\n"),
    "Granite 3.3": ("{# <think></think> <response></response> #}", [], "<think>{t}</think>\n\n<response>{a}</response>"),
    "Granite 3.2": ("{# 'Here is my thought process:' 'Here is my response:' #}", [], "Here is my thought process:\n{t}\n\nHere is my response:\n\n{a}"),
    "Command A Reasoning": ("{# <|START_THINKING|> #}", ["<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"],
                            "<|START_THINKING|>{t}<|END_THINKING|><|START_RESPONSE|>{a}<|END_RESPONSE|>"),
    "EXAONE Deep": ("<thought>\n", [], "{t}\n</thought>\n\n{a}"),
    "Reka Flash 3": ("{# <reasoning> #}", [], "<reasoning>\n{t}\n</reasoning>\n{a}"),
    "gpt-oss": ("{# <|channel|> <|message|> #}", ["<|start|>", "<|channel|>", "<|message|>", "<|end|>"],
                "<|channel|>analysis<|message|>{t}<|end|><|start|>assistant<|channel|>final<|message|>{a}"),
    "Gemma 4": ("{# <|channel>thought #}", ["<|channel>", "<channel|>"], "<|channel>thought\n{t}<channel|>{a}"),
}
TEXTS = [("Hm, 1 < 2 & é.\n\nSo </b> 🙂?", "Yes, a <b> and\n\n```\n<x>\n```"), ("One", "<tag>Two</tag>"), ("a", "b")]


def tokenizer_of(template, special=(), added=()):
    """A token for each byte, and these."""
    fast = Fast(models.BPE(vocab={sign: byte for sign, byte in unicode_to_bytes().items()}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<eos>", *special])
    return Tokenizer(TokenizersBackend(fast), None, False, template, eos_ids=[256])


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family(family):
    """Whole, and cut off anywhere: what was thought is never in the answer, and no marker in either."""
    template, special, form = FAMILIES[family]
    tokenizer = tokenizer_of(TURNS + template, special)
    prompt = encode_chat(tokenizer, HI)
    for thoughts, answer in TEXTS:
        thoughts = thoughts if "{t}" in form else ""
        ids = tokenizer.encode(form.replace("{t}", thoughts).replace("{a}", answer), bos=False)
        n_thought = len(thoughts.encode())
        for n in (len(ids), *range(0, len(ids), 1 if len(ids) < 60 else 5)):
            sequence = separate(Sequence(tokenizer, prompt), find_format(tokenizer))
            shown = "".join([sequence.push(i) for i in ids[:n]]) + sequence.finish("length")
            assert shown == sequence.text
            if n == len(ids):
                assert (thoughts_of(sequence), sequence.text) == (thoughts, answer)
                most = n_thought + len("\n\nHere is my response:\n\n") + 20
                assert n_thought <= n_thought_tokens(sequence) + 2 * (not thoughts) and n_thought_tokens(sequence) <= most * bool(thoughts)
            else:
                assert is_begun(thoughts, thoughts_of(sequence)) and is_begun(answer, sequence.text), n


def is_begun(whole, text):
    """Whether the text is its beginning, but for one or two characters that a marker may begin with, or half a character."""
    return any(whole.startswith(text[:len(text) - n].rstrip("\ufffd \n")) for n in range(3))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(3))
def test_in_random_pieces(family, seed):
    """Of text, as where several characters come in one token."""
    from gpt_faster.text.reasoning import HarmonySplitter, PairSplitter
    template, special, form = FAMILIES[family]
    tokenizer, g = tokenizer_of(TURNS + template, special), random.Random(seed)
    found = find_format(tokenizer)
    prompt = TURNS.partition("{% endfor %}")[2] + template.rpartition("#}")[2]
    for thoughts, answer in TEXTS:
        text = form.replace("{t}", thoughts).replace("{a}", answer)
        for name in special:                       # what decode() hides
            if name not in found.shown.values():
                text = text.replace(name, "")
        splitter = HarmonySplitter(prompt) if found.is_harmony else PairSplitter(found, prompt)
        parts = []
        while text:
            n = g.randint(1, 9)
            parts += splitter.push(text[:n])
            text = text[n:]
        parts += splitter.finish()
        assert "".join(t for is_thought, t in parts if is_thought) == (thoughts if "{t}" in form else "")
        assert "".join(t for is_thought, t in parts if not is_thought) == answer


def test_tags_in_an_answer_are_text():
    """They count at its beginning and end alone, and only for models that write them."""
    plain, tagged = (tokenizer_of(TURNS + f"{{# <think>{more} #}}") for more in ("", "<answer>"))

    def run(tokenizer, text):
        sequence = separate(Sequence(tokenizer, [1]), find_format(tokenizer))
        for i in tokenizer.encode(text, bos=False):
            sequence.push(i)
        sequence.finish("stop")
        return sequence.text
    assert find_format(plain).tags == {} and find_format(tagged).tags == {"<answer>": "</answer>"}
    assert run(plain, "<think>a</think><answer>b</answer>") == "<answer>b</answer>"
    assert run(tagged, "<think>a</think>Write <answer>b</answer> so.") == "Write <answer>b</answer> so."
    assert run(tagged, "<answer>b  \n</answer>\n") == run(tagged, "<answer> b</ans") == run(tagged, "\n<answer>b") == "b"
    assert run(tagged, "<answer>b</answer>\n\nc") == "bc" and run(tagged, "<answ") == "" and run(tagged, "<an apple") == "<an apple"
    sequence = separate(Sequence(tagged, tagged.encode("</think><answer>", bos=False)), find_format(tagged))     # the prompt has opened it
    assert "".join([sequence.push(i) for i in tagged.encode("b</answer>", bos=False)]) + sequence.finish("stop") == "b"
    assert set(ANSWER_TAGS).isdisjoint(PAIRS)


# ---- Over HTTP -----------------------------------------------------------------------------------

class Script(Processor):
    """Makes the model say a text, each row from its beginning."""

    def __init__(self, n_row):
        super().__init__()
        self.ids, self.at = [], torch.zeros(n_row, dtype=torch.long)

    def begin(self, row, prompt, params):
        self.at[row] = 0

    def observe(self, token):
        self.at += 1

    def forward(self, logits, rows, draft_tokens=None):
        at = self.at[rows].clamp(max=len(self.ids) - 1)
        said = torch.full_like(logits, -torch.inf)
        return said.scatter(1, torch.tensor(self.ids)[at][:, None], 0.0)


@pytest.fixture(scope="module")
def server():
    server = InProcess("--batch_size", "3", "--chat_template_kwargs", '{"x": 1}')
    server.tokenizer.chat_template = TURNS + OPENED
    server.http.preparer.thought_format = find_format(server.tokenizer)
    server.script = Script(3)
    server.session.batch.sampler.processors.append(server.script)
    yield server
    server.stop()


def ask(server, text, **fields):
    """-> message, the choice's finish reason, usage; streamed ones are put together."""
    server.script.ids = [*text.encode(), 257]
    [response] = server.ask((CHAT, dict(dict(messages=HI, max_tokens=40), **fields)))
    assert response.status_code == 200, response.text
    if not fields.get("stream"):
        body = response.json()
        [choice] = body["choices"]
        return choice["message"], choice["finish_reason"], body["usage"]
    message, reasons, usage = {}, [], None
    for event in events_of(response):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            for name, value in choice["delta"].items():
                message[name] = message.get(name, "") + (value or "")
            reasons.append(choice["finish_reason"])
    return message, reasons[-1], usage


def events_of(response):
    data = [frame.removeprefix("data: ") for frame in response.text.split("\n\n") if frame.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(text) for text in data[:-1]]


STREAM = dict(stream=True, stream_options=dict(include_usage=True))
SAID = "Hm, é.\n</think>\n\nYes."


@pytest.mark.parametrize("how", [{}, STREAM])
def test_under_both_names_and_counted(server, how):
    message, reason, usage = ask(server, SAID, **how)
    assert (message["content"], message["reasoning_content"], message["reasoning"], reason) == ("Yes.", "Hm, é.", "Hm, é.", "stop")
    n = len("Hm, é.\n</think>".encode())
    assert usage["completion_tokens_details"] == dict(reasoning_tokens=n) and usage["completion_tokens"] == len(SAID.encode()) + 1


@pytest.mark.parametrize("how", [{}, STREAM])
def test_a_thought_that_is_cut_off(server, how):
    """The answer is empty, and the reason says that the length ended it."""
    message, reason, usage = ask(server, SAID, max_tokens=4, **how)
    assert (message["content"], message["reasoning_content"], reason) == ("", "Hm,", "length")
    assert usage["completion_tokens_details"]["reasoning_tokens"] == usage["completion_tokens"] == 4


@pytest.mark.parametrize("how", [{}, STREAM])
def test_thoughts_that_are_not_asked_for(server, how):
    message, _, usage = ask(server, SAID, include_reasoning=False, **how)
    assert message["content"] == "Yes." and not {"reasoning_content", "reasoning"} & message.keys()
    assert usage["completion_tokens_details"]["reasoning_tokens"] > 10
    assert ask(server, SAID, include_reasoning=None, **how)[0]["reasoning"] == ask(server, SAID, include_reasoning=True, **how)[0]["reasoning"] == "Hm, é."


@pytest.mark.parametrize("how", [{}, STREAM])
def test_thoughts_that_the_template_turns_off(server, how):
    message, reason, usage = ask(server, "Yes.", chat_template_kwargs=dict(enable_thinking=False), **how)
    assert message["content"] == "Yes." and "reasoning" not in message and reason == "stop"
    assert usage["completion_tokens_details"] == dict(reasoning_tokens=0)


def test_several_answers_in_one_stream(server):
    """Each choice is whole, ends once, and the usage counts all."""
    server.script.ids = [*SAID.encode(), 257]
    [response] = server.ask((CHAT, dict(messages=HI, max_tokens=40, n=3, **STREAM)))
    events = events_of(response)
    for i in range(3):
        choices = [c for event in events for c in event["choices"] if c["index"] == i]
        text = "".join(c["delta"].get("content") or "" for c in choices)
        thoughts = "".join(c["delta"].get("reasoning") or "" for c in choices)
        assert (text, thoughts) == ("Yes.", "Hm, é.") and choices[0]["delta"]["role"] == "assistant"
        assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["stop"] and choices[-1]["finish_reason"]
    assert len({event["id"] for event in events}) == len({event["system_fingerprint"] for event in events}) == 1
    usage = events[-1]["usage"]
    assert events[-1]["choices"] == [] and usage["completion_tokens"] == 3 * (len(SAID.encode()) + 1)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert all(event["usage"] is None for event in events[:-1])


def test_usage_in_each_event(server):
    server.script.ids = [*SAID.encode(), 257]
    options = dict(include_usage=True, continuous_usage_stats=True)
    events = events_of(server.ask((CHAT, dict(messages=HI, max_tokens=40, stream=True, stream_options=options)))[0])
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == len(SAID.encode()) + 1
    plain = events_of(server.ask((CHAT, dict(messages=HI, max_tokens=40, stream=True)))[0])
    assert not any("usage" in event for event in plain)


def test_thoughts_go_back_to_the_template(server):
    """Under any of the names that clients send, or both."""
    server.tokenizer.chat_template = "{% for m in messages %}{{ m.reasoning_content }}{{ m.content }}{% endfor %}"
    try:
        for sent in (dict(reasoning="T"), dict(reasoning_content="T"), dict(reasoning_content="T", reasoning="T"), dict(reasoning="T", reasoning_content=None)):
            [response] = server.ask(("/apply-template", dict(messages=[*HI, dict(role="assistant", content="A", **sent)])))
            assert response.json()["prompt"] == "HiTA", response.text
    finally:
        server.tokenizer.chat_template = TURNS + OPENED
