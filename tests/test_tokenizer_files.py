"""Tokenizer files other than tokenizer.json, tokenizer.model and GGUF: each equals the library that made it, or is refused by name.

mistral-common's and tiktoken's ids are kept in tokenizer_samples.py; transformers reads vocab.json with merges.txt here.
"""

import json
import random
import unicodedata
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tokenizer_samples as samples
import torch
from test_tokenizer import bpe, sp_model, streamed  # noqa: F401

import tokenizer as core
from checkpoint import save_checkpoint
from gpt_faster.formats.load import read_checkpoint
from gpt_faster.text import rank_files, tokenizer_files, vocab_merges
from gpt_faster.text.token_bytes import token_bytes

N = len(samples.ranks())


def written(path, **files):
    """name=dict or list: name.json; name=(file, bytes): that file."""
    for name, content in files.items():
        if isinstance(content, tuple):
            (path / content[0]).write_bytes(content[1])
        else:
            (path / f"{name}.json").write_text(json.dumps(content))
    return path


def tiktoken_directory(path, family, **config):
    file, stated, _ = samples.TIKTOKENS[family]
    config = {**stated, **config}
    return written(path, file=(file, samples.tiktoken_file()), **({"tokenizer_config": config} if config else {}))


def check_round_trips(tokenizer, texts):
    """Decoding, streaming, bytes of tokens and the state of a .pth."""
    again = tokenizer_files.load(tokenizer.state())
    pieces = token_bytes(tokenizer)
    for text in texts:
        ids = tokenizer.encode(text, bos=False, special=False)
        assert tokenizer.decode(ids) == text == streamed(tokenizer, [], ids)
        assert b"".join(pieces[i] for i in ids) == text.encode()
        assert again.encode(text) == tokenizer.encode(text) and again.decode(ids) == text
    assert (again.eos_ids, again.names, again.prefix, again.n_vocab) == (
        tokenizer.eos_ids, tokenizer.names, tokenizer.prefix, tokenizer.n_vocab)


# ---- tekken.json ---------------------------------------------------------------------------------

@pytest.mark.parametrize("version", samples.TEKKENS)
def test_tekken_equals_mistral_common(version, tmp_path):
    tokenizer = tokenizer_files.load(written(tmp_path, tekken=samples.tekken(**samples.TEKKENS[version])))
    texts = samples.hard_strings(samples.SPECIAL)
    ids = [tokenizer.encode(text, bos=False, special=False) for text in texts]
    assert (tokenizer.n_vocab, samples.digest(ids)) == samples.OF_MISTRAL_COMMON[version]
    check_round_trips(tokenizer, texts[:300])


def test_tekken_special_tokens(tmp_path):
    """They have the first ids; a text begins with <s>; fillers are tokens too. Without the directory's own config, as Devstral's."""
    tokenizer = tokenizer_files.load(written(tmp_path, tekken=samples.tekken(**samples.TEKKENS["v11"])))
    assert tokenizer.encode("[INST]a[/INST]") == [1, 3, 100 + ord("a"), 4] and tokenizer.encode("a", bos=False) == [100 + ord("a")]
    assert tokenizer.encode("</s><SPECIAL_99>[ARGS]", bos=False) == [2, 99, 20] and tokenizer.decode([1, 3, 197, 2]) == "a"
    assert 3 not in tokenizer.encode("[INST]", special=False)
    assert tokenizer.eos_ids == [2] and tokenizer.names["bos_token"] == "<s>" and tokenizer.chat_template is None
    assert [tokenizer.piece(i) for i in (19, 21, 22)] == ["[TOOL_CONTENT]", "[CALL_ID]", "<SPECIAL_22>"]


def test_the_config_beside_a_tekken_file(tmp_path):
    config = dict(add_bos_token=False, eos_token="[/INST]", chat_template="from the config")
    tokenizer = tokenizer_files.load(written(tmp_path, tekken=samples.tekken(), tokenizer_config=config))
    assert tokenizer.encode("a") == [30 + ord("a")] and tokenizer.eos_ids == [4] and tokenizer.chat_template == "from the config"


def test_tekken_equals_transformers(tmp_path):
    from transformers.integrations.mistral.tokenizer import MistralConverter
    path = written(tmp_path, tekken=samples.tekken(**samples.TEKKENS["v13"]))
    theirs, ours = MistralConverter(str(path / "tekken.json")).converted(), tokenizer_files.load(path)
    for text in samples.hard_strings(samples.SPECIAL, 300):
        assert ours.encode(text, bos=False) == theirs.encode(text).ids
    assert ours.n_vocab == theirs.get_vocab_size()


