"""What a model's small files state is acted on as transformers does, refused, or named in a line."""

import itertools
import json
import random

import pytest
from test_tokenizer import bpe  # noqa: F401
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

import checkpoint as core
from gpt_faster.formats.config import config_from_hf
from gpt_faster.text import tokenizer_files
from tokenizer import Detokenizer

# ---- config.json --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", core.FAMILIES)
def test_what_config_json_leaves_out(kind):
    """Our defaults are those of transformers' own class, in the core and in the whole tree."""
    from transformers import AutoConfig
    stated = dict(hidden_size=512, num_attention_heads=32, num_hidden_layers=4, intermediate_size=96, vocab_size=99)
    theirs = AutoConfig.for_model(kind, **stated)
    ours, again = core.config_from_hf(dict(stated, model_type=kind))[0], config_from_hf(dict(stated, model_type=kind))[0]
    assert ours == again
    assert (ours.context, ours.n_kv_head, ours.norm_eps) == (
        theirs.max_position_embeddings, theirs.num_key_value_heads, theirs.rms_norm_eps)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 16) and ours.tied == theirs.tie_word_embeddings
    assert ours.rope[0].theta == theirs.rope_parameters["rope_theta"]
    assert set(ours.window) == {getattr(theirs, "sliding_window", None)}
    if ours.moe:
        facts = theirs.num_local_experts if kind == "mixtral" else theirs.num_experts
        assert (ours.moe.n_expert, ours.moe.n_active) == (facts, theirs.num_experts_per_tok)


def of_kind(kind, **more):
    return dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, intermediate_size=96, vocab_size=99,
                model_type=kind, **more)


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize("config, message", [
    (of_kind("llama", is_causal=False), "'is_causal' is false"), (of_kind("qwen3", is_causal=False), "'is_causal' is false"),
    (of_kind("llama", layer_types=[SLIDING, FULL], sliding_window=8), "'layer_types' contradicts"),
    (of_kind("qwen2", layer_types=[SLIDING, FULL], sliding_window=8), "'layer_types' contradicts"),
    (of_kind("qwen3_moe", layer_types=[SLIDING, FULL], sliding_window=8, use_sliding_window=True), "'layer_types' contradicts"),
    (of_kind("mistral", sliding_window="8"), "'sliding_window' is '8'"), (of_kind("mistral", sliding_window=-1), "'sliding_window' is -1"),
    (of_kind("mistral", sliding_window=True), "'sliding_window' is True"),
    (of_kind("qwen3_moe", norm_topk_prob="false"), "'norm_topk_prob' is 'false', expected true or false"),
    (of_kind("llama", tie_word_embeddings="false"), "'tie_word_embeddings' is 'false'"),
    (of_kind("llama", attention_bias=[1]), "'attention_bias' is [1]"), (of_kind("qwen2", use_sliding_window="no"), "'use_sliding_window' is 'no'"),
    (of_kind("llama", rms_norm_eps=-1e-6), "'rms_norm_eps' is -1e-06"), (of_kind("llama", hidden_act=["silu"]), "activation ['silu']"),
    (of_kind("llama", rope_scaling=dict(rope_type="yarn", factor=0.0, original_max_position_embeddings=64)), "'factor' is 0"),
    (of_kind("llama", rope_scaling=dict(rope_type="linear", factor=-2.0)), "'factor' is -2"),
    (of_kind("llama", rope_scaling=dict(rope_type="yarn", factor=2.0, attention_factor=[1])), "'attention_factor' is [1]"),
    (of_kind("llama", rope_scaling=dict(rope_type="llama3", factor=2.0, low_freq_factor=4, high_freq_factor=4)), "'high_freq_factor' is 4"),
    (of_kind("qwen3_moe", decoder_sparse_step=0), "'decoder_sparse_step' is 0"), (of_kind("qwen3_moe", mlp_only_layers=3), "'mlp_only_layers' is 3"),
    (of_kind("llama", scale_emb=12), "'scale_emb' is not supported here"), (of_kind("llama", per_layer_config={"0": {}}), "'per_layer_config' is"),
])
def test_what_the_core_cannot_do_is_refused(config, message):
    with pytest.raises(ValueError) as e:
        core.config_from_hf(config)
    assert message in str(e.value) and "\n" not in str(e.value)


