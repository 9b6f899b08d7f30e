"""Winners stored before a field was added are read, and are still known for what they are."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.records import DEVICE, PROBLEM, imported, winner
from tests.support.replacing import replace
from tuner.store import Store, upgrade

FROZEN = Path(__file__).resolve().parents[2] / "migration" / "assets" / "0001.sql"


@pytest.fixture
def old(tmp_path: Path) -> Iterator[Store]:
    """A store written by a gemmsmith that did not name cuBLAS's kernels."""
    path = tmp_path / "old.db"
    connection = sqlite3.connect(path)
    connection.executescript(FROZEN.read_text(encoding="utf-8"))
    connection.close()
    upgrade(f"sqlite:///{path}")
    with Store.open(f"sqlite:///{path}") as opened:
        yield opened


def test_old_winners_name_no_kernels_of_cublas(old: Store) -> None:
    assert [entry.baseline_kernels for entry in old.history(PROBLEM, DEVICE.slug)] == [(), ()]


def test_old_winners_are_recognized(old: Store) -> None:
    for revision, us in ((1, 12.0), (2, 11.0)):
        assert imported(old, winner(time=us)).revision == revision
    assert len(old.history(PROBLEM, DEVICE.slug)) == 2


def test_naming_the_kernels_makes_a_new_revision(old: Store) -> None:
    told = replace(winner(time=11.0), baseline_kernels=("nvjet",))
    assert imported(old, told).revision == 3
    assert old.history(PROBLEM, DEVICE.slug)[0].baseline_kernels == ("nvjet",)
