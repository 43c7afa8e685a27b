"""GPTQ (arXiv 2210.17323): round a weight matrix so that its outputs change least.

Pure functions on weights and Hessians. It knows no packed layout, no file and no text: what numbers
there are, `grid` and `numbers` say (quantize.py's for int4).

    hessian = sum(x.T @ x for x in inputs)         # [in, in] of the linear's inputs x [n, in]
    q, scales, zeros = solve(weight, hessian, 32, int4_grid, int4_numbers)
"""

from collections.abc import Callable

import torch
from torch import Tensor


def inverse_factor(hessian: Tensor, percdamp: float) -> Tensor:
    """The upper Cholesky factor U of the damped Hessian's inverse, inv(H) = U' U. [in, in]

    Damped by percdamp times the mean of the diagonal, and by ten times more until it can be
    factored. ValueError where that does not help, or the Hessian has infinities.
    """
    if not hessian.isfinite().all():
        raise ValueError("the calibration text gives infinite activations in this dtype")
    damp = percdamp * hessian.diagonal().mean()
    for _ in range(8):
        damped = hessian.clone()
        damped.diagonal().add_(damp)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            inverse = torch.cholesky_inverse(lower)
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not failed:
                return upper
        damp = 10 * damp
    raise ValueError("the inputs' Hessian cannot be inverted: give more damping (--percdamp)")


def output_error(change: Tensor, hessian: Tensor) -> float:
    """The squared change of the outputs, summed over inputs with this Hessian: tr(dW H dW')."""
    return float(((change @ hessian) * change).sum())


def solve(weight: Tensor, hessian: Tensor, groupsize: int, grid: Callable, numbers: Callable,
          percdamp: float = 0.01, blocksize: int = 128,
          act_order: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """weight [out, in], hessian [in, in], fp32 -> q [out, in], scales and zeros [out, in/G].

    Column by column: round it, and spread what that changed in the outputs over the columns to
    come. grid(w [..., G]) -> scale and zero [...]; numbers(w [..., n], scale, zero) -> q [..., n];
    a number stands for (q - 8) * scale + zero. blocksize: columns whose spreading onto the rest
    waits for one product. act_order: the columns with the largest inputs first, all groups' grids
    fixed beforehand, so that a group stays G neighbours and no order needs to be stored.
    """
    n_out, n_in = weight.shape
    W, H = weight.float().clone(), hessian.float().clone()
    dead = H.diagonal() == 0
    H.diagonal()[dead] = 1
    scales, zeros = (t.clone() for t in grid(W.unflatten(-1, (-1, groupsize))))
    order = H.diagonal().argsort(descending=True) if act_order else torch.arange(
        n_in, device=W.device)
    group, W, H = order // groupsize, W[:, order], H[order][:, order]
    U, q = inverse_factor(H, percdamp), torch.empty_like(W)
    for a in range(0, n_in, blocksize):
        b = min(a + blocksize, n_in)
        block, error = W[:, a:b].clone(), torch.empty(n_out, b - a, device=W.device)
        for i in range(b - a):
            g = int(group[a + i])
            if not act_order and (a + i) % groupsize == 0:     # from what the columns are by now
                end = a + i + groupsize
                ahead = W[:, b:max(b, end)] - error[:, :i] @ U[a:a + i, b:max(b, end)]
                now = torch.cat((block[:, i:i + groupsize], ahead), 1)
                scales[:, g], zeros[:, g] = grid(now)
            w, scale, zero = block[:, i], scales[:, g], zeros[:, g]
            q[:, a + i] = number = numbers(w[:, None], scale, zero)[:, 0]
            error[:, i] = (w - ((number - 8) * scale + zero)) / U[a + i, a + i]
            block[:, i + 1:] -= error[:, i:i + 1] * U[a + i, a + i + 1:b]
        W[:, b:] -= error @ U[a:b, b:]
    return q[:, order.argsort()], scales, zeros
