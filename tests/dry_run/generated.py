"""Does a compiled step compute the model? Inductor's kernels and ours, run by Triton's interpreter.

Whole loops on a hollow GPU that has numbers (interpreted.py), compiled as for a real one, beside
the plain model's on a CPU, in fp32: tokens, logits, every cache buffer. Not seen: what ATen has
kernels of its own for, which are the CPU's here.

    python scripts/dev/gpu_dryrun.py --only generated --sm 80 --match Gemma
"""

from functools import partial
from unittest.mock import patch

import gpu_check
import torch

import speculate
from dry_run import interpreted
from dry_run.numbers import FP32, MOST, MOST_OF_CODES, SCHEMES, TINY, small_models
from dry_run.report import judge_each, within
from generate import Batch, Steps, generate
from gpt_faster.decoding import engines, samplers
from gpt_faster.decoding.samplers import DeviceSampler
from gpt_faster.kernels.compile import as_cuda_graph
from gpt_faster.layers.quantized_cache import CacheFormat
from sampling import SamplingParams
from speculate import FixedLength, SpeculativeBatch

GREEDY, TOP_K = SamplingParams(temperature=0.0), SamplingParams(0.8, 20)
FILTERS = SamplingParams(1.0, 0, 0.9, 0.01, 1.2)   # top-p, min-p, and a penalty of what was there
LENGTH, N_DRAFT = 64, 4


class Watched(DeviceSampler):
    """Keeps the last logits, by the step's graph too."""

    @torch.inference_mode(False)
    def __init__(self, rows, n_vocab, where, *more):
        super().__init__(rows, n_vocab, where, *more)
        self.register_buffer("logits", torch.zeros(N_DRAFT + 1, n_vocab, device=where))

    def processed(self, logits, rows=slice(None), draft_tokens=None):
        self.logits[:len(logits)] = logits
        return super().processed(logits, rows, draft_tokens)


class Oracle:
    """Drafts what it was told to come, but for the third of each round."""

    def __init__(self, tokens: list[int]):
        self.tokens = torch.tensor([tokens])

    def propose(self, history, n, k, sampler):
        drafts = self.tokens[:, n:n + k].clone()
        drafts[:, 2] ^= 1
        drafts = drafts.to(history.device)
        return drafts, torch.ones(k, 1, device=drafts.device), drafts.T

    def begin(self, *args):
        pass

    find = accepted = begin


def run(where: str, family: str, params: SamplingParams, prompts: list, n_new: int, pad: bool,
        next_tokens: list | None = None, kv_cache: str = "", **how) -> tuple[list, dict]:
    """Generate on "cuda", compiled, or on "cpu", plainly -> tokens, and every buffer by name."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = gpu_check.random_model(family, where, FP32, **how)
    steps, verify = Steps(pad=pad), speculate.verify
    if where == "cuda":
        steps, verify = engines.build_steps(model, "compile", pad), as_cuda_graph(verify)
    model.kv_cache = CacheFormat.parse(kv_cache) if kv_cache else None
    model.setup_cache(len(prompts), LENGTH, 24)
    with patch.multiple(samplers, ShortlistSampler=Watched, DeviceSampler=Watched):
        sampler = samplers.build_sampler(model, [params] * len(prompts))
    batch = Batch(model, sampler, steps)
    if next_tokens:
        oracle = Oracle(prompts[0] + next_tokens)
        batch = SpeculativeBatch(model, sampler, steps, oracle, FixedLength(N_DRAFT), N_DRAFT,
                                 verify)
    tokens = [t.flatten().tolist() for t in generate(batch, prompts, n_new)]
    buffers = [*model.named_buffers(), *sampler.named_buffers()]
    return tokens, {name: b.cpu() for name, b in buffers if "arrivals" not in name}


def compare(family: str, params=GREEDY, lengths=(20,), n_new=2, pad=False, drafts=False,
            **how) -> float:
    """The largest difference of logits and caches, as a share of their standard deviation."""
    prompts = [[7 * i % TINY["vocab_size"] for i in range(n)] for n in lengths]
    arguments = [family, params, prompts, n_new, pad]
    if drafts:
        tokens, _ = run("cpu", family, params, prompts, 2 * N_DRAFT, pad, **how)
        arguments.append(sum(tokens, []))
    expected, plain = run("cpu", *arguments, **how)
    tokens, own = run("cuda", *arguments, **how)
    assert tokens == expected, f"{tokens}, and not {expected}"
    off = []
    for name, b in plain.items():
        if b.dtype in (torch.int8, torch.uint8):   # a code is rounded either way
            off.append((own[name] != b).float().mean())
        elif b.is_floating_point() and b.numel() > 1:
            off.append((own[name] - b).abs().max() / b.std().clamp(min=1e-3))
        else:
            assert torch.equal(own[name], b), name
    return torch.stack(off).max().item()           # Python's max() passes over NaN


LLAMA = {
    "top-k": dict(params=TOP_K, n_new=3), "batch": dict(params=TOP_K, lengths=(20, 3, 11)),
    "filters": dict(params=FILTERS),
    "verify": dict(drafts=True, n_new=4), "verify top-k": dict(drafts=True, params=TOP_K),
    "prefill": dict(pad=True, lengths=(20, 3)), "int8": SCHEMES["int8"][0],
    "int4": SCHEMES["int4"][0], "int8/int4 cache": dict(kv_cache="int8/int4")}


def cases(sm: int):
    """-> name, arguments of compare(), and the most it may give. Without kernels of ours: fewer."""
    n = len(LLAMA) if sm >= 80 else 2
    for name, arguments in list(LLAMA.items())[:n]:
        most = MOST_OF_CODES if "cache" in name else SCHEMES.get(name, (None, MOST))[1]
        yield f"Llama {name}", dict(family="Llama", **arguments), most
    for family in gpu_check.MODELS if sm >= 80 else ("Gemma 3",):
        yield family, dict(family=family, lengths=(41,)), MOST             # past a ring's end
    if sm >= 80:
        yield "Gemma 3 prefill", dict(family="Gemma 3", pad=True), MOST
        yield "Mixtral int4", dict(family="Mixtral", **SCHEMES["int4"][0]), SCHEMES["int4"][1]


def judge(most: float, **arguments) -> tuple[bool, str]:
    return within(most, compare, **arguments)


def main(sm: int, only: str = "") -> list[tuple[str, bool, str]]:
    interpreted.install()
    gpu_check.SMALL.update(TINY)
    gpu_check.MODELS.update(small_models(TINY))
    return judge_each(((name, partial(judge, most, **arguments))
                       for name, arguments, most in cases(sm)), only, f"sm_{sm} ")
