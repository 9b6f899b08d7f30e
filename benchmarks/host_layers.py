"""The host's time of patched layers and models, where no winner fits them, beside torch's.

    python -m benchmarks.host_layers                  # layers of each kind, on the CPU
    python -m benchmarks.host_layers GPT-NeoX SigLIP  # tiny models, those of docs/fusing.md
    python -m benchmarks.host_layers all              # all of these models

What a patch registers with torch's dispatcher stays there. So each way runs in a process of its own
and on the same core, and the ways take turns. The processor time of the thread counts, which other
programs on the machine change little. Prints the median of the turns, the difference from torch's,
and the median of the quotients torch's / patched of each turn, with their middle half.

The ways: `other sizes`: there are winners, for other layers alone. `more rows`: there are winners
for the layers' weights, with 1024 times the rows; torch's `addmm` is overridden. `same sizes`: as
before, but it is not known which winners there are. `winner`: kernels in C run, which do not
compute, so that their time is the host's. RMS norms of models run torch's fused kernel in all ways.
The CPU has none: torch computes it there by as many operators as the model.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import gemmsmith
from gemmsmith.answers.snapshot import Row
from gemmsmith.core.config import Use
from gemmsmith.core.problem import Problem
from gemmsmith.ops.below.dispatch import Dispatch
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.in_use import install
from tests.support import stand_in

WAYS = ("torch", "other sizes", "more rows", "same sizes", "winner")
CALLS = {True: 10, False: 200}
"""Of a model and of a layer, in a turn."""
# By name, because the type checker does not read these files.
NETS: dict[str, Any] = import_module("tests.unit.ops.test_left_to_torch").NETS
MODELS = {tiny.name: tiny for tiny in import_module("tests.support.tiny_models").MODELS}

Call = Callable[[], Any]


def engine(way: str, folder: Path, problems: Iterable[Problem] = ()) -> Engine:
    """Winners for a way, with the CPU in the GPU's place. `problems`: those of `more rows`."""
    chooser: Any = stand_in.Chooser(answers=lambda _: way == "winner")
    if way == "other sizes":
        problems = [Problem(m=8, n=8000, k=8)]
    rows = [Row(problem=problem, use=Use.CUTLASS) for problem in problems]
    if rows:
        chooser.pinned, chooser.snapshot = True, SimpleNamespace(rows=rows)
    host = stand_in.Host()
    host.kind = "cpu"
    if way != "other sizes":  # where a patch needs no binding
        Dispatch.of("cpu", stream=host.stream)
    pack = stand_in.build(folder)
    ctypes.c_int32.in_dll(ctypes.CDLL(str(pack)), "computes_nothing").value = 1
    return Engine(chooser, stand_in.Packs(pack), platform=host)


def call_of(name: str) -> tuple[nn.Module, Call]:
    """A layer or a model, and a call of it, with its backward pass if gradients are enabled."""
    if name in MODELS:
        tiny = MODELS[name]
        net = tiny.model()
        run: Call = lambda: tiny.run(net)  # noqa: E731
    else:
        net, operands = NETS[name]()
        net.eval()
        run = lambda: net(*operands)  # noqa: E731

    def call() -> None:
        out = run()
        if torch.is_grad_enabled():
            out.float().sum().backward()

    return net, call


def of_more_rows(calls: dict[str, tuple[nn.Module, Call]], folder: Path) -> Engine:
    """Winners for all problems of these layers and models, with more rows."""
    asking = engine("same sizes", folder)
    chooser: Any = asking._chooser
    install(asking)
    for net, call in calls.values():
        with gemmsmith.patch(net):
            for gradients in (False, True):
                with torch.set_grad_enabled(gradients):
                    call()
    problems = set()
    for problem in chooser.asked:
        rows = "k" if problem.layout == "nt" else "m"
        problems.add(replace(problem, **{rows: 1024 * getattr(problem, rows)}))
    return engine("more rows", folder, problems)


def serve(way: str, calls: dict[str, tuple[nn.Module, Call]], pipe: Connection, core: int) -> None:
    """Measure turns, each asked for by a name, and whether gradients are computed."""
    logging.disable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if way == "more rows":
            install(of_more_rows(calls, Path(folder)))
        elif way != "torch":
            install(engine(way, Path(folder)))
        if way != "torch":
            for net, _ in calls.values():
                gemmsmith.patch(net)
        os.sched_setaffinity(0, {core})
        gc.collect()
        gc.freeze()  # what was made to get ready is not the layers'
        pipe.send("ready")
        while (asked := pipe.recv()) is not None:
            name, gradients = asked
            with torch.set_grad_enabled(gradients):
                pipe.send(_turn(calls[name][1], CALLS[name in MODELS]))


def _turn(call: Call, count: int) -> float:
    """Microseconds of a call."""
    for _ in range(5):
        call()
    began = time.thread_time()
    for _ in range(count):
        call()
    return (time.thread_time() - began) / count * 1e6


class Process:
    """A way in its process, which has the layers and models of this one."""

    def __init__(self, way: str, calls: dict[str, tuple[nn.Module, Call]], core: int) -> None:
        context = get_context("fork")
        self._pipe, theirs = context.Pipe()
        context.Process(target=serve, args=(way, calls, theirs, core), daemon=True).start()
        theirs.close()

    def wait(self) -> None:
        """Wait until it is ready. Processes get ready side by side."""
        self._read()

    def turn(self, name: str, *, gradients: bool) -> float:
        self._pipe.send((name, gradients))
        return float(self._read())

    def end(self) -> None:
        self._pipe.send(None)

    def _read(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            raise SystemExit("a process ended early, after the error above") from None


def main() -> int:
    """Print a row for each layer or model, forwards and with gradients."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="models, or kinds of layers; by default all kinds")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS[:4])
    options = parser.parse_args()
    names = options.names or [*NETS]
    names = [*MODELS] if names == ["all"] else names
    unknown = [name for name in names if name not in MODELS and name not in NETS]
    if unknown:
        parser.error(f"no layer or model is called {unknown[0]}: {', '.join([*NETS, *MODELS])}")
    calls = {name: call_of(name) for name in names}
    core = max(os.sched_getaffinity(0))
    ways = ["torch", *(way for way in options.ways if way != "torch")]
    processes = {way: Process(way, calls, core) for way in ways}
    for process in processes.values():
        process.wait()
    print(f"torch {torch.__version__}, µs of a call\n\n| | {' | '.join(ways)} |")
    print("|---" * (1 + len(ways)) + "|")
    for name in names:
        for gradients in (False, True):
            turns = [
                [processes[way].turn(name, gradients=gradients) for way in ways]
                for _ in range(options.turns)
            ]
            row = (_cell(*column) for column in _columns(turns))
            print(f"| {name}{', with gradients' if gradients else ''} | {' | '.join(row)} |")
    for process in processes.values():
        process.end()
    return 0


def _columns(turns: list[list[float]]) -> list[tuple[list[float], list[float]]]:
    """Torch's turns beside those of each way."""
    return [([turn[0] for turn in turns], list(way)) for way in zip(*turns, strict=True)]


def _cell(torchs: list[float], ours: list[float]) -> str:
    text = f"{statistics.median(ours):.1f}"
    if torchs == ours:
        return text
    more = statistics.median(ours) - statistics.median(torchs)
    low, middle, high = statistics.quantiles(
        [theirs / mine for theirs, mine in zip(torchs, ours, strict=True)], n=4
    )
    return f"{text} ({more:+.1f}), {middle:.3f} × ({low:.3f} … {high:.3f})"


if __name__ == "__main__":
    sys.exit(main())
