"""Everything that knows the outside formats: file -> ModelConfig + named tensors, and back.

Reads Hugging Face directories (safetensors or .bin), our .pth, Meta's and llama2.c's .pth, and
GGUF; knows what every family leaves unsaid. No forward code, no tokenizing. Loading is a pipeline,
read -> rename -> fuse -> assign, a few megabytes at a time. quantize.py puts its own step between:

    checkpoint = read(find("org/name or path"))
    model = load(checkpoint, torch.bfloat16, "cpu")

A quantized weight on disk, where x is "layers.0.attn.wq" or the like, w its weight [out, in] (or
[E, out, in]) and G a divisor of in; scales and zeros are floating-point numbers:

    int8   x.weight int8  [out, in]     x.scales [out]                 w = weight * scale
    int4   x.weight uint8 [out, in/2]   x.scales, x.zeros [out, in/G]  w = (q - 8) * scale + zero
           a byte holds two neighbouring q, the first one in its low half
"""

import dataclasses
import errno
import math
import mmap
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakValueDictionary

import torch
from safetensors import SafetensorError
from torch._subclasses.fake_tensor import FakeTensorMode

from formats.families import (
    FAMILIES,
    GGUF_DIFFERENT,
    GGUF_NAMES,
    GGUF_PERMUTED,
    HF_NAMES,
    META_NAMES,
    OUR_NAMES,
    config_from_dict,
    config_from_gguf,
    config_from_hf,
    fold,
    look_up,
    named,
    reorder_heads,
)
from formats.files import (
    Lazy,
    as_rows,
    first_line,
    from_torch,
    gguf_tensors,
    hub_weights,
    merge_shards,
    read_json,
    read_torch,
    some,
)
from formats.hub_quantized import dequantized, unpacked_int4
from layers.moe import ExpertLinear
from layers.rope import Rope
from model import ModelConfig, Transformer

# in memory: on disk
FUSED = {"wqkv": ("wq", "wk", "wv"), "gate_up": ("gate", "up")}
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
                "pytorch_model.bin.index.json", "model.pth", "consolidated.00.pth")
VERSION = 1                                        # of our .pth; a newer one is refused
BAD_CONFIG = (ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError,
              RuntimeError)                        # what nonsense in a config may run into
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|return|>", "<|call|>")


@dataclass
class Checkpoint:
    """What a path holds, nothing large read yet."""

    path: Path
    cfg: ModelConfig
    tensors: dict[str, Lazy]                       # by our names
    eos_ids: list[int] = field(default_factory=list)
    defaults: dict = field(default_factory=dict)   # sampling values of generation_config.json
    tokenizer: Path | dict | None = None           # what tokenizer.load() takes
    quantization: dict | None = None               # how, for people; the tensors say what


# ---- Formats ------------------------------------------------------------------------------------

def _half_split(tensors: dict[str, Lazy], head_dim: int) -> None:
    """Undo Meta's and llama.cpp's interleaved RoPE: row pairs (2i, 2i + 1) -> (i, i + H/2)."""
    reorder_heads(tensors, torch.arange(head_dim).view(-1, 2).T.flatten())


def _ids(value) -> list[int]:
    value = value if isinstance(value, list) else [value]
    return [i for i in value if type(i) is int]


def read_hf(directory: Path, weights: str) -> Checkpoint:
    """A Hugging Face directory: config.json, weights, generation_config.json, tokenizer files."""
    config = read_json(directory / "config.json")
    try:
        cfg, c = config_from_hf(config)
    except BAD_CONFIG as e:
        raise ValueError(f"{directory / 'config.json'}: {e}") from None
    lazies = hub_weights(directory, weights)
    quantization = (config.get("quantization_config") or config.get("compression_config")
                    or c.get("quantization_config"))
    if quantization and c["model_type"] == "gpt2":
        raise ValueError(f"{directory / 'config.json'}: a quantized GPT-2 is not supported: "
                         "use the original model")
    if quantization:
        try:
            lazies = dequantized(lazies, quantization)
        except BAD_CONFIG as e:
            raise ValueError(f"{directory / 'config.json'}: quantization_config: "
                             f"{first_line(e)}") from None
    family = FAMILIES[c["model_type"]]
    ours = lazies and all(look_up(t.name, OUR_NAMES) for t in lazies)  # our .pth, its config beside
    try:
        tensors = named(lazies, OUR_NAMES if ours else {**HF_NAMES, **family.names}, cfg)
    except ValueError as e:
        raise ValueError(f"{directory / weights}: {e}") from None
    if not ours:
        fold(tensors, c, cfg, family.norm_offset)
    for name, _ in blank_model(cfg, torch.float32).named_modules():
        if len(parts(name)) > 1:
            _same_kind(tensors, parts(name))
    eos_ids, defaults = generation_defaults(directory, config)
    return Checkpoint(directory / weights, cfg, tensors, eos_ids, defaults, directory)


