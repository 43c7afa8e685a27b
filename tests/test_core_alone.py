"""The core's eight files, copied into an empty folder, do what the whole tree does, and as transformers does it."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import references
import tiny
import torch
from conftest import SMOLLM2

from generate import Batch, generate
from gpt_faster import loading
from sampling import Sampler, SamplingParams

ROOT = Path(__file__).resolve().parent.parent
CORE = ("model.py", "sampling.py", "generate.py", "speculate.py", "quantize.py", "tp.py", "checkpoint.py", "tokenizer.py")
KINDS = ("llama2", "llama3", "mistral-window", "mixtral", "qwen2", "qwen3", "qwen3_moe")
PROMPTS = [[3, 17, 44, 90, 5, 61, 23, 8, 119, 77, 30, 12], [9, 100, 3, 54]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("copied")
    for name in CORE:
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def directories(families):
    """Of each kind, with a tokenizer whose words are t0, t1, …"""
    def with_tokenizer(name):
        directory, _ = families(name)
        words = {f"t{i}": i for i in range(160)}
        tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
                     "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None,
                     "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": False},
                     "model": {"type": "WordLevel", "vocab": words, "unk_token": "t0"}}
        (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
        return directory
    return with_tokenizer


def environment(folder):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return dict(env, OMP_NUM_THREADS="1", TORCHINDUCTOR_CACHE_DIR=str(folder / "inductor"))


def in_folder(folder, *tasks):
    """What the copied core says to tests/core_alone.py's tasks."""
    defaults = dict(scheme=None, engine="kv_cache", prompts=PROMPTS[:1], n_new=32, draft=None)
    lines = "\n".join(json.dumps({**defaults, **task}) for task in tasks)
    done = subprocess.run([sys.executable, str(Path(__file__).with_name("core_alone.py")), str(folder)], input=lines, cwd=folder,
                          capture_output=True, text=True, env=environment(folder))
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def command(folder, *arguments, launcher=()):
    done = subprocess.run([sys.executable, *launcher, *map(str, arguments)], cwd=folder, capture_output=True, text=True,
                          env=environment(folder), stdin=subprocess.DEVNULL)
    return done.returncode, done.stdout, done.stderr


def whole_trees(path, scheme=None, prompts=PROMPTS[:1], n_new=32):
    model, _, _ = loading.load_model(str(path), "cpu", torch.float32, scheme)
    model.setup_cache(len(prompts), 128, 64)
    batch = Batch(model, Sampler([SamplingParams(temperature=0)] * len(prompts), model.cfg.vocab_size))
    return torch.cat(list(generate(batch, prompts, n_new)), dim=1).tolist()


def theirs(model, prompt, n_new=32):
    with torch.no_grad():
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=n_new, min_new_tokens=n_new, do_sample=False)
    return ids[0, len(prompt):].tolist()


def test_every_kind_equals_transformers(folder, families, directories):
    """32 tokens in fp32, of one prompt and of two side by side."""
    paths = {name: str(directories(name)) for name in KINDS}
    alone = in_folder(folder, *(dict(path=path) for path in paths.values()))
    together = in_folder(folder, *(dict(path=path, prompts=PROMPTS) for path in paths.values()))
    for name, [one], two in zip(KINDS, alone, together):
        expected = [theirs(families(name)[1], prompt) for prompt in PROMPTS]
        assert one == expected[0] and two == expected, name


def test_quantized_and_drafting_as_the_whole_tree(folder, directories):
    path, draft = str(directories("llama3")), str(directories("qwen3"))
    mixture = str(directories("mixtral"))
    tasks = [dict(path=path, scheme="int8"), dict(path=path, scheme="int4-g32"), dict(path=mixture, scheme="int8"),
             dict(path=path, draft=path), dict(path=path, draft=draft)]
    rows = [dict(path=path, prompts=PROMPTS), dict(path=path, prompts=PROMPTS, draft=draft), dict(path=path, prompts=PROMPTS, draft=path)]
    got = in_folder(folder, *tasks, *rows)
    assert got[5] == got[6] == got[7]
    plain = whole_trees(path)
    assert got[:5] == [whole_trees(path, "int8"), whole_trees(path, "int4-g32"), whole_trees(mixture, "int8"), plain, plain]


@pytest.mark.parametrize("name", ["llama3", "mixtral"])
def test_torch_compile(folder, directories, name):
    """gpt-fast's engine gives the eager tokens: plain, quantized, drafted and in two rows."""
    path = str(directories(name))
    variants = [dict(), dict(scheme="int8"), dict(draft=path), dict(prompts=PROMPTS), dict(prompts=PROMPTS, draft=path)]
    eager = in_folder(folder, *(dict(path=path, **variant) for variant in variants))
    assert in_folder(folder, *(dict(path=path, engine="torch_compile", **variant) for variant in variants)) == eager


