"""KV caches of 8 and 4 bits: their codes against the formulas, and the model's laws with them.

Models are in float64: where k is computed by other calls, its last bits differ, and in float32 now and then a
code with them, which changes logits by more than any tolerance of use.
"""

import json
import math
import shutil
from dataclasses import replace

import pytest
import tiny
import torch
from helpers import GREEDY, generated, ids_of, make_batch, speculative
from tokenizers import Tokenizer, models
from torch import nn

import model as model_file
from generate import Batch, Steps
from gpt_faster.decoding.engines import build_steps
from gpt_faster.decoding.scheduler import Generation, Scheduler, Worker
from gpt_faster.formats.config import config_from_hf
from gpt_faster.formats.load import load_model, read_checkpoint
from gpt_faster.layers import attention
from gpt_faster.layers import quantized_cache as qc
from gpt_faster.layers.latent import LatentCache
from gpt_faster.layers.quantized_cache import CacheFormat, QuantizedCache, QuantizedLatentCache
from model import KVCache, ModelConfig, Transformer, cache_bytes
from tokenizer import NullTokenizer

FORMATS = ["int8", "int4", "fp8", "int8/int4"]
WIDTHS = [16, 24, 32, 40, 64, 80, 96, 128, 256]
LENGTH = 40
BITS = {"int8": 8, "int4": 4, "fp8": 8}
# Rings, sinks, caps, ALiBi, heads of 24, a gate, a shared cache, recurrent layers, one head of all.
NAMES = ["llama3", "mistral-window", "gemma2", "gpt_oss", "qwen3", "bloom", "gemma4", "qwen3_next", "afmoe"]
LATENT = ["deepseek_v2", "minicpm3"]
PLAIN = ModelConfig(dim=64, n_layer=3, n_head=4, n_kv_head=2, head_dim=64, ffn_dim=96, vocab_size=160, context=128)


def values(*shape, seed=0):
    """Some of them larger than the rest, as keys have them."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    x[..., ::7] *= 20
    return x


def hadamard(m):
    """Sylvester's construction, in float64."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < m:
        matrix = torch.kron(torch.tensor([[1.0, 1], [1, -1]], dtype=torch.float64), matrix)
    return matrix / math.sqrt(m)


def block_turned(x, m):
    blocks = x.double().unflatten(-1, (-1, m))
    return (blocks @ hadamard(m)).flatten(-2)


def rounded(x, precision, turn=1):
    """What a cache makes of x [..., H]: by the formulas, group by group, with float16 scales.

    Turned and divided as the layout says, in float32: a code at a tie is the same.
    """
    y = qc.turn(x.float(), turn)
    out = torch.empty_like(y, dtype=torch.float64)
    for a in range(0, y.shape[-1], 32):
        group = y[..., a:a + 32]
        top, place = group.abs().max(-1, keepdim=True)
        if precision == "int4":
            top = -group.gather(-1, place)
        scale = (top / {"int8": 127, "int4": 8, "fp8": 448}[precision]).half().float()
        code = torch.where(scale == 0, 0.0, group * (1 / scale))
        if precision == "fp8":
            code = code.clamp(-448, 448).to(torch.float8_e4m3fn)
        else:
            code = code.round().clamp(*((-8, 7) if precision == "int4" else (-127, 127)))
        out[..., a:a + 32] = code.double() * scale.double()
    return block_turned(out, turn) if turn > 1 else out


def turns(head_dim):
    """Width of the turn's blocks for keys, for values: powers of two that divide the head."""
    widest = max(2**i for i in range(12) if head_dim % 2**i == 0)
    return widest, min(widest, 64)


# ---- Codes --------------------------------------------------------------------------------------

