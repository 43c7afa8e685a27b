import functools
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
signal.signal(signal.SIGINT, signal.default_int_handler)               # a shell's background jobs, and theirs, ignore Ctrl-C
os.environ["HF_HUB_OFFLINE"] = "1"                         # the tests that mean the hub say so
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["GPT_FASTER_CACHE"] = str(ROOT / ".cache/tests")           # its keys say what a function depends on

import tiny  # noqa: E402

from gpt_faster.formats.load import load_model, read_checkpoint  # noqa: E402

pytest_plugins = ["tier_plugin"]


def pytest_addoption(parser):
    parser.addoption("--kernels", action="store_true",
                     help="tests of kernels fail, and are not skipped, where the core is not the one that they stand for")


def pytest_collection_modifyitems(config, items):
    """A fork's edit of the core is no fault of the kernels: they are not used where it is reached."""
    of_kernels = [item for item in items if item.get_closest_marker("kernels")]
    if config.getoption("kernels") or not of_kernels:
        return
    sys.path.insert(0, str(ROOT / "scripts"))
    import known_sources
    if differing := known_sources.changed_names():
        reason = f"the kernels stand for other code than {', '.join(differing[:3])}: python scripts/known_sources.py"
        for item in of_kernels:
            item.add_marker(pytest.mark.skip(reason=reason))

SMOLLM2 = ROOT / "checkpoints/SmolLM2-135M-Instruct/SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA = ROOT / "checkpoints/gemma-3-270m/gemma-3-270m-q4_k_m.gguf"


@pytest.fixture(scope="session")
def exhaustive(request) -> bool:
    """Is this the tier in which references are made anew and lengths are in full?"""
    return request.config.getoption("--exhaustive")


def threads(n):
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_thread():
    yield from threads(1)


@pytest.fixture
def two_threads():
    """What is compiled or computed differently for several threads; test.sh's processes have one."""
    yield from threads(2)


@pytest.fixture(scope="session")
def families(tmp_path_factory):
    """name -> (directory in the Hub's layout, transformers model), each made once."""
    made = {}

    def get(name):
        if name not in made:
            directory = tmp_path_factory.mktemp(name)
            model = tiny.make(name)
            model.save_pretrained(directory)
            made[name] = directory, model
        return made[name]
    return get


@pytest.fixture(scope="session")
def heads(tmp_path_factory):
    """name -> (directory of a checkpoint with a head that drafts, transformers' model, its head)."""
    @functools.cache
    def get(name):
        directory = tmp_path_factory.mktemp(f"mtp-{name}")
        return directory, *tiny.make_with_head(name, directory)
    return get


@pytest.fixture(scope="session")
def their_tokenizer():
    """path of a GGUF -> transformers' tokenizer of it; Gemma's takes it 20 seconds to read."""
    from transformers import AutoTokenizer
    return functools.cache(lambda path: AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name))


@pytest.fixture(scope="session")
def ours(families):
    """name -> our model of the same weights in fp32; cache not set up."""
    def get(name):
        model = load_model(read_checkpoint(families(name)[0]), torch.float32, "cpu")
        return model
    return get
