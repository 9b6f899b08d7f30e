"""The database as the rest of the program sees it: every method is a transaction of its own.

What a method has written when it returns is durable, and what raised has changed nothing. A
`Store` may be shared by threads; each process opens its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from types import MappingProxyType, TracebackType
from typing import Self

from sqlalchemy import func, select

from gemmsmith.core.config import Use
from gemmsmith.core.device import DeviceModel, Environment
from gemmsmith.core.kernel import AnyKernel
from gemmsmith.core.neighbours import NEIGHBOURS
from gemmsmith.core.problem import Layout, Problem
from gemmsmith.signing import Signer
from tuner.errors import SchemaOutdated
from tuner.store import schema
from tuner.store.audit import LOCAL, SYSTEM, Audit
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
from tuner.store.revisions import Revisions, WinnerRevision
from tuner.store.served import AllServed, Won
from tuner.store.statement import signed
from tuner.store.trials import StoredTrial, Trials
from tuner.store.tried import TriedTrials
from tuner.store.winners import Winners
from tuner.trial import Phase, Trial, Winner


class Store:
    """Everything gemmsmith remembers. Open with `Store.open`; use as a context manager.

    Attributes:
        database: for `tuner.jobs`, which keeps its queue in the same database.
        audit: who changed what.
        changes: whether answers may be others than they were.
        gpus: what measures for this store.
        imports: winners from elsewhere.
        listing, overview, tried: what the pages show.
        served: what is served on a device model, for snapshots.
        keys: API keys.
        signer: signs what is measured here; None: nobody does.
    """

    def __init__(
        self,
        database: Database,
        signer: Signer | None = None,
        dictionary: Dictionary | None = None,
    ) -> None:
        self.database = database
        self.signer = signer
        self.dictionary = dictionary or Dictionary(database)
        self.audit = Audit(database)
        self.keys = Keys(database)
        self._trials = Trials(database, self.dictionary)
        self.gpus = Gpus(database, self.dictionary)
        self._winners = Winners(database, self.dictionary, self.gpus)
        self.imports = Imports(database, self.dictionary, self._winners)
        self._revisions = Revisions(database, self.dictionary, self._winners)
        self._packs = PackTables(database, self.dictionary)
        self.changes = Changes(database)
        self.served = AllServed(database, self.dictionary, self.gpus)
        self.overview = Overview(database)
        self.tried = TriedTrials(database, self.dictionary)
        self.listing = Listing(database, self.dictionary, self.gpus, self._trials)

    @classmethod
    def open(cls, url: str, *, create: bool = False, signer: Signer | None = None) -> Store:
        """Open a database whose schema is this program's.

        Args:
            url: `sqlite:///path/to/file.db` or `postgresql://user@host/name`.
            create: make the database if there is none or it is empty; an old one is left alone.
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
        """This store for somebody who may lose the right to write: the fence begins every write.

        What it raises, the writing method raises, and has changed nothing. Shares connections and
        what is remembered with this store, and is not closed.
        """
        return Store(self.database.fenced(fence), self.signer, self.dictionary)

    def close(self) -> None:
        """Close all connections; the object is of no further use."""
        self.database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def add_trial(self, trial: Trial) -> int:
        """Record a trial; durable when this returns.

        Adding one with the same problem, device, candidate, phase, environment and job again
        keeps the first and gives its id.
        """
        return self._trials.add([trial])[0]

    def add_trials(self, trials: Sequence[Trial]) -> list[int]:
        """Record several trials in one transaction: all or none."""
        return self._trials.add(trials)

    def trials(
        self,
        *,
        problem: Problem | None = None,
        device: str | None = None,
        dtype: str | None = None,
        layout: Layout | None = None,
        phase: Phase | None = None,
        job: str | None = None,
        after: int | None = None,
        limit: int | None = None,
    ) -> list[StoredTrial]:
        """Trials that meet every condition given, oldest first.

        `device` is a device model's slug. `after` is the cursor of the next page: only trials
        later than the one with this id.
        """
        return self._trials.find(
            problem=problem,
            device=device,
            dtype=dtype,
            layout=layout,
            phase=phase,
            job=job,
            after=after,
            limit=limit,
        )

    def promote(self, winner: Winner, *, imported: bool = False, force: bool = False) -> Winner:
        """Add a winner to the history; see `tuner.store.winners` for when it becomes current.

        `imported` means measured by another installation: importing it again changes nothing,
        and it does not replace what was measured here, unless `force` says so. What is measured
        here is signed, if there is a signer.
        """
        mine = winner if imported else signed(winner, self.signer)
        return self._winners.promote(mine, imported=imported, force=force)

    def unanswered(self, limit: int | None = None) -> list[Winner]:
        """Winners from elsewhere that are not answered, as nobody who is believed signed them."""
        return self._winners.unanswered(limit)

    def winner(self, problem: Problem, device: str) -> Winner | None:
        """What is served for exactly this problem on the device model with that slug."""
        return self._winners.current(problem, device)

    def winners(
        self,
        *,
        device: str | None = None,
        dtype: str | None = None,
        layout: Layout | None = None,
        use: Use | None = None,
        sizes: Mapping[str, int] = MappingProxyType({}),
        min_speedup: float | None = None,
        after: Problem | None = None,
        limit: int | None = None,
    ) -> list[Winner]:
        """Current winners in a fixed order; `after` continues behind that problem.

        `sizes` fixes some of m, n, k and batch; `min_speedup` leaves out what gains less. Pages
        are exact for one device; without `device` a page may cut a problem's devices apart.

        Raises:
            InvalidProblem: `after` was never tuned, so no page ended with it.
        """
        return self._winners.find(
            device=device,
            dtype=dtype,
            layout=layout,
            use=use,
            sizes=sizes,
            min_speedup=min_speedup,
            after=after,
            limit=limit,
        )

    def winners_of(self, problems: Iterable[Problem], device: str) -> list[Winner]:
        """As `winner`, for many problems at once, in no order; what has none is left out."""
        return self._winners.of(problems, device)

    def near_winners(
        self, problem: Problem, device: str, limit: int = NEIGHBOURS, reach: float = inf
    ) -> list[Winner]:
        """Current winners of the same kind (`Problem.kind`); nearest in log2 m, n, k first.

        At most `limit`, none farther than `reach` octaves. Of equal distances, the problem that
        was recorded first.
        """
        return self._winners.near(problem, device, limit, reach)

    def near(self, problem: Problem, device: str) -> list[tuple[Problem, Won]]:
        """As `near_winners`, with no more than a search for neighbours needs."""
        winners = self.near_winners(problem, device)
        return [(winner.problem, Won(winner.use, winner.candidate)) for winner in winners]

    def history(self, problem: Problem, device: str) -> list[Winner]:
        """Every winner promoted for the problem, newest first."""
        return [revision.winner for revision in self._revisions.find(problem, device)]

    def revisions(
        self, problem: Problem, device: str, *, before: int | None = None, limit: int | None = None
    ) -> list[WinnerRevision]:
        """As `history`, with what is known of each revision, older ones than `before` only."""
        return self._revisions.find(problem, device, before=before, limit=limit)

    def every_revision(self) -> Iterator[list[Winner]]:
        """Every winner that was ever promoted or imported, oldest first, some at a time."""
        return self._revisions.pages()

    def pin(
        self, problem: Problem, device: str, revision: int, *, actor: str = LOCAL
    ) -> WinnerRevision:
        """Serve that revision until it is unpinned, whatever is promoted meanwhile.

        Raises:
            NoSuchWinner, NoSuchRevision: nothing is known about this problem, or not this one.
        """
        return self._revisions.pin(problem, device, revision, actor=actor)

    def unpin(self, problem: Problem, device: str, *, actor: str = LOCAL) -> WinnerRevision:
        """Serve the newest revision of the best origin again.

        Raises:
            NoSuchWinner, NothingToUndo: nothing is known about this problem, or none is pinned.
        """
        return self._revisions.unpin(problem, device, actor=actor)

    def roll_back(self, problem: Problem, device: str, *, actor: str = LOCAL) -> WinnerRevision:
        """Serve, pinned, the revision that was current before the present one.

        Raises:
            NoSuchWinner, NothingToUndo: nothing is known about this problem, or none was before.
        """
        return self._revisions.roll_back(problem, device, actor=actor)

    def sequence(self) -> int:
        """A number that grows whenever any answer changes."""
        return self._winners.sequence()

    def add_pack(
        self, pack_hash: str, toolchain: str, kernels: Sequence[AnyKernel | None], size: int
    ) -> None:
        """Record a compiled pack of `size` bytes, its kernels in its own order.

        None stands for a kernel of a pack from elsewhere that nothing here has described.
        """
        self._packs.add(pack_hash, toolchain, kernels, size)

    def remove_pack(self, pack_hash: str, *, actor: str = SYSTEM) -> None:
        """Forget a pack whose file is gone or damaged; winners no longer name it either."""
        self._packs.remove(pack_hash, actor=actor)

    def winners_packs(self) -> set[str]:
        """Hashes of the packs that clients fetch: current winners' own and their kernels'."""
        return self._packs.of_winners()

    def pack_for(self, kernel_name: str) -> str | None:
        """Hash of the newest pack that holds the kernel."""
        return self._packs.holding(kernel_name)

    def kernel(self, name: str) -> AnyKernel | None:
        """The description of a kernel that any trial, winner or pack has named."""
        return self._packs.kernel(name)

    def forget_kernels(self) -> None:
        """Read kernels' descriptions anew: another process may have put one right."""
        self.dictionary.forget_kernels()

    def devices(self) -> list[DeviceModel]:
        """Every device model that has a trial or a winner, by slug."""
        with self.database.read() as session:
            return [device_of(row) for row in session.scalars(select(DeviceRow).order_by("slug"))]

    def environments(self) -> list[Environment]:
        """Every environment that trials or winners come from, oldest first."""
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
