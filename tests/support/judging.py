"""Checks an answer against a workload's reference, on the host."""

from __future__ import annotations

import math

import torch

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import AnyKernel
from tests.support.candidates import KERNEL
from tests.support.replacing import replace
from tuner.trial import Failure
from tuner.workloads.operands import Operands
from tuner.workloads.reference import Reference

SMALL = DeviceModel(name="host", arch="sm90", sm_count=1, memory_bytes=16 * 2**30, l2_bytes=100_000)


def judged(operands: Operands, answer: torch.Tensor) -> tuple[float, Failure | None]:
    """The ratio of an output's error to its bound, and the reason if it is rejected."""
    reference = Reference(operands)
    operands.sets[0].d.copy_(answer)
    operands.check.copy_(answer)
    kernel: AnyKernel = replace(KERNEL, dtype=operands.problem.dtype)
    correctness, failure = reference.check(kernel, claims_order=True)
    if correctness is None:
        return math.inf, failure
    return correctness.error / correctness.tolerance, None
