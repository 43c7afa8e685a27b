"""A CPU's operations before a model's layers and after them: embedding, angles and masks of a few
tokens; the logits of one position of each row.

    model.embed_inputs, model.unembed = Enter(model), Leave(model)
"""

import ctypes

import torch
from torch import Tensor, nn

from gpt_faster.kernels.cpu import native
from gpt_faster.kernels.cpu.linears import (
    OperationsEmbedding,
    are_floats,
    arguments,
    fits_bias,
    fits_norm,
    is_packed,
    norm_struct,
)
from gpt_faster.kernels.guard import Stead
from gpt_faster.layers.embedding import ScaledEmbedding
from tp import shared_by

FEW = 64                                           # tokens of which a call may be a decoding step's


class Inputs:
    """What a step's layers are given, in memory that stays; for tokens [B, T] and kv_len."""

    def __init__(self, model: nn.Module, B: int, T: int, own_pos: bool, kv_len: int):
        half = model.freq.shape[1]
        lead = (B, 1, T) if own_pos else (T,)
        self.x = torch.empty(B, T, model.cfg.dim, dtype=model.dtype)
        self.angles, self.masks, self.parts = [], [], []
        self.model = model
        self.amplitude = torch.empty(model.amplitude.shape)    # fp32, whatever the model's dtype
        n = B * T if own_pos else T
        for freq, amplitude in zip(model.freq, self.amplitude):
            cos, sin = torch.empty(2, *lead, half, dtype=torch.float32)
            self.parts += [cos, sin]
            self.angles.append(native.RopeTable(
                kind=native.ROPE_TABLE, n=n, half=half, freq=freq, amplitude=amplitude, cos=cos,
                sin=sin))
        for window in model.windows:
            mask = torch.empty(*lead, kv_len, dtype=torch.bool)
            self.parts.append(mask)
            self.masks.append(native.Mask(
                kind=native.MASK, B=1, T=n, n_key=kv_len, window=window or 0, mask=mask))
        embed = model.embed
        scale = torch.full((), embed_scale_of(model), dtype=model.dtype).item()
        self.embed = self.scales = None
        if isinstance(embed, OperationsEmbedding):
            if embed.scales is not None:
                self.scales = torch.empty(embed.scales.shape)  # fp32
            kind, weight, _, _ = arguments(embed.packed, None, 0)
            self.embed = native.Embed(
                kind=native.EMBED, format=kind, n=B * T, K=model.cfg.dim, factor=scale,
                n_vocab=model.cfg.vocab_size, weight=weight, scales=self.scales, out=self.x)
        ops = [*self.angles, *self.masks, *([self.embed] if self.embed else [])]
        self.addresses = [ctypes.addressof(op) for op in ops]

    def fill(self, tokens: Tensor, pos: Tensor) -> None:
        self.amplitude.copy_(self.model.amplitude)             # at each call: an edit counts
        if self.scales is not None:
            self.scales.copy_(self.model.embed.scales)
        for op in (*self.angles, *self.masks):
            op.set("pos", pos)
        if self.embed:
            self.embed.set("ids", tokens)
        native.run(self.addresses, n_thread=1)


class Enter(Stead):
    """embed_inputs of few tokens, in its place."""

    def __init__(self, guard, model: nn.Module):
        super().__init__(guard, model, "embed_inputs")
        self.model = model
        self.kept = {}                             # shapes -> Inputs

    @staticmethod
    def fits(model: nn.Module) -> bool:
        return not model.rings and embed_scale_of(model) is not None and are_floats(model.freq)

    def __call__(self, tokens, pos, kv_len, batch_idx=None) -> tuple[Tensor, ...]:
        is_long = tokens.dtype == pos.dtype == torch.int64
        if (not self.guard.inside or tokens.numel() > FEW or batch_idx is not None
                or self.model.rings or not is_long):
            return self.plain(tokens, pos, kv_len, batch_idx)
        tokens, pos = tokens.contiguous(), pos.contiguous()
        key = *tokens.shape, pos.dim() == 2, kv_len
        inputs = self.kept.get(key)
        if inputs is None:
            if len(self.kept) > FEW:
                self.kept.clear()
            with torch.inference_mode(False), torch.no_grad():
                inputs = self.kept[key] = Inputs(self.model, *key)
        inputs.fill(tokens, pos)
        x, parts, n = inputs.x, inputs.parts, 2 * len(inputs.angles)
        if inputs.embed is None:
            x = self.model.embed_tokens(tokens, pos)
        masks = (part for mask in parts[n:] for part in (pos, mask))
        own = [] if isinstance(self.model.per_layer, nn.Identity) else [
            self.model.per_layer(tokens, x)]
        return x, *parts[:n], *masks, *own


def embed_scale_of(model: nn.Module) -> float | None:
    """What embeddings are multiplied by; None where they go through anything else."""
    parts = [getattr(model, name) for name in model.after_embed]
    if not parts:
        return 1.0
    return parts[0].factor if [type(part) for part in parts] == [ScaledEmbedding] else None


class Leave(Stead):
    """unembed of a position of each row, in its place."""

    def __init__(self, guard, model: nn.Module):
        super().__init__(guard, model, "unembed")
        self.model, head = model, model.head
        weights = arguments(head.packed, head.scales, head.shape[1])
        self.op = native.linear(*weights, head.shape, head.bias, norm=norm_struct(model.norm),
                                 x_bits=native.x_bits(model.dtype))
        self.addresses = [ctypes.addressof(self.op)]

    @staticmethod
    def fits(model: nn.Module) -> bool:
        return (is_packed(model.head) and not shared_by(model.head) and fits_norm(model.norm)
                and fits_bias(model.head))

    def __call__(self, x: Tensor) -> Tensor:
        if not self.guard.inside or x.shape[1] > 1:
            return self.plain(x)
        x, op = x.contiguous(), self.op
        logits = torch.empty(x.shape[0], 1, op.N)
        op.M = x.shape[0]
        op.set("x", x)
        op.set("out", logits)
        native.run(self.addresses)
        return self.model.cap(logits)