@pytest.mark.parametrize("change, said", [
    (dict(config=None), "no 'pattern' and 'vocab': not a tekken.json"),
    (dict(vocab={}), "no 'pattern' and 'vocab'"),
    (dict(version="3"), "'version' is '3', expected v3"),
    (dict(version="v13"), "no 'special_tokens', which files of version v13 have"),
    (dict(n_special=7), "'default_num_special_tokens' is 7, with 20 of them"),
    (dict(default_vocab_size=100), "'default_vocab_size' is 100, with 30 special tokens"),
    (dict(default_vocab_size=10000), "'default_vocab_size' is 10000"),
    (dict(default_vocab_size="all"), "'default_vocab_size' is 'all'"),
    (dict(special=["<unk>", "<s>"], n_special=2), "special token </s> is missing"),
    (dict(special=["<unk>", "<s>", "</s>", "<s>"], n_special=4), "two of the special tokens are equal"),
    (dict(special=["<unk>", "<s>", "</s>", 4], n_special=4), "special token 3 is 4, expected a text"),
    (dict(pattern="("), "tekken.json: not a readable split pattern: Oniguruma error"),
    (dict(pattern=r"\p{N}{1,3}+|\s"), "its pattern has '}.', which the tokenizers library reads otherwise"),
    (dict(pattern=r"\s+$|\S+|\s+"), r"its pattern has '\$'"),
    (dict(vocab=[dict(rank=0, token_bytes="AA==")] * 400), "token 1 is"),
    (dict(vocab=[dict(rank=i, token_bytes="AA==") for i in range(400)]), "two of the tokens are equal"),
    (dict(vocab=[dict(rank=i, token_bytes="!") for i in range(400)]), "token 0 is"),
])
def test_a_damaged_tekken_file_is_refused(change, said, tmp_path):
    whole = {key: change.pop(key) for key in ("config", "vocab") if key in change}
    content = {**samples.tekken(**change), **whole}
    with pytest.raises(ValueError, match=said):
        tokenizer_files.load(written(tmp_path, tekken=content))


# ---- tiktoken ------------------------------------------------------------------------------------

@pytest.mark.parametrize("family", samples.TIKTOKENS)
def test_tiktoken_files_equal_tiktoken(family, tmp_path):
    tokenizer = tokenizer_files.load(tiktoken_directory(tmp_path, family))
    special = {text: N + i for i, text in samples.TIKTOKENS[family][2].items()}
    texts = samples.hard_strings(special)
    digests = [samples.digest([tokenizer.encode(text, bos=False, special=s) for text in texts]) for s in (False, True)]
    assert tuple(digests) == samples.OF_TIKTOKEN[family]
    for text, i in special.items():
        assert tokenizer.encode(text, bos=False) == [i] and tokenizer.decode([i]) == "" and tokenizer.piece(i) == text
    nfc = family in samples.NFC
    check_round_trips(tokenizer, [unicodedata.normalize("NFC", t) if nfc else t for t in texts[:300]])


@pytest.mark.parametrize("family, prefix, ends, n", [
    ("kimi", [], [1], 256), ("qwen1", [], [0, 2], 208), ("hunyuan", [], [0, 3], 210), ("glm4", [2, 4], [0, 7, 9], 14), ("llama3", [0], [1, 8, 9], 256)])
def test_what_a_family_adds(family, prefix, ends, n, tmp_path):
    tokenizer = tokenizer_files.load(tiktoken_directory(tmp_path, family))
    assert tokenizer.n_vocab == N + n and tokenizer.encode("a") == [*(N + i for i in prefix), ord("a")]
    assert tokenizer.eos_ids == [N + i for i in ends]


def test_added_tokens_of_a_tiktoken_file(tmp_path):
    """The config's texts replace the family's; what it does not name is reserved; one that is not special is shown."""
    decoder = {**samples.kimi_config()["added_tokens_decoder"], str(N + 11): dict(content="<|tool_call_begin|>", special=False),
               str(N + 300): dict(content="<|far|>", special=True)}
    path = tiktoken_directory(tmp_path, "kimi", added_tokens_decoder=decoder, chat_template="t")
    tokenizer = tokenizer_files.load(path)
    assert tokenizer.n_vocab == N + 301 and tokenizer.encode("<|far|>") == [N + 300] and tokenizer.chat_template == "t"
    assert tokenizer.encode(f"<|reserved_token_{N + 299}|>") == [N + 299]
    assert tokenizer.decode([N + 11, N + 300]) == "<|tool_call_begin|>"
    assert tokenizer.names == {f"{k}_token": f"[{k.upper()}]" for k in ("bos", "eos", "unk", "pad")}


