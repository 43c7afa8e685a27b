"""A model's thoughts, apart from its answer: a tokenizer's format, and the split of a stream.

The formats: pairs of markers (<think> … </think>, [THINK] … [/THINK], others in PAIRS), gpt-oss's
channels (harmony), and whatever a template writes around a message's reasoning_content.

    separate(sequence, find_format(tokenizer), hear)       # sequence.text is the answer alone now
    thoughts_of(sequence)                          # the thoughts; hear(text) got them as they came
"""

import json
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

from gpt_faster.text.chat_template import TemplateError, render, special_tokens
from tokenizer import Detokenizer, Tokenizer

# start -> end. A template or vocabulary with either has the format.
PAIRS = {
    "<think>": "</think>",                         # DeepSeek, Qwen 3, GLM, Kimi K2, …
    "[THINK]": "[/THINK]",                         # Magistral, Ministral 3
    "<seed:think>": "</seed:think>",               # Seed-OSS
    "<mm:think>": "</mm:think>",                   # MiniMax M3
    "<|START_THINKING|>": "<|END_THINKING|>",      # Command A, R7B
    "<|inner_prefix|>": "<|inner_suffix|>",        # Apertus
    "<|channel>thought": "<channel|>",             # Gemma 4
    "<thinking>": "</thinking>",                   # Apriel 1.5
    "Here are my reasoning steps:": "[BEGIN FINAL RESPONSE]",  # Apriel 1.6
    "<thought>": "</thought>",                     # EXAONE Deep
    "<reasoning>": "</reasoning>",                 # Reka Flash 3
    "◁think▷": "◁/think▷",                         # Kimi-VL
    "Here is my thought process:": "Here is my response:",     # Granite 3.2
}
# Tags that some models write around the answer, which are no part of it: start -> end.
ANSWER_TAGS = {
    "<answer>": "</answer>",                       # Hunyuan, GLM-4.1V Thinking
    "<response>": "</response>",                   # Granite 3.3, ERNIE 4.5 Thinking
}
HARMONY = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>",
           "<|call|>")
N_TAIL = 32                                        # prompt tokens in which a marker may be open
MAX_HEADER = 256                                   # characters of a harmony header
Part = tuple[bool, str]                            # whether it is a thought, and its text


class ThoughtFormat(NamedTuple):
    """pairs: start -> end marker; shown: special tokens of the markers, which decode() hides;
    tags: of ANSWER_TAGS."""

    pairs: dict[str, str]
    shown: dict[int, str]
    is_harmony: bool = False
    tags: dict[str, str] = {}


# ---- Which format -------------------------------------------------------------------------------

def find_format(tokenizer: Tokenizer) -> ThoughtFormat | None:
    """The format of a model with a chat template; None if nothing tells of thoughts."""
    template = tokenizer.chat_template             # may be replaced
    return None if template is None else _format_of(tokenizer, template)


@lru_cache(4)
def _format_of(tokenizer: Tokenizer, template: str) -> ThoughtFormat | None:
    special, _ = special_tokens(tokenizer.backend)
    if speaks_harmony(template):
        return ThoughtFormat({}, _ids(tokenizer, special, HARMONY), True)
    def used(table):                               # in the template, or both in the vocabulary
        return {start: end for start, end in table.items()
                if start in template or end in template
                or None not in map(tokenizer.backend.id_of, (start, end))}

    pairs = used(PAIRS)
    if not pairs and thoughts_key(template) and (pair := _pair_of_template(tokenizer)):
        pairs = dict([pair])
    if not pairs:
        return None
    return ThoughtFormat(pairs, _ids(tokenizer, special, [*pairs, *pairs.values()]),
                         tags=used(ANSWER_TAGS))


def speaks_harmony(template: str) -> bool:
    return "<|channel|>" in template and "<|message|>" in template


def _ids(tokenizer: Tokenizer, special: list[str], markers) -> dict[int, str]:
    """The special tokens that occur in the markers, by id."""
    texts = [name for name in special if any(name in marker for marker in markers)]
    return {tokenizer.backend.id_of(text): text for text in texts}


