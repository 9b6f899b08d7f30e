"""The tuning run on a small recording: what it measures, keeps, resumes and promotes."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.config import Use
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.problem import Problem
from gemmsmith.core.tuning import Effort
from gemmsmith.errors import Untrusted
from gemmsmith.signing import Signer, Trusted
from tests.support import fake_nvcc
from tests.support.recordings import best_of, record, some_candidates
from tests.support.replacing import replace
from tests.support.serving import winner as winner_of
from tuner.compile import ArtifactStore, Builder
from tuner.devices import open_device
from tuner.devices.base import Contender, Device
from tuner.devices.recording import Sweep
from tuner.devices.replay import ReplayDevice
from tuner.errors import JobAborted, NoLegalCandidate, NotRecorded
from tuner.measure.policy import Policy
from tuner.search.budget import BUDGETS
from tuner.search.finals import hold_finals
from tuner.search.progress import Progress, Step
from tuner.search.run import TuningRun
from tuner.search.together import Member
from tuner.store import Store
from tuner.store.statement import is_believed, is_intact
from tuner.trial import Failure, FailureKind, Finals, Phase, Trial

PROBLEM = Problem(m=256, n=4096, k=4096)


@pytest.fixture
def store(sqlite_url: str) -> Iterator[Store]:
    with Store.open(sqlite_url) as opened:
        yield opened


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    record(tmp_path / "sweeps", PROBLEM)
    with open_device("replay:h200", sweeps=tmp_path / "sweeps") as opened:
        yield opened


def run(device: Device, store: Store, **options: object) -> object:
    chosen = {"builder": None, **options}
    return TuningRun(problem=PROBLEM, device=device, store=store, **chosen).tune()  # type: ignore[arg-type]


def test_the_recorded_optimum_is_promoted_and_every_trial_is_kept(
    device: Device, store: Store
) -> None:
    said: list[Progress] = []
    winner = TuningRun(
        problem=PROBLEM,
        device=device,
        store=store,
        builder=None,
        on_event=said.append,
    ).tune()
    assert winner.candidate == best_of(PROBLEM)
    assert winner.use is Use.CUTLASS
    assert winner.replayed
    assert winner.revision == 1
    assert store.winner(PROBLEM, device.model.slug) == winner
    trials = [stored.trial for stored in store.trials(phase=Phase.SCREEN)]
    assert {trial.candidate.key for trial in trials} == {
        candidate.key for candidate in some_candidates(PROBLEM)
    }
    failed = [trial.failure.kind for trial in trials if trial.failure]
    assert failed == [FailureKind.REFUSED]
    steps = list(dict.fromkeys(progress.phase for progress in said))
    assert steps == [Step.ENUMERATE, Step.SCREEN, Step.FINALS, Step.PROMOTE]
    assert winner.statistics is not None
    assert (said[-1].best, said[-1].best_us) == (best_of(PROBLEM).key, winner.statistics.median_us)


def test_what_is_measured_is_signed_with_the_pack_that_ran(
    device: Device, store: Store, tmp_path: Path
) -> None:
    store.signer = Signer.create(tmp_path / "signing.key")
    run(device, store)
    winner = store.winner(PROBLEM, device.model.slug)
    assert winner is not None
    assert is_intact(winner)
    assert is_believed(winner, Trusted([store.signer.public]))
    assert winner.statistics is not None
    faster = replace(winner, statistics=replace(winner.statistics, median_us=1.0))
    with pytest.raises(Untrusted, match="altered"):
        is_believed(faster, Trusted([store.signer.public]))


def test_the_same_measurements_give_the_same_winner(device: Device, store: Store) -> None:
    first = run(device, store)
    assert run(device, store) == first  # nothing new: not even a new revision


class FasterDefault:
    """A device whose default is three times as fast in the finals as the recording says."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def __getattr__(self, name: str) -> object:
        return getattr(self._device, name)

    def finals(self, problem: Problem, contenders: Sequence[Contender], policy: Policy) -> Finals:
        held = self._device.finals(problem, contenders, policy)
        return replace(held, baseline_us=tuple(us / 3 for us in held.baseline_us))


