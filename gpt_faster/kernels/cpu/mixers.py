"""Token mixers as operations: attention, latent attention, gated DeltaNet, Mamba-2, short
convolutions.

supports() checks whether a layer's mixer has only modules that the operations implement;
decode_only and max_tokens limit the calls that use them; add_to() adds the operations to a layer's
list (layers.Operations).

    mixer = mixer_of(layer)
    if mixer.supports(layer): mixer(layer).add_to(operations)
"""

import torch
from torch import Tensor, nn

from gpt_faster.kernels.cpu import native
from gpt_faster.kernels.cpu.experts import supports_head_matrices
from gpt_faster.kernels.cpu.linears import (
    is_fp32_on_cpu,
    norm_struct,
    supports_linear,
    supports_norm,
)
from gpt_faster.layers.attention import VariantAttention
from gpt_faster.layers.block import NoBranch, post_norm_of
from gpt_faster.layers.delta import DeltaNet
from gpt_faster.layers.latent import LatentAttention, PaddedSDPA
from gpt_faster.layers.mamba import AttentionWithMamba, GroupNorm, Mamba
from gpt_faster.layers.norms import SoftCap, WideNorm
from gpt_faster.layers.shared_kv import SharedAttention
from gpt_faster.layers.short_conv import ShortConvolution
from model import Attention

MAX_DECODE_ROWS = 64                               # B T of a call that counts as a decode step


class AttentionMixer:
    """RoPE of queries and keys, cache update, softmax, optional gate."""

    decode_only = False                            # True: up to MAX_DECODE_ROWS rows only

    def __init__(self, layer: nn.Module):
        self.input_linears = input_linears_of(layer.attn)  # they read the normalized input
        self.linears = [*self.input_linears, "wo"]
        self.rope_half = layer.attn.head_dim // 2  # RoPE tables may have more columns

    @staticmethod
    def supports(layer: nn.Module) -> bool:
        attn, attend = layer.attn, getattr(layer.attn, "attend", None)
        linears = [getattr(attn, name, None) for name in (*input_linears_of(attn), "wo")]
        if None in linears or not hasattr(attend, "scale"):
            return False
        has_scores = not hasattr(attend, "sinks") or isinstance(attend.cap, SoftCap | nn.Identity)
        if getattr(attend, "slopes", None) is not None or getattr(attn, "softplus_gate", False):
            return False
        others = [getattr(attn, name, nn.Identity()) for name in ("clip", "q_norm", "k_norm")]
        norms = layer.attn_norm, *others, post_norm_of(layer, "attn")
        return has_scores and all(map(supports_norm, norms)) and all(map(supports_linear, linears))

    def buffer_widths(self, dims_of) -> dict[str, int]:
        """Buffer name -> elements per row. dims_of: linear's name -> its inputs, outputs."""
        widths = {name: dims_of(name)[1] for name in self.input_linears}
        return widths | {"attended": dims_of("wo")[0]}

    def add_to(self, ops) -> None:
        self.add_inner(ops)
        ops.branch("attn.wo", "attended", None, "x1", ops.module.attn,
                   post_norm_of(ops.module, "attn"))

    def add_inner(self, ops) -> None:
        """All but the output projection and what follows it."""
        for name in self.input_linears:
            ops.linear(f"attn.{name}", None, name, ops.module.attn_norm)
        ops.add_with_positions(self.operation(ops.module.attn, ops.buffers))

    def operation(self, attn: nn.Module, buffers: dict[str, Tensor]) -> native.Attention:
        """buffers: by the linears' names, and "attended"."""
        attend, cache = attn.attend, attn.cache
        n_row, K, S, _ = cache.k.shape
        H = attn.head_dim
        sinks, cap = (getattr(attend, name, None) for name in ("sinks", "cap"))
        norms = {name: norm_struct(getattr(attn, name, nn.Identity()), H)
                 for name in ("q_norm", "k_norm", "v_norm")}
        queries = self.input_linears[0]            # "wqkv", or "wq" if keys are shared
        return native.Attention(
            kind=native.ATTENTION, N=attn.wo.shape[1] // H, K=K, H=H, V=H, S=S, n_row=n_row,
            wide_norm=isinstance(attn.q_norm, WideNorm),
            scale=attend.scale, cap=cap.cap if isinstance(cap, SoftCap) else 0.0,
            has_keys=queries == "wqkv", qkv=buffers[queries],
            gate=buffers["gate"] if "gate" in self.input_linears else None, sinks=sinks,
            k_cache=cache_struct(cache, "k"), v_cache=cache_struct(cache, "v"),
            out=buffers["attended"], **norms)


