"""The transformer: config, blocks, KV cache and the mask rule.

It knows the math and nothing else: no file paths, no family names, no ranks, no quantization, no
sampling. `formats/` reads a config and weights from outside formats; `generate.py` drives it:

    model = Transformer(cfg)                       # every family, one class
    model.setup_cache(batch_size=1, length=256)
    logits = model(tokens, pos)                    # [B, T] and [T] or [B, T] -> [B, 1, V], fp32
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: the base, and how its frequencies are stretched to a longer context."""

    theta: float = 10000.0
    kind: str = "default"                          # linear | dynamic | llama3 | yarn | none
    factor: float = 1.0
    low_freq_factor: float = 1.0                   # llama3, yarn (beta_slow, beta_fast): waves that
    high_freq_factor: float = 4.0                  # turn less often than low in the original
    original_context: int = 8192                   # context are stretched, more than high kept
    truncate: bool = True                          # yarn: round the ends of the ramp in between
    amplitude: float = 1.0                         # of cos and sin (yarn, longrope)
    partial: float = 1.0                           # the share of a head that turns
    divisors: tuple[float, ...] | None = None      # one per frequency (longrope, GGUF files) …
    long_divisors: tuple[float, ...] | None = None             # … beyond original_context


@dataclass(frozen=True)
class ModelConfig:
    """The math and nothing else: no names, no paths, no batch size, no scheme."""

    dim: int
    n_layer: int
    n_head: int
    n_kv_head: int
    head_dim: int                                  # explicit: Qwen3 and Gemma are not dim // n_head
    ffn_dim: int
    vocab_size: int
    context: int                                   # longest sequence the model was trained for
    norm_eps: float = 1e-5
    layer_norm: bool = False                       # LayerNorm with bias instead of RMSNorm
    pre_norm: bool = True                          # normalize what goes into a branch
    post_norm: bool = False                        # normalize what comes out of it (Gemma 2, 3)
    qk_norm: str | None = None                     # before RoPE: "head", each; "wide", all as one
    activation: str = "silu"                       # of GATED or UNGATED below
    gated: bool = True                             # act(gate) * up, else act(up)
    tied: bool = False                             # the head is the embedding, transposed
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    embed_scale: float = 1.0                       # Gemma: sqrt(dim)
    residual_scale: float = 1.0                    # Granite: of what each branch adds
    attn_scale: float | None = None                # None: head_dim ** -0.5
    attn_cap: float | None = None                  # scores end at cap * tanh(score / cap)
    logit_cap: float | None = None                 # and logits
    sinks: bool = False                            # a learned score per head that no key has
    learned_pos: bool = False                      # an embedding per position, added to the token's
    rope: tuple[Rope, ...] = (Rope(),)             # tiled over layers
    window: tuple[int | None, ...] = (None,)       # tiled over layers; None = full attention
    sparse: tuple[bool, ...] = (False,)            # tiled over layers: a mixture of experts?
    n_expert: int = 0
    n_active: int = 0                              # experts per token
    expert_dim: int = 0                            # width of each
    renormalize: bool = True                       # the active experts' probabilities sum to 1
    router_bias: bool = False
    shared_dim: int = 0                            # width of the expert that serves every token


def at(layer: int, tiled: tuple):
    """A layer's own entry of `rope`, `window` or `sparse`."""
    return tiled[layer % len(tiled)]


def _clamped_silu(gate, up):                       # gpt-oss: alpha 1.702, limit 7
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


