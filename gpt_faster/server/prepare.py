"""Turn a request into generations: prompt token ids, sampling parameters, grammar.

Invalid requests raise ApiError. Depends on the tokenizer and the flags, not on HTTP or the device.

    prepared = RequestPreparer(session).prepare_chat(request)
    # prepared.generations go to server/engine.py
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from checkpoint import Unforeseen
from generate import log, split_stops
from gpt_faster.decoding.grammar import json_schema, lark, regex
from gpt_faster.decoding.request_sampler import RequestParams
from gpt_faster.decoding.scheduler import Generation
from gpt_faster.server.model_card import fingerprint, model_card
from gpt_faster.server.names import model_names
from gpt_faster.server.parsing import (
    TOOL_FORMATS,
    AnswerParser,
    call_or_json,
    detect_tool_format,
    tool_call_grammar,
    tool_instructions,
    written_call,
)
from gpt_faster.server.protocol import (
    THOUGHTS,
    ApiError,
    ChatRequest,
    CompletionRequest,
    Message,
    Request,
    text_of,
)
from gpt_faster.server.request_id import log_line
from gpt_faster.text.chat_template import (
    TemplateError,
    encode_chat,
    special_tokens,
    template_variables,
)
from gpt_faster.text.reasoning import ThoughtFormat, find_format, separate
from gpt_faster.text.token_bytes import token_bytes
from sampling import RANGES

COMPLETION_TOKENS = 16                             # OpenAI's default max_tokens
MAX_STOPS, MAX_STOP_LENGTH = 16, 256               # all are searched after each token
MAX_STOP_IDS = 256
MAX_REPORTED = 100                                 # unknown fields in the log
ANY_OBJECT = {"type": "object"}
RESERVED_ARGS = ("messages", "tools", "documents", "add_generation_prompt",
                 "continue_final_message")         # of a template: each is a field of a request


@dataclass
class PreparedRequest:
    """A request's generations, n_choices per prompt; prompts: their texts, for echo.

    generates: False for an echo only. headers: of the response, about what was not done as asked.
    """

    generations: list[Generation]
    generates: bool
    n_choices: int
    prompts: list[str] = field(default_factory=list)
    parsers: list[AnswerParser] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    shows_thoughts: bool = True


class RequestPreparer:
    """Prepares requests with the model's tokenizer, chat template and limits."""

    def __init__(self, session):
        self.session, self.options, self.tokenizer = session, session.options, session.tokenizer
        self.limit = session.length
        self.n_vocab = session.model.cfg.vocab_size
        names = model_names(session.source.path, self.options.checkpoint_path,
                            self.options.served_name)
        self.name, self.names = names[0], frozenset(names)
        self.card = model_card(session, self.name)
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
        self.reported = set()                      # unknown fields that the log has named
        longest = max(len((self.tokenizer.piece(i) or "").encode())
                      for i in range(self.tokenizer.n_vocab))
        self.max_bytes = self.limit * longest      # of a prompt that fits

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.session)

    def check_name(self, name: str | None) -> None:
        if name and name not in self.names:
            raise ApiError(404, f"the model '{name[:100]}' does not exist: this server serves "
                           f"'{self.name}'", param="model", code="model_not_found")

    def token_bytes(self, i: int) -> bytes:
        if self.bytes_of_token is None:
            self.bytes_of_token = token_bytes(self.tokenizer)
        piece = self.bytes_of_token[i] if i < len(self.bytes_of_token) else None
        return (self.tokenizer.piece(i) or "").encode() if piece is None else piece

    # ---- Chats ----------------------------------------------------------------------------------

    def chat_parts(self, request: ChatRequest) -> tuple[list[dict], dict]:
        """-> the messages and arguments of the chat template. ApiError if they are too long."""
        if self.tokenizer.chat_template is None:
            raise ApiError(400, "this model has no chat template: use /v1/completions")
        tools = self.tools(request)
        messages = self.messages(request)
        template_args = self.template_args(request)
        if tools and self.knows_tools:
            template_args["tools"] = tools
        elif tools:
            messages = with_system(messages, tool_instructions(tools, self.tool_format))
        self.check_bytes("messages", all_strings([messages, tools, request.documents,
                                                  request.chat_template_kwargs]))
        return messages, template_args

    def chat_ids(self, messages: list[dict], template_args: dict) -> list[int]:
        """chat_parts() -> the prompt's token ids."""
        return self.encode(
            "messages", lambda: encode_chat(self.tokenizer, messages, **template_args))

    def prepare_chat(self, request: ChatRequest) -> PreparedRequest:
        if request.top_logprobs and not request.logprobs:
            raise ApiError(400, "top_logprobs requires logprobs", param="top_logprobs")
        messages, template_args = self.chat_parts(request)
        tools, ids = self.tools(request), self.chat_ids(messages, template_args)
        grammar = self.grammar(request, tools)
        if request.limit == 0 or 0 in (request.max_tokens, request.max_completion_tokens):
            raise ApiError(400, "max_tokens: must be at least 1 in a chat, got 0",
                           param="max_tokens")
        n_top = (request.top_logprobs or 0) if request.logprobs else None
        is_forced = bool(tools) and request.forces_call()
        thinks_first = grammar is not None and self.thinks_first(is_forced)
        prepared = self.build(request, [ids], request.limit, n_top, grammar,
                              thinks_first=thinks_first)
        thoughts = self.thought_format if grammar is None or thinks_first else None
        continued = messages[-1]["content"] if request.continues() else ""
        for generation in prepared.generations:    # a grammar may constrain the thoughts too
            separate(generation, self.with_markers(thoughts) if tools else thoughts,
                     continued=continued)
        prepared.shows_thoughts = request.include_reasoning is not False
        single_call = request.parallel_tool_calls is False
        prepared.parsers = [AnswerParser(self.tool_format, tools, single_call, is_forced)
                            for _ in prepared.generations]
        return prepared

    def messages(self, request: ChatRequest) -> list[dict]:
        """The messages for the template."""
        last = request.messages[-1]
        if request.continues() and (last.tool_calls or last.function_call):
            raise ApiError(400, "continue_final_message: a message with tool calls is complete",
                           param="continue_final_message")
        messages = [template_message(message) for message in request.messages]
        if self.tool_format and not self.knows_tools:          # --tool_format
            for message in messages:
                calls = [written_call(call["function"], self.tool_format)
                         for call in message.pop("tool_calls", [])]
                message["content"] = "\n".join(filter(None, [message["content"], *calls]))
        if self.options.system_prompt and messages[0]["role"] != "system":
            messages.insert(0, dict(role="system", content=self.options.system_prompt))
        return messages

    def template_args(self, request: ChatRequest) -> dict:
        """The template's variables, besides messages and tools."""
        given = request.chat_template_kwargs or {}
        for name in RESERVED_ARGS:
            if name in given:
                raise ApiError(400, f"chat_template_kwargs cannot replace {name}: use the "
                               "request's field", param="chat_template_kwargs")
        variables = template_variables(self.tokenizer, bool(request.tools))
        args = {**(self.options.chat_template_kwargs or {}),
                **self.thinking_args(request, variables), **given}
        if request.documents:
            if "documents" not in variables:
                raise ApiError(400, "documents: this model's chat template does not read any: "
                               "write them into a message", param="documents")
            args["documents"] = request.documents
        if request.continues() and request.add_generation_prompt:
            raise ApiError(400, "add_generation_prompt begins a new message, and "
                           "continue_final_message continues the last one: use one of them",
                           param="add_generation_prompt")
        if request.continues():
            args["continue_final_message"] = True
        elif request.add_generation_prompt is False:
            args["add_generation_prompt"] = False
        return args

    def thinking_args(self, request: ChatRequest, variables: frozenset[str]) -> dict:
        """reasoning_effort and enable_thinking as the template's variables.

        A template without any such variable can only be asked not to think; other efforts have no
        effect, as nothing in such a model depends on them.
        """
        effort, enable = request.reasoning_effort, request.enable_thinking
        if effort is None and enable is None:
            return {}
        thinks = enable if enable is not None else effort != "none"
        param = "reasoning_effort" if enable is None else "enable_thinking"
        args = {name: thinks for name in ("enable_thinking", "thinking") if name in variables}
        if effort and "reasoning_effort" in variables and (effort != "none" or not args):
            args["reasoning_effort"] = effort = self.known_effort(effort)
        if not thinks and not args and self.thought_format:
            raise ApiError(400, f"{param}: this model's thoughts cannot be switched off",
                           param=param)
        return args

    def known_effort(self, effort: str) -> str:
        """The template's own word, if it names this one; else the nearest of low, medium, high."""
        template = self.tokenizer.chat_template
        if effort in ("low", "medium", "high") or re.search(rf"['\"]{effort}['\"]", template):
            return effort
        if effort == "none":
            raise ApiError(400, "reasoning_effort: this model's thoughts cannot be switched off: "
                           "use 'low'", param="reasoning_effort")
        return "low" if effort == "minimal" else "high"

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
            if choice and (choice.mode == "required" or choice.names):
                raise ApiError(400, "tool_choice requires tools", param="tool_choice")
            return []
        if choice and choice.mode == "none":
            return []
        if self.tool_format is None:
            raise ApiError(400, "this model's chat template does not support tools (the "
                           "server's --tool_format selects a generic format)", param="tools")
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools]
        if choice is None or choice.names is None:
            return tools
        by_name = {tool["function"]["name"]: tool for tool in tools}
        for name in choice.names:
            if name not in by_name:
                raise ApiError(400, f"no tool is named '{name[:100]}'", param="tool_choice")
        return [tool for name, tool in by_name.items() if name in choice.names]

    def grammar(self, request: ChatRequest, tools: list[dict]) -> tuple[str, str] | None:
        """A forced call is not a message, whose format response_format is. Where the model may
        choose, it is one or the other."""
        grammars = self.plain_grammars(request)
        answer = grammars.get("response_format")
        if tools and request.forces_call():
            grammars.pop("response_format", None)
            grammars["tool_choice"] = self.call_grammar(tools, "tool_choice")
        elif tools and answer and not (self.thought_format and self.thought_format.is_harmony):
            call = self.call_grammar(tools, "response_format")         # gpt-oss: in its channel
            grammars["response_format"] = call_or_json(call, answer)
        return self.compile_grammar(grammars, request.ignore_eos)

    def call_grammar(self, tools: list[dict], param: str) -> tuple[str, str]:
        """A grammar of one call. ApiError about param if it cannot be written."""
        try:
            return tool_call_grammar(tools, self.tool_format, self.tool_tokens)
        except ValueError as e:
            text = str(e)
            if param == "response_format":
                text = f"response_format beside tools: {text.replace('tool_choice', 'a call')}"
            raise ApiError(400, text, param=param) from None

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
        if (form := request.response_format) and form.type != "text":
            schema = form.json_schema.schema_ if form.json_schema else form.schema_
            if form.type == "json_schema" and schema is None:
                raise ApiError(400, "response_format.json_schema: is missing",
                               param="response_format.json_schema")
            try:
                if form.type == "json_object" and not schema:
                    schema = ANY_OBJECT
                grammars["response_format"] = json_schema(json.dumps(schema))
            except ValueError as e:
                raise ApiError(400, f"response_format: {e}", param="response_format") from None
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
        bos = False if request.add_special_tokens is False else None
        for p in prompt:
            if isinstance(p, str):
                self.check_bytes("prompt", [p])
                ids.append(self.encode("prompt", lambda text=p: self.tokenizer.encode(text, bos)))
                texts.append(p)
            else:
                self.check_prompt(p)               # before decode() gets the ids
                ids.append(p)
                texts.append(self.tokenizer.decode(p) if request.echo else "")
        limit = COMPLETION_TOKENS if request.limit is None else request.limit
        limit = None if limit == -1 else limit
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
        stop_strings, stop_ids = request.stop or [], set(request.stop_token_ids or [])
        has_valid_lengths = all(0 < len(s) <= MAX_STOP_LENGTH for s in stop_strings)
        if len(stop_strings) > MAX_STOPS or not has_valid_lengths:
            raise ApiError(400, f"stop: at most {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} "
                           "characters", param="stop")
        try:
            split_stops(self.tokenizer, stop_strings)
        except ValueError as e:
            raise ApiError(400, str(e), param="stop") from None
        if len(stop_ids) > MAX_STOP_IDS or max(stop_ids, default=0) >= self.n_vocab:
            raise ApiError(400, f"stop_token_ids: at most {MAX_STOP_IDS} token ids below "
                           f"{self.n_vocab}", param="stop_token_ids")
        if n_top is not None:
            self.token_bytes(0)                    # build the table here, not in the event loop
        params, n, generations = self.params(request, grammar, n_top), request.n or 1, []
        params = replace(params, thinks_first=thinks_first)
        headers = self.report_unknown(request)
        for ids in prompts:
            self.check_prompt(ids)
            free = self.limit - len(ids)
            n_new = free if limit is None else min(limit, free)
            if limit is not None and limit > free:         # clients send a large one always
                least = min(free, int(headers.get("x-max-tokens", free)))
                headers["x-max-tokens"] = str(least)
            for i in range(n):
                choice_params = params if params.seed is None else seeded(params, i)
                eos_ids = set() if request.ignore_eos else self.session.eos_ids
                generations.append(Generation(self.tokenizer, ids, eos_ids | stop_ids, stop_strings,
                                              max(1, n_new), choice_params,
                                              n_top, echo and n_top is not None))
        if limit == 0 and n_top is None:           # echo without generation
            for generation in generations:
                generation.finish_reason = "length"
            return PreparedRequest(generations, False, n, headers=headers)
        return PreparedRequest(generations, True, n, headers=headers)

    def report_unknown(self, request: Request) -> dict[str, str]:
        """A response header that names the ignored fields; the log names each once."""
        names = [re.sub(r"[^\w.-]", "?", name[:40], flags=re.A) for name in request._unknown[:10]]
        for name in names:
            if name not in self.reported and len(self.reported) < MAX_REPORTED:
                self.reported.add(name)
                log(f"serve.py: note: a request has '{name}', which is not known here: it is "
                    "ignored")
        return {"x-ignored-fields": ", ".join(names)} if names else {}

    def check_bytes(self, param: str, texts: list[str]) -> None:
        """ApiError, before tokenization, if the text has more bytes than any prompt that fits."""
        n = sum(len(text.encode()) for text in texts)
        if n > self.max_bytes:
            raise ApiError(400, f"{param}: the prompt is too long: {n:,} bytes exceed what "
                           f"{self.limit} tokens can hold "
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
            log_line(f"serve.py: note: tokenization failed: {e}")
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
            raise ApiError(400, f"the prompt is too long: it has {len(ids)} tokens, the context "
                           f"{self.limit}: shorten it, or start the server with a larger "
                           "--max_seq_length",
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


ROLES = {"developer": "system", "function": "tool"}        # as templates name them
PASSED_ON = ("name", "tool_call_id", "reasoning_content", "reasoning", "thinking")


def template_message(message: Message) -> dict:
    """A message as chat templates expect it: content as one string, arguments as objects."""
    fields = dict(role=ROLES.get(message.role, message.role),
                  content=text_of(message.content, ("text", "input_text", "output_text"))
                  or text_of(message.content, ("refusal",)) or message.refusal or "")
    fields |= {name: value for name in PASSED_ON if (value := getattr(message, name)) is not None}
    if thoughts := text_of(message.content, THOUGHTS):
        fields.setdefault("reasoning_content", thoughts)
    calls = [call.model_dump(exclude_none=True) for call in message.tool_calls or []]
    if message.function_call and not calls:
        function = message.function_call.model_dump(exclude_none=True)
        calls = [dict(type="function", function=function)]
    for call in calls:
        call["function"]["arguments"] = parsed_arguments(call["function"]["arguments"])
    return fields | dict(tool_calls=calls) if calls else fields


def parsed_arguments(arguments: str | dict):
    if isinstance(arguments, dict):
        return arguments
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        log("serve.py: note: a tool call's arguments are not valid JSON: passed as text")
        return arguments


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
