"""Rows that speculate together: each gives what it gives alone, whatever the others accept, and whoever joins or leaves."""

import copy
import functools
import itertools
import types

import pytest
import torch
from helpers import GREEDY
from test_speculate import HOWS, Chain, chi_square, exact

import speculate
from generate import NotFinite, Steps, generate
from gpt_faster.decoding.draft_length import DraftLengthController
from gpt_faster.decoding.engines import build_speculative, measure_drafts
from gpt_faster.decoding.request_sampler import RequestParams, build_request_sampler
from gpt_faster.decoding.samplers import build_sampler
from gpt_faster.decoding.scheduler import Generation, RowsBatch, Scheduler
from gpt_faster.layers.delta import GatedDelta
from gpt_faster.layers.mtp_head import MTPConfig, MTPHead
from model import ModelConfig, Transformer
from sampling import Processor, Sampler, SamplingParams
from speculate import FixedLength, ModelDrafter, SpeculativeBatch

V, LENGTH = 40, 96
BASE = dict(dim=32, n_layer=1, n_head=4, n_kv_head=2, head_dim=8, ffn_dim=48, vocab_size=V, context=LENGTH)
KINDS = dict(full={}, rings=dict(n_layer=2, window=(5, None)), recurrent=dict(n_layer=2, mixer=(GatedDelta(2, 4, 8, 8), None)))


def weights(module, seed):
    torch.manual_seed(seed)
    for name, p in module.named_parameters():
        if p.dim() > 1:
            p.data = torch.randn_like(p) * p.shape[-1]**-0.5 * 1.3
        else:
            p.data = torch.zeros_like(p) if "decay" in name else torch.ones_like(p)
    return module.requires_grad_(False)


@pytest.fixture(autouse=True)
def short_ngrams(monkeypatch):
    """Random text repeats few: one token is enough to look up."""
    monkeypatch.setattr("gpt_faster.decoding.ngram.NGRAM", 1)


@pytest.fixture(scope="module")
def models():
    """kind -> a model; and what drafts for it: one that is often right, an unrelated head, look-up."""
    every = {}
    for kind, more in KINDS.items():
        model = weights(Transformer(ModelConfig(**{**BASE, **more})), 1)
        near = copy.deepcopy(model)
        near.head.weight.data += 0.05 * torch.randn_like(near.head.weight)
        head = weights(MTPHead(MTPConfig(**{**BASE, "n_layer": 1, "vocab_size": 1})), 2)
        head.join(model)
        every[kind] = types.SimpleNamespace(model=model, near=near, mtp=head, ngram=None)
    return every


def prompts(n, seed=3):
    """Of different lengths; each repeats itself, for look-up."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(0, V, (3 + 4 * i % 11,), generator=g).tolist() * 2 for i in range(n)]


def batch_of(models, name, n_row, k=3, params=(GREEDY,), fixed=True, length=LENGTH, generator=None, kind=None):
    """A batch that speculates; name None: one that does not. kind: instead of SpeculativeRows."""
    model, params = models.model, [*params] * (n_row // len(params))
    model.setup_cache(n_row, length, 16, max_rejected=k)
    sampler = build_sampler(model, params, generator)
    if name is None:
        return RowsBatch(model, sampler)
    draft = getattr(models, name)
    if kind:
        return kind(model, sampler, Steps(), ModelDrafter(draft, max_rejected=k + 1), FixedLength(k), k)
    return build_speculative(model, sampler, Steps(), "kv_cache", k, fixed, draft)


def rows_of(batch, texts, n_new):
    """-> each row's new ids."""
    new = [[] for _ in texts]
    for token in generate(batch, texts, n_new):
        for ids, i in zip(new, token[:, 0].tolist()):
            ids += [i] if i >= 0 else []
    return new


def alone(models, texts, n_new, params=(GREEDY,), **more):
    """Without drafts, one after another."""
    params = [*params] * len(texts)
    return [rows_of(batch_of(models, None, 1, params=[each], **more), [text], n_new)[0]
            for text, each in zip(texts, params)]


