"""One bad request and its neighbours: whatever raises in a shared call, the others' tokens are those of a quiet scheduler."""

import random
import time
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from test_serve_safety import random_model

import generate
from gpt_faster.decoding import scheduler as scheduling
from gpt_faster.decoding.engines import build_speculative
from gpt_faster.decoding.request_sampler import RequestParams, build_request_sampler
from gpt_faster.decoding.scheduler import Generation, RowsBatch, Scheduler
from gpt_faster.server.engine import Delivery, Engine, QueueFull
from gpt_faster.server.metrics import Metrics
from sampling import Processor
from tokenizer import NullTokenizer

BAD = 66                                           # in the prompt of a request that fails
N_NEW = 8


class Panic(BaseException):
    """As a Rust library's panic: no Exception."""


ERRORS = [RuntimeError("kernel"), MemoryError(), RecursionError(), OverflowError(), Panic("unwrap on None"), AssertionError()]


class Sabotage(Processor):
    """Raises for rows whose prompt has BAD: in begin(), observe() or forward(), after so many tokens."""

    def __init__(self, place, after, error):
        super().__init__()
        self.place, self.after, self.error, self.left = place, after, error, {}

    def begin(self, row, prompt, params):
        self.left.pop(row, None)
        self.use(row, BAD in prompt)
        if BAD in prompt:
            self.left[row] = self.after
            self.check("begin", after=0)

    def check(self, place, after=None):
        if self.place == place and any(n <= (self.after if after is not None else 0) for n in self.left.values()):
            raise self.error

    def observe(self, token):
        for row in self.left:
            self.left[row] -= 1
        self.check("observe")

    def forward(self, logits, rows, draft_tokens=None):
        self.check("forward")
        return logits


class Matcher:
    """A grammar that allows a third of the tokens after each one; a bad one raises in fill() or advance()."""

    def __init__(self, spec):
        self.place, self.after, self.error, self.last = *spec, 0

    def begin(self, prompt):
        pass

    def fill(self, words):
        if self.place == "fill" and self.after <= 0:
            raise self.error
        allowed = torch.zeros(len(words) * 32, dtype=torch.int64)
        allowed[self.last % 3::3] = 1
        bits = (allowed.view(-1, 32) << torch.arange(32)).sum(1)
        words.copy_(torch.where(bits >= 1 << 31, bits - (1 << 32), bits).int())

    def advance(self, i):
        self.after -= 1
        if self.place == "advance" and self.after <= 0:
            raise self.error
        self.last = i


def kinds():
    """Sampling parameters of neighbours, each of which leaves another state behind."""
    return [RequestParams(temperature=0), RequestParams(seed=5), RequestParams(temperature=0, frequency_penalty=1.5),
            RequestParams(seed=7, top_k=9, repetition_penalty=1.3), RequestParams(temperature=0, grammar=("good", 99, None)),
            RequestParams(seed=3, presence_penalty=1.0, logit_bias=((5, 3.0),), logprobs=True), RequestParams(seed=8, grammar=("good", 99, None))]


@pytest.fixture(scope="module")
def tiny_model():
    return random_model()


def late(tokens, not_finite=None):
    """read_late() as on a GPU: each call's tokens are read when the next one has begun."""
    waiting = deque()
    for token, tag in tokens:
        flags = None if not_finite is None else not_finite.clone()
        waiting.append((token.clone(), flags, tag))
        if len(waiting) > 1:
            token, flags, tag = waiting.popleft()
            yield generate._read(token, flags, None, tag)
    for token, flags, tag in waiting:
        yield generate._read(token, flags, None, tag)


def make(model, n_row, place=None, after=0, error=None, speculate=0):
    # a GPU's next step writes one position beyond; a round of drafts, more
    model.setup_cache(n_row, 96, 16, max_rejected=speculate + 2)
    sampler = build_request_sampler(model, n_row, torch.Generator().manual_seed(1), lambda p: Matcher(p.grammar) if getattr(p, "grammar", None) else None)
    if place in ("begin", "observe", "forward"):
        sampler.processors.append(Sabotage(place, after, error))
    batch = RowsBatch(model, sampler)
    if speculate:
        batch = build_speculative(model, sampler, generate.Steps(), "kv_cache", speculate, fixed=True)
    return Scheduler(batch, max_prefill=16, reuse=True)


