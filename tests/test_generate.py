"""The main job, end to end: real models, the command line, streaming, stopping, interrupting."""

import json
import shutil
import signal
import subprocess
import sys

import pytest
import references
import torch
from commands import PYTHON
from conftest import GEMMA, ROOT, SMOLLM2
from helpers import GREEDY, generated, make_batch
from test_errors import run

import generate
from checkpoint import tensor_shapes
from generate import Sequence, follow
from gpt_faster import loading
from gpt_faster.cli import session
from gpt_faster.decoding import engines
from gpt_faster.formats.known_shapes import SHAPES
from gpt_faster.formats.load import read_checkpoint
from gpt_faster.kernels.compile import as_cuda_graph
from gpt_faster.text import tokenizer_files
from sampling import SamplingParams


def command(*argv):
    return [*PYTHON, str(ROOT / "generate.py"), *map(str, argv)]


# ---- The same tokens as transformers, on the real files, fp32 greedy -----------------------------

@pytest.mark.parametrize("path", [SMOLLM2, GEMMA], ids=["smollm2", "gemma"])
@pytest.mark.parametrize("engine", ["kv_cache", "compile"])
def test_same_tokens_as_transformers(path, engine, exhaustive, two_threads):
    """12 new ones as kept, see references.py; in the exhaustive tier all, and as it makes them now."""
    expected, n_new = references.kept(path), references.N_NEW if exhaustive else 12
    if exhaustive:
        made = references.generated(path)
        assert {key: expected[key] for key in made} == made
    torch._dynamo.reset()
    model, source, tokenizer = loading.load_model(str(path), "cpu", torch.float32)
    eos = set(source.eos_ids)
    model.setup_cache(1, 64)
    assert expected["eos_id"] in eos
    batch = make_batch(model, [GREEDY], steps=engines.build_steps(model, engine))
    for prompt in references.PROMPTS:
        ids = tokenizer.encode(prompt)
        row = Sequence(tokenizer, ids, eos, [])
        follow(generate.generate(batch, [ids], n_new), [row], None)
        their_ids, their_new = expected["generated"][prompt]
        assert (ids, row.ids) == (their_ids, their_new[:n_new]), prompt


# ---- The loop ------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def smollm2():
    return loading.load_model(str(SMOLLM2), "cpu", torch.float32)


def test_batch_rows_and_padded_prefill_equal_alone(smollm2):
    model, _, tokenizer = smollm2
    prompt = torch.tensor([tokenizer.encode("The capital of France is")])
    model.setup_cache(1, 64)
    alone = [t.item() for t in generated(model, prompt, 12, GREEDY)]
    model.setup_cache(1, 64)
    padded = generate.Steps(pad=True)
    assert [t.item() for t in generated(model, prompt, 12, GREEDY, steps=padded)] == alone
    rows = [t[:, 0].tolist() for t in generated(model, prompt.repeat(3, 1), 12, GREEDY)]
    assert rows == [[t] * 3 for t in alone]


def test_repetition_penalty_equals_transformers(families, ours):
    directory, theirs = families("llama3")
    prompt = torch.randint(0, 160, (2, 6), generator=torch.Generator().manual_seed(1))
    expected = theirs.generate(prompt, max_new_tokens=30, do_sample=False, repetition_penalty=1.5,
                               eos_token_id=None, pad_token_id=0)[:, 6:]
    how = SamplingParams(temperature=0, repetition_penalty=1.5)
    got = torch.cat(list(generated(ours("llama3"), prompt, 30, how)), dim=1)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("how", [SamplingParams(0), SamplingParams(0.8, 20), SamplingParams(1.0, 0, 0.9),
                                 SamplingParams(0.8, 20, 0.9, 0.05, 1.3)], ids=str)
def test_the_whole_step_traces_and_draws_the_same(ours, how, monkeypatch):
    """What a GPU captures as one graph: model, penalty and sampling, without a break."""
    torch._dynamo.reset()
    model, prompt = ours("gemma3_text"), torch.randint(0, 160, (2, 6))
    step, first = generate.decode_one_token, generate.prefill
    with monkeypatch.context() as m:
        original = torch.compile
        m.setattr(torch, "compile", lambda step, **more: original(step, backend="aot_eager", **more))
        step = as_cuda_graph(step)
    first = torch.compile(first, backend="aot_eager", fullgraph=True, dynamic=False)
    drawn = []
    for steps in (generate.Steps(), generate.Steps(first, step, pad=True)):
        model.setup_cache(2, 64, 16)                       # with a ring of 8 + 16 - 1 slots
        g = torch.Generator().manual_seed(3)
        drawn.append([t.tolist() for t in generated(model, prompt, 12, how, g, steps)])
    assert drawn[0] == drawn[1]


