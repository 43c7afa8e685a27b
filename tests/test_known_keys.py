"""Each key that the references know is acted on, refused, or without effect for a reason that is written down."""

import dataclasses
import inspect
import json
import re
import shutil
from pathlib import Path

import pytest
import transformers
from test_tokenizer import bpe  # noqa: F401
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
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
        source = source.replace("rotary_dim", "partial_rotary_factor") if kind == "gptj" else source
        own = {*family.defaults, *family.key_aliases, *strings(family.respell), *strings(family.is_sparse), *strings(family.is_sliding)}
        for keys, _ in known_keys.OF_MODEL_TYPES:
            for key in keys.split():
                is_read = key in known_keys.of_model_type({key: 1}, kind)
                if key in fields_of(kind) and not is_read:
                    missing.append((key, kind))
                refused = key in known_keys.UNSUPPORTED_CONFIG_KEYS
                has_source = cls.__module__.startswith("transformers.")            # else a stand-in of ours
                if is_read and has_source and not refused and not re.search(rf"\b{key}\b", source) and key not in own:
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
    ("phi3", dict(rope_local_base_freq=500.0)), ("llama", dict(partial_rotary_factor=0.5)), ("olmo2", dict(use_post_norm=True, residual_multiplier=0.5)),
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


@pytest.mark.parametrize("name, key, value", [
    ("llama2", "partial_rotary_factor", 0.5), ("qwen3", "rope_parameters", dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)),
    ("mixtral", "norm_topk_prob", False), ("mistral-window", "attention_bias", True), ("llama2", "final_logit_softcapping", 2.0),
])
def test_logits_equal_those_of_transformers(families, tmp_path, capsys, name, key, value):
    """With a key that its class for this model type does not read."""
    import tiny
    import torch
    from test_families import close, our_logits, tokens
    shutil.copytree(families(name)[0], tmp_path / "model")
    path = tmp_path / "model/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    close(our_logits(tmp_path / "model", tokens()), tiny.logits(model, tokens()))
    noted = "partial_rotary_factor" if key == "rope_parameters" else key
    assert ("unknown keys" in capsys.readouterr().err) == (value is not False), noted


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


# ---- The tokenizer's files: which of several counts ------------------------------------------------

CLASSES = ["PreTrainedTokenizerFast", "LlamaTokenizerFast", "GPT2Tokenizer", "Qwen2Tokenizer", None]


def both_tokenizers(path, fast, config, **files):
    """transformers' and ours, of tokenizer.json with these files next to it."""
    from transformers import AutoTokenizer

    from gpt_faster.text import tokenizer_files
    fast.save(str(path / "tokenizer.json"))
    for name, content in dict(tokenizer_config=config, **files).items():
        (path / f"{name}.json").write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
    return AutoTokenizer.from_pretrained(path), tokenizer_files.load(path)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("stated", [True, False, None])
@pytest.mark.parametrize("adds", [True, False])
def test_add_bos_token_next_to_a_tokenizer_json(bpe, tmp_path, capsys, name, stated, adds):  # noqa: F811
    fast = Tokenizer.from_str(bpe.to_str())
    fast.post_processor = processors.TemplateProcessing(single="<s> $A" if adds else "$A", special_tokens=[("<s>", 0)])
    theirs, ours = both_tokenizers(tmp_path, fast, dict(tokenizer_class=name, bos_token="<s>", eos_token="</s>", add_bos_token=stated))
    assert ours.encode(" the class") == theirs(" the class")["input_ids"]
    assert ("it decides" in capsys.readouterr().err) == (stated is not None and stated != adds)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("stated", [True, False, None])
@pytest.mark.parametrize("has", [True, False])
def test_add_prefix_space(bpe, tmp_path, name, stated, has):  # noqa: F811
    from gpt_faster.text import tokenizer_files
    fast = Tokenizer.from_str(bpe.to_str())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=has)
    theirs, ours = both_tokenizers(tmp_path, fast, dict(tokenizer_class=name, bos_token="<s>", eos_token="</s>", add_prefix_space=stated))
    ids = theirs("the class", add_special_tokens=False)["input_ids"]
    assert ours.encode("the class", bos=False) == ids
    assert tokenizer_files.load(ours.state()).encode("the class", bos=False) == ids         # as a .pth keeps it


