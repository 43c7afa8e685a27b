"""Logits and weights that are no numbers end whatever it is, in one line, status 2; masked tokens do not."""

import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from conftest import ROOT
from helpers import GREEDY, allocate, speculative
from safetensors.torch import load_file, save_file
from test_errors import run

import tp
from checkpoint import save_checkpoint
from generate import Batch, NotFinite, Sequence, follow, generate, read_late
from gpt_faster.cli import evaluate
from gpt_faster.decoding import request_sampler
from gpt_faster.decoding.samplers import build_sampler
from gpt_faster.decoding.scheduler import Generation, RowsBatch, Scheduler
from gpt_faster.formats.load import load_model, read_checkpoint
from gpt_faster.formats.quantize_on_load import quantized
from gpt_faster.quantization import calibrate
from gpt_faster.quantization.solve import round_to_nearest
from quantize import Int4
from sampling import SamplingParams
from tokenizer import NullTokenizer

SAMPLED = [SamplingParams(), GREEDY, SamplingParams(temperature=0.8, top_k=20, top_p=0.9), SamplingParams(seed=3, min_p=0.1)]


def damaged(directory, path, name, value, dtype=None):
    """A copy of a checkpoint with one number of a tensor changed."""
    shutil.copytree(directory, path)
    tensors = load_file(path / "model.safetensors")
    tensors = {n: t.to(dtype) if dtype else t for n, t in tensors.items()}
    full = next(n for n in tensors if name in n)
    tensors[full].view(-1)[3] = value
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.fixture
def model(families):
    return load_model(read_checkpoint(families("llama2")[0]), torch.float32, "cpu")


class Broken(torch.nn.Module):
    """A head whose logits are these for the rows and steps that `when` names."""

    def __init__(self, head, value, when):
        super().__init__()
        self.head, self.value, self.when, self.n = head, value, when, 0

    def forward(self, x):
        logits = self.head(x)
        self.n += 1
        for row in self.when(self.n):
            if row < len(logits):
                logits[row, :, (slice(None) if self.value == -torch.inf else 7)] = self.value
        return logits


def sequences(n, max_new=6):
    return [Sequence(NullTokenizer(), [5 + i, 9, 77], max_new=max_new) for i in range(n)]


def run_batch(model, rows, params=GREEDY, steps=None):
    allocate(model, len(rows), 32)
    batch = Batch(model, build_sampler(model, [params] * len(rows)), *([steps] if steps else []))
    return follow(generate(batch, [row.prompt_ids for row in rows], 6), rows, None, batch)


@pytest.mark.parametrize("params", SAMPLED)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_run_ends_and_names_the_row(model, value, params):
    head = model.head
    for step in (1, 2, 4):
        model.head = Broken(head, value, lambda n, step=step: [1] if n == step else [])
        rows = sequences(3)
        with pytest.raises(NotFinite, match=r"^row 1: the logits are NaN or infinite"):
            run_batch(model, rows, params)
        assert [len(row.ids) for row in rows] == [step, step - 1, step - 1]
    model.head = head
    run_batch(model, rows := sequences(3), params)
    assert all(len(row.ids) == 6 for row in rows)


def test_masked_tokens_are_no_fault(model):
    """-inf for all tokens but one, as grammars and suppressed tokens have it."""
    class Mask(torch.nn.Module):
        def forward(self, x):
            return self.head(x).index_fill(-1, torch.tensor([i for i in range(160) if i != 9]), -torch.inf)
    mask = Mask()
    mask.head, model.head = model.head, mask
    run_batch(model, rows := sequences(2))
    assert rows[0].ids == [9] * 6


def test_speculation_ends_too(model, families):
    draft = load_model(read_checkpoint(families("llama2")[0]), torch.float32, "cpu")
    for value in (torch.nan, torch.inf, -torch.inf):
        for drafter in (None, draft):
            head = model.head
            model.head = Broken(head, value, lambda n: [0] if n > 2 else [])
            batch = speculative(model, 3, drafter, length=64)
            row = Sequence(NullTokenizer(), [5, 9, 5, 9, 5], max_new=20)
            with pytest.raises(NotFinite, match="^the model: the logits"):
                follow(generate(batch, [row.prompt_ids], 20), [row], None, batch)
            model.head = head


def test_a_drafter_s_are_not_the_model_s(model, families):
    """A draft model of NaN only drafts badly."""
    draft = load_model(read_checkpoint(families("llama2")[0]), torch.float32, "cpu")
    with torch.no_grad():
        draft.layers[0].attn.wo.weight[0, 0] = torch.nan
    plain = sequences(1)
    run_batch(model, plain)
    batch = speculative(model, 3, draft, length=64)
    row = sequences(1)[0]
    follow(generate(batch, [row.prompt_ids], 6), [row], None, batch)
    assert row.ids == plain[0].ids


