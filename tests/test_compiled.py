"""Functions kept on disk: the same numbers, quickly, or made anew."""

import importlib.util
import os
import shutil
import sys

import pytest
import torch
from torch import nn

from kernels import disk, functions, inductor
from kernels import inductor as compiled
from kernels.functions import Compiled, Functions


class Gated(nn.Module):
    """Takes what a block takes: a tensor, a tuple of tensors, and None; writes into a buffer."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.factor = 1
        self.up, self.attn = nn.Linear(32, 48), nn.Module()
        self.attn.cache = nn.Module()
        self.attn.cache.register_buffer("seen", torch.zeros(4, 48))

    def forward(self, x, pair, slot, rows=None):
        y = self.up(x) * pair[0] * self.factor + pair[1]
        self.attn.cache.seen[slot] = y[:1]
        return self.attn.cache.seen.sum(0) + inductor.is_compiling()


def given(n=1):
    return torch.randn(n, 32), (torch.randn(48), torch.randn(48)), torch.tensor([2]), None


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("GPT_FASTER_CACHE", str(tmp_path / "kept"))
    torch._dynamo.reset()
    with torch.no_grad():
        yield tmp_path / "kept"


def fast(module=None):
    module = module or Gated()
    module.forward = Compiled(module.forward, Functions(), "attn.cache")
    return module


def other_code(self, x, pair, slot, rows=None):
    y = self.up(x) * pair[0] + pair[1] + pair[1]
    self.attn.cache.seen[slot] = y[:1]
    return self.attn.cache.seen.sum(0) + inductor.is_compiling()


def never(*_):
    raise AssertionError("compiled again")


def folders(home):
    return sorted(p for p in home.iterdir() if p.name not in ("instructions", "index"))


def test_once_for_all_alike_and_for_the_next_process(home, monkeypatch):
    args, shared = given(), Functions()
    modules = [Gated(seed) for seed in range(3)]
    expected = [module(*args) for module in modules]
    for module in modules:
        module.attn.cache.seen.zero_()
        module.forward = Compiled(module.forward, shared, "attn.cache")
    found = [modules[0](*args)]
    monkeypatch.setattr(Compiled, "_compile", never)
    found += [module(*args) for module in modules[1:]]
    for module, new, plain in zip(modules, found, expected):
        torch.testing.assert_close(new, plain + 1)         # 1: it knew that it is compiled
        with compiled.eager():
            torch.testing.assert_close(module(*args), plain)
    assert len(folders(home)) == 1 and not list(home.glob(".partial*"))
    again = fast()                                         # as if in another process
    assert torch.equal(again(*args), found[0]) and again.attn.cache.seen.any()


def test_large_weights_are_asked_for_ahead(home):
    class Sums(nn.Module):
        def __init__(self, *shape):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(shape, dtype=torch.bfloat16))

        def forward(self, x):
            return (self.weight.float() * x).sum(-1)

    for n, asked in ((8, False), (400, True)):             # the last rows ask beyond the end
        x, module = torch.randn(130), Sums(n, 130)
        expected = module(x)
        torch.testing.assert_close(Compiled(module.forward, Functions())(x), expected)
        code = "".join(p.read_text() for p in home.rglob("*.cpp") if f"{n}L" in p.read_text())
        assert "Vectorized" in code and ("__builtin_prefetch" in code) == asked
        shutil.rmtree(home)


def test_a_function_for_any_size(home, monkeypatch):
    """Compiled for sizes of the example's kind, once, in eager() too, and again from the disk."""
    def scaled(x, by, out):
        return out.copy_(x * by[:, None, None] + inductor.is_compiling())

    example = torch.empty(19, 37, 4), torch.empty(19), torch.empty(19, 37, 4)
    for _ in range(2):
        function = functions.once(scaled, *example)
        for n, m in ((1, 2), (19, 37), (40, 1), (7, 300)):
            x, by, out = torch.randn(n, m, 4), torch.randn(n), torch.empty(n, m, 4)
            with compiled.eager(), torch.inference_mode(n == 7):
                y = function(x, by, out)
            torch.testing.assert_close(y, x * by[:, None, None] + 1)
            assert torch.equal(y, out)
        assert len(folders(home)) == 1
        monkeypatch.setattr(functions, "compile_graph", never)


