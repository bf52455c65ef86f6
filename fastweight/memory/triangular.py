"""Inverses of many small unit lower triangular matrices: substitution at the bottom, products above.

(I + L)^-1 of a block [[A, 0], [B, D]] is [[A^-1, 0], [-D^-1 B A^-1, D^-1]]: blocks of up to 8 are inverted by
substitution (on vectors over the whole batch), then merged pairwise by batched products. Every step is as stable as
substitution; Neumann doubling (I - L)(I + L^2)... is not: for repeated keys its powers grow like binomials and float32
drowns.
"""

import torch
from jaxtyping import Float
from torch import Tensor

_SMALL = 8


def unit_lower_inverse(L: Float[Tensor, "M n n"]) -> Float[Tensor, "M n n"]:
    """(I + L)^-1 for strictly lower triangular L (what lies on and above the diagonal must be 0)."""
    M, n, _ = L.shape
    blocks = 1
    while -(-n // blocks) > _SMALL:
        blocks *= 2
    b = -(-n // blocks)
    if b * blocks != n:
        L = torch.nn.functional.pad(L, (0, b * blocks - n, 0, b * blocks - n))
    diagonal = L.view(M, blocks, b, blocks, b).diagonal(dim1=1, dim2=3)  # [M, b, b, blocks]
    T = _substitute(diagonal.permute(1, 2, 0, 3).reshape(b, b, M * blocks))
    while blocks > 1:
        blocks //= 2
        T = T.view(M * blocks, 2, b, b)
        pairs = L.view(M, blocks, 2 * b, blocks, 2 * b).diagonal(dim1=1, dim2=3)
        below = pairs[:, b:, :b].permute(0, 3, 1, 2).reshape(M * blocks, b, b)
        merged = T.new_zeros(M * blocks, 2 * b, 2 * b)
        merged[:, :b, :b], merged[:, b:, b:] = T[:, 0], T[:, 1]
        merged[:, b:, :b] = torch.bmm(T[:, 1], torch.bmm(below, T[:, 0])).neg_()
        T, b = merged, 2 * b
    return T if b == n else T[:, :n, :n].contiguous()


def _substitute(L: Float[Tensor, "b b M"]) -> Float[Tensor, "M b b"]:
    """Row by row, the batch last so that every step runs on long vectors."""
    b = L.shape[0]
    T = torch.zeros_like(L)
    for i in range(b):
        T[i, i] = 1
        if i:
            row = L[i, 0] * T[0, :i]
            for j in range(1, i):
                row[: j + 1].addcmul_(L[i, j], T[j, : j + 1])
            T[i, :i] = row.neg_()
    return T.permute(2, 0, 1).contiguous()
