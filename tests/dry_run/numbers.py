"""Do our kernels compute the layer? Triton's interpreter runs them on a CPU; no hollow GPU here.

Each kind of model decodes, verifies and runs a batch of different positions: logits and caches
beside those of the plain layers, in fp32 and of quantized weights. The interpreter truncates to
bfloat16 where a GPU rounds, so that dtype says nothing here.

    python scripts/dev/gpu_dryrun.py --only numbers
"""

import os
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import gpu_check
import torch

from dry_run.report import judge_each, within
from gpt_faster.decoding import samplers
from gpt_faster.kernels import linear, moe
from gpt_faster.kernels.compile import replace_modules
from gpt_faster.kernels.cuda import fused_layer
from gpt_faster.kernels.cuda import products as cuda
from gpt_faster.layers.quantized_cache import CacheFormat
from sampling import SamplingParams

FP32 = torch.float32
TINY = dict(dim=64, n_layer=2, n_head=4, n_kv_head=2, head_dim=24, ffn_dim=96, vocab_size=128,
            n_expert=4, expert_dim=64, shared_dim=32)
MOST = 5e-5                                        # of the standard deviation
CASES = {                                          # rows, positions of each row, tokens in a call
    "decode": (1, [20], 1), "decode past the window": (1, [40], 1), "verify": (1, [17], 5),
    "verify across a ring's end": (1, [36], 4), "batch": (3, [20, 3, 41], 1)}
ALWAYS = ("decode past the window", "verify across a ring's end")
HOT = SamplingParams(temperature=5.0, min_p=0.1, seed=1)
DRAWS = {"top k": [SamplingParams(temperature=0.8, top_k=200)], "of all": [SamplingParams()],
         "a hot top k": [SamplingParams(temperature=9.0, top_k=3)], "min p": [HOT],
         "top p": [SamplingParams(top_p=0.3), SamplingParams(temperature=4.0, top_p=1e-6)],
         "rows": [SamplingParams(temperature=0), SamplingParams(top_k=50, temperature=2.0), HOT]}
# int4: the kernels have x in 16 bits, an error of 4e-5 a product
SCHEMES = {"int8": (dict(mode="int8"), 3e-4), "int4": (dict(mode="int4", groupsize=32), 2e-3)}
CACHES = ("int8", "int8/int4")
MOST_OF_CODES = 1e-2                               # logits and codes: a code is rounded either way
PRETENDERS = (fused_layer, linear, moe, cuda, samplers)


@torch.inference_mode()
def compare(family: str, case: str, kv_cache: str = "", **how) -> float:
    """The largest difference of logits and caches, as a share of their standard deviation; of
    codes, the share of those that differ.
    """
    n_row, starts, T = CASES[case]
    model = gpu_check.random_model(family, "cpu", FP32, **how)
    model.kv_cache = CacheFormat.parse(kv_cache) if kv_cache else None
    model.setup_cache(n_row, 256, 24)
    ids = torch.randint(0, TINY["vocab_size"], (n_row, 64))
    pos = torch.arange(64)
    for row, start in enumerate(starts):
        for at in range(0, start, 24):
            end = min(at + 24, start)
            batch_idx = None if n_row == 1 else torch.tensor([row])
            call = pos[at:end] if n_row == 1 else pos[None, at:end]
            model(ids[row:row + 1, at:end], call, 1, end, batch_idx)
    before = {name: b.clone() for name, b in model.named_buffers()}
    places = torch.tensor(starts)[:, None] + torch.arange(T)
    tokens = ids.gather(1, places)
    call = places[0] if n_row == 1 else places
    results = []
    for fused in (False, True):
        for name, b in model.named_buffers():
            if name in before:
                b.copy_(before[name])
        if fused:
            use_kernels(model)
        logits = model(tokens, call, T)
        after = {name: b.clone() for name, b in model.named_buffers() if name in before}
        results.append((logits, after))
    pretend(False)
    (plain, caches), (own, own_caches) = results
    worst = ((own - plain).abs().max() / plain.std()).item()
    for name, cache in caches.items():
        if cache.is_floating_point():
            off = (own_caches[name] - cache).abs().max() / cache.std().clamp(min=1e-3)
            worst = max(worst, off.nan_to_num(torch.inf).item())
        elif cache.dtype in (torch.int8, torch.uint8):
            worst = max(worst, (own_caches[name] != cache).float().mean().item())
        else:
            assert torch.equal(own_caches[name], cache), name
    return worst


