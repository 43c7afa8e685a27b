"""Runs a model's layers on a CPU as a list of native operations, for any number of rows.

    [norm, qkv]  [RoPE, cache, attention]  [output, + x]  [norm, gate, up, activation]  [down, + x]

Each layer's call sets its inputs' addresses and queues its operations; the last layer's call runs
the queue, without Python in between. Nothing is compiled per length, number of rows or group size.
A layer has three sublayers: mixer (attn), feed-forward (ffn) and end. One that the operations do
not support runs eagerly, with packed linears and experts. Modified parts (modifications.py,
guard.py) run eagerly too: then each group of consecutive unmodified layers is queued separately,
and its last layer returns x in the model's dtype.

    # False: the whole model runs eagerly; the reason is printed to stderr
    if use_operations(model): ...
"""

import ctypes
import operator

import torch
from torch import Tensor, nn

from gpt_faster.kernels import torch_internals
from gpt_faster.kernels.cpu import native
from gpt_faster.kernels.cpu.embed_unembed import EmbedInputs, Unembed
from gpt_faster.kernels.cpu.experts import (
    FusedExperts,
    pack_experts,
    supports_experts,
    supports_head_matrices,
)
from gpt_faster.kernels.cpu.feed_forward import LayerEnd, factor_of, feed_forward_of
from gpt_faster.kernels.cpu.hidden_states import RecordHidden
from gpt_faster.kernels.cpu.linears import (
    DTYPES,
    OperationsEmbedding,
    is_packed,
    norm_struct,
    pack_linear,
    supports_linear,
    weight_args,
)
from gpt_faster.kernels.cpu.mixers import MAX_DECODE_ROWS, mixer_of
from gpt_faster.kernels.guard import EagerCall, GuardedForward, MethodOverride, remove_overrides
from gpt_faster.kernels.linear import PackedEmbedding, methods_implemented_by, pack_linears
from gpt_faster.kernels.modifications import (
    SUBLAYERS,
    Modifications,
    find_modifications,
    is_core,
    modified_after_packing,
)
from gpt_faster.layers.block import NoBranch, ParallelBlock, VariantBlock, post_norm_of
from gpt_faster.layers.norms import Scale
from gpt_faster.layers.shared_kv import SharedAttention
from model import Block, MoE
from quantize import QuantizedEmbedding
from tp import of_all, share, shared_by

# Only a matmul reads these buffers, so they have the model's dtype; all others are fp32.
MODEL_DTYPE_BUFFERS = {"hidden", "attended", "latents", "expert_hidden", "shared_hidden",
                       "end_hidden"}


# ---- A call of the model ------------------------------------------------------------------------

