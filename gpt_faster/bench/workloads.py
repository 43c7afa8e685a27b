"""What is timed: how many prompts, of which text and length, with how many new tokens.

It knows tokenizers and nothing of how tokens are generated.

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
    """n_new tokens after a prompt, in each of batch_size rows; n_new = 1 times the prompt alone.

    cache_length: positions of the cache, if more than those. n_requests: that many different
    prompts of 1 to n_prompt tokens with 1 to n_new new ones, batch_size of them at a time. text: a
    file that is the prompt.
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
        """The prompts, and how many new tokens each gets: the same at every batch size."""
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
            prompts.append(ids[-n_prompt:])                # each begins elsewhere in the text
        return prompts, max_new_tokens

    def memory_bytes(self, cfg, dtype: torch.dtype, use_cache: bool) -> int:
        """Roughly: the cache, ten activations as wide as the model, logits three times."""
        cache_bytes = 0
        n_active = self.n_prompt + self.n_new              # tokens in the longest call
        if use_cache:
            per_token = 2 * cfg.n_layer * cfg.n_kv_head * cfg.head_dim * dtype.itemsize
            cache_bytes = per_token * self.n_positions()
            n_active = self.n_prompt
        activation_bytes = n_active * 10 * cfg.dim * dtype.itemsize
        return self.batch_size * (cache_bytes + activation_bytes + 12 * cfg.vocab_size)

    def __str__(self):
        """As llama-bench writes it: pp is a prompt, tg generated tokens, @ d the depth before."""
        if self.n_requests:
            return f"rq{self.n_requests} @ d1-{self.n_prompt}, tg1-{self.n_new}"
        depth = self.text.name if self.text else f"d{self.n_prompt}"
        name = f"tg{self.n_new} @ {depth}" if self.n_new > 1 else f"pp{self.n_prompt}"
        return f"{name}, cache {self.cache_length}" if self.cache_length else name


def encode_english(n: int, tokenizer, cfg) -> list[int]:
    """n tokens of Python's own documentation, or random ones where there is no tokenizer.

    Not always random: after nonsense, rounding alone can change what a model generates in bf16.
    """
    if n < cfg.context and not isinstance(tokenizer, NullTokenizer):
        return tokenizer.encode(english_text()[:20 * n])[:n]
    return batch.random_prompt(n, cfg, seed=0)


def encode_file(path: Path, tokenizer) -> list[int]:
    """A file as a message where the model has a chat template, else as it is."""
    text = path.read_text(encoding="utf-8")
    if tokenizer.chat_template is None:
        return tokenizer.encode(text)
    return encode_chat(tokenizer, [dict(role="user", content=text)])
