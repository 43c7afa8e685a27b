"""The picture of docs/architecture.md: the commands, the rooms of gpt_faster/, the core, and the
path of a prompt through them. Plain Python, no dependencies.

tests/test_laws.py checks that the committed file is what this script writes, that every room and
core file is in it, and that imports point the way that the picture states.

    python scripts/dev/architecture_svg.py             # print the SVG
    python scripts/dev/architecture_svg.py --write     # write docs/architecture.svg
"""

import argparse
from html import escape
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).resolve().parents[2] / "docs/architecture.svg"

WIDTH, MARGIN, GAP = 1120, 24, 16                  # of the picture, and between boxes
BOX_HEIGHT, COMMAND_HEIGHT, TITLE_HEIGHT = 76, 40, 34
INK, GRAY, ACCENT = "#1f2328", "#57606a", "#0969da"
FONT = "font-family='-apple-system,Segoe UI,Helvetica,Arial,sans-serif'"


class Box(NamedTuple):
    """A file or a folder; steps: the numbers of the path that run there."""

    name: str
    lines: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()


class Band(NamedTuple):
    title: str
    note: str
    fill: str
    rows: tuple[tuple[Box, ...], ...]


BANDS = (
    Band("Commands", "run from the root, nothing is installed", "#f6f8fa", ((
        Box("generate.py", steps=(1,)), Box("quantize.py"), Box("eval.py"), Box("benchmark.py"),
        Box("serve.py")),)),
    Band("gpt_faster/", "what is added to the core", "#ddf4ff", (
        (Box("server/", ("HTTP, the request queue,", "answers, the page")),
         Box("bench/", ("workloads, other engines,", "tables, plots")),
         Box("cli/", ("flags, Options, chat,", "files of prompts"), (2,))),
        (Box("runtime.py", ("a model that is loaded,", "compiled and warm"), (5,)),
         Box("decoding/", ("engines, slots, drafters,", "grammars, ranks"), (6,)),
         Box("quantization/", ("GPTQ, calibration,", "bit budgets")),
         Box("loading.py", ("a model of any format,", "ready for the kernels"), (3,)),
         Box("devices.py", ("engine, dtype, memory", "of a device"))),
        (Box("formats/", ("GGUF, AWQ, GPTQ, fp8,", "LoRA; the families"), (3,)),
         Box("kernels/", ("C++ for CPUs, Triton for", "GPUs; when they apply"), (7,)),
         Box("text/", ("other tokenizers,", "chat templates")),
         Box("layers/", ("layers that a Llama", "does not have")),
         Box("storage/", ("the cache on disk: code,", "packed weights"))))),
    Band("The core", "eight files that run alone in an empty folder", "#dafbe1", (
        (Box("speculate.py", ("draft, verify, accept",)),
         Box("generate.py", ("prefill, decode step,", "the loop"), (6,)),
         Box("tokenizer.py", ("text to ids and back",), (4, 9)),
         Box("tp.py", ("shard, all-reduce",))),
        (Box("checkpoint.py", ("config.json, safetensors,", ".pth to a model"), (3,)),
         Box("quantize.py", ("int8 and int4 schemes,", "quantized linears")),
         Box("sampling.py", ("parameters, filters,", "the draw"), (8,)),
         Box("model.py", ("the transformer,", "its KV cache"), (7,))))),
)
RULE = ("Imports at the top of a file lead down or to the right; one exception: storage/ prints "
        "its notes through kernels/.")
PATH = (
    ("command line", "argv"), ("Options", "flags, defaults"), ("open_model", "config, tensors"),
    ("encode", "text to ids"), ("Runtime", "load, warm up"), ("Batch", "prefill, step"),
    ("model", "ids to logits"), ("Sampler", "logits to an id"), ("Detokenizer", "ids to text"),
)


def text(x: float, y: float, words: str, size: int, more: str = "") -> str:
    return f"<text x='{x:g}' y='{y:g}' font-size='{size}' {more}>{escape(words)}</text>"


