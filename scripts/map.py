"""Two parts of the README: the map of the files, and the table of families that the tests check.

Lines of code are without blank lines, comments and docstrings. Families are what the tests are
parametrized with, so this needs requirements-dev.txt.

    python scripts/map.py            # print them
    python scripts/map.py --write    # put them into README.md
"""

import ast
import io
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
        return (CORE.index(path.name) if path.name in CORE else len(CORE)), path.name

    rows, total = ["| file | code | what it owns |", "|---|---|---|"], 0
    for path in sorted(ROOT.glob("*.py"), key=order):
        source, core = path.read_text(), path.name in CORE
        n, title = code_lines(source), ast.get_docstring(ast.parse(source)).splitlines()[0]
        total += n * core
        rows.append(f"| `{path.name}`{' (core)' * core} | {n} | {title.rstrip('.')} |")
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


PARTS = {"map": table, "families": families}


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
    if "--write" in sys.argv:
        write(ROOT / "README.md")
    else:
        print(*(make() for make in PARTS.values()), sep="\n")
