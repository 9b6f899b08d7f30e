"""One problem on the GPU: its operands, its reference, and candidates prepared to run on them.

Everything is enqueued on one stream, torch's own work included, so memory that one launch writes is
not reused while another still reads it. An error of a candidate is a `CandidateFailed`; an error
that ruined the CUDA context is a `ContextDead`, after which the process can only exit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from gemmsmith.answers.answer import Correctness
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.problem import Problem
from gemmsmith.errors import LaunchFailed, PackError
from gemmsmith.runtime.abi import Arguments, status_text
from gemmsmith.runtime.pack import LoadedKernel, LoadedPack
from tuner.measure.graphs import (
    CudaError,
    KernelGraph,
    Replay,
    Stream,
    TorchGraph,
    context_is_dead,
    fill_bytes,
    followed,
    rotating,
    rough_us,
)
from tuner.measure.order import RowBits
from tuner.trial import Failure, FailureKind
from tuner.workloads.footprint import ALIGNMENT, CACHE_FACTOR
from tuner.workloads.operands import Operands, place
from tuner.workloads.reference import Reference
from tuner.workloads.workload import OperandSet

WORKSPACE_POISON = 0xA5
"""Bytes of a workspace before verification: kernels may not rely on zeros they did not write."""

ESTIMATE_LAUNCHES = 4


class CandidateFailed(Exception):
    """The candidate has no time; `failure` says why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class ContextDead(Exception):
    """A launch ruined the CUDA context (illegal access and the like)."""


@dataclass(kw_only=True, slots=True)
class Prepared:
    """A verified candidate, ready to be captured.

    Attributes:
        workspace: address of the first workspace; `slots` of them follow, `step` bytes apart.
        estimate_us: time per launch of a few launches, host overhead included.
    """

    candidate: Candidate
    kernel: LoadedKernel
    correctness: Correctness
    workspace: int
    workspace_bytes: int
    step: int
    slots: int
    estimate_us: float