@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("precision", BITS)
def test_codes_are_the_formulas(precision, width):
    x = values(3, 5, width)
    x[0, 1] = 0                                            # a group without a scale
    x[0, 2, 1:] = 0                                        # one value of its own
    codes, scale = qc.encode(x, precision)
    assert codes.dtype == qc.DTYPES[precision] and scale.dtype == torch.float16
    assert codes.shape[-1] == width * BITS[precision] // 8 and scale.shape[-1] == -(-width // 32)
    y = qc.decode(codes, scale, precision)
    torch.testing.assert_close(y.double(), rounded(x, precision), rtol=1e-6, atol=1e-6)
    assert not y[0, 1].any() and y[0, 2, 0] == pytest.approx(float(x[0, 2, 0]), rel=1e-3)


def test_halves_are_rounded_to_even_and_the_low_bits_are_the_even_index():
    x = torch.zeros(32)
    x[:6] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5])
    assert qc.encode(x, "int8")[0][:6].tolist() == [127, 0, 2, 2, 0, -2]
    x[:6] = torch.tensor([8.0, 1.0, -0.5, 0.5, 7.0, -7.0])
    codes, scale = qc.encode(x, "int4")
    assert scale.tolist() == [-1.0] and codes[:3].tolist() == [0 | 7 << 4, 8 | 8 << 4, 1 | 15 << 4]
    assert qc.decode(codes, scale, "int4")[:6].tolist() == [8, 1, 0, 0, 7, -7]


