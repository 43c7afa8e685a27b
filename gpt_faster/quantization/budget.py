"""Mixed precision within a bit budget: the linears most sensitive to four bits get eight.

Sensitivity is measured one linear at a time, as the KL divergence of the next token's distribution
when only this linear is quantized. Linears that are fused in memory (q, k, v) are one choice.

    costs = measure(model, tokens, scheme_named("int4-g128"))
    chosen = choose(model, costs, scheme_named("int4-g128"), bits=4.5)
"""

import sys
import time

import torch
from torch import Tensor, nn

from checkpoint import disk_names
from gpt_faster.quantization.solve import round_to_nearest
from model import ExpertLinear, Transformer
from quantize import LINEARS, Scheme, scheme_named

N_WINDOW, LENGTH = 16, 128                         # windows of text, tokens in each
N_SCORED = 64                                      # last tokens of a window that are scored
MAX_CANDIDATES = 8192                              # most likely tokens that are compared
INT8 = scheme_named("int8")


def linears(model: nn.Module) -> dict[str, nn.Module]:
    """The linears to quantize, fused as in memory, by name."""
    return {name: module for name, module in model.named_modules()
            if isinstance(module, nn.Linear | ExpertLinear)
            and LINEARS.search(disk_names(f"{name}.weight")[0])}


def n_bit(module: nn.Module, scheme: Scheme) -> int:
    """Bits of the weight in this scheme, with scales and zero points."""
    tensors = scheme.leaves(module.weight.shape).values()
    return sum(8 * torch.Size(shape).numel() * dtype.itemsize for shape, dtype in tensors)


@torch.inference_mode()
def measure(model: Transformer, tokens: Tensor, scheme: Scheme) -> dict[str, float]:
    """tokens [n, T] -> mean KL divergence in nats, by the linear's name. Removes the cache.

    Runs only the layers from the linear's own on: earlier ones are unchanged.
    """
    spread = torch.linspace(0, len(tokens) - 1, min(len(tokens), N_WINDOW)).round().long()
    tokens = tokens[spread, :LENGTH].to(model.freq.device)
    pos = torch.arange(tokens.shape[1], device=tokens.device)
    model.setup_cache(0, len(pos))
    x, *shared = model.embed_inputs(tokens, pos, len(pos))
    inputs = model.layer_inputs(shared)

    def run(x: Tensor, begin: int, end: int | None = None) -> Tensor:
        """Layers [begin, end)."""
        for layer, layer_inputs in list(zip(model.layers, inputs))[begin:end]:
            x = layer(x, *layer_inputs[:3], None, *layer_inputs[3:])
        return x

    def log_probs(x: Tensor) -> Tensor:
        """The last layer's output -> log-probabilities [n, N_SCORED, V], fp32."""
        return model.unembed(x[:, -N_SCORED:]).log_softmax(-1)

    hidden, head = run(x, 0), model.head
    if isinstance(head, nn.Linear):
        model.head = select_rows(head, most_likely(log_probs(hidden).exp()))
    original, costs = log_probs(hidden), {}
    begin = last = time.perf_counter()
    modules, done, total = linears(model), 0.0, sum(range(len(model.layers) + 1))
    for i in range(len(model.layers)):
        in_layer = {name: m for name, m in modules.items() if name.startswith(f"layers.{i}.")}
        for name, module in in_layer.items():
            weight = module.weight.clone()
            module.weight.copy_(round_to_nearest(weight, scheme))
            quantized = log_probs(run(x, i))
            module.weight.copy_(weight)
            costs[name] = float((original.exp() * (original - quantized)).sum(-1).mean())
            done += (len(model.layers) - i) / len(in_layer)
            if time.perf_counter() > last + 10:
                last = time.perf_counter()
                left = (last - begin) / done * (total - done)
                print(f"{len(costs)} of {len(modules)} linears measured, {left:.0f} s left",
                      file=sys.stderr, flush=True)
        x = run(x, i, i + 1)                       # also records the keys that later layers share
    model.head = head
    return costs


def most_likely(probs: Tensor) -> Tensor:
    """probs [n, T, V] -> ids of at most MAX_CANDIDATES tokens: a large head would dominate the
    time."""
    mean = probs.mean((0, 1))
    return mean.topk(min(len(mean), MAX_CANDIDATES)).indices


def select_rows(linear: nn.Linear, ids: Tensor) -> nn.Linear:
    new = nn.Linear(1, 1, bias=linear.bias is not None, device="meta")
    for name, t in linear.named_parameters():
        setattr(new, name, nn.Parameter(t[ids], requires_grad=False))
    return new


def choose(model: nn.Module, costs: dict[str, float], scheme: Scheme, bits: float) -> set[str]:
    """Names on disk of the parameters that get eight bits, within `bits` per weight on average.

    Greedy by divergence per additional bit. ValueError if `bits` is less than the scheme itself
    needs, or if no linear is left to choose.
    """
    modules = linears(model)
    if not modules:
        raise ValueError("--bits: every linear is quantized already")
    total = sum(module.weight.numel() for module in modules.values())
    left = bits * total - sum(n_bit(module, scheme) for module in modules.values())
    if left < 0:
        raise ValueError(f"--bits {bits:g}: {scheme.name} alone needs {bits - left / total:.3g} "
                         "bits per weight")
    extra = {name: n_bit(module, INT8) - n_bit(module, scheme) for name, module in modules.items()}
    chosen = set()
    for name in sorted(costs, key=lambda name: costs[name] / extra[name], reverse=True):
        if extra[name] <= left:
            left -= extra[name]
            chosen.update(disk_names(f"{name}.weight"))
    return chosen
