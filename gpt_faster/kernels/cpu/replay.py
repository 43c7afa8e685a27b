"""Runs a decode step's operations again for the next token, without Python in between.

A step's weights have passed through the caches, so each of Python's objects is read from memory: 30
small layers cost half a millisecond of it. Where two calls of the model with equal shapes ran
nothing but operations (and the embedding), the next one runs the list of the second: only the
tokens, their positions and the logits' memory are others. Any other call of the model ends that.

    replay.begin(key)                              # the model's call; its parts add() what they run
    replay.end()
    if replay.is_for(key): logits = replay.run(tokens, pos)
"""

import ctypes
import operator
from itertools import repeat

import torch
from torch import Tensor, nn

from gpt_faster.kernels.cpu import native


def key_of(tokens: Tensor, pos: Tensor, logits_to_keep=1, kv_len: int | None = None,
           batch_idx: Tensor | None = None) -> tuple | None:
    """What two calls of the model must have in common, its arguments being those of a step, of all
    rows or of some; None: they are not."""
    B, T = tokens.shape
    of_last = tuple(logits_to_keep.shape) == (B, 1) if isinstance(logits_to_keep, Tensor) else (
        logits_to_keep == 1)
    integers = [tokens, pos] if batch_idx is None else [tokens, pos, batch_idx]
    is_step = (T == 1 and of_last and all(t.dtype == torch.int64 for t in integers)
               and (batch_idx is None or len(pos) == len(batch_idx) == B))
    return (tokens.shape, pos.shape, kv_len, batch_idx is None) if is_step else None


class Replay:
    """Of one model's last decode step."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.is_allowed = False                    # no part of the model runs as written
        self.key = None                            # of the last call
        self.parts = None                          # of this call; None: not recorded
        self.operations = None                     # ctypes array of addresses

    def begin(self, key: tuple | None) -> None:
        """A call of the model begins: the operations' arguments become those of this call."""
        is_second = key is not None and key == self.key
        self.parts = [] if is_second and self.is_allowed else None
        self.key, self.operations = key, None

    def add(self, *part) -> None:
        """Part of the call: InputBuffers; (addresses, [Positions, …], output) of layers; Unembed.
        """
        if self.parts is not None:
            self.parts.append(part)

    def spoil(self) -> None:
        """The call runs something else too."""
        self.parts = None

    def end(self) -> None:
        """The call has ended: keep its operations if they are all that it ran."""
        parts, self.parts = self.parts, None
        if parts is None or list(map(len, parts)) != [1, 3, 1]:
            return
        [inputs], [addresses, positions, out], [unembed] = parts
        slots, masks = zip(*inputs.slots_and_masks)
        fixed = {t.data_ptr() for t in (*inputs.tables, *slots, *masks) if t is not None}
        # a table of which a layer uses a part is copied for each call
        if not all({p.cos, p.sin, p.mask} - {None} <= fixed for p in positions):
            return
        tokens_shape, pos_shape, _, of_all_rows = self.key
        with torch.inference_mode(False):
            self.tokens = torch.empty(tokens_shape, dtype=torch.int64)
            self.pos = torch.empty(pos_shape, dtype=torch.int64)
            self.rows = None if of_all_rows else torch.empty(tokens_shape[0], dtype=torch.int64)
            self.logits = torch.empty(tokens_shape[0], unembed.op.N)           # of likeliest()
        inputs.read_from(self.tokens, self.pos, self.rows)
        for struct in positions:
            struct.set("rows", self.rows)
            if struct.slot not in fixed:           # the position itself
                struct.set("slot", self.pos)
        unembed.op.set("x", out)                   # of which the call may have gathered a copy
        self.inputs, self.unembed = inputs, unembed
        self.draw = native.Draw(kind=native.DRAW, B=tokens_shape[0], V=unembed.op.N,
                                logits=self.logits)
        self.owners = [layer.forward.owner._modules for layer in self.model.layers]
        self.sources = self._sources()
        every = [*inputs.addresses, *addresses, *unembed.addresses]
        self.operations = native.pointers(every)
        self.and_draw = native.pointers([*every, ctypes.addressof(self.draw)])

    def _sources(self) -> list:
        """The objects with buffers at addresses that the operations have."""
        caches = map(dict.get, self.owners, repeat("cache"))
        return [self.model.hidden, self.model.rings, *caches]

    def is_for(self, key: tuple) -> bool:
        return (self.operations is not None and key == self.key
                and all(map(operator.is_, self._sources(), self.sources)))

    def run(self, tokens: Tensor, pos: Tensor, logits_to_keep=1, kv_len: int | None = None,
            batch_idx: Tensor | None = None) -> Tensor:
        """The model's arguments -> fp32 logits [B, 1, V]."""
        logits = torch.empty(len(tokens), 1, self.unembed.op.N)
        self._run(self.operations, tokens, pos, batch_idx, logits)
        return self.model.cap(logits)

    def likeliest(self, tokens: Tensor, pos: Tensor, not_finite: Tensor) -> Tensor:
        """tokens [B, 1], pos, Sampler.not_finite [B, 1] -> the likeliest next tokens [B, 1]. For a
        model that does not cap its logits."""
        following = torch.empty(len(tokens), 1, dtype=torch.int64)
        self.draw.token, self.draw.not_finite = following.data_ptr(), not_finite.data_ptr()
        self._run(self.and_draw, tokens, pos, None, self.logits)
        return following

    def _run(self, operations: ctypes.Array, tokens: Tensor, pos: Tensor, rows: Tensor | None,
             logits: Tensor) -> None:
        for to, value in (self.tokens, tokens), (self.pos, pos), (self.rows, rows):
            if value is not None:                  # copy_() would take far longer
                value = value.contiguous()
                ctypes.memmove(to.data_ptr(), value.data_ptr(), value.nbytes)
        self.inputs.prepare(tokens, pos)
        self.unembed.op.out = logits.data_ptr()
        native.run(operations)
