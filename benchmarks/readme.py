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
from pathlib import Path

from gemmsmith.problem import DType
from tuner.exchange import read_winners
from tuner.trial import Winner

ROOT = Path(__file__).resolve().parent.parent
WINNERS = ROOT / "configs" / "winners"
PICTURE = ROOT / "benchmarks" / "results" / "speedup.svg"
TOP = 1.4  # upper edge of the picture
MARKERS = re.compile(r"(<!-- results -->\n).*?(<!-- /results -->)", re.DOTALL)
COLOURS = {DType.BF16: "#1b6ca8", DType.FP16: "#3a9d5d", DType.FP8_E4M3: "#c8553d"}


def shipped() -> list[Winner]:
    """All shipped winners that were paired against cuBLAS."""
    winners = [w for path in sorted(WINNERS.glob("*.jsonl")) for w in read_winners(path)]
    return [w for w in winners if w.speedup is not None]


def geometric_mean(values: list[float]) -> float:
    """Of positive numbers; the mean of ratios."""
    return math.exp(statistics.fmean(math.log(value) for value in values))


def table(winners: list[Winner]) -> str:
    """The honest table, one row a precision."""
    rows = [
        "| precision | problems | geometric mean | median | minimum | maximum "
        "| cuBLAS stays the answer | geometric mean of what you get |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for dtype in DType:
        mine = [w for w in winners if w.problem.dtype == dtype]
        if not mine:
            continue
        ratios = [w.speedup.median for w in mine if w.speedup]
        kept = sum(w.use.is_default for w in mine)
        got = [w.speedup.median if not w.use.is_default and w.speedup else 1.0 for w in mine]
        rows.append(
            f"| {dtype} | {len(mine)} | {geometric_mean(ratios):.3f} "
            f"| {statistics.median(ratios):.3f} | {min(ratios):.2f} | {max(ratios):.2f} "
            f"| {kept} of {len(mine)} ({kept / len(mine):.0%}) "
            f"| {geometric_mean(got):.3f} |"
        )
    models = sorted({w.device.name for w in winners})
    drivers = sorted({w.environment.driver for w in winners})
    dates = sorted({w.promoted_at[:10] for w in winners})
    rows += [
        "",
        f"Best CUTLASS candidate against cuBLAS, paired in the same rounds; {', '.join(models)}, "
        f"driver {', '.join(drivers)}, {' to '.join(sorted({dates[0], dates[-1]}))}.",
    ]
    return "\n".join(rows)


def picture(winners: list[Winner]) -> None:
    """One dot a problem, with its 95% interval, sorted by ratio, a panel a precision."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "gemmsmith"  # the same winners give the same file
    from matplotlib import pyplot as plt

    present = [d for d in DType if any(w.problem.dtype == d for w in winners)]
    figure, panels = plt.subplots(
        1, len(present), figsize=(4.2 * len(present), 4.4), sharey=True, squeeze=False
    )
    for panel, dtype in zip(panels[0], present, strict=True):
        mine = sorted(
            (w.speedup for w in winners if w.problem.dtype == dtype and w.speedup),
            key=lambda ratio: ratio.median,
        )
        xs = range(len(mine))
        medians = [r.median for r in mine]
        spread = [
            [r.median - r.ci_low for r in mine],
            [r.ci_high - r.median for r in mine],
        ]
        colour = COLOURS.get(dtype, "#555555")
        panel.axhline(1.0, color="#888888", linewidth=1)
        panel.errorbar(
            xs, medians, yerr=spread, fmt="o", markersize=3, color=colour, elinewidth=0.8
        )
        above = [(x, ratio) for x, ratio in enumerate(medians) if ratio > TOP]
        for line, (x, ratio) in enumerate(above):  # drawn at the edge of the scale, with a number
            panel.plot(x, TOP, "^", markersize=6, color=colour, clip_on=False)
            panel.annotate(
                f"{ratio:.1f}",
                (x, TOP),
                xytext=(0, -12 * (line + 1)),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
        panel.set_yscale("log", base=2)
        panel.set_ylim(0.42, TOP)
        ticks = [0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3]
        panel.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        panel.set_yticks([], minor=True)
        panel.set_title(f"{dtype}: {len(mine)} problems", fontsize=10)
        panel.set_xlabel("problems, sorted")
        panel.grid(axis="y", color="#e5e5e5", linewidth=0.6)
        panel.set_axisbelow(True)
    panels[0][0].set_ylabel("time of cuBLAS / time of the best CUTLASS kernel")
    names = ", ".join(sorted({w.device.name for w in winners}))
    figure.suptitle(f"{names}: above 1, CUTLASS is faster and is served; below, cuBLAS stays")
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
