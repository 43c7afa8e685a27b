"""A model on a CPU as a list of cpu_ops' operations, for any number of rows.

    [norm, qkv]  [RoPE, cache, attention]  [output, + x]  [norm, gate, up, activation]  [down, + x]

A layer's call writes down where its inputs are; the last one's runs the list, without Python in
between. So nothing is compiled for a length, a number of rows or a group size. Whether a layer does
what the operations do is found out by doing both: a fork that changed it keeps its own.

    if use_operations(model): ...                  # else it is another kind of model
"""

import ctypes

import torch
from torch import Tensor, nn

from kernels import cpu_ops, inductor
from kernels.cpu_linears import DTYPES, OPERATIONS, arguments, fits_linear, packed
from kernels.linear import PackedEmbedding, PackedLinear
from layers.feed_forward import GATED, UNGATED
from layers.norms import LayerNorm, Scale, SoftCap, WideNorm

FEW = 64                                           # tokens of which a call may be a decoding step's
MOST_BLOCK_ROWS = 32                               # of any CPU's layout


# ---- What the operations know -------------------------------------------------------------------

def fits_norm(norm: nn.Module) -> bool:
    known = (nn.Identity, LayerNorm, WideNorm)
    return type(norm) in known or (hasattr(norm, "eps") and norm.weight.dim() == 1)


def fits_layer(layer: nn.Module) -> bool:
    """Has it the parts that the operations know?"""
    attn, ffn = layer.attn, layer.ffn
    attend = attn.attend
    if attn._forward_hooks or ffn._forward_hooks:  # sums over ranks
        return False
    has_scores = not hasattr(attend, "sinks") or isinstance(attend.cap, SoftCap | nn.Identity)
    post = (layer.post_attn_norm, layer.post_ffn_norm)
    norms = [layer.attn_norm, layer.ffn_norm, attn.q_norm, attn.k_norm]
    norms += [norm for norm in post if not isinstance(norm, Scale)]
    gate = getattr(ffn, "gate_up", None)
    up = gate or getattr(ffn, "up", None)
    if not isinstance(up, nn.Linear | PackedLinear) or activation_of(ffn) is None:
        return False
    n_up = (up.shape if isinstance(up, PackedLinear) else up.weight.shape)[0]
    even = gate is None or n_up % (2 * MOST_BLOCK_ROWS) == 0
    linears = (attn.wqkv, attn.wo, up, ffn.down)
    return (hasattr(attend, "scale") and has_scores and even and all(map(fits_norm, norms))
            and all(map(fits_linear, linears)))


def activation_of(ffn: nn.Module) -> str | None:
    known = GATED if hasattr(ffn, "gate_up") else UNGATED
    return next((name for name, f in known.items() if f is ffn.activation), None)


def norm_struct(norm: nn.Module) -> cpu_ops.Norm:
    if type(norm) in (nn.Identity, Scale):
        return cpu_ops.Norm()
    if isinstance(norm, LayerNorm):
        return cpu_ops.Norm(2, norm.eps, norm.weight.data_ptr(), norm.bias.data_ptr())
    return cpu_ops.Norm(1, norm.eps, norm.weight.data_ptr())


# ---- A call of the model ------------------------------------------------------------------------

