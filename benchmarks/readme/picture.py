"""The README's picture: what one gets for each problem, coloured by what is served.

A candidate that is ahead but not served (its power penalty is greater than its gain, say) is drawn
as what it is to a caller: the default, at 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.readme.kinds import KINDS, kind_of
from benchmarks.readme.shipped import RESULTS, got, models, short
from gemmsmith.answers.answer import Use
from tuner.trial import Winner

FILE = RESULTS / "speedup.svg"
COLOURS = {Use.CUTLASS: "#1b6ca8", Use.CUBLASLT: "#c8553d", Use.CUBLAS: "#9a9a9a"}
LABELS = {
    Use.CUTLASS: "a CUTLASS kernel, or one of gemmsmith's own",
    Use.CUBLASLT: "an algorithm of cuBLASLt that torch does not choose",
    Use.CUBLAS: "torch's default stays",
}
_GAP = 6.0  # between two columns, in problems
_TICKS = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)


@dataclass(frozen=True, kw_only=True)
class Column:
    """One kind of product on one GPU model: its problems, sorted by what one gets."""

    title: str
    winners: tuple[Winner, ...]


def columns(winners: Sequence[Winner]) -> list[Column]:
    """All that are not empty, GPU model by GPU model."""
    found = []
    for model in models(winners):
        for kind in KINDS:
            mine = [w for w in winners if w.device.slug == model.slug and kind_of(w) is kind]
            if mine:
                ordered = tuple(sorted(mine, key=lambda w: (got(w), str(w.problem))))
                found.append(Column(title=f"{short(model)}\n{kind.short}", winners=ordered))
    return found


def draw(winners: Sequence[Winner]) -> None:
    """Write the picture."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "gemmsmith"  # the same winners give the same file
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(11, 4.2), layout="constrained")
    panel.axhline(1.0, color="#bbbbbb", linewidth=1, zorder=0)
    begin, middles, titles = 0.0, [], []
    for column in columns(winners):
        width = max(float(len(column.winners)), 14.0)  # room for its title
        offset = begin + (width - len(column.winners)) / 2
        for use, colour in COLOURS.items():
            mine = [(i, w) for i, w in enumerate(column.winners) if w.use is use]
            places = [offset + i for i, _ in mine]
            panel.scatter(places, [got(w) for _, w in mine], s=9, color=colour)
        middles.append(begin + width / 2)
        titles.append(column.title)
        begin += width + _GAP
    for use, colour in COLOURS.items():
        panel.scatter([], [], s=24, color=colour, label=LABELS[use])
    panel.set_yscale("log", base=2)
    panel.set_ylim(0.93, 9)
    panel.set_yticks(_TICKS, [f"{tick:g} ×" for tick in _TICKS])
    panel.set_yticks([], minor=True)
    panel.set_xticks(middles, titles, fontsize=7.5)
    panel.tick_params(axis="x", length=0)
    panel.set_xlim(-_GAP, begin)
    panel.set_ylabel("what you get, over torch's default")
    panel.grid(axis="y", color="#eeeeee", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.legend(loc="upper right", title="what is served", fontsize=8, title_fontsize=8)
    figure.savefig(FILE, metadata={"Date": None})
    pyplot.close(figure)
