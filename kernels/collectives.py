"""What ranks add up and gather: collectives that a compiler can trace.

torch has them under private names only. Where these are gone, the public ones do the same, and a
compiled function is split around them.

    y = all_reduce(x)
"""

import torch
import torch.distributed as dist
from torch import Tensor

SHORT = 1 << 14                                    # numbers


def all_gather(x: Tensor) -> Tensor:
    """Every rank's x, in the order of the ranks -> [n, *x.shape]"""
    x, n = x.contiguous(), dist.get_world_size()
    try:
        ops = torch.ops._c10d_functional
        out = ops.wait_tensor(ops.all_gather_into_tensor(x, n, dist.group.WORLD.group_name))
    except AttributeError:
        out = x.new_empty(n * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(out, x)
    return out.view(n, *x.shape)


def all_reduce(x: Tensor) -> Tensor:
    """The sum of every rank's x. A short one on a CPU is gathered: gloo takes half as long."""
    if x.device.type == "cpu" and x.numel() <= SHORT:
        return all_gather(x).float().sum(0).to(x.dtype)
    try:
        ops = torch.ops._c10d_functional
        return ops.wait_tensor(ops.all_reduce(x, "sum", dist.group.WORLD.group_name))
    except AttributeError:
        x = x.clone()
        dist.all_reduce(x)
        return x
