"""Winners as files: what `gemmsmith export` writes and `gemmsmith import` reads.

JSON lines: a header, then one winner a line, in a fixed order, so that a re-tuned suite shows as
a readable difference. The header has the file's `schema`: files of every earlier one are read, of a
newer one refused. A file that cannot be read is refused whole. What this installation measured
itself is never replaced by an import, and importing a file twice changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from gemmsmith.files import publish
from tuner.errors import TunerError
from tuner.store import Store
from tuner.store.audit import Action
from tuner.trial import Winner

FORMAT = "gemmsmith-winners"
SCHEMA = 3
"""Counted up when older readers would misread a file.

1: called its schema `version`.
2: calls it `schema`, as everything that is exported does.
3: calls the power penalty so (`price` before), and has the ratio in each regime.
"""


class ExchangeError(TunerError):
    """A winners file that cannot be read; the message names the line."""


class _Header(msgspec.Struct, frozen=True, omit_defaults=True):
    format: str
    count: int
    schema: int = 0
    version: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported:
    """How many answers a file changed, and how many the store kept as they were."""

    added: int
    kept: int


def export_winners(
    store: Store, path: Path, *, device: str | None = None, dtype: str | None = None
) -> int:
    """Write the current winners to `path` atomically; the number written."""
    winners = sorted(
        # Pinned or stale is what a winner is in this store.
        (replace(w, pinned=False, stale=False) for w in store.winners(device=device, dtype=dtype)),
        key=lambda w: (w.device.slug, w.problem.dtype, w.problem.layout, w.problem),
    )
    lines = [_Header(format=FORMAT, schema=SCHEMA, count=len(winners)), *winners]
    text = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    publish(path, text, durable=True, shared=True)
    return len(winners)


def import_winners(store: Store, path: Path) -> Imported:
    """Take the winners of `path` into the store.

    Raises:
        ExchangeError: not a winners file, written by a newer gemmsmith, or truncated.
    """
    winners = read_winners(path)
    added = 0
    for winner in store.unknown(winners):
        # Packs are this machine's own; a winner from elsewhere is compiled here on demand.
        pack = store.pack_for(winner.candidate.kernel.name) if winner.candidate else None
        before = store.sequence()
        store.promote(replace(winner, pack=pack), imported=True)
        added += store.sequence() != before
    if added:
        store.audit.add(
            Action.PROMOTED, str(path), actor="import", added=added, kept=len(winners) - added
        )
    return Imported(added=added, kept=len(winners) - added)


def read_winners(path: Path) -> list[Winner]:
    """Parse a winners file; raises ExchangeError as `import_winners` does."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ExchangeError(f"cannot read {path}: {error.strerror}") from None
    if not lines:
        raise ExchangeError(f"{path} is empty")
    try:
        header = msgspec.json.decode(lines[0], type=_Header)
    except msgspec.MsgspecError as error:
        raise ExchangeError(f"{path} is not a winners file: {error}") from None
    if header.format != FORMAT:
        raise ExchangeError(f"{path} is not a winners file but {header.format!r}")
    schema = header.schema or header.version
    if not 1 <= schema <= SCHEMA:
        raise ExchangeError(
            f"{path} has schema {schema}, this gemmsmith reads 1 … {SCHEMA}: upgrade gemmsmith"
        )
    winners = []
    for number, line in enumerate(lines[1:], 2):
        try:
            winners.append(_winner(line, schema))
        except msgspec.MsgspecError as error:
            raise ExchangeError(f"{path} line {number}: {error}") from None
    if len(winners) != header.count:
        raise ExchangeError(
            f"{path} holds {len(winners)} winners, its header says {header.count}: truncated?"
        )
    return winners


def _winner(line: bytes, schema: int) -> Winner:
    if schema >= 3:
        return msgspec.json.decode(line, type=Winner)
    found = msgspec.json.decode(line, type=dict[str, Any])
    found["power_penalty"] = found.pop("price", None)
    return msgspec.convert(found, Winner)
