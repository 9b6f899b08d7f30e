"""The peers' measuring on the host: real operands, judge and rounds; only the GPU is played."""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.peers import measure
from benchmarks.peers.judge import Judge
from benchmarks.peers.measure import ContextDead, Runner
from benchmarks.peers.records import Busy, Request, Row
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.problem import DType, Layout, Problem
from tests.support.candidates import KERNEL
from tests.support.host import MODEL, HostEvent, HostGraph, HostStream, build_pack
from tests.support.replacing import replace
from tuner.measure import graphs, timing
from tuner.measure.conditions import Monitor
from tuner.workloads.operands import HOST, Operands
from tuner.workloads.scaled import factors

PROBLEM = Problem(m=24, n=16, k=40)


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_pack(tmp_path_factory.mktemp("pack"))


@pytest.fixture
def said() -> list[Busy]:
    return []


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, said: list[Busy]) -> Runner:
    for module in (graphs, timing):
        monkeypatch.setattr(module, "Event", HostEvent)
    monkeypatch.setattr(measure, "TorchGraph", HostGraph)
    monkeypatch.setattr(measure, "context_is_dead", lambda: "")
    monkeypatch.setattr(timing, "WARM_UP_US", 10.0)
    monkeypatch.setattr(timing, "MAX_LAUNCHES", 8)
    return Runner(
        model=MODEL,
        ordinal=HOST,
        stream=HostStream(),  # type: ignore[arg-type]
        monitor=Monitor(""),
        send=said.append,
    )


def _measure(runner: Runner, pack: Path, kernel: str, *peers: str) -> Row:
    return runner.measure(
        Request(
            problem=PROBLEM,
            peers=("cublas", *peers),
            rounds=5,
            seed=3,
            candidate=Candidate(kernel=replace(KERNEL, name=kernel)),
            pack=str(pack),
        )
    )


@pytest.mark.parametrize("kernel", ["good", "split"])
def test_verified_peers_are_raced_against_cublas(
    runner: Runner, pack: Path, said: list[Busy], kernel: str
) -> None:
    row = _measure(runner, pack, kernel, "gemmsmith")
    assert row.failure is None
    ours, baseline_entry = row.entries["gemmsmith"], row.entries["cublas"]
    assert ours.reason is None
    assert ours.statistics is not None
    assert ours.statistics.samples == 5
    assert ours.ratio is not None
    assert ours.ratio.median > 0
    assert ours.note.startswith(kernel)
    assert 0 < (ours.error or 0) < 5e-3
    assert baseline_entry.ratio is not None
    assert baseline_entry.ratio.median == 1.0
    assert [busy.peer for busy in said][:4] == ["", "cublas", "cublas", "gemmsmith"]


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        ("wrong", "wrong: error"),
        ("unwritten", "wrong: 16 output elements were never written"),
        ("fails", "LaunchFailed: fails: CUDA error 9"),
        ("refuses", "the winner refuses the problem"),
        ("absent", "PackError"),
    ],
)
def test_a_peer_that_fails_is_excluded_with_its_reason(
    runner: Runner, pack: Path, kernel: str, reason: str
) -> None:
    row = _measure(runner, pack, kernel, "gemmsmith")
    entry = row.entries["gemmsmith"]
    assert (entry.reason or "").startswith(reason)
    assert entry.ratio is None
    assert row.failure is None
    assert row.entries["cublas"].ratio is not None


def test_without_a_winner_gemmsmith_says_so(runner: Runner) -> None:
    request = Request(
        problem=PROBLEM, peers=("cublas", "gemmsmith"), rounds=5, seed=3, reason="tune it first"
    )
    assert runner.measure(request).entries["gemmsmith"].reason == "tune it first"


def test_a_dead_context_ends_the_process(
    runner: Runner, pack: Path, said: list[Busy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "context_is_dead", lambda: "CUDA_ERROR_ILLEGAL_ADDRESS")
    with pytest.raises(ContextDead, match="ILLEGAL_ADDRESS"):
        _measure(runner, pack, "fails", "gemmsmith")
    assert said[-1].peer == "gemmsmith"


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("batch", [1, 3])
def test_the_judge_knows_the_product(layout: Layout, batch: int) -> None:
    operands = Operands(Problem(m=9, n=17, k=33, batch=batch, layout=layout), MODEL, HOST, seed=5)
    judge = Judge(operands)
    first = operands.sets[0]
    wanted = first.a.double() @ first.b.double()
    assert judge.wrong(lambda _: first.d.copy_(wanted)) is None
    assert judge.error < 5e-3
    assert "error" in (judge.wrong(lambda _: first.d.copy_(wanted).mul_(1.02)) or "")
    assert "error nan" in (judge.wrong(lambda _: first.d.fill_(float("nan"))) or "")
    assert "never written" in (judge.wrong(lambda _: first.d) or "")


def test_the_judge_knows_fp8_scales() -> None:
    problem = Problem(m=16, n=32, k=64, dtype=DType.FP8_E4M3)
    operands = Operands(problem, MODEL, HOST, seed=5)
    first = operands.sets[0]
    scale_a, scale_b = factors(first)
    scale = float(scale_a * scale_b)
    wanted = scale * (first.a.double() @ first.b.double())
    judge = Judge(operands)
    assert judge.wrong(lambda _: wanted.to(first.d.dtype)) is None
    assert judge.wrong(lambda _: (wanted / scale).to(first.d.dtype)) is not None


def test_cublaslt_descriptors_with_the_real_library() -> None:
    from benchmarks.peers.cublaslt_api import Algorithm, Library, LtError
    from gemmsmith.core.problem import Element

    assert ctypes.sizeof(Algorithm) == 96  # cublasLtMatmulHeuristicResult_t
    spec = find_spec("nvidia")
    places = [Path(each) for each in (spec.submodule_search_locations or [])] if spec else []
    found = [path for place in places for path in place.glob("*/lib/libcublasLt.so.13")]
    if not found:
        pytest.skip("nvidia-cublas 13 is not installed")
    library = Library(str(found[0]))
    assert library.product(transposed=(True, False), scales=(256, 512)).value
    assert library.layout(Element.E4M3, 128, 64, 128, 3, 128 * 64).value
    assert library.preference(2**25).value
    with pytest.raises(LtError, match="status 7"):
        library.set(
            "MatmulDesc", library.product(transposed=(True, True), scales=None), 3, ctypes.c_int8(1)
        )
