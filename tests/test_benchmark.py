"""The benchmark tells the truth: its rows, its comparison, and generate.py's figures agree."""

import csv
import json
import shlex
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, SMOLLM2
from test_errors import run as run_generate

from gpt_faster.bench import cases, engines, machine, suites, tables, weights
from gpt_faster.bench import main as benchmark
from speculate import FixedLength


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch):
    monkeypatch.setattr(cases, "PAUSE", 0)
    monkeypatch.setattr(cases, "read_bandwidth", lambda device: 20.0)


def run(capsys, *argv):
    status = benchmark.run([str(a) for a in argv])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_rows(capsys, monkeypatch):
    """The fields that the issue names, on every row of every test."""
    argv = ["--random", "stories15M", "-p", 4, "-n", 6, "-d", "3,9", "-b", "1,3", "-r", 2, "--device", "cpu",
            "--engines", "recompute,kv_cache"]
    monkeypatch.setattr(cases, "read_bandwidth", lambda device: 8.0)
    status, out, _ = run(capsys, *argv, "-o", "json")
    result = json.loads(out)
    assert status == 0 and result["bandwidth_gb_s"] == 8 and {"device", "versions", "bandwidth_gb_s", "rows", "command", "commit", "clocks"} <= set(result)
    assert [(r["test"], r["batch"], r["engine"]) for r in result["rows"]] == [
        (test, batch, engine) for test in ("pp4", "tg6 @ d3", "tg6 @ d9") for batch in (1, 3)
        for engine in ("recompute", "kv_cache")]
    for row in result["rows"]:
        assert row["compared"] is True and row["error"] is None and row["tok_s_min"] <= row["tok_s"] <= row["tok_s_max"]
        assert row["tok_s_per_request"] == pytest.approx(row["tok_s"] / row["batch"])
        assert row["quantization"] == "none" and row["dtype"] == "bfloat16" and row["parameters"] == 15191712
        assert row["peak_memory_bytes"] >= row["model_bytes"] == pytest.approx(2 * 15191712, rel=1e-3) and row["ttft_ms"] > 0
        if row["test"] == "pp4":
            assert row["itl_ms"] is None and row["achieved_gb_s"] is None and row["n_new"] == 0
            continue
        # half of the steps take their median or more, and of so few the 99th percentile is the longest
        assert 0.99 * row["itl_ms"] / 2 <= 1e3 * row["batch"] / row["tok_s_min"] <= 1.01 * row["itl_p99_ms"]
        assert row["achieved_gb_s"] == pytest.approx(row["tok_s_per_request"] * row["model_bytes"] / 1e9, rel=0.1)
        assert row["bandwidth_fraction"] == pytest.approx(row["achieved_gb_s"] / 8)


@pytest.mark.parametrize("kind", ["md", "csv", "jsonl"])
def test_outputs(capsys, kind):
    argv = ["--random", "stories15M", "-n", 3, "-r", 1, "--device", "cpu", "--engines", "kv_cache,cuda_graph,int8"]
    if kind != "md":
        argv[argv.index("kv_cache,cuda_graph,int8")] = "kv_cache,cuda_graph"           # no compiler's time
    status, out, _ = run(capsys, *argv, "-o", kind)
    assert status == 0
    if kind == "md":
        header, _, eager, graph, packed, *said = out.splitlines()
        assert graph.count("needs an NVIDIA GPU") == 1 and "int8" in packed and "yes" in packed
        assert "tg3 @ d5" in said[1] and "tg3" not in header + eager and "reading memory at" in said[1]
    else:
        rows = list(csv.DictReader(out.splitlines())) if kind == "csv" else [json.loads(line) for line in out.splitlines()]
        assert [r["engine"] for r in rows] == ["kv_cache", "cuda_graph"] and float(rows[0]["tok_s"]) > 0
        assert rows[1]["error"] == "needs an NVIDIA GPU" and not rows[1]["tok_s"]


