/* What every kernel asks of its operands, checked on the host before anything is launched.
 *
 * CUTLASS checks the extents only. A TMA descriptor also needs aligned addresses, leading
 * dimensions and batch strides; one that cannot be encoded would otherwise be launched with.
 */
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"
#include "gemmsmith/abi.h"
#include "gemmsmith/arguments.hpp"

namespace gemmsmith {

constexpr int32_t status_code(cutlass::Status status) { return static_cast<int32_t>(status); }
constexpr int32_t status_code(cudaError_t error) {
  return error == cudaSuccess ? 0 : 1000 + static_cast<int32_t>(error);
}

/* One operand in the problem's orientation: `rows` contiguous runs of `extent` elements. */
struct Operand {
  const void* data;
  int64_t rows, extent;
  int64_t leading, batch_stride;
  int alignment, element_bytes;

  /* The stride between rows. A single row has none, whatever its tensor says; TMA wants one that
   * it could read with all the same. */
  int64_t row_stride() const {
    return rows > 1 ? leading : (extent + alignment - 1) / alignment * alignment;
  }

  cutlass::Status check(int32_t batch) const {
    /* TMA holds byte strides below 2^40; no allocation comes near. */
    constexpr int64_t kLargestStride = int64_t(1) << 36;
    if (row_stride() < extent || row_stride() > kLargestStride) {
      return cutlass::Status::kErrorInvalidLayout;
    }
    bool aligned = reinterpret_cast<uintptr_t>(data) % (alignment * element_bytes) == 0 &&
                   extent % alignment == 0 && row_stride() % alignment == 0;
    if (batch > 1) {
      if (batch_stride < 0 || batch_stride > kLargestStride) {
        return cutlass::Status::kErrorInvalidLayout;
      }
      aligned = aligned && batch_stride % alignment == 0;
    }
    return aligned ? cutlass::Status::kSuccess : cutlass::Status::kErrorMisalignedOperand;
  }
};

/* What a kernel was compiled for, in the problem's orientation. */
template <bool ARowMajor_, bool BRowMajor_, int AlignmentA_, int AlignmentB_, int AlignmentD_>
struct Traits {
  static constexpr bool ARowMajor = ARowMajor_;
  static constexpr bool BRowMajor = BRowMajor_;
  static constexpr int AlignmentA = AlignmentA_;
  static constexpr int AlignmentB = AlignmentB_;
  static constexpr int AlignmentD = AlignmentD_;
};

/* D has half of the product's columns where the other half gates them. */
inline int32_t columns_of_d(gs_arguments const& g) { return g.b_up ? g.n / 2 : g.n; }

template <class Traits, class ElementA, class ElementB, class ElementD>
struct Operands {
  Operand a, b, c, d;

  /* C stands in for D where beta is zero, so that no kernel depends on a C it never reads. */
  explicit Operands(gs_arguments const& g)
      : a{g.a, Traits::ARowMajor ? g.m : g.k, Traits::ARowMajor ? g.k : g.m,
          g.lda, g.batch_stride_a, Traits::AlignmentA, int(sizeof(ElementA))},
        b{g.b, Traits::BRowMajor ? g.k : g.n, Traits::BRowMajor ? g.n : g.k,
          g.ldb, g.batch_stride_b, Traits::AlignmentB, int(sizeof(ElementB))},
        c{g.c, g.m, columns_of_d(g), g.ldc, g.batch_stride_c, Traits::AlignmentD, int(sizeof(ElementD))},
        d{g.d, g.m, columns_of_d(g), g.ldd, g.batch_stride_d, Traits::AlignmentD, int(sizeof(ElementD))} {
    if (g.beta == 0.0f) c = d;
  }

  cutlass::Status check(int32_t batch) const {
    for (Operand const* operand : {&a, &b, &c, &d}) {
      cutlass::Status status = operand->check(batch);
      if (status != cutlass::Status::kSuccess) return status;
    }
    /* Batches of D on top of each other would be a race. */
    return batch > 1 && d.batch_stride == 0 ? cutlass::Status::kErrorInvalidLayout
                                            : cutlass::Status::kSuccess;
  }
};

/* Arguments that no kernel can compute, or not one whose operation has only these extras. */
inline cutlass::Status check_problem(gs_arguments const& g, uint32_t allowed) {
  bool positive = g.m > 0 && g.n > 0 && g.k > 0 && g.batch > 0 && g.sm_count > 0;
  bool launchable = g.splits > 0 && g.swizzle > 0 && g.device >= 0 && g.raster_order >= 0 &&
                    g.raster_order <= 2 && g.decomposition >= 0 && g.decomposition <= 3;
  if (!positive || !launchable) return cutlass::Status::kErrorInvalidProblem;
  return takes_only(g, allowed) ? cutlass::Status::kSuccess : cutlass::Status::kErrorNotSupported;
}

}  // namespace gemmsmith
