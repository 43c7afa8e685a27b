"""The model's name in the API and its entry in /v1/models.

    card = ModelCard(session); card.fields; card.accepts("org/name")
"""

import hashlib
import os
import time
from pathlib import Path

import torch

from gpt_faster.server.version import VERSION, commit

# Flags that decide, with the model, about the text that a request with a seed gets
DECISIVE = ("adapter", "quantize", "groupsize", "quantize_head", "activation_bits", "speculate",
            "draft_checkpoint_path", "temperature", "top_k", "top_p", "min_p",
            "repetition_penalty", "tool_format", "system_prompt", "chat_template_kwargs")


def folder_of(path: Path) -> Path:
    path = Path(os.path.abspath(path))             # "." has no name
    return path.parent if path.is_file() else path


def model_name(path: Path) -> str:
    """A GGUF file's name; otherwise the hub's name, or the directory's.

    path: a checkpoint's directory or file, perhaps in the hub's cache, whose directories are named
    models--org--name/snapshots/COMMIT.
    """
    if path.suffix == ".gguf":
        return path.name
    folder = folder_of(path)
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return folder.name


class ModelCard:
    """fields: the entry. fingerprint: changes when the same request may get another text."""

    def __init__(self, session):
        options, path = session.options, session.source.path
        root = model_name(path)
        self.name = options.served_name or root
        self.aliases = {self.name}
        if not options.served_name:
            self.aliases |= {folder_of(path).name, root.removesuffix(".gguf"), root.split("/")[-1],
                             options.checkpoint_path}
        self.fields = dict(id=self.name, object="model", created=int(time.time()),
                           owned_by="gpt-faster", root=root, parent=None,
                           max_model_len=session.length)
        state = [VERSION, commit(), torch.__version__, root, str(session.dtype),
                 str(session.device), session.engine, *(getattr(options, n) for n in DECISIVE)]
        self.fingerprint = f"fp_{hashlib.sha256(repr(state).encode()).hexdigest()[:12]}"

    def accepts(self, name: str | None) -> bool:
        """Whether a request may name the model so. None: it names none."""
        return name is None or name in self.aliases
