"""Check results on this machine's GPU, with random models and matrices; needs no files.

    python scripts/gpu_check.py                    # one line per check, exit status 1 on failure
    python scripts/gpu_check.py --device cpu       # the same on a CPU, without CUDA graphs
"""

import sys
import time
import traceback
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import quantize
from checkpoint import Checkpoint, LazyTensor, tensor_shapes
from generate import Batch, generate, log, pick_device
from gpt_faster.cli.common import guarded
from gpt_faster.cli.parser import Help, Parser
from gpt_faster.decoding.engines import (
    RecomputeBatch,
    build_speculative,
    build_steps,
    warm_up,
)
from gpt_faster.decoding.samplers import DeviceSampler
from gpt_faster.formats.flat_config import FlatConfig, LayerEnd, Scores
from gpt_faster.formats.load import load_model
from gpt_faster.formats.mtp import mtp_head_config
from gpt_faster.formats.quantize_on_load import quantized as quantized_source
from gpt_faster.kernels import linear
from gpt_faster.kernels.cpu import native
from gpt_faster.kernels.cuda.attention import use_fused_attention
from gpt_faster.layers.mamba import AttentionAndMamba, Mamba2
from gpt_faster.layers.moe import MoEVariant
from gpt_faster.layers.rope import RopeVariant
from model import ModelConfig, Rope, Transformer
from sampling import SamplingParams

FP32, BF16 = torch.float32, torch.bfloat16
SMALL = dict(dim=256, n_layer=4, n_head=8, n_kv_head=2, head_dim=32, ffn_dim=512, vocab_size=512,
             context=1024)
EXPERTS = dict(sparse=(True,), n_expert=8, n_active=2, expert_dim=256)
BIASED = dict(qkv_bias=True, o_bias=True, mlp_bias=True)
MAMBA = Mamba2(n_head=8, head_dim=32, n_group=2, state_dim=16)
MODELS = {
    "Llama": dict(),
    "Gemma 3": dict(window=(16, None), post_norm=True, qk_norm="head", activation="gelu_tanh",
                    embed_scale=2.0, rope=(Rope(), Rope(1e6, "linear", 8.0))),
    "Gemma 2": dict(window=(16, None), post_norm=True, activation="gelu_tanh", cap=50.0,
                    logit_cap=30.0, tied=True),
    "Gemma 4": dict(post_norm=True, qk_norm="head", activation="gelu_tanh",
                    layer_end=LayerEnd(16, 512)),
    "Mixtral": EXPERTS,
    "Qwen2-MoE": EXPERTS | dict(qkv_bias=True, shared_dim=128, norm_topk_prob=False),
    "gpt-oss": EXPERTS | BIASED | dict(sinks=True, window=(16, None), router_bias=True,
                                       activation="clamped_silu"),
    "OLMo 2": dict(pre_norm=False, post_norm=True, qk_norm="wide"),
    "GPT-2": BIASED | dict(layer_norm=True, learned_pos=True, gated=False, activation="gelu_tanh",
                           n_kv_head=8, rope=(RopeVariant(kind="none"),)),
    "Granite 4 H": EXPERTS | dict(mixer=(MAMBA, None), shared_dim=128, shared_gate=False),
    "Falcon-H1": dict(mixer=(AttentionAndMamba(replace(MAMBA, norm=False)),)),
    "Nemotron-H": EXPERTS | dict(
        mixer=(MAMBA, None, MAMBA, MAMBA), sparse=(False, True), gated=False, activation="relu2",
        latent_dim=64, branches=(None, None, "attn_only", None))}
MATRICES = {"cuda": [(6144, 4096), (4096, 14336), (128256, 2048), (576, 1536)],
            "cpu": [(960, 576), (576, 1536)]}
SAMPLINGS = {"greedy": SamplingParams(temperature=0.0), "top-k": SamplingParams(0.8, 200, 0.95),
             "top-p alone": SamplingParams(0.8, 0, 0.9),
             "penalty": SamplingParams(1.0, 50, 1.0, 0.02, 1.2)}


