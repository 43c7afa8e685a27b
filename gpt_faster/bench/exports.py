"""Export a model for peers: a GGUF for llama.cpp, a Hugging Face directory for the others.

It knows the two formats and no peer. The gguf package is imported on use.

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

from checkpoint import HF_NAMES
from gpt_faster.bench.twins import LOOKUP_ONLY, Twin, is_plain_llama, twin_of

HF_NAME_OF = {ours: theirs for theirs, ours in HF_NAMES.items()}
GGUF_FORMATS = ("BF16", "Q8_0", "Q4_0")
CHUNK = 1 << 22                                    # elements written at a time


class GGUFTensor(NamedTuple):
    shape: tuple[int, ...]
    read_rows: Callable                            # (begin, end) -> flattened rows, float32


class GGUFField(NamedTuple):
    """A metadata field; item_type: type of the elements if `type` is ARRAY."""

    name: str
    value: object
    type: int
    item_type: int | None


class GGUFModel(NamedTuple):
    architecture: str
    fields: list[GGUFField]
    tensors: dict[str, GGUFTensor]


def export_hf_config(cfg, path: Path) -> Path:
    """Write a config.json from which transformers initializes random weights.

    ValueError if it is not a plain Llama.
    """
    check_plain_llama(cfg, "transformers")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_llama_config(cfg)))
    return path


def export_hf(checkpoint, directory: Path, dtype: torch.dtype) -> Path:
    """Write config.json, model.safetensors and a tokenizer, unless the directory exists.

    The weights are converted to dtype; random ones use a fixed seed. The tokenizer is a dummy (t0,
    t1, …), since peers get token ids. ValueError if it is not a plain, unquantized Llama.
    """
    if directory.exists():
        return directory
    cfg = checkpoint.cfg
    is_random = any(tensor.read_rows is None for tensor in checkpoint.tensors.values())
    rope = cfg.rope[0]
    has_plain_rope = rope == type(rope)(rope.theta, original_context=rope.original_context)
    is_quantized = any(name.endswith(".scales") for name in checkpoint.tensors)
    if not is_plain_llama(cfg) or is_quantized or not (has_plain_rope or is_random):
        raise ValueError("only plain Llama models can be exported as a Hugging Face directory")
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    config = _llama_config(cfg) | dict(architectures=["LlamaForCausalLM"], bos_token_id=1,
                                       eos_token_id=2, torch_dtype=str(dtype)[6:])
    (partial / "config.json").write_text(json.dumps(config))
    _write_dummy_tokenizer(cfg.vocab_size, partial)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tensors = {_hf_name(name): _read(tensor, dtype)
                   for name, tensor in checkpoint.tensors.items()}
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    os.replace(partial, directory)
    return directory


def _llama_config(cfg) -> dict:
    """config.json of a plain Llama."""
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


def _write_dummy_tokenizer(n: int, directory: Path) -> None:
    """Words t0, t1, …: converters require a tokenizer."""
    from tokenizers import Tokenizer, models
    words = {f"t{i}": i for i in range(n)}
    Tokenizer(models.WordLevel(words, unk_token="t0")).save(str(directory / "tokenizer.json"))
    config = dict(tokenizer_class="PreTrainedTokenizerFast", unk_token="t0", bos_token="t1",
                  eos_token="t2")
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def check_plain_llama(cfg, peer: str) -> None:
    """ValueError if cfg is not a plain Llama."""
    if not is_plain_llama(cfg):
        raise ValueError(f"{peer}: --random supports only plain Llama models")


def export_gguf(checkpoint, path: Path, gguf_format: str) -> Path:
    """Write a model for llama.cpp as BF16, Q8_0 or Q4_0, unless the file exists.

    From a GGUF: its metadata and tensors, requantized. From a random model: its shape with new
    random weights. Vectors, routers and position embeddings stay float32; in Q4_0 the embedding
    and the head are Q8_0, like our int8. Written in chunks of a few megabytes. ValueError if
    llama.cpp does not support the model.
    """
    import gguf
    if path.exists():
        return path
    if gguf_format not in GGUF_FORMATS:
        raise ValueError(f"llama.cpp: unknown GGUF format {gguf_format} "
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
    """The metadata and lazy tensors of a GGUF for this checkpoint. ValueError if not possible."""
    import gguf
    path = Path(checkpoint.path)
    if path.suffix != ".gguf":
        if any(tensor.read_rows is not None for tensor in checkpoint.tensors.values()):
            raise ValueError("llama.cpp needs a .gguf file or --random")
        twin = twin_of(checkpoint.cfg)
        return GGUFModel(twin.architecture, _random_fields(twin), _random_weights(twin))
    reader = gguf.GGUFReader(path)
    fields = [GGUFField(f.name, f.contents(), f.types[0], f.types[-1])
              for f in reader.fields.values()]
    if any(field.name == "split.count" and field.value > 1 for field in fields):
        raise ValueError(f"llama.cpp: {path.name} is split: expected a single GGUF file")
    tensors = {}
    for tensor in reader.tensors:
        shape = tuple(int(n) for n in tensor.shape[::-1])
        tensors[tensor.name] = GGUFTensor(shape, _row_reader(tensor))
    return GGUFModel(reader.fields["general.architecture"].contents(), fields, tensors)


def _row_reader(tensor) -> Callable:
    """-> (begin, end) -> float32 rows of a GGUF tensor; all axes but the last are flattened."""
    import gguf
    data = tensor.data.reshape(-1, tensor.data.shape[-1])
    return lambda begin, end: gguf.dequantize(data[begin:end], tensor.tensor_type)


def _add_fields(writer, fields: list[GGUFField]) -> None:
    import gguf
    # GGUFWriter writes these itself.
    excluded = ("general.architecture", "general.file_type", "general.alignment")
    for field in fields:
        is_empty = field.value == []               # gguf rejects empty lists
        if field.name in excluded or field.name.startswith("GGUF.") or is_empty:
            continue
        item_type = field.item_type if field.type == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.value, field.type, item_type)


def _tensor_type(name: str, shape: tuple[int, ...], gguf_format: str):
    """A tensor's GGML type in a file of this format."""
    import gguf
    types = gguf.GGMLQuantizationType
    no_matrix = re.search(r"norm|gate_inp|^pos|conv1d|\.conv\.", name)
    if len(shape) < 2 or not name.endswith("weight") or no_matrix:
        return types.F32
    if gguf_format == "Q4_0" and re.match(r"(token_embd|output)\.", name):
        gguf_format = "Q8_0"
    block_size, _ = gguf.GGML_QUANT_SIZES[types[gguf_format]]
    return types[gguf_format] if shape[-1] % block_size == 0 else types.BF16


