"""Lazy tensors: what they keep in memory while they are read ends when the reading does."""

import gc

import pytest
import torch

from checkpoint import LazyTensor, narrow, stack
from gpt_faster.formats.lazy import (
    CachedTensor,
    TransposedTensor,
    cached,
    concatenate,
    index_select,
    scaled,
    transpose,
)


def lazy(t, name="x.weight"):
    return LazyTensor(name, tuple(t.shape), t.dtype, lambda a, b: (t.flatten(0, 1) if t.dim() > 2 else t)[a:b])


W = torch.arange(24.0).view(6, 4)
MADE = {
    "cached": (lambda t: cached("x", W.shape, W.dtype, t.whole, t), W),
    "transposed": (transpose, W.T),
    "scaled": (lambda t: scaled(cached("x", W.shape, W.dtype, t.whole, t), 2.0), 2 * W),
    "selected": (lambda t: index_select(transpose(t), torch.tensor([3, 0])), W.T[[3, 0]]),
    "narrowed": (lambda t: narrow(transpose(t), 0, 1, 3), W.T[1:3]),
    "stacked": (lambda t: stack([transpose(t), transpose(t)]), torch.stack([W.T, W.T])),
    "below each other": (lambda t: concatenate([transpose(t), transpose(t)], 0), torch.cat([W.T, W.T])),
    "beside each other": (lambda t: concatenate([transpose(t), transpose(t)], 1), torch.cat([W.T, W.T], 1)),
}


@pytest.fixture(autouse=True)
def few_objects():
    """What the other tests have imported and made is not walked through again and again."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def kept():
    """Of all tensors that are alive: those that still have something in memory."""
    gc.collect()
    return [t for t in gc.get_objects() if type(t) is CachedTensor and t.value is not None
            or type(t) is TransposedTensor and t.current is not None]


@pytest.mark.parametrize("kind", MADE)
def test_what_is_kept_ends_with_the_reading(kind, monkeypatch):
    make, expected = MADE[kind]
    t = make(lazy(W))
    assert t.shape == tuple(expected.shape) and torch.equal(t.whole(), expected) and not kept()
    monkeypatch.setattr("checkpoint.CHUNK", 5)
    pieces = [rows for _, _, rows in t.chunks()]
    assert len(pieces) > 1 and torch.equal(torch.cat(pieces).view(expected.shape), expected) and not kept()
    for _ in t.chunks():                                   # a reader that gives up
        break
    assert not kept()


def test_a_cached_tensor_is_made_once_for_all_chunks(monkeypatch):
    made = []
    t = cached("x", W.shape, W.dtype, lambda: made.append(1) or W)
    monkeypatch.setattr("checkpoint.CHUNK", 5)
    assert torch.equal(torch.cat([rows for *_, rows in t.chunks()]), W) and len(made) == 1
    t.whole()
    assert len(made) == 2


def test_hub_quantized_weights_keep_nothing():
    from gpt_faster.formats.awq_gptq_fp8 import dequantized
    g = torch.Generator().manual_seed(0)
    words = torch.randint(-2**31, 2**31, (64, 8), generator=g, dtype=torch.int64).int()
    zeros = torch.randint(-2**31, 2**31, (2, 8), generator=g, dtype=torch.int64).int()
    scales = torch.rand(2, 64, generator=g).half()
    for size in (32, 16):                                  # as int4, and as plain weights
        tensors = [lazy(t, f"x.{n}") for n, t in dict(qweight=words, qzeros=zeros, scales=scales).items()]
        if size == 16:
            tensors.append(lazy(torch.arange(64) % 2, "x.g_idx"))
        method = dict(quant_method="awq", bits=4, group_size=32)
        if size == 16:
            method = dict(quant_method="gptq", bits=4, group_size=32, checkpoint_format="gptq_v2")
            tensors[0] = lazy(words.T.contiguous(), "x.qweight")
        done = dequantized(tensors, method)
        assert done and all(len(t.whole()) == t.shape[0] for t in done) and not kept()
