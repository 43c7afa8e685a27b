"""A decode step whose operations are run again without Python: the same bits as with it, in every family, whatever comes between."""

import copy

import pytest
import tiny
import torch
from helpers import GREEDY, make_batch

import model as core
from generate import decode_one_token
from gpt_faster.decoding import engines
from gpt_faster.decoding.samplers import ShortlistSampler
from gpt_faster.formats.load import load_model, read_checkpoint
from gpt_faster.kernels.compile import assume_exclusive, compile_model
from gpt_faster.kernels.cpu.embed_unembed import EmbedInputs
from gpt_faster.kernels.cpu.replay import Replay
from gpt_faster.kernels.guard import guard_of
from gpt_faster.layers.quantized_cache import CacheFormat
from sampling import Sampler, SamplingParams

pytestmark = pytest.mark.kernels

TOKENS = torch.randint(3, 150, (3, 64), generator=torch.Generator().manual_seed(1))
LENGTH, N_PROMPT = 64, 21
LONGEST_CALL = 24                                          # so windows of 8 have rings of 31 slots


@pytest.fixture
def replayed(monkeypatch):
    """Replays so far, of any model."""
    calls, run = [], Replay.run

    def counted(self, *args, **kwargs):
        calls.append(self)
        return run(self, *args, **kwargs)
    monkeypatch.setattr(Replay, "run", counted)
    return calls


def load(families, name, dtype, B=1, kv_cache=None, may_replay=True, max_rejected=4):
    model = load_model(read_checkpoint(families(name)[0]), dtype, "cpu")
    model.kv_cache = kv_cache and CacheFormat.parse(kv_cache)
    model.setup_cache(B, LENGTH, LONGEST_CALL, max_rejected=max_rejected)
    compile_model(model)
    assume_exclusive(model)
    if guard_of(model) and not may_replay:
        guard_of(model).replay.is_allowed = False
    return model


@torch.inference_mode()
def call(model, at, T=1, kv_len=LENGTH, rows=None):
    """Logits of T tokens from `at` on in all rows of the cache; or in these, each a position further than the one before it."""
    n, index, last = model.max_batch_size, None, 1
    pos = torch.arange(at, at + T)
    if rows:
        pos = pos + torch.arange(len(rows))[:, None]
        n, index, last = len(rows), torch.tensor(rows), torch.full((len(rows), 1), T - 1)
        index = None if rows == list(range(model.max_batch_size)) else index
    return model(TOKENS[:n, at:at + T], pos, last, kv_len, index).clone()


def same(model, plain, *calls):
    """Both models get these calls, and give the same bits."""
    for arguments in calls:
        assert torch.equal(call(model, *arguments), call(plain, *arguments)), arguments


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_every_family(families, name, dtype, replayed):
    model, plain = (load(families, name, dtype, may_replay=may) for may in (True, False))
    same(model, plain, (0, N_PROMPT), *((i,) for i in range(N_PROMPT, 30)))
    assert len(replayed) in (0, 30 - N_PROMPT - 2)             # all after the first two steps, or none
    same(model, plain, (26, 4), (30,), (31,), (32,), (28, 1, 32), (29, 1, 32), (30, 1, 32))


WHOLE = "llama3", "qwen3", "qwen3_moe", "gpt_oss", "granitemoehybrid-mamba", "lfm2", "cohere", "phi3-longrope", "deepseek_v3"


@pytest.mark.parametrize("name", WHOLE)
def test_most_families_need_no_python(families, name, replayed):
    model = load(families, name, torch.bfloat16)
    for i in range(5):
        call(model, i)
    assert len(replayed) == 3


@pytest.mark.parametrize("kv_cache", [None, "int8", "int4", "fp8"])
def test_rows_at_positions_of_their_own(families, kv_cache, replayed):
    for name in ("llama3", "gemma3_text"):
        model, plain = (load(families, name, torch.bfloat16, 3, kv_cache, may) for may in (True, False))
        before = len(replayed)
        same(model, plain, (0, N_PROMPT), *((i, 1, LENGTH, [0, 1, 2]) for i in range(N_PROMPT, 30)), *((i,) for i in range(32, 38)))
        assert len(replayed) == before + 7 + 4
        same(model, plain, *((i, 1, LENGTH, [2]) for i in range(38, 43)), *((i, 1, LENGTH, [2, 0]) for i in range(43, 49)))
        assert len(replayed) == before + 7 + 4 + 3 + 4
        same(model, plain, *((i, 1, LENGTH, rows) for i, rows in zip(range(49, 55), [[0, 2], [1, 0], [2, 1]] * 2)))
        assert len(replayed) == before + 7 + 4 + 3 + 4 + 6     # other rows, but as many


