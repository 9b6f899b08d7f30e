"""The library's kernel for a problem, and its algorithms as candidates.

A kernel is one entry of the pack, and a launch chooses which of the library's algorithms it runs.
Only the library can list its algorithms, and only on the GPU that they are for; so they come from
the device (`Device.proposals`) and are not enumerated here.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.kernel import CublasLtKernel
from gemmsmith.core.launch import Launch
from gemmsmith.core.legality import rows_are_aligned
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import Problem
from tuner.backends.cublaslt.operations import LibraryOperation
from tuner.backends.cublaslt.proposals import Proposal

ALIGNMENT_BYTES = 16
"""Bytes that rows must be aligned to. For other rows the library falls back to slow algorithms,
which the kernels made for such rows beat by factors."""


def kernel_for(problem: Problem, arch: str) -> CublasLtKernel | None:
    """The pack's kernel for a problem.

    Returns None if the pack has no kernel of the operation, rows are not aligned, or sums must be
    in one order: the library does not say in which it adds.
    """
    if problem.operation.summation is not None:
        return None
    kernel = kernel_of(problem.operation.of_kernels, arch)
    return None if kernel is None or rows_are_aligned(kernel, problem) else kernel


@lru_cache(maxsize=256)
def kernel_of(operation: Operation, arch: str) -> CublasLtKernel | None:
    """The pack's kernel of an operation; None if the pack has no such kernel."""
    library = LibraryOperation.of(operation)
    if library is None:
        return None
    a, b, d = (
        ALIGNMENT_BYTES // element.bytes for element in (operation.a, operation.b, operation.d)
    )
    return CublasLtKernel(
        name=library.name,
        arch=arch,
        dtype=operation.dtype,
        layout=operation.layout,
        alignment_a=a,
        alignment_b=b,
        alignment_d=d,
        fast_accumulation=library.fast_accumulation,
    )


def candidates(kernel: CublasLtKernel, proposals: Iterable[Proposal]) -> list[Candidate]:
    """The library's proposals as candidates, in the same order."""
    return [
        Candidate(
            kernel=kernel,
            launch=Launch(splits=max(1, proposal.split_k), algorithm=proposal.chosen),
        )
        for proposal in proposals
    ]
