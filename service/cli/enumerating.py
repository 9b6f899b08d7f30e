"""`gemmsmith enumerate`: what could run a problem, and how fast the cost model thinks it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gemmsmith.core.choices import member, not_one_of
from service.cli import completion
from service.cli.options import (
    AsJson,
    Batch,
    Database,
    DeviceSlug,
    DTypeName,
    K,
    LayoutName,
    LevelName,
    M,
    N,
    Sweeps,
    load_settings,
    problem_of,
)
from service.cli.output import MisuseError, emit, say, table
from service.cli.session import model_of

if TYPE_CHECKING:
    from gemmsmith.core.candidate import Candidate
    from gemmsmith.core.device import DeviceModel
    from gemmsmith.core.problem import Problem
    from tuner.backends import Level


def enumerate_(
    m: M,
    n: N,
    k: K,
    dtype: DTypeName = "bf16",
    layout: LayoutName = None,
    batch: Batch = 1,
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
    database: Database = None,
    sweeps: Sweeps = None,
    as_json: AsJson = False,
) -> None:
    """List the legal kernels and launches for M N K, by predicted time. Compiles nothing.

    With --arch only the kernels, unordered: launches depend on the device model.
    """
    problem = problem_of(m, n, k, batch=batch, dtype=dtype, layout=layout)
    wanted = level_of(level)
    if arch is not None:
        if device is not None:
            raise MisuseError("--device has an architecture: give it or --arch, not both")
        _list_kernels(problem, arch, wanted, limit, as_json=as_json)
        return
    model = model_of(load_settings(database=database, sweeps=sweeps), device)
    order = predicted(problem, model, wanted)
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
    """The legal kernels of an architecture, whatever GPU has it."""
    from tuner.arch import ARCHITECTURES
    from tuner.backends import kernels

    if arch not in ARCHITECTURES:
        raise not_one_of("arch", ARCHITECTURES, arch)
    found = kernels(problem, arch, level=level)
    measured = ARCHITECTURES[arch].measured
    if as_json:
        emit(
            {
                "problem": problem,
                "arch": arch,
                "measured": measured,
                "level": level,
                "counts": {"kernels": len(found)},
                "kernels": found[:limit],
            }
        )
        return
    state = "measured" if measured else "can be compiled here, not measured"
    say(f"{problem} on {arch} ({ARCHITECTURES[arch].gpus}), {state}: {len(found)} kernels")
    rows = [(kernel.name, kernel.backend) for kernel in found[:limit]]
    if rows:
        table("", ("kernel", "backend"), rows, left=2)


def level_of(name: str) -> Level:
    """The level by its name.

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

    found = candidates(problem, model, level=level)
    times = predictions(problem, found, model, AnalyticModel())
    return [(times[candidate.key], candidate) for candidate in by_time(found, times)]


def _document(us: float, candidate: Candidate) -> dict[str, Any]:
    return {
        "kernel": candidate.kernel,
        "launch": candidate.launch,
        "key": candidate.key,
        "predicted_us": us,
    }
