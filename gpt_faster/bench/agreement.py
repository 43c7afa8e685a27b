"""Check that an engine generates the correct tokens.

In fp32 they must equal those of the first greedy engine with the same weights. In lower precision
near-ties may flip, so each token, teacher-forced, must be within a margin of the best logit.
Engines that sample with the same seed must draw the same tokens.

    tokens_agree(run, runs)                        # cases.CaseRun -> True, False or None
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from gpt_faster.bench.engines import SAMPLERS, Engine, share_weights
from model import Transformer

LOGIT_MARGIN = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}


def logit_margin(model: Transformer) -> float:
    """Rounding can flip near-tied experts in a router, so MoE models get twice the margin."""
    margin = LOGIT_MARGIN[model.dtype]
    is_rounded_mixture = any(model.cfg.sparse) and model.dtype != torch.float32
    return 2 * margin if is_rounded_mixture else margin


PRODUCTS = {F.linear, torch.ops.gpt_faster.grouped_mm.default}


class ProductsInFloat32(TorchFunctionMode):
    """On a CPU, multiply bfloat16 in fp32: 5 times as fast in PyTorch on AVX2, and rounded once."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if (function not in PRODUCTS or args[0].dtype != torch.bfloat16
                or args[0].device.type != "cpu"):
            return function(*args, **kwargs)
        kwargs = {name: as_float32(value) for name, value in kwargs.items()}
        return function(*map(as_float32, args), **kwargs).bfloat16()


def as_float32(value):
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.float() if is_float else value


@torch.inference_mode()
def is_plausible(model: Transformer, prompt: list[int], ids: list[int], kv_cache=None) -> bool:
    """Whether each token is near the best logit, teacher-forced in one call: without a KV cache, or
    through one of the format kv_cache."""
    model = share_weights(model)
    tokens = torch.tensor([prompt + ids], device=model.freq.device)
    model.kv_cache = kv_cache
    model.setup_cache(1 if kv_cache else 0, tokens.shape[1])
    pos = torch.arange(tokens.shape[1] - 1, device=tokens.device)
    with ProductsInFloat32():
        logits = model(tokens[:, :-1], pos, len(ids))[0]           # [ids, V]
    chosen = logits.gather(1, tokens[0, -len(ids):, None])[:, 0]
    return bool((logits.amax(-1) - chosen <= logit_margin(model)).all())


def tokens_agree(run, runs: list) -> bool | None:
    """Whether all rows of the last run have the correct tokens; None if runs use different seeds.

    run: a cases.CaseRun of an engine; runs: all cases of this workload.
    """
    engine = run.runner
    if not engine.is_repeatable:
        return None
    model = run.case.weights.model
    if run.case.engine in SAMPLERS:
        name, = set(SAMPLERS) - {run.case.engine}
        other = Engine(name, model, run.prompts, run.workload, engine.tokenizer)
        return run.tokens == other.run(run.prompts, run.workload.n_new)[0]
    kv_cache = engine.model.kv_cache
    if model.dtype == torch.float32 and kv_cache is None:
        reference = next(r for r in runs if r.case.weights.model is model and r.tokens
                         and not r.error and r.runner.is_greedy
                         and r.runner.model.kv_cache is None)
        if run is not reference:
            return run.tokens == reference.tokens
    distinct = {(tuple(prompt), tuple(ids)) for prompt, ids in zip(run.prompts, run.tokens)}
    return all(is_plausible(model, list(prompt), list(ids), kv_cache)
               for prompt, ids in distinct)
