"""What makes a model fast when it is compiled: quicker modules of the same math, then functions.

On a CPU a model's layers become operations in C++ (cpu_layers.py); where those do not fit, one
block is compiled by Inductor and serves every layer. On a GPU the caller compiles a whole step;
here only modules are exchanged for it. Modules are found by their kind (nn.Linear, layers' and
ours) and by the names `layers`, `attn`, `embed_inputs`, `unembed` and `rings` of a model; its class
is not known here.

    compile_model(model)                           # a CPU
    prepare_for_cuda(model); step = CudaGraph(torch.compile(step))         # a GPU
"""

from collections.abc import Callable

import torch
from torch import nn

from kernels import cpu_ops, disk, inductor
from kernels.attention import OneQueryAttention
from kernels.cpu import BF16_WORDS, HAS_BF16
from kernels.cpu_layers import fits, use_operations, uses_operations
from kernels.cuda import has_kernels
from kernels.few_rows import fuse_layers
from kernels.functions import Compiled, Functions
from kernels.linear import MatvecLinear, PackedEmbedding, PackedLinear
from kernels.moe import FewRowsMoE, FusedExpertLinear
from layers.moe import ExpertLinear, MoE

QUICKER = {nn.Linear: MatvecLinear, ExpertLinear: FusedExpertLinear, MoE: FewRowsMoE}


def compile_model(model: nn.Module) -> None:
    """Make a model on a CPU run compiled, but within inductor.eager(). In place, once."""
    if is_compiled(model):
        return
    try:
        disk.writable()                            # no compiler can do without
    except OSError as e:
        inductor.note(f"{e}: this runs uncompiled")
        return
    if use_operations(model):
        return
    cpu_ops.take_all_threads()
    use_compiled_layouts(model)
    exchange_modules(model)
    for layer in model.layers:
        layer.attn.attend = OneQueryAttention(layer.attn.attend)
    functions = Functions()
    for layer in model.layers:
        layer.forward = Compiled(layer.forward, functions, cache="attn.cache")
    model.embed_inputs = OnePosition(model.embed_inputs, functions, "rings", "layers.")
    model.unembed = OnePosition(model.unembed, functions, "", ("layers.", "rings."))


def will_change_over(model: nn.Module) -> bool:
    """Is a compiler at work whose result the model can take up later?"""
    return model.freq.device.type == "cpu" and cpu_ops.is_building() and fits(model)


def change_over(model: nn.Module, step: Callable) -> Callable:
    """The step uncompiled until a compiler that runs beside it is done, then compiled; in the
    middle of a text too, because the cache stays.
    """
    waiting = [model]

    def run(*args):
        if waiting and not cpu_ops.is_building():
            compile_model(waiting.pop())
        return step(*args)
    return run


def is_compiled(model: nn.Module) -> bool:
    return isinstance(model.embed_inputs, OnePosition) or uses_operations(model)


def prepare_for_cuda(model: nn.Module) -> int:
    """Exchange what torch.compile would not fuse for few rows. In place; eager calls stay alike.

    -> how many positions a step should attend to at least. Our attention stops by itself at the
    last key in use, so that one graph serves every length; without it, few and short lengths do.
    """
    exchange_modules(model)
    if has_kernels(model.freq.device):
        fuse_layers(model)
        return model.cfg.context
    torch._inductor.config.coordinate_descent_tuning = True    # the products are Inductor's
    return 256


def exchange_modules(model: nn.Module) -> None:
    for module in model.modules():                 # tensors, hooks and submodules stay
        module.__class__ = QUICKER.get(type(module), type(module))


class OnePosition:
    """A method compiled for x [B, 1, …]: calls of several positions are rare, long, and eager."""

    def __init__(self, method: Callable, *more):
        self.method = method
        self.compiled = Compiled(method, *more)

    def __call__(self, x, *rest):
        return (self.compiled if x.shape[1] == 1 else self.method)(x, *rest)


def has_compiled_layout(module: nn.Module) -> bool:
    """Does compile_model() copy its weights into another layout?"""
    if isinstance(module, PackedLinear):
        return module.kernel.compiled is not None and len(module.shape) == 2
    return type(module) is nn.Linear and HAS_BF16 and module.weight.dtype == torch.bfloat16


def use_compiled_layouts(model: nn.Module) -> None:
    """Give the linears on a CPU the kernels and layouts that are the fastest when compiled."""
    for name in [name for name, m in model.named_modules() if has_compiled_layout(m)]:
        old = model.get_submodule(name)
        if isinstance(old, PackedLinear):
            shape = old.shape
            kernel, leaves = old.kernel.compiled(*old.leaves())
        else:
            shape, kernel = old.weight.shape, BF16_WORDS
            leaves = kernel.pack(old.weight)
        if leaves[0] is None:                      # such words are not for this matrix
            continue
        new = PackedLinear(shape, old.bias, kernel)
        new.set_leaves(leaves)
        new._forward_hooks.update(old._forward_hooks)          # of tensor parallelism
        model.set_submodule(name, new)
        if name == "head":
            share_with_embedding(model, old, new)


def share_with_embedding(model: nn.Module, old: nn.Module, new: PackedLinear) -> None:
    """Where the head's weight is the embedding's too, the packed one stays so."""
    for name, embed in list(model.named_modules()):
        if isinstance(embed, nn.Embedding | PackedEmbedding) and embed.weight is old.weight:
            scales = getattr(embed, "scales", None)
            model.set_submodule(name, PackedEmbedding(new, scales, model.dtype))
