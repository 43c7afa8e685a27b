"""The loading pipeline:

    resolve → read → rename → fold       open_checkpoint: a Checkpoint of lazy tensors, checked
    quantize → shard                     optional: Checkpoint in, Checkpoint out, still lazy
    assign                               load_model: reads rows, a few megabytes at a time

No stage calls an earlier one. Weights are quantized before they are sharded: a scale covers a whole
row, so every rank gets the same values as a single process. Peak memory: the model plus one chunk.

    source = open_checkpoint("org/name or path")
    model = load_model(source, torch.bfloat16, "cpu")
"""

import math
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Linear

import checkpoint
from checkpoint import (
    Checkpoint,
    LazyTensor,
    as_path,
    beginning,
    blank_model,
    check_request,
    checked,
    disk_names,
    quantized_blank,
    read_into,
    read_json,
    reading,
    some,
)
from gpt_faster.formats import lora
from gpt_faster.formats.awq_gptq_fp8 import unpacked_int4
from gpt_faster.formats.file_kinds import (
    adapter_instead_of_model,
    is_eagle3_config,
    kind_of,
    other_directory,
    refuse_others,
    start_of,
)
from gpt_faster.formats.fold import fold
from gpt_faster.formats.gguf_file import EAGLE3_INSTEAD_OF_MODEL, gguf_in
from gpt_faster.formats.gguf_model import read_gguf
from gpt_faster.formats.hub import check_finished, resolve
from gpt_faster.formats.huggingface import read_hf
from gpt_faster.formats.meta import read_llama2c, read_meta
from gpt_faster.formats.names import rename
from gpt_faster.formats.pth import read_ours
from gpt_faster.formats.raw_checkpoint import RawCheckpoint
from gpt_faster.formats.torch_file import read_torch
from gpt_faster.kernels.linear import use_packed_linears
from gpt_faster.layers.per_layer import FileTable, gpu_view
from model import ExpertLinear, ModelConfig, Transformer

WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
                "pytorch_model.bin.index.json", "model.pth", "consolidated.00.pth")
KIND_OF_SUFFIX = {".gguf": "gguf", ".safetensors": "safetensors", ".pth": "torch", ".pt": "torch",
                  ".bin": "torch"}


# ---- A path -> a Checkpoint ---------------------------------------------------------------------

def open_checkpoint(name: str | None, adapter: str | None = None) -> Checkpoint:
    """A path or hub name (None: the default model) -> its checkpoint. No weight is read yet.

    adapter: path or hub name of a LoRA adapter.
    FileNotFoundError, ValueError or OSError with a one-line message.
    """
    return read_checkpoint(resolve(name), resolve(adapter) if adapter is not None else None)


def read_checkpoint(path: Path | str, adapter: Path | str | None = None) -> Checkpoint:
    """Open a checkpoint of any format; names and shapes are checked. No weight is read yet.

    FileNotFoundError or ValueError with a one-line message; TypeError if `path` is no path.
    """
    path, adapter = as_path(path), adapter if adapter is None else as_path(adapter)
    with reading(path):
        raw = read(path)
    if adapter is not None:
        adapter = Path(adapter)
        with reading(path):
            tensors, tied_head = lora.split_tied_head(raw.tensors, raw.names, raw.cfg)
        with reading(adapter):
            raw.tensors = lora.merge(tensors, adapter, tied_head)
    elif raw.names is not None and (raw.path.parent / "adapter_config.json").exists():
        print(f"note: {raw.path.parent}: the adapter next to the weights is not applied; to apply "
              f"it, add --adapter {raw.path.parent}", file=sys.stderr)
    source = to_checkpoint(raw)
    source.adapter = adapter
    if raw.mtp:
        source.mtp = lambda: open_mtp_head(raw.mtp)    # read only if used
    return source


def open_mtp_head(raw: RawCheckpoint) -> Checkpoint:
    try:
        return to_checkpoint(raw)
    except ValueError as e:
        raise ValueError(f"MTP head of {e}") from None


def to_checkpoint(raw: RawCheckpoint) -> Checkpoint:
    """Rename, fold and check the tensors. ValueError as read_checkpoint()."""
    with reading(raw.path):
        tensors = rename(raw.tensors, raw.names, raw.cfg)
        if raw.folds:
            tensors = fold(tensors, raw.cfg, raw.folds)
        if raw.prequantized:
            tensors = unpack_mixed_schemes(tensors, raw)
        return checked(raw, tensors)


