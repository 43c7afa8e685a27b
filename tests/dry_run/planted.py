"""Faults put in on purpose: a dry run that does not see them is worth nothing.

    python scripts/dev/gpu_dryrun.py --only planted
"""

from contextlib import ExitStack
from unittest.mock import patch

import torch
import torch.nn.functional as F


def loop_faults() -> dict[str, tuple]:
    """-> name: where, what is put there, and the arguments of loops.run() that show it."""
    import generate
    import gpt_faster.decoding.engines
    import model
    decode, attend = generate.decode_one_token, model.SDPA.forward

    def reading(*args):
        token = decode(*args)
        token.item()
        return token

    def viewing(self, q, k, v, mask):
        if q.shape[2] > 1:
            return attend(self, q, k, v, mask)
        grouped = q.view(q.shape[0], k.shape[1], -1, q.shape[3])
        return F.scaled_dot_product_attention(grouped, k, v, mask, scale=self.scale).view(q.shape)

    return {
        "a host read in the loop": (
            [patch.object(generate.Steps.__new__, "__defaults__",
                          (generate.prefill, reading, False, 256))],
            dict(engine="kv_cache")),
        "strides that change after the warm-up": (
            [patch.object(generate, "CudaGraph", lambda step: step),       # it would even them out
             patch.object(gpt_faster.decoding.engines.torch, "contiguous_format", torch.preserve_format)],
            dict(engine="compile")),
        "a view that one backend's strides do not allow": (
            [patch.object(model.SDPA, "forward", viewing)], dict(engine="kv_cache")),
        "heads that share keys and a mask": (
            [patch("gpt_faster.kernels.cuda.attention.RepeatedHeads.forward",
                   lambda self, *args: self.plain(*args))], dict(engine="kv_cache")),
    }


def number_faults() -> dict[str, tuple]:
    """-> name: what is put in, and the arguments of numbers.compare() that show it."""
    from gpt_faster.kernels.cuda import fused_layer
    attention, matvec = fused_layer.cached_attention, fused_layer.matvec

    def unmasked(*args):
        return attention(*args[:5], torch.ones_like(args[5]), *args[6:])

    def swapped(x, weight, scales, zeros, *rest):
        weight = weight >> 4 | weight << 4 if weight.dtype == torch.uint8 else weight
        return matvec(x, weight, scales, zeros, *rest)
    def exchanged(*args):
        return attention(*args[:15], args[16], args[15], *args[17:])
    return {
        "scales of keys and of values exchanged": (
            [patch.object(fused_layer, "cached_attention", exchanged)],
            dict(family="Llama", case="verify", kv_cache="int8")),
        "no mask": ([patch.object(fused_layer, "cached_attention", unmasked)],
                    dict(family="Llama", case="verify")),
        "another order of nibbles": (
            [patch.object(fused_layer, "matvec", swapped)],
            dict(family="Llama", case="decode", mode="int4", groupsize=32)),
    }


def generated_faults() -> dict[str, tuple]:
    """-> name: what is put into compiled steps, and the arguments of generated.compare()."""
    from torch._inductor.async_compile import AsyncCompile

    from dry_run.generated import TOP_K
    from gpt_faster.decoding.samplers import DeviceSampler
    from gpt_faster.kernels.cuda import fused_layer
    attention, counter, load = fused_layer.cached_attention, DeviceSampler.counter, AsyncCompile.triton

    def wrong_kernel(self, name, source, **more):
        return load(self, name, source.replace(" <= ", " < "), **more)

    def wrong_noise(self, pos, draft):
        return counter(self, pos + torch.compiler.is_compiling(), draft)

    def wrong_slot(*args):
        return attention(*args[:6], args[6] + 1, *args[7:])
    return {
        "a kernel of Inductor's with < for <=": (
            [patch.object(AsyncCompile, "triton", wrong_kernel)], dict(family="Llama")),
        "noise of the next position": (
            [patch.object(DeviceSampler, "counter", wrong_noise)],
            dict(family="Llama", params=TOP_K, n_new=3)),
        "keys in the slot after theirs": (
            [patch.object(fused_layer, "cached_attention", wrong_slot)], dict(family="Llama")),
    }


def report(name: str, ok: bool, text: str) -> tuple[str, bool, str]:
    """ok: of the run with the fault in it."""
    print(f"{'FAILED  not seen' if ok else 'ok      seen'}: {name}: {text[:160]}", flush=True)
    return name, not ok, text


def main_loops() -> list:
    from dry_run import loops
    loops.prepare()
    results = []
    for name, (patches, arguments) in loop_faults().items():
        with ExitStack() as stack:
            for p in patches:
                stack.enter_context(p)
            results.append(report(name, *loops.judge(**arguments)))
    return results


def main_numbers() -> list:
    from dry_run import numbers
    results = []
    for name, (patches, arguments) in number_faults().items():
        with numbers.on_a_gpu(), ExitStack() as stack:
            for p in patches:
                stack.enter_context(p)
            most = numbers.SCHEMES.get(arguments.get("mode"), (None, numbers.MOST))[1]
            most = numbers.MOST_OF_CODES if "kv_cache" in arguments else most
            results.append(report(name, *numbers.judge(most, **arguments)))
    return results


def main_generated() -> list:
    """In a process of generated.main()'s."""
    from dry_run import generated
    results = []
    for name, (patches, arguments) in generated_faults().items():
        with ExitStack() as stack:
            for p in patches:
                stack.enter_context(p)
            ok, text = generated.judge(generated.MOST, **arguments)
        broke = "Error: " in text and "AssertionError: " not in text       # it shows no numbers
        results.append(report(name, ok or broke, text))
    return results
