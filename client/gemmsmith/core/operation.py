"""Everything about a computation except its sizes: types, layout, scaling, grouping, epilogue.

An `Operation` has a canonical text, its `key`, such as `bf16.tn` or `bf16.out_f32.accumulate.nt`.
The database, the wire, file names and messages use it. The key consists of the operation's `dtype`,
which users type, and its layout. A plain operation's `dtype` is a short name (`bf16`, `int8`).
Whatever differs from the short name's defaults follows as parts, each at most once and in a fixed
order, so that equal operations have equal keys.

Only this module says which combinations exist, and only `gemmsmith.core.operands` says what a short
name means. Other code asks the operation instead of comparing names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any

from gemmsmith.core.choices import member, not_one_of
from gemmsmith.core.elements import ELEMENTS, TypeName, spelt
from gemmsmith.core.elements import Element as Element
from gemmsmith.core.elements import Layout as Layout
from gemmsmith.core.epilogue import Epilogue as Epilogue
from gemmsmith.core.names import ACCUMULATE, SUM, SYMMETRIC, named_layout, part_of, whole
from gemmsmith.core.operands import MEANINGS
from gemmsmith.core.operands import DType as DType
from gemmsmith.core.operands import Grouping as Grouping
from gemmsmith.core.operands import Scaling as Scaling
from gemmsmith.core.plain import Plain
from gemmsmith.core.summation import check
from gemmsmith.errors import InvalidProblem


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Operation(Plain):
    """A computation without its sizes, by `Operation.of` or `Operation.parse`.

    Attributes:
        types: short name of the operand types.
        layout: of A and B in memory.
        out: element type of the output D, and of C. An FP8 D is multiplied by a factor that each
            call passes, then rounded with saturation.
        scaling: FP32 factors by which the product is multiplied.
        grouping: whether tokens are sorted by group, each group with its own matrix.
        epilogue: what the same kernel does after the product.
        accumulate: `D += A·B` instead of `D = A·B`: C is D, and beta is 1.
        symmetric: `D = alpha · A·Aᵀ + beta · C`, where C is symmetric, too. B is A.
        summation: the order in which terms are added along K (`gemmsmith.core.summation`); None:
            any. With an order, a row of D has the same bits at every M.

    Raises:
        InvalidProblem: the combination does not exist; names the field and its valid values.
    """

    types: DType
    layout: Layout
    out: Element
    scaling: Scaling
    grouping: Grouping = Grouping.NONE
    epilogue: Epilogue = Epilogue.NONE
    accumulate: bool = False
    symmetric: bool = False
    summation: str | None = None

    def __post_init__(self) -> None:
        meaning = MEANINGS[self.types]
        if self.layout is not Layout.TN and self.a.bits == 8:
            raise InvalidProblem(
                "layout",
                f"{self.types} needs layout tn (both operands contiguous along K), "
                f"got {self.layout}: tensor cores of this generation read 8-bit types K-major only",
            )
        outputs = (meaning.d, *meaning.outputs)
        if self.out not in outputs:
            raise not_one_of("out", outputs, self.out, f" for {self.types}")
        scalings = (meaning.scaling, *meaning.scalings)
        if self.scaling not in scalings:
            raise not_one_of("scaling", scalings, self.scaling, f" for {self.types}")
        if self.scaling is not Scaling.NONE and self.out.is_integer:
            raise InvalidProblem(
                "scaling", f"{self.types} into {self.out} is exact: scaling needs out=bf16"
            )
        if self.grouping is not Grouping.NONE:
            self._check_grouping()
        if self.epilogue is not Epilogue.NONE:
            self._check_epilogue()
        if self.stores_fp8:
            self._check_fp8_output()
        if self.accumulate and self.out is not Element.F32:
            raise InvalidProblem(
                "accumulate",
                f"accumulate needs out=f32, not {self.out}: gradients are summed in it",
            )
        if self.symmetric:
            self._check_symmetric()
        if self.summation is not None:
            rows = self.scaling is Scaling.ROW and self.is_narrow_float
            without = self.epilogue.sums_rows or self.symmetric
            exists = (rows or self.a.bits == 16) and not without
            check(self.summation, exists=exists, promotes=rows, is_grouped=self.is_grouped)

    def _check_grouping(self) -> None:
        # A group may start at any token, so groups divide K only if K is not contiguous.
        grouped = f"grouping {self.grouping.value} of {self.types}"
        if self.a.bits == 32 or self.a.is_integer:
            raise InvalidProblem("grouping", f"{grouped} does not exist: 16-bit types and FP8 only")
        if self.scaling is Scaling.TENSOR:
            raise InvalidProblem("scaling", f"{grouped} needs scaling row or block, not tensor")
        wide = (Layout.TN, Layout.TT) if self.grouping is Grouping.ROWS else (Layout.NT,)
        layouts = (Layout.TN,) if self.is_narrow_float else wide
        if self.layout not in layouts:
            raise not_one_of("layout", layouts, self.layout, f" for {grouped}")
        if self.accumulate and self.grouping is Grouping.ROWS:
            raise InvalidProblem("accumulate", f"{grouped} does not add to D; depth does")

    def _check_epilogue(self) -> None:
        # Epilogues exist for linear layers: the rows of A are tokens, and the next layer reads D.
        # FP8 gradients (E5M2) need other operations; backward epilogues are for 16 bits only.
        epilogue = f"epilogue {self.epilogue.value} of {self.types}"
        if self.types not in (DType.BF16, DType.FP16, DType.FP8_E4M3):
            raise InvalidProblem("epilogue", f"{epilogue} does not exist: bf16, fp16, fp8_e4m3 do")
        if self.epilogue.backward and self.types is DType.FP8_E4M3:
            raise InvalidProblem("epilogue", f"{epilogue} does not exist: bf16 and fp16 do")
        if self.out.bits > 16:
            raise InvalidProblem("out", f"{epilogue} needs D in 16 bits, not out={self.out}")
        if self.scaling not in (Scaling.NONE, Scaling.TENSOR):
            raise InvalidProblem("scaling", f"{epilogue} needs scaling tensor, not {self.scaling}")
        # The first product of a layer of experts, or the gradient before it.
        backward = self.epilogue.backward
        gated = backward.gated if backward else self.epilogue.is_gated
        by_rows = self.grouping is Grouping.ROWS and not self.is_narrow_float
        if self.is_grouped and not (by_rows and gated):
            raise InvalidProblem(
                "grouping",
                f"{epilogue} does not exist of grouped products: gates of bf16 and fp16 by rows do",
            )
        if not self.layout.a_row_major:
            raise not_one_of("layout", (Layout.TN, Layout.TT), self.layout, f" for {epilogue}")
        if self.epilogue.is_gated and self.layout is not Layout.TN:
            raise not_one_of("layout", (Layout.TN,), self.layout, f" for {epilogue}")
        if self.accumulate:
            raise InvalidProblem("accumulate", f"{epilogue} does not add to D; a residual does")

    def _check_fp8_output(self) -> None:
        # An FP8 D is an operand of the next linear layer. A residual, aux, which the backward pass
        # reads, and what attention reads after row factors need 16 bits.
        epilogue = self.epilogue
        kept = epilogue.has_residual or epilogue.stores_aux or epilogue.has_row_scale
        if epilogue is Epilogue.NONE or kept:
            raise InvalidProblem(
                "out",
                f"out={self.out} needs an epilogue with a bias or a gate, without residual, aux "
                f"and factors of rows, not {epilogue.value}",
            )

    def _check_symmetric(self) -> None:
        layouts = (Layout.TN, Layout.NT)
        if self.layout not in layouts:
            raise not_one_of("layout", layouts, self.layout, " for symmetric: B is Aᵀ")
        plain = not (self.is_grouped or self.is_fused)
        if not (plain and self.types in (DType.BF16, DType.FP16) and self.out is self.a):
            raise InvalidProblem("dtype", f"{self.dtype} does not exist: bf16, fp16.symmetric do")

    @classmethod
    def of(
        cls,
        dtype: TypeName,
        layout: str = Layout.TN,
        *,
        out: TypeName | None = None,
        scaling: str | None = None,
        grouping: str | None = None,
        epilogue: str | None = None,
        accumulate: bool | None = None,
    ) -> Operation:
        """The operation with these names. Arguments that are None follow from `dtype`.

        `dtype` is a short name, another name of it (`bfloat16`, `torch.bfloat16`), or the full
        `dtype` of an operation such as `bf16.out_f32`.

        Raises:
            InvalidProblem: names the field and its valid values.
        """
        known = _by_name(dtype, str(layout))
        parts: dict[str, Any] = {
            "out": None if out is None else member("out", Element, spelt(out, ELEMENTS)),
            "scaling": None if scaling is None else member("scaling", Scaling, scaling),
            "grouping": None if grouping is None else member("grouping", Grouping, grouping),
            "epilogue": None if epilogue is None else member("epilogue", Epilogue, epilogue),
            "accumulate": accumulate,
        }
        changed = {name: part for name, part in parts.items() if part is not None}
        return replace(known, **changed) if changed else known

    @classmethod
    def read(cls, text: str = DType.BF16) -> Operation:
        """The operation that a user names, in the form of `str` or of a key: `bf16.out_f32 nt`.

        The default layout is tn.

        Raises:
            InvalidProblem: there is no such operation; names the field and its valid values.
        """
        dtype, layout = named_layout(text)
        return cls.of(dtype, layout or Layout.TN)

    @classmethod
    def parse(cls, key: str) -> Operation:
        """The operation with this key.

        Raises:
            InvalidProblem: there is no such operation.
        """
        dtype, _, layout = key.rpartition(".")
        return named(dtype, layout)

    @property
    def dtype(self) -> str:
        """The key without the layout, such as `bf16` or `bf16.out_f32.accumulate`."""
        meaning = MEANINGS[self.types]
        words: tuple[tuple[str, StrEnum, StrEnum], ...] = (
            ("out", self.out, meaning.d),
            ("scale", self.scaling, meaning.scaling),
            ("group", self.grouping, Grouping.NONE),
            ("then", self.epilogue, Epilogue.NONE),
        )
        parts = [self.types.value]
        parts += [f"{word}_{value.value}" for word, value, default in words if value is not default]
        parts += [ACCUMULATE] * self.accumulate + [SYMMETRIC] * self.symmetric
        if self.summation is not None:
            parts.append(f"{SUM}_{self.summation}")
        return ".".join(parts)

    @property
    def key(self) -> str:
        """The canonical text. Operations are equal if and only if their keys are equal."""
        return f"{self.dtype}.{self.layout.value}"

    @property
    def a(self) -> Element:
        """Element type of operand A."""
        return MEANINGS[self.types].a

    @property
    def b(self) -> Element:
        """Element type of operand B."""
        return MEANINGS[self.types].b

    @property
    def d(self) -> Element:
        """Element type of the output D (and of C)."""
        return self.out

    @property
    def bias(self) -> Element:
        """Element type of a bias: that of D, or bf16 if D is FP8."""
        return Element.BF16 if self.stores_fp8 else self.out

    @property
    def accumulator(self) -> Element:
        """Element type of the sums."""
        return MEANINGS[self.types].accumulator

    @property
    def of_kernels(self) -> Operation:
        """The operation that kernels are built for, without what a launch sets or must have."""
        changes = self.accumulate or self.summation is not None
        return replace(self, accumulate=False, summation=None) if changes else self

    @property
    def is_plain(self) -> bool:
        """Whether the short name alone describes the operation."""
        return self.dtype == self.types.value

    @property
    def is_scaled(self) -> bool:
        """Whether factors from the device multiply the product."""
        return self.scaling is not Scaling.NONE

    @property
    def stores_fp8(self) -> bool:
        """Whether D is FP8: a factor scales D, and the kernel can report the largest value."""
        return self.out.bits == 8 and not self.out.is_integer

    @property
    def is_grouped(self) -> bool:
        """Whether a call computes a product for each group of tokens."""
        return self.grouping is not Grouping.NONE

    @property
    def is_fused(self) -> bool:
        """Whether the kernel has a fused epilogue."""
        return self.epilogue is not Epilogue.NONE

    @property
    def of_suites(self) -> Operation:
        """The operation without grouping and epilogue. Suites name it; their problems add both."""
        if not (self.is_grouped or self.is_fused):
            return self
        out = MEANINGS[self.types].d if self.stores_fp8 else self.out
        return replace(self, out=out, grouping=Grouping.NONE, epilogue=Epilogue.NONE)

    @property
    def default(self) -> str:
        """Whose kernels run by default: `cuBLAS`, or `torch` if grouped or with an epilogue."""
        return "torch" if self.is_grouped or self.is_fused else "cuBLAS"

    @property
    def fixed_extents(self) -> tuple[str, ...]:
        """The extents that are equal for all neighbours of a problem: those that no group divides.

        With an order of sums, none: every winner of the operation may answer.
        """
        if self.summation is not None:
            return ()
        return {Grouping.ROWS: ("n", "k"), Grouping.DEPTH: ("m", "n")}.get(self.grouping, ())

    @property
    def free_extent(self) -> str:
        """The number of tokens, which differs from batch to batch: M, or K of weight gradients."""
        return "k" if self.layout is Layout.NT or self.grouping is Grouping.DEPTH else "m"

    @property
    def is_narrow_float(self) -> bool:
        """Whether the operands are FP8. See `Kernel.keeps_short_sums` about their sums."""
        return self.a.bits == 8 and not self.a.is_integer

    def __str__(self) -> str:
        return f"{self.dtype} {self.layout}"

    def __repr__(self) -> str:
        return f"Operation.parse({self.key!r})"


@lru_cache(maxsize=4096)  # a layout that does not exist is an error with suggestions: milliseconds
def layouts_of(dtype: TypeName) -> tuple[Layout, ...]:
    """The layouts that exist for a `dtype`.

    Raises:
        InvalidProblem: there is no such `dtype`.
    """
    layouts = []
    for layout in Layout:
        try:
            layouts.append(_by_name(dtype, layout).layout)
        except InvalidProblem as error:
            if error.field != "layout":
                raise
    return tuple(layouts)


def of_dtype(dtype: TypeName) -> Operation:
    """The operation of a `dtype` in its first layout.

    Raises:
        InvalidProblem: there is no such `dtype`.
    """
    return _by_name(dtype, layouts_of(dtype)[0])


def in_order(dtypes: Iterable[str]) -> tuple[str, ...]:
    """The `dtype`s without repetition, sorted by short name in `DType`'s order, then by parts."""
    names = list(DType)
    known = {dtype: of_dtype(dtype) for dtype in set(dtypes)}
    return tuple(sorted(known, key=lambda dtype: (names.index(known[dtype].types), dtype)))


