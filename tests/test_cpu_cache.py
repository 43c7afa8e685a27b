"""C++ attention over caches of 8 and 4 bits: the codes of the plain form, and float64's sums over what they stand for."""

import ctypes

import pytest
import torch

from gpt_faster.kernels.cpu import native
from gpt_faster.kernels.cpu.mixers import cache_struct
from gpt_faster.layers.attention import ScoredAttention
from gpt_faster.layers.quantized_cache import QuantizedCache, decode, turn, turn_back
from model import KVCache, visible

pytestmark = pytest.mark.kernels

PRECISIONS = ("int8", "int4", "fp8")
HEADS = (24, 40, 64, 80, 96, 128, 256)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def new_cache(shape, precisions, is_turned):
    """precisions: of keys and values; None: fp32."""
    cache = QuantizedCache(shape, torch.float32, "cpu", precisions)
    width = shape[-1] & -shape[-1]
    cache.k_turn, cache.v_turn = (width, min(width, 64)) if is_turned else (1, 1)
    return cache


def run(cache, qkv, pos, mask, rope, rows=None, N=2, out_dtype=torch.float32, scale=0.3, cap=None, sinks=None, gate=None, has_keys=True):
    """qkv [B, T, (N + 2 K) H], pos [B, T], mask [B, 1, T, S] -> out [B, T, N H]; writes to the cache."""
    B, T, _ = qkv.shape
    n_row, K, S, _ = cache.k.shape
    H = cache.head_dim
    out = torch.empty(B, T, N * H, dtype=out_dtype)
    positions = native.Positions(
        n_key=mask.shape[-1], mask_stride_b=T * mask.shape[-1], mask_stride_t=mask.shape[-1], rope_stride_b=T * (H // 2), slot_stride_b=T,
        cos=rope[0].contiguous(), sin=rope[1].contiguous(), mask=mask.contiguous(), slot=pos.contiguous(), rows=rows)
    op = native.Attention(
        kind=native.ATTENTION, has_keys=has_keys, B=B, T=T, N=N, K=K, H=H, V=H, S=S, n_row=n_row, scale=scale, cap=cap or 0.0,
        positions=positions, sinks=sinks, gate=gate, qkv=qkv.clone(), out=out, k_cache=cache_struct(cache, "k"),
        v_cache=cache_struct(cache, "v"))
    native.run([ctypes.addressof(op)])
    return out


def contents(cache, name):
    """The keys or values that a cache stands for, in float64."""
    codes, scale = getattr(cache, name), getattr(cache, f"{name}_scale")
    m = getattr(cache, f"{name}_turn")
    matrix = turn(torch.eye(m, dtype=torch.float64), m)
    return (decode(codes, scale, getattr(cache, f"{name}_precision")).double().unflatten(-1, (-1, m)) @ matrix).flatten(-2)


def tensors_of(cache):
    return [t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t for t in cache.buffers()]


def hard_values(n, random):
    """Rows that quantizers trip over: zeros, one outlier, ties between codes, equal magnitudes, tiny and large numbers."""
    x = torch.randn(12, n, generator=random)
    x[0] = 0
    x[1, n // 2:] = 0
    x[2, 3] = 1e4
    x[3] = torch.arange(n) % 17 - 8.0                        # int4's codes and ties of int8's
    x[4] = (torch.arange(n) % 15 - 7) * 0.5 + 0.25
    x[5] = torch.tensor([-1.0, 1.0]).repeat(n // 2)          # the first of equal magnitudes decides int4's sign
    x[6] *= 1e-6                                             # scales that fp16 holds as subnormals, and
    x[7] *= 1e-9                                             # not at all
    x[8] *= 1e3
    x[9] = x[9].exp()
    return x


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_same_codes(precision, is_turned):
    """Bit for bit, where keys and values are the same floats (RoPE by 0): codes, scales, other slots untouched."""
    random = torch.Generator().manual_seed(5)
    for H in HEADS:
        k, v = hard_values(H, random)[None, None], hard_values(H, random).flip(0)[None, None]
        T = k.shape[2]
        ours, plain = (new_cache((1, 1, T + 4, H), (precision, precision), is_turned) for _ in range(2))
        qkv = torch.cat((torch.zeros(1, T, H), k[0], v[0]), -1)
        pos = torch.arange(2, T + 2)[None]
        rope = torch.ones(1, 1, T, H // 2), torch.zeros(1, 1, T, H // 2)
        run(ours, qkv, pos, visible(pos, torch.arange(T + 2)), rope, N=1)
        plain(pos, k, v, T, None)
        for mine, expected in zip(tensors_of(ours), tensors_of(plain)):
            torch.testing.assert_close(mine, expected, rtol=0, atol=0, msg=lambda text, H=H: f"{H}: {text}")


def check(seed, n_row, T, precisions, start, *, is_turned=False, window=None, cap=None, with_sinks=False, with_gate=False, hole=False,
          K=2, share=3, H=64, out_dtype=torch.float32, margin=3e-5):
    """T tokens of several rows behind a filled cache: what is stored, and float64's attention over it."""
    random = torch.Generator().manual_seed(seed)
    N, S, kv_len = K * share, start + T + 3, start + T + seed % 3
    cache = new_cache((n_row + 1, K, S, H), precisions, is_turned)
    before = torch.randn(2, n_row + 1, K, S, H, generator=random) * torch.randn(2, 1, K, 1, H, generator=random).exp()
    cache(torch.arange(S), *before, S, None)
    qkv = torch.randn(n_row, T, (N + 2 * K) * H, generator=random)
    rows = torch.randperm(n_row + 1, generator=random)[:n_row]
    pos = start + torch.arange(T).expand(n_row, T) - torch.arange(n_row)[:, None] * (start > n_row)
    angle = torch.randn(n_row, 1, T, H // 2, generator=random)
    cos, sin = angle.cos(), angle.sin()
    mask = visible(pos, torch.arange(kv_len), window)
    if hole:
        mask = mask & (torch.rand(mask.shape, generator=random) > 0.3)
        mask[..., 0] = True
    sinks = torch.randn(N, generator=random) if with_sinks else None
    gate = torch.randn(n_row, T, N * H, generator=random) if with_gate else None
    plain = new_cache((n_row + 1, K, S, H), precisions, is_turned)
    for mine, theirs in zip(plain.buffers(), cache.buffers()):
        mine.copy_(theirs)
    out = run(cache, qkv, pos, mask, (cos, sin), rows, N, out_dtype, 0.3, cap, sinks, gate)

    def rotated(x):
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    q, k, v = (t.transpose(1, 2) for t in qkv.view(n_row, T, -1, H).split((N, K, K), 2))
    q, k = rotated(q), rotated(k)
    plain(pos, k, v, kv_len, rows)
    for name, near in (("k", 2e-6), ("v", 1e-12)):           # another rounding of RoPE may change a code by one
        mine, theirs = contents(cache, name), contents(plain, name)
        apart = (mine - theirs).abs() > 1e-6 * theirs.abs().max()
        assert apart.float().mean() < 4e-3 * (getattr(cache, f"{name}_turn") + 1 if name == "k" else 0) + near, (name, apart.float().mean())
        assert (mine - theirs).abs().max() < 0.15 * theirs.abs().max()
    attend = ScoredAttention(0.3, N, cap, with_sinks)
    attend.sinks = sinks if sinks is None else torch.nn.Parameter(sinks.double())
    k, v = (contents(cache, name)[rows, :, :kv_len] for name in ("k", "v"))
    expected = attend(q.double(), k, v, mask).transpose(1, 2).reshape(n_row, T, -1)
    if with_gate:
        expected = expected * gate.double().sigmoid()
    error = float((out.double() - expected).abs().max() / v.abs().max())
    assert error < margin, error
    return error
