"""A GPU's ceilings: its copy bandwidth, and the rate of a large cuBLAS product.

`gemmsmith report` compares times with them. They are measured as candidates are: CUDA-graph replays
over rotating buffers that leave L2 cold, the GPU's lock held, rounds with a low clock repeated. A
copy writes as much as it reads, so a product that mostly reads may be a little above the copy's
bandwidth. The matrix rate is that at the power limit, with normal random operands.

The records at the top need no torch; functions that use the GPU import it when called.
"""

from __future__ import annotations

import gc
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from gemmsmith.answers.answer import Conditions, Statistics
from gemmsmith.core.device import DeviceModel, Environment
from gemmsmith.core.problem import DType, Problem
from gemmsmith.files import read_text, write
from tuner import places
from tuner.errors import DeviceError, NoGpu, TunerError
from tuner.measure.gpu_lock import gpu_lock
from tuner.measure.statistics import summarize
from tuner.workloads.footprint import CACHE_FACTOR, MAX_SETS

if TYPE_CHECKING:
    from tuner.measure.graphs import Stream
    from tuner.measure.timing import Timer

FORMAT = "gemmsmith-ceilings"
VERSION = 1
COPY_READ_BYTES = tuple(megabytes * 10**6 for megabytes in (4, 8, 16, 32, 64, 128, 256))
"""Sizes of small copies: as many bytes as a decoding step's weight matrices have."""

LARGE_READ_BYTES = 4 * 10**9
"""Large enough that launching, filling and draining the GPU no longer count."""

PEAK_EXTENT = 8192  # M, N and K of the product whose rate counts as the peak
PEAK_DTYPES = (DType.BF16, DType.FP16, DType.FP8_E4M3)
ROUNDS = 25
_WARM_LAUNCHES = 3
_SEED = 0


class CeilingsError(TunerError):
    """A ceilings file that cannot be read; the message names it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """A device-to-device copy of `read_bytes`, rotating over `sets` pairs of buffers."""

    read_bytes: int
    sets: int
    statistics: Statistics
    conditions: Conditions

    @property
    def moved_bytes(self) -> int:
        return 2 * self.read_bytes

    @property
    def bytes_per_second(self) -> float:
        return self.moved_bytes / self.statistics.median_us * 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """cuBLAS, through torch, on a large problem."""

    problem: Problem
    statistics: Statistics
    conditions: Conditions

    @property
    def flops_per_second(self) -> float:
        return self.problem.flops / self.statistics.median_us * 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceilings:
    """One GPU's ceilings, and when they were measured. `copies` are small, `copy` is large."""

    device: DeviceModel
    environment: Environment
    measured_at: str
    copy: Copy
    copies: tuple[Copy, ...]
    peaks: tuple[Peak, ...]

    @property
    def bandwidth(self) -> float:
        return self.copy.bytes_per_second

    def bandwidth_at(self, moved_bytes: int) -> float | None:
        """Bytes per second of a copy that moves as many bytes in all.

        Between two measured sizes the time is interpolated linearly: a fixed cost and a rate.
        None below the smallest measured size.
        """
        points = sorted((c.moved_bytes, c.statistics.median_us) for c in (*self.copies, self.copy))
        if moved_bytes < points[0][0]:
            return None
        for (low, low_us), (high, high_us) in itertools.pairwise(points):
            if moved_bytes <= high:
                time_us = low_us + (high_us - low_us) * (moved_bytes - low) / (high - low)
                return moved_bytes / time_us * 1e6
        return points[-1][0] / points[-1][1] * 1e6


def own_folder() -> Path:
    return _shipped() if places.CHECKOUT else places.state() / "ceilings"


def path_for(slug: str, folder: Path | None = None) -> Path:
    """A device model's ceilings file; without a folder, our own one or else the shipped one."""
    # The slug may come from outside: characters that file names must not have are replaced.
    name = f"{re.sub(r'[^a-z0-9._-]+', '-', slug)[:200]}.json"
    if folder is not None:
        return folder / name
    own = own_folder() / name
    return own if own.is_file() else _shipped() / name


def _shipped() -> Path:
    return places.shipped("configs/ceilings")


def write_ceilings(ceilings: Ceilings, path: Path) -> None:
    # The rates are for readers: they are computed again when the file is read.
    write(path, msgspec.json.format(msgspec.json.encode(document(ceilings))) + b"\n")


def document(ceilings: Ceilings) -> dict[str, Any]:
    """The JSON of a ceilings file."""
    values: dict[str, Any] = msgspec.to_builtins(ceilings)
    values["copy"]["bytes_per_second"] = ceilings.bandwidth
    for entry, copy in zip(values["copies"], ceilings.copies, strict=True):
        entry["bytes_per_second"] = copy.bytes_per_second
    for entry, peak in zip(values["peaks"], ceilings.peaks, strict=True):
        entry["flops_per_second"] = peak.flops_per_second
    return {"format": FORMAT, "version": VERSION} | values


def read_ceilings(path: Path) -> Ceilings:
    """Parse a ceilings file.

    Raises:
        CeilingsError: not one, or written by a newer gemmsmith.
        FileNotFoundError: no such file.
    """
    try:
        values = msgspec.json.decode(read_text(path), type=dict[str, Any])
        if values.get("format") != FORMAT or not isinstance(values.get("version"), int):
            raise CeilingsError(f"{path} is not a ceilings file")
        if values["version"] > VERSION:
            raise CeilingsError(f"{path} was written by a newer gemmsmith: upgrade this one")
        return msgspec.convert(values, Ceilings)
    except ValueError as error:
        raise CeilingsError(f"{path} is not a ceilings file: {error}") from None


