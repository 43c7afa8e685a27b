"""Latent attention: what its cache has, and both ways through it. Logits are in test_families.py."""

from dataclasses import replace

import pytest
import tiny
import torch

from gpt_faster.formats.config import config_from_hf
from gpt_faster.formats.load import load_model, read_checkpoint
from gpt_faster.formats.quantize_on_load import quantized
from gpt_faster.layers.latent import Latent
from model import cache_bytes

V3 = dict(model_type="deepseek_v3", hidden_size=7168, intermediate_size=18432, num_hidden_layers=61, num_attention_heads=128, vocab_size=129280,
          rope_scaling=dict(type="yarn", factor=40, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1, mscale=1.0,
                            mscale_all_dim=1.0))
NAMES = [name for name in tiny.FAMILIES if name.startswith(("deepseek", "kimi", "glm4_moe_lite", "minicpm3", "youtu", "mistral4"))]


def tokens(n=20, batch=3):
    return torch.randint(0, 160, (batch, n), generator=torch.Generator().manual_seed(2))


def test_a_token_takes_576_numbers_a_layer():
    cfg = config_from_hf(V3)[0]
    assert cache_bytes(cfg, 1, 1000, 1000, torch.bfloat16) == 61 * 1000 * 576 * 2
    assert cfg.attention.scale == pytest.approx(192**-0.5 * (0.1 * torch.tensor(40.0).log().item() + 1)**2)


def test_the_cheaper_way():
    """Counted as the docstring says: for V3 from 171 tokens on, for GLM-4.7-Flash from 399 on."""
    v3, glm = Latent(1536, 512, 128, 128), Latent(768, 512, 192, 256)
    assert (v3.max_absorbed_tokens(64), glm.max_absorbed_tokens(64)) == (170, 398)
    n, rank, rope, nope, v = 170, 512, 64, 128, 128
    absorbed, apart = 2 * rank + rope, nope + rope + v
    assert n * absorbed <= rank * (nope + v) + n * apart
    assert (n + 1) * absorbed > rank * (nope + v) + (n + 1) * apart
    assert Latent(None, 32, 64, 64).max_absorbed_tokens(32) > 1 << 60    # never dearer: the latent is narrow


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scheme", [None, "int8", "int4"])
def test_absorbed_or_not(families, name, scheme):
    """Both ways give the same for whole prompts, chunks behind others, padded rows and single tokens."""
    source = read_checkpoint(families(name)[0])
    model = load_model(source if scheme is None else quantized(source, scheme), torch.float32, "cpu")
    prompt, seen = tokens(), []
    for most in (0, 1 << 62):
        for layer in model.layers:
            layer.attn.max_absorbed_tokens = most
        model.setup_cache(3, 24)
        rows = torch.arange(3)[:, None] + torch.arange(13, 19)         # which begin at different positions
        calls = [model(prompt[:, :13], torch.arange(13), 13), model(prompt[:, 13:19], torch.arange(13, 19), 6),
                 model(prompt[:, 19:], torch.tensor([19])), model(prompt[:, :6], rows, 6, batch_idx=torch.tensor([2, 0, 1]))]
        seen.append(torch.cat(calls, dim=1))
    torch.testing.assert_close(*seen, rtol=1e-4, atol=2e-4)


def test_each_way_is_taken(ours, monkeypatch):
    model, taken = ours("deepseek_v3"), []
    attn = type(model.layers[0].attn)
    for way in ("attend_latents", "attend_heads"):
        plain = getattr(attn, way)
        monkeypatch.setattr(attn, way, lambda *a, plain=plain, way=way: (taken.append(way), plain(*a))[1])
    most = model.layers[0].attn.max_absorbed_tokens
    assert most == model.cfg.mixer[0].max_absorbed_tokens(8) == 96 * 64 // (2 * 96 + 8 - 72)
    model.setup_cache(1, 128)
    for n, way in ((1, "attend_latents"), (most, "attend_latents"), (most + 1, "attend_heads")):
        taken.clear()
        model(tokens(n, 1), torch.arange(n))
        assert set(taken) == {way}


@pytest.mark.parametrize("changes, message", [
    (dict(qk_rope_head_dim=7), "'qk_rope_head_dim' is 7, expected an even number"),
    (dict(kv_lora_rank="512"), "'kv_lora_rank' is '512', expected an integer from 0"),
    (dict(qk_nope_head_dim=0), "'qk_nope_head_dim' is 0, expected a positive integer"),
    (dict(model_type="deepseek_v2", num_experts_per_tok=2, topk_method="noaux_tc"), "'topk_method' is 'noaux_tc', expected greedy"),
    (dict(model_type="deepseek_v32"), "'deepseek_v32' is not supported: it has sparse latent attention"),
    (dict(model_type="longcat_flash"), "'longcat_flash' is not supported: it has two attentions in each layer"),
])
def test_what_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(V3 | changes)


