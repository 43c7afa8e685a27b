"""Peers answer by their protocol or say in one line why not, leave no process, and get our weights."""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from helpers import GREEDY, generated
from test_formats import ARCHITECTURES, variant, write_gguf

from gpt_faster.bench import exports, peers, worker
from gpt_faster.bench.weights import Weights
from gpt_faster.formats.gguf_file import read_gguf_tensors
from gpt_faster.formats.known_shapes import random_checkpoint
from gpt_faster.formats.load import count_parameters, load_model, read_checkpoint

HAS_LLAMA_CPP = (ROOT / ".venv-peers/bin/llama-server").exists()
HOW = dict(threads=1, device="cpu", dtype="float32", length=256)
READY = """
import json, os, subprocess, sys, time
print(json.dumps(dict(ready=True, version="fake 1", load_s=0.5)), flush=True)
for line in sys.stdin:
    r = json.loads(line)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Run another script than worker.py, by our own Python: there is no .venv-peers beside it."""
    def start(script, name="llama.cpp", path="model.gguf"):
        file = tmp_path / "worker.py"
        file.write_text(script)
        monkeypatch.setattr(peers, "WORKER", file)
        return peers.Peer(name, path, **HOW)
    return start


def gone(pid):
    stat = Path(f"/proc/{pid}/stat")
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if stat.exists() and stat.read_text().rsplit(")")[-1].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


def test_protocol(fake):
    peer = fake(READY + """
    if r["batch"] > 1: print(json.dumps(dict(error="fake: batch 1 only")), flush=True)
    else: print(json.dumps(dict(ids=r["prompt"][:r["n_new"]], ttft_s=0.1, step_s=None)), flush=True)
""")
    assert peer.version == "fake 1" and peer.load_s == 0.5
    assert peer([7, 8], 1) == dict(ids=[7], ttft_s=0.1, step_s=None)
    with pytest.raises(RuntimeError, match="fake: batch 1 only"):
        peer([7, 8], 1, batch=2)
    assert peer([7, 8], 2)["ids"] == [7, 8]                # an error is not the end
    peer.close()
    peer.close()
    assert gone(peer.process.pid)
    with pytest.raises(RuntimeError, match="ended"):
        peer([7], 1)


def test_a_worker_that_dies(fake):
    peer = fake(READY + "    sys.exit('no more')\n")
    with pytest.raises(RuntimeError, match=r"llama.cpp ended \(1\): no more"):
        peer([7], 1)
    assert gone(peer.process.pid)
    with pytest.raises(ValueError, match=r"peer llama.cpp ended \(3\): broken"):
        fake("import sys; print('broken', file=sys.stderr); sys.exit(3)")


def test_what_a_worker_started_ends_with_it(fake):
    peer = fake(READY + """
    child = subprocess.Popen(["sleep", "60"])
    print(json.dumps(dict(ids=[child.pid])), flush=True)
    time.sleep(60)
""")
    child, = peer([7], 1)["ids"]
    peer.close()
    assert gone(peer.process.pid) and gone(child)


def test_what_is_missing_is_said(fake, tmp_path):
    source = (ROOT / "gpt_faster/bench/worker.py").read_text()
    with pytest.raises(ValueError, match="^peer llama.cpp: no llama-server: run scripts/install_peers.sh$"):
        fake(source)
    with pytest.raises(ValueError, match="^peer openvino: No module named 'openvino': run scripts/install_peers.sh$"):
        fake(source, "openvino")
    with pytest.raises(ValueError, match="^peer transformers: .*nowhere"):
        fake(source, "transformers", tmp_path / "nowhere")


FAKE_LLAMA_CPP = """#!{python}
import http.server, sys
if "--verbosity" in sys.argv:
    sys.exit("AVX2 = 1")
open("{arguments}", "w").write(" ".join(sys.argv[1:]))
address = "127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(address, Ready).serve_forever()
"""


