/* Split-K inside a cluster: for outputs of few tiles and a long K, and for few rows.
 *
 * The thread blocks of a cluster share one output tile. Each multiplies its own slice of K (one
 * producer warp loads with TMA, one warpgroup computes), leaves its FP32 sums in its own shared
 * memory, and after a cluster barrier adds up its share of the tile from all of them, in the order
 * of the slices, and stores it. So there is no workspace, no second launch, any number of slices
 * up to 16, and the same bits every time.
 *
 *   cluster (1, 1, S)       block s: k tiles [s·T/S, (s+1)·T/S)
 *   +--------+  +--------+
 *   | slice 0|  | slice 1|  …  each keeps rows × columns of FP32 sums
 *   +--------+  +--------+
 *     rows 0…     rows r…      each adds and stores 1/S of the tile
 *
 * CUTLASS's collective gives the TMA descriptors, the shared-memory layouts and the tiled MMA; its
 * pipeline is not used, because it takes the cluster for blocks that share operands.
 */
#pragma once

#include "cutlass/arch/barrier.h"
#include "cutlass/arch/grid_dependency_control.h"
#include "cutlass/cluster_launch.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "gemmsmith/gemm3x.hpp"
#include "gemmsmith/output.hpp"

namespace gemmsmith {

/* The device side. `Mainloop` is a CUTLASS collective with a cluster shape of 1×1×1. */
template <class Mainloop_, class ElementD, bool Swapped, bool RowScales>
struct ClusterSplitKKernel {
  using Mainloop = Mainloop_;
  using TileShape = typename Mainloop::TileShape;
  using TiledMma = typename Mainloop::TiledMma;
  using Sum = typename TiledMma::ValTypeC;
  using Pair = std::conditional_t<std::is_integral_v<Sum>, int2, float2>;
  using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
  using EmptyBarrier = cutlass::arch::ClusterBarrier;

  static constexpr int kStages = Mainloop::DispatchPolicy::Stages;
  static constexpr int kTileM = cute::size<0>(TileShape{});
  static constexpr int kTileN = cute::size<1>(TileShape{});
  static constexpr int kConsumers = cute::size(TiledMma{});
  static constexpr int kConsumerWarps = kConsumers / 32;
  static constexpr int kBytes = Mainloop::TmaTransactionBytes;

  /* The tile in the problem's orientation. The pitch keeps a warp's stores of its accumulator
   * fragment off each other's banks, and rows on multiples of 16 bytes. */
  static constexpr int kRows = Swapped ? kTileN : kTileM;
  static constexpr int kColumns = Swapped ? kTileM : kTileN;
  static constexpr int kPitch = kColumns + (Swapped ? 4 : 8);

  struct Params {
    typename Mainloop::Params mainloop;
    cute::Shape<int, int, int, int> shape; /* the kernel's M, N, K and 1 */
    int32_t k_tiles;
    Output<ElementD, RowScales> output;
  };

  struct SharedStorage {
    union {
      typename Mainloop::TensorStorage operands;
      Sum sums[kRows * kPitch];
    };
    FullBarrier full[kStages];
    EmptyBarrier empty[kStages];
  };

  static constexpr int SharedStorageSize = sizeof(SharedStorage);
  static constexpr uint32_t MaxThreadsPerBlock = kConsumers + 32;
  static constexpr uint32_t MinBlocksPerMultiprocessor = SharedStorageSize <= 113 * 1024 ? 2 : 1;

