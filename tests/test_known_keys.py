"""Each key that the references know is acted on, refused, or without effect for a reason that is written down."""

import dataclasses
import inspect
import json
import re
import shutil
from pathlib import Path

import pytest
import transformers
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedConfig

import checkpoint as core
from gpt_faster.formats import known_keys
from gpt_faster.formats.config import config_from_hf
from gpt_faster.formats.families import FAMILIES
from gpt_faster.formats.load import read_checkpoint
from gpt_faster.text.known_keys import TOKENIZER, TOKENIZER_CONFIG

HERE = Path(transformers.__file__).parent


def fields_of(kind):
    cls = CONFIG_MAPPING[kind]
    return {f.name for f in dataclasses.fields(cls)} | set(cls.attribute_map)


# ---- What the references know -------------------------------------------------------------------

def test_keys_of_the_configuration_classes():
    """The fields of each model type's class, and those that transformers' base class takes."""
    base = {f.name for f in dataclasses.fields(PreTrainedConfig)}
    taken = set(re.findall(r'kwargs\.pop\("(\w+)"', inspect.getsource(PreTrainedConfig.__post_init__)))
    assert "torch_dtype" in taken and "attn_implementation" in taken
    assert known_keys.CONFIG.unknown(sorted(base | taken)) == []
    for kind in FAMILIES:
        saved = CONFIG_MAPPING[kind]().to_dict()           # with keys that follow from others
        assert known_keys.CONFIG.unknown(sorted(fields_of(kind) | set(saved))) == [], kind


def test_keys_of_rope():
    from transformers import modeling_rope_utils
    keys = set(re.findall(r'(?:rope_parameters\w*|rope_scaling)(?:\[|\.get\(|\.pop\(|\.setdefault\()"(\w+)"',
                          inspect.getsource(modeling_rope_utils)))
    assert len(keys) > 12 and known_keys.ROPE.unknown(sorted(keys)) == []


def test_keys_of_quantization():
    from transformers.utils import quantization_config as classes
    for name in ("AwqConfig", "GPTQConfig", "FineGrainedFP8Config", "CompressedTensorsConfig", "Mxfp4Config", "BitsAndBytesConfig"):
        keys = set(inspect.signature(getattr(classes, name).__init__).parameters) - {"self", "kwargs"}
        assert known_keys.QUANTIZATION.unknown(sorted(keys)) == [], name


def test_keys_of_generation():
    keys = set(vars(GenerationConfig())) | set(GenerationConfig._get_default_generation_params())
    assert len(keys) > 60 and known_keys.GENERATION.unknown(sorted(keys)) == []


def test_keys_of_tokenizers():
    """Each argument that transformers' tokenizers take, however they take it."""
    keys = set()
    for name in ("tokenization_utils_base", "tokenization_utils_tokenizers", "tokenization_utils_sentencepiece", "tokenization_python"):
        keys |= set(re.findall(r'kwargs(?:\.(?:get|pop|setdefault)\(|\[)"(\w+)"', (HERE / f"{name}.py").read_text()))
    for name in ("llama", "gpt2", "qwen2", "gemma", "cohere", "gpt_neox"):
        [cls] = [c for n, c in vars(__import__(f"transformers.models.{name}.tokenization_{name}", fromlist=["x"])).items()
                 if n.endswith("Tokenizer") and c.__module__.endswith(f"tokenization_{name}")]
        keys |= set(inspect.signature(cls.__init__).parameters) - {"self", "kwargs", "args"}
    assert len(keys) > 60 and TOKENIZER_CONFIG.unknown(sorted(keys)) == []
    # written by older versions, as the files on the hub have them
    assert TOKENIZER_CONFIG.unknown(["use_default_system_prompt", "spaces_between_special_tokens", "tokenizer_class", "auto_map"]) == []


def test_parts_of_a_tokenizer_json():
    from tokenizers import Tokenizer, models
    assert TOKENIZER.unknown(json.loads(Tokenizer(models.BPE()).to_str())) == []


def test_keys_of_adapters():
    from peft import LoraConfig
    assert known_keys.ADAPTER.unknown(sorted(f.name for f in dataclasses.fields(LoraConfig))) == []


def gguf_keys(cls):
    for name, value in vars(cls).items():
        if inspect.isclass(value):
            yield from gguf_keys(value)
        elif isinstance(value, str) and not name.startswith("_"):
            yield value


def test_keys_of_gguf():
    import gguf
    keys = {key for key in gguf_keys(gguf.constants.Keys) if key != "Keys"}
    assert len(keys) > 250 and known_keys.GGUF.unknown(sorted(keys)) == []


@pytest.mark.parametrize("table", known_keys.TABLES, ids=lambda table: table.file)
def test_no_key_is_in_two_groups(table):
    groups = [table.acted_on, " ".join(table.refused), *table.without_effect.values()]
    keys = [key for group in groups for key in group.split()]
    twice = {key for key in keys if keys.count(key) > 1 and key not in known_keys.UNSUPPORTED_CONFIG_KEYS}
    assert not twice


# ---- Keys that only some model types have ----------------------------------------------------------

def test_model_types_of_a_key():
    """A key that a model type's class has is read; one that it has not is read only if our row names it."""
    missing, extra = [], []
    for kind, family in FAMILIES.items():
        cls = CONFIG_MAPPING[kind]
        source = inspect.getsource(cls) + "".join(
            path.read_text() for path in Path(inspect.getfile(cls)).parent.glob("modeling_*.py"))
        own = {*family.defaults, *family.key_aliases, *strings(family.respell), *strings(family.is_sparse), *strings(family.is_sliding)}
        for keys, _ in known_keys.OF_MODEL_TYPES:
            for key in keys.split():
                is_read = key in known_keys.of_model_type({key: 1}, kind)
                if key in fields_of(kind) and not is_read:
                    missing.append((key, kind))
                if is_read and not re.search(rf"\b{key}\b", source) and key not in own:
                    extra.append((key, kind))
    assert not missing and not extra, "rows of OF_MODEL_TYPES in gpt_faster/formats/known_keys.py"


