/* What becomes of a tile's sums in a grouped product (grouped.hpp): D, and nothing beside it.
 *
 * FP8 sums are taken in the tensor core; its factors, one for each token and one for each column of
 * each group, are applied as D is stored.
 */
#pragma once

#include "cute/arch/copy_sm90.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/numeric_conversion.h"
#include "gemmsmith/gemm3x.hpp"

namespace gemmsmith {

/* A tile of one group, in the problem's orientation. */
struct GroupedTile {
  int32_t group;
  int32_t token, tokens; /* the first, and how many of the group's there are from it on */
  int32_t column;        /* among the rows of the group's weights */
};

/* Two values side by side, as a register holds them. */
template <class Element>
CUTLASS_DEVICE uint32_t pair_of(float low, float high) {
  cutlass::NumericArrayConverter<Element, float, 2> convert;
  cutlass::Array<float, 2> pair;
  pair[0] = low;
  pair[1] = high;
  auto narrow = convert(pair);
  return reinterpret_cast<uint32_t const&>(narrow);
}

/* The tile as its math group sees it: in the problem's orientation, or turned. */
template <class Mainloop, bool Swapped>
struct GroupedTileShape {
  using TileShape = typename Mainloop::TileShape;
  static constexpr int kConsumers = cute::size(typename Mainloop::TiledMma{});
  static constexpr int kTileN = cute::size<1>(TileShape{});
  static constexpr int kTokens = cute::size<Swapped ? 1 : 0>(TileShape{});
  static constexpr int kColumns = cute::size<Swapped ? 0 : 1>(TileShape{});
};

/* Stages a tile, [tokens, columns], and stores the group's rows of it one by one. */
template <class Mainloop, class ElementD, bool Swapped, bool RowScales>
struct GroupedStore : GroupedTileShape<Mainloop, Swapped> {
  using Element = ElementD;
  using Shape = GroupedTileShape<Mainloop, Swapped>;
  using typename Shape::TileShape;
  using Shape::kColumns, Shape::kConsumers, Shape::kTileN, Shape::kTokens;
  static_assert(sizeof(ElementD) == 2, "results are staged as 16-bit elements");

  static constexpr uint32_t kExtras = RowScales ? uint32_t(kRowScales) : 0u;
  /* 16 bytes more than a row keep the rows of eight that a warp writes at once off each other's
   * banks. */
  static constexpr int kPitch = kColumns + 8;
  static constexpr int kStaged = kTokens * kPitch;

  struct Params {
    float const* scale_a; /* [tokens], of FP8 */
    float const* scale_b; /* [groups, columns] */
    int64_t group_stride_scale_b;
    ElementD* d;
    int64_t ldd;
    int32_t tokens, columns;
  };

  static Params params(gs_arguments const& g, int64_t ldd) {
    return {g.scale_a, g.scale_b, g.batch_stride_scale_b, static_cast<ElementD*>(g.d), ldd, g.m, g.n};
  }

  static cutlass::Status check(gs_arguments const& g) {
    return RowScales && !has_row_scales(g) ? cutlass::Status::kErrorInvalidProblem
                                           : cutlass::Status::kSuccess;
  }

  /* Through shared memory, [tokens, columns], and from there row by row. */
  template <class Thread, class Sums>
  CUTLASS_DEVICE static void store(Params const& params, ElementD* staged, uint32_t math,
                                   uint32_t, Thread const& thread, Sums& sums,
                                   GroupedTile const& tile) {
    using namespace cute;
    if constexpr (RowScales) scale(params, thread, sums, tile);
    tma_store_wait<0>(); /* of the tile before: each thread waits for its own copies */
    cutlass::arch::NamedBarrier::sync(kConsumers, math);
    int lane = static_cast<int>(threadIdx.x) % 32;
    Tensor places = thread.partition_C(make_identity_tensor(take<0, 2>(TileShape{})));
    static_assert(size<2>(Sums{}) == 1, "one instruction spans tile N");
    constexpr int kBlocks = kTileN / 8;
    CUTLASS_PRAGMA_UNROLL
    for (int atom = 0; atom < size<1>(sums); ++atom) {
      /* The 16 rows of the warp; an 8×8 block is what one of a warp's registers holds. */
      int first = get<0>(places(make_coord(0, 0, 0), atom, 0)) - lane / 4;
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < kBlocks; block += 2) {
        uint32_t packed[4];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 4; ++i) {
          int at = block + i / 2 < kBlocks ? block + i / 2 : block;
          packed[i] = pair_of<ElementD>(sums(make_coord(0, i % 2, at), atom, 0),
                           sums(make_coord(1, i % 2, at), atom, 0));
        }
        /* Lane 8·i + r names the address of row r of block i. */
        int i = lane / 8;
        int row = first + i % 2 * 8, column = (block + i / 2) * 8;
        if constexpr (Swapped) {
          int token = column + lane % 8;
          auto to = reinterpret_cast<uint128_t*>(staged + token * kPitch + row);
          if (block + 1 < kBlocks) {
            SM90_U16x8_STSM_T::copy(packed[0], packed[1], packed[2], packed[3], *to);
          } else {
            SM90_U16x4_STSM_T::copy(packed[0], packed[1], *to);
          }
        } else {
          auto to = reinterpret_cast<uint128_t*>(staged + (row + lane % 8) * kPitch + column);
          if (block + 1 < kBlocks) {
            SM90_U32x4_STSM_N::copy(packed[0], packed[1], packed[2], packed[3], *to);
          } else {
            SM90_U32x2_STSM_N::copy(packed[0], packed[1], *to);
          }
        }
      }
    }
    tma_store_fence();
    cutlass::arch::NamedBarrier::sync(kConsumers, math);
    int32_t rows = min(tile.tokens, kTokens);
    int32_t bytes = min(params.columns - tile.column, kColumns) * int32_t(sizeof(ElementD));
    ElementD* d = params.d + tile.token * params.ldd + tile.column;
    for (int32_t row = int32_t(threadIdx.x) % kConsumers; row < rows; row += kConsumers) {
      SM90_BULK_COPY_S2G::copy(staged + row * kPitch, d + row * params.ldd, bytes);
    }
    tma_store_arrive();
  }

 private:
  template <class Thread, class Sums>
  CUTLASS_DEVICE static void scale(Params const& params, Thread const& thread, Sums& sums,
                                   GroupedTile const& tile) {
    using namespace cute;
    float const* of_columns = params.scale_b + tile.group * params.group_stride_scale_b;
    auto factor = [&](bool of_token, int at) {
      return of_token ? params.scale_a[min(tile.token + at, params.tokens - 1)]
                      : of_columns[min(tile.column + at, params.columns - 1)];
    };
    Tensor places = thread.partition_C(make_identity_tensor(take<0, 2>(TileShape{})));
    CUTLASS_PRAGMA_UNROLL
    for (int atom = 0; atom < size<1>(sums); ++atom) {
      float along_m[2];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2; ++i) {
        along_m[i] = factor(!Swapped, get<0>(places(make_coord(0, i, 0), atom, 0)));
      }
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < kTileN / 8; ++block) {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < 2; ++j) {
          float along_n = factor(Swapped, get<1>(places(make_coord(j, 0, block), atom, 0)));
          sums(make_coord(j, 0, block), atom, 0) *= along_m[0] * along_n;
          sums(make_coord(j, 1, block), atom, 0) *= along_m[1] * along_n;
        }
      }
    }
  }
};

}  // namespace gemmsmith
