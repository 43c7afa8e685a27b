"""generate.py as one of several ranks, one of which is killed, stopped or slow at a moment. Run by test_faults.py.

    RANK=1 WORLD_SIZE=2 … python tests/faulty_rank.py WHO MOMENT FAULT ARGUMENTS OF generate.py
"""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gpt_faster.loading  # noqa: E402
from generate import Batch  # noqa: E402
from gpt_faster.cli.session import main  # noqa: E402
from speculate import SpeculativeBatch  # noqa: E402

MOMENTS = {"load": (gpt_faster.loading, "load_shard"), "prefill": (Batch, "_run_prompts"), "decode": (Batch, "step"),
           "speculation": (SpeculativeBatch, "_round")}


def fail(fault):
    if fault == "slow":
        time.sleep(2)                              # less than the others wait
    else:
        os.kill(os.getpid(), signal.SIGKILL if fault == "killed" else signal.SIGSTOP)


def put_fault(moment, fault):
    """The third time, or where it is called once, the first."""
    where, name = MOMENTS[moment]
    call, n = getattr(where, name), []

    def faulty(*args, **kwargs):
        n.append(1)
        if len(n) == (1 if moment in ("load", "prefill") else 3):
            fail(fault)
        return call(*args, **kwargs)
    setattr(where, name, faulty)


who, moment, fault = sys.argv[1:4]
if os.environ["RANK"] == who:
    put_fault(moment, fault)
sys.exit(main(sys.argv[4:]))
