"""Winners as files: what `gemmsmith export` writes and `gemmsmith import` reads.

JSON lines: a header, then one winner a line, in a fixed order, so that a re-tuned suite shows as
a readable difference. The header has the file's `schema`: files of every earlier one are read, of a
newer one refused. What this installation measured itself is never replaced by an import, and
importing a file twice changes nothing.

Whoever wrote a file is not believed: each winner must be possible (`tuner.claims`), and is answered
only if it is signed by somebody who is believed. One line that cannot be true, or was altered after
it was signed, and the file is refused whole; the error names all such lines.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gemmsmith.core.device import DeviceModel, Environment
from gemmsmith.core.kernel import AnyKernel, Kernel
from gemmsmith.errors import Untrusted
from gemmsmith.files import write
from gemmsmith.signing import Signer, Trusted
from tuner.errors import TunerError
from tuner.store import Store
from tuner.store.audit import Action
from tuner.store.imports import Foreign, Taken
from tuner.store.statement import fingerprint, is_believed, signed
from tuner.trial import Winner

FORMAT = "gemmsmith-winners"
SCHEMA = 3
"""Counted up when older readers would misread a file. Signatures, which they skip, are no reason.

1: called its schema `version`.
2: calls it `schema`, as everything that is exported does.
3: calls the power penalty so (`price` before), and has the ratio in each regime.
"""

LONGEST_LINE = 2**18
"""Bytes. The longest of the shipped winners has 3,700."""
_TOLD = 20
"""Lines that an error names; of more it says how many."""
_AT_ONCE = 1000
"""Winners held in memory beside the file: 200,000 would take gigabytes."""

T = TypeVar("T")


class ExchangeError(TunerError):
    """A winners file that is not taken; the message names the lines and what is wrong with them."""


class _Header(msgspec.Struct, frozen=True, omit_defaults=True):
    format: str
    count: int
    schema: int = 0
    version: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported:
    """What became of a file's winners.

    Attributes:
        added: that are answered from now on.
        kept: that changed nothing: known already, or there is a better one.
        unbelieved: that are stored and not answered, as nobody who is believed signed them.
        keys: identifiers of the unknown keys that signed such ones.
    """

    added: int
    kept: int
    unbelieved: int = 0
    keys: tuple[str, ...] = ()


def of_types(winners: Iterable[Winner], dtypes: Sequence[str]) -> list[Winner]:
    """Those of these `dtype`s, and the grouped and fused ones that a suite tuned for them has; all
    if none are named.
    """
    return [
        winner
        for winner in winners
        if not dtypes
        or winner.problem.dtype in dtypes
        or winner.problem.operation.of_suites.dtype in dtypes
    ]


def export_winners(
    store: Store, path: Path, *, device: str | None = None, dtype: str | None = None
) -> int:
    """Write the current winners to `path` atomically; the number written."""
    winners = sorted(
        of_types(store.winners(device=device), [dtype] if dtype else []),
        key=lambda w: (w.device.slug, w.problem.dtype, w.problem.layout, w.problem),
    )
    write_winners(path, winners)
    return len(winners)


def sign_winners(path: Path, signer: Signer) -> int:
    """Sign every winner of a file, in place of whoever did before; the number of winners.

    Raises:
        ExchangeError: not a winners file, or one that nobody should sign.
    """
    file = _File.open(path)
    problems = _Problems(path)
    found = []
    for number, line in file.lines():
        if (winner := problems.read(number, line, file.schema)) is not None:
            problems.doubt(number, winner)
            found.append(signed(winner, signer))
    problems.refuse()
    write_winners(path, found)
    return len(found)


def import_winners(
    store: Store, path: Path, trusted: Trusted, *, unsigned: bool = False
) -> Imported:
    """Take the winners of `path` into the store: all, or none if there is anything wrong.

    Args:
        store: it is one transaction there.
        path: JSON lines, as `export_winners` writes them.
        trusted: whose signatures are believed.
        unsigned: answer what nobody who is believed has signed, too.

    Raises:
        ExchangeError: not a winners file, written by a newer gemmsmith, truncated, or with winners
            that cannot be true or were altered.
    """
    file = _File.open(path)
    looked = _look(store, file, trusted, path)
    kernels = (each for each in looked.named if isinstance(each, Kernel))
    taken = Taken()
    if looked.wanted or store.imports.misdescribed(kernels):
        taken = store.imports.take(_again(file, looked.wanted), looked.named, unsigned=unsigned)
    kept = file.count - taken.added - taken.unbelieved
    if taken.written:
        numbers = {"added": taken.added, "kept": kept, "unbelieved": taken.unbelieved}
        store.audit.add(Action.PROMOTED, str(path)[-300:], actor="import", **numbers)
    return Imported(
        added=taken.added,
        kept=kept,
        unbelieved=taken.unbelieved,
        keys=tuple(sorted(looked.strangers)) if taken.unbelieved else (),
    )


def read_winners(path: Path) -> list[Winner]:
    """The winners of a file, whatever they claim.

    Raises:
        ExchangeError: not a winners file, written by a newer gemmsmith, or truncated.
    """
    file = _File.open(path)
    problems = _Problems(path)
    found = [problems.read(number, line, file.schema) for number, line in file.lines()]
    problems.refuse()
    return [winner for winner in found if winner is not None]


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    """A winners file in memory: what is checked is what is taken, whoever writes to it meanwhile.

    Attributes:
        content: its lines but for the header, and their numbers in the file. Blank lines, and a
            byte-order mark, which editors add, are left out.
    """

    content: Sequence[tuple[int, bytes]]
    schema: int

    @classmethod
    def open(cls, path: Path) -> _File:
        """Read it; raises ExchangeError as `read_winners` does."""
        try:
            text = path.read_bytes().removeprefix(codecs.BOM_UTF8)
        except OSError as error:
            raise ExchangeError(f"cannot read {path}: {error.strerror}") from None
        lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        if not lines:
            raise ExchangeError(f"{path} is empty")
        try:
            header = msgspec.json.decode(lines[0][1], type=_Header)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ExchangeError(f"{path} is not a winners file: {error}") from None
        if header.format != FORMAT:
            raise ExchangeError(f"{path} is not a winners file but {header.format!r:.80}")
        schema = header.schema or header.version
        if not 1 <= schema <= SCHEMA:
            raise ExchangeError(
                f"{path} has schema {schema}, this gemmsmith reads 1 … {SCHEMA}: upgrade gemmsmith"
            )
        if len(lines) - 1 != header.count:
            raise ExchangeError(
                f"{path} holds {len(lines) - 1} winners, its header says {header.count}: truncated?"
            )
        return cls(content=lines[1:], schema=schema)

    @property
    def count(self) -> int:
        """How many winners there are."""
        return len(self.content)

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Each winner's line and its number in the file."""
        return iter(self.content)


