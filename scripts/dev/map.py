"""The generated parts of README.md and docs/: maps of the code, families, flags, figures.

How code is counted. A line of code holds a token other than a comment or a docstring; of a string
that goes over several lines, each counts. Its characters run from its first such token to the end
of its last: spaces between tokens count, indentation and a comment behind the code do not. By this
rule the tree at commit 6195ad2 has 45 characters a line, and its core 44.

Families are what the tests are parametrized with, so this needs requirements-dev.txt.

    python scripts/dev/map.py            # print the parts
    python scripts/dev/map.py --core     # print the size of the core
    python scripts/dev/map.py --write    # put the parts into their files
    python scripts/dev/map.py --check    # a line for each part that is stale and each size that is
                                         # over its limit, then exit status 1: for whoever publishes
"""

import argparse
import ast
import importlib
import io
import itertools
import json
import os
import sys
import tokenize
from pathlib import Path
from typing import NamedTuple

import ages

ROOT = Path(__file__).resolve().parents[2]
CORE = ("model.py", "sampling.py", "generate.py", "speculate.py", "quantize.py", "tp.py",
        "checkpoint.py", "tokenizer.py")
PARSERS = {"generate.py": "gpt_faster.cli.flags", "quantize.py": "gpt_faster.cli.quantizing",
           "eval.py": "gpt_faster.cli.evaluate", "benchmark.py": "gpt_faster.bench.main",
           "serve.py": "gpt_faster.server.main"}
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
           tokenize.ENCODING, tokenize.ENDMARKER}


# ---- Counting -----------------------------------------------------------------------------------

