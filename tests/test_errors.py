"""Bad input through the command line: one line on stderr, exit status 2, no traceback."""

import json
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
import tiny
import torch
from commands import PYTHON
from conftest import SMOLLM2

from checkpoint import save_checkpoint
from gpt_faster import devices
from gpt_faster.cli import session
from gpt_faster.formats import hub
from gpt_faster.formats.gguf_file import read_gguf_header
from gpt_faster.formats.known_shapes import SHAPES
from gpt_faster.formats.load import load_model, read_checkpoint

ROOT = Path(__file__).resolve().parent.parent


def run(capsys, *argv):
    """-> exit status, stdout, stderr of generate.py in this process."""
    try:
        status = session.main([str(a) for a in argv])
    except SystemExit as e:
        status = e.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def refused(capsys, *argv):
    """-> the one line that says why."""
    status, out, err = run(capsys, *argv)
    lines = err.strip().splitlines()
    assert status == 2 and out == "" and len(lines) == 1, (status, out, err)
    assert "error: " in lines[0] and "Traceback" not in err
    return lines[0].split("error: ", 1)[1]


@pytest.fixture
def llama(families, tmp_path):
    """A copy of a tiny Llama to damage, with a tokenizer."""
    directory = tmp_path / "llama"
    shutil.copytree(families("llama2")[0], directory)
    from tokenizers import Tokenizer, models
    words = {"a": 0, "b": 1, **{f"w{i}": i for i in range(2, 160)}}    # as many as the model's
    Tokenizer(models.WordLevel(words, unk_token="b")).save(str(directory / "tokenizer.json"))
    return directory


def edit(path, **changes):
    content = json.loads(path.read_text())
    content.update(changes)
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))


def split_gguf(whole, directory):
    """Cut a GGUF in two, as llama.cpp's gguf-split does."""
    data = whole.read_bytes()
    metadata, infos, start = read_gguf_header(memoryview(data))
    version, n_tensors, n_keys = struct.unpack_from("<IQQ", data, 4)
    first_info = data.index(struct.pack("<Q", len(infos[0][0])) + infos[0][0].encode())
    keys = data[24:first_info]
    key = b"split.count"
    keys += struct.pack("<Q", len(key)) + key + struct.pack("<IH", 2, 2)
    paths = []
    for i, some in enumerate((infos[:5], infos[5:])):
        head = b"GGUF" + struct.pack("<IQQ", version, len(some), n_keys + 1) + keys
        for name, shape, kind, offset in some:
            head += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(shape))
            head += struct.pack(f"<{len(shape)}Q", *shape[::-1]) + struct.pack("<IQ", kind, offset)
        head += b"\0" * (-len(head) % 32)
        paths.append(directory / f"part-{i + 1:05d}-of-00002.gguf")
        paths[-1].write_bytes(head + data[start:])
    return paths


# ---- Paths and files -----------------------------------------------------------------------------

def test_missing_path_names_both_readings(capsys):
    assert "no such file or directory (nor is it a hub name" in refused(capsys, "-m", "/nowhere/model.pth")
    message = refused(capsys, "-m", "nowhere/model")
    assert "no such file or directory; as a hub name: nowhere/model is not in the local cache" in message


def test_no_default_model_says_what_to_run(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "DEFAULT_MODEL", tmp_path / "none.gguf")
    assert "bash scripts/quickstart.sh" in refused(capsys, "--prompt", "Hi")


