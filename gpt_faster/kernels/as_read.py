"""Is what runs what is read? Which functions of the core a model runs, compared with those that the
kernels stand for; and whether anything of it was exchanged since.

A kernel takes the place of functions of model.py, layers/, sampling.py and quantize.py.
known_sources.json has a digest of each as it was when the kernels' tests passed
(scripts/known_sources.py writes it). What is compared is live: the methods of the modules' classes,
the functions that they find in their modules' globals, hooks, and what an instance has in place of
its class's. Knows no kernel.

    if what := unknown(model): ...                 # "a hook on layers.3": run it as it is read
    found = unknown_parts(model)                   # or only the parts that it concerns
    watch = Watch(model)
    if not watch.is_same(): ...                    # microseconds: before each call
"""

import inspect
import json
import operator
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType

import torch
from torch import Tensor, nn

from gpt_faster.kernels import private
from gpt_faster.kernels.digest import digest
from tp import shared_by

FILE = Path(__file__).parent / "known_sources.json"
CORE = {"model", "gpt_faster.layers", "quantize", "sampling"}      # what is compared by its source
OTHERS = {"checkpoint", "generate", "gpt_faster", "speculate", "tokenizer", "tp"}  # what runs in
                                                   # any case as it is read, or stands for the
                                                   # core knowingly
PLAIN = {nn.Module, nn.Linear, nn.Embedding, nn.Identity, nn.ModuleList, nn.ModuleDict}
CALLED = {"forward", "__call__", "__getattr__", "_call_impl", "_wrapped_call_impl"}
OUR_HOOKS = {"gpt_faster.layers.shared_kv.record_kv"}
NUMBERS = (bool, int, float, str, torch.dtype)


def package(module: str | None) -> str:
    """"torch" of torch.nn.functional; gpt_faster.layers apart from the rest of gpt_faster."""
    first, _, rest = (module or "").partition(".")
    of_core = first == "gpt_faster" and rest.partition(".")[0] == "layers"
    return "gpt_faster.layers" if of_core else first


def home(obj) -> str:
    """The module whose code a function, class or object is; a decorator's wrapper has its own."""
    obj = private.function_of(obj)
    if isinstance(obj, FunctionType):
        return obj.__globals__.get("__name__", "")
    return getattr(obj if isinstance(obj, type) else type(obj), "__module__", None) or ""


def name_of(obj) -> str:
    return f"{home(obj)}.{getattr(private.function_of(obj), '__qualname__', type(obj).__name__)}"


def is_of_core(obj) -> bool:
    return isinstance(private.function_of(obj), FunctionType | type) and package(home(obj)) in CORE


# ---- What a function reaches --------------------------------------------------------------------

def describe(value) -> str:
    """What a name in a module stands for, in words that do not depend on versions."""
    if isinstance(value, ModuleType):
        return f"module {value.__name__}"
    if isinstance(private.function_of(value), FunctionType | type):
        where = home(value)
        return name_of(value) if package(where) in CORE | OTHERS else where.partition(".")[0]
    if isinstance(value, BuiltinFunctionType):
        return package(value.__module__) or "builtins"
    if value is None or type(value) in (bool, int, float, str):
        return repr(value)
    if type(value) in (tuple, list):
        return f"({', '.join(map(describe, value))})"
    if type(value) is dict:
        return f"{{{', '.join(f'{k}: {describe(v)}' for k, v in value.items())}}}"
    return type(value).__name__


def is_of_torch(value) -> bool:
    """Is it anything but somebody else's function or class, where torch has its own?"""
    is_code = isinstance(private.function_of(value), FunctionType | type)
    return not is_code or package(home(value)) in ("torch", "builtins", "typing", "types")


def functions_of(kind: type) -> dict[str, FunctionType]:
    """The functions that a class has itself, by name."""
    found = {}
    for name, value in vars(kind).items():
        if isinstance(value, property):
            value = value.fget
        value = getattr(value, "__func__", value)
        if isinstance(value, FunctionType):
            found[name] = value
    return found


