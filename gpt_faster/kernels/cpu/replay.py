"""Runs a decode step's operations again for the next token, without Python in between.

A step's weights have passed through the caches, so each of Python's objects is read from memory: 30
small layers cost half a millisecond of it. Where two calls of the model with equal shapes ran
nothing but operations (and the embedding), the next one runs the list of the second: only the
tokens, their positions and the logits' memory are others. Any other call of the model ends that.

    replay.begin(key)                              # the model's call; its parts add() what they run
    replay.end()
    if replay.is_for(key): logits = replay.run(tokens, pos)
"""

import torch
from torch import Tensor, nn

from gpt_faster.kernels.cpu import native


def key_of(tokens: Tensor, pos: Tensor, logits_to_keep=1, kv_len: int | None = None,
           batch_idx: Tensor | None = None) -> tuple | None:
    """What two calls of the model must have in common, its arguments being those of a step for all
    rows; None: they are not."""
    is_step = (tokens.shape[-1] == 1 and type(logits_to_keep) is int and logits_to_keep == 1
               and batch_idx is None and tokens.dtype == pos.dtype == torch.int64)
    return (tokens.shape, pos.shape, kv_len) if is_step else None


class Replay:
    """Of one model's last decode step."""

    def __init__(self, model: nn.Module):
        self.model, self.is_allowed = model, False
        self.key = None                            # of the last call
        self.parts = None                          # of this call; None: not recorded
        self.operations = None                     # ctypes array of addresses

    def begin(self, key: tuple | None) -> None:
        """A call of the model begins: the operations' arguments become those of this call."""
        is_second = key is not None and key == self.key
        self.parts = [] if is_second and self.is_allowed else None
        self.key, self.operations = key, None

    def add(self, *part) -> None:
        """Part of the call: InputBuffers; (addresses, Positions, …) of layers; Unembed."""
        if self.parts is not None:
            self.parts.append(part)

    def spoil(self) -> None:
        """The call runs something else too."""
        self.parts = None

    def end(self) -> None:
        """The call has ended: keep its operations if they are all that it ran."""
        parts, self.parts = self.parts, None
        if parts is None or list(map(len, parts)) != [1, 2, 1]:
            return
        [inputs], [addresses, positions], [unembed] = parts
        # a table of which a layer uses a part is copied for each call
        tables = {t.data_ptr() for t in inputs.outputs}
        if not all({p.cos, p.sin, p.mask} - {None} <= tables for p in positions):
            return
        (B, T), pos_shape, _ = self.key
        with torch.inference_mode(False):
            self.tokens = torch.empty(B, T, dtype=torch.int64)
            self.pos = torch.empty(pos_shape, dtype=torch.int64)
        inputs.read_from(self.tokens, self.pos)
        for struct in positions:
            struct.set("slot", self.pos)
        self.inputs, self.unembed = inputs, unembed
        self.hidden = self.model.hidden            # another object after setup_cache()
        self.operations = native.pointers([*inputs.addresses, *addresses, *unembed.addresses])

    def is_for(self, key: tuple) -> bool:
        return (self.operations is not None and key == self.key
                and self.model.hidden is self.hidden)

    def run(self, tokens: Tensor, pos: Tensor, *_, **others) -> Tensor:
        """The model's arguments -> fp32 logits [B, 1, V]."""
        self.tokens.copy_(tokens)
        self.pos.copy_(pos)
        self.inputs.prepare(tokens, pos)
        op = self.unembed.op
        logits = torch.empty(len(tokens), 1, op.N)
        op.set("out", logits)
        native.run(self.operations)
        return self.model.cap(logits)
