"""scripts/gpu_measure.py on a CPU: every row's code runs, and no fault of one row hides another's."""

import json
import sys
import time
from pathlib import Path

import pytest
import torch

from gpt_faster.bench import gpu

sys.path.insert(0, str(Path(gpu.__file__).parents[2] / "scripts"))
import gpu_check  # noqa: E402
import gpu_measure  # noqa: E402

CPU = torch.device("cpu")
N_ROWS = dict(products=22, attention=3, prompt_products=8, llama_8b=2, llama_1b=3, all_of_8b=4, plain_engine=3, batches=6,
              drafts=3, families=3, server=1)


@pytest.fixture
def run():
    """Of tiny sizes; its rows are in run.rows."""
    rows = []
    run = gpu.Run(CPU, gpu_measure.dry_sizes(), 600, rows.append)
    run.rows = rows
    with gpu.without_pauses():
        yield run


@pytest.mark.parametrize("part", N_ROWS)
def test_every_row_of_a_part_runs(run, part):
    gpu_measure.PARTS[part](run)
    assert [row for row in run.rows if "error" in row or "skipped" in row] == []
    assert len({row["row"] for row in run.rows}) == len(run.rows) == N_ROWS[part]
    assert all(row.get("us", 0) > 0 or row.get("tok_s", 0) > 0 for row in run.rows)
    for row in run.rows:
        assert gpu_measure.show(row).startswith(f"ok      {row['row']}: ")


def test_plans_name_each_part_and_fit_into_their_time():
    assert {name for plan in gpu_measure.PLANS.values() for name in plan} == {*gpu_measure.PARTS}
    assert {*N_ROWS, "checks", "two_ranks"} == {*gpu_measure.PARTS}
    known = gpu.Sizes()
    assert all(set(limits) <= set(gpu_measure.PARTS) for limits in gpu_measure.PLANS.values())
    [bf16] = {2 * n_in * n_out * (2 if gated else 1) for n_out, n_in, gated, _ in
              [known.products["down"]]}
    assert bf16 < known.cycled                     # more than a cache of 50 MB in each graph


def test_checks_are_rows_and_a_failing_one_stops_nothing(run, monkeypatch):
    def fails(device):
        raise AssertionError("3.0 times the rounding allowed\nmore")

    def passes(device):
        return f"on {device}"
    monkeypatch.setattr(gpu_check, "CHECKS", (fails, passes))
    gpu.checks(run)
    assert [{**row, "took_s": 0} for row in run.rows] == [
        dict(row="check: fails", error="AssertionError: 3.0 times the rounding allowed", took_s=0),
        dict(row="check: passes", ok="on cpu", took_s=0)]
    assert gpu_measure.show(run.rows[0]).startswith("FAILED  check: fails: error AssertionError")


def test_wrong_numbers_are_no_speed(run, monkeypatch):
    monkeypatch.setattr(gpu, "matvec", lambda *args, right=gpu.matvec, **how: right(*args, **how) * 1.05)
    monkeypatch.setattr(gpu, "cached_attention",
                        lambda q, *args, right=gpu.cached_attention: right(q.flip(-1), *args))
    gpu.products(run)
    gpu.attention(run)
    ours = [row for row in run.rows if "read" not in row["row"] and "BLAS" not in row["row"]]
    assert len(ours) == 15 and all("off by" in row["error"] for row in ours)


def test_a_row_without_time_is_skipped_and_said(run):
    run.end = time.monotonic() + 3
    assert run.row("long", 10, dict) is None
    assert run.row("short", 1, lambda us: dict(us=us), 1) == dict(us=1)
    assert run.rows[0]["skipped"] == "3 s are left, it needs about 10"
    assert gpu_measure.show(run.rows[0]).startswith("skipped long")


def test_an_engine_that_cannot_run_is_an_error_of_its_row(run):
    gpu.models(run, [("Llama-3.2-1B", "cuda_graph", "none", gpu.decoding(run)),
                     ("Llama-3.2-1B", "kv_cache", "none", gpu.decoding(run))])
    assert run.rows[0]["error"] == "RuntimeError: needs an NVIDIA GPU" and run.rows[1]["tok_s"] > 0


def test_two_ranks_need_two_gpus(run):
    gpu.two_ranks(run)
    assert "two are needed" in run.rows[0]["skipped"]


def test_a_part_that_hangs_or_dies_ends_alone(capfd, monkeypatch):
    code = dict(fine="print('a row', flush=True)", dies="import os; os.abort()",
                hangs="import time; time.sleep(60)", last="print('the last', flush=True)")
    monkeypatch.setattr(gpu_measure, "GRACE", 0.2)
    limits = dict(fine=20.0, dies=20.0, hangs=0.3, last=20.0)
    begin = time.monotonic()
    wrong = gpu_measure.run_parts(limits, 60.0, lambda name, limit: [sys.executable, "-c", code[name]])
    assert time.monotonic() - begin < 30
    assert wrong == ["dies: exit status -6", "hangs: over its 0 s, killed"]
    out = capfd.readouterr().out
    assert "a row" in out and "the last" in out and "FAILED  dies: exit status -6" in out
    assert gpu_measure.run_parts(dict(fine=20.0), 1.0, None) == []         # no time: not started
    assert "skipped fine: 1 s are left" in capfd.readouterr().out


def test_the_command_runs_parts_as_processes_and_keeps_their_rows(tmp_path, capfd, monkeypatch):
    path = tmp_path / "rows.jsonl"
    monkeypatch.setenv("OUT", str(tmp_path / "other"))
    flags = ["--dry", "--output", str(path)]
    assert gpu_measure.run([*flags, "--parts", "attention", "--seconds", "200"]) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows[0]["row"] == "machine" and {"commit", "versions"} <= set(rows[0])
    assert len(rows) == 1 + 3 and "4 rows without an error, 0 with one" in capfd.readouterr().out


@pytest.mark.parametrize("argv, message", [
    (["--device", "cpu"], "--device cpu needs --dry"),
    (["--dry", "--parts", "product"], "no part 'product': the parts are products, attention")])
def test_what_it_cannot_do_is_refused(argv, message):
    with pytest.raises(ValueError, match=message):
        gpu_measure.run(argv)