@pytest.mark.parametrize("width", [8, 16, 64, 128])
def test_the_turn_is_sylvesters_and_its_own_inverse(width):
    x = values(4, 2 * width)
    y = qc.turn(x, width)
    for turned in (y, qc.turn_back(x, width)):
        torch.testing.assert_close(turned.double(), block_turned(x, width), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(qc.turn(y, width), x, rtol=1e-5, atol=1e-4)
    assert qc.turn(x, 1) is x and qc.turn_back(x, 1) is x


def test_kernels_add_in_the_same_order():
    """Neighbours first, then pairs of pairs: bit for bit, so that others can store the same codes."""
    x = values(8)
    y = x.tolist()
    for n in (1, 2, 4):
        for i in range(8):
            if not i & n:
                a, b = torch.tensor(y[i]), torch.tensor(y[i + n])
                y[i], y[i + n] = float(a + b), float(a - b)
    assert qc.turn(x, 8).tolist() == (torch.tensor(y) * 8**-0.5).tolist()


@pytest.mark.parametrize("head_dim, keys, vals", [(64, 64, 64), (80, 16, 16), (96, 32, 32), (128, 128, 64), (256, 256, 64),
                                                  (40, 8, 8)])
def test_widths_of_the_turn(head_dim, keys, vals):
    cache = QuantizedCache((1, 1, 4, head_dim), torch.float32, "cpu", ("int4", "int4"))
    assert (cache.k_turn, cache.v_turn) == (keys, vals) == turns(head_dim)


def test_a_turn_serves_keys_with_large_values():
    """It does what it is for, also through the cache."""
    x = values(2, 1, 9, 64).bfloat16()
    def error(turned):
        cache = QuantizedCache((2, 1, 9, 64), torch.bfloat16, "cpu", ("int4", "int4"))
        if not turned:
            cache.k_turn = cache.v_turn = 1
        k, v = cache(torch.arange(9), x, x, 9, None)
        assert k.dtype == v.dtype == torch.bfloat16
        small = torch.arange(64) % 7 != 0
        return (k - x)[..., small].float().square().mean()
    assert error(True) < 0.5 * error(False)


# ---- The model ----------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def model_of(families):
    """A family's model in float64, made once; each test sets its cache."""
    made = {}

    def get(name, kv_cache):
        if name not in made:
            made[name] = load_model(read_checkpoint(families(name)[0]), torch.float64, "cpu")
        made[name].kv_cache = CacheFormat.parse(kv_cache) if kv_cache else None
        return made[name]
    return get


@pytest.fixture(autouse=True)
def all_in_float64(monkeypatch):
    """Experts, for which torch has no such product, and explicit scores, which are float32 otherwise."""
    def product(x, weight, ends):
        parts = zip([0, *ends.tolist()], ends.tolist(), weight)
        return torch.cat([x[a:b] @ expert.mT for a, b, expert in parts])

    def scores(a, b):
        return (a.flatten(2, 3).to(b.dtype) @ b).unflatten(2, a.shape[2:4])

    plain, plain_scores = model_file.grouped_mm, attention.grouped_product
    monkeypatch.setattr(attention, "grouped_product",
                        lambda a, b: (scores if b.dtype == torch.float64 else plain_scores)(a, b))
    monkeypatch.setattr(model_file, "grouped_mm",
                        lambda x, *args: (product if x.dtype == torch.float64 else plain)(x, *args))


def tokens(n=20, batch=3):
    return torch.randint(0, 160, (batch, n), generator=torch.Generator().manual_seed(2))


def whole(model, prompt, n_row=3):
    """In one call, through the cache."""
    model.setup_cache(n_row, LENGTH)
    return model(prompt, torch.arange(prompt.shape[1]), prompt.shape[1])


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def cases():
    return [(name, kv_cache) for name in NAMES for kv_cache in FORMATS] + [(name, "int8") for name in LATENT]


def quantized_caches(model):
    return [m for m in model.modules() if isinstance(m, QuantizedCache | QuantizedLatentCache)]


@pytest.mark.parametrize("name, kv_cache", [case for case in cases() if case[0] not in LATENT])
@torch.inference_mode()
def test_a_prompt_attends_to_what_is_stored(model_of, name, kv_cache):
    """Against the model without a cache, whose keys and values are rounded by the formulas before they meet queries."""
    model, prompt = model_of(name, kv_cache), tokens()
    found = whole(model, prompt)
    assert quantized_caches(model)
    keys, vals = model.kv_cache.keys, model.kv_cache.values

    def round_keys(attend, inputs):
        q, k, v, *rest = inputs
        width = k.shape[-1]
        return q, rounded(k, keys, turns(width)[0]), rounded(v, vals, turns(width)[1]), *rest

    attends = [layer.attn.attend for layer in model.layers if hasattr(layer.attn, "attend")]
    hooks = [attend.register_forward_pre_hook(round_keys) for attend in attends]
    model.setup_cache(0, LENGTH)
    expected = model(prompt, torch.arange(20), 20)
    for hook in hooks:
        hook.remove()
    unquantized = model(prompt, torch.arange(20), 20)
    close(found, expected)
    assert (unquantized - expected).abs().max() > 1e-3 * unquantized.std()


@pytest.mark.parametrize("name", LATENT)
@torch.inference_mode()
def test_latents_are_rounded_as_they_are_stored(model_of, name, monkeypatch):
    model, prompt = model_of(name, "int8"), tokens()
    found = whole(model, prompt)
    assert len(quantized_caches(model)) == len(model.layers)
    plain = LatentCache.forward
    monkeypatch.setattr(LatentCache, "forward",
                        lambda self, slot, k, *args: plain(self, slot, rounded(k, "int8"), *args))
    model.kv_cache = None
    close(found, whole(model, prompt))


@pytest.mark.parametrize("name, kv_cache", cases())
@torch.inference_mode()
def test_steps_chunks_and_padding_equal_whole(model_of, name, kv_cache):
    """Over what an earlier request left, in rings, with the live part of the cache, right-padded."""
    model, prompt = model_of(name, kv_cache), tokens()
    expected = whole(model, prompt)
    steps = [model(prompt[:, i:i + 1], torch.arange(i, i + 1)) for i in range(20)]
    close(torch.cat(steps, dim=1), expected)
    model.setup_cache(3, LENGTH, 4)                        # rings of window + 3
    for cache in quantized_caches(model):
        for t in cache.buffers():
            t.copy_(torch.full_like(t, 3))
    chunks = [model(prompt[:, a:b], torch.arange(a, b), b - a, n_key)
              for a, b, n_key in ((0, 4, 4), (4, 5, 16), (5, 9, 9), (9, 13, None), (13, 16, 16), (16, 20, 24))]
    close(torch.cat(chunks, dim=1), expected)
    model.setup_cache(3, LENGTH)
    padded = nn.functional.pad(prompt, (0, 12), value=5)
    close(model(padded, torch.arange(32), torch.full((3, 1), 19)), expected[:, -1:])


@pytest.mark.parametrize("name, kv_cache", cases())
@torch.inference_mode()
def test_a_row_equals_alone(model_of, name, kv_cache):
    """Rows of different lengths in one call, then steps of some rows in another order."""
    model, prompt, lengths = model_of(name, kv_cache), tokens(), [20, 3, 11]
    new = tokens(2)
    alone = []
    for i, n in enumerate(lengths):
        ids = torch.cat((prompt[i, :n], new[i]))[None]
        alone.append(whole(model, ids, 1)[0, n - 1:])
    model.setup_cache(3, LENGTH)
    end = torch.tensor(lengths)[:, None]
    rows = [model(prompt, torch.arange(20).minimum(end), end - 1)]
    for j, order in enumerate(([2, 0, 1], [1, 2, 0])):
        order = torch.tensor(order)
        logits = model(new[order, j:j + 1], end[order] + j, batch_idx=order)
        rows.append(logits[order.argsort()])
    close(torch.cat(rows, dim=1), torch.stack(alone))


@pytest.mark.parametrize("kv_cache", FORMATS)
def test_traced_whole(kv_cache):
    """torch.compile gets one graph, as on a GPU, of a prompt and of a step."""
    torch._dynamo.reset()
    model = Transformer(replace(PLAIN, n_layer=1, head_dim=16))
    for p in model.parameters():
        nn.init.normal_(p, std=0.1)
    model.kv_cache = CacheFormat.parse(kv_cache)
    with torch.no_grad():
        expected = whole(model, tokens())
        model.setup_cache(3, LENGTH)
        step = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
        close(step(tokens()[:, :19], torch.arange(19), 19), expected[:, :19])
        close(step(tokens()[:, 19:], torch.tensor([19]), 1, 32), expected[:, 19:])


@pytest.mark.parametrize("kv_cache", FORMATS)
def test_slots_and_reused_prefixes_equal_alone(model_of, kv_cache):
    """Six prompts through two rows, two of which begin as others: what the rows have cached is what a prompt would store."""
    model = model_of("mistral-window", kv_cache)
    draw = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, 160, (n,), generator=draw).tolist() for n in (9, 4, 14, 6)]
    prompts += [prompts[2] + [7, 8], prompts[0] + [3]]
    alone = [[t.item() for t in generated(model, [ids], 6, GREEDY)] for ids in prompts]
    model.setup_cache(2, LENGTH, 8, max_rejected=1)
    scheduler = Scheduler(make_batch(model, [GREEDY] * 2), 8, reuse=True)
    work = [Generation(NullTokenizer(), ids, max_new=6) for ids in prompts]
    scheduler.waiting.extend(work)
    for _ in scheduler.run():
        pass
    assert [each.ids for each in work] == alone
    assert sum(each.n_reused for each in work) > 5