class CallState:
    """The queue of operations and the buffers between them, which all layers share.

    widths: buffer name -> elements per row; decode_widths: the same, of buffers that hold at most
    MAX_DECODE_ROWS rows. dtype: the model's.
    """

    def __init__(self, widths: dict[str, int], decode_widths: dict[str, int], dtype: torch.dtype):
        self.widths, self.decode_widths, self.dtype = widths, decode_widths, dtype
        self.dtypes = {name: dtype if name in MODEL_DTYPE_BUFFERS else torch.float32
                       for name in widths | decode_widths}
        self.buffers = {}                          # by name; a new dict when they grow
        self.n_row = 0                             # capacity of the buffers
        self.shape = None                          # B, T
        self.call_id = None                        # GuardedForward.n_call of this call
        self.structs = []                          # native.Positions, reused by all calls
        self.addresses, self.out = [], None        # the queue, and a layer's output

    def begin(self, x: Tensor, call_id: int) -> None:
        """x [B, T, D]. Discards what an interrupted call has queued."""
        self.addresses = []
        self.x = x                                 # keeps it alive until the queue has run
        if call_id != self.call_id:
            self.call_id = call_id
            self.alive = []                        # masks and RoPE tables: their ids are keys
            self.positions_of = {}                 # ids of mask and RoPE -> struct
            self.positions_in_use = []             # those, and others of this call
            self.mask = self.rope = self.positions = None
        if x.shape[:2] != self.shape:
            self._grow(x.shape[:2].numel())
            self.shape = x.shape[:2]
            self.out = self.view("x2")

    def view(self, name: str) -> Tensor:
        """A buffer as [B, T, width]."""
        n = self.widths[name]
        return self.buffers[name][:self.shape.numel() * n].view(*self.shape, n)

    @torch.inference_mode(False)                   # other calls use the buffers too
    def _grow(self, n_row: int) -> None:
        if n_row > self.n_row:
            self.n_row = 1 << (n_row - 1).bit_length()
            n_decode = min(self.n_row, MAX_DECODE_ROWS)
            sizes = [(name, self.n_row * n) for name, n in self.widths.items()]
            sizes += [(name, n_decode * n) for name, n in self.decode_widths.items()]
            self.buffers = {name: torch.empty(n, dtype=self.dtypes[name]) for name, n in sizes}

    def set_positions(self, rope, slot: Tensor, mask: Tensor, batch_idx: Tensor | None,
                      rope_half: int | None) -> None:
        """Fill self.positions. rope_half: columns of the RoPE tables that the mixer uses."""
        self.mask, self.rope = mask, rope
        key = id(mask), id(rope[0])
        if key not in self.positions_of:
            n = len(self.positions_of)
            if n == len(self.structs):
                self.structs.append(native.Positions())
            self.positions_of[key] = self.structs[n]
            cos, sin = (t[..., :rope_half] for t in rope)
            fill_positions(self.structs[n], self.shape, cos, sin, slot, mask, batch_idx)
            self.alive += [mask, rope]
            self.positions_in_use.append(self.structs[n])
        self.positions = self.positions_of[key]

    def run(self) -> list[int]:
        """Run the queued operations -> their addresses."""
        addresses, self.addresses = self.addresses, []
        native.run(addresses)
        return addresses


def fill_positions(positions: native.Positions, shape: torch.Size, cos, sin, slot, mask,
                   batch_idx) -> None:
    """shape: B, T. Raises ValueError if the tensors have other shapes."""
    B, T = shape
    cos, sin, slot, mask = (t.contiguous() for t in (cos, sin, slot.long(), mask))
    same_T = cos.shape == sin.shape and cos.shape[-2] == slot.shape[-1] == mask.shape[-2] == T
    if not same_T or any(t.shape[0] not in (1, B) for t in (cos, mask) if t.dim() == 4) or (
            slot.dim() == 2 and len(slot) not in (1, B)):
        raise ValueError(f"positions [{', '.join(map(str, slot.shape))}] do not match tokens "
                         f"[{B}, {T}]")
    for name, t in dict(cos=cos, sin=sin, slot=slot, mask=mask).items():
        positions.set(name, t)
    positions.set("rows", None if batch_idx is None else batch_idx.long().contiguous())
    if batch_idx is not None and batch_idx.shape != (B,):
        raise ValueError(f"batch_idx has {batch_idx.numel()} rows, tokens have {B}")
    positions.n_key = positions.mask_stride_t = mask.shape[-1]
    positions.mask_stride_b = mask.stride(0) if mask.dim() == 4 and len(mask) == B else 0
    positions.rope_stride_b = cos.stride(0) if cos.dim() == 4 and len(cos) == B else 0
    positions.slot_stride_b = slot.stride(0) if slot.dim() == 2 and len(slot) == B else 0


# ---- A layer ------------------------------------------------------------------------------------