class Bench:
    """Operands, reference and workspace of one problem. Close it to give the memory back."""

    def __init__(
        self, problem: Problem, device: DeviceModel, ordinal: int, stream: Stream, seed: int
    ) -> None:
        """Allocate operands, fill them with fresh random values, compute the reference.

        Raises:
            DoesNotFit, ReferenceBroken
        """
        self.problem = problem
        self.device = device
        self.stream = stream
        self._ordinal = ordinal
        with stream.torch():
            self.operands = Operands(problem, device, ordinal, seed)
            self.reference = Reference(self.operands)
        sets = self.operands.sets
        self._arguments = (Arguments * len(sets))(*[self.operands.arguments(s) for s in sets])
        self._cases = [
            (self.operands.arguments(s), self.operands.arguments(s, self.operands.check))
            for s in (case.operands for case in self.operands.cases)
        ]
        self._row_bits = (
            None if problem.operation.summation is None else RowBits(self.operands, seed)
        )
        self._arenas: list[torch.Tensor] = []

    @property
    def set_count(self) -> int:
        return len(self._arguments)

    def prepare(self, candidate: Candidate, pack: Path) -> Prepared:
        """Load, check, verify and roughly time a candidate.

        Raises:
            CandidateFailed, ContextDead
        """
        with self._blamed():
            kernel = LoadedPack.open(pack).kernel(candidate.kernel.name)
            self._set_launch(candidate)
            arguments, _ = self._cases[0]
            size = self._workspace_bytes(kernel, arguments)
            workspace, step, slots = self._workspace(size)
            correctness = self._verify(candidate, kernel, workspace, size)
            self._verify_order(candidate, kernel)
            prepared = Prepared(
                candidate=candidate,
                kernel=kernel,
                correctness=correctness,
                workspace=workspace,
                workspace_bytes=size,
                step=step,
                slots=slots,
                estimate_us=0.0,
            )
            launch = partial(self.launch, prepared)
            prepared.estimate_us = rough_us(self.stream, ESTIMATE_LAUNCHES, launch)
            return prepared

    def capture(
        self,
        prepared: Prepared,
        launches: int,
        then: Callable[[int], None] | None = None,
        over: Sequence[int] | None = None,
    ) -> Replay:
        """A graph of `launches` launches over the rotating operands and workspaces.

        `then` enqueues torch's work after each of them; `over` names the operand sets to rotate
        over, by default all.

        Raises:
            CandidateFailed, ContextDead
        """
        with self._blamed():
            self._set_launch(prepared.candidate)
            graph = KernelGraph if then is None else TorchGraph
            launch = rotating(partial(self.launch, prepared), over)
            return graph(self.stream, launches, followed(launch, then))

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        """Turn errors inside into the candidate's failure."""
        try:
            yield
        except (CudaError, LaunchFailed, RuntimeError) as error:  # torch raises RuntimeError
            dead = context_is_dead()
            if dead:
                raise ContextDead(f"{dead}: {_first_line(error)}") from error
            raise CandidateFailed(
                Failure(kind=FailureKind.LAUNCH, message=_first_line(error))
            ) from error
        except PackError as error:
            raise CandidateFailed(
                Failure(kind=FailureKind.REFUSED, message=_first_line(error))
            ) from error

    def _set_launch(self, candidate: Candidate) -> None:
        for arguments in (*self._arguments, *chain.from_iterable(self._cases)):
            arguments.set_launch(candidate.launch, sm_count=self.device.sm_count)

    def launch(self, prepared: Prepared, i: int) -> None:
        arguments = self._arguments[i % len(self._arguments)]
        workspace = prepared.workspace + (i % prepared.slots) * prepared.step
        prepared.kernel.run(arguments, workspace, self.stream.pointer)

    def _verify(
        self, candidate: Candidate, kernel: LoadedKernel, workspace: int, size: int
    ) -> Correctness:
        """Run each case twice into poisoned outputs; compare with the reference and each other."""

        def launch(i: int) -> None:
            case = self.operands.cases[i].operands
            self.operands.restart(case)
            self.operands.ready(case.d)
            self.operands.ready(self.operands.check)
            fill_bytes(workspace, WORKSPACE_POISON, size, self.stream)
            for arguments in self._cases[i]:  # into the case's own D, then into the check's
                kernel.run(arguments, workspace, self.stream.pointer)

        with self.stream.torch():
            correctness, failure = self.reference.check(
                candidate.kernel, claims_order=candidate.has_fixed_order, launch=launch
            )
        if failure is not None:
            raise CandidateFailed(failure)
        assert correctness is not None  # noqa: S101 - narrows for the type checker
        return correctness

    def _verify_order(self, candidate: Candidate, kernel: LoadedKernel) -> None:
        """Compare bits with those of other launches, if the operation demands an order."""
        if self._row_bits is None:
            return

        def run(problem: Problem, operands: OperandSet) -> None:
            arguments = self.operands.workload.arguments(problem, operands, operands.d)
            arguments.device = self._ordinal
            arguments.set_launch(candidate.launch, sm_count=self.device.sm_count)
            size = self._workspace_bytes(kernel, arguments)
            workspace, _, _ = self._workspace(size)
            fill_bytes(workspace, WORKSPACE_POISON, size, self.stream)
            kernel.run(arguments, workspace, self.stream.pointer)

        with self.stream.torch():
            failure = self._row_bits.failure(candidate, run)
        if failure is not None:
            raise CandidateFailed(failure)

    def _workspace_bytes(self, kernel: LoadedKernel, arguments: Arguments) -> int:
        """Bytes of workspace that the kernel needs.

        Raises:
            CandidateFailed: the kernel refuses the arguments.
        """
        status = kernel.can_implement(arguments)
        if status != 0:
            raise CandidateFailed(
                Failure(kind=FailureKind.REFUSED, message=f"refused: {status_text(status)}")
            )
        return kernel.workspace_bytes(arguments)

    def _workspace(self, size: int) -> tuple[int, int, int]:
        """Address, step and number of workspaces: as many as leave L2 cold, at most one per set."""
        if size == 0:
            return 0, 0, 1
        step = -(-size // ALIGNMENT) * ALIGNMENT
        # Rotating over fewer workspaces than fill L2 would leave them in it, faster than in use.
        slots = min(self.set_count, -(-CACHE_FACTOR * self.device.l2_bytes // step))
        needed = step * slots
        # An arena is never moved while the bench exists: captured graphs hold its addresses.
        for arena in self._arenas:
            if arena.numel() >= needed:
                return arena.data_ptr(), step, slots
        with self.stream.torch():
            arena = torch.empty(max(needed, 2**24), dtype=torch.uint8, device=place(self._ordinal))
        self._arenas.append(arena)
        return arena.data_ptr(), step, slots


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
