"""Lookups of fused operations: their own winners and no others', near sizes, predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.operation import Epilogue
from gemmsmith.core.problem import Problem
from tests.support.replacing import replace
from tests.support.serving import H200, new_settings, promote, running, winner
from tuner.backends import kernels, launches

PLAIN = Problem(m=4096, n=3072, k=768)
KNOWN = replace(PLAIN, dtype="bf16.then_bias_gelu")
ASKED = {"m": 4096, "n": 3072, "k": 768, "dtype": "bf16"}


def test_an_epilogue_is_an_operation_of_its_own(tmp_path: Path) -> None:
    settings = new_settings(tmp_path)
    for problem in (PLAIN, KNOWN, replace(KNOWN, m=2048)):
        kernel = kernels(problem)[0]
        candidate = Candidate(kernel=kernel, launch=launches(kernel, problem, H200)[0])
        promote(settings, replace(winner(PLAIN), problem=problem, candidate=candidate))
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({}, "exact", "bf16"),
        ({"epilogue": "none"}, "exact", "bf16"),
        ({"epilogue": "bias_gelu"}, "exact", "bf16.then_bias_gelu"),
        ({"dtype": "bf16.then_bias_gelu"}, "exact", "bf16.then_bias_gelu"),
        ({"epilogue": "bias_gelu", "m": 4000}, "nearest", "bf16.then_bias_gelu"),
        ({"epilogue": "bias_gelu", "m": 4104}, "nearest", "bf16.then_bias_gelu"),
        ({"m": 4000}, "nearest", "bf16"),
        ({"epilogue": "bias_gelu_aux"}, "predicted", "bf16.then_bias_gelu_aux"),
        ({"epilogue": "residual"}, "predicted", "bf16.then_residual"),
        ({"epilogue": "silu_gate"}, "predicted", "bf16.then_silu_gate"),
        ({"epilogue": "gelu_tanh_gate_aux"}, "predicted", "bf16.then_gelu_tanh_gate_aux"),
    ]
    with running(settings) as client:
        for change, match, dtype in cases:
            answer = client.get("/best", params=ASKED | change).raise_for_status().json()
            assert (answer["match"], answer["problem"]["dtype"]) == (match, dtype)
            kernel = answer["config"]["kernel"]
            assert kernel["dtype"] == dtype
            # A kernel with an activation is run between two problems that it won on.
            between = "gelu" in dtype and change.get("m") == 4000
            assert answer["use"] == ("cutlass" if match == "exact" or between else "cublas")
            assert ("_then_" in kernel["name"]) is ("then" in dtype)
        reply = client.post(
            "/best:batch", json={"problems": [ASKED | change for change, *_ in cases] * 8}
        ).raise_for_status()
    answers = reply.json()["answers"]
    matches = [None if match == "predicted" else match for _, match, _ in cases]
    assert [answer.get("match") for answer in answers] == matches * 8
    assert [answer.get("use") for answer in answers].count("cutlass") == 5 * 8


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"epilogue": "magic"}, "epilogue"),
        ({"epilogue": "bias", "batch": 2}, "batch"),
        ({"epilogue": "bias", "layout": "nt"}, "layout"),
        ({"epilogue": "silu_gate", "layout": "tt"}, "layout"),
        ({"epilogue": "silu_gate", "n": 3071}, "n"),
        ({"epilogue": "bias", "dtype": "int8"}, "epilogue"),
        ({"epilogue": "bias", "out": "f32"}, "out"),
        ({"epilogue": "bias", "grouping": "rows", "groups": 4}, "grouping"),
    ],
)
def test_what_does_not_exist_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], field: str
) -> None:
    with running(new_settings(tmp_path)) as client:
        reply = client.get("/best", params=ASKED | change)
    assert reply.status_code == 422
    assert field in reply.text


def test_every_epilogue_is_in_the_description(tmp_path: Path) -> None:
    with running(new_settings(tmp_path)) as client:
        text = client.get("/openapi.json").raise_for_status().text
    assert all(f'"{epilogue}"' in text for epilogue in Epilogue)