def test_the_commands(folder, directories):
    """quantize.py's files, generate.py's text and lines, and what is refused; the text is the whole command's."""
    path = directories("qwen3")
    prompt = ("--prompt", " ".join(f"t{i}" for i in PROMPTS[0]), "--max_new_tokens", "12", "--temperature", "0", "--dtype", "float32")
    for mode, name in (("int8", "model_int8.pth"), ("int4", "model_int4.g32.pth")):
        status, _, stderr = command(folder, "quantize.py", "--checkpoint_path", path, "--mode", mode)
        assert status == 0 and (path / name).exists(), stderr
    for file in (path, path / "model_int8.pth", path / "model_int4.g32.pth"):
        status, text, stderr = command(folder, "generate.py", "--checkpoint_path", file, *prompt)
        assert status == 0 and "Engine: kv_cache" in stderr and "Average tokens/sec: " in stderr, stderr
        assert (0, text) == command(ROOT, "generate.py", "--checkpoint_path", file, *prompt)[:2]
    status, text, stderr = command(folder, "generate.py", "--checkpoint_path", path, *prompt, "--num_samples", "2", "--batch_size", "2",
                                   "--compile", "--profile", folder / "trace")
    assert status == 0 and "Engine: torch_compile" in stderr and (folder / "trace.json").exists(), stderr
    assert text.count("--- row 1 ---") == 2 and stderr.count("Sample ") == 2
    status, text, stderr = command(folder, "generate.py", "--checkpoint_path", path, *prompt, "--draft_checkpoint_path",
                                   path / "model_int8.pth", "--batch_size", "2")
    assert status == 0 and "Acceptance probs: [" in stderr and "Mean Accepted: " in stderr, stderr
    assert text == command(folder, "generate.py", "--checkpoint_path", path, *prompt, "--batch_size", "2")[1] != ""
    for arguments, words in (((), "--checkpoint_path is required"), (("--checkpoint_path", folder / "none"), "no such file"),
                             (("--checkpoint_path", path, "--temperature", "-1"), "at least 0"),
                             (("--checkpoint_path", path, "--prompt", ""), "the prompt is empty"),
                             (("--checkpoint_path", path, "--stop", ""), "--stop must not be empty"),
                             (("--checkpoint_path", path, "--device", "abacus"), "device 'abacus' not found; available: "),
                             (("--checkpoint_path", path, "--profile", folder / "no/trace"), "expected a file in an existing directory"),
                             (("--checkpoint_path", path, "--speculate_k", "3"), "requires --draft_checkpoint_path"),
                             (("--checkpoint_path", path, "--top_n_sigma", "-1"), "at least 0"),
                             (("--checkpoint_path", path, "--engine", "torch_compile"), "unrecognized arguments")):
        status, _, stderr = command(folder, "generate.py", *arguments)
        assert status == 2 and words in stderr.splitlines()[-1] and "Traceback" not in stderr


def words(ids):
    return " ".join(f"t{i}" for i in ids)


def test_prompts_of_any_length(folder, directories, tmp_path):
    """Beside the longest prompt that fits a short one has as many new tokens as alone, and each text has its number."""
    path = directories("llama3")
    context = json.loads((path / "config.json").read_text())["max_position_embeddings"]
    long, short = words([7] * (context - 5)), words([9, 100, 3])
    common = ("--checkpoint_path", path, "--max_new_tokens", "20", "--temperature", "0", "--dtype", "float32", "--ignore_eos")
    status, both, stderr = command(folder, "generate.py", *common, "--prompt", long, "--prompt", short, "--prompt", short, "--batch_size", "2")
    assert status == 0, stderr
    alone = [command(folder, "generate.py", *common, "--prompt", prompt)[1] for prompt in (long, short)]
    assert [len(text.split()) for text in alone] == [context, 23]
    assert both == "".join(f"--- {i} ---\n{text}" for i, text in enumerate((*alone, alone[1])))


def test_a_draft_for_a_text_shorter_than_it(folder, directories):
    path = directories("llama3")
    for n_new, prompt in ((1, "t1"), (3, "t1 t2"), (4, "t1")):
        common = ("--checkpoint_path", path, "--prompt", prompt, "--max_new_tokens", n_new, "--temperature", "0", "--dtype", "float32")
        status, text, stderr = command(folder, "generate.py", *common, "--draft_checkpoint_path", path)
        assert status == 0 and text == command(folder, "generate.py", *common)[1], stderr


