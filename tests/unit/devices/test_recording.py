"""Sweep files: what is written is read back, damage is noticed, recordings can be continued."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import zstandard

from gemmsmith.answers.answer import Conditions, Correctness
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.problem import DType, Problem
from tests.support.replacing import replace
from tuner.devices import open_device
from tuner.devices.base import Contender
from tuner.devices.recording import (
    SCHEMA,
    Header,
    RecordedProblem,
    RecordedTrial,
    Sweep,
    SweepWriter,
)
from tuner.devices.replay import ReplayDevice
from tuner.errors import DeviceError, NoGpu, NotRecorded, RecordingCorrupt
from tuner.measure.policy import Policy
from tuner.trial import Failure, FailureKind, Phase

from .conftest import candidate
from .fake_child import ENVIRONMENT, MODEL

CALM = Conditions(
    sm_clock_mhz=1980.0, power_w=650.0, temperature_c=50.0, throttle=("sw_power_cap",)
)
BUSY = replace(CALM, sm_clock_mhz=1700.0)
PROBLEMS = (Problem(m=16, n=4096, k=4096), Problem(m=64, n=64, k=64, dtype=DType.FP16))


def header(model: DeviceModel = MODEL, at: str = "2026-11-21T05:00:00Z") -> Header:
    return Header(
        schema=SCHEMA,
        device=model,
        environment=ENVIRONMENT,
        recorded_at=at,
        gemmsmith="0.1.0",
    )


def recorded(problem: Problem, kernels: int = 4) -> RecordedProblem:
    rng = random.Random(str(problem))

    def times(middle: float, count: int) -> tuple[float, ...]:
        return tuple(round(rng.gauss(middle, 0.3), 2) for _ in range(count))

    trials = [
        RecordedTrial(
            candidate=candidate(f"k{i}", 64 * (1 + i % 2), swizzle=swizzle),
            common_us=times(20 + i, 7),
            further_us=times(20 + i, 25) if i < 2 else (),
            correctness=Correctness(
                error=1.23e-3, max_error=2.5e-3, tolerance=5e-3, repeatable=i % 2 == 0
            ),
            workspace_bytes=1024 * i,
        )
        for i in range(kernels)
        for swizzle in (1, 8)
    ]
    failure = Failure(kind=FailureKind.HUNG, message="no progress within 30 s")
    trials.append(RecordedTrial(candidate=candidate("bad"), failure=failure))
    return RecordedProblem(
        problem=problem,
        baseline_common_us=times(21, 7),
        baseline_further_us=times(21, 25),
        conditions=CALM,
        further_conditions=BUSY,
        discarded_rounds=2,
        trials=tuple(trials),
        baseline_kernels=("Memset (Device)", "nvjet_tst_128x128_64x6_2x1_v_bz_TNN"),
    )


def interrupted(path: Path, *problems: RecordedProblem) -> None:
    """A recording that is stopped after these problems."""
    with suppress(KeyboardInterrupt), SweepWriter(path, header()) as writer:
        for problem in problems:
            writer.append(problem)
        raise KeyboardInterrupt


@pytest.fixture
def sweep_file(tmp_path: Path) -> Path:
    path = tmp_path / "fake-bf16.jsonl.zst"
    with SweepWriter(path, header()) as writer:
        for problem in PROBLEMS:
            writer.append(recorded(problem))
    return path


def test_what_is_written_is_read_back(sweep_file: Path) -> None:
    sweep = Sweep.load(sweep_file)
    assert sweep.header == header()
    assert sweep.problems == {problem: recorded(problem) for problem in PROBLEMS}
    assert list(sweep_file.parent.iterdir()) == [sweep_file]


def test_a_file_appears_only_when_complete(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl.zst"
    interrupted(path, recorded(PROBLEMS[0]))
    assert not path.exists()
    with SweepWriter(path, header(at="later")) as writer:
        assert writer.done == {PROBLEMS[0]}
        writer.append(recorded(PROBLEMS[1]))
    assert Sweep.load(path).problems == {problem: recorded(problem) for problem in PROBLEMS}


@pytest.mark.parametrize("torn", [1, 40, 3000])
def test_a_torn_problem_is_recorded_again(tmp_path: Path, torn: int) -> None:
    path = tmp_path / "s.jsonl.zst"
    part = tmp_path / "s.jsonl.zst.part"
    interrupted(path, recorded(PROBLEMS[0]), recorded(PROBLEMS[1], kernels=6))
    part.write_bytes(part.read_bytes()[:-torn])
    with SweepWriter(path, header()) as writer:
        assert writer.done == {PROBLEMS[0]}
        writer.append(recorded(PROBLEMS[1], kernels=6))
    sweep = Sweep.load(path)
    assert sweep.problems[PROBLEMS[1]] == recorded(PROBLEMS[1], kernels=6)
    assert sweep.problems[PROBLEMS[0]] == recorded(PROBLEMS[0])


def test_a_part_file_of_another_gpu_is_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl.zst"
    interrupted(path, recorded(PROBLEMS[0]))
    other = replace(MODEL, name="NVIDIA Other")
    with SweepWriter(path, header(other)) as writer:
        assert writer.done == set()
        writer.append(recorded(PROBLEMS[1]))
    sweep = Sweep.load(path)
    assert sweep.header.device == other
    assert set(sweep.problems) == {PROBLEMS[1]}


def rewritten(path: Path, change: object) -> None:
    raw = zstandard.ZstdDecompressor().stream_reader(path.read_bytes()).read()
    lines = raw.splitlines(keepends=True)
    path.write_bytes(zstandard.ZstdCompressor().compress(b"".join(change(lines))))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda lines: lines[:-1], "truncated after 2 problems"),
        (lambda lines: lines[:-3], "should have 9 trials"),
        (lambda lines: lines[1:], "not a header"),
        (lambda lines: [*lines[:3], b"{oops\n", *lines[3:]], "line 4"),
        (lambda lines: [], "not a header"),
    ],
)
def test_damage_inside_is_noticed(sweep_file: Path, change: object, said: str) -> None:
    rewritten(sweep_file, change)
    with pytest.raises(RecordingCorrupt, match=said):
        Sweep.load(sweep_file)


def test_damage_outside_is_noticed(sweep_file: Path, tmp_path: Path) -> None:
    whole = sweep_file.read_bytes()
    for content in (b"", b"not zstd", whole[:-20], whole[: len(whole) // 2], whole[:10]):
        sweep_file.write_bytes(content)
        with pytest.raises(RecordingCorrupt):
            Sweep.load(sweep_file)
    with pytest.raises(RecordingCorrupt, match="cannot read"):
        Sweep.load(tmp_path / "missing.jsonl.zst")


def test_a_newer_schema_says_upgrade(sweep_file: Path) -> None:
    def newer(lines: list[bytes]) -> list[bytes]:
        first = msgspec.json.decode(lines[0])
        first["schema"] = SCHEMA + 1
        first["device"] = "described otherwise"
        return [msgspec.json.encode(first) + b"\n", *lines[1:]]

    rewritten(sweep_file, newer)
    with pytest.raises(RecordingCorrupt, match="upgrade gemmsmith"):
        Sweep.load(sweep_file)


def test_a_recording_that_does_not_name_cublas_kernels_is_read(sweep_file: Path) -> None:
    def older(lines: list[bytes]) -> list[bytes]:
        decoded = [msgspec.json.decode(line) for line in lines]
        named = [line.pop("baseline_kernels", None) for line in decoded]
        assert sum(map(bool, named)) == len(PROBLEMS)
        return [msgspec.json.encode(line) + b"\n" for line in decoded]

    rewritten(sweep_file, older)
    assert Sweep.load(sweep_file).problems == {
        problem: replace(recorded(problem), baseline_kernels=()) for problem in PROBLEMS
    }
    with open_device(f"replay:{sweep_file}") as device:
        assert device.baseline_kernels(PROBLEMS[0]) == ()


def test_a_thousand_trials_stay_small(tmp_path: Path) -> None:
    path = tmp_path / "big.jsonl.zst"
    with SweepWriter(path, header()) as writer:
        writer.append(recorded(PROBLEMS[0], kernels=500))
    assert path.stat().st_size < 100_000


def test_replay_serves_what_was_recorded(sweep_file: Path) -> None:
    want = recorded(PROBLEMS[0])
    with open_device(f"replay:{sweep_file}") as device:
        assert device.replayed
        assert not device.needs_packs
        assert device.model == MODEL
        assert device.baseline_kernels(PROBLEMS[0]) == want.baseline_kernels
        assert device.baseline_kernels(Problem(m=2, n=2, k=2)) == ()
        candidates = device.recorded(PROBLEMS[0])
        assert candidates == [trial.candidate for trial in want.trials]
        contenders = [Contender(candidate=c) for c in candidates]
        trials = list(device.screen(PROBLEMS[0], contenders, Policy()))
        assert [t.samples_us for t in trials] == [t.common_us for t in want.trials]
        assert all(t.replayed and t.environment == ENVIRONMENT for t in trials)
        assert all(t.phase is Phase.SCREEN for t in trials)
        assert trials[-1].failure == want.trials[-1].failure

        finals = device.finals(PROBLEMS[0], contenders[:4], Policy())
        assert finals.samples_us == tuple(t.further_us for t in want.trials[:4])
        assert finals.baseline_us == want.baseline_further_us
        assert finals.conditions == BUSY

        wide = device.finals(PROBLEMS[0], contenders, Policy())
        assert wide.samples_us == tuple(t.common_us for t in want.trials[:-1])
        assert wide.baseline_us == want.baseline_common_us
        assert wide.conditions == CALM
        assert [c.kernel.name for c, _ in wide.failures] == ["bad"]
        assert len(wide.correctness) == len(wide.candidates) == len(wide.workspace_bytes)


def test_replay_invents_nothing(sweep_file: Path) -> None:
    unknown = Contender(candidate=candidate("never measured"))
    with open_device(f"replay:{sweep_file}") as device:
        with pytest.raises(NotRecorded, match="16×4096×4096 bf16 tn; 64×64×64 fp16 tn"):
            device.recorded(Problem(m=2, n=2, k=2))
        with pytest.raises(NotRecorded, match="never measured"):
            list(device.screen(PROBLEMS[0], [unknown], Policy()))
        with pytest.raises(NotRecorded, match="never measured"):
            device.finals(PROBLEMS[0], [unknown], Policy())


def test_recordings_are_found_by_name_slug_or_alone(sweep_file: Path) -> None:
    folder = sweep_file.parent
    more = folder / "fake-more.jsonl.zst"
    extra = Problem(m=7, n=7, k=7)
    with SweepWriter(more, header(at="2026-11-22T00:00:00Z")) as writer:
        writer.append(recorded(extra))
    for name in ("fake-bf16", "fake-bf16.jsonl.zst", str(sweep_file)):
        assert open_device(f"replay:{name}", sweeps=folder).model == MODEL
    for name in ("", MODEL.slug):
        device = open_device(f"replay:{name}", sweeps=folder)
        assert isinstance(device, ReplayDevice)
        assert set(device.problems) == {*PROBLEMS, extra}
    other = replace(MODEL, sm_count=78)
    with SweepWriter(folder / "other.jsonl.zst", header(other)) as writer:
        writer.append(recorded(extra))
    assert open_device(f"replay:{other.slug}", sweeps=folder).model == other
    with pytest.raises(RecordingCorrupt, match="different GPUs"):
        open_device("replay:", sweeps=folder)
    with pytest.raises(NotRecorded, match="fake-bf16, fake-more, other"):
        open_device("replay:unheard-of", sweeps=folder)


def test_other_names_are_refused(tmp_path: Path) -> None:
    for name in ("tpu:0", "cuda:x", ""):
        with pytest.raises(DeviceError, match="no device is called"):
            open_device(name)
    with pytest.raises(NotRecorded, match="none"):
        open_device("replay:", sweeps=tmp_path)
    with pytest.raises(NoGpu):
        open_device("cuda:99")
