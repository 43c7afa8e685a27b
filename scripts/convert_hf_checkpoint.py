"""Convert anything that generate.py reads into one model.pth, which loads faster.

    python scripts/convert_hf_checkpoint.py --checkpoint_dir checkpoints/org/name
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import checkpoint as checkpoints  # noqa: E402
import tokenizer as tokenizers  # noqa: E402
from cli import Parser, guarded  # noqa: E402


def run(argv=None) -> int:
    p = Parser(description="Convert a checkpoint to model.pth.")
    p.add_argument("--checkpoint_dir", required=True, metavar="PATH", help="a directory or a file")
    p.add_argument("--output", type=Path, metavar="FILE",
                   help="default: model.pth in the directory, or checkpoints/NAME/model.pth")
    p.add_argument("--dtype", choices=["bfloat16", "float16", "float32"],
                   help="default: what the source has (a GGUF's packed weights become bfloat16)")
    args = p.parse_args(argv)
    path = checkpoints.find(args.checkpoint_dir)
    source = checkpoints.read(path)
    directory = path if path.is_dir() else Path("checkpoints") / path.stem
    output = args.output or directory / "model.pth"
    output.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = source.tokenizer                   # stays where it is, if that is beside the output
    if not isinstance(tokenizer, Path) or tokenizer.resolve() != output.parent.resolve():
        tokenizer = tokenizers.load(tokenizer).state()
    n = len(source.tensors)

    def progress(i):
        if sys.stderr.isatty():
            print(f"\r{i}/{n} tensors", end="\n" if i == n else "", file=sys.stderr, flush=True)

    checkpoints.save(source, output, tokenizer if isinstance(tokenizer, dict) else None,
                     args.dtype and getattr(torch, args.dtype), progress)
    print(output)
    return 0


sys.exit(guarded(run))
