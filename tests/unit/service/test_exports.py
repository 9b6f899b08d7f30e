"""`/winners` and `/results` as documents and as tables: pages, filters, fields, formats."""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import httpx
import msgspec
import pytest
from pyarrow import parquet

from gemmsmith.core.config import Use
from gemmsmith.core.problem import DType, Layout, Problem
from gemmsmith.http.replies import SCHEMA
from service.report import export
from service.tables import TRIALS, WINNERS, FileFormat
from tests.support.serving import H100, H200, new_settings, promote, running, trial, winner
from tuner.store import Store
from tuner.trial import Winner

PROBLEMS = [
    Problem(m=64, n=64, k=64),
    Problem(m=128, n=64, k=64, layout=Layout.NT),
    Problem(m=256, n=512, k=64, dtype=DType.FP16),
    Problem(m=64, n=512, k=64),
    Problem(m=64, n=64, k=64, batch=8),
]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    settings = new_settings(tmp_path_factory.mktemp("exports"))
    promote(
        settings,
        *(winner(problem, us=10.0 + i) for i, problem in enumerate(PROBLEMS[:4])),
        winner(PROBLEMS[4], use=Use.CUBLAS),
        winner(PROBLEMS[0], device=H100, us=99.0),
        replace(winner(Problem(m=1, n=1, k=1)), candidate=None, statistics=None, speedup=None),
    )
    with Store.open(settings.database) as store:
        store.add_trials([trial(PROBLEMS[0], index) for index in range(5)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("service.http.state.usable_gpu", lambda: H200)
        with running(settings) as client:
            yield client


def test_winners_page_by_page_are_those_of_the_device_whole(client: httpx.Client) -> None:
    found, href = [], "/winners?limit=2"
    while href:
        page = client.get(href).json()
        assert page["schema"] == SCHEMA
        assert len(page["winners"]) <= 2
        found += page["winners"]
        href = page["links"].get("next", {}).get("href")
        assert href is None or f"device={H200.slug}" in href
    winners = [msgspec.convert(item, Winner) for item in found]
    assert [w.problem for w in winners] == [*PROBLEMS, Problem(m=1, n=1, k=1)]
    assert {w.device for w in winners} == {H200}
    assert client.get(found[0]["links"]["best"]["href"]).json()["statistics"]["median_us"] == 10.0


@pytest.mark.parametrize(
    ("query", "places"),
    [
        ("dtype=fp16", [2]),
        ("layout=nt", [1]),
        ("use=cublas", [4]),
        ("m=64", [0, 3, 4]),
        ("m=64&batch=1", [0, 3]),
        ("n=512&k=64", [2, 3]),
        ("min_speedup=1.05&limit=1000", [0, 1, 2, 3, 4]),
        ("min_speedup=1.2", []),
        (f"device={H100.slug}", [0]),
    ],
)
def test_winners_are_filtered(client: httpx.Client, query: str, places: list[int]) -> None:
    page = client.get(f"/winners?{query}").json()
    found = [msgspec.convert(item["problem"], Problem) for item in page["winners"]]
    assert found == [PROBLEMS[place] for place in places]


@pytest.mark.parametrize(
    ("query", "field", "says"),
    [
        ("/winners?after=bf16-tn-1-2-3", "after", "is no cursor of this list"),
        ("/winners?after=x", "after", "links.next"),
        ("/winners?after=bf16-tn-1-7-7-7", "after", "no page of winners ends with 7×7×7"),
        ("/winners?after=bf16-tn-1-0-7-7", "after", "is no cursor"),
        ("/results?after=x", "after", "an integer in 0 …"),
        ("/jobs?after=x", "after", "links.next"),
        ("/packs?after=x", "after", "64 hexadecimal digits"),
        ("/winners?fields=m,nn", "fields", "unknown: 'nn' (accepted: device, m, n, k,"),
        ("/results?fields=", "fields", "unknown: '' (accepted: id, created_at,"),
        ("/winners?device=h900", "device", H200.slug),
        ("/winners?min_speedup=nan", "min_speedup", "finite"),
        ("/winners?format=xml", "format", "'json', 'csv' or 'parquet'"),
        ("/winners?m=0", "m", "1 … 2147483647"),
    ],
)
def test_what_a_list_does_not_take_is_named(
    client: httpx.Client, query: str, field: str, says: str
) -> None:
    reply = client.get(query)
    assert reply.status_code == 422
    assert [error["field"] for error in reply.json()["errors"]] == [field]
    assert says in reply.json()["detail"]


@pytest.mark.parametrize(("path", "table"), [("/winners", WINNERS), ("/results", TRIALS)])
def test_every_format_has_the_same_rows(client: httpx.Client, path: str, table) -> None:  # type: ignore[no-untyped-def]
    every = ",".join(table.columns)
    as_json = client.get(f"{path}?fields={every}").json()[path[1:].replace("results", "trials")]
    as_csv = [*csv.DictReader(io.StringIO(client.get(f"{path}?format=csv").text))]
    reply = client.get(f"{path}?format=parquet")
    assert reply.headers["content-type"] == "application/vnd.apache.parquet"
    assert reply.headers["gemmsmith-schema"] == str(SCHEMA)
    read = parquet.read_table(io.BytesIO(reply.content))
    assert read.schema.metadata[b"gemmsmith.schema"] == str(SCHEMA).encode()
    assert read.column_names == list(as_json[0]) == list(as_csv[0]) == list(table.columns)
    assert len(as_json) in (5, 6)
    for ours, text, typed in zip(as_json, as_csv, read.to_pylist(), strict=True):
        assert text == {name: "" if v is None else str(v) for name, v in ours.items()}
        for name, value in typed.items():
            if isinstance(value, datetime):
                assert value == datetime.fromisoformat(ours[name]).astimezone(UTC)
            else:
                assert value == ours[name]


def test_chosen_fields_come_in_the_order_asked(client: httpx.Client) -> None:
    reply = client.get("/winners?format=csv&fields=median_us,m,median_us&limit=1")
    assert reply.text == "median_us,m\r\n10.0,64\r\n"
    following = re.fullmatch(r'<(.*)>; rel="next"', reply.headers["link"])
    assert following
    assert client.get(following[1]).text == "median_us,m\r\n11.0,128\r\n"
    assert client.get("/winners?fields=m&limit=1").json()["winners"] == [{"m": 64}]


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("*/*", "application/json"),
        ("", "application/json"),
        ("text/csv", "text/csv; charset=utf-8"),
        ("text/html, application/xhtml+xml, */*;q=0.8", "application/json"),
        ("application/json;q=0.5, text/*;q=0.6", "text/csv; charset=utf-8"),
        ("application/*;q=0.1, application/vnd.apache.parquet", "application/vnd.apache.parquet"),
        ("application/json;q=0, */*;q=0.1", "text/csv; charset=utf-8"),
        ("text/csv;q=much, ;;,", "text/csv; charset=utf-8"),
    ],
)
def test_accept_chooses_the_format(client: httpx.Client, accept: str, kind: str) -> None:
    reply = client.get("/results?limit=1", headers={"Accept": accept})
    assert reply.headers["content-type"] == kind
    assert reply.headers["vary"] == "Accept, Gemmsmith-Runs, User-Agent"
    chosen = client.get("/results?limit=1&format=json", headers={"Accept": accept})
    assert chosen.headers["content-type"] == "application/json"


