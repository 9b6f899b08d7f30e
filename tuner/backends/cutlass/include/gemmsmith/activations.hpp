/* Functions of each element that a visitor tree applies to FP32 values before D is rounded.
 *
 * A NaN stays a NaN, as in torch. exp and tanh are the hardware's approximations (2^-11 of tanh at
 * most, which the rounding of a 16-bit D hides).
 */
#pragma once

#include "cutlass/array.h"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/thread/activation.h"

namespace gemmsmith {

/* The names of `gemmsmith.epilogue.Activation`, in CUTLASS's form: of a value, and of an array. */
template <class T>
struct SiLU {
  CUTLASS_HOST_DEVICE T operator()(T const& x) const {
#if defined(__CUDA_ARCH__)
    return x * __fdividef(1.0f, 1.0f + __expf(-x));
#else
    return x / (T(1) + cutlass::fast_exp(-x));
#endif
  }
};

template <class T>
struct SquaredReLU {
  CUTLASS_HOST_DEVICE T operator()(T const& x) const {
    T positive = x < T(0) ? T(0) : x;
    return positive * positive;
  }
};

/* x/2 · erfc(-x/√2), with erfc by Abramowitz and Stegun's 7.1.26, within 1.5e-7: half of erff's
 * instructions and fewer registers, which erff spills beside large tiles. */
template <class T>
struct GELU {
  CUTLASS_HOST_DEVICE T operator()(T const& x) const {
#if defined(__CUDA_ARCH__)
    float z = fabsf(x) * 0.70710678f;
    float t = __fdividef(1.0f, fmaf(0.3275911f, z, 1.0f));
    float series = fmaf(1.061405429f, t, -1.453152027f);
    series = fmaf(series, t, 1.421413741f);
    series = fmaf(series, t, -0.284496736f);
    series = fmaf(series, t, 0.254829592f);
    float tail = 0.5f * x * (series * t * __expf(-z * z));
    return x < 0.0f ? tail : x - tail;
#else
    return cutlass::epilogue::thread::GELU<T>{}(x);
#endif
  }
};

template <template <class> class Function, class T, int Count>
struct OfEach {
  CUTLASS_HOST_DEVICE cutlass::Array<T, Count> operator()(
      cutlass::Array<T, Count> const& values) const {
    cutlass::Array<T, Count> results;
    Function<T> function;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Count; ++i) results[i] = function(values[i]);
    return results;
  }
};

template <class T, int Count>
struct SiLU<cutlass::Array<T, Count>> : OfEach<SiLU, T, Count> {};

template <class T, int Count>
struct GELU<cutlass::Array<T, Count>> : OfEach<GELU, T, Count> {};

template <class T, int Count>
struct SquaredReLU<cutlass::Array<T, Count>> : OfEach<SquaredReLU, T, Count> {};

template <class T>
using TanhGELU = cutlass::epilogue::thread::GELU_taylor<T>;

template <class T>
using Identity = cutlass::epilogue::thread::Identity<T>;

}  // namespace gemmsmith
