"""The transformer: config, RoPE, norms, attention and its cache, feed-forward, experts, blocks.

Owns the math and nothing else: no file paths, family names, ranks, quantization, sampling or
compiler. Llama, Mistral, Mixtral and Qwen need nothing beyond this file. Other families replace
single modules: the config holds a small frozen object, and its make() builds the replacement
(gpt_faster/layers/ has such objects; your own works too).

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
    """Rotary embedding: the base, and how its frequencies are scaled for a longer context.

    The same formulas as transformers' modeling_rope_utils; "dynamic" depends on the cache length.
    """

    theta: float = 10000.0
    kind: str = "default"                          # default | linear | dynamic | llama3 | yarn
    factor: float = 1.0
    # llama3, yarn (beta_slow, beta_fast): a frequency with fewer than low_freq_factor rotations in
    # the original context is divided by factor; one with more than high_freq_factor is unchanged.
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    truncate: bool = True                          # yarn: round the ends of the ramp to integers
    amplitude: float = 1.0                         # yarn: scale of cos and sin

    def frequencies(self, head_dim: int, length: int = 0) -> Tensor:
        """Radians per position, fp32 [H / 2] on the CPU, for sequences of up to `length`."""
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
        """The frequencies before scaling, for n rotated dimensions: [n / 2]."""
        theta = self.theta
        if self.kind == "dynamic" and length > self.original_context:
            stretched = self.factor * length / self.original_context - self.factor + 1
            theta = theta * stretched ** (n / (n - 2))
        exponent = torch.arange(0, n, 2, dtype=torch.int64, device="cpu").float() / n
        return 1.0 / theta ** exponent

    def amplitudes(self, head_dim: int) -> Tensor:
        """Scale of cos and sin, [H / 2] on the CPU."""
        return torch.full((head_dim // 2,), float(self.amplitude), device="cpu")

    def _llama3(self, freq: Tensor) -> Tensor:
        turns = self.original_context * freq / (2 * math.pi)   # rotations in the original context
        low, high = self.low_freq_factor, self.high_freq_factor
        unchanged = ((turns - low) / (high - low)).clamp(0, 1)
        return unchanged * freq + (1 - unchanged) * freq / self.factor

    def _yarn(self, freq: Tensor) -> Tensor:
        """Like llama3, with the ramp linear in the index instead of the frequency."""
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
    """Experts: how many, how wide, and how the router weights them."""

    n_expert: int
    n_active: int                                  # experts per token
    expert_dim: int                                # feed-forward width of each expert
    norm_topk_prob: bool = True                    # scale the active experts' weights to sum to 1

    def make(self, cfg: "ModelConfig") -> nn.Module:
        return MoE(cfg)


@dataclass(frozen=True)
class ModelConfig:
    """The math and nothing else: no names, paths, batch size or quantization."""

    dim: int
    n_layer: int
    n_head: int
    n_kv_head: int
    head_dim: int                                  # explicit: not dim // n_head in Qwen3 and Gemma
    ffn_dim: int
    vocab_size: int
    context: int                                   # longest sequence the model was trained for
    norm_eps: float = 1e-5
    qk_norm: bool = False                          # RMSNorm of each q and k head (Qwen3)
    tied: bool = False                             # the output layer shares the embedding's weight
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    rope: tuple[Rope, ...] = (Rope(),)             # tiled over layers
    window: tuple[int | None, ...] = (None,)       # tiled over layers; None = full attention
    sparse: tuple[bool, ...] = (False,)            # tiled over layers: True = mixture of experts
    moe: MoEConfig | None = None
    # Objects whose make() builds a replacement for a module of this file; None: no replacement.
    norm: object | None = None                     # replaces RMSNorm over dim
    attention: object | None = None                # replaces Attention in all layers
    mixer: tuple = (None,)                         # per layer (tiled); takes precedence
    ffn: object | None = None                      # replaces FeedForward
    block: object | None = None                    # replaces Block
    after_embed: tuple = ()                        # modules applied to the embeddings, in order
    per_layer: object | None = None                # per-layer embeddings (Gemma 4)
    logit_cap: object | None = None                # module applied to the logits


def of_layer(layer: int, tiled: tuple):
    """A layer's entry of a tuple that is tiled over layers."""
    return tiled[layer % len(tiled)]


def build_part(kind, plain: type, *args) -> nn.Module:
    """plain(*args), or the replacement that the config's object `kind` makes."""
    return plain(*args) if kind is None else kind.make(*args)


