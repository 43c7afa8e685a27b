"""Several ranks say what one says: tensor parallelism over gloo, on this machine."""

import functools
import itertools
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import test_dflash
import test_eagle3
import tiny
import torch
import transformers as hf
from commands import PYTHON
from conftest import SMOLLM2
from tokenizers import Tokenizer, models

import tp
from checkpoint import LazyTensor, blank_model, narrow, read_safetensors, save_checkpoint
from gpt_faster.cli import session
from gpt_faster.formats.known_shapes import SHAPES
from gpt_faster.formats.load import load_model, read_checkpoint
from gpt_faster.formats.quantize_on_load import quantized

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
WIDE = dict(tiny.SIZE, hidden_size=128, intermediate_size=256, num_attention_heads=4, head_dim=32)


def torchrun(*argv, ranks=2, how=("--standalone",), **more):
    env = dict(os.environ, OMP_NUM_THREADS="1", TORCHDYNAMO_VERBOSE="0", **more.pop("env", {}))
    command = [*TORCHRUN, *how, f"--nproc_per_node={ranks}", *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=600, **more)


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def on_ranks(folder, *argv, ranks=2, input=""):
    """A command on several ranks, without torchrun: what it starts them with, it tells them by the environment.

    -> the statuses, stdout and stderr of each.
    """
    env = dict(os.environ, OMP_NUM_THREADS="1", WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="localhost", MASTER_PORT=str(free_port()))
    (folder / "stdin").write_text(input)
    processes = []
    for i in range(ranks):
        with open(folder / "stdin") as stdin, open(folder / f"out-{i}", "w") as out, open(folder / f"err-{i}", "w") as err:
            processes.append(subprocess.Popen([*PYTHON, *map(str, argv)], env=dict(env, RANK=str(i), LOCAL_RANK=str(i)), cwd=ROOT,
                                              stdin=stdin, stdout=out, stderr=err))
    try:
        statuses = [process.wait(600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return statuses, *([(folder / f"{name}-{i}").read_text() for i in range(ranks)] for name in ("out", "err"))


def passed(folder, *checks, ranks):
    """All of ranks.py's checks."""
    statuses, out, err = on_ranks(folder, "tests/ranks.py", *checks, ranks=ranks)
    assert statuses == [0] * ranks, out + err
    assert f"{len(checks)} checks on {ranks} ranks, 0 failed" in out[0], out


def with_drafters(source, directory):
    """A model of width 64 beside drafters: with an embedding and an output layer of their own, and with the model's."""
    shutil.copytree(source, directory)
    eagle = dict(test_eagle3.SIZES, hidden_size=64, draft_vocab_size=None)
    test_eagle3.write(directory / "drafter-eagle3", test_eagle3.tensors_of(), test_eagle3.SIZES)
    test_eagle3.write(directory / "drafter-eagle3-shares", test_eagle3.tensors_of(dim=64, own_embed=False, own_head=False, vocab=160), eagle)
    test_dflash.write(directory / "drafter-dflash", test_dflash.QWEN, test_dflash.tensors())
    return directory


@pytest.fixture(scope="session")
def checkpoint(families, heads, tmp_path_factory):
    """name -> a family's directory; or of one with a head that drafts, or whose rows have enough groups of int4 weights for four ranks."""
    wide = {"for-int4-llama": lambda: hf.LlamaConfig(**WIDE), "for-int4-mixtral": lambda: hf.MixtralConfig(
        **dict(WIDE, intermediate_size=128), num_local_experts=4, num_experts_per_tok=2)}

    @functools.cache
    def get(name):
        if name in tiny.FAMILIES:
            return families(name)[0]
        if name == "for-mtp":
            return heads("glm4_moe")[0]
        if name == "for-drafters":
            return with_drafters(families("llama-linear")[0], tmp_path_factory.mktemp(name) / "model")
        path = tmp_path_factory.mktemp(name)
        torch.manual_seed(0)
        hf.AutoModelForCausalLM.from_config(wide[name]()).save_pretrained(path)
        return path
    return get


N_TOGETHER = 8
WHOLE = {name: "Mamba 1 layer" for name in ("mamba", "mamba-biased", "falcon_mamba", "jamba", "jamba-dense")}      # not split
WHOLE |= {name: "shared transformer block" for name in ("zamba2", "zamba2-one_block", "zamba2-untied")}
SPLIT = [name for name in tiny.FAMILIES if name not in WHOLE]
TOGETHER = [SPLIT[i:i + N_TOGETHER] for i in range(0, len(SPLIT), N_TOGETHER)]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("names", TOGETHER, ids=lambda names: f"{names[0]}-{names[-1]}")
def test_every_family(checkpoint, tmp_path, names, ranks):
    passed(tmp_path, *(f"family:{checkpoint(name)}" for name in names), ranks=ranks)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("check, name", [
    ("quantized", "for-int4-llama"), ("quantized", "for-int4-mixtral"), ("sampling", "for-int4-llama"), ("agreement", "for-int4-llama"),
    ("guessing", "for-int4-llama"), ("measuring", "for-int4-llama"), ("mtp", "for-mtp"),
    ("drafters", "for-drafters"),
    ("kv_cache", "for-int4-llama")])
def test_all_else(checkpoint, tmp_path, check, name, ranks):
    passed(tmp_path, f"{check}:{checkpoint(name)}", ranks=ranks)


@pytest.mark.parametrize("name", ["olmo2", "for-int4-mixtral", "bamba", "granitemoehybrid-mamba", "falcon_h1-norm"])
def test_compiled(checkpoint, tmp_path, name):
    passed(tmp_path, f"compiled:{checkpoint(name)}", ranks=2)


def parts_of(source, n):
    return [tp.shard(source, n, me).tensors for me in range(n)]


SUMMED = ("attn.wo.bias", "ffn.down.bias", "ffn.shared.down.bias")         # of linears that are cut by input


def put_together(key, t, parts):
    """What the ranks make of their parts of a tensor: they add up, stand side by side, or are the same on each."""
    pieces = [part.whole() for part in parts]
    if key.endswith(SUMMED):
        return sum(pieces)
    axis = next((i for i, (a, b) in enumerate(zip(t.shape, pieces[0].shape)) if a != b), None)
    if axis is None:
        assert all(torch.equal(piece, pieces[0]) for piece in pieces), key
        return pieces[0]
    distinct = pieces[::len(pieces) * pieces[0].shape[axis] // t.shape[axis]]
    return torch.cat(distinct, dim=axis)


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_not_split_is_refused(checkpoint, name):
    with pytest.raises(ValueError, match=f"{WHOLE[name]}, which is not split, of 1.* cannot be split across 2 ranks; possible: only 1"):
        tp.shard(read_checkpoint(checkpoint(name)), 2, 0)


@pytest.mark.parametrize("name", [*SPLIT, "for-int4-llama", "for-int4-mixtral"])
def test_parts_make_up_the_whole(checkpoint, name):
    """As they are, in int8 and int4: a rank's numbers and scales are those that the whole model has."""
    original = read_checkpoint(checkpoint(name))
    sources = [original, quantized(original, "int8")]
    if "int4" in name:
        sources += [quantized(original, "int4", 32, head) for head in ("int8", "int4")]
    for source, n in itertools.product(sources, (2, 4)):
        parts = parts_of(source, n)
        for key, t in source.tensors.items():
            mine = [part[key] for part in parts]
            assert all(len(m.whole()) == m.shape[0] and m.whole().shape == m.shape for m in mine)
            assert torch.equal(put_together(key, t, mine), t.whole()), (key, n)
        total = sum(math.prod(part[k].shape) for part in parts for k in part)
        assert total < n * sum(math.prod(t.shape) for t in source.tensors.values())
        model = blank_model(tp.shard_config(source.cfg, n), torch.float32)
        shapes = {k: p.shape for k, p in model.named_parameters() if k != "per_layer.embed.weight"}      # a table that stays in its file
        assert source is not original or shapes == {
            k: p.shape for k, p in load_model(tp.shard(source, n, 1), torch.float32, "cpu").named_parameters()}


def test_the_same_numbers_from_a_file(checkpoint, tmp_path):
    """Quantized while loading, or before, into a file: a rank reads the same bits."""
    for name, mode in itertools.product(("for-int4-llama", "for-int4-mixtral"), ("int8", "int4")):
        source = quantized(read_checkpoint(checkpoint(name)), mode)
        save_checkpoint(source, tmp_path / "model.pth", None)
        saved = read_checkpoint(tmp_path / "model.pth")
        for n, me in ((2, 1), (4, 2)):
            loaded, read = tp.shard(source, n, me).tensors, tp.shard(saved, n, me).tensors
            assert loaded.keys() == read.keys()
            assert all(torch.equal(loaded[k].whole(), read[k].whole()) for k in read)


@pytest.mark.parametrize("shape, axis", [((12,), 0), ((12, 8), 0), ((12, 8), 1), ((3, 12), 1), ((3, 12, 8), 1), ((3, 12, 8), 2)])
def test_narrow(shape, axis):
    whole = torch.arange(math.prod(shape)).view(shape).float()
    rows = whole.flatten(0, 1) if whole.dim() > 2 else whole
    asked = []

    def read(a, b):
        asked.append((a, b))
        return rows[a:b]
    part = narrow(LazyTensor("x", shape, torch.float32, read), axis, 3, 7)
    wanted = whole.narrow(axis, 3, 4)
    assert part.shape == wanted.shape and torch.equal(part.whole(), wanted)
    assert torch.equal(torch.cat([r for *_, r in part.chunks()]).view(wanted.shape), wanted)
    n_read = sum(b - a for a, b in asked) / 2              # by whole() and by chunks()
    outputs = axis == (1 if len(shape) > 2 else 0)
    assert n_read == len(rows) * 4 / shape[axis] if outputs else n_read == len(rows)


def test_a_part_is_a_view_of_the_file(checkpoint):
    """What a rank does not hold it does not read from safetensors: nothing is copied before the part is."""
    path = next(checkpoint("llama2").glob("*.safetensors"))
    for t in read_safetensors(path):
        if len(t.shape) == 2:
            for axis in (0, 1):
                rows = narrow(t, axis, 0, 8).read_rows(0, 4)
                assert rows.untyped_storage().nbytes() >= math.prod(t.shape) * 4, t.name


def test_what_cannot_be_shared():
    cfg = SHAPES["SmolLM2-135M"]()
    with pytest.raises(ValueError, match="9 query heads, 3 key/value heads and a feed-forward "
                                         "width of 1536 cannot be split across 2 ranks; possible: 3$"):
        tp.shard_config(cfg, 2)
    cut = tp.shard_config(cfg, 3)
    assert (cut.n_head, cut.n_kv_head, cut.ffn_dim, cut.vocab_size) == (3, 1, 512, 49152 // 3)
    with pytest.raises(ValueError, match="possible: 2, 4, 8, 16, 32, 64"):
        tp.shard_config(SHAPES["Llama-2-70B"](), 3)
    assert tp.shard_config(SHAPES["Llama-2-70B"](), 16).n_kv_head == 1     # two ranks hold each
    assert tp.shard_config(SHAPES["gpt2"](), 2).vocab_size == 50257        # odd: every rank has all
    with pytest.raises(ValueError, match="possible: only 1"):
        tp.shard_config(SHAPES["gpt2-xl"]().__class__(64, 1, 7, 7, 8, 33, 32, 32), 2)


def test_groups_that_would_be_cut(checkpoint):
    source = quantized(read_checkpoint(checkpoint("llama2")), "int4", 32)      # 96 wide: three groups
    with pytest.raises(ValueError, match="ffn.down.*its 3 quantization groups cannot be split across 2 ranks.*smaller --groupsize"):
        tp.shard(source, 2, 0)


GREEDY = ["--temperature", "0", "--dtype", "float32"]


def alone(capsys, *argv):
    assert session.main([*map(str, argv)]) == 0
    return capsys.readouterr().out


def errors(text):
    return [line for line in text.splitlines() if "error:" in line and "Child" not in line]


def test_smollm2_on_three_ranks(capsys):
    """A prompt, compiled; by torchrun."""
    once = ["generate.py", "-m", SMOLLM2, *GREEDY, "--max_new_tokens", 24, "--prompt", "The moon is"]
    expected = alone(capsys, *once[1:])
    done = torchrun(*once, "--compile", ranks=3)
    assert done.returncode == 0 and done.stdout == expected, done.stderr[-2000:]
    assert "on each of 3 ranks" in done.stderr and done.stderr.count("Average tokens/sec") == 1


def test_several_prompts_on_three_ranks(capsys, tmp_path):
    """With a file of results."""
    several = ["generate.py", "-m", SMOLLM2, *GREEDY, "--max_new_tokens", 8, "--batch_size", 2, "--prompt", "One",
               "--prompt", "Two of", "--prompt", "Three"]
    expected = alone(capsys, *several[1:])
    statuses, _, err = on_ranks(tmp_path, *several, "--output", tmp_path / "out.jsonl", ranks=3)
    assert statuses == [0, 0, 0], err
    results = sorted((json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()), key=lambda r: r["id"])
    assert [f"--- {r['id']} ---\n{r['prompt']}{r['text']}" for r in results] == expected.rstrip("\n").split("\n--- ")[:1] + [
        f"--- {part}" for part in expected.rstrip("\n").split("\n--- ")[1:]]


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_a_drafter_by_the_command(capsys, checkpoint, tmp_path, name):
    """The lengths of the drafts are measured: by rank 0's clock."""
    shutil.copytree(checkpoint("for-drafters"), tmp_path / "model")
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(160)}, unk_token="w0")).save(str(tmp_path / "model/tokenizer.json"))
    argv = ["generate.py", "-m", tmp_path / "model", *GREEDY, "--ignore_eos", "--max_new_tokens", "16", "--prompt", "12"]
    drafter = "--draft_checkpoint_path", tmp_path / "model" / f"drafter-{name}"
    for more, k in (([], []), (["--quantize", "int8", "--compile"], ["--speculate_k", "3"])):
        expected = alone(capsys, *argv[1:], *more)
        statuses, out, err = on_ranks(tmp_path, *argv, *more, *drafter, *k)
        assert statuses == [0, 0] and out == [expected, ""], err


def test_a_conversation(tmp_path):
    said = f"Hi, I am Ada.\n/stats\nWhat is my name?\n/save {tmp_path / 'chat'}.jsonl\n/exit\n"
    talk = ["generate.py", "-m", SMOLLM2, *GREEDY, "--max_new_tokens", 12, "--interactive"]
    statuses, out, err = on_ranks(tmp_path, *talk, ranks=3, input=said)
    assert statuses == [0, 0, 0], err
    messages = json.loads((tmp_path / "chat.jsonl").read_text())["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant"] * 2
    (tmp_path / "chat.jsonl").unlink()
    process = subprocess.run([*PYTHON, *map(str, talk)], input=said, capture_output=True, text=True, cwd=ROOT)
    assert out == [process.stdout, "", ""] and len(process.stdout) > 20


def test_perplexity(tmp_path):
    text = tmp_path / "text"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 8)
    ask = ["eval.py", "-m", SMOLLM2, "--perplexity", text, "--dtype", "float32", "--json"]
    statuses, out, err = on_ranks(tmp_path, *ask, ranks=3)
    assert statuses == [0, 0, 0] and out[1:] == ["", ""], err
    together = json.loads(out[0])
    one = json.loads(subprocess.run([*PYTHON, *map(str, ask)], capture_output=True, text=True, cwd=ROOT).stdout)
    assert together["nats_per_token"] == pytest.approx(one["nats_per_token"], rel=1e-5)
    assert together["model_bytes"] == pytest.approx(one["model_bytes"] / 3, rel=0.01)


