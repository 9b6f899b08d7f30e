"""Kernels of grouped products, one of each kind, as the measuring child verifies them: every
spread of the tokens, empty groups, one token, ends before the last token.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from gemmsmith.device import DeviceModel
from gemmsmith.kernel import Kernel, cutlass
from gemmsmith.operation import Grouping, Operation
from gemmsmith.problem import Problem
from tests.gpu.support.building import build
from tests.gpu.test_operations import check
from tuner.backends import kernels
from tuner.devices.cuda import CudaDevice

FAMILIES = (
    ("bf16.group_rows", "tn"),
    ("bf16.group_rows", "tt"),
    ("fp16.group_rows", "tn"),
    ("fp8_e4m3.scale_row.group_rows", "tn"),
    ("bf16.group_depth", "nt"),
    ("bf16.out_f32.group_depth", "nt"),
)


def problem(dtype: str, layout: str, tokens: int, groups: int) -> Problem:
    """No extent is a multiple of a tile, but rows are of 16 bytes."""
    if Operation.of(dtype, layout).grouping is Grouping.ROWS:
        return Problem(m=tokens, n=784, k=1040, batch=groups, dtype=dtype, layout=layout)
    return Problem(m=528, n=784, k=tokens, batch=groups, dtype=dtype, layout=layout)


@cache
def chosen(dtype: str, layout: str) -> tuple[Kernel, ...]:
    """The first kernel of each backend, mainloop and orientation."""
    found: dict[tuple[object, ...], Kernel] = {}
    for kernel in map(cutlass, kernels(problem(dtype, layout, 4096, 8))):
        found.setdefault((kernel.backend, kernel.mainloop, kernel.swapped), kernel)
    return tuple(found.values())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The packs of all kernels, by kernel."""
    wanted = [kernel for family in FAMILIES for kernel in chosen(*family)]
    return build(wanted, tmp_path_factory)[1]


@pytest.mark.parametrize(
    ("tokens", "groups"), [(4099, 8), (77, 128), (1, 1), (1, 512), (3000, 1)], ids=str
)
@pytest.mark.parametrize(("dtype", "layout"), FAMILIES)
def test_every_kind_is_right(
    dtype: str,
    layout: str,
    tokens: int,
    groups: int,
    built: dict[str, Path],
    device: CudaDevice,
    model: DeviceModel,
) -> None:
    check(problem(dtype, layout, tokens, groups), chosen(dtype, layout), built, device, model)


def test_gradients_are_added_to(
    built: dict[str, Path], device: CudaDevice, model: DeviceModel
) -> None:
    adding = problem("bf16.out_f32.group_depth.accumulate", "nt", 4099, 8)
    check(adding, chosen("bf16.out_f32.group_depth", "nt"), built, device, model)
