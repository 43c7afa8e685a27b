"""Gemma 4: what only its layers have, and its GGUF as llama.cpp's converter writes it."""

import copy
import json
import shutil
from dataclasses import replace

import gguf
import numpy as np
import pytest
import tiny
import torch
from test_families import close, our_logits, tokens

from checkpoint import blank_model, load_part, save_checkpoint
from gpt_faster.formats import load
from gpt_faster.formats.config import config_from_hf
from gpt_faster.formats.known_shapes import SHAPES, random_checkpoint
from gpt_faster.formats.load import count_parameters, is_offloaded, load_model, read_checkpoint
from gpt_faster.layers.per_layer import FileTable
from gpt_faster.layers.shared_kv import SharedAttention
from gpt_faster.text.gguf_tokenizer import from_gguf
from model import cache_bytes

FP32 = torch.float32


# ---- GGUF ---------------------------------------------------------------------------------------

def write_gguf(model, path):
    """As conversion/gemma.py's Gemma4Model: no 1 + w, both kinds of heads, unrotated frequencies at 1e30."""
    c, w = model.config.get_text_config(), gguf.GGUFWriter(str(path), "gemma4")
    full, sliding = (c.layer_types.index(f"{kind}_attention") for kind in ("full", "sliding"))
    slides = [kind == "sliding_attention" for kind in c.layer_types]
    heads = [c.per_layer_config[i] for i in range(c.num_hidden_layers)]
    w.add_context_length(c.max_position_embeddings)
    w.add_embedding_length(c.hidden_size)
    w.add_block_count(c.num_hidden_layers)
    w.add_head_count(c.num_attention_heads)
    n_shared = c.num_kv_shared_layers
    first = c.num_hidden_layers - n_shared
    is_double = getattr(c, "use_double_wide_mlp", False)
    w.add_feed_forward_length([c.intermediate_size * (2 if is_double and i >= first else 1) for i in range(c.num_hidden_layers)]
                              if is_double else c.intermediate_size)
    kv = [h.num_key_value_heads for h in heads]
    w.add_head_count_kv(kv if c.attention_k_eq_v else kv[0])
    w.add_layer_norm_rms_eps(c.rms_norm_eps)
    w.add_shared_kv_layers(n_shared)
    w.add_embedding_length_per_layer_input(getattr(c, "hidden_size_per_layer_input", 0))
    w.add_sliding_window(c.sliding_window)
    w.add_sliding_window_pattern(slides)
    w.add_key_length(heads[full].head_dim)
    w.add_value_length(heads[full].head_dim)
    w.add_key_length_swa(heads[sliding].head_dim)
    w.add_value_length_swa(heads[sliding].head_dim)
    w.add_final_logit_softcapping(c.final_logit_softcapping)
    w.add_rope_freq_base(c.rope_parameters["full_attention"]["rope_theta"])
    w.add_rope_freq_base_swa(c.rope_parameters["sliding_attention"]["rope_theta"])
    w.add_rope_dimension_count(heads[full].head_dim)
    w.add_rope_dimension_count_swa(heads[sliding].head_dim)
    if getattr(c, "num_experts", None):
        w.add_expert_count(c.num_experts)
        w.add_expert_used_count(c.top_k_experts)
        w.add_expert_feed_forward_length(c.moe_intermediate_size)
    half = heads[full].head_dim // 2
    w.add_tensor("rope_freqs.weight", np.array([1.0] * (half // 4) + [1e30] * (half - half // 4), np.float32))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, c.num_hidden_layers)
    for name, t in model.state_dict().items():
        if name == "lm_head.weight" or "vision" in name or "audio" in name:
            continue
        name = name.replace("language_model.", "")
        layer = name.split(".")[2]
        if name.endswith("router.scale"):
            theirs = f"blk.{layer}.ffn_gate_inp.scale"
        elif name.endswith("per_expert_scale"):
            theirs = f"blk.{layer}.ffn_down_exps.scale"
        else:
            name += "" if name.endswith(".weight") else ".weight"
            theirs = names.get_name(name, (".weight",))
        w.add_tensor(theirs, t.float().contiguous().numpy())
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


GGUFS = dict.fromkeys(["gemma4", "gemma4-31b", "gemma4-26b", "gemma4_unified"], "gemma4")


@pytest.mark.parametrize("name", GGUFS)
def test_gguf(families, name, tmp_path):
    directory, model = families(name)
    path = write_gguf(model, tmp_path / "model.gguf")
    eps = model.config.get_text_config().rms_norm_eps      # fp32 in a GGUF
    assert replace(read_checkpoint(path).cfg, norm_eps=eps) == read_checkpoint(directory).cfg
    close(our_logits(path, tokens()), tiny.logits(model, tokens()))


def test_gguf_tokenizer():
    """As a tokenizer.json of Gemma's kind makes of the same pieces, with lines, spaces, bytes and special tokens."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    space = "\N{LOWER ONE EIGHTH BLOCK}"
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    theirs = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    theirs.normalizer = normalizers.Replace(" ", space)
    theirs.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(space, "merged_with_next"),
                                                    pre_tokenizers.Split("\n", "isolated")])      # while it learns
    theirs.decoder = decoders.Sequence([decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse()])
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    text = [f"The {word} of the {word}s, and {n} more.\n\n  Indented {word}" for n, word in enumerate("river stone house tree".split())]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=[*special, *bytes_, "<turn|>"], show_progress=False)
    theirs.train_from_iterator(text, trainer)
    theirs.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    model = json.loads(theirs.to_str())["model"]
    tokens_ = sorted(model["vocab"], key=model["vocab"].get)
    kinds = [3 if t in (*special, "<turn|>") else 6 if t in bytes_ else 1 for t in tokens_]
    merges = [" ".join(m) for m in model["merges"]]
    ours = from_gguf({"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.tokens": tokens_, "tokenizer.ggml.merges": merges,
                      "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.bos_token_id": 2, "tokenizer.ggml.unknown_token_id": 3,
                      "tokenizer.ggml.add_bos_token": True})
    assert ours["bos_id"] == 2 and ours["add_bos"]
    for line in (*text, "a stone  in\nthe river", "Straße, naïve 河"):
        ids = ours["backend"].encode(line, special=False)
        assert ids == theirs.encode(line, add_special_tokens=False).ids, line
        assert ours["backend"].decode(ids) == line
    assert ours["backend"].encode("stone<turn|>", special=True)[-1] == tokens_.index("<turn|>")


# ---- Keys of other layers, and the table ---------------------------------------------------------

def test_later_layers_have_no_cache(ours):
    model = ours("gemma4")
    model.setup_cache(2, 40, 8)
    shared = [isinstance(layer.attn, SharedAttention) for layer in model.layers]
    assert shared == [False] * 3 + [True] * 3
    assert not [b for layer in model.layers[3:] for b in layer.attn.buffers()]
    n = 2 * 2 * 4 * (15 * 16 + 15 * 16 + 40 * 32)          # rows, k and v, fp32; two rings of 8 + 8 - 1 slots, and 40 positions
    assert cache_bytes(model.cfg, 2, 40, 8, FP32) == n


def test_a_copy_takes_its_own_keys(ours):
    """As the benchmark makes one, which shares the weights; the first model's call must not be heard there."""
    model = ours("gemma4")
    expected = our_part(model, 20)
    other = copy.deepcopy(model)
    our_part(model, 9)
    assert torch.equal(our_part(other, 20), expected) and torch.equal(our_part(model, 20), expected)


def our_part(model, n):
    model.setup_cache(0, n)
    return model(tokens(n), torch.arange(n), logits_to_keep=n)


def test_the_table_stays_in_its_file(families, tmp_path):
    """Safetensors, .pth: no parameter holds it; and a row that is asked for is the file's."""
    directory, model = families("gemma4")
    save_checkpoint(read_checkpoint(directory), tmp_path / "model.pth", None)
    table = model.state_dict()["model.language_model.embed_tokens_per_layer.weight"]
    for path in (directory, tmp_path / "model.pth"):
        ours = load_model(read_checkpoint(path), FP32, "cpu")
        assert isinstance(ours.per_layer.embed, FileTable) and not list(ours.per_layer.embed.parameters())
        ids = torch.tensor([[5, 3, 5], [159, 0, 3]])
        assert torch.equal(ours.per_layer.embed(ids), table[ids])


def test_beside_a_gpu_the_table_is_on_the_host(families, monkeypatch):
    """Up to the GPU's own view of pinned memory, which needs one: scripts/gpu_check.py's Gemma 4 reads such a table."""
    directory, model = families("gemma4")
    source, pinned, empty = read_checkpoint(directory), [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: (pinned.append(pin_memory), empty(*a, **k))[1])
    monkeypatch.setattr(load, "gpu_view", lambda host, device: host)
    assert is_offloaded("per_layer.embed.weight", "cuda:1") and not is_offloaded("per_layer.project.weight", "cuda")
    ours = blank_model(source.cfg, FP32)
    load.place_per_layer_embedding(ours, source, FP32, "cuda")
    assert True in pinned
    table = model.state_dict()["model.language_model.embed_tokens_per_layer.weight"]
    embed = ours.per_layer.embed
    assert torch.equal(embed(torch.tensor([[5, 159]]))[0], table[[5, 159]]) and not embed.weight.requires_grad
    load_part(ours, "per_layer.", source, "cpu")      # the rest of it
    assert ours.per_layer.embed is embed and not ours.per_layer.project.weight.is_meta
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not is_offloaded("per_layer.embed.weight", "cuda")


def test_rows_of_random_tables_are_always_the_same():
    source = random_checkpoint("gemma-4-E2B")
    from gpt_faster.formats.load import random_row
    table = source.tensors["per_layer.embed.weight"]
    assert torch.equal(random_row(table, 7), random_row(table, 7)) and not torch.equal(random_row(table, 7), random_row(table, 8))
    assert source.tensors["layers.0.end.scale"].shape == (1,)
    filled = torch.zeros(1)
    source.tensors["layers.0.end.scale"].fill(filled)
    assert filled == 1                                     # a layer's output is not lost


@pytest.mark.parametrize("name, n_double", [("E2B", 0), ("E4B", 0), ("12B", 8 * 3840 * 512), ("26B-A4B", 5 * 2816 * 1024),
                                            ("31B", 10 * 5376 * 2048)])
def test_shapes_have_transformers_parameters(name, n_double):
    """Without what lies twice here: keys' matrix of full layers, as values'. n_double: of that."""
    from transformers import AutoModelForCausalLM, Gemma4TextConfig
    cfg = SHAPES[f"gemma-4-{name}"]()
    wide = next(w for w in cfg.block.widths if w and w.head_dim == 512)
    dim = cfg.per_layer.dim if cfg.per_layer else 0
    config = Gemma4TextConfig(
        hidden_size=cfg.dim, num_hidden_layers=cfg.n_layer, num_attention_heads=cfg.n_head, num_key_value_heads=cfg.n_kv_head,
        intermediate_size=cfg.ffn_dim, sliding_window=cfg.window[0], attention_k_eq_v=n_double > 0, num_global_key_value_heads=wide.n_kv_head,
        layer_types=["full_attention" if w is None else "sliding_attention" for w in cfg.window], num_kv_shared_layers=sum(map(bool, cfg.mixer)),
        use_double_wide_mlp=name == "E2B", hidden_size_per_layer_input=dim, enable_moe_block=cfg.moe is not None,
        num_experts=cfg.moe and 128, top_k_experts=cfg.moe and 8, moe_intermediate_size=cfg.moe and cfg.moe.expert_dim)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    n_scalar = cfg.n_layer                                 # buffers there
    assert count_parameters(cfg) == sum(p.numel() for p in model.parameters()) + n_double + n_scalar


def test_nonsense_is_refused():
    base = dict(model_type="gemma4_text", hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
                num_key_value_heads=2, vocab_size=99)
    for change, says in ((dict(num_kv_shared_layers=4), "shares the keys and values of an earlier layer"), (dict(use_bidirectional_attention="all"), "not supported"),
                         (dict(attention_k_eq_v=True, num_global_key_value_heads=3), "cannot share 3"), (dict(global_head_dim=-1), "head_dim"),
                         (dict(model_type="gemma4_assistant"), "drafter"), (dict(model_type="gemma3n"), "is not supported: it has several residual streams")):
        with pytest.raises(ValueError, match=says):
            config_from_hf({**base, **change})


# ---- The drafter --------------------------------------------------------------------------------

ASSISTANT = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=1, vocab_size=160,
                 max_position_embeddings=128, head_dim=16, global_head_dim=32, sliding_window=8, hidden_size_per_layer_input=0,
                 vocab_size_per_layer_input=0, layer_types=["sliding_attention"] * 3 + ["full_attention"], model_type="gemma4_text",
                 num_kv_shared_layers=4)


@pytest.fixture(scope="module")
def drafters(tmp_path_factory):
    """clustered? -> directory, transformers' model. Its config refuses a model without keys of its own: that is left out."""
    import transformers as hf
    from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
    modes, made = Gemma4TextConfig.kv_sharing_modes, {}

    def of_all(config):
        none_has_keys = config.num_kv_shared_layers == config.num_hidden_layers
        return ["reuse"] * config.num_hidden_layers if none_has_keys else modes.fget(config)
    Gemma4TextConfig.kv_sharing_modes = property(of_all)
    for clustered in (False, True):
        tiny.FAMILIES["drafter"] = lambda clustered=clustered: hf.Gemma4AssistantConfig(
            text_config=ASSISTANT, backbone_hidden_size=64, use_ordered_embeddings=clustered, num_centroids=20, centroid_intermediate_top_k=4)
        model = tiny.make("drafter")
        if clustered:
            model.masked_embedding.token_ordering.copy_(torch.randperm(160, generator=torch.Generator().manual_seed(3)))
        made[clustered] = tmp_path_factory.mktemp("drafter"), model
        model.save_pretrained(made[clustered][0])
        del tiny.FAMILIES["drafter"]
    yield made
    Gemma4TextConfig.kv_sharing_modes = modes


@pytest.mark.parametrize("clustered", [False, True])
@pytest.mark.parametrize("n", [6, 20])
@torch.inference_mode()
def test_the_drafter_is_transformers(families, drafters, clustered, n):
    """Three drafts after n tokens, more than the window or less; the last of the n is not read by the model yet."""
    from gpt_faster.formats.assistant import open_assistant
    directory, target = families("gemma4")
    path, theirs = drafters[clustered]
    ids = tokens(n, 1)
    text = target.model.language_model
    out = text(input_ids=ids[:, :-1], return_shared_kv_states=True)
    hidden, token = out.last_hidden_state[:, -1:], ids[:, -1:]
    expected = []
    for _ in range(3):
        drafted = theirs(inputs_embeds=torch.cat((text.embed_tokens(token), hidden), -1), position_ids=torch.tensor([[n - 1]]),
                         shared_kv_states=dict(out.shared_kv_states), attention_mask=None)
        hidden, token = drafted.last_hidden_state, drafted.logits.argmax(-1)
        expected.append(drafted.logits)

    model = load_model(read_checkpoint(directory), FP32, "cpu")
    model.setup_cache(1, 40, 8)                            # rings; the prompt comes in calls of 8
    assistant = open_assistant(path).load(FP32, "cpu")
    assistant.join(model)
    kept = []
    model.norm.register_forward_hook(lambda m, args, y: kept.append(y))
    for a in range(0, n - 1, 8):
        model(ids[:, a:min(a + 8, n - 1)], torch.arange(a, min(a + 8, n - 1)))
    hidden, token, inputs = kept[-1][:, -1:], ids[:, -1:], assistant.inputs(torch.tensor([[n - 1]]), 40)
    for logits in expected:
        mine, hidden = assistant(token, hidden, inputs)
        token = logits.argmax(-1)
        torch.testing.assert_close(mine, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("engine", ["kv_cache", "compile"])
def test_drafts_change_no_token(families, drafters, engine):
    """Greedily the same text, whatever is drafted; and each draft is what the drafter gives for the model's own state."""
    from helpers import GREEDY, ids_of

    from gpt_faster.decoding.engines import build_speculative, build_steps
    from gpt_faster.decoding.samplers import build_sampler
    from gpt_faster.formats.assistant import open_assistant
    model = load_model(read_checkpoint(families("gemma4")[0]), FP32, "cpu")
    model.setup_cache(1, 64, 16)
    steps = build_steps(model, engine)
    prompt = tokens(11, 1)[0].tolist()
    from generate import Batch
    plain = ids_of(Batch(model, build_sampler(model, [GREEDY]), steps), prompt, 30)
    draft = open_assistant(drafters[True][0]).load(FP32, "cpu")
    batch = build_speculative(model, build_sampler(model, [GREEDY]), steps, engine, 4, True, draft)
    checked, hidden_before = [], batch.drafter.hidden_before

    def check(n):                                          # against a model that reads everything anew
        found = hidden_before(n)
        other = load_model(read_checkpoint(families("gemma4")[0]), FP32, "cpu")
        seen = []
        other.norm.register_forward_hook(lambda m, args, y: seen.append(y))
        other.setup_cache(0, n - 1)
        other(batch.history[:, :n - 1], torch.arange(n - 1))
        torch.testing.assert_close(found, seen[-1][:, -1:], rtol=1e-3, atol=1e-3)
        checked.append(n)
        return found
    batch.drafter.hidden_before = check
    assert ids_of(batch, prompt, 30) == plain and len(checked) > 5
    assert ids_of(batch, prompt, 30) == plain              # a second text


def test_a_drafter_for_another_model(families, drafters):
    from gpt_faster.formats.assistant import open_assistant
    draft = open_assistant(drafters[False][0]).load(FP32, "cpu")
    with pytest.raises(ValueError, match="head_dim 16|width 64"):
        draft.join(load_model(read_checkpoint(families("llama3")[0]), FP32, "cpu"))


def test_the_command(families, drafters, tmp_path, capsys):
    """generate.py with the drafter beside the model, and what it says of memory; and a drafter for another width."""
    from gpt_faster.bench.exports import _write_dummy_tokenizer
    from gpt_faster.cli.session import main
    shutil.copytree(families("gemma4")[0], tmp_path / "model")
    _write_dummy_tokenizer(160, tmp_path / "model")
    run = ["--checkpoint_path", str(tmp_path / "model"), "--prompt", "t5 t9 t7", "--max_new_tokens", "12", "--temperature", "0", "--json",
           "--dtype", "float32", "--ignore_eos"]
    said = {}
    for name, more in (("plain", []), ("drafted", ["--draft_checkpoint_path", str(drafters[True][0])]),
                       ("compiled", ["--compile", "--draft_checkpoint_path", str(drafters[True][0])])):
        assert main(run + more) == 0
        out = capsys.readouterr()
        said[name] = json.loads(out.out)
        assert "KV cache" in out.err
    assert said["plain"]["new_ids"] == said["drafted"]["new_ids"] == said["compiled"]["new_ids"]
    assert said["drafted"]["speculate"] == drafters[True][0].name and sum(said["drafted"]["accept_counts"]) > 0
    other = json.loads((drafters[False][0] / "config.json").read_text())
    shutil.copytree(drafters[False][0], tmp_path / "drafter")
    (tmp_path / "drafter/config.json").write_text(json.dumps({**other, "backbone_hidden_size": 48}))
    with pytest.raises(SystemExit):
        main([*run, "--draft_checkpoint_path", str(tmp_path / "drafter")])
    assert "projection shapes are" in capsys.readouterr().err
