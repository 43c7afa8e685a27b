"""generate.py's command line: every flag, its default, and which contradict each other.

A default lives here and nowhere else; a model's own generation_config.json may stand in for it. It
knows what can be asked for and nothing of how it is done.

    args = build_parser().parse_args(argv); check(args)
"""

import argparse
import json
from pathlib import Path

from generate import PREFILL_CHUNK, SAMPLING, check_output, number
from generate import add_flags as add_core_flags
from gpt_faster.cli.common import Help, Parser
from gpt_faster.formats.known_shapes import SHAPES
from quantize import MODES, add_choices

CHECKPOINTS = ("a Hugging Face directory, .safetensors, .pth, .pt, .gguf, or a hub name org/name; "
               "default: the model that scripts/quickstart.sh fetched")
ENGINES = ("recompute", "kv_cache", "torch_compile", "compile", "cuda_graph")


def build_parser() -> Parser:
    """generate.py's own flags, those that its file does without, and help that fits both."""
    p = Parser(description="Generate text from an open-weight transformer. "
                           "Text goes to stdout, everything else to stderr.", formatter_class=Help,
               conflict_handler="resolve")
    groups = add_core_flags(p, CHECKPOINTS)
    groups["sampling"].description = ("The model's own generation_config.json overrides these "
                                      "defaults.")
    add_model(groups["model"])
    add_text(groups["text"])
    add_speed(groups["speed"])
    add = groups["speed"].add_argument
    add("--no_speculate", action="store_true",
        help="draft nothing, where the checkpoint has a head for it and drafts are the default")
    add("--compare", action="store_true",
        help="after each sample generate it again without drafts, and print the speedup")
    add_output(groups["output"])
    return p


def add_model(group) -> None:
    add = group.add_argument
    add("--random", metavar="NAME",
        help="a known shape with random weights and no files, for speed trials with an integer "
             "--prompt: " + ", ".join(SHAPES))
    add_adapter(add)
    add_quantize(add)
    add("--max_seq_length", type=number(int, 2),
        help="positions to allocate; default: what the prompt and the new tokens need. RoPE of "
             "the kinds dynamic and longrope takes its factors for this length")


def add_text(group) -> None:
    add = group.add_argument
    add("--prompts_file", type=Path, metavar="FILE",
        help="a prompt a line, or in FILE.jsonl an object a line with prompt or messages, and "
             "perhaps id, max_new_tokens, " + ", ".join(SAMPLING))
    add("--chat", action="store_true", help="prompts are messages: apply the model's chat template")
    add("--interactive", action="store_true",
        help="a conversation in the terminal, by the model's chat template; /help there")
    add("--system_prompt", metavar="TEXT", help="what a chat begins with")
    add("--chat_template_kwargs", type=json_object, metavar="JSON",
        help='more for the chat template, as {"enable_thinking": false}')
    add("--json_schema", type=Path, metavar="FILE",
        help="the text is JSON that this schema allows (needs llguidance)")


def add_speed(group) -> None:
    """Those of every command that generates."""
    add = group.add_argument
    add("--compile_prefill", action="store_true",
        help="compile prefill too (on a CPU --compile does already); implies --compile")
    add_activation_bits(add)
    add("--draft_checkpoint_path", "--draft_model", metavar="PATH_OR_NAME",
        help="a smaller model of the same vocabulary that drafts tokens; or Gemma 4's own drafter "
             "(gemma4_assistant)")
    add("--speculate", choices=["mtp", "ngram", "int8", "int4"],
        help="draft tokens without one: by the head that the checkpoint has for it (multi-token "
             "prediction), what followed the last three tokens before, or by a quantized copy of "
             "the model itself")
    add("--speculate_k", type=number(int, 1), metavar="K",
        help="always draft K tokens; default: 5 at most (4 of mtp's, 8 of ngram's), fewer while "
             "they are wrong")
    add("--prefill_chunk", type=number(int, 1), default=PREFILL_CHUNK, metavar="N",
        help="prompts are run N tokens at a time, which bounds the memory that they need")
    add("--engine", choices=ENGINES,
        help="recompute: no KV cache; kv_cache: eager, the default; torch_compile: PyTorch's "
             "compiler alone; compile: as --compile; cuda_graph: the eager step captured in a CUDA "
             "graph")


