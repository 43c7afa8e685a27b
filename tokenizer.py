"""Text to token ids and back: Tokenizer, Detokenizer, NullTokenizer.

Reads tokenizer.json and tokenizer.model, and special tokens from tokenizer_config.json,
special_tokens_map.json and added_tokens.json. The libraries tokenizers and sentencepiece encode and
decode. Knows neither the model nor other formats: gpt_faster/text/ adds GGUF metadata, tiktoken
files, tekken.json, vocab.json with merges.txt, and chat templates.

    tokenizer = load("checkpoints/org/name")       # a directory, or the state() in a .pth
    ids = tokenizer.encode("Hello")
    detokenizer = Detokenizer(tokenizer, ids); print(detokenizer.push(next_id), end="")
"""

import base64
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from functools import cached_property
from pathlib import Path

from checkpoint import (
    as_path,
    brief,
    failed_download,
    first_line,
    name_unknown,
    read_json,
    read_text,
    reading,
    unknown_keys,
)

MAX_ID = 1 << 22                                   # of an added token
MAX_ADDED = 1 << 16                                # number of added tokens
LONG_TEXT = 10_000                                 # characters
NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"              # normalizer_spec { add_dummy_prefix: false }
UNJOINED = "<unk>"                                 # no piece spans this and a following space
SPECIAL_LISTS = ("additional_special_tokens", "extra_special_tokens")
FULL_TREE_FORMATS = ("tekken*.json", "tiktoken.model", "*.tiktoken", "*.model.v[1-9]*",
                     "vocab.json")                 # gpt_faster/text/tokenizer_files.py reads them
# Keys of tokenizer_config.json that are read here, besides bos_token and all others in _token
READ_KEYS = (*SPECIAL_LISTS, "added_tokens_decoder", "add_bos_token", "chat_template", "legacy",
             "add_prefix_space", "split_special_tokens", "clean_up_tokenization_spaces",
             "add_eos_token")
# Classes of transformers that apply add_prefix_space to a tokenizer.json
PREFIX_SPACE_CLASSES = ("GPT2Tokenizer", "GPTNeoXTokenizer", "Qwen2Tokenizer", "CodeGenTokenizer",
                        "CohereTokenizer", "RobertaTokenizer")


# ---- Loading ------------------------------------------------------------------------------------

def load(source: Path | str | dict) -> "Tokenizer":
    """A directory with tokenizer.json or tokenizer.model, or a Tokenizer's state().

    FileNotFoundError or ValueError: one line that names a missing, invalid or unsupported file.
    """
    path = source.get("path", "tokenizer") if isinstance(source, dict) else as_path(source)
    with reading(path):
        if isinstance(source, dict):
            tokenizer = _from_state(source)
        else:
            tokenizer = from_directory(Path(source))
    tokenizer.path = path
    return tokenizer


def load_for(source, load: Callable = load) -> "Tokenizer":
    """Load the tokenizer of a Checkpoint, and complete the Checkpoint's eos_ids.

    They are the ids in config.json and generation_config.json, then those in the tokenizer's files,
    without ids outside the model's vocabulary. load: may read more formats
    (gpt_faster/text/tokenizer_files.py).
    """
    tokenizer = load(source.tokenizer)
    eos_ids = dict.fromkeys([*source.eos_ids, *tokenizer.eos_ids])
    source.eos_ids = [i for i in eos_ids if i < source.cfg.vocab_size]
    _note_size(tokenizer.n_vocab, source.cfg.vocab_size, source.eos_ids)
    return tokenizer


def _note_size(n: int, n_model: int, eos_ids: list[int]) -> None:
    """A note if the tokenizer has more tokens than the model, or fewer, and that is not padding.

    Embeddings are padded to a multiple of 64, or by up to 1023 rows. Less than 256 tokens are a
    tokenizer for tests.
    """
    is_padded = n_model % 64 == 0 and n_model - n < 1024 and all(i < n for i in eos_ids)
    if n > n_model:
        print(f"note: the tokenizer has {n} tokens and the model {n_model}: text with a token from "
              f"{n_model} on is refused", file=sys.stderr)
    elif 256 <= n < n_model and not is_padded:
        print(f"note: the tokenizer has {n} tokens and the model {n_model}: if added tokens are "
              "missing, add added_tokens.json or tokenizer_config.json", file=sys.stderr)


