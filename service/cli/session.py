"""What commands open: a service by its URL, or this machine's database, device and compiler."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from gemmsmith.core.device import DeviceModel, called
from service.cli.options import SourceOptions, load_settings
from service.cli.output import CommandError, MisuseError, note
from tuner.signals import handled

if TYPE_CHECKING:
    from gemmsmith.http.client import Client
    from gemmsmith.signing import Signer
    from service.settings import Settings
    from tuner.compile import Builder
    from tuner.devices.base import Device
    from tuner.store import Store

T = TypeVar("T")

_NO_HOST = re.compile(r"Name or service not known|No address associated|failure in name resolution")
_NO_TLS = re.compile(r"WRONG_VERSION_NUMBER|wrong version number|RECORD_LAYER_FAILURE")
_REFUSED = re.compile(r"Connection refused|All connection attempts failed|No route to host")
_NO_ROUTE = (404, "Not Found")
"""Status and title of a service's answer for a path that it does not have."""


@contextmanager
def connect(url: str, **options: Any) -> Iterator[Client]:
    """A client of the service at `url`.

    Raises:
        MisuseError: this is not a URL, or not that of a gemmsmith service.
        CommandError: nothing answers there.
    """
    from gemmsmith.http.client import Client

    try:
        client = Client(url, **options)
    except ValueError as error:
        raise MisuseError(str(error)) from error
    with blaming(url), client:
        yield client


@contextmanager
def blaming(url: str) -> Iterator[None]:
    """Explain failures to reach a service that come from a wrong URL.

    Raises:
        MisuseError, CommandError: as `connect`.
    """
    from gemmsmith.errors import ServiceError, ServiceUnavailable

    try:
        yield
    except ServiceUnavailable as error:
        if _NO_HOST.search(str(error)):
            raise MisuseError(f"the URL {url} is wrong: there is no such host") from error
        if _NO_TLS.search(str(error)):
            plain = url.replace("https:", "http:", 1)
            raise MisuseError(
                f"the URL {url} is wrong: what answers there speaks no TLS; try {plain}"
            ) from error
        if _REFUSED.search(str(error)):
            raise CommandError(
                f"nothing answers at {url}: start a service there with `gemmsmith serve`, or "
                "correct the URL (--url, GEMMSMITH_URL)"
            ) from error
        raise
    except ServiceError as error:
        if 300 <= error.status < 400:
            raise MisuseError(f"the URL {url} is wrong: {error.detail}") from error
        if not error.document.keys() - {"detail"}:
            raise MisuseError(
                f"the URL {url} is wrong: what answers there is no gemmsmith service "
                f"({error.status} {error.title})"
            ) from error
        if (root := _root(url)) != url.rstrip("/") and (error.status, error.title) == _NO_ROUTE:
            raise MisuseError(f"the URL {url} is wrong: the service is at {root}") from error
        raise


def _root(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


@contextmanager
def opened(source: SourceOptions, here: Callable[[Store, Settings], T]) -> Iterator[Client | T]:
    """A client of the source's service, else what `here` makes of the local database."""
    if source.url:
        with connect(source.url) as client:
            yield client
        return
    from tuner.store import Store

    settings = load_settings(database=source.database)
    with Store.open(settings.database) as store:
        yield here(store, settings)


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningSession:
    """Everything a tuning run needs, opened; `device` is entered already."""

    store: Store
    device: Device
    builder: Builder | None


def existing_store(database: str | None) -> Store:
    from tuner.store import Store

    return Store.open(load_settings(database=database).database)


def made_store(settings: Settings, signer: Signer | None = None) -> Store:
    """This installation's database, which is made if it does not exist."""
    from service.database import open_store

    def on_made(winners: int) -> None:
        if winners:
            note(f"created the database with {winners} shipped winners")

    return open_store(settings, signer=signer, on_made=on_made)


def signed_store(settings: Settings) -> Store:
    """As `made_store`; it signs the winners that are measured here."""
    from service import identity

    settings.create_folders()
    return made_store(settings, identity.signer(settings))


@contextmanager
def tuning_session(
    settings: Settings, store: Store, device: Device | None = None
) -> Iterator[TuningSession]:
    """Open this machine's device and compiler; the device stays entered until the end.

    `device` is the device, if it is open already.

    Raises:
        DeviceError, CompilerNotFound: what is missing and how to get it.
    """
    from service.worker.builder import open_builder
    from service.worker.process import open_worker_device

    device = device or open_worker_device(settings)
    builder = open_builder(settings, store) if device.needs_packs else None
    with device:
        yield TuningSession(store=store, device=device, builder=builder)


def device_called(name: str, slugs: Iterable[str]) -> str:
    """The slug of the device model with this name, as people type it.

    Raises:
        CommandError: no device has this name, or several have.
    """
    known = list(dict.fromkeys(slugs))
    fitting = called(name, known)
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise CommandError(f"device {name!r} is ambiguous: say {' or '.join(fitting)}")
    raise CommandError(f"no device {name!r}; there is {', '.join(known) or 'none'}")


def device_of(store: Store, name: str) -> str:
    return device_called(name, [model.slug for model in store.devices()])


def model_of(settings: Settings, name: str | None, store: Store | None = None) -> DeviceModel:
    """The device model with this name, as people type it; without a name the first at hand.

    `store` is the database, if it is open.

    Raises:
        CommandError: no device model is known, or not this one; lists the known ones.
    """
    known: dict[str, DeviceModel] = {}
    for models in _models(settings, store):
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


def _models(settings: Settings, store: Store | None) -> Iterator[Sequence[DeviceModel]]:
    """Device models at hand: the local GPU, those of the database with the default model first,
    the recorded ones.

    A database that is missing or unusable counts as empty: listing what could run does not need it.
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
    with contextlib.suppress(StoreError):
        if store is not None:
            models = store.devices()
        else:
            with Store.open(settings.database) as opened:
                models = opened.devices()
    yield default_first(models, settings.default_model)
    # Read only if no model before fits: a recording takes seconds to load.
    for path in sorted(settings.sweeps.glob(f"*{SUFFIX}")):
        with contextlib.suppress(RecordingCorrupt):
            yield [Sweep.load(path).header.device]


_STOPPING = b"stopping after the current candidate; once more to stop at once\n"


@contextmanager
def stop_flag() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C or SIGTERM has asked for a clean stop; a second one interrupts at once."""
    stopping = False

    def stop(_number: int, _frame: FrameType | None) -> None:
        nonlocal stopping
        if stopping:
            raise KeyboardInterrupt
        stopping = True
        # Not by `sys.stderr`: the signal may have come while that was being written to, and a
        # second write within the first one raises.
        with contextlib.suppress(OSError):
            os.write(sys.stderr.fileno(), _STOPPING)

    with handled((signal.SIGINT, signal.SIGTERM), stop):
        yield lambda: stopping
