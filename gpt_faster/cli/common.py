"""Shared by all commands and scripts: the argument parser and one-line errors.

    sys.exit(guarded(run))                         # run(argv) -> exit status
"""

import argparse
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from checkpoint import Unforeseen, first_line, is_out_of_memory
from generate import OTHER_NAMES, log
from generate import Parser as CoreParser

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")         # huge pages: faster weight reads


def fail(message) -> None:
    log(f"{Path(sys.argv[0]).name}: error: {message}")
    sys.exit(2)


def guarded(run: Callable, argv: list[str] | None = None) -> int:
    """Run a command -> its exit status: 2 on bad input (one line on stderr), 130 on Ctrl-C.

    Other exceptions are bugs: they keep their traceback and Python's status 1.
    """
    with suppress(AttributeError):                 # not every terminal is UTF-8
        sys.stdout.reconfigure(errors="replace")
    try:
        return run(argv)
    except BrokenPipeError:                        # e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        log("interrupted")
        return 130
    except Exception as e:
        message = error_line(e)
        if message is None:
            raise
        if is_debug(argv):
            print_traceback(e)
        fail(message)


def error_line(e: Exception) -> str | None:
    """The error in one line, or None for a bug, which needs its traceback."""
    if is_out_of_memory(e):
        return ("out of memory: try a smaller model, --max_seq_length or --batch_size "
                f"({first_line(e)})")
    if isinstance(e, OSError | ValueError | ImportError | Unforeseen):
        return one_line(str(e))
    return None


def one_line(text: str) -> str:
    """Printable text of at most 1000 characters: messages may quote arbitrary file contents."""
    text = " ".join(text.split("\n"))
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return text if len(text) <= 1000 else text[:1000] + "…"


def print_traceback(e: Exception) -> None:
    """Print the traceback with all causes, including those hidden by `from None`."""
    error = e
    while error is not None:
        error.__suppress_context__ = False
        error = error.__cause__ or error.__context__
    traceback.print_exception(e)


def is_debug(argv: list[str] | None) -> bool:
    """Whether --debug or GPT_FASTER_DEBUG=1 asks for tracebacks."""
    has_flag = "--debug" in map(str, sys.argv if argv is None else argv)
    return has_flag or os.environ.get("GPT_FASTER_DEBUG", "0") not in ("", "0")


class Help(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action):
        has_no_default = action.default in (None, False, "", [])
        return action.help if has_no_default else super()._get_help_string(action)


class Parser(CoreParser):
    """The core's parser, with --debug and one-line errors."""

    other_names = {**OTHER_NAMES, **{
        "--prompts_file": "f file prompt_file prompts_path input_file input_path bf binary_file",
        "--output": "out output_file output_path outfile save o mlx_path",
        "--json": "output_format output_json as_json",
        "--interactive": "i cnv conversation chat_mode repl",
        "--system_prompt": "sys sys_prompt system system_message sp",
        "--chat_template_kwargs": "chat_template_args chat_template_config template_kwargs",
        "--json_schema": "j json_schema_file grammar guided_json response_format",
        "--max_seq_length": "c ctx ctx_size n_ctx context context_length max_model_len "
                            "max_position_embeddings max_kv_size max_context_len num_ctx",
        "--prefill_chunk": "ub prefill_step_size max_num_batched_tokens chunk_size",
        "--quantize": "q quant quantization q_bits load_in_4bit load_in_8bit load_format",
        "--groupsize": "group_size q_group_size",
        "--mode": "quant_mode q_mode bits w_bit qtype ftype outtype quant_type",
        "--adapter": "lora lora_path adapter_path peft peft_model lora_modules",
        "--calibration_file": "dataset calib_data calib_file calibration_dataset calibration_data",
        "--calibration_limit": "num_calibration_samples n_samples nsamples",
        "--calibration_seq_length": "seqlen calib_seqlen sequence_length",
        "--perplexity": "ppl text_file dataset",
        "--tasks": "task benchmarks eval_tasks",
        "--num_fewshot": "fewshot n_shot shots",
        "--limit": "num_examples n_examples",
        "--stride": "ppl_stride",
        "--served_name": "served_model_name alias a",
        "--repetitions": "reps num_iters iterations",
    }}

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.add_argument("--debug", action="store_true", help="show the traceback of an error; "
                          "so does GPT_FASTER_DEBUG=1 in the environment")

    def error(self, message):
        fail(self.with_hint(message))
