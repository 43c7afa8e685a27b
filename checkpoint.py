"""Everything that knows the outside formats: file -> ModelConfig + named tensors, and back.

Reads Hugging Face directories (safetensors or .bin), our .pth, Meta's and llama2.c's .pth, and
GGUF; knows what every family leaves unsaid. No forward code, no tokenizing. Loading is a pipeline,
read -> rename -> fuse -> assign, a few megabytes at a time:

    checkpoint = read(find("org/name or path"))
    model = load(checkpoint, torch.bfloat16, "cpu")
"""

import dataclasses
import errno
import json
import math
import mmap
import os
import pickle
import re
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from model import ModelConfig, Rope, Transformer

CHUNK = 1 << 22                                    # elements that a read may hold beside the model
FUSED = {"wqkv": ("wq", "wk", "wv")}               # parameter in memory: parameters on disk
WEIGHT_FILES = ("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin.index.json",
                "pytorch_model.bin", "model.pth", "consolidated.00.pth")


@dataclass
class Lazy:
    """A tensor that is still on disk: its name there, its shape, and how to read rows [a, b)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: Callable[[int, int], Tensor]

    def chunks(self) -> Iterator[tuple[int, int, Tensor]]:
        step = max(1, CHUNK * self.shape[0] // math.prod(self.shape))
        for a in range(0, self.shape[0], step):
            b = min(a + step, self.shape[0])
            yield a, b, self.rows(a, b)


@dataclass
class Checkpoint:
    """What a path holds, nothing large read yet."""

    path: Path
    cfg: ModelConfig
    tensors: dict[str, Lazy]                       # by our names; empty: random weights
    eos_ids: list[int] = field(default_factory=list)
    defaults: dict = field(default_factory=dict)   # sampling values of generation_config.json
    tokenizer: Path | dict | None = None           # what tokenizer.load() takes


# ---- Families: what config.json does not say ----------------------------------------------------

@dataclass(frozen=True)
class Family:
    """How a model_type differs from Llama."""

    fixed: dict = field(default_factory=dict)      # ModelConfig fields it never states
    absent: dict = field(default_factory=dict)     # config.json keys it may leave out
    names: dict = field(default_factory=dict)      # parameter names that mean something else
    norm_offset: float = 0.0                       # norms multiply by offset + weight
    scaled_embed: bool = False                     # embeddings are multiplied by sqrt(dim)
    slides: Callable[[dict, int], bool] = lambda c, i: False   # is layer i's attention windowed?


def _qwen_slides(c, i):
    return bool(c.get("use_sliding_window")) and i >= c.get("max_window_layers", 28)


FAMILIES = {
    "llama": Family(),
    "mistral": Family(absent=dict(sliding_window=4096), slides=lambda c, i: True),
    "qwen2": Family(fixed=dict(qkv_bias=True), absent=dict(sliding_window=4096),
                    slides=_qwen_slides),
    "qwen3": Family(fixed=dict(qk_norm=True), absent=dict(head_dim=128, sliding_window=4096),
                    slides=_qwen_slides),
    "gemma3_text": Family(
        fixed=dict(qk_norm=True, post_norm=True),
        absent=dict(vocab_size=262208, num_attention_heads=8, num_key_value_heads=4, head_dim=256,
                    max_position_embeddings=131072, rope_theta=1e6, rope_local_base_freq=1e4,
                    sliding_window=4096, query_pre_attn_scalar=256, tie_word_embeddings=True,
                    hidden_activation="gelu_pytorch_tanh"),
        names={"post_attention_layernorm": "post_attn_norm",
               "pre_feedforward_layernorm": "ffn_norm",
               "post_feedforward_layernorm": "post_ffn_norm"},
        norm_offset=1.0, scaled_embed=True,
        slides=lambda c, i: (i + 1) % c.get("sliding_window_pattern", 6) != 0),
}

# their name: ours. A parameter is layers.{i}.{name}.weight or, outside the layers, {name}.weight.
HF_NAMES = {
    "embed_tokens": "embed", "norm": "norm", "lm_head": "head",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn.wq", "self_attn.k_proj": "attn.wk", "self_attn.v_proj": "attn.wv",
    "self_attn.o_proj": "attn.wo",
    "self_attn.q_norm": "attn.q_norm", "self_attn.k_norm": "attn.k_norm",
    "mlp.gate_proj": "ffn.gate", "mlp.up_proj": "ffn.up", "mlp.down_proj": "ffn.down",
}
GGUF_NAMES = {
    "token_embd": "embed", "output_norm": "norm", "output": "head",
    "attn_norm": "attn_norm", "ffn_norm": "ffn_norm",
    "post_attention_norm": "post_attn_norm", "post_ffw_norm": "post_ffn_norm",
    "attn_q": "attn.wq", "attn_k": "attn.wk", "attn_v": "attn.wv", "attn_output": "attn.wo",
    "attn_q_norm": "attn.q_norm", "attn_k_norm": "attn.k_norm",
    "ffn_gate": "ffn.gate", "ffn_up": "ffn.up", "ffn_down": "ffn.down",
}
META_NAMES = {
    "tok_embeddings": "embed", "norm": "norm", "output": "head",
    "attention_norm": "attn_norm", "ffn_norm": "ffn_norm",
    "attention.wq": "attn.wq", "attention.wk": "attn.wk", "attention.wv": "attn.wv",
    "attention.wo": "attn.wo",
    "feed_forward.w1": "ffn.gate", "feed_forward.w3": "ffn.up", "feed_forward.w2": "ffn.down",
}
OUR_NAMES = {name: name for name in (*HF_NAMES.values(), "post_attn_norm", "post_ffn_norm")}
NOT_WEIGHTS = re.compile(r"rotary_emb\.inv_freq$|rope\.freqs$|freqs_(cos|sin)$|^rope_freqs\.weight$"
                         r"|(^|\.)(vision_tower|vision_model|multi_modal_projector)\.|^(v|mm)\.")


def rename(name: str, table: dict[str, str]) -> str | None:
    """Their parameter name -> ours, or None where there is no such parameter."""
    stem, _, kind = name.rpartition(".")           # kind: weight | bias
    stem = re.sub(r"^((model|language_model|_orig_mod)\.)+", "", stem)
    match = re.fullmatch(r"(?:layers|blk)\.(\d+)\.(.+)", stem)
    ours = table.get(match[2] if match else stem)
    return ours and (f"layers.{match[1]}." if match else "") + f"{ours}.{kind}"


# ---- config.json -> ModelConfig -----------------------------------------------------------------

def _rope(c: dict, rope: dict, theta) -> Rope:
    """One RoPE, from `rope_parameters` (transformers 5) or `rope_scaling` (before)."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ValueError(f"RoPE scaling '{kind}' is not supported "
                         "(supported: default, linear, llama3)")
    key = "original_max_position_embeddings"
    original = c.get(key) or rope.get(key)
    divisors = rope.get("divisors")                # only from a GGUF
    return Rope(
        theta=float(rope.get("rope_theta", theta)), kind=kind,
        factor=float(rope.get("factor") or 1),
        low_freq_factor=float(rope.get("low_freq_factor", 1)),
        high_freq_factor=float(rope.get("high_freq_factor", 4)),
        original_context=int(original or c["max_position_embeddings"]),
        divisors=divisors and tuple(divisors))