def test_seed_repeats_and_compiled_prefill_draws_the_same(smollm2):
    model, _, tokenizer = smollm2
    prompt, how = torch.tensor([tokenizer.encode("Once upon a time")]), SamplingParams(1.0, 50)

    def draw(seed, steps=generate.Steps()):
        model.setup_cache(1, 64)
        g = torch.Generator().manual_seed(seed)
        return [t.item() for t in generated(model, prompt, 10, how, g, steps)]
    assert draw(1) == draw(1) != draw(2)
    assert draw(1, generate.Steps(pad=True)) == draw(1)


def test_bucket():
    assert [generate.bucket(n, 1000) for n in (1, 256, 257, 513, 999, 1000)] == [256, 256, 512, 1000, 1000, 1000]
    assert len({generate.bucket(n, 8192) for n in range(1, 8193)}) == 6    # compilations to the full context
    assert generate.bucket(33, 1000, 32) == 64 and generate.bucket(5, 10, 32) == 10


# ---- Rows: stop strings and end of sequence ------------------------------------------------------

class Words:
    """A tokenizer of one word per id."""

    def __init__(self, *words):
        self.words = words

    def decode(self, ids):
        return "".join(self.words[i] for i in ids)

    def special_ids(self, text):
        return []


@pytest.mark.parametrize("stops, shown, n_ids", [
    ([], "ab stop here now", 5), (["stop"], "ab ", 3), (["p h"], "ab sto", 4), (["op here"], "ab st", 4), (["now", "here"], "ab stop ", 4),
    (["stopped"], "ab stop here now", 5), (["ab"], "", 2), (["now!"], "ab stop here now", 5)])
def test_stop_strings(stops, shown, n_ids):
    row = Sequence(Words("a", "b ", "stop", " here", " now"), [], set(), stops)
    pieces = [row.push(i) for i in range(5)] + [row.finish("length")]
    assert "".join(pieces) == row.text == shown and len(row.ids) == n_ids
    assert row.finish_reason == ("stop" if n_ids < 5 else "length")
    for i in range(len(pieces)):                           # nothing is shown that is taken back
        assert shown.startswith("".join(pieces[:i]))


@pytest.mark.parametrize("stops, shown, reason", [(["stop"], "ab ", "stop"), (["p"], "ab sto", "stop"), (["stop here"], "ab stop", "length")])
def test_a_stop_string_at_the_last_token_allowed(stops, shown, reason):
    """It is not shown, and not the number of tokens is what ended the text."""
    row = Sequence(Words("a", "b ", "stop"), [], set(), stops, max_new=3)
    pieces = [row.push(i) for i in range(3)]
    assert "".join(pieces) == row.text == shown and row.finish_reason == reason


def test_end_of_sequence():
    row = Sequence(Words("a", "b", "<eos>"), [], {2}, [])
    assert row.push(0) == "a" and row.finish_reason is None
    row.push(2)
    assert row.finish_reason == "stop" and row.ids == [0, 2] and row.push(1) == "" and row.ids == [0, 2]


# ---- The command line ----------------------------------------------------------------------------

FIELDS = {"prompt", "text", "prompt_ids", "new_ids", "finish_reason", "ttft_s", "prefill_tok_s",
          "decode_tok_s", "load_s", "compile_s", "peak_memory_bytes", "model_bytes", "bandwidth_gb_s",
          "device", "dtype", "torch"}


def test_json(capsys):
    argv = ["-m", SMOLLM2, "--json", "--device", "cpu", "--max_new_tokens", 6]
    status, out, err = run(capsys, *argv, "--temperature", 0, "--num_samples", 2, "--batch-size", 2)
    objects = [json.loads(line) for line in out.splitlines()]
    assert status == 0 and len(objects) == 4 and all(FIELDS <= set(o) for o in objects)
    assert len({o["text"] for o in objects}) == 1 and objects[0]["text"].startswith(" Alex")
    first = objects[0]
    assert len(first["new_ids"]) == 6 and first["finish_reason"] == "length"
    assert first["prompt_ids"] == [19556, 28, 957, 1462, 314] and first["model_bytes"] > 2.6e8
    assert first["bandwidth_gb_s"] == pytest.approx(first["model_bytes"] * first["decode_tok_s"] / 1e9)
    assert "Average tokens/sec" in err and "Memory used" in err and "time to first token" in err


