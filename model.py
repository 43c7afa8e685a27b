"""The transformer: config, blocks, KV cache and the mask rule.

It knows the math and nothing else: no file paths, no family names, no ranks, no quantization, no
sampling, no compiler. A Llama is read here whole; what a Llama does not have is in layers/.
`formats/` reads a config and weights, `kernels/` exchanges modules for quicker ones of the same
math, `generate.py` drives it:

    model = Transformer(cfg)                       # every family, one class
    model.setup_cache(batch_size=1, length=256)
    logits = model(tokens, pos)                    # [B, T] and [T] or [B, T] -> [B, 1, V], fp32
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layers.attention import Scores, attention
from layers.feed_forward import GATED, UngatedFeedForward
from layers.moe import MoEConfig, mixture
from layers.norms import HEAD_NORMS, LayerNorm, clip, rescale, soft_cap, value_norm
from layers.per_layer import LayerEnd, layer_end, per_layer_embedding
from layers.rope import Rope, amplitudes, cos_sin, frequencies, rotate
from layers.shared_kv import share_keys
from layers.widths import own_widths
from layers.window import Ring, n_slots, row_index


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
    post_norm_eps: float | None = None             # None: norm_eps
    embed_norm: bool = False                       # normalize embeddings (BLOOM)
    parallel: bool = False                         # both branches read the same x (GPT-NeoX)
    qk_norm: str | None = None                     # before RoPE: "head", or of norms.HEAD_NORMS
    v_norm: bool = False                           # normalize values, by no weights
    activation: str = "silu"                       # of layers.feed_forward, GATED or UNGATED
    gated: bool = True                             # act(gate) * up, else act(up)
    tied: bool = False                             # the head is the embedding, transposed
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    clip_qkv: float | None = None                  # queries, keys and values end there (OLMo)
    attn_gate: bool = False                        # what attention gives * sigmoid(gate(x))
    embed_scale: float = 1.0                       # Gemma: sqrt(dim)
    residual_scale: float = 1.0                    # Granite: of what each branch adds
    attn_scale: float | None = None                # None: head_dim ** -0.5
    scores: Scores = Scores()                      # how they differ from q k' attn_scale
    logit_cap: float | None = None                 # logits end at cap * tanh(logit / cap)
    learned_pos: bool = False                      # an embedding per position, added to the token's
    rope: tuple[Rope, ...] = (Rope(),)             # tiled over layers
    window: tuple[int | None, ...] = (None,)       # tiled over layers; None = full attention
    sparse: tuple[bool, ...] = (False,)            # tiled over layers: a mixture of experts?
    moe: MoEConfig | None = None
    mixer: tuple = (None,)                         # tiled over layers: None = Attention, else what
                                                   # makes a layer of layers/ in its place
    widths: tuple = (None,)                        # tiled over layers: Widths of its own, or None
    layer_end: LayerEnd | None = None              # what follows a layer's two branches


def at(layer: int, tiled: tuple):
    """A layer's own entry of what is tiled over layers."""
    return tiled[layer % len(tiled)]


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


def cache_bytes(cfg: ModelConfig, batch_size: int, length: int, longest_call: int, dtype,
                max_rejected: int = 0) -> int:
    """What setup_cache will allocate for the layers."""
    with torch.device("meta"):
        model = Transformer(cfg)
        model.dtype = dtype
        model.setup_cache(batch_size, length, longest_call, "meta", max_rejected)
    return sum(t.nbytes for layer in model.layers for t in layer.attn.buffers())


class RMSNorm(nn.Module):
    """In fp32 whatever the model's dtype, the weight too: an offset folds into it exactly."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, dtype=torch.float32))

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)
        return (h * self.weight).type_as(x)


class KVCache(nn.Module):
    """Keys and values of the positions so far, in preallocated [B, K, S, H]."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device):
        super().__init__()
        for name in ("k", "v"):
            zeros = torch.zeros(shape, dtype=dtype, device=device)
            self.register_buffer(name, zeros, persistent=False)

    def forward(self, slot, k, v, kv_len, batch_idx):
        """Write k, v [B, K, T, H] into slot [T] or [B, T]; return the first kv_len of each.

        batch_idx [B]: into and of which rows of the cache; None: all.
        """
        if slot.dim() == 1:
            self.k[:, :, slot] = k
            self.v[:, :, slot] = v
        else:
            row = row_index(slot, batch_idx)
            self.k[row, :, slot] = k.transpose(1, 2)
            self.v[row, :, slot] = v.transpose(1, 2)
        k, v = self.k[:, :, :kv_len], self.v[:, :, :kv_len]
        return (k, v) if batch_idx is None else (k[batch_idx], v[batch_idx])


