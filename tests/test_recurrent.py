"""Recurrent layers (gated DeltaNet, Mamba-2 and 1, Mamba-2 beside attention): every way to run them gives what the recurrence
gives, and their states do what law 3 says."""

import json
from dataclasses import replace

import pytest
import tiny
import torch
from helpers import GREEDY, generated, ids_of, make_batch, speculative

from generate import Steps, decode_one_token
from gpt_faster.decoding.engines import rewind
from gpt_faster.formats.config import config_from_hf
from gpt_faster.formats.load import load_model, read_checkpoint
from gpt_faster.layers import mamba, mamba1
from gpt_faster.layers.delta import CHUNK, GatedDelta, chunked, step_by_step
from gpt_faster.layers.recurrent import max_rewind
from gpt_faster.layers.zamba import SharedTransformer, TokenEmbedding, ZambaBlocks
from model import ModelConfig, Transformer, cache_bytes

SHAPE = GatedDelta(n_k_head=2, n_v_head=4, k_dim=16, v_dim=24)
CFG = ModelConfig(dim=48, n_layer=3, n_head=4, n_kv_head=2, head_dim=16, ffn_dim=64, vocab_size=97, context=4096,
                  mixer=(SHAPE, SHAPE, None))
MAMBA = mamba.Mamba2(n_head=4, head_dim=24, n_group=2, state_dim=16)
CFGS = {"delta": CFG, "mamba": replace(CFG, mixer=(MAMBA, replace(MAMBA, n_group=1, norm=False), None)),
        "mamba1": replace(CFG, mixer=(mamba1.Mamba1(72, 8, 5, norm=True), mamba1.Mamba1(96, 16, 12, n_tap=3, conv_bias=False), None)),
        "beside": replace(CFG, mixer=(mamba.AttentionAndMamba(MAMBA), replace(MAMBA, conv_bias=False), None)),
        "shared": replace(CFG, mixer=(SharedTransformer(MAMBA, rank=8, adapts_attention=True), MAMBA, SharedTransformer(MAMBA, source=0, rank=4)),
                          block=ZambaBlocks(), per_layer=TokenEmbedding())}


@pytest.fixture(scope="module", params=CFGS)
def cfg(request):
    return CFGS[request.param]


def tiny_model(cfg=CFG, seed=0):
    torch.manual_seed(seed)
    model = Transformer(cfg).eval().requires_grad_(False)
    for name, p in model.named_parameters():
        if name.endswith("decay_rate"):
            p.copy_(-torch.rand_like(p) * 2)               # from hardly forgetting to forgetting at once
        elif name.endswith(("decay_bias", "conv_bias", "taps_bias", "skip")):
            p.normal_()
        elif p.dim() > 1:
            p.normal_(0, 0.7 if "embed" in name else p.shape[-1] ** -0.5)
    return model


@pytest.fixture(scope="module")
def model(cfg):
    return tiny_model(cfg)


def tokens(n, batch=2, seed=1):
    return torch.randint(0, 97, (batch, n), generator=torch.Generator().manual_seed(seed))


def whole(model, prompt):
    """Logits of each place, without a cache."""
    model.setup_cache(0, prompt.shape[1])
    return model(prompt, torch.arange(prompt.shape[1]), prompt.shape[1])


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


# ---- The recurrence -----------------------------------------------------------------------------

def inputs(T, dtype, N=3, dk=16, dv=24, seed=0):
    torch.manual_seed(seed)
    q, k, v = (torch.randn(2, T, N, d, dtype=torch.float64) for d in (dk, dk, dv))
    q, k = (t / t.norm(dim=-1, keepdim=True) for t in (q, k))
    g = -torch.rand(2, T, N, dtype=torch.float64).pow(8)                   # mostly a long memory
    beta = torch.rand(2, T, N, dtype=torch.float64)
    state = torch.randn(2, N, dk, dv, dtype=torch.float64)
    return [t.to(dtype) for t in (q, k, v, g, beta, state)]


