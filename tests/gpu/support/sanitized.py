"""A small program to run under compute-sanitizer: one kernel, a few launches, no torch.

    python -m tests.gpu.support.sanitized JOB.json

Operands are device allocations of exactly their size, so that a read past an end is one. Their
elements are small integers, so that sampled elements of D can be checked exactly but for rounding.
Of a grouped problem one group is empty, and the last rows are no group's: they are not written.
Prints "right" and exits 0, or says what is wrong and exits 1.
"""

from __future__ import annotations

import random
import struct
import sys
from bisect import bisect_right
from pathlib import Path
from typing import Any

import msgspec
from cuda.bindings import driver

from gemmsmith.core.problem import DType, Problem
from gemmsmith.runtime.pack import LoadedPack
from tests.gpu.support.jobs import Job
from tests.support.arguments import packed_arguments

SAMPLES = 300
VALUES = (-2, -1, 0, 1, 2)


def main(job: Job) -> str:
    """What is wrong; empty if nothing is."""
    problem = job.problem
    assert problem.operation.a == DType.BF16
    ends = _ends(problem)
    _call(driver.cuInit(0))
    context = _call(driver.cuDevicePrimaryCtxRetain(0))
    _call(driver.cuCtxSetCurrent(context))
    sms = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    sm_count = int(_call(driver.cuDeviceGetAttribute(sms, 0)))
    chooser = random.Random(7)
    a = chooser.choices(VALUES, k=problem.m * problem.k)
    b = chooser.choices(VALUES, k=len(ends) * problem.n * problem.k)
    device_a, device_b = _upload(_bf16(a)), _upload(_bf16(b))
    d_bytes = problem.m * problem.n * 2
    device_d = _upload(b"\xed\x7f" * (problem.m * problem.n))
    offsets = _upload(struct.pack(f"<{len(ends)}i", *ends))
    kernel = LoadedPack.open(job.pack).kernel(job.kernel.name)
    for launch in job.launches:
        arguments = packed_arguments(problem, a=device_a, b=device_b, d=device_d)
        arguments.set_launch(launch, sm_count=sm_count)
        if problem.operation.is_grouped:
            arguments.offsets = offsets
            arguments.batch_stride_a = arguments.batch_stride_c = arguments.batch_stride_d = 0
        status = kernel.can_implement(arguments)
        if status:
            return f"{launch.key}: refused with status {status}"
        size = kernel.workspace_bytes(arguments)
        workspace = _upload(b"\xa5" * size) if size else 0
        _call(driver.cuMemsetD16(device_d, 0x7FED, problem.m * problem.n))
        for _ in range(2):
            kernel.run(arguments, workspace, 0)
        _call(driver.cuCtxSynchronize())
        wrong = _wrong(problem, ends, a, b, _download(device_d, d_bytes), chooser)
        if wrong:
            return f"{launch.key}: {wrong}"
        if workspace:
            _call(driver.cuMemFree(workspace))
    return ""


def _ends(problem: Problem) -> tuple[int, ...]:
    """The row after each group's last; all rows are one group's where there are no groups."""
    if not problem.operation.is_grouped:
        return (problem.m,)
    last = problem.m - problem.m // 16
    ends = [last * (group + 1) ** 2 // problem.batch**2 for group in range(problem.batch)]
    ends[1] = ends[0]
    return tuple(ends)


def _wrong(
    problem: Problem,
    ends: tuple[int, ...],
    a: list[int],
    b: list[int],
    d: bytes,
    chooser: random.Random,
) -> str:
    got = [struct.unpack("<f", b"\0\0" + d[i : i + 2])[0] for i in range(0, len(d), 2)]
    k, n, written = problem.k, problem.n, ends[-1]
    strange = sum(value != value for value in got[: written * n])
    if strange:
        return f"{strange} elements were not written or are NaN"
    if any(value == value for value in got[written * n :]):
        return f"rows after {written} are no group's and were written"
    corners = [(0, 0), (written - 1, n - 1)]
    for row, column in corners + [
        (chooser.randrange(written), chooser.randrange(n)) for _ in range(SAMPLES)
    ]:
        group = bisect_right(ends, row)
        of_column = (group * n + column) * k
        left, right = a[row * k : (row + 1) * k], b[of_column : of_column + k]
        wanted = sum(x * y for x, y in zip(left, right, strict=True))
        value = got[row * n + column]
        if abs(value - wanted) > abs(wanted) / 256:
            return f"D[{row}, {column}] is {value}, not {wanted}"
    return ""


def _bf16(values: list[int]) -> bytes:
    bits = {value: struct.pack("<f", value)[2:] for value in VALUES}
    return b"".join(bits[value] for value in values)


def _upload(data: bytes) -> int:
    pointer = int(_call(driver.cuMemAlloc(len(data))))
    _call(driver.cuMemcpyHtoD(pointer, data, len(data)))
    return pointer


def _download(pointer: int, size: int) -> bytes:
    data = bytearray(size)
    _call(driver.cuMemcpyDtoH(data, pointer, size))
    return bytes(data)


def _call(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(driver.CUresult(status).name)
    return values[0] if values else None


if __name__ == "__main__":
    said = main(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Job))
    print(said or "right", flush=True)
    sys.exit(1 if said else 0)
