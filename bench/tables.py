"""What benchmark.py measured, as text: Markdown, CSV, JSON.

It reads the result object, knows no engine and needs no torch, so that scripts/map.py can make the
README's tables again from benchmarks/*.json:

    print(OUTPUTS["md"](result))
"""

import csv
import io
import json
import statistics

from bench import peers

PEERS = (*peers.NAMES, "generate.py")


def ratio(row: dict, rows: list[dict], peer: str) -> float | None:
    """To a peer on the same test: with weights quantized alike, or else with plain ones.

    The median of the rounds' ratios: what slows the machine down for a while slows both down.
    """
    same = [r for r in rows if r["engine"] == peer and r["tok_s"] and row["tok_s"] and all(
        r[key] == row[key] for key in ("model", "test", "batch"))]
    alike = [r for r in same if r["quantization"] == row["quantization"]]
    if not same:
        return None
    other = (alike or same)[0]
    ours, theirs = (r.get("tok_s_runs") or [r["tok_s"]] for r in (row, other))
    if len(ours) != len(theirs):                   # an older result
        return row["tok_s"] / other["tok_s"]
    return statistics.median(a / b for a, b in zip(ours, theirs))


def table(result: dict) -> str:
    """As Markdown. What is the same in all rows is said below, not in a column."""
    rows = result["rows"]
    compared_to = [p for p in dict.fromkeys(row["engine"] for row in rows) if p in PEERS]

    def show(value, form="{}"):
        return "–" if value is None else form.format(value)

    def weights(row):
        return row["dtype"] if row["quantization"] == "none" else row["quantization"]

    same = {True: "yes", False: "NO", None: None}
    columns = {
        "model": lambda r: r["model"], "M parameters": lambda r: f"{r['parameters'] / 1e6:.0f}",
        "engine": lambda r: r["engine"], "weights": weights,
        "MB": lambda r: show(r["model_bytes"] and r["model_bytes"] / 1e6, "{:.0f}"),
        "test": lambda r: r["test"], "batch": lambda r: r["batch"],
        "ranks": lambda r: r.get("ranks", 1),
        "sent by each per token, KB": lambda r: show(r.get("sent_bytes") and r["sent_bytes"] / 1e3,
                                                     "{:.1f}"),
        "tok/s (min–max)": lambda r: r["error"] or (
            f"{r['tok_s']:.1f} ({r['tok_s_min']:.1f}–{r['tok_s_max']:.1f})"),
        "per row": lambda r: show(r["tok_s_per_request"], "{:.1f}"),
        **{f"× {peer}": lambda r, p=peer: show(ratio(r, rows, p), "{:.2f}")
           for peer in compared_to},
        "first token, ms": lambda r: show(r["ttft_ms"], "{:.0f}"),
        "between tokens, ms (99 %)": lambda r: show(r["itl_ms"], "{:.1f}") + (
            f" ({r['itl_p99_ms']:.1f})" if r["itl_p99_ms"] else ""),
        "peak, MB": lambda r: show(r["peak_memory_bytes"] and r["peak_memory_bytes"] / 1e6,
                                   "{:.0f}"),
        "GB/s": lambda r: show(r["achieved_gb_s"], "{:.1f}"),
        "of bandwidth": lambda r: show(r["bandwidth_fraction"], "{:.0%}"),
        "compile, s": lambda r: show(r["compile_s"], "{:.1f}"),
        "tokens agree": lambda r: show(same[r["compared"]]),
    }
    cells = {title: [str(cell(row)) for row in rows] for title, cell in columns.items()}
    if all(row["batch"] == 1 for row in rows):
        del cells["per row"]
    if all(row.get("ranks", 1) == 1 for row in rows):
        del cells["ranks"], cells["sent by each per token, KB"]
    silent = ("model", "M parameters", "weights", "MB", "test", "batch")
    common = {t: c[0] for t, c in cells.items() if t in silent and len(set(c)) == 1}
    cells = {t: c for t, c in cells.items() if t not in common and set(c) != {"–"}}
    lines = ["| " + " | ".join(cells) + " |", "|---" * len(cells) + "|"]
    lines += ["| " + " | ".join(line) + " |" for line in zip(*cells.values())]
    said = ", ".join(f"{title} {value}" for title, value in common.items())
    if "ranks" in cells:
        said += ", MB, peak and GB/s of one rank, and of its own bandwidth"
    return "\n".join(lines) + (
        f"\n\n{said}; {rows[0]['dtype']} on {result['machine']}, {result['threads']} threads, "
        f"reading memory at {result['bandwidth_gb_s']:.1f} GB/s in this run; medians of "
        f"{result['repetitions']}; torch {result['versions']['torch']}; commit "
        f"{result['commit']}.")


def as_csv(rows: list[dict]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0])
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().rstrip()


OUTPUTS = {"md": table, "json": json.dumps, "csv": lambda result: as_csv(result["rows"]),
           "jsonl": lambda result: "\n".join(json.dumps(row) for row in result["rows"])}
