"""Open patches follow the engine in use and torch's settings, in every way to multiply."""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

import gemmsmith
from gemmsmith.core.config import Config
from gemmsmith.core.kernel import AnyKernel, CublasLtKernel, TileScheduler
from gemmsmith.core.launch import Decomposition, Launch
from gemmsmith.core.problem import Layout
from gemmsmith.ops.below.dispatch import Dispatch
from gemmsmith.ops.engine import settings
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.in_use import install
from tests.support import stand_in
from tests.support.below import only_python
from tests.support.stand_in import Chooser, Host, Packs
from tests.unit.ops.test_layers import FeedForward

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
M, N, K, EXPERTS = 8, 24, 16, 2
Runs = Callable[[], int]


def bf16(*size: int) -> torch.Tensor:
    return torch.randn(size).to(BF16)


A, B, BIAS, BATCH = bf16(M, K), bf16(K, N), bf16(N), bf16(3, M, K)
INTEGERS = torch.ones(M, K, dtype=torch.int8), torch.ones(N, K, dtype=torch.int8).t()
GROUPS = bf16(EXPERTS, N, K).mT, torch.tensor([3, M], dtype=torch.int32)
FP8 = A.to(E4M3), bf16(N, K).to(E4M3).t(), torch.tensor(0.5), torch.tensor(0.5)


LAYERS = nn.Sequential(FeedForward(K, N), nn.Linear(K, K)).to(BF16)

PRODUCTS: dict[str, Callable[[], torch.Tensor]] = {
    "mm": lambda: A @ B,
    "bmm": lambda: BATCH @ BATCH.mT,
    "bias": lambda: torch.addmm(BIAS, A, B),
    "out in FP32": lambda: torch.mm(A, B, out_dtype=torch.float32),
    "int8": lambda: torch._int_mm(*INTEGERS),
    "groups": lambda: torch._grouped_mm(A, GROUPS[0], offs=GROUPS[1]),
    "FP8": lambda: torch._scaled_mm(*FP8, out_dtype=BF16, use_fast_accum=True),
    "layers": lambda: LAYERS(A),
    "linear": lambda: gemmsmith.linear(A, B.t().contiguous(), BIAS, activation="gelu"),
    "gated": lambda: gemmsmith.gated_linear(A, B.t().contiguous()),
    "matmul": lambda: gemmsmith.matmul(A, B),
    "scaled": lambda: gemmsmith.scaled_mm(*FP8, use_fast_accum=True),
    "grouped": lambda: gemmsmith.grouped_mm(A, *GROUPS),
}
BY_MODE = ("mm", "bmm", "bias", "out in FP32", "int8")


@contextlib.contextmanager
def nested() -> Iterator[None]:
    with gemmsmith.patch(LAYERS), gemmsmith.patch(), gemmsmith.patch(nn.Linear(4, 4)):
        yield


@contextlib.contextmanager
def reported() -> Iterator[None]:
    with gemmsmith.patch(LAYERS), gemmsmith.patch(report=True, file=io.StringIO()):
        yield


Patched = Callable[[], AbstractContextManager[None]]
PATCHES: dict[str, Patched] = {"nested": nested, "reported": reported}


@pytest.fixture(params=["binding", "python"])
def engine(
    request: pytest.FixtureRequest,
    pack: Path,
    chooser: Chooser,
    binding: Dispatch,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Engine]:
    if request.param == "python":
        only_python(monkeypatch)
    made = engine_of(chooser, pack)
    with stand_in.installed(made), torch.no_grad():
        yield made


def engine_of(chooser: Chooser, pack: Path) -> Engine:
    host = Host()
    host.kind = "cpu"
    return Engine(chooser, Packs(pack), platform=host)


@contextlib.contextmanager
def deterministic(how: str) -> Iterator[None]:
    if how == "algorithms":
        torch.use_deterministic_algorithms(True)
    else:
        torch.set_deterministic_debug_mode(how)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture(params=PRODUCTS)
def multiply(request: pytest.FixtureRequest) -> Callable[[], torch.Tensor]:
    return PRODUCTS[request.param]


@pytest.mark.parametrize("patched", PATCHES.values(), ids=PATCHES)
def test_torchs_own_operators_again(
    engine: Engine, runs: Runs, multiply: Callable[[], torch.Tensor], patched: Patched
) -> None:
    install(None)
    with contextlib.suppress(RuntimeError):  # of which torch has none on the CPU
        expected = multiply()
    install(engine)
    with patched():
        multiply()
        assert runs() > 0
        gemmsmith.use(None)
        with contextlib.suppress(RuntimeError):
            assert torch.equal(multiply(), expected)
        assert runs() == 0
        worker = threading.Thread(target=install, args=(engine,))
        worker.start()
        worker.join()
        multiply()
        assert runs() > 0


