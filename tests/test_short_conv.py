"""Short convolutions: what is kept of the past, and that nothing else is. Logits are in test_families.py."""

from dataclasses import replace

import pytest
import tiny
import torch
from helpers import GREEDY, ids_of, make_batch, speculative

from gpt_faster.formats import load
from gpt_faster.formats.config import config_from_hf
from gpt_faster.formats.load import load_model, read_checkpoint
from gpt_faster.layers.short_conv import ShortConv
from model import cache_bytes

NAMES = [name for name in tiny.FAMILIES if name.startswith("lfm2")]
LFM2 = dict(model_type="lfm2", hidden_size=1024, block_ff_dim=6656, num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=8,
            vocab_size=65536, full_attn_idxs=[2, 5, 8, 10, 12, 14])


def tokens(n=20, batch=3):
    return torch.randint(0, 160, (batch, n), generator=torch.Generator().manual_seed(2))


def test_what_is_kept_does_not_grow():
    """Of LFM2-350M, whose ten convolutions keep three tokens' inputs, and its six attentions 1,024 numbers a token."""
    cfg = config_from_hf(LFM2)[0]
    assert cfg.mixer[:3] == (ShortConv(1024, 3), ShortConv(1024, 3), None) and cfg.ffn_dim == 4608
    for n in (100, 1000):
        assert cache_bytes(cfg, 2, n, n, torch.bfloat16) == 2 * 2 * (10 * 3 * 1024 + 6 * 1024 * n)
    assert cache_bytes(cfg, 1, 9, 9, torch.bfloat16, max_rejected=4) == 2 * (10 * 7 * 1024 + 6 * 1024 * 9)


def test_a_convolution_written_out():
    """y_t = wo (c_t * sum over i of taps_i (b x)_(t - 2 + i)), with zeros before the text."""
    torch.manual_seed(0)
    layer = ShortConv(width=6, n_tap=3, bias=True).make(config_from_hf(LFM2)[0])
    for p in layer.parameters():
        torch.nn.init.normal_(p)
    x = torch.randn(2, 5, 1024) / 32
    b, c, h = layer.wbcx(x).split(6, dim=-1)
    expected = torch.zeros(2, 5, 6)
    for t in range(5):
        for i in range(3):
            if t - 2 + i >= 0:
                expected[:, t] += layer.taps[:, i] * (b * h)[:, t - 2 + i]
    expected = layer.wo(c * (expected + layer.taps_bias))
    torch.testing.assert_close(layer(x, None, torch.arange(5), None), expected)


@pytest.mark.parametrize("name", NAMES)
def test_drafts_that_are_rejected_change_nothing(families, name):
    """Looked-up drafts, and those of another model that is nearly always wrong."""
    model, other = (load_model(read_checkpoint(families(n)[0]), torch.float32, "cpu") for n in (name, "llama3"))
    prompt = tokens(12, 1)[0].tolist() * 2
    model.setup_cache(1, 80, None, max_rejected=4)
    expected = ids_of(make_batch(model, [GREEDY]), prompt, 30)
    for draft in (None, other):
        model.setup_cache(1, 80, None, max_rejected=4)
        assert ids_of(speculative(model, 4, draft, fixed=True), prompt, 30) == expected
    model.setup_cache(1, 80, None, max_rejected=2)
    with pytest.raises(ValueError, match="4 draft tokens may be rejected"):
        speculative(model, 4, other, fixed=True)


@pytest.mark.parametrize("changes, message", [
    (dict(conv_L_cache=0), "'conv_L_cache' is 0, expected a positive integer"),
    (dict(layer_types=["conv"] * 3), "'layer_types' is not 16 times"),
    (dict(layer_types=["mamba"] * 16), "'layer_types' is not 16 times one of full_attention"),
    (dict(model_type="lfm3"), "'lfm3' is not supported: it has another kind of convolution layers")])
def test_what_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(LFM2 | changes)


@pytest.mark.parametrize("name, change", [
    ("lfm2", lambda raw: replace(raw, cfg=replace(raw.cfg, qk_norm=False), tensors=[t for t in raw.tensors if "_layernorm" not in t.name])),
    ("lfm2", lambda raw: swapped(raw, "attn.wb", "attn.wc")), ("lfm2", lambda raw: swapped(raw, "attn.wc", "attn.wx")),
    ("lfm2_moe", lambda raw: replace(raw, cfg=replace(raw.cfg, moe=replace(raw.cfg.moe, scores="softmax")))),
    ("lfm2_moe", lambda raw: replace(raw, cfg=replace(raw.cfg, moe=replace(raw.cfg.moe, routed_scale=1.0))))])
def test_planted_errors(families, name, change, monkeypatch):
    from test_families import our_logits
    directory, model = families(name)
    raw = load.read(directory)
    monkeypatch.setattr(load, "read", lambda path: change(raw))
    found, expected = our_logits(directory, tokens()), tiny.logits(model, tokens())
    assert (found - expected).norm() > 0.01 * expected.norm()


def swapped(raw, a, b):
    other = {a: b, b: a}
    fused = raw.names["conv.in_proj"]
    return replace(raw, names=raw.names | {"conv.in_proj": replace(fused, into=tuple(other.get(n, n) for n in fused.into))})
