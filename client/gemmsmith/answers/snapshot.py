"""A device model's winners in memory: one consistent set to choose from for a whole run.

A snapshot is one JSON document, and its revision is the hash of the winners in it: processes with
the same revision make the same choices, however they got the document. It never changes;
`gemmsmith.winners.lookup` replaces it by a newer snapshot. A document whose winners do not match
its revision is refused as a whole, as SnapshotCorrupt. Winners that this library does not know are
skipped: their problems have no winner here. The revision counts them too, so that processes with
libraries of different ages agree on it.

The maker of a snapshot signs it. The signature binds every pack to the problem, the kernel and the
launch that name it, and to the environment of the measurement.

Few neighbours' kernels are run (`gemmsmith.core.neighbours`), and a neighbour's figures are not
those of the problem. In practice M varies, the tokens of a batch, while N and K belong to a layer.
Distance counts all three alike, as in `GET /best`: a layer of another width is no nearer than the
same layer at another M.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Final

import msgspec

from gemmsmith.answers import document as documents
from gemmsmith.answers import understood
from gemmsmith.answers.cache import open_entry
from gemmsmith.core.config import Config, Use
from gemmsmith.core.legality import refusal
from gemmsmith.core.neighbours import NEIGHBOURS, Neighbourhood, answering, run_reach
from gemmsmith.core.problem import Problem
from gemmsmith.errors import SnapshotCorrupt
from gemmsmith.files import publish, write
from gemmsmith.signing import PublicKey, Purpose, Signer, Trusted

log = logging.getLogger("gemmsmith")


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The kernel that a lookup chose to run.

    Attributes:
        config: kernel, launch and the hash of the pack that holds the kernel, never None here.
        measured: the problem on which it was measured, and was faster than the default.
        distance: 0.0 for exactly this problem; else the log2 distance of `Problem.distance`.
        deterministic: whether the order of every sum is fixed: the same inputs, the same bits.
        stale: it was measured under software that no GPU of this model runs any more.
        saving_us: microseconds that a launch takes less than the default, measured in the same
            rounds; None for a neighbour's kernel, or if the service did not send it.
        time_us: microseconds of a launch; None in the same cases.
    """

    config: Config
    measured: Problem
    distance: float
    deterministic: bool
    stale: bool = False
    saving_us: float | None = None
    time_us: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One winner of a snapshot.

    Attributes:
        use: whether to run `config` or torch's own operator.
        config: the best candidate, if there was one; its pack is None if it is not compiled.
        deterministic: of the candidate; False without a candidate.
        stale: as in `Answer`. Early services do not send this field and those below.
        saving_us, time_us: as in `Choice`.
        environment: `Environment.digest` of where it was measured.
    """

    problem: Problem
    use: Use
    config: Config | None = None
    deterministic: bool = False
    stale: bool = False
    saving_us: float | None = None
    time_us: float | None = None
    environment: str = ""

    @property
    def kernel_name(self) -> str | None:
        return self.config.kernel.name if self.config else None


class Snapshot:
    """One consistent set of a device model's winners. Immutable, and safe to share.

    Attributes:
        device: slug of the device model.
        revision: hash of the content: the same winners, packs included, the same revision.
        document: the snapshot as bytes, for `parse`.
        signature: of its maker, not checked; None if it is not signed.
        rows: the winners that this library understands, in the order of their problems.
        skipped: how many others there are: of a newer service's operations or backends, say.
    """

    __slots__ = (
        "_alike", "_digest", "_exact", "device", "document", "revision", "rows", "signature",
        "skipped",
    )  # fmt: skip

    def __init__(self, document: bytes) -> None:
        content = documents.read(document)
        what = f"winners of snapshot {content.revision[:16]}"
        self.device: Final = content.device
        self.revision: Final = content.revision
        self.document: Final = document
        self.signature: Final = content.signature
        self._digest: Final = content.digest
        self.rows: Final = tuple(understood.each(content.rows, Row, what))
        self.skipped: Final = len(content.rows) - len(self.rows)
        self._exact: Final = {row.problem: row for row in self.rows}
        self._alike: Final = Neighbourhood[Row]()
        for order, row in enumerate(self._exact.values()):
            self._alike.put(row.problem, order, row)

    @classmethod
    def parse(cls, document: bytes) -> Snapshot:
        """The snapshot that a document holds.

        Raises:
            SnapshotCorrupt: it does not hold one, or another than it says.
        """
        return cls(document)

    @classmethod
    def of(cls, device: str, rows: Iterable[Row], signer: Signer | None = None) -> Snapshot:
        """The snapshot of these winners of a device model, in any order; signed by `signer`."""
        written = [msgspec.json.encode(row) for row in sorted(rows, key=lambda row: row.problem)]
        head = documents.Head.of(device, written, signer)
        return cls(b"".join(documents.whole(head, written)))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Snapshot:
        """Read what `save` wrote.

        Raises:
            SnapshotCorrupt: the file does not hold a snapshot.
            OSError: there is no such file, or it cannot be read.
        """
        return cls(Path(path).read_bytes())

    def save(self, path: str | PathLike[str]) -> None:
        """Write the document to a file, atomically.

        Raises:
            OSError: it cannot be written; what was there before stays.
        """
        write(Path(path), self.document)

    def check(self, trusted: Trusted) -> PublicKey:
        """Whose snapshot this is.

        Raises:
            Untrusted: the key is not trusted, or the signature is of other winners.
        """
        return trusted.check(
            Purpose.SNAPSHOT, documents.statement(self.device, self._digest), self.signature
        )

    @property
    def tag(self) -> str:
        return documents.tag_of(self.revision, self.signature)

    def find(self, problem: Problem) -> Choice | None:
        """What to run for `problem`; None means torch's own operator.

        The exact winner, else that of the nearest problem within MAX_DISTANCE whose kernel is
        legal here, if that is run where it was not measured (`gemmsmith.core.neighbours`). For an
        operation that demands an order of sums, any winner of the operation that is compiled and
        legal here. Torch's own operator has other bits, so None means that nothing may run.
        Returns None without either, if the winner is the default, and if its kernel is not
        compiled: then no farther neighbour replaces it, as in `GET /best`.
        """
        has_order = problem.operation.summation is not None
        row = self._row(problem, _is_compiled) if has_order else self.row_for(problem)
        if row is None or row.use.is_default or row.config is None or not _is_compiled(row):
            return None
        return Choice(
            config=row.config,
            measured=row.problem,
            distance=problem.distance(row.problem),
            deterministic=row.deterministic,
            stale=row.stale,
            saving_us=row.saving_us if row.problem == problem else None,
            time_us=row.time_us if row.problem == problem else None,
        )

    def row_for(self, problem: Problem) -> Row | None:
        """The winner that decides about `problem`, cuBLAS or not, compiled or not.

        Returns None if the problem is not tuned and no neighbour's kernel is to be run.
        """
        return self._row(problem, lambda _: True)

    def _row(self, problem: Problem, may_answer: Callable[[Row], bool]) -> Row | None:
        exact, reach = self._exact.get(problem), run_reach(problem)
        if not reach or (exact is not None and may_answer(exact)):
            return exact
        near = self._alike.nearest(problem, NEIGHBOURS, reach)

        def is_legal(row: Row) -> bool:
            is_kernel = row.config is not None and refusal(row.config, problem) is None
            return is_kernel and may_answer(row)

        answer = answering(problem, near, is_legal)
        if answer is None:
            return None
        _, row, use = answer
        return row if use is row.use else None

    def packs(self) -> tuple[str, ...]:
        """Hashes of the packs that choices name, each once."""
        named = (
            row.config.pack
            for row in self.rows
            if not row.use.is_default and row.config is not None and row.config.pack is not None
        )
        return tuple(dict.fromkeys(named))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Snapshot) and (self.revision, self.signature) == (
            other.revision,
            other.signature,
        )

    def __hash__(self) -> int:
        return hash(self.revision)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Snapshot, (self.document,))

    def __repr__(self) -> str:
        return f"<Snapshot {self.revision[:16]} of {self.device}: {len(self.rows)} winners>"


def _is_compiled(row: Row) -> bool:
    return row.config is not None and row.config.pack is not None


class Shelf:
    """The last snapshot that a service gave, on disk, for a start while it is away.

    `folder` is the cache's; None keeps nothing. A file that cannot be read, or has more than `most`
    bytes, is ignored. A file that cannot be written is a warning in the log.
    """

    def __init__(
        self, folder: Path | str | None, url: str, device: str | None, arch: str | None, most: int
    ) -> None:
        self._most = most
        self._path: Path | None = None
        if folder is not None:
            key = hashlib.sha256(msgspec.json.encode([url, device, arch])).hexdigest()[:40]
            self._path = Path(folder) / "snapshots" / f"{key}.json"

    def load(self) -> Snapshot | None:
        """What was stored last."""
        if self._path is None:
            return None
        try:
            with open_entry(self._path, self._most) as file:
                return Snapshot.parse(file.read())
        except (OSError, SnapshotCorrupt):
            return None

    def store(self, snapshot: Snapshot) -> None:
        """Replace what was stored."""
        if self._path is None:
            return
        try:
            publish(self._path, snapshot.document)
        except OSError as error:
            log.warning("the snapshot is not cached: %s: %s", self._path, error.strerror)
