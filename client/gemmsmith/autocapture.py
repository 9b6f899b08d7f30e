"""A capture of a program that knows nothing of it: what `GEMMSMITH_CAPTURE` switches on.

Every process that imports torch records the products of its main thread, from that import on, and
those of their backward passes. It writes them down after each step that is a power of two, when it
ends, and when the number of steps is reached that `GEMMSMITH_CAPTURE_STEPS` says: from then on it
is as if it had never been captured. A step ends with the step of an optimizer of torch's.
"""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import socket
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import _python_dispatch

from gemmsmith.captured import STEPS_VARIABLE, STOP_VARIABLE, STOPPED, SUFFIX
from gemmsmith.files import publish
from gemmsmith.ops.capturing import Recorder, capture
from gemmsmith.ops.models.automatic import every_model


def begin(folder: Path) -> None:
    """Record from now on, into a file of this process in `folder`."""
    steps = os.environ.get(STEPS_VARIABLE, "0")
    recording = _Recording(
        folder,
        steps=int(steps) if steps.isdecimal() else 0,
        stop=os.environ.get(STOP_VARIABLE) == "1",
    )
    register_optimizer_step_post_hook(recording.stepped)
    atexit.register(recording.write)
    os.register_at_fork(after_in_child=recording.forked)


class _Recording:
    def __init__(self, folder: Path, *, steps: int, stop: bool) -> None:
        self._folder, self._wanted, self._stop = folder, steps, stop
        self._file = _file(folder)
        self._steps = 0
        self._done = False
        self._thread = threading.get_ident()
        self._block = ExitStack()
        self._found = self._block.enter_context(capture())
        # Layers of all models tell what a kernel could do with their products.
        self._block.enter_context(every_model())

    def stepped(self, *_: Any) -> None:
        """An optimizer has made its step."""
        if self._done or threading.get_ident() != self._thread:
            return
        self._steps += 1
        if self._wanted and self._steps >= self._wanted:
            self._end()
        elif self._steps.bit_count() == 1:
            self.write()

    def _end(self) -> None:
        # Under a mode of the program's own ours cannot be taken away; after the next step, perhaps.
        if not isinstance(_python_dispatch._get_current_dispatch_mode(), Recorder):
            return
        self._done = True
        self._block.close()
        self.write()
        if self._stop:
            (self._folder / STOPPED).touch()
            raise SystemExit(0)
        if _has_compiled():
            # Dynamo has noted of compiled functions that they cannot be compiled.
            torch._dynamo.reset()

    def write(self) -> None:
        """Write down what was found so far, in place of what was written before."""
        try:
            publish(self._file, self._found.document)
        except OSError as error:
            sys.stderr.write(f"gemmsmith: the capture cannot be written: {error}\n")

    def forked(self) -> None:
        """This process is a child now: what the parent ran is the parent's."""
        self._found.problems.clear()
        self._found.skipped.clear()
        self._file = _file(self._folder)
        self._steps = 0
        # A process of multiprocessing ends without atexit, and forgets now what was to end with it.
        multiprocessing.util.register_after_fork(
            self, lambda one: multiprocessing.util.Finalize(one, one.write, exitpriority=10)
        )


def _has_compiled() -> bool:
    """Whether the program uses `torch.compile`: a reset imports all of Inductor, which takes 2 s.

    Optimizers import Dynamo, too.
    """
    if "torch._dynamo" not in sys.modules:
        return False
    backends = getattr(torch._dynamo.eval_frame, "cached_backends", None)
    return backends is None or any(one is not None for one in backends.values())


def _file(folder: Path) -> Path:
    return folder / f"{socket.gethostname()}-{os.getpid()}-{time.time_ns()}{SUFFIX}"
