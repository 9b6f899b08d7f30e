"""A library's own algorithms in a tuning run: asked for, screened, and promoted like any other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from gemmsmith.answers.answer import Conditions
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.config import Use
from gemmsmith.core.kernel import AnyKernel, CublasLtKernel
from gemmsmith.core.launch import Algorithm, Launch
from gemmsmith.core.problem import Problem
from gemmsmith.core.tuning import Effort
from tests.support.candidates import EXACT
from tests.support.replacing import replace
from tests.support.serving import H200, winner
from tuner.backends.cublaslt.algorithms import kernel_for
from tuner.compile import Builder, Built
from tuner.devices.base import Contender, Device
from tuner.errors import NoLegalCandidate
from tuner.measure.policy import Policy
from tuner.measure.statistics import summarize
from tuner.search.budget import BUDGETS
from tuner.search.run import TuningRun
from tuner.store import Store
from tuner.trial import Failure, FailureKind, Finals, Phase, Trial, Winner

PROBLEM = Problem(m=512, n=1024, k=2048)
KERNEL = kernel_for(PROBLEM, "sm90")
DEFAULT_US = 20.0
FOREIGN = Failure(kind=FailureKind.REFUSED, message="of another version of cuBLASLt")


def algorithm(number: int, version: int = 130101) -> Candidate:
    """An algorithm of the library; how long it takes is `Gpu.time`'s business."""
    assert KERNEL is not None
    words = (number, *[0] * 7)
    return Candidate(kernel=KERNEL, launch=Launch(algorithm=Algorithm.of(version, words)))


class Gpu:
    """A GPU whose library has algorithms 1 … 200; the nearer to 77, the faster."""

    name = "cuda:0"
    model = H200
    replayed = False
    needs_packs = True
    environment = replace(winner(PROBLEM).environment, cublas="13.1.1")

    def __init__(self) -> None:
        self.asked: list[tuple[int | None, int]] = []
        self.screened: list[int] = []

    @staticmethod
    def number(candidate: Candidate) -> int:
        assert isinstance(candidate.launch.algorithm, Algorithm)
        return candidate.launch.algorithm.words[0]

    @staticmethod
    def is_foreign(candidate: Candidate) -> bool:
        algorithm = candidate.launch.algorithm
        return isinstance(algorithm, Algorithm) and algorithm.library != 130101

    def time(self, candidate: Candidate) -> float:
        if not isinstance(candidate.kernel, CublasLtKernel):
            return 40.0
        return 10.0 + abs(self.number(candidate) - 77) / 10

    def recorded(self, problem: Problem) -> None:
        return None

    def baseline_kernels(self, problem: Problem) -> tuple[str, ...]:
        return ()

    def proposals(
        self, problem: Problem, library: Contender, *, start: Algorithm | None, most: int
    ) -> list[Candidate]:
        assert library.candidate.kernel == KERNEL
        begin = None if start is None else start.words[0]
        if start is not None and start.library != 130101:  # the same settings, if it takes them
            return [algorithm(start.words[0])] if start.words[0] <= 200 else []
        self.asked.append((begin, most))
        if begin is None:
            return [algorithm(number) for number in (5, 20, 40)][:most]
        near = sorted(range(1, 201), key=lambda number: abs(number - begin))[1:]
        return [algorithm(number) for number in near][:most]

    def screen(
        self, problem: Problem, contenders: Sequence[Contender], policy: Policy
    ) -> Iterator[Trial]:
        for contender in contenders:
            candidate = contender.candidate
            assert contender.pack is not None
            if isinstance(candidate.kernel, CublasLtKernel):
                self.screened.append(self.number(candidate))
            samples = (self.time(candidate),) * 3
            yield Trial(
                problem=problem,
                candidate=candidate,
                device=self.model,
                environment=self.environment,
                phase=Phase.SCREEN,
                statistics=summarize(samples),
                samples_us=samples,
                correctness=EXACT,
            )

    def finals(self, problem: Problem, contenders: Sequence[Contender], policy: Policy) -> Finals:
        everyone = [contender.candidate for contender in contenders]
        candidates = tuple(each for each in everyone if not self.is_foreign(each))
        return Finals(
            failures=tuple((each, FOREIGN) for each in everyone if self.is_foreign(each)),
            problem=problem,
            candidates=candidates,
            samples_us=tuple((self.time(each),) * 9 for each in candidates),
            baseline_us=(DEFAULT_US,) * 9,
            correctness=(EXACT,) * len(candidates),
            workspace_bytes=(0,) * len(candidates),
            conditions=Conditions(sm_clock_mhz=1980, power_w=300, temperature_c=40),
        )


