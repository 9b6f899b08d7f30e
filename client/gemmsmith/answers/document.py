"""A snapshot as it is written: a head, and a row of JSON for each winner. Rows are not read here.

The revision is the hash of the rows as they are written, so the same rows have the same revision.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple, TypeVar

import msgspec

from gemmsmith.errors import SnapshotCorrupt
from gemmsmith.signing import Purpose, Signature, Signer

FORMAT = 1
"""Raised when the meaning of a document changes; documents of other formats are refused."""

_BYTES_PER_COMMA = 8
"""Fewest, in the winners of a document; a winner's own have 18. Of millions of empty winners each
would take more memory than it has bytes."""

_PIECE = 2**18

T = TypeVar("T")


class Document(NamedTuple):
    """A document whose rows are those of its revision.

    Attributes:
        digest: the whole hash that the revision begins.
        signature: of its maker, not checked; None if it is not signed.
    """

    device: str
    revision: str
    digest: str
    signature: Signature | None
    rows: list[msgspec.Raw]


class Head(msgspec.Struct, frozen=True, omit_defaults=True):
    """All members of a document but its winners."""

    format: int
    device: str
    revision: str
    signature: Signature | None = None

    @classmethod
    def of(cls, device: str, rows: Iterable[bytes], signer: Signer | None = None) -> Head:
        """The head for a device model's rows, in their order; signed by `signer`."""
        digest = hashlib.sha256(device.encode() + b"\n")
        for piece in _listed(rows):
            digest.update(piece)
        winners, signature = digest.hexdigest(), None
        if signer is not None:
            signature = signer.sign(Purpose.SNAPSHOT, statement(device, winners))
        return cls(FORMAT, device, _revision(winners), signature)

    @property
    def written(self) -> bytes:
        return msgspec.json.encode(self)[:-1] + b","


class _Document(Head, frozen=True, kw_only=True):
    winners: msgspec.Raw


def statement(device: str, digest: str) -> dict[str, str]:
    # The whole hash, since two documents might be made that share a revision.
    return {"device": device, "winners": digest}


def tag_of(revision: str, signature: Signature | None) -> str:
    """A document's ETag, unquoted: the revision, and the key that signed it."""
    # Winners that stay as they are under a new key are asked for again.
    return revision if signature is None else f"{revision}.{signature.key}"


def length_of(head: Head, rows: Sequence[bytes]) -> int:
    empty = sum(map(len, whole(head, ())))
    return empty + sum(map(len, rows)) + max(0, len(rows) - 1)


def whole(head: Head, rows: Iterable[bytes]) -> Iterator[bytes]:
    yield from chain([head.written + b'"winners":'], _listed(rows), [b"}"])


def read(document: bytes) -> Document:
    """What a document holds.

    Raises:
        SnapshotCorrupt: it is not a snapshot, or its rows are not those of its revision.
    """
    content = _decoded(document, _Document)
    if not content.device.isprintable():
        raise SnapshotCorrupt("the snapshot is of a device whose name cannot be printed")
    if content.format != FORMAT:
        raise SnapshotCorrupt(
            f"the snapshot has format {content.format}, this library reads {FORMAT}: let the "
            "service and the library be of one version"
        )
    winners = bytes(content.winners)
    digest = hashlib.sha256(content.device.encode() + b"\n" + winners).hexdigest()
    if content.revision != _revision(digest):
        raise SnapshotCorrupt(
            f"the snapshot's winners are not those of its revision {content.revision[:16]}: "
            "truncated or altered; fetch it again"
        )
    return Document(content.device, content.revision, digest, content.signature, _rows(winners))


def _revision(digest: str) -> str:
    return digest[:32]


def _rows(winners: bytes) -> list[msgspec.Raw]:
    if winners.count(b",") * _BYTES_PER_COMMA > len(winners):
        raise SnapshotCorrupt("the snapshot's winners cannot be read: more of them than fit")
    return _decoded(winners, list[msgspec.Raw])


def _decoded(content: bytes | msgspec.Raw, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise SnapshotCorrupt(f"not a snapshot of winners: {error}") from error


def _listed(rows: Iterable[bytes]) -> Iterator[bytes]:
    """A JSON list of the rows, in pieces that are neither many nor large."""
    parts, length, before = [b"["], 1, b""
    for row in rows:
        parts += (before, row)
        length += len(before) + len(row)
        before = b","
        if length >= _PIECE:
            yield b"".join(parts)
            parts, length = [], 0
    yield b"".join([*parts, b"]"])
