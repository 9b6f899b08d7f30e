"""Rounds, early give-up and repeated rounds, on a simulated GPU clock."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tuner.measure import timing
from tuner.measure.conditions import Monitor, Reading, conditions_of
from tuner.measure.timing import Timer, affordable, launches_per_replay


class Gpu:
    """A GPU whose time passes only while graphs run, and while the host sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def perf_counter(self) -> float:
        return self.now / 1e6

    def sleep(self, seconds: float) -> None:
        self.now += seconds * 1e6
        self.log.append("rest")


class FakeEvent:
    gpu: Gpu

    def __init__(self) -> None:
        self.at = 0.0

    def record(self, stream: object) -> None:
        self.at = self.gpu.now

    def wait(self) -> None:
        pass

    def microseconds_since(self, start: FakeEvent) -> float:
        return self.at - start.at


class FakeGraph:
    def __init__(self, gpu: Gpu, name: str, us: float, launches: int = 10) -> None:
        self.gpu, self.name, self.us, self.launches = gpu, name, us, launches

    def enqueue(self) -> None:
        self.gpu.now += self.us * self.launches
        self.gpu.log.append(self.name)

    def close(self) -> None:
        pass


class FakeMonitor(Monitor):
    def __init__(self, clocks: Iterator[int]) -> None:
        super().__init__("")
        self.clocks = clocks

    def read(self) -> Reading:
        return Reading(sm_clock_mhz=self.sm_clock_mhz())

    def sm_clock_mhz(self) -> int:
        return next(self.clocks)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(FakeEvent, "gpu", gpu, raising=False)
    monkeypatch.setattr(timing, "Event", FakeEvent)
    monkeypatch.setattr(timing, "time", gpu)
    return gpu


def steady(clock: int = 1980) -> Iterator[int]:
    while True:
        yield clock


def timer(clocks: Iterator[int]) -> Timer:
    return Timer(None, FakeMonitor(clocks))  # type: ignore[arg-type]


def test_samples_are_per_launch(gpu: Gpu) -> None:
    samples = timer(steady()).screen(FakeGraph(gpu, "a", 12.5), 5, give_up_us=100.0)
    assert samples == [12.5] * 5
    assert gpu.log == ["a"] * 7  # one untimed replay before the first sample and after each wait


def test_screening_gives_a_slow_candidate_up(gpu: Gpu) -> None:
    assert timer(steady()).screen(FakeGraph(gpu, "a", 12.5), 5, give_up_us=10.0) == [12.5]
    assert len(gpu.log) == 2


def test_each_round_times_everyone_once_in_a_new_order(gpu: Gpu) -> None:
    graphs = [FakeGraph(gpu, name, us) for name, us in (("a", 1), ("b", 2), ("c", 3), ("d", 4))]
    blamed: list[int] = []
    result = timer(steady()).rounds(graphs, 6, seed=1, announce=blamed.append)
    assert result.samples_us == tuple((float(us),) * 6 for us in (1, 2, 3, 4))
    assert result.discarded == 0
    rounds = [gpu.log[i * 5 + 1 : (i + 1) * 5] for i in range(6)]
    assert all(sorted(names) == ["a", "b", "c", "d"] for names in rounds)
    assert len({tuple(names) for names in rounds}) > 1
    assert [gpu.log[i * 5] for i in range(6)] == ["d"] * 6  # the last graph fills the gap
    assert sorted(blamed) == sorted([0, 1, 2, 3] * 6)


def test_in_paced_rounds_the_gpu_rests_as_long_as_it_worked(gpu: Gpu) -> None:
    graphs = [FakeGraph(gpu, name, us) for name, us in (("a", 1), ("b", 2), ("last", 3))]
    blamed: list[int] = []
    result = timer(steady()).rounds(graphs, 4, seed=1, announce=blamed.append, rest=1.0)
    assert result.samples_us == tuple((float(us),) * 4 for us in (1, 2, 3))
    assert len(result.readings) == 4
    turns = [gpu.log[i : i + 3] for i in range(0, len(gpu.log), 3)]
    # Whatever is timed follows an untimed replay, and is rested from.
    assert all(first == "last" and rest == "rest" for first, _, rest in turns)
    assert sorted(timed for _, timed, _ in turns) == sorted(["a", "b", "last"] * 4)
    worked = 4 * 10 * sum(3 + us for us in (1, 2, 3))
    assert gpu.now == pytest.approx(2 * worked)
    assert sorted(blamed) == sorted([0, 1, 2] * 4)


