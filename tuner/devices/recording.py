"""The file format of an exhaustive sweep, which is a recorded GPU: its writer and its reader.

A sweep file is zstd-compressed JSON lines: a header, then for each problem the kernels not yet
described, the problem with cuBLAS's times, and its trials. The last line counts the problems, so
that a truncated file is noticed. Times are whole hundredths of a microsecond.

While recording, complete problems are appended to `<file>.part` and fsynced. A killed recording
loses at most the problem in progress, and the next writer continues it. Closing the writer
compresses the part file into a temporary file, which is then renamed.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import msgspec
import zstandard

from gemmsmith.answers.answer import Conditions, Correctness
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.device import DeviceModel, Environment
from gemmsmith.core.kernel import AnyKernel
from gemmsmith.core.launch import Launch
from gemmsmith.core.problem import Problem
from gemmsmith.files import write
from tuner.errors import RecordingCorrupt
from tuner.trial import Failure

SCHEMA = 1
SUFFIX = ".jsonl.zst"
PROTOCOL = (
    "CUDA-graph replays over rotating operands (3 x L2); all candidates and cuBLAS in the same "
    "shuffled rounds, then the best ones and cuBLAS in further rounds; times per launch"
)

_TICKS_PER_US = 100
_LEVEL = 19


class Header(msgspec.Struct, frozen=True, kw_only=True, tag="header", tag_field="line"):
    """Where and how the sweep was recorded."""

    schema: int
    device: DeviceModel
    environment: Environment
    recorded_at: str
    gemmsmith: str
    protocol: str = PROTOCOL


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedTrial:
    """One candidate's outcome: times in the common rounds and, of the best, in further rounds."""

    candidate: Candidate
    failure: Failure | None = None
    common_us: tuple[float, ...] = ()
    further_us: tuple[float, ...] = ()
    correctness: Correctness | None = None
    workspace_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedProblem:
    """Everything measured on one problem. Rounds are paired with the default's by position.

    `baseline_kernels`: names of cuBLAS's kernels, in order; empty if they were not recorded.
    """

    problem: Problem
    baseline_common_us: tuple[float, ...]
    baseline_further_us: tuple[float, ...]
    conditions: Conditions
    further_conditions: Conditions
    discarded_rounds: int
    trials: tuple[RecordedTrial, ...]
    baseline_kernels: tuple[str, ...] = ()


class _KernelLine(msgspec.Struct, frozen=True, kw_only=True, tag="kernel", tag_field="line"):
    id: int
    kernel: AnyKernel


class _ProblemLine(msgspec.Struct, frozen=True, kw_only=True, tag="problem", tag_field="line"):
    problem: Problem
    common: tuple[int, ...]
    further: tuple[int, ...]
    conditions: Conditions
    further_conditions: Conditions
    discarded: int
    trials: int
    baseline_kernels: tuple[str, ...] = ()


class _TrialLine(
    msgspec.Struct, frozen=True, kw_only=True, tag="trial", tag_field="line", omit_defaults=True
):
    kernel: int
    launch: Launch
    common: tuple[int, ...] = ()
    further: tuple[int, ...] = ()
    correctness: Correctness | None = None
    workspace: int = 0
    failure: Failure | None = None


class _EndLine(msgspec.Struct, frozen=True, kw_only=True, tag="end", tag_field="line"):
    problems: int


_Line = Header | _KernelLine | _ProblemLine | _TrialLine | _EndLine
_decoder: msgspec.json.Decoder[_Line] = msgspec.json.Decoder(_Line)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """A recording in memory."""

    header: Header
    problems: dict[Problem, RecordedProblem] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Sweep:
        """Read a finished sweep file.

        Raises:
            RecordingCorrupt: it is not a sweep, cannot be read, is truncated, or was written by a
                newer gemmsmith.
        """
        try:
            with path.open("rb") as file:
                data = zstandard.ZstdDecompressor().stream_reader(file).read()
        except (OSError, zstandard.ZstdError) as error:
            raise RecordingCorrupt(f"cannot read the recording {path}: {error}") from error
        parsed = _parse(data, path)
        number = len(parsed.sweep.problems)
        if parsed.counted != number:
            raise RecordingCorrupt(
                f"{path} is truncated after {number} problems; fetch or record it again"
            )
        return parsed.sweep


