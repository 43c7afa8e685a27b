"""Text to token ids and back: Tokenizer, Detokenizer, NullTokenizer.

The only reader of tokenizer.json and tokenizer.model, and of the JSON files beside them that name
special tokens. Two libraries do the work: tokenizers and sentencepiece. Does not know the model,
and no other format: gpt_faster/formats/ adds GGUF's, Llama 3's tiktoken file and chat templates.

    tokenizer = load("checkpoints/org/name")       # a directory, or the state() that a .pth holds
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

from checkpoint import brief, first_line, read_json, read_text, reading

MAX_ID, MAX_ADDED = 1 << 22, 1 << 16               # of tokens that are added to a tokenizer.model
LONG = 10_000                                      # characters
NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"              # normalizer_spec { add_dummy_prefix: false }
UNJOINED = "<unk>"                                 # no piece joins this and a space behind it
SPECIAL_LISTS = ("additional_special_tokens", "extra_special_tokens")
OTHER_FORMATS = ("tekken.json", "vocab.json", "spiece.model")          # of tokenizers: not read


# ---- Loading ------------------------------------------------------------------------------------

def load(source: Path | str | dict) -> "Tokenizer":
    """A directory with tokenizer.json or tokenizer.model, or a Tokenizer's state().

    FileNotFoundError or ValueError say in one line what is missing, broken or of another format.
    """
    path = source.get("path", "tokenizer") if isinstance(source, dict) else source
    with reading(path):
        if isinstance(source, dict):
            tokenizer = _from_state(source)
        else:
            tokenizer = from_directory(Path(source))
    tokenizer.path = path
    return tokenizer


def load_for(source, load: Callable = load) -> "Tokenizer":
    """The tokenizer of a Checkpoint, whose eos_ids are complete from then on.

    These are what config.json and generation_config.json name, then what the tokenizer's files do;
    an id that the model cannot give ends nothing. load: a reader of more formats
    (gpt_faster/text/tokenizer_files.py).
    """
    tokenizer = load(source.tokenizer)
    named = dict.fromkeys([*source.eos_ids, *tokenizer.eos_ids])
    source.eos_ids = [i for i in named if i < source.cfg.vocab_size]
    return tokenizer


def from_directory(directory: Path, backend=None) -> "Tokenizer":
    """tokenizer.json, else tokenizer.model, and what the JSON files beside it say.

    backend: one that was read from another format takes the place of these two.
    """
    config = _json_if_there(directory / "tokenizer_config.json")
    special_map = _json_if_there(directory / "special_tokens_map.json")
    names = _token_names(special_map) | _token_names(config)
    chat_template = _chat_template(directory, config)
    backend = backend or _read_backend(directory, config)
    bos_id = backend.id_of(names["bos_token"]) if "bos_token" in names else backend.bos_id
    eos_id = backend.id_of(names["eos_token"]) if "eos_token" in names else None
    if config.get("split_special_tokens"):
        raise ValueError(f"{directory / 'tokenizer_config.json'}: 'split_special_tokens' is not "
                         "supported")
    add_bos = config.get("add_bos_token")
    return Tokenizer(backend, bos_id, backend.adds_bos if add_bos is None else add_bos,
                     chat_template, names, None if eos_id is None else [eos_id])


def _read_backend(directory: Path, config: dict) -> "TokenizersBackend | SentencePieceBackend":
    path = directory / "tokenizer.json"
    if path.exists():
        with reading(path):
            backend = TokenizersBackend(read_text(path))
        added = read_added_tokens(directory, config, backend)
        with reading(path):
            backend.add(added)
            return backend
    path = directory / "tokenizer.model"
    if path.exists():
        with reading(path):
            data = path.read_bytes()
            if is_tiktoken(data):
                raise ValueError("a list of tokens in base64 (tiktoken, as in Llama 3's original "
                                 "files), expected a SentencePiece model: add a tokenizer.json")
            plain = SentencePieceBackend(data)
        added = read_added_tokens(directory, config, plain)
        with reading(path):
            return SentencePieceBackend(data, added=added,
                                        after_space=config.get("legacy") is not False)
    others = [name for name in OTHER_FORMATS if (directory / name).exists()]
    found = f", found {', '.join(others)}" if others else ""
    raise FileNotFoundError(f"{directory}: no tokenizer: expected tokenizer.json or "
                            f"tokenizer.model{found}")


def is_tiktoken(data: bytes) -> bool:
    """Llama 3's original tokenizer.model: lines of "base64 rank"."""
    return re.match(rb"[A-Za-z0-9+/=]+ \d+\n", data) is not None


