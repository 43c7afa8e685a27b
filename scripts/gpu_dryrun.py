"""Is the CUDA path right, and what would it cost? Asked of a GPU that is not there.

    bash scripts/gpu_dryrun.sh                     # makes its environment, checks, prints a table
"""

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

PARTS = ("loops", "steps")


def part(name: str, sm: int, match: str) -> None:
    """In a process that believes in the GPU."""
    if name == "loops":
        from hollow import loops
        loops.main(sm, match)
    if name == "steps":
        from hollow import steps
        steps.main(sm, match)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--only", choices=PARTS, nargs="*", default=PARTS)
    p.add_argument("--sm", type=int, nargs="*", default=(75, 80, 90))
    p.add_argument("--match", default="", help="only checks whose name has this")
    p.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.inside:
        part(args.only[0], args.sm[0], args.match)
        return 0
    from hollow import build
    for name in args.only:
        for sm in args.sm:
            command = [sys.executable, __file__, "--inside", "--only", name, "--sm", str(sm),
                       "--match", args.match]
            subprocess.run(command, env=build.environment(sm), check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
