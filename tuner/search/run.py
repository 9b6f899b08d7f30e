"""The tuning run: enumerate, rank, compile, screen, finals, promote.

Invariants: every trial is in the store before the next candidate runs, so a killed run loses at
most the candidate in flight; a run for a job that already has trials continues from them; the
winner is decided from paired finals alone, never from screening times. A candidate that fails is
a failed trial with its reason; the run fails only if nothing can be measured at all.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from gemmsmith.kernel import Kernel
from gemmsmith.launch import Candidate
from gemmsmith.problem import Problem
from gemmsmith.tuning import Effort
from tuner.compile import Builder, Built
from tuner.devices.base import Contender, Device
from tuner.errors import JobAborted, NoLegalCandidate
from tuner.measure.statistics import summarize
from tuner.search.budget import BUDGETS, Budget
from tuner.search.hints import HINTS, choice_of, hinted
from tuner.search.progress import Progress, Step
from tuner.search.promotion import Decision, decide
from tuner.search.ranking import Ranker, by_kernel, led, ranked
from tuner.search.transfer import near_winners
from tuner.space import candidates as legal_candidates
from tuner.store import Store
from tuner.trial import Finals, Phase, Trial, Winner

Listener = Callable[[Progress], None]
StopSignal = Callable[[], bool]
Groups = dict[str, list[Candidate]]

_HINTED_SHARE = 4
"""At most one kernel in so many is measured because cuBLAS runs one like it: a quick run, with few
kernels, is for the cost model's favourites too."""


def tune(
    problem: Problem,
    *,
    device: Device,
    store: Store,
    builder: Builder | None,
    ranker: Ranker,
    effort: Effort = Effort.DEFAULT,
    budget: Budget | None = None,
    compiled_only: bool = False,
    job: str | None = None,
    on_event: Listener = lambda _: None,
    should_stop: StopSignal = lambda: False,
) -> Winner:
    """Find, verify and promote the fastest candidate for `problem` on `device`.

    `device` must be entered already: a suite is tuned inside one `with device:`. `builder` may be
    None only where the device needs no packs. `compiled_only` leaves out kernels that would have
    to be compiled first.

    Raises:
        NoLegalCandidate: nothing in the space fits the problem, or nothing survived screening
            because nothing could be compiled.
        JobAborted: `should_stop` said so; all trials so far are kept.
        DeviceError: the device cannot take the problem at all.
    """
    budget = budget or BUDGETS[effort]
    run = _Run(
        problem=problem,
        device=device,
        store=store,
        builder=builder,
        budget=budget,
        compiled_only=compiled_only,
        job=job,
        on_event=on_event,
        should_stop=should_stop,
    )
    groups = run.enumerate(ranker)
    run.screen_kernels(groups)
    run.refine_launches(groups)
    return run.promote(run.finals())