def _json_if_there(path: Path) -> dict:
    return read_json(path) if path.exists() else {}


def _token_names(c: dict) -> dict[str, str]:
    """bos_token, eos_token, … of a JSON file -> their texts. Half a character is no text."""
    texts = {key: _content(token) for key, token in c.items() if key.endswith("_token")}
    return {key: text for key, text in texts.items() if _is_text(text)}


def _content(token):
    """A token is a text, or an object that says how it matches too."""
    return token.get("content") if isinstance(token, dict) else token


def _is_text(value) -> bool:
    return isinstance(value, str) and value == value.encode("utf-8", "replace").decode()


def _chat_template(directory: Path, config: dict) -> str | None:
    """chat_template.jinja wins over tokenizer_config.json (a string, or a list of named ones)."""
    if (directory / "chat_template.jinja").exists():
        return read_text(directory / "chat_template.jinja")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = [t for t in template if isinstance(t, dict) and t.get("name") == "default"]
        template = named[-1].get("template") if named else None
    if template is not None and not isinstance(template, str):
        raise ValueError(f"{directory / 'tokenizer_config.json'}: 'chat_template' is "
                         f"{brief(template)}, expected a text")
    return template


# ---- Tokenizer ----------------------------------------------------------------------------------

class Tokenizer:
    """A backend, and what the model's files say about special tokens.

    add_bos: whether a text begins with bos_id, or with what the backend's own prefix is. eos_ids:
    the end tokens that the tokenizer's own files name (None: those that the backend knows).
    chat_template and names (bos_token, eos_token, … -> text) are kept for
    gpt_faster/text/chat_template.py, which renders chats.
    """

    def __init__(self, backend: "TokenizersBackend | SentencePieceBackend", bos_id: int | None,
                 add_bos: bool, chat_template: str | None = None,
                 names: dict[str, str] | None = None, eos_ids: list[int] | None = None):
        self.backend = backend
        self.n_vocab = backend.n_vocab
        self.path = "tokenizer"                    # for later errors; load() knows it
        self.bos_id = bos_id
        self.prefix = backend.prefix or ([] if bos_id is None else [bos_id])
        self.add_bos = add_bos and bool(self.prefix)
        self.chat_template = chat_template
        self.names = names or {}
        self.eos_ids = backend.eos_ids if eos_ids is None else eos_ids

    def encode(self, text: str, bos: bool | None = None, special: bool = True) -> list[int]:
        """bos: with the prefix; None follows the model's files. special=False: "<s>" in the text is
        plain text."""
        text = text.encode("utf-8", "replace").decode()    # a terminal may send invalid UTF-8
        with reading(self.path):
            ids = self.backend.encode(text, special)
        wants_bos = self.add_bos if bos is None else bos
        return [*self.prefix, *ids] if wants_bos else ids

    def piece(self, i: int) -> str | None:
        """The token itself, as the vocabulary spells it."""
        return self.backend.piece(i)

    def decode(self, ids: list[int]) -> str:
        """Without the special tokens; incomplete UTF-8 becomes U+FFFD. ValueError names an id that
        no tokenizer has, which is not the file's fault."""
        for i in ids:
            if not _is_id(i):
                raise ValueError(f"{str(i)[:40]} is not a token's id")
        with reading(self.path):
            return self.backend.decode(ids)

    def state(self) -> dict:
        """For a .pth whose directory has no tokenizer files; load() reads it."""
        return dict(backend=self.backend.kind, data=self.backend.state(), bos_id=self.bos_id,
                    add_bos=self.add_bos, chat_template=self.chat_template, names=self.names,
                    eos_ids=self.eos_ids, **self.backend.more_state())


def _is_id(value) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def _is_added(token) -> bool:
    """Is it a list of the fields of an AddedToken?"""
    types = [int, str, bool, bool, bool, bool]
    return (isinstance(token, list) and list(map(type, token)) == types
            and 0 <= token[0] < MAX_ID and token[1] != "")


STATE = (                                          # its entries; of others nothing is asked
    ("data", "a text", lambda v: isinstance(v, str)),
    ("bos_id", "a token's id", _is_id),
    ("chat_template", "a text", lambda v: isinstance(v, str)),
    ("eos_ids", "ids of tokens", lambda v: isinstance(v, list) and all(map(_is_id, v))),
    ("names", "texts by name", lambda v: isinstance(v, dict) and all(
        isinstance(text, str) for text in v.values())),
    ("control", "texts by id", lambda v: isinstance(v, dict) and all(
        type(i) is int and isinstance(text, str) for i, text in v.items())),
    ("added", "added tokens", lambda v: isinstance(v, list) and all(map(_is_added, v))),
    ("after_space", "true or false", lambda v: type(v) is bool),
)


