"""From a request to generations: its prompt's ids, its parameters, its grammar.

Refused says what is wrong. It knows the tokenizer and the flags; no HTTP, no device.

    work = Model(session).prepare_chat(asked)      # its generations go to server/engine.py
"""

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from checkpoint import Unforeseen
from generate import log
from gpt_faster.decoding.grammar import json_schema
from gpt_faster.decoding.request_sampler import RequestParams
from gpt_faster.decoding.scheduler import Generation
from gpt_faster.server.parsing import FORMATS, AnswerParser, detect, forced, instructions
from gpt_faster.server.protocol import ChatRequest, CompletionRequest, Message, Refused, Request
from gpt_faster.text.chat_template import TemplateError, encode_chat
from gpt_faster.text.token_bytes import token_bytes
from sampling import RANGES

COMPLETION_TOKENS = 16                             # OpenAI's, where max_tokens is not given
MOST_STOPS, LONGEST_STOP = 16, 256                 # each is looked for after each token
ANY_OBJECT = '{"type": "object"}'


@dataclass
class Work:
    """A request's answers, in their order; prompts: the text of each prompt, to echo."""

    generations: list[Generation]
    n_new: int
    n_choices: int
    prompts: list[str] = field(default_factory=list)
    parsers: list[AnswerParser] = field(default_factory=list)


