"""Where nothing wins, a layer's own forward runs after one look-up, until something changes."""

from __future__ import annotations

import gc
import io
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gemmsmith
from gemmsmith.answers.snapshot import Row
from gemmsmith.core.config import Use
from gemmsmith.core.operation import layouts_of
from gemmsmith.core.problem import Layout, Problem
from gemmsmith.ops.below import experts as grouped
from gemmsmith.ops.below.dispatch import Dispatch
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.in_use import in_use, install
from gemmsmith.ops.models import forwards
from gemmsmith.ops.products import layer
from tests.support import tiny_models
from tests.support.below import Swapping, of_types
from tests.support.patched import is_patched
from tests.support.stand_in import Chooser, Host, Packs, deterministic, installed
from tests.unit.ops.test_layers import BF16, INNER, LAYERS, WIDTH, made

Runs = Callable[[], int]
Net = tuple[nn.Module, list[torch.Tensor]]


def operands(count: int = 1, *size: int) -> list[torch.Tensor]:
    torch.manual_seed(4)
    return [torch.randn(*(size or (2, 3, WIDTH))).to(BF16).requires_grad_() for _ in range(count)]


def linear() -> Net:
    return nn.Linear(WIDTH, INNER).to(BF16), operands()


def norm() -> Net:
    """torch's own, whose gradients are too small for a kernel of ours."""
    return nn.RMSNorm(WIDTH).to(BF16), operands()


def conv1d() -> Net:
    (tiny,) = [tiny for tiny in tiny_models.MODELS if tiny.name == "GPT-2"]
    return tiny.model().transformer.h[0].mlp, operands(1, 8, 32)


def experts() -> Net:
    (tiny,) = [tiny for tiny in tiny_models.MODELS if tiny.name == "Qwen3-MoE"]
    index = torch.tensor([[0, 1], [2, 3], [1, 3]])
    net = tiny.model().model.layers[0].mlp.experts
    return net, [*operands(1, 3, 32), index, *operands(1, 3, 2)]


NETS: dict[str, Callable[[], Net]] = {
    **{
        kind: lambda kind=kind: (made(kind), operands(2 if kind == "bert" else 1))  # type: ignore[misc]
        for kind in LAYERS
    },
    "linear": linear,
    "norm": norm,
    "conv1d": conv1d,
    "experts": experts,
}
WITH_KERNELS = [kind for kind in NETS if kind not in ("norm", "conv1d")]


@pytest.fixture
def engine(pack: Path, without_binding: None, host: Host) -> Iterator[Engine]:
    with installed(Engine(Swapping(answers=lambda _: False), Packs(pack), platform=host)) as _:
        engine = in_use()
        assert engine is not None
        yield engine


@pytest.fixture
def chooser(engine: Engine) -> Swapping:
    chooser: Any = engine._chooser
    return chooser


@contextmanager
def counted(net: nn.Module) -> Iterator[list[int]]:
    """Counts how often a patched layer was decided at length."""
    forward: Any = net.__dict__["forward"]
    count, run = [0], forward._run

    def counting(*call: Any) -> Any:
        count[0] += 1
        return run(*call)

    forward._run = counting
    yield count


MODES = [
    (kind, mode)
    for kind in NETS
    for mode in ("no_grad", "gradients", "autocast", "checkpoint")
    if mode != "autocast" or kind not in ("experts", "norm")  # never patched under autocast
]


@pytest.mark.parametrize(("kind", "mode"), MODES)
def test_one_look_up_after_the_decision(
    engine: Engine, chooser: Swapping, runs: Runs, kind: str, mode: str
) -> None:
    net, given = NETS[kind]()
    contexts: dict[str, AbstractContextManager[Any]] = {
        "no_grad": torch.no_grad(),
        "autocast": torch.autocast("cpu", torch.bfloat16),
    }

    def call() -> torch.Tensor:
        if mode == "checkpoint":
            out: torch.Tensor = checkpoint(net, *given, use_reentrant=False)
        else:
            out = net(*given)
        return out

    with contexts.get(mode, nullcontext()):
        expected = call()
        with gemmsmith.patch(net), counted(net) as decided:
            call()
            # A norm that is too small for a kernel of ours is not decided, except in a region.
            once = [0] if kind == "norm" and mode != "checkpoint" else [1]
            assert decided == once
            asked = len(chooser.asked)
            for _ in range(3):
                assert torch.equal(call(), expected)
            assert decided == once
            assert len(chooser.asked) == asked
    assert runs() == 0


