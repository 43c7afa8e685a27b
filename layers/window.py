"""The cache of layers that look back over a window only: a ring of slots, and whose they are.

    ring = Ring(batch_size, n_slots(window, length, longest_call), device)
    slot, positions = ring(pos, kv_len, batch_idx)
"""

import torch
from torch import Tensor, nn


def n_slots(window: int | None, length: int, longest_call: int) -> int:
    """Cache slots of a layer. A window's are a ring, in which position p is at p mod n_slots.

    One call's tokens, padding and rejected drafts among them, must not overwrite a key that its
    first query still sees:

        window 3, calls of 2: 4 slots    | 4 5 2 3 |    4 and 5 replaced 0 and 1; 4 sees 2, 3, 4
    """
    return length if window is None else min(length, window + longest_call - 1)


class Ring(nn.Module):
    """Which position each slot of a window's layers has: the same in all of them."""

    def __init__(self, batch_size: int, n_slot: int, device):
        super().__init__()
        positions = torch.full((batch_size, n_slot), torch.iinfo(torch.int64).max, device=device)
        self.register_buffer("slot_positions", positions, persistent=False)

    def forward(self, pos, kv_len, batch_idx):
        """pos [T] or [B, T] -> its slots, and the positions in the first kv_len slots [B, S]."""
        slot = pos % self.slot_positions.shape[1]
        if slot.dim() == 1:
            self.slot_positions[:, slot] = pos
        else:
            self.slot_positions[row_index(slot, batch_idx), slot] = pos
        positions = self.slot_positions if batch_idx is None else self.slot_positions[batch_idx]
        return slot, positions[:, :kv_len]


def row_index(slot: Tensor, batch_idx: Tensor | None) -> Tensor:
    """Rows of the cache [B, 1], to index it together with slot [B, T]."""
    if batch_idx is None:
        batch_idx = torch.arange(len(slot), device=slot.device)
    return batch_idx[:, None]
