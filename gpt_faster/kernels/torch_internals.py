"""The only file that uses private torch APIs: packed-weight kernels, hook dictionaries.

If torch lacks an API or it raises, the function prints one note on stderr and the caller falls back
to a public API. Knows no model.
"""

import re
import sys
import warnings
from functools import cache
from pathlib import Path

import torch
from torch import Tensor


def is_compiling() -> bool:
    """Is torch.compile tracing this call?"""
    return torch.compiler.is_compiling()


@cache
def cpu_flags() -> str | None:
    """The CPU's feature flags from /proc/cpuinfo; None on other systems."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return None
    flags = re.search("^(flags|Features).*$", cpuinfo.read_text(), re.M)
    return flags and flags[0]


@cache
def note_once(text: str) -> None:
    """Print a note on stderr, each text once per process."""
    print(f"note: {text}", file=sys.stderr)


def note_fallback(api: str, error: Exception, fallback: str) -> None:
    note_once(f"torch's {api} failed ({type(error).__name__}); {fallback}")


# ---- Hooks --------------------------------------------------------------------------------------

HOOK_DICTS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hooks_of(module: torch.nn.Module) -> list:
    """The module's forward and backward hooks."""
    return [hook for name in HOOK_DICTS for hook in getattr(module, name, {}).values()]


def changes_call(module: torch.nn.Module) -> bool:
    """Does a call of the module run more than its forward?"""
    return (bool(hooks_of(module) or global_hooks()) or type(module).__call__ is not MODULE_CALL
            or vars(module).get(CALL_OVERRIDE) is not None)


def global_hooks() -> list:
    """Hooks on all modules (torch.nn.modules.module.register_module_forward_hook)."""
    module = torch.nn.modules.module
    return [hook for name in HOOK_DICTS for hook in getattr(module, f"_global{name}", {}).values()]


MODULE_CALL = torch.nn.Module.__call__
CALL_OVERRIDE = "_compiled_call_impl"              # nn.Module.__call__ runs this attribute if set


def default_call(module: torch.nn.Module):
    """The module's forward with its hooks."""
    return module._call_impl


def n_hooks_registered() -> int | None:
    """Hooks registered in this process so far, on any module; None: torch does not count them."""
    return getattr(torch.utils.hooks.RemovableHandle, "next_id", None)


def unwrap_custom_op(op) -> object:
    """The function behind a torch.library.custom_op; any other object as it is."""
    return getattr(op, "_init_fn", op)


def enable_hook_guards() -> None:
    """Have torch.compile recompile when a hook is added to a compiled module."""
    torch._dynamo.config.skip_nnmodule_hook_guards = False


# ---- Packed weights -----------------------------------------------------------------------------

def has_bf16() -> bool:
    """Does oneDNN have a bf16 matmul for this CPU?"""
    try:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    except Exception as e:
        note_fallback("_is_mkldnn_bf16_supported", e, "assuming no bf16 matmul")
        return False


def int8_product(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor | None:
    """ATen's int8 matmul for a few bf16 rows; None: not available, unpack the weights."""
    try:
        return torch.ops.aten._weight_int8pack_mm(x, weight, scales)
    except Exception as e:
        note_fallback("_weight_int8pack_mm", e, "unpacking int8 weights")
        return None


def int4_packed(q: Tensor) -> Tensor | None:
    """int32 codes [out, in], out a multiple of 64 -> ATen's packed bytes [out, in/2]; None: not
    available.
    """
    try:
        return torch.ops.aten._convert_weight_to_int4pack_for_cpu(q, 1)
    except Exception as e:
        note_fallback("_convert_weight_to_int4pack_for_cpu", e, "unpacking int4 weights (slow)")
        return None


def int4_product(x: Tensor, weight: Tensor, group: int, scales: Tensor) -> Tensor | None:
    """Matmul with int4_packed() weights; None: not available, unpack the weights."""
    try:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), weight, group, scales)
    except Exception as e:
        note_fallback("_weight_int4pack_mm_for_cpu", e, "unpacking int4 weights (slow)")
        return None


# ---- Tensor parallelism -------------------------------------------------------------------------

def use_symmetric_memory() -> None:
    """Let Inductor run small all-reduces as one kernel that reads the other GPUs' memory."""
    try:
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group
        torch._inductor.config._collective.auto_select = True
        with warnings.catch_warnings():            # deprecated, but Inductor needs it
            warnings.simplefilter("ignore", FutureWarning)
            enable_symm_mem_for_group(torch.distributed.group.WORLD.group_name)
    except (ImportError, AttributeError) as e:
        note_fallback("symmetric memory", e, "all-reduce uses NCCL")
