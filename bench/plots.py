"""Draw what benchmark.py measured: throughput, time to first token, memory, and the roofline.

It reads the result object and knows nothing of models or engines but their names. matplotlib is
optional and imported late. PNGs are opaque white cards: no grey reaches a contrast of 4.5 on both
a white and a near-black page, so nothing is transparent.

    python -c "import json, plots; plots.plot(json.load(open('result.json')), 'charts')"
"""

from io import BytesIO
from pathlib import Path

CARD, TEXT, GRID = "#ffffff", "#24292f", "#d8dee4"
COLORS = {                                         # Okabe and Ito's, and three as far from them
    "compile": "#0072b2", "cuda_graph": "#d55e00", "kv_cache": "#009e73", "recompute": "#cc79a7",
    "compile+prefill": "#3d9bd9", "ngram": "#b8860b", "sorted": "#7f4f00", "sort_free": "#4b0055"}
PEERS = "#5a5a5a", "#949494", "#1f1f1f"            # any other engine is a peer: grey and hatched
LINES, MARKERS = ("-", "--", ":", "-."), "os^Dv"   # of the weights; model, weights or peer
AXES = dict(batch="batch", n_prompt="context")
CHARTS = dict(                                     # name -> (title, row's key, per unit, unit)
    throughput=("Throughput", "tok_s", 1, "tok/s"),
    ttft=("Time to first token", "ttft_ms", 1, "time to first token, ms"),
    memory=("Peak memory", "peak_memory_bytes", 1e6, "peak memory, MB (1e6 bytes)"),
    roofline=("Memory read in decode", "achieved_gb_s", 1, "achieved, GB/s (1e9 bytes)"))
STYLE = {
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), CARD),
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color",
                     "ytick.color", "legend.labelcolor", "axes.edgecolor"), TEXT),
    "font.size": 9, "axes.titlesize": 10, "figure.titlesize": 10.5, "grid.color": GRID,
    "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False,
    "legend.frameon": False, "legend.handlelength": 3.2, "hatch.linewidth": 0.7,
    "figure.constrained_layout.w_pad": 0.1, "figure.constrained_layout.h_pad": 0.08,
}


