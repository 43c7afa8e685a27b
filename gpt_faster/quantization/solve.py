"""GPTQ (arXiv 2210.17323): quantizes a weight matrix so that its outputs change least.

Pure functions on weights and Hessians. It knows no packed layout, no file and no text: a
quantize.Scheme with groups defines the codes and their values.

    hessian = sum(x.T @ x for x in inputs)         # [in, in] of the linear's inputs x [n, in]
    codes, scales, zeros = solve(weight, hessian, scheme_named("int4-g32"))
"""

import torch
from torch import Tensor


def lower_factor(hessian: Tensor, percdamp: float) -> Tensor:
    """The lower Cholesky factor L of the damped Hessian, H = L L'. [in, in]

    Damped by percdamp times the mean of the diagonal, ten times more after each failure.
    ValueError if that does not help or the Hessian is not finite.
    """
    if not hessian.isfinite().all():
        raise ValueError("the calibration text gives infinite activations in this dtype")
    damp = percdamp * hessian.diagonal().mean()
    for _ in range(8):
        damped = hessian.clone()
        damped.diagonal().add_(damp)
        lower, info = torch.linalg.cholesky_ex(damped)
        if not info:
            return lower
        damp = 10 * damp
    raise ValueError("the inputs' Hessian cannot be inverted: give more damping (--percdamp)")


def inverse_factor(hessian: Tensor, percdamp: float) -> Tensor:
    """The upper Cholesky factor U of the damped Hessian's inverse, inv(H) = U' U. [in, in]

    L of the flipped H, flipped back, is an upper factor R with H = R R', and U is its inverse.
    """
    R = lower_factor(hessian.flip(0, 1), percdamp).flip(0, 1)
    return torch.linalg.solve_triangular(R, torch.eye(len(R), device=R.device), upper=True)


def nearest_codes(weight: Tensor, scheme) -> tuple[Tensor, Tensor, Tensor]:
    """weight [out, in], fp32 -> solve()'s result without inputs: each code is the nearest."""
    groups = weight.unflatten(-1, (-1, scheme.groupsize))
    scales, zeros = scheme.grid(groups)
    return scheme.codes(groups, scales, zeros).flatten(-2), scales, zeros


def round_to_nearest(weight: Tensor, scheme) -> Tensor:
    """Quantize without calibration and dequantize. [..., out, in], of the weight's dtype"""
    t = scheme.quantize(weight.flatten(0, -2))
    rows = scheme.dequantize(t["weight"], t["scales"], t.get("zeros"), weight.dtype)
    return rows.view(weight.shape)


def shrink_correlations(hessian: Tensor, share: float) -> Tensor:
    """Hessian [..., in, in] -> its off-diagonal entries reduced by `share`.

    The inputs' magnitudes hold for other texts; their correlations are partly specific to this one.
    """
    return hessian.lerp(hessian.diagonal(dim1=-2, dim2=-1).diag_embed(), share)


def output_error(change: Tensor, hessian: Tensor) -> float:
    """The squared change of the outputs, summed over the inputs of this Hessian: tr(dW H dW')."""
    return float(((change @ hessian) * change).sum())


def correct_weight(weight: Tensor, hessian: Tensor, cross: Tensor, share: float,
              percdamp: float = 0.01) -> Tensor:
    """Correct the weight for a share of its inputs' deviation from the original (arXiv 2504.02692).

    cross [in, in]: sum of (original input - input).T @ input. share 1 is the least-squares fit to
    the original outputs with the current inputs; less overfits the calibration text less.
    """
    size = hessian.diagonal().mean()               # tiny inputs: both would underflow
    lower = lower_factor(hessian / size, percdamp)
    return weight + share * torch.cholesky_solve((weight @ (cross / size)).T, lower).T


def solving_order(hessian: Tensor, groupsize: int) -> Tensor:
    """The order in which to solve columns: groups, and columns in a group, by largest inputs.

    A group's columns stay adjacent, so its grid is chosen with all earlier errors known, and the
    order need not be stored.
    """
    size = hessian.diagonal().unflatten(0, (-1, groupsize))
    columns = size.argsort(dim=1, descending=True, stable=True)
    columns = columns + groupsize * torch.arange(len(size), device=size.device)[:, None]
    return columns[size.sum(1).argsort(descending=True, stable=True)].flatten()


def solve(weight: Tensor, hessian: Tensor, scheme, percdamp: float = 0.01, blocksize: int = 128,
          act_order: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """weight [out, in], hessian [in, in], fp32 -> codes [out, in], scales and zeros [out, in/G].

    Rounds one column after another and distributes its error over the remaining columns. scheme:
    its grid(), codes(), values() and groupsize. A column's importance is U[i, i] ** -2, its error
    after the remaining columns compensate. blocksize: columns whose updates of the rest are batched
    in one matmul. act_order: in solving_order(), else from left to right.
    """
    n_out, n_in = weight.shape
    groupsize = scheme.groupsize
    H = hessian.float().clone()
    dead = H.diagonal() == 0
    H.diagonal()[dead] = 1
    H /= H.diagonal().mean()                       # avoids overflow; the scale has no effect
    order = solving_order(H, groupsize) if act_order else torch.arange(n_in, device=H.device)
    U = inverse_factor(H[order][:, order], percdamp)
    W = weight.float().T[order].contiguous()       # [in, out]: a column is contiguous
    codes = torch.empty_like(W)
    scales = torch.empty(n_in // groupsize, n_out, device=W.device)
    zeros = torch.empty_like(scales)
    for a in range(0, n_in, blocksize):
        b = min(a + blocksize, n_in)
        block = W[a:b].clone()
        error = torch.empty_like(block)
        for i in range(b - a):
            g = (a + i) // groupsize
            if (a + i) % groupsize == 0:           # with the errors distributed so far
                end = a + i + groupsize
                ahead = W[b:max(b, end)] - U[a:a + i, b:max(b, end)].T @ error[:i]
                columns = torch.cat((block[i:i + groupsize], ahead)).T
                importance = U.diagonal()[a + i:end] ** -2
                scales[g], zeros[g] = scheme.grid(columns, importance)
            code = scheme.codes(block[i, :, None], scales[g], zeros[g])
            value = scheme.values(code, scales[g], zeros[g])
            codes[a + i] = code[:, 0]
            error[i] = (block[i] - value[:, 0]) / U[a + i, a + i]
            block[i + 1:].addr_(U[a + i, a + i + 1:b], error[i], alpha=-1)
        W[b:] -= U[a:b, b:].T @ error
    groups = (order[::groupsize] // groupsize).argsort()
    return codes[order.argsort()].T.contiguous(), scales[groups].T, zeros[groups].T
