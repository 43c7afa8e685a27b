"""Native operations before and after a model's layers: embedding, RoPE tables and masks for few
tokens; the logits of one position per row.

    model.embed_inputs, model.unembed = EmbedInputs(guard, model), Unembed(guard, model)
"""

import ctypes

import torch
from torch import Tensor, nn

from gpt_faster.kernels.cpu import native
from gpt_faster.kernels.cpu.linears import (
    OperationsEmbedding,
    is_fp32_on_cpu,
    is_packed,
    norm_struct,
    supports_bias,
    supports_norm,
    weight_args,
)
from gpt_faster.kernels.guard import MethodOverride
from gpt_faster.layers.embedding import ScaledEmbedding
from tp import shared_by

MAX_DECODE_TOKENS = 64                             # B T of a call that counts as a decode step
MAX_SHAPES = 64                                    # cached InputBuffers


class InputBuffers:
    """The layers' inputs for tokens [B, T] and kv_len: preallocated, rewritten by each step."""

    def __init__(self, model: nn.Module, B: int, T: int, per_row_pos: bool, kv_len: int):
        half = model.freq.shape[1]
        batch_shape = (B, 1, T) if per_row_pos else (T,)
        self.x = torch.empty(B, T, model.cfg.dim, dtype=model.dtype)
        self.angles, self.masks, self.ring_masks = [], [], []
        self.tables, self.slots_and_masks = [], []             # slot None: the position itself
        self.model, self.rings = model, model.rings            # new after setup_cache()
        self.amplitude = torch.empty(model.amplitude.shape)    # fp32 in every model
        n = B * T if per_row_pos else T
        for freq, amplitude in zip(model.freq, self.amplitude):
            cos, sin = torch.empty(2, *batch_shape, half, dtype=torch.float32)
            self.tables += [cos, sin]
            self.angles.append(native.RopeTable(
                kind=native.ROPE_TABLE, n=n, half=half, freq=freq, amplitude=amplitude, cos=cos,
                sin=sin))
        for window in model.windows:
            slot, mask = None, torch.empty(*batch_shape, kv_len, dtype=torch.bool)
            op = native.Mask(kind=native.MASK, B=1, T=n, n_key=kv_len, window=window or 0,
                             mask=mask)
            if str(window) in model.rings:
                stored = model.rings[str(window)].slot_positions
                n_slot, n_key = stored.shape[1], min(kv_len, stored.shape[1])
                slot = torch.empty((B, T) if per_row_pos else (T,), dtype=torch.int64)
                mask = torch.empty(B, 1, T, n_key, dtype=torch.bool)
                op = native.RingMask(
                    kind=native.RING_MASK, B=B, T=T, n_slot=n_slot, n_key=n_key, window=window,
                    pos_stride=T if per_row_pos else 0, n_row=len(stored), stored=stored,
                    slot=slot, mask=mask)
                self.ring_masks.append(op)
            self.masks.append(op)
            self.slots_and_masks.append((slot, mask))
        embed = model.embed
        scale = torch.full((), embed_scale_of(model), dtype=model.dtype).item()
        self.embed = self.scales = None
        if isinstance(embed, OperationsEmbedding):
            scales = embed.scales
            if scales is not None and scales.dtype not in native.TYPES:
                self.scales = scales = torch.empty(scales.shape)
            kind, weight, _, _ = weight_args(embed.packed, None, 0)
            self.embed = native.Embed(
                kind=native.EMBED, format=kind, n=B * T, K=model.cfg.dim, factor=scale,
                n_vocab=model.cfg.vocab_size, weight=weight, scales=scales, out=self.x)
        ops = [*self.angles, *self.masks, *([self.embed] if self.embed else [])]
        self.addresses = [ctypes.addressof(op) for op in ops]

    def fill(self, tokens: Tensor, pos: Tensor, batch_idx: Tensor | None) -> None:
        self.prepare(tokens, pos)
        self.read_from(tokens, pos, batch_idx)
        native.run(self.addresses, n_thread=1)

    def prepare(self, tokens: Tensor, pos: Tensor) -> None:
        """What the operations do not: copy what a user may have edited in place since the last
        call, and embed tokens if the embedding is not the packed output layer."""
        self.amplitude.copy_(self.model.amplitude)
        if self.scales is not None:
            self.scales.copy_(self.model.embed.scales)
        if self.embed is None:
            self.x.copy_(self.model.embed_tokens(tokens, pos))

    def read_from(self, tokens: Tensor, pos: Tensor, batch_idx: Tensor | None) -> None:
        for op in (*self.angles, *self.masks):
            op.set("pos", pos)
        for op in self.ring_masks:
            op.set("rows", batch_idx)
        if self.embed:
            self.embed.set("ids", tokens)


