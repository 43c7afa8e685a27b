"""generate.py's command line: its flags, their defaults and conflicts.

Defaults are defined only here; a model's generation_config.json may override them.

    args = build_parser().parse_args(argv); check(args)
"""

import argparse
import json
from pathlib import Path

from generate import PREFILL_CHUNK, SAMPLING, check_output, number
from generate import add_flags as add_core_flags
from gpt_faster.cli.parser import Help, Parser
from gpt_faster.formats.known_shapes import SHAPES
from gpt_faster.layers.quantized_cache import CacheFormat
from quantize import MODES, add_choices

CHECKPOINTS = ("a Hugging Face directory, .safetensors, .pth, .pt, .gguf, or a hub name org/name; "
               "default: the model that scripts/quickstart.sh downloads")
ENGINES = ("recompute", "kv_cache", "torch_compile", "compile", "cuda_graph")


def build_parser() -> Parser:
    """The flags of generate.py's core, and those of the full command."""
    p = Parser(description="Generate text from an open-weight transformer. "
                           "Text goes to stdout, everything else to stderr.", formatter_class=Help,
               conflict_handler="resolve")
    groups = add_core_flags(p, CHECKPOINTS)
    groups["sampling"].description = ("The model's generation_config.json overrides these "
                                      "defaults.")
    add_model(groups["model"])
    add_text(groups["text"])
    add_speed(groups["speed"])
    add = groups["speed"].add_argument
    add("--no_speculate", action="store_true",
        help="disable speculation, which is the default for checkpoints with an MTP head")
    add("--compare", action="store_true",
        help="generate each sample again without speculation, and print the speedup")
    add_output(groups["output"])
    return p


def add_model(group) -> None:
    add = group.add_argument
    add("--random", metavar="NAME",
        help="random weights in a known model's shape, without files, to measure speed with an "
             "integer --prompt: " + ", ".join(SHAPES))
    add_adapter(add)
    add_quantize(add)
    add("--max_seq_length", type=number(int, 2),
        help="context length to allocate; default: prompt plus new tokens. dynamic and longrope "
             "RoPE scaling use this length")


def add_text(group) -> None:
    add = group.add_argument
    add("--prompts_file", type=Path, metavar="FILE",
        help="one prompt per line; in FILE.jsonl one object per line with prompt or messages, and "
             "optionally id, max_new_tokens, " + ", ".join(SAMPLING) + "; -: stdin, in either form")
    add("--chat", action="store_true", help="apply the model's chat template to prompts")
    add("--interactive", action="store_true",
        help="chat in the terminal with the model's chat template; type /help there")
    add("--system_prompt", metavar="TEXT", help="system prompt")
    add("--chat_template_kwargs", type=json_object, metavar="JSON",
        help='extra chat template variables, e.g. {"enable_thinking": false}')
    add("--hide_thoughts", action="store_true",
        help="in a chat, print a model's answers without its thoughts")
    add("--json_schema", type=Path, metavar="FILE",
        help="constrain the output to JSON that matches this schema (needs llguidance)")


def add_speed(group) -> None:
    """For every command that generates."""
    add = group.add_argument
    add("--compile_prefill", action="store_true",
        help="compile prefill too (on a CPU --compile does already); implies --compile")
    add_activation_bits(add)
    add("--draft_checkpoint_path", "--draft_model", metavar="PATH_OR_NAME",
        help="a smaller draft model with the same vocabulary, or a drafter that was made for the "
             "model: EAGLE-3, DFlash, or Gemma 4's (gemma4_assistant)")
    add("--speculate", choices=["mtp", "ngram", "int8", "int4"],
        help="speculate without a draft model: mtp: the checkpoint's multi-token prediction head; "
             "ngram: look up the last three tokens in the text so far; int8, int4: a quantized "
             "copy of the model")
    add("--speculate_k", type=number(int, 1), metavar="K",
        help="draft exactly K tokens; default: up to 5 (mtp 4, ngram 8, DFlash 15), adapted to the "
             "acceptance rate")
    add("--prefill_chunk", type=number(int, 1), default=PREFILL_CHUNK, metavar="N",
        help="prefill N tokens at a time, which limits memory use")
    add_kv_cache(add)
    add("--engine", choices=ENGINES,
        help="recompute: no KV cache; kv_cache: eager (default); torch_compile: torch.compile "
             "without our kernels; compile: same as --compile; cuda_graph: the eager step in a "
             "CUDA graph")