class _Problems:
    """What is wrong with the lines of a file, gathered."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: list[tuple[int, str]] = []

    def add(self, number: int, reason: object) -> None:
        """Note what is wrong with a line."""
        self._found.append((number, str(reason)))

    def read(self, number: int, line: bytes, schema: int) -> Winner | None:
        """The winner of a line; None if it is none."""
        if len(line) > LONGEST_LINE:
            self.add(number, f"{len(line)} bytes are more than a winner takes")
            return None
        try:
            return _winner(line, schema)
        except (msgspec.MsgspecError, RecursionError) as error:
            self.add(number, error)
            return None

    def doubt(self, number: int, winner: Winner) -> bool:
        """Whether a winner cannot be true; why is noted."""
        from tuner import claims  # kernels' names take CUTLASS's generator: half a second

        reason = claims.reason(winner)
        if reason is not None:
            self.add(number, reason)
        return reason is not None

    def refuse(self) -> None:
        """Raise ExchangeError if there is anything wrong."""
        if not self._found:
            return
        told = sorted(self._found)[:_TOLD]
        lines = [f"{self._path} line {number}: {reason}" for number, reason in told]
        if more := len(self._found) - len(told):
            lines.append(f"and {more} more lines")
        raise ExchangeError("\n".join([*lines, "nothing of this file was taken"]))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Looked:
    """What a first look at a file says.

    Attributes:
        wanted: digest, and whether it is believed, of the winners that the store has to be given,
            by their place.
        named: every kernel, device model and environment of the file, once.
        strangers: keys that are not believed.
    """

    wanted: dict[int, tuple[str, bool]]
    named: set[AnyKernel | DeviceModel | Environment]
    strangers: set[str]


def _look(store: Store, file: _File, trusted: Trusted, path: Path) -> _Looked:
    """Look at every line before anything is written; raises ExchangeError."""
    looked = _Looked(wanted={}, named=set(), strangers=set())
    problems = _Problems(path)
    places: dict[object, int] = {}
    for batch in _batches(file.lines()):
        read = [(number, problems.read(number, line, file.schema)) for number, line in batch]
        found = [(number, w, fingerprint(w)) for number, w in read if w is not None]
        settled = store.imports.settled([(winner, digest) for _, winner, digest in found])
        for number, winner, digest in found:
            first = places.setdefault((winner.problem, winner.device.slug), number)
            if first != number:
                problems.add(number, f"{winner.problem} is in line {first} already")
                continue
            looked.named.update((winner.device, winner.environment))
            if winner.candidate:
                looked.named.add(winner.candidate.kernel)
            if digest in settled or problems.doubt(number, winner):
                continue
            try:
                believed = is_believed(winner, trusted)
            except Untrusted as error:
                problems.add(number, error)
                continue
            if winner.signature is not None and not believed:
                looked.strangers.add(winner.signature.key)
            looked.wanted[number] = (digest, believed)
    problems.refuse()
    return looked


def _again(file: _File, wanted: dict[int, tuple[str, bool]]) -> Iterator[list[Foreign]]:
    """The winners that are wanted, a few at a time."""
    lines = ((number, line) for number, line in file.lines() if number in wanted)
    for batch in _batches(lines):
        yield [
            Foreign(
                winner=_winner(line, file.schema),
                digest=wanted[number][0],
                believed=wanted[number][1],
            )
            for number, line in batch
        ]


def _batches(items: Iterator[T]) -> Iterator[list[T]]:
    while batch := list(islice(items, _AT_ONCE)):
        yield batch


def _winner(line: bytes, schema: int) -> Winner:
    if schema >= 3:
        return msgspec.json.decode(line, type=Winner)
    found = msgspec.json.decode(line, type=dict[str, Any])
    found["power_penalty"] = found.pop("price", None)
    return msgspec.convert(found, Winner)


def write_winners(path: Path, winners: Sequence[Winner]) -> None:
    """Write a winners file, atomically."""
    header = msgspec.json.encode(_Header(format=FORMAT, schema=SCHEMA, count=len(winners)))
    text = b"".join(line + b"\n" for line in (header, *map(_line, winners)))
    write(path, text)


def _line(winner: Winner) -> bytes:
    # Whether a winner is pinned or stale is true of one store only.
    values = msgspec.to_builtins(replace(winner, pinned=False, stale=False))
    del values["origin"], values["digest"]
    if winner.signature is None:
        del values["signature"]
    # The order of every file so far: a file that is written again must not change by a byte.
    first = {name: values.pop(name) for name in ("problem", "device", "environment")}
    return msgspec.json.encode(first | values)
