"""Records hidden states (model.py's HiddenStates) in the middle of a queue of operations.

    model.record = RecordHidden(guard, model, call)
"""

import ctypes

import torch
from torch import Tensor, nn

from gpt_faster.kernels.cpu import native
from gpt_faster.kernels.guard import MethodOverride


class RecordHidden(MethodOverride):
    """Replaces a model's record() between two layers that are queued together."""

    def __init__(self, guard, model: nn.Module, call):
        """call: the layers' CallState."""
        super().__init__(guard, model, "record")
        self.call, self.call_id = call, None
        self.ops = {}                              # layer -> native.Record
        self.positions = native.Positions()        # of this call

    def __call__(self, layer: int, x: Tensor, pos: Tensor, batch_idx: Tensor | None) -> None:
        call = self.call
        is_queued = x is call.out and call.addresses           # x is not computed yet
        if not (self.guard.in_model_call and is_queued):
            self.guard.replay.spoil()
            self.original(layer, x, pos, batch_idx)
            return
        if call.call_id != self.call_id:
            self.call_id = call.call_id
            self._set_positions(x.shape, pos, batch_idx)
        op, states = self.ops.get(layer), self.module.hidden[layer]
        if op is None:
            op = self.ops[layer] = native.Record(kind=native.RECORD, positions=self.positions)
        op.B, op.T, op.D = x.shape
        op.n_row, op.S, _ = states.shape
        op.set("x", x)
        op.set("states", states)
        call.addresses.append(ctypes.addressof(op))

    def _set_positions(self, shape: torch.Size, pos: Tensor, batch_idx: Tensor | None) -> None:
        B, T, _ = shape
        if pos.shape[-1] != T or pos.dim() == 2 and len(pos) not in (1, B):
            raise ValueError(f"positions [{', '.join(map(str, pos.shape))}] do not match tokens "
                             f"[{B}, {T}]")
        pos = pos.long().contiguous()
        self.positions.set("slot", pos)
        self.positions.slot_stride_b = pos.stride(0) if pos.dim() == 2 and len(pos) == B else 0
        rows = None if batch_idx is None else batch_idx.long().contiguous()
        self.positions.set("rows", rows)
        self.call.positions_in_use.append(self.positions)
