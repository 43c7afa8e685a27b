"""Products with int8, int4 and packed bf16 weights: a Kernel per device, each beside a plain one.

Owns the layouts in memory. Knows no modules, no files and not which linear gets which kernel: that
is quantize.py's. On disk (see quantize.py) and in, everywhere, G divides in:

    int8: weight int8 [out, in], scales [out]                    w = weight * scale
    int4: weight uint8 [out, in/2], scales, zeros [out, in/G]    w = (q - 8) * scale + zero

    weight, scales, zeros = INT4_CPU.pack(weight, scales, zeros)
    y = INT4_CPU.product(x, weight, scales, zeros)               # [M, in] -> [M, out]
"""

import ctypes
from collections.abc import Callable
from functools import cache
from itertools import groupby
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import inductor as compiled


class Kernel(NamedTuple):
    """pack: the tensors on disk -> the same three in the kernel's layout. product: as above.

    rows: pack's weight, ids [...] -> those rows as on disk [..., in], where a head may also be an
    embedding. compiled: the packed three -> a Kernel that is faster under a compiler, its three.
    """

    name: str
    product: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    pack: Callable = lambda weight, scales, zeros: (weight, scales, zeros)
    rows: Callable[[Tensor, Tensor], Tensor] = lambda weight, ids: weight[ids]
    compiled: Callable | None = None


# ---- Plain: any device, any dtype, and the reference of the others ------------------------------

def pairs(q: Tensor) -> Tensor:
    """Numbers 0 to 15 [..., in] -> bytes [..., in/2], the first of two neighbours low."""
    return q[..., ::2].to(torch.uint8) | q[..., 1::2].to(torch.uint8) << 4


def unpaired(weight: Tensor) -> Tensor:
    return torch.stack((weight & 15, weight >> 4), -1).flatten(-2)


def dequantize(weight: Tensor, scales: Tensor, zeros: Tensor | None, dtype) -> Tensor:
    """The weights [..., out, in] that the numbers stand for, computed in fp32."""
    if zeros is None:
        return (weight.float() * scales[..., None].float()).to(dtype)
    q = unpaired(weight).float().unflatten(-1, (scales.shape[-1], -1)) - 8
    return (q * scales[..., None].float() + zeros[..., None].float()).flatten(-2).to(dtype)


def plain(x, weight, scales, zeros):
    """One row, compiled: a pass over the numbers, as model.Linear does. Else by way of weights."""
    if not (torch.compiler.is_compiling() and x.shape[0] == 1):
        return F.linear(x, dequantize(weight, scales, zeros, x.dtype))
    if zeros is None:
        y = (weight.float() * x.float()).sum(-1) * scales.float()
    else:
        y = (dequantize(weight, scales, zeros, torch.float32) * x.float()).sum(-1)
    return y.to(x.dtype)[None]


PLAIN = Kernel("plain", plain)


# ---- CPU ----------------------------------------------------------------------------------------
# For a few rows ATen's kernels stream the packed weights as fast as they can be turned into floats.
# For many, a CPU with bf16 arithmetic is faster at unpacking them once; one without is not.

AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
HAS_BF16 = AVX512 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
SCRATCH = 1 << 24                                  # weights unpacked at a time
_scratch = {}


def scratch(n: int, dtype=torch.bfloat16) -> Tensor:
    """Memory that is always the same: fresh pages cost more than what is done with them."""
    if n > _scratch.get(dtype, torch.empty(0)).numel():
        with torch.inference_mode(False):          # whoever calls: it serves everyone
            _scratch[dtype] = torch.empty(n, dtype=dtype)
    return _scratch[dtype][:n]


def pack_int8_cpu(weight, scales, zeros=None):
    """-> [out, in/4], the bits of four numbers in a float32; those of column j:

    byte    0      1         2         3         Inductor loads float32 at the memory's speed,
    column  j   j + in/4  j + in/2  j + 3in/4    int8 at a fifth of it; x needs no reordering
    """
    four = weight.unflatten(-1, (4, -1)).transpose(-1, -2).contiguous()
    return four.view(torch.float32).squeeze(-1), scales, None


