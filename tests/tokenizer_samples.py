"""Small tiktoken files and tekken.json files, hard strings, and the ids that the libraries of their makers give them.

The libraries are not among the development requirements, so what they say is kept as digests, made by

    python tests/tokenizer_samples.py          # where mistral-common and tiktoken are installed
"""

import base64
import hashlib
import json
import random
import unicodedata
from pathlib import Path

WORDS = [" the", " and", "ing", "ation", " return", "class", "Hello", "HELLO", " World", "'re", "'LL", "don", "123", "2024", " ==", "->", "//",
         "    ", "\n\n", "\r\n", "....", "----", "ééé", " é", "ß", "中文", "漢字", "日本語", "のの", "한국", "при", "вет", "שלו", "مرح", "हिन्", "👩", "👩‍👩", "ǅ", "½"]
UNREACHABLE = ["zebra", " quantum", "字字字"]        # tokens that no merges of tokens lead to
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
           "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]",
           "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"]
TEKKEN_PATTERN = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
                  r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def ranks() -> list[bytes]:
    """All bytes, and words with all that they begin with."""
    tokens = {bytes([b]): None for b in range(256)}
    for word in WORDS:
        data = word.encode()
        tokens |= {data[:n]: None for n in range(2, len(data) + 1)}
    return [*tokens, *(word.encode() for word in UNREACHABLE)]


def tiktoken_file() -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(ranks()))


def tekken(version="v3", n_special=30, unused=5, special=None, **config) -> dict:
    """A tekken.json whose last tokens are beyond default_vocab_size. special: the texts that the file lists."""
    vocab = ranks()
    config = dict(pattern=TEKKEN_PATTERN, num_vocab_tokens=len(vocab), default_vocab_size=len(vocab) - unused + n_special,
                  default_num_special_tokens=n_special, version=version) | config
    vocab = [dict(rank=i, token_bytes=base64.b64encode(t).decode(), token_str=None) for i, t in enumerate(vocab)]
    listed = {} if special is None else dict(special_tokens=[dict(rank=i, token_str=t, is_control="THINK" not in str(t))
                                                             for i, t in enumerate(special)])
    return dict(config=config, vocab=vocab, version=1, type="Tekken", **listed)


TEKKENS = {
    "v3": dict(version="v3"), "v7": dict(version="v7", unused=0),
    "v11": dict(version="v11", special=[*SPECIAL, "[ARGS]", "[CALL_ID]"], n_special=100),
    "v13": dict(version="v13", special=[*SPECIAL, "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"], n_special=24, unused=9)}
EXTRAS = [f"<|extra_{i}|>" for i in range(205)]
KIMI = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 9: "[EOT]", 11: "<|tool_call_begin|>", 28: "[UNK]", 29: "[PAD]"}


def kimi_config() -> dict:
    n = len(ranks())
    return dict(tokenizer_class="TikTokenTokenizer", bos_token="[BOS]", eos_token="[EOS]", unk_token="[UNK]", pad_token="[PAD]",
                additional_special_tokens=["<|im_end|>", "<|im_user|>"], added_tokens_decoder={
                    str(n + i): dict(content=text, special=True) for i, text in KIMI.items()})


