"""Files of kernels: what went in comes out, and any other file is one line of error."""

from __future__ import annotations

import io
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

import msgspec
import pytest
import zstandard

from gemmsmith.core.bounds import BOUNDS
from gemmsmith.core.problem import Problem
from gemmsmith.errors import GemmsmithError, PackCorrupt, PackIncompatible, Untrusted
from gemmsmith.runtime.abi import ABI_VERSION
from gemmsmith.signing import Purpose, Signer, Trusted
from tuner.backends import kernels
from tuner.compile import ArtifactStore, Toolchain
from tuner.compile import kernels_file as files
from tuner.compile.kernels_file import MAGIC, Contents

TOOLCHAIN = Toolchain(nvcc=Path("nvcc"), version="13.0.88", origin="wheels")
KERNELS = kernels(Problem(m=256, n=256, k=256))[:5]
LENGTH = slice(len(MAGIC), len(MAGIC) + 8)


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    return Signer.create(tmp_path / "signing.key")


@pytest.fixture
def packs(tmp_path: Path) -> ArtifactStore:
    """Three packs of a kernel, and one of two."""
    store, common = ArtifactStore(tmp_path / "packs"), os.urandom(3000)
    for number, held in enumerate((KERNELS[:2], *([kernel] for kernel in KERNELS[2:]))):
        compiled = tmp_path / "unit.so"
        names = b"".join(kernel.name.encode() + b"\0" for kernel in held)
        compiled.write_bytes(b"\x7fELF" + common + names + bytes([number]) * 200)
        store.publish(compiled, held, TOOLCHAIN)
    return store


@pytest.fixture
def whole(packs: ArtifactStore, signer: Signer, tmp_path: Path) -> bytes:
    """A file with these packs."""
    write(packs, signer, tmp_path / "whole.gskernels")
    return (tmp_path / "whole.gskernels").read_bytes()


def write(packs: ArtifactStore, signer: Signer, target: Path) -> tuple[Contents, int]:
    held = {name: (packs.root / f"{name}.so", manifest) for name, manifest in packs.manifests()}
    return files.write(target, held, arch="sm90", signer=signer)


def read(content: bytes, trusted: Trusted | None = None) -> dict[str, bytes]:
    """The packs of a file; with `trusted`, only if their list is signed."""
    file = io.BytesIO(content)
    contents = files.read(file, "odd.gskernels")
    if trusted is not None:
        contents.check(trusted)
    return dict(files.packs(file, contents, "odd.gskernels"))


def parts(whole: bytes) -> tuple[Contents, bytes]:
    """The list, and the compressed packs."""
    end = LENGTH.stop + int.from_bytes(whole[LENGTH], "little")
    document = zstandard.ZstdDecompressor().decompress(whole[LENGTH.stop : end])
    return msgspec.json.decode(document, type=Contents), whole[end:]


def joined(document: bytes, stream: bytes) -> bytes:
    head = zstandard.ZstdCompressor().compress(document)
    return MAGIC + len(head).to_bytes(8, "little") + head + stream


def relisted(whole: bytes, change: Callable[[dict[str, object]], object]) -> bytes:
    """The file with another list."""
    contents, stream = parts(whole)
    document = msgspec.to_builtins(contents)
    change(document)
    return joined(msgspec.json.encode(document), stream)


def test_packs_come_back(
    packs: ArtifactStore, signer: Signer, whole: bytes, tmp_path: Path
) -> None:
    trusted = Trusted([signer.public])
    assert read(whole, trusted) == {p.hash: p.path.read_bytes() for p in packs.packs()}
    contents = files.read(io.BytesIO(whole), "whole")
    assert (contents.arch, contents.machine) == ("sm90", platform.machine())
    assert (contents.kernels, len(contents.packs)) == (5, 4)
    assert contents.bytes == sum(p.path.stat().st_size for p in packs.packs())
    for pack_hash, manifest in contents.packs.items():
        assert manifest.check(pack_hash, trusted) == signer.public
    contents.check_fits()
    contents.check_fits("sm90")
    again = tmp_path / "again.gskernels"
    assert write(packs, signer, again) == (contents, len(whole))
    assert again.read_bytes() == whole


