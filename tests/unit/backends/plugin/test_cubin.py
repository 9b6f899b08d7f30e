"""A plugin's pack without a GPU: the launcher of cubins, with a driver in C that writes down."""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gemmsmith.core.problem import Problem
from gemmsmith.errors import LaunchFailed
from gemmsmith.runtime import Arguments, LoadedPack
from tests.support import host_pack, plugins
from tests.support.arguments import packed_arguments
from tests.support.plugins import plain
from tuner.backends import backend_of
from tuner.backends.cublaslt.build import INCLUDE as DRIVER
from tuner.backends.plugin.backend import PluginBackend
from tuner.backends.unit import include_dirs, unit_source

HERE = Path(__file__).parent
MISALIGNED, INVALID = 1, 4
NO_DRIVER = 1035
AT = 1 << 20


class Launched(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("function", ctypes.c_void_p),
        ("parameters", ctypes.c_ulonglong * 16),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("packages")
    plugins.write(folder)
    with plugins.beside(folder):
        yield folder


def built(folder: Path, name: str, driver: str) -> LoadedPack:
    """A pack of two kernels, which looks for the driver under this name only."""
    place = folder / name
    include = place / "include"
    shutil.copytree(DRIVER, include)
    shutil.copytree(plugins.INCLUDE, include, dirs_exist_ok=True)
    for header in ("cublaslt/library.hpp", "cubin/kernel.hpp"):
        text = (include / header).read_text()
        assert '"libcuda.so.1"' in text
        (include / header).write_text(text.replace('"libcuda.so.1"', f'"{driver}"'))
    kernels = [plain(64), plain(128)]
    for kernel in kernels:
        backend = backend_of(kernel)
        assert isinstance(backend, PluginBackend)
        for file, text in backend.files(kernel).items():
            (place / file).write_text(text)
    source, pack = place / "unit.cpp", place / "unit.so"
    source.write_text(unit_source(kernels))
    folders = [f"-I{path}" for path in (include, *include_dirs(kernels))]
    words = ["g++", *host_pack.FLAGS, "-Werror", *folders, str(source), "-o", str(pack), "-ldl"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return LoadedPack.open(pack)


@pytest.fixture(scope="module")
def driver(folder: Path) -> Any:
    path = folder / "fake_kernels.so"
    words = ("gcc", "-O2", "-shared", "-fPIC", "-Wl,-soname,fake_kernels.so")
    subprocess.run([*words, str(HERE / "fake_kernels.c"), "-o", str(path)], check=True)
    library = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_GLOBAL)
    library.fake_last.restype = ctypes.POINTER(Launched)
    library.fake_image.restype = ctypes.c_void_p
    library.fake_name.restype = ctypes.c_char_p
    return library


@pytest.fixture(scope="module")
def pack(folder: Path, driver: Any) -> LoadedPack:
    return built(folder, "pack", "fake_kernels.so")


def arguments(m: int = 300, n: int = 136, k: int = 64, batch: int = 1) -> Arguments:
    problem = Problem(m=m, n=n, k=k, batch=batch)
    return packed_arguments(problem, a=AT, b=2 * AT, d=3 * AT, alpha=0.5)


def test_a_launch_passes_all_that_its_backend_says(pack: LoadedPack, driver: Any) -> None:
    kernel = pack.kernel("plain_128")
    launch = arguments(batch=3)
    launch.bias = 4 * AT
    before = driver.fake_depth()
    kernel.run(launch, 0, 77)
    last: Launched = driver.fake_last().contents
    assert tuple(last.grid) == (3, 2, 3)
    assert tuple(last.block) == (128, 1, 1)
    assert last.shared == driver.fake_shared() == 70000
    assert (last.stream, last.context) == (77, 0x1000)
    assert ctypes.string_at(driver.fake_image(), 6) == b"\0code\xff"
    assert driver.fake_name() == b"plain"
    (alpha,) = struct.unpack("<Q", struct.pack("<fI", 0.5, 0))
    expected = [AT, 2 * AT, 3 * AT, 300, 136, 64, 136, alpha, 4 * AT, 0, 0]
    assert last.parameters[: len(expected)] == expected
    assert driver.fake_depth() == before


def test_its_code_is_loaded_once_on_each_device(pack: LoadedPack, driver: Any) -> None:
    kernel = pack.kernel("plain_64")
    assert kernel.describe().registers == -1
    loads = driver.fake_loads()
    for device, context in ((0, 0x1000), (1, 0x1001), (0, 0x1000), (1, 0x1001)):
        launch = arguments()
        launch.device = device
        kernel.run(launch, 0, 0)
        assert driver.fake_last().contents.context == context
    assert driver.fake_loads() == loads + 2
    described = kernel.describe()
    assert (described.threads, described.shared_bytes) == (128, 70000)
    assert (described.registers, described.local_bytes) == (168, 0)


@pytest.mark.parametrize(
    ("field", "value", "status"),
    [
        ("beta", 1.0, INVALID),
        ("residual", AT, INVALID),
        ("aux", AT, INVALID),
        ("offsets", AT, INVALID),
        ("scale_a", AT, INVALID),
        ("scaling", 1, INVALID),
        ("library_version", 130100, INVALID),
        ("m", 0, INVALID),
        ("n", -1, INVALID),
        ("k", 0, INVALID),
        ("batch", 0, INVALID),
        ("batch", 70000, INVALID),
        ("n", 64 * 70000, INVALID),
        ("lda", 65, MISALIGNED),
        ("ldb", 68, MISALIGNED),
        ("ldd", 140, MISALIGNED),
        ("a", AT + 8, MISALIGNED),
        ("b", 2 * AT + 2, MISALIGNED),
        ("d", 3 * AT + 4, MISALIGNED),
        ("device", 64, INVALID),
        ("device", -1, INVALID),
    ],
)
def test_what_it_cannot_run_is_refused_and_not_launched(
    pack: LoadedPack, driver: Any, field: str, value: float, status: int
) -> None:
    launch = arguments()
    setattr(launch, field, value)
    kernel, launches = pack.kernel("plain_64"), driver.fake_launches()
    if field != "device":
        assert kernel.can_implement(launch) == status
        assert pack.library.gs_workspace_bytes(kernel.index, ctypes.byref(launch)) == -status
    with pytest.raises(LaunchFailed) as refused:
        kernel.run(launch, 0, 0)
    assert refused.value.status == status
    assert driver.fake_launches() == launches


def test_batches_are_aligned_if_there_are_several(pack: LoadedPack) -> None:
    kernel = pack.kernel("plain_64")
    for batch, status in ((1, 0), (2, MISALIGNED)):
        launch = arguments(batch=batch)
        launch.batch_stride_b = 12
        assert kernel.can_implement(launch) == status


def test_the_drivers_error_is_returned(folder: Path, driver: Any) -> None:
    kernel = built(folder, "failing", "fake_kernels.so").kernel("plain_64")
    driver.fake_fail(209)
    try:
        with pytest.raises(LaunchFailed, match="CUDA error 209"):
            kernel.run(arguments(), 0, 0)
    finally:
        driver.fake_fail(0)
    kernel.run(arguments(), 0, 0)  # and it is tried again
    launch = arguments()
    launch.device = 2
    with pytest.raises(LaunchFailed, match="CUDA error 101"):
        kernel.run(launch, 0, 0)


def test_without_a_driver_it_says_so(folder: Path) -> None:
    kernel = built(folder, "alone", "no_such_driver.so").kernel("plain_64")
    assert kernel.can_implement(arguments()) == 0
    assert kernel.describe().threads == 128
    with pytest.raises(LaunchFailed, match="CUDA error 35") as refused:
        kernel.run(arguments(), 0, 0)
    assert refused.value.status == NO_DRIVER