def test_text_goes_to_stdout_and_the_rest_to_stderr(capsys):
    argv = ["-m", SMOLLM2, "--device", "cpu", "--max_new_tokens", 9, "--temperature", 0, "--dtype", "float32"]
    assert run(capsys, *argv)[1] == "Hello, my name is Alex, and I'm a professional coach.\n"
    assert run(capsys, *argv, "--stop", " profess")[1] == "Hello, my name is Alex, and I'm a\n"
    out = run(capsys, *argv, "--stop", "I'm", "--json")[1]
    assert json.loads(out)["text"] == " Alex, and " and json.loads(out)["finish_reason"] == "stop"
    assert run(capsys, *argv, "--engine", "recompute")[1] == run(capsys, *argv)[1]


def test_end_of_sequence_of_a_real_model(capsys):
    prompt = "<|im_start|>user\nSay OK.<|im_end|>\n<|im_start|>assistant\n"
    argv = ["-m", SMOLLM2, "--device", "cpu", "--temperature", 0, "--json", "--prompt", prompt]
    row = json.loads(run(capsys, *argv, "--max_new_tokens", 100)[1])
    assert row["finish_reason"] == "stop" and row["new_ids"][-1] == 2 and "<|im_end|>" not in row["text"]
    more = json.loads(run(capsys, *argv, "--max_new_tokens", len(row["new_ids"]) + 5, "--ignore_eos")[1])
    assert more["finish_reason"] == "length" and len(more["new_ids"]) == len(row["new_ids"]) + 5


def test_the_context_ends_generation(capsys, families, tmp_path):
    import shutil
    shutil.copytree(families("llama2")[0], tmp_path / "m")
    from tokenizers import Tokenizer, models
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "m/tokenizer.json"))
    argv = ["-m", tmp_path / "m", "--device", "cpu", "--json", "--ignore_eos", "--prompt", "120"]
    status, out, err = run(capsys, *argv)
    assert status == 0 and "note: at most 8 new tokens, to stay within 128 positions" in err
    assert len(json.loads(out)["new_ids"]) == 8 and json.loads(out)["finish_reason"] == "length"
    one = json.loads(run(capsys, *argv, "--max_new_tokens", 1)[1])
    assert len(one["new_ids"]) == 1 and one["decode_tok_s"] is None


def test_the_models_own_sampling_values_count_unless_overruled(capsys, monkeypatch):
    read = loading.open_checkpoint

    def with_defaults(path, *more):
        source = read(path)
        source.defaults = dict(temperature=0.0, top_k=5)
        return source
    monkeypatch.setattr(loading, "open_checkpoint", with_defaults)
    seen = []
    original = generate.generate
    monkeypatch.setattr(session, "generate", lambda batch, *a: seen.append(batch.sampler.params[0]) or original(batch, *a))
    argv = ["-m", SMOLLM2, "--device", "cpu", "--max_new_tokens", 2]
    run(capsys, *argv)
    run(capsys, *argv, "--temperature", 0.5)
    assert (seen[0].temperature, seen[0].top_k, seen[1].temperature) == (0.0, 5, 0.5)


def test_profile_and_synthetic_prompt(capsys, tmp_path):
    argv = ["-m", SMOLLM2, "--device", "cpu", "--max_new_tokens", 3, "--prompt", 40, "--json"]
    status, out, err = run(capsys, *argv, "--profile", tmp_path / "trace")
    assert status == 0 and len(json.loads(out)["prompt_ids"]) == 40
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_compiled_command_line(capsys, two_threads):
    """With a compiled prefill: the same text."""
    torch._dynamo.reset()
    argv = ["-m", SMOLLM2, "--device", "cpu", "--max_new_tokens", 9, "--temperature", 0, "--dtype", "float32"]
    status, out, err = run(capsys, *argv, "--compile_prefill")
    assert out == "Hello, my name is Alex, and I'm a professional coach.\n" and "Compilation time" in err
    torch._dynamo.reset()


def test_random_shape(capsys):
    status, out, err = run(capsys, "--random", "stories15M", "--prompt", 5, "--max_new_tokens", 4, "--device", "cpu")
    assert status == 0 and len(out.split()) == 4 and "stories15M: 15M parameters" in err


