"""`gemmsmith demo`: watch a search on a recorded GPU; no GPU, no compiler, no service needed.

Everything is what a tuning run does, on real measurements that are served back one trial at a
time. It only waits between two trials, so that people can watch. Its database is its own: a
replayed winner must not stand beside those that were measured.
"""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gemmsmith.core.device import time_text
from gemmsmith.files import private_folder
from service.cli.best import show
from service.cli.options import (
    AsJson,
    Batch,
    DeviceName,
    DTypeName,
    LayoutName,
    OptionalK,
    OptionalM,
    OptionalN,
    Sweeps,
    load_settings,
    problem_of,
    typed,
)
from service.cli.output import MisuseError, emit, note, say, table
from tuner import places

if TYPE_CHECKING:
    from gemmsmith.core.problem import Problem
    from service.settings import Settings
    from tuner.devices.base import Device
    from tuner.devices.replay import ReplayDevice
    from tuner.search.progress import Progress
    from tuner.trial import Winner

NAME = "demo.db"


def demo(
    m: OptionalM = None,
    n: OptionalN = None,
    k: OptionalK = None,
    dtype: DTypeName = "bf16",
    layout: LayoutName = None,
    batch: Batch = 1,
    seconds: Annotated[
        float, typer.Option(min=0, help="About how long the search takes; 0: no waiting.")
    ] = 10.0,
    device: DeviceName = None,
    sweeps: Sweeps = None,
    as_json: AsJson = False,
) -> None:
    """List the problems of the recorded GPU, or watch the search on one of them.

    The new winner is then looked up, as by `gemmsmith best`. Needs no GPU, and only changes a
    database of its own.
    """
    settings = load_settings(device=device or "replay:", sweeps=sweeps)
    recorded = _open(settings)
    sizes = [size for size in (m, n, k) if size is not None]
    if not sizes:
        _list(recorded, as_json)
        return
    if m is None or n is None or k is None:
        raise MisuseError(f"three sizes M N K are needed, got {len(sizes)}; none lists them all")
    problem = problem_of(m, n, k, batch=batch, dtype=dtype, layout=layout)
    folder = settings.volumes().get("database", places.state())
    private_folder(folder)
    database = folder / NAME
    winner = _search(recorded, problem, database, seconds)
    _compare(recorded, winner, as_json)
    if not as_json:
        url = f"sqlite:///{database}"
        say("")
        say(f"$ gemmsmith best {typed(problem)} --database {url}")
        _look_up(problem, recorded, url)


def _open(settings: Settings) -> ReplayDevice:
    """The recorded GPU.

    Raises:
        MisuseError: the device that was named is none.
    """
    from tuner.devices import open_device
    from tuner.devices.replay import ReplayDevice

    device: Device = open_device(settings.device, sweeps=settings.sweeps)
    if not isinstance(device, ReplayDevice):
        raise MisuseError(f"{settings.device} is no recording: --device replay:NAME")
    return device


def _list(recorded: ReplayDevice, as_json: bool) -> None:
    rows = []
    for problem in recorded.problems:
        trials = len(recorded.recorded(problem) or ())
        rows.append((problem, trials))
    if as_json:
        emit({"device": recorded.model.slug, "problems": [problem for problem, _ in rows]})
        return
    table(f"recorded on {recorded.model.name}", ("problem", "trials"), rows)
    first = recorded.problems[0]
    say("")
    say(f"watch one: gemmsmith demo {typed(first)}")


def _search(recorded: ReplayDevice, problem: Problem, database: Path, seconds: float) -> Winner:
    """Tune the problem in a fresh database, slowly, with a line whenever there is a better one.

    Raises:
        NotRecorded: the recording does not hold it; names some that it does.
    """
    from gemmsmith.core.tuning import Effort
    from tuner.search.budget import BUDGETS
    from tuner.search.cost_model import AnalyticModel
    from tuner.search.progress import Step
    from tuner.search.run import tune
    from tuner.store import Store, upgrade

    for file in database.parent.glob(f"{NAME}*"):  # SQLite's own files beside it, too
        file.unlink()
    upgrade(f"sqlite:///{database}")
    best: list[float] = []

    def on_event(progress: Progress) -> None:
        if progress.phase is Step.SCREEN:
            if progress.best_us is not None and (not best or progress.best_us < best[-1]):
                best.append(progress.best_us)
                note(f"  trial {progress.done:>3}  {progress.best_us:8.2f} µs  {progress.best}")
            time.sleep(seconds / BUDGETS[Effort.DEFAULT].trials)
        elif progress.message:
            longer = (
                ", in long rounds: a warm GPU is slower" if progress.phase is Step.FINALS else ""
            )
            note(f"  {progress.phase}: {progress.message}{longer}")

    note(f"{problem} on {recorded.name}, real measurements of {recorded.model.name}")
    with Store.open(f"sqlite:///{database}") as store, recorded:
        return tune(
            problem,
            device=recorded,
            store=store,
            builder=None,
            ranker=AnalyticModel(),
            job=f"demo-{secrets.token_hex(6)}",
            on_event=on_event,
        )


def _compare(recorded: ReplayDevice, winner: Winner, as_json: bool) -> None:
    """Print the winner against all that was recorded."""
    if as_json:
        emit(winner)
        return
    every = len(recorded.recorded(winner.problem) or ())
    statistics = winner.statistics or winner.baseline
    time = time_text(statistics.median_us, recorded.model.name) if statistics else "no time"
    gain = f", {winner.speedup.median:.3f} × the default" if winner.speedup else ""
    say(f"found {time}{gain}; the recording has {every} candidates of this problem")


def _look_up(problem: Problem, recorded: ReplayDevice, url: str) -> None:
    from service.lookup import find
    from tuner.search.cost_model import AnalyticModel
    from tuner.store import Store

    with Store.open(url) as store:
        answer = find.find(
            store,
            problem,
            recorded.model,
            accepted=find.EXACT,
            ranker=AnalyticModel(),
        )
    if answer is not None:
        show(answer)