@pytest.mark.parametrize("decoder", [None, {}, {"1": dict(content="</s>", special=True)}])
@pytest.mark.parametrize("config, special_map", [
    (dict(bos_token="<s>", eos_token="</s>"), dict(bos_token="</s>", eos_token="<s>")), (dict(bos_token="<s>"), dict(bos_token=dict(content="</s>"))),
    (dict(), dict(bos_token="</s>", pad_token="<s>")), (dict(pad_token="<s>"), dict(pad_token="</s>", unk_token="<s>")),
])
def test_special_tokens_map_and_tokenizer_config(bpe, tmp_path, decoder, config, special_map):  # noqa: F811
    """The map counts, but it is not read next to added_tokens_decoder; end tokens are those of both."""
    theirs, ours = both_tokenizers(tmp_path, bpe, dict(config, added_tokens_decoder=decoder, tokenizer_class="PreTrainedTokenizerFast"),
                                   special_tokens_map=special_map)
    names = {key: value for key in ("bos_token", "eos_token", "pad_token", "unk_token") if (value := getattr(theirs, key)) is not None}
    assert ours.names == names
    assert ours.eos_ids == [ours.backend.id_of(t) for t in dict.fromkeys([names.get("eos_token"), config.get("eos_token"), special_map.get("eos_token")]) if t]


def test_clean_up_tokenization_spaces(bpe, tmp_path, capsys):  # noqa: F811
    """transformers cleans up for none of BPE's; for others it does, and we say that we do not."""
    theirs, ours = both_tokenizers(tmp_path, bpe, dict(tokenizer_class="PreTrainedTokenizerFast", clean_up_tokenization_spaces=True))
    ids = ours.encode("it 's , is n't .", bos=False)
    assert ours.decode(ids) == theirs.decode(ids) and "clean_up" not in capsys.readouterr().err
    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, ".": 2}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    both_tokenizers(tmp_path, words, dict(tokenizer_class="PreTrainedTokenizerFast", clean_up_tokenization_spaces=True))
    assert "not applied: clean_up_tokenization_spaces" in capsys.readouterr().err


@pytest.mark.parametrize("steps", ["sequence", "one"])
@pytest.mark.parametrize("config, model", [
    (dict(fix_mistral_regex=True), dict(model_type="mistral", transformers_version="4.46.0")), (dict(fix_mistral_regex=True), dict(model_type="mistral")),
    (dict(fix_mistral_regex=True), dict(model_type="mistral", transformers_version="5.1.0")), (dict(fix_mistral_regex=True), dict(model_type="llama")),
    (dict(fix_mistral_regex=False), dict(model_type="mistral")), (dict(), dict(model_type="mistral3")),
])
def test_fix_mistral_regex(bpe, tmp_path, steps, config, model):  # noqa: F811
    """It acts on vocabularies above 100,000 tokens, in models that were saved before transformers 5."""
    content = json.loads(bpe.to_str())
    vocab = content["model"]["vocab"]
    vocab.update({f"word{i}": len(vocab) + i for i in range(100_001)})
    fast = Tokenizer.from_str(json.dumps(content))
    split = pre_tokenizers.Split(Regex(r"\w+|\W+"), "isolated")
    if steps == "sequence":
        fast.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    (tmp_path / "config.json").write_text(json.dumps(model))
    theirs, ours = both_tokenizers(tmp_path, fast, dict(config, tokenizer_class="PreTrainedTokenizerFast"))
    text = "the class it's theThe 12 is!\n\n  a"
    assert ours.encode(text, bos=False) == theirs(text, add_special_tokens=False)["input_ids"]


