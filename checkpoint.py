"""Checkpoints: a path or hub name -> a model with its weights; and our own file, written.

In the order of the work, which is the order of this file:

    resolve    a path or a hub name -> where it lies, downloaded
    read       config.json and safetensors, or our .pth -> a config and lazy tensors
    rename     their parameter names -> ours, experts together
    check      names, shapes and dtypes; is the output layer the embedding?
    assign     into a model without memory, a few megabytes of a tensor at a time

It knows Llama, Mistral, Mixtral, Qwen2 and Qwen3. What a file states is acted on or refused, never
silently ignored. gpt_faster/formats/ adds families, file formats and quantized weights of others.
Nothing in a checkpoint is executed.

    source = open_checkpoint("org/name or path")
    model = load_model(source, torch.bfloat16, "cpu")
"""

import errno
import fcntl
import io
import json
import math
import os
import pickle
import re
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import BinaryIO
from weakref import WeakValueDictionary

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from model import ExpertLinear, ModelConfig, MoEConfig, Rope, Transformer
from quantize import LEAVES, Scheme, put_quantized_linears, scheme_at
from sampling import RANGES

CHUNK = 1 << 22                                    # elements in memory at a time, beside the model
LARGEST_TEXT = 1 << 28                             # bytes: ten times the longest tokenizer.json
DTYPES = dict(F64=torch.float64, F32=torch.float32, F16=torch.float16, BF16=torch.bfloat16,
              F8_E4M3=torch.float8_e4m3fn, F8_E5M2=torch.float8_e5m2, F8_E8M0=torch.float8_e8m0fnu,
              I64=torch.int64, I32=torch.int32, I16=torch.int16, I8=torch.int8, U64=torch.uint64,
              U32=torch.uint32, U16=torch.uint16, U8=torch.uint8, BOOL=torch.bool,
              C64=torch.complex64)


# ---- What errors quote, and small files ---------------------------------------------------------

class Unforeseen(Exception):
    """What no reader expected a file to do to it: damage of a new kind, or a mistake of ours."""


def first_line(e: Exception, longest: int = 160) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0][:longest]


def brief(value) -> str:
    """A value in a message: never long, never several lines."""
    if isinstance(value, int) and abs(value) >= 1 << 128:
        return "an integer of more than 128 bits"
    try:
        text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    except RecursionError:
        return "nested too deeply"
    return text if len(text) <= 80 else text[:77] + "…"


def some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (", …" if len(names) > 4 else "")


