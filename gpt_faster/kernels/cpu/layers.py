"""A model on a CPU as a list of native operations, for any number of rows.

    [norm, qkv]  [RoPE, cache, attention]  [output, + x]  [norm, gate, up, activation]  [down, + x]

A layer's call writes down where its inputs are; the last one's runs the list, without Python in
between. So nothing is compiled for a length, a number of rows or a group size. A layer has two
halves: one that the operations do not know runs as it is, with quicker linears and experts. What
was edited, hooked or exchanged runs as it is read, the rest by operations (as_read.py, guard.py):
those of the layers in between are then a list of their own, whose last layer gives what it would
give as it is read.

    if use_operations(model): ...                  # else a note said why
"""

import ctypes
import operator

import torch
from torch import Tensor, nn

from gpt_faster.kernels import private
from gpt_faster.kernels.as_read import HALVES, Unknown, unknown_packed, unknown_parts
from gpt_faster.kernels.cpu import native
from gpt_faster.kernels.cpu.ends import Enter, Leave
from gpt_faster.kernels.cpu.experts import Experts, fits_experts, fits_head_matrices
from gpt_faster.kernels.cpu.experts import packed as packed_experts
from gpt_faster.kernels.cpu.feed_forward import EndHalf, factor_of, feed_forward_of
from gpt_faster.kernels.cpu.linears import (
    DTYPES,
    OperationsEmbedding,
    arguments,
    fits_linear,
    is_packed,
    norm_struct,
    packed,
)
from gpt_faster.kernels.cpu.mixers import FEW, mixer_of
from gpt_faster.kernels.guard import Guard, Outside, Stead, undo
from gpt_faster.kernels.linear import PackedEmbedding, methods_of, pack_linears
from gpt_faster.layers.block import ParallelBlock, post_norm_of
from gpt_faster.layers.norms import Scale
from gpt_faster.layers.shared_kv import SharedAttention
from model import MoE
from quantize import QuantizedEmbedding
from tp import of_all, share, shared_by

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
        self.n_call = None                         # the model's call that it is
        self.structs = []                          # of the first mask and RoPE of a call, …

    def begin(self, x: Tensor, n_call: int) -> None:
        """x [B, T, D]. Also after a call that was interrupted."""
        self.addresses = []
        self.x = x                                 # has to live until the end
        if n_call != self.n_call:
            self.n_call, self.kept = n_call, []    # as long as the call: their ids stand for them
            self.taken = {}                        # mask and RoPE -> their struct
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
                self.structs.append(native.Positions())
            self.taken[key] = self.structs[n]
            cos, sin = (t[..., :half] for t in rope)
            fill(self.structs[n], self.shape, cos, sin, slot, mask, batch_idx)
            self.kept += [mask, rope]
        self.positions = self.taken[key]

    def run(self) -> None:
        """What is written down so far."""
        addresses, self.addresses = self.addresses, []
        native.run(addresses)


