"""The transformer: config, RoPE, norms, attention and its cache, feed-forward, experts, blocks.

It knows the math and nothing else: no file paths, no family names, no ranks, no quantization, no
sampling, no compiler. A Llama, Mistral, Mixtral or Qwen is read here whole. What these do not have
is a part of another kind, which the config names: a small frozen object whose make() gives the
module that stands in place of the one here (gpt_faster/layers/ has such objects; one of your own
works too).

    model = Transformer(cfg)                       # every family, one class
    model.setup_cache(batch_size=1, length=256)
    logits = model(tokens, pos)                    # [B, T] and [T] or [B, T] -> [B, 1, V], fp32
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# ---- Config -------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Rope:
    """Rotary embedding: the base, and how its frequencies are stretched to a longer context.

    As transformers' modeling_rope_utils, where "dynamic" follows the sequence's length.
    """

    theta: float = 10000.0
    kind: str = "default"                          # default | linear | dynamic | llama3 | yarn
    factor: float = 1.0
    low_freq_factor: float = 1.0                   # llama3, yarn (beta_slow, beta_fast): waves that
    high_freq_factor: float = 4.0                  # turn less often than low in the original
    original_context: int = 8192                   # context are stretched, more than high kept
    truncate: bool = True                          # yarn: round the ends of the ramp in between
    amplitude: float = 1.0                         # of cos and sin (yarn)

    def frequencies(self, head_dim: int, length: int = 0) -> Tensor:
        """Radians per position, fp32 [H / 2] on CPU, for sequences of `length` at most."""
        freq = self.unstretched(head_dim, length)
        if self.kind == "linear":
            return freq / self.factor
        if self.kind == "llama3":
            return self._llama3(freq)
        if self.kind == "yarn":
            return self._yarn(freq)
        assert self.kind in ("default", "dynamic"), f"unknown kind of RoPE: {self.kind}"
        return freq

    def unstretched(self, n: int, length: int) -> Tensor:
        """The plain frequencies of n entries of a head [n / 2]."""
        theta = self.theta
        if self.kind == "dynamic" and length > self.original_context:
            stretched = self.factor * length / self.original_context - self.factor + 1
            theta = theta * stretched ** (n / (n - 2))
        exponent = torch.arange(0, n, 2, dtype=torch.int64, device="cpu").float() / n
        return 1.0 / theta ** exponent

    def amplitudes(self, head_dim: int) -> Tensor:
        """What cos and sin are multiplied by, [H / 2] on CPU."""
        return torch.full((head_dim // 2,), float(self.amplitude), device="cpu")

    def _llama3(self, freq: Tensor) -> Tensor:
        turns = self.original_context * freq / (2 * math.pi)   # over the original context
        low, high = self.low_freq_factor, self.high_freq_factor
        unchanged = ((turns - low) / (high - low)).clamp(0, 1)
        return unchanged * freq + (1 - unchanged) * freq / self.factor

    def _yarn(self, freq: Tensor) -> Tensor:
        """As llama3, but a ramp over the index."""
        n = 2 * len(freq)

        def index_of(turns):
            waves = self.original_context / (turns * 2 * math.pi)
            return n * math.log(waves) / (2 * math.log(self.theta))

        low, high = index_of(self.high_freq_factor), index_of(self.low_freq_factor)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, n - 1)
        ramp = (torch.arange(n // 2, device="cpu") - low) / (high - low or 0.001)
        share = ramp.clamp(0, 1)
        return (1 - share) * freq + share * freq / self.factor


@dataclass(frozen=True)
class MoEConfig:
    """How many experts, of what width, and how their outputs are weighed."""

    n_expert: int
    n_active: int                                  # experts per token
    expert_dim: int                                # width of each
    norm_topk_prob: bool = True                    # the active experts' probabilities sum to 1

    def make(self, cfg: "ModelConfig") -> nn.Module:
        return MoE(cfg)


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
    qk_norm: bool = False                          # normalize each head before RoPE (Qwen3)
    tied: bool = False                             # the head is the embedding, transposed
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    rope: tuple[Rope, ...] = (Rope(),)             # tiled over layers
    window: tuple[int | None, ...] = (None,)       # tiled over layers; None = full attention
    sparse: tuple[bool, ...] = (False,)            # tiled over layers: a mixture of experts?
    moe: MoEConfig | None = None
    # What makes another part in place of the one below; None: nothing does.
    norm: object | None = None                     # RMSNorm over the model's width
    attention: object | None = None                # Attention
    mixer: tuple = (None,)                         # the same, tiled over layers, and comes first
    ffn: object | None = None                      # FeedForward
    block: object | None = None                    # Block
    after_embed: tuple = ()                        # what embeddings go through, in order
    per_layer: object | None = None                # what each layer is given of the tokens
    logit_cap: object | None = None                # what logits go through


def at(layer: int, tiled: tuple):
    """A layer's own entry of what is tiled over layers."""
    return tiled[layer % len(tiled)]


