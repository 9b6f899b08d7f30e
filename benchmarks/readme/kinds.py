"""Speed-ups by kind of product. Every shipped winner is of exactly one kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.readme.shipped import (
    AVERAGES,
    averages,
    got,
    library,
    models,
    origin,
    runs,
    short,
)
from gemmsmith.core.operation import Epilogue, Grouping, Scaling
from gemmsmith.core.problem import Problem
from gemmsmith.runtime import cublaslt
from service.report.problem_rows import unaligned_operands
from tuner.trial import Winner

FEW_TOKENS = 64
"""A product of at most so many rows of A is one of decoding: it mostly reads its weights."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Products that gain for the same reason.

    Attributes:
        title: its name in the README.
        short: its name in the picture.
        holds: whether a problem is of this kind, if it is not of an earlier one.
    """

    title: str
    short: str
    holds: Callable[[Problem], bool]


def _grouping(problem: Problem) -> Grouping:
    return problem.operation.grouping


def _is_finely_scaled(problem: Problem) -> bool:
    return problem.operation.scaling in (Scaling.ROW, Scaling.BLOCK)


def _has_factors(epilogue: Epilogue) -> bool:
    return epilogue.has_column_scale or epilogue.has_row_scale


ORDERED = Kind(
    title="One order of sums (`numerics=invariant`)",
    short="one order\nof sums",
    holds=lambda p: p.operation.summation is not None,
)

KINDS = (
    ORDERED,
    Kind(
        title="Grouped with SwiGLU (MoE experts)",
        short="experts'\ngates",
        holds=lambda p: p.operation.is_grouped and p.operation.is_fused,
    ),
    Kind(
        title="Grouped (MoE experts), forward",
        short="experts,\nforward",
        holds=lambda p: _grouping(p) is Grouping.ROWS and p.operation.layout.value == "tn",
    ),
    Kind(
        title="Grouped (MoE experts), gradients",
        short="experts,\ngradients",
        holds=lambda p: p.operation.is_grouped,
    ),
    Kind(
        title="Fused FP8 layers with an FP8 result",
        short="FP8\nresults",
        holds=lambda p: p.operation.stores_fp8,
    ),
    Kind(
        title="Fused SwiGLU, GeGLU, ReGLU, GLU",
        short="gates",
        holds=lambda p: p.operation.epilogue.is_gated,
    ),
    Kind(
        title="Fused gradients of activations",
        short="activations'\ngradients",
        holds=lambda p: p.operation.epilogue.backward is not None,
    ),
    Kind(
        title="Fused factors of columns (LayerScale) or rows",
        short="factors",
        holds=lambda p: _has_factors(p.operation.epilogue),
    ),
    Kind(
        title="Fused bias, activation, residual",
        short="bias,\nactivation",
        holds=lambda p: p.operation.is_fused,
    ),
    Kind(
        title="Dense FP8 scaled by rows",
        short="FP8 by\nrow, block",
        holds=_is_finely_scaled,
    ),
    Kind(
        title="Symmetric (A·Aᵀ, as in Muon)",
        short="symmetric",
        holds=lambda p: p.operation.symmetric,
    ),
    Kind(
        title="Rows not aligned to 16 bytes",
        short="unaligned",
        holds=lambda p: bool(unaligned_operands(p)),
    ),
    Kind(
        title="INT8",
        short="INT8",
        holds=lambda p: p.operation.a.is_integer,
    ),
    Kind(
        title="FP8",
        short="FP8",
        holds=lambda p: p.operation.is_narrow_float,
    ),
    Kind(
        title=f"Up to {FEW_TOKENS} tokens, bf16 and fp16",
        short=f"≤ {FEW_TOKENS}\ntokens",
        holds=lambda p: p.m <= FEW_TOKENS and p.operation.a.bits == 16,
    ),
    Kind(
        title="Weight gradients summed in FP32",
        short="FP32\nsums",
        holds=lambda p: p.operation.accumulate,
    ),
    Kind(
        title="Other dense products",
        short="plain\ndense",
        holds=lambda _: True,
    ),
)


PLAIN = KINDS[-1]
"""All other products, which have no special reason to gain."""


def kind_of(problem: Problem) -> Kind:
    return next(kind for kind in KINDS if kind.holds(problem))


def table(winners: Sequence[Winner]) -> str:
    """Write a row for each kind and a column for each GPU model: averages of what is served."""
    gpus = models(winners)
    lines = [
        f"| product | {' | '.join(map(short, gpus))} | best problem | default kept |",
        "|---|" + "---|" * (len(gpus) + 2),
    ]
    unmeasured = []
    free = [w for w in winners if not ORDERED.holds(w.problem)]
    for kind in KINDS:
        of_kind = [w for w in winners if kind_of(w.problem) is kind]
        if not of_kind:
            unmeasured.append(kind.title)
            continue
        cells = []
        for model in gpus:
            gains = [got(w) for w in of_kind if w.device.slug == model.slug]
            cells.append(f"{averages(gains)} ({len(gains)})" if gains else "–")
        stays = sum(w.use.is_default for w in of_kind)
        lines.append(
            f"| {kind.title} | {' | '.join(cells)} "
            f"| {max(map(got, of_kind)):.2f} × | {stays} of {len(of_kind)} |"
        )
    lines += [
        "",
        f"Speed-up over torch's default: {AVERAGES} (number of problems), each in the least "
        "favourable of three "
        "[regimes](docs/choosing.md#three-regimes). Where the default is kept, the speed-up is 1; "
        f"the lowest of all problems is {min(map(got, free)):.2f}. One order of sums has no "
        "default: torch's keeps none, and the lowest speed-up over it is "
        f"{min(got(w) for w in winners if ORDERED.holds(w.problem)):.2f}. "
        f"{origin(winners).capitalize()}.",
    ]
    usable = sum(map(runs, winners))
    if usable < len(winners):
        lines[-1] += (
            f" {usable:,} of the {len(winners):,} winners run after the installation below; the "
            f"others are algorithms of another cuBLASLt than its {cublaslt.text(library())}."
        )
    if unmeasured:
        lines[-1] += f" Not measured yet: {'; '.join(unmeasured)}."
    return "\n".join(lines)