def _same_kind(tensors: dict[str, Lazy], xs: list[str]) -> None:
    """What is one matrix in memory is quantized alike, or not at all."""
    def kind(x):
        scales = tensors.get(f"{x}.scales")
        return scales and scales.shape[1:]

    if len({kind(x) for x in xs}) > 1:
        for x in xs:
            if kind(x) is not None:
                pieces = (tensors.pop(f"{x}.{leaf}") for leaf in ("weight", "scales", "zeros"))
                tensors[f"{x}.weight"] = unpacked_int4(*pieces)


def generation_defaults(directory: Path, config: dict) -> tuple[list[int], dict]:
    """End-of-sequence ids of both config files, and how the model's authors sample from it."""
    path = directory / "generation_config.json"
    generation = {}
    if path.exists():
        try:
            generation = read_json(path)
        except ValueError as e:                    # some on the Hub are broken; they are optional
            print(f"note: ignored: {e}", file=sys.stderr)
    ids = []
    for c in (generation, config.get("text_config", {}), config):
        ids += _ids(c.get("eos_token_id"))
    valid = dict(temperature=lambda v: v >= 0, top_k=lambda v: v == int(v) >= 0,
                 top_p=lambda v: 0 < v <= 1, min_p=lambda v: 0 <= v <= 1,
                 repetition_penalty=lambda v: v > 0)
    stated = {k: generation[k] for k in valid
              if generation.get("do_sample") and generation.get(k) is not None}
    defaults = {k: int(v) if k == "top_k" else float(v) for k, v in stated.items()
                if isinstance(v, (int, float)) and valid[k](v)}
    if bad := set(stated) - set(defaults):
        print(f"note: ignored in {path}: {', '.join(sorted(bad))}", file=sys.stderr)
    return list(dict.fromkeys(ids)), defaults


def read_meta(directory: Path, lazies: list[Lazy], params: dict, path: Path,
              eos_ids: list[int] | None = None) -> Checkpoint:
    """Meta's own format, and llama2.c's: params.json or model_args, interleaved RoPE."""
    sizes = {t.name: t.shape[0] for t in lazies}
    embed, gate = sizes.get("tok_embeddings.weight"), sizes.get("layers.0.feed_forward.w1.weight")
    if embed is None or gate is None:
        raise ValueError(f"{path}: no tok_embeddings.weight or feed_forward.w1.weight")
    scaled, theta = params.get("use_scaled_rope", False), params.get("rope_theta", 10000.0)
    context = params.get("max_seq_len") or (       # not there: Llama 3.1, Llama 3, CodeLlama, 2
        131072 if scaled else {5e5: 8192, 1e6: 16384}.get(theta, 4096))
    factor = 32 if params.get("dim") in (2048, 3072) else 8            # Llama 3.2 1B and 3B; 3.1
    rope = dict(rope_type="llama3", factor=params.get("rope_scaling_factor", factor),
                low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=8192)
    try:
        cfg, _ = config_from_hf(dict(
            model_type="llama", hidden_size=params["dim"], num_hidden_layers=params["n_layers"],
            num_attention_heads=params["n_heads"], num_key_value_heads=params.get("n_kv_heads"),
            intermediate_size=gate, vocab_size=embed,
            max_position_embeddings=context, rms_norm_eps=params.get("norm_eps", 1e-5),
            rope_theta=theta, rope_scaling=rope if scaled else None,
            tie_word_embeddings="output.weight" not in sizes))
    except KeyError as e:
        raise ValueError(f"{path}: no {e} among the model's parameters") from None
    tensors = named(lazies, META_NAMES, cfg)
    _half_split(tensors, cfg.head_dim)
    return Checkpoint(path, cfg, tensors, eos_ids or [], tokenizer=directory)


