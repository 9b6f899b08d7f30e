"""Loading packs: the content of a valid pack, and the rejection of each kind of invalid pack."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from gemmsmith.errors import LaunchFailed, PackCorrupt, PackError, PackIncompatible
from gemmsmith.runtime import ABI_VERSION, Arguments, LoadedPack
from gemmsmith.runtime.abi import OLDEST_ABI_VERSION

from .conftest import build_pack


def arguments(**fields: object) -> Arguments:
    return Arguments(m=16, n=8, k=64, batch=1, splits=1, **fields)


def test_a_pack_is_opened_once(host_pack: Path) -> None:
    pack = LoadedPack.open(host_pack)
    assert LoadedPack.open(host_pack.parent / "." / host_pack.name) is pack
    assert pack.kernels == ("first", "second")


def test_kernels_are_found_by_name(host_pack: Path) -> None:
    kernel = LoadedPack.open(host_pack).kernel("second")
    assert kernel.index == 1
    assert kernel.describe().shared_bytes == 1001
    assert kernel.describe().registers == -1
    with pytest.raises(PackError, match="does not hold third"):
        LoadedPack.open(host_pack).kernel("third")


def test_arguments_reach_the_kernel(host_pack: Path) -> None:
    kernel = LoadedPack.open(host_pack).kernel("first")
    good = arguments(batch_stride_d=77, beta=0.5, sm_count=132)
    kernel.run(good, 10, 20)
    with pytest.raises(LaunchFailed, match="CUDA error 2") as caught:
        kernel.run(good, 10, 21)
    assert caught.value.status == 1002
    with pytest.raises(LaunchFailed, match="CUDA error 1"):
        kernel.run(arguments(), 10, 20)


def test_workspace_and_refusal(host_pack: Path) -> None:
    kernel = LoadedPack.open(host_pack).kernel("first")
    split = arguments()
    split.splits = 4
    assert kernel.workspace_bytes(arguments()) == 0
    assert kernel.workspace_bytes(split) == 16 * 8 * 4
    odd = arguments()
    odd.k = 63
    assert kernel.can_implement(odd) == 1
    with pytest.raises(LaunchFailed, match="aligned"):
        kernel.workspace_bytes(odd)


@pytest.mark.parametrize(
    ("oldest", "newest"), [(1, OLDEST_ABI_VERSION - 1), (ABI_VERSION + 1, ABI_VERSION + 3)]
)
def test_packs_without_a_common_version_are_refused(
    tmp_path: Path, oldest: int, newest: int
) -> None:
    pack = build_pack(tmp_path, abi=newest, oldest=oldest)
    with pytest.raises(PackIncompatible, match=rf"version .*{newest} .*fetch or build the pack"):
        LoadedPack.open(pack)


def test_a_newer_pack_that_still_takes_this_version_is_spoken_to_in_it(tmp_path: Path) -> None:
    pack = LoadedPack.open(build_pack(tmp_path, abi=ABI_VERSION + 1, size=1024))
    assert pack.speaks.version == ABI_VERSION
    launch = arguments(batch_stride_d=77, beta=0.5, sm_count=132)
    pack.kernel("first").run(launch, 10, 20)
    assert launch.abi == ABI_VERSION


def test_fields_that_the_pack_does_not_know_are_not_handed_to_it(tmp_path: Path) -> None:
    pack = LoadedPack.open(build_pack(tmp_path, size=Arguments.bias.offset))
    kernel = pack.kernel("first")
    plain = arguments(batch_stride_d=77, beta=0.5, sm_count=132)
    kernel.run(plain, 10, 20)
    fused = arguments(batch_stride_d=77, beta=0.5, sm_count=132, bias=4096)
    for ask in (
        lambda: kernel.can_implement(fused),
        lambda: kernel.workspace_bytes(fused),
        lambda: kernel.run(fused, 10, 20),
    ):
        with pytest.raises(LaunchFailed, match="fields beyond them; build or fetch it again"):
            ask()


def test_damaged_files_are_refused(tmp_path: Path, host_pack: Path) -> None:
    whole = host_pack.read_bytes()
    for name, content, reason in (
        ("truncated.so", whole[: len(whole) // 2], "truncated"),
        ("stub.so", whole[:20], "not a shared object"),
        ("text.so", b"not a pack at all" * 10, "not a shared object"),
        ("empty.so", b"", "not a shared object"),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(PackCorrupt, match=reason):
            LoadedPack.open(path)
    with pytest.raises(PackCorrupt, match="cannot read"):
        LoadedPack.open(tmp_path / "missing.so")


def test_the_digest_is_checked(tmp_path: Path, host_pack: Path) -> None:
    digest = hashlib.sha256(host_pack.read_bytes()).hexdigest()
    assert LoadedPack.open(host_pack, sha256=digest)
    with pytest.raises(PackCorrupt, match="SHA-256"):
        LoadedPack.open(host_pack, sha256="0" * 64)


def test_another_shared_object_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "other.c"
    source.write_text("int answer(void) { return 42; }\n")
    path = tmp_path / "other.so"
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(path)], check=True)
    with pytest.raises(PackIncompatible, match="not a kernel pack"):
        LoadedPack.open(path)


def test_importing_the_runtime_imports_no_torch() -> None:
    check = (
        "import gemmsmith.runtime, sys; sys.exit('torch' in sys.modules or 'cuda' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], check=True)
