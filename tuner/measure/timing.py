"""Times graphs: a few replays of one (screening), or shuffled paired rounds of many (finals).

Rounds are sustained, the GPU never idle, or paced, with a rest after each replay. The clock of a
graph is measured while no other graph runs.

A sample is one replay between two events, divided by its launches. Every time the host had to wait,
an untimed replay goes first.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean, median

from tuner.measure.conditions import Monitor, Reading
from tuner.measure.graphs import Event, Replay, Spin, Stream

SCREEN_REPLAY_US = 300.0
"""Aimed length of a screening replay: some 60 times the jitter of a graph launch (about 5 µs)."""

FINAL_REPLAY_US = 1000.0
"""Aimed length of a replay in finals."""

LEAST_ROUNDS = 10
"""With fewer rounds the interval is too wide to be of use."""

BRIEF_REPLAYS = 3
"""Samples that a rough time is the median of."""

MAX_LAUNCHES = 1024
WARM_UP_US = 15_000.0
"""Work before the first sample of a batch, so that the clock has left its idle state."""

IN_FLIGHT = 8
"""Replays enqueued ahead of the one that the host waits for: enough to keep the GPU busy, and few
enough to blame hangs precisely."""

CLOCK_FLOOR = 0.93
"""Rounds whose SM clock is below this share of the run's median are measured again.

Under the power cap the clock varies by 4-5% from one round to the next, for all graphs alike: at
0.97 half of the rounds of 4096×4096×4096 were discarded (NVIDIA H200, 2026-11-21)."""

REST = 1.0
"""How long the GPU rests after each replay of a paced round, as a share of how long it worked.

