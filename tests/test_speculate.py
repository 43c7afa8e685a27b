"""Speculative decoding gives what plain decoding gives: the same tokens, or draws from the same distribution."""

import copy
import functools
import itertools
import json
import types

import pytest
import torch
from conftest import GEMMA, SMOLLM2
from helpers import GREEDY, generated, ids_of, speculative
from test_errors import refused, run

import generate
import speculate
from gpt_faster import loading
from gpt_faster.decoding import engines
from gpt_faster.decoding.draft_length import DraftLengthController
from gpt_faster.decoding.ngram import NgramDrafter
from gpt_faster.decoding.samplers import build_sampler
from gpt_faster.formats.known_shapes import random_checkpoint
from gpt_faster.formats.load import load_model
from gpt_faster.kernels.compile import as_cuda_graph
from sampling import Sampler, SamplingParams
from speculate import FixedLength, ModelDrafter
from tokenizer import differ


def plain(model, ids, n, how=GREEDY):
    return [t.item() for t in generated(model, [ids], n, how)]


# ---- The distribution ----------------------------------------------------------------------------

class Chain:
    """A "model" whose next token depends on the last one only: a table of logits [V, V]."""

    def __init__(self, table):
        self.table, self.freq = table, torch.zeros(1)
        self.cfg = types.SimpleNamespace(vocab_size=len(table), context=64)
        self.max_batch_size, self.max_seq_length, self.longest_call = 1, 64, 64

    def modules(self):
        return []                                          # no state that could not go back

    def __call__(self, tokens, pos, keep=1, n_key=None, rows=None):
        logits = self.table[tokens]
        return logits[:, -keep:] if isinstance(keep, int) else logits[torch.arange(len(keep))[:, None], keep]


def exact(table, how, first, n):
    """Probability of each sequence of n tokens after `first`."""
    probs, ids = Sampler([how], len(table)).distribution(table)
    dense = probs if ids is None else torch.zeros_like(table).scatter(1, ids, probs)
    dense = dense / dense.sum(-1, keepdim=True)
    chance = {}
    for path in itertools.product(range(len(table)), repeat=n):
        p, last = 1.0, first
        for token in path:
            p, last = p * dense[last, token].item(), token
        chance[path] = p
    return chance


def chi_square(counts, chance, total):
    """-> the statistic in standard deviations above its mean; what cannot be must not have been."""
    assert all(chance[path] > 0 for path in counts)
    cells = [(counts.get(path, 0), p * total) for path, p in chance.items() if p * total > 5]
    rare = total - sum(n for n, _ in cells), total - sum(e for _, e in cells)
    cells += [rare] if rare[1] > 5 else []
    x, freedom = sum((n - e)**2 / e for n, e in cells), len(cells) - 1
    return (x - freedom) / (2 * freedom)**0.5


HOWS = SamplingParams(), SamplingParams(0.7, top_k=3), SamplingParams(1.3, top_p=0.8), SamplingParams(1, 4, 0.9, 0.1)


# By each way to filter and each draft; look-up, which is sure of its guesses, against all tokens and against candidates.
@pytest.mark.parametrize("how, draft", [(HOWS[0], "good"), (HOWS[0], "ngram"), (HOWS[1], "bad"), (HOWS[1], "ngram"),
                                        (HOWS[2], "other"), (HOWS[3], "bad")], ids=str)
def test_the_distribution_is_the_targets(how, draft):
    g = torch.Generator().manual_seed(7)
    table = torch.randn(4, 4, generator=g) * 1.5
    tables = dict(good=table + 0.3 * torch.randn(4, 4, generator=g), bad=-table, other=torch.randn(4, 4, generator=g))
    model = Chain(table)
    batch = speculative(model, 2, Chain(tables[draft]) if draft != "ngram" else None, True, how, g)
    total, counts, prompt = 1300, {}, [0, 1, 2, 3, 0, 0, 2, 1, 1, 3, 3, 2, 2, 0, 1, 2]
    for _ in range(total):
        path = tuple(ids_of(batch, prompt, 4))
        counts[path] = counts.get(path, 0) + 1
    assert chi_square(counts, exact(table, how, 2, 4), total) < 4.5
    assert sum(batch.accept_counts) > (total if draft != "ngram" else 100)
    assert len([n for n in batch.accept_counts if n]) > 1


