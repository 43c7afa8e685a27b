"""The pipeline that loads a model, one way:

    resolve → read → rename → fold       open_checkpoint: a Checkpoint of lazy tensors, checked
    quantize → shard                     on lazy tensors, by who wants it: source in, source out
    assign                               load_model: rows are read, a few megabytes at a time

Nothing calls back up. Rows are rounded before a rank takes its part of them, since a scale belongs
to a whole row: so every rank has the numbers that one process would have. Peak memory is the model
plus one chunk.

    source = open_checkpoint("org/name or path")
    model = load_model(source, torch.bfloat16, "cpu")
"""

import math
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Linear

import checkpoint
from checkpoint import (
    Checkpoint,
    LazyTensor,
    blank_model,
    checked,
    disk_names,
    quantized_blank,
    read_into,
    reading,
    some,
)
from gpt_faster.formats import lora
from gpt_faster.formats.fold import fold
from gpt_faster.formats.gguf_model import read_gguf
from gpt_faster.formats.hub import check_finished, resolve
from gpt_faster.formats.hub_quantized import unpacked_int4
from gpt_faster.formats.huggingface import read_hf
from gpt_faster.formats.meta import read_llama2c, read_meta
from gpt_faster.formats.names import rename
from gpt_faster.formats.pth import read_ours
from gpt_faster.formats.raw import RawCheckpoint
from gpt_faster.formats.torch_file import read_torch
from gpt_faster.kernels.linear import use_packed_linears
from gpt_faster.layers.per_layer import FileTable, gpu_view
from model import ExpertLinear, ModelConfig, Transformer

WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
                "pytorch_model.bin.index.json", "model.pth", "consolidated.00.pth")


# ---- A path -> a Checkpoint ---------------------------------------------------------------------

def open_checkpoint(name: str | None, adapter: str | None = None) -> Checkpoint:
    """A path or a hub name, None for the default model -> its checkpoint, no weight read yet.

    adapter: a path or a hub name too, of a LoRA adapter.
    FileNotFoundError, ValueError or OSError say in one line what was found and what to do.
    """
    return read_checkpoint(resolve(name), resolve(adapter) if adapter is not None else None)


def read_checkpoint(path: Path, adapter: Path | None = None) -> Checkpoint:
    """Whatever checkpoint is at `path`, checked by name and shape, no weight read yet.

    FileNotFoundError or ValueError say in one line what was found and what was expected.
    """
    with reading(path):
        raw = read(path)
    if adapter is not None:
        with reading(path):
            tensors, tied_head = lora.apart(raw.tensors, raw.names, raw.cfg)
        with reading(adapter):
            raw.tensors = lora.merged(tensors, adapter, tied_head)
    source = finished(raw)
    source.adapter = adapter
    if raw.mtp:
        source.mtp = lambda: open_head(raw.mtp)    # what nobody asks for costs nothing
    return source


def open_head(raw: RawCheckpoint) -> Checkpoint:
    try:
        return finished(raw)
    except ValueError as e:
        raise ValueError(f"the head that drafts, in {e}") from None


def finished(raw: RawCheckpoint) -> Checkpoint:
    """The tensors by our names, folded and checked. ValueError as read_checkpoint()."""
    with reading(raw.path):
        tensors = rename(raw.tensors, raw.names, raw.cfg)
        if raw.folds:
            tensors = fold(tensors, raw.cfg, raw.folds)
        if raw.hub_quantized:
            tensors = quantized_alike(tensors, raw)
        return checked(raw, tensors)


def read(path: Path) -> RawCheckpoint:
    """One reader per format."""
    check_finished(path if path.is_dir() else path.parent)
    if path.is_dir():
        path = weights_in(path)
    if path.suffix == ".gguf":
        return read_gguf(path)
    if path.suffix in (".pth", ".pt"):
        return read_pth(path)
    if path.suffix in (".safetensors", ".bin") or path.name.endswith(".index.json"):
        if not (path.parent / "config.json").exists():
            raise FileNotFoundError(f"{path.parent / 'config.json'}: missing, "
                                    f"and {path.name} needs it")
        return read_hf(path.parent, path.name)
    raise ValueError(f"{path}: expected a directory, .safetensors, .pth, .pt, .bin or .gguf")


