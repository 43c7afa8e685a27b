"""What exchanges information between positions, as operations: attention, latent attention, gated
DeltaNet, short convolutions.

Each says whether a layer's first half has the parts that its operations know and how many tokens
of a call they take, and adds them to a layer's list (layers.Operations).

    mixer = mixer_of(layer)
    if mixer.fits(layer): mixer(layer).add_to(operations)
"""

from torch import Tensor, nn

from gpt_faster.kernels.cpu import native
from gpt_faster.kernels.cpu.experts import fits_head_matrices
from gpt_faster.kernels.cpu.linears import fits_linear, fits_norm, norm_struct
from gpt_faster.layers.block import post_norm_of
from gpt_faster.layers.delta import DeltaNet
from gpt_faster.layers.latent import LatentAttention, PaddedSDPA
from gpt_faster.layers.norms import SoftCap, WideNorm
from gpt_faster.layers.shared_kv import SharedAttention
from gpt_faster.layers.short_conv import ShortConvolution

FEW = 64                                           # rows of a call that is no long prompt's


class AttentionMixer:
    """RoPE of queries and keys, the cache, softmax, a gate."""

    few_rows = False                               # takes any number

    def __init__(self, layer: nn.Module):
        self.before = linears_before(layer.attn)   # linears that read the layer's normalized input
        self.linears = [*self.before, "wo"]
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
        norms = layer.attn_norm, *others, post_norm_of(layer, "attn")
        return has_scores and all(map(fits_norm, norms)) and all(map(fits_linear, linears))

    def widths(self, width_of) -> dict[str, int]:
        """Numbers for a row of what lies between; width_of: a linear's name -> inputs, outputs."""
        return {name: width_of(name)[1] for name in self.before} | {"attended": width_of("wo")[0]}

    def add_to(self, ops) -> None:
        attn, norm = ops.parts.attn, ops.parts.attn_norm
        for name in self.before:
            ops.linear(f"attn.{name}", None, name, norm)
        ops.at_positions(self.operation(attn, ops.at))
        ops.branch("attn.wo", "attended", None, "x1", attn,
                   post_norm_of(ops.parts, "attn"))

    def operation(self, attn: nn.Module, at: dict[str, Tensor]) -> native.Attention:
        """at: buffers by the linears' names, and "attended"."""
        attend, cache = attn.attend, attn.cache
        n_row, K, S, H = cache.k.shape
        sinks, cap = (getattr(attend, name, None) for name in ("sinks", "cap"))
        norms = {name: norm_struct(getattr(attn, name, nn.Identity()), H)
                 for name in ("q_norm", "k_norm", "v_norm")}
        queries = self.before[0]                   # with keys and values, or without
        return native.Attention(
            kind=native.ATTENTION, N=attn.wo.shape[1] // H, K=K, H=H, V=H, S=S, n_row=n_row,
            wide_norm=isinstance(attn.q_norm, WideNorm),
            scale=attend.scale, cap=cap.cap if isinstance(cap, SoftCap) else 0.0,
            has_keys=queries == "wqkv", qkv=at[queries],
            gate=at["gate"] if "gate" in self.before else None, sinks=sinks, k_cache=cache.k,
            v_cache=cache.v, out=at["attended"], **norms)


def linears_before(attn: nn.Module) -> list[str]:
    queries = "wq" if isinstance(attn, SharedAttention) else "wqkv"
    return [queries] if getattr(attn, "gate", None) is None else [queries, "gate"]


class LatentMixer:
    """Latents into the cache, queries absorbed, one key for all heads; of few tokens."""

    few_rows = True

    def __init__(self, layer: nn.Module):
        attn = layer.attn
        self.before = ["wqkv_a", "wq_b"] if attn.has_q_rank else ["wq_kv_a"]
        self.linears = [*self.before, "wk_b", "wv_b", "wo"]
        self.half, self.most = attn.rope_dim // 2, min(FEW, attn.max_absorbed_tokens)
        self.n_head, self.rank, self.rope_dim = attn.n_head, attn.kv_rank, attn.rope_dim

    @staticmethod
    def fits(layer: nn.Module) -> bool:
        attn = layer.attn
        norms = layer.attn_norm, post_norm_of(layer, "attn"), attn.kv_a_norm
        if attn.has_q_rank:
            queries, norms = [attn.wqkv_a, attn.wq_b], (*norms, attn.q_a_norm)
        else:
            queries = [attn.wq_kv_a]
        return (type(attn.attend) is PaddedSDPA and all(map(fits_norm, norms))
                and all(map(fits_linear, (*queries, attn.wo)))
                and all(map(fits_head_matrices, (attn.wk_b, attn.wv_b))))

    def widths(self, width_of) -> dict[str, int]:
        return {name: width_of(name)[1] for name in self.before} | {
            "queries": self.n_head * (self.rank + self.rope_dim),
            "latents": self.n_head * self.rank, "attended": width_of("wo")[0]}

    def add_to(self, ops) -> None:
        attn, N, width = ops.parts.attn, self.n_head, self.rank + self.rope_dim
        ops.linear(f"attn.{self.before[0]}", None, self.before[0], ops.parts.attn_norm)
        stride = sum(attn.split)                   # of queries or their latent, then keys'
        q, q_stride, k = ops.at[self.before[0]], stride, ops.at[self.before[0]][attn.split[0]:]
        if attn.has_q_rank:
            ops.linear("attn.wq_b", "wqkv_a", "wq_b", attn.q_a_norm, x_stride=stride)
            q, q_stride = ops.at["wq_b"], N * (attn.nope_dim + self.rope_dim)
        cache = attn.cache.k
        n_row, S, _ = cache.shape
        ops.at_positions(native.Latent(
            kind=native.LATENT, N=N, nope=attn.nope_dim, rope=self.rope_dim, rank=self.rank, S=S,
            n_row=n_row, q_stride=q_stride, k_stride=stride, norm=norm_struct(attn.kv_a_norm), q=q,
            k=k, queries=ops.at["queries"], cache=cache))
        ops.linear("attn.wk_b", self.before[-1], "queries", x_stride=q_stride, out_step=width,
                   x_step=attn.nope_dim + self.rope_dim, out_stride=N * width)
        ops.at_positions(native.Attention(
            kind=native.ATTENTION, N=N, K=1, H=width, V=self.rank, S=S, n_row=n_row,
            is_turned=True, scale=attn.attend.scale, qkv=ops.at["queries"], k_cache=cache,
            v_cache=cache, out=ops.at["latents"]))
        ops.linear("attn.wv_b", "latents", "attended", x_stride=N * self.rank, x_step=self.rank,
                   out_stride=N * attn.v_dim, out_step=attn.v_dim)
        ops.branch("attn.wo", "attended", None, "x1", attn,
                   post_norm_of(ops.parts, "attn"))