def _ropes(c: dict) -> dict[str, Rope]:
    """RoPE by layer type: one for all, or one each for full and sliding attention (Gemma 3)."""
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
    theta, kinds = c.get("rope_theta", 10000.0), ("full_attention", "sliding_attention")
    if any(kind in rope for kind in kinds):
        return {kind: _rope(c, rope.get(kind) or {}, theta) for kind in kinds}
    ropes = dict.fromkeys(kinds, _rope(c, rope, theta))
    if "rope_local_base_freq" in c:
        ropes["sliding_attention"] = Rope(theta=float(c["rope_local_base_freq"]),
                                          original_context=int(c["max_position_embeddings"]))
    return ropes


def config_from_hf(c: dict) -> tuple[ModelConfig, Family]:
    """config.json, in the spelling of transformers 4 or 5, as math. ValueError names a problem."""
    if "text_config" in c:                         # multimodal wrappers: the text part
        c = {"model_type": c.get("model_type", "").split("_")[0] + "_text", **c["text_config"]}
    kind = c.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(f"model_type '{kind}' is not supported (supported: {', '.join(FAMILIES)})")
    family = FAMILIES[kind]
    if c.get("quantization_config"):
        method = c["quantization_config"].get("quant_method", "unknown")
        raise ValueError(f"weights already quantized with '{method}' are not supported: "
                         "use the original model")
    c = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, **family.absent, **c}

    def count(key, default=None):
        value = default if c.get(key) is None else c[key]
        if value is None:
            raise ValueError(f"config.json has no '{key}'")
        if type(value) is not int or value < 1:
            raise ValueError(f"'{key}' is {value!r}, expected a positive integer")
        return value

    activation = c.get("hidden_activation") or c.get("hidden_act") or "silu"
    known = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
    if activation not in known:
        raise ValueError(f"activation '{activation}' is not supported "
                         f"(supported: {', '.join(known)})")
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if c.get(key):
            raise ValueError(f"'{key}' is not supported")

    dim, n_layer, n_head = (
        count(key) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    n_kv_head, context = count("num_key_value_heads", n_head), count("max_position_embeddings")
    if n_head % n_kv_head:
        raise ValueError(f"{n_head} attention heads cannot share {n_kv_head} key/value heads "
                         "evenly")
    types = c.get("layer_types") or [
        "sliding_attention" if family.slides(c, i) else "full_attention" for i in range(n_layer)]
    ropes = _ropes(c)
    if not isinstance(types, list) or set(types) - set(ropes) or len(types) != n_layer:
        raise ValueError(f"'layer_types' is not {n_layer} times one of {', '.join(ropes)}")
    window = tuple(c.get("sliding_window") if t == "sliding_attention" else None for t in types)
    rope = tuple(ropes[t] for t in types)
    scalar = c.get("query_pre_attn_scalar")
    bias = bool(c.get("attention_bias", False))
    fields = dict(
        dim=dim, n_layer=n_layer, n_head=n_head, n_kv_head=n_kv_head,
        head_dim=count("head_dim", dim // n_head), ffn_dim=count("intermediate_size"),
        vocab_size=count("vocab_size"), context=context, norm_eps=float(c["rms_norm_eps"]),
        activation=known[activation],
        tied=bool(c.get("tie_word_embeddings", False)),
        qkv_bias=bias, o_bias=bias, mlp_bias=bool(c.get("mlp_bias", False)),
        embed_scale=dim**0.5 if family.scaled_embed else 1.0,
        attn_scale=scalar and scalar**-0.5,
        rope=rope[:1] if len(set(rope)) == 1 else rope,
        window=window[:1] if len(set(window)) == 1 else window)
    return ModelConfig(**{**fields, **family.fixed}), family


def config_from_dict(d: dict) -> ModelConfig:
    """The config stored in our own .pth."""
    unknown = set(d) - {f.name for f in dataclasses.fields(ModelConfig)}
    if unknown:
        raise ValueError(f"written by a newer gpt-faster: unknown config fields {sorted(unknown)}")
    rope = tuple(Rope(**{**r, "divisors": r["divisors"] and tuple(r["divisors"])})
                 for r in d["rope"])
    return ModelConfig(**{**d, "rope": rope, "window": tuple(d["window"])})


# ---- Formats ------------------------------------------------------------------------------------

def read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as e:
        raise ValueError(f"{path}: not valid JSON ({e})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def read_torch(path: Path) -> dict:
    """A PyTorch file, memory-mapped where its format allows. Never executes what is in it."""
    for lazy in (True, False):
        try:
            value = torch.load(path, map_location="cpu", weights_only=True, mmap=lazy)
            break
        except pickle.UnpicklingError as e:
            raise ValueError(f"{path}: refused, it holds more than weights "
                             f"({_line(e)})") from None
        except (RuntimeError, EOFError, ValueError) as e:
            if not lazy or "mmap can only be used" not in str(e):      # a file older than torch 1.6
                raise ValueError(f"{path}: not a readable PyTorch file (truncated?): "
                                 f"{_line(e)}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a dictionary of tensors, found {type(value).__name__}")
    return value


def _from_torch(tensors: dict) -> list[Lazy]:
    return [Lazy(n, tuple(t.shape), t.dtype, lambda a, b, t=t: t[a:b])
            for n, t in tensors.items() if isinstance(t, Tensor)]


SAFETENSORS_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16,
                      "BF16": torch.bfloat16}


def _from_safetensors(path: Path) -> list[Lazy]:
    try:
        file = safe_open(path, framework="pt")
    except SafetensorError as e:
        raise ValueError(f"{path}: not a readable safetensors file (truncated?): {e}") from None
    lazies = []
    for name in file.keys():
        piece = file.get_slice(name)
        dtype = SAFETENSORS_DTYPES.get(piece.get_dtype(), torch.uint8)
        lazies.append(Lazy(name, tuple(piece.get_shape()), dtype, lambda a, b, s=piece: s[a:b]))
    return lazies


def _weights(directory: Path, name: str) -> list[Lazy]:
    """Every tensor of model.safetensors, pytorch_model.bin, or the shards that an index lists."""
    if name.endswith(".index.json"):
        shards = sorted(set(read_json(directory / name).get("weight_map", {}).values()))
    else:
        shards = [name]
    lazies = []
    for shard in shards:
        path = directory / shard
        if not path.exists():
            raise FileNotFoundError(f"{path}: listed in {name} but not there: download it again")
        lazies += (_from_safetensors(path) if shard.endswith(".safetensors")
                   else _from_torch(read_torch(path)))
    return lazies


def _named(lazies: list[Lazy], table: dict[str, str]) -> dict[str, Lazy]:
    """By our names. ValueError names the tensors that mean nothing to us."""
    lazies = [t for t in lazies if not NOT_WEIGHTS.search(t.name)]
    unknown = [t.name for t in lazies if rename(t.name, table) is None]
    if unknown:
        raise ValueError(f"{len(unknown)} tensors that this architecture does not have: "
                         f"{_some(unknown)}")
    named = {rename(t.name, table): t for t in lazies}
    if len(named) < len(lazies):
        twice = [t.name for t in lazies if named[rename(t.name, table)] is not t]
        raise ValueError(f"{len(twice)} tensors are there twice: {_some(twice)}")
    return named


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (", …" if len(names) > 4 else "")


def _half_split(t: Lazy, head_dim: int) -> Lazy:
    """Undo Meta's and llama.cpp's interleaved RoPE: row pairs (2i, 2i + 1) -> (i, i + H/2)."""
    def rows(a, b):
        whole = t.rows(0, t.shape[0])
        return whole.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).reshape(t.shape)[a:b]
    return dataclasses.replace(t, rows=rows)


def _offset(t: Lazy, offset: float) -> Lazy:
    def rows(a, b):
        return t.rows(a, b).float() + offset
    return dataclasses.replace(t, dtype=torch.float32, rows=rows)


def _ids(value) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)


