"""GGUF tokenizers against llama.cpp: its lists as recorded, its split patterns, its types of tokens.

tests/llama_cpp_lists.json: the names, their source and date; scripts/dev/llama_cpp_lists.py writes it.
"""

import importlib.util
import json

import gguf
import pytest
from conftest import ROOT
from tokenizers import Regex, pre_tokenizers

from gpt_faster.text import gguf_tokenizer, tokenizer_files
from gpt_faster.text.byte_level import bytes_to_unicode
from gpt_faster.text.end_tokens import gguf_end_ids
from gpt_faster.text.gguf_tokenizer import (
    CONTROL,
    GGUF_SPLITS,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
)

spec = importlib.util.spec_from_file_location("llama_cpp_lists", ROOT / "scripts/dev/llama_cpp_lists.py")
lists = importlib.util.module_from_spec(spec)
spec.loader.exec_module(lists)
RECORD = json.loads(lists.RECORD.read_text())
LETTERS = list(bytes_to_unicode().values())
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


# ---- Lists ----------------------------------------------------------------------------------------

def test_llama_cpp_knows_nothing_more():
    assert len(RECORD["pre"]) > 90 and len(RECORD["end"]) > 20 and len(RECORD["models"]) > 10
    assert lists.differences(RECORD) == []


@pytest.mark.parametrize("key, name, line", [
    ("pre", "marsian", "pre-tokenizer marsian"), ("written_pre", "marsian", "the converter's pre-tokenizer marsian"),
    ("models", "runes", "tokenizer model runes"), ("end", "<stop>", "end: token <stop>"), ("other_names", "<fim>", "other_names: token <fim>")])
def test_a_new_name_is_seen(key, name, line):
    more = {**RECORD[key], name: []} if key == "pre" else [*RECORD[key], name]
    assert lists.differences({**RECORD, key: more}) == [line]


def test_a_changed_flag_is_seen():
    changed = {**RECORD["pre"], "qwen2": ["ignore_merges"], "lfm2": ["ignore_merges"]}
    assert lists.differences({**RECORD, "pre": changed}) == ["ignore_merges of qwen2", "add_bos of lfm2"]


SOURCE = '''
    } else if (tokenizer_model == "runes") {
    if (tokenizer_pre.empty()) { pre_type = DEFAULT;
    } else if (
            tokenizer_pre == "one" ||
            tokenizer_pre == "two") {
        ignore_merges = true;
        add_bos = true;
    } else if (tokenizer_pre == "three") {
        clean_spaces = false;
    } else { throw(format("unknown pre-tokenizer type: '%s'"
    if (t.first == "<fim>") {
    special_eog_ids.clear();
    if (false || t.first == "<stop>") {
    // @ngxson
    if (t.first == "<show>") {
'''


def test_the_script_reads_a_checkout(tmp_path, monkeypatch, capsys):
    for path, text in (("src/llama-vocab.cpp", SOURCE), ("conversion/base.py", 'res = "one"')):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text(text)
    found = lists.lists_of(tmp_path)
    assert found == dict(pre={"one": ["add_bos", "ignore_merges"], "two": ["add_bos", "ignore_merges"], "three": []}, written_pre=["one"],
                         models=["runes"], end=["<stop>"], other_names=["<fim>", "<show>"])
    monkeypatch.setattr("sys.argv", ["llama_cpp_lists.py", str(tmp_path), "--write", "9"])
    monkeypatch.setattr(lists, "RECORD", tmp_path / "record.json")
    with pytest.raises(SystemExit, match="1"):
        lists.main()
    assert "pre-tokenizer three" in capsys.readouterr().out.splitlines()
    assert json.loads((tmp_path / "record.json").read_text())["pre"] == found["pre"]


NO_END = {"BOS_ID", "UNK_ID", "SEP_ID", "PAD_ID", "MASK_ID", "FIM_PRE_ID", "FIM_SUF_ID", "FIM_MID_ID", "PREFIX_ID", "SUFFIX_ID", "MIDDLE_ID"}


