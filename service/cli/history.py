"""`gemmsmith winners`: all winners of a problem, and which of them is served."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gemmsmith.core.device import recording_of
from service.cli.options import (
    AsJson,
    DeviceSlug,
    Limit,
    ProblemOptions,
    SourceOptions,
    load_settings,
)
from service.cli.output import MisuseError, emit, microseconds, ratio, say, table
from service.cli.session import connect, model_of

if TYPE_CHECKING:
    from gemmsmith.answers.history import Revision
    from gemmsmith.core.config import Config
    from gemmsmith.core.problem import Problem
    from gemmsmith.http.client import Client
    from service.settings import Settings
    from tuner.store import Store
    from tuner.store.revisions import WinnerRevision as Stored


def history(
    shape: ProblemOptions,
    device: DeviceSlug = None,
    limit: Limit = None,
    *,
    source: SourceOptions,
    as_json: AsJson = False,
) -> None:
    """List all winners of M N K, newest first."""
    problem = shape.problem
    with _opened(source) as winners:
        revisions = winners.history(problem, device=device, limit=limit)
    if as_json:
        emit({"revisions": revisions})
        return
    columns = (
        *("revision", "served", "origin", "status", "use", "tile"),
        *("µs", "default µs", "speed-up", "driver", "promoted"),
    )
    table(f"{problem} on {revisions[0].answer.device.name}", columns, map(_row, revisions), left=6)


def pin(
    shape: ProblemOptions,
    revision: Annotated[
        int,
        typer.Argument(
            metavar="REVISION", min=1, help="Its number in the history.", show_default=False
        ),
    ],
    device: DeviceSlug = None,
    *,
    source: SourceOptions,
    as_json: AsJson = False,
) -> None:
    """Serve REVISION until it is unpinned, even if M N K is tuned, imported or re-checked."""
    problem = shape.problem
    with _opened(source) as winners:
        _say_served(winners.pin(problem, revision, device=device), as_json)


def unpin(
    shape: ProblemOptions,
    device: DeviceSlug = None,
    *,
    source: SourceOptions,
    as_json: AsJson = False,
) -> None:
    """Serve the newest winner of the best origin again: measured, imported, then replayed."""
    problem = shape.problem
    with _opened(source) as winners:
        _say_served(winners.unpin(problem, device=device), as_json)


def rollback(
    shape: ProblemOptions,
    device: DeviceSlug = None,
    *,
    source: SourceOptions,
    as_json: AsJson = False,
) -> None:
    """Serve and pin the previous revision. A second rollback undoes the first."""
    problem = shape.problem
    with _opened(source) as winners:
        _say_served(winners.rollback(problem, device=device), as_json)


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
    """The local database, with the calls of a service's client."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._settings = settings

    def history(self, problem: Problem, *, device: str | None, limit: int | None) -> list[Revision]:
        from tuner.errors import NoSuchWinner

        slug = self._slug(device)
        revisions = self._store.revisions(problem, slug, limit=limit)
        if not revisions:
            raise NoSuchWinner(f"no winner is known for {problem} on {slug}; tune it first")
        return [self._for_client(revision) for revision in revisions]

    def pin(self, problem: Problem, revision: int, *, device: str | None) -> Revision:
        return self._for_client(self._store.pin(problem, self._slug(device), revision))

    def unpin(self, problem: Problem, *, device: str | None) -> Revision:
        return self._for_client(self._store.unpin(problem, self._slug(device)))

    def rollback(self, problem: Problem, *, device: str | None) -> Revision:
        return self._for_client(self._store.roll_back(problem, self._slug(device)))

    def _slug(self, device: str | None) -> str:
        return model_of(self._settings, device, self._store).slug

    def _for_client(self, revision: Stored) -> Revision:
        from gemmsmith.answers.history import Revision
        from service.lookup import find

        return Revision(
            answer=find.as_served(revision.winner, self._store.pack_for),
            origin=revision.origin,
            current=revision.current,
        )


@contextmanager
def _opened(source: SourceOptions) -> Iterator[Client | _Local]:
    if source.url:
        with connect(source.url) as client:
            yield client
        return
    from tuner.store import Store

    settings = load_settings(database=source.database)
    with Store.open(settings.database) as store:
        yield _Local(store, settings)


def _say_served(revision: Revision, as_json: bool) -> None:
    if as_json:
        emit(revision)
        return
    answer = revision.answer
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
