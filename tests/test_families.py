"""Every family and every way to store it gives transformers' logits, in fp32."""

import shutil

import pytest
import tiny
import torch

import checkpoint as checkpoints


def tokens(n=24, batch=2, vocab=160):
    return torch.randint(0, vocab, (batch, n), generator=torch.Generator().manual_seed(1))


def our_logits(path, prompt):
    model = checkpoints.load(checkpoints.read(path), torch.float32, "cpu")
    n = prompt.shape[1]
    model.setup_cache(0, n)                                # RoPE for sequences of this length
    return model(prompt, torch.arange(n), keep=n)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * expected.std().item())


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_logits_equal_transformers(families, name):
    directory, model = families(name)
    prompt = tokens()
    expected = tiny.logits(model, prompt)
    assert expected.std() > 0.5                            # weights large enough to show an error
    close(our_logits(directory, prompt), expected)


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_old_config_spelling(families, name, tmp_path):
    directory, model = families(name)
    shutil.copytree(directory, tmp_path / name)
    tiny.old_spelling(tmp_path / name)
    assert checkpoints.read(tmp_path / name).cfg == checkpoints.read(directory).cfg
    close(our_logits(tmp_path / name, tokens()), tiny.logits(model, tokens()))


@pytest.mark.parametrize("name", ["llama3", "qwen2-window", "gemma3"])
def test_sharded_and_bin(families, name, tmp_path):
    directory, model = families(name)
    expected = tiny.logits(model, tokens())
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    close(our_logits(tmp_path / "sharded", tokens()), expected)
    (tmp_path / "bin").mkdir()
    shutil.copy(directory / "config.json", tmp_path / "bin")
    state = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight" or name == "qwen2-window"}
    for zipped in (True, False):                           # the format of today, and of torch < 1.6
        torch.save(state, tmp_path / "bin/pytorch_model.bin", _use_new_zipfile_serialization=zipped)
        close(our_logits(tmp_path / "bin", tokens()), expected)


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_pth_round_trip(families, name, tmp_path):
    directory, model = families(name)
    source = checkpoints.read(directory)
    checkpoints.save(source, tmp_path / "model.pth", None)
    assert [p.name for p in tmp_path.iterdir()] == ["model.pth"]
    again = checkpoints.read(tmp_path / "model.pth")
    assert again.cfg == source.cfg and again.eos_ids == source.eos_ids
    a, b = our_logits(directory, tokens()), our_logits(tmp_path, tokens())
    assert torch.equal(a, b)


def test_bare_pth_with_config_beside(families, tmp_path):
    directory, model = families("llama3")
    shutil.copy(directory / "config.json", tmp_path)
    source = checkpoints.read(directory)
    bare = {name: t.rows(0, t.shape[0]) for name, t in source.tensors.items()}
    torch.save(bare, tmp_path / "model.pth")
    assert torch.equal(our_logits(directory, tokens()), our_logits(tmp_path / "model.pth", tokens()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_near(families, dtype):
    directory, model = families("gemma3_text")
    expected = tiny.logits(model, tokens())
    low = checkpoints.load(checkpoints.read(directory), dtype, "cpu")
    got = low(tokens(), torch.arange(24), keep=24)
    assert got.dtype == torch.float32 and low.norm.weight.dtype == torch.float32
    error = (got - expected).norm() / expected.norm()
    assert error < (0.05 if dtype == torch.bfloat16 else 0.008)


@pytest.mark.parametrize("kind", checkpoints.FAMILIES)
def test_keys_that_config_json_leaves_out(kind):
    """Gemma 3 4B's names seven keys. The others mean what transformers' class says."""
    from transformers import CONFIG_MAPPING
    few = dict(hidden_size=256, intermediate_size=96, num_hidden_layers=8, num_attention_heads=16, vocab_size=99,
               model_type=kind)
    if kind == "gpt2":
        few = dict(n_embd=256, n_layer=8, n_head=16, vocab_size=99, model_type=kind)
    full = CONFIG_MAPPING[kind](**{k: v for k, v in few.items() if k != "model_type"}).to_dict()
    if kind in ("mistral", "qwen2", "qwen3"):              # these state both always
        few["num_key_value_heads"] = full["num_key_value_heads"] = 2
    if kind != "gpt2":
        few["max_position_embeddings"] = full["max_position_embeddings"]
    ours, theirs = checkpoints.config_from_hf(few)[0], checkpoints.config_from_hf(full)[0]
    assert ours == theirs
