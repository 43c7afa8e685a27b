"""The layers of a model on a CPU as a list of cpu_ops' operations, for any number of rows.

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
from kernels.cpu import unpack_int4_cpu, unpack_int8_cpu
from kernels.linear import PackedEmbedding, PackedLinear
from kernels.plain import Kernel
from layers.feed_forward import GATED, UNGATED
from layers.norms import LayerNorm, Scale, SoftCap, WideNorm

FEW = 64                                           # rows whose operations the next call may need
MOST_BLOCK_ROWS = 32                               # of any CPU's layout
DTYPES = (torch.float32, torch.bfloat16)


# ---- Linears ------------------------------------------------------------------------------------

def format_of(weight: Tensor, scales: Tensor | None) -> int:
    """Of pack_weight()'s."""
    if weight.dtype == torch.int32:
        return cpu_ops.BF16 if scales is None else cpu_ops.INT4
    return {torch.float32: cpu_ops.FP32, torch.int16: cpu_ops.INT8}[weight.dtype]


def product(x: Tensor, weight: Tensor, scales: Tensor | None, _=None) -> Tensor:
    """x [M, in] -> [M, out'], out' being filled up to whole blocks."""
    shape = weight.shape[0] * weight.shape[2], x.shape[1]
    return cpu_ops.product(x, *arguments(weight, scales, x.shape[1]), shape)


def arguments(weight: Tensor, scales: Tensor | None, n_in: int) -> tuple:
    kind = format_of(weight, scales)
    group = n_in // scales.shape[1] if kind == cpu_ops.INT4 else 0
    return kind, weight, scales, group


