"""The space, what it compiles from and what is predicted of it, as they were on one folder.

Digests of sorted names: the backends' lists together are what the one list was, in whatever order.
A change of the space on purpose changes them: `python -m tests.unit.space.test_frozen` prints the
new ones. A change of CUTLASS's release changes `units`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.operation import Layout, layouts_of
from gemmsmith.core.problem import Problem
from tuner.backends import Level, candidates, kernels
from tuner.backends.unit import unit_source
from tuner.search.cost_model import predicted_us

FROZEN = Path(__file__).with_name("frozen.json")
H200 = DeviceModel(
    name="NVIDIA H200",
    arch="sm90",
    sm_count=132,
    memory_bytes=150754820096,
    l2_bytes=62914560,
)
DTYPES = ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "bf16.out_f32")
OTHERS = (
    "fp16.out_f32",
    "int8",
    "int8.out_bf16",
    "int8.out_bf16.scale_row",
    "tf32",
    "fp8_e4m3.scale_row",
)
SIZES = (
    (4096, 4096, 4096, 1),
    (16, 7168, 2048, 1),
    (7, 4096, 4104, 3),
    (4096, 4095, 4096, 1),
    (256, 4100, 4100, 1),
    (4098, 4098, 4098, 1),
    (33, 4097, 4099, 2),
    (1 << 21, 64, 64, 70000),
)
FULL = (
    ("bf16", "tn", (4096, 4096, 4096, 1)),
    ("fp16", "nt", (4096, 4095, 4096, 1)),
    ("bf16", "nn", (256, 4100, 4100, 1)),
    ("fp8_e4m3", "tn", (33, 4097, 4099, 2)),
)
UNITS = (
    ("bf16", "tn", (4096, 4096, 4096)),
    ("fp16", "nt", (4096, 4095, 4096)),
    ("fp8_e4m3", "tn", (4096, 4096, 4096)),
    ("fp8_e5m2", "tn", (33, 4097, 4099)),
    ("bf16", "nn", (4098, 4098, 4098)),
    ("bf16.out_f32", "tt", (4096, 4096, 4096)),
    ("int8.out_bf16.scale_row", "tn", (4096, 4096, 4096)),
    ("tf32", "tn", (4096, 4096, 4096)),
    ("fp8_e4m3.scale_row", "tn", (4096, 4096, 4096)),
)

Frozen = dict[str, dict[str, list[int | str]]]


def digest(lines: Iterable[str]) -> list[int | str]:
    """How many, and the hash of all."""
    found = sorted(lines)
    return [len(found), hashlib.sha256("\n".join(found).encode()).hexdigest()[:16]]


def curated() -> Frozen:
    found: Frozen = {"kernels": {}, "candidates": {}, "predictions": {}}
    for dtype in (*DTYPES, *OTHERS):
        for layout in layouts_of(dtype) if dtype in DTYPES else (Layout.TN,):
            for m, n, k, batch in SIZES if dtype in DTYPES else SIZES[:2]:
                problem = Problem(m=m, n=n, k=k, batch=batch, dtype=dtype, layout=layout)
                offered = candidates(problem, H200)
                times = predicted_us(problem, offered, H200)
                found["kernels"][str(problem)] = digest(each.name for each in kernels(problem))
                found["candidates"][str(problem)] = digest(each.key for each in offered)
                found["predictions"][str(problem)] = digest(
                    f"{each.key} {us:.6e}" for each, us in zip(offered, times, strict=True)
                )
    return found


def every() -> Frozen:
    found: Frozen = {"full": {}}
    for dtype, layout, (m, n, k, batch) in FULL:
        problem = Problem(m=m, n=n, k=k, batch=batch, dtype=dtype, layout=layout)
        legal = kernels(problem, level=Level.FULL)
        found["full"][str(problem)] = digest(each.name for each in legal)
    return found


def units() -> Frozen:
    found: Frozen = {"units": {}}
    for dtype, layout, (m, n, k) in UNITS:
        problem = Problem(m=m, n=n, k=k, dtype=dtype, layout=layout)
        unit = sorted(kernels(problem), key=lambda kernel: kernel.name)
        found["units"][str(problem)] = digest([unit_source(unit)])
    return found


def frozen(*parts: str) -> Frozen:
    known: Frozen = json.loads(FROZEN.read_text(encoding="utf-8"))
    return {part: known[part] for part in parts}


def test_curated_kernels_launches_and_predictions_are_what_they_were() -> None:
    assert curated() == frozen("kernels", "candidates", "predictions")


def test_the_full_space_is_what_it_was() -> None:
    assert every() == frozen("full")


def test_units_compile_from_what_they_did() -> None:
    assert units() == frozen("units")


if __name__ == "__main__":
    print(json.dumps({**curated(), **every(), **units()}, indent=1, ensure_ascii=False))
