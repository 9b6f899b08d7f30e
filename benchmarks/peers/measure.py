"""Prepares, verifies and times the peers on a problem, in the measuring process.

A peer that raises has an entry with its reason. A peer that breaks the CUDA context or never
returns ends the process; the parent knows from `Busy` which peer it was, and measures the others
again.
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
"""Wall time that a replay, a capture or a verification may take."""

ROUNDS_BUDGET_US = 10e6
"""Approximate time limit of a problem's rounds."""

ESTIMATE_LAUNCHES = 32

Send = Callable[[Busy], None]


class ContextDead(Exception):
    """A peer has broken the CUDA context; this process can only exit."""


@dataclass(kw_only=True)
class Runner:
    """Measures problems on a GPU, and sends which peer it works on."""

    model: DeviceModel
    ordinal: int
    stream: Stream
    monitor: Monitor
    send: Send

    def measure(self, request: Request) -> Row:
        """Measure every peer of the request, and the baseline.

        Raises:
            ContextDead: the process must exit; the peer of the last `Busy` has caused it.
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
        prepared: dict[str, tuple[Launch, float]] = {}
        for name in (BASELINE, *(peer for peer in request.peers if peer != BASELINE)):
            entries[name] = self._prepare(by_name(name), setting, judge, prepared)
        if BASELINE not in prepared:
            return Row(problem=request.problem, entries=entries, failure=entries[BASELINE].reason)
        return self._rounds(request, entries, prepared, len(operands.sets))

    def _prepare(
        self,
        peer: Peer,
        setting: Setting,
        judge: Judge,
        prepared: dict[str, tuple[Launch, float]],
    ) -> Entry:
        """Prepare and verify a peer; if it is right, add its launch and its µs to `prepared`."""
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
            prepared[peer.name] = (ready.launch, setting.time_us(ready.launch))
        except Unsupported as reason:
            return Entry(reason=str(reason))
        except Exception as error:  # noqa: BLE001 - any error of a peer must not affect others
            _check_context(error)
            return Entry(reason=_first_line(error))
        note = f"{ready.note} ({wrong})" if wrong else ready.note
        return Entry(error=judge.error, tuning_s=tuning_s, note=note)

    def _rounds(
        self,
        request: Request,
        entries: dict[str, Entry],
        prepared: dict[str, tuple[Launch, float]],
        sets: int,
    ) -> Row:
        """Run paired rounds of all prepared peers; the baseline is the last graph."""
        shortest_us = min(us for _, us in prepared.values())
        launches = launches_per_replay(shortest_us, sets, FINAL_REPLAY_US)
        graphs: dict[str, Replay] = {}
        for name in [*(name for name in prepared if name != BASELINE), BASELINE]:
            self.send(Busy(peer=name, limit_s=ROUND_LIMIT_S))
            try:
                graphs[name] = TorchGraph(self.stream, launches, only(prepared[name][0]))
            except Exception as error:  # noqa: BLE001 - as in `_prepare`
                _check_context(error)
                entries[name] = Entry(reason=f"cannot be captured: {_first_line(error)}")
        if BASELINE not in graphs:
            return Row(problem=request.problem, entries=entries, failure=entries[BASELINE].reason)
        names = list(graphs)
        round_us = launches * sum(prepared[name][1] for name in names)
        timer = Timer(self.stream, self.monitor)
        timer.warm_up(graphs[BASELINE], prepared[BASELINE][1])
        try:
            result = timer.rounds(
                list(graphs.values()),
                affordable(request.rounds, round_us, ROUNDS_BUDGET_US),
                seed=request.seed,
                announce=lambda i: self.send(Busy(peer=names[i], limit_s=ROUND_LIMIT_S)),
            )
        finally:
            _check_context(None)
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
    """Return the median time per launch of a few short graph replays, in microseconds."""
    graph = TorchGraph(stream, min(sets, ESTIMATE_LAUNCHES), only(launch))
    return brief_us(Timer(stream, monitor), graph)


def only(launch: Launch) -> Callable[[int], None]:
    """Return the launch without its result, for graphs."""

    def enqueue(i: int) -> None:
        launch(i)

    return enqueue


def _check_context(error: Exception | None) -> None:
    """Raise ContextDead if the CUDA context cannot be used any more."""
    reason = context_is_dead()
    if reason:
        raise ContextDead(f"{reason}: {error}") from error


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    line = text.splitlines()[0] if text else "no message"
    return f"{type(error).__name__}: {line}"[:300]
