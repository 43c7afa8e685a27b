"""Tensor parallelism: each rank runs a narrower model, with two all-reduces per layer.

Owns which part of each tensor a rank holds, and where the ranks' results are summed or joined. It
knows no packed layout and no model class; model.py knows nothing of ranks. With one process all of
this does nothing.

    start()                                        # once, before anything is loaded
    model = parallelize(load_model(shard(source), dtype, device), source.cfg.vocab_size)

    torchrun --standalone --nproc_per_node=2 generate.py --compile --checkpoint_path org/name
"""

import os
import random
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from types import MethodType

import torch
import torch.distributed as dist
from torch import Tensor, nn

from checkpoint import LazyTensor, layer_of, narrow
from model import MoEConfig, layer_config

# Which axis of a weight [out, in] the ranks share: the outputs of one matrix are the inputs of the
# next, so that only what a branch of a block adds must be summed. Experts are [E, out, in].
OUT, IN = -2, -1
SPLIT = {"attn.wq": OUT, "attn.wk": OUT, "attn.wv": OUT, "attn.wo": IN,
         "ffn.gate": OUT, "ffn.up": OUT, "ffn.down": IN}
KV = ("attn.wk", "attn.wv", "attn.k_norm")
VOCABULARY = {"embed": OUT, "head": OUT}           # where the ranks can share it equally
SHORT = 1 << 14                                    # numbers
NAME = re.compile(r"(?:layers\.\d+\.)?(.+?)(?:\.(weight|bias|scales|zeros))?")


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def n_local() -> int:
    """Ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if world() > 1 else 1


def start(**group) -> None:
    """Join the processes that torchrun started, if it did; rank 0 alone writes to the terminal.

    group: arguments of init_process_group; by default the environment has what it needs.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", **group)
    for stream in (sys.stdout, sys.stderr):        # under torchrun's python -u a line would be two
        if hasattr(stream, "reconfigure"):         # writes, with another rank's between them
            stream.reconfigure(line_buffering=True, write_through=False)
    if rank():
        sys.stdout = sys.stderr = nowhere()
    if os.environ.get("OMP_NUM_THREADS") == "1":   # torchrun's default
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // n_local()))
    random.seed(0)                                 # who draws an order draws the same, and
    torch.manual_seed(0)                           # random weights are alike where all have them


def end() -> None:
    """Leave the other ranks: a process whose threads still listen to them may abort at its end."""
    if dist.is_initialized():
        dist.destroy_process_group()


def nowhere():
    return open(os.devnull, "w", encoding="utf-8", errors="replace")


def local_device(name: str) -> str:
    """auto and cuda are each rank's own GPU, where there are some."""
    if world() > 1 and name in ("auto", "cuda") and torch.cuda.is_available():
        return f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    return name


# ---- What a rank holds --------------------------------------------------------------------------

