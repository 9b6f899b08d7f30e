/* Grouped products without a descriptor for each group: each expert's weights times its tokens.
 *
 * All tokens are one tensor [T, K] and all weights another [E, N, K], so two TMA descriptors, made
 * on the host, do for any number of groups. A thread block counts the tiles of every group when it
 * starts, and then takes every gridDim-th tile:
 *
 *   tokens   |--- group 0 ---|- 1 -|------- group 3 -------|      (2 is empty)
 *   tiles    [  0  ][  1  ]   [ 2 ] [  3  ][  4  ][  5  ]   times the tiles along N
 *
 * The last tile of a group reads some rows of the next one, and does not store what comes of them:
 * results leave token by token, each row of a tile by one bulk copy of its own. So nothing is
 * padded, nothing but `offsets` is read before the first tile, and every sum is made in one order.
 *
 * One warp loads. One math group (a warpgroup, or two that share a tile) computes, or two take
 * turns, so that one stores while the other multiplies. What becomes of a tile's sums is a `Store`'s
 * (grouped_store.hpp, grouped_gate.hpp). CUTLASS's collective gives the descriptors, the
 * shared-memory layouts and the tiled MMA.
 */
#pragma once

#include <algorithm>

#include "cutlass/arch/barrier.h"
#include "cutlass/arch/grid_dependency_control.h"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "gemmsmith/grouped_store.hpp"

namespace gemmsmith {

/* Weights as they lie: a tile's rows are neighbours. */
template <class Base>
struct WholeRows : Base {
  CUTLASS_HOST_DEVICE static int32_t weight_rows(int32_t n) { return n; }
  static void tell(typename Base::Arguments&, gs_arguments const&) {}
};

/* The device side. `Mainloop` is a CUTLASS collective with a cluster shape of 1×1×1, which says how
 * `weight_rows` of each group make the rows that tiles are cut from. */
template <class Mainloop_, class Store_, bool Swapped, int MathGroups>
struct GroupedKernel {
  using Mainloop = Mainloop_;
  using Store = Store_;
  using ElementD = typename Store::Element;
  using TileShape = typename Mainloop::TileShape;
  using TiledMma = typename Mainloop::TiledMma;
  using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
  using EmptyBarrier = cutlass::arch::ClusterBarrier;

  static constexpr int kStages = Mainloop::DispatchPolicy::Stages;
  static constexpr int kTileM = cute::size<0>(TileShape{});
  static constexpr int kTileN = cute::size<1>(TileShape{});
  static constexpr int kConsumers = cute::size(TiledMma{}); /* threads of one math group */
  static constexpr int kMathThreads = MathGroups * kConsumers;
  static constexpr int kBytes = Mainloop::TmaTransactionBytes;

  /* The tile in the problem's orientation. */
  static constexpr int kTokens = Swapped ? kTileN : kTileM;
  static constexpr int kColumns = Swapped ? kTileM : kTileN;

  struct Params {
    typename Mainloop::Params mainloop;
    cute::Shape<int, int, int, int> shape; /* the kernel's M, N and K, and the groups */
    int32_t const* offsets;
    typename Store::Params store;
    int32_t groups;
    int32_t k_tiles, wide; /* tiles along K, and along N */
    bool tokens_first;     /* neighbouring tiles have the same weights, else the same tokens */
  };

  struct SharedStorage {
    typename Mainloop::TensorStorage operands;
    alignas(128) ElementD staged[MathGroups][Store::kStaged];
    FullBarrier full[kStages];
    EmptyBarrier empty[kStages];
    EmptyBarrier turns[MathGroups];
    int32_t ends[GS_MOST_GROUPS];  /* the token after each group's last */
    int32_t tiles[GS_MOST_GROUPS]; /* tiles of all groups up to this one */
  };

  static constexpr int SharedStorageSize = sizeof(SharedStorage);
  static constexpr uint32_t MaxThreadsPerBlock = kMathThreads + 32;
  static constexpr uint32_t MinBlocksPerMultiprocessor = SharedStorageSize <= 113 * 1024 ? 2 : 1;

