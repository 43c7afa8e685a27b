"""gpt-fast's own decode step on the hollow GPU: is the model of time right where figures are known?

PATH is a clone from before flex_attention, of which its figures are; nothing of it is copied. Its
products are Inductor's kernels, tuned on a GPU: of several configurations the one with the best
estimate counts. int4's kernel is not Triton's: its bytes are seen, its instructions are not.

    python scripts/dev/gpu_dryrun.py --only gpt_fast --gpt_fast PATH --sm 80
"""

import sys
import time
from importlib import import_module
from types import SimpleNamespace

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.compiler.compiler import ASTSource
from triton.runtime.driver import driver

from dry_run import device, sass
from dry_run.timing import GPUS

PUBLISHED = {"none": 104.9, "int8": 155.6, "int4-g32": 196.8}   # tok/s on an A100, its README
N_LAYER, LENGTH = 32, 208                          # a short prompt and 200 tokens, as published
CONFIGS = ((1, 1024, 4), (1, 2048, 8), (1, 4096, 8), (2, 2048, 8), (4, 1024, 8), (8, 512, 8))
# seconds that a launch adds in a graph (low, high): A100's such that its step meets its figures
PER_LAUNCH = {"A100": (4.3e-6, 5.9e-6), "H100": (3.0e-6, 4.5e-6), "H200": (3.0e-6, 4.5e-6)}
FAR = 0.2                                          # of a figure: then the model of time is wrong


def modules(path: str) -> SimpleNamespace:
    """Its files, three of which have the names of ours, and take them from here on."""
    names = "model", "generate", "quantize"
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.setdefault("sentencepiece", SimpleNamespace(SentencePieceProcessor=None))
    sys.path.insert(0, path)
    theirs = SimpleNamespace(**{name: import_module(name) for name in names})
    torch._inductor.config.fx_graph_cache = False  # it asks for one, and this is for no GPU
    return theirs


def uninitialized(theirs, scheme: str, n_layer: int):
    """Llama-2-7B in bf16, whose weights nobody has written."""
    args = theirs.model.ModelArgs.from_name("7B")
    args.n_layer = n_layer
    with torch.device("meta"):
        model = theirs.model.Transformer(args).to(torch.bfloat16).eval()
    with torch.device("cuda"):                     # before its head is int8, as the caches would be
        model.setup_caches(1, LENGTH)
    with torch.device("meta"):
        if scheme == "int8":
            theirs.quantize.WeightOnlyInt8QuantHandler(model).convert_for_runtime()
        elif scheme == "int4-g32":
            theirs.quantize.WeightOnlyInt4QuantHandler(model, 32).convert_for_runtime(use_cuda=True)
    return model.to_empty(device="cuda")


def launches_of(theirs, model) -> tuple[list, int, int]:
    """-> Triton's launches in a step, the number of all, and how many graphs a step replays."""
    torch._dynamo.reset()
    step = torch.compile(theirs.generate.decode_one_token, mode="reduce-overhead", fullgraph=True)
    token = torch.zeros(1, 1, dtype=torch.int32, device="cuda")
    pos, seen, n_kept = token[0].clone(), [device.counts()], []
    # its loop asks for `math` by a name that torch 2.13 warns of: Inductor makes the attention
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        for _ in range(3):                         # compiles, records, replays
            n_kept.append(len(device.LAUNCHES))
            step(model, token, pos, temperature=0.8, top_k=200)
            seen.append(device.counts())
    _, recorded, replayed = [{k: b[k] - a[k] for k in a} for a, b in zip(seen, seen[1:])]
    return (device.LAUNCHES[n_kept[1]:n_kept[2]], recorded["launches"] - replayed["launches"],
            replayed["graph_launches"])