@pytest.mark.parametrize("name", SHAPES)
def test_known_shapes(name):
    sizes = {"15M": 15, "42M": 42, "110M": 110, "135M": 135, "270m": 268, "1.1B": 1100, "1B": 1236, "7B": 7000,
             "8B": 8100, "13B": 13000, "70B": 70000, "405B": 405000, "gpt2": 124.4, "8x7B": 46700, "8x160M": 1324,
             "dense": 418, "A3B": 30500, "20b": 20900, "2b": 2614, "3B": 3213, "0.6B": 596, "xl": 1558}
    sizes |= {"Qwen3.5-0.8B": 800, "Qwen3.5-2B": 2000, "Qwen3.5-4B": 4000, "Qwen3.5-9B": 9000, "Qwen3.5-27B": 27000, "Qwen3.5-35B-A3B": 35000,
              "GLM-4.7-Flash": 30000, "GLM-4.7-Flash-4L": 2625, "LFM2-350M": 354, "LFM2-1.2B": 1170, "LFM2-2.6B": 2570, "gemma-4-E2B": 5100,
              "gemma-4-E4B": 8000, "gemma-4-12B": 12000, "gemma-4-26B-A4B": 26000, "gemma-4-31B": 31000,     # with what is no text, some
              "Granite-4-H-tiny": 7000, "Granite-4-H-tiny-10L": 1850, "Falcon-H1-1.5B": 1500, "Nemotron-Nano-9B": 8900, "Nemotron-Nano-9B-16L": 3390}
    n = sum(torch.Size(s).numel() for s in tensor_shapes(SHAPES[name]()).values()) / 1e6
    assert n == pytest.approx(sizes.get(name) or sizes[name.replace("stories", "-").split("-")[-1]], rel=0.1)


@pytest.mark.parametrize("more", [[], ["--compile"]], ids=["plain", "compile"])
def test_started_by_python(more):
    """Without commands.py: torch is imported as for a user."""
    argv = ["-m", SMOLLM2, "--device", "cpu", "--max_new_tokens", 9, "--temperature", 0, "--dtype", "float32", *more]
    done = subprocess.run([sys.executable, "generate.py", *map(str, argv)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "Hello, my name is Alex, and I'm a professional coach.\n", done.stderr
    assert ("Compilation time" in done.stderr) == bool(more) and "Traceback" not in done.stderr


def test_interrupt_prints_what_there_is():
    process = subprocess.Popen(command("-m", SMOLLM2, "--max_new_tokens", 8000, "--ignore_eos", "--temperature", 0,
                                       "--dtype", "float32"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    got = process.stdout.read(40)                          # it streams
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (got + out).startswith("Hello, my name is Alex, and I'm a profes") and out.endswith("\n")
    assert process.returncode == 130 and "Average tokens/sec" in err and "Traceback" not in err


def test_interrupt_while_loading():
    process = subprocess.Popen(command("--random", "Llama-1.1B", "--prompt", 5), stderr=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True)
    assert process.stderr.readline().startswith("Memory: ")        # which is said before weights are made
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT) and out == ""


def test_closed_pipe():
    process = subprocess.run(" ".join(f"'{c}'" for c in command("-m", SMOLLM2, "--max_new_tokens", 100))
                             + " | head -c 5", shell=True, capture_output=True, text=True)
    assert process.stdout == "Hello" and "Traceback" not in process.stderr


def test_python_without_torch(tmp_path):
    """On a fresh machine the first command says what to run; after quickstart it finds .venv."""
    shutil.copytree(ROOT, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*", "checkpoints"))
    argv = [sys.executable, "-S", str(tmp_path / "generate.py"), "--prompt", "Hi"]        # without site-packages
    for name in ("eval.py", "benchmark.py", "serve.py", "quantize.py", "generate.py"):
        done = subprocess.run([*argv[:2], str(tmp_path / name)], capture_output=True, text=True)
        assert done.returncode == 2 and f"{name}: error: this Python has no torch: run `bash" in done.stderr
        assert "Traceback" not in done.stderr and done.stdout == ""
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").write_text("#!/bin/sh\necho this one: $@")
    (tmp_path / ".venv/bin/python").chmod(0o755)
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.stdout.startswith("this one: ") and done.stdout.endswith("generate.py --prompt Hi\n")


def test_convert_script(tmp_path):
    script = str(ROOT / "scripts/convert_hf_checkpoint.py")
    done = subprocess.run([*PYTHON, script, "--checkpoint_dir", str(SMOLLM2)], cwd=tmp_path,
                          capture_output=True, text=True)
    path = tmp_path / done.stdout.strip()
    assert done.returncode == 0 and path.name == "model.pth" and path.exists(), done.stderr
    source = read_checkpoint(path)
    assert tokenizer_files.load(source.tokenizer).encode("Hello") == [19556]
    missing = subprocess.run([*PYTHON, script, "--checkpoint_dir", "/nowhere"], capture_output=True, text=True)
    assert missing.returncode == 2 and "no such file" in missing.stderr and "Traceback" not in missing.stderr