def test_a_wrong_rule_would_be_noticed(monkeypatch):
    """Keeping every guess gives the draft's distribution."""
    original = speculate.accept
    monkeypatch.setattr(speculate, "accept", lambda p, q, x, on, chance, *more: original(p, q, x, on, chance * 0 - 1, *more))
    with pytest.raises(AssertionError):
        test_the_distribution_is_the_targets(SamplingParams(), "other")


def test_accept_by_hand():
    """p and q of one place: kept with probability min(1, p/q), replaced by what p has more of."""
    p, q = torch.tensor([[0.1, 0.6, 0.3], [0.2, 0.2, 0.6]]), torch.tensor([[0.5, 0.3, 0.2]])
    noise = torch.tensor([[9.0, 1.0, 2.0]])
    for guess, chance, expected in ((0, 0.19, [0, 2]), (0, 0.21, [1, 0]), (1, 0.99, [1, 2])):
        tokens, n = speculate.accept((p[None], None), (q[None], None), torch.tensor([[guess]]), torch.ones(1, 1, dtype=torch.bool),
                                     torch.tensor([[chance]]), lambda ids: noise, 3)
        assert tokens[0, :n + 1].tolist() == expected[:n + 1] and n == (2 if expected[1] else 1) - 1
    ids = torch.tensor([[1, 2], [2, 0]])                   # the same, as candidates with ids
    some = torch.tensor([[0.6, 0.4], [0.7, 0.3]])
    tokens, n = speculate.accept((some[None], ids[None]), (torch.ones(1, 1, 1), torch.tensor([[[0]]])), torch.tensor([[0]]),
                                 torch.ones(1, 1, dtype=torch.bool), torch.tensor([[0.0]]), lambda ids: torch.ones(1, 2), 3)
    assert n == 0 and tokens[0, 0] == 1                    # a guess outside of them is never kept


# ---- Greedily the same tokens --------------------------------------------------------------------

def another(model):
    """A model of the same shape and other weights."""
    torch.manual_seed(3)
    other = copy.deepcopy(model)
    for p in other.parameters():
        p.data = torch.randn_like(p) * p.std() if p.dim() > 1 else p.data
    return other