def fill(at: native.Positions, shape: torch.Size, cos, sin, slot, mask, batch_idx) -> None:
    """For a call of B rows with T tokens each. ValueError where these are of another one."""
    B, T = shape
    cos, sin, slot, mask = (t.contiguous() for t in (cos, sin, slot.long(), mask))
    alike = cos.shape == sin.shape and cos.shape[-2] == slot.shape[-1] == mask.shape[-2] == T
    if not alike or any(t.shape[0] not in (1, B) for t in (cos, mask) if t.dim() == 4) or (
            slot.dim() == 2 and len(slot) not in (1, B)):
        raise ValueError(f"positions [{', '.join(map(str, slot.shape))}] are not those of tokens "
                         f"[{B}, {T}]")
    for name, t in dict(cos=cos, sin=sin, slot=slot, mask=mask).items():
        at.set(name, t)
    at.set("rows", None if batch_idx is None else batch_idx.long().contiguous())
    if batch_idx is not None and batch_idx.shape != (B,):
        raise ValueError(f"batch_idx has {batch_idx.numel()} rows, and the tokens {B}")
    at.n_key = at.mask_t = mask.shape[-1]
    at.mask_b = mask.stride(0) if mask.dim() == 4 and len(mask) == B else 0
    at.angle_b = cos.stride(0) if cos.dim() == 4 and len(cos) == B else 0
    at.slot_b = slot.stride(0) if slot.dim() == 2 and len(slot) == B else 0


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
        self.at = call.buffers
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
               rows: int = 1, **more) -> native.Linear:
        """x None: each call has its own. more: the struct's other fields."""
        linear = self.layer.linears[name]
        *n_expert, n_out, n_in = linear.shape
        weights = arguments(linear.packed, linear.scales, n_in)
        op = native.linear(
            *weights, (n_out, n_in), linear.bias, x=self.at.get(x), out=self.at[out],
            norm=norm_struct(norm) if norm else native.Norm(),
            x_bits=native.x_bits(self.call.dtype), n_expert=n_expert[0] if n_expert else 0, **more)
        if x is None:
            self.reads_x.append(op)
        self.add(op, rows)
        return op

    def branch(self, name: str, y: str, x: str | None, out: str, module: nn.Module,
               post: nn.Module) -> None:
        """out = x + post(linear(y)), linear being the module's last. x None: each call has its own.
        """
        if not shared_by(module) and isinstance(post, nn.Identity | Scale):
            op = self.linear(name, y, out, residual=self.at.get(x))
            op.factor = factor_of(post)
            if x is None:
                self.adds_x.append(op)
            return
        self.linear(name, y, "before")
        if shared_by(module):
            self.steps.append(lambda *_: self.sum_over_ranks(module))
        self.add_norm(x, out, post)

    def add_norm(self, x: str | None, out: str, norm: nn.Module,
                 scale: Tensor | None = None) -> None:
        """out = (x + norm(before)) * scale"""
        op = native.AddNorm(
            kind=native.ADD_NORM, D=self.dim, factor=factor_of(norm), scale=scale,
            norm=norm_struct(norm), x=self.at["before"], residual=self.at.get(x), out=self.at[out])
        self.add(op)
        if x is None:
            self.adds_x.append(op)

    # - What runs as it is, in the model's dtype

    def sum_over_ranks(self, module: nn.Module) -> None:
        y = self.call.rows("before")
        y.copy_(of_all(module, y.to(self.call.dtype)))

    def plain_attention(self, rope, slot, mask, batch_idx, *own) -> None:
        layer, x = self.parts, self.x
        y = layer.attn(layer.attn_norm(self.own(x)), rope, slot, mask, batch_idx)
        self.call.rows("x1").copy_(x + post_norm_of(layer, "attn")(y))

    def plain_feed_forward(self, *_) -> None:
        layer, attended = self.parts, self.call.rows("x1")
        x = self.x if self.parallel else attended
        y = layer.ffn(layer.ffn_norm(self.own(x)))
        self.call.rows("x2").copy_(attended + post_norm_of(layer, "ffn")(y))

    def plain_end(self, rope, slot, mask, batch_idx, *own) -> None:
        x = self.call.rows("x2")
        x.copy_(self.parts.end(self.own(x), *own))

    def own(self, x: Tensor) -> Tensor:
        """In memory that nothing else is written to, whoever keeps it."""
        return x.to(self.call.dtype, copy=True)

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
            op.set("x", x)
        for op in self.adds_x:
            op.set("residual", x)

    def take_positions(self, at: native.Positions) -> None:
        self.positions = at
        for op in self.mixing:
            op.set("at", at)

    def multiply_by(self, own: Tensor) -> None:
        """own [B, T, P]"""
        own = own.contiguous()
        self.multiplied.set("times", own)
        self.multiplied.times_stride = own.shape[2]


def cache_owner(attn: nn.Module) -> nn.Module:
    """Whose cache it reads: its own, or an earlier layer's."""
    return attn.source[0] if isinstance(attn, SharedAttention) else attn


