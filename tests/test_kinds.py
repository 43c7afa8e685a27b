"""Each model_type of the installed transformers is read, or refused with what it has that we lack."""

import re

import pytest
import stand_ins  # noqa: F401 (it registers families that the installed transformers has not)
from transformers import CONFIG_MAPPING
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from checkpoint import HF_NAMES
from gpt_faster.formats.config import config_from_hf
from gpt_faster.formats.families import ALIASES, FAMILIES, TEXT_PARTS
from gpt_faster.formats.names import NOT_WEIGHTS
from gpt_faster.formats.other_kinds import OTHER_KINDS, missing_feature

# transformers' class has no default configuration of these, or one that no model has
NO_DEFAULTS = ("vision-encoder-decoder", "gemma4_assistant", "gemma4_unified_assistant", "dots1", "nougat", "deepseek_v2",
               "qwen3_omni_moe", "qwen3_omni_moe_thinker", "qwen3_omni_moe_text")
COMPOSITE = ("text_config", "thinker_config", "llm_config", "language_config")
REFUSED = re.compile(r"model_type '[\w.-]+' is not supported: it has |only without state-space layers")


def is_known(kind, depth=0):
    """By name alone: a row, a refusal, or a model around a text model of which one of them is true."""
    if kind in FAMILIES or kind in ALIASES or kind in TEXT_PARTS or missing_feature(kind):
        return True
    config = CONFIG_MAPPING[kind]()
    parts = [getattr(config, name, None) for name in COMPOSITE]
    return depth < 2 and any(part is not None and is_known(part.model_type, depth + 1) for part in parts)


def test_every_model_type_is_known():
    unknown = [kind for kind in CONFIG_MAPPING_NAMES if not is_known(kind)]
    assert not unknown, f"{unknown}: each needs a row in families.py, or what it has in other_kinds.py"


def test_every_default_configuration_is_read_or_refused_by_kind():
    wrong = {}
    for kind in CONFIG_MAPPING_NAMES:
        config = {} if kind in NO_DEFAULTS else CONFIG_MAPPING[kind]().to_dict()
        try:
            assert config_from_hf(config | dict(model_type=kind))[0].n_layer > 0
        except ValueError as e:
            if not (REFUSED.match(str(e)) or "supported only" in str(e) or kind in NO_DEFAULTS):
                wrong[kind] = str(e)
    assert not wrong


def test_no_model_type_is_refused_twice_or_also_read():
    names = " ".join(OTHER_KINDS.values()).split()
    assert len(names) == len(set(names))
    assert not set(names) & {*FAMILIES, *ALIASES, *TEXT_PARTS}
    assert not any(missing_feature(kind) for kind in FAMILIES)


def test_an_invented_model_type_is_none_of_them():
    assert missing_feature("my_llama") is None
    with pytest.raises(ValueError, match="model_type 'my_llama' is not supported .supported: "):
        config_from_hf(dict(model_type="my_llama"))


PARTS_OF_MULTIMODAL_MODELS = """model.vision_tower.encoder.layers.0.mlp.fc1.weight model.aligner.linear1.bias model.image_newline
qformer.encoder.layer.0.attention.attention.key.weight language_projection.weight query_tokens model.merger.mlp.0.linear_1.weight
model.encoder.layers.0.attn.pre_norm.weight model.projector.readout.0.weight model.vision_encoder.ln_pre.weight
model.visual_embeddings_table.weight model.image_tower.embeddings.class_embedding model.video_tower.embeddings.class_embedding
model.acoustic_tokenizer_encoder.conv_layers.0.conv.conv.weight model.generation_aligner.fc1.weight model.high_res_vision_proj.weight""".split()


def test_other_parts_of_multimodal_models_are_left_out():
    assert not [name for name in PARTS_OF_MULTIMODAL_MODELS if not NOT_WEIGHTS.search(name)]


@pytest.mark.parametrize("kind", FAMILIES)
def test_no_tensor_of_a_text_model_is_left_out(kind):
    family = FAMILIES[kind]
    for names in filter(None, (HF_NAMES, family.names, family.names_with_experts)):
        for stem in names:
            stem = stem.replace("*", "0")
            for name in (f"{stem}.weight", f"model.{stem}.weight", f"model.layers.0.{stem}.weight", f"model.language_model.layers.0.{stem}"):
                assert not NOT_WEIGHTS.search(name), name