def read_pth(path: Path) -> Checkpoint:
    """One .pth or .pt: ours, Meta's (params.json beside), llama2.c's, or bare with config.json."""
    content, directory = read_torch(path), path.parent
    if content.get("format") == "gpt-faster":
        if content.get("version", 1) > VERSION:
            raise ValueError(f"{path}: its format is version {content['version']}, this program "
                             f"reads up to {VERSION}: update it, or convert the original again")
        cfg = config_from_dict(content["config"])
        tensors = named(from_torch(content["model"]), OUR_NAMES, cfg)
        return Checkpoint(path, cfg, tensors, content["eos_ids"], content["defaults"],
                          content["tokenizer"] or directory, content.get("quantization"))
    if "model_args" in content and "model" in content:
        weights = {k.removeprefix("_orig_mod."): v for k, v in content["model"].items()}
        head, embed = weights.get("output.weight"), weights.get("tok_embeddings.weight")
        if head is not None and embed is not None and head.data_ptr() == embed.data_ptr():
            del weights["output.weight"]           # llama2.c ties them
        bos, eos = 1, 2                            # the stories end where the next would begin
        return read_meta(directory, from_torch(weights), content["model_args"], path, [bos, eos])
    if (directory / "params.json").exists():
        sharded = path.name.startswith("consolidated.")
        paths = sorted(directory.glob("consolidated.*.pth")) if sharded else [path]
        whole = merge_shards([from_torch(read_torch(p)) for p in paths])
        return read_meta(directory, whole, read_json(directory / "params.json"), path)
    if (directory / "config.json").exists():
        return read_hf(directory, path.name)
    raise ValueError(f"{path}: it holds no config, and neither config.json nor params.json is "
                     "beside it")


def read_gguf(path: Path) -> Checkpoint:
    """A GGUF file, or the first of a split one: config, tensors and tokenizer are all inside."""
    metadata, lazies = gguf_tensors(path)
    parts = metadata.get("split.count", 1)
    for i in range(1, parts):
        part = Path(re.sub(r"-00001-of-", f"-{i + 1:05d}-of-", str(path)))
        if part == path or not part.exists():
            raise FileNotFoundError(f"{part}: part {i + 1} of {parts} is missing")
        lazies += gguf_tensors(part)[1]
    arch = metadata.get("general.architecture")
    try:
        cfg, c = config_from_hf(config_from_gguf(metadata, {t.name: t for t in lazies}))
        tensors = named(lazies, {**GGUF_NAMES, **GGUF_DIFFERENT.get(arch, {})}, cfg)
    except BAD_CONFIG as e:
        raise ValueError(f"{path}: {e}") from None
    fold(tensors, c, cfg, norm_offset=0)           # llama.cpp's converter has added it
    if arch in GGUF_PERMUTED:
        _half_split(tensors, cfg.head_dim)
    key = "tokenizer.ggml.{}_token_id".format
    eos_ids = [metadata[key(k)] for k in ("eos", "eot", "eom") if metadata.get(key(k)) is not None]
    tokens = metadata.get("tokenizer.ggml.tokens") or []   # many name one id only
    eos_ids += [tokens.index(t) for t in END_OF_TURN if t in tokens]
    if "<|end|>" in tokens and "<|return|>" not in tokens: # Phi-3 ends there, gpt-oss goes on
        eos_ids.append(tokens.index("<|end|>"))
    tokenizer = {k: v for k, v in metadata.items() if k.startswith("tokenizer.")}
    return Checkpoint(path, cfg, tensors, list(dict.fromkeys(eos_ids)), {}, tokenizer)