def methods_of(kind: type) -> dict[str, FunctionType]:
    """The same but for __init__, which no call runs, and without torch's decorators."""
    return {name: in_torch(f) for name, f in functions_of(kind).items() if name != "__init__"}


def in_torch(function):
    """What a decorator of torch's is around."""
    while package(home(function)) == "torch" and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def names_in(code: CodeType) -> Iterator[str]:
    """Names that code, and functions within it, may look up in its module."""
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from names_in(const)


def used_by(function) -> Iterator[tuple[dict, str, object]]:
    """-> (the module's globals, a name, what it stands for), of a function and of what it wraps;
    of torch's modules that it names, what it may take of them too."""
    while isinstance(function := private.function_of(function), FunctionType):
        if package(home(function)) in CORE:
            names = list(dict.fromkeys(names_in(function.__code__)))
            found = {name: function.__globals__[name] for name in names
                     if name in function.__globals__}
            yield from ((function.__globals__, name, value) for name, value in found.items())
            for module in found.values():
                if isinstance(module, ModuleType) and package(module.__name__) == "torch":
                    yield from ((vars(module), name, vars(module)[name]) for name in names
                                if name in vars(module))
        for cell in function.__closure__ or ():
            if isinstance(cell.cell_contents, FunctionType):
                yield from used_by(cell.cell_contents)
        function = getattr(function, "__wrapped__", None)


def parts_of(value) -> Iterator:
    """Functions and classes in a table of them."""
    if type(value) in (tuple, list, dict):
        for part in value.values() if type(value) is dict else value:
            yield from parts_of(part)
    elif isinstance(private.function_of(value), FunctionType | type):
        yield value


class Reached:
    """What functions and classes of the core come to, from some of them on.

    Of a class its methods; what its __init__ makes is looked at where it is: in a model.
    sources: name -> digest; names: "model.rotate" -> what it stands for; places: where each was
    found, (a module's globals or a class, name, value).
    """

    def __init__(self, roots: Iterable):
        self.sources, self.names, self.places = {}, {}, []
        todo, seen = [root for root in roots if is_of_core(root)], set()
        while todo:
            obj = todo.pop()
            if id(obj) in seen:
                continue
            seen.add(id(obj))
            todo += self._read(obj)

    def _read(self, obj) -> list:
        """-> what it leads to."""
        name, found = name_of(obj), []
        self.sources[name] = source_of(obj) if name not in self.sources else "two of one name"
        at_home = vars(sys.modules.get(home(obj), object))
        short = name.removeprefix(f"{home(obj)}.")
        if "." not in short:                       # it can be found by this name, if it is the one
            self._note(home(obj), at_home, short, at_home.get(short))
        functions = [obj]
        if isinstance(obj, type):
            found += [base for base in obj.__mro__ if is_of_core(base)]
            functions = [f for name, f in functions_of(obj).items() if name != "__init__"]
            self.places += [(obj, method, getattr(obj, method)) for method in functions_of(obj)]
        for function in functions:
            for scope, used, value in used_by(function):
                self._note(scope["__name__"], scope, used, value)
                found += [part for part in parts_of(value) if is_of_core(part)]
        return found

    def _note(self, module: str, scope: dict, name: str, value) -> None:
        self.places.append((scope, name, value))
        if package(module) != "torch" or not is_of_torch(value):
            self.names[f"{module}.{name}"] = describe(value)


def source_of(obj) -> str:
    function = private.function_of(obj)
    parts = tuple(functions_of(obj).items()) if isinstance(obj, type) else ()
    return _source_of(function, tuple((name, f, f.__code__) for name, f in parts))


@cache
def _source_of(obj, parts: tuple) -> str:
    """parts: what the digest depends on beside the object."""
    try:
        return digest(obj)
    except (OSError, TypeError):
        return "no source"


@cache
def known() -> dict[str, dict[str, str]]:
    return json.loads(FILE.read_text())