@pytest.mark.parametrize("kv_cache", FORMATS)
@pytest.mark.parametrize("drafted", [True, False])
def test_speculation_changes_no_token(model_of, kv_cache, drafted):
    """Rejected drafts are overwritten, with their scales; a draft model's cache is quantized as well."""
    model = model_of("llama3", kv_cache)
    prompt = tokens(12, 1).repeat(1, 2)[0].tolist()
    model.setup_cache(1, 64)
    plain = ids_of(make_batch(model, [GREEDY]), prompt, 25)
    draft = None
    if drafted:
        torch.manual_seed(3)
        draft = Transformer(replace(model.cfg, n_layer=1)).double()
        draft.dtype, draft.kv_cache = torch.float64, model.kv_cache
        for p in draft.parameters():
            p.data.normal_(std=0.1)
    batch = speculative(model, 3, draft, fixed=True)
    assert ids_of(batch, prompt, 25) == plain and batch.accept_stats()["rounds"] > 3
    assert not drafted or quantized_caches(draft)


@pytest.mark.parametrize("kv_cache", FORMATS)
def test_an_mtp_heads_cache(heads, kv_cache):
    """Its drafts are the head's own through such a cache too, and change no token."""
    from gpt_faster.decoding.mtp import MTPDrafter
    directory, *_ = heads("glm4_moe")
    source = read_checkpoint(directory)
    model, head = (load_model(s, torch.float32, "cpu") for s in (source, source.mtp()))
    for each in (model, head):
        each.kv_cache = CacheFormat.parse(kv_cache)
    model.setup_cache(1, 64, 16, max_rejected=4)
    prompt = tokens(12, 1)[0].tolist()
    batch = speculative(model, 3, head, fixed=True)
    assert isinstance(batch.drafter, MTPDrafter)
    text = ids_of(batch, prompt, 20)
    assert quantized_caches(head) and quantized_caches(model)
    logits = model(torch.tensor([prompt + text]), torch.arange(32), 21)[0, :20]
    assert (logits.amax(-1) - logits.gather(1, torch.tensor(text)[:, None])[:, 0] < 0.1).all()


