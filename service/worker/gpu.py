"""This machine's GPU, if gemmsmith can use it."""

from __future__ import annotations

from gemmsmith.core.device import DeviceModel
from tuner.arch import MEASURED
from tuner.devices import local_gpu


def usable_gpu() -> DeviceModel | None:
    """Return the model of the local GPU; None without a GPU, or without kernels for it.

    A workstation's GPU of another architecture must not hide the winners in the database: lookups
    without a device are about the local GPU if there is one.
    """
    model = local_gpu()
    return model if model is not None and model.arch in MEASURED else None
