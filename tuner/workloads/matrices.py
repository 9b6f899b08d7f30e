"""Operands, arguments and the exact product, shared by the families of matrix products.

A is drawn from N(0, 1), and B so that D's standard deviation is near 1 for every K, as in trained
layers. Narrow types use their range as quantization does: the largest value of a normal sample is
near the type's maximum, and factors undo that. All sets' As are one allocation, as are all Bs and
all Ds; every matrix starts at a 256-byte boundary.
"""

from __future__ import annotations

import math

import torch

from gemmsmith.core.operation import Element
from gemmsmith.core.problem import Problem
from gemmsmith.runtime.abi import Arguments
from gemmsmith.runtime.launch import torch_dtype
from tuner.workloads.footprint import ALIGNMENT
from tuner.workloads.workload import Block, OperandSet, RandomSource

_FILL_ELEMENTS = 2**26
"""Elements that are drawn in one step, which bounds the FP32 scratch memory."""

SIGMA = {Element.E4M3: 64.0, Element.E5M2: 8192.0, Element.S8: 32.0}
"""Standard deviations of stored values. Seven of them (E4M3: 448; E5M2: 57344) or four (S8: 127)
are the type's maximum: FP8 is scaled by the largest value of a tensor, INT8 by that of a row."""

FACTOR_SPREAD = 0.25
"""Standard deviation of the logarithm of a row's or column's factor."""

_LARGEST = {Element.E4M3: 448.0, Element.E5M2: 57344.0, Element.S8: 127.0}


def unit_scale(k: int) -> float:
    """The power of two that brings a sum of `k` products of N(0, 1) near N(0, 1)."""
    return 2.0 ** -round(math.log2(math.sqrt(k)))


def draw_matrices(
    problem: Problem,
    count: int,
    source: RandomSource,
    sigma_a: float,
    sigma_b: float,
) -> tuple[tuple[OperandSet, ...], torch.Tensor]:
    """`count` sets with normal A and B and an uninitialized D, and one more output.

    D has one row more than A if the epilogue adds up its rows.
    """
    operation = problem.operation
    m, n, k = problem.m, problem.n, problem.k
    of_a, of_b, of_d = problem.matrices
    all_a = empty(source, count, m * k * of_a, operation.a)
    all_b = empty(source, count, k * n * of_b, operation.b)
    rows_d, columns = m + operation.epilogue.sums_rows, problem.columns
    all_d = empty(source, count + 1, rows_d * columns * of_d, operation.d)
    fill(all_a, operation.a, sigma_a, source)
    fill(all_b, operation.b, sigma_b, source)
    row_a, row_b = problem.layout.a_row_major, problem.layout.b_row_major
    sets = tuple(
        OperandSet(
            a=_matrices(all_a[i], of_a, m, k, row_a),
            b=_matrices(all_b[i], of_b, k, n, row_b),
            d=_matrices(all_d[i], of_d, rows_d, columns, True),
        )
        for i in range(count)
    )
    return sets, _matrices(all_d[count], of_d, rows_d, columns, True)


def draw_factors(shape: tuple[int, int, int], middle: float, source: RandomSource) -> torch.Tensor:
    """FP32 factors of rows or columns, about `middle` times e^±FACTOR_SPREAD."""
    drawn = torch.empty(shape, dtype=torch.float32, device=source.place)
    return drawn.normal_(0.0, FACTOR_SPREAD, generator=source.generator).exp_().mul_(middle)


def packed_arguments(
    problem: Problem, operands: OperandSet, d: torch.Tensor, *, alpha: float = 1.0
) -> Arguments:
    """The C ABI's arguments of packed matrices without factors. C is D, read to accumulate."""
    return Arguments(
        m=problem.m,
        n=problem.n,
        k=problem.k,
        batch=problem.batch,
        a=operands.a.data_ptr(),
        b=operands.b.data_ptr(),
        c=d.data_ptr(),
        d=d.data_ptr(),
        lda=problem.contiguous_a,
        ldb=problem.contiguous_b,
        ldc=problem.columns,
        ldd=problem.columns,
        batch_stride_a=problem.m * problem.k,
        batch_stride_b=problem.k * problem.n,
        batch_stride_c=problem.m * problem.columns,
        batch_stride_d=problem.m * problem.columns,
        alpha=alpha,
        beta=1.0 if problem.operation.accumulate else 0.0,
    )


def exact_product(operands: OperandSet, block: Block, precision: torch.dtype) -> torch.Tensor:
    a = operands.a[block.batches, block.rows].to(precision)
    b = operands.b[block.batches, :, block.columns].to(precision)
    return torch.bmm(a, b)


def empty(source: RandomSource, count: int, elements: int, element: Element) -> torch.Tensor:
    """An uninitialized [count, elements + padding], whose rows start at multiples of ALIGNMENT."""
    step = ALIGNMENT // element.bytes
    padded = -(-elements // step) * step
    return torch.empty((count, padded), dtype=torch_dtype(element), device=source.place)


def fill(rows: torch.Tensor, element: Element, sigma: float, source: RandomSource) -> None:
    """Fill with normal samples, clamped to the range of a narrow type, rounded for S8."""
    limit = _LARGEST.get(element)
    for part in torch.split(rows.view(-1), _FILL_ELEMENTS):
        if limit is None:
            part.normal_(0.0, sigma, generator=source.generator)
        else:
            wide = torch.empty(part.shape, dtype=torch.float32, device=part.device)
            wide.normal_(0.0, sigma, generator=source.generator).clamp_(-limit, limit)
            part.copy_(wide.round_() if element.is_integer else wide)


def _matrices(
    flat: torch.Tensor, count: int, rows: int, columns: int, row_major: bool
) -> torch.Tensor:
    flat = flat[: count * rows * columns]
    if row_major:
        return flat.view(count, rows, columns)
    return flat.view(count, columns, rows).transpose(1, 2)


def laid_in_rows(d: torch.Tensor) -> torch.Tensor:
    """Packed outputs as columns of one matrix: each row holds that of every output in order."""
    outputs, m, n = d.shape
    return d.as_strided((outputs, m, n), (n, outputs * n, 1))
