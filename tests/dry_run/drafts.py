"""A round with EAGLE-3 or DFlash at real shapes: its launches, and a time, as steps.py has a step's.

The whole round runs on the hollow GPU, eager parts too. Products by BLAS take their bytes' time,
other kernels a launch each: sorting a vocabulary and the host's time are not in it.

    python scripts/dev/gpu_dryrun.py --only drafts --sm 90
"""

from dataclasses import dataclass, replace
from functools import partial

import torch

import speculate
from dry_run import device, sass, steps
from dry_run.timing import GPU, GPUS, LAUNCH, seconds_alone, seconds_of
from generate import decode_one_token
from gpt_faster.bench.weights import open_drafter
from gpt_faster.decoding import dflash, eagle3, mtp
from gpt_faster.decoding.draft_length import expected_tokens, run_round
from gpt_faster.decoding.engines import build_speculative, build_steps
from gpt_faster.decoding.samplers import build_sampler
from gpt_faster.formats.known_shapes import random_checkpoint
from gpt_faster.loading import load_shard
from sampling import SamplingParams

LENGTH, N_KNOWN = 1024, 512
CASES = {                                          # model, drafter -> its acceptance, draft lengths
    ("Llama-3.1-8B", "eagle3"): (eagle3.PUBLISHED_ACCEPTANCE, (2, 3, 5)),
    ("Qwen3-8B", "eagle3"): (eagle3.PUBLISHED_ACCEPTANCE, (2, 3, 5)),
    ("Qwen3-8B", "dflash"): (dflash.PUBLISHED_ACCEPTANCE, (3, 7, 15)),
}


@dataclass
class Round:
    """launches: of Triton's kernels, in order; n_launch: all; n_draft: of both before verifying."""

    launches: list
    n_launch: int
    n_draft: tuple[int, int]


def batch_of(name: str, drafter: str, scheme: str, n_layer: int, k: int):
    """A batch of one row whose steps are compiled, and not captured: each kernel is seen."""
    model = steps.model_of(name, scheme, n_layer, 1, LENGTH)
    source = replace(random_checkpoint(name), cfg=model.cfg)
    draft = open_drafter(drafter, source, scheme, torch.device("cuda"))
    for t in draft.tensors.values():
        t.fill = lambda t: None
    draft = load_shard(draft, torch.bfloat16, "cuda", "compile")
    model.setup_cache(1, LENGTH, 512, max_rejected=k)
    sampler = build_sampler(model, [SamplingParams(temperature=0)], torch.Generator("cuda"))
    batch = build_speculative(model, sampler, build_steps(model, "compile"), "compile", k, True,
                              draft)
    compiled = partial(torch.compile, fullgraph=True, dynamic=False)
    step = dflash.draft_block if drafter == "dflash" else mtp.draft_one_token
    batch.drafter.step, batch.verify = compiled(step), compiled(speculate.verify)
    batch.steps = batch.steps._replace(decode=compiled(decode_one_token))
    return batch, draft


def seen(batch, k: int, n_new: int) -> Round:
    """The second of two rounds. k 0: a plain step."""
    for _ in range(2):
        first, before, at_verify = len(device.LAUNCHES), device.counts()["launches"], []
        verify = batch.verify

        def noted(*args, verify=verify, at_verify=at_verify):
            at_verify += [len(device.LAUNCHES), device.counts()["launches"]]
            return verify(*args)
        batch.verify = noted
        run_round(batch, N_KNOWN, 1, k, n_new)
        batch.verify = verify
    at = at_verify or [first, before]
    return Round(device.LAUNCHES[first:], device.counts()["launches"] - before,
                 (at[0] - first, at[1] - before))


def linear_bytes(module: torch.nn.Module) -> int:
    """Of weights that products read; not of embeddings."""
    return sum(t.nbytes for m in module.modules() if not isinstance(m, torch.nn.Embedding)
               for t in m.parameters(recurse=False) if t.dim() > 1)