def recurrence(q, k, v, g, beta, state):
    """As the paper writes it, a token and a head at a time."""
    y = torch.zeros_like(v)
    for b in range(v.shape[0]):
        for n in range(v.shape[2]):
            S = state[b, n].clone()
            for t in range(v.shape[1]):
                S = S * g[b, t, n].exp()
                S = S + torch.outer(k[b, t, n], beta[b, t, n] * (v[b, t, n] - S.T @ k[b, t, n]))
                y[b, t, n] = S.T @ q[b, t, n]
    return y, S


@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 130])
def test_both_forms_are_the_recurrence(T):
    expected, last = recurrence(*inputs(T, torch.float64))
    for form in (chunked, step_by_step):
        y, state = form(*inputs(T, torch.float64))
        state = state[-1] if isinstance(state, list) else state
        torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(state[-1, -1], last, rtol=1e-9, atol=1e-9)


def test_error_after_2000_steps():
    """fp32 beside float64: it does not grow, since every step forgets."""
    exact = step_by_step(*inputs(2000, torch.float64))[0]
    for form in (chunked, step_by_step):
        error = (form(*inputs(2000, torch.float32))[0] - exact).abs() / exact.std()
        assert error.max() < 2e-5 and error[:, -100:].mean() < 1e-6, (form, error.max(), error[:, -100:].mean())


def mamba_inputs(T, dtype, N=6, G=3, dk=16, dv=24, seed=0):
    torch.manual_seed(seed)
    q, k, v = (torch.randn(2, T, n, d, dtype=torch.float64) / d**0.5 for n, d in ((G, dk), (G, dk), (N, dv)))
    g = -torch.rand(2, T, N, dtype=torch.float64).pow(8)
    state = torch.randn(2, N, dk, dv, dtype=torch.float64)
    return [t.to(dtype) for t in (q, k, v, g, state)]


def mamba_recurrence(q, k, v, g, state):
    """h = exp(g) h + v k', y = h q: as state-space models write it, a token and a head at a time."""
    y, n_share = torch.zeros_like(v), v.shape[2] // q.shape[2]
    for b in range(v.shape[0]):
        for n in range(v.shape[2]):
            h = state[b, n].T.clone()
            for t in range(v.shape[1]):
                h = h * g[b, t, n].exp() + torch.outer(v[b, t, n], k[b, t, n // n_share])
                y[b, t, n] = h @ q[b, t, n // n_share]
    return y, h.T


@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 130])
def test_both_forms_of_mamba_are_the_recurrence(T):
    expected, last = mamba_recurrence(*mamba_inputs(T, torch.float64))
    for form in (mamba.chunked, mamba.step_by_step):
        y, state = form(*mamba_inputs(T, torch.float64))
        state = state[-1] if isinstance(state, list) else state
        torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(state[-1, -1], last, rtol=1e-9, atol=1e-9)


def mamba1_inputs(T, dtype, width=40, dk=8, seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, T, n, generator=g, dtype=torch.float64) for n in (dk, dk, width))
    step = torch.rand(2, T, width, generator=g, dtype=torch.float64)
    step[:, ::9] = 0                                       # as padding
    rate, state = -3 * torch.rand(width, dk, generator=g, dtype=torch.float64), torch.randn(2, width, dk, generator=g, dtype=torch.float64)
    return [t.to(dtype) for t in (rate, q, k, v, step, state)]


def mamba1_recurrence(rate, q, k, v, step, state):
    """As the paper has it, an entry of the state at a time."""
    ys = []
    for t in range(q.shape[1]):
        state = (step[:, t, :, None] * rate).exp() * state + step[:, t, :, None] * v[:, t, :, None] * k[:, t, None]
        ys.append(torch.einsum("bis,bs->bi", state, q[:, t]))
    return torch.stack(ys, 1), state


@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 65, 130])
def test_both_forms_of_mamba1_are_the_recurrence(T):
    expected, last = mamba1_recurrence(*mamba1_inputs(T, torch.float64))
    for form in (mamba1.chunked, mamba1.step_by_step):
        y, state = form(*mamba1_inputs(T, torch.float64))
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(state[-1] if isinstance(state, list) else state, last)