def is_out_of_memory(e: Exception) -> bool:
    return (isinstance(e, MemoryError | torch.OutOfMemoryError)
            or isinstance(e, RuntimeError | OSError) and "allocate memory" in str(e))


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Errors name the file: ValueError, OSError and ImportError in a line; any other is Unforeseen,
    but for a lack of memory.
    """
    try:
        yield
    except ValueError as e:
        if str(path) in str(e):
            raise
        raise ValueError(f"{path}: {first_line(e)}") from e
    except Exception as e:
        if isinstance(e, OSError | ImportError | Unforeseen) or is_out_of_memory(e):
            raise
        raise Unforeseen(f"{path}: an unforeseen {type(e).__name__} while it was read "
                         f"({first_line(e)}): the file is damaged in a way that we do not know, or "
                         "the mistake is ours; please report it") from e


def read_text(path: Path) -> str:
    """UTF-8. FileNotFoundError where it is no ordinary file (a device never ends), ValueError where
    it is too long or no text.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file" if not path.exists() else
                                f"{path}: expected a file, found something else")
    if (size := path.stat().st_size) > LARGEST_TEXT:
        raise ValueError(f"{path}: {size:,} bytes, expected at most {LARGEST_TEXT:,}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise ValueError(f"{path}: not UTF-8 text: {e.reason} at byte {e.start}") from None


def read_json(path: Path) -> dict:
    text = read_text(path)
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"{path}: not valid JSON (nested too deeply)") from None
    except ValueError as e:                        # integers of thousands of digits too
        raise ValueError(f"{path}: not valid JSON ({first_line(e)})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


# ---- Lazy tensors -------------------------------------------------------------------------------

@dataclass
class LazyTensor:
    """A tensor that is still on disk: its name, shape and dtype, and how to read rows [start, end).

    A row is an index of the first axis; of the first two, flattened, where there are more than two
    (experts [E, out, in] have E * out rows). read_rows is None for random weights, which `fill`
    draws into a tensor that is given. made_of: the tensors that read_rows reads. packed: where a
    file has quantized weights of its own (gpt_faster/formats/lazy.py).
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read_rows: Callable[[int, int], Tensor] | None         # (start, end) -> [end - start, *row]
    made_of: tuple["LazyTensor", ...] = ()
    fill: Callable[[Tensor], None] | None = None
    packed: object = None                          # None too where other numbers were made of it

    @property
    def n_row(self) -> int:
        return math.prod(self.shape[:2]) if len(self.shape) > 2 else math.prod(self.shape[:1])

    def derived(self, read_rows: Callable | None, **changes) -> "LazyTensor":
        """A tensor whose rows are made of this one's; what `changes` does not name stays."""
        read_rows = self.read_rows and read_rows
        new = LazyTensor(self.name, self.shape, self.dtype, read_rows, (self,), self.fill)
        return replace(new, **changes)

    def renamed(self, name: str) -> "LazyTensor":
        return self.derived(self.read_rows, name=name, packed=self.packed)

    def whole(self) -> Tensor:
        try:
            return self.read_rows(0, self.n_row).reshape(self.shape)
        finally:
            self.release()

    def chunks(self) -> Iterator[tuple[int, int, Tensor]]:
        """(start, end, rows) one after another, of at most CHUNK elements or one row each."""
        step = max(1, CHUNK * self.n_row // math.prod(self.shape))
        try:
            for start in range(0, self.n_row, step):
                end = min(start + step, self.n_row)
                yield start, end, self.read_rows(start, end)
        finally:
            self.release()

    def release(self) -> None:
        """Let go of what was kept in memory to read it."""
        for part in self.made_of:
            part.release()


def as_rows(t: Tensor) -> Tensor:
    """A tensor in the shape in which LazyTensor counts its rows."""
    if t.dim() > 2:
        return t.flatten(0, 1)
    return t.reshape(1) if t.dim() == 0 else t


def narrow(t: LazyTensor, axis: int, low: int, high: int) -> LazyTensor:
    """Indices [low, high) of an axis; reads little else."""
    n, each = t.shape[axis], t.n_row // t.shape[0]     # rows of one index of the first axis
    shape = (*t.shape[:axis], high - low, *t.shape[axis + 1:])

    def within_rows(a, b):
        return t.read_rows(a, b)[..., low:high]

    def some_rows(a, b):
        return t.read_rows(low * each + a, low * each + b)

    def some_of_each(a, b):
        return across_matrices(
            a, b, high - low, lambda i, a, b: t.read_rows(i * n + low + a, i * n + low + b))
    if axis == max(1, len(shape) - 1):
        return t.derived(within_rows, shape=shape)
    return t.derived(some_rows if axis == 0 else some_of_each, shape=shape)


def across_matrices(a: int, b: int, n: int, read: Callable[[int, int, int], Tensor]) -> Tensor:
    """Rows [a, b) of matrices with n rows each, from read(i, low, high): those of the i-th."""
    pieces = []
    while a < b:
        i, low = divmod(a, n)
        high = min(n, low + b - a)
        pieces.append(read(i, low, high))
        a += high - low
    return torch.cat(pieces)


def stack(pieces: list[LazyTensor]) -> LazyTensor:
    """One tensor [E, *shape] of E of the same shape."""
    first = pieces[0]
    shape = (len(pieces), *first.shape)

    def vectors(a, b):
        return torch.stack([p.whole() for p in pieces[a:b]])

    def matrices(a, b):
        return across_matrices(
            a, b, first.shape[0], lambda i, low, high: pieces[i].read_rows(low, high))
    read_rows = vectors if len(shape) == 2 else matrices
    return LazyTensor(first.name, shape, first.dtype, read_rows, tuple(pieces))


def check_finite(rows: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """Rows of weights in another dtype. ValueError where they hold what is infinite or no number.
    """
    new = rows.to(dtype)
    if not dtype.is_floating_point or dtype.itemsize < 2 or new.isfinite().all():
        return new
    if not rows.isfinite().all():
        raise ValueError(f"{name} has NaN or infinite weights")
    largest = rows.abs().max().item()
    raise ValueError(f"{name} has weights up to {largest:.3g}, above {str(dtype)[6:]}'s range: use "
                     "--dtype bfloat16")


# ---- What a path holds --------------------------------------------------------------------------

@dataclass
class RawCheckpoint:
    """What a reader finds: tensors by the names in the file, as they lie there."""

    path: Path
    cfg: ModelConfig
    tensors: list[LazyTensor]
    names: dict | None                             # their names: ours; None: they are ours
    eos_ids: list[int] = field(default_factory=list)
    defaults: dict = field(default_factory=dict)
    tokenizer: Path | dict | None = None
    quantization: dict | None = None
    kind: type = Transformer


@dataclass
class Checkpoint:
    """A model's config and its tensors by our names, as the model takes them; none is read yet."""

    path: Path
    cfg: ModelConfig
    tensors: dict[str, LazyTensor]
    eos_ids: list[int] = field(default_factory=list)
    defaults: dict = field(default_factory=dict)   # sampling values of generation_config.json
    tokenizer: Path | dict | None = None           # what tokenizer.load() takes
    quantization: dict | None = None               # how, for people; the tensors say what
    kind: type = Transformer                       # the class of the model
    adapter: Path | None = None                    # whose changes they have (formats/lora.py)
    mtp: "Callable[[], Checkpoint] | None" = None  # opens its head that drafts (formats/mtp.py)


# ---- A path or a hub name -> where it lies ------------------------------------------------------

WANTED = ["*.safetensors", "*.json", "tokenizer.model"]
UNWANTED = ["original/*", "onnx/*", "*/*.safetensors", "consolidated*"]


@contextmanager
def hub_errors(repo_id: str) -> Iterator[None]:
    """ValueError or OSError say in one line what went wrong with the hub and what to do."""
    from huggingface_hub import errors
    try:
        yield
    except errors.GatedRepoError:                  # before RepositoryNotFound, its parent
        problem = (f"{repo_id} is gated: accept its licence at huggingface.co/{repo_id}, then run "
                   "`hf auth login` or set HF_TOKEN")
    except errors.RepositoryNotFoundError:
        problem = (f"the hub has no {repo_id}, or it is private: check the name, or run "
                   "`hf auth login` or set HF_TOKEN")
    except errors.HFValidationError:
        problem = f"'{repo_id}' is not a hub name: expected org/name"
    except errors.HfHubHTTPError as e:
        refused = e.response is not None and e.response.status_code in (401, 403)
        problem = f"the hub failed on {repo_id}, try again later: {first_line(e)}"
        if refused:
            problem = (f"the hub refused the token for {repo_id}: run `hf auth login` again, "
                       "or unset HF_TOKEN")
    except Exception as e:                         # its HTTP library has kinds of its own
        if getattr(e, "errno", None) == errno.ENOSPC:
            raise OSError(f"the disk is full while downloading {repo_id}: free some space, or set "
                          "HF_HOME to another disk; running it again resumes") from None
        problem = (f"{repo_id} is not in the local cache and the hub cannot be reached: check the "
                   "network and HF_HUB_OFFLINE, or give a path "
                   f"({type(e).__name__}: {first_line(e)})")
    else:
        return
    raise ValueError(problem)


def download(repo_id: str) -> Path:
    """Fetch what we read of a hub repository (huggingface_hub shows its progress) -> its directory.

    ValueError or OSError as hub_errors().
    """
    from huggingface_hub import snapshot_download
    with hub_errors(repo_id):
        return Path(snapshot_download(repo_id, allow_patterns=WANTED, ignore_patterns=UNWANTED))


def resolve(name: str, fetch: Callable[[str], Path] = download) -> Path:
    """A path, which wins, or a hub name, which fetch() downloads.

    FileNotFoundError names both readings.
    """
    if not name.strip():
        raise ValueError("a path or name is empty: an unset variable?")
    path = Path(name).expanduser()
    if path.exists():
        return path
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name):
        raise FileNotFoundError(f"{name}: no such file or directory "
                                "(nor is it a hub name, org/name)")
    try:
        return fetch(name)
    except (ValueError, OSError) as e:
        raise FileNotFoundError(f"{name}: no such file or directory; "
                                f"read as a hub name: {e}") from None


def output_path(path: Path, name: str) -> Path:
    """Where to write what is made of `path`: in its directory, or in checkpoints/ for what the
    hub's cache holds (…/models--org--name/snapshots/revision)."""
    directory = path if path.is_dir() else path.parent
    if directory.parent.name == "snapshots":
        directory = Path("checkpoints", *directory.parent.parent.name.split("--")[1:])
    return directory / name


# ---- Files of tensors ---------------------------------------------------------------------------

def read_safetensors(path: Path) -> list[LazyTensor]:
    """Its tensors; slices of them are read when their rows are asked for."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        file = safe_open(path, framework="pt")
    except SafetensorError as e:
        raise ValueError(f"{path}: not a readable safetensors file (truncated?): {e}") from None

    return [_sliced(name, file.get_slice(name)) for name in file.keys()]


def _sliced(name: str, piece) -> LazyTensor:
    shape = tuple(piece.get_shape())

    def scalar(a, b):
        return piece[...].reshape(1)

    def rows(a, b):
        return piece[a:b]

    def rows_of_matrices(a, b):                    # slices do not cross the first axis
        return across_matrices(a, b, shape[1], lambda i, low, high: piece[i:i + 1, low:high][0])
    if len(shape) > 2:
        rows = rows_of_matrices
    read_rows = rows if shape else scalar
    if piece.get_dtype() not in DTYPES:
        raise ValueError(f"{name} is of {piece.get_dtype()}, which is not supported")
    return LazyTensor(name, shape, DTYPES[piece.get_dtype()], read_rows)


def read_torch(path: Path, mmap: bool = True) -> dict:
    """A PyTorch file, memory-mapped; never executes what is in it."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        value = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as e:
        raise ValueError(f"{path}: refused, it holds more than weights "
                         f"({first_line(e)})") from None
    except Exception as e:                         # a damaged pickle makes it raise anything
        if isinstance(e, OSError) and e.filename:  # not found, not allowed
            raise
        raise ValueError(f"{path}: not a readable PyTorch file (truncated?): "
                         f"{type(e).__name__}: {first_line(e)}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a dictionary of tensors, found {type(value).__name__}")
    return value


def lazy_tensors(tensors: dict) -> list[LazyTensor]:
    """Of a dictionary as read_torch() gives it: what is not a tensor is left out.

    ValueError where there is none, or where one is said to be larger than its bytes.
    """
    if not isinstance(tensors, dict):
        raise ValueError(f"expected a dictionary of tensors, found {type(tensors).__name__}")
    named = {n: t for n, t in tensors.items() if isinstance(t, Tensor) and isinstance(n, str)}
    for name, t in named.items():
        if t.layout != torch.strided or t.device.type != "cpu" or t.is_quantized:
            raise ValueError(f"{name} is {t.layout}, on {t.device}: expected plain numbers")
        if t.numel() * t.itemsize > t.untyped_storage().nbytes():
            raise ValueError(f"{name} is said to be {list(t.shape)}, but its storage has "
                             f"{t.untyped_storage().nbytes():,} bytes")
    return [LazyTensor(n, tuple(t.shape), t.dtype, lambda a, b, t=t: as_rows(t)[a:b])
            for n, t in named.items()]


def hub_tensors(directory: Path, name: str,
                read: Callable[[Path], list[LazyTensor]] = read_safetensors) -> list[LazyTensor]:
    """Every tensor of a file, or of the shards that an index lists; read() knows the files."""
    shards = _shards(directory / name) if name.endswith(".index.json") else [name]
    tensors = []
    for shard in shards:
        path = directory / shard
        if not path.is_file():
            raise FileNotFoundError(f"{path}: listed in {name} but not there: download it again")
        tensors += read(path)
    return tensors


def _shards(index: Path) -> list[str]:
    """The files that an index lists, which lie where it lies. Links among them are followed, as the
    hub's cache consists of such.
    """
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ValueError(f"{index}: 'weight_map' is {brief(listed)}, expected tensors and files")
    for shard in listed.values():
        if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", ".", ".."):
            raise ValueError(f"{index}: {brief(shard)} is no name of a file beside it")
    return sorted(set(listed.values()))


# ---- generation_config.json ---------------------------------------------------------------------

SAMPLING = {name: allowed for name, allowed in RANGES.items()
            if name not in ("seed", "top_n_sigma")}        # what transformers reads
GREEDY_TOO = ("repetition_penalty",)               # the others are for sampling: do_sample
# What transformers acts on and we do not, but for these values, which change nothing
NEUTRAL = dict(
    min_length=0, min_new_tokens=0, num_beams=1, typical_p=1, epsilon_cutoff=0, eta_cutoff=0,
    encoder_repetition_penalty=1, no_repeat_ngram_size=0, encoder_no_repeat_ngram_size=0,
    bad_words_ids=None, force_words_ids=None, forced_bos_token_id=None, forced_eos_token_id=None,
    exponential_decay_length_penalty=None, suppress_tokens=None, begin_suppress_tokens=None,
    sequence_bias=None, guidance_scale=1, penalty_alpha=0, stop_strings=None, dola_layers=None,
    top_h=None, watermarking_config=None)


def generation_defaults(directory: Path, *configs: dict) -> tuple[list[int], dict]:
    """End-of-sequence ids of all config files, and how the model's authors sample from it."""
    path = directory / "generation_config.json"
    generation = {}
    if path.exists():
        try:
            generation = read_json(path)
        except ValueError as e:                    # some on the Hub are broken; they are optional
            print(f"note: ignored: {e}", file=sys.stderr)
    ids = []
    for config in (generation, *configs):
        stated = config.get("eos_token_id")
        stated = stated if isinstance(stated, list) else [stated]
        found = [i for i in stated if type(i) is int and 0 <= i < 1 << 31]
        if odd := [i for i in stated if i not in (*found, None, -1)]:
            print(f"note: ignored: 'eos_token_id' is {brief(odd[0])}", file=sys.stderr)
        ids += found
    acted_on = SAMPLING if generation.get("do_sample") else GREEDY_TOO
    stated = {k: generation[k] for k in acted_on if generation.get(k) is not None}
    defaults = sampling_values(stated)
    ignored = {k for k, neutral in NEUTRAL.items() if generation.get(k) not in (None, [], neutral)}
    if ignored := ignored | set(stated) - set(defaults):
        print(f"note: ignored in {path}: {', '.join(sorted(ignored))}", file=sys.stderr)
    if generation.get("do_sample") is False:
        defaults["temperature"] = RANGES["temperature"].kind(0)
    return list(dict.fromkeys(ids)), defaults


def sampling_values(stated: dict) -> dict:
    """Those of a model's sampling values that are in their range."""
    values = {}
    for name, value in stated.items():
        if name in SAMPLING:
            with suppress(ValueError):
                values[name] = SAMPLING[name].of(value)
    return values


# ---- Their names -> ours ------------------------------------------------------------------------

@dataclass(frozen=True)
class Fused:
    """One tensor on disk that holds several parameters, equal shares of its outputs."""

    into: tuple[str, ...]

    def pieces(self, t: LazyTensor, cfg: ModelConfig) -> list[LazyTensor]:
        """One for each of `into`. ValueError where the tensor cannot hold them."""
        if len(self.into) == 1:
            return [t]
        axis, n = max(0, len(t.shape) - 2), len(self.into)
        if t.shape[axis] % n:
            raise ValueError(f"{t.name} is {list(t.shape)}, but it is to hold {n} parameters")
        size = t.shape[axis] // n
        return [narrow(t, axis, i * size, (i + 1) * size) for i in range(n)]


# A parameter is layers.{i}.{name}.weight or, outside the layers, {name}.weight; a name that ends in
# neither weight nor bias stands whole. Experts' numbers are written as *.
HF_NAMES = {
    "embed_tokens": "embed", "norm": "norm", "lm_head": "head",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn.wq", "self_attn.k_proj": "attn.wk", "self_attn.v_proj": "attn.wv",
    "self_attn.o_proj": "attn.wo",
    "self_attn.q_norm": "attn.q_norm", "self_attn.k_norm": "attn.k_norm",
    "mlp.gate_proj": "ffn.gate", "mlp.up_proj": "ffn.up", "mlp.down_proj": "ffn.down",
}
MIXTRAL_NAMES = {
    "block_sparse_moe.gate": "ffn.router", "block_sparse_moe.experts.*.w1": "ffn.gate",
    "block_sparse_moe.experts.*.w3": "ffn.up", "block_sparse_moe.experts.*.w2": "ffn.down",
}
QWEN_MOE_NAMES = {
    "mlp.gate": "ffn.router", "mlp.experts.*.gate_proj": "ffn.gate",
    "mlp.experts.*.up_proj": "ffn.up", "mlp.experts.*.down_proj": "ffn.down",
    "mlp.experts.gate_up_proj": Fused(("ffn.gate.weight", "ffn.up.weight")),
    "mlp.experts.down_proj": "ffn.down.weight",
}
NOT_WEIGHTS = re.compile(r"rotary_emb\.inv_freq$")
# in memory: on disk. Those after the second are of gpt_faster/layers/.
FUSED = {"wqkv": ("wq", "wk", "wv"), "gate_up": ("gate", "up"), "qkv": ("q", "k", "v"),
         "conv": ("conv_q", "conv_k", "conv_v"), "rates": ("beta", "decay"),
         "wbcx": ("wb", "wc", "wx"), "wqkv_a": ("wq_a", "wkv_a"), "wq_kv_a": ("wq", "wkv_a")}


def rename(tensors: list[LazyTensor], table: dict, cfg: ModelConfig) -> dict[str, LazyTensor]:
    """By our names, fused ones apart, experts together. ValueError names what we do not know.

    table: their name -> ours, or what is Fused.
    """
    found, unknown, twice = {}, [], []
    for t in tensors:
        if NOT_WEIGHTS.search(t.name):
            continue
        entry = look_up(t.name, table)
        if entry is None:
            unknown.append(t.name)
            continue
        prefix, expert, fused = entry
        for name, piece in zip(fused.into, fused.pieces(t, cfg)):
            experts = found.setdefault(prefix + name, {})
            twice += [t.name] if expert in experts else []
            experts[expert] = piece
    if unknown:
        raise ValueError(f"{len(unknown)} tensors that this architecture does not have: "
                         f"{some(unknown)}")
    if twice:
        raise ValueError(f"{len(twice)} tensors are there twice: {some(twice)}")
    return {name: _together(name, experts) for name, experts in found.items()}


def look_up(name: str, table: dict) -> tuple[str, int, Fused] | None:
    """Their parameter name -> the layer's prefix, the expert's number, and what it holds.

    None where the table has no such parameter. layers.3.mlp.experts.7.up_proj.weight ->
    "layers.3.", 7, Fused(("ffn.up.weight",)).
    """
    name = bare(name)
    match = re.fullmatch(r"(?:layers|blk|h|blocks)\.(\d+)\.(.+)", name)
    prefix, inner = (f"layers.{match[1]}.", match[2]) if match else ("", name)
    expert = re.search(r"(?<=\.)(\d+)(?=\.)", inner)
    if expert:
        inner = f"{inner[:expert.start()]}*{inner[expert.end():]}"
    stem, _, kind = inner.rpartition(".")          # kind: weight | bias
    if prefix and f"layers.*.{stem}" in table:     # a name that means something else outside
        stem = f"layers.*.{stem}"
    entry, end = (table[inner], "") if inner in table else (table.get(stem), f".{kind}")
    if entry is None:
        return None
    entry = entry if isinstance(entry, Fused) else Fused((entry,))
    entry = replace(entry, into=tuple(n + end for n in entry.into))
    return prefix, int(expert[1]) if expert else -1, entry


def bare(name: str) -> str:
    """Without the names of the modules around the text model's."""
    around = "model|language_model|text_model|transformer|gpt_neox|decoder|_orig_mod"
    return re.sub(rf"^(({around})\.)+", "", name)


def layer_of(name: str) -> int:
    """-1 outside the layers."""
    match = re.match(r"(?:layers|blk)\.(\d+)\.", bare(name))
    return int(match[1]) if match else -1


def _together(name: str, experts: dict[int, LazyTensor]) -> LazyTensor:
    """The tensor itself, under -1, or one of all experts' tensors."""
    if -1 in experts:
        return experts[-1]
    if max(experts) >= len(experts):
        raise ValueError(f"{name}: {len(experts)} experts, numbered up to {max(experts)}")
    pieces = [experts[i] for i in sorted(experts)]
    for piece in pieces:
        if piece.shape != pieces[0].shape:
            raise ValueError(f"{piece.name} is {list(piece.shape)}, unlike the others' "
                             f"{list(pieces[0].shape)}")
    return stack(pieces)


def disk_names(name: str) -> list[str]:
    """The parameters on disk that make up one in memory: ….wqkv.weight -> ….wq.weight, …"""
    for fused, pieces in FUSED.items():
        if f".{fused}." in f"{name}.":
            return [name.replace(f".{fused}", f".{piece}") for piece in pieces]
    return [name]


# ---- config.json -> ModelConfig -----------------------------------------------------------------

MORE = "gpt-faster's full tree (gpt_faster/formats/) reads it"


@dataclass(frozen=True)
class Family:
    """How a model_type differs from Llama."""

    overrides: dict = field(default_factory=dict)      # ModelConfig's fields, which it never states
    defaults: dict = field(default_factory=dict)   # config.json keys that it may leave out
    names: dict = field(default_factory=dict)      # parameter names that it adds or means otherwise
    is_sliding: Callable[[dict, int], bool] = lambda c, i: False   # layer i's attention windowed?
    is_sparse: Callable[[dict, int], bool] = lambda c, i: False    # layer i a mixture of experts?
    reads_layer_types: Callable[[dict], bool] = lambda c: False    # else its own rule says which


def always(c: dict, i: int) -> bool:
    return True


def use_sliding_window(c: dict) -> bool:
    return flag(c, "use_sliding_window")


def qwen_is_sliding(c: dict, i: int) -> bool:
    return use_sliding_window(c) and i >= number(c, "max_window_layers", 28)


def qwen_is_sparse(c: dict, i: int) -> bool:
    dense = c.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ValueError(f"'mlp_only_layers' is {brief(dense)}, expected a list of layers")
    return i not in dense and (i + 1) % count(c, "decoder_sparse_step", 1) == 0


# A Llama-like family is one row. As transformers' configs, whose defaults these are.
FAMILIES = {
    "llama": Family(),
    "mistral": Family(defaults=dict(sliding_window=4096, num_key_value_heads=8,
                                    max_position_embeddings=131072), is_sliding=always,
                      reads_layer_types=lambda c: True),
    "mixtral": Family(
        defaults=dict(rope_theta=1e6, num_key_value_heads=8, num_experts=8,
                      num_experts_per_tok=2, max_position_embeddings=131072, rms_norm_eps=1e-5),
        names=MIXTRAL_NAMES, is_sliding=always, is_sparse=always),
    "qwen2": Family(overrides=dict(qkv_bias=True, o_bias=False),
                    defaults=dict(sliding_window=4096, num_key_value_heads=32,
                                  max_position_embeddings=32768),
                    is_sliding=qwen_is_sliding, reads_layer_types=use_sliding_window),
    "qwen3": Family(overrides=dict(qk_norm=True),
                    defaults=dict(sliding_window=4096, num_key_value_heads=32, head_dim=128,
                                  max_position_embeddings=32768),
                    is_sliding=qwen_is_sliding, reads_layer_types=use_sliding_window),
    "qwen3_moe": Family(
        overrides=dict(qk_norm=True),
        defaults=dict(sliding_window=4096, num_key_value_heads=4, num_experts=128,
                      num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=False,
                      max_position_embeddings=32768),
        names=QWEN_MOE_NAMES, is_sparse=qwen_is_sparse,
        is_sliding=lambda c, i: use_sliding_window(c)),
}
KEY_ALIASES = {"num_local_experts": "num_experts", "experts_per_token": "num_experts_per_tok",
               "n_routed_experts": "num_experts", "num_shared_experts": "n_shared_experts"}
KINDS_OF_ATTENTION = ("full_attention", "sliding_attention")   # as `rope_parameters` names them
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
NOT_READ = (                                       # which ask for what a Llama does not have
    "alibi attention_multiplier attn_logit_softcapping clip_qkv conv_layers embedding_multiplier "
    "final_logit_softcapping kv_lora_rank layer_rope_theta logits_scaling n_shared_experts "
    "no_rope_layers qk_layernorm query_pre_attn_scalar residual_multiplier rope_local_base_freq "
    "per_layer_config routed_scaling_factor scale_depth scale_emb "
    "shared_expert_intermediate_size transformers_weights use_bidirectional_attention "
    "use_expert_bias use_parallel_residual use_post_norm use_qk_norm "
    "quantization_config compression_config").split()


class Stated(dict):
    """What a config.json states."""

    def __missing__(self, key):
        raise ValueError(f"config.json has no '{key}'")


def config_from_hf(config: dict) -> tuple[ModelConfig, Family]:
    """config.json as math. ValueError names a problem: a key is acted on or refused."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(f"model_type {brief(kind)} is none of {', '.join(FAMILIES)}: "
                         "gpt-faster's full tree (gpt_faster/formats/) reads more")
    family = FAMILIES[kind]
    c = filled(config, family.defaults)
    if refused := [key for key in NOT_READ if c.get(key)]:
        raise ValueError(f"'{refused[0]}' is not supported here: {MORE}")
    check_attention(c, family)
    rope = stated_rope(c)
    for place in (c, rope, *(part for part in rope.values() if isinstance(part, dict))):
        for key in ("partial_rotary_factor", "llama_4_scaling_beta"):
            if place.get(key) not in (None, 0, 1):
                raise ValueError(f"'{key}' is not supported here: {MORE}")
    activation(c, {"silu": "silu"})
    facts = {**sizes(c), **biases(c)}
    if facts["head_dim"] % 2:
        raise ValueError(f"heads of {facts['head_dim']} numbers, expected an even number")
    facts |= layers(c, family, {kind: Rope(**facts) for kind, facts in ropes(c).items()})
    if any(facts["sparse"]):
        facts["moe"] = MoEConfig(**experts(c))
    return ModelConfig(**{**facts, **family.overrides}), family


def check_attention(c: dict, family: Family) -> None:
    """ValueError where it is not causal, or where transformers takes no notice of 'layer_types'."""
    if not flag(c, "is_causal", True):
        raise ValueError("'is_causal' is false: a model that sees what follows writes no text")
    stated = c.get("layer_types")
    if isinstance(stated, list) and not family.reads_layer_types(c):
        own_rule = [bool(family.is_sliding(c, i)) for i in range(len(stated))]
        if own_rule != [kind == "sliding_attention" for kind in stated]:
            raise ValueError("'layer_types' is not what layers of this model_type are, by its "
                             "'sliding_window' and 'use_sliding_window'")


def filled(config: dict, defaults: dict, aliases: dict = KEY_ALIASES) -> Stated:
    """config.json with one name for each thing, and what the family's may leave out."""
    c = {aliases.get(key, key): value for key, value in config.items()}
    if c.get("rope_parameters") is None:           # null: not stated
        c.pop("rope_parameters", None)
    return Stated({"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, **defaults, **c})


def count(c: dict, key: str, default: int | None = None) -> int:
    value = default if c.get(key) is None else c[key]
    if value is None:
        raise ValueError(f"config.json has no '{key}'")
    if type(value) is not int or not 1 <= value < 1 << 31:
        raise ValueError(f"'{key}' is {brief(value)}, expected a positive integer")
    return value


def number(c: dict, key: str, default: float | None = None, least: float = -1e30) -> float:
    value = default if c.get(key) is None else c[key]
    if type(value) not in (int, float) or not least <= value < 1e30:
        expected = "a number" if least < 0 else f"a number of at least {least:g}"
        raise ValueError(f"'{key}' is {brief(value)}, expected {expected}")
    return float(value)


def flag(c: dict, key: str, default: bool = False) -> bool:
    value = default if c.get(key) is None else c[key]
    if value not in (True, False):
        raise ValueError(f"'{key}' is {brief(value)}, expected true or false")
    return bool(value)


def sizes(c: dict) -> dict:
    dim, n_head = count(c, "hidden_size"), count(c, "num_attention_heads")
    n_kv_head = count(c, "num_key_value_heads", n_head)
    if n_head > dim:
        raise ValueError(f"{n_head} attention heads for a width of {dim}")
    if n_head % n_kv_head:
        raise ValueError(f"{n_head} attention heads cannot share {n_kv_head} key/value heads "
                         "evenly")
    return dict(dim=dim, n_layer=count(c, "num_hidden_layers"), n_head=n_head,
                n_kv_head=n_kv_head, head_dim=count(c, "head_dim", dim // n_head),
                ffn_dim=count(c, "intermediate_size"), vocab_size=count(c, "vocab_size"),
                norm_eps=number(c, "rms_norm_eps", least=0), tied=flag(c, "tie_word_embeddings"))


def biases(c: dict) -> dict:
    bias = flag(c, "attention_bias")
    return dict(qkv_bias=flag(c, "qkv_bias", bias), o_bias=flag(c, "attention_out_bias", bias),
                mlp_bias=flag(c, "mlp_bias"))


def activation(c: dict, known: dict[str, str]) -> str:
    """known: transformers' name -> ours."""
    name = c.get("hidden_activation") or c.get("hidden_act") or "silu"
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"activation {brief(name)} is not supported (supported: "
                         f"{', '.join(known)})")
    return known[name]


def experts(c: dict) -> dict:
    n_expert, n_active = count(c, "num_experts"), count(c, "num_experts_per_tok")
    if n_active > n_expert:
        raise ValueError(f"{n_active} active of {n_expert} experts")
    return dict(n_expert=n_expert, n_active=n_active,
                expert_dim=count(c, "moe_intermediate_size", count(c, "intermediate_size")),
                norm_topk_prob=flag(c, "norm_topk_prob", True))


def layers(c: dict, family: Family, ropes: dict[str, Rope]) -> dict:
    """What may differ by layer: RoPE, window, experts; and the context that RoPE reaches.

    ropes: by the kinds that `layer_types` may name.
    """
    n = count(c, "num_hidden_layers")
    kinds = layer_kinds(c, family)
    if not isinstance(kinds, list) or set(kinds) - set(ropes) or len(kinds) != n:
        raise ValueError(f"'layer_types' is not {n} times one of {', '.join(ropes)}")
    window = count(c, "sliding_window") if c.get("sliding_window") else None
    windows = [window if kind == "sliding_attention" else None for kind in kinds]
    rope = [ropes[kind] for kind in kinds]
    stretched = [int(r.factor * r.original_context) for r in rope if r.kind in ("dynamic", "yarn")]
    return dict(context=max([count(c, "max_position_embeddings"), *stretched]), rope=tile(rope),
                window=tile(windows), sparse=tile([family.is_sparse(c, i) for i in range(n)]))


def layer_kinds(c: dict, family: Family) -> list[str]:
    return c.get("layer_types") or [KINDS_OF_ATTENTION[bool(family.is_sliding(c, i))]
                                    for i in range(count(c, "num_hidden_layers"))]


def tile(values: list) -> tuple:
    """The shortest tuple that, repeated, gives these: one where all layers are alike."""
    return tuple(values[:1] if len(set(values)) == 1 else values)


def stated_rope(c: dict) -> dict:
    """`rope_scaling` (before transformers 5), else `rope_parameters`: as transformers reads them.

    Where both are there, of which the first was added by hand, it stands in for the second; beside
    `rope_parameters` by layer type it is part of those of full attention. ValueError where
    transformers would lose what the second one says of RoPE's base.
    """
    scaling, parameters = c.get("rope_scaling") or {}, c.get("rope_parameters") or {}
    for key, value in (("rope_scaling", scaling), ("rope_parameters", parameters)):
        if not isinstance(value, dict):
            raise ValueError(f"'{key}' is {brief(value)}, expected an object")
    if not scaling or not parameters:
        return scaling or parameters
    if is_by_kind(parameters) and not is_by_kind(scaling):
        full = parameters.get("full_attention") or {}
        return {**parameters, "full_attention": {**full, **scaling}}
    for key, default in (("rope_theta", 10000.0), ("partial_rotary_factor", 1.0)):
        inner, outer = parameters.get(key), c.get(key) or default
        if inner is not None and scaling.get(key) is None and inner != outer:
            raise ValueError(f"'rope_scaling' stands in for 'rope_parameters' and has no '{key}', "
                             f"which is {brief(inner)} there: add it to 'rope_scaling'")
    return scaling


def is_by_kind(rope: dict) -> bool:
    return any(kind in rope for kind in KINDS_OF_ATTENTION)


def rope_kind(rope: dict) -> str:
    return rope.get("rope_type") or rope.get("type") or "default"


def rope_facts(c: dict, rope: dict, theta: float, kinds: tuple[str, ...] = ROPE_KINDS) -> dict:
    """Rope's fields, from `rope_parameters` (transformers 5) or `rope_scaling` (before).

    kinds: what is supported, in an error's words.
    """
    kind, theta = rope_kind(rope), number(rope, "rope_theta", theta)
    if kind not in ROPE_KINDS:
        raise ValueError(f"RoPE scaling {brief(kind)} is not supported (supported: "
                         f"{', '.join(kinds)})")
    if not theta > 1:
        raise ValueError(f"'rope_theta' is {theta}, expected a number above 1")
    longest = count(c, "max_position_embeddings")
    original = count(c, "original_max_position_embeddings",
                     count(rope, "original_max_position_embeddings", longest))
    facts = dict(theta=theta, original_context=longest if kind == "dynamic" else original)
    if kind == "default":
        return facts
    if kind != "yarn" and not rope.get("factor"):
        raise ValueError(f"RoPE scaling '{kind}' has no 'factor'")
    factor = number(rope, "factor", longest / original)
    if not factor > 0:
        raise ValueError(f"RoPE's 'factor' is {factor}, expected a number above 0")
    facts |= dict(kind=kind, factor=factor)
    if kind == "llama3":
        low, high = number(rope, "low_freq_factor", 1), number(rope, "high_freq_factor", 4)
        if not high > low:
            raise ValueError(f"RoPE's 'high_freq_factor' is {high}, expected one above {low}, "
                             "the 'low_freq_factor'")
        facts |= dict(low_freq_factor=low, high_freq_factor=high)
    if kind == "yarn":
        facts |= dict(amplitude=yarn_amplitude(rope, factor),
                      low_freq_factor=number(rope, "beta_slow", 1),
                      high_freq_factor=number(rope, "beta_fast", 32),
                      truncate=bool(rope.get("truncate", True)))
    return facts


def ropes(c: dict, facts: Callable[[dict, dict, float], dict] = rope_facts) -> dict[str, dict]:
    """Rope's fields by kind of attention: the same, or one each."""
    rope, theta = stated_rope(c), number(c, "rope_theta", 10000.0)
    if is_by_kind(rope):
        return {kind: facts(c, rope.get(kind) or {}, theta) for kind in KINDS_OF_ATTENTION}
    return dict.fromkeys(KINDS_OF_ATTENTION, facts(c, rope, theta))


def yarn_amplitude(rope: dict, factor: float) -> float:
    def mscale(weight):
        return yarn_mscale(factor, weight)

    amplitude, one, all_dim = (
        number(rope, key) if rope.get(key) is not None else None
        for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if amplitude is None:
        amplitude = mscale(one) / mscale(all_dim) if one and all_dim else mscale(1)
    return float(amplitude)


def yarn_mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


# ---- A path -> a Checkpoint ---------------------------------------------------------------------

WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json", "model.pth")
PARTS = ("norm", "attention", "mixer", "ffn", "block", "after_embed", "per_layer", "logit_cap")


def open_checkpoint(name: str) -> Checkpoint:
    """A path or a hub name -> its checkpoint, no weight read yet.

    FileNotFoundError, ValueError or OSError say in one line what was found and what to do.
    """
    return read_checkpoint(resolve(name))


def read_checkpoint(path: Path) -> Checkpoint:
    """Whatever checkpoint is at `path`, checked by name and shape, no weight read yet.

    FileNotFoundError or ValueError say in one line what was found and what was expected.
    """
    with reading(path):
        raw = read(path)
        tensors = {t.name: t for t in raw.tensors}
        if raw.names is not None:
            tensors = rename(raw.tensors, raw.names, raw.cfg)
        return checked(raw, tensors)


def read(path: Path) -> RawCheckpoint:
    """One reader per format."""
    if path.is_dir():
        found = weights_in(path, WEIGHT_FILES)
        if found is None:
            raise FileNotFoundError(f"{path}: expected config.json with model.safetensors, or "
                                    "model.pth; gpt-faster's full tree (gpt_faster/formats/) reads "
                                    "more")
        path = found
    if path.suffix in (".pth", ".pt"):
        return read_pth(path, read_torch(path))
    if path.name.endswith((".safetensors", ".safetensors.index.json")):
        return read_hub(path.parent, path.name)
    raise ValueError(f"{path}: expected a directory, .safetensors or .pth; gpt-faster's full tree "
                     "(gpt_faster/formats/) reads more")


def weights_in(directory: Path, names: tuple[str, ...]) -> Path | None:
    """The first of these files that a directory has."""
    return next((directory / name for name in names if (directory / name).exists()), None)


def read_hub(directory: Path, weights: str) -> RawCheckpoint:
    """config.json and what lies beside it; weights: the file, or the index of its shards."""
    path = directory / "config.json"
    config = read_json(path)
    with reading(path):
        cfg, family = config_from_hf(config)
    tensors = hub_tensors(directory, weights)
    eos_ids, defaults = generation_defaults(directory, config)
    return RawCheckpoint(directory / weights, cfg, tensors, HF_NAMES | family.names, eos_ids,
                         defaults, tokenizer=directory)


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
    """The config as a .pth stores it. ValueError names what cannot be, or what model.py has not."""
    if "after_embed" not in d:
        raise ValueError(f"its config is of an older gpt-faster: {MORE}, and writes it anew")
    if others := [name for name in PARTS if any(several(d, name))]:
        raise ValueError(f"its model has parts that model.py does not have ({some(others)}): "
                         f"{MORE}")
    rope = tuple(build(Rope, rope) for rope in several(d, "rope"))
    return build(ModelConfig, d, rope=rope, moe=d["moe"] and build(MoEConfig, d["moe"]))


def several(d: dict, name: str) -> list | tuple:
    value = d.get(name)
    return value if isinstance(value, list | tuple) else [value]


def build(cls: type, stated: dict, **parts):
    """cls(**stated, **parts). ValueError names fields that are missing or not known."""
    if not isinstance(stated, dict):
        raise ValueError(f"{cls.__name__} is {brief(stated)}, expected its fields")
    known = {f.name for f in fields(cls)}
    if unknown := [brief(key) for key in stated if key not in known]:
        raise ValueError(f"written by a newer gpt-faster: unknown fields of {cls.__name__}: "
                         f"{', '.join(sorted(unknown))}")
    needed = {f.name for f in fields(cls) if f.default is MISSING}
    if missing := sorted(needed - set(stated) - set(parts)):
        raise ValueError(f"{cls.__name__} lacks {', '.join(missing)}")
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in stated.items()}
    return cls(**{**values, **parts})


def read_pth(path: Path, content: dict,
             to_config: Callable[[dict], ModelConfig] = config_from_dict) -> RawCheckpoint:
    """Ours, as save_checkpoint() writes it; content: what read_torch() gives."""
    if content.get("format") != "gpt-faster":
        raise ValueError(f"{path}: gpt-faster did not write this file; its full tree "
                         "(gpt_faster/formats/) reads some of others")
    if content.get("version", 1) not in range(1, VERSION + 1):
        raise ValueError(f"{path}: its format is version {brief(content['version'])}, this program "
                         f"reads up to {VERSION}: update it, or convert the original again")
    _check_content(content)
    tensors = [t for t in lazy_tensors(content["model"]) if not t.name.startswith("mtp.")]
    tokenizer = content.get("tokenizer")
    tokenizer = {**tokenizer, "path": path} if tokenizer else path.parent
    return RawCheckpoint(path, to_config(content["config"]), tensors, None,
                         content["eos_ids"], sampling_values(content["defaults"]), tokenizer,
                         content.get("quantization"))


# ---- Checks: the tensors are what the config asks for -------------------------------------------

def checked(raw: RawCheckpoint, tensors: dict[str, LazyTensor]) -> Checkpoint:
    """What a reader found, its tensors by our names -> a Checkpoint. ValueError as check()."""
    cfg = settle_tied(raw.path, raw.cfg, tensors)
    source = Checkpoint(raw.path, cfg, tensors, raw.eos_ids, raw.defaults, raw.tokenizer,
                        raw.quantization, raw.kind)
    check(source)
    return source


def settle_tied(path: Path, cfg: ModelConfig, tensors: dict[str, LazyTensor]) -> ModelConfig:
    """The config, `tied` as the tensors are; takes out a head that repeats the embedding.

    The tensors decide, not the config: where it says otherwise, a line says so. tensors: by our
    names. A quantized head ("head.scales") stands beside the embedding that it was rounded from.
    ValueError where the config asks for an output layer and there is none.
    """
    embed, head = tensors.get("embed.weight"), tensors.get("head.weight")
    if not cfg.tied:
        if head is None and embed is not None:
            raise ValueError("no output layer (lm_head.weight), and the config does not say that "
                             "it is the embedding ('tie_word_embeddings': true)")
        return cfg
    if head is None or "head.scales" in tensors:
        return cfg
    if embed is None:                              # the one matrix has the other's name
        tensors["embed.weight"] = head.derived(head.read_rows, packed=head.packed)
    elif "embed.scales" in tensors or not equal(embed, head):
        print(f"note: {path.name}: the config says that the output layer is the embedding, but "
              "they differ: each is used as it is", file=sys.stderr)
        return replace(cfg, tied=False)
    del tensors["head.weight"]
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


def check(source: Checkpoint) -> None:
    """ValueError names tensors that are missing, left over, or not of the config's shape.

    Takes out what some files hold without need: biases that are all zero.
    """
    tensors, shapes = source.tensors, tensor_shapes(source.cfg, source.kind)
    for name in [n for n in tensors if n not in shapes and n.endswith(".bias")]:
        if not tensors[name].whole().any():        # AutoGPTQ stored zeros for every layer
            del tensors[name]
    with reading(source.path):
        dtypes = _expect_quantized(source, shapes)
        _check_names_and_shapes(tensors, shapes)
        _check_dtypes(tensors, dtypes)


def blank_model(cfg: ModelConfig, dtype: torch.dtype, kind: type = Transformer) -> Transformer:
    """The model without memory. What it keeps in fp32 whatever the dtype (norms) is fp32 here."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            return kind(cfg)
    finally:
        torch.set_default_dtype(default)


def tensor_shapes(cfg: ModelConfig, kind: type = Transformer) -> dict[str, tuple[int, ...]]:
    """The names that tensors have on disk -> the shapes that the config asks for."""
    model, shapes = blank_model(cfg, torch.float32, kind), {}
    for name, p in model.named_parameters():
        names = disk_names(name)
        rows = [p.shape[0] // len(names)] * len(names)
        if layer := re.match(r"layers\.(\d+)\.attn\.", name):
            split = getattr(model.layers[int(layer[1])].attn, "split", ())
            if len(split) == len(names):           # queries, keys, values; latents
                rows = split
        shapes.update({part: (n, *p.shape[1:]) for part, n in zip(names, rows)})
    return shapes


def _expect_quantized(source: Checkpoint, shapes: dict) -> dict[str, torch.dtype]:
    """Put the shapes of quantized weights' leaves into `shapes` -> the dtypes of these leaves.

    ValueError where what is one matrix in memory is not quantized alike.
    """
    model = blank_model(source.cfg, torch.float32, source.kind)
    matrices = [disk_names(name) for name, module in model.named_modules()
                if isinstance(module, nn.Linear | ExpertLinear)]
    if source.cfg.tied:
        matrices.append(["embed"])
    dtypes = {}
    for matrix in matrices:
        schemes = {_expect(source.tensors, shapes, dtypes, x) for x in matrix}
        if len(schemes) > 1:
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


# ---- A Checkpoint -> a model --------------------------------------------------------------------

def load_model(source: Checkpoint, dtype: torch.dtype, device,
               prepare: Callable[[Transformer], None] = lambda model: None) -> Transformer:
    """Read every weight into a model on `device`; norms stay fp32.

    prepare: may exchange modules of the model while it has no memory.
    """
    with reading(source.path):
        model = quantized_blank(source, dtype)
        prepare(model)
        load_part(model, "", source, device)
        return model.to(device).eval()             # the parameters are there already: the rest


def quantized_blank(source: Checkpoint, dtype: torch.dtype) -> Transformer:
    """The model without memory, with quantized linears where the tensors are quantized."""
    model = blank_model(source.cfg, dtype, source.kind)

    def scheme(name):
        return scheme_at(source.tensors, disk_names(name)[0])
    put_quantized_linears(model, scheme, dtype)
    return model


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
                continue                           # it has its memory already
            p = assigned.get(blank)
            if p is None:
                # not empty_like, which has torch import sympy for a tensor on meta
                weight = torch.empty(blank.shape, dtype=blank.dtype, device=device)
                read_into(weight, source, disk_names(f"{name}.{leaf}"))
                p = assigned[blank] = nn.Parameter(weight, requires_grad=False)
            setattr(module, leaf, p)
        if hasattr(module, "pack"):
            module.pack()                          # lets go of what lay as on disk


def read_into(weight: Tensor, source: Checkpoint, names: list[str]) -> None:
    """The tensors of these names, one below the other."""
    top, target = 0, as_rows(weight)
    for t in (source.tensors[name] for name in names):
        if t.read_rows is None:
            t.fill(target[top:top + t.n_row])
        else:
            _copy(target[top:top + t.n_row], t, source.path)
        top += t.n_row


def _copy(target: Tensor, t: LazyTensor, path: Path) -> None:
    try:
        for start, end, rows in t.chunks():
            if target.dtype == torch.float16 and rows.dtype != torch.float16:
                rows = check_finite(rows, t.name, torch.float16)
            target[start:end].copy_(rows)
    except (SafetensorError, ValueError) as e:
        what = f"{path}: " if t.name in str(e) else f"{path}: {t.name} cannot be read: "
        raise ValueError(what + first_line(e)) from e


# ---- Our .pth, written --------------------------------------------------------------------------

VERSION = 2                                        # of the format; a newer one is refused
ALIGNMENT = 64                                     # of a tensor's bytes in the file, as torch's
STORAGES = {torch.float32: torch.FloatStorage, torch.float64: torch.DoubleStorage,
            torch.float16: torch.HalfStorage, torch.bfloat16: torch.BFloat16Storage,
            torch.int8: torch.CharStorage, torch.uint8: torch.ByteStorage}
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)   # the disk, or what is allowed of it


def save_checkpoint(source: Checkpoint, path: Path, tokenizer: dict | None,
                    dtype: torch.dtype | None = None,
                    progress: Callable[[int, int], None] = lambda i, n: None) -> None:
    """Write our .pth, tensor by tensor, whole or not at all; in memory is a few megabytes.

    It is a zip archive as torch.save writes it: data.pkl, which names the tensors, and a stored
    entry for the bytes of each. dtype: None keeps each tensor's own. tokenizer: None where its
    files stay beside the .pth. A head that drafts is written too, as mtp.*.
    """
    tensors, dtypes = dict(source.tensors), _dtypes(source, dtype)
    head = _head_of(source)
    if head:
        tensors |= {f"mtp.{name}": t for name, t in head.tensors.items()}
        dtypes |= {f"mtp.{name}": dtype for name, dtype in _dtypes(head, dtype).items()}
    blanks = {name: Blank(str(i), t.shape, dtypes[name])
              for i, (name, t) in enumerate(tensors.items())}
    content = dict(format="gpt-faster", version=VERSION, config=asdict(source.cfg),
                   quantization=source.quantization, model=blanks, eos_ids=source.eos_ids,
                   defaults=source.defaults, tokenizer=tokenizer, mtp=head and asdict(head.cfg))
    with whole_file(path) as file:
        if hasattr(os, "posix_fallocate"):         # a full disk says so now
            os.posix_fallocate(file.fileno(), 0, sum(b.n_bytes for b in blanks.values()))
        with zipfile.ZipFile(file, "w") as archive:
            _write(archive, path.stem, content, tensors, progress)


def _head_of(source: Checkpoint) -> Checkpoint | None:
    """Its head that drafts; a line says where that is not as we know them."""
    try:
        return source.mtp() if source.mtp else None
    except ValueError as e:
        print(f"note: left out: {e}", file=sys.stderr)
        return None


def _dtypes(source: Checkpoint, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """Of each tensor in the file: norms fp32, quantized weights as they are."""
    model = blank_model(source.cfg, torch.bfloat16, source.kind)
    precise = {on_disk for n, p in model.named_parameters()
               if p.dtype == torch.float32 for on_disk in disk_names(n)}
    dtypes = {}
    for name, t in source.tensors.items():
        leaf = name.rpartition(".")[2]
        quantized = not t.dtype.is_floating_point or leaf in LEAVES[1:]
        plain = torch.bfloat16 if t.dtype.itemsize == 1 else t.dtype       # fp8 without scales
        dtypes[name] = t.dtype if quantized else dtype or plain
        if name in precise:
            dtypes[name] = torch.float32
    return dtypes


@dataclass(frozen=True)
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
        return torch._utils._rebuild_tensor_v2, (*arguments, OrderedDict())

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


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file of its own beside `path`, which takes its place at the end.

    One that a killed process left is written over. OSError where another process writes it now.
    """
    partial = path.with_name(path.name + ".partial")
    with _locked(partial, path) as file:
        try:
            file.truncate(0)
            yield file
            file.flush()
            os.fsync(file.fileno())                # else a crash may leave the name without content
            os.replace(partial, path)
        except BaseException as e:
            partial.unlink(missing_ok=True)
            if isinstance(e, OSError) and e.errno in FULL:
                raise OSError(e.errno, f"{path} cannot be written: {e.strerror}: free some space, "
                              "or choose another disk") from None
            raise


def _locked(partial: Path, path: Path) -> BinaryIO:
    """The partial file, open, and this process's alone until it is closed or the process ends."""
    while True:
        file = open(os.open(partial, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        try:
            lock(file, path)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), os.stat(partial)):
                    return file
            file.close()                           # another one put it in its place meanwhile
        except BaseException:
            file.close()
            raise


def lock(file, path: Path) -> None:
    """OSError where another process has locked it. Some network file systems cannot: no lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OSError(f"{path}: another process is writing it: wait for that, or choose another "
                      "name") from None
    except OSError:
        pass
