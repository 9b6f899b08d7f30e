"""`gemmsmith best --model`: every product of a model, what runs it, and what a step saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli.options import OptionalProblemOptions
from service.cli.output import MisuseError, Result, counted, microseconds, note, ratio, say, table
from service.report.of_model import ModelRow, step_time

if TYPE_CHECKING:
    from tuner.models import LayerProduct


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


def listing(title: str, rows: Sequence[ModelRow]) -> Result:
    """The products with their answers, and the sums over those that were tuned."""
    written = [_written(row) for row in rows]
    time = step_time(rows)
    document = {
        "model": title,
        "products": written,
        "tuned": time.tuned,
        "default_ms": time.default_ms,
        "ms": time.ms,
    }

    def show() -> None:
        columns = ("layer", "pass", "problem", "times", "run", "ratio", "default µs", "µs")
        table(title, columns, map(_cells, written), left=3)
        if time.tuned:
            times = f"{time.default_ms:.3f} ms by default, {time.ms:.3f} ms as served"
            say(f"{times}: {ratio(time.ratio)} ×")
        if missing := time.products - time.tuned:
            note(
                f"{counted(missing, 'product')} without a winner: not in the sums. Tune them with "
                "`gemmsmith tune M N K`"
            )

    return Result(document, show)


def _written(row: ModelRow) -> dict[str, Any]:
    product, answer = row.product, row.answer
    return {
        "layer": product.layer,
        "pass": product.which.value,
        "problem": str(product.problem),
        "count": product.count,
        "use": answer.use.value if answer is not None else None,
        "kernel": answer.config.kernel.name if answer is not None and answer.config else None,
        "ratio": row.ratio,
        "default_us": row.default_us,
        "us": row.us,
    }


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    return (
        *(row["layer"], row["pass"], row["problem"], row["count"], row["use"]),
        *(ratio(row["ratio"]), microseconds(row["default_us"]), microseconds(row["us"])),
    )
