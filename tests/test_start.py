"""Importing torch as the command does: what waits is there as soon as somebody asks for it."""

import subprocess
import sys

from tests.conftest import ROOT

BEGIN = """
import sys
from gpt_faster.cli.fast_start import REGISTERING, UNUSED, import_torch
import_torch()
import torch
def waiting(parts):
    return [part for part in parts if "__getattr__" in vars(sys.modules.get(f"torch.{part}", sys))]
"""


def run(code):
    done = subprocess.run([sys.executable, "-c", BEGIN + code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_parts_of_torch_wait():
    assert len(run("print(*waiting(UNUSED + REGISTERING))")) > 5                 # none: import_torch() does nothing any more


def test_parts_that_waited_work():
    run("""
w = torch.zeros(2, requires_grad=True)
torch.optim.SGD([w], lr=1.0).zero_grad()
assert torch.distributions.Normal(0.0, 1.0).sample().shape == ()
assert len(torch.utils.data.TensorDataset(w)) == 2
from torch.optim.lr_scheduler import StepLR
assert torch.Generator().manual_seed(3).initial_seed() == 3
assert torch.nn.Linear(2, 3, device="meta")(torch.empty(1, 2, device="meta")).shape == (1, 3)
assert not hasattr(torch.optim, "__nothing__")
""")


def test_a_compiler_finds_what_registers():
    """A product of shapes alone needs torch's Python kernels for tensors without memory."""
    run("""
@torch.compile(backend="aot_eager", fullgraph=True)
def f(x):
    return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).cumsum(-1)
x = torch.randn(1, 2, 5, 8)
torch.testing.assert_close(f(x), torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).cumsum(-1))
assert not waiting(REGISTERING)
""")
