"""The shipped winners by GPU model and operation, and which library computes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from benchmarks.readme.shipped import AVERAGES, averages, got, is_aligned, models, origin
from gemmsmith.core.config import Use
from gemmsmith.core.operation import in_order
from tuner.trial import Winner


def table(winners: Sequence[Winner]) -> str:
    """Write a row for each GPU model and operation."""
    lines = [
        "| GPU | operation | problems | speed-up | of aligned rows only | best "
        "| CUTLASS kernel served | cuBLASLt algorithm served | default kept |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for model in models(winners):
        of_model = [w for w in winners if w.device.slug == model.slug]
        for dtype in in_order(w.problem.dtype for w in of_model):
            of_dtype = [w for w in of_model if w.problem.dtype == dtype]
            uses = Counter(w.use for w in of_dtype)
            aligned = [got(w) for w in of_dtype if is_aligned(w)]
            lines.append(
                f"| {model.name.removeprefix('NVIDIA ')} | {dtype} | {len(of_dtype)} "
                f"| {averages([got(w) for w in of_dtype])} "
                f"| {averages(aligned)} ({len(aligned)}) "
                f"| {max(got(w) for w in of_dtype):.2f} × "
                f"| {uses[Use.CUTLASS]} | {uses[Use.CUBLASLT]} | {uses[Use.CUBLAS]} |"
            )
    stays = [w for w in winners if w.use.is_default]
    ahead = [
        w
        for w in stays
        if w.regimes and all(r.speedup is not None and r.speedup.ci_low > 1 for r in w.regimes)
    ]
    lines += [
        "",
        f"Speed-up over torch's default: {AVERAGES}, in the regime where a winner gains "
        f"least; 1 where the default is kept. Of the {len(stays)} problems that keep the default, "
        f"{len(ahead)} have a kernel that is faster in every regime and is still not served, "
        "nearly always because it gains less than its power penalty. "
        f"{origin(winners).capitalize()}.",
    ]
    return "\n".join(lines)