def test_unknown_keys_of_the_tokenizers_files(bpe, tmp_path, capsys):  # noqa: F811
    from gpt_faster.text import tokenizer_files
    from tokenizer import load
    bpe.save(str(tmp_path / "tokenizer.json"))
    for name, text in (("tokenizer_config", dict(zeta=1, model_max_length=9, image_token="<i>", alpha_1=2)), ("special_tokens_map", dict(odd=1))):
        (tmp_path / f"{name}.json").write_text(json.dumps(text))
    for read in (load, tokenizer_files.load):
        read(tmp_path)
        assert capsys.readouterr().err == (f"note: {tmp_path}/tokenizer_config.json: unknown keys zeta, alpha_1: without effect here\n"
                                           f"note: {tmp_path}/special_tokens_map.json: unknown keys odd: without effect here\n")


# ---- Chat templates ----------------------------------------------------------------------------------

def template(name):
    return name + " {{ messages[0].content }}{% if tools %} with tools{% endif %}"


NAMED = [dict(name="default", template=template("default")), dict(name="tool_use", template=template("tool_use"))]
TEMPLATES = {                                              # file: content
    "in the config": {"tokenizer_config.json": dict(chat_template=template("config"))},
    "a file": {"chat_template.jinja": template("file")},
    "a file and the config": {"chat_template.jinja": template("file"), "tokenizer_config.json": dict(chat_template=template("config"))},
    "names": {"tokenizer_config.json": dict(chat_template=NAMED)},
    "names and a file": {"tokenizer_config.json": dict(chat_template=NAMED), "chat_template.jinja": template("file")},
    "more files": {"chat_template.jinja": template("file"), "additional_chat_templates/tool_use.jinja": template("more"),
                   "additional_chat_templates/rag.jinja": template("rag")},
    "more files and the config": {"tokenizer_config.json": dict(chat_template=template("config")), "additional_chat_templates/tool_use.jinja": template("more")},
    "names without default": {"tokenizer_config.json": dict(chat_template=[dict(name="rag", template=template("rag"))])},
    "config and chat_template.json": {"tokenizer_config.json": dict(chat_template=template("config")), "chat_template.json": dict(chat_template=template("json"))},
    "file and chat_template.json": {"chat_template.jinja": template("file"), "chat_template.json": dict(chat_template=template("json"))},
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_the_template_that_counts(bpe, tmp_path, capsys, case):  # noqa: F811
    from transformers import AutoTokenizer

    from gpt_faster.text import tokenizer_files
    from gpt_faster.text.chat_template import render
    bpe.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "additional_chat_templates").mkdir()
    files = {"tokenizer_config.json": {}, **TEMPLATES[case]}
    files["tokenizer_config.json"] = dict(files["tokenizer_config.json"], tokenizer_class="PreTrainedTokenizerFast")
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), tokenizer_files.load(tmp_path)
    assert ("none of the chat templates" in capsys.readouterr().err) == (ours.chat_template is None)
    again = tokenizer_files.load(ours.state())
    messages = [dict(role="user", content="hi")]
    for tools in (None, [dict(type="function", function=dict(name="f"))]):
        try:
            expected = theirs.apply_chat_template(messages, tools=tools, tokenize=False)
        except ValueError:
            assert tools is None or "tool_use" not in str(TEMPLATES[case])
            assert ours.chat_template is None
            continue
        assert render(ours, messages, tools=tools) == render(again, messages, tools=tools) == expected


def test_chat_template_json(bpe, tmp_path):  # noqa: F811
    """transformers' processors write it; where no other file has a template, it counts."""
    from gpt_faster.text import tokenizer_files
    bpe.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.json").write_text(json.dumps(dict(chat_template=template("json"))))
    assert tokenizer_files.load(tmp_path).chat_template == template("json")
    for text, message in (('{"chat_template": 3}', "chat_template.json: 'chat_template' is 3"), ("[]", "chat_template.json: expected a JSON object")):
        (tmp_path / "chat_template.json").write_text(text)
        with pytest.raises(ValueError, match=re.escape(message)):
            tokenizer_files.load(tmp_path)


# ---- generation_config.json and config.json ----------------------------------------------------------

