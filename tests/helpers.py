"""What many tests do: a batch of a model, and its tokens."""

from pathlib import Path

import torch

from generate import PREFILL_CHUNK, Steps, generate
from gpt_faster.decoding.engines import RecomputeBatch, build_speculative
from gpt_faster.decoding.samplers import build_sampler
from gpt_faster.decoding.scheduler import RowsBatch
from sampling import SamplingParams

GREEDY = SamplingParams(temperature=0)
ROOT = Path(__file__).resolve().parent.parent


def files_of_ours():
    """What a copy of the repository needs to run, and its tests."""
    folders = (ROOT / name for name in ("gpt_faster", "scripts", "tests"))
    return [*ROOT.glob("*.py"), *(p for folder in folders for p in folder.rglob("*")
                                  if p.is_file() and "__pycache__" not in p.parts)]


def allocate(model, n_row, length, longest_call=PREFILL_CHUNK):
    """A cache for them, unless the model has one."""
    if model.max_batch_size != n_row or model.max_seq_length < length:
        model.setup_cache(n_row, length, longest_call)


def lists(prompts):
    return prompts.tolist() if isinstance(prompts, torch.Tensor) else prompts


def make_batch(model, params, generator=None, steps=Steps(), use_cache=True):
    """A batch with these parameters in its rows."""
    sampler = build_sampler(model, params, generator)
    return (RowsBatch if use_cache else RecomputeBatch)(model, sampler, steps)


def generated(model, prompts, n_new, params=SamplingParams(), generator=None, steps=Steps(), use_cache=True,
              n_cached=0):
    """-> tokens [B, 1], one at a time; all rows sampled alike."""
    prompts = lists(prompts)
    length = max(map(len, prompts)) + n_new
    if use_cache:
        allocate(model, len(prompts), length)
    elif model.max_batch_size or model.max_seq_length < length:
        model.setup_cache(0, length)
    batch = make_batch(model, [params] * len(prompts), generator, steps, use_cache)
    return generate(batch, prompts, n_new, n_cached)


def speculative(model, k, draft=None, fixed=False, params=GREEDY, generator=None, steps=Steps(), length=None):
    """A batch of one row that drafts: with a draft model, or else by look-up."""
    if length:
        allocate(model, 1, length, max(PREFILL_CHUNK, k + 1))
    return build_speculative(model, build_sampler(model, [params], generator), steps, "kv_cache", k, fixed, draft)


def ids_of(batch, prompt, n_new, n_cached=0):
    """A batch of one row -> the new ids after a prompt."""
    return [t.item() for t in generate(batch, [prompt], n_new, n_cached)]