def test_the_class_decides_and_the_file_if_it_says_nothing(tmp_path):
    data, rank = samples.tiktoken_file(), ord("é".encode("latin-1"))
    for kind, n_digits in (("QWenTokenizer", 4), ("ChatGLM4Tokenizer", 2), ("PreTrainedTokenizerFast", 2), (None, 2)):
        config = {} if kind is None else dict(tokenizer_class=kind)
        tokenizer = tokenizer_files.load(written(tmp_path, file=("tokenizer.model", data), tokenizer_config=config))
        assert len(tokenizer.encode("1234", bos=False)) == n_digits, kind       # 123 is a token
    assert rank < N


@pytest.mark.parametrize("file, config, said", [
    ("tokenizer.model", dict(tokenizer_class="NewTokenizer"), "tokenizer.model: tiktoken format of 'tokenizer_class' 'NewTokenizer': its split"),
    ("tiktoken.model", dict(auto_map={"AutoTokenizer": ["x.NewTokenizer", None]}), "'NewTokenizer'.*add a tokenizer.json"),
    ("cl100k_base.tiktoken", {}, "cl100k_base.tiktoken: tiktoken format without 'tokenizer_class'"),
    ("qwen.tiktoken", dict(added_tokens_decoder={"4000000": "<x>"}), "an added token has the id 4000000, and the file"),
    ("qwen.tiktoken", dict(added_tokens_decoder={str(N): "a"}), "the special token 'a' would be 97, not"),
])
def test_an_unknown_tiktoken_file_is_refused(file, config, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        tokenizer_files.load(written(tmp_path, file=(file, samples.tiktoken_file()), tokenizer_config=config))


@pytest.mark.parametrize("data, said", [
    (b"IQ== 0\nIg== 2\n", "ranks are not 0 to 1"), (b"IQ== 0\n? 1\n", "line 2 is b'. 1', expected a base64 token"),
    (b"version https://git-lfs.github.com/spec/v1\n", "qwen.tiktoken: line 1 is b'version https")])
def test_a_damaged_tiktoken_file_is_refused(data, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        tokenizer_files.load(written(tmp_path, file=("qwen.tiktoken", data)))


def test_hunyuan_counts_lines(tmp_path):
    """A token that its file has twice counts once, and the ranks written there do not."""
    lines = [line.split() for line in samples.tiktoken_file().splitlines()]
    lines.insert(300, lines[0])
    data = b"".join(token + b" %d\n" % i for i, (token, _) in enumerate(lines))
    tokenizer = tokenizer_files.load(written(tmp_path, file=("hy.tiktoken", data)))
    assert tokenizer.n_vocab == N + 210 and tokenizer.decode(tokenizer.encode(" return")) == " return"


def test_stable_lm_2_leaves_an_id_out(tmp_path, monkeypatch):
    """Its special tokens begin at 100257, behind 100256 ranks: here as if the sample's ranks were these."""
    family = rank_files.FILES["arcade100k.tiktoken"]
    assert family.first_special == {100256: 100257}
    monkeypatch.setitem(rank_files.FILES, "arcade100k.tiktoken", replace(family, first_special={N: N + 1}))
    tokenizer = tokenizer_files.load(written(tmp_path, file=("arcade100k.tiktoken", samples.tiktoken_file())))
    assert tokenizer.n_vocab == N + 1 + 32 and tokenizer.eos_ids == [N + 1, N + 1 + 21]
    assert tokenizer.encode("<|reg7|>a<|fim_prefix|>") == [N + 1 + 30, ord("a"), N + 2]


# ---- vocab.json and merges.txt -------------------------------------------------------------------

def vocab_directory(path, bpe, kind, **config):  # noqa: F811
    """The model of a tokenizer.json as a pair of files, with an added token behind them."""
    model = json.loads(bpe.to_str())["model"]
    vocab = {**model["vocab"], "<|endoftext|>": len(model["vocab"])}
    merges = "".join(f"{a} {b}\n" for a, b in model["merges"])
    decoder = {str(len(vocab)): dict(content="<|im_end|>", special=True), str(len(vocab) + 1): dict(content="<tool>", special=False)}
    return written(path, vocab=vocab, merges=("merges.txt", f"#version: 0.2\n{merges}".encode()),
                   tokenizer_config=dict(tokenizer_class=kind, added_tokens_decoder=decoder, **config))


@pytest.mark.parametrize("prefix_space", [False, True])
@pytest.mark.parametrize("kind", vocab_merges.CLASSES)
def test_vocab_and_merges_equal_transformers(kind, prefix_space, bpe, tmp_path):  # noqa: F811
    from transformers import AutoTokenizer
    path = vocab_directory(tmp_path, bpe, kind, add_prefix_space=prefix_space)
    ours = tokenizer_files.load(path)
    if kind == "Qwen3_5Tokenizer":                         # 5.23's from_pretrained() drops its vocabulary
        from transformers import Qwen3_5Tokenizer
        stated = {k: json.loads((path / f"{k}.json").read_text()) for k in ("vocab", "tokenizer_config")}
        stated["tokenizer_config"].pop("added_tokens_decoder")
        theirs = Qwen3_5Tokenizer(vocab=stated["vocab"], merges=[tuple(m) for m in json.loads(bpe.to_str())["model"]["merges"]], **stated["tokenizer_config"])
        theirs.add_tokens(["<|im_end|>"], special_tokens=True)
        theirs.add_tokens(["<tool>"])
    else:
        theirs = AutoTokenizer.from_pretrained(path)
    assert type(theirs).__name__ == kind and len(theirs) == ours.n_vocab
    assert ours.eos_ids == [theirs.eos_token_id] and ours.bos_id == theirs.bos_token_id
    for text in samples.hard_strings(["<|im_end|>", "<|endoftext|>", "<tool>"], 400):
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_vocab_and_merges_with_other_special_tokens(bpe, tmp_path):  # noqa: F811
    """OPT's class and tokens: </s> in front of each text; the class has <|endoftext|> for all."""
    from transformers import AutoTokenizer
    path = vocab_directory(tmp_path, bpe, "GPT2Tokenizer", bos_token="</s>", eos_token="</s>", unk_token="</s>", pad_token="<s>", add_bos_token=True)
    ours, theirs = tokenizer_files.load(path), AutoTokenizer.from_pretrained(path)
    assert ours.eos_ids == [1] and ours.n_vocab == len(theirs)
    texts = samples.hard_strings(["</s>", "<s>", "<|endoftext|>"], 300)
    for text in texts:
        ids = ours.encode(text)
        assert ids == theirs.encode(text) and ids[0] == 1 and ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    check_round_trips(ours, samples.hard_strings(n=100))


def test_merges_of_hash_signs(tmp_path):
    """A merge that begins with # is no comment."""
    letters = {c: i for i, c in enumerate(rank_files.bytes_to_unicode().values())}
    vocab = {**letters, "##": 256, "####": 257, "<|endoftext|>": 258}
    path = written(tmp_path, vocab=vocab, merges=("merges.txt", b"#version: 0.2\n# #\n## ##\n"), tokenizer_config=dict(tokenizer_class="GPT2Tokenizer"))
    assert tokenizer_files.load(path).encode("######") == [257, 256]


def test_the_class_by_model_type(bpe, tmp_path):  # noqa: F811
    """As transformers' AutoTokenizer where tokenizer_config.json names none."""
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES
    path = vocab_directory(tmp_path, bpe, None)
    for name, kinds in vocab_merges.MODEL_TYPES.items():
        for kind in kinds:
            assert TOKENIZER_MAPPING_NAMES.get(kind, name).removesuffix("Fast") in (name, "CodeGenTokenizer"), kind
            written(path, config=dict(model_type=kind))
            assert vocab_merges.class_of(path, {}) == name
    written(path, config=dict(model_type="qwen2", tokenizer_class="GPT2TokenizerFast"))
    assert vocab_merges.class_of(path, {}) == "GPT2Tokenizer"


@pytest.mark.parametrize("files, said", [
    (dict(tokenizer_config=dict(tokenizer_class="RobertaTokenizer")), "of 'tokenizer_class' 'RobertaTokenizer': add a tokenizer.json .*GPT2"),
    (dict(tokenizer_config={}), "without 'tokenizer_class': add"),
    (dict(tokenizer_config={}, config=dict(model_type="llama")), "without 'tokenizer_class'"),
    (dict(merges=("merges.txt", b"#version: 0.2\nq\n")), "not a vocabulary with merges"),
    (dict(merges=("merges.txt", b"the zebra\n")), "not a vocabulary with merges"),
    (dict(vocab={"a": "x"}), "vocab.json: 1 of 1 tokens have no id"),
    (dict(vocab=["a"]), "vocab.json: expected a JSON object"),
])
def test_vocab_and_merges_that_cannot_be_are_refused(files, said, bpe, tmp_path):  # noqa: F811
    path = vocab_directory(tmp_path, bpe, "GPT2Tokenizer")
    with pytest.raises(ValueError, match=said):
        tokenizer_files.load(written(path, **files))


# ---- Which file is read, and what is refused -----------------------------------------------------

@pytest.mark.parametrize("names", [["tokenizer.model.v3"], ["mistral_instruct_tokenizer_241114.model.v7m1"], ["a.model.v11", "a.model.v3"]])
def test_sentencepiece_under_mistrals_names(names, sp_model, tmp_path):  # noqa: F811
    """Of several the newest."""
    for name, data in zip(names, (sp_model.read_bytes(), b"older")):
        written(tmp_path, file=(name, data))
    assert tokenizer_files.load(tmp_path).encode("the class") == tokenizer_files.load(sp_model.parent).encode("the class")


def test_tekken_under_its_dated_name(tmp_path):
    assert tokenizer_files.load(written(tmp_path, tekken_240911=samples.tekken())).encode("a") == [1, 30 + ord("a")]


@pytest.mark.parametrize("file, said", [
    ("spiece.model", "SentencePiece with the ids of T5"), ("sentencepiece.bpe.model", "SentencePiece with the ids of XLM-R"),
    ("source.spm", "an encoder-decoder"), ("vocab.txt", "WordPiece"), ("rwkv_vocab_v20230424.txt", "RWKV"), ("vocab.bpe", "rename to vocab.json"),
    ("vocab.json", "without merges.txt"), ("merges.txt", "without vocab.json"), ("special.model", "of an unknown kind")])
def test_what_is_not_supported_is_named(file, said, tmp_path):
    with pytest.raises(FileNotFoundError, match=rf"no tokenizer that is supported, found {file} \(.*{said}.*add a tokenizer.json"):
        tokenizer_files.load(written(tmp_path, file=(file, b"{}")))


@pytest.mark.parametrize("file", ["tekken.json", "tiktoken.model", "qwen.tiktoken", "tokenizer.model.v3", "vocab.json"])
def test_the_core_names_what_the_full_tree_reads(file, tmp_path):
    with pytest.raises(FileNotFoundError, match=f"expected tokenizer.json or tokenizer.model, found {file}: add a tokenizer.json, or use the full tree"):
        core.load(written(tmp_path, file=(file, b"{}")))
    with pytest.raises(ValueError, match="tokenizer.model: tiktoken format.* add a tokenizer.json, or use the full tree"):
        core.load(written(tmp_path, file=("tokenizer.model", samples.tiktoken_file())))


def test_tokenizer_json_wins(bpe, tmp_path):  # noqa: F811
    bpe.save(str(tmp_path / "tokenizer.json"))
    written(tmp_path, tekken=samples.tekken(pattern=r"\S+|\s+"), file=("tokenizer.model", samples.tiktoken_file()))
    assert tokenizer_files.load(tmp_path).n_vocab == bpe.get_vocab_size()


def test_a_tokenizer_json_that_splits_otherwise_than_tekken(bpe, tmp_path, capsys):  # noqa: F811
    """As Mistral Small 3.1's: the same tokens behind another pattern."""
    from tokenizers import Regex, Tokenizer, pre_tokenizers
    fast = Tokenizer.from_str(bpe.to_str())
    for pattern, differs in ((samples.TEKKEN_PATTERN, False), (samples.PATTERNS["llama3"], True), (samples.PATTERNS["qwen1"], True)):
        fast.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)])
        fast.save(str(tmp_path / "tokenizer.json"))
        tokenizer_files.load(written(tmp_path, tekken=samples.tekken()))
        assert ("splits text otherwise than" in capsys.readouterr().err) == differs


