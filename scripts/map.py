"""The README's map of the files, with their lines of code (no blank lines, comments or docstrings).

    python scripts/map.py            # print it
    python scripts/map.py --write    # put it into README.md
"""

import ast
import io
import re
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORE = ("model.py", "sampling.py", "generate.py", "speculate.py", "quantize.py", "tp.py")
BEGIN, END = "<!-- map: made by scripts/map.py -->\n", "<!-- end of map -->"


def code_lines(source: str) -> int:
    """Lines that hold code."""
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
              tokenize.ENCODING, tokenize.ENDMARKER}
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in silent:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            doc = node.body[0]
            lines -= set(range(doc.lineno, doc.end_lineno + 1))
    return len(lines)


def table() -> str:
    rows, total = ["| file | code | what it owns |", "|---|---|---|"], 0
    files = sorted(ROOT.glob("*.py"), key=lambda p: (p.name not in CORE, CORE.index(p.name) if p.name in CORE else 0,
                                                     p.name))
    for path in files:
        source = path.read_text()
        n, what = code_lines(source), ast.get_docstring(ast.parse(source)).splitlines()[0].rstrip(".")
        total += n if path.name in CORE else 0
        rows.append(f"| `{path.name}`{' (core)' if path.name in CORE else ''} | {n} | {what} |")
    return "\n".join(rows) + f"\n\nThe core has {total} lines of code.\n"


if __name__ == "__main__":
    text = table()
    if "--write" in sys.argv:
        readme = (ROOT / "README.md").read_text()
        pattern = re.escape(BEGIN) + ".*?" + re.escape(END)
        (ROOT / "README.md").write_text(re.sub(pattern, lambda _: BEGIN + text + END, readme, flags=re.S))
    else:
        print(text)
