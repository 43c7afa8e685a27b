"""A beginning token in each window of perplexity and calibration; linears that see no inputs are rounded to nearest."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_eval import run as evaluate
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import generate
from gpt_faster import loading
from gpt_faster.cli import evaluate as evaluation
from gpt_faster.cli import quantizing
from gpt_faster.formats.load import read_checkpoint
from gpt_faster.quantization import calibrate
from gpt_faster.text import tokenizer_files
from quantize import Int4

PREFIXES = {"none": [], "one": ["<s>"], "two": ["[g]", "<s>"]}


def with_tokenizer(directory, path, prefix):
    """A copy of a tiny model whose tokenizer puts these tokens before a text; words w0, w1, … are ids 3, 4, …"""
    shutil.copytree(directory, path)
    fast = Tokenizer(models.WordLevel({"[g]": 0, "<s>": 1, "?": 2, **{f"w{i}": i + 3 for i in range(150)}}, unk_token="?"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast.add_special_tokens(["[g]", "<s>"])
    if prefix:
        fast.post_processor = processors.TemplateProcessing(
            single=" ".join([*prefix, "$A"]), special_tokens=[(t, fast.token_to_id(t)) for t in prefix])
    fast.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(
        dict(tokenizer_class="PreTrainedTokenizerFast", **(dict(bos_token="<s>") if prefix else {}))))
    return path


def words(n, seed=1):
    return " ".join(f"w{i}" for i in torch.randint(0, 150, (n,), generator=torch.Generator().manual_seed(seed)).tolist())


@torch.no_grad()
def inserted(model, ids, prefix, window, stride):
    """Perplexity by transformers: the prefix is inserted before each piece of `window` less its length; ids are without it."""
    logps, done = [], 0
    for begin in range(0, len(ids), stride):
        piece = ids[begin:begin + window - len(prefix)]
        row = torch.tensor([[*prefix, *piece]])
        scores = model(row).logits[0].log_softmax(-1)
        first = max(begin, done) if prefix else max(begin + 1, done)           # without a prefix the first has no context
        for i in range(first, begin + len(piece)):
            at = len(prefix) + i - begin
            logps.append(float(scores[at - 1, row[0, at]]))
        done = begin + len(piece)
        if done == len(ids):
            return math.exp(-sum(logps) / len(logps)), len(logps)


@pytest.mark.parametrize("family", ["llama2", "gemma3_text"])
@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("window, stride", [(32, 16), (20, 7), (20, 17), (200, 100)])
def test_perplexity_is_transformers_with_the_prefix_in_each_window(families, tmp_path, capsys, family, prefix, window, stride):
    directory, theirs = families(family)
    path = with_tokenizer(directory, tmp_path / "model", PREFIXES[prefix])
    text = words(90)
    (tmp_path / "text").write_text(text)
    length = min(window, read_checkpoint(path).cfg.context)
    argv = ["-m", path, "--perplexity", tmp_path / "text", "--device", "cpu", "--dtype", "float32", "--json",
            "--max_seq_length", length, "--stride", stride]
    status, out, err = evaluate(capsys, *argv)
    assert status == 0, err
    result = json.loads(out)
    ids = [int(word[1:]) + 3 for word in text.split()]
    prefix_ids = [{"[g]": 0, "<s>": 1}[t] for t in PREFIXES[prefix]]
    perplexity, n = inserted(theirs, ids, prefix_ids, length, stride)
    assert result["tokens"] == n and result["perplexity"] == pytest.approx(perplexity, rel=1e-5)
    assert result["bos_in_each_window"] == bool(prefix_ids)
    status, out, err = evaluate(capsys, *argv, "--no_bos")                     # the old way: before the text only
    old = json.loads(out)
    assert status == 0 and not old["bos_in_each_window"]
    rows = evaluation.windows(prefix_ids + ids, length, stride)
    assert old["tokens"] == sum(n for _, n in rows)
    same = not prefix_ids or len(prefix_ids) == len(rows) == 1               # the second of two beginning tokens was scored
    assert (old["perplexity"] == pytest.approx(result["perplexity"], rel=1e-9)) == same


def test_each_token_after_the_prefix_is_scored_once():
    ids = list(range(50))
    for prefix in ([], [0], [0, 1], [0, 1, 2]):
        p = max(1, len(prefix))
        for window, stride in ((10, 3), (10, 10 - p), (50, 25), (64, 64)):
            rows = evaluation.windows(ids, window, stride, prefix)
            assert [i for row, n in rows for i in row[len(row) - n:]] == ids[p:], (prefix, window, stride)
            assert all(row[:len(prefix)] == prefix and len(row) <= window for row, _ in rows)
    assert evaluation.windows(list(range(11)), 5, 5, [0, 1]) == [([0, 1, 2, 3, 4], 3), ([0, 1, 7, 8, 9], 3), ([0, 1], 0)]


def test_windows_without_room(families, tmp_path, capsys):
    path = with_tokenizer(families("llama2")[0], tmp_path / "model", PREFIXES["two"])
    (tmp_path / "text").write_text(words(9))
    status, _, err = evaluate(capsys, "-m", path, "--perplexity", tmp_path / "text", "--max_seq_length", 2)
    assert status == 2 and "a window of 2 tokens has no room for text after the 2 beginning tokens: use longer ones, or --no_bos" in err
    status, _, err = evaluate(capsys, "-m", path, "--tasks", "x", "--no_bos")
    assert status == 2 and "--no_bos requires --perplexity" in err


# ---- Calibration --------------------------------------------------------------------------------

@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("no_bos", [False, True])
def test_calibration_begins_each_window_with_it(families, tmp_path, prefix, no_bos):
    path = with_tokenizer(families("llama2")[0], tmp_path / "model", PREFIXES[prefix])
    (tmp_path / "text").write_text(words(100))
    argv = ["-m", path, "--mode", "int4-gptq", "--calibration_file", tmp_path / "text", "--calibration_seq_length", 16]
    args = quantizing.build_parser().parse_args([*map(str, argv), *["--no_bos"] * no_bos])
    tokens = quantizing.calibration_tokens(args, read_checkpoint(path), torch.device("cpu"))
    tokenizer = tokenizer_files.load(path)
    begin, ids = tokenizer.prefix if tokenizer.add_bos else [], tokenizer.encode(words(100), bos=False)
    if no_bos:
        assert tokens.flatten().tolist() == (begin + ids)[:tokens.numel()]
    else:
        assert all(row[:len(begin)] == begin for row in tokens.tolist())
        assert tokens[:, len(begin):].flatten().tolist() == ids[:len(tokens) * (16 - len(begin))]
    assert tokens.shape == (6 if no_bos or not begin else 100 // (16 - len(begin)), 16)


def test_padding_and_too_little_text():
    ids = list(range(10, 20))
    assert calibrate.split_windows(ids, 5, 9, True, [1]).tolist() == [[1, 10, 11, 12, 13], [1, 14, 15, 16, 17], [1, 18, 19, 0, 0]]
    assert calibrate.split_windows(ids, 5, 9, False, [1, 2]).tolist() == [[1, 2, *ids[i:i + 3]] for i in (0, 3, 6)]
    with pytest.raises(ValueError, match="has 7 tokens, less than two windows of 5"):
        calibrate.split_windows(ids[:7], 5, 9, False, [1])


# ---- lm-eval ------------------------------------------------------------------------------------

def test_answers_of_a_model_with_a_beginning_token_are_hflm_s(families, tmp_path):
    """Multiple choice and rolling log-likelihood, texts that are longer than the context too."""
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer
    directory, theirs = families("llama2")
    path = with_tokenizer(directory, tmp_path / "model", PREFIXES["one"])
    model, source, own = loading.load_model(path, "cpu", torch.float32, engine="kv_cache")
    ours = type("Ours", (evaluation.LMEvalModel, TemplateLM), {})(model, source, own, generate.Steps(), False, 3, 32)
    reference = HFLM(pretrained=theirs, tokenizer=AutoTokenizer.from_pretrained(path), batch_size=2, max_length=32)
    assert ours.tok_encode("w1 w2") == reference.tok_encode("w1 w2") == [1, 4, 5]
    asked = dict(loglikelihood=[("w1 w2 w3", " w4"), ("w1 w2 w3", " w5 w6"), ("", "w7 w8"), (words(50), " w9"), ("<s> w1", " w2")],
                 loglikelihood_rolling=[(words(20),), (words(80),), (words(31),), (words(32),)])
    for kind, arguments in asked.items():
        requests = [Instance(request_type=kind, doc={}, arguments=a, idx=i) for i, a in enumerate(arguments)]
        expected = torch.tensor(getattr(reference, kind)(requests, disable_tqdm=True), dtype=torch.float64)
        answers = torch.tensor(getattr(ours, kind)(requests, disable_tqdm=True), dtype=torch.float64)
        torch.testing.assert_close(answers, expected, rtol=1e-5, atol=1e-4)


# ---- Linears without inputs ---------------------------------------------------------------------

def solver_of(directory, tmp_path, change):
    shutil.copytree(directory, tmp_path / "changed")
    tensors = load_file(tmp_path / "changed/model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "changed/model.safetensors", {"format": "pt"})
    source = read_checkpoint(tmp_path / "changed")
    tokens = torch.randint(160, (4, 32), generator=torch.Generator().manual_seed(3))
    return source, calibrate.Solver(source, tokens, "cpu", torch.float32, Int4(32))


def zero(name):
    def change(tensors):
        tensors[name].zero_()
    return change


@pytest.mark.parametrize("zeroed, unseen", [
    ("model.layers.0.self_attn.v_proj.weight", ["attn.wo"]), ("model.layers.0.mlp.up_proj.weight", ["ffn.down"]),
    ("model.layers.0.input_layernorm.weight", ["attn.wq", "attn.wk", "attn.wv", "attn.wo"]),
    ("model.layers.0.post_attention_layernorm.weight", ["ffn.gate", "ffn.up", "ffn.down"])])
def test_linears_that_see_only_zeros_are_rounded_to_nearest(families, tmp_path, capsys, zeroed, unseen):
    source, solver = solver_of(families("llama2")[0], tmp_path, zero(zeroed))
    solved = {name: solver(f"layers.0.{name}.weight") for name in dict.fromkeys(["attn.wq", *unseen])}
    for name in unseen:
        expected = Int4(32).quantize(source.tensors[f"layers.0.{name}.weight"].whole())
        assert all(torch.equal(solved[name][leaf], expected[leaf]) for leaf in expected), name
    if "attn.wq" not in unseen:
        expected = Int4(32).quantize(source.tensors["layers.0.attn.wq.weight"].whole())
        assert not torch.equal(solved["attn.wq"]["weight"], expected["weight"])
    err = capsys.readouterr().err
    assert err.count("no inputs but zeros in the calibration text, so the weights are rounded to nearest") >= 1
    assert "percdamp" not in err


def test_experts_that_are_never_chosen(families, tmp_path, capsys):
    """One token only: the hidden states are all the same, so each position chooses the same two experts."""
    source = read_checkpoint(families("mixtral")[0])
    solver = calibrate.Solver(source, torch.full((4, 32), 9), "cpu", torch.float32, Int4(32))
    solver("layers.0.attn.wq.weight")
    n = source.tensors["layers.0.ffn.gate.weight"].shape[0]
    assert f"note: {n - 2} of {n} experts of layers.0.ffn.gate: no inputs but zeros" in capsys.readouterr().err


@pytest.mark.parametrize("scale", [1e-12, 1e-18, 1e6])
def test_inputs_of_any_size(families, tmp_path, scale):
    """Hessians whose entries fp32 holds only just: the same codes' quality as of usual inputs."""
    name = "model.layers.0.post_attention_layernorm.weight"

    def change(tensors):
        tensors[name] *= scale
    source, solver = solver_of(families("llama2")[0], tmp_path, change)
    leaves = solver("layers.0.ffn.gate.weight")
    w = source.tensors["layers.0.ffn.gate.weight"].whole()
    values = Int4(32).dequantize(leaves["weight"], leaves["scales"], leaves["zeros"], torch.float32)
    assert (values - w).norm() < 0.3 * w.norm()