def test_rings_are_the_models(families):
    """Slots and masks of windows, and what the slots hold, against the model's own."""
    model = load(families, "gemma3_text", torch.float32, 3)
    plain = load_model(read_checkpoint(families("gemma3_text")[0]), torch.float32, "cpu")
    plain.setup_cache(3, LENGTH, LONGEST_CALL)
    guard_of(model).in_model_call, random = True, torch.Generator().manual_seed(0)
    at = torch.zeros(3, dtype=torch.int64)
    assert model.rings and isinstance(vars(model)["embed_inputs"], EmbedInputs)
    for i in range(60):
        T, how = int(torch.randint(1, 6, (), generator=random)), i % 3
        rows = torch.randperm(3, generator=random)[:2] if how == 1 else None
        if how == 2:
            at[:] = at.max()
        begin = at if rows is None else at[rows]
        pos = torch.arange(T) + (begin[0] if how == 2 else begin[:, None])
        tokens = TOKENS[:len(begin), :T]
        kv_len = min(64, max(int(pos.max()) + 1, 16))
        ours, theirs = ([*m.embed_inputs(tokens, pos, kv_len, rows)] for m in (model, plain))
        for a, b in zip(ours, theirs, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        for a, b in zip(model.rings.values(), plain.rings.values(), strict=True):
            assert torch.equal(a.slot_positions, b.slot_positions)
        at[slice(None) if rows is None else rows] += T
        at = torch.where(at > 50, 0, at)


def test_what_ends_it(families, replayed):
    """Prompts, other lengths of the cache, a new cache, recorded states, hooks, edits before a prompt."""
    model, plain = (load(families, "llama3", torch.float32, may_replay=may) for may in (True, False))

    def steps(first, n=4):
        before = len(replayed)
        same(model, plain, *((i,) for i in range(first, first + n)))
        return len(replayed) - before

    def both(change):
        return [change(each) for each in (model, plain)]
    same(model, plain, (0, 9))
    assert steps(9) == 2 and steps(13) == 4
    same(model, plain, (5, 3))                                 # rejected tokens
    assert steps(8) == 2
    same(model, plain, (12, 1, 40))
    assert steps(13) == 2
    both(lambda m: m.setup_cache(1, LENGTH))
    assert steps(0) == 3                                       # the first is of the same shape as the last before it
    both(lambda m: m.record_hidden(2, 3))
    assert steps(4) == 3 and steps(8) == 4
    assert torch.equal(model.hidden[2][:, :12], plain.hidden[2][:, :12]) and model.hidden[3][:, 4:12].any()
    both(lambda m: m.record_hidden(4))                         # the last layer's output is recorded by PyTorch
    assert steps(12) == 0
    seen = []
    handles = both(lambda m: m.layers[1].attn.register_forward_hook(lambda *_: seen.append(1)))
    assert steps(16) == 0 and len(seen) == 8
    for handle in handles:
        handle.remove()
    both(lambda m: m.layers[1].attn_norm.weight.data.mul_(2))
    same(model, plain, (0, 9))
    assert steps(9) == 0


def test_a_layers_cache_is_replaced(families, replayed):
    """Between two steps: the next one reads and writes the new one."""
    model, plain = (load(families, "llama3", torch.float32, may_replay=may) for may in (True, False))
    same(model, plain, (0, 9), (9,), (10,), (11,))
    for each in (model, plain):
        each.layers[1].attn.cache = copy.deepcopy(each.layers[1].attn.cache)
        each.layers[1].attn.cache.k.mul_(0.5)
    same(model, plain, (12,), (13,), (14,))
    assert len(replayed) == 1 + 2 and torch.equal(model.layers[1].attn.cache.k, plain.layers[1].attn.cache.k)
    assert model.layers[1].attn.cache.k[:, :, 14].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("part", ["layers.0", "layers.0.attn", "layers.1"])
@pytest.mark.parametrize("name", ["llama3", "qwen3", "gemma3_text", "cohere"])
def test_hooks_keep_what_they_got(families, name, part, dtype):
    """Inputs of a layer, RoPE tables, slots and masks, over steps of one shape."""
    kept = {}
    for how in ("plain", "compiled"):
        model = load_model(read_checkpoint(families(name)[0]), dtype, "cpu")
        model.setup_cache(1, LENGTH, LONGEST_CALL)
        seen = kept[how] = []
        model.get_submodule(part).register_forward_pre_hook(
            lambda module, args, seen=seen: seen.append([args[0], *args[1], *args[2:4]]))
        if how == "compiled":
            compile_model(model)
            assume_exclusive(model)
        for at, T in ((0, N_PROMPT), *((i, 1) for i in range(N_PROMPT, 28))):
            call(model, at, T)
    for ours, theirs in zip(kept["compiled"], kept["plain"], strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.shape == b.shape and (a.float() - b.float()).abs().max() < (1e-3 if dtype == torch.float32 else 0.2)


def test_tables_edited_in_place(families, replayed):
    """What the operations copy is copied for each step."""
    model, plain = (load(families, "llama3", torch.float32, may_replay=may) for may in (True, False))
    same(model, plain, (0, 9), (9,), (10,), (11,))
    for each in (model, plain):
        each.amplitude.mul_(1.5)
        each.layers[0].attn_norm.weight.data.mul_(0.5)
    before = len(replayed)
    same(model, plain, (12,), (13,))
    assert len(replayed) == before + 2


def test_an_edited_forward(families, monkeypatch, replayed):
    """One that returns something else, of a model of one layer, whose operations are as many."""
    forward = core.Transformer.forward
    monkeypatch.setattr(core.Transformer, "forward", lambda self, *args, **kwargs: 2 * forward(self, *args, **kwargs))
    model = load(families, "llama3", torch.float32)
    del model.layers[1:]
    model.setup_cache(1, LENGTH)
    plain = copy.deepcopy(model)
    for i in range(5):
        torch.testing.assert_close(call(model, i), call(plain, i), rtol=1e-4, atol=1e-4)
    assert not replayed


def test_wrong_tokens_and_positions(families, replayed):
    model = load(families, "llama3", torch.float32)
    for i in range(4):
        call(model, i)
    with pytest.raises(IndexError), torch.inference_mode():
        model(torch.tensor([[1000]]), torch.tensor([4]), 1, LENGTH)
    with pytest.raises(IndexError), torch.inference_mode():
        model(TOKENS[:1, :1], torch.tensor([LENGTH]), 1, LENGTH)
    assert len(replayed) == 4
    for name in ("llama3", "gemma3_text"):
        model = load(families, name, torch.float32, 2)
        for i in range(4):
            call(model, i, 1, LENGTH, [1])
        with pytest.raises(IndexError), torch.inference_mode():
            model(TOKENS[:1, :1], torch.tensor([[4]]), torch.tensor([[0]]), LENGTH, torch.tensor([2]))


@pytest.mark.parametrize("name", ["llama3", "gemma3_text", "qwen3_next", "lfm2", "granitemoehybrid-mamba", "gpt_oss"])
def test_a_model_loaded_in_inference_mode(families, name):
    """Its tensors refuse what others allow: it gives the same tokens."""
    plain = load(families, name, torch.float32)
    with torch.inference_mode():
        model = load(families, name, torch.float32)
        assert model.freq.is_inference() and guard_of(model)
    same(model, plain, (0, N_PROMPT), *((i,) for i in range(N_PROMPT, 27)), (24, 4))


def test_without_the_promise_all_is_checked(families, replayed):
    model = load_model(read_checkpoint(families("llama3")[0]), torch.float32, "cpu")
    model.setup_cache(1, LENGTH)
    compile_model(model)
    for i in range(5):
        call(model, i)
    assert not replayed


# ---- The choice of a greedy token, as one more operation ---------------------------------------

@pytest.fixture
def chosen(monkeypatch):
    """Tokens chosen by the operations so far."""
    calls, likeliest = [], Replay.likeliest

    def counted(self, *args):
        calls.append(self)
        return likeliest(self, *args)
    monkeypatch.setattr(Replay, "likeliest", counted)
    return calls


def greedy_batch(families, name, dtype, B=1, is_short=True):
    """A batch of the engine `compile`; is_short: its step may omit Python."""
    model = load(families, name, dtype, B)
    steps = engines.build_steps(model, "compile")
    return make_batch(model, [GREEDY] * B, steps=steps if is_short else steps._replace(decode=decode_one_token))


def tokens_of(batch, n=12, between=lambda i: None):
    """n tokens of each row of the batch; between(i) runs before the i-th."""
    batch.prefill(range(batch.n_row), [TOKENS[row, :9].tolist() for row in range(batch.n_row)])
    found = [batch.token]
    for i in range(1, n):
        between(i)
        found.append(batch.step())
    return torch.cat(found, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_greedy_tokens_of_every_family(families, name, dtype, chosen):
    for B in (1, 3):
        short, whole = (greedy_batch(families, name, dtype, B, is_short) for is_short in (True, False))
        assert torch.equal(tokens_of(short), tokens_of(whole))
        assert not short.sampler.not_finite.any() and not whole.sampler.not_finite.any()
    caps = type(short.model.cap) is not torch.nn.Identity
    assert len(chosen) in ((0,) if caps else (0, 9, 2 * 9))


def test_a_greedy_step_needs_no_python(families, chosen):
    for name in WHOLE:
        before = len(chosen)
        tokens_of(greedy_batch(families, name, torch.bfloat16, 2))
        assert len(chosen) == before + 9, name                 # 12 less the prompt's and two steps


HOOKED = "", "layers.0", "layers.1.attn", "head", "embed", "norm"


@pytest.mark.parametrize("part", HOOKED)
@pytest.mark.parametrize("when", [0, 6], ids=["before", "between"])
def test_a_hook_sees_each_greedy_step(families, part, when, chosen):
    batch, seen = greedy_batch(families, "llama3", torch.float32), []
    plain = tokens_of(greedy_batch(families, "llama3", torch.float32, is_short=False))

    def hook():
        batch.model.get_submodule(part).register_forward_hook(lambda *_: seen.append(1))
    if when == 0:
        hook()
    assert torch.equal(tokens_of(batch, between=lambda i: hook() if i == when else None), plain)
    assert len(seen) == (12 if when == 0 else 12 - when)


def test_a_hook_on_all_modules_sees_each_greedy_step(families):
    batch, seen, handles = greedy_batch(families, "llama3", torch.float32), [], []

    def hook(i):
        if i == 6:
            handles.append(torch.nn.modules.module.register_module_forward_hook(
                lambda module, *_: seen.append(1) if module is batch.model else None))
    tokens_of(batch, between=hook)
    handles[0].remove()
    assert len(seen) == 6


@pytest.mark.parametrize("name", ["note", "sample", "processed", "distribution"])
def test_an_edited_sampler_is_used_by_each_greedy_step(families, name, monkeypatch, chosen):
    """From the step on before which it was edited."""
    batch, calls, method = greedy_batch(families, "llama3", torch.float32), [], getattr(Sampler, name)

    def edited(self, *args, **kwargs):
        calls.append(1)
        return method(self, *args, **kwargs)
    tokens_of(batch, between=lambda i: monkeypatch.setattr(Sampler, name, edited) if i == 6 else None)
    assert len(calls) == 6 and len(chosen) == 3


@pytest.mark.parametrize("owner", ["the sampler", "its class"])
@pytest.mark.parametrize("name", ["note", "sample"])
def test_a_replaced_method_of_the_sampler_is_used(families, owner, name, monkeypatch, chosen):
    batch, calls = greedy_batch(families, "llama3", torch.float32), []
    method = getattr(batch.sampler, name)

    def replaced(*args, **kwargs):
        calls.append(1)
        return method(*args[-3 if name == "sample" else -1:], **kwargs)

    def replace(i):
        if i == 6:
            monkeypatch.setattr(batch.sampler if owner == "the sampler" else ShortlistSampler, name, replaced)
    tokens_of(batch, between=replace)
    assert len(calls) == 6 and len(chosen) == 3


def test_a_replaced_call_of_the_model_is_used(families, chosen):
    batch, calls = greedy_batch(families, "llama3", torch.float32), []

    class Counted(type(batch.model)):
        def __call__(self, *args, **kwargs):
            calls.append(1)
            return super().__call__(*args, **kwargs)

    def replace(i):
        if i == 6:
            batch.model.__class__ = Counted
    tokens_of(batch, between=replace)
    assert len(calls) == 6 and len(chosen) == 3


def test_an_edited_step_is_the_engines(families, monkeypatch, chosen):
    def edited(model, token, pos, kv_len, sampler):
        return 0 * decode_one_token(model, token, pos, kv_len, sampler) + 7
    monkeypatch.setattr(engines, "decode_one_token", edited)
    assert (tokens_of(greedy_batch(families, "llama3", torch.float32))[0, 1:] == 7).all() and not chosen


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_invalid_logits_of_a_greedy_step_are_noted(families, bad, chosen):
    batch = greedy_batch(families, "llama3", torch.float32, 2)
    tokens_of(batch, between=lambda i: batch.model.norm.weight.data.fill_(bad) if i == 8 else None)
    assert batch.sampler.not_finite.isnan().all() and len(chosen) == 9


def test_penalties_and_sampling_need_python(families, chosen):
    for params in (SamplingParams(0.8), SamplingParams(0, repetition_penalty=1.5)):
        model = load(families, "llama3", torch.float32)
        tokens_of(make_batch(model, [params], steps=engines.build_steps(model, "compile")))
    assert not chosen
