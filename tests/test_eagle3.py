"""EAGLE-3's drafters: their logits are the formulas', every layout is read, their drafts cost no token."""

import itertools
import json
import re
import shutil

import gguf
import pytest
import torch
from helpers import GREEDY, ids_of
from safetensors.torch import save_file
from test_errors import refused, run
from test_mtp import batch_of, ids, proposed
from test_speculate import HOWS, chi_square, plain

import generate as generate_module
import speculate
from generate import generate
from gpt_faster import runtime
from gpt_faster.decoding import engines, mtp
from gpt_faster.decoding.eagle3 import Eagle3Drafter
from gpt_faster.decoding.samplers import build_sampler
from gpt_faster.formats.eagle3 import is_eagle3, open_eagle3
from gpt_faster.formats.load import load_model, read_checkpoint
from gpt_faster.formats.quantize_on_load import quantized
from gpt_faster.kernels.compile import as_cuda_graph
from gpt_faster.kernels.cpu.layers import uses_operations
from gpt_faster.kernels.cpu.linears import OperationsLinear
from gpt_faster.layers.eagle3 import Eagle3, Eagle3Config, FirstLayerReadsBoth
from model import ModelConfig, Transformer
from sampling import Sampler

D, V, VD = 96, 160, 40                                     # the target's width is 64
SIZES = dict(hidden_size=D, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_hidden_layers=1,
             vocab_size=V, max_position_embeddings=128, rms_norm_eps=1e-5, hidden_act="silu", tie_word_embeddings=False,
             model_type="llama", draft_vocab_size=VD, target_hidden_size=64)


