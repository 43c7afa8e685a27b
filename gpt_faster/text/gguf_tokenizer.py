"""Tokenizers in GGUF metadata (tokenizer.ggml.*).

    tokenizer = Tokenizer(**from_gguf(metadata))
"""

import struct
import sys

from checkpoint import brief
from gpt_faster.text import family_patterns as families
from gpt_faster.text.byte_level import (
    BLOOM,
    DEEPSEEK3,
    DIGITS,
    FALCON,
    GPT2,
    GPT4O,
    GROUPED,
    KIMI,
    LLAMA3,
    QWEN2,
    QWEN35,
    SEED,
    TEKKEN,
    UNSPACED,
    byte_level,
)
from gpt_faster.text.end_tokens import FIM_MARKERS, gguf_end_ids
from tokenizer import AddedToken, SentencePieceBackend, TokenizersBackend, library

# Regexes of the pre-tokenizers that tokenizer.ggml.pre names, each applied to the pieces of the
# previous one. All names of llama.cpp's src/llama-vocab.cpp are here or in REFUSED_PRE;
# scripts/dev/llama_cpp_lists.py compares with a checkout.
_NAMES = (
    ((GPT2,), "gpt-2 default phi-2 olmo mpt mellum exaone4 gigachat a.x-4.0 trillion jais "
              "granite-docling"),
    ((DIGITS, GPT2), "smollm starcoder refact codeshell command-r exaone minerva-7b mellum2"),
    ((LLAMA3,), "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 dbrx smaug-bpe "
                "glm4 glm5 chatglm-bpe"),
    ((QWEN2,), "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2"),
    ((GPT4O,), "gpt-4o llama4 kanana2 talkie minimax-m2"),
    (DEEPSEEK3, "deepseek-v3 hunyuan-dense joyai-llm hy_v4"),
    (families.DEEPSEEK_LLM, "deepseek-llm"), (families.DEEPSEEK_CODER, "deepseek-coder"),
    ((KIMI,), "kimi-k2 kimi-k25"), ((QWEN35,), "qwen35"),
    ((TEKKEN,), "tekken"), ((SEED,), "seed-coder"),
    ((BLOOM,), "bloom poro-chat gpt3-finnish"), ((BLOOM, DIGITS), "viking"),
    (FALCON, "falcon"), (families.CHAMELEON, "chameleon"),
    ((families.BAILING,), "bailingmoe bailingmoe2 llada-moe"),
    (families.TINY_AYA, "tiny_aya cohere2moe"), (families.SUPERBPE, "superbpe"),
    (families.YOUTU, "youtu"), ((families.EXAONE_MOE,), "exaone-moe"),
    ((families.JAIS2,), "jais-2"), (families.MINICPM5, "minicpm5"), (families.SPARK, "spark2_5"),
    ((families.UFAKZEKA,), "ufakzeka"), ((families.LINES, QWEN2), "laguna"),
    ((GROUPED, UNSPACED, DEEPSEEK3[-1]), "afmoe"),
)
GGUF_SPLITS = {name: splits for splits, names in _NAMES for name in names.split()}
# Spaces become U+2581 and bytes have tokens of their own: sentencepiece_bpe()
SPACE_PRE = ("gemma4", "sarvam-moe")
_EMBEDDING = "of embedding models"
REFUSED_PRE = dict.fromkeys(
    ("jina-es", "jina-de", "jina-v1-en", "jina-v2-es", "jina-v2-de", "jina-v2-code", "jina-v5-nano",
     "roberta-bpe", "modern-bert", "granite-embed-multi-97m", "granite-embed-multi-311m",
     "whitespace"), _EMBEDDING)
WORDPIECE_PRE = ("bert-bge", "bert-bge-large", "jina-v2-en")         # of model "bert", refused
# A piece of text that is a token needs no merges. The first line: BOS unless the file says no.
ADD_BOS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
           "tekken", "chameleon", "gemma4")
IGNORE_MERGES = (*ADD_BOS[:9], "glm4", "glm5", "minicpm5", "youtu")
# Normalized to NFC, as the models' own tokenizers do and llama.cpp does not
NFC_PRETOKENIZERS = ("qwen2", "qwen35", "deepseek-r1-qwen", "f2llmv2", "command-r", "olmo", "mpt")
REFUSED_MODELS = {
    "bert": "WordPiece, " + _EMBEDDING, "t5": "Unigram, of encoder-decoder and embedding models",
    "rwkv": "of RWKV", "plamo2": "of PLaMo 2", "hybriddna": "of DNA models",
    "whitespace": _EMBEDDING, "none": "the file has no tokenizer",
    "no_vocab": "the file has no tokenizer", "test": "of llama.cpp's own tests"}
UNNAMED_BOS = 11                                   # llama.cpp's default for BPE: Falcon's
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)         # ggml.token_type


