"""Vocabularies of byte strings by rank: tiktoken files and Mistral's tekken.json.

Their merges follow from the ranks: of all pairs of neighbours the one whose join has the lowest
rank is merged first.

    backend = read_tiktoken(directory / "tiktoken.model", config)    # config: tokenizer_config.json
    backend = read_tekken(directory / "tekken.json", config)
"""

import base64
import re
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

from checkpoint import brief, read_json, reading
from gpt_faster.text.byte_level import KIMI, LLAMA3, QWEN2, byte_level, bytes_to_unicode
from tokenizer import MAX_ADDED, AddedToken, TokenizersBackend, read_added_tokens

# ---- tiktoken files -----------------------------------------------------------------------------

@dataclass(frozen=True)
class Family:
    """How a family's tiktoken file is used; the file itself has ranks only.

    special: the texts of the ids behind the ranks; "{}" in a text is the id. prefix: the tokens in
    front of each text. ends: tokens at which a text ends. first_special: the first id of special
    tokens, if it is not the number of ranks. counts_lines: the ranks in the file are not used.
    """

    pattern: str
    special: list[str]
    nfc: bool = False
    prefix: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    names: dict[str, str] = field(default_factory=dict)
    first_special: dict[int, int] = field(default_factory=dict)
    counts_lines: bool = False


def _numbered(name: str, n: int) -> list[str]:
    return [name.format(i) for i in range(n)]


_RESERVED = _numbered("<|reserved_special_token_{}|>", 248)
_LLAMA3 = Family(                                  # llama-models, models/llama3/tokenizer.py
    LLAMA3, ["<|begin_of_text|>", "<|end_of_text|>", *_RESERVED[:2], "<|finetune_right_pad_id|>",
             _RESERVED[2], "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>",
             "<|python_tag|>", *_RESERVED[3:]],
    prefix=("<|begin_of_text|>",), ends=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    names=dict(bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>"))
_KIMI = Family(                                    # tokenization_kimi.py of Kimi K2, K3, Linear
    KIMI, ["[BOS]", "[EOS]", *["<|reserved_token_{}|>"] * 254],
    names=dict(bos_token="[BOS]", eos_token="[EOS]"))
_QWEN1 = Family(                                   # tokenization_qwen.py of Qwen 1
    QWEN2, ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *_numbered("<|extra_{}|>", 205)],
    nfc=True, ends=("<|endoftext|>", "<|im_end|>"), names=dict(eos_token="<|endoftext|>"))
_HUNYUAN = Family(                                 # tokenization_hy.py of Hunyuan A13B
    QWEN2, ["<|endoftext|>", "<|startoftext|>", "<|bos|>", "<|eos|>", "<|pad|>",
            *_numbered("<|extra_{}|>", 205)],
    nfc=True, ends=("<|endoftext|>", "<|eos|>"), counts_lines=True,
    names=dict(bos_token="<|startoftext|>", eos_token="<|endoftext|>"))
_STABLELM2 = Family(                               # tokenization_arcade100k.py of Stable LM 2
    QWEN2, ["<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
            "<gh_stars>", "<filename>", "<issue_start>", "<issue_comment>", "<issue_closed>",
            "<jupyter_start>", "<jupyter_text>", "<jupyter_code>", "<jupyter_output>",
            "<empty_output>", "<commit_before>", "<commit_msg>", "<commit_after>", "<reponame>",
            "<|endofprompt|>", "<|im_start|>", "<|im_end|>", "<|pause|>",
            *_numbered("<|reg{}|>", 8), "<|extra0|>"],
    nfc=True, ends=("<|endoftext|>", "<|im_end|>"), names=dict(eos_token="<|endoftext|>"),
    first_special={100256: 100257})
_GLM4 = Family(                                    # tokenization_chatglm.py of GLM-4
    LLAMA3, ["<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>",
             "<|user|>", "<|assistant|>", "<|observation|>", "<|begin_of_image|>",
             "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"],
    prefix=("[gMASK]", "<sop>"), ends=("<|endoftext|>", "<|user|>", "<|observation|>"),
    names=dict(eos_token="<|endoftext|>"))

FAMILIES = {                                       # by tokenizer_class
    "TikTokenTokenizer": _KIMI, "QWenTokenizer": _QWEN1, "HYTokenizer": _HUNYUAN,
    "Arcade100kTokenizer": _STABLELM2, "ChatGLM4Tokenizer": _GLM4}
FILES = {"tiktoken.model": _KIMI, "qwen.tiktoken": _QWEN1, "hy.tiktoken": _HUNYUAN,
         "arcade100k.tiktoken": _STABLELM2, "tokenizer.model": _LLAMA3}
# These say nothing about a pattern: the file's name decides.
GENERAL_CLASSES = ("LlamaTokenizer", "PreTrainedTokenizer", "TokenizersBackend")


def read_tiktoken(path: Path, config: dict) -> TokenizersBackend:
    """A tiktoken file: lines of "base64 rank". Special tokens are the family's, and those of the
    JSON files. ValueError: an unknown family, an invalid line or id."""
    with reading(path):
        family = _family(path.name, config)
        ranks = _ranks(path.read_bytes(), family.counts_lines)
        n = len(ranks)
    first = family.first_special.get(n, n)
    default = {text.format(i): i for i, text in enumerate(family.special, first)}
    known = SimpleNamespace(n_vocab=first + len(default), id_of=default.get)
    added = {t.id: t for t in read_added_tokens(path.parent, config, known)}
    with reading(path):
        texts = {t.text for t in added.values()}
        tokens = {i: AddedToken(i, text) for text, i in default.items() if text not in texts}
        tokens |= {i: t for i, t in added.items() if i >= n}
        last = max(tokens, default=n - 1)
        if last - n > MAX_ADDED:
            raise ValueError(f"an added token has the id {last}, and the file {n} ranks")
        for i in range(n, last):
            tokens.setdefault(i, AddedToken(i, f"<|reserved_token_{i}|>"))
        backend = _backend(ranks, family.pattern, {}, tokens, family.prefix, family.nfc)
        backend.add([t for i, t in sorted(added.items()) if i < n])
        backend.names = {key: text for key, text in family.names.items()
                         if backend.id_of(text) is not None}
        ends = map(backend.id_of, family.ends)
        backend.eos_ids = [i for i in ends if i is not None]
    return backend


def _family(name: str, config: dict) -> Family:
    """By tokenizer_class, or the class in auto_map; else by the file's name."""
    auto = config.get("auto_map")
    auto = auto.get("AutoTokenizer") if isinstance(auto, dict) else auto
    auto = next((x for x in auto if x), None) if isinstance(auto, list) else auto
    kind = config.get("tokenizer_class") or auto
    kind = str(kind).rpartition(".")[2].removesuffix("Fast") if kind else None
    if kind in FAMILIES:
        return FAMILIES[kind]
    if kind is None or kind in GENERAL_CLASSES:
        if name in FILES:
            return FILES[name]
        found = "without 'tokenizer_class'"
    else:
        found = f"of 'tokenizer_class' {brief(kind)}"
    raise ValueError(f"tiktoken format {found}: its split pattern is not known: add a "
                     f"tokenizer.json (known: Llama 3, Kimi, Qwen 1, Hunyuan, Stable LM 2, GLM-4)")


def _ranks(data: bytes, counts_lines: bool) -> dict[bytes, int]:
    ranks = {}
    for n, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        match = re.fullmatch(rb"([A-Za-z0-9+/]+=*) (\d{1,9})\s*", line)
        try:
            token, rank = base64.b64decode(match[1]), int(match[2])
        except (TypeError, ValueError):
            raise ValueError(f"line {n} is {brief(line)}, expected a base64 token and its rank"
                             ) from None
        if counts_lines:
            ranks.setdefault(token, len(ranks))
        else:
            ranks[token] = rank
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"ranks are not 0 to {len(ranks) - 1}, one per token")
    return ranks


