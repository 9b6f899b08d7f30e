"""Units with kernels of plugins, whose own compilers run in the process that becomes nvcc."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from gemmsmith.signing import Signer, Trusted
from tests.support import fake_nvcc, plugins
from tests.support.candidates import several
from tests.support.plugins import plain
from tuner.compile import ArtifactStore, Builder
from tuner.trial import FailureKind


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "packages"
    folder.mkdir()
    return folder


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where units are compiled; nothing may be left in it."""
    directory = tmp_path / "scratch"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


@pytest.fixture
def installed(folder: Path) -> Iterator[None]:
    plugins.write(folder)
    with plugins.beside(folder):
        yield


@pytest.mark.usefixtures("installed")
def test_a_kernel_that_its_compiler_refuses_is_one_failure(scratch: Path, tmp_path: Path) -> None:
    kernels = [plain(64), plain(128), plain(256), *several(2)]
    store = ArtifactStore(tmp_path / "packs")
    builder = Builder(store, fake_nvcc.toolchain(tmp_path), workers=1)
    built = {item.kernel.name: item for item in builder.build(kernels)}
    refused = built.pop("plain_256")
    assert refused.pack is None
    assert refused.failure is not None
    assert refused.failure.kind is FailureKind.COMPILE
    assert "error: plain_256: ValueError: 256 does not fit" in refused.failure.message
    assert len(built) == 4
    assert all(item.pack is not None and item.failure is None for item in built.values())
    assert all(map(builder.has, (plain(64), plain(128))))
    assert list(scratch.iterdir()) == []


@pytest.mark.usefixtures("installed")
def test_a_pack_is_signed_and_trusted_like_all_others(scratch: Path, tmp_path: Path) -> None:
    signer, other = (Signer(Ed25519PrivateKey.generate()) for _ in range(2))
    toolchain = fake_nvcc.toolchain(tmp_path)
    for trusts, has in ((signer, True), (other, False)):
        trusted = Trusted([trusts.public])
        store = ArtifactStore(tmp_path / "packs", signer=signer, trusted=trusted)
        if has:
            (built,) = Builder(store, toolchain).build([plain(64)])
            assert built.pack is not None
        assert Builder(store, toolchain).has(plain(64)) is has


SLOW = plugins.PLAIN.replace(
    "        if kernel.tile[0] == 256:\n",
    "        import os, pathlib, time\n"
    "        pathlib.Path(os.environ['PLAIN_AT']).write_text(str(os.getpid()))\n"
    "        time.sleep(600)\n"
    "        if kernel.tile[0] == 256:\n",
)


def test_a_compiler_that_takes_too_long_is_ended(
    folder: Path, scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins.write(folder, SLOW)
    at = tmp_path / "at"
    monkeypatch.setenv("PLAIN_AT", str(at))
    with plugins.beside(folder):
        builder = Builder(
            ArtifactStore(tmp_path / "packs"), fake_nvcc.toolchain(tmp_path), time_limit_s=8
        )
        (built,) = builder.build([plain(64)])
    assert built.failure is not None
    assert "did not finish within 8 s" in built.failure.message
    pid, deadline = int(at.read_text()), time.monotonic() + 10
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    assert list(scratch.iterdir()) == []
