"""What check_config() refuses: a config that no model can have, whichever file it is from."""

from dataclasses import replace

import pytest

from gpt_faster.formats.schema import check_config
from gpt_faster.layers.attention import AttentionVariant
from gpt_faster.layers.block import BlockVariant, Widths
from gpt_faster.layers.delta import GatedDelta
from gpt_faster.layers.feed_forward import FeedForwardVariant
from gpt_faster.layers.rope import RopeVariant
from gpt_faster.layers.shared_kv import SharedKV
from model import ModelConfig, Rope

CFG = ModelConfig(dim=64, n_layer=4, n_head=4, n_kv_head=2, head_dim=16, ffn_dim=96, vocab_size=160, context=128)
REFUSED = {
    "dim is 0, expected a positive integer": dict(dim=0),
    "n_head is '4'": dict(n_head="4"),
    "head_dim is -16, expected 0 to": dict(head_dim=-16),
    "window is (None, 4, 4, 4, 4), expected 1 to 4 entries": dict(window=(None, 4, 4, 4, 4)),
    "mixer is (), expected 1 to 4 entries": dict(mixer=()),
    "activation is 'tanh', expected one of": dict(ffn=FeedForwardVariant(activation="tanh")),
    "qk_norm is 'all', expected one of": dict(attention=AttentionVariant(qk_norm="all")),
    "MoE layers, but no MoE config": dict(sparse=(True,)),
    "a sliding window of 0 positions": dict(window=(0,)),
    "4 attention heads cannot share 3 key/value heads evenly": dict(n_kv_head=3),
    "4 attention heads cannot share 0 key/value heads": dict(block=BlockVariant(widths=(Widths(16, 0, 96),))),
    "head_dim is 15, expected an even number": dict(head_dim=15),
    "RoPE is 'ntk', expected one of": dict(rope=(Rope(kind="ntk"),)),
    "invalid RoPE: theta 0.5": dict(rope=(Rope(theta=0.5),)),
    "factor inf": dict(rope=(Rope(factor=float("inf")),)),
    "original context 0": dict(rope=(Rope(original_context=0),)),
    "RoPE 'yarn' needs beta_slow": dict(rope=(Rope(kind="yarn", low_freq_factor=0),)),
    "RoPE 'dynamic' needs a rotary dimension above 2": dict(head_dim=2, rope=(Rope(kind="dynamic"),)),
    "partial_rotary_factor is 65": dict(rope=(RopeVariant(partial=65),)),
    "RoPE's head_dim is 7": dict(rope=(RopeVariant(head_dim=7),)),
    "3 RoPE factors, expected one per frequency: 8": dict(rope=(RopeVariant(divisors=(1.0, 2.0, 3.0)),)),
    "layer 1 shares the KV cache of layer 1": dict(mixer=(None, SharedKV(1), None, None)),
    "4 value heads cannot share 3 key heads evenly": dict(mixer=(GatedDelta(3, 4, 32, 64),)),
    "a convolution of 1 is too short": dict(mixer=(GatedDelta(2, 4, 32, 64, n_tap=1),)),
}


def test_the_plain_one_is_right():
    check_config(CFG)


@pytest.mark.parametrize("says", REFUSED)
def test_refused(says):
    with pytest.raises(ValueError) as error:
        check_config(replace(CFG, **REFUSED[says]))
    assert says in str(error.value) and "\n" not in str(error.value)