def from_directory(directory: Path, read_backend: Callable | None = None,
                   unknown: Callable = unknown_keys) -> "Tokenizer":
    """Read tokenizer.json, else tokenizer.model, and the JSON files that configure it.

    read_backend(directory, config): reads other formats instead; config is tokenizer_config.json.
    unknown: as unknown_keys().
    """
    path, map_path = directory / "tokenizer_config.json", directory / "special_tokens_map.json"
    config, special_map = _read_json_or_empty(path), _read_json_or_empty(map_path)
    if config.get("split_special_tokens"):
        raise ValueError(f"{path}: 'split_special_tokens' is not supported")
    for file, values in ((path, config), (map_path, special_map)):
        name_unknown(file, unknown(key for key, value in values.items() if value is not None
                                   and key not in READ_KEYS and not key.endswith("_token")))
    backend = (read_backend or _read_backend)(directory, config)
    names = backend.names | _token_names(config)
    if "added_tokens_decoder" not in config:       # as in transformers: else the map is not read
        names |= _token_names(special_map)
    chat_template, tool_template = _chat_templates(directory, config)
    bos_id = backend.id_of(names["bos_token"]) if "bos_token" in names else backend.bos_id
    ends = [part.get("eos_token") for part in (names, *map(_token_names, (config, special_map)))]
    eos_ids = dict.fromkeys(backend.id_of(text) for text in ends if text is not None)
    eos_ids.pop(None, None)
    return Tokenizer(backend, bos_id, _adds_bos(backend, config, path), chat_template, names,
                     list(eos_ids) or None, tool_template)


def _adds_bos(backend, config: dict, path: Path) -> bool:
    """Whether prompts get a beginning token. A tokenizer.json decides itself, as in transformers 5;
    for a tokenizer.model, 'add_bos_token' does."""
    stated = config.get("add_bos_token")
    if stated is None:
        return backend.adds_bos
    decides = path.with_name("tokenizer.json").exists()
    if decides and bool(stated) != backend.adds_bos:
        does = "adds one" if backend.adds_bos else "adds none"
        print(f"note: {path}: 'add_bos_token' is {str(stated).lower()}, but tokenizer.json {does}: "
              "it decides", file=sys.stderr)
        return backend.adds_bos
    return bool(stated)


def _read_backend(directory: Path, config: dict) -> "TokenizersBackend | SentencePieceBackend":
    path = directory / "tokenizer.json"
    if path.exists():
        with reading(path):
            text = read_text(path)
            if what := failed_download(text[:64].encode()):
                raise ValueError(what)
            backend = TokenizersBackend(text)
            backend.set_prefix_space(config)
            if config.get("clean_up_tokenization_spaces") and not backend.is_bpe:
                print(f"note: {path.with_name('tokenizer_config.json')}: not applied: "
                      "clean_up_tokenization_spaces", file=sys.stderr)
        added = read_added_tokens(directory, config, backend)
        with reading(path):
            backend.add(added)
            return backend
    path = directory / "tokenizer.model"
    if path.exists():
        with reading(path):
            if is_tiktoken(path.read_bytes()):
                raise ValueError("tiktoken format, expected a SentencePiece model: add a "
                                 "tokenizer.json, or use the full tree, where gpt_faster/ reads it")
        return read_sentencepiece(path, config)
    others = sorted(p.name for name in FULL_TREE_FORMATS for p in directory.glob(name))
    found = (f", found {', '.join(others)}: add a tokenizer.json, or use the full tree, where "
             "gpt_faster/ reads more formats") if others else ""
    raise FileNotFoundError(f"{directory}: no tokenizer: expected tokenizer.json or "
                            f"tokenizer.model{found}")


def read_sentencepiece(path: Path, config: dict) -> "SentencePieceBackend":
    """A SentencePiece model, with the tokens that the JSON files next to it add."""
    with reading(path):
        data = path.read_bytes()
        if what := failed_download(data[:64]):
            raise ValueError(what)
        plain = SentencePieceBackend(data)
    added = read_added_tokens(path.parent, config, plain)
    with reading(path):
        return SentencePieceBackend(data, added=added,
                                    after_space=config.get("legacy") is not False)


