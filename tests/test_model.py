"""The model's laws: the cache, chunks, batches, padding and stale entries change nothing."""

from dataclasses import replace

import pytest
import tiny
import torch
from helpers import GREEDY, generated, make_batch

from generate import generate
from gpt_faster.decoding.engines import build_steps, warm_up
from gpt_faster.formats.load import load_model, read_checkpoint
from gpt_faster.kernels.compile import compile_model
from model import ExpertLinear, of_layer, visible

LENGTH = 40


def tokens(n=20, batch=3):
    return torch.randint(0, 160, (batch, n), generator=torch.Generator().manual_seed(2))


def whole(model, prompt):
    model.setup_cache(0, LENGTH)
    return model(prompt, torch.arange(prompt.shape[1]), logits_to_keep=prompt.shape[1])


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_cached_equals_recomputed(ours, name):
    model, prompt = ours(name), tokens()
    expected = whole(model, prompt)
    model.setup_cache(3, LENGTH)
    steps = [model(prompt[:, i:i + 1], torch.arange(i, i + 1)) for i in range(20)]
    close(torch.cat(steps, dim=1), expected)


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_chunks_live_length_and_padding(ours, name):
    """A prompt in chunks, over stale entries, attending to the live part only, right-padded."""
    model, prompt = ours(name), tokens()
    expected = whole(model, prompt)
    model.setup_cache(3, LENGTH)
    for layer in model.layers:                             # what an earlier request left behind
        for t in layer.attn.buffers():
            t.normal_()
    chunks = [model(prompt[:, a:b], torch.arange(a, b), logits_to_keep=b - a, kv_len=n_key)
              for a, b, n_key in ((0, 7, 7), (7, 8, 16), (8, 20, None))]
    close(torch.cat(chunks, dim=1), expected)
    padded = torch.nn.functional.pad(prompt, (0, 12), value=5)
    last = torch.full((3, 1), 19)
    close(model(padded, torch.arange(32), logits_to_keep=last), expected[:, -1:])


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_batch_row_equals_alone(ours, name):
    """Rows of different lengths, prefilled together and decoded at different positions."""
    model, prompt, lengths = ours(name), tokens(), [20, 3, 11]
    new = torch.randint(0, 160, (3, 4), generator=torch.Generator().manual_seed(3))
    alone = []
    for i, n in enumerate(lengths):
        alone.append(whole(model, torch.cat((prompt[i, :n], new[i]))[None])[0, n - 1:])
    model.setup_cache(3, LENGTH)
    end = torch.tensor(lengths)[:, None]
    pos, last = torch.arange(20).minimum(end), end - 1     # padding stands at the row's next position
    rows = [model(prompt, pos, logits_to_keep=last)]
    for j in range(4):
        rows.append(model(new[:, j:j + 1], torch.tensor(lengths)[:, None] + j))
    close(torch.cat(rows, dim=1), torch.stack(alone))


def every_kind(layers, cfg):
    """The first layers, as many as it takes to have one of every kind, and two at least."""
    kinds = []
    for i, layer in enumerate(layers):
        source = getattr(layer.attn, "source_layer", None)         # another layer's keys, or none
        kinds.append((repr(layer), of_layer(i, cfg.window), of_layer(i, cfg.rope), source))
    return layers[:max(2, 1 + max(map(kinds.index, kinds)))]


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_compiled_equals_eager(ours, name):
    """Traced whole, without a graph break, in the forms that a run uses: prefill and decode.

    One layer of each kind: the others give the same graph again. Decoding of three rows, and all of a variant whose
    fields others of tiny.COVER have, by Dynamo alone: AOTAutograd has seen each operator of it elsewhere.
    """
    torch._dynamo.reset()
    model, prompt = ours(name), tokens(9)
    model.layers = every_kind(model.layers, model.cfg)
    model.cfg = replace(model.cfg, n_layer=len(model.layers))
    expected = whole(model, prompt)
    model.setup_cache(3, LENGTH)
    backend = "aot_eager" if name in tiny.COVER else "eager"
    step, by_dynamo = (torch.compile(model, backend=b, fullgraph=True, dynamic=False) for b in (backend, "eager"))
    close(step(prompt[:, :8], torch.arange(8), 8), expected[:, :8])
    close(by_dynamo(prompt[:, 8:], torch.tensor([8]), 1, 32), expected[:, 8:])
    model.setup_cache(1, LENGTH)                           # one row: the matrix-vector forms
    model(prompt[:1, :8], torch.arange(8))
    close(step(prompt[:1, 8:], torch.tensor([8]), 1, 32), expected[:1, 8:])


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_operations_equal_eager(ours, name, two_threads):
    """Experts, sinks, caps, post-norms, two kinds of layers, by operations in C++."""
    model, prompt = ours(name), tokens(9, batch=1)
    model.setup_cache(1, LENGTH)                           # one cache for all: few shapes to compile
    eager = [t.item() for t in generated(model, prompt, 25, GREEDY)]
    steps = build_steps(model, "compile")
    warm_up(make_batch(model, [GREEDY], steps=steps), prompt.tolist(), range(10, 34))
    assert [t.item() for t in generated(model, prompt, 25, GREEDY, steps=steps)] == eager
    n = prompt.shape[1]
    with torch.inference_mode():
        expected = whole(ours(name), torch.cat((prompt, torch.tensor([eager])), dim=1))
        model(prompt, torch.arange(n))
        steps = [model(torch.tensor([[token]]), torch.tensor([n + i])) for i, token in enumerate(eager)]
    close(torch.cat(steps, dim=1), expected[:, n:])