def test_what_a_layer_type_may_say():
    """Where transformers acts on it, so do we."""
    for kind, on in (("mistral", {}), ("qwen2", dict(use_sliding_window=True)), ("qwen3", dict(use_sliding_window=True))):
        cfg, _ = core.config_from_hf(of_kind(kind, layer_types=[FULL, SLIDING], sliding_window=8, **on))
        assert cfg.window == (None, 8)
    assert core.config_from_hf(of_kind("llama", layer_types=[FULL, FULL]))[0].window == (None,)
    assert core.config_from_hf(of_kind("llama", is_causal=True, attention_bias=None))[0] == core.config_from_hf(of_kind("llama"))[0]


# ---- generation_config.json ---------------------------------------------------------------------

@pytest.mark.parametrize("stated, expected, noted", [
    (dict(repetition_penalty=1.3), dict(repetition_penalty=1.3), ""),          # acts on greedy text too
    (dict(temperature=0.6, top_p=0.9), {}, ""),                                # as transformers: without do_sample it is greedy's
    (dict(do_sample=True, temperature=0.6, top_k=20), dict(temperature=0.6, top_k=20), ""),
    (dict(do_sample=False, temperature=0.6), dict(temperature=0.0), ""),       # stated, not left out
    (dict(no_repeat_ngram_size=3, suppress_tokens=[5]), {}, "no_repeat_ngram_size, suppress_tokens"),
    (dict(no_repeat_ngram_size=0, suppress_tokens=[], num_beams=1, typical_p=1.0, guidance_scale=None), {}, ""),
    (dict(eos_token_id="2"), {}, "'eos_token_id' is '2'"), (dict(eos_token_id=[2, None]), {}, ""), (dict(eos_token_id=-1), {}, ""),
    (dict(do_sample=True, top_p="x"), {}, "top_p"), (dict(min_new_tokens=3), {}, "min_new_tokens"),
])
def test_generation_config(tmp_path, capsys, stated, expected, noted):
    (tmp_path / "generation_config.json").write_text(json.dumps(stated))
    _, defaults = core.generation_defaults(tmp_path)
    said = capsys.readouterr().err
    assert defaults == expected and noted in said and bool(said) == bool(noted)


# ---- The tokenizer's files ----------------------------------------------------------------------

TEXT = "a <x> b<x>c </s><sop> <q>the class"
OBJECT = dict(lstrip=False, rstrip=False, single_word=False, normalized=False, special=False)
BESIDE = [
    dict(added_tokens_decoder={"600": dict(OBJECT, content="<x>")}), dict(added_tokens_decoder={"600": dict(OBJECT, content="<x>", special=True)}),
    dict(added_tokens_decoder={"600": dict(OBJECT, content="<x>", lstrip=True)}),
    dict(added_tokens_decoder={"600": dict(OBJECT, content="<x>", rstrip=True, special=True), "601": dict(OBJECT, content="<q>")}),
    dict(additional_special_tokens=["<x>", "<q>"]), dict(eos_token="<x>"), dict(eos_token="</s>"), dict(pad_token={"__type": "AddedToken", "content": "<x>", "lstrip": True}),
    dict(added_tokens_decoder={"1": dict(OBJECT, content="</s>", special=True, lstrip=True)}),
]


