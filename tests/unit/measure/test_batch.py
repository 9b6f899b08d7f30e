"""Whole batches on the host: real operands, reference, runtime and rounds; the GPU is played.

Streams, events and graphs are the only stand-ins; kernels are C compiled into a real pack.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.kernel import Cutlass3xKernel, EpilogueSchedule, MainloopSchedule, TileScheduler
from gemmsmith.core.launch import Decomposition, Launch
from gemmsmith.core.problem import DType, Layout, Problem
from tests.support.host import MODEL, HostEvent, HostGraph, HostStream, build_pack
from tests.support.replacing import replace
from tuner.measure import batch, bench, graphs, power, regimes, timing, torch_calls
from tuner.measure.batch import Batches
from tuner.measure.conditions import Monitor
from tuner.measure.graphs import Replay
from tuner.measure.policy import Policy
from tuner.measure.protocol import (
    NOBODY,
    Entrant,
    EntrantOutcome,
    FinalsDone,
    FinalsRequest,
    Profile,
    ProfileDone,
    Reply,
    Screen,
    Started,
    SweepRequest,
    decode_reply,
    decode_request,
    encode,
)
from tuner.trial import Failure, FailureKind
from tuner.workloads.operands import HOST
from tuner.workloads.scaled import factors

PROBLEM = Problem(m=24, n=16, k=40)
POLICY = Policy(screen_samples=3, final_rounds=5, give_up_ratio=1000.0)


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_pack(tmp_path_factory.mktemp("pack"))


@pytest.fixture
def said() -> list[Reply]:
    return []


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch, said: list[Reply]) -> Batches:
    for module in (graphs, timing):
        monkeypatch.setattr(module, "Event", HostEvent)
    monkeypatch.setattr(bench, "KernelGraph", HostGraph)
    for module in (torch_calls, bench, regimes):
        monkeypatch.setattr(module, "TorchGraph", HostGraph)
    monkeypatch.setattr(timing, "COOLING_S", 0.0)
    monkeypatch.setattr(bench, "context_is_dead", lambda: "")
    monkeypatch.setattr(
        bench, "fill_bytes", lambda pointer, value, size, _: ctypes.memset(pointer, value, size)
    )
    monkeypatch.setattr(timing, "WARM_UP_US", 10.0)
    monkeypatch.setattr(timing, "MAX_LAUNCHES", 8)
    return Batches(
        model=MODEL,
        ordinal=HOST,
        stream=HostStream(),  # type: ignore[arg-type]
        monitor=Monitor(""),
        send=said.append,
    )


def entrants(pack: Path, *names: str, dtype: str = DType.BF16) -> tuple[Entrant, ...]:
    found = []
    for name in names:
        kernel = Cutlass3xKernel(
            name=name,
            arch="sm90",
            dtype=dtype,
            layout=Layout.TN,
            alignment_a=8,
            alignment_b=8,
            alignment_d=8,
            tile=(64, 64, 64),
            cluster=(1, 1),
            stages=0,
            mainloop=MainloopSchedule.PINGPONG,
            epilogue=EpilogueSchedule.TMA,
            scheduler=TileScheduler.PERSISTENT,
        )
        split = Launch(decomposition=Decomposition.SPLIT_K, splits=3)
        launch = split if name == "split" else Launch()
        found.append(Entrant(candidate=Candidate(kernel=kernel, launch=launch), pack=str(pack)))
    return tuple(found)


def finals(
    batches: Batches, pack: Path, *names: str, problem: Problem = PROBLEM, policy: Policy = POLICY
) -> FinalsDone:
    """Hold finals of the kernels with these names; the answer survives its way to the parent."""
    field = entrants(pack, *names, dtype=problem.dtype)
    done = batches.finals(FinalsRequest(problem=problem, entrants=field, policy=policy, seed=1))
    assert decode_reply(encode(done)) == done
    return done


FIELD = ("good", "wrong", "unwritten", "refuses", "fails", "missing", "split", "other")
FAILURES = {
    1: FailureKind.WRONG,
    2: FailureKind.UNTOUCHED,
    3: FailureKind.REFUSED,
    4: FailureKind.LAUNCH,
    5: FailureKind.REFUSED,
}


@pytest.mark.parametrize("problem", [PROBLEM, Problem(m=5, n=9, k=33, batch=3)], ids=str)
def test_screening_judges_each_entrant(
    batches: Batches, said: list[Reply], pack: Path, problem: Problem
) -> None:
    request = Screen(problem=problem, entrants=entrants(pack, *FIELD), policy=POLICY, seed=1)
    batches.screen(request)
    outcomes = [reply for reply in said if isinstance(reply, EntrantOutcome)]
    assert [o.index for o in outcomes] == list(range(len(FIELD)))
    assert {o.index: o.failure.kind for o in outcomes if o.failure} == FAILURES
    for outcome in outcomes:
        if outcome.failure is None:
            assert len(outcome.samples_us) == 3
            assert min(outcome.samples_us) > 0
            assert outcome.correctness is not None
            assert outcome.correctness.repeatable
    assert outcomes[6].workspace_bytes == 3000
    started = [reply.index for reply in said if isinstance(reply, Started)]
    assert started == [NOBODY, *range(len(FIELD))]


ORDERED = replace(PROBLEM, dtype="bf16.sum_sequential")


@pytest.mark.parametrize(
    "problem",
    [ORDERED, replace(ORDERED, m=1), replace(ORDERED, m=5, batch=3), replace(ORDERED, m=300)],
    ids=str,
)
def test_rows_of_an_order_have_the_same_bits_at_every_m(
    batches: Batches, said: list[Reply], pack: Path, problem: Problem
) -> None:
    """A kernel whose bits change with M fails, and so does one whose bits are another's."""
    field = entrants(pack, "good", "drifts", "shifted", "other")
    batches.screen(Screen(problem=problem, entrants=field, policy=POLICY, seed=1))
    outcomes = [reply for reply in said if isinstance(reply, EntrantOutcome)]
    failures = {o.index: o.failure for o in outcomes if o.failure}
    assert {index: failure.kind for index, failure in failures.items()} == {
        1: FailureKind.OTHER_BITS,
        2: FailureKind.OTHER_BITS,
    }
    assert "bits depend on M" in failures[1].message
    assert "differ from those of good@" in failures[2].message
    assert "sequential" in failures[2].message
    # Without an order all four are as good as each other.
    said.clear()
    plain = replace(problem, dtype="bf16")
    batches.screen(Screen(problem=plain, entrants=field, policy=POLICY, seed=1))
    assert not [o for o in said if isinstance(o, EntrantOutcome) and o.failure]


