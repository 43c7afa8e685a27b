"""Of every function of the core that runs in a model's call: exchanged, wherever it is found, a compiled model notices.

Which functions run is not what gpt_faster/kernels/modifications.py says, but what Python's profiler sees in a call of the model as it is read.
"""

import sys
from pathlib import Path

import pytest
import tiny
import torch

import model as core
from gpt_faster.formats.load import load_model, read_checkpoint
from gpt_faster.kernels import guard, modifications
from gpt_faster.kernels.compile import compile_model

pytestmark = pytest.mark.kernels
ROOT = Path(core.__file__).parent
FILES = {str(ROOT / "model.py"), *map(str, ROOT.glob("gpt_faster/layers/*.py"))}
TOKENS = torch.arange(3, 15)[None]


def call(model):
    """A prompt and a step."""
    with torch.no_grad():
        model(TOKENS[:, :-1], torch.arange(11), 1, 16)
        model(TOKENS[:, -1:], torch.tensor([11]), 1, 16)


def codes_run(model):
    """The code objects of the core that a call runs."""
    found = set()

    def see(frame, event, arg):
        if event == "call" and frame.f_code.co_filename in FILES:
            found.add(frame.f_code)
    sys.setprofile(see)
    try:
        call(model)
    finally:
        sys.setprofile(None)
    return found


def code_of(value):
    """Of a function, a method, a property or an operator; None: it has none."""
    value = getattr(value, "fget", value)
    value = getattr(value, "_init_fn", value)
    return getattr(getattr(value, "__func__", value), "__code__", None)


def places(codes):
    """Where these functions are found: (a module or class, a name, the function)."""
    modules = [m for name, m in list(sys.modules.items()) if name == "model" or name.startswith("gpt_faster.layers.")]
    classes = dict.fromkeys(c for m in modules for c in vars(m).values() if isinstance(c, type) and c.__module__ in sys.modules
                            and (c.__module__ == "model" or c.__module__.startswith("gpt_faster.layers.")))
    return [(owner, name, value) for owner in (*modules, *classes) for name, value in list(vars(owner).items())
            if code_of(value) in codes]


def counting(value, calls):
    """The same, but it counts."""
    plain = value.fget if isinstance(value, property) else getattr(value, "__func__", value)

    def wrapper(*args, **kwargs):
        calls.append(1)
        return plain(*args, **kwargs)
    kinds = {property: property, staticmethod: staticmethod, classmethod: classmethod}
    return kinds.get(type(value), lambda f: f)(wrapper)


@pytest.mark.parametrize("name", sorted(tiny.COVER))
def test_every_function(families, name):
    directory, _ = families(name)
    plain, compiled = (load_model(read_checkpoint(directory), torch.float32, "cpu") for _ in range(2))
    for model in (plain, compiled):
        model.setup_cache(1, 16)
    compile_model(compiled)
    call(compiled)
    watch = guard.guard_of(compiled).snapshot
    assert watch.is_unchanged() and not modifications.find_modifications(plain).all()
    found, n_called = places(codes_run(plain)), 0
    for owner, attribute, value in found:
        calls = []
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(owner, attribute, counting(value, calls))
            call(plain)
            if not calls:                          # another module has it under this name
                continue
            n_called += 1
            where = f"{owner.__name__}.{attribute}"
            assert not watch.is_unchanged(), f"{where}: a compiled model did not notice"
            assert modifications.find_modifications(plain).all(), f"{where}: is taken as known"
        assert watch.is_unchanged()
    assert n_called > 10
