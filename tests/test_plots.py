"""The charts: which are written for which rows, that they are legible, and what is refused."""

import sys

import pytest

matplotlib = pytest.importorskip("matplotlib")
from matplotlib.image import imread  # noqa: E402

from gpt_faster.bench import plots  # noqa: E402

FIGURES = ("tok_s", "tok_s_min", "tok_s_max", "ttft_ms", "peak_memory_bytes", "achieved_gb_s")
ALL = ["throughput", "ttft", "memory", "roofline"]


def row(engine="compile", tok_s=200.0, n_prompt=5, n_new=200, **more):
    return dict(model="SmolLM2-135M", engine=engine, quantization="none", dtype="bfloat16", n_prompt=n_prompt,
                n_new=n_new, batch=1, tok_s=tok_s, tok_s_min=0.9 * tok_s, tok_s_max=1.1 * tok_s,
                ttft_ms=1e3 / tok_s, peak_memory_bytes=10**9, compared=True, error=None,
                achieved_gb_s=tok_s / 4 if n_new else None) | more


def failed(**more):
    return row(error="needs an NVIDIA GPU", **dict.fromkeys(FIGURES[1:]), **more) | dict(tok_s=None)


def draw(tmp_path, monkeypatch, rows):
    """(names of the charts, per chart its axes and legend), of figures as they were saved."""
    from matplotlib.figure import Figure
    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k)))
    result = dict(device="cpu", machine="EPYC", threads=2, bandwidth_gb_s=79.8, rows=rows)
    paths = plots.plot(result, tmp_path / "new" / "charts")
    assert all(p.is_file() and p.stat().st_size < 100_000 for p in paths)
    return [p.stem for p in paths], dict(zip([p.stem for p in paths], figures))


def titles(figure):
    return [ax.get_title() for ax in figure.axes]


def lines(ax):
    return {h.get_label(): h.lines[0] for h in ax.containers if h.get_label()[0] != "_" and hasattr(h, "lines")}


def labels(ax):
    return [t.get_text() for t in ax.get_yticklabels()]


def test_batch_sweep(tmp_path, monkeypatch):
    rows = [row(e, 100.0 * b, batch=b) for b in (4, 1, 2) for e in ("compile", "kv_cache", "transformers, eager")]
    names, figures = draw(tmp_path, monkeypatch, rows)
    assert names == ALL and titles(figures["throughput"]) == ["decode, context 5"]
    drawn = lines(figures["throughput"].axes[0])
    assert list(drawn) == ["compile", "kv_cache", "transformers, eager"]
    assert list(drawn["compile"].get_xdata()) == [1, 2, 4] and list(drawn["compile"].get_ydata()) == [100, 200, 400]
    assert drawn["compile"].get_color() == plots.COLORS["compile"]
    assert drawn["transformers, eager"].get_color() == plots.PEERS[0]
    assert labels(figures["roofline"].axes[0]) == ["compile", "kv_cache", "transformers, eager"]     # batch 1 alone


def test_context_sweep_keeps_prompts_apart(tmp_path, monkeypatch):
    rows = [row(tok_s=1e5 / c, n_prompt=c) for c in (512, 1024, 4096)]
    rows += [row(tok_s=9e3, n_prompt=c, n_new=0) for c in (512, 4096)] + [row(tok_s=700.0, n_prompt=512, batch=8)]
    names, figures = draw(tmp_path, monkeypatch, rows)
    assert names == ALL
    for name in ALL[:3]:
        assert titles(figures[name]) == ["decode, context 512", "decode, batch 1", "prompt, batch 1"]
    prompt = figures["throughput"].axes[2]
    assert list(lines(prompt)["compile"].get_ydata()) == [9e3, 9e3] and prompt.get_ylabel() == "tok/s"
    assert [t.get_text() for t in figures["throughput"].axes[1].get_xticklabels()] == ["512", "1k", "4k"]
    assert list(lines(figures["memory"].axes[1])["compile"].get_ydata()) == [1000] * 3     # MB


