"""The interactive chat: read a message, stream the answer, keep both in the history.

It owns the conversation and tracks which of its tokens are in the KV cache. It gets a tokenizer
and an answer function, and knows no model and no device.

    python generate.py --compile --interactive
"""

import difflib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gpt_faster.decoding.scheduler import common_prefix_length
from gpt_faster.text.chat_template import encode_chat
from gpt_faster.text.reasoning import thoughts_key, thoughts_of

try:
    import readline  # line editing and history in input()
except ImportError:
    readline = None

COMMANDS = ("/clear", "/system", "/stats", "/save", "/help", "/exit")
QUOTES = '"""'                                     # around a message of several lines
PASTE_START, PASTE_END = "\x1b[200~", "\x1b[201~"  # written by a terminal around pasted text
PASTE_ON, PASTE_OFF = "\x1b[?2004h", "\x1b[?2004l"
HELP = """/clear         start a new conversation
/system TEXT   set the system prompt; without TEXT: remove it
/stats         tokens so far, and the speed of the last answer
/save FILE     save the messages as a line for --prompts_file
/help          list these commands
/exit          quit (or Ctrl-D); Ctrl-C stops an answer
//TEXT         send /TEXT, even if it looks like a command
\"""           begins and ends a message of several lines; a pasted block is one message"""


class Chat:
    """A conversation. Without a chat template each line is completed on its own."""

    def __init__(self, tokenizer, answer: Callable, limit: int, rewind: int,
                 note: Callable[[str], None], system: str | None = None,
                 template: dict | None = None, max_new: int | None = None):
        """answer(ids, n_cached) streams an answer -> its Sequence, and speed as text.

        limit: max prompt tokens; rewind: how many positions the KV cache can go back; template:
        --chat_template_kwargs; max_new: --max_new_tokens.
        """
        self.tokenizer, self.answer, self.limit, self.rewind = tokenizer, answer, limit, rewind
        self.note, self.system, self.template = note, system, template or {}
        self.max_new = max_new
        self.no_template = tokenizer.chat_template is None
        self.thoughts_key = None if self.no_template else thoughts_key(tokenizer.chat_template)
        self.messages = []
        self.cached_ids = []                       # tokens in the KV cache
        self.max_cached = 0                        # the most it has held since it was empty
        self.stats = "no answer yet"

    def run(self) -> None:
        """Chat until /exit or the end of input."""
        if self.no_template and self.system:
            raise ValueError("--system_prompt: this model has no chat template")
        self.note("no chat template: each line is completed as plain text" if self.no_template else
                  "type a message, or /help for commands")
        self.encode([dict(role="user", content="Hello")])  # fail early if the template rejects it
        with bracketed_paste():
            self.loop()

    def loop(self) -> None:
        is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        while True:
            try:
                text = read_message("> " if is_terminal else "")
            except UnicodeDecodeError as e:
                self.note(f"error: invalid UTF-8: {e.reason}")
                continue
            except EOFError:
                if is_terminal:
                    print()
                return
            except KeyboardInterrupt:
                self.note("\n(Ctrl-D or /exit to quit)")
                continue
            try:
                name = command_of(text)
                if name == "/exit":
                    return
                if name in COMMANDS:
                    self.command(*text.split(maxsplit=1))
                elif name:
                    self.note(f"no command {text.split()[0]}, did you mean {name[1:]}? Begin with "
                              "// to send it as a message")
                elif text.strip():
                    self.turn(text.removeprefix("/") if text.startswith("//") else text)
            except BrokenPipeError:                # stdout is closed
                raise
            except (ValueError, OSError) as e:
                self.note(f"error: {e}")
            except KeyboardInterrupt:
                self.note("interrupted")

    def command(self, name: str, text: str = "") -> None:
        if name == "/clear":
            self.messages = []
        elif name == "/system" and self.no_template:
            self.note("this model has no chat template: no system prompt")
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
            self.note(f"saved {len(self.messages)} messages to {text}")
        else:
            self.note(HELP)

    def with_system(self, messages: list[dict]) -> list[dict]:
        system = [dict(role="system", content=self.system)] if self.system else []
        return system + messages

    def encode(self, messages: list[dict]) -> list[int]:
        if self.no_template:
            return self.tokenizer.encode(messages[-1]["content"])
        return encode_chat(self.tokenizer, self.with_system(messages), **self.template)

    def turn(self, line: str) -> None:
        """Answer one message. Only tokens after the common prefix with cached_ids are prefilled."""
        messages = [*self.messages, dict(role="user", content=line)]
        ids = self.encode(messages)
        max_prompt = self.limit
        if len(ids) > self.limit:
            max_prompt = self.limit // 2           # avoid truncating again next turn
        while len(ids) > max_prompt and len(messages) > 2:
            messages = messages[2:]                # drop the oldest question and answer
            ids = self.encode(messages)
        if len(ids) > self.limit:
            raise ValueError(f"{len(ids)} tokens exceed the limit of {self.limit}: shorten the "
                             "message or raise --max_seq_length")
        if dropped := len(self.messages) + 1 - len(messages):
            self.note(f"the conversation exceeds {self.limit} tokens: dropped its oldest {dropped} "
                      "messages (/clear starts a new one)")
        n_cached = min(common_prefix_length(self.cached_ids, ids), len(ids) - 1)
        self.max_cached = max(self.max_cached, len(self.cached_ids))
        if self.max_cached - n_cached > self.rewind:      # a sliding window has overwritten them
            n_cached = self.max_cached = 0
        self.cached_ids = []                       # in case the answer is interrupted
        sequence, stats = self.answer(ids, n_cached)
        self.stats = f"last answer: {n_cached} of {len(ids)} tokens were in the cache, {stats}"
        if sequence.finish_reason == "length" and len(sequence.ids) == self.max_new:
            self.note(f"(cut off after {self.max_new} tokens: --max_new_tokens)")
        elif sequence.finish_reason == "length":
            self.note(f"(cut off: the context of {len(ids) + len(sequence.ids)} tokens is full; "
                      "/clear starts over, --max_seq_length sets its size)")
        if sequence.ids:
            self.cached_ids = ids + sequence.ids[:-1]         # the last token was not processed
            reply = dict(role="assistant", content=sequence.text)
            if self.thoughts_key and (thoughts := thoughts_of(sequence)):
                reply[self.thoughts_key] = thoughts            # the template may drop them
            self.messages = [] if self.no_template else [*messages, reply]