def test_what_there_is_not_gets_a_406(client: httpx.Client) -> None:
    reply = client.get("/winners", headers={"Accept": "image/png, text/csv;q=0"})
    assert reply.status_code == 406
    assert "application/vnd.apache.parquet" in reply.json()["detail"]


def test_without_pyarrow_parquet_is_a_501_that_says_what_to_install(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # what import then does is the real thing
    reply = client.get("/winners?format=parquet")
    assert reply.status_code == 501
    assert "pip install 'pyarrow>=21'" in reply.json()["detail"]
    assert client.get("/winners?format=csv").status_code == 200


def test_a_cell_is_no_formula_and_a_number_stays_one() -> None:
    texts = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "1-2", "kernel"]
    content = WINNERS.write(
        [{"kernel": text, "speedup": -1.5, "m": -7} for text in texts],
        ("kernel", "speedup", "m"),
        FileFormat.CSV,
    )
    read = list(csv.reader(io.StringIO(content.decode(), newline="")))[1:]
    assert [row[0] for row in read] == [*(f"'{text}" for text in texts[:6]), *texts[6:]]
    assert {(row[1], row[2]) for row in read} == {("-1.5", "-7")}


def test_a_cell_of_the_report_is_no_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"kernel": "=cmd", "notes": ["-a", "b"], "gain": -0.5}
    monkeypatch.setattr(export, "record", lambda _: row)
    text = export.to_csv([SimpleNamespace(rows=[None])])  # type: ignore[list-item]
    assert text.splitlines()[1] == "'=cmd,'-a b,-0.5"


def test_a_date_that_is_none_is_missing_in_parquet(tmp_path: Path) -> None:
    dates = ["2026-11-20T10:00:00.123+01:00", "2026-11-20", "yesterday", "0001-01-01T00:00+23:59"]
    settings = new_settings(tmp_path)
    promote(
        settings,
        *(
            replace(winner(problem), promoted_at=date)
            for problem, date in zip(PROBLEMS, dates, strict=False)
        ),
    )
    with running(settings) as client:
        reply = client.get("/winners?format=parquet&fields=promoted_at")
        rows = client.get("/winners?fields=promoted_at").json()["winners"]
        page = client.get(f"/ui/problems/{H200.slug}/bf16/tn/64x512x64")
    assert [row["promoted_at"] for row in rows] == dates
    read = parquet.read_table(io.BytesIO(reply.content)).to_pylist()
    assert [row["promoted_at"] for row in read] == [
        datetime(2026, 11, 20, 9, 0, 0, 123_000, UTC),
        datetime(2026, 11, 20, tzinfo=UTC),
        None,
        None,
    ]
    assert (page.status_code, dates[3] in page.text) == (200, True)
