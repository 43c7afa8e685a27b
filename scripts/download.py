"""Download a model from the Hugging Face hub into checkpoints/ORG/NAME.

    python scripts/download.py --repo_id meta-llama/Llama-3.1-8B
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from gpt_faster.cli.common import guarded  # noqa: E402
from gpt_faster.cli.parser import Parser  # noqa: E402
from gpt_faster.formats.hub import download  # noqa: E402


def run(argv=None) -> int:
    p = Parser(description="Download a model from the Hugging Face hub into checkpoints/ORG/NAME.")
    p.add_argument("--repo_id", required=True, help="org/name")
    p.add_argument("--hf_token", help="for gated models; default: HF_TOKEN, or `hf auth login`")
    args = p.parse_args(argv)
    print(download(args.repo_id, Path("checkpoints") / args.repo_id, args.hf_token))
    return 0


sys.exit(guarded(run))
