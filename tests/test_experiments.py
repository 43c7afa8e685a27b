"""Each block of docs/experiments.md: it does what its title says, the same with our kernels, and leaves the model as it was."""

import os
import re
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from helpers import files_of_ours

from gpt_faster import loading
from gpt_faster.kernels import torch_internals
from gpt_faster.kernels.compile import compile_steps

PAGE = (ROOT / "docs/experiments.md").read_text()
BLOCKS = {title: block for title, block in re.findall(r"\n## ([^\n]*)\n(?:(?!\n## ).)*?```python\n(.*?)```", PAGE, re.S)}
START = re.search(r"```python\n(.*?)```", PAGE, re.S)[1]
SEEN = []
LOAD = loading.load_model
IDS = [3, 17, 44, 90, 5, 61, 23, 8, 119, 77, 30, 12]


def notebook(directory, monkeypatch, dtype, kernels):
    """What the page's first block defines, of a tiny model."""
    torch_internals.note_once.cache_clear()
    wanted = dtype
    monkeypatch.setattr(loading, "load_model", lambda name, dtype: LOAD(str(directory), "cpu", wanted))

    class Words:
        def encode(self, text):
            return IDS
    monkeypatch.setattr(loading, "load_for", lambda source: Words())
    names = {}
    exec(START, names)

    class Recording(names["Sampler"]):
        """What it was given, beside what it draws: a text of a tiny model says little."""

        def sample(self, logits, *more, **named):
            SEEN.append(logits.clone())
            return super().sample(logits, *more, **named)
    names["Sampler"] = Recording
    if kernels:
        names["steps"] = compile_steps(names["model"])
    return names


def results(names):
    return {name: names[name] for name in ("text", "early", "skipped", "lens", "states") if name in names}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all(families, monkeypatch, dtype):
    """One after another, as a notebook is run: uncompiled, then with kernels that were there before."""
    directory, _ = families("llama3")
    found = []
    for kernels in (False, True):
        names = notebook(directory, monkeypatch, dtype, kernels)
        with torch.no_grad():
            plain = names["write"]()
            of_each = {"": plain}
            as_it_was, logits = torch.stack(SEEN[-12:]), {}
            for title, block in BLOCKS.items():
                SEEN.clear()
                exec(block, names)
                of_each[title] = results(names)
                logits[title] = torch.stack(SEEN) if SEEN else None
                for name in ("text", "early", "skipped"):
                    names.pop(name, None)
                assert names["write"]() == plain, f"{title} left something behind"
        states = of_each["Capture hidden states"]["states"]
        assert [len(seen) for seen in states] == [12] * len(states) and states[0][0].shape == (1, len(IDS), names["model"].cfg.dim)
        assert of_each["Logit lens"]["lens"][-1] == plain[0] == of_each["Capture hidden states"]["text"][0]
        for title in BLOCKS.keys() - {"Capture hidden states", "Logit lens", "A sampler of your own"}:
            assert not torch.equal(logits[title][-12:], as_it_was), f"{title} changed nothing"
        found.append(of_each)
    if dtype == torch.float32:                             # in bfloat16 near ties may flip
        for title in BLOCKS:
            ours, theirs = ({n: v for n, v in each[title].items() if n != "states"} for each in found)
            assert ours == theirs, title
        for ours, theirs in zip(*(each["Capture hidden states"]["states"] for each in found)):
            for a, b in zip(ours, theirs):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


# ---- As an edit of the file ---------------------------------------------------------------------

DIFFS = dict(re.findall(r"\n## ([^\n]*)\n(?:(?!\n## ).)*?```diff\n(.*?)```", PAGE, re.S))
# What runs as it is read then, by test_what_is_read_runs.py's names; the model's forward is none of them.
SLOW = {"Ablate a head": "attn", "An attention of your own: a window with sinks": "attn", "A quantized KV cache": "attn",
        "LoRA in the forward pass": "ffn", "Another norm": ""}

RUN = """
import sys, torch
sys.path.insert(0, "tests")
import test_what_is_read_runs as t
from gpt_faster.decoding.samplers import build_sampler
from generate import Batch, generate
from sampling import SamplingParams
torch.set_grad_enabled(False)
models = [t.make(), t.make()]
for model in models:
    for layer in model.layers:
        if hasattr(layer.ffn, "a"):
            layer.ffn.a, layer.ffn.b = torch.full((2, 64), 0.3), torch.full((64, 2), -0.3)
t.compile_model(models[1])
logits = [t.run(model) for model in models]
texts = []
for model in models:
    sampler = build_sampler(model, [SamplingParams(temperature=0, repetition_penalty=5.0)])
    texts.append([token.item() for token in generate(Batch(model, sampler), [[3, 17, 44, 90]], 12)])
print("as read:", sorted(t.EVERYTHING - t.fast(models[1])))
print("same:", t.alike(logits[1], logits[0], torch.float32) and texts[0] == texts[1])
print("gives:", round(logits[0].sum().item(), 2), texts[0])
"""


def hunks(diff):
    """-> (file, lines before, lines after) of each."""
    for file, body in re.findall(r"@@ (\S+): [^\n]*\n(.*?)(?=@@|\Z)", diff, re.S):
        lines = body.splitlines()
        yield file, *("\n".join(line[1:] for line in lines if line[:1] in (" ", sign)) + "\n" for sign in "-+")


@pytest.fixture(scope="module")
def edited(tmp_path_factory):
    """-> a function: what RUN says in a copy of the repository with a diff in it."""
    to = tmp_path_factory.mktemp("edited")
    for path in files_of_ours():
        (to / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        (to / path.relative_to(ROOT)).write_bytes(path.read_bytes())

    def said(diff):
        before = {}
        for file, old, new in hunks(diff):
            text = (to / file).read_text()
            before.setdefault(file, text)
            assert text.count(old) == 1, old
            (to / file).write_text(text.replace(old, new))
        env = dict(os.environ, PYTHONPATH=str(to), PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")
        done = subprocess.run([sys.executable, "-c", RUN], cwd=to, env=env, capture_output=True, text=True)
        for file, text in before.items():
            (to / file).write_text(text)
        assert done.returncode == 0, done.stderr
        return dict(re.findall("^(as read|same|gives): (.*)$", done.stdout, re.M))
    said.plain = said("")
    return said


@pytest.mark.slow
@pytest.mark.parametrize("title", DIFFS)
def test_as_an_edit_of_the_file(edited, title):
    """It counts with our kernels too, and what it does not concern stays fast."""
    found = edited(DIFFS[title])
    assert found["same"] == "True"
    if title not in ("Capture hidden states", "Logit lens"):
        assert found["gives"] != edited.plain["gives"]
    if slow := SLOW.get(title):
        assert found["as read"] == str([f"{i}.{slow}" for i in range(3)])
    elif title not in SLOW:
        assert found["as read"] == edited.plain["as read"] == "[]"


def test_the_page_has_them_all():
    assert len(BLOCKS) == PAGE.count("\n## ") == 11 and len(DIFFS) == 10