def rows(weight: Tensor, ids: Tensor) -> Tensor:
    """As an embedding: ids [...] -> [..., in], of fp32, bf16 or int8."""
    n = weight.shape[2]
    as_stored = {torch.int32: torch.bfloat16, torch.int16: torch.int8}
    words = weight[ids // n, :, ids % n]
    return words.view(as_stored.get(weight.dtype, weight.dtype))


OPERATIONS = Kernel("cpu ops", product, rows=rows)


def on_disk(linear: nn.Module) -> tuple | None:
    """A linear's weight, scales and zeros in the layouts of plain.py; None: another layout."""
    if type(linear) is nn.Linear:
        return linear.weight, None, None
    if not isinstance(linear, PackedLinear) or len(linear.shape) > 2:
        return None
    weight, scales, zeros = linear.leaves()
    if linear.kernel.name == "int8 cpu":
        return unpack_int8_cpu(weight), scales, None
    if linear.kernel.name == "int4 cpu" and zeros is None:
        scales, zeros = (t[:linear.shape[0]] for t in scales.permute(2, 1, 0))
        return unpack_int4_cpu(weight)[:linear.shape[0]], scales, zeros
    return linear.leaves() if linear.kernel.name in ("plain", "int4 cpu") else None


def fits_linear(linear: nn.Module) -> bool:
    """Can pack() do it? Reads no weight."""
    if isinstance(linear, PackedLinear):
        scales, n_in = linear.scales, linear.shape[-1]
        grouped = scales is not None and scales.dim() > 1
        group = n_in // scales.shape[0 if scales.dim() == 3 else 1] if grouped else 32
        known = linear.kernel.name in ("int8 cpu", "int4 cpu", "plain")
        return known and len(linear.shape) == 2 and n_in % 32 == 0 and group % 32 == 0
    return type(linear) is nn.Linear and linear.weight.dtype in DTYPES


def packed(linear: nn.Module) -> PackedLinear:
    """The same linear with its weight in cpu_ops' layout."""
    weight, scales, zeros = on_disk(linear)
    _, weight, scales, _ = cpu_ops.pack_weight(weight, scales, zeros)
    bias = linear.bias
    shape = torch.Size(linear.shape if isinstance(linear, PackedLinear) else linear.weight.shape)
    new = PackedLinear(shape, bias, OPERATIONS)
    new.set_leaves((weight, scales, None))
    return new


# ---- A layer ------------------------------------------------------------------------------------

def fits_norm(norm: nn.Module) -> bool:
    kind = type(norm)
    return kind in (nn.Identity, LayerNorm, WideNorm) or (hasattr(norm, "eps")
                                                          and norm.weight.dim() == 1)


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


class Memory:
    """What is between the operations of a model, whose layers take turns with it."""

    def __init__(self):
        self.buffers = {}                          # (name, width) -> fp32, of as many rows as ever

    def __call__(self, name: str, n_row: int, width: int) -> Tensor:
        there = self.buffers.get((name, width))
        if there is None or len(there) < n_row:
            with torch.inference_mode(False):      # whoever calls: it serves everyone
                there = self.buffers[name, width] = torch.empty(n_row, width)
        return there[:n_row]


class Todo:
    """Operations that were asked for and not done yet."""

    def __init__(self):
        self.memory = Memory()
        self.addresses = []                        # of structs
        self.kept = []                             # what has to live until they are done
        self.positions = []                        # structs, of the first mask of a call, …
        self.taken = {}                            # (mask, cos) of this call -> its struct

    def positions_of(self, rope, slot: Tensor, mask: Tensor,
                     batch_idx: Tensor | None) -> cpu_ops.Positions:
        key = id(mask), id(rope[0])
        if key not in self.taken:
            n = len(self.taken)
            if n == len(self.positions):
                self.positions.append(cpu_ops.Positions())
            self.taken[key] = self.positions[n]
            self.kept += [mask, rope, *fill(self.positions[n], *rope, slot, mask, batch_idx)]
        return self.taken[key]

    def begin(self) -> None:
        """Also after a call that was interrupted."""
        self.addresses = []
        self.kept.clear()
        self.taken.clear()


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
    """What a layer does for x [B, T, D], in order; its inputs are filled in by each call."""

    def __init__(self, layer: "OperationsLayer", B: int, T: int, cache: nn.Module):
        self.cache = cache
        self.x = self.positions = None
        self.kept = []
        n_row, shapes = B * T, {name: m.shape for name, (m, _) in layer.linears.items()}
        D, attended = shapes["wo"]

        def memory(name, width):
            self.kept.append(layer.todo.memory(name, n_row, width))
            return self.kept[-1]
        qkv, y = memory("qkv", shapes["wqkv"][0]), memory("attended", attended)
        x1, x2, h = memory("x1", D), memory("x2", D), memory("hidden", shapes["down"][1])
        before = memory("before a norm", D)
        self.first = self.linear(layer, "wqkv", None, qkv, layer.norm("attn_norm"))
        self.attention = self.attend(layer, B, T, qkv, y)
        into_x1 = self.branch(layer, "wo", y, None, x1, before, "post_attn_norm")
        self.added = into_x1[-1]
        hidden = self.linear(layer, layer.up, x1, h, layer.norm("ffn_norm"))
        hidden.activation = cpu_ops.ACTIVATIONS[layer.activation]
        hidden.gated = layer.up == "gate_up"
        into_x2 = self.branch(layer, "down", h, x1, x2, before, "post_ffn_norm")
        self.ops = [self.first, self.attention, *into_x1, hidden, *into_x2]
        self.addresses = [ctypes.addressof(op) for op in self.ops]
        self.out = x2.view(B, T, D)

    def linear(self, layer, name: str, x: Tensor | None, out: Tensor,
               norm=cpu_ops.Norm()) -> cpu_ops.Linear:
        """x None: each call has its own."""
        packed, bias = layer.linears[name]
        weights = arguments(packed.weight, packed.scales, packed.shape[1])
        return cpu_ops.linear(out if x is None else x, *weights, packed.shape, out, bias, norm=norm,
                              exact=self.cache.k.dtype == torch.float32)

    def branch(self, layer, name: str, y: Tensor, x: Tensor | None, out: Tensor, before: Tensor,
               post: str) -> list[ctypes.Structure]:
        """out = x + post(linear(y)); the last operation adds. x None: each call has its own."""
        norm, old = getattr(layer.layer, post), out if x is None else x
        if isinstance(norm, nn.Identity | Scale):
            op = self.linear(layer, name, y, out)
            op.factor = norm.factor if isinstance(norm, Scale) else 1.0
            op.residual = old.data_ptr()
            return [op]
        add = cpu_ops.AddNorm(
            kind=cpu_ops.ADD_NORM, M=len(out), D=out.shape[1], factor=1.0, norm=layer.norm(post),
            x=before.data_ptr(), residual=old.data_ptr(), out=out.data_ptr())
        return [self.linear(layer, name, y, before), add]

    def attend(self, layer, B: int, T: int, qkv: Tensor, y: Tensor) -> cpu_ops.Attention:
        attn, cache = layer.attn, self.cache
        attend, (_, K, S, H) = attn.attend, cache.k.shape
        sinks = getattr(attend, "sinks", None)
        cap = getattr(attend, "cap", None)
        return cpu_ops.Attention(
            kind=cpu_ops.ATTENTION, B=B, T=T, N=attn.split[0] // H, K=K, H=H, S=S,
            cache_type=cpu_ops.TYPES[cache.k.dtype], wide_norm=isinstance(attn.q_norm, WideNorm),
            scale=attend.scale, cap=cap.cap if isinstance(cap, SoftCap) else 0.0,
            q_norm=norm_struct(attn.q_norm), k_norm=norm_struct(attn.k_norm), qkv=qkv.data_ptr(),
            sinks=None if sinks is None else sinks.data_ptr(), k_cache=cache.k.data_ptr(),
            v_cache=cache.v.data_ptr(), out=y.data_ptr())

    def take(self, x: Tensor, positions: cpu_ops.Positions) -> None:
        """This call's inputs."""
        if x is not self.x:
            self.x = x
            self.first.x = self.added.residual = x.data_ptr()
            self.first.x_type = self.added.residual_type = cpu_ops.TYPES[x.dtype]
        if positions is not self.positions:
            self.positions = positions
            self.attention.at = ctypes.addressof(positions)


class OperationsLayer:
    """A layer's forward, in its place."""

    def __init__(self, layer: nn.Module, todo: Todo, first: bool, last: bool):
        self.layer, self.todo, self.first, self.last = layer, todo, first, last
        self.attn, self.ffn = layer.attn, layer.ffn
        self.plain = layer.forward
        self.up = "gate_up" if hasattr(layer.ffn, "gate_up") else "up"
        self.activation = activation_of(layer.ffn)
        self.linears = {}                          # name -> PackedLinear, its bias in fp32
        for name in ("wqkv", "wo", self.up, "down"):
            module = packed(getattr(layer.attn if name in ("wqkv", "wo") else layer.ffn, name))
            bias = module.bias
            self.linears[name] = module, bias if bias is None else bias.detach().float()
        self.kept = {}                             # (B, T) -> Operations

    def install(self) -> None:
        """Let go of the weights as they were."""
        for name, (module, _) in self.linears.items():
            setattr(self.attn if name in ("wqkv", "wo") else self.ffn, name, module)
        self.layer.forward = self

    def norm(self, name: str) -> cpu_ops.Norm:
        return norm_struct(getattr(self.layer, name))

    def operations(self, x: Tensor) -> Operations:
        B, T, _ = x.shape
        there, cache = self.kept.get((B, T)), self.attn.cache
        if there is None or there.cache is not cache:
            there = Operations(self, B, T, cache)
            if B * T <= FEW:
                self.kept[B, T] = there
        return there

    def __call__(self, x, rope, slot, mask, batch_idx=None) -> Tensor:
        if self.attn.cache is None:
            return self.plain(x, rope, slot, mask, batch_idx)
        operations, todo = self.operations(x), self.todo
        if self.first:
            todo.begin()
        operations.take(x, todo.positions_of(rope, slot, mask, batch_idx))
        todo.kept += (x, operations)
        todo.addresses += operations.addresses
        if self.last:
            cpu_ops.run(todo.addresses)
        return operations.out


# ---- A model ------------------------------------------------------------------------------------

def fits(model: nn.Module) -> bool:
    """Is it one that use_operations() takes, by its parts?"""
    return (model.dtype in DTYPES and fits_linear(model.head)
            and all(map(fits_layer, model.layers)))


@torch.inference_mode(False)                       # ordinary tensors even if the caller is in it
def use_operations(model: nn.Module) -> bool:
    """Have the layers and the head of a model run by cpu_ops. In place; False: nothing was done.
    """
    if not fits(model) or not cpu_ops.is_available():
        return False
    layers, todo = list(model.layers), Todo()
    has_cache = layers[0].attn.cache is not None
    if not has_cache:                              # to try the layers with
        model.setup_cache(1, 16)
    made = [OperationsLayer(layer, todo, layer is layers[0], layer is layers[-1])
            for layer in layers]
    kinds = {repr(new.layer): new for new in made}
    alike = all(map(does_the_same, kinds.values()))
    if not has_cache:
        model.setup_cache(0, 0)
    if not alike:
        inductor.note("the model's layers are not those that kernels/cpu_ops.cpp knows")
        return False
    for new in made:
        new.install()
    old = model.head
    model.head = packed(old)
    for name, embed in list(model.named_modules()):
        if isinstance(embed, nn.Embedding | PackedEmbedding) and embed.weight is old.weight:
            scales = getattr(embed, "scales", None)
            model.set_submodule(name, PackedEmbedding(model.head, scales, model.dtype))
    return True


@torch.inference_mode()
def does_the_same(new: OperationsLayer) -> bool:
    """Some tokens and one more, by the layer as it is and by its operations: alike?"""
    layer, attn = new.layer, new.attn
    H, dtype = attn.head_dim, layer.attn.cache.k.dtype
    old_cache, ends = attn.cache, (new.first, new.last)
    shape = 1, old_cache.k.shape[1], 8, H
    random = torch.Generator().manual_seed(0)
    D = new.linears["wo"][0].shape[0]
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
        new.kept.clear()
    return bool(alike)