class OperationsLayer(Stead):
    """The forward of a layer with packed linears, in its place.

    halves: which of mixer, feed-forward and end are operations, none perhaps: x stays in fp32
    between layers; first, last: of those that are run together. gives_own: x goes to what runs as
    it is read, in the model's dtype.
    """

    def __init__(self, guard: Guard, layer: nn.Module, halves: tuple[bool, ...], cfg):
        super().__init__(guard, layer, "forward")
        self.layer, self.first, self.last, self.gives_own = layer, False, False, False
        self.owner = cache_owner(layer.attn)
        self.parallel = isinstance(layer, ParallelBlock)   # both halves read x
        self.dim = cfg.dim
        self.has_end = has_end(layer)
        kinds = mixer_of(layer), feed_forward_of(layer), EndHalf
        self.is_known, self.linears = halves, {}   # name -> OperationsLinear
        self.halves = tuple(kind(layer) if known else None for kind, known in zip(kinds, halves))
        for where, half in zip(("attn", "ffn", "end"), self.halves):
            for name in half.linears if half else ():
                name = f"{where}.{name}"
                self.linears[name] = operator.attrgetter(name)(layer)
        self.mixer = self.halves[0]
        self.operations = {}                       # halves that a call takes -> Operations
        self.current = None

    def widths(self) -> tuple[dict[str, int], dict[str, int]]:
        """Of what Operations writes, for any number of rows and for few."""
        D = self.dim
        widths = dict(x1=D, x2=D, before=D), {}
        for where, half in zip(("attn", "ffn", "end"), self.halves):
            if half:
                def width_of(name, where=where):
                    *_, n_out, n_in = self.linears[f"{where}.{name}"].shape
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
        if cache is None or not self.guard.inside:
            return self.plain(x, rope, slot, mask, batch_idx, *own)
        if self.first:
            x = x.contiguous()
            call.begin(x, self.guard.n_call)
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
            operations.multiply_by(*own)
        for step in operations.steps:
            if type(step) is list:
                call.addresses += step
            else:
                call.run()
                with self.guard.within_a_layer():
                    step(rope, slot, mask, batch_idx, *own)
        if self.last:
            call.run()
        return operations.own(call.out) if self.gives_own else call.out


def has_end(layer: nn.Module) -> bool:
    return not isinstance(getattr(layer, "end", nn.Identity()), nn.Identity)


def pack_modules(layer: nn.Module, known: tuple[str, ...] = ("",)) -> None:
    """Have the linears and experts of a layer the operations' layout, but for halves that run as
    they are read. In place.

    known: what is in the names of its other parts.
    """
    for name, module in list(layer.named_modules()):
        if is_packed(module) or not any(half in name.partition(".")[0] for half in known):
            continue
        if isinstance(module, MoE) and fits_experts(module) and "experts" not in vars(module):
            module.experts = Experts(module)
        elif name.startswith("attn.") and fits_head_matrices(module):
            layer.set_submodule(name, packed_experts([module], None))
        elif fits_linear(module):
            layer.set_submodule(name, packed(module))


# ---- A model ------------------------------------------------------------------------------------

def fits(model: nn.Module) -> bool:
    """Is it one that use_operations() takes, by its parts?"""
    return model.dtype in DTYPES and fits_linear(model.head)


def uses_operations(model: nn.Module) -> bool:
    """Do operations run any of it?"""
    return any(isinstance(value, Stead) and not isinstance(value, Guard)
               for module in model.modules() for value in vars(module).values())


@torch.inference_mode(False)                       # ordinary tensors even if the caller is in it
@torch.no_grad()
def use_operations(model: nn.Module) -> bool:
    """Have a model run by operations as far as it is as it was read, and look at each call whether
    it still is. In place; False: all of it runs uncompiled. A note says what does, and why."""
    undo(model)
    if not fits(model):
        give_back_experts(model)
        is_dtype = model.dtype not in DTYPES
        what = f"in {str(model.dtype)[6:]}" if is_dtype else "with such an output layer"
        private.note(f"on a CPU a model {what} runs uncompiled")
        pack_linears(model)
        return False
    if not native.is_available():
        pack_linears(model)
        return False
    if what := unknown_packed(model):
        raise RuntimeError(f"{what} after weights were packed for it: exchange it before the model "
                           "is loaded or compiled")
    found = unknown_parts(model)
    guard = None if "forward" in vars(model) else Guard(model, use_operations)
    known = [known_of(i, found) for i in range(len(model.layers))]
    nothing = guard is None or found.model or not (any(known) or not found.behind)
    if found.all():
        give_back_experts(model)
        private.note(f"{in_words(found.all())}: {which(found, nothing, known)} as it is read, "
                     "uncompiled")
    if nothing:
        pack_linears(model)
        if guard:
            guard.begin([])
        return False
    pack_modules(model.per_layer, () if found.before else ("",))
    for layer, halves in zip(model.layers, known):
        pack_modules(layer, halves)
    pack_beside(model, found)
    pack_linears(model)                            # of what runs as it is read
    put_layers(model, guard, known, found)
    if not found.before and Enter.fits(model):
        model.embed_inputs = Enter(guard, model)
    if not found.behind and Leave.fits(model) and "unembed" not in vars(model):
        model.unembed = Leave(guard, model)        # else a drafter listens there
    guard.begin([t for m in model.modules() if is_packed(m) for t in m.leaves() if t is not None])
    return True


