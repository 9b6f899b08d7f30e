/* D = alpha * scale_a * scale_b * acc + beta * C, with FP32 scales on the device (null means 1).
 *
 * One fusion operation, `ScaledLinearCombination`, in the three forms CUTLASS wants it in: a
 * visitor tree for the TMA epilogue, and a thread-level functor for the shared-memory-free
 * epilogue and for CUTLASS 2.x. All cost nothing over plain alpha and beta: the scalars are
 * multiplied once per thread. C is read only where beta is not zero.
 */
#pragma once

#include <initializer_list>
#include <type_traits>

#include "cutlass/cutlass.h"
#include "cutlass/epilogue/thread/linear_combination.h"
#include "gemmsmith/abi.h"
#include "gemmsmith/arguments.hpp"

namespace gemmsmith::thread {

/* CUTLASS's linear combination, its alpha multiplied by the two scales when it is constructed. */
template <class ElementD, int Count, class ElementAccumulator, class ElementCompute>
class ScaledLinearCombination
    : public cutlass::epilogue::thread::LinearCombination<ElementD, Count, ElementAccumulator,
                                                          ElementCompute> {
  using Base = cutlass::epilogue::thread::LinearCombination<ElementD, Count, ElementAccumulator,
                                                            ElementCompute>;

 public:
  struct Params {
    ElementCompute alpha = ElementCompute(1);
    ElementCompute beta = ElementCompute(0);
    ElementCompute const* scale_a_ptr = nullptr;
    ElementCompute const* scale_b_ptr = nullptr;
  };

  CUTLASS_HOST_DEVICE
  explicit ScaledLinearCombination(Params const& params)
      : Base(typename Base::Params(params.alpha * scale(params.scale_a_ptr) *
                                       scale(params.scale_b_ptr),
                                   params.beta)) {}

 private:
  CUTLASS_HOST_DEVICE
  static ElementCompute scale(ElementCompute const* pointer) {
    return pointer ? *pointer : ElementCompute(1);
  }
};

}  // namespace gemmsmith::thread

namespace gemmsmith {

/* Copies the scalars into the arguments of whichever epilogue the kernel has. */
template <class Epilogue, class = void>
struct TakesScales : std::false_type {};
template <class Epilogue>
struct TakesScales<Epilogue, std::void_t<decltype(Epilogue::scale_a_ptr)>> : std::true_type {};

template <class Epilogue, class = void>
struct TakesRowScales : std::false_type {};
template <class Epilogue>
struct TakesRowScales<Epilogue, std::void_t<decltype(Epilogue::scale_m_ptr)>> : std::true_type {};

/* A swapped kernel's rows are the problem's columns. */
template <bool Swapped = false, class Epilogue>
void set_scalars(Epilogue& epilogue, gs_arguments const& g) {
  epilogue.alpha = static_cast<decltype(epilogue.alpha)>(g.alpha);
  epilogue.beta = static_cast<decltype(epilogue.beta)>(g.beta);
  if constexpr (TakesScales<Epilogue>::value) {
    epilogue.scale_a_ptr = g.scale_a;
    epilogue.scale_b_ptr = g.scale_b;
  }
  if constexpr (TakesRowScales<Epilogue>::value) {
    int64_t stride_a = g.batch > 1 ? g.batch_stride_scale_a : 0;
    int64_t stride_b = g.batch > 1 ? g.batch_stride_scale_b : 0;
    epilogue.scale_m_ptr = Swapped ? g.scale_b : g.scale_a;
    epilogue.scale_n_ptr = Swapped ? g.scale_a : g.scale_b;
    epilogue.batch_stride_scale_m = Swapped ? stride_b : stride_a;
    epilogue.batch_stride_scale_n = Swapped ? stride_a : stride_b;
  }
}

/* The extras of an operation with this epilogue: scales that it would ignore are refused. */
template <class Epilogue>
constexpr uint32_t kExtrasOf = TakesRowScales<Epilogue>::value ? uint32_t(kRowScales)
                               : TakesScales<Epilogue>::value  ? uint32_t(kScales)
                                                               : 0u;

/* Whether the factors are there that the operation has, one for each row and column. */
inline bool has_row_scales(gs_arguments const& g) {
  return g.scaling == GS_SCALING_ROW && g.scale_a && g.scale_b && g.batch_stride_scale_a >= 0 &&
         g.batch_stride_scale_b >= 0;
}

/* Whether alpha and beta are what an epilogue of `Scalar` computes with: whole, for integers. */
template <class Scalar>
bool takes_scalars(gs_arguments const& g) {
  if constexpr (std::is_integral_v<Scalar>) {
    for (float value : {g.alpha, g.beta}) {
      if (!(value >= -16777216.0f && value <= 16777216.0f)) return false;
      if (value != static_cast<float>(static_cast<int32_t>(value))) return false;
    }
  }
  return true;
}

}  // namespace gemmsmith
