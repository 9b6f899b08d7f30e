"""What a problem's page draws: each plot of one run, so that what stands beside each other was
measured beside each other.

A run is what has one job and one environment. The default's time is in the record of the revision
that the run promoted, so it is drawn with that run's finalists only. What is served may come from
elsewhere, from an import or an older run; then it has a plot of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from gemmsmith.candidate import Candidate
from service.pages.pictures.convergence import convergence
from service.pages.pictures.samples import Line, samples
from service.pages.pictures.scatter import TRAITS, scatter
from service.pages.render import picture
from service.report.page import NONE, choices
from tuner.store.listing import Ranking
from tuner.store.revisions import WinnerRevision
from tuner.store.tried import Tried
from tuner.trial import Phase, Winner


@dataclass(frozen=True, kw_only=True, slots=True)
class Plots:
    """The pictures, empty where there is nothing to draw.

    Attributes:
        served: the winner and the default, where the latest finals are another run's.
        finals: the finalists of the latest run, and its default.
        promoted: the revision that the latest run promoted, if it is known which.
        is_served: whether that is the one served.
        replayed: the latest run was on a recorded GPU.
        convergence: of the latest run that screened.
        traits: name and picture of all its trials by tile, cluster and stages.
        trials, failed: how many that run made.
        runs: how many runs there are on record.
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
    """All of them, of a problem on a device model."""
    promoted = _promoted(ranking, history)
    is_served = winner is not None and promoted is not None and _same(winner, promoted)
    finals = _finalists(ranking, promoted)
    screened = [one for one in tried if one.phase is Phase.SCREEN]
    run = [one for one in screened if one.run == screened[-1].run]
    drawn = ((name, scatter(run, name, trait)) for name, trait in TRAITS)
    return Plots(
        served=picture(samples([] if winner is None or (finals and is_served) else _kept(winner))),
        finals=picture(samples(finals)),
        promoted=promoted,
        is_served=is_served,
        replayed=any(stored.trial.replayed for stored in ranking.finalists),
        convergence=picture(convergence(run)),
        traits=tuple((name, picture(svg)) for name, svg in drawn if svg),
        trials=len(run),
        failed=sum(one.median_us is None for one in run),
        runs=len({one.run for one in screened}),
    )


def _promoted(ranking: Ranking, history: Sequence[WinnerRevision]) -> Winner | None:
    """What the run of the latest finals promoted: of the history, what has its job."""
    if not ranking.finalists or ranking.finalists[0].trial.job is None:
        return None
    run = ranking.finalists[0].trial
    for revision in history:
        if (revision.winner.job, revision.winner.environment) == (run.job, run.environment):
            return revision.winner
    return None


def _same(one: Winner, other: Winner) -> bool:
    return one.revision == other.revision


def _finalists(ranking: Ranking, promoted: Winner | None) -> list[Line]:
    """The finalists with their samples; and the default, of which a record has the interval."""
    lines = []
    chosen = promoted.candidate.key if promoted and promoted.candidate else None
    for place, stored in enumerate(ranking.finalists, 1):
        trial = stored.trial
        if trial.statistics is not None:
            name, about = _words(trial.candidate)
            lines.append(
                Line(
                    name=f"{place}. {name}",
                    about=about,
                    kind="won" if trial.candidate.key == chosen else "tie",
                    statistics=trial.statistics,
                    samples_us=trial.samples_us,
                )
            )
    return [*lines, *_default(promoted)] if lines and promoted else lines


def _kept(winner: Winner) -> list[Line]:
    """The winner and the default as the winner's record has them."""
    lines = []
    if winner.statistics and winner.candidate:
        name, about = _words(winner.candidate)
        kind = "tie" if winner.use.is_default else "won"
        lines.append(Line(name=name, about=about, kind=kind, statistics=winner.statistics))
    return [*lines, *_default(winner)]


def _default(winner: Winner) -> list[Line]:
    if winner.baseline is None:
        return []
    name = winner.problem.operation.default
    return [Line(name=name, about="the default", kind="behind", statistics=winner.baseline)]


def _words(candidate: Candidate) -> tuple[str, str]:
    """Tile and cluster; schedule, scheduler and splits."""
    tile, schedule, scheduler, _ = choices(candidate)
    splits = candidate.launch.splits
    said = [schedule.removeprefix("warpspecialized_"), scheduler]
    said += [f"{splits} splits"] if splits > 1 else []
    name, *about = [word for word in (tile, *said) if word != NONE]
    return name, ", ".join(about)
