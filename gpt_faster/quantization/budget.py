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

from checkpoint import disk_names
from gpt_faster.quantization.solve import nearest
from model import ExpertLinear, Transformer
from quantize import LINEARS, Scheme, scheme_named

N_WINDOW, LENGTH, N_JUDGED = 16, 128, 64           # windows, their tokens, of which the last count
N_LIKELIEST = 8192                                 # tokens whose probabilities count
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
    """tokens [n, T] -> for each linear's name the mean KL divergence in nats. Removes the cache.

    From the linear's own layer on: what the layers before it give is the original's.
    """
    spread = torch.linspace(0, len(tokens) - 1, min(len(tokens), N_WINDOW)).round().long()
    tokens = tokens[spread, :LENGTH].to(model.freq.device)
    pos = torch.arange(tokens.shape[1], device=tokens.device)
    model.setup_cache(0, len(pos))
    x, *shared = model.embed_inputs(tokens, pos, len(pos))
    inputs = model.layer_inputs(shared)

    def run(x: Tensor, begin: int, end: int | None = None) -> Tensor:
        """Some layers of it."""
        for layer, given in list(zip(model.layers, inputs))[begin:end]:
            x = layer(x, *given[:3], None, *given[3:])
        return x

    def predicted(x: Tensor) -> Tensor:
        """What the last layer gives -> logarithms of probabilities [n, N_JUDGED, V], fp32."""
        return model.unembed(x[:, -N_JUDGED:]).log_softmax(-1)

    last_layer, head = run(x, 0), model.head
    if isinstance(head, nn.Linear):
        model.head = rows_of(head, likeliest(predicted(last_layer).exp()))
    original, costs = predicted(last_layer), {}
    begin = last = time.perf_counter()
    modules, done, total = linears(model), 0.0, sum(range(len(model.layers) + 1))
    for i in range(len(model.layers)):
        mine = {name: m for name, m in modules.items() if name.startswith(f"layers.{i}.")}
        for name, module in mine.items():
            weight = module.weight.clone()
            module.weight.copy_(nearest(weight, scheme))
            found = predicted(run(x, i))
            module.weight.copy_(weight)
            costs[name] = float((original.exp() * (original - found)).sum(-1).mean())
            done += (len(model.layers) - i) / len(mine)
            if time.perf_counter() > last + 10:
                last = time.perf_counter()
                left = (last - begin) / done * (total - done)
                print(f"{len(costs)} of {len(modules)} linears are measured, {left:.0f} s left",
                      file=sys.stderr, flush=True)
        x = run(x, i, i + 1)                       # and the keys that later layers take of it
    model.head = head
    return costs


def likeliest(probabilities: Tensor) -> Tensor:
    """[n, T, V] -> N_LIKELIEST tokens at most: a large head would take most of the time."""
    mean = probabilities.mean((0, 1))
    return mean.topk(min(len(mean), N_LIKELIEST)).indices


def rows_of(linear: nn.Linear, ids: Tensor) -> nn.Linear:
    few = nn.Linear(1, 1, bias=linear.bias is not None, device="meta")
    for name, t in linear.named_parameters():
        setattr(few, name, nn.Parameter(t[ids], requires_grad=False))
    return few


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