@pytest.mark.parametrize("name, flags, words", [
    ("llama.cpp", None, "float16 KV cache"),
    ("llama.cpp@q8_0", "--cache-type-k q8_0 --cache-type-v q8_0 --flash-attn on", "q8_0 KV cache"),
    ("llama.cpp@q8_0/q4_0", "--cache-type-k q8_0 --cache-type-v q4_0 --flash-attn on", "q8_0 (keys) and q4_0 (values) KV cache"),
    ("ik_llama.cpp", None, "float16 KV cache"),
    ("ik_llama.cpp-repacked", "--run-time-repack", "float16 KV cache"),
])
def test_options_of_llama_cpp(fake, tmp_path, monkeypatch, name, flags, words):
    """By a server that only writes down its arguments, in an environment of its own."""
    home = tmp_path / "venv"
    monkeypatch.setattr(peers, "environment", lambda peer: home)
    (home / "bin").mkdir(parents=True)
    program = name.partition("@")[0].partition("-")[0]
    (home / f"built-{program}").write_text("a-package==1.2\ng++\n")
    (home / "bin/python").symlink_to(sys.executable)
    (home / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).resolve().parent}\n")
    server = home / "bin/llama-server"
    server.write_text(FAKE_LLAMA_CPP.format(python=sys.executable, arguments=tmp_path / "arguments"))
    server.chmod(0o755)
    peer = fake((ROOT / "gpt_faster/bench/worker.py").read_text(), name)
    assert peer.version.startswith(f"{program} of a-package==1.2 (AVX2)") and peer.version.endswith(f", {words}")
    arguments = (tmp_path / "arguments").read_text()
    assert flags in arguments if flags else "cache-type" not in arguments and "repack" not in arguments
    peer.close()
    with pytest.raises(ValueError, match="^peer 'llama.cpp@q9': expected one of f32"):
        peers.Peer("llama.cpp@q9", "model.gguf", **HOW)


def test_transformers(fake, families):
    directory, model = families("llama2")
    peer = fake((ROOT / "gpt_faster/bench/worker.py").read_text(), "transformers", directory)
    prompt, whole = list(range(10, 22)), torch.arange(10, 22)[None]
    for _ in range(8):
        whole = torch.cat([whole, model(whole).logits[:, -1:].argmax(-1)], dim=1)
    answer = peer(prompt, 8, batch=2)
    assert answer["ids"] == whole[0, 12:].tolist() and peer.version.startswith("transformers 5")
    assert answer["ttft_s"] > 0 and answer["step_s"] > 0 and answer["peak_memory_bytes"] > 1e7
    assert peer(prompt, 1)["step_s"] is None
    several = peer.serve([prompt[-3:], prompt, prompt[:5]], [4, 8, 2], 2)
    for ids, prompt_ids, n in zip(several["ids"], (prompt[-3:], prompt, prompt[:5]), (4, 8, 2)):
        assert ids == peer(prompt_ids, n)["ids"]           # padded on the left, it says the same
    assert several["total_s"] >= several["request_s"][0] == several["request_s"][1] > 0 < several["request_s"][2]
    with pytest.raises(RuntimeError, match="^transformers: "):
        peer([], 4)
    peer.process.stdin.close()
    assert peer.process.wait(20) == 0                      # it ends with its stdin


def source_of(families, name, tmp_path):
    path = write_gguf(families(name)[1], "llama", tmp_path / "source.gguf", vocabulary=["a", "b", "c"])
    return read_checkpoint(path)


