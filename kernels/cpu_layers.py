"""A model on a CPU as a list of cpu_ops' operations, for any number of rows.

    [norm, qkv]  [RoPE, cache, attention]  [output, + x]  [norm, gate, up, activation]  [down, + x]

A layer's call writes down where its inputs are; the last one's runs the list, without Python in
between. So nothing is compiled for a length, a number of rows or a group size. A layer has two
halves: one that the operations do not know runs as it is, with quicker linears and experts. Whether
they do the same is found out by doing both: a layer that a fork changed keeps its own.

    if use_operations(model): ...                  # else it is another kind of model
"""

import copy
import ctypes
import itertools
import operator

import torch
from torch import Tensor, nn

from kernels import cpu_ops, private
from kernels.cpu_ends import Enter, Leave, gives_the_same
from kernels.cpu_experts import Experts, fits_experts, fits_head_matrices
from kernels.cpu_experts import packed as packed_experts
from kernels.cpu_feed_forward import EndHalf, factor_of, feed_forward_of
from kernels.cpu_linears import (
    DTYPES,
    OPERATIONS,
    arguments,
    fits_linear,
    fits_norm,
    norm_struct,
    packed,
)
from kernels.cpu_mixers import FEW, mixer_of
from kernels.linear import PackedEmbedding, PackedLinear
from layers.moe import MoE
from layers.norms import Scale
from layers.shared_kv import SharedAttention

NARROW = {"hidden", "attended", "latents", "expert_hidden", "shared_hidden", "end_hidden"}
                                                   # buffers that one product alone reads


# ---- A call of the model ------------------------------------------------------------------------

class Call:
    """The operations that were asked for and not done yet, and the memory between them.

    Layers take turns with the same memory. widths: name -> numbers for a row, which are fp32 or,
    of what one product alone reads, in the model's dtype; few: the same, for FEW rows at most.
    """

    def __init__(self, widths: dict[str, int], few: dict[str, int], dtype: torch.dtype):
        self.widths, self.few, self.dtype = widths, few, dtype
        self.dtypes = {name: dtype if name in NARROW else torch.float32 for name in widths | few}
        self.buffers = {}                          # by name; another dict where they grew
        self.n_row = 0                             # that they have room for
        self.shape = None                          # B, T
        self.structs = []                          # of the first mask and RoPE of a call, …

    def begin(self, x: Tensor) -> None:
        """x [B, T, D]. Also after a call that was interrupted."""
        self.addresses = []
        self.kept = [x]                            # what has to live until the end
        self.taken = {}                            # mask and RoPE -> their struct
        self.mask = self.rope = self.positions = None
        if x.shape[:2] != self.shape:
            self._make_room(x.shape[:2].numel())
            self.shape = x.shape[:2]
            self.out = self.rows("x2")

    def rows(self, name: str) -> Tensor:
        """[B, T, width] of a buffer."""
        n = self.widths[name]
        return self.buffers[name][:self.shape.numel() * n].view(*self.shape, n)

    @torch.inference_mode(False)                   # whoever calls: they serve everyone
    def _make_room(self, n_row: int) -> None:
        if n_row > self.n_row:
            self.n_row = 1 << (n_row - 1).bit_length()
            room = [(name, self.n_row * n) for name, n in self.widths.items()]
            room += [(name, min(self.n_row, FEW) * n) for name, n in self.few.items()]
            self.buffers = {name: torch.empty(n, dtype=self.dtypes[name]) for name, n in room}

    def take(self, rope, slot: Tensor, mask: Tensor, batch_idx: Tensor | None,
             half: int | None) -> None:
        """Have self.positions describe these; half: of a head's width, angles may be of more."""
        self.mask, self.rope = mask, rope
        key = id(mask), id(rope[0])
        if key not in self.taken:
            n = len(self.taken)
            if n == len(self.structs):
                self.structs.append(cpu_ops.Positions())
            self.taken[key] = self.structs[n]
            cos, sin = (t[..., :half] for t in rope)
            self.kept += [mask, rope, *fill(self.structs[n], cos, sin, slot, mask, batch_idx)]
        self.positions = self.taken[key]

    def run(self) -> None:
        """What is written down so far."""
        addresses, self.addresses = self.addresses, []
        cpu_ops.run(addresses)


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


