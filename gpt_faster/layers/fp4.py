"""fp4 weights (e2m1) in the file's own bits: NVFP4 and MXFP4 as schemes of quantize.py.

Owns their layout in memory and in a .pth, dequantization and the product in plain PyTorch. Knows no
file format: formats/fp4.py makes these leaves. Nothing is rounded to fp4 here, it is only read.

    nvfp4   weight uint8 [out, in/16 * 9]    blocks of 16 inputs: 8 bytes of codes, an e4m3 scale
    mxfp4   weight uint8 [out, in/32 * 17]   blocks of 32 inputs: 16 bytes, an e8m0 scale
    both    scales fp32 [out]                w = e2m1(code) * the block's scale * the row's scale
            a byte holds two adjacent codes, the first one in the low nibble

    w = NVFP4.dequantize(weight, scales, None, torch.bfloat16)   # [out, in]
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quantize import Scheme, unpack_nibbles


@dataclass(frozen=True)
class Fp4(Scheme):
    """Blocks of `groupsize` adjacent weights of a row with a scale of one byte."""

    name: str = "nvfp4"
    groupsize: int = 16
    scale_dtype: torch.dtype = torch.float8_e4m3fn     # of the byte; e8m0: a power of two

    @property
    def block_bytes(self) -> int:
        return self.groupsize // 2 + 1

    def leaves(self, shape):
        *lead, n_in = shape
        n_byte = n_in // self.groupsize * self.block_bytes
        return {"weight": ((*lead, n_byte), torch.uint8), "scales": (tuple(lead), torch.float32)}

    def fits(self, n_in):
        return n_in % self.groupsize == 0

    def split(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The leaf `weight` -> codes [..., in/G, G/2], scale bytes [..., in/G]."""
        blocks = weight.unflatten(-1, (-1, self.block_bytes))
        return blocks[..., :-1], blocks[..., -1]

    def block_scales(self, scale_bytes: Tensor) -> Tensor:
        """fp32, exact. By arithmetic, since not every GPU converts these dtypes."""
        b = scale_bytes.int()
        if self.scale_dtype == torch.float8_e8m0fnu:
            power = _power_of_two(b.clamp(min=1) - 127)
            return torch.where(b == 0, 0.5 * power, power)     # 2^-127 is subnormal
        exponent, mantissa = b >> 3 & 15, b & 7
        mantissa = torch.where(exponent > 0, mantissa + 8, mantissa)
        size = mantissa.float() * _power_of_two(exponent.clamp(min=1) - 10)
        return torch.where(b > 127, -size, size)

    def dequantize(self, weight, scales, zeros, dtype):
        codes, scale_bytes = self.split(weight)
        if torch.compiler.is_compiling():
            values, block_scales = e2m1(unpack_nibbles(codes)), self.block_scales(scale_bytes)
        else:                                      # the same numbers from tables: far fewer passes
            values = _look_up(codes, e2m1(unpack_nibbles(EVERY_BYTE[:, None]))).flatten(-2)
            block_scales = _look_up(scale_bytes, self.block_scales(EVERY_BYTE)[:, None])[..., 0]
        w = values.mul_(block_scales[..., None]).flatten(-2)
        return w.mul_(scales[..., None].float()).to(dtype)

    def product(self, x, weight, scales, zeros):
        """As quantize.product(): compiled, one row is fused with the dequantization."""
        if not (torch.compiler.is_compiling() and x.shape[0] == 1):
            return F.linear(x, self.dequantize(weight, scales, None, x.dtype))
        w = self.dequantize(weight, scales, None, torch.float32)
        return (w * x.float()).sum(-1).to(x.dtype)[None]


NVFP4 = Fp4()
MXFP4 = Fp4("mxfp4", 32, torch.float8_e8m0fnu)


def e2m1(codes: Tensor) -> Tensor:
    """Codes 0 to 15, a sign, two bits of exponent and one of mantissa -> 0, 0.5, 1, … 6 in fp32.

    Twice the value is piecewise linear and convex in the lower three bits: 0 1 2 3 4 6 8 12.
    """
    m = (codes & 7).float()
    size = 0.5 * torch.maximum(m, torch.maximum(2 * m - 4, 4 * m - 16))
    return torch.where(codes > 7, -size, size)


EVERY_BYTE = torch.arange(256, dtype=torch.uint8)


def _look_up(of_bytes: Tensor, table: Tensor) -> Tensor:
    """table [256, n] -> [..., n]"""
    return F.embedding(of_bytes.int(), table.to(of_bytes.device))


def _power_of_two(n: Tensor) -> Tensor:
    """2^n in fp32, for int32 n from -126 to 128 (infinity)."""
    return (n + 127 << 23).view(torch.float32)


def scheme_of_width(n_byte: int, n_in: int) -> Fp4 | None:
    """The scheme whose rows of n_in weights have n_byte bytes."""
    return next((scheme for scheme in (NVFP4, MXFP4)
                 if scheme.fits(n_in) and scheme.leaves((n_in,))["weight"][0] == (n_byte,)), None)
