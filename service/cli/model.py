"""`gemmsmith model`: training the learned part of the cost model, and judging it.

It is judged on problems that it has not seen: for each, a model is trained on the others, and none
of them has the same sizes and layout in any element type.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gemmsmith.problem import Problem
from service.cli.options import AsJson, Sweeps, load_settings
from service.cli.output import CommandError, MisuseError, emit, note, say, table

if TYPE_CHECKING:
    from tuner.search.features import Measured
    from tuner.search.ranking import Ranker

NEAR = 1.01
"""A kernel within 1% of the fastest is as good: medians of seven rounds vary that much."""

app = typer.Typer(
    help="Train and judge the learned part of the cost model (needs the extra `model`).",
    no_args_is_help=True,
)

Trials = Annotated[
    str | None,
    typer.Option(
        "--database",
        metavar="URL",
        help="Also the trials of this database; by default recorded sweeps alone count.",
        show_default=False,
    ),
]
Slug = Annotated[
    str | None,
    typer.Option(
        "--device", help="Slug of the device model, if there are several.", show_default=False
    ),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelMarks:
    """How well a cost model ranked one problem's measured candidates.

    Attributes:
        rank: place of the first kernel, in predicted order, with a launch within 1% of the best.
        regret: how much longer than the best the first candidate takes, as a share.
        spearman: rank correlation of predicted and measured times.
        error: median of |log(predicted / measured)|.
    """

    rank: float
    regret: float
    spearman: float
    error: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """Both models' marks on one problem; the learned one has not seen it."""

    problem: Problem
    candidates: int
    kernels: int
    analytic: ModelMarks
    learned: ModelMarks


@app.command("fit")
def fit_(
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="File to write, NAME.json.zst; default configs/models/<device slug>.json.zst.",
            show_default=False,
        ),
    ] = None,
    sweeps: Sweeps = None,
    database: Trials = None,
    device: Slug = None,
    as_json: AsJson = False,
) -> None:
    """Train on recorded sweeps and trials; the file tells how well unseen problems are ranked."""
    from tuner.search.held_out import sizes
    from tuner.search.learned import SUFFIX, fit, path_for

    if output is not None and (not output.name.endswith(SUFFIX) or output.name == SUFFIX):
        raise MisuseError(f"the output file must be called NAME{SUFFIX}, got {output.name!r}")
    measured = measurements(sweeps, database, device)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    model = fit(measured, trained_at=now)
    if len({sizes(one.problem) for one in measured}) > 1:
        model = model.judged(summaries(leave_one_out(measured)))
    path = output or path_for(model.card.device)
    model.save(path)
    size = path.stat().st_size
    if as_json:
        emit({"file": str(path), "bytes": size, "card": model.card})
        return
    card = model.card
    say(f"{card.device}: {card.trials} trials of {len(card.problems)} problems, {card.library}")
    _print_summary(card.held_out)
    say(f"{path}, {size / 1e3:.0f} kB")


@app.command("eval")
def eval_(
    sweeps: Sweeps = None, database: Trials = None, device: Slug = None, as_json: AsJson = False
) -> None:
    """Rank every problem by a model that was trained on the others, beside the analytic model."""
    measured = measurements(sweeps, database, device)
    from tuner.search.held_out import sizes

    if len({sizes(one.problem) for one in measured}) < 2:
        raise CommandError("judging takes problems of at least two sizes: one to hold out")
    found = leave_one_out(measured, progress=note)
    if as_json:
        summary = summaries(found)
        emit({"device": measured[0].device.slug, "problems": found, "summary": summary})
        return
    pairs = (f"{title} {who}" for title in _TITLES.values() for who in ("analytic", "learned"))
    columns = ("problem", "kernels", "candidates", *pairs)
    rows = [(str(one.problem), one.kernels, one.candidates, *_cells(one)) for one in found]
    table(measured[0].device.slug, columns, rows)
    _print_summary(summaries(found))


def measurements(sweeps: Path | None, database: str | None, device: str | None) -> list[Measured]:
    """What was measured on one device model: in the recorded sweeps, then in a database.

    Raises:
        CommandError: nothing, or measurements of several device models; lists them.
    """
    from tuner.devices.recording import SUFFIX, Sweep
    from tuner.search.features import gathered, observed_in_sweep, observed_in_trials

    settings = load_settings(sweeps=sweeps, database=database)
    files = sorted(settings.sweeps.glob(f"*{SUFFIX}"))
    observed = [one for path in files for one in observed_in_sweep(Sweep.load(path))]
    if database is not None:
        from tuner.store import Store

        with Store.open(settings.database) as store:
            observed += observed_in_trials(stored.trial for stored in store.trials(device=device))
    measured = gathered(observed)
    slugs = sorted({one.device.slug for one in measured})
    if not slugs:
        raise CommandError(
            f"no measurements in {settings.sweeps} to learn from: pass --sweeps with a folder of "
            "recorded sweeps, or --database with trials"
        )
    if device is None and len(slugs) > 1:
        raise CommandError(f"measurements of several device models: --device {' or '.join(slugs)}")
    chosen = [one for one in measured if one.device.slug == (device or slugs[0])]
    if not chosen:
        raise CommandError(f"no measurements of {device!r}; there are some of {', '.join(slugs)}")
    return chosen


