"""A measuring child without a GPU: speaks the protocol, misbehaves when a kernel's name says so.

Names: `hang` never answers, `crash` aborts, `dead` reports a ruined context, `wrong` fails
verification, `slow-rounds` hangs in the finals' rounds only, `refuse` makes the whole request
fail, `garbage` breaks the protocol. Anything else is measured: 10 µs plus its tile M.
Profiling cuBLAS names two kernels, unless FAKE_CHILD_PROFILE says `hang`, `crash` or `refuse`.
Every request is appended to the file named by FAKE_CHILD_LOG.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from gemmsmith.answers.answer import Conditions, Correctness
from gemmsmith.core.device import DeviceModel, Environment
from tuner.measure import protocol
from tuner.measure.protocol import (
    NOBODY,
    Dead,
    Entrant,
    EntrantOutcome,
    FinalsDone,
    Hello,
    Profile,
    ProfileDone,
    Quit,
    Ready,
    Refused,
    Screen,
    ScreenDone,
    Started,
    SweepDone,
    SweepRequest,
)
from tuner.trial import Failure, FailureKind

MODEL = DeviceModel(
    name="NVIDIA Fake", arch="sm90", sm_count=4, memory_bytes=32 * 2**30, l2_bytes=2**20
)
ENVIRONMENT = Environment(
    gpu_uuid="GPU-fake",
    driver="1",
    cuda="13.0",
    cutlass="4.2.0",
    compiler="13.0",
    torch="2.11",
    cublas="13",
    gemmsmith="0.1.0",
)
CUBLAS = ("Memset (Device)", "nvjet_tst_128x128_64x6_2x1_v_bz_TNN")
CORRECT = Correctness(error=1.5e-3, max_error=2e-3, tolerance=5e-3, repeatable=True)
CALM = Conditions(sm_clock_mhz=1980.0, power_w=500.0, temperature_c=40.0)


def send(reply: protocol.Reply) -> None:
    sys.stdout.buffer.write(protocol.encode(reply))
    sys.stdout.buffer.flush()


def time_us(entrant: Entrant) -> float:
    return 10.0 + entrant.candidate.kernel.tile[0]


def verify(index: int, entrant: Entrant) -> EntrantOutcome:
    send(Started(index=index))
    name = entrant.candidate.kernel.name
    if "hang" in name:
        time.sleep(600)
    if "crash" in name:
        sys.stderr.write("something terrible\n")
        sys.stderr.flush()
        os.abort()
    if "dead" in name:
        send(Dead(index=index, message="CUDA_ERROR_ILLEGAL_ADDRESS"))
        sys.exit(70)
    if "garbage" in name:
        sys.stdout.write("printf debugging\n")
        sys.stdout.flush()
    if "wrong" in name:
        failure = Failure(kind=FailureKind.WRONG, message="off by one")
        return EntrantOutcome(index=index, failure=failure)
    return EntrantOutcome(index=index, correctness=CORRECT, workspace_bytes=index)


def race(entrants: tuple[Entrant, ...], rounds: int) -> FinalsDone:
    outcomes = [verify(i, entrant) for i, entrant in enumerate(entrants)]
    field = [outcome for outcome in outcomes if outcome.failure is None]
    for outcome in field:
        send(Started(index=outcome.index))
        if "slow-rounds" in entrants[outcome.index].candidate.kernel.name:
            time.sleep(600)
    send(Started(index=NOBODY))
    return FinalsDone(
        finalists=tuple(field),
        failures=tuple(outcome for outcome in outcomes if outcome.failure),
        samples_us=tuple(
            tuple(time_us(entrants[o.index]) + r / 100 for r in range(rounds)) for o in field
        ),
        baseline_us=tuple(50.0 + r / 100 for r in range(rounds)),
        conditions=CALM,
        discarded_rounds=0,
    )


def main() -> None:
    log = os.environ.get("FAKE_CHILD_LOG")
    for line in sys.stdin.buffer:
        if log:
            with Path(log).open("ab") as file:
                file.write(line)
        request = protocol.decode_request(line)
        match request:
            case Hello():
                if os.environ.get("FAKE_CHILD_NO_GPU"):
                    send(Refused(error="NoGpu", message="no CUDA device"))
                    return
                if os.environ.get("FAKE_CHILD_STILLBORN"):
                    sys.exit("cannot import torch")
                send(Ready(model=MODEL, environment=ENVIRONMENT))
            case Quit():
                return
            case Screen():
                send(Started(index=NOBODY))
                if any("refuse" in e.candidate.kernel.name for e in request.entrants):
                    send(Refused(error="ReferenceBroken", message="not finite"))
                    continue
                if any("lost-setup" in e.candidate.kernel.name for e in request.entrants):
                    sys.exit(1)
                for i, entrant in enumerate(request.entrants):
                    outcome = verify(i, entrant)
                    times = (time_us(entrant),) * request.policy.screen_samples
                    send(
                        EntrantOutcome(
                            index=i,
                            failure=outcome.failure,
                            samples_us=() if outcome.failure else times,
                            correctness=outcome.correctness,
                            conditions=CALM,
                        )
                    )
                send(ScreenDone())
            case protocol.FinalsRequest():
                send(race(request.entrants, request.policy.final_rounds))
            case Profile():
                send(Started(index=NOBODY))
                match os.environ.get("FAKE_CHILD_PROFILE"):
                    case "hang":
                        time.sleep(600)
                    case "crash":
                        os.abort()
                    case "refuse":
                        send(Refused(error="DoesNotFit", message="out of memory"))
                        continue
                send(ProfileDone(kernels=CUBLAS))
            case SweepRequest():
                common = race(request.entrants, request.rounds)
                order = sorted(common.finalists, key=lambda o: time_us(request.entrants[o.index]))
                best = {o.index for o in order[: request.best]}
                further = race(request.entrants, request.policy.final_rounds)
                chosen = [i for i, o in enumerate(further.finalists) if o.index in best]
                send(
                    SweepDone(
                        common=common,
                        further=FinalsDone(
                            finalists=tuple(further.finalists[i] for i in chosen),
                            failures=(),
                            samples_us=tuple(further.samples_us[i] for i in chosen),
                            baseline_us=further.baseline_us,
                            conditions=CALM,
                            discarded_rounds=1,
                        ),
                    )
                )


if __name__ == "__main__":
    main()