def test_a_kv_b_of_another_shape(families, tmp_path, monkeypatch):
    from gpt_faster.formats import load
    directory, _ = families("youtu")
    raw = load.read(directory)
    cfg = replace(raw.cfg, mixer=(replace(raw.cfg.mixer[0], v_dim=40),))
    monkeypatch.setattr(load, "read", lambda path: replace(raw, cfg=cfg))
    with pytest.raises(ValueError, match=r"kv_b_proj.weight is \[256, 96\], but the config asks for \[288, 96\]"):
        read_checkpoint(directory)


@pytest.mark.parametrize("name, changes", [
    ("deepseek_v2", {"moe.group_top": 2}), ("deepseek_v2", {"moe.norm_topk_prob": True}), ("deepseek_v2", {"moe.n_group": 1, "moe.topk_group": 1}),
    ("deepseek_v3", {"moe.group_top": 1}), ("deepseek_v3", {"attn_scale": None}), ("deepseek_v2-lite", {"attn_scale": None}),
    ("mistral4", {"attn_scale": None}), ("mistral4", {"scores.growth": 0.0}), ("minicpm3", {"residual_scale": 1.0}),
    ("minicpm3", {"embed_scale": 1.0}), ("glm4_moe_lite", {"moe.routed_scale": 1.0}), ("youtu", {"attn_scale": 8**-0.5}),
    ("deepseek_v3", {"folds.interleaved_rope": False}), ("deepseek_v3-halves", {"folds.interleaved_rope": True}),
    ("minicpm3", {"folds.interleaved_rope": True}), ("minicpm3", {"folds.logits_divisor": 1.0})])
def test_planted_errors(families, name, changes, monkeypatch):
    from test_families import our_logits, with_changes

    from gpt_faster.formats import load
    directory, model = families(name)
    raw = load.read(directory)
    folds = {key[6:]: value for key, value in changes.items() if key.startswith("folds.")}
    cfg = with_changes(raw.cfg, {key: value for key, value in changes.items() if not key.startswith("folds.")})
    monkeypatch.setattr(load, "read", lambda path: replace(raw, cfg=cfg, folds=replace(raw.folds, **folds)))
    found, expected = our_logits(directory, tokens()), tiny.logits(model, tokens())
    assert (found - expected).norm() > 0.01 * expected.norm()


def test_an_old_name_of_the_same():
    assert config_from_hf(V3 | dict(model_type="kimi_k2"))[0] == config_from_hf(V3)[0]


@pytest.mark.parametrize("name", ["glm4_moe_lite", "lfm2_moe", "deepseek_v2-lite"])
@pytest.mark.parametrize("scheme", [None, "int8", "int4"])
def test_layers_with_no_half_that_the_operations_know(families, name, scheme):
    """In bfloat16, behind others that they know: x stays in fp32 between them, and each half gets it narrowed."""
    from gpt_faster.kernels.cpu import layers as cpu_layers
    from gpt_faster.kernels.cpu import native
    from gpt_faster.kernels.cpu.experts import PackedExperts
    source = read_checkpoint(families(name)[0])
    source = source if scheme is None else quantized(source, scheme)
    prompt, seen = tokens(20, 3), []
    for dtype, compiled in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        model = load_model(source, dtype, "cpu")
        if compiled:
            native.set_activation_bits(16)
            assert cpu_layers.use_operations(model)
            assert all(layer.forward.supported[1] for layer in model.layers)
            heads = [m for m in model.modules() if isinstance(m, PackedExperts) and m.bias is None]
            assert len(heads) >= 2 * model.cfg.n_layer or name == "lfm2_moe"
        model.setup_cache(3, 24)
        with torch.inference_mode():
            calls = [model(prompt[:, :19], torch.arange(19), 19), model(prompt[:, 19:], torch.tensor([19]))]
        seen.append(torch.cat(calls, dim=1))
    native.set_activation_bits(8)
    # Where two experts are nearly level, one may be another, and tokens after it see that: the best quarter has met none.
    errors = [((x - seen[0]).norm(dim=-1) / seen[0].norm(dim=-1)).flatten() for x in seen[1:]]
    plain, compiled = (e.quantile(0.25) for e in errors)
    assert compiled < 1.2 * plain < 0.1, errors