def test_tokens_of_an_order_have_the_same_bits_in_every_spread(
    batches: Batches, said: list[Reply], pack: Path
) -> None:
    problem = replace(PROBLEM, batch=3, dtype="bf16.group_rows.sum_sequential")
    field = entrants(pack, "good", "placed", "drifts", "shifted", "other", dtype="bf16.group_rows")
    batches.screen(Screen(problem=problem, entrants=field, policy=POLICY, seed=1))
    outcomes = [reply for reply in said if isinstance(reply, EntrantOutcome)]
    messages = {o.index: o.failure.message for o in outcomes if o.failure}
    assert sorted(messages) == [1, 2, 3]
    assert "bits depend on the spread of tokens" in messages[1]
    assert "differ from those of good@" in messages[3]
    said.clear()
    plain = replace(problem, dtype="bf16.group_rows")
    batches.screen(Screen(problem=plain, entrants=field, policy=POLICY, seed=1))
    assert not [o for o in said if isinstance(o, EntrantOutcome) and o.failure]


def test_finals_compare_bits_as_well(
    batches: Batches, pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regimes, "gain", lambda *_: 0.0)
    field = entrants(pack, "shifted", "good", "drifts")
    done = batches.finals(FinalsRequest(problem=ORDERED, entrants=field, policy=POLICY, seed=1))
    # The first is the reference, right or not: the others agree with it, or fail.
    assert [o.index for o in done.finalists] == [0]


def test_a_hopeless_candidate_gets_one_sample(
    batches: Batches, said: list[Reply], pack: Path
) -> None:
    request = Screen(
        problem=PROBLEM, entrants=entrants(pack, "good"), policy=POLICY, seed=1, best_us=1e-6
    )
    batches.screen(request)
    (outcome,) = (reply for reply in said if isinstance(reply, EntrantOutcome))
    assert len(outcome.samples_us) == 1


