"""A measuring process that measures nothing: each peer does what its name says."""

from __future__ import annotations

import os
import sys
import time

import msgspec

from benchmarks.peers.records import Busy, Done, Entry, Message, Ready, Request, Row
from gemmsmith.answers.answer import Ratio
from gemmsmith.core.device import DeviceModel, Environment

DEVICE = DeviceModel(name="fake", arch="sm90", sm_count=1, memory_bytes=1, l2_bytes=1)
ENVIRONMENT = Environment(
    gpu_uuid="", driver="", cuda="", cutlass="", compiler="", torch="", cublas="", gemmsmith=""
)


def say(message: Message) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


say(Ready(device=DEVICE, environment=ENVIRONMENT))
for line in sys.stdin.buffer:
    request = msgspec.json.decode(line, type=Request)
    entries = {}
    for peer in request.peers:
        say(Busy(peer=peer, limit_s=0.3 if peer == "hangs" else 30.0))
        if peer == "hangs":
            time.sleep(60)
        if peer == "crashes" or (peer == "cublas" and request.problem.m == 13):
            print("an illegal address", file=sys.stderr, flush=True)
            os._exit(70)
        entries[peer] = Entry(ratio=Ratio(median=1.0, ci_low=1.0, ci_high=1.0))
    say(Done(row=Row(problem=request.problem, entries=entries)))
