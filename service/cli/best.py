"""`gemmsmith best`: look up the fastest known kernel."""

from __future__ import annotations

from typing import Annotated

import typer

from gemmsmith.answers.answer import Answer, Statistics
from gemmsmith.core.config import Match
from gemmsmith.core.device import recording_of, time_text
from gemmsmith.core.problem import Problem
from service.cli.options import (
    AsJson,
    Batch,
    Database,
    DeviceSlug,
    DTypeName,
    K,
    LayoutName,
    M,
    N,
    Url,
    connect,
    load_settings,
    problem_of,
    typed,
)
from service.cli.output import CommandError, emit, note, say
from service.report import regimes
from service.report.power_penalty import why_cublas_stays


def best(
    m: M,
    n: N,
    k: K,
    dtype: DTypeName = "bf16",
    layout: LayoutName = None,
    batch: Batch = 1,
    device: DeviceSlug = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Only a winner that was measured on this very problem.")
    ] = False,
    url: Url = None,
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """Look up the fastest known kernel for M N K, at a service or in the local database."""
    problem = problem_of(m, n, k, batch=batch, dtype=dtype, layout=layout)
    if url:
        with connect(url) as client:
            answer = client.best(
                *(problem.m, problem.n, problem.k),
                batch=problem.batch,
                dtype=problem.dtype,
                layout=problem.layout,
                device=device,
                exact=exact,
            )
            if client.last_from_cache:
                note("the service cannot be reached: this is its last known answer")
    else:
        answer = _from_database(problem, device, exact, database)
    if as_json:
        emit(answer)
    else:
        show(answer)


def _from_database(
    problem: Problem, device: str | None, exact: bool, database: str | None
) -> Answer:
    from service.cli.session import model_of, say_made
    from service.database import open_store, prepare
    from service.lookup import find
    from tuner.search.cost_model import AnalyticModel
    from tuner.store import Store

    settings = load_settings(database=database)
    # A database that is named and not there is a mistake; the usual one is made.
    with (
        open_store(settings, on_made=say_made) if database is None else Store.open(database)
    ) as store:
        if database is None and not store.winners(limit=1):
            # Somebody made it without them. Without any winner the advice would be to tune, which
            # on a recorded GPU finds worse answers than those that are shipped.
            loaded = sum(imported.added for _, imported in prepare(settings))
            note(f"loaded {loaded} shipped winners into a database that had none")
        model = model_of(settings, device)
        answer = find.find(
            store,
            problem,
            model,
            accepted=find.EXACT if exact else find.ANY,
            ranker=AnalyticModel(),
        )
    if answer is None:
        tune = f"gemmsmith tune {typed(problem)}"
        raise CommandError(f"nothing known about {problem} on {model.name}. Tune it: {tune}")
    return answer


def show(answer: Answer) -> None:
    """Print an answer for people."""
    say(f"{answer.problem} on {answer.device.name}")
    match answer.match:
        case Match.NEAREST:
            say(f"  match      nearest: measured on {answer.measured}")
        case Match.PREDICTED:
            _print_predicted(answer)
            return
        case Match.EXACT:
            say("  match      exact")
    default = answer.problem.operation.default
    name = f"{default}: keep torch's own operator" if answer.use.is_default else answer.use
    untuned = answer.match is Match.NEAREST and answer.use.is_default
    until = f" until it is tuned: gemmsmith tune {typed(answer.problem)}" if untuned else ""
    say(f"  use        {name}{until}")
    if answer.use.is_default:
        _print_default(answer, default)
    else:
        _print_config(answer)
        say(f"  time       {_time(answer, answer.statistics)}")
        say(f"  default    {_time(answer, answer.baseline)}  ({default})")
    for label, text in regimes.lines(
        answer.speedup, answer.regimes, answer.power_penalty, answer.recorded
    ):
        say(f"  {label:<10} {text}")
    origin = recording_of(answer.recorded) if answer.recorded else "measured"
    pinned = ", pinned" if answer.pinned else ""
    say(f"  revision   {answer.revision}, {origin}, {answer.promoted_at}{pinned}")
    if answer.stale:
        say("  stale      measured under software that no GPU of this model runs any more")


def _print_default(answer: Answer, default: str) -> None:
    """What is served where the default stays, then the candidate that lost to it."""
    say(f"  time       {_time(answer, answer.baseline)}  ({default})")
    if answer.config is None:
        return
    stays = why_cublas_stays(answer.use, answer.speedup, answer.power_penalty)
    say(f"  not run    our kernel{f' {stays} (docs/choosing.md)' if stays else ''}:")
    say(f"             {answer.config.kernel.name} {answer.config.launch.key}")
    say(f"             {_time(answer, answer.statistics)}")


def _print_config(answer: Answer) -> None:
    if answer.config is not None:
        say(f"  kernel     {answer.config.kernel.name}")
        say(f"  launch     {answer.config.launch.key}")
        say(f"  pack       {answer.config.pack or 'not compiled here yet'}")


def _time(answer: Answer, statistics: Statistics | None) -> str:
    if statistics is None:
        return "not measured"
    text = time_text(statistics.median_us, answer.recorded)
    return f"{text}  ({statistics.ci_low_us:.2f} … {statistics.ci_high_us:.2f})"


def _print_predicted(answer: Answer) -> None:
    say("  match      predicted: not tuned yet, nothing was measured")
    default = answer.problem.operation.default
    say(f"  use        {default}: keep torch's own operator until it is tuned")
    if answer.config is not None and answer.predicted_us is not None:
        say(f"  time       the cost model expects {answer.predicted_us:.2f} µs of")
        _print_config(answer)
    say(f"  tune it    gemmsmith tune {typed(answer.problem)}")
