/* The largest absolute value of what a kernel computes, for the scale of a later FP8 output.
 *
 * It is added to the one in memory, so that it covers all launches since the caller zeroed that.
 * Floats that are not negative have the order of their bits, so an integer maximum serves; a NaN is
 * above all of them and stays.
 */
#pragma once

#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/functional.h"
#include "gemmsmith/visitor.hpp"

namespace gemmsmith {

/* One thread's. */
struct Largest {
  float value = 0.0f;

  CUTLASS_DEVICE void see(float each) {
    value = cutlass::maximum<float, true>{}(value, fabsf(each));
  }

  /* One addition to memory for a warp, all of whose threads are here. */
  CUTLASS_DEVICE void leave(float* amax) const {
    unsigned bits = __reduce_max_sync(0xffffffffu, __float_as_uint(value));
    if (threadIdx.x % 32 == 0) atomicMax(reinterpret_cast<int*>(amax), int(bits));
  }
};

struct AmaxArguments {
  float* amax = nullptr; /* null: not wanted */
};

/* A node of a visitor tree that passes its child's values on.
 *
 * CUTLASS's `Sm90ScalarReduction` does the same, but each launch fills the result first, and each
 * thread adds to memory.
 */
template <class CtaTile>
struct Amax : PassiveVisitor<AmaxArguments> {
  struct SharedStorage {};

  CUTLASS_HOST_DEVICE Amax() {}
  CUTLASS_HOST_DEVICE Amax(AmaxArguments const& params, SharedStorage const&) : amax(params.amax) {}

  float* amax = nullptr;

  template <class Coordinates, class Residue>
  struct ConsumerStoreCallbacks : cutlass::epilogue::fusion::EmptyConsumerStoreCallbacks {
    CUTLASS_DEVICE ConsumerStoreCallbacks(Coordinates const& coordinates, Residue const& residue,
                                          bool whole, float* amax)
        : coordinates(coordinates), residue(residue), whole(whole), amax(amax) {}

    Coordinates coordinates; /* (CPY,CPY_M,CPY_N,EPI_M,EPI_N) */
    Residue residue;
    bool whole; /* the tile lies within the problem */
    float* amax;
    Largest largest;

    /* A bias is added beyond the last row or column as well, so those are left out. */
    template <class Accumulator, class Input, int Count>
    CUTLASS_DEVICE auto visit(cutlass::Array<Accumulator, Count> const&, int epi_v, int epi_m,
                              int epi_n, cutlass::Array<Input, Count> const& values) {
      if (amax == nullptr) return values;
      auto at = coordinates(cute::_, cute::_, cute::_, epi_m, epi_n);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Count; ++i) {
        if (whole || cute::elem_less(at(epi_v * Count + i), residue)) {
          largest.see(float(values[i]));
        }
      }
      return values;
    }

    CUTLASS_DEVICE void end() {
      if (amax != nullptr) largest.leave(amax);
    }
  };

  template <bool ReferenceSrc, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(
      cutlass::epilogue::fusion::detail::ConsumerStoreArgs<Args...> const& args) {
    auto last = cute::make_coord(cute::size<0>(CtaTile{}) - cute::_1{},
                                 cute::size<1>(CtaTile{}) - cute::_1{});
    return ConsumerStoreCallbacks<decltype(args.tCcD), decltype(args.residue_tCcD)>(
        args.tCcD, args.residue_tCcD, cute::elem_less(last, args.residue_cD), amax);
  }
};

}  // namespace gemmsmith