def unpack_int8_cpu(weight):
    return weight.view(torch.int8).unflatten(-1, (-1, 4)).transpose(-1, -2).flatten(-2)


def int8_rows(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Several rows, by ATen's kernel, or many: int8 becomes bf16 exactly, the scales can wait."""
    weight, n_out, n_in = weight.view(torch.int8), weight.shape[0], x.shape[1]
    x = x.unflatten(-1, (4, -1)).transpose(-1, -2).reshape(x.shape)        # the columns' order
    if x.dtype == torch.bfloat16 and (x.shape[0] <= 16 or not HAS_BF16):
        return torch.ops.aten._weight_int8pack_mm(x, weight, scales)
    y, step = x.new_empty(x.shape[0], n_out), max(1, SCRATCH // n_in)
    for a in range(0, n_out, step):
        part, scale = weight[a:a + step], scales[a:a + step]
        w = scratch(part.numel(), x.dtype).view_as(part).copy_(part)
        if x.dtype == torch.float16:                       # whose sums might overflow
            w.mul_(scale[:, None])
            scale = scale.new_ones(())
        torch.mul(F.linear(x, w), scale, out=y[:, a:a + step])
    return y


int8_rows_op = torch.library.custom_op("gpt_faster::int8_rows", int8_rows, mutates_args=())
int8_rows_op.register_fake(lambda x, weight, scales: x.new_empty(x.shape[0], weight.shape[0]))


def int8_cpu(x, weight, scales, zeros=None):
    if not torch.compiler.is_compiling():
        return int8_rows(x, weight, scales)
    if x.shape[0] > 1:
        return int8_rows_op(x, weight, scales)
    # as_strided has Inductor write x to memory as fp32: beside bf16 it loads two vectors at once,
    # and then its view of float32 as int32 is slow
    quarters = x.float().as_strided((4, x.shape[1] // 4), (x.shape[1] // 4, 1))

    def sums(four):
        byte = (four << 24 >> 24, four << 16 >> 24, four << 8 >> 24, four >> 24)   # signed
        return sum(b.float() * q for b, q in zip(byte, quarters)).sum(-1)
    y = torch.cat([sums(half) for half in weight.view(torch.int32).chunk(2)])      # side by side
    return (y * scales.float()).to(x.dtype)[None]


def scales_and_zeros(scales, zeros, n_in):
    """[out, in/G] each -> [in/G', out, 2], G' the largest group of ATen's that divides G."""
    group = n_in // scales.shape[1]
    times = group // next(g for g in (256, 128, 64, 32) if group % g == 0)
    both = torch.stack((scales, zeros), -1).repeat_interleave(times, 1)
    return both.transpose(0, 1).contiguous()


def pack_int4_cpu(weight, scales, zeros):
    """-> bytes [out', in/2], scales and zeros [in/G, out', 2], out' being out rounded up to 64."""
    n_out = weight.shape[0]
    padded, step = -(-n_out // 64) * 64, max(64, SCRATCH // (weight.shape[1] * 2) // 64 * 64)
    packed = weight.new_empty(padded, weight.shape[1])
    for a in range(0, padded, step):
        q = unpaired(weight[a:a + step]).int()
        q = F.pad(q, (0, 0, 0, min(step, padded - a) - q.shape[0]))
        packed[a:a + step] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q, 1)
    both = scales_and_zeros(scales, zeros, weight.shape[1] * 2)
    return packed, F.pad(both, (0, 0, 0, padded - n_out)), None


@cache
def int4_block() -> tuple[int, bool]:
    """How many rows a block of ATen's has, [in, rows/2] bytes; are a byte's two rows neighbours, or
    half a block apart? 64 and apart on AVX-512, 32 and apart on AVX2; else neighbours, 16 or 32.
    """
    def first_column(q):
        q = torch.stack((q, torch.zeros(64, dtype=torch.int32)), 1)
        return torch.ops.aten._convert_weight_to_int4pack_for_cpu(q, 1).flatten().tolist()
    ones = torch.ones(64, dtype=torch.int32)
    return 2 * first_column(ones).index(0), first_column(ones.cumsum(0).eq(2).int())[0] != 0


def unpack_int4_cpu(weight):
    """Whole blocks only."""
    rows, neighbours = int4_block()
    blocks = weight.view(-1, weight.shape[1] * 2, rows // 2)
    q = torch.stack((blocks & 15, blocks >> 4), -1 if neighbours else -2)
    return pairs(q.flatten(-2).transpose(1, 2).flatten(0, 1))


def int4_rows(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Many rows, on AVX-512: unpack blocks of columns of w' [in, out], then multiply."""
    n_group, n_out, _ = scales.shape
    n_in = weight.shape[1] * 2
    y, step = x.new_empty(x.shape[0], n_out), max(64, SCRATCH // n_in // 64 * 64)
    for a in range(0, n_out, step):
        n = min(step, n_out - a)
        block = weight[a:a + n].view(n // 64, n_in, 32)
        half = scratch(block.numel(), torch.uint8).view_as(block)
        w = scratch(n_in * n).view(n_in, n // 64, 2, 32)
        for i, unpack in enumerate((torch.bitwise_and, torch.bitwise_right_shift)):
            unpack(block, (15, 4)[i], out=half)
            w[:, :, i].transpose(0, 1).copy_(half.view(torch.int8).sub_(8))
        scale, zero = scales[:, None, a:a + n].unbind(-1)                  # [in/G, 1, n]
        w = w.view(n_group, -1, n)
        torch.addcmul(zero.contiguous(), w, scale.contiguous(), out=w)     # 5 times as fast
        torch.mm(x, w.view(n_in, n), out=y[:, a:a + n])
    return y


int4_rows_op = torch.library.custom_op("gpt_faster::int4_rows", int4_rows, mutates_args=())
int4_rows_op.register_fake(lambda x, weight, scales: x.new_empty(x.shape[0], scales.shape[1]))


def int4_cpu(x, weight, scales, zeros=None):
    if x.shape[0] > 96 and HAS_BF16:
        many = int4_rows_op if torch.compiler.is_compiling() else int4_rows
        return many(x, weight, scales)
    group = 2 * weight.shape[1] // scales.shape[0]
    return torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), weight, group, scales)


# ---- CPU, under a compiler ----------------------------------------------------------------------
# Weights are float32 words of neighbouring columns, with a block of rows side by side: for one row
# of x, or a few, a loop of Inductor's reads ahead, unpacks and sums. For more oneDNN is faster,
# where there is bf16 arithmetic, if weights have the order that it would give them: words of two,
# for blocks of 64 rows. In bf16 they lie so for good; int4 is turned into it a piece at a time,
# small enough for a cache. out' is out rounded up to 64.
#
#     bf16 [out'/64, in/2, 64]                       int4 [out'/16, in/G, G/8, 16], as in ATen's

PIECE = 1 << 21                                    # weights
_ordered = WeakValueDictionary()                   # where words begin -> oneDNN's tensor


def onednn_order(weight: Tensor) -> Tensor | None:
    """weight [out, in] bf16 -> words, a copy; None where oneDNN's order is another on this CPU, or
    blocks would be filled up with too much.
    """
    n_out, n_in = weight.shape
    if n_in % 2 or -n_out % 64 * 8 > n_out:
        return None
    if n_out % 64:
        weight = F.pad(weight, (0, 0, 0, -n_out % 64))
    ordered = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    if torch.ops.mkldnn._nbytes(ordered) != 2 * weight.numel():
        return None
    memory = _bytes(2 * weight.numel()).from_address(torch.ops.mkldnn.data_ptr(ordered))
    memory.ordered = ordered                       # lives as long as the words do
    words = torch.frombuffer(memory, dtype=torch.float32).view(-1, n_in // 2, 64)
    _ordered[words.data_ptr()] = ordered
    new, old = words.view(torch.int32), weight.view(torch.float32).view(torch.int32)
    same = torch.equal(new[0].T, old[:64]) and torch.equal(new[:, -1].flatten(), old[:, -1])
    return words if same else None


@cache
def _bytes(n: int) -> type:
    return type("Bytes", (ctypes.c_char * n,), {})


def words_to_bf16(words: Tensor, ids: Tensor) -> Tensor:
    """Rows of the weight: ids [...] -> [..., in]."""
    return words[ids // 64, :, ids % 64].view(torch.bfloat16)


def bf16_rows(x: Tensor, words: Tensor) -> Tensor:
    w = _ordered.get(words.data_ptr())
    if w is None:                                  # they are a copy, which oneDNN knows nothing of
        return F.linear(x, words_to_bf16(words, torch.arange(words.shape[0] * 64)))
    return torch.ops.mkldnn._linear_pointwise(x.contiguous(), w, None, "none", [], "")


bf16_rows_op = torch.library.custom_op("gpt_faster::bf16_rows", bf16_rows, mutates_args=())
bf16_rows_op.register_fake(lambda x, words: x.new_empty(x.shape[0], words.shape[0] * 64))


def bf16_words_cpu(x, words, scales=None, zeros=None):
    if not torch.compiler.is_compiling():
        return bf16_rows(x, words)
    if x.shape[0] > 1:
        return bf16_rows_op(x, words)
    each = x.float().as_strided((x.shape[1] // 2, 2, 1), (2, 1, 1))        # in memory
    words = words.view(torch.int32).unflatten(-1, (4, 16)).unbind(2)       # four sums at once
    y = [((some << 16).view(torch.float32) * each[:, 0]
          + (some & -65536).view(torch.float32) * each[:, 1]).sum(1) for some in words]
    return torch.stack(y, 1).view(1, -1).to(x.dtype)


@cache
def ordered_memory(n_out: int, n_in: int) -> Tensor | None:
    """Words that oneDNN takes for a bf16 weight [out, in], to be written over."""
    with torch.inference_mode(False):              # whoever calls: it serves everyone
        return onednn_order(torch.arange(n_out * n_in).remainder(251).view(n_out, -1).bfloat16())


def int4_words(weight, both, _):
    """From ATen's: bits 4b to 4b + 3 of a word are column b of eight. Scale and zero in a word,
    [out'/16, in/G, 16]; what masked numbers lack in size [8], where zeros would be.
    """
    both = both.view(torch.float32)[..., 0].t().unflatten(0, (-1, 16)).mT.contiguous()
    words = torch.empty(len(both), weight.shape[1] // 4, 16)
    for some, part in zip(weight.split(64), words.split(4)):
        part.copy_(unpack_int4_cpu(some).contiguous().view(torch.float32).unflatten(0, (-1, 16)).mT)
    words = words.unflatten(1, (both.shape[1], -1))
    lacking = torch.tensor([16.0 ** -b if b < 7 else 1 for b in range(8)])
    for n_row in 1, 64:                            # have compiled what they call
        x = torch.zeros(n_row, weight.shape[1] * 2, dtype=torch.bfloat16)
        int4_words_rows(x, words[:4], both[:4], lacking)
    return INT4_WORDS, (words, both, lacking)


def factor_and_term(scales: Tensor) -> tuple[Tensor, Tensor]:
    both = scales.view(torch.int32)
    scale, zero = (both << 16).view(torch.float32), (both & -65536).view(torch.float32)
    return scale, zero - 8 * scale


def int4_sums(x: Tensor, weight: Tensor, scales: Tensor, lacking: Tensor) -> Tensor:
    """x [P, M, in/G, G/8, 8] -> [P M, out'], in P passes over 16 rows of weights, which then are in
    the cache; M rows of x share the unpacking.
    """
    x_each = x.permute(2, 3, 0, 1, 4).float().contiguous()
    sums, x_each = (t.as_strided(t.shape, t.stride())                      # in memory
                    for t in (x_each.sum(-1), x_each * lacking))
    words = weight.view(torch.int32)[:, None]
    q = [(words & 15 << 4 * b if b < 7 else words >> 28 & 15).float() for b in range(8)]
    scale, term = (t[:, None, :, None] for t in factor_and_term(scales))
    x_each, sums = x_each.permute(4, 3, 2, 0, 1)[..., None], sums.permute(3, 2, 0, 1)[..., None]
    y = [(sum(q[b] * x_each[b, m] for b in range(8)) * scale + term * sums[m]).sum((2, 3))
         for m in range(x.shape[1])]
    return torch.stack(y).permute(2, 0, 1, 3).flatten(0, 1).flatten(1).to(x.dtype)


def int4_weights(weight: Tensor, scales: Tensor) -> list[Tensor]:
    """[..., in/G, G/8, 16] -> eight columns of floats like that."""
    scale, term = (t[..., None, :] for t in factor_and_term(scales))
    return [(weight.view(torch.int32) >> 4 * b & 15).float() * scale + term for b in range(8)]


def int4_to_bf16(weight: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    """[O, 4, in/G, G/8, 16] -> out [O, in/G, G/8, 4, 4, 16]: words of two, in oneDNN's order."""
    bits = [w.view(torch.int32) + (1 << 15) for w in int4_weights(weight, scales)]     # rounded
    words = [low >> 16 & 65535 | high & -65536 for low, high in zip(bits[::2], bits[1::2])]
    return out.copy_(torch.stack(words, -2).view(torch.float32).movedim(1, -2))


def int4_to_fp32(weight: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    """-> out [in/G, G/8, 8, O, 4, 16]: transposed."""
    return out.copy_(torch.stack(int4_weights(weight, scales), -2).movedim((0, 1), (-3, -2)))


@cache
def for_any_matrix(n_word: int, fast: bool) -> tuple[Callable, Callable]:
    """int4_sums with 2 rows a pass, and one of those above, compiled as prompts are not."""
    x, words = torch.empty(43, 2, 37, n_word, 8).bfloat16(), torch.empty(41, 37, n_word, 16)
    sums = compiled.once(int4_sums, x, words, torch.empty(41, 37, 16), torch.empty(8))
    words, scales = torch.empty(41, 4, 37, n_word, 16), torch.empty(41, 4, 37, 16)
    if fast:
        out = torch.empty(41, 37, n_word, 4, 4, 16)
        return sums, compiled.once(int4_to_bf16, words, scales, out)
    out = torch.empty(37, n_word, 8, 41, 4, 16)
    return sums, compiled.once(int4_to_fp32, words, scales, out)


def int4_words_rows(x: Tensor, weight: Tensor, scales: Tensor, lacking: Tensor) -> Tensor:
    (n_row, n_in), (_, n_group, n_word, _) = x.shape, weight.shape
    fast = HAS_BF16 and ordered_memory(64, n_in) is not None
    sums, unpack = for_any_matrix(n_word, fast)
    if n_row <= (16 if fast else 40):
        x = F.pad(x, (0, 0, 0, n_row % 2)).contiguous().view(-1, 2, n_group, n_word, 8)
        return sums(x, weight, scales, lacking)[:n_row]
    weight, scales = (t.unflatten(0, (-1, 4)) for t in (weight, scales))   # 64 rows
    n_thread = torch.get_num_threads()
    step = max(1, PIECE // (64 * n_in * n_thread)) * n_thread
    y, x = x.new_empty(n_row, len(weight) * 64), x if fast else x.float()
    for a in range(0, len(weight), step):
        some, out = (weight[a:a + step], scales[a:a + step]), y[:, 64 * a:64 * (a + step)]
        if fast:
            w = ordered_memory(out.shape[1], n_in)
            unpack(*some, w.view(-1, n_group, n_word, 4, 4, 16))
            out.copy_(bf16_rows(x, w))
        else:
            w = scratch(out.shape[1] * n_in, torch.float32)
            unpack(*some, w.view(n_group, n_word, 8, -1, 4, 16))
            out.copy_(x @ w.view(n_in, -1))
    return y


int4_words_rows_op = torch.library.custom_op("gpt_faster::int4_words_rows", int4_words_rows,
                                             mutates_args=())
int4_words_rows_op.register_fake(lambda x, weight, scales, lacking: x.new_empty(
    x.shape[0], weight.shape[0] * 16))


def int4_words_cpu(x, weight, scales, lacking):
    n_row, _ = x.shape
    if not torch.compiler.is_compiling():
        return int4_words_rows(x, weight, scales, lacking)
    if n_row > 16:
        return int4_words_rows_op(x, weight, scales, lacking)
    passes = -(-n_row // 4)
    each = -(-n_row // passes)
    x = F.pad(x, (0, 0, 0, passes * each - n_row)).reshape(passes, each, *weight.shape[1:3], 8)
    return int4_sums(x, weight, scales, lacking)[:n_row]


INT8_CPU = Kernel("int8 cpu", int8_cpu, pack_int8_cpu,
                  lambda weight, ids: unpack_int8_cpu(weight[ids]))
INT4_CPU = Kernel("int4 cpu", int4_cpu, pack_int4_cpu, compiled=int4_words)
BF16_WORDS = Kernel("bf16 words cpu", bf16_words_cpu,
                    lambda weight, *_: (onednn_order(weight), None, None), words_to_bf16)
INT4_WORDS = Kernel("int4 words cpu", int4_words_cpu,
                    lambda *leaves: int4_words(*pack_int4_cpu(*leaves))[1])


@torch.library.custom_op("gpt_faster::expert_rows", mutates_args=())
def expert_rows(x: Tensor, ids: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None,
                kernel: str, n_out: int) -> Tensor:
    """Each row of x [M, in] by its own expert's packed weights, neighbours of the same together.

    An operator because its loop depends on data, which only a CPU may read at no cost.
    """
    y, a = x.new_empty(x.shape[0], n_out), 0
    for e, same in groupby(ids.tolist()):
        b, zero = a + len(list(same)), None if zeros is None else zeros[e]
        y[a:b] = KERNELS[kernel].product(x[a:b], weight[e], scales[e], zero)[:, :n_out]
        a = b
    return y


@expert_rows.register_fake
def _(x, ids, weight, scales, zeros, kernel, n_out):
    return x.new_empty(x.shape[0], n_out)


# ---- CUDA, bfloat16, compute capability 8.0 and later -------------------------------------------

def pack_int4_cuda(weight, scales, zeros):
    """tinygemm's tiles [out/8, in/(16 i), 32, i/2] int32, i = 8, 4 or 2; scales as on a CPU."""
    inner = next(i for i in (8, 4, 2) if weight.shape[1] * 2 % (16 * i) == 0)
    step = max(8, SCRATCH // (weight.shape[1] * 2) // 8 * 8)
    tiles = [torch.ops.aten._convert_weight_to_int4pack(rows[:, 1::2] | rows[:, ::2] << 4, inner)
             for rows in map(unpaired, weight.split(step))]
    return torch.cat(tiles), scales_and_zeros(scales, zeros, weight.shape[1] * 2), None


def int4_cuda(x, weight, scales, zeros=None):
    group = weight.shape[1] * weight.shape[3] * 32 // scales.shape[0]
    return torch.ops.aten._weight_int4pack_mm(x.contiguous(), weight, group, scales)


INT4_CUDA = Kernel("int4 cuda", int4_cuda, pack_int4_cuda)
KERNELS = {k.name: k for k in (PLAIN, INT8_CPU, INT4_CPU, INT4_WORDS, INT4_CUDA)}
