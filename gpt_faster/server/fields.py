"""Top-level request fields that the schema in protocol.py lacks: OpenAI's others, other servers'.

FIELDS decides about each by its name: it is another name of a field that the schema has, it cannot
change the text, or it asks for something that this server does not do. An unknown name is accepted
unless it resembles a known one: new clients send new fields, and most have no effect on the text.

    fields, origins, unknown = translate(fields, set(ChatRequest.model_fields))
"""

import difflib
import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple


class NoEffect(NamedTuple):
    """Accepted at any value: it cannot change the text."""

    reason: str


class Refused(NamedTuple):
    """Would change the answer, and is not supported. Accepted at its neutral values only, and where
    all fields of `acts_with` (name: neutral value) are neutral too."""

    reason: str                                    # and what to do instead
    neutral: tuple = ()
    acts_with: dict = {}


class Translated(NamedTuple):
    """What our schema has under another name. to(value) -> fields; ValueError."""

    to: Callable[[Any], dict]


class UnsupportedField(ValueError):
    """The message states the reason; param is the field."""

    def __init__(self, param: str, message: str):
        super().__init__(message)
        self.param = param


# ---- Translations -------------------------------------------------------------------------------

def renamed(name: str) -> Translated:
    return Translated(lambda value: {name: value})


def schema_format(value) -> dict:
    """A JSON schema, or its text -> response_format."""
    schema = json.loads(value) if isinstance(value, str) else value
    if not isinstance(schema, dict):
        raise ValueError("expected a JSON schema as an object or as text")
    return dict(response_format=dict(type="json_schema", json_schema=dict(schema=schema)))


def choice_regex(value) -> dict:
    """A list of strings -> a regex for one of them. Escaped as code points: Rust's regex syntax."""
    if not isinstance(value, list) or not value or not all(isinstance(s, str) for s in value):
        raise ValueError("expected a list of strings")
    texts = ["".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in s)
             for s in value]
    return dict(regex="(" + "|".join(texts) + ")")


def structured_outputs(value) -> dict:
    """vLLM's object: one of json, regex, choice, json_object. OpenRouter's is a boolean."""
    if isinstance(value, bool):
        return {}
    if not isinstance(value, dict):
        raise ValueError("expected an object")
    fields = {}
    for name, content in value.items():
        if content is None or content is False:
            continue
        if name == "json":
            fields |= schema_format(content)
        elif name == "json_object":
            fields |= dict(response_format=dict(type="json_object"))
        elif name == "choice":
            fields |= choice_regex(content)
        elif name == "regex":
            fields |= dict(regex=content)
        elif not name.startswith("disable_"):
            raise ValueError(f"'{ascii(name[:40])[1:-1]}' is not supported: use json, regex, "
                             "choice or json_object")
    return fields


def thinking(value) -> dict:
    """DeepSeek's and GLM's {"type": "enabled" or "disabled"}, a boolean, or Ollama's effort."""
    if value in ("low", "medium", "high"):
        return dict(reasoning_effort=value)
    kinds = {"enabled": True, "disabled": False, "adaptive": True}
    kind = value.get("type") if isinstance(value, dict) else value
    if isinstance(kind, bool):
        return dict(enable_thinking=kind)
    if isinstance(value, dict) and value.get("budget_tokens") is not None:
        raise ValueError("budget_tokens is not supported: use reasoning_effort or max_tokens")
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError("expected a boolean, or an object with type 'enabled' or 'disabled'")
    return dict(enable_thinking=kinds[kind])


def reasoning(value) -> dict:
    """OpenRouter's {"effort": …, "enabled": …, "exclude": …}."""
    if not isinstance(value, dict):
        raise ValueError("expected an object")
    if value.get("max_tokens") is not None:
        raise ValueError("max_tokens of the thoughts is not supported: use effort")
    fields = dict(reasoning_effort=value.get("effort"), enable_thinking=value.get("enabled"))
    if value.get("exclude"):
        fields["include_reasoning"] = False
    return {name: given for name, given in fields.items() if given is not None}


# ---- The table ----------------------------------------------------------------------------------

STORED = NoEffect("kept by OpenAI beside the answer; nothing is stored here")
ACCOUNT = NoEffect("about the account: who asks, at what price, with what safety policy")
CACHE = NoEffect("about caches: a prefix is reused here whenever it matches")
SPEED = NoEffect("about scheduling and speed")
EMPTY = NoEffect("acts only with another field that is refused")
SAMPLER = "this sampler is not supported: use temperature, top_k, top_p or min_p"
GRAMMAR = "GBNF and EBNF grammars are not supported: use grammar (Lark), regex or response_format"
RESPONSE = "this addition to the response is not supported: leave the field out"
OFF = (False, 0, "", "none")                       # and empty lists and objects, see is_neutral()
PENALTIES = {"repetition_penalty": 1, "repeat_penalty": 1, "presence_penalty": 0,
             "frequency_penalty": 0}