# ---- A layer ------------------------------------------------------------------------------------

class Operations:
    """What a layer does, in order, with a cache and in a call's memory.

    steps: addresses of operations, or a function of what the layer is given, before which the
    operations up to it are run.
    """

    def __init__(self, layer: "OperationsLayer", call: Call, cache: nn.Module, halves: tuple):
        """halves: mixer, feed-forward and end; those that are None run as they are."""
        self.layer, self.parts, self.parallel, self.dim = (
            layer, layer.layer, layer.parallel, layer.dim)
        self.call, self.cache, self.buffers, self.halves = call, cache, call.buffers, halves
        self.x = self.positions = self.shape = self.multiplied = None
        self.at = {name: buffer.data_ptr() for name, buffer in call.buffers.items()}
        self.types = {name: cpu_ops.TYPES[dtype] for name, dtype in call.dtypes.items()}
        self.reads_x, self.adds_x, self.by_rows, self.mixing, self.steps = [], [], [], [], []
        plain = self.plain_attention, self.plain_feed_forward, self.plain_end
        for half, as_it_is in zip(halves, plain):
            if half is not None:
                half.add_to(self)
            elif as_it_is != self.plain_end or layer.has_end:
                self.steps.append(as_it_is)

    # - What the halves are made of

    def add(self, op: ctypes.Structure, rows: int = 1) -> None:
        """rows: for each of x."""
        self._append(op)
        self.by_rows.append((op, rows))

    def at_positions(self, op: ctypes.Structure) -> None:
        self._append(op)
        self.mixing.append(op)

    def _append(self, op: ctypes.Structure) -> None:
        if not self.steps or callable(self.steps[-1]):
            self.steps.append([])
        self.steps[-1].append(ctypes.addressof(op))

    def linear(self, name: str, x: str | None, out: str, norm: nn.Module | None = None,
               rows: int = 1, **more) -> cpu_ops.Linear:
        """x None: each call has its own. more: the struct's other fields."""
        packed, bias = self.layer.linears[name]
        *n_expert, n_out, n_in = packed.shape
        weights = arguments(packed.weight, packed.scales, n_in)
        op = cpu_ops.linear(
            *weights, (n_out, n_in), bias, x=self.at.get(x), x_type=self.types.get(x, 0),
            out=self.at[out], out_type=self.types[out],
            norm=norm_struct(norm) if norm else cpu_ops.Norm(),
            x_bits=cpu_ops.x_bits(self.call.dtype), n_expert=n_expert[0] if n_expert else 0, **more)
        if x is None:
            self.reads_x.append(op)
        self.add(op, rows)
        return op

    def branch(self, name: str, y: str, x: str | None, out: str, module: nn.Module,
               post: nn.Module) -> None:
        """out = x + post(linear(y)), linear being the module's last. x None: each call has its own.
        """
        if not module._forward_hooks and isinstance(post, nn.Identity | Scale):
            op = self.linear(name, y, out, residual=self.at.get(x))
            op.factor = factor_of(post)
            if x is None:
                self.adds_x.append(op)
            return
        self.linear(name, y, "before")
        if module._forward_hooks:
            self.steps.append(lambda *_: self.sum_over_ranks(module))
        self.add_norm(x, out, post)

    def add_norm(self, x: str | None, out: str, norm: nn.Module, scale: float = 1.0) -> None:
        """out = (x + norm(before)) * scale"""
        op = cpu_ops.AddNorm(
            kind=cpu_ops.ADD_NORM, D=self.dim, factor=factor_of(norm), scale=scale,
            norm=norm_struct(norm), x=self.at["before"], residual=self.at.get(x), out=self.at[out])
        self.add(op)
        if x is None:
            self.adds_x.append(op)

    # - What runs as it is, in the model's dtype

    def sum_over_ranks(self, module: nn.Module) -> None:
        y = self.call.rows("before")
        for hook in module._forward_hooks.values():
            y.copy_(hook(module, (), y.to(self.call.dtype)))

    def plain_attention(self, rope, slot, mask, batch_idx, *own) -> None:
        layer, x = self.parts, self.x
        y = layer.attn(layer.attn_norm(x.to(self.call.dtype)), rope, slot, mask, batch_idx)
        self.call.rows("x1").copy_(x + layer.post_attn_norm(y))

    def plain_feed_forward(self, *_) -> None:
        layer, attended = self.parts, self.call.rows("x1")
        x = self.x if self.parallel else attended
        y = layer.ffn(layer.ffn_norm(x.to(self.call.dtype)))
        self.call.rows("x2").copy_(attended + layer.post_ffn_norm(y))

    def plain_end(self, rope, slot, mask, batch_idx, *own) -> None:
        x = self.call.rows("x2")
        x.copy_(self.parts.end(x.to(self.call.dtype), *own))

    # - What differs from call to call

    def take_shape(self, shape: torch.Size) -> None:
        self.shape = shape
        for op in self.mixing:
            op.B, op.T = shape
        for op, rows in self.by_rows:
            op.M = rows * shape.numel()

    def take(self, x: Tensor) -> None:
        self.x = x
        for op in self.reads_x:
            op.x, op.x_type = x.data_ptr(), cpu_ops.TYPES[x.dtype]
        for op in self.adds_x:
            op.residual, op.residual_type = x.data_ptr(), cpu_ops.TYPES[x.dtype]

    def take_positions(self, at: cpu_ops.Positions) -> None:
        self.positions = at
        for op in self.mixing:
            op.at = ctypes.addressof(at)

    def multiply_by(self, own: Tensor) -> Tensor:
        """own [B, T, P] -> where it lies with rows equally far apart."""
        B, T, _ = own.shape
        even = own.stride(2) == 1 and (B == 1 or own.stride(0) == T * own.stride(1))
        own, op = own if even else own.contiguous(), self.multiplied
        op.times, op.times_type = own.data_ptr(), cpu_ops.TYPES[own.dtype]
        op.times_stride = own.stride(1)
        return own