def _from_state(state: dict) -> Tokenizer:
    """ValueError names an entry that is not as Tokenizer.state() writes it."""
    if "backend" not in state:
        raise ValueError("metadata of a GGUF, expected a directory or the state of a .pth")
    kind, data = state["backend"], state.get("data")
    if kind not in ("json", "sentencepiece") or data is None:
        raise ValueError(f"a tokenizer of the kind {brief(kind)} is not known")
    for key, expected, fits in STATE:
        if state.get(key) is not None and not fits(state[key]):
            raise ValueError(f"its tokenizer's '{key}' is {brief(state[key])}, expected {expected}")
    if kind == "json":
        backend = TokenizersBackend(data)
    else:
        try:
            data = base64.b64decode(data, validate=True)
        except ValueError:
            raise ValueError("its SentencePiece model is not base64") from None
        added = [AddedToken(*token) for token in state.get("added") or []]     # old files have none
        backend = SentencePieceBackend(data, state.get("control"), added,
                                       state.get("after_space") is not False)
    return Tokenizer(backend, state.get("bos_id"), state.get("add_bos"), state.get("chat_template"),
                     state.get("names"), state.get("eos_ids"))


# ---- The two libraries, in one shape ------------------------------------------------------------
# Both have kind, n_vocab; bos_id, prefix, adds_bos, eos_ids as the file itself states them;
# encode(), which adds no prefix; decode(); piece(id) and id_of(text) of a token; state() and
# more_state() for a .pth.

@contextmanager
def library(expected: str) -> Iterator[None]:
    """tokenizers raises bare Exceptions, and panics where a regular expression takes too long."""
    try:
        yield
    except BaseException as e:
        foreseen = type(e) is Exception or isinstance(e, UnicodeError)
        if not foreseen and type(e).__name__ != "PanicException":
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
        self.eos_ids = []                          # a tokenizer.json does not say which they are
        self.n_vocab = self.fast.get_vocab_size()
        self.fast.no_truncation()                  # fine-tuning scripts leave these behind
        self.fast.no_padding()
        self.prefix, suffix = self._around()
        self.bos_id = self.prefix[0] if self.prefix else None
        self.adds_bos = bool(self.prefix)
        if suffix:
            names = ", ".join(map(str, map(self.piece, suffix)))
            print(f"note: the tokenizer puts {names} behind each text: left out, since a text that "
                  "is to go on has no end", file=sys.stderr)

    def _around(self) -> tuple[list[int], list[int]]:
        """What its post-processor puts before and behind a text: one that its vocabulary has."""
        added = self.fast.get_added_tokens_decoder()
        of_its_own = next((i for i in reversed(range(self.n_vocab)) if i not in added), 0)
        plain, whole = [], []
        for text in ("a", self.piece(of_its_own) or ""):
            with suppress(ValueError), library("a tokenizer.json that encodes"):
                plain, whole = (self.fast.encode(text, add_special_tokens=s).ids
                                for s in (False, True))
            if plain:
                break
        starts = [i for i in range(len(whole)) if whole[i:i + len(plain)] == plain]
        at = starts[0] if starts else len(whole)
        return whole[:at], whole[at + len(plain):]

    def add(self, tokens: list["AddedToken"]) -> None:
        """Tokens that stand beside the file, or that it has and that match in another way there."""
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
            self.data = self.fast                  # what state() is made of
            if self.id_of(t.text) != t.id:
                print(f"note: the added token {brief(t.text)} is {self.id_of(t.text)}, not {t.id}",
                      file=sys.stderr)
        self.n_vocab = self.fast.get_vocab_size()

    def encode(self, text: str, special: bool) -> list[int]:
        """special: whether "<s>" and the like are tokens, not text."""
        fast = self.fast if special else self.plain
        with library("a tokenizer that encodes this text"):
            if len(text) < LONG:
                return fast.encode(text, add_special_tokens=False).ids
            [encoding] = fast.encode_batch_fast([text], add_special_tokens=False)
            return encoding.ids                    # encode() would keep the GIL all the time

    @cached_property
    def plain(self):
        """A copy that reads "<s>" as text. It raises if it is changed while another thread encodes,
        so nothing is changed after it is made."""
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
        return dict(control={})                    # it finds control tokens by itself


