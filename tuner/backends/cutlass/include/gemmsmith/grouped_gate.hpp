/* Grouped products (grouped.hpp) whose D = factor · activation(gate) · up, gate and up halves of one
 * product of each group, and which store gate and up as well where the backward pass wants them.
 *
 * Each expert's weights are its gate's rows and then its up's, and lie as the model has them. A tile
 * takes eight rows of the gate and the same eight of up in turns, by a descriptor that knows rows as
 * (row of eight, gate or up, eight):
 *
 *   weights      [ gate 0 … I | up 0 … I ]           each row K elements
 *   tile's rows  [ gate 0…7 | up 0…7 | gate 8…15 | up 8…15 | … ]
 *
 * Eight rows are those of a shared-memory atom, so this order costs nothing. And in a wgmma
 * accumulator rows r and r + 8 belong to the same thread, as do columns c and c + 8: what gates an
 * element lies beside it in registers, swapped or not, whatever the tile.
 */
#pragma once

#include "gemmsmith/activations.hpp"
#include "gemmsmith/grouped.hpp"

namespace gemmsmith {

constexpr int kSlab = 8; /* rows of the gate, or of up, that lie together in a tile */

/* A collective whose weights are read in such slabs. `Base` is CUTLASS's, weights K-major. */
template <class Base, bool Swapped>
struct GatedRows : Base {
  using typename Base::InternalElementA;
  using typename Base::InternalElementB;
  using typename Base::TileShape;
  using ClusterShape = typename Base::DispatchPolicy::ClusterShape;
  using StrideOfWeights =
      std::conditional_t<Swapped, typename Base::StrideA, typename Base::StrideB>;
  static_assert(!kFirstModeContiguous<StrideOfWeights>, "weights are K-major");

  /* The rows of a group's N: of a slab, the gate's or up's, slabs. */
  CUTLASS_HOST_DEVICE static auto weight_rows(int32_t n) {
    return cute::make_shape(cute::Int<kSlab>{}, cute::_2{}, n / (2 * kSlab));
  }

  struct Arguments : Base::Arguments {
    int64_t up = 0; /* elements from the gate's rows to up's */
  };

  static void tell(Arguments& arguments, gs_arguments const& g) {
    using Element = std::conditional_t<Swapped, typename Base::ElementA, typename Base::ElementB>;
    arguments.up = static_cast<Element const*>(g.b_up) - static_cast<Element const*>(g.b);
  }

  template <class Element, class Stride>
  static auto weights(Element const* data, Stride const& stride, int32_t n, int32_t k,
                      int32_t groups, int64_t up) {
    using namespace cute;
    auto row = get<0>(stride);
    return make_tensor(data, make_layout(make_shape(weight_rows(n), k, groups),
                                         make_stride(make_stride(row, up, kSlab * row),
                                                     get<1>(stride), get<2>(stride))));
  }

  template <class Tensor>
  static auto copy_of_a(Tensor const& tensor) {
    using namespace cute;
    return make_tma_copy_A_sm90(typename Base::GmemTiledCopyA{}, tensor,
                                typename Base::SmemLayoutA{}(_, _, _0{}), TileShape{},
                                ClusterShape{});
  }

  template <class Tensor>
  static auto copy_of_b(Tensor const& tensor) {
    using namespace cute;
    return make_tma_copy_B_sm90(typename Base::GmemTiledCopyB{}, tensor,
                                typename Base::SmemLayoutB{}(_, _, _0{}), TileShape{},
                                ClusterShape{});
  }

  struct WithWeightsA {
    decltype(copy_of_a(weights(static_cast<InternalElementA const*>(nullptr),
                               typename Base::StrideA{}, 0, 0, 0, 0))) tma_load_a;
    typename Base::Params::TMA_B tma_load_b;
  };
  struct WithWeightsB {
    typename Base::Params::TMA_A tma_load_a;
    decltype(copy_of_b(weights(static_cast<InternalElementB const*>(nullptr),
                               typename Base::StrideB{}, 0, 0, 0, 0))) tma_load_b;
  };
  using Params = std::conditional_t<Swapped, WithWeightsA, WithWeightsB>;

  template <class ProblemShape>
  static Params to_underlying_arguments(ProblemShape const& shape, Arguments const& arguments,
                                        void*) {
    using namespace cute;
    auto [M, N, K, L] = shape;
    auto a = reinterpret_cast<InternalElementA const*>(arguments.ptr_A);
    auto b = reinterpret_cast<InternalElementB const*>(arguments.ptr_B);
    if constexpr (Swapped) {
      return {copy_of_a(weights(a, arguments.dA, M, K, L, arguments.up)),
              copy_of_b(make_tensor(b, make_layout(make_shape(N, K, L), arguments.dB)))};
    } else {
      return {copy_of_a(make_tensor(a, make_layout(make_shape(M, K, L), arguments.dA))),
              copy_of_b(weights(b, arguments.dB, N, K, L, arguments.up))};
    }
  }

  CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const& params) {
    cute::prefetch_tma_descriptor(params.tma_load_a.get_tma_descriptor());
    cute::prefetch_tma_descriptor(params.tma_load_b.get_tma_descriptor());
  }
};

/* Stages half as many columns as a tile's, and stores the group's rows of them by 16 bytes a thread:
 * gate, up and D one after the other, by two buffers in turn. A bulk copy for each row took as long
 * (25 problems, NVIDIA H100, 2026-11-25). */
template <class Mainloop, class ElementD, bool Swapped, template <class> class Activation, bool Aux>
struct GatedStore : GroupedTileShape<Mainloop, Swapped> {
  using Element = ElementD;
  using Shape = GroupedTileShape<Mainloop, Swapped>;
  using typename Shape::TileShape;
  using Shape::kColumns, Shape::kConsumers, Shape::kTileN, Shape::kTokens;
  static_assert(sizeof(ElementD) == 2, "results are staged as 16-bit elements");
  static_assert(kColumns % (2 * kSlab) == 0, "a slab of up for each of the gate");

  static constexpr uint32_t kExtras =
      uint32_t(kGate) | uint32_t(kRowFactors) | (Aux ? uint32_t(kAux) : 0u);
  static constexpr int kHalf = kColumns / 2;
  static constexpr int kPitch = kHalf + 8; /* as `GroupedStore`'s */
  static constexpr int kBuffer = kTokens * kPitch;
  static constexpr int kVectors = kHalf / kSlab; /* of 16 bytes, in a row */
  static constexpr int kBuffers = Aux ? 2 : 1;
  static constexpr int kStaged = kBuffers * kBuffer;

  struct Params {
    float const* row_scale; /* [tokens], or null */
    ElementD* aux;
    int64_t ld_aux;
    ElementD* d;
    int64_t ldd;
    int32_t tokens, columns; /* D's */
  };

  static Params params(gs_arguments const& g, int64_t ldd) {
    return {g.row_scale, static_cast<ElementD*>(g.aux), Aux ? aux(g).row_stride() : 0,
            static_cast<ElementD*>(g.d), ldd, g.m, g.n / 2};
  }

  static cutlass::Status check(gs_arguments const& g) {
    using cutlass::Status;
    if (!g.b_up || g.n % 2 || (Aux && !g.aux)) return Status::kErrorInvalidProblem;
    /* The descriptor steps from gate to up by a stride, which is positive and whole 16 bytes. */
    int64_t up = static_cast<char const*>(g.b_up) - static_cast<char const*>(g.b);
    if (up <= 0) return Status::kErrorInvalidLayout;
    bool aligned = up % 16 == 0 && reinterpret_cast<uintptr_t>(g.row_scale) % sizeof(float) == 0 &&
                   g.n / 2 % kSlab == 0;
    if (!aligned) return Status::kErrorMisalignedOperand;
    return Aux ? aux(g).check(1) : Status::kSuccess;
  }

  template <class Thread, class Sums>
  CUTLASS_DEVICE static void store(Params const& params, ElementD* staged, uint32_t math,
                                   uint32_t number, Thread const& thread, Sums& sums,
                                   GroupedTile const& tile) {
    constexpr uint32_t kOutputs = Aux ? 3 : 1;
    int32_t column = tile.column / 2;
    int32_t rows = min(tile.tokens, kTokens);
    int32_t vectors = min(params.columns - column, kHalf) / kSlab;
    uint32_t turn = number * kOutputs;
    auto leave = [&](ElementD* to, int64_t ld, auto value) {
      ElementD* buffer = staged + turn++ % kBuffers * kBuffer;
      /* Of two buffers, all have read this one before they come to the other's barrier. */
      if constexpr (kBuffers == 1) cutlass::arch::NamedBarrier::sync(kConsumers, math);
      stage(buffer, thread, sums, value);
      cutlass::arch::NamedBarrier::sync(kConsumers, math);
      to += tile.token * ld + column;
      CUTLASS_PRAGMA_UNROLL
      for (int first = 0; first < kTokens * kVectors; first += kConsumers) {
        int at = first + static_cast<int>(threadIdx.x) % kConsumers;
        int row = at / kVectors, vector = at % kVectors;
        if (row < rows && vector < vectors) {
          *reinterpret_cast<uint4*>(to + row * ld + vector * kSlab) =
              *reinterpret_cast<uint4 const*>(buffer + row * kPitch + vector * kSlab);
        }
      }
    };
    if constexpr (Aux) {
      leave(params.aux, params.ld_aux, [](float gate, float, int) { return gate; });
      leave(params.aux + params.columns, params.ld_aux, [](float, float up, int) { return up; });
    }
    leave(params.d, params.ldd, [&](float gate, float up, int at) {
      float value = Activation<float>{}(gate) * up;
      /* Beyond the group's last token, what is computed is not stored. */
      return params.row_scale
                 ? value * __ldg(params.row_scale + min(tile.token + at, params.tokens - 1))
                 : value;
    });
  }

