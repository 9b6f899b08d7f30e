"""The registry: who has kernels of what, and kernels that nobody here knows."""

from __future__ import annotations

import pickle
from math import inf
from pathlib import Path

import pytest

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import AnyKernel, Backend, CublasLtKernel
from gemmsmith.core.launch import Launch
from gemmsmith.core.legality import launch_refusal
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import Layout, Problem
from tests.support.types import FLOATS
from tuner import backends
from tuner.arch import ARCHITECTURES, SM90
from tuner.backends.unit import kernel_digest, unit_source
from tuner.compile import ArtifactStore, Builder, Toolchain
from tuner.errors import NoLegalCandidate
from tuner.search.cost_model import predicted_us

PROBLEM = Problem(m=512, n=512, k=512)
FOREIGN = CublasLtKernel(
    name="cublaslt_that_nobody_knows",
    arch="sm90",
    dtype="bf16",
    layout=Layout.TN,
    alignment_a=1,
    alignment_b=1,
    alignment_d=1,
)
"""A kernel of a backend that `stranger` takes out of the registry."""


@pytest.fixture
def stranger(monkeypatch: pytest.MonkeyPatch) -> AnyKernel:
    monkeypatch.delitem(backends.BACKENDS, Backend.CUBLASLT)
    return FOREIGN


def test_each_backend_gives_kernels_of_its_own() -> None:
    for dtype in FLOATS:
        problem = Problem(m=4096, n=4096, k=4096, dtype=dtype)
        listed = backends.kernels(problem)
        assert {kernel.backend for kernel in listed} == {Backend.CUTLASS3X, Backend.CUTE}
        own = [
            kernel.name
            for backend in backends.supporting(problem.operation, SM90)
            for kernel in backend.kernels(problem, SM90, backends.Level.CORE)
        ]
        assert own == [kernel.name for kernel in listed]
    odd = backends.kernels(Problem(m=4096, n=4096, k=4095))
    assert {kernel.backend for kernel in odd} == {Backend.CUTLASS3X, Backend.CUTLASS2X}


@pytest.mark.parametrize("dtype", ["fp8_e4m3.scale_block", "fp8_e4m3.scale_row.group_depth"])
def test_an_operation_without_kernels_is_an_error_that_names_it(dtype: str) -> None:
    assert backends.supporting(Operation.of(dtype), SM90) == ()
    with pytest.raises(NoLegalCandidate, match=dtype):
        backends.kernels(Problem(m=64, n=64, k=64, dtype=dtype))


def test_a_kernel_that_nobody_knows_is_judged_by_its_problem_alone(
    stranger: AnyKernel, h200: DeviceModel
) -> None:
    assert backends.backend_of(stranger) is None
    assert backends.refusal(stranger) is None
    assert backends.refusal(stranger, PROBLEM) is None
    assert "built for" in str(backends.refusal(stranger, Problem(m=8, n=8, k=8, dtype="fp16")))
    assert launch_refusal(stranger, Launch(), PROBLEM) is None
    assert backends.launches(stranger, PROBLEM, h200) == []
    assert backends.variety(stranger) == ()
    with pytest.raises(ValueError, match="not compiled here"):
        unit_source([stranger])


def test_it_is_predicted_last_and_not_compiled(
    stranger: AnyKernel, h200: DeviceModel, tmp_path: Path
) -> None:
    known = backends.kernels(PROBLEM)[0]
    pair = [Candidate(kernel=each, launch=Launch()) for each in (stranger, known)]
    slow, fast = predicted_us(PROBLEM, pair, h200)
    assert slow == inf > fast > 0
    assert kernel_digest(stranger) not in {
        kernel_digest(each) for each in backends.kernels(PROBLEM)
    }
    nowhere = Toolchain(nvcc=Path("nvcc"), version="13.0.88", origin="wheels")
    builder = Builder(ArtifactStore(tmp_path), nowhere)
    assert not builder.has(stranger)
    (built,) = builder.build([stranger])
    assert built.failure is not None
    assert "cublaslt" in built.failure.message


def test_an_architecture_is_itself_in_other_processes() -> None:
    for arch in ARCHITECTURES.values():
        assert pickle.loads(pickle.dumps(arch)) is arch


def test_a_toolchain_builds_for_one_architecture() -> None:
    toolchain = Toolchain(nvcc=Path("nvcc"), version="13.0.88", origin="wheels")
    assert toolchain.targeting("sm90") is toolchain
    digests = {toolchain.targeting(name).digest for name in ARCHITECTURES}
    assert len(digests) == len(ARCHITECTURES)
    for name, arch in ARCHITECTURES.items():
        command = toolchain.targeting(name).command(Path("a.cu"), Path("a.so"))
        assert [each for each in command if each.startswith("-gencode")] == [
            f"-gencode=arch=compute_{arch.target},code=sm_{arch.target}"
        ]
