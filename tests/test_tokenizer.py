"""Every tokenizer format against its own library and transformers, and streaming that loses nothing."""

import base64
import json
import re
import subprocess
import sys

import pytest
import references
import sentencepiece
import torch
from conftest import GEMMA, ROOT, SMOLLM2
from references import CHAT, PROSE, TEXTS, digest
from tokenizers import Regex, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Fast

import tokenizer as core
from gpt_faster.formats.load import read_checkpoint
from gpt_faster.text import byte_level, gguf_tokenizer, tokenizer_files
from gpt_faster.text.chat_template import render
from tokenizer import Detokenizer


@pytest.fixture(scope="module")
def smollm2():
    return tokenizer_files.load(read_checkpoint(SMOLLM2).tokenizer)


@pytest.fixture(scope="module")
def gemma():
    return tokenizer_files.load(read_checkpoint(GEMMA).tokenizer)


@pytest.fixture(scope="module")
def sp_model(tmp_path_factory):
    """A small SentencePiece model with byte fallback and a dummy prefix, as Llama 2's."""
    directory = tmp_path_factory.mktemp("sp")
    (directory / "text").write_text("\n".join(PROSE))
    sentencepiece.SentencePieceTrainer.train(
        input=str(directory / "text"), model_prefix=str(directory / "tokenizer"), vocab_size=1000,
        model_type="bpe", byte_fallback=True, character_coverage=0.99, normalization_rule_name="identity",
        remove_extra_whitespaces=False, minloglevel=2)
    return directory / "tokenizer.model"


@pytest.fixture(scope="module")
def bpe():
    """A small byte-level tokenizer.json that adds a beginning-of-sequence token, as Llama 3's."""
    fast = Fast(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>"]
    fast.train_from_iterator(PROSE, trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return fast


def streamed(tokenizer, prompt, ids):
    stream = Detokenizer(tokenizer, prompt)
    pieces = [stream.push(i) for i in ids]
    assert not any("\ufffd" in piece for piece in pieces)
    return "".join(pieces) + stream.flush()


# ---- GGUF, on the real files, against transformers' reading of them ------------------------------

@pytest.mark.parametrize("path", [SMOLLM2, GEMMA], ids=["smollm2", "gemma"])
def test_gguf_equals_transformers(path, request, exhaustive):
    """As kept, see references.py. It reads anew what another version of Python has as prose, in the exhaustive tier all."""
    ours = request.getfixturevalue("smollm2" if path == SMOLLM2 else "gemma")
    texts, kept = TEXTS + CHAT + PROSE, references.kept(path)["tokenized"]
    anew = [text for text in texts if exhaustive or digest(text) not in kept]
    made = references.tokenized(path, anew) if anew else {}
    assert all(kept.get(key, made[key]) == made[key] for key in made)
    expected = {**kept, **made}
    different = []
    for text in texts:
        ids = ours.encode(text)
        their_ids, their_text = expected[digest(text)]
        if digest(ids) != their_ids:
            different.append(text)
        assert digest(ours.decode(ids)) == their_text, text
    # transformers does not know SmolLM2's rule that every digit stands alone, which shows where
    # several spaces come before one, and cuts Gemma's runs of more than 31 spaces elsewhere.
    rule = r"\s\s\d" if path == SMOLLM2 else " " * 32
    assert [t for t in different if not re.search(rule, t)] == []
    assert len(different) < 8


def test_gguf_beginning_of_sequence(smollm2, gemma):
    assert smollm2.encode("a")[0] != smollm2.bos_id and gemma.encode("a")[0] == gemma.bos_id == 2
    assert smollm2.encode("a", bos=True)[0] == smollm2.bos_id == 1
    assert gemma.encode("a", bos=False) == gemma.encode("a")[1:]


def test_special_tokens_in_text(smollm2, gemma):
    assert smollm2.encode("<|im_end|>") == [2] and len(smollm2.encode("<|im_end|>", special=False)) > 3
    assert gemma.encode("<end_of_turn>", bos=False) == [106]
    assert len(gemma.encode("<end_of_turn>", bos=False, special=False)) > 3
    assert smollm2.decode([2]) == gemma.decode([106]) == ""


def test_gguf_refuses_what_it_does_not_know(smollm2):
    meta = read_checkpoint(SMOLLM2).tokenizer
    for key, value, message in (("model", "bert", "tokenizer model 'bert' is not supported"),
                                ("pre", "marsian", "pre-tokenizer 'marsian' is not supported"),
                                ("tokens", None, "the GGUF has no tokenizer")):
        with pytest.raises(ValueError, match=message):
            tokenizer_files.load({**meta, f"tokenizer.ggml.{key}": value})


@pytest.mark.parametrize("pre", gguf_tokenizer.GGUF_SPLITS)
def test_every_split_round_trips(pre, smollm2):
    meta = read_checkpoint(SMOLLM2).tokenizer
    tokenizer = tokenizer_files.load({**meta, "tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": False})
    for text in TEXTS:                                     # Qwen's normalizer composes e + accent
        assert tokenizer.decode(tokenizer.encode(text)) in (text, text.replace("e\u0301", "é"))


def test_splits_equal_transformers():
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    for pre, splits in gguf_tokenizer.GGUF_SPLITS.items():
        if pre in GGUF_PRE_TOKENIZER_SPLITS and pre != "qwen2":    # theirs allows combining marks too
            theirs = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[pre]), "isolated")
            for text in TEXTS + PROSE:
                pieces = [(text, (0, len(text)))]
                for split in splits:
                    cut = pre_tokenizers.Split(Regex(split), "isolated")
                    pieces = [(p, None) for piece, _ in pieces for p, _ in cut.pre_tokenize_str(piece)]
                assert [p for p, _ in pieces] == [p for p, _ in theirs.pre_tokenize_str(text)]


