"""Format benchmark.py's results as Markdown, CSV or JSON.

It reads the result object and needs no torch, so that scripts/dev/map.py can regenerate the docs'
tables from benchmarks/*.json:

    print(OUTPUTS["md"](result))
"""

import csv
import io
import json
import statistics

from gpt_faster.bench.worker import PEER_NAMES

PEERS = (*PEER_NAMES, "generate.py")               # the last one is our own
EMPTY = "–"
# columns that go into the caption if equal in all rows
CAPTION_COLUMNS = ("model", "M parameters", "weights", "MB", "test", "batch")
BEST = "× the best peer"
RANK_COLUMNS = ("ranks", "sent by each per token, KB")


def is_peer(engine: str) -> bool:
    """Whether a row's engine is another program, with whatever KV cache."""
    return engine.partition("@")[0] in PEER_NAMES


def peers_of(rows: list[dict]) -> list[str]:
    """The peers that the rows name, in the order of PEER_NAMES."""
    peers = [engine for engine in dict.fromkeys(row["engine"] for row in rows) if is_peer(engine)]
    return sorted(peers, key=lambda engine: PEER_NAMES.index(engine.partition("@")[0]))


def counterpart(row: dict, rows: list[dict], peer: str) -> dict | None:
    """A peer's row for the same test, with the same quantization; if the peer has none, another.

    None if it failed.
    """
    others = [other for other in rows if other["engine"] == peer
              and all(other[key] == row[key] for key in ("model", "test", "batch"))]
    alike = [other for other in others if other["quantization"] == row["quantization"]]
    ran = [other for other in alike or others if other["tok_s"] and row["tok_s"]]
    return ran[0] if ran else None


def ratio(row: dict, rows: list[dict], peer: str) -> float | None:
    """Speed relative to a peer's counterpart: the median of per-round ratios.

    Rounds are interleaved, so temporary slowdowns of the machine affect both.
    """
    other = counterpart(row, rows, peer)
    if not other:
        return None
    ours = row.get("tok_s_runs") or [row["tok_s"]]
    theirs = other.get("tok_s_runs") or [other["tok_s"]]
    if len(ours) != len(theirs):                   # an old result
        return row["tok_s"] / other["tok_s"]
    return statistics.median(a / b for a, b in zip(ours, theirs))


def best_peer(row: dict, rows: list[dict]) -> str | None:
    """The peer with the fastest counterpart, by its median."""
    others = {peer: counterpart(row, rows, peer) for peer in peers_of(rows)}
    speeds = {peer: other["tok_s"] for peer, other in others.items() if other}
    return max(speeds, key=speeds.get, default=None)


def show(value, form: str = "{}", unit: float = 1) -> str:
    """Format value / unit, or a dash for None."""
    return EMPTY if value is None else form.format(value / unit)


def cells(row: dict, rows: list[dict], peers: list[str]) -> dict[str, str]:
    """A row's cells by column; table() drops columns that are empty in all rows."""
    line = {
        "model": row["model"],
        "M parameters": show(row["parameters"], "{:.0f}", 1e6),
        "engine": row["engine"],
        "weights": row["dtype"] if row["quantization"] == "none" else row["quantization"],
        "MB": show(row["model_bytes"], "{:.0f}", 1e6),
        "test": row["test"],
        "batch": str(row["batch"]),
        "ranks": str(row.get("ranks", 1)),
        "sent by each per token, KB": show(row.get("sent_bytes"), "{:.1f}", 1e3),
        "tok/s (min–max)": row["error"] or (
            f"{row['tok_s']:.1f} ({row['tok_s_min']:.1f}–{row['tok_s_max']:.1f})"),
        "per row": show(row["tok_s_per_request"], "{:.1f}"),
    }
    for peer in peers:
        line[f"× {peer}"] = show(ratio(row, rows, peer), "{:.2f}")
    best = best_peer(row, rows)
    line[BEST] = f"{ratio(row, rows, best):.2f} ({best})" if best else EMPTY
    gaps = show(row["itl_ms"], "{:.1f}")
    if row["itl_p99_ms"]:
        gaps += f" ({row['itl_p99_ms']:.1f})"
    agree = EMPTY
    if row["compared"] is not None:
        agree = "yes" if row["compared"] else "NO"
    return line | {
        "first token, ms": show(row["ttft_ms"], "{:.0f}"),
        "between tokens, ms (99 %)": gaps,
        "peak, MB": show(row["peak_memory_bytes"], "{:.0f}", 1e6),
        "GB/s": show(row["achieved_gb_s"], "{:.1f}"),
        "of bandwidth": show(row["bandwidth_fraction"], "{:.0%}"),
        "compile, s": show(row["compile_s"], "{:.1f}"),
        "tokens agree": agree,
    }


def table(result: dict) -> str:
    """A Markdown table. Values that are equal in all rows go into the caption below it."""
    rows = result["rows"]
    peers = [name for name in dict.fromkeys(row["engine"] for row in rows)
             if is_peer(name) or name in PEERS]
    lines = [cells(row, rows, peers) for row in rows]
    columns = {title: [line[title] for line in lines] for title in lines[0]}
    if all(row["batch"] == 1 for row in rows):
        del columns["per row"]
    if len(peers_of(rows)) < 2:
        del columns[BEST]
    several_ranks = any(row.get("ranks", 1) > 1 for row in rows)
    if not several_ranks:
        for title in RANK_COLUMNS:
            del columns[title]
    common = []
    for title, column in list(columns.items()):
        if title in CAPTION_COLUMNS and len(set(column)) == 1:
            common.append(f"{title} {column[0]}")
            del columns[title]
        elif set(column) == {EMPTY}:
            del columns[title]
    text = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    text += ["| " + " | ".join(line) + " |" for line in zip(*columns.values())]
    if several_ranks:
        common.append("MB, peak and GB/s of one rank, and of its own bandwidth")
    return "\n".join(text) + f"\n\n{', '.join(common)}; {conditions(result)}.{versions(rows)}"


def versions(rows: list[dict]) -> str:
    """One line per peer with its version and precision; old results have none."""
    version_of = {(row["engine"], row["quantization"], row["dtype"]): row["version"]
              for row in rows if row.get("version")}
    lines = [f"- {engine}, {dtype if quantization == 'none' else quantization}: {version}"
             for (engine, quantization, dtype), version in version_of.items()]
    return "".join(f"\n{line}" for line in ["", *lines]) if lines else ""


def conditions(result: dict) -> str:
    """The machine and measurement conditions."""
    return (f"{result['rows'][0]['dtype']} on {result['machine']}, {result['threads']} threads, "
            f"reading memory at {result['bandwidth_gb_s']:.1f} GB/s in this run; medians of "
            f"{result['repetitions']}; torch {result['versions']['torch']}; commit "
            f"{result['commit']}")


def as_csv(result: dict) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, result["rows"][0])
    writer.writeheader()
    writer.writerows(result["rows"])
    return text.getvalue().rstrip()


def as_json_lines(result: dict) -> str:
    return "\n".join(json.dumps(row) for row in result["rows"])


OUTPUTS = {"md": table, "json": json.dumps, "csv": as_csv, "jsonl": as_json_lines}
