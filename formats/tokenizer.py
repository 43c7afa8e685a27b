"""Text to token ids and back, whatever the files: Tokenizer, Detokenizer, NullTokenizer.

Two well-kept libraries do the work (tokenizer_backends.py); every format is brought to one of them
(tokenizer_files.py). Decides about the beginning-of-sequence token. Does not know the model.

    tokenizer = load("checkpoints/org/name")       # a directory, a GGUF's metadata, or saved state
    ids = tokenizer.encode("Hello")
    detokenizer = Detokenizer(tokenizer, ids); print(detokenizer.push(next_id), end="")
"""

import base64
from pathlib import Path

from checkpoint import brief, reading
from formats import chat_template as chat
from formats import tokenizer_files
from formats.added_tokens import MAX_ID, AddedToken
from formats.end_tokens import end_ids
from formats.tokenizer_backends import SentencePieceBackend, TokenizersBackend


class Tokenizer:
    """A backend, and what the model's files say about special tokens.

    names: bos_token, eos_token, … -> text, for the chat template. eos_ids: what the tokenizer's own
    files say of the end of a sequence (None: what the backend knows).
    """

    def __init__(self, backend: TokenizersBackend | SentencePieceBackend, bos_id: int | None,
                 add_bos: bool, chat_template: str | None = None,
                 names: dict[str, str] | None = None, eos_ids: list[int] | None = None):
        self.backend = backend
        self.n_vocab = backend.n_vocab
        self.path = "tokenizer"                    # for what goes wrong later; load() knows it
        self.bos_id = bos_id
        self.add_bos = add_bos and bos_id is not None
        self.chat_template = chat_template
        self.names = names or {}
        self.eos_ids = backend.eos_ids if eos_ids is None else eos_ids

    def encode(self, text: str, bos: bool | None = None, special: bool = True) -> list[int]:
        """bos: None is as the model's config says; special=False reads "<s>" as plain text."""
        text = text.encode("utf-8", "replace").decode()    # a terminal may send bytes that are none
        with reading(self.path):
            ids = self.backend.encode(text, special)
        wants_bos = self.add_bos if bos is None else bos
        return [self.bos_id, *ids] if wants_bos else ids

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

    def render(self, messages: list[dict], /, **more) -> str:
        """The chat template's text for messages [{role, content}]. ValueError where it refuses."""
        return chat.render(self.chat_template, messages, **{**self.names, **more})

    def encode_chat(self, messages: list[dict], /, **more) -> list[int]:
        """The ids of render(), in which special tokens are the template's: a message's are text."""
        return chat.encode_chat(self, messages, **more)

    def state(self) -> dict:
        """For a .pth whose source has no tokenizer files; load() takes it back."""
        return dict(backend=self.backend.kind, data=self.backend.state(), bos_id=self.bos_id,
                    add_bos=self.add_bos, chat_template=self.chat_template, names=self.names,
                    eos_ids=self.eos_ids, **self.backend.more_state())


def load(source: Path | str | dict) -> Tokenizer:
    """A directory with tokenizer files, a GGUF's `tokenizer.*` metadata, or a Tokenizer's state().

    FileNotFoundError or ValueError say in one line what is missing or broken.
    """
    path = source.get("path", "tokenizer") if isinstance(source, dict) else source
    with reading(path):
        if isinstance(source, dict) and "backend" in source:
            arguments = _from_state(source)
        elif isinstance(source, dict):
            arguments = tokenizer_files.from_gguf(source)
        else:
            arguments = tokenizer_files.from_directory(Path(source))
        tokenizer = Tokenizer(**arguments)
    tokenizer.path = path
    return tokenizer


def load_for(source) -> Tokenizer:
    """The tokenizer of a Checkpoint, whose eos_ids are complete from then on."""
    tokenizer = load(source.tokenizer)
    source.eos_ids = end_ids(source.eos_ids, tokenizer)
    return tokenizer


def _is_id(value) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


STATE_KINDS = dict(
    bos_id=_is_id, chat_template=lambda v: isinstance(v, str),
    eos_ids=lambda v: isinstance(v, list) and all(map(_is_id, v)),
    names=lambda v: isinstance(v, dict) and all(isinstance(text, str) for text in v.values()))


def _from_state(state: dict) -> dict:
    keys = ("bos_id", "add_bos", "chat_template", "names", "eos_ids")
    arguments = {key: state.get(key) for key in keys}
    data, control = state.get("data"), state.get("control")
    if state["backend"] not in ("json", "sentencepiece") or not isinstance(data, str):
        raise ValueError(f"a tokenizer of the kind {brief(state['backend'])} is not known")
    for key, is_one in STATE_KINDS.items():
        if arguments[key] is not None and not is_one(arguments[key]):
            raise ValueError(f"its tokenizer's '{key}' is {brief(arguments[key])}")
    if state["backend"] == "json":
        return dict(arguments, backend=TokenizersBackend(data))
    if control is not None and not is_numbered(control):
        raise ValueError(f"its tokenizer's 'control' is {brief(control)}, expected texts by number")
    added, after_space = state.get("added", []), state.get("after_space", True)
    if not isinstance(added, list) or not all(map(is_added, added)) or (
            type(after_space) is not bool):
        raise ValueError(f"its tokenizer's 'added' is {brief(added)}, expected added tokens")
    try:
        data = base64.b64decode(data, validate=True)
    except ValueError:
        raise ValueError("its SentencePiece model is not base64") from None
    backend = SentencePieceBackend(data, control, [AddedToken(*t) for t in added], after_space)
    return dict(arguments, backend=backend)


def is_numbered(control) -> bool:
    return isinstance(control, dict) and all(
        type(i) is int and isinstance(text, str) for i, text in control.items())


def is_added(token) -> bool:
    """As a SentencePieceBackend's more_state() lists one."""
    kinds = [int, str, bool, bool, bool, bool]
    return (isinstance(token, list) and list(map(type, token)) == kinds
            and 0 <= token[0] < MAX_ID and token[1] != "")


class Detokenizer:
    """Text as it becomes certain: a character in the middle of its bytes waits for the rest."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: list[int]):
        self.tokenizer, self.ids = tokenizer, list(prompt_ids[-8:])        # context: leading spaces
        self.start, self.shown = 0, len(self.ids)

    def push(self, token_id: int) -> str:
        """The text that this token completes, perhaps none."""
        self.ids.append(token_id)
        text = self._new()
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
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