  CUTLASS_DEVICE void operator()(Params const& params, char* memory) {
    auto& shared = *reinterpret_cast<SharedStorage*>(memory);
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < kStages; ++stage) {
        shared.full[stage].init(1);
        shared.empty[stage].init(kConsumers / 32);
      }
      for (auto& turn : shared.turns) turn.init(kConsumers / 32);
      cutlass::arch::fence_barrier_init();
    }
    if (threadIdx.x == kMathThreads) Mainloop::prefetch_tma_descriptors(params.mainloop);
    cutlass::arch::wait_on_dependent_grids();
    if (threadIdx.x < 32) count_tiles(params, shared);
    __syncthreads();
    if (threadIdx.x >= kMathThreads) {
      if (cute::elect_one_sync()) load(params, shared);
      __syncwarp();
      cutlass::arch::launch_dependent_grids();
    } else {
      multiply(params, shared);
    }
  }

 private:
  /* By one warp. Ends that do not ascend or exceed the total address nothing but the caller's. */
  CUTLASS_DEVICE static void count_tiles(Params const& params, SharedStorage& shared) {
    int32_t before = 0;
    for (int32_t first = 0; first < params.groups; first += 32) {
      int32_t group = first + int32_t(threadIdx.x);
      int32_t begin = 0, end = 0;
      if (group < params.groups) {
        if (group > 0) begin = min(max(params.offsets[group - 1], 0), params.store.tokens);
        end = max(min(params.offsets[group], params.store.tokens), begin);
      }
      int32_t tiles = (end - begin + kTokens - 1) / kTokens * params.wide;
      CUTLASS_PRAGMA_UNROLL
      for (int distance = 1; distance < 32; distance *= 2) {
        int32_t lower = __shfl_up_sync(0xffffffff, tiles, distance);
        if (threadIdx.x >= distance) tiles += lower;
      }
      if (group < params.groups) {
        shared.ends[group] = end;
        shared.tiles[group] = before + tiles;
      }
      before += __shfl_sync(0xffffffff, tiles, 31);
    }
  }

  /* The tile that this block computes as its `sequence`-th; false: there is none. */
  CUTLASS_DEVICE static bool find(Params const& params, SharedStorage const& shared,
                                  uint32_t sequence, GroupedTile& tile) {
    int64_t index = int64_t(sequence) * gridDim.x + blockIdx.x;
    if (index >= shared.tiles[params.groups - 1]) return false;
    auto wanted = static_cast<int32_t>(index);
    int32_t low = 0, high = params.groups - 1; /* the first group that ends after it */
    while (low < high) {
      int32_t middle = (low + high) / 2;
      if (shared.tiles[middle] > wanted) high = middle;
      else low = middle + 1;
    }
    int32_t begin = low > 0 ? shared.ends[low - 1] : 0;
    int32_t before = low > 0 ? shared.tiles[low - 1] : 0;
    int32_t along_tokens = (shared.tiles[low] - before) / params.wide;
    wanted -= before;
    int32_t row = params.tokens_first ? wanted % along_tokens : wanted / params.wide;
    int32_t column = params.tokens_first ? wanted / along_tokens : wanted % params.wide;
    tile.group = low;
    tile.token = begin + row * kTokens;
    tile.tokens = shared.ends[low] - tile.token;
    tile.column = column * kColumns;
    return true;
  }

  template <bool OfWeights>
  CUTLASS_DEVICE static auto extent(int32_t rows) {
    if constexpr (OfWeights) return Mainloop::weight_rows(rows);
    else return rows;
  }

  /* The tiles along K of one operand, from its `row` on. */
  template <class Copy, class Extent, class Step>
  CUTLASS_DEVICE static auto tiles_of(Params const& params, Copy const& copy, Extent extent,
                                      int32_t row, int32_t batch, Step step) {
    using namespace cute;
    Tensor whole = copy.get_tma_tensor(make_shape(extent, get<2>(params.shape),
                                                  get<3>(params.shape)));
    Tensor from = domain_offset(make_coord(row, 0, batch), whole);
    Tensor tiles = local_tile(from, TileShape{}, make_coord(_, _, _), step); /* …, m, k, l */
    return copy.get_slice(0).partition_S(tiles(_, _, 0, _, 0));
  }

  CUTLASS_DEVICE static void load(Params const& params, SharedStorage& shared) {
    using namespace cute;
    Tensor sA = make_tensor(make_smem_ptr(shared.operands.smem_A.data()),
                            typename Mainloop::SmemLayoutA{});
    Tensor sB = make_tensor(make_smem_ptr(shared.operands.smem_B.data()),
                            typename Mainloop::SmemLayoutB{});
    auto const& copy_a = params.mainloop.tma_load_a;
    auto const& copy_b = params.mainloop.tma_load_b;
    Tensor to_a = copy_a.get_slice(0).partition_D(sA);
    Tensor to_b = copy_b.get_slice(0).partition_D(sB);
    GroupedTile tile;
    int stage = 0;
    uint32_t phase = 1; /* a fresh barrier's "previous" phase: the first waits fall through */
    for (uint32_t sequence = 0; find(params, shared, sequence, tile); ++sequence) {
      Tensor from_a =
          tiles_of(params, copy_a, extent<Swapped>(get<0>(params.shape)),
                   Swapped ? tile.column : tile.token, Swapped ? tile.group : 0, Step<_1, X, _1>{});
      Tensor from_b =
          tiles_of(params, copy_b, extent<!Swapped>(get<1>(params.shape)),
                   Swapped ? tile.token : tile.column, Swapped ? 0 : tile.group, Step<X, _1, _1>{});
      for (int32_t k = 0; k < params.k_tiles; ++k) {
        shared.empty[stage].wait(phase);
        shared.full[stage].arrive_and_expect_tx(kBytes);
        auto& barrier = *reinterpret_cast<uint64_t*>(&shared.full[stage]);
        copy(copy_a.with(barrier), from_a(_, _, _, k), to_a(_, _, _, stage));
        copy(copy_b.with(barrier), from_b(_, _, _, k), to_b(_, _, _, stage));
        if (++stage == kStages) {
          stage = 0;
          phase ^= 1;
        }
      }
    }
  }

  CUTLASS_DEVICE static void multiply(Params const& params, SharedStorage& shared) {
    using namespace cute;
    Tensor sA = make_tensor(make_smem_ptr(shared.operands.smem_A.data()),
                            typename Mainloop::SmemLayoutA{});
    Tensor sB = make_tensor(make_smem_ptr(shared.operands.smem_B.data()),
                            typename Mainloop::SmemLayoutB{});
    TiledMma mma;
    auto math = static_cast<uint32_t>(threadIdx.x) / kConsumers;
    auto thread = mma.get_slice(threadIdx.x % kConsumers);
    Tensor a = thread.make_fragment_A(thread.partition_A(sA));
    Tensor b = thread.make_fragment_B(thread.partition_B(sB));
    Tensor sums = partition_fragment_C(mma, take<0, 2>(TileShape{}));
    bool releases = threadIdx.x % 32 == 0;
    auto k_tiles = static_cast<uint32_t>(params.k_tiles);
    GroupedTile tile;
    for (uint32_t sequence = math; find(params, shared, sequence, tile); sequence += MathGroups) {
      /* A wait knows a barrier's last two phases only: every stage up to here must have been seen
       * full, by this group or the one before. */
      if constexpr (MathGroups > 1) {
        if (sequence > 0) shared.turns[math].wait((sequence - 1) / MathGroups & 1);
      }
      uint32_t loaded = sequence * k_tiles; /* stages that this block has filled by then */
      int stage = static_cast<int>(loaded % kStages);
      uint32_t phase = loaded / kStages & 1;
      int released = stage;
      mma.accumulate_ = GMMA::ScaleOut::Zero;
      warpgroup_fence_operand(sums);
      for (uint32_t i = 0; i < k_tiles; ++i) {
        shared.full[stage].wait(phase);
        warpgroup_arrive();
        CUTLASS_PRAGMA_UNROLL
        for (int k = 0; k < size<2>(a); ++k) {
          gemm(mma, a(_, _, k, stage), b(_, _, k, stage), sums);
          mma.accumulate_ = GMMA::ScaleOut::One;
        }
        warpgroup_commit_batch();
        /* One batch stays in flight; the stage of the one before it is free. */
        warpgroup_wait<1>();
        if (i > 0) {
          if (releases) shared.empty[released].arrive();
          if (++released == kStages) released = 0;
        }
        if (++stage == kStages) {
          stage = 0;
          phase ^= 1;
        }
      }
      if constexpr (MathGroups > 1) {
        if (releases) shared.turns[(math + 1) % MathGroups].arrive();
      }
      warpgroup_wait<0>();
      warpgroup_fence_operand(sums);
      if (releases) shared.empty[released].arrive();
      Store::store(params.store, shared.staged[math], math, sequence / MathGroups, thread, sums,
                   tile);
    }
    tma_store_wait<0>(); /* the copies still read this block's memory */
  }
};