def test_empty_directory_and_unknown_file(capsys, tmp_path):
    assert "no model found" in refused(capsys, "-m", tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    assert "found notes.txt" in refused(capsys, "-m", tmp_path)
    assert "expected a directory, .safetensors, .pth" in refused(capsys, "-m", tmp_path / "notes.txt")


@pytest.mark.parametrize("keep", [0, 5, 1000, -1000])
def test_truncated_safetensors(capsys, llama, keep):
    path = llama / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert "model.safetensors: not a readable safetensors file" in refused(capsys, "-m", llama)


@pytest.mark.parametrize("keep", [0, 3, 20, 3000, 2_000_000, -5000])
def test_truncated_gguf(capsys, tmp_path, keep):
    path = tmp_path / "model.gguf"
    path.write_bytes(SMOLLM2.read_bytes()[:keep])
    assert "model.gguf: " in (message := refused(capsys, "-m", path))
    assert "not a readable GGUF" in message or "truncated: " in message


def test_gguf_damaged_header(capsys, tmp_path):
    path, data = tmp_path / "model.gguf", bytearray(SMOLLM2.read_bytes()[:2_000_000])
    path.write_bytes(b"XXXX" + data[4:])
    assert "invalid magic b'XXXX', expected b'GGUF'" in refused(capsys, "-m", path)
    path.write_bytes(data[:4] + struct.pack("<I", 9) + data[8:])
    assert "GGUF version 9 is not supported" in refused(capsys, "-m", path)
    g = torch.Generator().manual_seed(0)
    for at in torch.randint(8, 3000, (40,), generator=g).tolist():     # any byte of the header
        damaged = data.copy()
        damaged[at] ^= 0xff
        path.write_bytes(damaged)
        refused(capsys, "-m", path)


@pytest.mark.parametrize("keep", [0, 100, -500])
def test_truncated_pth(capsys, llama, keep):
    save_checkpoint(read_checkpoint(llama), llama / "model.pth", None)
    path = llama / "model.pth"
    path.write_bytes(path.read_bytes()[:keep])
    assert "model.pth: not a readable PyTorch file" in refused(capsys, "-m", path)


def test_pth_without_config(capsys, tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pth")
    assert "no config inside" in refused(capsys, "-m", tmp_path / "model.pth")
    torch.save([1], tmp_path / "model.pth")
    assert "expected a dictionary of tensors, found list" in refused(capsys, "-m", tmp_path / "model.pth")


def test_config_json(capsys, llama):
    config = llama / "config.json"
    whole = config.read_text()
    config.write_text(whole[:50])
    assert "config.json: not valid JSON" in refused(capsys, "-m", llama)
    config.write_text("[1]")
    assert "expected a JSON object" in refused(capsys, "-m", llama)
    for key in ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size"):
        config.write_text(whole)
        edit(config, **{key: ...})
        assert f"config.json has no '{key}'" in refused(capsys, "-m", llama)
    config.write_text(whole)
    for changes, message in ((dict(hidden_size="many"), "'hidden_size' is 'many', expected a positive integer"),
                             (dict(num_hidden_layers=-1), "'num_hidden_layers' is -1"),
                             (dict(num_key_value_heads=3), "4 attention heads cannot share 3 key/value heads"),
                             (dict(rms_norm_eps=[]), "config.json: "), (dict(rope_parameters=3), "config.json: "),
                             (dict(rope_parameters=[1]), "config.json: "), (dict(quantization_config="x"), "config.json: "),
                             (dict(layer_types=["x"] * 4), "'layer_types' is not 4 times one of full_attention"),
                             (dict(layer_types=["full_attention"]), "'layer_types' is not 4 times")):
        config.write_text(whole)
        edit(config, **changes)
        assert message in refused(capsys, "-m", llama)
    config.unlink()
    assert "config.json" in refused(capsys, "-m", llama)


def logits_of_three(directory):
    """[1, 3, V] of three tokens, by our model. ValueError: refused."""
    model = load_model(read_checkpoint(directory), torch.float32, "cpu")
    model.setup_cache(1, 8)
    return model(torch.tensor([[1, 2, 3]]), torch.arange(3), 3)


# Where transformers reads the same nonsense as something else: a factor of YaRN that is absent or 0, and a key of
# Granite in a model that is none, which its class ignores and ours acts on.
OTHERWISE = {("rope_parameters", "{}"), ("factor", "0"), ("logits_scaling", "1.5"), ("logits_scaling", "1000000"), ("logits_scaling", "-1")}


@pytest.mark.parametrize("name", ["gpt_oss", "qwen2_moe", "phi3-longrope", "gpt2"])
def test_nonsense_in_config_json(families, name, tmp_path):
    """Any value of any key, a wrong one too: a ValueError, or finite logits. 1,000 and more of them.

    Where they are others than without it, transformers has the same, if it takes such a config at all.
    """
    import transformers
    shutil.copytree(families(name)[0], tmp_path / name)
    config = tmp_path / name / "config.json"
    whole = json.loads(config.read_text())
    usual, n_compared = logits_of_three(config.parent), 0
    inner = [(k, key) for k, v in whole.items() if isinstance(v, dict) for key in v]
    for where in [*((key,) for key in whole), *inner, ("logits_scaling",), ("layer_types",), ("sliding_window",)]:
        for value in (None, "x", -1, 0, [], {}, 1.5, [1], 10**6):
            wrong = json.loads(json.dumps(whole))
            target = wrong if len(where) == 1 else wrong[where[0]]
            target[where[-1]] = value
            config.write_text(json.dumps(wrong))
            try:
                found = logits_of_three(config.parent)
            except ValueError:
                continue
            assert found.isfinite().all(), (where, value)
            if torch.equal(found, usual) or (where[-1], str(value)) in OTHERWISE:
                continue
            try:
                theirs = transformers.AutoModelForCausalLM.from_pretrained(config.parent, dtype=torch.float32).eval()
                expected = tiny.logits(theirs, torch.tensor([[1, 2, 3]]))
            except Exception:                              # whatever they refuse it with
                continue
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3, msg=lambda text, at=(where, value): f"{at}: {text}")
            n_compared += 1
    assert n_compared > 0


def test_unsupported_features_are_named(capsys, llama):
    config = llama / "config.json"
    whole = config.read_text()
    for change, message in (
            (dict(model_type="nonsense"), "model_type 'nonsense' is not supported (supported: "),
            (dict(model_type="zamba"), "'zamba' is not supported: it has Mamba 1 layers that read a shared transformer block"),
            (dict(model_type="rwkv"), "'rwkv' is not supported: it has another kind of recurrent layers than Mamba"),
            (dict(model_type="kimi_linear"), "it has linear attention other than gated DeltaNet and Mamba"),
            (dict(model_type="gemma3n_text"), "it has several residual streams (AltUp) and sparse activations"),
            (dict(model_type="llama4_text"), "it has chunked attention, and experts with scaled inputs"), (dict(model_type="deepseek_v32"), "sparse latent attention (an indexer)"),
            (dict(model_type="lfm3"), "it has another kind of convolution layers"), (dict(model_type="t5"), "an encoder and a decoder"),
            (dict(model_type=...), "model_type 'None'"),
            (dict(hidden_act="relu"), "activation 'relu'"), (dict(clip_qkv=8.0), "'clip_qkv' is not supported"),
            (dict(rope_parameters=dict(rope_type="proportional", rope_theta=1e4)), "RoPE scaling 'proportional'"),
            (dict(rope_parameters=dict(rope_type="longrope", short_factor=[1.0], long_factor=[2.0] * 8)),
             "'short_factor' has 1 and 'long_factor' 8 entries, expected 8 each"),
            (dict(model_type="mixtral", num_local_experts=2, num_experts_per_tok=3), "3 active of 2 experts"),
            (dict(model_type="gpt_oss", swiglu_limit=9.0), "only 'swiglu_limit' 7 and 'swiglu_alpha' 1.702 are supported")):
        config.write_text(whole)
        edit(config, **change)
        assert message in refused(capsys, "-m", llama)


def test_shapes_that_contradict_the_config(capsys, llama):
    edit(llama / "config.json", intermediate_size=100)
    assert "mlp.gate_proj.weight is [96, 64], but the config asks for [100, 64]" in refused(capsys, "-m", llama)


def test_missing_and_unknown_tensors(capsys, llama):
    edit(llama / "config.json", num_hidden_layers=5)
    assert "9 tensors are missing: layers.4.attn" in refused(capsys, "-m", llama)
    edit(llama / "config.json", num_hidden_layers=3)
    message = refused(capsys, "-m", llama)
    assert "9 unexpected tensors: model.layers.3." in message
    edit(llama / "config.json", num_hidden_layers=4)
    from safetensors.torch import load_file, save_file
    state = load_file(llama / "model.safetensors")
    state["model.layers.0.mamba.A"] = torch.ones(1)
    save_file(state, llama / "model.safetensors")
    assert "1 tensors that this architecture does not have: model.layers.0.mamba.A" in refused(capsys, "-m", llama)


def test_missing_expert(capsys, families, tmp_path):
    from safetensors.torch import load_file, save_file
    shutil.copytree(families("mixtral")[0], tmp_path / "mixtral")
    path = tmp_path / "mixtral/model.safetensors"
    whole = load_file(path)
    name = "model.layers.2.block_sparse_moe.experts.1.w3.weight"
    save_file({k: v for k, v in whole.items() if k != name}, path)
    assert "layers.2.ffn.up.weight: 3 experts, numbered up to 3" in refused(capsys, "-m", path.parent)
    save_file({**whole, name: whole[name][:-1].clone()}, path)
    assert f"{name} is [95, 64], unlike the others' [96, 64]" in refused(capsys, "-m", path.parent)


def test_missing_shard(capsys, families, tmp_path):
    families("llama3")[1].save_pretrained(tmp_path, max_shard_size="100KB")
    next(tmp_path.glob("*.safetensors")).unlink()
    assert "listed in model.safetensors.index.json but missing" in refused(capsys, "-m", tmp_path)


def test_missing_tokenizer(capsys, llama):
    (llama / "tokenizer.json").unlink()
    assert "no tokenizer: expected tokenizer.json or tokenizer.model" in refused(capsys, "-m", llama)


def test_tokenizer_of_another_model(capsys, llama):
    from tokenizers import Tokenizer, models
    words = {"a": 500, **{f"w{i}": i for i in range(159)}}
    Tokenizer(models.WordLevel(words, unk_token="a")).save(str(llama / "tokenizer.json"))
    message = refused(capsys, "-m", llama, "--prompt", "a")
    assert "token id 500 is out of range: the model has 160 tokens" in message


# ---- Arguments -----------------------------------------------------------------------------------

@pytest.mark.parametrize("argv, message", [
    (["--prompt", ""], "the prompt is empty"),
    (["--prompt", "0"], "a synthetic prompt needs at least 1 token"),
    (["--prompt=-3"], "a synthetic prompt needs at least 1 token"),
    (["--prompt", "200"], "the prompt has 200 tokens and the model's context is 128"),
    (["--prompt", "128"], "the prompt has 128 tokens and the model's context is 128"),
    (["--prompt", "20", "--max_seq_length", "20"], "the prompt has 20 tokens and --max_seq_length is 20"),
    (["--max_seq_length", "500"], "--max_seq_length 500 exceeds the model's context of 128"),
    (["--max_new_tokens", "0"], "must be at least 1, got 0"),
    (["--max_new_tokens", "-5"], "must be at least 1, got -5"),
    (["--max_new_tokens", "many"], "expected an integer, got 'many'"),
    (["--num_samples", "0"], "must be at least 1"),
    (["--batch_size", "0"], "must be at least 1"),
    (["--temperature", "-1"], "must be at least 0"),
    (["--temperature", "hot"], "expected a number, got 'hot'"),
    (["--temperature", "nan"], "must be at least 0"),
    (["--top_k", "-1"], "must be at least 0"),
    (["--top_p", "0"], "must be above 0, at most 1"),
    (["--top_p", "1.5"], "must be above 0, at most 1"),
    (["--min_p", "2"], "must be at least 0, at most 1"),
    (["--repetition_penalty", "0"], "must be at least 0.001, at most 1000, got 0"),
    (["--temperature", "1e308"], "must be at least 0, at most 1000000.0, got 1e308"),
    (["--top_k", "1" + "0" * 30], "at most 1073741824"), (["--seed", "1" + "0" * 30], "at most 9223372036854775807"),
    (["--stop", ""], "--stop must not be empty"),
    (["--device", "abacus"], "device 'abacus' not found; available: "),
    (["--device", "cpu:7"], "device 'cpu:7' not found"),
    (["--dtype", "int4"], "invalid choice: 'int4'"),
    (["--activation_bits", "4"], "invalid choice: 4 (choose from 8, 16)"),
    (["--engine", "steam"], "invalid choice: 'steam'"),
    (["--engine", "recompute", "--compile"], "--engine recompute contradicts --compile"),
    (["--random", "Llama-9"], "no such shape (known: stories15M"),
    (["--random", ""], "no such shape (known: stories15M"),
    (["--random", "stories15M", "-m", "x.pth", "--prompt", "4"], "--random and --checkpoint_path exclude each other"),
    (["--random", "stories15M"], "this model has no tokenizer: give --prompt an integer"),
    (["--frobnicate"], "unrecognized arguments"),
    (["--profile", "/nowhere/trace"], "expected a file in an existing directory"),
    (["-m", " "], "the path or hub name is empty: an unset variable?"),
    (["--interactive", "--json"], "--interactive cannot be combined with --json"),
    (["--interactive", "--batch_size", "2"], "--interactive requires --batch_size 1"),
], ids=" ".join)
def test_arguments(capsys, llama, argv, message):
    assert message in refused(capsys, *(["-m", llama] if "--random" not in argv else []), *argv)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpu(capsys, llama):
    assert "device 'cuda' not found; available: cpu" in refused(capsys, "-m", llama, "--device", "cuda")
    message = refused(capsys, "-m", llama, "--engine", "cuda_graph", "--device", "cpu")
    assert "needs an NVIDIA GPU" in message


def test_dtype_that_the_device_lacks(capsys, llama, monkeypatch):
    """A GPU from before bfloat16, as torch would describe it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    message = refused(capsys, "-m", llama, "--device", "cuda", "--dtype", "bfloat16")
    assert message == "Tesla T4 does not support bfloat16: use --dtype float16 or float32"
    plain, gemma = (SHAPES[name]() for name in ("Llama-2-7B", "gemma-3-270m"))
    assert devices.pick_dtype("auto", torch.device("cuda"), plain) == torch.float16
    assert devices.pick_dtype("auto", torch.device("cuda"), gemma) == torch.float32


def test_dtype_that_the_model_does_not_bear(capsys):
    message = refused(capsys, "--random", "gemma-3-270m", "--prompt", "4", "--dtype", "float16")
    assert "exceed float16's range: use --dtype bfloat16 or float32" in message


def test_no_compiler_runs_eager(capsys, llama, monkeypatch):
    monkeypatch.setattr(devices.shutil, "which", lambda name: None)
    status, out, err = run(capsys, "-m", llama, "--compile", "--prompt", "9", "--max_new_tokens", "3", "--json")
    assert status == 0 and "needs a C++ compiler" in err and json.loads(out)["engine"] == "kv_cache"


def test_values_of_generation_config_that_make_no_sense(capsys, llama):
    values = dict(do_sample=True, temperature=-1.0, top_k=-1, top_p=0.9, repetition_penalty=0, min_p="x")
    (llama / "generation_config.json").write_text(json.dumps(values))
    status, out, err = run(capsys, "-m", llama, "--prompt", "4", "--max_new_tokens", "2")
    assert status == 0 and "generation_config.json: min_p, repetition_penalty, temperature, top_k" in err
    (llama / "generation_config.json").write_text(json.dumps(dict(do_sample=True, top_k=50.0, top_p=None)))
    assert read_checkpoint(llama).defaults == dict(top_k=50)


def test_prompt_that_is_not_utf8(capsys, llama):
    status, out, err = run(capsys, "-m", llama, "--prompt", "a \udcff", "--max_new_tokens", "2", "--json")
    assert status == 0 and json.loads(out)["prompt_ids"]


def test_disk_full_leaves_nothing(llama, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(read_checkpoint(llama), tmp_path / "model.pth", None)
    assert not list(tmp_path.glob("model.pth*"))


@pytest.mark.parametrize("script", sorted(str(p.relative_to(ROOT / "scripts")) for p in (ROOT / "scripts").glob("**/*.py")))
def test_every_script_answers_help(script):
    """And does nothing else: some of them run for an hour."""
    done = subprocess.run([*PYTHON, ROOT / "scripts" / script, "--help"], capture_output=True, text=True,
                          timeout=60)
    assert done.returncode == 0 and Path(script).name in done.stdout and not done.stderr
