/* A node of a visitor tree that adds up the rows of each tile, column by column.
 *
 * CUTLASS's `Sm90RowReduction` holds the sums of a whole tile in registers, which large tiles have
 * no room for, and takes widths that are powers of two. Here the sums of a part of the epilogue
 * (EpilogueTile's columns) leave the registers with that part: lanes, then warps are added up in a
 * fixed order, and the tile's row goes to `rows`, packed: [tiles along M, tiles along N * width].
 * Rows beyond M must be zeros. A second kernel adds up the tiles' rows in their order: no atomics,
 * the same bits every time.
 */
#pragma once

#include "cutlass/arch/grid_dependency_control.h"
#include "gemmsmith/gemm3x.hpp"
#include "gemmsmith/visitor.hpp"

namespace gemmsmith {

struct ColumnSumsArguments {
  float* rows = nullptr;
};

template <class CtaTile, class EpilogueTile>
struct ColumnSums : PassiveVisitor<ColumnSumsArguments> {
  static constexpr int kTileM = cute::size<0>(CtaTile{}), kTileN = cute::size<1>(CtaTile{});
  static constexpr int kColumns = cute::size<1>(EpilogueTile{});
  static constexpr int kPartsM = kTileM / cute::size<0>(EpilogueTile{});
  static constexpr int kWarps = cute::size<0>(EpilogueTile{}) / 16; /* of wgmma: 16 rows each */
  static constexpr int kLanesM = 8, kLanesN = 4;                    /* of a warp */

  struct SharedStorage {
    alignas(16) float sums[kWarps][kColumns];
  };

  CUTLASS_HOST_DEVICE ColumnSums() {}
  CUTLASS_HOST_DEVICE ColumnSums(ColumnSumsArguments const& params, SharedStorage const& storage)
      : rows(params.rows), shared(const_cast<SharedStorage*>(&storage)) {}

  float* rows = nullptr;
  SharedStorage* shared = nullptr;

  template <class Sums, class Coordinates>
  struct ConsumerStoreCallbacks : cutlass::epilogue::fusion::EmptyConsumerStoreCallbacks {
    CUTLASS_DEVICE ConsumerStoreCallbacks(Sums const& sums, Coordinates const& coordinates,
                                          float* row, SharedStorage* shared, int thread)
        : sums(sums), coordinates(coordinates), row(row), shared(shared), thread(thread) {}

    Sums sums;               /* (CPY,CPY_M,CPY_N), one register for all rows of a column */
    Coordinates coordinates; /* (CPY,CPY_M,CPY_N,EPI_M,EPI_N) within the tile */
    float* row;              /* the tile's; null where the tile lies outside the problem */
    SharedStorage* shared;
    int thread;

    CUTLASS_DEVICE void begin_loop(int epi_m, int) {
      if (epi_m == 0) cute::clear(sums);
    }

    template <class Accumulator, class Input, int Count>
    CUTLASS_DEVICE auto visit(cutlass::Array<Accumulator, Count> const&, int epi_v, int, int,
                              cutlass::Array<Input, Count> const& values) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Count; ++i) sums(epi_v * Count + i) += float(values[i]);
      return values;
    }

