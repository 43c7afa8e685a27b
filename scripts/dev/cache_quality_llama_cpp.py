"""What llama.cpp's KV caches of 8 and 4 bits cost, on the texts and windows of cache_quality.py.

llama-server scores no text, but a token that a logit bias forces is returned with its probability
without the bias. So the text is decoded token by token, which is also how a cache is mostly read.
Tokens that end within a character have no probability there, and are left out.

    python scripts/dev/cache_quality_llama_cpp.py -m model.gguf --window 512 f16 q8_0 q8_0/q4_0 q4_0

The first type is what the others are compared with.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
from cache_quality import CHUNK, TEXTS  # noqa: E402
from unseen import texts  # noqa: E402

from generate import log, number  # noqa: E402
from gpt_faster.bench.machine import describe_machine  # noqa: E402
from gpt_faster.bench.peers import environment  # noqa: E402
from gpt_faster.bench.worker import LlamaCpp, split_cache_types  # noqa: E402
from gpt_faster.cli.common import guarded  # noqa: E402
from gpt_faster.cli.evaluate import windows  # noqa: E402
from gpt_faster.cli.parser import Parser  # noqa: E402
from gpt_faster.formats.load import open_checkpoint  # noqa: E402
from gpt_faster.text import tokenizer_files  # noqa: E402
from model import cache_bytes  # noqa: E402

BYTES = {"f32": 4, "f16": 2, "bf16": 2, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32,
         "q4_1": 20 / 32, "q4_0": 18 / 32, "iq4_nl": 18 / 32}              # of a value
FORCED = 1000.0                                    # larger than any difference of logits


class Scorer(LlamaCpp):
    """llama-server with a cache of these types."""

    def __init__(self, path: Path, cache_types: tuple[str, str], threads: int, length: int):
        self.args = argparse.Namespace(path=path, cache_types=cache_types, threads=threads,
                                       length=length)
        self.binary = environment("llama.cpp") / "bin/llama-server"
        if not self.binary.exists():
            raise ValueError("llama.cpp is not installed: run scripts/install_peers.sh")
        self.log = tempfile.TemporaryFile("w+", errors="replace")
        self.process = None
        self._start(1)

    def token_nats(self, ids: list[int], n: int) -> list[float]:
        """-log p of the last n tokens, as far as the server says it."""
        nats = [self._nats_of(ids[:i], ids[i]) for i in range(len(ids) - n, len(ids))]
        return [x for x in nats if x is not None]

    def _nats_of(self, prompt: list[int], target: int) -> float | None:
        with self._open("/completion", dict(
                prompt=prompt, n_predict=1, temperature=0, top_k=1, samplers=["top_k"], n_probs=1,
                cache_prompt=True, logit_bias=[[target, FORCED]])) as response:
            answer = json.load(response)
        if "completion_probabilities" not in answer:           # half a character
            return None
        token, = answer["completion_probabilities"]
        if token["id"] != target:
            raise ValueError(f"llama-server generated token {token['id']} instead of {target}")
        return -token["logprob"]


def run(argv: list[str] | None = None) -> int:
    p = Parser(description=__doc__.splitlines()[0])
    p.add_argument("--model", "-m", type=Path, required=True)
    p.add_argument("types", nargs="+", help="f16, q8_0, q8_0/q4_0 (keys/values), …")
    p.add_argument("--window", type=number(int, 2), default=512)
    p.add_argument("--limit", type=number(int, 2), default=1024, help="tokens of each text")
    p.add_argument("--only", help="these texts, comma-separated; default: all three")
    p.add_argument("--threads", type=number(int, 1), default=1)
    p.add_argument("--texts", type=Path, default=ROOT / "checkpoints/quality/texts",
                   help="folder of the texts, filled on first use")
    args = p.parse_args(argv)
    types_of = {name: split_cache_types(f"llama.cpp@{name}")[1] for name in args.types}
    start, source = time.perf_counter(), open_checkpoint(args.model)
    tokenizer = tokenizer_files.load(source.tokenizer)
    prefix = tokenizer_files.window_prefix(tokenizer, args.window)
    chosen = args.only.split(",") if args.only else TEXTS
    ids_of = {text: tokenizer.encode(content)[:args.limit]
              for text, content in texts(args.texts).items() if text in chosen}
    rows_of = {text: windows(ids, args.window, args.window, prefix)
               for text, ids in ids_of.items()}
    first = {}                                     # text -> nats of its tokens with the first type
    n_values = cache_bytes(source.cfg, 1, args.window, CHUNK, torch.bfloat16) / 2 / args.window
    for name, types in types_of.items():
        scorer = Scorer(args.model, types, args.threads, args.window + 8)
        by_text = {}
        for text, rows in rows_of.items():
            nats = torch.tensor([x for ids, n in rows for x in scorer.token_nats(ids, n)])
            expected = first.setdefault(text, nats)
            by_text[text] = dict(perplexity=math.exp(nats.mean()),
                                 shift=float((nats - expected).abs().mean()))
            log(f"{name}, {text}: {len(nats)} tokens, {time.perf_counter() - start:.0f} seconds")
        scorer.process.kill()
        n_bytes = n_values * (BYTES[types[0]] + BYTES[types[1]]) / 2
        print(json.dumps(dict(cache=f"llama.cpp {name}", window=args.window, limit=args.limit,
                              bytes_per_position=n_bytes, **by_text)), flush=True)
    print(json.dumps(dict(cache_table=args.model.name, peer="llama.cpp", window=args.window,
                          seconds=round(time.perf_counter() - start),
                          **describe_machine(torch.device("cpu")))))
    return 0


if __name__ == "__main__":
    sys.exit(guarded(run))