def weights_in(directory: Path) -> Path:
    """The file to read in a directory."""
    if found := checkpoint.weights_in(directory, WEIGHT_FILES):
        return found
    ggufs = list(directory.glob("*.gguf"))
    if len(ggufs) == 1:
        return ggufs[0]
    names = sorted(p.name for p in directory.iterdir())
    raise FileNotFoundError(
        f"{directory}: no model in this directory: expected config.json with model.safetensors, "
        f"model.pth, consolidated.00.pth or one .gguf, found {some(names) or 'nothing'}")


def read_pth(path: Path) -> RawCheckpoint:
    """One .pth or .pt: ours, llama2.c's, Meta's (params.json beside), or bare with config.json."""
    content, directory = read_torch(path), path.parent
    if content.get("format") == "gpt-faster":
        return read_ours(path, content)
    if "model_args" in content and "model" in content:
        return read_llama2c(path, content)
    if (directory / "params.json").exists():
        return read_meta(path)
    if (directory / "config.json").exists():
        return read_hf(directory, path.name)
    raise ValueError(f"{path}: it holds no config, and neither config.json nor params.json is "
                     "beside it")


def quantized_alike(tensors: dict[str, LazyTensor],
                    raw: RawCheckpoint) -> dict[str, LazyTensor]:
    """What is one matrix in memory, and not of one scheme in a hub's file, as plain weights."""
    tensors = dict(tensors)
    for name, module in blank_model(raw.cfg, torch.float32, raw.kind).named_modules():
        xs = disk_names(name) if isinstance(module, Linear | ExpertLinear) else []
        groups = {x: tensors[f"{x}.scales"].shape[1:] for x in xs if f"{x}.scales" in tensors}
        if len(groups) == len(xs) and len(set(groups.values())) < 2:
            continue
        for x in groups:
            leaves = (tensors.pop(f"{x}.{leaf}") for leaf in ("weight", "scales", "zeros"))
            tensors[f"{x}.weight"] = unpacked_int4(*leaves)
    return tensors


# ---- A Checkpoint -> a model --------------------------------------------------------------------

def load_model(source: Checkpoint, dtype: torch.dtype, device,
               kept: dict[str, Tensor] | None = None, packed: bool = True) -> Transformer:
    """As checkpoint.load_model(); per-layer embeddings stay in the file or on the host.

    kept: the model's parameters, as an earlier call gave them: then nothing is read. packed:
    quantized weights get the layouts of our kernels; else they stay as on disk, for the core's own
    products.
    """
    def prepare(model):
        if packed:
            use_packed_linears(model, dtype, device)
        put_table(model, source, dtype, device)

    if not kept:
        return checkpoint.load_model(source, dtype, device, prepare)
    with reading(source.path):
        model = quantized_blank(source, dtype)
        prepare(model)
        take_kept(model, kept)
        return model.to(device).eval()


def stays_outside(name: str, device) -> bool:
    """Is the tensor none of what the device holds? Per-layer embeddings, of which it needs rows."""
    device = torch.device(device).type
    on_nvidia = device == "cuda" and torch.version.hip is None
    return name == "per_layer.embed.weight" and (device == "cpu" or on_nvidia)


def n_bytes(source: Checkpoint, dtype: torch.dtype, device) -> int:
    """What the weights will take: dtype, or as they are where they are quantized."""
    return sum(math.prod(t.shape) * (1 if t.dtype.itemsize == 1 else dtype.itemsize)
               for name, t in source.tensors.items() if not stays_outside(name, device))


def count_parameters(cfg: ModelConfig) -> int:
    """Of the model, however its weights are stored."""
    return sum(p.numel() for p in blank_model(cfg, torch.bfloat16).parameters())


def put_table(model: Transformer, source: Checkpoint, dtype: torch.dtype, device) -> None:
    """Per-layer embeddings: on a CPU they stay in the file, for an NVIDIA GPU on the host."""
    name = "per_layer.embed.weight"
    if name not in source.tensors or not stays_outside(name, device):
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
    """One of a table of random numbers, always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(i)
        row = torch.empty(1, table.shape[1])
        table.fill(row)
    return row


def take_kept(model: Transformer, kept: dict[str, Tensor]) -> None:
    made = {}                                      # a tied head shares the embedding's
    for name, module in model.named_modules():
        for leaf in list(module._parameters):
            t = kept.get(f"{name}.{leaf}")         # packing may have left none
            if t is not None and t.data_ptr() not in made:
                made[t.data_ptr()] = torch.nn.Parameter(t, requires_grad=False)
            setattr(module, leaf, t if t is None else made[t.data_ptr()])
