"""A file of kernels, `.gskernels`: a signed list of packs, and all the packs as one stream.

Packs share nearly all their host code, so they are compressed together, with a window that spans
hundreds of packs. The file is `MAGIC`, the length of the list (8 bytes, little-endian), the list
(JSON, compressed), and a frame of zstd with the bytes of the packs, in the order of the list.

The list says what the packs are built for. It has each pack's manifest, and one signature over
all, which is checked before anything else is read. It bounds all that is read: the packs have the
sizes that it says. No name in the file is a path.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec
import zstandard

from gemmsmith.core.bounds import BOUNDS
from gemmsmith.errors import PackCorrupt, PackError, PackIncompatible
from gemmsmith.files import replacing
from gemmsmith.runtime.abi import ABI_VERSION, OLDEST_ABI_VERSION
from gemmsmith.signing import PublicKey, Purpose, Signature, Signer, Trusted
from gemmsmith.version import VERSION
from tuner.arch import ARCHITECTURES
from tuner.compile.manifest import Manifest, Sha256, check_names

MAGIC = b"gskernels 1\n"

WINDOW_LOG = 27
"""128 MiB, which unpacking takes as memory. In the order of their kernels' names, 343 packs
(267 MB) have 18.4 MB; windows of 256 and 512 MiB make it 1% less (2026-11-26, docs/packs.md)."""

LARGEST_WINDOW = 2**29
"""The most memory, in bytes, that a file may demand for its window."""

_LEVEL = 19
_LENGTH = 8
_PIECE = 2**20


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class Contents(msgspec.Struct, frozen=True):
    """The list at the beginning of a file.

    Attributes:
        gemmsmith: the release that wrote it.
        arch: the architecture of the kernels, such as `sm90`.
        machine: the processors that the packs' host code runs on, such as `x86_64`.
        abi: the oldest and the newest version of the C ABI that the packs speak.
        packs: manifests by hash, in the order of the stream.
        signature: of all of this, by the installation that built the file.
    """

    gemmsmith: str
    arch: str
    machine: str
    abi: tuple[int, int]
    packs: dict[Sha256, Manifest]
    signature: Signature | None = None

    @property
    def bytes(self) -> int:
        """The size of all packs."""
        return sum(manifest.bytes for manifest in self.packs.values())

    @property
    def kernels(self) -> int:
        digests = {digest for manifest in self.packs.values() for digest in manifest.used_for}
        return len(digests)

    def check(self, trusted: Trusted) -> PublicKey:
        """The key that signed the list.

        Raises:
            Untrusted: there is no signature by a trusted key.
        """
        return trusted.check(Purpose.PACK, self.statement, self.signature)

    @property
    def statement(self) -> dict[str, Any]:
        content: dict[str, Any] = msgspec.to_builtins(self)
        del content["signature"]
        return content

    def check_fits(self, arch: str | None = None) -> None:
        """Check that the packs can be used with this release, processor and GPU.

        `arch` is the architecture of the GPU of this machine; None if it has no GPU.

        Raises:
            PackIncompatible: they cannot; the message says why.
        """
        if self.arch not in ARCHITECTURES or arch not in (None, self.arch):
            here = f"this GPU is {arch}" if arch else f"gemmsmith knows {', '.join(ARCHITECTURES)}"
            raise PackIncompatible(f"its kernels are for {self.arch}, and {here}")
        if self.machine != platform.machine():
            raise PackIncompatible(
                f"its packs are for {self.machine} processors, this one is {platform.machine()}"
            )
        oldest, newest = self.abi
        if newest < OLDEST_ABI_VERSION or oldest > ABI_VERSION:
            older = "file" if newest < OLDEST_ABI_VERSION else "gemmsmith"
            raise PackIncompatible(
                f"its packs speak versions {oldest} to {newest} of the C ABI, and gemmsmith "
                f"{VERSION} here {OLDEST_ABI_VERSION} to {ABI_VERSION}: take a newer {older}"
            )


def write(
    target: Path,
    packs: Mapping[str, tuple[Path, Manifest]],
    *,
    arch: str,
    signer: Signer,
    progress: Callable[[int], None] = lambda _: None,
) -> tuple[Contents, int]:
    """Write the packs, by hash, to the file `target`, which appears when it is complete.

    The signer vouches for all packs. The same packs and signer give the same bytes. `progress` is
    called with the number of packs that are written. Returns the list and the size in bytes.

    Raises:
        PackCorrupt: a pack is not here, or does not have the bytes that its name says.
        OSError: no space, or no permission; an earlier file is unchanged.
    """
    order = sorted(packs, key=lambda pack_hash: (packs[pack_hash][1].kernels, pack_hash))
    contents = Contents(
        gemmsmith=VERSION,
        arch=arch,
        machine=platform.machine(),
        abi=(OLDEST_ABI_VERSION, ABI_VERSION),
        packs={pack_hash: packs[pack_hash][1].signed(pack_hash, signer) for pack_hash in order},
    )
    signature = signer.sign(Purpose.PACK, contents.statement)
    contents = msgspec.structs.replace(contents, signature=signature)
    head = zstandard.ZstdCompressor(level=_LEVEL).compress(msgspec.json.encode(contents))
    parameters = zstandard.ZstdCompressionParameters.from_level(
        _LEVEL, window_log=WINDOW_LOG, enable_ldm=True
    )
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    with replacing(target) as aside, aside.open("wb") as file:
        file.write(MAGIC + len(head).to_bytes(_LENGTH, "little") + head)
        stream = compressor.stream_writer(file, size=contents.bytes, closefd=False)
        for number, pack_hash in enumerate(order, 1):
            stream.write(_whole(pack_hash, packs[pack_hash][0]))
            progress(number)
        stream.flush(zstandard.FLUSH_FRAME)
        file.flush()
        return contents, aside.stat().st_size


def read(file: BinaryIO, name: str) -> Contents:
    """The list of a file, which is read up to its packs. `name` is the file's, for messages.

    Raises:
        PackCorrupt: it is not a file of kernels, is truncated, or was written by a newer release.
        OSError: it cannot be read.
    """
    magic = file.read(len(MAGIC))
    if magic != MAGIC:
        if len(magic) == len(MAGIC) and magic.startswith(MAGIC[:-2]):
            raise PackCorrupt(f"{name} was written by a newer gemmsmith: upgrade to read it")
        raise PackCorrupt(f"{name} is not a file of kernels, such as `make kernels` builds")
    with _explaining(name):
        head = _exactly(file, _bounded(int.from_bytes(_exactly(file, _LENGTH), "little")))
        with zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW).stream_reader(head) as text:
            document = text.read(BOUNDS.answer_bytes)
        return msgspec.json.decode(document, type=Contents)


def packs(file: BinaryIO, contents: Contents, name: str) -> Iterator[tuple[str, bytes]]:
    """Yield the hash and the checked bytes of each pack, from a file that was read up to them.

    Raises:
        PackCorrupt: the file is truncated or damaged, or holds more than its list says.
        PackError: there is too little memory.
        OSError: it cannot be read.
    """
    decompressor = zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW)
    with (
        _explaining(name),
        decompressor.stream_reader(file, read_across_frames=True, closefd=False) as stream,
    ):
        for pack_hash, manifest in contents.packs.items():
            content = _exactly(stream, _bounded(manifest.bytes, BOUNDS.pack_bytes))
            _check(pack_hash, manifest, content)
            yield pack_hash, content
        _check_end(stream)


def _whole(pack_hash: str, path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        content = b""
    if hashlib.sha256(content).hexdigest() != pack_hash:
        raise PackCorrupt(f"pack {pack_hash[:16]}… is not whole in {path.parent}; compile it again")
    return content


def _check(pack_hash: str, manifest: Manifest, content: bytes) -> None:
    if hashlib.sha256(content).hexdigest() != pack_hash:
        raise PackCorrupt(f"the bytes of pack {pack_hash} do not match its hash")
    check_names(pack_hash, manifest, content)


def _check_end(stream: _Readable) -> None:
    if stream.read(1):
        raise PackCorrupt("it continues after its last pack")


def _bounded(length: int, bound: int = BOUNDS.answer_bytes) -> int:
    if not 0 < length <= bound:
        raise PackCorrupt(f"a part of it has {length} bytes")
    return length


def _exactly(stream: _Readable, count: int) -> bytes:
    """The next `count` bytes. No more memory is taken than bytes arrive."""
    content = bytearray()
    while len(content) < count:
        piece = stream.read(min(count - len(content), _PIECE))
        if not piece:
            raise PackCorrupt("it ends early")
        content += piece
    return bytes(content)


@contextmanager
def _explaining(name: str) -> Iterator[None]:
    """Says of which file an error is, and what to do.

    Raises:
        PackCorrupt, PackError: as `packs`.
    """
    try:
        yield
    except (MemoryError, PackCorrupt, zstandard.ZstdError, msgspec.DecodeError) as error:
        if isinstance(error, MemoryError) or "not enough memory" in str(error):
            raise PackError(
                f"{name} takes up to {LARGEST_WINDOW >> 20} MiB of memory to unpack, and there is "
                "too little: close other programs, or raise this program's limit"
            ) from error
        raise PackCorrupt(f"{name} is damaged or not whole ({error}): fetch it again") from error
