"""Turn a request into generations: prompt token ids, sampling parameters, grammar.

Invalid requests raise ApiError. Depends on the tokenizer and the flags, not on HTTP or the device.

    prepared = RequestPreparer(session).prepare_chat(request)
    # prepared.generations go to server/engine.py
"""

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from checkpoint import Unforeseen
from generate import log, split_stops
from gpt_faster.decoding.grammar import json_schema, lark, regex
from gpt_faster.decoding.request_sampler import RequestParams
from gpt_faster.decoding.scheduler import Generation
from gpt_faster.server.parsing import (
    TOOL_FORMATS,
    AnswerParser,
    detect_tool_format,
    tool_call_grammar,
    tool_instructions,
)
from gpt_faster.server.protocol import ApiError, ChatRequest, CompletionRequest, Message, Request
from gpt_faster.text.chat_template import TemplateError, encode_chat, special_tokens
from gpt_faster.text.reasoning import ThoughtFormat, find_format, separate
from gpt_faster.text.token_bytes import token_bytes
from sampling import RANGES

COMPLETION_TOKENS = 16                             # OpenAI's default max_tokens
MAX_STOPS, MAX_STOP_LENGTH = 16, 256               # all are searched after each token
ANY_OBJECT = {"type": "object"}


@dataclass
class PreparedRequest:
    """A request's generations, n_choices per prompt; prompts: their texts, for echo.

    generates: False for an echo only.
    """

    generations: list[Generation]
    generates: bool
    n_choices: int
    prompts: list[str] = field(default_factory=list)
    parsers: list[AnswerParser] = field(default_factory=list)