def add_output(group) -> None:
    add = group.add_argument
    add("--json", action="store_true",
        help="print one JSON object per sample and row instead of text")
    add("--output", type=Path, metavar="FILE",
        help="append one JSON object per prompt to FILE; prompts with results in it are skipped")


def add_quantize(add) -> None:
    """For every command that loads a model."""
    add("--quantize", choices=MODES,
        help="quantize the weights while loading (round to nearest; for GPTQ use quantize.py)")
    add_choices(add)


def add_no_bos(add) -> None:
    """For every command that cuts a text into windows."""
    add("--no_bos", action="store_true",
        help="put the tokenizer's beginning token before the text only, not into every window")


def add_adapter(add) -> None:
    """For every command that loads a model."""
    add("--adapter", metavar="PATH_OR_NAME",
        help="a LoRA adapter (adapter_config.json, adapter_model.safetensors), merged into the "
             "weights while loading, before quantization")


def add_activation_bits(add) -> None:
    """For every command that compiles."""
    add("--activation_bits", type=int, choices=[8, 16], default=8,
        help="precision of activations in multi-row matmuls (prefill, batches) under --compile: "
             "with int4 weights on x86, with int8 weights if it has VNNI; 16 is more accurate and "
             "slower; float32 models always use 16, and so do more than 48 rows with AMX")


def add_kv_cache(add) -> None:
    """For every command that generates or scores."""
    add("--kv_cache", type=cache_format, metavar="PRECISION",
        help="quantize the KV cache: int8, int4, fp8, or keys/values, for example int8/int4; "
             "default: the model's dtype")


def cache_format(text: str) -> CacheFormat:
    try:
        return CacheFormat.parse(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def json_object(text: str) -> dict:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got '{text}'")
    return value


def many(args) -> bool:
    """Whether prompts run in slots: several prompts, or --output."""
    return bool(args.prompts_file or args.output or len(args.prompt) > 1)


def may_draft(args) -> bool:
    """Whether default speculation is allowed: one row, and no flag that sets or excludes it."""
    sets_speculation = args.draft_checkpoint_path or args.speculate or args.no_speculate
    runs_one_row = not many(args) and args.batch_size == 1 and args.engine != "recompute"
    return runs_one_row and not sets_speculation and not args.json_schema


def check(args) -> None:
    """ValueError if flags conflict."""
    check_output(args)
    for flag in ("json", "random", "profile", "prompt", "prompts_file", "output"):
        if args.interactive and getattr(args, flag):
            raise ValueError(f"--interactive cannot be combined with --{flag}")
    if args.interactive and (args.batch_size > 1 or args.num_samples > 1):
        raise ValueError("--interactive requires --batch_size 1 and --num_samples 1")
    speculates = args.draft_checkpoint_path or args.speculate
    if args.draft_checkpoint_path and args.speculate:
        raise ValueError("--draft_checkpoint_path and --speculate are mutually exclusive")
    if args.no_speculate and speculates:
        raise ValueError("--no_speculate conflicts with --speculate and --draft_checkpoint_path")
    if (args.speculate_k or args.compare) and not speculates:
        raise ValueError("--speculate_k and --compare require --draft_checkpoint_path or "
                         "--speculate")
    if speculates and args.engine == "recompute":
        raise ValueError("speculation needs a KV cache: it cannot be combined with --engine "
                         "recompute")
    if args.kv_cache and args.engine == "recompute":
        raise ValueError("--kv_cache cannot be combined with --engine recompute, which has no KV "
                         "cache")
    if args.json_schema and (speculates or args.random or args.ignore_eos):
        raise ValueError("--json_schema cannot be combined with speculation, --random or "
                         "--ignore_eos")
    if args.compare and (args.interactive or many(args)):
        raise ValueError("--compare supports one prompt only")
    if args.prompts_file and args.prompt:
        raise ValueError("--prompt and --prompts_file are mutually exclusive")
    if many(args) and (args.num_samples > 1 or args.profile or args.engine == "recompute"):
        raise ValueError("several prompts or --output cannot be combined with --num_samples, "
                         "--profile or --engine recompute")
    sets_chat = args.system_prompt or args.chat_template_kwargs or args.hide_thoughts
    if sets_chat and not (args.interactive or args.chat or args.prompts_file):
        raise ValueError("--system_prompt, --chat_template_kwargs and --hide_thoughts require "
                         "--chat, --interactive or --prompts_file")
