"""Tokens that a directory adds to its tokenizer.model, of three files that may name them.

`added_tokens_decoder` of tokenizer_config.json states ids and how each matches; added_tokens.json
states ids alone; tokenizer_config.json and special_tokens_map.json name those that are special.

    added = read_added_tokens(directory, config, id_of, n_vocab)
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from checkpoint import brief, read_json, reading

MAX_ID, MAX_ADDED = 1 << 22, 1 << 16
SPECIAL_LISTS = ("additional_special_tokens", "extra_special_tokens")


@dataclass(frozen=True)
class AddedToken:
    """A text that is one token wherever it stands. special: it is not shown, and no message's.

    lstrip, rstrip: it takes the spaces before, after it; single_word: not within a word.
    """

    id: int
    text: str
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


def read_added_tokens(directory: Path, config: dict, id_of: Callable[[str], int | None],
                      n_vocab: int) -> list[AddedToken]:
    """config: tokenizer_config.json. id_of, n_vocab: the ids that tokenizer.model has.

    A special token that no file gives an id has the model file's, or the next free one, as in
    transformers. ValueError where an id or a text cannot be, or two texts have one id.
    """
    names = special_names(directory, config)
    ids, added = {}, {}
    path = directory / "added_tokens.json"
    if path.exists():
        with reading(path):
            for text, i in read_json(path).items():
                ids[text] = _checked(i, text)
    with reading(directory / "tokenizer_config.json"):
        decoder = config.get("added_tokens_decoder") or {}
        if not isinstance(decoder, dict):
            raise ValueError(f"'added_tokens_decoder' is {brief(decoder)}, expected an object")
        for i, token in decoder.items():
            t = _from_decoder(i, token)
            ids.pop(t.text, None)
            added[t.text] = t
    with reading(directory):
        for text, i in ids.items():
            added[text] = AddedToken(i, text, text in names)
        free = max([n_vocab, *(t.id + 1 for t in added.values())])
        for text in names:
            if text in added:
                continue
            i = id_of(text)
            if i is None:
                i = free
                free += 1
            added[text] = AddedToken(i, text)
        if len(added) > MAX_ADDED:
            raise ValueError(f"{len(added)} added tokens, expected at most {MAX_ADDED}")
        _refuse_twice(added)
    return sorted(added.values(), key=lambda t: t.id)


def special_names(directory: Path, config: dict) -> list[str]:
    """The texts of special tokens, in the order in which the files name them."""
    path = directory / "special_tokens_map.json"
    stated = read_json(path) if path.exists() else {}
    names = []
    for c in (config, stated):
        values = [v for key, v in c.items() if key.endswith("_token")]
        for key in SPECIAL_LISTS:
            more = c.get(key) or []
            values += more.values() if isinstance(more, dict) else more
        names += [v.get("content") if isinstance(v, dict) else v for v in values]
    return list(dict.fromkeys(v for v in names if isinstance(v, str) and v))


def _from_decoder(i: str, token) -> AddedToken:
    if not isinstance(token, dict):
        token = {"content": token}
    flags = {key: bool(token.get(key)) for key in ("special", "lstrip", "rstrip", "single_word")}
    text = token.get("content")
    return AddedToken(_checked(int(i) if i.isdecimal() else i, text), text, **flags)


def _checked(i, text) -> int:
    if type(i) is not int or not 0 <= i < MAX_ID:
        raise ValueError(f"the id of an added token is {brief(i)}, expected 0 to {MAX_ID - 1}")
    if not isinstance(text, str) or not text or text != text.encode("utf-8", "replace").decode():
        raise ValueError(f"added token {i} is {brief(text)}, expected a text")
    return i


def _refuse_twice(added: dict[str, AddedToken]) -> None:
    seen = {}
    for t in added.values():
        if t.id in seen:
            raise ValueError(f"token {t.id} is both {brief(seen[t.id])} and {brief(t.text)}")
        seen[t.id] = t.text
