"""Workloads: number, text and length of prompts, and number of new tokens.

It knows tokenizers and nothing of generation.

    Workload(n_prompt=128, n_new=64, batch_size=1).requests(tokenizer, cfg)
"""

import random
from pathlib import Path
from typing import NamedTuple

import torch

from gpt_faster.cli import batch
from gpt_faster.text.chat_template import encode_chat
from gpt_faster.text.english import english_text
from tokenizer import NullTokenizer


class Workload(NamedTuple):
    """n_new tokens after a prompt, in each of batch_size rows; n_new = 1 times prefill only.

    cache_length: KV cache length, if larger than needed. n_requests: continuous batching of that
    many prompts with 1 to n_prompt tokens and 1 to n_new new ones, batch_size at a time. text: a
    prompt file.
    """

    n_prompt: int
    n_new: int
    batch_size: int
    cache_length: int = 0
    n_requests: int = 0
    text: Path | None = None

    def n_positions(self) -> int:
        return max(self.n_prompt + self.n_new, self.cache_length)

    def requests(self, tokenizer, cfg) -> tuple[list[list[int]], list[int]]:
        """-> prompts, and new tokens of each; independent of batch size."""
        if self.n_requests:
            return self._random_requests(tokenizer, cfg)
        if self.text:
            ids = encode_file(self.text, tokenizer)
        else:
            ids = encode_english(self.n_prompt, tokenizer, cfg)
        return [ids] * self.batch_size, [self.n_new] * self.batch_size

    def _random_requests(self, tokenizer, cfg) -> tuple[list[list[int]], list[int]]:
        draw = random.Random(0)
        prompts = []
        max_new_tokens = []
        for i in range(self.n_requests):
            n_prompt = draw.randint(1, self.n_prompt)
            max_new_tokens.append(draw.randint(1, self.n_new))
            ids = encode_english(17 * i + n_prompt, tokenizer, cfg)
            prompts.append(ids[-n_prompt:])        # each starts at another offset
        return prompts, max_new_tokens

    def memory_bytes(self, cfg, dtype: torch.dtype, use_cache: bool) -> int:
        """Estimate: KV cache, ten activations of model width, three copies of the logits."""
        cache_bytes = 0
        n_active = self.n_prompt + self.n_new      # tokens of the largest forward
        if use_cache:
            per_token = 2 * cfg.n_layer * cfg.n_kv_head * cfg.head_dim * dtype.itemsize
            cache_bytes = per_token * self.n_positions()
            n_active = self.n_prompt
        activation_bytes = n_active * 10 * cfg.dim * dtype.itemsize
        return self.batch_size * (cache_bytes + activation_bytes + 12 * cfg.vocab_size)

    def __str__(self):
        """llama-bench's notation: pp prompt tokens, tg generated tokens, @ d depth."""
        if self.n_requests:
            return f"rq{self.n_requests} @ d1-{self.n_prompt}, tg1-{self.n_new}"
        depth = self.text.name if self.text else f"d{self.n_prompt}"
        name = f"tg{self.n_new} @ {depth}" if self.n_new > 1 else f"pp{self.n_prompt}"
        return f"{name}, cache {self.cache_length}" if self.cache_length else name


def encode_english(n: int, tokenizer, cfg) -> list[int]:
    """n tokens of Python's documentation, or random ones without a tokenizer.

    Real text is preferred: after random tokens, bf16 rounding alone can change the output.
    """
    if n < cfg.context and not isinstance(tokenizer, NullTokenizer):
        return tokenizer.encode(english_text()[:20 * n])[:n]
    return batch.random_prompt(n, cfg, seed=0)


def encode_file(path: Path, tokenizer) -> list[int]:
    """A file's token ids, as a chat message if the model has a chat template."""
    text = path.read_text(encoding="utf-8")
    if tokenizer.chat_template is None:
        return tokenizer.encode(text)
    return encode_chat(tokenizer, [dict(role="user", content=text)])