def layer_config(cfg: ModelConfig, layer: int) -> ModelConfig:
    """The config of one layer: the model's, unless the block gives layers different widths."""
    return cfg if cfg.block is None else cfg.block.config_of(cfg, layer)


# ---- Positions ----------------------------------------------------------------------------------

def visible(pos: Tensor, key: Tensor, window: int | None = None) -> Tensor:
    """The attention mask, the same for prefill, chunks, decoding and draft verification.

    pos [T] or [B, T] and key [S] or [B, S]: the positions of queries and keys -> True where a query
    may attend, [T, S] or [B, 1, T, S] to broadcast over heads. A cache entry past the query's
    position may hold any finite values: it is masked until it is overwritten.
    """
    key, query = key[..., None, :], pos[..., None]
    mask = key <= query
    if window is not None:
        mask = mask & (key > query - window)       # the window counts the query itself
    return mask if mask.dim() == 2 else mask[:, None]


def cos_sin(pos: Tensor, freq: Tensor, amplitude: Tensor) -> list[Tensor]:
    """pos [T] or [B, T]; freq, amplitude [R, H/2] -> cos and sin of each of R RoPEs, each
    [(B, 1,) T, H/2]."""
    angles = (pos[..., None, None].float() * freq).unbind(-2)              # R of [(B,) T, H/2]
    if pos.dim() == 2:
        angles = [a[:, None] for a in angles]      # broadcast over heads
    pairs = []
    for angle, factor in zip(angles, amplitude):
        pairs += [angle.cos() * factor, angle.sin() * factor]
    return pairs


def rotate(x, cos, sin):
    """Apply RoPE to the pairs (i, i + H/2) of x [B, heads, T, H]; cos, sin [(B, 1,) T, H/2]."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


# ---- Norm, cache, attention ---------------------------------------------------------------------

class RMSNorm(nn.Module):
    """Computed in fp32. The weight is fp32 too, so Gemma's 1 + w is folded in without rounding."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, dtype=torch.float32))

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)
        return (h * self.weight).type_as(x)


def row_index(slot: Tensor, batch_idx: Tensor | None) -> Tensor:
    """Cache rows [B, 1], to index the cache together with slot [B, T]."""
    if batch_idx is None:
        batch_idx = torch.arange(len(slot), device=slot.device)
    return batch_idx[:, None]


class HiddenStates(nn.Module):
    """Hidden states of some layers by position: states[k] is [B, S, D], the input of layer k.

    Like a cache entry, a state is overwritten when its position is computed again.
    """

    def __init__(self, layers: tuple[int, ...], shape: tuple[int, int, int], dtype: torch.dtype,
                 device):
        super().__init__()
        self.layers = layers if shape[0] else ()   # without a cache nothing is recorded
        for layer in self.layers:
            zeros = torch.zeros(shape, dtype=dtype, device=device)
            self.register_buffer(f"layer_{layer}", zeros, persistent=False)

    def __getitem__(self, layer: int) -> Tensor:
        return self.get_buffer(f"layer_{layer}")

    def forward(self, layer, x, pos, batch_idx):
        """Write x [B, T, D] at positions pos [T] or [B, T] of cache rows batch_idx (None: all)."""
        states = self._buffers[f"layer_{layer}"]
        if pos.dim() == 1:
            states[:, pos] = x.type_as(states)
        else:
            states[row_index(pos, batch_idx), pos] = x.type_as(states)


class KVCache(nn.Module):
    """Preallocated keys and values, [B, K, S, H] each."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device):
        super().__init__()
        for name in ("k", "v"):
            zeros = torch.zeros(shape, dtype=dtype, device=device)
            self.register_buffer(name, zeros, persistent=False)

    def forward(self, slot, k, v, kv_len, batch_idx):
        """Write k, v [B, K, T, H] into slot [T] or [B, T]; return the first kv_len entries.

        batch_idx [B]: the cache rows to write and read; None: all.
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
    """Cache slots of a layer. With a window they are a ring: position p is stored at p mod n_slots.

    The tokens of one call, including padding and rejected drafts, must not overwrite a key that
    the call's first query attends to:

        window 3, calls of 2: 4 slots    | 4 5 2 3 |    4 and 5 replaced 0 and 1; 4 sees 2, 3, 4
    """
    return length if window is None else min(length, window + longest_call - 1)


