"""Tokenizers of all formats: tokenizer.py's, Mistral's tekken.json, tiktoken files, vocab.json with
merges.txt, GGUF metadata.

    tokenizer = load_for(source)
"""

import re
import sys
import time
from pathlib import Path

import tokenizer as core
from checkpoint import as_path, read_json, reading
from gpt_faster.text.byte_level import TEKKEN
from gpt_faster.text.gguf_tokenizer import from_gguf
from gpt_faster.text.known_keys import TOKENIZER_CONFIG
from gpt_faster.text.rank_files import read_tekken, read_tiktoken
from gpt_faster.text.vocab_merges import read_vocab_merges
from tokenizer import Tokenizer, TokenizersBackend, library

MISTRAL_TYPES = ("mistral", "mistral3", "voxtral", "ministral", "pixtral")
MAX_SPLIT_SECONDS = 0.25                           # for a short text: 1000x what usual regexes take
PROBE = "HTTPServer camelCase don't I'LL 12345 //\n/ x"      # split differently by most patterns
SUPPORTED = ("tokenizer.json or tokenizer.model, or tekken.json, tiktoken.model, a .tiktoken file, "
             "vocab.json with merges.txt")
# Files of tokenizers that are not supported, and what they are
UNSUPPORTED = (
    ("spiece.model", "SentencePiece with the ids of T5, ALBERT or XLNet"),
    ("sentencepiece.bpe.model", "SentencePiece with the ids of XLM-R or XGLM"),
    ("*.spm", "SentencePiece of an encoder-decoder model"),
    ("vocab.txt", "WordPiece, as BERT's"),
    ("rwkv_vocab*.txt", "RWKV's vocabulary"),
    ("vocab.bpe", "GPT-2's original files: rename to vocab.json and merges.txt"),
    ("vocab.json", "without merges.txt"),
    ("merges.txt", "without vocab.json"),
    ("tokenizer.tok.json", "Grok's vocabulary"),
    ("*.model", "of an unknown kind"),
)


def load(source: Path | str | dict) -> Tokenizer:
    """A directory with tokenizer files, a GGUF's `tokenizer.*` metadata, or a Tokenizer's state().

    FileNotFoundError or ValueError with a one-line message.
    """
    if isinstance(source, dict) and "backend" in source:
        return core.load(source)
    path = source.get("path", "tokenizer") if isinstance(source, dict) else as_path(source)
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
    if (directory / "tokenizer.json").exists():
        path, read_backend = directory / "tokenizer.json", None
    else:
        path, read_backend = _format_of(directory)
    tokenizer = core.from_directory(directory, read_backend, TOKENIZER_CONFIG.unknown)
    backend = tokenizer.backend
    if isinstance(backend, TokenizersBackend):
        if path.name == "tokenizer.json":
            with reading(path):
                fix_mistral_regex(backend, directory)
        if path.name == "tokenizer.json" and (directory / "tekken.json").exists():
            compare_with_tekken(directory / "tekken.json", backend)
        tokenizer.eos_ids = list(dict.fromkeys([*tokenizer.eos_ids, *backend.eos_ids]))
        with reading(path):
            check_regex_speed(backend)
    return tokenizer


def _format_of(directory: Path):
    """-> the file that is read, and read_backend() as core.from_directory() takes it."""
    def of_file(path, read):
        return path, lambda directory, config: read(path, config)

    def found(*patterns):
        return [path for pattern in patterns for path in sorted(directory.glob(pattern))]

    if paths := found("tekken.json", "tekken_*.json"):
        return of_file(paths[0], read_tekken)
    for path in found("tokenizer.model", "tiktoken.model", "*.tiktoken"):
        is_named = path.name != "tokenizer.model"
        return of_file(path, read_tiktoken if is_named or core.is_tiktoken(path.read_bytes())
                       else core.read_sentencepiece)
    if paths := found("*.model.v[1-9]*"):          # Mistral's, with the version of its prompts
        newest = max(paths, key=lambda path: int(re.search(r"\.v(\d+)", path.suffix)[1]))
        return of_file(newest, core.read_sentencepiece)
    if found("vocab.json") and found("merges.txt"):
        return directory / "vocab.json", read_vocab_merges
    others = [f"{path.name} ({kind})" for pattern, kind in UNSUPPORTED for path in found(pattern)]
    if not others:
        raise FileNotFoundError(f"{directory}: no tokenizer: expected {SUPPORTED}")
    raise FileNotFoundError(
        f"{directory}: no tokenizer that is supported, found {others[0]}: add a tokenizer.json "
        "(transformers' AutoTokenizer writes one: save_pretrained())")


def compare_with_tekken(path: Path, backend: TokenizersBackend) -> None:
    """A note if a tokenizer.json splits text otherwise than the tekken.json it was made from, as
    those of Mistral Small 3.1 and its like."""
    from tokenizers import Regex, pre_tokenizers
    with reading(path), library("a readable tekken.json"):
        settings = read_json(path).get("config")
        pattern = settings.get("pattern") if isinstance(settings, dict) else None
        if not isinstance(pattern, str) or backend.fast.pre_tokenizer is None:
            return
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        ours = [span for _, span in backend.fast.pre_tokenizer.pre_tokenize_str(PROBE)]
        theirs = [span for _, span in split.pre_tokenize_str(PROBE)]
    if ours != theirs:
        print(f"note: tokenizer.json splits text otherwise than {path}, with which Mistral's "
              "models were trained: move tokenizer.json away to use that", file=sys.stderr)


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


def window_prefix(tokenizer: Tokenizer, length: int, no_bos: bool = False) -> list[int]:
    """The ids that each window of a text begins with: the tokenizer's beginning tokens, if it adds
    any to a text. A model that was trained with them predicts badly without.

    ValueError if they leave no room for text in a window of `length`.
    """
    prefix = tokenizer.prefix if tokenizer.add_bos and not no_bos else []
    if prefix and length < len(prefix) + 1:
        raise ValueError(f"a window of {length} tokens has no room for text after the "
                         f"{len(prefix)} beginning tokens: use longer ones, or --no_bos")
    return prefix
