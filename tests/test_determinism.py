"""Which runs give the same tokens: docs/determinism.md, line by line.

On tiny models all that is said to be the same is so, and on SmolLM2 too. Of what may differ in bfloat16 only that it
seldom does is tested; docs/determinism.md says how often it did.
"""

import json
import os
import re
import subprocess

import pytest
import torch
from commands import PYTHON
from conftest import ROOT, SMOLLM2
from helpers import GREEDY

from generate import Batch, generate
from gpt_faster.cli import batch as batches
from gpt_faster.decoding import engines
from gpt_faster.decoding.samplers import build_sampler
from gpt_faster.decoding.scheduler import Generation, RowsBatch
from gpt_faster.formats.load import load_model, read_checkpoint
from gpt_faster.formats.quantize_on_load import quantized
from gpt_faster.loading import load_model as load_path
from gpt_faster.text.english import english_text
from sampling import SamplingParams
from tokenizer import NullTokenizer

LENGTH, N_DRAFT = 192, 4
DTYPES = {"float32": (torch.float32, None), "bfloat16": (torch.bfloat16, None), "int8": (torch.bfloat16, "int8"),
          "int4": (torch.bfloat16, "int4-g32")}
SEEDED = SamplingParams(0.9, 40, seed=7)
HOWS = {"greedy": GREEDY, "seeded": SEEDED}
SHAPES = ("chunks", "company", "other_company", "by_look_up")          # ways whose products have other numbers of rows


class Runs:
    """A model's new ids for some prompts, by each way of making them."""

    def __init__(self, model, prompts, how, n_new, is_compiled=False, draft=None):
        self.model, self.prompts, self.how, self.n_new, self.draft = model, prompts, how, n_new, draft
        self.engine = "compile" if is_compiled else "kv_cache"
        self.steps = engines.build_steps(model, self.engine)

    def alone(self, chunk=LENGTH):
        self.model.setup_cache(1, LENGTH, chunk)
        return [self.one(Batch(self.model, build_sampler(self.model, [self.how]), self.steps), ids)
                for ids in self.prompts]

    def one(self, batch, ids):
        return [t.item() for t in generate(batch, [ids], self.n_new)]

    def two_threads(self):
        torch.set_num_threads(2)
        try:
            return self.alone()
        finally:
            torch.set_num_threads(1)

    def chunks(self):
        return self.alone(16)

    def company(self, n_slots=4, order=1):
        """Through slots that are refilled; order: -1 is the last one first."""
        self.model.setup_cache(n_slots, LENGTH, LENGTH)
        rows = [Generation(NullTokenizer(), ids, max_new=self.n_new) for ids in self.prompts]
        slots = RowsBatch(self.model, build_sampler(self.model, [self.how] * n_slots), self.steps)
        for _ in batches.serve(slots, rows[::order]):
            pass
        return [row.ids for row in rows]

    def other_company(self):
        return self.company(3, -1)

    def by_look_up(self, draft=None):
        self.model.setup_cache(1, LENGTH, LENGTH, max_rejected=N_DRAFT)
        return [self.one(engines.build_speculative(
            self.model, build_sampler(self.model, [self.how]), self.steps, self.engine, N_DRAFT, True, draft), ids)
            for ids in self.prompts]

    def by_draft(self):
        return self.by_look_up(self.draft)


def some_prompts(ids, n):
    return [ids[300 * i:300 * i + length] for i, length in enumerate((7, 23, 40, 64, 11, 90, 33, 51)[:n])]


# ---- Tiny models ---------------------------------------------------------------------------------

@pytest.fixture
def tiny_runs(families, one_thread):
    """dtype, how, is_compiled -> Runs of a tiny Llama, with an int8 copy that drafts."""
    def get(dtype, how, is_compiled, name="llama3"):
        source, (kind, scheme) = read_checkpoint(families(name)[0]), DTYPES[dtype]
        ids = torch.randint(3, 150, (2400,), generator=torch.Generator().manual_seed(1)).tolist()
        packed = quantized(source, scheme.split("-")[0], 32) if scheme else source
        draft = load_model(quantized(source, "int8"), kind, "cpu")
        return Runs(load_model(packed, kind, "cpu"), [p[:9 + 5 * i] * 2 for i, p in enumerate(some_prompts(ids, 5))], HOWS[how],
                    16, is_compiled, draft)
    return get


@pytest.mark.parametrize("how", HOWS)
def test_float32(tiny_runs, how):
    """Exactly, by PyTorch and by operations: whatever else is computed, in whatever pieces, by however many threads."""
    expected = tiny_runs("float32", how, False).alone()
    for is_compiled in (False, True):
        runs = tiny_runs("float32", how, is_compiled)
        for way in (runs.alone, runs.two_threads, runs.chunks, runs.company, runs.other_company):
            assert way() == expected, (is_compiled, way.__name__)


@pytest.mark.parametrize("how", HOWS)
def test_drafts(tiny_runs, how):
    """Greedily the tokens of plain decoding. With a seed other ones of the same distribution, the same each time."""
    plain = tiny_runs("float32", how, False).alone()
    for is_compiled in (False, True):
        runs = tiny_runs("float32", how, is_compiled)
        for way in (runs.by_look_up, runs.by_draft):
            first = way()
            assert way() == first, way.__name__
            assert (first == plain) == (how == "greedy"), way.__name__


