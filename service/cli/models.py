"""`gemmsmith best --model`: every product of a model, what runs it, and what a step saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gemmsmith.answers.answer import Answer
from service.cli.options import OptionalProblemOptions
from service.cli.output import MisuseError, Result, counted, microseconds, note, ratio, say, table

if TYPE_CHECKING:
    from tuner.models import LayerProduct

Answered = Sequence[tuple["LayerProduct", Answer | None]]
"""Each product with the answer of its own winner; None if it was not tuned."""


@dataclass(frozen=True, kw_only=True)
class WholeModelOptions:
    """A model, instead of M N K."""

    model: Annotated[
        str | None,
        typer.Option(help="All products of this model of the shipped suites, such as llama-3-8b."),
    ] = None
    config: Annotated[
        Path | None, typer.Option(help="All products of the model of this config.json.")
    ] = None
    tokens: Annotated[
        int | None, typer.Option(min=1, help="With --model or --config: tokens in a step.")
    ] = None

    @property
    def is_named(self) -> bool:
        return (self.model, self.config, self.tokens) != (None, None, None)

    @property
    def name(self) -> str:
        return self.model or str(self.config)

    def products(self, shape: OptionalProblemOptions) -> list[LayerProduct]:
        """All products of the model, in the element type of `shape`.

        Raises:
            MisuseError: the options contradict each other, or one is missing.
            SuiteError: the model is not known, or its file cannot be read.
        """
        from tuner import models

        if (shape.m, shape.n, shape.k) != (None, None, None):
            raise MisuseError("give M N K or a model, not both")
        if self.tokens is None or (self.model is None) == (self.config is None):
            raise MisuseError("give --model NAME or --config FILE, with --tokens N")
        if self.config is not None:
            layers = models.of_config(self.config)
        else:
            layers = models.of_suites(self.name)
        return models.products(layers, self.tokens, shape.dtype)


def listing(title: str, answered: Answered) -> Result:
    """The products with their answers, and the sums over those that were tuned."""
    rows = [_row(product, answer) for product, answer in answered]
    tuned = [row for row in rows if row["default_us"] is not None]
    before, after = (
        sum(row["count"] * row[name] for row in tuned) / 1e3 for name in ("default_us", "us")
    )
    document = {
        "model": title,
        "products": rows,
        "tuned": len(tuned),
        "default_ms": before,
        "ms": after,
    }

    def show() -> None:
        columns = ("layer", "pass", "problem", "times", "run", "ratio", "default µs", "µs")
        table(title, columns, map(_cells, rows), left=3)
        if tuned:
            say(f"{before:.3f} ms by default, {after:.3f} ms as served: {before / after:.3f} ×")
        if missing := len(rows) - len(tuned):
            note(
                f"{counted(missing, 'product')} without a winner: not in the sums. Tune them with "
                "`gemmsmith tune M N K`"
            )

    return Result(document, show)


def _row(product: LayerProduct, answer: Answer | None) -> dict[str, Any]:
    default_us = us = gain = None
    if answer is not None and answer.baseline is not None:
        default_us = us = answer.baseline.median_us
        if not answer.use.is_default and answer.speedup is not None:
            gain = answer.speedup.median
            us = default_us / gain  # the paired ratio is more precise than two medians
    return {
        "layer": product.layer,
        "pass": product.which.value,
        "problem": str(product.problem),
        "count": product.count,
        "use": answer.use.value if answer is not None else None,
        "kernel": answer.config.kernel.name if answer is not None and answer.config else None,
        "ratio": gain,
        "default_us": default_us,
        "us": us,
    }


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    return (
        *(row["layer"], row["pass"], row["problem"], row["count"], row["use"]),
        *(ratio(row["ratio"]), microseconds(row["default_us"]), microseconds(row["us"])),
    )
