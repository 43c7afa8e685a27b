"""Tokenizers from GGUF metadata and from Llama 3's tiktoken file.

    tokenizer = load_for(source)                   # also handles tokenizer.py's formats
"""

import base64
import re
import struct
import sys
import time
from pathlib import Path

import tokenizer as core
from checkpoint import brief, reading
from gpt_faster.text.end_tokens import gguf_end_ids
from tokenizer import SentencePieceBackend, Tokenizer, TokenizersBackend, library

MAX_SPLIT_SECONDS = 0.25                           # for a short text: 1000x what usual regexes take

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3, QWEN2 = _WORDS + r"\p{N}{1,3}" + _REST, _WORDS + r"\p{N}" + _REST
QWEN35 = QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN, GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{tail}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{tail}"
    rf"|{number}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for tail, number in (("", r"\p{N}"), (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}")))
DIGITS, THREES = r"\p{N}", r"\p{N}{1,3}"
SEED = _WORDS + r"\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")
BLOOM = " ?[^(\\s|.,!?…。，、।۔،)]+"
DEEPSEEK3 = (
    THREES, "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
# AFMoE: groups of three digits from the right; then scripts without spaces (Chinese, Thai, …)
GROUPED = r"\p{Nd}{1,3}(?=(?:\p{Nd}{3})*(?:\P{Nd}|$))"
UNSPACED = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0eff"
    "\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+")
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


def load(source: Path | str | dict) -> Tokenizer:
    """A directory with tokenizer files, a GGUF's `tokenizer.*` metadata, or a Tokenizer's state().

    FileNotFoundError or ValueError with a one-line message.
    """
    if isinstance(source, dict) and "backend" in source:
        return core.load(source)
    path = source.get("path", "tokenizer") if isinstance(source, dict) else source
    with reading(path):
        if isinstance(source, dict):
            tokenizer = Tokenizer(**from_gguf(source))
        else:
            tokenizer = _from_directory(Path(source))
    tokenizer.path = path
    return tokenizer


def load_for(source) -> Tokenizer:
    """The tokenizer of a Checkpoint. Adds its end tokens to the Checkpoint's eos_ids."""
    return core.load_for(source, load)


def _from_directory(directory: Path) -> Tokenizer:
    json_path, model_path = directory / "tokenizer.json", directory / "tokenizer.model"
    if json_path.exists():
        tokenizer = core.from_directory(directory)
        with reading(json_path):
            check_regex_speed(tokenizer.backend)
        return tokenizer
    data = model_path.read_bytes() if model_path.exists() else b""
    if not core.is_tiktoken(data):
        return core.from_directory(directory)
    with reading(model_path):
        text, end_ids = tiktoken_to_json(data)
        backend = TokenizersBackend(text)
    tokenizer = core.from_directory(directory, backend)
    tokenizer.eos_ids = list(dict.fromkeys([*tokenizer.eos_ids, *end_ids]))
    return tokenizer


def check_regex_speed(backend: TokenizersBackend) -> None:
    """ValueError if its regular expressions backtrack catastrophically.

    Text lengths double, so that the check itself ends early.
    """
    for char in (" ", "a", "1", "\n", "!"):
        for n in (32, 64, 128, 256):
            start = time.perf_counter()
            backend.encode(char * n + "~é", special=True)
            took = time.perf_counter() - start
            if took > MAX_SPLIT_SECONDS:
                raise ValueError(f"its regular expressions take {took:.1f} seconds to split "
                                 f"{n} repetitions of {char!r}")


# ---- Byte-level BPE: Llama 3's tiktoken file, and GGUF's "gpt2" kind -----------------------------

def bytes_to_unicode() -> dict[int, str]:
    """GPT-2's byte_encoder: byte -> printable character in byte-level vocabularies."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {**{b: chr(b) for b in plain}, **{b: chr(256 + i) for i, b in enumerate(others)}}


def byte_level(vocab: dict[str, int], merges: list[tuple[str, str]], splits: tuple[str, ...],
               special: list[str], added: list[str] = (), ignore_merges: bool = False,
               nfc: bool = False):
    """Byte-level BPE. ignore_merges: a piece that is a token needs no merges (Llama 3)."""
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Fast
    with library("a vocabulary with merges of its tokens"):
        fast = Fast(models.BPE(vocab, merges, ignore_merges=ignore_merges))
    fast.normalizer = normalizers.NFC() if nfc else None
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splits]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.pre_tokenizer = pre_tokenizers.Sequence([*cuts, letters])
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    fast.add_tokens([AddedToken(t, normalized=False) for t in added])
    return fast


def tiktoken_to_json(data: bytes) -> tuple[str, list[int]]:
    """Llama 3's tokenizer.model, lines of "base64 rank". Merges are derived from the ranks.

    -> the text of a tokenizer.json, and the end-of-generation ids.
    """
    letters = bytes_to_unicode()
    ranks = {}
    for n, line in enumerate(data.splitlines(), 1):
        match = re.fullmatch(rb"([A-Za-z0-9+/]+=*) (\d{1,9})", line)
        try:
            ranks[base64.b64decode(match[1])] = int(match[2])
        except (TypeError, ValueError):
            raise ValueError(f"line {n} is {brief(line)}, expected a base64 token and its rank"
                             ) from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"ranks are not 0 to {len(ranks) - 1}, one per token")
    vocab = {"".join(letters[b] for b in token): rank for token, rank in ranks.items()}
    merges = []
    for token, rank in vocab.items():
        halves = [(token[:i], token[i:]) for i in range(1, len(token))]
        merges += [(rank, vocab[a], vocab[b], a, b) for a, b in halves if a in vocab and b in vocab]
    merges = [(a, b) for *_, a, b in sorted(merges)]
    n = len(vocab)
    reserved = "<|reserved_special_token_{}|>".format
    names = ["<|begin_of_text|>", "<|end_of_text|>", reserved(0), reserved(1),
             "<|finetune_right_pad_id|>", reserved(2), "<|start_header_id|>", "<|end_header_id|>",
             "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"]
    names += [reserved(i) for i in range(3, 256 - len(names) + 3)]
    fast = byte_level(vocab, merges, (LLAMA3,), names, ignore_merges=True)
    from tokenizers.processors import TemplateProcessing
    fast.post_processor = TemplateProcessing(single=f"{names[0]} $A",
                                             special_tokens=[(names[0], n)])
    ends = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
    return fast.to_str(), [n + names.index(end) for end in ends]


# ---- GGUF ---------------------------------------------------------------------------------------

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
                names={f"{k.replace('padding', 'pad')}_token": tokens[i] for k, i in ids.items()
                       if i is not None and i < len(tokens)})
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