# ---- Greedily the same tokens --------------------------------------------------------------------

@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["near", "mtp", "ngram"])
def test_rows_at_their_own_pace(models, kind, name):
    texts = prompts(4)
    expected = alone(models[kind], texts, 24)
    batch = batch_of(models[kind], name, 4)
    for _ in range(2):                                     # the second time over what the first one left
        assert rows_of(batch, texts, 24) == expected
    n_rounds, n_accepted = zip(*batch.row_stats)
    if name != "mtp":                                      # whose random head is always wrong
        assert len(set(n_accepted)) > 1 and sum(n > 0 for n in batch.accept_counts) > 1, batch.row_stats
    assert sum(n_rounds) > 8


@pytest.mark.parametrize("kind", ["full", "recurrent"])
def test_all_rows_in_each_call(models, kind):
    """As on a GPU: SpeculativeBatch itself runs idle rows too, and their drafts."""
    texts = prompts(4)
    batch = batch_of(models[kind], "near", 5, kind=SpeculativeBatch)
    assert rows_of(batch, texts, 20) == alone(models[kind], texts, 20)


def test_what_ended_does_not_run(models):
    """On a CPU a round has the rows in use only."""
    batch = batch_of(models["full"], "near", 4)
    batch.prefill([0, 2], prompts(2))
    calls, verify = [], batch.verify
    batch.verify = lambda model, token, *more: calls.append(len(token)) or verify(model, token, *more)
    batch.step()
    batch.end(2)
    while batch.has_ready:
        batch.step()
    batch.step()
    assert calls == [2, 1]


def test_the_cache_ends(models):
    """In one row before the others: it ends there, and drafts are not written past it."""
    texts = [*prompts(2), list(range(30))]
    expected = alone(models["full"], texts[:2], 20) + [alone(models["full"], texts[2:], 10)[0]]
    batch = batch_of(models["full"], "near", 3, length=40)
    new = rows_of(batch, texts, 20)
    assert new[:2] == expected[:2] and new[2][:10] == expected[2]


# ---- Slots ---------------------------------------------------------------------------------------

class Words:
    """A tokenizer of one letter an id."""

    class Detokenizer:
        def __init__(self):
            self.text = ""

        def push(self, i):
            return chr(65 + i)

        def flush(self):
            return ""

    def __init__(self):
        self.n_vocab = V

    def special_ids(self, text):
        return []

    def decode(self, ids):
        return "".join(chr(65 + i) for i in ids)

    def piece(self, i):
        return chr(65 + i)


def finished(slots, work, late=()):
    """Run them all -> the ids and reasons of each. late: those that come when the first has ended."""
    slots.waiting.extend(work)
    late = list(late)
    for event in slots.run():
        if event.finish_reason and late:
            slots.waiting.append(late.pop(0))
        assert not event.error, event.error
    return [(each.ids, each.finish_reason) for each in (*work, *late)]


@pytest.fixture
def plain_words(monkeypatch):
    monkeypatch.setattr("generate.Detokenizer", lambda tokenizer, ids: Words.Detokenizer())
    return Words()


def generations(tokenizer, texts, n_new=(9, 21, 14, 3, 17), params=(GREEDY,), **more):
    lengths, each = itertools.cycle(n_new), itertools.cycle(params)
    return [Generation(tokenizer, text, max_new=next(lengths), params=next(each), **more) for text in texts]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name, reuse", [("near", True), ("ngram", False), ("mtp", True)])