def test_qwen35_cuts_as_its_tokenizer():
    """Combining marks are letters, which those of Qwen2 are not."""
    from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX
    assert gguf_tokenizer.GGUF_SPLITS["qwen35"] == (PRETOKENIZE_REGEX,) and "qwen35" in gguf_tokenizer.NFC_PRETOKENIZERS


@pytest.mark.parametrize("text, pieces", [
    ("1234567", ["1", "234", "567"]), ("123456", ["123", "456"]), ("a12b3456.", ["a", "12", "b", "3", "456", "."]),
    ("12", ["12"]), ("日本12345語です", ["日本", "12", "345", "語です"])])
def test_digits_by_threes_from_the_right(text, pieces):
    """AFMoE's; llama.cpp has code of its own for them, whose tests have the first of these."""
    cuts = [pre_tokenizers.Split(Regex(split), "isolated") for split in gguf_tokenizer.GGUF_SPLITS["afmoe"]]
    assert [p for p, _ in pre_tokenizers.Sequence(cuts).pre_tokenize_str(text)] == pieces


# ---- Directories ---------------------------------------------------------------------------------

def test_sentencepiece(sp_model):
    sp = sentencepiece.SentencePieceProcessor(str(sp_model))
    tokenizer = tokenizer_files.load(sp_model.parent)
    assert tokenizer.eos_ids == [2]
    for text in TEXTS + PROSE[:5]:
        assert tokenizer.encode(text) == [sp.bos_id(), *sp.encode(text)]
        assert tokenizer.decode(tokenizer.encode(text)) == sp.decode(sp.encode(text))
    assert tokenizer.encode("a</s>b") == [1, *sp.encode("a"), 2, *sp.encode("b")]


def test_sentencepiece_through_gguf_metadata(sp_model):
    """The model file that we write from a GGUF's lists encodes as the original."""
    sp = sentencepiece.SentencePieceProcessor(str(sp_model))
    n = sp.get_piece_size()
    kinds = [gguf_tokenizer.UNKNOWN if sp.is_unknown(i) else gguf_tokenizer.CONTROL if sp.is_control(i)
             else gguf_tokenizer.BYTE if sp.is_byte(i) else gguf_tokenizer.NORMAL for i in range(n)]
    meta = {"model": "llama", "tokens": [sp.id_to_piece(i) for i in range(n)], "token_type": kinds,
            "scores": [sp.get_score(i) for i in range(n)], "bos_token_id": 1, "add_space_prefix": True}
    tokenizer = tokenizer_files.load({f"tokenizer.ggml.{k}": v for k, v in meta.items()})
    for text in TEXTS + PROSE:
        assert tokenizer.encode(text) == [1, *sp.encode(text)]


def test_tokenizer_json_and_its_config(bpe, tmp_path):
    bpe.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer_files.load(tmp_path).encode("Hi <s>") == bpe.encode("Hi <s>").ids
    for add, bos in ((True, "<s>"), (False, "<s>"), (None, {"content": "</s>"}), (True, None)):
        config = dict(add_bos_token=add, bos_token=bos, chat_template="{{ messages }}")
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
        tokenizer = tokenizer_files.load(tmp_path)
        # what the file's own template says wins over tokenizer_config.json, as in transformers 5
        assert tokenizer.encode("Hi") == [0] + bpe.encode("Hi", add_special_tokens=False).ids
        assert tokenizer.chat_template == "{{ messages }}"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert tokenizer_files.load(tmp_path).chat_template == "from the file"


