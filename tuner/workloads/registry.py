"""All families of operations. To add a family, write a file and a line in `WORKLOADS`."""

from __future__ import annotations

from gemmsmith.core.operation import Operation
from gemmsmith.errors import InvalidProblem
from tuner.workloads.dense import Dense
from tuner.workloads.fused import Fused
from tuner.workloads.grouped import Grouped
from tuner.workloads.integer import Integer
from tuner.workloads.scaled import Scaled
from tuner.workloads.symmetric import Symmetric
from tuner.workloads.workload import Workload

WORKLOADS: tuple[Workload, ...] = (
    Dense(),
    Scaled(),
    Symmetric(),
    Integer(),
    Grouped(),
    Fused(),
)


def workload_of(operation: Operation) -> Workload:
    """The family that covers an operation.

    Raises:
        InvalidProblem: no family does.
    """
    for workload in WORKLOADS:
        if workload.covers(operation):
            return workload
    raise InvalidProblem("dtype", f"{operation.dtype} cannot be measured yet: it has no workload")
