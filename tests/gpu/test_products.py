"""torch's own operators with a patch block around them, on a GPU: with winners and without.

The winners are cuBLASLt's own first proposals, which need no compiler. These run in this very
process: the library's kernels are not expected to crash it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gemmsmith.core.config import Config
from gemmsmith.core.problem import Problem
from gemmsmith.runtime import LoadedPack
from tests.support.host_pack import build
from tuner.backends.cublaslt.algorithms import candidates, kernel_for
from tuner.backends.cublaslt.proposals import propose, shape_of

torch = pytest.importorskip("torch")
gemmsmith = pytest.importorskip("gemmsmith")
engine = pytest.importorskip("gemmsmith.ops.engine.engine")
in_use = pytest.importorskip("gemmsmith.ops.engine.in_use")
stand_in = pytest.importorskip("tests.support.stand_in")

M, N, K = 64, 96, 128
PACK = "a" * 64


class Library:
    """Answers every product by the first thing that cuBLASLt proposes."""

    def __init__(self, path: Path) -> None:
        self.pack = LoadedPack.open(path)
        self.asked: list[str] = []
        self.answers = True
        major, minor = torch.cuda.get_device_capability()
        self.arch = f"sm{major}{minor}"
        self.sm_count = torch.cuda.get_device_properties(0).multi_processor_count

    def lookup(self, dtype: str, layout: Any, m: int, n: int, k: int, batch: int = 1) -> Any:
        self.asked.append(dtype)
        problem = Problem(m=m, n=n, k=k, batch=batch, dtype=dtype, layout=layout)
        kernel = kernel_for(problem, self.arch) if self.answers else None
        if kernel is None:
            return None
        arguments = shape_of(problem, 0, self.sm_count)
        found = candidates(kernel, propose(self.pack.kernel(kernel.name), arguments))
        if not found:
            return None
        config = Config(kernel=kernel, launch=found[0].launch, pack=PACK)
        return stand_in.Choice(config)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.zeros(1, device="cuda")  # torch brings its cuBLAS
    made = tmp_path_factory.mktemp("cublaslt") / "pack.so"
    build(made)
    return made


@pytest.fixture
def library(path: Path) -> Iterator[Library]:
    torch.manual_seed(20261123)
    chooser = Library(path)
    before = in_use.install(engine.Engine(chooser, stand_in.Packs(path)))
    yield chooser
    in_use.install(before)


def randn(*size: int) -> Any:
    return torch.randn(size, device="cuda").bfloat16()


def ints(*size: int) -> Any:
    return torch.randint(-128, 128, size, device="cuda", dtype=torch.int8)


def added(add: Callable[..., Any], *size: int, **factors: float) -> Any:
    *batch, m, k, n = size
    start = torch.ones(*batch, m, n, device="cuda")
    a, b = randn(*batch, m, k), randn(*batch, k, n)
    new = add(start, a, b, out_dtype=torch.float32, **factors)
    add(start, a, b, out_dtype=torch.float32, out=start, **factors)
    assert torch.equal(new, start)
    return start


def in_tf32() -> Any:
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        return in_fp32()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def in_fp32() -> Any:
    return torch.randn(M, K, device="cuda") @ torch.randn(N, K, device="cuda").t()


def main_grad() -> Any:
    total = torch.ones(N, K, device="cuda")
    weight = randn(N, K).requires_grad_()
    gemmsmith.linear(randn(M, K), weight, main_grad=total).backward(randn(M, N))
    return total


def scaled(by_rows: bool) -> Any:
    a, b = (torch.randn(size, K, device="cuda").to(torch.float8_e4m3fn) for size in (M, N))
    sizes = ((M, 1), (1, N)) if by_rows else ((1,), (1,))
    scales = (torch.rand(size, device="cuda") + 0.5 for size in sizes)
    return torch._scaled_mm(a, b.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=True)


F32 = torch.float32
CALLS: dict[str, tuple[Callable[[], Any], str | None]] = {
    "mm": (lambda: randn(M, K) @ randn(N, K).t(), "bf16"),
    "_int_mm": (lambda: torch._int_mm(ints(M, K), ints(N, K).t()), "int8"),
    "mm.dtype": (lambda: torch.mm(randn(M, K), randn(K, N), out_dtype=F32), "bf16.out_f32"),
    "bmm.dtype": (
        lambda: torch.bmm(randn(3, M, K), randn(3, K, N), out_dtype=F32),
        "bf16.out_f32",
    ),
    "addmm.dtype": (lambda: added(torch.addmm, M, K, N), "bf16.out_f32.accumulate"),
    "baddbmm.dtype": (lambda: added(torch.baddbmm, 3, M, K, N), "bf16.out_f32.accumulate"),
    "addmm.dtype with beta": (lambda: added(torch.addmm, M, K, N, beta=0.5), None),
    "tf32": (in_tf32, "tf32"),
    "fp32": (in_fp32, None),
    "main_grad": (main_grad, "bf16.out_f32.accumulate"),
    "_scaled_mm": (lambda: scaled(False), "fp8_e4m3"),
    "_scaled_mm by rows": (lambda: scaled(True), "fp8_e4m3.scale_row"),
}


@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.parametrize("name", list(CALLS))
def test_a_call_gives_what_torchs_gives(library: Library, name: str, answers: bool) -> None:
    library.answers = answers
    call, dtype = CALLS[name]
    in_use.install(None)
    torch.manual_seed(1)
    expected = call()
    in_use.install(engine.Engine(library, stand_in.Packs(Path(library.pack.path))))
    torch.manual_seed(1)
    with gemmsmith.patch():
        found = call()
    if not answers or dtype is None or not found.is_floating_point():
        assert torch.equal(found, expected)
    else:
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-1)
    assert dtype is None or dtype in library.asked
    assert dtype is not None or not library.asked


def test_int_mm_refuses_what_torch_refuses(library: Library) -> None:
    library.answers = False
    with gemmsmith.patch(), pytest.raises(RuntimeError, match="needs to be greater than 16"):
        torch._int_mm(ints(4, K), ints(N, K).t())


@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (4, 8, 24), (17, 7, 30), (M, N, K)])
def test_int8_takes_every_size(library: Library, m: int, n: int, k: int, answers: bool) -> None:
    library.answers = answers
    a, b = ints(m, k), ints(n, k).t()
    exact = a.double() @ b.double()
    sums = gemmsmith.int8_mm(a, b, out_dtype=torch.int32)
    assert torch.equal(sums.double(), exact)
    rows, columns = torch.rand(m, 1, device="cuda"), torch.rand(1, n, device="cuda")
    out = gemmsmith.int8_mm(a, b, scale_a=rows, scale_b=columns)
    torch.testing.assert_close(out.double(), exact * rows * columns, rtol=2**-7, atol=1e-3)