    template <class Buffer, class Sync, class Results>
    CUTLASS_DEVICE void reduce(Buffer&&, Sync const& sync, int epi_m, int epi_n, bool, Results) {
      if (epi_m != kPartsM - 1) return;
      auto distinct = cute::filter(sums);
      CUTLASS_PRAGMA_UNROLL
      for (int lanes = kLanesM / 2; lanes > 0; lanes /= 2) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < cute::size(distinct); ++i) {
          distinct(i) += __shfl_xor_sync(0xffffffffu, distinct(i), lanes * kLanesN);
        }
      }
      /* What was read of the part before has been: the stores of that part lie between. */
      if (thread % 32 < kLanesN) {
        auto at = coordinates(cute::_, cute::_, cute::_, epi_m, epi_n);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < cute::size(sums); ++i) {
          shared->sums[thread / 32][cute::get<1>(at(i)) - epi_n * kColumns] = sums(i);
        }
      }
      sync();
      if (thread < kColumns && row != nullptr) {
        float sum = shared->sums[0][thread];
        CUTLASS_PRAGMA_UNROLL
        for (int warp = 1; warp < kWarps; ++warp) sum += shared->sums[warp][thread];
        row[epi_n * kColumns + thread] = sum;
      }
    }
  };

  template <bool ReferenceSrc, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(
      cutlass::epilogue::fusion::detail::ConsumerStoreArgs<Args...> const& args) {
    using namespace cute;
    using Copy = decltype(args.tiled_copy);
    static_assert(ReferenceSrc, "partitioned by what is in registers");
    static_assert(kColumns <= 32 && Copy::TiledNumThr::value == kWarps * 32, "threads of a part");
    constexpr auto kPlaces = right_inverse(Copy{}.get_layoutS_TV())
                                 .with_shape(shape(typename Copy::Tiler_MN{}));
    constexpr auto kLanes =
        composition(Layout<Shape<_32, Int<kWarps>, _1>, Stride<_1, _0, _0>>{}, kPlaces);
    static_assert(is_same_v<decltype(filter(get<0>(kLanes))), Layout<Int<kLanesM>, Int<kLanesN>>> &&
                      is_same_v<decltype(filter(get<1>(kLanes))), Layout<Int<kLanesN>, _1>>,
                  "eight rows of four lanes to a warp");

    auto coordinates =
        cutlass::epilogue::fusion::detail::sm90_partition_for_epilogue<ReferenceSrc>(
            make_identity_tensor(take<0, 2>(args.tile_shape_mnk)), args.epi_tile, args.tiled_copy,
            args.thread_idx);
    auto columns = make_tensor(
        make_gmem_ptr(static_cast<float*>(nullptr)),
        make_layout(take<0, 2>(args.tile_shape_mnk), make_stride(_0{}, _1{})));
    auto mine = cutlass::epilogue::fusion::detail::sm90_partition_for_epilogue<ReferenceSrc>(
        columns, args.epi_tile, args.tiled_copy, args.thread_idx);
    auto sums = make_tensor_like<float>(mine(_, _, _, _0{}, _0{}));
    static_assert(decltype(size(filter(sums)))::value == kColumns / kLanesN, "sums of a thread");

    auto [M, N, K, L] = args.problem_shape_mnkl;
    auto [m, n, k, l] = args.tile_coord_mnkl;
    bool inside = m * kTileM < int(M) && n * kTileN < int(N);
    int64_t pitch = int64_t((int(N) + kTileN - 1) / kTileN) * kTileN;
    float* row = inside ? rows + m * pitch + n * kTileN : nullptr;
    return ConsumerStoreCallbacks<decltype(sums), decltype(coordinates)>(sums, coordinates, row,
                                                                          shared, args.thread_idx);
  }
};

template <class ElementD>
struct SumRowsParams {
  float const* partials; /* [rows, pitch] */
  ElementD* sums;        /* [columns] */
  int32_t rows, columns;
  int64_t pitch;
};

constexpr int kSumColumns = 32, kSumSlices = 16;

/* A block adds up 32 columns: each warp every sixteenth row, the first warp their sums. */
template <class ElementD>
__global__ void __launch_bounds__(kSumColumns* kSumSlices)
    sum_rows(CUTLASS_GRID_CONSTANT SumRowsParams<ElementD> const params) {
  __shared__ float partial[kSumSlices][kSumColumns];
  cutlass::arch::launch_dependent_grids();
  int lane = threadIdx.x % kSumColumns, slice = threadIdx.x / kSumColumns;
  int column = blockIdx.x * kSumColumns + lane;
  bool inside = column < params.columns;
  float sum = 0.0f;
  cutlass::arch::wait_on_dependent_grids();
  if (inside) {
#pragma unroll 4
    for (int row = slice; row < params.rows; row += kSumSlices) {
      sum += __ldcg(params.partials + row * params.pitch + column);
    }
  }
  partial[slice][lane] = sum;
  __syncthreads();
  if (slice != 0 || !inside) return;
  for (int other = 1; other < kSumSlices; ++other) sum += partial[other][lane];
  params.sums[column] = static_cast<ElementD>(sum);
}

/* The sums of the tiles' rows of a kernel with these tiles: the first bytes of its workspace. */
template <class TileShape, class ElementD>
struct TileSums {
  using SumRows = Launcher<SumRowsParams<ElementD>, sum_rows<ElementD>, 0, Start::kOverlaps>;
  static constexpr int64_t kTileM = cute::size<0>(TileShape{});
  static constexpr int64_t kTileN = cute::size<1>(TileShape{});

  static int64_t tiles_m(gs_arguments const& g) { return (g.m + kTileM - 1) / kTileM; }

  static int64_t pitch(gs_arguments const& g) { return (g.n + kTileN - 1) / kTileN * kTileN; }

  /* A multiple of what workspaces are aligned to. */
  static int64_t bytes(gs_arguments const& g) {
    int64_t bytes = tiles_m(g) * pitch(g) * int64_t(sizeof(float));
    return (bytes + 255) / 256 * 256;
  }

  static int32_t add_up(gs_arguments const& g, void const* workspace, void* stream) {
    DeviceScope device(g.device);
    if (device.error() != cudaSuccess) return status_code(device.error());
    SumRowsParams<ElementD> params{static_cast<float const*>(workspace),
                                   static_cast<ElementD*>(g.bias_gradient), int32_t(tiles_m(g)),
                                   g.n, pitch(g)};
    auto blocks = static_cast<unsigned>((g.n + kSumColumns - 1) / kSumColumns);
    return status_code(SumRows::launch(params, dim3(blocks), dim3(kSumColumns * kSumSlices),
                                       dim3(1), g.device, static_cast<cudaStream_t>(stream)));
  }
};

}  // namespace gemmsmith