def config(facts: dict) -> ModelConfig:
    """A ModelConfig from fields of FlatConfig, MoEVariant and Scores in one dictionary."""
    facts, shared = dict(facts), {name: facts[name] for name in ("activation", "gated")
                                  if name in facts}
    parts = {kind: {f.name: facts.pop(f.name) for f in fields(kind) if f.name in facts}
             for kind in (MoEVariant, Scores)}
    moe = MoEVariant(**parts[MoEVariant]) if facts.get("sparse") else None
    return FlatConfig(**facts | shared, moe=moe,
                      scores=Scores(**parts[Scores])).with_parts()


def random_model(name: str, device, dtype=FP32, drafts=False, **how) -> Transformer:
    """A model with random weights large enough that every layer affects the output.

    drafts: build an MTP head for it instead; how: arguments of quantize_on_load.quantized().
    """
    cfg, draw = config(SMALL | MODELS[name]), torch.Generator().manual_seed(0)
    cfg = mtp_head_config(cfg, any(cfg.sparse)) if drafts else cfg

    def lazy(name, shape):
        t = torch.randn(shape, generator=draw)
        t = t * 1.5 * shape[-1] ** -0.5 if name.endswith("weight") and len(shape) > 1 else t * 0.3
        t = 1 + t if "norm" in name and name.endswith("weight") else t
        t = -t.abs() if name.endswith("decay_rate") else t
        rows = t.flatten(0, 1) if len(shape) > 2 else t
        return LazyTensor(name, shape, FP32, lambda a, b: rows[a:b])
    tensors = {name: lazy(name, shape) for name, shape in tensor_shapes(cfg).items()}
    source = Checkpoint(Path(name), cfg, tensors)
    source = quantized_source(source, **how) if how else source
    return use_fused_attention(load_model(source, dtype, device))


# ---- Checks: each returns a summary, or raises AssertionError -----------------------------------

def products(device) -> str:
    """int8 and int4 matmuls against float64: dtypes, group sizes, shapes, rows; also compiled."""
    worst, used = 0.0, set()
    for n_out, n_in in MATRICES[device.type]:
        dense = torch.randn(n_out, n_in, device=device)
        for size in (None, 32, 128 if n_in % 128 == 0 else 64):
            scheme = quantize.Int8() if size is None else quantize.Int4(size)
            parts = scheme.quantize(dense)
            weight, scales, zeros = (parts.get(leaf) for leaf in ("weight", "scales", "zeros"))
            for dtype in (BF16, torch.float16, FP32):
                kernel = linear.kernel_for(scheme, device, dtype, dense.shape)
                compute_dtype = FP32 if dtype == torch.float16 else dtype
                scale, zero = (t if t is None else t.to(compute_dtype) for t in (scales, zeros))
                dequantized = quantize.dequantize(weight, scale, zero, torch.float64)
                packed = kernel.pack(weight, scale, zero)
                used.add(kernel.name)
                for n_row in (1, 2, 7, 20, 64, 100, 200):
                    x = torch.randn(n_row, n_in, device=device).to(dtype)
                    y = kernel.product(x, *packed)
                    worst = max(worst, error_ratio(y, x, dequantized, dtype))
                if device.type != "cpu" and (n_out, n_in) == MATRICES[device.type][-1]:
                    compiled = torch.compile(kernel.product, dynamic=False)
                    for n_row in (1, 7, 20):
                        x = torch.randn(n_row, n_in, device=device).to(dtype)
                        worst = max(worst, error_ratio(compiled(x, *packed), x, dequantized, dtype))
    return f"{', '.join(sorted(used))}: at most {worst:.2f} of the rounding allowed"


def error_ratio(y: Tensor, x: Tensor, weight: Tensor, dtype) -> float:
    """The largest error relative to the bound of rounding the weights or the sum once."""
    expected, size = x.double() @ weight.T, x.double().abs() @ weight.abs().T
    unit = {BF16: 2**-7, torch.float16: 2**-10, FP32: 1e-5 / 4}[dtype]
    share = ((y[:, :len(weight)].double() - expected).abs() / (size * unit)).max().item()
    assert share < 1, f"{share:.1f} times the rounding allowed, {tuple(weight.shape)} {dtype}"
    return share


