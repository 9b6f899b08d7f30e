"""The legal kernels and launches for a problem, from all backends together.

Every backend that supports the operation on the architecture contributes. Invariants: the order is
deterministic, backend by backend; every kernel passes `refusal`; no two kernels share a name; and
the list is never empty: `NoLegalCandidate` is raised instead.

A kernel may be of a backend that is not registered here, if another installation measured it. Then
only the library's rules judge it, it has no launches, and it cannot be compiled.
"""

from __future__ import annotations

from functools import lru_cache

from gemmsmith.core import legality
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import AnyKernel
from gemmsmith.core.launch import Launch
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import Problem
from tuner.arch import ARCHITECTURES, Architecture, architecture
from tuner.backends import cutlass as _cutlass  # noqa: F401  # imports cutlass_library safely
from tuner.backends.backend import Features, KernelBackend, Level
from tuner.backends.registry import BACKENDS, backend_of, every
from tuner.errors import NoLegalCandidate

__all__ = [
    "BACKENDS",
    "Level",
    "backend_of",
    "candidates",
    "compiles",
    "features",
    "is_legal",
    "kernels",
    "launches",
    "offered",
    "prepare",
    "refusal",
    "supporting",
    "variety",
]


@lru_cache(maxsize=1024)
def supporting(operation: Operation, arch: Architecture) -> tuple[KernelBackend, ...]:
    return tuple(backend for backend in every() if backend.supports(operation, arch))


def kernels(problem: Problem, arch: str = "sm90", *, level: Level = Level.CORE) -> list[AnyKernel]:
    """The legal kernels for a problem.

    Raises:
        NoLegalCandidate: the architecture is unknown, no backend has kernels of the operation, or
            no kernel can launch a grid for these extents.
    """
    target = architecture(arch)
    backends = supporting(problem.operation, target)
    if not backends:
        raise NoLegalCandidate(f"no backend has kernels of {problem.operation} for {arch}")
    legal = [kernel for backend in backends for kernel in backend.kernels(problem, target, level)]
    if legal:
        return legal
    raise NoLegalCandidate(
        f"no kernel can launch {problem}: none reads and stores rows of its alignment, or its "
        "output has more tiles than a 32-bit count holds; compute it in parts"
    )


def candidates(
    problem: Problem, device: DeviceModel, *, level: Level = Level.CORE
) -> list[Candidate]:
    """Every legal kernel with every launch worth measuring.

    Raises:
        NoLegalCandidate: as `kernels`, or none of their launches is worth measuring.
    """
    legal = [
        Candidate(kernel=kernel, launch=launch)
        for kernel in offered(problem, device, level=level)
        for launch in launches(kernel, problem, device)
    ]
    if not legal:
        raise NoLegalCandidate(f"all kernels that take {problem} are for problems with fewer tiles")
    return legal


def offered(problem: Problem, device: DeviceModel, *, level: Level = Level.CORE) -> list[AnyKernel]:
    """The legal kernels for a problem, including those with tiles fitted to it on this device.

    Raises:
        NoLegalCandidate: as `kernels`.
    """
    legal = kernels(problem, device.arch, level=level)
    if level is Level.CORE:  # the full level holds every tile already
        known = {kernel.name for kernel in legal}
        for backend in supporting(problem.operation, architecture(device.arch)):
            fitted = backend.fitted(problem, device)
            legal += [kernel for kernel in fitted if kernel.name not in known]
    return legal


def prepare(problem: Problem, device: DeviceModel) -> None:
    """Create all kernels that `offered` may return for problems like this one; they are cached.

    Takes about 50 ms the first time.

    Raises:
        NoLegalCandidate: the architecture is unknown.
    """
    for backend in supporting(problem.operation, architecture(device.arch)):
        backend.prepare(problem, device)


def launches(kernel: AnyKernel, problem: Problem, device: DeviceModel) -> list[Launch]:
    """The launches worth measuring, in a fixed order.

    Returns an empty list if the backend is not known, or if another kernel computes the same faster
    whatever the launch.
    """
    backend = backend_of(kernel)
    if backend is None:
        return []
    known = backend.launches(kernel, problem, device)
    if problem.operation.summation is None:
        return known
    return [
        launch for launch in known if legality.sums_are_in_order(kernel, launch, problem) is None
    ]


def refusal(kernel: AnyKernel, problem: Problem | None = None) -> str | None:
    """The reason why a kernel is not legal, or not for `problem`; None if it is legal."""
    backend = backend_of(kernel)
    if backend is not None:
        return backend.refusal(kernel, problem)
    return None if problem is None else legality.problem_refusal(kernel, problem)


def is_legal(candidate: Candidate, problem: Problem) -> bool:
    """Whether the kernel takes the problem, and the launch is legal for it.

    A launch that is legal for one K need not be legal for another (`can_implement`).
    """
    kernel, launch = candidate.kernel, candidate.launch
    if refusal(kernel, problem) is not None:
        return False
    return legality.launch_refusal(kernel, launch, problem) is None


def compiles(kernel: AnyKernel) -> bool:
    return backend_of(kernel) is not None and kernel.arch in ARCHITECTURES


def variety(kernel: AnyKernel) -> tuple[object, ...]:
    backend = backend_of(kernel)
    return () if backend is None else backend.variety(kernel)


def features(kernel: AnyKernel) -> Features[float] | None:
    backend = backend_of(kernel)
    return None if backend is None else backend.features(kernel)
