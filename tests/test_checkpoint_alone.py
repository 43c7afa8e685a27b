"""checkpoint.py and tp.py read a Llama, Mistral, Mixtral or Qwen without any room, as transformers does."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_families import close, tokens

import checkpoint as core
from gpt_faster.formats.load import read_checkpoint

ALONE = Path(__file__).with_name("checkpoint_alone.py")
KINDS = ("llama2", "llama3", "mistral-window", "mixtral", "qwen2", "qwen2-window", "qwen2-yarn", "qwen3", "qwen3_moe")


def sharded(directory, target):
    """The same directory, its weights in two files that an index lists."""
    shutil.copytree(directory, target)
    weights = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    names, where = sorted(weights), {}
    for i, some in enumerate((names[::2], names[1::2])):
        name = f"model-0000{i + 1}-of-00002.safetensors"
        save_file({n: weights[n] for n in some}, target / name)
        where |= dict.fromkeys(some, name)
    (target / "model.safetensors.index.json").write_text(json.dumps(dict(weight_map=where)))
    return target


def test_it_reads_as_transformers_does(families, tmp_path):
    """Safetensors, shards and our .pth, which it writes itself."""
    paths = {}
    for name in KINDS:
        directory, model = families(name)
        paths[str(directory)] = model
        paths[str(sharded(directory, tmp_path / name))] = model
    out = tmp_path / "logits.pt"
    done = subprocess.run([sys.executable, str(ALONE), str(out), str(tmp_path)], input="\n".join(paths), capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    found = torch.load(out, weights_only=True)
    assert len(found) == 2 * len(paths)
    for path, model in paths.items():
        expected = tiny.logits(model, tokens(batch=1))[0]
        close(found[path], expected)
        assert torch.equal(found[path], found[f"{path} as .pth"])


@pytest.mark.parametrize("name", ["llama3", "qwen3_moe"])
def test_two_ranks_are_one_model(families, name):
    """Eager and traced whole by torch.compile, without cli/."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run([*torchrun, str(ALONE), str(families(name)[0])], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "2 ranks agree\n", done.stderr


@pytest.mark.parametrize("name", KINDS)
def test_the_full_tree_reads_the_same(families, name):
    directory, _ = families(name)
    ours, theirs = core.read_checkpoint(directory), read_checkpoint(directory)
    assert ours.cfg == theirs.cfg and ours.tensors.keys() == theirs.tensors.keys()
    assert (ours.eos_ids, ours.defaults) == (theirs.eos_ids, theirs.defaults)
    for n, t in ours.tensors.items():
        assert torch.equal(t.whole(), theirs.tensors[n].whole()), n


@pytest.mark.parametrize("change, message", [
    (dict(model_type="gemma3_text"), "model_type 'gemma3_text' is none of llama, mistral, mixtral, qwen2, qwen3, qwen3_moe: "
                                     "gpt-faster's full tree"),
    (dict(quantization_config=dict(quant_method="awq")), "'quantization_config' is not supported here: gpt-faster's full tree"),
    (dict(partial_rotary_factor=0.5), "'partial_rotary_factor' is not supported here"),
    (dict(hidden_act="gelu"), "activation 'gelu' is not supported (supported: silu)"),
    (dict(rope_parameters=None, rope_scaling=dict(rope_type="longrope", factor=2.0)), "RoPE scaling 'longrope' is not supported"),
    (dict(final_logit_softcapping=30.0), "'final_logit_softcapping' is not supported here"),
    (dict(hidden_size=-1), "'hidden_size' is -1, expected a positive integer"), (dict(rms_norm_eps="x"), "'rms_norm_eps' is 'x'"),
    (dict(layer_types=["chunked_attention"] * 2), "'layer_types' is not"),
    (dict(attention_bias=True), "tensors are missing"), (dict(mlp_bias=True), "tensors are missing"),
    (dict(num_hidden_layers=1), "unexpected tensors"),
    (dict(intermediate_size=64), "but the config asks for"),
])
def test_a_key_is_acted_on_or_refused(families, tmp_path, change, message):
    directory = tmp_path / "model"
    shutil.copytree(families("llama2")[0], directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError) as e:
        core.read_checkpoint(directory)
    assert message in str(e.value) and str(directory) in str(e.value) and "\n" not in str(e.value)


def test_a_pth_of_another_kind_is_refused(families, tmp_path):
    from checkpoint import save_checkpoint
    save_checkpoint(read_checkpoint(families("gemma3")[0]), tmp_path / "model.pth", None)
    with pytest.raises(ValueError, match=r"parts that model.py does not have \(.*gpt-faster's full tree"):
        core.read_checkpoint(tmp_path / "model.pth")
    torch.save(dict(model={}), tmp_path / "other.pth")
    with pytest.raises(ValueError, match="gpt-faster did not write this file"):
        core.read_checkpoint(tmp_path / "other.pth")
    assert read_checkpoint(tmp_path / "model.pth").cfg.block is not None


def test_what_is_not_there():
    with pytest.raises(FileNotFoundError, match="nor is it a hub name"):
        core.open_checkpoint("/nowhere/model.pth")
