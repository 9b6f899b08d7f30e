"""Environment variables by which programs that know nothing of gemmsmith run with it, and the files
that they leave in the folder of a capture.
"""

from __future__ import annotations

import os

VARIABLE = "GEMMSMITH"
"""A service's URL, the path of a bundle, or `auto`: the nearest there is. `off`: nothing."""

CAPTURE_VARIABLE = "GEMMSMITH_CAPTURE"
"""A folder: every process writes there what it multiplies. `gemmsmith capture` sets it."""

STEPS_VARIABLE = "GEMMSMITH_CAPTURE_STEPS"
"""How many steps are recorded; 0 or not set: all."""

STOP_VARIABLE = "GEMMSMITH_CAPTURE_STOP"
"""Set to 1, the program ends after them, with status 0."""

SEEN = ".seen"
"""Ends the name of the file that each process of Python leaves in the folder when it starts."""

LOADED = ".loaded"
"""Of that which it leaves when it has imported torch."""

PRODUCTS = ".products.json"
"""Of that which holds its products."""

STOPPED = "stopped"
"""The file of a process that has ended after its steps, as it was to."""


def is_first_rank() -> bool:
    """Whether it is this process of the job that speaks for all."""
    return os.environ.get("RANK", "0") == "0"
