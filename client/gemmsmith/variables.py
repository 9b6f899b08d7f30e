"""Environment variables by which programs that know nothing of gemmsmith run with it."""

from __future__ import annotations

import os

VARIABLE = "GEMMSMITH"
"""A service's URL, the path of a bundle, or `auto`: the nearest there is. `off`: nothing."""

CAPTURE_VARIABLE = "GEMMSMITH_CAPTURE"
"""A folder: every process writes there what it multiplies. `gemmsmith capture` sets it."""


def is_first_rank() -> bool:
    """Whether it is this process of the job that speaks for all."""
    return os.environ.get("RANK", "0") == "0"