def is_tiktoken(data: bytes) -> bool:
    """True for a tiktoken file, as Llama 3's original tokenizer.model: lines of "base64 rank"."""
    return re.match(rb"[A-Za-z0-9+/=]+ \d+\n", data) is not None


def _read_json_or_empty(path: Path) -> dict:
    return read_json(path) if path.exists() else {}


def _token_names(c: dict) -> dict[str, str]:
    """bos_token, eos_token, … of a JSON file -> their texts. Invalid Unicode is dropped."""
    texts = {key: _token_text(token) for key, token in c.items() if key.endswith("_token")}
    return {key: text for key, text in texts.items() if _is_text(text)}


def _token_text(token):
    """token: a string, or an object with matching flags and the text in "content"."""
    return token.get("content") if isinstance(token, dict) else token


def _is_text(value) -> bool:
    """True for a string without lone surrogates."""
    return isinstance(value, str) and value == value.encode("utf-8", "replace").decode()


def _chat_templates(directory: Path, config: dict) -> tuple[str | None, str | None]:
    """The chat template, and the one for requests with tools if it is another.

    From chat_template.jinja and additional_chat_templates/, else tokenizer_config.json (a string,
    or a list with names), else chat_template.json, which transformers' processors write.
    """
    files = [directory / "chat_template.jinja",
             *sorted(directory.glob("additional_chat_templates/*.jinja"))]
    named = {path.stem: read_text(path) for path in files if path.exists()}
    if "chat_template" in named:
        named["default"] = named.pop("chat_template")
    path = directory / "tokenizer_config.json"
    stated = config.get("chat_template")
    if not named and stated is None:
        path = directory / "chat_template.json"
        stated = _read_json_or_empty(path).get("chat_template")
    if not named:
        named = _named_templates(stated, path)
    tools = named.get("tool_use")
    if named and "default" not in named:
        print(f"note: {directory}: none of the chat templates {', '.join(sorted(named))} is the "
              "default: for chats, put one into chat_template.jinja", file=sys.stderr)
    return named.get("default"), tools


def _named_templates(stated, path: Path) -> dict[str, str]:
    """'chat_template' of a JSON file: a string, or templates with names -> template by name."""
    if stated is None:
        return {}
    if isinstance(stated, list):
        stated = {t.get("name"): t.get("template") for t in stated if isinstance(t, dict)}
    named = stated if isinstance(stated, dict) else {"default": stated}
    for name, template in named.items():
        if not isinstance(template, str) or not isinstance(name, str):
            raise ValueError(f"{path}: 'chat_template' is {brief(template)}, expected a string")
    return named


# ---- Tokenizer ----------------------------------------------------------------------------------

