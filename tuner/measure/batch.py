"""The child's work on a batch of candidates (screen, finals, sweep), and naming cuBLAS's kernels.

Every batch draws fresh operands. Before the host waits for a candidate, the child announces it, so
that the parent knows which candidate to blame if the wait does not end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec
import torch

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import CublasLtKernel
from gemmsmith.core.problem import Problem
from gemmsmith.errors import LaunchFailed
from gemmsmith.runtime.pack import LoadedPack
from tuner.backends.cublaslt import renewing
from tuner.backends.cublaslt.algorithms import candidates as library_candidates
from tuner.backends.cublaslt.proposals import propose, shape_of, variants
from tuner.measure.bench import Bench, CandidateFailed, Prepared
from tuner.measure.conditions import Monitor, conditions_of
from tuner.measure.graphs import Replay, Stream, TorchGraph
from tuner.measure.profile import kernels_run
from tuner.measure.protocol import (
    NOBODY,
    Entrant,
    EntrantOutcome,
    FinalsDone,
    FinalsRequest,
    Profile,
    ProfileDone,
    Propose,
    ProposeDone,
    Refused,
    Reply,
    Request,
    Screen,
    ScreenDone,
    Started,
    SweepDone,
    SweepRequest,
)
from tuner.measure.regimes import ROUNDS_BUDGET_US, Finalists, Further
from tuner.measure.timing import (
    FINAL_REPLAY_US,
    SCREEN_REPLAY_US,
    Timer,
    affordable,
    launches_per_replay,
)
from tuner.measure.torch_calls import TorchCall, rivals
from tuner.trial import Failure, Rival, Rounds
from tuner.workloads.operands import Operands

Send = Callable[[Reply], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pace:
    """How paired rounds are held; fewer than `rounds` if they took longer than `budget_us`.

    With `aim_us` each graph has its own number of launches.
    """

    rounds: int
    seed: int
    aim_us: float | None = None
    budget_us: float = float("inf")
    with_rivals: bool = False


@dataclass(kw_only=True, slots=True)
class Batches:
    """Runs batches on one GPU; `send` reports to the parent which candidate is running."""

    model: DeviceModel
    ordinal: int
    stream: Stream
    monitor: Monitor
    send: Send

    def answer(self, request: Request) -> Reply:
        try:
            match request:
                case Screen():
                    return self.screen(request)
                case FinalsRequest():
                    return self.finals(request)
                case SweepRequest():
                    return self.sweep(request)
                case Profile():
                    return self.profile(request)
                case Propose():
                    return self.propose(request)
                case _:
                    return Refused(error="DeviceError", message="unexpected request")
        finally:
            torch.cuda.empty_cache()  # training may run on the same GPU

    def screen(self, request: Screen) -> ScreenDone:
        """Each entrant: verify, capture, a few samples; its outcome is sent at once."""
        bench = self._bench(request.problem, request.seed)
        timer = Timer(self.stream, self.monitor)
        best = request.best_us
        warm = False
        for index, entrant in enumerate(request.entrants):
            began = time.perf_counter()
            try:
                prepared = self._prepare(bench, index, entrant)
                launches = launches_per_replay(
                    prepared.estimate_us, bench.set_count, SCREEN_REPLAY_US
                )
                graph = bench.capture(prepared, launches)
            except CandidateFailed as failed:
                self._outcome(index, began, failure=failed.failure)
                continue
            if not warm:
                timer.warm_up(graph, prepared.estimate_us)
                warm = True
            give_up = request.policy.give_up_ratio * best if best else float("inf")
            try:
                samples = timer.screen(graph, request.policy.screen_samples, give_up)
            finally:
                graph.close()
            best = min(best or samples[0], median(samples))
            self._outcome(index, began, prepared=prepared, samples=tuple(samples))
        return ScreenDone()

    def finals(self, request: FinalsRequest) -> FinalsDone:
        """All entrants and the default in the same shuffled rounds, the GPU never idle; then those
        that beat the default in the further regimes.
        """
        bench = self._bench(request.problem, request.seed)
        field, failures = self._field(bench, request.entrants)
        rounds = request.policy.final_rounds
        pace = _Pace(rounds=rounds, seed=request.seed, budget_us=ROUNDS_BUDGET_US, with_rivals=True)
        done = self._race(bench, field, failures, pace)
        indices = [outcome.index for outcome in done.finalists]
        finalists = Finalists(
            bench=bench,
            field=[field[index] for index in indices],
            sustained=Rounds(
                samples_us=done.samples_us, baseline_us=done.baseline_us, conditions=done.conditions
            ),
            timer=Timer(self.stream, self.monitor),
            rounds=rounds,
            power_limit_w=self.monitor.power_limit_w(),
            seed=request.seed,
            blame=lambda places: self._blaming(indices[place] for place in places),
        )
        try:
            spreads = finalists.by_spread()
            further = finalists.further()
        except CandidateFailed:  # without penalties no candidate is recommended
            spreads, further = (), Further(power_penalties=(None,) * len(indices))
        return msgspec.structs.replace(
            done,
            boost=further.boost,
            interleaved=further.interleaved,
            power_penalties=further.power_penalties,
            spreads=spreads,
        )

    def sweep(self, request: SweepRequest) -> SweepDone:
        """Everything in a few common rounds; then the best of it in further ones."""
        bench = self._bench(request.problem, request.seed)
        field, failures = self._field(bench, request.entrants)
        pace = _Pace(rounds=request.rounds, seed=request.seed, aim_us=SCREEN_REPLAY_US)
        common = self._race(bench, field, failures, pace)
        times = {
            o.index: median(s) for o, s in zip(common.finalists, common.samples_us, strict=True)
        }
        best = sorted(times, key=lambda index: (times[index], index))[: request.best]
        chosen = {index: field[index] for index in best}
        pace = _Pace(rounds=request.policy.final_rounds, seed=request.seed + 1)
        further = self._race(bench, chosen, (), pace)
        return SweepDone(common=common, further=further)

    def profile(self, request: Profile) -> ProfileDone:
        """The default's kernels; this process must not time anything afterwards."""
        self.send(Started(index=NOBODY))
        with self.stream.torch():
            operands = Operands(request.problem, self.model, self.ordinal, request.seed)
        return ProfileDone(kernels=kernels_run(TorchCall(operands, self.stream), self.stream))

    def propose(self, request: Propose) -> ProposeDone:
        """A library's algorithms for the problem; nothing runs, so no operands are needed."""
        self.send(Started(index=0))
        kernel = request.entrant.candidate.kernel
        assert isinstance(kernel, CublasLtKernel)  # noqa: S101 - only these have algorithms
        loaded = LoadedPack.open(request.entrant.pack).kernel(kernel.name)
        arguments = shape_of(request.problem, self.ordinal, self.model.sm_count)
        try:
            library = renewing.loaded()
            if request.start is None:
                algorithms = propose(loaded, arguments, most=request.most)
            elif library is not None and renewing.version_of(library) != request.start.library:
                algorithms = renewing.renewed(loaded, arguments, request.start, library)
            else:
                algorithms = variants(loaded, arguments, request.start, most=request.most)
        except LaunchFailed:  # the library has no algorithm for such a problem
            algorithms = []
        return ProposeDone(candidates=tuple(library_candidates(kernel, algorithms)))

    def _bench(self, problem: Problem, seed: int) -> Bench:
        self.send(Started(index=NOBODY))
        return Bench(problem, self.model, self.ordinal, self.stream, seed)

    def _prepare(self, bench: Bench, index: int, entrant: Entrant) -> Prepared:
        self.send(Started(index=index))
        return bench.prepare(entrant.candidate, Path(entrant.pack))

    def _field(
        self, bench: Bench, entrants: Sequence[Entrant]
    ) -> tuple[dict[int, Prepared], tuple[EntrantOutcome, ...]]:
        """The entrants that pass verification, by index, and the outcomes of the others."""
        field: dict[int, Prepared] = {}
        failures: list[EntrantOutcome] = []
        for index, entrant in enumerate(entrants):
            try:
                field[index] = self._prepare(bench, index, entrant)
            except CandidateFailed as failed:
                failures.append(EntrantOutcome(index=index, failure=failed.failure))
        self.send(Started(index=NOBODY))
        return field, tuple(failures)

    def _race(
        self,
        bench: Bench,
        field: dict[int, Prepared],
        failures: tuple[EntrantOutcome, ...],
        pace: _Pace,
    ) -> FinalsDone:
        """Sustained paired rounds of the field and the default."""
        default = TorchCall(bench.operands, self.stream)
        estimates = {index: prepared.estimate_us for index, prepared in field.items()}
        default_estimate = default.estimate_us()
        fastest = min([default_estimate, *estimates.values()])
        common = launches_per_replay(fastest, bench.set_count, FINAL_REPLAY_US)

        def launches(estimate: float) -> int:
            # In finals all graphs have the same number, so that the cost of starting a graph has
            # the same weight for all. In a wide field the slowest would then take hundreds of times
            # longer than the fastest.
            if pace.aim_us is None:
                return common
            return launches_per_replay(estimate, bench.set_count, pace.aim_us)

        failed = list(failures)
        captured: dict[int, Replay] = {}
        for index, prepared in field.items():
            self.send(Started(index=index))
            try:
                captured[index] = bench.capture(prepared, launches(estimates[index]))
            except CandidateFailed as error:
                failed.append(EntrantOutcome(index=index, failure=error.failure))
        self.send(Started(index=NOBODY))
        others = rivals(bench.operands, self.stream, default.name) if pace.with_rivals else []
        other_estimates = [other.estimate_us() for other in others]
        other_graphs = [
            other.capture(launches(us)) for other, us in zip(others, other_estimates, strict=True)
        ]
        default_graph: TorchGraph = default.capture(launches(default_estimate))
        indices = list(captured)
        graphs: list[Replay] = [*captured.values(), *other_graphs, default_graph]
        timer = Timer(self.stream, self.monitor)
        timer.warm_up(default_graph, default_estimate)
        round_us = sum(
            graph.launches * estimate
            for graph, estimate in zip(
                graphs,
                [*(estimates[i] for i in indices), *other_estimates, default_estimate],
                strict=True,
            )
        )

        try:
            result = timer.rounds(
                graphs,
                affordable(pace.rounds, round_us, pace.budget_us),
                seed=pace.seed,
                announce=self._blaming(indices),
            )
        finally:
            for graph in graphs:
                graph.close()
        *samples, baseline_us = result.samples_us
        other_samples = samples[len(indices) :]
        return FinalsDone(
            finalists=tuple(
                EntrantOutcome(
                    index=index,
                    correctness=field[index].correctness,
                    workspace_bytes=field[index].workspace_bytes,
                )
                for index in indices
            ),
            failures=tuple(failed),
            samples_us=tuple(samples[: len(indices)]),
            baseline_us=baseline_us,
            conditions=conditions_of(result.readings),
            discarded_rounds=result.discarded,
            rivals=tuple(
                Rival(name=other.name, samples_us=samples_us, is_to_be_beaten=other.is_to_be_beaten)
                for other, samples_us in zip(others, other_samples, strict=True)
            ),
        )

    def _blaming(self, indices: Iterable[int]) -> Callable[[int], None]:
        """A function that announces the entrant with the i-th index; NOBODY beyond the last."""
        known = list(indices)
        return lambda i: self.send(Started(index=known[i] if i < len(known) else NOBODY))

    def _outcome(
        self,
        index: int,
        began: float,
        *,
        failure: Failure | None = None,
        prepared: Prepared | None = None,
        samples: tuple[float, ...] = (),
    ) -> None:
        self.send(
            EntrantOutcome(
                index=index,
                failure=failure,
                samples_us=samples,
                correctness=prepared.correctness if prepared else None,
                conditions=conditions_of([self.monitor.recent()]) if prepared else None,
                workspace_bytes=prepared.workspace_bytes if prepared else 0,
                cost_s=round(time.perf_counter() - began, 4),
            )
        )