def test_several_prefix_tokens(bpe, tmp_path):  # noqa: F811
    from tokenizers import Tokenizer, processors
    fast = Tokenizer.from_str(bpe.to_str())
    fast.post_processor = processors.TemplateProcessing(single="<s> </s> $A", special_tokens=[("<s>", 0), ("</s>", 1)])
    fast.save(str(tmp_path / "tokenizer.json"))
    tokenizer = tokenizer_files.load(tmp_path)
    assert tokenizer.encode("the") == fast.encode("the").ids and tokenizer.prefix == [0, 1]
    assert tokenizer_files.load(tokenizer.state()).encode("the") == fast.encode("the").ids


@pytest.mark.parametrize("kind", ["tekken", "kimi", "vocab"])
def test_it_is_kept_in_a_pth(kind, families, bpe, tmp_path):  # noqa: F811
    directory = tmp_path / "tokenizer"
    directory.mkdir()
    if kind == "tekken":
        written(directory, tekken=samples.tekken(**samples.TEKKENS["v13"]))
    else:
        tiktoken_directory(directory, "kimi") if kind == "kimi" else vocab_directory(directory, bpe, "GPT2Tokenizer")
    tokenizer = tokenizer_files.load(directory)
    save_checkpoint(read_checkpoint(families("llama3")[0]), tmp_path / "model.pth", tokenizer.state())
    kept = torch.load(tmp_path / "model.pth", weights_only=True)["tokenizer"]
    for again in (tokenizer_files.load(read_checkpoint(tmp_path / "model.pth").tokenizer), core.load(kept)):
        for text in samples.hard_strings(["</s>", "[EOS]"], 100):
            assert again.encode(text) == tokenizer.encode(text)
        assert again.eos_ids == tokenizer.eos_ids and again.n_vocab == tokenizer.n_vocab


