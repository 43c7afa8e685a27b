"""LoRA adapters: the logits of PEFT's merged model, whatever kind of adapter it is."""

import json
import shutil

import pytest
import tiny
import torch
from test_families import close, tokens

from gpt_faster.formats.load import load_model, read_checkpoint
from gpt_faster.formats.quantize_on_load import quantized

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
KINDS = {                                                  # what PEFT's config says beside the rank
    "all": dict(target_modules=ALL, lora_alpha=4),
    "rslora": dict(target_modules=["q_proj", "down_proj"], use_rslora=True),
    "dora": dict(target_modules=ALL, use_dora=True),
    "patterns": dict(target_modules=ALL, rank_pattern={"q_proj": 3}, alpha_pattern={"layers.1.self_attn.q_proj": 40}),
    "some layers": dict(target_modules=ALL, layers_to_transform=[1, 2]),
    "embedding and head": dict(target_modules=["embed_tokens", "lm_head", "v_proj"]),
    "a trained head": dict(target_modules=["q_proj"], modules_to_save=["lm_head", "input_layernorm"]),
    "biases": dict(target_modules=["q_proj", "o_proj"], bias="all"),
}
FAMILIES = {"llama-biased": KINDS, "olmo2": ["all"], "glm": ["all"], "glm4": ["all"], "qwen2_vl": ["all"], "cohere": ["all"], "phi3": [], "gpt2": []}
CASES = [(name, kind) for name, kinds in FAMILIES.items() for kind in kinds]


def adapter(families, name, config, directory, seed=3):
    """A random adapter of a tiny model -> its directory, the logits of PEFT's merged model."""
    torch.manual_seed(seed)
    import peft  # takes 4 seconds
    model = peft.get_peft_model(tiny.make(name), peft.LoraConfig(**{"r": 4, "lora_alpha": 8, **config}))
    for key, p in model.named_parameters():
        if "lora_" in key and "magnitude" not in key or p.requires_grad and p.dim() > 1:
            p.data = torch.randn_like(p) * p.shape[-1] ** -0.5
        elif p.requires_grad:
            p.data += 0.3 * torch.randn_like(p).abs()
    model.save_pretrained(directory)
    return directory, tiny.logits(model.merge_and_unload(), tokens())


def our_logits(source):
    model = load_model(source, torch.float32, "cpu")
    model.setup_cache(0, 24)
    return model(tokens(), torch.arange(24), logits_to_keep=24)


@pytest.mark.parametrize("name, kind", CASES)
def test_logits_equal_the_merged_model(families, name, kind, tmp_path):
    path, expected = adapter(families, name, KINDS[kind], tmp_path)
    plain = tiny.logits(families(name)[1], tokens())
    assert (expected - plain).norm() > 0.1 * plain.norm()
    close(our_logits(read_checkpoint(families(name)[0], path)), expected)


def test_fused_and_transposed_matrices(families, tmp_path):
    path, expected = adapter(families, "phi3", dict(target_modules=["qkv_proj", "gate_up_proj", "o_proj"]), tmp_path / "phi3")
    close(our_logits(read_checkpoint(families("phi3")[0], path)), expected)
    for name in ("gpt_neox", "falcon-new"):                # queries, keys and values group by group
        path, expected = adapter(families, name, dict(target_modules=["query_key_value", "dense", "dense_h_to_4h"]), tmp_path / name)
        close(our_logits(read_checkpoint(families(name)[0], path)), expected)
    config = dict(target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)
    path, expected = adapter(families, "gpt2", config, tmp_path / "gpt2")
    close(our_logits(read_checkpoint(families("gpt2")[0], path)), expected)


def test_experts_by_number(families, tmp_path):
    """As adapters of transformers 4 have them: a pair for each expert's matrix."""
    from safetensors.torch import load_file, save_file
    directory, random = families("qwen3_moe")[0], torch.Generator().manual_seed(5)
    disk, pairs = load_file(directory / "model.safetensors"), {}
    for name, w in disk.items():
        if name.endswith("_proj.weight") and ("experts" in name or "self_attn" in name):
            a, b = (torch.randn(*shape, generator=random) / 8 for shape in ((4, w.shape[1]), (w.shape[0], 4)))
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            pairs |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
            disk[name] = w + 2 * b @ a
    assert sum("experts.7.up_proj" in key for key in pairs) > 0
    save_file(pairs, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(dict(peft_type="LORA", r=4, lora_alpha=8)))
    shutil.copytree(directory, tmp_path / "merged")
    save_file(disk, tmp_path / "merged/model.safetensors")
    expected = our_logits(read_checkpoint(tmp_path / "merged"))
    close(our_logits(read_checkpoint(directory, tmp_path)), expected)