def _pair_of_template(tokenizer: Tokenizer) -> tuple[str, str] | None:
    """What the template writes before and after the thoughts of an answer."""
    thoughts, text, question = "Let me see.", "It is so.", dict(role="user", content="Is it?")
    answer = dict(role="assistant", content=text)
    thought = dict(answer, reasoning_content=thoughts, reasoning=thoughts)
    try:
        prompt = render(tokenizer, [question])
        plain, whole = (render(tokenizer, [question, message], add_generation_prompt=False)
                        for message in (answer, thought))
    except TemplateError:
        return None
    at = whole.find(thoughts)
    answer_at = whole.find(text, at)
    if at < 0 or answer_at < 0:
        return None
    begin = min(_n_common(whole, prompt), _n_common(whole, plain), at)
    for token in re.finditer("|".join(map(re.escape, special_tokens(tokenizer.backend)[0])) or
                             "(?!)", whole):
        if token.start() < begin < token.end():
            begin = token.start()
    start, end = whole[begin:at].strip(), whole[at + len(thoughts):answer_at].strip()
    if not start:                                  # written even around no thoughts: the last tag
        tag = re.search(r"(<[^<>]+>\w+)?<[^<>]+>\s*$", whole[:at])
        start = tag[0].strip() if tag else ""
    return (start, end) if start and end else None


