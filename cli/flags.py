"""generate.py's command line: every flag, its default, and which contradict each other.

A default lives here and nowhere else; a model's own generation_config.json may stand in for it. It
knows what can be asked for and nothing of how it is done.

    args = build_parser().parse_args(argv); check(args)
"""

import argparse
import json
from dataclasses import fields
from pathlib import Path

from cli.common import Help, Parser, number
from formats import quantized
from formats.shapes import SHAPES
from sampling import RANGES, SamplingParams

SAMPLING = {name: number(*allowed) for name, allowed in RANGES.items()}    # also of a JSON line
ENGINES = ("recompute", "kv_cache", "compile", "cuda_graph")
HELLO, PREFILL_CHUNK = "Hello, my name is", 512


def build_parser() -> Parser:
    p = Parser(description="Generate text from an open-weight transformer. "
                           "Text goes to stdout, everything else to stderr.", formatter_class=Help)
    add_model(p)
    add_text(p)
    add_sampling(p)
    add = add_speed(p)
    add("--no_speculate", action="store_true",
        help="draft nothing, where the checkpoint has a head for it and drafts are the default")
    add("--compare", action="store_true",
        help="after each sample generate it again without drafts, and print the speedup")
    add_output(p)
    return p


def add_model(p: Parser) -> None:
    add = p.add_argument_group("model").add_argument
    add("--checkpoint_path", "--model", "-m", metavar="PATH_OR_NAME",
        help="a Hugging Face directory, .safetensors, .pth, .pt, .gguf, or a hub name org/name; "
             "default: the model that scripts/quickstart.sh fetched")
    add("--random", metavar="NAME",
        help="a known shape with random weights and no files, for speed trials with an integer "
             "--prompt: " + ", ".join(SHAPES))
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps, xpu")
    add("--dtype", default="auto", choices=["auto", "bfloat16", "float16", "float32"],
        help="of weights and arithmetic; auto: bfloat16, or float16 on a GPU without it")
    add_adapter(add)
    quantized.add_flags(add)
    add("--max_seq_length", type=number(int, 2),
        help="positions to allocate; default: what the prompt and the new tokens need. RoPE of "
             "the kinds dynamic and longrope takes its factors for this length")


def add_text(p: Parser) -> None:
    add = p.add_argument_group("text").add_argument
    add("--prompt", action="append", default=[],
        help="text, or an integer for a synthetic prompt of that many random tokens (in a file "
             "digits are text); repeatable; "
             f"default: {HELLO}")
    add("--prompts_file", type=Path, metavar="FILE",
        help="a prompt a line, or in FILE.jsonl an object a line with prompt or messages, and "
             "perhaps id, max_new_tokens, " + ", ".join(SAMPLING))
    add("--max_new_tokens", type=number(int, 1), default=200, help="new tokens at most")
    add("--num_samples", type=number(int, 1), default=1, help="samples, one after another")
    add("--batch_size", type=number(int, 1), default=1,
        help="copies of the prompt side by side; of several prompts, how many run at a time")
    add("--chat", action="store_true", help="prompts are messages: apply the model's chat template")
    add("--interactive", action="store_true",
        help="a conversation in the terminal, by the model's chat template; /help there")
    add("--system_prompt", metavar="TEXT", help="what a chat begins with")
    add("--chat_template_kwargs", type=json_object, metavar="JSON",
        help='more for the chat template, as {"enable_thinking": false}')
    add("--stop", action="append", default=[], metavar="TEXT",
        help="end before this text appears (repeatable)")
    add("--ignore_eos", action="store_true", help="go on after an end-of-sequence token")
    add("--json_schema", type=Path, metavar="FILE",
        help="the text is JSON that this schema allows (needs llguidance)")


def add_sampling(p: Parser) -> None:
    add = p.add_argument_group(
        "sampling", "The model's own generation_config.json overrides these defaults.").add_argument
    add("--temperature", type=SAMPLING["temperature"], default=0.8, help="0: greedy")
    add("--top_k", type=SAMPLING["top_k"], default=200, help="only the k likeliest tokens; 0: all")
    add("--top_p", type=SAMPLING["top_p"], default=1.0,
        help="only the likeliest tokens that together make up this probability")
    add("--min_p", type=SAMPLING["min_p"], default=0.0,
        help="only tokens at least this fraction as likely as the likeliest")
    add("--top_n_sigma", type=SAMPLING["top_n_sigma"], default=0.0,
        help="only tokens whose logits are at most so many standard deviations below the best; "
             "0: all")
    add("--repetition_penalty", type=SAMPLING["repetition_penalty"], default=1.0,
        help="above 1 makes tokens that already appeared less likely")
    add("--seed", type=SAMPLING["seed"], default=1234, help="of the random draws")


def add_speed(p: Parser):
    """-> the function that adds more of these."""
    add = p.add_argument_group("speed").add_argument
    add("--compile", action="store_true", help="compile the decode step")
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
        help="recompute: no KV cache; kv_cache: eager, the default; compile: as --compile; "
             "cuda_graph: the eager step captured in a CUDA graph")
    return add


def add_output(p: Parser) -> None:
    add = p.add_argument_group("output").add_argument
    add("--json", action="store_true", help="one JSON object per sample and row on stdout, no text")
    add("--output", type=Path, metavar="FILE",
        help="append one JSON object per prompt to FILE; what is there already is not run again")
    add("--profile", type=Path, metavar="FILE",
        help="write a Chrome trace of the last sample to FILE.json")


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
             "finer and slower; float32 models always take it")


def json_object(text: str) -> dict:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got '{text}'")
    return found


def sampling_params(args, **overrides) -> SamplingParams:
    """What the flags say, but where a request says something else."""
    names = SAMPLING.keys() & {field.name for field in fields(SamplingParams)} - {"seed"}
    stated = {name: getattr(args, name) for name in names}     # --seed is of all rows together
    return SamplingParams(**{**stated, **overrides})


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
    if not all(args.stop):
        raise ValueError("--stop needs some text")
    if args.profile and (args.profile.is_dir() or not args.profile.absolute().parent.is_dir()):
        raise ValueError(f"--profile {args.profile}: a file in a directory that exists is needed")
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
