"""Where a text ends: at every token that one of the model's files names, for every command and engine."""

import json
import shutil

import pytest
import torch
from test_errors import run
from test_formats import write_gguf
from tokenizers import Tokenizer as Fast
from tokenizers import models, pre_tokenizers

from checkpoint import save_checkpoint
from gpt_faster.formats.load import load_model, read_checkpoint
from gpt_faster.loading import load_model as load_all
from gpt_faster.text import tokenizer_files
from gpt_faster.text.byte_level import bytes_to_unicode
from gpt_faster.text.end_tokens import EOG_TOKENS, gguf_end_ids

PLAIN = ["a", "b", "c", "d"]


def metadata(tokens, **stated):
    keys = {f"tokenizer.ggml.{key}": value for key, value in stated.items()}
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens, **keys}


# By llama.cpp's src/llama-vocab.cpp: tokens, what the metadata states, the texts of those that end a text.
LLAMA_CPP = [
    (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], dict(eos_token_id=6), ["<|im_end|>", "<|endoftext|>"]),        # Qwen
    (["<|endoftext|>", "<|file_sep|>", "<|repo_name|>", "<|fim_pad|>", "<|fim_prefix|>"], {},
     ["<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]),
    (["<|x|>", "<PAD>"], dict(fim_pad_token_id=4), ["<|x|>"]),         # stated: not looked up
    (["<eos>", "<bos>", "<end_of_turn>"], dict(eos_token_id=4), ["<eos>", "<end_of_turn>"]),                         # Gemma
    (["</s>", "<|tool_response>", "<turn|>"], {}, ["<|tool_response>", "<turn|>"]),                                   # Gemma 4
    (["</s>", "<s>"], {}, ["</s>"]),
    (["<|end|>", "<|user|>"], {}, ["<|end|>"]),                                                                        # Phi
    (["<|end|>", "<|return|>", "<|call|>"], dict(eos_token_id=5), ["<|return|>", "<|call|>"]),                        # gpt-oss
    (["<|end|>", "<|flush|>", "<|calls|>"], {}, ["<|flush|>", "<|calls|>"]),                                           # Solar Open
    (["<|end|>", "<|call|>"], {}, ["<|end|>", "<|call|>"]),
    (["<odd>", "<other>", "<third>"], dict(eos_token_id=4, eot_token_id=5, eom_token_id=6), ["<odd>", "<other>", "<third>"]),
    (["<odd>"], dict(eos_token_id=99), []),                            # beyond the vocabulary
    (["[EOT]", "[EOS]", "[PAD]"], {}, ["[EOT]", "[EOS]", "[PAD]"]),    # Kimi
    (["[e~[", "<｜end▁of▁sentence｜>", "_<EOT>", "<EOT>", "<end_of_utterance>", "<|eom_id|>", "<|eot_id|>", "<|end_of_text|>"], {}, None),
]


@pytest.mark.parametrize("names, stated, expected", LLAMA_CPP)
def test_gguf_as_llama_cpp(names, stated, expected):
    tokens = PLAIN + names
    ids = gguf_end_ids(metadata(tokens, **stated))
    assert {tokens[i] for i in ids} == set(names if expected is None else expected) and len(ids) == len(set(ids))


@pytest.mark.parametrize("name", EOG_TOKENS)
def test_each_name_alone(name):
    assert gguf_end_ids(metadata([*PLAIN, name])) == [4]
    assert gguf_end_ids(metadata(PLAIN)) == []


def test_sentencepiece_in_a_gguf_states_none():
    assert gguf_end_ids({**metadata(PLAIN), "tokenizer.ggml.model": "llama"}) == [2]
    assert gguf_end_ids({**metadata(PLAIN, eos_token_id=3), "tokenizer.ggml.model": "llama"}) == [3]


@pytest.mark.parametrize("kind", [1, 3, 4])                # NORMAL, CONTROL, USER_DEFINED
def test_whatever_type_a_token_has(kind):
    """It is a token in a prompt too, as in llama.cpp, and is not shown."""
    letters = [chr(i) for i in range(97, 123)]
    meta = {**metadata([*letters, "<|im_end|>"]), "tokenizer.ggml.token_type": [1] * 26 + [kind], "tokenizer.ggml.pre": "gpt-2"}
    tokenizer = tokenizer_files.load(meta)
    assert tokenizer.eos_ids == [26] and tokenizer.encode("ab<|im_end|>c") == [0, 1, 26, 2]
    assert tokenizer.decode([0, 26, 2]) == "ac"


# ---- Directories --------------------------------------------------------------------------------

def with_files(directory, path, config=None, generation=None, tokenizer_config=None, special_map=None):
    """A copy of a tiny model whose files name these ids or tokens as ends; token i of its tokenizer is "i "."""
    shutil.copytree(directory, path)
    vocab = {chr(256 + i): i for i in range(150)} | {f"<|{i}|>": i for i in range(150, 160)}
    fast = Fast(models.BPE(vocab, []))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.add_special_tokens([f"<|{i}|>" for i in range(150, 160)])
    fast.save(str(path / "tokenizer.json"))
    c = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**c, "eos_token_id": config}))
    (path / "generation_config.json").unlink(missing_ok=True)
    for name, value in (("generation_config", dict(eos_token_id=generation)), ("tokenizer_config", dict(eos_token=tokenizer_config)),
                        ("special_tokens_map", dict(eos_token=special_map))):
        if next(iter(value.values())) is not None:
            (path / f"{name}.json").write_text(json.dumps(value))
    return path


