/* Activations with their derivatives, both of an FP32 value at once: they share what is costly.
 *
 * In the logistic form x·σ(z) the derivative needs no tanh, whose approximation by the hardware is
 * too coarse where 1 - tanh² cancels. exp and division are the hardware's, within 2^-21.
 */
#pragma once

#include "cutlass/cutlass.h"

namespace gemmsmith {

struct ValueAndSlope {
  float value, slope;
};

/* x·σ(z(x)), whose derivative is σ + x·z'·σ·(1 - σ). */
CUTLASS_DEVICE ValueAndSlope logistic(float x, float z, float dz) {
  float sigmoid = __fdividef(1.0f, 1.0f + __expf(-z));
  float value = x * sigmoid;
  return {value, fmaf(value * dz, 1.0f - sigmoid, sigmoid)};
}

struct SiLUSlope {
  CUTLASS_DEVICE ValueAndSlope operator()(float x) const { return logistic(x, x, 1.0f); }
};

/* 1 + tanh(u) is 2·σ(2u), and u is √(2/π)·(x + 0.044715·x³). */
struct TanhGELUSlope {
  CUTLASS_DEVICE ValueAndSlope operator()(float x) const {
    constexpr float kLinear = 1.5957691216f, kCubic = 0.0713548162726f;
    float square = x * x;
    return logistic(x, x * fmaf(kCubic, square, kLinear), fmaf(3.0f * kCubic, square, kLinear));
  }
};

/* x·Φ(x), with Φ as in `GELU` (activations.hpp); its derivative is Φ + x·φ. */
struct GELUSlope {
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

struct SquaredReLUSlope {
  CUTLASS_DEVICE ValueAndSlope operator()(float x) const {
    float positive = x < 0.0f ? 0.0f : x;
    return {positive * positive, 2.0f * positive};
  }
};

}  // namespace gemmsmith
