"""Loads a model of any format for the fast kernels: used by the commands, the server and Python.

On a CPU, weights that took long to prepare (dequantized from a GGUF, quantized while loading) are
cached for the next start. Owns the cache key: the files' content, the options, and the code that
prepares weights. generate.load_model() reads the core's formats only, with the core's plain layers.

    model, source, tokenizer = load_model("model.gguf", "cpu", torch.bfloat16)
    steps = gpt_faster.kernels.compile.compile_steps(model)
"""

import glob
import hashlib
import json
import re
import threading
import time
from importlib import metadata
from pathlib import Path

import torch

import tp
from checkpoint import Checkpoint, brief
from gpt_faster.formats import load as reading
from gpt_faster.formats import quantize_on_load
from gpt_faster.formats.known_shapes import random_checkpoint
from gpt_faster.formats.load import open_checkpoint
from gpt_faster.kernels.cuda.attention import use_fused_attention
from gpt_faster.kernels.digest import digest, digest_with_imports
from gpt_faster.layers.dflash import DFlash
from gpt_faster.layers.eagle3 import Eagle3
from gpt_faster.layers.quantized_cache import CacheFormat
from gpt_faster.storage import disk, weight_cache
from gpt_faster.text.tokenizer_files import load_for
from model import Transformer
from quantize import describe
from tokenizer import NullTokenizer

MIN_SAVE_SECONDS = 0.5                             # cache weights that took longer to prepare
ENGINES = ("compile", "torch_compile", "kv_cache")  # those that load_model() knows
SUFFIXES = (".gguf", ".safetensors", ".bin", ".pth", ".pt")


def load_model(path: str | None = None, device="cpu", dtype: torch.dtype = torch.bfloat16,
               scheme: str | None = None, head: str = "int8", adapter: str | None = None,
               engine: str = "compile", kv_cache: str | None = None) -> tuple:
    """A path or hub name, None for the default model -> model, checkpoint, tokenizer.

    scheme: quantize the weights while loading (int8, int4-g32, …); head: the output layer's scheme
    (int8, int4, none). adapter: a LoRA's path or hub name. engine: compile, torch_compile or
    kv_cache (eager), which decides the layout of quantized weights. kv_cache: int8, int4, fp8 or
    keys/values (int8/int4): quantize the cache that model.setup_cache() allocates.
    Raises FileNotFoundError, ValueError or OSError with a one-line message.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine is {brief(engine)}, expected one of {', '.join(ENGINES)}")
    source, tokenizer = open_model(path, adapter=adapter)
    cache_format = CacheFormat.parse(kv_cache) if kv_cache else None
    if cache_format:
        cache_format.check(source.cfg)
    if scheme:
        source = quantize_on_load.quantized(source, scheme, head=head, device=device)
    elif quantize_on_load.multiplies_fp4(engine, device):
        source = quantize_on_load.with_fp4(source)
    model = load(source, dtype, device, engine)
    model.kv_cache = cache_format
    return model, source, tokenizer


def open_model(path: str | None = None, shape: str | None = None, adapter: str | None = None):
    """A path or hub name, None for the default model, or a known shape -> checkpoint, tokenizer.

    Reads no weights yet. Raises as load_model().
    """
    if shape is not None and path is not None:
        raise ValueError("--random and --checkpoint_path exclude each other")
    if shape is not None and adapter is not None:
        raise ValueError("--random cannot be combined with --adapter: its weights are random")
    if shape is not None:
        return random_checkpoint(shape), NullTokenizer()
    source = open_checkpoint(path, adapter)
    return source, load_for(source)


def load(source: Checkpoint, dtype: torch.dtype, device, engine: str) -> Transformer:
    """This rank's shard of a model for this engine, through the weight cache."""
    packed = is_packed_for(engine, device, source)
    key = cache_key(source, dtype, torch.device(device), packed)
    cached = key and weight_cache.load(key)
    if cached:
        return reading.load_model(source, dtype, device, cached, packed)
    start = time.perf_counter()
    model = load_shard(source, dtype, device, engine)
    if key and time.perf_counter() - start > MIN_SAVE_SECONDS:
        tensors = dict(model.named_parameters(remove_duplicate=False))
        threading.Thread(target=weight_cache.save, args=(key, tensors)).start()
    return model


