"""The model's name in the API and its entry in /v1/models.

    card = ModelCard(session); card.fields; card.accepts("org/name")
"""

import hashlib
import time

import torch

from gpt_faster.server.names import model_names
from gpt_faster.version import VERSION, commit

# Flags that decide, with the model, about the text that a request with a seed gets
DECISIVE = ("adapter", "quantize", "groupsize", "quantize_head", "activation_bits", "speculate",
            "draft_checkpoint_path", "temperature", "top_k", "top_p", "min_p",
            "repetition_penalty", "tool_format", "system_prompt", "chat_template_kwargs")


class ModelCard:
    """fields: the entry. fingerprint: changes when the same request may get another text."""

    def __init__(self, session):
        options, path = session.options, session.source.path
        root = model_names(path, options.checkpoint_path)[0]
        names = model_names(path, options.checkpoint_path, options.served_name)
        self.name, self.names = names[0], frozenset(names)
        self.fields = dict(id=self.name, object="model", created=int(time.time()),
                           owned_by="gpt-faster", root=root, parent=None,
                           max_model_len=session.length)
        state = [VERSION, commit(), torch.__version__, root, str(session.dtype),
                 str(session.device), session.engine, *(getattr(options, n) for n in DECISIVE)]
        self.fingerprint = f"fp_{hashlib.sha256(repr(state).encode()).hexdigest()[:12]}"

    def accepts(self, name: str | None) -> bool:
        """Whether a request may name the model so. None, and empty: it names none."""
        return not name or name in self.names
