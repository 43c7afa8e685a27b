"""Import torch faster: modules that only compilers or training use load lazily, and the garbage
collector is off during the import.

It knows the names of torch's modules and nothing else; a name that this torch lacks is ignored.

    import_torch()                                 # before any other import of torch
"""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

# torch imports these, but inference rarely uses them: load on first attribute access
UNUSED = ("ao", "distributions", "export", "masked", "nn.intrinsic", "nn.qat", "nn.quantizable",
          "nn.quantized", "optim", "quantization", "utils.data")
# these register meta kernels for compilers: load before the module COMPILER
REGISTERING = "_meta_registrations", "distributed._meta_registrations"
COMPILER = "_dynamo"
NEEDED = "_prims.rng_prims"                        # for torch.Generator; lazy modules import it


class LazyLoader:
    """Leaves a module empty until load(), or until an attribute of it is read."""

    def __init__(self, loader):
        self.loader = loader
        self.module = None

    def create_module(self, spec: ModuleSpec) -> None:
        return None                                # the default module

    def exec_module(self, module: ModuleType) -> None:
        self.module = module
        module.__getattr__ = self.get

    def get(self, name: str):
        """The module's __getattr__: called for names that it does not have yet."""
        if name.startswith("__"):                  # the import system probes these
            raise AttributeError(name)
        self.load()
        return getattr(self.module, name)

    def load(self) -> None:
        if "__getattr__" in vars(self.module):
            del self.module.__getattr__
            self.loader.exec_module(self.module)


class Finder:
    """A meta path finder that gives torch's lazy modules a LazyLoader."""

    def __init__(self):
        self.loaders = {}                          # module name without "torch." -> LazyLoader

    def find_spec(self, name: str, path, target=None) -> ModuleSpec | None:
        package, _, part = name.partition(".")
        if package != "torch":
            return None
        if part == COMPILER:
            for other in REGISTERING:
                if other in self.loaders:
                    self.loaders[other].load()
        if part not in UNUSED + REGISTERING:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            self.loaders[part] = spec.loader = LazyLoader(spec.loader)
        return spec


def need_torch() -> None:
    """If this Python has no torch, re-execute with quickstart's .venv, or exit with status 2."""
    if find_spec("torch"):
        return
    command = Path(sys.argv[0])
    environment = command.resolve().parent / ".venv"
    python = environment / "bin/python"
    if python.exists() and sys.prefix != str(environment):
        os.execv(python, [python, *sys.argv])
    print(f"{command.name}: error: this Python has no torch: run `bash scripts/quickstart.sh`, "
          "which creates .venv", file=sys.stderr)
    sys.exit(2)


@contextmanager
def quiet_interrupt() -> Iterator[None]:
    """Ctrl-C ends the process at once, without a traceback: for imports, which take seconds."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:      # else it is ignored: a job in the background
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def import_torch() -> None:
    """Import torch with the lazy loaders; without torch, see need_torch()."""
    need_torch()
    sys.meta_path.insert(0, Finder())
    gc.disable()
    import torch  # noqa: F401
    with suppress(ImportError):                    # other versions may not have it
        import_module(f"torch.{NEEDED}")
    gc.freeze()                                    # exclude torch's objects from collections
    gc.enable()
