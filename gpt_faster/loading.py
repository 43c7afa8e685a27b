"""Load a model of any format that we read, ready for the fast kernels: what all our commands call.

generate.load_model() reads what the core reads, and nothing is exchanged in its model.

    model, source, tokenizer = load_model("model.gguf", "cpu", torch.bfloat16)
    steps = gpt_faster.kernels.compile.compile_steps(model)
"""

import torch

import tp
from gpt_faster.formats import load, quantized
from gpt_faster.kernels.cuda.attention import use_fused_attention
from gpt_faster.text.tokenizer_files import load_for
from model import Transformer


def load_model(path: str | None = None, device="cpu", dtype: torch.dtype = torch.bfloat16,
               scheme: str | None = None, head: str = "int8") -> tuple:
    """A path or hub name, None for the default model -> model, checkpoint, tokenizer.

    scheme: int8, int4-g32, …: round the weights while loading, and the head as int8, int4 or none.
    FileNotFoundError, ValueError or OSError say in one line what was found and what to do.
    """
    source = load.open_checkpoint(path)
    tokenizer = load_for(source)
    if scheme:
        source = quantized.quantized(source, scheme, head=head, device=device)
    return load_shard(source, dtype, device), source, tokenizer


def load_shard(source, dtype: torch.dtype, device, kernels: bool = True) -> Transformer:
    """This rank's part of a model, joined to the others'; alone, the whole.

    kernels: ready for ours; else as the core's load_model() gives it, for torch.compile alone.
    """
    model = load.load_model(tp.shard(source), dtype, device, packed=kernels)
    if kernels:
        use_fused_attention(model)
    return tp.parallelize(model, source.cfg.vocab_size)
