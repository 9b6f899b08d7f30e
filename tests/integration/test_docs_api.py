"""docs/api.md: every command is run, in its order, against a service with the recorded H200."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gemmsmith import Client
from gemmsmith.core.kernel import Kernel
from tests.support.docs import ROOT, Session, assert_like, steps, tools
from tests.support.openapi import described
from tests.support.processes import SHIPPED, address, serving
from tests.support.serving import own_signer, publish
from tuner.compile import ArtifactStore
from tuner.store import Store

PAGE = ROOT / "docs" / "api.md"
SHOWN_URL = "http://127.0.0.1:8000"


def publish_a_pack(folder: Path, kernel: Kernel) -> None:
    """What compiling the kernel leaves, but for the compiler's work."""
    state = folder / "state"
    pack = publish(ArtifactStore(state / "packs", signer=own_signer()), kernel)
    with Store.open(f"sqlite:///{state}/gemmsmith.db") as store:
        store.add_pack(pack.hash, pack.toolchain, [kernel], pack.path.stat().st_size)


@pytest.mark.long
def test_every_command_works_as_printed(tmp_path: Path) -> None:
    commands = steps(PAGE)
    with serving(tmp_path, "worker", **SHIPPED) as (_, banner):
        url = address(banner)
        with Client(url, cache_dir=None) as client:
            config = client.best(256, 4096, 4096).config
        assert config is not None
        publish_a_pack(tmp_path, config.kernel)
        session = Session(tmp_path, tools(), {SHOWN_URL: url})
        for step in commands:
            session.run(step)
    assert len(commands) > 30


def test_every_route_is_on_the_page() -> None:
    """By a command, or by name."""
    page = PAGE.read_text(encoding="utf-8")
    for path in described()["paths"]:
        pattern = re.sub(r"\\{[a-z_]+\\}", r"[^\\s/`'?]+", re.escape(path))
        assert re.search(pattern + r"(?=[\s`'?,])", page), path


def test_every_status_is_on_the_page() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("## Errors")[2]
    for status in described()["components"]["responses"]:
        if status != "5XX":
            assert re.search(rf"^\|[^|]*\b{status}\b", table, re.MULTILINE), status


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ('{"a": 1, ...}', '{"b": 1}'),
        ('{"a": true}', '{"a": 1}'),
        ('{"a": "x"}', '{"a": "y"}'),
        ('{"a": [{"b": 1}]}', '{"a": []}'),
        ('{"a": {"b": null, ...}}', '{"a": {"b": 0}}'),
        ("one\ntwo\n", "one\n"),
        ("one 1\n...\nend\n", "one 2\nfurther\nends\n"),
        ("a=...b", "a=c"),
    ],
)
def test_what_is_shown_is_really_compared(shown: str, printed: str) -> None:
    with pytest.raises(AssertionError):
        assert_like(shown, printed, "here")


def test_figures_and_identifiers_may_differ() -> None:
    assert_like('{"a": 1.5, "b": ...}', json.dumps({"a": 2, "b": [], "c": 3}), "here")
    assert_like("x 1.5 µs\n...\ngsk_abc\n", f"x 317.912 µs\ny\nz\ngsk_{'k' * 43}\n", "here")
