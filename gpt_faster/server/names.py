"""The names under which the server's model is asked for.

    names = model_names(source.path, options.checkpoint_path, options.served_name)
    names[0]                                       # the id that /v1/models says
"""

import re
from pathlib import Path

# File names that say nothing about the model: its directory's name is used.
GENERIC = re.compile(r"(model|pytorch_model|consolidated)([.-].*)?\.(safetensors|bin|pth|pt|json)")


def model_names(path: Path, asked: str | None = None, served: str | None = None) -> list[str]:
    """The id, and other names that requests may give.

    path: the weights, a file or a directory; asked: --checkpoint_path; served: --served_name, which
    replaces all others. The id is a GGUF file's name, else the hub's name org/name where the path
    tells it, else the directory's.
    """
    if served:
        return with_bases([served])
    path = path.absolute()
    directory = path if path.is_dir() else path.parent
    hub = hub_name(directory) or (asked if asked and is_hub_name(asked, path) else None)
    names = [hub, directory.name]
    if path != directory and not GENERIC.fullmatch(path.name):
        names.insert(0, path.name)
    return with_bases([name for name in [*names, asked] if name])


def hub_name(directory: Path) -> str | None:
    """Of a directory in the hub's cache (models--org--name/snapshots/revision) or in checkpoints/,
    where scripts/download.py writes org/name."""
    parts = directory.parts
    if len(parts) > 2 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        return "/".join(parts[-3].split("--")[1:])
    if len(parts) > 3 and parts[-3] == "checkpoints":
        return f"{parts[-2]}/{parts[-1]}"
    return None


def is_hub_name(name: str, path: Path) -> bool:
    """Whether --checkpoint_path is a hub name and no path."""
    return name.count("/") == 1 and not Path(name).expanduser().exists()


def with_bases(names: list[str]) -> list[str]:
    """Each name, then each without its organization and without a file's suffix."""
    bases = [name.rstrip("/").rpartition("/")[2] for name in names]
    stems = [re.sub(r"\.(gguf|safetensors|pth|pt|bin)$", "", name) for name in [*names, *bases]]
    return [name for name in dict.fromkeys([*names, *bases, *stems]) if name]
