"""A model's weights in one quantization scheme, loaded once for all engines.

It knows checkpoints, quantization and ranks, and nothing of engines.

    weights = load_weights(source, "int4-g64", torch.bfloat16, torch.device("cpu"))
"""

from dataclasses import dataclass, field

import torch

import tp
from generate import log
from gpt_faster.devices import free_memory
from gpt_faster.formats import quantize_on_load
from gpt_faster.formats.known_shapes import random_dflash, random_eagle3, random_mtp_head
from gpt_faster.formats.load import count_parameters, n_bytes
from gpt_faster.layers.fp4 import MXFP4, NVFP4, Fp4
from gpt_faster.loading import load_shard
from model import ModelConfig, Transformer
from quantize import LINEARS, SCHEMES, schemes
from tp import n_local

FP4_SCHEMES = {scheme.name: scheme for scheme in (NVFP4, MXFP4)}


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
    drafters: dict[str, Transformer] = field(default_factory=dict)     # by engine: mtp, …


def is_scheme(name: str) -> bool:
    return name == "int4" or name in (*SCHEMES, *FP4_SCHEMES)


def load_weights(source, scheme: str, dtype: torch.dtype, device: torch.device,
                 drafters: tuple[str, ...] = (), engine: str = "kv_cache") -> Weights:
    """Load a checkpoint on the device, quantized unless the scheme is none.

    drafters: also load these: "mtp", the MTP head, with random weights if the checkpoint has none;
    "eagle3" or "dflash", such a drafter with random weights. engine: the first that runs the
    weights, see loading.py.
    """
    name = source.path.name
    model, loaded = None, {}
    error = None
    quantized_source = source
    try:
        if scheme in FP4_SCHEMES:
            quantized_source = random_fp4(source, FP4_SCHEMES[scheme])
        elif scheme != "none":
            quantized_source = quantize_on_load.quantized(source, scheme, device=device)
        else:
            quantized_source = quantize_on_load.with_fp4(source)
        size = n_bytes(tp.shard(quantized_source), dtype, device)
        # Ranks on one machine share its memory.
        n_sharing = n_local() if device.type == "cpu" else 1
        if size > free_memory(device) / n_sharing:
            raise torch.OutOfMemoryError(f"the weights take {size / 1e9:.1f} GB")
        model = load_shard(quantized_source, dtype, device, engine)
        for name_of_drafter in drafters:
            draft = open_drafter(name_of_drafter, source, scheme, device)
            loaded[name_of_drafter] = load_shard(draft, dtype, device, engine)
    except torch.OutOfMemoryError as e:
        error = f"out of memory: {str(e).splitlines()[0][:160]}"
        log(f"{name} {scheme}: {error}")
    return Weights(name=name, cfg=source.cfg, n_parameters=count_parameters(source.cfg),
                   scheme=scheme, quantization=schemes(quantized_source)[0], dtype=dtype,
                   model=model, error=error, drafters=loaded)


def random_fp4(source, scheme: Fp4):
    """The checkpoint with linears in fp4 and an int8 head. ValueError: its weights are not random,
    and nothing here rounds weights to fp4.
    """
    if any(t.read_rows for t in source.tensors.values()):
        raise ValueError(f"--quantize {scheme.name} needs --random: fp4 is only read, from files "
                         "that are in it")
    linears = filter(LINEARS.search, source.tensors)
    return quantize_on_load.quantized(source, "int4", others=dict.fromkeys(linears, scheme))


def open_drafter(name: str, source, scheme: str, device: torch.device):
    if name == "mtp":
        draft = source.mtp() if source.mtp else random_mtp_head(source)
    else:
        draft = random_eagle3(source) if name == "eagle3" else random_dflash(source)
    if scheme == "none":
        return draft
    head = "int8" if "head.weight" in draft.tensors else "none"
    return quantize_on_load.quantized(draft, scheme, head=head, device=device)
