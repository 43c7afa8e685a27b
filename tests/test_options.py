"""What a command was asked for: who wins, that argv is read once, and that nobody changes it."""

import re
from pathlib import Path

import pytest

import generate
from gpt_faster.bench import main as benchmark
from gpt_faster.cli import evaluate, flags, quantizing
from gpt_faster.cli.options import Options
from gpt_faster.server import main as serve

ROOT = Path(generate.__file__).parent
PARSERS = {"generate": flags.build_parser, "serve": serve.build_parser, "eval": evaluate.build_parser,
           "quantize": quantizing.build_parser, "benchmark": benchmark.build_parser}
NEEDED = {"eval": ["--perplexity", "pydoc"], "quantize": ["--mode", "int4", "-m", "x"]}


@pytest.mark.parametrize("name", PARSERS)
def test_what_is_not_given_is_the_default_as_argparse_has_it(name):
    argv = NEEDED.get(name, [])
    expected = vars(PARSERS[name]().parse_args(argv))
    options = Options.parse(PARSERS[name](), argv)
    assert options.values == expected and options.explicit.keys() <= {"mode", "checkpoint_path", "perplexity"}


def test_a_flag_wins_over_the_models_files_and_these_over_the_default():
    options = Options.parse(flags.build_parser(), ["--temperature", "0.8", "--stop", "a", "--stop=b", "--max-new-tokens", "7"])
    assert options.explicit == dict(temperature=0.8, stop=["a", "b"], max_new_tokens=7)
    both = options.over(dict(temperature=0.1, top_k=3, no_flag_of_ours=1))
    assert (both.temperature, both.top_k, both.top_p) == (0.8, 3, 1.0)     # 0.8 is the default too, and was asked for
    assert (options.top_k, options.prompt) == (200, [])
    assert "no_flag_of_ours" not in both.values
    assert both.replaced(top_k=9).over(dict(top_k=4)).top_k == 9
    again = Options.parse(flags.build_parser(), [])
    assert again.stop == [] and again.explicit == {}              # no list is shared


def test_nobody_changes_them():
    options = Options.parse(flags.build_parser(), [])
    with pytest.raises(AttributeError, match="temperature: options are immutable"):
        options.temperature = 0.5
    with pytest.raises(AttributeError, match="no flag is named warmth"):
        print(options.warmth)


def test_no_command_sets_a_flag_that_it_was_not_given():
    """args.x = … , and defaults for flags that a parser does not have."""
    for path in ROOT.glob("gpt_faster/**/*.py"):
        text = path.read_text()
        assert not re.search(r"^\s*(args|options)\.\w+(, \w+)* = ", text, re.M), path
        assert "set_defaults" not in text, path