def cache_owner(attn: nn.Module) -> nn.Module:
    """Whose cache it reads: its own, or an earlier layer's."""
    return attn.source[0] if isinstance(attn, SharedAttention) else attn


class OperationsLayer:
    """The forward of a layer with packed linears, in its place.

    halves: which of mixer, feed-forward and end are operations, none perhaps: x stays in fp32
    between such layers too; first, last: of neighbours like it; narrows: one unlike it follows.
    """

    def __init__(self, layer: nn.Module, halves: tuple[bool, ...], cfg, first=True, last=True,
                 narrows=False):
        self.layer, self.first, self.last, self.narrows = layer, first, last, narrows
        self.owner, self.plain = cache_owner(layer.attn), layer.forward
        self.parallel, self.dim = cfg.parallel, cfg.dim    # parallel: both halves read x
        self.has_end = has_end(layer)
        kinds = mixer_of(layer), feed_forward_of(layer), EndHalf
        self.is_known, self.linears = halves, {}   # name -> PackedLinear, its bias in fp32
        self.halves = tuple(kind(layer) if known else None for kind, known in zip(kinds, halves))
        for where, half in zip(("attn", "ffn", "end"), self.halves):
            for name in half.linears if half else ():
                self._add(f"{where}.{name}")
        self.mixer = self.halves[0]
        self.operations = {}                       # halves that a call takes -> Operations
        self.current = None

    def _add(self, name: str) -> None:
        linear = operator.attrgetter(name)(self.layer)
        bias = linear.bias
        self.linears[name] = linear, bias if bias is None else bias.detach().float()

    def widths(self) -> tuple[dict[str, int], dict[str, int]]:
        """Of what Operations writes, for any number of rows and for few."""
        D = self.dim
        widths = dict(x1=D, x2=D, before=D), {}
        for where, half in zip(("attn", "ffn", "end"), self.halves):
            if half:
                def width_of(name, where=where):
                    *_, n_out, n_in = self.linears[f"{where}.{name}"][0].shape
                    return n_in, n_out
                widths[half.few_rows].update(half.widths(width_of))
        return widths

    def _choose(self, call: Call, cache: nn.Module) -> Operations:
        """For a call of its shape."""
        few = call.shape.numel() <= FEW and call.shape[1] <= getattr(self.mixer, "most", FEW)
        halves = tuple(half if half and (few or not half.few_rows) else None
                       for half in self.halves)
        known = self.operations.get(few)
        if known is None or known.cache is not cache or known.buffers is not call.buffers:
            known = self.operations[few] = Operations(self, call, cache, halves)
        if known.shape is not call.shape:
            known.take_shape(call.shape)
        return known

    def __call__(self, x, rope, slot, mask, batch_idx=None, *own) -> Tensor:
        call, cache, operations = self.call, self.owner._modules.get("cache"), self.current
        if cache is None:
            return self.plain(x, rope, slot, mask, batch_idx, *own)
        if self.first:
            x = x.contiguous()
            call.begin(x)
        if (operations is None or operations.cache is not cache
                or operations.buffers is not call.buffers or operations.shape is not call.shape):
            operations = self.current = self._choose(call, cache)
        if x is not operations.x:
            operations.take(x)
        if mask is not call.mask or rope is not call.rope:
            call.take(rope, slot, mask, batch_idx, self.mixer and self.mixer.half)
        if operations.mixing and call.positions is not operations.positions:
            operations.take_positions(call.positions)
        if operations.multiplied:
            call.kept.append(operations.multiply_by(*own))
        for step in operations.steps:
            if type(step) is list:
                call.addresses += step
            else:
                call.run()
                step(rope, slot, mask, batch_idx, *own)
        if self.last:
            call.run()
        return call.out.to(call.dtype) if self.narrows else call.out