def test_others(
    engine: Engine, pack: Path, runs: Runs, multiply: Callable[[], torch.Tensor]
) -> None:
    none, others = Chooser(answers=lambda problem: False), Chooser()
    with gemmsmith.patch(), gemmsmith.patch(LAYERS):
        multiply()
        for chooser, has_won in ((none, False), (others, True), (none, False)):
            install(engine_of(chooser, pack))
            runs()
            with contextlib.suppress(RuntimeError):
                multiply()
            assert chooser.asked
            assert (runs() > 0) is has_won


@pytest.mark.filterwarnings("ignore:gemmsmith.patch")
def test_patches_from_before_anything_was_in_use(
    engine: Engine, runs: Runs, request: pytest.FixtureRequest
) -> None:
    gemmsmith.use(None)
    with gemmsmith.patch(), gemmsmith.patch(LAYERS):
        install(engine)
        for name, multiply in PRODUCTS.items():
            with contextlib.suppress(RuntimeError):
                multiply()
            # Without the binding a mode replaces them, if something is in use from the start.
            is_by_mode = "python" in request.node.name and name in BY_MODE
            assert (runs() > 0) is not is_by_mode, name
    A @ B
    assert runs() == 0


def test_reports_follow(engine: Engine, pack: Path) -> None:
    file = io.StringIO()
    with gemmsmith.patch(LAYERS, report=True, file=file):
        LAYERS(A)
        install(engine_of(Chooser(), pack))
        LAYERS(A)
        gemmsmith.use(None)
        LAYERS(A)
    assert "6 of 6 products" in file.getvalue()


def test_deterministic_programs(
    engine: Engine, chooser: Chooser, runs: Runs, multiply: Callable[[], torch.Tensor]
) -> None:
    chooser.deterministic = False
    with gemmsmith.patch(), gemmsmith.patch(LAYERS):
        for how in ("algorithms", "warn", "error"):
            multiply()
            assert runs() > 0
            with deterministic(how), contextlib.suppress(RuntimeError):
                multiply()
            assert runs() == 0


@pytest.mark.parametrize("engine_says", [True, False])
def test_an_engine_that_says_so_does_not_ask_torch(
    chooser: Chooser, pack: Path, binding: Dispatch, runs: Runs, engine_says: bool
) -> None:
    chooser.deterministic = False
    host = Host()
    host.kind = "cpu"
    engine = Engine(chooser, Packs(pack), platform=host, deterministic=engine_says)
    with stand_in.installed(engine), gemmsmith.patch():
        for how in ("default", "error"):
            with deterministic(how):
                A @ B
            assert (runs() > 0) is not engine_says


# What torch permits.


@contextlib.contextmanager
def reductions(of: str, *, rounded: bool, split: bool) -> Iterator[None]:
    name = f"allow_{of}_reduced_precision_reduction"
    setattr(torch.backends.cuda.matmul, name, (rounded, split))
    try:
        yield
    finally:
        setattr(torch.backends.cuda.matmul, name, True)


SPLIT = Launch(decomposition=Decomposition.SPLIT_K, splits=2)


def of_cutlass(dtype: str, scheduler: TileScheduler = TileScheduler.SPLIT_K) -> AnyKernel:
    return msgspec.structs.replace(stand_in.kernel("tn", dtype, Layout.TN), scheduler=scheduler)


def of_the_library(dtype: str) -> AnyKernel:
    return CublasLtKernel(
        name="tn", arch="sm90", dtype=dtype, layout=Layout.TN,
        alignment_a=8, alignment_b=8, alignment_d=8,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("kernel", "launch", "permitted"),
    [
        (of_cutlass, Launch(), (True, True)),
        (of_cutlass, SPLIT, (True, False)),
        (of_cutlass, Launch(decomposition=Decomposition.STREAM_K), (True, False)),
        (of_the_library, Launch(), (True, True)),
        (of_the_library, Launch(splits=4), (False, False)),
    ],
)
def test_reductions(
    dtype: str, kernel: Callable[[str], AnyKernel], launch: Launch, permitted: tuple[bool, bool]
) -> None:
    needs = settings.needed(Config(kernel=kernel(dtype), launch=launch), fixed_order=True)
    for of in ("bf16", "fp16"):
        for split, expected in zip((True, False), permitted, strict=True):
            assert all(permission() for permission in needs)
            with reductions(of, rounded=False, split=split):
                permits = all(permission() for permission in needs)
            assert permits is (expected or of != dtype), (of, split)


def test_settings_are_asked_at_each_call(
    engine: Engine, chooser: Chooser, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = stand_in.kernel("tt", "bf16", Layout.TT)
    choice = stand_in.Choice(Config(kernel=kernel, launch=SPLIT, pack="a" * 64))
    monkeypatch.setattr(chooser, "lookup", lambda *problem: choice)
    with gemmsmith.patch():
        for split in (True, False, True):
            with reductions("bf16", rounded=False, split=split):
                A @ B
            assert runs() == int(split)
