"""What mutants survived all other tests (tests/mutants.py), room by room: one small test for each."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers import GREEDY, make_batch

from generate import Sequence, Steps, decode_one_token, generate
from gpt_faster.decoding.request_sampler import GREEDY as GREEDY_REQUEST
from gpt_faster.decoding.request_sampler import RequestParams, build_request_sampler
from gpt_faster.decoding.scheduler import Event, Generation, RowsBatch, Scheduler
from gpt_faster.server.answers import ChatAnswer
from gpt_faster.server.parsing import TOOL_FORMATS, AnswerParser
from gpt_faster.server.prepare import PreparedRequest, RequestPreparer
from sampling import Sampler, SamplingParams, keep_top_k
from tokenizer import NullTokenizer

# ---- The core -----------------------------------------------------------------------------------

def test_few_keys_at_a_time_are_all_keys(ours):
    """A step attends to as many positions as the longest row has, its new token counted: 1 to 32 of them here."""
    model, generator, spared = ours("llama3"), torch.Generator().manual_seed(4), set()
    prompts = [torch.randint(0, 160, (n,), generator=generator).tolist() for n in (1, 3, 2)]
    model.setup_cache(0, 40)
    expected = []
    for ids in map(list, prompts):
        for _ in range(30):
            ids.append(model(torch.tensor([ids]), torch.arange(len(ids)))[0, -1].argmax().item())
        expected.append(ids[-30:])

    def decode(model, token, pos, kv_len, sampler):
        assert kv_len > pos.max()
        spared.add(kv_len)
        return decode_one_token(model, token, pos, kv_len, sampler)
    model.setup_cache(3, 40)
    batch = make_batch(model, [GREEDY] * 3, steps=Steps(decode=decode, min_kv_len=1))
    assert torch.cat(list(generate(batch, prompts, 30)), dim=1).tolist() == expected
    assert spared == {4, 8, 16, 32}


def test_a_context_is_used_to_its_last_position_and_no_further(ours):
    model = ours("llama3")
    model.setup_cache(1, 12)
    assert len(list(generate(make_batch(model, [GREEDY]), [[1, 2, 3]], 9))) == 9
    with pytest.raises(ValueError, match="3 . 10 tokens exceed 12"):
        next(generate(make_batch(model, [GREEDY]), [[1, 2, 3]], 10))


# ---- Sampling -----------------------------------------------------------------------------------

def test_as_many_tokens_stay_as_each_rows_top_k_says():
    """Where rows differ: the filter. 0 is off, and more than there are is all."""
    probs = torch.rand(5, 12, generator=torch.Generator().manual_seed(1)).softmax(-1)
    top_k = torch.tensor([[1.0], [2.0], [7.0], [0.0], [40.0]])
    assert keep_top_k(probs, top_k, 40).sum(-1).tolist() == [1, 2, 7, 12, 12]
    rows = [SamplingParams(top_k=int(k)) for k in top_k]
    drawable, ids = Sampler(rows, 12).distribution(probs.log())
    assert ids is None and (drawable > 0).sum(-1).tolist() == [1, 2, 7, 12, 12]


def test_a_row_without_a_seed_has_one_of_the_batchs_generator():
    """Whatever seed the row's last sequence had."""
    seeded, unseeded = SamplingParams(seed=3), SamplingParams()

    def seed(*sequences):
        sampler = Sampler([unseeded], 8, generator=torch.Generator().manual_seed(1), later=[seeded])
        for params in sequences:
            sampler.begin(0, [], params)
        return sampler.seeds.item()
    assert seed(seeded, unseeded) == seed(unseeded) != seed(seeded) == seed(unseeded, seeded)


