"""The model's entry in /v1/models, and what its answers depend on.

    card = model_card(session, name); fingerprint(session)     # "fp_e49879f2fc23"
"""

import hashlib
import time

import torch

from gpt_faster.server.names import model_names
from gpt_faster.server.version import VERSION, commit

# Flags that decide, with the model, about the text that a request with a seed gets
DECISIVE = ("adapter", "quantize", "groupsize", "quantize_head", "activation_bits", "speculate",
            "draft_checkpoint_path", "temperature", "top_k", "top_p", "min_p",
            "repetition_penalty", "tool_format", "system_prompt", "chat_template_kwargs")


def model_card(session, name: str) -> dict:
    """OpenAI's fields, and vLLM's root, parent and max_model_len."""
    return dict(id=name, object="model", created=int(time.time()), owned_by="gpt-faster",
                root=root_name(session), parent=None, max_model_len=session.length)


def fingerprint(session) -> str:
    """It changes when the same request may get another text."""
    flags = [getattr(session.options, name) for name in DECISIVE]
    state = [VERSION, commit(), torch.__version__, root_name(session), str(session.dtype),
             str(session.device), session.engine, *flags]
    return f"fp_{hashlib.sha256(repr(state).encode()).hexdigest()[:12]}"


def root_name(session) -> str:
    """The model's name, whatever --served_name says."""
    return model_names(session.source.path, session.options.checkpoint_path)[0]