@dataclass(frozen=True)
class AddedToken:
    """A text that is one token wherever it stands.

    special: not shown, and plain text where encode() gets special=False. lstrip, rstrip: it takes
    the spaces before, after it. single_word: it does not match inside a word. is_normalized: it is
    looked for in normalized text, which a tokenizer.json alone has.
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

    control: id -> text of the tokens that are no text (None: as the model says). added: tokens
    beside the model's pieces, or in the place of some; the texts between them are encoded one by
    one. after_space: each of these texts gets the model's leading space ("legacy" in transformers,
    and llama.cpp), else the first one only: "Hi<s>there" is "▁Hi", <s>, then "▁there" or "there".
    """

    kind = "sentencepiece"
    adds_bos, prefix = True, []                    # the bos_id alone

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
        self.at_start = True                       # False: a text continues another one
        self.n_piece = processor.get_piece_size()
        self.n_vocab = max([self.n_piece, *(t.id + 1 for t in added)])
        self.bos_id = processor.bos_id() if processor.bos_id() >= 0 else None
        self.eos_ids = [processor.eos_id()] if processor.eos_id() >= 0 else []
        try:
            control = control or {i: processor.id_to_piece(i) for i in range(self.n_piece)
                                  if processor.is_control(i)}
        except UnicodeDecodeError:
            raise ValueError("a SentencePiece model with tokens that are no UTF-8") from None
        added_ids = {t.id for t in added}
        self.tokens = {text: AddedToken(i, text) for i, text in control.items()
                       if i not in added_ids}
        self.tokens |= {t.text: t for t in added}
        self.by_id = {t.id: t for t in self.tokens.values()}
        self.control = {t.id: text for text, t in self.tokens.items() if t.special}
        self.pattern = token_pattern(list(self.tokens.values()))
        self.plain_pattern = token_pattern([t for t in self.tokens.values() if not t.special])

    def encode(self, text: str, special: bool) -> list[int]:
        """special: whether "<s>" and the like are tokens, not text."""
        pattern = self.pattern if special else self.plain_pattern
        ids, end = [], 0
        for match in pattern.finditer(text):
            ids += self._encode_between(text[end:match.start()], end == 0)
            ids.append(self._id_of_match(match[0]))
            end = match.end()
        return ids + self._encode_between(text[end:], end == 0)

    def _id_of_match(self, text: str) -> int:
        """The pattern takes the spaces that a token swallows along with it."""
        if text not in self.tokens:
            text = max((name for name in self.tokens if name in text), key=len)
        return self.tokens[text].id

    def _encode_between(self, text: str, is_first: bool) -> list[int]:
        """Text before, between or behind added tokens."""
        if self.after_space or is_first and self.at_start:
            return self.processor.encode(text)
        if not text.startswith((" ", "\N{LOWER ONE EIGHTH BLOCK}")):
            return self.continuing.encode(text)
        n = len(self.continuing.encode(UNJOINED))  # a model's normalizer may strip a first space
        return self.continuing.encode(UNJOINED + text)[n:]

    def decode(self, ids: list[int]) -> str:
        runs, texts = [[]], []                     # runs of pieces; the added tokens between them
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
    """Matches any of these tokens, the longest first, with the spaces that it swallows."""
    parts = []
    for t in sorted(tokens, key=lambda t: -len(t.text)):
        part = re.escape(t.text)
        if t.single_word:
            part = rf"(?<!\w){part}(?!\w)"
        parts.append((r"(?:(?<!\s)\s+)?" if t.lstrip else "") + part + (r"\s*" if t.rstrip else ""))
    return re.compile("(" + ("|".join(parts) or "(?!)") + ")")


# ---- Tokens that a directory adds to its tokenizer.json or tokenizer.model -----------------------

def read_added_tokens(directory: Path, config: dict, plain) -> list[AddedToken]:
    """`added_tokens_decoder` of tokenizer_config.json states ids and how each matches;
    added_tokens.json states ids alone; special_tokens_map.json and other keys of
    tokenizer_config.json name the special ones. plain: the backend without any of these.

    ValueError where an id or a text cannot be, or two texts have one id.
    """
    config_path, map_path, ids_path = (directory / name for name in (
        "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"))
    with reading(map_path):
        special = _special_tokens(_json_if_there(map_path))
    with reading(config_path):
        special |= _special_tokens(config)
    added = {}                                     # text -> AddedToken
    with reading(ids_path):
        for text, i in _json_if_there(ids_path).items():
            flags = {"special": text in special, **special.get(text, {})}
            added[text] = _added_token(_checked_id(i, text), text, flags)
    with reading(config_path):
        decoder = config.get("added_tokens_decoder") or {}
        if not isinstance(decoder, dict):
            raise ValueError(f"'added_tokens_decoder' is {brief(decoder)}, expected an object")
        for i, token in decoder.items():
            text = _content(token)
            flags = token if isinstance(token, dict) else {}
            if text in special:
                flags = {**flags, "special": True}
            i = _checked_id(int(i) if i.isdecimal() else i, text)
            added[text] = _added_token(i, text, flags)
    with reading(directory):
        _add_special(added, special, plain)
        if len(added) > MAX_ADDED:
            raise ValueError(f"{len(added)} added tokens, expected at most {MAX_ADDED}")
        _refuse_shared_ids(added)
    return sorted(added.values(), key=lambda t: t.id)


