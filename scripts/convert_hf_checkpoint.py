"""Convert any checkpoint that generate.py reads into model.pth, which loads faster.

    python scripts/convert_hf_checkpoint.py --checkpoint_dir checkpoints/org/name
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from generate import dtype_name  # noqa: E402
from gpt_faster.cli.common import guarded  # noqa: E402
from gpt_faster.cli.parser import Parser  # noqa: E402
from gpt_faster.cli.quantizing import write  # noqa: E402
from gpt_faster.formats.hub import output_path, resolve  # noqa: E402
from gpt_faster.formats.load import read_checkpoint  # noqa: E402
from gpt_faster.formats.quantize_on_load import with_fp4  # noqa: E402


def run(argv=None) -> int:
    p = Parser(description="Convert a checkpoint to model.pth.")
    p.add_argument("--checkpoint_dir", "--checkpoint_path", "--model", "-m", required=True,
                   metavar="PATH", help="a directory or a file")
    p.add_argument("--output", type=Path, metavar="FILE",
                   help="default: model.pth in the directory, or checkpoints/NAME/model.pth")
    p.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], type=dtype_name,
                   help="default: that of the source (bfloat16 for a quantized GGUF)")
    args = p.parse_args(argv)
    path = resolve(args.checkpoint_dir)
    source = with_fp4(read_checkpoint(path))
    output = args.output or output_path(path, "model.pth")
    write(source, output, args.dtype and getattr(torch, args.dtype))
    print(output)
    return 0


sys.exit(guarded(run))
