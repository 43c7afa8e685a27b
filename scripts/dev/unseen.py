"""Quantization loss on texts not used for calibration: perplexity, KL divergence, cloze accuracy.

Three texts of 20,000 characters: English and German from Debian's handbook (`apt-get download
debian-handbook`), Python from the standard library. Windows as in eval.py. The cloze test has 200
places in the English handbook with four candidates for the next word.

    python scripts/dev/unseen.py -m model.gguf int8 int4-g32 model_int4-gptq.g32.pth Q4_K_M

min-max-g32, min-max-g64: int4 with plain min-max groups, ignoring the file's own codes. The
original and all variants are in memory at once.
"""

import html.parser
import io
import json
import lzma
import math
import random
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from generate import log  # noqa: E402
from gpt_faster.bench.k_quants import importance_of, q4_k_m  # noqa: E402
from gpt_faster.bench.machine import describe_machine  # noqa: E402
from gpt_faster.cli.common import guarded  # noqa: E402
from gpt_faster.cli.evaluate import score, windows  # noqa: E402
from gpt_faster.cli.parser import Parser  # noqa: E402
from gpt_faster.devices import pick_dtype  # noqa: E402
from gpt_faster.formats.hub import resolve  # noqa: E402
from gpt_faster.formats.load import load_model, open_checkpoint  # noqa: E402
from gpt_faster.formats.quantize_on_load import quantized  # noqa: E402
from gpt_faster.quantization.calibrate import split_windows  # noqa: E402
from gpt_faster.text import tokenizer_files  # noqa: E402
from gpt_faster.text.english import english_text  # noqa: E402
from quantize import SCHEMES, Int4  # noqa: E402

CHARACTERS, ITEMS = 20_000, 200
MODULES = ("graphlib", "sched", "zipapp")          # standard library modules
LLAMA_CPP = ("Q4_K_M", "Q4_K_M+imatrix")
MIN_MAX = {"min-max-g32": Int4(32), "min-max-g64": Int4(64)}
CHUNK, CONTEXTS = 512, 8                           # positions per call; cloze batch size


# ---- The texts ----------------------------------------------------------------------------------

class Paragraphs(html.parser.HTMLParser):
    """Extracts the handbook's paragraphs: <div class="para">."""

    def __init__(self):
        super().__init__()
        self.paragraphs, self.inside = [], False

    def handle_starttag(self, tag, attributes):
        if tag == "div" and ("class", "para") in attributes:
            self.paragraphs.append("")
            self.inside = True

    def handle_endtag(self, tag):
        self.inside = self.inside and tag != "div"

    def handle_data(self, data):
        if self.inside:
            self.paragraphs[-1] += data


def handbook() -> tarfile.TarFile:
    """Debian's package, unpacked in memory: an ar archive that ends with data.tar.xz."""
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run(["apt-get", "download", "-qq", "debian-handbook"], cwd=directory, check=True)
        deb = next(Path(directory).glob("*.deb")).read_bytes()
    at = deb.index(b"data.tar.xz")
    size = int(deb[at + 48:at + 58])
    return tarfile.open(fileobj=io.BytesIO(lzma.decompress(deb[at + 60:at + 60 + size])))


def prose(archive: tarfile.TarFile, language: str, begin: int, end: int) -> str:
    """Prose of the book, without untranslated paragraphs."""
    folder, paragraphs = f"html/{language}/sect.", []
    for name in sorted(name for name in archive.getnames() if folder in name):
        parser = Paragraphs()
        parser.feed(archive.extractfile(name).read().decode())
        paragraphs += [" ".join(text.split()) for text in parser.paragraphs]
    long = [text for text in paragraphs if len(text.split()) > 25]
    joined = "\n\n".join(t for t in long if language.startswith("en") or " the " not in t)
    return joined[begin:end]


def texts(folder: Path) -> dict[str, str]:
    """Download once, then read from `folder`."""
    if not folder.exists():
        archive = handbook()
        sources = "".join(Path(__import__(m).__file__).read_text() for m in MODULES)
        span = 2 * CHARACTERS, 3 * CHARACTERS
        new_texts = {"english": prose(archive, "en-US", *span),
                "german": prose(archive, "de-DE", *span), "python": sources[:CHARACTERS],
                "cloze": prose(archive, "en-US", 3 * CHARACTERS, 10 * CHARACTERS)}
        folder.mkdir(parents=True)
        for name, text in new_texts.items():
            (folder / f"{name}.txt").write_text(text)
    return {path.stem: path.read_text() for path in sorted(folder.glob("*.txt"))}


def cloze(text: str, n: int) -> list[tuple[str, list[str]]]:
    """n items: 25 words of context, and four candidates, of which the first is correct."""
    draw, words = random.Random(0), text.split()
    plain = [i for i in range(25, len(words)) if re.fullmatch("[a-z]{5,}", words[i])]
    others = sorted({words[i] for i in plain})
    return [(" ".join(words[i - 25:i]), [words[i], *draw.sample(others, 3)])
            for i in draw.sample(plain, n)]


# ---- Measuring ----------------------------------------------------------------------------------

@torch.inference_mode()
def last_states(model, ids: list[int], n: int) -> torch.Tensor:
    """Last layer's output at the positions that predict the last n tokens, [n, D]."""
    model.setup_cache(0, len(ids))
    tokens, pos = torch.tensor([ids]), torch.arange(len(ids))
    x, *shared = model.embed_inputs(tokens, pos, len(ids))
    for layer, inputs in zip(model.layers, model.layer_inputs(shared)):
        x = layer(x, *inputs[:3], None, *inputs[3:])
    return x[0, -n - 1:-1].clone()


