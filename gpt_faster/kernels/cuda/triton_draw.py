"""A draw from the likeliest tokens in one launch, without sorting, in Triton.

Of the kept tokens the one wins whose logit / temperature - log(noise) is the largest, with Exp(1)
noise made here. Which are kept need not be known before: the winner among all tokens is one of
them if fewer than top_k are likelier, or less than top_p, and if not, then none that is less
likely is. So it goes up: the next winner among those that are likelier than the last one, until
one may stay. The first is found by all programs, the rest by the last of them. Of tokens that tie
with the k-th all may be drawn.

    token = launch(logits, temperature, top_k, top_p, min_p, seeds, arrivals)          # [B, 1]
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096                                       # logits of a program
COOL = 1e-6                                        # temperatures below are as this one


@triton.jit
def _mixed(x):
    """The bits of sampling.uniform(), of x uint64."""
    x = x * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _scores(logits, inverse, noisy, seed, token):
    """logit / temperature - log(Exp(1) noise of this seed and token)."""
    bits = _mixed(seed + token.to(tl.uint64)) & 0x7FFFFFFFFFFFFFFF
    u = bits.to(tl.int64).to(tl.float32) * (1.0 / (1 << 63))
    u = tl.minimum(u, 1 - 1.0 / (1 << 24))
    small = u * (1 + u * (0.5 + u * (1.0 / 3 + u * 0.25)))     # -log(1 - u), with fine steps near 0
    noise = tl.where(u < 1.0 / 64, small, -tl.log(1 - u))
    return tl.where(noisy, logits * inverse - tl.log(tl.maximum(noise, 1.2e-38)), logits)


@triton.jit
def _winner(score, token, logit):
    """Of a chunk: the first token that has the best score, that, and its logit."""
    best = tl.max(score, 0)
    first = tl.min(tl.where(score == best, token, 0x7FFFFFFF), 0)
    return best, first, tl.max(tl.where(token == first, logit, float("-inf")), 0)


@triton.jit
def _climb(logits, found, ids, n, temperature, top_k, top_p, min_p, seed, n_vocab: tl.constexpr,
           n_chunk: tl.constexpr, CHUNK: tl.constexpr, P: tl.constexpr, cool: tl.constexpr):
    """From what the programs have found [n] each -> the token that is drawn."""
    p = tl.arange(0, P)
    is_p = p < n_chunk
    noisy = temperature > 0
    inverse = 1 / tl.maximum(temperature, cool)
    score = tl.load(found + p, is_p, float("-inf"), cache_modifier=".cg")
    theirs = tl.load(found + n + p, is_p, float("-inf"), cache_modifier=".cg")
    tops = tl.load(found + 2 * n + p, is_p, float("-inf"), cache_modifier=".cg")
    masses = tl.load(found + 3 * n + p, is_p, 0, cache_modifier=".cg")
    winners = tl.load(ids + p, is_p, 0x7FFFFFFF, cache_modifier=".cg")
    best, first, logit = _winner(score, winners, theirs)
    top = tl.max(tops, 0)
    share = tl.exp((tops - top) * inverse)
    mass = tl.sum(tl.where(masses > 0, masses * share, 0), 0)

    n_most = tl.where(top_k > 0, top_k, n_vocab)
    mass_most = tl.where(top_p < 1, top_p * mass, float("inf"))
    stays = (noisy == 0) | (logit == top)
    while stays == 0:
        n_above = 0.0
        mass_above = 0.0
        for start in range(0, n_vocab, CHUNK):
            token = start + tl.arange(0, CHUNK)
            x = tl.load(logits + token, token < n_vocab, float("-inf"))
            above = x > logit
            n_above += tl.sum(above.to(tl.float32), 0)
            mass_above += tl.sum(tl.where(above, tl.exp((x - top) * inverse), 0), 0)
        stays = (n_above < n_most) & (mass_above < mass_most)
        stays = stays & (tl.exp((logit - top) * inverse) >= min_p)
        if stays == 0:
            floor = logit
            best = float("-inf")
            for start in range(0, n_vocab, CHUNK):
                token = start + tl.arange(0, CHUNK)
                x = tl.load(logits + token, token < n_vocab, float("-inf"))
                if tl.max(x, 0) > floor:
                    higher = _scores(x, inverse, noisy, seed, token)
                    higher = tl.where(x > floor, higher, float("-inf"))
                    its_best, its_first, its_logit = _winner(higher, token, x)
                    if its_best > best:
                        best = its_best
                        first = its_first
                        logit = its_logit
            stays = (logit == top) | (best == float("-inf"))   # not a number: nothing is likelier
    return tl.minimum(first, n_vocab - 1)


@triton.jit
def _draw(logits, temperatures, top_ks, top_ps, min_ps, seeds, arrivals, found, ids, y,
          n_vocab: tl.constexpr, n_chunk: tl.constexpr, CHUNK: tl.constexpr, P: tl.constexpr,
          cool: tl.constexpr):
    row, chunk = tl.program_id(1), tl.program_id(0)
    logits += row * n_vocab
    temperature = tl.load(temperatures + row)
    noisy = temperature > 0
    inverse = 1 / tl.maximum(temperature, cool)
    seed = tl.load(seeds + row).to(tl.uint64, bitcast=True)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + token, token < n_vocab, float("-inf"))
    score = tl.where(token < n_vocab, _scores(x, inverse, noisy, seed, token), float("-inf"))
    best, first, logit = _winner(score, token, x)
    top = tl.max(x, 0)
    mass = tl.sum(tl.where(token < n_vocab, tl.exp((x - top) * inverse), 0), 0)

    n = tl.num_programs(1) * n_chunk               # what this program found: four numbers and an id
    place = row * n_chunk + chunk
    tl.store(found + place, best)
    tl.store(found + n + place, logit)
    tl.store(found + 2 * n + place, top)
    tl.store(found + 3 * n + place, mass)
    tl.store(ids + place, first)
    tl.debug_barrier()                             # all of it is written before it is announced
    n_before = tl.atomic_add(arrivals + row, 1, sem="acq_rel", scope="gpu")
    if (n_before + 1) % n_chunk == 0:
        tl.debug_barrier()
        first = _climb(logits, found + row * n_chunk, ids + row * n_chunk, n, temperature,
                       tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row), seed,
                       n_vocab, n_chunk, CHUNK, P, cool)
        tl.store(y + row, first.to(tl.int64))


def launch(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor,
           seeds: Tensor, arrivals: Tensor) -> Tensor:
    """logits [B, V] fp32, each row's parameters [B, 1], seeds [B, 1] int64 -> tokens [B, 1]."""
    B, n_vocab = logits.shape
    n_chunk = triton.cdiv(n_vocab, CHUNK)
    found = torch.empty(4, B, n_chunk, device=logits.device)
    ids = torch.empty(B, n_chunk, dtype=torch.int32, device=logits.device)
    y = torch.empty(B, 1, dtype=torch.int64, device=logits.device)
    _draw[(n_chunk, B)](logits, temperature, top_k, top_p, min_p, seeds, arrivals, found, ids, y,
                        n_vocab, n_chunk, CHUNK, triton.next_power_of_2(n_chunk), COOL,
                        num_warps=8)
    return y
