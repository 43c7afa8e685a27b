"""A grammar begins after a model's thoughts: by the matcher alone, over a real vocabulary."""

import random
import types

import pytest
from test_serve_schema import EOS, Walker, spec_of

from gpt_faster.text.reasoning import HARMONY, ThoughtFormat, separate, thoughts_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
PAIR = {"<think>": "</think>"}
FORMS = {"text": ThoughtFormat(PAIR, {}), "special": ThoughtFormat(PAIR, {5: "<think>", 6: "</think>"}),
         "harmony": ThoughtFormat({}, dict(zip(range(5, 5 + len(HARMONY)), HARMONY)), True)}


@pytest.fixture(scope="module")
def walker():
    return Walker()


def ids_of(walker, form, text):
    """With the markers that are special tokens."""
    ids, at = [], 0
    while at < len(text):
        for i, marker in form.shown.items():
            if text.startswith(marker, at):
                ids, at = [*ids, i], at + len(marker)
                break
        else:
            end = min([text.find(marker, at) for marker in form.shown.values() if marker in text[at:]], default=len(text))
            ids, at = ids + walker.tokenizer.backend.encode(text[at:end], special=False), end
    return ids


def after_thoughts(walker, form, prompt):
    matcher = walker.grammars.matcher_after_thoughts(spec_of(SCHEMA), form)
    matcher.begin(prompt)
    return matcher


def first_refused(walker, form, prompt, answer):
    """The text before the first token that is not allowed; None: all are, and then the end."""
    matcher = after_thoughts(walker, form, ids_of(walker, form, prompt))
    ids = ids_of(walker, form, answer)
    for i, token in enumerate(ids):
        if not walker.allowed(matcher)[token]:
            return walker.tokenizer.decode(ids[:i])
        if token != EOS:
            matcher.advance(token)
    return None


H = "<|start|>assistant"
ALLOWED = [
    ("text", "Q:", '<think>\nHm, {x} > 1: no JSON.\n</think>\n\n{"a": true}'), ("text", "Q:", '{"a": true}'), ("text", "Q: <think>\n", 'Hm.\n</think>\n\n{"a": true}'),
    ("text", "Q: <think>\n\n</think>\n\n", '{"a": false}'), ("text", "Q:", '<think></think>{"a": true}'), ("text", "Q:", "<think> 1 < 2, a</thin k>, </b> and so on"),
    ("special", "Q:", '<think>\nHm.\n</think>\n\n{"a": true}'), ("special", "Q:<think>", 'Hm. </think>{"a": true}'), ("special", "Q:", '{"a": true}'),
    ("harmony", H, '<|channel|>analysis<|message|>Hm {.<|end|><|start|>assistant<|channel|>final<|message|>{"a": true}'),
    ("harmony", H, '<|channel|>final<|message|>{"a": false}'),
    ("harmony", H, '<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"any": 1}'),
]


@pytest.mark.parametrize("form, prompt, answer", ALLOWED)
def test_thoughts_are_free(walker, form, prompt, answer):
    assert first_refused(walker, FORMS[form], prompt, answer) is None


REFUSED = [
    ("text", "Q:", "Well", ""), ("text", "Q:", "<b", None), ("text", "Q: <think>\n", "Hm.\n</think>\n\nWell", None), ("text", "Q: <think>\n\n</think>\n\n", "<think>", ""),
    ("special", "Q:<think>", "Hm.</think>Well", "Hm."), ("special", "Q:<think>", "Hm.</think>\n\n\n \n \n", None),
    ("harmony", H, "Well", ""), ("harmony", H, "<|channel|>final<|message|>Well", None), ("harmony", H, "<|channel|>analysis<|message|>Hm.<|end|>Well", None),
]


@pytest.mark.parametrize("form, prompt, answer, before", REFUSED)
def test_the_answer_is_constrained(walker, form, prompt, answer, before):
    refused = first_refused(walker, FORMS[form], prompt, answer)
    assert refused is not None and before in (None, refused)


@pytest.mark.parametrize("form", FORMS)
def test_thoughts_cannot_end_the_answer(walker, form):
    prompt, begin = ("Q:<think>", "") if form != "harmony" else (H, "<|channel|>analysis<|message|>")
    matcher = after_thoughts(walker, FORMS[form], ids_of(walker, FORMS[form], prompt))
    for token in ids_of(walker, FORMS[form], begin + "Hm"):
        matcher.advance(token)
        assert not walker.allowed(matcher)[EOS]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("form", ["text", "special"])
def test_whatever_is_drawn_the_answer_is_right(walker, form, seed):
    """The text that the splitter of answers returns is what the grammar says, at any thoughts."""
    rng, form = random.Random(seed), FORMS[form]
    prompt = ids_of(walker, form, "Q:<think>" if seed % 2 else "Q:")
    matcher = after_thoughts(walker, form, prompt)
    sequence = types.SimpleNamespace(prompt_ids=prompt, detokenizer=types.SimpleNamespace(tokenizer=walker.tokenizer))
    detokenizer, text = separate(sequence, form).detokenizer, ""
    end = ids_of(walker, form, "</think>")
    for step in range(120):
        allowed = walker.allowed(matcher).nonzero()[0]
        if EOS in allowed:
            break
        token = int(rng.choice(allowed))
        if step > 20 and not matcher.has_begun and end[0] in allowed:      # end the thoughts
            for token in end[:-1]:
                matcher.advance(token)
                text += detokenizer.push(token)
            token = end[-1]
        matcher.advance(token)
        text += detokenizer.push(token)
    assert text + detokenizer.flush() in ('{"a": true}', '{"a": false}')
    assert thoughts_of(sequence) is not None
