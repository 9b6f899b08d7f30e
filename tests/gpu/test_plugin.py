"""Kernels of `examples/triton_backend` on a GPU: they are compiled, verified, timed, served."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gemmsmith import Client, runtime
from gemmsmith.core.config import Config, Use
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import Kernel
from gemmsmith.core.launch import Launch
from gemmsmith.core.problem import Problem
from tests.gpu.support.building import BUILD_ONLY
from tests.gpu.support.families import check
from tests.support import plugins, triton_backend
from tests.support.compiled import kept
from tests.support.processes import serving
from tuner import backends
from tuner.compile import ArtifactStore, Builder, find_toolchain
from tuner.devices.cuda import CudaDevice

pytestmark = [
    # Its packages are gone when the kernels of all tests are built.
    pytest.mark.skipif(BUILD_ONLY, reason="its kernels take seconds"),
    pytest.mark.skipif(not triton_backend.HAS_TRITON, reason="Triton is not installed"),
]
SIZES = [(4096, 4096, 4096, 1), (300, 144, 80, 1), (1, 16, 16, 1), (1000, 2064, 528, 3)]


def ours(problem: Problem) -> list[Kernel]:
    return [kernel for kernel in backends.kernels(problem) if kernel.source == "triton"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """The packs of all kernels of the example, which is installed meanwhile."""
    packages = triton_backend.install(tmp_path_factory.mktemp("example"))
    with plugins.beside(packages):
        kernels = [
            kernel
            for dtype in ("bf16", "fp16")
            for kernel in ours(Problem(m=16, n=16, k=16, dtype=dtype))
        ]
        results = list(Builder(ArtifactStore(kept()), find_toolchain()).build(kernels))
        assert [result.failure for result in results] == [None] * 20
        yield {result.kernel.name: result.pack.path for result in results if result.pack}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_all_are_right_and_timed(
    dtype: str,
    size: tuple[int, int, int, int],
    built: dict[str, Path],
    device: CudaDevice,
    model: DeviceModel,
) -> None:
    m, n, k, batch = size
    problem = Problem(m=m, n=n, k=k, batch=batch, dtype=dtype)
    check(problem, ours(problem), built, device, model)


def test_a_pack_runs_in_torch_and_in_a_graph_without_the_plugin(built: dict[str, Path]) -> None:
    import torch

    for kernel in ours(Problem(m=16, n=16, k=16)):
        config, pack = Config(kernel=kernel, launch=Launch()), built[kernel.name]
        a = torch.randn(1000, 528, device="cuda", dtype=torch.bfloat16)
        b = torch.randn(2064, 528, device="cuda", dtype=torch.bfloat16).t()
        c = torch.randn(1000, 2064, device="cuda", dtype=torch.bfloat16)
        first = runtime.run(config, a, b, pack_path=pack, c=c, alpha=0.5, beta=-2.0)
        exact = 0.5 * (a.double() @ b.double()) - 2.0 * c.double()
        error = torch.linalg.norm(first.double() - exact) / torch.linalg.norm(exact)
        assert error < 4e-3
        out, graph = torch.empty_like(first), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            runtime.run(config, a, b, pack_path=pack, c=c, out=out, alpha=0.5, beta=-2.0)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, first)
        described = runtime.LoadedPack.open(pack).kernel(kernel.name).describe()
        assert described.registers > 0


@pytest.mark.usefixtures("built")
def test_an_order_measures_them_beside_all_others(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    m, n, k = 4096, 4096, 4096
    environment = {"GEMMSMITH_DEVICE": "cuda:0", "GEMMSMITH_PACKS": str(kept())}
    with serving(tmp_path, "worker", **environment) as (_, said):
        url = re.findall(r"http://[0-9.:]+", said)[0]
        with Client(url, cache_dir=tmp_path / "cache") as client:
            answer = client.tune(m, n, k, effort="quick").wait(timeout=500)
            trials = list(client.results(m=m, n=n, k=k))
    triton = [trial for trial in trials if trial["candidate"]["kernel"]["backend"] == "plugin"]
    measured = [trial["statistics"]["median_us"] for trial in triton if trial["statistics"]]
    assert measured, "no Triton kernel was measured"
    assert all(trial["candidate"]["kernel"]["plugin"] == "triton" for trial in triton)
    names = {trial["candidate"]["kernel"]["name"] for trial in trials}
    assert answer.config is None or answer.config.kernel.name in names
    if answer.config is not None and answer.config.kernel.source == "triton":
        assert answer.use in (Use.PLUGIN, Use.CUBLAS)
    record_property("triton_us", min(measured))
