"""What GPTQ leaves: all grids of a row fitted anew to its codes, then each code again.

GPTQ decides a column knowing only those before it. Once all are decided, scales and zeros have a
best answer (least squares, a small system for each row), and with these each code in turn is the
nearest to what the errors of all others leave for it. Both make the output error smaller.

    codes, scales, zeros = refined(weight, hessian, *solve(weight, hessian, scheme), scheme)
"""

import torch
from torch import Tensor

ROUNDS = 2                                         # a third gains a tenth of the first
AT_ONCE = 1 << 25                                  # numbers of rows' systems in memory
WITHIN = 2.0                                       # a scale changes by less than this factor


def refined(weight: Tensor, hessian: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor, scheme,
            percdamp: float = 0.01, blocksize: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    """weight [out, in], hessian [in, in], fp32, and what solve() gave -> the same three, better."""
    H = hessian.float().clone()
    H.diagonal().add_(percdamp * H.diagonal().mean()).clamp_(min=1e-20)
    W, shape = weight.float(), (weight.shape[0], -1, scheme.groupsize)
    for _ in range(ROUNDS):
        off = W - scheme.values(codes.view(shape), scales, zeros).flatten(1)
        scales, zeros = fitted_grids(off @ H, H, codes, scales, zeros, scheme.groupsize)
        value = scheme.values(codes.view(shape), scales, zeros).flatten(1)
        codes = settled_codes(value - W, H, value, scales, zeros, scheme, blocksize)
    return codes, scales, zeros


def fitted_grids(off: Tensor, H: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor,
                 groupsize: int) -> tuple[Tensor, Tensor]:
    """off [out, in]: how far the values are below the weights, times H -> scales, zeros [out, G].

    A row's error is quadratic in its G scales and G zeros: one system of 2 G equations.
    """
    n_in, G = H.shape[0], scales.shape[1]
    to_zeros = H.view(n_in, G, groupsize).sum(2)               # [in, G]
    zeros_alone = to_zeros.view(G, groupsize, G).sum(1)
    found = []
    for rows, e in zip(codes.split(max(1, AT_ONCE // (2 * G) ** 2)),
                       off.split(max(1, AT_ONCE // (2 * G) ** 2))):
        c = rows.view(len(rows), G, groupsize) - 8
        e = e.view(c.shape)
        system = zeros_alone.new_empty(len(rows), 2 * G, 2 * G)
        for g in range(G):                         # of what is symmetric the lower half
            own, before = slice(g * groupsize, (g + 1) * groupsize), c[:, :g + 1]
            with_own = (c[:, g] @ H[own, :own.stop]).view(before.shape)
            system[:, g, :g + 1] = (with_own * before).sum(2)
            system[:, g, G:] = c[:, g] @ to_zeros[own]
        system[:, G:, :G] = system[:, :G, G:].mT
        system[:, G:, G:] = zeros_alone
        diagonal = system.diagonal(dim1=1, dim2=2)
        diagonal.mul_(1 + 1e-4).clamp_(min=1e-20)              # a group may have one code only
        lower, failed = torch.linalg.cholesky_ex(system)
        change = torch.cholesky_solve(torch.cat((e * c, e), 1).sum(2)[..., None], lower)[..., 0]
        found.append(torch.where(failed[:, None] == 0, change, 0))
    change = torch.cat(found).nan_to_num()
    new, new_zeros = (t.bfloat16().float() for t in (scales + change[:, :G], zeros + change[:, G:]))
    usable = (new * WITHIN > scales) & (new < WITHIN * scales)
    return torch.where(usable, new, scales), torch.where(usable, new_zeros, zeros)


def settled_codes(error: Tensor, H: Tensor, value: Tensor, scales: Tensor, zeros: Tensor, scheme,
                  blocksize: int) -> Tensor:
    """error, value [out, in] of the codes so far -> codes, each decided by all others' errors."""
    n_in = len(H)
    value, slope = value.T.contiguous(), H @ error.T           # [in, out]: neighbours in memory
    codes = torch.empty_like(value)
    for a in range(0, n_in, blocksize):
        b = min(a + blocksize, n_in)
        block, change = slope[a:b], torch.empty_like(slope[a:b])
        for i in range(b - a):
            g, aim = (a + i) // scheme.groupsize, value[a + i] - block[i] / H[a + i, a + i]
            code = scheme.codes(aim[:, None], scales[:, g], zeros[:, g])
            change[i] = scheme.values(code, scales[:, g], zeros[:, g])[:, 0] - value[a + i]
            codes[a + i] = code[:, 0]
            block[i + 1:].addr_(H[a + i, a + i + 1:b], change[i])
        slope[b:] += H[a:b, b:].T @ change
    return codes.T.contiguous()