def test_error_of_mamba1_after_2000_steps():
    exact = mamba1.step_by_step(*mamba1_inputs(2000, torch.float64))[0]
    for form in (mamba1.chunked, mamba1.step_by_step):
        error = (form(*mamba1_inputs(2000, torch.float32))[0] - exact).abs() / exact.std()
        assert error.max() < 1e-5


def test_error_of_mamba_after_2000_steps():
    exact = mamba.step_by_step(*mamba_inputs(2000, torch.float64))[0]
    for form in (mamba.chunked, mamba.step_by_step):
        error = (form(*mamba_inputs(2000, torch.float32))[0] - exact).abs() / exact.std()
        assert error.max() < 2e-5 and error[:, -100:].mean() < 1e-6, (form, error.max(), error[:, -100:].mean())


# ---- Position is the mask -----------------------------------------------------------------------

@pytest.mark.parametrize("n", [1, 2, 3, 63, 64, 65, 200])
@pytest.mark.parametrize("max_rejected", [0, 3])
def test_one_by_one_in_calls_and_whole(model, n, max_rejected):
    prompt = tokens(n)
    expected = whole(model, prompt)
    for longest in (1, 2, 7, CHUNK, n):
        model.setup_cache(2, n, longest, max_rejected=max_rejected)
        parts = [model(prompt[:, a:a + longest], torch.arange(a, min(a + longest, n)), longest)
                 for a in range(0, n, longest)]
        close(torch.cat(parts, dim=1), expected)


@pytest.mark.parametrize("max_rejected", [0, 2])
def test_padded_rows_of_any_length(model, max_rejected, cfg):
    """Each row goes on, one token and then five, as it would alone; all in one call or several."""
    lengths, T = [1, 2, 3, 5, 64, 65, 70], 70
    prompt, more = tokens(T, len(lengths)), tokens(6, len(lengths), seed=2)
    end = torch.tensor(lengths)[:, None]
    for longest in (T, 33, 2):
        model.setup_cache(len(lengths), 80, T, max_rejected=max_rejected)
        logits = torch.zeros(len(lengths), 97)
        for a in range(0, T, longest):
            piece = prompt[:, a:a + longest]
            last = (end - 1 - a).clamp(0, piece.shape[1] - 1)
            new = model(piece, torch.arange(a, a + piece.shape[1]).minimum(end), last)
            logits = torch.where(end > a, new[:, 0], logits)
        one = model(more[:, :1], end, 1)
        five = model(more[:, 1:], end + 1 + torch.arange(5), 5)
        for row, n in enumerate(lengths):
            alone = whole(tiny_model(cfg), torch.cat((prompt[row:row + 1, :n], more[row:row + 1]), dim=1))[0]
            close(torch.cat((logits[row:row + 1], one[row], five[row])), alone[n - 1:])


def test_rows_of_the_cache_by_number(model, cfg):
    """Rows 3 and 1 run a prompt, twice; 0 and 2 keep what they remember."""
    model.setup_cache(4, 128, 80)
    kept, prompt, more = tokens(70, 4), tokens(75, 2, seed=3), tokens(1, 4, seed=4)
    model(kept, torch.arange(70))
    rows = torch.tensor([3, 1])
    for _ in range(2):                                     # the second time: the slot is refilled
        model(prompt, torch.arange(75).expand(2, -1), batch_idx=rows)
    pos = torch.tensor([70, 75, 70, 75])[:, None]
    got = model(more, pos)[:, 0]
    for row in range(4):
        before = kept[row] if row in (0, 2) else prompt[[3, 1].index(row)]
        close(got[row], whole(tiny_model(cfg), torch.cat((before, more[row]))[None])[0, -1])


def test_rejected_tokens_leave_no_trace(model):
    """Calls of k + 1 tokens, of which any number is kept, at every place of the ring."""
    prompt, wrong = tokens(90, 1), tokens(90, 1, seed=5)
    expected = whole(model, prompt)[0]
    for k in (1, 2, 4):
        model.setup_cache(1, 128, 64, max_rejected=k)
        got = [model(prompt[:, :9], torch.arange(9), 1)[0]]
        at, kept = 9, 0
        while at + k + 1 < 90:
            call = torch.cat((prompt[:, at:at + kept + 1], wrong[:, at + kept + 1:at + k + 1]), dim=1)
            got.append(model(call, torch.arange(at, at + k + 1), k + 1)[0, :kept + 1])
            at += kept + 1
            kept = (kept + 1) % (k + 1)
        close(torch.cat(got), expected[8:at])


