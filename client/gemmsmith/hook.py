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

from gemmsmith.variables import CAPTURE_VARIABLE, VARIABLE, is_first_rank

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
        _quietly(lambda: Path(folder, f"{os.getpid()}.seen").touch(), CAPTURE_VARIABLE)
    if "torch" in sys.modules:
        _begin()
    else:
        sys.meta_path.insert(0, _Waiting())


class _Waiting:
    """Finds nothing; sees that torch is being imported, and has `_begin` called after it."""

    def find_spec(self, name: str, *_: Any) -> Any:
        """As import calls its finders."""
        if name != "torch" or self not in sys.meta_path:
            return None
        from importlib.util import find_spec

        sys.meta_path.remove(self)
        spec = find_spec(name)
        execute = None if spec is None else getattr(spec.loader, "exec_module", None)
        if spec is None or execute is None:
            return None
        loader: Any = spec.loader

        def exec_module(module: Any) -> None:
            del loader.exec_module
            execute(module)
            _begin()

        loader.exec_module = exec_module
        return spec


def _begin() -> None:
    """Now torch is there."""
    folder, value = os.environ.get(CAPTURE_VARIABLE, ""), os.environ.get(VARIABLE, "").strip()
    if folder:
        _quietly(lambda: _capture(folder), CAPTURE_VARIABLE)
    if value.lower() not in _OFF:
        _quietly(lambda: _wait_for_devices(value), VARIABLE)


def _capture(folder: str) -> None:
    from gemmsmith.built import remember
    from gemmsmith.ops.autocapture import begin

    remember()
    begin(Path(folder))


def _wait_for_devices(value: str) -> None:
    """Have `value`'s winners run from when CUDA and the ranks' process group are there."""
    import torch

    from gemmsmith.built import remember

    if not value.startswith(("http://", "https://")) and value.lower() != "auto":
        value = str(Path(value).expanduser().absolute())  # the program may change its folder
        # Ranks find out together: none is to wait for one that has no such file.
        if not _waits_for_others() and not Path(value).is_file():
            raise ValueError(
                f"it must be a service's URL, a bundle's path or auto, and there is no file {value}"
            )

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
