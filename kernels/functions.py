"""Modules compiled for a CPU: traced once for all that are alike, and called without guards.

torch.compile looks its code up and checks guards in every call; for the 30 blocks of a small model
that is a sixth of a token's time. What a function depends on is stated here instead: the traced
graph with all its constants, the tensors it is given, torch, compiler, machine, and what we do to
the code that Inductor writes. No text of a file is in it. Because tracing takes 0.2 s, an index
leads from a digest of the loaded code and the module to that key: a changed program is traced, and
finds the same function if its graph is the same. Knows no model.

    functions = Functions()
    for layer in model.layers: layer.forward = Compiled(layer.forward, functions)
"""

import functools
import types
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from kernels import disk, inductor

SIMPLE = (int, float, complex, str, bytes, bool, type(None), type(...), torch.dtype, torch.device,
          torch.Size)


# ---- What a program is --------------------------------------------------------------------------

class Unknown(Exception):
    """An attribute of which we cannot tell whether the graph depends on it."""


def code_of(code: types.CodeType) -> tuple:
    """What a code object does: without names of files and numbers of lines."""
    consts = [code_of(c) if isinstance(c, types.CodeType)
              else sorted(map(repr, c)) if isinstance(c, frozenset) else repr(c)
              for c in code.co_consts]
    return (code.co_code, consts, code.co_names, code.co_varnames, code.co_freevars,
            code.co_cellvars, code.co_argcount, code.co_kwonlyargcount, code.co_flags,
            code.co_exceptiontable)


@cache
def patch_code() -> str:
    """What we do to the code that Inductor writes."""
    parts = (inductor.reading_ahead, inductor.prefetching)
    codes = [code_of(getattr(part, "__wrapped__", part).__code__) for part in parts]
    return disk.digest(repr((codes, inductor.AHEAD)))


class Description:
    """Everything that a method's graph may depend on, but for its tensors' values, as text.

    Its modules' classes and attributes, and the functions that these reach in our own code, by
    their bytecode. Modules alike have equal texts. Raises Unknown. without: as Compiled has it;
    memo: id -> a class or function, and its digest, because 30 layers have the same ones.
    """

    def __init__(self, function: Callable, without: tuple[str, ...] = (),
                 memo: dict | None = None):
        self.memo = memo
        self.seen = {}                             # id -> a number, and the object to keep it alive
        self.without = [id(module) for name, module in
                        getattr(function, "__self__", nn.Module()).named_children()
                        if f"{name}." in without]
        self.text = repr(self.of(function))

    def of(self, value):
        if isinstance(value, SIMPLE):
            return repr(value)
        if isinstance(value, Tensor):
            return "tensor", value.dtype, tuple(value.shape)
        if id(value) in self.seen:
            return self.seen[id(value)][0]
        self.seen[id(value)] = len(self.seen), value
        if self.memo is not None and isinstance(value, (type, types.FunctionType)):
            if id(value) not in self.memo:
                self.memo[id(value)] = value, disk.digest(Description(value).text)
            return self.memo[id(value)][1]
        for kind, describe in KINDS.items():
            if isinstance(value, kind):
                return describe(self, value)
        if not ours(value):
            return name_of(value)
        if hasattr(value, "__wrapped__"):          # functools.cache, staticmethod
            return self.of(value.__wrapped__)
        if hasattr(value, "__dict__"):
            return self.of(type(value)), self.of(vars(value))
        raise Unknown(type(value))

    def of_module(self, module):
        if id(module) in self.without:
            return None
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        own = {k: v for k, v in vars(module).items()
               if not k.startswith("_") and k != "training" and not replaced(v)}
        return [self.of(part) for part in (type(module), module._modules, hooks, own)]

    def of_class(self, kind):
        if not ours(kind):
            return name_of(kind)
        own = {k: v for k, v in vars(kind).items()
               if isinstance(v, (types.FunctionType, staticmethod, classmethod, property))
               or (isinstance(v, SIMPLE) and not k.startswith("__"))}
        return kind.__qualname__, [self.of(base) for base in kind.__bases__], self.of(own)

    def of_function(self, function):
        """Its code, and what the names in it stand for: in its module, and in modules of ours."""
        if not ours(function):
            return name_of(function)
        names, codes = set(), [function.__code__]
        for code in codes:
            names.update(code.co_names)
            codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
        known = {name: function.__globals__[name] for name in sorted(names)
                 if name in function.__globals__}
        for module in [m for m in known.values() if isinstance(m, types.ModuleType) and ours(m)]:
            known |= {f"{module.__name__}.{name}": getattr(module, name)
                      for name in sorted(names) if hasattr(module, name)}
        return (code_of(function.__code__), [self.of_global(c) for c in cells(function)],
                [(name, self.of_global(value)) for name, value in known.items()],
                self.of(function.__defaults__), self.of(function.__kwdefaults__))

    def of_global(self, value):
        """Also what has a state of its own, like a lock: a graph does not depend on that."""
        try:
            return self.of(value)
        except Unknown:
            return type(value).__qualname__