def test_rows_that_are_not_in_use_disturb_nothing(model, cfg):
    """They stand at position 0, begin anew each time, and take the next prompt."""
    prompts = [tokens(n, 1, seed=n)[0].tolist() for n in (5, 66, 3, 20)]
    model.setup_cache(2, 128, 32)
    batch = make_batch(model, [GREEDY] * 2)
    got = {0: [], 1: [], 2: [], 3: []}

    def run(names, n):
        for _ in range(n):
            for row, name in names.items():
                got[name].append(batch.token[row].item())
            batch.step()
    batch.prefill([0], prompts[:1])
    run({0: 0}, 4)
    batch.prefill([1], prompts[1:2])
    run({0: 0, 1: 1}, 5)
    batch.end(0)
    run({1: 1}, 3)
    batch.prefill([0], prompts[2:3])
    run({0: 2, 1: 1}, 4)
    batch.end(1)
    batch.prefill([1], prompts[3:])
    run({0: 2, 1: 3}, 4)
    for name, prompt in enumerate(prompts):
        alone = [t.item() for t in generated(tiny_model(cfg), [prompt], len(got[name]), GREEDY)]
        assert got[name] == alone, name


def test_dtype_of_the_state(model, cfg):
    """fp32 whatever the model's dtype; the convolution's inputs are in that."""
    model.setup_cache(1, 16)
    ring = getattr(model.layers[0].attn, "mamba", model.layers[0].attn).cache
    assert {t.dtype for t in ring.buffers()} == {torch.float32}
    low = tiny_model(cfg)
    low.dtype = torch.bfloat16
    low.setup_cache(1, 16)
    ring = getattr(low.layers[0].attn, "mamba", low.layers[0].attn).cache
    assert ring.states.dtype == torch.float32 and ring.inputs.dtype == torch.bfloat16


def test_memory_is_counted():
    """Two layers of states whatever the length, one of keys and values."""
    n_channel, state = 2 * 2 * 16 + 4 * 24, 4 * 16 * 24 * 4
    for length in (64, 128):
        for k in (0, 3):
            recurrent = 2 * (state * (k + 2) + 4 * n_channel * (k + 4))
            assert cache_bytes(CFG, 2, length, 16, torch.float32, k) == 2 * (recurrent + 2 * 2 * length * 16 * 4)


def test_a_step_is_one_graph(model):
    """torch.compile traces a decode step without a break, for one row and for several."""
    torch._dynamo.reset()
    for prompts in ([[1, 2, 3]], [[1, 2, 3], [4, 5]]):
        expected = [t.tolist() for t in generated(model, prompts, 3, GREEDY)]
        step = torch.compile(decode_one_token, fullgraph=True, dynamic=False, backend="eager")
        assert [t.tolist() for t in generated(model, prompts, 3, GREEDY, steps=Steps(decode=step))] == expected


# ---- Drafts and conversations -------------------------------------------------------------------

@pytest.mark.parametrize("draft", ["the model itself", "another", "look-up"])
def test_speculation_changes_nothing(draft, cfg):
    model, prompt = tiny_model(cfg), [1, 2, 3, 1, 2, 3, 1, 2]
    expected = [t.item() for t in generated(model, [prompt], 40, GREEDY)]
    drafter = {"the model itself": tiny_model(cfg), "another": tiny_model(cfg, seed=1), "look-up": None}[draft]
    for k in (1, 4):
        model.setup_cache(1, 64, 32, max_rejected=k)
        batch = speculative(model, k, drafter, fixed=True)
        assert ids_of(batch, prompt, 40) == expected
        if draft == "the model itself":
            assert batch.accept_counts[k] >= 30 // (k + 1)
        assert ids_of(batch, prompt, 40) == expected       # the second time in the same cache


