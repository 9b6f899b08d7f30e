"""The protocol between the measuring child and its parent: one JSON object per line.

The parent sends a request. The child answers with any number of `Started` and `EntrantOutcome`
lines and exactly one closing line: `Ready`, `ScreenDone`, `FinalsDone`, `SweepDone`, `ProfileDone`,
`ProposeDone` or `Refused`. `Dead` comes instead if a launch ruined the CUDA context; the child
exits right after it. Indices count the request's own entrants. A `Started` with the index NOBODY
announces work that no candidate is to blame for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from gemmsmith.answers.answer import Conditions, Correctness
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.device import DeviceModel, Environment
from gemmsmith.core.launch import Algorithm
from gemmsmith.core.problem import Problem
from tuner.measure.policy import Policy
from tuner.trial import Failure, InSpread, Rival, Rounds

NOBODY = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Entrant:
    """A contender in a request: a candidate and the path of its pack."""

    candidate: Candidate
    pack: str


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """Open the GPU."""

    ordinal: int


class Screen(msgspec.Struct, frozen=True, kw_only=True, tag="screen"):
    """Verify and time each entrant briefly. `best_us`: the best median seen so far."""

    problem: Problem
    entrants: tuple[Entrant, ...]
    policy: Policy
    seed: int
    best_us: float | None = None


class FinalsRequest(msgspec.Struct, frozen=True, kw_only=True, tag="finals"):
    """Paired rounds of the entrants and the default."""

    problem: Problem
    entrants: tuple[Entrant, ...]
    policy: Policy
    seed: int


class SweepRequest(msgspec.Struct, frozen=True, kw_only=True, tag="sweep"):
    """Common rounds of all entrants and the default, then further rounds of the best."""

    problem: Problem
    entrants: tuple[Entrant, ...]
    policy: Policy
    seed: int
    rounds: int
    best: int


class Profile(msgspec.Struct, frozen=True, kw_only=True, tag="profile"):
    """Name the kernels of one launch of the default. The child must not time anything later."""

    problem: Problem
    seed: int


class Propose(msgspec.Struct, frozen=True, kw_only=True, tag="propose"):
    """List a library's algorithms: its own list, or those near `start`. If `start` is of another
    version of the library, only the algorithm with the same settings.

    `entrant` is the library's kernel with any launch. Nothing is timed.
    """

    problem: Problem
    entrant: Entrant
    most: int
    start: Algorithm | None = None


class Quit(msgspec.Struct, frozen=True, kw_only=True, tag="quit"):
    """Exit."""


Request = Hello | Screen | FinalsRequest | SweepRequest | Profile | Propose | Quit


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """Answer to `Hello`."""

    model: DeviceModel
    environment: Environment


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """From now on this entrant is to blame for a hang or a crash; with NOBODY no entrant is."""

    index: int


class EntrantOutcome(msgspec.Struct, frozen=True, kw_only=True, tag="outcome"):
    """One entrant's result."""

    index: int
    failure: Failure | None = None
    samples_us: tuple[float, ...] = ()
    correctness: Correctness | None = None
    conditions: Conditions | None = None
    workspace_bytes: int = 0
    cost_s: float = 0.0


class ScreenDone(msgspec.Struct, frozen=True, kw_only=True, tag="screen_done"):
    """Every entrant of a `Screen` has had its outcome."""


class FinalsDone(msgspec.Struct, frozen=True, kw_only=True, tag="finals_done"):
    """The paired samples: `samples_us[i]` is `finalists[i]`'s, round by round.

    `boost`, `interleaved`, `power_penalties`, `rivals` and `spreads` are as in `trial.Finals`; in
    a sweep they are empty.
    """

    finalists: tuple[EntrantOutcome, ...]
    failures: tuple[EntrantOutcome, ...]
    samples_us: tuple[tuple[float, ...], ...]
    baseline_us: tuple[float, ...]
    conditions: Conditions
    discarded_rounds: int
    boost: Rounds | None = None
    interleaved: Rounds | None = None
    power_penalties: tuple[float | None, ...] = ()
    rivals: tuple[Rival, ...] = ()
    spreads: tuple[InSpread, ...] = ()


class SweepDone(msgspec.Struct, frozen=True, kw_only=True, tag="sweep_done"):
    """Common rounds of everything, further rounds of the best (`further.finalists`)."""

    common: FinalsDone
    further: FinalsDone


class ProfileDone(msgspec.Struct, frozen=True, kw_only=True, tag="profile_done"):
    """The default's kernels, in order; empty if the profiler does not work."""

    kernels: tuple[str, ...]


class ProposeDone(msgspec.Struct, frozen=True, kw_only=True, tag="propose_done"):
    """The library's proposals as candidates, its best guess first."""

    candidates: tuple[Candidate, ...]


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The request as a whole cannot be done; `error` is the exception's name."""

    error: str
    message: str


class Dead(msgspec.Struct, frozen=True, kw_only=True, tag="dead"):
    """The CUDA context is ruined by this entrant; the child exits."""

    index: int
    message: str


Reply = (
    Ready
    | Started
    | EntrantOutcome
    | ScreenDone
    | FinalsDone
    | SweepDone
    | ProfileDone
    | ProposeDone
    | Refused
    | Dead
)

decode_request: Callable[[bytes], Request] = msgspec.json.Decoder(Request).decode
decode_reply: Callable[[bytes], Reply] = msgspec.json.Decoder(Reply).decode


def encode(message: Request | Reply) -> bytes:
    return msgspec.json.encode(message) + b"\n"
