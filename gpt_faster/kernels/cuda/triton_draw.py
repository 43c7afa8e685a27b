"""Top-k, top-p and min-p sampling in one launch, without sorting, in Triton.

Draws the kept token with the largest logit / temperature - log(noise), noise ~ Exp(1) (Gumbel-max).
The kept set is not computed. Take the winner among all tokens: it is kept if fewer than top_k
tokens, with less than top_p probability in all, have a higher logit. If it is not kept, no token
with a lower logit is, so take the winner among tokens with a higher logit, until one is kept.
All programs find the first winner, the last program to finish the others. All tokens that tie with
the k-th may be drawn.

    token = launch(logits, temperature, top_k, top_p, min_p, seeds, arrivals)          # [B, 1]
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096                                       # logits per program
MIN_TEMPERATURE = 1e-6                             # lower temperatures are clamped


@triton.jit
def _mix(x):
    """x uint64 -> the random bits of sampling.uniform()."""
    x = x * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _scores(logits, inv_temp, is_random, seed, token):
    """logit / temperature - log(Exp(1) noise of this seed and token)."""
    bits = _mix(seed + token.to(tl.uint64)) & 0x7FFFFFFFFFFFFFFF
    u = bits.to(tl.int64).to(tl.float32) * (1.0 / (1 << 63))
    u = tl.minimum(u, 1 - 1.0 / (1 << 24))
    small = u * (1 + u * (0.5 + u * (1.0 / 3 + u * 0.25)))     # -log(1 - u), accurate near 0
    noise = tl.where(u < 1.0 / 64, small, -tl.log(1 - u))
    return tl.where(is_random, logits * inv_temp - tl.log(tl.maximum(noise, 1.2e-38)), logits)


@triton.jit
def _winner(score, token, logit):
    """-> a chunk's best score, the first token that has it, and this token's logit."""
    best = tl.max(score, 0)
    first = tl.min(tl.where(score == best, token, 0x7FFFFFFF), 0)
    return best, first, tl.max(tl.where(token == first, logit, float("-inf")), 0)


@triton.jit
def _kept_winner(logits, partials, ids, n, temperature, top_k, top_p, min_p, seed,
                 n_vocab: tl.constexpr, n_chunk: tl.constexpr, CHUNK: tl.constexpr,
                 P: tl.constexpr, min_temperature: tl.constexpr):
    """All programs' partial results, [n] each -> the drawn token."""
    p = tl.arange(0, P)
    is_p = p < n_chunk
    is_random = temperature > 0
    inv_temp = 1 / tl.maximum(temperature, min_temperature)
    score = tl.load(partials + p, is_p, float("-inf"), cache_modifier=".cg")
    winner_logits = tl.load(partials + n + p, is_p, float("-inf"), cache_modifier=".cg")
    maxes = tl.load(partials + 2 * n + p, is_p, float("-inf"), cache_modifier=".cg")
    exp_sums = tl.load(partials + 3 * n + p, is_p, 0, cache_modifier=".cg")
    winners = tl.load(ids + p, is_p, 0x7FFFFFFF, cache_modifier=".cg")
    best, first, logit = _winner(score, winners, winner_logits)
    max_logit = tl.max(maxes, 0)
    rescale = tl.exp((maxes - max_logit) * inv_temp)
    exp_sum = tl.sum(tl.where(exp_sums > 0, exp_sums * rescale, 0), 0)

    max_above = tl.where(top_k > 0, top_k, n_vocab)
    max_exp_sum = tl.where(top_p < 1, top_p * exp_sum, float("inf"))
    is_kept = (is_random == 0) | (logit == max_logit)
    while is_kept == 0:
        n_above = 0.0
        exp_sum_above = 0.0
        for start in range(0, n_vocab, CHUNK):
            token = start + tl.arange(0, CHUNK)
            x = tl.load(logits + token, token < n_vocab, float("-inf"))
            above = x > logit
            n_above += tl.sum(above.to(tl.float32), 0)
            exp_sum_above += tl.sum(tl.where(above, tl.exp((x - max_logit) * inv_temp), 0), 0)
        is_kept = (n_above < max_above) & (exp_sum_above < max_exp_sum)
        is_kept = is_kept & (tl.exp((logit - max_logit) * inv_temp) >= min_p)
        if is_kept == 0:
            floor = logit
            best = float("-inf")
            for start in range(0, n_vocab, CHUNK):
                token = start + tl.arange(0, CHUNK)
                x = tl.load(logits + token, token < n_vocab, float("-inf"))
                if tl.max(x, 0) > floor:
                    higher = _scores(x, inv_temp, is_random, seed, token)
                    higher = tl.where(x > floor, higher, float("-inf"))
                    its_best, its_first, its_logit = _winner(higher, token, x)
                    if its_best > best:
                        best = its_best
                        first = its_first
                        logit = its_logit
            is_kept = (logit == max_logit) | (best == float("-inf"))   # NaN: no token is likelier
    return tl.minimum(first, n_vocab - 1)


