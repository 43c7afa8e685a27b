"""The oldest Python that README names, 3.10, has the syntax and the standard library that our files use.

Tests run on one Python only; ruff's target version does not look at the standard library.
"""

import ast
import glob
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from test_laws import MODULES, ROOT

FILES = [*MODULES, *ROOT.glob("scripts/**/*.py"), *ROOT.glob("tests/*.py")]
OLDEST = (3, 10)
# What came with Python 3.11 to 3.13, by docs.python.org's "What's new" and `versionadded` notes.
NEWER = {
    "asyncio": "TaskGroup timeout timeout_at Runner Barrier QueueShutDown eager_task_factory",
    "base64": "z85encode z85decode", "calendar": "Month Day", "collections.abc": "Buffer", "contextlib": "chdir", "copy": "replace",
    "datetime": "UTC", "enum": "StrEnum verify EnumCheck FlagBoundary member nonmember property global_enum show_flag_values ReprEnum",
    "functools": "Placeholder", "hashlib": "file_digest", "http": "HTTPMethod",
    "inspect": "getmembers_static ismethodwrapper BufferFlags markcoroutinefunction getasyncgenstate getasyncgenlocals",
    "itertools": "batched", "locale": "getencoding", "logging": "getLevelNamesMapping getHandlerByName getHandlerNames",
    "math": "cbrt exp2 sumprod fma", "operator": "call is_none is_not_none", "os": "process_cpu_count unshare setns listdrives",
    "os.path": "splitroot isjunction isreserved isdevdrive", "pathlib": "UnsupportedOperation", "queue": "ShutDown",
    "random": "binomialvariate", "re": "NOFLAG PatternError", "sqlite3": "Blob", "statistics": "kde kde_random",
    "sys": "exception activate_stack_trampoline monitoring", "threading": "setprofile_all_threads settrace_all_threads", "tomllib": "*",
    "types": "get_original_bases CapsuleType", "warnings": "deprecated", "wsgiref.types": "*",
    "typing": "Self Never LiteralString assert_never assert_type reveal_type Required NotRequired dataclass_transform Unpack TypeVarTuple "
              "get_overloads clear_overloads override TypeAliasType get_protocol_members is_protocol NoDefault TypeIs ReadOnly",
}
BUILTINS = ("ExceptionGroup", "BaseExceptionGroup", "PythonFinalizationError")
METHODS = {"add_note", "full_match", "from_uri", "enterContext"}       # of objects whose class a file need not name


def newer_names(text):
    """What a file uses of the standard library that Python 3.10 does not have."""
    tree = ast.parse(text)
    newer = {(module, name) for module, names in NEWER.items() for name in names.split()}
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                aliases[alias.asname or alias.name] = alias.name
                if (alias.name, "*") in newer:
                    yield alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                if (node.module, alias.name) in newer or (node.module, "*") in newer:
                    yield f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            module = aliases.get(ast.unparse(node.value))
            if (module, node.attr) in newer or node.attr in METHODS:
                yield f"{module}.{node.attr}"
        elif isinstance(node, ast.Name) and node.id in BUILTINS:
            yield node.id


@pytest.mark.parametrize("text", [
    "import hashlib\nhashlib.file_digest(f, 'md5')", "from hashlib import file_digest", "import hashlib as h\nh.file_digest", "import tomllib",
    "from itertools import batched", "import datetime as d\nd.UTC", "from typing import Self", "try: pass\nexcept ExceptionGroup: pass",
    "import os\nos.process_cpu_count()", "import os.path\nos.path.splitroot(p)", "e.add_note('x')"])
def test_the_check_sees(text):
    assert list(newer_names(text))


def test_no_name_of_a_newer_standard_library():
    found = {str(path.relative_to(ROOT)): names for path in FILES if path.name != Path(__file__).name
             and (names := sorted(set(newer_names(path.read_text()))))}
    assert not found


def test_the_oldest_syntax():
    for path in FILES:
        ast.parse(path.read_text(), str(path), feature_version=OLDEST)


def test_the_oldest_python_compiles_every_file():
    """With its own parser, where this machine has it: f-strings of Python 3.12 pass the check above."""
    installed = glob.glob(str(Path.home() / ".pyenv/versions/3.10.*/bin/python"))
    python = shutil.which("python3.10") if not installed else installed[0]
    if not python:
        pytest.skip("no Python 3.10 here")
    script = "import sys\nfor path in sys.argv[1:]: compile(open(path, encoding='utf-8').read(), path, 'exec')"
    done = subprocess.run([python, "-c", script, *map(str, FILES)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_version_that_is_claimed_is_this_one():
    claims = {path.name: re.findall(r"Python (3\.\d+) or newer", path.read_text())
              for path in (ROOT / "README.md", ROOT / "scripts/setup.sh", ROOT / "scripts/install_peers.sh")}
    assert all(found and set(found) == {"3.10"} for found in claims.values()), claims
