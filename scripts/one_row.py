"""Perplexity through the code that decodes: compiled, a token at a time, beside eval.py's way.

    python scripts/one_row.py [a model, instead of the default one]
"""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from cli.common import Parser, english_text, guarded
from cli.evaluate import score
from generate import build_steps, load_model

N, WINDOWS = 512, 4
SCHEMES = {"bfloat16": {}, "int8": dict(mode="int8"), "int4-g64": dict(mode="int4", groupsize=64)}


@torch.inference_mode()
def one_by_one(model, ids: list[int]) -> list[float]:
    """The log-probability of each token but the first."""
    model.setup_cache(1, len(ids))
    found = []
    for i, (token, following) in enumerate(zip(ids, ids[1:])):
        logits = model(torch.tensor([[token]]), torch.tensor([i]), 1, len(ids))[0, -1]
        found.append(float(logits[following] - logits.logsumexp(-1)))
    return found


def run(argv=None) -> int:
    p = Parser(description=__doc__.splitlines()[0])
    p.add_argument("model", nargs="?", help="anything that generate.py reads")
    path = p.parse_args(argv).model
    for name, how in SCHEMES.items():
        (model, _, tokenizer), whole, single = load_model(path, **how), [], []
        n = min(N, model.cfg.context)
        ids = tokenizer.encode(english_text(held_out=True))[:n * WINDOWS]
        parts = [ids[at:at + n] for at in range(0, len(ids), n)]
        for part in parts:
            whole += [logp for logp, _ in score(model, [(part, len(part) - 1)])[0]]
        build_steps(model, "compile")
        for part in parts:
            single += one_by_one(model, part)
        n, most = len(whole), max(abs(a - b) for a, b in zip(whole, single))
        print(f"{name}: {math.exp(-sum(whole) / n):.3f} whole, {math.exp(-sum(single) / n):.3f} a "
              f"token at a time; a log-probability differs by {most:.2f} at most; {n} tokens",
              flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(guarded(run))
