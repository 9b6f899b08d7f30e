"""Which kernels and launches are legal for a problem, and what kernels are compiled from.

Every backend that supports the operation on the architecture is asked. Invariants: the order is
deterministic, backend by backend; every kernel passes `refusal`; no two kernels share a name; and
the list is never empty: `NoLegalCandidate` is raised instead.

A kernel of a backend that is not registered here is one that something else measured: what the
problem's own rules say of it holds, nothing can be proposed for it, and it cannot be compiled.
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
from tuner.backends import cutlass as _cutlass  # noqa: F401  # before all that import its library
from tuner.backends.backend import Features, KernelBackend, Level
from tuner.backends.registry import BACKENDS, backend_of
from tuner.errors import NoLegalCandidate

__all__ = [
    "BACKENDS",
    "Level",
    "backend_of",
    "candidates",
    "compiles",
    "features",
    "kernels",
    "launches",
    "offered",
    "prepare",
    "refusal",
    "splits_refusal",
    "supporting",
    "variety",
]


@lru_cache(maxsize=1024)
def supporting(operation: Operation, arch: Architecture) -> tuple[KernelBackend, ...]:
    """The backends that have kernels of an operation on an architecture."""
    return tuple(each for each in BACKENDS.values() if each.supports(operation, arch))


def kernels(problem: Problem, arch: str = "sm90", *, level: Level = Level.CORE) -> list[AnyKernel]:
    """The legal kernels for a problem.

    Raises:
        NoLegalCandidate: unknown architecture, an operation that no backend has kernels of, or a
            grid that no kernel can launch.
    """
    target = architecture(arch)
    asked = supporting(problem.operation, target)
    if not asked:
        raise NoLegalCandidate(f"no backend has kernels of {problem.operation} for {arch}")
    if found := [kernel for each in asked for kernel in each.kernels(problem, target, level)]:
        return found
    raise NoLegalCandidate(
        f"no kernel can launch {problem}: none reads and stores rows of its alignment, or its "
        "output has more tiles than a 32-bit count holds; compute it in parts"
    )


def candidates(
    problem: Problem, device: DeviceModel, *, level: Level = Level.CORE
) -> list[Candidate]:
    """Every legal kernel with every launch worth measuring.

    Raises:
        NoLegalCandidate: as `kernels`, or no launch of them is worth measuring.
    """
    found = [
        Candidate(kernel=kernel, launch=launch)
        for kernel in offered(problem, device, level=level)
        for launch in launches(kernel, problem, device)
    ]
    if not found:
        raise NoLegalCandidate(f"no kernel that takes {problem} is made for so many tiles")
    return found


def offered(problem: Problem, device: DeviceModel, *, level: Level = Level.CORE) -> list[AnyKernel]:
    """The legal kernels for a problem, those fitted to it on this device included.

    Raises:
        NoLegalCandidate: as `kernels`.
    """
    found = kernels(problem, device.arch, level=level)
    if level is Level.CORE:
        known = {kernel.name for kernel in found}
        for each in supporting(problem.operation, architecture(device.arch)):
            found += [one for one in each.fitted(problem, device) if one.name not in known]
    return found


def prepare(problem: Problem, device: DeviceModel) -> None:
    """Make all kernels that `offered` may give for such problems, so that it is quick from now on.

    Takes some 50 ms the first time.

    Raises:
        NoLegalCandidate: unknown architecture.
    """
    for each in supporting(problem.operation, architecture(device.arch)):
        each.prepare(problem, device)


def launches(kernel: AnyKernel, problem: Problem, device: DeviceModel) -> list[Launch]:
    """The launches worth measuring, in a fixed order; none for a kernel of an unknown backend.

    Empty as well where the kernel would do what another one does at less cost.
    """
    backend = backend_of(kernel)
    return [] if backend is None else backend.launches(kernel, problem, device)


def refusal(kernel: AnyKernel, problem: Problem | None = None) -> str | None:
    """Why a kernel is not legal (for the problem, if one is given); None when it is."""
    backend = backend_of(kernel)
    if backend is not None:
        return backend.refusal(kernel, problem)
    return None if problem is None else legality.problem_refusal(kernel, problem)


def splits_refusal(kernel: AnyKernel, launch: Launch, problem: Problem) -> str | None:
    """Why the kernel cannot be launched so on a problem that it suits; None when it can.

    A launch that was found for one K need not be legal for another. (`can_implement`.)
    """
    return legality.launch_refusal(kernel, launch, problem)


def compiles(kernel: AnyKernel) -> bool:
    """Whether the kernel can be compiled: its backend and its architecture are known here."""
    return backend_of(kernel) is not None and kernel.arch in ARCHITECTURES


def variety(kernel: AnyKernel) -> tuple[object, ...]:
    """What kernels of one family that compile cheaply beside each other have in common."""
    backend = backend_of(kernel)
    return () if backend is None else backend.variety(kernel)


def features(kernel: AnyKernel) -> Features[float] | None:
    """What the analytic cost model knows of a kernel; None where its backend is not known."""
    backend = backend_of(kernel)
    return None if backend is None else backend.features(kernel)