def test_what_loses_the_finals_is_best_no_more(device: Device, store: Store) -> None:
    said: list[Progress] = []
    winner = run(FasterDefault(device), store, on_event=said.append)  # type: ignore[arg-type]
    assert winner.use is Use.CUBLAS  # type: ignore[attr-defined]
    ahead = {progress.phase: progress.best for progress in said}
    assert ahead[Step.FINALS] == best_of(PROBLEM).key
    assert ahead[Step.PROMOTE] == "cuBLAS"
    assert said[-1].best_us == winner.baseline.median_us  # type: ignore[attr-defined]
    assert said[-1].message.startswith("the default stays, before ")


class Counting:
    """A device that counts what it is asked to screen."""

    def __init__(self, inner: Device) -> None:
        self._inner = inner
        self.screened: list[str] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def reached(self, count: int) -> Callable[[], bool]:
        return lambda: len(self.screened) >= count

    def screen(
        self, problem: Problem, contenders: Sequence[Contender], policy: Policy
    ) -> Iterator[Trial]:
        for trial in self._inner.screen(problem, contenders, policy):
            self.screened.append(trial.candidate.key)
            yield trial


def test_a_stopped_run_continues_from_its_trials(device: Device, store: Store) -> None:
    counting = Counting(device)
    with pytest.raises(JobAborted):
        run(counting, store, job="j", should_stop=lambda: len(counting.screened) == 3)  # type: ignore[arg-type]
    assert len(store.trials(job="j")) == 3
    run(counting, store, job="j")  # type: ignore[arg-type]
    assert len(counting.screened) == len(set(counting.screened)) == len(some_candidates(PROBLEM))


@pytest.mark.parametrize("effort", [Effort.QUICK, Effort.DEFAULT])
def test_no_more_is_screened_than_the_budget_has(
    effort: Effort, device: Device, store: Store
) -> None:
    counting = Counting(device)
    run(counting, store, effort=effort)  # type: ignore[arg-type]
    assert 0 < len(counting.screened) <= BUDGETS[effort].trials
    assert len({key.split("@")[0] for key in counting.screened}) <= BUDGETS[effort].kernels


def test_a_run_stopped_at_every_trial_goes_on_as_if_it_had_not_been(
    device: Device, store: Store
) -> None:
    few = replace(BUDGETS[Effort.DEFAULT], waves=(3, 2, 1), trials=7, seeds=0)
    whole, parts = Counting(device), Counting(device)
    run(whole, store, budget=few, job="whole")  # type: ignore[arg-type]
    assert len(whole.screened) > 3
    for stop in range(1, len(whole.screened)):
        with pytest.raises(JobAborted):
            run(parts, store, budget=few, job="parts", should_stop=parts.reached(stop))  # type: ignore[arg-type]
    run(parts, store, budget=few, job="parts")  # type: ignore[arg-type]
    assert parts.screened == whole.screened


def test_the_recording_decides_by_its_finals_though_not_all_were_in_them(
    store: Store, tmp_path: Path
) -> None:
    """The last by screening has no further rounds: it leaves, and the others' decide."""
    contenders = [Contender(candidate=c) for c in some_candidates(PROBLEM)[1:4]]
    last = contenders[-1].candidate
    record(tmp_path / "sweeps", PROBLEM)
    sweep = Sweep.load(tmp_path / "sweeps" / "h200.jsonl.zst")
    recorded = sweep.problems[PROBLEM]
    sweep.problems[PROBLEM] = replace(
        recorded,
        trials=tuple(
            replace(trial, further_us=()) if trial.candidate == last else trial
            for trial in recorded.trials
        ),
    )
    device = ReplayDevice("replay", [sweep])
    finals = hold_finals(device, PROBLEM, contenders, Policy(final_rounds=20))
    assert finals.candidates == tuple(c.candidate for c in contenders[:-1])
    assert {len(samples) for samples in finals.samples_us} == {25}
    everyone = hold_finals(device, PROBLEM, contenders, Policy(final_rounds=7))
    assert len(everyone.candidates) == 3