class DeltaMixer:
    """A short convolution, a state for each head, a gated norm."""

    few_rows = False

    def __init__(self, layer: nn.Module):
        self.before, self.half = ["qkv", "gate", "rates"], None
        self.linears = [*self.before, "wo"]
        lay_out_by_taps(layer.attn.conv)

    @staticmethod
    def fits(layer: nn.Module) -> bool:
        attn = layer.attn
        linears = attn.qkv, attn.gate, attn.rates, attn.wo
        lanes = native.block_rows() // 2
        whole = attn.shape.k_dim % lanes == 0 and attn.shape.v_dim % (2 * lanes) == 0
        norms = layer.attn_norm, post_norm_of(layer, "attn")
        return (whole and attn.shape.n_tap <= native.MOST_TAPS and all(map(fits_norm, norms))
                and all(map(fits_linear, linears)))

    widths = AttentionMixer.widths
    add_to = AttentionMixer.add_to

    def operation(self, attn: nn.Module, at: dict[str, Tensor]) -> native.Delta:
        shape, cache = attn.shape, attn.cache
        return native.Delta(
            kind=native.DELTA, Nk=shape.n_k_head, N=shape.n_v_head, Dk=shape.k_dim,
            Dv=shape.v_dim, n_tap=shape.n_tap, n_state=cache.states.shape[1],
            n_input=cache.inputs.shape[1], n_row=len(cache.inputs), q_scale=shape.k_dim**-0.5,
            norm=native.Norm(kind=1, eps=attn.eps, weight=attn.norm.weight), taps=attn.conv.T,
            decay_rate=attn.decay_rate, decay_bias=attn.decay_bias, x=at["qkv"], z=at["gate"],
            rates=at["rates"], states=cache.states, inputs=cache.inputs, out=at["attended"])


class ShortConvMixer:
    """A convolution between two gates."""

    few_rows = False

    def __init__(self, layer: nn.Module):
        self.before, self.half = ["wbcx"], None
        self.linears = [*self.before, "wo"]
        lay_out_by_taps(layer.attn.taps)

    @staticmethod
    def fits(layer: nn.Module) -> bool:
        linears = layer.attn.wbcx, layer.attn.wo
        norms = layer.attn_norm, post_norm_of(layer, "attn")
        return all(map(fits_norm, norms)) and all(map(fits_linear, linears))

    widths = AttentionMixer.widths
    add_to = AttentionMixer.add_to

    def operation(self, attn: nn.Module, at: dict[str, Tensor]) -> native.ShortConv:
        inputs = attn.cache.inputs
        return native.ShortConv(
            kind=native.SHORT_CONV, width=attn.shape.width, n_tap=attn.shape.n_tap,
            n_input=inputs.shape[1], n_row=len(inputs), taps=attn.taps.T, bias=attn.taps_bias,
            x=at["wbcx"], inputs=inputs, out=at["attended"])


def lay_out_by_taps(taps: nn.Parameter) -> None:
    """taps [channels, n_tap] in memory as [n_tap, channels], which is how operations read them.

    The tensor stays the module's own: an edit of it counts.
    """
    taps.data = taps.data.T.contiguous().T


MIXERS = {DeltaNet: DeltaMixer, LatentAttention: LatentMixer, ShortConvolution: ShortConvMixer}


def mixer_of(layer: nn.Module) -> type:
    """Which of them a layer's first half may be; its fits() says whether it is."""
    kinds = [mixer for kind, mixer in MIXERS.items() if isinstance(layer.attn, kind)]
    return kinds[0] if kinds else AttentionMixer
