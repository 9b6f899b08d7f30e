"""A winner and cuBLAS on the same operands, both verified, for programs that compare just the two.

torch is imported when it is needed, so that an error about a missing GPU does not need it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.peers.peer import Ready
    from gemmsmith.core.candidate import Candidate
    from gemmsmith.core.device import DeviceModel
    from gemmsmith.core.problem import Problem
    from tuner.measure.graphs import Stream

SEED = 20261121


class WrongProductError(Exception):
    """The winner's output is not the product; the message has the error."""


@dataclass(frozen=True, kw_only=True)
class SideBySide:
    """The winner and cuBLAS, ready to launch on the stream that they were prepared for.

    Attributes:
        ready: by name, cuBLAS first.
        sets: operand sets that launches rotate over.
    """

    stream: Stream
    ready: dict[str, Ready]
    sets: int


def prepare(
    problem: Problem, candidate: Candidate, pack: Path, model: DeviceModel, ordinal: int = 0
) -> SideBySide:
    """Make operands, prepare both and verify them.

    Raises:
        WrongProductError: the winner's output is wrong.
        Unsupported: the winner or cuBLAS does not support this problem.
    """
    import torch

    from benchmarks.peers.cublas import CuBlas
    from benchmarks.peers.gemmsmith import Gemmsmith
    from benchmarks.peers.judge import Judge
    from benchmarks.peers.peer import Setting
    from tuner.measure.graphs import Stream
    from tuner.workloads.operands import Operands

    torch.cuda.set_device(ordinal)
    torch.zeros(1, device="cuda")
    stream = Stream()
    ready = {}
    with stream.torch():
        operands = Operands(problem, model, ordinal, SEED)
        judge = Judge(operands)
        setting = Setting(
            problem=problem,
            device=model,
            operands=operands,
            stream=stream,
            candidate=candidate,
            pack=pack,
            time_us=lambda _: 0.0,
            wrong=judge.wrong,
        )
        for peer in (CuBlas(), Gemmsmith()):
            ready[peer.name] = peer.prepare(setting)
            wrong = judge.wrong(ready[peer.name].launch)
            if wrong is not None and peer.name == Gemmsmith.name:
                raise WrongProductError(f"{peer.name} is wrong: {wrong}")
        torch.cuda.synchronize()
    return SideBySide(stream=stream, ready=ready, sets=len(operands.sets))