def test_two_samplers_draw_the_same(capsys):
    argv = ["-m", SMOLLM2, "-n", 30, "-r", 1, "--device", "cpu", "--engines", "sorted,sort_free"]
    status, out, _ = run(capsys, *argv, "-o", "json")
    assert status == 0 and [r["compared"] for r in json.loads(out)["rows"]] == [True, True]


@pytest.mark.parametrize("engine, dtype", [("kv_cache", "bfloat16"), ("kv_cache", "float32"), ("sort_free", "bfloat16")])
def test_a_wrong_engine_is_caught(capsys, monkeypatch, engine, dtype):
    """A decode step that stays at its first position, as one baked into a CUDA graph would."""
    original, seen = engines.build_steps, []

    def baked(model, name, *more):
        steps = original(model, name, *more)
        seen.append(name)
        if len(seen) != 1:
            return steps
        return steps._replace(decode=lambda model, token, pos, *rest: steps.decode(model, token, pos * 0 + 5, *rest))
    monkeypatch.setattr(engines, "build_steps", baked)
    argv = ["-m", SMOLLM2, "-n", 20, "-r", 1, "--device", "cpu", "--engines", f"{engine},recompute", "--dtype", dtype]
    status, out, err = run(capsys, *argv)
    assert status == 1 and "| NO |" in out and f"{engine} (none, tg20 @ d5, batch 1) generates other tokens than the reference" in err


def test_requests_and_larger_caches(capsys):
    """Different prompts by slots, whose rows are compared too, and a cache beyond what is needed."""
    argv = ["--random", "stories15M", "-r", 1, "--device", "cpu", "-o", "json", "-n", 9, "-d", 12]
    status, out, _ = run(capsys, *argv, "--requests", 7, "-b", "1,3", "--engines", "kv_cache,recompute")
    one, refused, three, _ = json.loads(out)["rows"]
    assert status == 0 and refused["error"] == "takes one prompt at a time" and refused["tok_s"] is None
    for row in (one, three):
        assert row["test"] == "rq7 @ d1-12, tg1-9" and row["compared"] is True and row["tok_s"] > 0
        assert row["ttft_ms"] > 0 and row["achieved_gb_s"] is None and row["tok_s_per_request"] > 0
    status, out, _ = run(capsys, *argv, "--max_seq_length", "0,256", "--engines", "kv_cache")
    tight, wide = json.loads(out)["rows"]
    assert status == 0 and wide["test"] == "tg9 @ d12, cache 256" and tight["test"] == "tg9 @ d12"
    # the caches differ by 1.6 MB, and a process's peak by more from run to run
    assert all(row["peak_memory_bytes"] > 2 * 15e6 for row in (tight, wide))


def test_guessing_ahead(capsys):
    """Greedily compared like any engine; above temperature 0 each run draws its own."""
    argv = ["-m", SMOLLM2, "-r", 1, "--device", "cpu", "-o", "json", "-n", 24, "--text", ROOT / "benchmarks/edit.txt"]
    status, out, _ = run(capsys, *argv, "--engines", "kv_cache,ngram")
    rows = json.loads(out)["rows"]
    assert status == 0 and [r["compared"] for r in rows] == [True, True] and rows[1]["test"] == "tg24 @ edit.txt"
    status, out, _ = run(capsys, *argv, "--engines", "kv_cache", "--temperature", 0.8)
    assert status == 0 and json.loads(out)["rows"][0]["compared"] is None and rows[0]["n_prompt"] > 150


