"""What the child does with a batch of candidates (screen, finals, sweep), and naming cuBLAS's.

Every batch draws fresh operands. Whatever the host is about to wait for is announced first, so
that the parent knows whom to blame when the wait does not end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import median

import msgspec
import torch

from gemmsmith.device import DeviceModel
from gemmsmith.problem import Problem
from tuner.measure import company, power, timing
from tuner.measure.baseline import Baseline
from tuner.measure.bench import Bench, CandidateFailed, Prepared
from tuner.measure.conditions import Monitor, conditions_of
from tuner.measure.graphs import Replay, Stream, TorchGraph
from tuner.measure.operands import Operands
from tuner.measure.power import gain
from tuner.measure.profile import kernels_run
from tuner.measure.protocol import (
    NOBODY,
    Entrant,
    Finals,
    FinalsDone,
    Outcome,
    Profile,
    ProfileDone,
    Reply,
    Screen,
    ScreenDone,
    Started,
    Sweep,
    SweepDone,
)
from tuner.measure.timing import (
    FINAL_REPLAY_US,
    REST,
    SCREEN_REPLAY_US,
    Timer,
    launches_per_replay,
)
from tuner.trial import Failure, Rounds

ROUNDS_BUDGET_US = 10e6
"""Paired rounds of one problem take at most about this long, sustained and paced ones each; long
kernels get fewer rounds."""

PACED_REPLAYS = 2 * (1 + REST)
"""What a paced round takes of a sustained one: cuBLAS goes before every replay, untimed, and both
are rested from."""

LEAST_ROUNDS = 7

Send = Callable[[Reply], None]


@dataclass(kw_only=True, slots=True)
class Batches:
    """Runs batches on one GPU, telling the parent through `send` whom it is busy with."""

    model: DeviceModel
    ordinal: int
    stream: Stream
    monitor: Monitor
    send: Send

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

    def finals(self, request: Finals) -> FinalsDone:
        """All entrants and cuBLAS in the same shuffled rounds: paced ones first, they are cool,
        then sustained ones. Who is ahead in both is timed between other kernels too, and the power
        of the best has its price.
        """
        bench = self._bench(request.problem, request.seed)
        field, failures = self._field(bench, request.entrants)
        rounds = request.policy.final_rounds
        done = self._race(bench, field, failures, rounds, request.seed, paced=True)
        states = [state for state in (_sustained(done), done.paced) if state is not None]
        ahead = [place for place in range(len(done.finalists)) if gain(states, place)]
        if not ahead:
            return done
        try:
            mixed = self._mixed(bench, field, done, ahead, request)
            done = msgspec.structs.replace(done, mixed=mixed)
            return msgspec.structs.replace(done, prices=self._prices(bench, field, done))
        except CandidateFailed:  # all ran before: what is not known to gain is not recommended
            return msgspec.structs.replace(done, prices=(None,) * len(done.finalists))

    def sweep(self, request: Sweep) -> SweepDone:
        """Everything in a few common rounds; then the best of it in further ones."""
        bench = self._bench(request.problem, request.seed)
        field, failures = self._field(bench, request.entrants)
        common = self._race(
            bench, field, failures, request.rounds, request.seed, aim_us=SCREEN_REPLAY_US
        )
        times = {
            o.index: median(s) for o, s in zip(common.finalists, common.samples_us, strict=True)
        }
        best = sorted(times, key=lambda index: (times[index], index))[: request.best]
        chosen = {index: field[index] for index in best}
        further = self._race(bench, chosen, (), request.policy.final_rounds, request.seed + 1)
        return SweepDone(common=common, further=further)

    def profile(self, request: Profile) -> ProfileDone:
        """What cuBLAS runs; this process must not time anything afterwards."""
        self.send(Started(index=NOBODY))
        with self.stream.torch():
            operands = Operands(request.problem, self.model, self.ordinal, request.seed)
        return ProfileDone(kernels=kernels_run(Baseline(operands, self.stream), self.stream))

    def _bench(self, problem: Problem, seed: int) -> Bench:
        self.send(Started(index=NOBODY))
        return Bench(problem, self.model, self.ordinal, self.stream, seed)

    def _prepare(self, bench: Bench, index: int, entrant: Entrant) -> Prepared:
        self.send(Started(index=index))
        return bench.prepare(entrant.candidate, Path(entrant.pack))

    def _field(
        self, bench: Bench, entrants: Sequence[Entrant]
    ) -> tuple[dict[int, Prepared], tuple[Outcome, ...]]:
        """The entrants that pass verification, by index, and the outcomes of the others."""
        field: dict[int, Prepared] = {}
        failures: list[Outcome] = []
        for index, entrant in enumerate(entrants):
            try:
                field[index] = self._prepare(bench, index, entrant)
            except CandidateFailed as failed:
                failures.append(Outcome(index=index, failure=failed.failure))
        self.send(Started(index=NOBODY))
        return field, tuple(failures)

    def _race(
        self,
        bench: Bench,
        field: dict[int, Prepared],
        failures: tuple[Outcome, ...],
        rounds: int,
        seed: int,
        aim_us: float | None = None,
        paced: bool = False,
    ) -> FinalsDone:
        """Paired rounds of the field and cuBLAS; with `paced` half as many with rests before them.

        Those take four times as long, and tell as much: at a clock that stands still.

        Finals give all one number of launches per replay, so that the cost of starting a graph
        weighs on all alike. With `aim_us` each has its own: a wide field's slowest would take
        hundreds of times longer than its fastest.
        """
        baseline = Baseline(bench.operands, self.stream)
        estimates = {index: prepared.estimate_us for index, prepared in field.items()}
        baseline_estimate = baseline.estimate_us()
        fastest = min([baseline_estimate, *estimates.values()])
        common = launches_per_replay(fastest, bench.set_count, FINAL_REPLAY_US)

        def launches(estimate: float) -> int:
            if aim_us is None:
                return common
            return launches_per_replay(estimate, bench.set_count, aim_us)

        failed = list(failures)
        captured: dict[int, Replay] = {}
        for index, prepared in field.items():
            self.send(Started(index=index))
            try:
                captured[index] = bench.capture(prepared, launches(estimates[index]))
            except CandidateFailed as error:
                failed.append(Outcome(index=index, failure=error.failure))
        self.send(Started(index=NOBODY))
        reference_graph: TorchGraph = baseline.capture(launches(baseline_estimate))
        indices = list(captured)
        graphs: list[Replay] = [*captured.values(), reference_graph]
        timer = Timer(self.stream, self.monitor)
        timer.warm_up(reference_graph, baseline_estimate)
        round_us = sum(
            graph.launches * estimate
            for graph, estimate in zip(
                graphs, [*(estimates[i] for i in indices), baseline_estimate], strict=True
            )
        )

        def taken(count: int, rest: float, replays: float) -> timing.Rounds:
            return timer.rounds(
                graphs,
                affordable(count, round_us * replays),
                seed=seed,
                announce=self._blaming(indices),
                rest=rest,
            )

        try:
            half = max(rounds // 2 + 1, min(rounds, LEAST_ROUNDS))
            rested = taken(half, REST, PACED_REPLAYS) if paced else None
            result = taken(rounds, 0.0, 1.0)
            sustained = _paired(result)
        finally:
            for graph in graphs:
                graph.close()
        return FinalsDone(
            finalists=tuple(
                Outcome(
                    index=index,
                    correctness=field[index].correctness,
                    workspace_bytes=field[index].workspace_bytes,
                )
                for index in indices
            ),
            failures=tuple(failed),
            samples_us=sustained.samples_us,
            baseline_us=sustained.baseline_us,
            conditions=sustained.conditions,
            discarded_rounds=result.discarded,
            paced=None if rested is None else _paired(rested),
        )

    def _mixed(
        self,
        bench: Bench,
        field: dict[int, Prepared],
        done: FinalsDone,
        ahead: Sequence[int],
        request: Finals,
    ) -> Rounds:
        """Rounds between other kernels of the finalists in these places; the others have none."""
        times = [median(done.samples_us[place]) for place in ahead]
        baseline_us = median(done.baseline_us)
        # What is between takes about as long as cuBLAS's product.
        launches = launches_per_replay(2 * baseline_us, bench.set_count, FINAL_REPLAY_US)
        round_us = launches * (sum(times) + (len(times) + 2) * baseline_us)
        indices = [done.finalists[place].index for place in ahead]
        mixed = company.mixed_rounds(
            bench,
            [field[index] for index in indices],
            baseline_us,
            Timer(self.stream, self.monitor),
            affordable(request.policy.final_rounds, round_us),
            seed=request.seed + 1,
            announce=self._blaming(indices),
        )
        taken = dict(zip(ahead, mixed.samples_us, strict=True))
        return Rounds(
            samples_us=tuple(taken.get(place, ()) for place in range(len(done.finalists))),
            baseline_us=mixed.baseline_us,
            conditions=mixed.conditions,
        )

    def _prices(
        self, bench: Bench, field: dict[int, Prepared], done: FinalsDone
    ) -> tuple[float | None, ...]:
        """What the power of the best finalists costs; nothing where no power limit was met."""
        sustained = _sustained(done)
        if done.paced is None or done.mixed is None:
            return ()
        if not power.is_power_limited(sustained, done.paced):
            return ()
        finalists = [field[outcome.index] for outcome in done.finalists]
        tiles = [prod(finalist.candidate.kernel.tile[:2]) for finalist in finalists]
        looked_at = power.worth_a_look((sustained, done.paced, done.mixed), tiles)
        found: list[float | None] = [None] * len(finalists)
        times = [median(done.samples_us[place]) for place in looked_at] + [median(done.baseline_us)]
        launches = [launches_per_replay(us, bench.set_count, FINAL_REPLAY_US) for us in times]
        graphs: list[Replay] = []
        try:
            for place, count in zip(looked_at, launches, strict=False):
                graphs.append(bench.capture(finalists[place], count))
            if graphs:
                graphs.append(Baseline(bench.operands, self.stream).capture(launches[-1]))
                lengths = [count * us for count, us in zip(launches, times, strict=True)]
                announce = self._blaming(done.finalists[place].index for place in looked_at)
                timer = Timer(self.stream, self.monitor)
                for place, paid in zip(
                    looked_at, power.prices(graphs, lengths, timer, announce), strict=True
                ):
                    found[place] = round(paid, 4)
        finally:
            for graph in graphs:
                graph.close()
        return tuple(found)

    def _blaming(self, indices: Iterable[int]) -> Callable[[int], None]:
        """Announces the entrant with the i-th of these indices; beyond them nobody."""
        known = [*indices, NOBODY]
        return lambda i: self.send(Started(index=known[i]))

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
            Outcome(
                index=index,
                failure=failure,
                samples_us=samples,
                correctness=prepared.correctness if prepared else None,
                conditions=conditions_of([self.monitor.recent()]) if prepared else None,
                workspace_bytes=prepared.workspace_bytes if prepared else 0,
                cost_s=round(time.perf_counter() - began, 4),
            )
        )


def affordable(wanted: int, round_us: float) -> int:
    """`wanted` rounds, or the fewer that ROUNDS_BUDGET_US allows; LEAST_ROUNDS in any case."""
    return min(wanted, max(LEAST_ROUNDS, int(ROUNDS_BUDGET_US / max(round_us, 1.0))))


def _sustained(done: FinalsDone) -> Rounds:
    return Rounds(
        samples_us=done.samples_us, baseline_us=done.baseline_us, conditions=done.conditions
    )


def _paired(rounds: timing.Rounds) -> Rounds:
    """The baseline's samples apart from the others'."""
    return Rounds(
        samples_us=rounds.samples_us[:-1],
        baseline_us=rounds.samples_us[-1],
        conditions=conditions_of(rounds.readings),
    )


def release_memory() -> None:
    """Give what the last batch held back to the GPU: training may run beside us."""
    torch.cuda.empty_cache()
