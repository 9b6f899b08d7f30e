"""The README's picture: the speed-up of each problem, coloured by what is served.

A candidate that is faster but not served, because of its power penalty for example, is drawn as
callers see it: the default, at 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.readme.kinds import KINDS, kind_of
from benchmarks.readme.shipped import RESULTS, got, models, short
from gemmsmith.core.config import Use
from gemmsmith.core.device import DeviceModel
from tuner.trial import Winner

FILE = RESULTS / "speedup.svg"
COLOURS = {Use.CUTLASS: "#1b6ca8", Use.CUBLASLT: "#c8553d", Use.CUBLAS: "#9a9a9a"}
LABELS = {
    Use.CUTLASS: "a CUTLASS kernel, or one of gemmsmith's own",
    Use.CUBLASLT: "an algorithm of cuBLASLt that torch does not choose",
    Use.CUBLAS: "torch's default stays",
}
_ROOM = 0.055  # least width of a column, because of its title, as a share of a GPU's problems
_GAP = 0.006  # space between two columns, as a share of them
_TICKS = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)


@dataclass(frozen=True, kw_only=True)
class Column:
    """A kind of product on a GPU model: its problems, sorted by speed-up."""

    model: DeviceModel
    title: str
    winners: tuple[Winner, ...]


def columns(winners: Sequence[Winner]) -> list[Column]:
    """Return the columns that are not empty, GPU model by GPU model."""
    result = []
    for model in models(winners):
        for kind in KINDS:
            of_kind = [
                w for w in winners if w.device.slug == model.slug and kind_of(w.problem) is kind
            ]
            if of_kind:
                ordered = tuple(sorted(of_kind, key=lambda w: (got(w), str(w.problem))))
                result.append(Column(model=model, title=kind.short, winners=ordered))
    return result


def draw(winners: Sequence[Winner]) -> None:
    """Write the picture: a panel for each GPU model."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "gemmsmith"  # the same winners give the same file
    from matplotlib import pyplot

    all_columns, gpus = columns(winners), models(winners)
    figure, panels = pyplot.subplots(
        len(gpus), figsize=(11, 3.6 * len(gpus)), layout="constrained", squeeze=False
    )
    for panel, model in zip(panels.flat, gpus, strict=True):
        _fill(panel, [column for column in all_columns if column.model == model])
        panel.set_title(short(model), fontsize=10, loc="left")
    figure.supylabel("what you get, over torch's default", fontsize=9)
    for use, colour in COLOURS.items():
        panels.flat[0].scatter([], [], s=24, color=colour, label=LABELS[use])
    panels.flat[0].legend(loc="upper right", title="what is served", fontsize=8, title_fontsize=8)
    figure.savefig(FILE, metadata={"Date": None})
    pyplot.close(figure)


def _fill(panel: Any, gpu_columns: Sequence[Column]) -> None:
    """Draw a GPU's columns, side by side."""
    total = sum(len(column.winners) for column in gpu_columns)
    begin, middles, titles = 0.0, [], []
    panel.axhline(1.0, color="#bbbbbb", linewidth=1, zorder=0)
    for column in gpu_columns:
        width = max(float(len(column.winners)), _ROOM * total)
        offset = begin + (width - len(column.winners)) / 2
        for use, colour in COLOURS.items():
            served = [(i, w) for i, w in enumerate(column.winners) if w.use is use]
            places = [offset + i for i, _ in served]
            panel.scatter(places, [got(w) for _, w in served], s=9, color=colour)
        middles.append(begin + width / 2)
        titles.append(column.title)
        begin += width + _GAP * total
    panel.set_yscale("log", base=2)
    panel.set_ylim(0.93, 9)
    panel.set_yticks(_TICKS, [f"{tick:g} ×" for tick in _TICKS], fontsize=8)
    panel.set_yticks([], minor=True)
    panel.set_xticks(middles, titles, fontsize=7.5)
    panel.tick_params(axis="x", length=0)
    panel.set_xlim(-_GAP * total, begin)
    panel.grid(axis="y", color="#eeeeee", linewidth=0.6)
    panel.set_axisbelow(True)
