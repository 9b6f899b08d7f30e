"""A recorded GPU as a device: real measurements, served back one trial at a time.

It invents nothing: what was not recorded raises `NotRecorded`. Trials carry the environment they
were recorded in and are marked as replayed. Screening gives the common rounds; finals give the
further rounds if every contender has them, else the common ones, which are paired too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from gemmsmith.answers.answer import Correctness
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.device import Environment
from gemmsmith.core.launch import Algorithm
from gemmsmith.core.problem import Problem
from tuner.devices.base import Contender
from tuner.devices.recording import RecordedProblem, RecordedTrial, Sweep
from tuner.errors import NotRecorded, RecordingCorrupt
from tuner.measure.policy import Policy
from tuner.measure.statistics import summarize
from tuner.trial import Finals, Phase, Trial

_LISTED = 3


class ReplayDevice:
    """A `Device` (see tuner.devices.base) that serves one GPU model's sweeps.

    Raises:
        RecordingCorrupt: no sweep at all, or sweeps of different GPU models.
    """

    replayed = True
    needs_packs = False

    def __init__(self, name: str, sweeps: Sequence[Sweep]) -> None:
        if not sweeps:
            raise RecordingCorrupt(f"{name} names no recording")
        models = {sweep.header.device.slug for sweep in sweeps}
        if len(models) > 1:
            raise RecordingCorrupt(
                f"{name} names recordings of different GPUs ({', '.join(sorted(models))}); "
                "name one of them: replay:<device>"
            )
        self.name = name
        latest = max(sweeps, key=lambda sweep: sweep.header.recorded_at)
        self.model = latest.header.device
        self._environment = latest.header.environment
        self._problems: dict[Problem, tuple[RecordedProblem, Environment]] = {}
        for sweep in sorted(sweeps, key=lambda sweep: sweep.header.recorded_at):
            for problem, recorded in sweep.problems.items():
                self._problems[problem] = (recorded, sweep.header.environment)
        self._by_key: dict[Problem, dict[str, RecordedTrial]] = {}

    @property
    def environment(self) -> Environment:
        """Of the latest recording; each trial carries its own recording's."""
        return self._environment

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What can be replayed."""
        return tuple(sorted(self._problems))

    def recorded(self, problem: Problem) -> Sequence[Candidate] | None:
        """See `Device.recorded`. Raises NotRecorded."""
        return [trial.candidate for trial in self._recorded(problem)[0].trials]

    def baseline_kernels(self, problem: Problem) -> tuple[str, ...]:
        """See `Device.baseline_kernels`; recordings of before it was recorded do not know."""
        found = self._problems.get(problem)
        return () if found is None else found[0].baseline_kernels

    def proposals(
        self,
        problem: Problem,  # noqa: ARG002
        library: Contender,  # noqa: ARG002
        *,
        start: Algorithm | None,  # noqa: ARG002
        most: int,  # noqa: ARG002
    ) -> list[Candidate]:
        """None: what a library had is among the recorded candidates, if anybody asked it."""
        return []

    def screen(
        self,
        problem: Problem,
        contenders: Sequence[Contender],
        policy: Policy,  # noqa: ARG002 - the samples exist already, however many were wanted
    ) -> Iterator[Trial]:
        """See `Device.screen`. Raises NotRecorded."""
        recorded, environment = self._recorded(problem)
        for contender in contenders:
            found = self._trial(problem, contender.candidate)
            yield Trial(
                problem=problem,
                candidate=contender.candidate,
                device=self.model,
                environment=environment,
                phase=Phase.SCREEN,
                statistics=summarize(found.common_us) if found.common_us else None,
                samples_us=found.common_us,
                failure=found.failure,
                correctness=found.correctness,
                conditions=recorded.conditions,
                workspace_bytes=found.workspace_bytes,
                replayed=True,
            )

    def finals(
        self,
        problem: Problem,
        contenders: Sequence[Contender],
        policy: Policy,  # noqa: ARG002 - as in `screen`
    ) -> Finals:
        """See `Device.finals`. Raises NotRecorded."""
        recorded, _ = self._recorded(problem)
        trials = [self._trial(problem, contender.candidate) for contender in contenders]
        field = [trial for trial in trials if trial.failure is None]
        further = bool(recorded.baseline_further_us) and all(t.further_us for t in field)
        return Finals(
            problem=problem,
            candidates=tuple(trial.candidate for trial in field),
            samples_us=tuple(t.further_us if further else t.common_us for t in field),
            baseline_us=recorded.baseline_further_us if further else recorded.baseline_common_us,
            correctness=tuple(_checked(trial) for trial in field),
            workspace_bytes=tuple(trial.workspace_bytes for trial in field),
            conditions=recorded.further_conditions if further else recorded.conditions,
            discarded_rounds=recorded.discarded_rounds,
            failures=tuple(
                (trial.candidate, trial.failure) for trial in trials if trial.failure is not None
            ),
        )

    def close(self) -> None:
        """Nothing to end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _recorded(self, problem: Problem) -> tuple[RecordedProblem, Environment]:
        found = self._problems.get(problem)
        if found is None:
            near = sorted(self.problems, key=lambda held: _unlikeness(held, problem))[:_LISTED]
            raise NotRecorded(
                f"{self.name} holds no measurement of {problem}. Tune on a GPU, or ask for one of "
                f"the {len(self.problems)} that it holds, such as {'; '.join(map(str, near))}"
            )
        return found

    def _trial(self, problem: Problem, candidate: Candidate) -> RecordedTrial:
        if problem not in self._by_key:
            trials = self._recorded(problem)[0].trials
            self._by_key[problem] = {trial.candidate.key: trial for trial in trials}
        found = self._by_key[problem].get(candidate.key)
        if found is None:
            raise NotRecorded(
                f"{self.name} holds no measurement of {candidate.key} on {problem}; choose among "
                "its recorded candidates"
            )
        return found


def _unlikeness(held: Problem, problem: Problem) -> tuple[bool, bool, bool, float]:
    return (
        held.dtype != problem.dtype,
        held.layout is not problem.layout,
        held.batch != problem.batch,
        held.distance(problem),
    )


def _checked(trial: RecordedTrial) -> Correctness:
    if trial.correctness is None:
        raise RecordingCorrupt(f"the recording of {trial.candidate.key} lacks its verification")
    return trial.correctness
