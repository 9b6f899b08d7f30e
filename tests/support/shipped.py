"""The recorded sweeps of the repository, and the shipped winners of their problems."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from gemmsmith.core.problem import Problem
from gemmsmith.signing import Trusted
from tuner.devices import open_device
from tuner.exchange import read_winners
from tuner.trial import Winner

ROOT = Path(__file__).parents[2]
SWEEPS = ROOT / "configs" / "sweeps"
DEVICE = "replay:nvidia-h200-132sm"
SLUG = "nvidia-h200-132sm"
TRUSTED = Trusted.load(ROOT / "configs" / "trusted")
"""The key that signed the shipped winners."""


@cache
def recorded_problems() -> tuple[Problem, ...]:
    """The problems that a worker without a GPU can tune."""
    problems: tuple[Problem, ...] = open_device(DEVICE, sweeps=SWEEPS).problems  # type: ignore[attr-defined]
    return problems


def shipped_files() -> list[Path]:
    """The files of shipped winners."""
    return sorted((ROOT / "configs" / "winners").glob("*.jsonl"))


def shipped_winners() -> list[Winner]:
    """The shipped winners of recorded problems, whose packs are not on this machine."""
    shipped = {winner.problem: winner for file in shipped_files() for winner in read_winners(file)}
    known = (shipped[problem] for problem in recorded_problems() if problem in shipped)
    return [replace(winner, pack=None) for winner in known]
