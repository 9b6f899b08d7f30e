"""Captures a program that does not use gemmsmith, if `GEMMSMITH_CAPTURE` is set.

Every process that imports torch records the products of all its threads from then on. It writes
them after steps 1, 2, 4, 8 …, when it ends, and after `GEMMSMITH_CAPTURE_STEPS` steps, when the
recording stops. A step is the step of an optimizer of torch. The modules that interpret the
recorded calls are imported only when there is something to write.
"""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch._compile import _disable_dynamo
from torch.optim.optimizer import register_optimizer_step_post_hook

from gemmsmith.program.built import modules, remember
from gemmsmith.program.calls import Calls, compiled
from gemmsmith.program.variables import (
    ADVISE_VARIABLE,
    LOADED,
    PRODUCTS,
    RAN,
    RAN_VARIABLE,
    Ending,
)

if TYPE_CHECKING:
    from gemmsmith.ops.models.foreseen import Foreseen


def begin(folder: Path) -> None:
    """Record from now on. The result goes to this process's own file in `folder`."""
    (folder / f"{os.getpid()}{LOADED}").touch()
    if _is_torchs_own():
        return
    if os.environ.get(ADVISE_VARIABLE) == "1":
        from gemmsmith.startup.observing import observe

        observe(folder)
        return
    remember()
    recording = _Recording(folder, Ending.asked())

    @_disable_dynamo  # a program may compile its optimizer's step
    def stepped(*_: Any) -> None:
        recording.stepped()

    register_optimizer_step_post_hook(stepped)
    atexit.register(recording.write)
    os.register_at_fork(after_in_child=recording.forked)


def _is_torchs_own() -> bool:
    # A worker process of torch's compiler runs products only to time them.
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and str(spec.name).startswith("torch._inductor")


class _Recording:
    def __init__(self, folder: Path, ending: Ending) -> None:
        self._folder, self._ending = folder, ending
        self._file = _file(folder)
        self._steps = 0
        self._done = False
        self._foreseen: Foreseen | None = None
        self._calls = Calls(on_growth=self._look)
        self._calls.start()

    def stepped(self) -> None:
        """Called after each step of an optimizer."""
        if self._done:
            return
        self._steps += 1
        if self._ending.steps and self._steps >= self._ending.steps:
            self._end()
        elif self._steps.bit_count() == 1:
            self.write()

    def _end(self) -> None:
        self._done = True
        self._calls.stop()
        self.write()
        self._ending.carry_out(self._folder)

    def write(self) -> None:
        """Write the products so far, replacing the file's earlier content."""
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
            if os.environ.get(RAN_VARIABLE) == "1":
                from gemmsmith.ops.accounting import account

                ran = account(self._calls.total, self._steps)
                publish(
                    self._file.with_name(self._file.name.removesuffix(PRODUCTS) + RAN), ran.document
                )
        except Exception as error:  # noqa: BLE001 - a capture must not stop the program
            sys.stderr.write(f"gemmsmith: the capture cannot be written: {error}\n")

    def _look(self) -> None:
        # Models are inspected during the run, because a program may delete them before it ends.
        built = modules()
        if built:
            from gemmsmith.ops.models.foreseen import Foreseen

            self._foreseen = self._foreseen or Foreseen()
            self._foreseen.look(built)

    def forked(self) -> None:
        """Called in a forked child: the products so far are the parent's."""
        self._calls.clear()
        self._file = _file(self._folder)
        self._steps = 0
        # multiprocessing ends a child without atexit, and after this call it clears the registry of
        # finalizers. Functions that are registered to run after the fork come later still.
        multiprocessing.util.register_after_fork(
            self,
            lambda recording: multiprocessing.util.Finalize(
                recording, recording.write, exitpriority=10
            ),
        )


def _file(folder: Path) -> Path:
    return folder / f"{socket.gethostname()}-{os.getpid()}-{time.time_ns()}{PRODUCTS}"
