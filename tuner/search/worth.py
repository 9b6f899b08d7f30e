"""Which kernels to compile next for several problems: those that save most per second of compiling.

Pure: expectations go in, kernels come out. A kernel counts for every problem that it may win, and
bears its share of a unit's fixed cost (`compile.plan.share`). What it saves is its expected
improvement: the model errs, so a kernel may turn out faster than what runs today even if that is
not expected. Each choice lowers what the next kernels can still save. Problems without any kernel
come first: until they have one, they have no answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log
from statistics import NormalDist

from gemmsmith.core.kernel import AnyKernel
from tuner.compile.plan import BASE_COST, VARIETY_COST, Family, alike, share
from tuner.search.exploration import NOISE

SPREAD = 0.1
"""Spread of the model's errors for the kernels of a problem, as a logarithm and without their mean:
0.096 for the 30 favourites at the median of 41 recorded problems (NVIDIA H200, 2026-11-21)."""

ROUND_S = 60.0
"""Seconds of compiling, by the costs of `compile.plan`, after which what was measured decides what
to compile next. A unit then has two or three varieties, and a first answer does not wait for long.
"""

REPAID_S = 3600.0
"""Time in the problems after which compiling must be repaid: a program that is tuned runs for an
hour at least. So kernels are compiled that are expected to save more of that hour than they take.
"""

_NORMAL = NormalDist()


@dataclass(frozen=True, kw_only=True, slots=True)
class Prospect:
    """What compiling may save in one problem.

    Attributes:
        calls: how often it runs, or any other weight of its microseconds.
        us: microseconds of a call as things are: of its winner, else of the default.
        answered: whether it has a winner.
        expected: microseconds expected of each kernel that is not compiled, by name.
        wishes: kernels that it would compile if it were alone.
    """

    calls: float
    us: float
    answered: bool
    expected: Mapping[str, float]
    wishes: Sequence[AnyKernel]

    def saving_us(self, name: str, us: float) -> float:
        """Expected saving of a kernel, all calls together, if a call takes `us` without it."""
        expected = self.expected.get(name)
        return 0.0 if expected is None else self.calls * improvement(us, expected)

    def may_use(self, kernel: AnyKernel) -> bool:
        """Whether the kernel is worth a measurement here."""
        saving_us = self.saving_us(kernel.name, self.us)
        return kernel in self.wishes or saving_us > self.calls * self.us * NOISE


def improvement(us: float, expected: float) -> float:
    """The mean of max(0, us - t), where log t is normal around log `expected`."""
    lead = log(us / expected) / SPREAD
    # The mean of t itself is `expected`: its median is a little less.
    low, high = lead - SPREAD / 2, lead + SPREAD / 2
    return us * _NORMAL.cdf(high) - expected * _NORMAL.cdf(low)


def next_round(prospects: Sequence[Prospect], parallel: int) -> list[AnyKernel]:
    """The kernels to compile next, most worth first; empty if none pays for its seconds.

    Args:
        prospects: of all problems, most time at stake first.
        parallel: units that are compiled at once.
    """
    choice = _Choice(prospects)
    room = parallel * ROUND_S
    for prospect in prospects:
        wishes = {kernel.name: kernel for kernel in prospect.wishes}
        if choice.seconds < room and wishes and not prospect.answered and not choice.has(wishes):
            choice.take(choice.best(wishes))
    needed = len(choice.taken)
    whole_us = sum(prospect.calls * prospect.us for prospect in prospects)
    saved_s = 0.0
    left = {kernel.name: kernel for p in prospects for kernel in p.wishes}
    while choice.seconds < room and (left := choice.without(left)):
        kernel = choice.best(left)
        saves_s = REPAID_S * choice.saving_us(kernel.name) / whole_us
        if saves_s <= choice.cost(kernel) / parallel:
            break
        saved_s += saves_s
        choice.take(kernel)
    # However few the kernels are, the round takes as long as one unit.
    if not needed and saved_s <= max(choice.seconds / parallel, BASE_COST + VARIETY_COST):
        return []
    return list(choice.taken.values())


class _Choice:
    """What was chosen so far, and what that leaves to save."""

    def __init__(self, prospects: Sequence[Prospect]) -> None:
        self._prospects = prospects
        self._us = [prospect.us for prospect in prospects]
        self._families: set[Family] = set()
        self._savings: dict[str, float] = {}  # those that no choice has changed since
        self.taken: dict[str, AnyKernel] = {}
        self.seconds = 0.0

    def has(self, kernels: Mapping[str, AnyKernel]) -> bool:
        return not self.taken.keys().isdisjoint(kernels)

    def without(self, kernels: Mapping[str, AnyKernel]) -> dict[str, AnyKernel]:
        """Those of the kernels that were not chosen yet."""
        return {name: kernel for name, kernel in kernels.items() if name not in self.taken}

    def best(self, kernels: Mapping[str, AnyKernel]) -> AnyKernel:
        """The kernel that saves most per second; of equals the first by name."""
        name = min(
            kernels, key=lambda name: (-self.saving_us(name) / self.cost(kernels[name]), name)
        )
        return kernels[name]

    def cost(self, kernel: AnyKernel) -> float:
        """Seconds of one core."""
        return share(known=alike(kernel) in self._families)

    def saving_us(self, name: str) -> float:
        if name not in self._savings:
            self._savings[name] = sum(self._in_problems(name))
        return self._savings[name]

    def _in_problems(self, name: str) -> Iterator[float]:
        for prospect, us in zip(self._prospects, self._us, strict=True):
            yield prospect.saving_us(name, us)

    def take(self, kernel: AnyKernel) -> None:
        self.seconds += self.cost(kernel)
        for i, saving in enumerate(self._in_problems(kernel.name)):
            if saving > 0:
                self._us[i] -= saving / self._prospects[i].calls
        self._savings.clear()
        self._families.add(alike(kernel))
        self.taken[kernel.name] = kernel
