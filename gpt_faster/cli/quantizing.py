"""quantize.py's command: a checkpoint's weights, rounded or by GPTQ, into one file.

    python quantize.py --checkpoint_path org/name --mode int4 --groupsize 32
"""

import os
from pathlib import Path

import torch

import quantize
from checkpoint import Checkpoint
from generate import log, number, pick_device
from gpt_faster.cli.common import Help, Parser, guarded
from gpt_faster.cli.flags import add_adapter
from gpt_faster.devices import pick_dtype
from gpt_faster.formats.hub import output_path, resolve
from gpt_faster.formats.load import load_model, read_checkpoint
from gpt_faster.formats.quantized import note, quantized
from gpt_faster.kernels.compile import compile_model
from gpt_faster.quantization import budget, calibrate
from gpt_faster.quantization.calibration_text import calibration_text, generate_text
from gpt_faster.text import tokenizer_files
from quantize import MODES, Scheme, scheme_named


def main() -> int:
    return guarded(run) if os.environ.get("RANK", "0") == "0" else 0       # one of torchrun's


def build_parser() -> Parser:
    p = Parser(description="Quantize a checkpoint into one file.", formatter_class=Help)
    add = p.add_argument
    quantize.add_flags(
        p, "anything that generate.py reads; default: the model that quickstart.sh fetched",
        (*MODES, "int4-gptq"), "; int4-gptq: fit the rounding to what the layers are fed")
    add_adapter(add)
    add("--bits", type=number(float, 4, 8.5), metavar="N",
        help="int4: at most so many a weight of the linears, scales counted; those that four bits "
             "harm most get eight")
    add("--output", type=Path, metavar="FILE",
        help="default: model_int8.pth, model_int4.g32.pth or model_int4-gptq.g32.pth beside the "
             "source, or in checkpoints/NAME for a GGUF or hub model")
    add("--device", default="auto", help="where to compute: auto, cpu, cuda, cuda:1, mps, xpu")
    add = p.add_argument_group("int4-gptq and --bits").add_argument
    add("--calibration_file", metavar="FILE",
        help="UTF-8 text to calibrate on; default: what the model itself writes, and as much of "
             "Python's own documentation")
    add("--calibration_tasks", nargs="+", default=[], metavar="TASK",
        help="or the text of these lm-eval tasks")
    add("--include_path", metavar="DIR", help="where lm-eval finds more tasks")
    add("--calibration_limit", type=number(int, 2), default=64, help="windows of text at most")
    add("--calibration_seq_length", type=number(int, 2), default=512, help="tokens in a window")
    add("--pad_calibration_inputs", action="store_true",
        help="use the last window too, which is shorter, filled up with zeros")
    add("--percdamp", type=number(float, 0, above=True), default=0.01,
        help="added to the Hessian's diagonal, as a share of its mean")
    add("--blocksize", type=number(int, 1), default=128, help="columns solved at a time")
    add("--act_order", action="store_true", default=True,
        help="the columns with the largest inputs first, by default; the layout stays the same")
    add("--no_act_order", action="store_false", dest="act_order", help="from left to right")
    add("--dtype", default="auto", choices=["auto", "bfloat16", "float16", "float32"],
        help="of the calibration's forward passes; auto: bfloat16, or float32 on a CPU without it")
    return p


def run(argv=None) -> int:
    args = build_parser().parse_args(argv)
    device = pick_device(args.device)
    path = resolve(args.checkpoint_path)
    source = read_checkpoint(path, resolve(args.adapter) if args.adapter else None)
    mode = args.mode.removesuffix("-gptq")
    gptq = mode != args.mode
    scheme = scheme_named(mode, args.groupsize)
    suffix = scheme.suffix + (f"-{args.bits:g}bits" if args.bits else "")
    output = args.output or output_path(path, f"model_{args.label}{args.mode}{suffix}.pth")
    if output.is_dir() or output.suffix not in (".pth", ".pt"):
        raise ValueError(f"--output {output}: expected a file that ends in .pth")
    if args.calibration_file and args.calibration_tasks:
        raise ValueError("--calibration_file and --calibration_tasks exclude each other")
    if args.bits and mode != "int4":
        raise ValueError("--bits is a budget for --mode int4 and int4-gptq")
    choices = source, mode, args.groupsize, args.quantize_head, device
    new, solver, others = quantized(*choices), None, {}
    if gptq or args.bits:
        dtype = pick_dtype(args.dtype, device, source.cfg, many_rows=True)
        tokens = calibration_tokens(args, source, device)
        if args.bits:
            others = within_budget(args, source, tokens, device, dtype)
        if gptq:
            solver = calibrate.Solver(source, tokens, device, dtype, scheme, args.percdamp,
                                      args.blocksize, args.act_order, others)
        new = quantized(*choices, solver, others)
    if text := note(source, mode, args.groupsize, gptq, others):
        log(text)
    write(new, output, quiet=bool(gptq))
    if gptq:
        log(solver.summary())
    print(output)
    return 0


def calibration_tokens(args, source: Checkpoint, device) -> torch.Tensor:
    """[n, T]. ValueError where text, tokenizer and model do not fit."""
    text = calibration_text(args.calibration_file, args.calibration_tasks, args.include_path)
    length, limit = args.calibration_seq_length, args.calibration_limit
    if length > source.cfg.context:
        raise ValueError(f"--calibration_seq_length {length} exceeds the model's context of "
                         f"{source.cfg.context}")
    tokenizer = tokenizer_files.load_for(source)
    ids = tokenizer.encode(text)
    if max(ids, default=0) >= source.cfg.vocab_size:
        raise ValueError(f"the tokenizer gives id {max(ids)}, but the model has "
                         f"{source.cfg.vocab_size} tokens: they do not belong together")
    given = args.calibration_file or args.calibration_tasks
    n_written = 0 if given else limit // 2
    tokens = calibrate.split_windows(ids, length, limit - n_written, args.pad_calibration_inputs)
    if n_written:
        model = load_model(source, pick_dtype(args.dtype, device, source.cfg), device)
        if device.type == "cpu":
            compile_model(model)
        eos_ids = set(source.eos_ids)
        tokens = torch.cat((generate_text(model, tokenizer, eos_ids, n_written, length), tokens))
    log(f"calibrating on {len(tokens)} windows of {length} tokens")
    return tokens


def within_budget(args, source: Checkpoint, tokens: torch.Tensor, device,
                  dtype: torch.dtype) -> dict[str, Scheme]:
    """The tensors that get eight bits. ValueError where the budget is too small for four."""
    scheme = scheme_named("int4", args.groupsize)
    model = load_model(source, dtype, device)
    budget.choose(model, {}, scheme, args.bits)    # is it large enough?
    chosen = budget.choose(model, budget.measure(model, tokens, scheme), scheme, args.bits)
    log(f"{len(chosen)} linears get eight bits")
    return dict.fromkeys(chosen, scheme_named("int8"))


def write(source: Checkpoint, output: Path, dtype: torch.dtype | None = None,
          quiet: bool = False) -> None:
    """quantize.write() with a tokenizer of any format."""
    quantize.write(source, output, tokenizer_files.load, dtype, quiet)
