"""Torch's own calls of every operation: which one this torch takes, and how far off it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.operation import Grouping, Operation
from gemmsmith.core.problem import Layout, Problem

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
    "fp8_e4m3.scale_row": "torch._scaled_mm",
    "fp8_e5m2.scale_row": "torch._scaled_mm",
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


GROUPED = {
    ("bf16.group_rows", "tn"): {"torch._grouped_mm"},
    ("bf16.group_rows", "tt"): {"torch._grouped_mm"},
    ("bf16.group_depth", "nt"): {"torch._grouped_mm"},
    # torch loops itself where it has no kernel, and waits for the device.
    ("fp16.group_rows", "tn"): {"torch._grouped_mm", "loop of torch.mm"},
    ("fp16.group_depth", "nt"): {"torch._grouped_mm", "loop of torch.mm"},
    ("fp8_e4m3.scale_row.group_rows", "tn"): {"torch._scaled_grouped_mm"},
    ("fp8_e4m3.scale_row.group_depth", "tn"): {"torch._scaled_grouped_mm"},
}
WIDE = {
    "bf16.out_f32.group_depth": "torch._grouped_mm, then float",
    "bf16.out_f32.group_depth.accumulate": "torch._grouped_mm, then add_",
}
TOKENS = [(8192, 32), (16, 128), (4096, 1)]


@pytest.mark.parametrize(
    ("dtype", "layout", "tokens", "groups"),
    [
        (*operation, tokens, groups)
        for operation in GROUPED
        for tokens, groups in TOKENS
        if tokens > groups
        or "rows" in operation[0]  # of empty groups' gradients it may say nothing
    ],
)
def test_the_default_of_groups_is_what_is_said_and_within_its_tolerance(
    dtype: str, layout: str, tokens: int, groups: int, model: DeviceModel
) -> None:
    name, *_ = _default(_grouped(dtype, layout, tokens, groups), model)
    assert name in GROUPED[dtype, layout]


@pytest.mark.parametrize("dtype", WIDE)
def test_gradients_in_fp32_are_rounded_by_the_default_and_not_by_the_loop(
    dtype: str, model: DeviceModel
) -> None:
    import torch

    from benchmarks.peers.judge import Judge
    from tuner.measure.graphs import Stream
    from tuner.measure.torch_calls import TorchCall, rivals
    from tuner.workloads.operands import Operands

    torch.zeros(1, device="cuda")
    stream = Stream()
    with stream.torch():
        operands = Operands(_grouped(dtype, "nt", 8192, 32), model, 0, seed=1)
        judge = Judge(operands)
    default = TorchCall(operands, stream)
    assert default.name == WIDE[dtype]
    with stream.torch():
        assert judge.wrong(default.compute) is not None
        assert judge.error < 5e-3
    (loop,) = rivals(operands, stream, default.name)
    with stream.torch():
        assert judge.wrong(loop.compute) is None
    for each in (default, loop):
        graph = each.capture(len(operands.sets))
        graph.enqueue()
        torch.cuda.synchronize()
        graph.close()


LOOPED = [family for family in GROUPED if family != ("fp8_e4m3.scale_row.group_rows", "tn")]


@pytest.mark.parametrize(("tokens", "groups"), TOKENS)
@pytest.mark.parametrize(("dtype", "layout"), LOOPED)
def test_the_loop_is_right_in_every_case_and_can_be_captured(
    dtype: str, layout: str, tokens: int, groups: int, model: DeviceModel
) -> None:
    import torch

    from tests.support.candidates import KERNEL
    from tests.support.replacing import replace
    from tuner.measure.graphs import Stream
    from tuner.measure.torch_calls import rivals
    from tuner.workloads.operands import Operands
    from tuner.workloads.reference import Reference, use_precise_fp32

    use_precise_fp32()
    torch.zeros(1, device="cuda")
    stream = Stream()
    problem = _grouped(dtype, layout, tokens, groups)
    with stream.torch():
        operands = Operands(problem, model, 0, seed=1)
        reference = Reference(operands)
    ways = [way for way in operands.workload.alternatives(problem) if way.rival]

    def launch(i: int) -> None:
        s = operands.cases[i].operands
        operands.ready(s.d)
        ways[0].launches(problem, [s], operands.room)[0]()
        operands.check.copy_(s.d)

    kernel = replace(KERNEL, dtype=dtype, layout=problem.layout, fast_accumulation=True)
    with stream.torch():
        _, failure = reference.check(kernel, claims_order=True, launch=launch)
    assert failure is None
    (loop,) = rivals(operands, stream, "")
    graph = loop.capture(len(operands.sets))
    graph.enqueue()
    torch.cuda.synchronize()
    graph.close()


def _grouped(dtype: str, layout: str, tokens: int, groups: int) -> Problem:
    operation = Operation.of(dtype, layout)
    if operation.grouping is Grouping.ROWS:
        return Problem.of(operation, tokens, 768, 512, groups)
    return Problem.of(operation, 768, 512, tokens, groups)


def _default(problem: Problem, model: DeviceModel) -> tuple[str, float, float]:
    """Name, error and its bound of the default, which is judged, and captured and replayed."""
    import torch

    from benchmarks.peers.judge import Judge
    from tuner.measure.graphs import Stream
    from tuner.measure.torch_calls import TorchCall
    from tuner.workloads.operands import Operands
    from tuner.workloads.reference import tolerance

    torch.zeros(1, device="cuda")
    stream = Stream()
    with stream.torch():
        operands = Operands(problem, model, 0, seed=1)
        judge = Judge(operands)
    default = TorchCall(operands, stream)
    with stream.torch():
        wrong = judge.wrong(default.compute)
    assert wrong is None, (default.name, wrong)
    graph = default.capture(len(operands.sets))
    graph.enqueue()
    torch.cuda.synchronize()
    graph.close()
    return default.name, judge.error, tolerance(problem, fast_accumulation=False).error
