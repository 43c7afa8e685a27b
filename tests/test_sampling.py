"""Sampling draws what a reference that sorts draws from the same noise, and what transformers keeps."""

import math
import random
from dataclasses import dataclass

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import sampling
from gpt_faster.decoding import samplers
from gpt_faster.decoding.request_sampler import ANY_PARAMS, RequestParams
from gpt_faster.decoding.samplers import DeviceSampler, ShortlistSampler
from gpt_faster.kernels import torch_internals
from gpt_faster.kernels.cpu import native
from gpt_faster.kernels.cpu.draw import likeliest
from sampling import (
    FILTERS,
    MOST_SORTED,
    RepetitionPenalty,
    Sampler,
    SamplingParams,
    draw,
    exponential,
    keep_likeliest,
    keep_top_k,
    keep_top_n_sigma,
    keep_top_p,
    uniform,
)

SETTINGS = [SamplingParams(t, k, p, m) for t in (0.3, 1.0, 1.7) for k in (0, 1, 5, 40, 500)
            for p in (1.0, 0.95, 0.5, 0.05) for m in (0.0, 0.1)]


def sampler(params, n_row=16, n_vocab=300, generator=None):
    return Sampler([params] * n_row, n_vocab, generator=generator)


EVERY, POS = slice(None), torch.tensor([5])
assert native.is_available()                       # so that a ShortlistSampler draws by draw.h


class ShortlistWithoutKernel(ShortlistSampler):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.may_use_kernel = False


KINDS = [Sampler, ShortlistSampler, ShortlistWithoutKernel, DeviceSampler]


def dense(dist, n_vocab):
    probs, ids = dist
    return probs if ids is None else torch.zeros(len(probs), n_vocab).scatter(1, ids, probs)


def random_logits(rows=16, vocab=300):
    return torch.randn(rows, vocab) * 3


