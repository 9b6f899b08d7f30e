"""`gemmsmith enumerate`: the candidates of a problem, with their predicted times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gemmsmith.core.choices import member, not_one_of
from service.cli import completion
from service.cli.options import (
    AsJson,
    Database,
    DeviceSlug,
    LevelName,
    ProblemOptions,
    Sweeps,
    load_settings,
)
from service.cli.output import MisuseError, emit, say, table
from service.cli.session import model_of

if TYPE_CHECKING:
    from gemmsmith.core.candidate import Candidate
    from gemmsmith.core.device import DeviceModel
    from gemmsmith.core.problem import Problem
    from tuner.backends import Level


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Where device models are known."""

    database: Database = None
    sweeps: Sweeps = None


def enumerate_(
    shape: ProblemOptions,
    level: LevelName = "core",
    device: DeviceSlug = None,
    arch: Annotated[
        str | None,
        typer.Option(
            "--arch",
            metavar="NAME",
            help="List kernels of this architecture instead of those of a device model: sm80, "
            "sm89, sm90, sm100 or sm120.",
            autocompletion=completion.architectures,
            show_default=False,
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="Candidates shown, fastest first.")] = 20,
    *,
    models: ModelOptions,
    as_json: AsJson = False,
) -> None:
    """List the legal kernels and launches for M N K, by predicted time. Compiles nothing.

    With --arch only the kernels, unordered: launches depend on the device model.
    """
    problem = shape.problem
    checked = level_of(level)
    if arch is not None:
        if device is not None:
            raise MisuseError("--device has an architecture: give it or --arch, not both")
        _list_kernels(problem, arch, checked, limit, as_json=as_json)
        return
    model = model_of(load_settings(**vars(models)), device)
    order = predicted(problem, model, checked)
    kernels = {candidate.kernel.name for _, candidate in order}
    if as_json:
        emit(
            {
                "problem": problem,
                "device": model.slug,
                "arch": model.arch,
                "level": level,
                "counts": {"kernels": len(kernels), "candidates": len(order)},
                "candidates": [_document(*item) for item in order[:limit]],
            }
        )
        return
    say(
        f"{problem} on {model.name} ({model.arch}), level {level}: "
        f"{len(kernels)} kernels, {len(order)} candidates"
    )
    rows = [(c.kernel.name, c.launch.key, f"{us:.2f}") for us, c in order[:limit]]
    if rows:
        table("", ("kernel", "launch", "predicted µs"), rows, left=2)


def _list_kernels(problem: Problem, arch: str, level: Level, limit: int, *, as_json: bool) -> None:
    """Print the legal kernels of an architecture."""
    from tuner.arch import ARCHITECTURES
    from tuner.backends import kernels

    if arch not in ARCHITECTURES:
        raise not_one_of("arch", ARCHITECTURES, arch)
    legal = kernels(problem, arch, level=level)
    measured = ARCHITECTURES[arch].measured
    if as_json:
        emit(
            {
                "problem": problem,
                "arch": arch,
                "measured": measured,
                "level": level,
                "counts": {"kernels": len(legal)},
                "kernels": legal[:limit],
            }
        )
        return
    state = "measured" if measured else "can be compiled here, not measured"
    say(f"{problem} on {arch} ({ARCHITECTURES[arch].gpus}), {state}: {len(legal)} kernels")
    rows = [(kernel.name, kernel.backend) for kernel in legal[:limit]]
    if rows:
        table("", ("kernel", "backend"), rows, left=2)


def level_of(name: str) -> Level:
    """The level with this name.

    Raises:
        InvalidProblem: names what is accepted.
    """
    from tuner.backends import Level

    return member("level", Level, name)


def predicted(problem: Problem, model: DeviceModel, level: Level) -> list[tuple[float, Candidate]]:
    """Every legal candidate with its predicted microseconds, fastest first."""
    from tuner.backends import candidates
    from tuner.search.cost_model import AnalyticModel
    from tuner.search.ranking import by_time, predictions

    legal = candidates(problem, model, level=level)
    times = predictions(problem, legal, model, AnalyticModel())
    return [(times[candidate.key], candidate) for candidate in by_time(legal, times)]


def _document(us: float, candidate: Candidate) -> dict[str, Any]:
    return {
        "kernel": candidate.kernel,
        "launch": candidate.launch,
        "key": candidate.key,
        "predicted_us": us,
    }