@pytest.mark.parametrize("problem", [PROBLEM, Problem(m=5, n=9, k=33, batch=3)], ids=str)
def test_finals_pair_the_survivors_with_the_baseline(
    batches: Batches,
    said: list[Reply],
    pack: Path,
    problem: Problem,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(regimes, "gain", lambda *_: 0.0)
    done = finals(batches, pack, *FIELD, problem=problem)
    assert [o.index for o in done.finalists] == [0, 6, 7]
    assert {o.index: o.failure.kind for o in done.failures if o.failure} == FAILURES
    assert [len(samples) for samples in done.samples_us] == [5, 5, 5]
    assert len(done.baseline_us) == 5
    assert all(o.correctness for o in done.finalists)
    # Nobody is ahead of cuBLAS, so there is nobody to time in further regimes.
    assert done.boost is done.interleaved is None
    assert done.power_penalties == ()
    waits = [reply.index for reply in said if isinstance(reply, Started)][-20:]
    assert sorted(waits) == sorted([NOBODY, 0, 6, 7] * 5)


def test_groups_are_verified_in_every_spread_and_timed_in_each(
    batches: Batches, pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regimes, "gain", lambda *_: 0.0)
    problem = replace(PROBLEM, batch=3, dtype="bf16.group_rows")
    names = ("good", "wrong", "unwritten", "even", "other")
    done = finals(batches, pack, *names, problem=problem)
    assert [o.index for o in done.finalists] == [0, 4]
    failures = {o.index: o.failure for o in done.failures if o.failure}
    assert {index: failure.kind for index, failure in failures.items()} == {
        1: FailureKind.WRONG,
        2: FailureKind.UNTOUCHED,
        3: FailureKind.WRONG,
    }
    assert "balanced groups" in failures[1].message
    assert "(skewed groups)" in failures[3].message  # right where groups are equal
    assert [rival.name for rival in done.rivals] == ["loop of torch.mm"]
    assert len(done.rivals[0].samples_us) == len(done.baseline_us) == 5
    assert [each.spread for each in done.spreads] == ["balanced", "skewed", "very_skewed"]
    for each in done.spreads:
        assert len(each.times_us) == 2
        assert min(*each.times_us, each.default_us) > 0


def test_a_default_is_not_its_own_rival(
    batches: Batches, pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def waits(*_: object, **__: object) -> None:
        raise RuntimeError("called a synchronizing CUDA operation")

    monkeypatch.setattr(torch, "_grouped_mm", waits)  # so that the loop is the default
    monkeypatch.setattr(regimes, "gain", lambda *_: 0.0)
    problem = replace(PROBLEM, batch=3, dtype="bf16.group_rows")
    done = finals(batches, pack, "good", problem=problem)
    assert done.baseline_us
    assert done.rivals == ()


def test_each_spread_is_timed_on_its_own_sets_alone(
    batches: Batches, pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed: list[set[tuple[str, int]]] = []
    recording = False
    captured = regimes.captured_beside
    launched, computed = bench.Bench.launch, torch_calls.TorchCall.compute

    @contextmanager
    def beside(*arguments: Any, **keywords: Any) -> Iterator[list[Replay]]:
        nonlocal recording
        with captured(*arguments, **keywords) as graphs:
            replayed.append(set())
            recording = True
            yield graphs
            recording = False

    def launch(self: bench.Bench, prepared: bench.Prepared, i: int) -> None:
        if recording:
            replayed[-1].add(("ours", i % self.set_count))
        launched(self, prepared, i)

    def compute(self: torch_calls.TorchCall, i: int) -> torch.Tensor:
        if recording:
            replayed[-1].add(("default", i % len(self._launches)))
        return computed(self, i)

    monkeypatch.setattr(regimes, "gain", lambda *_: 0.0)
    monkeypatch.setattr(regimes, "captured_beside", beside)
    monkeypatch.setattr(bench.Bench, "launch", launch)
    monkeypatch.setattr(torch_calls.TorchCall, "compute", compute)
    problem = replace(PROBLEM, batch=3, dtype="bf16.group_rows")
    finals(batches, pack, "good", problem=problem)
    assert len(replayed) == 3
    for first, met in enumerate(replayed):
        assert {who for who, _ in met} == {"ours", "default"}
        assert {i % 3 for _, i in met} == {first}


def test_who_is_ahead_is_timed_rested_too(
    batches: Batches, said: list[Reply], pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Place 1 is behind in the first state, and all the others are in the second."""
    monkeypatch.setattr(regimes, "gain", lambda seen, place: float(len(seen) == 1 and place != 1))
    done = finals(batches, pack, *FIELD)
    assert done.boost is not None
    assert [len(samples) for samples in done.boost.samples_us] == [5, 0, 5]
    assert len(done.boost.baseline_us) == 5
    assert done.interleaved is None
    assert done.power_penalties == ()
    waits = [reply.index for reply in said if isinstance(reply, Started)][-15:]
    assert sorted(waits) == sorted([NOBODY, 0, 7] * 5)


def test_half_as_many_rounds_are_rested(
    batches: Batches, pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regimes, "gain", lambda *_: 2.0)
    for module in (batch, regimes):  # the host takes long, and would get fewer rounds
        monkeypatch.setattr(module, "affordable", lambda wanted, *_: wanted)
    policy = Policy(screen_samples=3, final_rounds=25, give_up_ratio=1000.0)
    done = finals(batches, pack, "good", policy=policy)
    assert done.boost is not None
    assert len(done.baseline_us) == 25
    assert len(done.boost.baseline_us) == 13


def test_who_is_still_ahead_is_timed_between_other_kernels_too(
    batches: Batches, said: list[Reply], pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regimes, "gain", lambda _, place: 2.0 if place != 1 else 0.0)
    done = finals(batches, pack, *FIELD)
    assert done.interleaved is not None
    assert [len(samples) for samples in done.interleaved.samples_us] == [5, 0, 5]
    assert done.interleaved.baseline_us == (median(done.baseline_us),) * 5
    assert done.power_penalties == ()  # no power limit was met
    blamed = [reply.index for reply in said if isinstance(reply, Started)][-15:]
    assert sorted(blamed) == sorted([NOBODY, 0, 7] * 5)


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everyone gains, at the power limit."""
    monkeypatch.setattr(regimes, "gain", lambda *_: 2.0)
    monkeypatch.setattr(power, "is_power_limited", lambda *_: True)
    monkeypatch.setattr(power, "beyond_all_penalties", lambda *_: [])


@pytest.mark.usefixtures("limited")
def test_at_the_power_limit_the_best_are_priced(
    batches: Batches, said: list[Reply], pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(power, "to_measure", lambda *_: [2, 0])
    clocks = iter([1400.0, 1500.0, 1500.0])  # cuBLAS's is the second
    monkeypatch.setattr(timing.Timer, "clock", lambda *_: next(clocks))
    done = finals(batches, pack, *FIELD)
    assert done.power_penalties == (1.0, None, round(power.penalty(1400.0, 1500.0), 4))
    assert [reply.index for reply in said if isinstance(reply, Started)][-3:] == [7, NOBODY, 0]


@pytest.mark.usefixtures("limited")
def test_who_gains_more_than_power_can_cost_is_not_looked_at(
    batches: Batches, pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(power, "beyond_all_penalties", lambda *_: [1])
    assert finals(batches, pack, *FIELD).power_penalties == (None, 1.0, None)


def test_what_cannot_be_captured_again_is_not_recommended(
    batches: Batches, pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise bench.CandidateFailed(Failure(kind=FailureKind.LAUNCH, message="no memory"))

    monkeypatch.setattr(regimes, "gain", lambda *_: 2.0)
    monkeypatch.setattr(regimes, "mixed_rounds", refuse)
    done = finals(batches, pack, "good")
    assert done.interleaved is None
    assert done.power_penalties == (None,)


def test_without_a_survivor_there_is_nothing_to_mix(batches: Batches, pack: Path) -> None:
    done = finals(batches, pack, "wrong")
    assert done.interleaved is None
    assert done.power_penalties == ()


def test_a_sweep_measures_all_and_then_the_best(batches: Batches, pack: Path) -> None:
    request = SweepRequest(
        problem=PROBLEM,
        entrants=entrants(pack, *FIELD),
        policy=POLICY,
        seed=1,
        rounds=7,
        best=2,
    )
    done = batches.sweep(request)
    assert [len(samples) for samples in done.common.samples_us] == [7, 7, 7]
    assert len(done.further.finalists) == 2
    assert {o.index for o in done.further.finalists} <= {0, 6, 7}
    assert all(len(samples) == 5 for samples in done.further.samples_us)
    assert len(done.further.baseline_us) == 5
    assert done.common.boost is done.further.boost is None
    assert done.common.interleaved is done.further.interleaved is None


def test_profiling_and_its_answer_travel(batches: Batches, said: list[Reply]) -> None:
    request = decode_request(encode(Profile(problem=PROBLEM, seed=7)))
    assert isinstance(request, Profile)
    done = batches.profile(request)  # the host has no kernels to name
    assert said == [Started(index=NOBODY)]
    assert decode_reply(encode(done)) == done == ProfileDone(kernels=())
    named = ProfileDone(kernels=("nvjet_tst_64x8_64x16_4x1_v_bz_splitK_TNT", "µ"))
    assert decode_reply(encode(named)) == named


def test_fp8_without_cublas_support_has_a_bf16_baseline(batches: Batches) -> None:
    problem = Problem(m=13, n=17, k=33, batch=2, dtype=DType.FP8_E4M3)
    stage = bench.Bench(problem, MODEL, HOST, batches.stream, seed=1)
    found = torch_calls.TorchCall(stage.operands, batches.stream)
    assert found.name == "torch.mm on bf16 copies"
    scale_a, scale_b = factors(stage.operands.sets[0])
    scale = float(scale_a * scale_b)
    stage.operands.sets[0].d.mul_(scale)
    stage.operands.check.copy_(stage.operands.sets[0].d)
    kernel = entrants(Path(), "x", dtype=problem.dtype)[0].candidate.kernel
    correctness, failure = stage.reference.check(kernel, claims_order=True)
    assert failure is None
    assert correctness is not None
