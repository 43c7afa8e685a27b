"""What exchanges information between positions, as operations: attention, and gated DeltaNet.

Each says whether a layer's first half has the parts that its operation knows, which linears come
before and after it, and how it is described. kernels/cpu_layers.py puts them between the others.

    mixer = mixer_of(layer)
    if mixer.fits(layer): ...
"""

from torch import nn

from kernels import cpu_ops
from kernels.cpu_linears import fits_linear, fits_norm, norm_struct
from layers.delta import DeltaNet
from layers.norms import SoftCap, WideNorm
from layers.shared_kv import SharedAttention


class AttentionMixer:
    """RoPE of queries and keys, the cache, softmax, a gate."""

    def __init__(self, layer: nn.Module):
        self.before = linears_before(layer.attn)   # linears that read the layer's normalized input
        self.half = layer.attn.head_dim // 2       # as many of RoPE's angles, if there are more

    @staticmethod
    def fits(layer: nn.Module) -> bool:
        attn, attend = layer.attn, getattr(layer.attn, "attend", None)
        linears = [getattr(attn, name, None) for name in (*linears_before(attn), "wo")]
        if None in linears or not hasattr(attend, "scale"):
            return False
        has_scores = not hasattr(attend, "sinks") or isinstance(attend.cap, SoftCap | nn.Identity)
        if getattr(attend, "slopes", None) is not None:
            return False
        others = [getattr(attn, name, nn.Identity()) for name in ("clip", "q_norm", "k_norm")]
        norms = layer.attn_norm, *others, layer.post_attn_norm
        return has_scores and all(map(fits_norm, norms)) and all(map(fits_linear, linears))

    def operation(self, attn: nn.Module, at: dict[str, int], out_type: int) -> cpu_ops.Attention:
        """at: where buffers are, by the linears' names, and "attended"."""
        attend, cache = attn.attend, attn.cache
        _, K, S, H = cache.k.shape
        sinks, cap = (getattr(attend, name, None) for name in ("sinks", "cap"))
        norms = {name: norm_struct(getattr(attn, name, nn.Identity()), H)
                 for name in ("q_norm", "k_norm", "v_norm")}
        queries = self.before[0]                   # with keys and values, or without
        return cpu_ops.Attention(
            kind=cpu_ops.ATTENTION, N=attn.wo.shape[1] // H, K=K, H=H, S=S,
            cache_type=cpu_ops.TYPES[cache.k.dtype], wide_norm=isinstance(attn.q_norm, WideNorm),
            scale=attend.scale, cap=cap.cap if isinstance(cap, SoftCap) else 0.0,
            has_keys=queries == "wqkv", qkv=at[queries],
            gate=at["gate"] if "gate" in self.before else None,
            sinks=None if sinks is None else sinks.data_ptr(), k_cache=cache.k.data_ptr(),
            v_cache=cache.v.data_ptr(), out=at["attended"], out_type=out_type, **norms)


def linears_before(attn: nn.Module) -> list[str]:
    queries = "wq" if isinstance(attn, SharedAttention) else "wqkv"
    return [queries] if getattr(attn, "gate", None) is None else [queries, "gate"]


class DeltaMixer:
    """A short convolution, a state for each head, a gated norm."""

    def __init__(self, layer: nn.Module):
        self.before, self.half = ["qkv", "gate", "rates"], None
        self.taps = layer.attn.conv.detach().T.contiguous()

    @staticmethod
    def fits(layer: nn.Module) -> bool:
        attn = layer.attn
        linears = attn.qkv, attn.gate, attn.rates, attn.wo
        lanes = cpu_ops.block_rows() // 2
        whole = attn.shape.k_dim % lanes == 0 and attn.shape.v_dim % (2 * lanes) == 0
        norms = layer.attn_norm, layer.post_attn_norm
        return (whole and attn.shape.n_tap <= cpu_ops.MOST_TAPS and all(map(fits_norm, norms))
                and all(map(fits_linear, linears)))

    def operation(self, attn: nn.Module, at: dict[str, int], out_type: int) -> cpu_ops.Delta:
        shape, cache = attn.shape, attn.cache
        return cpu_ops.Delta(
            kind=cpu_ops.DELTA, Nk=shape.n_k_head, N=shape.n_v_head, Dk=shape.k_dim,
            Dv=shape.v_dim, n_tap=shape.n_tap, n_state=cache.states.shape[1],
            n_input=cache.inputs.shape[1], input_type=cpu_ops.TYPES[cache.inputs.dtype],
            q_scale=shape.k_dim**-0.5, norm=cpu_ops.Norm(1, attn.eps, attn.norm.weight.data_ptr()),
            taps=self.taps.data_ptr(), decay_rate=attn.decay_rate.data_ptr(),
            decay_bias=attn.decay_bias.data_ptr(), x=at["qkv"], z=at["gate"], rates=at["rates"],
            states=cache.states.data_ptr(), inputs=cache.inputs.data_ptr(), out=at["attended"],
            out_type=out_type)


def mixer_of(layer: nn.Module) -> type:
    """Which of them a layer's first half may be; its fits() says whether it is."""
    return DeltaMixer if isinstance(layer.attn, DeltaNet) else AttentionMixer
