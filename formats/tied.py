"""Tied or not: is the output layer the embedding? The tensors decide, not the config.

Decided once for a checkpoint, after an adapter was merged and before weights are quantized, shared
by ranks or written. A config that says otherwise costs one line on stderr. Reads no config.json:

    tensors, head = apart(raw.tensors, raw.names, raw.cfg)     # before an adapter is merged
    cfg = settle(path, cfg, tensors)                           # after it
"""

import math
import sys
from dataclasses import replace
from pathlib import Path

import torch

from checkpoint import CHUNK, LazyTensor, made_from
from formats.names import look_up
from model import ModelConfig

EMBED, HEAD = "embed.weight", "head.weight"


def apart(tensors: list[LazyTensor], names: dict,
          cfg: ModelConfig) -> tuple[list[LazyTensor], LazyTensor | None]:
    """Tensors by the names of the file -> those without a tied head, and that head by its name.

    None where the head is a matrix of its own.
    """
    embed, head = (find(tensors, names, ours) for ours in (EMBED, HEAD))
    if not cfg.tied or embed is None:
        return tensors, None
    if head is not None:
        is_tied = equal(embed, head)
        return ([t for t in tensors if t is not head], head) if is_tied else (tensors, None)
    theirs = [name for name, ours in names.items() if ours == "head"]  # the family's own is last
    name = f"{theirs[-1]}.weight" if theirs else HEAD
    return tensors, made_from(embed, embed.read_rows, name=name, packed=embed.packed)


def find(tensors: list[LazyTensor], names: dict, ours: str) -> LazyTensor | None:
    """The tensor of the file that is called `ours` here."""
    for t in tensors:
        entry = look_up(t.name, names)
        if entry and entry[0] == "" and entry[2].into == (ours,):
            return t
    return None


def settle(path: Path, cfg: ModelConfig, tensors: dict[str, LazyTensor]) -> ModelConfig:
    """The config, `tied` as the tensors are; takes out a head that repeats the embedding.

    tensors: by our names. A quantized head ("head.scales") stands beside the embedding that it was
    rounded from. ValueError where the config asks for an output layer and there is none.
    """
    embed, head = tensors.get(EMBED), tensors.get(HEAD)
    if not cfg.tied:
        if head is None and embed is not None:
            raise ValueError("no output layer (lm_head.weight), and the config does not say that "
                             "it is the embedding ('tie_word_embeddings': true)")
        return cfg
    if head is None or "head.scales" in tensors:
        return cfg
    if embed is None:                              # the one matrix has the other's name
        tensors[EMBED] = made_from(head, head.read_rows, packed=head.packed)
    elif "embed.scales" in tensors or not equal(embed, head):
        print(f"note: {path.name}: the config says that the output layer is the embedding, but "
              "they differ: each is used as it is", file=sys.stderr)
        return replace(cfg, tied=False)
    del tensors[HEAD]
    return cfg


def equal(a: LazyTensor, b: LazyTensor) -> bool:
    """Are all numbers the same? Reads both, until they differ."""
    if a.shape != b.shape:
        return False
    if a.read_rows == b.read_rows:
        return True
    step = max(1, CHUNK * a.n_row // math.prod(a.shape))
    try:
        return all(torch.equal(*(t.read_rows(i, min(i + step, a.n_row)).float() for t in (a, b)))
                   for i in range(0, a.n_row, step))
    finally:
        a.release()
        b.release()
