"""The cache of recurrent layers: states after the last positions, in a ring of slots.

The state after position p is in slot p mod n, like the keys of a window. A call that starts at p
continues from slot (p - 1) mod n, or from zeros if p is 0. Rejected drafts are overwritten like
stale keys. An idle row is at position 0, so each call restarts it from zeros.

    max_rejected 2: 4 slots  | 4 5 6 3 |   the call 4 5 6 continued from 3; if 5 and 6 are rejected,
                                           the next call starts at 5 and continues from 4

Right padding has one position, the row's next, and changes only that position's slot.
Knows no layer's math: scan() takes the recurrence in two forms.
"""

from collections.abc import Callable

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


def convolve(mixed: Tensor, taps: Tensor, bias: Tensor | None) -> Tensor:
    """The causal depthwise convolution of mixed [B, n_tap - 1 + T, C], which starts with the inputs
    before the call; taps [C, n_tap], bias [C], fp32 -> [B, T, C]."""
    T = mixed.shape[1] - taps.shape[1] + 1
    y = 0 if bias is None else bias
    for i, tap in enumerate(taps.unbind(-1)):
        y = y + mixed[:, i:i + T].float() * tap
    return y


def start(cache: "StateRing | None", new: Tensor, pos: Tensor, batch_idx: Tensor | None, n_tap: int,
          state: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """What a call at pos [B, T] begins from, zeros without a cache: the convolution's inputs with
    those before the call [B, n_tap - 1 + T, C], from its new ones [B, T, C]; the state [B, *state],
    fp32; and in_order [B, T, 1], False at padding."""
    B, T, _ = new.shape
    if cache is None:
        earlier = new.new_zeros(B, n_tap - 1, new.shape[-1])
        first = new.new_zeros(B, *state, dtype=torch.float32)
    else:
        earlier, first = cache.read(pos, batch_idx)
    in_order = pos == pos[:, :1] + torch.arange(T, device=new.device)
    return torch.cat((earlier, new), dim=1), first, in_order[..., None]


def gather(t: Tensor, index: Tensor) -> Tensor:
    """t [B, T, …] at index [B, n], clamped to 0 -> [B, n, …]"""
    row = torch.arange(len(t), device=t.device)[:, None]
    return t[row, index.clamp(min=0)]


def masked(t: Tensor, is_token: Tensor) -> Tensor:
    """t [B, T, …] where is_token [B, T], else 0."""
    return torch.where(is_token.view(*is_token.shape, *[1] * (t.dim() - 2)), t, 0)


def scan(step_by_step: Callable, chunked: Callable, inputs: tuple, n_rate: int, state: Tensor,
         in_order: Tensor, n: int) -> tuple[Tensor, list[Tensor]]:
    """Run a recurrence -> its outputs y [B, T, …], and the states after each of the row's last n
    tokens.

    inputs: of T tokens, [B, T, …] each. A token changes no state if the last n_rate of them are
    zero there, as they are at padding. in_order [B, T, 1]: False at padding. step_by_step(*inputs,
    state) -> y and the state after each token; chunked(*inputs, state) -> y and the last state. The
    last n tokens run step by step, those before them in chunks.
    """
    T = inputs[0].shape[1]
    if T <= n:
        return step_by_step(*inputs, state)
    n_token = in_order.sum(1)                                              # [B, 1]
    first = n_token - n                            # first of the last n; negative in shorter rows
    place = torch.arange(T, device=state.device)
    others, rates = inputs[:-n_rate], inputs[-n_rate:]
    y, state = chunked(*others, *(masked(t, place < first) for t in rates), state)
    index = last_tokens(n_token, n)                                        # [B, n]
    others, rates = ([gather(t, index) for t in part] for part in (others, rates))
    y_last, states = step_by_step(*others, *(masked(t, index >= 0) for t in rates), state)
    index = place - first                                                  # [B, T]
    index = torch.where(index < 0, index + first, T + index.clamp(max=n - 1))
    return gather(torch.cat((y, y_last), dim=1), index), states


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
