"""The engine `compile`: native operations on a CPU, torch.compile with our kernels on a GPU.

On a CPU a model's layers run by C++ operations (cpu/layers.py). On a GPU a whole step is compiled,
after modules are replaced by classes with the same math that use our kernels. Modules are selected
by class and through model.layers; the model's own class does not matter.

    steps = compile_steps(model)                   # replaces generate.compile_steps
"""

from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import nn

import generate
from generate import Steps, decode_one_token, prefill
from gpt_faster.kernels import torch_internals
from gpt_faster.kernels.cpu import native
from gpt_faster.kernels.cpu.layers import supports, use_operations
from gpt_faster.kernels.cpu.linears import is_packed
from gpt_faster.kernels.cuda.fused_layer import fuse_layers
from gpt_faster.kernels.cuda.graph import CudaGraph
from gpt_faster.kernels.cuda.products import has_kernels
from gpt_faster.kernels.guard import guard_of
from gpt_faster.kernels.linear import MatvecLinear
from gpt_faster.kernels.modifications import ModelSnapshot, first_modification, has_user_hook
from gpt_faster.kernels.moe import FusedExpertLinear, PerRowMoE, PerRowRoutedMoE
from gpt_faster.layers.moe import RoutedMoE
from model import ExpertLinear, MoE

FAST_CLASSES = {nn.Linear: MatvecLinear, ExpertLinear: FusedExpertLinear, MoE: PerRowMoE,
           RoutedMoE: PerRowRoutedMoE}


def compile_steps(model: nn.Module, compile_prefill: bool = False) -> Steps:
    """On a GPU: the step as one CUDA graph, with our kernels. On a CPU: changes the model in place,
    so that its layers run in C++.
    """
    if model.freq.device.type == "cpu":
        compile_model(model)
        return Steps()
    min_kv_len = prepare_for_cuda(model)
    first = prefill
    if compile_prefill:
        first = WhileUnmodified(compiled(prefill), prefill)
    return Steps(first, as_cuda_graph(decode_one_token), compile_prefill, min_kv_len)


def as_cuda_graph(step: Callable) -> Callable:
    """The step compiled as one graph; on a GPU replayed as a CUDA graph."""
    return WhileUnmodified(CudaGraph(compiled(step)), step)


def compile_model(model: nn.Module) -> None:
    """Compile a model on a CPU, in place; prints a note if parts of it run eagerly. Call it once:
    the model then checks for modifications at each call.
    """
    if not guard_of(model) and not use_operations(model):
        native.restore_thread_count()


def assume_exclusive(model: nn.Module) -> None:
    """Promise that only our decoding loop uses the model from now on. A decode step then checks for
    new hooks only; a prompt checks everything.
    """
    if guard := guard_of(model):
        guard.is_exclusive = True


def compile_sharing_head(model: nn.Module, has_own_head: bool = False) -> None:
    """Compile a drafter that shares another model's embedding and head, if that model is compiled.
    In place, once. has_own_head: the drafter's head is not shared.
    """
    if has_own_head or is_packed(model.head):
        use_operations(model)


def can_switch_later(model: nn.Module) -> bool:
    """Is the C++ compiler still running, and can the model use the library when it is done?"""
    return model.freq.device.type == "cpu" and native.is_building() and supports(model)


def switch_when_compiled(model: nn.Module, step: Callable) -> Callable:
    """A step that runs eagerly until the C++ compiler is done, then by native operations. It may
    switch within a text: the KV cache stays.
    """
    pending = [model]

    def run(*args):
        if pending and not native.is_building():
            compile_model(model)
            assume_exclusive(pending.pop())
        return step(*args)
    return run


def prepare_for_cuda(model: nn.Module) -> int:
    """Replace modules that torch.compile does not fuse for few rows. In place; eager calls stay the
    same. Leaves a modified model alone: WhileUnmodified then runs its steps without our kernels.

    -> min_kv_len: a step attends to at least this many entries. Our attention kernel stops at the
    last key in use, so one graph serves every length. Without it, each length needs a graph.
    """
    if first_modification(model):
        return 256
    replace_modules(model)
    if has_kernels(model.freq.device):
        fuse_layers(model)
        return model.cfg.context
    torch._inductor.config.coordinate_descent_tuning = True    # matmuls are Inductor's
    return 256


def compiled(step: Callable) -> Callable:
    """The step by torch.compile, as one graph; recompiles when hooks are added."""
    torch._dynamo.config.recompile_limit = 64      # one for each kv_len
    torch_internals.enable_hook_guards()
    return torch.compile(step, fullgraph=True, dynamic=False)


class WhileUnmodified:
    """A compiled step, used while the models among its arguments are unmodified.

    For a modified model it prints a note and falls back for good: to torch.compile without our
    kernels, or to eager PyTorch if the model has hooks (they might keep a tensor that a CUDA graph
    overwrites) or if our kernels had replaced its modules already. If a part was replaced by
    another one that the kernels know, the step is compiled and captured again.
    """

    def __init__(self, compiled: Callable, step: Callable, may_compile: bool = True):
        self.compiled, self.step = compiled, step
        self.torch_compiled = generate.CompiledStep(step) if may_compile else step
        self.choice_of = WeakKeyDictionary()       # model -> ModelSnapshot, or the fallback

    def __call__(self, *args):
        models = [arg for arg in args if isinstance(arg, nn.Module) and hasattr(arg, "layers")]
        choices = [self._check(model) for model in models]
        if self.step in choices:
            return self.step(*args)
        return (self.torch_compiled if self.torch_compiled in choices else self.compiled)(*args)

    def _check(self, model: nn.Module) -> ModelSnapshot | Callable:
        choice = self.choice_of.get(model)
        if isinstance(choice, ModelSnapshot) and not choice.is_unchanged():
            self._reset(model)
            choice = None
        if choice is None:
            choice = self.choice_of[model] = self._choose(model)
        return choice

    def _reset(self, model: nn.Module) -> None:
        if isinstance(self.compiled, CudaGraph):
            self.compiled.forget()
        if has_kernels(model.freq.device) and not first_modification(model):
            fuse_layers(model)

    def _choose(self, model: nn.Module) -> ModelSnapshot | Callable:
        reason = first_modification(model)
        if not reason:
            return ModelSnapshot(model)
        if has_user_hook(model) or has_replaced_modules(model) or self.torch_compiled is self.step:
            torch_internals.note_once(f"{reason}; running the model in eager PyTorch")
            return self.step
        torch_internals.note_once(
            f"{reason}; running the model by torch.compile without our kernels")
        return self.torch_compiled


def has_replaced_modules(model: nn.Module) -> bool:
    """Does the model have modules of ours, whose compiled code differs from the eager code?"""
    ours = tuple(FAST_CLASSES.values())
    return any(isinstance(m, ours) or hasattr(m, "is_fused") for m in model.modules())


def replace_modules(model: nn.Module) -> None:
    for module in model.modules():                 # keeps tensors, hooks and submodules
        module.__class__ = FAST_CLASSES.get(type(module), type(module))
