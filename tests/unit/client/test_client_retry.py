from __future__ import annotations

import pytest

from gemmsmith.http.replies import NoAnswer, Response
from gemmsmith.http.retry import RetryPolicy

DOWN = NoAnswer(reason="refused")


def test_waits_grow_and_stay_below_their_bounds() -> None:
    policy = RetryPolicy(retries=8, base=0.5, cap=4.0)
    for attempt in range(8):
        waits = [policy.delay(attempt, DOWN) for _ in range(200)]
        bound = min(4.0, 0.5 * 2**attempt)
        assert all(wait is not None and 0 <= wait <= bound for wait in waits)
        assert max(wait or 0 for wait in waits) > bound / 2
    assert policy.delay(8, DOWN) is None


@pytest.mark.parametrize("status", [200, 304, 400, 404, 409, 422, 500, 501])
def test_answers_are_not_retried(status: int) -> None:
    assert RetryPolicy().delay(0, Response(status=status)) is None


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_retry_after_is_a_lower_bound(status: int) -> None:
    reply = Response(status=status, headers={"retry-after": "3"})
    wait = RetryPolicy().delay(0, reply)
    assert wait is not None
    assert 3 <= wait <= 3.25


def test_a_retry_after_beyond_patience_is_final() -> None:
    reply = Response(status=503, headers={"retry-after": "600"})
    assert RetryPolicy().delay(0, reply) is None


@pytest.mark.parametrize("value", ["soon", "-1", "nan", "inf", "Sat, 21 Nov 2026 00:00:00 GMT"])
def test_an_unusable_retry_after_falls_back_to_back_off(value: str) -> None:
    wait = RetryPolicy().delay(0, Response(status=503, headers={"retry-after": value}))
    assert wait is not None
    assert wait <= 0.25
