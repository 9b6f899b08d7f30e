"""Which cuBLASLt torch loads on this machine: an algorithm runs with one version of it only."""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import PackageNotFoundError, version

_WHEELS = ("nvidia-cublas", "nvidia-cublas-cu12")
"""For CUDA 13, and for CUDA 12."""


@cache
def installed() -> int | None:
    """`cublasLtGetVersion()` of the library in the wheels that torch depends on.

    Returns None if there are no such wheels, so that the version is not known without a GPU.
    """
    for wheel in _WHEELS:
        try:
            return number(version(wheel))
        except PackageNotFoundError:
            continue
    return None


def number(release: str) -> int:
    """The number of a release, as the library counts: 130101 for `13.1.1.3`; 0 for other text."""
    major, minor, patch = (int(part) for part in re.findall(r"\d+", f"{release}.0.0.0")[:3])
    return major * 10_000 + minor * 100 + patch


def text(number: int) -> str:
    return f"{number // 10_000}.{number // 100 % 100}.{number % 100}"
