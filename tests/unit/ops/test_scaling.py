"""`torch._scaled_mm` of unchanged code under `gemmsmith.patch`: who computes it, and what."""

from __future__ import annotations

import io
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gemmsmith
from gemmsmith.core.problem import Layout
from gemmsmith.ops.engine.engine import Engine
from tests.support import stand_in
from tests.support.replacing import replace
from tests.support.stand_in import Chooser

BF16, F32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
Runs = Callable[[], int]
M, N, K = 32, 48, 16
VERSIONS = (1, 2) if hasattr(torch, "_scaled_mm_v2") else (1,)
KINDS = list(itertools.product(VERSIONS, (False, True), (False, True)))


pytestmark = pytest.mark.usefixtures("without_binding")

A = torch.randn(M, K).to(E4M3)
B = torch.randn(N, K).to(E4M3).t()
PRODUCT = A.float() @ B.float()


def factors(by_rows: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if by_rows:
        return torch.rand(M, 1) + 0.5, torch.rand(1, N) + 0.5
    return torch.tensor(0.5), torch.tensor([[3.0]])


def scaled(
    version: int,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    a: torch.Tensor = A,
    b: torch.Tensor = B,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = BF16,
    fast: bool = True,
    recipe: int | None = None,
    **more: Any,
) -> torch.Tensor:
    """The call of that version; its overload with `out=` where that is given."""
    aten = torch.ops.aten
    overload = "out" if "out" in more else "default"
    if version == 1:
        call = getattr(aten._scaled_mm, overload)
        rest = (scale_a, scale_b, bias, more.pop("scale_result", None), out_dtype, fast)
        found: torch.Tensor = call(a, b, *rest, **more)
        return found
    how = int(scale_a.numel() > 1) if recipe is None else recipe
    lists = ([scale_a], [how], [0], [scale_b], [how], [0])
    result: torch.Tensor = getattr(aten._scaled_mm_v2, overload)(
        a, b, *lists, bias, out_dtype, [], fast, **more
    )
    return result


def close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert ours.dtype is BF16
    torch.testing.assert_close(ours.float(), expected.float(), rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize(("version", "by_rows", "written"), KINDS)
def test_unchanged_code_runs_winners(
    engine: Engine, chooser: Chooser, runs: Runs, version: int, by_rows: bool, written: bool
) -> None:
    scales = factors(by_rows)
    into = {"out": torch.empty(M, N, dtype=BF16)} if written else {}
    with gemmsmith.patch():
        out = scaled(version, *scales, **into)
    assert runs() == 1
    close(out, PRODUCT * scales[0] * scales[1])
    if written:
        assert out is into["out"] or out.data_ptr() == into["out"].data_ptr()
    dtype = "fp8_e4m3.scale_row" if by_rows else "fp8_e4m3"
    assert [str(one) for one in chooser.asked] == [f"{M}×{N}×{K} {dtype} tn"]
    close(scaled(version, *scales), PRODUCT * scales[0] * scales[1])
    assert runs() == 0


@pytest.mark.parametrize(("version", "by_rows", "fast_kernel"), KINDS)
def test_precise_calls_run_only_kernels_that_promote(
    engine: Engine,
    runs: Runs,
    monkeypatch: pytest.MonkeyPatch,
    version: int,
    by_rows: bool,
    fast_kernel: bool,
) -> None:
    names = ("row_fp8", "fp8_e4m3.scale_row") if by_rows else ("fp8", "fp8_e4m3")
    kernel = replace(stand_in.kernel(*names, Layout.TN), fast_accumulation=fast_kernel)
    monkeypatch.setattr(stand_in, "kernel", lambda *_: kernel)
    scales = factors(by_rows)
    with gemmsmith.patch():
        close(scaled(version, *scales, fast=False), PRODUCT * scales[0] * scales[1])
    assert runs() == (0 if fast_kernel else 1)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_bias_is_added_by_the_kernel_where_there_is_one(
    engine: Engine, runs: Runs, version: int
) -> None:
    bias = torch.randn(N).to(BF16)
    with gemmsmith.patch():
        for by_rows in (False, True):
            scales = factors(by_rows)
            expected = PRODUCT * scales[0] * scales[1] + bias.float()
            close(scaled(version, *scales, bias=bias), expected)
            assert runs() == (0 if by_rows else 1)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_rest_is_torchs(engine: Engine, runs: Runs, version: int) -> None:
    one, rows = factors(by_rows=False), factors(by_rows=True)
    with gemmsmith.patch():
        assert scaled(version, *one, out_dtype=F32).dtype is F32
        if version == 1:
            # torch says what is wrong with these.
            for wrong in ((rows[0][:, 0], rows[1][0]), (one[0], rows[1])):
                with pytest.raises((ValueError, RuntimeError)):
                    scaled(version, *wrong)
            scaled(version, *one, scale_result=torch.ones(()))
        else:
            for scales, recipe in ((one, 1), (rows, 0), (rows, 5)):
                with pytest.raises((ValueError, RuntimeError, IndexError, NotImplementedError)):
                    scaled(version, *scales, recipe=recipe)
    assert runs() == 0


def test_without_an_output_type_torch_gives_fp8(engine: Engine, runs: Runs) -> None:
    with gemmsmith.patch():
        assert scaled(1, *factors(by_rows=False), out_dtype=None).dtype is E4M3
        assert runs() == 0
        into = torch.empty(M, N, dtype=BF16)
        scales = factors(by_rows=True)
        close(scaled(1, *scales, out_dtype=None, out=into), PRODUCT * scales[0] * scales[1])
    assert runs() == 1


def test_an_output_with_gaps_is_torchs(engine: Engine, runs: Runs) -> None:
    wide = torch.empty(M, 2 * N, dtype=BF16)
    scales = factors(by_rows=True)
    with gemmsmith.patch():
        scaled(1, *scales, out=wide[:, :N])
    assert runs() == 0
    close(wide[:, :N], PRODUCT * scales[0] * scales[1])


class Quantized(nn.Module):
    """A layer that scales by rows, as torchao's does."""

    def __init__(self, inputs: int = K, outputs: int = N) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (a, scale_a), (b, scale_b) = (self.cast(each) for each in (x, self.weight.detach()))
        return torch._scaled_mm(a, b.t(), scale_a, scale_b.t(), out_dtype=BF16, use_fast_accum=True)

    @staticmethod
    def cast(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = x.abs().amax(1, keepdim=True) / 448
        return (x / scale).to(E4M3), scale


def test_only_a_models_products_in_every_thread(engine: Engine, runs: Runs) -> None:
    one, other, x = Quantized(), Quantized(K, 2 * N), torch.randn(M, K)

    def count() -> tuple[int, int]:
        for model in (one, other):
            thread = threading.Thread(target=model, args=(x,))
            thread.start()
            thread.join()
            if model is one:
                of_one = runs()
        return of_one, runs()

    with gemmsmith.patch(one):
        assert count() == (1, 0)
        with gemmsmith.patch(other):
            assert count() == (1, 1)
    assert count() == (0, 0)


@pytest.mark.parametrize("tuned", [True, False])
def test_a_report_tells_of_each_once(engine: Engine, chooser: Chooser, tuned: bool) -> None:
    chooser.answers = lambda problem: tuned
    scales, file = factors(by_rows=True), io.StringIO()
    with gemmsmith.patch(report=True, file=file):
        scaled(1, *scales)
        gemmsmith.scaled_mm(A, B, *scales, use_fast_accum=True)
    who = "row_fp8" if tuned else "torch"
    text = file.getvalue()
    assert text.startswith(f"gemmsmith: {2 if tuned else 0} of 2 products")
    assert f"2 × {M}×{N}×{K} fp8_e4m3.scale_row tn (row_scaled): {who}" in text


def test_compiled_graphs_come_by_as_well(engine: Engine, runs: Runs) -> None:
    model, x = Quantized(), torch.randn(M, K)
    expected = model(x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(x)
    with gemmsmith.patch():
        close(compiled(x), expected)
    assert runs() == 1
