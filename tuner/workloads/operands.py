"""A problem's operands on a device, in as many rotating sets as leave the L2 cache cold.

What they are, and what becomes of them, is the workload's business; here they are allocated, given
to the C ABI, and made ready for a launch that is to be verified.
"""

from __future__ import annotations

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
"""A NaN of bf16 and of fp16 that no arithmetic produces (hardware writes 0x7FFF)."""

POISON_8 = -1
"""Likewise of E4M3 (hardware writes 0x7F), as an integer: all bits are set."""

POISON_32 = POISON << 16 | POISON
"""Likewise of FP32; as an integer, more than any sum of INT8 products that K below 131072 has."""

_POISONS = {1: POISON_8, 2: POISON, 4: POISON_32}
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}

HOST = -1
"""Ordinal that stands for the host: lets the arithmetic be tested without a GPU."""

__all__ = ["HOST", "POISON", "OperandSet", "Operands", "bits", "poison", "untouched"]


class Operands:
    """All operand sets of a problem, and the C ABI's arguments for each.

    Attributes:
        workload: what is known of the problem's operation.
        sets: what launches rotate over.
        check: one more output, for a second run of the same launch.
        sigma: expected standard deviation of an element of D after one launch.
        cases: the launches that are verified: one for all values there are, one for each way in
            which tokens are divided.
    """

    def __init__(self, problem: Problem, device: DeviceModel, ordinal: int, seed: int) -> None:
        """Allocate and fill, on the current stream.

        Raises:
            DoesNotFit: before allocating, from the device's size; or when what is free now is
                too little.
            InvalidProblem: no workload knows the operation.
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
                f"but only {free / 1e9:.1f} GB of {device.name} are free; stop what else uses it"
            ) from error
        self.sets, self.check, self.sigma = drawn.sets, drawn.check, drawn.sigma
        first = Case(operands=drawn.sets[0], written=problem.m, sigmas=(drawn.sigma,))
        self.cases = drawn.cases or (first,)
        self._start = drawn.start

    @property
    def room(self) -> int:
        """Bytes that torch's ways may take for copies of operands: a quarter of what is free."""
        return free_bytes(self.ordinal) // 4

    def arguments(self, operands: OperandSet, d: torch.Tensor | None = None) -> Arguments:
        """The C ABI's arguments for a set, launch fields left to the caller."""
        arguments = self.workload.arguments(self.problem, operands, operands.d if d is None else d)
        arguments.device = self.ordinal
        return arguments

    def ready(self, output: torch.Tensor) -> None:
        """What an output holds before a launch that is verified, enqueued on the current stream.

        Poison; where D is added to, its start: there an element that is never written is wrong.
        """
        if self._start is None:
            poison(output)
        else:
            output.copy_(self._start)

    def restart(self, operands: OperandSet) -> None:
        """Forget what launches of a set have left beside D, enqueued on the current stream."""
        if operands.amax is not None:
            operands.amax.zero_()

    def wanted(self, operands: OperandSet, block: Block) -> torch.Tensor:
        """That block of what one launch of a set leaves in an output that was `ready`."""
        product = self.workload.product(self.problem, operands, block)
        return product if self._start is None else product.add_(block.of(self._start))


def place(ordinal: int) -> torch.device:
    """The GPU with that ordinal; the host for HOST."""
    return torch.device("cpu") if ordinal == HOST else torch.device("cuda", ordinal)


def free_bytes(ordinal: int) -> int:
    """Device memory that can still be allocated, torch's own cache included."""
    if ordinal == HOST:
        return 2**33
    return torch.cuda.mem_get_info(ordinal)[0] + torch.cuda.memory_reserved(ordinal)


def poison(output: torch.Tensor) -> None:
    """Fill an output with POISON, enqueued on the current stream."""
    bits(output).fill_(_POISONS[output.dtype.itemsize])


def poisoned(output: torch.Tensor) -> torch.Tensor:
    """Which elements still hold the poison."""
    return bits(output) == _POISONS[output.dtype.itemsize]


def untouched(output: torch.Tensor) -> torch.Tensor:
    """How many elements still hold the poison: one element on the output's device."""
    return poisoned(output).sum()


def bits(output: torch.Tensor) -> torch.Tensor:
    """An output's elements as the integers of their size."""
    return output.view(_INTEGERS[output.dtype.itemsize])