# ---- Finding a checkpoint -----------------------------------------------------------------------

DEFAULT_MODEL = Path(__file__).parent.parent / (
    "checkpoints/SmolLM2-135M-Instruct/SmolLM2-135M-Instruct.Q4_1.gguf")
BESIDE = ["*.json", "*.jinja", "tokenizer.model", "*.tiktoken"]      # to be had with the weights


def download(repo_id: str, local_dir: Path | None = None, token: str | None = None) -> Path:
    """Fetch what we read of a hub repository (huggingface_hub shows its progress) -> its directory.

    ValueError or OSError say in one line what went wrong and what to do.
    """
    from huggingface_hub import HfApi, errors, snapshot_download

    def weights():
        try:
            names = [file.rfilename for file in HfApi().model_info(repo_id, token=token).siblings]
        except errors.HfHubHTTPError:
            raise
        except Exception:                                  # no network: the cache may have it all
            names = ["model.safetensors"]
        old = not any(name.endswith(".safetensors") for name in names)
        return "pytorch_model*.bin" if old else "*.safetensors"

    try:
        return Path(snapshot_download(
            repo_id, local_dir=local_dir, token=token, allow_patterns=[weights(), *BESIDE],
            ignore_patterns=["original/*", "onnx/*", "*/*.safetensors", "consolidated*"]))
    except errors.GatedRepoError:                          # before RepositoryNotFound, its parent
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
    except Exception as e:                                 # its HTTP library has kinds of its own
        if getattr(e, "errno", None) == errno.ENOSPC:
            raise OSError(f"the disk is full while downloading {repo_id}: free some space, or set "
                          "HF_HOME to another disk; running it again resumes") from None
        problem = (f"{repo_id} is not in the local cache and the hub cannot be reached: check the "
                   "network and HF_HUB_OFFLINE, or give a path "
                   f"({type(e).__name__}: {first_line(e)})")
    raise ValueError(problem)


def find(name: str | None) -> Path:
    """A path, which wins, or a hub name, downloaded; None: the model that quickstart fetched.

    FileNotFoundError names both readings.
    """
    if name is None and not DEFAULT_MODEL.exists():
        raise FileNotFoundError("no model yet: run `bash scripts/quickstart.sh`, which fetches the "
                                "default one, or give --checkpoint_path")
    name = str(DEFAULT_MODEL if name is None else name)
    if not name.strip():
        raise ValueError("--checkpoint_path is empty: an unset variable?")
    path = Path(name).expanduser()
    if path.exists():
        return path
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name):
        raise FileNotFoundError(f"{name}: no such file or directory "
                                "(nor is it a hub name, org/name)")
    try:
        return download(name)
    except (ValueError, OSError) as e:
        raise FileNotFoundError(f"{name}: no such file or directory; "
                                f"read as a hub name: {e}") from None


def read(path: Path) -> Checkpoint:
    """Whatever checkpoint is at `path`, checked by name and shape, no weight read yet.

    FileNotFoundError or ValueError say in one line what was found and what was expected.
    """
    if path.is_dir():
        found = [n for n in WEIGHT_FILES if (path / n).exists()]
        ggufs = sorted(path.glob("*.gguf"))
        if not found and len(ggufs) == 1:
            return read(ggufs[0])
        if not found:
            raise FileNotFoundError(
                f"{path}: no model in this directory: expected config.json with model.safetensors, "
                f"model.pth, consolidated.00.pth or one .gguf, found "
                f"{some(sorted(p.name for p in path.iterdir())) or 'nothing'}")
        path = path / found[0]
    if path.suffix == ".gguf":
        checkpoint = read_gguf(path)
    elif path.suffix in (".safetensors", ".bin") or path.name.endswith(".index.json"):
        if not (path.parent / "config.json").exists():
            raise FileNotFoundError(f"{path.parent / 'config.json'}: missing, "
                                    f"and {path.name} needs it")
        checkpoint = read_hf(path.parent, path.name)
    elif path.suffix in (".pth", ".pt"):
        checkpoint = read_pth(path)
    else:
        raise ValueError(f"{path}: expected a directory, .safetensors, .pth, .pt, .bin or .gguf")
    check(checkpoint)
    return checkpoint


