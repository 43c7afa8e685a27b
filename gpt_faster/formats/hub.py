"""A path or a hub name -> where the checkpoint lies; downloads, of old repositories too.

    path = resolve("org/name or path")
"""

from functools import partial
from pathlib import Path

import checkpoint
from checkpoint import UNWANTED, hub_errors

DEFAULT_MODEL = Path(__file__).parents[2] / (
    "checkpoints/SmolLM2-135M-Instruct/SmolLM2-135M-Instruct.Q4_1.gguf")
UNFINISHED = ".download_is_not_finished"            # a file in a directory, while it is so
SIDECARS = ["*.json", "*.jinja", "tokenizer.model", "*.tiktoken"]      # to be had with the weights


def download(repo_id: str, local_dir: Path | None = None, token: str | None = None) -> Path:
    """Fetch what we read of a hub repository (huggingface_hub shows its progress) -> its directory.

    ValueError or OSError as checkpoint.hub_errors().
    """
    from huggingface_hub import HfApi, errors, snapshot_download
    from huggingface_hub.utils import filter_repo_objects

    def all_names():
        try:
            return [file.rfilename for file in HfApi().model_info(repo_id, token=token).siblings]
        except errors.HfHubHTTPError:
            raise
        except Exception:                                  # no network: the cache may have it all
            return None

    with hub_errors(repo_id):
        names = all_names()
        old = names and not any(name.endswith(".safetensors") for name in names)
        wanted = ["*_model*.bin" if old else "*.safetensors", *SIDECARS]
        fetch = partial(snapshot_download, repo_id, local_dir=local_dir, token=token,
                        allow_patterns=wanted, ignore_patterns=UNWANTED)
        expected = filter_repo_objects(names or [], allow_patterns=wanted, ignore_patterns=UNWANTED)
        if local_dir and names:
            directory = fill(local_dir, repo_id, fetch, list(expected))
        else:
            directory = Path(fetch())
    check_finished(directory)          # without the hub its client is content with any directory
    return directory


def fill(directory: Path, repo_id: str, fetch, expected: list[str]) -> Path:
    """Marked as unfinished until all files are there. A second process waits for the first: the
    hub's client begins a file by taking away what another has just finished."""
    from huggingface_hub.utils import WeakFileLock
    directory.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(directory / ".download.lock"):
        (directory / UNFINISHED).write_text(repo_id)
        fetch()
        if all((directory / name).exists() for name in expected):
            (directory / UNFINISHED).unlink()
    return directory


def resolve(name: str | None) -> Path:
    """A path, which wins, or a hub name, downloaded; None: the model that quickstart fetched.

    FileNotFoundError names both readings.
    """
    if name is None and not DEFAULT_MODEL.exists():
        raise FileNotFoundError("no model yet: run `bash scripts/quickstart.sh`, which fetches the "
                                "default one, or give --checkpoint_path")
    return checkpoint.resolve(str(DEFAULT_MODEL if name is None else name), download)


def check_finished(directory: Path) -> None:
    """ValueError where scripts/download.py was ended before all files were there: without the
    smaller ones a model would run, and not know where to stop."""
    if (directory / UNFINISHED).exists():
        repo_id = (directory / UNFINISHED).read_text()
        raise ValueError(f"{directory}: its download was not finished: run `python scripts/"
                         f"download.py --repo_id {repo_id}` again, which goes on")


def output_path(path: Path, name: str) -> Path:
    """As the core's; for a GGUF elsewhere in checkpoints/NAME."""
    if path.suffix == ".gguf" and "checkpoints" not in path.absolute().parts:
        return Path("checkpoints", path.stem, name)
    return checkpoint.output_path(path, name)
