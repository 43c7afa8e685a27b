"""The benchmark tells the truth: its rows, its comparison, and generate.py's figures agree."""

import json

import pytest
import torch
from conftest import SMOLLM2
from test_errors import run as run_generate

import benchmark


def run(capsys, *argv):
    status = benchmark.run([str(a) for a in argv])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_rows(capsys):
    argv = ["--random", "stories15M", "-p", 4, "-n", 6, "-r", 2, "--device", "cpu", "--engines", "recompute,kv_cache"]
    status, out, _ = run(capsys, *argv, "-o", "json")
    result = json.loads(out)
    assert status == 0 and [r["engine"] for r in result["rows"]] == ["recompute", "kv_cache"]
    assert {"device", "versions", "bandwidth_gb_s", "rows", "command"} <= set(result)
    for row in result["rows"]:
        assert row["compared"] is True and row["tok_s_min"] <= row["tok_s"] <= row["tok_s_max"]
        assert row["bandwidth_fraction"] == pytest.approx(row["achieved_gb_s"] / result["bandwidth_gb_s"])
    status, out, _ = run(capsys, *argv)
    assert status == 0 and out.count("\n|") == 3 and "reading memory at" in out


def test_a_wrong_engine_is_caught(capsys, monkeypatch):
    """A decode step that stays at its first position, as one baked into a CUDA graph would."""
    original = benchmark.build_steps

    def baked(model, name, *more):
        steps = original(model, name, *more)
        if name != "kv_cache":
            return steps
        return steps._replace(decode=lambda model, token, pos, *rest: steps.decode(model, token, pos * 0 + 4, *rest))
    monkeypatch.setattr(benchmark, "build_steps", baked)
    argv = ["-m", SMOLLM2, "-p", 4, "-n", 20, "-r", 1, "--device", "cpu", "--engines", "kv_cache,recompute"]
    status, out, err = run(capsys, *argv)
    assert status == 1 and "| NO |" in out and "tokens of kv_cache are more than 0.5 in logits away" in err


@pytest.mark.parametrize("argv, message", [
    (["--engines", ","], "--engines names none"),
    (["--engines", "steam"], "unknown engine or peer 'steam'"),
    (["--peers", "gpt-slow"], "unknown engine or peer 'gpt-slow'"),
    (["-n", "1"], "must be at least 2"),
    (["--random", " ,"], "--random names none: known shapes are stories15M"),
    (["--random", "stories15M,Llama-9"], "--random Llama-9: no such shape (known: stories15M"),
    (["-p", "9000"], "the prompt has 9000 tokens and the model's context is 8192"),
    (["-p", "8000", "-n", "1000"], "8000 + 1000 tokens exceed the context of 8192"),
], ids=str)
def test_bad_input(capsys, argv, message):
    with pytest.raises(SystemExit) as e:
        model = [] if "--random" in argv else ["-m", str(SMOLLM2)]
        benchmark.guarded(benchmark.run, [*model, "--device", "cpu", *argv])
    assert e.value.code == 2 and message in capsys.readouterr().err


def test_figures_come_from_the_same_clock(capsys):
    """The same fields from generate.py --json: decode excludes the first token."""
    times = [0.0, 0.5, 0.6, 0.7]
    f = benchmark.figures(times, n_prompt=10, batch_size=2, read_bytes=10**9)
    expected = dict(ttft_s=0.5, prefill_tok_s=40.0, decode_tok_s=10.0, decode_tok_s_total=20.0, bandwidth_gb_s=10.0)
    assert f == pytest.approx(expected)
    status, out, _ = run_generate(capsys, "--random", "stories15M", "--prompt", 4, "--json", "--device", "cpu",
                                  "--max_new_tokens", 3)
    assert set(expected) <= set(json.loads(out))


def test_twin_shares_weights(ours):
    model = ours("gemma3_text")
    other = benchmark.twin(model)
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(model.parameters(), other.parameters()))
    tokens = torch.randint(0, 160, (1, 9))
    assert torch.equal(model(tokens, torch.arange(9)), other(tokens, torch.arange(9)))
