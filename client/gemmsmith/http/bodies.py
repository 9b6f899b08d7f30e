"""Bodies of responses, with a size limit.

The size is counted while a body arrives and while it is decompressed, so a body that is too large
is rejected before it fills the memory, whatever its headers say. Only a single gzip encoding is
accepted, and it is decompressed in pieces.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping

from gemmsmith.core.bounds import Bounds, exceeded
from gemmsmith.http.replies import NoAnswer, Reply, Response

GZIP = "gzip"
"""The value of `Accept-Encoding`."""

_PIECE = 2**20
_GZIP_FORMAT = 16 + zlib.MAX_WBITS


class BoundedBody:
    """The body of a response while it arrives.

    Args:
        status: status of the response.
        headers: headers of the response, with names in lower case.
        bound: name of the attribute of `bounds` that limits the body.
    """

    def __init__(self, status: int, headers: Mapping[str, str], bound: str, bounds: Bounds) -> None:
        self._status = status
        self._headers = headers
        self._limit: int = getattr(bounds, bound)
        self._too_large = exceeded("the answer's body", bound, bounds)
        self._content = bytearray()
        self._arrived = 0
        self._reason: str | None = None
        self._broken = False
        self._gzip = None
        encoding = headers.get("content-encoding", "").strip().lower()
        if encoding == GZIP:
            self._gzip = zlib.decompressobj(_GZIP_FORMAT)
        # With nested encodings a piece could grow a thousandfold before it is counted.
        elif encoding not in ("", "identity"):
            self._reason = f"its body is encoded as {encoding[:40]!r}, which was not asked for"
        declared = headers.get("content-length", "")
        if declared.isdecimal() and (len(declared) > 18 or int(declared) > self._limit):
            self._reason = self._too_large

    def take(self, piece: bytes) -> bool:
        """Add a piece. Returns False if the body needs no further pieces."""
        if self._reason is not None or self._broken:
            return False
        self._arrived += len(piece)
        if self._arrived > self._limit:  # compressed data may be large and decompress to nothing
            return self._reject()
        try:
            for part in self._decompressed(piece):
                self._content += part
                if len(self._content) > self._limit:
                    return self._reject()
        except zlib.error:
            self._broken = True
            return False
        return True

    def _reject(self) -> bool:
        self._reason = self._too_large
        self._content.clear()
        return False

    def _decompressed(self, piece: bytes) -> Iterator[bytes]:
        if self._gzip is None:
            yield piece
            return
        while part := self._gzip.decompress(piece, _PIECE):
            yield part
            piece = self._gzip.unconsumed_tail
        if self._gzip.unused_data:
            raise zlib.error("something follows the end of the compressed stream")

    def reply(self) -> Reply:
        """The response, after the last piece or after `take` has returned False."""
        cut = self._content and self._gzip is not None and not self._gzip.eof
        if self._broken or cut:
            return NoAnswer(reason="the body is damaged or cut off")
        return Response(
            status=self._status,
            headers=self._headers,
            body=bytes(self._content),
            reason=self._reason,
        )