def unknown_of(reached: Reached) -> str | None:
    """The first name that is not what the kernels know, and in which way."""
    for name, found in reached.names.items():
        if known()["names"].get(name) != found:
            return f"{name} is not the kernels' one"
    for name, found in reached.sources.items():
        if known()["sources"].get(name) != found:
            return f"{name} was edited or is new"
    return None


def unknown_functions(functions: Iterable) -> str | None:
    """Of the core's functions, and of what they come to: one that the kernels do not stand for."""
    functions = list(functions)
    for function in functions:
        if not is_of_core(function):
            return f"{name_of(function)} is not the kernels' one"
    return unknown_of(Reached(functions))


# ---- What a model has ---------------------------------------------------------------------------

HALVES = ("attn", "ffn", "end")                    # of a layer: in the names of its parts
BEFORE, BEHIND = ("embed", "per_layer"), ("norm", "head", "cap")       # a model's layers
EXCHANGED = {"forward": "step", "embed_tokens": "before", "unembed": "behind"}     # its methods


@dataclass
class Unknown:
    """What of a model the kernels do not stand for, in words; None: they do.

    model: what all layers share; step: the model's own forward, which calls them; before, behind:
    the embedding and the output layer; halves: (layer, one of HALVES) -> what, all of them where it
    is the layer itself.
    """

    model: str | None = None
    step: str | None = None
    before: str | None = None
    behind: str | None = None
    halves: dict[tuple[int, str], str] = field(default_factory=dict)

    def all(self) -> list[str]:
        """Each once, what concerns most first."""
        found = [self.model, self.step, self.before, *self.halves.values(), self.behind]
        return list(dict.fromkeys(filter(None, found)))


def unknown(model: nn.Module) -> str | None:
    """What of a model the kernels do not stand for, in words: an edit, a hook, a part; or None."""
    if private.global_hooks():
        return "a hook on all modules"
    return unknown_among(list(model.named_modules()), {})


def unknown_parts(model: nn.Module) -> Unknown:
    """The same by the parts of a model with `layers`, for kernels that can take some of them.

    A hook on the model itself is called around them.
    """
    if private.global_hooks():
        return Unknown(model="a hook on all modules")
    of_core = [kind for kind in type(model).__mro__ if is_of_core(kind)]
    if not of_core:
        return Unknown(model=unknown_class(model, "the model"))
    methods = {name: getattr(type(model), name)    # whoever has overridden it
               for kind in of_core for name in methods_of(kind)}
    others = [method for name, method in methods.items() if name not in EXCHANGED]
    found = Unknown(model=unknown_override(model, "the model") or unknown_methods(others))
    for name, part in EXCHANGED.items():
        setattr(found, part, unknown_methods([methods[name]]))
    seen = {}                                      # classes that were looked at, of all parts
    for name, part in model.named_children():
        named = list(part.named_modules(prefix=name))
        if name in BEFORE or name in model.after_embed:
            found.before = found.before or unknown_among(named, seen)
        elif name in BEHIND:
            found.behind = found.behind or unknown_among(named, seen)
        elif name != "layers":
            found.model = found.model or unknown_among(named, seen)
    for i, layer in enumerate(model.layers):
        found.halves |= unknown_halves(i, layer, seen)
    return found


def unknown_methods(functions: list) -> str | None:
    """Of a model: the rooms' own stand for themselves."""
    functions = [f for f in map(in_torch, functions) if package(home(f)) not in OTHERS]
    return unknown_functions(functions)


def unknown_halves(i: int, layer: nn.Module, seen: dict) -> dict[tuple[int, str], str]:
    groups = {half: [] for half in HALVES}
    shared = [(f"layers.{i}", layer)]
    for name, part in layer.named_children():
        group = next((groups[half] for half in HALVES if half in name), shared)
        group += part.named_modules(prefix=f"layers.{i}.{name}")
    if what := unknown_among(shared, seen):
        return {(i, half): what for half in HALVES}
    found = {(i, half): unknown_among(group, seen) for half, group in groups.items()}
    return {half: what for half, what in found.items() if what}


