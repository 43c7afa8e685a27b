"""How a model's thoughts are printed: dimmed on a terminal, else between <think> and </think>.

    sequence = separate(sequence, form, ThoughtPrinter())      # text/reasoning.py
"""

import os
import sys

START, END = "<think>\n", "\n</think>\n\n"         # whatever the model's own markers are
DIM, NOT_DIM = "\x1b[2m", "\x1b[22m\n\n"


class ThoughtPrinter:
    """Called with each new piece of the thoughts, and with "" at their end."""

    def __init__(self):
        is_plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
        is_dim = sys.stdout.isatty() and not is_plain
        self.start, self.end = (DIM, NOT_DIM) if is_dim else (START, END)
        self.is_open = False

    def __call__(self, text: str) -> None:
        if text and not self.is_open:
            print(self.start, end="")
        if self.is_open and not text:
            print(self.end, end="", flush=True)
        self.is_open = bool(text)
        print(text, end="", flush=True)


def with_thoughts(thoughts: str | None, text: str) -> str:
    return f"{START}{thoughts}{END}{text}" if thoughts else text