def test_it_is_merged_before_rounding(families, tmp_path):
    path, _ = adapter(families, "llama3", KINDS["all"], tmp_path / "adapter")
    import peft
    merged = peft.PeftModel.from_pretrained(tiny.make("llama3"), path).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    ours, theirs = read_checkpoint(families("llama3")[0], path), read_checkpoint(tmp_path / "merged")
    for mode in ("int8", "int4"):
        close(our_logits(quantized(ours, mode)), our_logits(quantized(theirs, mode)))


def change(path, **values):
    path = path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize("values, said", [
    (dict(peft_type="IA3"), "'peft_type' is 'IA3', only LORA is supported"),
    (dict(lora_bias=True), "'lora_bias' is not supported"),
    (dict(lora_alpha="8"), "'lora_alpha' is '8', expected a number"),
    (dict(lora_alpha=True), "'lora_alpha' is True, expected a number"),
    (dict(alpha_pattern=3), "'alpha_pattern' is 3, expected a map from module patterns"),
    (dict(alpha_pattern={"(": 3}), "'alpha_pattern' is .*, expected a map from module patterns"),
])
def test_other_kinds_are_refused(families, values, said, tmp_path):
    path, _ = adapter(families, "llama3", KINDS["all"], tmp_path)
    change(path, **values)
    with pytest.raises(ValueError, match=said):
        read_checkpoint(families("llama3")[0], path)


def test_what_does_not_fit(families, tmp_path):
    path, _ = adapter(families, "llama3", KINDS["all"], tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"k_proj.weight has shape \[48, 64\], but the adapter is for \[32, 64\]"):
        read_checkpoint(families("qwen3")[0], path)
    with pytest.raises(ValueError, match="adapter modules .* are not in the model: load the adapter with the base model"):
        read_checkpoint(families("gpt2")[0], path)
    (path / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="neither adapter_model.safetensors nor"):
        read_checkpoint(families("llama3")[0], path)
    (path / "adapter_config.json").unlink()
    with pytest.raises(FileNotFoundError, match="adapter_config.json: missing"):
        read_checkpoint(families("llama3")[0], path)


@pytest.mark.parametrize("how", ["safetensors", "bin", "old bin"])
def test_a_float64_model_is_not_changed_by_reading_it(families, tmp_path, how):
    """Rows of such a file are its bytes in memory: what is read twice is merged once."""
    from safetensors.torch import load_file, save_file
    base = tmp_path / "model"
    shutil.copytree(families("llama3")[0], base)
    tensors = {name: t.double() for name, t in load_file(base / "model.safetensors").items()}
    (base / "model.safetensors").unlink()
    if how == "safetensors":
        save_file(tensors, base / "model.safetensors")
    else:
        torch.save(tensors, base / "pytorch_model.bin", _use_new_zipfile_serialization=how == "bin")
    q = "model.layers.0.self_attn.q_proj"
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text('{"peft_type": "LORA", "lora_alpha": 8, "r": 4}')
    a, b = torch.randn(4, tensors[f"{q}.weight"].shape[1]), torch.randn(tensors[f"{q}.weight"].shape[0], 4)
    save_file({f"base_model.model.{q}.lora_A.weight": a, f"base_model.model.{q}.lora_B.weight": b}, tmp_path / "adapter/adapter_model.safetensors")
    merged = read_checkpoint(base, tmp_path / "adapter").tensors["layers.0.attn.wq.weight"]
    first, again = merged.whole().clone(), merged.whole()
    torch.testing.assert_close(first.double(), tensors[f"{q}.weight"] + 2 * b.double() @ a.double(), rtol=1e-5, atol=1e-5)
    assert torch.equal(first, again)
