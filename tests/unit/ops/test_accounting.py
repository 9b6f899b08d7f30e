"""Which kernel ran each product of a program, and every reason for which torch did."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

import gemmsmith
from gemmsmith.answers.snapshot import Row, Snapshot
from gemmsmith.core.config import Use
from gemmsmith.core.problem import DType, Layout, Problem
from gemmsmith.errors import PackUntrusted
from gemmsmith.ops.accounting import account
from gemmsmith.ops.below.dispatch import Dispatch
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.program.ran import Ran, RanProduct
from gemmsmith.winners.lookup import Lookup
from tests.gpu.support.choosing import Ground
from tests.support import unchanged
from tests.support.replacing import replace
from tests.support.serving import own_signer
from tests.support.stand_in import Chooser, Host, Packs, config, installed
from tests.unit.ops.test_unchanged import FORWARD, INPUT, SCRIPT, WEIGHT, baked

BF16 = torch.bfloat16
PROBLEM = Problem(m=4, n=8, k=16)


def random(*size: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(size, dtype=dtype)


def accounted(step: Callable[[], object]) -> Sequence[RanProduct]:
    with gemmsmith.capture() as shapes:
        step()
    return account(shapes.calls.total, 1).products


def once() -> None:
    gemmsmith.linear(random(4, 16), random(8, 16))


def refused(chooser: Chooser, host: Host, packs: Packs) -> None:
    def path(pack_hash: str) -> Path:
        raise PackUntrusted("no signature that is trusted here")

    packs.path = path  # type: ignore[method-assign]


def named(name: str) -> Callable[[Chooser, Host, Packs], None]:
    return lambda chooser, host, packs: setattr(chooser, "name", name)


REASONS: dict[str, tuple[Callable[[Chooser, Host, Packs], object], str]] = {
    "no winner": (
        lambda chooser, host, packs: setattr(chooser, "answers", lambda problem: False),
        "no winner",
    ),
    "architecture": (
        lambda chooser, host, packs: setattr(host, "arch", lambda index: "sm100"),
        "its winner is for sm90",
    ),
    "order": (
        lambda chooser, host, packs: setattr(chooser, "deterministic", False),
        "its winner adds up in no fixed order",
    ),
    "not compiled": (
        lambda chooser, host, packs: setattr(chooser, "pack", None),
        "its winner is not compiled",
    ),
    "not trusted": (refused, "its kernel pack is not used: no signature that is trusted here"),
    "pack": (
        lambda chooser, host, packs: setattr(packs, "file", Path("none.so")),
        "its kernel pack is not used: ",
    ),
    "absent": (named("absent"), "its kernel pack is not used: "),
    "other cuBLASLt": (named("no_algorithm"), "its winner is an algorithm of another cuBLASLt"),
    "refuses": (named("refuses"), "its winner refused: "),
    "fails": (named("fails"), "a launch of its winner failed"),
    "lookup": (
        lambda chooser, host, packs: setattr(chooser, "answers", lambda problem: 1 / 0),
        "the lookup failed: division by zero",
    ),
}


@pytest.mark.parametrize("kind", REASONS)
def test_every_reason_for_which_torch_runs(
    chooser: Chooser, host: Host, pack: Path, kind: str
) -> None:
    change, reason = REASONS[kind]
    packs = Packs(pack)
    change(chooser, host, packs)
    with installed(Engine(chooser, packs, platform=host, deterministic=True)):
        (product,) = accounted(once)
    assert (product.problem, product.calls, product.kernel) == (PROBLEM, 1, "")
    assert product.reason.startswith(reason)


def test_reasons_that_operands_and_settings_make(engine: Engine, chooser: Chooser) -> None:
    def reason(step: Callable[[], object]) -> str:
        (product,) = accounted(step)
        assert not product.kernel
        return product.reason

    wide = random(4, 17)[:, :16]
    assert "(alignment)" in reason(lambda: gemmsmith.linear(wide, random(8, 16)))
    double = random(4, 16, dtype=torch.float64)
    assert reason(lambda: double @ double.mT) == "no kernels exist for these types"
    assert reason(lambda: random(4, 16) @ random(16, 24)) == "no patch replaces it"
    with installed(None):
        assert reason(once).startswith("no winners are in use: ")
    chooser.answers = lambda problem: not problem.operation.is_fused
    chooser.saving_us = 0.5
    added = accounted(lambda: gemmsmith.linear(random(6, 16), random(8, 16), random(8)))
    assert [(product.kernel, product.calls) for product in added] == [("", 1)]


def test_times_are_those_of_the_record(engine: Engine, chooser: Chooser) -> None:
    chooser.saving_us, chooser.time_us = 2.5, lambda problem: 10.0
    (product,) = accounted(lambda: [once() for _ in range(3)])
    assert product == RanProduct(problem=PROBLEM, calls=3, kernel="tn", time_us=10.0, saving_us=2.5)


def test_the_default_has_the_time_of_its_record(pack: Path, host: Host) -> None:
    row = Row(
        problem=PROBLEM,
        use=Use.CUBLAS,
        config=config("tn", DType.BF16, Layout.TN),
        time_us=12.0,
        saving_us=-2.0,
    )
    snapshot = Snapshot.of("host-4sm", [row], own_signer())
    with installed(Engine(Lookup(snapshot, pin=True), Packs(pack), platform=host)):
        (product,) = accounted(once)
    assert (product.reason, product.time_us) == ("torch's default is faster", 10.0)


@pytest.mark.parametrize(
    ("has_fused", "has_plain", "kernels"),
    [
        (True, True, ["then_bias_tn"]),
        (False, True, ["tn"]),
        (False, False, [""]),
    ],
)
def test_a_layer_with_a_bias_runs_once(
    engine: Engine, chooser: Chooser, has_fused: bool, has_plain: bool, kernels: list[str]
) -> None:
    """Recorded are its product and the product with its bias: one of them ran."""
    chooser.answers = lambda problem: has_fused if problem.operation.is_fused else has_plain
    products = accounted(lambda: gemmsmith.linear(random(4, 16), random(8, 16), random(8)))
    assert [(product.kernel, product.calls) for product in products] == [
        (kernel, 1) for kernel in kernels
    ]


@pytest.mark.parametrize("has_fused", [True, False])
def test_what_is_not_fused_is_apart_from_what_ran(
    engine: Engine, chooser: Chooser, has_fused: bool
) -> None:
    chooser.answers = lambda problem: has_fused or problem.operation.epilogue.is_torchs
    x, gate, up = random(8, 16), random(24, 16), random(24, 16)
    products = accounted(lambda: gemmsmith.gated_linear(x, gate, up, activation="silu"))
    ran = [(product.kernel, product.calls) for product in products if not product.is_missed]
    missed = [(product.reason, product.calls) for product in products if product.is_missed]
    if has_fused:
        assert (ran, missed) == ([("then_silu_gate_tn", 1)], [])
    else:
        assert (ran, missed) == ([("tn", 2)], [("no winner", 1)])


def test_an_account_is_read_as_it_was_written(engine: Engine) -> None:
    with gemmsmith.capture() as shapes:
        once()
    written = account(shapes.calls.total, 2)
    assert Ran.parse(written.document) == written
    for wrong in (b"", b"{}", written.document.replace(b'"m":4', b'"m":0')):
        with pytest.raises(ValueError, match=r"."):
            Ran.parse(wrong)


def test_processes_add_up_and_steps_only_where_all_took_some(engine: Engine) -> None:
    product = RanProduct(problem=PROBLEM, calls=2, kernel="tn")
    stepped = Ran(steps=2, processes=1, products=[product])
    idle = Ran(steps=0, processes=1, products=[])
    both = Ran.together([stepped, idle, stepped])
    assert both == Ran(steps=4, processes=2, products=[replace(product, calls=4)])
    server = Ran(steps=0, processes=1, products=[product])
    assert Ran.together([stepped, server]).steps == 0


def test_the_account_runs_no_kernel(engine: Engine, runs: Callable[[], int]) -> None:
    with gemmsmith.capture() as shapes:
        once()
    assert runs() == 1
    account(shapes.calls.total, 1)
    assert runs() == 0


@pytest.mark.long
def test_a_report_of_a_plain_program(ground: Ground, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    bundle = baked(ground, tmp_path / "winners.gspack", [FORWARD, WEIGHT])
    environment = unchanged.environment(
        tmp_path / "site",
        stand_in=True,
        GEMMSMITH=str(bundle),
        GEMMSMITH_DATABASE=f"sqlite:///{tmp_path / 'g.db'}",
        XDG_DATA_HOME=str(tmp_path / "home"),
    )
    command = [sys.executable, "-m", "service.cli", "run"]
    program = ["--", "python", "train.py"]
    done = unchanged.run([*command, "--report=gained.json", *program], tmp_path, environment)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "gained.json").read_text())
    assert (report["unit"], report["steps"], report["processes"]) == ("step", 2, 1)
    assert {(line["product"], line["calls"], line["kernel"]) for line in report["kernels"]} == {
        (str(FORWARD), 1.0, "tn"),
        (str(WEIGHT), 1.0, "nt"),
    }
    assert [(line["product"], line["reason"]) for line in report["by_torch"]] == [
        (str(INPUT), "no winner")
    ]
    assert "less than torch's" in done.stderr
    without = unchanged.run([*command, *program], tmp_path, environment)
    assert "less than torch's" not in without.stderr


def leaf(*size: int) -> torch.Tensor:
    return (random(*size) / 4).requires_grad_()


def fp8(*size: int) -> torch.Tensor:
    return torch.randn(size).to(torch.float8_e4m3fn)


def int8(*size: int) -> torch.Tensor:
    return torch.randint(-8, 8, size, dtype=torch.int8)


ONE = torch.ones(())


def with_backward(result: torch.Tensor) -> None:
    result.float().square().mean().backward()


def a_patched_model() -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32, dtype=BF16),
        torch.nn.GELU(approximate="tanh"),
        torch.nn.Linear(32, 16, dtype=BF16),
    )
    with gemmsmith.patch(model):
        with_backward(model(leaf(8, 16)))


def everything_patched() -> None:
    with gemmsmith.patch():
        x, weight = leaf(8, 16), leaf(24, 16)
        with_backward(torch.nn.functional.linear(x, weight))
        with_backward(torch.bmm(leaf(2, 8, 16), leaf(2, 16, 8)))
        torch.nn.functional.linear(x, weight, random(24))


def some_experts() -> None:
    index = torch.tensor([[0, 1], [1, 2], [2, 0], [3, 1]] * 4)
    shares = torch.rand(16, 2)
    with_backward(gemmsmith.experts(leaf(16, 32), index, shares, leaf(4, 96, 32), leaf(4, 32, 48)))


def an_added_gradient() -> None:
    sums = torch.zeros(24, 16)
    with_backward(gemmsmith.linear(leaf(8, 16), leaf(24, 16), main_grad=sums))


STEPS: dict[str, Callable[[], object]] = {
    "linear": lambda: with_backward(gemmsmith.linear(leaf(8, 16), leaf(24, 16))),
    "bias": lambda: with_backward(gemmsmith.linear(leaf(8, 16), leaf(24, 16), random(24))),
    "three dimensions": lambda: with_backward(gemmsmith.linear(leaf(2, 8, 16), leaf(24, 16))),
    "matmul": lambda: with_backward(gemmsmith.matmul(leaf(8, 16), leaf(16, 24))),
    "batch": lambda: with_backward(gemmsmith.matmul(leaf(3, 8, 16), leaf(3, 16, 24))),
    "added gradient": an_added_gradient,
    "activation": lambda: with_backward(
        gemmsmith.linear(leaf(8, 16), leaf(24, 16), random(24), activation="gelu_tanh")
    ),
    "residual": lambda: with_backward(
        gemmsmith.linear(leaf(8, 16), leaf(24, 16), random(24), residual=leaf(8, 24))
    ),
    "gate": lambda: with_backward(gemmsmith.gated_linear(leaf(8, 16), leaf(24, 16), leaf(24, 16))),
    "mlp": lambda: with_backward(
        gemmsmith.mlp(leaf(8, 16), leaf(32, 16), leaf(16, 32), up=leaf(32, 16))
    ),
    "scaled, promoted": lambda: gemmsmith.scaled_mm(fp8(8, 16), fp8(16, 16).mT, ONE, ONE),
    "scaled": lambda: gemmsmith.scaled_mm(
        fp8(8, 16), fp8(16, 16).mT, ONE, ONE, use_fast_accum=True
    ),
    "scaled layer": lambda: gemmsmith.scaled_linear(
        fp8(8, 16), fp8(16, 16), ONE, ONE, random(16), activation="gelu_tanh"
    ),
    "scaled gate": lambda: gemmsmith.scaled_gated_linear(
        fp8(8, 16), fp8(16, 16), ONE, ONE, fp8(16, 16)
    ),
    "int8": lambda: gemmsmith.int8_mm(int8(32, 16), int8(16, 16).mT),
    "grouped": lambda: with_backward(
        gemmsmith.grouped_mm(
            leaf(16, 32), leaf(4, 32, 48), torch.tensor([4, 4, 9, 16], dtype=torch.int32)
        )
    ),
    "experts": some_experts,
    "model": a_patched_model,
    "everything": everything_patched,
}


@pytest.mark.parametrize("answers", ["all", "plain"])
@pytest.mark.parametrize("kind", STEPS)
def test_as_many_calls_ran_kernels_as_were_launched(
    engine: Engine, chooser: Chooser, runs: Callable[[], int], kind: str, answers: str
) -> None:
    if answers == "plain":
        chooser.answers = lambda problem: not problem.operation.is_fused
    runs()
    with gemmsmith.capture() as shapes:
        STEPS[kind]()
    launched = runs()
    assert launched or answers == "plain" or kind == "scaled, promoted"
    products = account(shapes.calls.total, 1).products
    assert sum(product.calls for product in products if product.kernel) == launched, products


@pytest.mark.parametrize("step", [a_patched_model, everything_patched])
def test_the_same_below_torchs_operators(
    engine: Engine,
    host: Host,
    binding: Dispatch,
    runs: Callable[[], int],
    step: Callable[[], object],
) -> None:
    host.kind = "cpu"
    with gemmsmith.capture() as shapes:
        step()
    launched = runs()
    assert launched > 0
    products = account(shapes.calls.total, 1).products
    assert sum(product.calls for product in products if product.kernel) == launched, products


def test_products_of_one_order_are_named_with_it(chooser: Chooser, host: Host, pack: Path) -> None:
    with installed(Engine(chooser, Packs(pack), platform=host, numerics="invariant")):
        (product,) = accounted(once)
    assert (str(product.problem), product.kernel) == ("4×8×16 bf16.sum_sequential tn", "tn")
