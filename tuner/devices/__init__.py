"""What a tuning run measures on: the local GPU, or a recorded one.

Importing this package imports neither torch nor CUDA. The devices themselves are imported when
they are opened: the measuring child imports this package too, and needs only the local GPU.
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
    """The device a user named.

    `cuda` or `cuda:<ordinal>` is a local GPU. `replay:<what>` is a recorded one, where <what> is
    a sweep file, the name of one in `sweeps` (with or without its suffix), a device's slug or name
    (all of its files in `sweeps`), or nothing (all files, which must be of one device). The name of
    a device model alone is the local GPU if it is of that model, else a recorded one.

    Raises:
        NoGpu: no such local GPU.
        NotRecorded: no such recording; the message lists those there are.
        RecordingCorrupt: a recording that cannot be read.
        DeviceError: a name of neither form.
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


def _replay(name: str, what: str, sweeps: Path) -> Device:
    from tuner.devices.replay import ReplayDevice

    return ReplayDevice(name, _sweeps(what, sweeps))


def _sweeps(what: str, folder: Path) -> list[Sweep]:
    from tuner.devices.recording import SUFFIX, Sweep

    for path in (Path(what), folder / what, folder / f"{what}{SUFFIX}"):
        if what and path.is_file():
            return [Sweep.load(path)]
    files = sorted(folder.glob(f"*{SUFFIX}"))
    loaded = [Sweep.load(path) for path in files]
    slugs = [sweep.header.device.slug for sweep in loaded]
    fitting = called(what, slugs) if what else slugs
    chosen = [sweep for sweep in loaded if sweep.header.device.slug in fitting]
    if not chosen:
        there = ", ".join(path.name.removesuffix(SUFFIX) for path in files) or "none"
        raise NotRecorded(
            f"no recording {what!r}: neither a file nor one in {folder}, nor a device recorded "
            f"there. Recordings there: {there}"
        )
    return chosen
