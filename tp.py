"""Tensor parallelism: each rank runs a narrower model, with two all-reduces per layer.

Owns which part of each tensor a rank holds, and where results are summed or concatenated across
ranks. Knows no packed layout and no model class; model.py knows nothing of ranks. With one process
everything here is a no-op.

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
from model import MoEConfig, layer_config, of_layer

# The axis along which a weight [out, in] is split. The split outputs of one matrix are the split
# inputs of the next, so each branch of a block needs one sum. Experts are [E, out, in].
OUT, IN = -2, -1
SPLIT = {"attn.wq": OUT, "attn.wk": OUT, "attn.wv": OUT, "attn.wo": IN,
         "ffn.gate": OUT, "ffn.up": OUT, "ffn.down": IN}
KV = ("attn.wk", "attn.wv", "attn.k_norm")
VOCABULARY = {"embed": OUT, "head": OUT}           # if its size is divisible
SHORT = 1 << 14                                    # elements
NAME = re.compile(r"(?:layers\.\d+\.)?(.+?)(?:\.(weight|bias|scales|zeros))?")


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def n_local() -> int:
    """Number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if world() > 1 else 1


def start(**group) -> None:
    """Join the process group if torchrun started this process. Only rank 0 keeps its output.

    group: arguments of init_process_group; by default it reads torchrun's environment.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", **group)
    for stream in (sys.stdout, sys.stderr):        # torchrun starts python -u, which writes a line
        if hasattr(stream, "reconfigure"):         # in two parts: lines of ranks would mix
            stream.reconfigure(line_buffering=True, write_through=False)
    if rank():
        sys.stdout = sys.stderr = nowhere()
    if os.environ.get("OMP_NUM_THREADS") == "1":   # torchrun's default
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // n_local()))
    random.seed(0)                                 # the same random order on all ranks, and
    torch.manual_seed(0)                           # the same random weights where not split


def end() -> None:
    """Leave the process group; else its threads may abort the process at exit."""
    if dist.is_initialized():
        dist.destroy_process_group()


def nowhere():
    return open(os.devnull, "w", encoding="utf-8", errors="replace")


def local_device(name: str) -> str:
    """On several ranks with GPUs, auto and cuda mean the GPU of LOCAL_RANK."""
    if world() > 1 and name in ("auto", "cuda") and torch.cuda.is_available():
        return f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    return name


# ---- Sharding -----------------------------------------------------------------------------------

def shard_config(cfg, n: int):
    """The config of one of n ranks. ValueError if heads or widths are not divisible.

    With fewer KV heads than ranks, several ranks hold the same head. A vocabulary that is not
    divisible is replicated.
    """
    if not divides(cfg, n):
        widths = ", ".join(f"{name} of {width}" for name, width in sharded_widths(cfg).items())
        possible = [str(m) for m in range(2, cfg.n_head + 1) if divides(cfg, m)]
        raise ValueError(
            f"{cfg.n_head} query heads, {cfg.n_kv_head} key/value heads and a {widths} cannot be "
            f"split across {n} ranks; possible: {', '.join(possible) or 'only 1'}")
    n_vocab = cfg.vocab_size
    return replace(cfg, n_head=cfg.n_head // n, n_kv_head=max(1, cfg.n_kv_head // n),
                   ffn_dim=cfg.ffn_dim // n, moe=cfg.moe and shard_moe(cfg.moe, n),
                   **{name: part and part.shard(n) for name, part in parts_in_place(cfg).items()},
                   mixer=tuple(m and m.shard(n) for m in cfg.mixer),
                   vocab_size=n_vocab if n_vocab % n else n_vocab // n)


def shard_moe(moe, n: int):
    """Each rank has a slice of every expert."""
    if type(moe) is MoEConfig:
        return replace(moe, expert_dim=moe.expert_dim // n)
    return moe.shard(n)


def parts_in_place(cfg) -> dict[str, object]:
    """The config's objects that replace modules of model.py, by field; None: not replaced."""
    return {name: getattr(cfg, name) for name in ("attention", "ffn", "block")}


