"""Products for cuBLASLt's pack: operands, arguments and expected results, on any device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gemmsmith.core.operation import Layout, Scaling
from gemmsmith.runtime.abi import Arguments
from tuner.backends.cublaslt.operations import LibraryOperation

TYPES = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "s8": torch.int8,
    "s32": torch.int32,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
ROW = 1
"""`GS_SCALING_ROW`."""
SENTINEL = 77


@dataclass
class Product:
    """Operands of a product as views [batch, rows, columns]; C and D have longer rows."""

    operation: LibraryOperation
    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    store: torch.Tensor
    scale_a: torch.Tensor | None
    scale_b: torch.Tensor | None
    alpha: float
    beta: float

    @property
    def d(self) -> torch.Tensor:
        return self.store[..., : self.b.shape[2]]

    def arguments(self, *, device: int = 0, sm_count: int = 132) -> Arguments:
        (batch, m, k), n = self.a.shape, self.b.shape[2]
        layout = self.operation.layout
        row = self.operation.scales is Scaling.ROW
        return Arguments(
            m=m,
            n=n,
            k=k,
            batch=batch,
            a=self.a.data_ptr(),
            b=self.b.data_ptr(),
            c=self.c.data_ptr(),
            d=self.d.data_ptr(),
            lda=self.a.stride(1 if layout.a_row_major else 2),
            ldb=self.b.stride(1 if layout.b_row_major else 2),
            ldc=self.c.stride(1),
            ldd=self.d.stride(1),
            batch_stride_a=self.a.stride(0),
            batch_stride_b=self.b.stride(0),
            batch_stride_c=self.c.stride(0),
            batch_stride_d=self.d.stride(0),
            alpha=self.alpha,
            beta=self.beta,
            scale_a=None if self.scale_a is None else self.scale_a.data_ptr(),
            scale_b=None if self.scale_b is None else self.scale_b.data_ptr(),
            scaling=ROW if row else 0,
            device=device,
            sm_count=sm_count,
            swizzle=1,
            splits=1,
        )

    def expected(self) -> torch.Tensor:
        """The result, [batch, M, N], in FP64, not rounded to D's type."""
        product = self.a.double() @ self.b.double()
        if self.scale_a is not None:
            product = product * self.scale_a.double().reshape(-1, 1)
        if self.scale_b is not None:
            product = product * self.scale_b.double().reshape(1, -1)
        return self.alpha * product + (self.beta * self.c.double() if self.beta else 0.0)

    def poison(self) -> None:
        self.store.fill_(SENTINEL)

    def untouched(self) -> bool:
        """Whether the memory between the rows of D is unchanged."""
        beyond = self.store[..., self.b.shape[2] :]
        return bool((beyond == SENTINEL).all())


def product(
    operation: LibraryOperation,
    m: int,
    n: int,
    k: int,
    *,
    batch: int = 1,
    pad: int = 16,
    alpha: float = 1.0,
    beta: float = 0.0,
    whole: bool = False,
    device: str = "cpu",
) -> Product:
    """Random operands. If `whole`, they are small integers with exact sums in every type of D.

    Rows are `pad` elements longer than needed.
    """

    def values(shape: tuple[int, ...], name: str) -> torch.Tensor:
        if whole or name in ("s8", "s32"):
            most = 2 if whole else 100
            drawn = torch.randint(-most, most + 1, shape, device=device).float()
        else:
            drawn = torch.randn(shape, device=device)
        return drawn.to(TYPES[name])

    def matrix(rows: int, columns: int, name: str, row_major: bool) -> torch.Tensor:
        outer, inner = (rows, columns) if row_major else (columns, rows)
        stored = values((batch, outer, inner + pad), name)[..., :inner]
        return stored if row_major else stored.transpose(1, 2)

    def scale(count: int) -> torch.Tensor:
        choices = torch.tensor([0.25, 0.5, 1.0, 2.0], device=device)
        return choices[torch.randint(0, 4, (count,), device=device)]

    layout: Layout = operation.layout
    scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if operation.scales is not Scaling.NONE:
        row = operation.scales is Scaling.ROW
        scales = (scale(m if row else 1), scale(n if row else 1))
    return Product(
        operation=operation,
        a=matrix(m, k, operation.a, layout.a_row_major),
        b=matrix(k, n, operation.b, layout.b_row_major),
        c=values((batch, m, n + 2 * pad), operation.d)[..., :n],
        store=torch.full((batch, m, n + pad), SENTINEL, dtype=TYPES[operation.d], device=device),
        scale_a=scales[0],
        scale_b=scales[1],
        alpha=alpha,
        beta=beta,
    )
