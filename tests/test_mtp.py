"""The head that drafts: its logits are transformers', its drafts cost no token, and what is kept follows the positions."""

import copy
import itertools
import json
import re
import shutil
from dataclasses import replace

import gguf
import pytest
import torch
from conftest import SMOLLM2
from helpers import GREEDY, ids_of
from safetensors.torch import load_file, save_file
from test_errors import refused, run
from test_formats import variant, write_gguf
from test_speculate import HOWS, chi_square, plain
from transformers.cache_utils import MtpCache

import generate
import speculate
from checkpoint import save_checkpoint
from gpt_faster import runtime
from gpt_faster.decoding import engines, mtp
from gpt_faster.decoding.samplers import build_sampler
from gpt_faster.formats import load as load_module
from gpt_faster.formats.load import load_model, read_checkpoint
from gpt_faster.formats.quantize_on_load import quantized
from gpt_faster.kernels.compile import as_cuda_graph
from gpt_faster.kernels.cpu.layers import OperationsLayer, uses_operations
from gpt_faster.kernels.linear import PackedLinear
from gpt_faster.layers.mtp_head import MTPConfig, MTPHead
from model import ModelConfig, Transformer
from quantize import schemes
from sampling import Sampler, SamplingParams
from speculate import FixedLength


def load(source, dtype=torch.float32):
    """-> model and head, which is joined to it."""
    model, head = load_model(source, dtype, "cpu"), load_model(source.mtp(), dtype, "cpu")
    head.join(model)
    return model, head


def batch_of(model, head, k, fixed=True, how=GREEDY, generator=None, engine="kv_cache"):
    steps = engines.build_steps(model, engine)
    sampler = build_sampler(model, [how], generator)
    return engines.build_speculative(model, sampler, steps, engine, k, fixed, head)