def _n_common(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def thoughts_key(template: str) -> str | None:
    """The key under which a template reads an earlier answer's thoughts; None: it does not."""
    for key in ("reasoning_content", "thinking", "reasoning"):
        if re.search(rf"[.'\"]{key}\b", template):
            return key


# ---- A stream of tokens -------------------------------------------------------------------------

def separate(sequence, form: ThoughtFormat | None, hear: Callable[[str], None] | None = None,
             continued: str = ""):
    """Make a generate.Sequence collect the answer's text only -> the sequence.

    hear: gets new text of the thoughts, and "" when they end. continued: text that the answer
    continues, in which thoughts may have begun.
    """
    if form:
        sequence.detokenizer = AnswerDetokenizer(sequence.detokenizer.tokenizer,
                                                 sequence.prompt_ids, form, hear, continued)
    return sequence


def thoughts_of(sequence) -> str | None:
    """A sequence's thoughts so far; None if its model has no such format."""
    detokenizer = getattr(sequence, "detokenizer", None)
    return detokenizer.thoughts if isinstance(detokenizer, AnswerDetokenizer) else None


def n_thought_tokens(sequence) -> int:
    """How many of a sequence's tokens are thoughts."""
    detokenizer = getattr(sequence, "detokenizer", None)
    return detokenizer.n_thought if isinstance(detokenizer, AnswerDetokenizer) else 0


class AnswerDetokenizer(Detokenizer):
    """Returns the answer's text; collects the thoughts. Markers are in neither.

    So stop strings, which a Sequence looks for in its text, end the answer and no thought.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: list[int], form: ThoughtFormat,
                 hear: Callable[[str], None] | None = None, continued: str = ""):
        super().__init__(tokenizer, prompt_ids)
        self.form, self.hear = form, hear
        self.thoughts = ""
        self.is_heard = False                      # hear() waits for an end
        self.n_taken = 0                           # characters that take() has returned
        self.n_thought = 0                         # tokens, with the marker that ends the thoughts
        tail = self._text_of(prompt_ids[-N_TAIL:])
        self.splitter = (HarmonySplitter(tail) if form.is_harmony else
                         PairSplitter(form, tail, continued))

    def push(self, token_id: int) -> str:
        if token_id not in self.form.shown:
            text = super().push(token_id)
        else:
            text = self._new_text() + self.form.shown[token_id]
            if self.shown < len(self.ids):
                self.start = self.shown
            self.ids.append(token_id)
            self.shown = len(self.ids)
        was_thinking = self.splitter.is_thinking
        answer = self._sort(self.splitter.push(text))
        self.n_thought += was_thinking or self.splitter.is_thinking
        return answer

    def flush(self) -> str:
        text = self._sort(self.splitter.push(super().flush()))
        return text + self._sort(self.splitter.finish()) + self._sort([(False, "")])

    def take(self) -> str:
        """The thoughts since the last call."""
        new, self.n_taken = self.thoughts[self.n_taken:], len(self.thoughts)
        return new

    def _sort(self, parts) -> str:
        answer = ""
        for is_thought, text in parts:
            if is_thought:
                self.thoughts += text
            else:
                answer += text
            if self.hear and (is_thought or self.is_heard):
                self.is_heard = is_thought
                self.hear(text if is_thought else "")
        return answer

    def _text_of(self, ids: list[int]) -> str:
        """Decode with the markers' special tokens."""
        text, run = "", []
        for i in ids:
            if i in self.form.shown:
                text += self.tokenizer.decode(run) + self.form.shown[i]
                run = []
            else:
                run.append(i)
        return text + self.tokenizer.decode(run)


class Splitter:
    """Splits text into thoughts and the answer. Text that may begin a marker is held back.

    Each state is a method that consumes a part of the buffer, and perhaps changes the state.
    """

    is_thinking = False                            # the text that comes next is a thought

    def __init__(self, state: str):
        self.state, self.buffer = state, ""
        self.n_thought = self.n_answer = 0         # characters so far

    def push(self, text: str) -> Iterator[Part]:
        self.buffer += text
        return self._split(False)

    def finish(self) -> Iterator[Part]:
        return self._split(True)

    def _split(self, is_final: bool) -> Iterator[Part]:
        while True:
            before = self.state, len(self.buffer)
            yield from getattr(self, f"_{self.state}")(is_final)
            if (self.state, len(self.buffer)) == before:
                return

    def _before(self, markers, is_final: bool) -> tuple[str, str]:
        """Take the text before the first marker -> it, and the marker or ""."""
        places = [(self.buffer.find(m), m) for m in markers if m in self.buffer]
        if places:
            at, marker = min(places)
        else:
            at, marker = len(self.buffer), ""
            at -= 0 if is_final else partial_marker_length(self.buffer, markers)
        text, self.buffer = self.buffer[:at], self.buffer[at + len(marker):]
        return text, marker

    def _thought(self, text: str, marker: str, is_final: bool) -> Iterator[Part]:
        """A thought without the white space around it: at its end it waits for what follows."""
        if self.is_new:
            text = text.lstrip()
        kept = text.rstrip()
        if not marker and not is_final:
            self.buffer = text[len(kept):] + self.buffer
        if kept:
            if self.is_new and self.n_thought:
                kept = "\n\n" + kept               # another thought
            self.is_new = False
            self.n_thought += len(kept)
            yield True, kept


class PairSplitter(Splitter):
    """Thoughts between two markers, at the beginning of the answer.

    Markers that are special tokens count anywhere: others may be text about them.
    """

    def __init__(self, form: ThoughtFormat, prompt: str, continued: str = ""):
        """prompt: its end, which may have opened the thoughts; continued: as for separate()."""
        opened = [start for start, end in form.pairs.items() if prompt.rstrip().endswith(start)
                  or continued.rfind(start) > continued.rfind(end)]
        tagged = [start for start in form.tags if prompt.rstrip().endswith(start)]
        super().__init__("thinking" if opened else "start")
        self.pairs, self.tags = form.pairs, form.tags
        self.answer_end = form.tags[tagged[0]] if tagged else ""       # "": no tag is open
        self.end = form.pairs[opened[0]] if opened else ""
        self.anywhere = [start for start in form.pairs
                         if start.startswith(tuple(form.shown.values()))]
        self.is_new = True

    @property
    def is_thinking(self) -> bool:
        return self.state == "thinking"

    def _start(self, is_final: bool) -> Iterator[Part]:
        """Only white space so far."""
        text = self.buffer.lstrip()
        starts = [start for start in (*self.pairs, *self.tags) if text.startswith(start)]
        is_begun = any(start.startswith(text) for start in (*self.pairs, *self.tags))
        if starts and starts[0] in self.pairs:
            self._open(starts[0], text)
        elif starts:
            self.answer_end, self.state = self.tags[starts[0]], "tagged"
            self.buffer = text.removeprefix(starts[0])
        elif is_final and is_begun and len(text) > 2:
            self.buffer = ""                       # a marker that was cut off
        elif is_final or not is_begun:
            self.state = "answer"
        yield from ()

    def _open(self, start: str, text: str) -> None:
        self.state, self.end, self.is_new = "thinking", self.pairs[start], True
        self.buffer = text.removeprefix(start)

    def _thinking(self, is_final: bool) -> Iterator[Part]:
        if self.is_new:
            self.buffer = self.buffer.lstrip()
            again = [start for start, end in self.pairs.items() if end == self.end]
            for start in again:                    # the prompt has opened it already
                self.buffer = self.buffer.removeprefix(start)
                if not is_final and start.startswith(self.buffer):
                    return
        text, end = self._before([self.end], is_final)
        if is_final and not end and (n := partial_marker_length(text, [self.end])) > 2:
            text = text[:-n]                       # a marker that was cut off
        yield from self._thought(text, end, is_final)
        if end:
            self.state = "between"

    def _between(self, is_final: bool) -> Iterator[Part]:
        """After thoughts: skip white space."""
        self.buffer = self.buffer.lstrip()
        if self.buffer:
            self.state = "start"
        yield from ()

    def _tagged(self, is_final: bool) -> Iterator[Part]:
        """After an answer's tag: skip white space."""
        self.buffer = self.buffer.lstrip()
        if self.buffer:
            self.state = "answer"
        yield from ()

    def _answer(self, is_final: bool) -> Iterator[Part]:
        ends = [self.answer_end] if self.answer_end else []
        text, marker = self._before([*self.anywhere, *ends], is_final)
        if ends:                                   # without the white space before the end tag
            n_begun = partial_marker_length(text, ends) if is_final and not marker else 0
            text = text[:-n_begun] if n_begun > 2 else text    # a tag that was cut off
            kept = text.rstrip()
            if not marker and not is_final:
                self.buffer = text[len(kept):] + self.buffer
            text = kept
        if text:
            yield False, text
        if marker and marker == self.answer_end:
            self.answer_end, self.state = "", "tagged"
        elif marker:
            self._open(marker, self.buffer)


class HarmonySplitter(Splitter):
    """gpt-oss's messages: <|start|>assistant<|channel|>NAME<|message|>TEXT<|end|>.

    analysis, and calls of built-in tools, are thoughts; commentary and final are the answer. A call
    of a function becomes <tool_call>{"name": …, "arguments": …}</tool_call> in the answer's text.
    """

    def __init__(self, prompt: str = ""):
        """prompt: its end, which may have begun the answer's header."""
        super().__init__("open")
        self.kind, self.is_new = "final", True
        _, begun, header = prompt.rpartition("<|start|>assistant")
        if begun and "<|end|>" not in header:
            list(self.push(header))

    @property
    def is_thinking(self) -> bool:
        return self.state == "body" and self.kind == "analysis"

    def _open(self, is_final: bool) -> Iterator[Part]:
        """A message begins: with a header, or (a model may leave it out) with its text."""
        heads = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "to=")
        text = self.buffer.lstrip()
        if text.startswith(heads):
            self.buffer, self.state = text, "header"
        elif text and (is_final or not any(head.startswith(text) for head in heads)):
            self._begin("final")
        yield from ()

    def _header(self, is_final: bool) -> Iterator[Part]:
        header, found, rest = self.buffer.partition("<|message|>")
        if not found and not is_final and len(header) < MAX_HEADER:
            return
        channel = re.search(r"<\|channel\|>\s*(\w*)", header)
        to = re.search(r"\bto=([^\s<]*)", header)
        if not found:                              # cut off, or without <|message|>
            header = re.sub(r"<\|(start|channel|constrain)\|>\s*\w*|\bto=[^\s<]*|<\|\w*\|>", "",
                            header)
            self.buffer = "" if is_final and not header.strip() else header
        else:
            self.buffer = rest
        if found and to and to[1].startswith("functions."):
            self._begin("call")
            name = json.dumps(to[1].removeprefix("functions."))
            line = "\n" if self.n_answer else ""
            yield False, f'{line}<tool_call>\n{{"name": {name}, "arguments": '
        else:
            is_thought = to or channel and channel[1] == "analysis"
            self._begin("analysis" if is_thought else "final")

    def _begin(self, kind: str) -> None:
        self.kind, self.state, self.is_new = kind, "body", True

    def _body(self, is_final: bool) -> Iterator[Part]:
        ends = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")
        text, end = self._before(ends, is_final)
        if self.kind == "analysis":
            yield from self._thought(text, end, is_final)
        elif text:
            if self.kind == "final" and self.is_new and self.n_answer:
                text = "\n\n" + text               # another message of the answer
            self.is_new = False
            self.n_answer += len(text)
            yield False, text
        if self.kind == "call" and (end or is_final):
            yield False, "}\n</tool_call>" if not self.is_new else "{}}\n</tool_call>"
            self.kind = "final"
        if end:
            self.state = "open"
            self.buffer = (end if end in ("<|start|>", "<|channel|>") else "") + self.buffer


def partial_marker_length(text: str, markers) -> int:
    """Length of the longest suffix that is a proper prefix of a marker."""
    return max((n for m in markers for n in range(1, len(m)) if text.endswith(m[:n])), default=0)
