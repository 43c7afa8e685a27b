"""Our own .pth: a PyTorch file that holds config, weights and tokenizer; read, and written.

A zip archive as torch.save writes it: data.pkl, which names the tensors, and a stored entry for the
bytes of each. torch.load reads it, memory-mapped too, and every zip program finds it whole.
"""

import collections
import dataclasses
import io
import math
import os
import pickle
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from formats.checkpoint import Checkpoint, RawCheckpoint
from formats.huggingface import sampling_values
from formats.lazy import LazyTensor, check_finite
from formats.mtp import HEAD_NAMES, HeadConfig, split_head
from formats.names import OUR_NAMES
from formats.parameters import blank_model, disk_names
from formats.schema import brief, build, check_config
from formats.torch_file import lazy_tensors
from formats.whole_file import whole_file
from layers.attention import AttentionVariant
from layers.block import BlockVariant, Widths
from layers.delta import GatedDelta
from layers.embedding import EmbedNorm, EmbedScale, LearnedPositions
from layers.feed_forward import FeedForwardVariant
from layers.flat_config import FlatConfig, LayerEnd, Scores
from layers.latent import Latent
from layers.moe import MoEVariant, moe_of
from layers.norms import LogitCap, NormVariant
from layers.per_layer import PerLayer
from layers.rope import RopeVariant, rope_of
from layers.shared_kv import SharedKV
from layers.short_conv import ShortConv
from model import ModelConfig
from quantize import LEAVES

PARTS = {kind.kind: kind for kind in (
    AttentionVariant, BlockVariant, EmbedNorm, EmbedScale, FeedForwardVariant, GatedDelta, Latent,
    LearnedPositions, LogitCap, NormVariant, PerLayer, SharedKV, ShortConv)}
VERSION = 2                                        # a newer one is refused; 1 had a flat config
ALIGNMENT = 64                                     # of a tensor's bytes in the file, as torch's
STORAGES = {torch.float32: torch.FloatStorage, torch.float64: torch.DoubleStorage,
            torch.float16: torch.HalfStorage, torch.bfloat16: torch.BFloat16Storage,
            torch.int8: torch.CharStorage, torch.uint8: torch.ByteStorage}


# ---- Reading ------------------------------------------------------------------------------------

def read_ours(path: Path, content: dict) -> RawCheckpoint:
    """content: what torch_file.read_torch() gives."""
    if content.get("version", 1) not in range(1, VERSION + 1):
        raise ValueError(f"{path}: its format is version {brief(content['version'])}, this program "
                         f"reads up to {VERSION}: update it, or convert the original again")
    _check_content(content)
    tensors, head = split_head(lazy_tensors(content["model"]), None)
    tokenizer = content.get("tokenizer")
    tokenizer = {**tokenizer, "path": path} if tokenizer else path.parent
    raw = RawCheckpoint(path, config_from_dict(content["config"]), tensors, OUR_NAMES, None,
                        content["eos_ids"], sampling_values(content["defaults"]), tokenizer,
                        content.get("quantization"))
    if content.get("mtp"):
        cfg = HeadConfig(**vars(config_from_dict(content["mtp"])))
        raw.mtp = dataclasses.replace(raw, cfg=cfg, tensors=head, names=OUR_NAMES | HEAD_NAMES)
    return raw


def _check_content(content: dict) -> None:
    """ValueError names a part of the file that is missing, or of another kind."""
    def whole_numbers(value):
        return isinstance(value, list) and all(type(i) is int and 0 <= i < 1 << 31 for i in value)

    expected = {"config": dict, "model": dict, "eos_ids": whole_numbers, "defaults": dict,
                "tokenizer": dict | None, "quantization": dict | None, "mtp": dict | None}
    for name, kind in expected.items():
        value = content.get(name)
        fits = kind(value) if kind is whole_numbers else isinstance(value, kind)
        if not fits:
            raise ValueError(f"its '{name}' is {brief(value)}, which is not as we write it")


def config_from_dict(d: dict) -> ModelConfig:
    """The config as a .pth stores it. ValueError names what cannot be."""
    cfg = config_of_parts(d) if "after_embed" in d else config_of_version_1(d)
    check_config(cfg)
    return cfg


