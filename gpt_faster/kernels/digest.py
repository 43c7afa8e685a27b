"""A digest of source code that changes when the code's meaning can change, and not otherwise.

Computed from tokens: comments, docstrings, blank lines, the width of an indentation and where a
line inside parentheses is broken make no difference. Python 3.10 to 3.13 give the same digest (an
`ast.dump` differs between versions, and so does bytecode). Knows nothing of models.

    digest(model, Attention.forward)               # modules, classes, functions -> 32 hex digits
    digest_with_imports(quantize)                  # and of all modules of ours that it imports
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
    """A digest of modules, classes and functions as they are live, in this order.

    A module stands for its whole file. A class stands for its name, its base classes' names, its
    own methods as they are now (so a method that was assigned to it counts) and its own numbers and
    strings. A function stands for the statement that defines it, its decorators, its default values
    and the function that it wraps, but not for the functions that it calls. OSError where an object
    has no source, TypeError where it is none of these.
    """
    return disk.digest(repr([_parts(obj) for obj in objects]))


def source_digest(text: str) -> str:
    """The same for source code as text."""
    return disk.digest(repr(_relative(logical_lines(text))))


def digest_with_imports(*modules: ModuleType) -> str:
    """A digest of these modules and of all modules of this repository that they import.

    Of their files, read anew only where they were changed since; and of what was put into the
    modules since they were imported: functions, methods and numbers. OSError where one of these
    functions has no source.
    """
    known = disk.cache_dir() / "sources.json"
    try:
        kept = json.loads(known.read_text())
    except (OSError, ValueError):
        kept = {}
    kept = kept if isinstance(kept, dict) else {}
    found, waiting = {}, [Path(module.__file__) for module in modules]
    while waiting:
        path = waiting.pop()
        if str(path) not in found:
            found[str(path)] = entry = _source_entry(path, kept.get(str(path)))
            waiting += [ROOT / name for name in entry["imports"]]
    if any(kept.get(path) != entry for path, entry in found.items()):
        others = {path: entry for path, entry in kept.items() if Path(path).exists()}
        disk.write_atomically(known, json.dumps({**others, **found}))
    sources = sorted((str(Path(path).relative_to(ROOT)), entry["digest"])
                     for path, entry in found.items())
    return disk.digest(repr((sources, _assigned(found))))


def _source_entry(path: Path, kept) -> dict:
    """A file's digest, the files of ours that it imports, and the state that it was read in."""
    stat = path.stat()
    state = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
    if isinstance(kept, dict) and kept.get("state") == state and {"digest", "imports"} <= set(kept):
        return kept
    text = path.read_text(encoding="utf-8")
    return dict(state=state, digest=source_digest(text), imports=sorted(_imports(text)))


def _imports(text: str) -> set[str]:
    """Those at the top of a file; a command's last lines import what no other part needs."""
    names = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    files = {f"{name.replace('.', '/')}.py" for name in names}
    return {name for name in files if (ROOT / name).is_file()}


def _assigned(files: dict) -> list:
    """What the modules of these files hold now, beside what their files say."""
    held = []
    for name, module in sorted(sys.modules.items()):
        if getattr(module, "__file__", None) not in files or name == "__main__":
            continue
        for key, value in sorted(vars(module).items()):
            if inspect.isfunction(value) and key.startswith("__"):
                continue                           # a compiler's, which is put beside its source
            if inspect.isfunction(value):
                held.append([name, key, _origin(value, files)])
            elif isinstance(value, type) and value.__module__ == name:
                held += [[name, key, attribute, _origin(f, files)]
                         for attribute, f in sorted(vars(value).items()) if inspect.isfunction(f)
                         and not (attribute.startswith("__") and _generated(f))]
            elif type(value) in (bool, int, float, tuple) and not key.startswith("__"):
                held.append([name, key, _simple(value)])
    return held


def _origin(f, files: dict) -> list:
    """Which function of these files it is; of any other, its code."""
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
    """Did dataclass or NamedTuple make it?"""
    return f.__code__.co_filename.startswith("<") or _foreign_module(f) is not None


