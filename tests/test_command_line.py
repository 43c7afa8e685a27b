"""The command line as people type it: stdin, other tools' names of flags, short names of dtypes."""

import json
import os
import shutil
import sys

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

import generate
from gpt_faster.bench import main as bench
from gpt_faster.cli import batch, evaluate, flags, parser, quantizing, session
from gpt_faster.cli.options import Options
from gpt_faster.server import main as server

CORE = ("checkpoint", "generate", "model", "quantize", "sampling", "speculate", "tokenizer", "tp")


@pytest.fixture(scope="module")
def checkpoint(families, tmp_path_factory):
    """A tiny model whose tokens are the letters of ASCII, and some digits of Arabic."""
    path = tmp_path_factory.mktemp("stdin") / "model"
    shutil.copytree(families("llama2")[0], path)
    letters = [chr(i) for i in range(33, 127)] + ["٤", "٢"]
    fast = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(params=["full", "core"])
def run(request, checkpoint, capfd, monkeypatch):
    """Runs generate.py's command, whole or as of the eight files alone -> exit status, stdout, stderr.

    stdin: what is piped, a file's path, or None for /dev/null.
    """
    main = session.main if request.param == "full" else generate.main

    def run(*argv, stdin=None):
        capfd.readouterr()
        if isinstance(stdin, bytes):
            reading, writing = os.pipe()
            os.write(writing, stdin)
            os.close(writing)
            file = open(reading)
        else:
            file = open(os.devnull if stdin is None else stdin)
        with file:
            monkeypatch.setattr(sys, "stdin", file)
            monkeypatch.setattr(sys, "argv", ["generate.py"])
            flags = ["-m", checkpoint, "--device", "cpu", "--dtype", "fp32", "--temperature", "0", "--max_new_tokens", "2"]
            try:
                status = main([*map(str, flags), *argv])
            except SystemExit as e:
                status = e.code
        return status, *capfd.readouterr()
    run.is_full = request.param == "full"
    return run


# ---- Stdin --------------------------------------------------------------------------------------

@pytest.mark.parametrize("ending", ["", "\n", "\r\n"])
def test_what_is_piped_is_the_prompt(run, ending):
    expected = run("--prompt", "hi")
    assert expected[0] == 0 and expected[1].startswith("hi")
    assert run(stdin=f"hi{ending}".encode())[:2] == expected[:2]
    assert run("--prompt", "-", stdin=f"hi{ending}".encode())[:2] == expected[:2]


def test_a_flag_wins_and_nothing_piped_is_the_default(run):
    assert run("--prompt", "x", stdin=b"other")[:2] == run("--prompt", "x")[:2]
    assert run()[1].startswith(generate.HELLO)


def test_a_file_is_piped_too(run, tmp_path):
    (tmp_path / "prompt").write_text("two\nlines\n")
    status, out, _ = run(stdin=tmp_path / "prompt")
    assert status == 0 and out.startswith("two\nlines") and not out.startswith("two\nlines\n")


@pytest.mark.parametrize("stdin, message", [(b"", "the prompt is empty: stdin has no text"), (b" \n", "stdin has no text"),
                                            (b"a\xff", "stdin: not UTF-8 text: invalid start byte at byte 1")])
def test_stdin_that_is_no_prompt(run, stdin, message):
    status, out, err = run("--prompt", "-", stdin=stdin)
    assert status == 2 and out == "" and len(err.splitlines()) == 1 and message in err


@pytest.mark.parametrize("stdin", [b"", b" \n"])
def test_an_empty_pipe_is_no_prompt(run, stdin):
    """Programs that start this one often give it a pipe to which they write nothing."""
    status, out, err = run(stdin=stdin)
    assert status == 0 and out.startswith(generate.HELLO) and "note: stdin is empty" in err


