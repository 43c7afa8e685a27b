"""Which functions of the core and of layers/ the kernels stand for, by their source.

After an edit of one of them the parts of a compiled model that it concerns run as they are read,
uncompiled, until the kernels do the same again and this command says so: it runs the kernels' tests
with the new digests and keeps them only if all pass.

    python scripts/known_sources.py                # what differs from known_sources.json in
                                                   # gpt_faster/kernels/, and which parts of
                                                   # models it concerns
    python scripts/known_sources.py --write
"""

import importlib
import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import nn

from gpt_faster.cli.common import Parser, guarded
from gpt_faster.kernels import linear, modifications
from gpt_faster.kernels.cpu import layers as cpu_layers
from model import ExpertLinear, ModelConfig, Transformer

ROOT = Path(__file__).resolve().parent.parent
LAYERS = sorted(p.stem for p in ROOT.glob("gpt_faster/layers/*.py") if p.stem != "__init__")
MODULES = ("model", "sampling", *(f"gpt_faster.layers.{name}" for name in LAYERS))
TESTS = ("--all", "--kernels", "-m", "kernels", "tests")


def current() -> dict[str, dict[str, str]]:
    quantized = *linear.QUANTIZED_MODULES, *linear.implemented_methods()
    modules = list(map(importlib.import_module, MODULES))
    models = {kind for module in modules for kind in vars(module).values()
              if isinstance(kind, type) and issubclass(kind, Transformer)}
    methods = [method for kind in (*models, ExpertLinear)      # are asked for one by one
               for method in modifications.methods_of(kind).values()]
    reached = modifications.core_code(modules, [*quantized, *methods])
    return dict(names=dict(sorted(reached.names.items())),
                sources=dict(sorted(reached.sources.items())))


def differing() -> list[str]:
    """The names whose entry is not in the file, or another one."""
    now = current()
    known = modifications.known_sources()
    return [name for part in now for name in sorted(now[part].keys() | known[part].keys())
            if now[part].get(name) != known[part].get(name)]


def concerned(name: str) -> list[str]:
    """The modules whose code comes to this function, class or name; none: they are of no model."""
    kinds = dict.fromkeys(kind for module in map(importlib.import_module, MODULES)
                          for kind in vars(module).values() if modifications.is_core(kind)
                          and isinstance(kind, type) and issubclass(kind, nn.Module))
    found = []
    for kind in kinds:
        reached = modifications.ReachableCode(filter(modifications.is_core, kind.__mro__))
        if name in reached.sources or name in reached.names:
            found.append(kind.__qualname__)
    return sorted(found)


def of_a_llama() -> str:
    """The parts of a Llama that would run eagerly."""
    with torch.device("meta"):
        model = Transformer(ModelConfig(64, 2, 4, 2, 16, 96, 160, 128, qk_norm=True))
    found = modifications.find_modifications(model)
    known = [cpu_layers.unmodified_sublayers(i, found) for i in range(len(model.layers))]
    return cpu_layers.eager_parts(found, bool(found.model), known)


def write() -> int:
    """-> the exit status of the tests; where they fail the file is as it was."""
    file = modifications.KNOWN_SOURCES_FILE
    before = file.read_bytes() if file.exists() else None
    file.write_text(json.dumps(current(), indent=1) + "\n")
    status = 1
    try:
        status = subprocess.run([sys.executable, "-m", "pytest", *TESTS], cwd=ROOT).returncode
    finally:
        if status and before is not None:
            file.write_bytes(before)
    return status


def run(argv: list[str] | None = None) -> int:
    p = Parser(description=__doc__.splitlines()[0])
    p.add_argument("--write", action="store_true", help="test the kernels, then write the digests")
    args = p.parse_args(argv)
    if args.write:
        return write()
    names = differing()
    for name in names:
        print(f"{name}: {', '.join(concerned(name)) or 'no part of a model'}")
    if names:
        print(f"A Llama compiled on a CPU would run {of_a_llama()} in eager PyTorch.")
    return 0


if __name__ == "__main__":
    sys.exit(guarded(run))