def test_a_problem_that_was_not_recorded_is_an_error(device: Device, store: Store) -> None:
    with pytest.raises(NotRecorded, match="256×4096×4096"):
        TuningRun(
            problem=Problem(m=5, n=5, k=5),
            device=device,
            store=store,
            builder=None,
        ).tune()
    assert store.winners() == []


class Profiled(Counting):
    """A device that knows what cuBLAS runs."""

    def __init__(self, inner: Device, *names: str) -> None:
        super().__init__(inner)
        self._names = names

    def baseline_kernels(self, problem: Problem) -> tuple[str, ...]:
        return self._names


def test_what_cublas_runs_is_kept_with_the_winner(device: Device, store: Store) -> None:
    assert run(device, store).baseline_kernels == ()  # type: ignore[attr-defined]
    names = ("Memset (Device)", "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN", "an unknown kernel")
    winner = run(Profiled(device, *names), store)
    assert winner.baseline_kernels == names  # type: ignore[attr-defined]
    assert store.winner(PROBLEM, device.model.slug) == winner


def test_kernels_like_those_of_cublas_follow_the_near_winners(device: Device, store: Store) -> None:
    candidates = some_candidates(PROBLEM)
    tiles = {c.kernel.name: c.kernel for c in candidates}
    favourite, _, _, near, _, like, *_ = tiles
    (m, n, k), (cluster_m, cluster_n) = tiles[like].tile, tiles[like].cluster
    if not tiles[like].swapped:
        m, n, cluster_m, cluster_n = n, m, cluster_n, cluster_m
    name = f"nvjet_tst_{m}x{n}_{k}x4_{cluster_m}x{cluster_n}_v_bz_TNN"
    few = replace(BUDGETS[Effort.QUICK], waves=(4,), seeds=1, hints=1)

    def order(profiled: Profiled) -> list[str]:
        with pytest.raises(JobAborted):  # or its winner would lead the next run
            run(
                profiled,
                store,
                ranker=lambda _, ranked, __: [float(c.kernel.name != favourite) for c in ranked],
                budget=few,
                should_stop=lambda: len(profiled.screened) == 3,
            )
        return [key.split("@")[0] for key in profiled.screened]

    assert order(Profiled(device))[0] == favourite
    assert order(Profiled(device, "unheard of"))[0] == favourite
    assert order(Profiled(device, name))[:2] == [like, favourite]
    store.promote(replace(winner_of(replace(PROBLEM, m=128)), candidate=candidates[3]))
    assert order(Profiled(device, name))[:3] == [near, like, favourite]


class Compiling(Counting):
    """A device that wants its kernels compiled, and then looks nothing up in their packs."""

    needs_packs = True


def slow_builder(folder: Path) -> Builder:
    """A builder of which every unit but that of the best kernel takes five minutes."""
    best = best_of(PROBLEM).kernel.name
    slow = [c.kernel.name for c in some_candidates(PROBLEM) if c.kernel.name != best]
    toolchain = fake_nvcc.toolchain(folder / "nvcc", slow=slow)
    return Builder(ArtifactStore(folder / "packs"), toolchain, workers=len(slow) + 1)