def from_gguf(metadata: dict) -> dict:
    """The tokenizer inside a GGUF: "gpt2" is byte-level BPE, "llama" is SentencePiece."""
    get = {k.removeprefix("tokenizer.ggml."): v for k, v in metadata.items()}.get
    kind, tokens = get("model"), get("tokens")
    if not tokens and kind not in REFUSED_MODELS:
        raise ValueError("the GGUF has no tokenizer: tokenizer.ggml.tokens is missing")
    _check_gguf(get)
    if kind not in ("gpt2", "llama", "gemma4"):
        reason = f": {REFUSED_MODELS[kind]}" if kind in REFUSED_MODELS else ""
        raise ValueError(f"tokenizer model '{kind}' is not supported{reason} (supported: gpt2, "
                         "llama, gemma4)")
    types = get("token_type") or [NORMAL] * len(tokens)
    pre = {"gemma4": "gemma4", "llama": None}.get(kind, get("pre", "default"))
    ends = gguf_end_ids(metadata)
    special = special_tokens(tokens, types, ends, str(metadata.get("general.name", "")))
    if kind == "llama":
        backend = _sentencepiece(get, tokens, types, special)
    else:
        backend = TokenizersBackend(_bpe(get, tokens, pre, special))
    bos_id, add_bos = get("bos_token_id"), get("add_bos_token")
    if add_bos is None or pre == "gemma4":         # old Gemma 4 files say False
        add_bos = kind == "llama" or pre in ADD_BOS
    bos_id = backend.bos_id if bos_id is None else bos_id
    if add_bos and bos_id is None and len(tokens) > UNNAMED_BOS:
        bos_id = UNNAMED_BOS
        print("note: this GGUF does not name the token that begins texts "
              f"(tokenizer.ggml.bos_token_id): token {bos_id} ({brief(tokens[bos_id])}), as in "
              "llama.cpp", file=sys.stderr)
    if get("add_eos_token"):
        print("note: tokenizer.ggml.add_eos_token: no token is appended to a text, since "
              "generation continues it", file=sys.stderr)
    ids = {k: get(k + "_token_id") for k in ("bos", "eos", "padding")}
    names = {f"{k.replace('padding', 'pad')}_token": tokens[i] for k, i in ids.items()
             if i is not None and i < len(tokens)}
    return dict(backend=backend, add_bos=add_bos, bos_id=bos_id, names=names, eos_ids=ends,
                chat_template=metadata.get("tokenizer.chat_template"),
                tool_template=metadata.get("tokenizer.chat_template.tool_use"))


def special_tokens(tokens: list[str], types: list[int], ends: list[int],
                   model_name: str) -> list[AddedToken]:
    """The tokens that are matched in a text before it is split, as in llama.cpp.

    CONTROL and UNKNOWN tokens are special: hidden when decoded, and letters where a text's special
    tokens count as text. So are end tokens and fill-in-the-middle markers, whatever their type, but
    for single characters. USER_DEFINED tokens are always matched, and shown. model_name: Phi-3's
    tokens strip the spaces after them, which no key of its GGUF says.
    """
    is_phi3 = any(name in model_name.lower() for name in ("phi-3", "phi3"))
    found, ends = [], set(ends)
    for i, (text, kind) in enumerate(zip(tokens, types)):
        is_marker = len(text) > 1 and (i in ends or text in FIM_MARKERS)
        special = kind in (CONTROL, UNKNOWN) or is_marker
        if text and (special or kind == USER_DEFINED):
            rstrip = is_phi3 and text not in ("<unk>", "<s>", "<|endoftext|>")
            found.append(AddedToken(i, text, special, rstrip=rstrip))
    return found


def _sentencepiece(get, tokens: list[str], types: list[int], special: list[AddedToken]):
    space_prefix = bool(get("add_space_prefix", True))
    if not space_prefix:                           # else a space follows each: not the library's
        special = [t for t in special if t.special]            # to match
    matched = {t.id for t in special}
    types = [CONTROL if i in matched else kind for i, kind in enumerate(types)]
    data = sentencepiece_model(tokens, get("scores") or [0.0] * len(tokens), types, space_prefix,
                               get("unknown_token_id", 0))
    return SentencePieceBackend(data, added=special)