def test_generate_with_and_without_cache(ours):
    for name in ("llama3", "gemma3_text", "phi3-longrope", "llama-dynamic", "qwen3_moe"):
        model, prompt = ours(name), tokens(5)
        cached = [t.tolist() for t in generated(model, prompt, 25, GREEDY)]
        recomputed = [t.tolist() for t in generated(model, prompt, 25, GREEDY, use_cache=False)]
        assert len(cached) == 25 and cached == recomputed
        for i in range(3):
            alone = [t.tolist() for t in generated(model, prompt[i:i + 1], 25, GREEDY)]
            assert alone == [[t[i]] for t in cached]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_three_ways_through_an_expert(dtype):
    """Sorted rows by one grouped product, few rows one by one, eager (as on a GPU) and compiled."""
    expert = ExpertLinear(5, 16, 24, bias=True).to(dtype)
    for p in expert.parameters():
        torch.nn.init.normal_(p)
    ids = torch.tensor([0, 0, 3, 4])                       # experts 1 and 2 have no rows
    x, ends = torch.randn(4, 16).to(dtype), torch.tensor([2, 2, 2, 3, 4], dtype=torch.int32)
    with torch.no_grad():
        expected = torch.stack([expert.weight[i] @ row + expert.bias[i] for i, row in zip(ids, x)])
        few = torch.compile(expert, backend="aot_eager", fullgraph=True)(x, ids, None)
        for y in (expert(x, ids, ends), expert(x, ids, None), few):
            torch.testing.assert_close(y, expected, rtol=1e-5 if dtype == torch.float32 else 0.02, atol=0.05)


def test_visible():
    mask = visible(torch.tensor([2, 3]), torch.arange(5))
    assert mask.tolist() == [[True] * 3 + [False] * 2, [True] * 4 + [False]]
    mask = visible(torch.tensor([[4], [1]]), torch.arange(5), window=2)
    assert mask.shape == (2, 1, 1, 5)
    assert mask[:, 0, 0].tolist() == [[False] * 3 + [True] * 2, [True] * 2 + [False] * 3]


def test_too_long_is_refused_with_both_numbers(ours):
    model = ours("llama2")
    model.setup_cache(3, 128)
    with pytest.raises(ValueError, match="100 .* 60 .* 128"):
        next(generate(make_batch(model, [GREEDY] * 3), tokens(100).tolist(), 60))


@pytest.mark.parametrize("name", ["llama3", "mistral-window", "qwen3_5_text"])
@pytest.mark.parametrize("compiled", [False, True])
def test_positions_that_rows_of_the_cache_share(families, name, compiled):
    """[T] are those of each row; the other rows stay as they are."""
    model = load_model(read_checkpoint(families(name)[0]), torch.float32, "cpu")
    model.setup_cache(3, 24, 16)
    if compiled:
        compile_model(model)
    tokens = torch.randint(3, 150, (3, 9), generator=torch.Generator().manual_seed(3))
    model(tokens, torch.arange(9), 1, 24)
    before = [t.clone() for layer in model.layers for t in layer.attn.cache.buffers()]
    rows, more = torch.tensor([2, 0]), tokens[:2, :4]
    shared = model(more, torch.arange(9, 13), 4, 24, rows)
    kept = [t[1].clone() for layer in model.layers for t in layer.attn.cache.buffers()]
    assert all(torch.equal(a[1], b) for a, b in zip(before, kept))
    model(tokens, torch.arange(9), 1, 24)
    torch.testing.assert_close(model(more, torch.arange(9, 13).repeat(2, 1), 4, 24, rows), shared)
