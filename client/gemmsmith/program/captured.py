"""The result of a capture: which matrix products a program runs, and how often. Needs no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from gemmsmith.core.numerics import demands_order, with_numerics
from gemmsmith.core.problem import Problem
from gemmsmith.errors import InvalidProblem
from gemmsmith.files import write

if TYPE_CHECKING:
    from gemmsmith.http.client import Client
    from gemmsmith.http.handles import TuningJob


_Count = Annotated[int, msgspec.Meta(ge=1)]


class _Counted(msgspec.Struct, frozen=True):
    problem: Problem
    calls: _Count


class _CaptureDocument(msgspec.Struct, frozen=True):
    problems: list[_Counted]
    skipped: dict[str, _Count]
    unseen: dict[str, _Count] = {}  # older versions do not write it


class Captured:
    """The products that were captured."""

    def __init__(self) -> None:
        self._problems: Counter[Problem] = Counter()
        self._skipped: Counter[str] = Counter()
        self._unseen: Counter[str] = Counter()

    @property
    def problems(self) -> Counter[Problem]:
        return self._problems

    @property
    def skipped(self) -> Counter[str]:
        """The number of products, by their types, for which no kernels exist."""
        return self._skipped

    @property
    def unseen(self) -> Counter[str]:
        """Descriptions of what may have run further products, and how often it ran."""
        return self._unseen

    def add(self, other: Captured) -> None:
        self.problems.update(other.problems)
        self.skipped.update(other.skipped)
        self.unseen.update(other.unseen)

    def with_numerics(self, numerics: str | None) -> Captured:
        """The products as kernels of these numerics run them, such as `invariant`; None: as here.

        Products of integers stay, as their sums have no order. What else has no order is skipped.

        Raises:
            InvalidProblem: there is no such word.
        """
        if not demands_order(numerics):
            return self
        captured = Captured()
        captured.skipped.update(self.skipped)
        captured.unseen.update(self.unseen)
        for problem, calls in self.problems.items():
            operation = problem.operation
            stays = operation.a.is_integer or operation.summation is not None
            try:
                demanded = problem if stays else with_numerics(problem, numerics)
            except InvalidProblem:
                # A product without its epilogue is captured as well.
                if not operation.is_fused:
                    captured.skipped[operation.dtype] += calls
                continue
            captured.problems[demanded] += calls
        return captured

    @property
    def document(self) -> bytes:
        """The capture as JSON, for `parse`."""
        counted = [_Counted(problem, calls) for problem, calls in self.problems.most_common()]
        return msgspec.json.encode(_CaptureDocument(counted, dict(self.skipped), dict(self.unseen)))

    @staticmethod
    def parse(document: bytes) -> Captured:
        """Read a document that `document` returned.

        Raises:
            ValueError: it is not the document of a capture.
        """
        try:
            decoded = msgspec.json.decode(document, type=_CaptureDocument)
        except InvalidProblem as error:
            raise ValueError(str(error)) from None
        captured = Captured()
        for counted in decoded.problems:
            captured.problems[counted.problem] += counted.calls
        captured.skipped.update(decoded.skipped)
        captured.unseen.update(decoded.unseen)
        return captured

    def save(self, path: str | PathLike[str]) -> None:
        """Write a suite for `gemmsmith tune --suite`, most frequent product first.

        Raises:
            OSError: the file cannot be written.
        """
        ordered = sorted(self.problems.items(), key=lambda item: (-item[1], item[0]))
        lines = [
            "# Matrix products captured from a run, and how often each ran.",
            'name = "captured"',
        ]
        for problem, calls in ordered:
            lines += ["", "[[problem]]", *_entry(problem), f"calls = {calls}"]
        write(Path(path), ("\n".join(lines) + "\n").encode())

    def tune(self, client: Client) -> list[TuningJob]:
        """Request a tuning job for every problem, with its number of calls.

        Raises:
            as `Client.tune`.
        """
        return [
            client.tune(
                problem.m,
                problem.n,
                problem.k,
                batch=problem.batch,
                dtype=problem.dtype,
                layout=problem.layout,
                calls=count,
            )
            for problem, count in self.problems.most_common()
        ]


def _entry(problem: Problem) -> Iterable[str]:
    """The lines of a suite that describe a problem."""
    operation = problem.operation
    yield 'name = "captured"'
    yield 'group = "captured"'
    yield f'dtype = "{operation.of_suites.dtype}"'
    yield f'layout = "{problem.layout}"'
    yield f"m = {problem.m}\nn = {problem.n}\nk = {problem.k}"
    if operation.is_grouped:
        yield f'grouping = "{operation.grouping}"\ngroups = {problem.batch}'
    elif problem.batch > 1:
        yield f"batch = {problem.batch}"
    if operation.is_fused:
        yield f'epilogue = "{operation.epilogue}"'
    if operation.stores_fp8:
        yield f'output = "{operation.d}"'


def tune_command(problem: Problem, url: str | None = None) -> str:
    """The command that tunes a problem, locally or through the service at `url`."""
    words = [
        f"gemmsmith tune {problem.m} {problem.n} {problem.k}",
        f"--dtype {problem.dtype} --layout {problem.layout}",
    ]
    if problem.batch > 1:
        words.append(f"--batch {problem.batch}")
    return " ".join(words if url is None else [*words, f"--url {url}"])
