"""From paired finals to a winner: who is fastest, who ties with it, and whether cuBLAS stays.

Invariants: the same finals always give the same winner (bootstrap intervals have a fixed seed,
ties fall to a fixed order), and CUTLASS is recommended only where the interval of its paired
speed-up lies wholly above 1, so an answer never makes a program slower.
"""

from __future__ import annotations

from dataclasses import dataclass

from gemmsmith.answer import Correctness, Ratio, Statistics, Use
from gemmsmith.kernel import TileScheduler
from gemmsmith.launch import Candidate
from tuner.measure.statistics import paired_ratio, summarize
from tuner.trial import Finals


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What the finals say. `ties` holds the keys that could not be told from the winner."""

    candidate: Candidate | None
    use: Use
    statistics: Statistics | None
    baseline: Statistics | None
    speedup: Ratio | None
    correctness: Correctness | None
    ties: tuple[str, ...] = ()


def reduces_across_blocks(candidate: Candidate) -> bool:
    """Whether thread blocks share an output tile, so that its reduction order is scheduled."""
    return candidate.kernel.scheduler is TileScheduler.STREAM_K


def decide(finals: Finals) -> Decision:
    """Choose among the finalists; with none left, cuBLAS stays the answer."""
    baseline = summarize(finals.baseline_us) if finals.baseline_us else None
    if not finals.candidates:
        return Decision(
            candidate=None,
            use=Use.CUBLAS,
            statistics=None,
            baseline=baseline,
            speedup=None,
            correctness=None,
        )
    stats = [summarize(samples) for samples in finals.samples_us]
    fastest = min(range(len(stats)), key=lambda i: (stats[i].median_us, finals.candidates[i].key))
    tied = [i for i in range(len(stats)) if i == fastest or _ties(finals, i, fastest)]
    chosen = min(tied, key=lambda i: _preference(finals, i))
    speedup = paired_ratio(finals.baseline_us, finals.samples_us[chosen]) if baseline else None
    wins = speedup is None or speedup.ci_low > 1.0
    return Decision(
        candidate=finals.candidates[chosen],
        use=Use.CUTLASS if wins else Use.CUBLAS,
        statistics=stats[chosen],
        baseline=baseline,
        speedup=speedup,
        correctness=finals.correctness[chosen],
        ties=tuple(finals.candidates[i].key for i in tied if i != chosen),
    )


def _ties(finals: Finals, i: int, fastest: int) -> bool:
    """Whether candidate i's time over the fastest one's may be 1, round by round."""
    ratio = paired_ratio(finals.samples_us[i], finals.samples_us[fastest])
    return ratio.ci_low <= 1.0


def _preference(finals: Finals, i: int) -> tuple[bool, int, str]:
    """The fixed order inside a tie: fixed reduction order, smaller workspace, name."""
    candidate = finals.candidates[i]
    return (reduces_across_blocks(candidate), finals.workspace_bytes[i], candidate.key)
