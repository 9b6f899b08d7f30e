"""What measuring produces: trials, paired finals, and the winner promoted from them.

These are the records that flow from devices through search into the store; all are immutable.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from gemmsmith.answers.answer import Conditions, Correctness, InRegime, Ratio, Regime, Statistics
from gemmsmith.answers.history import Origin
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.config import Use
from gemmsmith.core.device import DeviceModel, Environment
from gemmsmith.core.problem import Problem
from gemmsmith.signing import Signature

UNREADABLE = "unreadable"
"""The digest of a winner whose row cannot be read; no other winner has it."""


class Phase(StrEnum):
    """Which part of a tuning run measured the trial."""

    SCREEN = "screen"  # few samples, to sort the candidates
    FINAL = "final"  # paired rounds against the other finalists and the default


class FailureKind(StrEnum):
    """Why a candidate has no time."""

    COMPILE = "compile"  # the kernel does not compile
    REFUSED = "refused"  # can_implement says no
    LAUNCH = "launch"  # the CUDA runtime reported an error that left the process usable
    WRONG = "wrong"  # the output differs from the FP32 reference by more than the tolerance
    NON_FINITE = "non_finite"  # NaN or infinity where the reference is finite
    UNTOUCHED = "untouched"  # part of the output still holds the poison
    NOT_REPEATABLE = "not_repeatable"  # a schedule that claims a fixed order gave other bits
    OTHER_BITS = "other_bits"  # a row's bits depend on M, or differ from those of its order
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
        return self.failure is None and self.statistics is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounds:
    """Paired rounds of a few candidates and the default: each was timed once in every round.

    `samples_us[i][r]` is candidate i's time per launch in round r; `baseline_us[r]` is the
    default's in the same round. Rounds whose clock fell below the run's own median are left out.
    A candidate that took no part has no samples.
    """

    samples_us: tuple[tuple[float, ...], ...]
    baseline_us: tuple[float, ...]
    conditions: Conditions


@dataclass(frozen=True, kw_only=True, slots=True)
class Rival:
    """Another way of torch's that took part in the sustained rounds: time per launch in each.

    `is_to_be_beaten`: a candidate must be faster than it, too, to be recommended.
    """

    name: str
    samples_us: tuple[float, ...]
    is_to_be_beaten: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class InSpread:
    """Medians of a grouped problem over the operand sets of one spread of tokens.

    `times_us[i]` is candidate i's, `default_us` the default's.
    """

    spread: str
    times_us: tuple[float, ...]
    default_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Finals(Rounds):
    """The sustained rounds of the finalists, the GPU never idle, and those of other regimes.

    Attributes:
        boost: as much rest as work, for candidates that beat the default in the sustained rounds;
            None if there were none.
        interleaved: between other kernels, for candidates that beat the default in both other
            regimes; None if there were none. A candidate's time is the default's plus what the
            whole sequence takes longer with the candidate.
        power_penalties: the factor on candidate i's time in a program at the power limit, where a
            kernel that draws more power slows the kernels around it: 1.05 if it costs as much as
            5% more time. None if it was not measured. Empty if the power limit was not reached.
        rivals: other ways of torch's; only those that must be beaten take part in the decision.
        spreads: of grouped problems, the sustained time by spread.
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
        rounds = {
            Regime.SUSTAINED: self,
            Regime.BOOST: self.boost,
            Regime.INTERLEAVED: self.interleaved,
        }
        return {regime: rounds for regime, rounds in rounds.items() if rounds is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class WinnerSignature(Signature):
    """A signature of a winner's statement, see `tuner.store.statement`.

    Attributes:
        pack: hash of the pack that was measured, which the signature covers too.
    """

    pack: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AgainstRival:
    """A rival's median and the candidate's paired speed-up over it, in the sustained rounds."""

    name: str
    median_us: float
    speedup: Ratio


@dataclass(frozen=True, kw_only=True, slots=True)
class OnSpread:
    """Medians of the candidate and of the default over the operand sets of one spread."""

    spread: str
    median_us: float
    default_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What the finals decided for one problem, with the measurements that justify it.

    Attributes:
        use: what callers run.
        candidate: the best candidate, even if the default stays, so that the record shows how
            close it came. None if no candidate survived verification.
        statistics, baseline: of the candidate and of the default, from the same paired rounds:
            those of the regime in which the candidate gains least, as are `speedup` and
            `conditions`.
        ties: keys of candidates whose time does not differ from the winner's beyond noise.
        baseline_kernels: names of the kernels of one launch of the default, in order; empty if
            unknown.
        power_penalty: the factor by which the candidate must be faster to make up for its power;
            None if it was not measured.
        rivals, spreads: of the candidate, in the sustained rounds.
    """

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

    @property
    def runs(self) -> Candidate | None:
        return None if self.use.is_default else self.candidate

    @property
    def runs_us(self) -> float | None:
        """Microseconds of what callers run: the candidate, or the default if that stays."""
        statistics = self.baseline if self.runs is None else self.statistics
        return None if statistics is None else statistics.median_us

    @property
    def time_us(self) -> float | None:
        return None if self.statistics is None else self.statistics.median_us

    @property
    def saving_us(self) -> float | None:
        """What a launch takes less than the default; from the paired ratio, as clocks wander."""
        if self.statistics is None or self.speedup is None:
            return None
        return self.statistics.median_us * (self.speedup.median - 1)

    def decided(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(Decision)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Winner(Decision):
    """A decision for (problem, device model) that was promoted, or is to be.

    Attributes:
        replayed: whether it was measured on a recorded GPU.
        pack: hash of the pack that holds the candidate's kernel.
        signature: by the installation that measured it; None if it is unsigned.
        stale, pinned, origin, digest: filled in by the store when it reads a winner, and ignored
            when it stores one; `digest` is that of the statement that was stored.
    """

    problem: Problem
    device: DeviceModel
    environment: Environment
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
