"""Products of codes on a GPU's tensor cores, as far as a CPU can tell: the kernel's PTX on emulated
fragments, fed as triton_quantized.py does. scripts/dev/gpu_dryrun.py --only products runs the kernel.
"""

import numpy as np
import pytest
import torch
from dry_run import ptx

import quantize
from gpt_faster.kernels.cuda import matvec, mma
from gpt_faster.kernels.cuda import products as kernels
from gpt_faster.kernels.linear import PackedLinear

pytestmark = pytest.mark.kernels


def digits_of(x, n, largest):
    """x [blocks, B] -> n signed bytes of each number, the highest first, and the power of each block."""
    power = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / largest
    r = (x / power).round().long()
    digits = []
    for _ in range(n):
        low = (r + 128) % 256 - 128
        digits.insert(0, low)
        r = (r - low) // 256
    assert not r.any()
    return digits, power


def words(codes):
    """[..., 4] bytes -> [...] int32, the first in the lowest bits."""
    return np.ascontiguousarray(codes.numpy().astype(np.uint8)).view(np.int32)[..., 0]


def int4_sums(text, codes, x, column=2 * ptx.T):
    """codes [16, 128], x [128] -> each lane's sums of its own block by the PTX, for two rows.

    column: of B, where the first digit of a lane's block stands, the second in the next."""
    (high, low), power = digits_of(x.view(4, 32), 2, 32512)
    packed = quantize.pack_nibbles(codes).numpy().view(np.int32).reshape(16, 4, 4)             # [row, t, word]
    inputs = [packed[ptx.G, ptx.T, i] for i in range(4)] + [packed[ptx.G + 8, ptx.T, i] for i in range(4)]
    digit = torch.stack((high, low)).view(2, 4, 4, 4, 2)                                        # [digit, t, word, byte, odd]
    digit = np.where((ptx.G // 2 * 2 == column)[:, None, None], words(digit.movedim(-1, -2))[ptx.G % 2, ptx.T], 0)
    inputs += [digit[:, i, odd] for i in range(4) for odd in range(2)]
    a, b = ptx.run(text, [v[None].astype(np.int32) for v in inputs], 2)
    scale = power[ptx.T, 0].numpy()
    return a[0] * scale, b[0] * scale


def expected_int4(codes, x):
    blocks = (codes.double().view(16, 4, 32) * x.double().view(4, 32)).sum(-1).numpy()           # [row, t]
    return blocks[ptx.G, ptx.T], blocks[ptx.G + 8, ptx.T]


def error(found, expected):
    found, expected = np.concatenate(found), np.concatenate(expected)
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("outliers", [False, True])
def test_a_lane_gets_the_sum_of_its_own_block(outliers):
    codes, x = torch.randint(0, 16, (16, 128)), torch.randn(128)
    if outliers:
        x[::29] *= 300
    assert error(int4_sums(mma.INT4, codes, x), expected_int4(codes, x)) < 1e-4


@pytest.mark.parametrize("before, after", [("{a0,a1,a2,a3}", "{a0,a2,a1,a3}"), ("{$10,$11}", "{$11,$10}"),
                                           ("shr.u32 a2, $3, 4", "shr.u32 a2, $7, 4"), ("c0, 256, c1", "c1, 256, c0")])
def test_a_register_in_anothers_place_is_seen(before, after):
    codes, x = torch.randint(0, 16, (16, 128)), torch.randn(128)
    assert before in mma.INT4
    assert error(int4_sums(mma.INT4.replace(before, after), codes, x), expected_int4(codes, x)) > 1e-2


def test_digits_in_another_lanes_column_are_seen():
    codes, x = torch.randint(0, 16, (16, 128)), torch.randn(128)
    assert error(int4_sums(mma.INT4, codes, x, 2 * ((ptx.T + 1) % 4)), expected_int4(codes, x)) > 1e-2


@pytest.mark.parametrize("n_row", [1, 2])
def test_int8_digits_of_two_rows_share_the_columns(n_row):
    codes, x = torch.randint(-127, 128, (16, 64)), torch.randn(n_row, 64)
    parts = [digits_of(row[None], 3, 4128768) for row in x]
    columns = [part.view(4, 4, 4) for digits, _ in parts for part in digits]                     # [t, word, byte]
    columns += [torch.zeros(4, 4, 4)] * (8 - len(columns))
    rows = words(codes.view(16, 4, 4, 4))                                                        # [row, t, word]
    b = words(torch.stack(columns))
    inputs = [rows[ptx.G, ptx.T, i] for i in range(4)] + [rows[ptx.G + 8, ptx.T, i] for i in range(4)]
    inputs += [b[ptx.G, ptx.T, i] for i in range(4)] + [np.zeros(32)] * 4
    c = [v[0].view(np.int32) for v in ptx.run(mma.INT8, [v[None].astype(np.int32) for v in inputs], 4)]
    sums = np.zeros((16, 8))
    for i in range(4):
        sums[ptx.G + 8 * (i // 2), 2 * ptx.T + i % 2] = c[i]
    for m in range(n_row):
        found = sums[:, 3 * m:3 * m + 3] @ [65536, 256, 1] * parts[m][1].item()
        assert error([found], [(codes.double() @ x[m].double()).numpy()]) < 1e-5


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_edited_and_replaced_scales_are_used_or_refused(mode):
    """The packed module's tensors are the only copies."""
    scheme = quantize.scheme_named(mode, 32)
    linear = quantize.QuantizedLinear(torch.nn.Linear(64, 16, bias=False), scheme, torch.float32)
    leaves = scheme.quantize(torch.randn(16, 64))
    for name, t in leaves.items():
        setattr(linear, name, torch.nn.Parameter(t.float() if t.is_floating_point() else t, requires_grad=False))
    kernel = kernels.INT8_CUDA if mode == "int8" else kernels.INT4_CUDA
    packed, x = PackedLinear.of(linear, kernel), torch.randn(3, 64)
    packed.pack()
    before = packed(x)
    torch.testing.assert_close(before, linear(x))
    torch.testing.assert_close(matvec.matvec(x, *packed.tensors()), before)
    with torch.no_grad():
        packed.scales *= 2                         # scales and zeros
    torch.testing.assert_close(packed(x), 2 * before)
    packed.scales = torch.nn.Parameter(packed.scales / 2, requires_grad=False)
    torch.testing.assert_close(packed(x), before)
    state = {name: t.clone() for name, t in packed.state_dict().items()}
    packed.load_state_dict(state)
    torch.testing.assert_close(packed(x), before)
    packed.scales = torch.nn.Parameter(torch.ones(2, 16, 2), requires_grad=False)
    if mode == "int4":
        packed.scales = torch.nn.Parameter(leaves["scales"].float(), requires_grad=False)      # without its zeros
    with pytest.raises(ValueError, match="scales .* for codes .* assign both together"):
        packed(x)


@pytest.mark.parametrize("mode", ["none", "int8", "int4"])
def test_experts_that_are_parts_of_a_stacked_matrix(mode):
    """Gates and ups of experts are views of one matrix (stack_gates): rows lie between two experts."""
    both, x, ids = torch.randn(3, 32, 64), torch.randn(4, 64), torch.tensor([2, 0, 1, 2])
    if mode == "none":
        part, scales = both[:, 16:], None
    else:
        leaves = quantize.scheme_named(mode, 32).quantize(both.view(96, 64))
        weight, scales, _ = kernels.pack(leaves["weight"], leaves["scales"], leaves.get("zeros"))
        part, scales = (t.unflatten(0, (3, 32))[:, 16:] for t in (weight, scales))
    y = matvec.matvec(x, part, scales, ids=ids)
    again = matvec.matvec(x, part.contiguous(), None if scales is None else scales.contiguous(), ids=ids)
    assert torch.equal(y, again)


def weights_of(text, words, *more, n_out):
    """16 bits [n] -> the bfloat16 of each register [n_out, n]."""
    pairs = [np.ascontiguousarray(v).view(np.uint32) for v in (words, *more)]
    return torch.from_numpy(np.stack([ptx.halves(w).reshape(-1) for w in ptx.run(text, pairs, n_out)]))


def int4_weights(text, codes, scale, zero):
    """codes [n, 4], scale and zero [n] -> weights [n, 4]."""
    words = quantize.pack_nibbles(codes).numpy().view(np.uint16)[:, 0]
    more = [t.view(torch.int16).numpy() for t in (scale, zero)]
    return weights_of(text, words, *more, n_out=4).T


def test_weights_of_int4_codes_are_quantize_pys_in_bfloat16():
    codes = torch.stack([torch.arange(4096) >> 4 * i & 15 for i in range(4)], -1)
    scale, zero = (torch.randn(4096) * 0.01).bfloat16(), (torch.randn(4096) * 0.02).bfloat16()
    exact = (codes.double() - 8) * scale.double()[:, None] + zero.double()[:, None]
    found = int4_weights(mma.INT4_WEIGHTS, codes, scale, zero)
    assert ((found - exact).abs() <= exact.abs() * 2**-8).all()                                # half of the last bit
    plain = quantize.dequantize(quantize.pack_nibbles(codes), scale[:, None], zero[:, None], torch.bfloat16)
    assert (found != plain.double()).float().mean() < 1e-3                 # ties that fp32 makes of none


@pytest.mark.parametrize("before, after", [("$4, 8", "$4, 12"), ("a, i, b", "a, i, i"), ("a, $5, $6", "a, $6, $5"),
                                           ("0x000f000f", "0x0007000f"), ("0xc308c308", "0xc307c308")])
def test_a_fault_in_int4s_weights_is_seen(before, after):
    codes = torch.randint(0, 16, (64, 4))
    scale, zero = torch.rand(2, 64).bfloat16() + 0.1
    assert before in mma.INT4_WEIGHTS
    right, wrong = (int4_weights(text, codes, scale, zero)
                    for text in (mma.INT4_WEIGHTS, mma.INT4_WEIGHTS.replace(before, after)))
    assert (right - wrong).abs().max() > 0.01


def test_weights_of_int8_codes_are_exact():
    codes = torch.arange(-128, 128).repeat(2).to(torch.int8)
    codes = torch.cat((codes, codes[torch.randperm(512)]))
    words = codes.view(torch.int16).numpy()
    assert torch.equal(weights_of(mma.INT8_WEIGHTS, words, n_out=2).T.flatten(), codes.double())
    for before, after in (("0x007f007f", "0x00ff007f"), ("$2, 8", "$2, 7"), ("b, m, a", "a, m, b")):
        assert before in mma.INT8_WEIGHTS
        wrong = weights_of(mma.INT8_WEIGHTS.replace(before, after), words, n_out=2).T.flatten()
        assert not torch.equal(wrong, codes.double())


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_the_prompts_operator_is_the_plain_product_on_a_cpu(mode):
    leaves = quantize.scheme_named(mode, 32).quantize(torch.randn(24, 96))
    weight, scales, _ = kernels.pack(leaves["weight"], leaves["scales"], leaves.get("zeros"))
    x = torch.randn(11, 96, dtype=torch.bfloat16)
    y = kernels.prompt_product(x, weight, scales)
    assert torch.equal(y, quantize.product(x, *(leaves.get(name) for name in quantize.LEAVES)))
    compiled = torch.compile(kernels.prompt_product, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, weight, scales), y)


def test_a_product_is_made_by_rows_and_dtype(monkeypatch):
    """Few compiled rows: one pass; a prompt's: fused; more, or in fp32: written out."""
    way, most = [], kernels.MAX_FUSED_ROWS
    monkeypatch.setattr(kernels, "has_kernels", lambda device: True)
    for name in ("matvec", "prompt_product", "dequantize"):
        def call(x, *args, name=name, right=getattr(kernels, name)):
            way.append(name)
            return args[0].new_zeros(8, 32) if name == "dequantize" else x
        monkeypatch.setattr(kernels, name, call)
    monkeypatch.setattr(kernels.F, "linear", lambda x, w: x)
    codes, scales = torch.zeros(8, 32, dtype=torch.int8), torch.ones(8)
    for compiled in (False, True):
        monkeypatch.setattr(kernels, "is_compiling", lambda compiled=compiled: compiled)
        for n in (0, 1, 8, 9, most, most + 1):
            kernels.product(torch.zeros(n, 32, dtype=torch.bfloat16), codes, scales)
        kernels.product(torch.zeros(9, 32), codes, scales)
    fused, out = "prompt_product", "dequantize"
    assert way == [out, fused, fused, fused, fused, out, out,
                   "matvec", "matvec", "matvec", fused, fused, out, out]