class Ring(nn.Module):
    """The position stored in each slot of a ring. All layers with the same window share one."""

    def __init__(self, batch_size: int, n_slot: int, device):
        super().__init__()
        positions = torch.full((batch_size, n_slot), torch.iinfo(torch.int64).max, device=device)
        self.register_buffer("slot_positions", positions, persistent=False)

    def forward(self, pos, kv_len, batch_idx):
        """pos [T] or [B, T] -> slots of the same shape, and the positions that the first kv_len
        slots hold, [B, S]."""
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
        if shape[2] == 1:                          # fold each GQA group's heads into the query
            q = q.view(shape[0], k.shape[1], -1, shape[3])     # axis: 3 times faster on a CPU
        y = F.scaled_dot_product_attention(q, k, v, mask, scale=self.scale,
                                           enable_gqa=q.shape[1] != k.shape[1])
        return y.reshape(shape)                    # view() rejects the efficient kernel's strides


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
        self.cache = None                          # None: attend to this call's keys only

    def setup_cache(self, batch_size: int, n_slot: int, dtype: torch.dtype, device, *_) -> None:
        """Allocate n_slot positions; batch_size 0 removes the cache."""
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
    """Multiply rows [ends[e-1], ends[e]) of x [M, in] by weight[e] [out, in] -> [M, out].

    A custom op because torch.compile traces F.grouped_mm in bfloat16 only.
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

        ends [E]: the rows are sorted by expert, and expert e's rows end at ends[e]. None: few rows
        in any order; each reads its expert's weights.
        """
        if ends is None:
            y = self.each_row(x, ids)
        else:
            y = grouped_mm(x, self.weight, ends)
        return y if self.bias is None else y + self.bias[ids]

    def each_row(self, x, ids):
        return (self.weight[ids] @ x[..., None]).squeeze(-1)