class Tokenizer:
    """A backend, and the special tokens from the model's files.

    add_bos: encode() prepends the backend's prefix, or else bos_id. eos_ids: the end tokens in the
    tokenizer's files (None: the backend's). chat_template and names (bos_token, eos_token, … ->
    text) are for gpt_faster/text/chat_template.py, which renders chats.
    """

    def __init__(self, backend: "TokenizersBackend | SentencePieceBackend", bos_id: int | None,
                 add_bos: bool, chat_template: str | None = None,
                 names: dict[str, str] | None = None, eos_ids: list[int] | None = None,
                 tool_template: str | None = None):
        self.backend = backend
        self.n_vocab = backend.n_vocab
        self.path = "tokenizer"                    # for error messages; set by load()
        self.bos_id = bos_id
        self.prefix = backend.prefix or ([] if bos_id is None else [bos_id])
        self.add_bos = add_bos and bool(self.prefix)
        self.warned_of_two = False                 # of these at the beginning of a text
        self.chat_template = chat_template
        self.tool_template = tool_template         # for chats with tools; None: chat_template
        self.names = names or {}
        self.eos_ids = backend.eos_ids if eos_ids is None else eos_ids

    def encode(self, text: str, bos: bool | None = None, special: bool = True) -> list[int]:
        """bos: prepend the prefix; None: as the model's files say. special=False: encode "<s>" in
        the text as plain text."""
        text = text.encode("utf-8", "replace").decode()    # terminal input may be invalid UTF-8
        with reading(self.path):
            ids = self.backend.encode(text, special)
        add_bos = self.add_bos if bos is None else bos
        if add_bos and ids[:len(self.prefix)] == self.prefix and not self.warned_of_two:
            self.warned_of_two = True
            tokens = "".join(map(str, map(self.piece, self.prefix)))
            print(f"note: the text begins with {tokens}, which the tokenizer adds: it is there "
                  "twice now", file=sys.stderr)
        return [*self.prefix, *ids] if add_bos else ids

    def piece(self, i: int) -> str | None:
        """The token's string in the vocabulary."""
        return self.backend.piece(i)

    def decode(self, ids: list[int]) -> str:
        """The text without special tokens; incomplete UTF-8 becomes U+FFFD. ValueError for values
        that are not token ids."""
        for i in ids:
            if not _is_id(i):
                raise ValueError(f"{str(i)[:40]} is not a token id")
        with reading(self.path):
            return self.backend.decode(ids)

    def special_ids(self, text: str) -> list[int]:
        """The special tokens in this text, which decode() leaves out."""
        return [i for i in self.encode(text, bos=False)
                if not self.decode([i]) and (self.piece(i) or "\0") in text]

    def state(self) -> dict:
        """The tokenizer as a dictionary, for a .pth without tokenizer files; load() reads it."""
        return dict(backend=self.backend.kind, data=self.backend.state(), bos_id=self.bos_id,
                    add_bos=self.add_bos, chat_template=self.chat_template, names=self.names,
                    eos_ids=self.eos_ids, tool_template=self.tool_template,
                    **self.backend.more_state())


def _is_id(value) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def _is_added(token) -> bool:
    """True for a list of the fields of an AddedToken."""
    types = [int, str, bool, bool, bool, bool]
    return (isinstance(token, list) and list(map(type, token)) == types
            and 0 <= token[0] < MAX_ID and token[1] != "")


STATE = (                                          # entry, expected value, check of a value
    ("data", "a string", lambda v: isinstance(v, str)),
    ("bos_id", "a token id", _is_id),
    ("chat_template", "a string", lambda v: isinstance(v, str)),
    ("tool_template", "a string", lambda v: isinstance(v, str)),
    ("eos_ids", "token ids", lambda v: isinstance(v, list) and all(map(_is_id, v))),
    ("names", "strings by name", lambda v: isinstance(v, dict) and all(
        isinstance(text, str) for text in v.values())),
    ("control", "strings by id", lambda v: isinstance(v, dict) and all(
        type(i) is int and isinstance(text, str) for i, text in v.items())),
    ("added", "added tokens", lambda v: isinstance(v, list) and all(map(_is_added, v))),
    ("after_space", "true or false", lambda v: type(v) is bool),
)


def _from_state(state: dict) -> Tokenizer:
    """Tokenizer.state() -> Tokenizer. ValueError names an invalid entry."""
    if "backend" not in state:
        raise ValueError("GGUF metadata, expected a directory or the state in a .pth")
    kind, data = state["backend"], state.get("data")
    if kind not in ("json", "sentencepiece") or data is None:
        raise ValueError(f"unknown tokenizer backend {brief(kind)}")
    for key, expected, fits in STATE:
        if state.get(key) is not None and not fits(state[key]):
            raise ValueError(f"the tokenizer's '{key}' is {brief(state[key])}, expected {expected}")
    if kind == "json":
        backend = TokenizersBackend(data)
    else:
        try:
            data = base64.b64decode(data, validate=True)
        except ValueError:
            raise ValueError("the SentencePiece model is not valid base64") from None
        added = [AddedToken(*token) for token in state.get("added") or []]     # not in old files
        backend = SentencePieceBackend(data, state.get("control"), added,
                                       state.get("after_space") is not False)
    return Tokenizer(backend, state.get("bos_id"), state.get("add_bos"), state.get("chat_template"),
                     state.get("names"), state.get("eos_ids"), state.get("tool_template"))


# ---- Backends -----------------------------------------------------------------------------------
# Interface: kind, n_vocab; bos_id, prefix, adds_bos, eos_ids and names (bos_token, … -> text) as in
# the tokenizer file; encode(), without the prefix; decode(); piece(id) and id_of(text) of a token;
# state() and more_state() for a .pth.