def test_a_pipe_that_stays_open_is_no_prompt(run, monkeypatch):
    monkeypatch.setattr(generate, "PIPE_WAIT", 0.1)
    reading, writing = os.pipe()
    try:
        status, out, err = run(stdin=reading)
    finally:
        os.close(writing)
    assert status == 0 and out.startswith(generate.HELLO) and "note: nothing came from stdin in 0.1 seconds" in err


@pytest.mark.parametrize("digits", ["7", "٤٢"])
def test_digits_from_stdin_are_text_and_from_the_flag_a_note_says_so(run, digits):
    status, _, err = run(stdin=digits.encode())
    assert status == 0 and "synthetic" not in err
    status, _, err = run("--prompt", digits)
    assert status == 0 and ("note: --prompt 7: an integer means a synthetic prompt of that many random tokens" in err) == (digits == "7")


@pytest.mark.parametrize("lines, texts, note", [
    ("ab\n\n7\n", ["ab", "7"], False), ('{"prompt": "7"}\n{"prompt": "ab"}', ["7", "ab"], True)])
def test_a_prompts_file_from_stdin(run, lines, texts, note):
    if not run.is_full:
        pytest.skip("a flag of the full command")
    status, out, err = run("--prompts_file", "-", "--json", stdin=lines.encode())
    assert status == 0, err
    rows = sorted(map(json.loads, out.splitlines()), key=lambda row: row["id"])
    assert [row["prompt"] for row in rows] == texts and [len(row["prompt_ids"]) for row in rows] == [len(text) for text in texts]
    assert ("note: stdin is read as JSON lines" in err) == note
    status, _, err = run("--prompts_file", "-", stdin=b'{"prompt": "7"}\n{"prompt": 7}')
    assert status == 1 and 'error: stdin:2: "prompt" must be a string' in err


def test_a_pipe_that_is_slow_is_told(run, monkeypatch):
    assert "waiting" not in run("--prompt", "-", stdin=b"hi")[2]
    monkeypatch.setattr(generate.select, "select", lambda *_: ([], [], []))
    status, out, err = run("--prompt", "-", stdin=b"hi")
    assert status == 0 and out.startswith("hi") and "note: waiting for the prompt on stdin, which is a pipe" in err


def test_digits_in_a_chat_are_a_message():
    args = Options.parse(flags.build_parser(), ["--chat", "--prompt", "7"])
    request, = batch.read_requests(args)[0]
    assert request.messages == [dict(role="user", content="7")] and request.n_random is None


# ---- Names of flags -----------------------------------------------------------------------------

PARSERS = {"generate.py": flags.build_parser, "eval.py": evaluate.build_parser, "quantize.py": quantizing.build_parser,
           "serve.py": server.build_parser, "benchmark.py": bench.build_parser}


