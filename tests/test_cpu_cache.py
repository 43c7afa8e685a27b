"""C++ attention over caches of 8 and 4 bits: the codes of the plain form, and float64's sums over what they stand for."""

import ctypes

import pytest
import tiny
import torch

from gpt_faster.formats.load import load_model, read_checkpoint
from gpt_faster.kernels.cpu import layers as cpu_layers
from gpt_faster.kernels.cpu import native
from gpt_faster.kernels.cpu.mixers import cache_struct
from gpt_faster.layers.attention import ScoredAttention
from gpt_faster.layers.quantized_cache import CacheFormat, QuantizedCache, decode, turn
from model import visible

pytestmark = pytest.mark.kernels

PRECISIONS = ("int8", "int4", "fp8")
HEADS = (16, 24, 32, 36, 40, 64, 80, 96, 128, 256)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def new_cache(shape, precisions, is_turned):
    """precisions: of keys and values."""
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


def stored(cache, name):
    """What codes and scales stand for, still turned."""
    codes, scale = getattr(cache, name), getattr(cache, f"{name}_scale")
    return decode(codes, scale, getattr(cache, f"{name}_precision")).double()


def contents(cache, name):
    """The keys or values that a cache stands for, in float64."""
    m = getattr(cache, f"{name}_turn")
    matrix = turn(torch.eye(m, dtype=torch.float64), m)
    return (stored(cache, name).unflatten(-1, (-1, m)) @ matrix).flatten(-2)


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