@pytest.mark.parametrize("files, expected", [
    (dict(config=150), {150}), (dict(config=[150, 151]), {150, 151}), (dict(generation=152), {152}),
    (dict(tokenizer_config="<|153|>"), {153}), (dict(special_map="<|154|>"), {154}),
    (dict(tokenizer_config={"content": "<|155|>", "special": True}), {155}),
    (dict(config=150, generation=[151, 152], tokenizer_config="<|153|>"), {150, 151, 152, 153}),
    (dict(config=150, tokenizer_config="<|153|>", special_map="<|154|>"), {150, 153, 154}),
    (dict(tokenizer_config="not a token"), set()), ({}, set()),
])
def test_the_union_of_what_files_name(families, tmp_path, files, expected):
    path = with_files(families("llama3")[0], tmp_path / "model", **files)
    source = read_checkpoint(path)
    tokenizer = tokenizer_files.load_for(source)
    assert set(source.eos_ids) == expected
    assert set(load_all(str(path))[1].eos_ids) == expected             # the Python interface
    save_checkpoint(source, tmp_path / "model.pth", tokenizer.state())
    again = read_checkpoint(tmp_path / "model.pth")
    tokenizer_files.load_for(again)
    assert set(again.eos_ids) == expected


def greedy_ids(path, ids, n):
    model = load_model(read_checkpoint(path), torch.float32, "cpu")
    for _ in range(n):
        model.setup_cache(0, len(ids))
        ids = [*ids, model(torch.tensor([ids]), torch.arange(len(ids)))[0, -1].argmax().item()]
    return ids


def ends_of(capsys, path, prompt, *more):
    """What the command makes of this prompt: the new ids of each row, and why they ended."""
    status, out, err = run(capsys, "-m", path, "--device", "cpu", "--dtype", "float32", "--json", "--temperature", 0, "--max_new_tokens", 8,
                           "--prompt", prompt, *more)
    assert status == 0, err
    return [(row["new_ids"], row["finish_reason"]) for row in map(json.loads, out.splitlines())]


@pytest.mark.parametrize("more", [[], ["--compile"], ["--draft_checkpoint_path"], ["--num_samples", "2"]])
def test_the_command_ends_there(families, tmp_path, capsys, more):
    """At the token that only the tokenizer's file names: what greedy decoding gives third."""
    path = with_files(families("llama2")[0], tmp_path / "model")
    *_, first, second, third = ids = greedy_ids(path, [5, 9, 33], 3)
    assert third not in (first, second)
    name = f"<|{third}|>" if third >= 150 else chr(256 + third)
    (path / "tokenizer_config.json").write_text(json.dumps(dict(eos_token=name)))
    draft = [path] if "--draft_checkpoint_path" in more else []
    prompt = "".join(chr(256 + i) for i in ids[:3])
    for row in ends_of(capsys, path, prompt, *more, *draft):
        assert row == (ids[3:], "stop")


def test_the_command_ends_at_a_gguf_s_endoftext(families, tmp_path, capsys):
    """Which is not the eos that it states."""
    letters = list(bytes_to_unicode().values())[:159]
    path = write_gguf(families("llama2")[1], "llama", tmp_path / "plain.gguf", vocabulary=[*letters, "<|x|>"])
    *_, first, second, third = ids = greedy_ids(path, [40, 60, 70], 3)
    assert third not in (first, second) and not {3, 5} & set(ids)
    letters[third] = "<|endoftext|>"
    path = write_gguf(families("llama2")[1], "llama", tmp_path / "model.gguf", vocabulary=[*letters, "<|x|>"])
    prompt = "".join(byte for byte, letter in ((chr(b), c) for b, c in bytes_to_unicode().items()) if letter in (letters[40], letters[60], letters[70]))
    assert ends_of(capsys, path, prompt) == [(ids[3:], "stop")]