def unknown_among(named: list[tuple[str, nn.Module]], seen: dict) -> str | None:
    """Of these modules. seen: which classes and functions were looked at -> what was found."""
    roots = []
    for name, module in named:
        where = name or "the model"
        if what := (unknown_class(module, where) or unknown_hook(module, where)
                    or unknown_override(module, where)):
            return what
        roots += [type(module), *(f for f in vars(module).values() if isinstance(f, FunctionType))]
    roots = frozenset(roots)
    if roots not in seen:
        bases = [base for root in roots for base in getattr(root, "__mro__", (root,))]
        seen[roots] = unknown_of(Reached(filter(is_of_core, bases)))
    return seen[roots]


def stood_for(modules: Iterable[nn.Module]) -> list[tuple[type, str]]:
    """Classes and methods whose code packed modules stand for."""
    return list(dict.fromkeys(pair for m in modules for pair in getattr(m, "stands_for", ())))


def unknown_packed(model: nn.Module) -> str | None:
    """Which of them is another one by now."""
    for kind, method in stood_for(model.modules()):
        is_core = package(kind.__module__) in CORE
        if unknown_functions([getattr(kind, method)]) if is_core else foreign_methods(kind):
            return f"{kind.__qualname__}.{method} was exchanged"
    return None


def unknown_class(module: nn.Module, where: str) -> str | None:
    for kind in type(module).__mro__[:-1]:
        is_ours = package(kind.__module__) in CORE | OTHERS
        if not is_ours and kind not in PLAIN and kind is type(module):
            return f"{where} is a {kind.__module__}.{kind.__qualname__}"
        if strange := foreign_methods(kind):
            return f"{kind.__qualname__}.{strange[0]} was exchanged"
    return None


def foreign_methods(kind: type) -> list[str]:
    """Methods that run in a call, whose code is not of their class's package.

    Libraries give torch's classes methods that do not.
    """
    own = [item for item in functions_of(kind).items()
           if package(kind.__module__) != "torch" or item[0] in CALLED]
    return _foreign_methods(kind, tuple(own))


@cache
def _foreign_methods(kind: type, functions: tuple) -> list[str]:
    own = {package(kind.__module__), "torch", "dataclasses", "typing", "enum"}
    return [name for name, f in functions if package(home(inspect.unwrap(f))) not in own]


def unknown_hook(module: nn.Module, where: str) -> str | None:
    for hook in private.hooks_of(module):
        if not (isinstance(hook, FunctionType) and name_of(hook) in OUR_HOOKS):
            return f"a hook on {where}"
    return None


def is_hooked(model: nn.Module) -> bool:
    """Has a user attached anything to it?"""
    return bool(private.global_hooks()) or any(unknown_hook(m, "") for m in model.modules())


def unknown_override(module: nn.Module, where: str) -> str | None:
    """An attribute of the instance in place of its class's, or a function that it has."""
    of_class = _attributes(type(module))
    for name, value in vars(module).items():
        if name in of_class or callable(value):
            if not is_known_value(module, name, value):
                return f"{where}.{name} of its own".removeprefix("the model.")
    return None


@cache
def _attributes(kind: type) -> frozenset[str]:
    return frozenset(dir(kind)) - {"training", "__dict__"}


def is_known_value(module: nn.Module, name: str, value) -> bool:
    """Is it the class's own method or the ranks', a function of the core or of torch, or a kernel?
    """
    if isinstance(value, MethodType):
        is_own = value.__func__ is getattr(type(module), name, None) or shared_by(module)
        return value.__self__ is module and bool(is_own)
    if not callable(value):
        return False
    where = package(home(value))
    if isinstance(value, BuiltinFunctionType):
        where = package(value.__module__) or "torch"
    may_be = OTHERS | ({"torch"} | CORE if name not in _attributes(type(module)) else set())
    return where in may_be


# ---- Whether it is still the same ---------------------------------------------------------------