@contextmanager
def library(expected: str) -> Iterator[None]:
    """Turn the library's errors into ValueError: bare Exceptions, Unicode errors, Rust panics.

    tokenizers panics if a regular expression takes too long.
    """
    try:
        yield
    except BaseException as e:
        is_library_error = type(e) is Exception or isinstance(e, UnicodeError)
        if not is_library_error and type(e).__name__ != "PanicException":
            raise
        raise ValueError(f"not {expected}: {first_line(e)}") from None


class TokenizersBackend:
    """Hugging Face's tokenizers. data: the text of a tokenizer.json, or a tokenizers.Tokenizer."""

    kind = "json"

    def __init__(self, data):
        import tokenizers
        with library("a readable tokenizer.json"):
            self.fast = tokenizers.Tokenizer.from_str(data) if isinstance(data, str) else data
        self.data = data
        self.eos_ids, self.names = [], {}          # a tokenizer.json does not name them
        self.n_vocab = self.fast.get_vocab_size()
        self.fast.no_truncation()                  # fine-tuning scripts leave both on
        self.fast.no_padding()
        self.prefix, suffix = self._prefix_and_suffix()
        self.bos_id = self.prefix[0] if self.prefix else None
        self.adds_bos = bool(self.prefix)
        if suffix:
            names = ", ".join(map(str, map(self.piece, suffix)))
            print(f"note: the tokenizer appends {names} to each text: left out, since generation "
                  "continues the text", file=sys.stderr)

    @property
    def is_bpe(self) -> bool:
        return type(self.fast.model).__name__ == "BPE"

    def set_prefix_space(self, config: dict) -> None:
        """Apply 'add_prefix_space' of tokenizer_config.json to the byte-level pre-tokenizer."""
        stated = bool(config.get("add_prefix_space"))
        if str(config.get("tokenizer_class")).removesuffix("Fast") not in PREFIX_SPACE_CLASSES:
            return
        steps = self.fast.pre_tokenizer
        steps = steps if type(steps).__name__ == "Sequence" else [steps]
        for step in steps:
            if type(step).__name__ == "ByteLevel" and step.add_prefix_space != stated:
                step.add_prefix_space = stated
                self.data = self.fast              # state() serializes it

    def _prefix_and_suffix(self) -> tuple[list[int], list[int]]:
        """The ids that the post-processor adds before and after a text."""
        added = self.fast.get_added_tokens_decoder()
        last_ordinary = next((i for i in reversed(range(self.n_vocab)) if i not in added), 0)
        plain, whole = [], []
        for text in ("a", self.piece(last_ordinary) or ""):    # the vocabulary may have no "a"
            with suppress(ValueError), library("a tokenizer.json that encodes"):
                plain, whole = (self.fast.encode(text, add_special_tokens=s).ids
                                for s in (False, True))
            if plain:
                break
        starts = [i for i in range(len(whole)) if whole[i:i + len(plain)] == plain]
        start = starts[0] if starts else len(whole)
        return whole[:start], whole[start + len(plain):]

    def add(self, tokens: list["AddedToken"]) -> None:
        """Add tokens that tokenizer.json lacks, and update the flags of those that it has."""
        import tokenizers
        known = self.fast.get_added_tokens_decoder()
        for t in tokens:
            flags = dict(special=t.special, lstrip=t.lstrip, rstrip=t.rstrip,
                         single_word=t.single_word, normalized=t.is_normalized)
            old = known.get(t.id)
            if old and old.content == t.text and all(
                    getattr(old, name) == value for name, value in flags.items()):
                continue
            add = self.fast.add_special_tokens if t.special else self.fast.add_tokens
            add([tokenizers.AddedToken(t.text, **flags)])
            self.data = self.fast                  # state() serializes it
            if self.id_of(t.text) != t.id:
                print(f"note: the added token {brief(t.text)} is {self.id_of(t.text)}, not {t.id}",
                      file=sys.stderr)
        self.n_vocab = self.fast.get_vocab_size()

    def encode(self, text: str, special: bool) -> list[int]:
        """special: encode "<s>" and other special tokens as tokens, not as text."""
        fast = self.fast if special else self.plain
        with library("a tokenizer that encodes this text"):
            if len(text) < LONG_TEXT:
                return fast.encode(text, add_special_tokens=False).ids
            [encoding] = fast.encode_batch_fast([text], add_special_tokens=False)
            return encoding.ids                    # encode() would hold the GIL

    @cached_property
    def plain(self):
        """A copy that encodes "<s>" as text. A copy, because changing a tokenizer raises while
        another thread encodes with it."""
        import tokenizers
        with library("a readable tokenizer.json"):
            plain = tokenizers.Tokenizer.from_str(self.fast.to_str())
        plain.encode_special_tokens = True
        return plain

    def decode(self, ids: list[int]) -> str:
        return self.fast.decode(ids, skip_special_tokens=True)

    def piece(self, i: int) -> str | None:
        return self.fast.id_to_token(i)

    def id_of(self, text: str) -> int | None:
        return self.fast.token_to_id(text)

    def state(self) -> str:
        return self.data if isinstance(self.data, str) else self.data.to_str()

    def more_state(self) -> dict:
        return dict(control={})                    # the JSON marks special tokens