def copy_sets(read_bytes: int, l2_bytes: int) -> int:
    """Pairs of buffers to rotate over, so that each copy finds L2 cold (see tuner.measure)."""
    return max(1, min(MAX_SETS, -(-CACHE_FACTOR * l2_bytes // (2 * read_bytes))))


def measure(ordinal: int, *, on_step: Callable[[str], None] = lambda _: None) -> Ceilings:
    """Measure the local GPU with this ordinal, under its lock.

    Raises:
        NoGpu: no such GPU, or a torch that cannot use it.
        DeviceError: torch or CUDA failed.
    """
    from tuner.measure.local_gpu import gpu_uuid, local_gpu

    model = local_gpu(ordinal)
    if model is None:
        raise NoGpu(
            f"no CUDA device {ordinal} on this machine; ceilings are measured on the GPU itself. "
            "Run `gemmsmith doctor`"
        )
    with gpu_lock(gpu_uuid(ordinal)):
        try:
            return _Gpu(model, ordinal).ceilings(on_step)
        except RuntimeError as error:  # torch's, for CUDA's
            raise DeviceError(f"{model.name}: {str(error).strip().splitlines()[0]}") from error


class _Gpu:
    """The GPU with a CUDA context in this process, a stream and a timer."""

    def __init__(self, model: DeviceModel, ordinal: int) -> None:
        from tuner.measure.environment import open_gpu
        from tuner.measure.graphs import Stream
        from tuner.measure.timing import Timer

        monitor, self._environment = open_gpu(model, ordinal)
        self._model = model
        self._ordinal = ordinal
        self._stream: Stream = Stream()
        self._timer: Timer = Timer(self._stream, monitor)

    def ceilings(self, on_step: Callable[[str], None]) -> Ceilings:
        """Copies first, the power-hungry products last."""
        copies = []
        for read_bytes in COPY_READ_BYTES:
            on_step(f"copy of {read_bytes / 1e6:g} MB")
            copies.append(self._copy(read_bytes))
        on_step(f"copy of {LARGE_READ_BYTES / 1e6:g} MB")
        large = self._copy(LARGE_READ_BYTES)
        peaks = []
        for dtype in PEAK_DTYPES:
            on_step(f"{dtype} product of {PEAK_EXTENT}×{PEAK_EXTENT}×{PEAK_EXTENT}")
            peaks.append(self._peak(dtype))
        return Ceilings(
            device=self._model,
            environment=self._environment,
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
            copy=large,
            copies=tuple(copies),
            peaks=tuple(peaks),
        )

    def _copy(self, read_bytes: int) -> Copy:
        """The faster of a copy by the copy engine and one by a kernel."""
        # In a graph a memcpy of 16 or 4000 MB ran at 2.5 to 2.8 TB/s, one of 64 MB at 4.0 (NVIDIA
        # H200, 2026-11-21): the copy engine alone does not show what the memory can do.
        import torch

        sets = copy_sets(read_bytes, self._model.l2_bytes)
        with self._stream.torch():
            buffers = torch.empty(
                (sets, 2, read_bytes), dtype=torch.uint8, device=f"cuda:{self._ordinal}"
            )
            buffers.random_()

        words = buffers.view(torch.int32)

        def memcpy(i: int) -> None:
            source, target = buffers[i % sets]
            target.copy_(source)

        def kernel(i: int) -> None:
            source, target = words[i % sets]
            torch.bitwise_not(source, out=target)

        statistics, conditions = min(
            (self._time(launch, sets) for launch in (memcpy, kernel)),
            key=lambda timed: timed[0].median_us,
        )
        return Copy(read_bytes=read_bytes, sets=sets, statistics=statistics, conditions=conditions)

    def _peak(self, dtype: str) -> Peak:
        from tuner.measure.torch_calls import TorchCall
        from tuner.workloads.operands import Operands

        problem = Problem(m=PEAK_EXTENT, n=PEAK_EXTENT, k=PEAK_EXTENT, dtype=dtype)
        with self._stream.torch():
            operands = Operands(problem, self._model, self._ordinal, _SEED)
        default = TorchCall(operands, self._stream)
        statistics, conditions = self._time(default.launch, len(operands.sets))
        return Peak(problem=problem, statistics=statistics, conditions=conditions)

    def _time(self, launch: Callable[[int], None], sets: int) -> tuple[Statistics, Conditions]:
        """Time per launch over ROUNDS replays; frees the memory of earlier calls first."""
        import torch

        from tuner.measure.conditions import conditions_of
        from tuner.measure.graphs import TorchGraph, rough_us
        from tuner.measure.timing import FINAL_REPLAY_US, launches_per_replay

        gc.collect()
        torch.cuda.empty_cache()
        with self._stream.torch():
            launch(0)  # loads the kernel
            estimate_us = rough_us(self._stream, _WARM_LAUNCHES, launch)
        graph = TorchGraph(
            self._stream, launches_per_replay(estimate_us, sets, FINAL_REPLAY_US), launch
        )
        try:
            self._timer.warm_up(graph, estimate_us)
            rounds = self._timer.rounds([graph], ROUNDS, seed=_SEED, announce=lambda _: None)
        finally:
            torch.cuda.synchronize()
            graph.close()
        return summarize(rounds.samples_us[0]), conditions_of(rounds.readings)