def has_end(layer: nn.Module) -> bool:
    return not isinstance(getattr(layer, "end", nn.Identity()), nn.Identity)


def pack_modules(layer: nn.Module) -> nn.Module:
    """Have all linears and experts of a layer the operations' layout. In place."""
    for name, module in list(layer.named_modules()):
        if isinstance(module, MoE) and fits_experts(module):
            module.experts = Experts(module)
        elif name.startswith("attn.") and fits_head_matrices(module):
            layer.set_submodule(name, packed_experts([module], None))
        elif fits_linear(module):
            new = packed(module)
            new._forward_hooks.update(module._forward_hooks)
            layer.set_submodule(name, new)
    return layer


def kind_of(layer: nn.Module) -> tuple:
    """Of those alike one is tried."""
    return repr(layer), *((type(m), m.__dict__.get("forward")) for m in layer.modules())


def halves_alike(layer: nn.Module, model: nn.Module) -> tuple[bool, ...] | None:
    """Which halves the operations do as the model's layer does: tried on a copy.

    None: not even its halves as they are, one after the other, do the same.
    """
    end_fits = has_end(layer) and EndHalf.fits(layer)
    fits = mixer_of(layer).fits(layer), feed_forward_of(layer).fits(layer), end_fits
    copied = pack_modules(copy.deepcopy(layer))
    tries = itertools.product(*((True, False) if fit else (False,) for fit in fits))
    for halves in sorted(tries, key=sum, reverse=True):
        if does_the_same(layer, OperationsLayer(copied, halves, model.cfg), model):
            return halves
    return None


