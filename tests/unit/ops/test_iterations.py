"""Newton–Schulz iterations in a program's own optimizer, under a patch."""

from __future__ import annotations

import inspect
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn

import gemmsmith
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.models import iterations
from gemmsmith.ops.models.iterations import iteration
from tests.support import muons

BF16 = torch.bfloat16


CURRENT, EARLY = muons.current, muons.early
SIZES = ((32, 48), (48, 32), (16, 16))


@pytest.fixture
def calls(
    engine: Engine, without_binding: None, no_other_patch: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[tuple[Any, ...]]]:
    """The arguments of `newton_schulz` after its matrices."""
    seen: list[tuple[Any, ...]] = []
    own = iterations.newton_schulz

    def noted(matrices: Any, *options: Any) -> list[torch.Tensor]:
        seen.append(options)
        return own(matrices, *options)

    monkeypatch.setattr(iterations, "newton_schulz", noted)
    monkeypatch.setattr(iterations, "LEAST_FLOPS", 0)
    yield seen
    assert (muons.current, muons.early) == (CURRENT, EARLY)


def trained(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> list[nn.Parameter]:
    torch.manual_seed(3)
    params = [nn.Parameter(torch.randn(size).to(dtype)) for size in SIZES]
    optimizer = muons.OwnMuon(params, name, **options)
    for _ in range(3):
        for param in params:
            param.grad = torch.randn(param.shape).to(dtype)
        optimizer.step()
    return params


def close(params: list[nn.Parameter], others: list[nn.Parameter]) -> None:
    for ours, theirs in zip(params, others, strict=True):
        off = (ours.double() - theirs.double()).norm()
        assert off <= 0.02 * (0.1 * 3 * min(theirs.shape) ** 0.5)  # of what they have moved


@pytest.mark.parametrize(
    ("name", "options", "passed"),
    [
        ("current", {}, (5, (3.4445, -4.7750, 2.0315), 1e-7)),
        ("early", {}, (5, (3.0, -3.2, 1.2), 1e-7)),
        ("early", {"eps": 1e-3}, (5, (3.0, -3.2, 1.2), 1e-3)),
    ],
)
def test_an_iteration_of_the_program_runs_ours(
    calls: list[Any], name: str, options: dict[str, Any], passed: tuple[Any, ...]
) -> None:
    theirs = trained(name, **options)
    assert not calls
    with gemmsmith.patch():
        ours = trained(name, **options)
        assert muons.current is not CURRENT
        assert muons.early is not EARLY
    assert calls == [passed] * 9
    close(ours, theirs)


def test_types_are_those_of_the_program(calls: list[Any]) -> None:
    torch.manual_seed(1)
    with gemmsmith.patch(), torch.no_grad():
        trained("current")
        calls.clear()
        for dtype in (torch.float32, torch.float16, BF16):
            g = torch.randn(48, 32).to(dtype)
            assert muons.current(g, 5).dtype is CURRENT(g, 5).dtype is BF16
            assert muons.current(g, steps=5).shape == g.shape
        assert len(calls) == 6
        for dtype in (torch.float32, torch.float16):
            g = torch.randn(32, 48).to(dtype)
            assert muons.early(g).dtype is EARLY(g).dtype is dtype
        assert [steps for steps, *_ in calls[6:]] == [10, 10]


def test_what_it_does_not_suit_is_left_to_the_program(calls: list[Any]) -> None:
    with gemmsmith.patch():
        trained("current")
        calls.clear()
        g = torch.randn(32, 48)
        with torch.no_grad():
            same = g.bfloat16()
            muons.early(same)  # divides it in place
            assert same.norm() < 1.1
            muons.current(torch.randn(2, 8, 8), 5)
            muons.current(torch.randn(0, 8), 5)
            with torch.autocast("cpu", BF16):
                muons.current(g, 5)
            with pytest.raises(TypeError, match="steps"):
                muons.current(g)  # type: ignore[call-arg]
            with pytest.raises(TypeError, match="more"):
                muons.current(g, 5, more=1)  # type: ignore[call-arg]
        muons.current(g.requires_grad_(), 5).sum().backward()  # type: ignore[no-untyped-call]
        assert g.grad is not None
    assert not calls


VARIANTS: dict[str, tuple[bool, tuple[tuple[str, str], ...]]] = {
    "sizes by number": (True, (("size(-2)", "shape[0]"), ("size(-1)", "size(1)"))),
    "as many as two": (True, (("G.ndim >= 2", "G.dim() == 2"),)),
    "of its norm": (True, (("norm(dim=(-2, -1), keepdim=True)", "norm()"),)),
    "any steps": (True, (("steps: int)", "steps: int = 7)"),)),
    "coefficients of each step": (
        False,
        (
            ("    a, b, c = (3.4445, -4.7750, 2.0315)\n", ""),
            ("for _ in range(steps)", "for a, b, c in [(3.0, -3.2, 1.2)] * steps"),
        ),
    ),
    "norms of rows": (False, (("dim=(-2, -1)", "dim=-1"),)),
    "five steps alone": (False, (("assert G.ndim >= 2", "assert steps == 5"),)),
    "eps of the module": (False, (("1e-7", "EPS"),)),
    "without the last turn": (
        False,
        (("        X = X.mT  # noqa: N806\n    return", "        pass\n    return"),),
    ),
}
"""Of today's iteration: whether it is recognized, and what is replaced in its source."""


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(tmp_path: Path, name: str) -> None:
    is_known, replacements = VARIANTS[name]
    source = inspect.getsource(CURRENT)
    for old, new in replacements:
        assert old in source
        source = source.replace(old, new)
    (tmp_path / "program.py").write_text(
        f"import torch\nfrom typing import Any\nEPS = 1e-7\n{source}"
    )
    function = runpy.run_path(str(tmp_path / "program.py"))["current"]
    assert (iteration(function) is not None) is is_known


def test_other_functions_are_not_recognized() -> None:
    def within(g: torch.Tensor, steps: int) -> Any:
        return muons.current(g, steps)

    compiled: Any = torch.compile(muons.current, backend="eager")
    for function in (within, compiled, trained):
        assert type(function) is not FunctionType or iteration(function) is None
    assert iteration(CURRENT)
    assert iteration(EARLY)


def test_small_matrices_run_the_programs_function(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(iterations, "LEAST_FLOPS", 2 * 32 * 32 * 48)
    with gemmsmith.patch():
        trained("current")
    assert len(calls) == 3 * 2  # 32 × 48 and 48 × 32, but not 16 × 16


def test_a_function_that_the_program_replaces_stays(calls: list[Any]) -> None:
    with gemmsmith.patch():
        trained("current")
        calls.clear()
        muons.current = muons.early = other = lambda g, _: g.bfloat16()
        trained("current")
        assert not calls
    assert muons.current is muons.early is other
    muons.current, muons.early = CURRENT, EARLY


def test_patches_are_nested(calls: list[Any]) -> None:
    with gemmsmith.patch():
        with gemmsmith.patch():
            trained("current")
        assert muons.current is not CURRENT
        kept = muons.current
        trained("current")
        assert len(calls) == 18
    with torch.no_grad():
        kept(torch.randn(8, 8), 5)  # the patch has ended
    assert len(calls) == 18


def test_a_compiled_step_is_one_graph(calls: list[Any]) -> None:
    def run() -> torch.Tensor:
        torch.manual_seed(2)
        param = nn.Parameter(torch.randn(16, 24))
        param.grad = torch.randn(16, 24)
        optimizer = muons.OwnMuon([param], "current")
        torch._dynamo.reset()
        torch.compile(optimizer.step, backend="eager", fullgraph=True)()
        return param.detach()

    theirs = run()
    with gemmsmith.patch():
        assert torch.equal(run(), theirs)
        trained("current")
        calls.clear()
        assert torch.equal(run(), theirs)
    assert not calls
