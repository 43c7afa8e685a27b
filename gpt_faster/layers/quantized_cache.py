"""KV caches of 8 and 4 bits: codes, and a scale for each group of 32 values along the head.

    model.kv_cache = CacheFormat.parse("int8/int4")        # keys/values
    model.setup_cache(batch_size=1, length=4096)

This is the plain form: each call dequantizes the whole cache. A prompt attends to what is stored,
so that chunks, whole prompts and decode steps agree. States of recurrent layers stay as they are.

    int8   [B, K, S, H] int8           x = code * scale
    int4   [B, K, S, H / 2] uint8      x = (code - 8) * scale; low four bits: even index
    fp8    [B, K, S, H] float8_e4m3fn  x = code * scale
    scale  [B, K, S, ceil(H / 32)] float16
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt_faster.layers.latent import LatentCache
from gpt_faster.layers.recurrent import StateRing
from model import KVCache, ModelConfig, cache_bytes, row_index, write_slots

GROUP = 32                                         # values with one scale
MAX_VALUE_TURN = 64                                # as llama.cpp; a larger one gains nothing


# ---- Codes of groups ----------------------------------------------------------------------------

def round_to_scale(groups: Tensor, scale: Tensor) -> Tensor:
    """groups / scale, fp32. By the scale as it is stored, so that its own rounding costs nothing.
    """
    inverse = torch.where(scale == 0, 0.0, 1 / scale.float())
    return groups * inverse[..., None]


def encode_int8(groups: Tensor) -> tuple[Tensor, Tensor]:
    """groups fp32 [..., G, 32] -> codes [..., G, 32], scales [..., G]; rounds half to even."""
    scale = (groups.abs().amax(-1) / 127).half()
    codes = round_to_scale(groups, scale).round().clamp(-127, 127)
    return codes.to(torch.int8), scale


def encode_fp8(groups: Tensor) -> tuple[Tensor, Tensor]:
    scale = (groups.abs().amax(-1) / 448).half()
    codes = round_to_scale(groups, scale).clamp(-448, 448)
    return codes.to(torch.float8_e4m3fn), scale


def encode_int4(groups: Tensor) -> tuple[Tensor, Tensor]:
    """The value of largest magnitude gets code 0 (-8), which has no opposite: 16 levels, not 15.
    """
    largest = groups.abs().argmax(-1, keepdim=True)            # the first of equal ones
    scale = (groups.gather(-1, largest)[..., 0] / -8).half()
    codes = round_to_scale(groups, scale).round().clamp(-8, 7) + 8
    return codes.to(torch.uint8), scale


def pack_int4(codes: Tensor) -> Tensor:
    """[..., H] -> [..., H / 2]"""
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpack_int4(codes: Tensor) -> Tensor:
    """[..., H / 2] -> fp32 [..., H]"""
    x = torch.empty(*codes.shape, 2, device=codes.device)      # 9 times faster than stack()
    x[..., 0] = codes & 15
    x[..., 1] = codes >> 4
    return x.flatten(-2).sub_(8)


DTYPES = {"int8": torch.int8, "int4": torch.uint8, "fp8": torch.float8_e4m3fn}
ENCODERS = {"int8": encode_int8, "int4": encode_int4, "fp8": encode_fp8}


def in_groups(x: Tensor) -> Tensor:
    """[..., H] -> [..., G, 32], the last group padded with zeros."""
    n_short = -x.shape[-1] % GROUP
    return (F.pad(x, (0, n_short)) if n_short else x).unflatten(-1, (-1, GROUP))


def encode(x: Tensor, precision: str) -> tuple[Tensor, Tensor]:
    """x fp32 [..., H] -> codes, scales; a short last group is rounded as if padded with zeros."""
    codes, scale = ENCODERS[precision](in_groups(x))
    codes = codes.flatten(-2)[..., :x.shape[-1]]
    return pack_int4(codes) if precision == "int4" else codes, scale


def decode(codes: Tensor, scale: Tensor, precision: str) -> Tensor:
    """-> fp32 [..., H]"""
    x = unpack_int4(codes) if precision == "int4" else codes.float()
    return (in_groups(x) * scale.float()[..., None]).flatten(-2)[..., :x.shape[-1]]


# ---- The turn -----------------------------------------------------------------------------------

def turn_width(head_dim: int) -> int:
    """The largest power of two that divides head_dim."""
    return head_dim & -head_dim


def turn(x: Tensor, m: int) -> Tensor:
    """Multiply each m values of x [..., H] by a Hadamard matrix / sqrt(m), its own inverse.

    It spreads a large value over its block, so that a scale serves all values of a group. The
    order of the additions is fixed, so that kernels store the same codes.
    """
    if m == 1:
        return x
    y = x.unflatten(-1, (-1, m))
    n = 1
    while n < m:                                   # pairs (i, i + n), from neighbours outwards
        a, b = y.unflatten(-1, (-1, 2, n)).unbind(-2)
        y = torch.stack((a + b, a - b), -2).flatten(-3)
        n *= 2
    return (y * m**-0.5).flatten(-2)


def turn_back(x: Tensor, m: int) -> Tensor:
    """turn(x, m) by a matrix product: quicker for a whole cache, but with other rounding."""
    if m == 1:
        return x
    matrix = turn(torch.eye(m, device=x.device), m)
    return (x.unflatten(-1, (-1, m)) @ matrix).flatten(-2)


# ---- Caches -------------------------------------------------------------------------------------

class QuantizedCache(nn.Module):
    """Replaces model.KVCache: k, v hold codes, k_scale, v_scale their scales.

    k_turn, v_turn: width of the turn's blocks; 1: no turn. Queries meet turned keys if they are
    turned too, and the output of turned values is turned back; here keys and values are turned
    back instead, so that attention is as for any other cache.
    """

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device,
                 precisions: tuple[str, str]):
        """shape: B, K, S, H; dtype: of the keys and values that it returns."""
        super().__init__()
        self.head_dim, self.dtype = shape[-1], dtype
        self.k_precision, self.v_precision = precisions
        self.k_turn = turn_width(self.head_dim)
        self.v_turn = min(self.k_turn, MAX_VALUE_TURN)
        for name, precision in zip(("k", "v"), precisions):
            add_buffers(self, name, shape, precision, device)

    def forward(self, slot, k, v, kv_len, batch_idx):
        """As model.KVCache: write k, v [B, K, T, H], return the first kv_len."""
        k = encode(turn(k.float(), self.k_turn), self.k_precision)
        v = encode(turn(v.float(), self.v_turn), self.v_precision)
        for buffer, x in zip((self.k, self.k_scale, self.v, self.v_scale), (*k, *v)):
            write_slots(buffer, slot, x, batch_idx)
        return self.read(kv_len, batch_idx)

    def read(self, kv_len, batch_idx):
        """The first kv_len keys and values, dequantized."""
        k, k_scale, v, v_scale = (
            t[:, :, :kv_len] if batch_idx is None else t[batch_idx, :, :kv_len]
            for t in (self.k, self.k_scale, self.v, self.v_scale))
        k = turn_back(decode(k, k_scale, self.k_precision), self.k_turn)
        v = turn_back(decode(v, v_scale, self.v_precision), self.v_turn)
        return k.to(self.dtype), v.to(self.dtype)


class QuantizedLatentCache(nn.Module):
    """Replaces latent.LatentCache: int8 codes [B, S, kv_rank + rope], scales; never turned."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, device):
        super().__init__()
        self.dtype = dtype
        add_buffers(self, "k", shape, "int8", device)

    def forward(self, slot, k, kv_len, batch_idx):
        """As model.KVCache: write k [B, T, width], return the first kv_len."""
        for buffer, x in zip((self.k, self.k_scale), encode(k.float(), "int8")):
            if slot.dim() == 1:
                buffer[:, slot] = x
            else:
                buffer[row_index(slot, batch_idx), slot] = x
        k, scale = (t[:, :kv_len] if batch_idx is None else t[batch_idx, :kv_len]
                    for t in (self.k, self.k_scale))
        return decode(k, scale, "int8").to(self.dtype)