def read_hf(directory: Path, weights: str) -> Checkpoint:
    """A Hugging Face directory: config.json, weights, generation_config.json, tokenizer files."""
    config = read_json(directory / "config.json")
    try:
        cfg, family = config_from_hf(config)
    except (ValueError, TypeError, AttributeError) as e:
        raise ValueError(f"{directory / 'config.json'}: {e}") from None
    lazies = _weights(directory, weights)
    ours = lazies and all(rename(t.name, OUR_NAMES) for t in lazies)   # our .pth, its config beside
    tensors = _named(lazies, OUR_NAMES if ours else {**HF_NAMES, **family.names})
    if family.norm_offset and not ours:
        for name, t in tensors.items():
            if "norm" in name:
                tensors[name] = _offset(t, family.norm_offset)
    eos_ids, defaults = generation_defaults(directory, config)
    return Checkpoint(directory / weights, cfg, tensors, eos_ids, defaults, directory)


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
    tensors = _named(lazies, META_NAMES)
    embed, gate = tensors.get("embed.weight"), tensors.get("layers.0.ffn.gate.weight")
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
            intermediate_size=gate.shape[0], vocab_size=embed.shape[0],
            max_position_embeddings=context, rms_norm_eps=params.get("norm_eps", 1e-5),
            rope_theta=theta, rope_scaling=rope if scaled else None,
            tie_word_embeddings="head.weight" not in tensors))
    except KeyError as e:
        raise ValueError(f"{path}: no {e} among the model's parameters") from None
    for name, t in tensors.items():
        if name.endswith(("wq.weight", "wk.weight")):
            tensors[name] = _half_split(t, cfg.head_dim)
    return Checkpoint(path, cfg, tensors, eos_ids or [], tokenizer=directory)


