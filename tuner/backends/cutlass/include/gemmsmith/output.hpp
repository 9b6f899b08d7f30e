/* D = alpha * scale_a * scale_b * sum + beta * C for our own kernels, four elements at a time.
 *
 * Sums are FP32 or 32-bit integers; integers become D in integers, exactly, or else FP32 first.
 * D and C are row-major, in the problem's orientation. Any alignment and any N: four neighbours
 * leave in one store where they are whole and aligned, else one by one.
 */
#pragma once

#include "cutlass/cutlass.h"
#include "cutlass/numeric_conversion.h"
#include "gemmsmith/abi.h"
#include "gemmsmith/operands.hpp"

namespace gemmsmith {

/* Four sums in a row. */
template <class Sum>
using Quad = std::conditional_t<std::is_integral_v<Sum>, int4, float4>;

/* The sum of `load(0)` … `load(count - 1)`, added in this order. Loads are issued in batches before
 * the first is waited for: each takes hundreds of clocks, and a thread has few of them. */
template <class Quad, class Load>
CUTLASS_DEVICE Quad sum_in_order(int32_t count, Load load) {
  constexpr int kBatch = 8;
  Quad sum = {0, 0, 0, 0};
  for (int32_t first = 0; first < count; first += kBatch) {
    Quad each[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      each[i] = first + i < count ? load(first + i) : Quad{0, 0, 0, 0};
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      sum.x += each[i].x;
      sum.y += each[i].y;
      sum.z += each[i].z;
      sum.w += each[i].w;
    }
  }
  return sum;
}

/* With `RowScales` there is a factor for each row in scale_a, and for each column in scale_b. */
template <class ElementD, bool RowScales = false>
struct Output {
  using Value = std::conditional_t<std::is_integral_v<ElementD>, int32_t, float>;

  ElementD* d;
  ElementD const* c; /* null where beta is zero */
  float const* scale_a;
  float const* scale_b;
  int64_t ldc, ldd;
  int32_t m, n;
  float alpha, beta;
  bool vectors; /* rows of D and C start where four elements can be moved at once */

  Output() = default;

  template <class ProblemOperands>
  Output(gs_arguments const& g, ProblemOperands const& operands)
      : d(static_cast<ElementD*>(g.d)),
        c(g.beta != 0.0f ? static_cast<ElementD const*>(g.c) : nullptr),
        scale_a(g.scale_a),
        scale_b(g.scale_b),
        ldc(operands.c.row_stride()),
        ldd(operands.d.row_stride()),
        m(g.m),
        n(g.n),
        alpha(g.alpha),
        beta(g.beta),
        vectors(in_vectors(operands.d) && (c == nullptr || in_vectors(operands.c))) {}

  /* The factor of every sum; one read of each scale. */
  CUTLASS_DEVICE Value factor() const {
    auto product = static_cast<Value>(alpha);
    if constexpr (!RowScales && std::is_same_v<Value, float>) {
      if (scale_a) product *= *scale_a;
      if (scale_b) product *= *scale_b;
    }
    return product;
  }

  template <class Quad>
  CUTLASS_DEVICE void store(int32_t row, int32_t column, Quad sum, Value factor) const {
    if (row >= m || column >= n) return;
    using Four = cutlass::Array<ElementD, 4>;
    if constexpr (RowScales) factor *= scale_a[row];
    Value values[4] = {Value(sum.x) * factor, Value(sum.y) * factor, Value(sum.z) * factor,
                       Value(sum.w) * factor};
    if constexpr (RowScales) {
      for (int i = 0; i < 4 && column + i < n; ++i) values[i] *= scale_b[column + i];
    }
    ElementD* to = d + row * ldd + column;
    ElementD const* from = c ? c + row * ldc + column : nullptr;
    if (vectors && column + 4 <= n) {
      if (from) {
        Four source = *reinterpret_cast<Four const*>(from);
        for (int i = 0; i < 4; ++i) values[i] += Value(beta) * static_cast<Value>(source[i]);
      }
      Four result;
      for (int i = 0; i < 4; ++i) result[i] = static_cast<ElementD>(values[i]);
      *reinterpret_cast<Four*>(to) = result;
      return;
    }
    for (int i = 0; i < 4 && column + i < n; ++i) {
      Value value = values[i];
      if (from) value += Value(beta) * static_cast<Value>(from[i]);
      to[i] = static_cast<ElementD>(value);
    }
  }

 private:
  static bool in_vectors(Operand const& operand) {
    return reinterpret_cast<uintptr_t>(operand.data) % (4 * sizeof(ElementD)) == 0 &&
           operand.row_stride() % 4 == 0;
  }
};

}  // namespace gemmsmith