def tensors_of(*, dim=D, n_layer=1, own_embed=True, own_head=True, vocab=VD, fc=True, input_norm=False, fc_norm=False,
               qk_norm=False, bias=False, n_state=3, seed=0):
    """A drafter's tensors by SafeAILab's names."""
    random = torch.Generator().manual_seed(seed)

    def matrix(n_out, n_in):
        return torch.randn(n_out, n_in, generator=random) * n_in**-0.5 * 1.5

    def norm(n):
        return 1 + 0.3 * torch.randn(n, generator=random)
    t = {"norm.weight": norm(dim)}
    if fc:
        t["fc.weight"] = matrix(dim, n_state * 64)
    if input_norm:
        t["input_norm.weight"] = norm(n_state * 64)
    if fc_norm:
        t |= {f"fc_norm.{i}.weight": norm(64) for i in range(n_state)}
    if own_embed:
        t["embed_tokens.weight"] = matrix(V, dim)
    if own_head:
        t["lm_head.weight"] = matrix(vocab, dim)
    if vocab != V:
        ids = torch.randperm(V, generator=random)[:vocab].sort().values
        t["d2t"] = ids - torch.arange(vocab)
        t["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)
    for i in range(n_layer):
        at, n_in = f"layers.{i}." if i else "midlayer.", dim if i else 2 * dim
        for name, n_out in dict(q=64, k=32, v=32).items():
            t[f"{at}self_attn.{name}_proj.weight"] = matrix(n_out, n_in)
            if bias:
                t[f"{at}self_attn.{name}_proj.bias"] = norm(n_out)
        t[f"{at}self_attn.o_proj.weight"] = matrix(dim, 64)
        if bias:
            t[f"{at}self_attn.o_proj.bias"] = norm(dim)
        if qk_norm:
            t |= {f"{at}self_attn.{name}_norm.weight": norm(16) for name in "qk"}
        for name, shape in dict(gate=(96, dim), up=(96, dim), down=(dim, 96)).items():
            t[f"{at}mlp.{name}_proj.weight"] = matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm", *([] if i else ["hidden_norm"])):
            t[f"{at}{name}.weight"] = norm(dim)
    return t


def write(directory, t, config, file="model.safetensors"):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if file.endswith(".bin"):
        torch.save(t, directory / file)
    else:
        save_file({name: value.contiguous() for name, value in t.items()}, directory / file)
    return directory


def reference(t, states, tokens, n_draft=0, *, theta=1e4, embed=None, head=None, before_residual=False, norm_output=False):
    """EAGLE-3's formulas in fp64, everything computed anew: the logits at each position over the draft vocabulary, and a greedy
    chain of n_draft tokens. states: [T, 64] each, tokens [T]: those after them."""
    t = {name: value.double() if value.is_floating_point() else value for name, value in t.items()}
    embed = t.get("embed_tokens.weight", embed).double()
    head = t.get("lm_head.weight", head).double()

    def norm(x, name):
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * t[name]

    def rotated(x):                                        # [T, n, 16]
        freq = theta ** (-torch.arange(0, 16, 2).double() / 16)
        angle = (torch.arange(len(x)).double()[:, None] * freq)[:, None]
        a, b = x[..., :8], x[..., 8:]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    def attention(x, at):
        def heads(name):
            y = x @ t[f"{at}self_attn.{name}_proj.weight"].T
            y = y + t.get(f"{at}self_attn.{name}_proj.bias", 0)
            y = y.unflatten(-1, (-1, 16))
            return norm(y, f"{at}self_attn.{name}_norm.weight") if f"{at}self_attn.{name}_norm.weight" in t else y
        q, k, v = rotated(heads("q")), rotated(heads("k")).repeat_interleave(2, 1), heads("v").repeat_interleave(2, 1)
        scores = torch.einsum("inh,jnh->nij", q, k) / 4
        scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
        y = torch.einsum("nij,jnh->inh", scores.softmax(-1), v).flatten(1)
        return y @ t[f"{at}self_attn.o_proj.weight"].T + t.get(f"{at}self_attn.o_proj.bias", 0)

    def layers(x, ids):
        for i in itertools.count():
            at = f"layers.{i}." if i else "midlayer."
            if f"{at}input_layernorm.weight" not in t:
                return x
            y = norm(embed[ids] if i == 0 else x, f"{at}input_layernorm.weight")
            if i == 0:
                h = norm(x, f"{at}hidden_norm.weight")
                x = h if before_residual else x
                y = torch.cat((y, h), -1)
            x = x + attention(y, at)
            y = norm(x, f"{at}post_attention_layernorm.weight")
            gate, up, down = (t[f"{at}mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
            x = x + (torch.nn.functional.silu(y @ gate) * (y @ up)) @ down

    states = [s.double() for s in states]
    if "fc_norm.0.weight" in t:
        states = [norm(s, f"fc_norm.{i}.weight") for i, s in enumerate(states)]
    x = torch.cat(states, -1)
    if "input_norm.weight" in t:
        x = norm(x, "input_norm.weight")
    x = x @ t["fc.weight"].T if "fc.weight" in t else x
    target_id = torch.arange(len(head)) + t.get("d2t", 0)
    drafts, logits = [], None
    for _ in range(n_draft + 1):
        z = layers(x, tokens)
        normed = norm(z, "norm.weight")
        logits = normed @ head.T if logits is None else logits
        drafts.append(target_id[(normed[-1] @ head.T).argmax()].item())
        x = torch.cat((x, (normed if norm_output else z)[-1:]))
        tokens = torch.cat((tokens, torch.tensor(drafts[-1:])))
    return logits, target_id, drafts[:n_draft]


def states_of(model, k, prompt):
    """The target's hidden states at layer inputs k, uncompiled and without a cache."""
    seen, handles = {}, []
    for i, layer in enumerate(model.layers):
        handles.append(layer.register_forward_pre_hook(lambda module, args, i=i: seen.__setitem__(i, args[0][0].clone())))
    handles.append(model.layers[-1].register_forward_hook(lambda module, args, y: seen.__setitem__(len(model.layers), y[0].clone())))
    cache = model.max_batch_size, model.max_seq_length, model.longest_call
    model.setup_cache(0, 0)
    with torch.inference_mode():
        model(torch.tensor([prompt]), torch.arange(len(prompt)))
    for handle in handles:
        handle.remove()
    model.setup_cache(*cache)
    return [seen[i] for i in k]


def speculators(config, **more):
    own = {"draft_vocab_size", "target_hidden_size", *more}
    return dict(speculators_model_type="eagle3", architectures=["Eagle3Speculator"], speculators_version="0.3.0",
                speculators_config=dict(algorithm="eagle3"),
                **{k: v for k, v in config.items() if k in own}, **dict(norm_before_residual=False) | more,
                transformer_layer_config={k: v for k, v in config.items() if k not in own})


def renamed(t):
    return {name.replace("midlayer.", "layers.0."): value for name, value in t.items()}


# name: the tensors' options, the config, the layers whose inputs are read, the reference's options, what changes in the file
PLAIN = dict()
VARIANTS = {
    "safeai": (PLAIN, SIZES, (2, 2, 1), {}, {}),
    "bin": (PLAIN, SIZES, (2, 2, 1), {}, dict(file="pytorch_model.bin")),
    "specforge": (PLAIN, SIZES | dict(architectures=["LlamaForCausalLMEagle3"], eagle_config=dict(
        eagle_aux_hidden_state_layer_ids=[0, 1, 3], use_aux_hidden_state=True)), (1, 2, 4), {}, {}),
    "speculators": (PLAIN, speculators(SIZES, norm_before_residual=True, eagle_aux_hidden_state_layer_ids=[0, 1, 3]), (0, 1, 3),
                    dict(before_residual=True), dict(rename=renamed)),
    "speculators-silent": (PLAIN, {k: v for k, v in speculators(SIZES).items() if k != "norm_before_residual"}, (2, 2, 1),
                           dict(before_residual=True), dict(rename=renamed)),
    "qwen3": (dict(qk_norm=True), speculators(SIZES | dict(model_type="qwen3", rope_theta=1e6)), (2, 2, 1), dict(theta=1e6), dict(rename=renamed)),
    "model-prefix": (PLAIN, SIZES, (2, 2, 1), {}, dict(rename=lambda t: {f"model.{k}": v for k, v in renamed(t).items()})),
    "gpt-oss": (dict(input_norm=True), SIZES | dict(norm_before_fc=True, eagle_config=dict(
        eagle_aux_hidden_state_layer_ids=[], parallel_draft_step=1, use_last_layernorm=True)), (2, 2, 1), {}, {}),
    "3.1": (dict(fc_norm=True), SIZES | dict(fc_norm=True, norm_output=True), (2, 2, 1), dict(norm_output=True), {}),
    "two-states": (dict(n_state=2), SIZES | dict(eagle_aux_hidden_state_layer_ids=[1, 3]), (1, 3), {}, {}),
    "whole-vocabulary": (dict(vocab=V), SIZES | dict(draft_vocab_size=V), (2, 2, 1), {}, {}),
    "targets-ends": (dict(dim=64, own_embed=False, own_head=False, vocab=V), SIZES | dict(hidden_size=64, draft_vocab_size=None),
                     (2, 2, 1), dict(targets=True), {}),
    "no-states": (dict(dim=64, own_embed=False, fc=False), SIZES | dict(hidden_size=64, eagle_config=dict(use_aux_hidden_state=False)),
                  (4,), dict(targets=True), {}),
    "biased": (dict(bias=True, n_layer=2), SIZES | dict(attention_bias=True, num_hidden_layers=2), (2, 2, 1), {}, {}),
}


@pytest.fixture(scope="module")
def target(families):
    """Loads the target; .path: its directory."""
    def load(dtype=torch.float32):
        return load_model(read_checkpoint(load.path), dtype, "cpu")
    load.path = families("llama-linear")[0]
    return load


def made(tmp_path, name):
    options, config, layers, how, change = VARIANTS[name]
    t = tensors_of(**options)
    directory = write(tmp_path / name, change.get("rename", dict)(t), config, change.get("file", "model.safetensors"))
    assert is_eagle3(directory)
    return directory, t, layers, dict(how)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_drafts_are_the_formulas(tmp_path, target, name, capsys):
    """Whole; and as the drafter calls it: the prompt in chunks, plain steps, rejected drafts, a chain of three."""
    directory, t, layers, how = made(tmp_path, name)
    model, eagle = target(), open_eagle3(directory).load(torch.float32, "cpu")
    eagle.join(model)
    assert eagle.target_layers == layers and "unknown keys" not in capsys.readouterr().err
    if how.pop("targets", False):
        how |= dict(embed=model.embed.weight, head=model.head.weight)
    prompt = ids(24)
    states = states_of(model, layers, prompt[:-1])
    if name == "no-states":
        states = [model.norm(states[0])]
    expected, target_id, _ = reference(t, states, torch.tensor(prompt[1:]), **how)
    with torch.inference_mode():
        x = eagle.features([s[None] for s in states])
        logits, _ = eagle(torch.tensor([prompt[1:]]), x, torch.arange(23), 23)
    torch.testing.assert_close(logits[0][:, target_id].double(), expected, rtol=1e-4, atol=1e-4)
    assert logits.isneginf().sum() == 23 * (V - len(target_id))
    model.setup_cache(1, 128, 16, max_rejected=6)
    batch = batch_of(model, eagle, 3)
    assert isinstance(batch.drafter, Eagle3Drafter)
    assert ids_of(batch, ids(30, 8), 12) == plain(target_with_cache(target), ids(30, 8), 12)      # and mostly rejects
    n_cached = 0
    for _ in range(2):
        found = proposed(batch, prompt, n_cached, n_plain=3)
        known = batch.history[0, :batch.length[0] + 1].tolist()
        states = states_of(target(), layers, known[:-1])
        if name == "no-states":
            states = [model.norm(states[0])]
        assert found == [reference(t, states, torch.tensor(known[1:]), 3, **how)[2]]
        prompt, n_cached = known[:-1] + [3, 1, 4], len(known) - 1          # a chat's next turn


def target_with_cache(target):
    model = target()
    model.setup_cache(1, 128)
    return model


# ---- Drafting ------------------------------------------------------------------------------------

def learn(model, eagle, prompt, n_new, steps=120):
    """Teach the drafter the model's own greedy text after a prompt, from the model's states and from its own -> that text."""
    model.setup_cache(1, 128)
    eagle.join(model)
    model.record_hidden(*eagle.target_layers)
    new = plain(model, prompt, n_new)
    tokens = torch.tensor([prompt + new])
    n = tokens.shape[1] - 1
    states, pos = [model.hidden[k][:, :n - 1].clone() for k in eagle.target_layers], torch.arange(n - 1)
    eagle.setup_cache(0, 128)
    optimizer = torch.optim.Adam([p.requires_grad_() for p in eagle.parameters()], lr=3e-3)
    for _ in range(steps):
        x, loss = eagle.features(states), 0
        for depth in range(2):                             # the second time from its own states
            logits, x = eagle(tokens[:, 1 + depth:n], x, pos[:n - 1 - depth], n - 1 - depth)
            loss = loss + torch.nn.functional.cross_entropy(logits[0], tokens[0, 2 + depth:])
            x = x[:, :-1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    eagle.requires_grad_(False)
    return new


@pytest.fixture(scope="module")
def learned(tmp_path_factory, target):
    """A trained drafter's directory, a prompt, and the target's text after it."""
    path, t = tmp_path_factory.mktemp("eagle3"), tensors_of(vocab=V)
    eagle = open_eagle3(write(path / "random", t, SIZES | dict(draft_vocab_size=V))).load(torch.float32, "cpu")
    prompt = ids(40)
    text = learn(target(), eagle, prompt, 50)
    layer = eagle.layers[0]
    q, k, v = layer.attn.wqkv.weight.split(layer.attn.split)
    gate, up = layer.ffn.gate_up.weight.chunk(2)
    at = "midlayer."
    new = {"fc": eagle.fc, "norm": eagle.norm, "embed_tokens": eagle.embed, "lm_head": eagle.head, f"{at}self_attn.o_proj": layer.attn.wo,
           f"{at}hidden_norm": layer.hidden_norm, f"{at}input_layernorm": layer.attn_norm,
           f"{at}post_attention_layernorm": layer.ffn_norm, f"{at}mlp.down_proj": layer.ffn.down}
    new = {f"{name}.weight": module.weight.detach() for name, module in new.items()}
    new |= {f"{at}self_attn.{name}_proj.weight": w for name, w in zip("qkv", (q, k, v))}
    new |= {f"{at}mlp.{name}_proj.weight": w for name, w in zip(("gate", "up"), (gate, up))}
    return write(path / "learned", {k: v.contiguous() for k, v in new.items()}, SIZES | dict(draft_vocab_size=V)), prompt, text


@pytest.mark.kernels
@pytest.mark.parametrize("engine", ["kv_cache", "compile", "torch_compile"])
def test_greedily_the_same_tokens(learned, target, engine, monkeypatch):
    """At every k, over several chunks, twice; a drafter that has learned is right more often than not."""
    torch._dynamo.reset()
    if engine == "torch_compile":
        monkeypatch.setattr(torch, "compile", lambda step, original=torch.compile, **more: original(
            step, backend="aot_eager", fullgraph=True))
    directory, prompt, expected = learned
    for k, fixed in ((3, True), (5, False))[:1 if engine == "torch_compile" else 2]:
        model, eagle = target(), open_eagle3(directory).load(torch.float32, "cpu")
        model.setup_cache(1, 128, 16, max_rejected=6)
        batch = batch_of(model, eagle, k, fixed, engine=engine)
        assert uses_operations(eagle) == (engine == "compile")
        for _ in range(2):
            assert ids_of(batch, prompt, 50) == expected
        rounds = batch.accept_counts
        if fixed:
            assert sum(rounds[1:]) > 0.5 * sum(rounds), rounds


@pytest.mark.kernels
@pytest.mark.parametrize("name", ["qwen3", "biased", "targets-ends"])
def test_compiled_on_a_cpu(tmp_path, target, name):
    """All matrices are packed for the operations; the drafts are those of the uncompiled drafter."""
    directory, found = made(tmp_path, name)[0], []
    for engine in ("kv_cache", "compile"):
        model, eagle = target(), open_eagle3(directory).load(torch.float32, "cpu")
        model.setup_cache(1, 128, 16, max_rejected=6)
        found.append(proposed(batch_of(model, eagle, 3, engine=engine), ids(24)))
    assert found[0] == found[1]
    linears = [module for module in eagle.layers.modules() if hasattr(module, "packed")]
    assert len(linears) == 4 * len(eagle.layers) and all(type(one) is OperationsLinear for one in linears)


@pytest.mark.kernels
def test_rows_draft_together(learned, target):
    """Each row its own text and accepted length."""
    directory, prompt, expected = learned
    for engine in ("kv_cache", "compile"):
        model, eagle = target(), open_eagle3(directory).load(torch.float32, "cpu")
        prompts = [prompt, ids(9, 8), prompt[:30]]
        wanted = []
        for one in prompts:
            model.setup_cache(1, 128)
            wanted.append(plain(model, one, 20))
        model.setup_cache(3, 128, 16, max_rejected=4)
        sampler_batch = rows_of(model, eagle, 3, 3, engine)
        found = [[] for _ in prompts]
        for token in generate(sampler_batch, prompts, 60):
            for row, one in enumerate(token.flatten().tolist()):
                found[row] += [one] if one >= 0 else []
        assert [one[:20] for one in found] == wanted
        assert sum(sampler_batch.accept_counts[1:]) > 0


def rows_of(model, eagle, n_row, k, engine):
    steps = engines.build_steps(model, engine)
    return engines.build_speculative(model, build_sampler(model, [GREEDY] * n_row, None), steps, engine, k, True, eagle)


@pytest.mark.kernels
@pytest.mark.parametrize("mode", ["int8", "int4"])
@pytest.mark.parametrize("engine", ["kv_cache", "compile"])
def test_quantized_in_bfloat16(learned, target, mode, engine, tmp_path):
    """The drafter's matrices and its own output layer are rounded; what it accepts hardly changes."""
    directory, prompt, _ = learned
    source = quantized(open_eagle3(directory), mode)
    assert {"head.scales", "layers.0.attn.wq.scales", "layers.0.ffn.down.scales"} <= source.tensors.keys()
    model = target(torch.bfloat16)
    model.setup_cache(1, 128, 16, max_rejected=4)
    batch = batch_of(model, source.load(torch.bfloat16, "cpu"), 3, engine=engine)
    ids_of(batch, prompt, 50)
    rounds = batch.accept_counts
    assert sum(rounds[1:]) > 0.4 * sum(rounds), rounds
    assert model.hidden[2].dtype == torch.bfloat16


def test_the_steps_trace(learned, target, monkeypatch):
    """As a GPU would capture them: the model's step writes its hidden states, the drafter drafts."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", lambda step, original=torch.compile, **more: original(
        step, backend="aot_eager", **more))
    directory, prompt, expected = learned
    model, eagle = target(), open_eagle3(directory).load(torch.float32, "cpu")
    model.setup_cache(1, 128, 64)
    eagle.join(model)
    decode, draft, verify = map(as_cuda_graph, (generate_module.decode_one_token, mtp.draft_one_token, speculate.verify))
    drafter = Eagle3Drafter(model, eagle, draft)
    batch = speculate.SpeculativeBatch(model, build_sampler(model, [GREEDY], None), generate_module.Steps(decode=decode), drafter,
                                       speculate.FixedLength(2), 2, verify)
    assert ids_of(batch, prompt, 12) == expected[:12] and sum(batch.accept_counts[1:]) > 0


TINY = ModelConfig(dim=16, n_layer=2, n_head=2, n_kv_head=1, head_dim=8, ffn_dim=16, vocab_size=4, context=64)


@pytest.mark.parametrize("how, k", [(HOWS[0], 3), (HOWS[2], 2), (HOWS[3], 2)], ids=["all", "top_p", "filters"])
def test_the_distribution_is_the_models(how, k, exhaustive):
    """With drafts of three of the four tokens."""
    cfg = Eagle3Config(**{**vars(TINY), "n_layer": 1, "block": FirstLayerReadsBoth()}, target_dim=16, target_layers=(0, 1, 2), draft_vocab=3)
    torch.manual_seed(1)
    model, eagle = Transformer(TINY), Eagle3(cfg)
    for p in itertools.chain(model.parameters(), eagle.parameters()):
        p.requires_grad_(False)
        p.copy_(torch.randn_like(p) * p.shape[-1]**-0.5 * 1.7 if p.dim() > 1 else torch.ones_like(p))
    eagle.target_ids = torch.tensor([0, 2, 3])
    model.setup_cache(1, 64)
    prompt, n = [0, 1, 2, 3, 0, 2], 4
    batch = batch_of(model, eagle, k, True, how, torch.Generator().manual_seed(7))
    total, counts = 1300 if exhaustive else 400, {}
    for _ in range(total):
        path = tuple(ids_of(batch, prompt, n))
        counts[path] = counts.get(path, 0) + 1
    exact, chance = Transformer(TINY), {}
    exact.load_state_dict(model.state_dict())
    for path in itertools.product(range(4), repeat=n):
        tokens = torch.tensor([[*prompt, *path]])
        logits = exact(tokens, torch.arange(tokens.shape[1]), n + 1)[0, :n]
        probs, some = Sampler([how], 4).distribution(logits)
        dense = probs if some is None else torch.zeros(n, 4).scatter(1, some, probs)
        dense = dense / dense.sum(-1, keepdim=True)
        chance[path] = dense.gather(1, torch.tensor(path)[:, None]).prod().item()
    assert chi_square(counts, chance, total) < 4.5
    assert all(batch.accept_counts[:2])


# ---- Files ---------------------------------------------------------------------------------------

def gguf_of(path, t, arch="eagle3", **more):
    """As llama.cpp's converter writes one: q and k permuted, d2t as ids, the target's vocabulary."""
    writer = gguf.GGUFWriter(path, arch)
    numbers = dict(block_count=1, embedding_length=D, feed_forward_length=96, context_length=128, target_hidden_size=64)
    for key, value in (numbers | dict([("attention.head_count", 4), ("attention.head_count_kv", 2), ("attention.key_length", 16)])).items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32(f"{arch}.rope.freq_base", 1e4)
    writer.add_array(f"{arch}.extract_layers", [1, 2, 4])
    writer.add_bool(f"{arch}.norm_before_residual", True)
    writer.add_array("tokenizer.ggml.tokens", [f"w{i}" for i in range(V)])
    for key, value in more.items():
        writer.add_uint32(f"{arch}.{key}", value)
    names = {"input_layernorm": "attn_norm", "hidden_norm": "attn_norm_2", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
             "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
             "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
    outer = {"norm": "output_norm", "lm_head": "output", "embed_tokens": "token_embd", "fc": "fc"}
    for name, value in t.items():
        stem = name.removesuffix(".weight")
        if name == "d2t":
            writer.add_tensor("d2t", (value + torch.arange(len(value))).numpy())
        elif stem.startswith("midlayer."):
            stem = names[stem.removeprefix("midlayer.")]
            if stem in ("attn_q", "attn_k"):               # pairs (i, i + 8) of a head become neighbours
                value = value.view(-1, 2, 8, value.shape[1]).transpose(1, 2).reshape(value.shape)
            writer.add_tensor(f"blk.0.{stem}.weight", value.contiguous().numpy())
        elif name != "t2d":
            writer.add_tensor(f"{outer[stem]}.weight", value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf(tmp_path, target, capsys):
    t = tensors_of()
    path = gguf_of(tmp_path / "drafter.gguf", t)
    assert is_eagle3(path)
    source = open_eagle3(path)
    assert "unknown" not in capsys.readouterr().err
    model, eagle = target(), source.load(torch.float32, "cpu")
    eagle.join(model)
    assert eagle.target_layers == (1, 2, 4)                # inputs, as llama.cpp's converter writes them
    prompt = ids(24)
    states = states_of(model, (1, 2, 4), prompt[:-1])
    expected, target_id, _ = reference(t, states, torch.tensor(prompt[1:]), before_residual=True)
    with torch.inference_mode():
        logits, _ = eagle(torch.tensor([prompt[1:]]), eagle.features([s[None] for s in states]), torch.arange(23), 23)
    torch.testing.assert_close(logits[0][:, target_id].double(), expected, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def named(target, tmp_path_factory):
    """The target with a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    directory = tmp_path_factory.mktemp("target") / "llama"
    shutil.copytree(target.path, directory)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(V)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def test_the_command(learned, named, capsys):
    """The same ids as without."""
    directory, _, _ = learned
    argv = "-m", named, "--device", "cpu", "--dtype", "float32", "--temperature", 0, "--ignore_eos", "--json", "--max_new_tokens", 20
    argv = *argv, "--prompt", "w5 w7 w9 w5"
    status, out, err = run(capsys, *argv)
    assert status == 0, err
    expected = json.loads(out)["new_ids"]
    for more in ([], ["--speculate_k", 2], ["--compile"]):
        status, out, err = run(capsys, *argv, "--draft_checkpoint_path", directory, *more)
        assert status == 0, err
        found = json.loads(out)
        assert found["new_ids"] == expected and found["speculate_k"] == (2 if "--speculate_k" in more else 5)
        assert "Drafting 5 tokens costs" in err or "--speculate_k" in more


def test_the_memory_statement_counts_the_states(learned, target, monkeypatch):
    source, said = read_checkpoint(target.path), []
    monkeypatch.setattr(runtime, "log", said.append)
    for sources in ([source, None], [source, open_eagle3(learned[0])]):
        runtime.check_memory(sources, torch.bfloat16, torch.device("cpu"), 2, 10**5, 512, 0)
    before, after = (int(re.search(r"and (\d+) MB", text)[1]) for text in said)
    keys_and_values, states = 2 * 2 * 16 * 2 * 10**5 / 1e6, 3 * 64 * 2 * 10**5 / 1e6
    assert after - before == pytest.approx(2 * (keys_and_values + states), abs=1)


BAD_CONFIGS = {
    "width": (dict(target_hidden_size=32), "fc.weight joins 6 hidden states"),
    "kind": (dict(model_type="gemma4_text"), "layers of model_type 'gemma4_text' is not supported"),
    "layer-names": (dict(eagle_aux_hidden_state_layer_ids=["a"]), "expected layer numbers"),
    "one-layer": (dict(eagle_aux_hidden_state_layer_ids=[1]), "1 layers are named, but fc.weight joins 3"),
    "too-deep": (dict(eagle_aux_hidden_state_layer_ids=[1, 2, 9]), "reads the inputs of layers 1, 2, 9, but this model has 4 layers"),
    "nested": (dict(eagle_config=dict(use_mtp_layernorm=True)), "'use_mtp_layernorm' in 'eagle_config' is True: only False is supported"),
    "nested-key": (dict(eagle_config=dict(tree=1)), "'eagle_config' has the key 'tree', which is not supported"),
    "flag": (dict(norm_output="yes"), "'norm_output' is 'yes', expected true or false"),
    "quantized": (dict(quantization_config=dict(quant_method="fp8")), "quantized EAGLE-3 drafters are not supported"),
    "states": (dict(eagle_config=dict(use_aux_hidden_state=False)), "fc.weight, but 'use_aux_hidden_state' is false"),
    "missing-norm": (dict(fc_norm=True), "3 tensors are missing: fc_norm.0.weight"),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_bad_configs(tmp_path, named, capsys, name):
    change, words = BAD_CONFIGS[name]
    directory = write(tmp_path / name, tensors_of(), SIZES | change)
    assert words in refused(capsys, "-m", named, "--draft_checkpoint_path", directory, "--prompt", "w1", "--max_new_tokens", 2)


def test_bad_tensors_and_targets(tmp_path, named, capsys):
    def says(t, config=SIZES, model=None):
        directory = write(tmp_path / "bad", t, config)
        return refused(capsys, "-m", model or named, "--draft_checkpoint_path", directory, "--prompt", "w1", "--max_new_tokens", 2)
    t = tensors_of()
    assert "d2t has 39 entries" in says(t | dict(d2t=t["d2t"][:-1].clone()))
    assert "expected one for each of 40 draft tokens, all different and below 160" in says(t | dict(d2t=t["d2t"] + 130))
    assert "but there is no d2t" in says({k: v for k, v in t.items() if k != "d2t"})
    assert "d2t is torch.float32" in says(t | dict(d2t=torch.ones(40)))
    assert "fc.weight is missing" in says({k: v for k, v in t.items() if k != "fc.weight"})
    assert "1 tensors that this architecture does not have: extra" in says(t | dict(extra=torch.ones(2)))
    assert "1 tensors are missing: layers.0.hidden_norm.weight" in says({k: v for k, v in t.items() if "hidden_norm" not in k})
    wide = tensors_of(n_state=6)                           # six states of 32
    assert "drafts for models with width 32, but this model has 64" in says(
        wide, SIZES | dict(target_hidden_size=64 // 2, eagle_aux_hidden_state_layer_ids=[0, 1, 2, 3] * 3))
    assert "drafts for models with a vocabulary of 159, but this model has 160" in says(
        tensors_of(vocab=V) | {"embed_tokens.weight": torch.ones(159, D), "lm_head.weight": torch.ones(159, D)},
        SIZES | dict(vocab_size=159, draft_vocab_size=159))
    directory = write(tmp_path / "good", t, SIZES)
    for path in (directory, gguf_of(tmp_path / "drafter.gguf", t)):
        assert "an EAGLE-3 drafter, not a model: give it as --draft_checkpoint_path" in refused(capsys, "-m", path, "--prompt", "w1")
