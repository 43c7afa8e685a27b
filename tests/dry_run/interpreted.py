"""A hollow GPU with numbers: a Triton kernel that is launched is interpreted right there.

Its memory is the host's, so what ATen would launch runs too, as the CPU's operator of the same
name. All that decides what runs where stays torch's for a GPU. Slow: for tiny models. It needs
TRITON_INTERPRET in the environment, beside build.py's.

    interpreted.install(); torch.compile(f)(torch.ones(3, device="cuda"))
"""

import types

import numpy as np
import torch
import torch.nn.functional as F
import triton.language as tl
from torch.utils._pytree import tree_map
from triton.runtime import interpreter

from dry_run import device
from gpt_faster.kernels.cuda.graph import CudaGraph

# of ATen's operators those that stay a GPU's: memory, choices; fills are device.py's
KEPT = ("resize_", "set_", "_fused_sdp_choice", "_local_scalar_dense", "record_stream", "is_pinned",
        "fill_", "zero_")
_library = torch.library.Library("aten", "IMPL")


def install() -> None:
    """Once in a process, where TRITON_INTERPRET is set."""
    from torch._inductor.runtime import triton_helpers
    device.install(compile_kernels=True)           # Triton's: they are interpreted
    triton_helpers.libdevice = Libdevice()
    patch_language_once()
    CudaGraph._capture = capture                   # a replay would do nothing
    keys = [set(torch._C._dispatch_get_registrations_for_dispatch_key(k)) for k in ("CPU", "CUDA")]
    for name in sorted(keys[0] & keys[1]) + ["aten::copy_"]:
        space, _, full = name.partition("::")
        base, _, overload = full.partition(".")
        op = getattr(getattr(getattr(torch.ops, space), base), overload or "default")
        takes = [a for a in op._schema.arguments if "Tensor" in str(a.type)]
        views = any(r.alias_info and not r.alias_info.is_write for r in op._schema.returns)
        if space == "aten" and takes and not views and base not in KEPT:
            _library.impl(full, on_the_host(op), "CUDA")
    _library.impl("_scaled_dot_product_efficient_attention", efficient_attention, "CUDA")
    _library.impl("_fused_rms_norm", fused_rms_norm, "CUDA")


class Rerun:
    """A graph whose replay computes the step again, of what its tensors hold."""

    def __init__(self, step, args, out):
        self.step, self.args, self.out = step, args, out

    def replay(self):
        new = self.step(*self.args)
        pairs = [(self.out, new)] if isinstance(new, torch.Tensor) else zip(self.out, new)
        for old, t in pairs:
            if t is not None:
                old.copy_(t)


def capture(self, args):
    args = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    out = self.step(*args)
    return Rerun(self.step, args, out), [a for a in args if isinstance(a, torch.Tensor)], out


def patch_language_once() -> None:
    """Triton does it in every call of a function within a kernel, a sixth of the time."""
    patch, patched = interpreter._patch_lang, set()

    def once(function):
        modules = {id(tl), id(tl.core)} & set(map(id, function.__globals__.values()))
        if not modules <= patched:
            patched.update(modules)
            patch(function)
        return types.SimpleNamespace(restore=lambda: None)
    interpreter._patch_lang = once


class Libdevice:
    """CUDA's functions of numbers, by numpy."""

    def __getattr__(self, name: str):
        by_name = {"rsqrt": lambda x: 1 / np.sqrt(x), "pow": np.power}
        function = by_name.get(name) or getattr(np, name)

        def call(*args):
            data = function(*(a.handle.data for a in args)).astype(args[0].handle.data.dtype)
            return tl.tensor(interpreter.TensorHandle(data, args[0].handle.dtype), args[0].type)
        return call


def host(x):
    if isinstance(x, torch.Tensor) and x.is_cuda:
        return device.host(x)
    if isinstance(x, torch.device):
        return torch.device("cpu")
    return None if isinstance(x, torch.Generator) else x


def back(x):
    """Onto the device."""
    if not isinstance(x, torch.Tensor):
        return x
    y = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
    device.host(y).copy_(x)
    return y


def on_the_host(op):
    """An ATen operator of CUDA tensors that runs the CPU's."""
    arguments = op._schema.arguments
    out = [a.name for a in arguments if a.kwarg_only and a.is_out]
    written = [i for i, a in enumerate(arguments) if a.alias_info and not a.kwarg_only]

    def run(*args, **kwargs):
        outs = [kwargs[name] for name in out]
        new = {name: torch.empty(0, dtype=t.dtype) for name, t in zip(out, outs)}
        # by all its overloads: where a Tensor is meant, a number may come
        result = op.overloadpacket(*tree_map(host, args), **tree_map(host, kwargs) | new)
        for t, value in zip(outs, new.values()):
            if t.shape != value.shape:
                t.resize_(value.shape)
            device.host(t).copy_(value)
        if outs:
            return outs[0] if len(outs) == 1 else tuple(outs)
        if written and op._schema.returns:
            return args[written[0]]
        return tree_map(back, result)
    return run


def fused_rms_norm(x, shape, weight=None, eps=None):
    """Of the CPU there is none."""
    x, weight = map(host, (x, weight))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    scale = x.square().mean(tuple(range(-len(shape), 0)), keepdim=True).add(eps).rsqrt()
    y = x * scale if weight is None else x * scale * weight
    return back(y), back(scale)


def efficient_attention(q, k, v, bias, *args, scale=None, **kwargs):
    q, k, v, bias = map(host, (q, k, v, bias))
    y = F.scaled_dot_product_attention(q, k, v, bias, scale=scale)
    y = y.transpose(1, 2).contiguous().transpose(1, 2)         # its strides
    none = torch.empty(0)
    return tuple(map(back, (y, none, none, none)))
