"""`gemmsmith best`, `tune` and `demo`: look up the fastest known kernel, or search for it.

The demo is a tuning run on recorded measurements, with a pause after every trial so that people can
watch. It needs no GPU, no compiler and no service. It uses a database of its own: a replayed winner
must not stand beside measured ones.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import UNSET

from gemmsmith.answers.answer import Answer, Statistics
from gemmsmith.core.config import Config, Match
from gemmsmith.core.device import recording_of, time_text
from gemmsmith.core.problem import Problem
from gemmsmith.files import private_folder
from gemmsmith.runtime import cublaslt
from service.cli.models import WholeModelOptions, listing
from service.cli.options import (
    AsJson,
    DataOptions,
    DeviceName,
    DeviceSlug,
    OptionalProblemOptions,
    SourceOptions,
    Sweeps,
    complete_suites,
    load_settings,
    typed,
)
from service.cli.output import CommandError, MisuseError, Result, note, say, table
from service.cli.session import connect, existing_store, made_store, model_of
from service.cli.tasks import TaskOptions, TuningOptions
from service.report import regimes
from service.report.of_model import rows_of
from service.report.verdict import why_cublas_stays
from tuner import places

if TYPE_CHECKING:
    from service.settings import Settings
    from tuner.devices.base import Device
    from tuner.devices.replay import ReplayDevice
    from tuner.search.progress import Progress
    from tuner.store import Store
    from tuner.trial import Winner


def best(
    shape: OptionalProblemOptions,
    model: WholeModelOptions,
    device: DeviceSlug = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Only a winner that was measured on this very problem.")
    ] = False,
    *,
    source: SourceOptions,
) -> Result:
    """Look up the fastest known kernel for M N K, at a service or in the local database.

    With --model or --config, for all products of a model: forward and both gradients of each layer,
    and the time of a step before and after.
    """
    from gemmsmith.http.requests import fields_of

    if model.is_named:
        return _of_model(model, shape, device, source)
    problem = shape.problem("or a model: --model llama-3-8b --tokens 4096")
    if source.url:
        with connect(source.url) as client:
            answer = client.best(**fields_of(problem), device=device, exact=exact)
            if client.last_from_cache:
                note("the service cannot be reached: this is its last known answer")
    else:
        answer = _from_database(problem, device, exact, source.database)
    return Result(answer, lambda: _show(answer))


def _of_model(
    options: WholeModelOptions,
    shape: OptionalProblemOptions,
    device: str | None,
    source: SourceOptions,
) -> Result:
    """Look up all products of a model: their own winners only."""
    from service.lookup import find

    products = options.products(shape)
    problems = list(dict.fromkeys(product.problem for product in products))
    if source.url:
        with connect(source.url) as client:
            replies = client.best_many(problems, device=device, exact=True)
        answers = {reply.problem: reply for reply in replies if isinstance(reply, Answer)}
    else:
        settings = load_settings(database=source.database)
        with answering(settings, source.database) as store:
            gpu = model_of(settings, device, store)
            answers = find.find_many(store, problems, gpu, accepted=find.EXACT)
    where = next((f" on {answer.device.name}" for answer in answers.values()), "")
    title = f"{options.name} at {options.tokens} tokens{where}"
    return listing(title, rows_of(products, answers))


def _from_database(
    problem: Problem, device: str | None, exact: bool, database: str | None
) -> Answer:
    from service.lookup import find

    settings = load_settings(database=database)
    with answering(settings, database) as store:
        model = model_of(settings, device, store)
        answer = find.find(store, problem, model, accepted=find.EXACT if exact else find.ANY)
    if answer is None:
        tune = f"gemmsmith tune {typed(problem)}"
        raise CommandError(f"nothing known about {problem} on {model.name}. Tune it: {tune}")
    return answer


@contextmanager
def answering(settings: Settings, database: str | None) -> Iterator[Store]:
    """The database that answers, with the shipped winners unless it was named."""
    from service.database import prepare

    # The usual database is made if it is missing; a missing database that was named is an error.
    with made_store(settings) if database is None else existing_store(database) as store:
        if database is None and not store.winners(limit=1):
            # It was made without the shipped winners. The advice for an empty database would be to
            # tune, and on a recorded GPU that finds worse winners than the shipped ones.
            loaded = sum(imported.added for _, imported in prepare(settings))
            note(f"loaded {loaded} shipped winners into a database that had none")
        yield store


def _show(answer: Answer) -> None:
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
    if not answer.use.is_default and answer.config is not None:
        _print_unusable(answer, answer.config)
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


def _print_unusable(answer: Answer, config: Config) -> None:
    """Print why the config cannot run on this machine, if so."""
    algorithm, here = config.launch.algorithm, cublaslt.installed()
    if algorithm is UNSET or here is None or algorithm.library == here:
        return
    say(
        f"  not here   an algorithm of cuBLASLt {cublaslt.text(algorithm.library)}; torch loads "
        f"{cublaslt.text(here)} and runs its own operator"
    )
    say(f"             until it is tuned again: gemmsmith tune {typed(answer.problem)}")


def _print_default(answer: Answer, default: str) -> None:
    """Print the default's time, then the candidate that lost to it."""
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


NAME = "demo.db"


@dataclass(frozen=True, kw_only=True)
class TuneTaskOptions(TaskOptions):
    """The problems of `tune`."""

    suite: Annotated[
        Path | None,
        typer.Option(
            help="Tune every problem of this file, or of a shipped suite such as llm, instead of "
            "M N K. Where a [\\[problem]] has `calls`, what saves most time in all its calls goes "
            "first.",
            autocompletion=complete_suites,
        ),
    ] = None
    calls: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="How often you run each problem, per step, per day or in any other period. At "
            "equal priority, the problem that saves most time in all its calls goes first. Counts "
            "in a suite take precedence.",
        ),
    ] = None


