"""Torch's own calls of every operation: which one this torch takes, and how far off it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from gemmsmith.device import DeviceModel
from gemmsmith.problem import Layout, Problem

EXTENTS = [(1024, 512, 4096, 1), (512, 256, 65536, 1), (256, 512, 1024, 3)]
DEFAULTS = {
    "bf16": "torch.mm",
    "fp16": "torch.mm",
    "bf16.out_f32": "torch.mm with out_dtype",
    "fp16.out_f32": "torch.mm with out_dtype",
    "bf16.out_f32.accumulate": "torch.addmm with out_dtype",
    "fp16.out_f32.accumulate": "torch.addmm with out_dtype",
    "tf32": "torch.mm with allow_tf32",
    "int8": "torch._int_mm",
    "int8.out_bf16": "torch._int_mm, then alpha",
    "int8.out_bf16.scale_row": "torch._int_mm, then both scales",
}
BATCHED = {"torch.mm": "torch.bmm", "torch.addmm": "torch.baddbmm"}


@pytest.fixture(autouse=True)
def precision() -> Iterator[None]:
    """References need torch's FP32 to be FP32."""
    import torch

    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("extents", EXTENTS, ids=str)
@pytest.mark.parametrize("dtype", DEFAULTS)
def test_the_default_is_what_is_said_and_within_its_tolerance(
    dtype: str,
    extents: tuple[int, int, int, int],
    model: DeviceModel,
    record_property: Callable[[str, object], None],
) -> None:
    m, n, k, batch = extents
    layout = Layout.NT if dtype.endswith("accumulate") else Layout.TN
    problem = Problem(m=m, n=n, k=k, batch=batch, dtype=dtype, layout=layout)
    name, error, bound = _default(problem, model)
    record_property("error", error)
    record_property("bound", bound)
    call, *rest = DEFAULTS[dtype].split(" ", 1)
    call = BATCHED.get(call, call) if batch > 1 else call
    assert name == " ".join([call, *rest])


@pytest.mark.parametrize("dtype", ["int8", "int8.out_bf16", "int8.out_bf16.scale_row"])
@pytest.mark.parametrize("extents", [(1, 4096, 4096), (16, 512, 1024), (100, 33, 65), (64, 64, 20)])
def test_int8_has_a_default_whatever_the_sizes(
    dtype: str, extents: tuple[int, int, int], model: DeviceModel
) -> None:
    m, n, k = extents
    name, *_ = _default(Problem(m=m, n=n, k=k, dtype=dtype), model)
    assert name.startswith("torch._int_mm on padded operands")


def _default(problem: Problem, model: DeviceModel) -> tuple[str, float, float]:
    """Name, error and its bound of the default, which is judged, and captured and replayed."""
    import torch

    from benchmarks.peers.judge import Judge
    from tuner.measure.baseline import Baseline
    from tuner.measure.graphs import Stream
    from tuner.workloads.operands import Operands
    from tuner.workloads.reference import tolerance

    torch.zeros(1, device="cuda")
    stream = Stream()
    with stream.torch():
        operands = Operands(problem, model, 0, seed=1)
        judge = Judge(operands)
    default = Baseline(operands, stream)
    with stream.torch():
        wrong = judge.wrong(default.compute)
    assert wrong is None, (default.name, wrong)
    graph = default.capture(len(operands.sets))
    graph.enqueue()
    torch.cuda.synchronize()
    graph.close()
    return default.name, judge.error, tolerance(problem, fast_accumulation=False).error
