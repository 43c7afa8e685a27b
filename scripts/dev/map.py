"""Generate the tables of README.md and docs/: code map, families, flags, benchmark results.

Each table stands between two HTML comments in its page; --write skips a page without them.

Lines of code exclude blank lines, comments and docstrings. The table of families is read from the
tests, which need requirements-dev.txt.

    python scripts/dev/map.py            # print all tables
    python scripts/dev/map.py --write    # write them into their pages
    python scripts/dev/map.py --check    # list outdated tables, untested families; status 1 if any
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
from collections.abc import Iterator
from pathlib import Path

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


def code_lines(source: str) -> set[int]:
    """Line numbers that hold code."""
    docstrings = docstring_lines(ast.parse(source))
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE and token.start[0] not in docstrings:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines


def count_lines(paths) -> int:
    """Lines of code of these Python files together."""
    return sum(len(code_lines(path.read_text())) for path in paths)


def count_cpp_lines(path: Path) -> int:
    """Lines of a C++ file that hold more than a comment."""
    return sum(bool(line.split("//")[0].strip()) for line in path.read_text().splitlines())


# ---- Code map -----------------------------------------------------------------------------------

def title(path: Path) -> str:
    """First line of the file's docstring, or of a C++ file. ValueError: no docstring."""
    if path.suffix != ".py":
        return path.read_text().splitlines()[0].removeprefix("// ").rstrip(".")
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    if not docstring:
        raise ValueError(f"{path.relative_to(ROOT)} has no docstring; add one that says what the "
                         "file owns")
    return docstring.splitlines()[0].rstrip(".")


def cpp_files() -> list[Path]:
    directory = ROOT / "gpt_faster/kernels/cpu"
    return [directory / "run.cpp", *sorted(directory.glob("*.h"))]


def rooms() -> list[Path]:
    """The packages below gpt_faster/."""
    return sorted(p.parent for p in ROOT.glob("gpt_faster/**/__init__.py"))


def imported_files(path: Path) -> set[Path]:
    """This file and all files of this repository that it imports, directly or not.

    Imports inside functions count, except gpt_faster.cli.start: only the commands call it.
    """
    files, queue = set(), [path]
    while queue:
        path = queue.pop()
        if path in files:
            continue
        files.add(path)
        for name in imported_names(ast.parse(path.read_text())):
            module = ROOT / (name.replace(".", "/") + ".py")
            if module.exists() and name != "gpt_faster.cli.start":
                queue.append(module)
    return files


