"""The engine with the host in the GPU's place: kernels in C run on CPU tensors."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gemmsmith.core.config import Config
from gemmsmith.core.kernel import Kernel
from gemmsmith.core.launch import Launch
from gemmsmith.core.legality import refusal
from gemmsmith.core.problem import DType, Problem
from gemmsmith.ops.below.dispatch import Dispatch
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.models.patching import _Patches
from gemmsmith.ops.products import layer
from tests.gpu.support.choosing import Ground
from tests.support import below, fake_nvcc, stand_in
from tests.support.serving import H200, own_signer
from tests.support.stand_in import Chooser, Host, Packs
from tuner.compile import ArtifactStore


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Skip a test that needs FP8 scaled by rows on the host where this torch, as 2.11, has none."""
    try:
        return (yield)
    except (RuntimeError, NotImplementedError) as error:
        lacks = ("per-tensor scaling for CPU", "torch has no _scaled_mm_v2")
        if any(text in str(error) for text in lacks) and not _scales_rows():
            pytest.skip("this torch scales no rows on the host")
        raise


def _scales_rows() -> bool:
    a, scale = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(a, a.t(), scale, scale.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(20261121)


@pytest.fixture(autouse=True)
def _small_layers_run_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """In training, too: they are torch's where products are as small as here."""
    monkeypatch.setattr(layer, "LAYER_FLOPS", 0)


@pytest.fixture(autouse=True)
def _entered() -> Iterator[None]:
    """What an earlier test has left is entered again."""
    yield
    below.leave(left=False)


@pytest.fixture
def no_other_patch() -> None:
    """A patch that an earlier test has left open would be bound, and stay so."""
    for patch in list(_Patches.open):
        patch.close()


@pytest.fixture(scope="session")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stand_in.build(tmp_path_factory.mktemp("pack"))


@pytest.fixture
def runs(pack: Path) -> Callable[[], int]:
    """How many kernels ran since this was last called."""
    counter = ctypes.CDLL(str(pack)).runs_so_far
    counter.restype = ctypes.c_int64
    before = counter()

    def since() -> int:
        nonlocal before
        now = int(counter())
        count, before = now - before, now
        return count

    return since


@pytest.fixture
def mesh() -> Iterator[dist.DeviceMesh]:
    """A single rank on the CPU."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()
    gc.collect()  # no logits are deferred while a sharded module is alive


@pytest.fixture
def without_binding(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Winners are of the host, and only Python replaces products."""
    host.kind = "cpu"
    below.only_python(monkeypatch)


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def chooser() -> Chooser:
    return Chooser()


@pytest.fixture
def engine(chooser: Chooser, pack: Path, host: Host) -> Iterator[Engine]:
    made = Engine(chooser, Packs(pack), platform=host)
    with stand_in.installed(made):
        yield made
    torch._dynamo.reset()


@pytest.fixture
def ground(pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ground:
    """The host as a place to train, for the tests that GPUs run too."""
    monkeypatch.setattr("gemmsmith.ops.engine.source.Engine", stand_in.ENGINE)
    folder = tmp_path / "store"
    store = ArtifactStore(folder / "packs", signer=own_signer())
    store.publish(pack, stand_in.KERNELS, fake_nvcc.toolchain(folder / "toolchain"))
    return Ground(
        device=torch.device("cpu"),
        model=H200,
        types=(DType.BF16, DType.FP8_E4M3),
        sizes=(32, 48, 16),
        largest=64,
        kernels=_taking,
        store=store,
        compilers=({"backend": "aot_eager"},),
    )


def _taking(problem: Problem) -> Sequence[Kernel]:
    """The stand-in for a problem, if there is one."""
    return [
        kernel
        for kernel in stand_in.KERNELS
        if refusal(Config(kernel=kernel, launch=Launch()), problem) is None
    ]


@pytest.fixture(scope="module")
def binding(tmp_path_factory: pytest.TempPathFactory) -> Dispatch:
    """Compiled from its source, into a cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GEMMSMITH_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setattr("gemmsmith.ops.below.binding.INSTALLED", Path("none"))
        if Dispatch._made.get("cpu") is None:  # a patch without these streams may have failed
            Dispatch._made.pop("cpu", None)
        found = Dispatch.of("cpu", stream=lambda index: 77)
    assert found is not None
    return found


@pytest.fixture(params=["kernels", "torch"])
def computing(request: pytest.FixtureRequest) -> str:
    """Everything must hold with tuned kernels and without any."""
    if request.param == "kernels":
        request.getfixturevalue("engine")
    return str(request.param)