@dataclass(kw_only=True)
class _Run:
    """State of one tuning run; each method is one of its steps."""

    problem: Problem
    device: Device
    store: Store
    builder: Builder | None
    budget: Budget
    compiled_only: bool
    job: str | None
    on_event: Listener
    should_stop: StopSignal

    def __post_init__(self) -> None:
        self.trials: dict[str, Trial] = {}
        self.packs: dict[str, Built] = {}
        self.planned = 0
        self.best: Trial | None = None
        self.baseline_kernels: tuple[str, ...] = ()
        if self.job is not None:
            done = self.store.trials(problem=self.problem, job=self.job, phase=Phase.SCREEN)
            for stored in done:
                self._keep(stored.trial)

    def enumerate(self, ranker: Ranker) -> Groups:
        """Candidates by kernel, the most promising kernel and launch first."""
        recorded = self.device.recorded(self.problem)
        model = self.device.model
        found = (
            list(recorded)
            if recorded is not None
            else legal_candidates(self.problem, model, level=self.budget.level)
        )
        if not found:
            raise NoLegalCandidate(f"no legal kernel for {self.problem} on {model.arch}")
        if self.compiled_only and self.builder is not None:
            found = [c for c in found if self.builder.has(c.kernel)]
            if not found:
                raise NoLegalCandidate(
                    f"no kernel for {self.problem} is compiled yet; run `gemmsmith compile` first"
                )
        order = ranked(self.problem, found, model, ranker)
        seeds = near_winners(self.store, self.problem, model.slug)
        order = led(order, [*seeds, *self._like_cublas(order)])
        groups = by_kernel(order)
        said = f"{len(order)} candidates of {len(groups)} kernels"
        self._say(Step.ENUMERATE, 0, len(order), said)
        return groups

    def _like_cublas(self, order: Sequence[Candidate]) -> list[Candidate]:
        """The few candidates that are nearest to what cuBLAS runs, as far as its names tell."""
        self.baseline_kernels = self.device.baseline_kernels(self.problem)
        choice = choice_of(self.baseline_kernels)
        if choice is None:
            return []
        return hinted(order, choice, limit=min(HINTS, self.budget.kernels // _HINTED_SHARE))

    def screen_kernels(self, groups: Groups) -> None:
        """Measure the most promising kernels, each with its most promising launch."""
        leaders = [launches[0] for launches in groups.values()][: self.budget.kernels]
        self.planned = len(leaders)
        with closing(self._ready(leaders)) as batches:  # compilers end with the run, at once
            for batch in batches:
                self._screen(batch)

    def refine_launches(self, groups: Groups) -> None:
        """Measure further launches of the kernels that did best."""
        best = [trial.candidate.kernel.name for trial in self._leaders()]
        wanted: list[Candidate] = []
        for name in dict.fromkeys(best):
            wanted += groups[name][: self.budget.launches]
            if len(wanted) >= self.budget.refine * self.budget.launches:
                break
        wanted = [c for c in wanted if c.key not in self.trials]
        self.planned += len(wanted)
        self._screen([self._contender(c) for c in wanted])

    def finals(self) -> Finals:
        finalists = [trial.candidate for trial in self._leaders()][: self.budget.finalists]
        if not finalists:
            reasons = sorted({t.failure.message for t in self.trials.values() if t.failure})
            raise NoLegalCandidate(
                f"no candidate for {self.problem} survived: " + "; ".join(reasons[:3])
            )
        self._say(Step.FINALS, 0, len(finalists), f"{len(finalists)} finalists and cuBLAS")
        contenders = [self._contender(candidate) for candidate in finalists]
        return self.device.finals(self.problem, contenders, self.budget.policy)

    def promote(self, finals: Finals) -> Winner:
        decision = decide(finals)
        for trial in self._final_trials(finals):
            self.store.add_trial(trial)
        winner = self.store.promote(self._winner(finals, decision))
        self._say(Step.PROMOTE, self.planned, self.planned, _verdict(decision))
        return winner

    def _ready(self, leaders: Sequence[Candidate]) -> Generator[list[Contender], None, None]:
        """Batches of contenders whose kernels are built, as soon as they are."""
        todo = {c.kernel.name: c for c in leaders if c.key not in self.trials}
        if self.builder is None or not self.device.needs_packs:
            yield [Contender(candidate=c) for c in todo.values()]
            return
        # Packs of finished trials are needed again in the finals; the store gives them at once.
        kernels = [c.kernel for c in leaders]
        with closing(_batched(self.builder, kernels, self.should_stop)) as batches:
            for built in batches:
                contenders = self._contenders(built, todo)
                said = f"{len(self.packs)} kernels built"
                self._say(Step.COMPILE, len(self.packs), len(kernels), said)
                if contenders:
                    yield contenders

    def _contenders(self, built: list[Built], todo: dict[str, Candidate]) -> list[Contender]:
        """Those of `todo` that were built; of the others that were to be, a failed trial each."""
        contenders = []
        for item in built:
            self.packs[item.kernel.name] = item
            candidate = todo.get(item.kernel.name)
            if candidate is None:
                continue
            if item.failure is not None:
                failed = self._trial(candidate, Phase.SCREEN)
                self._record(replace(failed, failure=item.failure))
            else:
                contenders.append(self._contender(candidate))
        return contenders

    def _screen(self, contenders: Sequence[Contender]) -> None:
        if not contenders:
            return
        for trial in self.device.screen(self.problem, contenders, self.budget.policy):
            self._record(replace(trial, job=self.job))
            self._say(Step.SCREEN, len(self.trials), self.planned, "")
            if self.should_stop():
                raise JobAborted(f"stopped; {len(self.trials)} trials are kept")

    def _record(self, trial: Trial) -> None:
        self.store.add_trial(trial)
        self._keep(trial)

    def _keep(self, trial: Trial) -> None:
        self.trials[trial.candidate.key] = trial
        if trial.measured and (self.best is None or _speed(trial) < _speed(self.best)):
            self.best = trial

    def _leaders(self) -> list[Trial]:
        """Measured trials, fastest first."""
        return sorted((trial for trial in self.trials.values() if trial.measured), key=_speed)

    def _contender(self, candidate: Candidate) -> Contender:
        built = self.packs.get(candidate.kernel.name)
        if built is None and self.builder is not None and self.device.needs_packs:
            built = self._rebuilt(candidate.kernel)
        pack = built.pack if built is not None else None
        return Contender(candidate=candidate, pack=pack.path if pack else None)

    def _rebuilt(self, kernel: Kernel) -> Built:
        """The pack of a kernel whose trials an earlier attempt recorded."""
        assert self.builder is not None  # noqa: S101 - narrows for the type checker
        built = next(iter(self.builder.build([kernel])))
        self.packs[kernel.name] = built
        return built

    def _trial(self, candidate: Candidate, phase: Phase) -> Trial:
        """A trial of this run without an outcome yet."""
        return Trial(
            problem=self.problem,
            candidate=candidate,
            device=self.device.model,
            environment=self.device.environment,
            phase=phase,
            replayed=self.device.replayed,
            job=self.job,
        )

    def _final_trials(self, finals: Finals) -> Iterator[Trial]:
        for candidate, failure in finals.failures:
            yield replace(self._trial(candidate, Phase.FINAL), failure=failure)
        for i, candidate in enumerate(finals.candidates):
            yield replace(
                self._trial(candidate, Phase.FINAL),
                statistics=summarize(finals.samples_us[i]),
                samples_us=finals.samples_us[i],
                correctness=finals.correctness[i],
                conditions=finals.conditions,
                workspace_bytes=finals.workspace_bytes[i],
            )

    def _winner(self, finals: Finals, decision: Decision) -> Winner:
        name = decision.candidate.kernel.name if decision.candidate else ""
        built = self.packs.get(name)
        return Winner(
            problem=self.problem,
            device=self.device.model,
            environment=self.device.environment,
            use=decision.use,
            candidate=decision.candidate,
            statistics=decision.statistics,
            baseline=decision.baseline,
            speedup=decision.speedup,
            correctness=decision.correctness,
            conditions=finals.conditions,
            ties=decision.ties,
            baseline_kernels=self.baseline_kernels,
            replayed=self.device.replayed,
            pack=built.pack.hash if built and built.pack else None,
            job=self.job,
        )

    def _say(self, step: Step, done: int, total: int, message: str) -> None:
        best = self.best
        self.on_event(
            Progress(
                phase=step,
                done=done,
                total=total,
                best_us=best.statistics.median_us if best and best.statistics else None,
                best=best.candidate.key if best else None,
                message=message,
            )
        )


def _speed(trial: Trial) -> tuple[float, str]:
    """What measured trials are sorted by: time, then the candidate's key."""
    assert trial.statistics is not None  # noqa: S101 - a measured trial has them
    return trial.statistics.median_us, trial.candidate.key


def _verdict(decision: Decision) -> str:
    if decision.candidate is None or decision.statistics is None:
        return "no candidate survived; cuBLAS stays the answer"
    gain = f", {decision.speedup.median:.3f} × cuBLAS" if decision.speedup else ""
    return f"{decision.use}: {decision.candidate.key} {decision.statistics.median_us:.2f} µs{gain}"


def _batched(
    builder: Builder, kernels: Sequence[Kernel], should_stop: StopSignal
) -> Generator[list[Built], None, None]:
    """Everything the builder has built since last asked; compilation goes on meanwhile.

    Its results are awaited in a thread of their own, so that kernels are measured while others
    compile, and a signal to stop is noticed. Closing this kills the compilers.
    """
    arrived: queue.SimpleQueue[Built | BaseException | None] = queue.SimpleQueue()

    def pump() -> None:
        try:
            for item in builder.build(kernels):
                arrived.put(item)
            arrived.put(None)
        except BaseException as error:  # noqa: BLE001 - handed to the consumer, which raises it
            arrived.put(error)

    thread = threading.Thread(target=pump, name="gemmsmith-compile", daemon=True)
    thread.start()
    try:
        finished = False
        while not finished:
            batch: list[Built] = []
            first = _next(arrived, should_stop)
            pending: list[Built | BaseException | None] = [first]
            while not arrived.empty():
                pending.append(arrived.get())
            for item in pending:
                if item is None:
                    finished = True
                elif isinstance(item, BaseException):
                    raise item
                else:
                    batch.append(item)
            if batch:
                yield batch
    finally:
        while thread.is_alive():  # again and again: it may be about to start the compilers
            builder.stop()
            thread.join(timeout=0.1)


def _next(
    arrived: queue.SimpleQueue[Built | BaseException | None], should_stop: StopSignal
) -> Built | BaseException | None:
    """The next item; cancellation is noticed within a second even while nvcc is busy."""
    while True:
        try:
            return arrived.get(timeout=1.0)
        except queue.Empty:
            if should_stop():
                raise JobAborted("stopped while compiling; finished kernels are kept") from None