@pytest.mark.parametrize("n_model, eos_ids, said", [
    (0, [], None), (-1, [], "text with a token from"), (-30, [], "text with a token from"), (2, [], "if added tokens are missing"),
    (64, [], None), (64, [N + 30 + 3], "if added tokens are missing"), (64, [2], None), (1024, [], "if added tokens are missing")])
def test_a_tokenizer_of_another_size_is_noted(n_model, eos_ids, said, tmp_path, capsys):
    """n_model: more than the tokenizer's ids, which are made a multiple of 64 first."""
    n = (N + 30) // 64 * 64
    path = written(tmp_path, tekken=samples.tekken(default_vocab_size=n))
    source = SimpleNamespace(tokenizer=path, eos_ids=eos_ids, cfg=SimpleNamespace(vocab_size=n + n_model))
    assert tokenizer_files.load_for(source).n_vocab == n and 2 in source.eos_ids
    err = capsys.readouterr().err
    assert (said is None and not err) or (said in err and err.count("\n") == 1 and f"has {n} tokens and the model {n + n_model}" in err)


# ---- Damage --------------------------------------------------------------------------------------

def replaced(value, r):
    """A copy of a JSON value with one part of it replaced, at a random place."""
    if isinstance(value, dict | list) and value and r.random() < 0.9:
        key = r.choice(list(value)) if isinstance(value, dict) else r.randrange(len(value))
        copy = value.copy()
        copy[key] = replaced(value[key], r)
        return copy
    return r.choice([None, True, 0, -1, 1 << 70, 0.5, "", "x", "\ud800", [], {}, ["a"], {"a": 1}, "(", "1" * 30])


