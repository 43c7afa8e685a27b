"""The interactive chat: read a line, stream the answer, remember both.

It owns the conversation, and what of it the KV cache holds. It receives the tokenizer and what
answers: no model, no device, no step of its own.

    python generate.py --compile --interactive
"""

import json
import os
import sys
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

try:
    import readline  # noqa: F401                  # input() edits lines and has a history with it
except ImportError:
    pass

HELP = """/clear         start a new conversation
/system TEXT   what the model is told before it; alone: nothing
/stats         tokens so far, and how fast the last answer was
/save FILE     the messages, as a line for --prompts_file
/exit          leave, as does Ctrl-D; Ctrl-C stops an answer"""


def n_common(a: list[int], b: list[int]) -> int:
    """How many ids two lists begin with alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b)))


class Chat:
    """A conversation. A model without a chat template continues each line, and forgets it."""

    def __init__(self, tokenizer, answer: Callable, limit: int, rewind: int,
                 note: Callable[[str], None], system: str | None = None,
                 template: dict | None = None):
        """answer(ids, n_cached) streams an answer -> its Sequence, and a line of figures.

        limit: the longest prompt, in tokens; rewind: so many positions the cache may go back.
        template: what --chat_template_kwargs gives it.
        """
        self.tokenizer, self.answer, self.limit, self.rewind = tokenizer, answer, limit, rewind
        self.note, self.system, self.template = note, system, template or {}
        self.plain = tokenizer.chat_template is None
        self.messages, self.held, self.top = [], [], 0     # held: the ids whose keys the cache has,
        self.stats = "no answer yet"                       # top: how many it ever had at once

    def run(self) -> None:
        """Converse until the input ends."""
        if self.plain and self.system:
            raise ValueError("--system_prompt needs a chat template, and this model has none")
        self.note("no chat template: each line is continued as it is" if self.plain else
                  "type a message; /help says what else")
        self.encode([dict(role="user", content="Hello")])  # a template may refuse: now, not later
        prompt = "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""
        while True:
            try:
                line = input(prompt)
            except UnicodeDecodeError as e:
                self.note(f"error: this is not text: {e.reason}")
                continue
            except EOFError:
                print(end="\n" * bool(prompt))
                return
            except KeyboardInterrupt:
                self.note("\n(Ctrl-D or /exit leaves)")
                continue
            try:
                if line.split()[:1] == ["/exit"]:
                    return
                if line.startswith("/"):
                    self.command(*line.split(maxsplit=1))
                elif line.strip():
                    self.turn(line)
            except BrokenPipeError:                # who read the answers has left
                raise
            except (ValueError, OSError) as e:
                self.note(f"error: {e}")
            except KeyboardInterrupt:
                self.note("interrupted")

    def command(self, name: str, text: str = "") -> None:
        if name == "/clear":
            self.messages = []
        elif name == "/system" and self.plain:
            self.note("no chat template, so nowhere to put it")
        elif name == "/system":
            self.system, before = text or None, self.system
            try:
                self.encode([dict(role="user", content="Hello")])
            except ValueError:
                self.system = before
                raise
        elif name == "/stats":
            self.note(f"{len(self.messages)} messages, {len(self.held)} of {self.limit + 1} "
                      f"positions in use; {self.stats}")
        elif name == "/save" and text and not self.messages:
            self.note("no messages to save")
        elif name == "/save" and text:
            partial = Path(f"{text}.partial")
            try:
                line = json.dumps(dict(messages=self.with_system(self.messages)))
                partial.write_text(line + "\n")
                os.replace(partial, text)
            finally:
                partial.unlink(missing_ok=True)
            self.note(f"{len(self.messages)} messages in {text}")
        else:
            self.note(HELP)

    def with_system(self, messages: list[dict]) -> list[dict]:
        return [dict(role="system", content=self.system)] * bool(self.system) + messages

    def encode(self, messages: list[dict]) -> list[int]:
        if self.plain:
            return self.tokenizer.encode(messages[-1]["content"])
        return self.tokenizer.encode_chat(self.with_system(messages), **self.template)

    def turn(self, line: str) -> None:
        """One message and its answer. Of the history, rendered anew, the cache holds most already:
        only what differs from the ids that it holds is prefilled."""
        messages = [*self.messages, dict(role="user", content=line)]
        ids = self.encode(messages)
        room = self.limit if len(ids) <= self.limit else self.limit // 2   # not again next time
        while len(ids) > room and len(messages) > 2:
            messages = messages[2:]                # the oldest question, and its answer
            ids = self.encode(messages)
        if len(ids) > self.limit:
            raise ValueError(f"{len(ids)} tokens do not fit into {self.limit}: shorten the message "
                             "or give a larger --max_seq_length")
        if dropped := len(self.messages) + 1 - len(messages):
            self.note(f"the conversation exceeds {self.limit} tokens: its oldest {dropped} "
                      "messages are forgotten (/clear starts a new one)")
        n_cached = min(n_common(self.held, ids), len(ids) - 1)
        self.top = max(self.top, len(self.held))
        if self.top - n_cached > self.rewind:      # a ring has overwritten what is needed
            n_cached = self.top = 0
        self.held = []                             # in case the answer is interrupted early
        row, figures = self.answer(ids, n_cached)
        self.stats = f"last answer: {n_cached} of {len(ids)} tokens were in the cache, {figures}"
        if row.finish_reason == "length":
            self.note("(cut off: --max_new_tokens or the end of the context)")
        if row.ids:
            self.held = ids + row.ids[:-1]         # the last one was never fed
            answered = dict(role="assistant", content=row.text)
            self.messages = [] if self.plain else [*messages, answered]
