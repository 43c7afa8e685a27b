"""What makes a model fast when it is compiled: operations on a CPU, quicker modules on a GPU.

On a CPU a model's layers become operations in C++ (cpu_layers.py). On a GPU the caller compiles a
whole step; here only modules are exchanged for it, of the same math. They are found by their kind
(nn.Linear, layers' and ours) and by a model's `layers`; its class is not known here.

    steps = compile_steps(model)                   # in place of generate.compile_steps
"""

from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import nn

from generate import Steps, decode_one_token, prefill
from kernels import cpu_ops, private
from kernels.as_read import Watch, unknown
from kernels.cpu_layers import fits, use_operations, uses_operations
from kernels.cpu_linears import is_packed
from kernels.cuda import has_kernels
from kernels.cuda_graph import CudaGraph
from kernels.few_rows import fuse_layers
from kernels.guard import guard_of
from kernels.linear import MatvecLinear
from kernels.moe import FewRowsMoE, FewRowsRoutedMoE, FusedExpertLinear
from layers.moe import RoutedMoE
from model import ExpertLinear, MoE

QUICKER = {nn.Linear: MatvecLinear, ExpertLinear: FusedExpertLinear, MoE: FewRowsMoE,
           RoutedMoE: FewRowsRoutedMoE}


def compile_steps(model: nn.Module, compile_prefill: bool = False) -> Steps:
    """On a GPU the whole step becomes one CUDA graph, its parts exchanged for quicker ones.

    On a CPU the model is changed instead, so that its layers run in C++.
    """
    if model.freq.device.type == "cpu":
        compile_model(model)
        return Steps()
    min_kv_len = prepare_for_cuda(model)
    first = prefill
    if compile_prefill:
        first = WhileAsRead(compiled(prefill), prefill)
    return Steps(first, as_one_graph(decode_one_token), compile_prefill, min_kv_len)


def as_one_graph(step: Callable) -> Callable:
    """Compiled whole, and on a GPU replayed as a CUDA graph."""
    return WhileAsRead(CudaGraph(compiled(step)), step)


def compile_model(model: nn.Module) -> None:
    """Make a model on a CPU run compiled, or say in a line why not. In place, once."""
    if not uses_operations(model) and not use_operations(model):
        cpu_ops.take_all_threads()


def leave_alone(model: nn.Module) -> None:
    """Nobody but a loop of ours has the model from now on: between two steps of a text it is only
    looked at for hooks, and as a whole at each prompt."""
    if guard := guard_of(model):
        guard.alone = True


def compile_beside(model: nn.Module) -> None:
    """A model that has embedding and head from another, compiled if that is. In place, once."""
    if is_packed(model.head):
        use_operations(model)


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
            compile_model(model)
            leave_alone(waiting.pop())
        return step(*args)
    return run


def prepare_for_cuda(model: nn.Module) -> int:
    """Exchange what torch.compile would not fuse for few rows. In place; eager calls stay alike.

    A model that is not as it was read stays so; WhileAsRead then runs its steps uncompiled.

    -> how many positions a step should attend to at least. Our attention stops by itself at the
    last key in use, so that one graph serves every length; without it, few and short lengths do.
    """
    if unknown(model):
        return 256
    exchange_modules(model)
    if has_kernels(model.freq.device):
        fuse_layers(model)
        return model.cfg.context
    torch._inductor.config.coordinate_descent_tuning = True    # the products are Inductor's
    return 256


def compiled(step: Callable) -> Callable:
    """By torch.compile, whole; it looks at each call for hooks that came since."""
    torch._dynamo.config.recompile_limit = 64      # one for each kv_len
    private.guard_hooks()
    return torch.compile(step, fullgraph=True, dynamic=False)


class WhileAsRead:
    """A compiled step, as long as the models among its arguments are as they were read; else the
    step itself, for good, and a note says what was found.

    What a compiler and a CUDA graph have taken from a model's parts is forgotten where one of them
    was exchanged for another one that the kernels know.
    """

    def __init__(self, compiled: Callable, step: Callable):
        self.compiled, self.step = compiled, step
        self.watches = WeakKeyDictionary()         # model -> Watch, or None: it is not known

    def __call__(self, *args):
        models = [arg for arg in args if isinstance(arg, nn.Module) and hasattr(arg, "layers")]
        is_known = all([self._is_known(model) for model in models])
        return (self.compiled if is_known else self.step)(*args)

    def _is_known(self, model: nn.Module) -> bool:
        if model not in self.watches:
            self._look_at(model)
        elif self.watches[model] is not None and not self.watches[model].is_same():
            self._renew(model)
        return self.watches[model] is not None

    def _renew(self, model: nn.Module) -> None:
        if isinstance(self.compiled, CudaGraph):
            self.compiled.forget()
        if has_kernels(model.freq.device) and not unknown(model):
            fuse_layers(model)
        self._look_at(model)

    def _look_at(self, model: nn.Module) -> None:
        what = unknown(model)
        if what:
            private.note(f"{what}: the model runs as it is read, uncompiled")
        self.watches[model] = None if what else Watch(model)


def exchange_modules(model: nn.Module) -> None:
    for module in model.modules():                 # tensors, hooks and submodules stay
        module.__class__ = QUICKER.get(type(module), type(module))
