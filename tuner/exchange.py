"""Winners as files: what `gemmsmith export` writes and `gemmsmith import` reads.

JSON lines: a header, then one winner a line, in a fixed order, so that a re-tuned suite shows as
a readable difference. The header has the file's `schema`: files of every earlier one are read, of a
newer one refused. An import never replaces winners that this installation measured itself, and
importing a file twice changes nothing.

A file is not trusted: each winner must be possible (`tuner.claims`), and is answered only if a
trusted key signed it. If a line cannot be true, or was altered after it was signed, the whole file
is refused; the error names all such lines.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gemmsmith.core.choices import member
from gemmsmith.core.device import DeviceModel, Environment
from gemmsmith.core.kernel import AnyKernel, Kernel
from gemmsmith.core.numerics import Numerics, is_invariant
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
"""Increased if older readers would misread a file; not for signatures, which they skip.

1: called its schema `version`.
2: calls it `schema`, as everything that is exported does.
3: has `power_penalty` (`price` before) and the ratio in each regime.
"""

LONGEST_LINE = 2**18
"""Bytes. The longest of the shipped winners has 3,700."""
_NAMED = 20
"""Lines that an error names; it only counts further ones."""
_AT_ONCE = 1000
"""Winners in memory together, beside the file: 200,000 would take gigabytes."""

T = TypeVar("T")


class ExchangeError(TunerError):
    """A winners file that is refused; the message names the lines and the reasons."""


class _Header(msgspec.Struct, frozen=True, omit_defaults=True):
    format: str
    count: int
    schema: int = 0
    version: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported:
    """How many of a file's winners were treated how.

    Attributes:
        added: answered from now on.
        kept: changed nothing: known already, or a better one is current.
        unbelieved: stored but not answered, because no trusted key signed them.
        keys: identifiers of the unknown keys that signed such winners.
    """

    added: int
    kept: int
    unbelieved: int = 0
    keys: tuple[str, ...] = ()


def of_types(
    winners: Iterable[Winner], dtypes: Sequence[str], numerics: str | None = None
) -> list[Winner]:
    """Winners of these `dtype`s, with the grouped and fused ones of suites tuned for these types.

    All winners if `dtypes` is empty. With `numerics`, only those that have its order of sums, which
    a `dtype` may leave out.

    Raises:
        InvalidProblem: there is no such `numerics`.
    """
    if numerics is not None:
        member("numerics", Numerics, numerics)
        winners = [winner for winner in winners if is_invariant(winner.problem.operation)]
    kept = []
    for winner in winners:
        named = [winner.problem.operation]
        if numerics is not None:
            named.append(replace(named[0], summation=None))
        if not dtypes or any({o.dtype, o.of_suites.dtype} & {*dtypes} for o in named):
            kept.append(winner)
    return kept


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
    """Sign every winner of a file, replacing earlier signatures; the number of winners.

    Raises:
        ExchangeError: not a winners file, or with winners that cannot be true.
    """
    file = _File.open(path)
    problems = _Problems(path)
    winners = []
    for number, line in file.content:
        if (winner := problems.read(number, line, file.schema)) is not None:
            problems.check(number, winner)
            winners.append(signed(winner, signer))
    problems.refuse()
    write_winners(path, winners)
    return len(winners)


def import_winners(
    store: Store, path: Path, trusted: Trusted, *, unsigned: bool = False
) -> Imported:
    """Import the winners of `path` into the store: all, or none if one is wrong.

    Args:
        store: gets them in one transaction.
        path: JSON lines, as `export_winners` writes them.
        trusted: the keys whose signatures are trusted.
        unsigned: answer winners without a trusted signature, too.

    Raises:
        ExchangeError: not a winners file, written by a newer gemmsmith, truncated, or with winners
            that cannot be true or were altered.
    """
    file = _File.open(path)
    checked = _check(store, file, trusted, path)
    kernels = (entry for entry in checked.named if isinstance(entry, Kernel))
    taken = Taken()
    if checked.news or store.imports.misdescribed(kernels):
        taken = store.imports.take(_news(file, checked.news), checked.named, unsigned=unsigned)
    kept = len(file.content) - taken.added - taken.unbelieved
    if taken.written:
        numbers = {"added": taken.added, "kept": kept, "unbelieved": taken.unbelieved}
        store.audit.add(Action.PROMOTED, str(path)[-300:], actor="import", **numbers)
    return Imported(
        added=taken.added,
        kept=kept,
        unbelieved=taken.unbelieved,
        keys=tuple(sorted(checked.unknown_keys)) if taken.unbelieved else (),
    )


def read_winners(path: Path) -> list[Winner]:
    """The winners of a file, without checking what they claim.

    Raises:
        ExchangeError: not a winners file, written by a newer gemmsmith, or truncated.
    """
    file = _File.open(path)
    problems = _Problems(path)
    winners = [problems.read(number, line, file.schema) for number, line in file.content]
    problems.refuse()
    return [winner for winner in winners if winner is not None]


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    """A winners file in memory: changes of the file between check and import have no effect.

    Attributes:
        content: its lines behind the header, with their numbers in the file. Blank lines, and a
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