class OnlyToken:
    """A grammar that lets a row have one token."""

    def __init__(self, i):
        self.i = i

    def begin(self, prompt):
        pass

    def fill(self, words):
        words.zero_()
        words[self.i // 32] = 1 << self.i % 32


def test_a_rows_next_sequence_begins_without_what_the_last_one_asked_for(ours):
    """Bias, counts, seen tokens and grammar of a request; and what is asked for again counts from nothing."""
    wishes = dict(bias=dict(logit_bias=((5, 3.0),)), presence=dict(presence_penalty=1.0), seen=dict(repetition_penalty=2.0),
                  frequency=dict(frequency_penalty=1.0), grammar=dict(grammar=("regex", "x")))
    logits = torch.arange(160.0)[None] / 160 + 1
    for name, more in wishes.items():
        sampler = build_request_sampler(ours("llama3"), 1, None, lambda params: OnlyToken(7) if params.grammar else None)

        def changed(rows=slice(None), sampler=sampler):
            result = logits
            for processor in sampler.processors:
                result = processor(result, rows)
            return not torch.equal(result, logits)
        sampler.begin(0, [9], RequestParams(**more))
        if name != "grammar":
            sampler.observe(torch.tensor([[8]]))
        assert changed(), name
        sampler.begin(0, [], GREEDY_REQUEST)
        assert not changed(), name
        sampler.begin(0, [], RequestParams(**more))
        assert changed() == (name in ("bias", "grammar")), name


def test_a_requests_temperature_divides(ours):
    """Next to 0 it is greedy; so large, that all tokens are as likely."""
    logits = torch.zeros(200, 160).index_fill(1, torch.tensor([11]), 5.0)
    sampler = build_request_sampler(ours("llama3"), 200, torch.Generator().manual_seed(2), lambda params: None)

    def share(temperature, **more):
        for row in range(200):
            sampler.begin(row, [], RequestParams(temperature=temperature, **more))
        return (sampler(logits) == 11).float().mean()
    for more in (dict(), dict(top_p=0.99)):
        assert share(0.1, **more) == 1 and share(100.0, **more) < 0.2


# ---- Where a sequence ends ----------------------------------------------------------------------

@pytest.mark.parametrize("stops", [["one", "two"], ["two", "one"]])
def test_the_first_of_two_stop_strings_in_one_token_counts(stops):
    tokenizer = SimpleNamespace(decode=lambda ids: "".join(["none ", "of one or two "][i] for i in ids), special_ids=lambda text: [])
    sequence = Sequence(tokenizer, [0], stops=stops)
    assert sequence.push(1) == sequence.text == "of " and sequence.finish_reason == "stop"


# ---- Slots --------------------------------------------------------------------------------------

def answers(model, *prompts, keep=True):
    """One after another in one slot -> each one's new ids, and how many of its prompt's tokens were in the cache."""
    model.setup_cache(1, 64, 8)
    slots = Scheduler(RowsBatch(model, build_request_sampler(model, 1, None, lambda params: None)), max_prefill=8, reuse=True)
    tasks = [Generation(NullTokenizer(), ids, max_new=5, params=GREEDY_REQUEST) for ids in prompts]

    def fails_at_its_end(token_id, task):
        Generation.push(task, token_id)
        if task.finish_reason:
            raise RuntimeError("an odd id")
    for task in tasks:
        if not keep:
            task.push = partial(fails_at_its_end, task=task)
        slots.waiting.append(task)
        for _ in slots.run():
            pass
    return [(task.ids, task.n_reused) for task in tasks]


def test_a_conversation_goes_on_from_all_but_its_last_token(ours):
    """Which was given and never run; what follows is what a fresh row says. After an error nothing is known of the row."""
    model = ours("llama3")
    [(first, _)] = answers(model, [1, 2, 3])
    longer, other = [1, 2, 3, *first, 9, 8], [1, 2, 7, 8]
    for ids, n_reused in ((longer, 3 + 5 - 1), (other, 2)):
        [(alone, _)] = answers(model, ids)
        assert answers(model, [1, 2, 3], ids) == [(first, 0), (alone, n_reused)]
        assert answers(model, [1, 2, 3], ids, keep=False) == [(first, 0), (alone, 0)]


@pytest.mark.parametrize("name, n_back", [("mistral-window", 12), ("qwen3_5_text", 1)])
def test_a_row_is_not_gone_on_from_where_its_cache_has_given_that_away(ours, name, n_back):
    """A ring has the keys of its window and of a call; a state, those after its last positions only."""
    model, prompt = ours(name), list(range(1, 31))
    [(first, _)] = answers(model, prompt)
    known = prompt + first[:-1]
    follow = [*known[:-n_back], 155, 156]
    [(alone, _)] = answers(model, follow)
    assert answers(model, prompt, follow) == [(first, 0), (alone, 0)]


# ---- The server, without a process of it --------------------------------------------------------

@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_an_answer_is_all_that_was_said_and_why_it_ended(stream, reason):
    """The text ends in what may begin a call: it is held back until the answer's end, and then said."""
    tools = [dict(type="function", function=dict(name="f"))]
    task = SimpleNamespace(finish_reason=None, prompt_ids=[1, 2], ids=[3], n_reused=0, user_data=SimpleNamespace(index=0))
    work = PreparedRequest([task], True, 1, parsers=[AnswerParser(TOOL_FORMATS["hermes"], tools)])
    asked = SimpleNamespace(stream=stream, stream_options=None, logprobs=None)
    answer = ChatAnswer(SimpleNamespace(name="m", fingerprint="fp_1"), asked, work)
    choices = [sent["choices"][0] for event in (Event(task, text="Look: <tool"), Event(task, text="_ca", finish_reason=reason))
               for sent in answer.add(event)]
    if stream:
        assert "".join(choice["delta"].get("content", "") for choice in choices) == "Look: <tool_ca"
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == [reason]
    else:
        [choice] = answer.whole()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("Look: <tool_ca", reason)


def test_answers_have_their_own_seeds_and_the_lengths_asked_for():
    model = SimpleNamespace(session=SimpleNamespace(drafter=None, eos_ids={0}), tokenizer=NullTokenizer(), limit=20,
                            params=lambda *asked: RequestParams(seed=5), check_prompt=lambda ids: None, report_unknown=lambda asked: {}, n_vocab=9)
    asked = SimpleNamespace(stop=None, stop_token_ids=None, stream=None, stream_options=None, n=2, ignore_eos=None)
    for limit, n_new in ((4, 4), (1, 1), (17, 17), (None, 17)):
        tasks = RequestPreparer.build(model, asked, [[1, 2, 3]], limit, None, None).generations
        assert [task.max_new for task in tasks] == [n_new] * 2 and [task.params.seed for task in tasks] == [5, 6]


def test_json_is_a_call_only_where_the_models_format_says_so():
    tools = [dict(type="function", function=dict(name="f"))]
    text = '{"name": "f", "arguments": {}, "parameters": {}}'
    for name, form in TOOL_FORMATS.items():
        parser = AnswerParser(form, tools)
        deltas = [*parser.push(text), *parser.finish("stop")]
        is_call = any("tool_calls" in delta for delta in deltas)
        assert is_call == (name in ("llama", "gemma", "pythonic")), name