@pytest.mark.parametrize("kv_cache", FORMATS)
@torch.inference_mode()
def test_with_our_kernels(families, kv_cache, two_threads):
    """What they do not know runs as it is written; exchanged for a plain cache and back, they follow."""
    model = load_model(read_checkpoint(families("qwen3")[0]), torch.float32, "cpu")
    prompt = tokens()
    expected = {}
    for each in (kv_cache, None):
        model.kv_cache = CacheFormat.parse(each) if each else None
        expected[each] = whole(model, prompt)
    assert (expected[None] - expected[kv_cache]).abs().max() > 1e-3
    steps = build_steps(model, "compile")
    assert isinstance(steps, Steps)
    for each in (kv_cache, None, kv_cache):
        model.kv_cache = CacheFormat.parse(each) if each else None
        logits = whole(model, prompt)
        # A code may differ by one where the products of the layers before are rounded otherwise.
        assert (logits - expected[each]).abs().mean() < 0.1 * (expected[None] - expected[kv_cache]).abs().mean()


def without_turn(model, monkeypatch):
    monkeypatch.setattr(qc, "turn", lambda x, m: x)
    monkeypatch.setattr(qc, "turn_back", lambda x, m: x)


def with_other_codes(model, monkeypatch):
    def clamped(plain):
        return lambda groups: plain(groups.clamp(-0.5, 0.5))
    monkeypatch.setattr(qc, "ENCODERS", {precision: clamped(plain) for precision, plain in qc.ENCODERS.items()})


def with_other_codes_in_place(model, monkeypatch):
    for precision, plain in qc.ENCODERS.items():
        monkeypatch.setitem(qc.ENCODERS, precision, lambda groups, plain=plain: plain(groups.clamp(-0.5, 0.5)))


def with_another_forward(model, monkeypatch):
    plain = QuantizedCache.forward
    monkeypatch.setattr(QuantizedCache, "forward", lambda self, slot, k, v, *rest: plain(self, slot, k, 0.5 * v, *rest))


def with_a_hook(model, monkeypatch):
    for cache in quantized_caches(model):
        cache.register_forward_hook(lambda module, inputs, output: (output[0], 0.5 * output[1]))


def with_its_own_forward(model, monkeypatch):
    for cache in quantized_caches(model):
        cache.forward = lambda *args, plain=cache.forward: [0.5 * x for x in plain(*args)]


