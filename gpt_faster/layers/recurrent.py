"""What a layer remembers instead of keys: the states after its last positions, in a ring of slots.

The state after position p is in slot p mod n, as a window's keys are: position is the mask here
too. A call that begins at p goes on from slot (p - 1) mod n, or from zeros where p is 0. Drafts
that were rejected are overwritten as stale keys are; a row that is not in use, at position 0,
begins anew each time.

    max_rejected 2: 4 slots  | 4 5 6 3 |   the call 4 5 6 went on from 3; were 5 and 6 rejected,
                                           the next one begins at 5 and goes on from 4

Padding on the right stands at one position, the row's next. It changes no state but that slot.
Knows no layer's math.
"""

import torch
from torch import Tensor, nn

from model import row_index


def max_rewind(model: nn.Module) -> int | None:
    """How many of the last positions written can be taken back; None: any, as keys can."""
    rings = [m for m in model.modules() if isinstance(m, StateRing)]
    return min((ring.n_slot - 2 for ring in rings), default=None)


def last_tokens(n_token: Tensor, n: int) -> Tensor:
    """n_token [B, 1] in each row -> its last n indices [B, n], negative where it has fewer."""
    return n_token - n + torch.arange(n, device=n_token.device)


class StateRing(nn.Module):
    """States in fp32 and the last inputs of a causal convolution, each in slots by position."""

    def __init__(self, batch_size: int, max_rejected: int, state: tuple[int, ...], n_input: int,
                 n_tap: int, dtype: torch.dtype, device):
        """max_rejected: of a call's tokens so many may turn out not to count.

        state: a row's shape; n_input: channels of the convolution, which sees n_tap tokens.
        """
        super().__init__()
        self.n_slot = max_rejected + 2             # one more for padding
        self.n_before = n_tap - 1
        inputs = batch_size, self.n_slot + n_tap - 2, n_input
        self.register_buffer("inputs", torch.zeros(inputs, dtype=dtype, device=device),
                             persistent=False)
        states = torch.zeros(batch_size, self.n_slot, *state, dtype=torch.float32, device=device)
        self.register_buffer("states", states, persistent=False)

    def read(self, pos, batch_idx):
        """What a call at pos [B, T] goes on from -> inputs [B, n_tap - 1, C], state [B, …]."""
        start, row = pos[:, :1], row_index(pos, batch_idx)
        before = start + torch.arange(-self.n_before, 0, device=pos.device)
        inputs = self.inputs[row, before % self.inputs.shape[1]]
        inputs = torch.where((before >= 0)[..., None], inputs, 0)
        state = self.states[row[:, 0], (start[:, 0] - 1) % self.n_slot]
        begins = (start == 0).view(-1, *[1] * (state.dim() - 1))
        return inputs, torch.where(begins, 0, state)

    def write(self, pos, n_token, inputs, states, batch_idx):
        """After a call at pos [B, T], of which n_token [B] count.

        inputs [B, n_tap - 1 + T, C]: the convolution's, with what read() gave before them; states:
        of all T tokens, or of each row's last n_slot.
        """
        row, n_token = row_index(pos, batch_idx), n_token[:, None]

        def newest(n):                             # places in the call, their positions [B, n]
            if pos.shape[1] <= n:
                return torch.arange(pos.shape[1], device=pos.device).expand_as(pos), pos
            place = last_tokens(n_token, n)
            return place, pos[:, :1] + place

        place, at = newest(self.inputs.shape[1])   # beyond read()'s nothing is needed: any will do
        place = (place + self.n_before).clamp(min=0)
        kept = inputs[torch.arange(len(pos), device=pos.device)[:, None], place]
        self.inputs[row, at % self.inputs.shape[1]] = kept
        _, at = newest(self.n_slot)
        for slot, state in zip((at % self.n_slot).unbind(1), states):
            self.states[row[:, 0], slot] = state
