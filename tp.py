"""Tensor parallelism: every rank runs the same program on a narrower model, and they add up.

Owns the process group, which part of each tensor a rank holds, and what the ranks tell each other.
It knows no packed layout and no model class; model.py knows nothing of ranks. Alone, a process is a
rank 0 of 1, to which all of this does nothing.

    torchrun --standalone --nproc_per_node=2 generate.py --compile --checkpoint_path org/name
"""

import datetime
import os
import random
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed._symmetric_memory import enable_symm_mem_for_group

from formats.lazy import LazyTensor, made_from, narrow

# Which axis of a weight [out, in] the ranks share: the outputs of one matrix are the inputs of the
# next, so that only what a branch of a block adds must be summed. Experts are [E, out, in].
OUT, IN = -2, -1
SPLIT = {"attn.wq": OUT, "attn.wk": OUT, "attn.wv": OUT, "attn.wo": IN, "attn.softmax.sinks": OUT,
         "ffn.gate": OUT, "ffn.up": OUT, "ffn.down": IN,
         "ffn.shared.gate": OUT, "ffn.shared.up": OUT, "ffn.shared.down": IN}
KV = ("attn.wk", "attn.wv", "attn.k_norm")
VOCABULARY = {"embed": OUT, "head": OUT}           # where the ranks can share it equally
WIDE_NORMS = {"attn.q_norm": OUT, "attn.k_norm": OUT}
NAME = re.compile(r"(?:layers\.\d+\.)?(.+?)(?:\.(weight|bias|scales|zeros))?")
SHORT = 1 << 14                                    # numbers
LOST = re.compile(r"gloo|NCCL|[Cc]onnection|[Tt]imed out|[Tt]imeout|Socket")


# ---- Ranks --------------------------------------------------------------------------------------

def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def timeout() -> float:
    """Seconds that ranks wait for each other: for a slow disk, a compiler, a machine that died."""
    said = os.environ.get("GPT_FASTER_TIMEOUT", "300")
    try:
        seconds = float(said)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise ValueError(f"GPT_FASTER_TIMEOUT={said}: expected a number of seconds")
    return seconds


def local_device(name: str) -> str:
    """auto and cuda are each rank's own GPU, where there are some."""
    if world() > 1 and name in ("auto", "cuda") and torch.cuda.is_available():
        return f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    return name


def n_local() -> int:
    """Ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if world() > 1 else 1


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
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
                                store=store, rank=me, world_size=n, timeout=wait)
        patient = datetime.timedelta(days=365)     # a person may think before typing
        _control.append(dist.new_group(backend="gloo", timeout=patient))
        if os.environ.get("ENABLE_INTRA_NODE_COMM") == "1" and n_local() == n:
            # Inductor's choice for short sums then: one kernel that reads the other GPUs' memory
            torch._inductor.config._collective.auto_select = True
            enable_symm_mem_for_group(dist.group.WORLD.group_name)
        if me:
            sys.stdout = sys.stderr = _nowhere()
        if os.environ.get("OMP_NUM_THREADS") == "1":           # torchrun's default
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // n_local()))
        random.seed(0)                             # who draws an order draws the same, and
        torch.manual_seed(0)                       # random weights are alike where all have them
        try:
            status = run(argv)
        except Exception as e:
            sys.stderr = stderr if _is_first(store) else _nowhere()
            if isinstance(e, RuntimeError) and LOST.search(str(e)):
                raise ConnectionError(
                    f"rank {me} of {n} lost another one, which ended or did not answer within "
                    f"{timeout():.0f} s (GPT_FASTER_TIMEOUT)") from e
            raise
        dist.destroy_process_group()
        return status
    return started


_control = []                                      # the group of what is not about tensors


def _nowhere():
    return open(os.devnull, "w", encoding="utf-8", errors="replace")


def _is_first(store) -> bool:
    try:
        return store.add("failed", 1) == 1
    except RuntimeError:                           # it went with the first one
        return False


def from_rank_0(make: Callable):
    """What make() gives or raises on rank 0, on every rank: a file's lines, what a clock said."""
    if world() == 1:
        return make()
    said = [None, None]
    if rank() == 0:
        try:
            said = [make(), None]
        except Exception as e:
            said = [None, e]
    dist.broadcast_object_list(said, src=0, group=_control[0])
    if said[1]:
        raise said[1]
    return said[0]


def led(call: Callable, body: Callable[[Callable], None]) -> None:
    """body(call) on rank 0; the others make the same calls. Ctrl-C ends them all at once."""
    if world() == 1:
        return body(call)
    signal.signal(signal.SIGINT, signal.SIG_DFL)

    def announced(*args):
        from_rank_0(lambda: args)
        return call(*args)

    if rank() == 0:
        body(announced)
        from_rank_0(lambda: None)
    else:
        while args := from_rank_0(None):
            call(*args)


def agreed(step: Callable) -> Callable:
    """The step with rank 0's result on every rank, so that all go the same way."""
    if world() == 1:
        return step

    def run(*args):
        result = step(*args)
        for t in [result] if isinstance(result, Tensor) else result:
            if t is not None:
                dist.broadcast(t, 0)
        return result
    return run


# ---- What a rank holds --------------------------------------------------------------------------

