"""Activations and their derivatives as kernels compute them, in FP32 on the host."""

from __future__ import annotations

import ctypes
import subprocess

import pytest
import torch

from gemmsmith.core.activations import ACTIVATIONS, through
from gemmsmith.core.epilogue import Activation
from tests.support.host import INCLUDE

UNIT = """
#include <math.h>
#define __expf expf
#define __fdividef(x, y) ((x) / (y))
#include "gemmsmith/activations.hpp"
template <class Slope>
static void each(long count, const float *x, float *value, float *slope) {
  for (long i = 0; i < count; ++i) {
    gemmsmith::ValueAndSlope found = Slope{}(x[i]);
    value[i] = found.value, slope[i] = found.slope;
  }
}
"""
CUTLASS = {
    "cutlass/cutlass.h": """
#define CUTLASS_DEVICE inline
#define CUTLASS_HOST_DEVICE inline
#define CUTLASS_PRAGMA_UNROLL
""",
    "cutlass/array.h": """
namespace cutlass {
template <class T, int Count> struct Array { T &operator[](int); T const &operator[](int) const; };
template <class T> T fast_exp(T x) { return expf(x); }
}
""",
    "cutlass/epilogue/thread/activation.h": """
namespace cutlass::epilogue::thread {
template <class T> struct GELU;
template <class T> struct GELU_taylor;
}
""",
}
"""What the header needs of CUTLASS; only the derivatives are called."""
FUNCTION = """
extern "C" void {0}(long count, const float *x, float *value, float *slope) {{
  each<gemmsmith::slope::{0}>(count, x, value, slope);
}}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("slopes")
    for name, text in CUTLASS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "unit.cpp").write_text(UNIT + "".join(map(FUNCTION.format, Activation)))
    path = folder / "unit.so"
    options = ["-std=c++17", "-O2", "-shared", "-fPIC", f"-I{folder}", f"-I{INCLUDE}"]
    subprocess.run(["g++", *options, str(folder / "unit.cpp"), "-o", str(path)], check=True)
    return ctypes.CDLL(str(path))


def computed(
    library: ctypes.CDLL, activation: Activation, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    value, slope = torch.empty_like(x), torch.empty_like(x)
    pointers = (ctypes.c_void_p(one.data_ptr()) for one in (x, value, slope))
    getattr(library, activation.value)(ctypes.c_long(len(x)), *pointers)
    return value, slope


@pytest.mark.parametrize("activation", Activation)
def test_both_are_far_within_rounding_to_16_bits(
    library: ctypes.CDLL, activation: Activation
) -> None:
    x = torch.cat([torch.linspace(-30.0, 30.0, 60_001), torch.tensor([-1e4, -300.0, 300.0, 1e4])])
    value, slope = computed(library, activation, x)
    wide = x.double()
    right = through(activation, torch.ones_like(wide), wide)
    torch.testing.assert_close(value.double(), ACTIVATIONS[activation](wide), rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(slope.double(), right, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("activation", Activation)
def test_a_nan_stays_one(library: ctypes.CDLL, activation: Activation) -> None:
    value, slope = computed(library, activation, torch.tensor([float("nan")]))
    assert value.isnan().all()
    assert slope.isnan().all()
