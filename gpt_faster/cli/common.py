"""What every command line here shares: flags, one-line errors, devices.

The commands and the scripts use it.

    sys.exit(guarded(run))                         # run(argv) -> exit status
"""

import argparse
import os
import re
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

import generate
from checkpoint import Unforeseen, first_line, is_out_of_memory
from generate import log, peak_memory
from gpt_faster.kernels.private import has_bf16
from gpt_faster.layers.embedding import embed_scale

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")         # huge pages: weights are read faster


def fail(message) -> None:
    log(f"{Path(sys.argv[0]).name}: error: {message}")
    sys.exit(2)


def guarded(run: Callable, argv: list[str] | None = None) -> int:
    """Run a command -> its exit status: 2 on bad input (one line on stderr), 130 on Ctrl-C.

    What is neither bad input nor a lack of something keeps its traceback, and Python's status 1.
    """
    with suppress(AttributeError):                         # a terminal may know fewer characters
        sys.stdout.reconfigure(errors="replace")
    try:
        return run(argv)
    except BrokenPipeError:                                # the reader of our output left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        log("interrupted")
        return 130
    except Exception as e:
        message = explained(e)
        if message is None:
            raise
        if is_debugging(argv):
            show_where(e)
        fail(message)


def explained(e: Exception) -> str | None:
    """The line that a user gets, or None: it is a mistake of ours, and a traceback says more."""
    if is_out_of_memory(e):
        return ("out of memory: try a smaller model, --max_seq_length or --batch_size "
                f"({first_line(e)})")
    if isinstance(e, OSError | ValueError | ImportError | Unforeseen):
        return one_line(str(e))
    return None


def one_line(text: str) -> str:
    """What a terminal can show in a line: files have names of any length, and control characters.
    """
    text = " ".join(text.split("\n"))
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return text if len(text) <= 1000 else text[:1000] + "…"


def show_where(e: Exception) -> None:
    """The traceback, and those of what it followed from, also where it says `from None`."""
    inner = e
    while inner is not None:
        inner.__suppress_context__ = False
        inner = inner.__cause__ or inner.__context__
    traceback.print_exception(e)


def is_debugging(argv: list[str] | None) -> bool:
    """Asked by --debug, or by the environment's GPT_FASTER_DEBUG, to show where errors arise?"""
    asked = "--debug" in map(str, sys.argv if argv is None else argv)
    return asked or os.environ.get("GPT_FASTER_DEBUG", "0") not in ("", "0")


class Help(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action):
        silent = action.default in (None, False, "", [])
        return action.help if silent else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """argparse with dashes for underscores, --debug, and errors in one line."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.add_argument("--debug", action="store_true", help="show where an error arises, with "
                          "its traceback; so does GPT_FASTER_DEBUG=1 in the environment")

    def parse_args(self, args=None, namespace=None):
        def underscores(match):
            return "--" + match[0][2:].replace("-", "_")

        args = sys.argv[1:] if args is None else args
        args = [re.sub(r"^--[a-z]+(-[a-z]+)+(?==|$)", underscores, arg) for arg in args]
        return super().parse_args(args, namespace)

    def error(self, message):
        fail(message)


def pick_dtype(name: str, device: torch.device, cfg, many_rows: bool = False) -> torch.dtype:
    """As generate.pick_dtype(), and float32 in place of float16 where the model overflows that.

    many_rows: float32 on a CPU too that emulates bfloat16's products, there five times slower.
    """
    if many_rows and name == "auto" and device.type == "cpu" and not has_bf16():
        return torch.float32
    dtype = generate.pick_dtype(name, device)
    # Gemma 2 and 3: NaN in float16
    overflows = getattr(cfg.block, "post_norm", False) and embed_scale(cfg) != 1
    if name == "float16" and overflows:
        raise ValueError("this model's activations exceed float16's range: use --dtype bfloat16 "
                         "or float32")
    return torch.float32 if dtype == torch.float16 and overflows else dtype


def free_memory(device: torch.device) -> float:
    """Bytes that may be allocated: a GPU's, or what Linux calls available; infinite if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    found = meminfo.exists() and re.search(r"MemAvailable: *(\d+) kB", meminfo.read_text())
    return int(found[1]) * 1024 if found else float("inf")


def reset_peak_memory(device: torch.device) -> int:
    """Forget the peak so far, where that can be done (CUDA, Linux) -> bytes in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")
    return peak_memory(device)
