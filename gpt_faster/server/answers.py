"""Responses in OpenAI's format: one object, or chunks of a stream.

    answer = ChatAnswer(preparer, request, prepared)
    chunks = answer.begin(); chunks += answer.add(event); chunks += answer.end()
    body = answer.whole()                          # without streaming, after the last add()
"""

import secrets
import time

from gpt_faster.decoding.scheduler import Event, Logprobs
from gpt_faster.server.prepare import PreparedRequest, RequestPreparer
from gpt_faster.server.protocol import Request
from gpt_faster.text.reasoning import n_thought_tokens


class Answer:
    """Common to chats and completions: the id, finish reasons and token counts."""

    prefix = kind = ""

    def __init__(self, preparer: RequestPreparer, request: Request, prepared: PreparedRequest):
        self.preparer, self.request, self.prepared = preparer, request, prepared
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.finish_reasons = [each.finish_reason for each in prepared.generations]

    def event(self, choices: list[dict], **more) -> dict:
        event = dict(id=self.id, object=self.kind, created=self.created, model=self.preparer.name,
                     system_fingerprint=self.preparer.fingerprint, choices=choices, **more)
        if self.wants_usage():
            each = self.request.stream_options.continuous_usage_stats
            event.setdefault("usage", self.usage() if each else None)
        return event

    def wants_usage(self) -> bool:
        options = self.request.stream_options
        return bool(self.request.stream and options and options.include_usage)

    def usage(self) -> dict:
        generations = self.prepared.generations
        firsts = generations[::self.prepared.n_choices]    # one of each prompt's choices
        n_prompt = sum(len(each.prompt_ids) for each in firsts)
        n_new = sum(len(each.ids) for each in generations) if self.prepared.generates else 0
        n_cached = sum(each.n_reused for each in firsts)
        n_thought = sum(map(n_thought_tokens, generations))
        return dict(prompt_tokens=n_prompt, completion_tokens=n_new, total_tokens=n_prompt + n_new,
                    prompt_tokens_details=dict(cached_tokens=n_cached),
                    completion_tokens_details=dict(reasoning_tokens=n_thought))

    def begin(self) -> list[dict]:
        return []

    def end(self) -> list[dict]:
        return [self.event([], usage=self.usage())] if self.wants_usage() else []

    def top(self, logprobs: Logprobs) -> list[tuple[bytes, float]]:
        return [(self.preparer.token_bytes(i), p) for i, p in logprobs.top]


class ChatAnswer(Answer):
    prefix = "chatcmpl"

    def __init__(self, *args):
        super().__init__(*args)
        self.kind = "chat.completion.chunk" if self.request.stream else "chat.completion"
        self.messages = [dict(role="assistant", content=None) for _ in self.prepared.generations]
        self.logprobs = [[] for _ in self.prepared.generations]

    def begin(self) -> list[dict]:
        return [self.event([dict(index=i, delta=dict(role="assistant", content=""),
                                 logprobs=None, finish_reason=None)])
                for i in range(len(self.messages))]

    def add(self, event: Event) -> list[dict]:
        i = event.generation.user_data.index
        parser = self.prepared.parsers[i]
        deltas = []
        if event.thoughts and self.prepared.shows_thoughts:
            # DeepSeek's, SGLang's and llama.cpp's name, and vLLM's and OpenRouter's
            deltas = [dict(reasoning_content=event.thoughts, reasoning=event.thoughts)]
        deltas += parser.push(event.text) if event.text else []
        if event.finish_reason:
            deltas += parser.finish()
        logprobs = None
        if event.logprobs:
            logprobs = [self.logprob(*token) for token in event.logprobs]
            self.logprobs[i] += logprobs
            logprobs = dict(content=logprobs, refusal=None)
        for delta in deltas:
            self.collect(self.messages[i], delta)
        if not self.request.stream:
            if event.finish_reason:
                self.finish_reasons[i] = self.reason(i, event.finish_reason)
            return []
        if logprobs and not deltas:
            deltas = [dict(content="")]
        events = []
        for delta in deltas:                       # the first one carries the logprobs
            events.append(self.event([dict(index=i, delta=delta, logprobs=logprobs,
                                           finish_reason=None)]))
            logprobs = None
        if event.finish_reason:
            reason = self.reason(i, event.finish_reason)
            events.append(self.event([dict(index=i, delta={}, logprobs=None,
                                           finish_reason=reason)]))
        return events

    def collect(self, message: dict, delta: dict) -> None:
        for key, value in delta.items():
            if key == "tool_calls":
                value = [{k: v for k, v in call.items() if k != "index"} for call in value]
            message[key] = (message.get(key) or type(value)()) + value

    def reason(self, i: int, reason: str) -> str:
        return "tool_calls" if self.messages[i].get("tool_calls") and reason == "stop" else reason

    def logprob(self, token_id: int, logprobs: Logprobs) -> dict:
        def entry(piece, p):
            text = piece.decode(errors="replace")
            return dict(token=text, logprob=clamp_logprob(p), bytes=list(piece))

        chosen = entry(self.preparer.token_bytes(token_id), logprobs.chosen)
        return dict(chosen, top_logprobs=[entry(*pair) for pair in self.top(logprobs)])

    def whole(self) -> dict:
        choices = []
        for i, message in enumerate(self.messages):
            if message["content"] is None and "tool_calls" not in message:
                message["content"] = ""
            logprobs = None
            if self.request.logprobs:
                logprobs = dict(content=self.logprobs[i], refusal=None)
            choices.append(dict(index=i, message=dict(message, refusal=None), logprobs=logprobs,
                                finish_reason=self.finish_reasons[i]))
        return self.event(choices, usage=self.usage())


