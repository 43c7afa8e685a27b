"""GPT-2's pair of files: vocab.json and merges.txt, byte-level BPE.

The files do not say how text is split: the class of the tokenizer does.

    backend = read_vocab_merges(directory, config)         # config: tokenizer_config.json
"""

from dataclasses import dataclass, field
from pathlib import Path

from checkpoint import brief, read_json, reading
from gpt_faster.text.byte_level import DIGITS, QWEN2, QWEN35, byte_level
from tokenizer import TokenizersBackend, library, read_added_tokens

_END = "<|endoftext|>"
_GPT2_NAMES = dict(bos_token=_END, eos_token=_END, unk_token=_END)
_QWEN_NAMES = dict(eos_token=_END, unk_token=_END, pad_token=_END)


@dataclass(frozen=True)
class TokenizerClass:
    """What a class of transformers does. split: None is GPT-2's, after `digits`. names: its special
    tokens, unless the files name others."""

    split: str | None = None
    digits: bool = False
    nfc: bool = False
    names: dict[str, str] = field(default_factory=lambda: dict(_GPT2_NAMES))


CLASSES = {                                        # transformers 5.23, models/*/tokenization_*.py
    "GPT2Tokenizer": TokenizerClass(), "CodeGenTokenizer": TokenizerClass(),
    "GPTNeoXTokenizer": TokenizerClass(nfc=True, names={**_GPT2_NAMES, "pad_token": "<|padding|>"}),
    "Qwen2Tokenizer": TokenizerClass(QWEN2, nfc=True, names=_QWEN_NAMES),
    "Qwen3_5Tokenizer": TokenizerClass(QWEN35, nfc=True, names=_QWEN_NAMES),
    "CohereTokenizer": TokenizerClass(digits=True, nfc=True, names=dict(
        bos_token="<BOS_TOKEN>", eos_token="<|END_OF_TURN_TOKEN|>", unk_token="<UNK>",
        sep_token="<SEP>", pad_token="<PAD>", cls_token="<CLS>", mask_token="<MASK_TOKEN>"))}
# For directories that name no class: model_type -> class, as in transformers' AutoTokenizer.
MODEL_TYPES = {
    "GPT2Tokenizer": ("codegen", "gpt2", "gpt_neo", "gptj", "opt", "phi",
                      "starcoder2"),
    "GPTNeoXTokenizer": ("gpt_neox", "mpt", "olmo", "olmoe"),
    "Qwen2Tokenizer": ("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen3", "qwen3_moe",
                       "qwen3_next", "qwen3_vl", "qwen3_vl_moe"),
    "Qwen3_5Tokenizer": ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
    "CohereTokenizer": ("cohere", "cohere2")}


def read_vocab_merges(directory: Path, config: dict) -> TokenizersBackend:
    """ValueError: an unknown class, or files that do not fit together."""
    from tokenizers import models
    with reading(directory):
        kind = CLASSES[class_of(directory, config)]
    path = directory / "vocab.json"
    with reading(path):
        n = len(read_json(path))
        with library("a vocabulary with merges.txt"):
            vocab, merges = models.BPE.read_file(str(path), str(directory / "merges.txt"))
        if len(vocab) != n:
            raise ValueError(f"{n - len(vocab)} of {n} tokens have no id")
        splits = (kind.split,) if kind.split else ()
        fast = byte_level(vocab, merges, splits, [], nfc=kind.nfc,
                          prefix_space=bool(config.get("add_prefix_space")))
        if kind.digits:
            from tokenizers import Regex, pre_tokenizers
            digits = pre_tokenizers.Split(Regex(DIGITS), "isolated")
            fast.pre_tokenizer = pre_tokenizers.Sequence([digits, *fast.pre_tokenizer])
        backend = TokenizersBackend(fast)
    map_path = directory / "special_tokens_map.json"
    stated = {**config, **(read_json(map_path) if map_path.exists() else {})}
    backend.names = {key: text for key, text in kind.names.items() if key not in stated}
    added = read_added_tokens(directory, {**config, **backend.names}, backend)
    with reading(directory):
        backend.add(added)
    return backend


def class_of(directory: Path, config: dict) -> str:
    """tokenizer_class of tokenizer_config.json or config.json, else by model_type."""
    path = directory / "config.json"
    model = read_json(path) if path.exists() else {}
    stated = config.get("tokenizer_class") or model.get("tokenizer_class")
    by_type = {kind: name for name, kinds in MODEL_TYPES.items() for kind in kinds}
    kind = str(stated).removesuffix("Fast") if stated else by_type.get(model.get("model_type"))
    if kind not in CLASSES:
        found = f"of 'tokenizer_class' {brief(stated)}" if stated else "without 'tokenizer_class'"
        known = ", ".join(name.removesuffix("Tokenizer") for name in CLASSES)
        raise ValueError(f"vocab.json and merges.txt {found}: add a tokenizer.json (split patterns "
                         f"are known for {known})")
    return kind
