"""Draws the loss curves of training runs, torch's and gemmsmith's on top of each other.

    python -m benchmarks.curves benchmarks/results/2026-11-22-h200-train.json -o training.png

A panel for each run of examples/train_gpt.py in the file. docs/training.md shows the picture.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLUMNS = 3


def draw(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw a panel for each run, three in a row."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    rows = -(-len(runs) // COLUMNS)
    figure, axes = pyplot.subplots(
        rows, COLUMNS, figsize=(10, 2.2 * rows), layout="constrained", squeeze=False
    )
    for panel, run in zip(axes.flat, runs, strict=False):
        losses = run["losses"]
        panel.plot(losses["torch"], label="torch", linewidth=4, alpha=0.35)
        panel.plot(losses["gemmsmith"], label="gemmsmith", linewidth=1, color="black")
        panel.set_title(f"{run['model']}, {run['precision']}, {run['mode']}", fontsize=9)
        panel.tick_params(labelsize=8)
    for panel in list(axes.flat)[len(runs) :]:
        panel.axis("off")
    for panel in axes[-1]:
        panel.set_xlabel("step", fontsize=9)
    axes[0][0].legend(fontsize=8)
    figure.supylabel("loss", fontsize=9)
    figure.savefig(path, dpi=110)


def main() -> int:
    """Draw the runs of a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=Path, help="a file with the runs")
    parser.add_argument("-o", "--output", type=Path, required=True, help="picture to write")
    options = parser.parse_args()
    draw(json.loads(options.results.read_text(encoding="utf-8"))["runs"], options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
