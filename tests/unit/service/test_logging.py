"""Logs hold what strangers send, on the line where it belongs, and no password of a URL."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from service.logging import configure

EVIL = "\x1b[2J\x9b2J\r\n2026 [info] forged\u2028 postgresql://me:secret@host/db"


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    before = (root.handlers, root.level)
    yield
    root.handlers, root.level = before
    structlog.reset_defaults()


@pytest.mark.parametrize("as_json", [False, True])
def test_an_event_is_a_line(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    configure(json=as_json)
    structlog.get_logger("gemmsmith.test").info(EVIL, path=EVIL, count=3)
    logging.getLogger("uvicorn.test").warning("asked for %s", EVIL)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(map(str.isprintable, lines))
    assert "secret" not in "".join(lines)
    if as_json:
        assert json.loads(lines[0])["count"] == 3


@pytest.mark.parametrize("as_json", [False, True])
def test_a_traceback_keeps_its_lines(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    configure(json=as_json)
    try:
        raise ValueError(EVIL)
    except ValueError:
        structlog.get_logger("gemmsmith.test").exception("failed")
    text = capsys.readouterr().err
    if as_json:
        text = json.loads(text)["exception"]
    lines = text.rstrip("\n").split("\n")
    assert lines[-2].startswith("ValueError: ")
    assert all(map(str.isprintable, lines))
    assert "secret" not in text
