"""The known keys of a file, and the tables of the tokenizer's files.

formats/known_keys.py has the other files' tables.

    TOKENIZER_CONFIG.check(config)                 # ValueError names a key that is not supported
    name_unknown(path, TOKENIZER_CONFIG.unknown(config))
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from checkpoint import brief


@dataclass(frozen=True)
class Table:
    """The known keys of one file. Keys are separated by spaces; * matches any text.

    refused: key -> its values that are accepted, besides null and false.
    without_effect: the reason -> keys.
    """

    file: str
    acted_on: str
    refused: dict[str, tuple] = field(default_factory=dict)
    without_effect: dict[str, str] = field(default_factory=dict)

    def kind_of(self, key: str) -> str | None:
        """"acted on", "refused", the reason why the key has no effect, or None if unknown."""
        groups = {"acted on": self.acted_on, "refused": " ".join(self.refused),
                  **self.without_effect}
        for kind, keys in groups.items():
            if any(fnmatchcase(key, pattern) for pattern in keys.split()):
                return kind
        return None

    def unknown(self, keys: Iterable[str]) -> list[str]:
        return [key for key in keys if self.kind_of(key) is None]

    def check(self, values: dict) -> None:
        """ValueError names a key that is set to something that is not supported."""
        for key, accepted in self.refused.items():
            value = values.get(key)
            if not (value is None or value is False or value in accepted):
                stated = "" if value is True else f"{brief(value)}, which is "
                raise ValueError(f"'{key}' is {stated}not supported")


# ---- The tokenizer's files ----------------------------------------------------------------------

TOKENIZER_CONFIG = Table(
    "tokenizer_config.json, special_tokens_map.json",
    acted_on="*_token additional_special_tokens extra_special_tokens model_specific_special_tokens "
             "added_tokens_decoder add_bos_token add_eos_token chat_template legacy "
             "add_prefix_space fix_mistral_regex clean_up_tokenization_spaces "
             "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output "
             "tokenizer_class",
    refused={"split_special_tokens": ()},
    without_effect={
        "a prompt is neither padded nor cut off":
            "model_max_length max_len max_length padding padding_side truncation truncation_side "
            "truncation_strategy stride pad_to_multiple_of pad_token_type_id model_input_names "
            "token_type_ids_* tokenizer_padding tokenizer_truncation _json_*",
        "training only": "special_tokens_pattern response_template response_schema "
                         "chat_control_tokens sanitize_control_tokens",
        "not read by transformers 5, or not by the tokenizers of these models":
            "use_default_system_prompt spaces_between_special_tokens errors trim_offsets "
            "remove_space keep_accents do_lower_case sp_model_kwargs",
        "Python's interface": "verbose backend use_fast from_slow trust_remote_code device_map "
                              "is_local local_files_only subfolder proxies token revision "
                              "cache_dir force_download files_loaded max_target_length _*",
        "provenance": "auto_map processor_class name_or_path special_tokens_map_file "
                      "tokenizer_file init_inputs unsloth_* tokenizer_type model_type "
                      "use_source_tokenizer commit_message repo_id return_dict save_jinja_files",
        "other files of the vocabulary":
            "vocab vocab_file vocab_size merges merges_file gguf_file fast_tokenizer_files "
            "tokenizer_object tokenizer unk_id post_processor continuing_subword_prefix "
            "end_of_word_suffix initial_alphabet",
        "images, audio and video": "image_* video_* audio_* max_image_tokens",
    })

TOKENIZER = Table(                                 # the tokenizers library acts on them
    "tokenizer.json",
    acted_on="version added_tokens normalizer pre_tokenizer post_processor decoder model",
    without_effect={"a prompt is neither padded nor cut off": "truncation padding"})
