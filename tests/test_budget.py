"""--bits: which linears get eight bits, and that such a file is solved, written and run."""

import shutil

import pytest
import torch
from test_quantize import greedy, meant_checkpoint, model, refused, run, text, windows_of  # noqa: F401 (fixtures too)

from checkpoint import disk_names, save_checkpoint
from gpt_faster.formats.load import load_model, read_checkpoint
from gpt_faster.formats.quantize_on_load import quantized
from gpt_faster.kernels.cpu import layers as cpu_layers
from gpt_faster.quantization import budget
from gpt_faster.quantization.solve import round_to_nearest
from quantize import LINEARS, Int4, Int8, describe

FP32, BF16 = torch.float32, torch.bfloat16


def loaded(families, name="llama3"):
    source = read_checkpoint(families(name)[0])
    return source, load_model(source, FP32, "cpu")


@pytest.mark.parametrize("name", ["llama3", "qwen2_moe", "gemma4", "lfm2", "youtu"])
def test_what_is_measured_is_the_divergence(families, name):
    """Of the whole model, with one linear rounded, by F.kl_div; and the model is as it was."""
    source, ours = loaded(families, name)
    before = {n: p.clone() for n, p in ours.state_dict().items()}
    tokens = windows_of()
    costs = budget.measure(ours, tokens, Int4(32))
    assert all(torch.equal(before[n], p) for n, p in ours.state_dict().items())
    names = budget.linears(ours)
    on_disk = {n for name in names for n in disk_names(f"{name}.weight")}
    assert on_disk == {n for n in source.tensors if LINEARS.search(n)}
    assert costs.keys() == names.keys() and min(costs.values()) > 0
    rows = tokens[[0, 1, 3, 4, 5, 6, 8, 9, 10, 11, 13, 14, 15, 16, 18, 19]]       # of 20

    def logits():
        ours.setup_cache(0, 32)
        return ours(rows, torch.arange(32), logits_to_keep=32).log_softmax(-1)
    plain = logits()
    for name in list(names)[::3]:
        weight = names[name].weight
        rounded = Int4(32).quantize(weight.flatten(0, -2))
        rounded = Int4(32).dequantize(*rounded.values(), FP32).view(weight.shape)
        kept = weight.clone()
        weight.copy_(rounded)
        expected = torch.nn.functional.kl_div(logits(), plain, log_target=True, reduction="none").sum(-1).mean()
        weight.copy_(kept)
        assert costs[name] == pytest.approx(float(expected), rel=1e-3, abs=1e-7)


@pytest.mark.parametrize("name", ["llama3", "phi"])                # phi's head has a bias
def test_of_a_large_vocabulary_the_likeliest_count(families, monkeypatch, name):
    """The divergence between what both distributions are among these; the model is as it was."""
    _, ours = loaded(families, name)
    head, tokens = ours.head, windows_of()[:4]
    whole = budget.measure(ours, tokens, Int4(32))
    monkeypatch.setattr(budget, "MAX_CANDIDATES", 24)
    costs = budget.measure(ours, tokens, Int4(32))
    assert ours.head is head and costs.keys() == whole.keys() and costs != whole

    def logits():
        ours.setup_cache(0, 32)
        return ours(tokens, torch.arange(32), logits_to_keep=32)
    plain = logits()
    ids = plain.softmax(-1).mean((0, 1)).argsort(descending=True)[:24]
    plain = plain[..., ids].log_softmax(-1)
    for name, module in list(budget.linears(ours).items())[::3]:
        kept = module.weight.clone()
        module.weight.copy_(round_to_nearest(kept, Int4(32)))
        rounded = logits()[..., ids].log_softmax(-1)
        module.weight.copy_(kept)
        assert costs[name] == pytest.approx(float((plain.exp() * (plain - rounded)).sum(-1).mean()), rel=1e-3, abs=1e-7)


