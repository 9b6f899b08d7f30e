"""A kernel pack in memory: a shared object whose kernels can be described and launched.

A pack is opened once per path and process and never closed: CUDA modules that kernels still run
from must not be unmapped. A file that cannot be a whole pack is refused before the dynamic linker
sees it, because mapping a truncated shared object can kill the process.
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
    """What one compiled kernel occupies; -1 where only a device can tell."""

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
        speaks: what of the C ABI the pack and this library have in common.
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
        """Load the pack at `path`, or return it if this process has it already.

        `sha256`, the expected hex digest of the file's bytes, is checked before loading.

        Raises:
            PackCorrupt: missing, truncated, not a shared object, or another digest.
            PackIncompatible: no C ABI version in common, or the linker cannot load it here.
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
        """The kernel of that procedural name.

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
    """One kernel of a pack. Its methods neither allocate device memory nor synchronize."""

    __slots__ = ("_can_implement", "_run", "_workspace", "index", "name", "pack")

    def __init__(self, pack: LoadedPack, index: int, name: str) -> None:
        self.pack = pack
        self.index = index
        self.name = name
        self._can_implement = pack.library.gs_can_implement
        self._workspace = pack.library.gs_workspace_bytes
        self._run = pack.library.gs_run

    def describe(self) -> Occupancy:
        """Threads, shared memory, stages; registers and spills once a device has been used.

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
        """Make the arguments ones that this pack can read. Whatever is asked of a kernel does so.

        Raises:
            LaunchFailed: they use a field that the pack, being older, does not know.
        """
        try:
            self.pack.speaks.fit(arguments)
        except ValueError as error:
            raise LaunchFailed(
                f"{self.name} is in an older pack: {error}; build or fetch it again", BAD_ABI
            ) from error

    def can_implement(self, arguments: Arguments) -> int:
        """Status of the kernel's own check of the arguments; 0 means it takes them."""
        self.fit(arguments)
        status: int = self._can_implement(self.index, ctypes.byref(arguments))
        return status

    def workspace_bytes(self, arguments: Arguments) -> int:
        """Device memory that `run` needs beside the operands.

        Raises:
            LaunchFailed: the arguments are not ones the kernel takes.
        """
        self.fit(arguments)
        size: int = self._workspace(self.index, ctypes.byref(arguments))
        if size < 0:
            raise LaunchFailed(f"{self.name}: no workspace size: {status_text(-size)}", size)
        return size

    def run(self, arguments: Arguments, workspace: int, stream: int) -> None:
        """Launch on a CUDA stream, given as pointers.

        Raises:
            LaunchFailed: the kernel or CUDA refused; nothing was launched.
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
    """A 64-bit ELF shared object ends with its section table: is all of it there?

    Raises:
        PackCorrupt: it is not, or the file is no such object or cannot be read.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(_ELF_HEADER.size)
    except OSError as error:
        raise PackCorrupt(f"cannot read the pack {path}: {error.strerror}") from error
    if len(head) < _ELF_HEADER.size or head[:4] != b"\x7fELF":
        raise PackCorrupt(f"{path} is not a shared object; delete it and build or fetch it again")
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
