"""What measuring produces: trials, paired finals, and the winner promoted from them.

These are the records that flow from devices through search into the store; all are immutable.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from gemmsmith.answers.answer import Conditions, Correctness, InRegime, Ratio, Regime, Statistics
from gemmsmith.answers.history import Origin
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.config import Use
from gemmsmith.core.device import DeviceModel, Environment
from gemmsmith.core.problem import Problem
from gemmsmith.signing import Signature


class Phase(StrEnum):
    """Which part of a tuning run measured the trial."""

    SCREEN = "screen"  # few samples, to sort the field
    FINAL = "final"  # paired rounds against the other finalists and cuBLAS


class FailureKind(StrEnum):
    """Why a candidate has no time."""

    COMPILE = "compile"  # the kernel does not compile
    REFUSED = "refused"  # can_implement says no
    LAUNCH = "launch"  # the CUDA runtime reported an error that left the process usable
    WRONG = "wrong"  # the output differs from the FP32 reference by more than the tolerance
    NON_FINITE = "non_finite"  # NaN or infinity where the reference is finite
    UNTOUCHED = "untouched"  # part of the output still holds the poison
    NOT_REPEATABLE = "not_repeatable"  # a schedule that claims a fixed order gave other bits
    CRASHED = "crashed"  # the measuring process died (illegal access, abort)
    HUNG = "hung"  # no progress within the time limit; the process was killed


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a trial failed, with what the compiler, CUDA or the check said."""

    kind: FailureKind
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One candidate's outcome on one problem: `statistics`, or the `failure` that prevented them.

    Attributes:
        samples_us: every time per launch that `statistics` was computed from.
        cost_s: wall time the trial took, verification included.
        job: identifier of the job that ordered it, if one did.
    """

    problem: Problem
    candidate: Candidate
    device: DeviceModel
    environment: Environment
    phase: Phase
    statistics: Statistics | None = None
    samples_us: tuple[float, ...] = ()
    failure: Failure | None = None
    correctness: Correctness | None = None
    conditions: Conditions | None = None
    workspace_bytes: int = 0
    cost_s: float = 0.0
    replayed: bool = False
    job: str | None = None

    @property
    def measured(self) -> bool:
        """Whether the candidate ran, was verified and has a time."""
        return self.failure is None and self.statistics is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounds:
    """Paired rounds of a few candidates and cuBLAS: in each round every one was timed once.

    `samples_us[i][r]` is candidate i's time per launch in round r; `baseline_us[r]` is cuBLAS's
    in the same round. Rounds whose clock fell below the run's own median are not in here. A
    candidate that took no part has no samples.
    """

    samples_us: tuple[tuple[float, ...], ...]
    baseline_us: tuple[float, ...]
    conditions: Conditions


@dataclass(frozen=True, kw_only=True, slots=True)
class Rival:
    """Another way of torch's that took part in the sustained rounds: time per launch in each.

    `is_to_be_beaten`: no candidate is recommended that does not gain on it as well.
    """

    name: str
    samples_us: tuple[float, ...]
    is_to_be_beaten: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class InSpread:
    """Medians where a grouped problem's tokens are spread in one way only.

    `times_us[i]` is candidate i's, `default_us` that of torch's default.
    """

    spread: str
    times_us: tuple[float, ...]
    default_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Finals(Rounds):
    """The sustained rounds of the finalists, the GPU never idle, and those of other states.

    Attributes:
        boost: as much rest as work, of those that are ahead of cuBLAS in the sustained rounds.
        interleaved: between other kernels, of those that are ahead in the other two; their time is
            cuBLAS's and what the whole takes longer with them.
        power_penalties: what candidate i's time counts in a program at the power limit, where
            whoever draws more power slows its neighbours: 1.05 if it costs as much as 5% more time.
            None: not known. Empty: no power limit was met.
        rivals: what programs run that know more than the default needs; they decide nothing.
        spreads: of grouped problems, the sustained time by spread.

    A state that nobody was left for is None.
    """

    problem: Problem
    candidates: tuple[Candidate, ...]
    correctness: tuple[Correctness, ...]
    workspace_bytes: tuple[int, ...]
    discarded_rounds: int = 0
    failures: tuple[tuple[Candidate, Failure], ...] = ()
    boost: Rounds | None = None
    interleaved: Rounds | None = None
    power_penalties: tuple[float | None, ...] = ()
    rivals: tuple[Rival, ...] = ()
    spreads: tuple[InSpread, ...] = ()

    @property
    def regimes(self) -> dict[Regime, Rounds]:
        """The rounds of every regime that was measured."""
        found = {
            Regime.SUSTAINED: self,
            Regime.BOOST: self.boost,
            Regime.INTERLEAVED: self.interleaved,
        }
        return {regime: rounds for regime, rounds in found.items() if rounds is not None}

    @property
    def states(self) -> tuple[Rounds, ...]:
        """The rounds of every regime, as a sequence."""
        return tuple(self.regimes.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class WinnerSignature(Signature):
    """A signature of a winner's statement, see `tuner.store.statement`.

    Attributes:
        pack: hash of the pack that was measured, which the signature covers too.
    """

    pack: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AgainstRival:
    """A rival's median, and the winner's paired speed-up over it; both sustained."""

    name: str
    median_us: float
    speedup: Ratio


@dataclass(frozen=True, kw_only=True, slots=True)
class OnSpread:
    """Medians of the winner and of the default where tokens are spread in one way only."""

    spread: str
    median_us: float
    default_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Winner:
    """The promoted trial for (problem, device model).

    `candidate` is the best CUTLASS candidate even where `use` is cuBLAS, so that the record
    shows how close it came; it is None only where no candidate survived verification.
    `baseline_kernels` names what one launch of cuBLAS ran, in order; empty where not known.
    `power_penalty` is by what factor the candidate must be faster to make up for its power; None
    where it was not measured.
    `signature` is whoever's measured it; None where nobody signed.
    `stale`, `pinned`, `origin` and `digest` (of what the store was given) are what the store says
    of a winner that it gives; to one that it is given they mean nothing.
    `rivals` and `spreads` are what the finals hold of the candidate beside the default's rounds.
    """

    problem: Problem
    device: DeviceModel
    environment: Environment
    use: Use
    candidate: Candidate | None
    statistics: Statistics | None
    baseline: Statistics | None
    speedup: Ratio | None
    correctness: Correctness | None
    conditions: Conditions | None
    ties: tuple[str, ...] = ()
    baseline_kernels: tuple[str, ...] = ()
    power_penalty: float | None = None
    regimes: tuple[InRegime, ...] = ()
    rivals: tuple[AgainstRival, ...] = ()
    spreads: tuple[OnSpread, ...] = ()
    replayed: bool = False
    pack: str | None = None
    revision: int = 0
    promoted_at: str = ""
    job: str | None = None
    stale: bool = False
    pinned: bool = False
    signature: WinnerSignature | None = None
    origin: Origin = field(default=Origin.MEASURED, compare=False)
    digest: str = field(default="", compare=False)

    @property
    def runs(self) -> Candidate | None:
        """What callers run; None where they run the default."""
        return None if self.use.is_default else self.candidate

    @property
    def saving_us(self) -> float | None:
        """What a launch takes less than the default; from the paired ratio, as clocks wander."""
        if self.statistics is None or self.speedup is None:
            return None
        return self.statistics.median_us * (self.speedup.median - 1)

    @property
    def time_us(self) -> float | None:
        """What a launch of the candidate takes, at the median."""
        return None if self.statistics is None else self.statistics.median_us