  CUTLASS_DEVICE void operator()(Params const& params, char* memory) {
    using namespace cute;  // NOLINT: function scope
    auto& shared = *reinterpret_cast<SharedStorage*>(memory);
    bool producer = threadIdx.x >= kConsumers;
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < kStages; ++stage) {
        shared.full[stage].init(1);
        shared.empty[stage].init(kConsumerWarps);
      }
      cutlass::arch::fence_barrier_init();
    }
    auto slices = static_cast<int32_t>(cute::cluster_shape().z);
    auto slice = static_cast<int32_t>(cute::block_id_in_cluster().z);
    auto first = static_cast<int32_t>(int64_t(params.k_tiles) * slice / slices);
    auto end = static_cast<int32_t>(int64_t(params.k_tiles) * (slice + 1) / slices);
    if (threadIdx.x == kConsumers) Mainloop::prefetch_tma_descriptors(params.mainloop);
    __syncthreads();
    cutlass::arch::wait_on_dependent_grids();
    if (producer) {
      if (cute::elect_one_sync()) load(params, shared, first, end - first);
      __syncwarp();
    } else {
      multiply(params, shared, end - first);
    }
    cute::cluster_arrive();
    cute::cluster_wait();
    if (!producer) add_up(params, shared, slices, slice);
    /* No block may leave while another still reads its shared memory. */
    cute::cluster_arrive();
    cute::cluster_wait();
  }

 private:
  CUTLASS_DEVICE static void load(Params const& params, SharedStorage& shared, int32_t first,
                                  int32_t count) {
    using namespace cute;
    auto [gA, gB] = Mainloop{}.load_init(params.shape, params.mainloop);
    Tensor sA = make_tensor(make_smem_ptr(shared.operands.smem_A.data()),
                            typename Mainloop::SmemLayoutA{});
    Tensor sB = make_tensor(make_smem_ptr(shared.operands.smem_B.data()),
                            typename Mainloop::SmemLayoutB{});
    auto copy_a = params.mainloop.tma_load_a.get_slice(0);
    auto copy_b = params.mainloop.tma_load_b.get_slice(0);
    Tensor from_a = copy_a.partition_S(gA(_, _, int(blockIdx.x), _, 0));
    Tensor from_b = copy_b.partition_S(gB(_, _, int(blockIdx.y), _, 0));
    Tensor to_a = copy_a.partition_D(sA);
    Tensor to_b = copy_b.partition_D(sB);
    int stage = 0;
    uint32_t phase = 1; /* a fresh barrier's "previous" phase: the first waits fall through */
    for (int32_t i = 0; i < count; ++i) {
      shared.empty[stage].wait(phase);
      shared.full[stage].arrive_and_expect_tx(kBytes);
      auto& barrier = *reinterpret_cast<uint64_t*>(&shared.full[stage]);
      copy(params.mainloop.tma_load_a.with(barrier), from_a(_, _, _, first + i),
           to_a(_, _, _, stage));
      copy(params.mainloop.tma_load_b.with(barrier), from_b(_, _, _, first + i),
           to_b(_, _, _, stage));
      if (++stage == kStages) {
        stage = 0;
        phase ^= 1;
      }
    }
  }

  CUTLASS_DEVICE static void multiply(Params const& params, SharedStorage& shared, int32_t count) {
    using namespace cute;
    Tensor sA = make_tensor(make_smem_ptr(shared.operands.smem_A.data()),
                            typename Mainloop::SmemLayoutA{});
    Tensor sB = make_tensor(make_smem_ptr(shared.operands.smem_B.data()),
                            typename Mainloop::SmemLayoutB{});
    TiledMma mma;
    auto thread = mma.get_slice(threadIdx.x);
    Tensor a = thread.make_fragment_A(thread.partition_A(sA));
    Tensor b = thread.make_fragment_B(thread.partition_B(sB));
    Tensor sums = partition_fragment_C(mma, take<0, 2>(TileShape{}));
    mma.accumulate_ = GMMA::ScaleOut::Zero;
    warpgroup_fence_operand(sums);
    bool releases = threadIdx.x % 32 == 0;
    int stage = 0;
    int released = 0;
    uint32_t phase = 0;
    for (int32_t i = 0; i < count; ++i) {
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
    warpgroup_wait<0>();
    warpgroup_fence_operand(sums);
    cutlass::arch::launch_dependent_grids();
    /* The operands' memory is reused: every warp must have read the last of them. */
    cutlass::arch::NamedBarrier::sync(kConsumers, uint32_t(0));
    Tensor places = thread.partition_C(make_identity_tensor(take<0, 2>(TileShape{})));
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < size(sums); i += 2) {
      int m = get<0>(places(i)), n = get<1>(places(i)); /* elements i and i + 1: n and n + 1 */
      if constexpr (Swapped) {
        shared.sums[n * kPitch + m] = sums(i);
        shared.sums[(n + 1) * kPitch + m] = sums(i + 1);
      } else {
        *reinterpret_cast<Pair*>(&shared.sums[m * kPitch + n]) = {sums(i), sums(i + 1)};
      }
    }
  }

  CUTLASS_DEVICE static void add_up(Params const& params, SharedStorage& shared, int32_t slices,
                                    int32_t slice) {
    constexpr int kQuads = kColumns / 4;
    constexpr int kSize = kRows * kQuads;
    auto const& output = params.output;
    int32_t row = int32_t(Swapped ? blockIdx.y : blockIdx.x) * kRows;
    int32_t column = int32_t(Swapped ? blockIdx.x : blockIdx.y) * kColumns;
    auto factor = output.factor();
    uint32_t base = cute::cast_smem_ptr_to_uint(shared.sums);
    int end = kSize * (slice + 1) / slices;
    for (int quad = kSize * slice / slices + threadIdx.x; quad < end; quad += kConsumers) {
      int r = quad / kQuads, c = quad % kQuads * 4;
      uint32_t local = base + (r * kPitch + c) * int(sizeof(Sum));
      auto sum =
          sum_in_order<Quad<Sum>>(slices, [&](int32_t other) { return load_from(local, other); });
      output.store(row + r, column + c, sum, factor);
    }
  }

  /* Four sums at this address in the shared memory of another block of the cluster. */
  CUTLASS_DEVICE static Quad<Sum> load_from(uint32_t local, int32_t block) {
    Quad<Sum> value;
    uint32_t remote = cute::set_block_rank(local, static_cast<uint32_t>(block));
    if constexpr (std::is_integral_v<Sum>) {
      asm volatile("ld.shared::cluster.v4.s32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                   : "r"(remote));
      return value;
    } else {
      asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                   : "r"(remote));
      return value;
    }
  }
};

