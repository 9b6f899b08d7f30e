"""Draws curves of measured runs: losses of training, or what `run --tune` does while it is awaited.

    cd benchmarks/results
    python -m benchmarks.curves 2026-11-22-h200-train.json -o training.png
    python -m benchmarks.curves 2026-11-27-h100-programs-held-out-{again,last}.json -o wait.png

A panel for each run of examples/train_gpt.py in the file, torch's losses and gemmsmith's on top of
each other; or a panel for each program that was tuned (`gpu_session.py programs`). docs/training.md
shows the pictures.
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
    figure, axes = _panels(-(-len(runs) // COLUMNS), COLUMNS, height=2.2)
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


def draw_waits(programs: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw a panel for each program: its compilers, its GPU, and what is saved so far."""
    figure, axes = _panels(len(programs), 1, height=2)
    for (panel,), program in zip(axes, programs, strict=True):
        cold = program["cold"]
        seconds, compilers, busy = zip(*cold["samples"], strict=True)
        panel.fill_between(seconds, busy, step="post", color="#1b6ca8", alpha=0.25, label="GPU, %")
        panel.plot(seconds, compilers, color="#c8553d", linewidth=1, label="compilers")
        panel.set_ylim(0, 105)
        saved = panel.twinx()
        when, ms = zip(*cold["saved"], strict=True)
        saved.step([0, *when], [0, *ms], where="post", color="black", label="saved, ms")
        saved.set_ylim(0, 1.1 * max(ms))
        panel.set_title(f"{program['program']}: {cold['seconds']:.0f} s", fontsize=9)
    for panel in (axes[0][0], saved):
        panel.legend(fontsize=8, loc="upper left" if panel is saved else "upper right")
    axes[-1][0].set_xlabel("seconds after the command", fontsize=9)
    figure.savefig(path, dpi=110)


def _panels(rows: int, columns: int, *, height: float) -> tuple[Any, Any]:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    size = (10, height * rows)
    return pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)


def main() -> int:
    """Draw the runs of a file, or the programs of all files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=Path, nargs="+", help="files with the runs")
    parser.add_argument("-o", "--output", type=Path, required=True, help="picture to write")
    options = parser.parse_args()
    contents = [json.loads(path.read_text(encoding="utf-8")) for path in options.results]
    if isinstance(contents[0], list):
        draw_waits([program for content in contents for program in content], options.output)
    else:
        draw([run for content in contents for run in content["runs"]], options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
