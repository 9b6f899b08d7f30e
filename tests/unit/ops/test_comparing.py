"""Whether winners make a step faster is told by the step itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import gemmsmith
from gemmsmith.errors import GemmsmithError
from gemmsmith.ops import comparing
from gemmsmith.ops.below.dispatch import Dispatch
from gemmsmith.ops.comparing import WARM_STEPS, paired
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.in_use import install
from tests.support.stand_in import Chooser, Host

Runs = Callable[[], int]


class Clock:
    """Stands still but where a step says how long it takes: so no load changes what is timed."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(comparing, "time", clock)
    return clock


def model() -> nn.Linear:
    return nn.Linear(16, 24, bias=False).to(torch.bfloat16)


def test_a_step_that_gains(engine: Engine, runs: Runs, time: Clock) -> None:
    net, calls = model(), {True: 0, False: 0}

    def step() -> None:
        net(torch.ones(4, 16, dtype=torch.bfloat16))
        by_ours = runs() > 0
        calls[by_ours] += 1
        time.sleep(0.002 if by_ours else 0.006)

    gain = gemmsmith.compare(step, net, blocks=6, steps=2)
    assert (gain.ci_low, gain.median, gain.ci_high) == pytest.approx((3.0, 3.0, 3.0))
    assert calls == {True: WARM_STEPS + 12, False: WARM_STEPS + 12}
    step()
    assert calls[False] == WARM_STEPS + 13  # nothing is left patched


def test_what_was_captured_under_a_patch_takes_the_place_of_the_step(
    engine: Engine, time: Clock
) -> None:
    gain = gemmsmith.compare(
        lambda: time.sleep(0.002), tuned=lambda: time.sleep(0.004), blocks=6, steps=1
    )
    assert (gain.ci_low, gain.median, gain.ci_high) == pytest.approx((0.5, 0.5, 0.5))


def test_without_winners_torch_is_not_compared_with_itself() -> None:
    steps: list[int] = []
    with pytest.raises(GemmsmithError, match=r"would run torch: call gemmsmith.use\(...\) first"):
        gemmsmith.compare(lambda: steps.append(1), blocks=6, steps=2)
    assert len(steps) == 2 * WARM_STEPS


@pytest.mark.parametrize("what", ["model", "everything"])
def test_a_step_without_a_winner_is_not_compared(
    engine: Engine, chooser: Chooser, what: str
) -> None:
    chooser.answers = lambda problem: False
    net = model()

    def step() -> None:
        net(torch.ones(4, 16, dtype=torch.bfloat16))

    with pytest.raises(GemmsmithError, match="would run torch: no product of the step has a winne"):
        gemmsmith.compare(step, net if what == "model" else None, blocks=6)


def test_winners_are_not_compared_with_themselves(engine: Engine) -> None:
    net, other, steps = model(), model(), list[int]()
    for opened, compared in ((None, None), (None, net), (net, net), (net, None)):
        with (
            gemmsmith.patch(opened),
            pytest.raises(GemmsmithError, match="both sides would run the winners"),
        ):
            gemmsmith.compare(lambda: steps.append(1), compared)
    assert steps == []
    with gemmsmith.patch(other):
        gemmsmith.compare(
            lambda: net(torch.ones(4, 16, dtype=torch.bfloat16)), net, blocks=6, steps=1
        )


def test_kernels_of_another_step_do_not_count(engine: Engine, chooser: Chooser) -> None:
    """Nor does a step that replays what was captured, such as a CUDA graph."""
    net, other = model(), model()
    with gemmsmith.patch(other):
        other(torch.ones(4, 16, dtype=torch.bfloat16))
    chooser.answers = lambda problem: False
    for step in (lambda: net(torch.ones(8, 16, dtype=torch.bfloat16)), lambda: None):
        with pytest.raises(GemmsmithError, match="would run torch: no product of the step"):
            gemmsmith.compare(step, net, blocks=6)


def test_norms_alone_are_something(
    engine: Engine, chooser: Chooser, host: Host, binding: Dispatch
) -> None:
    chooser.answers = lambda problem: False
    host.kind = "cpu"
    net = nn.Sequential(LlamaRMSNorm(16))
    gemmsmith.compare(lambda: net(torch.ones(4, 16)), net, blocks=6, steps=1)


def test_a_refused_use_is_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "winners.gspack"
    bad.write_bytes(b"no bundle")
    net = model()
    try:
        gemmsmith.use(bad)
        with pytest.raises(GemmsmithError, match=r"torch: gemmsmith.use\(...\) took no winners: "):
            gemmsmith.compare(lambda: None, net, blocks=6)
        with gemmsmith.patch(net, report=True):
            net(torch.ones(4, 16, dtype=torch.bfloat16))
        report = capsys.readouterr().err
        assert report.startswith("gemmsmith: nothing replaced: gemmsmith.use(...) took no winners")
        gemmsmith.use(None)
        with gemmsmith.patch(net, report=True):
            pass
        assert "gemmsmith.use(None) has switched winners off" in capsys.readouterr().err
    finally:
        install(None)


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
