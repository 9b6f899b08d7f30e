"""The device memory that measuring a problem takes and that a launch moves; plain arithmetic
without torch.

The service uses it to refuse a problem before a job exists, and the measuring child before it
allocates anything.
"""

from __future__ import annotations

from dataclasses import dataclass

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.operation import Element, Grouping, Scaling
from gemmsmith.core.problem import Problem
from tuner.errors import DoesNotFit
from tuner.workloads.spreads import Spread, groups_read

ALIGNMENT = 256
"""Every operand starts at a multiple of this many bytes, as cudaMalloc's blocks do."""

CACHE_FACTOR = 3
"""All operand sets together are this many times as large as the L2 cache, so that every launch
reads its operands from memory."""

MAX_SETS = 256
"""A problem of less than L2 · 3 / 256 bytes (about 0.7 MB on an H200) stays partly in the cache.
More sets would need more launches per sample than screening has time for, and operands that small
are usually cached in a real program too."""

CHUNK_ELEMENTS = 2**27
"""Output elements that are verified in one step, which bounds the scratch memory to about 2 GB, or
4 GB in FP64."""

RESERVE_BYTES = 2 * 2**30
"""CUDA context, cuBLAS workspace, kernel modules and graphs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Bytes of one operand set, by part, and of everything beside the sets.

    Attributes:
        a, b, d: one set's operands, rounded up to ALIGNMENT.
        factors: the FP32 factors of one set's rows and columns.
        epilogue: one set's bias, bias gradient, factors, and matrices of D's size that are read.
        verification: a second output, the initial values of an accumulated D, and wide copies of
            parts of operands and output.
        default: intermediate results of torch's own calls.
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
        return self.a + self.b + self.d + self.factors + self.epilogue

    @property
    def least(self) -> int:
        """Bytes that measuring takes with a single operand set."""
        return self.one_set + self.besides

    @property
    def besides(self) -> int:
        """Bytes that measuring takes beside the operand sets."""
        return self.verification + self.default + RESERVE_BYTES


def footprint(problem: Problem) -> Footprint:
    """Device memory of a problem's operands and of their verification."""
    m, n, k = problem.m, problem.n, problem.k
    of_a, of_b, of_d = problem.matrices
    operation, epilogue = problem.operation, problem.operation.epilogue
    vectors = epilogue.has_bias + epilogue.has_column_scale + epilogue.sums_rows
    elements = m * problem.columns * of_d
    d = _aligned(elements * operation.d.bytes)
    # Bytes of an element of the reference: FP32, or FP64 for a D of 32 bits and for integers.
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
            _aligned(n * operation.bias.bytes) * vectors
            + _aligned(m * 4) * epilogue.has_row_scale
            + _aligned(m * n * operation.d.bytes * epilogue.reads)
        ),
        verification=d * (2 if operation.accumulate else 1) + scratch + upcast,
        default=_intermediate(problem),
    )


def _intermediate(problem: Problem) -> int:
    """Bytes of the intermediate results of torch's calls."""
    # For integers these are the sums, and their product with the first factor; for groups the
    # 16-bit output that torch's calls allocate; for an epilogue the results of its steps, and the
    # outputs of compiled code.
    operation = problem.operation
    if operation.is_fused:
        backward = operation.epilogue.backward
        return problem.m * problem.n * 2 * (8 if backward and backward.gated else 4)
    if operation.is_grouped:
        return problem.m * problem.n * problem.matrices[2] * 2
    if not operation.a.is_integer or operation.d.is_integer:
        return 0
    return problem.m * problem.n * problem.batch * 4 * (2 if operation.is_scaled else 1)


def least_bytes(problem: Problem) -> int:
    """Fewest bytes that a launch moves: `Problem.operand_bytes` without weights of empty groups.

    On average over the draws of all spreads. If groups divide the depth, an empty group's gradient
    is written like any other.
    """
    operation = problem.operation
    if operation.grouping is not Grouping.ROWS:
        return problem.operand_bytes
    weight = problem.k * problem.n * operation.b.bytes
    if operation.scaling is Scaling.ROW:
        weight += problem.n * Element.F32.bytes
    return problem.operand_bytes - round((problem.batch - groups_read(problem)) * weight)


def footprint_bytes(problem: Problem) -> int:
    return footprint(problem).least


def set_count(problem: Problem, device: DeviceModel) -> int:
    """How many operand sets to allocate: enough to exceed the L2 cache, as far as memory allows.

    A grouped problem has a multiple of the number of spreads, or fewer sets that spreads share.
    """
    parts = footprint(problem)
    sets = -(-CACHE_FACTOR * device.l2_bytes // parts.one_set)
    room = device.memory_bytes - parts.besides
    spreads = len(Spread) if problem.operation.is_grouped else 1
    if sets > spreads:
        sets = -(-sets // spreads) * spreads
    count = max(1, min(sets, MAX_SETS, room // parts.one_set))
    return count - count % spreads if count > spreads else count


def check_fits(problem: Problem, device: DeviceModel) -> None:
    """Refuse a problem that cannot be measured on the device.

    Raises:
        DoesNotFit: it needs more memory than the device has; the message has both numbers.
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
