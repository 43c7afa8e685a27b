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

from pathlib import Path
from weakref import WeakValueDictionary

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import Linear

from formats import lora
from formats.checkpoint import Checkpoint, RawCheckpoint, check, stays_outside
from formats.fold import fold
from formats.gguf_model import read_gguf
from formats.hub import check_finished, resolve
from formats.hub_quantized import unpacked_int4
from formats.huggingface import read_hf
from formats.lazy import LazyTensor, as_rows, check_finite
from formats.messages import first_line, reading, some
from formats.meta import read_llama2c, read_meta
from formats.names import rename
from formats.parameters import blank_model, disk_names
from formats.pth import read_ours
from formats.tied import apart, settle
from formats.torch_file import read_torch
from kernels.linear import use_packed_linears
from layers.per_layer import FileTable, seen_by_gpu
from model import ExpertLinear, Transformer
from quantize import put_quantized_linears, scheme_at

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
            tensors, tied_head = apart(raw.tensors, raw.names, raw.cfg)
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
            tensors = quantized_alike(tensors, raw.cfg)
        cfg = settle(raw.path, raw.cfg, tensors)
        source = Checkpoint(raw.path, cfg, tensors, raw.eos_ids, raw.defaults, raw.tokenizer,
                            raw.quantization)
        check(source)
    return source


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
    for name in WEIGHT_FILES:
        if (directory / name).exists():
            return directory / name
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


def quantized_alike(tensors: dict[str, LazyTensor], cfg) -> dict[str, LazyTensor]:
    """What is one matrix in memory, and not of one scheme in a hub's file, as plain weights."""
    tensors = dict(tensors)
    for name, module in blank_model(cfg, torch.float32).named_modules():
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
               kept: dict[str, Tensor] | None = None) -> Transformer:
    """Read every weight into a model on `device`; norms stay fp32.

    kept: its parameters, as an earlier call gave them: then nothing is read.
    """
    with reading(source.path):
        model = blank_model(source.cfg, dtype)

        def scheme(name):
            return scheme_at(source.tensors, disk_names(name)[0])
        put_quantized_linears(model, scheme, dtype)
        use_packed_linears(model, dtype, device)
        put_table(model, source, dtype, device)
        if kept:
            take_kept(model, kept)
        else:
            load_part(model, "", source, device)
        return model.to(device).eval()                 # the parameters are there already: the rest


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
    _read_into(host, source, [name])
    model.per_layer.embed = torch.nn.Embedding.from_pretrained(seen_by_gpu(host, device))


def random_row(table: LazyTensor, i: int) -> Tensor:
    """One of a table of random numbers, always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(i)
        row = torch.empty(1, table.shape[1])
        table.fill(row)
    return row


def load_part(model: Transformer, prefix: str, source: Checkpoint, device) -> None:
    """Give memory and weights to the modules whose names begin with `prefix`.

    A module's pack(), where it has one, may give its weights another layout then.
    """
    assigned = WeakValueDictionary()               # a tied head shares the embedding's
    for name, module in list(model.named_modules()):
        if not name.startswith(prefix):
            continue
        for leaf, blank in list(module.named_parameters(recurse=False)):
            if not blank.is_meta:
                continue                           # put_table() gave it memory
            p = assigned.get(blank)
            if p is None:
                # not empty_like, which has torch import sympy for a tensor on meta
                weight = torch.empty(blank.shape, dtype=blank.dtype, device=device)
                _read_into(weight, source, disk_names(f"{name}.{leaf}"))
                p = assigned[blank] = torch.nn.Parameter(weight, requires_grad=False)
            setattr(module, leaf, p)
        if hasattr(module, "pack"):
            module.pack()                          # lets go of what lay as on disk


def take_kept(model: Transformer, kept: dict[str, Tensor]) -> None:
    made = {}                                      # a tied head shares the embedding's
    for name, module in model.named_modules():
        for leaf in list(module._parameters):
            t = kept.get(f"{name}.{leaf}")         # packing may have left none
            if t is not None and t.data_ptr() not in made:
                made[t.data_ptr()] = torch.nn.Parameter(t, requires_grad=False)
            setattr(module, leaf, t if t is None else made[t.data_ptr()])


def _read_into(weight: torch.Tensor, source: Checkpoint, names: list[str]) -> None:
    """The tensors of these names, one below the other."""
    top, target = 0, as_rows(weight)
    for t in (source.tensors[name] for name in names):
        if t.read_rows is None:
            t.fill(target[top:top + t.n_row])
        else:
            _copy(target[top:top + t.n_row], t, source.path)
        top += t.n_row


def _copy(target: torch.Tensor, t: LazyTensor, path: Path) -> None:
    try:
        for start, end, rows in t.chunks():
            if target.dtype == torch.float16 and rows.dtype != torch.float16:
                rows = check_finite(rows, t.name, torch.float16)
            target[start:end].copy_(rows)
    except (SafetensorError, ValueError) as e:
        what = f"{path}: " if t.name in str(e) else f"{path}: {t.name} cannot be read: "
        raise ValueError(what + first_line(e)) from e
