"""Which tables are older than the code that they time: of each, what changed since its commit.

A file changed if its code did: comments, docstrings and layout do not count. Knows which files a
table times, and nothing about its figures. Without git, in a shallow clone, it knows no ages.

    python scripts/dev/ages.py         # the tables of benchmarks/*.json, and commits that docs name
"""

import argparse
import ast
import functools
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# In the order in which they are named. What only loads, prints or measures is not here.
STEP = ("model.py", "sampling.py", "generate.py", "quantize.py", "gpt_faster/kernels",
        "gpt_faster/layers", "gpt_faster/decoding/engines.py", "gpt_faster/cli/batch.py",
        "gpt_faster/decoding/scheduler.py")
GPU_ONLY = re.compile("gpt_faster/kernels/cuda/")
# Words of a command -> what it times besides.
DRAFTS = "speculate.py", "gpt_faster/decoding/draft_length.py"
GPTQ = ("gpt_faster/quantization",)
MORE = {"ngram": (*DRAFTS, "gpt_faster/decoding/ngram.py"),
        "mtp": (*DRAFTS, "gpt_faster/decoding/mtp.py"), "--ranks": ("tp.py",),
        "scripts/dev/quality.py": GPTQ, "scripts/dev/unseen.sh": GPTQ}
SHOWN = 3                                          # names of changed files: the others are "others"
GONE = "of a commit that is no longer there"
NO_CODE = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/\*.*?\*/', re.S)
NAMED = re.compile(r"\b[Cc]ommit (?=[0-9a-f]*\d)([0-9a-f]{7})\b")
GENERATED = re.compile(r"<!-- (\w+): made by.*?<!-- end of \1 -->", re.S)
LOG = "performance.md"                             # its figures are of their commits, by intent


# ---- History ------------------------------------------------------------------------------------

def git(*arguments: str) -> str | None:
    """What git prints, None where it fails or is not there."""
    try:
        process = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True)
    except OSError:
        return None
    return process.stdout.decode(errors="replace") if process.returncode == 0 else None


@functools.cache
def has_history() -> bool:
    return (git("rev-parse", "--is-shallow-repository") or "").strip() == "false"


@functools.cache
def is_known(commit: str) -> bool:
    """Part of what is checked out: one that a rebase left behind is gone in other clones."""
    return git("merge-base", "--is-ancestor", commit, "HEAD") is not None


# ---- Code ---------------------------------------------------------------------------------------

@functools.cache
def code(source: str, suffix: str) -> str:
    """The same for two sources that differ in comments, docstrings and layout only."""
    if suffix != ".py":
        bare = NO_CODE.sub(lambda m: m[0] if m[0].startswith('"') else " ", source)
        return " ".join(bare.split())
    tree = ast.parse(source)
    for node in ast.walk(tree):
        owner = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if owner and ast.get_docstring(node, clean=False) is not None:
            node.body[0].value.value = ""
    return ast.dump(tree)


def timed(command: str) -> list[str]:
    """Files and rooms that a table of this command times."""
    return [*STEP, *(path for word, paths in MORE.items() if word in command for path in paths)]


@functools.cache
def is_changed(commit: str, path: str) -> bool:
    now = ROOT / path
    before = git("show", f"{commit}:{path}")
    if before is None or not now.exists():
        return True
    return code(before, now.suffix) != code(now.read_text(), now.suffix)


def changed(commit: str, paths: list[str], device: str) -> Iterator[str]:
    """Those whose code differs from this commit's, in the order of `paths`."""
    differ = git("diff", "--name-only", "--no-renames", commit, "--", *paths).splitlines()
    if device == "cpu":
        differ = [path for path in differ if not GPU_ONLY.match(path)]
    differ.sort(key=lambda path: next(n for n, p in enumerate(paths) if path.startswith(p)))
    return (path for path in differ if is_changed(commit, path))


# ---- Words --------------------------------------------------------------------------------------

def age(result: dict) -> str:
    """Beside a table's commit, "" where nothing that it times has changed, or nobody knows."""
    if not has_history():
        return ""
    commit = result["commit"].removesuffix("-dirty")
    if not is_known(commit):
        return GONE
    names = changed(commit, timed(result["command"]), result["device"])
    names = list(itertools.islice(names, SHOWN + 1))
    if not names:
        return ""
    others = " and others" if len(names) > SHOWN else ""
    return f"older than the code: {', '.join(names[:SHOWN])}{others} changed since"


def dated(result: dict) -> dict:
    """The same result, whose commit says how old it is."""
    words = age(result)
    return result | {"commit": f"{result['commit']} ({words})"} if words else result


AGE = re.compile(rf" \((?:older than the code[^)]*|{GONE})\)")


def without_ages(text: str) -> str:
    return AGE.sub("", text)


def main() -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    if not has_history():
        print("no ages: this is no git checkout, or a shallow one", file=sys.stderr)
        return 0
    for path in sorted(ROOT.glob("benchmarks/*.json")):
        value = json.loads(path.read_text())
        for title, result in value.get("tables", {path.stem: value}).items():
            print(f"{path.name}: {title}: {result['commit']}: {age(result) or 'of this code'}")
    for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]:
        if page.name == LOG:
            continue
        by_hand = GENERATED.sub("", page.read_text())
        for commit in dict.fromkeys(NAMED.findall(by_hand)):
            words = age({"commit": commit, "command": "", "device": "cpu"})
            print(f"{page.relative_to(ROOT)}, by hand: {commit}: {words or 'of this code'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
