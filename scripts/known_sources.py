"""Digests of the functions in the core and layers/ that the kernels reimplement.

After an edit of such a function, the affected modules run in PyTorch, uncompiled, until the kernels
are adapted and this command records the new digests: --write keeps them only if the kernels' tests
pass.

    python scripts/known_sources.py                # list changes since
                                                   # gpt_faster/kernels/known_sources.json, and the
                                                   # modules they affect
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

from generate import decode_one_token
from gpt_faster.cli.common import guarded
from gpt_faster.cli.parser import Parser
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
    methods = [method for kind in (*models, ExpertLinear)      # looked up one by one
               for method in modifications.methods_of(kind).values()]
    reached = modifications.core_code(modules, [*quantized, *methods])
    step = {"generate.decode_one_token": modifications.digest_of(decode_one_token)}
    return dict(names=dict(sorted(reached.names.items())),
                sources=dict(sorted((reached.sources | step).items())))


def changed_names() -> list[str]:
    """Names whose digest is missing from the file or differs."""
    now = current()
    known = modifications.known_sources()
    return [name for part in now for name in sorted(now[part].keys() | known[part].keys())
            if now[part].get(name) != known[part].get(name)]


def affected_modules(name: str) -> list[str]:
    """Names of the nn.Module classes that use this function, class or name."""
    kinds = dict.fromkeys(kind for module in map(importlib.import_module, MODULES)
                          for kind in vars(module).values() if modifications.is_core(kind)
                          and isinstance(kind, type) and issubclass(kind, nn.Module))
    affected = []
    for kind in kinds:
        reached = modifications.ReachableCode(filter(modifications.is_core, kind.__mro__))
        if name in reached.sources or name in reached.names:
            affected.append(kind.__qualname__)
    return sorted(affected)


def unsupported_in_llama() -> str:
    """The parts of a Llama that run in PyTorch after the current edits."""
    with torch.device("meta"):
        model = Transformer(ModelConfig(64, 2, 4, 2, 16, 96, 160, 128, qk_norm=True))
    unknown = modifications.find_modifications(model)
    known = [cpu_layers.unmodified_sublayers(i, unknown) for i in range(len(model.layers))]
    return cpu_layers.eager_parts(unknown, bool(unknown.model), known)


def write() -> int:
    """Write the digests and run the tests -> their exit status; restore the file on failure."""
    file = modifications.KNOWN_SOURCES_FILE
    previous = file.read_bytes() if file.exists() else None
    file.write_text(json.dumps(current(), indent=1) + "\n")
    status = 1
    try:
        status = subprocess.run([sys.executable, "-m", "pytest", *TESTS], cwd=ROOT).returncode
    finally:
        if status and previous is not None:
            file.write_bytes(previous)
    return status


def run(argv: list[str] | None = None) -> int:
    p = Parser(description=__doc__.splitlines()[0])
    p.add_argument("--write", action="store_true",
                   help="run the kernels' tests and record the digests if they pass")
    args = p.parse_args(argv)
    if args.write:
        return write()
    names = changed_names()
    for name in names:
        print(f"{name}: {', '.join(affected_modules(name)) or 'no module'}")
    if names:
        print(f"In a Llama compiled on a CPU, {unsupported_in_llama()} uncompiled.")
    return 0


if __name__ == "__main__":
    sys.exit(guarded(run))