def generations(prompts, params, place=None, after=0, error=None):
    tasks = []
    for prompt, each in zip(prompts, params):
        task = Generation(NullTokenizer(), prompt, max_new=N_NEW, params=each, n_top=2 if each.logprobs else None)
        if BAD in prompt and place in ("fill", "advance"):
            task.params = RequestParams(temperature=0, grammar=(place, after, error))
        if BAD in prompt and place in ("push", "take"):
            sabotage_text(task, place, after, error)
        tasks.append(task)
    return tasks


def sabotage_text(task, place, after, error):
    push, detokenizer = task.push, task.detokenizer

    def take():
        if len(task.ids) > after:
            raise error
        return ""

    def failing_push(i):
        if place == "push" and len(task.ids) >= after:
            raise error
        return push(i)
    task.push = failing_push
    if place == "take":
        task.detokenizer = SimpleNamespace(push=detokenizer.push, finish=getattr(detokenizer, "finish", str), take=take)


def run(slots, tasks, per_call=None):
    """-> ids and logprobs of each task, None where it failed. per_call: tasks arrive so many at a time."""
    failed, logprobs, left = set(), {task: [] for task in tasks}, deque(tasks)

    def arrive():
        for _ in range(per_call or len(tasks)):
            if left:
                slots.waiting.append(left.popleft())
    slots.poll = arrive
    arrive()
    while slots.waiting or left:
        for event in slots.run():
            if event.error:
                failed.add(event.generation)
            logprobs[event.generation] += [p.chosen for _, p in event.logprobs]
    assert not slots.running and not slots.prefilling and not slots.n_waiting()
    return [None if task in failed else (task.ids, logprobs[task]) for task in tasks]


def alone(model, prompts, params, speculate=0):
    return [run(make(model, 1, speculate=speculate), generations([prompt], [each]))[0] for prompt, each in zip(prompts, params)]


def check(model, g, place, after, error, n_row=5, n=11, n_bad=2, per_call=None, speculate=0, with_params=kinds):
    choices = with_params()
    prompts = [[g.randrange(100, 160) for _ in range(g.choice([3, 5, 20, 37]))] for _ in range(n)]
    params = [choices[i % len(choices)] for i in range(n)]
    bad = g.sample(range(n), n_bad)
    expected = alone(model, [p for i, p in enumerate(prompts) if i not in bad], [p for i, p in enumerate(params) if i not in bad], speculate)
    for i in bad:
        prompts[i][-1] = BAD
    got = run(make(model, n_row, place, after, error, speculate), generations(prompts, params, place, after, error), per_call)
    for i in range(n):
        if i in bad:
            assert got[i] is None, (place, after, error)
        else:
            ids, logprobs = expected.pop(0)
            assert got[i] is not None and got[i][0] == ids, (place, after, repr(error), i, params[i])
            assert got[i][1] == pytest.approx(logprobs, abs=1e-3)


PLACES = ["begin", "observe", "forward", "fill", "advance", "push", "take"]


