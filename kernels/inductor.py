"""Modules compiled for a CPU: traced once for all that are alike, and called without guards.

torch.compile looks its code up and checks guards in every call; for the 30 blocks of a small model
that is a sixth of a token's time. What a function depends on is stated here instead: its module's
tensors and the shapes and strides of what it is given. Owns tracing, Inductor's settings, and the
functions kept on disk for the next start; knows no model.

    functions = Functions(about=repr(model.cfg))
    for layer in model.layers: layer.forward = Compiled(layer.forward, functions)
"""

import hashlib
import json
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

OPTIONS = {"cpp.enable_floating_point_contract_flag": "fast",              # multiply-add in one
           "realize_opcount_threshold": 10**5,     # long expressions stay one: what they would …
           "realize_acc_reads_threshold": 10**5,   # … be split by goes through memory
           "size_asserts": False, "alignment_asserts": False,              # the key has seen to it
           "cpp.vec_isa_ok": True,                 # or it tries the compiler, in every process …
           "cpp_cache_precompile_headers": False}  # … and reads all headers again
AHEAD = 4096                                       # bytes
_eager = []                                        # not empty: run modules as they are


@contextmanager
def eager():
    """Within, compiled modules run as if they were not."""
    _eager.append(True)
    try:
        yield
    finally:
        _eager.pop()


# ---- On disk ------------------------------------------------------------------------------------
# A directory of the user's for each function: what Inductor saves, the machine code, and their
# digests, written last. Its name says all that the code depends on, so that nothing is ever stale.

def cache_dir() -> Path:
    """$GPT_FASTER_CACHE, or gpt-faster in $XDG_CACHE_HOME or ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("GPT_FASTER_CACHE") or Path(home) / "gpt-faster")


def machine() -> list:
    """What machine code depends on beside its source: compilers, threads, and the kind of CPU."""
    import torch._inductor.config
    cpuinfo = Path("/proc/cpuinfo")
    flags = re.search("^(flags|Features).*$", cpuinfo.read_text(), re.M) if cpuinfo.exists() else ""
    return [torch.__version__, torch.version.git_version, sys.version, platform.machine(),
            flags and flags[0], torch.backends.cpu.get_cpu_capability(), torch.get_num_threads(),
            os.environ.get("CXX"), torch._inductor.config.get_hash()]


def sources() -> str:
    """Our own code: any change makes functions anew."""
    root = Path(__file__).parent.parent
    paths = sorted([*root.glob("*.py"), *root.glob("*/*.py")])
    return "".join(p.read_text() for p in paths if p.parent.name not in ("tests", "scripts"))


def _name(said: str) -> str:
    return hashlib.sha256(said.encode()).hexdigest()[:32]


def _digests(folder: Path, names: list[str] | None = None) -> dict[str, str]:
    names = names or [str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()]
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


@contextmanager
def _inductor_in(folder: Path):
    """Inductor's cache is there, and it has our settings: it makes machine code on loading too."""
    import torch._inductor.codecache  # here: it takes a second
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    try:
        with torch._inductor.config.patch(OPTIONS):
            yield
    finally:
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        if before is not None:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


@cache
def _instructions() -> None:
    """Inductor tries the compiler on some sets of instructions: once, and not in each folder."""
    with suppress(OSError), _inductor_in(cache_dir() / "instructions"):
        torch._inductor.cpu_vec_isa.pick_vec_isa()