# family -> file, tokenizer_config.json, special tokens by their distance from the ranks' end
TIKTOKENS = {
    "kimi": ("tiktoken.model", kimi_config(), KIMI),
    "qwen1": ("qwen.tiktoken", dict(auto_map={"AutoTokenizer": ["tokenization_qwen.QWenTokenizer", None]}),
              dict(enumerate(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *EXTRAS]))),
    "hunyuan": ("hy.tiktoken", dict(tokenizer_class="HYTokenizer"),
                dict(enumerate(["<|endoftext|>", "<|startoftext|>", "<|bos|>", "<|eos|>", "<|pad|>", *EXTRAS]))),
    "glm4": ("tokenizer.model", dict(tokenizer_class="ChatGLM4Tokenizer"), dict(enumerate([
        "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]))),
    "llama3": ("tokenizer.model", {}, {0: "<|begin_of_text|>", 1: "<|end_of_text|>", 6: "<|start_header_id|>", 9: "<|eot_id|>"})}
WORDS_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERNS = {
    "kimi": "|".join([r"[\p{Han}]+", rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{SHORT}", rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{SHORT}", r"\p{N}{1,3}"]) + REST,
    "qwen1": WORDS_PATTERN + r"\p{N}" + REST, "hunyuan": WORDS_PATTERN + r"\p{N}" + REST,
    "glm4": WORDS_PATTERN + r"\p{N}{1,3}" + REST, "llama3": WORDS_PATTERN + r"\p{N}{1,3}" + REST}
NFC = ("qwen1", "hunyuan")


def hard_strings(special=(), n=2000, seed=11) -> list[str]:
    """Words, spaces, runs and characters of many scripts, in disorder."""
    r = random.Random(seed)
    words = [*WORDS, *UNREACHABLE, "fox's", "I'LL", "we've", "O'Reilly", "'tis", "camelCase", "HTTPServer", "naïve", "e\u0301", "İ", "ﬁ", "4567", "3.14",
             "٣٤٥", "ไทย", "한국어", "🏳️‍🌈", "\u200b", "\ufeff", "</s>", "[INST]", "<unk>", "C:\\x", "http://a.b/c?d=e", "x\u0300\u0301"]
    spaces = [" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n", "\n ", "\u00a0", "\u3000", "\u2028", "\x0b", "\r", " " * 10]
    blocks = [(0x20, 0x7f), (0xa0, 0x250), (0x300, 0x370), (0x391, 0x3a1), (0x400, 0x500), (0x5d0, 0x5eb), (0x905, 0x939), (0x2010, 0x2050),
              (0x2160, 0x2180), (0x3041, 0x3090), (0x4e00, 0x9f00), (0xac00, 0xd700), (0xff01, 0xff5e), (0x1f300, 0x1f5ff), (0, 0x20)]

    def part():
        kind = r.random()
        if kind < 0.4:
            return r.choice(words)
        if kind < 0.6:
            return r.choice(spaces)
        if kind < 0.8:
            first, last = r.choice(blocks)
            return "".join(chr(r.randrange(first, last)) for _ in range(r.randint(1, 6)))
        if kind < 0.9 and special:
            return r.choice(list(special))
        return r.choice("a0 =-#\n.é中/\t_A1'\"") * r.randint(1, 30)

    return ["", " ", "\n", "a", "'s", *("".join(part() for _ in range(r.randint(1, 12))) for _ in range(n - 5))]


def digest(ids: list[list[int]]) -> str:
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]


# mistral-common 1.13.1: encode(text, bos=False, eos=False), where special tokens are text
OF_MISTRAL_COMMON = {                              # number of ids, digest
    "v3": (424, "c7d11ab6f7b8dd7d"),
    "v7": (429, "cbb11baa57dcdd3c"),
    "v11": (494, "6895fbd85b112cc2"),
    "v13": (414, "aaf3efbaa4e9f814")}
# tiktoken 0.14.0: special tokens as text, as tokens
OF_TIKTOKEN = {
    "kimi": ("01a9836f4bc7de15", "79c238607e034895"),
    "qwen1": ("8d6bf9cea0070e5c", "72cce7a4acf34454"),
    "hunyuan": ("ee285629da256301", "06bbbef66951f43f"),
    "glm4": ("a9ff67965aac4345", "8162a7b3b88a4da5"),
    "llama3": ("c0a42def697f048d", "2b6edd6baad1e528")}


def main():
    import tempfile

    import tiktoken
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer
    for name, kind in TEKKENS.items():
        path = Path(tempfile.mkdtemp()) / "tekken.json"
        path.write_text(json.dumps(tekken(**kind)))
        theirs = Tekkenizer.from_file(path)
        ids = [theirs.encode(text, False, False) for text in hard_strings(SPECIAL)]
        print(f'    "{name}": ({theirs.n_words}, "{digest(ids)}"),')
    tokens = {token: rank for rank, token in enumerate(ranks())}
    for name, pattern in PATTERNS.items():
        special = {text: len(tokens) + i for i, text in TIKTOKENS[name][2].items()}
        theirs = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=tokens, special_tokens=special)
        texts = [unicodedata.normalize("NFC", text) if name in NFC else text for text in hard_strings(special)]
        ids = [[theirs.encode(text, disallowed_special=()) for text in texts], [theirs.encode(text, allowed_special="all") for text in texts]]
        print(f'    "{name}": ("{digest(ids[0])}", "{digest(ids[1])}"),')


if __name__ == "__main__":
    main()