def gone(pid: int, patience_s: float = 5.0) -> bool:
    """Whether the process has ended, a moment after it was killed: a busy machine takes one."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True
        if stat.rsplit(")", 1)[1].split()[0] == "Z":
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)


def test_kernels_are_measured_while_others_compile_and_stopping_kills_the_compilers(
    device: Device, store: Store, tmp_path: Path
) -> None:
    compiling = Compiling(device)
    began = time.monotonic()
    with pytest.raises(JobAborted):
        run(
            compiling,
            store,
            builder=slow_builder(tmp_path),
            should_stop=lambda: bool(compiling.screened) and fake_nvcc.busy(tmp_path / "nvcc"),
        )
    assert compiling.screened == [best_of(PROBLEM).key]
    assert time.monotonic() - began < 30
    assert gone(fake_nvcc.helper(tmp_path / "nvcc"))
    assert not [t for t in threading.enumerate() if "compile" in t.name]


def test_a_run_is_stopped_while_it_compiles(device: Device, store: Store, tmp_path: Path) -> None:
    everything = [c.kernel.name for c in some_candidates(PROBLEM)]
    toolchain = fake_nvcc.toolchain(tmp_path / "nvcc", slow=everything)
    builder = Builder(ArtifactStore(tmp_path / "packs"), toolchain, workers=2)
    with pytest.raises(JobAborted, match="while compiling"):
        run(
            Compiling(device),
            store,
            builder=builder,
            should_stop=lambda: fake_nvcc.busy(tmp_path / "nvcc"),
        )
    assert gone(fake_nvcc.helper(tmp_path / "nvcc"))
    assert not [t for t in threading.enumerate() if "compile" in t.name]


class Spoiling(Compiling):
    """A device on which packs come to harm just before their turn; `harm` does it, `times`."""

    def __init__(self, inner: Device, harm: Callable[[Path], None], times: int) -> None:
        super().__init__(inner)
        self._harm = harm
        self._left = times

    def screen(
        self, problem: Problem, contenders: Sequence[Contender], policy: Policy
    ) -> Iterator[Trial]:
        for contender in contenders:
            assert contender.pack is not None
            if self._left and contender.candidate == best_of(PROBLEM):
                self._left -= 1
                self._harm(contender.pack)
            for trial in super().screen(problem, [contender], policy):
                if contender.pack.exists() and sha256(contender.pack) == contender.pack.stem:
                    yield trial
                else:
                    failure = Failure(kind=FailureKind.REFUSED, message="not whole")
                    yield replace(trial, statistics=None, samples_us=(), failure=failure)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def flip(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize("harm", [flip, Path.unlink, lambda path: os.truncate(path, 100)])
def test_a_pack_damaged_after_it_was_built_is_built_again(
    device: Device, store: Store, tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    packs = ArtifactStore(tmp_path / "packs")
    builder = Builder(packs, fake_nvcc.toolchain(tmp_path / "nvcc"))
    winner = run(Spoiling(device, harm, 1), store, builder=builder)
    assert winner.candidate == best_of(PROBLEM)  # type: ignore[attr-defined]
    assert packs.get(winner.pack, afresh=True) is not None  # type: ignore[attr-defined]
    kinds = [stored.trial.failure.kind for stored in store.trials() if stored.trial.failure]
    assert len(kinds) == 1, "the one that was recorded as failed, and nobody for its pack"


def test_a_candidate_whose_pack_is_damaged_again_and_again_has_failed(
    device: Device, store: Store, tmp_path: Path
) -> None:
    builder = Builder(ArtifactStore(tmp_path / "packs"), fake_nvcc.toolchain(tmp_path / "nvcc"))
    spoiling = Spoiling(device, flip, 10**6)
    winner = run(spoiling, store, builder=builder)
    assert winner.candidate != best_of(PROBLEM)  # type: ignore[attr-defined]
    assert spoiling.screened.count(best_of(PROBLEM).key) == 2


def expecting(problem: Problem, candidates: Sequence[Candidate], _: DeviceModel) -> list[float]:
    """A ranker that expects the slowest recorded kernels first, and the best one before all."""
    best = best_of(problem).kernel
    return [1.0 if candidate.kernel == best else 10.0 for candidate in candidates]


def partly_built(folder: Path) -> Builder:
    """A builder that has every kernel but the best one."""
    builder = Builder(ArtifactStore(folder / "packs"), fake_nvcc.toolchain(folder / "nvcc"))
    kernels = {c.kernel for c in some_candidates(PROBLEM)} - {best_of(PROBLEM).kernel}
    assert all(built.failure is None for built in builder.build(sorted(kernels, key=str)))
    return builder


FEW = replace(BUDGETS[Effort.DEFAULT], waves=(3,), further=2, seeds=0, hints=0)


def test_what_is_built_answers_first_and_a_second_go_finds_what_is_not(
    device: Device, store: Store, tmp_path: Path
) -> None:
    compiling, builder = Compiling(device), partly_built(tmp_path)
    best = best_of(PROBLEM)
    winner = run(compiling, store, builder=builder, ranker=expecting, budget=FEW)
    assert winner.candidate == best  # type: ignore[attr-defined]
    assert winner.revision == 2  # type: ignore[attr-defined]
    assert compiling.screened.index(best.key) == len(compiling.screened) - 1
    assert builder.has(best.kernel)


def test_few_compiled_kernels_answer_before_others_are_compiled(
    device: Device, store: Store, tmp_path: Path
) -> None:
    builder = partly_built(tmp_path)
    budget = replace(FEW, waves=(100,))  # more than are compiled
    first = TuningRun(
        problem=PROBLEM, device=Compiling(device), store=store, builder=builder, budget=budget
    ).first()
    assert first is not None
    assert not builder.has(best_of(PROBLEM).kernel)
    winner = run(Compiling(device), store, builder=builder, budget=budget)
    assert winner.candidate == best_of(PROBLEM)  # type: ignore[attr-defined]


def test_where_nothing_is_compiled_there_is_no_first_answer(
    device: Device, store: Store, tmp_path: Path
) -> None:
    builder = Builder(ArtifactStore(tmp_path / "packs"), fake_nvcc.toolchain(tmp_path / "nvcc"))
    tuning = TuningRun(problem=PROBLEM, device=Compiling(device), store=store, builder=builder)
    assert Member(run=tuning).lacks_kernels()
    assert tuning.first() is None
    assert store.winners() == []
    assert tuning.tune().candidate == best_of(PROBLEM)
    assert not Member(run=tuning).lacks_kernels()


class Finalists(Compiling):
    """A device that keeps who was in the finals."""

    def __init__(self, inner: Device) -> None:
        super().__init__(inner)
        self.finalists: list[Candidate] = []

    def finals(self, problem: Problem, contenders: Sequence[Contender], policy: Policy) -> Finals:
        self.finalists = [contender.candidate for contender in contenders]
        return self._inner.finals(problem, contenders, policy)


def test_a_winner_stays_in_the_finals_of_what_is_compiled_later(
    device: Device, store: Store, tmp_path: Path
) -> None:
    """Even if screening puts it behind: only finals compare."""
    builder, finals = partly_built(tmp_path), Finalists(device)
    tuning = TuningRun(
        problem=PROBLEM,
        device=finals,
        store=store,
        builder=builder,
        ranker=expecting,
        budget=replace(FEW, finalists=1),
    )
    first = tuning.first()
    assert first is not None
    assert finals.finalists == [first.candidate]
    tuning.again(list(builder.build([best_of(PROBLEM).kernel])))
    assert finals.finalists == [first.candidate, best_of(PROBLEM)]


def test_a_run_that_died_while_it_compiled_measures_what_was_compiled_since(
    device: Device, store: Store, tmp_path: Path
) -> None:
    builder = partly_built(tmp_path)
    options = {"builder": builder, "ranker": expecting, "budget": FEW, "job": "j"}
    died = TuningRun(problem=PROBLEM, device=Compiling(device), store=store, **options)  # type: ignore[arg-type]
    assert died.first() is not None
    assert len(list(builder.build([best_of(PROBLEM).kernel]))) == 1
    winner = run(Compiling(device), store, **options)
    assert winner.candidate == best_of(PROBLEM)  # type: ignore[attr-defined]


def test_stopping_in_the_second_go_keeps_the_first_answer(
    device: Device, store: Store, tmp_path: Path
) -> None:
    builder = partly_built(tmp_path)
    winner = run(
        Compiling(device),
        store,
        builder=builder,
        ranker=expecting,
        budget=FEW,
        should_stop=lambda: store.winner(PROBLEM, device.model.slug) is not None,
    )
    assert winner == store.winner(PROBLEM, device.model.slug)
    assert winner.revision == 1  # type: ignore[attr-defined]


class AllFail(Counting):
    """A device on which nothing survives screening."""

    def screen(
        self, problem: Problem, contenders: Sequence[Contender], policy: Policy
    ) -> Iterator[Trial]:
        only = [c for c in contenders if c.candidate == some_candidates(problem)[0]]
        return super().screen(problem, only, policy)


def test_nothing_survives_and_the_error_says_why(device: Device, store: Store) -> None:
    with pytest.raises(NoLegalCandidate, match="can_implement refused"):
        run(AllFail(device), store)  # type: ignore[arg-type]
    assert len(store.trials()) == 1


class WithoutKernels(Counting):
    """A device that times the default of any problem, and knows of no candidates."""

    def recorded(self, problem: Problem) -> None:
        return None

    def finals(self, problem: Problem, contenders: Sequence[Contender], policy: Policy) -> Finals:
        assert not contenders
        return replace(self._inner.finals(PROBLEM, contenders, policy), problem=problem)


def test_where_no_backend_has_a_kernel_the_default_is_the_answer(
    device: Device, store: Store
) -> None:
    problem = Problem(m=256, n=4096, k=4096, dtype="tf32", layout="nt")
    alone = WithoutKernels(device)
    winner = TuningRun(
        problem=problem,
        device=alone,  # type: ignore[arg-type]
        store=store,
        builder=None,
    ).tune()
    assert (winner.use, winner.candidate) == (Use.CUBLAS, None)
    assert winner.baseline is not None
    assert store.winner(problem, device.model.slug) == winner
    assert alone.screened == []


ORDERED = replace(PROBLEM, dtype="bf16.sum_sequential")


@pytest.fixture
def ordered(tmp_path: Path) -> Iterator[Device]:
    record(tmp_path / "sweeps", ORDERED)
    with open_device("replay:h200", sweeps=tmp_path / "sweeps") as opened:
        yield opened


def test_a_slower_kernel_of_the_order_is_promoted(ordered: Device, store: Store) -> None:
    said: list[Progress] = []
    device: Device = FasterDefault(ordered)  # type: ignore[assignment]
    winner = TuningRun(
        problem=ORDERED, device=device, store=store, builder=None, on_event=said.append
    ).tune()
    assert (winner.use, winner.candidate) == (Use.CUTLASS, best_of(ORDERED))
    assert winner.speedup is not None
    assert winner.speedup.median < 1
    assert store.winner(ORDERED, device.model.slug) == winner
    assert store.winner(PROBLEM, device.model.slug) is None
    assert winner.candidate is not None
    assert winner.candidate.kernel.dtype == "bf16"
    assert said[-1].message.startswith("cutlass: ")


class NoFinalist(FasterDefault):
    """A device on which every candidate fails in the finals."""

    def finals(self, problem: Problem, contenders: Sequence[Contender], policy: Policy) -> Finals:
        held = super().finals(problem, contenders, policy)
        failure = Failure(kind=FailureKind.OTHER_BITS, message="bits depend on M")
        failures = tuple((candidate, failure) for candidate in held.candidates)
        none: dict[str, object] = {
            "candidates": (), "samples_us": (), "correctness": (), "workspace_bytes": (),
        }  # fmt: skip
        return replace(held, failures=failures, **none)


def test_without_a_kernel_of_the_order_nothing_is_promoted(ordered: Device, store: Store) -> None:
    device: Device = NoFinalist(ordered)  # type: ignore[assignment]
    with pytest.raises(NoLegalCandidate, match="in the order sequential; bits depend on M"):
        TuningRun(problem=ORDERED, device=device, store=store, builder=None).tune()
    assert store.winner(ORDERED, device.model.slug) is None
