"""What a capture sees of a training step, and the suite it makes."""

from __future__ import annotations

import contextlib
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import gemmsmith
from gemmsmith.core.problem import Layout, Problem
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.in_use import install
from gemmsmith.program.captured import Captured
from tuner.suites import load

BF16 = torch.bfloat16


def problem(m: int, n: int, k: int, layout: str, *, batch: int = 1, dtype: str = "bf16") -> Problem:
    return Problem(m=m, n=n, k=k, batch=batch, dtype=dtype, layout=Layout(layout))


def step(x: torch.Tensor, layer: nn.Module) -> None:
    out = layer(x)
    out.backward(torch.ones_like(out))


THREE = {problem(4, 24, 16, "tn"): 1, problem(4, 16, 24, "tt"): 1, problem(24, 16, 4, "nt"): 1}


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layers_three_products(bias: bool) -> None:
    layer = nn.Linear(16, 24, bias=bias, dtype=BF16)
    with gemmsmith.capture() as shapes:
        step(torch.randn(2, 2, 16, dtype=BF16, requires_grad=True), layer)
    forward = Problem(m=4, n=24, k=16, dtype="bf16.then_bias" if bias else "bf16")
    gradients = {one: 1 for one in THREE if one.layout != forward.layout}
    assert shapes.problems == {forward: 1} | gradients


def test_tuned_operators_are_seen_too(engine: Engine) -> None:
    layer = nn.Linear(16, 24, bias=False, dtype=BF16)
    with gemmsmith.capture() as shapes, gemmsmith.patch(layer):
        step(torch.randn(4, 16, dtype=BF16, requires_grad=True), layer)
    assert shapes.problems == THREE


def test_fp8_layers_and_what_could_follow_within(tmp_path: Path) -> None:
    fp8 = torch.float8_e4m3fn
    x, weight = torch.randn(4, 16).to(fp8), torch.randn(32, 16).to(fp8)
    one, bias = torch.ones(1), torch.randn(32, dtype=BF16)
    with gemmsmith.capture() as shapes:
        gemmsmith.scaled_linear(x, weight, one, one, bias, activation="gelu", out_dtype=fp8)
        gemmsmith.scaled_gated_linear(x, weight, one, one, out_dtype=fp8)
        gemmsmith.scaled_linear(x, weight, one, one, bias, use_fast_accum=False)
    assert shapes.problems == {
        problem(4, 32, 16, "tn", dtype="fp8_e4m3"): 2,
        problem(4, 32, 16, "tn", dtype="fp8_e4m3.out_e4m3.then_bias_gelu"): 1,
        problem(4, 32, 16, "tn", dtype="fp8_e4m3.out_e4m3.then_silu_gate"): 1,
    }
    shapes.save(tmp_path / "captured.toml")
    again = {p for _, p in load(tmp_path / "captured.toml").problems("fp8_e4m3")}
    assert again == set(shapes.problems)


def test_batches_fp8_inference_and_what_no_kernel_is_for() -> None:
    a, b = torch.randn(3, 4, 16, dtype=BF16), torch.randn(3, 8, 16, dtype=BF16)
    fp8 = torch.randn(16, 32).to(torch.float8_e4m3fn)
    one = torch.ones(())
    with gemmsmith.capture() as shapes:
        a @ b.mT
        torch.bmm(a, b.mT.contiguous())
        how = {"scale_a": one, "scale_b": one, "out_dtype": BF16}
        torch._scaled_mm(fp8, fp8.t(), **how, use_fast_accum=True)
        torch._scaled_mm(fp8, fp8.t(), **how)
        gemmsmith.scaled_mm(fp8, fp8.t(), one, one, use_fast_accum=True)
        gemmsmith.scaled_mm(fp8, fp8.t(), one, one)
        with torch.inference_mode():
            nn.functional.linear(a[0], b[0])
        torch.ones(2, 3) @ torch.ones(3, 2)
        torch.empty(0, 3) @ torch.ones(3, 2)
    assert shapes.problems == {
        problem(4, 8, 16, "tn", batch=3): 1,
        problem(4, 8, 16, "tt", batch=3): 1,
        problem(16, 16, 32, "tn", dtype="fp8_e4m3"): 2,
        problem(4, 8, 16, "tn"): 1,
    }
    assert shapes.skipped == {
        "float32 × float32": 1,
        "float8_e4m3fn × float8_e4m3fn without use_fast_accum": 2,
    }