class MoE(nn.Module):
    """The router picks n_active experts per token and sums their outputs, weighted by probability.

    Softmax over the top k logits equals softmax over all, then top k, renormalized: this form
    serves both.
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
        """x [n, D] -> the weights (fp32) and ids of each token's experts, [n, n_active] each."""
        prob, ids = self.router(x).float().softmax(-1).topk(self.n_active)
        if self.norm_topk_prob:
            prob = prob / prob.sum(-1, keepdim=True)
        return prob, ids

    def takes_rows_one_by_one(self, x, n_row: int) -> bool:
        """True if each of n_row rows reads its expert's weights, without sorting; x [B, T, D].

        A decode step on a GPU does: grouped_mm may synchronize, which a CUDA graph cannot record.
        """
        return x.device.type != "cpu" and x.shape[1] == 1

    def forward(self, x):
        return self.routed(x, *self.route(x.flatten(0, 1))).view_as(x)

    def routed(self, x, prob, ids):
        """x [B, T, D], prob and ids of route() -> the weighted sum of the experts, [n, D]."""
        flat = x.flatten(0, 1)                                             # [n, D]
        prob, ids = prob.flatten(), ids.flatten()                          # [M], M = n * n_active
        if self.takes_rows_one_by_one(x, len(ids)):
            order = torch.arange(len(ids), device=x.device)
            y = self.experts(flat[order // self.n_active], ids, None)
        else:
            ids, order = ids.sort(stable=True)     # one product per expert, over all its tokens
            expert = torch.arange(self.n_expert, device=x.device)
            ends = torch.searchsorted(ids, expert, right=True, out_int32=True)
            y = self.experts(flat[order // self.n_active], ids, ends)
            y = torch.empty_like(y).index_copy(0, order, y)
        return (y.float() * prob[:, None]).unflatten(0, (-1, self.n_active)).sum(1).type_as(x)

    def experts(self, x, ids, ends):
        """x [M, D], a row for each (token, expert) pair -> [M, D]; ids, ends as in ExpertLinear."""
        hidden = self.activation(self.gate(x, ids, ends), self.up(x, ids, ends))
        return self.down(hidden, ids, ends)


# ---- Block, model -------------------------------------------------------------------------------

class Block(nn.Module):
    def __init__(self, cfg: ModelConfig, layer: int, earlier: nn.ModuleList):
        """earlier: the blocks before this one; attention may share their keys (Gemma 4)."""
        super().__init__()
        self.attn_norm = build_part(cfg.norm, RMSNorm, cfg.dim, cfg.norm_eps)
        self.attn = mixer(cfg, layer, earlier)
        self.ffn_norm = build_part(cfg.norm, RMSNorm, cfg.dim, cfg.norm_eps)
        self.ffn = feed_forward(cfg, layer)

    def forward(self, x, rope, slot, mask, batch_idx=None):
        x = x + self.attn(self.attn_norm(x), rope, slot, mask, batch_idx)
        return x + self.ffn(self.ffn_norm(x))


def mixer(cfg: ModelConfig, layer: int, earlier: nn.ModuleList) -> nn.Module:
    """The layer's attention, or what replaces it."""
    kind = of_layer(layer, cfg.mixer) or cfg.attention
    return Attention(cfg) if kind is None else kind.make(cfg, earlier)


def feed_forward(cfg: ModelConfig, layer: int) -> nn.Module:
    if of_layer(layer, cfg.sparse):
        return cfg.moe.make(cfg)
    return build_part(cfg.ffn, FeedForward, cfg, cfg.ffn_dim)


class Transformer(nn.Module):
    """tokens -> logits. Weights stay on the meta device until they are loaded."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        self.dtype = torch.get_default_dtype()                 # of activations and the cache
        blank = torch.empty(cfg.vocab_size, cfg.dim)           # nn.Embedding() takes 1 s on meta
        self.embed = nn.Embedding.from_pretrained(blank)
        self.after_embed = tuple(part.name for part in cfg.after_embed)
        for part in cfg.after_embed:
            self.add_module(part.name, part.make(cfg))
        self.layers = nn.ModuleList()
        for i in range(cfg.n_layer):
            self.layers.append(build_part(cfg.block, Block, cfg, i, self.layers))
        self.per_layer = build_part(cfg.per_layer, nn.Identity, cfg)
        self.norm = build_part(cfg.norm, RMSNorm, cfg.dim, cfg.norm_eps)
        self.head = nn.Linear(cfg.dim, cfg.vocab_size, bias=cfg.head_bias)
        if cfg.tied:
            self.head.weight = self.embed.weight
        self.cap = build_part(cfg.logit_cap, nn.Identity)
        self.ropes = tuple(dict.fromkeys(cfg.rope))            # without duplicates, in order
        self.windows = tuple(dict.fromkeys(cfg.window))
        self.register_buffer("freq", self.frequencies(), persistent=False)
        amplitude = [rope.amplitudes(cfg.head_dim) for rope in self.ropes]
        self.register_buffer("amplitude", padded(amplitude), persistent=False)
        self.max_batch_size = self.max_seq_length = self.longest_call = 0      # of the cache
        self.rings = nn.ModuleDict()                           # str(window) -> Ring
        self.recorded = ()                         # layers, see record_hidden()
        self.hidden = HiddenStates((), (0, 0, 0), self.dtype, None)

    def frequencies(self, length: int = 0) -> Tensor:
        """The frequencies of each RoPE, for sequences of up to `length`: fp32 [R, H / 2]."""
        return padded([rope.frequencies(self.cfg.head_dim, length) for rope in self.ropes])

    @torch.inference_mode(False)                   # normal tensors even in an inference_mode caller
    def setup_cache(self, batch_size: int, length: int, longest_call: int | None = None,
                    device=None, max_rejected: int = 0) -> None:
        """Allocate the KV cache for `length` positions; batch_size 0 removes it.

        longest_call: the most tokens that one call will have (None: any number); layers with a
        window then need only a ring of slots. max_rejected: the most tokens of a call that may be
        rejected (drafts); recurrent layers keep states to go back that far. Dynamic RoPE uses
        `length` from now on.
        """
        cfg, device = self.cfg, device or self.freq.device
        self.max_batch_size = batch_size
        self.max_seq_length = length
        self.longest_call = min(longest_call or length, length)
        with torch.inference_mode(self.freq.is_inference()):   # in place: graphs hold its address
            self.freq.copy_(self.frequencies(length))
        size = {w: n_slots(w, length, self.longest_call) for w in cfg.window}
        self.rings = nn.ModuleDict({str(w): Ring(batch_size, n, device)
                                    for w, n in size.items() if batch_size and n < length})
        for i, layer in enumerate(self.layers):
            n_slot = size[of_layer(i, cfg.window)]
            layer.attn.setup_cache(batch_size, n_slot, self.dtype, device, max_rejected)
        self.hidden = self._hidden_states(device)

    @torch.inference_mode(False)
    def record_hidden(self, *layers: int) -> None:
        """From now on, calls with a cache record the inputs of these layers in self.hidden.

        self.hidden[k] [B, S, D] is the residual stream before layer k, by cache row and position;
        k = n_layer: after the last layer, before the final norm. Adds to the layers recorded
        already; every recorder's layers stay.
        """
        assert all(0 <= k <= self.cfg.n_layer for k in layers), f"no such layers: {layers}"
        if not set(layers) <= set(self.recorded):
            self.recorded = tuple(sorted({*self.recorded, *layers}))
            self.hidden = self._hidden_states(self.freq.device)

    def _hidden_states(self, device) -> HiddenStates:
        shape = self.max_batch_size, self.max_seq_length, self.cfg.dim
        return HiddenStates(self.recorded, shape, self.dtype, device)

    def forward(self, tokens: Tensor, pos: Tensor, logits_to_keep: int | Tensor = 1,
                kv_len: int | None = None, batch_idx: Tensor | None = None) -> Tensor:
        """tokens [B, T] -> fp32 logits [B, n, V] of the positions in logits_to_keep.

        pos [T] or [B, T]: the absolute position of each token. logits_to_keep: the last n
        positions, or indices [B, n] into T (right-padded rows end at different places). kv_len:
        attend only to the first kv_len cache entries; must cover every position written so far.
        batch_idx [B]: the cache rows of these sequences; None: all.
        """
        kv_len = kv_len or (self.max_seq_length if self.max_batch_size else tokens.shape[1])
        if batch_idx is not None:                  # each row has its own slots
            pos = pos.expand(len(batch_idx), -1)
        x, *shared = self.embed_inputs(tokens, pos, kv_len, batch_idx)
        for i, (layer, inputs) in enumerate(zip(self.layers, self.layer_inputs(shared))):
            if i in self.hidden.layers:
                self.record(i, x, pos, batch_idx)
            x = layer(x, *inputs[:3], batch_idx, *inputs[3:])
        if self.cfg.n_layer in self.hidden.layers:
            self.record(self.cfg.n_layer, x, pos, batch_idx)
        if isinstance(logits_to_keep, int):
            x = x[:, -logits_to_keep:]
        else:
            x = x.gather(1, logits_to_keep[..., None].expand(-1, -1, x.shape[-1]))
        return self.unembed(x)

    def record(self, layer: int, x: Tensor, pos: Tensor, batch_idx: Tensor | None) -> None:
        """Record x [B, T, D], the input of a layer."""
        self.hidden(layer, x, pos, batch_idx)

    def embed_tokens(self, tokens: Tensor, pos: Tensor) -> Tensor:
        """[B, T], [T] or [B, T] -> [B, T, D]"""
        x = self.embed(tokens)
        for name in self.after_embed:
            x = getattr(self, name)(x, pos)
        return x

    def embed_inputs(self, tokens: Tensor, pos: Tensor, kv_len: int,
                     batch_idx: Tensor | None = None) -> tuple[Tensor, ...]:
        """Embedding lookup, RoPE tables, masks: x [B, T, D]; cos, sin of each RoPE; slot, mask of
        each window; per-layer embeddings [B, T, L, P], if any.
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
        """Distribute embed_inputs()'s outputs after x: each layer gets its rope, slot, mask, and
        per-layer embedding, if any."""
        cfg, pairs = self.cfg, list(zip(shared[::2], shared[1::2]))
        own = [t.unbind(2) for t in shared[2 * len(pairs):]]
        ropes = dict(zip(self.ropes, pairs))
        masks = dict(zip(self.windows, pairs[len(ropes):]))
        inputs = []
        for i in range(cfg.n_layer):
            rope, (slot, mask) = ropes[of_layer(i, cfg.rope)], masks[of_layer(i, cfg.window)]
            inputs.append((rope, slot, mask, *(t[i] for t in own)))
        return inputs

    def unembed(self, x: Tensor) -> Tensor:
        """The last layer's output [B, n, D] -> fp32 logits [B, n, V]."""
        return self.cap(self.head(self.norm(x)).float())


def padded(rows: list[Tensor]) -> Tensor:
    """Stack 1-D tensors as rows, the shorter ones padded with zeros."""
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


def cache_bytes(cfg: ModelConfig, batch_size: int, length: int, longest_call: int, dtype,
                max_rejected: int = 0) -> int:
    """Bytes that setup_cache() will allocate for the layers."""
    with torch.device("meta"):
        model = Transformer(cfg)
        model.dtype = dtype
        model.setup_cache(batch_size, length, longest_call, "meta", max_rejected)
    return sum(t.nbytes for layer in model.layers for t in layer.attn.buffers())