KINDS = {
    nn.Module: Description.of_module,
    list: lambda d, value: [d.of(v) for v in value],
    tuple: lambda d, value: (type(value).__name__, *[d.of(v) for v in value]),
    set | frozenset: lambda d, value: sorted(repr(d.of(v)) for v in value),
    dict: lambda d, value: [(d.of(k), d.of(v)) for k, v in value.items()],
    types.ModuleType: lambda d, value: value.__name__,
    types.MethodType: lambda d, value: (d.of(value.__func__), d.of(value.__self__)),
    functools.partial: lambda d, value: (d.of(value.func), d.of(value.args), d.of(value.keywords)),
    property: lambda d, value: d.of(value.fget),
    types.FunctionType: Description.of_function,
    type: Description.of_class,
}


def cells(function: types.FunctionType) -> list:
    """What a closure holds; a cell may not be filled yet."""
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:
            found.append(None)
    return found


def name_of(value):
    """What is torch's or Python's: their versions are in the key. Raises Unknown."""
    for name in ("__qualname__", "__name__", "_qualname", "_qualified_op_name"):
        if isinstance(getattr(value, name, None), str):
            return getattr(value, "__module__", ""), getattr(value, name)
    raise Unknown(type(value))


def replaced(value) -> bool:
    """Is it a method in our own place, or what wraps one?"""
    return isinstance(value, Compiled) or isinstance(getattr(value, "compiled", None), Compiled)


TORCH = (str(Path(torch.__file__).parent), str(Path(functools.__file__).parent))


def ours(value) -> bool:
    """Is it defined in a file that is neither torch's nor Python's?"""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, types.ModuleType):
        name = value.__name__
    else:
        named = isinstance(value, (type, types.FunctionType)) or hasattr(value, "__wrapped__")
        name = getattr(value if named else type(value), "__module__", None)
    return bool(name) and _is_our_module(name)


@cache
def _is_our_module(name: str) -> bool:
    import sys
    file = getattr(sys.modules.get(name), "__file__", None)
    return bool(file) and not file.startswith(TORCH)


def graph_key(graph) -> str:
    """Of a traced graph: its code, its constants, what it is given, and who compiles it where."""
    given = []
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            t = node.meta["val"]
            given.append((str(t.shape), str(t.stride()), str(t.dtype), str(t.device)))
    constants = [(name, t.dtype, tuple(t.shape), t.tolist()) for name, t in
                 [*graph.named_parameters(), *graph.named_buffers()]]
    constants += [(name, t.dtype, tuple(t.shape), t.tolist()) for name, t in vars(graph).items()
                  if isinstance(t, Tensor)]
    return disk.digest(repr((graph.code, given, constants, maker())))


def maker() -> tuple:
    """Who makes machine code from a graph, and how."""
    return (inductor.machine(), sorted(inductor.OPTIONS.items()), patch_code())


# ---- Functions ----------------------------------------------------------------------------------

def find(program: str | None, trace: Callable, compile_graph: Callable) -> Callable | None:
    """The function of a program, from the disk or compiled now; None where only the public way is.

    program: a digest of all that the graph depends on, None where we cannot tell: always trace.
    """
    key = disk.look_up(program) if program else None
    function = disk.load(key) if key else None
    if function is None:
        traced = trace()
        if traced is None:
            return None
        key = graph_key(traced.graph)
        function = disk.load(key) or disk.save(key, lambda: compile_graph(traced))
        if program and function:
            disk.note_down(program, key)
    return function


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