def test_other_inputs_and_another_cache(home):
    module = fast()
    for n, args in ((1, given()), (2, given(2))):
        assert module(*args).shape == (48,) and len(folders(home)) == n
    x, *rest = given()
    wide = torch.randn(1, 64)[:, ::2]                      # the same shape, other strides
    plain = Gated()
    torch.testing.assert_close(module(wide, *rest), plain(wide, *rest) + 1)
    assert len(folders(home)) == 3
    assert torch.equal(module(x.as_strided((1, 32), (99, 1)), *rest), module(x, *rest))    # a stride never taken
    assert len(folders(home)) == 3
    old, module.attn.cache = module.attn.cache, Gated().attn.cache
    before = old.seen.clone()
    torch.testing.assert_close(module(x, *rest), Gated()(x, *rest) + 1)
    assert torch.equal(old.seen, before) and module.attn.cache.seen.any()


@pytest.mark.parametrize("damage", ["function", "*.so", "*.main.cpp", "digests.json", "empty", "gone"])
def test_damaged_files_are_made_anew(home, damage, monkeypatch, capsys):
    args = given()
    expected = fast()(*args)
    folder, = folders(home)
    if damage == "gone":
        shutil.rmtree(folder)
    elif damage == "empty":
        (folder / "digests.json").write_text("")
    else:
        for path in folder.rglob(damage):
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.unlink()                                  # the old one is mapped into this process
            path.write_bytes(data)
    made = []
    original = Compiled._compile
    monkeypatch.setattr(Compiled, "_compile", lambda *a: made.append(1) or original(*a))
    assert torch.equal(fast()(*args), expected) and made == [1]
    assert torch.equal(fast()(*args), expected) and made == [1]


def test_what_it_depends_on_is_in_its_name(home, monkeypatch):
    args = given()
    fast()(*args)
    other = Gated()
    other.factor = 2                               # another config
    fast(other)(*args)
    monkeypatch.setitem(compiled.OPTIONS, "cpp.enable_floating_point_contract_flag", "off")
    fast()(*args)
    monkeypatch.setattr(Gated, "forward", other_code)
    fast()(*args)
    n, threads = len(folders(home)), torch.get_num_threads()
    assert n == 4
    torch.set_num_threads(1 if threads > 1 else 2)
    fast()(*args)
    torch.set_num_threads(threads)
    monkeypatch.setattr(torch, "__version__", "3.0.0")
    fast()(*args)
    assert len(folders(home)) == n + 2


def test_nowhere_to_keep_it(home, monkeypatch):
    home.write_text("a file, not a directory")
    assert fast()(*given()).shape == (48,)
    assert home.read_text() == "a file, not a directory"


