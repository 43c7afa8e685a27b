"""What makes a model fast when it is compiled: operations on a CPU, quicker modules on a GPU.

On a CPU a model's layers become operations in C++ (cpu/layers.py). On a GPU the caller compiles a
whole step; here only modules are exchanged for it, of the same math. They are found by their kind
(nn.Linear, layers' and ours) and by a model's `layers`; its class is not known here.

    steps = compile_steps(model)                   # in place of generate.compile_steps
"""

from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import nn

import generate
from generate import Steps, decode_one_token, prefill
from gpt_faster.kernels import private
from gpt_faster.kernels.as_read import Watch, is_hooked, unknown
from gpt_faster.kernels.cpu import native
from gpt_faster.kernels.cpu.layers import fits, use_operations
from gpt_faster.kernels.cpu.linears import is_packed
from gpt_faster.kernels.cuda.few_rows import fuse_layers
from gpt_faster.kernels.cuda.graph import CudaGraph
from gpt_faster.kernels.cuda.products import has_kernels
from gpt_faster.kernels.guard import guard_of
from gpt_faster.kernels.linear import MatvecLinear
from gpt_faster.kernels.moe import FewRowsMoE, FewRowsRoutedMoE, FusedExpertLinear
from gpt_faster.layers.moe import RoutedMoE
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
    """Make a model on a CPU run compiled, or say in a line what of it does not, and why. In place,
    once: from then on it looks by itself."""
    if not guard_of(model) and not use_operations(model):
        native.restore_thread_count()


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
    return model.freq.device.type == "cpu" and native.is_building() and fits(model)


def change_over(model: nn.Module, step: Callable) -> Callable:
    """The step uncompiled until a compiler that runs beside it is done, then compiled; in the
    middle of a text too, because the cache stays.
    """
    waiting = [model]

    def run(*args):
        if waiting and not native.is_building():
            compile_model(model)
            leave_alone(waiting.pop())
        return step(*args)
    return run


def prepare_for_cuda(model: nn.Module) -> int:
    """Exchange what torch.compile would not fuse for few rows. In place; eager calls stay alike.

    A model that is not as it was read stays so; WhileAsRead then runs its steps as they are read.

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
    """A compiled step, as long as the models among its arguments are as they were read. Else a note
    says what was found, and for good it is the step as it is read: through PyTorch's compiler
    alone, or uncompiled, where a hook may keep what a CUDA graph writes to again, or where the
    kernels have exchanged parts of the model before it was edited.

    What a compiler and a CUDA graph have taken from a model's parts is forgotten where one of them
    was exchanged for another one that the kernels know.
    """

    def __init__(self, compiled: Callable, step: Callable, may_compile: bool = True):
        self.compiled, self.step = compiled, step
        self.by_torch = generate.CompiledStep(step) if may_compile else step
        self.watches = WeakKeyDictionary()         # model -> Watch, or what runs in its place

    def __call__(self, *args):
        models = [arg for arg in args if isinstance(arg, nn.Module) and hasattr(arg, "layers")]
        found = [self._look_at(model) for model in models]
        if self.step in found:
            return self.step(*args)
        return (self.by_torch if self.by_torch in found else self.compiled)(*args)

    def _look_at(self, model: nn.Module) -> Watch | Callable:
        watch = self.watches.get(model)
        if isinstance(watch, Watch) and not watch.is_same():
            self._renew(model)
            watch = None
        if watch is None:
            watch = self.watches[model] = self._begin(model)
        return watch

    def _renew(self, model: nn.Module) -> None:
        if isinstance(self.compiled, CudaGraph):
            self.compiled.forget()
        if has_kernels(model.freq.device) and not unknown(model):
            fuse_layers(model)

    def _begin(self, model: nn.Module) -> Watch | Callable:
        what = unknown(model)
        if not what:
            return Watch(model)
        if is_hooked(model) or has_exchanged(model) or self.by_torch is self.step:
            private.note(f"{what}: the model runs as it is read, uncompiled")
            return self.step
        private.note(f"{what}: the model runs as it is read, through PyTorch's compiler alone")
        return self.by_torch


def has_exchanged(model: nn.Module) -> bool:
    """Has it modules of ours, which a compiler would take another way through?"""
    ours = tuple(QUICKER.values())
    return any(isinstance(m, ours) or hasattr(m, "is_fused") for m in model.modules())


def exchange_modules(model: nn.Module) -> None:
    for module in model.modules():                 # tensors, hooks and submodules stay
        module.__class__ = QUICKER.get(type(module), type(module))