 private:
  /* Gate and up side by side, in the problem's orientation. */
  static Operand aux(gs_arguments const& g) {
    return {g.aux, g.m, g.n, g.ld_aux, 0, 16 / int(sizeof(ElementD)), int(sizeof(ElementD))};
  }

  /* [tokens, columns] of what `value` makes of gate, up and the token's place in the tile. */
  template <class Thread, class Sums, class Value>
  CUTLASS_DEVICE static void stage(ElementD* staged, Thread const& thread, Sums const& sums,
                                   Value value) {
    using namespace cute;
    static_assert(size<2>(Sums{}) == 1, "one instruction spans tile N");
    /* Blocks of eight tokens, or of eight columns with both halves of the warp's rows, which one
     * instruction stores: as many as divide them. */
    constexpr int kBlocks = Swapped ? kTileN / 8 : kTileN / 16;
    constexpr int kAtOnce = Swapped && kBlocks % 4 == 0 ? 4 : kBlocks % 2 == 0 ? 2 : 1;
    constexpr int kWords = Swapped ? kAtOnce : 2 * kAtOnce;
    int lane = static_cast<int>(threadIdx.x) % 32;
    Tensor places = thread.partition_C(make_identity_tensor(take<0, 2>(TileShape{})));
    CUTLASS_PRAGMA_UNROLL
    for (int atom = 0; atom < size<1>(sums); ++atom) {
      /* The 16 rows of the warp; an 8×8 block is what one of a warp's registers holds. */
      int first = get<0>(places(make_coord(0, 0, 0), atom, 0)) - lane / 4;
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < kBlocks; block += kAtOnce) {
        uint32_t words[kWords];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kWords; ++i) {
          int at = block + (Swapped ? i : i / 2);
          float pair[2];
          CUTLASS_PRAGMA_UNROLL
          for (int j = 0; j < 2; ++j) {
            if constexpr (Swapped) {
              pair[j] = value(sums(make_coord(j, 0, at), atom, 0),
                              sums(make_coord(j, 1, at), atom, 0), 8 * at + lane % 4 * 2 + j);
            } else {
              pair[j] = value(sums(make_coord(j, i % 2, 2 * at), atom, 0),
                              sums(make_coord(j, i % 2, 2 * at + 1), atom, 0),
                              first + i % 2 * 8 + lane / 4);
            }
          }
          words[i] = pair_of<ElementD>(pair[0], pair[1]);
        }
        /* Lane 8·i + r names the address of row r of block i; lanes beyond the last are not read. */
        int i = lane / 8 % kWords, r = lane % 8;
        int token = Swapped ? (block + i) * 8 + r : first + i % 2 * 8 + r;
        int column = Swapped ? first / 2 : (block + i / 2) * 8;
        auto& to = *reinterpret_cast<uint128_t*>(staged + token * kPitch + column);
        if constexpr (Swapped && kWords == 4) {
          SM90_U16x8_STSM_T::copy(words[0], words[1], words[2], words[3], to);
        } else if constexpr (Swapped && kWords == 2) {
          SM90_U16x4_STSM_T::copy(words[0], words[1], to);
        } else if constexpr (Swapped) {
          SM90_U16x2_STSM_T::copy(words[0], to);
        } else if constexpr (kWords == 4) {
          SM90_U32x4_STSM_N::copy(words[0], words[1], words[2], words[3], to);
        } else {
          SM90_U32x2_STSM_N::copy(words[0], words[1], to);
        }
      }
    }
  }
};

template <class Mainloop, class ElementD, class Traits, bool Swapped, int MathGroups,
          template <class> class Activation, bool Aux>
using GroupedGatedGemm =
    GroupedAdapter<GroupedKernel<GatedRows<Mainloop, Swapped>,
                                 GatedStore<Mainloop, ElementD, Swapped, Activation, Aux>, Swapped,
                                 MathGroups>,
                   Traits, Swapped>;

}  // namespace gemmsmith