@pytest.mark.parametrize("generation, config, text, expected", [
    (None, dict(do_sample=True, temperature=0.6), {}, dict(temperature=0.6)), ({}, dict(do_sample=True, temperature=0.6), {}, {}),
    (None, dict(repetition_penalty=1.3), dict(repetition_penalty=1.7), dict(repetition_penalty=1.3)),
    (None, {}, dict(do_sample=True, top_k=7), dict(top_k=7)), (dict(do_sample=True, top_k=3), dict(top_k=9), {}, dict(top_k=3)),
])
def test_sampling_values_of_config_json(tmp_path, generation, config, text, expected):
    """As transformers: they count only without a generation_config.json; the outer level wins."""
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert core.generation_defaults(tmp_path, text, config)[1] == expected
    (tmp_path / "config.json").write_text(json.dumps({**config, "text_config": text}))
    try:
        theirs = GenerationConfig.from_pretrained(tmp_path)
    except OSError:
        theirs = GenerationConfig.from_pretrained(tmp_path, config_file_name="config.json", _from_model_config=True)
    assert {key: getattr(theirs, key) for key in expected} == expected


@pytest.mark.parametrize("stated, line", [
    (dict(max_length=4096), "ignored in {}: max_length"), (dict(stop_strings=["x"], token_healing=True), "ignored in {}: stop_strings, token_healing"),
    (dict(exponential_decay_length_penalty=[5, 1.1], sequence_bias={"1": 2}), "ignored in {}: exponential_decay_length_penalty, sequence_bias"),
    (dict(chat_format="chatml", top_k=3), "{}: unknown keys chat_format: without effect here"), (dict(max_length=20, num_beams=1, pad_token_id=0), ""),
    (dict(no_repeat_ngram_size=0, min_new_tokens=None, bad_words_ids=[], forced_eos_token_id=None), ""),
])
def test_what_generation_config_asks_for_in_vain(tmp_path, capsys, stated, line):
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps(stated))
    for unknown in (core.unknown_keys, known_keys.GENERATION.unknown):
        core.generation_defaults(tmp_path, unknown=unknown)
        assert capsys.readouterr().err == (f"note: {line.format(path)}\n" if line else "")


# ---- GGUF metadata -------------------------------------------------------------------------------------

def gguf_with(tmp_path, add):
    """A Llama of one layer, with what `add` writes into its metadata."""
    import gguf
    import numpy as np
    w = gguf.GGUFWriter(str(tmp_path / "model.gguf"), "llama")
    for key, n in dict(block_count=1, context_length=128, embedding_length=32, feed_forward_length=48).items():
        w.add_uint32(f"llama.{key}", n)
    w.add_head_count(4)
    w.add_head_count_kv(2)
    w.add_layer_norm_rms_eps(1e-5)
    add(w)
    shapes = dict(attn_norm=[32], ffn_norm=[32], attn_q=[32, 32], attn_k=[16, 32], attn_v=[16, 32], attn_output=[32, 32],
                  ffn_gate=[48, 32], ffn_up=[48, 32], ffn_down=[32, 48])
    for name, shape in dict(token_embd=[40, 32], output=[40, 32], output_norm=[32], **{f"blk.0.{k}": v for k, v in shapes.items()}).items():
        w.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return tmp_path / "model.gguf"


def test_what_a_gguf_recommends(tmp_path, capsys):
    def add(w):
        for key, value in (("temp", 0.6), ("top_p", 0.9), ("min_p", 0.05), ("penalty_repeat", 1.1)):
            w.add_float32(f"general.sampling.{key}", value)
        w.add_int32("general.sampling.top_k", 7)
        w.add_int32("general.sampling.mirostat", 2)
        w.add_float32("general.sampling.xtc_threshold", 0.1)           # of no use without xtc_probability
    source = read_checkpoint(gguf_with(tmp_path, add))
    assert {k: round(v, 4) for k, v in source.defaults.items()} == dict(temperature=0.6, top_k=7, top_p=0.9, min_p=0.05, repetition_penalty=1.1)
    assert f"ignored in {tmp_path}/model.gguf: general.sampling.mirostat\n" in capsys.readouterr().err