def _foreign_module(f) -> str | None:
    """The module of a function of torch or of the standard library, which is not read."""
    name = f.__globals__.get("__name__", "")
    package = name.partition(".")[0]
    if package in sys.stdlib_module_names and package != "__main__" or package == "torch":
        return name
    return "collections" if name.startswith("namedtuple_") else None


def _attribute(value) -> list:
    """What an attribute of a class adds: a method's code, a simple value, otherwise its type."""
    if isinstance(value, staticmethod | classmethod):
        return [type(value).__name__, *_function(value.__func__)]
    if isinstance(value, property):
        return ["property", *(_function(f) for f in (value.fget, value.fset, value.fdel) if f)]
    if inspect.isfunction(value):
        return _function(value)
    return [_simple(value)]


def _function(f) -> list:
    """The code of a function, and of the functions that it wraps (functools.wraps)."""
    f, parts = getattr(f, "__func__", f), []
    while f is not None:
        code = getattr(f, "__code__", None)
        if code is None and not hasattr(f, "__wrapped__"):
            raise TypeError(f"{f!r} is no function, class or module: it has no digest")
        if code is None:
            parts.append(type(f).__name__)         # functools.cache
        elif module := _foreign_module(f):
            parts.append([module, code.co_name])   # a decorator of torch
        else:
            parts.append([_statement(code), _simple(f.__defaults__), _simple(f.__kwdefaults__)])
        f = getattr(f, "__wrapped__", None)
    return parts


def _simple(value) -> str:
    """The value where Python and its version do not change how it is written, else its type."""
    if value is None or type(value) in (bool, int, float, str, bytes):
        return repr(value)
    if type(value) in (tuple, list):
        return f"({', '.join(map(_simple, value))})"
    if type(value) is dict:
        return f"{{{', '.join(f'{_simple(k)}: {_simple(v)}' for k, v in value.items())}}}"
    return type(value).__name__


# ---- Source -> tokens ---------------------------------------------------------------------------

class Line(NamedTuple):
    """A logical line: a simple statement, or the first line of one that has a body."""

    depth: int                                     # in how many blocks it is
    first: int                                     # its rows in the file, from 1
    last: int
    texts: list[str]                               # its tokens


@functools.cache
def _statement(code: CodeType) -> list:
    """The lines of the statement that defines a function; of a lambda, the one that it is in."""
    lines, row = _file_lines(code.co_filename), code.co_firstlineno
    begin = next((i for i, line in enumerate(lines) if line.first <= row <= line.last), None)
    if begin is None:
        raise OSError(f"{code.co_filename}: line {row}, which defines {code.co_name}, is not in "
                      "the file")
    end = begin
    while lines[end].texts[0] == "@" and end + 1 < len(lines):
        end += 1
    end += 1
    while end < len(lines) and lines[end].depth > lines[begin].depth:
        end += 1
    return _relative(lines[begin:end])


def _relative(lines: list[Line]) -> list:
    """How deep each line is below the first one, and its tokens."""
    return [[line.depth - lines[0].depth, line.texts] for line in lines]


@functools.cache
def _file_lines(path: str) -> list[Line]:
    text = "".join(linecache.getlines(path))
    if not text:
        raise OSError(f"{path}: no source code")
    return logical_lines(text)


def logical_lines(text: str) -> list[Line]:
    """The lines of a file without those that do nothing: docstrings and comments."""
    rows = text.splitlines(keepends=True)
    lines, texts, kinds, depth, first = [], [], set(), 0, 0
    fstrings = []                                  # where those that are open begin
    for kind, string, start, end, _ in tokenize.generate_tokens(io.StringIO(text).readline):
        if kind == FSTRING_START:
            fstrings.append(start)
            continue
        if fstrings and kind != FSTRING_END:
            continue
        if kind == FSTRING_END:
            start = fstrings.pop()
            if fstrings:
                continue                           # a part of the one around it
            string = _between(rows, start, end)
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


def _between(rows: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    """The text from one (row, column) to another, as tokenize counts them."""
    piece = rows[start[0] - 1:end[0]]
    piece[-1] = piece[-1][:end[1]]
    piece[0] = piece[0][start[1]:]
    return "".join(piece)
