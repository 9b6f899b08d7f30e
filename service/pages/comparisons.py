"""A problem's answer beside others, on other GPUs and in other revisions, and how to ask for it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import zip_longest

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.problem import Problem
from service.http.documents import best_url
from tuner.store import Store
from tuner.store.revisions import WinnerRevision
from tuner.trial import Winner


def elsewhere(
    store: Store, asked: Problem, models: Sequence[DeviceModel]
) -> list[tuple[DeviceModel, Winner]]:
    """The problem's winner on each of the device models that has one."""
    found = ((model, store.winner(asked, model.slug)) for model in models)
    return [(model, winner) for model, winner in found if winner is not None]


def changes(history: Sequence[WinnerRevision]) -> list[tuple[WinnerRevision, str]]:
    """Each revision, newest first, with what is another than in the one before."""
    return [
        (revision, _change(revision.winner, older.winner) if older else "")
        for revision, older in zip_longest(history, history[1:])
    ]


def _change(one: Winner, before: Winner) -> str:
    said = []
    if one.candidate is None or before.candidate is None:
        if one.candidate is not before.candidate:
            said.append("a candidate" if one.candidate else "no candidate")
    elif one.candidate.kernel.name != before.candidate.kernel.name:
        said.append("another kernel")
    elif one.candidate.key != before.candidate.key:
        said.append("another launch of the same kernel")
    names = ("driver", "cuda", "cutlass", "cublas")
    software = [
        f"{name} {getattr(one.environment, name)}"
        for name in names
        if getattr(one.environment, name) != getattr(before.environment, name)
    ]
    said += software
    if one.speedup and before.speedup:
        change = one.speedup.median / before.speedup.median - 1
        said.append(f"ratio {change:+.1%}")
    return ", ".join(said) or "nothing that is recorded"


def curl(asked: Problem, device: str, origin: str, *, with_key: bool) -> str:
    """A command that prints this answer."""
    key = ' -H "Authorization: Bearer $GEMMSMITH_API_KEY"' if with_key else ""
    return f"curl -s{key} {shlex.quote(origin + best_url(asked, device))}"


def python(asked: Problem, device: str, origin: str, *, with_key: bool) -> str:
    """A program that prints this answer."""
    key = ', api_key=os.environ["GEMMSMITH_API_KEY"]' if with_key else ""
    batch = f", batch={asked.batch}" if asked.batch != 1 else ""
    words = f"dtype={asked.dtype!r}, layout={asked.layout.value!r}, device={device!r}"
    return (
        f"{'import os' if with_key else ''}\nimport gemmsmith\n\n".lstrip()
        + f"with gemmsmith.Client({origin!r}{key}) as client:\n"
        f"    answer = client.best({asked.m}, {asked.n}, {asked.k}{batch}, {words})\n"
        "    print(answer.use, answer.speedup, answer.config)"
    )
