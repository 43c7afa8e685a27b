"""Functions kept on disk: the same numbers, quickly, or made anew."""

import os
import shutil

import pytest
import torch
from torch import nn

from kernels import inductor as compiled
from kernels.inductor import Compiled, Functions


class Gated(nn.Module):
    """Takes what a block takes: a tensor, a tuple of tensors, and None; writes into a buffer."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.attn = nn.Linear(32, 48), nn.Module()
        self.attn.cache = nn.Module()
        self.attn.cache.register_buffer("seen", torch.zeros(4, 48))

    def forward(self, x, pair, slot, rows=None):
        y = self.up(x) * pair[0] + pair[1]
        self.attn.cache.seen[slot] = y[:1]
        return self.attn.cache.seen.sum(0) + torch.compiler.is_compiling()


def given(n=1):
    return torch.randn(n, 32), (torch.randn(48), torch.randn(48)), torch.tensor([2]), None


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("GPT_FASTER_CACHE", str(tmp_path / "kept"))
    torch._dynamo.reset()
    with torch.no_grad():
        yield tmp_path / "kept"


def fast(module=None, about=""):
    module = module or Gated()
    module.forward = Compiled(module.forward, Functions(about), "attn.cache")
    return module


def never(*_):
    raise AssertionError("compiled again")


def folders(home):
    return sorted(p for p in home.iterdir() if p.name != "instructions")


def test_once_for_all_alike_and_for_the_next_process(home, monkeypatch):
    args, shared = given(), Functions("")
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
        torch.testing.assert_close(Compiled(module.forward, Functions(""))(x), expected)
        code = "".join(p.read_text() for p in home.rglob("*.cpp") if f"{n}L" in p.read_text())
        assert "Vectorized" in code and ("__builtin_prefetch" in code) == asked
        shutil.rmtree(home)


def test_a_function_for_any_size(home, monkeypatch):
    """Compiled for sizes of the example's kind, once, in eager() too, and again from the disk."""
    def scaled(x, by, out):
        return out.copy_(x * by[:, None, None] + torch.compiler.is_compiling())

    example = torch.empty(19, 37, 4), torch.empty(19), torch.empty(19, 37, 4)
    for _ in range(2):
        function = compiled.once(scaled, *example)
        for n, m in ((1, 2), (19, 37), (40, 1), (7, 300)):
            x, by, out = torch.randn(n, m, 4), torch.randn(n), torch.empty(n, m, 4)
            with compiled.eager(), torch.inference_mode(n == 7):
                y = function(x, by, out)
            torch.testing.assert_close(y, x * by[:, None, None] + 1)
            assert torch.equal(y, out)
        assert len(folders(home)) == 1
        monkeypatch.setattr(compiled, "_inductor", never)


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
    fast(about="another config")(*args)
    monkeypatch.setitem(compiled.OPTIONS, "cpp.enable_floating_point_contract_flag", "off")
    fast()(*args)
    monkeypatch.setattr(compiled, "sources", lambda: "other code")
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
    assert not folders(home) and not torch.compiler.is_compiling() and not compiled._eager
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
        return self.head(x) + torch.compiler.is_compiling()


def test_methods(home, monkeypatch):
    monkeypatch.setattr(Steps, "forward", never)
    made, x, shared = [], torch.randn(1, 8), Functions("")
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
