"""A kernel pack in memory: a shared object whose kernels can be described and launched.

A pack is opened once per path and process and never closed, because a CUDA module must not be
unmapped while its kernels run. A truncated file is rejected before the dynamic linker loads it:
mapping a truncated shared object can kill the process.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from gemmsmith.errors import LaunchFailed, PackCorrupt, PackError, PackIncompatible
from gemmsmith.runtime.abi import (
    BAD_ABI,
    Arguments,
    KernelInfo,
    Spoken,
    declare,
    spoken,
    status_text,
)

_ELF_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")


@dataclass(frozen=True, kw_only=True, slots=True)
class Occupancy:
    """The resources of a compiled kernel. A field that only a device can report is -1."""

    threads: int
    shared_bytes: int
    stages: int
    registers: int
    local_bytes: int


class LoadedPack:
    """An opened kernel pack. Get one from `LoadedPack.open`.

    Attributes:
        path: the shared object.
        kernels: names of its kernels, by index.
        speaks: the version of the C ABI that the pack and this library share.
    """

    _opened: ClassVar[dict[str, LoadedPack]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, path: Path, library: ctypes.CDLL, speaks: Spoken) -> None:
        self.path = path
        self.library = library
        self.speaks = speaks
        names = [library.gs_kernel_name(i) for i in range(library.gs_kernel_count())]
        if not names or None in names:
            raise PackCorrupt(f"{path} holds no named kernels; build or fetch it again")
        self.kernels: tuple[str, ...] = tuple(name.decode() for name in names)
        self._index = {name: i for i, name in enumerate(self.kernels)}

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, sha256: str | None = None) -> LoadedPack:
        """Load the pack at `path`, or return the pack that this process has loaded before.

        `sha256`, the expected hex digest of the file's bytes, is checked before loading.

        Raises:
            PackCorrupt: the file is missing, truncated, not a shared object, or has another digest.
            PackIncompatible: no C ABI version in common, or the linker cannot load it.
        """
        real = Path(path).resolve()
        with cls._lock:
            if sha256 is not None:
                _check_digest(real, sha256)
            pack = cls._opened.get(str(real))
            if pack is None:
                check_whole(real)
                pack = cls(real, *_load(real))
                cls._opened[str(real)] = pack
        return pack

    def kernel(self, name: str) -> LoadedKernel:
        """The kernel with this name.

        Raises:
            PackError: the pack does not hold it.
        """
        index = self._index.get(name)
        if index is None:
            raise PackError(
                f"{self.path.name} does not hold {name}; it holds {len(self.kernels)} others, "
                f"the first being {self.kernels[0]}"
            )
        return LoadedKernel(self, index, name)


class LoadedKernel:
    """A kernel of a pack. Its methods neither allocate device memory nor synchronize."""

    __slots__ = ("_can_implement", "_run", "_workspace", "index", "name", "pack")

    def __init__(self, pack: LoadedPack, index: int, name: str) -> None:
        self.pack = pack
        self.index = index
        self.name = name
        self._can_implement = pack.library.gs_can_implement
        self._workspace = pack.library.gs_workspace_bytes
        self._run = pack.library.gs_run

    def describe(self) -> Occupancy:
        """The kernel's resources; registers and spills only after a device has been used.

        Raises:
            LaunchFailed: the pack reported an error.
        """
        info = KernelInfo(registers=-1, local_bytes=-1)
        self.pack.speaks.fit(info)
        status = self.pack.library.gs_kernel_describe(self.index, ctypes.byref(info))
        if status != 0:
            raise LaunchFailed(f"{self.name}: {status_text(status)}", status)
        return Occupancy(
            threads=info.threads,
            shared_bytes=info.shared_bytes,
            stages=info.stages,
            registers=info.registers,
            local_bytes=info.local_bytes,
        )

    def fit(self, arguments: Arguments) -> None:
        """Prepare arguments for this pack. The other methods call it themselves.

        Raises:
            LaunchFailed: the arguments use a field that the older pack does not know.
        """
        try:
            self.pack.speaks.fit(arguments)
        except ValueError as error:
            raise LaunchFailed(
                f"{self.name} is in an older pack: {error}; build or fetch it again", BAD_ABI
            ) from error

    def can_implement(self, arguments: Arguments) -> int:
        """The status of the kernel's own check of the arguments; 0 if it supports them."""
        self.fit(arguments)
        status: int = self._can_implement(self.index, ctypes.byref(arguments))
        return status

    def workspace_bytes(self, arguments: Arguments) -> int:
        """Bytes of device memory that `run` needs in addition to the operands.

        Raises:
            LaunchFailed: the kernel does not support the arguments.
        """
        self.fit(arguments)
        size: int = self._workspace(self.index, ctypes.byref(arguments))
        if size < 0:
            raise LaunchFailed(f"{self.name}: no workspace size: {status_text(-size)}", size)
        return size

    def run(self, arguments: Arguments, workspace: int, stream: int) -> None:
        """Launch with a workspace on a CUDA stream, both passed as pointers.

        Raises:
            LaunchFailed: the kernel or CUDA reported an error; nothing was launched.
        """
        self.fit(arguments)
        status = self._run(self.index, ctypes.byref(arguments), workspace, stream)
        if status != 0:
            raise LaunchFailed(f"{self.name}: {status_text(status)}", status)


def _check_digest(path: Path, expected: str) -> None:
    try:
        with path.open("rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise PackCorrupt(f"cannot read the pack {path}: {error.strerror}") from error
    if actual != expected.lower():
        raise PackCorrupt(
            f"{path} has SHA-256 {actual}, expected {expected}; delete it and fetch it again"
        )


def check_whole(path: Path) -> None:
    """Check that a file is a complete 64-bit ELF shared object.

    Raises:
        PackCorrupt: the file is truncated, is not a shared object, or cannot be read.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(_ELF_HEADER.size)
    except OSError as error:
        raise PackCorrupt(f"cannot read the pack {path}: {error.strerror}") from error
    if len(head) < _ELF_HEADER.size or head[:4] != b"\x7fELF":
        raise PackCorrupt(f"{path} is not a shared object; delete it and build or fetch it again")
    # The section table is the last part of the file, so a truncated file lacks the table's end.
    fields = _ELF_HEADER.unpack(head)
    sections_at, section_size, section_count = fields[6], fields[11], fields[12]
    if sections_at + section_size * section_count > size:
        raise PackCorrupt(
            f"{path} is truncated ({size} bytes); delete it and build or fetch it again"
        )


def _load(path: Path) -> tuple[ctypes.CDLL, Spoken]:
    try:
        library = ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)
    except OSError as error:
        raise PackIncompatible(f"the pack {path} does not load on this machine: {error}") from error
    try:
        speaks = spoken(library)
        declare(library)
    except AttributeError as error:
        raise PackIncompatible(f"{path} is not a kernel pack: {error}") from error
    except ValueError as error:
        raise PackIncompatible(
            f"{path} has {error}; fetch or build the pack with a matching gemmsmith"
        ) from error
    return library, speaks