class Model:
    """What the server knows of its model."""

    def __init__(self, session):
        self.session, self.options, self.tokenizer = session, session.options, session.tokenizer
        self.limit = session.length
        self.n_vocab = session.model.cfg.vocab_size
        self.name = self.options.served_name or session.source.path.name
        self.card = dict(id=self.name, object="model", created=int(time.time()),
                         owned_by="gpt-faster", max_model_len=self.limit)
        template = self.tokenizer.chat_template
        self.knows_tools = detect(template) is not None
        named = self.options.tool_format
        self.form = FORMATS[named] if named else detect(template)
        self.thinks = "<think>" in (template or "")
        self.pieces = None                         # bytes of each token
        longest = max(len((self.tokenizer.piece(i) or "").encode())
                      for i in range(self.tokenizer.n_vocab))
        self.most_bytes = self.limit * longest     # that positions can hold

    def check_name(self, name: str | None) -> None:
        if name not in (None, self.name):
            raise Refused(404, f"the model '{name[:100]}' is not here: this is '{self.name}'",
                          param="model", code="model_not_found")

    def token_bytes(self, i: int) -> bytes:
        if self.pieces is None:
            self.pieces = token_bytes(self.tokenizer)
        piece = self.pieces[i] if i < len(self.pieces) else None
        return (self.tokenizer.piece(i) or "").encode() if piece is None else piece

    # ---- Chats ----------------------------------------------------------------------------------

    def prepare_chat(self, asked: ChatRequest) -> Work:
        if self.tokenizer.chat_template is None:
            raise Refused(400, "this model has no chat template: use /v1/completions")
        if asked.max_tokens is not None and asked.max_completion_tokens is not None:
            raise Refused(400, "max_tokens and max_completion_tokens are one limit: give one",
                          param="max_tokens")
        if asked.top_logprobs is not None and not asked.logprobs:
            raise Refused(400, "top_logprobs needs logprobs", param="top_logprobs")
        tools = self.tools(asked)
        messages = [as_dict(message) for message in asked.messages]
        if self.options.system_prompt and messages[0]["role"] != "system":
            messages.insert(0, dict(role="system", content=self.options.system_prompt))
        more = {**(self.options.chat_template_kwargs or {}), **(asked.chat_template_kwargs or {})}
        for name in ("messages", "tools", "add_generation_prompt"):
            if name in more:
                raise Refused(400, f"chat_template_kwargs cannot replace {name}",
                              param="chat_template_kwargs")
        if tools and self.knows_tools:
            more["tools"] = tools
        elif tools:
            messages = with_system(messages, instructions(tools, self.form))
        self.check_bytes("messages", texts_of([messages, tools, asked.chat_template_kwargs]))
        ids = self.encode("messages", lambda: encode_chat(self.tokenizer, messages, **more))
        grammar = self.grammar(asked, tools)
        limit = asked.max_completion_tokens or asked.max_tokens
        if limit == 0 or asked.max_tokens == 0:
            raise Refused(400, "max_tokens: Input should be greater than 0", param="max_tokens")
        n_top = (asked.top_logprobs or 0) if asked.logprobs else None
        work = self.work(asked, [ids], limit, n_top, grammar)
        inside = self.thinks and grammar is None and self.opens_thinking(ids)
        thinks = self.thinks and grammar is None
        one_call = asked.parallel_tool_calls is False
        work.parsers = [AnswerParser(self.form, tools, thinks, inside, one_call)
                        for _ in work.generations]
        return work

    def opens_thinking(self, ids: list[int]) -> bool:
        return self.tokenizer.decode(ids[-8:]).rstrip().endswith("<think>")

    def tools(self, asked: ChatRequest) -> list[dict]:
        """Those that may be called. Refused where the model cannot."""
        choice = asked.tool_choice
        if not asked.tools:
            if choice not in (None, "none", "auto"):
                raise Refused(400, "tool_choice needs tools", param="tool_choice")
            return []
        if choice == "none":
            return []
        if self.form is None:
            raise Refused(400, "this model's chat template knows no tools (--tool_format says how "
                          "to call them all the same)", param="tools")
        return [tool.model_dump(exclude_none=True) for tool in asked.tools]

    def grammar(self, asked: ChatRequest, tools: list[dict]) -> tuple[str, str] | None:
        wanted = self.own_grammars(asked)
        if (form := asked.response_format) and form.type != "text":
            if form.type == "json_schema" and form.json_schema is None:
                raise Refused(400, "response_format: json_schema is missing",
                              param="response_format")
            schema = form.json_schema.schema_ if form.type == "json_schema" else None
            text = ANY_OBJECT if schema is None else json.dumps(schema)
            wanted["response_format"] = json_schema(text)
        if tools and asked.tool_choice not in (None, "auto"):
            if asked.tool_choice != "required":
                name = asked.tool_choice.function.name
                tools = [tool for tool in tools if tool["function"]["name"] == name]
                if not tools:
                    raise Refused(400, f"no tool is named '{name}'", param="tool_choice")
            try:
                wanted["tool_choice"] = forced(tools, self.form)
            except ValueError as e:
                raise Refused(400, str(e), param="tool_choice") from None
        return self.checked(wanted, asked.ignore_eos)

    def own_grammars(self, asked: Request) -> dict[str, tuple[str, str]]:
        return {kind: (kind, text) for kind in ("regex", "grammar")
                if (text := getattr(asked, kind)) is not None}

    def checked(self, wanted: dict[str, tuple[str, str]],
                ignore_eos: bool | None) -> tuple[str, str] | None:
        """The one that is wanted, compiled."""
        if not wanted:
            return None
        if ignore_eos:
            raise Refused(400, f"ignore_eos cannot be combined with {min(wanted)}, which ends by "
                          "itself", param="ignore_eos")
        if len(wanted) > 1:
            raise Refused(400, f"{' and '.join(wanted)} exclude each other", param=min(wanted))
        [(param, spec)] = wanted.items()
        if self.session.drafter:
            raise Refused(400, f"{param} cannot be combined with speculation, with which this "
                          "server runs", param=param)
        try:
            self.session.grammars().check(spec)
        except ImportError as e:
            raise Refused(501, str(e), param=param) from None
        except ValueError as e:
            raise Refused(400, str(e), param=param) from None
        return spec

    # ---- Completions ----------------------------------------------------------------------------

    def prepare_completion(self, asked: CompletionRequest) -> Work:
        if asked.best_of not in (None, asked.n or 1):
            raise Refused(400, "best_of is not supported but as n", param="best_of")
        prompt = asked.prompt
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            prompt = [prompt]
        ids, texts = [], []
        for p in prompt:
            if isinstance(p, str):
                self.check_bytes("prompt", [p])
                ids.append(self.encode("prompt", lambda text=p: self.tokenizer.encode(text)))
                texts.append(p)
            else:
                self.check_prompt(p)               # before the tokenizer sees the ids
                ids.append(p)
                texts.append(self.tokenizer.decode(p) if asked.echo else "")
        limit = COMPLETION_TOKENS if asked.max_tokens is None else asked.max_tokens
        if limit == 0 and not asked.echo:
            raise Refused(400, "max_tokens 0 needs echo", param="max_tokens")
        grammar = self.checked(self.own_grammars(asked), asked.ignore_eos)
        work = self.work(asked, ids, limit, asked.logprobs, grammar, bool(asked.echo))
        work.prompts = texts
        return work

    # ---- Both -----------------------------------------------------------------------------------

    def work(self, asked: Request, prompts: list[list[int]], limit: int | None, n_top: int | None,
             grammar, echo: bool = False) -> Work:
        """limit: new tokens at most; None: all that fit."""
        stops = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
        if len(stops) > MOST_STOPS or not all(0 < len(s) <= LONGEST_STOP for s in stops):
            raise Refused(400, f"stop: at most {MOST_STOPS} texts of 1 to {LONGEST_STOP} "
                          "characters", param="stop")
        if asked.stream_options and not asked.stream:
            raise Refused(400, "stream_options needs stream", param="stream_options")
        if n_top is not None and self.session.drafter:
            raise Refused(400, "logprobs cannot be combined with speculation, with which this "
                          "server runs", param="logprobs")
        if n_top is not None:
            self.token_bytes(0)                    # made here, where nobody waits for the loop
        params, n, made = self.params(asked, grammar, n_top), asked.n or 1, []
        for ids in prompts:
            self.check_prompt(ids)
            room = self.limit - len(ids)
            n_new = room if limit is None else limit
            if n_new > room:
                raise Refused(400, f"{len(ids)} tokens of the prompt and {n_new} new ones exceed "
                              f"{self.limit}: shorten the prompt or ask for less",
                              param="max_tokens", code="context_length_exceeded")
            for i in range(n):
                own = params if params.seed is None else seeded(params, i)
                eos_ids = set() if asked.ignore_eos else self.session.eos_ids
                made.append(Generation(self.tokenizer, ids, eos_ids, stops, max(1, n_new), own,
                                       n_top, echo and n_top is not None))
        if limit == 0 and n_top is None:           # nothing to run: the prompt alone
            for generation in made:
                generation.finish_reason = "length"
            return Work(made, 0, n)
        return Work(made, 1, n)

    def check_bytes(self, param: str, texts: list[str]) -> None:
        """Refused before it is tokenized: no token stands for more bytes than the longest one."""
        n = sum(len(text.encode()) for text in texts)
        if n > self.most_bytes:
            raise Refused(400, f"{param}: {n:,} bytes are more than {self.limit} positions can "
                          f"hold ({self.most_bytes:,}): shorten the prompt", param=param,
                          code="context_length_exceeded")

    def encode(self, param: str, encode: Callable[[], list[int]]) -> list[int]:
        """Refused where a template refuses, or the tokenizer's library fails on the text: that is
        the request's fault, so the answer says nothing of files."""
        try:
            return encode()
        except TemplateError as e:
            raise Refused(400, str(e), param=param) from None
        except (ValueError, Unforeseen) as e:
            log(f"serve.py: note: a text could not be tokenized: {e}")
            raise Refused(400, f"{param}: the tokenizer cannot encode this text",
                          param=param) from None

    def check_prompt(self, ids: list[int]) -> None:
        if not ids:
            raise Refused(400, "the prompt has no tokens", param="prompt")
        for i in (min(ids), max(ids)):
            if not 0 <= i < self.n_vocab:
                raise Refused(400, f"the prompt has the id {str(i)[:40]}, and the model's go from "
                              f"0 to {self.n_vocab - 1}", param="prompt")
        if len(ids) >= self.limit:
            raise Refused(400, f"the prompt has {len(ids)} tokens, and there are {self.limit} "
                          "positions: shorten it, or serve with a larger --max_seq_length",
                          param="prompt", code="context_length_exceeded")

    def params(self, asked: Request, grammar, n_top: int | None) -> RequestParams:
        """What the request says, and where it is silent the flags."""
        stated = {name: getattr(self.options, name)
                  for name in RANGES if name not in ("seed", "top_n_sigma")}
        for name in (*stated, "frequency_penalty", "presence_penalty", "seed"):
            if (value := getattr(asked, name)) is not None:
                stated[name] = value
        bias = []
        for text, value in (asked.logit_bias or {}).items():
            if not re.fullmatch(r"\d{1,9}", text) or int(text) >= self.n_vocab:
                raise Refused(400, f"logit_bias: '{text[:20]}' is no token's id",
                              param="logit_bias")
            bias.append((int(text), float(value)))
        return RequestParams(**stated, logit_bias=tuple(bias), grammar=grammar,
                             logprobs=n_top is not None)


