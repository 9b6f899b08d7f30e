"""Who is put among other work, and what that says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from gemmsmith.answer import Conditions
from tuner.measure import company
from tuner.measure.company import invited, is_power_limited
from tuner.measure.operands import OperandSet
from tuner.measure.timing import Rounds as Turns
from tuner.trial import Rounds


def rounds(*times: float, baseline: float = 10.0, clock: float = 1500.0) -> Rounds:
    return Rounds(
        samples_us=tuple((time,) * 3 for time in times),
        baseline_us=(baseline,) * 3,
        conditions=Conditions(sm_clock_mhz=clock, power_w=700, temperature_c=60),
    )


def test_the_power_limit_shows_in_the_clock() -> None:
    assert is_power_limited(rounds(clock=1500), rounds(clock=1980))
    assert not is_power_limited(rounds(clock=1965), rounds(clock=1980))
    assert not is_power_limited(rounds(clock=0), rounds(clock=1980))
    assert not is_power_limited(rounds(clock=1500), rounds(clock=0))


def test_the_best_that_gains_in_both_states_is_invited_with_the_best_of_larger_tiles() -> None:
    #          large, best, larger and better than 0, gains in one state only, larger than all
    hot = rounds(9.9, 9.0, 9.5, 8.0, 10.5)
    cool = rounds(9.8, 9.0, 9.6, 10.2, 9.0)
    assert invited(hot, cool, tiles=[32768, 16384, 24576, 16384, 65536]) == [1, 2]
    assert invited(hot, cool, tiles=[16384] * 5) == [1]


def test_where_nobody_gains_nobody_is() -> None:
    assert invited(rounds(10.1), rounds(9.0), tiles=[1]) == []
    assert invited(rounds(), rounds(), tiles=[]) == []


@dataclass
class Graph:
    launches: int

    def enqueue(self) -> None: ...

    def close(self) -> None: ...


class Played:
    """Stands for a bench, its baseline, and a timer: of 4 µs a pass and a few turns."""

    stream = None
    set_count = 1

    def __init__(self, *times: tuple[float, ...]) -> None:
        self.times = times
        one = torch.ones(1, 2, 2)
        self.sets = (OperandSet(a=one, b=one.clone(), d=one.clone()),)
        self.operands = self
        self.launched: list[int] = []

    def capture(self, *arguments: Any) -> Graph:
        *_, launches, then = arguments
        then(0)
        return Graph(launches)

    def launch(self, i: int) -> None:
        self.launched.append(i)

    def screen(self, *_: object) -> list[float]:
        return [4.0]

    def turns(self, graphs: list[Graph], lengths: list[float], count: int, **_: object) -> Turns:
        assert len(set(lengths)) == 1
        assert count == company.ROUNDS
        assert len(graphs) == len(self.times)
        return Turns(samples_us=self.times, readings=(), discarded=0)


def test_a_contender_takes_what_the_whole_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Played((30.0, 31.0), (33.0, 1.0), (32.0, 32.0))
    monkeypatch.setattr(company, "Baseline", lambda *_: stage)
    monkeypatch.setattr(company, "TorchGraph", lambda *_: Graph(1))
    found = company.mixed_rounds(
        stage,  # type: ignore[arg-type]
        [None, None],  # type: ignore[list-item]
        12.0,
        stage,  # type: ignore[arg-type]
        seed=1,
        announce=lambda _: None,
    )
    # 2 µs and 1 µs less than with cuBLAS in its place; noise beyond reason is cut off.
    assert found.samples_us == ((10.0, 11.0), (13.0, 0.12))
    assert found.baseline_us == (12.0, 12.0)
    # Each launch was followed by cuBLAS's on another set, and by three passes: 12 of 4 µs.
    assert stage.launched == [1, 1, 1]
    assert stage.sets[0].a.tolist() == [[[-1.0, -1.0], [-1.0, -1.0]]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_a_pass_changes_signs_and_nothing_else(dtype: torch.dtype) -> None:
    values = torch.randn(1, 3, 5)
    a = values.to(dtype).transpose(1, 2)
    before = a.float()
    company._pass_over(OperandSet(a=a, b=a.clone(), d=torch.ones(1, 1, 1)))
    assert torch.equal(a.float(), -before)