@torch.inference_mode()
def compare(models: dict, original, rows) -> dict[str, dict[str, float]]:
    """-> per model: perplexity, and mean KL divergence from the original in nats."""
    nats, divergence, total = dict.fromkeys(models, 0.0), dict.fromkeys(models, 0.0), 0
    for ids, n in rows:
        targets = torch.tensor(ids[-n:])[:, None]
        expected = last_states(original, ids, n)
        states = {name: expected if model is original else last_states(model, ids, n)
                  for name, model in models.items()}
        for a in range(0, n, CHUNK):
            p = original.unembed(expected[None, a:a + CHUNK])[0].log_softmax(-1)
            for name, model in models.items():
                q = p
                if model is not original:
                    q = model.unembed(states[name][None, a:a + CHUNK])[0].log_softmax(-1)
                nats[name] -= float(q.gather(1, targets[a:a + CHUNK]).sum())
                divergence[name] += float((p.exp() * (p - q)).sum())
        total += n
    return {name: dict(perplexity=math.exp(nats[name] / total), kl=divergence[name] / total)
            for name in models}


def cloze_correct(model, tokenizer, items: list[tuple[str, list[str]]]) -> list[bool]:
    """Whether the first candidate of each item has the highest total probability."""
    rows = []
    for context, words in items:
        n = len(tokenizer.encode(context))
        ids = [tokenizer.encode(f"{context} {word}") for word in words]
        rows += [(i, len(i) - n) for i in ids]
    scores = [sum(log_p for log_p, _ in row) for row in score(model, rows, CONTEXTS)]
    return [scores[i] == max(scores[i:i + 4]) for i in range(0, len(scores), 4)]


def min_max(source, scheme: Int4):
    def rounded(name):
        groups = source.tensors[name].whole().float().unflatten(-1, (-1, scheme.groupsize))
        low, high = groups.aminmax(dim=-1)
        scale = ((high - low) / 15).clamp(min=1e-20).bfloat16().float()
        zero = (low + 8 * scale).bfloat16().float()
        return scheme.pack(scheme.codes(groups, scale, zero).flatten(-2), scale, zero)

    return quantized(source, scheme.name, solver=rounded)


def open_variant(source, original, tokenizer, name: str, dtype: torch.dtype):
    """A file, a scheme, or llama.cpp's Q4_K_M -> the model, total bits per weight."""
    if name in LLAMA_CPP:
        importance = {}
        if name == "Q4_K_M+imatrix":               # the same text as GPTQ's calibration
            prefix = tokenizer_files.window_prefix(tokenizer, 512)
            ids = tokenizer.encode(english_text(), bos=False)
            importance = importance_of(original, split_windows(ids, 512, 32, False, prefix))
        source, bits = q4_k_m(source, importance)
        return load_model(source, dtype, "cpu"), bits
    if name in MIN_MAX:
        source = min_max(source, MIN_MAX[name])
    else:
        source = quantized(source, name) if name in SCHEMES else open_checkpoint(name)
    n_bit = sum(8 * math.prod(t.shape) * t.dtype.itemsize for t in source.tensors.values())
    n_weight = sum(p.numel() for p in original.parameters())
    return load_model(source, dtype, "cpu"), n_bit / n_weight


def run(argv: list[str] | None = None) -> int:
    p = Parser(description=__doc__.splitlines()[0])
    p.add_argument("--model", "-m", required=True, help="the unquantized model")
    p.add_argument("variants", nargs="+",
        help="schemes (int8, int4-g32, …), files, min-max-g32, Q4_K_M, Q4_K_M+imatrix, …")
    p.add_argument("--window", type=int, default=1024)
    args = p.parse_args(argv)
    for name in args.variants:
        if name not in (*SCHEMES, *MIN_MAX, *LLAMA_CPP):
            resolve(name)                          # fail early if it is missing
    start, source = time.perf_counter(), open_checkpoint(args.model)
    dtype = pick_dtype("auto", torch.device("cpu"), source.cfg, many_rows=True)
    original = load_model(source, dtype, "cpu")
    original.setup_cache(0, args.window)
    tokenizer = tokenizer_files.load(source.tokenizer)
    corpus = texts(ROOT / "checkpoints/quality/texts")
    items = cloze(corpus.pop("cloze"), ITEMS)
    prefix = tokenizer_files.window_prefix(tokenizer, args.window)
    rows = {name: windows(tokenizer.encode(text), args.window, args.window // 2, prefix)
            for name, text in corpus.items()}
    variants = {"bfloat16": (original, 16.0)}
    for name in args.variants:
        variants[name] = open_variant(source, original, tokenizer, name, dtype)
    models = {name: model for name, (model, _) in variants.items()}
    by_text = {}
    for text, of_text in rows.items():
        log(f"{text}: {len(of_text)} windows")
        by_text[text] = compare(models, original, of_text)
    for name, (model, bits) in variants.items():
        log(f"{name}: cloze")
        corpus = cloze_correct(model, tokenizer, items)
        share = sum(corpus) / len(corpus)
        error = math.sqrt(share * (1 - share) / len(corpus))
        result = dict(weights=name, bits=bits, **{text: of[name] for text, of in by_text.items()},
                      cloze=dict(accuracy=share, error=error))
        print(json.dumps(result), flush=True)
    print(json.dumps(dict(table=args.model, seconds=round(time.perf_counter() - start),
                          dtype=str(dtype).removeprefix("torch."),
                          **describe_machine(torch.device("cpu")))))
    return 0


if __name__ == "__main__":
    sys.exit(guarded(run))