@pytest.mark.parametrize("kind", ["BF16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("name", ["llama2", "mixtral"])
def test_twin_of_a_gguf(families, name, kind, tmp_path):
    source = source_of(families, name, tmp_path)
    path = exports.export_gguf(source, tmp_path / "made" / "twin.gguf", kind)
    (theirs, old), (mine, new) = read_gguf_tensors(source.path), read_gguf_tensors(path)
    assert mine.pop("general.file_type") and mine == theirs and not list(tmp_path.glob("made/*.partial"))
    for a, b in zip(old, new):
        a, b, plain = a.whole().float(), b.whole().float(), a.name
        if a.dim() == 1 or "gate_inp" in plain:
            assert torch.equal(a, b)
            continue
        blocks, error = a.reshape(-1, 32), (a - b).abs().reshape(-1, 32)
        eight = kind == "Q8_0" or plain.startswith(("token_embd", "output"))
        most = (blocks.abs() * 2**-8 if kind == "BF16" else
                blocks.abs().amax(1, keepdim=True) * (0.57 / 127 if eight else 1.01 / 8))   # the scale is float16
        assert (error <= most).all() and error.any(), plain
    assert source.cfg == read_checkpoint(path).cfg
    before = path.stat().st_mtime_ns
    assert exports.export_gguf(source, path, kind).stat().st_mtime_ns == before


def serves_as_one_by_one(peer):
    prompts, counts = [[300], list(range(300, 316)), [7, 8, 9], [5] * 20], [3, 9, 1, 4]
    several = peer.serve(prompts, counts, 2)
    assert several["ids"] == [peer(*request)["ids"] for request in zip(prompts, counts)]
    for first_s, request_s in zip(several["first_s"], several["request_s"]):
        assert 0 < first_s <= request_s <= several["total_s"]


# What llama.cpp cannot run of a tiny config: an MLP beside experts, a convolution without bias, other eps of some norms.
STATE_SPACES = {
    "granitemoehybrid-mamba": {}, "falcon_h1": {}, "falcon_h1-norm": dict(mamba_conv_bias=True), "nemotron_h": {},
    "nemotron_h-latent": dict(layers_block_type=["linear_attention", "moe", "full_attention", "linear_attention", "moe"]),
    "mamba": {}, "mamba2": {}, "falcon_mamba": dict(mixer_rms_eps=1e-5), "jamba": {}}


@pytest.mark.skipif(not HAS_LLAMA_CPP, reason="no .venv-peers: scripts/install_peers.sh")
@pytest.mark.parametrize("name", STATE_SPACES)
def test_llama_cpp_says_the_same_of_state_spaces(name, tmp_path):
    """A tiny GGUF as the converter writes it: greedy tokens of llama.cpp and of our reader."""
    path = write_gguf(variant(name, **STATE_SPACES[name]), ARCHITECTURES[name], tmp_path / "model.gguf", tokenizer_of=name)
    model, prompt = load_model(read_checkpoint(path), torch.float32, "cpu"), [11, 42, 7, 99, 3, 150, 77, 20, 5, 61]
    model.setup_cache(1, 64)
    peer = peers.Peer("llama.cpp", path, **dict(HOW, length=64))
    try:
        assert peer(prompt, 16)["ids"] == [t.item() for t in generated(model, [prompt], 16, GREEDY)]
    finally:
        peer.close()


@pytest.mark.skipif(not HAS_LLAMA_CPP, reason="no .venv-peers: scripts/install_peers.sh")
def test_llama_cpp_runs_a_random_twin(tmp_path):
    source = random_checkpoint("stories15M")
    path = exports.export_gguf(source, tmp_path / "twin.gguf", "Q8_0")
    back = read_checkpoint(path)
    assert replace(back.cfg, norm_eps=1e-5, rope=source.cfg.rope) == source.cfg
    assert {n: t.shape for n, t in back.tensors.items()} == {n: t.shape for n, t in source.tensors.items()}
    peer = peers.Peer("llama.cpp", path, weights="int8", **HOW)
    answer = peer(list(range(300, 316)), 9)
    assert len(answer["ids"]) == 9 and answer["ttft_s"] > 0 and answer["step_s"] > 0
    assert peer(list(range(300, 316)), 9)["ids"] == answer["ids"] and "Q8_0 weights" in peer.version
    assert peer([300], 1)["step_s"] is None and answer["peak_memory_bytes"] > 1e7
    serves_as_one_by_one(peer)
    other = peers.Peer("llama.cpp@bf16", path, weights="int8", **HOW)
    assert len(other([300] * 20, 9)["ids"]) == 9 and other.version.endswith("bf16 KV cache")
    other.close()
    with pytest.raises(ValueError, match="^peer llama.cpp@q8_0: .*block size 32 does not divide"):        # heads of 48
        peers.Peer("llama.cpp@q8_0", path, weights="int8", **HOW)
    for request, message in [(([300], 4, 2), "^llama.cpp: batch 1 only$"), (([300] * 250, 40), "^llama.cpp: ")]:
        with pytest.raises(RuntimeError, match=message):
            peer(*request)
    peer.close()
    assert gone(peer.process.pid)
    (tmp_path / "bad.gguf").write_text("bad")
    with pytest.raises(ValueError, match="^peer llama.cpp: .*magic"):
        peers.Peer("llama.cpp", tmp_path / "bad.gguf", **HOW)


@pytest.mark.parametrize("source, kind, message", [
    ("hf", "BF16", "needs a .gguf file or --random"), ("Qwen3-8B", "BF16", "--random supports only plain Llama, dense Qwen3.5, LFM2 or"),
    ("stories15M", "Q5_K", "unknown GGUF format Q5_K"),
])
def test_no_twin(families, source, kind, message, tmp_path):
    source = read_checkpoint(families("llama2")[0]) if source == "hf" else random_checkpoint(source)
    with pytest.raises(ValueError, match=f"^llama.cpp:? .*{message}"):
        exports.export_gguf(source, tmp_path / "twin.gguf", kind)
    assert not list(tmp_path.iterdir())


def test_a_random_shape_for_transformers(tmp_path, monkeypatch):
    """As many weights as ours, in its layers, and it answers."""
    import transformers as hf
    source = random_checkpoint("stories15M")
    path = exports.export_hf_config(source.cfg, tmp_path / "stories15M.json")
    model = hf.LlamaForCausalLM(hf.LlamaConfig.from_json_file(path))
    assert sum(p.numel() for p in model.parameters()) == count_parameters(source.cfg)
    assert model.config.head_dim == source.cfg.head_dim and model.config.rms_norm_eps == source.cfg.norm_eps
    (tmp_path / "worker.py").write_text(peers.WORKER.read_text())
    monkeypatch.setattr(peers, "WORKER", tmp_path / "worker.py")               # by our own Python
    peer = peers.Peer("transformers", path, **HOW)
    assert len(peer([1, 2, 3], 5)["ids"]) == 5
    peer.close()
    with pytest.raises(ValueError, match="^transformers: --random supports only plain Llama models"):
        exports.export_hf_config(random_checkpoint("Qwen3-8B").cfg, tmp_path / "qwen.json")


@pytest.mark.parametrize("random", [False, True], ids=["gguf", "random"])
def test_a_hugging_face_directory(families, random, tmp_path):
    """transformers reads it, and says what we say with the same weights."""
    import transformers as hf
    source = random_checkpoint("stories15M") if random else source_of(families, "llama2", tmp_path)
    path = exports.export_hf(source, tmp_path / "made" / "model.hf", torch.float32)
    back = read_checkpoint(path)
    assert replace(back.cfg, norm_eps=source.cfg.norm_eps, rope=source.cfg.rope) == source.cfg
    assert back.cfg.rope[0].theta == source.cfg.rope[0].theta and set(back.tensors) == set(source.tensors)
    if random:                                             # the same again
        other = read_checkpoint(exports.export_hf(source, tmp_path / "again.hf", torch.float32))
        assert all(torch.equal(t.whole(), other.tensors[name].whole()) for name, t in back.tensors.items())
    else:
        assert all(torch.equal(t.whole(), source.tensors[name].whole().float()) for name, t in back.tensors.items())
    model = load_model(back, torch.float32, "cpu")
    tokens = torch.arange(3, 12)[None]
    theirs = hf.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(tokens).logits
    torch.testing.assert_close(model(tokens, torch.arange(9), logits_to_keep=9), theirs, atol=1e-4, rtol=1e-4)
    assert hf.AutoTokenizer.from_pretrained(path).decode([5]) == "t5"
    before = path.stat().st_mtime_ns
    assert exports.export_hf(source, path, torch.float32).stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="^only plain Llama models can be exported as a Hugging Face directory$"):
        exports.export_hf(random_checkpoint("Qwen3-8B"), tmp_path / "qwen.hf", torch.bfloat16)
    assert not list(tmp_path.glob("**/*.partial"))


class FakeEngine(worker.StepEngine):
    """Says the prompt's length again and again: one token in a step, two where it is even."""

    def __init__(self, most):
        self.active, self.seen, self.most = {}, [], most

    def add(self, i, prompt, n_new):
        self.active[i] = [len(prompt), min(n_new, self.most)]
        self.seen.append(len(self.active))

    def step(self):
        new_ids = {}
        for i, (token, n) in list(self.active.items()):
            new_ids[i] = [token] * min(n, 2 - token % 2)
            self.active[i][1] -= len(new_ids[i])
            if not self.active[i][1]:
                del self.active[i]
        return new_ids

    def is_busy(self):
        return bool(self.active)


def test_an_engine_that_steps():
    engine = FakeEngine(9)
    answer = engine.serve([[1], [1] * 4, [1] * 3, [1] * 2, [1]], [3, 4, 1, 9, 2], 2)
    assert answer["ids"] == [[1] * 3, [4] * 4, [3], [2] * 9, [1] * 2] and max(engine.seen) == 2
    for first_s, request_s in zip(answer["first_s"], answer["request_s"]):
        assert 0 < first_s <= request_s <= answer["total_s"]
    answer = engine([1, 2, 3], 4, 5)
    assert answer["ids"] == [3] * 4 and answer["ttft_s"] > 0 and answer["step_s"] > 0 and engine.seen[-1] == 5
    assert engine([1], 1, 1)["step_s"] is None
    with pytest.raises(ValueError, match="fewer tokens than requested"):
        FakeEngine(3)([1], 5, 1)


def test_a_peer_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "WORKER", tmp_path / "gpt_faster/bench/worker.py")
    source = random_checkpoint("stories15M")
    weights = Weights("stories15M", source.cfg, 1, "int8", "int8", torch.bfloat16, None)
    for name in peers.CONVERTERS:
        with pytest.raises(ValueError, match=f"^{name} is not installed: run scripts/install_peers.sh$"):
            peers.peer_path(name, source, "stories15M", weights)
        with pytest.raises(ValueError, match=f"^{name}: no equivalent of fp8 weights$"):
            peers.peer_path(name, source, "stories15M", replace(weights, quantization="fp8"))


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["none", "int8", "int4-g32"])
@pytest.mark.parametrize("name", ["openvino", "onnxruntime", "vllm"])
def test_peers_that_convert(name, quantization, tmp_path, monkeypatch):
    """Our random weights, converted: plain ones say what transformers says."""
    if not (ROOT / f".venv-peers-{name}/installed").exists():
        pytest.skip(f"no .venv-peers-{name}: scripts/install_peers.sh")
    if name == "vllm" and quantization != "none":
        pytest.skip("plain weights only")
    monkeypatch.setattr(peers, "EXPORTS", tmp_path)
    source = random_checkpoint("stories15M")
    weights = Weights("stories15M", source.cfg, 1, "none", quantization, torch.float32, None)
    path = peers.peer_path(name, source, "stories15M", weights)
    assert peers.peer_path(name, source, "stories15M", weights) == path and not list(tmp_path.glob("*.partial*"))
    peer = peers.Peer(name, path, weights=quantization, **HOW)
    prompt = list(range(300, 316))
    answer = peer(prompt, 9)
    assert len(answer["ids"]) == 9 and answer["ttft_s"] > 0 and answer["step_s"] > 0
    assert peer(prompt, 1)["step_s"] is None and " KV cache" in peer.version
    assert peer(prompt, 9, batch=2)["ids"] == answer["ids"]
    if quantization == "none":
        model = load_model(read_checkpoint(tmp_path / "stories15M.float32.hf"), torch.float32, "cpu")
        tokens = torch.tensor([prompt])
        for _ in range(3):
            tokens = torch.cat([tokens, model(tokens, torch.arange(tokens.shape[1]))[:, -1:].argmax(-1)], dim=1)
        assert answer["ids"][:3] == tokens[0, 16:].tolist()
    if name == "onnxruntime":
        with pytest.raises(RuntimeError, match="^onnxruntime: takes one prompt at a time$"):
            peer.serve([prompt], [2], 1)
    else:
        serves_as_one_by_one(peer)
    peer.close()