@pytest.mark.kernels
@pytest.mark.parametrize("kv_cache", FORMATS)
@pytest.mark.parametrize("edit", [without_turn, with_other_codes, with_other_codes_in_place, with_another_forward, with_a_hook, with_its_own_forward])
@torch.inference_mode()
def test_an_edited_cache_is_what_runs(families, kv_cache, edit, monkeypatch, two_threads):
    """C++ stands in for the plain form only where it is the one that it knows, also when it is edited between two calls."""
    plain, fast = (load_model(read_checkpoint(families("qwen3")[0]), torch.float32, "cpu") for _ in range(2))
    prompt, found = tokens(), []
    build_steps(fast, "compile")
    for model in (plain, fast):
        model.kv_cache = CacheFormat.parse(kv_cache)
        found.append(whole(model, prompt))
    unedited = found[0]
    assert (found[1] - unedited).abs().mean() < 0.1 * unedited.std()
    edit(plain, monkeypatch)
    if edit in (with_a_hook, with_its_own_forward):        # of instances
        edit(fast, monkeypatch)
    expected, got = (model(prompt, torch.arange(20), 20) for model in (plain, fast))
    assert (expected - unedited).abs().mean() > 3 * (got - expected).abs().mean()


@torch.inference_mode()
def test_a_row_that_is_not_finite_is_cleared(model_of):
    for kv_cache in FORMATS:
        model, prompt = model_of("llama3", kv_cache), tokens()
        expected = whole(model, prompt)
        for cache in quantized_caches(model):
            cache.v_scale[1, :, 3] = torch.nan
            cache.k_scale[1, :, 2] = torch.inf
        assert not model(prompt[:, 19:], torch.tensor([19]))[1].isfinite().any()
        Worker(Batch(model, make_batch(model, [GREEDY] * 3).sampler, Steps())).clear(1)
        logits = model(prompt, torch.arange(20), 20)
        close(logits, expected)


# ---- Memory, choice, errors ---------------------------------------------------------------------

@pytest.mark.parametrize("kv_cache, per_head", [("int8", 2 * 68), ("fp8", 2 * 68), ("int4", 2 * 36), ("int8/int4", 68 + 36)])
def test_bytes(kv_cache, per_head):
    """A head of 64: 8.5 or 4.5 bits a value, with scales."""
    cfg = replace(PLAIN, window=(None, 8, None))
    form = CacheFormat.parse(kv_cache)
    expected = 5 * 2 * per_head * (100 + 11 + 100)         # rows, heads, slots
    assert cache_bytes(cfg, 5, 100, 4, torch.bfloat16, kv_cache=form) == expected
    model = Transformer(cfg)
    model.kv_cache = form
    model.setup_cache(5, 100, 4)
    assert sum(t.nbytes for layer in model.layers for t in layer.attn.buffers()) == expected
    model.setup_cache(0, 100)
    assert all(layer.attn.cache is None for layer in model.layers)
    model.kv_cache = None
    model.setup_cache(1, 100)
    assert all(type(layer.attn.cache) is KVCache for layer in model.layers)


def test_recurrent_states_stay(model_of):
    sizes = {}
    for kv_cache in ("int8", None):
        model = model_of("qwen3_next", kv_cache)
        model.setup_cache(1, LENGTH)
        sizes[kv_cache] = [sum(t.nbytes for t in layer.attn.buffers()) for layer in model.layers]
    smaller = [a < b for a, b in zip(sizes["int8"], sizes[None])]
    assert smaller == [False, False, True, False]


@pytest.mark.parametrize("text", ["int3", "int8,int4", "int8/", "/int8", "", "int8/int8/int8", "q8_0", "INT8"])
def test_a_precision_that_is_none(text):
    with pytest.raises(ValueError, match="expected int8, int4, fp8, or keys/values, for example int8/int4; got"):
        CacheFormat.parse(text)


def test_names():
    assert [str(CacheFormat.parse(text)) for text in ("int8", "int8/int8", "int8/int4")] == ["int8", "int8", "int8/int4"]


@pytest.mark.parametrize("kv_cache", ["int4", "fp8", "int8/int4"])
def test_latents_take_int8_only(families, kv_cache):
    cfg = read_checkpoint(families("deepseek_v2")[0]).cfg
    with pytest.raises(ValueError, match="does not fit latent attention .MLA., whose .* use int8"):
        CacheFormat.parse(kv_cache).check(cfg)
    CacheFormat.parse("int8").check(cfg)