FIELDS: dict[str, NoEffect | Refused | Translated] = {
    # OpenAI's
    "audio": Refused("only text is generated"),
    "function_call": Refused("replaced by tool_choice, which this server has", ("none", "auto")),
    "functions": Refused("replaced by tools, which this server has", OFF),
    "metadata": STORED,
    "modalities": Refused('only text is generated: use ["text"]', (["text"],)),
    "moderation": Refused("there is no moderation model: leave the field out"),
    "prediction": NoEffect("only makes OpenAI's answer faster"),
    "prompt_cache_key": CACHE,
    "prompt_cache_options": CACHE,
    "prompt_cache_retention": CACHE,
    "safety_identifier": ACCOUNT,
    "service_tier": ACCOUNT,
    "store": STORED,
    "suffix": Refused("infilling is not supported", OFF),
    "user": ACCOUNT,
    "verbosity": Refused("no model here has such a setting: ask for it in the prompt", ("medium",)),
    "web_search_options": Refused("this server does not search the web"),
    # Of /v1/completions, in chats
    "add_special_tokens": Refused("the chat template writes them", (False,)),
    "best_of": Refused("use n", (1,)),
    "echo": Refused("the prompt is not repeated", OFF),
    # Other names of what we have
    "ebnf": Refused(GRAMMAR, OFF),
    "guided_choice": Translated(choice_regex),
    "guided_grammar": Refused(GRAMMAR, OFF),
    "guided_json": Translated(schema_format),
    "guided_regex": renamed("regex"),
    "json_schema": Translated(schema_format),
    "max_new_tokens": renamed("max_tokens"),
    "max_output_tokens": renamed("max_tokens"),
    "n_predict": Translated(lambda n: dict(max_tokens=-1 if n == -2 else n)),  # -2: the context
    "num_predict": Translated(lambda n: dict(max_tokens=-1 if n == -2 else n)),
    "random_seed": renamed("seed"),
    "reasoning": Translated(reasoning),
    "repeat_penalty": renamed("repetition_penalty"),
    "stop_sequences": renamed("stop"),
    "structured_outputs": Translated(structured_outputs),
    "thinking": Translated(thinking),
    "think": Translated(thinking),                 # Ollama's
    # Parameters in the wrong place
    **dict.fromkeys(("extra_body", "options", "parameters", "sampling_params", "generation_config"),
                    Refused("write its fields into the request itself", OFF)),
    "format": Refused("use response_format", OFF),
    "input": Refused("use messages or prompt"),
    "system": Refused('write it as a message with the role "system"', OFF),
    "template": Refused("the template is the model's: use /v1/completions for another", OFF),
    # vLLM's and SGLang's
    "allowed_token_ids": Refused("use logit_bias, regex or grammar", OFF),
    "bad_words": Refused("use logit_bias", OFF),
    "cache_salt": CACHE,
    "chat_template": Refused("the template is the model's: use /v1/completions for another"),
    "custom_logit_processor": Refused("code of requests does not run here", OFF),
    "custom_params": Refused("code of requests does not run here", OFF),
    "data_parallel_rank": SPEED,
    "early_stopping": EMPTY,
    "ec_transfer_params": CACHE,
    "extra_key": CACHE,
    "guided_decoding_backend": SPEED,
    "guided_whitespace_pattern": Refused("the white space of JSON is fixed"),
    "include_stop_str_in_output": Refused("the stop is never part of the text", OFF),
    "kv_transfer_params": CACHE,
    "length_penalty": EMPTY,
    "logprob_token_ids": Refused("use top_logprobs", OFF),
    "logits_processors": Refused("code of requests does not run here", OFF),
    "lora_path": Refused("one model is served: start the server with --adapter", OFF),
    "media_io_kwargs": EMPTY,
    "min_tokens": Refused("use ignore_eos with max_tokens, or leave it out", OFF),
    "mm_processor_kwargs": EMPTY,
    "no_stop_trim": Refused("the stop is never part of the text", OFF),
    "priority": SPEED,
    "prompt_logprobs": Refused("use /v1/completions with echo and logprobs", OFF[:1]),
    "repetition_detection": Refused("use repetition_penalty"),
    "request_id": ACCOUNT,
    "return_cached_tokens_details": Refused(RESPONSE, OFF),
    "return_hidden_states": Refused(RESPONSE, OFF),
    "return_prompt_text": Refused(RESPONSE, OFF),
    "return_routed_experts": Refused(RESPONSE, OFF),
    "return_token_ids": Refused(RESPONSE, OFF),
    "return_token_offsets": Refused(RESPONSE, OFF),
    "return_tokens_as_token_ids": Refused(RESPONSE, OFF),
    "rid": ACCOUNT,
    "separate_reasoning": Refused("thoughts are always apart from the content", (True,)),
    "session_id": ACCOUNT,
    "skip_special_tokens": Refused("special tokens are never part of the text", (True,)),
    "spaces_between_special_tokens": EMPTY,
    "stop_regex": Refused("use stop", OFF),
    "stream_interval": SPEED,
    "stream_reasoning": Refused("thoughts are streamed as they come", (True,)),
    "thinking_token_budget": Refused("use reasoning_effort or max_tokens", (-1,)),
    "truncate_prompt_tokens": Refused("a prompt is never cut: shorten it", (-1,)),
    "truncation_side": EMPTY,
    "use_beam_search": Refused("beams are not supported: use n", OFF),
    "watermarking": Refused("watermarks are not supported", OFF),
    "vllm_xargs": Refused("vLLM's plug-ins are not here", OFF),
    # llama.cpp's and LM Studio's
    "cache_prompt": CACHE,
    "draft_model": SPEED,
    "dry_multiplier": Refused(SAMPLER, OFF),
    "dynatemp_range": Refused(SAMPLER, OFF),
    "id_slot": SPEED,
    "keep_alive": SPEED,
    "lora": Refused("one model is served: start the server with --adapter", OFF),
    "min_keep": Refused(SAMPLER, (0, 1)),
    "mirostat": Refused(SAMPLER, OFF),
    "mirostat_mode": Refused(SAMPLER, OFF),
    "n_discard": EMPTY,
    "n_indent": Refused("infilling is not supported", OFF),
    "n_keep": EMPTY,
    "n_probs": Refused("use logprobs", OFF),
    "num_ctx": SPEED,
    "parse_tool_calls": Refused("calls of tools are always parsed", (True,)),
    "post_sampling_probs": Refused("logprobs are those before sampling", OFF),
    "reasoning_budget": Refused("use reasoning_effort or max_tokens", (-1,)),
    "reasoning_format": Refused("thoughts are returned as reasoning_content",
                                ("auto", "deepseek", "parsed")),
    "reasoning_in_content": Refused("thoughts are returned as reasoning_content", OFF),
    "response_fields": Refused(RESPONSE, OFF),
    "return_progress": Refused(RESPONSE, OFF),
    "return_tokens": Refused(RESPONSE, OFF),
    "samplers": Refused("the order of the samplers is fixed", OFF),
    "slot_id": SPEED,
    "t_max_predict_ms": Refused("use max_tokens", (0, -1)),
    "tfs_z": Refused(SAMPLER, (1,)),
    "timings_per_token": Refused(RESPONSE, OFF),
    "top_a": Refused(SAMPLER, OFF),
    "top_n_sigma": Refused(SAMPLER, (0, -1)),
    "ttl": SPEED,
    "typ_p": Refused(SAMPLER, (1,)),
    "typical_p": Refused(SAMPLER, (1,)),
    "xtc_probability": Refused(SAMPLER, OFF),
    **dict.fromkeys(("dry_allowed_length", "dry_base", "dry_penalty_last_n",
                     "dry_sequence_breakers", "dynatemp_exponent", "mirostat_eta", "mirostat_tau",
                     "xtc_threshold"), EMPTY),
    **dict.fromkeys(("repeat_last_n", "repetition_context_size", "presence_context_size",
                     "frequency_context_size"),
                    Refused("penalties count the whole text: use -1", (-1,), PENALTIES)),
    # mlx-lm's, TGI's, text-generation-webui's and its relatives'
    "adapter_id": Refused("one model is served: start the server with --adapter", OFF),
    "adapters": Refused("one model is served: start the server with --adapter", OFF),
    "ban_eos_token": Refused("use ignore_eos", OFF),
    "custom_token_bans": Refused("use logit_bias", OFF),
    "decoder_input_details": Refused(RESPONSE, OFF),
    "details": Refused(RESPONSE, OFF),
    "dynamic_temperature": Refused(SAMPLER, OFF),
    "encoder_repetition_penalty": Refused("use repetition_penalty", (1,)),
    "epsilon_cutoff": Refused(SAMPLER, OFF),
    "eta_cutoff": Refused(SAMPLER, OFF),
    "guidance_scale": Refused(SAMPLER, (0, 1)),
    "guideline": Refused("write it into the system prompt", OFF),
    "min_length": Refused("use ignore_eos with max_tokens, or leave it out", OFF),
    "negative_prompt": Refused("there is no guidance", OFF),
    "no_repeat_ngram_size": Refused("use repetition_penalty", OFF),
    "num_beams": Refused("beams are not supported: use n", (1,)),
    "num_draft_tokens": SPEED,
    "penalty_alpha": Refused(SAMPLER, OFF),
    "return_full_text": Refused("use echo of /v1/completions", OFF),
    "role_mapping": Refused("the chat template writes the roles", OFF),
    "sampler_order": Refused("the order of the samplers is fixed", OFF),
    "sampler_priority": Refused("the order of the samplers is fixed", OFF),
    "smoothing_curve": EMPTY,
    "smoothing_factor": Refused(SAMPLER, OFF),
    "tfs": Refused(SAMPLER, (1,)),
    "tool_prompt": Refused("the chat template writes the tools", OFF),
    "typical": Refused(SAMPLER, (1,)),
    "watermark": Refused("watermarks are not supported", OFF),
    # Others': OpenRouter, Groq, Mistral, Together, DashScope
    "do_sample": Refused("use temperature 0 for greedy decoding", (True,)),
    "enable_search": Refused("this server does not search the web", OFF),
    "models": Refused("one model is served: use model", OFF),
    "plugins": Refused("there are no plug-ins", OFF),
    "prompt_mode": Refused("use reasoning_effort"),
    "provider": ACCOUNT,
    "route": ACCOUNT,
    "safe_prompt": Refused("write it into the system prompt", OFF),
    "search_parameters": Refused("this server does not search the web"),
    "thinking_budget": Refused("use reasoning_effort or max_tokens", (-1,)),
    "trace": ACCOUNT,
    "transforms": Refused("a prompt is never cut: shorten it", OFF),
    "usage": NoEffect("usage is always part of the response"),
}


