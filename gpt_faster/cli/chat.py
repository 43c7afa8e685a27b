"""The interactive chat: read a line, stream the answer, remember both.

It owns the conversation, and what of it the KV cache holds. It receives the tokenizer and what
answers: no model, no device, no step of its own.

    python generate.py --compile --interactive
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from gpt_faster.decoding.scheduler import n_common
from gpt_faster.text.chat_template import encode_chat

try:
    import readline  # noqa: F401                  # input() edits lines and has a history with it
except ImportError:
    pass

HELP = """/clear         start a new conversation
/system TEXT   what the model is told before it; alone: nothing
/stats         tokens so far, and how fast the last answer was
/save FILE     the messages, as a line for --prompts_file
/exit          leave, as does Ctrl-D; Ctrl-C stops an answer"""


class Chat:
    """A conversation. A model without a chat template continues each line, and forgets it."""

    def __init__(self, tokenizer, answer: Callable, limit: int, rewind: int,
                 note: Callable[[str], None], system: str | None = None,
                 template: dict | None = None):
        """answer(ids, n_cached) streams an answer -> its Sequence, and a line of figures.

        limit: the longest prompt, in tokens; rewind: how many positions the cache may go back.
        template: what --chat_template_kwargs gives it.
        """
        self.tokenizer, self.answer, self.limit, self.rewind = tokenizer, answer, limit, rewind
        self.note, self.system, self.template = note, system, template or {}
        self.plain = tokenizer.chat_template is None
        self.messages = []
        self.cached_ids = []                       # whose keys the cache has
        self.most_cached = 0                       # how many it ever had at once
        self.stats = "no answer yet"

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
                if prompt:
                    print()
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
            self.note(f"{len(self.messages)} messages, {len(self.cached_ids)} of {self.limit + 1} "
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
        system = [dict(role="system", content=self.system)] if self.system else []
        return system + messages

    def encode(self, messages: list[dict]) -> list[int]:
        if self.plain:
            return self.tokenizer.encode(messages[-1]["content"])
        return encode_chat(self.tokenizer, self.with_system(messages), **self.template)

    def turn(self, line: str) -> None:
        """One message and its answer. Of the history, rendered anew, most is in the cache already:
        only what differs from cached_ids is prefilled."""
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
        n_cached = min(n_common(self.cached_ids, ids), len(ids) - 1)
        self.most_cached = max(self.most_cached, len(self.cached_ids))
        if self.most_cached - n_cached > self.rewind:      # a ring has overwritten what is needed
            n_cached = self.most_cached = 0
        self.cached_ids = []                             # in case the answer is interrupted early
        sequence, figures = self.answer(ids, n_cached)
        self.stats = f"last answer: {n_cached} of {len(ids)} tokens were in the cache, {figures}"
        if sequence.finish_reason == "length":
            self.note("(cut off: --max_new_tokens or the end of the context)")
        if sequence.ids:
            self.cached_ids = ids + sequence.ids[:-1]         # the last one was never fed
            answered = dict(role="assistant", content=sequence.text)
            self.messages = [] if self.plain else [*messages, answered]
