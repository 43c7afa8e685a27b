"""JSON and other text files: an object, a text, or an error that names the file."""

import json
import os
from pathlib import Path

from formats.messages import first_line

LARGEST = 1 << 28                                  # bytes: ten times the longest tokenizer.json


def read_text(path: Path) -> str:
    """UTF-8. ValueError where it is no ordinary file (a device never ends), too long, or no text.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file" if not path.exists() else
                                f"{path}: expected a file, found something else")
    if (size := os.path.getsize(path)) > LARGEST:
        raise ValueError(f"{path}: {size:,} bytes, expected at most {LARGEST:,}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise ValueError(f"{path}: not UTF-8 text: {e.reason} at byte {e.start}") from None


def read_json(path: Path) -> dict:
    text = read_text(path)
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"{path}: not valid JSON (nested too deeply)") from None
    except ValueError as e:                        # integers of thousands of digits too
        raise ValueError(f"{path}: not valid JSON ({first_line(e)})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value