A training step multiplies for a half to two thirds of its time, so its clock is higher than that of
products without a pause: with those an H200 falls from 1980 to 1450 MHz at 700 W. A kernel that is
bound by the clock (cuBLAS's largest tiles) takes 15% less time at the higher clock, one that is
bound by L2 does not (NVIDIA H200, 2026-11-22: winners of sustained rounds alone made a Llama step
5% slower)."""

COOLING_S = 0.1
"""After so long a rest the power limit does not lower the clock any more."""

SETTLE_S = 0.15
CLOCK_S = 0.08
"""A graph runs alone for SETTLE_S before its clock is measured, which takes CLOCK_S and the time of
the replays in flight. The power control is slow: a clock of 1770 MHz after 0.05 s was 1430 after
0.15 s. Measurements differ by 0.3% at the median; longer ones, of 0.3 s, by no less. Nor may one be
much longer: after 0.6 s above the limit the clock falls by another 200 to 900 MHz for as long, for
any kernel, which is also why each graph starts rested (NVIDIA H200, 2026-11-22)."""

CLOCK_REPLAY_US = 5000.0
"""Aimed length of a replay while clocks are measured: the spins between take 2% of the time, and
IN_FLIGHT replays keep the GPU busy while NVML answers, which takes up to 30 ms."""

SPIN_CYCLES = (10_000, 110_000)
"""Two waits whose times differ by their cycles only: the difference is free of the 4.5 µs that
events and a launch add. NVML's clock has steps of 15 MHz, one of which changes a penalty by 1%;
this one repeats to 0.2% while the clock is constant (NVIDIA H200, 2026-11-22)."""

FIRST_SPIN = IN_FLIGHT + 1
"""Index of the first event pair for spins; those before are for the replays in flight."""

EXTRA_ROUNDS = 1.0
"""At most this share of the wanted rounds is repeated for clock drops."""


def cool_down() -> None:
    time.sleep(COOLING_S)


def affordable(rounds: int, round_us: float, budget_us: float) -> int:
    """`rounds`, or as many as `budget_us` allows, but at least LEAST_ROUNDS of them."""
    if rounds * round_us <= budget_us:
        return rounds
    return min(rounds, max(LEAST_ROUNDS, int(budget_us / round_us)))


def launches_per_replay(estimate_us: float, sets: int, aim_us: float) -> int:
    """Launches in a graph: whole rotations over the operand sets, near the aimed length."""
    rotations = max(1, round(aim_us / max(estimate_us, 0.5) / sets))
    return min(sets * rotations, max(sets, MAX_LAUNCHES // sets * sets))


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedRounds:
    """`samples_us[i][r]`: time per launch of graph i in kept round r."""

    samples_us: tuple[tuple[float, ...], ...]
    readings: tuple[Reading, ...]
    discarded: int


class Timer:
    """Takes samples on one stream, reusing its events."""

    def __init__(self, stream: Stream, monitor: Monitor) -> None:
        self._stream = stream
        self._monitor = monitor
        self._events: list[tuple[Event, Event]] = []

    def warm_up(self, graph: Replay, estimate_us: float) -> None:
        replay_us = max(1.0, estimate_us * graph.launches)
        for _ in range(min(200, max(1, round(WARM_UP_US / replay_us)))):
            graph.enqueue()

    def screen(self, graph: Replay, count: int, give_up_us: float) -> list[float]:
        """Up to `count` samples; only one if that is slower than `give_up_us` per launch."""
        graph.enqueue()
        first = self._timed(graph, 0)
        samples = [self._read(first, graph)]
        if samples[0] > give_up_us or count <= 1:
            return samples
        graph.enqueue()
        pairs = [self._timed(graph, i) for i in range(1, count)]
        return samples + [self._read(pair, graph) for pair in pairs]

    def rounds(
        self,
        graphs: Sequence[Replay],
        count: int,
        *,
        seed: int,
        announce: Callable[[int], None],
        rest: float = 0.0,
        filler: Replay | None = None,
    ) -> TimedRounds:
        """`count` rounds; in each, every graph is replayed once, in a new random order.

        `filler`, by default the last graph, fills the gap after a wait: it must be one that cannot
        hang (the default's). With a `rest` the GPU idles after each replay, `rest` times as long
        as it worked.

        `announce(i)` is called before the host waits for graph i: if that wait never ends, i is
        to blame. Rounds with a low clock are repeated, within EXTRA_ROUNDS.
        """
        paced = partial(self._paced_round, rest=rest) if rest else self._round
        take = partial(paced, filler=filler or graphs[-1])
        order = list(range(len(graphs)))
        shuffler = random.Random(seed)  # noqa: S311 - an order, not a secret
        taken: list[tuple[Reading, dict[int, float]]] = []
        limit = count + int(count * EXTRA_ROUNDS)
        kept = taken
        while len(kept) < count and len(taken) < limit:
            for _ in range(count - len(kept)):  # as many as were discarded so far
                if len(taken) == limit:
                    break
                shuffler.shuffle(order)
                taken.append(take(graphs, order, announce))
            kept = _steady(taken)
        kept = kept[:count]
        return TimedRounds(
            samples_us=tuple(tuple(times[i] for _, times in kept) for i in range(len(graphs))),
            readings=tuple(reading for reading, _ in kept),
            discarded=len(taken) - len(kept),
        )

    def clock(self, graph: Replay) -> float:
        """The SM clock in MHz at which a graph settles alone on the GPU; 0 if unknown."""
        # Not NVML's: between replays a thread waits for a number of cycles, and is timed. It is
        # unknown if something else used the GPU meanwhile.
        short, long = (Spin(self._stream, cycles) for cycles in SPIN_CYCLES)
        began, _ = self._pair(FIRST_SPIN)
        cool_down()
        began.record(self._stream)
        spins: list[tuple[tuple[Event, Event], tuple[Event, Event]]] = []
        for _ in self.busy(graph, SETTLE_S + CLOCK_S):
            slot = FIRST_SPIN + 1 + 2 * len(spins)
            spins.append((self._timed(short, slot), self._timed(long, slot + 1)))
        spun_us = [_elapsed_us(b) - _elapsed_us(a) for a, b in spins]
        settled = [
            us
            for us, ((start, _), _) in zip(spun_us, spins, strict=True)
            if start.microseconds_since(began) >= SETTLE_S * 1e6
        ]
        # Other work on the GPU can make the short wait the longer one: a difference below 0 ended
        # the measuring process once (a grouped problem on an H200, 2026-11-25).
        known = [us for us in settled or spun_us[-1:] if us > 0]
        return (SPIN_CYCLES[1] - SPIN_CYCLES[0]) / mean(known) if known else 0.0

    def busy(self, graph: Replay, seconds: float) -> Iterator[float]:
        """Keep the GPU busy with a graph; yields the seconds since the start after each replay."""
        # Also at the end, while the last replays still run. The host stays only a few replays
        # ahead: if the driver's queue is full, the host waits until most of it is done, and a
        # reading of the GPU just after that would see it idle.
        waiting: deque[Event] = deque()
        began = time.perf_counter()
        slot = 0
        while (ran := time.perf_counter() - began) < seconds:
            graph.enqueue()
            _, end = self._pair(slot)
            end.record(self._stream)
            waiting.append(end)
            slot = (slot + 1) % (IN_FLIGHT + 1)
            if len(waiting) > IN_FLIGHT:
                waiting.popleft().wait()
            yield ran
        yield ran
        for end in waiting:
            end.wait()

    def _round(
        self,
        graphs: Sequence[Replay],
        order: Sequence[int],
        announce: Callable[[int], None],
        *,
        filler: Replay,
    ) -> tuple[Reading, dict[int, float]]:
        times: dict[int, float] = {}
        waiting: deque[int] = deque()

        def collect() -> None:
            index = waiting.popleft()
            announce(index)
            times[index] = self._read(self._pair(index), graphs[index])

        # A sample whose start event was recorded on an idle GPU would include the host's delay.
        filler.enqueue()  # untimed: the host has just waited
        for index in order:
            self._timed(graphs[index], index)
            waiting.append(index)
            # The host waits for the oldest replay only once IN_FLIGHT newer ones are enqueued.
            if len(waiting) > IN_FLIGHT:
                collect()
        reading = self._monitor.read()  # while the last replays still run
        while waiting:
            collect()
        return reading, times

    def _paced_round(
        self,
        graphs: Sequence[Replay],
        order: Sequence[int],
        announce: Callable[[int], None],
        *,
        filler: Replay,
        rest: float,
    ) -> tuple[Reading, dict[int, float]]:
        times: dict[int, float] = {}
        reading = Reading()
        for index in order:
            began = time.perf_counter()
            filler.enqueue()  # untimed: the GPU has rested
            pair = self._timed(graphs[index], index)
            if index == order[-1]:
                reading = self._monitor.read()  # while the replay still runs
            announce(index)
            times[index] = self._read(pair, graphs[index])
            time.sleep(rest * (time.perf_counter() - began))
        return reading, times

    def _pair(self, slot: int) -> tuple[Event, Event]:
        while len(self._events) <= slot:
            self._events.append((Event(), Event()))
        return self._events[slot]

    def _timed(self, graph: Replay, slot: int) -> tuple[Event, Event]:
        start, end = self._pair(slot)
        start.record(self._stream)
        graph.enqueue()
        end.record(self._stream)
        return start, end

    def _read(self, pair: tuple[Event, Event], graph: Replay) -> float:
        return round(_elapsed_us(pair) / graph.launches, 4)


def _elapsed_us(pair: tuple[Event, Event]) -> float:
    start, end = pair
    end.wait()
    return end.microseconds_since(start)


def brief_us(timer: Timer, graph: Replay) -> float:
    """Median of a few samples, per launch, in microseconds; the graph is closed."""
    try:
        return median(timer.screen(graph, BRIEF_REPLAYS, float("inf")))
    finally:
        graph.close()


def _steady(
    taken: list[tuple[Reading, dict[int, float]]],
) -> list[tuple[Reading, dict[int, float]]]:
    """Rounds whose clock is near the median; all of them if NVML does not work."""
    clocks = [reading.sm_clock_mhz for reading, _ in taken if reading.sm_clock_mhz]
    if not clocks:
        return taken
    floor = CLOCK_FLOOR * median(clocks)
    return [item for item in taken if item[0].sm_clock_mhz >= floor or item[0].sm_clock_mhz == 0]