def load_shard(source, dtype: torch.dtype, device, engine: str) -> Transformer:
    """This rank's shard of a model for this engine, connected to the other ranks. Bypasses the
    weight cache.

    For torch_compile the layers are the core's, without our attention kernels.
    """
    packed = is_packed_for(engine, device, source)
    part = part_of_rank(source)
    model = reading.load_model(part, dtype, device, packed=packed)
    if engine != "torch_compile":
        use_fused_attention(model)
    return model if part is source else tp.parallelize(model, source.cfg.vocab_size)


def part_of_rank(source: Checkpoint) -> Checkpoint:
    """What this rank loads. Each has a whole EAGLE-3 or DFlash drafter: it is small, and what it
    reads and shares, the model's hidden states, embedding and output layer, is that of all ranks.
    """
    return source if issubclass(source.kind, Eagle3 | DFlash) else tp.shard(source)


def is_packed_for(engine: str, device, source: Checkpoint) -> bool:
    """Whether quantized weights are packed for a kernel while loading. Otherwise they keep the
    layout on disk: torch.compile uses that, and on a CPU compile_steps() packs them itself."""
    if engine == "torch_compile" or engine == "compile" and torch.device(device).type == "cpu":
        return False
    return bool(describe(source))


# ---- The key of cached weights ------------------------------------------------------------------

def cache_key(source: Checkpoint, dtype: torch.dtype, device: torch.device,
              packed: bool) -> str | None:
    """None if the weights are not cached: on a GPU, on several ranks, random weights, an adapter,
    GPTQ files, or no usable cache folder."""
    tensors = source.tensors.values()
    if device.type != "cpu" or tp.world() > 1 or any(t.read_rows is None for t in tensors):
        return None
    if source.adapter or source.quantization and source.quantization.get("gptq"):
        return None
    if not disk.trusted_cache():
        return None
    layout = [(t.name, t.shape, str(t.dtype)) for t in tensors]
    files = [file_digest(path) for path in weight_files(source.path)]
    versions = torch.__version__, metadata.version("gguf") if is_gguf(source.path) else None
    try:
        code = code_digest()
    except (OSError, TypeError):                   # replaced by a function without source code
        return None
    return disk.digest(repr((files, repr(source.cfg), layout, source.quantization, str(dtype),
                             packed, torch.backends.cpu.get_cpu_capability(), versions, code)))


def is_gguf(path: Path) -> bool:
    """Whether the gguf package dequantizes the weights, so that its version counts."""
    return any(file.suffix == ".gguf" for file in weight_files(path))


def weight_files(path: Path) -> list[Path]:
    """The files of a checkpoint that hold weights: of a shard or a part, the whole set's."""
    folder = path if path.is_dir() else path.parent
    if path.is_file() and not path.name.endswith(".index.json"):
        number = r"\d{5}(?=-of-\d{5}\.)|(?<=^consolidated\.)\d\d(?=\.)"
        return sorted(folder.glob(re.sub(number, "*", glob.escape(path.name))))
    return sorted(p for p in folder.iterdir() if p.suffix in SUFFIXES)


def files_stamp(source: Checkpoint) -> str:
    """A digest of the names, sizes and times of the weights' files, adapter included: it changes
    when a file is replaced, and costs no reading."""
    paths = weight_files(source.path) + (weight_files(source.adapter) if source.adapter else [])
    stats = [(path.name, path.stat()) for path in paths]
    return disk.digest(repr([(name, s.st_size, s.st_mtime_ns) for name, s in stats]))


def file_digest(path: Path) -> str:
    """A digest of the file's content, computed again only if the file changed."""
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
        while block := file.read(1 << 20):
            sha256.update(block)
    if known:
        entry = [*state[1:], sha256.hexdigest()]
        disk.write_atomically(known, json.dumps({**digests, state[0]: entry}))
    return sha256.hexdigest()


def code_digest() -> str:
    """A digest of all code that reads, folds, quantizes and packs weights.

    OSError or TypeError if one of the functions was replaced by something without source code.
    """
    return digest(load_shard) + digest_with_imports(reading, quantize_on_load)