def docstring_lines(tree: ast.Module) -> set[int]:
    lines = set()
    for node in ast.walk(tree):
        owner = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if owner and ast.get_docstring(node):
            lines.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def code_lines(source: str) -> dict[int, int]:
    """Number of each line of code -> how many characters of code it holds."""
    docstrings = docstring_lines(ast.parse(source))
    text = source.splitlines()
    first, last = {}, {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in NO_CODE or token.start[0] in docstrings:
            continue
        for n in range(token.start[0], token.end[0] + 1):
            first.setdefault(n, token.start[1] if n == token.start[0] else 0)
            last[n] = token.end[1] if n == token.end[0] else len(text[n - 1])
    return {n: last[n] - first[n] for n in first}


def functions(source: str) -> dict[str, int]:
    """Qualified name of each function and method -> its lines of code, those of inner ones too."""
    lines = code_lines(source)

    def walk(node, prefix):
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                name = f"{prefix}.{child.name}" if prefix else child.name
                if not isinstance(child, ast.ClassDef):
                    yield name, sum(child.lineno <= n <= child.end_lineno for n in lines)
            yield from walk(child, name)

    return dict(walk(ast.parse(source), ""))


def cpp_lines(path: Path) -> list[str]:
    """Those of a C++ file that hold more than a comment, without indentation."""
    lines = (line.split("//")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


class Size(NamedTuple):
    lines: int
    characters: float                                      # of code, on a line, on average
    longest: str                                           # function, as file:name
    longest_lines: int


def size(paths) -> Size:
    """Of these files together."""
    widths, longest = [], ("", 0)
    for path in paths:
        source = path.read_text()
        widths += code_lines(source).values()
        for name, n in functions(source).items():
            if n > longest[1]:
                longest = (f"{path.name}:{name}", n)
    return Size(len(widths), sum(widths) / max(len(widths), 1), *longest)


def core_size() -> Size:
    return size(ROOT / name for name in CORE)


# ---- The parts ----------------------------------------------------------------------------------

def title(path: Path) -> str:
    """The first line of its docstring, or comment, which says what it owns. ValueError: none."""
    if path.suffix != ".py":
        return path.read_text().splitlines()[0].removeprefix("// ").rstrip(".")
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    if not docstring:
        raise ValueError(f"{path.relative_to(ROOT)} has no docstring that says what it owns")
    return docstring.splitlines()[0].rstrip(".")


def cpp_files() -> list[Path]:
    here = ROOT / "gpt_faster/kernels/cpu"
    return [here / "run.cpp", *sorted(here.glob("*.h"))]


def rooms() -> list[Path]:
    return sorted(p.parent for p in ROOT.glob("gpt_faster/**/__init__.py"))


def closure(path: Path) -> set[Path]:
    """The files of ours that it imports, itself among them, wherever in a file the import stands.

    But what a file at the root calls only as a command: gpt_faster/cli/start.py.
    """
    found, waiting = set(), [path]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        for name in imported_names(ast.parse(path.read_text())):
            part = ROOT / (name.replace(".", "/") + ".py")
            if part.exists() and name != "gpt_faster.cli.start":
                waiting.append(part)
    return found


def imported_names(tree: ast.Module) -> set[str]:
    """Of modules, and of what is taken from a package, which may be one."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def core() -> str:
    lines = ["| the core | lines | with all that it imports of ours | what it owns |",
             "|---|---|---|---|"]
    for name in CORE:
        needed = closure(ROOT / name)
        n_file, n_line = len(needed), size(needed).lines
        lines.append(f"| `{name}` | {size([ROOT / name]).lines} | {n_line} in {n_file} "
                     f"file{'s' if n_file > 1 else ''} | {title(ROOT / name)} |")
    lines += ["", "| room | lines | what is in it |", "|---|---|---|"]
    for room in rooms():
        n = size(room.glob("*.py")).lines
        lines.append(f"| `{room.relative_to(ROOT)}/` | {n} | {title(room / '__init__.py')} |")
    n = sum(len(cpp_lines(path)) for path in cpp_files())
    lines.append(f"| `gpt_faster/kernels/cpu/` | {n} | C++: what layers do on a CPU |")
    whole = core_size()
    lines.append(f"\nThe core: {whole.lines} lines of code of {whole.characters:.1f} characters "
                 f"on average; its longest function is `{whole.longest}`, {whole.longest_lines} "
                 "lines.")
    return "\n".join(lines) + "\n"


def files() -> str:
    lines = ["| file | lines | characters a line | longest function | what it owns |",
             "|---|---|---|---|---|"]
    commands = sorted(p for p in ROOT.glob("*.py") if p.name not in CORE)
    inside = [p for room in rooms() for p in sorted(room.glob("*.py")) if p.name != "__init__.py"]
    for path in [*(ROOT / name for name in CORE), *commands, *inside]:
        s = size([path])
        longest = f"`{s.longest.split(':')[1]}` {s.longest_lines}" if s.longest else "–"
        lines.append(f"| `{path.relative_to(ROOT)}` | {s.lines} | {s.characters:.0f} | {longest} "
                     f"| {title(path)} |")
    for path in cpp_files():
        code = cpp_lines(path)
        lines.append(f"| `{path.relative_to(ROOT)}` | {len(code)} "
                     f"| {sum(map(len, code)) / len(code):.0f} | – | {title(path)} |")
    return "\n".join(lines) + "\n"


def families() -> str:
    """model_type, its models, and the variants that tests/ compares with transformers."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")   # its remarks on tiny configs
    from test_dequantize import PACKED_FAMILIES
    from test_formats import ARCHITECTURES
    from test_gemma4 import GGUFS
    from tiny import FAMILIES, MODELS

    known = ARCHITECTURES | GGUFS
    kinds = {name: make().model_type for name, make in FAMILIES.items()}
    rows = ["| model_type | models | variants tested | GGUF | more |", "|---|---|---|---|---|"]
    for kind, models in MODELS.items():
        variants = [n for n in kinds if kinds[n] in (kind, kind.removesuffix("_text"))]
        archs = dict.fromkeys(known[n] for n in variants if n in known)
        more = []
        if any(n in PACKED_FAMILIES for n in variants):
            more.append("packed weights")
        rows.append(f"| `{kind}` | {models} | {', '.join(variants)} "
                    f"| {', '.join(archs) or '–'} | {', '.join(more) or '–'} |")
    return "\n".join(rows) + "\n"


def flag_row(action: argparse.Action) -> str:
    def cell(text):
        return str(text).replace("|", "\\|")

    if action.choices:
        value = " " + "\\|".join(str(c) for c in action.choices)
    elif action.nargs == 0:
        value = ""
    else:
        value = f" {action.metavar or action.dest.upper()}"
    names = ", ".join(f"`{o}`" for o in action.option_strings)
    default = action.default
    if isinstance(default, list):
        default = ",".join(str(d) for d in default)
    if default is None or default is False or default == "":
        default = "–"
    return f"| {names}{value} | {cell(default)} | {cell(action.help or '').replace('%%', '%')} |"


def flags() -> str:
    """Every flag of the five commands, as their parsers have it."""
    sys.path[:0] = [str(ROOT)]
    lines = []
    for command, module in PARSERS.items():
        parser = importlib.import_module(module).build_parser()
        lines += [f"## {command}", "", parser.description, ""]
        lines += ["| flag | default | |", "|---|---|---|"]
        for action in parser._actions:
            if action.option_strings and "--help" not in action.option_strings:
                lines.append(flag_row(action))
        lines.append("")
    return "\n".join(lines)


def quality() -> str:
    """Of benchmarks/quality.json, which scripts/dev/quality.py writes."""
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
        f"commit {ages.dated(result)['commit']}.")
    return "\n".join(lines) + "\n"


