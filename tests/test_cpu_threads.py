"""The CPU kernels where the compiler has no OpenMP or spells its options otherwise, as Apple's."""

import ctypes
import os
import platform
import shutil
import subprocess
import time
from functools import cache

import pytest
import test_batch
import tiny
import torch

from gpt_faster.kernels.cpu import native

pytestmark = pytest.mark.kernels


def build(path, *options):
    subprocess.run([native.compiler(), *options, "-o", path, native.SOURCE], check=True, stderr=subprocess.DEVNULL)
    return ctypes.CDLL(str(path))


@pytest.fixture(scope="module")
def without_openmp(tmp_path_factory):
    path = tmp_path_factory.mktemp("threads") / "cpu_ops.so"
    return build(path, *(o for o in native.options() if o != "-fopenmp"))


@pytest.fixture(scope="module")
def with_tasks_that_descend(tmp_path_factory):
    return build(tmp_path_factory.mktemp("order") / "cpu_ops.so", *native.options(), "-DTASKS_DESCEND", "-O1")


def products(n=3):
    """-> addresses of n operations, each with the one before's output as its input, and what they need and give."""
    torch.manual_seed(0)
    xs = [torch.randn(5, 512), *(torch.empty(5, 512) for _ in range(n))]
    weights = [native.pack_weight(torch.randn(512, 512) / 22) for _ in range(n)]
    ops = [native.linear(*w, (512, 512), x=x, out=out, M=5, x_bits=32) for w, x, out in zip(weights, xs, xs[1:])]
    return [ctypes.addressof(op) for op in ops], xs[-1], (ops, xs, weights)


@pytest.mark.parametrize("n_threads", [(1,), (2,), (3,), (7,), (4, 1, 2, 6, 3, 1, 2)])
def test_threads_of_the_standard_library(without_openmp, monkeypatch, n_threads):
    addresses, out, kept = products()
    native.run(addresses, 1)
    expected = out.clone()
    monkeypatch.setattr(native, "library", lambda: without_openmp)
    for n_thread in n_threads * (200 // len(n_threads)):   # a race would show as a missing or torn task
        out.fill_(torch.nan)
        native.run(addresses, n_thread)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("name", tiny.COVER)
def test_tasks_in_any_order(ours, with_tasks_that_descend, monkeypatch, name, one_thread):
    """What a thread keeps from one task to the next must be right for any next task."""
    library = cache(lambda: with_tasks_that_descend)
    library()                                              # is_loaded()
    monkeypatch.setattr(native, "library", library)
    test_batch.test_slots_by_operations_equal_alone(ours, name, one_thread)


def test_a_fork_has_no_threads_and_does_not_wait_for_them(without_openmp, monkeypatch):
    monkeypatch.setattr(native, "library", lambda: without_openmp)
    addresses, out, kept = products()
    native.run(addresses, 3)
    expected = out.clone()
    child = os.fork()
    if child == 0:
        out.fill_(torch.nan)
        native.run(addresses, 3)
        os._exit(0 if torch.equal(out, expected) else 1)
    for _ in range(200):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        time.sleep(0.1)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("the fork waits")
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.parametrize("rejected, expected", [
    ((), ("-march=native", "-fopenmp")),
    (("-march=native",), ("-mcpu=native", "-fopenmp")),
    (("-fopenmp",), ("-march=native",)),
    (("-march=native", "-fopenmp"), ("-mcpu=native",)),
])
def test_options_are_those_that_the_compiler_takes(tmp_path, monkeypatch, rejected, expected):
    script = tmp_path / "c++"
    tests = "\n".join(f'case " $* " in *" {option} "*) exit 1;; esac' for option in rejected)
    script.write_text(f"#!/bin/sh\n{tests}\nexit 0\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    options = native.options()
    assert {o for o in options if o.startswith("-m") or o == "-fopenmp"} == set(expected)
    assert len(options) == len(native.OPTIONS) - (2 - len(expected))


def test_the_compiler_of_each_cpu(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}" if name else None)
    for machine, name in (("x86_64", "g++"), ("aarch64", "clang++"), ("arm64", "clang++")):
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        assert native.compiler() == f"/bin/{name}"
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/g++" if name == "g++" else None)
    assert native.compiler() == "/bin/g++"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert native.compiler() is None
