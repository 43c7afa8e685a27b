"""A path or a hub name -> where the checkpoint lies; downloads; where to write what is made of it.

    path = resolve("org/name or path")
"""

import errno
import re
from functools import partial
from pathlib import Path

from checkpoint import first_line

DEFAULT_MODEL = Path(__file__).parent.parent / (
    "checkpoints/SmolLM2-135M-Instruct/SmolLM2-135M-Instruct.Q4_1.gguf")
UNWANTED = ["original/*", "onnx/*", "*/*.safetensors", "consolidated*"]
UNFINISHED = ".download_is_not_finished"            # a file in a directory, while it is so
SIDECARS = ["*.json", "*.jinja", "tokenizer.model", "*.tiktoken"]      # to be had with the weights


def download(repo_id: str, local_dir: Path | None = None, token: str | None = None) -> Path:
    """Fetch what we read of a hub repository (huggingface_hub shows its progress) -> its directory.

    ValueError or OSError say in one line what went wrong and what to do.
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

    try:
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
    except errors.GatedRepoError:                          # before RepositoryNotFound, its parent
        problem = (f"{repo_id} is gated: accept its licence at huggingface.co/{repo_id}, then run "
                   "`hf auth login` or set HF_TOKEN")
    except errors.RepositoryNotFoundError:
        problem = (f"the hub has no {repo_id}, or it is private: check the name, or run "
                   "`hf auth login` or set HF_TOKEN")
    except errors.HFValidationError:
        problem = f"'{repo_id}' is not a hub name: expected org/name"
    except errors.HfHubHTTPError as e:
        refused = e.response is not None and e.response.status_code in (401, 403)
        problem = f"the hub failed on {repo_id}, try again later: {first_line(e)}"
        if refused:
            problem = (f"the hub refused the token for {repo_id}: run `hf auth login` again, "
                       "or unset HF_TOKEN")
    except Exception as e:                                 # its HTTP library has kinds of its own
        if getattr(e, "errno", None) == errno.ENOSPC:
            raise OSError(f"the disk is full while downloading {repo_id}: free some space, or set "
                          "HF_HOME to another disk; running it again resumes") from None
        problem = (f"{repo_id} is not in the local cache and the hub cannot be reached: check the "
                   "network and HF_HUB_OFFLINE, or give a path "
                   f"({type(e).__name__}: {first_line(e)})")
    else:
        check_finished(directory)      # without the hub its client is content with any directory
        return directory
    raise ValueError(problem)


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
    name = str(DEFAULT_MODEL if name is None else name)
    if not name.strip():
        raise ValueError("a path or name is empty: an unset variable?")
    path = Path(name).expanduser()
    if path.exists():
        return path
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name):
        raise FileNotFoundError(f"{name}: no such file or directory "
                                "(nor is it a hub name, org/name)")
    try:
        return download(name)
    except (ValueError, OSError) as e:
        raise FileNotFoundError(f"{name}: no such file or directory; "
                                f"read as a hub name: {e}") from None


def check_finished(directory: Path) -> None:
    """ValueError where scripts/download.py was ended before all files were there: without the
    smaller ones a model would run, and not know where to stop."""
    if (directory / UNFINISHED).exists():
        repo_id = (directory / UNFINISHED).read_text()
        raise ValueError(f"{directory}: its download was not finished: run `python scripts/"
                         f"download.py --repo_id {repo_id}` again, which goes on")


def output_path(path: Path, name: str) -> Path:
    """Where to write what is made of `path`: in its directory, or in checkpoints/NAME for a GGUF
    elsewhere, or what the hub's cache holds (…/models--org--name/snapshots/revision)."""
    directory = path if path.is_dir() else path.parent
    if path.suffix == ".gguf" and "checkpoints" not in path.absolute().parts:
        directory = Path("checkpoints", path.stem)
    elif directory.parent.name == "snapshots":
        directory = Path("checkpoints", *directory.parent.parent.name.split("--")[1:])
    return directory / name
