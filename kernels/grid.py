"""The grid of sixteen values for a group of weights that costs the least squared error.

    scale, zero = best_grid(groups)                # w = (code - 8) * scale + zero, code 0 to 15
"""

import torch
from torch import Tensor

SHRINK = (1.0, 0.92, 0.84, 0.76, 0.66)           # of the range from min to max
AT_ONCE = 1 << 16                                  # weights: temporaries stay in a core's cache


def best_grid(groups: Tensor, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Groups [..., G], how much an error of each of the G counts -> scale and zero [...].

    From the smallest to the largest weight, and from somewhat within, each once more as least
    squares fit it to the codes it gives. In fp32, of numbers that bfloat16 has.
    """
    rows = groups.reshape(-1, groups.shape[-1])
    count = importance if importance is not None else rows.new_ones(rows.shape[-1])
    pieces = rows.split(max(1, AT_ONCE // rows.shape[-1])) if rows.device.type == "cpu" else [rows]
    found = [_best_of(piece, count) for piece in pieces]
    return tuple(torch.cat(t).view(groups.shape[:-1]) for t in zip(*found))


def _best_of(w: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    low, high = w.aminmax(dim=-1)
    best = None
    for shrink in SHRINK:
        scale = _rounded(((high - low) * (shrink / 15)).clamp(min=1e-20))
        zero = _rounded(low + (high - low) * ((1 - shrink) / 2) + 8 * scale)
        codes, best = _tried(w, count, scale, zero, best)
        _, best = _tried(w, count, *_fitted(w, count, codes, scale, zero), best)
    return best[1:]


def _tried(w, count, scale, zero, best):
    """-> the codes, and the better of this grid and the best so far: (error, scale, zero)."""
    codes = ((w - zero[:, None]) / scale[:, None]).round_().clamp_(-8, 7)
    error = (codes * scale[:, None]).add_(zero[:, None]).sub_(w).square_() @ count
    if best is None:
        return codes, (error, scale, zero)
    better = error < best[0]                       # never of what is no number
    pairs = zip((error, scale, zero), best)
    return codes, tuple(torch.where(better, new, old) for new, old in pairs)


def _fitted(w, count, codes, scale, zero):
    """Least squares' scale and zero for these codes; those given, where all codes are one."""
    total = count.sum()
    code_mean, w_mean = codes @ count / total, w @ count / total
    spread = codes - code_mean[:, None]
    square = spread.square() @ count
    new = _rounded((spread * w) @ count / square)
    usable = (square > 0) & (new > 0)
    scale = torch.where(usable, new, scale)
    return scale, torch.where(usable, _rounded(w_mean - scale * code_mean), zero)


def _rounded(t: Tensor) -> Tensor:
    return t.bfloat16().float()