/* C ABI adapter. `Traits` are the problem's. */
template <class Kernel, class Traits, bool Swapped>
struct GroupedAdapter {
  using Mainloop = typename Kernel::Mainloop;
  using Store = typename Kernel::Store;
  using ElementD = typename Kernel::ElementD;
  using Params = typename Kernel::Params;
  using ElementA =
      std::conditional_t<Swapped, typename Mainloop::ElementB, typename Mainloop::ElementA>;
  using ElementB =
      std::conditional_t<Swapped, typename Mainloop::ElementA, typename Mainloop::ElementB>;
  using ProblemOperands = Operands<Traits, ElementA, ElementB, ElementD>;
  using Launch = Launcher<Params, entry_point<Kernel>, Kernel::SharedStorageSize,
                          Start::kOverlaps>;

  static constexpr bool kAFirst = kFirstModeContiguous<typename Mainloop::StrideA>;
  static constexpr bool kBFirst = kFirstModeContiguous<typename Mainloop::StrideB>;
  static_assert((Swapped ? kBFirst : kAFirst) == !Traits::ARowMajor, "layout of A");
  static_assert((Swapped ? kAFirst : kBFirst) == Traits::BRowMajor, "layout of B");
  static_assert(Traits::ARowMajor, "tokens are whole rows");
  static_assert(Traits::AlignmentA * sizeof(ElementA) % 16 == 0, "TMA reads A");
  static_assert(Traits::AlignmentB * sizeof(ElementB) % 16 == 0, "TMA reads B");
  static_assert(Traits::AlignmentD * sizeof(ElementD) % 16 == 0, "bulk copies write D");