# ---- tekken.json --------------------------------------------------------------------------------

# The special tokens of files up to version v7 that do not list them (mistral-common).
TEKKEN_SPECIAL = [
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]",
    "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]"]
LAST_UNLISTED = 7
TEKKEN_NAMES = dict(bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>")


def read_tekken(path: Path, config: dict) -> TokenizersBackend:
    """Mistral's tekken.json. Ids: special tokens first, then the ranks, up to default_vocab_size.

    A text begins with <s>, as in all of Mistral's prompts. ValueError: an invalid or unknown entry.
    """
    with reading(path):
        content = read_json(path)
        settings = content.get("config")
        settings = settings if isinstance(settings, dict) else {}
        pattern, n_vocab, n_special = map(settings.get, (
            "pattern", "default_vocab_size", "default_num_special_tokens"))
        vocab = content.get("vocab")
        if not isinstance(pattern, str) or not isinstance(vocab, list):
            raise ValueError("no 'pattern' and 'vocab': not a tekken.json of mistral-common")
        _check_portable(pattern)
        special = _tekken_special(content, settings.get("version"), n_special)
        if type(n_vocab) is not int or not 256 <= n_vocab - n_special <= len(vocab):
            raise ValueError(f"'default_vocab_size' is {brief(n_vocab)}, with {n_special} special "
                             f"tokens and {len(vocab)} others")
        ranks = {_tekken_bytes(token, rank): rank
                 for rank, token in enumerate(vocab[:n_vocab - n_special])}
        if len(ranks) != n_vocab - n_special:
            raise ValueError("two of the tokens are equal")
        tokens = {i: AddedToken(i, text) for i, text in enumerate(special)}
        backend = _backend({token: n_special + rank for token, rank in ranks.items()}, pattern,
                           {text: i for i, text in enumerate(special)}, tokens, ("<s>",))
    backend.names = {key: text for key, text in TEKKEN_NAMES.items() if text in special}
    added = read_added_tokens(path.parent, config, backend)
    with reading(path):
        backend.add(added)
    return backend


def _tekken_special(content: dict, version, n: int) -> list[str]:
    """The texts of the special tokens, in the order of their ids; the last ones are fillers."""
    match = re.fullmatch(r"v(\d{1,4})", version) if isinstance(version, str) else None
    if not match:
        raise ValueError(f"'version' is {brief(version)}, expected v3, v7, v11, v13, …")
    listed = content.get("special_tokens")
    if listed is None and int(match[1]) > LAST_UNLISTED:
        raise ValueError(f"no 'special_tokens', which files of version {version} have")
    if listed is None:
        texts = TEKKEN_SPECIAL
    else:
        listed = listed if isinstance(listed, list) else [listed]
        by_rank = {t["rank"]: t.get("token_str") for t in listed
                   if isinstance(t, dict) and type(t.get("rank")) is int}
        texts = [by_rank.get(i) for i in range(len(listed))]
    if type(n) is not int or not len(texts) <= n <= MAX_ADDED:
        raise ValueError(f"'default_num_special_tokens' is {brief(n)}, with {len(texts)} of them")
    texts = texts + [f"<SPECIAL_{i}>" for i in range(len(texts), n)]
    bad = [i for i, text in enumerate(texts)
           if not isinstance(text, str) or not text or re.search("[\ud800-\udfff]", text)]
    if bad:
        raise ValueError(f"special token {bad[0]} is {brief(texts[bad[0]])}, expected a text")
    missing = [text for text in ("<s>", "</s>") if text not in texts]
    if missing or len(set(texts)) != n:
        raise ValueError(f"special token {missing[0]} is missing" if missing else
                         "two of the special tokens are equal")
    return texts


def _tekken_bytes(token, rank: int) -> bytes:
    try:
        if token["rank"] != rank:
            raise ValueError
        return base64.b64decode(token["token_bytes"], validate=True)
    except (TypeError, KeyError, ValueError):
        raise ValueError(f"token {rank} is {brief(token)}, expected its rank and bytes in base64"
                         ) from None


def _check_portable(pattern: str) -> None:
    """ValueError for what Rust's regular expressions and Oniguruma read differently."""
    plain = re.sub(r"\\.", "", pattern)
    while plain != (plain := re.sub(r"\[[^\[\]]*\]", "", plain)):
        pass                                       # from the innermost of nested classes
    if found := re.search(r"\}\+|[$^]", plain):
        raise ValueError(f"its pattern has {found[0]!r}, which the tokenizers library reads "
                         "otherwise: add a tokenizer.json")


# ---- Both ---------------------------------------------------------------------------------------

def _backend(ids: dict[bytes, int], pattern: str, special: dict[str, int],
             tokens: dict[int, AddedToken], prefix: tuple[str, ...], nfc: bool = False):
    """ids: ordinary tokens. special: more entries of the vocabulary. tokens: added, by id."""
    from tokenizers import AddedToken as Added
    from tokenizers.processors import TemplateProcessing
    letters = bytes_to_unicode()
    vocab = {"".join(letters[b] for b in token): i for token, i in ids.items()}
    fast = byte_level(special | vocab, merges_of_ranks(vocab), (pattern,), [],
                      ignore_merges=True, nfc=nfc)
    in_order = sorted(tokens.values(), key=lambda t: t.id)
    for is_special, group in groupby(in_order, key=lambda t: t.special):
        add = fast.add_special_tokens if is_special else fast.add_tokens
        add([Added(t.text, special=t.special, lstrip=t.lstrip, rstrip=t.rstrip,
                   single_word=t.single_word, normalized=t.is_normalized) for t in group])
    for t in in_order:
        if fast.token_to_id(t.text) != t.id:
            raise ValueError(f"the special token {brief(t.text)} would be "
                             f"{fast.token_to_id(t.text)}, not {t.id}")
    prefix_ids = [(text, fast.token_to_id(text)) for text in prefix]
    if prefix_ids and all(i is not None for _, i in prefix_ids):
        fast.post_processor = TemplateProcessing(single=[*prefix, "$A"], special_tokens=prefix_ids)
    return TokenizersBackend(fast)


def merges_of_ranks(vocab: dict[str, int]) -> list[tuple[str, str]]:
    """All pairs of tokens whose join is a token, by its rank."""
    merges = []
    for token, rank in vocab.items():
        halves = [(token[:i], token[i:]) for i in range(1, len(token))]
        merges += [(rank, vocab[a], vocab[b], a, b) for a, b in halves if a in vocab and b in vocab]
    return [(a, b) for *_, a, b in sorted(merges)]