def test_heads_of_odd_width():
    cfg = replace(PLAIN, head_dim=33)
    with pytest.raises(ValueError, match="needs an even head_dim, this model has 33: use int8 or fp8"):
        CacheFormat.parse("int8/int4").check(cfg)
    CacheFormat.parse("fp8").check(cfg)


def test_a_cache_of_your_own_is_refused_not_ignored():
    class Mine(KVCache):
        pass
    attn = nn.Module()
    attn.cache = Mine((1, 1, 4, 8), torch.float32, "cpu")
    with pytest.raises(ValueError, match="cannot replace a .*Mine: only"):
        CacheFormat.parse("int8").replace_cache(attn)


def test_every_family_takes_an_int8_cache():
    """None is refused, and none keeps keys in the model's dtype."""
    form = CacheFormat.parse("int8")
    for name in (*tiny.COVER, *NAMES, *LATENT):
        cfg, *_ = config_from_hf(tiny.FAMILIES[name]().to_dict())
        form.check(cfg)
        with torch.device("meta"):
            model = Transformer(cfg)
        model.kv_cache = form
        model.setup_cache(1, 16, 4, "meta")
        assert not [m for m in model.modules() if isinstance(m, KVCache | LatentCache)], name


# ---- Commands -----------------------------------------------------------------------------------

def run(capsys, main, *argv):
    """-> exit status, stdout, stderr of a command in this process."""
    try:
        status = main([str(a) for a in argv])
    except SystemExit as e:
        status = e.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture
def checkpoint(families, tmp_path):
    """name -> a directory with a tokenizer."""
    def get(name):
        directory = tmp_path / name
        shutil.copytree(families(name)[0], directory)
        words = {"a": 0, "b": 1, **{f"w{i}": i for i in range(2, 160)}}
        Tokenizer(models.WordLevel(words, unk_token="b")).save(str(directory / "tokenizer.json"))
        return directory
    return get


def test_generate(checkpoint, capsys):
    """The flag reaches the model, the memory line and the report; the other caches of the same command, too."""
    from gpt_faster.cli import session
    argv = ["-m", checkpoint("llama2"), "--device", "cpu", "--dtype", "float32", "--prompt", "9", "--max_new_tokens", "8",
            "--temperature", "0", "--json"]
    results = {}
    for kv_cache in (None, "int8", "int4"):
        more = ["--kv_cache", kv_cache] if kv_cache else []
        status, out, err = run(capsys, session.main, *argv, *more)
        memory = next(line for line in err.splitlines() if line.startswith("Memory: "))
        result = json.loads(out)
        assert status == 0 and result["kv_cache"] == kv_cache
        assert f"for the KV cache ({kv_cache}, 1 x 32" in memory if kv_cache else "(1 x 32 positions)" in memory
        results[kv_cache] = result["new_ids"]
    assert results["int8"][:2] == results[None][:2]        # of random weights: soon they differ
    status, out, err = run(capsys, session.main, *argv, "--kv_cache", "int4", "--speculate", "ngram")
    assert status == 0 and json.loads(out)["new_ids"] == results["int4"]


@pytest.mark.parametrize("flags, line", [
    (["--kv_cache", "q8_0"], "argument --kv_cache: expected int8, int4, fp8, or keys/values, for example int8/int4; got 'q8_0'"),
    (["--kv_cache", "int8", "--engine", "recompute"], "--kv_cache cannot be combined with --engine recompute, which has no KV cache"),
    (["-ctk", "q8_0"], "unrecognized arguments: -ctk q8_0 (did you mean --kv_cache?)"),
    (["--kv_bits", "8"], "unrecognized arguments: --kv_bits 8 (did you mean --kv_cache?)")])
def test_flags_that_are_refused(capsys, flags, line):
    from gpt_faster.cli import session
    status, out, err = run(capsys, session.main, *flags, "--prompt", "a")
    assert (status, out, err.partition("error: ")[2]) == (2, "", f"{line}\n")