  static int32_t describe(gs_kernel_info& info) {
    info.threads = Kernel::MaxThreadsPerBlock;
    info.shared_bytes = Kernel::SharedStorageSize;
    info.stages = Kernel::kStages;
    Launch::resources(info);
    return 0;
  }

  static int32_t can_implement(gs_arguments const& g) { return status_code(check(g)); }

  static int64_t workspace_bytes(gs_arguments const& g) {
    return -int64_t(status_code(check(g)));
  }

  static int32_t run(gs_arguments const& g, void*, void* stream) {
    cutlass::Status status = check(g);
    if (status != cutlass::Status::kSuccess) return status_code(status);
    DeviceScope device(g.device);
    if (device.error() != cudaSuccess) return status_code(device.error());
    ProblemOperands operands(g);
    /* The tokens' descriptor has as many matrices as the weights', of which only the first is read. */
    operands.a.batch_stride = operands.a.rows * operands.a.row_stride();
    Operand const& a = Swapped ? operands.b : operands.a;
    Operand const& b = Swapped ? operands.a : operands.b;
    typename Mainloop::Arguments arguments{};
    arguments.ptr_A = static_cast<typename Mainloop::ElementA const*>(a.data);
    arguments.ptr_B = static_cast<typename Mainloop::ElementB const*>(b.data);
    arguments.dA = stride_of<typename Mainloop::StrideA>(a, g.batch);
    arguments.dB = stride_of<typename Mainloop::StrideB>(b, g.batch);
    Mainloop::tell(arguments, g);
    auto shape = cute::make_shape(Swapped ? g.n : g.m, Swapped ? g.m : g.n, g.k, g.batch);
    Params params{Mainloop::to_underlying_arguments(shape, arguments, nullptr),
                  shape,
                  g.offsets,
                  Store::params(g, operands.d.row_stride()),
                  g.batch,
                  tiles(g.k, cute::size<2>(typename Kernel::TileShape{})),
                  tiles(g.n, Kernel::kColumns),
                  g.raster_order != (Swapped ? 1 : 2)};
    auto blocks = static_cast<unsigned>(
        std::min(int64_t(g.sm_count) * Kernel::MinBlocksPerMultiprocessor, most_tiles(g)));
    return status_code(Launch::launch(params, dim3(blocks), dim3(Kernel::MaxThreadsPerBlock),
                                      dim3(1), g.device, static_cast<cudaStream_t>(stream)));
  }

 private:
  static int32_t tiles(int32_t extent, int tile) {
    return static_cast<int32_t>((int64_t(extent) + tile - 1) / tile);
  }

  /* However the tokens are spread, there are no more than this. */
  static int64_t most_tiles(gs_arguments const& g) {
    int64_t along_tokens = int64_t(g.m) / Kernel::kTokens + std::min(g.batch, g.m);
    return along_tokens * tiles(g.n, Kernel::kColumns);
  }

  static cutlass::Status check(gs_arguments const& g) {
    using cutlass::Status;
    Status status = check_problem(g, kGroups | Store::kExtras);
    if (status == Status::kSuccess) status = Store::check(g);
    if (status != Status::kSuccess) return status;
    if (g.splits != 1 || (g.decomposition != 0 && g.decomposition != 3) || g.beta != 0.0f ||
        g.alpha != 1.0f) {
      return Status::kErrorNotSupported;
    }
    if (g.offsets == nullptr || g.batch > GS_MOST_GROUPS || most_tiles(g) > INT32_MAX) {
      return Status::kErrorInvalidProblem;
    }
    ProblemOperands operands(g);
    for (Status each : {operands.a.check(1), operands.b.check(g.batch), operands.d.check(1)}) {
      if (each != Status::kSuccess) return each;
    }
    return Status::kSuccess;
  }
};

template <class Mainloop, class ElementD, class Traits, bool Swapped, int MathGroups,
          bool RowScales = false>
using GroupedGemm = GroupedAdapter<
    GroupedKernel<WholeRows<Mainloop>, GroupedStore<Mainloop, ElementD, Swapped, RowScales>, Swapped,
                  MathGroups>,
    Traits, Swapped>;

}  // namespace gemmsmith
