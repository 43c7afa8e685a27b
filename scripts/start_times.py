"""How long generate.py takes to its first token, by phase: caches empty, filled, and uncompiled.

    python scripts/start_times.py [arguments for generate.py, instead of the default model]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PHASES = ("load_s", "compile_s", "ttft_s")
REPETITIONS = 5


def run(argv: list[str], **env) -> dict:
    """-> seconds of each phase of one process, the rest being Python, imports and the end."""
    start = time.perf_counter()
    command = [sys.executable, ROOT / "generate.py", *argv, "--max_new_tokens", "2", "--json"]
    process = subprocess.run(command, stdout=subprocess.PIPE, env=os.environ | env)
    if process.returncode:
        sys.exit(process.returncode)               # generate.py has logged why
    total = time.perf_counter() - start
    result = json.loads(process.stdout)
    seconds = {phase: result[phase] for phase in PHASES}
    return dict(seconds, rest=total - sum(seconds.values()), total=total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     epilog="All arguments go to generate.py.")
    _, argv = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as empty:
        caches = dict(GPT_FASTER_CACHE=f"{empty}/ours", TORCHINDUCTOR_CACHE_DIR=f"{empty}/inductor",
                      TRITON_CACHE_DIR=f"{empty}/triton")
        compiled = [*argv, "--compile"]
        runs = {"`--compile`, caches empty": [run(compiled, **caches)],
                "`--compile`, again": [run(compiled, **caches) for _ in range(REPETITIONS)],
                "uncompiled": [run(argv, **caches) for _ in range(REPETITIONS)]}
    print("| seconds | load | compile | first token | Python, imports, end | in all |")
    print("|---|---|---|---|---|---|")
    for name, results in runs.items():
        medians = [statistics.median(r[phase] for r in results) for phase in results[0]]
        print(f"| {name} | " + " | ".join(f"{seconds:.1f}" for seconds in medians) + " |")


if __name__ == "__main__":
    main()
