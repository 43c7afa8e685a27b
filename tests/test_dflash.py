"""DFlash drafters: logits as the formulas give them, each layout, the text without drafts, and what is refused."""

import copy
import functools
import itertools
import json
import math
import re
import shutil

import pytest
import torch
import torch.nn.functional as F
from helpers import GREEDY, ids_of
from safetensors.torch import save_file
from test_errors import refused, run
from test_speculate import HOWS, chi_square, plain

import generate
import speculate
from gpt_faster import runtime
from gpt_faster.bench.drafts import FixedAcceptanceDrafter
from gpt_faster.decoding import dflash, engines
from gpt_faster.decoding.dflash import draw_block, of_all_tokens
from gpt_faster.decoding.samplers import build_sampler
from gpt_faster.formats.dflash import dflash_file, open_dflash
from gpt_faster.formats.load import load_model, read_checkpoint
from gpt_faster.formats.quantize_on_load import quantized
from gpt_faster.kernels.compile import as_cuda_graph
from gpt_faster.kernels.cpu.layers import OperationsLayer, uses_operations
from gpt_faster.kernels.cpu.linears import is_packed
from gpt_faster.layers.dflash import DFlash, DFlashConfig
from model import ModelConfig, Transformer
from quantize import schemes
from sampling import Sampler, SamplingParams
from speculate import FixedLength

D, N, K, H, V, L, FFN = 64, 4, 2, 24, 160, 3, 96             # of the drafters here
QWEN = dict(architectures=["DFlashDraftModel"], model_type="qwen3", hidden_size=D, num_attention_heads=N, num_key_value_heads=K,
            head_dim=H, intermediate_size=FFN, num_hidden_layers=L, vocab_size=V, rms_norm_eps=1e-5, rope_theta=1e4,
            max_position_embeddings=128, block_size=8, num_target_layers=4,
            dflash_config=dict(mask_token_id=159, target_layer_ids=[0, 2]))


def tensors(seed=1, n_tap=2, target_dim=D, sinks=False, bias=False, norms=True, **more):
    """A drafter's tensors by z-lab's names. more: names -> shapes."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator) * (shape[-1]**-0.5 if len(shape) > 1 else 0.5)
    made = {"fc.weight": normal(D, n_tap * target_dim), "hidden_norm.weight": 1 + normal(D), "norm.weight": 1 + normal(D)}
    for i in range(L):
        x = f"layers.{i}."
        for name, out, into in (("q_proj", N * H, D), ("k_proj", K * H, D), ("v_proj", K * H, D), ("o_proj", D, N * H)):
            made[f"{x}self_attn.{name}.weight"] = normal(out, into)
            if bias:
                made[f"{x}self_attn.{name}.bias"] = normal(out)
        for name, out, into in (("gate_proj", FFN, D), ("up_proj", FFN, D), ("down_proj", D, FFN)):
            made[f"{x}mlp.{name}.weight"] = normal(out, into)
        for name in ("q_norm", "k_norm") * norms:
            made[f"{x}self_attn.{name}.weight"] = 1 + normal(H)
        for name in ("input_layernorm", "post_attention_layernorm"):
            made[f"{x}{name}.weight"] = 1 + normal(D)
        if sinks:
            made[f"{x}self_attn.attention_sink_bias"] = normal(N)
    return made | {name: normal(*shape) for name, shape in more.items()}


def write(directory, config, made):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: t.contiguous() for name, t in made.items()}, directory / "model.safetensors")
    return directory


def opened(directory):
    return open_dflash(dflash_file(directory))


# ---- The reference: from the formulas, in float64, without a cache -------------------------------

def rms(x, weight, eps=1e-5):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x, pos, theta=1e4):
    """RoPE of x [heads, T, H]."""
    half = x.shape[-1] // 2
    angle = pos[:, None].double() / theta**(torch.arange(half).double() / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def reference(w, states, embedded, head, windows=(None,) * L, causal=(False,) * L):
    """Logits [k, V] of a block embedded [1 + k, D] behind the context of states [P, K D']; w: the drafter's tensors."""
    w = {name: t.double() for name, t in w.items()}
    P, T = len(states), len(embedded)
    c = rms(states.double() @ w["fc.weight"].T, w["hidden_norm.weight"])
    pos, x = torch.arange(P + T), embedded.double()
    for i in range(L):
        def linear(x, name, i=i):
            y = x @ w[f"layers.{i}.{name}.weight"].T
            return y + w.get(f"layers.{i}.{name}.bias", 0)

        def heads(x, name, n, i=i):
            y = linear(x, f"self_attn.{name}_proj").view(len(x), n, H)
            norm = w.get(f"layers.{i}.self_attn.{name}_norm.weight")
            return (y if norm is None else rms(y, norm)).transpose(0, 1)
        h = rms(x, w[f"layers.{i}.input_layernorm.weight"])
        both = torch.cat((c, h))                           # the context does not pass input_layernorm
        q, k, v = turned(heads(h, "q", N), pos[P:]), turned(heads(both, "k", K), pos), heads(both, "v", K)
        k, v = (t.repeat_interleave(N // K, 0) for t in (k, v))
        seen = torch.ones(T, P + T, dtype=torch.bool)
        far = pos[P:, None] - pos
        if causal[i]:
            seen &= far >= 0
        if windows[i]:
            seen &= (far < windows[i]) & (-far < windows[i])
        score = (q @ k.mT / math.sqrt(H)).masked_fill(~seen, -math.inf)
        sink = w.get(f"layers.{i}.self_attn.attention_sink_bias")
        if sink is not None:
            score = torch.cat((score, sink[:, None, None].expand(N, T, 1)), -1)
        y = score.softmax(-1)[..., :P + T] @ v
        x = x + linear(y.transpose(0, 1).reshape(T, -1), "self_attn.o_proj")
        h = rms(x, w[f"layers.{i}.post_attention_layernorm.weight"])
        x = x + linear(F.silu(linear(h, "mlp.gate_proj")) * linear(h, "mlp.up_proj"), "mlp.down_proj")
    return rms(x[1:], w["norm.weight"]) @ head.double().T


class Target(torch.nn.Module):
    """What a drafter takes of a target: embedding and output layer."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.embed = torch.nn.Embedding.from_pretrained(torch.randn(V, D, generator=generator))
        self.head = torch.nn.Linear(D, V, bias=False)
        self.head.weight = torch.nn.Parameter(torch.randn(V, D, generator=generator) / 8, requires_grad=False)
        self.after_embed = ()


SLIDING = dict(layer_types=["sliding_attention", "full_attention", "sliding_attention"], use_sliding_window=True, sliding_window=5)
VARIANTS = {                                               # config, tensors, the reference's windows and causal
    "plain": ({}, {}, {}),
    "causal": (dict(is_causal=True), {}, dict(causal=(True,) * 3)),
    "windows": (SLIDING, {}, dict(windows=(5, None, 5), causal=(True, False, True))),
    "windows both ways": (dict(SLIDING, is_causal=False), {}, dict(windows=(5, None, 5))),
    "sinks, biases, no norms": ({}, dict(sinks=True, bias=True, norms=False), {}),
}


@pytest.mark.parametrize("name", VARIANTS)
@torch.inference_mode()
def test_logits_are_the_formulas(tmp_path, name):
    """With the context in calls of any size, blocks of any length, and rejected blocks in between."""
    more, kinds, how = VARIANTS[name]
    made, target = tensors(**kinds), Target()
    directory = write(tmp_path / "d", {**QWEN, **more}, made)
    states = torch.randn(30, 2 * D, generator=torch.Generator().manual_seed(2))
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.08)):
        draft = load_model(opened(directory), dtype, "cpu")
        draft.join(Target().to(dtype))
        draft.setup_cache(1, 64, 10)
        done = 0
        for n, k in ((3, 7), (4, 2), (14, 7), (15, 1), (22, 5), (30, 7)):  # context, drafts
            while done < n:                                # the rows after n are rejected drafts'
                b = min(done + 10, 30)
                noise = torch.where(torch.arange(done, b)[:, None] < n, states[done:b], 3.0)
                draft.add_context(noise[None].to(dtype), torch.arange(done, b), 64)
                done = min(b, n)
            tokens = torch.tensor([[n] + [159] * k])
            found = draft(tokens, torch.arange(n, n + k + 1), 64)[0]
            expected = reference(made, states[:n], target.embed(tokens[0]), target.head.weight, **how)
            assert found.dtype == torch.float32
            torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


