"""Installs files of kernels, from a path or a URL, by command and at the start of a service.

A file from a URL is read as it arrives: if the packs of its list are all here, the rest is not
fetched.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import structlog

from gemmsmith.errors import GemmsmithError, PackCorrupt, PackIncompatible
from gemmsmith.http.download import download
from gemmsmith.showing import address
from gemmsmith.signing import Purpose
from service import identity
from service.settings import Settings, SettingsError
from service.worker.builder import open_artifacts, record
from tuner.backends import compiles
from tuner.backends.unit import kernel_digest
from tuner.compile import kernels_file
from tuner.compile.install import PackKeys, lacking
from tuner.compile.install import install as take
from tuner.compile.kernels_file import Contents
from tuner.devices import local_gpu
from tuner.errors import TunerError
from tuner.store import Store

log = structlog.get_logger("gemmsmith.kernels")

_SLACK = 2**20
"""Bytes by which a compressed stream may be larger than what is in it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Installed:
    """The contents of a file, and how many of its packs were not here before."""

    contents: Contents
    added: int


def install(
    settings: Settings,
    records: Store,
    source: str,
    progress: Callable[[str, int, int], None] = lambda _step, _done, _total: None,
) -> Installed:
    """Install a file of kernels from a path or an http URL; packs that are here already stay.

    `progress` gets the step, and how many packs of how many are done.

    Raises:
        PackCorrupt: it is not a whole file of kernels.
        PackIncompatible: its kernels cannot be used here.
        PackError: there is too little memory.
        Untrusted: no trusted key has signed it.
        DiskFull: there is too little space.
        ServiceError, ServiceUnavailable: the URL has no such file, or cannot be reached.
        SettingsError: the keys cannot be used.
        OSError: the file cannot be read.
    """
    name = address(source)
    with opened(source) as (file, contents):
        _check_fits(contents, name)
        keys = PackKeys(
            trusted=identity.trusted_packs(settings),
            shipped=identity.shipped(settings, Purpose.PACK),
            signer=identity.signer(settings),
        )
        manifests = keys.believed(contents, name)
        artifacts = open_artifacts(settings, records)
        total, added = len(contents.packs), 0
        if lacking(contents, artifacts):
            with _seekable(file, contents, settings.packs, name) as whole:
                for _ in take(
                    artifacts, whole, contents, manifests, name,
                    lambda step, done: progress(step, done, total),
                ):  # fmt: skip
                    added += 1
        recorded = {pack_hash for pack_hash, _ in records.changes.packed()}
        for pack_hash in contents.packs.keys() - recorded:
            if (pack := artifacts.get(pack_hash)) is not None:
                record(records, pack, {})
    return Installed(contents=contents, added=added)


def of_winners(records: Store, contents: Contents) -> tuple[int, int]:
    """How many of the kernels that winners run on the file's architecture are in it, of how many.

    Kernels are compared by their source text: those of another release do not count.
    """
    digests = {digest for manifest in contents.packs.values() for digest in manifest.used_for}
    run = [winner.runs.kernel for winner in records.winners() if winner.runs is not None]
    kernels = {kernel.name: kernel for kernel in run if kernel.arch == contents.arch}
    ready = sum(kernel_digest(k) in digests for k in kernels.values() if compiles(k))
    return ready, len(kernels)


def install_named(settings: Settings) -> None:
    """Install what `GEMMSMITH_KERNELS` names. If that fails, the log says why; nothing stops."""
    if not settings.kernels:
        return
    source = address(settings.kernels)
    try:
        with Store.open(settings.database) as records:
            installed = install(settings, records, settings.kernels)
    except (GemmsmithError, TunerError, OSError, ValueError) as error:
        log.warning("kernels are not installed", source=source, reason=str(error))
        return
    contents = installed.contents
    log.info(
        "kernels", source=source, kernels=contents.kernels, packs=len(contents.packs),
        added=installed.added,
    )  # fmt: skip


@contextmanager
def opened(source: str) -> Iterator[tuple[BinaryIO, Contents]]:
    """A file of kernels from a path or a URL, read up to its packs, and its list.

    Raises:
        As `install`.
    """
    if source.startswith(("http://", "https://")):
        file: BinaryIO = io.BufferedReader(_Body(download(source)))
    else:
        file = Path(source).open("rb")  # noqa: SIM115
    with file:
        try:
            contents = kernels_file.read(file, address(source))
        except ValueError as error:
            raise SettingsError(str(error)) from error
        yield file, contents


class _Body(io.RawIOBase):
    """The pieces of a download as a file."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = piece
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


def _check_fits(contents: Contents, name: str) -> None:
    gpu = local_gpu()
    try:
        contents.check_fits(None if gpu is None else gpu.arch)
    except PackIncompatible as error:
        raise PackIncompatible(f"{name} is not installed: {error}") from None


@contextmanager
def _seekable(file: BinaryIO, contents: Contents, folder: Path, name: str) -> Iterator[BinaryIO]:
    """The rest of the file, which can be read twice: a pipe or a download goes to the disk first.

    Raises:
        PackCorrupt: there is more than the list says.
    """
    if file.seekable():
        yield file
        return
    with tempfile.TemporaryFile(dir=folder) as whole:  # without a name: a kill leaves nothing
        most = contents.bytes + _SLACK
        while piece := file.read(_SLACK):
            whole.write(piece)
            if whole.tell() > most:
                raise PackCorrupt(f"{name} is larger than its list says: do not use it")
        whole.seek(0)
        yield whole
