"""Environment variables that make any Python program use gemmsmith, and the files that a capture
writes.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import NamedTuple

VARIABLE = "GEMMSMITH"
"""Where winners come from: a service's URL, a bundle's path, or `auto`. `off` disables them."""

NUMERICS_VARIABLE = "GEMMSMITH_NUMERICS"
"""`invariant`: products run kernels of one order of sums, or the program ends with an error."""

CAPTURE_VARIABLE = "GEMMSMITH_CAPTURE"
"""The folder to which every process writes its products. `gemmsmith capture` sets it."""

STEPS_VARIABLE = "GEMMSMITH_CAPTURE_STEPS"
"""Number of steps that are recorded. 0 or not set: all steps."""

STOP_VARIABLE = "GEMMSMITH_CAPTURE_STOP"
"""If it is 1, the program ends after these steps, with status 0."""

RAN_VARIABLE = "GEMMSMITH_CAPTURE_RAN"
"""If it is 1, each process also writes which kernels ran its products. `run --report` sets it."""

ADVISE_VARIABLE = "GEMMSMITH_CAPTURE_ADVISE"
"""If it is 1, each process writes a description of a step instead of its products. `gemmsmith
advise` sets it."""

DEFER_LOGITS_VARIABLE = "GEMMSMITH_DEFER_LOGITS"
"""If it is 0, heads of patched models compute their logits, also where only a loss reads them."""

SEEN = ".seen"
"""Suffix of the file that each Python process writes to the capture's folder when it starts."""

LOADED = ".loaded"
"""Suffix of the file that a process writes when it has imported torch."""

PRODUCTS = ".products.json"
"""Suffix of the file with a process's products."""

RAN = ".ran.json"
"""Suffix of the file that says which kernels ran a process's products."""

STEP = ".step.json"
"""Suffix of the file with the description of a process's step."""

STOPPED = "stopped"
"""The file that a process writes when it ends after its steps."""


def defers_logits() -> bool:
    return os.environ.get(DEFER_LOGITS_VARIABLE) != "0"


def is_first_rank() -> bool:
    # The first rank reports for all ranks.
    return os.environ.get("RANK", "0") == "0"


class Ending(NamedTuple):
    """After how many steps the environment asks a program to end.

    Attributes:
        steps: how many are recorded; 0: all.
        stops: whether the program ends after them.
    """

    steps: int
    stops: bool

    @classmethod
    def asked(cls) -> Ending:
        steps = os.environ.get(STEPS_VARIABLE, "0")
        return cls(
            int(steps) if steps.isdecimal() else 0, stops=os.environ.get(STOP_VARIABLE) == "1"
        )

    def carry_out(self, folder: Path) -> None:
        """End the program with status 0, if that was asked; called after the last step.

        Only the main thread can end it: in another one the program goes on.
        """
        if self.stops and threading.current_thread() is threading.main_thread():
            (folder / STOPPED).touch()
            raise SystemExit(0)