def input_linears_of(attn: nn.Module) -> list[str]:
    queries = "wq" if isinstance(attn, SharedAttention) else "wqkv"
    return [queries] if getattr(attn, "gate", None) is None else [queries, "gate"]


class LatentMixer:
    """MLA with absorbed matrices: latents in the cache, one key for all heads. Few tokens only."""

    decode_only = True

    def __init__(self, layer: nn.Module):
        attn = layer.attn
        self.input_linears = ["wqkv_a", "wq_b"] if attn.has_q_rank else ["wq_kv_a"]
        self.linears = [*self.input_linears, "wk_b", "wv_b", "wo"]
        self.rope_half = attn.rope_dim // 2
        self.max_tokens = min(MAX_DECODE_ROWS, attn.max_absorbed_tokens)
        self.n_head, self.rank, self.rope_dim = attn.n_head, attn.kv_rank, attn.rope_dim

    @staticmethod
    def supports(layer: nn.Module) -> bool:
        attn = layer.attn
        norms = layer.attn_norm, post_norm_of(layer, "attn"), attn.kv_a_norm
        if attn.has_q_rank:
            queries, norms = [attn.wqkv_a, attn.wq_b], (*norms, attn.q_a_norm)
        else:
            queries = [attn.wq_kv_a]
        return (type(attn.attend) is PaddedSDPA and all(map(supports_norm, norms))
                and all(map(supports_linear, (*queries, attn.wo)))
                and all(map(supports_head_matrices, (attn.wk_b, attn.wv_b))))

    def buffer_widths(self, dims_of) -> dict[str, int]:
        return {name: dims_of(name)[1] for name in self.input_linears} | {
            "queries": self.n_head * (self.rank + self.rope_dim),
            "latents": self.n_head * self.rank, "attended": dims_of("wo")[0]}

    def add_to(self, ops) -> None:
        attn, N, width = ops.module.attn, self.n_head, self.rank + self.rope_dim
        first, last = self.input_linears[0], self.input_linears[-1]
        ops.linear(f"attn.{first}", None, first, ops.module.attn_norm)
        stride = sum(attn.split)                   # queries or their latent, then keys
        q, q_stride, k = ops.buffers[first], stride, ops.buffers[first][attn.split[0]:]
        if attn.has_q_rank:
            ops.linear("attn.wq_b", "wqkv_a", "wq_b", attn.q_a_norm, x_stride=stride)
            q, q_stride = ops.buffers["wq_b"], N * (attn.nope_dim + self.rope_dim)
        cache = cache_struct(attn.cache, "k")
        n_row, S, _ = attn.cache.k.shape
        ops.add_with_positions(native.Latent(
            kind=native.LATENT, N=N, nope=attn.nope_dim, rope=self.rope_dim, rank=self.rank, S=S,
            n_row=n_row, q_stride=q_stride, k_stride=stride, norm=norm_struct(attn.kv_a_norm), q=q,
            k=k, queries=ops.buffers["queries"], cache=cache))
        ops.linear("attn.wk_b", last, "queries", x_stride=q_stride,
                   x_expert_stride=attn.nope_dim + self.rope_dim, out_stride=N * width,
                   out_expert_stride=width)
        ops.add_with_positions(native.Attention(
            kind=native.ATTENTION, N=N, K=1, H=width, V=self.rank, S=S, n_row=n_row,
            rope_applied=True, scale=attn.attend.scale, qkv=ops.buffers["queries"], k_cache=cache,
            v_cache=cache, out=ops.buffers["latents"]))
        ops.linear("attn.wv_b", "latents", "attended", x_stride=N * self.rank,
                   x_expert_stride=self.rank, out_stride=N * attn.v_dim,
                   out_expert_stride=attn.v_dim)
        ops.branch("attn.wo", "attended", None, "x1", attn,
                   post_norm_of(ops.module, "attn"))


