"""An invented GPU with newer software than its winners were measured with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.problem import Problem
from tests.support.recordings import record
from tests.support.serving import ENVIRONMENT
from tuner.devices.base import Contender
from tuner.devices.recording import Sweep
from tuner.devices.replay import ReplayDevice
from tuner.measure.policy import Policy
from tuner.trial import Finals, Trial

NEWER = replace(ENVIRONMENT, driver="590.1")


class Gpu(ReplayDevice):
    """A recording of some problems that acts as the GPU on which it was made.

    Attributes:
        screened: keys of the screened candidates, in order.
        finalists: the finalists of each finals.
    """

    replayed = False

    def __init__(self, folder: Path, *problems: Problem) -> None:
        super().__init__("cuda:0", [Sweep.load(record(folder, *problems))])
        self._environment = NEWER
        self.screened: list[str] = []
        self.finalists: list[list[Candidate]] = []

    def screen(
        self, problem: Problem, contenders: Sequence[Contender], policy: Policy
    ) -> Iterator[Trial]:
        for trial in super().screen(problem, contenders, policy):
            self.screened.append(trial.candidate.key)
            yield replace(trial, replayed=False, environment=NEWER)

    def finals(self, problem: Problem, contenders: Sequence[Contender], policy: Policy) -> Finals:
        self.finalists.append([contender.candidate for contender in contenders])
        return super().finals(problem, contenders, policy)