class SDPA(nn.Module):
    """softmax(q k' scale) v"""

    def __init__(self, scale: float):
        super().__init__()
        self.scale = scale

    def forward(self, q, k, v, mask):
        """q [B, N, T, H], k v [B, K, S, H], mask [(B, 1,) T, S] -> [B, N, T, H]."""
        shape = q.shape
        if shape[2] == 1:                          # heads that share keys are queries side by side:
            q = q.view(shape[0], k.shape[1], -1, shape[3])     # three times faster on a CPU
        y = F.scaled_dot_product_attention(q, k, v, mask, scale=self.scale,
                                           enable_gqa=q.shape[1] != k.shape[1])
        return y.reshape(shape)                    # efficient attention's strides are not a view's


class Attention(nn.Module):
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        n, k, h = cfg.n_head, cfg.n_kv_head, cfg.head_dim
        self.head_dim = h
        self.split = (n * h, k * h, k * h)
        self.wqkv = nn.Linear(cfg.dim, sum(self.split), bias=cfg.qkv_bias)
        self.wo = nn.Linear(n * h, cfg.dim, bias=cfg.o_bias)
        self.clip = clip(cfg.clip_qkv)
        self.gate = nn.Linear(cfg.dim, n * h, bias=False) if cfg.attn_gate else None
        self.q_norm = query_key_norm(cfg, n)
        self.k_norm = query_key_norm(cfg, k)
        self.v_norm = value_norm(cfg)
        scale = h**-0.5 if cfg.attn_scale is None else cfg.attn_scale
        self.attend = attention(cfg, SDPA(scale))
        self.cache = None                          # without one, a call sees its own keys only

    def setup_cache(self, batch_size: int, n_slot: int, dtype: torch.dtype, device, *_) -> None:
        """For n_slot positions; batch_size 0 removes it."""
        shape = batch_size, self.split[1] // self.head_dim, n_slot, self.head_dim
        self.cache = KVCache(shape, dtype, device) if batch_size else None

    def forward(self, x, rope, slot, mask, batch_idx=None):
        B, T, _ = x.shape
        q, k, v = self.clip(self.wqkv(x)).split(self.split, -1)
        q, k, v = (t.view(B, T, -1, self.head_dim) for t in (q, k, v))
        q, k, v = self.q_norm(q), self.k_norm(k), self.v_norm(v)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        q, k = rotate(q, *rope), rotate(k, *rope)
        if self.cache is not None:
            k, v = self.cache(slot, k, v, mask.shape[-1], batch_idx)
        y = self.attend(q, k, v, mask).transpose(1, 2).reshape(B, T, -1)   # [B, T, N H]
        if self.gate is not None:
            y = y * torch.sigmoid(self.gate(x))
        return self.wo(y)


def query_key_norm(cfg: ModelConfig, n_head: int) -> nn.Module:
    """What n_head queries or keys [B, T, n_head, H] go through before RoPE."""
    if cfg.qk_norm == "head":
        return RMSNorm(cfg.head_dim, cfg.norm_eps)
    if cfg.qk_norm:
        return HEAD_NORMS[cfg.qk_norm](n_head * cfg.head_dim, cfg.norm_eps)
    return nn.Identity()


def mixer(cfg: ModelConfig, layer: int) -> nn.Module:
    """What exchanges information between positions."""
    kind = at(layer, cfg.mixer)
    return Attention(cfg) if kind is None else kind.make(cfg)


class FeedForward(nn.Module):
    """down(act(gate(x)) * up(x))"""

    def __init__(self, cfg: ModelConfig, ffn_dim: int):
        super().__init__()
        self.gate_up = nn.Linear(cfg.dim, 2 * ffn_dim, bias=cfg.mlp_bias)
        self.down = nn.Linear(ffn_dim, cfg.dim, bias=cfg.mlp_bias)
        self.activation = GATED[cfg.activation]

    def forward(self, x):
        return self.down(self.activation(*self.gate_up(x).chunk(2, dim=-1)))


