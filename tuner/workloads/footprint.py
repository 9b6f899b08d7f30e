"""How much device memory measuring a problem takes; plain arithmetic, no torch.

The service uses it to refuse a problem before a job exists, the measuring child before it
allocates anything.
"""

from __future__ import annotations

from dataclasses import dataclass

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.operation import Epilogue, Scaling
from gemmsmith.core.problem import Problem
from tuner.errors import DoesNotFit
from tuner.workloads.spreads import Spread

ALIGNMENT = 256
"""Every operand starts on a multiple of this many bytes, as cudaMalloc's blocks do."""

CACHE_FACTOR = 3
"""Operand sets together are this many times the L2 cache, so that each launch finds it cold."""

MAX_SETS = 256
"""A problem under L2 · 3 / 256 bytes (about 0.7 MB on an H200) stays partly in cache: more sets
would need more launches a sample than screening has time for, and so small an operand is
usually warm in a real program too."""

CHUNK_ELEMENTS = 2**27
"""Output elements that are verified at a time: bounds the scratch to about 2 GB, in FP64 4 GB."""

RESERVE_BYTES = 2 * 2**30
"""CUDA context, cuBLAS workspace, kernel modules and graphs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Bytes of one operand set, by part, and of what verification adds.

    Attributes:
        a, b, d: bytes of one set's operands, rounded up to ALIGNMENT.
        factors: bytes of the FP32 factors of one set's rows and columns.
        epilogue: bytes of one set's bias, bias gradient, factors, and what is read of D's size.
        verification: a second output, what outputs that are added to start from, and wide copies
            of parts of operands and output.
        default: what torch's own calls keep between them.
    """

    a: int
    b: int
    d: int
    factors: int
    epilogue: int
    verification: int
    default: int

    @property
    def one_set(self) -> int:
        """Bytes of A, B, D, their factors and what an epilogue reads, once."""
        return self.a + self.b + self.d + self.factors + self.epilogue

    @property
    def least(self) -> int:
        """The least that measuring the problem takes."""
        return self.one_set + self.besides

    @property
    def besides(self) -> int:
        """What measuring takes beside the sets."""
        return self.verification + self.default + RESERVE_BYTES


def footprint(problem: Problem) -> Footprint:
    """Device memory of a problem's operands and of their verification."""
    m, n, k = problem.m, problem.n, problem.k
    of_a, of_b, of_d = problem.matrices
    operation = problem.operation
    elements = m * problem.columns * of_d
    d = _aligned(elements * operation.d.bytes)
    wide = 4 if operation.d.bytes <= 2 and not operation.a.is_integer else 8
    scratch = min(elements, max(CHUNK_ELEMENTS, n)) * wide * 4
    upcast = wide * (min(m * k, max(CHUNK_ELEMENTS, k)) + min(k * n, max(CHUNK_ELEMENTS, k)))
    return Footprint(
        a=_aligned(m * k * of_a * operation.a.bytes),
        b=_aligned(k * n * of_b * operation.b.bytes),
        d=d,
        factors=(
            _aligned(4 * (m * of_d + n * problem.batch)) if operation.scaling is Scaling.ROW else 0
        ),
        epilogue=(
            _aligned(n * operation.bias.bytes) * _vectors(operation.epilogue)
            + _aligned(m * 4) * operation.epilogue.has_row_scale
            + _aligned(m * n * operation.d.bytes * operation.epilogue.reads)
        ),
        verification=d * (2 if operation.accumulate else 1) + scratch + upcast,
        default=_between(problem),
    )


def _between(problem: Problem) -> int:
    """Sums of integers, and their product with the first factor, before they are rounded; of
    groups an output of 16 bits, which torch's calls allocate themselves; of an epilogue what lies
    between its steps, and what compiled code gives.
    """
    operation = problem.operation
    if operation.is_fused:
        backward = operation.epilogue.backward
        return problem.m * problem.n * 2 * (8 if backward and backward.gated else 4)
    if operation.is_grouped:
        return problem.m * problem.n * problem.matrices[2] * 2
    if not operation.a.is_integer or operation.d.is_integer:
        return 0
    return problem.m * problem.n * problem.batch * 4 * (2 if operation.is_scaled else 1)


def _vectors(epilogue: Epilogue) -> int:
    """How many times an element for each column is read or written."""
    backward = epilogue.backward
    summed = backward is not None and backward.bias_gradient
    return epilogue.has_bias + epilogue.has_column_scale + summed


def footprint_bytes(problem: Problem) -> int:
    """The least device memory, in bytes, with which the problem can be measured."""
    return footprint(problem).least


def set_count(problem: Problem, device: DeviceModel) -> int:
    """How many operand sets to allocate: enough to leave L2 cold, and what fits in memory.

    Of a grouped problem as many for each spread of its tokens; up to that many they share.
    """
    parts = footprint(problem)
    wanted = -(-CACHE_FACTOR * device.l2_bytes // parts.one_set)
    room = device.memory_bytes - parts.besides
    spreads = len(Spread) if problem.operation.is_grouped else 1
    if wanted > spreads:
        wanted = -(-wanted // spreads) * spreads
    count = max(1, min(wanted, MAX_SETS, room // parts.one_set))
    return count - count % spreads if count > spreads else count


def check_fits(problem: Problem, device: DeviceModel) -> None:
    """Refuse a problem that cannot be measured on the device.

    Raises:
        DoesNotFit: with the bytes needed and there.
    """
    needed = footprint_bytes(problem)
    if needed > device.memory_bytes:
        raise DoesNotFit(
            f"{problem} needs {needed / 1e9:.1f} GB of device memory to be measured; "
            f"{device.name} has {device.memory_bytes / 1e9:.1f} GB. Ask for a smaller m, n, k or "
            "batch"
        )


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