class Call:
    """The operations that were asked for and not done yet, and the memory between them.

    Layers take turns with the same memory. widths: name -> floats for a row.
    """

    def __init__(self, widths: dict[str, int]):
        self.widths = widths
        self.buffers = {}                          # name -> fp32; another dict where they grew
        self.n_row = 0                             # that they have room for
        self.shape = None                          # B, T
        self.structs = []                          # of the first mask and RoPE of a call, …

    def begin(self, x: Tensor) -> None:
        """x [B, T, D]. Also after a call that was interrupted."""
        self.addresses = []
        self.kept = [x]                            # what has to live until the end
        self.taken = {}                            # mask and RoPE -> their struct
        self.mask = self.rope = self.positions = None
        B, T, D = x.shape
        if (B, T) != self.shape:
            self._make_room(B * T)
            self.shape = B, T
            self.out = self.buffers["x2"][:B * T * D].view(B, T, D)

    @torch.inference_mode(False)                   # whoever calls: they serve everyone
    def _make_room(self, n_row: int) -> None:
        if n_row > self.n_row:
            self.n_row = 1 << (n_row - 1).bit_length()
            self.buffers = {name: torch.empty(self.n_row * n) for name, n in self.widths.items()}

    def take(self, rope, slot: Tensor, mask: Tensor, batch_idx: Tensor | None) -> None:
        """Have self.positions describe these."""
        self.mask, self.rope = mask, rope
        key = id(mask), id(rope[0])
        if key not in self.taken:
            n = len(self.taken)
            if n == len(self.structs):
                self.structs.append(cpu_ops.Positions())
            self.taken[key] = self.structs[n]
            self.kept += [mask, rope, *fill(self.structs[n], *rope, slot, mask, batch_idx)]
        self.positions = self.taken[key]


def fill(at: cpu_ops.Positions, cos, sin, slot, mask, batch_idx) -> list[Tensor]:
    """-> the tensors that it points to."""
    cos, sin, slot, mask = (t.contiguous() for t in (cos, sin, slot, mask))
    at.cos, at.sin, at.slot, at.mask = (t.data_ptr() for t in (cos, sin, slot, mask))
    at.rows = None if batch_idx is None else batch_idx.data_ptr()
    at.n_key = at.mask_t = mask.shape[-1]
    at.mask_b = mask.stride(0) if mask.dim() == 4 else 0
    at.angle_b = cos.stride(0) if cos.dim() == 4 else 0
    at.slot_b = slot.stride(0) if slot.dim() == 2 else 0
    return [cos, sin, slot, mask, batch_idx]


class Operations:
    """What a layer does, in order, with a cache and in a call's memory."""

    def __init__(self, layer: "OperationsLayer", call: Call, cache: nn.Module):
        self.layer, self.cache, self.buffers = layer, cache, call.buffers
        self.x = self.positions = self.shape = None
        at = {name: buffer.data_ptr() for name, buffer in call.buffers.items()}
        self.first = self.linear("wqkv", None, at["qkv"], "attn_norm")
        self.attention = self.attend(at["qkv"], at["attended"])
        into_x1 = self.branch("wo", at["attended"], None, at["x1"], at["before"], "post_attn_norm")
        self.added = into_x1[-1]
        hidden = self.linear(layer.up, at["x1"], at["hidden"], "ffn_norm")
        hidden.activation = cpu_ops.ACTIVATIONS[layer.activation]
        hidden.gated = layer.up == "gate_up"
        into_x2 = self.branch("down", at["hidden"], at["x1"], at["x2"], at["before"],
                              "post_ffn_norm")
        self.by_rows = [self.first, *into_x1, hidden, *into_x2]
        self.addresses = [ctypes.addressof(op) for op in
                          (self.first, self.attention, *into_x1, hidden, *into_x2)]

    def linear(self, name: str, x: int | None, out: int, norm: str | None = None) -> cpu_ops.Linear:
        """x None: each call has its own."""
        packed, bias = self.layer.linears[name]
        weights = arguments(packed.weight, packed.scales, packed.shape[1])
        return cpu_ops.linear(
            *weights, packed.shape, bias, x=x, out=out, norm=self.layer.norm(norm),
            exact=self.cache.k.dtype == torch.float32)

    def branch(self, name: str, y: int, x: int | None, out: int, before: int,
               post: str) -> list[ctypes.Structure]:
        """out = x + post(linear(y)); the last operation adds. x None: each call has its own."""
        norm = getattr(self.layer.layer, post)
        if isinstance(norm, nn.Identity | Scale):
            op = self.linear(name, y, out)
            op.factor = norm.factor if isinstance(norm, Scale) else 1.0
            op.residual = x
            return [op]
        add = cpu_ops.AddNorm(
            kind=cpu_ops.ADD_NORM, D=self.layer.linears[name][0].shape[0], factor=1.0,
            norm=self.layer.norm(post), x=before, residual=x, out=out)
        return [self.linear(name, y, before), add]

    def attend(self, qkv: int, out: int) -> cpu_ops.Attention:
        attn, cache = self.layer.attn, self.cache
        attend, (_, K, S, H) = attn.attend, cache.k.shape
        sinks, cap = (getattr(attend, name, None) for name in ("sinks", "cap"))
        return cpu_ops.Attention(
            kind=cpu_ops.ATTENTION, N=attn.split[0] // H, K=K, H=H, S=S,
            cache_type=cpu_ops.TYPES[cache.k.dtype], wide_norm=isinstance(attn.q_norm, WideNorm),
            scale=attend.scale, cap=cap.cap if isinstance(cap, SoftCap) else 0.0,
            q_norm=norm_struct(attn.q_norm), k_norm=norm_struct(attn.k_norm), qkv=qkv,
            sinks=None if sinks is None else sinks.data_ptr(), k_cache=cache.k.data_ptr(),
            v_cache=cache.v.data_ptr(), out=out)

    def take_shape(self, shape: tuple[int, int]) -> None:
        self.shape = shape
        self.attention.B, self.attention.T = shape
        for op in self.by_rows:
            op.M = shape[0] * shape[1]

    def take(self, x: Tensor) -> None:
        self.x = x
        self.first.x = self.added.residual = x.data_ptr()
        self.first.x_type = self.added.residual_type = cpu_ops.TYPES[x.dtype]