def test_workers_need_no_package_of_ours():
    import ast
    tree = ast.parse((ROOT / "gpt_faster/bench/worker.py").read_text())
    tops = {n.name if isinstance(node, ast.Import) else node.module for node in tree.body
            if isinstance(node, (ast.Import, ast.ImportFrom)) for n in node.names}
    assert {t.split(".")[0] for t in tops} <= sys.stdlib_module_names


def test_a_twin_with_latent_attention(tmp_path):
    """A shape with random weights as llama.cpp's deepseek2: our reader finds the same math in it."""
    from checkpoint import Checkpoint
    from gpt_faster.formats.config import config_from_hf
    cfg = config_from_hf(dict(
        model_type="glm4_moe_lite", hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, vocab_size=300,
        kv_lora_rank=64, q_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=32, v_head_dim=64, n_routed_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=32, n_shared_experts=2, max_position_embeddings=128))[0]
    path = exports.export_gguf(Checkpoint(tmp_path / "shape", cfg, {}), tmp_path / "twin.gguf", "Q4_0")
    source = read_checkpoint(path)
    assert source.cfg.moe.routed_scale == pytest.approx(1.8) and source.cfg.norm_eps == pytest.approx(1e-5)      # fp32 there
    assert source.cfg == replace(cfg, norm_eps=source.cfg.norm_eps, moe=replace(cfg.moe, routed_scale=source.cfg.moe.routed_scale))


