"""In data a prompt is text, of digits too; only the flag's integer is gpt-fast's synthetic prompt, and a line says so."""

import json
import re

import pytest
from conftest import SMOLLM2
from test_errors import run

from gpt_faster.formats.load import read_checkpoint
from gpt_faster.text import tokenizer_files

DIGITS = ["7", "12", "-5", "+3", "1984", "٣", "٤٢", "７", "7 ", "0", "00", "9" * 40]
COMMON = ["-m", SMOLLM2, "--device", "cpu", "--temperature", 0, "--max_new_tokens", 1, "--json"]


@pytest.fixture(scope="module")
def encode():
    return tokenizer_files.load(read_checkpoint(SMOLLM2).tokenizer).encode


@pytest.mark.parametrize("ending", ["jsonl", "txt"])
def test_in_a_file_digits_are_text(tmp_path, capsys, encode, ending):
    path = tmp_path / f"prompts.{ending}"
    path.write_text("".join(f"{json.dumps(dict(prompt=text)) if ending == 'jsonl' else text}\n" for text in DIGITS), encoding="utf-8")
    status, out, err = run(capsys, *COMMON, "--prompts_file", path)
    assert status == 0, err
    rows = {row["id"]: row for row in map(json.loads, out.splitlines())}
    for i, text in enumerate(DIGITS):
        assert rows[i]["prompt"] == text and rows[i]["prompt_ids"] == encode(text), text
    assert "synthetic" not in err


@pytest.mark.parametrize("text", ["٣", "７", "1.5", "7 ", "0x10", "9" * 40])
def test_as_a_flag_only_an_integer_is_synthetic(capsys, encode, text):
    status, out, err = run(capsys, *COMMON, "--prompt", text)
    assert status == 0 and json.loads(out)["prompt_ids"] == encode(text) and "synthetic" not in err


@pytest.mark.parametrize("prompts", [["7"], ["+3"], ["7", "words", "12"]])
def test_the_flag_s_integer_says_so(capsys, encode, prompts):
    status, out, err = run(capsys, *COMMON, *(x for text in prompts for x in ("--prompt", text)))
    assert status == 0, err
    rows = sorted(map(json.loads, out.splitlines()), key=lambda row: prompts.index(row["prompt"]))
    for text, row in zip(prompts, rows):
        assert len(row["prompt_ids"]) == int(text) if text != "words" else row["prompt_ids"] == encode(text)
    said = re.findall(r"note: --prompt.* (\S+): an integer means a synthetic prompt of that many random tokens", err)
    assert said == [text for text in prompts if text != "words"]
