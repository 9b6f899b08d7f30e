"""Runs both forms of the parts of a step, in turns, and decides what to advise."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from gemmsmith.answers.answer import Ratio
from gemmsmith.ops.comparing import paired
from gemmsmith.program.observed import ObservedStep
from tuner.advising.part import Forms, Run, StepPart
from tuner.advising.rules import RULES

LEAST_SHARE = 0.01
"""Share of the step below which a part is not worth a line."""

LEAST_MS = 0.1
"""The same in milliseconds."""

LEAST_GAIN = 1.02
"""Smallest gain of a part that is advised."""

BLOCKS, MOST_BLOCKS = 8, 40
"""Pairs of timed blocks: 6 give a 95% interval of a median. More are timed while a gain is not
certain, as on a busy host."""

LONGEST_S = 10.0
"""Seconds of one form that blocks beyond the first ones take together."""

BLOCK_S = 0.02
"""Seconds that a block takes at least."""

NEAR = 0.05
"""Largest difference of the results and gradients of both forms, as a share of the largest element:
a few roundings of bf16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """A part of the step, whose two forms were run.

    Attributes:
        part: what it is.
        ms: milliseconds of a step that it takes.
        after_ms: the same in the advised form; None if that could not be run.
        gain: how many times as fast the advised form is.
        why_not: why it is not advised; empty if it is.
    """

    part: StepPart
    ms: float
    after_ms: float | None = None
    gain: Ratio | None = None
    why_not: str = ""


def check(step: ObservedStep, device: torch.device, least_ms: float) -> list[Checked]:
    """Run every part of a step that takes at least `least_ms`, the largest first.

    The parts of a rule that do the same at the same place are one.
    """
    torch.set_num_threads(step.threads)
    parts: dict[tuple[str, str], list[StepPart]] = {}
    for rule in RULES:
        for part in rule(step):
            parts.setdefault((part.what, part.place), []).append(part)
    checked = [result for same in parts.values() for result in _checked(same, device, least_ms)]
    return sorted(checked, key=lambda result: -result.ms)


def _checked(same: Sequence[StepPart], device: torch.device, least_ms: float) -> Iterator[Checked]:
    part, calls = same[0], sum(part.calls for part in same)
    ms = 0.0
    try:
        forms = part.forms(device)
        forms.before()
        once = _seconds(forms.before, 1, device)
        ms = once * forms.scale * calls * 1e3
        if ms < least_ms / 2:
            return  # a first run takes longer than others, never half as long
        before, after, gain = _in_turns(forms, once, device)
        why_not = _why_not(forms, gain)
    except RuntimeError as error:  # out of memory, or no such kernel for these operands
        yield Checked(part=part, ms=ms, why_not=f"it cannot be run here: {_line(error)}")
        return
    ms, after_ms = (seconds * forms.scale * calls * 1e3 for seconds in (before, after))
    if ms >= least_ms:
        yield Checked(part=part, ms=ms, after_ms=after_ms, gain=gain, why_not=why_not)


def _in_turns(forms: Forms, once: float, device: torch.device) -> tuple[float, float, Ratio]:
    """Seconds of a run of both forms, and their ratio."""
    runs = max(1, round(BLOCK_S / once))
    forms.after()
    before: list[float] = []
    after: list[float] = []
    for block in range(max(BLOCKS, min(MOST_BLOCKS, int(LONGEST_S / (runs * once))))):
        if block >= BLOCKS and not (gain := paired(before, after)).ci_low <= 1 < gain.median:
            break
        sides = ((forms.before, before), (forms.after, after))
        for run, seconds in sides if block % 2 == 0 else reversed(sides):
            seconds.append(_seconds(run, runs, device))
    gain = paired(before, after)
    ordinary = median(before)
    return ordinary, ordinary / gain.median, gain


def _why_not(forms: Forms, gain: Ratio) -> str:
    for before, after in zip(forms.before(), forms.after(), strict=True):
        off = float((before.float() - after.float()).abs().max() / before.float().abs().max())
        if not off <= NEAR:
            return f"its result or a gradient differs by {off:.1%} of the largest element"
    if gain.median >= LEAST_GAIN and gain.ci_low <= 1:
        return f"its gain is not certain: {_text(gain)}"
    if gain.median < LEAST_GAIN:
        return f"it is only {_text(gain)}"
    return ""


def _seconds(run: Run, runs: int, device: torch.device) -> float:
    """Seconds of a run, of `runs` in a row."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(runs):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / runs


def _text(gain: Ratio) -> str:
    return f"{gain.median:.3f} × as fast (95%: {gain.ci_low:.3f} … {gain.ci_high:.3f})"


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0]