class Operations:
    """A layer's operations in order, for one KV cache and one set of buffers.

    steps: lists of operation addresses to queue, or eager functions; the queue is flushed before
    each eager function. ops_with_...: operations with fields that change from call to call.
    """

    def __init__(self, layer: "OperationsLayer", call: CallState, cache: nn.Module,
                 sublayers: tuple):
        """sublayers: mixer, feed-forward and end; None: runs eagerly."""
        self.layer, self.module, self.parallel, self.dim = (
            layer, layer.layer, layer.parallel, layer.dim)
        self.call, self.cache, self.buffers, self.sublayers = call, cache, call.buffers, sublayers
        self.x = self.positions = self.shape = self.op_with_multiplier = None
        self.ops_with_input_x, self.ops_with_residual_x = [], []
        self.ops_per_row, self.ops_with_positions = [], []
        self.steps = []
        eager_sublayers = self.eager_attention, self.eager_feed_forward, self.eager_end
        for sublayer, eager in zip(sublayers, eager_sublayers):
            if sublayer is not None:
                sublayer.add_to(self)
            elif eager != self.eager_end or layer.has_end:
                self.steps.append(eager)

    # - Called by the sublayers' add_to()

    def add_per_row(self, op: ctypes.Structure, rows: int = 1) -> None:
        """rows: the operation's rows per row of x."""
        self._append(op)
        self.ops_per_row.append((op, rows))

    def add_with_positions(self, op: ctypes.Structure) -> None:
        self._append(op)
        self.ops_with_positions.append(op)

    def _append(self, op: ctypes.Structure) -> None:
        if not self.steps or callable(self.steps[-1]):
            self.steps.append([])
        self.steps[-1].append(ctypes.addressof(op))

    def linear(self, name: str, x: str | None, out: str, norm: nn.Module | None = None,
               rows: int = 1, **more) -> native.Linear:
        """x: input buffer; None: the layer's input, set at each call. more: other struct fields."""
        linear = self.layer.linears[name]
        *n_expert, n_out, n_in = linear.shape
        weights = weight_args(linear.packed, linear.scales, n_in)
        op = native.linear(
            *weights, (n_out, n_in), linear.bias, x=self.buffers.get(x), out=self.buffers[out],
            norm=norm_struct(norm) if norm else native.Norm(),
            x_bits=native.x_bits(self.call.dtype), n_expert=n_expert[0] if n_expert else 0, **more)
        if x is None:
            self.ops_with_input_x.append(op)
        self.add_per_row(op, rows)
        return op

    def branch(self, name: str, y: str, x: str | None, out: str, module: nn.Module,
               post: nn.Module, part: str = "only") -> None:
        """out = x + post(linear(y)), the end of a residual branch. x None: the layer's input.

        part: "first", then "last": two calls, whose linears are added before post.
        """
        if not shared_by(module) and isinstance(post, nn.Identity | Scale):
            x = out if part == "last" else x
            op = self.linear(name, y, out, residual=self.buffers.get(x))
            op.factor = factor_of(post)
            if x is None:
                self.ops_with_residual_x.append(op)
            return
        self.linear(name, y, "branch_out",
                    residual=self.buffers["branch_out"] if part == "last" else None)
        if part == "first":
            return
        if shared_by(module):
            self.steps.append(lambda *_: self.sum_over_ranks(module))
        self.add_norm(x, out, post)

    def add_norm(self, x: str | None, out: str, norm: nn.Module,
                 scale: Tensor | None = None) -> None:
        """out = (x + norm(branch_out)) * scale"""
        op = native.AddNorm(
            kind=native.ADD_NORM, D=self.dim, factor=factor_of(norm), scale=scale,
            norm=norm_struct(norm), x=self.buffers["branch_out"], residual=self.buffers.get(x),
            out=self.buffers[out])
        self.add_per_row(op)
        if x is None:
            self.ops_with_residual_x.append(op)

    def add_copy(self, x: str | None, out: str) -> None:
        """out = x, of a missing branch. x None: the layer's input."""
        op = native.AddNorm(kind=native.ADD_NORM, D=self.dim, factor=0.0, x=self.buffers.get(x),
                            residual=self.buffers.get(x), out=self.buffers[out])
        self.add_per_row(op)
        if x is None:
            self.ops_with_input_x.append(op)
            self.ops_with_residual_x.append(op)

    # - Eager steps, in the model's dtype

    def sum_over_ranks(self, module: nn.Module) -> None:
        y = self.call.view("branch_out")
        y.copy_(of_all(module, y.to(self.call.dtype)))

    def eager_attention(self, rope, slot, mask, batch_idx, *layer_embed) -> None:
        layer, x = self.module, self.x
        y = layer.attn(layer.attn_norm(self.copy(x)), rope, slot, mask, batch_idx)
        self.call.view("x1").copy_(x + post_norm_of(layer, "attn")(y))

    def eager_feed_forward(self, *_) -> None:
        layer, attended = self.module, self.call.view("x1")
        x = self.x if self.parallel else attended
        y = layer.ffn(layer.ffn_norm(self.copy(x)))
        self.call.view("x2").copy_(attended + post_norm_of(layer, "ffn")(y))

    def eager_end(self, rope, slot, mask, batch_idx, *layer_embed) -> None:
        x = self.call.view("x2")
        x.copy_(self.module.end(self.copy(x), *layer_embed))

    def copy(self, x: Tensor) -> Tensor:
        """x in the model's dtype. A copy: eager code and hooks may keep it."""
        return x.to(self.call.dtype, copy=True)

    # - Set at each call

    def set_shape(self, shape: torch.Size) -> None:
        self.shape = shape
        for op in self.ops_with_positions:
            op.B, op.T = shape
        for op, rows in self.ops_per_row:
            op.M = rows * shape.numel()

    def set_input(self, x: Tensor) -> None:
        self.x = x
        for op in self.ops_with_input_x:
            op.set("x", x)
        for op in self.ops_with_residual_x:
            op.set("residual", x)

    def set_positions(self, positions: native.Positions) -> None:
        self.positions = positions
        for op in self.ops_with_positions:
            op.set("positions", positions)

    def set_multiplier(self, layer_embed: Tensor) -> None:
        """layer_embed [B, T, P]: the layer's embedding of each token (Gemma 4)"""
        layer_embed = layer_embed.contiguous()
        self.op_with_multiplier.set("multiplier", layer_embed)
        self.op_with_multiplier.multiplier_stride = layer_embed.shape[2]


