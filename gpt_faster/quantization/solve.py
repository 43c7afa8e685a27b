"""GPTQ (arXiv 2210.17323): round a weight matrix so that its outputs change least.

Pure functions on weights and Hessians. It knows no packed layout, no file and no text: which codes
there are and what they stand for, a quantize.Scheme with groups says.

    hessian = sum(x.T @ x for x in inputs)         # [in, in] of the linear's inputs x [n, in]
    codes, scales, zeros = solve(weight, hessian, scheme_named("int4-g32"))
"""

import torch
from torch import Tensor


def lower_factor(hessian: Tensor, percdamp: float) -> Tensor:
    """The lower Cholesky factor L of the damped Hessian, H = L L'. [in, in]

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
            return lower
        damp = 10 * damp
    raise ValueError("the inputs' Hessian cannot be inverted: give more damping (--percdamp)")


def inverse_factor(hessian: Tensor, percdamp: float) -> Tensor:
    """The upper Cholesky factor U of the damped Hessian's inverse, inv(H) = U' U. [in, in]

    With columns from last to first L is an upper factor R of H = R R', and U its inverse.
    """
    R = lower_factor(hessian.flip(0, 1), percdamp).flip(0, 1)
    return torch.linalg.solve_triangular(R, torch.eye(len(R), device=R.device), upper=True)


def nearest(weight: Tensor, scheme) -> Tensor:
    """What a scheme's nearest codes stand for. [..., out, in], of the weight's dtype"""
    leaves = scheme.quantize(weight.flatten(0, -2))
    rows = scheme.dequantize(leaves["weight"], leaves["scales"], leaves.get("zeros"), weight.dtype)
    return rows.view(weight.shape)


def shrunk(hessian: Tensor, share: float) -> Tensor:
    """[..., in, in] -> the same with a share less of what inputs have to do with each other.

    How large an input is holds for other texts; what goes with it is partly this text's own.
    """
    return hessian.lerp(hessian.diagonal(dim1=-2, dim2=-1).diag_embed(), share)


def output_error(change: Tensor, hessian: Tensor) -> float:
    """The squared change of the outputs, summed over inputs with this Hessian: tr(dW H dW')."""
    return float(((change @ hessian) * change).sum())


def corrected(weight: Tensor, hessian: Tensor, cross: Tensor, share: float,
              percdamp: float = 0.01) -> Tensor:
    """The weight that makes up for a share of how far its inputs are off (arXiv 2504.02692).

    cross [in, in]: sum of (original input - input).T @ input. With share 1 it is least squares'
    answer, inputs as they are, to the outputs of the original; less of it fits the text less.
    """
    lower = lower_factor(hessian, percdamp)
    return weight + share * torch.cholesky_solve((weight @ cross).T, lower).T


def solving_order(hessian: Tensor, groupsize: int) -> Tensor:
    """Columns in the order to solve them: the group with the largest inputs first, and in it too.

    A group stays together, so that its grid is chosen when it is known what its columns have become
    and no order needs to be stored.
    """
    size = hessian.diagonal().unflatten(0, (-1, groupsize))
    columns = size.argsort(dim=1, descending=True, stable=True)
    columns = columns + groupsize * torch.arange(len(size), device=size.device)[:, None]
    return columns[size.sum(1).argsort(descending=True, stable=True)].flatten()


def solve(weight: Tensor, hessian: Tensor, scheme, percdamp: float = 0.01, blocksize: int = 128,
          act_order: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """weight [out, in], hessian [in, in], fp32 -> codes [out, in], scales and zeros [out, in/G].

    Column by column: round it, and spread what that changed in the outputs over the columns to
    come. scheme: its grid(), codes(), values() and groupsize. An error of a column counts by the
    inverse of its U squared: what is left of it when the columns to come have made up for it.
    blocksize: columns whose spreading onto the rest waits for one product. act_order: in
    solving_order(), else from left to right.
    """
    n_out, n_in = weight.shape
    groupsize = scheme.groupsize
    H = hessian.float().clone()
    dead = H.diagonal() == 0
    H.diagonal()[dead] = 1
    H /= H.diagonal().mean()                       # which changes nothing but what overflows
    order = solving_order(H, groupsize) if act_order else torch.arange(n_in, device=H.device)
    U = inverse_factor(H[order][:, order], percdamp)
    W = weight.float().T[order].contiguous()       # [in, out]: a column's numbers are neighbours
    codes = torch.empty_like(W)
    scales = torch.empty(n_in // groupsize, n_out, device=W.device)
    zeros = torch.empty_like(scales)
    for a in range(0, n_in, blocksize):
        b = min(a + blocksize, n_in)
        block = W[a:b].clone()
        error = torch.empty_like(block)
        for i in range(b - a):
            g = (a + i) // groupsize
            if (a + i) % groupsize == 0:           # from what the columns are by now
                end = a + i + groupsize
                ahead = W[b:max(b, end)] - U[a:a + i, b:max(b, end)].T @ error[:i]
                now = torch.cat((block[i:i + groupsize], ahead)).T
                importance = U.diagonal()[a + i:end] ** -2
                scales[g], zeros[g] = scheme.grid(now, importance)
            code = scheme.codes(block[i, :, None], scales[g], zeros[g])
            value = scheme.values(code, scales[g], zeros[g])
            codes[a + i] = code[:, 0]
            error[i] = (block[i] - value[:, 0]) / U[a + i, a + i]
            block[i + 1:].addr_(U[a + i, a + i + 1:b], error[i], alpha=-1)
        W[b:] -= U[a:b, b:].T @ error
    groups = (order[::groupsize] // groupsize).argsort()
    return codes[order.argsort()].T.contiguous(), scales[groups].T, zeros[groups].T
