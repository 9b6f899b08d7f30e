"""A recorded GPU as a device: it replays real measurements, one trial after another.

It invents nothing: a candidate that was not recorded raises `NotRecorded`. Trials have the
environment of their recording and are marked as replayed. Screening gives the common rounds. Finals
give the further rounds if every contender has them, else the common rounds, which are paired too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
"""Recorded problems that a message names."""


class ReplayDevice:
    """A `Device` (see tuner.devices.base) that serves one GPU model's sweeps.

    Raises:
        RecordingCorrupt: there is no sweep, or there are sweeps of different GPU models.
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
        """The latest recording's; a trial has that of its own recording."""
        return self._environment

    @property
    def problems(self) -> tuple[Problem, ...]:
        return tuple(sorted(self._problems))

    def recorded(self, problem: Problem) -> Sequence[Candidate] | None:
        return [trial.candidate for trial in self._recorded(problem)[0].trials]

    def baseline_kernels(self, problem: Problem) -> tuple[str, ...]:
        if problem not in self._problems:
            return ()
        return self._recorded(problem)[0].baseline_kernels  # empty in old recordings

    def proposals(
        self,
        problem: Problem,  # noqa: ARG002
        library: Contender,  # noqa: ARG002
        *,
        start: Algorithm | None,  # noqa: ARG002
        most: int,  # noqa: ARG002
    ) -> list[Candidate]:
        # The library's algorithms that were recorded are among `recorded` candidates already.
        return []

    def screen(
        self,
        problem: Problem,
        contenders: Sequence[Contender],
        policy: Policy,  # noqa: ARG002 - the samples exist already
    ) -> Iterator[Trial]:
        """See `Device.screen`."""
        recorded, environment = self._recorded(problem)
        for contender in contenders:
            outcome = self._trial(problem, contender.candidate)
            yield Trial(
                problem=problem,
                candidate=contender.candidate,
                device=self.model,
                environment=environment,
                phase=Phase.SCREEN,
                statistics=summarize(outcome.common_us) if outcome.common_us else None,
                samples_us=outcome.common_us,
                failure=outcome.failure,
                correctness=outcome.correctness,
                conditions=recorded.conditions,
                workspace_bytes=outcome.workspace_bytes,
                replayed=True,
            )

    def finals(
        self,
        problem: Problem,
        contenders: Sequence[Contender],
        policy: Policy,  # noqa: ARG002 - as in `screen`
    ) -> Finals:
        """See `Device.finals`."""
        recorded, _ = self._recorded(problem)
        trials = [self._trial(problem, contender.candidate) for contender in contenders]
        field = [trial for trial in trials if trial.failure is None]
        # Rounds are paired only among candidates that took part in the same ones.
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
        """Do nothing: a recording holds no process."""

    def warm(self) -> None:
        """A recording is read when it is opened."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _recorded(self, problem: Problem) -> tuple[RecordedProblem, Environment]:
        recorded = self._problems.get(problem)
        if recorded is None:
            near = sorted(self.problems, key=lambda other: _difference(other, problem))[:_LISTED]
            raise NotRecorded(
                f"{self.name} holds no measurement of {problem}. Tune on a GPU, or ask for one of "
                f"the {len(self.problems)} that it holds, such as {'; '.join(map(str, near))}"
            )
        return recorded

    def _trial(self, problem: Problem, candidate: Candidate) -> RecordedTrial:
        if problem not in self._by_key:
            trials = self._recorded(problem)[0].trials
            self._by_key[problem] = {recorded.candidate.key: recorded for recorded in trials}
        trial = self._by_key[problem].get(candidate.key)
        if trial is None:
            raise NotRecorded(
                f"{self.name} holds no measurement of {candidate.key} on {problem}; choose among "
                "its recorded candidates"
            )
        return trial


def _difference(recorded: Problem, problem: Problem) -> tuple[bool, bool, bool, float]:
    return (
        recorded.dtype != problem.dtype,
        recorded.layout is not problem.layout,
        recorded.batch != problem.batch,
        recorded.distance(problem),
    )


def _checked(trial: RecordedTrial) -> Correctness:
    if trial.correctness is None:
        raise RecordingCorrupt(f"the recording of {trial.candidate.key} lacks its verification")
    return trial.correctness
