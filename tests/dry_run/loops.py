"""Whole loops on a hollow GPU: what breaks, waits, launches, compiles anew, or is not one graph.

    python scripts/dev/gpu_dryrun.py --only loops --sm 80
"""

import traceback
from functools import partial
from pathlib import Path

import gpu_check
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.testing._internal.distributed.fake_pg import FakeStore

import tp
from dry_run import device
from dry_run.numbers import small_models
from dry_run.report import judge_each
from generate import Batch, generate, read_late
from gpt_faster.decoding.engines import build_speculative, build_steps, warm_up
from gpt_faster.decoding.samplers import build_sampler
from gpt_faster.kernels import compile
from gpt_faster.kernels.cuda.products import has_kernels
from gpt_faster.layers.quantized_cache import CacheFormat
from sampling import SamplingParams

ROOT = Path(__file__).resolve().parent.parent.parent
TINY = dict(dim=128, n_layer=2, n_head=4, n_kv_head=2, head_dim=32, ffn_dim=192, vocab_size=512,
            expert_dim=64)
N_PROMPT, N_NEW, N_DRAFT, WARM = 20, 40, 4, 6
GREEDY, TOP_K = SamplingParams(temperature=0.0), SamplingParams(0.8, 50)
PENALTY = SamplingParams(1.0, 50, 1.0, 0.02, 1.2)
TOP_P = SamplingParams(0.8, 0, 0.9)


def scenarios() -> dict[str, dict]:
    """What to run, by name: arguments of run()."""
    every = {}
    for engine in ("kv_cache", "cuda_graph", "compile"):
        for family in gpu_check.MODELS:
            every[f"{engine} {family}"] = dict(engine=engine, family=family)
        for mode in ("int8", "int4"):
            for family in ("Llama", "Mixtral"):
                every[f"{engine} {family} {mode}"] = dict(engine=engine, family=family, mode=mode)
        for dtype in ("float16", "float32"):
            every[f"{engine} {dtype}"] = dict(engine=engine, dtype=getattr(torch, dtype))
        for name, params in dict(greedy=GREEDY, penalty=PENALTY).items():
            every[f"{engine} {name}"] = dict(engine=engine, params=params)
        every[f"{engine} top-p"] = dict(engine=engine, params=TOP_P)
        every[f"{engine} 3 rows"] = dict(engine=engine, rows=3)
        every[f"{engine} 3 rows exchanged"] = dict(engine=engine, rows=3, exchange=True)
        every[f"{engine} n-gram drafts"] = dict(engine=engine, drafts="ngram")
        every[f"{engine} a model's drafts"] = dict(engine=engine, drafts="int8")
        every[f"{engine} a head's drafts"] = dict(engine=engine, drafts="mtp")
        for drafts in ("ngram", "int8", "mtp"):
            every[f"{engine} 3 rows {drafts} drafts exchanged"] = dict(
                engine=engine, drafts=drafts, rows=3, exchange=True)
        for cache in ("int8", "int8/int4", "fp8"):
            every[f"{engine} {cache} cache"] = dict(engine=engine, kv_cache=cache)
        every[f"{engine} int8 cache, 3 rows"] = dict(engine=engine, kv_cache="int8", rows=3)
        every[f"{engine} int8 cache, n-gram drafts"] = dict(engine=engine, kv_cache="int8",
                                                            drafts="ngram")
        every[f"{engine} chat"] = dict(engine=engine, turns=3)
        every[f"{engine} 2 ranks"] = dict(engine=engine, ranks=2)
    for family in ("Llama", "Gemma 3", "Mixtral"):
        every[f"compiled prefill {family}"] = dict(engine="compile", family=family, prefill=True)
    every["compiled prefill 3 rows"] = dict(engine="compile", rows=3, prefill=True, exchange=True)
    return every


def run(engine: str, family: str = "Llama", params: SamplingParams = TOP_K, rows: int = 1,
        dtype: torch.dtype | None = None, prefill: bool = False, exchange: bool = False,
        drafts: str | None = None, turns: int = 1, ranks: int = 1, kv_cache: str = "",
        **how) -> tuple[dict, int]:
    """-> what a step counts, and how many compiled graphs it took beside the buckets."""
    if dtype is None:
        dtype = torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float16
    torch._dynamo.reset()
    counters.clear()
    model = gpu_check.random_model(family, "cuda", dtype, **how)
    if ranks > 1:                                  # each has half of the vocabulary
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        model = tp.parallelize(model, ranks * model.cfg.vocab_size)
    steps = build_steps(model, engine, prefill)
    k = N_DRAFT if drafts else 0
    n_new = N_NEW if turns == 1 else 300
    length = N_PROMPT + turns * n_new + k + 1
    model.kv_cache = CacheFormat.parse(kv_cache) if kv_cache else None
    model.setup_cache(rows, length, 32)
    prompts = [list(range(1, N_PROMPT + 1))] * rows
    generator = torch.Generator("cuda").manual_seed(0)
    sampler = build_sampler(model, [params] * rows, generator)
    batch = Batch(model, sampler, steps)
    if drafts:
        draft = None
        if drafts == "mtp":
            draft = gpu_check.random_model(family, "cuda", dtype, drafts=True)
        elif drafts != "ngram":
            draft = gpu_check.random_model("Llama", "cuda", dtype, mode=drafts)
        batch = build_speculative(model, sampler, steps, engine, k, True, draft)
    if engine != "kv_cache":
        warm_up(batch, prompts, range(N_PROMPT + 1, length))
    n_graph = counters["stats"]["unique_graphs"]
    stream = tokens(batch, prompts, n_new, turns, exchange)
    for _ in range(WARM):
        next(stream)
    before, n = device.counts() | {"collectives": called["collectives"]}, 0
    try:
        if not drafts and turns == 1:
            torch.cuda.set_sync_debug_mode("error")
        for _ in stream:
            n += 1
            if n == N_NEW - WARM - 2 and turns == 1:
                break
    finally:
        torch.cuda.set_sync_debug_mode("default")
        if ranks > 1:
            dist.destroy_process_group()
    after = device.counts() | {"collectives": called["collectives"]}
    late = counters["stats"]["unique_graphs"] - n_graph
    return {name: (after[name] - before[name]) / n for name in after}, late


