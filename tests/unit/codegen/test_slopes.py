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
template <class T, int Count> struct Array {
  T values[Count];
  T &operator[](int i) { return values[i]; }
  T const &operator[](int i) const { return values[i]; }
};
template <class T> T fast_exp(T x) { return expf(x); }
}
""",
    "cutlass/epilogue/thread/activation.h": """
namespace cutlass::epilogue::thread {
template <class T> struct GELU { T operator()(T const &x) const { return x; } };
template <class T> struct GELU_taylor : GELU<T> {};
}
""",
}
"""What the header needs of CUTLASS, whose own functions are not tested here."""
FUNCTION = """
extern "C" void {0}(long count, const float *x, float *value, float *slope) {{
  each<gemmsmith::slope::{0}>(count, x, value, slope);
}}
extern "C" void {0}_of_arrays(const float *x, float *value) {{
  using Array = cutlass::Array<float, 4>;
  *(Array *)value = gemmsmith::activation::{0}<Array>{{}}(*(Array const *)x);
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


@pytest.mark.parametrize("activation", [a for a in Activation if "gelu" not in a])
def test_a_visitor_applies_it_to_arrays(library: ctypes.CDLL, activation: Activation) -> None:
    x, value = torch.tensor([-2.0, -0.5, 0.0, 3.0]), torch.empty(4)
    pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, value))
    getattr(library, f"{activation}_of_arrays")(*pointers)
    torch.testing.assert_close(value, ACTIVATIONS[activation](x))