def test_sequences_join_and_leave(models, plain_words, kind, name, reuse):
    """More prompts than rows, of different lengths, some of which go on where another one ended; prompts in chunks."""
    texts = prompts(5)
    texts += [texts[1] + alone(models[kind], texts[1:2], 6)[0] + [7], texts[4] + [1, 2]]
    expected = [alone(models[kind], [text], n)[0] for text, n in zip(texts, itertools.cycle((9, 21, 14, 3, 17)))]
    batch = batch_of(models[kind], name, 3)
    work = generations(plain_words, texts)
    ended = finished(Scheduler(batch, max_prefill=8 if reuse else None, reuse=reuse), work[:5], work[5:])
    assert [each.ids for each in work] == expected and {reason for _, reason in ended} == {"length"}
    assert sum(batch.accept_counts) == sum(each.n_rounds for each in work) > 0
    assert sum(n * count for n, count in enumerate(batch.accept_counts)) == sum(each.n_accepted for each in work)
    if (name, kind) == ("near", "full"):
        assert sum(each.n_reused for each in work)


def test_stop_strings_and_end_tokens(models, plain_words):
    """Inside a round: what was accepted after it is not shown, and the row's next text is right."""
    texts = prompts(4)
    expected = alone(models["full"], texts, 20)
    work = []
    for text, ids in zip(texts, expected):
        stop = ids[7]
        work.append(Generation(plain_words, text, eos_ids={stop} if len(work) % 2 else set(),
                               stops=[] if len(work) % 2 else [chr(65 + stop)], max_new=20, params=GREEDY))
    finished(Scheduler(batch_of(models["full"], "near", 2)), work)
    for each, ids in zip(work, expected):
        assert each.finish_reason == "stop" and each.ids == ids[:ids.index(ids[7]) + 1]


# ---- Sampling ------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["near", "ngram"])
def test_a_rows_seed_decides_its_text(models, plain_words, name):
    """Alone and among others, in any row and at any time, with as many drafts a round."""
    params = [SamplingParams(1.0, seed=5), SamplingParams(0.7, 9, 0.9, 0.02, 1.3, seed=6), SamplingParams(0.0),
              SamplingParams(1.2, 5, seed=8), SamplingParams(0.9, top_n_sigma=1.5, seed=9)]
    texts, texts_alone = prompts(5), []
    for text, each in zip(texts, params):
        batch = batch_of(models["full"], name, 1, params=[each])
        texts_alone.append(rows_of(batch, [text], 18)[0])
    for order in (range(5), (3, 1, 4, 0, 2)):
        batch = batch_of(models["full"], name, 2, params=params[:1])
        batch.sampler = build_sampler(models["full"].model, [params[0]] * 2, None, params)
        work = generations(plain_words, [texts[i] for i in order], (18,), [params[i] for i in order])
        finished(Scheduler(batch), work)
        assert [each.ids for each in work] == [texts_alone[i] for i in order]
    assert len({tuple(ids) for ids in texts_alone}) == 5


def count_texts(how, name, total, n=3):
    """-> how often each text of row 0 and row 2 was drawn, and the chance of each. Row 1 is another chain's and greedy."""
    g = torch.Generator().manual_seed(7)
    table = torch.randn(4, 4, generator=g) * 1.5
    drafts = dict(bad=-table, other=torch.randn(4, 4, generator=g))
    model = Chain(table)
    model.max_batch_size = 3
    later = [how, GREEDY]
    sampler = Sampler([how, GREEDY, how], 4, generator=g, later=later)
    draft = Chain(drafts[name]) if name in drafts else None
    if draft:
        draft.max_batch_size = 3
    batch = build_speculative(model, sampler, Steps(), "kv_cache", 2, True, draft)
    counts = {}, {}
    texts = [[0, 1, 2, 3, 0, 0, 2, 1, 1, 3, 3, 2, 2, 0, 1, 2], [3, 1, 2, 3], [0, 3, 1, 1, 0, 3, 1, 3, 0, 2, 1, 3, 1, 2]]
    for _ in range(total):
        new = rows_of(batch, texts, n)
        for count, ids in zip(counts, (new[0], new[2])):
            count[tuple(ids)] = count.get(tuple(ids), 0) + 1
    assert len([n for n in batch.accept_counts if n]) > 1
    return counts, exact(table, how, 2, n)


