"""Nsight Compute on shipped winners and their defaults, as configs/profiles keeps them."""

from __future__ import annotations

import re
import sys

from benchmarks.session.core import Session

LIMIT_S = 240


def profile(session: Session) -> int:
    """Profile the problems of --problem, or ten of different kinds: profiles-*.jsonl."""
    problems = [word for problem in session.problems for word in ("--problem", problem)]
    return session.command(
        *(sys.executable, "-m", "benchmarks.profiles", "record", *problems),
        *("--time-limit", str(min(session.time_limit, LIMIT_S))),
        *("-o", str(session.file("profiles", ".jsonl"))),
        log=session.file("profile", ".log"),
        env=session.only_device(),
    )


def problem_name(text: str) -> str:
    """Check that a text begins with the sizes of a problem, as commands print it.

    Raises:
        ValueError: it does not.
    """
    if not re.fullmatch(r"\d+([x×]\d+){2,3}( [a-z0-9_.]+){0,2}", text):
        raise ValueError(
            "a problem to profile is MxNxK or GxMxNxK, its type and its layout, such as "
            f"'32x32x7168x2048 bf16.group_rows tn', not {text!r}"
        )
    return text