@dataclass(frozen=True)
class AddedToken:
    """A string that is always encoded as one token.

    special: decode() omits it, and encode(special=False) encodes it as plain text. lstrip, rstrip:
    it includes the spaces before, after it. single_word: does not match inside a word.
    is_normalized: matched in normalized text (tokenizer.json only).
    """

    id: int
    text: str
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    is_normalized: bool = False


class SentencePieceBackend:
    """Google's sentencepiece. data: the bytes of a tokenizer.model.

    control: id -> text of the control tokens (None: the model's). added: tokens that extend or
    replace the model's pieces; the text segments between them are encoded separately. after_space:
    each segment gets the model's leading space ("legacy" in transformers, and llama.cpp), else only
    the first: "Hi<s>there" is "▁Hi", <s>, then "▁there" or "there".
    """

    kind = "sentencepiece"
    adds_bos, prefix, names = True, [], {}         # Tokenizer uses bos_id

    def __init__(self, data: bytes, control: dict[int, str] | None = None,
                 added: list[AddedToken] = (), after_space: bool = True):
        from sentencepiece import SentencePieceProcessor
        try:
            self.processor = SentencePieceProcessor(model_proto=data)
            self.continuing = SentencePieceProcessor(model_proto=data + NO_DUMMY_PREFIX)
        except RuntimeError as e:
            raise ValueError(f"not a readable SentencePiece model: {str(e).strip()}") from None
        processor = self.processor
        self.data, self.added, self.after_space = data, list(added), after_space
        self.at_start = True                       # False: the text continues another
        self.n_piece = processor.get_piece_size()
        self.n_vocab = max([self.n_piece, *(t.id + 1 for t in added)])
        self.bos_id = processor.bos_id() if processor.bos_id() >= 0 else None
        self.eos_ids = [processor.eos_id()] if processor.eos_id() >= 0 else []
        try:
            control = control or {i: processor.id_to_piece(i) for i in range(self.n_piece)
                                  if processor.is_control(i)}
        except UnicodeDecodeError:
            raise ValueError("the SentencePiece model has tokens that are not UTF-8") from None
        added_ids = {t.id for t in added}
        self.tokens = {text: AddedToken(i, text) for i, text in control.items()
                       if i not in added_ids}
        self.tokens |= {t.text: t for t in added}
        self.by_id = {t.id: t for t in self.tokens.values()}
        self.control = {t.id: text for text, t in self.tokens.items() if t.special}
        self.pattern = token_pattern(list(self.tokens.values()))
        self.plain_pattern = token_pattern([t for t in self.tokens.values() if not t.special])

    def encode(self, text: str, special: bool) -> list[int]:
        """special: encode "<s>" and other special tokens as tokens, not as text."""
        pattern = self.pattern if special else self.plain_pattern
        ids, end = [], 0
        for match in pattern.finditer(text):
            ids += self._encode_segment(text[end:match.start()], end == 0)
            ids.append(self._id_of_match(match[0]))
            end = match.end()
        return ids + self._encode_segment(text[end:], end == 0)

    def _id_of_match(self, text: str) -> int:
        """text: a token, perhaps with the spaces that lstrip and rstrip include."""
        if text not in self.tokens:
            text = max((name for name in self.tokens if name in text), key=len)
        return self.tokens[text].id

    def _encode_segment(self, text: str, is_first: bool) -> list[int]:
        """Encode text before, between or after added tokens."""
        if self.after_space or is_first and self.at_start:
            return self.processor.encode(text)
        if not text.startswith((" ", "\N{LOWER ONE EIGHTH BLOCK}")):
            return self.continuing.encode(text)
        n = len(self.continuing.encode(UNJOINED))  # the normalizer may strip a leading space
        return self.continuing.encode(UNJOINED + text)[n:]

    def decode(self, ids: list[int]) -> str:
        runs = [[]]                                # of pieces
        texts = []                                 # of the added tokens between the runs
        for i in ids:
            token = self.by_id.get(i)
            if token is None and i < self.n_piece:
                runs[-1].append(i)
            elif token is not None and not token.special:
                texts.append(token.text)
                runs.append([])
        with library("a SentencePiece model of UTF-8"):
            text = self.processor.decode(runs[0])
            for added, run in zip(texts, runs[1:]):
                text += added + self.continuing.decode(run)
        return text

    def piece(self, i: int) -> str | None:
        if i in self.by_id:
            return self.by_id[i].text
        if i >= self.n_piece:
            return None
        with library("a SentencePiece model of UTF-8"):
            return self.processor.id_to_piece(i)

    def id_of(self, text: str) -> int | None:
        if text in self.tokens:
            return self.tokens[text].id
        i = self.processor.piece_to_id(text)
        return i if self.processor.id_to_piece(i) == text else None

    def state(self) -> str:
        return base64.b64encode(self.data).decode()

    def more_state(self) -> dict:
        return dict(control=self.control, after_space=self.after_space,
                    added=[list(astuple(t))[:6] for t in self.added])


