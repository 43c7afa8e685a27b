"""Makes the processes that torchrun starts behave as one program.

Owns their timeouts, error reporting and the exchange of Python objects; tp.py starts the process
group. With one process everything here is a no-op.

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
from model import of_layer
from tp import n_local, nowhere, rank, shard_config, world

CONNECTION_LOST = re.compile(r"gloo|NCCL|[Cc]onnection|[Tt]imed out|[Tt]imeout|Socket")
STORE_TIMEOUT = 5.0                                # seconds
_control = {}                                      # patient -> process group for Python objects


def timeout() -> float:
    """Seconds that ranks wait for each other: covers slow disks and compilation."""
    text = os.environ.get("GPT_FASTER_TIMEOUT", "300")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise ValueError(f"GPT_FASTER_TIMEOUT={text}: expected a number of seconds")
    return seconds


def as_rank(run: Callable) -> Callable:
    """Wrap run(argv) -> exit status so that it runs as a rank if torchrun started the process.

    Only rank 0 writes to stdout and stderr. Only the first rank that fails reports its error: the
    others fail as a consequence.
    """
    def run_rank(argv):
        if int(os.environ.get("WORLD_SIZE", 1)) == 1:
            return run(argv)
        stderr, wait = sys.stderr, datetime.timedelta(seconds=timeout())
        store, this_rank, n = next(dist.rendezvous("env://", timeout=wait))
        tp.start(store=store, rank=this_rank, world_size=n, timeout=wait)
        _control[False] = dist.new_group(backend="gloo", timeout=wait)
        unlimited = datetime.timedelta(days=365)   # waits for a user's input have no limit
        _control[True] = dist.new_group(backend="gloo", timeout=unlimited)
        if os.environ.get("ENABLE_INTRA_NODE_COMM") == "1" and n_local() == n:
            use_symmetric_memory()
        try:
            status = run(argv)
        except Exception as e:
            is_lost = isinstance(e, RuntimeError) and CONNECTION_LOST.search(str(e))
            sys.stderr = stderr if _is_first_failure(store, bool(is_lost)) else nowhere()
            if is_lost:
                atexit.register(_exit_without_cleanup)
                raise ConnectionError(
                    f"rank {this_rank} of {n} lost another one, which ended or did not answer "
                    f"within {timeout():.0f} s (GPT_FASTER_TIMEOUT)") from e
            tp.end()
            raise
        tp.end()
        return status
    return run_rank


def _exit_without_cleanup() -> None:
    """Exit without the library's cleanup, which aborts after a broken connection."""
    sys.stdout.flush()
    os._exit(2)


def _is_first_failure(store, default: bool) -> bool:
    """Whether this rank failed first. default: the result if the store, which is in rank 0's
    process, does not answer."""
    counts = []

    def count():
        with suppress(RuntimeError):
            counts.append(store.add("failed", 1))
    thread = threading.Thread(target=count, daemon=True)
    thread.start()
    thread.join(STORE_TIMEOUT)
    return counts == [1] if counts else default


def from_rank_0(make: Callable, patient: bool = False):
    """Run make() on rank 0 and return its result, or raise its exception, on every rank.

    patient: no timeout.
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
    """Run body(call) on rank 0; the other ranks repeat each call. Ctrl-C ends all at once."""
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
    """Bytes per token that each rank contributes to all-reduces and gathers: two vectors a layer,
    one of the embedding, its part of the logits. How often each byte is sent is up to the library.

    cfg: the unsharded model's.
    """
    if world() == 1:
        return 0
    n = 2 * cfg.n_layer * cfg.dim
    if cfg.vocab_size % world() == 0:
        n += cfg.dim + cfg.vocab_size // world()
    mine = shard_config(cfg, world())
    parts = [of_layer(i, mine.mixer) or mine.attention for i in range(mine.n_layer)]
    norms = sum(len(part.norms_over_heads) for part in parts if part)
    return n * dtype.itemsize + norms * torch.float32.itemsize
