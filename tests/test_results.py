"""--output: a result carries what it answers, and is reused only if that is the same."""

import json
import os
import shutil

import pytest
from safetensors.torch import load_file, save_file
from test_end_tokens import with_files
from test_errors import run

WORDS = [chr(256 + i) for i in range(150)]
PROMPTS = ["".join(WORDS[i:i + 4]) for i in range(0, 20, 4)]


@pytest.fixture
def model(families, tmp_path):
    return with_files(families("llama2")[0], tmp_path / "model")


@pytest.fixture
def command(capsys, model, tmp_path):
    """Runs the prompts -> the results by id, and stderr; `new` counts those that were computed."""
    class Command:
        path, output = tmp_path / "prompts.txt", tmp_path / "results.jsonl"

        def __call__(self, prompts, *more, model=model, status=0):
            text = "".join(json.dumps(p) + "\n" if isinstance(p, dict) else f"{p}\n" for p in prompts)
            path = self.path.with_suffix(".jsonl") if isinstance(prompts[0], dict) else self.path
            path.write_text(text, encoding="utf-8")
            before = self.output.read_bytes().splitlines() if self.output.exists() else []
            given = run(capsys, "-m", model, "--device", "cpu", "--dtype", "float32", "--temperature", 0, "--max_new_tokens", 4,
                        "--batch_size", 2, "--prompts_file", path, "--output", self.output, *more)
            assert given[0] == status, given
            lines = self.output.read_bytes().splitlines()
            self.new = len(set(lines) - set(before))
            rows = [json.loads(line) for line in lines]
            assert len({row["id"] for row in rows}) == len(rows)               # one line for each
            return {row["id"]: row for row in rows}, given[2]
    return Command()


def alone(command, prompts, *more, **options):
    """What a run without earlier results gives."""
    output, command.output = command.output, command.output.with_name("alone.jsonl")
    command.output.unlink(missing_ok=True)
    rows, _ = command(prompts, *more, **options)
    command.output = output
    return rows


def same(rows, expected):
    timed = ("ttft_s", "decode_tok_s", "slot")
    return [{id_: {k: v for k, v in row.items() if k not in timed} for id_, row in r.items()} for r in (rows, expected)]


def test_results_say_what_they_answer_and_the_same_command_reuses_them(command):
    rows, _ = command(PROMPTS)
    assert command.new == 5 and rows[3]["prompt"] == PROMPTS[3]
    told = rows[3]["parameters"]
    assert told.items() >= dict(model="model.safetensors", dtype="float32", temperature=0.0, top_k=200, seed=1234, stop=[], quantize=None,
                                max_new_tokens=4).items()
    again, err = command(PROMPTS)
    assert command.new == 0 and again == rows and "has 5 results already: 0 prompts to go" in err
    lines = command.output.read_text().splitlines()
    command.output.write_text("\n".join(lines[:2]) + "\n" + lines[2][:50])     # cut short
    again, err = command(PROMPTS)
    assert same(again, rows)[0] == same(again, rows)[1] and "has 2 results already: 3 prompts to go" in err
    assert not command.output.with_name("results.jsonl.old").exists()


@pytest.mark.parametrize("edit, n_new", [
    (lambda p: [p[0], "".join(WORDS[60:63]), *p[1:]], 5),                      # inserted: all after it moved on
    (lambda p: [*p, WORDS[9]], 1), (lambda p: p[:3], 0), (lambda p: [p[1], p[0], *p[2:]], 2), (lambda p: [*p[:4], p[4] + WORDS[1]], 1)])
def test_an_edited_file_of_prompts(command, edit, n_new):
    command(PROMPTS)
    rows, err = command(edit(PROMPTS))
    assert command.new == n_new
    expected = alone(command, edit(PROMPTS))
    rows = {id_: row for id_, row in rows.items() if id_ in expected}          # of prompts that are gone the results stay
    assert same(rows, expected)[0] == same(rows, expected)[1]
    assert ("computed again; the old ones are in" in err) == any(old != new for old, new in zip(PROMPTS, edit(PROMPTS)))