def token_pattern(tokens: list[AddedToken]) -> re.Pattern:
    """A pattern for these tokens, longest first, with the spaces of lstrip and rstrip."""
    parts = []
    for t in sorted(tokens, key=lambda t: -len(t.text)):
        part = re.escape(t.text)
        if t.single_word:
            part = rf"(?<!\w){part}(?!\w)"
        parts.append((r"(?:(?<!\s)\s+)?" if t.lstrip else "") + part + (r"\s*" if t.rstrip else ""))
    return re.compile("(" + ("|".join(parts) or "(?!)") + ")")


# ---- Tokens that a directory adds to its tokenizer.json or tokenizer.model -----------------------

def read_added_tokens(directory: Path, config: dict, plain) -> list[AddedToken]:
    """The added tokens of a model's JSON files, sorted by id.

    `added_tokens_decoder` of tokenizer_config.json has ids and matching flags, added_tokens.json
    only ids. special_tokens_map.json and other keys of tokenizer_config.json list special tokens.
    plain: the backend without added tokens. ValueError for an invalid id or text, or an id that two
    texts share.
    """
    config_path, map_path, ids_path = (directory / name for name in (
        "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"))
    has_decoder = "added_tokens_decoder" in config     # then the map is not read
    with reading(config_path):
        special = _special_tokens(config)
    with reading(map_path):
        special |= {} if has_decoder else _special_tokens(_read_json_or_empty(map_path))
    added = {}                                     # text -> AddedToken
    with reading(ids_path):
        for text, i in _read_json_or_empty(ids_path).items():
            flags = {"special": text in special, **special.get(text, {})}
            added[text] = _added_token(_checked_id(i, text), text, flags)
    with reading(config_path):
        decoder = config.get("added_tokens_decoder") or {}
        if not isinstance(decoder, dict):
            raise ValueError(f"'added_tokens_decoder' is {brief(decoder)}, expected an object")
        for i, token in decoder.items():
            text = _token_text(token)
            i = _checked_id(int(i) if i.isdecimal() else i, text)
            flags = token if isinstance(token, dict) else {}
            if text in special:
                flags = {**flags, "special": True}
            added[text] = _added_token(i, text, flags)
    with reading(directory):
        _add_special(added, special, plain)
        if len(added) > MAX_ADDED:
            raise ValueError(f"{len(added)} added tokens, expected at most {MAX_ADDED}")
        _check_unique_ids(added)
    return sorted(added.values(), key=lambda t: t.id)


