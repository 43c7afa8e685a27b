"""Imports torch as the command needs it: what only a compiler or a training uses waits until it is
asked for, and Python's collector of garbage until torch is there.

Names of torch's files are all that it knows. One that this torch lacks is never asked for.

    import_torch()                                 # before anything else imports it
"""

import gc
import os
import sys
from contextlib import suppress
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

# imported by torch to be there; executed when something in them is asked for
UNUSED = ("ao", "distributions", "export", "masked", "nn.intrinsic", "nn.qat", "nn.quantizable",
          "nn.quantized", "optim", "quantization", "utils.data")
# executed for what they register: for compilers, which begin with the module COMPILER
REGISTERING = "_meta_registrations", "distributed._meta_registrations"
COMPILER = "_dynamo"
NEEDED = "_prims.rng_prims"                        # torch.Generator's; they would have brought it


class Waiting:
    """A loader that leaves a module empty until run()."""

    def __init__(self, loader):
        self.loader = loader
        self.module = None

    def create_module(self, spec: ModuleSpec) -> None:
        return None                                # as ever

    def exec_module(self, module: ModuleType) -> None:
        self.module = module
        module.__getattr__ = self.get

    def get(self, name: str):
        """What Python asks for where the module has no such name."""
        if name.startswith("__"):                  # by which modules are told apart
            raise AttributeError(name)
        self.run()
        return getattr(self.module, name)

    def run(self) -> None:
        if "__getattr__" in vars(self.module):
            del self.module.__getattr__
            self.loader.exec_module(self.module)


class Finder:
    """Finds torch's modules that wait."""

    def __init__(self):
        self.waiting = {}                          # name in torch -> Waiting

    def find_spec(self, name: str, path, target=None) -> ModuleSpec | None:
        package, _, part = name.partition(".")
        if package != "torch":
            return None
        if part == COMPILER:
            for other in REGISTERING:
                if other in self.waiting:
                    self.waiting[other].run()
        if part not in UNUSED + REGISTERING:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            self.waiting[part] = spec.loader = Waiting(spec.loader)
        return spec


def need_torch() -> None:
    """Where this Python has no torch, go on with the one that quickstart made, or end."""
    if find_spec("torch"):
        return
    command = Path(sys.argv[0])
    environment = command.resolve().parent / ".venv"
    python = environment / "bin/python"
    if python.exists() and sys.prefix != str(environment):
        os.execv(python, [python, *sys.argv])
    print(f"{command.name}: error: this Python has no torch: run `bash scripts/quickstart.sh`, "
          "which makes .venv", file=sys.stderr)
    sys.exit(2)


def import_torch() -> None:
    """As need_torch() where there is none."""
    need_torch()
    sys.meta_path.insert(0, Finder())
    gc.disable()
    import torch  # noqa: F401
    with suppress(ImportError):                    # a torch that has no such part
        import_module(f"torch.{NEEDED}")
    gc.freeze()                                    # never looked through again
    gc.enable()