def number(x: float, y: float, n: int) -> str:
    """A step of the path: a disc around its number."""
    return (f"<circle cx='{x:g}' cy='{y:g}' r='11' fill='{ACCENT}'/>"
            + text(x, y + 5, str(n), 13, "fill='#ffffff' font-weight='600' text-anchor='middle'"))


def draw_box(box: Box, x: float, y: float, width: float, height: float) -> list[str]:
    parts = [f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' rx='6' "
             f"fill='#ffffff' stroke='#8c959f'/>",
             text(x + 10, y + 25, box.name, 16, f"fill='{INK}' font-weight='600'")]
    parts += [text(x + 10, y + 45 + 17 * i, line, 13, f"fill='{GRAY}'")
              for i, line in enumerate(box.lines)]
    parts += [number(x + width - 18 - 26 * i, y + 20, n)
              for i, n in enumerate(reversed(box.steps))]
    return parts


def draw_band(band: Band, y: float) -> tuple[list[str], float]:
    """-> what to draw, and where the band ends."""
    height = BOX_HEIGHT if band.rows[0][0].lines else COMMAND_HEIGHT
    bottom = y + TITLE_HEIGHT + len(band.rows) * (height + GAP)
    parts = [f"<rect x='{MARGIN}' y='{y:g}' width='{WIDTH - 2 * MARGIN}' height='{bottom - y:g}' "
             f"rx='8' fill='{band.fill}'/>",
             text(MARGIN + GAP, y + 23, band.title, 17, f"fill='{INK}' font-weight='600'"),
             text(WIDTH - MARGIN - GAP, y + 23, band.note, 14,
                  f"fill='{GRAY}' text-anchor='end'")]
    for i, row in enumerate(band.rows):
        inside = WIDTH - 2 * (MARGIN + GAP)
        width = (inside - (len(row) - 1) * GAP) / len(row)
        for j, box in enumerate(row):
            parts += draw_box(box, MARGIN + GAP + j * (width + GAP),
                              y + TITLE_HEIGHT + i * (height + GAP), width, height)
    return parts, bottom


def draw_path(y: float) -> tuple[list[str], float]:
    """One line of numbered steps."""
    step = (WIDTH - 2 * MARGIN) / len(PATH)
    centers = [MARGIN + step * (i + 0.5) for i in range(len(PATH))]
    parts = [text(MARGIN + GAP, y + 23, "The path of a prompt", 17,
                  f"fill='{INK}' font-weight='600'"),
             text(WIDTH - MARGIN - GAP, y + 23,
                  "6 to 9 repeat for each token; serve.py: 1, 2, 3, 5 once, then 4 and 6 to 9 for "
                  "each request", 14,
                  f"fill='{GRAY}' text-anchor='end'"),
             f"<path d='M{centers[0]:g} {y + 50:g}H{centers[-1]:g}' stroke='{ACCENT}' "
             "stroke-width='2'/>"]
    for n, (x, (name, what)) in enumerate(zip(centers, PATH), start=1):
        parts += [number(x, y + 50, n),
                  text(x, y + 80, name, 14, f"fill='{INK}' font-weight='600' "
                                            "text-anchor='middle'"),
                  text(x, y + 98, what, 13, f"fill='{GRAY}' text-anchor='middle'")]
    return parts, y + 110


def svg() -> str:
    parts, y = [], float(MARGIN)
    for band in BANDS:
        drawn, y = draw_band(band, y)
        parts += drawn
        y += GAP
    parts.append(text(WIDTH / 2, y + 6, RULE, 14, f"fill='{GRAY}' text-anchor='middle'"))
    drawn, y = draw_path(y + 18)
    parts += drawn
    height = y + MARGIN
    head = (f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height:g}' "
            f"width='{WIDTH}' height='{height:g}' {FONT}>")
    title = "<title>The architecture of gpt-faster</title>"
    background = f"<rect width='{WIDTH}' height='{height:g}' fill='#ffffff'/>"
    return "\n".join([head, title, background, *parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write docs/{FILE.name}")
    if parser.parse_args().write:
        FILE.write_text(svg())
    else:
        print(svg(), end="")


if __name__ == "__main__":
    main()