def test_a_generator_for_all_rows(tiny_runs):
    """--seed is one for all rows: alone it repeats, in company a row gets other numbers than alone. A row's own seed does not."""
    model, prompts = tiny_runs("float32", "greedy", False).model, [[5, 6, 7], [8, 9], [3]]
    params = SamplingParams(1.5)
    model.setup_cache(3, 40, 32)

    def drawn(prompts, params):
        rows = [Generation(NullTokenizer(), ids, max_new=12) for ids in prompts]
        sampler = build_sampler(model, [params] * 3, torch.Generator().manual_seed(1))
        list(batches.serve(RowsBatch(model, sampler), rows))
        return [row.ids for row in rows]
    assert drawn(prompts, params) == drawn(prompts, params)
    assert drawn(prompts[::-1], params)[::-1] != drawn(prompts, params)
    own = SamplingParams(1.5, seed=4)
    assert drawn(prompts[::-1], own)[::-1] == drawn(prompts, own)


# ---- A real model --------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def smollm2(exhaustive):
    """dtype -> a model, and prompts of Python's documentation."""
    def get(dtype):
        model, _, tokenizer = load_path(str(SMOLLM2), "cpu", *DTYPES[dtype])
        return model, some_prompts(tokenizer.encode(english_text()[:20000]), 6 if exhaustive else 4)
    return get


def compared(expected, found):
    """-> how many texts differ, and how many tokens they have in all up to where they do."""
    n_different = n_token = 0
    for ids, others in zip(expected, found):
        at = next((i for i, pair in enumerate(zip(ids, others)) if pair[0] != pair[1]), None)
        n_different += at is not None
        n_token += len(ids) if at is None else at + 1
    return n_different, n_token


def check(expected, way, dtype, may_differ=()):
    """The same, or for what may differ: not in each text at once, as with a wrong row or position."""
    n_different, n_token = compared(expected, way())
    assert not n_different or dtype != "float32" and way.__name__ in (*SHAPES, *may_differ), way.__name__
    assert n_different < n_token / 8, way.__name__


@pytest.mark.parametrize("dtype, how", [("float32", "greedy"), ("bfloat16", "seeded"), ("int8", "seeded"), ("int4", "greedy")])
def test_smollm2(smollm2, one_thread, dtype, how, exhaustive):
    """Compiled: what is the same in each dtype."""
    runs = Runs(*smollm2(dtype), HOWS[how], 32 if exhaustive else 24, is_compiled=True)
    expected = runs.alone()
    ways = [runs.two_threads, runs.chunks, runs.company, runs.other_company]
    for way in ways if how == "seeded" else [*ways, runs.by_look_up]:
        check(expected, way, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_smollm2_uncompiled(smollm2, one_thread, dtype, exhaustive):
    """By PyTorch's own products."""
    model, prompts = smollm2(dtype)
    runs = Runs(model, prompts, GREEDY, 24 if exhaustive else 12)
    expected = runs.alone()
    for way in (runs.two_threads, runs.company):
        check(expected, way, dtype, ["two_threads"])
    runs.steps = engines.build_steps(model, "compile")

    def compiled():
        return runs.alone()
    check(expected, compiled, dtype, ["compiled"])


def test_every_test_that_the_page_names_exists():
    page = (ROOT / "docs/determinism.md").read_text()
    named = re.findall(r"`(tests/\w+\.py)`:((?: `\w+`(?: \([^)]*\))?,?)+)", page)
    assert len(named) > 15
    for path, tests in named:
        text = (ROOT / path).read_text()
        assert all(f"def {test}(" in text for test in re.findall(r"`(\w+)`", tests)), (path, tests)


# ---- Processes -----------------------------------------------------------------------------------

@pytest.fixture
def said(dtype, how):
    """What a command says, in another process: arguments -> its new ids."""
    def get(*more, threads="1", **environment):
        argv = ["generate.py", "-m", SMOLLM2, "--dtype", dtype, "--device", "cpu", "--json", "--prompt", "The moon is",
                "--max_new_tokens", "24", *how, *more]
        done = subprocess.run([*PYTHON, *map(str, argv)], cwd=ROOT, env=dict(os.environ, OMP_NUM_THREADS=threads, **environment),
                              capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["new_ids"]
    return get


DTYPE = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
HOW = pytest.mark.parametrize("how", [["--temperature", "0"], ["--temperature", "0.9", "--top_k", "40", "--seed", "7"]], ids=HOWS)


@DTYPE
@HOW
def test_commands(said, dtype, how):
    """Again, with other numbers of threads, compiled or not."""
    expected = said("--compile")
    assert [said("--compile"), said("--compile", threads="2")] == [expected] * 2
    plain = said()
    if dtype == "float32":
        assert plain == expected and said(threads="2") == plain
    else:
        assert said() == plain


@DTYPE
@HOW
def test_commands_with_drafts(said, dtype, how):
    drafts = [said("--compile", "--speculate", "ngram", "--speculate_k", "4") for _ in range(2)]
    assert drafts[0] == drafts[1]
    if dtype == "float32" and "0" in how:
        assert drafts[0] == said("--compile")


@pytest.mark.parametrize("dtype, how", [("bfloat16", ["--temperature", "0"])])
def test_commands_from_an_empty_cache(said, tmp_path):
    """Which makes operations and weights, and keeps them."""
    expected = said("--compile")
    assert [said("--compile", GPT_FASTER_CACHE=str(tmp_path)) for _ in range(2)] == [expected] * 2
    assert list(tmp_path.glob("cpu_ops-*.so"))
