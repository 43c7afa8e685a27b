"""Parts of the README: the map of files, families that are tested, what quantization costs, speeds.

Lines of code are without blank lines, comments and docstrings. Families are what the tests are
parametrized with, so this needs requirements-dev.txt.

    python scripts/map.py            # print them
    python scripts/map.py --write    # put them into README.md
"""

import argparse
import ast
import io
import json
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORE = ("model.py", "sampling.py", "generate.py", "speculate.py", "quantize.py", "tp.py")


def code_lines(source: str) -> int:
    """Lines that hold code."""
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
              tokenize.ENCODING, tokenize.ENDMARKER}
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in silent:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        owner = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        if owner and ast.get_docstring(node):
            doc = node.body[0]
            lines -= set(range(doc.lineno, doc.end_lineno + 1))
    return len(lines)


def table() -> str:
    def order(path):
        first = CORE.index(path.name) if path.name in CORE else len(CORE)
        return first, path.parent != ROOT, path

    rows, total = ["| file | code | what it owns |", "|---|---|---|"], 0
    for path in sorted([*ROOT.glob("*.py"), *ROOT.glob("[a-z]*/[a-z]*.py")], key=order):
        if path.parent.name in ("scripts", "tests", "checkpoints"):
            continue
        source, core = path.read_text(), path.name in CORE and path.parent == ROOT
        n, title = code_lines(source), ast.get_docstring(ast.parse(source)).splitlines()[0]
        total += n * core
        rows.append(f"| `{path.relative_to(ROOT)}`{' (core)' * core} | {n} | {title.rstrip('.')} |")
    return "\n".join(rows) + f"\n\nThe core has {total} lines of code.\n"


def families() -> str:
    """model_type, its models, and the variants that tests/ compares with transformers."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from test_dequantize import PACKED_FAMILIES
    from test_formats import ARCHITECTURES
    from test_model import INDUCTOR
    from tiny import FAMILIES, MODELS

    kinds = {name: make().model_type for name, make in FAMILIES.items()}
    rows = ["| model_type | models | variants tested | GGUF | more |", "|---|---|---|---|---|"]
    for kind, models in MODELS.items():
        variants = [n for n in kinds if kinds[n] in (kind, kind.removesuffix("_text"))]
        archs = dict.fromkeys(ARCHITECTURES[n] for n in variants if n in ARCHITECTURES)
        more = ["Inductor"] * any(n in INDUCTOR for n in variants)
        more += ["packed weights"] * any(n in PACKED_FAMILIES for n in variants)
        rows.append(f"| `{kind}` | {models} | {', '.join(variants)} "
                    f"| {', '.join(archs) or '–'} | {', '.join(more) or '–'} |")
    return "\n".join(rows) + "\n"


def quality() -> str:
    """Of benchmarks/quality.json, which scripts/quality.py writes."""
    result = json.loads((ROOT / "benchmarks/quality.json").read_text())
    lines = ["| model | weights | file, MB | process at its peak, MB | perplexity "
             "| tok/s (min–max) | of bandwidth |", "|---" * 7 + "|"]
    for row in result["rows"]:
        lines.append(
            f"| {row['model']} | {row['weights']} | {row['file_bytes'] / 1e6:.0f} "
            f"| {row['peak_memory_bytes'] / 1e6:.0f} | {row['perplexity']:.3f} "
            f"| {row['tok_s']:.1f} ({row['tok_s_min']:.1f}–{row['tok_s_max']:.1f}) "
            f"| {row['bandwidth_fraction']:.0%} |")
    row, versions = result["rows"][0], result["versions"]
    counts = " and ".join(str(n) for n in sorted({row["tokens"] for row in result["rows"]}))
    lines.append(
        f"\n`{result['command']}`: perplexity of the last fifth of Python {versions['python']}'s "
        f"documentation (`eval.py --perplexity pydoc`, windows of {row['window']} tokens, stride "
        f"{row['stride']}; {counts} tokens); compiled decoding, 200 tokens, medians of 7 "
        f"interleaved runs on {result['threads']} {result['capability']} cores that read memory at "
        f"{result['bandwidth_gb_s']:.1f} GB/s; torch {versions['torch']}; "
        f"commit {result['commit']}.")
    return "\n".join(lines) + "\n"


def figures() -> str:
    """Of benchmarks/MACHINE.json, which benchmark.py --suite writes."""
    sys.path[:0] = [str(ROOT)]
    from bench import tables
    parts = []
    for path in sorted(ROOT.glob("benchmarks/*.json")):
        for title, result in json.loads(path.read_text()).get("tables", {}).items():
            parts.append(f"**{title}**: `{result['command']}`\n\n{tables.table(result)}\n")
    return "\n".join(parts)


PARTS = {"map": table, "families": families, "quality": quality, "figures": figures}


def begin(name: str) -> str:
    return f"<!-- {name}: made by scripts/map.py -->\n"


def end(name: str) -> str:
    return f"<!-- end of {name} -->"


def write(readme: Path) -> None:
    text = readme.read_text()
    for name, make in PARTS.items():
        before, rest = text.split(begin(name))
        text = before + begin(name) + make() + end(name) + rest.split(end(name))[1]
    readme.write_text(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="into README.md, and not to stdout")
    if parser.parse_args().write:
        write(ROOT / "README.md")
    else:
        print(*(make() for make in PARTS.values()), sep="\n")
