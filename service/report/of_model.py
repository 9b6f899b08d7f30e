"""A model's products with their answers, and the time of a step before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gemmsmith.answers.answer import Answer
from gemmsmith.core.problem import Problem

if TYPE_CHECKING:
    from tuner.models import LayerProduct
    from tuner.suites import Pass


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRow:
    """A product of a model.

    Attributes:
        answer: of its own winner; None if it was not tuned.
    """

    product: LayerProduct
    answer: Answer | None

    @property
    def default_us(self) -> float | None:
        if self.answer is None or self.answer.baseline is None:
            return None
        return self.answer.baseline.median_us

    @property
    def ratio(self) -> float | None:
        """The default's time over that of what is served; None if the default is, or is unknown."""
        answer = self.answer
        if answer is None or answer.use.is_default or answer.speedup is None:
            return None
        return answer.speedup.median if self.default_us is not None else None

    @property
    def us(self) -> float | None:
        """The time of what is served, by the paired ratio: it is more precise than two medians."""
        return None if self.default_us is None else self.default_us / (self.ratio or 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """The time of products that were tuned, each as often as a step runs it.

    Attributes:
        tuned, products: how many were tuned, and how many there are.
    """

    tuned: int
    products: int
    default_ms: float
    ms: float

    @property
    def ratio(self) -> float | None:
        return self.default_ms / self.ms if self.ms else None


def rows_of(
    products: Sequence[LayerProduct], answers: Mapping[Problem, Answer]
) -> tuple[ModelRow, ...]:
    return tuple(
        ModelRow(product=product, answer=answers.get(product.problem)) for product in products
    )


def step_time(rows: Sequence[ModelRow], which: Pass | None = None) -> StepTime:
    """Sum up the products of a pass, or of all passes."""
    chosen = [row for row in rows if which in (None, row.product.which)]
    tuned = [
        (row.product.count, row.default_us, row.us)
        for row in chosen
        if row.default_us is not None and row.us is not None
    ]
    return StepTime(
        tuned=len(tuned),
        products=len(chosen),
        default_ms=sum(count * default_us for count, default_us, _ in tuned) / 1e3,
        ms=sum(count * us for count, _, us in tuned) / 1e3,
    )