def cache_owner(attn: nn.Module) -> nn.Module:
    """The module whose cache attn reads: itself, or an earlier layer's attention. install_layers()
    sets it for a layer without attention, which asks only whether the call has a cache.
    """
    return attn.source[0] if isinstance(attn, SharedAttention) else attn


class OperationsLayer(MethodOverride):
    """Replaces the forward of a layer with packed linears.

    sublayers: which of mixer, feed-forward and end run as operations (may be none: x still stays in
    fp32 between layers). first, last: in its group of layers, which are queued together.
    returns_copy: eager code reads the output, so return a copy in the model's dtype.
    """

    def __init__(self, guard: GuardedForward, layer: nn.Module, sublayers: tuple[bool, ...], cfg):
        super().__init__(guard, layer, "forward")
        self.layer, self.first, self.last, self.returns_copy = layer, False, False, False
        self.owner = cache_owner(layer.attn)
        self.parallel = isinstance(layer, ParallelBlock)   # attn and ffn both read x
        self.dim = cfg.dim
        self.has_end = has_end(layer)
        kinds = mixer_of(layer), feed_forward_of(layer), LayerEnd
        self.supported, self.linears = sublayers, {}       # name -> OperationsLinear
        self.sublayers = tuple(kind(layer) if supported else None
                               for kind, supported in zip(kinds, sublayers))
        for where, sublayer in zip(("attn", "ffn", "end"), self.sublayers):
            for name in sublayer.linears if sublayer else ():
                name = f"{where}.{name}"
                self.linears[name] = operator.attrgetter(name)(layer)
        self.mixer = self.sublayers[0]
        self.operations = {}                       # is_decode -> Operations
        self.current = None

    def buffer_widths(self) -> tuple[dict[str, int], dict[str, int]]:
        """Buffer name -> elements per row: of all calls, and of decode steps only."""
        D = self.dim
        widths = dict(x1=D, x2=D, branch_out=D), {}
        for where, sublayer in zip(("attn", "ffn", "end"), self.sublayers):
            if sublayer:
                def dims_of(name, where=where):
                    *_, n_out, n_in = self.linears[f"{where}.{name}"].shape
                    return n_in, n_out
                widths[sublayer.decode_only].update(sublayer.buffer_widths(dims_of))
        return widths

    def _choose(self, call: CallState, cache: nn.Module) -> Operations:
        """The operations for the call's shape."""
        max_tokens = getattr(self.mixer, "max_tokens", MAX_DECODE_ROWS)
        is_decode = call.shape.numel() <= MAX_DECODE_ROWS and call.shape[1] <= max_tokens
        sublayers = tuple(sublayer if sublayer and (is_decode or not sublayer.decode_only) else None
                          for sublayer in self.sublayers)
        ops = self.operations.get(is_decode)
        if ops is None or ops.cache is not cache or ops.buffers is not call.buffers:
            ops = self.operations[is_decode] = Operations(self, call, cache, sublayers)
        if ops.shape is not call.shape:
            ops.set_shape(call.shape)
        return ops

    def __call__(self, x, rope, slot, mask, batch_idx=None, *layer_embed) -> Tensor:
        call, cache, operations = self.call, self.owner._modules.get("cache"), self.current
        if cache is None or not self.guard.in_model_call:
            self.guard.replay.spoil()
            return self.original(x, rope, slot, mask, batch_idx, *layer_embed)
        if self.first:
            x = x.contiguous()
            call.begin(x, self.guard.n_call)
        if (operations is None or operations.cache is not cache
                or operations.buffers is not call.buffers or operations.shape is not call.shape):
            operations = self.current = self._choose(call, cache)
        if x is not operations.x:
            operations.set_input(x)
        if mask is not call.mask or rope is not call.rope:
            rope_half = self.mixer and self.mixer.rope_half
            call.set_positions(rope, slot, mask, batch_idx, rope_half)
        if operations.ops_with_positions and call.positions is not operations.positions:
            operations.set_positions(call.positions)
        if operations.op_with_multiplier:
            operations.set_multiplier(*layer_embed)
        for step in operations.steps:
            if type(step) is list:
                call.addresses += step
            else:
                call.run()
                self.guard.replay.spoil()
                with self.guard.eager_section():
                    step(rope, slot, mask, batch_idx, *layer_embed)
        if layer_embed:
            self.guard.replay.spoil()
        if self.last:
            self.guard.replay.add(call.run(), call.positions_in_use, call.out)
        return operations.copy(call.out) if self.returns_copy else call.out


