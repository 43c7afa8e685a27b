"""A mixture of experts with few tokens: each row reads its own experts' weights, no sorting.

Compiled, indexing and product are one pass. Packed experts on a CPU go by one operator, whose loop
depends on data.
"""

from itertools import groupby

import torch
from torch import Tensor

from gpt_faster.kernels.cpu.products import INT4_CPU, INT8_CPU
from gpt_faster.kernels.cuda.matvec import matvec
from gpt_faster.kernels.cuda.products import has_kernels
from gpt_faster.kernels.plain import PLAIN, Kernel
from gpt_faster.kernels.private import is_compiling
from gpt_faster.layers.moe import RoutedMoE
from model import ExpertLinear, MoE
from quantize import dequantize

KERNELS = {kernel.name: kernel for kernel in (PLAIN, INT8_CPU, INT4_CPU)}


class FewRows:
    """No more rows than experts, compiled: one by one."""

    def takes_rows_one_by_one(self, x, n_row):
        few = is_compiling() and n_row <= self.n_expert
        return few or super().takes_rows_one_by_one(x, n_row)


class FewRowsMoE(FewRows, MoE):
    pass


class FewRowsRoutedMoE(FewRows, RoutedMoE):
    pass


class FusedExpertLinear(ExpertLinear):
    """Inductor fuses the indexing with a sum, but not with a matrix product."""

    def each_row(self, x, ids):
        if not is_compiling():
            return super().each_row(x, ids)
        if has_kernels(x.device):
            return matvec(x, self.weight, ids=ids)
        return (self.weight[ids].float() * x[:, None].float()).sum(-1).to(x.dtype)


def packed_rows(x: Tensor, ids: Tensor, leaves: tuple, kernel: Kernel, n_out: int) -> Tensor:
    """Each row of x [M, in] by its own expert's packed weights -> [M, out]."""
    if x.device.type == "cpu" and kernel.name in KERNELS:
        return expert_rows(x, ids, *leaves, kernel.name, n_out)
    if is_compiling() and kernel is not PLAIN:
        return matvec(x, *leaves, ids=ids)
    weight, scales, zeros = (t if t is None else t[ids] for t in leaves)
    w = dequantize(weight, scales, zeros, torch.float32)
    return (w * x[:, None].float()).sum(-1).to(x.dtype)


@torch.library.custom_op("gpt_faster::expert_rows", mutates_args=())
def expert_rows(x: Tensor, ids: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None,
                kernel: str, n_out: int) -> Tensor:
    """Each row of x [M, in] by its own expert's packed weights, neighbours of the same together.

    An operator because its loop depends on data, which only a CPU may read at no cost.
    """
    y, a = x.new_empty(x.shape[0], n_out), 0
    for e, same in groupby(ids.tolist()):
        b = a + len(list(same))
        zero = None if zeros is None else zeros[e]
        y[a:b] = KERNELS[kernel].product(x[a:b], weight[e], scales[e], zero)[:, :n_out]
        a = b
    return y


@expert_rows.register_fake
def _(x, ids, weight, scales, zeros, kernel, n_out):
    return x.new_empty(x.shape[0], n_out)