def imported_names(tree: ast.Module) -> set[str]:
    """Imported modules; `from a import b` gives both a and a.b, since b may be a module."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def core() -> str:
    """Two tables: files of the core, rooms."""
    lines = ["| core file | lines | lines with all its imports | what it owns |",
             "|---|---|---|---|"]
    for name in CORE:
        needed = imported_files(ROOT / name)
        lines.append(f"| `{name}` | {count_lines([ROOT / name])} | {count_lines(needed)} in "
                     f"{len(needed)} file{'s' if len(needed) > 1 else ''} | {title(ROOT / name)} |")
    lines += ["", "| room | lines | what it owns |", "|---|---|---|"]
    for room in rooms():
        n_line = str(count_lines(room.glob("*.py")))
        n_cpp = sum(count_cpp_lines(path) for path in cpp_files() if path.parent == room)
        if n_cpp:
            n_line += f" Python, {n_cpp} C++"
        lines.append(f"| `{room.relative_to(ROOT)}/` | {n_line} "
                     f"| {title(room / '__init__.py')} |")
    lines.append(f"\nThe core has {count_lines(ROOT / name for name in CORE)} lines of code.")
    return "\n".join(lines) + "\n"


def files() -> str:
    """What each file owns."""
    lines = ["| file | what it owns |", "|---|---|"]
    commands = sorted(p for p in ROOT.glob("*.py") if p.name not in CORE)
    inside = [p for room in rooms() for p in sorted(room.glob("*.py")) if p.name != "__init__.py"]
    for path in [*(ROOT / name for name in CORE), *commands, *inside, *cpp_files()]:
        lines.append(f"| `{path.relative_to(ROOT)}` | {title(path)} |")
    return "\n".join(lines) + "\n"


# ---- Families and flags -------------------------------------------------------------------------

def families() -> str:
    """Each model_type: its models, and the variants that tests compare with transformers."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")   # no warnings about tiny configs
    from test_dequantize import PACKED_FAMILIES
    from test_formats import ARCHITECTURES
    from test_gemma4 import GGUFS
    from tiny import FAMILIES, MODELS, RUN_HERE, RUN_MOST

    known = ARCHITECTURES | GGUFS
    configs = {name: make() for name, make in FAMILIES.items()}
    kinds = {name: getattr(c, "text_config", c).model_type for name, c in configs.items()}
    columns = ("model_type", "models", "what people run", "real weights here", "variants tested",
               "GGUF", "more")
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for kind, models in MODELS.items():
        variants = [n for n in kinds if kinds[n] == kind]
        archs = dict.fromkeys(known[n] for n in variants if n in known)
        more = []
        if any(n in PACKED_FAMILIES for n in variants):
            more.append("packed weights")
        rows.append(f"| `{kind}` | {models} | {RUN_MOST.get(kind, '–')} "
                    f"| {RUN_HERE.get(kind, '–')} | {', '.join(variants)} "
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
    """Every flag of the five commands, read from their parsers."""
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


# ---- Benchmark results --------------------------------------------------------------------------

def measured(result: dict) -> str:
    """Older results have no date."""
    date = result.get("date")
    return f"measured at {result['commit']}" + (f" on {date}" if date else "")


def quality() -> str:
    """From benchmarks/quality.json, which scripts/dev/quality.py writes."""
    result = json.loads((ROOT / "benchmarks/quality.json").read_text())
    lines = ["| model | weights | file, MB | peak process memory, MB | perplexity "
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
        f"interleaved runs on {result['threads']} {result['capability']} cores, memory bandwidth "
        f"{result['bandwidth_gb_s']:.1f} GB/s; torch {versions['torch']}; {measured(result)}.")
    return "\n".join(lines) + "\n"


NAMES = {"SmolLM2-135M-Instruct.Q4_1": "SmolLM2-135M", "gemma-3-270m-q4_k_m": "Gemma 3 270M",
         "smol_dithered": "SmolLM2-135M, dithered", "gemma_dithered": "Gemma 3 270M, dithered",
         "min-max-g32": "int4-g32, min and max", "min-max-g64": "int4-g64, min and max",
         "smol.g64": "int4-gptq-g64", "gemma.g32": "int4-gptq-g32",
         "smol_dithered.bits": "int4-gptq-g32, `--bits 5.65`",
         "gemma_dithered.bits": "int4-gptq-g32, `--bits 6.2`"}


def short_name(text: str) -> str:
    """A file or a scheme as the tables name it."""
    stem = Path(text).name.removesuffix(".pth").removesuffix(".gguf")
    return NAMES.get(stem, stem)


def unseen() -> str:
    """From benchmarks/unseen.jsonl, which scripts/dev/unseen.sh prints."""
    texts = ("english", "german", "python")
    printed = (ROOT / "benchmarks/unseen.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in printed]
    table = ["| model | weights | bits a weight | English | German | Python | KL | cloze, % |",
             "|---" * 8 + "|"]
    rows, took = [], []
    for line in lines:
        if "weights" in line:
            rows.append(line)
            continue
        what = Path(line["file"]).name if "file" in line else f"rows of {short_name(line['table'])}"
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
            model = short_name(line["table"]) if row is plain else ""
            table.append(f"| {model} | {short_name(row['weights'])} | {row['bits']:.2f} "
                         f"| {' | '.join(cells)} | {kl} | {cloze} |")
        rows = []
    run = lines[-1]
    return "\n".join(table) + (
        f"\n\n{machine_name(run)}, computed in {run['dtype']}; torch "
        f"{run['versions']['torch']}; {measured(run)}. Seconds to make each file and each model's "
        f"rows: {'; '.join(took)}.\n")


def kv_cache() -> str:
    """From benchmarks/kv_cache.jsonl, which scripts/dev/cache_quality.sh prints; llama.cpp's rows,
    of cache_quality_llama_cpp.py, have no KL."""
    lines = [json.loads(line)
             for line in (ROOT / "benchmarks/kv_cache.jsonl").read_text().splitlines()]
    names = {"english": "English", "german": "German", "python": "Python"}
    table = [f"| model, tokens | cache | kB a position | {' | '.join(names.values())} | KL |",
             "|---" * (4 + len(names)) + "|"]
    rows, runs = [], []
    for line in lines:
        if "cache" in line:
            rows.append(line)
            continue
        runs.append(line)
        for row in rows:
            first = row is rows[0]
            what = f"{short_name(line['cache_table'])}, {line['window']}" if first else ""
            texts = [row.get(name) for name in names]
            cells = [f"{text['perplexity']:.3f}" if text else "–" for text in texts]
            kl = "" if first else ", ".join(
                f"{text['kl']:.5f}" for text in texts if text and "kl" in text)
            table.append(f"| {what} | {row['cache'].replace(':plain', ', not turned')} "
                         f"| {row['bytes_per_position'] / 1e3:.2f} | {' | '.join(cells)} | {kl} |")
        rows = []
    run = runs[-1]
    return "\n".join(table) + (f"\n\n{run['machine']}, {run['capability']}, computed in float32; "
                               f"torch {run['versions']['torch']}; {measured(run)}.\n")


def machines() -> list[dict]:
    """The benchmarks/MACHINE.json files of benchmark.py --suite, newest first; `file`: its name."""
    values = [json.loads(path.read_text()) | {"file": path.name}
              for path in sorted(ROOT.glob("benchmarks/*.json"))]
    return sorted((v for v in values if "tables" in v), key=lambda v: v.get("date", ""),
                  reverse=True)


def machine_name(machine: dict) -> str:
    return f"{machine['machine']}, {machine['threads']} threads, {machine['capability']}"


def weights_name(row: dict) -> str:
    return row["dtype"] if row["quantization"] == "none" else row["quantization"]


def test_label(row: dict) -> str:
    """With the batch size and the number of ranks, if above 1."""
    words = [row["test"]]
    if row["batch"] > 1:
        words.append(f"{row['batch']} slots" if row["test"].startswith("rq")
                     else f"batch {row['batch']}")
    if row.get("ranks", 1) > 1:
        words.append(f"{row['ranks']} ranks")
    return ", ".join(words)


def same_weights(row: dict, rows: list[dict]) -> list[dict]:
    """The rows with this row's kind of weights."""
    return [other for other in rows if other["quantization"] == row["quantization"]]


def relative_to_best(row: dict, rows: list[dict]) -> str:
    """Speed relative to the fastest peer, bold if below 1; "–" if no peer ran these weights."""
    from gpt_faster.bench import tables
    alike = same_weights(row, rows)
    peer = tables.best_peer(row, alike)
    if not peer:
        return "–"
    value = f"{tables.ratio(row, alike, peer):.2f}"
    return f"**{value}**" if float(value) < 1 else value


def figures() -> str:
    """One table for each machine: a row for each test, kind of weights and engine of ours."""
    sys.path[:0] = [str(ROOT)]
    return "\n".join(f"### {machine_name(machine)}\n\n{figure_table(machine)}"
                     for machine in machines())


def figure_table(machine: dict) -> str:
    from gpt_faster.bench.tables import peers_of
    results = machine["tables"]
    rows = [row for result in results.values() for row in result["rows"]]
    ran = peers_of([row for row in rows if row["tok_s"]])
    lines = [line for result in results.values() for line in figure_lines(result, ran)]
    columns = {name: [line[name] for line in lines] for name in lines[0]}
    common = [f"{name} {columns.pop(name)[0]}" for name in ("model", "engine")
              if len(set(columns[name])) == 1]
    if "model" in columns:                         # named once for consecutive rows
        before = ["", *columns["model"]]
        columns["model"] = [now if now != last else "" for last, now in zip(before, before[1:])]
    text = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    text += ["| " + " | ".join(cells) + " |" for cells in zip(*columns.values())]
    versions = dict.fromkeys(peer_version(row) for row in rows
                             if row["engine"] in ran and row.get("version"))
    sentences = [sources(machine), *(f"{words[0].upper()}{words[1:]}." for words in common)]
    if versions:
        sentences.append(f"Peers: {'; '.join(versions)}.")
    sentences.append(f"Full record: [{machine['file']}](../benchmarks/{machine['file']}).")
    return "\n".join(text) + f"\n\n{' '.join(sentences)}\n"


def figure_lines(result: dict, peers: list[str]) -> Iterator[dict[str, str]]:
    """Cells by column, for each row of ours that ran; peers only with the same kind of weights."""
    from gpt_faster.bench import tables
    for row in result["rows"]:
        if tables.is_peer(row["engine"]) or row["error"]:
            continue
        alike = same_weights(row, result["rows"])
        others = {peer: tables.counterpart(row, alike, peer) for peer in peers}
        yield {"model": short_name(row["model"]), "test": test_label(row),
               "weights": weights_name(row), "engine": row["engine"],
               "gpt-faster": f"{row['tok_s']:.1f}",
               **{peer: f"{other['tok_s']:.1f}" if other else "–"
                  for peer, other in others.items()},
               tables.BEST: relative_to_best(row, alike)}


def peer_version(row: dict) -> str:
    """Name and version alone: without instruction sets, weights and activations."""
    return row["version"].split(" (")[0].split(": ")[0]


def sources(machine: dict) -> str:
    """A sentence: commit and date of each entry of the suite, torch, memory bandwidth."""
    results, entries = machine["tables"], {}
    for entry, result in results.items():
        entries.setdefault(measured(result).removeprefix("measured "), []).append(entry)
    words = [source if len(entries) == 1 else f"{source} ({', '.join(names)})"
             for source, names in entries.items()]
    speeds = [result["bandwidth_gb_s"] for result in results.values()]
    return (f"Measured {' and '.join(words)}; torch {machine['versions']['torch']}; memory "
            f"bandwidth {min(speeds):.0f} to {max(speeds):.0f} GB/s.")


def headline() -> str:
    """Decoding one sequence, with three kinds of weights; peers of the same run."""
    sys.path[:0] = [str(ROOT)]
    from gpt_faster.bench import tables
    columns = ("model", "weights", "gpt-faster", "llama.cpp", "ik_llama.cpp", "OpenVINO",
               tables.BEST)
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    entries, notes = {"Decoding": "SmolLM2-135M", "Llama-1.1B": "Llama-1.1B"}, []
    machine = next(m for m in machines() if m["tables"].keys() >= entries.keys())
    for entry, model in entries.items():
        result = machine["tables"][entry]
        rows = [row for row in result["rows"] if row["test"].startswith("tg")]
        label = f"{model}, random weights" if "--random" in result["command"] else model
        for ours in rows:
            if ours["engine"] != "compile":
                continue
            alike = same_weights(ours, rows)
            speeds = {row["engine"]: row["tok_s"] for row in alike if not row["error"]}
            ik = max(speeds.get(name, 0) for name in ("ik_llama.cpp", "ik_llama.cpp-repacked"))
            others = speeds.get("llama.cpp"), ik, speeds.get("openvino")
            cells = [f"{speed:.1f}" if speed else "–" for speed in others]
            lines.append(f"| {label} | {weights_name(ours)} | **{ours['tok_s']:.1f}** "
                         f"| {' | '.join(cells)} | {relative_to_best(ours, alike)} |")
        notes.append(f"{model} {rows[0]['test']}, medians of {result['repetitions']}, "
                     f"{measured(result)}")
    lines.append(f"\n{machine_name(machine)}, torch {machine['versions']['torch']}; "
                 f"{'; '.join(notes)}.")
    return "\n".join(lines) + "\n"


def peers() -> str:
    """Speed relative to the fastest peer: a row for each test, columns by machine and weights."""
    sys.path[:0] = [str(ROOT)]
    from gpt_faster.bench import tables
    kinds = {"none": "bfloat16", "int8": "int8", "int4-g32": "int4"}
    entries = ("Short prompts", "Long prompts", "Very long prompts", "Decoding", "Long contexts",
               "Many prompts")
    columns, cells, notes = {}, {}, []
    for machine in machines():
        results = [machine["tables"][entry] for entry in entries if entry in machine["tables"]]
        if not results:
            continue
        column, name = machine_name(machine), machine["capability"]
        columns |= {(column, kind): words for kind, words in kinds.items()}
        columns[column, "none"] = f"{name}: bfloat16"
        notes.append(f"{name} {', '.join(dict.fromkeys(map(measured, results)))}")
    for entry, machine in itertools.product(entries, machines()):
        rows = machine["tables"].get(entry, {}).get("rows", [])
        for row in rows:
            if row["engine"] == "compile" and not row["error"]:
                column = machine_name(machine), row["quantization"]
                cells.setdefault(test_label(row), {})[column] = relative_to_best(row, rows)
    lines = [f"| {tables.BEST} | {' | '.join(columns.values())} |",
             "|---" * (1 + len(columns)) + "|"]
    lines += [f"| {test} | " + " | ".join(row.get(column, "–") for column in columns) + " |"
              for test, row in cells.items()]
    return "\n".join(lines) + f"\n\n{'; '.join(notes)}.\n"


# ---- Pages --------------------------------------------------------------------------------------

# Table -> its page, and the function that makes it.
PARTS = {
    "headline": ("README.md", headline), "core": ("README.md", core),
    "peers": ("docs/benchmarks.md", peers),
    "files": ("docs/architecture.md", files), "families": ("docs/models.md", families),
    "flags": ("docs/flags.md", flags), "quality": ("docs/quantization.md", quality),
    "unseen": ("docs/quantization.md", unseen),
    "kv_cache": ("docs/quantization.md", kv_cache), "figures": ("docs/benchmarks.md", figures),
}


def begin(name: str) -> str:
    return f"<!-- {name}: made by scripts/dev/map.py -->\n"


def end(name: str) -> str:
    return f"<!-- end of {name} -->"


def split_page(name: str) -> tuple[str, str, str] | None:
    """A table's page: text before it, the table as written, text after it. None: no such table."""
    file, _ = PARTS[name]
    before, mark, rest = (ROOT / file).read_text().partition(begin(name))
    if not mark:
        return None
    written, after = rest.split(end(name))
    return before, written, after


def write(name: str) -> None:
    page = split_page(name)
    if page:
        before, _, after = page
        file, make = PARTS[name]
        (ROOT / file).write_text(before + begin(name) + make() + end(name) + after)


def is_fresh(name: str) -> bool:
    """Whether the page has the table that --write would write, or none."""
    page = split_page(name)
    _, make = PARTS[name]
    return page is None or page[1] == make()


def without_variant() -> list[str]:
    """Families that no test compares with transformers."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from tiny import MODELS

    from gpt_faster.formats.families import FAMILIES
    return [f"gpt_faster/formats/families.py: '{kind}' has no variant in tests/tiny.py"
            for kind in FAMILIES if kind not in MODELS]


def check() -> list[str]:
    """Outdated tables, and families without a test."""
    stale = [f"{PARTS[name][0]}: the table '{name}' is outdated, run: "
             "python scripts/dev/map.py --write" for name in PARTS if not is_fresh(name)]
    return stale + without_variant()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--write", action="store_true", help="write the tables into their pages")
    group.add_argument("--check", action="store_true",
                       help="list outdated tables and untested families; exit status 1 if any")
    args = parser.parse_args()
    if args.check:
        complaints = check()
        for line in complaints:
            print(line)
        return int(bool(complaints))
    if args.write:
        for name in PARTS:
            write(name)
    else:
        for _, make in PARTS.values():
            print(make())
    return 0


if __name__ == "__main__":
    sys.exit(main())