def swapped(chooser: Swapping, _: nn.Module) -> None:
    chooser.answers = lambda _: True
    chooser.snapshot = object()


def another_engine(chooser: Swapping, _: nn.Module) -> None:
    engine: Any = in_use()
    install(Engine(Chooser(), engine._packs, platform=engine.platform))


@pytest.mark.parametrize("change", [swapped, another_engine])
@pytest.mark.parametrize("kind", WITH_KERNELS)
def test_kernels_run_when_winners_change(
    engine: Engine, chooser: Swapping, runs: Runs, kind: str, change: Callable[..., None]
) -> None:
    net, given = NETS[kind]()
    with gemmsmith.patch(net):
        for _ in range(3):
            net(*given)
        assert runs() == 0
        change(chooser, net)
        net(*given)
        assert runs() > 0


@pytest.mark.parametrize("kind", WITH_KERNELS)
def test_kernels_run_for_other_sizes(
    engine: Engine, chooser: Swapping, runs: Runs, kind: str
) -> None:
    net, given = NETS[kind]()
    rows = {4} if kind != "experts" else {8}
    chooser.answers = lambda problem: problem.m in rows
    smaller = [tensor.flatten(0, -2)[:1].repeat(4, 1) for tensor in given]
    with torch.no_grad(), gemmsmith.patch(net):
        for _ in range(3):
            net(*given)
            assert runs() == 0
            net(*smaller)
            assert runs() > 0


def frozen(net: nn.Module, x: torch.Tensor) -> None:
    net.requires_grad_(requires_grad=False)
    x.requires_grad_(requires_grad=False)


def widened(net: Any, _: torch.Tensor) -> None:
    net.c_fc.weight = nn.Parameter(torch.ones(40, WIDTH, dtype=BF16))
    net.c_fc.bias = nn.Parameter(torch.ones(40, dtype=BF16))
    net.c_proj.weight = nn.Parameter(torch.ones(WIDTH, 40, dtype=BF16))


def trained(net: Any, _: torch.Tensor) -> None:
    net.c_fc.bias.requires_grad_()


Before = Callable[[Any, torch.Tensor], object]
OTHERS: dict[str, tuple[Callable[[Problem], bool], Before, Before]] = {
    "no gradients": (lambda p: str(p.operation).endswith("bias_gelu tn"), lambda *_: 0, frozen),
    "wider": (lambda p: p.n == 40, lambda *_: 0, widened),
    "a bias is trained": (lambda p: "bias_gelu_aux" in str(p.operation), frozen, trained),
}


@pytest.mark.parametrize("what", OTHERS)
def test_kernels_run_when_the_layer_changes(
    engine: Engine, chooser: Swapping, runs: Runs, what: str
) -> None:
    wins, before, change = OTHERS[what]
    chooser.answers = wins
    net, (x,) = made("nanogpt"), operands()
    before(net, x)
    with gemmsmith.patch(net), counted(net) as decided:
        for _ in range(3):
            net(x)
        assert decided == [1]
        assert runs() == 0
        change(net, x)
        net(x)
        assert runs() > 0


