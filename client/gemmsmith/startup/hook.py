"""Makes programs that do not use gemmsmith run winners or a capture, by environment variables.

`gemmsmith.pth`, which is installed with the package, calls `install` when Python starts, if one of
the variables is set. `GEMMSMITH` says where winners come from, `GEMMSMITH_NUMERICS` whether a row
has the same bits at every M, and `GEMMSMITH_CAPTURE` is the folder for a capture. Child processes
inherit them. At the start only this module is imported. It waits until the program has imported
torch.

A process that never uses a GPU runs no kernel. So winners are fetched when CUDA is initialized and,
in a job of several ranks, when the process group is initialized as well: all ranks pass these two
points. Until then torch's own operators run. Any failure here is a single warning, and the program
continues. With `GEMMSMITH_NUMERICS` it is an error that ends the program.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from gemmsmith.program.variables import (
    CAPTURE_VARIABLE,
    NUMERICS_VARIABLE,
    SEEN,
    VARIABLE,
    is_first_rank,
)

_SAID = "GEMMSMITH_SAID"
_OFF = ("", "0", "off", "none")
_GROUP = "init_process_group"

log = logging.getLogger("gemmsmith")

_Attempt = Callable[[Callable[[], None], str], None]


class _Installed:
    done = False


def install() -> None:
    """Do what the variables ask for, once torch is imported. Further calls have no effect."""
    if _Installed.done:
        return
    _Installed.done = True
    folder = os.environ.get(CAPTURE_VARIABLE, "")
    if folder:
        _quietly(lambda: _seen(Path(folder)), CAPTURE_VARIABLE)
    if "torch" in sys.modules:
        _begin()
    else:
        sys.meta_path.insert(0, _Waiting())


def _seen(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{os.getpid()}{SEEN}").touch()


class _Waiting:
    """A finder that finds torch by the other finders, and calls `_begin` once torch is imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        for finder in tuple(sys.meta_path):
            if finder is not self and hasattr(finder, "find_spec"):
                spec: Any = finder.find_spec(name, path, target)
                if spec is not None:
                    if hasattr(spec.loader, "exec_module"):
                        spec.loader = _Loader(spec.loader, self._executed)
                    return spec
        return None

    def _executed(self) -> None:
        # A program may look torch up without importing it, and an import may fail: the finder stays
        # until an import has succeeded.
        if self in sys.meta_path and "torch" in sys.modules:
            sys.meta_path.remove(self)
            _begin()


class _Loader:
    """Wraps a loader and reports when the module has been executed."""

    def __init__(self, loader: Any, executed: Callable[[], None]) -> None:
        self._loader, self._executed = loader, executed

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__.get("_loader"), name)

    def exec_module(self, module: Any) -> None:
        # The program sees the original loader.
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._executed()


def _begin() -> None:
    folder, value = os.environ.get(CAPTURE_VARIABLE, ""), os.environ.get(VARIABLE, "").strip()
    if folder:
        _quietly(lambda: _capture(folder), CAPTURE_VARIABLE)
    numerics = _numerics(value)
    if value.lower() not in _OFF:
        attempt = _or_end if numerics else _quietly
        attempt(lambda: _wait_for_devices(value, numerics, attempt), VARIABLE)


def _numerics(winners: str) -> str | None:
    """The value of `GEMMSMITH_NUMERICS`.

    Raises:
        ValueError: it is another word, or `winners` is not set.
    """
    from gemmsmith.core.numerics import demands_order

    numerics = os.environ.get(NUMERICS_VARIABLE, "").strip() or None
    if demands_order(numerics, NUMERICS_VARIABLE) and not winners:
        raise ValueError(f"{NUMERICS_VARIABLE}={numerics} needs winners: set {VARIABLE} as well")
    return numerics


def _capture(folder: str) -> None:
    from gemmsmith.startup.autocapture import begin

    begin(Path(folder))


def _wait_for_devices(value: str, numerics: str | None, attempt: _Attempt) -> None:
    """Run `value`'s winners as soon as CUDA and the ranks' process group are initialized."""
    import torch

    if not value.startswith(("http://", "https://")) and value.lower() != "auto":
        value = str(Path(value).expanduser().absolute())  # the program may change its folder
        # With several ranks this check comes later: if this rank gave up here, the others would
        # wait for it.
        if not _waits_for_others() and not Path(value).is_file():
            raise ValueError(
                f"it must be a service's URL, a bundle's path or auto, and there is no file {value}"
            )

    from gemmsmith.program.built import remember

    remember()

    def start() -> None:
        from gemmsmith.ops.autouse import start

        start(value, numerics)

    def on_devices() -> None:
        if not _waits_for_others():
            attempt(start, VARIABLE)

    def on_group() -> None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            attempt(start, VARIABLE)

    torch.cuda._lazy_call(on_devices)  # type: ignore[no-untyped-call]
    if torch.distributed.is_available():
        _after_group(on_group)


def _waits_for_others() -> bool:
    """Whether this is a rank of a job whose process group is not initialized yet."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    if not ranks.isdecimal() or int(ranks) <= 1:
        return False
    import torch.distributed as dist

    return not (dist.is_available() and dist.is_initialized())


def _after_group(react: Callable[[], None]) -> None:
    """Call `react` after each `init_process_group`."""
    import torch.distributed as dist

    original = dist.init_process_group

    @wraps(original)
    def init_process_group(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        react()
        return result

    # Modules of torch.distributed have imported the function by name.
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed") and vars(module).get(_GROUP) is original:
            setattr(module, _GROUP, init_process_group)


def _or_end(do: Callable[[], None], variable: str) -> None:
    """Do what a variable asks for. If that fails, raise: the program must not run otherwise."""
    try:
        do()
    except Exception as error:
        value = os.environ.get(variable)
        raise RuntimeError(f"{NUMERICS_VARIABLE} needs {variable}={value}: {error}") from error


def _quietly(do: Callable[[], None], variable: str) -> None:
    """Do what a variable asks for. If that fails, warn and continue."""
    try:
        do()
    except Exception as error:  # noqa: BLE001 - gemmsmith must not stop the program
        # The job warns once: its first rank, unless its parent process has warned.
        if is_first_rank() and not os.environ.get(_SAID):
            os.environ[_SAID] = "1"
            log.warning("%s is ignored: %s", variable, error)