def merge_shards(shards: list[list[Lazy]]) -> list[Lazy]:
    """Meta's consolidated.NN.pth: tensor-parallel pieces, split along the rows or the columns."""
    def merge(pieces):
        name, shape, n = pieces[0].name, pieces[0].shape, pieces[0].shape[0]
        if len(pieces) == 1 or len(shape) == 1:
            return pieces[0]
        if re.search(r"\.(wo|w2)\.weight$|^tok_embeddings", name):
            shape = n, sum(p.shape[1] for p in pieces)
            rows = lambda a, b: torch.cat([p.rows(a, b) for p in pieces], dim=1)
        else:
            shape = n * len(pieces), shape[1]
            rows = lambda a, b: torch.cat([         # piece i holds the rows from i * n
                p.rows(max(a - i * n, 0), min(b - i * n, n)) for i, p in enumerate(pieces)
                if i * n < b and a < (i + 1) * n])
        return Lazy(name, shape, pieces[0].dtype, rows)
    return [merge(pieces) for pieces in zip(*shards)]


def read_pth(path: Path) -> Checkpoint:
    """One .pth or .pt: ours, Meta's (params.json beside), llama2.c's, or bare with config.json."""
    content, directory = read_torch(path), path.parent
    if content.get("format") == "gpt-faster":
        tensors = _named(_from_torch(content["model"]), OUR_NAMES)
        return Checkpoint(path, config_from_dict(content["config"]), tensors, content["eos_ids"],
                          content["defaults"], content["tokenizer"] or directory)
    if "model_args" in content and "model" in content:
        weights = {k.removeprefix("_orig_mod."): v for k, v in content["model"].items()}
        head, embed = weights.get("output.weight"), weights.get("tok_embeddings.weight")
        if head is not None and embed is not None and head.data_ptr() == embed.data_ptr():
            del weights["output.weight"]           # llama2.c ties them
        bos, eos = 1, 2                            # the stories end where the next would begin
        return read_meta(directory, _from_torch(weights), content["model_args"], path, [bos, eos])
    if (directory / "params.json").exists():
        sharded = path.name.startswith("consolidated.")
        paths = sorted(directory.glob("consolidated.*.pth")) if sharded else [path]
        whole = merge_shards([_from_torch(read_torch(p)) for p in paths])
        return read_meta(directory, whole, read_json(directory / "params.json"), path)
    if (directory / "config.json").exists():
        return read_hf(directory, path.name)
    raise ValueError(f"{path}: it holds no config, and neither config.json nor params.json is "
                     "beside it")


