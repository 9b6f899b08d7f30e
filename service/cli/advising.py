"""`gemmsmith advise`: what a training program itself leaves, and what was measured to be faster.

The program runs as in a capture, for a few steps. When it has ended, the parts of a step that may
have a faster form are run in both forms, in this process, on the device of the program.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from gemmsmith.answers.answer import Ratio
from gemmsmith.program.observed import ObservedStep
from gemmsmith.program.variables import (
    ADVISE_VARIABLE,
    CAPTURE_VARIABLE,
    LOADED,
    STEP,
    STEPS_VARIABLE,
    STOP_VARIABLE,
)
from service.cli.ended import Ended
from service.cli.output import CommandError, Result, note
from service.cli.program import run_program

if TYPE_CHECKING:
    from tuner.advising.checking import Checked

STEPS = 8
"""One step for what is done once, one that is observed, and six that are timed."""

_STDERR = 2

_COMPILED = "The step runs code of torch.compile: what that fuses is not seen, and not advised."

_EAGER = (
    "torch.compile was not tried: it changes the whole step, and only the program itself can tell "
    "whether it pays."
)


def advise(
    command: Annotated[
        list[str],
        typer.Argument(help="The program and its arguments: -- torchrun --nproc-per-node 8 x.py"),
    ],
    steps: Annotated[
        int, typer.Option(min=3, help="Optimizer steps after which the program is ended.")
    ] = STEPS,
) -> Result:
    """Run a training program for some steps, and print which lines of it to change.

    The program is not changed, and computes what it computes without us. Its second optimizer step
    is observed, the following ones are timed, and after --steps it ends with status 0. Then each
    part of a step that may have a faster form is run in both forms, with the program's sizes, on
    its device: an optimizer that is not fused, an activation written in several operators, a
    vocabulary of an odd size, FP32 logits, FP32 products without TF32, attention with its scores in
    memory. Only what was measured to be faster is advised.

    What the program prints goes to stderr. If it fails, its status is the exit status.
    """
    if find_spec("torch") is None:
        from tuner.extras import library

        raise CommandError(f"torch is not installed here, which measures: pip install {library()}")
    advised = Advised.of(_observed(command, steps))
    return Result(advised, advised.text)


def _observed(command: Sequence[str], steps: int) -> ObservedStep:
    """The step of a program's first rank.

    Raises:
        CommandError: it took too few steps.
        typer.Exit: it failed.
    """
    with tempfile.TemporaryDirectory(
        prefix="gemmsmith-advise-", ignore_cleanup_errors=True
    ) as folder:
        variables = {
            ADVISE_VARIABLE: "1",
            CAPTURE_VARIABLE: folder,
            STEPS_VARIABLE: str(steps),
            STOP_VARIABLE: "1",
        }
        status = run_program(command, variables, stdout=_STDERR)
        if status:
            note(f"gemmsmith: the program ended with status {status}: nothing is advised")
            raise typer.Exit(status)
        observed = []
        for path in sorted(Path(folder).glob(f"*{STEP}")):
            with suppress(OSError, ValueError):
                observed.append(ObservedStep.parse(path.read_bytes()))
        if not observed:
            reason = "it took fewer than two steps of an optimizer of torch.optim"
            if not any(Path(folder).glob(f"*{LOADED}")):
                reason = Ended.of(status, Path(folder)).reason
            raise CommandError(f"no step was observed: {reason}")
        return min(observed, key=lambda step: step.rank)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdviceLine:
    """A part of a step.

    Attributes:
        rule: the kind of advice.
        what: what the program does.
        change: the code that would be faster.
        place: file, line and function; empty if it has none.
        ms: milliseconds of a step that it takes.
        share: of the step; None if no step was timed.
        after_ms: milliseconds in the advised form; None if that could not be run.
        gain: how many times as fast the advised form is.
        why_not: why it is not advised; empty if it is.
    """

    rule: str
    what: str
    change: str
    place: str
    ms: float
    share: float | None
    after_ms: float | None
    gain: Ratio | None
    why_not: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Advised:
    """What is advised, which is the JSON document as well.

    Attributes:
        step_ms: median of the timed steps; None if no step was timed.
        steps: how many were timed.
        device: where the program and both forms of each part ran.
        advised, not_advised: the parts, the longest first.
        saved_ms: milliseconds that all advised parts of a step take less, each run alone.
        compiled: what was not seen or not tried.
    """

    step_ms: float | None
    steps: int
    device: str
    advised: Sequence[AdviceLine]
    not_advised: Sequence[AdviceLine]
    saved_ms: float
    compiled: str

    @classmethod
    def of(cls, step: ObservedStep) -> Advised:
        """Run what may be faster of a step, on this machine.

        Raises:
            CommandError: the step ran on a GPU, which this machine lacks.
        """
        import torch

        from tuner.advising.checking import LEAST_MS, LEAST_SHARE, check

        if step.device == "cuda" and not torch.cuda.is_available():
            raise CommandError("the program ran on a GPU, which this process cannot use")
        step_ms = median(step.milliseconds) if step.milliseconds else None
        least_ms = max(LEAST_MS, LEAST_SHARE * (step_ms or 0.0))
        lines = [_line(part, step_ms) for part in check(step, torch.device(step.device), least_ms)]
        advised = [line for line in lines if not line.why_not]
        name = torch.cuda.get_device_name() if step.device == "cuda" else step.device
        return cls(
            step_ms=step_ms,
            steps=len(step.milliseconds),
            device=name,
            advised=advised,
            not_advised=[line for line in lines if line.why_not],
            saved_ms=sum(line.ms - (line.after_ms or 0.0) for line in advised),
            compiled=_COMPILED if step.is_compiled else _EAGER,
        )

    @property
    def text(self) -> list[str]:
        """What is printed."""
        if self.step_ms is None:
            lines = [f"No step was timed on {self.device}: the program took too few."]
        else:
            lines = [
                f"A step takes {self.step_ms:.2f} ms on {self.device} (median of {self.steps})."
            ]
        if self.advised:
            lines += [f"Change this; run alone, these parts then take {self.saved_ms:.2f} ms less:"]
            lines += [text for line in self.advised for text in _text(line)]
        else:
            lines += ["Nothing was measured to be faster."]
        if self.not_advised:
            lines += ["Leave this as it is:"]
            lines += [text for line in self.not_advised for text in _text(line)]
        return [*lines, self.compiled]


def _line(checked: Checked, step_ms: float | None) -> AdviceLine:
    part = checked.part
    return AdviceLine(
        rule=part.rule,
        what=part.what,
        change=part.change,
        place=part.place,
        ms=checked.ms,
        share=checked.ms / step_ms if step_ms else None,
        after_ms=checked.after_ms,
        gain=checked.gain,
        why_not=checked.why_not,
    )


def _text(line: AdviceLine) -> list[str]:
    share = "" if line.share is None else f" ({line.share:.1%})"
    after = "" if line.after_ms is None or line.why_not else f" → {line.after_ms:.2f} ms"
    place = f", {line.place}" if line.place else ""
    return [
        f"  {line.ms:.2f} ms{share}{after}: {line.what}{place}",
        f"    {line.change}" + (f": {line.why_not}" if line.why_not else ""),
    ]
