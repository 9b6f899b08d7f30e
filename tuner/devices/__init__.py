"""Devices that a tuning run measures on: the local GPU, or a recorded one.

Importing this package imports neither torch nor CUDA. A device's module is imported when the device
is opened, because the measuring child imports this package too and needs neither of them.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from gemmsmith.core.device import called
from tuner import places
from tuner.devices.base import Contender, Device
from tuner.errors import DeviceError, NotRecorded
from tuner.measure.local_gpu import gpu_uuid, local_gpu
from tuner.measure.policy import Policy

if TYPE_CHECKING:
    from tuner.devices.recording import Sweep

DEFAULT_SWEEPS = places.shipped("configs/sweeps")

__all__ = ["Contender", "Device", "Policy", "gpu_uuid", "local_gpu", "open_device"]


def open_device(name: str, *, sweeps: Path = DEFAULT_SWEEPS) -> Device:
    """Open the device of a name that a user typed.

    `cuda` or `cuda:<ordinal>` is a local GPU. `replay:<source>` is a recorded GPU; the source is a
    sweep file, the name of a file in `sweeps` (with or without its suffix), a device's slug or name
    (all of its files in `sweeps`), or empty (all files, which must be of one device model). A
    device model alone is the local GPU if it is of that model, otherwise its recordings.

    Raises:
        NoGpu: there is no such local GPU.
        NotRecorded: there is no such recording; the message lists the existing ones.
        RecordingCorrupt: a recording cannot be read.
        DeviceError: the name has neither form.
    """
    kind, _, rest = name.partition(":")
    if kind == "cuda" and (not rest or rest.isdigit()):
        from tuner.devices.cuda import CudaDevice

        return CudaDevice(int(rest or 0))
    if kind == "replay":
        return _replay(name, rest, sweeps)
    local = local_gpu()
    if local is not None and called(name, [local.slug]):
        return open_device("cuda:0")
    if name:
        with suppress(NotRecorded):
            return _replay(f"replay:{name}", name, sweeps)
    raise DeviceError(f"no device is called {name!r}; say cuda:0 or replay:<recording>")


def _replay(name: str, source: str, sweeps: Path) -> Device:
    from tuner.devices.replay import ReplayDevice

    return ReplayDevice(name, _sweeps(source, sweeps))


def _sweeps(source: str, folder: Path) -> list[Sweep]:
    from tuner.devices.recording import SUFFIX, Sweep

    for path in (Path(source), folder / source, folder / f"{source}{SUFFIX}"):
        if source and path.is_file():
            return [Sweep.load(path)]
    files = sorted(folder.glob(f"*{SUFFIX}"))
    loaded = [Sweep.load(path) for path in files]
    slugs = [sweep.header.device.slug for sweep in loaded]
    fitting = called(source, slugs) if source else slugs
    chosen = [sweep for sweep in loaded if sweep.header.device.slug in fitting]
    if not chosen:
        there = ", ".join(path.name.removesuffix(SUFFIX) for path in files) or "none"
        raise NotRecorded(
            f"no recording {source!r}: neither a file nor one in {folder}, nor a device recorded "
            f"there. Recordings there: {there}"
        )
    return chosen