# ---- GGUF (github.com/ggml-org/ggml, docs/gguf.md) ----------------------------------------------

GGUF_KEYS = {                                      # config.json: the metadata key after "llama."
    "hidden_size": "embedding_length", "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length", "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv", "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon", "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base", "rope_local_base_freq": "rope.freq_base_swa",
    "sliding_window": "attention.sliding_window",
}
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")
GGUF_FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}


def read_gguf_header(data) -> tuple[dict, list[tuple], int]:
    """Metadata, tensor infos (name, shape, type, offset) and where the tensors begin.

    The gguf package has a reader, but it takes 8 s for a 262k vocabulary where this takes 0.3 s.
    """
    at, codes = 0, "BbHhIif?__Qqd"                 # struct's letters in the order of GGUF's types

    def take(code):
        nonlocal at
        value, = struct.unpack_from("<" + code, data, at)
        at += struct.calcsize(code)
        return value

    def string():
        nonlocal at
        n = take("Q")
        if at + n > len(data):
            raise struct.error("text runs past the end of the file")
        at += n
        return bytes(data[at - n:at]).decode("utf-8", "replace")

    def value(kind):
        nonlocal at
        if kind == 8:
            return string()
        if kind == 9:
            kind, n = take("I"), take("Q")
            if kind in (8, 9):
                return [value(kind) for _ in range(n)]
            values = struct.unpack_from(f"<{n}{codes[kind]}", data, at)
            at += n * struct.calcsize(codes[kind])
            return list(values)
        return take(codes[kind])

    if bytes(data[:4]) != b"GGUF":
        raise ValueError("it does not begin with 'GGUF'")
    at = 4
    version = take("I")
    if version not in (2, 3):
        raise ValueError(f"GGUF version {version} is not supported (2 and 3 are)")
    n_tensors, n_keys = take("Q"), take("Q")
    metadata = {}
    for _ in range(n_keys):
        key = string()
        metadata[key] = value(take("I"))
    infos = []
    for _ in range(n_tensors):
        name = string()
        shape = tuple(take("Q") for _ in range(take("I")))[::-1]       # stored fastest first
        infos.append((name, shape, take("I"), take("Q")))
    alignment = metadata.get("general.alignment", 32)
    return metadata, infos, -(-at // alignment) * alignment


def _gguf_tensors(path: Path) -> tuple[dict, list[Lazy]]:
    """Metadata and tensors of one file, dequantized as they are read."""
    try:
        import gguf
        import numpy as np
    except ImportError:
        raise ImportError("reading a GGUF needs: pip install gguf") from None
    with open(path, "rb") as f:
        if os.path.getsize(path) < 24:
            raise ValueError(f"{path}: not a readable GGUF file: too short")
        data = memoryview(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ))
    try:
        metadata, infos, start = read_gguf_header(data)
    except (struct.error, ValueError, IndexError, MemoryError, OverflowError) as e:
        raise ValueError(f"{path}: not a readable GGUF file (truncated?): {e}") from None
    lazies = []
    for name, shape, kind, offset in infos:
        try:
            kind = gguf.GGMLQuantizationType(kind)
        except ValueError:
            raise ValueError(f"{path}: {name} has quantization type {kind}, unknown to gguf "
                             f"{getattr(gguf, '__version__', '')}: pip install -U gguf") from None
        n_block, n_bytes = gguf.GGML_QUANT_SIZES[kind]
        row_bytes = math.prod(shape[1:] or (1,)) * n_bytes // n_block
        begin, end = start + offset, start + offset + shape[0] * row_bytes
        if end > len(data):
            raise ValueError(f"{path}: truncated: {name} ends at byte {end:,}, the file "
                             f"at {len(data):,}")

        def rows(a, b, begin=begin, row_bytes=row_bytes, kind=kind, shape=shape):
            block = np.frombuffer(data, np.uint8, (b - a) * row_bytes, begin + a * row_bytes)
            if kind == gguf.GGMLQuantizationType.BF16:                 # torch does this one faster
                return torch.from_numpy(block.copy()).view(torch.bfloat16).view(b - a, *shape[1:])
            values = gguf.dequantize(block if len(shape) == 1 else block.reshape(b - a, -1), kind)
            return torch.from_numpy(np.array(values, copy=True)).view(b - a, *shape[1:])

        if len(shape) == 1:                        # a vector's blocks do not end with its rows
            def rows(a, b, begin=begin, n=shape[0], size=shape[0] * n_bytes // n_block, kind=kind):
                block = np.frombuffer(data, np.uint8, size, begin)
                return torch.from_numpy(np.array(gguf.dequantize(block, kind), copy=True))[a:b]
        dtype = {"F32": torch.float32, "F16": torch.float16}.get(kind.name, torch.bfloat16)
        lazies.append(Lazy(name, shape, dtype, rows))
    return metadata, lazies


def read_gguf(path: Path) -> Checkpoint:
    """A GGUF file, or the first of a split one: config, tensors and tokenizer are all inside."""
    metadata, lazies = _gguf_tensors(path)
    parts = metadata.get("split.count", 1)
    for i in range(1, parts):
        part = Path(re.sub(r"-00001-of-", f"-{i + 1:05d}-of-", str(path)))
        if part == path or not part.exists():
            raise FileNotFoundError(f"{part}: part {i + 1} of {parts} is missing")
        lazies += _gguf_tensors(part)[1]
    arch = metadata.get("general.architecture")
    if arch not in GGUF_FAMILIES:
        raise ValueError(f"{path}: architecture '{arch}' is not supported "
                         f"(supported: {', '.join(GGUF_FAMILIES)})")
    if metadata.get(f"{arch}.expert_count"):
        raise ValueError(f"{path}: mixture-of-experts GGUF files are not supported")
    named = {t.name: t for t in lazies}
    config = {hf: metadata[f"{arch}.{key}"] for hf, key in GGUF_KEYS.items()
              if f"{arch}.{key}" in metadata}
    if "token_embd.weight" not in named:
        raise ValueError(f"{path}: no token_embd.weight")
    rope = {}
    scaling = f"{arch}.rope.scaling."
    if metadata.get(scaling + "type", "none") != "none":
        rope = dict(rope_type=metadata[scaling + "type"], factor=metadata.get(scaling + "factor"))
    if "rope_freqs.weight" in named:               # Llama 3.1's scaling, worked out per frequency
        t = named["rope_freqs.weight"]
        rope["divisors"] = t.rows(0, t.shape[0]).tolist()
    if arch == "gemma3":                           # as llama.cpp: only the 27B scales otherwise
        scalar = config.get("head_dim", 256)
        if config.get("num_hidden_layers") == 62:
            scalar = config["hidden_size"] // config["num_attention_heads"]
        pattern = metadata.get("gemma3.attention.sliding_window_pattern", 6)
        config.update(query_pre_attn_scalar=scalar, sliding_window_pattern=pattern)
        config["hidden_activation"] = "gelu_pytorch_tanh"
    config["attention_bias"] = arch == "llama" and "blk.0.attn_q.bias" in named
    family = "mistral" if arch == "llama" and config.get("sliding_window") else GGUF_FAMILIES[arch]
    try:
        cfg, _ = config_from_hf({
            **config, "model_type": family, "vocab_size": named["token_embd.weight"].shape[0],
            "rope_scaling": rope, "tie_word_embeddings": "output.weight" not in named})
    except (ValueError, TypeError, KeyError) as e:
        raise ValueError(f"{path}: {e}") from None
    tensors = _named(lazies, GGUF_NAMES)
    if arch == "llama":                            # llama.cpp stores the others unpermuted
        for name, t in tensors.items():
            if ".wq." in name or ".wk." in name:
                tensors[name] = _half_split(t, cfg.head_dim)
    key = "tokenizer.ggml.{}_token_id".format
    eos_ids = [metadata[key(k)] for k in ("eos", "eot", "eom") if metadata.get(key(k)) is not None]
    tokens = metadata.get("tokenizer.ggml.tokens") or []   # many name one id only
    eos_ids += [tokens.index(t) for t in END_OF_TURN if t in tokens]
    tokenizer = {k: v for k, v in metadata.items() if k.startswith("tokenizer.")}
    return Checkpoint(path, cfg, tensors, list(dict.fromkeys(eos_ids)), {}, tokenizer)


# ---- Finding a checkpoint -----------------------------------------------------------------------

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
        problem = f"the hub failed on {repo_id}, try again later: {_line(e)}"
        if refused:
            problem = (f"the hub refused the token for {repo_id}: run `hf auth login` again, "
                       "or unset HF_TOKEN")
    except Exception as e:                                 # its HTTP library has kinds of its own
        if getattr(e, "errno", None) == errno.ENOSPC:
            raise OSError(f"the disk is full while downloading {repo_id}: free some space, or set "
                          "HF_HOME to another disk; running it again resumes") from None
        problem = (f"{repo_id} is not in the local cache and the hub cannot be reached: check the "
                   f"network and HF_HUB_OFFLINE, or give a path ({type(e).__name__}: {_line(e)})")
    raise ValueError(problem)


def _line(e: Exception) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0][:160]


