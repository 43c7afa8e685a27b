"""Refines GPTQ's result: refits each row's scales and zeros to its codes, then updates each code.

GPTQ chooses a column's codes knowing only the columns before it. With all codes fixed, the optimal
scales and zeros are a least-squares solution (a small system per row). Then coordinate descent sets
each code to the nearest one, given the errors of all others. Both steps reduce the output error.

    codes, scales, zeros = refine(weight, hessian, *solve(weight, hessian, scheme), scheme)
"""

import torch
from torch import Tensor

ROUNDS = 2                                         # a third gains a tenth of what the first does
MAX_ELEMENTS = 1 << 25                             # of the rows' linear systems in memory
MAX_RATIO = 2.0                                    # a scale changes by less than this factor


def refine(weight: Tensor, hessian: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor, scheme,
            percdamp: float = 0.01, blocksize: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    """weight [out, in], hessian [in, in], fp32; codes, scales, zeros of solve() -> refined ones."""
    H = hessian.float().clone()
    H.diagonal().add_(percdamp * H.diagonal().mean()).clamp_(min=1e-20)
    W, shape = weight.float(), (weight.shape[0], -1, scheme.groupsize)
    for _ in range(ROUNDS):
        error = W - scheme.values(codes.view(shape), scales, zeros).flatten(1)
        scales, zeros = fit_grids(error @ H, H, codes, scales, zeros, scheme.groupsize)
        value = scheme.values(codes.view(shape), scales, zeros).flatten(1)
        codes = update_codes(value - W, H, value, scales, zeros, scheme, blocksize)
    return codes, scales, zeros


def fit_grids(error_H: Tensor, H: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor,
              groupsize: int) -> tuple[Tensor, Tensor]:
    """error_H [out, in]: (weights - values) @ H -> optimal scales, zeros [out, G].

    A row's output error is quadratic in its G scales and G zeros: one system of 2 G equations.
    """
    n_in, G = H.shape[0], scales.shape[1]
    to_zeros = H.view(n_in, G, groupsize).sum(2)               # [in, G]
    zeros_block = to_zeros.view(G, groupsize, G).sum(1)
    changes, n_row = [], max(1, MAX_ELEMENTS // (2 * G) ** 2)
    for rows, e in zip(codes.split(n_row), error_H.split(n_row)):
        c = rows.view(len(rows), G, groupsize) - 8
        e = e.view(c.shape)
        system = zeros_block.new_empty(len(rows), 2 * G, 2 * G)
        for g in range(G):                         # symmetric: only the lower triangle
            columns, before = slice(g * groupsize, (g + 1) * groupsize), c[:, :g + 1]
            product = (c[:, g] @ H[columns, :columns.stop]).view(before.shape)
            system[:, g, :g + 1] = (product * before).sum(2)
            system[:, g, G:] = c[:, g] @ to_zeros[columns]
        system[:, G:, :G] = system[:, :G, G:].mT
        system[:, G:, G:] = zeros_block
        diagonal = system.diagonal(dim1=1, dim2=2)
        diagonal.mul_(1 + 1e-4).clamp_(min=1e-20)              # singular if all codes are equal
        lower, info = torch.linalg.cholesky_ex(system)
        change = torch.cholesky_solve(torch.cat((e * c, e), 1).sum(2)[..., None], lower)[..., 0]
        changes.append(torch.where(info[:, None] == 0, change, 0))
    change = torch.cat(changes).nan_to_num()
    new, new_zeros = (t.bfloat16().float() for t in (scales + change[:, :G], zeros + change[:, G:]))
    is_valid = (new * MAX_RATIO > scales) & (new < MAX_RATIO * scales)
    return torch.where(is_valid, new, scales), torch.where(is_valid, new_zeros, zeros)


def update_codes(error: Tensor, H: Tensor, value: Tensor, scales: Tensor, zeros: Tensor, scheme,
                 blocksize: int) -> Tensor:
    """Coordinate descent over columns. error, value [out, in] of the current codes -> new codes."""
    n_in = len(H)
    value, gradient = value.T.contiguous(), H @ error.T        # [in, out]: a column is contiguous
    codes = torch.empty_like(value)
    for a in range(0, n_in, blocksize):
        b = min(a + blocksize, n_in)
        block, change = gradient[a:b], torch.empty_like(gradient[a:b])
        for i in range(b - a):
            g = (a + i) // scheme.groupsize
            target = value[a + i] - block[i] / H[a + i, a + i]
            code = scheme.codes(target[:, None], scales[:, g], zeros[:, g])
            change[i] = scheme.values(code, scales[:, g], zeros[:, g])[:, 0] - value[a + i]
            codes[a + i] = code[:, 0]
            block[i + 1:].addr_(H[a + i, a + i + 1:b], change[i])
        gradient[b:] += H[a:b, b:].T @ change
    return codes.T.contiguous()