def shard_config(cfg, n: int):
    """The config of one of n ranks. ValueError where heads or widths cannot be shared by n.

    Key/value heads fewer than ranks are held by several; a vocabulary that cannot be shared, by
    all.
    """
    if not divides(cfg, n):
        widths = ", ".join(f"{name} of {width}" for name, width in sharded_widths(cfg).items())
        possible = [str(m) for m in range(2, cfg.n_head + 1) if divides(cfg, m)]
        raise ValueError(
            f"{n} ranks cannot share {cfg.n_head} query heads, {cfg.n_kv_head} key/value heads "
            f"and a {widths}: possible are {', '.join(possible) or 'no number above 1'}")
    n_vocab = cfg.vocab_size
    return replace(cfg, n_head=cfg.n_head // n, n_kv_head=max(1, cfg.n_kv_head // n),
                   ffn_dim=cfg.ffn_dim // n, moe=cfg.moe and shard_moe(cfg.moe, n),
                   **{name: part and part.shard(n) for name, part in parts_in_place(cfg).items()},
                   mixer=tuple(m and m.shard(n) for m in cfg.mixer),
                   vocab_size=n_vocab if n_vocab % n else n_vocab // n)


def shard_moe(moe, n: int):
    """Each rank has a part of every expert."""
    if type(moe) is MoEConfig:
        return replace(moe, expert_dim=moe.expert_dim // n)
    return moe.shard(n)


def parts_in_place(cfg) -> dict[str, object]:
    """The objects of a config that make parts of a layer in place of model.py's; None: its own."""
    return {name: getattr(cfg, name) for name in ("attention", "ffn", "block")}


def split_of(cfg) -> dict[str, int]:
    """Names of tensors in a layer -> the axis that the ranks share: model.py's, then the parts'."""
    split = dict(SPLIT)
    for part in filter(None, (cfg.attention, *cfg.mixer)):
        split |= {f"attn.{name}": axis for name, axis in part.split.items()}
    for part in (cfg.ffn, cfg.moe):
        if part and type(part) is not MoEConfig:
            split |= {f"ffn.{name}": axis for name, axis in part.split.items()}
    return split


def sharded_widths(cfg) -> dict[str, int]:
    widths = {} if all(cfg.sparse) else {"feed-forward width": cfg.ffn_dim}
    if type(cfg.moe) is MoEConfig:
        widths["experts' width"] = cfg.moe.expert_dim
    elif cfg.moe:
        widths |= cfg.moe.sharded_widths()
    for part in filter(None, (*cfg.mixer, *parts_in_place(cfg).values())):
        widths |= part.sharded_widths()
    return {name: width for name, width in widths.items() if width}


def divides(cfg, n: int) -> bool:
    n_kvs = {layer_config(cfg, i).n_kv_head for i in range(cfg.n_layer)}
    heads = cfg.n_head % n == 0 and all(k % n == 0 or n % k == 0 for k in n_kvs)
    return heads and not any(width % n for width in sharded_widths(cfg).values())


def shard(source, n: int | None = None, me: int | None = None):
    """The checkpoint of rank `me` of n (default: this one), nothing large read yet.

    ValueError as shard_config(), and where a group of quantized weights would be cut.
    """
    n = n or world()
    me = rank() if me is None else me
    if n == 1:
        return source
    try:
        cfg = shard_config(source.cfg, n)
    except ValueError as e:
        raise ValueError(f"{source.path.name}: {e}") from None
    split = split_of(cfg)
    if cfg.vocab_size < source.cfg.vocab_size:
        split |= VOCABULARY
    tensors = dict(source.tensors)
    for name, t in source.tensors.items():
        module, leaf = NAME.fullmatch(name).groups()
        if module not in split:
            continue
        n_kv = layer_config(source.cfg, layer_of(name)).n_kv_head
        n_part = min(n, n_kv) if module in KV else n
        weight = source.tensors.get(f"{name.removesuffix(leaf or '')}weight", t)
        axis = split[module] + 2 + (len(weight.shape) > 2)     # from the left; experts are first
        tensors[name] = shard_tensor(t, leaf, axis, n_part, me * n_part // n)
    return replace(source, cfg=cfg, tensors=tensors)


def shard_tensor(t: LazyTensor, leaf: str, axis: int, n: int, i: int) -> LazyTensor:
    """The i-th of n parts along an axis of a weight, or of what belongs to it."""
    if axis >= len(t.shape):                       # one for all inputs
        if leaf == "bias" and i > 0:               # which is added once
            return t.derived(lambda a, b: torch.zeros_like(t.read_rows(a, b)))
        return t
    if t.shape[axis] % n:
        raise ValueError(f"{t.name}: {n} ranks cannot share its {t.shape[axis]} groups of "
                         "weights: use int8, or int4 with a smaller --groupsize")
    size = t.shape[axis] // n
    return narrow(t, axis, i * size, (i + 1) * size)


# ---- What the ranks sum and join: torch.compile traces these, but for a plain broadcast ---------

def all_reduce(x: Tensor) -> Tensor:
    """The sum of every rank's x. A short one on a CPU is gathered: gloo takes half as long."""
    if x.device.type == "cpu" and x.numel() <= SHORT:
        return all_gather(x).float().sum(0).to(x.dtype)
    total = x.clone()
    dist.all_reduce(total)
    return total


def all_gather(x: Tensor) -> Tensor:
    """Every rank's x, in the order of the ranks -> [n, *x.shape]"""
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(world())]
    dist.all_gather(parts, x)
    return torch.stack(parts)


def broadcast(x: Tensor) -> Tensor:
    """Rank 0's tensor on every rank, so that all go the same way."""
    if world() == 1:
        return x
    if torch.compiler.is_compiling():              # it traces all_reduce, and no broadcast
        mine = x.clone() if rank() == 0 else torch.zeros_like(x)
        dist.all_reduce(mine)
        return mine
    theirs = x.clone()
    dist.broadcast(theirs, 0)
    return theirs


def join(y: Tensor) -> Tensor:
    """Every rank's last axis, one after another: of a head whose vocabulary they share."""
    return torch.cat(all_gather(y).unbind(), dim=-1)


# What stands in place of the forward of a module that the ranks share, so that its hooks, its
# class's forward and its parts are whoever's: they see what all ranks give.

def summed(module, *args) -> Tensor:
    return all_reduce(type(module).forward(module, *args))


def joined(module, *args) -> Tensor:
    return join(type(module).forward(module, *args))


OF_ALL = {summed: all_reduce, joined: join}


def share(module: nn.Module, forward: Callable) -> None:
    """forward: summed or joined."""
    module.forward = MethodType(forward, module)


def shared_by(module: nn.Module) -> Callable | None:
    """summed or joined; None: each rank's own result counts."""
    forward = getattr(vars(module).get("forward"), "__func__", None)
    return forward if forward in OF_ALL else None


def of_all(module: nn.Module, y: Tensor) -> Tensor:
    """For a kernel in the module's place: what all ranks give, where this one gives y."""
    forward = shared_by(module)
    return y if forward is None else OF_ALL[forward](y)


def check_shared(layers: nn.ModuleList) -> None:
    """ValueError where an exchanged part of a layer would give this rank's result alone."""
    for i, layer in enumerate(layers):
        for name in ("attn", "ffn"):
            part = getattr(layer, name)
            if not (shared_by(part) or any(map(shared_by, part.modules()))):
                raise ValueError(f"layers.{i}.{name} or its forward was exchanged: nothing sums "
                                 "what the ranks give; use tp.share(module, tp.summed)")


class RankEmbedding(nn.Module):
    """Each rank looks its own tokens up, and has zeros for the others. Each call begins here, where
    the layers are looked at.

    n: tokens of a rank; None: each has all of them.
    """

    def __init__(self, embed: nn.Module, layers: nn.ModuleList, n: int | None, me: int):
        super().__init__()
        self.embed, self.layers, self.n, self.first = embed, [layers], n, me * (n or 0)

    @property
    def weight(self):
        return self.embed.weight

    def forward(self, ids):
        if not torch.compiler.is_compiling():
            check_shared(*self.layers)
        if self.n is None:
            return self.embed(ids)
        ids = ids - self.first
        mine = (ids >= 0) & (ids < self.n)
        x = self.embed(ids.clamp(0, self.n - 1))
        return all_reduce(torch.where(mine[..., None], x, 0))


def parallelize(model: nn.Module, vocab_size: int) -> nn.Module:
    """Make a model of shard()'s weights one of several, which together have vocab_size tokens."""
    if world() == 1:
        return model

    def mean_over_ranks(h):
        return all_reduce(h.square().mean(-1, keepdim=True)) / world()

    for layer in model.layers:
        share(layer.attn, summed)
        share(getattr(layer.ffn, "summed", layer.ffn), summed)
        for name in model.cfg.attention.norms_over_heads if model.cfg.attention else ():
            getattr(layer.attn, name).mean_square = mean_over_ranks
    n = model.cfg.vocab_size
    if n < vocab_size:
        share(model.head, joined)
    model.embed = RankEmbedding(model.embed, model.layers, n if n < vocab_size else None, rank())
    model.cfg = replace(model.cfg, vocab_size=vocab_size)
    return model