def leave_one_out(
    measured: Sequence[Measured],
    *,
    train: Callable[[Sequence[Measured]], Ranker] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Judgement]:
    """For each problem, the marks of the analytic model and of one `train`ed without its sizes."""
    from tuner.search.cost_model import AnalyticModel
    from tuner.search.held_out import sizes

    train = train or _trained
    held_out = list(dict.fromkeys(sizes(one.problem) for one in measured))
    found = []
    for i, group in enumerate(held_out):
        progress(f"held out {i + 1} of {len(held_out)}")
        model = train([one for one in measured if sizes(one.problem) != group])
        found += [
            Judgement(
                problem=one.problem,
                candidates=len(one.candidates),
                kernels=len({candidate.kernel.name for candidate in one.candidates}),
                analytic=marks(one, AnalyticModel()),
                learned=marks(one, model),
            )
            for one in measured
            if sizes(one.problem) == group
        ]
    return found


def _trained(measured: Sequence[Measured]) -> Ranker:
    from tuner.search.learned import fit

    return fit(measured, trained_at="")


def marks(measured: Measured, ranker: Ranker) -> ModelMarks:
    """Compare a model's predictions with what was measured."""
    from tuner.search.ranking import by_kernel, by_time, predictions

    times = predictions(measured.problem, measured.candidates, measured.device, ranker)
    predicted = [times[candidate.key] for candidate in measured.candidates]
    us = {c.key: t for c, t in zip(measured.candidates, measured.times_us, strict=True)}
    order = by_time(measured.candidates, times)
    best = min(us.values())
    kernels = by_kernel(order).values()
    good = [any(us[c.key] <= NEAR * best for c in launches) for launches in kernels]
    ratios = [p / t for p, t in zip(predicted, measured.times_us, strict=True)]
    return ModelMarks(
        rank=good.index(True) + 1.0,
        regret=us[order[0].key] / best - 1,
        spearman=_spearman(predicted, measured.times_us),
        error=statistics.median(abs(log(ratio)) for ratio in ratios),
    )


def summaries(found: Sequence[Judgement]) -> dict[str, dict[str, float]]:
    """Medians, means and worst cases over the problems, by model."""
    summary: dict[str, dict[str, float]] = {}
    for who in ("analytic", "learned"):
        summary[who] = {}
        for name in (each.name for each in fields(ModelMarks)):
            values = [asdict(getattr(one, who))[name] for one in found]
            worst = min(values) if name == "spearman" else max(values)
            summary[who] |= {
                f"{name}_median": round(statistics.median(values), 4),
                f"{name}_mean": round(statistics.fmean(values), 4),
                f"{name}_worst": round(worst, 4),
            }
    return summary


def _spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """Rank correlation; 0 where one side is constant."""
    try:
        return statistics.correlation(_ranks(left), _ranks(right))
    except statistics.StatisticsError:
        return 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    """Places from 1; equal values share the mean of theirs."""
    places: dict[float, list[int]] = {}
    for place, value in enumerate(sorted(values), start=1):
        places.setdefault(value, []).append(place)
    return [statistics.fmean(places[value]) for value in values]


_TITLES = {"rank": "rank", "regret": "regret", "spearman": "ρ", "error": "error"}


def _shown(name: str, value: float) -> str:
    if name == "rank":
        return f"{value:g}"
    return f"{value:.3f}" if name == "spearman" else f"{value:.1%}"


def _cells(one: Judgement) -> list[str]:
    """Each figure of the analytic model beside the learned one's."""
    both = (one.analytic, one.learned)
    return [_shown(name, getattr(marks, name)) for name in _TITLES for marks in both]


def _print_summary(summary: dict[str, dict[str, float]]) -> None:
    """Nothing for a model that could not be judged."""
    rows = [
        (who, *(_shown(key.split("_")[0], value) for key, value in marks.items()))
        for who, marks in summary.items()
    ]
    if rows:
        columns = [key.replace("_", " ") for key in summary["learned"]]
        table("problems held out", ("model", *columns), rows)
