"""Tied or not: whatever a config says, the output layer is what the tensors are; adapters included."""

import copy
import json
import shutil

import peft
import pytest
import tiny
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_families import close, tokens

import tp
from checkpoint import save_checkpoint
from gpt_faster.formats.load import load_model, read_checkpoint
from gpt_faster.formats.quantize_on_load import quantized

NOTE = "the config ties the output layer to the embedding, but they differ"
FAMILIES = ("llama3", "qwen2", "gemma2", "gpt2", "granite", "gemma3")         # whose tiny configs tie; the last is multimodal


def our_logits(source, dtype=torch.float32):
    model = load_model(source, dtype, "cpu")
    model.setup_cache(0, 24)
    return model(tokens(), torch.arange(24), logits_to_keep=24)


def with_head(directory, path, head="random", **config):
    """A copy of a tied checkpoint with an lm_head: random numbers, or the embedding's."""
    shutil.copytree(directory, path)
    tensors = load_file(path / "model.safetensors")
    name = next(n for n in tensors if n.endswith(("embed_tokens.weight", "wte.weight")))
    assert not any("lm_head" in n for n in tensors)
    torch.manual_seed(5)
    tensors["lm_head.weight"] = tensors[name].clone() if head == "copy" else torch.randn_like(tensors[name]) * 0.2
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    if config:
        change_config(path, **config)
    return path