def test_fp8_by_rows_and_by_blocks() -> None:
    a, b = (torch.randn(size, 128).to(torch.float8_e4m3fn) for size in (16, 32))
    scales = torch.ones(16, 1), torch.ones(1, 32)
    a2, b2 = (torch.randn(size, 256).to(torch.float8_e4m3fn) for size in (16, 32))
    with gemmsmith.capture() as shapes:
        for fast in (True, False):
            torch._scaled_mm(a, b.t(), *scales, out_dtype=BF16, use_fast_accum=fast)
            gemmsmith.scaled_mm(a, b.t(), *scales, use_fast_accum=fast)
            if hasattr(torch, "_scaled_mm_v2"):
                listed = [[scales[0]], [1], [], [scales[1]], [1], []]
                torch._scaled_mm_v2(a, b.t(), *listed, None, BF16, [], fast)
        with contextlib.suppress(ValueError, RuntimeError):  # not for torch's CPU kernels
            torch._scaled_mm(a2, b2.t(), torch.ones(16, 2), torch.ones(2, 32), out_dtype=BF16)
    calls = 3 if hasattr(torch, "_scaled_mm_v2") else 2
    assert shapes.problems == {problem(16, 32, 128, "tn", dtype="fp8_e4m3.scale_row"): calls}
    assert shapes.skipped == {
        "float8_e4m3fn × float8_e4m3fn without use_fast_accum": calls,
        "float8_e4m3fn × float8_e4m3fn": 1,
    }


def test_other_types() -> None:
    a, b = torch.ones(16, 32, dtype=torch.int8), torch.ones(8, 32, dtype=torch.int8).t()
    rows, columns = torch.ones(16, 1), torch.ones(1, 8)
    x, w = torch.ones(4, 16), torch.ones(8, 16)
    linear = nn.Linear(16, 8, bias=False, dtype=BF16)
    with gemmsmith.capture() as shapes:
        torch._int_mm(a, b)
        gemmsmith.int8_mm(a, b)
        gemmsmith.int8_mm(a, b, scale_a=rows, scale_b=columns)
        gemmsmith.int8_mm(a, b, scale_a=rows)
        total = torch.zeros(8, 16)
        x16 = x.to(BF16).requires_grad_()
        out = gemmsmith.linear(x16, linear.weight, main_grad=total)
        out.backward(torch.ones_like(out))
        x @ w.t()
        torch.set_float32_matmul_precision("high")
        try:
            x @ w.t()
        finally:
            torch.set_float32_matmul_precision("highest")
    assert shapes.problems == {
        problem(16, 8, 32, "tn", dtype="int8"): 2,
        problem(16, 8, 32, "tn", dtype="int8.out_bf16"): 1,
        problem(16, 8, 32, "tn", dtype="int8.out_bf16.scale_row"): 1,
        problem(4, 8, 16, "tn"): 1,
        problem(4, 16, 8, "tt"): 1,
        problem(8, 16, 4, "nt", dtype="bf16.out_f32.accumulate"): 1,
        problem(4, 8, 16, "tn", dtype="tf32"): 1,
    }
    assert shapes.skipped == {"float32 × float32": 1}


def test_compiled_code_is_seen() -> None:
    layer = nn.Linear(16, 24, bias=False, dtype=BF16)
    compiled = torch.compile(layer, backend="aot_eager")
    x = torch.randn(4, 16, dtype=BF16, requires_grad=True)
    step(x, compiled)
    with gemmsmith.capture() as shapes:
        step(x, compiled)
    assert shapes.problems == THREE
    torch._dynamo.reset()


def test_the_suite_is_one_that_tune_reads(tmp_path: Path) -> None:
    shapes = gemmsmith.Shapes()
    shapes.problems[problem(4, 24, 16, "tn")] = 2
    shapes.problems[problem(4, 24, 16, "tn", dtype="fp8_e4m3")] = 5
    shapes.problems[problem(4, 8, 16, "nt", batch=3)] = 9
    path = tmp_path / "new" / "suite.toml"
    shapes.save(path)
    suite = load(path)
    assert [(e.m, e.n, e.k, e.batch, e.layout, e.dtype) for e in suite.entries] == [
        (4, 8, 16, 3, "nt", "bf16"),
        (4, 24, 16, 1, "tn", "fp8_e4m3"),
        (4, 24, 16, 1, "tn", "bf16"),
    ]
    assert [entry.calls for entry in suite.entries] == [9, 5, 2]
    assert suite.dtypes == ("bf16", "fp8_e4m3")
    assert {one for dtype in suite.dtypes for _, one in suite.problems(dtype)} == set(
        shapes.problems
    )


def grouped(m: int, n: int, k: int, dtype: str, layout: str) -> Problem:
    return problem(m, n, k, layout, batch=3, dtype=dtype)


