"""Grouped problems: which exist, their bytes and operations, and their neighbours."""

from __future__ import annotations

import pytest

from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import MAX_GROUPS, Problem
from gemmsmith.errors import InvalidProblem

ROWS = Operation.of("bf16", "tn", grouping="rows")
DEPTH = Operation.of("bf16", "nt", grouping="depth")
TOKENS, EXPERTS, N, K = 8192, 128, 5760, 2880


def test_the_groups_share_the_tokens() -> None:
    forward = Problem.of(ROWS, TOKENS, N, K, EXPERTS)
    gradient = Problem.of(DEPTH, N, K, TOKENS, EXPERTS)
    assert forward.flops == gradient.flops == 2 * TOKENS * N * K
    tokens, weights = 2 * TOKENS * (N + K), 2 * EXPERTS * N * K
    assert forward.operand_bytes == gradient.operand_bytes == tokens + weights
    assert str(forward) == "128×8192×5760×2880 bf16.group_rows tn"


def test_factors_are_the_tokens_and_every_experts_own() -> None:
    operation = Operation.of("fp8_e4m3", scaling="row", grouping="rows")
    moved = Problem.of(operation, TOKENS, N, K, EXPERTS).operand_bytes
    matrices = TOKENS * K + EXPERTS * N * K + 2 * TOKENS * N
    assert moved == matrices + 4 * (TOKENS + EXPERTS * N)


def test_only_the_number_of_tokens_may_differ_from_a_neighbours() -> None:
    asked = Problem.of(ROWS, TOKENS, N, K, EXPERTS)
    assert asked.kind == Problem.of(ROWS, 16, N, K, EXPERTS).kind
    for n, k, experts in ((N + 8, K, EXPERTS), (N, K + 8, EXPERTS), (N, K, 64)):
        assert asked.kind != Problem.of(ROWS, TOKENS, n, k, experts).kind
    gradient = Problem.of(DEPTH, N, K, TOKENS, EXPERTS)
    assert gradient.kind == Problem.of(DEPTH, N, K, 16, EXPERTS).kind
    assert gradient.kind != Problem.of(DEPTH, N + 8, K, TOKENS, EXPERTS).kind


def test_the_number_of_groups_is_limited() -> None:
    assert Problem.of(ROWS, 1, 8, 8, MAX_GROUPS).batch == MAX_GROUPS
    with pytest.raises(InvalidProblem, match="1024 groups"):
        Problem.of(ROWS, 1, 8, 8, MAX_GROUPS + 1)
