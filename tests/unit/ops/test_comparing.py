"""Whether winners make a step faster is told by the step itself."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

import gemmsmith
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.models.comparing import WARM_STEPS, paired

Runs = Callable[[], int]


def model() -> nn.Linear:
    return nn.Linear(16, 24, bias=False).to(torch.bfloat16)


def test_a_step_that_gains(engine: Engine, runs: Runs) -> None:
    net, calls = model(), {True: 0, False: 0}

    def step() -> None:
        net(torch.ones(4, 16, dtype=torch.bfloat16))
        by_ours = runs() > 0
        calls[by_ours] += 1
        time.sleep(0.002 if by_ours else 0.006)

    gain = gemmsmith.compare(step, net, blocks=6, steps=2)
    assert 1 < gain.ci_low <= gain.median <= gain.ci_high
    assert gain.median > 1.5
    assert calls == {True: WARM_STEPS + 12, False: WARM_STEPS + 12}
    step()
    assert calls[False] == WARM_STEPS + 13  # nothing is left patched


def test_what_was_captured_under_a_patch_takes_the_place_of_the_step(engine: Engine) -> None:
    gain = gemmsmith.compare(
        lambda: time.sleep(0.002), tuned=lambda: time.sleep(0.004), blocks=6, steps=1
    )
    assert gain.median < 0.8
    assert gain.ci_low < 1


def test_without_winners_nothing_is_gained_and_nothing_breaks() -> None:
    gain = gemmsmith.compare(lambda: time.sleep(0.002), blocks=6, steps=2)
    assert gain.ci_low <= gain.median <= gain.ci_high
    assert gain.median == pytest.approx(1, rel=0.5)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"blocks": 5}, "blocks must be at least 6, not 5"), ({"steps": 0}, "at least 1, not 0")],
)
def test_what_would_tell_nothing_is_refused(wrong: dict[str, int], said: str) -> None:
    steps = []
    with pytest.raises(ValueError, match=said):
        gemmsmith.compare(lambda: steps.append(1), **wrong)
    assert steps == []


def test_a_step_that_fails_leaves_nothing_patched(engine: Engine, runs: Runs) -> None:
    net = model()

    def step() -> None:
        net(torch.ones(4, 16, dtype=torch.bfloat16))
        if runs():
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        gemmsmith.compare(step, net)
    step()


@pytest.mark.parametrize(("n", "low", "high"), [(6, 1, 6), (12, 3, 10), (30, 10, 21)])
def test_the_interval_is_of_order_statistics(n: int, low: int, high: int) -> None:
    found = paired([float(i) for i in range(1, n + 1)], [1.0] * n)
    assert (found.median, found.ci_low, found.ci_high) == ((n + 1) / 2, low, high)