def change_config(path, **values):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **values}))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_head_of_its_own_is_used(families, tmp_path, capsys, name):
    path = with_head(families(name)[0], tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    source = read_checkpoint(path)
    said = capsys.readouterr().err
    assert not source.cfg.tied and said.count(NOTE) == 1
    tied = read_checkpoint(families(name)[0])
    assert (our_logits(source) - our_logits(tied)).abs().max() > 0.1
    close(our_logits(source), tiny.logits(model, tokens()))


@pytest.mark.parametrize("layout", ["shards", "bin", "bin shards"])
def test_wherever_the_head_lies(families, tmp_path, capsys, layout):
    path = with_head(families("llama3")[0], tmp_path / "model")
    expected = our_logits(read_checkpoint(path))
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    ending = "bin" if "bin" in layout else "safetensors"
    stem = "pytorch_model" if ending == "bin" else "model"
    save = torch.save if ending == "bin" else save_file
    if layout == "bin":
        save(tensors, path / "pytorch_model.bin")
    else:
        parts = {f"{stem}-00001-of-00002.{ending}": [n for n in tensors if n != "lm_head.weight"],
                 f"{stem}-00002-of-00002.{ending}": ["lm_head.weight"]}
        for file, names in parts.items():
            save({n: tensors[n] for n in names}, path / file)
        index = {"weight_map": {n: file for file, names in parts.items() for n in names}}
        (path / f"{stem}.{ending}.index.json").write_text(json.dumps(index))
    capsys.readouterr()
    source = read_checkpoint(path)
    assert NOTE in capsys.readouterr().err
    assert torch.equal(our_logits(source), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode, head", [(None, None), ("int8", "int8"), ("int4", "int8"), ("int4", "none"), ("int4", "int4")])
def test_in_every_form_it_is_what_an_honest_config_gives(families, tmp_path, mode, head, dtype):
    """Rounded while loading, written and read again, and each of two ranks."""
    path = with_head(families("llama3")[0], tmp_path / "model")
    honest = with_head(families("llama3")[0], tmp_path / "honest", tie_word_embeddings=False)
    source, expected = read_checkpoint(path), read_checkpoint(honest)
    if mode:
        source, expected = quantized(source, mode, 32, head), quantized(expected, mode, 32, head)
    assert torch.equal(our_logits(source, dtype), our_logits(expected, dtype))
    save_checkpoint(source, tmp_path / "model.pth", None)
    again = read_checkpoint(tmp_path / "model.pth")
    assert not again.cfg.tied and torch.equal(our_logits(again, dtype), our_logits(expected, dtype))
    for me in range(2):
        if mode != "int4":                         # its groups are as wide as the tiny widths
            parts, wanted = (tp.shard(s, 2, me).tensors for s in (again, expected))
            assert parts.keys() == wanted.keys()
            assert all(torch.equal(parts[n].whole().float(), wanted[n].whole().float()) for n in parts)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_copy_of_the_embedding_stays_tied(families, tmp_path, capsys, name):
    path = with_head(families(name)[0], tmp_path / "model", "copy")
    source = read_checkpoint(path)
    assert source.cfg.tied and "head.weight" not in source.tensors and NOTE not in capsys.readouterr().err
    assert torch.equal(our_logits(source), our_logits(read_checkpoint(families(name)[0])))


def test_one_matrix_under_the_name_of_the_head(families, tmp_path):
    path = with_head(families("llama3")[0], tmp_path / "model", "copy")
    tensors = load_file(path / "model.safetensors")
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    source = read_checkpoint(path)
    assert source.cfg.tied
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    close(our_logits(source), tiny.logits(model, tokens()))


def test_without_a_head_and_not_tied_it_is_refused(families, tmp_path):
    """transformers would draw one at random."""
    path = tmp_path / "model"
    shutil.copytree(families("llama3")[0], path)
    change_config(path, tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"no output layer \(lm_head.weight\).*'tie_word_embeddings'"):
        read_checkpoint(path)


@pytest.mark.parametrize("top, text, is_tied", [
    (True, None, True), (None, True, True), (True, False, True), (False, True, True), (None, None, True),
    (False, None, True), (None, False, False), (False, False, False)])      # False, None: Gemma's default is true
def test_either_level_of_a_multimodal_config_may_tie(families, tmp_path, top, text, is_tied):
    """But where one says false and none says true, transformers would draw the output layer at random."""
    path = tmp_path / "model"
    shutil.copytree(families("gemma3")[0], path)
    config = json.loads((path / "config.json").read_text())
    for level, value in ((config, top), (config["text_config"], text)):
        level.pop("tie_word_embeddings", None)
        level |= {} if value is None else {"tie_word_embeddings": value}
    (path / "config.json").write_text(json.dumps(config))
    if is_tied:
        assert read_checkpoint(path).cfg.tied
    else:
        with pytest.raises(ValueError, match="no output layer"):
            read_checkpoint(path)


# ---- Adapters -----------------------------------------------------------------------------------

EMBED, HEAD, BOTH, Q = ["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"], ["q_proj"]
ADAPTERS = {
    "lora embed": dict(target_modules=EMBED), "lora head": dict(target_modules=HEAD), "lora both": dict(target_modules=BOTH),
    "save embed": dict(target_modules=Q, modules_to_save=EMBED), "save head": dict(target_modules=Q, modules_to_save=HEAD),
    "save both": dict(target_modules=Q, modules_to_save=BOTH),
    "lora embed, save head": dict(target_modules=EMBED, modules_to_save=HEAD),
    "lora head, save embed": dict(target_modules=HEAD, modules_to_save=EMBED),
    "neither": dict(target_modules=Q),
    "tied lora": dict(target_modules=EMBED, ensure_weight_tying=True),
    "tied lora, by the head": dict(target_modules=HEAD, ensure_weight_tying=True),
    "tied save": dict(target_modules=Q, modules_to_save=EMBED, ensure_weight_tying=True),
    "tied save, by the head": dict(target_modules=Q, modules_to_save=HEAD, ensure_weight_tying=True),
}
STAY_TIED = ("neither", "tied save", "tied save, by the head")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """kind, the base layer beside it or not -> (directory, logits of PEFT's model as it was trained), of a tied llama3."""
    made = {}

    def get(kind, base_layer=False):
        if (kind, base_layer) not in made:
            path = tmp_path_factory.mktemp("adapter")
            torch.manual_seed(3)
            model = peft.get_peft_model(tiny.make("llama3"), peft.LoraConfig(r=4, lora_alpha=8, **copy.deepcopy(ADAPTERS[kind])))
            for p in model.parameters():
                if p.requires_grad:
                    p.data.copy_(torch.randn_like(p) * 0.2)     # in place: some are views of others
            model.save_pretrained(path, save_embedding_layers=base_layer)
            made[kind, base_layer] = path, tiny.logits(model.eval(), tokens())
        return made[kind, base_layer]
    return get


@pytest.mark.parametrize("base_layer", [False, True])
@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_of_either(families, adapters, tmp_path, kind, copy, base_layer):
    base = families("llama3")[0]
    if copy:
        base = with_head(base, tmp_path / "model", "copy")
    path, expected = adapters(kind, base_layer)
    source = read_checkpoint(base, path)
    close(our_logits(source), expected)
    assert (our_logits(source) - our_logits(read_checkpoint(base))).abs().max() > 0.05
    if "lora" not in kind:
        assert source.cfg.tied == (kind in STAY_TIED)


@pytest.mark.parametrize("kind", ["tied lora", "tied save"])
def test_what_an_adapter_ties_it_need_not_hold_twice(families, adapters, tmp_path, kind):
    path, expected = adapters(kind)
    shutil.copytree(path, tmp_path / "adapter")
    file = tmp_path / "adapter/adapter_model.safetensors"
    save_file({n: t for n, t in load_file(file).items() if "lm_head" not in n}, file)
    for base in (families("llama3")[0], with_head(families("llama3")[0], tmp_path / "model", "copy")):
        source = read_checkpoint(base, tmp_path / "adapter")
        assert source.cfg.tied
        close(our_logits(source), expected)


@pytest.mark.parametrize("kind", ["lora embed", "lora head", "save embed", "save both"])
def test_adapters_in_every_form(families, adapters, tmp_path, kind):
    """bfloat16 as PEFT's in bfloat16; rounded, written and shared as a merged checkpoint would be."""
    path, expected = adapters(kind)
    source = read_checkpoint(families("llama3")[0], path)
    low = our_logits(source, torch.bfloat16)
    assert (low - expected).norm() < 0.03 * expected.norm()
    save_checkpoint(source, tmp_path / "model.pth", None)
    merged = read_checkpoint(tmp_path / "model.pth")
    assert not merged.cfg.tied
    for mode, head in (("int8", "int8"), ("int4", "int8"), ("int4", "none"), ("int4", "int4")):
        rounded = our_logits(quantized(source, mode, 32, head))
        assert torch.equal(rounded, our_logits(quantized(merged, mode, 32, head)))
        assert (rounded - expected).norm() < (0.1 if mode == "int8" else 0.5) * expected.norm()
    for me in range(2):
        parts, wanted = (tp.shard(s, 2, me).tensors for s in (source, merged))
        assert all(torch.equal(parts[n].whole().float(), wanted[n].whole().float()) for n in wanted)


def test_an_adapter_of_a_head_by_another_name(families, tmp_path):
    """GPT-NeoX calls its output layer embed_out; and a base whose config is wrong is not tied for an adapter either."""
    torch.manual_seed(3)
    model = peft.get_peft_model(tiny.make("gpt_neox-sequential"), peft.LoraConfig(r=4, lora_alpha=8, target_modules=["embed_out", "embed_in"]))
    for p in model.parameters():
        if p.requires_grad:
            p.data.copy_(torch.randn_like(p) * 0.2)     # in place: some are views of others
    model.save_pretrained(tmp_path / "neox", save_embedding_layers=False)
    close(our_logits(read_checkpoint(families("gpt_neox-sequential")[0], tmp_path / "neox")), tiny.logits(model.eval(), tokens()))
    base = with_head(families("llama3")[0], tmp_path / "model")
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(r=4, target_modules=[*HEAD]))
    for p in model.parameters():
        if p.requires_grad:
            p.data.copy_(torch.randn_like(p) * 0.2)     # in place: some are views of others
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    close(our_logits(read_checkpoint(base, tmp_path / "adapter")), tiny.logits(model.eval(), tokens()))


@pytest.mark.parametrize("kind", ["tied lora", "tied save", "lora embed", "save embed"])
@pytest.mark.parametrize("name, embed, other", [("gpt2", "wte", "c_attn"), ("falcon", "word_embeddings", "query_key_value")])
def test_peft_ties_embeddings_of_one_name_only(families, tmp_path, name, embed, other, kind):
    """'ensure_weight_tying' does nothing for an embedding that is not called embed_tokens (PEFT warns)."""
    config = {key: [{"embed_tokens": embed, "q_proj": other}[one] for one in value] if isinstance(value, list) else value
              for key, value in ADAPTERS[kind].items()}
    torch.manual_seed(3)
    model = peft.get_peft_model(tiny.make(name), peft.LoraConfig(r=4, lora_alpha=8, **config))
    for p in model.parameters():
        if p.requires_grad:
            p.data.copy_(torch.randn_like(p) * 0.2)     # in place: some are views of others
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    source = read_checkpoint(families(name)[0], tmp_path / "adapter")
    assert not source.cfg.tied
    close(our_logits(source), tiny.logits(model.eval(), tokens()))