def _added_token(i: int, text: str, flags: dict) -> AddedToken:
    special = bool(flags.get("special"))
    return AddedToken(i, text, special, bool(flags.get("lstrip")), bool(flags.get("rstrip")),
                      bool(flags.get("single_word")), bool(flags.get("normalized", not special)))


def _add_special(added: dict[str, AddedToken], special: dict[str, dict], plain) -> None:
    """A special token that no file gives an id has the model file's, or the next free one, as in
    transformers."""
    free = max([plain.n_vocab, *(t.id + 1 for t in added.values())])
    for text, flags in special.items():
        if text in added:
            continue
        i = plain.id_of(text)
        if i is None:
            i = free
            free += 1
        added[text] = _added_token(i, text, {**flags, "special": True})


def _special_tokens(c: dict) -> dict[str, dict]:
    """Of one of the two JSON files, in its order: text -> how it matches, as far as it says."""
    tokens = [token for key, token in c.items() if key.endswith("_token")]
    for key in SPECIAL_LISTS:
        more = c.get(key) or []
        if not isinstance(more, list | dict):
            raise ValueError(f"'{key}' is {brief(more)}, expected a list of tokens")
        tokens += more.values() if isinstance(more, dict) else more
    return {_content(token): token if isinstance(token, dict) else {} for token in tokens
            if _is_text(_content(token)) and _content(token)}


def _checked_id(i, text) -> int:
    if type(i) is not int or not 0 <= i < MAX_ID:
        raise ValueError(f"the id of an added token is {brief(i)}, expected 0 to {MAX_ID - 1}")
    if not _is_text(text) or not text:
        raise ValueError(f"added token {i} is {brief(text)}, expected a text")
    return i


def _refuse_shared_ids(added: dict[str, AddedToken]) -> None:
    text_of = {}
    for t in added.values():
        if t.id in text_of:
            raise ValueError(f"token {t.id} is both {brief(text_of[t.id])} and {brief(t.text)}")
        text_of[t.id] = t.text


# ---- Text while it is generated -----------------------------------------------------------------

class Detokenizer:
    """Text as it becomes certain: a character in the middle of its bytes waits for the rest."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: list[int]):
        self.tokenizer, self.ids = tokenizer, list(prompt_ids[-8:])        # context: leading spaces
        self.start, self.shown = 0, len(self.ids)

    def push(self, token_id: int) -> str:
        """The text that this token completes, perhaps none."""
        self.ids.append(token_id)
        text = self._new()
        if not text or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""                              # a token that is not shown is context yet
        self.start, self.shown = self.shown, len(self.ids)
        return text

    def flush(self) -> str:
        """At the end: whatever push still held back."""
        text = self._new()
        self.start = self.shown = len(self.ids)
        return text

    def _new(self) -> str:
        old = self.tokenizer.decode(self.ids[self.start:self.shown])
        return self.tokenizer.decode(self.ids[self.start:])[len(old):]


def differ(a: Tokenizer, b: Tokenizer) -> str | None:
    """How the second vocabulary differs, by its size and a sample of its tokens, or None."""
    if a.n_vocab != b.n_vocab:
        return f"it has {b.n_vocab} tokens, not {a.n_vocab}"
    step = max(1, a.n_vocab // 2000)
    for i in range(0, a.n_vocab, step):
        if a.piece(i) != b.piece(i):
            return f"token {i} is {b.piece(i)!r}, not {a.piece(i)!r}"
    return None


class NullTokenizer:
    """Stands in where a model has no tokenizer: ids are shown as they are."""

    eos_ids: list[int] = []
    chat_template, n_vocab = None, 0

    def encode(self, text: str) -> list[int]:
        raise ValueError("this model has no tokenizer: give --prompt an integer, that many random "
                         "tokens")

    def decode(self, ids: list[int]) -> str:
        return "".join(f" {i}" for i in ids)
