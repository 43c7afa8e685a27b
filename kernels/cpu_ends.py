"""A CPU's operations before a model's layers and after them: embedding, angles and masks of a few
tokens; the logits of one position of each row.

    model.embed_inputs, model.unembed = Enter(model), Leave(model)
"""

import ctypes

import torch
from torch import Tensor, nn

from kernels import cpu_ops
from kernels.cpu_linears import OPERATIONS, arguments, norm_struct
from kernels.linear import PackedEmbedding

FEW = 64                                           # tokens of which a call may be a decoding step's


class Inputs:
    """What a step's layers are given, in memory that stays; for tokens [B, T] and kv_len."""

    def __init__(self, model: nn.Module, B: int, T: int, own_pos: bool, kv_len: int):
        half = model.freq.shape[1]
        lead = (B, 1, T) if own_pos else (T,)
        self.x = torch.empty(B, T, model.cfg.dim, dtype=model.dtype)
        self.angles, self.masks, self.parts = [], [], []
        n = B * T if own_pos else T
        self.amplitude = model.amplitude.float()
        for i in range(len(model.ropes)):
            cos, sin = torch.empty(2, *lead, half, dtype=torch.float32)
            self.parts += [cos, sin]
            self.angles.append(cpu_ops.Angles(
                kind=cpu_ops.ANGLES, n=n, half=half, freq=model.freq[i].data_ptr(),
                amplitude=self.amplitude[i].data_ptr(), cos=cos.data_ptr(), sin=sin.data_ptr()))
        for window in model.windows:
            mask = torch.empty(*lead, kv_len, dtype=torch.bool)
            self.parts.append(mask)
            self.masks.append(cpu_ops.Mask(
                kind=cpu_ops.MASK, B=1, T=n, n_key=kv_len, window=window or 0,
                mask=mask.data_ptr()))
        embed = model.embed
        scale = torch.full((), model.cfg.embed_scale, dtype=model.dtype).item()
        self.embed = None
        if isinstance(embed, PackedEmbedding) and embed.kernel is OPERATIONS:
            scales = embed.scales
            self.scales = scales if scales is None else scales.detach().float().contiguous()
            kind, weight, _, _ = arguments(embed.weight, None, 0)
            self.embed = cpu_ops.Embed(
                kind=cpu_ops.EMBED, format=kind, n=B * T, K=model.cfg.dim, factor=scale,
                n_vocab=model.cfg.vocab_size,
                out_type=cpu_ops.TYPES[model.dtype], weight=weight.data_ptr(),
                scales=None if scales is None else self.scales.data_ptr(), out=self.x.data_ptr())
        ops = [*self.angles, *self.masks, *([self.embed] if self.embed else [])]
        self.addresses = [ctypes.addressof(op) for op in ops]

    def fill(self, tokens: Tensor, pos: Tensor) -> None:
        for op in (*self.angles, *self.masks):
            op.pos = pos.data_ptr()
        if self.embed:
            self.embed.ids = tokens.data_ptr()
        cpu_ops.run(self.addresses, n_thread=1)


class Enter:
    """embed_inputs of few tokens, in its place."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.plain = model.embed_inputs
        self.kept = {}                             # shapes -> Inputs

    def __call__(self, tokens, pos, kv_len, batch_idx=None) -> tuple[Tensor, ...]:
        if tokens.numel() > FEW or batch_idx is not None or self.model.rings:
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
            x = self.model.embed(tokens)
            x = x * x.new_full((), self.model.cfg.embed_scale)
        masks = (part for mask in parts[n:] for part in (pos, mask))
        return x, *parts[:n], *masks, *self.model.per_layer(tokens, x)


class Leave:
    """unembed of a position of each row, in its place."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.plain = model.unembed
        head, norm = model.head, norm_struct(model.norm)
        weights = arguments(head.weight, head.scales, head.shape[1])
        self.bias = None if head.bias is None else torch.empty(head.bias.shape)    # fp32
        self.op = cpu_ops.linear(*weights, head.shape, self.bias, norm=norm,
                                 x_bits=cpu_ops.x_bits(model.dtype))
        self.addresses = [ctypes.addressof(self.op)]

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[1] > 1:
            return self.plain(x)
        if self.bias is not None:                  # copied at each call: an edit counts
            self.bias.copy_(self.model.head.bias)
        x, op = x.contiguous(), self.op
        logits = torch.empty(x.shape[0], 1, op.N)
        op.M, op.x, op.x_type = x.shape[0], x.data_ptr(), cpu_ops.TYPES[x.dtype]
        op.out = logits.data_ptr()
        cpu_ops.run(self.addresses)
        return self.model.cap(logits)


def gives_the_same(enter: Enter, model: nn.Module) -> bool:
    """Steps of one and of several rows."""
    alike = True
    for n in (1, 3):
        tokens = torch.arange(n)[:, None] + 5
        pos = torch.tensor([7]) if n == 1 else torch.tensor([[7], [0], [4]])
        for mine, plain in zip(enter(tokens, pos, 9), enter.plain(tokens, pos, 9)):
            same = mine.shape == plain.shape and mine.dtype == plain.dtype
            alike = alike and same and torch.allclose(mine.float(), plain.float(), 1e-2, 1e-5)
    return alike
