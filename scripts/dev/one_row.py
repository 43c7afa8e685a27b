"""Compare perplexity computed by compiled single-token decoding with that of eval.py.

    python scripts/dev/one_row.py [a model, instead of the default one]
"""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from gpt_faster.cli.common import guarded
from gpt_faster.cli.evaluate import score
from gpt_faster.cli.parser import Parser
from gpt_faster.kernels.compile import compile_steps
from gpt_faster.loading import load_model
from gpt_faster.quantization.calibrate import split_windows
from gpt_faster.text.english import english_text
from gpt_faster.text.tokenizer_files import window_prefix

WINDOW, N_WINDOWS = 512, 4                         # tokens per window, windows
SCHEMES = {"bfloat16": None, "int8": "int8", "int4-g64": "int4-g64"}


@torch.inference_mode()
def decode_log_probs(model, ids: list[int]) -> list[float]:
    """Log-probabilities of all tokens but the first, decoded one at a time with the KV cache."""
    model.setup_cache(1, len(ids))
    log_probs = []
    for i, (token, following) in enumerate(zip(ids, ids[1:])):
        logits = model(torch.tensor([[token]]), torch.tensor([i]), 1, len(ids))[0, -1]     # [V]
        log_probs.append(float(logits[following] - logits.logsumexp(-1)))
    return log_probs


def compare(path: str | None, name: str) -> str:
    """Both perplexities of the model in one scheme, as a line."""
    model, _, tokenizer = load_model(path, scheme=SCHEMES[name])
    window = min(WINDOW, model.cfg.context)
    ids = tokenizer.encode(english_text(held_out=True), bos=False)
    prefix = window_prefix(tokenizer, window)
    parts = split_windows(ids, window, N_WINDOWS, False, prefix).tolist()
    whole = []
    for part in parts:
        whole += [log_prob for log_prob, _ in score(model, [(part, len(part) - 1)])[0]]
    compile_steps(model)                           # decode below is compiled
    single = []
    for part in parts:
        single += decode_log_probs(model, part)
    n = len(whole)
    largest = max(abs(a - b) for a, b in zip(whole, single))
    return (f"{name}: {math.exp(-sum(whole) / n):.3f} whole, {math.exp(-sum(single) / n):.3f} a "
            f"token at a time; a log-probability differs by {largest:.2f} at most; {n} tokens")


def run(argv: list[str] | None = None) -> int:
    p = Parser(description=__doc__.splitlines()[0])
    p.add_argument("model", nargs="?", help="any checkpoint that generate.py reads")
    args = p.parse_args(argv)
    for name in SCHEMES:
        print(compare(args.model, name), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(guarded(run))
