"""Several ranks say what one says: tensor parallelism over gloo, on this machine."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
import transformers as hf

import checkpoint as checkpoints
import quantize
import tp
from files import narrow, safetensors

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
WIDE = dict(tiny.SIZE, hidden_size=128, intermediate_size=256, num_attention_heads=4, head_dim=32)


def torchrun(*argv, ranks=2, how=("--standalone",), **more):
    env = dict(os.environ, OMP_NUM_THREADS="1", TORCHDYNAMO_VERBOSE="0", **more.pop("env", {}))
    command = [*TORCHRUN, *how, f"--nproc_per_node={ranks}", *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=600, **more)


@pytest.fixture(scope="session")
def directory(families, tmp_path_factory):
    """Every family, and two whose rows have enough groups of int4 weights for four ranks."""
    path = tmp_path_factory.mktemp("families")
    for name in tiny.FAMILIES:
        (path / name).symlink_to(families(name)[0])
    for name, config in (("llama", hf.LlamaConfig(**WIDE)), ("mixtral", hf.MixtralConfig(
            **dict(WIDE, intermediate_size=128), num_local_experts=4, num_experts_per_tok=2))):
        torch.manual_seed(0)
        hf.AutoModelForCausalLM.from_config(config).save_pretrained(path / f"for-int4-{name}")
    return path


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_family(directory, ranks):
    done = torchrun("tests/ranks.py", directory, ranks=ranks)
    assert done.returncode == 0 and ", 0 failed" in done.stdout, done.stdout + done.stderr[-2000:]
