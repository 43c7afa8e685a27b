"""Which linears get eight bits of a budget: those whose rounding to four changes the text most.

Measured, one linear at a time: how far the next token's distribution diverges from the original's
when this one alone is rounded. Linears that are one matrix in memory go together.

    costs = measure(model, tokens, scheme_named("int4-g128"))
    chosen = choose(model, costs, scheme_named("int4-g128"), bits=4.5)
"""

import sys
import time

import torch
from torch import Tensor, nn

from formats.parameters import disk_names
from gptq.solve import nearest
from layers.moe import ExpertLinear
from model import Transformer
from quantize import LINEARS, Scheme, scheme_named

N_WINDOW, LENGTH, N_JUDGED = 16, 128, 64           # windows, their tokens, of which the last count
EIGHT = scheme_named("int8")


def linears(model: nn.Module) -> dict[str, nn.Module]:
    """Those that are quantized, as they lie in memory, by name."""
    return {name: module for name, module in model.named_modules()
            if isinstance(module, nn.Linear | ExpertLinear)
            and LINEARS.search(disk_names(f"{name}.weight")[0])}


def n_bit(module: nn.Module, scheme: Scheme) -> int:
    """What all its leaves take."""
    leaves = scheme.leaves(module.weight.shape).values()
    return sum(8 * torch.Size(shape).numel() * dtype.itemsize for shape, dtype in leaves)


@torch.inference_mode()
def measure(model: Transformer, tokens: Tensor, scheme: Scheme) -> dict[str, float]:
    """tokens [n, T] -> for each linear's name the mean KL divergence in nats. Removes the cache."""
    spread = torch.linspace(0, len(tokens) - 1, min(len(tokens), N_WINDOW)).round().long()
    tokens = tokens[spread, :LENGTH].to(model.freq.device)
    model.setup_cache(0, tokens.shape[1])
    original, costs = _predicted(model, tokens), {}
    begin = last = time.perf_counter()
    modules = linears(model)
    for i, (name, module) in enumerate(modules.items()):
        weight = module.weight.clone()
        module.weight.copy_(nearest(weight, scheme))
        found = _predicted(model, tokens)
        module.weight.copy_(weight)
        costs[name] = float((original.exp() * (original - found)).sum(-1).mean())
        if time.perf_counter() > last + 10:
            last = time.perf_counter()
            left = (last - begin) / (i + 1) * (len(modules) - i - 1)
            print(f"{i + 1} of {len(modules)} linears are measured, {left:.0f} s left",
                  file=sys.stderr, flush=True)
    return costs


def _predicted(model: Transformer, tokens: Tensor) -> Tensor:
    """Logarithms of probabilities [n, N_JUDGED, V], fp32."""
    pos = torch.arange(tokens.shape[1], device=tokens.device)
    return model(tokens, pos, logits_to_keep=N_JUDGED).log_softmax(-1)


def choose(model: nn.Module, costs: dict[str, float], scheme: Scheme, bits: float) -> set[str]:
    """The parameters on disk that get eight bits, so that linears have `bits` a weight at most.

    The most divergence for a bit first. ValueError where `bits` is less than the scheme alone has,
    and where nothing is left to choose from.
    """
    modules = linears(model)
    if not modules:
        raise ValueError("--bits: every linear is quantized already")
    total = sum(module.weight.numel() for module in modules.values())
    left = bits * total - sum(n_bit(module, scheme) for module in modules.values())
    if left < 0:
        raise ValueError(f"--bits {bits:g}: {scheme.name} alone has {bits - left / total:.3g}")
    more = {name: n_bit(module, EIGHT) - n_bit(module, scheme) for name, module in modules.items()}
    chosen = set()
    for name in sorted(costs, key=lambda name: costs[name] / more[name], reverse=True):
        if more[name] <= left:
            left -= more[name]
            chosen.update(disk_names(f"{name}.weight"))
    return chosen
