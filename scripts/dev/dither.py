"""Add noise of one int4 step to a model's weights, so that no quantized format fits exactly.

The small models available are already quantized to 4 bits, which favours programs that use the same
format. The noisy model, slightly worse, is an unbiased reference for comparisons.

    python scripts/dev/dither.py -m gemma.gguf --output gemma_dithered.pth
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from checkpoint import LazyTensor  # noqa: E402
from generate import log  # noqa: E402
from gpt_faster.cli.common import guarded  # noqa: E402
from gpt_faster.cli.parser import Parser  # noqa: E402
from gpt_faster.cli.quantizing import write  # noqa: E402
from gpt_faster.formats.lazy import cached  # noqa: E402
from gpt_faster.formats.load import open_checkpoint  # noqa: E402
from quantize import LINEARS, scheme_named  # noqa: E402

GRID = scheme_named("int4-g32")


def is_dithered(name: str, t: LazyTensor) -> bool:
    return bool(LINEARS.search(name)) and GRID.fits(t.shape[-1])


def dither(t: LazyTensor, generator: torch.Generator) -> LazyTensor:
    """Add uniform noise of ± half an int4 step."""
    def load():
        w = t.whole().float()
        groups = w.unflatten(-1, (-1, GRID.groupsize))
        step, _ = GRID.grid(groups)
        noise = torch.rand(groups.shape, generator=generator) - 0.5
        return (groups + noise * step[..., None]).flatten(-2).bfloat16()
    return cached(t.name, t.shape, torch.bfloat16, load, t)


def run(argv: list[str] | None = None) -> int:
    p = Parser(description=__doc__.splitlines()[0])
    p.add_argument("--model", "-m", required=True)
    p.add_argument("--output", required=True, type=Path)
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args(argv)
    source = open_checkpoint(args.model)
    generator = torch.Generator().manual_seed(args.seed)
    tensors = {name: dither(t, generator) if is_dithered(name, t) else t
               for name, t in source.tensors.items()}
    write(replace(source, tensors=tensors), args.output, torch.bfloat16)
    log(f"{args.output} is {args.model} with noise of one int4 step")
    return 0


if __name__ == "__main__":
    sys.exit(guarded(run))
