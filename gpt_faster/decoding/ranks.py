"""The processes that torchrun starts: as one program to whoever looks at it.

Owns how long they wait, what becomes of their errors, and what ranks tell each other beside
tensors; tp.py starts them. Alone, a process is rank 0 of 1, to which all of this does nothing.

    sys.exit(guarded(as_rank(run)))
"""

import atexit
import datetime
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

import torch
import torch.distributed as dist

import tp
from gpt_faster.kernels.torch_internals import use_symmetric_memory
from tp import n_local, nowhere, rank, world

CONNECTION_LOST = re.compile(r"gloo|NCCL|[Cc]onnection|[Tt]imed out|[Tt]imeout|Socket")
STORE_ANSWERS = 5.0                                # seconds, at the latest
_control = {}                                      # by patience: groups for what is no tensor


def timeout() -> float:
    """Seconds that ranks wait for each other: for a slow disk, a compiler, a machine that died."""
    text = os.environ.get("GPT_FASTER_TIMEOUT", "300")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise ValueError(f"GPT_FASTER_TIMEOUT={text}: expected a number of seconds")
    return seconds


def as_rank(run: Callable) -> Callable:
    """run(argv) -> exit status, in each process that torchrun started; else as it is.

    Rank 0 alone writes to stdout and stderr. Of what goes wrong only the first rank to notice
    speaks: the others follow from it.
    """
    def started(argv):
        if int(os.environ.get("WORLD_SIZE", 1)) == 1:
            return run(argv)
        stderr, wait = sys.stderr, datetime.timedelta(seconds=timeout())
        store, me, n = next(dist.rendezvous("env://", timeout=wait))
        tp.start(store=store, rank=me, world_size=n, timeout=wait)
        _control[False] = dist.new_group(backend="gloo", timeout=wait)
        ever = datetime.timedelta(days=365)        # a person may think before typing
        _control[True] = dist.new_group(backend="gloo", timeout=ever)
        if os.environ.get("ENABLE_INTRA_NODE_COMM") == "1" and n_local() == n:
            use_symmetric_memory()
        try:
            status = run(argv)
        except Exception as e:
            lost = isinstance(e, RuntimeError) and CONNECTION_LOST.search(str(e))
            sys.stderr = stderr if _is_first(store, bool(lost)) else nowhere()
            if lost:
                atexit.register(_leave)
                raise ConnectionError(
                    f"rank {me} of {n} lost another one, which ended or did not answer within "
                    f"{timeout():.0f} s (GPT_FASTER_TIMEOUT)") from e
            tp.end()
            raise
        tp.end()
        return status
    return started


def _leave() -> None:
    """End without the library's own clearing up, which aborts where a connection broke in it."""
    sys.stdout.flush()
    os._exit(2)


def _is_first(store, lost: bool) -> bool:
    """lost: what holds where the store does not answer, since rank 0, which has it, is killed or
    stopped."""
    counts = []

    def count():
        with suppress(RuntimeError):
            counts.append(store.add("failed", 1))
    thread = threading.Thread(target=count, daemon=True)
    thread.start()
    thread.join(STORE_ANSWERS)
    return counts == [1] if counts else lost


def from_rank_0(make: Callable, patient: bool = False):
    """What make() returns or raises on rank 0, on every rank: a file's lines, a measured time.

    patient: wait for it without end.
    """
    if world() == 1:
        return make()
    outcome = [None, None]
    if rank() == 0:
        try:
            outcome = [make(), None]
        except Exception as e:
            outcome = [None, e]
    dist.broadcast_object_list(outcome, src=0, group=_control[patient])
    result, error = outcome
    if error:
        raise error
    return result


def run_on_rank_0(call: Callable, body: Callable[[Callable], None]) -> None:
    """body(call) on rank 0; the others make the same calls. Ctrl-C ends them all at once."""
    if world() == 1:
        return body(call)
    signal.signal(signal.SIGINT, signal.SIG_DFL)

    def call_everywhere(*args):
        from_rank_0(lambda: args, patient=True)
        return call(*args)

    if rank() == 0:
        body(call_everywhere)
        from_rank_0(lambda: None, patient=True)
    else:
        while args := from_rank_0(None, patient=True):
            call(*args)


def sent_bytes(cfg, dtype: torch.dtype) -> int:
    """What each rank's results for one token take, cfg being the whole model's: two vectors a
    layer, one of the embedding, its part of the logits; how often they are sent is the library's.
    """
    if world() == 1:
        return 0
    n = 2 * cfg.n_layer * cfg.dim
    if cfg.vocab_size % world() == 0:
        n += cfg.dim + cfg.vocab_size // world()
    norms = cfg.n_layer * len(cfg.attention.norms_over_heads) if cfg.attention else 0
    return n * dtype.itemsize + norms * torch.float32.itemsize