class OperationsLayer:
    """A layer's forward, in its place."""

    def __init__(self, layer: nn.Module, first: bool, last: bool):
        self.layer, self.first, self.last = layer, first, last
        self.attn, self.ffn = layer.attn, layer.ffn
        self.plain = layer.forward
        self.up = "gate_up" if hasattr(layer.ffn, "gate_up") else "up"
        self.activation = activation_of(layer.ffn)
        self.linears = {}                          # name -> PackedLinear, its bias in fp32
        for name in ("wqkv", "wo", self.up, "down"):
            module = packed(getattr(self.owner(name), name))
            bias = module.bias
            self.linears[name] = module, bias if bias is None else bias.detach().float()
        self.operations = None

    def owner(self, name: str) -> nn.Module:
        return self.attn if name in ("wqkv", "wo") else self.ffn

    def widths(self) -> dict[str, int]:
        """Of what Operations writes."""
        shapes = {name: module.shape for name, (module, _) in self.linears.items()}
        D, attended = shapes["wo"]
        return dict(qkv=shapes["wqkv"][0], attended=attended, hidden=shapes["down"][1], x1=D, x2=D,
                    before=D)

    def install(self) -> None:
        """Let go of the weights as they were."""
        for name, (module, _) in self.linears.items():
            setattr(self.owner(name), name, module)
        self.layer.forward = self

    def norm(self, name: str | None) -> cpu_ops.Norm:
        return norm_struct(getattr(self.layer, name)) if name else cpu_ops.Norm()

    def __call__(self, x, rope, slot, mask, batch_idx=None) -> Tensor:
        call, cache, operations = self.call, self.attn._modules.get("cache"), self.operations
        if cache is None:
            return self.plain(x, rope, slot, mask, batch_idx)
        if self.first:
            x = x.contiguous()
            call.begin(x)
        if (operations is None or operations.cache is not cache
                or operations.buffers is not call.buffers):
            operations = self.operations = Operations(self, call, cache)
        if operations.shape is not call.shape:
            operations.take_shape(call.shape)
        if x is not operations.x:
            operations.take(x)
        if mask is not call.mask or rope is not call.rope:
            call.take(rope, slot, mask, batch_idx)
        if call.positions is not operations.positions:
            operations.positions = call.positions
            operations.attention.at = ctypes.addressof(call.positions)
        call.addresses += operations.addresses
        if self.last:
            cpu_ops.run(call.addresses)
        return call.out


# ---- Before the layers, and after them ----------------------------------------------------------

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
        if tokens.numel() > FEW or batch_idx is not None:
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
        return x, *parts[:n], *(part for mask in parts[n:] for part in (pos, mask))