def test_what_training_left_in_a_tokenizer_json(bpe, tmp_path):
    """Truncation and padding are not obeyed; a post-processor that appends is not taken for BOS."""
    fast = Fast.from_str(bpe.to_str())
    fast.enable_truncation(4)
    fast.enable_padding(length=16)
    fast.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer_files.load(tmp_path).encode("the statement of a class") == bpe.encode("the statement of a class").ids
    fast.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    fast.save(str(tmp_path / "tokenizer.json"))
    tokenizer = tokenizer_files.load(tmp_path)
    assert tokenizer.bos_id is None and tokenizer.encode("the") == bpe.encode("the", add_special_tokens=False).ids


def test_llama3_tiktoken_file(bpe, tmp_path):
    """Ranks alone give the merges back: as many tokens as the BPE that they came from."""
    vocab = sorted(((i, t) for t, i in bpe.get_vocab().items() if i > 1))
    letters = {c: b for b, c in byte_level.bytes_to_unicode().items()}
    data = b"".join(base64.b64encode(bytes(letters[c] for c in t)) + f" {rank}\n".encode()
                    for rank, (_, t) in enumerate(vocab))
    (tmp_path / "tokenizer.model").write_bytes(data)
    tokenizer = tokenizer_files.load(tmp_path)
    assert tokenizer.n_vocab == len(vocab) + 256 and tokenizer.bos_id == len(vocab)
    assert [i - len(vocab) for i in tokenizer.eos_ids] == [1, 8, 9]
    bos, ranks = len(vocab), {t: rank for rank, (_, t) in enumerate(vocab)}
    plain = byte_level.bytes_to_unicode()
    for word in "the statement of a class definition called return".split():
        pieces, word = [plain[b] for b in word.encode()], word
        while len(pieces) > 1:                             # tiktoken's rule: the lowest rank first
            rank, i = min((ranks.get(a + b, 1 << 30), i) for i, (a, b) in enumerate(zip(pieces, pieces[1:])))
            if rank == 1 << 30:
                break
            pieces[i:i + 2] = [pieces[i] + pieces[i + 1]]
        assert tokenizer.encode(word) == [bos] + [ranks[p] for p in pieces]
    assert tokenizer.encode("<|eot_id|>", bos=False) == [len(vocab) + 9]
    for text in TEXTS + PROSE[:5]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_state_works_alone(smollm2, gemma, tmp_path):
    for tokenizer in (smollm2, gemma):
        torch.save(tokenizer.state(), tmp_path / "state.pt")
        again = tokenizer_files.load(torch.load(tmp_path / "state.pt", weights_only=True))
        for text in TEXTS:
            assert again.encode(text) == tokenizer.encode(text)


@pytest.mark.parametrize("files, message", [
    ({}, "no tokenizer: expected tokenizer.json or tokenizer.model"),
    ({"tokenizer.json": b"{"}, "not a readable tokenizer.json"),
    ({"tokenizer.json": b"\xff\xfe"}, "tokenizer.json"),
    ({"tokenizer.model": b"garbage" * 99}, "not a readable SentencePiece model"),
    ({"tokenizer.json": b"{}", "tokenizer_config.json": b"nope"}, "tokenizer_config.json: not valid JSON"),
    ({"tokenizer.json": b"{}", "tokenizer_config.json": b"[]"}, "expected a JSON object, found list"),
], ids=["none", "json", "encoding", "sentencepiece", "config", "list"])
def test_bad_files(files, message, tmp_path):
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        tokenizer_files.load(tmp_path)


# ---- tokenizer.py alone --------------------------------------------------------------------------

ALONE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ours and name not in helpers:
            raise ImportError(f"tokenizer.py is to stand alone, and imports {name}")