@torch.inference_mode()
def differing_draws(params: list[SamplingParams], n: int = 8) -> int:
    """Of n times as many tokens: in how many the one kernel and Sampler differ."""
    sampler = samplers.DeviceSampler(params, 9000, "cpu", torch.Generator().manual_seed(0))
    for row in range(len(params)):
        sampler.begin(row, [1])
    wrong = 0
    for i in range(n):
        logits, pos = 3 * torch.randn(len(params), 9000), torch.tensor([i])
        plain = sampler(logits, pos=pos)
        pretend(True)
        wrong += int((sampler(logits, pos=pos) != plain).sum())
        pretend(False)
    return wrong


def use_kernels(model) -> None:
    """As a compiled step of a GPU has them."""
    replace_modules(model)
    fused_layer.fuse_layers(model)
    pretend(True)


def pretend(compiling: bool) -> None:
    for module in PRETENDERS:
        module.is_compiling = lambda: compiling
    for module in (linear, moe, samplers):
        module.has_kernels = lambda device: compiling


def small_models(sizes: dict) -> dict[str, dict]:
    """gpu_check's models, where they say a size, with these."""
    models = {family: facts | {name: sizes[name] for name in facts.keys() & sizes.keys()}
              for family, facts in gpu_check.MODELS.items()}
    models["GPT-2"]["n_kv_head"] = sizes["n_head"]             # its heads share nothing
    return models


def kernel_for(scheme, *_):
    return cuda.INT8_CUDA if scheme.name == "int8" else cuda.INT4_CUDA


@contextmanager
def on_a_gpu():
    """Within, weights are packed as for a GPU, and gpu_check's models are as small as it gets."""
    models = {"Qwen 3": dict(qk_norm="head"), **small_models(TINY)}
    with (patch.object(gpu_check, "SMALL", gpu_check.SMALL | TINY),
          patch.object(gpu_check, "MODELS", models),
          patch.object(linear, "kernel_for", kernel_for)):
        kept = {module: vars(module).copy() for module in PRETENDERS}
        try:
            yield
        finally:
            for module, names in kept.items():
                vars(module).update(names)


def cases():
    """-> name, arguments of compare(), and the most it may give."""
    for family in gpu_check.MODELS:
        for case in CASES:
            if family == "Llama" or case in ALWAYS:
                yield f"{family} {case}", dict(family=family, case=case), MOST
    for family in ("Llama", "Qwen 3", "Gemma 3", "gpt-oss"):
        for cache in CACHES:
            for case in ALWAYS if family != "Llama" else CASES:
                yield (f"{family} {cache} cache {case}",
                       dict(family=family, case=case, kv_cache=cache), MOST_OF_CODES)
    for family in ("Llama", "Mixtral"):
        for scheme, (how, most) in SCHEMES.items():
            for case in ALWAYS if family == "Mixtral" else CASES:
                name = f"{family} {scheme} {case}"
                yield name, dict(family=family, case=case, **how), most
    if os.environ.get("TRITON_INTERPRET"):         # this operator has no plain reference
        for name, params in DRAWS.items():
            yield f"draw {name}", dict(compare=differing_draws, params=params), 1


def judge(most: float, compare=compare, **arguments) -> tuple[bool, str]:
    torch.manual_seed(0)
    try:
        return within(most, compare, **arguments)
    finally:
        pretend(False)


def main(only: str = "") -> list[tuple[str, bool, str]]:
    with on_a_gpu():
        return judge_each(((name, partial(judge, most, **arguments))
                           for name, arguments, most in cases()), only)