@torch.inference_mode()
def families(device) -> str:
    """fp32 logits of a prompt and decode steps against a CPU without a KV cache."""
    worst = 0.0
    for name in MODELS:
        ids = torch.randint(0, SMALL["vocab_size"], (2, 40))
        here, there = random_model(name, device), random_model(name, "cpu")
        expected = there(ids, torch.arange(40), 40)
        here.setup_cache(2, 64, 24)
        ids, pos = ids.to(device), torch.arange(40, device=device)
        parts = [here(ids[:, :24], pos[:24], 24)]
        parts += [here(ids[:, i:i + 1], pos[i:i + 1], 1) for i in range(24, 40)]
        error = (torch.cat(parts, 1).cpu() - expected).abs().max() / expected.std()
        assert error < 1e-3, f"{name}: logits differ by {error:.1e} of their standard deviation"
        worst = max(worst, error.item())
    return f"{len(MODELS)} families, logits within {worst:.0e} of their standard deviation"


PROMPT = [7 * i % SMALL["vocab_size"] for i in range(20)]


def sampler_of(model, params):
    """The GPU sampler, also on a CPU."""
    device = model.freq.device
    generator = torch.Generator(device).manual_seed(0)
    return DeviceSampler([params], model.cfg.vocab_size, device, generator)


def tokens(batch, n: int) -> list[int]:
    if batch.sampler.generator:
        batch.sampler.generator.manual_seed(0)
    return [t.item() for t in generate(batch, [PROMPT], n)]


def ready(model, engine: str, n: int, params=SamplingParams(temperature=0.0)) -> Batch:
    """A warmed-up batch of one row for n new tokens."""
    steps = build_steps(model, engine)
    model.setup_cache(1, 20 + n, 20)
    batch = Batch(model, sampler_of(model, params), steps)
    if engine != "kv_cache":
        warm_up(batch, [PROMPT], range(21, 20 + n))
    return batch


def engine_names(device) -> list[str]:
    return ["kv_cache", *(["cuda_graph"] if device.type == "cuda" else []), "compile"]


def engines(device) -> str:
    """fp32 tokens sampled with the same noise must agree between all engines, and with recomputing
    the whole text for each token."""
    n_step = 500 if device.type == "cuda" else 60
    for name in ("Llama", "Gemma 3", "Mixtral"):
        how = SamplingParams(1.0, 50)
        model = random_model(name, device)
        expected = tokens(RecomputeBatch(model, sampler_of(model, how)), 50)
        first = None
        for engine in engine_names(device):
            model = random_model(name, device)
            ids = tokens(ready(model, engine, n_step, how), n_step)
            assert ids[:50] == expected, f"{name}, {engine}: differs from engine recompute"
            first = first or ids
            assert ids == first, f"{name}, {engine}: differs from engine kv_cache"
            assert len(set(ids)) > 20, f"{name}: only {len(set(ids))} distinct tokens"
    return f"recompute, {', '.join(engine_names(device))} agree over {n_step} steps"


def quantized(device) -> str:
    """Decoding with packed weights: each token's fp32 logit must be near the best one.

    Rounding can flip experts in a router: in bf16 single tokens of an MoE are up to 2.6 standard
    deviations off (eight seeds), the mean is 0.02 to 0.11, up to 0.28 if quantized. So for MoE the
    mean is checked; random tokens have 3.
    """
    seen = []
    for how in (dict(mode="int8"), dict(mode="int4", groupsize=64)):
        for name in ("Llama", "Mixtral"):
            model, plain = (random_model(name, device, dtype, **how) for dtype in (BF16, FP32))
            for engine in engine_names(device):
                ids = tokens(ready(model, engine, 50), 50)
                whole = torch.arange(20, device=device)[None] * 7 % SMALL["vocab_size"]
                whole = torch.cat((whole, torch.tensor([ids], device=device)), 1)
                with torch.inference_mode():
                    plain.setup_cache(0, 128)
                    logits = plain(whole, torch.arange(70, device=device), 51)[0, :-1]
                gap = logits.amax(-1) - logits.gather(1, whole[0, 20:, None])[:, 0]
                gap = gap.mean() if name == "Mixtral" else gap.max()
                seen.append((gap / logits.std()).item())
                assert seen[-1] < 0.5, f"{name}, {how}, {engine}: {seen[-1]:.2f} below the best"
    return f"tokens within {max(seen):.2f} standard deviations of the best logit in fp32"