def feed_forward(cfg: ModelConfig, layer: int) -> nn.Module:
    if at(layer, cfg.sparse):
        shared = cfg.moe.shared_dim
        return mixture(cfg, FeedForward(cfg, shared) if shared else None)
    dense = FeedForward if cfg.gated else UngatedFeedForward
    return dense(cfg, cfg.ffn_dim)


def full_norm(cfg: ModelConfig, eps: float | None = None) -> nn.Module:
    """Over the whole width D."""
    kind = LayerNorm if cfg.layer_norm else RMSNorm
    return kind(cfg.dim, eps or cfg.norm_eps)


class Block(nn.Module):
    def __init__(self, cfg: ModelConfig, layer: int):
        super().__init__()
        cfg = own_widths(cfg, layer)
        self.attn = mixer(cfg, layer)
        self.ffn = feed_forward(cfg, layer)

        def before():
            return full_norm(cfg) if cfg.pre_norm else nn.Identity()

        def after():
            if cfg.post_norm:
                return full_norm(cfg, cfg.post_norm_eps)
            return rescale(cfg.residual_scale)

        self.attn_norm = before()
        self.ffn_norm = nn.Identity() if hasattr(self.ffn, "norm") else before()
        self.post_attn_norm, self.post_ffn_norm = after(), after()
        self.end = layer_end(cfg, full_norm)

    def forward(self, x, rope, slot, mask, batch_idx=None, *own):
        """own: what no other layer is given, for the layer's end."""
        x = x + self.post_attn_norm(self.attn(self.attn_norm(x), rope, slot, mask, batch_idx))
        return self.end(x + self.post_ffn_norm(self.ffn(self.ffn_norm(x))), *own)


class ParallelBlock(Block):
    """x + attention(x) + feed-forward(x)"""

    def forward(self, x, *inputs):
        y = self.post_attn_norm(self.attn(self.attn_norm(x), *inputs))
        return x + y + self.post_ffn_norm(self.ffn(self.ffn_norm(x)))


