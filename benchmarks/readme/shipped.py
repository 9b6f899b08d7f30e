"""The shipped winners, and the speed-up of a program that runs what is served."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from msgspec import UNSET

from gemmsmith.core.device import DeviceModel
from gemmsmith.runtime import cublaslt
from service.report.problem_rows import unaligned_operands
from tuner.exchange import read_winners
from tuner.trial import Winner

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def shipped() -> list[Winner]:
    """Read the shipped winners that were compared with the default."""
    paths = sorted((ROOT / "configs" / "winners").glob("*.jsonl"))
    return [w for path in paths for w in read_winners(path) if w.speedup is not None]


def models(winners: Iterable[Winner]) -> list[DeviceModel]:
    """Return the GPU models of winners, the one with most winners first."""
    counts = Counter(w.device.slug for w in winners)
    devices = {w.device.slug: w.device for w in winners}
    return [devices[slug] for slug in sorted(devices, key=lambda slug: (-counts[slug], slug))]


def short(model: DeviceModel) -> str:
    return model.name.removeprefix("NVIDIA ").partition(" ")[0]


def got(winner: Winner) -> float:
    """Return the speed-up of what is served over the default; 1 if that is the default."""
    return 1.0 if winner.use.is_default or winner.speedup is None else winner.speedup.median


@cache
def library() -> int:
    """Return the version of cuBLASLt that the locked installation loads."""
    lock = (ROOT / "requirements" / "gpu.lock").read_text(encoding="utf-8")
    release = re.search(r"^nvidia-cublas==(\S+)", lock, re.MULTILINE)
    assert release is not None
    return cublaslt.number(release[1])


def runs(winner: Winner) -> bool:
    """Whether what is served can run after the locked installation."""
    if winner.use.is_default or winner.candidate is None:
        return True
    algorithm = winner.candidate.launch.algorithm
    return algorithm is UNSET or algorithm.library == library()


def is_aligned(winner: Winner) -> bool:
    """Whether all rows begin at multiples of 16 bytes, as the default's fast kernels need."""
    return not unaligned_operands(winner.problem)


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))


AVERAGES = "the geometric mean · the median"
"""What `averages` writes. A few outliers change the first but not the second."""


def averages(values: Sequence[float]) -> str:
    """Write the geometric mean and the median of ratios, as in every table."""
    return f"{geometric_mean(values):.3f} × · {statistics.median(values):.3f}"


def origin(winners: Sequence[Winner]) -> str:
    """Write with which drivers and when winners were measured."""
    drivers = ", ".join(sorted({w.environment.driver for w in winners}))
    dates = sorted(w.promoted_at[:10] for w in winners)
    return f"driver {drivers}, {' to '.join(sorted({dates[0], dates[-1]}))}"
