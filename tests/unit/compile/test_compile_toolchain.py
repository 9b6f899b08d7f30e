"""The wheels' nvcc comes first, the system's second, and what is missing is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import fake_nvcc
from tuner.compile import find_toolchain, toolchain
from tuner.errors import CompilerNotFound

SYSTEM_PATH = "/usr/bin:/bin"


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that names no compiler."""
    monkeypatch.setenv("PATH", SYSTEM_PATH)
    for variable in ("CUDA_HOME", "CUDA_PATH", "NVCC_CCBIN"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def no_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither wheels nor a toolkit in its standard place, whatever this machine has."""
    monkeypatch.setattr(toolchain, "_wheel_roots", list)
    monkeypatch.setattr(toolchain, "_STANDARD_NVCC", Path("/nonexistent/nvcc"))


def test_wheels_come_before_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvcc.toolchain(tmp_path)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    chosen = find_toolchain()
    assert chosen.origin == "wheels"
    assert chosen.nvcc.is_file()
    assert any(option.startswith("-L") for option in chosen.search)


@pytest.mark.usefixtures("no_wheels")
@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH", "PATH"])
def test_system_compiler_is_found(
    tmp_path: Path, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvcc.toolchain(tmp_path)
    on_path = variable == "PATH"
    monkeypatch.setenv(variable, f"{tmp_path / 'bin'}:{SYSTEM_PATH}" if on_path else str(tmp_path))
    chosen = find_toolchain()
    assert (chosen.nvcc, chosen.origin) == (tmp_path / "bin" / "nvcc", "system")
    assert chosen.version == "13.0.88"


@pytest.mark.usefixtures("no_wheels")
def test_an_old_compiler_is_named_in_the_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    fake_nvcc.toolchain(tmp_path, version="Cuda compilation tools, release 12.4, V12.4.131")
    with pytest.raises(CompilerNotFound) as refusal:
        find_toolchain()
    assert "12.4.131 is too old" in str(refusal.value)
    assert "pip install nvidia-cuda-cccl==" in str(refusal.value)


@pytest.mark.usefixtures("no_wheels")
def test_nothing_found_says_what_to_install() -> None:
    with pytest.raises(CompilerNotFound, match=r"`pip install nvidia.* nvidia-cuda-nvcc=="):
        find_toolchain()


def test_incomplete_wheels_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvcc.toolchain(tmp_path)
    monkeypatch.setattr(toolchain, "_wheel_roots", lambda: [tmp_path])
    with pytest.raises(CompilerNotFound, match=r"lacks the wheels .*nvidia-nvvm"):
        find_toolchain(wheels_only=True)


def test_host_compiler_is_required(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompilerNotFound, match=r"apt install g\+\+"):
        find_toolchain()


def test_digest_depends_on_what_is_built_not_on_where_the_compiler_lies(tmp_path: Path) -> None:
    here = fake_nvcc.toolchain(tmp_path)
    moved = replace(here, nvcc=Path("/elsewhere/nvcc"), search=("-L/elsewhere",), origin="wheels")
    assert moved.digest == here.digest
    assert replace(here, version="13.0.89").digest != here.digest
    assert replace(here, flags=(*here.flags, "-lineinfo")).digest != here.digest
    assert replace(here, cutlass="4.3.0.0").digest != here.digest