def has_end(layer: nn.Module) -> bool:
    return not isinstance(getattr(layer, "end", nn.Identity()), nn.Identity)


def pack_modules(layer: nn.Module, unmodified: tuple[str, ...] = ("",)) -> None:
    """Convert a layer's linears and experts to the operations' layout. In place.

    unmodified: pack only submodules with one of these in their name; the others run eagerly.
    """
    for name, module in list(layer.named_modules()):
        child = name.partition(".")[0]
        if is_packed(module) or not any(sublayer in child for sublayer in unmodified):
            continue
        if isinstance(module, MoE) and supports_experts(module) and "experts" not in vars(module):
            module.experts = FusedExperts(module)
        elif name.startswith("attn.") and supports_head_matrices(module):
            layer.set_submodule(name, pack_experts([module], None))
        elif supports_linear(module):
            layer.set_submodule(name, pack_linear(module))


# ---- A model ------------------------------------------------------------------------------------

def supports(model: nn.Module) -> bool:
    """True if use_operations() can compile this model."""
    return model.dtype in DTYPES and supports_linear(model.head)


def uses_operations(model: nn.Module) -> bool:
    """True if any part of the model runs as native operations."""
    return any(isinstance(value, MethodOverride) and not isinstance(value, GuardedForward)
               for module in model.modules() for value in vars(module).values())


