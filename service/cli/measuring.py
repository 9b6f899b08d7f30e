"""Measures predicted advice on this machine's device, with the kernels that are compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.problem import Problem
from gemmsmith.core.tuning import Effort
from service.cli import runner
from service.cli.outcomes import TaskOutcome
from service.cli.output import TUNING, CommandError, reporter
from service.cli.tasks import Task, TuningOptions

if TYPE_CHECKING:
    from service.settings import Settings
    from tuner.explain.advice import Advice

Tune = Callable[[Sequence[Problem]], dict[Problem, TaskOutcome]]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredAdvice:
    """Predicted advice, and what was measured of it.

    Attributes:
        us, ratio: as in `Advice`, of the best that is compiled; None if that failed.
        error: why it failed.
    """

    advice: Advice
    us: float | None
    ratio: float | None
    error: str | None


def measured(
    advice: Sequence[Advice], settings: Settings, device: DeviceModel
) -> Iterator[MeasuredAdvice]:
    """Tune the problems of predicted advice on the local device, which must be of this model.

    Raises:
        CommandError: there is no GPU here, or one of another model.
        TunerError: the device cannot be used.
    """
    with tuning(settings, device) as tune:
        outcomes = tune([item.problem for item in advice if not item.is_measured])
    for item in advice:
        if (outcome := outcomes.get(item.problem)) is not None and not item.is_measured:
            us = time_of(outcome)
            ratio = None if us is None else item.ratio * item.us / us
            yield MeasuredAdvice(advice=item, us=us, ratio=ratio, error=outcome.error)


@contextmanager
def tuning(settings: Settings, device: DeviceModel | None = None) -> Iterator[Tune]:
    """As `gemmsmith tune --compiled-only --effort quick`, for several lists of problems.

    Raises: as `measured`.
    """
    from service.worker.gpu import usable_gpu

    gpu = usable_gpu()
    if gpu is None and not settings.device:
        raise CommandError(
            "no GPU here that gemmsmith can measure on: run this on the machine with the GPU "
            "(gemmsmith doctor says what is missing)"
        )
    if gpu is not None and device is not None and gpu.slug != device.slug:
        raise CommandError(f"this is advice for {device.name}, and the GPU here is {gpu.name}")
    options = TuningOptions(effort=Effort.QUICK, again=True, compiled_only=True)
    with runner.here(settings, options) as place:

        def tune(problems: Sequence[Problem]) -> dict[Problem, TaskOutcome]:
            tasks = [Task(problem=problem, origin="") for problem in dict.fromkeys(problems)]
            place.request(tasks, True)
            with reporter(TUNING) as says:
                return {outcome.task.problem: outcome for outcome in place.outcomes(says)}

        yield tune


def time_of(outcome: TaskOutcome) -> float | None:
    """The time of the faster of a new winner and its default; None without a winner."""
    from tuner.explain.advice import served_us
    from tuner.trial import Winner

    return served_us(outcome.result) if isinstance(outcome.result, Winner) else None
