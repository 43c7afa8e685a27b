"""The argument parser of all commands and scripts. It names the flag that an unknown one means.

    parser = Parser(description="…", formatter_class=Help)
"""

import argparse
import difflib
import re
import sys

from gpt_faster.cli.common import fail

# What llama.cpp, vLLM, transformers, mlx-lm and other tools call our flags. A key that is no flag
# says what to do instead.
OTHER_NAMES = {
    "--checkpoint_path": "model_path model_name model_name_or_path model_id pretrained checkpoint "
                         "checkpoint_dir ckpt ckpt_path ckpt_dir hf hf_repo repo_id model_args",
    "--device": "gpu cuda device_map main_gpu ngl n_gpu_layers gpu_layers tensor_split",
    "--dtype": "torch_dtype precision data_type",
    "--prompt": "p text input message query prompts",
    "--max_new_tokens": "n n_predict predict max_tokens max_token max_length max_gen_len gen_len "
                        "max_gen_toks num_predict num_tokens n_tokens max_completion_tokens",
    "--num_samples": "num_return_sequences n_samples num_beams n_completions",
    "--batch_size": "b bs np parallel n_parallel max_num_seqs max_batch_size ubatch_size",
    "--stop": "r reverse_prompt stop_token stop_string stop_strings stop_sequence stop_sequences "
              "stop_words extra_eos_token",
    "--ignore_eos": "no_eos ignore_eos_token",
    "--temperature": "temp",
    "--repetition_penalty": "repeat_penalty rep_penalty",
    "--temperature 0": "greedy do_sample no_sample",
    "--seed": "s random_seed rng_seed",
    "--draft_checkpoint_path": "md model_draft draft speculative_model assistant_model",
    "--speculate_k": "draft_max draft_n num_draft_tokens num_speculative_tokens "
                     "num_assistant_tokens",
    "OMP_NUM_THREADS=N before the command": "t threads n_threads num_threads threads_batch",
    "torchrun --nproc_per_node=N": "tp tp_size tensor_parallel_size num_gpus",
    "--prompts_file": "f file prompt_file prompts_path input_file input_path bf binary_file",
    "--output": "out output_file output_path outfile save o mlx_path",
    "--json": "output_format output_json as_json",
    "--interactive": "i cnv conversation chat_mode repl",
    "--system_prompt": "sys sys_prompt system system_message sp",
    "--chat_template_kwargs": "chat_template_args chat_template_config template_kwargs",
    "--json_schema": "j json_schema_file grammar guided_json response_format",
    "--max_seq_length": "c ctx ctx_size n_ctx context context_length max_model_len "
                        "max_position_embeddings max_kv_size max_context_len num_ctx",
    "--kv_cache": "kv_cache_dtype kv_cache_type cache_dtype cache_type cache_type_k cache_type_v "
                  "ctk ctv kv_bits kv_dtype kv_quant quantized_cache cache_implementation",
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
}


class Help(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action):
        has_no_default = action.default in (None, False, "", [])
        return action.help if has_no_default else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """argparse that also accepts dashes for underscores, names the flag that was meant, and has
    --debug."""

    unknown = ()                                   # arguments that look like flags and are none

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.add_argument("--debug", action="store_true", help="show the traceback of an error; "
                          "so does GPT_FASTER_DEBUG=1 in the environment")

    def parse_args(self, args=None, namespace=None):
        def underscores(match):
            return "--" + match[0][2:].replace("-", "_")

        args = sys.argv[1:] if args is None else args
        args = [re.sub(r"^--[a-z]+(-[a-z]+)+(?==|$)", underscores, arg) for arg in args]
        end = args.index("--") if "--" in args else len(args)
        self.unknown = [arg for arg in args[:end] if self._is_unknown(arg)]
        for arg in self.unknown:
            if not arg.startswith("--") and arg[:2] in self._option_string_actions:
                self.error(f"unrecognized arguments: {arg}")   # -model: argparse reads -m odel
        return super().parse_args(args, namespace)

    def error(self, message):
        fail(self.with_hint(message))

    def with_hint(self, message: str) -> str:
        """argparse's message, with the flags that unknown ones probably mean."""
        is_about_names = message.startswith(("unrecognized", "one of the", "the following"))
        hints = [self.meant(arg) for arg in self.unknown] if is_about_names else []
        hints = [hint for hint in dict.fromkeys(hints) if hint]
        return f"{message} (did you mean {', '.join(hints)}?)" if hints else message

    def _is_unknown(self, arg: str) -> bool:
        name = arg.partition("=")[0]
        if not re.match("--?[a-zA-Z]", name) or " " in name:
            return False                           # a value
        known = self._option_string_actions
        if name.startswith("--"):                  # argparse completes flags
            return not any(flag.startswith(name) for flag in known)
        return name[:2] not in known or len(name) > 2 and bool(self.meant(name, cutoff=0.99))

    def meant(self, arg: str, cutoff: float = 0.7) -> str | None:
        """An unknown argument -> the flag that is meant, or what to do instead, or None."""
        word = arg.lstrip("-").partition("=")[0].replace("-", "_").lower()
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        for flag, names in OTHER_NAMES.items():
            is_ours = not flag.startswith("-") or flag.split()[0] in flags
            if is_ours and word in names.split():
                return flag
        close = difflib.get_close_matches(f"--{word}", flags, 1, cutoff)
        return close[0] if close else None