class Watch:
    """A model as it is now. What is compared is what its user can exchange: modules, tensors and
    their memory, numbers and functions of instances and classes, hooks."""

    def __init__(self, model: nn.Module, derived: Iterable[Tensor] = ()):
        """derived: tensors of the model that the kernels made, which nobody knows by name."""
        modules, derived = list(model.modules()), set(map(id, derived))
        self.modules = modules
        self.classes = list(map(type, modules))
        self.dicts = [vars(m) for m in modules]
        self.lengths = list(map(len, self.dicts))
        self.children = [m._modules for m in modules if m._modules]
        self.children_before = [dict(children) for children in self.children]
        tensors = [(d, name, t) for m in modules for d in (m._parameters, m._buffers)
                   for name, t in d.items() if t is not None and id(t) not in derived]
        numbers = [(vars(m), name, value) for m in modules for name, value in vars(m).items()
                   if not name.startswith("_") and name != "training" and is_watched(value)]
        self.tensors = [t for *_, t in tensors]
        self.addresses = [t.data_ptr() for t in self.tensors]
        functions = reached_by(modules)
        items = [item for item in tensors + numbers + functions if isinstance(item[0], dict)]
        self.owners, self.names, self.values = zip(*items)
        of_classes = dict.fromkeys(item[:2] for item in functions if not isinstance(item[0], dict))
        self.kinds, self.methods = zip(*of_classes)
        self.functions = [getattr(kind, name) for kind, name in of_classes]
        self.n_hook = private.n_hooks_made()
        self.global_hooks = private.global_hooks()
        self.hooks = list(map(private.hooks_of, modules))
        self.hooked = [(m, hooks) for m, hooks in zip(modules, self.hooks) if hooks]

    def is_same(self) -> bool:
        """Of some 550 modules in 50 µs, where the caches have them."""
        return (self.has_no_new_hook()
                and private.global_hooks() == self.global_hooks                # none was removed
                and all(private.hooks_of(m) == hooks for m, hooks in self.hooked)
                and list(map(type, self.modules)) == self.classes
                and list(map(len, self.dicts)) == self.lengths
                and self.children == self.children_before
                and all(map(operator.is_, map(dict.get, self.owners, self.names), self.values))
                and list(map(Tensor.data_ptr, self.tensors)) == self.addresses
                and all(map(operator.is_, map(getattr, self.kinds, self.methods), self.functions)))

    def has_no_new_hook(self) -> bool:
        """Alone it costs next to nothing."""
        n = private.n_hooks_made()
        if n == self.n_hook and n is not None:
            return True
        self.n_hook = n
        return (private.global_hooks() == self.global_hooks
                and list(map(private.hooks_of, self.modules)) == self.hooks)


def is_watched(value) -> bool:
    """Numbers of an instance, and what it calls."""
    numbers = value if type(value) is tuple else (value,)
    return callable(value) or all(isinstance(part, NUMBERS) for part in numbers)


def reached_by(modules: list[nn.Module]) -> list[tuple]:
    kinds = [base for kind in dict.fromkeys(map(type, modules)) for base in kind.__mro__[:-1]]
    functions = [f for m in modules for f in vars(m).values() if isinstance(f, FunctionType)]
    functions += [getattr(kind, method) for kind, method in stood_for(modules)]
    places = Reached(filter(is_of_core, [*kinds, *functions])).places
    places += [(kind, name, None) for kind in dict.fromkeys(kinds) if not is_of_core(kind)
               for name in functions_of(kind) if name in CALLED]
    places += [(kind, method, None) for kind, method in stood_for(modules)]
    unique = {(id(scope), name): (scope, name, value) for scope, name, value in places}
    return list(unique.values())


def all_of_core(modules: Iterable[ModuleType], others: Iterable = ()) -> Reached:
    """What known_sources.json is made of: all classes and functions of these modules, and others,
    and what they come to."""
    found = [obj for module in modules for obj in vars(module).values()
             if (inspect.isclass(obj) or private.function_of(obj) is not obj
                 or inspect.isfunction(obj)) and home(obj) == module.__name__]
    return Reached([*found, *others])