def test_a_twin_with_states(tmp_path):
    """A dense Qwen3.5 with random weights: our reader finds the same math, and tensors of the same shapes."""
    from checkpoint import Checkpoint, tensor_shapes
    from gpt_faster.formats.config import config_from_hf
    cfg = config_from_hf(dict(
        model_type="qwen3_5_text", hidden_size=64, intermediate_size=96, num_hidden_layers=8, num_attention_heads=4, vocab_size=300,
        num_key_value_heads=2, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32,
        linear_value_head_dim=32, max_position_embeddings=128, tie_word_embeddings=True, rope_theta=1e7))[0]
    path = exports.export_gguf(Checkpoint(tmp_path / "shape", cfg, {}), tmp_path / "twin.gguf", "Q4_0")
    source = read_checkpoint(path)
    assert replace(source.cfg, norm_eps=cfg.norm_eps) == cfg
    assert {name: tuple(t.shape) for name, t in source.tensors.items()} == {n: tuple(s) for n, s in tensor_shapes(cfg).items()}


@pytest.mark.parametrize("shape", [
    dict(model_type="lfm2", block_ff_dim=96, block_auto_adjust_ff_dim=False, full_attn_idxs=[1]),
    dict(model_type="gemma4_text", intermediate_size=96, head_dim=32, global_head_dim=64, sliding_window=16, num_kv_shared_layers=1,
         hidden_size_per_layer_input=32, vocab_size_per_layer_input=300, num_hidden_layers=4, final_logit_softcapping=30.0,
         use_double_wide_mlp=True, layer_types=["sliding_attention", "full_attention"] * 2)], ids=lambda shape: shape["model_type"])