def config_of_parts(d: dict) -> ModelConfig:
    parts = {name: part_from_dict(d.get(name))
             for name in ("norm", "attention", "ffn", "block", "per_layer", "logit_cap")}
    for name in ("mixer", "after_embed"):
        parts[name] = tuple(part_from_dict(part) for part in _several(d, name))
    return build(ModelConfig, _as_tuples(d), **parts, rope=_ropes(d), moe=_moe(d))


def config_of_version_1(d: dict) -> ModelConfig:
    """Before there were parts; before experts and scores had dictionaries of their own, too."""
    d = _with_dictionaries(d)
    if isinstance(d.get("qk_norm"), bool):         # before there were two ways to do it
        d = {**d, "qk_norm": "head" if d["qk_norm"] else None}
    end = d.get("layer_end")
    parts = {"mixer": tuple(part_from_dict(part) for part in _several(d, "mixer", [None])),
             "widths": _widths(d), "scores": build(Scores, d.get("scores")),
             "layer_end": end if end is None else build(LayerEnd, end)}
    flat = build(FlatConfig, _as_tuples(d), **parts, rope=_ropes(d), moe=_moe(d))
    return flat.with_parts()


def _ropes(d: dict) -> tuple:
    return tuple(rope_of(vars(build(RopeVariant, _as_tuples(r)))) for r in _several(d, "rope"))


def _moe(d: dict):
    moe = d.get("moe")
    return moe if moe is None else moe_of(vars(build(MoEVariant, moe)))


def _widths(d: dict) -> tuple:
    return tuple(w if w is None else build(Widths, w) for w in _several(d, "widths", [None]))


def _as_tuples(d: dict) -> dict:
    if not isinstance(d, dict):
        return d                                   # build() refuses it
    return {k: tuple(v) if isinstance(v, list) else v for k, v in d.items()}


def _several(d: dict, name: str, default=None) -> list | tuple:
    value = d.get(name, default)
    if not isinstance(value, list | tuple):
        raise ValueError(f"its config's '{name}' is {brief(value)}, expected one for each layer")
    return value


def part_from_dict(d: dict | None):
    """What replaces a part of the model; None: nothing does."""
    if d is None:
        return None
    kind = d.get("kind") if isinstance(d, dict) else d
    if not isinstance(kind, str) or kind not in PARTS:
        raise ValueError(f"written by a newer gpt-faster: unknown layer {brief(kind)}")
    own = {"widths": _widths(d)} if kind == BlockVariant.kind else {}
    return build(PARTS[kind], _as_tuples(d), **own)


def _with_dictionaries(d: dict) -> dict:
    """What is said of experts and scores in dictionaries of their own: it was among the rest."""
    if "moe" in d:
        return d
    d = dict(d)
    if "renormalize" in d:                         # its name in the first releases
        d["norm_topk_prob"] = d.pop("renormalize")
    names = {f.name for f in dataclasses.fields(MoEVariant)} - {"activation"}
    experts = {name: d.pop(name) for name in names if name in d}
    scores = dict(cap=d.pop("attn_cap", None), sinks=d.pop("sinks", False))
    return {**d, "moe": experts if experts.get("n_expert") else None, "scores": scores}


# ---- Writing ------------------------------------------------------------------------------------

def save_checkpoint(source: Checkpoint, path: Path, tokenizer: dict | None,
                    dtype: torch.dtype | None = None,
                    progress: Callable[[int, int], None] = lambda i, n: None) -> None:
    """Write our .pth, tensor by tensor, whole or not at all; in memory is a few megabytes.

    dtype: None keeps each tensor's own. tokenizer: None where its files stay beside the .pth.
    """
    tensors, dtypes, head = dict(source.tensors), _dtypes(source, dtype), head_to_keep(source)
    if head:                                       # as mtp.*, which others pass over
        tensors |= {f"mtp.{name}": t for name, t in head.tensors.items()}
        dtypes |= {f"mtp.{name}": dtype for name, dtype in _dtypes(head, dtype).items()}
    blanks = {name: Blank(str(i), t.shape, dtypes[name])
              for i, (name, t) in enumerate(tensors.items())}
    content = dict(format="gpt-faster", version=VERSION, config=dataclasses.asdict(source.cfg),
                   quantization=source.quantization, model=blanks, eos_ids=source.eos_ids,
                   defaults=source.defaults, tokenizer=tokenizer,
                   mtp=head and dataclasses.asdict(head.cfg))
    with whole_file(path) as file:
        if hasattr(os, "posix_fallocate"):         # a full disk says so now
            os.posix_fallocate(file.fileno(), 0, sum(b.n_bytes for b in blanks.values()))
        with zipfile.ZipFile(file, "w") as archive:
            _write(archive, path.stem, content, tensors, progress)