def _write_tensors(writer, tensors: dict[str, GGUFTensor], gguf_format: str) -> None:
    """Write the header, then the tensors in chunks."""
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


def _random_fields(twin: Twin) -> list[GGUFField]:
    """Metadata with a dummy vocabulary."""
    import gguf
    types = gguf.GGUFValueType
    known = {int: (types.UINT32, None), float: (types.FLOAT32, None), bool: (types.BOOL, None),
             list: (types.ARRAY, types.INT32)}
    n = twin.metadata["vocab_size"]
    special = ["<unk>", "<s>", "</s>"] + [f"<0x{i:02X}>" for i in range(256)]
    tokens = special + [f"t{i}" for i in range(n)]
    unknown, control, byte, normal = 2, 3, 6, 1
    token_types = [unknown, control, control] + [byte] * 256 + [normal] * n
    return [
        *(GGUFField(f"{twin.architecture}.{key}", value, *known[type(value)])
          for key, value in twin.metadata.items()),
        GGUFField("tokenizer.ggml.model", "llama", types.STRING, None),
        GGUFField("tokenizer.ggml.tokens", tokens[:n], types.ARRAY, types.STRING),
        GGUFField("tokenizer.ggml.scores", [0.0] * n, types.ARRAY, types.FLOAT32),
        GGUFField("tokenizer.ggml.token_type", token_types[:n], types.ARRAY, types.INT32)]


def _random_weights(twin: Twin) -> dict[str, GGUFTensor]:
    """Normal with std 0.02; norms are 1, SSM decay rates -1, biases 0."""
    import numpy as np
    random = np.random.default_rng(0)

    def row_reader(name, shape):
        if len(shape) == 1 or name.endswith("ssm_a"):
            value = -1 if name.endswith("ssm_a") else 0 if name.endswith("bias") else 1
            return lambda begin, end: np.full((end - begin, shape[-1]), value)
        n = shape[-1]
        if name.startswith(LOOKUP_ONLY):
            return lambda begin, end: np.zeros((end - begin, n), np.float32)
        return lambda begin, end: 0.02 * random.standard_normal((end - begin, n), np.float32)
    return {name: GGUFTensor(shape, row_reader(name, shape))
            for name, shape in twin.shapes.items()}
