"""`gemmsmith run --report`: what the kernels of a run gained, and why torch ran the others.

Nothing is timed in the run, which waits for no kernel. A kernel's time and saving are those of its
winner's measurement. Torch's time is that of the same measurement if the problem was measured, else
an estimate from near winners or a roofline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gemmsmith.core.problem import Problem
from gemmsmith.errors import GemmsmithError
from gemmsmith.files import write
from gemmsmith.program.ran import Ran, RanProduct
from service.cli import of_run
from service.cli.ended import Ended
from service.cli.output import CommandError, counted, note
from tuner.errors import TunerError

SHOWN = 30
"""Lines of each part of the report; the file has all."""

TIMES = "Times are those of the winners' records; with ~ estimates from near ones. None is timed."


def report(ended: Ended, winners: of_run.ProgramWinners, file: Path | None) -> None:
    """Print the report of a program, and write it to `file` as JSON.

    Raises:
        OSError: the file cannot be written, and the program has succeeded.
    """
    problems = ended.captured.problems
    estimates = {}
    try:
        _, _, times = of_run.known(winners, ended.captured)
        estimates = {problem: us / problems[problem] for problem, us in times.items()}
    except (CommandError, GemmsmithError, TunerError, OSError) as error:
        note(f"gemmsmith: the times of torch's products are not known: {error}")
    gained = Gained.of(ended.ran, estimates)
    for line in gained.text:
        note(line)
    if file is None:
        return
    try:
        write(file, msgspec.json.format(msgspec.json.encode(gained), indent=2) + b"\n")
    except OSError as error:
        if not ended.status:
            raise
        note(f"{file} cannot be written: {error.strerror}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One product of the report.

    Attributes:
        product: the problem, or the operands' types.
        calls: in a step, or in all.
        kernel: what ran it; None if torch did.
        reason: why torch did, or did not fuse it; None if a kernel ran it.
        us: microseconds of a call. None if they are not known.
        torch_us: the same by torch.
        is_estimate: whether nothing was measured for this problem.
        saved_ms: milliseconds that all these calls take less than torch's.
        share: of the time of all products.
    """

    product: str
    calls: float
    kernel: str | None
    reason: str | None
    us: float | None
    torch_us: float | None
    is_estimate: bool
    saved_ms: float | None
    share: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Gained:
    """The report, which is its JSON document as well.

    Attributes:
        unit: what the figures are for: a step, or the run.
        steps, processes: how many were captured.
        products_ms: milliseconds of all products with a known time.
        saved_ms: milliseconds less than torch's.
        times: where times come from.
        kernels: products that kernels ran.
        by_torch: products that torch ran.
        not_fused: what torch ran as separate steps, and a kernel could fuse. Their products are
            among the others.
    """

    unit: str
    steps: int
    processes: int
    products_ms: float
    saved_ms: float
    times: str
    kernels: Sequence[Line]
    by_torch: Sequence[Line]
    not_fused: Sequence[Line]

    @classmethod
    def of(cls, ran: Ran, estimates: Mapping[Problem, float]) -> Gained:
        """What was gained in a run.

        Args:
            ran: its products.
            estimates: microseconds of a call by torch, for what was not measured.
        """
        counted_in = max(ran.steps, 1)
        timed = [
            (product, *_times(product, estimates))
            for product in ran.products
            if not product.is_missed
        ]
        whole = sum(product.calls * (us or 0.0) for product, us, _, _ in timed)
        lines = [
            _line(product, counted_in, (us, torch_us), whole, is_estimate=is_estimate)
            for product, us, torch_us, is_estimate in timed
        ]
        lines.sort(key=lambda line: -(line.share or 0.0))
        missed = [
            _line(product, counted_in, (None, None), 0.0, is_estimate=False)
            for product in ran.products
            if product.is_missed
        ]
        return cls(
            unit="step" if ran.steps else "run",
            steps=ran.steps,
            processes=ran.processes,
            products_ms=whole / counted_in / 1e3,
            saved_ms=sum(line.saved_ms or 0.0 for line in lines),
            times=TIMES,
            kernels=[line for line in lines if line.kernel],
            by_torch=[line for line in lines if not line.kernel],
            not_fused=sorted(missed, key=lambda line: -line.calls),
        )

    @property
    def text(self) -> list[str]:
        """The report in lines."""
        without = self.products_ms + self.saved_ms
        processes = f"{self.processes} processes"
        if self.steps:
            of = f" of each of {processes}" if self.processes > 1 else ""
            unit = f"a step{of} (the mean of {counted(self.steps, 'step')})"
        else:
            unit = f"in all{f' {processes}' if self.processes > 1 else ''}"
        lines = [
            f"gemmsmith: products take {self.products_ms:.3f} ms {unit}, {self.saved_ms:.3f} ms "
            f"less than torch's {without:.3f}",
            f"  {TIMES}",
        ]
        parts = {"kernels": list(self.kernels)}
        for line in self.by_torch:
            parts.setdefault(f"torch: {line.reason}", []).append(line)
        for line in self.not_fused:
            parts.setdefault(f"not fused: {line.reason}", []).append(line)
        if self.kernels or self.by_torch:
            lines.append("    share    calls   µs each   torch's  ms saved")
        for title, products in parts.items():
            lines += [f"  {title}"] if products else []
            lines += [_text(line) for line in products[:SHOWN]]
            if len(products) > SHOWN:
                lines.append(f"    and {len(products) - SHOWN} more, which --report=FILE has")
        return lines


def _times(
    product: RanProduct, estimates: Mapping[Problem, float]
) -> tuple[float | None, float | None, bool]:
    """Microseconds of a call as it ran, and by torch, and whether they are estimates."""
    if product.time_us is not None:
        return product.time_us, product.time_us + (product.saving_us or 0.0), False
    if product.problem is None:
        return None, None, False
    estimate = estimates.get(product.problem)
    return estimate, estimate, True


def _line(
    product: RanProduct,
    counted_in: int,
    times: tuple[float | None, float | None],
    whole: float,
    *,
    is_estimate: bool,
) -> Line:
    us, torch_us = times
    calls, saving = product.calls / counted_in, product.saving_us
    return Line(
        product=product.types if product.problem is None else str(product.problem),
        calls=calls,
        kernel=product.kernel or None,
        reason=product.reason or None,
        us=us,
        torch_us=torch_us,
        is_estimate=is_estimate and us is not None,
        saved_ms=None if saving is None else calls * saving / 1e3,
        share=None if us is None or not whole else product.calls * us / whole,
    )


def _text(line: Line) -> str:
    about = "~" if line.is_estimate else ""
    cells = (
        (8, "–" if line.share is None else f"{line.share:.1%}"),
        (9, f"{line.calls:g}" if line.calls % 1 == 0 else f"{line.calls:.1f}"),
        (10, "–" if line.us is None else f"{about}{line.us:.2f}"),
        (10, "–" if line.torch_us is None else f"{about}{line.torch_us:.2f}"),
        (10, "–" if line.saved_ms is None else f"{line.saved_ms:.3f}"),
    )
    row = "".join(cell.rjust(width) for width, cell in cells)
    return f" {row}  {line.product}{f': {line.kernel}' if line.kernel else ''}"
