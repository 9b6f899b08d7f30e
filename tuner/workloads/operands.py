"""A problem's operands on a device, in enough rotating sets to exceed the L2 cache.

A workload draws the operands and computes the reference. This module limits their memory, completes
the C ABI's arguments, and prepares outputs for a launch that is verified.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.problem import Problem
from gemmsmith.runtime.abi import Arguments
from tuner.errors import DoesNotFit
from tuner.workloads.footprint import check_fits, footprint, set_count
from tuner.workloads.registry import workload_of
from tuner.workloads.workload import Block, Case, OperandSet, RandomSource

POISON = 0x7FED
"""A NaN of bf16 and fp16 that no arithmetic produces (hardware writes 0x7FFF)."""

POISON_8 = -1
"""The same for E4M3 (hardware writes 0x7F), as an integer: all bits are set."""

POISON_32 = POISON << 16 | POISON
"""The same for FP32. As an integer, larger than any sum of INT8 products with K below 131072."""

_POISONS = {1: POISON_8, 2: POISON, 4: POISON_32}
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}

Indices = tuple[slice | torch.Tensor, ...]
"""Parts of an output, [matrices, rows, columns]."""

HOST = -1
"""The ordinal of the host, where tests check the arithmetic without a GPU."""

__all__ = ["HOST", "POISON", "Indices", "OperandSet", "Operands", "bits", "poison", "untouched"]


class Operands:
    """All operand sets of a problem, and the C ABI's arguments for each.

    Attributes:
        workload: the family of the problem's operation.
        sets: the sets that launches rotate over.
        check: one more output, for a second run of the same launch.
        sigma: expected standard deviation of an element of D after one launch.
        cases: the launches that are verified: one, or for groups one for each spread of tokens.
    """

    def __init__(self, problem: Problem, device: DeviceModel, ordinal: int, seed: int) -> None:
        """Allocate and fill the operands, on the current stream.

        Raises:
            DoesNotFit: the device has too little memory, or too little of it is free.
            InvalidProblem: no workload covers the operation.
        """
        self.workload = workload_of(problem.operation)
        check_fits(problem, device)
        self.problem = problem
        self.ordinal = ordinal
        free = free_bytes(ordinal)
        count = set_count(problem, replace(device, memory_bytes=min(free, device.memory_bytes)))
        generator = torch.Generator(device=place(ordinal)).manual_seed(seed)
        source = RandomSource(place=place(ordinal), generator=generator)
        try:
            drawn = self.workload.draw(problem, count, source)
        except torch.cuda.OutOfMemoryError as error:
            raise DoesNotFit(
                f"{problem} needs {count * footprint(problem).one_set / 1e9:.1f} GB for operands, "
                f"but only {free / 1e9:.1f} GB of {device.name} are free; stop other programs on it"
            ) from error
        self.sets, self.check, self.sigma = drawn.sets, drawn.check, drawn.sigma
        first = Case(operands=drawn.sets[0], written=problem.m, sigmas=(drawn.sigma,))
        self.cases = drawn.cases or (first,)
        self._start = drawn.start

    @property
    def room(self) -> int:
        """Bytes that torch's ways may use for copies of operands: a quarter of the free memory."""
        return free_bytes(self.ordinal) // 4

    def arguments(self, operands: OperandSet, d: torch.Tensor | None = None) -> Arguments:
        arguments = self.workload.arguments(self.problem, operands, operands.d if d is None else d)
        arguments.device = self.ordinal
        return arguments

    def ready(self, output: torch.Tensor) -> None:
        """Enqueue the initial contents of an output that is verified."""
        # These are the poison, or the initial values if D is accumulated into. Either way, an
        # element that is never written differs from the reference.
        if self._start is None:
            poison(output)
        else:
            output.copy_(self._start)

    def ready_parts(self, output: torch.Tensor, at: Indices, of: Indices) -> None:
        """As `ready`, for an output whose parts `at` are parts `of` of the problem's."""
        if self._start is None:
            poison(output)
        else:
            output.zero_()
            output[at] = self._start[of]

    def restart(self, operands: OperandSet) -> None:
        if operands.amax is not None:
            operands.amax.zero_()
        if operands.row_gradient is not None:
            operands.row_gradient.fill_(math.nan)

    def expected(self, operands: OperandSet, block: Block) -> torch.Tensor:
        product = self.workload.product(self.problem, operands, block)
        return product if self._start is None else product.add_(block.of(self._start))


def place(ordinal: int) -> torch.device:
    return torch.device("cpu") if ordinal == HOST else torch.device("cuda", ordinal)


def free_bytes(ordinal: int) -> int:
    """Device memory that can still be allocated, including torch's own cache."""
    if ordinal == HOST:
        return 2**33
    return torch.cuda.mem_get_info(ordinal)[0] + torch.cuda.memory_reserved(ordinal)


def poison(output: torch.Tensor) -> None:
    bits(output).fill_(_POISONS[output.dtype.itemsize])


def poisoned(output: torch.Tensor) -> torch.Tensor:
    return bits(output) == _POISONS[output.dtype.itemsize]


def untouched(output: torch.Tensor) -> torch.Tensor:
    return poisoned(output).sum()


def bits(output: torch.Tensor) -> torch.Tensor:
    # Integers of the same size, so that NaNs compare.
    return output.view(_INTEGERS[output.dtype.itemsize])
