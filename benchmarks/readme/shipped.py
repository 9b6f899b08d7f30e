"""The shipped winners, and what a program gets that runs what is served."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from gemmsmith.core.device import DeviceModel
from service.report.problem_rows import unaligned_operands
from tuner.exchange import read_winners
from tuner.trial import Winner

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def shipped() -> list[Winner]:
    """All shipped winners that were compared with the default."""
    paths = sorted((ROOT / "configs" / "winners").glob("*.jsonl"))
    return [w for path in paths for w in read_winners(path) if w.speedup is not None]


def models(winners: Iterable[Winner]) -> list[DeviceModel]:
    """Their GPU models, the one with most winners first."""
    counts = Counter(w.device.slug for w in winners)
    found = {w.device.slug: w.device for w in winners}
    return [found[slug] for slug in sorted(found, key=lambda slug: (-counts[slug], slug))]


def short(model: DeviceModel) -> str:
    """The model's name as people say it: H200, H100."""
    return model.name.removeprefix("NVIDIA ").partition(" ")[0]


def got(winner: Winner) -> float:
    """How many times as fast as the default a program is that runs what is served."""
    return 1.0 if winner.use.is_default or winner.speedup is None else winner.speedup.median


def is_aligned(winner: Winner) -> bool:
    """Whether all rows start on 16 bytes, as the default's fast kernels want them."""
    return not unaligned_operands(winner.problem)


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive numbers; the mean of ratios."""
    return math.exp(statistics.fmean(math.log(value) for value in values))


AVERAGES = "the geometric mean · the median"
"""What `averages` writes: a few outliers move the first and not the second."""


def averages(values: Sequence[float]) -> str:
    """The geometric mean and the median of ratios, as every table has them."""
    return f"{geometric_mean(values):.3f} × · {statistics.median(values):.3f}"


def origin(winners: Sequence[Winner]) -> str:
    """Under which drivers and when they were measured."""
    drivers = ", ".join(sorted({w.environment.driver for w in winners}))
    dates = sorted(w.promoted_at[:10] for w in winners)
    return f"driver {drivers}, {' to '.join(sorted({dates[0], dates[-1]}))}"
