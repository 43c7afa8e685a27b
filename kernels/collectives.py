"""What ranks add up and gather: collectives that a compiler can trace.

torch has them under private names only (private.py). Where these are gone, the public ones do the
same for what runs uncompiled.

    y = all_reduce(x)
"""

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.private import functional_collective

SHORT = 1 << 14                                    # numbers


def sum_over_ranks(module, args, y: Tensor) -> Tensor:
    """A forward hook of tensor parallelism (tp.py); the kernels call it where they take the
    module's place."""
    return all_reduce(y)


def join_logits(module, args, y: Tensor) -> Tensor:
    """A forward hook of a head whose vocabulary the ranks share."""
    return torch.cat(all_gather(y).unbind(), dim=-1)


def is_summed(module: torch.nn.Module) -> bool:
    """Do the ranks sum what it gives?"""
    return sum_over_ranks in module._forward_hooks.values()


def all_gather(x: Tensor) -> Tensor:
    """Every rank's x, in the order of the ranks -> [n, *x.shape]"""
    x, n = x.contiguous(), dist.get_world_size()
    out = functional_collective("all_gather_into_tensor", x, n)
    if out is None:
        out = [torch.empty_like(x) for _ in range(n)]
        dist.all_gather(out, x)
        return torch.stack(out)
    return out.view(n, *x.shape)


def broadcast(x: Tensor) -> Tensor:
    """Rank 0's x on every rank."""
    out = functional_collective("broadcast", x, 0)
    if out is None:
        out = x.clone()
        dist.broadcast(out, 0)
    return out


def all_reduce(x: Tensor) -> Tensor:
    """The sum of every rank's x. A short one on a CPU is gathered: gloo takes half as long."""
    if x.device.type == "cpu" and x.numel() <= SHORT:
        return all_gather(x).float().sum(0).to(x.dtype)
    out = functional_collective("all_reduce", x, "sum")
    if out is None:
        out = x.clone()
        dist.all_reduce(out)
    return out
