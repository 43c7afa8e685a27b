"""RawCheckpoint: what a reader of formats/ returns, checkpoint.RawCheckpoint plus folds and MTP."""

from dataclasses import dataclass

import checkpoint
from gpt_faster.formats.fold import Folds


@dataclass
class RawCheckpoint(checkpoint.RawCheckpoint):
    """Tensors by their names in the file, and the folds they need."""

    folds: Folds | None = None                     # None: our own file, already folded
    prequantized: bool = False                     # fused linears may have different schemes
    mtp: "RawCheckpoint | None" = None             # the MTP head (mtp.py)