def does_the_same(layer: nn.Module, new: OperationsLayer, model: nn.Module) -> bool:
    """Some tokens and one more, by the layer as it is and by its operations: alike?

    In a mixture most of them: where two experts are nearly as good, rounding decides.
    """
    dtype, n_angle = model.dtype, getattr(layer.attn, "head_dim", model.cfg.head_dim) // 2
    owner = cache_owner(layer.attn)
    old = owner.cache
    random = torch.Generator().manual_seed(0)
    new.call, new.current, new.operations = Call(*new.widths(), dtype), None, {}
    D, errors = new.dim, []
    owner.setup_cache(1, 8, dtype, "cpu")
    new.owner.setup_cache(1, 8, dtype, "cpu")
    own_dim = layer.end.dim if new.has_end else 0
    bits = cpu_ops.set_activation_bits(16)         # what it computes is asked, not how finely
    try:
        for pos in (torch.arange(5), torch.tensor([5])):
            x = torch.randn(1, len(pos), D, generator=random).to(dtype)
            angle = torch.randn(len(pos), n_angle, generator=random)
            mask = torch.arange(8) <= pos[:, None]
            given = (angle.cos(), angle.sin()), pos, mask, None
            if own_dim:
                given += (torch.randn(1, len(pos), own_dim, generator=random).to(dtype),)
            plain, mine = layer(x, *given).float(), new(x, *given).float()
            error = (plain - mine).abs().amax(-1) / (plain - x.float()).abs().max()
            errors += error.flatten().tolist()
    finally:
        owner.cache = old
        cpu_ops.set_activation_bits(bits)
    most = 2 if isinstance(layer.ffn, MoE) else 0
    limit = 1e-3 if dtype == torch.float32 else 0.05
    return sum(not error < limit for error in errors) <= most


# ---- A model ------------------------------------------------------------------------------------

def fits(model: nn.Module) -> bool:
    """Is it one that use_operations() takes, by its parts?"""
    return model.dtype in DTYPES and (uses_operations(model) or fits_linear(model.head))


def uses_operations(model: nn.Module) -> bool:
    return isinstance(model.head, PackedLinear) and model.head.kernel is OPERATIONS


@torch.inference_mode(False)                       # ordinary tensors even if the caller is in it
@torch.no_grad()
def use_operations(model: nn.Module) -> bool:
    """Have a model run by cpu_ops. In place; False: nothing was done."""
    if not fits(model):
        private.note(f"on a CPU a model in {str(model.dtype)[6:]} runs uncompiled")
        return False
    if not cpu_ops.is_available():
        return False
    layers = list(model.layers)
    has_cache = layers[0].attn.cache is not None
    if not has_cache:                              # to try the layers with
        model.setup_cache(1, 16)
    kinds = [kind_of(layer) for layer in layers]
    halves = {kind: halves_alike(layer, model)
              for kind, layer in dict(zip(kinds, layers)).items()}
    if not has_cache:
        model.setup_cache(0, 0)
    halves = [halves[kind] for kind in kinds]
    if None in halves:
        private.note("a layer is not as cpu_ops/ knows them: it runs uncompiled")
    made = []
    for i, layer in enumerate(layers):
        pack_modules(layer)
        if halves[i] is not None:
            is_end = i + 1 == len(layers)
            first, last = i == 0 or halves[i - 1] is None, is_end or halves[i + 1] is None
            narrows = last and not is_end
            made.append(OperationsLayer(layer, halves[i], model.cfg, first, last, narrows))
            layer.forward = made[-1]
    widths = (widest(each) for each in zip(*(new.widths() for new in made)))
    call = Call(*widths, model.dtype) if made else None
    for new in made:
        new.call = call
    pack_modules(model.per_layer)
    pack_beside(model)
    enter = Enter(model)
    if not model.rings and model.pos_embed is None and gives_the_same(enter, model):
        model.embed_inputs = enter
    if not model.head._forward_hooks and fits_norm(model.norm):
        model.unembed = Leave(model)
    return True


def widest(widths: tuple[dict[str, int], ...]) -> dict[str, int]:
    names = {name for width in widths for name in width}
    return {name: max(width.get(name, 0) for width in widths) for name in names}


def pack_beside(model: nn.Module) -> None:
    """The linears outside the layers; a head from a model that is compiled already stays."""
    for name, module in list(model.named_children()):
        if name != "head" and fits_linear(module):
            setattr(model, name, packed(module))
    if not uses_operations(model):
        use_packed_head(model)


def use_packed_head(model: nn.Module) -> None:
    """Where its weight is the embedding's too, it stays so."""
    old = model.head
    model.head = packed(old)
    model.head._forward_hooks.update(old._forward_hooks)
    for name, embed in list(model.named_modules()):
        if isinstance(embed, nn.Embedding | PackedEmbedding) and embed.weight is old.weight:
            scales = getattr(embed, "scales", None)
            model.set_submodule(name, PackedEmbedding(model.head, scales, model.dtype))
