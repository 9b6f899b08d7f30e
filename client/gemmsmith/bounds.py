"""How much is taken from a service or a file that may be anybody's.

A body is counted as it arrives and as it unfolds: what is too large is refused before it is in
memory, whatever its headers say of its size. Only gzip is asked for and unfolded, once, in pieces:
other encodings unfold a thousand times over before anybody can count.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from gemmsmith.http.replies import NoAnswer, Reply, Response

GZIP = "gzip"
"""What `Accept-Encoding` says."""

_PIECE = 2**20
_GZIP_FORMAT = 16 + zlib.MAX_WBITS


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """The most that is taken, in bytes where nothing else is said.

    Attributes:
        answer_bytes: an answer that is none of the following; one to 256 lookups has 0.5 MB.
        snapshot_bytes: a snapshot; 200,000 winners have about 150 MB.
        pack_bytes: a kernel pack.
        event_bytes: one event of a job's stream.
        listing_bytes: all pages of one listing together; a million trials have about 700 MB.
        pages: pages of one listing.

    Raises:
        ValueError: a bound is not a positive integer.
    """

    answer_bytes: int = 16 * 2**20
    snapshot_bytes: int = 256 * 2**20
    pack_bytes: int = 512 * 2**20
    event_bytes: int = 2**20
    listing_bytes: int = 2**30
    pages: int = 100_000

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{field.name} must be a positive integer, got {value!r}")


BOUNDS = Bounds()
"""What holds unless something else is said."""


def exceeded(what: str, bound: str, bounds: Bounds) -> str:
    """What to tell people about something that is larger than it may be."""
    return (
        f"{what} exceeds {bound}={getattr(bounds, bound)}: if that is expected, raise the limit "
        f"with bounds=Bounds({bound}=…) of gemmsmith"
    )


class BoundedBody:
    """The body of a response, as it arrives.

    Args:
        status: of the response, with `headers`, whose names are in lower case.
        bound: name of the bound of `bounds` that holds for it.
    """

    def __init__(self, status: int, headers: Mapping[str, str], bound: str, bounds: Bounds) -> None:
        self._status = status
        self._headers = headers
        self._limit: int = getattr(bounds, bound)
        self._too_large = exceeded("the answer's body", bound, bounds)
        self._content = bytearray()
        self._arrived = 0
        self._refusal: str | None = None
        self._broken = False
        self._gzip = None
        encoding = headers.get("content-encoding", "").strip().lower()
        if encoding == GZIP:
            self._gzip = zlib.decompressobj(_GZIP_FORMAT)
        elif encoding not in ("", "identity"):
            self._refusal = f"its body is encoded as {encoding[:40]!r}, which was not asked for"
        declared = headers.get("content-length", "")
        if declared.isdecimal() and (len(declared) > 18 or int(declared) > self._limit):
            self._refusal = self._too_large

    def take(self, piece: bytes) -> bool:
        """Add what arrived; whether more of it is wanted."""
        if self._refusal is not None or self._broken:
            return False
        self._arrived += len(piece)
        if self._arrived > self._limit:  # much may arrive that unfolds to nothing
            return self._refuse()
        try:
            for part in self._unfolded(piece):
                self._content += part
                if len(self._content) > self._limit:
                    return self._refuse()
        except zlib.error:
            self._broken = True
            return False
        return True

    def _refuse(self) -> bool:
        self._refusal = self._too_large
        self._content.clear()
        return False

    def _unfolded(self, piece: bytes) -> Iterator[bytes]:
        if self._gzip is None:
            yield piece
            return
        while part := self._gzip.decompress(piece, _PIECE):
            yield part
            piece = self._gzip.unconsumed_tail
        if self._gzip.unused_data:
            raise zlib.error("something follows the end of the compressed stream")

    def reply(self) -> Reply:
        """The response, once `take` wants no more or there is none."""
        cut = self._content and self._gzip is not None and not self._gzip.eof
        if self._broken or cut:
            return NoAnswer(reason="the body is damaged or cut off")
        return Response(
            status=self._status,
            headers=self._headers,
            body=bytes(self._content),
            refusal=self._refusal,
        )
