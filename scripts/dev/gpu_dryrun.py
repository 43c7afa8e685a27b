"""Check the CUDA path and estimate its cost without a GPU.

torch's C++, Dynamo, Inductor and Triton's compiler run as for a GPU, on a stub CUDA runtime
(tests/dry_run/). Not covered: times, results of ATen kernels, NCCL.

    bash scripts/dev/gpu_dryrun.sh                 # create the environment, check, print a table
    bash scripts/dev/gpu_dryrun.sh --only loops --sm 80 --match Gemma
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts"), str(ROOT)]

from dry_run import build  # noqa: E402

GENERATIONS = (75, 80, 90)
# compute capabilities of each part; 0: Triton's interpreter on a CPU, no stub runtime
PARTS = {"steps": (80, 90), "attention": (0, 80, 90), "numbers": (0,), "generated": (75, 80),
         "loops": GENERATIONS, "planted": (0, 80), "products": (0, 80, 90),
         "prompt": (0, 80, 90), "check": (90,), "drafts": (80, 90), "amd": (80,),
         "gpt_fast": (80, 90)}


def part(name: str, sm: int, match: str, gpt_fast: str | None) -> list[tuple[str, bool, str]]:
    """Run a part on the stub runtime -> (name, passed, details) of each check."""
    if name == "numbers":
        from dry_run import numbers
        return numbers.main(match)
    if name == "attention":
        from dry_run import attention
        return attention.main_code(sm, match) if sm else attention.main_numbers(match)
    if name == "generated":
        from dry_run import generated, planted
        faults = planted.main_generated if sm == 80 and match in "planted" else list
        return generated.main(sm, match) + faults()
    if name == "planted":
        from dry_run import planted
        return planted.main_loops() if sm else planted.main_numbers()
    if name == "products":
        from dry_run import products
        return products.main_code(match) if sm else products.main_numbers(match)
    if name == "prompt":
        from dry_run import prompt
        return prompt.main_code(sm, match) if sm else prompt.main_numbers(match)
    if name == "check":
        from dry_run import checks
        return checks.main()
    if name == "amd":
        from dry_run import amd
        return amd.main()
    if name == "gpt_fast":
        from dry_run import gpt_fast as its_step
        return its_step.main(sm, gpt_fast)
    if name == "drafts":
        from dry_run import drafts
        return drafts.main(sm, match)
    if name == "loops":
        from dry_run import loops
        return loops.main(sm, match)
    from dry_run import steps
    return [(f"{s.name} {s.scheme}", not s.wrong, steps.row(s)) for s in steps.main(sm, match)]


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--only", choices=PARTS, nargs="*", default=PARTS)
    p.add_argument("--sm", type=int, nargs="*", help="compute capabilities, times ten",
                   choices=GENERATIONS, default=GENERATIONS)
    p.add_argument("--match", default="", help="only checks whose name contains this")
    p.add_argument("--gpt_fast", metavar="PATH",
                   help="a gpt-fast clone from before flex_attention: also estimate its step")
    p.add_argument("--inside", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.inside:
        lines = part(args.only[0], int(os.environ.get("HOLLOW_SM", 0)), args.match,
                     args.gpt_fast)
        Path(args.inside).write_text(json.dumps(lines))
        sys.stdout.flush()
        os._exit(0)                                # the stub's CUDA graphs hang at exit
    if args.only == ["gpt_fast"] and not args.gpt_fast:
        p.error("gpt_fast requires --gpt_fast PATH, a clone from before flex_attention")
    if args.gpt_fast and not is_gpt_fast(Path(args.gpt_fast)):
        p.error(f"--gpt_fast {args.gpt_fast}: not a gpt-fast clone from before flex_attention")
    failed, n = [], 0
    try:
        build.build()
    except build.Missing as e:
        p.error(str(e))
    selected = [name for name in args.only if name != "gpt_fast" or args.gpt_fast]
    jobs = [(name, sm) for name in selected for sm in PARTS[name] if not sm or sm in args.sm]
    with ThreadPoolExecutor(2) as pool:            # each uses mostly one core
        results = pool.map(lambda job: in_process(*job, args.match, args.gpt_fast), jobs)
        for (name, sm), lines in zip(jobs, results):
            n += len(lines)
            failed += [f"sm_{sm} {name} {line}" for line, ok, _ in lines if not ok]
    if not n:
        p.error("no check matches --only, --sm and --match")
    print(f"{n - len(failed)} of {n} checks passed", *failed, sep="\n")
    return int(bool(failed))


def is_gpt_fast(path: Path) -> bool:
    files = [path / name for name in ("model.py", "generate.py", "quantize.py")]
    if not all(file.is_file() for file in files):
        return False
    model = files[0].read_text(errors="replace")
    return "class ModelArgs" in model and "flex_attention" not in model


def in_process(name: str, sm: int, match: str, gpt_fast: str | None) -> list:
    environment = build.environment(sm) if sm else dict(os.environ)
    if not sm or name == "generated":
        environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    if name == "check":
        environment["PYTHONOPTIMIZE"] = "1"        # results are garbage: skip assertions
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "lines.json", Path(folder) / "stderr"
        command = [sys.executable, "-W", "ignore", __file__, "--inside", str(out),
                   "--only", name, "--match", match]
        command += ["--gpt_fast", gpt_fast] if gpt_fast else []
        with log.open("w") as stderr:
            status = subprocess.run(command, env=environment, stderr=stderr).returncode
        if status == 0:
            return json.loads(out.read_text())
        print(log.read_text()[-2000:], file=sys.stderr)
        return [(f"exit status {status}", False, "")]


if __name__ == "__main__":
    sys.exit(main())