@pytest.mark.parametrize("name", ["llama3", "gemma3_text", "qwen3_moe", "gpt2", "mistral-window", "phi3-longrope", "deepseek_v2"])
@pytest.mark.parametrize("k, fixed", [(1, True), (4, True), (6, False)])
def test_tiny_models(ours, name, k, fixed):
    """By a bad draft, by the model itself, by look-up; over ring caches and over older entries."""
    model = ours(name)
    ids = torch.randint(0, 160, (9,), generator=torch.Generator().manual_seed(4)).tolist() * 2
    model.setup_cache(1, 64)
    expected = plain(model, ids, 40)
    itself = copy.deepcopy(model)
    for draft in (None, another(model), itself):
        model.setup_cache(1, 64, 18)
        batch = speculative(model, k, draft, fixed)
        for _ in range(2):                             # the second time over what the first one left
            assert ids_of(batch, ids, 40) == expected
        if draft is itself:
            counts = batch.accept_counts
            assert sum(counts[:-1]) == 0 and counts[-1] >= 2 * (39 // (k + 1) - k)
    how = SamplingParams(0, repetition_penalty=1.4)
    expected = plain(model, ids, 30, how)
    for draft in (None, itself):
        assert ids_of(speculative(model, k, draft, fixed, how), ids, 30) == expected


def test_the_context_ends_and_prompts_change(ours):
    """The cache is full in the middle of a round; and one row after another through one speculator."""
    model = ours("llama3")
    draft, ids = copy.deepcopy(model), list(range(20))
    model.setup_cache(1, 32)
    batch = speculative(model, 5, draft)
    for n in (1, 2, 3, 7, 12):
        assert ids_of(batch, ids, n) == plain(model, ids, n)
    got = [batch.prefill([0], [ids]).item()] + [batch.step().item() for _ in range(5)]
    got += [batch.prefill([0], [[5, 6, 7]]).item()] + [batch.step().item() for _ in range(9)]
    assert got == plain(model, ids, 6) + plain(model, [5, 6, 7], 10)


def test_a_prompt_that_goes_on(ours):
    """A chat's second turn: both caches keep what they have."""
    model, ids = ours("gemma3_text"), torch.randint(0, 160, (12,), generator=torch.Generator().manual_seed(4)).tolist()
    model.setup_cache(1, 64, 16)
    batch = speculative(model, 4, another(model))
    first = ids_of(batch, ids, 10)
    longer = ids + first[:-1] + [3, 1, 4]
    assert ids_of(batch, longer, 12, n_cached=len(ids) + 9) == plain(copy.deepcopy(model), longer, 12)


@pytest.mark.parametrize("back", range(1, 9))
def test_going_back_over_rejected_guesses(ours, back):
    """They were written too: of 12 - 1 positions a ring can go back, 3 less (session.run's rewind)."""
    model, ids = ours("mistral-window"), torch.randint(0, 160, (30,), generator=torch.Generator().manual_seed(4)).tolist()
    model.setup_cache(1, 64, 12)
    batch = speculative(model, 3, another(model), fixed=True)
    first = ids_of(batch, ids, 10)
    held = ids + first[:-1]
    turn = held[:len(held) - back] + [3, 1, 4]
    got = ids_of(batch, turn, 8, n_cached=len(held) - back)
    model.setup_cache(1, 64)
    assert got == plain(model, turn, 8)


def test_a_draft_that_knows_less(ours):
    """Fewer tokens than the ids in use; many candidates in the draw."""
    import dataclasses
    model, ids = ours("llama3"), [150, 3, 149, 159, 7]
    cfg = dataclasses.replace(model.cfg, vocab_size=100)
    small = type(model)(cfg)
    for p in small.parameters():
        torch.nn.init.normal_(p, std=0.05) if p.dim() > 1 else p.data.fill_(1)
    for k, how in ((3, GREEDY), (3, SamplingParams(1.0, top_k=90))):
        g = torch.Generator().manual_seed(1)
        batch = speculative(model, k, small.requires_grad_(False), True, how, g, length=32)
        got = ids_of(batch, ids, 20)
        assert how != GREEDY or got == plain(model, ids, 20)
        assert len(got) == 20 and batch.accept_stats()["rounds"] > 0


PROMPT = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n"


class SmolLM2:
    """The model and what drafts for it, for one engine: "compile" exchanges parts of both."""

    def __init__(self):
        self.model, _, self.tokenizer = loading.load_model(str(SMOLLM2), "cpu", torch.float32)
        self.itself = copy.deepcopy(self.model, {id(p): p for p in self.model.parameters()})
        self.draft = functools.cache(self._draft)

    def _draft(self, name):
        if name == "int8":
            return loading.load_model(str(SMOLLM2), "cpu", torch.float32, "int8")[0]
        if name == "stories15M":                           # of 32,000 tokens
            return load_model(random_checkpoint("stories15M"), torch.float32, "cpu")
        return self.itself if name == "itself" else None


@pytest.fixture(scope="module")
def smollm2():
    """engine -> SmolLM2"""
    return functools.cache(lambda engine: SmolLM2())


@pytest.fixture(scope="module")
def plainly():
    """n -> SmolLM2's first n tokens after PROMPT, by plain decoding."""
    @functools.cache
    def get(n):
        model, _, tokenizer = loading.load_model(str(SMOLLM2), "cpu", torch.float32)
        model.setup_cache(1, 256)
        return plain(model, tokenizer.encode(PROMPT), n)
    return get


@pytest.mark.parametrize("engine", ["kv_cache", "compile"])
@pytest.mark.parametrize("name", ["ngram", "int8", "stories15M", "itself"])
def test_smollm2(smollm2, plainly, name, engine, exhaustive, two_threads):
    """40 tokens, in the exhaustive tier 200."""
    it = smollm2(engine)
    model, draft, ids = it.model, it.draft(name), it.tokenizer.encode(PROMPT)
    n_new = 200 if exhaustive else 40
    expected = plainly(n_new)
    model.setup_cache(1, 256)
    steps = engines.build_steps(model, engine)
    sampler = build_sampler(model, [GREEDY])
    batch = engines.build_speculative(model, sampler, steps, engine, 5, False, draft)
    if engine == "compile":
        engines.warm_up(batch, [ids], range(len(ids) + 1, 256))
    assert ids_of(batch, ids, n_new) == expected
    accepted = batch.accept_counts
    if name == "int8":
        assert sum(accepted[3:]) > sum(accepted[:3])
    elif name == "stories15M":
        assert sum(accepted[1:]) < 5
    elif name == "itself":
        assert sum(accepted[:-1]) == 0 and accepted[-1] > 5


@pytest.mark.parametrize("how", [GREEDY, SamplingParams(0.8, 20, 0.9, 0.05, 1.3), SamplingParams(1.0)], ids=str)
def test_the_steps_trace(ours, how, monkeypatch):
    """As a GPU would capture them."""
    torch._dynamo.reset()
    model = ours("gemma3_text")
    draft = copy.deepcopy(model)
    ids, drawn = list(range(9)), []
    for traced in (False, True):
        steps = [speculate.draft_one_token, speculate.verify]
        if traced:
            with monkeypatch.context() as m:
                m.setattr(torch, "compile", lambda step, original=torch.compile, **more: original(
                    step, backend="aot_eager", **more))
                steps = [as_cuda_graph(step) for step in steps]
        model.setup_cache(1, 64, 16)
        sampler = build_sampler(model, [how], torch.Generator().manual_seed(5))
        batch = speculate.SpeculativeBatch(
            model, sampler, generate.Steps(), ModelDrafter(draft, steps[0]), FixedLength(3), 3, steps[1])
        drawn.append(ids_of(batch, ids, 20))
    assert drawn[0] == drawn[1]


# ---- How many to try -----------------------------------------------------------------------------

def test_pace():
    pace = controller([8, 2], {8: 3.0, 2: 1.5})
    assert [pace.next([0], 1) for _ in range(3)] == [2, 2, 2]          # 2.44 tokens for 1.5 steps, 4.33 for 3
    for _ in range(3):
        pace.learn({0: 2})
    for _ in range(9):                                     # all right: 9 for 3
        assert pace.next([0], 1) == 8
        pace.learn({0: 8})
    for _ in range(9):                                     # the first is right, and no other
        pace.next([0], 1)
        pace.learn({0: 1})
    assert pace.next([0], 1) == 2
    pace = controller([8, 2], {8: 3.0, 2: 1.5})
    found = follow(pace, lambda k, i: 0, 400)              # none is: after two a trial each 50 steps
    assert [i for i, k in enumerate(found) if k][:4] == [0, 1, 50, 100] and set(found) == {0, 2}
    found = follow(pace, lambda k, i: k, 200)              # right again: from the next trial on
    assert found.index(2) < 50 and found[found.index(2):].count(0) == 0 and found[-1] == 8
    pace.begin(0)                                          # another text: nothing is known of it
    assert pace.next([0], 1) == 2
    assert controller([8, 2], {8: 9.5, 2: 1.9}).lengths == [2]                 # what can never pay
    assert controller([8], {8: 9.5}).next([0], 1) == 0
    costs = {4: 3.3, 2: 2.5, 1: 1.7}                       # 0.8 of the drafts right: 3.36, 2.44, 1.8 tokens
    assert controller([4, 2, 1], costs, 0.8).lengths == [4, 1]
    assert controller([4, 2, 1], costs).lengths == [4, 2, 1]
    fixed = FixedLength(3)
    for n in (0, 0, 3, 0):
        fixed.learn({0: n})
        assert fixed.next([0], 1) == 3


def test_all_right_or_all_wrong():
    """As drafts of n-grams are: what a round gives is followed by position. One rate would expect 3.3 tokens."""
    pace = controller([8], {8: 2.9})
    for i in range(200):
        pace.next([0], 1)
        pace.k = 8
        pace.learn({0: 8 if i % 4 == 0 else 0})            # 1 + 8 / 4 = 3 on average
    means = []
    for i in range(4):
        means.append(pace.rates[0].expected[8])
        pace.rates[0].learn(8, 8 if i % 4 == 0 else 0)
    assert 2.4 < sum(means) / 4 < 3.2, means


@pytest.mark.parametrize("n_row", [1, 2, 4, 8])
def test_wrong_drafts_cost_little(n_row):
    """Of 200 steps of rows whose drafts are never right, or one in ten; and much is won where they are."""
    widths = {1: {8: 2.0, 3: 1.4}, 2: {8: 2.6, 3: 1.6}, 4: {8: 3.6, 3: 2.0}, 8: {8: 4.6, 3: 2.4}}
    for seed, share, least in ((0, 0.0, 0.97), (1, 0.1, 0.97), (2, 0.9, 1.5)):
        pace = DraftLengthController([8, 3], {n: widths[n] for n in widths if n <= n_row})
        for row in range(n_row):
            pace.begin(row)
        random, time, tokens = torch.Generator().manual_seed(seed), 0.0, 0
        while tokens < 200 * n_row:
            k, rows = pace.next(list(range(n_row)), n_row), torch.rand(n_row, generator=random) < share
            time += pace.cost(k, n_row) if k else 1
            tokens += n_row + k * int(rows.sum())
            if k:
                pace.learn({row: k * int(is_right) for row, is_right in enumerate(rows)})
        assert tokens / n_row / time > least, (share, tokens / n_row / time)


def follow(pace, n_right, n):
    """-> the lengths of n rounds of a row of whose drafts so many are right."""
    lengths = []
    for i in range(n):
        lengths.append(pace.next([0], 1))
        if lengths[-1]:
            pace.learn({0: n_right(lengths[-1], i)})
    return lengths


def controller(lengths, costs, *more):
    """At these costs for one row, whose text begins."""
    pace = DraftLengthController(lengths, {1: costs}, *more)
    pace.begin(0)
    return pace


def test_look_up():
    """The most recent place, and not the one that is being looked up."""
    def find(ids, n):
        history = torch.nn.functional.pad(torch.tensor([[9] * len(ids), ids]), (0, 45 - len(ids)))
        return NgramDrafter().find(history, torch.tensor([4, n])).tolist()[1]
    ids = [1, 2, 3, 7, 7, 1, 2, 3, 8, 9, 5, 1, 2, 3]
    assert [find(ids, n) for n in (14, 8, 3, 10, 2, 1)] == [8, 3, 0, 0, 0, 0]
    assert find([4] * 6, 6) == 5


# ---- The command line ----------------------------------------------------------------------------

ARGV = ["-m", SMOLLM2, "--device", "cpu", "--dtype", "float32", "--temperature", 0, "--prompt", PROMPT]


def test_json_and_statistics(capsys):
    status, out, _ = run(capsys, *ARGV, "--json", "--max_new_tokens", 30)
    expected = json.loads(out)
    for argv in (["--speculate", "ngram"], ["--speculate", "int8"], ["--draft_model", SMOLLM2, "--speculate_k", 3]):
        status, out, err = run(capsys, *ARGV, "--json", "--max_new_tokens", 30, *argv, "--compare")
        said = json.loads(out)
        assert status == 0 and said["new_ids"] == expected["new_ids"] and said["speedup"] > 0
        assert "decode steps" in err or "--speculate_k" in argv
        assert said["rounds"] == sum(said["accept_counts"]) and len(said["accept_counts"]) == said["speculate_k"] + 1
        if said["rounds"]:
            assert said["mean_accepted"] == pytest.approx(
                sum(i * n for i, n in enumerate(said["accept_counts"])) / said["rounds"])
            assert "Acceptance probs: [" in err and f"Mean Accepted: {said['mean_accepted']:.4f}" in err
    assert said["speculate"] == SMOLLM2.name and said["mean_accepted"] == 3


def test_stops_inside_a_guess(capsys):
    """A stop string and an end-of-sequence token among accepted guesses end at the right token."""
    argv = [*ARGV, "--max_new_tokens", 40]
    for more in (["--stop", "return a *"], ["--max_new_tokens", 7]):
        assert run(capsys, *argv, *more, "--draft_model", SMOLLM2, "--speculate_k", 8)[1] == run(capsys, *argv, *more)[1]
    argv = ["-m", SMOLLM2, "--device", "cpu", "--dtype", "float32", "--temperature", 0, "--chat", "--prompt", "Say OK.", "--json"]
    one, other = (json.loads(run(capsys, *argv, *more)[1]) for more in ([], ["--draft_model", SMOLLM2]))
    assert one["finish_reason"] == other["finish_reason"] == "stop" and one["new_ids"] == other["new_ids"]


def test_several_prompts_one_after_another(capsys):
    argv = [*ARGV, "--prompt", "Once upon a time", "--max_new_tokens", 20]
    assert run(capsys, *argv, "--speculate", "ngram")[1] == run(capsys, *argv)[1] != ""


def test_bad_input(capsys, monkeypatch):
    base = ["-m", SMOLLM2, "--device", "cpu"]
    for argv, words in (
            (["--draft_checkpoint_path", GEMMA], f"cannot draft for {SMOLLM2}: it has 262144 tokens, not 49152"),
            (["--draft_checkpoint_path", "/nowhere/x"], "/nowhere/x"),
            (["--speculate", "ngram", "--speculate_k", 0], "must be at least 1"),
            (["--speculate", "ngram", "--speculate_k", 9000], "--speculate_k 9000 does not fit into"),
            (["--speculate_k", 4], "require --draft_checkpoint_path or --speculate"), (["--compare"], "require --draft"),
            (["--speculate", "ngram", "--engine", "recompute"], "needs a KV cache"),
            (["--speculate", "ngram", "--draft_model", SMOLLM2], "mutually exclusive"),
            (["--speculate", "ngram", "--compare", "--interactive"], "--compare supports one prompt only")):
        assert words in refused(capsys, *base, *argv), argv
    argv = ["--random", "stories15M", "--device", "cpu", "--prompt", 5, "--speculate", "int8"]
    assert "cannot be combined with --random" in refused(capsys, *argv)


def test_vocabularies_that_differ_in_a_token():
    class Words:
        def __init__(self, *words):
            self.n_vocab, self.words = len(words), words

        def piece(self, i):
            return self.words[i]
    assert differ(Words("a", "b"), Words("a", "b")) is None
    assert differ(Words("a", "b"), Words("a", "c")) == "token 1 is 'c', not 'b'"
    assert differ(Words("a"), Words("a", "c")) == "it has 2 tokens, not 1"