def find(name: str) -> Path:
    """A path, which wins, or a hub name, downloaded. FileNotFoundError names both readings."""
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
                f"{_some(sorted(p.name for p in path.iterdir())) or 'nothing'}")
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


def parts(name: str) -> list[str]:
    """The parameters on disk that make up one in memory: ….wqkv.weight -> ….wq.weight, …"""
    for fused, pieces in FUSED.items():
        if f".{fused}." in name:
            return [name.replace(f".{fused}.", f".{piece}.") for piece in pieces]
    return [name]


def check(checkpoint: Checkpoint) -> None:
    """ValueError names tensors that are missing, left over, or not of the config's shape."""
    cfg, tensors = checkpoint.cfg, checkpoint.tensors
    if cfg.tied:
        tensors.pop("head.weight", None)           # some files hold the embedding twice
    shapes = _shapes(cfg)
    missing = [n for n in shapes if n not in tensors]
    if missing:
        raise ValueError(f"{checkpoint.path}: {len(missing)} tensors are missing: {_some(missing)}")
    extra = [tensors[n].name for n in tensors if n not in shapes]
    if extra:
        raise ValueError(f"{checkpoint.path}: {len(extra)} tensors that its config has no place "
                         f"for: {_some(extra)}")
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            found = tensors[name]
            raise ValueError(f"{checkpoint.path}: {found.name} is {list(found.shape)}, but the "
                             f"config asks for {list(shape)}")