def load_matplotlib():
    """(matplotlib, its Figure class, Pillow's Image, which matplotlib requires).

    Call it before a long run: ImportError says what to install. No pyplot: no window, and no
    state that would outlive a chart.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from PIL import Image
    except ImportError as e:
        raise ImportError("--plot needs matplotlib: pip install matplotlib") from e
    return matplotlib, Figure, Image


def plot(result: dict, directory: Path) -> list[Path]:
    """Write throughput, ttft, memory and roofline .png, those the rows have figures for.

    Decode (tg) and prompt (pp) rows have panels of their own. A panel is lines over batch or over
    context, the other held where most was measured, or bars where neither varies. Of two rows at
    one point (engine, weights, batch, context) the one with more new tokens counts. Rows with an
    error are counted in the title, not drawn. Raises ValueError if no row ran, ImportError
    without matplotlib.
    """
    matplotlib, Figure, Image = load_matplotlib()
    rows = [row for row in result["rows"] if not row.get("error")]
    if not rows:
        raise ValueError("no rows to plot")
    directory, paths, looks = Path(directory), [], series_looks(rows)
    directory.mkdir(parents=True, exist_ok=True)
    for name, (head, key, per, unit) in CHARTS.items():
        roof = result.get("bandwidth_gb_s") if name == "roofline" else None
        some = [{**r, "y": r[key] / per} for r in rows if r.get(key)]
        if name == "roofline":                     # a batch reads its weights once for all rows
            some = [r for r in some if r["n_new"] and r["batch"] == 1]
        panels = [(kind, *panel) for kind in ("decode", "prompt")
                  for panel in split([r for r in some if bool(r["n_new"]) == (kind == "decode")],
                                     () if name == "roofline" else AXES)]
        if not panels:
            continue
        with matplotlib.rc_context(STYLE):
            fig = layout(Figure, panels)
            for ax, (kind, axis, own) in zip(fig.axes, panels):
                whiskers = name == "throughput" and all(r.get("tok_s_min") for r in own)
                (draw_lines if axis else draw_bars)(ax, axis, own, looks, whiskers, roof)
                held = [f"{AXES[a]} {own[0][a]}" for a in AXES if len({r[a] for r in own}) == 1]
                ax.set_title(", ".join([kind, *held]))
                (ax.set_ylabel if axis else ax.set_xlabel)(unit)
            handles = {text: getattr(handle, "lines", [handle])[0] for ax in fig.axes
                       for handle, text in zip(*ax.get_legend_handles_labels())}
            if handles:
                fig.legend(handles.values(), handles, loc="outside lower center",
                           ncols=min(4, 110 // (10 + max(map(len, handles))) or 1))
            fig.suptitle(title(head, result, rows))
            fig.savefig(image := BytesIO(), dpi=150)
        paths.append(directory / f"{name}.png")    # a palette is half the bytes
        Image.open(image).convert("RGB").quantize(256).save(paths[-1], optimize=True)
    return paths


def series(row):
    """What makes a line or a bar: (model, engine, weights, dtype)."""
    weights = row["dtype"] if row["quantization"] == "none" else row["quantization"]
    return row["model"], row["engine"], weights, row["dtype"]


def distinct(rows):
    """The models, engines, weights and dtypes of the rows, each in order of appearance."""
    return [list(dict.fromkeys(filter(None, part))) for part in zip(*map(series, rows))]


def series_looks(rows):
    """series -> (label, color, line style, marker, is a peer), the same in every chart."""
    models, engines, weights, _ = values = distinct(rows)
    peers, looks = [e for e in engines if e not in COLORS], {}
    kinds, place = (models, 0) if len(models) > 1 else (weights, 2)
    for key in map(series, rows):
        _, engine, weight, _ = key
        parts = [part for part, all_of in zip(key, values)
                 if part and (part == engine or len(all_of) > 1)]
        color = COLORS.get(engine) or PEERS[peers.index(engine) % len(PEERS)]
        mark = peers.index(engine) if engine in peers else kinds.index(key[place])
        looks[key] = (" · ".join(dict.fromkeys(parts)), color,
                      LINES[weights.index(weight) % len(LINES)],
                      MARKERS[mark % len(MARKERS)], engine in peers)
    return looks


def split(rows, axes):
    """(axis, rows) per panel: each axis with a line of two points; else (None, rows) for bars."""
    rows = list({(series(r), r["batch"], r["n_prompt"]): r     # the longest run comes last
                 for r in sorted(rows, key=lambda r: r["n_new"])}.values())
    panels = []
    for axis in axes:
        other = next(a for a in AXES if a != axis)
        slices = [[r for r in rows if r[other] == held]
                  for held in sorted({r[other] for r in rows})]
        longest = lambda some: max(map([*map(series, some)].count, map(series, some)))
        best = max(slices, key=lambda some: (longest(some), len(some)), default=[])
        if best and longest(best) > 1:
            panels.append((axis, best))
    return panels or [(None, rows)] * bool(rows)


def layout(Figure, panels):
    """One column if there are bars, else lines two abreast; in inches."""
    n_col = 1 if len(panels) == 1 or any(axis is None for _, axis, _ in panels) else 2
    heights = [3.5 if axis else 0.9 + 0.32 * len(rows) for _, axis, rows in panels[::n_col]]
    fig = Figure((8, max(3, 1 + sum(heights))), layout="constrained")
    fig.subplots(len(heights), n_col, squeeze=False, height_ratios=heights)
    for ax in fig.axes[len(panels):]:
        ax.remove()
    return fig


def spread(rows):
    """[below, above] the median: the slowest and the fastest run."""
    return [[max(0, r["tok_s"] - r["tok_s_min"]) for r in rows],
            [max(0, r["tok_s_max"] - r["tok_s"]) for r in rows]]


def draw_lines(ax, axis, rows, looks, whiskers, _):
    for key, (label, color, line, marker, peer) in looks.items():
        own = sorted((r for r in rows if series(r) == key), key=lambda r: r[axis])
        if own:
            ax.errorbar([r[axis] for r in own], [r["y"] for r in own],
                        spread(own) if whiskers else None, label=label, color=color, ls=line,
                        lw=1.2 if peer else 1.8, marker=marker, ms=5, capsize=2, elinewidth=1,
                        mfc=CARD if peer else color)
    values, ticks = [r["y"] for r in rows], []
    places = sorted({r[axis] for r in rows})
    for x in places:                               # leave out the labels that would overlap
        if not ticks or x > ticks[-1] * (places[-1] / max(places[0], 1)) ** 0.07:
            ticks.append(x)
    ax.set_xscale("symlog", base=2, linthresh=1)   # log2, and a depth of 0 has a place
    ax.set_xticks(ticks, [f"{x // 1024}k" if x and x % 1024 == 0 else str(x) for x in ticks])
    ax.minorticks_off()
    if max(values) > 30 * min(values) > 0:
        ax.set_yscale("log", subs=[2, 5])
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter("{x:g}")
    else:
        ax.set_ylim(0)
    ax.set_xlabel("batch, rows" if axis == "batch" else "context, tokens in the prompt")
    ax.grid(True, which="both")


def draw_bars(ax, _, rows, looks, whiskers, roof):
    rows = sorted(rows, key=lambda r: r["y"])
    varied = [a for a in AXES if len({r[a] for r in rows}) > 1]
    values = [r["y"] for r in rows]
    low, high = spread(rows) if whiskers else [[0] * len(rows)] * 2
    for i, (row, value) in enumerate(zip(rows, values)):
        _, color, _, _, peer = looks[series(row)]
        ax.barh(i, value, 0.66, color=CARD if peer else color, edgecolor=color,
                hatch="///" if peer else None)
        text = f"{value:.1f}" if value < 1000 else f"{value:,.0f}"
        ax.annotate(text + (f" ({value / roof:.0%})" if roof else ""), (value + high[i], i), (4, 0),
                    textcoords="offset points", va="center",
                    bbox=dict(facecolor=CARD, edgecolor="none", pad=1))
    if whiskers:
        ax.errorbar(values, range(len(rows)), xerr=[low, high], fmt="none", ecolor=TEXT,
                    capsize=3, lw=1)
    if roof:
        ax.axvline(roof, color=TEXT, ls="--", lw=1.2, zorder=0.5,
                   label=f"measured read bandwidth, {roof:.1f} GB/s")
    ax.set_yticks(range(len(rows)), [
        ", ".join([looks[series(r)][0], *(f"{AXES[a]} {r[a]}" for a in varied)]) for r in rows])
    ax.tick_params(axis="y", length=0)
    room = max(0.1, (3 - len(rows)) / 2)           # or else a single bar is a wall
    ax.set_ylim(-0.5 - room, len(rows) - 0.5 + room)
    ax.set_xlim(0, 1.18 * max(max(v + e for v, e in zip(values, high)), roof or 0) or 1)
    ax.grid(True, axis="x")


def title(head, result, rows):
    models, _, weights, dtypes = distinct(rows)
    failed = sum(bool(row.get("error")) for row in result["rows"])
    wrong = sum(row.get("compared") is False for row in rows)
    notes = [f"{result['machine']} ({result['device']}, {result['threads']} threads)",
             ", ".join(dict.fromkeys(dtypes + weights * (len(weights) == 1))),
             f"{failed} could not run" * bool(failed), f"{wrong} with wrong tokens" * bool(wrong)]
    named = ", ".join(models) if len(models) < 4 else f"{len(models)} models"
    return f"{head}: {named}\n" + " · ".join(filter(None, notes))
