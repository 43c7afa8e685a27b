"""What transformers makes of the two GGUFs: ids of texts, and new tokens. It takes minutes, so that it is kept in tests/expected.

    python tests/references.py                             # makes the files of tests/expected anew

The exhaustive tier makes it anew too and compares. Texts are kept as digests: they are long, and other versions of
Python have others.
"""

import functools
import hashlib
import json
import pydoc_data.topics
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = ["Hello, my name is", "def fibonacci(n):\n    if n <", "In 2024, 1234567 + 89 =",
           "Café déjà vu — naïve façade: ñ, ü, ß", "I love 🙂 and 🚀 because"]
N_NEW = 32
TEXTS = ["Hello, my name is", " leading and   inner   spaces ", "def f(x):\n    return {x: 1}\n\n\tpass",
         "In 2024, 1,234,567 + 89 = 3.14e-5", "Café déjà vu — naïve façade: ñ, ü, ß", "🙂🚀👩‍👩‍👧 e\u0301",
         "日本語テキスト и русский", "\r\n\r\n \n", "a", " ", ""]
CHAT = ["<|im_start|>user\nhi<|im_end|>\n", "<start_of_turn>user\nhi<end_of_turn>\n"]
PROSE = list(pydoc_data.topics.topics.values())[:30]


def digest(value) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


@functools.cache
def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def file_of(path: Path) -> Path:
    return ROOT / "tests/expected" / f"{path.stem}.json"


@functools.cache
def kept(path: Path) -> dict:
    """What was made of this GGUF. AssertionError: it was made of another file of that name."""
    reference = json.loads(file_of(path).read_text())
    assert reference["sha256"] == sha256(path), f"{path} is not the file that {file_of(path)} was made of"
    return reference


@functools.cache
def their_tokenizer(path: Path):
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def tokenized(path: Path, texts: list[str]) -> dict[str, list[str]]:
    """digest of a text -> digests of its ids, and of the text that these give."""
    tokenizer, result = their_tokenizer(path), {}
    for text in texts:
        ids = tokenizer(text).input_ids
        result[digest(text)] = [digest(ids), digest(tokenizer.decode(ids, skip_special_tokens=True))]
    return result


@functools.cache
def generated(path: Path) -> dict:
    """The greedy tokens in fp32 -> eos_id, {prompt: [its ids, new ids]}"""
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    new = {}
    for prompt in PROMPTS:
        ids = their_tokenizer(path)(prompt, return_tensors="pt").input_ids
        out = model.generate(ids, max_new_tokens=N_NEW, do_sample=False)[0].tolist()
        new[prompt] = [out[:ids.shape[1]], out[ids.shape[1]:]]
    return dict(eos_id=model.generation_config.eos_token_id, generated=new)


def main() -> None:
    import transformers
    from conftest import GEMMA, SMOLLM2
    for path in (SMOLLM2, GEMMA):
        reference = dict(sha256=sha256(path), transformers=transformers.__version__, **generated(path),
                         tokenized=tokenized(path, TEXTS + CHAT + PROSE))
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in reference.items()]
        file_of(path).write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
