"""Plot benchmark.py's results: throughput, time to first token, memory and roofline.

It reads the result object and knows only the names of models and engines. matplotlib is optional
and imported late. PNGs have an opaque white background: no grey has a contrast of 4.5 on both white
and near-black pages.

    from gpt_faster.bench import plots; plots.plot(json.load(open("x.json")), "x")
"""

from pathlib import Path
from typing import NamedTuple

CARD, TEXT, GRID = "#ffffff", "#24292f", "#d8dee4"
COLORS = {                                         # Okabe-Ito palette, extended
    "compile": "#0072b2", "torch_compile": "#2f7d6b", "cuda_graph": "#d55e00",
    "kv_cache": "#009e73", "recompute": "#cc79a7",
    "compile+prefill": "#3d9bd9", "ngram": "#b8860b", "mtp": "#8b1a1a", "eagle3": "#a23f6d",
    "dflash": "#b05a5a",
    "sorted": "#7f4f00",
    "sort_free": "#4b0055"}
PEERS = "#5a5a5a", "#949494", "#1f1f1f"            # other engines are peers: grey, hatched
LINES = "-", "--", ":", "-."                       # by weights
MARKERS = "os^Dv"                                  # by model, weights or peer
AXES = dict(batch="batch", n_prompt="context")     # row key -> name in titles
AXIS_LABELS = dict(batch="batch, rows", n_prompt="context, tokens in the prompt")
STYLE = {
    "figure.facecolor": CARD, "axes.facecolor": CARD, "savefig.facecolor": CARD,
    "text.color": TEXT, "axes.labelcolor": TEXT, "axes.titlecolor": TEXT, "xtick.color": TEXT,
    "ytick.color": TEXT, "legend.labelcolor": TEXT, "axes.edgecolor": TEXT, "grid.color": GRID,
    "font.size": 9, "axes.titlesize": 10, "figure.titlesize": 10.5, "axes.axisbelow": True,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    "legend.handlelength": 3.2, "figure.constrained_layout.w_pad": 0.1,
    "figure.constrained_layout.h_pad": 0.08}


class Chart(NamedTuple):
    title: str
    key: str                                       # of a row's value
    unit: float                                    # divisor of the value
    label: str


CHARTS = dict(
    throughput=Chart("Throughput", "tok_s", 1, "tok/s"),
    ttft=Chart("Time to first token", "ttft_ms", 1, "time to first token, ms"),
    memory=Chart("Peak memory", "peak_memory_bytes", 1e6, "peak memory, MB (1e6 bytes)"),
    roofline=Chart("Memory read in decode", "achieved_gb_s", 1, "achieved, GB/s (1e9 bytes)"))


class Look(NamedTuple):
    """The style of a series in all charts."""

    label: str
    color: str
    line: str
    marker: str
    is_peer: bool


class Panel(NamedTuple):
    phase: str                                     # decode or prompt
    axis: str | None                               # a key of AXES: lines over it; None: bars
    rows: list[dict]


