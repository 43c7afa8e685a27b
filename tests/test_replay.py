"""A decode step whose operations are run again without Python: the same bits as with it, in every family, whatever comes between."""

import copy

import pytest
import tiny
import torch

import model as core
from gpt_faster.formats.load import load_model, read_checkpoint
from gpt_faster.kernels.compile import assume_exclusive, compile_model
from gpt_faster.kernels.cpu.replay import Replay
from gpt_faster.kernels.guard import guard_of
from gpt_faster.layers.quantized_cache import CacheFormat

pytestmark = pytest.mark.kernels

TOKENS = torch.randint(3, 150, (3, 64), generator=torch.Generator().manual_seed(1))
LENGTH, N_PROMPT = 64, 21


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
    model.setup_cache(B, LENGTH, max_rejected=max_rejected)
    compile_model(model)
    assume_exclusive(model)
    if guard_of(model) and not may_replay:
        guard_of(model).replay.is_allowed = False
    return model


@torch.inference_mode()
def call(model, at, T=1, kv_len=LENGTH, B=None):
    """Logits of TOKENS[:, at:at + T], T of which are one more in each row if B rows are at positions of their own."""
    n = model.max_batch_size
    pos = torch.arange(at, at + T)
    if B:
        pos = pos + torch.arange(n)[:, None]
    return model(TOKENS[:n, at:at + T], pos, 1, kv_len).clone()


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
    model, plain = (load(families, "llama3", torch.bfloat16, 3, kv_cache, may) for may in (True, False))
    same(model, plain, (0, N_PROMPT), *((i, 1, LENGTH, True) for i in range(N_PROMPT, 30)), *((i,) for i in range(30, 36)))
    assert len(replayed) == 7 + 4


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
    both(lambda m: m.record_hidden(2, 4))
    assert steps(4) == 3 and steps(8) == 4
    assert torch.equal(model.hidden[2][:, :12], plain.hidden[2][:, :12]) and model.hidden[4][:, 4:12].any()
    both(lambda m: m.record_hidden(0))                         # the embedding is recorded by PyTorch
    assert steps(12) == 0
    seen = []
    handles = both(lambda m: m.layers[1].attn.register_forward_hook(lambda *_: seen.append(1)))
    assert steps(16) == 0 and len(seen) == 8
    for handle in handles:
        handle.remove()
    both(lambda m: m.layers[1].attn_norm.weight.data.mul_(2))
    same(model, plain, (0, 9))
    assert steps(9) == 0


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


def test_without_the_promise_all_is_checked(families, replayed):
    model = load_model(read_checkpoint(families("llama3")[0]), torch.float32, "cpu")
    model.setup_cache(1, LENGTH)
    compile_model(model)
    for i in range(5):
        call(model, i)
    assert not replayed
