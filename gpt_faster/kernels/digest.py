"""A digest of source code that changes only if the code's meaning can change.

Computed from tokens: comments, docstrings, blank lines, indentation width and line breaks inside
parentheses do not matter. The same in Python 3.10 to 3.13, unlike ast.dump and bytecode. Knows
nothing of models.

    digest(model, Attention.forward)               # modules, classes, functions -> 32 hex digits
    digest_with_imports(quantize)                  # with the repository's modules it imports
"""

import ast
import functools
import inspect
import io
import json
import linecache
import sys
import tokenize
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple

from gpt_faster.storage import disk

ROOT = Path(__file__).parents[2]
LAYOUT = (tokenize.NL, tokenize.COMMENT, tokenize.ENCODING, tokenize.ENDMARKER)
FSTRING_START = getattr(tokenize, "FSTRING_START", None)       # Python 3.12 splits f-strings
FSTRING_END = getattr(tokenize, "FSTRING_END", None)


def digest(*objects) -> str:
    """A digest of live modules, classes and functions, in this order.

    Of a module: its whole file. Of a class: its name, its base classes' names, its current methods
    (including assigned ones), numbers and strings, nothing inherited. Of a function: its defining
    statement, decorators, default values and the function it wraps, not the functions it calls.
    Raises OSError if an object has no source, TypeError for other objects.
    """
    return disk.digest(repr([_parts(obj) for obj in objects]))


def source_digest(text: str) -> str:
    """A digest of source code given as text."""
    return disk.digest(repr(_relative(logical_lines(text))))


def digest_with_imports(*modules: ModuleType) -> str:
    """A digest of these modules and of all modules of this repository that they import.

    Of their files, read again only if changed (results are cached on disk), and of functions,
    methods and numbers assigned after import. Raises OSError if one of these functions has no
    source.
    """
    cache = disk.trusted_cache()
    cache_file = cache / "sources.json" if cache else None
    try:
        is_read = cache_file and disk.is_trusted(cache_file)
        cached = json.loads(cache_file.read_text()) if is_read else {}
    except (OSError, ValueError):
        cached = {}
    cached = cached if isinstance(cached, dict) else {}
    found, pending = {}, [Path(module.__file__) for module in modules]
    while pending:
        path = pending.pop()
        if str(path) not in found:
            found[str(path)] = entry = _source_entry(path, cached.get(str(path)))
            pending += [ROOT / name for name in entry["imports"]]
    if cache_file and any(cached.get(path) != entry for path, entry in found.items()):
        others = {path: entry for path, entry in cached.items() if Path(path).exists()}
        disk.write_atomically(cache_file, json.dumps({**others, **found}))
    sources = sorted((str(Path(path).relative_to(ROOT)), entry["digest"])
                     for path, entry in found.items())
    return disk.digest(repr((sources, _runtime_values(found))))


def _source_entry(path: Path, cached) -> dict:
    """A file's digest, the files of this repository that it imports, and its stat when read."""
    stat = path.stat()
    state = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
    is_entry = isinstance(cached, dict) and {"digest", "imports"} <= set(cached)
    if is_entry and cached.get("state") == state:
        return cached
    text = path.read_text(encoding="utf-8")
    return dict(state=state, digest=source_digest(text), imports=sorted(_imports(text)))


def _imports(text: str) -> set[str]:
    """Files imported at the top level. Not those under a command's `if __name__ == "__main__"`."""
    names = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    files = {f"{name.replace('.', '/')}.py" for name in names}
    return {name for name in files if (ROOT / name).is_file()}


def _runtime_values(files: dict) -> list:
    """Functions, methods and numbers in the modules of these files, as they are now."""
    values = []
    for name, module in sorted(sys.modules.items()):
        if getattr(module, "__file__", None) not in files or name == "__main__":
            continue
        for key, value in sorted(vars(module).items()):
            if inspect.isfunction(value) and key.startswith("__"):
                continue                           # generated, e.g. by a compiler
            if inspect.isfunction(value):
                values.append([name, key, _origin(value, files)])
            elif isinstance(value, type) and value.__module__ == name:
                values += [[name, key, attribute, _origin(f, files)]
                         for attribute, f in sorted(vars(value).items()) if inspect.isfunction(f)
                         and not (attribute.startswith("__") and _generated(f))]
            elif type(value) in (bool, int, float, tuple) and not key.startswith("__"):
                values.append([name, key, _stable_repr(value)])
    return values


def _origin(f, files: dict) -> list:
    """File and name of a function of these files; the code of any other."""
    path = f.__code__.co_filename
    return [path.rpartition("/")[2], f.__code__.co_name] if path in files else _function(f)


def _parts(obj) -> list:
    if isinstance(obj, ModuleType):
        return _relative(_file_lines(inspect.getsourcefile(obj)))
    if isinstance(obj, type):
        own = [[name, *_attribute(value)] for name, value in sorted(vars(obj).items())
               if not name.startswith("__") or inspect.isfunction(value) and not _generated(value)]
        fields = list(vars(obj).get("__annotations__", {}))
        return [obj.__qualname__, [base.__qualname__ for base in obj.__bases__], fields, own]
    return _function(obj)