def is_neutral(value, neutral: tuple) -> bool:
    """Whether the value is one of these; booleans are no numbers. OFF: also an empty list."""
    if neutral is OFF and value in ([], {}):
        return True
    return any(value == other and isinstance(value, bool) == isinstance(other, bool)
               for other in neutral)


def translate(fields: dict, known: set[str],
              elsewhere: frozenset[str] = frozenset()) -> tuple[dict, dict, list[str]]:
    """-> fields of the schema; for renamed ones {ours: theirs}; the unknown names that are ignored.

    known: the schema's names; elsewhere: names that only other routes have. UnsupportedField.
    """
    new, origins, unknown = {}, {}, []
    for name, value in fields.items():
        rule = FIELDS.get(name)
        if value is None:                          # as if it were absent
            continue
        if name in known:
            translated = {name: value}
        elif isinstance(rule, Translated):
            translated = _translated(name, rule, value, known)
        elif isinstance(rule, Refused):
            check_refused(name, value, rule, fields)
            continue
        elif rule:
            continue
        elif name in elsewhere:
            check_refused(name, value, Refused("this route does not have it", OFF), fields)
            continue
        else:
            check_spelling(name, known | elsewhere)
            unknown.append(name)
            continue
        for ours, content in translated.items():
            if ours in new and new[ours] != content:
                raise UnsupportedField(name, f"{name} and {origins.get(ours, ours)} contradict "
                                       "each other: leave one of them out")
            new[ours] = content
            if name != ours:
                origins[ours] = name
    return new, origins, unknown


