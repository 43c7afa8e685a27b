"""The rows of mutants.py name what is there: text that is in its file once, tests that exist, a table for each file."""

import ast
import re
import shlex
from pathlib import Path

import pytest
from mechanical import ROOMS, files_of, mutants_of, random_mutants
from mutant_rows import NAMED, TESTS, room_tests
from mutants import is_there, text_of

ROOT = Path(__file__).resolve().parent.parent


def named_tests(arguments):
    words = shlex.split(arguments)
    assert not {"-k", "--all"} & set(words), "a row names its tests"
    return [word for word in words if not word.startswith("-")]


@pytest.mark.parametrize("mutant", NAMED, ids=lambda m: m.name)
def test_a_row_fits_its_file(mutant):
    text = text_of(mutant, ROOT)
    assert text is not None, "its old text is not in the file exactly once"
    if mutant.file.endswith(".py"):
        ast.parse(text)
    assert all(is_there(test, ROOT) for test in named_tests(mutant.tests))


def test_names_are_unique_and_say_what_is_wrong():
    names = [m.name for m in NAMED]
    assert len(set(names)) == len(names) >= 40
    assert all(re.fullmatch(r"[a-z0-9-]+", name) for name in names)


def test_every_file_of_a_room_has_tests():
    for file in (file for room in ROOMS for file in files_of(ROOT, room)):
        assert named_tests(room_tests(file)) and all(is_there(test, ROOT) for test in named_tests(room_tests(file))), file
    assert all(is_there(test, ROOT) for _, tests in TESTS for test in named_tests(tests))


def test_mechanical_mutants_are_programs_and_a_seed_repeats():
    """Each parses, differs, and is of the place that it names."""
    for file in ("generate.py", "gpt_faster/layers/recurrent.py", "gpt_faster/quantization/refine.py"):
        text, mutants = (ROOT / file).read_text(), mutants_of(ROOT, file)
        assert len(mutants) > 10
        for m in mutants:
            begin, end = m.place
            assert text[begin:end] == m.old and ast.dump(ast.parse(text)) != ast.dump(ast.parse(text_of(m, ROOT))), m.name
    drawn = random_mutants(ROOT, 14, 3, "server,quantization")
    assert drawn == random_mutants(ROOT, 14, 3, "server,quantization") != random_mutants(ROOT, 14, 4, "server,quantization")
    assert sum(m.file.startswith("gpt_faster/quantization/") for m in drawn) == 7