@pytest.mark.parametrize("kind", ["sampler", "request_sampler"])
def test_in_a_server_s_slots_only_that_row_fails(model, kind):
    """And its slot serves the next one as if nothing had been: the cache holds no NaN for masked positions."""
    prompts = [[5, 9, 77], [6, 9, 77], [7, 9, 77], [8, 9], [9, 9]]

    def answers(value=None):
        allocate(model, 3, 32)
        if kind == "sampler":
            sampler = build_sampler(model, [GREEDY] * 3)
        else:
            sampler = request_sampler.build_request_sampler(model, 3, torch.Generator(), lambda params: None)
        slots = Scheduler(RowsBatch(model, sampler), max_prefill=64, reuse=True)
        params = None if kind == "sampler" else request_sampler.GREEDY
        tasks = [Generation(NullTokenizer(), ids, max_new=8 if i else 4, params=params) for i, ids in enumerate(prompts)]
        slots.waiting.extend(tasks)
        failed = []
        weight = model.layers[1].attn.wo.weight
        kept = weight.clone()
        with torch.no_grad():
            for event in slots.run():
                if event.error:
                    assert isinstance(event.error, NotFinite)
                    failed.append(tasks.index(event.generation))
                    weight.copy_(kept)
                    continue
                if value is not None and event.generation is tasks[1] and len(tasks[1].ids) == 3:
                    for layer in model.layers:             # as a token whose activations overflow leaves it
                        layer.attn.cache.v[event.row, :, 1] = value
        return [task.ids for task in tasks], failed
    plain, failed = answers()
    assert not failed
    broken, failed = answers(torch.nan)
    assert failed == [1] and broken[1] == plain[1][:3]
    assert [broken[i] for i in (0, 2, 3, 4)] == [plain[i] for i in (0, 2, 3, 4)]


def test_the_flag_is_read_with_the_tokens():
    """One device read a token, as before."""
    flags = torch.tensor([[0.0], [torch.nan]])
    tokens = [(torch.tensor([[3], [4]]), "tag")]
    assert list(read_late(iter(tokens), flags)) == [([3, None], "tag")] and list(read_late(iter(tokens))) == [([3, 4], "tag")]


def test_compiled_whole_it_is_one_graph(model):
    """As on a GPU: the step with its flag is traced whole."""
    from generate import decode_one_token
    allocate(model, 2, 32)
    sampler = build_sampler(model, [GREEDY] * 2)
    step = torch.compile(decode_one_token, fullgraph=True, dynamic=False, backend="aot_eager")
    token, pos = torch.tensor([[3], [4]]), torch.tensor([[0], [0]])
    with torch.inference_mode():
        step(model, token, pos, 32, sampler)
        assert not sampler.not_finite.any()
        model.norm.weight[0] = torch.nan
        step(model, token, pos, 32, sampler)
    assert sampler.not_finite.isnan().all()


# ---- Commands -----------------------------------------------------------------------------------

COMMON = ["--device", "cpu", "--max_new_tokens", 4, "--temperature", 0]
PROMPT = "".join(chr(256 + i) for i in (5, 9, 33))


@pytest.fixture
def checkpoint(families, tmp_path):
    """value, dtype -> a directory with a tokenizer, one of whose weights has this value."""
    from test_end_tokens import with_files
    base = with_files(families("llama2")[0], tmp_path / "base")

    def get(value, dtype=None, name="layers.1.mlp.up_proj"):
        return damaged(base, tmp_path / f"{value}-{dtype}", name, value, dtype)
    return get


@pytest.mark.parametrize("more", [[], ["--compile"], ["--batch_size", "2"], ["--dtype", "float32"], ["--speculate", "ngram"],
                                  ["--quantize", "none"], ["--no_cache"]])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_the_command(checkpoint, capsys, value, more):
    if more == ["--quantize", "none"]:
        more = ["--num_samples", "2"]
    if more == ["--no_cache"]:
        more = ["--engine", "recompute"]
    status, out, err = run(capsys, "-m", checkpoint(value), *COMMON, "--prompt", PROMPT, *more)
    lines = [line for line in err.splitlines() if "error" in line]
    assert status == 2 and len(lines) == 1 and "the logits are NaN or infinite: a weight is damaged" in lines[0]


def test_many_prompts_name_the_one(checkpoint, capsys, tmp_path):
    (tmp_path / "prompts.txt").write_text(f"{PROMPT}\n{PROMPT[:2]}\n", encoding="utf-8")
    status, _, err = run(capsys, "-m", checkpoint(torch.nan), *COMMON, "--prompts_file", tmp_path / "prompts.txt", "--batch_size", 2)
    assert status == 2 and re.search(r"prompts\.txt:[12]: row [01]: the logits are NaN or infinite", err)


