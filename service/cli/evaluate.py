"""`gemmsmith eval`: how close the search comes to recorded optima, without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gemmsmith.core.tuning import Effort
from service.cli.options import Sweeps, load_settings
from service.cli.output import CommandError, MisuseError, Result, note, say, table, writable

if TYPE_CHECKING:
    from gemmsmith.core.device import DeviceModel
    from tuner.search.budget import Budget
    from tuner.search.evaluation import Curve, Flips, Neighbour, Recording, Strategy


def evaluate(
    sweeps: Sweeps = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE.svg", help="Also draw it.", callback=writable),
    ] = None,
) -> Result:
    """Evaluate search strategies on recorded sweeps: the regret of their winner after N trials.

    Regret is how much longer than the recorded optimum the winner takes, in paired rounds.
    """
    from gemmsmith.files import is_stream

    if output is not None and output.suffix != ".svg" and not is_stream(output):
        raise MisuseError(f"the picture must be called NAME.svg, got {output.name!r}")
    judged = Judged.of(load(load_settings(sweeps=sweeps).sweeps))
    if output is not None:
        from gemmsmith.files import write
        from service.charts import regret

        write(output, regret.chart(judged.curves).encode())

    def show() -> None:
        judged.print()
        if output is not None:
            say(str(output))

    return Result(judged.summary(), show)


def load(folder: Path) -> list[Recording]:
    """Every recorded problem of the folder's sweeps.

    Raises:
        CommandError: there are no recorded problems.
        RecordingCorrupt: a sweep cannot be read.
    """
    from tuner.devices.recording import SUFFIX, Sweep
    from tuner.search.evaluation import Recording

    loaded = [Sweep.load(path) for path in sorted(folder.glob(f"*{SUFFIX}"))]
    recordings = [
        Recording(sweep, recorded) for sweep in loaded for recorded in sweep.problems.values()
    ]
    if not recordings:
        raise CommandError(f"no recorded sweeps in {folder}; pass their folder by --sweeps")
    return recordings


def judge(recordings: Sequence[Recording]) -> tuple[list[Curve], list[str]]:
    """The curve of every strategy; and a line for each strategy that is missing."""
    from tuner.search.budget import BUDGETS
    from tuner.search.evaluation import SEEDS, curve, planned, shuffled
    from tuner.search.matmul_heuristics import HeuristicsUnavailable

    default, quick = BUDGETS[Effort.DEFAULT], BUDGETS[Effort.QUICK]
    base = frozenset[str]().union(*(_base_of(recording.model) for recording in recordings))
    left_out = []
    strategies: list[tuple[str, Strategy, Budget]] = [
        ("gemmsmith, default", planned(default, ()), default),
        ("… after compile --base", planned(default, base), default),
        ("gemmsmith, quick", planned(quick, ()), quick),
    ]
    try:
        strategies.append(("nvMatmulHeuristics", _heuristics(recordings), default))
    except HeuristicsUnavailable as error:
        left_out.append(f"without nvMatmulHeuristics: {error}")
    strategies.append((f"random, mean of {SEEDS}", shuffled(), default))
    curves = [curve(name, strategy, recordings, budget) for name, strategy, budget in strategies]
    return curves, left_out


@cache  # choosing the base enumerates all kernels, which takes seconds
def _base_of(model: DeviceModel) -> frozenset[str]:
    """Names of the kernels that `gemmsmith compile --base` builds while there are no winners."""
    from tuner.search.base import base_kernels

    return frozenset(kernel.name for kernel in base_kernels(model))


def _heuristics(recordings: Sequence[Recording]) -> Strategy:
    """The order of nvMatmulHeuristics; the cost model orders what its proposals leave open."""
    from tuner.search.evaluation import predicted_order
    from tuner.search.matmul_heuristics import MatmulHeuristics, matched

    models = {recording.model.slug: recording.model for recording in recordings}
    heuristics = {slug: MatmulHeuristics(model) for slug, model in models.items()}

    def orders(recording: Recording) -> list[list[Any]]:
        proposals = heuristics[recording.model.slug].proposals(recording.problem)
        return [matched(proposals, order) for order in predicted_order(recording)]

    return orders


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """All results of the command.

    Attributes:
        left_out: a line for each missing strategy, with the reason.
        flips: problems where two halves of the measurements give different winners.
        neighbours: the regret of each problem with the winner of its nearest recorded neighbour.
    """

    curves: Sequence[Curve]
    left_out: Sequence[str]
    flips: Flips
    neighbours: Sequence[Neighbour]

    @classmethod
    def of(cls, recordings: Sequence[Recording]) -> Judged:
        from gemmsmith.core.config import MAX_DISTANCE
        from tuner.search import evaluation

        curves, left_out = judge(recordings)
        return cls(
            curves=curves,
            left_out=left_out,
            flips=evaluation.flips(recordings),
            neighbours=evaluation.neighbours(recordings, MAX_DISTANCE),
        )

    def summary(self) -> dict[str, Any]:
        """All figures as JSON."""
        return {
            "problems": self.flips.problems,
            "strategies": [
                {
                    "name": curve.name,
                    "trials": curve.trials,
                    "kernels": curve.kernels,
                    "counts": curve.counts,
                    "median": curve.medians,
                    "worst": curve.worst,
                    "regrets": {str(problem): row for problem, row in curve.regrets.items()},
                }
                for curve in self.curves
            ],
            "left_out": list(self.left_out),
            "flips": {
                "rate": self.flips.rate,
                "differences": {str(p): gap for p, gap in self.flips.differences.items()},
            },
            "neighbours": [
                {
                    "problem": str(pair.problem),
                    "neighbour": None if pair.neighbour is None else str(pair.neighbour),
                    "distance": pair.distance,
                    "regret": pair.regret,
                }
                for pair in self.neighbours
            ],
        }

    def print(self) -> None:
        """Print the table, then how much noise and near problems matter."""
        rows: list[Sequence[object]] = []
        for curve in self.curves:
            rows.append((curve.name, "median", *map(_percent, curve.medians)))
            rows.append(("", "worst", *map(_percent, curve.worst)))
        title = (
            f"Regret after N trials, % over the recorded optimum; {self.flips.problems} problems"
        )
        table(title, ("strategy", "", *map(str, self.curves[0].counts)), rows, left=2)
        gaps = list(self.flips.differences.values())
        most = f"; their difference is {_percent(max(gaps))}% at most" if gaps else ""
        say(f"Two halves of the last rounds give different winners for {len(gaps)} problems{most}.")
        known = [pair.regret for pair in self.neighbours if pair.regret is not None]
        if known:
            say(
                f"Answered with the nearest recorded neighbour's winner, {len(known)} problems: "
                f"{_percent(median(known))}% at the median, {_percent(max(known))}% at the worst; "
                f"{len(self.neighbours) - len(known)} have no such neighbour."
            )
        for reason in self.left_out:
            note(reason)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"