def test_a_twin_of_a_new_kind(shape, tmp_path):
    """Random weights as llama.cpp's architecture: our reader finds the same math, and tensors of the same shapes."""
    from checkpoint import Checkpoint, tensor_shapes
    from gpt_faster.formats.config import config_from_hf
    cfg = config_from_hf(dict(dict(hidden_size=64, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, vocab_size=300,
                                   max_position_embeddings=128), **shape))[0]
    path = exports.export_gguf(Checkpoint(tmp_path / "shape", cfg, {}), tmp_path / "twin.gguf", "Q4_0")
    source = read_checkpoint(path)
    assert [layer for layer in source.cfg.mixer if layer] == [layer for layer in cfg.mixer if layer]
    found = {name: tuple(t.shape) for name, t in source.tensors.items()}
    assert found == {n: tuple(s) for n, s in tensor_shapes(cfg).items()}


MAMBA_SHAPES = {
    "granitehybrid": dict(
        model_type="granitemoehybrid", layer_types=["mamba", "attention", "mamba"], num_local_experts=4, num_experts_per_tok=2,
        intermediate_size=32, shared_intermediate_size=64, mamba_n_heads=4, mamba_d_state=16, mamba_n_groups=1, position_embedding_type="nope",
        residual_multiplier=0.5, tie_word_embeddings=True),
    "falcon-h1": dict(model_type="falcon_h1", intermediate_size=96, mamba_n_heads=4, mamba_d_ssm=128, mamba_d_head=32, mamba_d_state=16,
                      mamba_n_groups=1, head_dim=32),
    "nemotron_h": dict(model_type="nemotron_h", intermediate_size=96, hybrid_override_pattern="M-MM*-", num_hidden_layers=6, mamba_num_heads=4,
                       mamba_head_dim=32, ssm_state_size=16, n_groups=2, head_dim=32)}


