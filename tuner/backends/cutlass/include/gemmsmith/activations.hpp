/* Functions of each element that epilogues apply to FP32 values before D is rounded, and the same
 * with their derivatives. Python names them as `gemmsmith.core.epilogue.Activation` does:
 * `activation::silu`, `slope::silu`.
 *
 * A NaN stays a NaN, as in torch. exp and tanh are the hardware's approximations (2^-11 of tanh at
 * most, which the rounding of a 16-bit D hides).
 */
#pragma once

#include "cutlass/array.h"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/thread/activation.h"

namespace gemmsmith {

/* In CUTLASS's form: of a value, and of an array. */
namespace activation {

template <class T>
struct silu {
  CUTLASS_HOST_DEVICE T operator()(T const& x) const {
#if defined(__CUDA_ARCH__)
    return x * __fdividef(1.0f, 1.0f + __expf(-x));
#else
    return x / (T(1) + cutlass::fast_exp(-x));
#endif
  }
};

template <class T>
struct relu2 {
  CUTLASS_HOST_DEVICE T operator()(T const& x) const {
    T positive = x < T(0) ? T(0) : x;
    return positive * positive;
  }
};

template <class T>
struct relu {
  CUTLASS_HOST_DEVICE T operator()(T const& x) const { return x < T(0) ? T(0) : x; }
};

template <class T>
struct sigmoid {
  CUTLASS_HOST_DEVICE T operator()(T const& x) const {
#if defined(__CUDA_ARCH__)
    return __fdividef(1.0f, 1.0f + __expf(-x));
#else
    return T(1) / (T(1) + cutlass::fast_exp(-x));
#endif
  }
};

/* x/2 · erfc(-x/√2), with erfc by Abramowitz and Stegun's 7.1.26, within 1.5e-7: half of erff's
 * instructions and fewer registers, which erff spills beside large tiles. */
template <class T>
struct gelu {
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
struct silu<cutlass::Array<T, Count>> : OfEach<silu, T, Count> {};

template <class T, int Count>
struct gelu<cutlass::Array<T, Count>> : OfEach<gelu, T, Count> {};

template <class T, int Count>
struct relu2<cutlass::Array<T, Count>> : OfEach<relu2, T, Count> {};

template <class T, int Count>
struct relu<cutlass::Array<T, Count>> : OfEach<relu, T, Count> {};

template <class T, int Count>
struct sigmoid<cutlass::Array<T, Count>> : OfEach<sigmoid, T, Count> {};

template <class T>
using gelu_tanh = cutlass::epilogue::thread::GELU_taylor<T>;

}  // namespace activation

/* Both of an FP32 value at once: they share what is costly.
 *
 * In the logistic form x·σ(z) the derivative needs no tanh, whose approximation by the hardware is
 * too coarse where 1 - tanh² cancels. exp and division are the hardware's, within 2^-21.
 */
namespace slope {

struct ValueAndSlope {
  float value, slope;
};

/* x·σ(z(x)), whose derivative is σ + x·z'·σ·(1 - σ). */
CUTLASS_DEVICE ValueAndSlope logistic(float x, float z, float dz) {
  float sigmoid = __fdividef(1.0f, 1.0f + __expf(-z));
  float value = x * sigmoid;
  return {value, fmaf(value * dz, 1.0f - sigmoid, sigmoid)};
}

struct silu {
  CUTLASS_DEVICE ValueAndSlope operator()(float x) const { return logistic(x, x, 1.0f); }
};

/* 1 + tanh(u) is 2·σ(2u), and u is √(2/π)·(x + 0.044715·x³). */
struct gelu_tanh {
  CUTLASS_DEVICE ValueAndSlope operator()(float x) const {
    constexpr float kLinear = 1.5957691216f, kCubic = 0.0713548162726f;
    float square = x * x;
    return logistic(x, x * fmaf(kCubic, square, kLinear), fmaf(3.0f * kCubic, square, kLinear));
  }
};

/* x·Φ(x), with Φ as in `activation::gelu`; its derivative is Φ + x·φ. */
struct gelu {
  CUTLASS_DEVICE ValueAndSlope operator()(float x) const {
    float z = fabsf(x) * 0.70710678f;
    float t = __fdividef(1.0f, fmaf(0.3275911f, z, 1.0f));
    float series = fmaf(1.061405429f, t, -1.453152027f);
    series = fmaf(series, t, 1.421413741f);
    series = fmaf(series, t, -0.284496736f);
    series = fmaf(series, t, 0.254829592f);
    float bell = __expf(-z * z);
    float tail = 0.5f * series * t * bell;
    float below = x < 0.0f ? tail : 1.0f - tail;
    return {x * below, fmaf(x, 0.39894228f * bell, below)};
  }
};

struct relu2 {
  CUTLASS_DEVICE ValueAndSlope operator()(float x) const {
    float positive = x < 0.0f ? 0.0f : x;
    return {positive * positive, 2.0f * positive};
  }
};

struct relu {
  CUTLASS_DEVICE ValueAndSlope operator()(float x) const {
    return {x < 0.0f ? 0.0f : x, x > 0.0f ? 1.0f : x == x ? 0.0f : x};
  }
};

struct sigmoid {
  CUTLASS_DEVICE ValueAndSlope operator()(float x) const {
    float value = __fdividef(1.0f, 1.0f + __expf(-x));
    return {value, value * (1.0f - value)};
  }
};

}  // namespace slope

using slope::ValueAndSlope;

}  // namespace gemmsmith
