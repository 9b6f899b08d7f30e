"""`GET /explain` and a problem's page: what they say follows from what the winner records."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import httpx
import msgspec
import pytest

from gemmsmith.core.problem import Problem
from service.pages import addresses
from tests.support.serving import H200, new_settings, promote, running, winner
from tests.support.shipped import SLUG, TRUSTED, shipped_files
from tuner.exchange import import_winners
from tuner.explain import Explanation, explain
from tuner.store import Store

SHORT_K = Problem(m=4096, n=6144, k=1024)
FEW_TOKENS = Problem(m=16, n=4096, k=14336)
PROFILED = Problem(m=256, n=7168, k=2048)
KEPT = Problem(m=4096, n=6144, k=1024, dtype="fp8_e4m3")
FAILED = Problem(m=7, n=7, k=7)
FILES = (f"{SLUG}.bf16.jsonl", f"{SLUG}.fp8_e4m3.jsonl")


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    settings = new_settings(tmp_path_factory.mktemp("explain"))
    with Store.open(settings.database) as store:
        for file in shipped_files():
            if file.name in FILES:
                import_winners(store, file, TRUSTED)
    failed = replace(winner(FAILED, us=12.0), candidate=None, statistics=None, speedup=None)
    promote(settings, failed)
    with running(settings) as client:
        yield client


def url(problem: Problem, device: str = SLUG) -> str:
    words = f"dtype={problem.dtype}&layout={problem.layout}"
    return f"/explain?m={problem.m}&n={problem.n}&k={problem.k}&{words}&device={device}"


@pytest.mark.parametrize("problem", [SHORT_K, FEW_TOKENS, KEPT], ids=str)
def test_the_answer_is_the_explanation_of_the_winner(http: httpx.Client, problem: Problem) -> None:
    answer = http.get(url(problem))
    assert answer.status_code == 200
    item = msgspec.convert(answer.json(), Explanation)
    assert item.problem == problem
    assert item.candidate is not None
    assert item.candidate.grid is not None
    assert item.candidate.resources is not None
    assert item.candidate.resources.registers is None  # the pack is not here
    assert item.why
    assert answer.json()["links"]["best"]["href"].startswith("/best?m=")


@pytest.mark.parametrize("problem", [SHORT_K, FEW_TOKENS, KEPT], ids=str)
def test_the_page_says_the_same(http: httpx.Client, problem: Problem) -> None:
    item = msgspec.convert(http.get(url(problem)).json(), Explanation)
    page = http.get(addresses.problem(problem, SLUG))
    assert page.status_code == 200
    for sentence in (item.why, item.left, item.power, *(piece.text for piece in item.advice)):
        assert sentence.replace("'", "&#39;") in page.text
    for piece in item.advice:
        if piece.is_measured:
            assert addresses.problem(piece.problem, SLUG).replace("&", "&amp;") in page.text
    assert item.candidate is not None
    assert item.candidate.grid is not None
    assert f"{item.candidate.grid.waves:.2f}" in page.text


def test_a_recorded_profile_is_in_the_answer_and_on_the_page(http: httpx.Client) -> None:
    answer = http.get(url(PROFILED)).json()
    item = msgspec.convert(answer, Explanation)
    assert item.profile is not None
    assert item.profile.problem == PROFILED
    assert item.waits.startswith("By Nsight Compute on ")
    page = http.get(addresses.problem(PROFILED, SLUG)).text
    assert item.waits in page
    for title in ("Profile", "How busy the units are", "DRAM throughput"):
        assert title in page
    without = http.get(url(SHORT_K)).json()
    if without["profile"] is None:
        assert 'id="profile"' not in http.get(addresses.problem(SHORT_K, SLUG)).text


def test_neighbours_of_other_types_are_advice(http: httpx.Client) -> None:
    item = msgspec.convert(http.get(url(FEW_TOKENS)).json(), Explanation)
    (piece,) = item.advice
    assert (piece.kind, piece.is_measured) == ("type", True)
    assert piece.problem == replace(FEW_TOKENS, dtype="fp8_e4m3")


def test_a_winner_without_a_candidate_is_explained(http: httpx.Client) -> None:
    item = msgspec.convert(http.get(url(FAILED, H200.slug)).json(), Explanation)
    assert item.candidate is None
    assert item.why == "The default stays: no candidate survived verification."
    assert http.get(addresses.problem(FAILED, H200.slug)).status_code == 200


def test_a_problem_without_a_winner_gets_a_way_to_tune_it(http: httpx.Client) -> None:
    answer = http.get(url(Problem(m=11, n=13, k=17)))
    assert answer.status_code == 404
    assert answer.json()["links"]["tune"]["href"] == "/tune"


def test_a_wrong_question_names_the_field(http: httpx.Client) -> None:
    answer = http.get("/explain?m=0&n=64&k=64")
    assert answer.status_code == 422
    assert [error["field"] for error in answer.json()["errors"]] == ["m"]


def test_invented_winners_are_explained_without_errors() -> None:
    for problem in (SHORT_K, FAILED, Problem(m=64, n=64, k=64, batch=3)):
        item = explain(winner(problem, us=12.0))
        assert "not explain" in item.why or "largest difference" in item.why
