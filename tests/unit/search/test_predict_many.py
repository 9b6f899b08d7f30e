"""Many predictions are those that each problem gets by itself, to the last bit."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import Backend
from gemmsmith.core.problem import Problem
from tests.support.replacing import replace
from tests.support.serving import H100, H200
from tests.unit.service.test_cold_answers import A100, problems
from tuner.backends import kernels
from tuner.backends.columns import Extents, Fitted, Traits, every_launch
from tuner.backends.cutlass.launches import launches
from tuner.backends.cutlass3x import fitted
from tuner.errors import NoLegalCandidate
from tuner.search.cost_model import AnalyticModel
from tuner.search.predict import predict
from tuner.search.predict_many import AT_ONCE, predict_many

MODEL = AnalyticModel()
B200 = replace(H200, name="NVIDIA B200", arch="sm100", sm_count=148)
UNKNOWN = replace(H200, name="NVIDIA V100", arch="sm70")
DEVICES = [H200, H100, A100, B200, UNKNOWN]


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.arch + str(device.sm_count))
def test_each_is_the_one_it_gets_by_itself(device: DeviceModel) -> None:
    asked = problems(120, seed=20261123)
    asked += [Problem(m=2**31 - 1, n=2**31 - 1, k=1), Problem(m=2**31 - 1, n=8, k=2**20)]
    assert predict_many(asked, device, MODEL) == [predict(p, device, MODEL) for p in asked]


def test_however_many_there_are() -> None:
    few = 3
    asked = [Problem(m=8 * m, n=4096, k=4096) for m in range(1, AT_ONCE + few)]
    wanted = [predict(problem, H200, MODEL) for problem in asked]
    for count in (0, 1, few, AT_ONCE, len(asked)):
        assert predict_many(asked[:count], H200, MODEL) == wanted[:count]


def test_another_model_is_asked_one_by_one() -> None:
    class Last:
        def predict(
            self, problem: Problem, candidates: Sequence[Candidate], device: DeviceModel
        ) -> list[float]:
            return [float(-index) for index in range(len(candidates))]

    asked = problems(10, seed=1)
    assert predict_many(asked, H200, Last()) == [predict(p, H200, Last()) for p in asked]


def some(device: DeviceModel) -> list[Problem]:
    found = []
    for problem in problems(150, seed=7):
        try:
            kernels(problem, device.arch)
        except NoLegalCandidate:
            continue
        found.append(problem)
    return found


def extents(asked: Sequence[Problem]) -> Extents:
    import numpy

    columns = ([getattr(p, name) for p in asked] for name in ("m", "n", "k", "batch"))
    return Extents(*(numpy.array(column, dtype=float) for column in columns))


@pytest.mark.parametrize("device", [H200, A100, B200], ids=lambda device: device.arch)
def test_launches_in_columns_are_those_of_each_kernel(device: DeviceModel) -> None:
    import numpy

    for problem in some(device):
        known = kernels(problem, device.arch)
        found = every_launch(Traits.of(known, device), extents([problem] * len(known)), device)
        every = numpy.arange(len(found.places))
        pairs = list(zip(found.places.tolist(), found.named(every), strict=True))
        wanted = [
            (place, launch)
            for place, kernel in enumerate(known)
            for launch in launches(kernel, problem, device)
        ]
        assert len(pairs) == len(set(pairs)) == len(wanted)
        assert set(pairs) == set(wanted)


def test_fitted_kernels_in_columns_are_those_of_each_problem() -> None:
    asked = [p for p in some(H200) if p.dtype == "bf16" and p.operation.layout == "tn"]
    asked = [p for p in asked if kernels(p)[0].alignment_a == 8 and p.n % 8 == 0]
    curated = kernels(asked[0])
    offer = Fitted(curated, H200)
    of, places = offer.offered(extents(asked))
    assert curated[0].backend is Backend.CUTLASS3X
    total = 0
    for number, problem in enumerate(asked):
        mine = {offer.kernels[place].name for place in places[of == number].tolist()}
        wanted = {kernel.name for kernel in fitted.kernels(curated[0], problem, H200)}
        assert mine == wanted - {kernel.name for kernel in curated}
        total += len(mine)
    assert total > 10


def test_it_is_several_times_as_quick() -> None:
    """Ten times, on an idle machine."""
    asked = [Problem(m=8 * m, n=4096 + 8 * m, k=4096) for m in range(1, 300)]
    predict_many(asked, H200, MODEL)
    took = []
    one_by_one = lambda: [predict(problem, H200, MODEL) for problem in asked]  # noqa: E731
    for predicted in (lambda: predict_many(asked, H200, MODEL), one_by_one):
        began = time.process_time()
        predicted()
        took.append(time.process_time() - began)
    assert took[0] < took[1] / 3
