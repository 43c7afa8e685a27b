"""A model of any format, ready for the fast kernels: how commands, the server and Python load one.

On a CPU weights that took long to make (a GGUF that was dequantized, weights that were rounded
while loading) are kept for the next start of the same model. Owns what such weights depend on: the
content of the files, what was asked for, and our code that makes them. generate.load_model() reads
what the core reads, and nothing is exchanged in its model.

    model, source, tokenizer = load_model("model.gguf", "cpu", torch.bfloat16)
    steps = gpt_faster.kernels.compile.compile_steps(model)
"""

import hashlib
import json
import threading
import time
from pathlib import Path

import torch

import tp
from checkpoint import Checkpoint
from gpt_faster.formats import load as reading
from gpt_faster.formats import quantized
from gpt_faster.formats.load import open_checkpoint
from gpt_faster.formats.shapes import random_checkpoint
from gpt_faster.kernels.cuda.attention import use_fused_attention
from gpt_faster.kernels.digest import digest, digest_with_imports
from gpt_faster.storage import disk, weight_cache
from gpt_faster.text.tokenizer_files import load_for
from model import Transformer
from quantize import describe
from tokenizer import NullTokenizer

MIN_SAVE_SECONDS = 0.5                                # seconds that making them took
SUFFIXES = (".gguf", ".safetensors", ".bin", ".pth", ".pt")


def load_model(path: str | None = None, device="cpu", dtype: torch.dtype = torch.bfloat16,
               scheme: str | None = None, head: str = "int8", adapter: str | None = None,
               engine: str = "compile") -> tuple:
    """A path or hub name, None for the default model -> model, checkpoint, tokenizer.

    scheme: int8, int4-g32, …: round the weights while loading, and the head as int8, int4 or none.
    adapter: a LoRA's path or hub name. engine: what will run the model: compile, torch_compile, or
    kv_cache, which is uncompiled; the layout of quantized weights depends on it.
    FileNotFoundError, ValueError or OSError say in one line what was found and what to do.
    """
    source, tokenizer = open_model(path, adapter=adapter)
    if scheme:
        source = quantized.quantized(source, scheme, head=head, device=device)
    return load(source, dtype, device, engine), source, tokenizer


def open_model(path: str | None = None, shape: str | None = None, adapter: str | None = None):
    """A path or hub name, None for the default model, or a known shape -> checkpoint, tokenizer.

    No weight is read yet. Errors as load_model()'s.
    """
    if shape is not None and path is not None:
        raise ValueError("--random and --checkpoint_path exclude each other")
    if shape is not None and adapter is not None:
        raise ValueError("--random has no weights that --adapter could be added to")
    if shape is not None:
        return random_checkpoint(shape), NullTokenizer()
    source = open_checkpoint(path, adapter)
    return source, load_for(source)


def load(source: Checkpoint, dtype: torch.dtype, device,
         engine: str = "compile") -> Transformer:
    """This rank's part of a model, with weights that were kept, or to be kept."""
    packed = is_packed_for(engine, device, source)
    key = cache_key(source, dtype, torch.device(device), packed)
    kept = key and weight_cache.load(key)
    if kept:
        return reading.load_model(source, dtype, device, kept, packed)
    start = time.perf_counter()
    model = load_shard(source, dtype, device, engine)
    if key and time.perf_counter() - start > MIN_SAVE_SECONDS:
        tensors = dict(model.named_parameters(remove_duplicate=False))
        threading.Thread(target=weight_cache.save, args=(key, tensors)).start()
    return model


def load_shard(source, dtype: torch.dtype, device, engine: str = "compile") -> Transformer:
    """This rank's part of a model, joined to the others'; alone, the whole. Nothing is kept.

    For the engine torch_compile it is as the core's load_model() gives it.
    """
    packed = is_packed_for(engine, device, source)
    model = reading.load_model(tp.shard(source), dtype, device, packed=packed)
    if engine != "torch_compile":
        use_fused_attention(model)
    return tp.parallelize(model, source.cfg.vocab_size)


def is_packed_for(engine: str, device, source: Checkpoint) -> bool:
    """Do quantized weights get a kernel's layout while they are loaded? Else they stay as on disk:
    PyTorch's compiler takes them so, and a CPU's compile_steps() packs them itself."""
    if engine == "torch_compile" or engine == "compile" and torch.device(device).type == "cpu":
        return False
    return bool(describe(source))


# ---- Weights that are kept ----------------------------------------------------------------------

def cache_key(source: Checkpoint, dtype: torch.dtype, device: torch.device,
           packed: bool) -> str | None:
    """None where they are not kept: on a GPU, of several ranks, of random numbers, adapted, or in a
    cache that is not to be used."""
    tensors = source.tensors.values()
    if device.type != "cpu" or tp.world() > 1 or any(t.read_rows is None for t in tensors):
        return None
    if source.adapter or source.quantization and source.quantization.get("gptq"):
        return None
    if not disk.trusted_cache():
        return None
    asked = [(t.name, t.shape, str(t.dtype)) for t in tensors]
    files = [content(path) for path in files_of(source.path)]
    try:
        makers = code()
    except (OSError, TypeError):                   # a function of a user's, without source code
        return None
    return disk.digest(repr((files, repr(source.cfg), asked, source.quantization, str(dtype),
                             packed, torch.backends.cpu.get_cpu_capability(), torch.__version__,
                             makers)))


def files_of(path: Path) -> list[Path]:
    """Those that hold weights."""
    if path.suffix in SUFFIXES:
        return [path]
    folder = path if path.is_dir() else path.parent
    return sorted(p for p in folder.iterdir() if p.suffix in SUFFIXES)


def content(path: Path) -> str:
    """A digest of the file's content, read anew only if the file was changed since."""
    stat = path.stat()
    cache = disk.trusted_cache()
    known = cache / "contents.json" if cache else None
    state = [str(path.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
    try:
        digests = json.loads(known.read_text()) if known and disk.is_trusted(known) else {}
    except (OSError, ValueError):
        digests = {}
    entry = digests.get(state[0]) if isinstance(digests, dict) else None
    if isinstance(entry, list) and entry[:-1] == state[1:]:
        return str(entry[-1])
    sha256 = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            sha256.update(piece)
    if known:
        disk.replace(known, json.dumps({**digests, state[0]: [*state[1:], sha256.hexdigest()]}))
    return sha256.hexdigest()


def code() -> str:
    """A digest of all code that makes the weights: reads, folds, rounds and packs them.

    OSError or TypeError where what is in its place has no source code, or is no function.
    """
    return digest(load_shard) + digest_with_imports(reading, quantized)
