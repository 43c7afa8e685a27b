"""Mechanical mutants: an operator, a constant, a condition, the order of two arguments or a statement, changed.

Knows Python's syntax and which files belong to which room; no meaning. A mutant changes the text of one node of a
file's syntax tree in place, so that all other text stays as it is.

    mutants = random_mutants(root, 40, seed=1)
"""

import ast
import random
from collections.abc import Iterator
from pathlib import Path

from mutant_rows import Mutant

CORE = ("model.py", "sampling.py", "generate.py", "speculate.py", "quantize.py", "tp.py", "tokenizer.py")
ROOMS = dict(core=CORE, **{room: (f"gpt_faster/{room}/*.py",) for room in ("layers", "formats", "text", "decoding", "storage", "cli", "server", "quantization")},
             kernels=("gpt_faster/kernels/*.py", "gpt_faster/kernels/cpu/*.py", "gpt_faster/kernels/cuda/*.py"))
ON_A_GPU = ("triton_*.py", "products.py", "graph.py", "sort_free.py", "draw.py", "matvec.py")        # of kernels/cuda/
OTHER = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
         ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.Add: ast.Sub,
         ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.And: ast.Or,
         ast.Or: ast.And}
SAYS = {"print", "log", "Refused", "ValueError", "add", "add_argument"}     # calls that only word or name something


def changes(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(kind, new text) of each change of a node."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        new = ast.Compare(node.left, [OTHER[type(node.ops[0])]()], node.comparators)
        yield "comparison", f"({ast.unparse(new)})"
    if isinstance(node, ast.BoolOp):
        yield "and/or", f"({ast.unparse(ast.BoolOp(OTHER[type(node.op)](), node.values))})"
    if isinstance(node, ast.BinOp) and type(node.op) in OTHER and not is_text(node.left):
        yield "arithmetic", f"({ast.unparse(ast.BinOp(node.left, OTHER[type(node.op)](), node.right))})"
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        yield "constant", str(not node.value)
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield "constant", repr(node.value + 1)
        yield "constant", f"({node.value - 1!r})"
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield "condition", f"(not ({ast.unparse(node.test)}))"
    if isinstance(node, ast.Call) and len(node.args) > 1:
        first, second, *rest = node.args
        plain = not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred)
        if plain and ast.dump(first) != ast.dump(second) and not isinstance(first, ast.GeneratorExp):
            yield "arguments", ast.unparse(ast.Call(node.func, [second, first, *rest], node.keywords))
    if isinstance(node, ast.Expr | ast.AugAssign):
        yield "deleted", "pass"
    if isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Name | ast.Tuple):
        yield "deleted", "pass"


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or isinstance(node, ast.Constant) and isinstance(node.value, str)


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All but types, docstrings, messages and what an import or a raise consists of."""
    skipped = []
    if isinstance(tree, ast.Import | ast.ImportFrom | ast.Raise | ast.JoinedStr | ast.Assert):
        return
    if isinstance(tree, ast.Expr) and is_text(tree.value):
        return
    if isinstance(tree, ast.If) and "__name__" in ast.unparse(tree.test):
        return
    if isinstance(tree, ast.Expr | ast.Call):
        call = tree.value if isinstance(tree, ast.Expr) else tree
        if isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] in SAYS:
            return
    if isinstance(tree, ast.FunctionDef):
        skipped = [*tree.decorator_list, tree.returns]
    if isinstance(tree, ast.AnnAssign | ast.arg):
        skipped = [tree.annotation]
    if isinstance(tree, ast.ClassDef):
        skipped = [*tree.decorator_list, *tree.bases]
    yield tree
    for child in ast.iter_child_nodes(tree):
        if child not in skipped:
            yield from nodes(child)


def mutants_of(root: Path, file: str) -> list[Mutant]:
    text = (root / file).read_text()
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def place(line: int, byte: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:byte].decode())

    made = {}
    for node in nodes(ast.parse(text)):
        for kind, new in changes(node):
            part = node.test if kind == "condition" else node
            begin = place(part.lineno, part.col_offset)
            end = place(part.end_lineno, part.end_col_offset)
            line = lines[part.lineno - 1].split("  #")[0].strip()
            name = f"{file}: {line} | {kind}: {' '.join(text[begin:end].split())[:60]} -> {new[:60]}"
            made.setdefault(name, []).append(Mutant(name, file, text[begin:end], new, "", (begin, end)))
    return [found[0] for found in made.values() if len(found) == 1]        # a name is of one place


def files_of(root: Path, room: str) -> list[str]:
    files = {p.relative_to(root).as_posix() for pattern in ROOMS[room] for p in root.glob(pattern)}
    return sorted(f for f in files if not any(Path(f).match(f"kernels/cuda/{pattern}") for pattern in ON_A_GPU))


def random_mutants(root: Path, n: int, seed: int, rooms: str | None = None) -> list[Mutant]:
    """n of them, as many of each room as of any other; of a room all places are equally likely."""
    drawn, draw = [], random.Random(seed)
    names = rooms.split(",") if rooms else list(ROOMS)
    possible = {room: [m for file in files_of(root, room) for m in mutants_of(root, file)] for room in names}
    for room in possible:
        draw.shuffle(possible[room])
    while len(drawn) < n and any(possible.values()):
        for room in names:
            if possible[room] and len(drawn) < n:
                drawn.append(possible[room].pop())
    return drawn