def first_problem(path: Path) -> Problem | None:
    """The first problem of a sweep file, read without the rest of the file.

    Returns None if the file holds no problem.

    Raises:
        RecordingCorrupt: the file cannot be read up to its first problem.
    """
    try:
        with path.open("rb") as file:
            for raw in io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(file)):
                line = _decoder.decode(raw)
                if isinstance(line, _ProblemLine):
                    return line.problem
    except (OSError, zstandard.ZstdError, msgspec.DecodeError) as error:
        raise RecordingCorrupt(f"cannot read the recording {path}: {error}") from error
    return None


class SweepWriter:
    """Writes a sweep file. A context manager; `path` appears only when the file is complete.

    An error inside the context leaves the part file. The next writer continues it.

    Attributes:
        done: problems that are in the file already.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self._path = path
        self._part = path.with_name(path.name + ".part")
        self._kernels: dict[AnyKernel, int] = {}
        self.done: set[Problem] = set()
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = self._resume(header)
        with self._part.open("r+b" if kept else "wb") as file:
            file.truncate(kept)
        self._file = self._part.open("ab")
        if not kept:
            self._write([header])

    def append(self, recorded: RecordedProblem) -> None:
        """Add a problem; it is on disk when this returns."""
        lines: list[_Line] = []  # new kernels come first: trials refer to them by number
        trials: list[_Line] = []
        for trial in recorded.trials:
            kernel = trial.candidate.kernel
            if kernel not in self._kernels:
                self._kernels[kernel] = len(self._kernels)
                lines.append(_KernelLine(id=self._kernels[kernel], kernel=kernel))
            trials.append(
                _TrialLine(
                    kernel=self._kernels[kernel],
                    launch=trial.candidate.launch,
                    common=_ticks(trial.common_us),
                    further=_ticks(trial.further_us),
                    correctness=_rounded(trial.correctness),
                    workspace=trial.workspace_bytes,
                    failure=trial.failure,
                )
            )
        lines.append(
            _ProblemLine(
                problem=recorded.problem,
                common=_ticks(recorded.baseline_common_us),
                further=_ticks(recorded.baseline_further_us),
                conditions=recorded.conditions,
                further_conditions=recorded.further_conditions,
                discarded=recorded.discarded_rounds,
                trials=len(trials),
                baseline_kernels=recorded.baseline_kernels,
            )
        )
        self._write(lines + trials)
        self.done.add(recorded.problem)

    def close(self) -> Path:
        """Finish the file and return its path."""
        self._write([_EndLine(problems=len(self.done))])
        self._file.close()
        compressed = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(
            self._part.read_bytes()
        )
        write(self._path, compressed)
        self._part.unlink()
        return self._path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: object, _traceback: object) -> None:
        if error is None:
            self.close()
        else:
            self._file.close()

    def _write(self, lines: Sequence[_Line]) -> None:
        self._file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        self._file.flush()
        os.fsync(self._file.fileno())

    def _resume(self, header: Header) -> int:
        """Bytes of the part file to keep: its complete problems if device and environment match."""
        try:
            data = self._part.read_bytes()
            data = data[: data.rfind(b"\n") + 1]  # the last line may be incomplete
            parsed = _parse(data, self._part, partial=True)
        except (OSError, RecordingCorrupt):
            return 0
        before = parsed.sweep.header
        # Times of another device or environment are not comparable: the file starts anew.
        if (before.device, before.environment) != (header.device, header.environment):
            return 0
        self.done = set(parsed.sweep.problems)
        self._kernels = {kernel: number for number, kernel in parsed.kernels.items()}
        return parsed.length


@dataclass(kw_only=True, slots=True)
class _Parsed:
    """The content of a file.

    Attributes:
        length: bytes of the header and the complete problems.
        kernels: those that are described there, by number.
        counted: problems by the last line; None if it counts none.
    """

    sweep: Sweep
    length: int
    kernels: dict[int, AnyKernel] = field(default_factory=dict)
    counted: int | None = None


def _parse(data: bytes, path: Path, *, partial: bool = False) -> _Parsed:
    """With `partial`, the last problem may be incomplete and is then left out."""
    decoded = _decoded(data.splitlines(keepends=True), path)
    end, first = next(decoded, (0, None))
    if not isinstance(first, Header):
        raise RecordingCorrupt(f"{path} is not a recording: its first line is not a header")
    parsed = _Parsed(sweep=Sweep(header=first), length=end)
    kernels: dict[int, AnyKernel] = {}
    for end, line in decoded:
        parsed.counted = line.problems if isinstance(line, _EndLine) else None
        if isinstance(line, _KernelLine):
            kernels[line.id] = line.kernel
        elif isinstance(line, _ProblemLine):
            trials: list[RecordedTrial] = []
            for _ in range(line.trials):
                end, trial = next(decoded, (0, None))
                if not isinstance(trial, _TrialLine) or trial.kernel not in kernels:
                    if partial:
                        return parsed
                    raise RecordingCorrupt(
                        f"{path} is damaged: {line.problem} should have {line.trials} trials, "
                        f"only {len(trials)} can be read; fetch or record it again"
                    )
                trials.append(_trial(trial, kernels[trial.kernel]))
            parsed.sweep.problems[line.problem] = _problem(line, trials)
            parsed.length, parsed.kernels = end, dict(kernels)
        elif not isinstance(line, _EndLine):
            raise RecordingCorrupt(f"{path} is damaged: a {type(line).__name__} out of place")
    return parsed


def _decoded(lines: Sequence[bytes], path: Path) -> Iterator[tuple[int, _Line]]:
    """Each line, and where it ends in the file."""
    end = 0
    for number, raw in enumerate(lines, start=1):
        if number == 1:
            _check_schema(raw, path)
        end += len(raw)
        try:
            yield end, _decoder.decode(raw)
        except msgspec.DecodeError as error:
            raise RecordingCorrupt(f"{path}, line {number}: {error}") from error


def _check_schema(raw: bytes, path: Path) -> None:
    """Report a newer schema as such, before its lines fail to decode."""
    try:
        schema = msgspec.json.decode(raw, type=dict).get("schema")
    except msgspec.DecodeError as error:
        raise RecordingCorrupt(f"{path} is not a recording: {error}") from error
    if isinstance(schema, int) and schema > SCHEMA:
        raise RecordingCorrupt(
            f"{path} has recording schema {schema}, this gemmsmith reads up to {SCHEMA}; upgrade "
            "gemmsmith"
        )


def _problem(line: _ProblemLine, trials: Sequence[RecordedTrial]) -> RecordedProblem:
    return RecordedProblem(
        problem=line.problem,
        baseline_common_us=_times(line.common),
        baseline_further_us=_times(line.further),
        conditions=line.conditions,
        further_conditions=line.further_conditions,
        discarded_rounds=line.discarded,
        trials=tuple(trials),
        baseline_kernels=line.baseline_kernels,
    )


def _trial(line: _TrialLine, kernel: AnyKernel) -> RecordedTrial:
    return RecordedTrial(
        candidate=Candidate(kernel=kernel, launch=line.launch),
        failure=line.failure,
        common_us=_times(line.common),
        further_us=_times(line.further),
        correctness=line.correctness,
        workspace_bytes=line.workspace,
    )


def _ticks(times: Sequence[float]) -> tuple[int, ...]:
    return tuple(max(1, round(time * _TICKS_PER_US)) for time in times)


def _times(ticks: Sequence[int]) -> tuple[float, ...]:
    return tuple(tick / _TICKS_PER_US for tick in ticks)


def _rounded(correctness: Correctness | None) -> Correctness | None:
    if correctness is None:
        return None
    # Three digits of an error are as many as mean anything, and compress well.
    return Correctness(
        error=float(f"{correctness.error:.3g}"),
        max_error=float(f"{correctness.max_error:.3g}"),
        tolerance=correctness.tolerance,
        repeatable=correctness.repeatable,
    )