# ---- Reading a message --------------------------------------------------------------------------

def command_of(text: str) -> str | None:
    """The command that begins a line; "?/name" if it looks like a misspelt one; None: a message."""
    if not text.startswith("/") or text.startswith("//") or "\n" in text:
        return None
    first = text.split(maxsplit=1)[0]
    if first in COMMANDS:
        return first
    if first == "/":
        return "/help"
    similar = difflib.get_close_matches(first, COMMANDS, n=1, cutoff=0.75)
    return f"?{similar[0]}" if similar else None


def read_message(prompt: str) -> str:
    """Read a line, a pasted block, or the lines between two of QUOTES. EOFError at the end."""
    text = read_line(prompt)
    if not text.startswith(QUOTES):
        return text
    text = text.removeprefix(QUOTES)
    while not text.rstrip().endswith(QUOTES):
        try:
            text += "\n" + read_line("... " if prompt else "")
        except EOFError:
            return text.strip("\n")
    return text.rstrip().removesuffix(QUOTES).strip("\n")


def read_line(prompt: str) -> str:
    """A line; or several, if the terminal marks them as pasted."""
    text = input(prompt)
    while text.count(PASTE_START) > text.count(PASTE_END):     # without readline
        text += "\n" + input("")
    return text.replace(PASTE_START, "").replace(PASTE_END, "")


@contextmanager
def bracketed_paste() -> Iterator[None]:
    """Ask the terminal to mark pasted text. Python turns this off in GNU readline, where a pasted
    block then is one line with newlines; editline does not know it."""
    if readline and "libedit" not in (readline.__doc__ or ""):
        readline.parse_and_bind("set enable-bracketed-paste on")
        yield
    elif readline or not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield
    else:
        print(PASTE_ON, end="", flush=True)
        try:
            yield
        finally:
            print(PASTE_OFF, end="", flush=True)