def test_two_machines(capsys, checkpoint, tmp_path):
    """Two agents that meet at a port of this machine are two nodes: of four ranks, two each."""
    shutil.copytree(checkpoint("for-int4-llama"), tmp_path / "model")
    words = {f"w{i}": i for i in range(160)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(tmp_path / "model/tokenizer.json"))
    argv = ["generate.py", "-m", tmp_path / "model", *GREEDY, "--max_new_tokens", "16", "--prompt", "12"]
    expected = alone(capsys, *argv[1:])
    command = [*TORCHRUN, "--nnodes=2", "--nproc_per_node=2", "--rdzv-backend=c10d", "--rdzv-id=test",
               f"--rdzv-endpoint=localhost:{free_port()}", *map(str, argv)]
    env = dict(os.environ, OMP_NUM_THREADS="1")
    agents = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env)
              for _ in range(2)]
    said = [agent.communicate(timeout=300) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert sorted(out for out, _ in said) == ["", expected] and expected.count("w") >= 16


@pytest.mark.parametrize("argv, message", [
    (["-m", SMOLLM2], "9 query heads, 3 key/value heads"),
    (["-m", "nowhere.gguf"], "nowhere.gguf: no such file"),
    (["--engine", "nothing"], "invalid choice: 'nothing'"),
])
def test_one_message(tmp_path, argv, message):
    statuses, out, err = on_ranks(tmp_path, "generate.py", *argv)
    found = errors("\n".join(err))
    assert statuses == [2, 2] and out == ["", ""]
    assert len(found) == 1 and message in found[0], err


@pytest.mark.parametrize("signal_number, wait", [(signal.SIGKILL, 300), (signal.SIGSTOP, 5)])
def test_a_rank_that_dies_or_hangs(signal_number, wait):
    """The others notice, one of them says so, and all end: without torchrun, which would end them too.

    One that ended they notice long before they would have waited in vain.
    """
    env = dict(os.environ, OMP_NUM_THREADS="1", GPT_FASTER_TIMEOUT=str(wait), WORLD_SIZE="3", MASTER_ADDR="localhost",
               MASTER_PORT=str(free_port()))
    ranks = [subprocess.Popen(
        [sys.executable, "-u", "generate.py", "-m", SMOLLM2, "--ignore_eos", "--max_new_tokens", "4000"], cwd=ROOT,
        env=dict(env, RANK=str(i)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for i in range(3)]
    try:
        assert ranks[0].stdout.read(20).startswith("Hello")    # it says something: all ranks are there
        os.kill(ranks[2].pid, signal_number)
        said = [rank.communicate(timeout=120)[1] for rank in ranks[:2]]
        assert [rank.returncode for rank in ranks[:2]] == [2, 2]
        found = errors("".join(said))
        assert len(found) == 1 and f"lost another one, which ended or did not answer within {wait} s" in found[0], said
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