def head_to_keep(source: Checkpoint) -> Checkpoint | None:
    """The head that drafts; a line says where it is not as we know them."""
    try:
        return source.mtp() if source.mtp else None
    except ValueError as e:
        print(f"note: left out: {e}", file=sys.stderr)
        return None


def _dtypes(source: Checkpoint, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """Of each tensor in the file: norms fp32, quantized weights as they are."""
    precise = {on_disk for n, p in blank_model(source.cfg, torch.bfloat16).named_parameters()
               if p.dtype == torch.float32 for on_disk in disk_names(n)}
    dtypes = {}
    for name, t in source.tensors.items():
        leaf = name.rpartition(".")[2]
        quantized = not t.dtype.is_floating_point or leaf in LEAVES[1:]
        dtypes[name] = t.dtype if quantized else dtype or t.dtype
        if name in precise:
            dtypes[name] = torch.float32
    return dtypes


@dataclasses.dataclass(frozen=True)
class Blank:
    """Stands for a tensor while the pickle is written: which entry has its bytes."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Storage:
    """The bytes of a Blank."""

    def __init__(self, blank: Blank):
        self.blank = blank


class Pickler(pickle.Pickler):
    """Writes a Blank as torch.save writes a contiguous tensor."""

    def reducer_override(self, obj):
        if not isinstance(obj, Blank):
            return NotImplemented
        shape = tuple(list(obj.shape))             # its own: equal files from equal tensors
        strides = tuple(math.prod(shape[i + 1:]) for i in range(len(shape)))
        arguments = Storage(obj), 0, shape, strides, False
        return torch._utils._rebuild_tensor_v2, (*arguments, collections.OrderedDict())

    def persistent_id(self, obj):
        if not isinstance(obj, Storage):
            return None
        blank = obj.blank
        return "storage", STORAGES[blank.dtype], blank.key, "cpu", math.prod(blank.shape)


def _write(archive: zipfile.ZipFile, folder: str, content: dict, tensors: dict[str, LazyTensor],
           progress: Callable[[int, int], None]) -> None:
    pickled = io.BytesIO()
    Pickler(pickled, protocol=2).dump(content)
    for name, data in (("data.pkl", pickled.getvalue()), ("byteorder", b"little"),
                       ("version", b"3\n")):
        archive.writestr(zipfile.ZipInfo(f"{folder}/{name}"), data)
    for i, (name, t) in enumerate(tensors.items(), 1):
        progress(i, len(tensors))
        blank = content["model"][name]
        entry = zipfile.ZipInfo(f"{folder}/data/{blank.key}")
        entry.file_size = blank.n_bytes
        large = blank.n_bytes >= zipfile.ZIP64_LIMIT
        _align(entry, archive.fp.tell(), large)
        with archive.open(entry, "w", force_zip64=large) as f:
            for _, _, rows in t.chunks():
                f.write(raw_bytes(check_finite(rows, t.name, blank.dtype)))


def _align(entry: zipfile.ZipInfo, header_at: int, large: bool) -> None:
    """Fill the entry's header up, so that its bytes begin at a multiple of ALIGNMENT."""
    begin = header_at + 30 + len(entry.filename.encode()) + 20 * large + 4
    padding = -begin % ALIGNMENT
    entry.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding


def raw_bytes(t: Tensor) -> memoryview:
    return memoryview(t.contiguous().view(-1).view(torch.uint8).numpy())