def test_packs_share_what_is_alike(whole: bytes) -> None:
    contents, stream = parts(whole)
    assert contents.bytes > 4 * 3000
    assert len(stream) < 4500


def test_a_damaged_pack_is_not_packed(packs: ArtifactStore, signer: Signer, tmp_path: Path) -> None:
    target = tmp_path / "kernels.gskernels"
    target.write_bytes(b"an earlier file")
    first, second = packs.packs()[:2]
    held = {name: (packs.root / f"{name}.so", manifest) for name, manifest in packs.manifests()}
    whole = first.path.read_bytes()
    first.path.write_bytes(whole[:-1] + b"?")
    with pytest.raises(PackCorrupt, match="is not whole"):
        files.write(target, held, arch="sm90", signer=signer)
    first.path.write_bytes(whole)
    second.path.unlink()
    with pytest.raises(PackCorrupt, match="is not whole"):
        files.write(target, held, arch="sm90", signer=signer)
    assert target.read_bytes() == b"an earlier file"


def test_a_file_that_ends_early_is_refused_wherever_it_ends(whole: bytes) -> None:
    for length in range(len(whole)):
        with pytest.raises(PackCorrupt) as caught:
            read(whole[:length])
        assert "\n" not in str(caught.value)


def test_a_file_with_any_byte_changed_is_refused(whole: bytes, signer: Signer) -> None:
    random, trusted = Random(43), Trusted([signer.public])
    same, refused = read(whole), 0
    for _ in range(600):
        content = bytearray(whole)
        for _ in range(random.choice((1, 1, 8))):
            content[random.randrange(len(content))] = random.randrange(256)
        with suppress(PackCorrupt, Untrusted):
            assert read(bytes(content), trusted) == same
            continue
        refused += 1
    assert refused > 500


ZEROS = zstandard.ZstdCompressor().compress(bytes(2**26))


def windowed(log: int) -> bytes:
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=log, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return compressor.compress(b"bytes") + compressor.flush()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda whole: b"", "not a file of kernels"),
        (lambda whole: whole[: len(MAGIC) - 1], "not a file of kernels"),
        (lambda whole: b"PK\x03\x04" + whole, "not a file of kernels"),
        (lambda whole: MAGIC.replace(b"1", b"2") + whole, "newer gemmsmith: upgrade"),
        (lambda whole: whole + b"\0", "damaged"),
        (lambda whole: whole + ZEROS, "continues after its last pack"),
        (lambda whole: joined(b"{}", whole), "damaged"),
        (lambda whole: joined(b"[" * 10**6, whole), "damaged"),
        (lambda whole: MAGIC + b"\xff" * 8 + whole, "a part of it has"),
        (lambda whole: MAGIC + bytes(8) + whole, "a part of it has 0 bytes"),
        (lambda whole: MAGIC + len(ZEROS).to_bytes(8, "little") + ZEROS, "damaged"),
        (lambda whole: joined(msgspec.json.encode(parts(whole)[0]), ZEROS), "do not match"),
        (lambda whole: joined(msgspec.json.encode(parts(whole)[0]), windowed(30)), "memory"),
    ],
)
def test_what_is_no_such_file_is_one_line(
    whole: bytes, change: Callable[[bytes], bytes], message: str
) -> None:
    with pytest.raises(GemmsmithError, match=message) as caught:
        read(change(whole))
    assert "\n" not in str(caught.value)
    assert "odd.gskernels" in str(caught.value)


def sized(size: object) -> Callable[[dict[str, dict[str, dict[str, object]]]], object]:
    return lambda document: next(iter(document["packs"].values())).update(bytes=size)