def instructions(launch, n_row: int, n_column: int) -> list[int]:
    """Of all warps of one of Inductor's products: for its default, and for each of CONFIGS."""
    tuner, counted = launch.kernel, []
    more = [triton.Config({"XBLOCK": x, "R0_BLOCK": r}, warps, 1) for x, r, warps in CONFIGS]
    for config in [*tuner.configs, *more]:
        meta = tuner._create_compile_meta(config)
        source = ASTSource(tuner.fn, meta["signature"], meta["constants"], meta["configs"][0])
        kernel = triton.compile(source, target=driver.active.get_current_target(),
                                options=tuner._create_compile_options(config, meta))
        code = sass.read(kernel, triton.cdiv(n_column, config.kwargs["R0_BLOCK"]))
        n_program = triton.cdiv(n_row, config.kwargs["XBLOCK"])
        counted.append(code.instructions * n_program * kernel.metadata.num_warps)
    return counted


def products(launches: list, n_vocab: int, known: dict) -> list[tuple[bool, int, list[int]]]:
    """Of each launch that multiplies: is it the head, its weights' bytes, its instructions()."""
    each = []
    for launch in launches:
        n_row, n_column = [1, 1, *(n for n in launch.arguments if isinstance(n, int))][-2:]
        if "r0_" not in launch.kernel.size_hints or n_row * n_column < 1 << 22:
            continue
        weights = [t for t in launch.arguments
                   if isinstance(t, torch.Tensor) and t.numel() == n_row * n_column]
        source = launch.kernel.fn.src
        if source not in known:
            known[source] = instructions(launch, n_row, n_column)
        n_byte = sum(t.numel() * t.element_size() for t in weights)
        each.append((n_row == n_vocab, n_byte, known[source]))
    return each


def look_at(sm: int, theirs, scheme: str, known: dict) -> tuple[bool, str]:
    """Is the estimate near what is published? And what was seen."""
    counts = {}
    for n in (4, 2):
        model = uninitialized(theirs, scheme, n)
        launches, counts[n], n_graph = launches_of(theirs, model)
    per_layer = (counts[4] - counts[2]) / 2
    n_launch = counts[2] + (N_LAYER - 2) * per_layer
    each = products(launches, model.config.vocab_size, known)
    for name, module in model.named_modules():
        if hasattr(module, "scales_and_zeros"):    # int4
            n_byte = sum(b.numel() * b.element_size() for b in module.buffers())
            each.append((name == "output", n_byte, [0]))
    ok = n_graph == 1
    text = f"{per_layer:g} launches a layer, {counts[2] - 2 * per_layer:g} beside"
    for name, gpu in GPUS.items():
        if gpu.sm != sm:
            continue
        rate = gpu.n_sm * 4 * gpu.clock * 0.85
        seconds = sum(max(n_byte / gpu.bandwidth, min(counted) / rate)
                      * (1 if is_head else N_LAYER / 2) for is_head, n_byte, counted in each)
        low, high = [1 / (seconds + n_launch * c) for c in PER_LAUNCH[name][::-1]]
        text += f"; {name} {low:.0f} to {high:.0f} tok/s, products {seconds * 1e3:.2f} ms"
        if name == "A100":
            published = PUBLISHED[scheme]
            c = (1 / published - seconds) / n_launch
            text += f", {published} are published: {c * 1e6:.1f} µs a launch"
            ok = ok and low * (1 - FAR) < published < high * (1 + FAR)
    return ok, text


def main(sm: int, path: str) -> list[tuple[str, bool, str]]:
    device.install(keep_arguments=True)
    theirs, known, lines = modules(path), {}, []
    for scheme in PUBLISHED:
        start = time.perf_counter()
        ok, text = look_at(sm, theirs, scheme, known)
        device.LAUNCHES.clear()
        lines.append((f"gpt-fast {scheme}", ok, text))
        print(f"{'ok    ' if ok else 'FAILED'}  sm_{sm} gpt-fast {scheme}: {text} "
              f"({time.perf_counter() - start:.0f} s)", flush=True)
    return lines
