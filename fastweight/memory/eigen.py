"""Top eigenvalue of many tiny Gram matrices at once, with the exact gradient u u^T.

The sliding regression rule needs mu = lambda_max of an R x R Gram matrix per token and head. A LAPACK call per token is
slow and its gradient is NaN at repeated eigenvalues. Here cyclic Jacobi rotations run on whole vectors of tokens: each
matrix entry is one long contiguous tensor, so a rotation is a few fused elementwise steps whatever the batch. The
gradient needs only a top unit eigenvector u, which exists at repeated eigenvalues and at zero matrices as well.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from fastweight.memory.backward import exact_backward
from fastweight.memory.modes import may_look

_FEW = 256  # matrices up to which LAPACK is quicker on a CPU
_SWEEPS = 12  # cyclic Jacobi converges quadratically; windows up to 16 need 4 to 8 sweeps in float64


def triangle(R: int) -> list[tuple[int, int]]:
    """Index pairs (i, j), i <= j, in the order in which `top_eigenvalue` takes the upper triangle."""
    return [(i, j) for i in range(R) for j in range(i, R)]


def top_eigenvalue(upper: Float[Tensor, "P ..."], R: int) -> Float[Tensor, "..."]:
    """Largest eigenvalue of symmetric positive semidefinite R x R matrices given by their upper triangles.

    upper: entries in the order of `triangle(R)`, P = R(R+1)/2, any trailing shape. Differentiable once; at repeated
    eigenvalues the gradient is that of one top eigenvector (a subgradient).
    """
    if R == 1:
        return upper[0]
    return _TopEigenvalue.apply(upper, R)  # type: ignore[return-value]


class _TopEigenvalue(torch.autograd.Function):
    @staticmethod
    def forward(ctx, upper: Tensor, R: int) -> Tensor:
        if R == 2:
            value, vector = _two(upper)
        elif upper[0].numel() <= _FEW and may_look(upper):
            value, vector = _lapack(upper, R)
        else:
            value, vector = _jacobi(upper, R)
        ctx.save_for_backward(vector, upper)  # upper only to be tied to the gradient, see backward.py
        return value

    @staticmethod
    @exact_backward
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        vector, _ = ctx.saved_tensors
        # An off-diagonal entry stands for two entries of the matrix, hence the factor 2.
        parts = [vector[i] * vector[j] * (1 if i == j else 2) for i, j in triangle(len(vector))]
        return torch.stack(parts) * grads[0], None


def _lapack(upper: Tensor, R: int) -> tuple[Tensor, Tensor]:
    """For a few matrices (decoding) one LAPACK call is shorter than the rotations."""
    full = upper.new_empty(R, R, *upper.shape[1:])
    for p, (i, j) in enumerate(triangle(R)):
        full[i, j] = full[j, i] = upper[p]
    values, vectors = torch.linalg.eigh(full.movedim((0, 1), (-2, -1)))
    return values[..., -1], vectors[..., -1].movedim(-1, 0)


def _two(upper: Tensor) -> tuple[Tensor, Tensor]:
    """Closed form for 2 x 2: one Jacobi rotation diagonalises it exactly."""
    a, b, d = upper
    cos, sin, t = _rotation(a, b, d)
    first = (a - t * b) >= (d + t * b)
    value = torch.where(first, a - t * b, d + t * b)
    return value, torch.stack((torch.where(first, cos, sin), torch.where(first, -sin, cos)))


def _rotation(app: Tensor, apq: Tensor, aqq: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cosine, sine and tangent of the rotation that zeroes apq (the smaller angle; identity where apq is 0)."""
    still = apq == 0
    theta = (aqq - app) / (2 * torch.where(still, 1, apq))
    # theta is huge where apq is negligible: theta^2 may overflow to inf, and t = 0 is then the right rotation.
    t = torch.copysign(1 / (theta.abs() + torch.sqrt(1 + theta * theta)), theta)
    t = torch.where(still, 0, t)
    cos = torch.rsqrt(1 + t * t)
    return cos, t * cos, t


def _jacobi(upper: Tensor, R: int) -> tuple[Tensor, Tensor]:
    """Cyclic Jacobi: value [...] and unit vector [R, ...] of the largest eigenvalue."""
    A = {pair: upper[p] for p, pair in enumerate(triangle(R))}
    U = [torch.zeros_like(upper[:R]) for _ in range(R)]  # U[j] is eigenvector j, [R, ...]
    for j in range(R):
        U[j][j] = 1
    for _ in range(_SWEEPS):
        for p in range(R - 1):
            for q in range(p + 1, R):
                _rotate(A, U, p, q)
        if may_look(upper) and _converged(A, R):
            break
    value, index = torch.stack([A[i, i] for i in range(R)]).max(dim=0)
    return value, torch.stack(U).take_along_dim(index[None, None], dim=0).squeeze(0)


def _rotate(A: dict[tuple[int, int], Tensor], U: list[Tensor], p: int, q: int) -> None:
    """One Jacobi rotation in the (p, q) plane on every matrix of the batch; the entries of A and U are replaced."""
    apq = A[p, q]
    cos, sin, t = _rotation(A[p, p], apq, A[q, q])
    A[p, p] = torch.addcmul(A[p, p], t, apq, value=-1)
    A[q, q] = torch.addcmul(A[q, q], t, apq)
    A[p, q] = torch.zeros_like(apq)
    for k in range(len(U)):
        if k not in (p, q):
            kp, kq = (min(k, p), max(k, p)), (min(k, q), max(k, q))
            A[kp], A[kq] = _turn(cos, sin, A[kp], A[kq])
    U[p], U[q] = _turn(cos, sin, U[p], U[q])


def _turn(cos: Tensor, sin: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return torch.addcmul(cos * a, sin, b, value=-1), torch.addcmul(cos * b, sin, a)


def _converged(A: dict[tuple[int, int], Tensor], R: int) -> bool:
    """Whether every matrix of the batch is diagonal to rounding, measured against its own trace."""
    off = torch.stack([A[i, j].abs() for i in range(R) for j in range(i + 1, R)]).amax(dim=0)
    trace = sum((A[i, i] for i in range(1, R)), A[0, 0])
    # The error of an eigenvalue is quadratic in the residue, so half the digits would do; eps is nearly free.
    return not bool((off > torch.finfo(off.dtype).eps * trace).any())