@pytest.mark.parametrize("rest", [0.0, 1.0])
def test_the_gap_is_filled_with_what_one_says(gpu: Gpu, rest: float) -> None:
    graphs = [FakeGraph(gpu, name, 1) for name in ("a", "slow")]
    filler = FakeGraph(gpu, "filler", 1, launches=1)
    result = timer(steady()).rounds(
        graphs, 3, seed=1, announce=lambda _: None, rest=rest, filler=filler
    )
    assert len(result.samples_us) == 2
    assert gpu.log.count("slow") == gpu.log.count("a") == 3
    assert gpu.log.count("filler") == (6 if rest else 3)
    assert gpu.log[0] == "filler"


class FakeSpin(FakeGraph):
    """Takes what its cycles take at `mhz`, and 4.5 µs of launch."""

    gpu: Gpu
    mhz = 1500.0

    def __init__(self, stream: object, cycles: int) -> None:
        super().__init__(self.gpu, "spin", 4.5 + cycles / self.mhz, launches=1)


@pytest.fixture
def spin(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> type[FakeSpin]:
    monkeypatch.setattr(FakeSpin, "gpu", gpu, raising=False)
    monkeypatch.setattr(timing, "Spin", FakeSpin)
    return FakeSpin


@pytest.mark.parametrize("mhz", [1365.0, 1980.0])
def test_for_its_clock_a_graph_has_the_gpu_to_itself(
    gpu: Gpu, spin: type[FakeSpin], monkeypatch: pytest.MonkeyPatch, mhz: float
) -> None:
    monkeypatch.setattr(spin, "mhz", mhz)
    assert timer(steady()).clock(FakeGraph(gpu, "a", 500.0)) == pytest.approx(mhz)
    assert gpu.log[:4] == ["rest", "a", "spin", "spin"]
    assert gpu.now / 1e6 == pytest.approx(
        timing.COOLING_S + timing.SETTLE_S + timing.CLOCK_S, abs=0.01
    )


def test_what_a_clock_was_before_it_came_to_rest_does_not_count(
    gpu: Gpu, spin: type[FakeSpin], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Falling(FakeGraph):
        def enqueue(self) -> None:
            super().enqueue()
            for made in spins:
                made.us = 4.5 + made.cycles / (1900 if gpu.now < settled else 1400)

    class Made(spin):  # type: ignore[misc, valid-type]
        def __init__(self, stream: object, cycles: int) -> None:
            super().__init__(stream, cycles)
            self.cycles = cycles
            spins.append(self)

    spins: list[Made] = []
    settled = 1e6 * (timing.COOLING_S + timing.SETTLE_S)
    monkeypatch.setattr(timing, "Spin", Made)
    assert timer(steady()).clock(Falling(gpu, "a", 500.0)) == pytest.approx(1400)


def test_a_graph_of_a_second_has_a_clock_too(gpu: Gpu, spin: type[FakeSpin]) -> None:
    assert timer(steady()).clock(FakeGraph(gpu, "long", 1e5)) == pytest.approx(spin.mhz)


def test_a_wait_that_something_else_held_up_tells_no_clock(
    gpu: Gpu, spin: type[FakeSpin], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Held(spin):  # type: ignore[misc, valid-type]
        """The first short wait takes 1 ms more; or every one of them."""

        always = False

        def __init__(self, stream: object, cycles: int) -> None:
            super().__init__(stream, cycles)
            self.short, self.count = cycles == timing.SPIN_CYCLES[0], 0

        def enqueue(self) -> None:
            usual, self.count = self.us, self.count + 1
            if self.short and (self.always or self.count == 1):
                self.us += 1000.0
            super().enqueue()
            self.us = usual

    monkeypatch.setattr(timing, "Spin", Held)
    monkeypatch.setattr(timing, "SETTLE_S", 0.0)  # or it would be too early to count
    assert timer(steady()).clock(FakeGraph(gpu, "a", 500.0)) == pytest.approx(spin.mhz)
    monkeypatch.setattr(Held, "always", True)
    assert timer(steady()).clock(FakeGraph(gpu, "a", 500.0)) == 0.0


def test_looks_use_their_events_again(gpu: Gpu, spin: type[FakeSpin]) -> None:
    measuring = timer(steady())
    measuring.clock(FakeGraph(gpu, "a", 500.0))
    made = len(measuring._events)
    measuring.clock(FakeGraph(gpu, "a", 500.0))
    assert len(measuring._events) == made


def test_the_host_stays_a_few_replays_ahead(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEvent, "wait", lambda event: waited.append(event.at))
    waited: list[float] = []
    ahead = [
        len(gpu.log) - len(waited) for _ in timer(steady()).busy(FakeGraph(gpu, "a", 500.0), 0.1)
    ]
    assert max(ahead) == timing.IN_FLIGHT
    assert ahead[-1] > 0  # the last look is at a GPU that still works
    assert len(waited) == len(gpu.log) == 20  # none is left running
    assert waited == sorted(waited)


def test_the_same_seed_gives_the_same_orders(gpu: Gpu) -> None:
    graphs = [FakeGraph(gpu, name, 1) for name in "abcdef"]
    timer(steady()).rounds(graphs, 3, seed=7, announce=lambda _: None)
    first, gpu.log = gpu.log, []
    timer(steady()).rounds(graphs, 3, seed=7, announce=lambda _: None)
    assert gpu.log == first


def test_rounds_with_a_low_clock_are_repeated(gpu: Gpu) -> None:
    clocks = iter([1980, 1200, 1980, 1975, 1210, 1980, 1980, 1980])
    result = timer(clocks).rounds([FakeGraph(gpu, "a", 1)], 6, seed=1, announce=lambda _: None)
    assert len(result.samples_us[0]) == 6
    assert result.discarded == 2
    assert min(reading.sm_clock_mhz for reading in result.readings) == 1975


def test_repeating_is_bounded(gpu: Gpu) -> None:
    clocks = iter([1980] * 5 + [1000] * 20)
    result = timer(clocks).rounds([FakeGraph(gpu, "a", 1)], 6, seed=1, announce=lambda _: None)
    assert 6 < len(result.samples_us[0]) + result.discarded <= 12


def test_without_nvml_every_round_counts(gpu: Gpu) -> None:
    result = timer(steady(0)).rounds([FakeGraph(gpu, "a", 1)], 4, seed=1, announce=lambda _: None)
    assert len(result.samples_us[0]) == 4
    assert conditions_of(result.readings).sm_clock_mhz == 0.0


@pytest.mark.parametrize(
    ("estimate", "sets", "launches"),
    [(10.0, 5, 30), (164.0, 2, 2), (1400.0, 1, 1), (3.0, 256, 256), (100_000.0, 2, 2)],
)
def test_replays_are_whole_rotations_near_the_aim(
    estimate: float, sets: int, launches: int
) -> None:
    assert launches_per_replay(estimate, sets, 300.0) == launches
    assert launches_per_replay(0.0, sets, 1000.0) % sets == 0
    assert launches_per_replay(0.0, sets, 1000.0) <= 1024


def test_long_kernels_get_fewer_rounds() -> None:
    assert affordable(25, 0.0, 450_000.0) == affordable(25, 18_000.0, 450_000.0) == 25
    assert affordable(25, 37_500.0, 450_000.0) == 12
    assert affordable(25, 500_000.0, 450_000.0) == 10
    assert affordable(5, 500_000.0, 450_000.0) == 5
    assert affordable(25, 500_000.0, float("inf")) == 25


def test_conditions_name_the_throttle_reasons() -> None:
    readings = [
        Reading(sm_clock_mhz=1980, power_w=700.0, temperature_c=50, reasons=0x5),
        Reading(sm_clock_mhz=1900, power_w=690.0, temperature_c=52, reasons=0x1),
        Reading(sm_clock_mhz=1800, power_w=680.0, temperature_c=54, reasons=0x40),
    ]
    conditions = conditions_of(readings)
    assert conditions.sm_clock_mhz == 1900
    assert conditions.throttle == ("sw_power_cap", "hw_thermal_slowdown")