def _translated(name: str, rule: Translated, value, known: set[str]) -> dict:
    try:
        fields = rule.to(value)
    except RecursionError:
        raise UnsupportedField(name, f"{name}: nested too deeply") from None
    except ValueError as e:
        raise UnsupportedField(name, f"{name}: {str(e)[:200]}") from None
    if not fields.keys() <= known:
        raise UnsupportedField(name, f"the field '{name}' is not supported by this route")
    return fields


def check_refused(name: str, value, rule: Refused, fields: dict) -> None:
    """UnsupportedField unless the value asks for nothing."""
    if is_neutral(value, rule.neutral):
        return
    if rule.acts_with and all(fields.get(other) in (None, neutral)
                              for other, neutral in rule.acts_with.items()):
        return
    raise UnsupportedField(name, f"the field '{name}' is not supported: {rule.reason}")


def check_spelling(name: str, known: set[str]) -> None:
    """UnsupportedField if an unknown name resembles one that has an effect: a typo."""
    targets = {target for target in known | FIELDS.keys()
               if not isinstance(FIELDS.get(target), NoEffect)
               and target not in ("model", "n", "stream")}
    plain = {re.sub(r"[^a-z0-9]", "", target.lower()): target for target in sorted(targets)}
    written = re.sub(r"[^a-z0-9]", "", name[:60].lower())
    for match in difflib.get_close_matches(written, plain, 1, 0.85):
        raise UnsupportedField(ascii(name[:60])[1:-1], f"the field '{ascii(name[:60])[1:-1]}' is "
                               f"unknown: did you mean '{plain[match]}'?")