def by_sorting(logits, noise, how):
    """Softmax in float64, sort, keep, renormalize, race; noise [B, V] of each token."""
    probs = torch.softmax(logits.double() / how.temperature, -1)
    sorted_probs, order = probs.sort(-1, descending=True)
    if how.top_k:
        sorted_probs[:, how.top_k:] = 0
        sorted_probs /= sorted_probs.sum(-1, keepdim=True)
    above = sorted_probs.cumsum(-1) - sorted_probs
    kept = (above < how.top_p) & (sorted_probs >= how.min_p * sorted_probs[:, :1])
    return order.gather(1, (sorted_probs * kept / noise.gather(1, order)).argmax(-1, keepdim=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", SETTINGS, ids=str)
def test_same_token_as_a_sorting_reference(how, kind):
    torch.manual_seed(SETTINGS.index(how))
    logits = random_logits()
    one = kind([how] * 16, 300)
    assert torch.equal(one.sample(logits, EVERY, POS), by_sorting(logits, one.noise(EVERY, POS), how))


@pytest.mark.parametrize("how", SETTINGS[::3], ids=str)
def test_keeps_what_transformers_keeps(how):
    torch.manual_seed(1)
    logits = random_logits()
    warped = TemperatureLogitsWarper(how.temperature)(None, logits)
    if how.top_k:
        warped = TopKLogitsWarper(how.top_k)(None, warped)
    if how.top_p < 1:
        warped = TopPLogitsWarper(how.top_p)(None, warped)
    if how.min_p:
        warped = MinPLogitsWarper(how.min_p)(None, warped)
    for kind in (Sampler, ShortlistSampler, ShortlistWithoutKernel):
        probs = dense(kind([how] * 16, 300).distribution(logits), 300)
        torch.testing.assert_close(probs, torch.softmax(warped, -1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("most_sorted", [MOST_SORTED, 0], ids=["sorting", "halving"])
def test_nucleus_is_exact_and_keeps_ties(most_sorted, monkeypatch):
    monkeypatch.setattr("sampling.MOST_SORTED", most_sorted)
    probs = torch.tensor([[0.1, 0.3, 0.3, 0.2, 0.1]])
    for top_p, kept in ((0.2, [1, 2]), (0.3, [1, 2]), (0.59, [1, 2]), (0.7, [1, 2, 3]), (0.9, [0, 1, 2, 3, 4])):
        assert keep_top_p(probs, torch.tensor([[top_p]]))[0].nonzero()[:, 0].tolist() == kept
    uniform = torch.full((1, 1000), 1e-3)
    assert keep_top_p(uniform, torch.tensor([[0.01]])).all()                    # all tie with the likeliest


@pytest.mark.parametrize("how", [SamplingParams(1e-40), SamplingParams(1e-60, 5), SamplingParams(1e-9, 0, 0.5)])
def test_tiny_temperature_is_greedy(how):
    logits = random_logits()
    for kind in KINDS:
        assert torch.equal(kind([how] * 16, 300).sample(logits, EVERY, POS), logits.argmax(-1, keepdim=True))


def test_greedy_is_argmax_and_needs_no_noise_luck():
    how = SamplingParams(temperature=0, top_k=7, top_p=0.5, min_p=0.3)
    for kind in KINDS:
        for later in ([], [SamplingParams()]):
            for pos in range(5):
                logits = random_logits().round()               # some tie: the first one is it
                one = kind([how] * 16, 300, later=later)
                assert torch.equal(one.sample(logits, EVERY, torch.tensor([pos])), logits.argmax(-1, keepdim=True))
                assert torch.equal(dense(one.distribution(logits), 300).argmax(-1, keepdim=True), logits.argmax(-1, keepdim=True))


@pytest.mark.parametrize("n_vocab", [1, 7, 300, 50257])
@pytest.mark.parametrize("n_row", [1, 3])
def test_the_kernel_of_greedy_rows_takes_the_first_of_the_largest(n_row, n_vocab):
    every_other = (3 * torch.randn(n_row, 2, n_vocab)).round()[:, 0]            # not contiguous; many tie
    for logits in (every_other, every_other.bfloat16().float(), torch.full((n_row, n_vocab), -torch.inf)):
        assert torch.equal(likeliest(logits), logits.argmax(-1, keepdim=True))
    invalid = torch.full((n_row, n_vocab), torch.nan)                           # Sampler.note() reports it
    assert ((0 <= likeliest(invalid)) & (likeliest(invalid) < n_vocab)).all()


def some_params(draw):
    """Random ones of each kind, more often than not with several filters."""
    def any_of(off, low, high):
        return off if draw.random() < 0.4 else draw.uniform(low, high)
    k = draw.choice([0, 1, 2, 5, 40, 200, 299, 300, 5000])
    temperature = draw.choice([0, 1e-30, 0.1, 0.7, 1.0, 1.5, 30.0])
    return RequestParams(temperature, k, any_of(1.0, 0.01, 1.0), any_of(0.0, 0.0, 1.0), seed=draw.randrange(1000),
                         top_n_sigma=any_of(0.0, 0.1, 3.0), repetition_penalty=any_of(1.0, 0.5, 2.0))


@pytest.mark.parametrize("n_vocab", [300, 6000])
@pytest.mark.parametrize("seed", range(6))
def test_all_samplers_draw_the_same_also_where_logits_tie(seed, n_vocab):
    """Of random parameters, in batches and alone: as the core's, as a request's, on a CPU and as for a GPU."""
    draw, rows = random.Random(seed), 12
    torch.manual_seed(seed)
    params = [some_params(draw) for _ in range(rows)]
    for step in range(6):
        logits = torch.randn(rows, n_vocab) * 3
        logits = (logits, logits.round(), (logits / 4).round(), logits.bfloat16().float())[step % 4]
        pos, drawn = torch.randint(100, (rows, 1)), {}
        for kind in KINDS:
            for name, later in (("announced", params), ("anything", [*ANY_PARAMS, RequestParams(top_n_sigma=1.0)])):
                batch = kind([RequestParams(temperature=0)] * rows, n_vocab, later=later)
                for row in range(rows):
                    batch.begin(row, [row, 7], params[row])
                drawn[kind.__name__, name] = batch.sample(logits, EVERY, pos)
                some = torch.tensor([3, 11, 4])
                assert torch.equal(batch.sample(logits[some], some, pos[some]), drawn[kind.__name__, name][some])
            alone = []
            for row in range(rows):
                one = kind([params[row]], n_vocab)
                one.begin(0, [row, 7])
                alone.append(one.sample(logits[row:row + 1], EVERY, pos[row]))
            drawn[kind.__name__, "alone"] = torch.cat(alone)
        first = next(iter(drawn.values()))
        assert all(torch.equal(tokens, first) for tokens in drawn.values()), {k: (step, [params[i] for i in (v != first)[:, 0].nonzero()[:, 0]]) for k, v in drawn.items() if not torch.equal(v, first)}


@pytest.mark.parametrize("how", SETTINGS[::7], ids=str)
@pytest.mark.parametrize("n_vocab", [300, 6000])
def test_places_of_one_row(how, n_vocab):
    """As drafts are verified: each place as if it were a row of its own."""
    logits = torch.randn(5, n_vocab) * 3
    for kind in (Sampler, ShortlistSampler, ShortlistWithoutKernel):
        one, five = kind([how], n_vocab), kind([how] * 5, n_vocab)
        assert torch.equal(dense(one.distribution(logits), n_vocab), dense(five.distribution(logits), n_vocab))
        each = torch.cat([dense(one.distribution(logits[i:i + 1]), n_vocab) for i in range(5)])
        torch.testing.assert_close(each, dense(five.distribution(logits), n_vocab))


@pytest.mark.parametrize("n_vocab", [50, MOST_SORTED + 1])
def test_of_tokens_that_tie_all_stay_or_none(n_vocab):
    probs = torch.full((1, n_vocab), 0.25 / (n_vocab - 3))
    probs[0, 5:8] = 0.25
    for k, n in ((1, 3), (3, 3), (4, n_vocab), (0, n_vocab)):
        for most in (max(k, 1), n_vocab):
            assert keep_top_k(probs, torch.tensor([[float(k)]]), most).sum() == n
    for p, n in ((0.1, 3), (0.74, 3), (0.76, n_vocab), (1.0, n_vocab)):
        assert keep_top_p(probs, torch.tensor([[p]])).sum() == n
    weight = torch.ones_like(probs)
    weight[0, 6] = 100.0
    assert keep_likeliest(probs, weight, torch.tensor([[101.0]])).sum() == 3


@pytest.mark.parametrize("how", [SamplingParams(0.8, 6), SamplingParams(1.0, 0, 0.8), SamplingParams(1.0, 0, 1.0, 0.2), SamplingParams()])
def test_frequencies(how):
    """A chi-square test of 40,000 draws against the distribution."""
    torch.manual_seed(5)
    logits = torch.randn(1, 12)
    exact = dense(sampler(how, 1, 12).distribution(logits), 12)[0]
    n = 40000
    batch = ShortlistSampler([how] * n, 12, generator=torch.Generator().manual_seed(3))
    count = torch.bincount(batch.sample(logits.expand(n, -1), EVERY, POS)[:, 0], minlength=12)
    assert (count[exact == 0] == 0).all()
    live = exact > 0
    chi2 = ((count - n * exact)[live] ** 2 / (n * exact)[live]).sum()
    freedom = live.sum() - 1
    assert chi2 < freedom + 5 * (2 * freedom) ** 0.5       # about five standard deviations


def test_repetition_penalty_equals_transformers():
    logits, past = random_logits(4, 50), torch.randint(0, 50, (4, 9))
    expected = RepetitionPenaltyLogitsProcessor(1.3)(past, logits.clone())
    penalty = RepetitionPenalty(4, 50, "cpu")
    for row, ids in enumerate(past.tolist()):
        penalty.begin(row, [9, 9], SamplingParams())       # the last sequence of this row is forgotten
        penalty.begin(row, ids[:7], SamplingParams(repetition_penalty=1.3))
    penalty.observe(past[:, 7:8])
    penalty.observe(past[:, 8:])
    assert torch.equal(penalty(logits, slice(None), None), expected)
    for i in range(4):                                     # places of one row, behind more and more drafts
        places = logits[i].expand(4, -1)
        drafts = torch.tensor([[5, 5, 11]])
        expected = torch.cat([RepetitionPenaltyLogitsProcessor(1.3)(
            torch.cat((past[i:i + 1], drafts[:, :n]), 1), places[:1].clone()) for n in range(4)])
        assert torch.equal(penalty(places, slice(i, i + 1), drafts), expected)
        assert torch.equal(penalty(places[:1], slice(i, i + 1), drafts), expected[-1:])


def test_zero_probability_never_wins_and_noise_is_never_zero():
    assert exponential(torch.tensor([0.0, 1 - 2.0**-24])).gt(0).all()
    drawn = uniform(torch.tensor(7), torch.arange(1 << 20))
    assert (drawn >= 0).all() and (drawn < 1).all() and exponential(drawn).isfinite().all()
    probs = torch.zeros(1, 3)
    probs[0, 1] = 1e-30
    assert draw(probs, None, torch.full((1, 3), 1e-38)).item() == 1


def test_seed_repeats():
    how, logits = SamplingParams(1.0, 50), random_logits()
    draws = []
    for seed in (1, 1, 2):
        draws.append(sampler(how, generator=torch.Generator().manual_seed(seed))(logits))
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


def test_a_sampler_draws_by_itself():
    """Called without a position: another token each time, as likely as it should be, by each row's own seed."""
    logits = torch.tensor([0.5, 0.3, 0.2, 1e-9]).log().expand(3000, 4)
    one = Sampler([SamplingParams()] * 3000, 4, generator=torch.Generator().manual_seed(1))
    tokens = [one(logits)[:, 0] for _ in range(2)]
    assert not torch.equal(*tokens)
    for share in (torch.bincount(t, minlength=4) / 3000 for t in tokens):
        assert (share - logits[0].exp()).abs().max() < 0.04
    seeded = [Sampler([SamplingParams(seed=seed)] * 2, 300) for seed in (7, 7, 8)]
    for each, seed in zip(seeded, (7, 7, 8)):
        for row in range(2):
            each.begin(row, [1], SamplingParams(seed=seed))
    logits = torch.randn(2, 300)
    drawn = [torch.cat([each(logits) for _ in range(8)], 1) for each in seeded]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    some = Sampler([SamplingParams(seed=7)] * 2, 300)
    for row in range(2):
        some.begin(row, [1], SamplingParams(seed=7))
    alone = torch.cat([some(logits[1:], torch.tensor([1])) for _ in range(8)], 1)      # row 0 draws nothing meanwhile
    assert torch.equal(alone, drawn[0][1:])


@pytest.mark.parametrize("n", [0.3, 1.0, 2.5])
def test_top_n_sigma(n):
    """By the words of arXiv 2411.07641: the logits at most n standard deviations below the best, at any temperature."""
    logits = random_logits().double()
    logits[:, ::7] = -torch.inf                            # what a grammar forbids
    for row in logits:
        finite = row[row > -torch.inf]
        expected = row >= row.max() - n * finite.std(correction=0)
        assert torch.equal(keep_top_n_sigma(row[None], torch.tensor([[n]]))[0], expected)
        for temperature in (0.5, 3.0):
            one = Sampler([SamplingParams(temperature, top_n_sigma=n)], 300)
            probs, ids = one.distribution(one.processed(row[None].float()))
            assert ids is None and torch.equal(probs[0] > 0, expected)
    some_off = Sampler([SamplingParams(top_n_sigma=n), SamplingParams()], 300)
    probs, _ = some_off.distribution(some_off.processed(logits[:2].float()))
    assert (probs[1] > 0).sum() == (logits[1] > -torch.inf).sum() > (probs[0] > 0).sum()


ROWS = [SamplingParams(0), SamplingParams(0.8, 20, seed=1), SamplingParams(1.3, 0, 0.9, seed=2),
        SamplingParams(0.7, 5, 0.8, 0.1, 1.3, seed=3), SamplingParams(1.0, 0, 1.0, 0.2, seed=4), SamplingParams(seed=5),
        SamplingParams(0.9, 1000, seed=6), SamplingParams(1.1, 40, seed=7, top_n_sigma=1.5)]


def alone(params, logits, prompt, n):
    one = Sampler([params], logits.shape[-1])
    one.begin(0, prompt, params)
    drawn = []
    for step in range(n):
        drawn.append(one.sample(logits[step:step + 1], EVERY, torch.tensor([step])))
        one.observe(drawn[-1])
    return torch.cat(drawn)


def test_rows_of_one_batch_differ_in_everything():
    """Each row draws what it draws alone, whatever its neighbours are, and in any order of rows."""
    torch.manual_seed(3)
    n, logits, prompts = 12, torch.randn(12, len(ROWS), 300) * 3, [[i, i + 1] for i in range(len(ROWS))]
    expected = [alone(p, logits[:, i], prompts[i], n) for i, p in enumerate(ROWS)]
    for order in (list(range(len(ROWS))), [3, 0, 5, 1, 6, 7, 4, 2]):
        batch = Sampler([ROWS[i] for i in order], 300)
        for row, i in enumerate(order):
            batch.begin(row, prompts[i], ROWS[i])
        for step in range(n):
            token = batch.sample(logits[step, order], EVERY, torch.tensor([step]))
            batch.observe(token)
            assert token[:, 0].tolist() == [expected[i][step].item() for i in order], step


def test_a_row_that_is_exchanged_for_one_that_was_announced():
    """`later` names what may come: nothing that a compiled step depends on changes then."""
    batch = Sampler([ROWS[0]] * 2, 300, later=ROWS)
    facts = batch.most_k, batch.some_greedy, list(batch.filters), [b.data_ptr() for b in batch.buffers()]
    logits = torch.randn(12, 300) * 3
    for i, params in enumerate(ROWS):
        batch.begin(1, [7], params)
        for step in range(12):
            token = batch.sample(logits[step:step + 1], torch.tensor([1]), torch.tensor([step]))
            batch.observe(token.expand(2, 1))
            assert token.item() == alone(params, logits, [7], step + 1)[-1], (i, step)
        assert facts == (batch.most_k, batch.some_greedy, list(batch.filters), [b.data_ptr() for b in batch.buffers()])


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_compiled_once_serves_every_row(kind):
    """Other values in the same sampler: no new graph; with every filter, without a break."""
    torch._dynamo.reset()
    batch = kind([ROWS[0]] * 3, 300, later=ROWS)
    n_graphs = []

    def backend(graph, inputs):
        n_graphs.append(1)
        return graph.forward
    step = torch.compile(lambda sampler, logits: sampler.sample(logits, EVERY, POS), backend=backend, fullgraph=True, dynamic=False)
    for i in range(len(ROWS)):
        for row in range(3):
            batch.begin(row, [1, 2], ROWS[(i + row) % len(ROWS)])
        logits = torch.randn(3, 300)
        assert torch.equal(step(batch, logits), batch.sample(logits, EVERY, POS))
    assert len(n_graphs) == 1


@pytest.mark.parametrize("params, message", [
    (SamplingParams(1.0, 5, 0.9), "no row was to have top_p"), (SamplingParams(1.0, 7), "top_k was to be 5 at most"),
    (SamplingParams(1.0, 5, repetition_penalty=1.2), "no row was to have a penalty"), (SamplingParams(1.0, 5, min_p=0.1), "no row was to have min_p"),
    (SamplingParams(1.0, 5, top_n_sigma=1.0), "no row was to have top_n_sigma")])
def test_what_was_not_announced_is_refused(params, message):
    batch = Sampler([SamplingParams(1.0, 5), SamplingParams(0)], 300)
    batch.begin(0, [1], SamplingParams(0.3, 5, seed=None))
    with pytest.raises(ValueError, match=message):
        batch.begin(0, [1], params)


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("n_vocab", [50, MOST_SORTED + 1])
def test_a_filter_never_drops_every_token(name, n_vocab):
    probs = torch.softmax(torch.randn(7, n_vocab) * 9, -1)
    for value in (0, 1, 3, n_vocab) if name == "top_k" else (1e-6, 0.5, 1.0):
        most = (n_vocab,) if name == "top_k" else ()
        assert FILTERS[name](probs, torch.full((7, 1), float(value)), *most).any(-1).all()


def test_noise_is_of_seed_and_position():
    """Exp(1), new at every position, for each row, and for drafts; the same whenever it is asked for."""
    n = 20_000
    device = Sampler([SamplingParams(), SamplingParams(seed=7)], n, "cpu", torch.Generator().manual_seed(0))
    for row in (0, 1):
        device.begin(row, [1, 2])
    every, pos = slice(None), torch.tensor([[5], [5]])
    noise = device.noise(every, pos)
    assert torch.equal(noise, device.noise(every, torch.tensor([5])))
    assert torch.equal(noise[1:], device.noise(torch.tensor([1]), pos[1:]))
    others = [noise[0], noise[1], *device.noise(every, pos + 1), *device.noise(every, pos, draft=True)]
    others += [noise[0].roll(1), *device.noise(every, pos + (1 << 20))]
    some = torch.tensor([[3, 77, n - 1], [0, 5, 6]])
    assert torch.equal(device.noise(every, pos, some), noise.gather(1, some))
    chance = device.chance(torch.tensor([1]), torch.arange(n))[0]
    assert (chance >= 0).all() and (chance < 1).all() and abs(chance.mean() - 0.5) < 5 / (12 * n) ** 0.5
    assert abs(torch.corrcoef(torch.stack((chance, exponential(chance).roll(1), noise[0])))[0, 1:]).max() < 5 / n**0.5
    assert torch.corrcoef(torch.stack(others)).fill_diagonal_(0).abs().max() < 5 / n**0.5
    for one in others:
        assert one.min() > 0 and abs(one.mean() - 1) < 5 / n**0.5
        assert abs((one < 0.01).double().mean() - (1 - math.exp(-0.01))) < 5 * (0.01 / n) ** 0.5
        assert abs((one > 3).double().mean() - math.exp(-3)) < 5 * (math.exp(-3) / n) ** 0.5
    device.begin(0, [1, 2])
    device.begin(1, [1, 2])
    again = device.noise(every, pos)
    assert torch.equal(again[1], noise[1]) and not torch.equal(again[0], noise[0])     # a seed of its own


@pytest.mark.parametrize("rows, fits", [
    ([SamplingParams(temperature=0)], False),                  # an argmax is one already
    ([SamplingParams(top_k=20, min_p=0.1), SamplingParams(temperature=0)], True),
    ([SamplingParams(top_p=0.9), SamplingParams(repetition_penalty=1.1)], True),
    ([SamplingParams(top_k=20, top_p=0.9)], False),
    ([SamplingParams(top_k=20), SamplingParams(top_p=0.9)], False)])
def test_which_draws_are_one_kernel(rows, fits):
    """Top-p after top-k is not: whose mass it is of is not known."""
    assert DeviceSampler(rows, 50).uses_draw_kernel == fits


def keep_even_ranks(probs, every_other):
    rank = probs.argsort(-1, descending=True).argsort(-1)
    return (rank % 2 == 0) | (every_other == 0)


@dataclass(frozen=True)
class ParamsOfAFork(SamplingParams):
    every_other: float = 0.0


@pytest.mark.parametrize("greedy_too", [False, True])
def test_a_filter_that_keeps_less_likely_tokens_sees_the_whole_vocabulary(monkeypatch, greedy_too):
    """As a fork adds one and renews the digests: of a shortlist its last token may be dropped while later ones stay."""
    monkeypatch.setitem(sampling.FILTERS, "every_other", keep_even_ranks)
    monkeypatch.setattr(sampling, "NEUTRAL", ParamsOfAFork())
    monkeypatch.setattr(sampling, "COLUMNS", (*sampling.COLUMNS, "every_other"))
    monkeypatch.setattr(samplers, "find_modified", lambda functions: None)
    rows = [ParamsOfAFork(top_p=0.999999, every_other=1.0), ParamsOfAFork(top_k=3, every_other=1.0)]
    rows += [ParamsOfAFork(temperature=0.0)] if greedy_too else []
    logits = torch.randn(len(rows), 4096) / 10
    quick, plain = ShortlistSampler(rows, 4096), Sampler(rows, 4096)
    assert not quick.falls_back()
    for row in range(len(rows)):
        probs, ids = quick.distribution(logits[row:row + 1], torch.tensor([row]))
        expected, none = plain.distribution(logits[row:row + 1], torch.tensor([row]))
        dense = probs if ids is None else torch.zeros_like(expected).scatter(1, ids, probs)
        assert none is None and torch.equal(dense, expected)


def test_an_edited_filter_is_named_once(monkeypatch, capsys):
    monkeypatch.setitem(sampling.FILTERS, "min_p", lambda probs, min_p: probs > 0)
    torch_internals.note_once.cache_clear()
    for _ in range(2):
        ShortlistSampler([SamplingParams(min_p=0.5)], 8)
    assert capsys.readouterr().err.count("sampling runs as written in sampling.py") == 1


def test_filters_in_another_order_are_not_the_kernels(monkeypatch):
    """top_p before top_k keeps other tokens; the draw kernels know one order."""
    how = SamplingParams(top_k=2, top_p=0.5, min_p=0.01, seed=1)
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert ShortlistSampler([how], 4).may_use_kernel
    assert DeviceSampler([SamplingParams(top_p=0.5, min_p=0.01)], 4).uses_draw_kernel
    monkeypatch.setattr(sampling, "FILTERS", dict(reversed(FILTERS.items())))
    made = [kind([how], 4) for kind in KINDS]
    assert not made[1].may_use_kernel
    assert not DeviceSampler([SamplingParams(top_p=0.5, min_p=0.01)], 4).uses_draw_kernel
    draws = [[one.sample(logits, EVERY, torch.tensor([pos])).item() for pos in range(40)] for one in made]
    assert all(tokens == draws[0] for tokens in draws) and set(draws[0]) == {0, 1}
    monkeypatch.undo()
    assert {ShortlistSampler([how], 4).sample(logits, EVERY, torch.tensor([pos])).item() for pos in range(40)} == {0}


@pytest.mark.parametrize("logits", [[math.nan, 1.0, 2.0], [1.0, math.inf, 2.0], [-math.inf] * 3, [1.0, math.nan, math.inf]])
def test_logits_that_are_no_numbers_draw_a_token_that_exists(logits):
    for how in (SamplingParams(), SamplingParams(0), SamplingParams(1.0, 2, 0.5, 0.1)):
        for kind in KINDS:
            one = kind([how], 3, later=[SamplingParams(0)])
            assert 0 <= one.sample(torch.tensor([logits]), EVERY, POS).item() < 3


@pytest.mark.parametrize("width", [0.3, 3.0])
@pytest.mark.parametrize("n_vocab", [65, 5000, 40000])
def test_long_candidate_lists(n_vocab, width):
    """Of flat and of steep distributions, with shortlists that are too short and blocks of 64 that are not full."""
    torch.manual_seed(n_vocab)
    logits = torch.randn(4, n_vocab) * width
    for k in (0, 1, 64, 700, n_vocab - 1, 1 << 30):
        for p in (1.0, 0.999, 0.1):
            rows = [SamplingParams(1.0, k, p, m, seed=7) for m in (0.0, 1e-4, 0.1, 1.0)]
            tokens = [kind(rows, n_vocab).sample(logits, EVERY, POS) for kind in KINDS[:2]]
            assert torch.equal(*tokens), (k, p)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_logits_of_another_dtype(dtype):
    """As a fork's model or processor may return them: the kernel takes fp32 alone."""
    logits = random_logits().to(dtype)
    for how in (SamplingParams(0.8, 5, 0.9, 0.01, seed=3), SamplingParams(seed=3)):
        made = [kind([how] * 16, 300).sample(logits, EVERY, POS) for kind in (Sampler, ShortlistSampler)]
        assert torch.equal(*made)
