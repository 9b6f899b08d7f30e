"""Lookups of grouped products: N, K and the experts exactly, the number of tokens by nearest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.problem import Problem
from tests.support.replacing import replace
from tests.support.serving import H200, new_settings, promote, running, winner
from tuner.backends import kernels, launches

KNOWN = Problem(m=8192, n=5760, k=2880, batch=128, dtype="bf16.group_rows")
ASKED = {"m": 8192, "n": 5760, "k": 2880, "groups": 128, "dtype": "bf16", "grouping": "rows"}


def test_only_the_number_of_tokens_may_differ(tmp_path: Path) -> None:
    settings = new_settings(tmp_path)
    kernel = kernels(KNOWN)[0]
    candidate = Candidate(kernel=kernel, launch=launches(kernel, KNOWN, H200)[0])
    made = winner(replace(KNOWN, dtype="bf16", batch=1))
    promote(settings, replace(made, problem=KNOWN, candidate=candidate))
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "exact"),
        ({"m": 4096}, "nearest"),
        ({"m": 16000}, "nearest"),
        ({"n": 5888}, "predicted"),
        ({"k": 2944}, "predicted"),
        ({"groups": 64}, "predicted"),
    ]
    with running(settings) as client:
        for change, match in cases:
            answer = client.get("/best", params=ASKED | change).raise_for_status().json()
            assert answer["match"] == match, change
            assert answer["problem"]["dtype"] == "bf16.group_rows"
        problems = [ASKED | change for change, _ in cases] * 8  # read together
        reply = client.post("/best:batch", json={"problems": problems}).raise_for_status()
    matches = [None if match == "predicted" else match for _, match in cases]
    assert [answer.get("match") for answer in reply.json()["answers"]] == matches * 8
