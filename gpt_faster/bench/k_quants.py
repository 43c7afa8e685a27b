"""Quantize a checkpoint to Q4_K_M with llama.cpp's code, and dequantize it again.

The type of each tensor follows src/llama-quant.cpp for dense models. The code comes from the
package xllamacpp in a separate environment:

    python3 -m venv .venv-q && .venv-q/bin/pip install xllamacpp==2026.10.11549
"""

import ctypes
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import torch

from checkpoint import Checkpoint, LazyTensor, disk_names
from gpt_faster.formats.lazy import cached

ROOT = Path(__file__).resolve().parents[2]
FALLBACK = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}        # for rows not divisible by 256


def load_library() -> ctypes.CDLL:
    paths = [*ROOT.glob(".venv-q/lib/python*/site-packages/xllamacpp/*.so")]
    if not paths:
        raise FileNotFoundError(f"no xllamacpp in {ROOT / '.venv-q'}: {__doc__.splitlines()[-2]}")
    lib = ctypes.CDLL(str(paths[0]), ctypes.RTLD_LOCAL)
    lib.ggml_quantize_chunk.restype = ctypes.c_size_t
    return lib


def type_of(name: str, n_in: int, n_layer: int) -> str | None:
    """A tensor's type in Q4_K_M; None: not quantized."""
    kind = None
    if name in ("embed.weight", "head.weight"):
        kind = "Q6_K"
    elif name.startswith("layers.") and name.split(".")[-2] in (
            "wq", "wk", "wv", "wo", "gate", "up", "down"):
        i, eighth = int(name.split(".")[1]), n_layer // 8
        uses_q6 = i < eighth or i >= 7 * n_layer // 8 or (i - eighth) % 3 == 2
        kind = "Q6_K" if uses_q6 and name.split(".")[-2] in ("wv", "down") else "Q4_K"
    return FALLBACK[kind] if kind and n_in % 256 else kind


def q4_k_m(source: Checkpoint, importance: dict[str, torch.Tensor]) -> tuple[Checkpoint, float]:
    """Quantize all tensors -> a checkpoint with the dequantized weights, bits per weight (total).

    importance: mean square of each linear's inputs [in], by tensor (llama.cpp's imatrix), or {}.
    """
    lib, tensors, bits, total = load_library(), dict(source.tensors), 0, 0
    for name, t in source.tensors.items():
        n = int(np.prod(t.shape))
        kind = type_of(name, t.shape[-1], source.cfg.n_layer)
        total += n
        if kind is None:
            bits += 32 * n
            continue
        n_block, n_byte = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        bits += 8 * n * n_byte // n_block
        tensors[name] = quantize_tensor(lib, t, kind, importance.get(name))
    return replace(source, tensors=tensors), bits / total


def quantize_tensor(lib, t: LazyTensor, kind: str, importance: torch.Tensor | None) -> LazyTensor:
    def dequantize():
        w = t.whole().float().contiguous().numpy()
        type_ = gguf.GGMLQuantizationType[kind]
        n_block, n_byte = gguf.GGML_QUANT_SIZES[type_]
        blocks = np.empty((w.shape[0], w.shape[1] // n_block * n_byte), np.uint8)
        weights = None if importance is None else importance.float().contiguous().numpy()
        pointer = lambda a: None if a is None else a.ctypes.data_as(ctypes.c_void_p)
        size = lib.ggml_quantize_chunk(
            ctypes.c_int(int(type_)), pointer(w), pointer(blocks), ctypes.c_int64(0),
            ctypes.c_int64(w.shape[0]), ctypes.c_int64(w.shape[1]), pointer(weights))
        assert size == blocks.nbytes, (size, blocks.nbytes)
        return torch.from_numpy(gguf.dequantize(blocks, type_).copy())
    return cached(t.name, t.shape, torch.bfloat16, dequantize, t)


@torch.inference_mode()
def importance_of(model, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """tokens [n, T] -> the mean square of each linear's inputs, by tensor name on disk."""
    squares, count = {}, tokens.numel()

    def hook_for(name):
        def add_squares(_, inputs):
            x = inputs[0].flatten(0, -2).float().square().sum(0) / count
            for on_disk in disk_names(f"{name}.weight"):
                squares[on_disk] = squares.get(on_disk, 0) + x
        return add_squares
    hooks = [module.register_forward_pre_hook(hook_for(name)) for name, module in
             model.named_modules() if isinstance(module, torch.nn.Linear) and name != "head"]
    for row in tokens:
        model(row[None], torch.arange(len(row)))
    for hook in hooks:
        hook.remove()
    return squares