def drafting(device) -> str:
    """Greedy tokens must not change with ngram, int8, draft-model and (random) MTP speculation."""
    accepted = []
    for engine in engine_names(device):
        model = random_model("Llama", device)
        batch = ready(model, engine, 200)
        plain = tokens(batch, 200)
        drafts = dict(ngram=None, int8=random_model("Llama", device, mode="int8"),
                      other=random_model("OLMo 2", device),
                      mtp=random_model("Llama", device, drafts=True))
        for name, draft in drafts.items():
            drafts = build_speculative(model, batch.sampler, batch.steps, engine, 4, True, draft)
            if engine != "kv_cache":
                warm_up(drafts, [PROMPT], range(21, 220))
            ids = tokens(drafts, 200)
            assert ids == plain, f"{engine}, {name}: other tokens than without drafts"
            accepted.append(f"{name} {drafts.mean_accepted() or 0:.1f}")
    return f"accepted of 4 drafts, {', '.join(engine_names(device))}: {', '.join(accepted)}"


class HostReads(TorchDispatchMode):
    """Records device-to-host reads of tensors."""

    seen = ()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(name in str(func) for name in ("aten.item", "_local_scalar_dense", "nonzero")):
            self.seen += (str(func),)
        return func(*args, **kwargs or {})


def no_waiting(device) -> str:
    """Decoding must not synchronize with the GPU."""
    reads, n = HostReads(), 0
    for engine in engine_names(device):
        for name, how in SAMPLINGS.items():
            if engine == "compile" and name != "top-k":
                continue                           # compiling takes half a minute each
            model = random_model("Llama", device)
            stream = generate(ready(model, engine, 40, how), [[1, 2, 3]], 40)
            for _ in range(4):
                next(stream)
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("error")
            try:
                with reads if engine == "kv_cache" else nullcontext():
                    for _ in range(30):
                        next(stream)
            finally:
                if device.type == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
            assert not reads.seen, f"{engine}, {name}: {reads.seen[0]}"
            n += 1
    return f"{n} combinations of sampling and engine"


CHECKS = (products, families, engines, quantized, drafting, no_waiting)


def run(argv=None) -> int:
    p = Parser(description=__doc__.splitlines()[0], formatter_class=Help)
    p.add_argument("--device", default="cuda", help="cuda, cuda:1 or cpu")
    p.add_argument("--only", help="comma-separated names of checks")
    args = p.parse_args(argv)
    device, failed = pick_device(args.device), 0
    native.set_activation_bits(16)                 # test weights, not activation rounding
    known = {check.__name__: check for check in CHECKS}
    for name in args.only.split(",") if args.only else known:
        if name not in known:
            raise ValueError(f"--only {name}: the checks are {', '.join(known)}")
        torch.manual_seed(0)
        start = time.perf_counter()
        try:
            line = f"ok      {name}: {known[name](device)}"
        except Exception as e:                     # run the other checks anyway
            traceback.print_exc()
            line, failed = f"FAILED  {name}: {type(e).__name__}: {str(e).splitlines()[0]}", 1
        print(f"{line} ({time.perf_counter() - start:.0f} s)", flush=True)
        torch._dynamo.reset()
    if device.type == "cpu":
        log("no GPU: CUDA graphs and synchronization were not checked")
    return failed


if __name__ == "__main__":
    sys.exit(guarded(run))
