"""Lists of numbers to a device, which is not waited for.

    index = to_device([0, 2], torch.device("cuda"))
"""

import torch
from torch import Tensor


def to_device(values: list, device: torch.device) -> Tensor:
    """torch.tensor(values) there. A GPU copies pinned memory when it comes to it."""
    t = torch.tensor(values)
    return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t.to(device)
