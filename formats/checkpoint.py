"""Checkpoint: what a path holds, nothing large read yet; and whether it holds what it should.

Quantized weights lie as quantize.py's schemes say: "layers.0.attn.wq" is a Linear, and its codes,
scales and zeros are "….wq.weight", "….wq.scales" and "….wq.zeros".
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.nn import Linear

from formats.fold import Folds
from formats.lazy import LazyTensor
from formats.messages import reading, some
from formats.parameters import blank_model, disk_names, tensor_shapes
from model import ExpertLinear, ModelConfig
from quantize import Scheme, scheme_at


@dataclass
class RawCheckpoint:
    """What a reader finds: tensors by the names in the file, as they lie there."""

    path: Path
    cfg: ModelConfig
    tensors: list[LazyTensor]
    names: dict                                    # their names: ours (names.py)
    folds: Folds | None = None                     # None: our own file, everything is folded
    eos_ids: list[int] = field(default_factory=list)
    defaults: dict = field(default_factory=dict)
    tokenizer: Path | dict | None = None
    quantization: dict | None = None
    hub_quantized: bool = False                    # what is one matrix for us may be of two kinds
    mtp: "RawCheckpoint | None" = None             # of a head that drafts (mtp.py)


@dataclass
class Checkpoint:
    """A model's config and its tensors by our names, as the model takes them."""

    path: Path
    cfg: ModelConfig
    tensors: dict[str, LazyTensor]
    eos_ids: list[int] = field(default_factory=list)
    defaults: dict = field(default_factory=dict)   # sampling values of generation_config.json
    tokenizer: Path | dict | None = None           # what tokenizer.load() takes
    quantization: dict | None = None               # how, for people; the tensors say what
    adapter: Path | None = None                    # whose changes the tensors have
    mtp: "Callable[[], Checkpoint] | None" = None  # opens its head that drafts, where it has one


def stays_outside(name: str, device) -> bool:
    """Is the tensor none of what the device holds? Per-layer embeddings, of which it needs rows."""
    device = torch.device(device).type
    on_nvidia = device == "cuda" and torch.version.hip is None
    return name == "per_layer.embed.weight" and (device == "cpu" or on_nvidia)


def n_bytes(source: Checkpoint, dtype: torch.dtype, device) -> int:
    """What the weights will take: dtype, or as they are where they are quantized."""
    return sum(math.prod(t.shape) * (1 if t.dtype.itemsize == 1 else dtype.itemsize)
               for name, t in source.tensors.items() if not stays_outside(name, device))


def check(source: Checkpoint) -> None:
    """ValueError names tensors that are missing, left over, or not of the config's shape.

    Takes out what some files hold without need: biases that are all zero.
    """
    cfg, tensors = source.cfg, source.tensors
    shapes = tensor_shapes(cfg)
    for name in [n for n in tensors if n not in shapes and n.endswith(".bias")]:
        if not tensors[name].whole().any():        # AutoGPTQ stored zeros for every layer
            del tensors[name]
    with reading(source.path):
        dtypes = _expect_quantized(tensors, shapes, cfg)
        _check_names_and_shapes(tensors, shapes)
        _check_dtypes(tensors, dtypes)


def _expect_quantized(tensors, shapes, cfg) -> dict[str, torch.dtype]:
    """Put the shapes of quantized weights' leaves into `shapes` -> the dtypes of these leaves.

    ValueError where what is one matrix in memory is not quantized alike.
    """
    model = blank_model(cfg, torch.float32)
    matrices = [disk_names(name) for name, module in model.named_modules()
                if isinstance(module, Linear | ExpertLinear)]
    if cfg.tied:
        matrices.append(["embed"])
    dtypes = {}
    for matrix in matrices:
        schemes = {x: _expect(tensors, shapes, dtypes, x) for x in matrix}
        if len(set(schemes.values())) > 1:
            raise ValueError(f"{', '.join(matrix)} are one matrix in memory, but not quantized "
                             "alike")
    return dtypes


def _expect(tensors, shapes, dtypes, x) -> Scheme | None:
    shape = shapes["embed.weight" if x == "head" else f"{x}.weight"]
    scheme = scheme_at(tensors, x, shape[-1])
    if scheme is None or (x == "embed" and not scheme.serves_embedding):
        return None                                # leaves without a place are left over
    for leaf, (leaf_shape, dtype) in scheme.leaves(shape).items():
        shapes[f"{x}.{leaf}"] = leaf_shape
        dtypes[f"{x}.{leaf}"] = dtype
    return scheme


def _check_names_and_shapes(tensors, shapes) -> None:
    missing = [n for n in shapes if n not in tensors]
    if missing:
        raise ValueError(f"{len(missing)} tensors are missing: {some(missing)}")
    extra = [tensors[n].name for n in tensors if n not in shapes]
    if extra:
        raise ValueError(f"{len(extra)} tensors that its config has no place for: {some(extra)}")
    for name, shape in shapes.items():
        found = tensors[name]
        if found.shape != shape:
            raise ValueError(f"{found.name} is {list(found.shape)}, but the config asks for "
                             f"{list(shape)}")


def _check_dtypes(tensors, dtypes) -> None:
    """Codes have their scheme's dtype; all else is floating-point numbers."""
    for name, t in tensors.items():
        expected = dtypes.get(name, torch.float32)
        both_float = t.dtype.is_floating_point and expected.is_floating_point
        if t.dtype == expected or both_float:
            continue
        x = name.rpartition(".")[0]
        others = [n for n in tensors if n in (f"{x}.scales", f"{x}.zeros")]
        kind = "floating-point numbers" if expected.is_floating_point else expected
        raise ValueError(f"{name} is of {t.dtype}, but with {some(others) or 'no scales'} beside "
                         f"it {kind} is expected")