def narrowed(cfg, n: int):
    """The config of one of n ranks. ValueError where heads or widths cannot be shared by so many.

    Key/value heads fewer than ranks are held by several; a vocabulary that cannot be shared, by
    all.
    """
    N, K = cfg.n_head, cfg.n_kv_head
    widths = {"feed-forward width": cfg.ffn_dim * (not all(cfg.sparse)),
              "experts' width": cfg.expert_dim, "shared expert's width": cfg.shared_dim}

    def fits(n):
        return N % n == 0 and (K % n == 0 or n % K == 0) and not any(
            width % n for width in widths.values())

    if not fits(n):
        stated = ", ".join(f"{what} of {width}" for what, width in widths.items() if width)
        could = ", ".join(str(m) for m in range(2, N + 1) if fits(m)) or "no number above 1"
        raise ValueError(f"{n} ranks cannot share {N} query heads, {K} key/value heads and a "
                         f"{stated}: possible are {could}")
    vocabulary = cfg.vocab_size // (1 if cfg.vocab_size % n else n)
    return replace(cfg, n_head=N // n, n_kv_head=max(1, K // n), ffn_dim=cfg.ffn_dim // n,
                   expert_dim=cfg.expert_dim // n, shared_dim=cfg.shared_dim // n,
                   vocab_size=vocabulary)


def shard(source, n: int | None = None, me: int | None = None):
    """The checkpoint of rank `me` of n (default: this one), nothing large read yet.

    ValueError as narrowed(), and where a group of int4 weights would be cut.
    """
    n, me = n or world(), rank() if me is None else me
    if n == 1:
        return source
    try:
        cfg, split = narrowed(source.cfg, n), dict(SPLIT)
    except ValueError as e:
        raise ValueError(f"{source.path.name}: {e}") from None
    if cfg.vocab_size < source.cfg.vocab_size:
        split |= VOCABULARY
    if cfg.qk_norm == "wide":
        split |= WIDE_NORMS
    tensors = {}
    for name, t in source.tensors.items():
        x, leaf = NAME.fullmatch(name).groups()
        if x in split:
            parts = min(n, source.cfg.n_kv_head) if x in KV else n
            weight = source.tensors.get(f"{name.removesuffix(leaf or '')}weight", t)
            t = _part(t, leaf, split[x], len(weight.shape) > 2, parts, me * parts // n)
        tensors[name] = t
    return replace(source, cfg=cfg, tensors=tensors)


def _part(t: LazyTensor, leaf: str, axis: int, experts: bool, n: int, i: int) -> LazyTensor:
    """The i-th of n parts of a weight, or of what belongs to it."""
    axis = experts + (axis == IN)                  # of a weight [(E,) out, in], a bias [(E,) out]
    if axis >= len(t.shape):
        if leaf == "bias" and i:                   # is added once
            return made_from(t, lambda a, b: torch.zeros_like(t.read_rows(a, b)))
        return t                                   # a scale serves its whole row
    if t.shape[axis] % n:
        raise ValueError(f"{t.name}: {n} ranks cannot share its {t.shape[axis]} groups of "
                         "weights: use int8, or int4 with a smaller --groupsize")
    size = t.shape[axis] // n
    return narrow(t, axis, i * size, (i + 1) * size)


# ---- What the ranks add up ----------------------------------------------------------------------

def all_gather(x: Tensor) -> Tensor:
    """Every rank's x, in the order of the ranks -> [n, *x.shape]"""
    gather = torch.ops._c10d_functional.all_gather_into_tensor     # its Python name changes often
    every = functional.wait_tensor(gather(x.contiguous(), world(), dist.group.WORLD.group_name))
    return every.view(world(), *x.shape)


def all_reduce(x: Tensor) -> Tensor:
    """The sum of every rank's x. A short one on a CPU is gathered: gloo takes half as long."""
    if x.device.type == "cpu" and x.numel() <= SHORT:
        return all_gather(x).float().sum(0).to(x.dtype)
    return functional.wait_tensor(functional.all_reduce(x, "sum", dist.group.WORLD))


class SplitEmbedding(nn.Module):
    """Each rank looks its own tokens up, and has zeros for the others."""

    def __init__(self, embed: nn.Module, n: int, me: int):
        super().__init__()
        self.embed, self.n, self.first = embed, n, me * n

    @property
    def weight(self):
        return self.embed.weight

    def forward(self, ids):
        ids = ids - self.first
        mine = (ids >= 0) & (ids < self.n)
        return all_reduce(torch.where(mine[..., None], self.embed(ids.clamp(0, self.n - 1)), 0))


def join(model: nn.Module, vocab_size: int) -> nn.Module:
    """Make a model of shard()'s weights one of several, which together have so many tokens."""
    if world() == 1:
        return model

    def add_up(module, args, y):
        return all_reduce(y)

    def side_by_side(module, args, y):
        return torch.cat(all_gather(y).unbind(), dim=-1)

    def mean_of_all(h):
        return all_reduce(h.square().mean(-1, keepdim=True)) / world()

    for layer in model.layers:
        layer.attn.register_forward_hook(add_up)
        layer.ffn.register_forward_hook(add_up)
        if model.cfg.qk_norm == "wide":
            layer.attn.q_norm.mean_square = layer.attn.k_norm.mean_square = mean_of_all
    if model.cfg.vocab_size < vocab_size:
        model.embed = SplitEmbedding(model.embed, model.cfg.vocab_size, rank())
        model.head.register_forward_hook(side_by_side)
    model.cfg = replace(model.cfg, vocab_size=vocab_size)
    return model


def sent_bytes(cfg, dtype: torch.dtype) -> int:
    """What each rank's results for one token take, cfg being the whole model's: two vectors a
    layer, one of the embedding, its part of the logits; how often they are sent is the library's.
    """
    shares = cfg.vocab_size % world() == 0
    numbers = (2 * cfg.n_layer + shares) * cfg.dim + shares * cfg.vocab_size // world()
    wide = 2 * cfg.n_layer * (cfg.qk_norm == "wide")
    return (numbers * dtype.itemsize + 4 * wide) * (world() > 1)