def train(model, head, prompt, n_new, steps=150):
    """Teach the head the model's own greedy text after a prompt -> that text."""
    model.setup_cache(1, 128)
    model.record_hidden(model.cfg.n_layer)
    new = plain(model, prompt, n_new)
    tokens = torch.tensor([prompt + new])
    n = tokens.shape[1] - 1
    hidden, pos = model.norm(model.hidden[model.cfg.n_layer][:, :n - 1]).clone(), torch.arange(n - 1)
    head.setup_cache(0, 128)
    attention, ffn = head.layers[0].attn, head.layers[0].ffn
    ffn.forward = lambda x, plain=ffn.forward: plain(x.detach())       # experts have no gradient
    learning = [*attention.parameters(), *head.eh_proj.parameters()]
    optimizer = torch.optim.Adam([p.requires_grad_() for p in learning], lr=3e-3)
    for _ in range(steps):
        logits, _ = head(tokens[:, 1:n], hidden, pos, n - 1)
        loss = torch.nn.functional.cross_entropy(logits[0], tokens[0, 2:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    del ffn.forward
    head.requires_grad_(False)
    return new


def ids(n, seed=4, n_vocab=160):
    return torch.randint(0, n_vocab, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


NAMES = "glm4_moe", "mellum", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "qwen3_5"


@pytest.mark.parametrize("family", NAMES)
def test_logits_are_transformers(heads, family):
    """Whole and token by token with the cache, over the window too; and the hidden state that goes on."""
    directory, theirs, their_head = heads(family)
    model, head = load(read_checkpoint(directory))
    tokens = torch.tensor([ids(24)])
    pos = torch.arange(24)
    with torch.no_grad():
        hidden = theirs(tokens, output_hidden_states=True).hidden_states[-1]
        cache = MtpCache(config=theirs.config.get_mtp_config())
        out = their_head.forward_layer(0, hidden[:, :-1], pos[None, 1:], cache, input_ids=tokens[:, 1:])
        expected = their_head._project_to_logits(out)
    model.setup_cache(1, 32)
    model.record_hidden(model.cfg.n_layer)
    with torch.inference_mode():
        model(tokens, pos)
        mine = model.norm(model.hidden[model.cfg.n_layer][:, :23])
        torch.testing.assert_close(mine, hidden[:, :-1], rtol=1e-4, atol=1e-4)
        whole, last = head(tokens[:, 1:], mine, pos[:23])
        torch.testing.assert_close(whole[:, 0], expected[:, -1], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(last[:, 0], out[:, -1], rtol=1e-3, atol=1e-3)
        head.setup_cache(1, 32, 4)
        steps = [head(tokens[:, i + 1:i + 2], mine[:, i:i + 1], pos[i:i + 1])[0] for i in range(23)]
    torch.testing.assert_close(torch.cat(steps, 1), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", NAMES)
def test_greedily_the_same_tokens(heads, family):
    """With a trained head and with one that is always wrong, at every k; prompts over several chunks."""
    model, head = load(read_checkpoint(heads(family)[0]))
    prompt = ids(40)
    expected = train(model, head, prompt, 50)
    counts = {}
    wrong = copy.deepcopy(head)
    wrong.eh_proj.weight.data.neg_()
    for longest_call in (128, 16):
        for drafter, k, fixed in [*((head, k, True) for k in (1, 2, 3, 4)), (head, 4, False), (wrong, 4, True), (wrong, 4, False)]:
            model.setup_cache(1, 128, longest_call, max_rejected=5)
            batch = batch_of(model, drafter, k, fixed)
            for _ in range(2):                             # the second time over what the first one left
                assert ids_of(batch, prompt, 50) == expected
            counts[drafter is head, k, fixed] = batch.accept_counts
    for k in (1, 2, 3, 4):
        rounds = counts[True, k, True]
        assert sum(rounds[1:]) > 0.8 * sum(rounds), rounds         # the first draft is right
    assert sum(counts[True, 4, True][2:]) > 0                      # and some that follow from drafts
    assert counts[False, 4, True][0] > 0.8 * sum(counts[False, 4, True])
    assert sum(counts[False, 4, False]) < 25                       # bad drafts pause


def proposed(batch, text, n_cached=0, n_plain=6):
    """What follows a prompt and some plain steps, as the head has it."""
    batch.draft_length = FixedLength(0)
    batch.prefill([0], [text], n_cached)
    for _ in range(n_plain):
        batch.step()
    batch.draft_length = FixedLength(3)
    with torch.inference_mode():
        batch.history.scatter_(1, batch.pos.view(-1, 1), batch.token)
        return batch.drafter.propose(batch.rows_of_round({0}), 3, batch.sampler)[0].tolist()


@pytest.mark.parametrize("family, longest_call", [("glm4_moe", 16), ("mellum", 100), ("qwen3_5_text", 16)])
def test_drafts_are_those_of_a_fresh_start(heads, family, longest_call):
    """After plain steps, after rejected drafts, after another text and in a chat's next turn."""
    model, head = load(read_checkpoint(heads(family)[0]))
    model.setup_cache(1, 128, longest_call, max_rejected=5)
    prompt = ids(40)
    batch = batch_of(model, head, 3)
    longer = ids_of(batch, prompt, 30)
    assert sum(batch.accept_counts) > 20                   # most were rejected
    back = 0 if family == "qwen3_5_text" else 47           # whose states go back a few tokens only
    for text, n_cached in ((prompt + longer[:-1] + [3, 1, 4], 69), (prompt + longer[:9] + [5, 9], back), (ids(30, 8), 0)):
        found = proposed(batch, text, n_cached)
        fresh_model, fresh_head = load(read_checkpoint(heads(family)[0]))
        fresh_model.setup_cache(1, 128, 128, max_rejected=5)
        assert found == proposed(batch_of(fresh_model, fresh_head, 3), text)
        assert found != proposed(batch, text[:-1] + [(text[-1] + 1) % 160], len(text) - 1)


@pytest.mark.parametrize("mode", [None, "int8", "int4"])
def test_written_and_quantized(heads, tmp_path, mode):
    """A .pth keeps the head, rounded as the layers are; nobody reads it who does not ask."""
    source = read_checkpoint(heads("glm4_moe")[0])
    if mode:
        source = quantized(source, mode)
    save_checkpoint(source, tmp_path / "model.pth", None)
    again = read_checkpoint(tmp_path / "model.pth")
    assert again.cfg == source.cfg and again.tensors.keys() == source.tensors.keys()
    assert again.mtp().cfg == source.mtp().cfg
    assert schemes(again.mtp()) == ({None: "none", "int8": "int8", "int4": "int4-g32"}[mode], "none")
    logits = []
    for one in (source, again):
        model, head = load(one)
        with torch.inference_mode():
            logits.append(head(torch.tensor([ids(9)]), torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(1)), torch.arange(9))[0])
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=0)
    model, head = load(again)
    model.setup_cache(1, 64)
    expected = plain(model, ids(9), 20)
    assert ids_of(batch_of(model, head, 2), ids(9), 20) == expected


def test_a_head_nobody_asks_for_is_not_looked_at(heads, monkeypatch):
    opened = []
    monkeypatch.setattr(load_module, "to_checkpoint", lambda raw, plain=load_module.to_checkpoint: opened.append(raw.mtp is None) or plain(raw))
    source = read_checkpoint(heads("glm4_moe")[0])
    load_model(source, torch.float32, "cpu")
    assert opened == [False]                               # the model's own
    source.mtp()
    assert opened == [False, True]


# ---- Compiled ------------------------------------------------------------------------------------

@pytest.mark.kernels
@pytest.mark.parametrize("family", NAMES[:2])
@pytest.mark.parametrize("mode", [None, "int4"])
def test_compiled_on_a_cpu(heads, family, mode, two_threads):
    """The head's layer as operations in C++, its ends those of the model: packed once."""
    source = read_checkpoint(heads(family)[0])
    source = quantized(source, mode) if mode else source
    model, head = load(source)
    prompt = ids(40)
    expected = train(model, head, prompt, 40) if not mode else None
    model.setup_cache(1, 128, 64, max_rejected=5)
    expected = expected or plain(model, prompt, 40)
    batch = batch_of(model, head, 3, engine="compile")
    assert uses_operations(head) and head.head is model.head
    assert isinstance(head.layers[0].forward, OperationsLayer) and isinstance(head.eh_proj, PackedLinear)
    engines.warm_up(batch, [prompt], range(41, 80))
    for _ in range(2):
        assert ids_of(batch, prompt, 40) == expected
    if not mode:
        assert sum(batch.accept_counts[1:]) > 0.8 * sum(batch.accept_counts)


@pytest.mark.kernels
@pytest.mark.parametrize("engine, mode, dtype", [
    ("kv_cache", None, torch.float32), ("compile", None, torch.float32), ("compile", None, torch.bfloat16),
    ("compile", "int8", torch.float32), ("compile", "int4", torch.bfloat16)], ids=str)
def test_a_part_of_the_vocabulary_is_drafted(heads, engine, mode, dtype, two_threads, monkeypatch):
    """The output layer's first rows, where they lie; the text is the one without drafts."""
    source = read_checkpoint(heads("qwen3_5_text")[0])
    source = quantized(source, mode, head="int4" if mode == "int4" else "int8") if mode else source
    model, head = load(source, dtype)
    prompt = ids(40)
    model.setup_cache(1, 128, 64, max_rejected=5)
    expected = plain(model, prompt, 30)
    monkeypatch.setattr(mtp, "DRAFT_VOCAB", 64)
    batch = batch_of(model, head, 3, engine=engine)
    whole, part, x = model.head, head.head, torch.randn(5, model.cfg.dim, dtype=dtype)
    with torch.inference_mode():
        assert torch.equal(part(x), whole(x)[:, :64]) and whole(x).shape[1] > 2 * 64
    assert len({next(linear.parameters()).untyped_storage().data_ptr() for linear in (part, whole)}) == 1
    drafted, propose = [], batch.drafter.propose

    def seen(*args):
        drafts, *dists = propose(*args)
        drafted.extend(drafts[0].tolist())
        return drafts, *dists
    batch.drafter.propose = seen
    found = ids_of(batch, prompt, 30)
    assert drafted and max(drafted) < 64
    assert found == expected or dtype != torch.float32     # in bfloat16 several rows round otherwise than one


@pytest.mark.parametrize("how", [GREEDY, SamplingParams(0.8, 20, 0.9, 0.05, 1.3)], ids=["greedy", "filters"])
def test_the_steps_trace(heads, how, monkeypatch):
    """As a GPU would capture them: the model's step writes its hidden states, the head's drafts."""
    torch._dynamo.reset()
    model, head = load(read_checkpoint(heads("glm4_moe")[0]))
    drawn = []
    for traced in (False, True):
        with monkeypatch.context() as m:
            m.setattr(torch, "compile", lambda step, original=torch.compile, **more: original(
                step, backend="aot_eager", **more))
            steps = [generate.decode_one_token, mtp.draft_one_token, speculate.verify]
            decode, draft, verify = [as_cuda_graph(step) for step in steps] if traced else steps
        model.setup_cache(1, 64, 16)
        sampler = build_sampler(model, [how], torch.Generator().manual_seed(5))
        drafter = mtp.MTPDrafter(model, head, draft)
        batch = speculate.SpeculativeBatch(model, sampler, generate.Steps(decode=decode), drafter, FixedLength(2), 2, verify)
        tokens = ids_of(batch, ids(9), 12)
        batch.draft_length = FixedLength(0)                # plain steps too
        drawn.append([*tokens, *(batch.step().item() for _ in range(4))])
    assert drawn[0] == drawn[1]


# ---- GGUF and the command line -------------------------------------------------------------------

def test_gguf(heads, tmp_path):
    """llama.cpp's nextn tensors, in a layer more; of a file without its own norm, the model's."""
    directory, model, _ = heads("glm4_moe")
    names, more = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GLM4_MOE, 5), {}
    for key, t in load_file(directory / "model.safetensors").items():
        if "layers.4." in key and ".experts." not in key and "correction" not in key:
            more[names.get_name(key, (".weight", ".bias"))] = t.numpy()
    head = read_checkpoint(directory).mtp()
    for kind in ("gate", "up", "down"):
        more[f"blk.4.ffn_{kind}_exps.weight"] = head.tensors[f"layers.0.ffn.{kind}.weight"].whole().numpy()
    more["blk.4.exp_probs_b.bias"] = head.tensors["layers.0.ffn.choice_bias"].whole().numpy()
    assert {"blk.4.nextn.eh_proj.weight", "blk.4.nextn.shared_head_norm.weight", "blk.4.nextn.embed_tokens.weight"} <= more.keys()
    again = read_checkpoint(write_gguf(model, "glm4moe", tmp_path / "model.gguf", more=more)).mtp()
    assert again.cfg == replace(head.cfg, norm_eps=again.cfg.norm_eps) and again.tensors.keys() == head.tensors.keys()
    for name, t in head.tensors.items():
        torch.testing.assert_close(again.tensors[name].whole(), t.whole(), rtol=0, atol=0)
    del more["blk.4.nextn.shared_head_norm.weight"]
    source = read_checkpoint(write_gguf(model, "glm4moe", tmp_path / "without.gguf", more=more))
    assert torch.equal(source.mtp().tensors["norm.weight"].whole(), source.tensors["norm.weight"].whole())


def test_gguf_of_qwen(heads, tmp_path):
    """As llama.cpp's converter names them: a layer more, norms with the added one, queries and gate in one."""
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    model, more = variant("qwen3_5_text", layer_types=kinds, num_mtp_layers=1), {}
    own = dict(fc="eh_proj", pre_fc_norm_embedding="enorm", pre_fc_norm_hidden="hnorm", norm="shared_head.norm")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GLM4_MOE, 5)
    for key, t in load_file(heads("qwen3_5_text")[0] / "model.safetensors").items():
        if key.startswith("mtp."):
            inner = key.removeprefix("mtp.").removeprefix("layers.0.")
            stem = inner.removesuffix(".weight")
            name = f"model.layers.4.{own[stem]}.weight" if stem in own else f"model.layers.4.{inner}"
            more[names.get_name(name, (".weight",))] = (t + 1 if name.endswith("norm.weight") else t).numpy()
    source = read_checkpoint(write_gguf(model, "qwen35", tmp_path / "model.gguf", more=more))
    head, again = read_checkpoint(heads("qwen3_5_text")[0]).mtp(), source.mtp()
    assert source.cfg.n_layer == 4 and again.cfg == replace(head.cfg, norm_eps=again.cfg.norm_eps)
    assert again.tensors.keys() == head.tensors.keys()
    for name, t in head.tensors.items():
        torch.testing.assert_close(again.tensors[name].whole(), t.whole(), rtol=0, atol=0)


@pytest.fixture
def command(heads, tmp_path):
    """A copy of a checkpoint with a head, and a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    directory = tmp_path / "glm"
    shutil.copytree(heads("glm4_moe")[0], directory)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(160)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    return "-m", directory, "--device", "cpu", "--dtype", "float32", "--temperature", 0, "--ignore_eos", "--prompt", "w5 w7 w9 w5"


def test_the_command(capsys, command, tmp_path):
    argv = [*command, "--json", "--max_new_tokens", 30]
    status, out, plain_err = run(capsys, *argv, "--no_speculate")
    expected = json.loads(out)
    assert status == 0 and "speculate" not in expected and "head" not in plain_err
    status, out, default_err = run(capsys, *argv)          # where nothing is said, it drafts
    found = json.loads(out)
    assert (found["speculate"], found["new_ids"]) == ("mtp", expected["new_ids"])
    assert "MTP speculation is on by default" in default_err and "Drafting 4 tokens costs" in default_err
    for more in ([], ["--speculate_k", 2, "--compile"], ["--quantize", "int8"]):
        status, out, err = run(capsys, *argv, "--speculate", "mtp", "--compare", *more)
        found = json.loads(out)
        assert status == 0 and found["speculate"] == "mtp" and found["speculate_k"] == (2 if "--compile" in more else 4)
        assert found["new_ids"] == expected["new_ids"] or "--quantize" in more
        assert "decode steps" in err or "--compile" in more
    for text in (plain_err, err):                          # what the head takes is stated
        assert "MB for weights and" in text
    from gpt_faster.cli.quantizing import run as quantize
    quantize(["-m", str(command[1]), "--mode", "int8", "--output", str(tmp_path / "model.pth"), "--device", "cpu"])
    capsys.readouterr()
    status, out, err = run(capsys, "-m", tmp_path / "model.pth", *argv[2:], "--speculate", "mtp", "--speculate_k", 3)
    assert status == 0, err
    assert json.loads(out)["new_ids"] == found["new_ids"]


def test_the_memory_statement_counts_the_head(heads, monkeypatch):
    source, said = read_checkpoint(heads("glm4_moe")[0]), []
    monkeypatch.setattr(runtime, "log", said.append)
    for sources in ([source, None], [source, source.mtp()]):
        runtime.check_memory(sources, torch.bfloat16, torch.device("cpu"), 1, 10**5, 512, 0)
    weights, cache = zip(*(map(int, re.findall(r"(\d+) MB", text)) for text in said))
    per_layer = 2 * 2 * 24 * 2 * 10**5 / 1e6               # keys and values of 2 heads
    assert cache[1] - cache[0] == pytest.approx(per_layer + 64 * 2 * 10**5 / 1e6, abs=1)


def test_bad_input(capsys, families, command, tmp_path):
    directory = command[1]
    assert "has no MTP head" in refused(capsys, "-m", SMOLLM2, "--speculate", "mtp")
    assert "conflicts with" in refused(capsys, *command, "--speculate", "mtp", "--no_speculate")
    disk = load_file(directory / "model.safetensors")
    for change, words in ((lambda d: d.pop("model.layers.4.eh_proj.weight"), "1 tensors are missing: eh_proj.weight"),
                          (lambda d: d.update({"model.layers.4.hnorm.weight": torch.ones(32)}), "hidden_norm.weight is [32], but the config asks for [64]"),
                          (lambda d: d.update({"model.layers.4.self_attn.extra.weight": torch.ones(2)}), "1 tensors that this architecture does not have")):
        changed = dict(disk)
        change(changed)
        save_file(changed, directory / "model.safetensors")
        assert words in refused(capsys, *command, "--max_new_tokens", 2, "--speculate", "mtp")
        status, _, err = run(capsys, *command, "--max_new_tokens", 2)  # whoever does not ask is told, and served
        assert status == 0 and "is not used: " in err and words in err
    save_checkpoint(read_checkpoint(directory), tmp_path / "model.pth", None)
    assert "note: left out: MTP head of " in capsys.readouterr().err
    assert read_checkpoint(tmp_path / "model.pth").mtp is None


# ---- The distribution ----------------------------------------------------------------------------

TINY = ModelConfig(dim=16, n_layer=1, n_head=2, n_kv_head=1, head_dim=8, ffn_dim=16, vocab_size=4, context=64)


def random_pair(seed=1):
    """A model of four tokens, and a head that knows it a little: its output layer is the model's."""
    cfg = MTPConfig(**{**vars(TINY), "vocab_size": 1})
    torch.manual_seed(seed)
    pair = Transformer(TINY), MTPHead(cfg)
    for module in pair:
        for p in module.parameters():
            p.data = torch.randn_like(p) * p.shape[-1]**-0.5 * 1.7 if p.dim() > 1 else torch.ones_like(p)
    return *(module.requires_grad_(False) for module in pair),


@pytest.mark.parametrize("how, k", [(HOWS[0], 3), (HOWS[1], 1), (HOWS[2], 3), (HOWS[3], 2)], ids=["all", "top_k", "top_p", "filters"])
def test_the_distribution_is_the_models(how, k, exhaustive):
    model, head = random_pair()
    model.setup_cache(1, 64)
    prompt, n = [0, 1, 2, 3, 0, 2], 4
    batch = batch_of(model, head, k, True, how, torch.Generator().manual_seed(7))
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
