"""Newton–Schulz iterations of many matrices at once, as Muon orthogonalizes its updates.

A single small matrix keeps a GPU busy for a fraction of each launch. Matrices of equal shape are
stacked, and every step takes three products for all of them. A matrix that has no equal is not
copied, and takes the steps of `torch.optim.Muon`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from gemmsmith.ops.engine.in_use import current
from gemmsmith.ops.engine.observers import unobserved
from gemmsmith.ops.engine.symmetric import symmetric
from gemmsmith.ops.products.operators import matmul
from gemmsmith.ops.products.registry import are_torchs, wants_gradient

MOST_BYTES = 2**26
"""Stacked matrices in bf16. Eight of 1024 × 4096 have 512 tiles of X·Xᵀ, four waves of an H100;
larger batches gain little and take memory, at most four times as much."""

STEPS = 100
"""Fewer are allowed, as by torch."""

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of Keller Jordan's Muon, and of torch's."""


def newton_schulz(
    matrices: Sequence[torch.Tensor],
    steps: int = 5,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    eps: float = 1e-7,
) -> list[torch.Tensor]:
    """The orthogonalized matrices, in order: about U·Vᵀ of a matrix U·S·Vᵀ.

    Each step is X ← a·X + (b·A + c·A²)·X with A = X·Xᵀ, in bf16 with FP32 sums, from X divided by
    its norm (https://kellerjordan.github.io/posts/muon/). `torch.optim.Muon` computes the same, up
    to rounding. The matrices are not changed.

    Args:
        matrices: each [N, K], of any floating-point types, sizes and devices.
        steps: from 0 to 99.
        coefficients: a, b and c.
        eps: least norm that a matrix is divided by.

    Returns:
        For each matrix a bf16 tensor of its size. Those of equal shape share memory that is
        allocated at once.

    Raises:
        ValueError: a tensor is not a dense matrix of real numbers, or an option is out of range.
    """
    _check(matrices, steps, coefficients)
    results = list(matrices)
    for positions in batches(matrices):
        batch = [matrices[at] for at in positions]
        for at, result in zip(
            positions, _orthogonalized(batch, steps, coefficients, eps), strict=True
        ):
            results[at] = _turned(result, matrices[at])
    return results


def batches(matrices: Sequence[torch.Tensor]) -> list[list[int]]:
    """Positions of the matrices that are computed at once: of one shape, or transposed."""
    alike: dict[Hashable, list[int]] = {}
    for at, matrix in enumerate(matrices):
        # Another library's tensor, such as a DTensor, is not stacked.
        is_stacked = are_torchs(matrix)
        key = (matrix.device, matrix.dtype, *sorted(matrix.shape)) if is_stacked else at
        alike.setdefault(key, []).append(at)
    parts = []
    for positions in alike.values():
        size = torch.bfloat16.itemsize * max(matrices[positions[0]].numel(), 1)
        most = max(MOST_BYTES // size, 1)
        count = -(-len(positions) // most)
        step = -(-len(positions) // count)
        parts += [positions[first : first + step] for first in range(0, len(positions), step)]
    return parts


def _check(matrices: Sequence[torch.Tensor], steps: int, coefficients: Sequence[float]) -> None:
    if not 0 <= steps < STEPS:
        raise ValueError(f"steps must be from 0 to {STEPS - 1}, got {steps}")
    if len(coefficients) != 3:
        raise ValueError(f"coefficients must be three numbers, got {len(coefficients)}")
    for at, matrix in enumerate(matrices):
        if matrix.layout is not torch.strided:
            raise ValueError(f"matrices[{at}] must be dense, got {matrix.layout}")
        if matrix.dim() != 2 or not matrix.is_floating_point():
            raise ValueError(
                f"matrices[{at}] must be [N, K] of real numbers, got {matrix.dtype} "
                f"{tuple(matrix.shape)}"
            )


def _turned(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """x, or x transposed if the matrix has more rows than columns."""
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


def _orthogonalized(
    batch: Sequence[torch.Tensor],
    steps: int,
    coefficients: tuple[float, float, float],
    eps: float,
) -> Sequence[torch.Tensor]:
    """The results of one batch, with rows ≤ columns."""
    wide = [_turned(matrix, matrix) for matrix in batch]
    is_single = len(wide) == 1
    x = (wide[0] if is_single else torch.stack(wide)).bfloat16()
    add_product = torch.addmm if is_single else torch.baddbmm
    a, b, c = coefficients
    # Autocast may compute the norm in FP32.
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).to(x.dtype)
    x = x / norm.clamp(min=eps)
    for _ in range(steps):
        x = add_product(x, _polynomial(x, b, c), x, beta=a)
    return [x] if is_single else x.unbind()


def _polynomial(x: torch.Tensor, b: float, c: float) -> torch.Tensor:
    """`b · A + c · A²` with A = x · xᵀ, by kernels that compute half of it where there are winners.

    Only those make A symmetric to the bit, as the second one needs it.
    """
    eager = not torch.compiler.is_compiling() and unobserved()
    engine = current() if eager and are_torchs(x) and not wants_gradient(x) else None
    half = None if engine is None else symmetric(engine, x)
    gram = matmul(x, x.mT) if half is None else half
    if not c:  # on the CPU, baddbmm (2.13) is wrong in bf16 for an alpha of 0
        return b * gram
    squared = None if engine is None or half is None else symmetric(engine, half, half, c, b)
    if squared is not None:
        return squared
    add_product = torch.addmm if x.dim() == 2 else torch.baddbmm
    return add_product(gram, gram, gram, beta=b, alpha=c)
