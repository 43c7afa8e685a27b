"""Sampling draws what a reference that sorts draws from the same noise, and what transformers keeps."""

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sampling import Sampling, draw, exponential, n_candidates, nucleus, penalize, sample, truncate

SETTINGS = [Sampling(t, k, p, m) for t in (0.3, 1.0, 1.7) for k in (0, 1, 5, 40, 500)
            for p in (1.0, 0.95, 0.5, 0.05) for m in (0.0, 0.1)]


def random_logits(rows=16, vocab=300):
    return torch.randn(rows, vocab) * 3


def by_sorting(logits, noise, how):
    """Softmax in float64, sort, keep, renormalize, race."""
    probs = torch.softmax(logits.double() / how.temperature, -1)
    sorted_probs, order = probs.sort(-1, descending=True)
    if how.top_k:
        sorted_probs[:, how.top_k:] = 0
        sorted_probs /= sorted_probs.sum(-1, keepdim=True)
    above = sorted_probs.cumsum(-1) - sorted_probs
    kept = (above < how.top_p) & (sorted_probs >= how.min_p * sorted_probs[:, :1])
    if 0 < how.top_k < logits.shape[1]:                    # noise belongs to ranks
        noise = torch.nn.functional.pad(noise, (0, logits.shape[1] - noise.shape[1]), value=1.0)
    else:                                                  # noise belongs to tokens
        noise = noise.gather(1, order)
    return order.gather(1, (sorted_probs * kept / noise).argmax(-1, keepdim=True))


@pytest.mark.parametrize("how", SETTINGS, ids=str)
def test_same_token_as_a_sorting_reference(how):
    torch.manual_seed(hash(how) % 1000)
    logits = random_logits()
    noise = exponential((16, n_candidates(how, 300)), "cpu")
    assert torch.equal(sample(logits, noise, how), by_sorting(logits, noise, how))


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
    probs, ids = truncate(logits, how)
    dense = probs if ids is None else torch.zeros_like(logits).scatter(1, ids, probs)
    torch.testing.assert_close(dense / dense.sum(-1, keepdim=True), torch.softmax(warped, -1),
                               rtol=1e-4, atol=1e-6)


def test_nucleus_is_exact_and_keeps_ties():
    probs = torch.tensor([[0.1, 0.3, 0.3, 0.2, 0.1]])
    for top_p, kept in ((0.2, [1, 2]), (0.3, [1, 2]), (0.59, [1, 2]), (0.7, [1, 2, 3]), (0.9, [0, 1, 2, 3, 4])):
        assert nucleus(probs, top_p)[0].nonzero()[:, 0].tolist() == kept
    uniform = torch.full((1, 1000), 1e-3)
    assert nucleus(uniform, 0.01).all()                    # all tie with the likeliest


@pytest.mark.parametrize("how", [Sampling(1e-40), Sampling(1e-60, 5), Sampling(1e-9, 0, 0.5)])
def test_tiny_temperature_is_greedy(how):
    logits = random_logits()
    noise = exponential((16, n_candidates(how, 300)), "cpu")
    assert torch.equal(sample(logits, noise, how), logits.argmax(-1, keepdim=True))


def test_greedy_is_argmax_and_needs_no_noise_luck():
    logits = random_logits()
    how = Sampling(temperature=0, top_k=7, top_p=0.5, min_p=0.3)
    for seed in range(5):
        noise = exponential((16, n_candidates(how, 300)), "cpu", torch.Generator().manual_seed(seed))
        assert torch.equal(sample(logits, noise, how), logits.argmax(-1, keepdim=True))


@pytest.mark.parametrize("how", [Sampling(0.8, 6), Sampling(1.0, 0, 0.8), Sampling(1.0, 0, 1.0, 0.2), Sampling()])
def test_frequencies(how):
    """A chi-square test of 40,000 draws against the distribution."""
    torch.manual_seed(5)
    logits = torch.randn(1, 12)
    probs, ids = truncate(logits, how)
    exact = probs[0] if ids is None else torch.zeros(12).scatter(0, ids[0], probs[0])
    exact = exact / exact.sum()
    n = 40000
    noise = exponential((n, n_candidates(how, 12)), "cpu")
    count = torch.bincount(sample(logits.expand(n, -1), noise, how)[:, 0], minlength=12)
    assert (count[exact == 0] == 0).all()
    live = exact > 0
    chi2 = ((count - n * exact)[live] ** 2 / (n * exact)[live]).sum()
    freedom = live.sum() - 1
    assert chi2 < freedom + 5 * (2 * freedom) ** 0.5       # about five standard deviations


def test_repetition_penalty_equals_transformers():
    logits, past = random_logits(4, 50), torch.randint(0, 50, (4, 9))
    seen = torch.zeros(4, 50, dtype=torch.bool).scatter_(1, past, True)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(past, logits.clone())
    assert torch.equal(penalize(logits, seen, 1.3), expected)


def test_zero_probability_never_wins_and_noise_is_never_zero():
    noise = exponential((4, 100000), "cpu")
    assert (noise > 0).all()
    probs = torch.zeros(1, 3)
    probs[0, 1] = 1e-30
    assert draw(probs, None, torch.full((1, 3), 1e-38)).item() == 1


def test_seed_repeats():
    how, logits = Sampling(1.0, 50), random_logits()
    draws = [sample(logits, exponential((16, 50), "cpu", torch.Generator().manual_seed(s)), how) for s in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
