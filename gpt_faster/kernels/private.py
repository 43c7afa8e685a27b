"""The only file that touches private parts of torch: kernels of packed weights, hooks.

Each is used by a function which, where torch lacks the part or it raises, says so in one line on
stderr and leaves the caller a public way. Knows no model.
"""

import re
import sys
import warnings
from functools import cache
from pathlib import Path

import torch
from torch import Tensor


def is_compiling() -> bool:
    """Whether what runs now is being compiled."""
    return torch.compiler.is_compiling()


@cache
def cpu_flags() -> str | None:
    """The instructions that it knows; None: the system does not say."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return None
    flags = re.search("^(flags|Features).*$", cpuinfo.read_text(), re.M)
    return flags and flags[0]


@cache
def note(text: str) -> None:
    """Once in a process, to stderr."""
    print(f"note: {text}", file=sys.stderr)


def lacks(part: str, error: Exception, instead: str) -> None:
    note(f"this torch's {part} does not do as expected ({type(error).__name__}): {instead}")


# ---- What a user attaches to modules ------------------------------------------------------------

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hooks_of(module: torch.nn.Module) -> list:
    """The functions that are called beside its forward, or beside its gradients."""
    return [hook for name in HOOKS for hook in getattr(module, name, {}).values()]


def global_hooks() -> list:
    """Those of all modules (torch.nn.modules.module.register_module_forward_hook)."""
    of_all = torch.nn.modules.module
    return [hook for name in HOOKS for hook in getattr(of_all, f"_global{name}", {}).values()]


AROUND = "_compiled_call_impl"                     # what a module has in place of its call, if any


def plain_call(module: torch.nn.Module):
    """Its forward with its hooks."""
    return module._call_impl


def n_hooks_made() -> int | None:
    """How many hooks were registered in this process, anywhere; None: torch does not count them."""
    return getattr(torch.utils.hooks.RemovableHandle, "next_id", None)


def function_of(op) -> object:
    """The function that torch.library.custom_op() made an operator of, or what it was given."""
    return getattr(op, "_init_fn", op)


def guard_hooks() -> None:
    """Have torch.compile see hooks that come after it compiled a module."""
    torch._dynamo.config.skip_nnmodule_hook_guards = False


# ---- Packed weights -----------------------------------------------------------------------------

def has_bf16() -> bool:
    """Does this CPU multiply bf16 matrices?"""
    try:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    except Exception as e:
        lacks("_is_mkldnn_bf16_supported", e, "bf16 weights stay as they are")
        return False


def int8_product(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor | None:
    """ATen's, of a few rows in bf16; None: unpack the weights."""
    try:
        return torch.ops.aten._weight_int8pack_mm(x, weight, scales)
    except Exception as e:
        lacks("_weight_int8pack_mm", e, "int8 weights are unpacked")
        return None


def int4_packed(q: Tensor) -> Tensor | None:
    """Codes [out, in] int32, out in 64s -> ATen's bytes [out, in/2]; None: leave them so."""
    try:
        return torch.ops.aten._convert_weight_to_int4pack_for_cpu(q, 1)
    except Exception as e:
        lacks("_convert_weight_to_int4pack_for_cpu", e, "int4 weights are unpacked, slowly")
        return None


def int4_product(x: Tensor, weight: Tensor, group: int, scales: Tensor) -> Tensor | None:
    """By int4_packed()'s; None: unpack the weights."""
    try:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), weight, group, scales)
    except Exception as e:
        lacks("_weight_int4pack_mm_for_cpu", e, "int4 weights are unpacked, slowly")
        return None


# ---- Ranks --------------------------------------------------------------------------------------

def use_symmetric_memory() -> None:
    """Inductor's choice for short sums then: one kernel that reads the other GPUs' memory."""
    try:
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group
        torch._inductor.config._collective.auto_select = True
        with warnings.catch_warnings():            # deprecated, and Inductor asks for it
            warnings.simplefilter("ignore", FutureWarning)
            enable_symm_mem_for_group(torch.distributed.group.WORLD.group_name)
    except (ImportError, AttributeError) as e:
        lacks("symmetric memory", e, "sums between GPUs go through NCCL")