class EmbedInputs(MethodOverride):
    """Replaces embed_inputs for up to MAX_DECODE_TOKENS tokens."""

    def __init__(self, guard, model: nn.Module):
        super().__init__(guard, model, "embed_inputs")
        self.model = model
        self.buffers = {}                          # shapes -> InputBuffers

    @staticmethod
    def supports(model: nn.Module) -> bool:
        return embed_scale_of(model) is not None and is_fp32_on_cpu(model.freq)

    def __call__(self, tokens, pos, kv_len, batch_idx=None) -> tuple[Tensor, ...]:
        integers = [t for t in (tokens, pos, batch_idx) if t is not None]
        is_long = all(t.dtype == torch.int64 for t in integers)
        is_decode = tokens.numel() <= MAX_DECODE_TOKENS
        has_rows = batch_idx is not None or all(
            len(ring.slot_positions) == len(tokens) for ring in self.model.rings.values())
        if not (self.guard.in_model_call and is_decode and is_long and has_rows):
            return self.original(tokens, pos, kv_len, batch_idx)
        tokens, pos = tokens.contiguous(), pos.contiguous()
        batch_idx = None if batch_idx is None else batch_idx.contiguous()
        key = *tokens.shape, pos.dim() == 2, kv_len
        if not self.guard.replay.is_allowed:       # parts that run as written may keep them
            self.buffers.clear()
        inputs = self.buffers.get(key)
        if inputs is None or inputs.rings is not self.model.rings:
            if len(self.buffers) > MAX_SHAPES:
                self.buffers.clear()
            with torch.inference_mode(False), torch.no_grad():
                inputs = self.buffers[key] = InputBuffers(self.model, *key)
        inputs.fill(tokens, pos, batch_idx)
        self.guard.replay.add(inputs)
        masks = (part for slot, mask in inputs.slots_and_masks
                 for part in (pos if slot is None else slot, mask))
        per_layer = [] if isinstance(self.model.per_layer, nn.Identity) else [
            self.model.per_layer(tokens, inputs.x)]
        return inputs.x, *inputs.tables, *masks, *per_layer


def embed_scale_of(model: nn.Module) -> float | None:
    """The factor of embeddings; None if other modules process them."""
    modules = [getattr(model, name) for name in model.after_embed]
    if not modules:
        return 1.0
    return modules[0].factor if [type(m) for m in modules] == [ScaledEmbedding] else None


class Unembed(MethodOverride):
    """Replaces unembed for one position per row."""

    def __init__(self, guard, model: nn.Module):
        super().__init__(guard, model, "unembed")
        self.model, head = model, model.head
        weights = weight_args(head.packed, head.scales, head.shape[1])
        self.op = native.linear(*weights, head.shape, head.bias, norm=norm_struct(model.norm),
                                 x_bits=native.x_bits(model.dtype))
        self.addresses = [ctypes.addressof(self.op)]

    @staticmethod
    def supports(model: nn.Module) -> bool:
        return (is_packed(model.head) and not shared_by(model.head) and supports_norm(model.norm)
                and supports_bias(model.head))

    def __call__(self, x: Tensor) -> Tensor:
        if not self.guard.in_model_call or x.shape[1] > 1:
            return self.original(x)
        x, op = x.contiguous(), self.op
        logits = torch.empty(x.shape[0], 1, op.N)
        op.M = x.shape[0]
        op.set("x", x)
        op.set("out", logits)
        native.run(self.addresses)
        self.guard.replay.add(self)
        return self.model.cap(logits)
