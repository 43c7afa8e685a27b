"""The bytes of each token, for grammars and logprobs.

    pieces = token_bytes(tokenizer)                # pieces[i]: bytes; None: a special token
"""

import json
import re

from tokenizer import Tokenizer


def unicode_to_bytes() -> dict[str, int]:
    """GPT-2's byte_decoder: printable character -> byte."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xa1, 0xac + 1), *range(0xae, 0xff + 1)]
    hidden = [b for b in range(256) if b not in shown]
    return {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(hidden)}


def token_bytes(tokenizer: Tokenizer) -> list[bytes | None]:
    """Bytes by token id. None: special tokens and gaps in the vocabulary."""
    backend = tokenizer.backend
    pieces = [tokenizer.piece(i) for i in range(backend.n_vocab)]
    if backend.kind == "sentencepiece":
        return [None if i in backend.control or piece is None else _of_text(piece)
                for i, piece in enumerate(pieces)]
    added = backend.fast.get_added_tokens_decoder()
    byte_of = unicode_to_bytes() if '"ByteLevel"' in json.dumps(
        json.loads(backend.fast.to_str()).get("decoder")) else None
    result = []
    for i, piece in enumerate(pieces):
        if i in added:
            result.append(None if added[i].special else added[i].content.encode())
        elif piece is None:
            result.append(None)
        elif byte_of and all(c in byte_of for c in piece):
            result.append(bytes(byte_of[c] for c in piece))
        else:
            result.append(_of_text(piece))
    return result


def _of_text(piece: str) -> bytes:
    if match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece):
        return bytes([int(match[1], 16)])
    return piece.replace("\u2581", " ").encode()
