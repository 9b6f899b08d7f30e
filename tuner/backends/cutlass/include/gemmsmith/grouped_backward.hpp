/* Grouped products (grouped.hpp) of the backward pass of a layer of experts: P = dY·W becomes the
 * gradient of gate and up, which the forward pass stored side by side.
 *
 *   aux            [tokens, 2N], gate | up
 *   D              [tokens, 2N] = r * P * up * act'(gate) | r * P * act(gate)
 *   activated      [tokens, N] = r * act(gate) * up, on demand
 *   row_gradient   [tokens, slabs of 64 columns], FP32 = sums of P * act(gate) * up, on demand
 *
 * r is a token's factor, or 1; a token's sums add up to the gradient of r. FP32 throughout; rounded
 * once. Every sum is made in one order.
 */
#pragma once

#include <numeric>

#include "gemmsmith/activations.hpp"
#include "gemmsmith/grouped.hpp"

namespace gemmsmith {

/* Stages a part of P in FP32, and takes it from there by eight columns a thread, so that gate and up
 * are read, and the results stored, by 16 bytes a thread and whole rows. Rows beyond the group's
 * last token are neither read nor stored. */
template <class Mainloop, class ElementD, bool Swapped, class Slope, bool Activated>
struct BackwardGateStore : GroupedTileShape<Mainloop, Swapped> {
  using Element = ElementD;
  using Shape = GroupedTileShape<Mainloop, Swapped>;
  using typename Shape::TileShape;
  using Shape::kColumns, Shape::kConsumers, Shape::kTileN, Shape::kTokens;
  static_assert(sizeof(ElementD) == 2, "matrices are moved as vectors of eight");

  static constexpr uint32_t kExtras = uint32_t(kAux) | uint32_t(kRowFactors) |
                                      uint32_t(kRowGradient) |
                                      (Activated ? uint32_t(kActivated) : 0u);
  static constexpr int kSlab = GS_ROW_GRADIENT_COLUMNS;
  static_assert(kColumns % kSlab == 0, "whole slabs are summed");

  /* A part is as many of the kernel's columns: tokens where it is swapped, else a slab. */
  static constexpr int kPart = Swapped ? std::gcd(kTileN, 32) : kSlab;
  static constexpr int kPartTokens = Swapped ? kPart : kTokens;
  static constexpr int kPartColumns = Swapped ? kColumns : kPart;
  /* Keeps what a warp writes at once off each other's banks. */
  static constexpr int kPitch = kPartColumns + (Swapped ? 4 : 8);
  static constexpr int kStaged = kPartTokens * kPitch * int(sizeof(float) / sizeof(ElementD));

  static constexpr int kInRow = kPartColumns / 8;            /* vectors */
  static constexpr int kRowsAtOnce = kConsumers / kInRow;    /* by all threads */
  static constexpr int kAhead = std::clamp(kPartTokens / kRowsAtOnce, 1, 4); /* loaded at once */

  struct Params {
    float const* row_scale; /* [tokens], or null */
    float* row_gradient;    /* [tokens, slabs], or null */
    ElementD const* aux;
    ElementD* d;
    ElementD* activated;
    int64_t ld_aux, ldd, ld_activated;
    int32_t tokens, columns, slabs; /* of a half */
  };

  static Params params(gs_arguments const& g, int64_t) {
    return {g.row_scale,
            g.row_gradient,
            static_cast<ElementD const*>(g.aux),
            static_cast<ElementD*>(g.d),
            static_cast<ElementD*>(g.activated),
            both(g, g.aux, g.ld_aux).row_stride(),
            both(g, g.d, g.ldd).row_stride(),
            activated(g).row_stride(),
            g.m,
            g.n,
            (g.n + kSlab - 1) / kSlab};
  }

  static cutlass::Status check(gs_arguments const& g) {
    using cutlass::Status;
    if (!g.aux || (Activated && !g.activated)) return Status::kErrorInvalidProblem;
    bool aligned = reinterpret_cast<uintptr_t>(g.row_scale) % sizeof(float) == 0 &&
                   reinterpret_cast<uintptr_t>(g.row_gradient) % sizeof(float) == 0 &&
                   g.n % 8 == 0;
    if (!aligned) return Status::kErrorMisalignedOperand;
    Status status = both(g, g.aux, g.ld_aux).check(1);
    if (status == Status::kSuccess) status = both(g, g.d, g.ldd).check(1);
    if (status == Status::kSuccess && Activated) status = activated(g).check(1);
    return status;
  }

