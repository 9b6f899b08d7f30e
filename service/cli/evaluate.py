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
from service.cli.options import AsJson, Sweeps, load_settings
from service.cli.output import CommandError, MisuseError, emit, note, say, table, writable

if TYPE_CHECKING:
    from gemmsmith.core.device import DeviceModel
    from tuner.search.budget import Budget
    from tuner.search.evaluation import Curve, Flips, Neighbour, Recording, Strategy
    from tuner.search.ranking import Ranker


def evaluate(
    sweeps: Sweeps = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE.svg",
            help="Also draw it.",
            show_default=False,
            callback=writable,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
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
    if as_json:
        emit(judged.summary())
        return
    judged.print()
    if output is not None:
        say(str(output))


def load(folder: Path) -> list[Recording]:
    """Every recorded problem of the folder's sweeps.

    Raises:
        CommandError: there is none.
        RecordingCorrupt: a sweep cannot be read.
    """
    from tuner.devices.recording import SUFFIX, Sweep
    from tuner.search.evaluation import Recording

    loaded = [Sweep.load(path) for path in sorted(folder.glob(f"*{SUFFIX}"))]
    found = [Recording(sweep, each) for sweep in loaded for each in sweep.problems.values()]
    if not found:
        raise CommandError(f"no recorded sweeps in {folder}; pass their folder by --sweeps")
    return found


def judge(recordings: Sequence[Recording]) -> tuple[list[Curve], list[str]]:
    """The curve of every strategy; and why any is left out."""
    from tuner.search.budget import BUDGETS
    from tuner.search.cost_model import AnalyticModel
    from tuner.search.evaluation import SEEDS, curve, planned, shuffled
    from tuner.search.matmul_heuristics import HeuristicsUnavailable

    default, quick = BUDGETS[Effort.DEFAULT], BUDGETS[Effort.QUICK]
    model = AnalyticModel()
    left_out = []
    strategies: list[tuple[str, Strategy, Budget]] = [
        ("gemmsmith, default", planned(model, default, ()), default),
        ("… after compile --base", planned(model, default, base(recordings)), default),
        ("gemmsmith, quick", planned(model, quick, ()), quick),
    ]
    try:
        strategies.append(("nvMatmulHeuristics", _heuristics(recordings, model), default))
    except HeuristicsUnavailable as error:
        left_out.append(f"without nvMatmulHeuristics: {error}")
    strategies.append((f"random, mean of {SEEDS}", shuffled(), default))
    curves = [curve(name, strategy, recordings, budget) for name, strategy, budget in strategies]
    return curves, left_out


def base(recordings: Sequence[Recording]) -> set[str]:
    """Names of the kernels that `gemmsmith compile --base` builds where nothing has won yet."""
    return {name for model in {each.model for each in recordings} for name in _base_of(model)}


@cache
def _base_of(model: DeviceModel) -> frozenset[str]:
    from tuner.search.base import base_kernels

    return frozenset(kernel.name for kernel in base_kernels(model))


def _heuristics(recordings: Sequence[Recording], ranker: Ranker) -> Strategy:
    """The proposals of nvMatmulHeuristics; what they leave open, the cost model decides."""
    from tuner.search.evaluation import predicted_order
    from tuner.search.matmul_heuristics import MatmulHeuristics, matched

    ranked = predicted_order(ranker)
    asked = {
        slug: MatmulHeuristics(model)
        for slug, model in {each.model.slug: each.model for each in recordings}.items()
    }

    def orders(recording: Recording) -> list[list[Any]]:
        proposals = asked[recording.model.slug].proposals(recording.problem)
        return [matched(proposals, order) for order in ranked(recording)]

    return orders


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """Everything that the command tells.

    Attributes:
        left_out: why strategies are missing, a line each.
    """

    curves: Sequence[Curve]
    left_out: Sequence[str]
    flips: Flips
    neighbours: Sequence[Neighbour]

    @classmethod
    def of(cls, recordings: Sequence[Recording]) -> Judged:
        """Every strategy on the recordings."""
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
        """All figures, as JSON has them."""
        return {
            "problems": self.flips.problems,
            "strategies": [
                {
                    "name": each.name,
                    "trials": each.trials,
                    "kernels": each.kernels,
                    "counts": each.counts,
                    "median": each.medians,
                    "worst": each.worst,
                    "regrets": {str(problem): row for problem, row in each.regrets.items()},
                }
                for each in self.curves
            ],
            "left_out": list(self.left_out),
            "flips": {
                "rate": self.flips.rate,
                "differences": {str(p): gap for p, gap in self.flips.differences.items()},
            },
            "neighbours": [
                {
                    "problem": str(each.problem),
                    "neighbour": None if each.neighbour is None else str(each.neighbour),
                    "distance": each.distance,
                    "regret": each.regret,
                }
                for each in self.neighbours
            ],
        }

    def print(self) -> None:
        """The table, and what noise and near problems come to."""
        rows: list[Sequence[object]] = []
        for each in self.curves:
            rows.append((each.name, "median", *map(_percent, each.medians)))
            rows.append(("", "worst", *map(_percent, each.worst)))
        title = (
            f"Regret after N trials, % over the recorded optimum; {self.flips.problems} problems"
        )
        table(title, ("strategy", "", *map(str, self.curves[0].counts)), rows, left=2)
        gaps = list(self.flips.differences.values())
        said = f"; their difference is {_percent(max(gaps))}% at most" if gaps else ""
        say(f"Two halves of the last rounds give different winners for {len(gaps)} problems{said}.")
        known = [each.regret for each in self.neighbours if each.regret is not None]
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