def known_of(i: int, found: Unknown) -> tuple[str, ...]:
    """The halves of layer i that are as the operations know them."""
    return tuple(half for half in HALVES if (i, half) not in found.halves)


def in_words(found: list[str]) -> str:
    return found[0] + (f" (and {len(found) - 1} more)" if len(found) > 1 else "")


def which(found: Unknown, nothing: bool, known: list[tuple[str, ...]]) -> str:
    """What of a model runs as it is read."""
    if nothing:
        return "the model runs"
    n_whole = sum(not halves for halves in known)
    parts = [f"{n_whole} of {len(known)} layers"] if n_whole else []
    for half, name in dict(attn="attention", ffn="feed-forward", end="end").items():
        n = sum(bool(halves) and half not in halves for halves in known)
        parts += [f"{name} of {n} of {len(known)} layers"] if n else []
    parts += ["the model's forward"] if found.step else []
    parts += ["the embedding"] if found.before else []
    parts += ["the output layer"] if found.behind else []
    return f"{', '.join(parts)} run{'' if len(parts) > 1 or n_whole > 1 else 's'}"


def give_back_experts(model: nn.Module) -> None:
    """A mixture that runs as it is read calls its own experts, not what stood in their place."""
    for module in model.modules():
        if isinstance(experts := vars(module).get("experts"), Experts):
            experts.give_back()


def put_layers(model: nn.Module, guard: Guard, known: list[tuple[str, ...]],
               found: Unknown) -> None:
    """known: the halves of each layer that are as they were read; of a layer that has none, its
    own forward stays."""
    layers = [OperationsLayer(guard, layer, halves_known(layer, halves), model.cfg)
              if halves else None for layer, halves in zip(model.layers, known)]
    put = [layer for layer in layers if layer]
    if not put:
        return
    widths = (widest(each) for each in zip(*(layer.widths() for layer in put)))
    call = Call(*widths, model.dtype)
    for before, layer, after in zip([None, *layers], layers, [*layers[1:], None]):
        if layer:
            layer.call, layer.layer.forward = call, layer
            layer.first = before is None or found.step is not None
            layer.last = after is None or found.step is not None
            layer.gives_own = layer.last and bool(found.all())
    for layer in model.layers:
        if not isinstance(layer.forward, OperationsLayer):
            setattr(layer, private.AROUND, Outside(guard, layer))


def halves_known(layer: nn.Module, known: tuple[str, ...]) -> tuple[bool, ...]:
    """Which of mixer, feed-forward and end have the parts that the operations know."""
    return ("attn" in known and mixer_of(layer).fits(layer),
            "ffn" in known and feed_forward_of(layer).fits(layer),
            "end" in known and has_end(layer) and EndHalf.fits(layer))


def widest(widths: tuple[dict[str, int], ...]) -> dict[str, int]:
    names = {name for width in widths for name in width}
    return {name: max(width.get(name, 0) for width in widths) for name in names}


def pack_beside(model: nn.Module, found: Unknown) -> None:
    """The linears outside the layers; a head from a model that is compiled already stays, and one
    that runs as it is read, or whose weight an embedding has that does."""
    for name, module in list(model.named_children()):
        if name != "head" and fits_linear(module):
            setattr(model, name, packed(module))
    is_tied = getattr(model.embed, "weight", None) is getattr(model.head, "weight", None)
    if not (is_packed(model.head) or found.behind or found.before and is_tied):
        use_packed_head(model)


def use_packed_head(model: nn.Module) -> None:
    """Where its weight is the embedding's too, it stays so."""
    old = model.head
    model.head = packed(old)
    if forward := shared_by(old):
        share(model.head, forward)
    scales = model.head.scales                     # in fp32, as operations read them
    for name, embed in list(model.named_modules()):
        kinds = nn.Embedding | PackedEmbedding | QuantizedEmbedding
        if isinstance(embed, kinds) and getattr(embed, "weight", None) is old.weight:
            scales = getattr(embed, "scales", None) if scales is None else scales
            new = OperationsEmbedding(model.head, scales, model.dtype)
            new.stands_for = methods_of(embed)
            model.set_submodule(name, new)
