"""`examples/triton_backend`, a package that adds a backend, installed by pip into its own folder.

Without a GPU its kernels are listed, judged and ranked; with Triton they are compiled, too. What
they compute and how fast is in `tests/gpu/test_plugin.py`.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gemmsmith.core.problem import Problem
from gemmsmith.runtime import LoadedPack
from tests.support import host_pack, plugins, triton_backend
from tests.support.arguments import packed_arguments
from tuner import backends
from tuner.backends.plugin import cubin
from tuner.backends.unit import include_dirs, unit_source
from tuner.compile import ArtifactStore, Builder, find_toolchain

PROBLEM = Problem(m=4096, n=4096, k=4096)
LINES = 60
"""The most that a backend takes beside its kernel."""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    packages = triton_backend.install(tmp_path_factory.mktemp("example"))
    with plugins.beside(packages):
        yield packages


def test_it_is_short() -> None:
    text = (triton_backend.EXAMPLE / "triton_backend" / "backend.py").read_text()
    assert len(text.splitlines()) <= LINES


def test_the_command_line_lists_its_kernels(packages: Path) -> None:
    gemmsmith = str(Path(sys.executable).with_name("gemmsmith"))
    words = (gemmsmith, "enumerate", "4096", "4096", "4096", "--limit", "2000", "--json")
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ}, check=True)
    listed = [item["kernel"] for item in json.loads(done.stdout)["candidates"]]
    ours = [kernel for kernel in listed if kernel["backend"] == "plugin"]
    assert len(ours) == 10
    assert {kernel["plugin"] for kernel in ours} == {"triton"}
    doctor = subprocess.run((gemmsmith, "doctor"), capture_output=True, text=True)
    assert "plugins" in doctor.stdout
    assert " triton\n" in doctor.stdout


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_its_kernels_are_launched_with_what_they_were_compiled_for(
    dtype: str, tmp_path: Path
) -> None:
    """Each pack is built by the host's compiler around a cubin that is no machine code."""
    problem = Problem(m=300, n=144, k=80, dtype=dtype, batch=2)
    kernels = [kernel for kernel in backends.kernels(problem) if kernel.source == "triton"]
    assert len(kernels) == 10
    for kernel in kernels:
        assert backends.refusal(kernel, problem) is None
        code = {"function": "matmul", "threads": 256, "shared_bytes": 1}
        for file, text in cubin.files(kernel, b"code", **code).items():
            (tmp_path / file).write_text(text)
    source, pack = tmp_path / "unit.cpp", tmp_path / "unit.so"
    source.write_text(unit_source(kernels))
    folders = [f"-I{path}" for path in include_dirs(kernels)]
    words = ["g++", *host_pack.FLAGS, "-Werror", *folders, str(source), "-o", str(pack), "-ldl"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = LoadedPack.open(pack)
    at = 1 << 20
    for kernel in kernels:
        launch = packed_arguments(problem, a=at, b=at, d=at)
        assert loaded.kernel(kernel.name).can_implement(launch) == 0
        for field, value in (("n", 136), ("k", 72), ("lda", 88), ("bias", at), ("ldd", 150)):
            changed = type(launch).from_buffer_copy(launch)
            setattr(changed, field, value)
            status = loaded.library.gs_can_implement(
                loaded.kernel(kernel.name).index, ctypes.byref(changed)
            )
            assert status != 0, field


@pytest.mark.usefixtures("packages")
@pytest.mark.skipif(triton_backend.HAS_TRITON, reason="Triton is installed")
def test_without_triton_its_kernels_are_failed_trials(tmp_path: Path) -> None:
    kernel = next(k for k in backends.kernels(PROBLEM) if k.source == "triton")
    (built,) = Builder(ArtifactStore(tmp_path), find_toolchain()).build([kernel])
    assert built.pack is None
    assert built.failure is not None
    assert f"{kernel.name}: ModuleNotFoundError: No module named 'triton'" in built.failure.message


@pytest.mark.usefixtures("packages")
@pytest.mark.skipif(not triton_backend.HAS_TRITON, reason="Triton is not installed")
def test_triton_compiles_all_of_its_kernels(tmp_path: Path) -> None:
    kernels = [
        kernel
        for dtype in ("bf16", "fp16")
        for kernel in backends.kernels(Problem(m=4096, n=4096, k=4096, dtype=dtype))
        if kernel.source == "triton"
    ]
    built = list(Builder(ArtifactStore(tmp_path), find_toolchain()).build(kernels))
    assert [item.failure for item in built] == [None] * 20
    for item in built:
        assert item.pack is not None
        described = LoadedPack.open(item.pack.path).kernel(item.kernel.name).describe()
        warps = dict(item.kernel.choices)["num_warps"]
        assert described.threads == 32 * int(str(warps))
        assert 0 < described.shared_bytes <= 232448


def test_its_processes_need_no_checkout(packages: Path) -> None:
    program = "import triton_backend.backend as b; print(b.BACKEND.name)"
    words = (sys.executable, "-P", "-c", program)
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ}, check=True)
    assert done.stdout == "triton\n"
