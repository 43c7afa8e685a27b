"""Our model as a peer reads it: a GGUF for llama.cpp, a Hugging Face directory for the others.

It knows the two formats and no peer. The package gguf is imported where it is used.

    export_gguf(checkpoint, Path("model.Q8_0.gguf"), "Q8_0")
    export_hf(checkpoint, Path("model.bfloat16.hf"), torch.bfloat16)
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file

from formats.names import HF_NAMES

HF_NAME_OF = {ours: theirs for theirs, ours in HF_NAMES.items()}
GGUF_FORMATS = ("BF16", "Q8_0", "Q4_0")
CHUNK = 1 << 22                                    # elements written at a time


class GGUFTensor(NamedTuple):
    shape: tuple[int, ...]
    read_rows: Callable                            # (begin, end) -> float32, of the flattened rows


class GGUFField(NamedTuple):
    """Metadata; item_type: of the elements where `type` is ARRAY, else anything."""

    name: str
    value: object
    type: int
    item_type: int | None


class GGUFModel(NamedTuple):
    architecture: str
    fields: list[GGUFField]
    tensors: dict[str, GGUFTensor]


def export_hf_config(cfg, path: Path) -> Path:
    """Write the config.json of a known shape for transformers, which makes random weights of it.

    ValueError where it is not a plain Llama.
    """
    check_plain_llama(cfg, "transformers")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_llama_config(cfg)))
    return path


def export_hf(checkpoint, directory: Path, dtype: torch.dtype) -> Path:
    """Write config.json, model.safetensors and a tokenizer; a directory that is there stays.

    The weights that we run, rounded to dtype; random ones from a fixed seed. The tokenizer's words
    are t0, t1, …: peers are given ids. ValueError where it is not a plain Llama with plain weights.
    """
    if directory.exists():
        return directory
    cfg = checkpoint.cfg
    is_random = any(tensor.read_rows is None for tensor in checkpoint.tensors.values())
    rope = cfg.rope[0]
    has_plain_rope = rope == type(rope)(rope.theta, original_context=rope.original_context)
    is_quantized = any(name.endswith(".scales") for name in checkpoint.tensors)
    if not is_plain_llama(cfg) or is_quantized or not (has_plain_rope or is_random):
        raise ValueError("a Hugging Face directory is written of a plain Llama only")
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    config = _llama_config(cfg) | dict(architectures=["LlamaForCausalLM"], bos_token_id=1,
                                       eos_token_id=2, torch_dtype=str(dtype)[6:])
    (partial / "config.json").write_text(json.dumps(config))
    _write_made_up_tokenizer(cfg.vocab_size, partial)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tensors = {_hf_name(name): _read(tensor, dtype)
                   for name, tensor in checkpoint.tensors.items()}
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    os.replace(partial, directory)
    return directory


def _llama_config(cfg) -> dict:
    """A plain Llama's config.json."""
    return dict(
        model_type="llama", hidden_size=cfg.dim, num_hidden_layers=cfg.n_layer,
        num_attention_heads=cfg.n_head, num_key_value_heads=cfg.n_kv_head, head_dim=cfg.head_dim,
        intermediate_size=cfg.ffn_dim, vocab_size=cfg.vocab_size, rms_norm_eps=cfg.norm_eps,
        max_position_embeddings=cfg.context, tie_word_embeddings=cfg.tied,
        rope_theta=cfg.rope[0].theta)


def _hf_name(name: str) -> str:
    """layers.0.attn.wq.weight -> model.layers.0.self_attn.q_proj.weight"""
    if name == "head.weight":
        return "lm_head.weight"
    layer, rest = re.fullmatch(r"(layers\.\d+\.)?(.+)\.weight", name).groups("")
    return f"model.{layer}{HF_NAME_OF[rest]}.weight"


