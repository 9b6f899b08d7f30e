"""Predictions are prepared in the background, once the service is up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.operation import Operation
from service.lookup import ahead
from service.lookup.ahead import USUAL, Ahead
from service.lookup.devices import Catalogue
from service.lookup.neighbourhood import Chart
from tests.support.serving import H200
from tests.unit.service.test_cold_answers import problems
from tuner.backends.cutlass3x import fitted
from tuner.errors import StoreError
from tuner.search import cost_model, predict_many
from tuner.search.cost_model import AnalyticModel
from tuner.store import Store

SECONDS = 60


def done() -> None:
    """Wait for the thread's end."""
    for thread in threading.enumerate():
        if thread.name == "ahead":
            thread.join(SECONDS)
            assert not thread.is_alive()


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "AFTER_S", 0.0)


@pytest.fixture
def chart(tmp_path: Path) -> Iterator[Chart]:
    with Store.open(f"sqlite:///{tmp_path / 'ahead.db'}", create=True) as store:
        yield Chart(store)


def test_no_kernel_is_left_to_be_made(chart: Chart) -> None:
    model = AnalyticModel()
    with Ahead(Catalogue(list, H200), model, chart):
        done()
        before, described = fitted.legal.cache_info().misses, len(cost_model._KERNELS._places)
        usual = (each for each in problems(900, seed=5) if each.dtype in USUAL)
        asked = [each for each in usual if not (each.m | each.n | each.k) % 8]
        assert len(asked) > 100
        assert all(predict_many.predict_many(asked, H200, model))
        assert fitted.legal.cache_info().misses == before
        assert len(cost_model._KERNELS._places) == described


def test_a_service_that_stops_does_not_wait_for_it(
    monkeypatch: pytest.MonkeyPatch, chart: Chart
) -> None:
    made: list[Operation] = []
    began, go_on = threading.Event(), threading.Event()

    def slow(operation: Operation, _device: DeviceModel, _model: AnalyticModel) -> None:
        made.append(operation)
        began.set()
        assert go_on.wait(SECONDS)

    monkeypatch.setattr(ahead, "prepare_many", slow)
    with Ahead(Catalogue(list, H200), AnalyticModel(), chart):
        assert began.wait(SECONDS)
        threading.Timer(0.2, go_on.set).start()
    assert len(made) == 1


@pytest.mark.parametrize("broken", [True, False])
def test_without_a_device_nothing_is_prepared(
    monkeypatch: pytest.MonkeyPatch, chart: Chart, *, broken: bool
) -> None:
    def read() -> list[DeviceModel]:
        if broken:
            raise StoreError("the disk is gone")
        return []

    made: list[Operation] = []
    monkeypatch.setattr(ahead, "prepare_many", lambda operation, *_: made.append(operation))
    with Ahead(Catalogue(read, None), AnalyticModel(), chart):
        done()
    assert not made
