"""NVIDIA's nvMatmulHeuristics as a strategy to compare with, where its package is installed.

The package (PyPI: nvidia-matmul-heuristics) is proprietary and optional: only its proposals are
used, and no part of it is copied. It proposes tile, cluster and splits, in order; each proposal is
matched with the nearest of our candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from math import log2
from typing import Any

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.problem import DType, Problem
from tuner.search.hints import CublasChoice, distance

PROPOSALS = 64
"""Proposals requested; the package usually has fewer."""

_PRECISIONS: dict[str, str] = {
    DType.BF16: "TST",
    DType.FP16: "HSH",
    DType.FP8_E4M3: "QQTST",
    DType.FP8_E5M2: "RQTST",
}
"""Types of A and B (or A, B, C), of the accumulator, and of D, in the package's letters."""
_GPUS = {"H200": "H200_SXM", "H20": "H20_SXM", "H100": "H100_SXM"}
_SPLITS = 0.5
"""Octaves of a tile's extent that an octave of splits counts as. Not measured."""


class HeuristicsUnavailable(Exception):
    """nvMatmulHeuristics cannot be used; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TileProposal:
    """A tile (M, N, K) and cluster (M, N) as they lie on the problem, and the splits along K."""

    tile: tuple[int, int, int]
    cluster: tuple[int, int]
    splits: int


class MatmulHeuristics:
    """The installed package, for one GPU model.

    Raises:
        HeuristicsUnavailable: not installed, not loadable, or without this GPU.
    """

    def __init__(self, model: DeviceModel) -> None:
        try:
            package = import_module("nvMatmulHeuristics")
        except (ImportError, OSError) as error:
            raise HeuristicsUnavailable(
                "nvMatmulHeuristics is not installed (pip install nvidia-matmul-heuristics; "
                f"proprietary): {error}"
            ) from error
        gpu = next((ours for ours in _GPUS if ours in model.name.split()), None)
        if gpu is None:
            raise HeuristicsUnavailable(f"nvMatmulHeuristics does not support {model.name}")
        self._package = package
        self._library: Any = package.NvMatmulHeuristicsInterfaceEx(
            backend=package.NvMatmulHeuristicsTarget.CUTLASS3,
            flags=package.NvMatmulHeuristicsFlags.PERF_MODEL_BASED_AUTO_TUNING,
            gpu=package.NvMatmulHeuristicsNvidiaGpu[_GPUS[gpu]],
        )

    def proposals(self, problem: Problem) -> list[TileProposal]:
        """Its proposals, the best first, each once; empty if it does not support the problem.

        In its row-major view an operand is transposed if ours is column-major.
        """
        a, b = ("N" if letter == "t" else "T" for letter in problem.layout)
        layout = self._package.NvMatmulHeuristicsMatmulLayout[f"{a}{b}_ROW_MAJOR"]
        theirs = self._library.makeNvMatmulHeuristicsProblem(
            problem.m, problem.n, problem.k, layout, problem.batch
        )
        results = self._library.get(theirs, PROPOSALS, precision=_PRECISIONS[problem.dtype])
        proposals = [
            TileProposal(
                tile=(kernel.cta_tile_m, kernel.cta_tile_n, kernel.cta_tile_k),
                cluster=(kernel.cluster_m, kernel.cluster_n),
                splits=kernel.split_k,
            )
            for kernel in (result["kernel"] for result in results)
            if kernel.cta_tile_m
        ]
        return list(dict.fromkeys(proposals))


def matched(proposals: Sequence[TileProposal], candidates: Sequence[Candidate]) -> list[Candidate]:
    """Our nearest candidate to each proposal in turn, each candidate once.

    Proposals name no scheduler, no pipeline and no orientation: among candidates equally near, the
    first in `candidates` is taken, so pass them ranked.
    """
    left = list(candidates)
    order: list[Candidate] = []
    for proposal in proposals:
        if not left:
            break
        choice = _choice(proposal)
        nearest = min(left, key=lambda candidate: _apart(proposal, choice, candidate))
        left.remove(nearest)
        order.append(nearest)
    return order


def _choice(proposal: TileProposal) -> CublasChoice:
    """In the column-major view that `hints.distance` compares in: M and N exchanged."""
    m, n, k = proposal.tile
    return CublasChoice(
        tile=(n, m),
        depth=k,
        cluster=(proposal.cluster[1], proposal.cluster[0]),
        split_k=proposal.splits > 1,
        cooperative="A" if m > 64 else "",
    )


def _apart(proposal: TileProposal, choice: CublasChoice, candidate: Candidate) -> float:
    splits = max(proposal.splits, 1)
    return distance(choice, candidate) + _SPLITS * abs(log2(candidate.launch.splits / splits))
