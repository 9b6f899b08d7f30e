"""What predictions need, made before somebody asks for one.

The kernels that may be predicted for an operation take 0.1 s to enumerate, once a process. A thread
does that when the service has been up for a moment, so that neither its start nor its first
predictions wait. The chart of what was measured is drawn then, too, if it was not by then.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Self

from gemmsmith.core.operation import DType, Operation, layouts_of
from service.lookup.devices import Catalogue
from service.lookup.neighbourhood import Chart
from tuner.errors import StoreError
from tuner.search.cost_model import AnalyticModel
from tuner.search.predict_many import prepare_many

AFTER_S = 2.0
"""From the start of the service."""

USUAL = (DType.BF16, DType.FP16, DType.FP8_E4M3)
"""What is prepared, in all layouts; others are when they are asked for."""


class Ahead:
    """A thread that prepares predictions for the usual device model while its context is entered.

    Args:
        catalogue: says which model is meant where none is named.
        ranker: what predicts.
        chart: what was measured.
    """

    def __init__(self, catalogue: Catalogue, ranker: AnalyticModel, chart: Chart) -> None:
        self._catalogue = catalogue
        self._chart = chart
        self._ranker = ranker
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ahead", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        if self._stopping.wait(AFTER_S):
            return
        try:
            self._chart.catch_up()
            device = self._catalogue.resolve(None, None)
        except StoreError:
            return  # whoever asks will be told
        if device is None:
            return
        for operation in _usual():
            if self._stopping.is_set():
                return
            prepare_many(operation, device, self._ranker)


def _usual() -> Iterator[Operation]:
    for dtype in USUAL:
        for layout in layouts_of(dtype):
            yield Operation.of(dtype, layout)
