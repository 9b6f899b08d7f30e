"""What a profile says about a winner and the default, in one sentence.

Most of a warp's time is waiting, also in a good kernel: one warp loads tiles, others multiply them,
and each waits for the other. What counts is whether the tensor cores or memory are busy meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator

from gemmsmith.core.candidate import Candidate
from tuner.profiling.records import Counters, ProblemProfile

NAMED = 2
"""Reasons that the sentence names; the table has more."""

ISSUING = "selected"
WORDS = {
    "barrier": "other warps, at a barrier",
    "branch_resolving": "a branch's target",
    "dispatch_stall": "the dispatcher",
    "drain": "stores, at the kernel's end",
    "gmma": "the tensor cores",
    "imc_miss": "constants",
    "lg_throttle": "the queue of global loads",
    "long_scoreboard": "data from L1, L2 or memory",
    "math_pipe_throttle": "an arithmetic pipe",
    "membar": "a memory barrier",
    "mio_throttle": "the queue of shared memory",
    "no_instruction": "instructions",
    "not_selected": "its turn to issue",
    ISSUING: "nothing: it issues",
    "short_scoreboard": "data from shared memory",
    "sleeping": "the end of a sleep",
    "tex_throttle": "the queue of textures",
    "wait": "an instruction's fixed time",
}
"""What a warp waits for, by Nsight Compute's name."""


def words(reason: str) -> str:
    return WORDS.get(reason, reason.replace("_", " "))


def waits(profile: ProblemProfile, candidate: Candidate | None) -> str:
    """What the warps wait for on both sides; `candidate` is the winner's."""
    ours, theirs = profile.candidate.main, profile.default.main
    busy = "; ".join(_busy(ours, theirs)) or "both ran"
    parts = [
        f"By Nsight Compute on {profile.recorded_at[:10]}, {busy}.",
        *_stalls(ours, theirs),
    ]
    if not is_of(profile, candidate):
        parts.append("The profile is of an earlier candidate.")
    return " ".join(parts)


def is_of(profile: ProblemProfile, candidate: Candidate | None) -> bool:
    """Whether the profile's candidate is this one."""
    profiled = profile.candidate.candidate
    return candidate is not None and profiled is not None and profiled.key == candidate.key


def _busy(ours: Counters, theirs: Counters) -> Iterator[str]:
    shares = [
        ("the tensor pipe is active", ours.tensor, theirs.tensor, "of the time"),
        ("DRAM reaches", ours.dram, theirs.dram, "of its peak"),
    ]
    if ours.tensor is None or theirs.tensor is None:
        shares[0] = ("the busiest unit of the SMs reaches", ours.sm, theirs.sm, "of its peak")
    for what, our_share, their_share, of in shares:
        if our_share is not None and their_share is not None:
            yield (
                f"{what} {our_share:.0%} {of} with the candidate, "
                f"{their_share:.0%} with the default"
            )


def _stalls(ours: Counters, theirs: Counters) -> Iterator[str]:
    if not ours.stalls or not theirs.stalls:
        yield "What the warps wait for was not counted."
        return
    for kernel, subject in ((ours, "the candidate"), (theirs, "the default")):
        largest = [reason for reason in kernel.waits if reason != ISSUING][:NAMED]
        shares = [f"{kernel.waits[reason]:.0%} for {words(reason)}" for reason in largest]
        yield f"A warp of {subject} spends its time waiting: {', '.join(shares)}."