def test_interrupted(home, monkeypatch):
    original = torch._inductor.standalone_compile

    def interrupted(*args, **more):
        raise KeyboardInterrupt
    monkeypatch.setattr(torch._inductor, "standalone_compile", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fast()(*given())
    assert not folders(home) and not inductor.is_compiling() and not compiled._eager
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ or str(home) not in os.environ["TORCHINDUCTOR_CACHE_DIR"]
    monkeypatch.setattr(torch._inductor, "standalone_compile", original)
    assert fast()(*given()).shape == (48,)


class Steps(nn.Module):
    """Methods that take an int, give several tensors, and leave a part of the module alone."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.layers = nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.first.weight

    def enter(self, x, n, rows=None):
        return self.first(x), torch.arange(n), x

    def leave(self, x):
        return self.head(x) + inductor.is_compiling()


def test_methods(home, monkeypatch):
    monkeypatch.setattr(Steps, "forward", never)
    made, x, shared = [], torch.randn(1, 8), Functions()
    original = Compiled._compile
    monkeypatch.setattr(Compiled, "_compile", lambda *a: made.append(1) or original(*a))
    for seed, n_made in ((0, [1, 2, 2, 3]), (1, [3, 3, 3, 3])):            # the second one is alike
        plain, fast = Steps(seed), Steps(seed)
        fast.enter = Compiled(fast.enter, shared, without="layers.")
        fast.leave = Compiled(fast.leave, shared, without="layers.")
        seen = []
        for n in (3, 5, 3):
            torch.testing.assert_close(fast.enter(x, n, None), plain.enter(x, n))
            seen.append(len(made))
        torch.testing.assert_close(fast.leave(x), plain.leave(x) + 1)
        assert [*seen, len(made)] == n_made
    assert len(folders(home)) == 3
    with torch.no_grad():                          # another shape of what plays no part: the same function
        fast.layers = nn.Linear(8, 4)
        fast.leave = Compiled(fast.leave.plain, shared, without="layers.")
        fast.leave(x)
    assert len(made) == 3


# ---- What a function depends on, and on what it does not ----------------------------------------

SOURCE = """
import torch
from torch import nn
SCALE = {scale}
def helper(x):
    {comment}
    return x * SCALE
class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(24.).view(3, 8))
    def forward(self, x):
        {doc}
        return helper(self.weight @ x)
