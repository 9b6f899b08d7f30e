"""What a shell completes option values with: closed lists, and the files that are there."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def _values(all_of: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """A completion from a list that is only made when somebody presses Tab."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")  # `--dtype bf16,fp`
        return [f"{before}{comma}{value}" for value in all_of() if value.startswith(last)]

    return complete


def _dtypes() -> Iterable[str]:
    from gemmsmith.operation import DType

    return list(DType)


def _layouts() -> Iterable[str]:
    from gemmsmith.operation import Layout

    return list(Layout)


def _efforts() -> Iterable[str]:
    from gemmsmith.tuning import Effort

    return list(Effort)


def _states() -> Iterable[str]:
    from gemmsmith.tuning import JobState

    return list(JobState)


def _levels() -> Iterable[str]:
    from tuner.backends import Level

    return list(Level)


def _architectures() -> Iterable[str]:
    from tuner.arch import ARCHITECTURES

    return list(ARCHITECTURES)


def _scopes() -> Iterable[str]:
    from tuner.store.keys import Scope

    return list(Scope)


def _actions() -> Iterable[str]:
    from tuner.store.audit import Action

    return list(Action)


def _phases() -> Iterable[str]:
    from tuner.trial import Phase

    return list(Phase)


def _formats() -> Iterable[str]:
    from service.http.tables import FileFormat

    return list(FileFormat)


def _slugs() -> list[str]:
    """Device models that winners are shipped of."""
    from tuner import places

    files = places.shipped("configs/winners").glob("*.jsonl")
    return sorted({file.name.partition(".")[0] for file in files})


def _devices() -> Iterable[str]:
    from tuner import places

    sweeps = places.shipped("configs/sweeps").glob("*.jsonl.zst")
    return ["cuda:0", *sorted({f"replay:{file.name.partition('.')[0]}" for file in sweeps})]


def _suites() -> Iterable[str]:
    from pathlib import Path

    from tuner import places

    shipped = (file.stem for file in places.shipped("configs/suites").glob("*.toml"))
    return sorted({*shipped, *map(str, Path().glob("*.toml"))})


dtypes = _values(_dtypes)
layouts = _values(_layouts)
efforts = _values(_efforts)
states = _values(_states)
levels = _values(_levels)
architectures = _values(_architectures)
scopes = _values(_scopes)
actions = _values(_actions)
phases = _values(_phases)
formats = _values(_formats)
slugs = _values(_slugs)
devices = _values(_devices)
suites = _values(_suites)