@pytest.mark.parametrize("config", BESIDE)
def test_tokens_beside_a_tokenizer_json(bpe, tmp_path, config):  # noqa: F811
    """Stated in tokenizer_config.json alone: the same ids and the same text as transformers'."""
    from transformers import AutoTokenizer
    fast = Tokenizer.from_str(bpe.to_str())
    fast.add_tokens([AddedToken("<sop>", special=False)])
    fast.add_tokens([AddedToken("<y>", special=False)]) if "600" not in str(config) else None
    fast.save(str(tmp_path / "tokenizer.json"))
    if "600" in str(config):                               # the next free ids
        n = fast.get_vocab_size()
        config = json.loads(json.dumps(config).replace("600", str(n)).replace("601", str(n + 1)))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(dict(config, tokenizer_class="PreTrainedTokenizerFast")))
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), tokenizer_files.load(tmp_path)
    ids = ours.encode(TEXT)
    assert ids == theirs(TEXT)["input_ids"]
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    again = tokenizer_files.load(ours.state())             # as a .pth keeps it
    assert again.encode(TEXT) == ids and again.decode(ids) == ours.decode(ids) and again.eos_ids == ours.eos_ids


def test_an_added_token_with_another_id_is_named(bpe, tmp_path, capsys):  # noqa: F811
    bpe.save(str(tmp_path / "tokenizer.json"))
    config = dict(added_tokens_decoder={"9000": dict(OBJECT, content="<x>")})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = tokenizer_files.load(tmp_path)
    n = bpe.get_vocab_size()
    assert tokenizer.encode("<x>")[-1] == n and f"'<x>' is {n}, not 9000" in capsys.readouterr().err


@pytest.mark.parametrize("template, before, behind", [
    ("<s> $A", [0], []), ("<s> </s> $A", [0, 1], []), ("$A", [], []), ("<s> $A </s>", [0], [1]), ("$A </s>", [], [1]), ("</s> $A <s> <s>", [1], [0, 0]),
])
@pytest.mark.parametrize("config", [{}, dict(bos_token="</s>"), dict(bos_token="not a token")])
def test_what_stands_around_a_text(bpe, tmp_path, capsys, template, before, behind, config):  # noqa: F811
    """All that the file puts first; what it puts behind is left out with a line, since a prompt goes on."""
    from transformers import AutoTokenizer
    fast = Tokenizer.from_str(bpe.to_str())
    fast.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<s>", 0), ("</s>", 1)])
    fast.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(dict(config, tokenizer_class="PreTrainedTokenizerFast")))
    ids = tokenizer_files.load(tmp_path).encode("the class")
    assert ids[:len(before)] == before
    assert ids + behind == AutoTokenizer.from_pretrained(tmp_path)("the class")["input_ids"]
    assert ("to each text: left out" in capsys.readouterr().err) == bool(behind)


def test_a_vocabulary_without_letters():
    """The prefix is found by whatever text the vocabulary has."""
    fast = Tokenizer(models.WordLevel({"<s>": 0, "t1": 1, "t2": 2}, unk_token=None))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    from tokenizer import TokenizersBackend
    assert TokenizersBackend(fast.to_str()).prefix == [0]


def test_what_is_not_supported_is_refused(bpe, tmp_path):  # noqa: F811
    bpe.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(dict(split_special_tokens=True)))
    with pytest.raises(ValueError, match="'split_special_tokens' is not supported"):
        tokenizer_files.load(tmp_path)


def test_streamed_text_is_whole_text(bpe):  # noqa: F811
    """Whatever tokens come, hidden ones among them: the pieces together are what decode() gives."""
    spaced = Tokenizer.from_str(bpe.to_str())
    spaced.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])      # takes a first space off, as Llama's
    rng = random.Random(0)
    for fast, _ in itertools.product((bpe, spaced), range(60)):
        from tokenizer import Tokenizer as Ours
        from tokenizer import TokenizersBackend
        ours = Ours(TokenizersBackend(fast.to_str()), 0, True)
        words = [fast.token_to_id(word) for word in ("Ġthe", "Ġa", "<s>", "</s>", "é", "Ġ")]
        words = [i for i in words if i is not None]
        prompt, new = ([rng.choice(words) if rng.random() < 0.7 else rng.randrange(fast.get_vocab_size()) for _ in range(n)] for n in (3, 12))
        stream = Detokenizer(ours, prompt)
        text = "".join(map(stream.push, new)) + stream.flush()
        assert text == ours.decode(prompt + new)[len(ours.decode(prompt)):], (prompt, new)