def _shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Our names on disk -> the shapes that the config asks for."""
    with torch.device("meta"):
        model = Transformer(cfg)
    shapes = {}
    for name, p in model.named_parameters():
        rows = model.layers[0].attn.split if len(parts(name)) > 1 else (p.shape[0],)
        shapes.update({part: (n, *p.shape[1:]) for part, n in zip(parts(name), rows)})
    return shapes


def load(checkpoint: Checkpoint, dtype: torch.dtype, device) -> Transformer:
    """Read every weight into a model on `device`; norms stay fp32. Peak: the model plus a chunk."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            model = Transformer(checkpoint.cfg)
    finally:
        torch.set_default_dtype(default)
    for name, meta in list(model.named_parameters()):
        weight = torch.empty_like(meta, device=device)
        if checkpoint.tensors:
            top = 0
            for part in (checkpoint.tensors[p] for p in parts(name)):
                try:
                    for a, b, rows in part.chunks():
                        weight[top + a:top + b].copy_(rows)
                except (SafetensorError, RuntimeError, ValueError) as e:
                    raise ValueError(f"{checkpoint.path}: {part.name} cannot be read: "
                                     f"{_line(e)}") from None
                top += part.shape[0]
        elif weight.dim() > 1:
            weight.normal_(0, 0.02)
        else:
            weight.fill_(1.0 if "norm" in name else 0.0)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(weight, requires_grad=False))
    if checkpoint.cfg.tied:
        model.head.weight = model.embed.weight
    return model.to(device).eval()                 # the parameters are there already: the rest


