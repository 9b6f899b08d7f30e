"""Times graphs: a few replays of one (screening), or shuffled paired rounds of many (finals).

Rounds are sustained, the GPU never idle, or paced, with a rest after each replay. For its clock a
graph has the GPU to itself.

A sample is one replay between two events, divided by its launches. The GPU is kept ahead of the
host: a sample whose start event was recorded on an idle GPU would include the host's delay, so
every time the host had to wait an untimed replay goes first.
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
"""Fewer rounds make an interval that says little."""

BRIEF_REPLAYS = 3
"""Samples that a rough time is the median of."""

MAX_LAUNCHES = 1024
WARM_UP_US = 15_000.0
"""Work before the first sample of a batch, so that the clock has left its idle state."""

IN_FLIGHT = 8
"""Replays enqueued ahead of the one waited for: keeps the GPU busy, blames hangs precisely."""

CLOCK_FLOOR = 0.93
"""Rounds whose SM clock is below this share of the run's median are measured again.

Under the power cap the clock wanders by 4-5% from one round to the next, for all alike: at 0.97
half of the rounds of 4096×4096×4096 were thrown away (NVIDIA H200, 2026-11-21)."""

REST = 1.0
"""How long the GPU rests after each replay of a paced round, as a share of how long it worked.

A training step multiplies for a half to two thirds of its time, so the clock is higher than where
products follow one another without end: there an H200 falls from 1980 to 1450 MHz at 700 W. What is
bound by the clock (cuBLAS's largest tiles) takes 15% less time then, what is bound by L2 does not
(NVIDIA H200, 2026-11-22: winners of sustained rounds alone made a Llama step 5% slower)."""

COOLING_S = 0.1
"""After so long a rest the power limit has let go of the clock."""

SETTLE_S = 0.15
LOOK_S = 0.08
"""A graph that has the GPU to itself has so long until its clock is looked at, and is looked at for
so long and as long as what is in flight takes. The power control follows slowly: a clock of 1770
MHz after 0.05 s was 1430 after 0.15 s. Looks differ from one another, by 0.3% at the median; looks
of 0.3 s no less. Nor may one be much longer: after 0.6 s above the limit the clock falls by another
200 to 900 MHz for as long, whoever runs then, which is also why each graph starts rested (NVIDIA
H200, 2026-11-22)."""

LOOK_REPLAY_US = 5000.0
"""Aimed length of a replay while clocks are looked at: the spins between take 2% of the time, and
with IN_FLIGHT of them enqueued ahead the GPU would not run dry while NVML answers, which takes up
to 30 ms."""

SPIN_CYCLES = (10_000, 110_000)
"""Two waits whose times differ by their cycles and by nothing else, so that what events and a
launch add, 4.5 µs, is not in the clock. NVML's is in steps of 15 MHz, of which one is 1% of a
price; so taken it repeats to 0.2% where it stands still (NVIDIA H200, 2026-11-22)."""

FIRST_SPIN = IN_FLIGHT + 1
"""Of the event pairs the first so many are those of the replays in flight."""

EXTRA_ROUNDS = 1.0
"""At most this share of the wanted rounds is repeated for clock drops."""


def cool_down() -> None:
    """Let the GPU rest."""
    time.sleep(COOLING_S)


def affordable(wanted: int, round_us: float, budget_us: float) -> int:
    """`wanted` rounds, or the fewer that `budget_us` allows; LEAST_ROUNDS in any case."""
    if wanted * round_us <= budget_us:
        return wanted
    return min(wanted, max(LEAST_ROUNDS, int(budget_us / round_us)))


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
        """Enqueue about WARM_UP_US of work."""
        replay_us = max(1.0, estimate_us * graph.launches)
        for _ in range(min(200, max(1, round(WARM_UP_US / replay_us)))):
            graph.enqueue()

    def screen(self, graph: Replay, count: int, give_up_us: float) -> list[float]:
        """Up to `count` samples; one if that is slower than `give_up_us` per launch already."""
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
        """`count` rounds; in each, every graph is replayed once, in an order shuffled anew.

        `filler`, by default the last graph, fills the gap after a wait: it must be one that cannot
        hang (cuBLAS's). With a `rest` the GPU idles after each replay, so many times as long as it
        worked.

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
            for _ in range(count - len(kept)):
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
        """The SM clock in MHz that a graph comes to, rested, where it has the GPU to itself.

        Not NVML's: between replays a thread waits for a number of cycles, and is timed. 0: unknown,
        because something else held the GPU meanwhile.
        """
        short, long = (Spin(self._stream, cycles) for cycles in SPIN_CYCLES)
        began, _ = self._pair(FIRST_SPIN)
        cool_down()
        began.record(self._stream)
        spins: list[tuple[tuple[Event, Event], tuple[Event, Event]]] = []
        for _ in self.busy(graph, SETTLE_S + LOOK_S):
            slot = FIRST_SPIN + 1 + 2 * len(spins)
            spins.append((self._timed(short, slot), self._timed(long, slot + 1)))
        spun_us = [_elapsed_us(b) - _elapsed_us(a) for a, b in spins]
        settled = [
            us
            for us, ((start, _), _) in zip(spun_us, spins, strict=True)
            if start.microseconds_since(began) >= SETTLE_S * 1e6
        ]
        # What else runs on the GPU can make a short wait the longer one: a difference below 0
        # ended the measuring process once (a grouped problem on an H200, 2026-11-25).
        known = [us for us in settled or spun_us[-1:] if us > 0]
        return (SPIN_CYCLES[1] - SPIN_CYCLES[0]) / mean(known) if known else 0.0

    def busy(self, graph: Replay, seconds: float) -> Iterator[float]:
        """Keep the GPU busy with a graph; after each replay enqueued, the seconds since it began.

        And at the end, while the last of them still run. The host stays a few replays ahead, no
        more: where the driver's queue is full it waits for most of what is in it, and whoever looks
        at the GPU then sees it idle.
        """
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

        filler.enqueue()  # untimed: the host has just waited
        for index in order:
            self._timed(graphs[index], index)
            waiting.append(index)
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
    """Wait for the end, and tell how long it took."""
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
    """Rounds whose clock is near the median; all of them where NVML does not answer."""
    clocks = [reading.sm_clock_mhz for reading, _ in taken if reading.sm_clock_mhz]
    if not clocks:
        return taken
    floor = CLOCK_FLOOR * median(clocks)
    return [item for item in taken if item[0].sm_clock_mhz >= floor or item[0].sm_clock_mhz == 0]