def add_buffers(cache: nn.Module, name: str, shape: tuple[int, ...], precision: str,
                device) -> None:
    """Codes and scales of keys or values [..., H]."""
    *rest, n = shape
    width = n // 2 if precision == "int4" else n
    codes = torch.zeros(*rest, width, dtype=torch.uint8, device=device).view(DTYPES[precision])
    scale = torch.zeros(*rest, -(-n // GROUP), dtype=torch.float16, device=device)
    cache.register_buffer(name, codes, persistent=False)
    cache.register_buffer(f"{name}_scale", scale, persistent=False)


# ---- The choice ---------------------------------------------------------------------------------

@dataclass(frozen=True)
class CacheFormat:
    """Precision of keys and of values; set as Transformer.kv_cache before setup_cache()."""

    keys: str                                      # a key of DTYPES
    values: str

    @staticmethod
    def parse(text: str) -> "CacheFormat":
        """int8, or int8/int4: keys/values. ValueError if it is neither."""
        names = text.split("/")
        if len(names) > 2 or not set(names) <= DTYPES.keys():
            raise ValueError(f"expected {', '.join(DTYPES)}, or keys/values, for example "
                             f"int8/int4; got '{text}'")
        return CacheFormat(names[0], names[-1])

    def __str__(self) -> str:
        return self.keys if self.keys == self.values else f"{self.keys}/{self.values}"

    def check(self, cfg: ModelConfig) -> None:
        """ValueError if a layer of such a model has no cache of this format."""
        cache_bytes(cfg, 1, 1, 1, torch.bfloat16, kv_cache=self)

    def replace_cache(self, attn: nn.Module) -> None:
        """Exchange the cache that attn.setup_cache() has allocated; recurrent states stay.

        ValueError if it has no form in this precision.
        """
        cache = dict(attn.named_children()).get("cache")       # not that of another layer
        if type(cache) is KVCache:
            self.check_head(cache.k.shape[-1])
            attn.cache = QuantizedCache(cache.k.shape, cache.k.dtype, cache.k.device,
                                        (self.keys, self.values))
        elif type(cache) is LatentCache:
            if str(self) != "int8":
                raise ValueError(f"a KV cache of {self} does not fit latent attention (MLA), whose "
                                 "one vector per position is keys and values: use int8")
            attn.cache = QuantizedLatentCache(cache.k.shape, cache.k.dtype, cache.k.device)
        elif cache is not None and type(cache) is not StateRing:
            raise ValueError(f"a KV cache of {self} cannot replace a {type(cache).__qualname__}: "
                             "only model.KVCache and LatentCache have such a form")

    def check_head(self, head_dim: int) -> None:
        if head_dim % 2 and "int4" in (self.keys, self.values):
            raise ValueError(f"a KV cache of {self} needs an even head_dim, this model has "
                             f"{head_dim}: use int8 or fp8")
