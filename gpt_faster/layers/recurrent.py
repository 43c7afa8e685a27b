"""The cache of recurrent layers: states after the last positions, in a ring of slots.

The state after position p is in slot p mod n, like the keys of a window. A call that starts at p
continues from slot (p - 1) mod n, or from zeros if p is 0. Rejected drafts are overwritten like
stale keys. An idle row is at position 0, so each call restarts it from zeros.

    max_rejected 2: 4 slots  | 4 5 6 3 |   the call 4 5 6 continued from 3; if 5 and 6 are rejected,
                                           the next call starts at 5 and continues from 4

Right padding has one position, the row's next, and changes only that position's slot.
Knows no layer's math.
"""

import torch
from torch import Tensor, nn

from model import row_index


def max_rewind(model: nn.Module) -> int | None:
    """How many of the last positions can be rewound; None: any number (no recurrent layers)."""
    rings = [m for m in model.modules() if isinstance(m, StateRing)]
    return min((ring.n_slot - 2 for ring in rings), default=None)


def last_tokens(n_token: Tensor, n: int) -> Tensor:
    """Indices [B, n] of each row's last n of n_token [B, 1] tokens; negative if it has fewer."""
    return n_token - n + torch.arange(n, device=n_token.device)


class StateRing(nn.Module):
    """Rings of fp32 states and of the last inputs of a causal convolution, indexed by position."""

    def __init__(self, batch_size: int, max_rejected: int, state: tuple[int, ...], n_input: int,
                 n_tap: int, dtype: torch.dtype, device):
        """max_rejected: how many of a call's last tokens may be rejected.

        state: shape per row; n_input: channels of the convolution; n_tap: its kernel size.
        """
        super().__init__()
        self.n_slot = max_rejected + 2             # one for padding
        self.n_before = n_tap - 1
        inputs = batch_size, self.n_slot + n_tap - 2, n_input
        self.register_buffer("inputs", torch.zeros(inputs, dtype=dtype, device=device),
                             persistent=False)
        states = torch.zeros(batch_size, self.n_slot, *state, dtype=torch.float32, device=device)
        self.register_buffer("states", states, persistent=False)

    def read(self, pos, batch_idx):
        """The inputs [B, n_tap - 1, C] and state [B, …] from which a call at pos [B, T] starts."""
        start, row = pos[:, :1], row_index(pos, batch_idx)
        before = start + torch.arange(-self.n_before, 0, device=pos.device)
        inputs = self.inputs[row, before % self.inputs.shape[1]]
        inputs = torch.where((before >= 0)[..., None], inputs, 0)
        state = self.states[row[:, 0], (start[:, 0] - 1) % self.n_slot]
        is_start = (start == 0).view(-1, *[1] * (state.dim() - 1))
        return inputs, torch.where(is_start, 0, state)

    def write(self, pos, n_token, inputs, states, batch_idx):
        """Store the result of a call at pos [B, T] with n_token [B] tokens that are not padding.

        inputs [B, n_tap - 1 + T, C]: the convolution's inputs, starting with those of read();
        states: of all T tokens, or of each row's last n_slot.
        """
        row, n_token = row_index(pos, batch_idx), n_token[:, None]

        def last(n):                               # indices in the call, and positions [B, n]
            if pos.shape[1] <= n:
                return torch.arange(pos.shape[1], device=pos.device).expand_as(pos), pos
            index = last_tokens(n_token, n)
            return index, pos[:, :1] + index

        index, position = last(self.inputs.shape[1])
        index = (index + self.n_before).clamp(min=0)           # clamped entries are never read
        last_inputs = inputs[torch.arange(len(pos), device=pos.device)[:, None], index]
        self.inputs[row, position % self.inputs.shape[1]] = last_inputs
        _, position = last(self.n_slot)
        for slot, state in zip((position % self.n_slot).unbind(1), states):
            self.states[row[:, 0], slot] = state