def named(name: str) -> Callable[[dict[str, dict[str, object]]], object]:
    return lambda document: document.update(packs={name: document["packs"].popitem()[1]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *[(named(name), "damaged") for name in ("../../etc/cron", "/tmp/x", "A" * 64, "a" * 63)],
        (named("a" * 64), "do not match its hash"),
        (sized(BOUNDS.pack_bytes + 1), "a part of it has 536870913 bytes"),
        (sized(2**62), "a part of it has"),
        (sized(0), "a part of it has 0 bytes"),
        (sized(-1), "a part of it has -1 bytes"),
        (sized(5000), "do not match its hash|ends early"),
        (sized(1), "do not match its hash"),
        (sized("much"), "damaged"),
        (lambda d: d["packs"].popitem(), "continues after its last pack"),
        (lambda d: d.update(abi=[1]), "damaged"),
    ],
)
def test_a_list_is_bounded_and_has_no_paths(
    whole: bytes, change: Callable[[dict[str, object]], object], message: str, signer: Signer
) -> None:
    """Also where unsigned packs are accepted: its signature is not checked here."""
    odd = relisted(whole, change)
    with pytest.raises(PackCorrupt, match=message):
        read(odd)
    with pytest.raises(GemmsmithError):
        read(odd, Trusted([signer.public]))


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["packs"].popitem(),
        lambda d: d.update(arch="sm100"),
        lambda d: d.update(abi=[1, 9]),
        lambda d: d.update(gemmsmith="9.9"),
        lambda d: d.update(signature=None),
        lambda d: next(iter(d["packs"].values())).update(taken=[]),
    ],
)
def test_an_altered_list_is_not_believed(
    whole: bytes, change: Callable[[dict[str, dict[str, object]]], object], signer: Signer
) -> None:
    contents, _ = parts(relisted(whole, change))
    with pytest.raises(Untrusted):
        contents.check(Trusted([signer.public]))


def test_a_signature_of_a_pack_is_none_of_a_list(whole: bytes, signer: Signer) -> None:
    contents, _ = parts(whole)
    manifest = next(iter(contents.packs.values()))
    moved = msgspec.structs.replace(contents, signature=manifest.signature)
    with pytest.raises(Untrusted, match="altered"):
        moved.check(Trusted([signer.public]))
    with pytest.raises(Untrusted, match="for winners only"):
        contents.check(Trusted([signer.public], [Purpose.WINNER]))


@pytest.mark.parametrize(
    ("fields", "gpu", "message"),
    [
        ({"arch": "sm70"}, None, "are for sm70, and gemmsmith knows sm80"),
        ({"arch": "../sm90"}, None, "gemmsmith knows"),
        ({"arch": "sm100"}, "sm90", "are for sm100, and this GPU is sm90"),
        ({}, "sm80", "are for sm90, and this GPU is sm80"),
        ({"machine": "riscv64"}, "sm90", "for riscv64 processors"),
        ({"abi": (ABI_VERSION + 1, ABI_VERSION + 4)}, None, "take a newer gemmsmith"),
        ({"abi": (0, 1)}, None, "take a newer file"),
    ],
)
def test_what_cannot_be_used_here_is_refused(
    whole: bytes, fields: dict[str, object], gpu: str | None, message: str
) -> None:
    contents = msgspec.structs.replace(parts(whole)[0], **fields)
    with pytest.raises(PackIncompatible, match=message):
        contents.check_fits(gpu)


PROGRAM = """
import resource, sys
from tuner.compile import kernels_file
from gemmsmith.errors import PackError
with open(sys.argv[1], "rb") as file:
    contents = kernels_file.read(file, "kernels.gskernels")
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + 2**27,) * 2)
    try:
        dict(kernels_file.packs(file, contents, "kernels.gskernels"))
    except PackError as error:
        print(type(error).__name__, error)
"""


def test_too_little_memory_is_one_line(whole: bytes, tmp_path: Path) -> None:
    contents, _ = parts(whole)
    odd = tmp_path / "odd.gskernels"
    odd.write_bytes(joined(msgspec.json.encode(contents), windowed(29)))
    printed = subprocess.run(
        [sys.executable, "-c", PROGRAM, odd], capture_output=True, text=True, check=True
    )
    assert printed.stdout.startswith("PackError kernels.gskernels takes up to 512 MiB of memory")
    assert printed.stdout.count("\n") == 1