def _read(tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.read_rows is not None:
        return tensor.whole().to(dtype).contiguous()
    weight = torch.empty(tensor.shape, dtype=dtype)
    tensor.fill(weight)
    return weight


def _write_made_up_tokenizer(n: int, directory: Path) -> None:
    """Words t0, t1, …; programs that convert models do not go on without a tokenizer."""
    from tokenizers import Tokenizer, models
    words = {f"t{i}": i for i in range(n)}
    Tokenizer(models.WordLevel(words, unk_token="t0")).save(str(directory / "tokenizer.json"))
    config = dict(tokenizer_class="PreTrainedTokenizerFast", unk_token="t0", bos_token="t1",
                  eos_token="t2")
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def is_plain_llama(cfg) -> bool:
    plain = type(cfg)(
        dim=cfg.dim, n_layer=cfg.n_layer, n_head=cfg.n_head, n_kv_head=cfg.n_kv_head,
        head_dim=cfg.head_dim, ffn_dim=cfg.ffn_dim, vocab_size=cfg.vocab_size, context=cfg.context,
        norm_eps=cfg.norm_eps, tied=cfg.tied, rope=cfg.rope)
    return cfg == plain and len(cfg.rope) == 1 and cfg.rope[0].kind in ("default", "llama3")


def is_latent(cfg) -> bool:
    """A mixture with latent attention and DeepSeek-V3's router, as GLM-4.7-Flash is one?"""
    has_latents = getattr(cfg.mixer[0], "kind", None) == "latent"
    return has_latents and cfg.moe is not None and cfg.moe.scores == "sigmoid"


def check_plain_llama(cfg, peer: str) -> None:
    """ValueError if cfg has anything that a Llama has not."""
    if not is_plain_llama(cfg):
        raise ValueError(f"{peer}: --random of a plain Llama only (llama3's stretched RoPE, which "
                         "costs nothing, is left out)")


def export_gguf(checkpoint, path: Path, gguf_format: str) -> Path:
    """Write the model that we run for llama.cpp, as BF16, Q8_0 or Q4_0; a file there stays.

    From a GGUF: its metadata and matrices, these dequantized and quantized again. From a known
    shape with random weights: the architecture llama with random weights of its own. Vectors,
    routers and position embeddings are float32; in Q4_0 the embedding and the head are Q8_0, as
    ours are int8. A few megabytes at a time. ValueError where llama.cpp cannot have the model.
    """
    import gguf
    if path.exists():
        return path
    if gguf_format not in GGUF_FORMATS:
        raise ValueError(f"llama.cpp: no kind {gguf_format} of GGUF "
                         f"(known: {', '.join(GGUF_FORMATS)})")
    model = open_gguf_model(checkpoint)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    writer = gguf.GGUFWriter(partial, model.architecture)
    _add_fields(writer, model.fields)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{gguf_format}"])
    try:
        _write_tensors(writer, model.tensors, gguf_format)
        writer.close()
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def open_gguf_model(checkpoint) -> GGUFModel:
    """What a GGUF of this checkpoint has; no weight is read yet. ValueError where that cannot be.
    """
    import gguf
    path = Path(checkpoint.path)
    if path.suffix != ".gguf":
        if any(tensor.read_rows is not None for tensor in checkpoint.tensors.values()):
            raise ValueError("llama.cpp: it reads GGUF files: a .gguf or --random is needed")
        cfg = checkpoint.cfg
        if is_latent(cfg):
            return GGUFModel("deepseek2", _latent_fields(cfg), _random(_latent_shapes(cfg)))
        check_plain_llama(cfg, "llama.cpp")
        return GGUFModel("llama", _llama_fields(cfg), _random(_llama_shapes(cfg)))
    reader = gguf.GGUFReader(path)
    fields = [GGUFField(f.name, f.contents(), f.types[0], f.types[-1])
              for f in reader.fields.values()]
    if any(field.name == "split.count" and field.value > 1 for field in fields):
        raise ValueError(f"llama.cpp: {path.name} is split: a GGUF in one file is needed")
    tensors = {}
    for tensor in reader.tensors:
        shape = tuple(int(n) for n in tensor.shape[::-1])
        tensors[tensor.name] = GGUFTensor(shape, _row_reader(tensor))
    return GGUFModel(reader.fields["general.architecture"].contents(), fields, tensors)


def _row_reader(tensor) -> Callable:
    """(begin, end) -> float32 rows of a GGUF's tensor, all axes but the last one flattened."""
    import gguf
    data = tensor.data.reshape(-1, tensor.data.shape[-1])
    return lambda begin, end: gguf.dequantize(data[begin:end], tensor.tensor_type)


def _add_fields(writer, fields: list[GGUFField]) -> None:
    import gguf
    # The writer makes these itself.
    excluded = ("general.architecture", "general.file_type", "general.alignment")
    for field in fields:
        is_empty = field.value == []               # gguf writes no empty list
        if field.name in excluded or field.name.startswith("GGUF.") or is_empty:
            continue
        item_type = field.item_type if field.type == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.value, field.type, item_type)


