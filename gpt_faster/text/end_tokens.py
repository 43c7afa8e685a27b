"""End-of-generation tokens of a GGUF: from metadata and, as in llama.cpp, known token texts.

For Hugging Face directories: huggingface.py and tokenizer.py.
"""

# Texts of llama.cpp's end-of-generation tokens (src/llama-vocab.cpp, special_eog_ids).
EOG_TOKENS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<｜end▁of▁sentence｜>", "[e~[")
# Fill-in-the-middle tokens, by their metadata keys; these texts count if the key is missing.
FIM_TOKENS = {"fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
           "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
           "fim_sep": ("<|file_sep|>",)}
# Other tokens of fill-in-the-middle: no end tokens, but never letters either.
FIM_MARKERS = {
    "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>",
    "<|code_prefix|>", "<|prefix|>", "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>",
    "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>", "<|suffix|>", "<|fim_middle|>",
    "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>",
    "<|middle|>"}
# gpt-oss: llama.cpp shows them; here they are hidden, and divide thoughts from answers.
HARMONY_MARKERS = {"<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"}
SENTENCEPIECE_EOS = 2                              # default of a GGUF's "llama" tokenizer


def gguf_end_ids(metadata: dict) -> list[int]:
    """llama.cpp's rules: eos, eot and eom from the metadata, and tokens by their texts."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    tokens = tokens if isinstance(tokens, list) else []
    ids = []
    for kind in ("eos", "eot", "eom"):
        stated = _id(metadata, kind, tokens)
        if stated is None and kind == "eos" and metadata.get("tokenizer.ggml.model") == "llama":
            stated = SENTENCEPIECE_EOS
        ids += [] if stated is None else [stated]
    id_of = {text: i for i, text in reversed(list(enumerate(tokens))) if isinstance(text, str)}
    ids += [id_of[name] for name in EOG_TOKENS if name in id_of]
    for kind, names in FIM_TOKENS.items():
        stated = _id(metadata, kind, tokens)
        ids += [id_of[name] for name in names if name in id_of] if stated is None else [stated]
    found = {tokens[i] for i in ids if i < len(tokens)}
    not_end = set()                                # end a part of an answer only
    if found & {"<|call|>", "<|calls|>"} and found & {"<|return|>", "<|flush|>"}:
        not_end.add("<|end|>")                     # gpt-oss, Solar Open
    if "<|tool_response>" in found:
        not_end.add("</s>")                        # Gemma 4
    return list(dict.fromkeys(i for i in ids if i >= len(tokens) or tokens[i] not in not_end))


def _id(metadata: dict, kind: str, tokens: list) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{kind}_token_id")
    return value if type(value) is int and (0 <= value < len(tokens) or not tokens) else None
