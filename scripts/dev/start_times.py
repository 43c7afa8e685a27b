"""Measure generate.py's time to the first new text, and to its end.

    python scripts/dev/start_times.py [arguments for generate.py, instead of the default model]

32 tokens after 6 words by default; with cold and warm caches, other prompt lengths, an edited
comment, a full disk, and two concurrent processes. Medians of REPETITIONS with warm caches; single
runs otherwise.
"""

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
REPETITIONS = 5
PROMPT = "The capital of France is the"
WORDS = "the river goes to the sea and the rain comes back to the hills "
SOURCES = ("*.py", "*/*.py", "*/*.cpp", "*/*.h")


class Start(NamedTuple):
    """Seconds since the command was started."""

    first_text: float
    end: float


class Run:
    """A generate.py process."""

    def __init__(self, root: Path, argv: list[str], cache: Path, prompt: str = PROMPT,
                 file_bytes: int | None = None):
        """file_bytes: max file size, to simulate a full disk."""
        self.prompt = prompt
        self.begin = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, root / "generate.py", *argv, "--max_new_tokens", "32", "--ignore_eos",
             "--prompt", prompt],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | environment(cache),
            preexec_fn=lambda: limit_files(file_bytes))

    def wait(self) -> Start:
        out = self.process.stdout
        n, first = 0, None
        while piece := os.read(out.fileno(), 1 << 16):
            n += len(piece)
            if first is None and n > len(self.prompt.encode()):        # the echoed prompt
                first = time.perf_counter() - self.begin
        stderr = self.process.stderr.read().decode()
        if self.process.wait():
            sys.exit(stderr)
        return Start(first, time.perf_counter() - self.begin)


def environment(cache: Path) -> dict[str, str]:
    return dict(GPT_FASTER_CACHE=f"{cache}/ours", TORCHINDUCTOR_CACHE_DIR=f"{cache}/inductor",
                TRITON_CACHE_DIR=f"{cache}/triton", PYTHONDONTWRITEBYTECODE="1")


def limit_files(n_bytes: int | None) -> None:
    if n_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, n_bytes))


def median(starts: list[Start]) -> Start:
    return Start(*map(statistics.median, zip(*starts)))


def edited_copy(folder: Path) -> Path:
    """A copy of the code with a comment added to each file, and the same checkpoints."""
    for pattern in SOURCES:
        for path in ROOT.glob(pattern):
            if path.relative_to(ROOT).parts[0] not in ("tests", "scripts"):
                new = folder / path.relative_to(ROOT)
                new.parent.mkdir(parents=True, exist_ok=True)
                mark = "//" if path.suffix in (".cpp", ".h") else "#"
                new.write_text(f"{path.read_text()}{mark} edited\n")
    if (ROOT / "checkpoints").exists():
        (folder / "checkpoints").symlink_to(ROOT / "checkpoints")
    return folder


def measure(argv: list[str], empty: Path):
    """Yield (what, Start)."""
    compiled = [*argv, "--compile"]

    def many(argv, prompt=PROMPT, root=ROOT):
        return median([Run(root, argv, empty / "one", prompt).wait() for _ in range(REPETITIONS)])
    yield "uncompiled, caches empty", Run(ROOT, argv, empty / "one").wait()
    yield "uncompiled", many(argv)
    shutil.rmtree(empty / "one")
    yield "`--compile`, caches empty", Run(ROOT, compiled, empty / "one").wait()
    yield "`--compile`", many(compiled)
    for n in 70, 700, 2100:
        words = (WORDS * n).split()[:n]
        yield f"… after {n} words, the first time", Run(ROOT, compiled, empty / "one",
                                                        " ".join(words)).wait()
    copy = edited_copy(empty / "edited")
    yield "… a comment edited in every file, first", Run(copy, compiled, empty / "one").wait()
    yield "… and again", many(compiled, root=copy)
    yield "… caches empty and no file above 64 kB", Run(ROOT, compiled, empty / "two",
                                                       file_bytes=1 << 16).wait()
    pair = [Run(ROOT, compiled, empty / "three") for _ in range(2)]
    for i, run in enumerate(pair):
        yield f"… caches empty, two at once: number {i + 1}", run.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     epilog="All arguments go to generate.py.")
    _, argv = parser.parse_known_args()
    print("| seconds | first new text | end |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as empty:
        for what, start in measure(argv, Path(empty)):
            print(f"| {what} | {start.first_text:.1f} | {start.end:.1f} |", flush=True)


if __name__ == "__main__":
    main()
