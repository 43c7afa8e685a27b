"""Meta's original files (params.json) and llama2.c's (model_args) -> a RawCheckpoint."""

import re
from pathlib import Path

from torch import Tensor

from checkpoint import LazyTensor, brief, lazy_tensors, read_json, reading, some
from gpt_faster.formats.config import config_from_hf
from gpt_faster.formats.fold import Folds
from gpt_faster.formats.lazy import concatenate
from gpt_faster.formats.raw_checkpoint import RawCheckpoint
from gpt_faster.formats.schema import check_keys
from gpt_faster.formats.torch_file import read_torch

META_NAMES = {
    "tok_embeddings": "embed", "norm": "norm", "output": "head",
    "attention_norm": "attn_norm", "ffn_norm": "ffn_norm",
    "attention.wq": "attn.wq", "attention.wk": "attn.wk", "attention.wv": "attn.wv",
    "attention.wo": "attn.wo",
    "feed_forward.w1": "ffn.gate", "feed_forward.w3": "ffn.up", "feed_forward.w2": "ffn.down",
}
BY_COLUMNS = re.compile(r"\.(wo|w2)\.weight$|^tok_embeddings")


def read_meta(path: Path) -> RawCheckpoint:
    """Read consolidated.NN.pth, all shards, and params.json."""
    directory = path.parent
    sharded = path.name.startswith("consolidated.")
    paths = sorted(directory.glob("consolidated.*.pth")) if sharded else [path]
    shards = [{t.name: t for t in lazy_tensors(read_torch(p), p)} for p in paths]
    for other, tensors in zip(paths, shards):
        if tensors.keys() != shards[0].keys():
            names = sorted(tensors.keys() ^ shards[0].keys())
            raise ValueError(f"{other}: {some(names)} not in all {len(paths)} shards")
    tensors = [_merge([shard[name] for shard in shards]) for name in shards[0]]
    return _checkpoint(path, tensors, read_json(directory / "params.json"), [])


def read_llama2c(path: Path, content: dict) -> RawCheckpoint:
    """content: llama2.c's dict of `model` and `model_args`."""
    lazy_tensors(content["model"])                 # ValueError if it is not a dict of tensors
    weights = {k.removeprefix("_orig_mod."): v for k, v in content["model"].items()
               if isinstance(v, Tensor)}
    head, embed = weights.get("output.weight"), weights.get("tok_embeddings.weight")
    if head is not None and embed is not None and head.data_ptr() == embed.data_ptr():
        del weights["output.weight"]               # llama2.c ties them
    eos_ids = [1, 2]                               # a story ends where the next begins: BOS too
    return _checkpoint(path, lazy_tensors(weights), content["model_args"], eos_ids)


def _merge(pieces: list[LazyTensor]) -> LazyTensor:
    """Concatenate tensor-parallel shards along rows or columns."""
    first = pieces[0]
    if len(pieces) == 1 or len(first.shape) == 1:
        return first
    if any(len(p.shape) != 2 or p.shape != first.shape for p in pieces):
        shapes = " and ".join(str(list(p.shape)) for p in pieces)
        raise ValueError(f"{first.name}: shard shapes {shapes}, expected equal shares of a matrix")
    return concatenate(pieces, 1 if BY_COLUMNS.search(first.name) else 0)


def _checkpoint(path: Path, tensors: list[LazyTensor], params: dict,
                eos_ids: list[int]) -> RawCheckpoint:
    sizes = {t.name: t.shape[0] for t in tensors if t.shape}
    embed, gate = sizes.get("tok_embeddings.weight"), sizes.get("layers.0.feed_forward.w1.weight")
    if embed is None or gate is None:
        raise ValueError(f"{path}: tok_embeddings.weight or layers.0.feed_forward.w1.weight is "
                         "missing")
    if not isinstance(params, dict):
        raise ValueError(f"{path}: params.json or model_args is {brief(params)}, expected a dict")
    scaled, theta = params.get("use_scaled_rope", False), params.get("rope_theta", 10000.0)
    check_keys({"rope_theta": theta})
    context = params.get("max_seq_len") or (       # if missing: Llama 3.1, 3, CodeLlama, 2
        131072 if scaled else {5e5: 8192, 1e6: 16384}.get(theta, 4096))
    factor = 32 if params.get("dim") in (2048, 3072) else 8            # Llama 3.2 1B and 3B; 3.1
    rope = dict(rope_type="llama3", factor=params.get("rope_scaling_factor", factor),
                low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=8192)
    if missing := [key for key in ("dim", "n_layers", "n_heads") if key not in params]:
        raise ValueError(f"{path}: {some(missing)} missing in params.json or model_args")
    with reading(path):
        cfg, _ = config_from_hf(dict(
            model_type="llama", hidden_size=params["dim"], num_hidden_layers=params["n_layers"],
            num_attention_heads=params["n_heads"], num_key_value_heads=params.get("n_kv_heads"),
            intermediate_size=gate, vocab_size=embed,
            max_position_embeddings=context, rms_norm_eps=params.get("norm_eps", 1e-5),
            rope_theta=theta, rope_scaling=rope if scaled else None,
            tie_word_embeddings="output.weight" not in sizes))
    return RawCheckpoint(path, cfg, tensors, META_NAMES, eos_ids, tokenizer=path.parent,
                         folds=Folds(interleaved_rope=True))