def beside(path: Path, name: str) -> Path:
    """Where to write what is made of `path`: in its directory, or in checkpoints/NAME for a GGUF
    elsewhere, or what the hub's cache holds (…/models--org--name/snapshots/revision)."""
    directory = path if path.is_dir() else path.parent
    if path.suffix == ".gguf" and "checkpoints" not in path.absolute().parts:
        directory = Path("checkpoints", path.stem)
    elif directory.parent.name == "snapshots":
        directory = Path("checkpoints", *directory.parent.parent.name.split("--")[1:])
    return directory / name


def parts(name: str) -> list[str]:
    """The parameters on disk that make up one in memory: ….wqkv.weight -> ….wq.weight, …"""
    for fused, pieces in FUSED.items():
        if f".{fused}." in f"{name}.":
            return [name.replace(f".{fused}", f".{piece}") for piece in pieces]
    return [name]


def check(checkpoint: Checkpoint) -> None:
    """ValueError names tensors that are missing, left over, or not of the config's shape."""
    cfg, tensors = checkpoint.cfg, checkpoint.tensors
    if cfg.tied and "head.scales" not in tensors:
        tensors.pop("head.weight", None)           # some files hold the embedding twice
    shapes = tensor_shapes(cfg)
    for name in [n for n in tensors if n not in shapes and n.endswith(".bias")]:
        if not tensors[name].whole().any():        # AutoGPTQ stored zeros for every layer
            del tensors[name]
    _check_quantized(checkpoint, shapes)
    missing = [n for n in shapes if n not in tensors]
    if missing:
        raise ValueError(f"{checkpoint.path}: {len(missing)} tensors are missing: {some(missing)}")
    extra = [tensors[n].name for n in tensors if n not in shapes]
    if extra:
        raise ValueError(f"{checkpoint.path}: {len(extra)} tensors that its config has no place "
                         f"for: {some(extra)}")
    for name, shape in shapes.items():
        found = tensors[name]
        if found.shape != shape:
            raise ValueError(f"{checkpoint.path}: {found.name} is {list(found.shape)}, but the "
                             f"config asks for {list(shape)}")


def _check_quantized(checkpoint: Checkpoint, shapes: dict[str, tuple[int, ...]]) -> None:
    """Put the shapes of numbers and scales into `shapes`, in place of the weights'.

    ValueError where they are of a wrong kind, alone, or of unlike kinds within one matrix. Scales
    of what cannot be quantized stay without a place.
    """
    cfg, tensors, path = checkpoint.cfg, checkpoint.tensors, checkpoint.path
    model = blank_model(cfg, torch.float32)
    linears = [parts(n) for n, m in model.named_modules()
               if isinstance(m, torch.nn.Linear | ExpertLinear)]
    kinds = {}                                     # x: its inputs' groups, 0 for int8
    for x in [x for pieces in linears for x in pieces] + ["embed"] * cfg.tied:
        scales, zeros = tensors.get(f"{x}.scales"), tensors.get(f"{x}.zeros")
        if scales is None or (x == "embed" and zeros):
            continue
        shape = shapes["embed.weight"] if x == "head" else shapes[f"{x}.weight"]
        kinds[x] = 0 if zeros is None else ((0, *scales.shape)[-1])
        shapes[f"{x}.weight"], shapes[f"{x}.scales"] = shape, shape[:-1]
        if zeros is not None:
            if kinds[x] < 1 or shape[-1] % kinds[x] or shape[-1] % 2:
                raise ValueError(f"{path}: {x}.scales has {kinds[x]} groups, which do not divide "
                                 f"the {shape[-1]} inputs")
            shapes[f"{x}.weight"] = *shape[:-1], shape[-1] // 2
            shapes[f"{x}.scales"] = shapes[f"{x}.zeros"] = *shape[:-1], kinds[x]
    for pieces in linears:
        if len({kinds.get(x) for x in pieces}) > 1:
            raise ValueError(f"{path}: {', '.join(pieces)} are one matrix in memory, but not "
                             "quantized alike")
    for name in shapes.keys() & tensors.keys():
        x, _, leaf = name.rpartition(".")
        dtype, packed = tensors[name].dtype, leaf == "weight" and x in kinds
        kind = (torch.uint8 if kinds[x] else torch.int8) if packed else "floating-point numbers"
        if (dtype != kind) if packed else not dtype.is_floating_point:
            beside = [n for n in tensors if n in (f"{x}.scales", f"{x}.zeros")]
            raise ValueError(f"{path}: {name} is of {dtype}, but with "
                             f"{some(beside) or 'no scales'} beside it {kind} is expected")


