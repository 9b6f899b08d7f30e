"""One problem in the measuring process: prepare, verify and race the peers.

A peer that raises has an entry with its reason. One that ruins the CUDA context or never returns
takes the process with it; the parent, told by `Busy` whom to blame, measures the others again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.judge import Judge
from benchmarks.peers.peer import Launch, Peer, Setting, Unsupported
from benchmarks.peers.records import BASELINE, Busy, Entry, Request, Row
from benchmarks.peers.roster import by_name
from gemmsmith.core.device import DeviceModel
from tuner.measure.conditions import Monitor, conditions_of
from tuner.measure.graphs import Replay, Stream, TorchGraph, context_is_dead
from tuner.measure.statistics import paired_ratio, summarize
from tuner.measure.timing import (
    FINAL_REPLAY_US,
    Timer,
    affordable,
    brief_us,
    launches_per_replay,
)
from tuner.workloads.operands import Operands

ROUND_LIMIT_S = 60.0
"""Wall time that one replay, a capture or a verification may take."""

ROUNDS_BUDGET_US = 10e6
"""The rounds of one problem take at most about this long."""

ESTIMATE_LAUNCHES = 32

Send = Callable[[Busy], None]


class ContextDead(Exception):
    """A peer ruined the CUDA context; this process can only exit."""


@dataclass(kw_only=True)
class Runner:
    """Measures problems on one GPU, saying through `send` whom it is busy with."""

    model: DeviceModel
    ordinal: int
    stream: Stream
    monitor: Monitor
    send: Send

    def measure(self, request: Request) -> Row:
        """Every peer of the request, baseline included.

        Raises:
            ContextDead: the process must exit; the peer of the last `Busy` is to blame.
        """
        self.send(Busy(peer="", limit_s=ROUND_LIMIT_S * 2))
        with self.stream.torch():
            operands = Operands(request.problem, self.model, self.ordinal, request.seed)
            judge = Judge(operands)
        setting = Setting(
            problem=request.problem,
            device=self.model,
            operands=operands,
            stream=self.stream,
            candidate=request.candidate,
            pack=None if request.pack is None else Path(request.pack),
            reason=request.reason,
            time_us=lambda launch: time_us(launch, len(operands.sets), self.stream, self.monitor),
            wrong=judge.wrong,
        )
        entries: dict[str, Entry] = {}
        field: dict[str, tuple[Launch, float]] = {}
        for name in (BASELINE, *(peer for peer in request.peers if peer != BASELINE)):
            entries[name] = self._enter(by_name(name), setting, judge, field)
        if BASELINE not in field:
            return Row(problem=request.problem, entries=entries, failure=entries[BASELINE].reason)
        return self._race(request, entries, field, len(operands.sets))

    def _enter(
        self,
        peer: Peer,
        setting: Setting,
        judge: Judge,
        field: dict[str, tuple[Launch, float]],
    ) -> Entry:
        """Prepare, verify and estimate one peer; into the field if it may race."""
        self.send(Busy(peer=peer.name, limit_s=peer.limit_s))
        began = time.monotonic()
        try:
            with self.stream.torch():
                ready = peer.prepare(setting)
                tuning_s = round(time.monotonic() - began, 2)
                self.send(Busy(peer=peer.name, limit_s=ROUND_LIMIT_S))
                wrong = judge.wrong(ready.launch)
            if wrong and peer.name != BASELINE:
                return Entry(reason=f"wrong: {wrong}", error=judge.error, tuning_s=tuning_s)
            field[peer.name] = (ready.launch, setting.time_us(ready.launch))
        except Unsupported as reason:
            return Entry(reason=str(reason))
        except Exception as error:  # noqa: BLE001 - whatever a peer raises costs only itself
            _survive(error)
            return Entry(reason=_first_line(error))
        note = f"{ready.note} ({wrong})" if wrong else ready.note
        return Entry(error=judge.error, tuning_s=tuning_s, note=note)

    def _race(
        self,
        request: Request,
        entries: dict[str, Entry],
        field: dict[str, tuple[Launch, float]],
        sets: int,
    ) -> Row:
        """Paired rounds of all that entered; the baseline is the last graph."""
        launches = launches_per_replay(min(us for _, us in field.values()), sets, FINAL_REPLAY_US)
        graphs: dict[str, Replay] = {}
        for name in [*(name for name in field if name != BASELINE), BASELINE]:
            self.send(Busy(peer=name, limit_s=ROUND_LIMIT_S))
            try:
                graphs[name] = TorchGraph(self.stream, launches, only(field[name][0]))
            except Exception as error:  # noqa: BLE001 - likewise
                _survive(error)
                entries[name] = Entry(reason=f"cannot be captured: {_first_line(error)}")
        if BASELINE not in graphs:
            return Row(problem=request.problem, entries=entries, failure=entries[BASELINE].reason)
        names = list(graphs)
        round_us = launches * sum(field[name][1] for name in names)
        timer = Timer(self.stream, self.monitor)
        timer.warm_up(graphs[BASELINE], field[BASELINE][1])
        try:
            result = timer.rounds(
                list(graphs.values()),
                affordable(request.rounds, round_us, ROUNDS_BUDGET_US),
                seed=request.seed,
                announce=lambda i: self.send(Busy(peer=names[i], limit_s=ROUND_LIMIT_S)),
            )
        finally:
            _survive(None)
            for graph in graphs.values():
                graph.close()
        baseline = result.samples_us[-1]
        for name, samples in zip(names, result.samples_us, strict=True):
            entry = entries[name]
            entries[name] = Entry(
                statistics=summarize(samples),
                ratio=paired_ratio(baseline, samples),
                error=entry.error,
                tuning_s=entry.tuning_s,
                note=entry.note,
            )
        return Row(
            problem=request.problem,
            entries=entries,
            conditions=conditions_of(result.readings),
            discarded_rounds=result.discarded,
        )


def time_us(launch: Launch, sets: int, stream: Stream, monitor: Monitor) -> float:
    """Median of a few short graph replays, per launch, in microseconds."""
    graph = TorchGraph(stream, min(sets, ESTIMATE_LAUNCHES), only(launch))
    return brief_us(Timer(stream, monitor), graph)


def only(launch: Launch) -> Callable[[int], None]:
    """The launch without its result."""

    def enqueue(i: int) -> None:
        launch(i)

    return enqueue


def _survive(error: Exception | None) -> None:
    """Raises ContextDead if the CUDA context is beyond use."""
    dead = context_is_dead()
    if dead:
        raise ContextDead(f"{dead}: {error}") from error


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    line = text.splitlines()[0] if text else "no message"
    return f"{type(error).__name__}: {line}"[:300]
