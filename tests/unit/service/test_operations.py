"""Operations beside the plain ones: asked for in every way, answered, ordered, listed, shown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gemmsmith.answers.answer import InRegime, Ratio, Regime
from gemmsmith.core.problem import Layout, Problem
from tests.support.replacing import replace
from tests.support.serving import H200, new_settings, promote, running, winner

WIDE = Problem(m=256, n=4096, k=4096, dtype="bf16.out_f32.accumulate", layout=Layout.NT)
PLAIN = replace(WIDE, dtype="bf16")
ASKED = {"m": 256, "n": 4096, "k": 4096, "layout": "nt"}
PARTS = {"out": "f32", "accumulate": True}
RATIO = Ratio(median=1.2, ci_low=1.19, ci_high=1.21)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[httpx.Client]:
    settings = new_settings(tmp_path)
    regimes = (InRegime(regime=Regime.BOOST, speedup=RATIO, median_us=9.25, default_us=11.75),)
    changed = replace(winner(PLAIN), regimes=regimes, power_penalty=1.102)
    promote(settings, replace(changed, problem=WIDE))
    with running(settings) as made:
        yield made


@pytest.mark.parametrize("more", ["", "&exact=1"], ids=["at once", "by the routes"])
@pytest.mark.parametrize(
    "words",
    [
        "dtype=bf16.out_f32.accumulate",
        "dtype=bf16&out=f32&accumulate=true",
        "out=f32&accumulate=true",
        "dtype=bf16.out_f32&accumulate=true",
    ],
)
def test_every_spelling_means_the_same(client: httpx.Client, words: str, more: str) -> None:
    reply = client.get(f"/best?m=256&n=4096&k=4096&layout=nt&{words}{more}")
    assert reply.status_code == 200
    assert (reply.json()["match"], reply.json()["problem"]["dtype"]) == ("exact", WIDE.dtype)


def test_a_plainer_operation_is_never_answered_with_it(client: httpx.Client) -> None:
    for words in ({}, {"out": "f32"}):
        reply = client.get("/best", params={**ASKED, **words, "exact": "true"})
        assert reply.status_code == 404


def test_batches_orders_and_choices_take_the_same(client: httpx.Client) -> None:
    problem: dict[str, Any] = {**ASKED, **PARTS}
    reply = client.post("/best:batch", json={"problems": [problem, ASKED], "exact": True})
    assert [item.get("match") for item in reply.json()["answers"]] == ["exact", None]
    job = client.post("/tune", json=problem).json()
    assert job["problem"]["dtype"] == WIDE.dtype
    assert client.get("/winners/history", params=problem).status_code == 200
    pinned = client.post("/winners/pin", json={**problem, "revision": 1}).json()
    assert pinned["answer"]["problem"]["dtype"] == WIDE.dtype
    [row] = client.get(
        "/winners", params={"out": "f32", "accumulate": "true", "layout": "nt"}
    ).json()["winners"]
    assert row["problem"]["dtype"] == WIDE.dtype
    assert client.get("/winners", params={"dtype": "bf16"}).json()["winners"] == []


def test_groups_are_the_batch_of_a_grouped_operation(client: httpx.Client) -> None:
    asked = {"m": 256, "n": 4096, "k": 4096, "grouping": "rows", "groups": 8}
    job = client.post("/tune", json=asked).json()
    assert (job["problem"]["dtype"], job["problem"]["batch"]) == ("bf16.group_rows", 8)


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ({"groups": 8}, "groups"),
        ({"out": "e4m3"}, "out"),
        ({"out": "f33"}, "out"),
        ({"accumulate": "true"}, "accumulate"),
        ({"dtype": "bf16.then_what"}, "dtype"),
        ({"scaling": "row"}, "scaling"),
    ],
)
def test_what_does_not_exist_is_named(client: httpx.Client, words: Any, field: str) -> None:
    reply = client.get("/best", params={**ASKED, **words})
    assert reply.status_code == 422
    assert [error["field"] for error in reply.json()["errors"]] == [field]


def test_the_page_leads_with_what_is_served_then_the_regimes(client: httpx.Client) -> None:
    shown = client.get(f"/ui/problems/{H200.slug}/{WIDE.dtype}/nt/256x4096x4096").text
    said = ("10.0% faster", "Power penalty: 1.102;", ">boost<", "11.75")
    places = [shown.index(text) for text in said]
    assert places == sorted(places)
    answer = client.get("/best", params={**ASKED, **PARTS}).json()
    assert answer["power_penalty"] == 1.102
    [regime] = answer["regimes"]
    assert (regime["regime"], regime["speedup"]["median"]) == ("boost", 1.2)
