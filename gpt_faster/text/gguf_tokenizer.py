"""Tokenizers in GGUF metadata (tokenizer.ggml.*).

    tokenizer = Tokenizer(**from_gguf(metadata))
"""

import struct
import sys

from checkpoint import brief
from gpt_faster.text.byte_level import (
    BLOOM,
    DEEPSEEK3,
    DIGITS,
    FALCON,
    GPT2,
    GPT4O,
    GROUPED,
    LLAMA3,
    QWEN2,
    QWEN35,
    SEED,
    TEKKEN,
    UNSPACED,
    byte_level,
)
from gpt_faster.text.end_tokens import gguf_end_ids
from tokenizer import SentencePieceBackend, TokenizersBackend, library

# tokenizer.ggml.pre -> pre-tokenizer regexes, each applied to the pieces of the previous one
GGUF_SPLITS = {
    "gpt-2": (GPT2,), "default": (GPT2,), "olmo": (GPT2,), "smollm": (DIGITS, GPT2),
    "starcoder": (DIGITS, GPT2), "refact": (DIGITS, GPT2), "dbrx": (LLAMA3,),
    "phi-2": (GPT2,), "mpt": (GPT2,), "mellum": (GPT2,), "exaone4": (GPT2,),
    "command-r": (DIGITS, GPT2), "exaone": (DIGITS, GPT2), "falcon": FALCON, "bloom": (BLOOM,),
    "stablelm2": (QWEN2,), "hunyuan": (QWEN2,), "solar-open": (QWEN2,), "seed-coder": (SEED,),
    "glm4": (LLAMA3,), "chatglm-bpe": (LLAMA3,), "hunyuan-dense": DEEPSEEK3,
    "deepseek-v3": DEEPSEEK3, "minimax-m2": (GPT4O,), "afmoe": (GROUPED, UNSPACED, DEEPSEEK3[-1]),
    "llama-bpe": (LLAMA3,), "llama3": (LLAMA3,), "llama-v3": (LLAMA3,), "smaug-bpe": (LLAMA3,),
    "qwen35": (QWEN35,), "qwen2": (QWEN2,), "deepseek-r1-qwen": (QWEN2,), "tekken": (TEKKEN,),
    "gpt-4o": (GPT4O,), "llama4": (GPT4O,),
}
IGNORE_MERGES = ("llama-bpe", "llama3", "llama-v3", "tekken")          # and add BOS by default
NFC_PRETOKENIZERS = ("qwen2", "qwen35", "deepseek-r1-qwen")            # normalize to NFC first
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)         # ggml.token_type


def from_gguf(metadata: dict) -> dict:
    """The tokenizer inside a GGUF: "gpt2" is byte-level BPE, "llama" is SentencePiece."""
    get = {k.removeprefix("tokenizer.ggml."): v for k, v in metadata.items()}.get
    kind, tokens = get("model"), get("tokens")
    if not tokens:
        raise ValueError("the GGUF has no tokenizer: tokenizer.ggml.tokens is missing")
    _check_gguf(get)
    if kind not in ("gpt2", "llama", "gemma4"):
        raise ValueError(f"tokenizer model '{kind}' is not supported (supported: gpt2, llama, "
                         "gemma4)")
    types = get("token_type") or [NORMAL] * len(tokens)
    ends = gguf_end_ids(metadata)
    control = {i: t for i, t in enumerate(tokens)
               if types[i] == CONTROL or types[i] == NORMAL and i in ends}
    bos_id, ids = get("bos_token_id"), {k: get(k + "_token_id") for k in ("bos", "eos", "padding")}
    more = dict(chat_template=metadata.get("tokenizer.chat_template"), eos_ids=ends,
                tool_template=metadata.get("tokenizer.chat_template.tool_use"),
                names={f"{k.replace('padding', 'pad')}_token": tokens[i] for k, i in ids.items()
                       if i is not None and i < len(tokens)})
    if get("add_eos_token"):
        print("note: tokenizer.ggml.add_eos_token is true: left out, since generation continues "
              "the text", file=sys.stderr)
    if kind == "llama":
        data = sentencepiece_model(tokens, get("scores") or [0.0] * len(tokens), types,
                                   bool(get("add_space_prefix", True)), get("unknown_token_id", 0))
        backend = SentencePieceBackend(data, control)
        return dict(more, backend=backend, add_bos=get("add_bos_token", True),
                    bos_id=backend.bos_id if bos_id is None else bos_id)
    merges = [tuple(m.split(" ")) for m in get("merges", [])]
    added = [t for i, t in enumerate(tokens) if types[i] == USER_DEFINED]
    vocab = {t: i for i, t in enumerate(tokens)}
    if kind == "gemma4":
        unknown = get("unknown_token_id")
        fast = sentencepiece_bpe(vocab, merges, list(control.values()), added,
                             None if unknown is None else tokens[unknown])
        return dict(more, backend=TokenizersBackend(fast), add_bos=get("add_bos_token", True),
                    bos_id=bos_id)
    pre = get("pre", "default")
    if pre == "default":
        print("note: this GGUF names no pre-tokenizer (tokenizer.ggml.pre): using GPT-2's",
              file=sys.stderr)
    if pre not in GGUF_SPLITS:
        raise ValueError(f"GGUF pre-tokenizer '{pre}' is not supported "
                         f"(supported: {', '.join(GGUF_SPLITS)})")
    whole = pre in IGNORE_MERGES
    fast = byte_level(vocab, merges, GGUF_SPLITS[pre],
                      list(control.values()), added, ignore_merges=whole,
                      nfc=pre in NFC_PRETOKENIZERS)
    backend = TokenizersBackend(fast)
    return dict(more, backend=backend, add_bos=get("add_bos_token", whole),
                bos_id=backend.bos_id if bos_id is None else bos_id)


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
        kind = UNKNOWN if i == unk_id else NORMAL if kind == UNKNOWN else kind
        piece = bytes_(1, token.encode()) + b"\x15" + struct.pack("<f", score) + number(3, kind)
        out.append(bytes_(1, piece))
    bpe, byte_fallback = 2, any(kind == BYTE for kind in types)
    out.append(bytes_(2, number(3, bpe) + number(35, byte_fallback) + number(40, unk_id)))
    out.append(bytes_(3, bytes_(1, b"identity")            # no normalization; spaces are kept
                      + number(3, space_prefix) + number(4, 0) + number(5, 1)))
    return b"".join(out)
