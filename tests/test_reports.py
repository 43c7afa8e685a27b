"""Kinds of faults that users of other tools reported, tried here: docs/field.md has the reports."""

import json
import shutil

import pytest
import tokenizers
import torch
import transformers
from helpers import GREEDY, ids_of, make_batch
from test_families import close, tokens
from test_lora import adapter, our_logits

from generate import Sequence
from gpt_faster.cli.evaluate import LMEvalModel
from gpt_faster.formats.load import load_model, read_checkpoint
from tokenizer import NullTokenizer, Tokenizer, TokenizersBackend

# ---- Stop strings -------------------------------------------------------------------------------

def byte_tokenizer(special=("<s>", "<|end|>"), shown=("<tool>",)):
    """A byte-level tokenizer of single bytes, with special tokens and an added one that is text."""
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    fast = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(sorted(letters))}, []))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = tokenizers.decoders.ByteLevel()
    fast.add_special_tokens(list(special))
    fast.add_tokens(list(shown))
    return Tokenizer(TokenizersBackend(fast.to_str()), fast.token_to_id("<s>"), add_bos=True)


def text_until(tokenizer, text, stops, eos=()):
    """What a sequence shows of a text that is generated token by token, why it ended, its tokens."""
    row = Sequence(tokenizer, [0], set(eos), stops, max_new=1000)
    shown = ""
    for i in tokenizer.encode(text, bos=False):
        shown += row.push(i)
        if row.finish_reason:
            break
    return shown + row.finish("length"), row.finish_reason, len(row.ids)


@pytest.mark.parametrize("stop, shown, n", [
    ("<|end|>", "ab ", 4),                                 # of one token that decode() leaves out
    ("<tool>", "ab cd", 6), ("d<tool>e", "ab c", 7),       # an added token that is text
    ("cd", "ab ", 5), ("b c", "a", 4), (" ü", "ab cd<tool>e", 10), ("ü😀", "ab cd<tool>e ", 14)])
def test_a_stop_string_ends_the_text_whatever_its_tokens_are(stop, shown, n):
    tokenizer = byte_tokenizer()
    text = "ab <|end|>cd<tool>e ü😀"
    if "<|end|>" not in stop:
        text = text.replace("<|end|>", "")
    assert text_until(tokenizer, text, [stop]) == (shown, "stop", n)
    assert text_until(tokenizer, text, ["zz", stop, "yy<"]) == (shown, "stop", n)
    whole = text.replace("<|end|>", "")
    assert text_until(tokenizer, text, ["absent"])[:2] == (whole, "length")


def test_a_stop_string_of_a_special_token_and_more_is_refused():
    """The text never has it; other added tokens and what only looks like one are text."""
    with pytest.raises(ValueError, match=r"'<\|end\|>user' has the special token '<\|end\|>', .* stop at '<\|end\|>' alone"):
        Sequence(byte_tokenizer(), [0], stops=["x", "<|end|>user"])
    Sequence(byte_tokenizer(), [0], stops=["<tool>user", "<|end", "|>user"])
    assert Sequence(NullTokenizer(), [0], stops=[" 7"]).stops == [" 7"]


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_character_that_is_cut_by_the_end_is_decoded_as_a_whole_text_is(cut):
    """By max_new_tokens, and by an end token."""
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("ü世😀", bos=False)[:cut]
    end = tokenizer.backend.id_of("<|end|>")
    for eos, more in (((), []), ((end,), [end])):
        row = Sequence(tokenizer, [0], set(eos), ["never"])
        shown = "".join(map(row.push, ids + more))
        assert shown + row.finish("length") == tokenizer.decode(ids)


# ---- A prompt that goes back in the cache ---------------------------------------------------------

@pytest.mark.parametrize("name", ["mistral-window", "gemma3_text", "gpt_oss", "cohere2", "llama2"])
def test_a_cached_prefix_is_reused_rightly_or_refused(families, name):
    """Windows of 8 have rings: how far back they go depends on the longest call."""
    directory, model = families(name)
    ours, prompt, n_new = load_model(read_checkpoint(directory), torch.float32, "cpu"), tokens(40, 1)[0].tolist(), 12
    ids = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(n_new):
            ids = torch.cat((ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)), 1)
    expected, refused = ids[0, len(prompt):].tolist(), []
    for n_cached in (1, 20, 34, 35, 39):
        ours.setup_cache(1, 80, 16)
        batch = make_batch(ours, [GREEDY])
        assert ids_of(batch, prompt, n_new) == expected
        try:                                               # 51 tokens are in the cache now
            assert ids_of(batch, prompt, n_new, n_cached) == expected
        except ValueError as e:
            assert f"n_cached {n_cached}: the cache of sliding windows, written up to position 51, goes back 16: use 0" == str(e)
            refused.append(n_cached)
    assert refused == ([] if name == "llama2" else [1, 20, 34])


# ---- Beginning tokens ---------------------------------------------------------------------------

