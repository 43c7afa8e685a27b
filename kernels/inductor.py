"""The only file that touches private parts of torch: tracing, Inductor's insides, packed weights.

Each is used by a function which, where torch lacks the part or it raises, says so in one line on
stderr and leaves the caller a public way: at worst torch.compile of the block, or eager. Owns
Inductor's settings and whether something is being compiled; knows no model and no cache.

    with eager(): model(tokens, pos)               # a compiled model, as if it were not
"""

import ctypes
import os
import platform
import re
import sys
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

OPTIONS = {
    "cpp.enable_floating_point_contract_flag": "fast",     # multiply-add in one
    # long expressions stay one: what they would be split by goes through memory
    "realize_opcount_threshold": 10**5,
    "realize_acc_reads_threshold": 10**5,
    "size_asserts": False,                                 # the key of a function sees to it
    "alignment_asserts": False,
    # else it tries the compiler in every process, and reads all headers again
    "cpp.vec_isa_ok": True,
    "cpp_cache_precompile_headers": False,
}
AHEAD = 4096                                       # bytes
_eager = []                                        # not empty: run compiled modules as they are
_tracing = []                                      # not empty: what runs is being recorded


@contextmanager
def eager():
    """Within, compiled modules run as if they were not."""
    _eager.append(True)
    try:
        yield
    finally:
        _eager.pop()


def is_eager() -> bool:
    return bool(_eager)


def is_compiling() -> bool:
    """Whether what runs now is being compiled, by us or by torch.compile."""
    return bool(_tracing) or torch.compiler.is_compiling()


@contextmanager
def _recording():
    _tracing.append(True)
    try:
        with eager(), torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        _tracing.pop()


@cache
def note(text: str) -> None:
    """Once in a process, to stderr."""
    print(f"note: {text}", file=sys.stderr)


def lacks(part: str, error: Exception, instead: str) -> None:
    note(f"this torch's {part} does not do as expected ({type(error).__name__}): {instead}")


# ---- Tracing and compiling ----------------------------------------------------------------------

class Traced(NamedTuple):
    graph: torch.fx.GraphModule
    example: list[Tensor]                          # what it was traced with: fake for any size


def trace(run: Callable, example: list[Tensor], any_size: bool = False) -> Traced | None:
    """The fx graph of run(*example), all its constants in its code; None: compile_publicly().

    any_size: sizes above 16 in the example stand for any.
    """
    try:
        from torch.fx.experimental.proxy_tensor import make_fx
        if any_size:
            example = _of_any_size(example)
        with _recording():
            graph = make_fx(run, tracing_mode="symbolic" if any_size else "fake")(*example)
        return Traced(graph, example)
    except Exception as e:
        lacks("make_fx", e, "torch.compile is used, which checks guards in every call")
        return None


def _of_any_size(example: list[Tensor]) -> list[Tensor]:
    """Fake tensors, whose sizes above 16 are symbols."""
    from torch._dynamo.source import ConstantSource  # here: these take a second
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
    mode = FakeTensorMode(shape_env=ShapeEnv())
    kinds = (DimDynamic.STATIC, DimDynamic.DYNAMIC)
    with torch.inference_mode(False):
        return [mode.from_tensor(
            torch.empty_like(t), source=ConstantSource(f"input{i}"),
            symbolic_context=StatelessSymbolicContext([kinds[n > 16] for n in t.shape]))
            for i, t in enumerate(example)]


def compile_graph(traced: Traced, any_size: bool = False):
    """What trace() gave -> a function that save_function() can write; None: the public way."""
    try:
        shapes = "from_graph" if any_size else "from_example_inputs"
        with _recording(), reading_ahead():
            return torch._inductor.standalone_compile(traced.graph, traced.example,
                                                      dynamic_shapes=shapes, aot=True)
    except Exception as e:
        lacks("standalone_compile", e, "torch.compile is used, which checks guards in every call")
        return None


def compile_publicly(run: Callable, any_size: bool = False) -> Callable:
    """run by torch.compile, and eagerly where that fails; its result is the same."""
    compiled = torch.compile(run, dynamic=any_size, fullgraph=True)
    failed = []

    def call(*inputs):
        with eager():                              # what it calls is compiled in it
            if not failed:
                try:
                    return compiled(*inputs)
                except Exception as e:
                    lacks("torch.compile", e, "this runs uncompiled")
                    failed.append(True)
            return run(*inputs)
    return call


def save_function(function, path: Path) -> bool:
    try:
        function.save(path=str(path))
        return True
    except OSError:                                # the disk is full
        return False
    except Exception as e:
        lacks("CompiledArtifact.save", e, "functions are compiled anew by every process")
        return False


def load_function(path: Path) -> Callable:
    """What save_function() wrote. Raises whatever a damaged file leads to."""
    return torch._inductor.CompiledArtifact.load(path=str(path))


@contextmanager
def inductor_in(folder: Path):
    """Inductor's cache is there, and it has our settings: it makes machine code on loading too."""
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    try:
        with _settings():
            yield
    finally:
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        if before is not None:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


@contextmanager
def _settings():
    try:
        import torch._inductor.codecache  # here: it takes a second
        patch = torch._inductor.config.patch(OPTIONS)
        patch.__enter__()
    except Exception as e:
        lacks("_inductor.config.patch", e, "Inductor has its own settings, which are slower")
        yield
        return
    try:
        yield
    finally:
        patch.__exit__(None, None, None)