/* C ABI adapter. `Traits` are the problem's; `gs_arguments::splits` is the size of the cluster. */
template <class Mainloop, class ElementD, class Traits, bool Swapped, bool RowScales = false>
struct ClusterSplitKGemm {
  using Kernel = ClusterSplitKKernel<Mainloop, ElementD, Swapped, RowScales>;
  using Params = typename Kernel::Params;
  using ElementA =
      std::conditional_t<Swapped, typename Mainloop::ElementB, typename Mainloop::ElementA>;
  using ElementB =
      std::conditional_t<Swapped, typename Mainloop::ElementA, typename Mainloop::ElementB>;
  using ProblemOperands = Operands<Traits, ElementA, ElementB, ElementD>;
  using Launch = Launcher<Params, entry_point<Kernel>, Kernel::SharedStorageSize,
                          Start::kOverlaps>;
  static constexpr int kLargestCluster = 16;
  static constexpr bool kIsFP8 = sizeof(ElementA) == 1 && !std::is_integral_v<ElementA>;
  static constexpr uint32_t kExtras = RowScales ? kRowScales : kIsFP8 ? kScales : 0;

  static constexpr bool kAFirst = kFirstModeContiguous<typename Mainloop::StrideA>;
  static constexpr bool kBFirst = kFirstModeContiguous<typename Mainloop::StrideB>;
  static_assert((Swapped ? kBFirst : kAFirst) == !Traits::ARowMajor, "layout of A");
  static_assert((Swapped ? kAFirst : kBFirst) == Traits::BRowMajor, "layout of B");
  static_assert(Traits::AlignmentA * sizeof(ElementA) % 16 == 0, "TMA reads A");
  static_assert(Traits::AlignmentB * sizeof(ElementB) % 16 == 0, "TMA reads B");

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
    Operand const& a = Swapped ? operands.b : operands.a;
    Operand const& b = Swapped ? operands.a : operands.b;
    typename Mainloop::Arguments arguments{};
    arguments.ptr_A = static_cast<typename Mainloop::ElementA const*>(a.data);
    arguments.ptr_B = static_cast<typename Mainloop::ElementB const*>(b.data);
    arguments.dA = stride_of<typename Mainloop::StrideA>(a, 1);
    arguments.dB = stride_of<typename Mainloop::StrideB>(b, 1);
    auto shape = cute::make_shape(Swapped ? g.n : g.m, Swapped ? g.m : g.n, g.k, 1);
    Params params{Mainloop::to_underlying_arguments(shape, arguments, nullptr), shape, k_tiles(g),
                  Output<ElementD, RowScales>(g, operands)};
    auto splits = static_cast<unsigned>(g.splits);
    dim3 grid(tiles_m(g), tiles_n(g), splits);
    return status_code(Launch::launch(params, grid, dim3(Kernel::MaxThreadsPerBlock),
                                      dim3(1, 1, splits), g.device,
                                      static_cast<cudaStream_t>(stream)));
  }

 private:
  static unsigned tiles(int32_t extent, int tile) { return (int64_t(extent) + tile - 1) / tile; }
  static unsigned tiles_m(gs_arguments const& g) {
    return tiles(Swapped ? g.n : g.m, Kernel::kTileM);
  }
  static unsigned tiles_n(gs_arguments const& g) {
    return tiles(Swapped ? g.m : g.n, Kernel::kTileN);
  }
  static int32_t k_tiles(gs_arguments const& g) {
    return tiles(g.k, cute::size<2>(typename Kernel::TileShape{}));
  }

  static cutlass::Status check(gs_arguments const& g) {
    using cutlass::Status;
    Status status = check_problem(g, kExtras);
    if (status != Status::kSuccess) return status;
    if (!takes_scalars<ElementD>(g)) return Status::kErrorNotSupported;
    if (RowScales && !has_row_scales(g)) return Status::kErrorInvalidProblem;
    if (g.batch > 1 || g.splits > kLargestCluster) return Status::kErrorNotSupported;
    if (g.splits > 1 && g.decomposition != 1) return Status::kErrorNotSupported;
    if (g.splits > k_tiles(g) || tiles_n(g) > 65535) return Status::kErrorInvalidProblem;
    if (g.beta != 0.0f && g.c == nullptr) return Status::kErrorInvalidProblem;
    return ProblemOperands(g).check(g.batch);
  }
};

}  // namespace gemmsmith
