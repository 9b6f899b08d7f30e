"""The database as the rest of the program sees it: every method is a transaction of its own.

What a method has written when it returns is durable, and what raised has changed nothing. A
`Store` may be shared by threads; each process opens its own.
"""

from __future__ import annotations

from functools import cached_property
from typing import Self

from sqlalchemy import func, select

from gemmsmith.core.device import DeviceModel, Environment
from gemmsmith.core.problem import Problem
from gemmsmith.signing import Signer
from tuner.errors import SchemaOutdated
from tuner.store import schema
from tuner.store.audit import Audit
from tuner.store.changes import Changes
from tuner.store.codec import from_json
from tuner.store.database import Database, Fence, parse_url, sqlite_path
from tuner.store.dictionary import Dictionary, device_of
from tuner.store.gpus import Gpus
from tuner.store.imports import Imports
from tuner.store.keys import Keys
from tuner.store.listing import Listing
from tuner.store.models import (
    CURRENT,
    DeviceRow,
    EnvironmentRow,
    KernelRow,
    PackRow,
    ProblemRow,
    TrialRow,
    WinnerRow,
)
from tuner.store.overview import Overview
from tuner.store.packs import PackTables
from tuner.store.revisions import Revisions
from tuner.store.served import AllServed, Won
from tuner.store.statement import signed
from tuner.store.trials import Trials
from tuner.store.winners import Winners
from tuner.trial import Trial, Winner


class Store:
    """Everything gemmsmith remembers. Open with `Store.open`; use as a context manager.

    The parts that only some programs need are made when they are first used.

    Attributes:
        database: for `tuner.jobs`, which keeps its queue in the same database.
        signer: signs what is measured here; None leaves it unsigned.
        dictionary: devices, environments, problems and kernels.
        changes: whether answers may have changed.
        gpus: the GPUs that measure for this store.
        trials, add_trials, tried_on, tried_for: see `Trials`.
        winner, winners, winners_of, near_winners, unanswered, sequence: see `Winners`.
        revisions, every_revision, pin, unpin, roll_back: see `Revisions`.
        add_pack, remove_pack, winners_packs, pack_for, kernel: see `PackTables`.
    """

    def __init__(
        self, database: Database, signer: Signer | None = None, dictionary: Dictionary | None = None
    ) -> None:
        self.database = database
        self.signer = signer
        self.dictionary = dictionary or Dictionary(database)
        self._trials = Trials(database, self.dictionary)
        self.gpus = Gpus(database, self.dictionary)
        self._winners = Winners(database, self.dictionary, self.gpus)
        self.changes = Changes(database)
        self.add_trials = self._trials.add
        self.trials = self._trials.find
        self.tried_on = self._trials.tried_on
        self.tried_for = self._trials.tried_for
        self.winner = self._winners.current
        self.winners = self._winners.find
        self.winners_of = self._winners.of
        self.near_winners = self._winners.near
        self.unanswered = self._winners.unanswered
        self.sequence = self._winners.sequence
        revisions = Revisions(database, self.dictionary, self._winners)
        self.revisions = revisions.find
        self.every_revision = revisions.pages
        self.pin = revisions.pin
        self.unpin = revisions.unpin
        self.roll_back = revisions.roll_back
        packs = PackTables(database, self.dictionary)
        self.add_pack = packs.add
        self.remove_pack = packs.remove
        self.winners_packs = packs.of_winners
        self.pack_for = packs.holding
        self.kernel = packs.kernel
        self.forget_kernels = self.dictionary.forget_kernels
        self.close = database.close

    @cached_property
    def audit(self) -> Audit:
        return Audit(self.database)

    @cached_property
    def keys(self) -> Keys:
        return Keys(self.database)

    @cached_property
    def imports(self) -> Imports:
        return Imports(self.database, self.dictionary, self._winners)

    @cached_property
    def served(self) -> AllServed:
        return AllServed(self.database, self.dictionary, self.gpus)

    @cached_property
    def overview(self) -> Overview:
        return Overview(self.database)

    @cached_property
    def listing(self) -> Listing:
        return Listing(self.database, self.dictionary, self.gpus, self._trials)

    @classmethod
    def open(cls, url: str, *, create: bool = False, signer: Signer | None = None) -> Store:
        """Open a database whose schema is this program's.

        Args:
            url: `sqlite:///path/to/file.db` or `postgresql://user@host/name`.
            create: make the database if it does not exist or is empty; an old one is left alone.
            signer: signs the winners that are measured here.

        Raises:
            SchemaOutdated: upgrade it first, with the command in the message.
            SchemaTooNew: a newer gemmsmith wrote it.
            DatabaseCorrupt: not a database, or damaged.
            StoreError: it cannot be reached.
        """
        if create and schema.current(url) is None:
            schema.upgrade(url)
        path = sqlite_path(parse_url(url))
        if path is not None and not path.exists():
            raise SchemaOutdated(
                f"there is no database at {path}. Run: gemmsmith db upgrade --database {url}"
            )
        database = Database(url)
        try:
            schema.check(database)
        except BaseException:
            database.close()
            raise
        return cls(database, signer)

    def fenced(self, fence: Fence) -> Store:
        """This store for a worker that may lose the right to write: the fence begins every write.

        What it raises, the writing method raises, and has changed nothing. It shares connections
        and the dictionary with this store, and is not closed.
        """
        return Store(self.database.fenced(fence), self.signer, self.dictionary)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add_trial(self, trial: Trial) -> int:
        """Record a trial; durable when this returns.

        Adding one with the same problem, device, candidate, phase, environment and job again
        keeps the first and gives its id.
        """
        return self.add_trials([trial])[0]

    def promote(self, winner: Winner) -> Winner:
        """Add a winner that was measured here, signed if there is a signer; see `Winners`."""
        return self._winners.promote(signed(winner, self.signer))

    def near(self, problem: Problem, device: str) -> list[tuple[Problem, Won]]:
        """As `near_winners`, with no more than a search for neighbours needs."""
        winners = self.near_winners(problem, device)
        return [(winner.problem, Won(winner.use, winner.candidate)) for winner in winners]

    def history(self, problem: Problem, device: str) -> list[Winner]:
        return [revision.winner for revision in self.revisions(problem, device)]

    def devices(self) -> list[DeviceModel]:
        with self.database.read() as session:
            return [device_of(row) for row in session.scalars(select(DeviceRow).order_by("slug"))]

    def environments(self) -> list[Environment]:
        with self.database.read() as session:
            rows = session.scalars(select(EnvironmentRow).order_by(EnvironmentRow.id))
            return [from_json(Environment, row.description) for row in rows]

    def counts(self) -> dict[str, int]:
        """How many rows there are of each kind; `winners` counts current ones."""
        tables = {
            "devices": select(func.count()).select_from(DeviceRow),
            "problems": select(func.count()).select_from(ProblemRow),
            "kernels": select(func.count()).select_from(KernelRow),
            "packs": select(func.count()).select_from(PackRow),
            "trials": select(func.count()).select_from(TrialRow),
            "winners": select(func.count()).select_from(WinnerRow).where(CURRENT),
        }
        with self.database.read() as session:
            return {name: session.scalar(query) or 0 for name, query in tables.items()}
