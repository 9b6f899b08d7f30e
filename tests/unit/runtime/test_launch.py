"""The arguments that `run` derives from tensors, and what it rejects. Only a launch needs a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gemmsmith.core.config import Config
from gemmsmith.core.kernel import Cutlass3xKernel, EpilogueSchedule, MainloopSchedule, TileScheduler
from gemmsmith.core.launch import Launch
from gemmsmith.core.operation import Scaling
from gemmsmith.core.problem import DType, Layout
from gemmsmith.errors import LaunchFailed
from gemmsmith.runtime import launch as launching
from gemmsmith.runtime.abi import Arguments


def config(layout: Layout = Layout.TN, dtype: DType = DType.BF16, alignment: int = 8) -> Config:
    kernel = Cutlass3xKernel(
        name="k",
        arch="sm90",
        dtype=dtype,
        layout=layout,
        alignment_a=alignment,
        alignment_b=alignment,
        alignment_d=alignment,
        tile=(128, 128, 64),
        cluster=(1, 1),
        stages=0,
        mainloop=MainloopSchedule.PINGPONG,
        epilogue=EpilogueSchedule.TMA,
        scheduler=TileScheduler.PERSISTENT,
    )
    return Config(kernel=kernel, launch=Launch())


def test_operands_on_the_host_are_refused(tmp_path: Path) -> None:
    a = torch.zeros(8, 8, dtype=torch.bfloat16)
    with pytest.raises(LaunchFailed, match="CUDA device"):
        launching.run(config(), a, a, pack_path=tmp_path / "none.so")


@pytest.mark.parametrize(
    ("tensor", "row_major", "expected"),
    [
        (torch.zeros(4, 6), True, (4, 6, 1, 6, 24)),
        (torch.zeros(6, 4).t(), False, (4, 6, 1, 4, 24)),
        (torch.zeros(4, 16)[:, :6], True, (4, 6, 1, 16, 64)),
        (torch.zeros(3, 4, 6), True, (4, 6, 3, 6, 24)),
        (torch.zeros(3, 6, 4).transpose(1, 2), False, (4, 6, 3, 4, 24)),
        (torch.zeros(1, 6), True, (1, 6, 1, 6, 6)),
        (torch.zeros(6, 1).t(), True, (1, 6, 1, 6, 6)),
        (torch.zeros(1, 7)[:, :6], True, (1, 6, 1, 6, 6)),
        (torch.zeros(3, 1, 8)[..., :6], True, (1, 6, 3, 6, 8)),
        (torch.zeros(4, 1), False, (4, 1, 1, 4, 4)),
    ],
)
def test_leading_dimensions(
    tensor: torch.Tensor, row_major: bool, expected: tuple[int, ...]
) -> None:
    assert tuple(launching._view("a", tensor, row_major, "tn")) == expected


def test_a_column_major_operand_is_not_read_as_row_major() -> None:
    with pytest.raises(LaunchFailed, match="row-major"):
        launching._view("a", torch.zeros(6, 4).t(), True, "tn")
    with pytest.raises(LaunchFailed, match="column-major"):
        launching._view("b", torch.zeros(4, 6), False, "tn")


def test_rows_that_overlap_are_refused() -> None:
    overlapping = torch.zeros(100).as_strided((4, 6), (3, 1))
    with pytest.raises(LaunchFailed, match="overlap"):
        launching._view("a", overlapping, True, "tn")


def test_misalignment_is_refused() -> None:
    good = Arguments(a=256, b=512, c=1024, d=1024, lda=64, ldb=64, ldc=64, ldd=64, batch=1)
    launching._check_alignment(config(), good)
    for field, value in (("a", 258), ("ldb", 63), ("d", 1030), ("ldc", 12)):
        bad = Arguments.from_buffer_copy(good)
        setattr(bad, field, value)
        with pytest.raises(LaunchFailed, match="not aligned"):
            launching._check_alignment(config(), bad)
    strided = Arguments.from_buffer_copy(good)
    strided.batch, strided.batch_stride_a = 2, 100
    with pytest.raises(LaunchFailed, match="batch stride 100"):
        launching._check_alignment(config(), strided)


def test_scales_are_for_fp8() -> None:
    scale = torch.ones(1)
    with pytest.raises(LaunchFailed, match="FP8"):
        launching._check_scale("scale_a", scale, Scaling.NONE, 4, scale.device)
    with pytest.raises(LaunchFailed, match="1 float32"):
        launching._check_scale("scale_a", torch.ones(2), Scaling.TENSOR, 4, scale.device)
    launching._check_scale("scale_a", scale, Scaling.TENSOR, 4, scale.device)


def test_a_factor_for_each_row() -> None:
    rows = torch.ones(4, 1)
    launching._check_scale("scale_a", rows, Scaling.ROW, 4, rows.device)
    for wrong in (torch.ones(1), torch.ones(4, 2)[:, :1], rows.double(), None):
        with pytest.raises(LaunchFailed, match="scale_a"):
            launching._check_scale("scale_a", wrong, Scaling.ROW, 4, rows.device)
