"""Byte-level BPE tokenizers and their split patterns.

    fast = byte_level(vocab, merges, (LLAMA3,), special=["<|endoftext|>"])    # tokenizers.Tokenizer
"""

from tokenizer import library

# ---- Split patterns -----------------------------------------------------------------------------

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
# Kimi: Chinese characters apart from other letters
_UPPER_KIMI, _LOWER_KIMI = (c[:-1] + r"&&[^\p{Han}]]" for c in (_UPPER, _LOWER))
KIMI = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER_KIMI}*{_LOWER_KIMI}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER_KIMI}+{_LOWER_KIMI}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|\p{{N}}{{1,3}}" + _REST)


# ---- Tokenizers ---------------------------------------------------------------------------------

def bytes_to_unicode() -> dict[int, str]:
    """GPT-2's byte_encoder: byte -> printable character in byte-level vocabularies."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {**{b: chr(b) for b in plain}, **{b: chr(256 + i) for i, b in enumerate(others)}}


def byte_level(vocab: dict[str, int], merges: list[tuple[str, str]], splits: tuple[str, ...],
               special: list[str], added: list[str] = (), ignore_merges: bool = False,
               nfc: bool = False, prefix_space: bool = False):
    """Byte-level BPE. ignore_merges: a piece that is a token needs no merges (Llama 3).

    prefix_space: a space in front of each piece of the last split, or of the text without a split.
    """
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Fast
    with library("a vocabulary with merges of its tokens"):
        fast = Fast(models.BPE(vocab, merges, ignore_merges=ignore_merges))
    fast.normalizer = normalizers.NFC() if nfc else None
    with library("a readable split pattern"):
        cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splits]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=not splits)
    fast.pre_tokenizer = pre_tokenizers.Sequence([*cuts, letters])
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    fast.add_tokens([AddedToken(t, normalized=False) for t in added])
    return fast
