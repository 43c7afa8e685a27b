"""What a run says of itself: the text as it comes, speeds, traces.

    times, interrupted = follow(generate(batch, [ids], 100), [sequence], shown="")
    print(describe(figures(times, len(ids), 1, read_bytes)))
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

import tp
from cli.common import log
from cli.readback import NotFinite, read_late
from cli.sequence import Sequence
from generate import Batch
from model import MoE, Transformer


def follow(tokens: Iterator[Tensor], rows: list[Sequence], shown: str | None,
           batch: Batch | None = None) -> tuple[list[float], bool]:
    """Run one generation to its end: rows collect, and the first one's text streams to stdout.

    shown: what to print before it; None: print nothing. batch: what generates; NotFinite names a
    row whose logits are no numbers. -> the time before the first step and after each token, and
    whether Ctrl-C ended it.
    """
    def show(text):
        if shown is not None:
            print(text, end="", flush=True)

    show(shown)
    times, reason = [time.perf_counter()], "length"
    try:
        not_finite = batch and batch.sampler.not_finite
        for ids, _ in read_late(((token, None) for token in tokens), not_finite):
            times.append(time.perf_counter())
            for row, token_id in zip(rows, ids):
                if token_id is None and row.finish_reason is None:
                    what = f"row {rows.index(row)}" if len(rows) > 1 else "the model"
                    raise NotFinite(what, batch.model.dtype)
                piece = row.push(token_id)
                if row is rows[0]:
                    show(piece)
            if all(row.finish_reason for row in rows):
                break
    except KeyboardInterrupt:
        reason = "interrupted"
    for row in rows:
        piece = row.finish(reason)
        if row is rows[0]:
            show(piece + "\n")
    return times, reason == "interrupted"


def figures(times: list[float], n_prompt: int, batch_size: int, read_bytes: int) -> dict:
    """Speeds from `follow`'s times: prefill ends with the first token, decode is what comes after.

    decode_tok_s is per row; bandwidth_gb_s counts the weights that each step reads, 1e9 bytes;
    read_bytes=0: a step gives more than a token.
    """
    ttft_s = times[1] - times[0] if len(times) > 1 else None
    step_s = (times[-1] - times[1]) / (len(times) - 2) if len(times) > 2 else None
    return dict(ttft_s=ttft_s, prefill_tok_s=n_prompt * batch_size / ttft_s if ttft_s else None,
                decode_tok_s=1 / step_s if step_s else None,
                decode_tok_s_total=batch_size / step_s if step_s else None,
                bandwidth_gb_s=read_bytes / step_s / 1e9 if step_s and read_bytes else None)


def describe(f: dict) -> str:
    """figures() in a line."""
    if f["ttft_s"] is None:
        return "no token"
    line = f"time to first token {f['ttft_s']:.3f} s, prefill {f['prefill_tok_s']:.1f} tok/s"
    if f["decode_tok_s"]:
        line += f", decode {f['decode_tok_s']:.2f} tok/s"
        line += f", bandwidth {f['bandwidth_gb_s']:.1f} GB/s" if f["bandwidth_gb_s"] else ""
        if f["decode_tok_s_total"] > f["decode_tok_s"]:
            line += f" ({f['decode_tok_s_total']:.2f} tok/s in all rows)"
    return line


def weight_bytes(model: Transformer) -> tuple[int, int]:
    """All weights, and those that one row's step reads: active experts, no lone embedding."""
    def size(parameters):
        return sum(p.numel() * p.element_size() for p in parameters)

    total = size(model.parameters())
    read = {id(p) for p in model.head.parameters()}
    idle = size(p for p in model.embed.parameters() if id(p) not in read)
    for moe in (module for module in model.modules() if isinstance(module, MoE)):
        experts = size(p for part in (moe.gate, moe.up, moe.down) for p in part.parameters())
        idle += experts * (moe.n_expert - moe.n_active) // moe.n_expert
    return total, total - idle


@contextmanager
def traced(path: Path | None):
    """Write a Chrome trace of what happens within, of each rank its own; None: do not."""
    if path is None:
        yield
        return
    with torch.profiler.profile() as trace:
        yield
    rank = f".rank{tp.rank()}" if tp.rank() else ""
    path = path.with_name(path.name.removesuffix(".json") + rank + ".json")
    trace.export_chrome_trace(str(path))
    if not path.exists():                                  # it only logs that it could not
        raise OSError(f"{path}: the trace could not be written")
    log(f"Trace written to {path}")
