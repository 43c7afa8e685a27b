"""quantize.py's command: quantize a checkpoint, by rounding or GPTQ, into one file.

    python quantize.py --checkpoint_path org/name --mode int4 --groupsize 32
"""

import os
from pathlib import Path

import torch

import quantize
from checkpoint import Checkpoint
from generate import check_ids, dtype_name, log, number, pick_device
from gpt_faster.cli.common import guarded
from gpt_faster.cli.flags import add_adapter, add_no_bos
from gpt_faster.cli.parser import Help, Parser
from gpt_faster.devices import pick_dtype
from gpt_faster.formats.hub import output_path, resolve
from gpt_faster.formats.load import load_model, read_checkpoint
from gpt_faster.formats.quantize_on_load import note, quantized
from gpt_faster.kernels.compile import compile_model
from gpt_faster.quantization import budget, calibrate
from gpt_faster.quantization.calibration_text import calibration_text, generate_text
from gpt_faster.text import tokenizer_files
from gpt_faster.text.tokenizer_files import window_prefix
from quantize import MODES, Scheme, scheme_named


def main() -> int:
    return guarded(run) if os.environ.get("RANK", "0") == "0" else 0       # torchrun: rank 0 only


def build_parser() -> Parser:
    p = Parser(description="Quantize a checkpoint into one file.", formatter_class=Help)
    add = p.add_argument
    quantize.add_flags(
        p, "any checkpoint that generate.py reads; default: the model of quickstart.sh",
        (*MODES, "int4-gptq"), "; int4-gptq: GPTQ, fitted to calibration activations")
    add_adapter(add)
    add("--bits", type=number(float, 4, 8.5), metavar="N",
        help="int4: max average bits per linear weight, including scales; the layers most "
             "sensitive to int4 get int8")
    add("--output", type=Path, metavar="FILE",
        help="default: model_int8.pth, model_int4.g32.pth or model_int4-gptq.g32.pth next to "
             "the source, or in checkpoints/NAME for a GGUF or hub model")
    add("--device", default="auto", help="device to compute on: auto, cpu, cuda, cuda:1, mps, xpu")
    add = p.add_argument_group("int4-gptq and --bits").add_argument
    add("--calibration_file", metavar="FILE",
        help="UTF-8 calibration text; default: half text that the model generates, half "
             "Python's documentation")
    add("--calibration_tasks", nargs="+", default=[], metavar="TASK",
        help="calibrate on the text of these lm-eval tasks instead")
    add("--include_path", metavar="DIR", help="a directory of additional lm-eval tasks")
    add("--calibration_limit", type=number(int, 2), default=64, help="max calibration windows")
    add("--calibration_seq_length", type=number(int, 2), default=512, help="tokens per window")
    add("--pad_calibration_inputs", action="store_true",
        help="also use the last, shorter window, padded with zeros")
    add_no_bos(add)
    add("--percdamp", type=number(float, 0, above=True), default=0.01,
        help="dampening added to the Hessian's diagonal, as a fraction of its mean")
    add("--blocksize", type=number(int, 1), default=128, help="columns per GPTQ block")
    add("--act_order", action="store_true", default=True,
        help="quantize columns with the largest activations first (default); same file layout")
    add("--no_act_order", action="store_false", dest="act_order",
        help="quantize columns from left to right")
    add("--dtype", default="auto", choices=["auto", "bfloat16", "float16", "float32"],
        type=dtype_name,
        help="dtype of calibration; auto: bfloat16, or float32 on a CPU without it")
    return p


def run(argv=None) -> int:
    args = build_parser().parse_args(argv)
    device = pick_device(args.device)
    path = resolve(args.checkpoint_path)
    source = read_checkpoint(path, resolve(args.adapter) if args.adapter else None)
    mode = args.mode.removesuffix("-gptq")
    use_gptq = mode != args.mode
    scheme = scheme_named(mode, args.groupsize)
    suffix = scheme.suffix + (f"-{args.bits:g}bits" if args.bits else "")
    output = args.output or output_path(path, f"model_{args.label}{args.mode}{suffix}.pth")
    if output.is_dir() or output.suffix not in (".pth", ".pt"):
        raise ValueError(f"--output {output}: expected a file name ending in .pth")
    if args.calibration_file and args.calibration_tasks:
        raise ValueError("--calibration_file and --calibration_tasks are mutually exclusive")
    if args.bits and mode != "int4":
        raise ValueError("--bits requires --mode int4 or int4-gptq")
    args_of_quantized = source, mode, args.groupsize, args.quantize_head, device
    quantized_source, solver, int8_tensors = quantized(*args_of_quantized), None, {}
    if use_gptq or args.bits:
        dtype = pick_dtype(args.dtype, device, source.cfg, many_rows=True)
        tokens = calibration_tokens(args, source, device)
        if args.bits:
            int8_tensors = choose_int8_tensors(args, source, tokens, device, dtype)
        if use_gptq:
            solver = calibrate.Solver(source, tokens, device, dtype, scheme, args.percdamp,
                                      args.blocksize, args.act_order, int8_tensors)
        quantized_source = quantized(*args_of_quantized, solver, int8_tensors)
    if text := note(source, mode, args.groupsize, use_gptq, int8_tensors):
        log(text)
    write(quantized_source, output, quiet=bool(use_gptq))
    if use_gptq:
        log(solver.summary())
    print(output)
    return 0


def calibration_tokens(args, source: Checkpoint, device) -> torch.Tensor:
    """Calibration windows [n, T]. ValueError if text, tokenizer and model do not match."""
    text = calibration_text(args.calibration_file, args.calibration_tasks, args.include_path)
    length, limit = args.calibration_seq_length, args.calibration_limit
    if length > source.cfg.context:
        raise ValueError(f"--calibration_seq_length {length} exceeds the model's context of "
                         f"{source.cfg.context}")
    tokenizer = tokenizer_files.load_for(source)
    prefix = window_prefix(tokenizer, length, args.no_bos)
    ids = tokenizer.encode(text, bos=False if prefix else None)
    check_ids(ids, source.cfg.vocab_size)
    has_calibration_text = args.calibration_file or args.calibration_tasks
    n_written = 0 if has_calibration_text else limit // 2
    tokens = calibrate.split_windows(ids, length, limit - n_written, args.pad_calibration_inputs,
                                     prefix)
    if n_written:
        model = load_model(source, pick_dtype(args.dtype, device, source.cfg), device)
        if device.type == "cpu":
            compile_model(model)
        eos_ids = set(source.eos_ids)
        tokens = torch.cat((generate_text(model, tokenizer, eos_ids, n_written, length), tokens))
    log(f"calibrating on {len(tokens)} windows of {length} tokens")
    return tokens


def choose_int8_tensors(args, source: Checkpoint, tokens: torch.Tensor, device,
                  dtype: torch.dtype) -> dict[str, Scheme]:
    """The tensors to quantize to int8. ValueError if --bits is too small even for int4."""
    scheme = scheme_named("int4", args.groupsize)
    model = load_model(source, dtype, device)
    budget.choose(model, {}, scheme, args.bits)    # raises ValueError early
    chosen = budget.choose(model, budget.measure(model, tokens, scheme), scheme, args.bits)
    log(f"{len(chosen)} linears get int8")
    return dict.fromkeys(chosen, scheme_named("int8"))


def write(source: Checkpoint, output: Path, dtype: torch.dtype | None = None,
          quiet: bool = False) -> None:
    """quantize.write(), with tokenizers of all formats."""
    quantize.write(source, output, tokenizer_files.load, dtype, quiet)