def check_codes(precisions, H, is_turned=False):
    """Bit for bit, where keys and values are the same floats (RoPE by 0): codes, scales, other slots untouched."""
    random = torch.Generator().manual_seed(5)
    k, v = hard_values(H, random)[None, None], hard_values(H, random).flip(0)[None, None]
    T = k.shape[2]
    ours, plain = (new_cache((1, 1, T + 4, H), precisions, is_turned) for _ in range(2))
    pos = torch.arange(2, T + 2)[None]
    rope = torch.ones(1, 1, T, H // 2), torch.zeros(1, 1, T, H // 2)
    run(ours, torch.cat((torch.zeros(1, T, H), k[0], v[0]), -1), pos, visible(pos, torch.arange(T + 2)), rope, N=1)
    plain(pos, k, v, T, None)
    for mine, expected in zip(ours.buffers(), plain.buffers()):
        torch.testing.assert_close(mine.float(), expected.float(), rtol=0, atol=0)         # fp8 has a 0 of either sign


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_same_codes(precision, is_turned):
    for H in HEADS:
        check_codes((precision, precision), H, is_turned)


def logits_of(model, tokens, cut):
    """In two pieces, then token by token, by the cache."""
    model.setup_cache(1, tokens.shape[1] + 3, 16)
    at, found = 0, []
    for n in (cut, 9, *[1] * (tokens.shape[1] - cut - 9)):
        found.append(model(tokens[:, at:at + n], torch.arange(at, at + n), n, at + n + 1))
        at += n
    return torch.cat(found, 1)


def check(seed, n_row, T, precisions, start, *, is_turned=False, window=None, cap=None, with_sinks=False, with_gate=False, hole=False,
          K=2, share=3, H=64, out_dtype=torch.float32):
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
    out = run(cache, qkv, pos, mask, (cos, sin), rows, N, out_dtype, H**-0.5, cap, sinks, gate)

    def rotated(x):
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    q, k, v = (t.transpose(1, 2) for t in qkv.view(n_row, T, -1, H).split((N, K, K), 2))
    q, k = rotated(q), rotated(k)
    plain(pos, k, v, kv_len, rows)
    apart = (stored(cache, "k") - stored(plain, "k")).abs() / stored(plain, "k").abs().max()
    assert (apart > 1e-3).double().mean() < 0.01 and apart.max() < 0.14      # RoPE may be rounded otherwise, to the next code
    torch.testing.assert_close(stored(cache, "v"), stored(plain, "v"), rtol=0, atol=0)
    attend = ScoredAttention(H**-0.5, N, cap, with_sinks)
    attend.sinks = sinks if sinks is None else torch.nn.Parameter(sinks.double())
    k, v = (contents(cache, name)[rows, :, :kv_len] for name in ("k", "v"))
    expected = attend(q.double(), k, v, mask).transpose(1, 2).reshape(n_row, T, -1)
    if with_gate:
        expected = expected * gate.double().sigmoid()
    error = float((out.double() - expected).abs().max() / v.abs().max())
    # bf16: of the output, and where a CPU has its products of tiles. int16: of queries, by integer keys.
    margin = 1e-2 if out_dtype == torch.bfloat16 else 5e-6 if precisions[0] == "fp8" else 1e-4
    assert error < margin, (error, precisions, H, T)


ALL = [("int8", "int8"), ("int4", "int4"), ("fp8", "fp8"), ("int8", "int4"), ("int4", "fp8")]


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("precisions", ALL)
def test_attention(precisions, one_thread):
    """Heads, shared keys, one token to many, behind blocks of keys that are full or not."""
    for H in HEADS:
        check(H, 2, 1, precisions, 130, H=H, is_turned=H % 3 == 1)
        check(H + 1, 1, 5, precisions, 63, H=H, is_turned=True)
        check(H + 2, 1, 70, precisions, 9, H=H, share=1, out_dtype=torch.bfloat16)
    for share in (1, 2, 4, 7, 8, 16):
        for T in (1, 2, 3, 4):
            check(share, 1, T, precisions, 64 * share + T, share=share, is_turned=T % 2 == 0)
    for start in (0, 1, 63, 64, 65, 127, 255, 256, 900):
        check(start, 1 + start % 2, 1 + start % 3, precisions, start)
    for T in (33, 200):
        check(T, 2, T, precisions, 40, share=2, is_turned=True)


def test_keys_split_over_threads(two_threads):
    for precisions in ALL:
        check(5, 1, 1, precisions, 900, is_turned=True)


@pytest.mark.parametrize("precisions", [("int8", "int8"), ("int4", "int4"), ("fp8", "int4")])
def test_windows_caps_sinks_gates_and_holes(precisions):
    for T, start in ((1, 300), (3, 70), (40, 20)):
        check(T, 2, T, precisions, start, window=9, with_sinks=True)
        check(T, 2, T, precisions, start, cap=2.0, with_gate=True, is_turned=True)
        check(T, 1, T, precisions, start, hole=True, with_sinks=True, cap=5.0, with_gate=True, is_turned=True)


def test_a_mask_that_hides_all_keys():
    """Without a sink too, there is nothing to weigh: as in a cache of floats, no number, and no crash."""
    cache = new_cache((1, 1, 80, 64), ("int4", "int4"), True)
    pos = torch.tensor([[70]])
    out = run(cache, torch.randn(1, 1, 3 * 64), pos, torch.zeros(1, 1, 1, 80, dtype=torch.bool),
              (torch.ones(1, 1, 1, 32), torch.zeros(1, 1, 1, 32)), N=1, sinks=torch.zeros(1))
    assert (out == 0).all()


def test_queries_of_another_layers_cache():
    """They are turned as the keys are, and nothing is written (Gemma 4)."""
    random = torch.Generator().manual_seed(3)
    for T in (1, 40):
        cache = new_cache((1, 2, 64, 64), ("int8", "int4"), True)
        k, v = torch.randn(2, 1, 2, 64, 64, generator=random)
        cache(torch.arange(64), k, v, 64, None)
        before = [t.clone() for t in cache.buffers()]
        q = torch.randn(1, T, 4 * 64, generator=random)
        pos = torch.arange(64 - T, 64)[None]
        mask = visible(pos, torch.arange(64))
        out = run(cache, q, pos, mask, (torch.ones(1, 1, T, 32), torch.zeros(1, 1, T, 32)), N=4, has_keys=False)
        attend = ScoredAttention(0.3, 4, None, False)
        expected = attend(q.view(1, T, 4, 64).transpose(1, 2).double(), contents(cache, "k"), contents(cache, "v"), mask)
        torch.testing.assert_close(out.double(), expected.transpose(1, 2).flatten(2), rtol=0, atol=1e-3)
        assert all(map(torch.equal, before, cache.buffers()))


@pytest.mark.parametrize("wrong, message", [
    (dict(codes=torch.zeros(1, 1, 4, 64, dtype=torch.int8), scales=None), "must have scales"),
    (dict(codes=torch.zeros(1, 1, 4, 64, dtype=torch.int8), scales=torch.zeros(1, 1, 4, 3, dtype=torch.float16)), "must have scales"),
    (dict(codes=torch.zeros(1, 1, 4, 32, dtype=torch.uint8), scales=torch.zeros(1, 1, 4, 1, dtype=torch.float16)), "must have scales"),
    (dict(codes=torch.zeros(1, 1, 4, 64, dtype=torch.int8), scales=torch.zeros(1, 1, 4, 2)), "scales must be torch.float16"),
    (dict(codes=torch.zeros(1, 1, 4, 64), scales=torch.zeros(1, 1, 4, 2, dtype=torch.float16)), "must have scales None"),
    (dict(codes=torch.zeros(1, 1, 4, 64, dtype=torch.float16)), "not torch.float16"),
])
def test_caches_that_do_not_fit(wrong, message):
    with pytest.raises(TypeError, match=message):
        native.cache_of(**wrong)


# ---- Models -------------------------------------------------------------------------------------

NAMES = ["llama3", "qwen3", "gemma2", "gpt_oss", "mistral-window", "gemma4", "olmo2"]


def distance(a, b):
    return float((a - b).abs().mean())


@pytest.mark.parametrize("precision", ["int8", "int4", "fp8", "int8/int4"])
@pytest.mark.parametrize("name", NAMES)
def test_models(families, name, precision):
    """The layers' own attention, over rings and shared caches too: nearer to the plain form than that is to an exact cache."""
    model = load_model(read_checkpoint(families(name)[0]), torch.float32, "cpu")
    tokens = torch.randint(3, 150, (1, 30), generator=torch.Generator().manual_seed(1))
    exact = logits_of(model, tokens, 6)
    model.kv_cache = CacheFormat.parse(precision)
    plain = logits_of(model, tokens, 6)
    assert cpu_layers.use_operations(model)
    ours = logits_of(model, tokens, 6)
    assert all(layer.forward.supported[0] for layer in model.layers)
    assert distance(ours, plain) < 0.3 * distance(plain, exact)      # a code that is rounded otherwise changes those behind it


@pytest.mark.parametrize("precision", ["int8", "int4", "fp8", "int8/int4", "int4/int8"])
@pytest.mark.parametrize("name", ["qwen3", "llama3"])
def test_models_in_bf16(families, name, precision):
    """Teacher-forced: no farther from float32 over such a cache than eager PyTorch is, by more than a tenth.

    Keys that bfloat16 rounds otherwise get the next code where they are near a tie, which moves logits more than the rounding itself.
    """
    directory, draw = families(name)[0], torch.Generator().manual_seed(1)
    texts = [torch.randint(3, 150, (1, 60), generator=draw) for _ in range(4)]
    found = {}
    for how, dtype in (("exact", torch.float32), ("eager", torch.bfloat16), ("ours", torch.bfloat16)):
        model = load_model(read_checkpoint(directory), dtype, "cpu")
        model.kv_cache = CacheFormat.parse(precision)
        assert how != "ours" or cpu_layers.use_operations(model)
        found[how] = torch.cat([logits_of(model, text, 36) for text in texts]).float()
    assert distance(found["ours"], found["exact"]) < 1.1 * distance(found["eager"], found["exact"])


@pytest.mark.parametrize("name", [name for name in tiny.FAMILIES if name.startswith(("deepseek_v3", "glm4_moe_lite"))])
def test_latents(families, name):
    """One vector a token, its first part also the value."""
    model = load_model(read_checkpoint(families(name)[0]), torch.float32, "cpu")
    tokens = torch.randint(3, 150, (1, 30), generator=torch.Generator().manual_seed(1))
    exact = logits_of(model, tokens, 6)
    model.kv_cache = CacheFormat.parse("int8")
    plain = logits_of(model, tokens, 6)
    assert cpu_layers.use_operations(model) and distance(plain, exact) > 0
    assert distance(logits_of(model, tokens, 6), plain) < 0.3 * distance(plain, exact)