@pytest.mark.parametrize("kind", ["tekken", "kimi", "vocab"])
def test_damage_is_an_error_of_one_line(kind, bpe, tmp_path):  # noqa: F811
    """Of 120 damaged versions of the files each is read, or refused in a line that names a file."""
    r = random.Random(kind)
    if kind == "vocab":
        vocab_directory(tmp_path, bpe, "Qwen2Tokenizer")
    elif kind == "kimi":
        tiktoken_directory(tmp_path, "kimi")
    else:
        written(tmp_path, tekken=samples.tekken(**samples.TEKKENS["v11"]), tokenizer_config=dict(eos_token="</s>"))
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    n_refused = 0
    for _ in range(120):
        path, data = r.choice(list(files.items()))
        if path.suffix == ".json" and r.random() < 0.8:
            damaged = json.dumps(replaced(json.loads(data), r)).encode()
        else:
            at = r.randrange(len(data))
            damaged = data[:at] + r.choice([b"", bytes([r.randrange(256)]), b"\n", b"=" * 9]) + data[at + r.choice([0, 1, 99]):]
        path.write_bytes(damaged)
        try:
            tokenizer_files.load(tmp_path).encode("the class")
        except (ValueError, FileNotFoundError) as error:
            n_refused += 1
            assert str(tmp_path) in str(error) and "\n" not in str(error)
        path.write_bytes(data)
    assert 20 < n_refused < 120