def tune(
    problems: TuneTaskOptions, tuning: TuningOptions, data: DataOptions, as_json: AsJson = False
) -> None:
    """Find, verify and store the fastest kernel for M N K, or for every problem of a suite.

    Ctrl-C stops after the current candidate, with status 130. Every trial so far is kept.

    If a problem of a suite fails, the others are still tuned, and the status is 1.
    """
    from gemmsmith.http.requests import effort_of
    from service.cli import runner

    if tuning.fleet and tuning.url:
        raise MisuseError("--fleet uses the database, --url a service: give one of them")
    effort_of(tuning.effort)  # refused before a suite is read
    tasks = problems.tasks(tuning.limit, problems.calls or 0)
    if tuning.url:
        place = runner.service(tuning)
    elif tuning.fleet:
        words = SourceOptions(database=data.database).words
        place = runner.fleet(data.settings(device=tuning.device), tuning, words)
    else:
        place = runner.here(data.settings(device=tuning.device), tuning)
    code = runner.run(place, tasks, whole=problems.suite is not None, as_json=as_json)
    if code:
        raise typer.Exit(code)


def demo(
    options: OptionalProblemOptions,
    seconds: Annotated[
        float, typer.Option(min=0, help="About how long the search takes; 0: no waiting.")
    ] = 10.0,
    device: DeviceName = None,
    sweeps: Sweeps = None,
) -> Result:
    """List the problems of the recorded GPU, or watch the search on one of them.

    The new winner is then looked up, as by `gemmsmith best`. Needs no GPU, and only changes a
    database of its own.
    """
    settings = load_settings(device=device or "replay:", sweeps=sweeps)
    recorded = _open(settings)
    if (options.m, options.n, options.k) == (None, None, None):
        return _listed(recorded)
    problem = options.problem("none lists them all")
    folder = settings.volumes().get("database", places.state())
    private_folder(folder)
    database = folder / NAME
    winner = _search(recorded, problem, database, seconds)

    def show() -> None:
        _compare(recorded, winner)
        url = f"sqlite:///{database}"
        say("")
        say(f"$ gemmsmith best {typed(problem)} --database {url}")
        _look_up(problem, recorded, url)

    return Result(winner, show)


def _open(settings: Settings) -> ReplayDevice:
    from tuner.devices import open_device
    from tuner.devices.replay import ReplayDevice

    device: Device = open_device(settings.device, sweeps=settings.sweeps)
    if not isinstance(device, ReplayDevice):
        raise MisuseError(f"{settings.device} is no recording: --device replay:NAME")
    return device


def _listed(recorded: ReplayDevice) -> Result:
    def show() -> None:
        rows = [(problem, len(recorded.recorded(problem) or ())) for problem in recorded.problems]
        table(f"recorded on {recorded.model.name}", ("problem", "trials"), rows)
        say("")
        say(f"watch one: gemmsmith demo {typed(recorded.problems[0])}")

    return Result({"device": recorded.model.slug, "problems": recorded.problems}, show)


def _search(recorded: ReplayDevice, problem: Problem, database: Path, seconds: float) -> Winner:
    """Tune the problem in a new database, slowly, with a line for every better candidate.

    Raises:
        NotRecorded: the recording does not hold the problem; names some that it holds.
    """
    from gemmsmith.core.tuning import Effort
    from tuner.search.budget import BUDGETS
    from tuner.search.progress import Step
    from tuner.search.run import TuningRun
    from tuner.store import Store, upgrade

    for file in database.parent.glob(f"{NAME}*"):  # also SQLite's own files beside it
        file.unlink()
    upgrade(f"sqlite:///{database}")
    best: list[float] = []

    def on_event(progress: Progress) -> None:
        if progress.phase is Step.SCREEN:
            if progress.best_us is not None and (not best or progress.best_us < best[-1]):
                best.append(progress.best_us)
                note(f"  trial {progress.done:>3}  {progress.best_us:8.2f} µs  {progress.best}")
            time.sleep(seconds / BUDGETS[Effort.DEFAULT].trials)  # so the search takes `seconds`
        elif progress.message:
            longer = (
                ", in long rounds: a warm GPU is slower" if progress.phase is Step.FINALS else ""
            )
            note(f"  {progress.phase}: {progress.message}{longer}")

    note(f"{problem}, from real measurements of {recorded.model.name}")
    with Store.open(f"sqlite:///{database}") as store, recorded:
        return TuningRun(
            problem=problem,
            device=recorded,
            store=store,
            builder=None,
            job=f"demo-{secrets.token_hex(6)}",
            on_event=on_event,
        ).tune()


def _compare(recorded: ReplayDevice, winner: Winner) -> None:
    """Print the winner, and how many candidates it was chosen from."""
    every = len(recorded.recorded(winner.problem) or ())
    statistics = winner.statistics or winner.baseline
    median = time_text(statistics.median_us, recorded.model.name) if statistics else "no time"
    gain = f", {winner.speedup.median:.3f} × the default" if winner.speedup else ""
    say(f"found {median}{gain}; the recording has {every} candidates of this problem")


def _look_up(problem: Problem, recorded: ReplayDevice, url: str) -> None:
    from service.lookup import find
    from tuner.store import Store

    with Store.open(url) as store:
        answer = find.find(store, problem, recorded.model, accepted=find.EXACT)
    if answer is not None:
        _show(answer)