def blank_model(cfg: ModelConfig, dtype: torch.dtype) -> Transformer:
    """The model without memory. What it keeps in fp32 whatever the dtype (norms) is fp32 here."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            return Transformer(cfg)
    finally:
        torch.set_default_dtype(default)


def tensor_shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The names that tensors have on disk -> the shapes that the config asks for."""
    model, shapes = blank_model(cfg, torch.float32), {}
    for name, p in model.named_parameters():
        names = parts(name)
        rows = model.layers[0].attn.split if "wqkv" in name else [p.shape[0] // len(names)] * 2
        shapes.update({part: (n, *p.shape[1:]) for part, n in zip(names, rows)})
    return shapes


def n_parameters(checkpoint: Checkpoint) -> int:
    """Of the model, however its weights are stored."""
    model = blank_model(checkpoint.cfg, torch.bfloat16)
    return sum(p.numel() for p in model.parameters())


def n_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """What the weights will take: dtype, or as they are where they are quantized."""
    return sum(math.prod(t.shape) * (1 if t.dtype.itemsize == 1 else dtype.itemsize)
               for t in checkpoint.tensors.values())


def load(checkpoint: Checkpoint, dtype: torch.dtype, device,
         rewrite: Callable[[Transformer], None] = lambda model: None,
         ready: Callable[[torch.nn.Module], None] = lambda module: None) -> Transformer:
    """Read every weight into a model on `device`; norms stay fp32. Peak: the model plus a chunk.

    rewrite may exchange modules of the model before it has memory, ready sees each one that has
    its weights: quantize.load() uses both.
    """
    model = blank_model(checkpoint.cfg, dtype)
    rewrite(model)
    load_part(model, "", checkpoint, device, ready)
    return model.to(device).eval()                 # the parameters are there already: the rest


def load_part(model: Transformer, prefix: str, checkpoint: Checkpoint, device,
              ready: Callable[[torch.nn.Module], None] = lambda module: None) -> None:
    """Give memory and weights to the modules whose names begin with `prefix`."""
    made = WeakValueDictionary()                   # a tied head shares the embedding's
    for name, module in list(model.named_modules()):
        if not name.startswith(prefix):
            continue
        for leaf, meta in list(module.named_parameters(recurse=False)):
            p = made.get(meta)
            if p is None:
                weight = torch.empty_like(meta, device=device)
                _fill(weight, checkpoint, parts(f"{name}.{leaf}"))
                p = made[meta] = torch.nn.Parameter(weight, requires_grad=False)
            setattr(module, leaf, p)
        ready(module)                              # what it packs into other tensors is let go


def _fill(weight: torch.Tensor, checkpoint: Checkpoint, names: list[str]) -> None:
    top, target = 0, as_rows(weight)
    for part in (checkpoint.tensors[name] for name in names):
        if part.rows is None:                      # random: as large as trained ones
            _randomize(target[top:top + part.n_row], part)
        try:
            for a, b, rows in part.chunks() if part.rows else ():
                target[top + a:top + b].copy_(rows)
        except (SafetensorError, RuntimeError, ValueError) as e:
            raise ValueError(f"{checkpoint.path}: {part.name} cannot be read: "
                             f"{first_line(e)}") from None
        top += part.n_row


def _randomize(weight: torch.Tensor, t: Lazy) -> None:
    if t.name.endswith(".scales"):
        weight.fill_(0.02 / 73 if len(t.shape) < 2 else 0.02 / 4.6)        # of int8's, int4's range
    elif not weight.is_floating_point():
        weight.random_(-127, 128) if weight.dtype == torch.int8 else weight.random_(0, 256)
    elif weight.dim() > 1 and not t.name.endswith(".zeros"):
        weight.normal_(0, 0.02)
    else:
        weight.fill_(1.0 if "norm" in t.name else 0.0)


def save(checkpoint: Checkpoint, path: Path, tokenizer: dict | None,
         dtype: torch.dtype | None = None,
         progress: Callable[[int], None] = lambda i: None) -> None:
    """Write our .pth, tensor by tensor, whole or not at all.

    dtype: None keeps each tensor's own. tokenizer: None where its files stay beside the .pth.
    """
    precise = {n for n, p in blank_model(checkpoint.cfg, torch.bfloat16).named_parameters()
               if p.dtype == torch.float32}

    def kind(name, t):
        if name in precise:
            return torch.float32
        packed = not t.dtype.is_floating_point or name.endswith((".scales", ".zeros"))
        return t.dtype if packed else dtype or t.dtype

    with FakeTensorMode():
        blank = {n: torch.empty(t.shape, dtype=kind(n, t)) for n, t in checkpoint.tensors.items()}
    content = dict(format="gpt-faster", version=VERSION, config=dataclasses.asdict(checkpoint.cfg),
                   quantization=checkpoint.quantization, model=blank, eos_ids=checkpoint.eos_ids,
                   defaults=checkpoint.defaults, tokenizer=tokenizer)
    partial = path.with_name(path.name + ".partial")
    partial.touch()                                # a directory we may not write to says so plainly
    try:
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(content, partial)           # with holes where the weights will be, so that
        with open(partial, "r+b") as f:            # unzip -t finds wrong checksums: torch has none
            os.posix_fallocate(f.fileno(), 0, partial.stat().st_size)      # a full disk says so now
        with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
            holes = torch.load(partial, weights_only=True, mmap=True)["model"]
        for i, (name, t) in enumerate(checkpoint.tensors.items(), 1):
            progress(i)
            for a, b, rows in t.chunks():
                as_rows(holes[name])[a:b].copy_(rows)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


# ---- Known shapes with random weights -----------------------------------------------------------

def _llama(dim, n_layer, n_head, n_kv_head, ffn_dim, vocab_size, context, **more):
    head_dim = more.pop("head_dim", dim // n_head)
    return ModelConfig(dim, n_layer, n_head, n_kv_head, head_dim, ffn_dim, vocab_size, context,
                       **more)


def _mixtral(dim, n_layer, n_head, n_kv_head, expert_dim):
    return config_from_hf(dict(
        model_type="mixtral", hidden_size=dim, num_hidden_layers=n_layer, vocab_size=32000,
        num_attention_heads=n_head, num_key_value_heads=n_kv_head, intermediate_size=expert_dim,
        max_position_embeddings=32768))[0]


_LLAMA3 = dict(rope=(Rope(5e5, "llama3", 8.0),))
SHAPES = {
    "stories15M": lambda: _llama(288, 6, 6, 6, 768, 32000, 256, tied=True),
    "stories42M": lambda: _llama(512, 8, 8, 8, 1376, 32000, 1024, tied=True),
    "stories110M": lambda: _llama(768, 12, 12, 12, 2048, 32000, 1024, tied=True),
    "SmolLM2-135M": lambda: _llama(576, 30, 9, 3, 1536, 49152, 8192, tied=True, rope=(Rope(1e5),)),
    "TinyLlama-1.1B": lambda: _llama(2048, 22, 32, 4, 5632, 32000, 2048),
    "Llama-1.1B": lambda: _llama(2048, 22, 32, 4, 5632, 49152, 4096),
    "Llama-3.2-1B": lambda: _llama(2048, 16, 32, 8, 8192, 128256, 131072, tied=True,
                                   rope=(Rope(5e5, "llama3", 32.0),)),
    "Llama-3.2-3B": lambda: _llama(3072, 28, 24, 8, 8192, 128256, 131072, tied=True,
                                   rope=(Rope(5e5, "llama3", 32.0),)),
    "Llama-2-7B": lambda: _llama(4096, 32, 32, 32, 11008, 32000, 4096),
    "Llama-2-13B": lambda: _llama(5120, 40, 40, 40, 13824, 32000, 4096),
    "Llama-2-70B": lambda: _llama(8192, 80, 64, 8, 28672, 32000, 4096),
    "Llama-3.1-8B": lambda: _llama(4096, 32, 32, 8, 14336, 128256, 131072, **_LLAMA3),
    "Llama-3.1-70B": lambda: _llama(8192, 80, 64, 8, 28672, 128256, 131072, **_LLAMA3),
    "Llama-3.1-405B": lambda: _llama(16384, 126, 128, 8, 53248, 128256, 131072, **_LLAMA3),
    "Mistral-7B": lambda: _llama(4096, 32, 32, 8, 14336, 32768, 32768, rope=(Rope(1e6),)),
    "Qwen2.5-7B": lambda: _llama(3584, 28, 28, 4, 18944, 152064, 32768, qkv_bias=True,
                                 norm_eps=1e-6, rope=(Rope(1e6),)),
    "Qwen3-0.6B": lambda: _llama(1024, 28, 16, 8, 3072, 151936, 40960, head_dim=128, tied=True,
                                 qk_norm="head", norm_eps=1e-6, rope=(Rope(1e6),)),
    "Qwen3-8B": lambda: _llama(4096, 36, 32, 8, 12288, 151936, 40960, head_dim=128, qk_norm="head",
                               norm_eps=1e-6, rope=(Rope(1e6),)),
    "gpt2": lambda: config_from_hf(dict(
        model_type="gpt2", n_embd=768, n_layer=12, n_head=12, vocab_size=50257))[0],
    "gpt2-xl": lambda: config_from_hf(dict(
        model_type="gpt2", n_embd=1600, n_layer=48, n_head=25, vocab_size=50257))[0],
    "Mixtral-8x7B": lambda: _mixtral(4096, 32, 32, 8, 14336),
    "Mixtral-8x160M": lambda: _mixtral(1024, 16, 16, 8, 3072),         # to set beside a dense model
    "Mixtral-8x160M-dense": lambda: _llama(1024, 16, 16, 8, 6144, 32000, 32768),   # as wide as two
    "Qwen3-30B-A3B": lambda: config_from_hf(dict(
        model_type="qwen3_moe", hidden_size=2048, num_hidden_layers=48, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, intermediate_size=6144, moe_intermediate_size=768,
        num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, vocab_size=151936,
        rope_theta=1e6, max_position_embeddings=40960))[0],
    "gpt-oss-20b": lambda: config_from_hf(dict(
        model_type="gpt_oss", hidden_size=2880, num_hidden_layers=24, num_attention_heads=64,
        intermediate_size=2880, num_local_experts=32, num_experts_per_tok=4, vocab_size=201088))[0],
    "gemma-2-2b": lambda: config_from_hf(dict(
        model_type="gemma2", hidden_size=2304, num_hidden_layers=26, intermediate_size=9216,
        vocab_size=256000))[0],
    "gemma-3-270m": lambda: config_from_hf(dict(
        model_type="gemma3_text", hidden_size=640, num_hidden_layers=18, intermediate_size=2048,
        num_attention_heads=4, num_key_value_heads=1, vocab_size=262144, sliding_window=512,
        max_position_embeddings=32768, hidden_activation="gelu_pytorch_tanh"))[0],
}


def random_weights(name: str) -> Checkpoint:
    """A known shape with random weights and no files. ValueError lists the names."""
    shapes = {k.lower(): k for k in SHAPES}
    if name.lower() not in shapes:
        raise ValueError(f"--random {name}: no such shape (known: {', '.join(SHAPES)})")
    cfg = SHAPES[shapes[name.lower()]]()
    tensors = {n: Lazy(n, shape, torch.bfloat16, None) for n, shape in tensor_shapes(cfg).items()}
    return Checkpoint(Path(shapes[name.lower()]), cfg, tensors)
