"""RoPE's scaling, whichever key of config.json states it and however: as transformers reads it, or refused."""

import json
import re
import shutil

import pytest
import tiny
import torch
import transformers
from test_families import close, our_logits, tokens

from gpt_faster.formats.config import config_from_hf
from gpt_faster.formats.load import read_checkpoint

YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
LINEAR = dict(rope_type="linear", factor=4.0)
DYNAMIC = dict(rope_type="dynamic", factor=4.0)
LLAMA3 = dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
SHORT, LONG = [1.0 + i / 9 for i in range(8)], [1.0 + i for i in range(8)]
LONGROPE = dict(rope_type="longrope", short_factor=SHORT, long_factor=LONG, factor=4.0, original_max_position_embeddings=16)
DEFAULT = dict(rope_type="default", rope_theta=1e4)
BY_KIND = dict(full_attention=dict(DEFAULT, rope_theta=1e5), sliding_attention=DEFAULT)
WINDOWS = dict(layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=8)


def spelled(rope, key="type"):
    """Before transformers 4.45."""
    return {{"rope_type": key}.get(k, k): v for k, v in rope.items()}


CASES = {                                                  # family, what the config says of RoPE and kinds of layers
    "yarn beside default": ("qwen3", dict(rope_scaling=YARN, rope_parameters=DEFAULT)),
    "linear beside default": ("llama2", dict(rope_scaling=LINEAR, rope_parameters=DEFAULT)),
    "dynamic beside default": ("llama2", dict(rope_scaling=DYNAMIC, rope_parameters=DEFAULT, max_position_embeddings=16)),
    "llama3 beside default": ("llama2", dict(rope_scaling=LLAMA3, rope_parameters=DEFAULT)),
    "longrope beside default": ("qwen2", dict(rope_scaling=LONGROPE, rope_parameters=DEFAULT)),
    "by type": ("llama2", dict(rope_scaling=spelled(LINEAR), rope_parameters=DEFAULT)),
    "by type, in rope_parameters": ("llama2", dict(rope_parameters=dict(spelled(YARN), rope_theta=1e4))),
    "both spellings": ("llama2", dict(rope_scaling=dict(LINEAR, type="yarn"), rope_parameters=DEFAULT)),
    "a base of its own": ("llama2", dict(rope_scaling=dict(YARN, rope_theta=5e4), rope_parameters=dict(DEFAULT, rope_theta=1e6))),
    "a base above": ("llama2", dict(rope_scaling=YARN, rope_parameters=dict(DEFAULT, rope_theta=1e6), rope_theta=1e6)),
    "linear beside yarn": ("llama2", dict(rope_scaling=LINEAR, rope_parameters=dict(YARN, rope_theta=1e4))),
    "default beside yarn": ("llama2", dict(rope_scaling=dict(rope_type="default"), rope_parameters=dict(YARN, rope_theta=1e4))),
    "an empty one": ("llama2", dict(rope_scaling={}, rope_parameters=dict(YARN, rope_theta=1e4))),
    "null": ("llama2", dict(rope_scaling=None, rope_parameters=dict(YARN, rope_theta=1e4))),
    "the other null": ("llama2", dict(rope_scaling=YARN, rope_parameters=None)),
    "no base at all": ("llama2", dict(rope_scaling=YARN, rope_parameters=None, rope_theta=None)),
    "beside kinds of layers": ("gemma3_text", dict(rope_scaling=LINEAR, rope_parameters=BY_KIND, **WINDOWS)),
    "beside kinds of layers, Olmo 3": ("olmo3", dict(rope_scaling=YARN, rope_parameters=BY_KIND, **WINDOWS)),
    "kinds of layers by type": ("gemma3_text", dict(rope_parameters=dict(full_attention=dict(spelled(LINEAR), rope_theta=1e5),
                                                                        sliding_attention=spelled(DEFAULT)), **WINDOWS)),
    "of latent attention": ("deepseek_v3", dict(rope_scaling=dict(YARN, mscale=0.7, mscale_all_dim=1.0), rope_parameters=DEFAULT)),
    "that scales queries": ("ministral3", dict(
        rope_scaling=dict(YARN, original_max_position_embeddings=6, llama_4_scaling_beta=0.4, rope_theta=1e5),
        rope_parameters=dict(DEFAULT, rope_theta=1e6))),
    "instead of a family's own": ("gpt_oss", dict(rope_scaling=LINEAR, rope_parameters=None)),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_read_as_transformers_reads_it(families, tmp_path, case):
    name, values = CASES[case]
    shutil.copytree(families(name)[0], tmp_path / "model")
    path = tmp_path / "model/config.json"
    config = json.loads(path.read_text())
    for key in ("rope_scaling", "rope_theta", "rope_parameters"):
        config.pop(key, None)
    path.write_text(json.dumps({**config, **{k: v for k, v in values.items() if k != "rope_theta" or v is not None}}))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    close(our_logits(tmp_path / "model", tokens()), tiny.logits(model, tokens()))


def test_the_cases_scale_something(families):
    """Each case's RoPE differs from the plain one, but for the one that says default."""
    for case, (name, values) in CASES.items():
        config = json.loads((families(name)[0] / "config.json").read_text())
        config = {k: v for k, v in config.items() if k not in ("rope_scaling", "rope_theta", "rope_parameters")}
        cfg = config_from_hf({**config, **{k: v for k, v in values.items() if k != "rope_theta" or v is not None}})[0]
        scaled = any(r.kind not in ("default", "none") or getattr(r, "divisors", None) for r in cfg.rope)
        assert scaled == (case not in ("default beside yarn",)), case


SIZES = dict(model_type="llama", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, vocab_size=160,
             max_position_embeddings=128)


@pytest.mark.parametrize("values, said", [
    (dict(rope_scaling=dict(rope_type="ntk", factor=4.0)), "RoPE scaling 'ntk' is not supported (supported: "),
    (dict(rope_scaling=dict(type="axial")), "RoPE scaling 'axial' is not supported"),
    (dict(rope_parameters=dict(rope_type="proportional", rope_theta=1e4)), "RoPE scaling 'proportional' is not supported"),
    (dict(rope_parameters=dict(full_attention=dict(rope_type="odd"), sliding_attention=DEFAULT)), "RoPE scaling 'odd' is not supported"),
    (dict(rope_scaling=dict(rope_type="linear")), "RoPE scaling 'linear' has no 'factor'"),
    (dict(rope_scaling=dict(type="dynamic")), "RoPE scaling 'dynamic' has no 'factor'"),
    # transformers would silently take 10000 and 1.0
    (dict(rope_scaling=YARN, rope_parameters=dict(DEFAULT, rope_theta=1e6)), "has no 'rope_theta' (1000000.0 in 'rope_parameters'): add it"),
    (dict(rope_scaling=YARN, rope_parameters=dict(DEFAULT, partial_rotary_factor=0.5)), "has no 'partial_rotary_factor' (0.5 in"),
])
def test_what_is_refused(values, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        config_from_hf({**SIZES, **values})


def test_a_command_says_it_in_one_line(families, tmp_path):
    shutil.copytree(families("llama2")[0], tmp_path / "model")
    path = tmp_path / "model/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_scaling": YARN, "rope_parameters": dict(DEFAULT, rope_theta=1e6)}))
    with pytest.raises(ValueError, match="'rope_scaling' overrides 'rope_parameters' but has no 'rope_theta'.* add it to 'rope_scaling'$"):
        read_checkpoint(tmp_path / "model")