@torch.inference_mode(False)                       # normal tensors even if called in inference mode
@torch.no_grad()
def use_operations(model: nn.Module) -> bool:
    """Run a model's unmodified parts as native operations; every call re-checks that they are
    unmodified. In place. Prints a note if parts run eagerly. Returns False if the whole model runs
    eagerly.
    """
    remove_overrides(model)
    if not supports(model):
        uninstall_experts(model)
        is_dtype = model.dtype not in DTYPES
        what = str(model.dtype)[6:] if is_dtype else f"{type(model.head).__name__} as output layer"
        torch_internals.note_once(
            f"the CPU kernels don't support {what}; running the model in eager PyTorch")
        pack_linears(model)
        return False
    if not native.is_available():
        pack_linears(model)
        return False
    if reason := modified_after_packing(model):
        raise RuntimeError(f"{reason} after its weights were packed: make this change before "
                           "loading or compiling the model")
    found = find_modifications(model)
    guard = None if "forward" in vars(model) else GuardedForward(model, use_operations)
    unmodified = [unmodified_sublayers(i, found) for i in range(len(model.layers))]
    all_eager = guard is None or found.model or not (any(unmodified) or not found.unembed)
    if found.all():
        uninstall_experts(model)
        torch_internals.note_once(f"{summarize(found.all())}; running "
                                  f"{eager_parts(found, all_eager, unmodified)} in eager PyTorch")
    if all_eager:
        pack_linears(model)
        if guard:
            guard.install([])
        return False
    pack_modules(model.per_layer, () if found.embed else ("",))
    for layer, sublayers in zip(model.layers, unmodified):
        pack_modules(layer, sublayers)             # also of a layer that is no block
    pack_outer_linears(model, found)
    pack_linears(model)                            # the remaining linears run eagerly
    install_layers(model, guard, unmodified, found)
    if not found.embed and EmbedInputs.supports(model):
        model.embed_inputs = EmbedInputs(guard, model)
    if not found.unembed and Unembed.supports(model):
        model.unembed = Unembed(guard, model)
    guard.replay.is_allowed = not found.all()
    packed = [m for m in model.modules() if is_packed(m)]
    guard.install([t for m in packed for t in m.tensors() if t is not None])
    return True


def is_block(layer: nn.Module) -> bool:
    """Does the layer compute what OperationsLayer does? A drafter's first layer does not."""
    blocks = Block, VariantBlock, ParallelBlock
    return type(layer).forward in [block.forward for block in blocks] or not is_core(type(layer))


def unmodified_sublayers(i: int, found: Modifications) -> tuple[str, ...]:
    """The sublayers of layer i that were not modified."""
    return tuple(sublayer for sublayer in SUBLAYERS if (i, sublayer) not in found.sublayers)


def summarize(reasons: list[str]) -> str:
    return reasons[0] + (f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else "")


def eager_parts(found: Modifications, all_eager: bool, unmodified: list[tuple[str, ...]]) -> str:
    """The parts of a model that run eagerly, for a note."""
    if all_eager:
        return "the model"
    n_layer = len(unmodified)
    n_whole = sum(not sublayers for sublayers in unmodified)
    parts = [f"{n_whole} of {n_layer} layers"] if n_whole else []
    for sublayer, name in dict(attn="attention", ffn="feed-forward", end="end").items():
        n = sum(bool(sublayers) and sublayer not in sublayers for sublayers in unmodified)
        parts += [f"{name} of {n} of {n_layer} layers"] if n else []
    parts += ["the model's forward"] if found.forward else []
    parts += ["the embedding"] if found.embed else []
    parts += ["the output layer"] if found.unembed else []
    return ", ".join(parts)