"""


def edited(tmp_path, monkeypatch, **parts):
    """A module from a file with this text, as if in another process."""
    path = tmp_path / "edited.py"
    path.write_text(SOURCE.format(**{"scale": 2, "comment": "# none", "doc": "pass", **parts}))
    spec = importlib.util.spec_from_file_location("edited", path)
    loaded = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "edited", loaded)
    exec(compile(path.read_text(), str(path), "exec"), loaded.__dict__)
    return loaded.Small()


def test_an_edited_comment_compiles_nothing_anew_and_an_edited_product_does(home, tmp_path, monkeypatch):
    x, traced, compilations = torch.randn(8), [], []
    trace, make = inductor.trace, functions.compile_graph
    monkeypatch.setattr(inductor, "trace", lambda *a, **k: traced.append(1) or trace(*a, **k))
    monkeypatch.setattr(functions, "compile_graph", lambda *a, **k: compilations.append(1) or make(*a, **k))

    def run(**parts):
        module = edited(tmp_path, monkeypatch, **parts)
        torch.testing.assert_close(Compiled(module.forward, Functions())(x), module(x))
        return len(traced), len(compilations)
    assert run() == (1, 1)
    assert run(comment="# a comment\n    # of two lines") == (1, 1)        # the same bytecode: not even traced
    assert run(doc="unused = 1") == (2, 1)                # other code, the same graph
    assert run(doc="unused = 1") == (2, 1)
    assert run(scale=3) == (3, 2)                          # a constant that a helper reads from its file
    assert run(comment="x = x + 1") == (4, 3)
    assert run() == (4, 3)


def test_what_we_do_to_inductors_code_is_in_the_key(home, monkeypatch):
    args = given()
    fast()(*args)
    monkeypatch.setattr(inductor, "prefetching", lambda kernel, line, *_: line)
    functions.patch_code.cache_clear()
    fast()(*args)
    functions.patch_code.cache_clear()
    assert len(folders(home)) == 2


def test_old_functions_are_cleared_away(home, monkeypatch):
    """The least recently used first; what another process loads meanwhile is whole or gone."""
    modules = [Gated() for _ in range(3)]
    for i, module in enumerate(modules):
        module.factor = i + 2
    fast(modules[0])(*given())
    first, = folders(home)
    size = sum(p.stat().st_size for p in first.rglob("*") if p.is_file())
    fast(modules[1])(*given())
    second, = set(folders(home)) - {first}
    os.utime(first, (2e9, 2e9))                            # used later than the second
    monkeypatch.setattr(disk, "max_bytes", lambda: int(2.5 * size))
    fast(modules[2])(*given())
    assert first in folders(home) and second not in folders(home) and len(folders(home)) == 2
    assert not list(home.glob(".partial*")) and len(list((home / "index").iterdir())) == 2
    monkeypatch.setenv("GPT_FASTER_CACHE_MB", "7")
    monkeypatch.undo()
    assert disk.max_bytes() == 1 << 30


# ---- Without torch's private parts --------------------------------------------------------------

def absent(*_, **__):
    raise AttributeError("not in this torch")


def remove(monkeypatch, name):
    import torch._dynamo.source
    import torch._inductor.codecache
    import torch._inductor.codegen.cpp
    import torch._inductor.config
    import torch._inductor.cpu_vec_isa
    import torch.fx.experimental.proxy_tensor
    import torch.fx.experimental.symbolic_shapes
    import torch.utils._config_module
    owner, leaf = name.rsplit(".", 1)
    target = torch
    for part in owner.split(".")[1:]:
        target = getattr(target, part)
    if leaf == "save":                                     # the kind of artifact that we have overrides it
        target = sys.modules["torch._inductor.standalone_compile"].AOTCompiledArtifact
    monkeypatch.setattr(target, leaf, absent)
    inductor.note.cache_clear()
    inductor.try_instructions.cache_clear()


@pytest.mark.parametrize("name", [
    "torch.fx.experimental.proxy_tensor.make_fx", "torch._inductor.standalone_compile",
    "torch._inductor.CompiledArtifact.load", "torch._inductor.CompiledArtifact.save",
    "torch.utils._config_module.ConfigModule.patch", "torch.utils._config_module.ConfigModule.get_hash", "torch._inductor.cpu_vec_isa.pick_vec_isa",
    "torch._inductor.codecache.CppPythonBindingsCodeCache.cache_clear",
    "torch._inductor.codegen.cpp.CppVecKernel._get_vec_load_line", "torch._inductor.codegen.cpp.cexpr_index"])
def test_without_a_private_part_the_numbers_stay(home, monkeypatch, capsys, name):
    class Sums(nn.Module):
        def __init__(self, seed):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(400, 130, generator=torch.Generator().manual_seed(seed)))

        def forward(self, x):
            return (self.weight * x).sum(-1)

    x, modules = torch.randn(130), [Sums(seed) for seed in range(2)]
    expected = [module(x) for module in modules]
    if name.endswith("load"):                              # there is something to load
        Compiled(Sums(0).forward, Functions())(x)
    remove(monkeypatch, name)
    shared = Functions()
    for module, wanted in zip(modules, expected):          # the second takes the first one's function
        call = Compiled(module.forward, shared)
        torch.testing.assert_close(call(x), wanted)
        torch.testing.assert_close(call(x), wanted)
    monkeypatch.undo()
    assert "note: " in capsys.readouterr().err


@pytest.mark.parametrize("name", [
    "torch.fx.experimental.symbolic_shapes.StatelessSymbolicContext", "torch._dynamo.source.ConstantSource"])
def test_without_symbols_a_function_for_any_size_stays(home, monkeypatch, capsys, name):
    def scaled(x, by):
        return x * by[:, None]
    remove(monkeypatch, name)
    function = functions.once(scaled, torch.empty(19, 37), torch.empty(19))
    monkeypatch.undo()
    for n, m in ((19, 37), (40, 21)):
        x, by = torch.randn(n, m), torch.randn(n)
        torch.testing.assert_close(function(x, by), scaled(x, by))


def test_without_torch_compile_either(home, monkeypatch, capsys):
    remove(monkeypatch, "torch._inductor.standalone_compile")
    monkeypatch.setattr(torch, "compile", lambda *_, **__: absent)
    module, args = Gated(), given()
    expected = Gated()(*args)
    torch.testing.assert_close(fast(module)(*args), expected)
    assert "this runs uncompiled" in capsys.readouterr().err
