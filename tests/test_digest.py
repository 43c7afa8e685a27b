"""The digest of source code: meaning changes it, comments, docstrings, layout and Python's version do not."""

import functools
import glob
import importlib.util
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

from gpt_faster.kernels import digest as source
from gpt_faster.kernels.digest import digest, digest_with_imports, source_digest

ROOT = Path(__file__).parent.parent

PLAIN = '''
import math

def f(x, n=2):
    y = x + n
    if y > 3:
        y = 0
    return f"{y:>{n}} {{é}}", "a"

class A:
    def g(self):
        return [1, 2]
'''
SAME = '''
"""A module's docstring."""
import math  # a comment


def f(x,
      n=2):
  """A docstring
  of two lines."""
  y = x + n            # a comment

  if y > 3:
        # a comment that is indented otherwise
              y = 0
  return f"{y:>{n}} {{é}}", \\
         "a"

class A:

  "A docstring."
  def g(self):
       "Another."
       return [1,
               2]
'''


def test_layout_comments_and_docstrings_change_nothing():
    assert source_digest(SAME) == source_digest(PLAIN)


@pytest.mark.parametrize("old, new", [
    ("y = x + n", "y = x - n"), ("n=2", "n=3"), ("> 3", ">= 3"), ("        y = 0", "        y = 0.0"),
    ("        y = 0\n    return", "        y = 0\n        return"),        # indentation that means something
    ('{y:>{n}} {{é}}', '{y:<{n}} {{é}}'), ('{{é}}', '{{ é}}'), ("math", "cmath"), ("def g(self):", "@property\n    def g(self):"),
    ("    y = x + n\n", "")])
def test_meaning_changes_it(old, new):
    assert old in PLAIN
    assert source_digest(PLAIN.replace(old, new)) != source_digest(PLAIN)


def load(tmp_path, text, name):
    path = tmp_path / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_of_live_objects(tmp_path):
    one, same = load(tmp_path, PLAIN, "one"), load(tmp_path, SAME, "same")
    for a, b in ((one, same), (one.f, same.f), (one.A, same.A), (one.A.g, same.A().g)):
        assert digest(a) == digest(b)
    other = load(tmp_path, PLAIN.replace("> 3", "> 4"), "other")
    assert digest(other.f) != digest(one.f) and digest(other) != digest(one) and digest(other.A) == digest(one.A)
    assert digest(one.f, one.A) != digest(one.A, one.f)


def test_what_was_assigned_counts(tmp_path):
    module = load(tmp_path, PLAIN, "module")
    before = digest(module.A), digest(module.f)

    @functools.wraps(module.A.g)
    def wrapped(self):
        return [3]
    original = module.A.g
    for new in (wrapped, lambda self: [1, 2]):
        module.A.g = new
        assert digest(module.A) != before[0]
    module.A.g = original
    assert digest(module.A) == before[0]
    module.f.__defaults__ = (3,)
    assert digest(module.f) != before[1]
    module.f.__code__ = wrapped.__code__.replace(co_freevars=())
    assert digest(module.f) != before[1]


def test_without_source_it_is_an_error():
    scope = {}
    exec("def f(): pass", scope)
    with pytest.raises(OSError, match="no source"):
        digest(scope["f"])
    with pytest.raises(TypeError, match="no digest of"):
        digest(len)


SCRIPT = """
import sys
import types
sys.path[:0] = sys.argv[1:]
from pathlib import Path
from gpt_faster.kernels import digest
import source
root = Path(sys.argv[1])
for path in sorted([*root.glob("*/*.py"), *root.glob("gpt_faster/*/**/*.py")]):
    print(path, digest.source_digest(path.read_text()))
print(digest.digest(digest, digest.Line, digest.digest, source.Config, source.Config.method))
"""
SOURCE = '''
from dataclasses import dataclass
@dataclass(frozen=True)
class Config:
    dim: int
    scale: float = 1e-7
    def method(self, x: "int | None" = None):
        return f"{x!r:>{self.dim}} {'é' + 'ß'} {{}}"
'''


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_every_python_gives_the_same(tmp_path, version):
    """For all our files, with those Pythons that this machine has."""
    installed = glob.glob(str(Path.home() / f".pyenv/versions/{version}.*/bin/python"))
    python = next(iter(installed), None) or shutil.which(f"python{version}")
    if not python:
        pytest.skip(f"no Python {version} here")
    (tmp_path / "source.py").write_text(SOURCE)
    outputs = []
    for command in (python, sys.executable):
        run = subprocess.run([command, "-c", SCRIPT, ROOT, tmp_path], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        outputs.append(run.stdout)
    assert outputs[0] == outputs[1] and outputs[0].count("\n") > 100


# ---- With imports -------------------------------------------------------------------------------

@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A copy of our files, whose sources digest_with_imports follows."""
    for path in [*ROOT.glob("*.py"), *ROOT.glob("gpt_faster/**/*.py")]:
        target = tmp_path / "copy" / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    monkeypatch.setattr(source, "ROOT", tmp_path / "copy")
    monkeypatch.setenv("GPT_FASTER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "copy"


def of_weights(root):
    return digest_with_imports(*(types.SimpleNamespace(__file__=str(root / name)) for name in ("gpt_faster/formats/load.py", "gpt_faster/formats/quantize_on_load.py")))


def edit(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1, (path, text.count(old))
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize("file, old, new", [
    ("quantize.py", "(high - low) * (shrink / 15)", "(high - low) * (shrink / 16)"), ("quantize.py", "0.66)", "0.6)"),
    ("gpt_faster/kernels/linear.py", "import torch\n", "import torch\nX = 1\n"), ("gpt_faster/kernels/plain.py", "from torch import Tensor\n", "from torch import Tensor\nX = 1\n"),
    ("gpt_faster/kernels/cpu/products.py", "import torch\n", "import torch\nX = 1\n"), ("quantize.py", ".amax(-1) / 127", ".amax(-1) / 126"),
    ("gpt_faster/formats/gguf_file.py", "import torch\n", "import torch\nX = 1\n"), ("gpt_faster/layers/moe.py", "import torch\n", "import torch\nX = 1\n"),
    ("checkpoint.py", "import math\n", "import math\nX = 1\n"), ("model.py", "import torch\n", "import torch\nX = 1\n"),
    ("quantize.py", "    if best is None:\n        return", "    if best is None:\n      pass\n    return"),      # indentation
])
def test_an_edit_of_what_makes_weights_changes_it(copied, file, old, new):
    before = of_weights(copied)
    assert of_weights(copied) == before
    edit(copied / file, old, new)
    assert of_weights(copied) != before


@pytest.mark.parametrize("file, old, new", [
    ("quantize.py", "# fractions of the range from min to max", "# other words"), ("quantize.py", "import torch\n", "import torch\n\n\n# words\n"),
    ("quantize.py", '"""One scale per row."""', '"""Words."""'), ("gpt_faster/formats/load.py", "def to_checkpoint(", "# words\ndef to_checkpoint("),
    ("speculate.py", "import torch\n", "import torch\nX = 1\n"), ("gpt_faster/server/app.py", "import hashlib\n", "import hashlib\nX = 1\n"),
])
def test_what_makes_no_weights_does_not(copied, file, old, new):
    before = of_weights(copied)
    edit(copied / file, old, new)
    assert of_weights(copied) == before