def made(kind, plain: type, *args) -> nn.Module:
    """The plain part, or what stands in its place where the config has an object that makes one."""
    return plain(*args) if kind is None else kind.make(*args)


def layer_config(cfg: ModelConfig, layer: int) -> ModelConfig:
    """What the parts of a layer read: the model's config, perhaps with widths of the layer's own.
    """
    return cfg if cfg.block is None else cfg.block.config_of(cfg, layer)


# ---- Positions ----------------------------------------------------------------------------------

def visible(pos: Tensor, key: Tensor, window: int | None = None) -> Tensor:
    """True where a query at `pos` may look: prefill, chunks, decode and drafts alike.

    pos [T] or [B, T], key [S] or [B, S], the positions of queries and keys -> [T, S] or
    [B, 1, T, S], to broadcast over heads. A cache entry beyond the query's position may hold any
    finite numbers: it is masked until it is overwritten.
    """
    key, query = key[..., None, :], pos[..., None]
    mask = key <= query
    if window is not None:
        mask = mask & (key > query - window)       # the window counts the query itself
    return mask if mask.dim() == 2 else mask[:, None]


def cos_sin(pos: Tensor, freq: Tensor, amplitude: Tensor) -> list[Tensor]:
    """pos [T] or [B, T], freq, amplitude [R, H / 2] -> each RoPE's cos and sin [(B, 1,) T, H/2]."""
    angles = (pos[..., None, None].float() * freq).unbind(-2)              # R of [(B,) T, H/2]
    if pos.dim() == 2:
        angles = [a[:, None] for a in angles]      # broadcast over heads
    pairs = []
    for angle, factor in zip(angles, amplitude):
        pairs += [angle.cos() * factor, angle.sin() * factor]
    return pairs


def rotate(x, cos, sin):
    """Turn the pairs (i, i + H/2) of x [B, heads, T, H] by the angles of [(B, 1,) T, H/2]."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


# ---- Norm, cache, attention ---------------------------------------------------------------------

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


def row_index(slot: Tensor, batch_idx: Tensor | None) -> Tensor:
    """Rows of the cache [B, 1], to index it together with slot [B, T]."""
    if batch_idx is None:
        batch_idx = torch.arange(len(slot), device=slot.device)
    return batch_idx[:, None]


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


def n_slots(window: int | None, length: int, longest_call: int) -> int:
    """Cache slots of a layer. A window's are a ring, in which position p is at p mod n_slots.

    One call's tokens, padding and rejected drafts among them, must not overwrite a key that its
    first query still sees:

        window 3, calls of 2: 4 slots    | 4 5 2 3 |    4 and 5 replaced 0 and 1; 4 sees 2, 3, 4
    """
    return length if window is None else min(length, window + longest_call - 1)


class Ring(nn.Module):
    """Which position each slot of a window's layers has: the same in all of them."""

    def __init__(self, batch_size: int, n_slot: int, device):
        super().__init__()
        positions = torch.full((batch_size, n_slot), torch.iinfo(torch.int64).max, device=device)
        self.register_buffer("slot_positions", positions, persistent=False)

    def forward(self, pos, kv_len, batch_idx):
        """pos [T] or [B, T] -> its slots, and the positions in the first kv_len slots [B, S]."""
        slot = pos % self.slot_positions.shape[1]
        if slot.dim() == 1:
            self.slot_positions[:, slot] = pos
        else:
            self.slot_positions[row_index(slot, batch_idx), slot] = pos
        positions = self.slot_positions if batch_idx is None else self.slot_positions[batch_idx]
        return slot, positions[:, :kv_len]


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
        self.q_norm = RMSNorm(h, cfg.norm_eps) if cfg.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(h, cfg.norm_eps) if cfg.qk_norm else nn.Identity()
        self.attend = SDPA(h**-0.5)
        self.cache = None                          # without one, a call sees its own keys only

    def setup_cache(self, batch_size: int, n_slot: int, dtype: torch.dtype, device, *_) -> None:
        """For n_slot positions; batch_size 0 removes it."""
        shape = batch_size, self.split[1] // self.head_dim, n_slot, self.head_dim
        self.cache = KVCache(shape, dtype, device) if batch_size else None

    def forward(self, x, rope, slot, mask, batch_idx=None):
        B, T, _ = x.shape
        q, k, v = self.wqkv(x).split(self.split, -1)
        q, k, v = (t.view(B, T, -1, self.head_dim) for t in (q, k, v))
        q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        q, k = rotate(q, *rope), rotate(k, *rope)
        if self.cache is not None:
            k, v = self.cache(slot, k, v, mask.shape[-1], batch_idx)
        y = self.attend(q, k, v, mask)
        return self.wo(y.transpose(1, 2).reshape(B, T, -1))                # [B, T, N H] -> D


