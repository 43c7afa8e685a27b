"""An edit, a hook or an exchanged part counts in every engine, however the model is used, in both dtypes."""

import subprocess
import sys
from functools import cache

import pytest
import torch
from test_batch import UNLIKE, serve
from test_serve_safety import answers
from test_what_is_read_runs import (  # noqa: F401
    DTYPES,
    EDITS,
    ROOT,
    TOKENS,
    alone,
    distance,
    make,
    trace_as_a_gpus,
)

from generate import Steps, decode_one_token, generate, prefill
from gpt_faster.cli.evaluate import score
from gpt_faster.decoding.engines import build_speculative, build_steps
from gpt_faster.decoding.samplers import build_sampler
from gpt_faster.kernels import compile as compile_room

PROMPTS = [TOKENS[0, :n].tolist() for n in (20, 3, 11, 30)]
N_NEW = 10


def in_slots(model, steps, engine):
    """Of different lengths, in two rows that are refilled."""
    model.setup_cache(2, 64, 16)
    return serve(model, [(ids, N_NEW) for ids in PROMPTS], 2, steps, UNLIKE)[0]


def by_drafts(model, steps, engine):
    """Verified, most of them in vain: more than one position in each call."""
    model.setup_cache(1, 64)
    batch = build_speculative(model, build_sampler(model, [UNLIKE]), steps, engine, 3, fixed=False)
    return [t.item() for t in generate(batch, [PROMPTS[0] + PROMPTS[0][:9]], N_NEW)]


def served(model, *_):
    """With the server's sampler: tokens and their log-probabilities, of requests of many kinds."""
    return answers(model, PROMPTS * 2, n_row=3)[0]


def scored(model, *_):
    """As eval.py does: log-probabilities of all tokens but the first, two rows at a time."""
    return [(0, [logp for logp, _ in row]) for row in score(model, [(ids, len(ids) - 1) for ids in PROMPTS], 2)]


TEXTS = dict(in_slots=in_slots, by_drafts=by_drafts)       # by steps, which an engine may compile
CALLS = dict(served=served, scored=scored)                 # by calls of the model; they give numbers too


def differ(found, expected, dtype):
    """In what; None: in nothing."""
    if [row[0] for row in found] != [row[0] for row in expected]:
        return "tokens"
    pairs = [pair for (_, ours), (_, theirs) in zip(found, expected) for pair in zip(ours, theirs)]
    apart = distance(*torch.tensor(pairs, dtype=torch.float64).T)
    return None if apart < (1e-3 if dtype == torch.float32 else 0.1) else apart


def a_gpus_steps(model):
    """Its modules, whose kernels' references run here."""
    min_kv_len = compile_room.prepare_for_cuda(model)
    return Steps(prefill, compile_room.as_cuda_graph(decode_one_token), min_kv_len=min_kv_len)


def results(way, name, when, dtype, engine):
    """Of a model that is edited before it is compiled, or when it has run; in a world of its own."""
    change, *_ = EDITS[name]
    model, undo = make(dtype), pytest.MonkeyPatch()
    try:
        if when == "before":
            change(model, undo)
        steps = a_gpus_steps(model) if engine == "a GPU's" else build_steps(model, engine)
        engine = engine if engine == "torch_compile" else "kv_cache"
        if when == "after":
            way(model, steps, engine)
            change(model, undo)
        return way(model, steps, engine)
    finally:
        undo.undo()


@cache
def unedited(way, dtype):
    return CALLS[way](make(dtype), Steps())


def times(name):
    *_, at = EDITS[name]
    return [when for when in ("before", "after") if when in at]


CASES = [(name, when) for name in EDITS for when in times(name)]


# What is served is also drawn at random: in bf16 too little of it is the same to compare.
@pytest.mark.parametrize("way, dtype", [("served", torch.float32), *(("scored", dtype) for dtype in DTYPES)],
                         ids=["served-fp32", "scored-fp32", "scored-bf16"])
@pytest.mark.parametrize("name, when", CASES)
def test_by_the_kernels(name, when, way, dtype):
    found, expected = (results(CALLS[way], name, when, dtype, engine) for engine in ("compile", "kv_cache"))
    assert differ(found, expected, dtype) is None
    if when in EDITS[name][2]:                     # else the test could not fail
        assert differ(expected, unedited(way, dtype), dtype)


@pytest.mark.parametrize("way", TEXTS)
@pytest.mark.parametrize("name, when", CASES)
def test_texts_by_the_kernels(name, when, way):
    """In fp32: in bf16 near-ties part them."""
    found, expected = (results(TEXTS[way], name, when, torch.float32, engine) for engine in ("compile", "kv_cache"))
    assert found == expected


@pytest.fixture
def traced(monkeypatch):
    trace_as_a_gpus(monkeypatch)
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("way", TEXTS)
@pytest.mark.parametrize("name", EDITS)
def test_texts_by_pytorchs_compiler(name, way, traced):
    """Edited when it has run."""
    when = times(name)[-1]
    found, expected = (results(TEXTS[way], name, when, torch.float32, engine) for engine in ("torch_compile", "kv_cache"))
    assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("name, when", CASES)
def test_texts_by_a_gpus_steps(name, when, traced):
    found, expected = (results(in_slots, name, when, torch.float32, engine) for engine in ("a GPU's", "kv_cache"))
    assert found == expected


@pytest.mark.slow
def test_ranks():
    """tests/ranks_edited.py says which edits these are."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "tests/ranks_edited.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "all right" in done.stdout, done.stdout + done.stderr