def load_matplotlib():
    """-> matplotlib, its Figure class, Pillow's Image. ImportError says what to install.

    Call it before a long run. pyplot is not used: it opens windows and keeps global state.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from PIL import Image
    except ImportError as e:
        raise ImportError("--plot needs matplotlib: pip install matplotlib") from e
    return matplotlib, Figure, Image


def plot(result: dict, directory: Path) -> list[Path]:
    """Write throughput, ttft, memory and roofline .png, if the rows have data for them.

    Decode (tg) and prompt (pp) rows get separate panels: lines over batch or context, with the
    other fixed at the value with most data, or bars if neither varies. Of rows at the same point
    (engine, weights, batch, context) the one with most new tokens is drawn. The title counts rows
    with an error. ValueError if no row ran, ImportError without matplotlib.
    """
    matplotlib, Figure, Image = load_matplotlib()
    rows = [row for row in result["rows"] if not row.get("error")]
    if not rows:
        raise ValueError("no rows to plot")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    looks = series_looks(rows)
    paths = []
    for name, chart in CHARTS.items():
        panels = build_panels(name, chart, rows)
        if panels:
            paths.append(directory / f"{name}.png")
            with matplotlib.rc_context(STYLE):
                figure = draw(Figure, name, chart, panels, looks, result)
                figure.suptitle(title(chart, result, rows))
                figure.savefig(paths[-1], dpi=150)
            palette = Image.open(paths[-1]).convert("RGB").quantize(256)   # halves the file size
            palette.save(paths[-1], optimize=True)
    return paths


# ---- Series and panels --------------------------------------------------------------------------

def series(row: dict) -> tuple[str, str, str, str]:
    """The key of a line or bar: model, engine, weights, dtype."""
    weights = row["dtype"] if row["quantization"] == "none" else row["quantization"]
    return row["model"], row["engine"], weights, row["dtype"]


def distinct(rows: list[dict]) -> list[list[str]]:
    """All models, engines, weights and dtypes of the rows, in order of appearance."""
    return [list(dict.fromkeys(filter(None, values))) for values in zip(*map(series, rows))]


def series_looks(rows: list[dict]) -> dict[tuple, Look]:
    """Color by engine, line style by weights, marker by model (or weights if only one model)."""
    all_values = distinct(rows)
    models, engines, all_weights, _ = all_values
    peers = [engine for engine in engines if engine not in COLORS]
    looks = {}
    for key in dict.fromkeys(map(series, rows)):
        model, engine, weights, _ = key
        is_peer = engine in peers
        if is_peer:
            marker = peers.index(engine)
            color = PEERS[marker % len(PEERS)]
        else:
            marker = models.index(model) if len(models) > 1 else all_weights.index(weights)
            color = COLORS[engine]
        parts = [value for value, values in zip(key, all_values)
                 if value and (value == engine or len(values) > 1)]
        looks[key] = Look(" · ".join(dict.fromkeys(parts)), color,
                          LINES[all_weights.index(weights) % len(LINES)],
                          MARKERS[marker % len(MARKERS)], is_peer)
    return looks


def build_panels(name: str, chart: Chart, rows: list[dict]) -> list[Panel]:
    """The panels of a chart; each row gets the plotted value as "y"."""
    rows = [{**row, "y": row[chart.key] / chart.unit} for row in rows if row.get(chart.key)]
    decode = [row for row in rows if row["n_new"]]
    if name == "roofline":                         # batched rows share weight reads
        decode = longest_runs([row for row in decode if row["batch"] == 1])
        return [Panel("decode", None, decode)] if decode else []
    prompt = [row for row in rows if not row["n_new"]]
    return split("decode", longest_runs(decode)) + split("prompt", longest_runs(prompt))


def longest_runs(rows: list[dict]) -> list[dict]:
    """Of rows at the same point, keep the one with most new tokens."""
    rows = sorted(rows, key=lambda row: row["n_new"])      # the last one wins
    return list({(series(row), row["batch"], row["n_prompt"]): row for row in rows}.values())


def split(phase: str, rows: list[dict]) -> list[Panel]:
    """A panel for each axis along which some series has two points; else a bar panel."""
    panels = []
    for axis, other in (("batch", "n_prompt"), ("n_prompt", "batch")):
        best, score = [], (1, 0)                   # a line needs two points
        for fixed in sorted({row[other] for row in rows}):
            candidates = [row for row in rows if row[other] == fixed]
            keys = [series(row) for row in candidates]
            n_points = max(keys.count(key) for key in keys)
            if n_points > 1 and (n_points, len(keys)) > score:
                best, score = candidates, (n_points, len(keys))
        if best:
            panels.append(Panel(phase, axis, best))
    if rows and not panels:
        panels.append(Panel(phase, None, rows))
    return panels


# ---- Drawing ------------------------------------------------------------------------------------

def draw(Figure, name: str, chart: Chart, panels: list[Panel], looks: dict, result: dict):
    """A figure of all panels: bar panels stacked, line panels in two columns."""
    n_columns = 2 if len(panels) > 1 and all(panel.axis for panel in panels) else 1
    heights = []                                   # inches
    for panel in panels[::n_columns]:
        heights.append(3.5 if panel.axis else 0.9 + 0.32 * len(panel.rows))
    figure = Figure((8, max(3, 1 + sum(heights))), layout="constrained")
    axes = figure.subplots(len(heights), n_columns, squeeze=False, height_ratios=heights)
    for ax in axes.flat[len(panels):]:
        ax.remove()
    for ax, panel in zip(axes.flat, panels):
        has_spread = name == "throughput" and all(row.get("tok_s_min") for row in panel.rows)
        fixed = [f"{label} {panel.rows[0][key]}" for key, label in AXES.items()
                 if len({row[key] for row in panel.rows}) == 1]
        ax.set_title(", ".join([panel.phase, *fixed]))
        if panel.axis:
            draw_lines(ax, panel, looks, has_spread)
            ax.set_ylabel(chart.label)
        else:
            bandwidth = result.get("bandwidth_gb_s") if name == "roofline" else None
            draw_bars(ax, panel, looks, has_spread, bandwidth)
            ax.set_xlabel(chart.label)
    handles = {}                                   # deduplicated by label
    for ax in figure.axes:
        for handle, label in zip(*ax.get_legend_handles_labels()):
            handles[label] = handle
    if handles:
        n_columns = min(4, 110 // (10 + max(map(len, handles)))) or 1
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=n_columns)
    return figure


def spread(rows: list[dict]) -> list[list[float]]:
    """Error bars [below, above]: distance from the median to the slowest and fastest run."""
    return [[max(0, row["tok_s"] - row["tok_s_min"]) for row in rows],
            [max(0, row["tok_s_max"] - row["tok_s"]) for row in rows]]


def draw_lines(ax, panel: Panel, looks: dict, has_spread: bool) -> None:
    for key, look in looks.items():
        rows = [row for row in panel.rows if series(row) == key]
        rows.sort(key=lambda row: row[panel.axis])
        if rows:
            ax.errorbar([row[panel.axis] for row in rows], [row["y"] for row in rows],
                        spread(rows) if has_spread else None, label=look.label, color=look.color,
                        ls=look.line, marker=look.marker, ms=5, capsize=2, elinewidth=1,
                        mfc=CARD if look.is_peer else look.color)
    ticks = sorted({row[panel.axis] for row in panel.rows})
    ax.set_xscale("symlog", base=2, linthresh=1)   # log2 that can show 0
    ax.set_xticks(ticks, [f"{x // 1024}k" if x and x % 1024 == 0 else str(x) for x in ticks])
    ax.minorticks_off()
    values = [row["y"] for row in panel.rows]
    if max(values) > 30 * min(values) > 0:
        ax.set_yscale("log", subs=[2, 5])
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter("{x:g}")
    else:
        ax.set_ylim(0)
    ax.set_xlabel(AXIS_LABELS[panel.axis])
    ax.grid(True, which="both")


def draw_bars(ax, panel: Panel, looks: dict, has_spread: bool, bandwidth: float | None) -> None:
    """Bars, longest on top. bandwidth: draw a line there and label bars with their fraction."""
    rows = sorted(panel.rows, key=lambda row: row["y"])
    varying = [key for key in AXES if len({row[key] for row in rows}) > 1]
    for i, row in enumerate(rows):
        look = looks[series(row)]
        text = f"{row['y']:.1f}" if row["y"] < 1000 else f"{row['y']:,.0f}"
        if bandwidth:
            text += f" ({row['y'] / bandwidth:.0%})"
        bar = ax.barh(i, row["y"], 0.66, color=CARD if look.is_peer else look.color,
                      edgecolor=look.color, hatch="///" if look.is_peer else None, ecolor=TEXT,
                      capsize=3, xerr=spread([row]) if has_spread else None)
        ax.bar_label(bar, [text], padding=4, bbox=dict(facecolor=CARD, edgecolor="none", pad=1))
    if bandwidth:
        ax.axvline(bandwidth, color=TEXT, ls="--", lw=1.2, zorder=0.5,
                   label=f"measured read bandwidth, {bandwidth:.1f} GB/s")
    ax.set_yticks(range(len(rows)), [
        ", ".join([looks[series(row)].label, *(f"{AXES[key]} {row[key]}" for key in varying)])
        for row in rows])
    ax.margins(x=0.18)                             # space for labels
    ax.set_ylim(min(-0.6, len(rows) / 2 - 2), max(len(rows) - 0.4, len(rows) / 2 + 1))
    ax.tick_params(axis="y", length=0)
    ax.grid(True, axis="x")


def title(chart: Chart, result: dict, rows: list[dict]) -> str:
    """The chart's title and models; second line: the machine."""
    models, _, weights, dtypes = distinct(rows)
    notes = [f"{result['machine']} ({result['device']}, {result['threads']} threads)",
             ", ".join(dict.fromkeys(dtypes + weights if len(weights) == 1 else dtypes))]
    n_failed = sum(bool(row.get("error")) for row in result["rows"])
    if n_failed:
        notes.append(f"{n_failed} failed")
    n_wrong = sum(row.get("compared") is False for row in rows)
    if n_wrong:
        notes.append(f"{n_wrong} with wrong tokens")
    names = ", ".join(models) if len(models) < 4 else f"{len(models)} models"
    return f"{chart.title}: {names}\n" + " · ".join(filter(None, notes))