def test_a_cache_that_cannot_go_back_is_refused(cfg):
    model = tiny_model(cfg)
    model.setup_cache(1, 64, 32, max_rejected=1)
    with pytest.raises(ValueError, match="2 draft tokens"):
        speculative(model, 2, tiny_model(cfg))


def test_a_conversation_goes_on_from_the_state(cfg):
    """As far back as the cache was set up for, and no farther: then it must begin anew."""
    model, fresh = tiny_model(cfg), tiny_model(cfg)
    model.setup_cache(1, 128, 16, max_rejected=3)
    assert max_rewind(model) == 3 and max_rewind(Transformer(replace(cfg, mixer=(None,)))) is None
    batch = make_batch(model, [GREEDY])
    assert rewind(batch) == 2
    batch.n_beyond = 3                                     # as of one that drafts 2 tokens
    assert rewind(batch) == 0
    del batch.n_beyond
    ids, n_cached = tokens(21, 1)[0].tolist(), 0
    for turn, back in enumerate((0, 1, 2, 0)):
        answer = ids_of(batch, ids, 9, n_cached)
        assert answer == [t.item() for t in generated(fresh, [ids], 9, GREEDY)], turn
        n_cached = len(ids) + len(answer) - 1 - back
        ids = (ids + answer)[:n_cached] + tokens(7, 1, seed=turn)[0].tolist()


# ---- Against transformers -----------------------------------------------------------------------

@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_next", "qwen3_5_moe", "granitemoehybrid-mamba", "bamba", "falcon_h1", "nemotron_h-experts",
                                  "mamba", "falcon_mamba", "mamba2", "jamba", "zamba2"])
def test_prompts_around_a_chunk(families, name):
    """Of 1 to 200 tokens, and greedily on from there, with and without a cache."""
    directory, theirs = families(name)
    model = load_model(read_checkpoint(directory), torch.float32, "cpu")
    for n in (1, 63, 64, 65, 200):
        prompt = torch.randint(0, 160, (2, n), generator=torch.Generator().manual_seed(n))
        expected = tiny.logits(theirs, prompt)
        found = whole(model, prompt)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-4 * expected.std().item())
    model.setup_cache(2, 210, 64)
    got = torch.cat(list(generated(model, prompt, 10, GREEDY)), 1)
    expected = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=10, do_sample=False, eos_token_id=None)
    assert torch.equal(got, expected[:, n:])


def reversed_(t):
    return t.flip(-1)