def of_the_target(how, name, total=250):
    counts, chance = count_texts(how, name, total)
    for count in counts:
        assert chi_square(count, chance, total) < 4.5
    both = dict(counts[0])                                 # nor do rows that follow each other differ
    for path, n in counts[1].items():
        both[path] = both.get(path, 0) + n
    assert chi_square(both, chance, 2 * total) < 4.5


@pytest.mark.parametrize("how, name", [(HOWS[0], "other"), (HOWS[2], "ngram"), (HOWS[3], "bad")], ids=str)
def test_each_rows_distribution_is_the_targets(how, name):
    of_the_target(how, name)


def test_greedy_and_sampled_rows_share_a_round(models):
    """Of filters that differ, of which some give shortlists."""
    texts = prompts(3)
    params = [GREEDY, SamplingParams(1.0, 3, seed=1), SamplingParams(0.8, 0, 0.5, seed=2)]
    together = rows_of(batch_of(models["full"], "near", 3, params=params), texts, 16)
    assert together == [rows_of(batch_of(models["full"], "near", 1, params=[each]), [text], 16)[0]
                        for each, text in zip(params, texts)]


# ---- Processors ----------------------------------------------------------------------------------

PENALTIES = [RequestParams(temperature=0, repetition_penalty=1.3), RequestParams(temperature=0, frequency_penalty=0.4),
             RequestParams(temperature=0, presence_penalty=0.8, logit_bias=((3, 2.5), (9, -50.0))), RequestParams(temperature=0),
             RequestParams(temperature=0, frequency_penalty=-0.3, repetition_penalty=0.9)]


