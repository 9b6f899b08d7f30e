"""The answer of a lookup: the winner, its measurements, and what it was compared with.

These types are the JSON of `GET /best` field by field; `msgspec` converts both ways.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum

from gemmsmith.core.config import Config, Match, Use
from gemmsmith.core.device import DeviceModel, Environment, recording_of
from gemmsmith.core.plain import Plain
from gemmsmith.core.problem import Problem
from gemmsmith.showing import line, table


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistics:
    """Time per launch in microseconds: median and 95% bootstrap interval of the median."""

    median_us: float
    ci_low_us: float
    ci_high_us: float
    samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """A paired ratio: median over rounds, with its 95% bootstrap interval. Above 1 is faster."""

    median: float
    ci_low: float
    ci_high: float


class Regime(StrEnum):
    """Conditions under which candidates and the default are timed against each other."""

    SUSTAINED = "sustained"  # never idle: large products run at the power limit
    BOOST = "boost"  # rested after each replay: the clock is free
    INTERLEAVED = "interleaved"  # between other kernels, where launches cannot hide in each other


@dataclass(frozen=True, kw_only=True, slots=True)
class InRegime:
    """The winner's measurements in one regime of the finals.

    Attributes:
        speedup: the default's time over the candidate's time, paired; None if the default could
            not be timed.
        median_us, default_us: medians of one launch of the candidate and of the default.
    """

    regime: Regime
    speedup: Ratio | None
    median_us: float
    default_us: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Correctness:
    """The error of the output against an FP32 reference with the same inputs.

    Attributes:
        error: ‖D - R‖ / ‖R‖ (Frobenius norms).
        max_error: largest |D - R| over the largest |R|.
        tolerance: bound that `error` had to meet.
        repeatable: two runs gave the same bits.
    """

    error: float
    max_error: float
    tolerance: float
    repeatable: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """State of the GPU while it was measured, from NVML; medians over the rounds.

    `throttle` lists NVML's throttle reasons that were active in any round.
    """

    sm_clock_mhz: float
    power_w: float
    temperature_c: float
    throttle: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Answer(Plain):
    """The answer to `GET /best`.

    Attributes:
        problem: the requested problem.
        match: how `measured` relates to `problem`.
        measured: the problem that was measured; equals `problem` for an exact match, None for a
            predicted answer.
        distance: 0 for exact, None for predicted; else the log2 distance that `service` documents.
        use: whether to run `config` or torch's own operator; for a predicted match, and for most
            nearest ones, the latter (`gemmsmith.core.neighbours`).
        config: the best candidate, present even if the default is served.
        statistics, baseline: of the candidate and of the default, from the same paired rounds.
        speedup: baseline time over candidate time, paired.
        ties: keys of candidates whose time does not differ from the winner's beyond noise.
        replayed: whether it was measured on a recorded GPU.
        environment, revision, promoted_at: of the winner; None for a predicted answer. The
            revision increases with every promotion for this problem and device.
        baseline_kernels: names of the kernels of one launch of the default, in order; empty if
            unknown.
        stale: measured under another driver, CUDA, CUTLASS or cuBLAS than any GPU of this model
            runs now; it will be measured again when a worker is idle.
        pinned: whether a user pinned this revision, so that promotions do not replace it.
        regimes: the ratio in each regime in which the candidate was measured; `speedup` is the
            least of them. Empty if only the least was stored (before gemmsmith 0.2).
        power_penalty: the factor that the mean of `regimes` must exceed, because the candidate
            draws more power than the default in a program at the power limit; 1 if it is
            faster than any penalty, None if it was not measured.
        predicted_us: the cost model's time for one launch of `config` in microseconds; None if
            the answer was measured.
    """

    problem: Problem
    match: Match
    measured: Problem | None
    distance: float | None
    use: Use
    config: Config | None
    statistics: Statistics | None
    baseline: Statistics | None
    speedup: Ratio | None
    correctness: Correctness | None
    conditions: Conditions | None
    ties: tuple[str, ...]
    device: DeviceModel
    environment: Environment | None
    revision: int | None
    promoted_at: str | None
    replayed: bool
    baseline_kernels: tuple[str, ...] = ()
    power_penalty: float | None = None
    regimes: tuple[InRegime, ...] = ()
    predicted_us: float | None = None
    stale: bool = False
    pinned: bool = False

    @property
    def tflops(self) -> float | None:
        """TFLOP/s of the candidate on the measured problem; None if nothing was measured."""
        return self._tflops(self.statistics)

    @property
    def baseline_tflops(self) -> float | None:
        """As `tflops`, for the default."""
        return self._tflops(self.baseline)

    def _tflops(self, times: Statistics | None) -> float | None:
        if times is None or self.measured is None or times.median_us <= 0:
            return None
        return self.measured.flops / times.median_us / 1e6

    @property
    def recorded(self) -> str:
        """Name of the GPU model whose recorded times these are; empty if a GPU was measured."""
        return self.device.name if self.replayed else ""

    @property
    def _rows(self) -> dict[str, str | None]:
        """The table of the answer: values by name, None if unknown.

        What is served comes first. A candidate that lost to the default is below it.
        """
        near = self.measured if self.match is Match.NEAREST else None
        predicted = None if self.predicted_us is None else f"{self.predicted_us:.1f} µs expected"
        marks = [name for name in ("stale", "pinned") if getattr(self, name)]
        ours = self._timing(self.statistics, self.tflops)
        default = self._timing(self.baseline, self.baseline_tflops)
        kernel = None if self.config is None else self.config.kernel.name
        launch = None if self.config is None else self.config.launch.key
        rejected = self.use.is_default and ours is not None
        served: dict[str, str | None] = {
            "device": self.device.slug,
            "match": self.match.value if near is None else f"{self.match.value}: {near}",
            "run": self.use.value,
        }
        if rejected:
            compared = {
                "time": default,
                "best candidate": kernel,
                "its launch": launch,
                "its time": ours,
                "its speedup": _gain(self.speedup),
            }
        else:
            compared = {
                "kernel": kernel,
                "launch": launch,
                "time": ours or predicted,
                "default": default,
                "speedup": _gain(self.speedup),
            }
        return (
            served
            | compared
            | {
                "revision": None if self.revision is None else str(self.revision),
                "marks": ", ".join(marks) or None,
            }
        )

    def __repr__(self) -> str:
        rows = self._rows
        parts = [rows.get(name) for name in ("match", "run", "time", "speedup", "marks")]
        return line(f"<Answer {self.problem}: {', '.join(part for part in parts if part)}>")

    def _repr_html_(self) -> str:
        return table(str(self.problem), self._rows.items())

    def _timing(self, statistics: Statistics | None, tflops: float | None) -> str | None:
        if statistics is None:
            return None
        rate = "" if tflops is None else f" ({tflops:.1f} TFLOP/s)"
        source = f", {recording_of(self.recorded)}" if self.recorded else ""
        return f"{statistics.median_us:.1f} µs{rate}{source}"


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class TunedAnswer(Answer):
    """The result of a tuning job. Another winner may be served.

    Attributes:
        served: the answer of lookups: this revision; or a measured one, if the job ran on a
            recorded GPU; or one that a user has pinned.
    """

    served: Answer

    @classmethod
    def of(cls, own: Answer, served: Answer) -> TunedAnswer:
        return cls(**{field.name: getattr(own, field.name) for field in fields(own)}, served=served)

    @property
    def is_served(self) -> bool:
        """Whether lookups answer with this result."""
        return self.served.revision == self.revision

    @property
    def _rows(self) -> dict[str, str | None]:
        served = None if self.is_served else line(repr(self.served))
        return super(TunedAnswer, self)._rows | {"served instead": served}

    def __repr__(self) -> str:
        text = Answer.__repr__(self)
        return text if self.is_served else f"{text[:-1]}; served instead: {self.served!r}>"


def _gain(speedup: Ratio | None) -> str | None:
    if speedup is None:
        return None
    return f"{speedup.median:.3f}× the default [{speedup.ci_low:.3f}, {speedup.ci_high:.3f}]"
