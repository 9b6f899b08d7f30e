from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gemmsmith.http.events import EventParser
from gemmsmith.http.jobs import JobEvent

STREAM = (
    "retry: 1500\n\n: hello\n\nid: 1\nevent: created\ndata: {}\n\n"
    'id: 2\r\nevent: progress\r\ndata: {"a":\r\ndata: 1}\r\n\r\n'
    "id: 3\rdata: \u2028µ\r\revent: lost\ndata: never dispatched"
).encode()
EVENTS = [
    JobEvent(id="1", kind="created", data={}),
    JobEvent(id="2", kind="progress", data={"a": 1}),
    JobEvent(id="3", kind="message", data={"text": "\u2028µ"}),
]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_any_cut_of_the_stream_gives_the_same_events(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    parser = EventParser("j1")
    events = [event for start, end in pairwise(edges) for event in parser.feed(STREAM[start:end])]
    assert events == EVENTS
    assert parser.last_id == "3"


def test_a_half_received_event_is_forgotten_at_a_reconnect() -> None:
    parser = EventParser("j1")
    assert list(parser.feed(b"id: 7\ndata: a\n\nid: 8\ndata: ha")) == [
        JobEvent(id="7", kind="message", data={"text": "a"})
    ]
    assert parser.last_id == "7"
    parser.restart()
    assert list(parser.feed(b"data: b\n\n")) == [
        JobEvent(id="7", kind="message", data={"text": "b"})
    ]


def test_an_id_with_a_null_is_ignored() -> None:
    parser = EventParser("j1", "4")
    assert list(parser.feed(b"id: 5\0\ndata: x\n\n")) == [
        JobEvent(id="4", kind="message", data={"text": "x"})
    ]
