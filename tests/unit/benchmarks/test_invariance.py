"""benchmarks/invariance without a GPU: stand-in kernels, small sizes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import gemmsmith
from benchmarks.invariance import SUITE, comparisons, cost, kernels
from benchmarks.invariance.comparisons import Weight
from benchmarks.invariance.values import drawn, hashed
from gemmsmith.core.launch import Launch
from gemmsmith.core.problem import Layout, Problem
from gemmsmith.ops.below.dispatch import Dispatch
from tests.support import stand_in
from tests.support.below import made
from tests.support.serving import H200
from tests.support.stand_in import Chooser, Host
from tuner.backends import offered
from tuner.errors import DoesNotFit
from tuner.suites import load
from tuner.workloads.workload import Groups, OperandSet


@pytest.fixture(scope="session")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stand_in.build(tmp_path_factory.mktemp("pack"))


@contextmanager
def on_host(pack: Path, numerics: str | None) -> Iterator[None]:
    """Runs stand-in kernels in torch's products during the block."""
    host = Host()
    host.kind = "cpu"
    assert Dispatch.of("cpu", stream=host.stream) is not None
    chooser = Chooser(answers=lambda problem: not problem.operation.is_fused)
    with made(chooser, pack, numerics), gemmsmith.patch():
        yield


@pytest.fixture
def invariant(pack: Path) -> Iterator[None]:
    with on_host(pack, "invariant"):
        yield


def options(output: Path, **others: object) -> argparse.Namespace:
    return argparse.Namespace(
        **{"device": "cpu", "fp8": False, "seed": 1, "output": output} | others
    )


def test_the_kernels_add_up_in_one_order() -> None:
    chosen = kernels.chosen("bf16")
    assert len({kernel.name for kernel in chosen}) == len(chosen) == 40
    assert all(kernel.summation(Launch()) == "sequential" for kernel in chosen)
    layouts = [str(kernel.layout) for kernel in chosen]
    assert {layout: layouts.count(layout) for layout in layouts} == {"tn": 25, "tt": 7, "nt": 8}
    few_rows = [k for k in chosen if k.swapped and k.tile[1] <= 32 and k.layout == "tn"]
    assert len(few_rows) >= 5
    names = {kernel.name for kernel in chosen}
    for _, problem in load(SUITE).problems("bf16.sum_sequential"):
        if not (problem.operation.is_grouped or problem.operation.is_fused):
            assert len(names & {kernel.name for kernel in offered(problem, H200)}) >= 7, problem
    assert len(kernels.chosen("bf16.then_silu_gate_aux")) == 4
    assert len(kernels.chosen("bf16.then_dsilu_gate")) >= 2
    assert len(kernels.chosen("bf16.group_rows")) == 8
    assert len(kernels.chosen("fp8_e4m3.scale_row")) >= 8


def test_the_suite_has_each_weight_once_and_few_problems() -> None:
    entries = load(SUITE).entries
    assert len(entries) <= 120
    single = [e for e in entries if e.layout == "tn" and e.batch == 1 and e.epilogue == "none"]
    assert len({(e.m, e.n, e.k) for e in single}) == len(single)
    forwards = {(e.n, e.k): set[int]() for e in single}
    for entry in single:
        forwards[entry.n, entry.k].add(entry.m)
    tokens = {1, 16, 64, 256, 1024, 4096, 16384}
    for n, k in forwards:
        heads, experts = n > 100_000, (n, k) in ((1536, 2048), (2048, 768))
        assert forwards[n, k] == ({64} if experts else tokens - {16384} if heads else tokens)


def test_operands_are_the_same_everywhere() -> None:
    drawn_ = drawn(64, 48, 1, "cpu")
    assert hashed(drawn_) == "f1abe97f60c32c5e"
    assert abs(float(drawn_.float().mean())) < 0.02
    assert 0.39 < float(drawn_.float().std()) < 0.43
    assert hashed(drawn(64, 48, 2, "cpu")) != hashed(drawn_)