def load(folder: Path) -> Callable | None:
    """What save() kept there; None, and nothing is there any more, if anything is amiss."""
    try:
        digests = json.loads((folder / "digests.json").read_text())
        if digests == _digests(folder, digests.keys()):
            _instructions()
            with _inductor_in(folder):
                return torch._inductor.CompiledArtifact.load(path=str(folder / "function"))
    except FileNotFoundError:
        pass
    except Exception as e:                         # whatever a damaged file leads to
        print(f"note: {folder} is made anew: {type(e).__name__}", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    return None


def save(folder: Path, make: Callable[[], Callable]) -> Callable:
    """make() the function, and keep it, unless another process was quicker or the disk is full."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial = Path(tempfile.mkdtemp(prefix=".partial", dir=folder.parent))
    except OSError:                                # nowhere to keep it
        partial = Path(tempfile.mkdtemp())
    try:
        _instructions()
        with _inductor_in(partial):                # machine code that this process has is
            torch._inductor.codecache.CppPythonBindingsCodeCache.cache_clear()     # made again …
            function = make()
            with suppress(OSError):
                function.save(path=str(partial / "function"))
                (partial / "digests.json").write_text(json.dumps(_digests(partial)))
                os.rename(partial, folder)
        return function
    finally:
        shutil.rmtree(partial, ignore_errors=True)


# ---- Tracing ------------------------------------------------------------------------------------

@contextmanager
def _tracing():
    """torch.compiler.is_compiling() is true within, as under torch.compile and torch.export."""
    torch.compiler._is_compiling_flag = True
    try:
        with eager(), torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        torch.compiler._is_compiling_flag = False


def _flat(args) -> list[Tensor]:
    flat = []
    for a in args:
        if isinstance(a, Tensor):
            flat.append(a)
        elif isinstance(a, tuple):
            flat.extend(a)
    return flat


def _layout(t: Tensor) -> tuple:
    """Shape and strides, where those of dimensions of one say nothing."""
    return t.shape, (t.stride() if not t.is_contiguous() else _strides(t.shape))


@cache
def _strides(shape: tuple) -> tuple:
    return torch.empty(shape, device="meta").stride()


@contextmanager
def _reading_ahead():
    """Within, Inductor's loops ask the memory for what they will read of large inputs AHEAD later.

    A CPU does so by itself, but stops at the ends of pages, and waits where it has to unpack the
    numbers. Inductor has no setting for it: this adds to what it writes for loading a vector.
    """
    from torch._inductor.codegen.cpp import CppVecKernel, V, cexpr_index
    plain = CppVecKernel._get_vec_load_line

    def load(kernel, var, index, dtype, *mask):
        line, size = plain(kernel, var, index, dtype, *mask), dtype.itemsize
        known = {**kernel.args.output_buffers, **kernel.args.input_buffers}
        name = next((name for name, v in known.items() if v == var), None)
        if name is None or V.graph.sizevars.statically_known_lt(
                V.graph.get_numel(name) * size, 16 * AHEAD):
            return line
        lines = range(AHEAD, AHEAD + kernel.tiling_factor * size, 64)      # of the cache
        ask = (f"__builtin_prefetch({var} + {cexpr_index(index)} + {n // size})" for n in lines)
        return f"({', '.join(ask)}, {line})"
    CppVecKernel._get_vec_load_line = load
    try:
        yield
    finally:
        CppVecKernel._get_vec_load_line = plain


def _inductor(run: Callable, example: list[Tensor], any_size: bool = False) -> Callable:
    with _tracing(), _reading_ahead():
        graph = make_fx(run, tracing_mode="symbolic" if any_size else "fake")(*example)
        return torch._inductor.standalone_compile(
            graph, example, dynamic_shapes="from_graph" if any_size else "from_example_inputs",
            aot=True)


def _of_any_size(example: tuple[Tensor, ...]) -> list[Tensor]:
    """Fake tensors, whose sizes above 16 stand for any."""
    from torch._dynamo.source import ConstantSource  # here: these take a second
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
    mode, kinds = FakeTensorMode(shape_env=ShapeEnv()), (DimDynamic.STATIC, DimDynamic.DYNAMIC)
    with torch.inference_mode(False):
        return [mode.from_tensor(
            torch.empty_like(t), source=ConstantSource(f"input{i}"),
            symbolic_context=StatelessSymbolicContext([kinds[n > 16] for n in t.shape]))
            for i, t in enumerate(example)]


def once(function: Callable, *example: Tensor) -> Callable:
    """A function from tensors to one, compiled by its first call; in eager() too it runs compiled.

    Sizes above 16 in the example stand for any; those that are alike there must always be, and all
    tensors contiguous.
    """
    def run(*inputs):
        return (function(*inputs),)

    @cache
    def made():
        said = f"{function.__qualname__} {[(t.shape, t.dtype) for t in example]}"
        folder = cache_dir() / _name(f"{said} {machine()} {OPTIONS} {sources()}")
        return load(folder) or save(
            folder, lambda: _inductor(run, _of_any_size(example), any_size=True))
    return lambda *inputs: made()(*inputs)[0]


class _Method(nn.Module):
    def __init__(self, method: Callable):
        super().__init__()
        self.module, self.forward = method.__self__, method


class Functions:
    """Those of a model, whose modules with tensors alike are alike. about: what else they are."""

    def __init__(self, about: str):
        self.kinds = {}                            # of tensors -> of inputs -> function
        self.about = _name(f"{about} {machine()} {OPTIONS} {sources()}")

    def folder(self, method: Callable, kind, key) -> Path:
        return cache_dir() / _name(f"{self.about} {method.__self__} {kind} {key}")


class Compiled:
    """A module's method, for tensors, tuples of them, None and ints; one tensor or more come out.

    cache: the submodule of state that others may replace; without: how the names of tensors begin
    that play no part.
    """

    def __init__(self, method: Callable, functions: Functions, cache: str = "",
                 without: str | tuple[str, ...] = ()):
        self.plain, self.functions, self.without = method, functions, without
        *path, self.name = cache.split(".")
        self.holder = method.__self__.get_submodule(".".join(path))
        self.cache, self.mine = self, {}

    def __call__(self, *args) -> Tensor | tuple[Tensor, ...]:
        if _eager:
            return self.plain(*args)
        if getattr(self.holder, self.name, None) is not self.cache:        # it has a new one
            self._look()
        inputs = _flat(args)
        key = tuple([_layout(t) for t in inputs] + [a for a in args if type(a) is int])
        if key not in self.mine:
            folder = self.functions.folder(self.plain, self.kind, key)
            self.mine[key] = load(folder) or save(folder, lambda: self._compile(args, inputs))
        out = self.mine[key](*self.tensors, *inputs)
        return out if len(out) > 1 else out[0]

    def _look(self) -> None:
        self.cache, module = getattr(self.holder, self.name, None), self.plain.__self__
        named = [*module.named_parameters(), *module.named_buffers()]
        named = [(name, t) for name, t in named if not name.startswith(self.without)]
        self.names, self.tensors = [name for name, _ in named], [t.detach() for _, t in named]
        kind = [(name, t.dtype, t.shape, t.stride()) for name, t in named]
        self.kind = (self.plain.__name__, *kind)
        self.mine = self.functions.kinds.setdefault(self.kind, {})

    def _compile(self, args, inputs: list[Tensor]) -> Callable:
        def run(*tensors):
            own = {f"module.{name}": t for name, t in zip(self.names, tensors)}
            rest = list(tensors[len(own):])
            given = tuple(rest.pop(0) if isinstance(a, Tensor) else a if not isinstance(a, tuple)
                          else tuple(rest.pop(0) for _ in a) for a in args)
            out = torch.func.functional_call(_Method(self.plain), own, given)
            return out if isinstance(out, tuple) else (out,)

        example = [torch.empty_strided(*_layout(t), dtype=t.dtype) for t in inputs]
        return _inductor(run, [*self.tensors, *example])
