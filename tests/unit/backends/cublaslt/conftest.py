"""cuBLASLt's pack with the host in the place of the GPU: a library and a driver in C.

The pack's source looks for them under names of their own, so that the real ones, which another
test may have loaded, are never found.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from gemmsmith.runtime import LoadedPack
from tests.support import host_pack
from tuner.backends.cublaslt import build as building

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Fakes:
    pack: LoadedPack
    library: ctypes.CDLL
    driver: ctypes.CDLL


Build = Callable[[str, str], LoadedPack]


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """A pack that looks for its library and the driver under these names only."""

    def build(library: str, driver: str) -> LoadedPack:
        folder = tmp_path_factory.mktemp("pack")
        include = folder / "include"
        shutil.copytree(building.INCLUDE, include)
        header = include / "cublaslt" / "library.hpp"
        text = header.read_text()
        real = '"libcublasLt.so.13", "libcublasLt.so.12"'
        assert real in text
        assert '"libcuda.so.1"' in text
        text = text.replace(real, f'"{library}"').replace('"libcuda.so.1"', f'"{driver}"')
        header.write_text(text)
        host_pack.build(folder / "pack.so", first=[include])
        return LoadedPack.open(folder / "pack.so")

    return build


@pytest.fixture(scope="session")
def fakes(tmp_path_factory: pytest.TempPathFactory, build: Build) -> Fakes:
    folder = tmp_path_factory.mktemp("libraries")
    loaded = []
    for name in ("fake_cublaslt", "fake_cuda"):
        path = folder / f"{name}.so"
        subprocess.run(
            [
                *("gcc", "-O2", "-shared", "-fPIC", f"-Wl,-soname,{name}.so"),
                *(str(HERE / f"{name}.c"), "-o", str(path), "-lm"),
            ],
            check=True,
        )
        loaded.append(ctypes.CDLL(str(path)))  # found by its name from now on
    return Fakes(build("fake_cublaslt.so", "fake_cuda.so"), *loaded)