# ---- Layouts -------------------------------------------------------------------------------------

def speculators(**more):
    """The config of speculators: the layers apart, the target's layers by their inputs."""
    layers = {key: value for key, value in QWEN.items() if key not in ("architectures", "dflash_config", "block_size", "num_target_layers")}
    return dict(architectures=["DFlashDraftModel"], speculators_model_type="dflash", transformer_layer_config=layers, block_size=8,
                mask_token_id=159, aux_hidden_state_layer_ids=[1, 3], draft_vocab_size=V, target_hidden_size=D, max_anchors=256) | more


def without(config, *keys, **more):
    return {key: value for key, value in config.items() if key not in keys} | more


SPECULATORS_SLIDING = dict(layer_types=["sliding_attention"] * 3, sliding_window=6, use_sliding_window=True)
LAYOUTS = {                                                # name: config, the fields that it must give
    "z-lab": (QWEN, dict(block_size=8, mask_id=159, taps=(1, 3), n_target_layer=4, target_dim=D, window=(None,))),
    "all in dflash_config": (without(QWEN, "block_size", dflash_config=dict(QWEN["dflash_config"], block_size=5)), dict(block_size=5)),
    "no block size": (without(QWEN, "block_size"), dict(block_size=16)),
    "ids that are not stated": (without(QWEN, num_target_layers=36, dflash_config=dict(mask_token_id=3)),
                                dict(taps=(2, 18, 34), mask_id=3, n_target_layer=36)),
    "some layers slide": ({**QWEN, **SLIDING}, dict(window=(5, None, 5), causal=False, causal_window=True)),
    "seen both ways": ({**QWEN, **SLIDING, "dflash_config": dict(QWEN["dflash_config"], causal=False)},
                       dict(window=(5, None, 5), causal=False, causal_window=False)),
    "all causal": ({**QWEN, **SLIDING, "is_causal": True}, dict(causal=True, causal_window=True)),
    "use_swa": ({**QWEN, "dflash_config": dict(QWEN["dflash_config"], use_swa=True, swa_window_size=7)}, dict(window=(7,), causal_window=True)),
    "speculators": (speculators(), dict(taps=(1, 3), block_size=8, mask_id=159, causal_window=False, n_target_layer=0)),
    "speculators, causal": (speculators(**SPECULATORS_SLIDING, sliding_window_non_causal=False), dict(window=(6,), causal_window=True)),
    "speculators, both ways": (speculators(**SPECULATORS_SLIDING, sliding_window_non_causal=True), dict(window=(6,), causal_window=False)),
    "soft cap and scale": ({**QWEN, "dflash_config": dict(QWEN["dflash_config"], final_logit_softcapping=3.0, input_embedding_scale=8.0)}, {}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(tmp_path, name):
    config, expected = LAYOUTS[name]
    cfg = opened(write(tmp_path / "d", config, tensors(n_tap=3 if "36" in str(expected) else 2))).cfg
    assert {key: getattr(cfg, key) for key in expected} == expected
    assert (cfg.dim, cfg.n_head, cfg.n_kv_head, cfg.head_dim, cfg.ffn_dim, cfg.qk_norm) == (D, N, K, H, FFN, True)


def test_the_ids_that_are_not_stated():
    """z-lab's Qwen3-8B and Qwen3.6-27B have these as outputs."""
    from gpt_faster.formats.dflash import _taps
    assert _taps({}, 5, 36, False) == (2, 10, 18, 26, 34)
    assert _taps({}, 5, 64, False) == (2, 17, 32, 47, 62)
    assert _taps({}, 1, 36, False) == (19,)


def block_logits(draft, target, made_of=2):
    draft.join(target)
    draft.setup_cache(1, 64, 16)
    states = torch.randn(1, 6, made_of * D, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        draft.add_context(states, torch.arange(6), 64)
        return draft(torch.tensor([[9] + [159] * 4]), torch.arange(6, 11), 64)[0], states[0]


def fp32(source):
    return load_model(source, torch.float32, "cpu")


def test_own_parts(tmp_path):
    """An embedding, a mask vector, an output layer of some tokens; the scale and the cap of logits; the target's scale."""
    from gpt_faster.layers.embedding import ScaledEmbedding
    target, ids = Target(), torch.tensor([2, 3, 5, 7, 100, 159])
    own = {"embed_tokens.weight": (V, D), "lm_head.weight": (6, D)}
    made = tensors(**own) | {"d2t": ids - torch.arange(6), "t2d": torch.zeros(V, dtype=torch.bool), "verifier_norm.weight": torch.ones(D)}
    directory = write(tmp_path / "d", speculators(draft_vocab_size=6), made)
    mask = torch.randn(D, generator=torch.Generator().manual_seed(8))
    torch.save({"mask_token_id": 159, "embedding": mask}, directory / "mask_embedding.pt")
    draft = fp32(opened(directory))
    found, states = block_logits(draft, target)
    embedded = torch.stack([made["embed_tokens.weight"][9], *[mask] * 4])
    torch.testing.assert_close(found.double(), reference(made, states, embedded, made["lm_head.weight"]), rtol=1e-4, atol=1e-4)
    assert draft.tokens.ids.tolist() == ids.tolist()
    everything = of_all_tokens(found[None], draft.tokens.ids, V)[0]
    assert torch.equal(everything[:, ids], found) and everything.isfinite().sum() == found.numel()
    assert of_all_tokens(found[None], None, V)[0].isfinite().nonzero()[:, 1].max() == 5

    more = dict(QWEN["dflash_config"], input_embedding_scale=3.0, final_logit_softcapping=0.7)
    made = tensors()
    torch.save(mask[None], directory / "mask_embedding.pt")                # a bare tensor
    draft = fp32(opened(write(directory, {**QWEN, "dflash_config": more}, made)))
    found, states = block_logits(draft, target)
    embedded = 3 * torch.stack([target.embed.weight[9], *[mask] * 4])
    expected = reference(made, states, embedded, target.head.weight)
    torch.testing.assert_close(found.double(), (expected / 0.7).tanh() * 0.7, rtol=1e-4, atol=1e-4)

    (directory / "mask_embedding.pt").unlink()
    target.after_embed, target.embed_scale = ("embed_scale",), ScaledEmbedding(8.0)
    draft = fp32(opened(write(directory, QWEN, made)))
    found, states = block_logits(draft, target)
    expected = reference(made, states, 8 * target.embed(torch.tensor([9] + [159] * 4)), target.head.weight)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


GGUF = dict(block_count=L, embedding_length=D, feed_forward_length=FFN, context_length=128)
HEADS = {"attention.head_count": N, "attention.head_count_kv": K, "attention.key_length": H, "attention.value_length": H,
         "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 1e4}
IN_GGUF = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
           "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "self_attn.attention_sink_bias": "attn_sinks.weight",
           "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
           "layers": "blk", "lm_head": "output", "embed_tokens": "token_embd"}


def write_gguf(path, arch, made, more=()):
    """As llama.cpp (dflash) and ik_llama.cpp (dflash-draft) name keys and tensors."""
    import gguf
    of_ik = arch == "dflash-draft"
    names = IN_GGUF | {"post_attention_layernorm": "post_attention_norm" if of_ik else "ffn_norm", "norm.weight": "output_norm.weight",
                       "fc.weight": "dflash_fc.weight" if of_ik else "fc.weight",
                       "hidden_norm.weight": "dflash_hidden_norm.weight" if of_ik else "enc.output_norm.weight"}
    writer = gguf.GGUFWriter(str(path), arch)
    own = {"dflash.block_size": 8, "dflash.target_layer_ids": [0, 2], "dflash.mask_token_id": 159, "dflash.n_target_features": 2 * D}
    own = own if of_ik else dict(block_size=8, target_layers=[1, 3])
    for key, value in {**GGUF, **HEADS, **own, **dict(more)}.items():
        add = {float: writer.add_float32, list: writer.add_array, bool: writer.add_bool, str: writer.add_string}.get(type(value), writer.add_uint32)
        add(f"{arch}.{key}", value)
    if not of_ik:
        writer.add_mask_token_id(159)
    writer.add_token_list([f"t{i}" for i in range(V)])
    for name, t in made.items():
        if name in names:
            name = names[name]
        elif name.startswith("layers"):
            for theirs, its in names.items():
                name = name.replace(theirs, its) if theirs != "norm.weight" else name
        else:
            stem = name.removesuffix(".weight")
            name = f"{names[stem]}.weight" if stem in names else name
        writer.add_tensor(name, t.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("arch", ["dflash", "dflash-draft"])
def test_gguf(tmp_path, arch):
    """The drafter of the directory, by either program's keys, with the ids as each of them counts."""
    made = tensors(sinks=True)
    hub, path = opened(write(tmp_path / "d", QWEN, made)), write_gguf(tmp_path / "draft.gguf", arch, made)
    source = open_dflash(dflash_file(path))
    assert source.cfg.__dict__ | dict(n_target_layer=4) == hub.cfg.__dict__ | dict(norm_eps=source.cfg.norm_eps)
    (tmp_path / "alone").mkdir()
    path.rename(tmp_path / "alone/draft.gguf")
    source = opened(tmp_path / "alone")
    assert source.tensors.keys() == hub.tensors.keys()
    for name, t in hub.tensors.items():
        assert torch.equal(source.tensors[name].whole(), t.whole()), name


def test_gguf_with_own_parts(tmp_path):
    """Windows by layer; d2t as tokens, not as differences; an output layer of its own."""
    ids = torch.tensor([2, 3, 5, 7, 100, 159])
    made = tensors(**{"lm_head.weight": (6, D), "embed_tokens.weight": (V, D)}) | {"d2t": ids}
    more = {"attention.sliding_window": 6, "attention.sliding_window_pattern": [True, False, True], "attention.causal": False}
    source = open_dflash(dflash_file(write_gguf(tmp_path / "draft.gguf", "dflash", made, more)))
    assert (source.cfg.window, source.cfg.own_embed, source.cfg.own_head, source.cfg.draft_vocab) == ((6, None, 6), True, True, 6)
    assert source.tensors["tokens.ids"].whole().tolist() == ids.tolist()
    assert torch.equal(source.tensors["head.weight"].whole(), made["lm_head.weight"])


# ---- Drafting ------------------------------------------------------------------------------------

def ids(n, seed=4):
    return torch.randint(0, V, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def batch_of(model, draft, k, fixed=True, how=GREEDY, generator=None, engine="kv_cache", n_row=1):
    steps = engines.build_steps(model, engine)
    return engines.build_speculative(model, build_sampler(model, [how] * n_row, generator), steps, engine, k, fixed, draft)


def train(model, draft, prompt, n_new, steps=250):
    """Teach the drafter the model's own greedy text after a prompt -> that text."""
    model.setup_cache(1, 128)
    model.record_hidden(*draft.cfg.taps)
    new = plain(model, prompt, n_new)
    text, n_first = torch.tensor(prompt + new), len(prompt)
    model(text[None, :-1], torch.arange(len(text) - 1))
    states = torch.cat([model.hidden[tap] for tap in draft.cfg.taps], -1).clone()
    draft.join(model)
    learning = [p.requires_grad_() for name, p in draft.named_parameters() if name.startswith(("layers.", "context.wc"))]
    optimizer = torch.optim.Adam(learning, lr=3e-3)
    starts = torch.arange(n_first, len(text) - 8)          # blocks of 8 at all places, as rows of a batch
    draft.setup_cache(len(starts), 128)
    pos = starts[:, None] + torch.arange(8)
    tokens = torch.full((len(starts), 8), draft.cfg.mask_id).index_copy(1, torch.tensor([0]), text[starts][:, None])
    caches = [layer.attn.cache for layer in draft.layers]
    for _ in range(steps):
        for cache in caches:                               # they are written in place, which autograd has to follow
            cache.k, cache.v = cache.k.detach().clone(), cache.v.detach().clone()
        draft.add_context(states[:, :len(text)].expand(len(starts), -1, -1), torch.arange(len(text)))
        logits = draft(tokens, pos)
        loss = F.cross_entropy(logits.flatten(0, 1), text[pos[:, 1:]].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    draft.requires_grad_(False)
    draft.setup_cache(0, 128)
    return new


@pytest.fixture(scope="module")
def target(families):
    """name -> a target in fp32, and its greedy text after ids(40)."""
    @functools.cache
    def get(name="qwen3"):
        model = load_model(read_checkpoint(families(name)[0]), torch.float32, "cpu")
        model.setup_cache(1, 128)
        return model, plain(model, ids(40), 40)
    return lambda name="qwen3": (copy.deepcopy(get(name)[0]), get(name)[1])


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    """A drafter with random weights, of this config -> its checkpoint."""
    @functools.cache
    def get(config=json.dumps(QWEN), **kinds):
        return opened(write(tmp_path_factory.mktemp("drafter"), json.loads(config), tensors(**kinds)))
    return get


def known(batch, prompt, text, acceptance=0.7):
    """The drafter works, and then some of its drafts are exchanged by right ones."""
    batch.drafter = FixedAcceptanceDrafter(batch.drafter, acceptance)
    batch.drafter.set_text(prompt + text)
    return batch


@pytest.mark.parametrize("name, engine", [
    ("qwen3", "kv_cache"), ("qwen3", "compile"), ("qwen3_5_text", "kv_cache"), ("qwen3_5_text", "compile"), ("gemma4", "kv_cache")])
def test_greedily_the_same_tokens(target, drafter, name, engine):
    """At several k, prompts over several chunks, a second text over the first; DeltaNet's states and rings go back."""
    model, expected = target(name)
    source, counts = drafter(json.dumps(QWEN | SLIDING)), {}
    for longest_call, k, fixed in ((128, 7, True), (16, 7, True), (16, 2, True), (16, 7, False)):
        model.setup_cache(1, 128, longest_call, max_rejected=8)
        batch = known(batch_of(model, fp32(source), k, fixed, engine=engine), ids(40), expected)
        for _ in range(2):
            assert ids_of(batch, ids(40), 40) == expected
        counts[longest_call, k, fixed] = batch.accept_counts
    assert all(count[0] and sum(count[2:]) for count in counts.values()), counts


def fresh_drafts(model, source, history, n, k):
    """By a drafter and a target that have read nothing before."""
    model.setup_cache(1, 128)
    draft = fp32(source)
    model.record_hidden(*draft.cfg.taps)
    model(history[:, :n - 1], torch.arange(n - 1))
    draft.join(model)
    draft.setup_cache(1, 128)
    draft.add_context(torch.cat([model.hidden[tap][:, :n - 1] for tap in draft.cfg.taps], -1), torch.arange(n - 1))
    tokens = torch.cat((history[:, n - 1:n], torch.full((1, k), draft.cfg.mask_id)), 1)
    return draft(tokens, torch.arange(n - 1, n + k)).argmax(-1)


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_text"])
@torch.inference_mode()
def test_the_context_is_that_of_the_text(target, drafter, name, window):
    """Each block drafted is that of a fresh drafter: after rejected drafts, plain steps, and turns that keep a part of the text."""
    model, text = target(name)
    other, checked = copy.deepcopy(model), []
    source = drafter(json.dumps(QWEN | SLIDING))
    model.setup_cache(1, 112, 16, max_rejected=8)
    batch = batch_of(model, fp32(source), 7)
    inner = batch.drafter
    inner.window, propose = window, inner.propose

    def check(rows, k, sampler):
        drafts, *dist = propose(rows, k, sampler)
        [n] = rows.lengths
        assert torch.equal(drafts, fresh_drafts(other, source, rows.history, n, k)), (n, k)
        checked.append(n)
        return drafts, *dist
    inner.propose = check
    batch = known(batch, ids(40), text)
    lengths = itertools.cycle([7, 0, 0, 3, 7, 1])
    batch.draft_length.next = lambda *_: next(lengths)
    assert ids_of(batch, ids(40), 40) == text
    turn = ids(40) + text[:20]                             # the next turn keeps 50 tokens, where states can go back
    batch.drafter.set_text(turn[:50] + ids(60, 9))
    ids_of(batch, turn[:50] + ids(9, 8), 30, n_cached=50 if name == "qwen3" else 0)
    ids_of(batch, turn[:12], 100)                          # to the last position
    assert len(checked) > 25 and max(checked) > 100


@pytest.mark.parametrize("name, engine, window", [
    ("qwen3", "kv_cache", None), ("qwen3", "kv_cache", 8), ("qwen3", "compile", None), ("qwen3_5_text", "kv_cache", None)])
@torch.inference_mode()
def test_rows_draft_at_their_own_positions(target, drafter, name, engine, window):
    """Three rows of different lengths, one of which ends and begins anew: each row's text is the one that it has alone, and each
    block that a fresh drafter gives for this row, whatever the other rows accept."""
    model, _ = target(name)
    other, source = copy.deepcopy(model), drafter(json.dumps(QWEN | SLIDING))
    prompts = [ids(40), ids(9, 5), ids(23, 6), ids(15, 7)]
    texts = []
    for prompt in prompts:
        other.setup_cache(1, 128)
        texts.append(prompt + plain(other, prompt, 60))
    model.setup_cache(3, 128, 16, max_rejected=8)
    batch = batch_of(model, fp32(source), 7, engine=engine, n_row=3)
    drafter, of_row, checked = batch.drafter, [0, 1, 2], []
    drafter.window, propose = window, drafter.propose

    def check(rows, k, sampler):
        drafts, probs, tokens = propose(rows, k, sampler)
        for i, (row, n) in enumerate(zip(rows.index, rows.lengths)):
            if rows.drafting[i]:
                expected = fresh_drafts(other, source, rows.history[i:i + 1], n, k)
                assert torch.equal(drafts[i:i + 1], expected), (row, n)
                right = torch.tensor(texts[of_row[row]][n:n + k])
                n_right = (n + row) % (len(right) + 1)     # of these drafts, so that rows accept different numbers
                drafts[i, :n_right] = right[:n_right]
                checked.append((row, n_right))
        return drafts, torch.ones(len(drafts), k, 1), drafts[..., None]
    drafter.propose = check
    new = {0: [], 1: [], 2: [], 3: []}

    def take(tokens, rows):
        for row in rows:
            new[of_row[row]].append(tokens[row].item())
    take(batch.prefill(range(3), prompts[:3]), range(3))
    for i in range(45):
        if i == 8:
            batch.end(1)
        if i == 12:
            of_row[1] = 3
            take(batch.prefill([1], prompts[3:]), [1])
        tokens = batch.step()
        take(tokens, batch.new_rows)
    for i, tokens in new.items():
        assert len(tokens) > 7 and tokens == texts[i][len(prompts[i]):][:len(tokens)], i
    assert {row for row, n in checked} == {0, 1, 2} and len({n for _, n in checked}) > 3


def test_penalties_see_the_drafts():
    """A block's drafts are drawn one by one where they depend on each other: with a strong penalty none is drawn twice."""
    sampler = build_sampler(Transformer(MODEL), [SamplingParams(temperature=0, repetition_penalty=1000.0)])
    sampler.begin(0, [1, 2])
    logits = torch.rand(1, 1, V).expand(1, 7, V) + 1
    drafts, probs, tokens = draw_block(logits, torch.arange(7)[None], sampler)
    assert len(set(drafts[0].tolist())) == 7 and not {1, 2} & set(drafts[0].tolist())
    assert probs.shape == tokens.shape == (1, 7, 1) and torch.equal(tokens[..., 0], drafts)


def test_each_row_draws_by_its_own_parameters():
    sampler = build_sampler(Transformer(MODEL), [GREEDY, SamplingParams(1.0, seed=3)])
    for row in (0, 1):
        sampler.begin(row, [1, 2])
    logits, pos = torch.rand(2, 5, V, generator=torch.Generator().manual_seed(1)), torch.arange(10).view(2, 5)
    drafts, _, _ = draw_block(logits, pos, sampler)
    for row in (0, 1):
        alone, _, _ = draw_block(logits[row:row + 1], pos[row:row + 1], sampler, torch.tensor([row]))
        assert torch.equal(drafts[row], alone[0])
    assert torch.equal(drafts[0], logits[0].argmax(-1)) and not torch.equal(drafts[1], logits[1].argmax(-1))


@pytest.mark.parametrize("how", [GREEDY, SamplingParams(0.8, 20, 0.9, 0.05, 1.3)], ids=["greedy", "filters"])
def test_the_steps_trace(target, drafter, how, monkeypatch):
    """As a GPU would capture them: one graph for each block length, with a fixed window of states."""
    torch._dynamo.reset()
    model, _ = target()
    drawn, shapes = [], []
    for traced in (False, True):
        with monkeypatch.context() as m:
            m.setattr(torch, "compile", lambda step, original=torch.compile, **more: original(step, backend="aot_eager", **more))
            steps = [generate.decode_one_token, dflash.draft_block, speculate.verify]
            decode, block, verify = [as_cuda_graph(step) for step in steps] if traced else steps
        model.setup_cache(1, 96, 16)
        draft = fp32(drafter())
        draft.join(model)

        def seen(*args, block=block, traced=traced):
            shapes.append((traced, tuple(a.shape for a in args if isinstance(a, torch.Tensor))))
            return block(*args)
        sampler = build_sampler(model, [how], torch.Generator().manual_seed(5))
        batch = speculate.SpeculativeBatch(model, sampler, generate.Steps(decode=decode), dflash.DFlashDrafter(
            model, draft, seen, 6 if traced else None), FixedLength(5), 5, verify)
        tokens = ids_of(batch, ids(9), 12)
        batch.draft_length = FixedLength(0)                # plain steps too
        drawn.append([*tokens, *(batch.step().item() for _ in range(4))])
    assert drawn[0] == drawn[1]
    assert len({shape for is_traced, shape in shapes if is_traced}) == 1       # one graph


@pytest.mark.kernels
@pytest.mark.parametrize("mode, dtype", [("int8", torch.float32), ("int4", torch.float32), ("int4", torch.bfloat16), (None, torch.bfloat16)], ids=str)
def test_compiled_on_a_cpu(target, drafter, mode, dtype, families, two_threads):
    """The drafter's layers as operations in C++, rounded as the model's are; its ends are the model's. The drafts: the uncompiled ones'."""
    source, draft_source = read_checkpoint(families("qwen3")[0]), drafter(json.dumps(QWEN | SLIDING), sinks=True)
    if mode:
        source, draft_source = quantized(source, mode), quantized(draft_source, mode, head="none")
        assert schemes(draft_source)[0].startswith(mode)
    drafted = []
    for engine in ("kv_cache", "compile"):
        model, draft = load_model(source, dtype, "cpu", packed=False), load_model(draft_source, dtype, "cpu", packed=False)
        model.setup_cache(1, 128, 64, max_rejected=8)
        batch = batch_of(model, draft, 7, engine=engine)
        compiled = engine == "compile"
        assert uses_operations(draft) == compiled and draft.head is model.head
        assert isinstance(draft.layers[0].forward, OperationsLayer) == compiled
        assert is_packed(draft.context.wc) == compiled
        ids_of(batch, ids(40), 1)
        pos = torch.arange(41)
        states = torch.randn(1, 30, 2 * D, generator=torch.Generator().manual_seed(3)).to(dtype)
        with torch.inference_mode():
            draft.add_context(states, pos[:30], 64)
            logits = draft(torch.tensor([[5] + [159] * 7]), pos[30:38], 64)
        drafted.append(logits)
    tolerance = 1e-3 if dtype == torch.float32 and mode is None else 0.1
    torch.testing.assert_close(*drafted, rtol=tolerance, atol=tolerance)


# ---- The distribution ----------------------------------------------------------------------------

MODEL = ModelConfig(dim=D, n_layer=2, n_head=2, n_kv_head=1, head_dim=8, ffn_dim=16, vocab_size=V, context=64)
TINY = ModelConfig(dim=16, n_layer=2, n_head=2, n_kv_head=1, head_dim=8, ffn_dim=16, vocab_size=4, context=64)


def random_pair(seed=1):
    """A model of four tokens, and a drafter that knows it a little: its output layer is the model's."""
    cfg = DFlashConfig(**vars(TINY), block_size=4, mask_id=3, taps=(1,), target_dim=16)
    torch.manual_seed(seed)
    pair = Transformer(TINY), DFlash(cfg)
    for module in pair:
        for p in module.parameters():
            p.data = torch.randn_like(p) * p.shape[-1]**-0.5 * 1.7 if p.dim() > 1 else torch.ones_like(p)
    return *(module.requires_grad_(False) for module in pair),


@pytest.mark.parametrize("how, k", [(HOWS[0], 3), (HOWS[1], 1), (HOWS[2], 3), (HOWS[3], 2)], ids=["all", "top_k", "top_p", "filters"])
def test_the_distribution_is_the_models(how, k, exhaustive):
    model, draft = random_pair()
    model.setup_cache(1, 64)
    prompt, n = [0, 1, 2, 3, 0, 2], 4
    batch = batch_of(model, draft, k, True, how, torch.Generator().manual_seed(7))
    total, counts = 1300 if exhaustive else 500, {}
    for _ in range(total):
        path = tuple(ids_of(batch, prompt, n))
        counts[path] = counts.get(path, 0) + 1
    rounds = list(batch.accept_counts)
    exact = Transformer(TINY)
    exact.load_state_dict(model.state_dict())
    chance = {}
    for path in itertools.product(range(4), repeat=n):
        tokens = torch.tensor([[*prompt, *path]])
        logits = exact(tokens, torch.arange(tokens.shape[1]), n + 1)[0, :n]
        probs, some = Sampler([how], 4).distribution(logits)
        dense = probs if some is None else torch.zeros(n, 4).scatter(1, some, probs)
        dense = dense / dense.sum(-1, keepdim=True)
        chance[path] = dense.gather(1, torch.tensor(path)[:, None]).prod().item()
    assert chi_square(counts, chance, total) < 4.5
    assert all(rounds[:2]) and sum(rounds) >= total        # kept and rejected


# ---- Commands, and what is refused ---------------------------------------------------------------

@pytest.fixture
def command(families, tmp_path):
    """A target with a tokenizer, and a drafter beside it."""
    from gpt_faster.bench.exports import _write_dummy_tokenizer
    shutil.copytree(families("qwen3")[0], tmp_path / "model")
    _write_dummy_tokenizer(V, tmp_path / "model")
    write(tmp_path / "draft", QWEN, tensors())
    return ["-m", tmp_path / "model", "--device", "cpu", "--dtype", "float32", "--temperature", 0, "--ignore_eos", "--prompt", "t5 t9 t7",
            "--max_new_tokens", 20]


def test_the_command(capsys, command, tmp_path):
    """Drafts on request, of every length that the block allows; the same text, also compiled and quantized; the memory is stated."""
    argv = [*command, "--json"]
    status, out, plain_err = run(capsys, *argv)
    expected = json.loads(out)["new_ids"]
    for more in ([], ["--speculate_k", 7, "--compile"], ["--quantize", "int8", "--compare"]):
        status, out, err = run(capsys, *argv, "--draft_checkpoint_path", tmp_path / "draft", *more)
        found = json.loads(out)
        assert status == 0 and (found["speculate"], found["speculate_k"]) == ("draft", 7), err
        assert found["new_ids"] == expected or "--quantize" in more
        assert "Drafting 7 tokens costs" in err or "--compile" in more
    stated = [int(re.search(r"(\d+) MB for the KV", text)[1]) for text in (plain_err, err)]
    assert stated[0] <= stated[1]


def test_the_memory_statement_counts_the_states(target, drafter, families, monkeypatch):
    source, draft, said = read_checkpoint(families("qwen3")[0]), drafter(), []
    monkeypatch.setattr(runtime, "log", said.append)
    for sources in ([source, None], [source, draft]):
        runtime.check_memory(sources, torch.bfloat16, torch.device("cpu"), 1, 10**5, 512, 0)
    cache = [int(re.findall(r"(\d+) MB", text)[1]) for text in said]
    keys, states = 2 * L * K * H * 2 * 10**5 / 1e6, 2 * D * 2 * 10**5 / 1e6
    assert cache[1] - cache[0] == pytest.approx(keys + states, abs=1)


def test_a_drafter_as_the_model(capsys, command, tmp_path):
    for path in (tmp_path / "draft", write_gguf(tmp_path / "draft.gguf", "dflash", tensors())):
        err = refused(capsys, "-m", path, "--prompt", "x")
        assert "a DFlash drafter, not a model: use it with the model that it drafts for, as --draft_checkpoint_path" in err


def test_another_target(capsys, command, families, tmp_path):
    """By width, tokens, layers; too many drafts; several ranks."""
    draft = ["--draft_checkpoint_path", tmp_path / "draft"]
    assert "--speculate_k 8: draft drafts at most 7 tokens at once" in refused(capsys, *command, *draft, "--speculate_k", 8)
    for config, made, words in (
            ({**QWEN, "num_target_layers": 5}, tensors(), "drafts for models of width 64 with 160 tokens and 5 layers, but"),
            (QWEN, tensors(target_dim=32), "drafts for models of width 32 with 160 tokens and 4 layers, but"),
            ({**QWEN, "vocab_size": 161}, tensors(), "with 161 tokens and 4 layers, but"),
            (without(QWEN, "num_target_layers", dflash_config=dict(mask_token_id=1, target_layer_ids=[0, 3])), tensors(),
             "reads the input of layer 4, but")):
        write(tmp_path / "draft", config, made)
        assert words in refused(capsys, *command, *draft)


def other(config, **inner):
    return {**config, "dflash_config": {**config["dflash_config"], **inner}}


def made_with(**shapes):
    return lambda: tensors() | {name.replace("__", "."): torch.ones(shape) for name, shape in shapes.items()}


BAD = {                                                    # config, tensors, what is said
    "DSpark by its tensors": (QWEN, made_with(markov_head__markov_w1__weight=(4, 4)), "DSpark (DFlash with a Markov head), which is not supported"),
    "DSpark by its name": ({**QWEN, "architectures": ["Qwen3DSparkModel"]}, tensors, "DSpark"),
    "DSpark by a key": (speculators(sample_from_anchor=True), tensors, "'sample_from_anchor' belongs to DSpark"),
    "DFlash 2 by its name": ({**QWEN, "architectures": ["DFlash2DraftModel"]}, tensors, "DFlash 2 (DFlash with convolutions"),
    "DFlash 2 by its tensors": (QWEN, made_with(layers__0__attention_conv__base_kernel=(2, 2, D)), "DFlash 2"),
    "DFlash 2 by a key": (other(QWEN, selector_rank=8), tensors, "'selector_rank' belongs to DFlash 2"),
    "another norm": (other(QWEN, fc_layernorm=True), tensors, "'fc_layernorm' is not supported"),
    "scaled logits": (other(QWEN, output_multiplier=2.0), tensors, "'output_multiplier' is 2.0, which is not supported"),
    "no mask": (without(QWEN, dflash_config=dict(target_layer_ids=[0, 2])), tensors, "'mask_token_id' is None, expected a token id below 160"),
    "a mask out of range": (other(QWEN, mask_token_id=160), tensors, "'mask_token_id' is 160, expected a token id below 160"),
    "no layers": (without(QWEN, "num_target_layers", dflash_config=dict(mask_token_id=1)), tensors, "'target_layer_ids' is None, expected a list"),
    "layers that are none": (other(QWEN, target_layer_ids=[0, "2"]), tensors, "'target_layer_ids' is [0, '2'], expected a list of layer numbers"),
    "a block of one": ({**QWEN, "block_size": 1}, tensors, "'block_size' is 1, expected at least 2"),
    "a block of none": ({**QWEN, "block_size": "8"}, tensors, "'block_size' is '8', expected a positive integer"),
    "fc of another width": (QWEN, lambda: tensors(n_tap=1, target_dim=63), "fc.weight is [64, 63], expected [64, 2 times the target's width]"),
    "no fc": (QWEN, lambda: {k: t for k, t in tensors().items() if k != "fc.weight"}, "fc.weight is missing"),
    "no window": ({**QWEN, "layer_types": ["sliding_attention"] * 3}, tensors, "layers have a sliding window, but its size is None"),
    "kinds of layers": ({**QWEN, "layer_types": ["full_attention", "linear_attention", "full_attention"]}, tensors, "expected 3 times"),
    "causal without a window": (other(QWEN, causal=True), tensors, "'is_causal' makes all layers causal"),
    "experts": ({**QWEN, "num_experts": 8}, tensors, "a DFlash drafter with experts is not supported"),
    "quantized": ({**QWEN, "quantization_config": dict(quant_method="awq")}, tensors, "a quantized DFlash drafter is not supported"),
    "a vocabulary without d2t": (speculators(draft_vocab_size=6), tensors, "'draft_vocab_size' is 6, but there is no d2t, which says which of 160 tokens"),
    "d2t of another length": (speculators(draft_vocab_size=7), lambda: tensors(**{"lm_head.weight": (6, D)}) | {"d2t": torch.arange(6)},
                              "'draft_vocab_size' is 7, but d2t has 6 entries"),
    "d2t out of range": (QWEN, lambda: tensors(**{"lm_head.weight": (6, D)}) | {"d2t": torch.arange(6) * 31}, "d2t does not name 6 different tokens of 160"),
    "d2t twice the same": (QWEN, lambda: tensors(**{"lm_head.weight": (2, D)}) | {"d2t": torch.tensor([1, 0])}, "d2t does not name 2 different tokens"),
    "d2t alone": (QWEN, lambda: tensors() | {"d2t": torch.arange(6)}, "d2t needs an output layer of its own"),
    "a tensor that nobody knows": (QWEN, made_with(layers__0__self_attn__g_proj__weight=(4, D)), "1 tensors that this architecture does not have"),
    "a tensor less": (QWEN, lambda: {k: t for k, t in tensors().items() if "layers.2.mlp.up" not in k}, "1 tensors are missing"),
    "a table that is none": ({**QWEN, "dflash_config": [1]}, tensors, "'dflash_config' is [1], expected an object"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_drafters(tmp_path, name):
    config, made, words = BAD[name]
    with pytest.raises(ValueError) as e:
        opened(write(tmp_path / "d", config, made()))
    assert words in str(e.value) and str(tmp_path / "d") in str(e.value) and "\n" not in str(e.value)


def test_bad_mask_vectors(tmp_path):
    directory = write(tmp_path / "d", QWEN, tensors())
    for content, words in ((torch.ones(D + 1), f"expected a vector of {D} numbers"), (dict(mask_token_id=7, embedding=torch.ones(D)), "'mask_token_id' is 7, but"),
                           ([1], "expected a dictionary of tensors, found list"), (dict(a=torch.ones(D), b=torch.ones(D)), "expected a vector")):
        torch.save(content, directory / "mask_embedding.pt")
        with pytest.raises(ValueError, match=words):
            opened(directory)
    (directory / "mask_embedding.pt").write_bytes(b"no tensor at all")
    with pytest.raises(ValueError, match="begins with b'no tensor at all'"):
        opened(directory)


def test_bad_ggufs(tmp_path):
    for more, made, words in (({"dflash.selector_rank": 4}, {}, "belongs to DFlash 2"), ({}, {"markov_w1.weight": torch.ones(4, 4)}, "belongs to DSpark"),
                              ({"rope.scaling.type": "yarn"}, {}, "RoPE scaling is not supported in a DFlash GGUF")):
        with pytest.raises(ValueError, match=words):
            open_dflash(dflash_file(write_gguf(tmp_path / "draft.gguf", "dflash", tensors() | made, more)))


def test_keys_nobody_knows_are_named(tmp_path, capsys):
    opened(write(tmp_path / "d", {**QWEN, "frobnicate": 3}, tensors()))
    assert "frobnicate" in capsys.readouterr().err
    opened(write(tmp_path / "d", speculators(speculators_config={}, speculators_version="1"), tensors()))
    opened(write(tmp_path / "d", QWEN | SLIDING, tensors()))
    assert capsys.readouterr().err == ""


# ---- A drafter that has learned something --------------------------------------------------------

@pytest.mark.slow
def test_acceptance_of_a_trained_drafter(target, drafter):
    """On the text it was taught: more than half of its drafts of 7 are accepted, uncompiled and compiled."""
    model, expected = target()
    draft = fp32(drafter())
    assert train(model, draft, ids(40), 40) == expected
    for engine in ("kv_cache", "compile"):
        model.setup_cache(1, 128, 64)
        batch = batch_of(model, draft, 7, engine=engine)
        assert ids_of(batch, ids(40), 40) == expected
        assert batch.mean_accepted() > 3.5, batch.accept_counts
