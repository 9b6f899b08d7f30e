"""The values that a shell completes options with: closed lists, and files on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module


def _values(all_of: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """A completion from a list that is only made when the user presses Tab."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")  # `--dtype bf16,fp`
        return [f"{before}{comma}{value}" for value in all_of() if value.startswith(last)]

    return complete


def _members(module: str, name: str) -> Callable[[str], list[str]]:
    """A completion from a collection in a module, which is imported only for a completion."""
    return _values(lambda: list(getattr(import_module(module), name)))


def _slugs() -> list[str]:
    """Device models that have shipped winners."""
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


dtypes = _members("gemmsmith.core.operation", "DType")
layouts = _members("gemmsmith.core.operation", "Layout")
efforts = _members("gemmsmith.core.tuning", "Effort")
states = _members("gemmsmith.core.tuning", "JobState")
levels = _members("tuner.backends", "Level")
architectures = _members("tuner.arch", "ARCHITECTURES")
scopes = _members("tuner.store.keys", "Scope")
actions = _members("tuner.store.audit", "Action")
phases = _members("tuner.trial", "Phase")
formats = _members("service.http.tables", "FileFormat")
slugs = _values(_slugs)
devices = _values(_devices)
suites = _values(_suites)