def mamba_twin(shape, path):
    from checkpoint import Checkpoint
    from gpt_faster.formats.config import config_from_hf
    cfg = config_from_hf(dict(dict(hidden_size=64, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, vocab_size=300,
                                   max_position_embeddings=128), **shape))[0]
    return cfg, exports.export_gguf(Checkpoint(path / "shape", cfg, {}), path / "twin.gguf", "Q8_0")


@pytest.mark.parametrize("architecture", MAMBA_SHAPES)
def test_a_twin_with_mamba(architecture, tmp_path):
    """Its tensors are those of the model, as our reader finds them."""
    pytest.importorskip("gpt_faster.formats.gguf_mamba")
    from checkpoint import tensor_shapes
    cfg, path = mamba_twin(MAMBA_SHAPES[architecture], tmp_path)
    source = read_checkpoint(path)
    assert [layer and getattr(layer, "mamba", layer).n_rows() for layer in source.cfg.mixer] == [
        layer and getattr(layer, "mamba", layer).n_rows() for layer in cfg.mixer]
    found = {name: tuple(t.shape) for name, t in source.tensors.items()}
    assert found == {n: tuple(s) for n, s in tensor_shapes(cfg).items()}


@pytest.mark.skipif(not HAS_LLAMA_CPP, reason="no .venv-peers: scripts/install_peers.sh")
@pytest.mark.parametrize("architecture", MAMBA_SHAPES)
def test_llama_cpp_runs_a_twin_with_mamba(architecture, tmp_path):
    _, path = mamba_twin(MAMBA_SHAPES[architecture], tmp_path)
    peer = peers.Peer("llama.cpp", path, weights="int8", **HOW)
    assert len(peer(list(range(280, 296)), 9)["ids"]) == 9
    peer.close()