def tokens(batch, prompts, n_new: int, turns: int, exchange: bool):
    """As the commands do it: each token is read one step late, conversations keep their cache."""
    def produced():
        history = prompts
        n_cached = 0
        for _ in range(turns):
            for i, token in enumerate(generate(batch, history, n_new, n_cached)):
                yield token, None
                if exchange and i in (5, 10):
                    batch.end(i % 2)
                    batch.prefill([i % 2], [[3, 4, 5]])
            n_cached = len(history[0]) + n_new - 1
            history = [ids + [1] * (n_new + 2) for ids in history]
            history = [ids[:batch.max_length - n_new] for ids in history]
    return read_late(produced())


def prepare() -> None:
    device.install()
    gpu_check.SMALL.update(TINY)
    gpu_check.MODELS.update(small_models(TINY))
    decide_drafts()
    watch_attention()
    count_collectives()
    hide_from_the_check()


def main(sm: int, only: str = "") -> list[tuple[str, bool, str]]:
    prepare()
    return judge_each(((name, partial(judge, **arguments))
                       for name, arguments in scenarios().items()), only, f"sm_{sm} ")


def judge(**arguments) -> tuple[bool, str]:
    chosen.clear()
    try:
        each, late = run(**arguments)
    except Exception as e:                         # one that breaks must not hide the others
        places = [f"{Path(f.filename).relative_to(ROOT)}:{f.lineno}"
                  for f in traceback.extract_tb(e.__traceback__)
                  if Path(f.filename).is_relative_to(ROOT) and ".venv" not in f.filename]
        return False, f"{type(e).__name__}: {str(e).strip().splitlines()[0][:160]}, {places[-1:]}"
    text = ", ".join(f"{name} {value:.2f}" for name, value in each.items() if value)
    skips = counters["inductor"].get("cudagraph_skips", 0)
    breaks = sum(counters["graph_break"].values())
    wrong = []
    if late:
        wrong.append(f"{late} graphs compiled after the warm-up")
    if skips:
        wrong.append(f"{skips} graphs not recorded")
    if breaks:
        wrong.append(f"{breaks} graph breaks")
    plain = not {"drafts", "exchange", "turns"} & arguments.keys()
    if plain and arguments["engine"] != "kv_cache":
        if each["collectives"]:
            wrong.append("collectives beside the graph")
        if each["graph_launches"] != 1:
            wrong.append("not one graph a step")
        most = 3 if arguments.get("params") is PENALTY else 2  # it keeps what it has seen
        if each["launches"] > most:
            wrong.append(f"more than {most} launches beside the graph")
    n_graph = counters["stats"]["unique_graphs"]
    if "turns" in arguments and n_graph > 1 and has_kernels("cuda"):
        wrong.append(f"{n_graph} graphs for one conversation")
    if _MATH in chosen:
        wrong.append("attention that writes out its scores")
    if plain and each["waits"] > 1:
        wrong.append("waits for more than the last token")
    return not wrong, "; ".join([*wrong, text])


_MATH = torch.nn.attention.SDPBackend.MATH.value
chosen = set()                                     # of SDPA's backends, since it was cleared


def watch_attention() -> None:
    """What SDPA would choose is asked of torch's own code each time it is called."""
    plain = torch.nn.functional.scaled_dot_product_attention

    def watched(q, k, v, mask=None, **more):
        if not torch.compiler.is_compiling():
            chosen.add(torch._fused_sdp_choice(q, k, v, mask, **more))
        return plain(q, k, v, mask, **more)
    replace(torch.nn.functional, "scaled_dot_product_attention", watched)


replaced = []                                      # by this file: owner, name, plain, own


def replace(owner, name: str, own) -> None:
    replaced.append((owner, name, getattr(owner, name), own))
    setattr(owner, name, own)


def hide_from_the_check() -> None:
    """A model whose functions were replaced would run without kernels: what is replaced here is put
    back while that is asked.
    """
    check = compile.first_modification

    def unseen(model):
        for owner, name, plain, _ in replaced:
            setattr(owner, name, plain)
        try:
            return check(model)
        finally:
            for owner, name, _, own in replaced:
                setattr(owner, name, own)
    compile.first_modification = unseen


called = {"collectives": 0}


def count_collectives() -> None:
    """Those that Python asks for: neither traced nor captured ones are in each step."""
    def counted(plain):
        def call(x):
            called["collectives"] += not torch.compiler.is_compiling()
            return plain(x)
        return call
    for name in ("all_reduce", "all_gather", "broadcast"):
        replace(tp, name, counted(getattr(tp, name)))


def decide_drafts() -> None:
    """Numbers are garbage: look-up always finds its drafts, and a round keeps one of them."""
    from gpt_faster.decoding.ngram import NgramDrafter
    NgramDrafter.find = lambda self, history, n: n * 0 + 3
    read_list = torch.Tensor.tolist

    def tolist(t):                                 # of each row, the count alone or with a place
        values = read_list(t)
        if t.is_cuda and t.dim() == 2:
            return [[1] * t.shape[1], [3] * t.shape[1]]
        return [1] * len(t) if t.is_cuda and t.dim() == 1 else values       # also a place alone
    torch.Tensor.tolist = tolist
