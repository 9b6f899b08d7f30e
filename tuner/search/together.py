"""Several problems tuned on one device: first what is compiled, then what is worth compiling.

All problems are measured with the kernels that are compiled, in the order they come in, and each
winner is promoted at once: first with the few trials of a quick effort, so that all have an answer
soon, then with those that their own effort allows. Meanwhile and then, kernels are compiled in
rounds for all problems together (`search.worth`), and a problem is measured again when those that
may win it are ready; its finals hold its former winner and the default. It ends when no kernel pays
for its seconds, or when `over` says so: answers stay, and finished packs too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log
from statistics import fmean

from gemmsmith.core.kernel import AnyKernel, CublasLtKernel
from gemmsmith.core.tuning import Effort
from tuner.compile import Builder, Built
from tuner.errors import DeviceError, JobAborted, NoGpu, NoLegalCandidate, TunerError
from tuner.search import demand
from tuner.search.budget import BUDGETS
from tuner.search.exploration import SOONEST_US
from tuner.search.offered import library_kernel
from tuner.search.packs import Compiling, StopSignal
from tuner.search.run import TuningRun
from tuner.search.worth import Prospect, next_round
from tuner.trial import Winner

_AHEAD = 32
"""Problems of which is checked, before the first one is measured, whether they have any kernel: for
the others compilers begin at once. A check takes 0.1 s (2026-11-26)."""


_DOUBT = 3
"""Kernels that must be measured before they say as much as the expectation does."""


@dataclass(kw_only=True, eq=False, slots=True)
class Member:
    """One of the problems.

    Attributes:
        calls: how often it runs; 0 if that is not known. If it is of none, all weigh alike.
        winner: its latest winner.
        error: why it has none, or none yet.
        seconds: how long it was measured; `answered` is the time until its first winner.
    """

    run: TuningRun
    calls: float = 0.0
    winner: Winner | None = None
    error: TunerError | None = None
    seconds: float = 0.0
    answered: float | None = None
    begun: bool = False
    quick: bool = False  # whether its own effort allows more than was measured of what is compiled
    wishes: dict[str, AnyKernel] = field(default_factory=dict)
    awaited: set[str] = field(default_factory=set)  # names of kernels that compile for it
    built: list[Built] = field(default_factory=list)  # and those that are ready, not measured yet

    def measure(self) -> None:
        """Measure what was built since the last time, or for the first time what is compiled."""
        began = time.monotonic()
        try:
            if not self.begun:
                self.begin()
            elif self.built:
                self.winner = self.run.again(self.built)
            else:
                self.quick = False
                self._measure_compiled(self.run.more)
            self.error = None
        except NoGpu:
            raise  # the next problem would fail for the same reason
        except (NoLegalCandidate, DeviceError, JobAborted) as error:
            self.error = error
        self.wishes = {k.name: k for k in self.run.packs.missing(list(self.wishes.values()))}
        self.built.clear()
        self.seconds += time.monotonic() - began
        if self.answered is None and self.winner is not None:
            self.answered = self.seconds

    def lacks_kernels(self) -> bool:
        """Whether nothing can be measured yet; False if its turn will show an error."""
        run = self.run
        if run.builder is None or not run.device.needs_packs or run.compiled_only:
            return False
        try:
            kernels = dict.fromkeys(candidate.kernel for candidate in run.candidates())
        except (NoLegalCandidate, DeviceError):
            return False
        return bool(kernels) and not any(map(run.builder.has, kernels))

    def begin(self) -> None:
        """Promote the best of what is compiled, if anything is, and choose what to compile."""
        self.begun = True
        # With the rounds of its own effort: fewer ones may prefer another of two near candidates.
        bounds = replace(BUDGETS[Effort.QUICK], policy=self.run.bounds.policy)
        self._measure_compiled(lambda: self.run.first(bounds if self.quick else None))

    def _measure_compiled(self, measure: Callable[[], Winner | None]) -> None:
        run = self.run
        run.library.clear()
        library = library_kernel(run.problem, run.device)
        if library is None or run.builder is None or run.builder.has(library):
            library = None
        else:
            run.library.add(library.name)  # as if it had been screened: its pack comes later
        self.winner = measure()
        if (further := run.further()) is not None:
            self.wishes = {c.kernel.name: c.kernel for c in further.kernels({})}
        # A re-check that has decided enumerates nothing, and searches for nothing.
        if library is not None and run.field.order and not run.compiled_only:
            run.library.discard(library.name)
            self.wishes[library.name] = library

    def _of_library(self, default_us: float) -> dict[str, float]:
        """A library's other algorithms are expected to be as fast as the one that it prefers."""
        library = (k.name for k in self.wishes.values() if isinstance(k, CublasLtKernel))
        return dict.fromkeys(library, default_us)

    def prospect(self) -> Prospect:
        run = self.run
        near = run.store.near_winners(run.problem, run.device.model.slug, demand.NEIGHBOURS)
        default_us = demand.default_us(run.problem, run.device.model, near)
        best_us = default_us - demand.saving_us(run.problem, run.device.model, near)
        return Prospect(
            calls=self.calls or 1 / default_us,
            us=default_us if self.winner is None else self.winner.runs_us or default_us,
            answered=self.winner is not None,
            expected=_expected(run, best_us) | self._of_library(default_us),
            wishes=list(self.wishes.values()),
        )


