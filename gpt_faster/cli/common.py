"""What every command line here shares: flags, and errors in one line.

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

from checkpoint import Unforeseen, first_line, is_out_of_memory
from generate import log

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