def test_what_is_chosen(families):
    """The most divergence for a bit, as many as fit; never more bits than asked for."""
    _, ours = loaded(families)
    modules = budget.linears(ours)
    names, scheme = list(modules), Int4(32)
    total = sum(m.weight.numel() for m in modules.values())
    costs = {n: 1e-6 for n in names} | {names[3]: 5.0, names[6]: 4.0}

    def bits(chosen):
        return sum(budget.n_bit(m, Int8() if disk_names(f"{n}.weight")[0] in chosen else scheme) for n, m in modules.items()) / total
    assert budget.n_bit(modules[names[0]], scheme) == 5 * modules[names[0]].weight.numel()         # 4 and two scales of 16 for 32
    assert budget.choose(ours, costs, scheme, 5.0) == set()
    seen = set()
    for asked in (5.3, 5.6, 6.0, 7.0, 8.5):
        chosen = budget.choose(ours, costs, scheme, asked)
        assert bits(chosen) <= asked and seen <= chosen
        seen = chosen
    assert len(seen) == sum(len(disk_names(f"{n}.weight")) for n in names)
    enough = (5 * total + sum(budget.n_bit(modules[n], Int8()) - budget.n_bit(modules[n], scheme) for n in (names[3], names[6]))) / total
    assert budget.choose(ours, costs, scheme, enough) == {*disk_names(f"{names[3]}.weight"), *disk_names(f"{names[6]}.weight")}
    with pytest.raises(ValueError, match="--bits 4.9: int4-g32 alone needs 5 bits"):
        budget.choose(ours, costs, scheme, 4.9)


@pytest.mark.parametrize("mode", ["int4", "int4-gptq"])
def test_a_file_within_a_budget(capsys, model, text, mode):        # noqa: F811
    how = ["--calibration_file", text, "--calibration_seq_length", 32, "--calibration_limit", 12, "--bits", 6]
    status, out, err = run(capsys, "-m", model, "--mode", mode, *how)
    name = f"model_{mode}.g32-6bits.pth"
    assert status == 0 and out == f"{model / name}\n" and "linears get int8" in err, err
    source, plain = read_checkpoint(model / name), read_checkpoint(model)
    assert set(describe(source).removesuffix(", head int8").replace(" by GPTQ", "").split("/")) == {"int8", "int4-g32"}
    eight = [n for n in source.tensors if n.endswith(".scales") and n.startswith("layers") and n.replace("scales", "zeros") not in source.tensors]
    for scales in eight:
        n = scales.replace("scales", "weight")
        expected = Int8().quantize(plain.tensors[n].whole())
        assert torch.equal(source.tensors[n].whole(), expected["weight"]) and torch.equal(source.tensors[scales].whole(), expected["scales"])
    assert len(greedy(capsys, "-m", model / name)["new_ids"]) == 20

    prompt, exact = windows_of()[:2], load_model(meant_checkpoint(source), FP32, "cpu")
    ours = load_model(source, BF16, "cpu")
    assert cpu_layers.use_operations(ours)                             # both kinds in a layer
    logits = []
    for m in (exact, ours):
        m.setup_cache(2, 32)
        logits.append(m(prompt, torch.arange(32), logits_to_keep=32).float())
    assert (logits[1] - logits[0]).norm() < 0.03 * logits[0].norm()


def test_budgets_that_are_refused(capsys, model, text, tmp_path):  # noqa: F811
    how = ["-m", model, "--calibration_file", text, "--calibration_seq_length", 32, "--calibration_limit", 12]
    assert "--bits requires --mode int4 or int4-gptq" in refused(capsys, *how, "--mode", "int8", "--bits", 6)
    _, out, err = run(capsys, *how, "--mode", "int4", "--bits", 4.5)
    assert out == "" and "--bits 4.5: int4-g32 alone needs 5" in err.splitlines()[-1]
    assert "must be at least 4" in run(capsys, *how, "--mode", "int4", "--bits", 2)[2]
    hub = tmp_path / "hub.pth"
    save_checkpoint(quantized(read_checkpoint(model), "int4", 32, "none"), hub, None)
    for name in ("tokenizer.json", "chat_template.jinja"):
        shutil.copy(model / name, tmp_path)
    assert "--bits: every linear is quantized already" in run(capsys, "-m", hub, *how[2:], "--mode", "int4", "--bits", 6)[2].splitlines()[-1]
