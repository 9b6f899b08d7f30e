"""A problem's winners on other GPUs and in other revisions, and programs that request it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import zip_longest

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.problem import Problem
from service.documents import best_url
from tuner.store import Store
from tuner.store.revisions import WinnerRevision
from tuner.trial import Winner


def elsewhere(
    store: Store, problem: Problem, models: Sequence[DeviceModel]
) -> list[tuple[DeviceModel, Winner]]:
    winners = ((model, store.winner(problem, model.slug)) for model in models)
    return [(model, winner) for model, winner in winners if winner is not None]


def changes(history: Sequence[WinnerRevision]) -> list[tuple[WinnerRevision, str]]:
    """Return each revision, newest first, with its differences from the revision before."""
    return [
        (revision, _change(revision.winner, older.winner) if older else "")
        for revision, older in zip_longest(history, history[1:])
    ]


def _change(winner: Winner, before: Winner) -> str:
    changes = []
    if winner.candidate is None or before.candidate is None:
        if winner.candidate is not before.candidate:
            changes.append("a candidate" if winner.candidate else "no candidate")
    elif winner.candidate.kernel.name != before.candidate.kernel.name:
        changes.append("another kernel")
    elif winner.candidate.key != before.candidate.key:
        changes.append("another launch of the same kernel")
    changes += [
        f"{name} {getattr(winner.environment, name)}"
        for name in ("driver", "cuda", "cutlass", "cublas")
        if getattr(winner.environment, name) != getattr(before.environment, name)
    ]
    if winner.speedup and before.speedup:
        change = winner.speedup.median / before.speedup.median - 1
        changes.append(f"ratio {change:+.1%}")
    return ", ".join(changes) or "nothing that is recorded"


def curl(problem: Problem, device: str, origin: str, *, with_key: bool) -> str:
    key = ' -H "Authorization: Bearer $GEMMSMITH_API_KEY"' if with_key else ""
    return f"curl -s{key} {shlex.quote(origin + best_url(problem, device))}"


def python(problem: Problem, device: str, origin: str, *, with_key: bool) -> str:
    key = ', api_key=os.environ["GEMMSMITH_API_KEY"]' if with_key else ""
    batch = f", batch={problem.batch}" if problem.batch != 1 else ""
    kind = f"dtype={problem.dtype!r}, layout={problem.layout.value!r}, device={device!r}"
    return (
        f"{'import os' if with_key else ''}\nimport gemmsmith\n\n".lstrip()
        + f"with gemmsmith.Client({origin!r}{key}) as client:\n"
        f"    answer = client.best({problem.m}, {problem.n}, {problem.k}{batch}, {kind})\n"
        "    print(answer.use, answer.speedup, answer.config)"
    )
