"""A model's weights under one quantization scheme, loaded once for all engines that run them.

It knows checkpoints, quantization and ranks, and nothing of engines.

    weights = load_weights(source, "int4-g64", torch.bfloat16, torch.device("cpu"))
"""

from dataclasses import dataclass

import torch

import quantize
import tp
from cli.common import free_memory, log
from cli.ranks import n_local
from formats import checkpoint as checkpoints
from generate import load_shard
from model import ModelConfig, Transformer

SCHEME = r"int8|int4(-g(32|64|128|256))?"


@dataclass(frozen=True, eq=False)
class Weights:
    """model is None where the weights do not fit; then `error` says why."""

    name: str                                      # of the checkpoint
    cfg: ModelConfig                               # of all ranks together
    n_parameters: int
    scheme: str                                    # as requested: none, int8, int4, int4-g64, …
    quantization: str                              # as the weights are: none, int8, int4-g32, …
    dtype: torch.dtype
    model: Transformer | None
    error: str | None = None


def parse_scheme(scheme: str) -> tuple[str, int]:
    """int4-g64 -> ("int4", 64); groups are of 32 where the name has no size."""
    mode, _, group = scheme.partition("-g")
    return mode, int(group or 32)


def load_weights(source, scheme: str, dtype: torch.dtype, device: torch.device) -> Weights:
    """A checkpoint's weights on the device, quantized unless the scheme is none."""
    name = source.path.name
    model = None
    error = None
    quantized = source
    try:
        if scheme != "none":
            mode, group = parse_scheme(scheme)
            quantized = quantize.quantized(source, mode, group, device=device)
        n_bytes = checkpoints.n_bytes(tp.shard(quantized), dtype)
        # The ranks of one machine share its memory.
        n_sharing = n_local() if device.type == "cpu" else 1
        if n_bytes > free_memory(device) / n_sharing:
            raise torch.OutOfMemoryError(f"the weights take {n_bytes / 1e9:.1f} GB")
        model = load_shard(quantized, dtype, device)
    except torch.OutOfMemoryError as e:
        error = f"out of memory: {str(e).splitlines()[0][:160]}"
        log(f"{name} {scheme}: {error}")
    return Weights(name=name, cfg=source.cfg, n_parameters=checkpoints.n_parameters(source),
                   scheme=scheme, quantization=quantize.schemes(quantized)[0], dtype=dtype,
                   model=model, error=error)