class _Problems:
    """The reasons why lines of a file are refused, gathered."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reasons: list[tuple[int, str]] = []

    def add(self, number: int, reason: object) -> None:
        self._reasons.append((number, str(reason)))

    def read(self, number: int, line: bytes, schema: int) -> Winner | None:
        """The winner of a line; None if it cannot be read, which is noted."""
        if len(line) > LONGEST_LINE:
            self.add(number, f"{len(line)} bytes are more than a winner takes")
            return None
        try:
            return _winner(line, schema)
        except (msgspec.MsgspecError, RecursionError) as error:
            self.add(number, error)
            return None

    def check(self, number: int, winner: Winner) -> bool:
        """Whether a winner can be true; the reason is noted if not."""
        from tuner import claims  # kernels' names take CUTLASS's generator: half a second

        reason = claims.reason(winner)
        if reason is not None:
            self.add(number, reason)
        return reason is None

    def refuse(self) -> None:
        """Raise ExchangeError if a reason was noted."""
        if not self._reasons:
            return
        named = sorted(self._reasons)[:_NAMED]
        lines = [f"{self._path} line {number}: {reason}" for number, reason in named]
        if more := len(self._reasons) - len(named):
            lines.append(f"and {more} more lines")
        raise ExchangeError("\n".join([*lines, "nothing of this file was taken"]))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Checked:
    """The result of checking a file.

    Attributes:
        news: the winners that the store has to import, by their line: digest, and whether a
            trusted key signed them.
        named: every kernel, device model and environment of the file, once.
        unknown_keys: keys that signed winners and are not trusted.
    """

    news: dict[int, tuple[str, bool]]
    named: set[AnyKernel | DeviceModel | Environment]
    unknown_keys: set[str]


def _check(store: Store, file: _File, trusted: Trusted, path: Path) -> _Checked:
    """Check every line before anything is written; raises ExchangeError."""
    checked = _Checked(news={}, named=set(), unknown_keys=set())
    problems = _Problems(path)
    places: dict[object, int] = {}
    for batch in _batches(iter(file.content)):
        read = [(number, problems.read(number, line, file.schema)) for number, line in batch]
        winners = [(number, w, fingerprint(w)) for number, w in read if w is not None]
        settled = store.imports.settled([(winner, digest) for _, winner, digest in winners])
        for number, winner, digest in winners:
            first = places.setdefault((winner.problem, winner.device.slug), number)
            if first != number:
                problems.add(number, f"{winner.problem} is in line {first} already")
                continue
            checked.named.update((winner.device, winner.environment))
            if winner.candidate:
                checked.named.add(winner.candidate.kernel)
            if digest in settled or not problems.check(number, winner):
                continue
            try:
                believed = is_believed(winner, trusted)
            except Untrusted as error:
                problems.add(number, error)
                continue
            if winner.signature is not None and not believed:
                checked.unknown_keys.add(winner.signature.key)
            checked.news[number] = (digest, believed)
    problems.refuse()
    return checked


def _news(file: _File, news: dict[int, tuple[str, bool]]) -> Iterator[list[Foreign]]:
    """The winners to import, in batches; decoded again, as all of them do not fit into memory."""
    lines = ((number, line) for number, line in file.content if number in news)
    for batch in _batches(lines):
        yield [
            Foreign(
                winner=_winner(line, file.schema), digest=news[number][0], believed=news[number][1]
            )
            for number, line in batch
        ]


def _batches(items: Iterator[T]) -> Iterator[list[T]]:
    while batch := list(islice(items, _AT_ONCE)):
        yield batch


def _winner(line: bytes, schema: int) -> Winner:
    if schema >= 3:
        return msgspec.json.decode(line, type=Winner)
    values = msgspec.json.decode(line, type=dict[str, Any])
    values["power_penalty"] = values.pop("price", None)
    return msgspec.convert(values, Winner)


def write_winners(path: Path, winners: Sequence[Winner]) -> None:
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
