"""Linears and the embedding in a kernel's layout, and the linear whose single row is a matvec."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.cuda import has_kernels
from kernels.matvec import MOST_ROWS, matvec
from kernels.plain import Kernel, dequantize
from kernels.private import is_compiling


class MatvecLinear(nn.Linear):
    """A single row compiles to a fused matvec; everything else is F.linear."""

    def forward(self, x):
        if not is_compiling():
            return F.linear(x, self.weight, self.bias)
        n_row = x.shape[:-1].numel()
        if n_row <= MOST_ROWS and has_kernels(x.device):
            y = matvec(x.reshape(n_row, -1), self.weight, bias=self.bias)
            return y.view(*x.shape[:-1], -1)
        if n_row == 1:
            y = (self.weight.float() * x.view(-1).float()).sum(-1)
            y = y if self.bias is None else y + self.bias.float()
            return y.to(x.dtype).view(*x.shape[:-1], -1)
        return F.linear(x, self.weight, self.bias)


class PackedLinear(nn.Module):
    """A Linear whose tensors have the layout of a kernel's: those that are not None.

    names: what they are called. On a CPU's operations the weight is not: nobody edits it by chance.
    """

    names = "weight", "scales", "zeros"

    def __init__(self, shape: torch.Size, bias: Tensor | None, kernel: Kernel):
        super().__init__()
        self.shape = shape
        self.bias = bias
        self.kernel = kernel
        for name in self.names:
            setattr(self, name, None)

    def leaves(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return tuple(getattr(self, name) for name in self.names)

    def set_leaves(self, leaves) -> None:
        for name, t in zip(self.names, leaves):
            if t is not getattr(self, name):       # else it may be shared with the embedding
                setattr(self, name, t if t is None else nn.Parameter(t, requires_grad=False))

    def forward(self, x):
        y = self.kernel.product(x.reshape(-1, x.shape[-1]), *self.leaves())
        y = y[:, :self.shape[0]].view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


class PackedEmbedding(nn.Module):
    """Shares the head's weight, and has its scales [V], if any: then it is int8."""

    names = "weight", "scales"

    def __init__(self, head: PackedLinear, scales: Tensor | None, dtype: torch.dtype):
        super().__init__()
        setattr(self, self.names[0], head.leaves()[0])
        self.scales = scales
        self.dtype = dtype
        self.kernel = head.kernel
        self.dim = head.shape[1]

    def forward(self, ids):
        rows = self.kernel.rows(getattr(self, self.names[0]), ids)[..., :self.dim]
        if self.scales is None:
            return rows
        return dequantize(rows, self.scales[ids], None, self.dtype)