  template <class Thread, class Sums>
  CUTLASS_DEVICE static void store(Params const& params, ElementD* staged, uint32_t math, uint32_t,
                                   Thread const& thread, Sums& sums, GroupedTile const& tile) {
    using namespace cute;
    static_assert(size<2>(Sums{}) == 1, "one instruction spans tile N");
    auto part = reinterpret_cast<float*>(staged);
    int own = static_cast<int>(threadIdx.x) % kConsumers;
    int own_row = own / kInRow, own_column = own % kInRow * 8;
    CUTLASS_PRAGMA_UNROLL
    for (int step = 0; step < kTileN; step += kPart) {
      cutlass::arch::NamedBarrier::sync(kConsumers, math); /* all have read the part before */
      stage(part, thread, sums, step);
      cutlass::arch::NamedBarrier::sync(kConsumers, math);
      int column = tile.column + (Swapped ? 0 : step) + own_column;
      bool is_column = own < kRowsAtOnce * kInRow && column < params.columns;
      int rows = min(tile.tokens - (Swapped ? step : 0), kPartTokens);
      auto token = tile.token + (Swapped ? step : 0);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int first = 0; first < rows; first += kAhead * kRowsAtOnce) {
        uint4 gate[kAhead], up[kAhead];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kAhead; ++i) {
          int row = first + i * kRowsAtOnce + own_row;
          gate[i] = up[i] = uint4{0, 0, 0, 0};
          if (is_column && row < rows) {
            auto from = params.aux + (token + row) * params.ld_aux + column;
            gate[i] = *reinterpret_cast<uint4 const*>(from);
            up[i] = *reinterpret_cast<uint4 const*>(from + params.columns);
          }
        }
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kAhead; ++i) {
          int row = first + i * kRowsAtOnce + own_row;
          bool is_there = is_column && row < rows;
          differentiate(params, part + (is_there ? row : 0) * kPitch + own_column, gate[i],
                        up[i], token + row, column, is_there);
        }
      }
    }
    clear(sums); /* the mainloop's fence reads them: until then their registers are free */
  }

 private:
  using Eight = cutlass::Array<ElementD, 8>;

  /* Eight columns of a token. The eight lanes that have a slab of it add what each has of its sum. */
  CUTLASS_DEVICE static void differentiate(Params const& params, float const* part,
                                           uint4 const& packed_gate, uint4 const& packed_up,
                                           int64_t token, int32_t column, bool is_there) {
    auto const& gate = reinterpret_cast<Eight const&>(packed_gate);
    auto const& up = reinterpret_cast<Eight const&>(packed_up);
    Slope of;
    float factor = params.row_scale && is_there ? __ldg(params.row_scale + token) : 1;
    float sum = 0;
    uint32_t of_gate[4], of_up[4], activated[4];
    CUTLASS_PRAGMA_UNROLL
    for (int pair = 0; pair < 4; ++pair) {
      float2 product = reinterpret_cast<float2 const*>(part)[pair];
      float through_gate[2], through_up[2], values[2];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2; ++i) {
        ValueAndSlope opened = of(float(gate[2 * pair + i]));
        float width = float(up[2 * pair + i]), dy = i ? product.y : product.x;
        float value = opened.value * width;
        sum += dy * value;
        through_gate[i] = dy * factor * (opened.slope * width);
        through_up[i] = dy * factor * opened.value;
        values[i] = factor * value;
      }
      of_gate[pair] = pair_of<ElementD>(through_gate[0], through_gate[1]);
      of_up[pair] = pair_of<ElementD>(through_up[0], through_up[1]);
      activated[pair] = pair_of<ElementD>(values[0], values[1]);
    }
    if (is_there) {
      auto put = [](ElementD* to, uint32_t const (&words)[4]) {
        *reinterpret_cast<uint4*>(to) = uint4{words[0], words[1], words[2], words[3]};
      };
      ElementD* d = params.d + token * params.ldd + column;
      put(d, of_gate);
      put(d + params.columns, of_up);
      if constexpr (Activated) {
        put(params.activated + token * params.ld_activated + column, activated);
      }
    }
    if (!params.row_gradient) return;
    if (!is_there) sum = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int lanes = kSlab / 16; lanes > 0; lanes /= 2) {
      sum += __shfl_xor_sync(0xffffffff, sum, lanes);
    }
    if (is_there && column % kSlab == 0) {
      params.row_gradient[token * params.slabs + column / kSlab] = sum;
    }
  }

  /* The kernel's columns from `step` on, in the problem's orientation. */
  template <class Thread, class Sums>
  CUTLASS_DEVICE static void stage(float* part, Thread const& thread, Sums const& sums, int step) {
    using namespace cute;
    int lane = static_cast<int>(threadIdx.x) % 32;
    Tensor places = thread.partition_C(make_identity_tensor(take<0, 2>(TileShape{})));
    CUTLASS_PRAGMA_UNROLL
    for (int atom = 0; atom < size<1>(sums); ++atom) {
      int row = get<0>(places(make_coord(0, 0, 0), atom, 0)); /* and the one eight rows below */
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < kPart / 8; ++block) {
        int column = block * 8 + lane % 4 * 2;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 2; ++i) {
          float low = sums(make_coord(0, i, step / 8 + block), atom, 0);
          float high = sums(make_coord(1, i, step / 8 + block), atom, 0);
          if constexpr (Swapped) {
            part[column * kPitch + row + i * 8] = low;
            part[(column + 1) * kPitch + row + i * 8] = high;
          } else {
            *reinterpret_cast<float2*>(part + (row + i * 8) * kPitch + column) = {low, high};
          }
        }
      }
    }
  }

  static Operand matrix(gs_arguments const& g, void const* data, int64_t columns, int64_t leading) {
    return {data, g.m, columns, leading, 0, 16 / int(sizeof(ElementD)), int(sizeof(ElementD))};
  }
  static Operand both(gs_arguments const& g, void const* data, int64_t leading) {
    return matrix(g, data, 2 * int64_t(g.n), leading);
  }
  static Operand activated(gs_arguments const& g) {
    return matrix(g, g.activated, g.n, g.ld_activated);
  }
};

template <class Mainloop, class ElementD, class Traits, bool Swapped, int MathGroups, class Slope,
          bool Activated>
using GroupedBackwardGemm = GroupedAdapter<
    GroupedKernel<WholeRows<Mainloop>,
                  BackwardGateStore<Mainloop, ElementD, Swapped, Slope, Activated>, Swapped,
                  MathGroups>,
    Traits, Swapped>;

}  // namespace gemmsmith