def test_comparison_is_sorted_bars(tmp_path, monkeypatch):
    rows = [row(quantization=q, tok_s=s) for q, s in (("none", 200.0), ("int4-g32", 300.0))]
    rows += [row("llama.cpp", 250.0), row("compile", 1.0, n_new=20)]     # the longer run counts
    names, figures = draw(tmp_path, monkeypatch, rows)
    ax = figures["throughput"].axes[0]
    assert names == ALL and labels(ax) == ["compile · bfloat16", "llama.cpp · bfloat16", "compile · int4-g32"]
    assert [bool(p.get_hatch()) for p in ax.patches] == [False, True, False]
    assert figures["throughput"].get_suptitle() == "Throughput: SmolLM2-135M\nEPYC (cpu, 2 threads) · bfloat16"
    roof = figures["roofline"]
    assert [t.get_text() for t in roof.axes[0].texts] == ["50.0 (63%)", "62.5 (78%)", "75.0 (94%)"]
    assert [t.get_text() for t in roof.legends[0].get_texts()] == ["measured read bandwidth, 79.8 GB/s"]


def test_errors_and_missing_figures(tmp_path, monkeypatch):
    bare = dict(peak_memory_bytes=None, achieved_gb_s=None, tok_s_min=None, tok_s_max=None)
    rows = [row(**bare), failed(engine="cuda_graph"), row("kv_cache", compared=False, **bare)]
    names, figures = draw(tmp_path, monkeypatch, rows)
    assert names == ALL[:2] and labels(figures["throughput"].axes[0]) == ["compile", "kv_cache"]
    assert figures["ttft"].get_suptitle().endswith("1 failed · 1 with wrong tokens")


def test_only_prompts(tmp_path, monkeypatch):
    names, figures = draw(tmp_path, monkeypatch, [row(n_new=0, n_prompt=512), row("kv_cache", n_new=0, n_prompt=512)])
    assert names == ALL[:3] and titles(figures["throughput"]) == ["prompt, batch 1, context 512"]


def test_several_models_and_a_depth_of_zero(tmp_path, monkeypatch):
    rows = [row(n_prompt=c, model=m) for c in (0, 4096) for m in ("a", "b")]
    names, figures = draw(tmp_path, monkeypatch, rows)
    drawn = lines(figures["throughput"].axes[0])
    assert list(drawn) == ["a · compile", "b · compile"] and len({d.get_marker() for d in drawn.values()}) == 2
    assert labels(figures["roofline"].axes[0])[0] == "a · compile, context 0"


@pytest.mark.parametrize("rows", [[], [failed()]], ids=["none", "errors"])
def test_nothing_to_plot(tmp_path, monkeypatch, rows):
    with pytest.raises(ValueError, match="no rows to plot"):
        draw(tmp_path, monkeypatch, rows)
    assert not list(tmp_path.iterdir())


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="^--plot needs matplotlib: pip install matplotlib$"):
        plots.load_matplotlib()


def contrast(a, b):
    """WCAG 2's ratio of two colors #rrggbb: 1 to 21."""
    def luminance(color):
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4
                  for v in (c / 255 for c in bytes.fromhex(color[1:]))]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    dark, light = sorted(map(luminance, (a, b)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("page", ["#ffffff", "#0d1117"])
def test_legible_on_a_light_and_a_dark_page(tmp_path, monkeypatch, page):
    """Text lies on the card whatever the page, as no pixel lets the page through."""
    draw(tmp_path, monkeypatch, [row()])
    pixels = imread(tmp_path / "new/charts/throughput.png")      # [height, width, 3 or 4], 0 to 1
    alpha = pixels[..., 3].min() if pixels.shape[2] == 4 else 1.0
    under = [bytes.fromhex(c[1:]) for c in (plots.CARD, page)]
    ground = "#" + bytes(round(alpha * c + (1 - alpha) * p) for c, p in zip(*under)).hex()
    assert contrast(plots.TEXT, ground) >= 4.5
    assert "#" + bytes((255 * pixels[0, 0, :3]).round().astype(int).tolist()).hex() == plots.CARD
    for key in ("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color", "legend.labelcolor"):
        assert plots.STYLE[key] == plots.TEXT
    for color in (*plots.COLORS.values(), *plots.PEERS):         # graphics need 3
        assert contrast(color, ground) >= 3