def test_every_weight_of_the_models_is_compared() -> None:
    sizes = {(w.n, w.k) for w in comparisons.weights(fp8=False) if w.groups == 1}
    assert {(4096, 14336), (151936, 2048), (128, 2048), (512, 2048), (1536, 2048)} < sizes
    assert len(sizes) == 15
    experts = [w for w in comparisons.weights(fp8=False) if w.groups == 128]
    assert len(experts) in (0, 2)  # grouped products have no order yet
    gradients = {(w.n, w.k) for w in comparisons.weights(fp8=False) if w.gradients}
    assert gradients == {(4096, 4096), (1024, 4096), (12288, 4096), (4096, 12288)}
    assert [(w.n, w.k) for w in comparisons.weights(fp8=False) if w.pairs] == [(1024, 4096)]
    assert len(comparisons.weights(fp8=True)) == 12


@pytest.mark.filterwarnings("ignore")  # Inductor's own
@pytest.mark.usefixtures("invariant")
def test_rows_are_compared_in_every_way(tmp_path: Path) -> None:
    chosen = [
        Weight(name="a", n=16, k=8, pairs=True, gradients=True),
        Weight(name="b", n=8, k=32),
    ]
    output = tmp_path / "bits.json"
    status = comparisons.compare(chosen, 100, options(output), rows=32)
    result = json.loads(output.read_text())
    assert result["totals"] == {"comparisons": 100, "different": 0, "errors": 0}
    assert status == 0
    first, second = result["weights"]
    assert [len(row["hashes"]) for row in (first, second)] == [4, 2]
    assert set(first["compared"]) == {
        "mm", "linear", "compiled", "addmm", "linear with bias", "bmm",
        "input gradient",
    }  # fmt: skip


def test_tokens_of_experts_are_compared_with_products_of_one(tmp_path: Path, pack: Path) -> None:
    """The stand-ins of both add up in the same order."""
    output = tmp_path / "bits.json"
    with on_host(pack, None):
        weight = Weight(name="experts", n=16, k=16, groups=4)
        assert comparisons.compare([weight], 60, options(output)) == 0
    assert json.loads(output.read_text())["weights"][0]["compared"] == {"grouped_mm": 60}


@pytest.mark.usefixtures("invariant")
def test_fp8_is_compared(tmp_path: Path) -> None:
    output = tmp_path / "bits.json"
    weight = Weight(name="a", n=16, k=32)
    assert comparisons.compare([weight], 20, options(output, fp8=True), rows=32) == 0
    assert json.loads(output.read_text())["weights"][0]["compared"] == {"scaled_mm": 20}


def test_other_bits_and_weights_without_a_winner_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def depends_on_m(chosen: torch.Tensor) -> torch.Tensor:
        return reference[chosen] + (len(chosen) == 1)

    def case(weight: Weight, *_: object) -> comparisons.Case:
        if weight.name == "b":
            raise gemmsmith.NotInvariant("no kernel")
        ways = {"mm": (depends_on_m, 0)}
        return comparisons.Case(rows=32, references=[reference], ways=ways)

    reference = drawn(32, 8, 1, "cpu")
    monkeypatch.setattr(comparisons, "case", case)
    output = tmp_path / "bits.json"
    chosen = [Weight(name=name, n=8, k=8) for name in ("a", "b")]
    assert comparisons.compare(chosen, 80, options(output)) == 1
    result = json.loads(output.read_text())
    first, second = result["weights"]
    assert second["error"] == "no kernel"
    assert first["examples"][0] == ["mm", 1]
    assert 0 < first["different"]["mm"] == result["totals"]["different"] < 40
    assert result["totals"]["errors"] == 1


