"""Names products without a winner in the log, with the command that tunes them.

A process names at most `MOST` of them, each once, when torch is about to compute it for the first
time. In a job of several ranks the first one does. While a capture runs, its report names them.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence

from gemmsmith.core.problem import Problem
from gemmsmith.program.captured import tune_command
from gemmsmith.program.variables import CAPTURE_VARIABLE, is_first_rank

log = logging.getLogger("gemmsmith")

MOST = 3
MATTERS = 0.05
"""Smallest part, of the operations of the largest product so far, of a product that is named."""


class Untuned:
    """Decides which of an engine's products matter."""

    named: set[Problem] = set()  # noqa: RUF012 - those of the process
    lock = threading.Lock()

    def __init__(self, winners: object) -> None:
        """Takes a lookup. One without a snapshot, or without any winner, has nothing to say."""
        self._winners = winners
        self._largest = 0.0  # operations

    def decided(self, problem: Problem, *, has_winner: bool) -> None:
        """Called when a product is decided."""
        self._largest = max(self._largest, problem.flops)
        if has_winner or len(self.named) >= MOST or problem.flops < MATTERS * self._largest:
            return
        rows: Sequence[object] = getattr(getattr(self._winners, "snapshot", None), "rows", ())
        if rows and is_first_rank() and CAPTURE_VARIABLE not in os.environ:
            self._name(problem)

    def _name(self, problem: Problem) -> None:
        with self.lock:
            if problem in self.named or len(self.named) >= MOST:
                return
            self.named.add(problem)
            is_last = len(self.named) == MOST
        command = tune_command(problem, getattr(self._winners, "url", None))
        log.warning(
            "no winner for %s: torch runs it, which may be slower. Tune it: %s%s",
            problem,
            command,
            ". Further sizes are not named: `gemmsmith run --tune -- COMMAND` tunes a program"
            if is_last
            else "",
        )
