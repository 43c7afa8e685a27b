"""The transformer: config, blocks, KV cache and the mask rule.

It knows the math and nothing else: no file paths, no family names, no ranks, no quantization, no
sampling. `checkpoint.py` reads a config and weights from outside formats; `generate.py` drives it:

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
    kind: str = "default"                          # default | linear | llama3
    factor: float = 1.0
    low_freq_factor: float = 1.0                   # llama3: waves longer than context / low are
    high_freq_factor: float = 4.0                  # stretched, shorter than context / high kept
    original_context: int = 8192
    divisors: tuple[float, ...] | None = None      # one per frequency, as GGUF files store them


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
    activation: str = "silu"                       # silu (SwiGLU) | gelu_tanh (GeGLU)
    tied: bool = False                             # the head is the embedding, transposed
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False                          # normalize each head before RoPE (Qwen3)
    post_norm: bool = False                        # normalize each branch's output too (Gemma 2, 3)
    embed_scale: float = 1.0                       # Gemma: sqrt(dim)
    attn_scale: float | None = None                # None: head_dim ** -0.5
    rope: tuple[Rope, ...] = (Rope(),)             # tiled over layers
    window: tuple[int | None, ...] = (None,)       # tiled over layers; None = full attention


ACTIVATIONS = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def rope_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians per position, fp32 [H / 2] on CPU (transformers' modeling_rope_utils)."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
    freq = 1.0 / rope.theta**exponent
    if rope.divisors is not None:
        return freq / torch.tensor(rope.divisors, device="cpu")
    if rope.kind == "linear":
        return freq / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_context * freq / (2 * math.pi)   # full turns over the old context
        low, high = rope.low_freq_factor, rope.high_freq_factor
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return keep * freq + (1 - keep) * freq / rope.factor
    assert rope.kind == "default", f"unknown kind of RoPE: {rope.kind}"
    return freq


def rotate(x, cos, sin):
    """Turn the pairs (i, i + H/2) of x [B, heads, T, H] by the angles of [(B, 1,) T, H/2]."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def visible(pos: Tensor, n_key: int, window: int | None = None) -> Tensor:
    """True where a query at `pos` may look: prefill, chunks, decode and drafts alike.

    pos [T] or [B, T] -> [T, n_key] or [B, 1, T, n_key], to broadcast over heads. A cache entry
    beyond the query's position may hold anything: it is masked until it is overwritten.
    """
    key, query = torch.arange(n_key, device=pos.device), pos[..., None]
    mask = key <= query
    if window is not None:
        mask = mask & (key > query - window)       # the window counts the query itself
    return mask if pos.dim() == 1 else mask[:, None]


class Linear(nn.Linear):
    """nn.Linear that says what one row is: a matrix-vector product, row by row.

    Inductor turns that into one pass over the weights at the memory's speed (on CPU two to three
    times the speed of its mm). Uncompiled, the product would be written out, so eager keeps mm.
    """

    def forward(self, x):
        if torch.compiler.is_compiling() and x.shape[:-1].numel() == 1:
            y = (self.weight.float() * x.float().view(-1)).sum(-1)         # [out]
            y = y if self.bias is None else y + self.bias.float()
            return y.to(x.dtype).view(*x.shape[:-1], -1)
        return F.linear(x, self.weight, self.bias)


def attend(q, k, v, mask, scale):
    """softmax(q k') v: q [B, N, T, H], k v [B, K, S, H], mask [(B, 1,) T, S] -> [B, N, T, H].

    SDPA, but for one query in a compiled CPU step: there its fixed cost is half of the token's
    time, and the plain sums below become two loops over the keys.
    """
    if torch.compiler.is_compiling() and q.shape[2] == 1 and q.device.type == "cpu":
        q = q.unflatten(1, (k.shape[1], -1)).float() * scale               # [B, K, N/K, 1, H]
        score = (q * k[:, :, None].float()).sum(-1)                        # [B, K, N/K, S]
        prob = torch.where(mask, score, -torch.inf).softmax(-1)
        y = (prob[..., None] * v[:, :, None].float()).sum(-2)              # [B, K, N/K, H]
        return y.to(v.dtype).flatten(1, 2)[:, :, None]
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)