GROUPED = {
    grouped(12, 24, 16, "bf16.group_rows", "tn"): 1,
    grouped(12, 16, 24, "bf16.group_rows", "tt"): 1,
    grouped(24, 16, 12, "bf16.group_depth", "nt"): 1,
}


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("tuned", [False, True])
def test_a_mixture_of_experts(engine: Engine, tuned: bool, ours: bool) -> None:
    install(engine if tuned else None)
    multiply = gemmsmith.grouped_mm if ours else torch._grouped_mm
    x = torch.randn(12, 16, dtype=BF16, requires_grad=True)
    w = torch.randn(3, 24, 16, dtype=BF16, requires_grad=True)
    offs = torch.tensor([4, 4, 12], dtype=torch.int32)
    with gemmsmith.capture() as shapes:
        out = multiply(x, w.mT, offs=offs)
        out.backward(torch.ones_like(out))
        multiply(torch.randn(3, 8, 16, dtype=BF16), w.mT, offs=None)  # a batch: no kernel's
    assert shapes.problems == GROUPED
    assert shapes.skipped == {"bfloat16 × bfloat16": 1}


def test_scaled_experts(engine: Engine, without_binding: None) -> None:
    # The CPU has no such operator: the patch puts one there.
    a, b = (torch.randn(size).to(torch.float8_e4m3fn) for size in ((12, 16), (3, 24, 16)))
    offs = torch.tensor([4, 4, 12], dtype=torch.int32)
    factors = torch.ones(12), torch.ones(3, 24)
    with gemmsmith.capture() as shapes, gemmsmith.patch():
        torch._scaled_grouped_mm(a, b.mT, *factors, offs=offs, use_fast_accum=True)
    assert shapes.problems == {grouped(12, 24, 16, "fp8_e4m3.scale_row.group_rows", "tn"): 1}


def test_the_suite_names_groups(tmp_path: Path) -> None:
    shapes = gemmsmith.Shapes()
    for at, one in enumerate(GROUPED):
        shapes.problems[one] = 9 - at
    shapes.problems[grouped(12, 24, 16, "fp16.group_rows", "tn")] = 1
    shapes.save(tmp_path / "suite.toml")
    suite = tomllib.loads((tmp_path / "suite.toml").read_text())
    keys = ("m", "n", "k", "dtype", "grouping", "groups", "layout", "calls")
    assert [tuple(entry[key] for key in keys) for entry in suite["problem"]] == [
        (12, 24, 16, "bf16", "rows", 3, "tn", 9),
        (12, 16, 24, "bf16", "rows", 3, "tt", 8),
        (24, 16, 12, "bf16", "depth", 3, "nt", 7),
        (12, 24, 16, "fp16", "rows", 3, "tn", 1),
    ]
    assert not any("batch" in entry for entry in suite["problem"])


def test_what_processes_captured_is_added_up() -> None:
    one, other = gemmsmith.Shapes(), gemmsmith.Shapes()
    one.problems[problem(4, 24, 16, "tn", dtype="bf16.then_bias")] = 2
    other.problems[problem(4, 24, 16, "tn", dtype="bf16.then_bias")] = 3
    other.problems[grouped(12, 24, 16, "bf16.group_rows", "tn")] = 1
    other.skipped["float32 × float32"] = 7
    one.add(Captured.parse(other.document))
    assert one.problems == {
        problem(4, 24, 16, "tn", dtype="bf16.then_bias"): 5,
        grouped(12, 24, 16, "bf16.group_rows", "tn"): 1,
    }
    assert one.skipped == {"float32 × float32": 7}
    for broken in (b"", b"[]", b'{"problems":[{"problem":{"m":0,"n":1,"k":1},"calls":1}]}'):
        with pytest.raises(ValueError, match=r"\w"):
            Captured.parse(broken)


def test_the_parts_of_sharded_tensors_are_recorded(mesh: DeviceMesh) -> None:
    a, b = torch.randn(4, 16, dtype=BF16), torch.randn(16, 8, dtype=BF16)
    sharded, whole = (
        distribute_tensor(a, mesh, [Shard(0)]),
        distribute_tensor(b, mesh, [Replicate()]),
    )
    with gemmsmith.capture() as shapes:
        sharded @ whole
        a.to("meta") @ b.to("meta")
    assert shapes.problems == {problem(4, 8, 16, "tt"): 1}


def test_tuning_what_was_captured() -> None:
    ordered: list[tuple[Any, ...]] = []

    class Orders:
        def tune(self, m: int, n: int, k: int, **more: Any) -> str:
            ordered.append((m, n, k, *more.values()))
            return "job"

    shapes = gemmsmith.Shapes()
    shapes.problems[problem(4, 24, 16, "tn")] = 2
    shapes.problems[problem(4, 8, 16, "nt", batch=3)] = 9
    assert shapes.tune(Orders()) == ["job", "job"]  # type: ignore[arg-type]
    assert ordered == [(4, 8, 16, 3, "bf16", "nt", 9), (4, 24, 16, 1, "bf16", "tn", 2)]