def _expected(run: TuningRun, best_us: float) -> dict[str, float]:
    """Microseconds expected of each kernel that was not built for the run.

    The model's, scaled so that its favourite takes `best_us`, as far as measurements do not differ.
    """
    predicted: dict[AnyKernel, float] = {}
    for candidate in run.field.order:  # fastest first
        us = max(run.field.predicted[candidate.key], SOONEST_US)
        predicted.setdefault(candidate.kernel, us)
    measured: dict[AnyKernel, float] = {}
    for trial in run.trials.values():
        if trial.statistics is not None:
            kernel, us = trial.candidate.kernel, trial.statistics.median_us
            measured[kernel] = min(us, measured.get(kernel, us))
    if not predicted:
        return {}
    errors = [log(best_us / min(predicted.values()))] * _DOUBT
    errors += [log(us / predicted[k]) for k, us in measured.items() if k in predicted]
    scale = exp(fmean(errors))
    missing = run.packs.missing(list(predicted))
    built = run.field.built or ()
    return {k.name: scale * predicted[k] for k in missing if k.name not in built}


class Together:
    """Tunes the members, most time at stake first.

    Args:
        builder: compiles in the background; None if nothing has to be compiled.
        over: true when no further measurement or compilation is to begin.
        on_begin: called before a member is measured.
        on_wait: called while compilers are waited for, with kernels done and of how many.
    """

    def __init__(
        self,
        members: Sequence[Member],
        *,
        builder: Builder | None,
        over: StopSignal,
        on_begin: Callable[[Member], None],
        on_wait: Callable[[int, int], None],
    ) -> None:
        self._members = members
        if len(members) > 1:
            for member in members:
                member.quick = member.run.effort is Effort.DEFAULT
        self._builder = builder
        self._over = over
        self._on_begin = on_begin
        self._on_wait = on_wait
        self._compiling: Compiling | None = None
        self._kernels = self._done = 0  # of the present round

    @property
    def saved_us(self) -> float:
        """What the winners so far save, all calls together, against the default."""
        return sum(
            (member.calls or 1.0) * (member.winner.saving_us or 0.0)
            for member in self._members
            if member.winner is not None and member.winner.runs is not None
        )

    def outcomes(self) -> Iterator[Member]:
        """Each member whenever it was measured: with a new winner, or an error.

        A member that has neither compiled kernels nor an error comes after its first kernels.

        Raises:
            TunerError: the device or the compiler does not work on this machine.
        """
        yield from self._look_ahead()
        try:
            while not self._over():
                self._take(wait=False)
                self._compile()
                if (member := self._next()) is not None:
                    self._on_begin(member)
                    before = member.winner
                    member.measure()
                    if member.winner is not before or member.error is not None:
                        yield member
                elif self._compiling is not None:
                    self._on_wait(self._done, self._kernels)
                    self._take(wait=True)
                else:
                    return
        except JobAborted:
            return  # it was over while compilers were waited for
        finally:
            if self._compiling is not None:
                self._compiling.close()

    def _look_ahead(self) -> Iterator[Member]:
        """Begin with the members for which nothing is compiled: they wait for compilers."""
        for member in self._members[:_AHEAD]:
            if self._over():
                return
            if member.lacks_kernels():
                self._on_begin(member)
                member.measure()
                if member.error is not None:
                    yield member

    def _next(self) -> Member | None:
        """The member to measure next.

        What is ready comes first, then members without an answer, then those quickly measured.
        """
        ready = (m for m in self._members if not m.begun or (m.built and not m.awaited))
        partly = (m for m in self._members if m.winner is None and m.built)
        quick = (m for m in self._members if m.quick and m.run.field.order)
        return next(ready, None) or next(partly, None) or next(quick, None)

    def _compile(self) -> None:
        """Start the next round, if no other runs and what it depends on was measured."""
        if self._builder is None or self._compiling is not None:
            return
        begun = [member for member in self._members if member.begun]
        wishing = [member for member in begun if member.wishes]
        if any(member.built for member in begun) or not wishing:
            return
        unanswered = any(member.winner is None for member in wishing)
        parallel = self._builder.parallel
        if len(begun) < len(self._members) and not unanswered and len(wishing) < parallel:
            return
        prospects = [member.prospect() for member in begun]
        kernels = next_round(prospects, parallel)
        for member, prospect in zip(begun, prospects, strict=True):
            member.awaited = {k.name for k in kernels if prospect.may_use(k)}
        if kernels:
            self._kernels, self._done = len(kernels), 0
            self._compiling = Compiling(self._builder, kernels)

    def _take(self, *, wait: bool) -> None:
        """Hand what was built to the members that wait for it."""
        if self._compiling is None:
            return
        for built in self._compiling.ready(self._over, wait=wait):
            self._done += 1
            for member in self._members:
                if built.kernel.name in member.awaited:
                    member.awaited.discard(built.kernel.name)
                    member.built.append(built)
        if self._compiling.finished:
            self._compiling = None