@triton.jit
def _draw(logits, temperatures, top_ks, top_ps, min_ps, seeds, arrivals, partials, ids, y,
          n_vocab: tl.constexpr, n_chunk: tl.constexpr, CHUNK: tl.constexpr, P: tl.constexpr,
          min_temperature: tl.constexpr):
    row, chunk = tl.program_id(1), tl.program_id(0)
    logits += row * n_vocab
    temperature = tl.load(temperatures + row)
    is_random = temperature > 0
    inv_temp = 1 / tl.maximum(temperature, min_temperature)
    seed = tl.load(seeds + row).to(tl.uint64, bitcast=True)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + token, token < n_vocab, float("-inf"))
    score = _scores(x, inv_temp, is_random, seed, token)
    score = tl.where(token < n_vocab, score, float("-inf"))
    best, first, logit = _winner(score, token, x)
    max_logit = tl.max(x, 0)
    exp_sum = tl.sum(tl.where(token < n_vocab, tl.exp((x - max_logit) * inv_temp), 0), 0)

    n = tl.num_programs(1) * n_chunk               # partial result: four floats and an id
    place = row * n_chunk + chunk
    tl.store(partials + place, best)
    tl.store(partials + n + place, logit)
    tl.store(partials + 2 * n + place, max_logit)
    tl.store(partials + 3 * n + place, exp_sum)
    tl.store(ids + place, first)
    tl.debug_barrier()                             # all stores precede the counter
    n_before = tl.atomic_add(arrivals + row, 1, sem="acq_rel", scope="gpu")
    if (n_before + 1) % n_chunk == 0:
        tl.debug_barrier()
        first = _kept_winner(logits, partials + row * n_chunk, ids + row * n_chunk, n,
                             temperature, tl.load(top_ks + row), tl.load(top_ps + row),
                             tl.load(min_ps + row), seed, n_vocab, n_chunk, CHUNK, P,
                             min_temperature)
        tl.store(y + row, first.to(tl.int64))


def launch(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor,
           seeds: Tensor, arrivals: Tensor) -> Tensor:
    """logits [B, V] fp32, each row's parameters [B, 1], seeds [B, 1] int64 -> tokens [B, 1]."""
    B, n_vocab = logits.shape
    n_chunk = triton.cdiv(n_vocab, CHUNK)
    partials = torch.empty(4, B, n_chunk, device=logits.device)
    ids = torch.empty(B, n_chunk, dtype=torch.int32, device=logits.device)
    y = torch.empty(B, 1, dtype=torch.int64, device=logits.device)
    _draw[(n_chunk, B)](logits, temperature, top_k, top_p, min_p, seeds, arrivals, partials, ids, y,
                        n_vocab, n_chunk, CHUNK, triton.next_power_of_2(n_chunk), MIN_TEMPERATURE,
                        num_warps=8)
    return y