@pytest.mark.parametrize("command", ["generate.py", "eval.py"])
def test_a_model_that_takes_int8_only_says_so_before_it_is_loaded(checkpoint, capsys, command):
    from gpt_faster.cli import evaluate, session
    from gpt_faster.cli.common import guarded
    main = {"generate.py": session.main, "eval.py": lambda argv: guarded(evaluate.run, argv)}[command]
    what = ["--prompt", "9"] if command == "generate.py" else ["--perplexity", __file__]
    status, out, err = run(capsys, main, "-m", checkpoint("deepseek_v2"), "--device", "cpu", "--kv_cache", "int4", *what)
    assert status == 2 and out == ""
    assert err.splitlines()[-1].endswith("whose one vector per position is keys and values: use int8")


def test_perplexity_is_of_the_quantized_cache(model_of):
    """Whole texts and windows in several calls: what eval.py --kv_cache measures."""
    from gpt_faster.cli.evaluate import perplexity, windows
    ids = tokens(30, 1)[0].tolist()
    found = {}
    for kv_cache in ("int8", "int4", None):
        model = model_of("llama3", kv_cache)
        model.setup_cache(0, 0)                            # score() allocates its own
        found[kv_cache] = perplexity(model, windows(ids, 30, 30))["nats_per_token"]
        if kv_cache:
            logits = whole(model, torch.tensor([ids]), 1)[0, :-1].log_softmax(-1)
            nats = -logits.gather(1, torch.tensor(ids[1:])[:, None]).mean()
            assert found[kv_cache] == pytest.approx(float(nats), rel=1e-5)
    assert len(set(found.values())) == 3
    assert abs(found["int8"] - found[None]) < abs(found["int4"] - found[None])


def test_load_model_and_serve_take_it(checkpoint):
    from gpt_faster.cli.options import Options
    from gpt_faster.loading import load_model as load_any
    from gpt_faster.server.main import build_parser, check_options
    llama, latent = (str(checkpoint(name)) for name in ("llama2", "deepseek_v2"))
    model, *_ = load_any(llama, dtype=torch.float32, kv_cache="int8/int4")
    model.setup_cache(1, 16)
    assert [type(m) for m in quantized_caches(model)] == [QuantizedCache] * 4
    with pytest.raises(ValueError, match="expected int8, int4, fp8"):
        load_any(llama, kv_cache="int3")
    with pytest.raises(ValueError, match="use int8"):
        load_any(latent, kv_cache="fp8")
    options = check_options(Options.parse(build_parser(), ["--kv_cache", "fp8"]))
    assert options.kv_cache == CacheFormat("fp8", "fp8")


def test_benchmark(capsys, monkeypatch):
    """Engines with such caches are rows of their own, compared with themselves in one call."""
    from gpt_faster.bench import cases
    from gpt_faster.bench import main as benchmark
    monkeypatch.setattr(cases, "PAUSE", 0)
    monkeypatch.setattr(cases, "read_bandwidth", lambda device: 8.0)
    argv = ["--random", "stories15M", "-n", 4, "-d", 9, "-r", 1, "--device", "cpu", "--dtype", "float32", "-o", "json"]
    status, out, err = run(capsys, benchmark.run, *argv, "--engines", "kv_cache,kv_cache@int8,kv_cache@int8/int4")
    rows = json.loads(out)["rows"]
    assert status == 0, err
    assert [row["engine"] for row in rows] == ["kv_cache", "kv_cache@int8", "kv_cache@int8/int4"]
    assert all(row["compared"] is True for row in rows)
    for engines, line in (("recompute@int8", "only kv_cache, cuda_graph"), ("kv_cache@int3", "expected int8, int4, fp8"),
                          ("sorted@int8", "only kv_cache"), ("int4@int8", "only kv_cache")):
        with pytest.raises(ValueError, match=line):
            benchmark.run([str(a) for a in (*argv, "--engines", engines)])
