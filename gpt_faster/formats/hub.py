"""A path or hub name -> the checkpoint's local path. Downloads, also old .bin repositories.

    path = resolve("org/name or path")
"""

from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import checkpoint
from checkpoint import UNWANTED, hub_errors, some

DEFAULT_MODEL = Path(__file__).parents[2] / (
    "checkpoints/SmolLM2-135M-Instruct/SmolLM2-135M-Instruct.Q4_1.gguf")
UNFINISHED = ".download_is_not_finished"            # marker file of an incomplete download
SIDECARS = ["*.json", "*.jinja", "tokenizer.model*", "tiktoken.model", "*.tiktoken",
            "merges.txt"]                          # downloaded with the weights


def download(repo_id: str, local_dir: Path | None = None, token: str | None = None) -> Path:
    """Download the files of a hub repository that we read -> its directory.

    huggingface_hub shows progress. ValueError or OSError as checkpoint.hub_errors().
    """
    from huggingface_hub import HfApi, errors, snapshot_download
    from huggingface_hub.utils import filter_repo_objects

    def all_names():
        try:
            return [file.rfilename for file in HfApi().model_info(repo_id, token=token).siblings]
        except errors.HfHubHTTPError:
            raise
        except Exception:                                  # no network: the cache may suffice
            return None

    with hub_errors(repo_id):
        names = all_names()
    if problem := names and other_repository(repo_id, names):
        raise ValueError(problem)
    with hub_errors(repo_id):
        old = names and not any(name.endswith(".safetensors") for name in names)
        wanted = ["*_model*.bin" if old else "*.safetensors", *SIDECARS]
        fetch = partial(snapshot_download, repo_id, local_dir=local_dir, token=token,
                        allow_patterns=wanted, ignore_patterns=UNWANTED)
        expected = list(filter_repo_objects(names or [], allow_patterns=wanted,
                                            ignore_patterns=UNWANTED))
        if local_dir and names:
            directory = fill(local_dir, repo_id, fetch, expected)
        else:
            directory = Path(fetch())
    check_finished(directory)          # offline, the hub's client accepts any directory
    return directory


def other_repository(repo_id: str, names: list[str]) -> str:
    """What a repository without weights that we download has, and the next step; "" if it has."""
    if any(name.endswith(".safetensors") or fnmatch(name, "*_model*.bin") for name in names):
        return ""
    if ggufs := sorted(name for name in names if name.endswith(".gguf")):
        return (f"{repo_id} has GGUF files only: `hf download {repo_id} {ggufs[0]}` downloads one "
                f"and says its path, to give instead (of {some(ggufs)})")
    return (f"{repo_id} has no weights that are read (.safetensors, *_model.bin), it has "
            f"{some(sorted(names)) or 'no files'}")


def fill(directory: Path, repo_id: str, fetch, expected: list[str]) -> Path:
    """Download into a directory that is marked incomplete until all files have arrived.

    Locked: the hub's client deletes a file that another process just finished, and restarts it.
    """
    from huggingface_hub.utils import WeakFileLock
    directory.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(directory / ".download.lock"):
        (directory / UNFINISHED).write_text(repo_id)
        fetch()
        if all((directory / name).exists() for name in expected):
            (directory / UNFINISHED).unlink()
    return directory


def resolve(name: str | None) -> Path:
    """A path (tried first) or a hub name to download. None: the default model, from quickstart.sh.

    FileNotFoundError says that it is neither.
    """
    if name is None and not DEFAULT_MODEL.exists():
        raise FileNotFoundError("no default model: run `bash scripts/quickstart.sh` to download "
                                "it, or pass --checkpoint_path")
    return checkpoint.resolve(DEFAULT_MODEL if name is None else name, download)


def check_finished(directory: Path) -> None:
    """ValueError for an incomplete download: without generation_config.json, say, a model runs
    but does not stop."""
    if (directory / UNFINISHED).exists():
        repo_id = (directory / UNFINISHED).read_text()
        raise ValueError(f"{directory}: incomplete download: run `python scripts/"
                         f"download.py --repo_id {repo_id}` again to resume it")


def output_path(path: Path, name: str) -> Path:
    """checkpoint.output_path(), but checkpoints/NAME for a GGUF outside checkpoints/."""
    if path.suffix == ".gguf" and "checkpoints" not in path.absolute().parts:
        return Path("checkpoints", path.stem, name)
    return checkpoint.output_path(path, name)
