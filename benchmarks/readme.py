"""Write the README's table and picture from the shipped winners; nothing is typed in by hand.

    python -m benchmarks.readme

Reads configs/winners/*.jsonl, writes benchmarks/results/speedup.svg, and replaces what stands
between the two `results` markers of README.md.
"""

from __future__ import annotations

import math
import re
import statistics
import sys
from collections import Counter
from pathlib import Path

from gemmsmith.answer import Use
from gemmsmith.device import DeviceModel
from gemmsmith.operation import in_order
from service.report.rows import unaligned_operands
from tuner.exchange import read_winners
from tuner.trial import Winner

ROOT = Path(__file__).resolve().parent.parent
WINNERS = ROOT / "configs" / "winners"
PICTURE = ROOT / "benchmarks" / "results" / "speedup.svg"
TOP = 2.2  # upper edge of the picture
MARKERS = re.compile(r"(<!-- results -->\n).*?(<!-- /results -->)", re.DOTALL)
COLOURS = {"bf16": "#1b6ca8", "fp16": "#3a9d5d", "fp8_e4m3": "#c8553d", "int8": "#7a5195"}


def shipped() -> list[Winner]:
    """All shipped winners that were paired against cuBLAS."""
    winners = [w for path in sorted(WINNERS.glob("*.jsonl")) for w in read_winners(path)]
    return [w for w in winners if w.speedup is not None]


def geometric_mean(values: list[float]) -> float:
    """Of positive numbers; the mean of ratios."""
    return math.exp(statistics.fmean(math.log(value) for value in values))


Group = tuple[DeviceModel, str, list[Winner]]


def groups(winners: list[Winner]) -> list[Group]:
    """The winners by GPU model and element types, the model with most of them first."""
    models = {w.device.slug: w.device for w in winners}
    counts = Counter(w.device.slug for w in winners)
    found = []
    for slug in sorted(models, key=lambda slug: (-counts[slug], slug)):
        mine = [w for w in winners if w.device.slug == slug]
        for dtype in in_order(w.problem.dtype for w in mine):
            found.append((models[slug], dtype, [w for w in mine if w.problem.dtype == dtype]))
    return found


def got(winner: Winner) -> float:
    """How many times as fast as the default a program is that runs what is served."""
    return 1.0 if winner.use.is_default or winner.speedup is None else winner.speedup.median


def is_aligned(winner: Winner) -> bool:
    """Whether all rows start on 16 bytes, as the default's fast kernels want them."""
    return not unaligned_operands(winner.problem)


def table(winners: list[Winner]) -> str:
    """The honest table, one row for each GPU model and operation."""
    rows = [
        "| GPU | operation | problems | what you get | aligned rows alone | best "
        "| by CUTLASS | by another algorithm of cuBLASLt's | default stays |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for device, dtype, mine in groups(winners):
        uses = Counter(w.use for w in mine)
        aligned = [got(w) for w in mine if is_aligned(w)]
        rows.append(
            f"| {device.name.removeprefix('NVIDIA ')} | {dtype} | {len(mine)} "
            f"| {geometric_mean([got(w) for w in mine]):.3f} × "
            f"| {geometric_mean(aligned):.3f} × ({len(aligned)}) "
            f"| {max(got(w) for w in mine):.2f} × "
            f"| {uses[Use.CUTLASS]} | {uses[Use.CUBLASLT]} | {uses[Use.CUBLAS]} |"
        )
    drivers = sorted({w.environment.driver for w in winners})
    dates = sorted({w.promoted_at[:10] for w in winners})
    rows += [
        "",
        "Geometric means over the default of torch, in the regime where a winner gains least, 1 "
        f"where the default stays. Driver {', '.join(drivers)}, "
        f"{' to '.join(sorted({dates[0], dates[-1]}))}.",
    ]
    return "\n".join(rows)


def picture(winners: list[Winner]) -> None:
    """One dot a problem, with its 95% interval, sorted by ratio, a panel a GPU and operation."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "gemmsmith"  # the same winners give the same file
    from matplotlib import pyplot as plt

    panels_of = groups(winners)
    columns = min(3, len(panels_of))
    lines = -(-len(panels_of) // columns)
    figure, panels = plt.subplots(
        lines, columns, figsize=(4.2 * columns, 4.2 * lines), sharey=True, squeeze=False
    )
    for panel in panels.flat[len(panels_of) :]:
        panel.axis("off")
    for panel, (device, dtype, mine) in zip(panels.flat, panels_of, strict=False):
        colour = COLOURS.get(dtype.partition(".")[0], "#555555")
        ordered = sorted(mine, key=lambda w: w.speedup.median if w.speedup else 1.0)
        panel.axhline(1.0, color="#888888", linewidth=1)
        over = 0
        for x, winner in enumerate(ordered):
            assert winner.speedup is not None
            ratio, face = winner.speedup, "white" if winner.use.is_default else colour
            if ratio.median <= TOP:
                spread = [[ratio.median - ratio.ci_low], [ratio.ci_high - ratio.median]]
                panel.errorbar(
                    x, ratio.median, yerr=spread, fmt="o", markersize=3, color=colour,
                    markerfacecolor=face, elinewidth=0.8,
                )  # fmt: skip
                continue
            over += 1  # drawn at the edge of the scale, with a number
            panel.plot(x, TOP, "^", markersize=6, color=colour, markerfacecolor=face, clip_on=False)
            panel.annotate(
                f"{ratio.median:.1f}",
                (x, TOP),
                xytext=(0, -12 * over),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
        panel.set_yscale("log", base=2)
        panel.set_ylim(0.62, TOP)
        ticks = [0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5, 1.75, 2.0]
        panel.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        panel.set_yticks([], minor=True)
        name = device.name.removeprefix("NVIDIA ")
        panel.set_title(f"{name}, {dtype}: {len(mine)} problems", fontsize=9)
        panel.set_xlabel("problems, sorted")
        panel.grid(axis="y", color="#e5e5e5", linewidth=0.6)
        panel.set_axisbelow(True)
    for panel in panels[:, 0]:
        panel.set_ylabel("default's time / best candidate's time")
    figure.suptitle("Filled: the candidate is served. Hollow: the default stays the answer.")
    figure.tight_layout()
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> int:
    """Rewrite the picture and the README's table."""
    winners = shipped()
    if not winners:
        print("configs/winners/ holds no paired winners; run `make gpu-bench` first")
        return 1
    picture(winners)
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    block = table(winners)
    readme.write_text(
        MARKERS.sub(lambda found: f"{found[1]}{block}\n{found[2]}", text), encoding="utf-8"
    )
    print(block)
    return 0


if __name__ == "__main__":
    sys.exit(main())