def test_an_edited_line_of_json(command):
    prompts = [dict(id=name, prompt=text) for name, text in zip("abc", PROMPTS)]
    command(prompts)
    for change in (dict(temperature=0.7, seed=3), dict(max_new_tokens=2), dict(prompt=PROMPTS[4])):
        edited = [prompts[0], {**prompts[1], **change}, prompts[2]]
        rows, err = command(edited)
        assert command.new == 1 and "1 results have another prompt, model or parameters (of b: " in err
        assert same(rows, alone(command, edited))[0] == same(rows, alone(command, edited))[1]
        command(prompts)
    rows, _ = command([*prompts[:1], dict(id="d", prompt=PROMPTS[4]), *prompts[1:]])     # ids of their own: only the new one
    assert command.new == 1 and list(rows) == ["a", "c", "b", "d"]


@pytest.mark.parametrize("flag, name", [
    (["--temperature", 0.5], "temperature 0.0, now 0.5"), (["--top_k", 3], "top_k 200, now 3"), (["--seed", 5], "seed 1234, now 5"),
    (["--max_new_tokens", 3], "max_new_tokens 4, now 3"), (["--stop", "x"], "stop [], now ['x']"), (["--dtype", "bf16"], "dtype float32, now bfloat16"),
    (["--quantize", "int8"], "quantize None, now int8"), (["--ignore_eos"], None)])
def test_another_parameter(command, flag, name):
    old, _ = command(PROMPTS[:2])
    rows, err = command(PROMPTS[:2], *flag)
    if name is None:                                       # this model has no end token: nothing is different
        assert command.new == 0
        return
    assert command.new == 2 and f"2 results have another prompt, model or parameters (of 0: {name}): computed again" in err
    assert same(rows, alone(command, PROMPTS[:2], *flag))[0] == same(rows, alone(command, PROMPTS[:2], *flag))[1]
    kept = [json.loads(line) for line in command.output.with_name("results.jsonl.old").read_text().splitlines()]
    assert {row["id"]: row for row in kept} == old                             # nothing is lost


def test_another_model_of_the_same_name(command, model, families, tmp_path):
    command(PROMPTS[:2])
    tensors = load_file(model / "model.safetensors")
    save_file({name: t.flip(0) if "lm_head" in name else t for name, t in tensors.items()}, model / "model.safetensors", {"format": "pt"})
    rows, err = command(PROMPTS[:2])
    assert command.new == 2 and "files " in err
    assert same(rows, alone(command, PROMPTS[:2]))[0] == same(rows, alone(command, PROMPTS[:2]))[1]
    shutil.copytree(model, tmp_path / "copy", copy_function=shutil.copy2)     # with its times, as rsync does
    command(PROMPTS[:2], model=tmp_path / "copy")
    assert command.new == 0
    os.utime(tmp_path / "copy/model.safetensors")
    command(PROMPTS[:2], model=tmp_path / "copy")
    assert command.new == 2


def test_results_of_an_older_version_are_computed_again(command):
    rows, _ = command(PROMPTS[:2])
    for row in rows.values():
        row.pop("parameters")
    command.output.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
    _, err = command(PROMPTS[:2])
    assert command.new == 2 and "(of 0: adapter None" not in err and "have another prompt, model or parameters" in err


def test_a_prompt_that_became_invalid(command):
    command([dict(id="a", prompt=PROMPTS[0]), dict(id="b", prompt=PROMPTS[1])])
    rows, err = command([dict(id="a", prompt=PROMPTS[0]), dict(id="b", prompt="")], status=1)
    assert list(rows) == ["a"] and "the prompt is empty" in err and "(of b: the prompt)" in err


def test_another_tokenizer(command, model):
    command(PROMPTS[:2])
    fast = json.loads((model / "tokenizer.json").read_text())
    vocab = fast["model"]["vocab"]
    vocab[WORDS[1]], vocab[WORDS[2]] = vocab[WORDS[2]], vocab[WORDS[1]]
    (model / "tokenizer.json").write_text(json.dumps(fast))
    command(PROMPTS[:2])
    assert command.new == 1                                # only the prompt whose ids changed


def test_a_path_may_be_a_string(families):
    import checkpoint
    from gpt_faster.formats import load
    path = families("llama2")[0]
    for read in (load.read_checkpoint, checkpoint.read_checkpoint):
        assert read(str(path)).path == read(path).path