def split_of(cfg) -> dict[str, int]:
    """Names of modules in a layer -> the axis along which their weights are split."""
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
    """The checkpoint of rank `me` of n (default: this rank). Reads no weights yet.

    ValueError as in shard_config(), and if a quantization group would be split.
    """
    n = n or world()
    me = rank() if me is None else me
    if n == 1:
        return source
    try:
        cfg = shard_config(source.cfg, n)
    except ValueError as e:
        raise ValueError(f"{source.path.name}: {e}") from None
    split = split_of(source.cfg)
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
    """Slice i of n along an axis of a weight, or of its bias, scales or zeros."""
    if axis >= len(t.shape):                       # no input axis: every rank keeps all of it
        if leaf == "bias" and i > 0:               # a bias is added once, by rank 0
            return t.derived(lambda a, b: torch.zeros_like(t.read_rows(a, b)))
        return t
    if t.shape[axis] % n and t.scheme:
        raise ValueError(f"{t.name}: its blocks of {t.scheme.groupsize} inputs cannot be split "
                         f"across {n} ranks: use --quantize int8")
    if t.shape[axis] % n:
        raise ValueError(f"{t.name}: its {t.shape[axis]} quantization groups cannot be split "
                         f"across {n} ranks: use int8, or int4 with a smaller --groupsize")
    size = t.shape[axis] // n
    return narrow(t, axis, i * size, (i + 1) * size)


# ---- Collectives: torch.compile traces them all except dist.broadcast ---------------------------

def all_reduce(x: Tensor) -> Tensor:
    """The sum of x over ranks. Short tensors on a CPU are gathered: half the time with gloo."""
    if x.device.type == "cpu" and x.numel() <= SHORT:
        return all_gather(x).float().sum(0).to(x.dtype)
    total = x.clone()
    dist.all_reduce(total)
    return total


def all_gather(x: Tensor) -> Tensor:
    """x of every rank, in rank order -> [n, *x.shape]"""
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(world())]
    dist.all_gather(parts, x)
    return torch.stack(parts)


def broadcast(x: Tensor) -> Tensor:
    """Rank 0's tensor on every rank, so that all ranks take the same branches."""
    if world() == 1:
        return x
    if torch.compiler.is_compiling():              # dist.broadcast cannot be traced
        mine = x.clone() if rank() == 0 else torch.zeros_like(x)
        dist.all_reduce(mine)
        return mine
    theirs = x.clone()
    dist.broadcast(theirs, 0)
    return theirs


def join(y: Tensor) -> Tensor:
    """Concatenate the last axis of all ranks: the logits of a split vocabulary."""
    return torch.cat(all_gather(y).unbind(), dim=-1)


# These replace the forward of a module whose weights are split. Hooks on the module, its class's
# forward and its submodules stay the user's; hooks see the result over all ranks.

def summed(module, *args) -> Tensor:
    return all_reduce(type(module).forward(module, *args))


def joined(module, *args) -> Tensor:
    return join(type(module).forward(module, *args))


OF_ALL = {summed: all_reduce, joined: join}


def share(module: nn.Module, forward: Callable) -> None:
    """Sum or concatenate the module's output across ranks; forward: summed or joined."""
    module.forward = MethodType(forward, module)


def shared_by(module: nn.Module) -> Callable | None:
    """summed or joined; None: the output is not combined across ranks."""
    forward = getattr(vars(module).get("forward"), "__func__", None)
    return forward if forward in OF_ALL else None


def of_all(module: nn.Module, y: Tensor) -> Tensor:
    """For a kernel that replaces the module: combine this rank's output y across ranks."""
    forward = shared_by(module)
    return y if forward is None else OF_ALL[forward](y)


def check_shared(layers: nn.ModuleList) -> None:
    """ValueError if a replaced module of a layer would not be summed across ranks."""
    for i, layer in enumerate(layers):
        for name in ("attn", "ffn"):
            part = getattr(layer, name)
            if not (shared_by(part) or any(map(shared_by, part.modules()))):
                raise ValueError(f"layers.{i}.{name} or its forward was replaced, so its output is "
                                 "not summed across ranks: use tp.share(module, tp.summed)")


class RankEmbedding(nn.Module):
    """Each rank looks up its own tokens and has zeros for the others. Also checks the layers, since
    every call of the model begins here.

    n: tokens per rank; None: every rank has the whole vocabulary.
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
    """Connect a model with shard()'s weights to the other ranks. vocab_size: of the whole model."""
    if world() == 1:
        return model

    def mean_over_ranks(h):
        return all_reduce(h.square().mean(-1, keepdim=True)) / world()

    for i, layer in enumerate(model.layers):
        for branch in (layer.attn, layer.ffn):
            share(getattr(branch, "summed", branch), summed)
        part = of_layer(i, model.cfg.mixer) or model.cfg.attention
        for name in part.norms_over_heads if part else ():
            layer.attn.get_submodule(name).mean_square = mean_over_ranks
    n = model.cfg.vocab_size
    if n < vocab_size:
        share(model.head, joined)
    model.embed = RankEmbedding(model.embed, model.layers, n if n < vocab_size else None, rank())
    model.cfg = replace(model.cfg, vocab_size=vocab_size)
    return model
