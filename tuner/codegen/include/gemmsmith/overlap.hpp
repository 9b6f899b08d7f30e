/* What a kernel does before the grid ahead of it in the stream has finished.
 *
 * With programmatic dependent launch the blocks of the next grid start on whatever SMs the one
 * before leaves idle. Until it has finished they may not read anything it could still write; but
 * they may ask for their first tiles to be brought into L2, because L2 is where all SMs' writes
 * meet. So device memory stays busy across the gap between two launches.
 */
#pragma once

#include "cutlass/arch/grid_dependency_control.h"
#include "cutlass/gemm/gemm.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

namespace gemmsmith {

/* Kernels that hand out one tile per thread block keep no scheduler in their parameters. */
template <class Params, class = void>
struct IsPersistent : std::false_type {};
template <class Params>
struct IsPersistent<Params, std::void_t<decltype(Params::scheduler)>> : std::true_type {};

/* Prefetches `count` K tiles of A and B from tile `first` on; one thread. `rank` is the block's
 * place in a cluster whose blocks fetch parts of each other's tiles. */
template <class Mainloop, class Shape>
CUTLASS_DEVICE void prefetch_tiles(typename Mainloop::Params const& params, Shape const& shape,
                                   int m, int n, int l, int first, int count, uint32_t rank) {
  using namespace cute;
  constexpr uint32_t kClusterM = size<0>(typename Mainloop::DispatchPolicy::ClusterShape{});
  auto inputs = Mainloop{}.load_init(shape, params);
  auto copy_a = params.tma_load_a.get_slice(rank / kClusterM);
  auto copy_b = params.tma_load_b.get_slice(rank % kClusterM);
  Tensor from_a = copy_a.partition_S(get<0>(inputs)(_, _, m, _, l));
  Tensor from_b = copy_b.partition_S(get<1>(inputs)(_, _, n, _, l));
  for (int k = first; k < first + count; ++k) {
    prefetch(params.tma_load_a, from_a(_, _, _, k));
    prefetch(params.tma_load_b, from_b(_, _, _, k));
  }
}

/* A CUTLASS kernel that lets the next grid start at once, and prefetches as much as its pipeline
 * holds. The fourth warp has nothing else to do at this point. */
template <class Kernel>
struct Overlapped : Kernel {
  using Params = typename Kernel::Params;
  using Mainloop = typename Kernel::CollectiveMainloop;
  static constexpr int kStages = Mainloop::DispatchPolicy::Stages;
  static constexpr unsigned kWarp = 3;

  CUTLASS_DEVICE void operator()(Params const& params, char* memory) {
    cutlass::arch::launch_dependent_grids();
    if (threadIdx.x / 32 == kWarp) {
      if (cute::elect_one_sync()) prefetch_first(params);
      __syncwarp();
    }
    Kernel::operator()(params, memory);
  }

 private:
  CUTLASS_DEVICE static void prefetch_first(Params const& params) {
    using namespace cute;
    using TileShape = typename Kernel::TileShape;
    auto shape = append<4>(params.problem_shape, Int<1>{});
    uint32_t rank = cute::block_rank_in_cluster();
    if constexpr (IsPersistent<Params>::value) {
      using Scheduler = typename Kernel::TileScheduler;
      Scheduler scheduler{params.scheduler};
      auto work = scheduler.initial_work_tile_info(typename Kernel::ClusterShape{});
      if (!work.is_valid()) return;
      int first = Scheduler::get_work_k_tile_start(work);
      int count = Scheduler::get_work_k_tile_count(work, shape, TileShape{});
      prefetch_tiles<Mainloop>(params.mainloop, shape, work.M_idx, work.N_idx, work.L_idx, first,
                               count < kStages ? count : kStages, rank);
    } else {
      int count = ceil_div(get<2>(shape), int(size<2>(TileShape{})));
      prefetch_tiles<Mainloop>(params.mainloop, shape, int(blockIdx.x), int(blockIdx.y),
                               int(blockIdx.z), 0, count < kStages ? count : kStages, rank);
    }
  }
};

}  // namespace gemmsmith