@pytest.mark.parametrize("engine", ["mtp", "eagle3", "dflash"])
def test_drafts_of_a_known_acceptance(capsys, monkeypatch, engine):
    """A drafter of random weights, quantized as the model, whose tokens are right four times of five."""
    kept, original = [], engines.use_fixed_acceptance
    monkeypatch.setattr(engines, "use_fixed_acceptance", lambda batch, *more: original(batch, *more) or kept.append(batch))
    monkeypatch.setattr(engines, "measure_drafts", lambda batch, n: setattr(batch, "draft_length", FixedLength(2)))
    argv = ["--random", "stories15M", "-r", 3, "--device", "cpu", "-o", "json", "--dtype", "float32", "-n", 150, "-d", 12]
    status, out, _ = run(capsys, *argv, "--engines", f"compile,{engine}", "--quantize", "int8")
    rows = json.loads(out)["rows"]
    assert status == 0 and [r["compared"] for r in rows] == [True, True] and rows[1]["achieved_gb_s"] is None
    rounds, first = sum(kept[0].accept_counts), sum(kept[0].accept_counts[1:])
    assert rounds > 150 and abs(first / rounds - engines.PUBLISHED_ACCEPTANCE[engine]) < 0.1
    draft = kept[0].drafter.draft if engine == "dflash" else kept[0].drafter.head
    assert type(draft.layers[0].ffn.down).__name__ == "OperationsLinear"
    status, out, _ = run(capsys, *argv, "--engines", engine, "--temperature", 0.8, "-r", 1)
    assert json.loads(out)["rows"][0]["error"] == "needs an expected text: temperature 0"


def test_requests_that_mix_up_rows_are_caught(capsys, monkeypatch):
    """A slot that goes on where the one before it was."""
    from gpt_faster.decoding import scheduler
    original = scheduler.read_late

    def late(tokens, not_finite):
        for ids, owners in original(tokens, not_finite):
            yield [(i + 1) % 32000 for i in ids], owners
    monkeypatch.setattr(scheduler, "read_late", late)
    argv = ["-m", SMOLLM2, "-r", 1, "--device", "cpu", "-n", 9, "-d", 12, "--requests", 2, "--engines", "kv_cache"]
    status, out, err = run(capsys, *argv)
    assert status == 1 and "| NO |" in out


def free_bytes(monkeypatch, n):
    for module in (weights, cases):
        monkeypatch.setattr(module, "free_memory", lambda device: n)


def test_a_row_that_does_not_fit_is_a_row(capsys, monkeypatch):
    """And the others are measured."""
    free_bytes(monkeypatch, 50e6)
    argv = ["--random", "stories15M", "-n", 3, "-r", 1, "--device", "cpu", "--engines", "kv_cache", "-b", "1,512"]
    status, out, _ = run(capsys, *argv, "-o", "json")
    fits, not_fits = json.loads(out)["rows"]
    assert status == 0 and fits["error"] is None and fits["tok_s"] > 0
    assert not_fits["error"].startswith("out of memory: about 0.") and not_fits["tok_s"] is None
    argv = ["--random", "stories15M", "-n", 3, "-r", 1, "--device", "cpu", "--engines", "kv_cache,compile", "-b", 64]
    fits, not_fits = json.loads(run(capsys, *argv, "-o", "json")[1])["rows"]       # it needs 30 MB, and its weights once more
    assert fits["error"] is None and not_fits["error"].startswith("out of memory: about 0.1 GB")


def test_weights_that_do_not_fit_are_rows(capsys, monkeypatch):
    """Half of them do."""
    free_bytes(monkeypatch, 20e6)
    argv = ["--random", "stories15M", "-n", 3, "-r", 1, "--device", "cpu", "--engines", "kv_cache", "--quantize", "none,int8"]
    status, out, err = run(capsys, *argv, "-o", "json")
    large, small = json.loads(out)["rows"]
    assert status == 0 and small["error"] is None and small["tok_s"] > 0 and small["quantization"] == "int8"
    assert large["error"] == "out of memory: the weights take 0.0 GB" and large["model_bytes"] is None
    status, out, err = run(capsys, *argv)
    assert status == 0 and "| out of memory: the weights take 0.0 GB |" in out


def test_an_allocator_that_says_no(capsys, monkeypatch):
    original, calls = engines.Engine.run, []

    def once(self, prompt, n_new):
        calls.append(self)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 PB")
        return original(self, prompt, n_new)
    monkeypatch.setattr(engines.Engine, "run", once)
    argv = ["--random", "stories15M", "-n", 3, "-r", 1, "--device", "cpu", "--engines", "kv_cache,recompute"]
    status, out, _ = run(capsys, *argv, "-o", "json")
    errors = [row["error"] for row in json.loads(out)["rows"]]
    assert status == 0 and errors.count(None) == 1 and "out of memory: CUDA out of memory. Tried to allocate 2 PB" in errors