def _added_token(i: int, text: str, flags: dict) -> AddedToken:
    special = bool(flags.get("special"))
    return AddedToken(i, text, special, bool(flags.get("lstrip")), bool(flags.get("rstrip")),
                      bool(flags.get("single_word")), bool(flags.get("normalized", not special)))


def _add_special(added: dict[str, AddedToken], special: dict[str, dict], plain) -> None:
    """Add special tokens without an id in the JSON files: the backend's id, or the next free one,
    as in transformers."""
    next_id = max([plain.n_vocab, *(t.id + 1 for t in added.values())])
    for text, flags in special.items():
        if text in added:
            continue
        i = plain.id_of(text)
        if i is None:
            i = next_id
            next_id += 1
        added[text] = _added_token(i, text, {**flags, "special": True})


def _special_tokens(c: dict) -> dict[str, dict]:
    """The special tokens of a JSON file, in order: text -> matching flags in the file."""
    tokens = [token for key, token in c.items() if key.endswith("_token")]
    for key in SPECIAL_LISTS:
        more = c.get(key) or []
        if not isinstance(more, list | dict):
            raise ValueError(f"'{key}' is {brief(more)}, expected a list of tokens")
        tokens += more.values() if isinstance(more, dict) else more
    return {_token_text(token): token if isinstance(token, dict) else {} for token in tokens
            if _is_text(_token_text(token)) and _token_text(token)}


def _checked_id(i, text) -> int:
    if type(i) is not int or not 0 <= i < MAX_ID:
        raise ValueError(f"the id of an added token is {brief(i)}, expected 0 to {MAX_ID - 1}")
    if not _is_text(text) or not text:
        raise ValueError(f"added token {i} is {brief(text)}, expected a string")
    return i


def _check_unique_ids(added: dict[str, AddedToken]) -> None:
    text_of = {}
    for t in added.values():
        if t.id in text_of:
            raise ValueError(f"token {t.id} is both {brief(text_of[t.id])} and {brief(t.text)}")
        text_of[t.id] = t.text


# ---- Streaming ----------------------------------------------------------------------------------

class Detokenizer:
    """Decodes a stream of tokens; holds back a character until all its bytes are there."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: list[int]):
        self.tokenizer = tokenizer
        self.ids = list(prompt_ids[-8:])           # context decides about leading spaces
        self.start = 0                             # of the context
        self.shown = len(self.ids)                 # tokens whose text push() has returned

    def push(self, token_id: int) -> str:
        """Add a token; return the new complete text, which may be empty."""
        self.ids.append(token_id)
        text = self._new_text()
        if not text or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""                              # incomplete, or a special token
        self.start, self.shown = self.shown, len(self.ids)
        return text

    def flush(self) -> str:
        """Return the text that push() still holds back, at the end."""
        text = self._new_text()
        self.start = self.shown = len(self.ids)
        return text

    def _new_text(self) -> str:
        old = self.tokenizer.decode(self.ids[self.start:self.shown])
        return self.tokenizer.decode(self.ids[self.start:])[len(old):]


def differ(a: Tokenizer, b: Tokenizer) -> str | None:
    """How vocabulary b differs from a, by size and a sample of tokens; None if it does not."""
    if a.n_vocab != b.n_vocab:
        return f"it has {b.n_vocab} tokens, not {a.n_vocab}"
    step = max(1, a.n_vocab // 2000)
    for i in range(0, a.n_vocab, step):
        if a.piece(i) != b.piece(i):
            return f"token {i} is {b.piece(i)!r}, not {a.piece(i)!r}"
    return None


class NullTokenizer:
    """For models without a tokenizer: decode() prints the ids."""

    eos_ids: list[int] = []
    chat_template, n_vocab = None, 0

    def encode(self, text: str) -> list[int]:
        raise ValueError("this model has no tokenizer: give --prompt an integer for that many "
                         "random tokens")

    def special_ids(self, text: str) -> list[int]:
        return []

    def decode(self, ids: list[int]) -> str:
        return "".join(f" {i}" for i in ids)
