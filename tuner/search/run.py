"""The tuning run: enumerate, rank, compile, screen, finals, promote.

Invariants: every trial is in the store before the next candidate runs, so a killed run loses at
most the candidate that was running; a run for a job that already has trials continues from them;
the winner is decided by paired finals alone, never by screening times. A candidate that fails is a
failed trial with its reason; the run fails only if nothing can be measured at all. A re-check
begins with the finals of known candidates; the other steps follow only if those decide nothing.
A winner among the compiled kernels is promoted first, and a second one after others were compiled:
its finals hold the first one too.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.problem import Problem
from gemmsmith.core.tuning import Effort
from tuner.compile import Builder, Built
from tuner.devices.base import Contender, Device
from tuner.errors import JobAborted, NoLegalCandidate
from tuner.measure.statistics import summarize
from tuner.search.budget import BUDGETS, Budget
from tuner.search.cost_model import predicted_us
from tuner.search.exploration import Field, Proposals
from tuner.search.finals import finalists, hold_finals, top_candidates
from tuner.search.hints import field_of, near_winners
from tuner.search.offered import Library, library_kernel, offered, renewed
from tuner.search.packs import RunPacks, StopSignal, in_batches
from tuner.search.progress import Listener, Progress, Step
from tuner.search.promotion import decide, verdict
from tuner.search.ranking import Ranker, predictions
from tuner.store import Store
from tuner.trial import Finals, Phase, Trial, Winner


@dataclass(kw_only=True)
class TuningRun:
    """One run: finds, verifies and promotes the fastest candidate for `problem` on `device`.

    `device` must be entered already: a suite is tuned inside one `with device:`. `builder` may be
    None only if the device needs no packs. `compiled_only` leaves out kernels that would have to
    be compiled first. `budget` replaces that of the `effort`. With `Effort.RECHECK` only the
    present winner and the candidates that came near it are measured again, unless that winner
    drops out. `tuner.search.together` tunes several problems at once, and compiles for all of them.
    """

    problem: Problem
    device: Device
    store: Store
    builder: Builder | None
    ranker: Ranker = predicted_us
    effort: Effort = Effort.DEFAULT
    budget: Budget | None = None
    compiled_only: bool = False
    job: str | None = None
    on_event: Listener = lambda _: None
    should_stop: StopSignal = lambda: False

    def __post_init__(self) -> None:
        self.bounds = self.budget or BUDGETS[self.effort]
        self.trials: dict[str, Trial] = {}
        self.packs = RunPacks(self.builder if self.device.needs_packs else None)
        self.spoilt: dict[str, Candidate] = {}  # failed once because of a damaged pack
        self.library: set[str] = set()  # names of library kernels whose algorithms were screened
        self.planned = self.kernels = 0  # candidates to screen, kernels to build: for `_say`
        self.fastest: Trial | None = None  # of the screening
        self.baseline_kernels: tuple[str, ...] = ()
        self.offered: list[Candidate] = []  # as soon as they were enumerated
        self.field = Field(order=(), predicted={})
        self.winner: Winner | None = None  # of this job
        if self.job is not None:  # an earlier attempt at the job may have screened some
            done = self.store.trials(problem=self.problem, job=self.job, phase=Phase.SCREEN)
            for stored in done:
                self._keep(stored.trial)

    def tune(self) -> Winner:
        """Return the winner, which is promoted.

        Raises:
            NoLegalCandidate: the device's architecture is unknown, no candidate survived
                screening, or none adds up in the order that the operation demands. If there is no
                candidate to begin with and no such order, the default is the winner.
            JobAborted: `should_stop` was true before there was a winner; all trials so far are
                kept.
            DeviceError: the device cannot take the problem at all.
        """
        self.first()
        return self.finish()

    def finish(self) -> Winner:
        """Compile what promises more than the first winner, if anything does. See `tune`."""
        first, further = self.winner, self.further()
        if further is None:
            return first or self.go(self.field.plan(self.bounds))
        try:
            return self.go(further)
        except JobAborted:
            if first is None:
                raise
            return first  # the run was stopped, but it has a winner

    def first(self, bounds: Budget | None = None) -> Winner | None:
        """Promote the best of what is compiled, if anything is, within `bounds`. See `tune`."""
        self.winner = self.promoted()
        if self.effort is Effort.RECHECK and (checked := self.winner or self.recheck()):
            return checked
        self.field = self.enumerate()
        plan = self.field.plan(bounds or self.bounds)
        if self.winner is None and (plan.most_kernels or not self.field.order):
            self.go(plan)
        return self.winner

    def more(self) -> Winner | None:
        """Measure what a first look left out of the compiled kernels. See `tune`."""
        plan, before = self.field.plan(self.bounds), len(self.trials)
        self.screen(plan)
        return self.winner if len(self.trials) == before else self.promote(self.finals(plan.budget))

    def further(self) -> Proposals | None:
        """The go with kernels that are not compiled yet; None if it promises nothing."""
        speedup = self.winner.speedup if self.winner else None
        return self.field.further(self.bounds, speedup.median if speedup else None)

    def again(self, built: Sequence[Built]) -> Winner:
        """Measure kernels that were compiled since; promote the best of the run. See `tune`."""
        for item in built:
            self.packs.add(item)
        names = {item.kernel.name for item in built}
        trials = min(self.bounds.trials, 2 * len(names) + self.bounds.batch)
        return self.go(self.field.among(names, replace(self.bounds, trials=trials)))

    def promoted(self) -> Winner | None:
        """The winner that an earlier attempt at the job promoted before it died, if any."""
        if self.job is None:
            return None
        history = self.store.history(self.problem, self.device.model.slug)
        return next((winner for winner in history if winner.job == self.job), None)

    def recheck(self) -> Winner | None:
        """The winner of finals among the known top candidates; None if they do not suffice.

        Can be stopped between two kernels that are compiled, and before the finals, which take
        seconds.
        """
        slug, places = self.device.model.slug, self.bounds.finalists
        chosen = top_candidates(self.store, self.problem, slug, self.candidates(), places)
        if not chosen:
            return None
        self.planned = len(chosen)
        self.kernels = len({candidate.kernel.name for candidate in chosen})
        self._say(Step.ENUMERATE, 0, len(chosen), f"{len(chosen)} candidates are measured again")
        self.baseline_kernels = self.device.baseline_kernels(self.problem)
        with closing(self._ready(chosen)) as batches:
            for _ in batches:
                if self.should_stop():
                    raise JobAborted("stopped before the finals; finished kernels are kept")
        chosen = renewed(chosen, self.problem, self.device, self.packs)
        finals = self._hold(chosen, self.bounds)
        if chosen[0] not in finals.candidates:  # the present winner failed: only a search helps
            return None
        for trial in self._final_trials(finals):
            self._keep(trial)
        return self.promote(finals)

    def candidates(self) -> list[Candidate]:
        """What may be measured, in no order. See `tune`."""
        if not self.offered:
            level, builder = self.bounds.level, self.builder if self.compiled_only else None
            self.offered = offered(self.problem, self.device, level=level, built_by=builder)
        return self.offered

    def enumerate(self) -> Field:
        """The candidates, most promising first."""
        candidates = self.candidates()
        self.baseline_kernels = self.device.baseline_kernels(self.problem)
        kernels = {candidate.kernel.name: candidate.kernel for candidate in candidates}
        count = len(candidates)
        self._say(Step.ENUMERATE, 0, count, f"{count} candidates of {len(kernels)} kernels")
        built = None  # nothing has to be compiled
        if self.builder is not None and self.device.needs_packs and not self.compiled_only:
            built = {name for name, kernel in kernels.items() if self.builder.has(kernel)}
            if self.winner is not None:  # promoted before a restart: what came later is left
                built &= {trial.candidate.kernel.name for trial in self.trials.values()}
        return field_of(
            candidates,
            predictions(self.problem, candidates, self.device.model, self.ranker),
            self.bounds,
            near=near_winners(self.store, self.problem, self.device.model.slug),
            default=self.baseline_kernels,
            built=built,
        )

    def go(self, plan: Proposals) -> Winner:
        """Measure the plan's proposals, and promote the best candidate measured so far."""
        self.screen(plan)
        return self.promote(self.finals(plan.budget))

    def screen(self, plan: Proposals) -> None:
        self.kernels = len(self.packs) + plan.most_kernels
        self.screen_kernels(plan)
        self.screen_launches(plan)
        self.screen_library(plan.budget)

    def screen_kernels(self, plan: Proposals) -> None:
        """Measure the most promising kernels, each with its most promising launch."""
        while leaders := plan.kernels(self._times()):
            self.planned += len(leaders)
            with closing(self._ready(leaders)) as batches:  # compilers end with the run, at once
                for batch in batches:
                    self._screen(batch, plan.budget)
            self._screen_spoilt(plan.budget)

    def screen_launches(self, plan: Proposals) -> None:
        """Measure further launches of the kernels that did best."""
        while launches := plan.launches(self._times()):
            self.planned += len(launches)
            left = [self.packs.contender(c) for c in launches if c.key not in self.trials]
            self._screen(left, plan.budget)
            self._screen_spoilt(plan.budget)

    def screen_library(self, bounds: Budget) -> None:
        """Measure cuBLASLt's own algorithms, once a run."""
        kernel = library_kernel(self.problem, self.device)
        if kernel is None or kernel.name in self.library:
            return
        self.library.add(kernel.name)
        library = Library(
            problem=self.problem,
            kernel=kernel,
            device=self.device,
            packs=self.packs,
            budget=bounds,
            tried=self.trials,
        )
        served = self.store.winner(self.problem, self.device.model.slug)
        for contenders in library.batches(self._leaders, served):
            self.planned += len(contenders)
            self._screen(contenders, bounds)

    def finals(self, bounds: Budget) -> Finals:
        measured = [trial.candidate for trial in self._leaders()]
        chosen = finalists(measured, bounds.finalists)
        before = self.winner.candidate if self.winner else None
        if before in measured:
            chosen = [before, *(candidate for candidate in chosen if candidate != before)]
        if not chosen and self.trials:
            reasons = sorted({t.failure.message for t in self.trials.values() if t.failure})
            raise NoLegalCandidate(
                f"no candidate for {self.problem} survived: " + "; ".join(reasons[:3])
            )
        return self._hold(chosen, bounds)

    def _hold(self, chosen: Sequence[Candidate], bounds: Budget) -> Finals:
        """Finals of these candidates, fastest first, and the default; their trials are stored."""
        self._say(Step.FINALS, 0, len(chosen), f"{len(chosen)} finalists and the default")
        contenders = [self.packs.contender(candidate) for candidate in chosen]
        finals = hold_finals(self.device, self.problem, contenders, bounds.policy)
        self.store.add_trials(list(self._final_trials(finals)))
        return finals

    def promote(self, finals: Finals) -> Winner:
        decision = replace(decide(finals), baseline_kernels=self.baseline_kernels)
        order = self.problem.operation.summation
        if order is not None and decision.runs is None:
            reasons = sorted({failure.message for _, failure in finals.failures})
            raise NoLegalCandidate(
                f"no kernel adds up {self.problem} in the order {order}"
                + "".join(f"; {reason}" for reason in reasons[:3])
            )
        winner = self.store.promote(
            Winner(
                **decision.decided(),
                problem=self.problem,
                device=self.device.model,
                environment=self.device.environment,
                replayed=self.device.replayed,
                pack=self.packs.hash(decision.candidate) if decision.candidate else None,
                job=self.job,
            )
        )
        self.winner = winner
        self._say(Step.PROMOTE, self.planned, self.planned, verdict(decision))
        return winner

    def _ready(self, leaders: Sequence[Candidate]) -> Generator[list[Contender], None, None]:
        """Batches of contenders, each as soon as its kernels are built."""
        todo = {c.kernel.name: c for c in leaders if c.key not in self.trials}
        if self.builder is None or not self.device.needs_packs:
            yield [Contender(candidate=c) for c in todo.values()]
            return
        # Packs of finished trials are needed again in the finals; those are built already.
        kernels = [c.kernel for c in leaders]
        if contenders := self._contenders(self.packs.built(kernels), todo):
            yield contenders
        missing = self.packs.missing(kernels)
        with closing(in_batches(self.builder, missing, self.should_stop)) as batches:
            for built in batches:
                contenders = self._contenders(built, todo)
                count = len(self.packs)
                self._say(Step.COMPILE, count, self.kernels, f"{count} kernels built")
                if contenders:
                    yield contenders

    def _contenders(self, built: list[Built], todo: dict[str, Candidate]) -> list[Contender]:
        """Contenders for the candidates of `todo` that were built; the others fail as trials."""
        contenders = []
        for item in built:
            self.packs.add(item)
            if (candidate := todo.get(item.kernel.name)) is None:
                continue
            if item.failure is not None:
                failed = self._trial(candidate, Phase.SCREEN)
                self._record(replace(failed, failure=item.failure))
            else:
                contenders.append(self.packs.as_built(candidate))
        return contenders

    def _screen(self, contenders: Sequence[Contender], bounds: Budget) -> None:
        if not contenders:
            return
        for trial in self.device.screen(self.problem, contenders, bounds.policy):
            key, candidate = trial.candidate.key, trial.candidate
            if trial.failure and key not in self.spoilt and self.packs.is_damaged(candidate):
                self.spoilt[key] = candidate
                continue
            self._record(replace(trial, job=self.job))
            self._say(Step.SCREEN, len(self.trials), self.planned, "")
            if self.should_stop():
                raise JobAborted(f"stopped; {len(self.trials)} trials are kept")

    def _screen_spoilt(self, bounds: Budget) -> None:
        """Screen those again that failed because of a damaged pack; a second failure counts."""
        again = [c for c in self.spoilt.values() if c.key not in self.trials]
        self._screen([self.packs.contender(candidate) for candidate in again], bounds)

    def _record(self, trial: Trial) -> None:
        self.store.add_trial(trial)
        self._keep(trial)

    def _keep(self, trial: Trial) -> None:
        self.trials[trial.candidate.key] = trial
        if trial.measured and (self.fastest is None or _speed(trial) < _speed(self.fastest)):
            self.fastest = trial

    def _times(self) -> dict[str, float]:
        return {key: _speed(trial)[0] for key, trial in self.trials.items() if trial.measured}

    def _leaders(self) -> list[Trial]:
        return sorted((trial for trial in self.trials.values() if trial.measured), key=_speed)

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

    def _say(self, step: Step, done: int, total: int, message: str) -> None:
        us, best = _speed(self.fastest) if self.fastest else (None, None)
        if self.winner is not None:
            runs, us = self.winner.runs, self.winner.runs_us
            best = runs.key if runs else self.problem.operation.default
        recorded = self.device.model.name if self.device.replayed else ""
        self.on_event(
            Progress(
                phase=step,
                done=done,
                total=total,
                best_us=us,
                best=best,
                recorded=recorded,
                message=message,
            )
        )


def _speed(trial: Trial) -> tuple[float, str]:
    assert trial.statistics is not None  # noqa: S101 - a measured trial has them
    return trial.statistics.median_us, trial.candidate.key
