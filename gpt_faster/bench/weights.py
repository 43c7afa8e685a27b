"""A model's weights in one quantization scheme, loaded once for all engines.

It knows checkpoints, quantization and ranks, and nothing of engines.

    weights = load_weights(source, "int4-g64", torch.bfloat16, torch.device("cpu"))
"""

from dataclasses import dataclass

import torch

import tp
from generate import log
from gpt_faster.devices import free_memory
from gpt_faster.formats import quantize_on_load
from gpt_faster.formats.known_shapes import random_mtp_head
from gpt_faster.formats.load import count_parameters, n_bytes
from gpt_faster.layers.mtp_head import MTPHead
from gpt_faster.loading import load_shard
from model import ModelConfig, Transformer
from quantize import SCHEMES, schemes
from tp import n_local


@dataclass(frozen=True, eq=False)
class Weights:
    """model is None if the weights do not fit in memory; then `error` says so."""

    name: str                                      # of the checkpoint
    cfg: ModelConfig                               # unsharded
    n_parameters: int
    scheme: str                                    # as requested: none, int8, int4, int4-g64, …
    quantization: str                              # actual: none, int8, int4-g32, …
    dtype: torch.dtype
    model: Transformer | None
    error: str | None = None
    head: MTPHead | None = None                    # for engine mtp


def is_scheme(name: str) -> bool:
    return name == "int4" or name in SCHEMES


def load_weights(source, scheme: str, dtype: torch.dtype, device: torch.device,
                 drafts: bool = False, engine: str = "kv_cache") -> Weights:
    """Load a checkpoint on the device, quantized unless the scheme is none.

    drafts: also load the MTP head, with random weights if the checkpoint has none; engine: the
    first that runs the weights, see loading.py.
    """
    name = source.path.name
    model = head = None
    error = None
    quantized_source = source
    try:
        if scheme != "none":
            quantized_source = quantize_on_load.quantized(source, scheme, device=device)
        size = n_bytes(tp.shard(quantized_source), dtype, device)
        # Ranks on one machine share its memory.
        n_sharing = n_local() if device.type == "cpu" else 1
        if size > free_memory(device) / n_sharing:
            raise torch.OutOfMemoryError(f"the weights take {size / 1e9:.1f} GB")
        model = load_shard(quantized_source, dtype, device, engine)
        if drafts:
            head = load_shard(mtp_head(source, scheme, device), dtype, device, engine)
    except torch.OutOfMemoryError as e:
        error = f"out of memory: {str(e).splitlines()[0][:160]}"
        log(f"{name} {scheme}: {error}")
    return Weights(name=name, cfg=source.cfg, n_parameters=count_parameters(source.cfg),
                   scheme=scheme, quantization=schemes(quantized_source)[0], dtype=dtype,
                   model=model, error=error, head=head)


def mtp_head(source, scheme: str, device: torch.device):
    head = source.mtp() if source.mtp else random_mtp_head(source)
    return head if scheme == "none" else quantize_on_load.quantized(head, scheme, head="none",
                                                             device=device)