def test_an_engine_that_breaks_fails_the_command(capsys, monkeypatch):
    """Its row says why, the other one is measured."""
    original = engines.Engine.__init__

    def broken(self, name, *more):
        assert name != "recompute"
        original(self, name, *more)
    monkeypatch.setattr(engines.Engine, "__init__", broken)
    argv = ["--random", "stories15M", "-n", 3, "-r", 1, "--device", "cpu", "--engines", "kv_cache,recompute"]
    status, out, err = run(capsys, *argv)
    assert status == 1 and "recompute (none, tg3 @ d5, batch 1) failed: " in err and out.count("| yes |") == 1


def test_no_check(capsys, monkeypatch):
    monkeypatch.setattr("gpt_faster.bench.cases.tokens_agree", None)           # a call fails
    status, out, _ = run(capsys, "--random", "stories15M", "-n", 3, "-r", 1, "--device", "cpu", "--engines", "kv_cache", "--no_check")
    assert status == 0 and "tg3 @ d5" in out and "| yes |" not in out


def test_nano_gpt_spelling(capsys, monkeypatch):
    """benchmark.py --init_from=gpt2-xl --max_new_tokens=100, with a smaller model."""
    monkeypatch.setattr(benchmark, "LADDER", ("recompute", "kv_cache", "cuda_graph"))
    monkeypatch.setattr(benchmark, "run_workload", lambda cases, tokenizers, workload, *more: (
        [dict(engine=c.engine, test=str(workload), batch=workload.batch_size, compared=None, error=None) for c in cases], [1.0]))
    status, out, err = run(capsys, "--init_from=gpt2", "--max_new_tokens=100", "--device=cpu", "-o", "jsonl")
    rows = [json.loads(line) for line in out.splitlines()]
    assert status == 0 and "gpt2: no such file: using random weights of that shape" in err
    assert [(r["engine"], r["batch"]) for r in rows] == [
        (e, b) for b in (1, 8, 64, 512) for e in ("recompute", "kv_cache", "cuda_graph")]


def test_profile(capsys, tmp_path):
    argv = ["--random", "stories15M", "-n", 20, "--device", "cpu", "--engines", "kv_cache", "--profile", tmp_path / "new"]
    status, out, _ = run(capsys, *argv)
    assert status == 0 and "kv_cache none: 10 steps, the largest:" in out and out.count(" ms per step ") == 10
    trace, = (tmp_path / "new").iterdir()
    names = {e.get("name") for e in json.loads(trace.read_text())["traceEvents"]}
    assert "aten::linear" in names


def test_suites_parse():
    """Every entry is a command that this version understands."""
    for suite in benchmark.SUITES.values():
        for command in suite.values():
            args = benchmark.build_parser().parse_args(shlex.split(command))
            assert benchmark.read_engines(args, "--init_from" in command) and benchmark.read_models(args)
            assert set(benchmark.names(args.peers)) <= set(benchmark.PEERS)


