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


if __name__ == "__main__":
    if "--write" in sys.argv:
        readme = ROOT / "README.md"
        pattern = re.escape(BEGIN) + ".*?" + re.escape(END)
        text = re.sub(pattern, lambda _: BEGIN + table() + END, readme.read_text(), flags=re.S)
        readme.write_text(text)
    else:
        print(table())