@pytest.mark.parametrize("name", [name for name in vars(gguf.Keys.Tokenizer) if name.endswith("_ID")])
def test_each_id_key_of_the_gguf_package(name):
    """It ends a text, or is one of those that llama.cpp does not end at."""
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b", "<c>"], getattr(gguf.Keys.Tokenizer, name): 2}
    assert gguf_end_ids(metadata) == ([] if name in NO_END else [2])


def test_qwen2_5_ends_at_both():
    tokens = [*LETTERS, "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = byte_level(tokens, "qwen2", [NORMAL] * 256 + [CONTROL] * 3, merges=[], eos_token_id=258, bos_token_id=256, padding_token_id=256)
    assert sorted(tokenizer.eos_ids) == [256, 258]


# ---- Pre-tokenizers -------------------------------------------------------------------------------

def byte_level(tokens, pre, types=None, merges=("a b",), **more):
    metadata = dict(model="gpt2", pre=pre, tokens=tokens, token_type=types or [NORMAL] * len(tokens), merges=list(merges), **more)
    return tokenizer_files.load({f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None})


def pieces(pre, text):
    cuts = [pre_tokenizers.Split(Regex(split), "isolated") for split in GGUF_SPLITS[pre]]
    return [piece for piece, _ in pre_tokenizers.Sequence(cuts).pre_tokenize_str(text)]


# llama-server (of llama-cpp-python 0.3.36) encodes all of these texts alike, with a real vocabulary, but for qwen35: no NFC there.
PIECES = [
    ("llama-bpe", "I'LL be  12345\n\n ok", ["I", "'LL", " be", " ", " ", "123", "45", "\n\n", " ok"]),
    ("glm4", "don't 1234", ["don", "'t", " ", "123", "4"]),
    ("gpt-2", "I'LL be  12345\n", ["I", "'", "LL", " be", " ", " 12345", "\n"]),
    ("smollm", "a 12", ["a", " ", "1", "2"]),
    ("qwen2", "a 12/\n", ["a", " ", "1", "2", "/\n"]),
    ("qwen35", "e\u0301a 12", ["e\u0301a", " ", "1", "2"]),
    ("gpt-4o", "HelloWORLDs 1234/\n/", ["Hello", "WORLDs", " ", "123", "4", "/\n/"]),
    ("tekken", "HelloWORLDs 12", ["Hello", "WORLDs", " ", "1", "2"]),
    ("deepseek-v3", "中文a 1234.x", ["中文", "a", " ", "123", "4", ".x"]),
    ("hy_v4", "ひら漢", ["ひら漢"]),
    ("spark2_5", "a!\n\n12", ["a", "!", "\n", "\n", "1", "2"]),
    ("deepseek-llm", "Привет a1, 日本  \n", ["Привет", " a", "1", ",", " ", "日本", "  ", "\n"]),
    ("deepseek-coder", "def f(x12):\n", ["def", " f", "(", "x", "1", "2", "):", "\n"]),
    ("kimi-k2", "Hello中文abc's 1234/\n", ["Hello", "中文", "abc's", " ", "123", "4", "/\n"]),
    ("youtu", "가나a…b12HelloW", ["가나", "a", "…", "b", "1", "2", "Hello", "W"]),
    ("exaone-moe", "two words\n\n12", ["two words", "\n\n", "1", "2"]),
    ("jais-2", "a" + " " * 7 + "b", ["a", "    ", "  ", " b"]),
    ("minicpm5", "a12345 b", ["a", "123", "45", " b"]),
    ("ufakzeka", "Ali'nin I'll", ["Ali", "'nin", " I", "'ll"]),
    ("superbpe", "some words 1234567", ["some words ", "1", "234", "567"]),
    ("tiny_aya", "a1234567 HelloW", ["a", "1", "234", "567", " Hello", "W"]),
    ("bailingmoe", "I'm 12\n\n", ["I", "'m", " ", "1", "2", "\n\n"]),
    ("seed-coder", "a1!\n", ["a", "1", "!", "\n"]),
    ("laguna", "a1 \n\nb", ["a", "1", " ", "\n\n", "b"]),
    ("bloom", "a 12,b", ["a", " 12", ",", "b"]),
    ("viking", "a 12,b", ["a", " ", "1", "2", ",", "b"]),
    ("falcon", "a.b 12345", ["a", ".", "b", " ", "123", "45"]),
    ("chameleon", "IMGIMGAZa\tb    1,", ["IMGIMGAZ", "a", "\t", "b", "    ", "1", ","]),
    ("afmoe", "a1234日本b", ["a", "1", "234", "日本", "b"]),
]


@pytest.mark.parametrize("pre, text, expected", PIECES, ids=[row[0] for row in PIECES])
def test_pieces(pre, text, expected):
    assert pieces(pre, text) == expected


def test_each_pattern_has_a_case():
    assert {GGUF_SPLITS[pre] for pre, *_ in PIECES} == set(GGUF_SPLITS.values())


@pytest.mark.parametrize("pre", RECORD["pre"])
def test_each_name(pre, capsys):
    """It is read, with the beginning token and the whole words of llama.cpp, or refused with a reason."""
    tokens = [*LETTERS, "ab", "abc", "<s>"]                # no merge makes "abc"
    if pre in gguf_tokenizer.REFUSED_PRE:
        with pytest.raises(ValueError, match=f"'{pre}' is not supported: of embedding models"):
            byte_level(tokens, pre)
        return
    tokenizer = byte_level(tokens, pre, [NORMAL] * 258 + [CONTROL], bos_token_id=258)
    flags = RECORD["pre"][pre]
    expected = [257] if "ignore_merges" in flags else [256, LETTERS.index("c")]
    assert tokenizer.encode("abc") == [258] * ("add_bos" in flags or pre == "gemma4") + expected
    assert tokenizer.decode(tokenizer.encode("abc")) == "abc"
    if pre == "gemma4":
        assert byte_level(tokens, pre, bos_token_id=258, add_bos_token=False).add_bos
    else:
        for stated in (True, False):
            assert byte_level(tokens, pre, bos_token_id=258, add_bos_token=stated).add_bos is stated
    assert byte_level(tokens, pre, add_bos_token=True).encode("abc")[0] == 11
    assert "tokenizer.ggml.bos_token_id): token 11 ('" in capsys.readouterr().err


@pytest.mark.parametrize("model", RECORD["models"])
def test_each_model(model):
    metadata = {"tokenizer.ggml.model": model, "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "a", "b", "ab"]}
    if model in gguf_tokenizer.REFUSED_MODELS:
        with pytest.raises(ValueError, match=f"'{model}' is not supported: {gguf_tokenizer.REFUSED_MODELS[model]}"):
            tokenizer_files.load(metadata)
    else:
        assert tokenizer_files.load(metadata).n_vocab == 6


# ---- Types of tokens ------------------------------------------------------------------------------

def sentencepiece(more, model_name="", **keys):
    """A small SentencePiece tokenizer with these tokens, text -> type, from id 12 on."""
    plain = ["<unk>", "<s>", "</s>", SPACE, "h", "e", "l", "o", "he", "ll", "hello", SPACE + "hello"]
    tokens, types = [*plain, *more], [UNKNOWN, CONTROL, CONTROL, *[NORMAL] * 9, *more.values()]
    scores = [0.0] * 4 + [-9.0] * 4 + [-1.0, -2.0, -0.5, -0.4] + [0.0] * len(more)
    return tokenizer_files.load({"general.name": model_name, "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens,
                                 "tokenizer.ggml.token_type": types, "tokenizer.ggml.scores": scores,
                                 **{f"tokenizer.ggml.{key}": value for key, value in keys.items()}})


def test_user_defined_in_sentencepiece():
    """Mistral-7B-OpenOrca's GGUF: no space before the marker, one before the text after it. llama.cpp: 1 290 (space)hello."""
    tokenizer = sentencepiece({"<|im_start|>": USER_DEFINED, "two  words": USER_DEFINED})
    after = tokenizer.encode("hello")[1:]
    assert tokenizer.encode("<|im_start|>hello") == [1, 12, *after]
    assert tokenizer.encode("<|im_start|>hello", special=False) == [1, 12, *after]
    assert tokenizer.encode("hellotwo  words") == [1, *after, 13]
    assert tokenizer.decode([1, 12, *after]) == "<|im_start|> hello"
    plain = sentencepiece({"<|im_start|>": USER_DEFINED}, add_space_prefix=False)
    assert plain.encode("<|im_start|>hello") == [1, 12, *plain.encode("hello")[1:]] != tokenizer.encode("<|im_start|>hello")


@pytest.mark.parametrize("kind, matched, as_text, shown", [
    (CONTROL, True, False, False), (UNKNOWN, True, False, False), (USER_DEFINED, True, True, True), (NORMAL, False, False, True),
    (UNUSED, False, False, True)])
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_types(model, kind, matched, as_text, shown):
    """matched: in a text; as_text: also where a text's special tokens are letters; shown: when decoded."""
    if model == "llama":
        tokenizer, i = sentencepiece({"<x>": kind}), 12
    else:
        tokenizer, i = byte_level([*LETTERS, "<x>"], "gpt-2", [NORMAL] * 256 + [kind], merges=[]), 256
    assert (i in tokenizer.encode("o<x>o")) is matched
    assert (i in tokenizer.encode("o<x>o", special=False)) is as_text
    assert ("<x>" in tokenizer.decode([i])) is shown


@pytest.mark.parametrize("kind", [NORMAL, CONTROL, USER_DEFINED])
@pytest.mark.parametrize("name, keys", [("<stop>", dict(eos_token_id=12)), ("<stop>", dict(eot_token_id=12)), ("<|im_end|>", {}), ("<PRE>", {})])
@pytest.mark.parametrize("prefix", [True, False])
def test_end_tokens_are_tokens_whatever_their_type(kind, name, keys, prefix):
    tokenizer = sentencepiece({name: kind}, add_space_prefix=prefix, **keys)
    assert 12 in tokenizer.encode(f"hello{name}") and 12 not in tokenizer.encode(f"hello{name}", special=False)
    assert tokenizer.decode([12]) == "" and (12 in tokenizer.eos_ids) is (name != "<PRE>")


def test_an_end_token_of_one_character_stays_text():
    tokenizer = byte_level(LETTERS, "gpt-2", merges=[], eos_token_id=LETTERS.index("Ċ"))
    assert tokenizer.decode(tokenizer.encode("a\nb")) == "a\nb"
    assert len(tokenizer.encode("Ċ")) == 2


@pytest.mark.parametrize("name, strips", [("Phi-3-mini", True), ("phi3", True), ("Mistral", False), ("", False)])
def test_phi3_strips_spaces_after_its_tokens(name, strips):
    tokenizer = sentencepiece({"<|user|>": CONTROL, "<|endoftext|>": CONTROL}, name)
    hello, after = tokenizer.encode("hello", bos=False), tokenizer.encode("<|user|> hello", bos=False)
    assert (after == [12, *hello]) is strips
    assert tokenizer.encode("<|endoftext|> hello", bos=False) != [13, *hello]


def test_empty_tokens():
    """llama.cpp calls them [EMPTY_n]; the sentencepiece library refuses a piece without text."""
    tokenizer = sentencepiece({"": NORMAL})
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello" and tokenizer.n_vocab == 13


def test_an_eos_is_not_appended(capsys):
    tokenizer = sentencepiece({}, add_eos_token=True)
    assert tokenizer.encode("hello")[-1] != 2 and "add_eos_token" in capsys.readouterr().err
