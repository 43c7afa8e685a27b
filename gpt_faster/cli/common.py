"""Shared by all commands and scripts: one-line errors and exit statuses.

    sys.exit(guarded(run))                         # run(argv) -> exit status
"""

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from checkpoint import Unforeseen, first_line, is_out_of_memory
from generate import log

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")         # huge pages: faster weight reads


def fail(message) -> None:
    log(f"{Path(sys.argv[0]).name}: error: {message}")
    sys.exit(2)


def guarded(run: Callable, argv: list[str] | None = None) -> int:
    """Run a command -> its exit status: 2 on bad input (one line on stderr), 130 on Ctrl-C.

    Other exceptions are bugs: they keep their traceback and Python's status 1.
    """
    with suppress(AttributeError):                 # not every terminal is UTF-8
        sys.stdout.reconfigure(errors="replace")
    try:
        return run(argv)
    except BrokenPipeError:                        # e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        log("interrupted")
        return 130
    except Exception as e:
        message = error_line(e)
        if message is None:
            raise
        if is_debug(argv):
            print_traceback(e)
        fail(message)


def error_line(e: Exception) -> str | None:
    """The error in one line, or None for a bug, which needs its traceback."""
    if is_out_of_memory(e):
        return ("out of memory: try a smaller model, --max_seq_length or --batch_size "
                f"({first_line(e)})")
    if isinstance(e, OSError | ValueError | ImportError | Unforeseen):
        return one_line(str(e))
    return None


def one_line(text: str) -> str:
    """Printable text of at most 1000 characters: messages may quote arbitrary file contents."""
    text = " ".join(text.split("\n"))
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return text if len(text) <= 1000 else text[:1000] + "…"


def print_traceback(e: Exception) -> None:
    """Print the traceback with all causes, including those hidden by `from None`."""
    error = e
    while error is not None:
        error.__suppress_context__ = False
        error = error.__cause__ or error.__context__
    traceback.print_exception(e)


def is_debug(argv: list[str] | None) -> bool:
    """Whether --debug or GPT_FASTER_DEBUG=1 asks for tracebacks."""
    has_flag = "--debug" in map(str, sys.argv if argv is None else argv)
    return has_flag or os.environ.get("GPT_FASTER_DEBUG", "0") not in ("", "0")
