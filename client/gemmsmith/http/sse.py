"""Server-sent events, parsed as they arrive (WHATWG HTML, section 9.2.6).

Feed bytes in any pieces, take whole events out. Nothing is lost at a cut: an event that was not
finished when the connection dropped is not reported, and the next connection asks for everything
after `last_id`.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One dispatched event."""

    id: str
    event: str
    data: str


class EventTooLong(Exception):
    """An event that is longer than it may be, and may never end."""


class EventParser:
    """Incremental parser. `last_id` is what `Last-Event-ID` must say to resume.

    `most` is how many characters an event may have, its unfinished line included.
    """

    def __init__(self, last_id: str = "", most: int = 2**20) -> None:
        self.last_id = last_id
        self._most = most
        self.retry: float | None = None
        self._id = last_id
        self.restart()

    def restart(self) -> None:
        """Forget a half-received event: a new connection begins."""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._text = ""
        self._event = ""
        self._data: list[str] = []
        self._length = 0
        self._id = self.last_id

    def feed(self, chunk: bytes) -> Iterator[ServerEvent]:
        """Events completed by these bytes.

        Raises:
            EventTooLong: one does not end.
        """
        self._text += self._decoder.decode(chunk)
        # A trailing CR may be the first half of CRLF: leave it until the next piece arrives.
        held = "\r" if self._text.endswith("\r") else ""
        text = self._text.removesuffix("\r") if held else self._text
        *lines, rest = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        self._text = rest + held
        for line in lines:
            if line:
                self._field(line)
            elif (event := self._dispatch()) is not None:
                yield event
        if self._length + len(self._text) > self._most:
            raise EventTooLong

    def _field(self, line: str) -> None:
        self._length += len(line)
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match name:
            case "event":
                self._event = value
            case "data":
                self._data.append(value)
            case "id" if value.isprintable():  # it is sent back, in a header
                self._id = value
            case "retry" if value.isdecimal() and len(value) < 10:
                self.retry = int(value) / 1000
            case _:  # a comment (empty name) keeps the connection alive; others are not for us
                pass

    def _dispatch(self) -> ServerEvent | None:
        self.last_id = self._id
        event, data = self._event or "message", self._data
        self._event, self._data, self._length = "", [], 0
        return ServerEvent(self.last_id, event, "\n".join(data)) if data else None
