"""A few instructions of PTX on a CPU, of whole warps: what tensor cores make of our products.

    a, b = run(mma.INT4, inputs, 2)                # inputs: int32 [warps, 32] for each register

The fragments of mma.m16n8k32 are those of the PTX manual: register i of A has row g + 8 (i % 2),
columns 4 t + 16 (i // 2) and the next three, of B the same of its column g, of C row g + 8 (i // 2)
and column 2 t + i % 2, for lane 4 g + t.
"""

import re

import numpy as np

LANE = np.arange(32)
G, T = LANE // 4, LANE % 4


def run(text: str, inputs: list, n_out: int) -> list[np.ndarray]:
    """inputs: $n_out and the following -> $0 to $(n_out - 1)."""
    values = {f"${n_out + i}": np.ascontiguousarray(v).view(np.uint32)
              for i, v in enumerate(inputs)}
    for line in text.strip()[1:-1].split(";"):
        if not line.strip() or line.strip().startswith(".reg"):
            continue
        name, operands = line.strip().split(None, 1)
        operands = [re.findall(r"[$\w]+", o) for o in re.findall(r"\{[^}]*\}|[$\w]+", operands)]
        read = [[values[o] if o in values else np.uint32(int(o, 0)) for o in group]
                for group in operands[1:]]
        results = execute(name, read)
        for target, value in zip(operands[0], results, strict=True):
            values[target] = np.broadcast_to(value, np.shape(inputs[0]))
    return [values[f"${i}"] for i in range(n_out)]


def execute(name: str, read: list) -> list[np.ndarray]:
    first = [group[0] for group in read]
    if name == "mov.b32":
        return [first[0]]
    if name == "and.b32":
        return [first[0] & first[1]]
    if name == "lop3.b32":
        assert first[3] == 0xEA, "only (a & b) | c"
        return [first[0] & first[1] | first[2]]
    if name == "fma.rn.bf16x2":
        return [fma_bf16x2(*first)]
    if name == "shr.u32":
        return [first[0] >> first[1]]
    if name == "mad.lo.s32":
        return [first[0] * first[1] + first[2]]
    if name == "cvt.rn.f32.s32":
        return [first[0].view(np.int32).astype(np.float32)]
    kinds = re.fullmatch(r"mma\.sync\.aligned\.m16n8k32\.row\.col\.s32\.(u8|s8)\.(u8|s8)\.s32", name)
    if not kinds:
        raise NotImplementedError(name)
    return mma(*read, *kinds.groups())


def mma(a, b, c, kind_a: str, kind_b: str) -> list[np.ndarray]:
    n_warp = a[0].shape[0]
    A, B = np.zeros((n_warp, 16, 32), np.int64), np.zeros((n_warp, 32, 8), np.int64)
    C = np.zeros((n_warp, 16, 8), np.int64)
    for i in range(4):
        for byte in range(4):
            A[:, G + 8 * (i % 2), 4 * T + 16 * (i // 2) + byte] = bytes_of(a[i], kind_a)[..., byte]
            if i < 2:
                B[:, 4 * T + 16 * i + byte, G] = bytes_of(b[i], kind_b)[..., byte]
        C[:, G + 8 * (i // 2), 2 * T + i % 2] = np.broadcast_to(c[i], a[0].shape).view(np.int32)
    C += A @ B
    assert abs(C).max(initial=0) < 2**31, "the sums do not fit into int32"
    return [C[:, G + 8 * (i // 2), 2 * T + i % 2].astype(np.int32).view(np.uint32) for i in range(4)]


def fma_bf16x2(a, b, c) -> np.ndarray:
    """a b + c of both halves of a word, rounded once, to even."""
    fraction, exponent = np.frexp(halves(a) * halves(b) + halves(c))
    rounded = np.ldexp(np.rint(fraction * 256), exponent - 8)  # bfloat16 has 8 bits
    bits = rounded.astype(np.float32).view(np.uint32) >> 16
    return (bits[..., 0] | bits[..., 1] << 16).astype(np.uint32)


def halves(words) -> np.ndarray:
    """bfloat16 [...] of two -> float64 [..., 2], the low one first."""
    words = np.asarray(words, np.uint32)
    pair = np.stack(np.broadcast_arrays(words << np.uint32(16), words & np.uint32(0xFFFF0000)), -1)
    return np.ascontiguousarray(pair).view(np.float32).astype(np.float64)


def bytes_of(words: np.ndarray, kind: str) -> np.ndarray:
    return np.ascontiguousarray(words)[..., None].view(np.uint8 if kind == "u8" else np.int8)
