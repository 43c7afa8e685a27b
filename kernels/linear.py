"""Linears and the embedding in a kernel's layout, and the linear whose single row is a matvec."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.cuda import has_kernels
from kernels.inductor import is_compiling
from kernels.matvec import MOST_ROWS
from kernels.matvec import matvec as few_rows
from kernels.plain import Kernel, dequantize

LARGE = 1 << 22                                    # weights


def matvec(weight, x):
    """weight [out, in] by x [in] -> [out], fp32, as sums that a compiler makes one pass of.

    On a CPU that is two to three times the speed of its mm: two halves side by side, which keeps
    more reads under way, and of a large bf16 matrix two neighbours in a word, of which a shift and
    a mask make floats. as_strided has Inductor write x out, not make it again for each row.
    """
    n, x = len(x), x.float()
    if x.device.type != "cpu":                     # one that has no kernels of ours
        return (weight.float() * x).sum(-1)
    if weight.dtype == torch.bfloat16 and weight.numel() >= LARGE and n % 2 == 0:
        even, odd = x.view(-1, 2).T.contiguous().as_strided((2, n // 2), (n // 2, 1))
        halves = weight.view(torch.float32).view(torch.int32).chunk(2)
        halves = [(words << 16).view(torch.float32) * even
                  + (words & -65536).view(torch.float32) * odd for words in halves]
    else:
        x = x.as_strided((n,), (1,))
        halves = [half.float() * x for half in weight.chunk(2)]
    return torch.cat([half.sum(-1) for half in halves])


class MatvecLinear(nn.Linear):
    """A single row compiles to a fused matvec; everything else is F.linear."""

    def forward(self, x):
        if not is_compiling():
            return F.linear(x, self.weight, self.bias)
        n_row = x.shape[:-1].numel()
        if n_row <= MOST_ROWS and has_kernels(x.device):
            y = few_rows(x.reshape(n_row, -1), self.weight, bias=self.bias)
            return y.view(*x.shape[:-1], -1)
        if n_row == 1:
            y = matvec(self.weight, x.view(-1))
            y = y if self.bias is None else y + self.bias.float()
            return y.to(x.dtype).view(*x.shape[:-1], -1)
        return F.linear(x, self.weight, self.bias)


class PackedLinear(nn.Module):
    """A Linear whose tensors have the layout of a kernel's: those that are not None."""

    def __init__(self, shape: torch.Size, bias: Tensor | None, kernel: Kernel):
        super().__init__()
        self.shape = shape
        self.bias = bias
        self.kernel = kernel
        self.weight = self.scales = self.zeros = None

    def leaves(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return self.weight, self.scales, self.zeros

    def set_leaves(self, leaves) -> None:
        for name, t in zip(("weight", "scales", "zeros"), leaves):
            if t is not getattr(self, name):       # else it may be shared with the embedding
                setattr(self, name, t if t is None else nn.Parameter(t, requires_grad=False))

    def forward(self, x):
        y = self.kernel.product(x.reshape(-1, x.shape[-1]), *self.leaves())
        y = y[:, :self.shape[0]].view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


class PackedEmbedding(nn.Module):
    """Shares the head's weight, and has its scales [V], if any: then it is int8."""

    def __init__(self, head: PackedLinear, scales: Tensor | None, dtype: torch.dtype):
        super().__init__()
        self.weight = head.weight
        self.scales = scales
        self.dtype = dtype
        self.kernel = head.kernel
        self.dim = head.shape[1]

    def forward(self, ids):
        rows = self.kernel.rows(self.weight, ids)[..., :self.dim]
        if self.scales is None:
            return rows
        return dequantize(rows, self.scales[ids], None, self.dtype)
