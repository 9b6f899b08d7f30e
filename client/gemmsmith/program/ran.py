"""Which kernel ran each captured product of a process, or why torch ran it. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec

from gemmsmith.core.problem import Problem
from gemmsmith.errors import InvalidProblem


class RanProduct(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Calls of one product.

    Attributes:
        problem: what was computed. None if kernels are for none of its types.
        types: of the operands, if there is no problem.
        calls: how many there were.
        kernel: the kernel that ran it; empty if torch did.
        reason: why torch did.
        time_us: microseconds that a call takes, by the record of its winner: of the kernel, or of
            torch if that ran it. None if it was not measured.
        saving_us: microseconds that the kernel takes less than torch, measured in the same rounds.
    """

    problem: Problem | None = None
    types: str = ""
    calls: Annotated[int, msgspec.Meta(ge=1)]
    kernel: str = ""
    reason: str = ""
    time_us: float | None = None
    saving_us: float | None = None

    @property
    def is_missed(self) -> bool:
        """Whether it is what a kernel could have fused. Its plain products are counted as well."""
        if self.kernel or self.problem is None:
            return False
        return not self.problem.operation.epilogue.is_torchs


class Ran(msgspec.Struct, frozen=True, kw_only=True):
    """The captured products of one or several processes.

    Attributes:
        steps: optimizer steps that were captured, of all processes. 0 if a process took none.
        processes: how many processes there are.
    """

    steps: int
    processes: int
    products: list[RanProduct]

    @property
    def document(self) -> bytes:
        """As JSON, for `parse`."""
        return msgspec.json.encode(self)

    @staticmethod
    def parse(document: bytes) -> Ran:
        """Read a document that `document` returned.

        Raises:
            ValueError: it is no such document.
        """
        try:
            return msgspec.json.decode(document, type=Ran)
        except InvalidProblem as error:
            raise ValueError(str(error)) from None

    @staticmethod
    def together(processes: Iterable[Ran]) -> Ran:
        """The products of all of these, without processes that ran none."""
        parts = [process for process in processes if process.products]
        calls: dict[RanProduct, int] = {}
        for part in parts:
            for product in part.products:
                alike = msgspec.structs.replace(product, calls=1)
                calls[alike] = calls.get(alike, 0) + product.calls
        steps = [part.steps for part in parts]
        return Ran(
            steps=sum(steps) if all(steps) else 0,
            processes=sum(part.processes for part in parts),
            products=[msgspec.structs.replace(alike, calls=n) for alike, n in calls.items()],
        )