def once(function: Callable, *example: Tensor) -> Callable:
    """A function from tensors to one, compiled by its first call; in eager() too it runs compiled.

    Sizes above 16 in the example stand for any; those that are alike there must always be, and all
    tensors contiguous.
    """
    def run(*inputs):
        return (function(*inputs),)

    @cache
    def compiled():
        shapes = [(t.shape, t.dtype) for t in example]
        program = disk.digest(repr(("once", Description(function).text, shapes, maker())))
        return find(program, lambda: inductor.trace(run, example, any_size=True),
                    lambda traced: compile_graph(traced, any_size=True)
                    ) or inductor.compile_publicly(run, any_size=True)
    return lambda *inputs: compiled()(*inputs)[0]


def compile_graph(traced, any_size: bool = False) -> Callable | None:
    """By Inductor. The only place that compiles anew: whoever comes here waits for seconds."""
    return inductor.compile_graph(traced, any_size)


class _Method(nn.Module):
    def __init__(self, method: Callable):
        super().__init__()
        self.module = method.__self__
        self.forward = method


class Functions:
    """Those of a model, whose modules with tensors and code alike share them."""

    def __init__(self):
        self.kinds = {}                            # of modules -> of inputs -> function
        self.memo = {}                             # of descriptions


class Compiled:
    """A module's method, for tensors, tuples of them, None and ints; one tensor or more come out.

    cache: the submodule of state that others may replace; without: how the names of tensors begin
    that play no part.
    """

    def __init__(self, method: Callable, functions: Functions, cache: str = "",
                 without: str | tuple[str, ...] = ()):
        self.plain = method
        self.functions = functions
        self.without = (without,) if isinstance(without, str) else without
        *path, self.name = cache.split(".")
        self.holder = method.__self__.get_submodule(".".join(path))
        self.cache = self
        self.own = {}                              # of inputs -> function, None: the public way
        self.public = None

    def __call__(self, *args) -> Tensor | tuple[Tensor, ...]:
        if inductor._eager:
            return self.plain(*args)
        if getattr(self.holder, self.name, None) is not self.cache:        # it has a new one
            self._look()
        inputs = _flat(args)
        key = tuple([_layout(t) for t in inputs] + [a for a in args if type(a) is int])
        if key not in self.own:
            self.own[key] = self._find(args, inputs, key)
        function = self.own[key]
        if function is None:
            return self._publicly(*args)
        out = function(*self.tensors, *inputs)
        return out if len(out) > 1 else out[0]

    def _look(self) -> None:
        self.cache, module = getattr(self.holder, self.name, None), self.plain.__self__
        named = [*module.named_parameters(), *module.named_buffers()]
        named = [(name, t) for name, t in named if not name.startswith(self.without)]
        self.names = [name for name, _ in named]
        self.tensors = [t.detach() for _, t in named]
        self.description = self._describe()
        tensors = [(name, t.dtype, t.shape, t.stride()) for name, t in named]
        self.kind = (self.description, *tensors)
        self.own = self.functions.kinds.setdefault(self.kind, {})

    def _describe(self):
        try:
            return disk.digest(Description(self.plain, self.without, self.functions.memo).text)
        except Unknown as e:
            inductor.note(f"an attribute is of {e}: modules with it are traced at each start")
            return id(self)

    def _find(self, args, inputs: list[Tensor], key) -> Callable | None:
        def run(*tensors):
            own = {f"module.{name}": t for name, t in zip(self.names, tensors)}
            rest = list(tensors[len(own):])
            given = tuple(rest.pop(0) if isinstance(a, Tensor) else a if not isinstance(a, tuple)
                          else tuple(rest.pop(0) for _ in a) for a in args)
            out = torch.func.functional_call(_Method(self.plain), own, given)
            return out if isinstance(out, tuple) else (out,)

        program = None
        if isinstance(self.description, str):
            layouts = [(t.dtype, *_layout(t)) for t in inputs]
            shape_of_args = [type(a).__name__ for a in args]
            program = disk.digest(repr((self.kind, layouts, key, shape_of_args, _ranks(), maker())))
        example = [torch.empty_strided(*_layout(t), dtype=t.dtype) for t in inputs]
        example = [*self.tensors, *example]
        return find(program, lambda: inductor.trace(run, example),
                    self._compile)

    def _compile(self, traced) -> Callable | None:
        return compile_graph(traced)

    def _publicly(self, *args):
        if self.public is None:
            self.public = inductor.compile_publicly(self.plain)
        return self.public(*args)


def _ranks() -> tuple:
    """Of tensor parallelism: a graph may name the group and its size."""
    import torch.distributed as dist
    if not (dist.is_available() and dist.is_initialized()):
        return ()
    return dist.get_rank(), dist.get_world_size()
