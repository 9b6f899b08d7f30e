/* D = alpha * scale_a * scale_b * acc + beta * C, with FP32 scales on the device (null means 1).
 *
 * One fusion operation, `ScaledLinearCombination`, in the three forms CUTLASS wants it in: a
 * visitor tree for the TMA epilogue, and a thread-level functor for the shared-memory-free
 * epilogue and for CUTLASS 2.x. All cost nothing over plain alpha and beta: the scalars are
 * multiplied once per thread. C is read only where beta is not zero.
 */
#pragma once

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

template <class Epilogue>
void set_scalars(Epilogue& epilogue, gs_arguments const& g) {
  epilogue.alpha = g.alpha;
  epilogue.beta = g.beta;
  if constexpr (TakesScales<Epilogue>::value) {
    epilogue.scale_a_ptr = g.scale_a;
    epilogue.scale_b_ptr = g.scale_b;
  }
}

/* The extras of an operation with this epilogue: scales that it would ignore are refused. */
template <class Epilogue>
constexpr uint32_t kExtrasOf = TakesScales<Epilogue>::value ? uint32_t(kScales) : 0u;

}  // namespace gemmsmith
