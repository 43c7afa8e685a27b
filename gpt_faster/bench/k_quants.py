"""llama.cpp's Q4_K_M made of a checkpoint's weights, by llama.cpp's own code, and read back.

Owns which type each tensor gets (llama.cpp's src/llama-quant.cpp, of a dense model). The code is
that of the package xllamacpp, in an environment of its own:

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
FALLBACK = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}        # of rows that 256 does not divide


def library() -> ctypes.CDLL:
    found = [*ROOT.glob(".venv-q/lib/python*/site-packages/xllamacpp/*.so")]
    if not found:
        raise FileNotFoundError(f"no xllamacpp in {ROOT / '.venv-q'}: {__doc__.splitlines()[-2]}")
    code = ctypes.CDLL(str(found[0]), ctypes.RTLD_LOCAL)
    code.ggml_quantize_chunk.restype = ctypes.c_size_t
    return code


def type_of(name: str, n_in: int, n_layer: int) -> str | None:
    """Of our tensor in a Q4_K_M; None: as it is."""
    kind = None
    if name in ("embed.weight", "head.weight"):
        kind = "Q6_K"
    elif name.startswith("layers.") and name.split(".")[-2] in (
            "wq", "wk", "wv", "wo", "gate", "up", "down"):
        i, eighth = int(name.split(".")[1]), n_layer // 8
        more = i < eighth or i >= 7 * n_layer // 8 or (i - eighth) % 3 == 2
        kind = "Q6_K" if more and name.split(".")[-2] in ("wv", "down") else "Q4_K"
    return FALLBACK[kind] if kind and n_in % 256 else kind


def q4_k_m(source: Checkpoint, importance: dict[str, torch.Tensor]) -> tuple[Checkpoint, float]:
    """importance: mean square of a linear's inputs [in], by tensor (llama.cpp's imatrix); {}: none.

    -> plain weights that these blocks stand for, and bits per weight, everything counted.
    """
    code, tensors, bits, total = library(), dict(source.tensors), 0, 0
    for name, t in source.tensors.items():
        n = int(np.prod(t.shape))
        kind = type_of(name, t.shape[-1], source.cfg.n_layer)
        total += n
        if kind is None:
            bits += 32 * n
            continue
        n_block, n_byte = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        bits += 8 * n * n_byte // n_block
        tensors[name] = quantized(code, t, kind, importance.get(name))
    return replace(source, tensors=tensors), bits / total


def quantized(code, t: LazyTensor, kind: str, importance: torch.Tensor | None) -> LazyTensor:
    def make():
        w = t.whole().float().contiguous().numpy()
        type_ = gguf.GGMLQuantizationType[kind]
        n_block, n_byte = gguf.GGML_QUANT_SIZES[type_]
        blocks = np.empty((w.shape[0], w.shape[1] // n_block * n_byte), np.uint8)
        weights = None if importance is None else importance.float().contiguous().numpy()
        pointer = lambda a: None if a is None else a.ctypes.data_as(ctypes.c_void_p)
        size = code.ggml_quantize_chunk(
            ctypes.c_int(int(type_)), pointer(w), pointer(blocks), ctypes.c_int64(0),
            ctypes.c_int64(w.shape[0]), ctypes.c_int64(w.shape[1]), pointer(weights))
        assert size == blocks.nbytes, (size, blocks.nbytes)
        return torch.from_numpy(gguf.dequantize(blocks, type_).copy())
    return cached(t.name, t.shape, torch.bfloat16, make, t)


@torch.inference_mode()
def importance_of(model, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """tokens [n, T] -> the mean square of each linear's inputs, by its tensors' names on disk."""
    squares, count = {}, tokens.numel()

    def watch(name):
        def see(_, inputs):
            x = inputs[0].flatten(0, -2).float().square().sum(0) / count
            for on_disk in disk_names(f"{name}.weight"):
                squares[on_disk] = squares.get(on_disk, 0) + x
        return see
    hooks = [module.register_forward_pre_hook(watch(name)) for name, module in
             model.named_modules() if isinstance(module, torch.nn.Linear) and name != "head"]
    for row in tokens:
        model(row[None], torch.arange(len(row)))
    for hook in hooks:
        hook.remove()
    return squares
