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
    from tuner.explain import Explanation
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


def measured(item: Explanation, settings: Settings) -> Iterator[MeasuredAdvice]:
    """Tune the other problems of predicted advice on the local device, which must be of that model.

    The problem itself is not tuned again: with what is compiled here, its winner might be a worse
    one than the recorded.

    Raises:
        CommandError: there is no GPU here, or one of another model.
        TunerError: the device cannot be used.
    """
    predicted = [advice for advice in item.advice if is_measurable(advice, item.problem)]
    with tuning(settings, item.device) as tune:
        outcomes = tune([advice.problem for advice in predicted])
    for advice in predicted:
        outcome = outcomes[advice.problem]
        us = time_of(outcome)
        ratio = None if us is None else advice.ratio * advice.us / us
        yield MeasuredAdvice(advice=advice, us=us, ratio=ratio, error=outcome.error)


def is_measurable(advice: Advice, problem: Problem) -> bool:
    """Whether it is predicted of another problem."""
    return not advice.is_measured and advice.problem != problem


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
