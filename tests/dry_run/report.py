"""A line of the dry run for each check.

    lines = judge_each(((name, lambda: judge(**how)) for name, how in cases), only="Gemma")
"""

import time
from collections.abc import Callable, Iterable


def judge_each(checks: Iterable[tuple[str, Callable]], only: str = "",
               where: str = "") -> list[tuple[str, bool, str]]:
    """checks: names, and what then says whether it is right, and what was seen. -> all of them."""
    lines = []
    for name, judge in checks:
        if only not in name:
            continue
        start = time.perf_counter()
        ok, text = judge()
        seconds = time.perf_counter() - start
        lines.append((name, ok, text))
        verdict = "ok    " if ok else "FAILED"
        print(f"{verdict}  {where}{name}: {text} ({seconds:.0f} s)", flush=True)
    return lines


def within(most: float, compare: Callable[..., float], **arguments) -> tuple[bool, str]:
    """Is what it gives below `most`?"""
    try:
        worst = compare(**arguments)
    except Exception as e:                         # one that breaks must not hide the others
        return False, f"{type(e).__name__}: {str(e).splitlines()[0][:160]}"
    return worst < most, f"within {worst:.0e}"
