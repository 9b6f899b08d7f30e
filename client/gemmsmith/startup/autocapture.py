"""A capture of a program that knows nothing of it: what `GEMMSMITH_CAPTURE` switches on.

Every process that imports torch records its products, in all threads, from that import on, and
writes them down after each step that is a power of two, when it ends, and when the number of steps
is reached that `GEMMSMITH_CAPTURE_STEPS` says: from then on it is as if it had never been captured.
A step ends with the step of an optimizer of torch's. What it takes to read what was recorded is
imported when that is written, and not at all where nothing ran.
"""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch._compile import _disable_dynamo
from torch.optim.optimizer import register_optimizer_step_post_hook

from gemmsmith.program.built import modules, remember
from gemmsmith.program.calls import Calls, compiled
from gemmsmith.program.variables import LOADED, PRODUCTS, STEPS_VARIABLE, STOP_VARIABLE, STOPPED

if TYPE_CHECKING:
    from gemmsmith.ops.models.foreseen import Foreseen


def begin(folder: Path) -> None:
    """Record from now on, into a file of this process in `folder`."""
    (folder / f"{os.getpid()}{LOADED}").touch()
    if _is_torchs_own():
        return
    remember()
    steps = os.environ.get(STEPS_VARIABLE, "0")
    recording = _Recording(
        folder,
        steps=int(steps) if steps.isdecimal() else 0,
        stop=os.environ.get(STOP_VARIABLE) == "1",
    )

    @_disable_dynamo  # where a program compiles its optimizer's step
    def stepped(*_: Any) -> None:
        recording.stepped()

    register_optimizer_step_post_hook(stepped)
    atexit.register(recording.write)
    os.register_at_fork(after_in_child=recording.forked)


def _is_torchs_own() -> bool:
    """Whether this process serves a compiler of torch's, which times products in it."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and str(spec.name).startswith("torch._inductor")


class _Recording:
    def __init__(self, folder: Path, *, steps: int, stop: bool) -> None:
        self._folder, self._wanted, self._stop = folder, steps, stop
        self._file = _file(folder)
        self._steps = 0
        self._done = False
        self._foreseen: Foreseen | None = None
        self._calls = Calls(more=self._look)
        self._calls.start()

    def stepped(self) -> None:
        """An optimizer has made its step."""
        if self._done:
            return
        self._steps += 1
        if self._wanted and self._steps >= self._wanted:
            self._end()
        elif self._steps.bit_count() == 1:
            self.write()

    def _end(self) -> None:
        self._done = True
        self._calls.stop()
        self.write()
        if self._stop and threading.current_thread() is threading.main_thread():
            (self._folder / STOPPED).touch()
            raise SystemExit(0)

    def write(self) -> None:
        """Write down what was found so far, in place of what was written before."""
        if not (self._calls.total or self._calls.unseen or compiled()):
            return
        try:
            from gemmsmith.files import publish
            from gemmsmith.ops.capturing import Shapes

            self._look()
            shapes = Shapes(self._calls)
            if self._foreseen is not None:
                fused = self._foreseen.problems(shapes.problems)
                shapes.problems.update(fused - shapes.problems)
            publish(self._file, shapes.document)
        except Exception as error:  # noqa: BLE001 - the program must not end by what it did not ask for
            sys.stderr.write(f"gemmsmith: the capture cannot be written: {error}\n")

    def _look(self) -> None:
        """See what models are now: a program may let go of them before it ends."""
        built = modules()
        if built:
            from gemmsmith.ops.models.foreseen import Foreseen

            self._foreseen = self._foreseen or Foreseen()
            self._foreseen.look(built)

    def forked(self) -> None:
        """This process is a child now: what the parent ran is the parent's."""
        self._calls.clear()
        self._file = _file(self._folder)
        self._steps = 0
        # A process of multiprocessing ends without atexit, and forgets now what was to end with it.
        multiprocessing.util.register_after_fork(
            self, lambda one: multiprocessing.util.Finalize(one, one.write, exitpriority=10)
        )


def _file(folder: Path) -> Path:
    return folder / f"{socket.gethostname()}-{os.getpid()}-{time.time_ns()}{PRODUCTS}"
