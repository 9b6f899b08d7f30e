"""What neighbours' kernels are worth is measured on the problems nearest to each."""

from __future__ import annotations

import pytest

from benchmarks import neighbours
from gemmsmith.core.config import MAX_DISTANCE, Use
from gemmsmith.core.problem import Problem
from tests.support.replacing import replace
from tests.support.serving import winner
from tuner.devices import Contender, open_device

PROBLEMS = [Problem(m=m, n=4096, k=4096) for m in (512, 1024, 2048, 65536)]


def test_the_nearest_kernels_that_are_run_take_part() -> None:
    found = {one: winner(one) for one in PROBLEMS}
    found[PROBLEMS[0]] = winner(PROBLEMS[0], use=Use.CUBLAS)
    cases = {case.problem: case.winners for case in neighbours.cases(found)}
    # All of these have the same candidate, which the nearest of them brings along.
    assert {one: [w.problem for w in near] for one, near in cases.items()} == {
        PROBLEMS[0]: [PROBLEMS[1]],
        PROBLEMS[1]: [PROBLEMS[2]],
        PROBLEMS[2]: [PROBLEMS[1]],
    }
    assert PROBLEMS[2].distance(PROBLEMS[3]) > MAX_DISTANCE


def test_a_neighbours_kernel_is_timed_on_the_problem_itself() -> None:
    here, there = Problem(m=256, n=4096, k=4096), Problem(m=256, n=4096, k=14336)
    with open_device("replay:nvidia-h200-132sm.bf16.jsonl.zst") as device:
        candidates = set(device.recorded(here) or ()) & set(device.recorded(there) or ())
        candidate = min(candidates, key=lambda one: one.key)
        case = neighbours.Case(problem=here, winners=(replace(winner(there), candidate=candidate),))
        [row] = neighbours.measured(device, case, [Contender(candidate=candidate)])
        assert not list(neighbours.measured(device, case, []))
    assert (row["extents"], row["measured"]) == ([256, 4096, 4096], [256, 4096, 14336])
    assert row["distance"] == pytest.approx(here.distance(there), abs=1e-3)
    assert (row["candidate"], row["gained"]) == (candidate.key, 1.1)
    assert row["gains"].keys() == {"sustained"}
    assert 0 < row["gains"]["sustained"] < 2
