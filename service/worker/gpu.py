"""This machine's GPU, as far as gemmsmith can use it."""

from __future__ import annotations

from gemmsmith.core.device import DeviceModel
from tuner.arch import MEASURED
from tuner.devices import local_gpu


def usable_gpu() -> DeviceModel | None:
    """The model of the local GPU; None without one, or where there are no kernels for it.

    A workstation's GPU of another architecture must not hide the winners that are known.
    """
    model = local_gpu()
    return model if model is not None and model.arch in MEASURED else None