@pytest.mark.parametrize("key, value, message", [
    ("llama.attention.causal", False, "'llama.attention.causal' is false: a bidirectional model"), ("llama.attention.causal", True, None),
    ("llama.rope.scaling.yarn_ext_factor", 0.5, "'llama.rope.scaling.yarn_ext_factor' is 0.5, which is not supported"),
    ("llama.rope.scaling.yarn_ext_factor", 1.0, None), ("llama.router_logit_softcapping", 30.0, "'llama.router_logit_softcapping' is 30.0"),
    ("llama.attention.output_scale", 0.5, "'llama.attention.output_scale' is 0.5"), ("llama.moe_latent_size", 8, "'llama.moe_latent_size' is 8"),
])
def test_what_a_gguf_asks_for_in_vain(tmp_path, key, value, message):
    add = {bool: "add_bool", int: "add_uint32", float: "add_float32"}[type(value)]
    path = gguf_with(tmp_path, lambda w: getattr(w, add)(key, value))
    if message is None:
        read_checkpoint(path)
        return
    with pytest.raises(ValueError, match=re.escape(message)):
        read_checkpoint(path)


def test_unknown_keys_of_a_gguf(tmp_path, capsys):
    def add(w):
        w.add_uint32("llama.zeta", 1)
        w.add_string("general.source.url", "x")
        w.add_string("odd.key", "x")
    read_checkpoint(gguf_with(tmp_path, add))
    assert f"note: {tmp_path}/model.gguf: unknown keys llama.zeta, odd.key: without effect here\n" in capsys.readouterr().err


@pytest.mark.parametrize("keys, kind", [
    ({"scaling.factor": 4.0}, "linear"), ({"scale_linear": 4.0}, "linear"), ({"scaling.factor": 4.0, "scaling.type": "none"}, "default"),
    ({"scaling.factor": 0.0}, "default"), ({"scaling.type": "linear", "scaling.factor": 2.0, "scale_linear": 4.0}, "linear"), ({}, "default"),
])
def test_rope_scaling_of_a_gguf(tmp_path, keys, kind):
    """llama.cpp's load_hparams: linear unless another type is stated; rope.scale_linear is the factor's old name."""
    def add(w):
        for key, value in keys.items():
            (w.add_string if isinstance(value, str) else w.add_float32)(f"llama.rope.{key}", value)
    [rope] = read_checkpoint(gguf_with(tmp_path, add)).cfg.rope
    assert rope.kind == kind and (kind == "default" or rope.factor == (2.0 if "scaling.type" in keys else 4.0))


# ---- adapter_config.json -------------------------------------------------------------------------------

@pytest.mark.parametrize("keys, message", [
    (dict(init_lora_weights="pissa_niter_4"), "'init_lora_weights' is 'pissa_niter_4', which is not supported"),
    (dict(init_lora_weights="olora"), "'init_lora_weights' is 'olora'"), (dict(init_lora_weights="loftq"), "'init_lora_weights' is 'loftq'"),
    (dict(kasa_config={"beta": 1}), "'kasa_config' is"), (dict(lora_bias=True), "'lora_bias' is not supported"),
])
def test_adapters_that_do_more_than_add(tmp_path, keys, message):
    from gpt_faster.formats.lora import _config
    (tmp_path / "adapter_config.json").write_text(json.dumps(dict(peft_type="LORA", lora_alpha=8, **keys)))
    with pytest.raises(ValueError, match=re.escape(message)):
        _config(tmp_path)


def test_keys_of_an_adapter_without_effect(tmp_path, capsys):
    from peft import LoraConfig

    from gpt_faster.formats.lora import _config
    LoraConfig(lora_alpha=8, target_modules=["q_proj"], init_lora_weights="gaussian").save_pretrained(tmp_path)
    _config(tmp_path)
    assert capsys.readouterr().err == ""
    c = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(dict(c, zeta=1)))
    _config(tmp_path)
    assert capsys.readouterr().err == f"note: {tmp_path}/adapter_config.json: unknown keys zeta: without effect here\n"