def seconds(gpu: GPU, launches: list, n_launch: float, n_bytes: float, n_layer: float,
            layer_ptrs: set, known: dict) -> float:
    """Of launches, of which those that read the model's layers stand for n_layer times as many.
    n_bytes: of all weights; those that no kernel of ours reads are read by BLAS."""
    total, read, counted = 0.0, 0.0, 0
    for launch in launches:
        tensors = [t for t in launch.arguments if isinstance(t, torch.Tensor)]
        times = n_layer if any(t.data_ptr() in layer_ptrs for t in tensors) else 1
        if launch.name == "_attention":
            code = sass.read(device.compile_launch(launch))
            total += times * seconds_alone(gpu, steps.program_of(launch, code))
            counted += times
        elif steps.weights_of(launch):
            product = steps.read_product(launch, known)
            total += times * seconds_of(gpu, product.program, steps.bytes_read(launch))
            read += times * steps.bytes_read(launch)
            counted += times
    return total + max(0.0, n_bytes - read) / gpu.bandwidth + (n_launch - counted) * LAUNCH


def look_at(sm: int, name: str, drafter: str, scheme: str, k: int, acceptance: float,
            known: dict) -> dict[str, tuple[float, float]]:
    """GPU -> seconds of drafting k tokens and of verifying them; k 0: 0, and of a plain step."""
    n_all = random_checkpoint(name).cfg.n_layer
    n_new = round(expected_tokens(k, acceptance))
    counted = {}
    for n in (3, 2):
        torch._dynamo.reset()
        batch, draft = batch_of(name, drafter, scheme, n, max(k, 1))
        counted[n] = seen(batch, k, n_new)
    model, found = batch.model, counted[2]
    split, total = found.n_draft
    in_verify = {n: r.n_launch - r.n_draft[1] for n, r in counted.items()}
    per_layer = in_verify[3] - in_verify[2]
    ptrs = {t.data_ptr() for layer in model.layers for t in (*layer.parameters(), *layer.buffers())}
    of_layers, head = linear_bytes(model.layers) * n_all / 2, linear_bytes(model.head)
    times = 1 if drafter == "dflash" else k        # that the drafter's weights are read
    own = linear_bytes(draft) * times
    if drafter != "dflash":                        # fc joins the model's states once
        own -= (times - 1) * draft.fc.weight.nbytes if k else 0
    estimates = {}
    for gpu_name, gpu in GPUS.items():
        if gpu.sm != sm:
            continue
        drafting = seconds(gpu, found.launches[:split], total, own, 1, set(), known) if k else 0.0
        verifying = seconds(gpu, found.launches[split:], in_verify[2] + (n_all - 2) * per_layer,
                            of_layers + head, n_all / 2, ptrs, known)
        estimates[gpu_name] = drafting, verifying
    device.LAUNCHES.clear()
    return estimates


def main(sm: int, only: str = "") -> list[tuple[str, bool, str]]:
    device.install(keep_arguments=True)
    lines, known = [], {}
    for (name, drafter), (acceptance, all_lengths) in CASES.items():
        for scheme in ("none", "int4-g32"):
            what = f"{name} {drafter} {scheme}"
            lengths = [k for k in all_lengths if only in f"{what} {k}"]
            if not lengths:
                continue
            plain = look_at(sm, name, drafter, scheme, 0, acceptance, known)
            for k in lengths:
                found = look_at(sm, name, drafter, scheme, k, acceptance, known)
                texts = []
                for gpu, (draft, verify) in found.items():
                    speed = expected_tokens(k, acceptance) / (draft + verify)
                    texts.append(f"{gpu}: draft {1e3 * draft:.2f} ms, verify {1e3 * verify:.2f}, "
                                 f"{speed:.0f} tok/s; plain {1e3 * plain[gpu][1]:.2f} ms, "
                                 f"{1 / plain[gpu][1]:.0f} tok/s")
                lines.append((f"{what} {k}", True, "; ".join(texts)))
                print(f"ok      sm_{sm} {what}, {k} drafts: {lines[-1][2]}", flush=True)
    return lines
