"""A product between other kernels: what the whole takes longer is its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tuner.measure import regimes, torch_calls
from tuner.measure.timing import TimedRounds
from tuner.workloads.operands import OperandSet


@dataclass
class Graph:
    launches: int

    def enqueue(self) -> None: ...

    def close(self) -> None: ...


class Played:
    """Stands for a bench, its baseline, and a timer: of 4 µs a pass and a few rounds."""

    stream = None
    set_count = 1

    def __init__(self, *times: tuple[float, ...]) -> None:
        self.times = times
        one = torch.ones(1, 2, 2)
        self.sets = (OperandSet(a=one, b=one.clone(), d=one.clone()),)
        self.operands = self

    def capture(self, *arguments: Any) -> Graph:
        *_, launches, then, over = arguments
        assert over is None
        then(0)
        return Graph(launches)

    def screen(self, *_: object) -> list[float]:
        return [4.0]

    def rounds(self, graphs: list[Graph], count: int, **_: object) -> TimedRounds:
        assert count == 2
        assert len(graphs) == len(self.times)
        return TimedRounds(samples_us=self.times, readings=(), discarded=0)


def test_a_contender_takes_what_the_whole_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Played((30.0, 31.0), (33.0, 1.0), (32.0, 32.0))
    monkeypatch.setattr(torch_calls, "TorchCall", lambda *_: stage)
    monkeypatch.setattr(regimes, "TorchGraph", lambda *_: Graph(1))
    found = regimes.mixed_rounds(
        stage,  # type: ignore[arg-type]
        [None, None],  # type: ignore[list-item]
        12.0,
        stage,  # type: ignore[arg-type]
        2,
        seed=1,
        announce=lambda _: None,
    )
    # 2 µs and 1 µs less than with cuBLAS in its place; noise beyond reason is cut off.
    assert found.samples_us == ((10.0, 11.0), (13.0, 0.12))
    assert found.baseline_us == (12.0, 12.0)
    # Each launch was followed by three passes: 12 µs of 4.
    assert stage.sets[0].a.tolist() == [[[-1.0, -1.0], [-1.0, -1.0]]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_a_pass_changes_signs_and_nothing_else(dtype: torch.dtype) -> None:
    values = torch.randn(1, 3, 5)
    a = values.to(dtype).transpose(1, 2)
    before = a.float()
    regimes._pass_over(OperandSet(a=a, b=a.clone(), d=torch.ones(1, 1, 1)))
    assert torch.equal(a.float(), -before)


def test_a_pass_negates_integers() -> None:
    a = torch.tensor([[[-127, 0, 5]]], dtype=torch.int8)
    d = torch.tensor([[[-(2**30), 7]]], dtype=torch.int32)
    regimes._pass_over(OperandSet(a=a, b=a.clone(), d=d))
    assert a.tolist() == [[[127, 0, -5]]]
    assert d.tolist() == [[[2**30, -7]]]
