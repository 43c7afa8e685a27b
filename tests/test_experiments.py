"""Each block of docs/experiments.md: it does what its title says, the same with our kernels, and leaves the model as it was."""

import re

import pytest
import torch
from conftest import ROOT

from cli import loading
from kernels import private
from kernels.compile import compile_steps

PAGE = (ROOT / "docs/experiments.md").read_text()
BLOCKS = {title: block for title, block in re.findall(r"\n## ([^\n]*)\n(?:(?!\n## ).)*?```python\n(.*?)```", PAGE, re.S)}
START = re.search(r"```python\n(.*?)```", PAGE, re.S)[1]
SEEN = []
LOAD = loading.load_model
IDS = [3, 17, 44, 90, 5, 61, 23, 8, 119, 77, 30, 12]


def notebook(directory, monkeypatch, dtype, kernels):
    """What the page's first block defines, of a tiny model."""
    private.note.cache_clear()
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


def test_the_page_has_them_all():
    assert len(BLOCKS) == PAGE.count("\n## ") == 11