def test_what_goes_wrong_is_a_line(folder, directories, tmp_path):
    """Out of memory; a terminal that knows ASCII only; a reader that leaves; a trace that cannot be written."""
    path = directories("llama3")
    common = ("generate.py", "--checkpoint_path", path, "--prompt", "t1 café", "--max_new_tokens", "3")
    status, _, stderr = command(folder, *common, "--batch_size", 10**9)
    assert status == 2 and len(stderr.splitlines()[-1]) > 20 and "Traceback" not in stderr, stderr
    (tmp_path / "trace.json").mkdir()
    status, _, stderr = command(folder, *common, "--profile", tmp_path / "trace")
    assert status == 2 and "expected a file in an existing directory" in stderr
    line = f"cd {folder} && {sys.executable} {' '.join(map(repr, map(str, common)))} "
    for how, status in (("| cat > /dev/null", 0), ("| true", 141), (">&-", 0)):
        done = subprocess.run(["bash", "-c", f"{line} {how}; exit ${{PIPESTATUS[0]}}"], capture_output=True, text=True,
                              env=dict(environment(folder), PYTHONIOENCODING="ascii"))
        assert done.returncode == status and "Traceback" not in done.stderr, (how, done.returncode, done.stderr)


def test_a_rank_says_why_it_failed(folder, directories):
    """Its stderr is nowhere; what rank 0 sees is only that the connection is lost."""
    broken = folder / "broken"
    broken.mkdir()
    for name in CORE:
        shutil.copy(folder / name, broken)
    text = (broken / "generate.py").read_text()
    (broken / "generate.py").write_text(text.replace("    draft = load_draft(", "    if tp.rank():\n        raise ValueError('its own fault')\n    draft = load_draft(", 1))
    launcher = "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"
    status, _, stderr = command(broken, "generate.py", "--checkpoint_path", directories("llama3"), "--prompt", "t1", launcher=launcher)
    assert status != 0 and "rank 1: its own fault\n" in stderr, stderr
    assert "another rank ended" in stderr and "broken/generate.py" not in stderr, stderr


def test_a_line_of_a_rank_is_one_write(folder):
    """torchrun starts python -u, whose print is two writes: two ranks' lines ran into each other.

    A packet of this socket is one write."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = "import sys, tp; tp.start(); print('a line', file=sys.__stderr__); tp.end()"
    ranks = []
    for rank in range(2):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = dict(environment(folder), RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        ranks.append((ours, subprocess.Popen([sys.executable, "-u", "-c", code], cwd=folder, env=env, stderr=theirs)))
        theirs.close()
    for ours, process in ranks:
        assert process.wait(60) == 0
        writes = []
        while packet := ours.recv(1 << 16):
            writes.append(packet)
        assert b"a line\n" in writes, writes


def test_two_ranks(folder, directories):
    path = directories("llama3")
    prompt = ("--prompt", " ".join(f"t{i}" for i in PROMPTS[0]), "--max_new_tokens", "12", "--temperature", "0", "--dtype", "float32")
    launcher = "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"
    status, text, stderr = command(folder, "generate.py", "--checkpoint_path", path, *prompt, launcher=launcher)
    assert status == 0, stderr
    assert text == command(folder, "generate.py", "--checkpoint_path", path, *prompt)[1]


def test_smollm2_as_safetensors(folder, tmp_path):
    """Real weights in the Hub's layout: transformers' own tokens, as tests/expected keeps them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    file = SMOLLM2
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    facts = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    plain = LlamaForCausalLM(LlamaConfig(**facts))             # the other one may not be written, since it was a GGUF
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(tmp_path)
    expected = references.kept(file)["generated"]
    prompts = [expected[prompt][0] for prompt in references.PROMPTS]
    got = in_folder(folder, *(dict(path=str(tmp_path), prompts=[ids], n_new=12) for ids in prompts))
    assert got == [[expected[prompt][1][:12]] for prompt in references.PROMPTS]


def test_other_kinds_are_refused_by_name(folder, families):
    for name in ("gemma2", "gpt2", "qwen3_next"):
        status, _, stderr = command(folder, "generate.py", "--checkpoint_path", families(name)[0])
        model_type = json.loads((families(name)[0] / "config.json").read_text())["model_type"]
        assert status == 2 and f"'{model_type}'" in stderr and "llama" in stderr and "Traceback" not in stderr, stderr


def test_the_list_is_the_core():
    import test_laws
    assert {name.removesuffix(".py") for name in CORE} == set(test_laws.CORE) and set(KINDS) <= set(tiny.FAMILIES)
