"""What a tuning run may choose from: what the device recorded, or what the backends enumerate."""

from __future__ import annotations

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.problem import Problem
from tuner.arch import architecture
from tuner.backends import Level, candidates
from tuner.compile import Builder
from tuner.devices.base import Device
from tuner.errors import NoLegalCandidate
from tuner.search.library import library_kernel


def offered(
    problem: Problem, device: Device, *, level: Level, built_by: Builder | None
) -> list[Candidate]:
    """The candidates, in no order; may be nothing: then the default is all there is.

    `built_by` leaves out kernels that it would have to compile first.

    Raises:
        NoLegalCandidate: unknown architecture, or nothing is compiled yet of what there is.
        NotRecorded: a recorded device does not hold the problem.
    """
    recorded = device.recorded(problem)
    known = _legal(problem, device, level) if recorded is None else list(recorded)
    if built_by is None:
        return known
    found = [candidate for candidate in known if built_by.has(candidate.kernel)]
    if known and not found and library_kernel(problem, device) is None:
        raise NoLegalCandidate(
            f"no kernel for {problem} is compiled yet; run `gemmsmith compile` first"
        )
    return found


def _legal(problem: Problem, device: Device, level: Level) -> list[Candidate]:
    """What the backends have; nothing where none has a kernel of such a problem."""
    architecture(device.model.arch)  # of one that is not known nothing can be said
    try:
        return candidates(problem, device.model, level=level)
    except NoLegalCandidate:
        return []