# ---- Feed-forward, experts ----------------------------------------------------------------------

def swiglu(gate, up):
    return F.silu(gate) * up


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, cfg: ModelConfig, ffn_dim: int):
        super().__init__()
        self.gate_up = nn.Linear(cfg.dim, 2 * ffn_dim, bias=cfg.mlp_bias)
        self.down = nn.Linear(ffn_dim, cfg.dim, bias=cfg.mlp_bias)
        self.activation = swiglu

    def forward(self, x):
        return self.down(self.activation(*self.gate_up(x).chunk(2, dim=-1)))


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
        reads its own expert's weights.
        """
        if ends is None:
            y = self.each_row(x, ids)
        else:
            y = grouped_mm(x, self.weight, ends)
        return y if self.bias is None else y + self.bias[ids]

    def each_row(self, x, ids):
        return (self.weight[ids] @ x[..., None]).squeeze(-1)


class MoE(nn.Module):
    """The router picks n_active experts for each token, whose outputs are summed by probability.

    Softmax over the router's top k equals softmax over all, top k, normalized: one form for both.
    """

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        moe = cfg.moe
        E, D, width = moe.n_expert, cfg.dim, moe.expert_dim
        self.n_expert = E
        self.n_active = moe.n_active
        self.norm_topk_prob = moe.norm_topk_prob
        self.router = nn.Linear(D, E, bias=False)
        self.gate = ExpertLinear(E, D, width, cfg.mlp_bias)
        self.up = ExpertLinear(E, D, width, cfg.mlp_bias)
        self.down = ExpertLinear(E, width, D, cfg.mlp_bias)
        self.activation = swiglu

    def route(self, x):
        """x [n, D] -> each token's experts' weights, fp32, and ids [n, n_active]."""
        prob, ids = self.router(x).float().softmax(-1).topk(self.n_active)
        if self.norm_topk_prob:
            prob = prob / prob.sum(-1, keepdim=True)
        return prob, ids

    def takes_rows_one_by_one(self, x, n_row: int) -> bool:
        """Whether n_row rows each read their own expert; x [B, T, D].

        On a GPU a decode step does: grouped_mm may wait for it, which no CUDA graph can record.
        """
        return x.device.type != "cpu" and x.shape[1] == 1

    def forward(self, x):
        return self.routed(x, *self.route(x.flatten(0, 1))).view_as(x)

    def routed(self, x, prob, ids):
        """x [B, T, D], route()'s -> what the experts give, [n, D]."""
        flat = x.flatten(0, 1)                                             # [n, D]
        prob, ids = prob.flatten(), ids.flatten()                          # [M], M = n * n_active
        if self.takes_rows_one_by_one(x, len(ids)):
            order = torch.arange(len(ids), device=x.device)
            y = self.experts(flat[order // self.n_active], ids, None)
        else:
            ids, order = ids.sort(stable=True)     # each expert once, over all of its tokens
            expert = torch.arange(self.n_expert, device=x.device)
            ends = torch.searchsorted(ids, expert, right=True, out_int32=True)
            y = self.experts(flat[order // self.n_active], ids, ends)
            y = torch.empty_like(y).index_copy(0, order, y)
        return (y.float() * prob[:, None]).unflatten(0, (-1, self.n_active)).sum(1).type_as(x)

    def experts(self, x, ids, ends):
        """x [M, D], a row for each pair of a token and its expert -> [M, D]; see ExpertLinear."""
        hidden = self.activation(self.gate(x, ids, ends), self.up(x, ids, ends))
        return self.down(hidden, ids, ends)


# ---- Block, model -------------------------------------------------------------------------------

class Block(nn.Module):
    def __init__(self, cfg: ModelConfig, layer: int, earlier: nn.ModuleList):
        """earlier: the blocks before this one, for attention that shares their keys."""
        super().__init__()
        self.attn_norm = made(cfg.norm, RMSNorm, cfg.dim, cfg.norm_eps)
        self.attn = mixer(cfg, layer, earlier)
        self.ffn_norm = made(cfg.norm, RMSNorm, cfg.dim, cfg.norm_eps)
        self.ffn = feed_forward(cfg, layer)

    def forward(self, x, rope, slot, mask, batch_idx=None):
        x = x + self.attn(self.attn_norm(x), rope, slot, mask, batch_idx)
        return x + self.ffn(self.ffn_norm(x))


def mixer(cfg: ModelConfig, layer: int, earlier: nn.ModuleList) -> nn.Module:
    """What exchanges information between positions."""
    kind = at(layer, cfg.mixer) or cfg.attention
    return Attention(cfg) if kind is None else kind.make(cfg, earlier)


def feed_forward(cfg: ModelConfig, layer: int) -> nn.Module:
    if at(layer, cfg.sparse):
        return cfg.moe.make(cfg)
    return made(cfg.ffn, FeedForward, cfg, cfg.ffn_dim)


class Transformer(nn.Module):
    """tokens -> logits. Weights may be on the meta device until they are loaded."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        self.dtype = torch.get_default_dtype()                 # of activations and the cache
        blank = torch.empty(cfg.vocab_size, cfg.dim)           # Embedding's init takes 1 s on meta
        self.embed = nn.Embedding.from_pretrained(blank)
        self.after_embed = tuple(part.name for part in cfg.after_embed)
        for part in cfg.after_embed:
            self.add_module(part.name, part.make(cfg))
        self.layers = nn.ModuleList()
        for i in range(cfg.n_layer):
            self.layers.append(made(cfg.block, Block, cfg, i, self.layers))
        self.per_layer = made(cfg.per_layer, nn.Identity, cfg)
        self.norm = made(cfg.norm, RMSNorm, cfg.dim, cfg.norm_eps)
        self.head = nn.Linear(cfg.dim, cfg.vocab_size, bias=cfg.head_bias)
        if cfg.tied:
            self.head.weight = self.embed.weight
        self.cap = made(cfg.logit_cap, nn.Identity)
        self.ropes = tuple(dict.fromkeys(cfg.rope))            # distinct ones, in order
        self.windows = tuple(dict.fromkeys(cfg.window))
        self.register_buffer("freq", self.frequencies(), persistent=False)
        amplitude = [rope.amplitudes(cfg.head_dim) for rope in self.ropes]
        self.register_buffer("amplitude", padded(amplitude), persistent=False)
        self.max_batch_size = self.max_seq_length = self.longest_call = 0      # of the cache
        self.rings = nn.ModuleDict()                           # window -> Ring
        self.hidden = None                         # set by a drafter: [1, S, D], which records the
                                                   # last layer's output at each position

    def frequencies(self, length: int = 0) -> Tensor:
        """Each RoPE's, for sequences of `length` at most: [R, H / 2], fp32, never on meta."""
        return padded([rope.frequencies(self.cfg.head_dim, length) for rope in self.ropes])

    @torch.inference_mode(False)                   # normal tensors, even if the caller is in it
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
            self.freq.copy_(self.frequencies(length))
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
        batch_idx [B]: which rows of the cache these are, if not all. -> [B, n, V]
        """
        kv_len = kv_len or (self.max_seq_length if self.max_batch_size else tokens.shape[1])
        if batch_idx is not None:                  # each row its own slots of the cache
            pos = pos.expand(len(batch_idx), -1)
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

    def embed_tokens(self, tokens: Tensor, pos: Tensor) -> Tensor:
        """[B, T], [T] or [B, T] -> [B, T, D]"""
        x = self.embed(tokens)
        for name in self.after_embed:
            x = getattr(self, name)(x, pos)
        return x

    def embed_inputs(self, tokens: Tensor, pos: Tensor, kv_len: int,
                     batch_idx: Tensor | None = None) -> tuple[Tensor, ...]:
        """What the first layer takes [B, T, D], each RoPE's cos, sin, each window's slot, mask,
        and perhaps what each layer is given of the tokens.
        """
        x = self.embed_tokens(tokens, pos)                                 # [B, T, D]
        shared = cos_sin(pos, self.freq, self.amplitude)
        for w in self.windows:
            slot, key = pos, torch.arange(kv_len, device=pos.device)
            if str(w) in self.rings:
                slot, key = self.rings[str(w)](pos, kv_len, batch_idx)
            shared += [slot, visible(pos, key, w)]
        if self.cfg.per_layer is not None:
            shared += [self.per_layer(tokens, x)]                          # [B, T, L, P]
        return x, *shared

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


def padded(rows: list[Tensor]) -> Tensor:
    """Rows of equal length, or the shorter ones filled with zeros, as one tensor."""
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


def cache_bytes(cfg: ModelConfig, batch_size: int, length: int, longest_call: int, dtype,
                max_rejected: int = 0) -> int:
    """What setup_cache will allocate for the layers."""
    with torch.device("meta"):
        model = Transformer(cfg)
        model.dtype = dtype
        model.setup_cache(batch_size, length, longest_call, "meta", max_rejected)
    return sum(t.nbytes for layer in model.layers for t in layer.attn.buffers())
