"""MoE for few tokens: each row is multiplied by its own experts' weights, without sorting.

Compiled, the lookup of an expert's weights is fused with the matvec. On a CPU packed experts run by
one custom operator, because its loop depends on data.
"""

from itertools import groupby

import torch
from torch import Tensor

from gpt_faster.kernels.cpu.products import INT4_CPU, INT8_CPU
from gpt_faster.kernels.cuda.matvec import matvec
from gpt_faster.kernels.cuda.products import has_kernels
from gpt_faster.kernels.plain import PLAIN, Kernel
from gpt_faster.kernels.torch_internals import is_compiling
from gpt_faster.layers.moe import RoutedMoE
from model import ExpertLinear, MoE

KERNELS = {kernel.name: kernel for kernel in (PLAIN, INT8_CPU, INT4_CPU)}


class PerRowExperts:
    """If compiled, process each row on its own when there are no more rows than experts."""

    def takes_rows_one_by_one(self, x, n_row):
        is_small = is_compiling() and n_row <= self.n_expert
        return is_small or super().takes_rows_one_by_one(x, n_row)


class PerRowMoE(PerRowExperts, MoE):
    pass


class PerRowRoutedMoE(PerRowExperts, RoutedMoE):
    pass


class FusedExpertLinear(ExpertLinear):
    """Written as a sum: Inductor fuses the weight lookup with a sum, but not with a matmul."""

    def each_row(self, x, ids):
        if not is_compiling():
            return super().each_row(x, ids)
        if has_kernels(x.device):
            return matvec(x, self.weight, ids=ids)
        return (self.weight[ids].float() * x[:, None].float()).sum(-1).to(x.dtype)


def packed_rows(x: Tensor, ids: Tensor, tensors: tuple, kernel: Kernel, n_out: int) -> Tensor:
    """x [M, in], row i by the packed weights of expert ids[i] -> [M, out]."""
    if x.device.type == "cpu" and kernel.name in KERNELS:
        return expert_rows(x, ids, *tensors, kernel.name, n_out)
    if is_compiling() and kernel is not PLAIN:
        return matvec(x, *tensors, ids=ids)
    weight, scales, zeros = (t if t is None else t[ids] for t in tensors)
    w = kernel.dequantize(weight, scales, zeros, torch.float32)
    return (w * x[:, None].float()).sum(-1).to(x.dtype)


@torch.library.custom_op("gpt_faster::expert_rows", mutates_args=())
def expert_rows(x: Tensor, ids: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None,
                kernel: str, n_out: int) -> Tensor:
    """x [M, in], row i by the packed weights of expert ids[i]. One matmul per run of equal ids.

    A custom operator, because its loop depends on data. CPU only: a GPU would have to synchronize.
    """
    y, a = x.new_empty(x.shape[0], n_out), 0
    for e, group in groupby(ids.tolist()):
        b = a + len(list(group))
        zero = None if zeros is None else zeros[e]
        y[a:b] = KERNELS[kernel].product(x[a:b], weight[e], scales[e], zero)[:, :n_out]
        a = b
    return y


@expert_rows.register_fake
def _(x, ids, weight, scales, zeros, kernel, n_out):
    return x.new_empty(x.shape[0], n_out)