def strings(function, seen=()):
    """The string constants of a function and of ours that it calls."""
    from gpt_faster.formats import families
    found = set()
    for const in function.__code__.co_consts:
        found |= {const} if isinstance(const, str) else {c for c in const if isinstance(c, str)} if isinstance(const, tuple) else set()
    for name in function.__code__.co_names:
        inner = getattr(families, name, None)
        if inspect.isfunction(inner) and name not in seen:
            found |= strings(inner, (*seen, name))
    return found


SIZES = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, intermediate_size=96, vocab_size=99)
FOREIGN = [                                                # transformers' classes of these model types do not read them
    ("llama", dict(qkv_bias=True)), ("llama", dict(attention_out_bias=True)), ("mistral", dict(attention_bias=True)),
    ("qwen2", dict(attention_bias=True, mlp_bias=True)), ("mixtral", dict(norm_topk_prob=False)), ("mixtral", dict(moe_intermediate_size=32)),
    ("llama", dict(hidden_activation="gelu")), ("qwen3", dict(norm_topk_prob=True)), ("mistral", dict(use_sliding_window=True)),
]
FOREIGN_TO_ALL = [
    ("llama", dict(embedding_multiplier=3.0)), ("llama", dict(attention_multiplier=0.5)), ("qwen3", dict(final_logit_softcapping=30.0)),
    ("llama", dict(use_parallel_residual=True)), ("mixtral", dict(routed_scaling_factor=2.5, n_shared_experts=1, use_expert_bias=True)),
    ("llama", dict(alibi=True)), ("gemma2", dict(attention_out_bias=True, embedding_multiplier=2.0)), ("qwen2", dict(scale_attn_weights=False)),
    ("phi3", dict(rope_local_base_freq=500.0)), ("olmo2", dict(use_post_norm=True, residual_multiplier=0.5)),
]


@pytest.mark.parametrize("kind, keys", FOREIGN + FOREIGN_TO_ALL)
def test_keys_of_other_model_types_are_left_out_with_a_line(tmp_path, capsys, kind, keys):
    c = dict(SIZES, model_type=kind)
    path = tmp_path / "config.json"
    assert config_from_hf(dict(c, **keys), path)[0] == config_from_hf(c, path)[0]
    noted = [key for key, value in keys.items() if value is not False]
    err = capsys.readouterr().err
    assert err == (f"note: {path}: unknown keys {', '.join(noted)}: without effect here\n" if noted else "")


@pytest.mark.parametrize("kind, keys", FOREIGN)
def test_and_in_the_core(capsys, kind, keys):
    c = dict(SIZES, model_type=kind)
    assert core.config_from_hf(dict(c, **keys))[0] == core.config_from_hf(c)[0]
    noted = [key for key, value in keys.items() if value is not False]
    err = capsys.readouterr().err
    assert err == (f"note: config.json: unknown keys {', '.join(noted)}: without effect here\n" if noted else "")


@pytest.mark.parametrize("kind", core.FAMILIES)
def test_what_transformers_writes_is_known(kind, tmp_path, capsys):
    """No line for a config.json as transformers saves it, in both programs."""
    config = CONFIG_MAPPING[kind](**SIZES, architectures=["X"], attn_implementation="eager")
    config.save_pretrained(tmp_path)
    c = json.loads((tmp_path / "config.json").read_text())
    c |= dict(_name_or_path="x", torch_dtype="bfloat16", auto_map={}, use_cache=True, pretraining_tp=1, unsloth_version="1")
    core.config_from_hf(c)
    config_from_hf(c, tmp_path / "config.json")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("read", [lambda c: core.config_from_hf(c, "config.json"), lambda c: config_from_hf(c, "config.json")])
def test_unknown_keys_are_named_together(capsys, read):
    read(dict(SIZES, model_type="llama", alpha_1=[2], zeta=1, attention_dropout=0.1, null=None))
    assert capsys.readouterr().err == "note: config.json: unknown keys alpha_1, zeta: without effect here\n"


def test_the_core_decides_by_what_it_acts_on():
    """A key that the core's reader reads is not unknown to it; its patterns match only keys without effect."""
    for table in (known_keys.CONFIG, known_keys.GENERATION, TOKENIZER_CONFIG):
        keys = [key for key in " ".join([table.acted_on, *table.refused]).split() if "*" not in key]
        keys = sorted(set(keys) - {"_remove_final_layer_norm"})            # of OPT
        hidden = set(keys) - set(core.unknown_keys(keys)) - {"model_type", "tokenizer_class"}
        assert not hidden, table.file


def test_every_family_is_read_without_a_line(families, tmp_path, capsys):
    for name in ("llama2", "gemma3_text", "deepseek_v3", "gpt_oss"):
        read_checkpoint(families(name)[0])
        assert "unknown keys" not in capsys.readouterr().err, name


def test_an_adapter_next_to_full_weights(families, tmp_path, capsys):
    shutil.copytree(families("llama2")[0], tmp_path / "model")
    (tmp_path / "model/adapter_config.json").write_text("{}")
    read_checkpoint(tmp_path / "model")
    assert "the adapter next to the weights is not applied; to apply it, add --adapter " in capsys.readouterr().err


def test_the_table_in_the_documentation():
    assert known_keys.report() in (Path(__file__).parents[1] / "docs/formats.md").read_text(), "python -m gpt_faster.formats.known_keys"