@pytest.mark.parametrize("reads", ["at once", "late"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("seed", range(4))
def test_whatever_raises_the_neighbours_tokens_stay(tiny_model, monkeypatch, place, reads, seed):
    """In the first prefill, in a later chunk of it, in a step; the reads of tokens are pending as on a GPU."""
    if reads == "late":
        monkeypatch.setattr(scheduling, "read_late", late)
    g = random.Random(f"{place}{reads}{seed}")
    n, n_bad = (11, 2) if seed else (5, 1)         # seed 0 is for the quick tier
    check(tiny_model, g, place, g.choice([0, 1, 4]), g.choice(ERRORS), n=n, n_bad=n_bad, per_call=g.choice([None, 1, 3]))


@pytest.mark.parametrize("name", ["qwen3_5_text", "gemma3_text", "lfm2"])
@pytest.mark.parametrize("place", ["forward", "observe", "push"])
def test_states_and_rings_of_the_neighbours_stay(ours, name, place):
    g = random.Random(name + place)
    check(ours(name), g, place, g.choice([1, 3]), g.choice(ERRORS), n=7, per_call=g.choice([None, 2]), with_params=lambda: [RequestParams(temperature=0)])


@pytest.mark.parametrize("place", PLACES)
def test_the_next_request_after_one_that_failed_with_speculation(tiny_model, place):
    plain = [RequestParams(temperature=0), RequestParams(seed=4), RequestParams(seed=7, top_k=9, repetition_penalty=1.3)]
    g = random.Random(place)
    place = {"fill": "forward", "advance": "observe"}.get(place, place)     # no grammars with drafts
    check(tiny_model, g, place, g.choice([0, 3]), g.choice(ERRORS), n_row=1, n=5, speculate=3, with_params=lambda: plain)


def test_a_short_prompt_waits_for_one_chunk_of_a_long_one_and_a_long_one_is_not_starved(tiny_model):
    """Chunks of 16: the long prompts take 5 calls each; at most 8 calls of short ones go ahead of each, whatever comes."""
    slots, calls, progress = make(tiny_model, 4), [], []
    longs = generations([[100 + i] * 80 for i in range(2)], [RequestParams(temperature=0)] * 2)
    shorts = generations([[110 + i, 5] for i in range(40)], [RequestParams(temperature=0)] * 40)
    for task in shorts:
        task.max_new = 1
    prefill, waiting = slots._prefill_some, deque(shorts)

    def counted(active):
        result = prefill(active)
        calls.append([task for task in (*longs, *shorts) if task.n_prefilled])
        progress.append(sum(task.n_prefilled for task in longs))
        if waiting:
            slots.waiting.append(waiting.popleft())
        return result
    slots._prefill_some = counted
    slots.waiting.extend(longs)
    for _ in slots.run():
        pass
    came = [next(i for i, done in enumerate(calls) if task in done) for task in shorts]
    assert all(at - i <= 1 + i // 8 for i, at in enumerate(came)), came
    assert [len(task.ids) for task in longs] == [N_NEW] * 2
    assert all(b > a for a, b in zip(progress, progress[9:]) if a < 2 * 80), progress


class Slots:
    """The part of a Scheduler that the queue sees."""

    def __init__(self, n_row=1):
        self.batch, self.waiting, self.running, self.prefilling = SimpleNamespace(n_row=n_row), deque(), {}, {}

    def n_waiting(self):
        return len(self.waiting)


def test_many_choices_hold_up_no_other_request():
    """The i-th choice waits as long as a request that came i requests later; none is overtaken for ever."""
    engine = Engine(Slots(), 200, Metrics())

    def submit(name, n):
        new = generations([[1]] * n, [RequestParams(temperature=0)] * n)
        for i, task in enumerate(new):
            task.name, task.user_data = f"{name}{i}", Delivery(i, print, time.monotonic() + 100)
        engine.submit(new)
    submit("a", 5)
    engine._poll()
    submit("b", 1)
    submit("c", 2)
    engine._poll()
    submit("d", 1)
    engine._poll()
    assert [g.name for g in engine.slots.waiting] == ["a0", "a1", "b0", "a2", "c0", "a3", "c1", "d0", "a4"]
    with pytest.raises(QueueFull):
        submit("e", 200)


def test_ctrl_c_is_no_requests_fault(tiny_model):
    slots = make(tiny_model, 2, "forward", 0, KeyboardInterrupt())
    slots.waiting.extend(generations([[101, BAD], [102, 103]], [RequestParams(temperature=0)] * 2))
    with pytest.raises(KeyboardInterrupt):
        for _ in slots.run():
            pass