def add_output(group) -> None:
    add = group.add_argument
    add("--json", action="store_true", help="one JSON object per sample and row on stdout, no text")
    add("--output", type=Path, metavar="FILE",
        help="append one JSON object per prompt to FILE; what is there already is not run again")


def add_quantize(add) -> None:
    """For every command that loads a model."""
    add("--quantize", choices=MODES,
        help="round the weights while loading, without a file; GPTQ is quantize.py's")
    add_choices(add)


def add_adapter(add) -> None:
    """For every command that loads a model."""
    add("--adapter", metavar="PATH_OR_NAME",
        help="a LoRA adapter (adapter_config.json, adapter_model.safetensors), added to the "
             "weights while loading, before they are rounded")


def add_activation_bits(add) -> None:
    """For every command that compiles."""
    add("--activation_bits", type=int, choices=[8, 16], default=8,
        help="what --compile rounds activations to before products of several rows (a prompt's, a "
             "batch's) with int4 weights on x86, and with int8 weights where it has VNNI; 16 is "
             "finer and slower; float32 models always take it, and with AMX more than 48 rows")


def json_object(text: str) -> dict:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got '{text}'")
    return found


def many(args) -> bool:
    """Prompts that run in slots: several, or those whose results go into a file."""
    return bool(args.prompts_file or args.output or len(args.prompt) > 1)


def may_draft(args) -> bool:
    """One row at a time, and nothing was said of drafts."""
    said = args.draft_checkpoint_path or args.speculate or args.no_speculate
    alone = not many(args) and args.batch_size == 1 and args.engine != "recompute"
    return alone and not said and not args.json_schema


def check(args) -> None:
    """ValueError where flags contradict each other."""
    check_output(args)
    for flag in ("json", "random", "profile", "prompt", "prompts_file", "output"):
        if args.interactive and getattr(args, flag):
            raise ValueError(f"--interactive cannot be combined with --{flag}")
    if args.interactive and (args.batch_size > 1 or args.num_samples > 1):
        raise ValueError("--interactive answers one message at a time: one row, one sample")
    drafting = args.draft_checkpoint_path or args.speculate
    if args.draft_checkpoint_path and args.speculate:
        raise ValueError("--draft_checkpoint_path and --speculate exclude each other")
    if args.no_speculate and drafting:
        raise ValueError("--no_speculate contradicts --speculate and --draft_checkpoint_path")
    if (args.speculate_k or args.compare) and not drafting:
        raise ValueError("--speculate_k and --compare need --draft_checkpoint_path or --speculate")
    if drafting and (args.batch_size > 1 or args.engine == "recompute"):
        raise ValueError("drafting is for one row and the KV cache: it cannot be combined with "
                         "--batch_size or --engine recompute")
    if args.json_schema and (drafting or args.random or args.ignore_eos):
        raise ValueError("--json_schema cannot be combined with drafting, --random or --ignore_eos")
    if args.compare and (args.interactive or many(args)):
        raise ValueError("--compare is for one prompt")
    if args.prompts_file and args.prompt:
        raise ValueError("--prompt and --prompts_file exclude each other")
    if many(args) and (args.num_samples > 1 or args.profile or args.engine == "recompute"):
        raise ValueError("several prompts, or --output, cannot be combined with --num_samples, "
                         "--profile or --engine recompute")
    asked = args.system_prompt or args.chat_template_kwargs
    if asked and not (args.interactive or args.chat or args.prompts_file):
        raise ValueError("--system_prompt and --chat_template_kwargs are for --chat, --interactive "
                         "and --prompts_file")