class RequestPreparer:
    """Prepares requests with the model's tokenizer, chat template and limits."""

    def __init__(self, session):
        self.session, self.options, self.tokenizer = session, session.options, session.tokenizer
        self.limit = session.length
        self.n_vocab = session.model.cfg.vocab_size
        self.name = self.options.served_name or session.source.path.name
        self.card = dict(id=self.name, object="model", created=int(time.time()),
                         owned_by="gpt-faster", max_model_len=self.limit)
        template = self.tokenizer.tool_template or self.tokenizer.chat_template
        self.knows_tools = detect_tool_format(template) is not None
        flag = self.options.tool_format
        self.tool_format = TOOL_FORMATS[flag] if flag else detect_tool_format(template)
        self.thought_format = find_format(self.tokenizer)
        special, _ = special_tokens(self.tokenizer.backend)
        names = self.tool_format.tokens() if self.tool_format else []
        self.tool_tokens = {name: self.tokenizer.backend.id_of(name)
                            for name in names if name in special}
        self.bytes_of_token = None                 # [n_vocab], built on first use
        longest = max(len((self.tokenizer.piece(i) or "").encode())
                      for i in range(self.tokenizer.n_vocab))
        self.max_bytes = self.limit * longest      # of a prompt that fits

    def check_name(self, name: str | None) -> None:
        if name not in (None, self.name):
            raise ApiError(404, f"the model '{name[:100]}' does not exist: this server serves "
                           f"'{self.name}'", param="model", code="model_not_found")

    def token_bytes(self, i: int) -> bytes:
        if self.bytes_of_token is None:
            self.bytes_of_token = token_bytes(self.tokenizer)
        piece = self.bytes_of_token[i] if i < len(self.bytes_of_token) else None
        return (self.tokenizer.piece(i) or "").encode() if piece is None else piece

    # ---- Chats ----------------------------------------------------------------------------------

    def prepare_chat(self, request: ChatRequest) -> PreparedRequest:
        if self.tokenizer.chat_template is None:
            raise ApiError(400, "this model has no chat template: use /v1/completions")
        if request.max_tokens is not None and request.max_completion_tokens is not None:
            raise ApiError(400, "set only one of max_tokens and max_completion_tokens",
                           param="max_tokens")
        if request.top_logprobs is not None and not request.logprobs:
            raise ApiError(400, "top_logprobs requires logprobs", param="top_logprobs")
        tools = self.tools(request)
        messages = [template_message(message) for message in request.messages]
        if self.options.system_prompt and messages[0]["role"] != "system":
            messages.insert(0, dict(role="system", content=self.options.system_prompt))
        template_args = {**(self.options.chat_template_kwargs or {}),
                         **(request.chat_template_kwargs or {})}
        for name in ("messages", "tools", "add_generation_prompt"):
            if name in template_args:
                raise ApiError(400, f"chat_template_kwargs cannot replace {name}",
                               param="chat_template_kwargs")
        if tools and self.knows_tools:
            template_args["tools"] = tools
        elif tools:
            messages = with_system(messages, tool_instructions(tools, self.tool_format))
        self.check_bytes("messages", all_strings([messages, tools, request.chat_template_kwargs]))
        ids = self.encode(
            "messages", lambda: encode_chat(self.tokenizer, messages, **template_args))
        grammar = self.grammar(request, tools)
        limit = request.max_completion_tokens or request.max_tokens
        if limit == 0 or request.max_tokens == 0:
            raise ApiError(400, "max_tokens: Input should be greater than 0", param="max_tokens")
        n_top = (request.top_logprobs or 0) if request.logprobs else None
        is_forced = bool(tools) and request.tool_choice not in (None, "auto")
        thinks_first = grammar is not None and self.thinks_first(is_forced)
        prepared = self.build(request, [ids], limit, n_top, grammar, thinks_first=thinks_first)
        thoughts = self.thought_format if grammar is None or thinks_first else None
        for generation in prepared.generations:    # a grammar may constrain the thoughts too
            separate(generation, self.with_markers(thoughts) if tools else thoughts)
        single_call = request.parallel_tool_calls is False
        prepared.parsers = [AnswerParser(self.tool_format, tools, single_call, is_forced)
                            for _ in prepared.generations]
        return prepared

    def with_markers(self, form: ThoughtFormat | None) -> ThoughtFormat | None:
        """The thoughts' format, with special tokens shown that mark tool calls."""
        shown = {i: text for text, i in self.tool_tokens.items()}
        if not shown or form and form.is_harmony:
            return form
        return ThoughtFormat({}, shown) if form is None else form._replace(
            shown={**form.shown, **shown})

    def tools(self, request: ChatRequest) -> list[dict]:
        """The tools to offer to the model. ApiError if it does not support tools."""
        choice = request.tool_choice
        if not request.tools:
            if choice not in (None, "none", "auto"):
                raise ApiError(400, "tool_choice requires tools", param="tool_choice")
            return []
        if choice == "none":
            return []
        if self.tool_format is None:
            raise ApiError(400, "this model's chat template does not support tools (the "
                           "server's --tool_format selects a generic format)", param="tools")
        return [tool.model_dump(exclude_none=True) for tool in request.tools]

    def grammar(self, request: ChatRequest, tools: list[dict]) -> tuple[str, str] | None:
        grammars = self.plain_grammars(request)
        if (form := request.response_format) and form.type != "text":
            schema = form.json_schema.schema_ if form.json_schema else form.schema_
            if form.type == "json_schema" and schema is None:
                raise ApiError(400, "response_format: json_schema is missing",
                               param="response_format")
            try:
                if form.type == "json_object" and not schema:
                    schema = ANY_OBJECT
                grammars["response_format"] = json_schema(json.dumps(schema))
            except ValueError as e:
                raise ApiError(400, str(e), param="response_format") from None
        if tools and request.tool_choice not in (None, "auto"):
            if request.tool_choice != "required":
                name = request.tool_choice.function.name
                tools = [tool for tool in tools if tool["function"]["name"] == name]
                if not tools:
                    raise ApiError(400, f"no tool is named '{name}'", param="tool_choice")
            try:
                grammars["tool_choice"] = tool_call_grammar(tools, self.tool_format,
                                                            self.tool_tokens)
            except ValueError as e:
                raise ApiError(400, str(e), param="tool_choice") from None
        return self.compile_grammar(grammars, request.ignore_eos)

    def thinks_first(self, is_forced: bool) -> bool:
        """Whether a grammar begins after the model's thoughts. is_forced: it forces a call.

        gpt-oss's forced calls are written as plain text, outside of its channels.
        """
        form = self.thought_format
        return form is not None and not (form.is_harmony and is_forced)

    def plain_grammars(self, request: Request) -> dict[str, tuple[str, str]]:
        grammars = {}
        for kind, spec_of in (("regex", regex), ("grammar", lark)):
            try:
                if (text := getattr(request, kind)) is not None:
                    grammars[kind] = spec_of(text)
            except ValueError as e:
                raise ApiError(400, str(e), param=kind) from None
        return grammars

    def compile_grammar(self, grammars: dict[str, tuple[str, str]],
                ignore_eos: bool | None) -> tuple[str, str] | None:
        """The only grammar requested, validated; ApiError if there are several."""
        if not grammars:
            return None
        if ignore_eos:
            raise ApiError(400, f"ignore_eos cannot be combined with {min(grammars)}",
                           param="ignore_eos")
        if len(grammars) > 1:
            raise ApiError(400, f"{' and '.join(grammars)} are mutually exclusive",
                           param=min(grammars))
        [(param, spec)] = grammars.items()
        if self.session.drafter:
            raise ApiError(400, f"{param} is not supported with speculative decoding, which is "
                           "enabled on this server", param=param)
        try:
            self.session.grammars().check(spec)
        except ImportError as e:
            raise ApiError(501, str(e), param=param) from None
        except ValueError as e:
            raise ApiError(400, str(e), param=param) from None
        return spec

    # ---- Completions ----------------------------------------------------------------------------

    def prepare_completion(self, request: CompletionRequest) -> PreparedRequest:
        if request.best_of not in (None, request.n or 1):
            raise ApiError(400, "best_of is not supported unless it equals n", param="best_of")
        prompt = request.prompt
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            prompt = [prompt]
        ids, texts = [], []
        for p in prompt:
            if isinstance(p, str):
                self.check_bytes("prompt", [p])
                ids.append(self.encode("prompt", lambda text=p: self.tokenizer.encode(text)))
                texts.append(p)
            else:
                self.check_prompt(p)               # before decode() gets the ids
                ids.append(p)
                texts.append(self.tokenizer.decode(p) if request.echo else "")
        limit = COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
        if limit == 0 and not request.echo:
            raise ApiError(400, "max_tokens 0 requires echo", param="max_tokens")
        grammar = self.compile_grammar(self.plain_grammars(request), request.ignore_eos)
        prepared = self.build(request, ids, limit, request.logprobs, grammar, bool(request.echo))
        prepared.prompts = texts
        return prepared

    # ---- Both -----------------------------------------------------------------------------------

    def build(self, request: Request, prompts: list[list[int]], limit: int | None,
              n_top: int | None, grammar, echo: bool = False,
              thinks_first: bool = False) -> PreparedRequest:
        """limit: max new tokens; None: up to the end of the context. n_top: number of top logprobs
        per token; None: no logprobs.
        """
        stop_strings = [request.stop] if isinstance(request.stop, str) else request.stop or []
        has_valid_lengths = all(0 < len(s) <= MAX_STOP_LENGTH for s in stop_strings)
        if len(stop_strings) > MAX_STOPS or not has_valid_lengths:
            raise ApiError(400, f"stop: at most {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} "
                           "characters", param="stop")
        try:
            split_stops(self.tokenizer, stop_strings)
        except ValueError as e:
            raise ApiError(400, str(e), param="stop") from None
        if request.stream_options and not request.stream:
            raise ApiError(400, "stream_options requires stream", param="stream_options")
        if n_top is not None and self.session.drafter:
            raise ApiError(400, "logprobs are not supported with speculative decoding, which is "
                           "enabled on this server", param="logprobs")
        if n_top is not None:
            self.token_bytes(0)                    # build the table here, not in the event loop
        params, n, generations = self.params(request, grammar, n_top), request.n or 1, []
        params = replace(params, thinks_first=thinks_first)
        for ids in prompts:
            self.check_prompt(ids)
            free = self.limit - len(ids)
            n_new = free if limit is None else limit
            if n_new > free:
                raise ApiError(400, f"{len(ids)} prompt tokens and max_tokens {n_new} exceed the "
                               f"context of {self.limit}: shorten the prompt or lower max_tokens",
                               param="max_tokens", code="context_length_exceeded")
            for i in range(n):
                choice_params = params if params.seed is None else seeded(params, i)
                eos_ids = set() if request.ignore_eos else self.session.eos_ids
                generations.append(Generation(self.tokenizer, ids, eos_ids, stop_strings,
                                              max(1, n_new), choice_params,
                                              n_top, echo and n_top is not None))
        if limit == 0 and n_top is None:           # echo without generation
            for generation in generations:
                generation.finish_reason = "length"
            return PreparedRequest(generations, False, n)
        return PreparedRequest(generations, True, n)

    def check_bytes(self, param: str, texts: list[str]) -> None:
        """ApiError, before tokenization, if the text has more bytes than any prompt that fits."""
        n = sum(len(text.encode()) for text in texts)
        if n > self.max_bytes:
            raise ApiError(400, f"{param}: {n:,} bytes exceed what {self.limit} tokens can hold "
                           f"({self.max_bytes:,}): shorten the prompt", param=param,
                           code="context_length_exceeded")

    def encode(self, param: str, encode: Callable[[], list[int]]) -> list[int]:
        """ApiError if the chat template raises, or the tokenizer fails on the text. The tokenizer's
        message may name files, so it is only logged."""
        try:
            return encode()
        except TemplateError as e:
            raise ApiError(400, str(e), param=param) from None
        except (ValueError, Unforeseen) as e:
            log(f"serve.py: note: tokenization failed: {e}")
            raise ApiError(400, f"{param}: the tokenizer cannot encode this text",
                           param=param) from None

    def check_prompt(self, ids: list[int]) -> None:
        if not ids:
            raise ApiError(400, "the prompt is empty", param="prompt")
        for i in (min(ids), max(ids)):
            if not 0 <= i < self.n_vocab:
                raise ApiError(400, f"prompt: token id {str(i)[:40]} is out of range: the "
                               f"vocabulary has {self.n_vocab} tokens", param="prompt")
        if len(ids) >= self.limit:
            raise ApiError(400, f"the prompt has {len(ids)} tokens, the context {self.limit}: "
                           "shorten it, or start the server with a larger --max_seq_length",
                           param="prompt", code="context_length_exceeded")

    def params(self, request: Request, grammar, n_top: int | None) -> RequestParams:
        """Sampling parameters: the request's, with the server's flags as defaults."""
        values = {name: getattr(self.options, name)
                  for name in RANGES if name not in ("seed", "top_n_sigma")}
        for name in (*values, "frequency_penalty", "presence_penalty", "seed"):
            if (value := getattr(request, name)) is not None:
                values[name] = value
        bias = []
        for text, value in (request.logit_bias or {}).items():
            if not re.fullmatch(r"\d{1,9}", text) or int(text) >= self.n_vocab:
                raise ApiError(400, f"logit_bias: '{text[:20]}' is not a token id",
                               param="logit_bias")
            bias.append((int(text), float(value)))
        return RequestParams(**values, logit_bias=tuple(bias), grammar=grammar,
                             logprobs=n_top is not None)


def seeded(params: RequestParams, i: int) -> RequestParams:
    """The parameters of choice i: seed + i, wrapping around at the largest seed."""
    allowed = RANGES["seed"]
    n_seed = allowed.maximum - allowed.minimum + 1
    seed = (params.seed + i - allowed.minimum) % n_seed + allowed.minimum
    return replace(params, seed=seed)


def template_message(message: Message) -> dict:
    """A message as chat templates expect it: content as one string, arguments as objects."""
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
            log("serve.py: note: a tool call's arguments are not valid JSON: passed as text")
    return fields


def all_strings(value) -> list[str]:
    """All strings in nested lists and objects, keys included."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list):
        return [text for part in value for text in all_strings(part)]
    return []


def with_system(messages: list[dict], text: str) -> list[dict]:
    """Append the text to the system prompt."""
    if messages[0]["role"] == "system":
        first = dict(messages[0], content=f"{messages[0]['content']}\n\n{text}")
        return [first, *messages[1:]]
    return [dict(role="system", content=text), *messages]