def uninstall_experts(model: nn.Module) -> None:
    """Restore the experts of all MoE modules: one that runs eagerly must call its own."""
    for module in model.modules():
        if isinstance(experts := vars(module).get("experts"), FusedExperts):
            experts.uninstall()


def install_layers(model: nn.Module, guard: GuardedForward, unmodified: list[tuple[str, ...]],
                   found: Modifications) -> None:
    """unmodified: the sublayers of each layer that were not modified. A layer with none keeps its
    forward.
    """
    layers = [OperationsLayer(guard, layer, supported_sublayers(layer, sublayers), model.cfg)
              if sublayers and is_block(layer) else None
              for layer, sublayers in zip(model.layers, unmodified)]
    installed = [layer for layer in layers if layer]
    if not installed:
        return
    with_cache = [layer for layer in installed if not isinstance(layer.owner, NoBranch)]
    for layer in installed:
        if isinstance(layer.owner, NoBranch) and with_cache:
            layer.owner = with_cache[0].owner
    widths, decode_widths = zip(*(layer.buffer_widths() for layer in installed))
    call = CallState(max_widths(widths), max_widths(decode_widths), model.dtype)
    for before, layer, after in zip([None, *layers], layers, [*layers[1:], None]):
        if layer:
            layer.call, layer.layer.forward = call, layer
            layer.first = before is None or found.forward is not None
            layer.last = after is None or found.forward is not None
            layer.returns_copy = layer.last and bool(found.all())
    model.record = RecordHidden(guard, model, call)
    for layer in model.layers:
        if not isinstance(layer.forward, OperationsLayer):
            setattr(layer, torch_internals.CALL_OVERRIDE, EagerCall(guard, layer))


def supported_sublayers(layer: nn.Module, unmodified: tuple[str, ...]) -> tuple[bool, ...]:
    """Which of mixer, feed-forward and end are unmodified and supported by the operations."""
    return ("attn" in unmodified and mixer_of(layer).supports(layer),
            "ffn" in unmodified and feed_forward_of(layer).supports(layer),
            "end" in unmodified and has_end(layer) and LayerEnd.supports(layer))


def max_widths(widths: tuple[dict[str, int], ...]) -> dict[str, int]:
    names = {name for layer in widths for name in layer}
    return {name: max(layer.get(name, 0) for layer in widths) for name in names}


def pack_outer_linears(model: nn.Module, found: Modifications) -> None:
    """Pack the linears outside of the layers. Keeps the head if it is packed already (shared with
    a compiled model), runs eagerly, or is tied to an embedding that runs eagerly.
    """
    for name, module in list(model.named_modules()):
        is_outer = name.partition(".")[0] not in ("layers", "per_layer", "head")
        if is_outer and supports_linear(module):
            model.set_submodule(name, pack_linear(module))
    is_tied = getattr(model.embed, "weight", None) is getattr(model.head, "weight", None)
    if not (is_packed(model.head) or found.unembed or found.embed and is_tied):
        pack_head(model)


def pack_head(model: nn.Module) -> None:
    """Pack the head. Embeddings that share its weight share the packed one."""
    old = model.head
    model.head = pack_linear(old)
    if forward := shared_by(old):
        share(model.head, forward)
    scales = model.head.scales                     # fp32, as the operations need
    for name, embed in list(model.named_modules()):
        kinds = nn.Embedding | PackedEmbedding | QuantizedEmbedding
        if isinstance(embed, kinds) and getattr(embed, "weight", None) is old.weight:
            scales = getattr(embed, "scales", None) if scales is None else scales
            new = OperationsEmbedding(model.head, scales, model.dtype)
            new.implements = methods_implemented_by(embed)
            model.set_submodule(name, new)