def read(path: Path) -> RawCheckpoint:
    """One reader per format. The content decides which; the name only where it does not."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or directory")
    check_finished(path if path.is_dir() else path.parent)
    if path.is_dir():
        path = weights_in(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: not a regular file")
    if path.name.endswith(".index.json"):
        return read_beside_config(path)
    refuse_others(path)
    kind = kind_of(path) or KIND_OF_SUFFIX.get(path.suffix)
    if kind == "gguf":
        return read_gguf(path)
    if kind == "safetensors" or path.suffix == ".bin":
        return read_beside_config(path)
    if kind == "torch":
        return read_pth(path)
    raise ValueError(f"{path}: it {beginning(start_of(path))}: expected a directory, .safetensors, "
                     ".pth, .pt, .bin or .gguf")


def read_beside_config(path: Path) -> RawCheckpoint:
    """A weights file or index of a Hugging Face directory."""
    if not (path.parent / "config.json").exists():
        if path.name.startswith("adapter"):
            raise ValueError(f"{path}: {adapter_instead_of_model(path.parent)}")
        raise FileNotFoundError(f"{path.parent / 'config.json'}: missing, required by {path.name}")
    if is_eagle3_config(read_json(path.parent / "config.json")):
        raise ValueError(f"{path.parent}: {EAGLE3_INSTEAD_OF_MODEL}")
    return read_hf(path.parent, path.name)


def weights_in(directory: Path) -> Path:
    """The weights file of a directory. FileNotFoundError or ValueError says what it has instead."""
    if found := checkpoint.weights_in(directory, WEIGHT_FILES):
        return found
    if found := gguf_in(directory):
        return found
    named_otherwise = [p for p in sorted(directory.glob("*.safetensors"))
                       if not p.name.startswith(("adapter", "consolidated"))]
    if len(named_otherwise) == 1 and (directory / "config.json").exists():
        return named_otherwise[0]
    if what := other_directory(directory):
        raise ValueError(f"{directory}: {what}")
    names = sorted(p.name for p in directory.iterdir())
    raise FileNotFoundError(
        f"{directory}: no model found: expected config.json with model.safetensors, "
        f"model.pth, consolidated.00.pth or one .gguf, found {some(names) or 'nothing'}")


def read_pth(path: Path) -> RawCheckpoint:
    """A .pth or .pt: ours, llama2.c's, Meta's (with params.json), or a state dict + config.json."""
    content, directory = read_torch(path), path.parent
    if content.get("format") == "gpt-faster":
        return read_ours(path, content)
    if "model_args" in content and "model" in content:
        return read_llama2c(path, content)
    if (directory / "params.json").exists():
        return read_meta(path)
    if (directory / "config.json").exists():
        return read_hf(directory, path.name)
    raise ValueError(f"{path}: no config inside, and no config.json or params.json next to it")


def unpack_mixed_schemes(tensors: dict[str, LazyTensor],
                    raw: RawCheckpoint) -> dict[str, LazyTensor]:
    """Dequantize linears that are one matrix in memory but differently quantized in the file."""
    tensors = dict(tensors)
    for name, module in blank_model(raw.cfg, torch.float32, raw.kind).named_modules():
        xs = disk_names(name) if isinstance(module, Linear | ExpertLinear) else []
        groups = {x: tensors[f"{x}.scales"].shape[1:] for x in xs if f"{x}.scales" in tensors}
        if len(groups) == len(xs) and len(set(groups.values())) < 2:
            continue
        for x in groups:
            parts = (tensors.pop(f"{x}.{part}") for part in ("weight", "scales", "zeros"))
            tensors[f"{x}.weight"] = unpacked_int4(*parts)
    return tensors


# ---- A Checkpoint -> a model --------------------------------------------------------------------

def load_model(source: Checkpoint, dtype: torch.dtype, device,
               cached: dict[str, Tensor] | None = None, packed: bool = True) -> Transformer:
    """checkpoint.load_model(), but per-layer embeddings stay in the file or in host memory.

    cached: the model's parameters from an earlier call, instead of reading the file. packed:
    convert quantized weights to the layouts of our kernels; else keep the on-disk layout, for the
    core's plain matmuls.
    """
    def prepare(model):
        if packed:
            use_packed_linears(model, dtype, device)
        place_per_layer_embedding(model, source, dtype, device)

    if not cached:
        return checkpoint.load_model(source, dtype, device, prepare)
    check_request(source, dtype, device)
    with reading(source.path):
        model = quantized_blank(source, dtype)
        prepare(model)
        assign_cached(model, cached)
        return model.to(device).eval()


def is_offloaded(name: str, device) -> bool:
    """Does the tensor stay off the device? Per-layer embeddings: a step reads a few rows only."""
    device = torch.device(device).type
    on_nvidia = device == "cuda" and torch.version.hip is None
    return name == "per_layer.embed.weight" and (device == "cpu" or on_nvidia)


def n_bytes(source: Checkpoint, dtype: torch.dtype, device) -> int:
    """Bytes of the weights on the device, in dtype or as quantized."""
    return sum(math.prod(t.shape) * (1 if t.dtype.itemsize == 1 else dtype.itemsize)
               for name, t in source.tensors.items() if not is_offloaded(name, device))


def count_parameters(cfg: ModelConfig) -> int:
    """Number of parameters of the model, quantized or not."""
    return sum(p.numel() for p in blank_model(cfg, torch.bfloat16).parameters())


def place_per_layer_embedding(model: Transformer, source: Checkpoint, dtype: torch.dtype,
                              device) -> None:
    """Per-layer embeddings: read from the file on a CPU; in pinned host memory for NVIDIA GPUs."""
    name = "per_layer.embed.weight"
    if name not in source.tensors or not is_offloaded(name, device):
        return
    table = source.tensors[name]
    if torch.device(device).type == "cpu":
        read = table.read_rows or (lambda a, b: random_row(table, a))
        model.per_layer.embed = FileTable(read, table.shape[1], dtype)
        return
    host = torch.empty(table.shape, dtype=dtype, pin_memory=True)
    read_into(host, source, [name])
    model.per_layer.embed = torch.nn.Embedding.from_pretrained(gpu_view(host, device))


def random_row(table: LazyTensor, i: int) -> Tensor:
    """Row i of a random table, reproducible."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(i)
        row = torch.empty(1, table.shape[1])
        table.fill(row)
    return row


def assign_cached(model: Transformer, cached: dict[str, Tensor]) -> None:
    parameters = {}                                # by address: a tied head shares the embedding's
    for name, module in model.named_modules():
        for parameter in list(module._parameters):
            t = cached.get(f"{name}.{parameter}")  # packing may have removed it
            if t is not None and t.data_ptr() not in parameters:
                parameters[t.data_ptr()] = torch.nn.Parameter(t, requires_grad=False)
            setattr(module, parameter, t if t is None else parameters[t.data_ptr()])
