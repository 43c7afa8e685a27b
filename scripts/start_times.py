"""How long generate.py takes to its first token, by phase: caches empty, filled, and uncompiled.

    python scripts/start_times.py [arguments for generate.py, instead of the default model]
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(*argv, **env) -> dict:
    """-> seconds of each phase of one process, the rest being Python, imports and the end."""
    start = time.perf_counter()
    command = [sys.executable, ROOT / "generate.py", *argv, "--max_new_tokens", "2", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, env=os.environ | env)
    if done.returncode:
        sys.exit(done.returncode)                  # it has said why
    total, said = time.perf_counter() - start, json.loads(done.stdout)
    parts = {phase: said[phase] for phase in ("load_s", "compile_s", "ttft_s")}
    return dict(parts, rest=total - sum(parts.values()), total=total)


def main(argv: list[str]) -> None:
    if {"-h", "--help"} & {*argv}:
        return print(__doc__)
    with tempfile.TemporaryDirectory() as empty:
        caches = dict(GPT_FASTER_CACHE=f"{empty}/ours", TORCHINDUCTOR_CACHE_DIR=f"{empty}/inductor",
                      TRITON_CACHE_DIR=f"{empty}/triton")
        runs = {"`--compile`, caches empty": [run(*argv, "--compile", **caches)],
                "`--compile`, again": [run(*argv, "--compile", **caches) for _ in range(5)],
                "uncompiled": [run(*argv, **caches) for _ in range(5)]}
    print("| seconds | load | compile | first token | Python, imports, end | in all |")
    print("|---|---|---|---|---|---|")
    for name, found in runs.items():
        cells = [statistics.median(one[phase] for one in found) for phase in found[0]]
        print(f"| {name} | " + " | ".join(f"{s:.1f}" for s in cells) + " |")


main(sys.argv[1:])