@lru_cache(maxsize=4096)
def _by_name(dtype: TypeName, layout: str) -> Operation:
    """The operation for any name of its types, and for its layout in any case."""
    return named(whole(dtype), layout.lower())


@lru_cache(maxsize=4096)
def named(dtype: str, layout: str) -> Operation:
    """As `Operation.of`, of a `dtype` that is spelt canonically. Equal arguments, equal objects."""
    name, *parts = dtype.split(".")
    if name not in DType.__members__.values():
        hint = " (products of FP32 operands: tf32)" if name in ("float32", "fp32") else ""
        raise not_one_of("dtype", DType, name, hint)
    known_layout = member("layout", Layout, layout)
    types = DType(name)
    meaning = MEANINGS[types]
    values = dict(part_of(part, dtype) for part in parts)
    operation = Operation(
        types=types,
        layout=known_layout,
        out=member("out", Element, values.get("out", meaning.d)),
        scaling=member("scaling", Scaling, values.get("scale", meaning.scaling)),
        grouping=member("grouping", Grouping, values.get("group", Grouping.NONE)),
        epilogue=member("epilogue", Epilogue, values.get("then", Epilogue.NONE)),
        accumulate=ACCUMULATE in values,
        symmetric=SYMMETRIC in values,
        summation=values.get(SUM),
    )
    if operation.dtype != dtype:
        raise InvalidProblem("dtype", f"dtype {dtype!r} is spelt {operation.dtype!r}")
    return operation