def _generated(f) -> bool:
    """Was it generated by dataclass or NamedTuple?"""
    return f.__code__.co_filename.startswith("<") or _foreign_module(f) is not None


def _foreign_module(f) -> str | None:
    """The module of a function of torch or the standard library; None for others."""
    name = f.__globals__.get("__name__", "")
    package = name.partition(".")[0]
    if package in sys.stdlib_module_names and package != "__main__" or package == "torch":
        return name
    return "collections" if name.startswith("namedtuple_") else None


def _attribute(value) -> list:
    """A class attribute's contribution: a method's code, a simple value, or else its type."""
    if isinstance(value, staticmethod | classmethod):
        return [type(value).__name__, *_function(value.__func__)]
    if isinstance(value, property):
        return ["property", *(_function(f) for f in (value.fget, value.fset, value.fdel) if f)]
    if inspect.isfunction(value):
        return _function(value)
    return [_stable_repr(value)]


def _function(f) -> list:
    """The code of a function and of the functions it wraps (functools.wraps)."""
    f, parts = getattr(f, "__func__", f), []
    while f is not None:
        code = getattr(f, "__code__", None)
        if code is None and not hasattr(f, "__wrapped__"):
            raise TypeError(f"no digest of {f!r}: expected a function, class or module")
        if code is None:
            parts.append(type(f).__name__)         # functools.cache
        elif module := _foreign_module(f):
            parts.append([module, code.co_name])   # a decorator of torch
        else:
            defaults = _stable_repr(f.__defaults__), _stable_repr(f.__kwdefaults__)
            parts.append([_statement(code), *defaults])
        f = getattr(f, "__wrapped__", None)
    return parts


def _stable_repr(value) -> str:
    """repr() of values for which it is the same in all Python versions; else the type's name."""
    if value is None or type(value) in (bool, int, float, str, bytes):
        return repr(value)
    if type(value) in (tuple, list):
        return f"({', '.join(map(_stable_repr, value))})"
    if type(value) is dict:
        return f"{{{', '.join(f'{_stable_repr(k)}: {_stable_repr(v)}' for k, v in value.items())}}}"
    return type(value).__name__


# ---- Source -> tokens ---------------------------------------------------------------------------

class Line(NamedTuple):
    """A logical line: a simple statement, or the first line of one that has a body."""

    depth: int                                     # number of enclosing blocks
    first: int                                     # first and last row in the file, from 1
    last: int
    texts: list[str]                               # tokens


@functools.cache
def _statement(code: CodeType) -> list:
    """The lines of the statement that defines a function or contains a lambda."""
    lines, row = _file_lines(code.co_filename), code.co_firstlineno
    begin = next((i for i, line in enumerate(lines) if line.first <= row <= line.last), None)
    if begin is None:
        raise OSError(f"{code.co_filename}: no line {row}, where {code.co_name} was defined: the "
                      "file has changed")
    end = begin
    while lines[end].texts[0] == "@" and end + 1 < len(lines):
        end += 1
    end += 1
    while end < len(lines) and lines[end].depth > lines[begin].depth:
        end += 1
    return _relative(lines[begin:end])


def _relative(lines: list[Line]) -> list:
    """Each line's depth relative to the first line, and its tokens."""
    return [[line.depth - lines[0].depth, line.texts] for line in lines]


@functools.cache
def _file_lines(path: str) -> list[Line]:
    text = "".join(linecache.getlines(path))
    if not text:
        raise OSError(f"{path}: no source code")
    return logical_lines(text)


def logical_lines(text: str) -> list[Line]:
    """The logical lines of a file, without docstrings and comments."""
    rows = text.splitlines(keepends=True)
    lines, texts, kinds, depth, first = [], [], set(), 0, 0
    fstrings = []                                  # start positions of open f-strings
    for kind, string, start, end, _ in tokenize.generate_tokens(io.StringIO(text).readline):
        if kind == FSTRING_START:
            fstrings.append(start)
            continue
        if fstrings and kind != FSTRING_END:
            continue
        if kind == FSTRING_END:
            start = fstrings.pop()
            if fstrings:
                continue                           # nested in another f-string
            string = _text_between(rows, start, end)
        if kind in (tokenize.INDENT, tokenize.DEDENT):
            depth += 1 if kind == tokenize.INDENT else -1
        elif kind == tokenize.NEWLINE:
            if kinds != {tokenize.STRING}:
                lines.append(Line(depth, first, end[0], texts))
            texts, kinds = [], set()
        elif kind not in LAYOUT:
            first = first if texts else start[0]
            texts.append(string)
            kinds.add(kind)
    return lines


def _text_between(rows: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    """The text between two (row, column) positions of tokenize."""
    piece = rows[start[0] - 1:end[0]]
    piece[-1] = piece[-1][:end[1]]
    piece[0] = piece[0][start[1]:]
    return "".join(piece)
