"""Attention alone over a KV cache in bf16 and of codes: how many times as fast the codes are.

One thread and its CPU time, the formats interleaved in each round, medians of the rounds' ratios.
Whole models: benchmark.py --engines compile,compile@int8,…

    python scripts/dev/cache_speed.py int8 int4 fp8 int8/int4
"""

import ctypes
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]
from gpt_faster.cli.common import guarded  # noqa: E402
from gpt_faster.cli.parser import Parser  # noqa: E402
from gpt_faster.kernels.cpu import native  # noqa: E402
from gpt_faster.kernels.cpu.mixers import cache_struct  # noqa: E402
from gpt_faster.layers.quantized_cache import CacheFormat, QuantizedCache  # noqa: E402
from model import KVCache, visible  # noqa: E402

# queries, keys, head width: SmolLM2-135M, Llama-3.2-3B with a third of its heads
HEADS = {"9 heads of 64, 3 a key": (9, 3, 64), "8 heads of 128, 4 a key": (8, 2, 128)}
# new tokens, tokens before them
N_LAYER = 30
CALLS = {"a prompt of 512": (512, 0), "512 behind 3,584": (512, 3584), "a step at 4,096": (1, 4095)}


def attention(kv_cache: str, N: int, K: int, H: int, T: int, before: int) -> native.Attention:
    """An operation over a filled cache; kv_cache: bfloat16, or a CacheFormat."""
    shape = (1, K, before + T, H)
    if kv_cache == "bfloat16":
        cache = KVCache(shape, torch.bfloat16, "cpu")
    else:
        found = CacheFormat.parse(kv_cache)
        cache = QuantizedCache(shape, torch.bfloat16, "cpu", (found.keys, found.values))
    slots = torch.arange(before + T)
    random = torch.randn(2, 1, K, before + T, H).to(torch.bfloat16)
    cache(slots, *random, before + T, None)
    pos = slots[None, before:]
    mask = visible(pos, slots)
    cos, sin = torch.ones(T, H // 2), torch.zeros(T, H // 2)
    positions = native.Positions(
        n_key=before + T, mask_stride_t=before + T, rope_stride_b=T * (H // 2), slot_stride_b=T,
        cos=cos, sin=sin, mask=mask, slot=pos)
    return native.Attention(
        kind=native.ATTENTION, has_keys=True, B=1, T=T, N=N, K=K, H=H, V=H, S=before + T, n_row=1,
        scale=H**-0.5, positions=positions, qkv=torch.randn(1, T, (N + 2 * K) * H),
        out=torch.empty(1, T, N * H, dtype=torch.bfloat16), k_cache=cache_struct(cache, "k"),
        v_cache=cache_struct(cache, "v"))


def seconds(ops: list[native.Attention]) -> float:
    start = time.thread_time()
    native.run([ctypes.addressof(op) for op in ops], 1)
    return time.thread_time() - start


@torch.inference_mode()
def run(argv: list[str] | None = None) -> int:
    p = Parser(description=__doc__.splitlines()[0])
    p.add_argument("formats", nargs="+", help="int8, int8/int4, …")
    p.add_argument("--rounds", type=int, default=15)
    args = p.parse_args(argv)
    torch.set_num_threads(1)
    formats = ["bfloat16", *args.formats]
    for heads, shape in HEADS.items():
        for call, (T, before) in CALLS.items():
            n = 1 if T > 1 else N_LAYER            # a step's caches must not fit the CPU's
            ops = {name: [attention(name, *shape, T, before) for _ in range(n)] for name in formats}
            times = [{name: seconds(each) for name, each in ops.items()}
                     for _ in range(args.rounds + 2)][2:]
            ratios = (f"{name} {statistics.median(t['bfloat16'] / t[name] for t in times):.3f}"
                      for name in args.formats)
            plain = statistics.median(t["bfloat16"] for t in times)
            print(f"{heads}, {call}: bfloat16 {1e3 * plain:.2f} ms; {', '.join(ratios)}",
                  flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(guarded(run))
