"""`gemmsmith winners`: a problem's history of winners, and what is to be served from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gemmsmith.core.device import recording_of
from service.cli.guard import ProblemCommand, example
from service.cli.options import (
    AsJson,
    Batch,
    Database,
    DeviceSlug,
    DTypeName,
    K,
    LayoutName,
    Limit,
    M,
    N,
    Url,
    connect,
    load_settings,
    problem_of,
)
from service.cli.output import MisuseError, emit, microseconds, ratio, say, table

if TYPE_CHECKING:
    from gemmsmith.answers.history import Revision
    from gemmsmith.core.config import Config
    from gemmsmith.core.problem import Problem
    from gemmsmith.http.client import Client
    from service.settings import Settings
    from tuner.store import Store
    from tuner.store.revisions import WinnerRevision as Stored

app = typer.Typer(
    help="The winners of a problem: history, pin, unpin, rollback; sign files.",
    no_args_is_help=True,
)

Number = Annotated[
    int,
    typer.Argument(
        metavar="REVISION", min=1, help="Its number in the history.", show_default=False
    ),
]


@app.command("history", cls=ProblemCommand, epilog=example("winners history 4096 6144 1024"))
def history(
    m: M,
    n: N,
    k: K,
    dtype: DTypeName = "bf16",
    layout: LayoutName = None,
    batch: Batch = 1,
    device: DeviceSlug = None,
    limit: Limit = None,
    url: Url = None,
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """List all winners of M N K, newest first."""
    problem = problem_of(m, n, k, batch=batch, dtype=dtype, layout=layout)
    with _opened(url, database) as winners:
        found = winners.history(problem, device=device, limit=limit)
    if as_json:
        emit({"revisions": found})
        return
    columns = (
        *("revision", "served", "origin", "status", "use", "tile"),
        *("µs", "default µs", "speed-up", "driver", "promoted"),
    )
    table(f"{problem} on {found[0].answer.device.name}", columns, map(_row, found), left=6)


@app.command("pin", cls=ProblemCommand, epilog=example("winners pin 4096 6144 1024 1"))
def pin(
    m: M,
    n: N,
    k: K,
    revision: Number,
    dtype: DTypeName = "bf16",
    layout: LayoutName = None,
    batch: Batch = 1,
    device: DeviceSlug = None,
    url: Url = None,
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """Serve REVISION until it is unpinned, even if M N K is tuned, imported or re-checked."""
    problem = problem_of(m, n, k, batch=batch, dtype=dtype, layout=layout)
    with _opened(url, database) as winners:
        chosen = winners.pin(problem, revision, device=device)
    _say_served(chosen, as_json)


@app.command("unpin", cls=ProblemCommand, epilog=example("winners unpin 4096 6144 1024"))
def unpin(
    m: M,
    n: N,
    k: K,
    dtype: DTypeName = "bf16",
    layout: LayoutName = None,
    batch: Batch = 1,
    device: DeviceSlug = None,
    url: Url = None,
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """Serve the newest winner of the best origin again: measured, imported, then replayed."""
    problem = problem_of(m, n, k, batch=batch, dtype=dtype, layout=layout)
    with _opened(url, database) as winners:
        chosen = winners.unpin(problem, device=device)
    _say_served(chosen, as_json)


@app.command("rollback", cls=ProblemCommand, epilog=example("winners rollback 4096 6144 1024"))
def rollback(
    m: M,
    n: N,
    k: K,
    dtype: DTypeName = "bf16",
    layout: LayoutName = None,
    batch: Batch = 1,
    device: DeviceSlug = None,
    url: Url = None,
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """Serve and pin the previous revision. A second rollback undoes the first."""
    problem = problem_of(m, n, k, batch=batch, dtype=dtype, layout=layout)
    with _opened(url, database) as winners:
        chosen = winners.rollback(problem, device=device)
    _say_served(chosen, as_json)


@app.command("sign", epilog=example("winners sign winners.jsonl"))
def sign(
    paths: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Winners files.")],
    key: Annotated[
        Path | None,
        typer.Option(help="File of the private key; default: this installation's own."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Sign the winners of files, replacing earlier signatures.

    Releases are signed with their own key. Exported winners have the signature of the installation
    that measured them.
    """
    from gemmsmith.signing import Signer
    from service import identity
    from tuner.exchange import ExchangeError, sign_winners

    try:
        signer = Signer.load(key) if key else identity.signer(load_settings())
    except ValueError as error:
        raise MisuseError(str(error)) from error
    counts = []
    for path in paths:
        try:
            counts.append({"file": str(path), "winners": sign_winners(path, signer)})
        except ExchangeError as error:
            raise MisuseError(str(error)) from error
        if not as_json:
            say(f"{path}: {counts[-1]['winners']} winners signed with {signer.public.id}")
    if as_json:
        emit({"files": counts, "key": signer.public.id})


class _Local:
    """The local database, asked as a service is."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._settings = settings

    def history(self, problem: Problem, *, device: str | None, limit: int | None) -> list[Revision]:
        from tuner.errors import NoSuchWinner

        slug = self._slug(device)
        found = self._store.revisions(problem, slug, limit=limit)
        if not found:
            raise NoSuchWinner(f"no winner is known for {problem} on {slug}; tune it first")
        return [self._as_told(revision) for revision in found]

    def pin(self, problem: Problem, revision: int, *, device: str | None) -> Revision:
        return self._as_told(self._store.pin(problem, self._slug(device), revision))

    def unpin(self, problem: Problem, *, device: str | None) -> Revision:
        return self._as_told(self._store.unpin(problem, self._slug(device)))

    def rollback(self, problem: Problem, *, device: str | None) -> Revision:
        return self._as_told(self._store.roll_back(problem, self._slug(device)))

    def _slug(self, device: str | None) -> str:
        from service.cli.session import model_of

        return model_of(self._settings, device).slug

    def _as_told(self, revision: Stored) -> Revision:
        from gemmsmith.answers.history import Revision
        from service.lookup import find

        return Revision(
            answer=find.as_served(revision.winner, self._store.pack_for),
            origin=revision.origin,
            current=revision.current,
        )


@contextmanager
def _opened(url: str | None, database: str | None) -> Iterator[Client | _Local]:
    """The service at `url`, else the local database."""
    if url:
        with connect(url) as client:
            yield client
        return
    from tuner.store import Store

    settings = load_settings(database=database)
    with Store.open(settings.database) as store:
        yield _Local(store, settings)


def _say_served(chosen: Revision, as_json: bool) -> None:
    if as_json:
        emit(chosen)
        return
    answer = chosen.answer
    pinned = ", pinned" if answer.pinned else ""
    say(f"{answer.problem} on {answer.device.name}: revision {answer.revision} is served{pinned}")


def _row(revision: Revision) -> tuple[object, ...]:
    answer = revision.answer
    return (
        answer.revision,
        {True: "pinned", False: "yes"}[answer.pinned] if revision.current else "",
        recording_of(answer.recorded) if answer.recorded else revision.origin,
        "stale" if answer.stale else "",
        answer.use,
        _tile(answer.config) if answer.config else None,
        microseconds(answer.statistics.median_us if answer.statistics else None),
        microseconds(answer.baseline.median_us if answer.baseline else None),
        ratio(answer.speedup.median if answer.speedup else None),
        answer.environment.driver if answer.environment else None,
        answer.promoted_at,
    )


def _tile(config: Config) -> str | None:
    from gemmsmith.core.kernel import CutlassKernel

    kernel = config.kernel
    return "×".join(map(str, kernel.tile)) if isinstance(kernel, CutlassKernel) else None