def forget_machine_code() -> None:
    """Machine code that this process has is made again, so that its file is in the folder too."""
    try:
        torch._inductor.codecache.CppPythonBindingsCodeCache.cache_clear()
    except Exception as e:
        lacks("CppPythonBindingsCodeCache", e, "some functions may be compiled anew later")


@cache
def try_instructions(folder: Path) -> None:
    """Inductor tries the compiler on some sets of instructions: once, and not in each folder."""
    try:
        import torch._inductor.cpu_vec_isa
        with inductor_in(folder):
            torch._inductor.cpu_vec_isa.pick_vec_isa()
    except OSError:
        pass
    except Exception as e:
        lacks("pick_vec_isa", e, "Inductor tries the compiler for every function")


def machine() -> list:
    """What machine code depends on beside its source: compilers, threads, and the kind of CPU."""
    return [torch.__version__, torch.version.git_version, sys.version, platform.machine(),
            cpu_flags(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads(),
            os.environ.get("CXX"), _inductor_settings()]


@cache
def cpu_flags() -> str | None:
    """The instructions that it knows; None: the system does not say."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return None
    flags = re.search("^(flags|Features).*$", cpuinfo.read_text(), re.M)
    return flags and flags[0]


def _inductor_settings() -> str:
    try:
        import torch._inductor.config
        return torch._inductor.config.get_hash()
    except Exception as e:
        lacks("_inductor.config.get_hash", e, "its settings are not told apart")
        return ""


@contextmanager
def reading_ahead():
    """Within, Inductor's loops ask the memory for what they will read of large inputs AHEAD later.

    A CPU does so by itself, but stops at the ends of pages, and waits where it has to unpack the
    codes. Inductor has no setting for it: this adds to what it writes for loading a vector.
    """
    try:
        from torch._inductor.codegen.cpp import CppVecKernel
        plain = CppVecKernel._get_vec_load_line
    except Exception as e:
        lacks("CppVecKernel", e, "compiled loops do not read ahead, which is slower")
        yield
        return

    def load(kernel, var, index, dtype, *mask):
        line = plain(kernel, var, index, dtype, *mask)
        try:
            return prefetching(kernel, line, var, index, dtype)
        except Exception as e:
            lacks("CppVecKernel", e, "compiled loops do not read ahead, which is slower")
            return line
    CppVecKernel._get_vec_load_line = load
    try:
        yield
    finally:
        CppVecKernel._get_vec_load_line = plain


def prefetching(kernel, line: str, var: str, index, dtype: torch.dtype) -> str:
    """C++ that loads a vector -> C++ that asks for what lies AHEAD of it, and loads it."""
    from torch._inductor.codegen.cpp import V, cexpr_index
    size = dtype.itemsize
    known = {**kernel.args.output_buffers, **kernel.args.input_buffers}
    name = next((name for name, v in known.items() if v == var), None)
    if name is None or V.graph.sizevars.statically_known_lt(
            V.graph.get_numel(name) * size, 16 * AHEAD):
        return line
    lines = range(AHEAD, AHEAD + kernel.tiling_factor * size, 64)          # of the cache
    asks = (f"__builtin_prefetch({var} + {cexpr_index(index)} + {n // size})" for n in lines)
    return f"({', '.join(asks)}, {line})"


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


_onednn = WeakValueDictionary()                    # where words begin -> oneDNN's tensor


def onednn_words(weight: Tensor) -> Tensor | None:
    """weight [out, in] bf16, out in 64s -> fp32 words [out/64, in/2, 64] in oneDNN's order.

    The words are the memory of oneDNN's own tensor, which lives as long as they do. None where it
    is another order on this CPU.
    """
    n_out, n_in = weight.shape
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        if torch.ops.mkldnn._nbytes(packed) != 2 * weight.numel():
            return None
        n_byte = 2 * weight.numel()
        memory = (ctypes.c_char * n_byte).from_address(torch.ops.mkldnn.data_ptr(packed))
    except Exception as e:
        lacks("_reorder_linear_weight", e, "bf16 weights stay as they are, which is slower")
        return None
    memory.owner = packed                          # frombuffer() keeps `memory`, and so this
    words = torch.frombuffer(memory, dtype=torch.float32).view(-1, n_in // 2, 64)
    _onednn[words.data_ptr()] = packed
    new, old = words.view(torch.int32), weight.view(torch.float32).view(torch.int32)
    same = torch.equal(new[0].T, old[:64]) and torch.equal(new[:, -1].flatten(), old[:, -1])
    return words if same else None


def onednn_product(x: Tensor, words: Tensor) -> Tensor | None:
    """x [M, in] bf16 by onednn_words() -> [M, out]; None where oneDNN does not know these words.

    Words are known by where they are, because a compiled function is given their memory only;
    oneDNN's tensor is that very memory, so what is written there is what is multiplied.
    """
    packed = _onednn.get(words.data_ptr())
    if packed is None:
        return None
    try:
        return torch.ops.mkldnn._linear_pointwise(x.contiguous(), packed, None, "none", [], "")
    except Exception as e:
        lacks("_linear_pointwise", e, "bf16 weights are unpacked for several rows")
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

def functional_collective(name: str, *args):
    """What a collective of all ranks gives, in a form that can be traced; None: torch lacks it."""
    ops = torch.ops._c10d_functional
    try:
        collective = getattr(ops, name)
    except AttributeError as e:
        lacks("traced collectives", e, "ranks cannot run compiled")
        return None
    return ops.wait_tensor(collective(*args, torch.distributed.group.WORLD.group_name))


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
