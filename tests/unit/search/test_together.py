"""Several problems tuned together, with compilers that run beside the measuring."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.config import Use
from gemmsmith.core.problem import Problem
from gemmsmith.core.tuning import Effort
from tests.support import fake_nvcc
from tests.support.recordings import best_of, record, some_candidates
from tests.support.replacing import replace
from tests.unit.search.test_run import Compiling, gone
from tuner.compile import ArtifactStore, Builder
from tuner.devices import open_device
from tuner.devices.base import Device
from tuner.errors import NoLegalCandidate, NotRecorded
from tuner.search.budget import BUDGETS
from tuner.search.packs import Compiling as InBackground
from tuner.search.packs import in_batches
from tuner.search.run import TuningRun
from tuner.search.together import Member, Together
from tuner.store import Store

SMALL, LARGE = Problem(m=16, n=4096, k=4096), Problem(m=4096, n=4096, k=4096, dtype="fp16")
UNKNOWN = Problem(m=5, n=5, k=5)


@pytest.fixture
def store(sqlite_url: str) -> Iterator[Store]:
    with Store.open(sqlite_url) as opened:
        yield opened


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    record(tmp_path / "sweeps", SMALL, LARGE)
    with open_device("replay:h200", sweeps=tmp_path / "sweeps") as opened:
        yield Compiling(opened)  # type: ignore[misc]


def builder_in(folder: Path, **nvcc: object) -> Builder:
    toolchain = fake_nvcc.toolchain(folder / "nvcc", **nvcc)  # type: ignore[arg-type]
    return Builder(ArtifactStore(folder / "packs"), toolchain, workers=4)


def members(device: Device, store: Store, builder: Builder, *problems: Problem) -> list[Member]:
    return [
        Member(run=TuningRun(problem=problem, device=device, store=store, builder=builder))
        for problem in problems
    ]


def outcomes(
    chosen: list[Member],
    builder: Builder,
    over: Callable[[], bool] = lambda: False,
    waited: Callable[[int, int], None] = lambda *_: None,
) -> list[Problem]:
    """The problems in the order of their outcomes."""
    together = Together(chosen, builder=builder, over=over, on_begin=lambda _: None, on_wait=waited)
    return [member.run.problem for member in together.outcomes()]


def build(builder: Builder, problem: Problem, *, but_best: bool) -> None:
    kernels = {c.kernel for c in some_candidates(problem)}
    if but_best:
        kernels -= {best_of(problem).kernel}
    assert all(built.pack for built in builder.build(sorted(kernels, key=str)))


def test_what_is_compiled_answers_while_the_compilers_work_for_others(
    device: Device, store: Store, tmp_path: Path
) -> None:
    builder = builder_in(tmp_path, each_s=0.5)
    build(builder, LARGE, but_best=True)
    small, large = chosen = members(device, store, builder, SMALL, LARGE)
    assert outcomes(chosen, builder)[:2] == [LARGE, SMALL]
    assert small.winner is not None
    assert small.winner.candidate == best_of(SMALL)
    assert large.winner is not None
    assert large.answered is not None
    assert large.answered <= large.seconds
    assert store.winner(SMALL, device.model.slug) == small.winner


def test_an_error_of_one_problem_is_its_own(device: Device, store: Store, tmp_path: Path) -> None:
    builder = builder_in(tmp_path)
    unknown, small = chosen = members(device, store, builder, UNKNOWN, SMALL)
    assert set(outcomes(chosen, builder)) == {UNKNOWN, SMALL}
    assert isinstance(unknown.error, NotRecorded)
    assert unknown.winner is None
    assert small.error is None
    assert small.winner is not None


def test_a_kernel_that_does_not_compile_is_a_failed_trial(
    device: Device, store: Store, tmp_path: Path
) -> None:
    best = best_of(SMALL)
    builder = builder_in(tmp_path, bad=[best.kernel.name])
    (small,) = chosen = members(device, store, builder, SMALL)
    outcomes(chosen, builder)
    failed = [s.trial.candidate for s in store.trials(problem=SMALL) if s.trial.failure]
    assert best in failed
    assert small.winner is not None
    assert small.winner.candidate != best


def test_where_no_kernel_compiles_the_error_says_so(
    device: Device, store: Store, tmp_path: Path
) -> None:
    every = [candidate.kernel.name for candidate in some_candidates(SMALL)]
    builder = builder_in(tmp_path, bad=every)
    (small,) = chosen = members(device, store, builder, SMALL)
    outcomes(chosen, builder)
    assert isinstance(small.error, NoLegalCandidate)
    assert store.winners() == []


def test_the_end_kills_the_compilers_and_keeps_answers(
    device: Device, store: Store, tmp_path: Path
) -> None:
    build(builder_in(tmp_path), LARGE, but_best=True)
    slow = [candidate.kernel.name for candidate in some_candidates(SMALL)]
    builder = builder_in(tmp_path, slow=[*slow, best_of(LARGE).kernel.name])
    small, large = chosen = members(device, store, builder, SMALL, LARGE)

    def over() -> bool:
        return large.winner is not None and fake_nvcc.busy(tmp_path / "nvcc")

    assert outcomes(chosen, builder, over=over) == [LARGE]
    assert over(), (small.wishes, small.built, large.wishes, fake_nvcc.calls(tmp_path / "nvcc"))
    assert small.winner is None
    assert small.error is None
    assert gone(fake_nvcc.helper(tmp_path / "nvcc"))
    assert not [thread for thread in threading.enumerate() if "compile" in thread.name]


def test_what_is_saved_counts_calls_and_only_winners_that_run(
    device: Device, store: Store, tmp_path: Path
) -> None:
    builder = builder_in(tmp_path)
    chosen = members(device, store, builder, SMALL, LARGE)
    chosen[0].calls, chosen[1].calls = 10.0, 1.0
    together = Together(
        chosen, builder=builder, over=lambda: False, on_begin=str, on_wait=lambda *_: None
    )
    assert together.saved_us == 0
    assert [member.winner is not None for member in together.outcomes()]
    gains = [m.winner.saving_us for m in chosen if m.winner is not None and m.winner.runs]
    assert gains[0] == pytest.approx(4.0)  # of 20 µs
    assert together.saved_us == pytest.approx(10 * 4.0 + sum(filter(None, gains[1:])))
    chosen[0].winner = replace(chosen[0].winner, use=Use.CUBLAS)  # type: ignore[type-var]
    assert together.saved_us == pytest.approx(sum(filter(None, gains[1:])))


def test_a_build_leaves_another_one_in_the_background_alone(tmp_path: Path) -> None:
    slow, quick = (candidate.kernel for candidate in some_candidates(SMALL)[:2])
    builder = builder_in(tmp_path, slow=[slow.name])
    background = InBackground(builder, [slow])
    batches = in_batches(builder, [quick], lambda: False)
    assert [built.kernel for batch in batches for built in batch] == [quick]
    assert background.ready(lambda: False, wait=False) == []
    assert not background.finished
    background.close()
    assert not [thread for thread in threading.enumerate() if "compile" in thread.name]
    assert builder.has(quick)
    assert not builder.has(slow)


def test_all_have_an_answer_before_any_is_measured_in_depth(store: Store, tmp_path: Path) -> None:
    def many(problem: Problem) -> list[Candidate]:
        return some_candidates(problem, 40)

    builder = builder_in(tmp_path)
    kernels = [c.kernel for problem in (SMALL, LARGE) for c in many(problem)]
    assert all(built.pack for built in builder.build(kernels))
    record(tmp_path / "sweeps", SMALL, LARGE, choose=many)
    with open_device("replay:h200", sweeps=tmp_path / "sweeps") as opened:
        device: Device = Compiling(opened)  # type: ignore[assignment]
        small, large = chosen = members(device, store, builder, SMALL, LARGE)
        quick = BUDGETS[Effort.QUICK].trials
        depths: list[list[bool]] = []

        def over() -> bool:
            depths.append([len(member.run.trials) > quick for member in chosen])
            return False

        assert outcomes(chosen, builder, over=over)[:2] == [SMALL, LARGE]
    assert small.winner is not None
    assert large.winner is not None
    at_the_end = [len(member.run.trials) > quick for member in chosen]
    assert at_the_end == [True, True]
    assert [False, False] in depths
    assert small.winner.candidate == best_of(SMALL)
