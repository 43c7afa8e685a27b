"""GPTQ (arXiv 2210.17323): round a weight matrix so that its outputs change least.

Pure functions on weights and Hessians. It knows no packed layout, no file and no text: which codes
there are and what they stand for, a quantize.Scheme with groups says.

    hessian = sum(x.T @ x for x in inputs)         # [in, in] of the linear's inputs x [n, in]
    codes, scales, zeros = solve(weight, hessian, scheme_named("int4-g32"))
"""

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


def solve(weight: Tensor, hessian: Tensor, scheme, percdamp: float = 0.01, blocksize: int = 128,
          act_order: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """weight [out, in], hessian [in, in], fp32 -> codes [out, in], scales and zeros [out, in/G].

    Column by column: round it, and spread what that changed in the outputs over the columns to
    come. scheme: its grid(), codes(), values() and groupsize. blocksize: columns whose spreading
    onto the rest waits for one product. act_order: the columns with the largest inputs first, all
    groups' grids fixed beforehand, so that a group stays G neighbours and no order needs to be
    stored.
    """
    n_out, n_in = weight.shape
    groupsize = scheme.groupsize
    W = weight.float().clone()
    H = hessian.float().clone()
    dead = H.diagonal() == 0
    H.diagonal()[dead] = 1
    scales, zeros = (t.clone() for t in scheme.grid(W.unflatten(-1, (-1, groupsize))))
    order = H.diagonal().argsort(descending=True) if act_order else torch.arange(
        n_in, device=W.device)
    group = order // groupsize
    W = W[:, order]
    U = inverse_factor(H[order][:, order], percdamp)
    codes = torch.empty_like(W)
    for a in range(0, n_in, blocksize):
        b = min(a + blocksize, n_in)
        block = W[:, a:b].clone()
        error = torch.empty(n_out, b - a, device=W.device)
        for i in range(b - a):
            g = int(group[a + i])
            if not act_order and (a + i) % groupsize == 0:     # from what the columns are by now
                end = a + i + groupsize
                ahead = W[:, b:max(b, end)] - error[:, :i] @ U[a:a + i, b:max(b, end)]
                now = torch.cat((block[:, i:i + groupsize], ahead), 1)
                scales[:, g], zeros[:, g] = scheme.grid(now)
            w = block[:, i:i + 1]
            code = scheme.codes(w, scales[:, g], zeros[:, g])
            value = scheme.values(code, scales[:, g], zeros[:, g])
            codes[:, a + i] = code[:, 0]
            error[:, i] = (w - value)[:, 0] / U[a + i, a + i]
            block[:, i + 1:] -= error[:, i:i + 1] * U[a + i, a + i + 1:b]
        W[:, b:] -= error @ U[a:b, b:]
    return codes[:, order.argsort()], scales, zeros