class DeltaMixer:
    """Gated DeltaNet: a short convolution, a state per head, a gated norm."""

    decode_only = False

    def __init__(self, layer: nn.Module):
        self.input_linears, self.rope_half = ["qkv", "gate", "rates"], None
        self.linears = [*self.input_linears, "wo"]
        store_transposed(layer.attn.conv)

    @staticmethod
    def supports(layer: nn.Module) -> bool:
        attn = layer.attn
        linears = attn.qkv, attn.gate, attn.rates, attn.wo
        lanes = native.n_lane()
        is_aligned = attn.shape.k_dim % lanes == 0 and attn.shape.v_dim % (2 * lanes) == 0
        norms = layer.attn_norm, post_norm_of(layer, "attn")
        return (is_aligned and attn.shape.n_tap <= native.MAX_TAPS and attn.shape.beta_scale == 1
                and all(map(supports_norm, norms)) and all(map(supports_linear, linears)))

    buffer_widths = AttentionMixer.buffer_widths
    add_to = AttentionMixer.add_to
    add_inner = AttentionMixer.add_inner

    def operation(self, attn: nn.Module, buffers: dict[str, Tensor]) -> native.Delta:
        shape, cache = attn.shape, attn.cache
        return native.Delta(
            kind=native.DELTA, Nk=shape.n_k_head, N=shape.n_v_head, Dk=shape.k_dim,
            Dv=shape.v_dim, n_tap=shape.n_tap, n_state=cache.states.shape[1],
            n_input=cache.inputs.shape[1], n_row=len(cache.inputs), q_scale=shape.k_dim**-0.5,
            norm=native.Norm(kind=1, eps=attn.eps, weight=attn.norm.weight), taps=attn.conv.T,
            decay_rate=attn.decay_rate, decay_bias=attn.decay_bias, x=buffers["qkv"],
            z=buffers["gate"], rates=buffers["rates"], states=cache.states, inputs=cache.inputs,
            out=buffers["attended"])


class MambaMixer:
    """Mamba-2: a short convolution, a state per head, a gated norm over each group's heads."""

    decode_only = False

    def __init__(self, layer: nn.Module, where: str = "attn"):
        """where: the Mamba module's name in the layer."""
        self.where, self.rope_half = where, None
        self.linears = [f"{where}.{name}".removeprefix("attn.")
                        for name in ("qkv", "gate", "decay", "wo")]
        mamba = layer.get_submodule(where)
        self.is_norm_sharded = "mean_square" in vars(mamba.norm)   # summed over ranks, by tp.py
        store_transposed(mamba.conv)

    @staticmethod
    def supports(layer: nn.Module, where: str = "attn") -> bool:
        mamba = layer.get_submodule(where)
        shape, norm = mamba.shape, mamba.norm
        is_aligned = shape.head_dim % native.n_lane() == shape.state_dim % native.n_lane() == 0
        if not is_aligned or shape.n_tap > native.MAX_TAPS:
            return False
        if type(norm) is not (GroupNorm if shape.norm else nn.Identity):
            return False
        if "mean_square" in vars(norm) and shape.norm_first:   # the gate would follow the ranks
            return False
        linears = mamba.qkv, mamba.gate, mamba.decay, mamba.wo
        norms = layer.attn_norm, post_norm_of(layer, "attn")
        vectors = mamba.conv_bias, mamba.decay_bias, mamba.decay_rate, mamba.skip
        return (all(map(supports_norm, norms)) and all(map(supports_linear, linears))
                and is_fp32_on_cpu(*vectors, getattr(norm, "weight", None)))

    def buffer_widths(self, dims_of) -> dict[str, int]:
        *inputs, output = self.linears
        widths = {name.rpartition(".")[2]: dims_of(name)[1] for name in inputs}
        width = dims_of(output)[0]
        return widths | {"attended": width} | ({"gated": width} if self.is_norm_sharded else {})

    def add_to(self, ops) -> None:
        self.add_inner(ops)
        ops.branch("attn.wo", "attended", None, "x1", ops.module.attn,
                   post_norm_of(ops.module, "attn"))

    def add_inner(self, ops) -> None:
        """All but the output projection and what follows it."""
        mamba = ops.module.get_submodule(self.where)
        for name in ("qkv", "gate", "decay"):
            ops.linear(f"{self.where}.{name}", None, name, ops.module.attn_norm)
        ops.add_with_positions(self.operation(mamba, ops.buffers))
        if self.is_norm_sharded:
            ops.steps.append(lambda *_: normalize_over_ranks(mamba.norm, ops))

    def operation(self, mamba: nn.Module, buffers: dict[str, Tensor]) -> native.Mamba:
        shape, cache = mamba.shape, mamba.cache
        norm, out = native.Norm(), buffers["attended"]
        if self.is_norm_sharded:
            out = buffers["gated"]
        elif shape.norm:
            norm = native.Norm(kind=1, eps=mamba.norm.eps, weight=mamba.norm.weight)
        return native.Mamba(
            kind=native.MAMBA, Nk=shape.n_group, N=shape.n_head, Dk=shape.state_dim,
            Dv=shape.head_dim, n_tap=shape.n_tap, n_state=cache.states.shape[1],
            n_input=cache.inputs.shape[1], n_row=len(cache.inputs), norm_first=shape.norm_first,
            min_step=shape.min_step, max_step=shape.max_step, norm=norm, taps=mamba.conv.T,
            conv_bias=mamba.conv_bias, decay_rate=mamba.decay_rate, decay_bias=mamba.decay_bias,
            skip=mamba.skip, x=buffers["qkv"], z=buffers["gate"], steps=buffers["decay"],
            states=cache.states, inputs=cache.inputs, out=out)


