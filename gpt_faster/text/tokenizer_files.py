"""Tokenizers of all formats: tokenizer.py's, GGUF metadata, Llama 3's tiktoken file.

    tokenizer = load_for(source)
"""

import time
from pathlib import Path

import tokenizer as core
from checkpoint import read_json, reading
from gpt_faster.text.byte_level import TEKKEN, tiktoken_to_json
from gpt_faster.text.gguf_tokenizer import from_gguf
from gpt_faster.text.known_keys import TOKENIZER_CONFIG
from tokenizer import Tokenizer, TokenizersBackend

MISTRAL_TYPES = ("mistral", "mistral3", "voxtral", "ministral", "pixtral")
MAX_SPLIT_SECONDS = 0.25                           # for a short text: 1000x what usual regexes take


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
        tokenizer = core.from_directory(directory, unknown=TOKENIZER_CONFIG.unknown)
        with reading(json_path):
            fix_mistral_regex(tokenizer.backend, directory)
            check_regex_speed(tokenizer.backend)
        return tokenizer
    data = model_path.read_bytes() if model_path.exists() else b""
    if not core.is_tiktoken(data):
        return core.from_directory(directory, unknown=TOKENIZER_CONFIG.unknown)
    with reading(model_path):
        text, end_ids = tiktoken_to_json(data)
        backend = TokenizersBackend(text)
    tokenizer = core.from_directory(directory, backend, TOKENIZER_CONFIG.unknown)
    tokenizer.eos_ids = list(dict.fromkeys([*tokenizer.eos_ids, *end_ids]))
    return tokenizer


def fix_mistral_regex(backend: TokenizersBackend, directory: Path) -> None:
    """Replace the pattern of Mistral's tokenizers if 'fix_mistral_regex' in tokenizer_config.json
    asks for it, under the conditions of transformers: saved before its version 5, with a wrong
    pattern.
    """
    config, model = (read_json(path) if path.exists() else {} for path in (
        directory / "tokenizer_config.json", directory / "config.json"))
    version = str(model.get("transformers_version") or "0").partition(".")[0]
    is_old = version.isdecimal() and int(version) < 5
    if (config.get("fix_mistral_regex") is not True or backend.n_vocab <= 100_000 or not is_old
            or not model or model.get("model_type") not in (None, *MISTRAL_TYPES)):
        return
    from tokenizers import Regex, pre_tokenizers
    split = pre_tokenizers.Split(Regex(TEKKEN), "isolated")
    steps = backend.fast.pre_tokenizer
    if isinstance(steps, pre_tokenizers.Sequence):
        steps[0] = split
    elif steps is not None:
        if isinstance(steps, pre_tokenizers.Metaspace):
            steps = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.fast.pre_tokenizer = pre_tokenizers.Sequence([split, steps])
    backend.data = backend.fast                    # state() serializes it


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
