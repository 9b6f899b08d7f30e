"""The backend: which kernels there are, how each is launched, and how it is compiled."""

from itertools import product
from pathlib import Path

from gemmsmith.core.kernel import PluginKernel
from gemmsmith.core.operation import Operation
from tuner.backends.plugin import cubin
from tuner.backends.plugin.backend import PluginBackend

TYPES = {Operation.of("bf16", "tn"): "*bf16", Operation.of("fp16", "tn"): "*fp16"}
TILES = ((64, 64, 64), (64, 128, 64), (128, 64, 64), (128, 128, 64), (128, 256, 64))
# The kernel's parameters, and their values from a launch's `gs_arguments`.
VALUES = {name: f"g.{name}" for name in (*"abcdmnk", "alpha", "beta")}
VALUES |= {"row_a": "g.lda", "column_b": "g.ldb", "row_c": "g.ldc", "row_d": "g.ldd"}
VALUES |= {f"batch_{name}": f"g.batch_stride_{name}" for name in "abcd"}


class Triton(PluginBackend):
    name = "triton"

    def listed(self, operation, arch):
        if operation not in TYPES or arch.name != "sm90":
            return []
        return [
            PluginKernel(
                name=f"triton_{operation.dtype}_tn_{'x'.join(map(str, tile))}_{stages}",
                plugin="triton", arch="sm90", dtype=operation.dtype, layout=operation.layout,
                alignment_a=16, alignment_b=16, alignment_d=16, tile=tile,
                traits=(("num_stages", stages), ("num_warps", 8 if tile[1] > 64 else 4)),
            )
            for tile, stages in product(TILES, (3, 4))
        ]  # fmt: skip

    def part(self, kernel):
        sources = Path(__file__).with_name("kernel.py").read_text(), Path(__file__).read_text()
        grid = (f"tiles(g.m, {kernel.tile[0]}) * tiles(g.n, {kernel.tile[1]})", "1", "g.batch")
        takes = "g.n % 16 == 0 && g.k % 16 == 0"
        return cubin.part(kernel, origin=(cubin.installed("triton"), *sources), grid=grid,
                          parameters=[*VALUES.values()], takes=takes)  # fmt: skip

    def files(self, kernel):
        from triton import compiler
        from triton.backends.compiler import GPUTarget

        from triton_backend.kernel import matmul

        types = dict.fromkeys(VALUES, "i64") | dict.fromkeys("abcd", TYPES[kernel.operation])
        types |= dict.fromkeys("mnk", "i32") | dict.fromkeys(("alpha", "beta"), "fp32")
        # The alignment and `takes` promise that all but these are multiples of 16.
        whole = [i for i, name in enumerate(types) if name not in {"m", "alpha", "beta"}]
        whole = {(i,): [["tt.divisibility", 16]] for i in whole}
        tile = dict(zip(("tile_m", "tile_n", "tile_k"), kernel.tile, strict=True))
        source = compiler.ASTSource(matmul, types | dict.fromkeys(tile, "constexpr"), tile, whole)
        made = compiler.compile(source, GPUTarget("cuda", 90, 32), dict(kernel.traits))
        return cubin.files(kernel, made.asm["cubin"], function=made.metadata.name,
            threads=32 * made.metadata.num_warps, shared_bytes=made.metadata.shared)  # fmt: skip


BACKEND = Triton()
