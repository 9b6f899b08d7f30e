"""The plots of a problem's page. A plot has the times of one run, so that they can be compared.

A run is the trials of one job in one environment. The default's time is in the record of the
revision that the run promoted, so it is drawn with that run's finalists only. If the served winner
comes from an import or an older run, it has a plot of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from gemmsmith.core.candidate import Candidate
from service.charts.intervals import Interval, timed, times
from service.charts.trials import TRAITS, by_trait, convergence
from service.report.verdict import NONE, choices
from tuner.store.listing import Ranking
from tuner.store.revisions import WinnerRevision
from tuner.store.trials import Tried
from tuner.trial import Phase, Winner


@dataclass(frozen=True, kw_only=True, slots=True)
class Plots:
    """The charts, empty if there is nothing to draw.

    Attributes:
        served: the winner and the default, if the latest finals are of another run.
        finals: the finalists of the latest run, and its default.
        promoted: the revision that the latest run promoted, if it is known.
        is_served: whether that revision is served.
        replayed: whether the latest run was on a recorded GPU.
        convergence: of the latest run that screened.
        traits: name and chart of that run's trials by tile, cluster and stages.
        trials, failed: numbers of that run's trials.
        runs: how many runs are recorded.
    """

    served: Markup
    finals: Markup
    promoted: Winner | None
    is_served: bool
    replayed: bool
    convergence: Markup
    traits: tuple[tuple[str, Markup], ...]
    trials: int
    failed: int
    runs: int


def plots(
    winner: Winner | None,
    ranking: Ranking,
    history: Sequence[WinnerRevision],
    tried: Sequence[Tried],
) -> Plots:
    """Draw the plots of a problem on a device model."""
    promoted = _promoted(ranking, history)
    is_served = bool(winner and promoted and winner.revision == promoted.revision)
    finals = _finalists(ranking, promoted)
    screened = [trial for trial in tried if trial.phase is Phase.SCREEN]
    run = [trial for trial in screened if trial.run == screened[-1].run]
    drawn = ((name, by_trait(run, name, trait)) for name, trait in TRAITS)
    return Plots(
        served=times([] if winner is None or (finals and is_served) else _kept(winner)),
        finals=times(finals),
        promoted=promoted,
        is_served=is_served,
        replayed=any(stored.trial.replayed for stored in ranking.finalists),
        convergence=convergence(run),
        traits=tuple((name, chart) for name, chart in drawn if chart),
        trials=len(run),
        failed=sum(trial.median_us is None for trial in run),
        runs=len({trial.run for trial in screened}),
    )


def _promoted(ranking: Ranking, history: Sequence[WinnerRevision]) -> Winner | None:
    """Return the revision in the history that has the job of the latest finals."""
    if not ranking.finalists or ranking.finalists[0].trial.job is None:
        return None
    run = ranking.finalists[0].trial
    # A job may run in two environments, after an upgrade between attempts: those are two runs.
    for revision in history:
        if (revision.winner.job, revision.winner.environment) == (run.job, run.environment):
            return revision.winner
    return None


def _finalists(ranking: Ranking, promoted: Winner | None) -> list[Interval]:
    """Make rows of the finalists with their samples, and of the default without samples."""
    rows = []
    chosen = promoted.candidate.key if promoted and promoted.candidate else None
    for rank, stored in enumerate(ranking.finalists, 1):
        trial = stored.trial
        if trial.statistics is not None:
            name, about = _words(trial.candidate)
            kind = "won" if trial.candidate.key == chosen else "tie"
            row = timed(f"{rank}. {name}", about, kind, trial.statistics, trial.samples_us)
            rows.append(row)
    return [*rows, *_default(promoted)] if rows and promoted else rows


def _kept(winner: Winner) -> list[Interval]:
    """Make rows of the winner and the default from the winner's record."""
    rows = []
    if winner.statistics and winner.candidate:
        kind = "tie" if winner.use.is_default else "won"
        rows.append(timed(*_words(winner.candidate), kind, winner.statistics))
    return [*rows, *_default(winner)]


def _default(winner: Winner) -> list[Interval]:
    if winner.baseline is None:
        return []
    return [timed(winner.problem.operation.default, "the default", "behind", winner.baseline)]


def _words(candidate: Candidate) -> tuple[str, str]:
    """Return tile and cluster as a name, and schedule, scheduler and splits as a second line."""
    tile, schedule, scheduler, _ = choices(candidate)
    splits = candidate.launch.splits
    split = f"{splits} splits" if splits > 1 else NONE
    words = (tile, schedule.removeprefix("warpspecialized_"), scheduler, split)
    name, *about = [word for word in words if word != NONE]
    return name, ", ".join(about)
