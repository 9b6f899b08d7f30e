"""Which operations have kernels, and which have shipped winners, by element types and GPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from benchmarks.readme.shipped import models, short
from gemmsmith.core.operation import DType, Element, Epilogue, Grouping, Layout, Operation, Scaling
from gemmsmith.errors import InvalidProblem
from tuner.arch import architecture
from tuner.backends import supporting
from tuner.trial import Winner

MEASURED = "sm90"
"""The only architecture that was measured; kernels for others compile, but were not run."""

ROWS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("plain", {}),
    ("scaled by row and column", {"scaling": Scaling.ROW}),
    ("scaled by block", {"scaling": Scaling.BLOCK}),
    ("symmetric, A·Aᵀ", {"dtype": "{}.symmetric"}),
    ("accumulated into FP32", {"out": Element.F32, "accumulate": True}),
    ("fused bias, activation, residual, gate", {"epilogue": True}),
    ("the same, with an FP8 output", {"epilogue": True, "out": Element.E4M3}),
    ("grouped (experts), forward and input gradient", {"grouping": Grouping.ROWS}),
    ("grouped (experts), weight gradient", {"grouping": Grouping.DEPTH}),
)
"""The title of a row, and how its operations differ from plain ones."""


def _operations(types: DType, differs: dict[str, Any]) -> list[Operation]:
    """Return the operations of a cell; some types have none."""
    kinds = [differs]
    if differs.get("epilogue"):
        kinds = [{**differs, "epilogue": e} for e in Epilogue if e is not Epilogue.NONE]
    elif differs.get("scaling") and types is DType.INT8:
        kinds = [{**differs, "out": Element.BF16}]
    elif differs.get("grouping") and types in (DType.FP8_E4M3, DType.FP8_E5M2):
        kinds = [{**differs, "scaling": scaling} for scaling in (Scaling.ROW, Scaling.BLOCK)]
    operations = []
    for kind in kinds:
        for layout in Layout:
            with suppress(InvalidProblem):  # the type has no such operation
                named = {**kind, "dtype": kind.get("dtype", "{}").format(types)}
                operations.append(Operation.of(layout=layout, **named))
    return operations


def _cell(operations: Sequence[Operation], winners: Sequence[Winner]) -> str:
    measured = {w.device.slug for w in winners if w.problem.operation in operations}
    if measured:
        return ", ".join(short(model) for model in models(winners) if model.slug in measured)
    if any(supporting(operation, architecture(MEASURED)) for operation in operations):
        return "kernels"
    return "default" if operations else "–"


def table(winners: Sequence[Winner]) -> str:
    """Write a row for each operation, and a column for each type."""
    lines = [
        f"| operation | {' | '.join(types.value for types in DType)} |",
        "|---|" + "---|" * len(DType),
    ]
    for title, differs in ROWS:
        cells = [_cell(_operations(types, differs), winners) for types in DType]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)