def test_hashes_of_machines_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def file(name: str, **hashes: object) -> Path:
        path = tmp_path / name
        rows = [{"weight": weight, "hashes": of} for weight, of in hashes.items()]
        path.write_text(json.dumps({"device": name, "weights": rows}))
        return path

    a, b = file("A", x=["1"], y=["2", "3"]), file("B", x=["1"], y=["2", "4"])
    assert comparisons.main(["--same", str(a), str(a)]) == 0
    assert "A, A: 2 of 2 weights have equal bits" in capsys.readouterr().out
    assert comparisons.main(["--same", str(a), str(b)]) == 1
    assert "y: ['2', '3'], ['2', '4']" in capsys.readouterr().out
    assert comparisons.main(["--same", str(a), str(file("C", x=None))]) == 1


def test_costs_are_geometric_means_over_few_and_many_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, more = Problem(m=1, n=64, k=64), Problem(m=64, n=64, k=64)
    many, gradient = Problem(m=256, n=64, k=64), Problem(m=64, n=64, k=64, layout=Layout.TT)
    too_large = Problem(m=512, n=64, k=64)
    times = {
        few: {"torch": 4.0, "invariant": 2.0, "triton": 8.0},
        more: {"torch": 1.0, "invariant": 2.0},
        many: {"torch": 9.0, "invariant": 10.0},
        gradient: {"torch": 3.0, "invariant": 3.0},
    }

    def timed(problem: Problem, *, triton: bool) -> tuple[Mapping[str, float], Mapping[str, str]]:
        assert triton
        if problem == too_large:
            raise DoesNotFit("too large")
        errors = {"triton": "no"} if problem == more else {}
        return times[problem], errors

    monkeypatch.setattr(cost, "timed", timed)
    output = tmp_path / "cost.json"
    chosen = options(output, seconds=100.0, without_triton=False)
    assert cost.measure_all([*times, too_large], chosen) == 1
    result = json.loads(output.read_text())
    assert [row.get("errors") for row in result["problems"]] == [
        None, {"triton": "no"}, None, None, {"operands": "too large"},
    ]  # fmt: skip
    assert result["problems"][0]["over"] == {"torch": 1.0, "invariant": 2.0, "triton": 0.5}
    means = result["means"]
    assert means["forward, M ≤ 64, invariant"] == {
        "problems": 2, "geometric_mean": 1.0, "worst": 0.5, "worst_problem": "64×64×64 bf16 tn",
    }  # fmt: skip
    assert means["forward, M ≤ 64, triton"]["geometric_mean"] == 0.5
    assert means["forward, M ≥ 256, invariant"]["geometric_mean"] == 0.9
    assert means["input gradients, invariant"]["problems"] == 1
    assert cost.measure_all([few], options(output, seconds=-1.0)) == 1


@pytest.mark.usefixtures("invariant")
def test_a_side_without_a_kernel_or_with_another_result_is_not_timed() -> None:
    a, b = drawn(16, 32, 1, "cpu")[None], drawn(8, 32, 2, "cpu")[None].mT
    sets = [OperandSet(a=a, b=b, d=torch.empty(1, 16, 8, dtype=torch.bfloat16))]
    right, errors = cost.launches(sets, triton=True)
    assert list(right) == ["invariant"]
    assert list(errors) == ["triton"]  # it needs a GPU
    assert torch.equal(torch.as_tensor(right["invariant"](0)), torch.mm(a[0], b[0]))


def test_experts_are_timed_after_a_comparison(pack: Path) -> None:
    a = drawn(24, 16, 1, "cpu")[None]
    b = drawn(3 * 8, 16, 2, "cpu").view(3, 8, 16).mT
    ends = (5, 5, 24)
    groups = Groups(spread="x", ends=ends, offsets=torch.tensor(ends, dtype=torch.int32))
    d = torch.empty(1, 24, 8, dtype=torch.bfloat16)
    with on_host(pack, None):
        right, errors = cost.launches([OperandSet(a=a, b=b, d=d, groups=groups)], triton=True)
    assert (list(right), errors) == (["invariant"], {})
    wrong = replace(groups, ends=(6, 6, 24))
    with on_host(pack, None):
        right, errors = cost.launches([OperandSet(a=a, b=b, d=d, groups=wrong)], triton=True)
    assert right == {}
    assert "differs from FP32's" in errors["invariant"]
