"""Tokens beside a tokenizer.model: ids, spaces and what is shown, as transformers' slow tokenizer has them.

`slow_ids` is its rule once more (transformers 4, LlamaTokenizer): text is cut at added tokens; where `legacy` is off only the first
piece has SentencePiece's dummy space.
"""

import json
import re
import shutil

import pytest
import sentencepiece
import torch
from test_tokenizer import sp_model  # noqa: F401

from checkpoint import save_checkpoint
from gpt_faster.formats.load import read_checkpoint
from gpt_faster.text import tokenizer_files
from gpt_faster.text.chat_template import encode_chat
from gpt_faster.text.token_bytes import token_bytes

TEXTS = ["<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n", "a <|im_start|> b", "def f<|im_end|>(x): return", "  two",
         "<|im_start|>  user", "hello", "", " a", "x\n\ny  z", "<|im_end|><|im_start|>the", "the <|im_end|> <|im_start|> ", "é ß <|im_end|>日本",
         "<|im_start", "<tool>the call</tool> it", "one <tool> two"]
CHATML = {"<|im_start|>": 1000, "<|im_end|>": 1001}
MORE = {**CHATML, "<tool>": 1002, "</tool>": 1003}
TEMPLATE = "{% for m in messages %}<|im_start|>{{m.role}}\n{{m.content}}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"


def decoder(tokens, special=("<|im_start|>", "<|im_end|>"), **flags):
    return {str(i): dict(content=t, special=t in special, **flags) for t, i in tokens.items()}


# where the same four tokens may stand
PLACES = {
    "decoder": dict(tokenizer_config=dict(added_tokens_decoder=decoder(MORE))),
    "added_tokens": dict(added_tokens=MORE, special_tokens_map=dict(additional_special_tokens=list(CHATML))),
    "both": dict(added_tokens=MORE, tokenizer_config=dict(added_tokens_decoder=decoder(CHATML), additional_special_tokens=list(CHATML))),
    "map of objects": dict(added_tokens=MORE, special_tokens_map=dict(eos_token=dict(content="<|im_end|>"), additional_special_tokens=[
        dict(content="<|im_start|>")])),
    "extra": dict(added_tokens=MORE, tokenizer_config=dict(extra_special_tokens=dict(a="<|im_start|>", b="<|im_end|>"))),
}


def written(sp_model, path, legacy=None, **files):  # noqa: F811
    path.mkdir(exist_ok=True)
    shutil.copy(sp_model, path / "tokenizer.model")
    config = files.setdefault("tokenizer_config", {})
    if legacy is not None:
        files["tokenizer_config"] = {**config, "legacy": legacy}
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def slow_ids(sp_model, text, tokens, legacy):  # noqa: F811
    tokens = {"<s>": 1, "</s>": 2, **tokens}
    sp, ids = sentencepiece.SentencePieceProcessor(str(sp_model)), []
    line = sp.encode("\n")
    assert [sp.id_to_piece(i) for i in line] == ["▁", "<0x0A>"]
    for i, piece in enumerate(re.split("(" + "|".join(map(re.escape, tokens)) + ")", text)):
        if piece in tokens:
            ids.append(tokens[piece])
        elif piece:
            has_space = legacy or i == 0
            ids += sp.encode(piece) if has_space else sp.encode("\n" + piece)[len(line):]
    return ids


@pytest.mark.parametrize("legacy", [True, False, None])
@pytest.mark.parametrize("place", PLACES)
def test_ids(sp_model, tmp_path, place, legacy):  # noqa: F811
    tokenizer = tokenizer_files.load(written(sp_model, tmp_path, legacy, **PLACES[place]))
    assert tokenizer.n_vocab == 1004
    for text in TEXTS:
        expected = slow_ids(sp_model, text, MORE, legacy is not False)
        assert tokenizer.encode(text, bos=False) == expected, text
        if legacy is False and not text.startswith(" "):
            shown = re.sub(r"<\|im_(start|end)\|>", "", text)
            assert tokenizer.decode(expected) == (shown[1:] if text.startswith("<|") and shown.startswith(" ") else shown), text
    assert [tokenizer.piece(i) for i in (1000, 1003, 1004)] == ["<|im_start|>", "</tool>", None]


@pytest.mark.parametrize("legacy", [True, False])
def test_a_conversation(sp_model, tmp_path, legacy):  # noqa: F811
    """The template's tokens are tokens; a message's are text, but for those that are not special."""
    files = dict(tokenizer_config=dict(added_tokens_decoder=decoder(MORE), chat_template=TEMPLATE, eos_token="<|im_end|>"))
    tokenizer = tokenizer_files.load(written(sp_model, tmp_path, legacy, **files))
    assert tokenizer.eos_ids == [1001]
    text = "<|im_start|>user\nhello there<|im_end|>\n<|im_start|>assistant"         # a template's last line end is jinja's
    assert encode_chat(tokenizer, [dict(role="user", content="hello there")]) == slow_ids(sp_model, text, MORE, legacy)
    ids = encode_chat(tokenizer, [dict(role="user", content="x<|im_end|><tool>y")])
    assert ids.count(1000) == 2 and ids.count(1001) == 1 and ids.count(1002) == 1


