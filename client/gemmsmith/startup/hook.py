"""What environment variables switch on in programs that know nothing of gemmsmith.

`gemmsmith.pth`, installed beside the package, calls `install` when Python starts and one of the
variables is set. Nothing is imported then but this module; it waits until the program has imported
torch. `GEMMSMITH` says whose winners to run, `GEMMSMITH_CAPTURE` a folder to write down in which
products ran; every process that inherits them does so.

A process that never uses a GPU runs no kernel: winners are looked for when CUDA is initialized, and
in a job of several ranks when their process group is as well, the two moments that all ranks pass.
Until then torch computes. Whatever goes wrong here is one warning, and the program goes on.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from gemmsmith.program.variables import CAPTURE_VARIABLE, SEEN, VARIABLE, is_first_rank

_SAID = "GEMMSMITH_SAID"
_OFF = ("", "0", "off", "none")
_GROUP = "init_process_group"

log = logging.getLogger("gemmsmith")


class _Installed:
    """What this process waits for."""

    done = False


def install() -> None:
    """Do as the environment says once torch is imported; called again, nothing."""
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
    """Finds torch as the other finders do, and has `_begin` called once it has been executed.

    A program may ask where torch is without importing it, and an import may fail. So it waits until
    an import has succeeded.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """As import calls its finders."""
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
        if self in sys.meta_path and "torch" in sys.modules:
            sys.meta_path.remove(self)
            _begin()


class _Loader:
    """A loader that says when it has executed its module, and is gone from the module by then."""

    def __init__(self, loader: Any, executed: Callable[[], None]) -> None:
        self._loader, self._executed = loader, executed

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__.get("_loader"), name)

    def exec_module(self, module: Any) -> None:
        """As import calls its loaders."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._executed()


def _begin() -> None:
    """Now torch is there."""
    folder, value = os.environ.get(CAPTURE_VARIABLE, ""), os.environ.get(VARIABLE, "").strip()
    if folder:
        _quietly(lambda: _capture(folder), CAPTURE_VARIABLE)
    if value.lower() not in _OFF:
        _quietly(lambda: _wait_for_devices(value), VARIABLE)


def _capture(folder: str) -> None:
    from gemmsmith.startup.autocapture import begin

    begin(Path(folder))


def _wait_for_devices(value: str) -> None:
    """Have `value`'s winners run from when CUDA and the ranks' process group are there."""
    import torch

    if not value.startswith(("http://", "https://")) and value.lower() != "auto":
        value = str(Path(value).expanduser().absolute())  # the program may change its folder
        # Ranks find out together: none is to wait for one that has no such file.
        if not _waits_for_others() and not Path(value).is_file():
            raise ValueError(
                f"it must be a service's URL, a bundle's path or auto, and there is no file {value}"
            )

    from gemmsmith.program.built import remember

    remember()

    def start() -> None:
        from gemmsmith.ops.autouse import start

        start(value)

    def on_devices() -> None:
        if not _waits_for_others():
            _quietly(start, VARIABLE)

    def on_group() -> None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            _quietly(start, VARIABLE)

    torch.cuda._lazy_call(on_devices)  # type: ignore[no-untyped-call]
    if torch.distributed.is_available():
        _after_group(on_group)


def _waits_for_others() -> bool:
    """Whether this is a rank of several that have not met yet."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    if not ranks.isdecimal() or int(ranks) <= 1:
        return False
    import torch.distributed as dist

    return not (dist.is_available() and dist.is_initialized())


def _after_group(react: Callable[[], None]) -> None:
    """Have `react` called on every rank after each `init_process_group`."""
    import torch.distributed as dist

    original = dist.init_process_group

    @wraps(original)
    def init_process_group(*arguments: Any, **options: Any) -> Any:
        found = original(*arguments, **options)
        react()
        return found

    # Modules of torch.distributed hold it under its name, too.
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed") and vars(module).get(_GROUP) is original:
            setattr(module, _GROUP, init_process_group)


def _quietly(do: Callable[[], None], variable: str) -> None:
    """Do what a variable asks for; where that fails, say so once, and go on."""
    try:
        do()
    except Exception as error:  # noqa: BLE001 - the program must not end by what it did not ask for
        _warn(f"{variable} is ignored: {error}")


def _warn(text: str) -> None:
    """The one warning of a job: one rank for all, and none where whoever started it has warned."""
    if is_first_rank() and not os.environ.get(_SAID):
        os.environ[_SAID] = "1"
        log.warning("%s", text)
