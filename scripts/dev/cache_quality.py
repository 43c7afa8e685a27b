"""What a KV cache of 8 or 4 bits costs: perplexity, KL divergence from the unquantized cache, and
the mean change of -log p of the text's tokens, which cache_quality_llama_cpp.py measures too.

The texts of unseen.py, in windows without overlap; each prompt goes through the cache in chunks.

    python scripts/dev/cache_quality.py -m model.gguf bfloat16 int8 int8/int4 int4 int4:plain

name:plain is without the Hadamard turn. bfloat16 rounds the cache of a float32 model. All variants
share the weights. scripts/dev/cache_quality.sh makes the table in docs/quantization.md.
"""

import copy
import json
import math
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
from unseen import texts  # noqa: E402

from generate import log, number  # noqa: E402
from gpt_faster.bench.machine import describe_machine  # noqa: E402
from gpt_faster.cli.common import guarded  # noqa: E402
from gpt_faster.cli.evaluate import windows  # noqa: E402
from gpt_faster.cli.parser import Parser  # noqa: E402
from gpt_faster.decoding.engines import build_steps  # noqa: E402
from gpt_faster.formats.load import load_model, open_checkpoint  # noqa: E402
from gpt_faster.layers.quantized_cache import CacheFormat, QuantizedCache  # noqa: E402
from gpt_faster.text import tokenizer_files  # noqa: E402
from model import KVCache  # noqa: E402

CHUNK = 256                                        # positions of a call
TEXTS = ("english", "german", "python")


class RoundedCache:
    """A cache in bfloat16 for a model in float32."""

    def replace_cache(self, attn) -> None:
        class Rounded(KVCache):
            def forward(self, slot, k, v, kv_len, batch_idx):
                return super().forward(slot, k.bfloat16().to(k), v.bfloat16().to(v), kv_len,
                                       batch_idx)
        if type(attn.cache) is KVCache:
            attn.cache = Rounded(attn.cache.k.shape, attn.cache.k.dtype, attn.cache.k.device)


class PlainFormat(CacheFormat):
    """Without the turn."""

    def replace_cache(self, attn) -> None:
        super().replace_cache(attn)
        if isinstance(attn.cache, QuantizedCache):
            attn.cache.k_turn = attn.cache.v_turn = 1


def parse(name: str):
    """-> an object for Transformer.kv_cache."""
    if name == "bfloat16":
        return RoundedCache()
    precision, _, how = name.partition(":")
    if how not in ("", "plain"):
        raise ValueError(f"{name}: expected a precision, or precision:plain")
    found = CacheFormat.parse(precision)
    return PlainFormat(found.keys, found.values) if how else found


def variant_of(model, name: str | None, length: int, engine: str):
    """A model with the same weights and a cache of its own; name None: of the model's dtype."""
    shared = {id(p): p for p in model.parameters()}
    new = copy.deepcopy(model, shared)
    new.kv_cache = parse(name) if name else None
    build_steps(new, engine)
    new.setup_cache(1, length, CHUNK)
    return new


def bytes_per_position(model, length: int) -> float:
    """Of all layers, at this length of the cache, as for a model in bfloat16."""
    n = 0
    for layer in model.layers:
        for buffer in layer.attn.buffers():
            wide = buffer.dtype == torch.float32   # stands for bfloat16
            n += buffer.numel() * (2 if wide else buffer.dtype.itemsize) / length
    return n


@torch.inference_mode()
def compare(models: dict, original, rows) -> dict[str, dict[str, float]]:
    """-> per model: perplexity; from the original in nats, mean KL divergence (kl), and mean
    absolute difference of -log p of the text's tokens (shift)."""
    nats, divergence, shift = (dict.fromkeys(models, 0.0) for _ in range(3))
    total = 0
    for ids, n in rows:
        first = len(ids) - n - 1                   # position that predicts the first target
        for a in range(0, len(ids) - 1, CHUNK):
            tokens = torch.tensor([ids[a:min(a + CHUNK, len(ids) - 1)]])
            b = a + tokens.shape[1]
            of_chunk = slice(max(first, a) - a, None)
            targets = torch.tensor(ids[a + 1:b + 1])[of_chunk, None]
            p = expected = None
            for name, model in models.items():
                logits = model(tokens, torch.arange(a, b), b - a, b)[0, of_chunk]
                q = logits.log_softmax(-1)
                of_targets = -q.gather(1, targets)
                if model is original:
                    p, expected = q, of_targets
                nats[name] += float(of_targets.sum())
                shift[name] += float((of_targets - expected).abs().sum())
                divergence[name] += float((p.exp() * (p - q)).sum())
        total += n
    return {name: dict(perplexity=math.exp(nats[name] / total), kl=divergence[name] / total,
                       shift=shift[name] / total)
            for name in models}


def run(argv: list[str] | None = None) -> int:
    p = Parser(description=__doc__.splitlines()[0])
    p.add_argument("--model", "-m", required=True)
    p.add_argument("variants", nargs="+", help="int8, int8/int4, int4:plain, bfloat16, …")
    p.add_argument("--window", type=number(int, 2), default=512)
    p.add_argument("--limit", type=number(int, 2), default=4096, help="tokens of each text")
    p.add_argument("--compile", action="store_true",
                   help="by the C++ kernels, which store the same codes; bfloat16 stays eager")
    p.add_argument("--only", help="these texts, comma-separated; default: all three")
    p.add_argument("--texts", type=Path, default=ROOT / "checkpoints/quality/texts",
                   help="folder of the texts, filled on first use")
    args = p.parse_args(argv)
    for name in args.variants:
        parse(name)                                # fail early
    start, source = time.perf_counter(), open_checkpoint(args.model)
    original = load_model(source, torch.float32, "cpu")
    tokenizer = tokenizer_files.load(source.tokenizer)
    prefix = tokenizer_files.window_prefix(tokenizer, args.window)
    engine = "compile" if args.compile else "kv_cache"
    models = {name or "float32": variant_of(original, name, args.window, engine)
              for name in (None, *args.variants)}
    original = models["float32"]
    by_text = {}
    for text, content in texts(args.texts).items():
        if text in (args.only.split(",") if args.only else TEXTS):
            ids = tokenizer.encode(content)[:args.limit]
            rows = windows(ids, args.window, args.window, prefix)
            by_text[text] = compare(models, original, rows)
            log(f"{text}: {len(rows)} windows, {time.perf_counter() - start:.0f} seconds")
    for name, model in models.items():
        print(json.dumps(dict(cache=name, window=args.window, limit=args.limit,
                              bytes_per_position=bytes_per_position(model, args.window),
                              **{text: of[name] for text, of in by_text.items()})), flush=True)
    print(json.dumps(dict(cache_table=source.path.name, window=args.window, engine=engine,
                          seconds=round(time.perf_counter() - start),
                          **describe_machine(torch.device("cpu")))))
    return 0


if __name__ == "__main__":
    sys.exit(guarded(run))