def test_suite_goes_on(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(suites, "ROOT", tmp_path)
    for module in (suites, benchmark):
        monkeypatch.setattr(module, "SUITES", {"cpu": {"one": "-n 2", "two": "-n 3"}})
    about = dict(machine.describe_machine(torch.device("cpu")), commit="abc")
    for module in (suites, benchmark):
        monkeypatch.setattr(module, "describe_machine", lambda device: about)
    done, real = [], subprocess.run
    _, out, _ = run(capsys, "--random", "stories15M", "-n", 3, "-r", 1, "--device", "cpu", "--engines", "kv_cache", "-o", "json")

    def fake(command, **how):
        if command[0] != sys.executable:
            return real(command, **how)
        done.append(command[3])
        if len(done) == 2:
            return subprocess.CompletedProcess(command, 130, stdout="")    # Ctrl-C
        return subprocess.CompletedProcess(command, 0, stdout=out)
    monkeypatch.setattr(suites.subprocess, "run", fake)
    status, _, _ = run(capsys, "--suite", "cpu", "--device", "cpu")
    assert status == 130 and done == ["2", "3"]
    status, shown, err = run(capsys, "--suite", "cpu", "--device", "cpu")
    assert status == 0 and done == ["2", "3", "3"] and "### two" in shown and "one: already measured" in err
    written, = (tmp_path / "benchmarks").iterdir()
    tables = json.loads(written.read_text())["tables"]
    assert list(tables) == ["one", "two"] and tables["two"]["command"] == "python benchmark.py -n 3"
    for path, kept in ((written, ["two"]), (written, ["one", "two"])):
        path.unlink(missing_ok=True) if kept == ["two"] else None
        assert run(capsys, "--suite", "cpu", "--only", kept[0], "--device", "cpu")[0] == 0
        assert list(json.loads(path.read_text())["tables"]) == kept
    for argv, words in ((["--suite", "cpu", "--only", "tow"], "--only tow: the tables are one, two"), (["--only", "one"], "--suite")):
        with pytest.raises(ValueError, match=words):
            run(capsys, *argv, "--device", "cpu")


def test_ratios_are_to_weights_alike():
    def row(engine, quantization, tok_s, test="tg9 @ d5"):
        return dict(engine=engine, quantization=quantization, tok_s=tok_s, model="a", test=test, batch=1)
    rows = [row("compile", "none", 10), row("compile", "int8", 30), row("llama.cpp", "none", 5),
            row("llama.cpp", "int8", 10), row("transformers", "none", 2), row("compile", "int8", 9, "pp5")]
    assert [tables.ratio(r, rows, "llama.cpp") for r in rows] == [2, 3, 1, 1, 0.4, None]
    assert [tables.ratio(r, rows, "transformers") for r in rows] == [5, 15, 2.5, 5, 1, None]
    rows.append(row("generate.py", "none", 99))            # ours: no peer to be the best
    rows[4]["tok_s"] = 12
    assert [tables.best_peer(r, rows) for r in rows[:6]] == [
        "transformers", "transformers", "transformers", "transformers", "transformers", None]
    rows[4]["tok_s"] = 7
    assert [tables.best_peer(r, rows) for r in rows[:2]] == ["transformers", "llama.cpp"]
    quicker = [*rows, row("llama.cpp@q8_0", "int8", 12)]   # a peer of its own
    assert tables.peers_of(quicker) == ["transformers", "llama.cpp", "llama.cpp@q8_0"]
    assert [tables.best_peer(r, quicker) for r in rows[:2]] == ["llama.cpp@q8_0", "llama.cpp@q8_0"]
    assert tables.ratio(rows[1], quicker, "llama.cpp") == 3 and tables.ratio(rows[1], quicker, "llama.cpp@q8_0") == 2.5
    rows = [dict(r, dtype="bfloat16") for r in rows]
    assert tables.versions(rows) == ""                     # an older result
    rows = [dict(r, version="llama 1" if r["engine"] == "llama.cpp" else None) for r in rows]
    assert tables.versions(rows) == "\n\n- llama.cpp, bfloat16: llama 1\n- llama.cpp, int8: llama 1"


@pytest.mark.parametrize("argv, message", [
    (["--engines", ","], "--engines or --quantize is empty"),
    (["--engines", "steam"], "unknown engine 'steam'"),
    (["--peers", "gpt-slow"], "unknown peer 'gpt-slow'"),
    (["--peers", "llama.cpp@int8"], "peer 'llama.cpp@int8': expected one of f32, f16, bf16, q8_0"),
    (["--peers", "llama.cpp@"], "peer 'llama.cpp@': expected one of f32"),
    (["--peers", "llama.cpp@q8_0/q4_0/q4_0"], "or keys/values, for example q8_0/q4_0"),
    (["--peers", "vllm@q8_0"], "peer 'vllm@q8_0': only llama.cpp takes a KV cache of another type"),
    (["--quantize", "int3"], "--quantize int3: expected none, int8, int4"),
    (["-n", "1"], "-n 1: decode timing needs at least 2 tokens"),
    (["-n", "0"], "nothing to time: set -p or -n"),
    (["-n", "x"], "expected an integer, got 'x'"),
    (["--random", " ,"], "--random is empty: known shapes are stories15M"),
    (["--random", "stories15M,Llama-9"], "--random Llama-9: no such shape (known: stories15M"),
    (["-p", "9000"], "9001 tokens exceed the context of 8192"),
    (["-d", "8000", "-n", "1000"], "9000 tokens exceed the context of 8192"),
    (["--suite", "tpu"], "invalid choice: 'tpu'"),
    (["--suite", "gpu"], "--suite gpu needs a GPU"),
    (["--suite", "cpu", "-n", "5"], "--suite has its own commands and cannot be combined with --checkpoint_path"),
], ids=str)
def test_bad_input(capsys, argv, message):
    with pytest.raises(SystemExit) as e:
        model = [] if "--random" in argv else ["-m", str(SMOLLM2)]
        benchmark.guarded(benchmark.run, [*model, "--device", "cpu", *argv])
    assert e.value.code == 2 and message in capsys.readouterr().err


def test_bandwidth(monkeypatch):
    monkeypatch.undo()                                     # the real one
    assert 1 < machine.read_bandwidth(torch.device("cpu")) < 5000


def test_figures_come_from_the_same_clock(capsys):
    """The same fields from generate.py --json: decode excludes the first token."""
    times = [0.0, 0.5, 0.6, 0.7]
    f = cases.figures(times, n_prompt=20, n_new=[len(times) - 1] * 2, read_bytes=10**9)
    expected = dict(ttft_s=0.5, prefill_tok_s=40.0, decode_tok_s=10.0, decode_tok_s_total=20.0, bandwidth_gb_s=10.0)
    assert f == pytest.approx(expected)
    status, out, _ = run_generate(capsys, "--random", "stories15M", "--prompt", 4, "--json", "--device", "cpu",
                                  "--max_new_tokens", 3)
    assert set(expected) <= set(json.loads(out))


def test_twin_shares_weights(ours):
    model = ours("gemma3_text")
    other = engines.share_weights(model)
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(model.parameters(), other.parameters()))
    tokens = torch.randint(0, 160, (1, 9))
    assert torch.equal(model(tokens, torch.arange(9)), other(tokens, torch.arange(9)))