class CompletionAnswer(Answer):
    prefix, kind = "cmpl", "text_completion"

    def __init__(self, *args):
        super().__init__(*args)
        self.texts = ["" for _ in self.prepared.generations]
        self.offsets = [0 for _ in self.prepared.generations]
        self.logprobs = [None if self.request.logprobs is None else empty_logprobs()
                         for _ in self.prepared.generations]
        self.echoed = set()

    def prompt(self, i: int) -> str:
        return self.prepared.prompts[i // self.prepared.n_choices]

    def echo(self, i: int) -> tuple[str, dict | None]:
        """The echoed prompt of choice i and its logprobs; empty after the first call."""
        if i in self.echoed or not self.request.echo:
            return "", None
        self.echoed.add(i)
        generation, logprobs = self.prepared.generations[i], None
        if self.request.logprobs is not None:
            logprobs = empty_logprobs()
            for token_id, p in zip(generation.prompt_ids, generation.prompt_logprobs):
                self.append_logprob(logprobs, i, token_id, p)
        return self.prompt(i), logprobs

    def append_logprob(self, logprobs: dict, i: int, token_id: int, p: Logprobs) -> None:
        text = self.preparer.token_bytes(token_id).decode(errors="replace")
        logprobs["tokens"].append(text)
        logprobs["token_logprobs"].append(p.chosen if p.chosen is None else clamp_logprob(p.chosen))
        top = {}
        for piece, value in self.top(p):
            top.setdefault(piece.decode(errors="replace"), clamp_logprob(value))
        logprobs["top_logprobs"].append(None if p.chosen is None else top)
        logprobs["text_offset"].append(self.offsets[i])
        self.offsets[i] += len(text)

    def add(self, event: Event) -> list[dict]:
        i = event.generation.user_data.index
        text, logprobs = self.echo(i)
        if self.request.max_tokens != 0:           # 0: it ran only for the prompt's logprobs
            text += event.text
            if event.logprobs:
                logprobs = logprobs or empty_logprobs()
            for token in event.logprobs:
                self.append_logprob(logprobs, i, *token)
        self.texts[i] += text
        for key, values in (logprobs or {}).items():
            self.logprobs[i][key] += values
        if event.finish_reason:
            self.finish_reasons[i] = event.finish_reason
        if not self.request.stream or not (text or logprobs or event.finish_reason):
            return []
        return [self.event([dict(index=i, text=text, logprobs=logprobs,
                                 finish_reason=event.finish_reason)])]

    def end(self) -> list[dict]:
        events = []
        if not self.prepared.generates:            # echo without generation
            events = [self.event([dict(index=i, text=self.prompt(i), logprobs=None,
                                       finish_reason="length")]) for i in range(len(self.texts))]
        return events + super().end()

    def usage(self) -> dict:
        usage = super().usage()
        if self.request.max_tokens == 0:
            usage.update(completion_tokens=0, total_tokens=usage["prompt_tokens"])
        return usage

    def whole(self) -> dict:
        if not self.prepared.generates:
            self.texts = [self.prompt(i) for i in range(len(self.texts))]
        choices = [dict(index=i, text=text, logprobs=self.logprobs[i],
                        finish_reason=self.finish_reasons[i]) for i, text in enumerate(self.texts)]
        return self.event(choices, usage=self.usage())


def empty_logprobs() -> dict:
    return dict(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])


def clamp_logprob(p: float) -> float:
    """JSON has no infinity; OpenAI uses -9999.0 for impossible tokens."""
    return max(p, -9999.0)