ours, helpers, directory = sys.argv[1].split(), sys.argv[2].split(), sys.argv[3]
sys.meta_path.insert(0, Refuse())
from tokenizer import Detokenizer, load
tokenizer = load(directory)
ids = tokenizer.encode("the statement of a class")
stream = Detokenizer(tokenizer, ids[:2])
assert tokenizer.decode(ids[:2]) + "".join(map(stream.push, ids[2:])) + stream.flush() == "the statement of a class"
again, text = load(tokenizer.state()), "the <s> of a class"
assert again.encode(text) == tokenizer.encode(text) != again.encode(text, special=False)
print(tokenizer.encode(text))
"""
HELPERS = "tokenizer checkpoint model quantize sampling"


@pytest.mark.parametrize("kind", ["json", "sentencepiece"])
def test_it_imports_no_room(bpe, sp_model, tmp_path, kind):
    directory = sp_model.parent if kind == "sentencepiece" else tmp_path
    if kind == "json":
        bpe.save(str(tmp_path / "tokenizer.json"))
    ours = {path.stem for path in ROOT.glob("*.py")} | {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert {"gpt_faster", "model"} <= ours
    done = subprocess.run([sys.executable, "-c", ALONE, " ".join(ours), HELPERS, directory], cwd=ROOT,
                          capture_output=True, text=True, check=False)
    assert not done.stderr
    assert json.loads(done.stdout) == tokenizer_files.load(directory).encode("the <s> of a class")


@pytest.mark.parametrize("files, message", [
    ({"tokenizer.model": b"IQ== 0\nIg== 1\n"}, "tokenizer.model: tiktoken format"),
    ({"tekken.json": b"{}"}, "no tokenizer: expected tokenizer.json or tokenizer.model, found tekken.json"),
    ({"vocab.json": b"{}", "merges.txt": b""}, "expected tokenizer.json or tokenizer.model, found vocab.json"),
    (None, "tokenizer: GGUF metadata"),
], ids=["tiktoken", "tekken", "gpt2", "gguf"])
def test_it_says_which_other_format_it_found(files, message, tmp_path):
    for name, data in (files or {}).items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        core.load({"tokenizer.ggml.model": "gpt2"} if files is None else tmp_path)


# ---- Streaming -----------------------------------------------------------------------------------

def test_stream_equals_decode(smollm2, gemma, sp_model):
    for tokenizer in (smollm2, gemma, tokenizer_files.load(sp_model.parent)):
        for text in TEXTS[:-1] + PROSE[:3]:
            ids = tokenizer.encode(text, bos=False)
            for cut in {0, 1, len(ids) // 2}:
                prompt, rest = ids[:cut], ids[cut:]
                whole, before = tokenizer.decode(ids), tokenizer.decode(prompt)
                if "\ufffd" not in before:
                    assert before + streamed(tokenizer, prompt, rest) == whole


def test_stream_holds_half_a_character_and_flushes_it(smollm2):
    ids = smollm2.encode("x 🌱")
    stream = Detokenizer(smollm2, [])
    shown = "".join(stream.push(i) for i in ids[:-1])
    assert "\ufffd" not in shown and stream.flush().endswith("\ufffd") and stream.flush() == ""


def test_stream_of_random_ids_loses_nothing(smollm2, gemma):
    for tokenizer in (smollm2, gemma):
        for seed in range(20):
            g = torch.Generator().manual_seed(seed)
            ids = torch.randint(0, tokenizer.n_vocab, (40,), generator=g).tolist()
            stream = Detokenizer(tokenizer, [])
            assert "".join(stream.push(i) for i in ids) + stream.flush() == tokenizer.decode(ids)


# ---- Chat template -------------------------------------------------------------------------------

def test_chat_template_equals_transformers(smollm2):
    from transformers import AutoTokenizer
    theirs = AutoTokenizer.from_pretrained(SMOLLM2.parent, gguf_file=SMOLLM2.name)
    messages = [dict(role="system", content="Be brief."), dict(role="user", content="Hi {{ x }} 🙂"),
                dict(role="assistant", content="Yo"), dict(role="user", content="<b>é</b>\n")]
    marked = ("{% for m in messages %}{% if m.role == 'assistant' %}\n{% generation %}\n{{ m.content }}<end>\n"
              "{% endgeneration %}\n{% else %}[{{ m.content }}]{% endif %}{% endfor %}")       # as SmolLM3's
    for template in (smollm2.chat_template, marked):
        theirs.chat_template = template
        ours = tokenizer_files.load({**smollm2.state(), "chat_template": template})
        for n in (2, 4):
            expected = theirs.apply_chat_template(messages[:n], tokenize=False, add_generation_prompt=True)
            assert render(ours, messages[:n]) == expected


def test_chat_template_is_sandboxed_and_may_refuse(smollm2):
    template = "{{ raise_exception('no system') }}"
    tokenizer = tokenizer_files.load({**smollm2.state(), "chat_template": template})
    with pytest.raises(ValueError, match="the chat template refuses: no system"):
        render(tokenizer, [])
    for evil in ("{{ messages + 1 }}", "{{ messages.__class__.__mro__ }}{{ ().__class__.__base__.__subclasses__() }}", "{% for"):
        with pytest.raises(ValueError, match="the chat template does not render"):
            render(tokenizer_files.load({**smollm2.state(), "chat_template": evil}), [])