@pytest.mark.parametrize("part, change", [
    ("conv", reversed_), ("decay_rate", torch.zeros_like), ("decay_bias", torch.zeros_like), ("norm.weight", lambda t: t + 1),
    ("gate.weight", torch.zeros_like), ("rates.weight", lambda t: t.roll(len(t) // 2, 0)),
    ("qkv.weight", lambda t: torch.cat((t[64:128], t[:64], t[128:]))),       # keys for queries
    ("gate.weight", lambda t: t.view(4, 2, -1, 64).transpose(0, 1).reshape(-1, 64)),       # heads as llama.cpp has them
])
def test_planted_errors(families, part, change):
    """Each part of a layer shows in the logits."""
    directory, theirs = families("qwen3_5_text")
    model = load_model(read_checkpoint(directory), torch.float32, "cpu")
    prompt = tokens(24)
    expected = tiny.logits(theirs, prompt)
    close(whole(model, prompt), expected)
    p = model.layers[1].attn.get_parameter(part)
    with torch.no_grad():
        p.copy_(change(p))
    assert (whole(model, prompt) - expected).norm() > 0.01 * expected.norm()


def test_what_a_config_may_not_say():
    base = dict(model_type="qwen3_5_text", hidden_size=64, intermediate_size=96, num_hidden_layers=4, vocab_size=99)
    assert [m and m.n_v_head for m in config_from_hf(base)[0].mixer] == [32, 32, 32, None]
    for change, message in ((dict(linear_num_value_heads=17), "17 value heads cannot share 16"),
                            (dict(linear_key_head_dim=0), "'linear_key_head_dim' is 0"),
                            (dict(linear_conv_kernel_dim="4"), "is '4', expected an integer from 0"),
                            (dict(layer_types=["linear"] * 4), "'layer_types' is not 4 times one of")):
        with pytest.raises(ValueError, match=message):
            config_from_hf(base | change)


@pytest.mark.parametrize("name", ["bamba", "falcon_h1-norm"])
@pytest.mark.parametrize("part, change", [
    ("conv", reversed_), ("conv_bias", torch.zeros_like), ("decay_rate", torch.zeros_like), ("decay_bias", torch.zeros_like),
    ("skip", torch.zeros_like), ("norm.weight", reversed_), ("gate.weight", torch.zeros_like), ("decay.weight", reversed_),
    ("qkv.weight", lambda t: torch.cat((t[16:32], t[:16], t[32:]))),
])
def test_planted_errors_in_mamba(families, name, part, change):
    """Each part of a layer shows in the logits."""
    directory, theirs = families(name)
    model = load_model(read_checkpoint(directory), torch.float32, "cpu")
    attn = model.layers[1].attn
    attn = getattr(attn, "mamba", attn)
    if part == "conv_bias" and attn.conv_bias is None:
        pytest.skip("it has none")
    prompt = tokens(24)
    expected = tiny.logits(theirs, prompt)
    close(whole(model, prompt), expected)
    p = attn.get_parameter(part)
    with torch.no_grad():
        p.copy_(change(p))
    assert (whole(model, prompt) - expected).norm() > 0.003 * expected.norm()


@pytest.mark.parametrize("name", ["mamba", "falcon_mamba", "jamba"])
@pytest.mark.parametrize("part, change", [
    ("taps", reversed_), ("taps_bias", torch.zeros_like), ("decay_rate", reversed_), ("decay_bias", torch.zeros_like), ("skip", torch.zeros_like),
    ("v.weight", reversed_), ("gate.weight", reversed_), ("step.weight", reversed_), ("norm_q.weight", lambda t: t + 1),
    ("select.weight", lambda t: torch.cat((t[:-16], t[-8:], t[-16:-8])))])         # keys for queries
def test_planted_errors_in_mamba1(families, name, part, change):
    directory, theirs = families(name)
    model = load_model(read_checkpoint(directory), torch.float32, "cpu")
    layer = next(layer for layer in model.layers if hasattr(layer.attn, "select"))
    if part == "norm_q.weight" and name == "mamba":
        pytest.skip("it has none")
    prompt = tokens(24)
    expected = tiny.logits(theirs, prompt)
    close(whole(model, prompt), expected)
    p = layer.attn.get_parameter(part)
    with torch.no_grad():
        p.copy_(change(p))
    assert (whole(model, prompt) - expected).norm() > 0.003 * expected.norm()


def test_what_a_config_of_mamba1_may_not_say():
    base = dict(model_type="mamba", hidden_size=64, num_hidden_layers=2, vocab_size=99)
    [layer] = config_from_hf(base)[0].mixer
    assert (layer.width, layer.state_dim, layer.step_rank, layer.n_tap, layer.norm) == (128, 16, 4, 4, False)
    for change, message in ((dict(state_size=0), "'mamba_d_state' is 0"), (dict(conv_kernel=1), "a convolution of 1 is too small"),
                            (dict(time_step_rank="all"), "'mamba_dt_rank' is 'all'"), (dict(hidden_act="gelu_new"), "only silu"),
                            (dict(model_type="falcon_mamba", mixer_rms_eps="x"), "'mixer_rms_eps' is 'x'"),
                            (dict(model_type="jamba", intermediate_size=96, num_attention_heads=4, attn_layer_period=0), "'attn_layer_period' is 0"),
                            (dict(model_type="mamba2", num_heads=3, head_dim=64), "3 Mamba heads of 64 channels, expected 128")):
        with pytest.raises(ValueError, match=message):
            config_from_hf(base | change)


ORIGINAL = dict(d_model=64, n_layer=4, vocab_size=157, rms_norm=True, residual_in_fp32=True, fused_add_norm=True, pad_vocab_size_multiple=8)


@pytest.mark.parametrize("name, ssm_cfg", [
    ("mamba", dict(d_state=8)), ("mamba2-one_group", dict(layer="Mamba2", d_state=16, headdim=32, bias=True, conv_bias=False))])
def test_as_the_state_spaces_repositories_have_it(families, name, ssm_cfg, tmp_path):
    """Keys of their own, no model_type, a vocabulary that is padded in the weights."""
    directory, theirs = families(name)
    if name == "mamba2-one_group":
        theirs.config.time_step_limit = (0.0, float("inf"))    # no key of this
        for layer in theirs.backbone.layers:
            layer.mixer.time_step_limit = (0.0, float("inf"))
    state = {key.replace("embeddings", "embedding"): t for key, t in theirs.state_dict().items()}
    torch.save(state, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps(dict(ORIGINAL, ssm_cfg=ssm_cfg, attn_layer_idx=[], tie_embeddings=True)))
    model = load_model(read_checkpoint(tmp_path), torch.float32, "cpu")
    close(whole(model, tokens(24)), tiny.logits(theirs, tokens(24)))
    if name != "mamba":
        for layer in theirs.backbone.layers:
            layer.mixer.time_step_limit = (0.1, 1.5)
    for change, message in ((dict(attn_layer_idx=[1]), "'attn_layer_idx' is"), (dict(rms_norm=False), "'rms_norm' is False"),
                            (dict(ssm_cfg=dict(layer="Mamba3")), "'ssm_cfg' with 'Mamba3'"), (dict(ssm_cfg=dict(d_has=1)), "with ..d_has..")):
        with pytest.raises(ValueError, match=message):
            config_from_hf(dict(ORIGINAL, ssm_cfg=ssm_cfg) | change)


@pytest.mark.parametrize("change", [dict(norm_first=True), dict(norm=False), dict(min_step=0.5), dict(max_step=0.1)])
def test_planted_options_of_mamba(families, change):
    directory, theirs = families("falcon_h1-norm")
    model = load_model(read_checkpoint(directory), torch.float32, "cpu")
    for layer in model.layers:
        layer.attn.mamba.shape = replace(layer.attn.mamba.shape, **change)
        if not layer.attn.mamba.shape.norm:
            layer.attn.mamba.norm = torch.nn.Identity()
    expected = tiny.logits(theirs, tokens(24))
    assert (whole(model, tokens(24)) - expected).norm() > 0.003 * expected.norm()


def test_what_a_config_of_mamba_may_not_say():
    base = dict(model_type="bamba", hidden_size=64, intermediate_size=96, num_hidden_layers=4, vocab_size=99, num_attention_heads=4,
                num_key_value_heads=2, mamba_n_heads=8, attn_layer_indices=[1])
    assert [m and (m.n_head, m.head_dim) for m in config_from_hf(base)[0].mixer] == [(8, 16), None, (8, 16), (8, 16)]
    for change, message in ((dict(mamba_n_heads=7), "7 Mamba heads of"), (dict(mamba_n_groups=3), "8 Mamba heads cannot share 3"),
                            (dict(mamba_d_head=8), "8 Mamba heads of 8 channels, expected 128"),
                            (dict(mamba_d_conv=1), "convolution of 1"), (dict(time_step_limit=[1]), "expected two increasing"),
                            (dict(time_step_limit=[2, 1]), "expected two increasing")):
        with pytest.raises(ValueError, match=message):
            config_from_hf(base | change)
    base = {**base, "model_type": "nemotron_h", "n_groups": 2}
    blocks = config_from_hf(base | dict(hybrid_override_pattern="M-M*-M-M-*"))[0].block.branches
    assert blocks == (None, "attn_only", None, None, None, "attn_only")
    for pattern in ("MX", ["mamba", "rwkv"]):
        with pytest.raises(ValueError, match="expected mamba, attention, mlp or moe"):
            config_from_hf(base | dict(hybrid_override_pattern=pattern))
    with pytest.raises(ValueError, match="'projectors_bias' and 'mamba_proj_bias' differ"):
        config_from_hf({**base, "model_type": "falcon_h1", "mamba_d_ssm": 64, "projectors_bias": True})