def seeded(params: RequestParams, i: int) -> RequestParams:
    """The i-th answer's own seed; after the largest comes the smallest."""
    allowed = RANGES["seed"]
    n_seed = allowed.maximum - allowed.minimum + 1
    seed = (params.seed + i - allowed.minimum) % n_seed + allowed.minimum
    return replace(params, seed=seed)


def as_dict(message: Message) -> dict:
    """As chat templates want a message: its text in one piece, arguments as objects."""
    fields = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        fields["content"] = "".join(part.text for part in message.content)
    fields.setdefault("content", "")
    if message.role == "developer":
        fields["role"] = "system"
    for call in fields.get("tool_calls", []):
        call.pop("index", None)
        try:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        except (ValueError, RecursionError):
            log("serve.py: note: a tool call's arguments are no JSON: given as text")
    return fields


def texts_of(value) -> list[str]:
    """All texts in messages, those of nested objects too."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list):
        return [text for part in value for text in texts_of(part)]
    return []


def with_system(messages: list[dict], text: str) -> list[dict]:
    """The text at the end of the system prompt."""
    if messages[0]["role"] == "system":
        first = dict(messages[0], content=f"{messages[0]['content']}\n\n{text}")
        return [first, *messages[1:]]
    return [dict(role="system", content=text), *messages]