@pytest.mark.parametrize("kind", ["bert", "nanogpt", "torchtitan", "sequence"])
def test_a_kernel_that_saves_little_is_left_in_training(
    engine: Engine, chooser: Swapping, runs: Runs, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An autograd function in Python would take the host longer. Backward kernels save more."""
    names = LAYERS[kind][1]
    chooser.answers = lambda problem: any(f".then_{name}" in problem.dtype for name in names)
    net, given = NETS[kind]()
    own = net(*given)
    chooser.saving_us = layer.LAYER_US - 1
    with gemmsmith.patch(net):
        for _ in range(2):
            assert torch.equal(net(*given), own)
        assert runs() == 0
        with torch.no_grad():
            net(*given)
        assert runs() == len(names)
        chooser.saving_us, chooser.snapshot = layer.LAYER_US, object()
        net(*given)
        assert runs() == len(names)
        chooser.snapshot = object()
        monkeypatch.setattr(layer, "LAYER_FLOPS", 2**38)  # a neighbour's kernel has no saving
        chooser.saving_us = None
        net(*given)
        assert runs() == 0


def test_a_dropout_that_ends(engine: Engine, chooser: Swapping, runs: Runs) -> None:
    net, given = made("bert"), operands(2)
    net.dropout = nn.Dropout(0.5)
    chooser.answers = lambda problem: problem.operation.epilogue.has_residual
    with gemmsmith.patch(net), counted(net) as decided:
        for _ in range(3):
            net(*given)
        assert decided == [1]
        assert runs() == 0
        net.eval()
        net(*given)
        assert runs() == 1


def test_what_torch_forbids_is_decided_anew(engine: Engine, chooser: Swapping, runs: Runs) -> None:
    chooser.answers, chooser.deterministic = (lambda _: True), False
    net, given = NETS["nanogpt"]()
    with torch.no_grad(), gemmsmith.patch(net):
        with deterministic():
            net(*given)
            net(*given)
            assert runs() == 0
        net(*given)
        assert runs() > 0


@pytest.mark.parametrize("kind", ["nanogpt", "torchtitan", "bert", "linear"])
@pytest.mark.parametrize("warm", [0, 2])
def test_a_region_is_recomputed_as_it_was_computed(
    engine: Engine, chooser: Swapping, kind: str, warm: int
) -> None:
    net, given = NETS[kind]()
    expected = torch.autograd.grad(net(*given).float().sum(), given)
    with gemmsmith.patch(net):
        for _ in range(warm):
            checkpoint(net, *given, use_reentrant=False)
        out: torch.Tensor = checkpoint(net, *given, use_reentrant=False)
        swapped(chooser, net)
        found = torch.autograd.grad(out.float().sum(), given)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=3e-2, atol=3e-2)


def test_few_kinds_of_calls_are_remembered(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwards, "MOST_LEFT", 8)
    net = made("nanogpt")
    with torch.no_grad(), gemmsmith.patch(net):
        for rows in range(1, 40):
            net(torch.ones(rows, WIDTH, dtype=BF16))
            assert 0 < len(engine.left) <= 8


def test_no_layer_is_kept_alive(engine: Engine) -> None:
    net, given = NETS["nanogpt"]()
    with gemmsmith.patch(net):
        net(*given)
        net(*given)
    gone = [weakref.ref(module) for module in net.modules()]
    del net
    gc.collect()
    assert [module() for module in gone] == [None] * len(gone)


def test_reports_and_captures_see_every_call(engine: Engine) -> None:
    net, given = NETS["nanogpt"]()
    with torch.no_grad(), gemmsmith.patch(net):
        net(*given)
        net(*given)
        file = io.StringIO()
        with gemmsmith.patch(net, report=True, file=file):
            for _ in range(3):
                net(*given)
        assert file.getvalue().count("\n") > 3
        with gemmsmith.capture() as captured:
            net(*given)
    assert any("bias_gelu" in str(problem) for problem in captured.problems)


def test_layers_with_a_bias_are_patched_where_their_sizes_may_win(
    pack: Path, binding: Dispatch, host: Host, runs: Runs
) -> None:
    host.kind = "cpu"
    net = nn.Sequential(nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)).to(BF16)
    (x,) = operands(1, 8, WIDTH)

    def engine(*weights: tuple[int, int]) -> Engine:
        return Engine(of_types("bf16", weights=weights), Packs(pack), platform=host)

    with installed(engine((INNER, WIDTH))):
        with gemmsmith.patch(net):
            assert [is_patched(layer) for layer in net] == [True, False]
            with installed(engine((INNER, WIDTH), (WIDTH, INNER))):  # others come into use
                assert [is_patched(layer) for layer in net] == [True, True]
                net(x)
                assert runs() == 2
        assert not any(map(is_patched, net))
    with installed(engine((8, 9))), gemmsmith.patch(net):
        assert not any(map(is_patched, net))


FUSED = [kind for kind in WITH_KERNELS if kind != "linear"]


def won(problem: Problem, use: Use = Use.CUTLASS) -> Row:
    return Row(problem=problem, use=use)


def pinned(engine: Engine, *problems: Problem) -> Engine:
    """An engine with winners for these problems alone, which it lists."""
    chooser = of_types()
    chooser.answers = lambda problem: problem in problems
    chooser.snapshot.rows[:] = [won(problem) for problem in problems]  # type: ignore[attr-defined]
    return Engine(chooser, engine._packs, platform=engine.platform)


def step(net: nn.Module, given: list[torch.Tensor]) -> torch.Tensor:
    out: torch.Tensor = net(*given)
    if torch.is_grad_enabled():
        out.float().sum().backward()
    return out


def asked_by(chooser: Swapping, net: nn.Module, given: list[torch.Tensor]) -> set[Problem]:
    """Problems that a layer looks up, but none that the products of its own forward look up."""
    with gemmsmith.patch(net):
        for gradients in (False, True):
            with torch.set_grad_enabled(gradients):
                step(net, given)
    return {
        problem
        for problem in chooser.asked
        if problem.operation.is_grouped or not problem.operation.epilogue.is_torchs
    }


@pytest.mark.parametrize("kind", FUSED)
def test_a_layer_is_patched_where_any_of_its_products_may_win(
    engine: Engine, chooser: Swapping, runs: Runs, kind: str
) -> None:
    """And it runs a winner for as few rows as there are."""
    net, given = NETS[kind]()
    problems = asked_by(chooser, net, given)
    assert problems
    for problem in problems:
        with installed(pinned(engine, problem)), gemmsmith.patch(net):
            assert is_patched(net), problem
            forward: Any = net.__dict__["forward"]
            assert forward._small[2] <= given[0].numel(), problem
            runs()
            for gradients in (False, True):
                with torch.set_grad_enabled(gradients):
                    step(net, given)
            assert runs() > 0, problem


@pytest.mark.filterwarnings("ignore:gemmsmith.patch.. replaces nothing:UserWarning")
@pytest.mark.parametrize("kind", FUSED)
def test_a_layer_that_cannot_win_is_not_patched_until_it_can(
    engine: Engine, chooser: Swapping, runs: Runs, kind: str
) -> None:
    net, given = NETS[kind]()
    problems = asked_by(chooser, net, given)
    others = [
        Problem(m=8, n=8000, k=8, dtype="bf16.then_bias_gelu"),
        Problem(m=6, n=INNER, k=WIDTH, dtype="bf16"),
        Problem(m=6, n=INNER, k=WIDTH, dtype="bf16.then_bias"),
    ]
    with installed(None), gemmsmith.patch(net):
        assert not is_patched(net)
        with installed(pinned(engine, *others)):
            assert not is_patched(net)
            step(net, given)
            runs()
            with installed(pinned(engine, *problems)):
                assert is_patched(net)
                step(net, given)
                assert runs() > 0
    assert not is_patched(net)


@pytest.mark.parametrize("kind", WITH_KERNELS)
def test_a_layer_is_not_patched_where_torch_won(
    engine: Engine, chooser: Swapping, kind: str
) -> None:
    net, given = NETS[kind]()
    asked_by(chooser, net, given)
    by_torch: Any = pinned(engine)
    by_torch._chooser.snapshot.rows[:] = [won(of, Use.CUBLAS) for of in set(chooser.asked)]
    with installed(by_torch), gemmsmith.patch(net):
        assert not is_patched(net)
        assert not by_torch._plans


SIDES = {"smaller": (16, 12), "larger": (48, 32), "both": (16, 12, 48, 32)}


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("dtype", ["bf16.then_bias_gelu", "bf16.then_bias_residual"])
def test_a_layer_between_two_winners_is_patched(engine: Engine, sides: str, dtype: str) -> None:
    """Kernels with an activation are run between two problems that they won."""
    extents = iter(SIDES[sides])
    rows = [Problem(m=4, n=n, k=k, dtype=dtype) for n, k in zip(extents, extents, strict=True)]
    net = made("nanogpt")  # WIDTH to INNER and back
    with installed(pinned(engine, *rows)), gemmsmith.patch(net):
        assert is_patched(net) is (sides == "both" and "gelu" in dtype)


@pytest.mark.parametrize("kind", [kind for kind in FUSED if kind != "experts"])
def test_few_rows_cost_no_look_up(engine: Engine, chooser: Swapping, runs: Runs, kind: str) -> None:
    net, given = NETS[kind]()
    problems = asked_by(chooser, net, given)
    few = [tensor.detach().flatten(0, -2)[:1] for tensor in given]
    with installed(pinned(engine, *problems)), gemmsmith.patch(net), counted(net) as decided:
        runs()
        expected = type(net).forward(net, *few)
        for mode in (torch.no_grad(), torch.enable_grad()):
            with mode:
                assert torch.equal(net(*few), expected)
        assert (decided, runs()) == ([0], 0)
        for mode in (torch.no_grad(), torch.enable_grad()):
            with mode:
                step(net, given)
        assert decided[0] > 0
        assert runs() > 0
        with gemmsmith.capture() as captured:
            net(*few)
        assert any(not problem.operation.epilogue.is_torchs for problem in captured.problems)


def test_few_tokens_of_experts_cost_no_look_up(
    engine: Engine, chooser: Swapping, runs: Runs
) -> None:
    net, given = NETS["experts"]()
    problems = asked_by(chooser, net, given)
    of_more = [
        replace(of, **{of.operation.free_extent: 64 * getattr(of, of.operation.free_extent)})
        for of in problems
    ]
    for winners, wins in ((of_more, False), (problems, True)):
        with installed(pinned(engine, *winners)), gemmsmith.patch(net), counted(net) as decided:
            runs()
            for gradients in (False, True):
                with torch.set_grad_enabled(gradients):
                    step(net, given)
            assert (decided[0] > 0, runs() > 0) == (wins, wins)


@pytest.mark.parametrize("kind", [kind for kind in FUSED if kind != "experts"])
def test_few_rows_cost_no_look_up_until_winners_of_a_service_change(
    engine: Engine, chooser: Swapping, runs: Runs, kind: str
) -> None:
    net, given = NETS[kind]()
    problems = asked_by(chooser, net, given)
    few = [tensor.detach().flatten(0, -2)[:1] for tensor in given]

    def swap(*problems: Problem) -> None:
        chooser.answers = lambda problem: problem in problems
        chooser.snapshot = SimpleNamespace(rows=[won(problem) for problem in problems])

    swap()
    with torch.no_grad(), gemmsmith.patch(net), counted(net) as decided:
        for winners in ((), problems, ()):
            swap(*winners)
            net(*few)  # the first call after a change may decide
            decided[0], _ = 0, runs()
            for _ in range(3):
                net(*few)
            assert (decided, runs()) == ([0], 0)
        swap(*(replace(problem, m=1) for problem in problems))
        for _ in range(3):
            net(*few)
            assert runs() > 0


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("mode", ["torch function", "trace", "vmap"])
def test_programs_that_see_calls_see_no_question_of_ours(
    engine: Engine, chooser: Swapping, mode: str
) -> None:
    net, given = NETS["nanogpt"]()
    few = given[0].detach().flatten(0, -2)[:1]
    seen: list[Any] = []

    class Seeing(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    def looked() -> Any:
        if mode == "trace":
            return str(torch.jit.trace(net, (few,), check_trace=False).inlined_graph)
        if mode == "vmap":
            return torch.vmap(net)(few).tolist()
        seen.clear()
        with Seeing():
            net(few)
        return list(seen)

    with torch.no_grad():
        expected = looked()
        with installed(pinned(engine, *asked_by(chooser, net, given))), gemmsmith.patch(net):
            assert is_patched(net)
            net(few)
            found = looked()
    if mode == "trace":  # names of files and lines differ
        expected, found = (
            re.sub(r"#.*|%[\w.]+|___torch_mangle_\d+\.", "", text) for text in (expected, found)
        )
    assert found == expected


@pytest.mark.parametrize("kind", FUSED)
def test_a_recording_sees_layers_without_winners(
    engine: Engine, chooser: Swapping, kind: str
) -> None:
    net, given = NETS[kind]()
    with gemmsmith.patch(net), gemmsmith.capture() as expected:
        step(net, given)
    with installed(pinned(engine)), gemmsmith.patch(net):
        assert not is_patched(net)
        with gemmsmith.capture() as captured:
            step(net, given)
    assert captured.problems == expected.problems


@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("later", [True, False])
def test_a_region_is_recomputed_with_other_pinned_winners(
    engine: Engine, chooser: Swapping, kind: str, later: bool
) -> None:
    net, given = NETS[kind]()
    inputs = [tensor for tensor in given if tensor.requires_grad]
    none, all_ = pinned(engine), pinned(engine, *asked_by(chooser, net, given))
    expected = torch.autograd.grad(net(*given).float().sum(), inputs)
    first, second = (none, all_) if later else (all_, none)
    with installed(first), gemmsmith.patch(net):
        out: torch.Tensor = checkpoint(net, *given, use_reentrant=False)
        with installed(second):
            found = torch.autograd.grad(out.float().sum(), inputs)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=3e-2, atol=3e-2)


def test_the_binding_is_used_where_a_layers_products_may_win(
    pack: Path, binding: Dispatch, host: Host, runs: Runs, no_other_patch: None
) -> None:
    host.kind = "cpu"
    net, (x,) = nn.Linear(WIDTH, INNER, bias=False).to(BF16), operands()

    def engine(*weights: tuple[int, int]) -> Engine:
        return Engine(of_types("bf16", weights=weights), Packs(pack), platform=host)

    for products in ([(INNER, WIDTH)], [(WIDTH, INNER)], [(9, 9), (INNER, WIDTH)]):
        with installed(engine((9, 9))), gemmsmith.patch(net):
            assert binding._engine is None
            net(x)
            assert runs() == 0
            with installed(engine(*products)):  # others come into use
                assert binding._engine is not None
                net(x)
                assert runs() == 1
        assert binding._engine is None


@pytest.mark.parametrize("dtype", ["bf16.group_rows", "bf16.group_depth", "bf16"])
def test_grouped_products_are_overridden_where_one_may_win(
    pack: Path, binding: Dispatch, host: Host, dtype: str
) -> None:
    """Of any size: a kernel of neighbours may run a size that was not tuned."""
    host.kind = "cpu"
    (net, _), blocks = NETS["experts"](), grouped._overrides.blocks
    weights = frozenset(tuple(weight.shape[1:]) for weight in net.parameters())

    def engine(dtype: str) -> Engine:
        problem = Problem(m=64, n=8, k=8, batch=4, dtype=dtype, layout=Layout(layouts_of(dtype)[0]))
        chooser = of_types()
        chooser.snapshot = SimpleNamespace(rows=[won(problem)])  # type: ignore[attr-defined]
        return Engine(chooser, Packs(pack), platform=host)

    with installed(engine("bf16")), gemmsmith.patch(net):
        assert blocks.only == frozenset()
        with installed(engine(dtype)):  # others come into use
            assert (blocks.only == weights) is (dtype != "bf16")
    assert blocks.only == frozenset()