def test_ratios_and_shares_are_of_rounds(capsys, monkeypatch):
    """A slow minute slows both down: the ratio, and the share of the bandwidth, are of each round."""
    row = dict(model="m", test="tg4", batch=1, quantization="none")
    ours = dict(row, engine="compile", tok_s=20.0, tok_s_runs=[10.0, 20.0, 90.0])
    theirs = dict(row, engine="llama.cpp", tok_s=10.0, tok_s_runs=[5.0, 40.0, 10.0])
    assert tables.ratio(ours, [ours, theirs], "llama.cpp") == 2.0
    for old in (theirs | {"tok_s_runs": [1.0]}, {k: v for k, v in theirs.items() if k != "tok_s_runs"}):
        assert tables.ratio(ours, [ours, old], "llama.cpp") == 2.0         # of the medians
    reads = iter([50.0, *(25.0 * i for i in range(1, 7))])
    monkeypatch.setattr(cases, "read_bandwidth", lambda device: next(reads))
    status, out, _ = run(capsys, "--random", "stories15M", "-n", 5, "-r", 3, "--device", "cpu", "-o", "json",
                         "--engines", "kv_cache,recompute")
    result = json.loads(out)
    assert status == 0 and result["bandwidth_gb_s"] == (50 + 87.5) / 2 and next(reads, None) is None
    for r in result["rows"]:
        assert len(r["tok_s_runs"]) == 3 and sorted(r["tok_s_runs"])[1] == r["tok_s"]
        shares = [s * r["achieved_gb_s"] / r["tok_s"] / read for s, read in zip(r["tok_s_runs"], (37.5, 87.5, 137.5))]
        assert r["bandwidth_fraction"] == pytest.approx(sorted(shares)[1])
