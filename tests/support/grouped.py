"""Small grouped problems for the host, and their results from a plain loop."""

from __future__ import annotations

import torch

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.operation import Grouping, Operation
from gemmsmith.core.problem import Problem
from tuner.workloads.workload import OperandSet, drawn_with

SMALL = DeviceModel(name="host", arch="sm90", sm_count=1, memory_bytes=16 * 2**30, l2_bytes=100_000)

ROWS = (("bf16.group_rows", "tn"), ("bf16.group_rows", "tt"), ("fp16.group_rows", "tn"))
DEPTH = (("bf16.group_depth", "nt"), ("fp16.group_depth", "nt"))
WIDE = (("bf16.out_f32.group_depth", "nt"), ("fp16.out_f32.group_depth.accumulate", "nt"))
FP8 = (("fp8_e4m3.scale_row.group_rows", "tn"), ("fp8_e4m3.scale_row.group_depth", "tn"))
OPERATIONS = (*ROWS, *DEPTH, *WIDE, *FP8)


def problem_of(dtype: str, layout: str, tokens: int = 96, groups: int = 5) -> Problem:
    operation = Operation.of(dtype, layout)
    if operation.grouping is Grouping.ROWS:
        return Problem.of(operation, tokens, 32, 48, groups)
    return Problem.of(operation, 48, 32, tokens, groups)


def exact(problem: Problem, s: OperandSet, before: torch.Tensor) -> torch.Tensor:
    """The exact result in FP64, group by group; `before` is the initial content of D."""
    by_rows = problem.operation.grouping is Grouping.ROWS
    wanted = before.double().clone()
    start = 0
    for group, end in enumerate(drawn_with(s.groups).offsets.tolist()):
        run = slice(start, end)
        if by_rows:
            product = s.a[0, run].double() @ s.b[group].double()
        else:
            product = s.a[0, :, run].double() @ s.b[0, run].double()
        if s.scale_a is not None and s.scale_b is not None:
            product = product * (s.scale_a[0, run] if by_rows else s.scale_a[group])
            product = product * s.scale_b[group]
        if by_rows:
            wanted[0, run] = product
        elif problem.operation.accumulate:
            wanted[group] += product
        else:
            wanted[group] = product
        start = end
    return wanted