class Leave:
    """unembed of a position of each row, in its place."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.plain = model.unembed
        head, norm = model.head, norm_struct(model.norm)
        weights = arguments(head.weight, head.scales, head.shape[1])
        self.op = cpu_ops.linear(*weights, head.shape, norm=norm,
                                 exact=model.dtype == torch.float32)
        self.addresses = [ctypes.addressof(self.op)]

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[1] > 1:
            return self.plain(x)
        x, op = x.contiguous(), self.op
        logits = torch.empty(x.shape[0], 1, op.N)
        op.M, op.x, op.x_type = x.shape[0], x.data_ptr(), cpu_ops.TYPES[x.dtype]
        op.out = logits.data_ptr()
        cpu_ops.run(self.addresses)
        return self.model.cap(logits)


# ---- A model ------------------------------------------------------------------------------------

def fits(model: nn.Module) -> bool:
    """Is it one that use_operations() takes, by its parts?"""
    return (model.dtype in DTYPES and fits_linear(model.head)
            and all(map(fits_layer, model.layers)))


@torch.inference_mode(False)                       # ordinary tensors even if the caller is in it
@torch.no_grad()
def use_operations(model: nn.Module) -> bool:
    """Have a model run by cpu_ops. In place; False: nothing was done."""
    if not fits(model) or not cpu_ops.is_available():
        return False
    layers = list(model.layers)
    has_cache = layers[0].attn.cache is not None
    if not has_cache:                              # to try the layers with
        model.setup_cache(1, 16)
    made = [OperationsLayer(layer, layer is layers[0], layer is layers[-1]) for layer in layers]
    kinds = {repr(new.layer): new for new in made}
    alike = all(map(does_the_same, kinds.values()))
    if not has_cache:
        model.setup_cache(0, 0)
    if not alike:
        inductor.note("the model's layers are not those that kernels/cpu_ops.cpp knows")
        return False
    widths = [new.widths() for new in made]
    call = Call({name: max(w[name] for w in widths) for name in widths[0]})
    for new in made:
        new.call = call
        new.install()
    use_packed_head(model)
    enter, leave = Enter(model), Leave(model)
    if not model.rings and model.pos_embed is None and gives_the_same(enter, model):
        model.embed_inputs = enter
    if not model.head._forward_hooks:
        model.unembed = leave
    return True


def use_packed_head(model: nn.Module) -> None:
    """Where its weight is the embedding's too, it stays so."""
    old = model.head
    model.head = packed(old)
    model.head._forward_hooks.update(old._forward_hooks)
    for name, embed in list(model.named_modules()):
        if isinstance(embed, nn.Embedding | PackedEmbedding) and embed.weight is old.weight:
            scales = getattr(embed, "scales", None)
            model.set_submodule(name, PackedEmbedding(model.head, scales, model.dtype))


def does_the_same(new: OperationsLayer) -> bool:
    """Some tokens and one more, by the layer as it is and by its operations: alike?"""
    attn = new.attn
    old_cache, ends, H = attn.cache, (new.first, new.last), attn.head_dim
    dtype, shape = old_cache.k.dtype, (1, old_cache.k.shape[1], 8, H)
    random = torch.Generator().manual_seed(0)
    D = new.linears["wo"][0].shape[0]
    new.call = Call(new.widths())
    new.first = new.last = alike = True
    caches = [type(old_cache)(shape, dtype, "cpu") for _ in range(2)]
    try:
        for pos in (torch.arange(5), torch.tensor([5])):
            x = torch.randn(1, len(pos), D, generator=random).to(dtype)
            angle = torch.randn(len(pos), H // 2, generator=random)
            mask = torch.arange(8) <= pos[:, None]
            y = []
            for cache, forward in zip(caches, (new.plain, new)):
                attn.cache = cache
                y.append(forward(x, (angle.cos(), angle.sin()), pos, mask).float().clone())
            error = (y[0] - y[1]).abs().max() / (y[0] - x.float()).abs().max()
            alike = alike and error < (1e-3 if dtype == torch.float32 else 0.05)
    finally:
        attn.cache, (new.first, new.last) = old_cache, ends
        new.operations = None
    return bool(alike)


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
