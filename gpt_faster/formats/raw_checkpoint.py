"""RawCheckpoint: what the readers of this room find, beside what the core's find."""

from dataclasses import dataclass

import checkpoint
from gpt_faster.formats.fold import Folds


@dataclass
class RawCheckpoint(checkpoint.RawCheckpoint):
    """Tensors by the names in the file, and how they differ from what the model takes."""

    folds: Folds | None = None                     # None: our own file, everything is folded
    prequantized: bool = False                    # what is one matrix for us may be of two kinds
    mtp: "RawCheckpoint | None" = None             # of a head that drafts (mtp.py)