def save(checkpoint: Checkpoint, path: Path, tokenizer: dict | None,
         dtype: torch.dtype | None = None,
         progress: Callable[[int], None] = lambda i: None) -> None:
    """Write our .pth, tensor by tensor, whole or not at all.

    dtype: None keeps each tensor's own. tokenizer: None where its files stay beside the .pth.
    """
    norms = {n for n in checkpoint.tensors if "norm" in n}
    with FakeTensorMode():
        blank = {n: torch.empty(t.shape, dtype=torch.float32 if n in norms else dtype or t.dtype)
                 for n, t in checkpoint.tensors.items()}
    content = dict(format="gpt-faster", config=dataclasses.asdict(checkpoint.cfg), model=blank,
                   eos_ids=checkpoint.eos_ids, defaults=checkpoint.defaults, tokenizer=tokenizer)
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
                holes[name][a:b].copy_(rows)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


# ---- Known shapes with random weights -----------------------------------------------------------

def _llama(dim, n_layer, n_head, n_kv_head, ffn_dim, vocab_size, context, **more):
    head_dim = more.pop("head_dim", dim // n_head)
    return ModelConfig(dim, n_layer, n_head, n_kv_head, head_dim, ffn_dim, vocab_size, context,
                       **more)


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
    "Llama-2-7B": lambda: _llama(4096, 32, 32, 32, 11008, 32000, 4096),
    "Llama-2-13B": lambda: _llama(5120, 40, 40, 40, 13824, 32000, 4096),
    "Llama-2-70B": lambda: _llama(8192, 80, 64, 8, 28672, 32000, 4096),
    "Llama-3.1-8B": lambda: _llama(4096, 32, 32, 8, 14336, 128256, 131072, **_LLAMA3),
    "Llama-3.1-70B": lambda: _llama(8192, 80, 64, 8, 28672, 128256, 131072, **_LLAMA3),
    "Llama-3.1-405B": lambda: _llama(16384, 126, 128, 8, 53248, 128256, 131072, **_LLAMA3),
    "Mistral-7B": lambda: _llama(4096, 32, 32, 8, 14336, 32768, 32768, rope=(Rope(1e6),)),
    "Qwen2.5-7B": lambda: _llama(3584, 28, 28, 4, 18944, 152064, 32768, qkv_bias=True,
                                 norm_eps=1e-6, rope=(Rope(1e6),)),
    "Qwen3-8B": lambda: _llama(4096, 36, 32, 8, 12288, 151936, 40960, head_dim=128, qk_norm=True,
                               norm_eps=1e-6, rope=(Rope(1e6),)),
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
    return Checkpoint(Path(shapes[name.lower()]), SHAPES[shapes[name.lower()]](), {})