def normalize_over_ranks(norm: GroupNorm, ops) -> None:
    """attended = norm(gated): the heads of a group are on several ranks."""
    shape = ops.shape.numel(), len(norm.weight)
    gated, attended = (ops.buffers[name][:shape[0] * shape[1]].view(shape)
                       for name in ("gated", "attended"))
    attended.copy_(norm(gated))


class AttentionAndMambaMixer:
    """Attention and Mamba-2 with the same input (Falcon-H1). The buffers are used by one, then by
    the other."""

    decode_only = False

    def __init__(self, layer: nn.Module):
        self.attention, self.mamba = AttentionMixer(layer), MambaMixer(layer, "attn.mamba")
        self.linears = [*self.attention.linears, *self.mamba.linears]
        self.rope_half = self.attention.rope_half

    @staticmethod
    def supports(layer: nn.Module) -> bool:
        return AttentionMixer.supports(layer) and MambaMixer.supports(layer, "attn.mamba")

    def buffer_widths(self, dims_of) -> dict[str, int]:
        ours, theirs = (part.buffer_widths(dims_of) for part in (self.attention, self.mamba))
        return ours | theirs | {"attended": max(ours["attended"], theirs["attended"])}

    def add_to(self, ops) -> None:
        output = None, "x1", ops.module.attn, post_norm_of(ops.module, "attn")
        self.mamba.add_inner(ops)
        ops.branch("attn.mamba.wo", "attended", *output, part="first")
        self.attention.add_inner(ops)
        ops.branch("attn.wo", "attended", *output, part="last")


class ShortConvMixer:
    """A short convolution between two gates."""

    decode_only = False

    def __init__(self, layer: nn.Module):
        self.input_linears, self.rope_half = ["wbcx"], None
        self.linears = [*self.input_linears, "wo"]
        store_transposed(layer.attn.taps)

    @staticmethod
    def supports(layer: nn.Module) -> bool:
        linears = layer.attn.wbcx, layer.attn.wo
        norms = layer.attn_norm, post_norm_of(layer, "attn")
        return all(map(supports_norm, norms)) and all(map(supports_linear, linears))

    buffer_widths = AttentionMixer.buffer_widths
    add_to = AttentionMixer.add_to
    add_inner = AttentionMixer.add_inner

    def operation(self, attn: nn.Module, buffers: dict[str, Tensor]) -> native.ShortConv:
        inputs = attn.cache.inputs
        return native.ShortConv(
            kind=native.SHORT_CONV, width=attn.shape.width, n_tap=attn.shape.n_tap,
            n_input=inputs.shape[1], n_row=len(inputs), taps=attn.taps.T, bias=attn.taps_bias,
            x=buffers["wbcx"], inputs=inputs, out=buffers["attended"])


def cache_struct(cache: nn.Module, name: str) -> native.Cache:
    """name: k or v, of a cache in the model's dtype or of layers/quantized_cache.py."""
    return native.cache_of(getattr(cache, name), getattr(cache, f"{name}_scale", None),
                           getattr(cache, f"{name}_turn", 1))


def store_transposed(taps: nn.Parameter) -> None:
    """Store taps [channels, n_tap] as [n_tap, channels] in memory, the operations' layout.

    In place: later edits of the parameter still take effect. A tensor made in inference mode must
    be replaced by another one.
    """
    with torch.inference_mode(taps.is_inference()):
        taps.data = taps.data.T.contiguous().T


class NoMixer:
    """Of a layer without attention or the like (Nemotron-H): x1 = x."""

    decode_only, rope_half = False, None

    def __init__(self, layer: nn.Module):
        self.linears = []

    @staticmethod
    def supports(layer: nn.Module) -> bool:
        return True

    def buffer_widths(self, dims_of) -> dict[str, int]:
        return {}

    def add_to(self, ops) -> None:
        ops.add_copy(None, "x1")


class EagerMixer:
    """Of an attn that runs in PyTorch."""

    @staticmethod
    def supports(layer: nn.Module) -> bool:
        return False


MIXERS = {**dict.fromkeys((Attention, VariantAttention, SharedAttention), AttentionMixer),
          DeltaNet: DeltaMixer, LatentAttention: LatentMixer, ShortConvolution: ShortConvMixer,
          Mamba: MambaMixer, AttentionWithMamba: AttentionAndMambaMixer, NoBranch: NoMixer}


def mixer_of(layer: nn.Module) -> type:
    """The mixer class for a layer's attn; its supports() has the final say.

    By the exact class: a subclass in layers/ may compute something else.
    """
    return MIXERS.get(type(layer.attn), EagerMixer)
