"""What commands that work on this machine open: the store, the device, the compiler."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

from gemmsmith.core.device import DeviceModel, called
from service.cli.options import device_called
from service.cli.output import CommandError, note

if TYPE_CHECKING:
    from service.settings import Settings
    from tuner.compile import Builder
    from tuner.devices.base import Device
    from tuner.search.ranking import Ranker
    from tuner.store import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningSession:
    """Everything a tuning run needs, opened; `device` is entered already."""

    store: Store
    device: Device
    builder: Builder | None
    ranker: Ranker


@contextmanager
def local(settings: Settings) -> Iterator[TuningSession]:
    """Open this machine for tuning; the device stays entered until the end.

    Raises:
        StoreError, DeviceError, CompilerNotFound: what is missing and how to get it.
        SettingsError: the key that winners are signed with cannot be used.
    """
    from service import identity
    from service.database import open_store
    from service.worker.builder import open_builder
    from service.worker.process import open_worker_device
    from tuner.search.cost_model import AnalyticModel

    settings.create_folders()
    signer = identity.signer(settings)
    with open_store(settings, signer=signer, on_made=say_made) as store:
        device = open_worker_device(settings)
        builder = open_builder(settings, store) if device.needs_packs else None
        with device:
            yield TuningSession(store=store, device=device, builder=builder, ranker=AnalyticModel())


def say_made(winners: int) -> None:
    """Tell of a new database, and what is in it."""
    if winners:
        note(f"created the database with {winners} shipped winners")


def model_of(settings: Settings, name: str | None) -> DeviceModel:
    """The device model that people call by this name, by default the first one at hand.

    Raises:
        CommandError: there is none, or not this one; lists those there are.
    """
    known: dict[str, DeviceModel] = {}
    for models in _models(settings):
        known |= {model.slug: model for model in models}
        fitting = called(name, known) if name else list(known)
        if fitting and (not name or len(fitting) == 1):
            return known[fitting[0]]
    if not known:
        raise CommandError(
            "no GPU here, none in the database and no recording: run `gemmsmith db "
            "upgrade` first, or pass --sweeps with a folder of recorded sweeps"
        )
    return known[device_called(name or "", known)]


def _models(settings: Settings) -> Iterator[Sequence[DeviceModel]]:
    """Device models at hand: the local GPU, those of the database with the default model
    first, the recorded ones.

    A database that is missing or unusable counts as empty: listing what could run needs none.
    """
    from service.lookup.devices import default_first
    from tuner.devices import local_gpu
    from tuner.devices.recording import SUFFIX, Sweep
    from tuner.errors import RecordingCorrupt, StoreError
    from tuner.store import Store

    local_model = local_gpu()
    if local_model is not None:
        yield [local_model]
    models: list[DeviceModel] = []
    with contextlib.suppress(StoreError), Store.open(settings.database) as store:
        models = store.devices()
    yield default_first(models, settings.default_model)
    # Only read when nothing before was the one: a recording takes seconds to load.
    for path in sorted(settings.sweeps.glob(f"*{SUFFIX}")):
        with contextlib.suppress(RecordingCorrupt):
            yield [Sweep.load(path).header.device]


_STOPPING = b"stopping after the current candidate; once more to stop at once\n"


class StopFlag:
    """Ctrl-C or SIGTERM asks for a clean stop; a second one interrupts at once."""

    def __init__(self) -> None:
        self._set = False
        self._before: dict[int, object] = {}

    def __call__(self) -> bool:
        """Whether to stop."""
        return self._set

    def __enter__(self) -> StopFlag:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._stop)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        if self._set:
            raise KeyboardInterrupt
        self._set = True
        # Not by `sys.stderr`: the signal may have come while that was being written to, and a
        # second write within the first one raises.
        with contextlib.suppress(OSError):
            os.write(sys.stderr.fileno(), _STOPPING)
