"""`gemmsmith profile`: what a profiler sees of the winner and of the default."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from service.cli.best import answering
from service.cli.explaining import read_explanation
from service.cli.options import (
    DeviceSlug,
    Packs,
    ProblemOptions,
    SourceOptions,
    load_settings,
    typed,
)
from service.cli.output import CommandError, Result, note, say, table, writable
from service.cli.session import connect, model_of

if TYPE_CHECKING:
    from gemmsmith.core.device import DeviceModel
    from gemmsmith.core.problem import Problem
    from service.settings import Settings
    from tuner.profiling.records import ProblemProfile, Profiled
    from tuner.store import Store
    from tuner.trial import Winner

_NAMED = 5
"""Recorded problems that an error names."""


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """What is profiled, and where it goes."""

    runners_up: Annotated[
        int, typer.Option(min=0, max=8, help="Other compiled candidates beside the winner.")
    ] = 2
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="File of profiles to add this one to; default: the installation's own.",
            callback=writable,
        ),
    ] = None
    trace: Annotated[
        Path | None,
        typer.Option(
            help="File for the Chrome trace; default: beside the installation's profiles.",
            callback=writable,
        ),
    ] = None


def profile(
    shape: ProblemOptions,
    options: ProfileOptions,
    device: DeviceSlug = None,
    packs: Packs = None,
    *,
    source: SourceOptions,
) -> Result:
    """Profile the winner of M N K, the default and runners-up: counters, stalls and a trace.

    On a GPU, torch's profiler writes a Chrome trace, and Nsight Compute counts if `ncu` is on the
    path. Elsewhere a recorded profile is shown.
    """
    problem = shape.problem
    if source.url:
        with connect(source.url) as client:
            item = read_explanation(client.explain(problem, device=device))
        if item.profile is None:
            raise CommandError(
                f"the service has no profile of {problem}: run `gemmsmith profile "
                f"{typed(problem)}` on its GPU, without --url"
            )
        return _result(item.profile, None, item.waits)
    settings = load_settings(database=source.database, packs=packs)
    with answering(settings, source.database) as store:
        model = model_of(settings, device, store)
        winner = store.winner(problem, model.slug)
        if not _is_here(model):
            return _recorded(problem, model, winner)
        if winner is None or winner.candidate is None:
            raise CommandError(
                f"{problem} has no candidate on {model.name}. Tune it: gemmsmith tune "
                f"{typed(problem)}"
            )
        return _measured(winner, store, settings, options)


def _is_here(model: DeviceModel) -> bool:
    from tuner.devices import local_gpu

    local = local_gpu()
    return local is not None and local.slug == model.slug


def _recorded(problem: Problem, model: DeviceModel, winner: Winner | None) -> Result:
    """The recorded profile.

    Raises:
        CommandError: none is on record.
    """
    from tuner.profiling.files import profile_of, recorded

    known = profile_of(problem, model.slug)
    if known is None:
        problems = [str(other) for other in recorded(model.slug)]
        listed = f" Recorded are, for example: {', '.join(problems[:_NAMED])}." if problems else ""
        raise CommandError(
            f"there is no {model.name} here, and no recorded profile of {problem}. Run the "
            f"command on such a GPU.{listed}"
        )
    note(f"there is no {model.name} here: this profile is a recorded one")
    return _result(known, None, _sentence(known, winner))


def _measured(winner: Winner, store: Store, settings: Settings, options: ProfileOptions) -> Result:
    """Trace and count on the local GPU."""
    from gemmsmith.files import private_folder
    from service.contestants import contestants
    from tuner.profiling import recorder
    from tuner.profiling.files import add_profiles, file_in, own_folder

    problem, model = winner.problem, winner.device
    launched = contestants(winner, store, settings, options.runners_up)
    trace = options.trace or own_folder() / f"{model.slug} {problem}.trace.json"
    private_folder(trace.parent)
    recorder.trace(problem, launched, trace)
    note(f"trace: {trace} (open it in chrome://tracing or https://ui.perfetto.dev)")
    with_ncu = recorder.Ncu.here()
    if with_ncu is None:
        note("no counters: ncu is not on the path. Nsight Compute comes with the CUDA toolkit")
        return Result({"profile": None, "trace": str(trace)}, ())
    made = recorder.record(problem, model, launched, with_ncu)
    path = options.output or file_in(own_folder(), model.slug)
    add_profiles(path, [made])
    note(f"profile: {path}")
    return _result(made, trace, _sentence(made, winner))


def _sentence(known: ProblemProfile, winner: Winner | None) -> str:
    from tuner.explain.waits import waits

    return waits(known, winner.candidate if winner else known.candidate.candidate)


def _result(known: ProblemProfile, trace: Path | None, sentence: str) -> Result:
    document = {
        "profile": msgspec.to_builtins(known),
        "waits": sentence,
        "trace": None if trace is None else str(trace),
    }
    return Result(document, lambda: _show(known, sentence))


def _show(known: ProblemProfile, sentence: str) -> None:
    """Print a profile for people."""
    from service.report.explained import counters

    say(f"{known.problem} on {known.device.name}")
    if known.candidate.candidate:
        say(f"  candidate  {known.candidate.candidate.key}")
    say(f"  default    {known.default.main.name}")
    say("")
    say(sentence)
    for section in counters(known):
        if section.rows:
            say("")
            table("", (section.title, "candidate", "default"), section.rows, left=3)
    if known.runners_up:
        say("")
        rows = [_runner_up(side) for side in known.runners_up]
        table("", ("runners-up", "µs", "tensor pipe", "waits most for"), rows)


def _runner_up(side: Profiled) -> tuple[str, str, str | None, str | None]:
    from tuner.explain.waits import words

    main = side.main
    tensor = None if main.tensor is None else f"{main.tensor:.0%}"
    most = next(iter(main.waits), None)
    name = side.candidate.key if side.candidate else "default"
    return name, f"{main.us:.2f}", tensor, None if most is None else words(most)
