"""`stale`, from a GPU's report to whoever asks: one answer, many, a snapshot, a listing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import msgspec
import pytest

from gemmsmith import Client, Config, Problem, Snapshot, Use
from gemmsmith.answers.answer import Answer
from service.settings import Settings
from tests.support.present import present
from tests.support.processes import until
from tests.support.serving import ENVIRONMENT, H200, new_settings, promote, winner
from tests.support.snapshots import BIG, CONFIG, row, snapshot
from tuner.store import Store

KNOWN = Problem(m=4096, n=4096, k=4096)
NEAR = replace(KNOWN, m=4000)
FRESH = Problem(m=64, n=64, k=64)
NEWER = replace(ENVIRONMENT, cuda="13.1")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Winners of this and of newer software; no GPU has reported."""
    settings = new_settings(tmp_path / "service")
    promote(settings, winner(KNOWN), replace(winner(FRESH), environment=NEWER))
    return settings


@pytest.fixture
def client(http: httpx.Client) -> Iterator[Client]:
    with Client(str(http.base_url), cache_dir=None, retries=0) as found:
        yield found


def report(settings: Settings) -> None:
    with Store.open(settings.database) as store:
        store.gpus.report(H200, NEWER)


def stale(client: Client, problem: Problem) -> bool:
    return client.best(problem.m, problem.n, problem.k).stale


def test_a_gpu_with_newer_software_makes_answers_stale_which_are_served_all_the_same(
    client: Client, settings: Settings
) -> None:
    before = client.best(4096, 4096, 4096)
    first = client.snapshot(H200.slug)
    assert not before.stale
    report(settings)
    until(lambda: stale(client, KNOWN), "the answer is not stale")
    assert client.best(4096, 4096, 4096) == replace(before, stale=True)
    assert stale(client, NEAR)  # a neighbour's figures are as old as the neighbour's winner
    assert not stale(client, FRESH)
    asked = [KNOWN, FRESH, NEAR]
    for problems in (asked, asked * 20):  # a few are looked up one by one, many in a snapshot
        answers = client.best_many(problems)
        assert [isinstance(a, Answer) and a.stale for a in answers[:3]] == [True, False, True]
    second = client.snapshot(H200.slug, known=first)
    assert {row.problem: row.stale for row in second.rows} == {KNOWN: True, FRESH: False}
    promote(settings, replace(winner(KNOWN), environment=NEWER))
    until(lambda: not stale(client, KNOWN), "the answer stays stale")


def test_a_stale_answer_is_another_one_to_who_revalidates_it(
    http: httpx.Client, client: Client, settings: Settings
) -> None:
    sizes = {"m": 4096, "n": 4096, "k": 4096}
    tag = http.get("/best", params=sizes).headers["etag"]
    report(settings)
    until(lambda: stale(client, KNOWN), "the answer is not stale")
    renewed = http.get("/best", params=sizes, headers={"If-None-Match": tag})
    assert (renewed.status_code, renewed.json()["stale"]) == (200, True)


def test_a_prediction_is_not_stale(client: Client, settings: Settings) -> None:
    report(settings)
    answer = client.best(77, 7000, 640, dtype="fp16", device=H200.slug)
    assert (answer.match, answer.stale, answer.pinned) == ("predicted", False, False)


def test_a_choice_says_that_its_figures_are_old() -> None:
    answer = present(snapshot(row(BIG, stale=True)).find(BIG))
    assert answer.stale
    fresh = present(snapshot(row(BIG)).find(BIG))
    assert not fresh.stale


@dataclass(frozen=True, kw_only=True, slots=True)
class OldRow:
    """A row as the library knew it before there was `stale`."""

    problem: Problem
    use: Use
    config: Config | None = None
    deterministic: bool = False
    signature: str | None = None


def test_older_libraries_read_newer_snapshots() -> None:
    document = msgspec.json.decode(snapshot(row(BIG, stale=True)).document)
    assert document["format"] == 1
    old = msgspec.convert(document["winners"], list[OldRow])
    assert old == [OldRow(problem=BIG, use=Use.CUTLASS, config=CONFIG, deterministic=True)]


def test_newer_libraries_read_older_snapshots() -> None:
    older = [OldRow(problem=BIG, use=Use.CUTLASS, config=CONFIG, deterministic=True)]
    written = Snapshot.of(H200.slug, older)  # type: ignore[arg-type] - only written out
    assert b"stale" not in written.document
    assert Snapshot.parse(written.document).rows == (row(BIG),)
