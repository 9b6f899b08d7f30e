"""The local GPU, measured by a child process.

The child lives as long as the device is entered. If it hangs or crashes, it is killed, the
candidate that it was running becomes a failed trial, and a new child measures the rest. A file lock
per GPU is held while a batch is measured, never between batches. A second child, which times
nothing, profiles cuBLAS (`tuner.measure.profile` says why).
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Self

from msgspec import structs

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.device import DeviceModel, Environment
from gemmsmith.core.launch import Algorithm
from gemmsmith.core.problem import Problem
from tuner.devices.base import Contender
from tuner.devices.recording import RecordedProblem, RecordedTrial
from tuner.devices.supervisor import CHILD_COMMAND, SETUP_TIMEOUT_S, Blamed, Supervisor
from tuner.errors import DeviceError, NoGpu
from tuner.measure.gpu_lock import gpu_lock
from tuner.measure.local_gpu import gpu_uuid, local_gpu
from tuner.measure.policy import Policy
from tuner.measure.protocol import (
    NOBODY,
    Entrant,
    EntrantOutcome,
    FinalsDone,
    FinalsRequest,
    Profile,
    ProfileDone,
    Propose,
    ProposeDone,
    Reply,
    Screen,
    SweepDone,
    SweepRequest,
)
from tuner.measure.statistics import summarize
from tuner.trial import Failure, FailureKind, Finals, Phase, Trial
from tuner.workloads.footprint import check_fits

_LOG = logging.getLogger(__name__)

MAX_BLAMELESS = 2
"""Children that may be lost in a row while no candidate runs, before the device gives up."""

_NO_PACK = Failure(kind=FailureKind.COMPILE, message="no compiled pack holds this kernel")


class CudaDevice:
    """A `Device` (see tuner.devices.base) on the GPU with this ordinal.

    The keyword arguments replace the child's command, the detected model and UUID, the directory of
    locks and the set-up time limit; tests use them.

    Raises:
        NoGpu: this machine has no such GPU.
    """

    replayed = False
    needs_packs = True

    def __init__(
        self,
        ordinal: int = 0,
        *,
        command: Sequence[str] = CHILD_COMMAND,
        model: DeviceModel | None = None,
        uuid: str | None = None,
        locks: Path | None = None,
        setup_timeout_s: float = SETUP_TIMEOUT_S,
    ) -> None:
        model = model or local_gpu(ordinal)
        if model is None:
            raise NoGpu(
                f"no CUDA device {ordinal} on this machine; run `gemmsmith doctor`, or measure on "
                "a recorded GPU with --device replay:<file>"
            )
        self.name = f"cuda:{ordinal}"
        self.model = model
        self._supervisor = Supervisor(ordinal, command, setup_timeout_s)
        self._profiler: Supervisor | None = Supervisor(ordinal, command, setup_timeout_s)
        self._uuid = gpu_uuid(ordinal) if uuid is None else uuid
        self._locks = locks
        self._best_us: dict[Problem, float] = {}

    @property
    def environment(self) -> Environment:
        """Software and GPU. Starts the child if none has started yet.

        Raises:
            DeviceError: the child does not start; the message quotes its output.
        """
        return self._supervisor.environment

    def recorded(self, problem: Problem) -> Sequence[Candidate] | None:  # noqa: ARG002
        return None

    def baseline_kernels(self, problem: Problem) -> tuple[str, ...]:
        """See `Device.baseline_kernels`. Takes seconds, more the first time, which starts a child.

        A profiler that hangs or crashes is not started again.
        """
        if self._profiler is None:
            return ()
        try:
            check_fits(problem, self.model)
            with gpu_lock(self._uuid, self._locks):
                request = Profile(problem=problem, seed=_seed())
                *_, done = self._profiler.exchange(request, Policy())
        except (Blamed, DeviceError) as error:
            _LOG.warning("the kernels that cuBLAS runs on %s are not known: %s", problem, error)
            if isinstance(error, Blamed):
                self._profiler = None  # its child is dead already
            return ()
        assert isinstance(done, ProfileDone)  # noqa: S101 - the answer to that request
        return done.kernels

    def proposals(
        self, problem: Problem, library: Contender, *, start: Algorithm | None, most: int
    ) -> list[Candidate]:
        if library.pack is None:
            return []
        request = Propose(problem=problem, entrant=_entrants([library])[0], most=most, start=start)
        try:
            with gpu_lock(self._uuid, self._locks):
                *_, done = self._supervisor.exchange(request, Policy())
        except (Blamed, DeviceError) as error:
            _LOG.warning("the library proposes nothing for %s: %s", problem, error)
            return []
        assert isinstance(done, ProposeDone)  # noqa: S101 - the answer to that request
        return list(done.candidates)

    def screen(
        self, problem: Problem, contenders: Sequence[Contender], policy: Policy
    ) -> Iterator[Trial]:
        """See `Device.screen`. Raises DoesNotFit, ReferenceBroken, DeviceError."""
        check_fits(problem, self.model)
        left = dict(enumerate(contenders))
        for index in [i for i, contender in left.items() if contender.pack is None]:
            yield self._trial(
                problem, left.pop(index).candidate, EntrantOutcome(index=index, failure=_NO_PACK)
            )
        with gpu_lock(self._uuid, self._locks):
            blameless = 0
            while left:
                # Replies count in the request, which is shorter after a child was lost.
                indices = list(left)
                request = Screen(
                    problem=problem,
                    entrants=_entrants(left.values()),
                    policy=policy,
                    seed=_seed(),
                    best_us=self._best_us.get(problem),
                )
                try:
                    # Closing kills the child if the caller does not want the other trials.
                    with closing(self._supervisor.exchange(request, policy)) as replies:
                        for reply in replies:
                            if isinstance(reply, EntrantOutcome):
                                contender = left.pop(indices[reply.index])
                                yield self._trial(problem, contender.candidate, reply)
                    left.clear()
                except Blamed as lost:
                    if lost.index == NOBODY:
                        blameless = self._another_chance(blameless, lost)
                        continue
                    blameless = 0
                    contender = left.pop(indices[lost.index])
                    outcome = EntrantOutcome(index=lost.index, failure=lost.failure)
                    yield self._trial(problem, contender.candidate, outcome)

    def finals(self, problem: Problem, contenders: Sequence[Contender], policy: Policy) -> Finals:
        """See `Device.finals`. Raises DoesNotFit, ReferenceBroken, DeviceError."""
        request = FinalsRequest(problem=problem, entrants=(), policy=policy, seed=0)
        done, field, failures = self._paired(request, contenders)
        assert isinstance(done, FinalsDone)  # noqa: S101 - the answer to that request
        failures += [(field[o.index].candidate, o.failure) for o in done.failures if o.failure]
        return Finals(
            problem=problem,
            candidates=tuple(field[o.index].candidate for o in done.finalists),
            samples_us=done.samples_us,
            baseline_us=done.baseline_us,
            correctness=tuple(o.correctness for o in done.finalists if o.correctness),
            workspace_bytes=tuple(o.workspace_bytes for o in done.finalists),
            conditions=done.conditions,
            discarded_rounds=done.discarded_rounds,
            failures=tuple(failures),
            boost=done.boost,
            interleaved=done.interleaved,
            power_penalties=done.power_penalties,
            rivals=done.rivals,
            spreads=done.spreads,
        )

    def sweep(
        self,
        problem: Problem,
        contenders: Sequence[Contender],
        policy: Policy,
        *,
        rounds: int = 7,
        best: int = 32,
    ) -> RecordedProblem:
        """Measure a problem for a recording.

        All contenders and cuBLAS take part in `rounds` common rounds, then the `best` fastest and
        cuBLAS in `policy.final_rounds` further rounds.

        Raises:
            DoesNotFit, ReferenceBroken, DeviceError
        """
        request = SweepRequest(
            problem=problem, entrants=(), policy=policy, seed=0, rounds=rounds, best=best
        )
        done, field, failures = self._paired(request, contenders)
        assert isinstance(done, SweepDone)  # noqa: S101 - the answer to that request
        common, more = done.common, done.further
        further = {o.index: s for o, s in zip(more.finalists, more.samples_us, strict=True)}
        failures += [(field[o.index].candidate, o.failure) for o in common.failures if o.failure]
        trials = [
            RecordedTrial(
                candidate=field[outcome.index].candidate,
                common_us=samples,
                further_us=further.get(outcome.index, ()),
                correctness=outcome.correctness,
                workspace_bytes=outcome.workspace_bytes,
            )
            for outcome, samples in zip(common.finalists, common.samples_us, strict=True)
        ]
        trials += [RecordedTrial(candidate=c, failure=failure) for c, failure in failures]
        return RecordedProblem(
            problem=problem,
            baseline_common_us=common.baseline_us,
            baseline_further_us=more.baseline_us,
            conditions=common.conditions,
            further_conditions=more.conditions,
            discarded_rounds=common.discarded_rounds + more.discarded_rounds,
            trials=tuple(sorted(trials, key=lambda trial: trial.candidate.key)),
            baseline_kernels=self.baseline_kernels(problem),
        )

    def close(self) -> None:
        # The device can be used again afterwards, with new children.
        self._supervisor.close()
        if self._profiler is not None:
            self._profiler.close()

    def warm(self) -> None:
        for child in (self._supervisor, self._profiler):  # both import torch: side by side
            if child is not None:
                child.warm()

    def __enter__(self) -> Self:
        for child in (self._supervisor, self._profiler):
            if child is not None:
                child.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _paired(
        self, request: FinalsRequest | SweepRequest, contenders: Sequence[Contender]
    ) -> tuple[Reply, list[Contender], list[tuple[Candidate, Failure]]]:
        """Exchange the request, with these contenders and a seed, until a child survives it.

        Returns the closing reply, the contenders that its indices count in, and the candidates that
        failed before. Rounds compare contenders with each other, so if a candidate is lost, the
        rounds so far are discarded and the others start over without it.
        """
        check_fits(request.problem, self.model)
        failures = [(c.candidate, _NO_PACK) for c in contenders if c.pack is None]
        field = [c for c in contenders if c.pack is not None]
        blameless = 0
        with gpu_lock(self._uuid, self._locks):
            while True:
                complete = structs.replace(request, entrants=_entrants(field), seed=_seed())
                try:
                    *_, done = self._supervisor.exchange(complete, request.policy)
                except Blamed as lost:
                    if lost.index == NOBODY:
                        blameless = self._another_chance(blameless, lost)
                        continue
                    blameless = 0
                    failures.append((field.pop(lost.index).candidate, lost.failure))
                else:
                    return done, field, failures

    def _another_chance(self, blameless: int, lost: Blamed) -> int:
        """Count a child that was lost while no candidate ran.

        Raises:
            DeviceError: too many were lost in a row.
        """
        if blameless + 1 > MAX_BLAMELESS:
            raise DeviceError(
                f"the measuring process failed {blameless + 1} times with no candidate running: "
                f"{lost.failure.message}. Run `gemmsmith doctor`"
            ) from lost
        return blameless + 1

    def _trial(self, problem: Problem, candidate: Candidate, outcome: EntrantOutcome) -> Trial:
        statistics = summarize(outcome.samples_us) if outcome.samples_us else None
        if statistics is not None:
            best = self._best_us.get(problem, statistics.median_us)
            self._best_us[problem] = min(best, statistics.median_us)
        return Trial(
            problem=problem,
            candidate=candidate,
            device=self.model,
            environment=self.environment,
            phase=Phase.SCREEN,
            statistics=statistics,
            samples_us=outcome.samples_us,
            failure=outcome.failure,
            correctness=outcome.correctness,
            conditions=outcome.conditions,
            workspace_bytes=outcome.workspace_bytes,
            cost_s=outcome.cost_s,
        )


def _entrants(contenders: Iterable[Contender]) -> tuple[Entrant, ...]:
    return tuple(Entrant(candidate=c.candidate, pack=str(c.pack)) for c in contenders)


def _seed() -> int:
    # Operands are drawn anew for every request: a kernel must not pass by luck of the same data.
    return secrets.randbits(31)