def refused(parser, argv, capsys):
    with pytest.raises(SystemExit) as e:
        parser.parse_args(argv)
    assert e.value.code == 2
    line, = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("command, argv, meant", [
    ("generate.py", "--max_tokens 3", "--max_new_tokens"), ("generate.py", "--max-tokens=3", "--max_new_tokens"),
    ("generate.py", "-n 3", "--max_new_tokens"), ("generate.py", "--n-predict 3", "--max_new_tokens"),
    ("generate.py", "--max_length 3", "--max_new_tokens"), ("generate.py", "-p text", "--prompt"),
    ("generate.py", "-f file", "--prompts_file"), ("generate.py", "-c 512", "--max_seq_length"),
    ("generate.py", "--ctx-size 512", "--max_seq_length"), ("generate.py", "--max-kv-size 512", "--max_seq_length"),
    ("generate.py", "-s 1", "--seed"), ("generate.py", "--repeat-penalty 1.1", "--repetition_penalty"),
    ("generate.py", "--lora x", "--adapter"), ("generate.py", "--adapter-path x", "--adapter"), ("generate.py", "--topk 3", "--top_k"),
    ("generate.py", "--torch_dtype x", "--dtype"), ("generate.py", "--num_return_sequences 2", "--num_samples"),
    ("generate.py", "--num-draft-tokens 2", "--speculate_k"), ("generate.py", "-md x", "--draft_checkpoint_path"),
    ("generate.py", "-t 4", "OMP_NUM_THREADS=N before the command"), ("generate.py", "-ngl 99", "--device"),
    ("generate.py", "-model x", "--model"), ("generate.py", "-max_new_tokens 3", "--max_new_tokens"), ("generate.py", "-prompt x", "--prompt"),
    ("generate.py", "--greedy", "--temperature 0"), ("generate.py", "--load_in_4bit", "--quantize"), ("generate.py", "-i", "--interactive"),
    ("generate.py", "--prompts_fle x --max_tokens 3", "--prompts_file, --max_new_tokens"),
    ("eval.py", "--ppl x", "--perplexity"), ("eval.py", "--perplexity x --fewshot 3", "--num_fewshot"),
    ("quantize.py", "--group-size 32", "--groupsize"), ("quantize.py", "-o x", "--output"), ("quantize.py", "--dataset x", "--calibration_file"),
    ("serve.py", "--max-model-len 5", "--max_seq_length"), ("serve.py", "--tensor-parallel-size 2", "torchrun --nproc_per_node=N"),
    ("serve.py", "--served-model-name x", "--served_name"), ("serve.py", "-np 4", "--batch_size"),
    ("benchmark.py", "-t 4", "OMP_NUM_THREADS=N before the command"), ("benchmark.py", "--gen_len 4", "--max_new_tokens")])
def test_names_of_other_tools_and_misspelled_ones_are_suggested(command, argv, meant, capsys):
    line = refused(PARSERS[command](), argv.split(), capsys)
    assert line.endswith(f"(did you mean {meant}?)"), line


@pytest.mark.parametrize("argv", ["--foo 3", "-x", "--zzzz=1"])
def test_what_is_like_nothing_is_only_named(argv, capsys):
    line = refused(flags.build_parser(), argv.split(), capsys)
    assert line.endswith(f"unrecognized arguments: {argv}")


def test_every_other_name_is_of_a_flag_and_no_flag_itself():
    """A name that became a flag, or whose flag is gone, is noticed."""
    parsers = [build() for build in PARSERS.values()]
    known = set().union(*(p._option_string_actions for p in parsers))
    for flag, names in parser.OTHER_NAMES.items():
        assert not flag.startswith("-") or flag.split()[0] in known, flag
        for name in names.split():
            assert f"--{name}" not in flags.build_parser()._option_string_actions, name


def test_what_argparse_takes_stays(capsys):
    def parsed(*argv):
        return Options.parse(flags.build_parser(), list(argv))
    assert parsed("--max-new-tokens", "3", "--top-k=5", "--temp", "0.5", "-mx", "--stop", "-1").values.items() >= dict(
        max_new_tokens=3, top_k=5, temperature=0.5, checkpoint_path="x", stop=["-1"]).items()
    assert parsed("--prompt=-n", "--prompt", "-a b", "--prompt", "a-b").prompt == ["-n", "-a b", "a-b"]
    assert "expected one argument" in refused(flags.build_parser(), ["--prompt", "--max_tokens"], capsys)


@pytest.mark.parametrize("text, dtype", [("fp16", "float16"), ("half", "float16"), ("float16", "float16"), ("bf16", "bfloat16"), ("BF16", "bfloat16"),
                                         ("bfloat16", "bfloat16"), ("fp32", "float32"), ("float", "float32"), ("torch.float32", "float32"), ("auto", "auto")])
def test_short_names_of_dtypes(text, dtype, capsys):
    for name, build in PARSERS.items():
        args = build().parse_args(["--dtype", text, *(["--perplexity", "x"] if name == "eval.py" else [])])
        assert args.dtype == dtype and (dtype == "auto" or hasattr(torch, dtype))
        assert "invalid choice: 'int8'" in refused(build(), ["--dtype", "int8"], capsys)