def test_a_beginning_token_that_is_there_twice_costs_one_line(capsys):
    """As transformers' ids; a template's text is encoded without."""
    tokenizer = byte_tokenizer()
    bos = tokenizer.bos_id
    assert tokenizer.encode("<s>a")[:2] == [bos, bos] and tokenizer.encode("<s>b")[:2] == [bos, bos]
    assert capsys.readouterr().err == "note: the text begins with <s>, which the tokenizer adds: it is there twice now\n"
    tokenizer = byte_tokenizer()
    assert tokenizer.encode("<s>a", bos=False)[0] == bos and tokenizer.encode("a<s>")[0] == bos
    assert tokenizer.encode("<s>a", special=False)[1] != bos and not capsys.readouterr().err


# ---- Adapters that belong to other weights --------------------------------------------------------

@pytest.mark.parametrize("init", ["gaussian", "orthogonal"])
def test_an_adapter_of_the_original_weights(families, init, tmp_path):
    path, expected = adapter(families, "llama2", dict(target_modules=["q_proj", "down_proj"], init_lora_weights=init), tmp_path)
    close(our_logits(read_checkpoint(families("llama2")[0], path)), expected)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora"])
def test_an_adapter_of_changed_weights_is_refused(families, init, tmp_path):
    """PEFT subtracts the adapter's initial product from the base weights, which no file of the adapter has."""
    path, expected = adapter(families, "llama2", dict(target_modules=["q_proj", "down_proj"], init_lora_weights=init), tmp_path)
    with pytest.raises(ValueError, match="init_lora_weights"):
        read_checkpoint(families("llama2")[0], path)
    config = path / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "init_lora_weights": True}))
    ours = our_logits(read_checkpoint(families("llama2")[0], path))
    assert (ours - expected).norm() > 0.1 * expected.norm()            # else there were nothing to refuse


@pytest.mark.parametrize("init", ["loftq", "corda", "lora_ga", "of_a_later_peft"])
def test_other_initial_weights_are_refused_by_name(families, init, tmp_path):
    path, _ = adapter(families, "llama2", dict(target_modules=["q_proj"]), tmp_path)
    config = path / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "init_lora_weights": init}))
    with pytest.raises(ValueError, match=f"init_lora_weights.*{init}"):
        read_checkpoint(families("llama2")[0], path)


# ---- Scores -------------------------------------------------------------------------------------

def test_an_answer_without_a_token_of_its_own_has_no_score():
    """A token that spans question and answer leaves the answer none: its probability would be 1."""
    model = object.__new__(LMEvalModel)
    model.max_length = 8
    with pytest.raises(ValueError, match="the answer 'wer' has no token of its own"):
        model._loglikelihood_tokens([(("Ans", "wer"), [5], [])])


# ---- Far positions --------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positions_beyond_100000(families, dtype, tmp_path):
    """The angles are computed in fp32, whatever the model's dtype: through a window, so that few positions suffice."""
    _, model = families("mistral-window")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= dict(max_position_embeddings=140000)
    (tmp_path / "config.json").write_text(json.dumps(config))
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ours = load_model(read_checkpoint(tmp_path), dtype, "cpu")
    n = 64                                                 # four layers of windows of 8, twice
    prompt = tokens(n, 1)
    near, far = (torch.arange(start, start + n) for start in (0, 131000))
    ours.setup_cache(1, 131072, n)
    with torch.no_grad():
        expected = reference(prompt, position_ids=far[None]).logits[:, -8:]
        got = ours(prompt, far, n).float()[:, -8:]
        closer = ours(prompt, near, n).float()[:, -8:] - reference(prompt, position_ids=near[None]).logits[:, -8:]
    if dtype == torch.float32:
        close(got, expected)
    else:
        assert (got - expected).norm() < 1.5 * closer.norm() < 0.1 * expected.norm()


def test_the_index_says_which_copy_of_a_tensor_is_meant(families, tmp_path):
    """vllm#54230: a shard that also has an older copy of another's tensor."""
    from safetensors.torch import load_file, save_file
    source = families("llama2")[0]
    shutil.copytree(source, tmp_path / "model")
    path = tmp_path / "model/model.safetensors"
    tensors = load_file(path)
    path.unlink()
    names = sorted(tensors)
    halves = dict.fromkeys(names[::2], "model-00001-of-00002.safetensors") | dict.fromkeys(names[1::2], "model-00002-of-00002.safetensors")
    for shard in set(halves.values()):
        save_file({name: t if halves[name] == shard else torch.zeros_like(t) for name, t in tensors.items()}, tmp_path / "model" / shard)
    (tmp_path / "model/model.safetensors.index.json").write_text(json.dumps(dict(weight_map=halves)))
    ours, theirs = read_checkpoint(tmp_path / "model").tensors, read_checkpoint(source).tensors
    assert ours.keys() == theirs.keys() and all(torch.equal(t.whole(), theirs[name].whole()) for name, t in ours.items())