class Packs:
    """A builder that has the library's pack, and nothing else."""

    def __init__(self) -> None:
        self.store = SimpleNamespace(get=lambda *_, **__: object())

    def has(self, kernel: AnyKernel) -> bool:
        return isinstance(kernel, CublasLtKernel)

    def build(self, kernels: Sequence[AnyKernel]) -> Iterator[Built]:
        pack = SimpleNamespace(hash="a" * 64, path=Path("pack.so"))
        for kernel in kernels:
            yield Built(kernel=kernel, pack=pack, cached=True)  # type: ignore[arg-type]


@pytest.fixture
def store(sqlite_url: str) -> Iterator[Store]:
    with Store.open(sqlite_url) as opened:
        yield opened


def run(gpu: Gpu, store: Store, problem: Problem = PROBLEM, **options: object) -> Winner:
    device: Device = gpu  # type: ignore[assignment]
    builder: Builder = Packs()  # type: ignore[assignment]
    chosen = {"compiled_only": True, **options}
    return TuningRun(problem=problem, device=device, store=store, builder=builder, **chosen).tune()  # type: ignore[arg-type]


def test_the_library_is_asked_and_followed_where_it_gets_faster(store: Store) -> None:
    gpu = Gpu()
    found = run(gpu, store)
    assert found.use is Use.CUBLASLT
    assert found.candidate == algorithm(min(gpu.screened, key=lambda number: abs(number - 77)))
    assert gpu.asked[0] == (None, BUDGETS[Effort.DEFAULT].library)
    starts = [begin for begin, _ in gpu.asked[1:]]
    assert starts[0] == 40  # the fastest of its own list
    assert starts == sorted(set(starts))  # each round begins at a faster one
    assert len(gpu.screened) == len(set(gpu.screened))  # none twice
    assert len(gpu.screened) <= 3 + BUDGETS[Effort.DEFAULT].variants
    assert found.pack == "a" * 64
    kept = [stored.trial.candidate for stored in store.trials(phase=Phase.SCREEN)]
    assert {Gpu.number(candidate) for candidate in kept} == set(gpu.screened)
    assert store.winner(PROBLEM, H200.slug) == found


def test_a_round_that_brings_nothing_is_the_last(store: Store) -> None:
    class Flat(Gpu):
        def time(self, candidate: Candidate) -> float:
            return 10.0

    gpu = Flat()
    run(gpu, store)
    assert len(gpu.asked) == 2
    assert len(gpu.screened) == 3 + BUDGETS[Effort.DEFAULT].batch


def test_a_quick_run_takes_the_library_s_own_list_alone(store: Store) -> None:
    gpu = Gpu()
    assert run(gpu, store, effort=Effort.QUICK).candidate == algorithm(40)
    assert gpu.screened == [5, 20, 40]


def test_measuring_again_knows_the_algorithms_that_were_measured(store: Store) -> None:
    first = run(Gpu(), store)
    again = Gpu()
    assert run(again, store, effort=Effort.RECHECK).candidate == first.candidate
    assert again.asked == []  # nothing was searched for


def test_measuring_again_makes_algorithms_of_another_library_anew(store: Store) -> None:
    old = algorithm(77, 130100)
    store.promote(replace(winner(PROBLEM, use=Use.CUBLASLT), candidate=old))
    gpu = Gpu()
    found = run(gpu, store, effort=Effort.RECHECK)
    assert found.candidate == algorithm(77)
    assert found.environment == gpu.environment
    assert gpu.asked == []  # nothing was searched for


def test_a_run_measures_the_algorithm_that_is_served(store: Store) -> None:
    old = algorithm(77, 130100)
    store.promote(replace(winner(PROBLEM, use=Use.CUBLASLT), candidate=old))
    gpu = Gpu()
    assert run(gpu, store, effort=Effort.QUICK).candidate == algorithm(77)
    assert gpu.screened == [77, 5, 20, 40]


def test_a_library_that_does_not_take_the_settings_is_searched(store: Store) -> None:
    old = algorithm(999, 130100)
    store.promote(replace(winner(PROBLEM, use=Use.CUBLASLT), candidate=old))
    gpu = Gpu()
    assert run(gpu, store, effort=Effort.RECHECK).candidate != old
    assert gpu.asked != []
    assert 999 not in gpu.screened


def test_where_nothing_is_compiled_and_there_is_no_library_there_is_no_candidate(
    store: Store,
) -> None:
    unaligned = replace(PROBLEM, k=2049)
    assert kernel_for(unaligned, "sm90") is None
    with pytest.raises(NoLegalCandidate, match="compile"):
        run(Gpu(), store, unaligned)