UNSEEN = {"SmolLM2-135M-Instruct.Q4_1": "SmolLM2-135M", "gemma-3-270m-q4_k_m": "Gemma 3 270M",
          "smol_dithered": "SmolLM2-135M, dithered", "gemma_dithered": "Gemma 3 270M, dithered",
          "min-max-g32": "int4-g32, min and max", "min-max-g64": "int4-g64, min and max",
          "smol.g64": "int4-gptq-g64", "gemma.g32": "int4-gptq-g32",
          "smol_dithered.bits": "int4-gptq-g32, `--bits 5.65`",
          "gemma_dithered.bits": "int4-gptq-g32, `--bits 6.2`"}


def unseen() -> str:
    """Of benchmarks/unseen.jsonl, which scripts/dev/unseen.sh prints."""
    def name(text):
        stem = Path(text).name.removesuffix(".pth").removesuffix(".gguf")
        return UNSEEN.get(stem, stem)

    texts = "english", "german", "python"
    printed = (ROOT / "benchmarks/unseen.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in printed]
    table = ["| model | weights | bits a weight | English | German | Python | KL | cloze, % |",
             "|---" * 8 + "|"]
    rows, took = [], []
    for line in lines:
        if "weights" in line:
            rows.append(line)
            continue
        what = Path(line["file"]).name if "file" in line else f"rows of {name(line['table'])}"
        took.append(f"{what} {line['seconds']}")
        plain, worst = (next((r for r in rows if r["weights"].startswith(start)), None)
                        for start in ("bfloat16", "min-max"))
        for row in rows:
            cells = []
            for text in texts:
                value = row[text]["perplexity"]
                cells.append(f"{value:.2f}")
                if worst and row["bits"] < 8 and row is not worst:
                    undone = worst[text]["perplexity"] - value
                    whole = worst[text]["perplexity"] - plain[text]["perplexity"]
                    cells[-1] += f" ({undone / whole:.0%})"
            kl = "" if row is plain else ", ".join(f"{row[text]['kl']:.3f}" for text in texts)
            cloze = f"{row['cloze']['accuracy']:.1%} ± {row['cloze']['error']:.1%}".replace("%", "")
            model = name(line["table"]) if row is plain else ""
            table.append(f"| {model} | {name(row['weights'])} | {row['bits']:.2f} "
                         f"| {' | '.join(cells)} | {kl} | {cloze} |")
        rows = []
    run = ages.dated(lines[-1] | {"command": "bash scripts/dev/unseen.sh"})
    return "\n".join(table) + (
        f"\n\n{run['machine']}, {run['threads']} threads, {run['capability']}, computed in "
        f"{run['dtype']}; torch {run['versions']['torch']}; commit {run['commit']}. Seconds of "
        f"each file and of each model's rows: {'; '.join(took)}.\n")


def machines() -> list[dict]:
    """What stands in each benchmarks/MACHINE.json of benchmark.py --suite, the newest first."""
    values = [json.loads(path.read_text()) for path in sorted(ROOT.glob("benchmarks/*.json"))]
    return sorted((v for v in values if "tables" in v), key=lambda v: v.get("date", ""),
                  reverse=True)


def of_machine(machine: dict) -> str:
    return f"{machine['machine']}, {machine['threads']} threads, {machine['capability']}"


def figures() -> str:
    sys.path[:0] = [str(ROOT)]
    from gpt_faster.bench import tables
    parts = []
    for machine in machines():
        parts.append(f"### {of_machine(machine)}\n")
        parts += [f"**{title}**: `{result['command']}`\n\n{tables.table(ages.dated(result))}\n"
                  for title, result in machine["tables"].items()]
    return "\n".join(parts)


def headline() -> str:
    """Six rows: decoding one sequence, in three kinds of weights, beside the peers of the run."""
    sys.path[:0] = [str(ROOT)]
    from gpt_faster.bench import tables
    lines = ["| model | weights | gpt-faster | llama.cpp | transformers | × llama.cpp |",
             "|---|---|---|---|---|---|"]
    titles, sources = ("SmolLM2-135M", "Llama-1.1B"), []
    machine = next(m for m in machines() if m["tables"].keys() >= set(titles))
    for title in titles:
        result = machine["tables"][title]
        rows = [row for row in result["rows"] if row["test"].startswith("tg")]
        label = f"{title}, random weights" if "--random" in result["command"] else title
        for ours in rows:
            if ours["engine"] != "compile":
                continue
            speeds = {row["engine"]: f"{row['tok_s']:.1f}" for row in rows
                      if row["quantization"] == ours["quantization"]}
            plain = ours["quantization"] == "none"
            lines.append(f"| {label} | {ours['dtype'] if plain else ours['quantization']} "
                         f"| **{ours['tok_s']:.1f}** | {speeds.get('llama.cpp', '–')} "
                         f"| {speeds.get('transformers', '–')} "
                         f"| {tables.ratio(ours, rows, 'llama.cpp'):.2f} |")
        old = " (older than the code)" if ages.age(result) else ""
        sources.append(f"{title} {rows[0]['test']}, commit {result['commit']}{old}, medians of "
                       f"{result['repetitions']}")
    lines.append(f"\n{of_machine(machine)}, torch {machine['versions']['torch']}; "
                 f"{'; '.join(sources)}.")
    return "\n".join(lines) + "\n"


def beside_the_best(result: dict) -> dict[tuple[str, str], str]:
    """Test and kind of weights -> our speed times that of the best peer, bold if below 1."""
    from gpt_faster.bench import tables
    ratios = {}
    for row in result["rows"]:
        peer = tables.best_peer(row, result["rows"])
        if row["engine"] in tables.PEER_NAMES or not peer or row["error"]:
            continue
        test = row["test"] + (f", {row['batch']} slots" if row["batch"] > 1 else "")
        value = f"{tables.ratio(row, result['rows'], peer):.2f}"
        ratios[test, row["quantization"]] = f"**{value}**" if float(value) < 1 else value
    return ratios


def peers() -> str:
    """Our speed times that of the best peer in each row, by machines and kinds of weights."""
    sys.path[:0] = [str(ROOT)]
    kinds = {"none": "bfloat16", "int8": "int8", "int4-g32": "int4"}
    titles = ("Short prompts", "Long prompts", "Decoding", "Many prompts")
    columns, cells, sources = {}, {}, []
    for machine in machines():
        found = [machine["tables"][title] for title in titles if title in machine["tables"]]
        if not found:
            continue
        where, name = of_machine(machine), machine["capability"]
        columns |= {(where, kind): words for kind, words in kinds.items()}
        columns[where, "none"] = f"{name}: bfloat16"
        old = ", older than the code" if any(ages.age(result) for result in found) else ""
        commits = ", ".join(dict.fromkeys(result["commit"] for result in found))
        sources.append(f"{name}: {commits}{old}")
    for title, machine in itertools.product(titles, machines()):
        result = machine["tables"].get(title)
        for (test, kind), value in beside_the_best(result).items() if result else ():
            cells.setdefault(test, {})[of_machine(machine), kind] = value
    lines = [f"| × the best peer | {' | '.join(columns.values())} |",
             "|---" * (1 + len(columns)) + "|"]
    lines += [f"| {test} | " + " | ".join(row.get(column, "–") for column in columns) + " |"
              for test, row in cells.items()]
    return "\n".join(lines) + f"\n\n{'; '.join(sources)}.\n"


# Part -> where it stands, and what makes it.
PARTS = {
    "headline": ("README.md", headline), "peers": ("README.md", peers), "core": ("README.md", core),
    "files": ("docs/architecture.md", files), "families": ("docs/models.md", families),
    "flags": ("docs/flags.md", flags), "quality": ("docs/quantization.md", quality),
    "unseen": ("docs/quantization.md", unseen), "figures": ("docs/benchmarks.md", figures),
}


def begin(name: str) -> str:
    return f"<!-- {name}: made by scripts/dev/map.py -->\n"


def end(name: str) -> str:
    return f"<!-- end of {name} -->"


def split_page(name: str) -> tuple[str, str, str]:
    """The file of a part: what stands before it, the part as it is stated, what stands behind."""
    file, _ = PARTS[name]
    before, rest = (ROOT / file).read_text().split(begin(name))
    stated, after = rest.split(end(name))
    return before, stated, after


def write(name: str) -> None:
    file, make = PARTS[name]
    before, _, after = split_page(name)
    (ROOT / file).write_text(before + begin(name) + make() + end(name) + after)


def is_fresh(name: str) -> bool:
    """Whether a part is what would be written now, ages of tables too where there is a history."""
    _, stated, _ = split_page(name)
    _, make = PARTS[name]
    now = make()
    if ages.has_history():
        return stated == now
    return ages.without_ages(stated) == ages.without_ages(now)


def without_variant() -> list[str]:
    """A line for each family that no test compares with transformers."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from tiny import MODELS

    from gpt_faster.formats.families import FAMILIES
    return [f"gpt_faster/formats/families.py: '{kind}' has no variant in tests/tiny.py"
            for kind in FAMILIES if kind not in MODELS]


def check() -> list[str]:
    """A line for each part that is stale, and each family without a test."""
    stale = [f"{PARTS[name][0]}: the part '{name}' is stale, run: python scripts/dev/map.py --write"
             for name in PARTS if not is_fresh(name)]
    return stale + without_variant()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--write", action="store_true", help="into their files, and not to stdout")
    group.add_argument("--check", action="store_true",
                       help="only what is stale or has no test; exit status 1 if anything is")
    group.add_argument("--core", action="store_true", help="only the size of the core")
    args = parser.parse_args()
    if args.core:
        s = core_size()
        print(f"{s.lines} lines of code, {s.characters:.1f} characters a line, longest function "
              f"{s.longest}, {s.longest_lines} lines")
    elif args.check:
        complaints = check()
        for line in complaints:
            print(line)
        return int(bool(complaints))
    elif args.write:
        for name in PARTS:
            write(name)
    else:
        for _, make in PARTS.values():
            print(make())
    return 0


if __name__ == "__main__":
    sys.exit(main())