GATED = {"silu": lambda gate, up: F.silu(gate) * up, "clamped_silu": _clamped_silu,
         "gelu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up}
UNGATED = {"gelu": F.gelu, "gelu_tanh": lambda up: F.gelu(up, approximate="tanh")}


def rope_frequencies(rope: Rope, head_dim: int, length: int = 0) -> Tensor:
    """Radians per position, fp32 [H / 2] on CPU, for sequences of `length` at most.

    transformers' modeling_rope_utils, where "dynamic" and "longrope" follow the current length.
    """
    n, original = int(head_dim * rope.partial), rope.original_context
    theta, divisors = rope.theta, rope.divisors
    if length > original and rope.kind == "dynamic":
        theta *= (rope.factor * length / original - rope.factor + 1) ** (n / (n - 2))
    if length > original and rope.long_divisors:
        divisors = rope.long_divisors
    exponent = torch.arange(0, n, 2, dtype=torch.int64, device="cpu").float() / n
    freq = 1.0 / theta**exponent
    if divisors is not None:
        freq = freq / torch.tensor(divisors, device="cpu")
    elif rope.kind == "linear":
        freq = freq / rope.factor
    elif rope.kind == "llama3":
        turns = original * freq / (2 * math.pi)    # full turns over the original context
        low, high = rope.low_freq_factor, rope.high_freq_factor
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        freq = keep * freq + (1 - keep) * freq / rope.factor
    elif rope.kind == "yarn":                      # as llama3, but a ramp over the index
        ends = [n * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
                for turns in (rope.high_freq_factor, rope.low_freq_factor)]
        low, high = (math.floor(ends[0]), math.ceil(ends[1])) if rope.truncate else ends
        low, high = max(low, 0), min(high, n - 1)
        ramp = (torch.arange(n // 2, device="cpu") - low) / (high - low or 0.001)
        stretch = ramp.clamp(0, 1)
        freq = (1 - stretch) * freq + stretch * freq / rope.factor
    elif rope.kind == "none":
        freq = torch.zeros_like(freq)
    else:
        assert rope.kind in ("default", "dynamic"), f"unknown kind of RoPE: {rope.kind}"
    return F.pad(freq, (0, head_dim // 2 - n // 2))                        # the rest stands still


def rotate(x, cos, sin):
    """Turn the pairs (i, i + H/2) of x [B, heads, T, H] by the angles of [(B, 1,) T, H/2]."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def visible(pos: Tensor, key: Tensor, window: int | None = None) -> Tensor:
    """True where a query at `pos` may look: prefill, chunks, decode and drafts alike.

    pos [T] or [B, T], key [S] or [B, S], the positions of queries and keys -> [T, S] or
    [B, 1, T, S], to broadcast over heads. A cache entry beyond the query's position may hold
    anything: it is masked until it is overwritten.
    """
    key, query = key[..., None, :], pos[..., None]
    mask = key <= query
    if window is not None:
        mask = mask & (key > query - window)       # the window counts the query itself
    return mask if mask.dim() == 2 else mask[:, None]


def n_slots(window: int | None, length: int, longest_call: int) -> int:
    """Cache slots of a layer. A window's are a ring, in which position p is at p mod n_slots.

    One call's tokens, padding and rejected drafts among them, must not overwrite a key that its
    first query still sees:

        window 3, calls of 2: 4 slots    | 4 5 2 3 |    4 and 5 replaced 0 and 1; 4 sees 2, 3, 4
    """
    return length if window is None else min(length, window + longest_call - 1)


def cache_bytes(cfg: ModelConfig, rows: int, length: int, longest_call: int, dtype) -> int:
    """What setup_cache will allocate."""
    slots = sum(n_slots(at(i, cfg.window), length, longest_call) for i in range(cfg.n_layer))
    return 2 * rows * slots * cfg.n_kv_head * cfg.head_dim * dtype.itemsize


def matvec(weight, x):
    """weight [out, in] by x [in] -> [out], fp32, as sums that a compiler makes one pass of.

    On a CPU that is two to three times the speed of its mm: two halves side by side, which keeps
    more reads under way, and of a large bf16 matrix two neighbours in a word, of which a shift and
    a mask make floats. as_strided has Inductor write x out, not make it again for each row.
    """
    n, x = len(x), x.float()
    if x.device.type != "cpu":
        return (weight.float() * x).sum(-1)
    if weight.dtype == torch.bfloat16 and weight.numel() >= 1 << 22 and n % 2 == 0:
        even, odd = x.view(-1, 2).T.contiguous().as_strided((2, n // 2), (n // 2, 1))
        halves = weight.view(torch.float32).view(torch.int32).chunk(2)
        halves = [(words << 16).view(torch.float32) * even
                  + (words & -65536).view(torch.float32) * odd for words in halves]
    else:
        x = x.as_strided((n,), (1,))
        halves = [half.float() * x for half in weight.chunk(2)]
    return torch.cat([half.sum(-1) for half in halves])


class Linear(nn.Linear):
    """nn.Linear that says what one row is. Uncompiled, its products would be written out: mm."""

    def forward(self, x):
        if torch.compiler.is_compiling() and x.shape[:-1].numel() == 1:
            y = matvec(self.weight, x.view(-1))
            y = y if self.bias is None else y + self.bias.float()
            return y.to(x.dtype).view(*x.shape[:-1], -1)
        return F.linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """In fp32 whatever the model's dtype, the weight too: Gemma's 1 + w folds in exactly."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, dtype=torch.float32))

    def mean_square(self, h):
        return h.square().mean(-1, keepdim=True)

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(self.mean_square(h) + self.eps)
        return (h * self.weight).type_as(x)


class WideNorm(RMSNorm):
    """Over all heads [..., N, H] as one vector."""

    def forward(self, x):
        return super().forward(x.flatten(-2)).view_as(x)


class LayerNorm(nn.LayerNorm):
    def __init__(self, dim: int, eps: float):
        super().__init__(dim, eps, dtype=torch.float32)

    def forward(self, x):
        return super().forward(x.float()).type_as(x)


class Scale(nn.Module):
    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


class SoftCap(nn.Module):
    def __init__(self, cap: float):
        super().__init__()
        self.cap = cap

    def forward(self, x):
        return self.cap * torch.tanh(x / self.cap)


class SinkSoftmax(nn.Module):
    """Softmax over the keys and one more score per head, whose share is thrown away."""

    def __init__(self, n_head: int):
        super().__init__()
        self.sinks = nn.Parameter(torch.zeros(n_head, dtype=torch.float32))

    def forward(self, score):                      # [B, K, N/K, T, S]
        sink = self.sinks.view(score.shape[1], -1, 1, 1)
        top = torch.maximum(score.amax(-1, keepdim=True), sink)
        share = (score - top).exp()
        return share / (share.sum(-1, keepdim=True) + (sink - top).exp())


class Zero(nn.Module):
    """Where others have an embedding of positions, or a shared expert."""

    def forward(self, x):
        return 0


class Ring(nn.Module):
    """Which position each slot of a window's layers holds: the same in all of them."""

    def __init__(self, rows: int, n_slot: int, device):
        super().__init__()
        nothing = torch.full((rows, n_slot), torch.iinfo(torch.int64).max, device=device)
        self.register_buffer("held", nothing, persistent=False)

    def forward(self, pos, n_key, rows):
        """pos [T] or [B, T] -> its slots, and the positions in the first n_key slots [B, S]."""
        slot = pos % self.held.shape[1]
        if slot.dim() == 1:
            self.held[:, slot] = pos
        else:
            row = torch.arange(len(slot), device=pos.device) if rows is None else rows
            self.held[row[:, None], slot] = pos
        return slot, (self.held if rows is None else self.held[rows])[:, :n_key]


class KVCache(nn.Module):
    """Keys and values of the positions so far, in preallocated [B, K, S, H]."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device):
        super().__init__()
        for name in ("k", "v"):
            zeros = torch.zeros(shape, dtype=dtype, device=device)
            self.register_buffer(name, zeros, persistent=False)

    def forward(self, slot, k, v, n_key, rows):
        """Write k, v [B, K, T, H] into slot [T] or [B, T]; return the first n_key of each.

        rows [B]: of which rows of the cache; None: of all.
        """
        if slot.dim() == 1:
            self.k[:, :, slot], self.v[:, :, slot] = k, v
        else:
            row = torch.arange(len(slot), device=slot.device) if rows is None else rows
            row = row[:, None]
            self.k[row, :, slot], self.v[row, :, slot] = k.transpose(1, 2), v.transpose(1, 2)
        k, v = self.k[:, :, :n_key], self.v[:, :, :n_key]
        return (k, v) if rows is None else (k[rows], v[rows])


class Attention(nn.Module):
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        n, k, h = cfg.n_head, cfg.n_kv_head, cfg.head_dim
        self.split, self.head_dim = (n * h, k * h, k * h), h
        self.scale = h**-0.5 if cfg.attn_scale is None else cfg.attn_scale
        self.wqkv = Linear(cfg.dim, sum(self.split), bias=cfg.qkv_bias)
        self.wo = Linear(n * h, cfg.dim, bias=cfg.o_bias)

        def norm(width):
            return {None: nn.Identity, "head": lambda: RMSNorm(h, cfg.norm_eps),
                    "wide": lambda: WideNorm(width, cfg.norm_eps)}[cfg.qk_norm]()

        self.q_norm, self.k_norm = norm(n * h), norm(k * h)
        self.cap = SoftCap(cfg.attn_cap) if cfg.attn_cap else nn.Identity()
        self.softmax = SinkSoftmax(n) if cfg.sinks else nn.Softmax(-1)
        self.needs_scores = bool(cfg.attn_cap or cfg.sinks)                # SDPA keeps them inside
        self.cache = None                          # without one, a call sees its own keys only

    def forward(self, x, rope, slot, mask, rows):
        B, T, _ = x.shape
        q, k, v = self.wqkv(x).split(self.split, dim=-1)
        q, k, v = (t.view(B, T, -1, self.head_dim) for t in (q, k, v))
        q, k, v = (t.transpose(1, 2) for t in (self.q_norm(q), self.k_norm(k), v))
        q, k = rotate(q, *rope), rotate(k, *rope)
        if self.cache is not None:
            k, v = self.cache(slot, k, v, mask.shape[-1], rows)
        y = self.attend(q, k, v, mask)
        return self.wo(y.transpose(1, 2).reshape(B, T, -1))

    def attend(self, q, k, v, mask):
        """softmax(q k') v: q [B, N, T, H], k v [B, K, S, H], mask [(B, 1,) T, S] -> [B, N, T, H].

        SDPA, but where its scores are needed, and for one query in a compiled CPU step: there its
        fixed cost is half of the token's time, and plain sums become two loops over the keys.
        """
        one = torch.compiler.is_compiling() and q.shape[2] == 1 and q.device.type == "cpu"
        if not (one or self.needs_scores):
            shape, gqa = q.shape, True
            if shape[2] == 1:                      # heads that share keys are queries side by side:
                q, gqa = q.view(shape[0], k.shape[1], -1, shape[3]), False     # three times faster
            y = F.scaled_dot_product_attention(q, k, v, mask, scale=self.scale, enable_gqa=gqa)
            return y.reshape(shape)                # efficient attention's strides are not a view's

        def product(a, b):                         # [B, K, N/K, T, I] @ [B, K, I, J] in fp32
            if one:
                return (a.mT.float() * b[:, :, None].float()).sum(-2, keepdim=True)
            return (a.flatten(2, 3).to(b.dtype) @ b).unflatten(2, a.shape[2:4]).float()

        q = q.unflatten(1, (k.shape[1], -1))                               # [B, K, N/K, T, H]
        score = self.cap(product(q, k.mT) * self.scale)                    # [B, K, N/K, T, S]
        prob = self.softmax(torch.where(mask.unsqueeze(-3), score, -torch.inf))
        return product(prob, v).to(v.dtype).flatten(1, 2)


class FeedForward(nn.Module):
    def __init__(self, cfg: ModelConfig, ffn_dim: int):
        super().__init__()
        self.gate_up = Linear(cfg.dim, 2 * ffn_dim, bias=cfg.mlp_bias)
        self.down = Linear(ffn_dim, cfg.dim, bias=cfg.mlp_bias)
        self.activation = GATED[cfg.activation]

    def forward(self, x):
        return self.down(self.activation(*self.gate_up(x).chunk(2, dim=-1)))


class UngatedFeedForward(nn.Module):
    def __init__(self, cfg: ModelConfig, ffn_dim: int):
        super().__init__()
        self.up = Linear(cfg.dim, ffn_dim, bias=cfg.mlp_bias)
        self.down = Linear(ffn_dim, cfg.dim, bias=cfg.mlp_bias)
        self.activation = UNGATED[cfg.activation]

    def forward(self, x):
        return self.down(self.activation(self.up(x)))


@torch.library.custom_op("gpt_faster::grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows [ends[e-1], ends[e]) of x [M, in] by weight[e] [out, in] -> [M, out], on the device.

    An operator of our own only because torch traces F.grouped_mm in bfloat16 and no other dtype.
    """
    return F.grouped_mm(x, weight.mT, offs=ends)


@grouped_mm.register_fake
def _(x, weight, ends):
    return x.new_empty(x.shape[0], weight.shape[1])


class ExpertLinear(nn.Module):
    """One Linear per expert: weight [E, out, in], bias [E, out]."""

    def __init__(self, n_expert: int, n_in: int, n_out: int, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_expert, n_out, n_in))
        self.bias = nn.Parameter(torch.empty(n_expert, n_out)) if bias else None

    def forward(self, x, ids, ends):
        """x [M, in], each row for the expert in ids [M] -> [M, out].

        ends [E]: the rows are sorted by expert, those of e end there. None: they are few, and each
        reads its own expert's weights: compiled in one pass, as in Linear (Inductor fuses the
        indexing), else by way of a copy.
        """
        if ends is not None:
            y = grouped_mm(x, self.weight, ends)
        elif torch.compiler.is_compiling():
            y = (self.weight[ids].float() * x[:, None].float()).sum(-1).to(x.dtype)
        else:
            y = (self.weight[ids] @ x[..., None]).squeeze(-1)
        return y if self.bias is None else y + self.bias[ids]


class SharedExpert(FeedForward):
    """Serves every token, to a degree that it decides itself."""

    def __init__(self, cfg: ModelConfig):
        super().__init__(cfg, cfg.shared_dim)
        self.degree = Linear(cfg.dim, 1, bias=False)

    def forward(self, x):
        return super().forward(x) * torch.sigmoid(self.degree(x))


class MoE(nn.Module):
    """Mixture of experts: the router picks n_active of them for each token, and weighs them.

    Softmax over the router's top k equals softmax over all, top k, renormalized: one form for both.
    """

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        E, D, width = cfg.n_expert, cfg.dim, cfg.expert_dim
        self.n_expert, self.n_active = E, cfg.n_active
        self.router = Linear(D, E, bias=cfg.router_bias)
        self.gate, self.up = (ExpertLinear(E, D, width, cfg.mlp_bias) for _ in range(2))
        self.down = ExpertLinear(E, width, D, cfg.mlp_bias)
        self.activation = GATED[cfg.activation]
        self.shared = SharedExpert(cfg) if cfg.shared_dim else Zero()
        self.weigh = (lambda p: p / p.sum(-1, keepdim=True)) if cfg.renormalize else nn.Identity()

    def forward(self, x):
        flat = x.flatten(0, 1)                                             # [n, D]
        prob, ids = self.router(flat).float().softmax(-1).topk(self.n_active)
        prob, ids = self.weigh(prob).flatten(), ids.flatten()              # [M], M = n * n_active
        order, ends = torch.arange(len(ids), device=x.device), None
        few = torch.compiler.is_compiling() and len(ids) <= self.n_expert
        if x.device.type != "cpu" and x.shape[1] == 1:         # grouped_mm may wait for the GPU,
            few = True                                         # which no CUDA graph can record
        if not few:
            ids, order = ids.sort(stable=True)     # each expert once, over all of its tokens
            expert = torch.arange(self.n_expert, device=x.device)
            ends = torch.searchsorted(ids, expert, right=True, out_int32=True)
        y = flat[order // self.n_active]
        y = self.down(self.activation(self.gate(y, ids, ends), self.up(y, ids, ends)), ids, ends)
        y = torch.empty_like(y).index_copy(0, order, y) if ends is not None else y
        y = (y.float() * prob[:, None]).unflatten(0, (-1, self.n_active)).sum(1).type_as(x)
        return (y + self.shared(flat)).view_as(x)


class Block(nn.Module):
    def __init__(self, cfg: ModelConfig, layer: int):
        super().__init__()
        self.attn = Attention(cfg)
        dense = FeedForward if cfg.gated else UngatedFeedForward
        self.ffn = MoE(cfg) if at(layer, cfg.sparse) else dense(cfg, cfg.ffn_dim)
        Norm = LayerNorm if cfg.layer_norm else RMSNorm

        def before():
            return Norm(cfg.dim, cfg.norm_eps) if cfg.pre_norm else nn.Identity()

        def after():
            if cfg.post_norm:
                return Norm(cfg.dim, cfg.norm_eps)
            return Scale(cfg.residual_scale) if cfg.residual_scale != 1 else nn.Identity()

        self.attn_norm, self.ffn_norm = before(), before()
        self.post_attn_norm, self.post_ffn_norm = after(), after()

    def forward(self, x, rope, slot, mask, rows=None):
        x = x + self.post_attn_norm(self.attn(self.attn_norm(x), rope, slot, mask, rows))
        return x + self.post_ffn_norm(self.ffn(self.ffn_norm(x)))


class Transformer(nn.Module):
    """tokens -> logits. Weights may be on the meta device until `formats/load.py` assigns them."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg, self.dtype = cfg, torch.get_default_dtype()  # of activations and the cache
        blank = torch.empty(cfg.vocab_size, cfg.dim)           # Embedding's init takes 1 s on meta
        self.embed = nn.Embedding.from_pretrained(blank)
        self.pos_embed = Zero()
        if cfg.learned_pos:
            self.pos_embed = nn.Embedding.from_pretrained(torch.empty(cfg.context, cfg.dim))
        self.layers = nn.ModuleList(Block(cfg, i) for i in range(cfg.n_layer))
        self.norm = (LayerNorm if cfg.layer_norm else RMSNorm)(cfg.dim, cfg.norm_eps)
        self.head = Linear(cfg.dim, cfg.vocab_size, bias=False)
        if cfg.tied:
            self.head.weight = self.embed.weight
        self.cap = SoftCap(cfg.logit_cap) if cfg.logit_cap else nn.Identity()
        self.ropes = tuple(dict.fromkeys(cfg.rope))            # distinct ones, in order
        self.windows = tuple(dict.fromkeys(cfg.window))
        amplitude = torch.ones(len(self.ropes), cfg.head_dim // 2, device="cpu")
        for i, rope in enumerate(self.ropes):
            amplitude[i, :int(cfg.head_dim * rope.partial) // 2] = rope.amplitude
        self.register_buffer("freq", self._frequencies(0), persistent=False)   # [R, H / 2], fp32,
        self.register_buffer("amplitude", amplitude, persistent=False)         # never on meta
        self.max_batch_size = self.max_seq_length = self.longest_call = 0      # of the cache
        self.rings = nn.ModuleDict()                           # window -> Ring

    def _frequencies(self, length: int) -> Tensor:
        head_dim = self.cfg.head_dim
        return torch.stack([rope_frequencies(rope, head_dim, length) for rope in self.ropes])

    @torch.inference_mode(False)                   # whoever calls: the cache serves everyone
    def setup_cache(self, batch_size: int, length: int, longest_call: int | None = None) -> None:
        """Allocate the KV cache for `length` positions; batch_size 0 removes it.

        longest_call: no call will have more tokens (None: any may), so that layers with a window
        need only a ring of slots. RoPE whose frequencies depend on the sequence's length takes
        this one from now on.
        """
        cfg, device = self.cfg, self.freq.device
        self.max_batch_size, self.max_seq_length = batch_size, length
        self.longest_call = min(longest_call or length, length)
        with torch.inference_mode(self.freq.is_inference()):   # in place: graphs know where it is
            self.freq.copy_(self._frequencies(length))
        size = {w: n_slots(w, length, self.longest_call) for w in cfg.window}
        self.rings = nn.ModuleDict({str(w): Ring(batch_size, n, device)
                                    for w, n in size.items() if batch_size and n < length})
        for i, layer in enumerate(self.layers):
            shape = batch_size, cfg.n_kv_head, size[at(i, cfg.window)], cfg.head_dim
            layer.attn.cache = KVCache(shape, self.dtype, device) if batch_size else None

    def forward(self, tokens: Tensor, pos: Tensor, keep: int | Tensor = 1,
                n_key: int | None = None, rows: Tensor | None = None) -> Tensor:
        """Logits of the positions in `keep`, in fp32.

        tokens [B, T]; pos [T] or [B, T], the absolute position of each token; keep: project only
        the last n, or the indices [B, n] into T (right-padded rows end at different places);
        n_key: attend to the first n_key positions only, which must be all so far; rows [B]: which
        rows of the cache these are, if not all, with pos [B, T]. -> [B, n, V]
        """
        n_key = n_key or (self.max_batch_size and self.max_seq_length) or tokens.shape[1]
        x, *around = self.enter(tokens, pos, n_key, rows)
        for layer, beside in zip(self.layers, self.beside(around)):
            x = layer(x, *beside, rows)
        if isinstance(keep, int):
            x = x[:, -keep:]
        else:
            x = x.gather(1, keep[..., None].expand(-1, -1, x.shape[-1]))
        return self.leave(x)

    def enter(self, tokens: Tensor, pos: Tensor, n_key: int,
              rows: Tensor | None = None) -> tuple[Tensor, ...]:
        """What the first layer takes [B, T, D], each RoPE's cos, sin, each window's slot, mask."""
        x, around = self.embed(tokens), []                                 # [B, T, D]
        x = x * x.new_full((), self.cfg.embed_scale) + self.pos_embed(pos) # rounded to x's dtype
        angles = (pos[..., None, None].float() * self.freq).unbind(-2)     # R of [(B,) T, H/2]
        angles = [a if pos.dim() == 1 else a[:, None] for a in angles]     # broadcast over heads
        for a, amplitude in zip(angles, self.amplitude):
            around += a.cos() * amplitude, a.sin() * amplitude
        for w in self.windows:
            slot, key = pos, torch.arange(n_key, device=pos.device)
            if str(w) in self.rings:
                slot, key = self.rings[str(w)](pos, n_key, rows)
            around += slot, visible(pos, key, w)
        return x, *around

    def beside(self, around: list[Tensor]) -> list[tuple]:
        """enter()'s, from the second on -> each layer's (rope, slot, mask)."""
        cfg, pairs = self.cfg, list(zip(around[::2], around[1::2]))
        ropes = dict(zip(self.ropes, pairs))
        places = dict(zip(self.windows, pairs[len(ropes):]))
        return [(ropes[at(i, cfg.rope)], *places[at(i, cfg.window)]) for i in range(cfg.n_layer)]

    def leave(self, x: Tensor) -> Tensor:
        """What the last layer gives [B, n, D] -> logits [B, n, V], fp32."""
        return self.cap(self.head(self.norm(x)).float())
