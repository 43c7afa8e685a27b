"""Run one benchmark with several tensor-parallel sizes, as one table.

    run_ranks([1, 2], ["-n", "64"], "python benchmark.py -n 64 --ranks 1,2") -> exit status, result
"""

import json
import subprocess
import sys

from generate import log
from gpt_faster.bench.machine import ROOT


def run_ranks(counts: list[int], argv: list[str], command: str) -> tuple[int, dict | None]:
    """Run benchmark.py with these arguments on each number of ranks.

    -> the worst exit status, and one result with all rows, or None if nothing ran.
    """
    results = []
    status = 0
    for n_ranks in counts:
        log(f"== {n_ranks} ranks")
        launcher = []
        if n_ranks > 1:
            launcher = ["-m", "torch.distributed.run", "--standalone",
                        f"--nproc_per_node={n_ranks}"]
        process = subprocess.run(
            [sys.executable, *launcher, str(ROOT / "benchmark.py"), *argv, "--ranks", "",
             "-o", "json"], stdout=subprocess.PIPE)
        status = max(status, process.returncode)
        if process.stdout:
            results.append(json.loads(process.stdout))
        if process.returncode == 130 or not process.stdout:        # Ctrl-C, or a failure
            break
    if not results:
        return status, None
    rows = [row for result in results for row in result["rows"]]
    return status, dict(results[0], command=command, rows=rows)