def _bpe(get, tokens: list[str], pre: str, special: list[AddedToken]):
    """A tokenizers.Tokenizer from a vocabulary and its merges."""
    if pre in REFUSED_PRE:
        raise ValueError(f"GGUF pre-tokenizer '{pre}' is not supported: {REFUSED_PRE[pre]}")
    if pre not in GGUF_SPLITS and pre not in SPACE_PRE:
        raise ValueError(f"GGUF pre-tokenizer '{pre}' is not supported "
                         f"(supported: {', '.join((*GGUF_SPLITS, *SPACE_PRE))})")
    if pre == "default":
        print("note: this GGUF names no pre-tokenizer (tokenizer.ggml.pre): using GPT-2's",
              file=sys.stderr)
    if get("merges") is None:
        print("note: this GGUF has no tokenizer.ggml.merges: a text becomes single bytes or "
              "characters", file=sys.stderr)
    merges = [tuple(merge.split(" ")) for merge in get("merges") or []]
    vocab = {t: i for i, t in enumerate(tokens)}
    names = [t.text for t in special if t.special]
    added = [t.text for t in special if not t.special]
    if pre in SPACE_PRE:
        unknown = get("unknown_token_id")
        return sentencepiece_bpe(vocab, merges, names, added,
                                 None if unknown is None else tokens[unknown])
    return byte_level(vocab, merges, GGUF_SPLITS[pre], names, added,
                      ignore_merges=pre in IGNORE_MERGES, nfc=pre in NFC_PRETOKENIZERS)


def _check_gguf(get) -> None:
    """ValueError names a tokenizer.ggml.* key with a wrong type, length or range."""
    def texts(value):
        return isinstance(value, list) and all(isinstance(v, str) for v in value)

    tokens = get("tokens")
    n = len(tokens) if texts(tokens) else -1

    def one_each(kinds):
        return lambda v: isinstance(v, list) and len(v) == n and all(type(x) in kinds for x in v)

    def is_id(value):
        return type(value) is int and 0 <= value < 1 << 31

    known = dict(model=str, pre=str, tokens=texts, token_type=one_each((int,)), merges=texts,
                 scores=one_each((int, float)), bos_token_id=is_id, eos_token_id=is_id,
                 padding_token_id=is_id, unknown_token_id=lambda v: is_id(v) and v < n)
    for key, kind in known.items():
        value = get(key)
        fits = isinstance(value, str) if kind is str else value is None or kind(value)
        if value is not None and not fits:
            raise ValueError(f"tokenizer.ggml.{key} is {brief(value)}, which is not valid for "
                             f"{n} tokens")
    bad = [m for m in get("merges") or [] if m.count(" ") != 1]
    if bad:
        raise ValueError(f"tokenizer.ggml.merges has {brief(bad[0])}, expected two tokens")
    if any(not 0 <= kind <= 255 for kind in get("token_type") or []):
        raise ValueError("tokenizer.ggml.token_type has a value outside 0 to 255")


def sentencepiece_bpe(vocab: dict[str, int], merges: list[tuple[str, str]], special: list[str],
                  added: list[str], unknown: str | None):
    """Gemma 4's tokenizer: BPE merges over SentencePiece pieces, as a tokenizers.Tokenizer.

    Spaces become U+2581, newlines are split off, unknown characters fall back to bytes.
    """
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Fast
    space = "\N{LOWER ONE EIGHTH BLOCK}"
    with library("a vocabulary with merges of its tokens"):
        fast = Fast(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True,
                               byte_fallback=True))
    fast.normalizer = normalizers.Replace(" ", space)
    fast.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|[\n]+"), "isolated")
    fast.decoder = decoders.Sequence([decoders.Replace(space, " "), decoders.ByteFallback(),
                                      decoders.Fuse()])
    fast.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    fast.add_tokens([AddedToken(t, normalized=False) for t in added])
    return fast


def sentencepiece_model(tokens, scores, types, space_prefix: bool, unk_id: int) -> bytes:
    """Serialize a SentencePiece model (sentencepiece_model.proto), without protobuf.

    message Model  { repeated Piece pieces = 1; Trainer trainer = 2; Normalizer normalizer = 3; }
    message Piece  { string piece = 1; float score = 2; Type type = 3; }
    """
    def varint(n):
        out = bytearray()
        while n > 127:
            out.append(n & 127 | 128)
            n >>= 7
        return bytes((*out, n))

    def number(tag, n):
        return varint(tag << 3) + varint(n)

    def bytes_(tag, data):
        return varint(tag << 3 | 2) + varint(len(data)) + data

    out = []
    for i, (token, score, kind) in enumerate(zip(tokens, scores, types)):
        if kind == USER_DEFINED:                   # llama.cpp stores these with real spaces
            token = token.replace(" ", "\N{LOWER ONE EIGHTH BLOCK}")
        token = token or f"[EMPTY_{i}]"            # llama.cpp's name; the library refuses ""
        kind = UNKNOWN if i == unk_id else NORMAL if kind == UNKNOWN else kind
        piece = bytes_(1, token.encode()) + b"\x15" + struct.pack("<f", score) + number(3, kind)
        out.append(bytes_(1, piece))
    bpe, byte_fallback = 2, any(kind == BYTE for kind in types)
    out.append(bytes_(2, number(3, bpe) + number(35, byte_fallback) + number(40, unk_id)))
    out.append(bytes_(3, bytes_(1, b"identity")            # no normalization; spaces are kept
                      + number(3, space_prefix) + number(4, 0) + number(5, 1)))
    return b"".join(out)