class EveryThird:
    """A grammar: after the id i only i + 1, i + 4, i + 7, …"""

    def begin(self, prompt):
        self.last = prompt[-1]

    def advance(self, i):
        assert i % 3 == (self.last + 1) % 3
        self.last = i

    def fill(self, words):
        allowed = [i for i in range(V) if i % 3 == (self.last + 1) % 3]
        words.zero_()
        for i in allowed:
            words[i // 32] |= (1 << i % 32) - (1 << 32 if i % 32 == 31 else 0)


def request_batch(models, name, n_row, k=3):
    batch = batch_of(models, name, n_row, k)
    batch.sampler = build_request_sampler(
        models.model, n_row, None, lambda params: EveryThird() if getattr(params, "grammar", None) else None, k)
    return batch


@pytest.mark.parametrize("name", ["near", "ngram"])
def test_penalties_see_the_drafts(models, plain_words, name):
    texts, found = prompts(5), []
    for drafts, n_row in ((None, 1), (name, 3)):
        work = generations(plain_words, texts, (18,), PENALTIES)
        batch = request_batch(models["full"], drafts, n_row)
        finished(Scheduler(batch), work)
        found.append([each.ids for each in work])
    assert found[0] == found[1] and found[0] != alone(models["full"], texts, 18)
    assert sum(n * count for n, count in enumerate(batch.accept_counts)) > 5


def test_a_row_with_a_grammar_has_no_drafts(models, plain_words):
    """And the others have them; when it is gone, so has its row."""
    texts, found = prompts(5), []
    params = [RequestParams(temperature=0, grammar=("regex", "") if i in (1, 2) else None) for i in range(5)]
    for name, n_row in ((None, 1), ("near", 2)):
        work = generations(plain_words, texts, (12, 20), params)
        finished(Scheduler(request_batch(models["full"], name, n_row)), work)
        found.append([each.ids for each in work])
    assert found[0] == found[1]
    assert [each.n_rounds > 0 for each in work] == [True, False, False, True, True]


@pytest.mark.parametrize("name", ["near", "ngram"])
def test_logprobs_are_those_of_each_token(models, plain_words, name):
    """Of each place of a round."""
    texts, found = prompts(4), []
    for drafts, n_row in ((None, 1), (name, 3)):
        slots = Scheduler(request_batch(models["full"], drafts, n_row))
        slots.waiting.extend(generations(plain_words, texts, (14,), [RequestParams(temperature=0, logprobs=True)], n_top=2))
        logprobs = {}
        for event in slots.run():
            for i, each in event.logprobs:
                logprobs.setdefault(tuple(event.generation.prompt_ids), []).append((i, each))
        found.append([logprobs[tuple(text)] for text in texts])
    for one, other in zip(*found):
        assert [i for i, _ in one] == [i for i, _ in other]
        for (_, a), (_, b) in zip(one, other):
            assert a.chosen == pytest.approx(b.chosen, abs=1e-4) and [i for i, _ in a.top] == [i for i, _ in b.top]
            assert [p for _, p in a.top] == pytest.approx([p for _, p in b.top], abs=1e-4)


class Poison(Processor):
    """One row's logits are invalid after some tokens, or its call raises."""

    def __init__(self, id_, error=None):
        super().__init__()
        self.id, self.error, self.rows = id_, error, set()

    def begin(self, row, prompt, params):
        self.rows.discard(row)
        if prompt and prompt[0] == self.id:
            self.rows.add(row)

    def forward(self, logits, rows, draft_tokens=None):
        return logits


def test_invalid_logits_end_their_row_only(models, plain_words):
    texts = prompts(3)
    texts[1][0] = 39
    expected = alone(models["full"], texts, 15)
    batch = batch_of(models["full"], "near", 3)
    original, row = batch.verify, []

    def verify(model, *args):
        tokens, count = original(model, *args)
        if row:
            batch.sampler.not_finite[row[0]] = torch.nan
        return tokens, count
    batch.verify = verify
    slots = Scheduler(batch, max_prefill=64)
    work = generations(plain_words, texts, (15,))
    slots.waiting.extend(work)
    errors = []
    for event in slots.run():
        if event.generation is work[1] and len(work[1].ids) == 4:
            row[:] = [event.row]
        if event.error:
            errors.append((event.generation, event.error))
            row.clear()
    assert [each for each, _ in errors] == [work[1]] and isinstance(errors[0][1], NotFinite)
    assert work[0].ids == expected[0] and work[2].ids == expected[2]


def test_a_call_that_raises_starts_its_rows_again(models, plain_words):
    """What they have is replayed without drafts, and goes on as if nothing had been."""
    texts = prompts(4)
    expected = alone(models["full"], texts, 15)
    batch = batch_of(models["full"], "near", 4)
    original, n = batch.verify, itertools.count()

    def verify(*args):
        if next(n) == 2:
            raise RuntimeError("out of luck")
        return original(*args)
    batch.verify = verify
    slots = Scheduler(batch, max_prefill=64)
    work = generations(plain_words, texts, (15,))
    finished(slots, work)
    assert [each.ids for each in work] == expected


# ---- Costs ---------------------------------------------------------------------------------------

def test_a_round_reads_the_device_once(models, monkeypatch):
    """By the plain sampler: the CPU's own looks at the parameters on the host."""
    reads = []
    for name in ("near", "ngram"):
        batch = batch_of(models["full"], name, 3)
        batch.sampler = Sampler([GREEDY] * 3, V)
        batch.prefill([0, 1, 2], prompts(3))
        counted = []
        with monkeypatch.context() as m:
            for method in ("tolist", "item", "__int__", "__bool__", "__float__"):
                original = getattr(torch.Tensor, method)
                m.setattr(torch.Tensor, method, lambda t, original=original: reads.append(t) or original(t))
            for _ in range(12):
                is_round = not batch.has_ready
                reads.clear()
                batch.step()
                counted.append((is_round, len(reads)))
        assert set(counted) == {(True, 1), (False, 0)}


def test_lengths_follow_cost_and_rows():
    """Drafts that pay in one row and not in eight, or not when one of eight has any."""
    pace = DraftLengthController([4, 1], {1: {4: 1.5, 1: 1.2}, 2: {4: 2.0, 1: 1.3}, 8: {4: 5.5, 1: 1.9}})
    for row in range(8):
        pace.begin(row)
    assert pace.next([0], 1) == pace.next([0, 1], 2) == 4
    assert pace.next([0], 2) == 4                          # 1 + 2.4 / 2 tokens for 2.0 steps
    assert pace.next(list(range(8)), 8) == pace.next(list(range(5)), 5) == 1   # at a cost of 8 rows
    assert pace.next([0], 8) == 0
    for _ in range(6):                                     # one of two rows is always wrong
        assert pace.next([0, 1], 2) == 4                   # 1 + 4 / 2 tokens for 2.0 steps
        pace.learn({0: 0, 1: 4})
    assert pace.rates[0].expected[1] < 1.2 and pace.rates[1].expected[4] > 4.5
    pace.credit = 0.0
    assert pace.next([0], 1) == 0 and pace.next([1], 1) == 4   # a pause is of those that were wrong
    pace.begin(0)
    assert pace.rates[0].expected[4] == pytest.approx(1 + 0.8 + 0.64 + 0.512 + 0.4096)


def test_a_pause_is_a_plain_round():
    """Where nothing is looked up, whichever rows could draft would not; and hopeless rows do pause."""
    n_row = 4
    pace = DraftLengthController([8, 3], {1: {8: 2.0, 3: 1.4}, 2: {8: 2.6, 3: 1.6}, 4: {8: 3.6, 3: 2.0}})
    for row in range(n_row):
        pace.begin(row)
    random, n_paused = torch.Generator().manual_seed(0), 0
    for i in range(400):
        subset = [row for row in range(n_row) if torch.rand((), generator=random) < 0.6]
        subset = subset or [i % n_row]
        if pace.paused:
            n_paused += 1
            assert all(copy.deepcopy(pace).next([*rows], n_row) == 0 for n in range(1, n_row + 1)
                       for rows in itertools.combinations(range(n_row), n))
            subset = []
        if pace.next(subset, n_row):
            pace.learn({row: int(row == 0 and i < 40) * pace.k for row in subset})
    assert 200 < n_paused < 400


def test_a_row_that_ended_keeps_no_other_searching():
    pace = DraftLengthController([3], {1: {3: 2.0}, 2: {3: 2.0}})
    for row in range(2):
        pace.begin(row)
    for _ in range(50):                                    # row 0's drafts are right, row 1's wrong
        if pace.next([0, 1], 2):
            pace.learn({0: 3, 1: 0})
    pace.next([], 2)
    assert not pace.paused
    pace.end(0)
    pace.credit = 0.0
    assert pace.paused


def test_measured_for_each_width(models):
    for name in ("near", "mtp", "ngram"):
        batch = batch_of(models["full"], name, 4, fixed=False)
        costs = measure_drafts(batch, 20)
        assert list(costs) == [1, 2, 4] and all(c > 0 for of_width in costs.values() for c in of_width.values())
        assert rows_of(batch, prompts(4), 10) == alone(models["full"], prompts(4), 10)


def test_a_grammars_row_that_ended_does_not_go_on(models, plain_words):
    """Without drafts too: its last token is not new in each of the others' steps."""
    params = [RequestParams(temperature=0, grammar=("regex", ""))]
    for name in (None, "near"):
        work = generations(plain_words, prompts(3), (5, 20, 9), params)
        finished(Scheduler(request_batch(models["full"], name, 3)), work)
        assert [len(each.ids) for each in work] == [5, 20, 9]


# ---- The commands and the server -----------------------------------------------------------------

def test_the_servers_counters(models, plain_words):
    from gpt_faster.server.engine import Delivery, Engine
    from gpt_faster.server.metrics import Metrics
    slots = Scheduler(batch_of(models["full"], "near", 3), max_prefill=16, reuse=True)
    work = generations(plain_words, prompts(5))
    for i, each in enumerate(work):
        each.user_data = Delivery(i, lambda event: None, float("inf"))
    engine = Engine(slots, 8, Metrics())
    engine.submit(work)
    engine.drain()
    engine.run()
    text = engine.metrics.text().decode()
    n_rounds, n_accepted = sum(each.n_rounds for each in work), sum(each.n_accepted for each in work)
    assert n_accepted > 4 and f"gpt_faster_draft_rounds_total {n_rounds:.1f}\n" in text
    assert f"gpt_faster_accepted_draft_tokens_total {n_accepted:.1f}\n" in text


COPIES = "red blue red blue red blue red", "1 2 3 1 2 3 1 2", "Once upon a time"


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """generate.py's texts of COPIES, two at a time, with these flags -> results by id, and of copies of the first, by row."""
    import json

    from conftest import SMOLLM2
    from test_errors import run
    file = tmp_path_factory.mktemp("rows") / "prompts.txt"
    file.write_text("\n".join(COPIES))
    base = ("-m", SMOLLM2, "--device", "cpu", "--dtype", "float32", "--temperature", 0, "--json", "--max_new_tokens", 12)

    @functools.cache
    def get(capsys, *flags):
        outs = []
        for more in (("--prompts_file", file, "--batch_size", 2), ("--prompt", COPIES[0], "--batch_size", 2)):
            status, out, err = run(capsys, *base, *more, *flags)
            assert status == 0, err
            outs.append([json.loads(line) for line in out.splitlines()])
        return sorted(outs[0], key=lambda each: each["id"]), outs[1]
    return get


@pytest.mark.parametrize("flags", [("--speculate", "ngram", "--speculate_k", 4), ("--speculate", "ngram"), ("--draft_model", "itself", "--speculate_k", 2)],
                         ids=str)
def test_the_command(said, capsys, flags):
    from conftest import SMOLLM2
    flags = [SMOLLM2 if flag == "itself" else flag for flag in flags]
    (expected, copies), (found, rows) = said(capsys), said(capsys, *flags)
    assert [each["new_ids"] for each in found] == [each["new_ids"] for each in expected]
    assert [each["new_ids"] for each in rows] == [each["new_ids"] for each in copies] and len(rows) == 2
    assert "rounds" not in expected[0] and "row_rounds" not in copies[0]
    if "--speculate_k" in flags:
        assert all(each["rounds"] for each in found[:2]) and all(each["row_accepted"] > 2 for each in rows)
    assert rows[0]["rounds"] == sum(rows[0]["accept_counts"]) == sum(each["row_rounds"] for each in rows)


# ---- Planted faults ------------------------------------------------------------------------------

def another_rows_length(tokens, n):
    return tokens, n.flip(0)


def the_longest_length(tokens, n):
    return tokens, n.amax().expand_as(n)


@pytest.mark.parametrize("fault", [another_rows_length, the_longest_length])
def test_a_wrong_length_would_be_noticed(models, monkeypatch, fault):
    original = speculate.accept
    monkeypatch.setattr(speculate, "accept", lambda *args: fault(*original(*args)))
    with pytest.raises(AssertionError):
        test_rows_at_their_own_pace(models, "full", "near")


def test_a_stale_position_would_be_noticed(models, monkeypatch):
    """Of one row."""
    original = speculate.verify

    def verify(model, token, drafts, probs, ids, pos, *more):
        late = (torch.arange(len(pos)) == 1)[:, None].long()
        return original(model, token, drafts, probs, ids, pos - late, *more)
    monkeypatch.setattr(speculate, "verify", verify)
    with pytest.raises(AssertionError):
        test_rows_at_their_own_pace(models, "full", "near")


@pytest.mark.parametrize("method", ["chance", "noise"])
def test_another_rows_noise_would_be_noticed(models, monkeypatch, plain_words, method):
    original = getattr(Sampler, method)

    def of_row_0(self, rows, *more, **options):
        return original(self, rows * 0 if isinstance(rows, torch.Tensor) else rows, *more, **options)
    monkeypatch.setattr(Sampler, method, of_row_0)
    with pytest.raises(AssertionError):
        test_a_rows_seed_decides_its_text(models, plain_words, "near")