def test_how_a_token_matches(sp_model, tmp_path):  # noqa: F811
    tokens = {"<l>": 1000, "<r>": 1001, "word": 1002}
    flags = {"<l>": dict(lstrip=True), "<r>": dict(rstrip=True), "word": dict(single_word=True)}
    config = dict(added_tokens_decoder={str(i): dict(content=t, special=True, **flags[t]) for t, i in tokens.items()})
    tokenizer = tokenizer_files.load(written(sp_model, tmp_path, False, tokenizer_config=config))
    assert tokenizer.encode("a  <l> b", bos=False) == slow_ids(sp_model, "a<l> b", tokens, False)
    assert tokenizer.encode("a <r>  b", bos=False) == slow_ids(sp_model, "a <r>b", tokens, False)
    assert tokenizer.encode("a word b", bos=False) == slow_ids(sp_model, "a word b", tokens, False)
    assert 1002 not in tokenizer.encode("swords", bos=False)


def test_a_special_token_without_an_id(sp_model, tmp_path):  # noqa: F811
    """One that is a piece has its id, others the next free ones, in the order in which they are named."""
    sp = sentencepiece.SentencePieceProcessor(str(sp_model))
    piece = sp.id_to_piece(700)
    config = dict(eos_token="<end>", pad_token=piece, additional_special_tokens=["<x>"], added_tokens_decoder={"1005": dict(content="<five>")})
    tokenizer = tokenizer_files.load(written(sp_model, tmp_path, tokenizer_config=config))
    assert tokenizer.encode("<five><end><x>", bos=False) == [1005, 1006, 1007] and tokenizer.eos_ids[0] == 1006
    assert 700 in tokenizer.encode(f"b{piece}c", bos=False) and tokenizer.decode([700]) == ""


def test_it_is_kept_in_a_pth(families, sp_model, tmp_path):  # noqa: F811
    path = written(sp_model, tmp_path / "tokenizer", False, **PLACES["both"])
    tokenizer = tokenizer_files.load(path)
    save_checkpoint(read_checkpoint(families("llama3")[0]), tmp_path / "model.pth", tokenizer.state())
    again = tokenizer_files.load(read_checkpoint(tmp_path / "model.pth").tokenizer)
    assert torch.load(tmp_path / "model.pth", weights_only=True)["tokenizer"]["added"][-1][:2] == [1003, "</tool>"]
    for text in TEXTS:
        assert again.encode(text) == tokenizer.encode(text) and again.decode(again.encode(text)) == tokenizer.decode(tokenizer.encode(text))
    assert again.eos_ids == tokenizer.eos_ids and again.n_vocab == 1004


def test_structured_output_knows_their_bytes(sp_model, tmp_path):  # noqa: F811
    tokenizer = tokenizer_files.load(written(sp_model, tmp_path, **PLACES["decoder"]))
    pieces = token_bytes(tokenizer)
    assert pieces[1000] is None and pieces[1002] == b"<tool>" and len(pieces) == 1004


@pytest.mark.parametrize("files, said", [
    (dict(added_tokens={"<x>": "12"}), "the id of an added token is '12', expected 0 to"),
    (dict(added_tokens={"<x>": 1 << 40}), "the id of an added token is"),
    (dict(added_tokens={"<x>": True}), "the id of an added token is True"),
    (dict(added_tokens={"": 1000}), "added token 1000 is '', expected a string"),
    (dict(tokenizer_config=dict(added_tokens_decoder=[1])), "'added_tokens_decoder' is"),
    (dict(tokenizer_config=dict(added_tokens_decoder={"x": dict(content="<x>")})), "the id of an added token is 'x'"),
    (dict(tokenizer_config=dict(added_tokens_decoder={"1000": dict(content=3)})), "added token 1000 is 3"),
    (dict(added_tokens={"<x>": 1000, "<y>": 1000}), "token 1000 is both '<x>' and '<y>'"),
    (dict(added_tokens={f"<{i}>": 1000 + i for i in range(70000)}), "70000 added tokens, expected at most"),
    (dict(added_tokens=[1]), "expected a JSON object"),
    (dict(tokenizer_config=dict(extra_special_tokens=3)), "tokenizer_config.json: 'extra_special_tokens' is 3, expected a list"),
])
def test_what_cannot_be_is_refused(sp_model, tmp_path, files, said):  # noqa: F811
    with pytest.raises(ValueError, match=said):
        tokenizer_files.load(written(sp_model, tmp_path, **files))


@pytest.mark.parametrize("number", [2, 7])
def test_a_token_that_gets_another_id_is_said(tmp_path, capsys, number):
    """Of a tokenizer.json that lacks it: the library gives it the next id, and only another one than stated is a note."""
    from tokenizers import Tokenizer, models
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(dict(added_tokens_decoder=decoder({"<|im_end|>": number}))))
    tokenizer_files.load(tmp_path)
    said = capsys.readouterr().err
    assert ("the added token" in said and "is 2, not 7" in said) if number == 7 else "added token" not in said
