"""cuBLASLt, tuned by timing every proposal of its heuristics.

Row-major D[M,N] is column-major Dᵀ[N,M] = Bᵀ·Aᵀ to cuBLAS, as torch calls it. Proposals with a
wrong output (by our bounds) are left out. The fastest of the others in a few graph replays runs in
the rounds.
"""

from __future__ import annotations

import math
from ctypes import byref, c_float, c_void_p
from typing import TYPE_CHECKING

from benchmarks.peers.peer import Ready, Setting, Unsupported, missing

if TYPE_CHECKING:
    import torch

    from benchmarks.peers.cublaslt_api import Algorithm, Library
    from benchmarks.peers.peer import Launch

MOST = 128
"""Most proposals requested; the library may have fewer."""
WORKSPACE_BYTES = 32 * 2**20
"""The workspace that torch gives cuBLAS on Hopper."""


class CuBlasLt:
    """The fastest of cuBLASLt's own proposals."""

    name = "cublaslt"
    limit_s = 120.0

    def available(self) -> str | None:
        return missing("torch")

    def prepare(self, setting: Setting) -> Ready:
        if setting.problem.operation.is_fused:
            raise Unsupported("it is measured for products without epilogues only")
        import torch

        from benchmarks.peers.cublaslt_api import Library

        library = Library(f"libcublasLt.so.{(torch.version.cuda or '13').split('.')[0]}")
        call = _Call(library, setting)
        algorithms = call.algorithms()
        if not algorithms:
            raise Unsupported("its heuristics propose nothing")
        best, best_us, wrong = 0, math.inf, 0
        for index, algorithm in enumerate(algorithms):
            launch = call.launch(algorithm)
            if setting.wrong(launch) is not None:
                wrong += 1
                continue
            microseconds = setting.time_us(launch)
            if microseconds < best_us:
                best, best_us = index, microseconds
        if best_us == math.inf:
            raise Unsupported(f"all {wrong} proposals are wrong by our bounds")
        note = f"proposal {best + 1} of {len(algorithms)}" + (f", {wrong} wrong" if wrong else "")
        return Ready(launch=call.launch(algorithms[best]), note=note)


class _Call:
    """The descriptors of a problem. cuBLAS's A is our B, and its B is our A."""

    def __init__(self, library: Library, setting: Setting) -> None:
        import torch

        problem, operands = setting.problem, setting.operands
        m, n, k, batch = problem.m, problem.n, problem.k, problem.batch
        self._library, self._sets = library, operands.sets
        self._stream = c_void_p(setting.stream.pointer)
        self._handle = library.create("Create")
        first_transposed = not problem.layout.b_row_major
        second_transposed = not problem.layout.a_row_major
        scales = None
        first_set = operands.sets[0]
        if first_set.scale_a is not None and first_set.scale_b is not None:
            scales = (first_set.scale_b.data_ptr(), first_set.scale_a.data_ptr())
        self._product = library.product(
            transposed=(first_transposed, second_transposed), scales=scales
        )
        first = (k, n) if first_transposed else (n, k)
        second = (m, k) if second_transposed else (k, m)
        self._layouts = (
            library.layout(problem.operation.b, *first, first[0], batch, k * n),
            library.layout(problem.operation.a, *second, second[0], batch, m * k),
            library.layout(problem.operation.d, n, m, n, batch, m * n),
        )
        place = operands.sets[0].d.device
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=place)
        self._one, self._zero = c_float(1.0), c_float(0.0)

    def algorithms(self) -> list[Algorithm]:
        preference = self._library.preference(WORKSPACE_BYTES)
        return self._library.algorithms(
            self._handle, self._product, self._layouts, preference, MOST
        )

    def launch(self, algorithm: Algorithm) -> Launch:
        layout_a, layout_b, layout_d = self._layouts

        def launch(i: int) -> torch.Tensor:
            operands = self._sets[i % len(self._sets)]
            a, b, d = operands.b.data_ptr(), operands.a.data_ptr(), operands.d.data_ptr()
            self._library.call(
                "Matmul",
                *(self._handle, self._product, byref(self._one), a, layout_a, b, layout_b),
                *(byref(self._zero), d, layout_d, d, layout_d, byref(algorithm)),
                *(self._workspace.data_ptr(), WORKSPACE_BYTES),
                self._stream,
            )
            return operands.d

        return launch
