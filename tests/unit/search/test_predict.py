"""A prediction is what ranking the whole space would put first, only sooner."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from unittest.mock import Mock

import pytest

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import Layout, Problem
from tests.support.replacing import replace
from tests.support.serving import H200
from tests.support.types import FLOATS
from tuner.backends import candidates, refusal
from tuner.search.cost_model import predicted_us
from tuner.search.predict import predict

KINDS = [
    (dtype, layout)
    for dtype in FLOATS
    for layout in Layout
    if not Operation.of(dtype).is_narrow_float or layout is Layout.TN
]


def _varied(count: int) -> list[Problem]:
    """Decoding and training sizes, long K over small outputs, odd ones, batches; all kinds."""
    chosen = random.Random(20261121)
    few = (1, 7, 16, 64, 100, 128, 256, 512)
    many = (576, 1000, 1024, 2048, 4095, 4096, 6144, 7168, 8188, 14336, 50257)
    found = []
    for index in range(count):
        dtype, layout = KINDS[index % len(KINDS)]
        small = chosen.random() < 0.5
        found.append(
            Problem(
                m=chosen.choice(few if small else many),
                n=chosen.choice((*few, *many) if small else many),
                k=chosen.choice((*many, 32768, 65536) if small else many),
                batch=chosen.choice((1, 1, 1, 1, 1, 16)),
                dtype=dtype,
                layout=layout,
            )
        )
    return found


def test_predictions_are_what_the_whole_space_is_led_by() -> None:
    problems = _varied(60)
    assert len(set(problems)) > 50
    same = 0
    for problem in problems:
        every = candidates(problem, H200)
        times = dict(zip(every, predicted_us(problem, every, H200), strict=True))
        best = min(every, key=lambda candidate: (times[candidate], candidate.key))
        prediction = predict(problem, H200)
        assert prediction is not None
        assert prediction.us == times[prediction.candidate], (
            "it is of the space, and told its own time"
        )
        assert prediction.us <= 1.03 * times[best], problem
        same += prediction.candidate.kernel == best.kernel
    assert same >= 0.9 * len(problems)


@pytest.mark.parametrize("k", [4096, 4095])
def test_what_is_predicted_is_legal_and_always_the_same(k: int) -> None:
    problem = Problem(m=40, n=777, k=k)
    prediction = predict(problem, H200)
    assert prediction is not None
    assert refusal(prediction.candidate.kernel, problem) is None
    assert predict(problem, H200) == prediction


def test_no_legal_kernel_is_no_prediction() -> None:
    assert predict(Problem(m=2**31 - 1, n=2**31 - 1, k=8), H200) is None
    assert predict(Problem(m=8, n=8, k=8), replace(H200, arch="sm75")) is None


def contrary(problem: Problem, candidates: Sequence[Candidate], device: DeviceModel) -> list[float]:
    """A cost model of another opinion: big tiles take long, and launches along M as long as two."""
    return [
        candidate.kernel.tile[0]
        * candidate.kernel.tile[1]
        * candidate.kernel.tile[2]
        * (2.0 if candidate.launch.raster == "along_m" else 1.0)
        * candidate.launch.swizzle
        for candidate in candidates
    ]


def test_any_cost_model_will_do() -> None:
    problem = Problem(m=4096, n=4096, k=4096)
    every = candidates(problem, H200)
    prediction = predict(problem, H200, contrary)
    assert prediction is not None
    assert prediction.us == min(contrary(problem, every, H200))
    assert prediction.candidate.launch.raster != "along_m"


def test_the_model_is_asked_twice_about_some_hundreds() -> None:
    for problem in _varied(60):
        model = Mock(wraps=predicted_us)
        assert predict(problem, H200, model) is not None
        assert model.call_count == 2
        assert sum(len(call.args[1]) for call in model.call_args_list) < 1000


def test_processors_that_round_differently_agree() -> None:
    """Of these, some have kernels that should take the same time."""
    chosen = random.Random(8)

    def rounded(
        problem: Problem, some: Sequence[Candidate], device: DeviceModel
    ) -> Sequence[float]:
        return [
            us * (1 + chosen.uniform(-1e-13, 1e-13)) for us in predicted_us(problem, some, device)
        ]

    for problem in _varied(60):
        expected = predict(problem, H200)
        assert expected is not None
        for _ in range(3):
            other = predict(problem, H200, rounded)
            assert other is not None
            assert other.candidate == expected.candidate


def test_the_first_answer_is_quick_once_its_kernels_are_made() -> None:
    """2.1 ms at the median of 300 problems on two busy cores; the bound is for busier ones."""
    predict(Problem(m=4096, n=4096, k=4096), H200)
    times = []
    for index in range(20):
        problem = Problem(m=72 + 8 * index, n=4096, k=4096)
        began = time.process_time()  # other processes want the cores, too
        predict(problem, H200)
        times.append(time.process_time() - began)
    assert statistics.median(times) < 0.01