class Transformer(nn.Module):
    """tokens -> logits. Weights may be on the meta device until `formats/` assigns them."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        self.dtype = torch.get_default_dtype()                 # of activations and the cache
        blank = torch.empty(cfg.vocab_size, cfg.dim)           # Embedding's init takes 1 s on meta
        self.embed = nn.Embedding.from_pretrained(blank)
        self.pos_embed = None
        if cfg.learned_pos:
            self.pos_embed = nn.Embedding.from_pretrained(torch.empty(cfg.context, cfg.dim))
        self.embed_norm = full_norm(cfg) if cfg.embed_norm else nn.Identity()
        block = ParallelBlock if cfg.parallel else Block
        self.layers = nn.ModuleList(block(cfg, i) for i in range(cfg.n_layer))
        share_keys(self.layers)
        self.per_layer = per_layer_embedding(cfg)
        self.norm = full_norm(cfg)
        self.head = nn.Linear(cfg.dim, cfg.vocab_size, bias=cfg.head_bias)
        if cfg.tied:
            self.head.weight = self.embed.weight
        self.cap = soft_cap(cfg.logit_cap)
        self.ropes = tuple(dict.fromkeys(cfg.rope))            # distinct ones, in order
        self.windows = tuple(dict.fromkeys(cfg.window))
        freq = frequencies(self.ropes, cfg.head_dim)           # [R, H / 2], fp32, never on meta
        self.register_buffer("freq", freq, persistent=False)
        self.register_buffer("amplitude", amplitudes(self.ropes, cfg.head_dim), persistent=False)
        self.max_batch_size = self.max_seq_length = self.longest_call = 0      # of the cache
        self.rings = nn.ModuleDict()                           # window -> Ring
        self.hidden = None                         # [1, S, D] of whoever drafts from it: what the
                                                   # last layer gave at each position

    @torch.inference_mode(False)                   # whoever calls: the cache serves everyone
    def setup_cache(self, batch_size: int, length: int, longest_call: int | None = None,
                    device=None, max_rejected: int = 0) -> None:
        """Allocate the KV cache for `length` positions; batch_size 0 removes it.

        longest_call: no call will have more tokens (None: any may), so that layers with a window
        need only a ring of slots; max_rejected: how many of a call's tokens may turn out not to
        count (drafts), so that layers with a state can go back as far. RoPE whose frequencies
        depend on the sequence's length takes this one from now on.
        """
        cfg, device = self.cfg, device or self.freq.device
        self.max_batch_size = batch_size
        self.max_seq_length = length
        self.longest_call = min(longest_call or length, length)
        with torch.inference_mode(self.freq.is_inference()):   # in place: graphs know where it is
            self.freq.copy_(frequencies(self.ropes, cfg.head_dim, length))
        size = {w: n_slots(w, length, self.longest_call) for w in cfg.window}
        self.rings = nn.ModuleDict({str(w): Ring(batch_size, n, device)
                                    for w, n in size.items() if batch_size and n < length})
        for i, layer in enumerate(self.layers):
            n_slot = size[at(i, cfg.window)]
            layer.attn.setup_cache(batch_size, n_slot, self.dtype, device, max_rejected)

    def forward(self, tokens: Tensor, pos: Tensor, logits_to_keep: int | Tensor = 1,
                kv_len: int | None = None, batch_idx: Tensor | None = None) -> Tensor:
        """Logits of the positions in `logits_to_keep`, in fp32.

        tokens [B, T]; pos [T] or [B, T], the absolute position of each token; logits_to_keep: of
        the last n only, or of the indices [B, n] into T (right-padded rows end at different
        places); kv_len: attend to the first kv_len positions only, which must be all so far;
        batch_idx [B]: which rows of the cache these are, if not all, with pos [B, T]. -> [B, n, V]
        """
        kv_len = kv_len or (self.max_seq_length if self.max_batch_size else tokens.shape[1])
        x, *shared = self.embed_inputs(tokens, pos, kv_len, batch_idx)
        for layer, inputs in zip(self.layers, self.layer_inputs(shared)):
            x = layer(x, *inputs[:3], batch_idx, *inputs[3:])
        if self.hidden is not None:
            self.hidden[:, pos] = x.to(self.dtype)
        if isinstance(logits_to_keep, int):
            x = x[:, -logits_to_keep:]
        else:
            x = x.gather(1, logits_to_keep[..., None].expand(-1, -1, x.shape[-1]))
        return self.unembed(x)

    def embed_inputs(self, tokens: Tensor, pos: Tensor, kv_len: int,
                     batch_idx: Tensor | None = None) -> tuple[Tensor, ...]:
        """What the first layer takes [B, T, D], each RoPE's cos, sin, each window's slot, mask,
        and perhaps what each layer is given of the tokens.
        """
        x = self.embed(tokens)                                             # [B, T, D]
        x = x * x.new_full((), self.cfg.embed_scale)                       # rounded to x's dtype
        if self.pos_embed is not None:
            x = x + self.pos_embed(pos)
        x = self.embed_norm(x)
        shared = cos_sin(pos, self.freq, self.amplitude)
        for w in self.windows:
            slot, key = pos, torch.arange(kv_len, device=pos.device)
            if str(w) in self.rings:
                slot, key = self.rings[str(w)](pos, kv_len, batch_idx)
            shared += [slot, visible(pos, key, w)]
        return x, *shared, *self.per_layer(tokens, x)

    def layer_inputs(self, shared: list[Tensor]) -> list[tuple]:
        """embed_inputs()'s, from the second on -> each layer's (rope, slot, mask, and its own)."""
        cfg, pairs = self.cfg, list(zip(shared[::2], shared[1::2]))
        own = [t.unbind(2) for t in shared[2 * len(pairs):]]
        ropes = dict(zip(self.ropes, pairs))
        masks = dict(zip(self.windows, pairs[len(ropes):]))
        return [(ropes[at(i, cfg.rope)], *masks[at(i, cfg.window)], *(t[i] for t in own))
                for i in range(cfg.n_layer)]

    def unembed(self, x: Tensor) -> Tensor:
        """What the last layer gives [B, n, D] -> logits [B, n, V], fp32."""
        return self.cap(self.head(self.norm(x)).float())