def _tensor_type(name: str, shape: tuple[int, ...], gguf_format: str):
    """How a tensor is stored in a file of this format."""
    import gguf
    types = gguf.GGMLQuantizationType
    if len(shape) < 2 or not name.endswith("weight") or re.search("norm|_inp|^pos", name):
        return types.F32
    if gguf_format == "Q4_0" and re.match(r"(token_embd|output)\.", name):
        gguf_format = "Q8_0"
    block_size, _ = gguf.GGML_QUANT_SIZES[types[gguf_format]]
    return types[gguf_format] if shape[-1] % block_size == 0 else types.BF16


def _write_tensors(writer, tensors: dict[str, GGUFTensor], gguf_format: str) -> None:
    """The header, then the tensors, a chunk at a time."""
    import gguf
    import numpy as np
    types = {name: _tensor_type(name, t.shape, gguf_format) for name, t in tensors.items()}
    sizes = {}                                     # bytes
    for name, tensor in tensors.items():
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[types[name]]
        sizes[name] = int(np.prod(tensor.shape)) // block_size * block_bytes
        writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), sizes[name], types[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    file, = writer.fout
    writer.write_padding(file, file.tell())
    for name, tensor in tensors.items():
        n_rows = int(np.prod(tensor.shape[:-1]))
        step = max(1, CHUNK // tensor.shape[-1])
        for begin in range(0, n_rows, step):
            rows = tensor.read_rows(begin, min(begin + step, n_rows))
            rows = np.ascontiguousarray(rows, np.float32)
            gguf.quantize(rows, types[name]).tofile(file)
        writer.write_padding(file, sizes[name])


def _llama_fields(cfg) -> list[GGUFField]:
    """Metadata of a plain Llama."""
    return _fields(cfg, "llama", {
        "attention.head_count_kv": cfg.n_kv_head, "attention.key_length": cfg.head_dim,
        "attention.value_length": cfg.head_dim})


def _latent_fields(cfg) -> list[GGUFField]:
    """Metadata of latent attention and DeepSeek-V3's router: one key head, of latents."""
    import gguf
    types, latent, moe = gguf.GGUFValueType, cfg.mixer[0], cfg.moe
    fields = _fields(cfg, "deepseek2", {
        "attention.head_count_kv": 1, "attention.key_length": latent.kv_rank + cfg.head_dim,
        "attention.value_length": latent.kv_rank, "attention.kv_lora_rank": latent.kv_rank,
        "attention.q_lora_rank": latent.q_rank, "attention.value_length_mla": latent.v_dim,
        "attention.key_length_mla": latent.nope_dim + cfg.head_dim,
        "leading_dense_block_count": [*cfg.sparse, True].index(True),
        "expert_count": moe.n_expert, "expert_used_count": moe.n_active, "expert_gating_func": 2,
        "expert_feed_forward_length": moe.expert_dim,
        "expert_shared_count": moe.shared_dim // moe.expert_dim})
    scale = "deepseek2.expert_weights_scale"
    return [*fields, GGUFField(scale, moe.routed_scale, types.FLOAT32, None),
            GGUFField("deepseek2.expert_weights_norm", moe.norm_topk_prob, types.BOOL, None)]


def _fields(cfg, arch: str, more: dict[str, int]) -> list[GGUFField]:
    """What both have, with a vocabulary of no meaning."""
    import gguf
    types = gguf.GGUFValueType
    integers = {
        "block_count": cfg.n_layer, "context_length": cfg.context, "embedding_length": cfg.dim,
        "feed_forward_length": cfg.ffn_dim, "vocab_size": cfg.vocab_size,
        "attention.head_count": cfg.n_head, "rope.dimension_count": cfg.head_dim} | more
    special = ["<unk>", "<s>", "</s>"] + [f"<0x{i:02X}>" for i in range(256)]
    tokens = special + [f"t{i}" for i in range(cfg.vocab_size)]
    unknown, control, byte, normal = 2, 3, 6, 1
    token_types = [unknown, control, control] + [byte] * 256 + [normal] * cfg.vocab_size
    n = cfg.vocab_size
    return [
        *(GGUFField(f"{arch}.{key}", value, types.UINT32, None) for key, value in integers.items()),
        GGUFField(f"{arch}.attention.layer_norm_rms_epsilon", cfg.norm_eps, types.FLOAT32, None),
        GGUFField(f"{arch}.rope.freq_base", cfg.rope[0].theta, types.FLOAT32, None),
        GGUFField("tokenizer.ggml.model", "llama", types.STRING, None),
        GGUFField("tokenizer.ggml.tokens", tokens[:n], types.ARRAY, types.STRING),
        GGUFField("tokenizer.ggml.scores", [0.0] * n, types.ARRAY, types.FLOAT32),
        GGUFField("tokenizer.ggml.token_type", token_types[:n], types.ARRAY, types.INT32)]


def _llama_shapes(cfg) -> dict[str, tuple[int, ...]]:
    q_dim = cfg.n_head * cfg.head_dim
    kv_dim = cfg.n_kv_head * cfg.head_dim
    layer = {
        "attn_norm": (cfg.dim,), "ffn_norm": (cfg.dim,), "attn_q": (q_dim, cfg.dim),
        "attn_k": (kv_dim, cfg.dim), "attn_v": (kv_dim, cfg.dim), "attn_output": (cfg.dim, q_dim),
        "ffn_gate": (cfg.ffn_dim, cfg.dim), "ffn_up": (cfg.ffn_dim, cfg.dim),
        "ffn_down": (cfg.dim, cfg.ffn_dim)}
    return _shapes(cfg, [layer] * cfg.n_layer)


def _latent_shapes(cfg) -> dict[str, tuple[int, ...]]:
    latent, moe, D = cfg.mixer[0], cfg.moe, cfg.dim
    N, width = cfg.n_head, latent.nope_dim + cfg.head_dim
    attention = {
        "attn_norm": (D,), "ffn_norm": (D,), "attn_q_a": (latent.q_rank, D),
        "attn_q_a_norm": (latent.q_rank,), "attn_q_b": (N * width, latent.q_rank),
        "attn_kv_a_mqa": (latent.kv_rank + cfg.head_dim, D), "attn_kv_a_norm": (latent.kv_rank,),
        "attn_k_b": (N, latent.kv_rank, latent.nope_dim),
        "attn_v_b": (N, latent.v_dim, latent.kv_rank), "attn_output": (D, N * latent.v_dim)}
    dense = {"ffn_gate": (cfg.ffn_dim, D), "ffn_up": (cfg.ffn_dim, D), "ffn_down": (D, cfg.ffn_dim)}
    E, F = moe.n_expert, moe.expert_dim
    sparse = {
        "ffn_gate_inp": (E, D), "exp_probs_b.bias": (E,), "ffn_gate_exps": (E, F, D),
        "ffn_up_exps": (E, F, D), "ffn_down_exps": (E, D, F), "ffn_gate_shexp": (moe.shared_dim, D),
        "ffn_up_shexp": (moe.shared_dim, D), "ffn_down_shexp": (D, moe.shared_dim)}
    layers = [attention | (sparse if cfg.sparse[i % len(cfg.sparse)] else dense)
              for i in range(cfg.n_layer)]
    return _shapes(cfg, layers)


def _shapes(cfg, layers: list[dict]) -> dict[str, tuple[int, ...]]:
    """Of the whole model, by the shapes of its layers' matrices."""
    shapes = {"token_embd": (cfg.vocab_size, cfg.dim), "output_norm": (cfg.dim,)}
    if not cfg.tied:
        shapes["output"] = (cfg.vocab_size, cfg.dim)
    for i, layer in enumerate(layers):
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def _random(shapes: dict[str, tuple[int, ...]]) -> dict[str, GGUFTensor]:
    """Normal, as small as an initialization; norms are ones, as are routers' biases."""
    import numpy as np
    random = np.random.default_rng(0)

    def row_reader(shape):
        if len(shape) == 1:
            return lambda begin, end: np.ones(shape)
        n = shape[-1]
        return lambda begin, end: 0.02 * random.standard_normal((end - begin, n), np.float32)
    names = {name: name if name.endswith("bias") else f"{name}.weight" for name in shapes}
    return {names[name]: GGUFTensor(shape, row_reader(shape)) for name, shape in shapes.items()}