def test_float16_that_overflows_names_bfloat16(checkpoint, capsys):
    path = checkpoint(1e5, torch.bfloat16)
    status, _, err = run(capsys, "-m", path, *COMMON, "--prompt", PROMPT)
    assert status == 0, err
    status, _, err = run(capsys, "-m", path, *COMMON, "--prompt", PROMPT, "--dtype", "float16")
    assert status == 2 and "up_proj.weight has weights up to 9.98e+04, above float16's range: use --dtype bfloat16" in err
    path = checkpoint(6e4, torch.float32, "embed_tokens")  # fits, and activations do not
    tensors = load_file(path / "model.safetensors")
    tensors = {n: t * 3e3 if "mlp" in n else t for n, t in tensors.items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    status, _, err = run(capsys, "-m", path, *COMMON, "--prompt", PROMPT, "--dtype", "float16")
    assert status == 2 and "activations exceed float16's range, use --dtype bfloat16 or float32" in err
    assert run(capsys, "-m", path, *COMMON, "--prompt", PROMPT)[0] == 0


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_an_evaluation(checkpoint, tmp_path, value):
    (tmp_path / "text").write_text(PROMPT * 10, encoding="utf-8")
    done = subprocess.run([sys.executable, ROOT / "eval.py", "-m", checkpoint(value), "--device", "cpu", "--json", "--perplexity", tmp_path / "text"],
                          capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout and "row 0: the logits are NaN or infinite" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_scores_of_multiple_choices(model, value):
    rows = [([5, 9, 7, i], 1) for i in (1, 2, 3)] + [([6, 9], 1)]
    assert len(evaluate.score(model, rows, 2)) == 4
    model.head = Broken(model.head, value, lambda n: [0])
    with pytest.raises(NotFinite, match="row [0-3]: the logits"):
        evaluate.score(model, rows, 2)


# ---- Files that are written ----------------------------------------------------------------------

@pytest.mark.parametrize("name", ["embed_tokens", "layers.1.mlp.up_proj", "layers.0.input_layernorm", "lm_head"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_no_conversion_of_what_is_no_number(families, tmp_path, value, name):
    source = read_checkpoint(damaged(families("llama2")[0], tmp_path / "model", name, value))
    for dtype in (None, torch.bfloat16):
        with pytest.raises(ValueError, match=re.escape(name) + ".* has NaN or infinite weights"):
            save_checkpoint(source, tmp_path / "model.pth", None, dtype)
    for mode in ("int8", "int4"):
        with pytest.raises(ValueError, match="has NaN or infinite weights"):
            save_checkpoint(quantized(source, mode), tmp_path / "model.pth", None)
    assert not (tmp_path / "model.pth").exists()


def test_no_conversion_to_float16_that_overflows(families, tmp_path):
    source = read_checkpoint(damaged(families("llama2")[0], tmp_path / "model", "o_proj", 7e4, torch.bfloat16))
    with pytest.raises(ValueError, match="o_proj.weight has weights up to 7.*e.04, above float16's range: use --dtype bfloat16"):
        save_checkpoint(source, tmp_path / "model.pth", None, torch.float16)
    save_checkpoint(source, tmp_path / "model.pth", None, torch.bfloat16)
    with pytest.raises(ValueError, match="above float16's range"):
        load_model(tp.shard(read_checkpoint(tmp_path / "model.pth")), torch.float16, "cpu")
    assert load_model(replace(source), torch.bfloat16, "cpu")


def test_gptq_of_inputs_that_are_all_zero(families, tmp_path):
    """The values of one layer are zero, so its output projection sees nothing: rounded to nearest."""
    shutil.copytree(families("llama2")[0], tmp_path / "model")
    tensors = load_file(tmp_path / "model/model.safetensors")
    tensors["model.layers.0.self_attn.v_proj.weight"].zero_()
    save_file(tensors, tmp_path / "model/model.safetensors", {"format": "pt"})
    source = read_checkpoint(tmp_path / "model")
    solver = calibrate.Solver(source, torch.randint(160, (4, 32)), "cpu", torch.float32, Int4(32))
    leaves = solver("layers.0.attn.wo.weight")
    w = source.tensors["layers.0.attn.wo.weight"].whole()
    values = Int4(32).dequantize(leaves["weight"], leaves["scales"], leaves["zeros"], torch.float32)
    assert (values - w).norm() < 1.05 * (round_to_nearest(w, Int4(32)) - w).norm()
