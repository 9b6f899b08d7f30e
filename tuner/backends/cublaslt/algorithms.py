"""The library's kernel for a problem, and its algorithms as candidates.

A kernel is one entry of the pack; what there is to choose is which of the library's algorithms it
runs. Only the library can name them, on the GPU they are for, so a device is asked
(`Device.proposals`) and nothing is enumerated here.
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
"""Rows that start on less are left to kernels that are made for them: there the library falls back
to slow ones, and is beaten by factors."""


def kernel_for(problem: Problem, arch: str) -> CublasLtKernel | None:
    """The pack's kernel for a problem; None where it has none, or the library's are no match."""
    found = kernel_of(problem.operation.of_kernels, arch)
    return None if found is None or rows_are_aligned(found, problem) else found


@lru_cache(maxsize=256)
def kernel_of(operation: Operation, arch: str) -> CublasLtKernel | None:
    """The pack's kernel of an operation; None where it has none."""
    found = LibraryOperation.of(operation)
    if found is None:
        return None
    a, b, d = (
        ALIGNMENT_BYTES // element.bytes for element in (operation.a, operation.b, operation.d)
    )
    return CublasLtKernel(
        name=found.name,
        arch=arch,
        dtype=operation.dtype,
        layout=operation.layout,
        alignment_a=a,
        alignment_b=b,
        alignment_d=d,
        fast_accumulation=found.fast_accumulation,
    )


def candidates(kernel: CublasLtKernel, proposals: Iterable[Proposal]) -> list[Candidate]:
    """Each of the library's proposals as a candidate, in their order."""
    return [
        Candidate(
            kernel=kernel,
            launch=Launch(
                splits=max(1, found.split_k),
                algorithm=found.chosen,
            ),
        )
        for found in proposals
    ]
