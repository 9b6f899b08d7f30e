"""A problem: an operation and its extents.

How a problem is computed is described by a `Kernel` and a `Launch`.
"""

from __future__ import annotations

import math
import re
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, SupportsIndex

from gemmsmith.core.choices import integer
from gemmsmith.core.elements import TypeName
from gemmsmith.core.names import whole
from gemmsmith.core.operation import DType, Element, Grouping, Layout, Operation, Scaling, named
from gemmsmith.core.plain import Plain
from gemmsmith.errors import InvalidProblem

__all__ = ["MAX_EXTENT", "DType", "Element", "Layout", "Problem"]

MAX_EXTENT = 2**31 - 1
"""CUTLASS kernels take M, N, K and the batch count as 32-bit signed integers."""

MAX_GROUPS = 1024
"""Most groups of a grouped product: each thread block scans all of them."""


_EXTENTS = re.compile(r"[0-9]{1,19}(?:[xX×*][0-9]{1,19}){2,3}", re.ASCII)


def extents(text: str) -> list[str] | None:
    """The sizes in `4096x6144x1024` or `8×512×512×512`; None if the text has another form."""
    return re.split("[xX×*]", text) if _EXTENTS.fullmatch(text) else None


@dataclass(frozen=True, slots=True, order=True, repr=False)
class Problem(Plain):
    """`D[M,N] = alpha · A[M,K] · B[K,N] + beta · C[M,N]`, `batch` times; or the product with the
    operation's epilogue.

    The operation is stored as the two parts of its key, `dtype` and `layout`. A reader that does
    not know a `dtype` rejects it, so it cannot mistake it for a plain one.

    Attributes:
        batch: number of products of this shape; for a grouped operation, the number of groups
            that share the divided extent.
        dtype: as `Operation.dtype`: a short name such as `bf16`, followed by the parts that differ
            from its defaults. Other names (`bfloat16`, `torch.bfloat16`) are converted.
        layout: how A and B are laid out in memory.

    Raises:
        InvalidProblem: an extent is not an integer in 1 … 2³¹-1, or there is no such operation.
    """

    m: int
    n: int
    k: int
    _: KW_ONLY
    batch: int = 1
    dtype: str = DType.BF16.value
    layout: Layout = Layout.TN

    if TYPE_CHECKING:  # the constructor accepts more types than the fields have

        def __init__(
            self,
            m: SupportsIndex,
            n: SupportsIndex,
            k: SupportsIndex,
            *,
            batch: SupportsIndex = 1,
            dtype: TypeName = "bf16",
            layout: str = Layout.TN,
        ) -> None: ...

    def __post_init__(self) -> None:
        for field in ("m", "n", "k", "batch"):
            value = getattr(self, field)
            if type(value) is int and 1 <= value <= MAX_EXTENT:
                continue
            object.__setattr__(self, field, _extent(field, value))
        operation = Operation.of(self.dtype, self.layout)
        if operation.is_grouped and self.batch > MAX_GROUPS:
            raise InvalidProblem("batch", f"there may be {MAX_GROUPS} groups, got {self.batch}")
        if operation.is_fused and not operation.is_grouped and self.batch > 1:
            epilogue = f"epilogue {operation.epilogue.value}"
            raise InvalidProblem(
                "batch", f"{epilogue} needs single matrices, got batch {self.batch}"
            )
        if operation.symmetric and self.m != self.n:
            raise InvalidProblem("n", f"symmetric needs n = m, got {self.m}×{self.n}")
        if operation.epilogue.is_gated and self.n % 2:
            epilogue = f"epilogue {operation.epilogue.value}"
            raise InvalidProblem("n", f"{epilogue} needs an even n, of gate and up, got {self.n}")
        # Enum members and other names become plain text, equal to that of stored problems.
        dtype = whole(self.dtype)
        if type(self.dtype) is not str or self.dtype != dtype:
            object.__setattr__(self, "dtype", dtype)
        if self.layout is not operation.layout:
            object.__setattr__(self, "layout", operation.layout)

    @classmethod
    def unchecked(
        cls, m: int, n: int, k: int, *, batch: int, dtype: str, layout: Layout
    ) -> Problem:
        """A problem from the fields of an earlier `Problem`; five times faster, without checks."""
        problem = object.__new__(cls)
        put = object.__setattr__
        put(problem, "m", m)
        put(problem, "n", n)
        put(problem, "k", k)
        put(problem, "batch", batch)
        put(problem, "dtype", dtype)
        put(problem, "layout", layout)
        return problem

    @classmethod
    def of(
        cls,
        operation: Operation,
        m: SupportsIndex,
        n: SupportsIndex,
        k: SupportsIndex,
        batch: SupportsIndex = 1,
    ) -> Problem:
        """The problem of this operation with these extents.

        Raises:
            InvalidProblem: an extent is out of range.
        """
        return cls(m, n, k, batch=batch, dtype=operation.dtype, layout=operation.layout)

    @classmethod
    def parse(cls, text: str) -> Problem:
        """Parse a problem as `str` prints it: `4096x6144x1024`, `8×512×512×512 bf16.out_f32 nt`.

        Extents are joined by `×`, `x` or `*`. If there are four, the first is the batch. The
        operation may follow, with or without its layout. The defaults are bf16 and tn.

        Raises:
            InvalidProblem: the text is not a problem.
        """
        first, *words = text.split()[:4] or [""]
        sizes = extents(first)
        if sizes is None or len(words) > 2:
            raise InvalidProblem(
                "problem",
                "a problem is written [BATCHx]MxNxK [DTYPE [LAYOUT]], such as "
                f"'4096x6144x1024 bf16 tn', got {text[:80]!r}",
            )
        *batch, m, n, k = map(int, sizes)
        operation = Operation.of(*words) if len(words) == 2 else Operation.read(*words)
        return cls.of(operation, m, n, k, *batch)

    @property
    def operation(self) -> Operation:
        """The operation that `dtype` and `layout` name."""
        return named(self.dtype, self.layout)

    @property
    def flops(self) -> int:
        """Number of floating-point operations: a multiply and an add per term.

        Of a symmetric D, for the elements on the diagonal and on one side of it.
        """
        if self.operation.symmetric:
            return self.m * (self.m + 1) * self.k * self.batch
        return 2 * self.m * self.n * self.k * (1 if self.operation.is_grouped else self.batch)

    @property
    def columns(self) -> int:
        """Columns of D: N, or N/2 if gate and up are combined."""
        return self.n // 2 if self.operation.epilogue.is_gated else self.n

    @property
    def matrices(self) -> tuple[int, int, int]:
        """Number of matrices A, B and D: `batch`, or 1 for a matrix that groups share.

        Groups share A and D if they divide rows, A and B if they divide the depth. Other stored
        M×N matrices count as further Ds: aux, a second half, an activation's value. A symmetric
        product has no B beside A.
        """
        grouping, outputs = self.operation.grouping, self.operation.epilogue.outputs
        a = self.batch if grouping is Grouping.NONE else 1
        b = 1 if grouping is Grouping.DEPTH else self.batch * (not self.operation.symmetric)
        d = 1 if grouping is Grouping.ROWS else self.batch
        return a, b, d * outputs

    @property
    def operand_bytes(self) -> int:
        """Fewest bytes moved through device memory: A and B read once, D written once.

        Also counts the other operands: a D that is added to, row and column factors, a bias, an
        epilogue's M×N matrices and a bias gradient. Assumes that no group is empty.
        """
        operation = self.operation
        a, b, d = self.matrices
        moved_d = d * (2 if operation.accumulate else 1) + operation.epilogue.reads
        moved = (
            self.m * self.k * operation.a.bytes * a
            + self.k * self.n * operation.b.bytes * b
            + self.m * self.columns * operation.d.bytes * moved_d
        )
        if operation.scaling is Scaling.ROW:
            # Each group has its own column factors; row factors belong to tokens, once per D.
            moved += (self.m * d + self.n * self.batch) * Element.F32.bytes
        if operation.epilogue.has_bias or operation.epilogue.sums_rows:
            moved += self.n * operation.bias.bytes
        if operation.epilogue.has_column_scale:
            moved += self.n * operation.d.bytes
        if operation.epilogue.has_row_scale:
            moved += self.m * Element.F32.bytes
        return moved

    @property
    def contiguous_a(self) -> int:
        """Extent of A along its contiguous dimension, in elements."""
        return self.k if self.layout.a_row_major else self.m

    @property
    def contiguous_b(self) -> int:
        """Extent of B along its contiguous dimension, in elements."""
        return self.n if self.layout.b_row_major else self.k

    @property
    def kind(self) -> tuple[str | int, ...]:
        """What neighbours have in common: winners answer only for problems of the same kind.

        Everything except M, N and K, but including extents that the operation fixes. With an order
        of sums, the operation alone.
        """
        if self.operation.summation is not None:
            return (self.dtype, self.layout)
        fixed = (getattr(self, name) for name in self.operation.fixed_extents)
        return (self.dtype, self.layout, self.batch, *fixed)

    @property
    def weight(self) -> tuple[int, ...]:
        """The batch or number of groups, and the two extents that no number of tokens changes."""
        free = self.operation.free_extent
        return (self.batch, *(getattr(self, name) for name in ("m", "n", "k") if name != free))

    @property
    def log_extents(self) -> tuple[float, float, float]:
        """log2 of M, N and K."""
        return math.log2(self.m), math.log2(self.n), math.log2(self.k)

    def distance(self, other: Problem) -> float:
        """Euclidean distance in log2 of M, N and K. A factor of two in one extent is 1."""
        return math.dist(self.log_extents, other.log_extents)

    def __str__(self) -> str:
        batch = f"{self.batch}×" if self.batch > 1 or self.operation.is_grouped else ""
        return f"{batch}{self.m}×{self.n}×{self.k} {self.dtype} {self.layout}"

    @property
    def arguments(self) -> str:
        """The arguments of `Problem`, `Client.best` and `tune`, as Python source."""
        batch = f"batch={self.batch}, " if self.batch > 1 else ""
        types = f"dtype={self.dtype!r}, layout={self.layout.value!r}"
        return f"{self.m}, {self.n}, {self.k}, {batch}{types}"

    def __repr__(self) -> str:
        return f"Problem({self.arguments})"


def _extent(field: str, value: object) -> int:
    """An extent of any integer type as `int`.

    Raises:
        InvalidProblem: it is not an integer in 1 … 2³¹-1.
    """
    extent = integer(value)
    if extent is None:
        raise InvalidProblem(field, f"{field} must be an integer, got {value!r}")
    if not 1 <= extent <= MAX_EXTENT:
        raise InvalidProblem(field, f"{field} must be in 1 … {MAX_EXTENT}, got {value}")
    return extent