class RMSNorm(nn.Module):
    """In fp32 whatever the model's dtype, the weight too: Gemma's 1 + w folds in exactly."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, dtype=torch.float32))

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)
        return (h * self.weight).type_as(x)


class KVCache(nn.Module):
    """Keys and values of every position so far, in preallocated [B, K, S, H]."""

    def __init__(self, batch_size: int, n_kv_head: int, length: int, head_dim: int, like: Tensor):
        super().__init__()
        shape = (batch_size, n_kv_head, length, head_dim)
        for name in ("k", "v"):
            zeros = torch.zeros(shape, dtype=like.dtype, device=like.device)
            self.register_buffer(name, zeros, persistent=False)

    def forward(self, pos, k, v, n_key):
        """Write k, v [B, K, T, H] at pos [T] or [B, T]; return the first n_key of each."""
        if pos.dim() == 1:
            self.k[:, :, pos], self.v[:, :, pos] = k, v
        else:
            row = torch.arange(pos.shape[0], device=pos.device)[:, None]
            self.k[row, :, pos], self.v[row, :, pos] = k.transpose(1, 2), v.transpose(1, 2)
        return self.k[:, :, :n_key], self.v[:, :, :n_key]


class Attention(nn.Module):
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        n, k, h = cfg.n_head, cfg.n_kv_head, cfg.head_dim
        self.split, self.head_dim = (n * h, k * h, k * h), h
        self.scale = h**-0.5 if cfg.attn_scale is None else cfg.attn_scale
        self.wqkv = Linear(cfg.dim, sum(self.split), bias=cfg.qkv_bias)
        self.wo = Linear(n * h, cfg.dim, bias=cfg.o_bias)
        self.q_norm = RMSNorm(h, cfg.norm_eps) if cfg.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(h, cfg.norm_eps) if cfg.qk_norm else nn.Identity()
        self.cache = None                          # without one, a call sees its own keys only

    def forward(self, x, pos, rope, mask):
        B, T, _ = x.shape
        q, k, v = self.wqkv(x).split(self.split, dim=-1)
        q, k, v = (t.view(B, T, -1, self.head_dim).transpose(1, 2) for t in (q, k, v))
        q, k = rotate(self.q_norm(q), *rope), rotate(self.k_norm(k), *rope)
        if self.cache is not None:
            k, v = self.cache(pos, k, v, mask.shape[-1])
        y = attend(q, k, v, mask, self.scale)
        return self.wo(y.transpose(1, 2).reshape(B, T, -1))


class FeedForward(nn.Module):
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.gate = Linear(cfg.dim, cfg.ffn_dim, bias=cfg.mlp_bias)
        self.up = Linear(cfg.dim, cfg.ffn_dim, bias=cfg.mlp_bias)
        self.down = Linear(cfg.ffn_dim, cfg.dim, bias=cfg.mlp_bias)
        self.activation = ACTIVATIONS[cfg.activation]

    def forward(self, x):
        return self.down(self.activation(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.attn, self.ffn = Attention(cfg), FeedForward(cfg)
        def norm(wanted):
            return RMSNorm(cfg.dim, cfg.norm_eps) if wanted else nn.Identity()

        self.attn_norm, self.ffn_norm = norm(True), norm(True)
        self.post_attn_norm, self.post_ffn_norm = norm(cfg.post_norm), norm(cfg.post_norm)

    def forward(self, x, pos, rope, mask):
        x = x + self.post_attn_norm(self.attn(self.attn_norm(x), pos, rope, mask))
        return x + self.post_ffn_norm(self.ffn(self.ffn_norm(x)))


class Transformer(nn.Module):
    """tokens -> logits. Weights may be on the meta device until `checkpoint.py` assigns them."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        blank = torch.empty(cfg.vocab_size, cfg.dim)           # Embedding's init takes 1 s on meta
        self.embed = nn.Embedding.from_pretrained(blank)
        self.layers = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        self.norm = RMSNorm(cfg.dim, cfg.norm_eps)
        self.head = Linear(cfg.dim, cfg.vocab_size, bias=False)
        if cfg.tied:
            self.head.weight = self.embed.weight
        self.ropes = tuple(dict.fromkeys(cfg.rope))            # distinct ones, in order
        freq = torch.stack([rope_frequencies(r, cfg.head_dim) for r in self.ropes])
        self.register_buffer("freq", freq, persistent=False)   # [R, H / 2], fp32, never on meta
        self.max_batch_size = self.max_seq_length = 0          # of the cache

    @torch.inference_mode(False)                   # whoever calls: the cache serves everyone
    def setup_cache(self, batch_size: int, length: int) -> None:
        """Allocate the KV cache for `length` positions; length 0 removes it."""
        cfg, self.max_batch_size, self.max_seq_length = self.cfg, batch_size, length
        for layer in self.layers:
            layer.attn.cache = length and KVCache(
                batch_size, cfg.n_kv_head, length, cfg.head_dim, self.embed.weight) or None

    def forward(self, tokens: Tensor, pos: Tensor, keep: int | Tensor = 1,
                n_key: int | None = None) -> Tensor:
        """Logits of the positions in `keep`, in fp32.

        tokens [B, T]; pos [T] or [B, T], the absolute position of each token; keep: project only
        the last n, or the indices [B, n] into T (right-padded rows end at different places);
        n_key: attend to the first n_key cache slots only, which must hold every position so far.
        -> [B, n, V]
        """
        cfg = self.cfg
        n_key = n_key or self.max_seq_length or tokens.shape[1]
        masks = {w: visible(pos, n_key, w) for w in set(cfg.window)}
        angles = (pos[..., None, None].float() * self.freq).unbind(-2)     # R of [(B,) T, H/2]
        angles = [a if pos.dim() == 1 else a[:, None] for a in angles]     # broadcast over heads
        ropes = {rope: (a.cos(), a.sin()) for rope, a in zip(self.ropes, angles)}

        x = self.embed(tokens)                                             # [B, T, D]
        x = x * x.new_full((), cfg.embed_scale)                            # rounded to x's dtype
        for i, layer in enumerate(self.layers):
            rope, window = cfg.rope[i % len(cfg.rope)], cfg.window[i % len(cfg.window)]
            x = layer(x, pos, ropes[rope], masks[window])
        if isinstance(keep, int):
            x = x[:, -keep:]
        else:
            x = x.gather(1, keep[..., None].expand(-1, -1, cfg.dim))
        return self.head(self.norm(x)).float()                             # [B, n, V]
