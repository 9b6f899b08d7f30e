/* C ABI adapter of a CUTLASS 3.x kernel (`cutlass::gemm::kernel::GemmUniversal`).
 *
 * Orientation: a swapped kernel computes Dᵀ[N,M] = Bᵀ[N,K] · Aᵀ[K,M]. Its A is the problem's B
 * and its D is column-major, so that the bytes written are the problem's row-major D. The static
 * assertions below tie the kernel's strides to the problem's layout: a unit whose description
 * and template disagree does not compile.
 */
#pragma once

#include "cutlass/cutlass.h"
#include "cutlass/detail/layout.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/gemm.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/numeric_types.h"
#include "gemmsmith/epilogue3x.hpp"
#include "gemmsmith/launch.hpp"
#include "gemmsmith/operands.hpp"

namespace gemmsmith {

/* Fills in the one run-time row stride of a CuTe stride (rows, columns, batch). */
template <class Stride>
CUTLASS_HOST_DEVICE void set_row_stride(Stride& stride, int64_t rows) {
  if constexpr (cute::is_static_v<cute::remove_cvref_t<decltype(cute::get<0>(stride))>>) {
    cute::get<1>(stride) = rows;
  } else {
    cute::get<0>(stride) = rows;
  }
}

template <class Stride>
Stride stride_of(Operand const& operand, int32_t batch) {
  Stride stride{};
  set_row_stride(stride, operand.row_stride());
  cute::get<2>(stride) = batch > 1 ? operand.batch_stride : 0;
  return stride;
}

/* Whether the first mode (M, or N of a B operand) is the contiguous one. */
template <class Stride>
constexpr bool kFirstModeContiguous =
    cute::is_static_v<cute::remove_cvref_t<decltype(cute::get<0>(Stride{}))>>;

template <class Scheduler, class = void>
struct SplitsWork : std::false_type {};
template <class Scheduler>
struct SplitsWork<Scheduler, std::void_t<decltype(Scheduler::splits)>> : std::true_type {};

/* The launch's choices for a tile scheduler. */
template <class Scheduler>
void set_scheduler(Scheduler& scheduler, gs_arguments const& g) {
  using Raster = decltype(scheduler.raster_order);
  scheduler.max_swizzle_size = g.swizzle;
  scheduler.raster_order = g.raster_order == 1   ? Raster::AlongM
                           : g.raster_order == 2 ? Raster::AlongN
                                                 : Raster::Heuristic;
  if constexpr (SplitsWork<Scheduler>::value) {
    using Decomposition = decltype(scheduler.decomposition_mode);
    scheduler.splits = g.splits;
    scheduler.decomposition_mode = g.decomposition == 0   ? Decomposition::DataParallel
                                   : g.decomposition == 1 ? Decomposition::SplitK
                                   : g.decomposition == 2 ? Decomposition::StreamK
                                                          : Decomposition::Heuristic;
  }
}

/* Kernels that hand out one tile per thread block keep no scheduler in their parameters. */
template <class Params, class = void>
struct IsPersistent : std::false_type {};
template <class Params>
struct IsPersistent<Params, std::void_t<decltype(Params::scheduler)>> : std::true_type {};

template <class Collective, class = void>
struct ReadsWithTma : std::false_type {};
template <class Collective>
struct ReadsWithTma<Collective, std::void_t<decltype(Collective::Params::tma_load_a)>>
    : std::true_type {};

/* Mainloops that read B in two halves (gated3x.hpp). */
template <class Arguments, class = void>
struct ReadsUp : std::false_type {};
template <class Arguments>
struct ReadsUp<Arguments, std::void_t<decltype(Arguments::ptr_up)>> : std::true_type {};

template <class Kernel, class Traits, bool Swapped>
struct Gemm3x {
  using Arguments = typename Kernel::Arguments;
  using Params = typename Kernel::Params;
  using Collective = typename Kernel::CollectiveMainloop;
  using Epilogue = typename Kernel::CollectiveEpilogue;
  using EpilogueScalars = decltype(Arguments{}.epilogue.thread);
  using SchedulerArguments = decltype(Arguments{}.scheduler);
  using ClusterShape = typename Kernel::DispatchPolicy::ClusterShape;
  using TileShape = typename Kernel::TileShape;
  using ProblemElementA =
      std::conditional_t<Swapped, typename Kernel::ElementB, typename Kernel::ElementA>;
  using ProblemElementB =
      std::conditional_t<Swapped, typename Kernel::ElementA, typename Kernel::ElementB>;
  using ElementC = typename Kernel::ElementC;
  using ElementD = typename Kernel::ElementD;
  using ProblemOperands = Operands<Traits, ProblemElementA, ProblemElementB, ElementD>;
  static constexpr bool kTakesScales = TakesScales<EpilogueScalars>::value;
  static constexpr int kClusterBlocks = cute::size(ClusterShape{});
  /* CUTLASS's TMA kernels wait for the grid before them; its cp.async kernels do not. */
  using Launch = Launcher<Params, entry_point<Kernel>, Kernel::SharedStorageSize,
                          ReadsWithTma<Collective>::value ? Start::kOverlaps : Start::kInOrder>;

  /* A (M,K) row-major means K contiguous; B is (N,K) to CuTe, so B row-major means N contiguous. */
  static constexpr bool kAFirst = kFirstModeContiguous<typename Kernel::StrideA>;
  static constexpr bool kBFirst = kFirstModeContiguous<typename Kernel::StrideB>;
  static_assert((Swapped ? kBFirst : kAFirst) == !Traits::ARowMajor, "layout of A");
  static_assert((Swapped ? kAFirst : kBFirst) == Traits::BRowMajor, "layout of B");
  static_assert(kFirstModeContiguous<typename Kernel::StrideC> == Swapped, "C is row-major");
  static_assert(kFirstModeContiguous<typename Kernel::StrideD> == Swapped, "D is row-major");

  static constexpr int kNeedsA = cutlass::detail::get_alignment_count_from_gmem_tiled_copy<
      typename Collective::GmemTiledCopyA, typename Kernel::ElementA>();
  static constexpr int kNeedsB = cutlass::detail::get_alignment_count_from_gmem_tiled_copy<
      typename Collective::GmemTiledCopyB, typename Kernel::ElementB>();
  static constexpr int kNeedsD = cutlass::detail::get_alignment_count_from_gmem_tiled_copy<
      typename Epilogue::GmemTiledCopyD, ElementD>();
  static_assert(Traits::AlignmentA % (Swapped ? kNeedsB : kNeedsA) == 0, "alignment of A");
  static_assert(Traits::AlignmentB % (Swapped ? kNeedsA : kNeedsB) == 0, "alignment of B");
  static_assert(Traits::AlignmentD % kNeedsD == 0, "alignment of D");

  static int32_t describe(gs_kernel_info& info) {
    info.threads = static_cast<int32_t>(Kernel::MaxThreadsPerBlock);
    info.shared_bytes = static_cast<int32_t>(Kernel::SharedStorageSize);
    info.stages = static_cast<int32_t>(Kernel::DispatchPolicy::Stages);
    Launch::resources(info);
    return 0;
  }

  static int32_t can_implement(gs_arguments const& g) { return status_code(check(g)); }

  static int64_t workspace_bytes(gs_arguments const& g) {
    cutlass::Status status = check(g);
    if (status != cutlass::Status::kSuccess) return -int64_t(status_code(status));
    return static_cast<int64_t>(Kernel::get_workspace_size(to_arguments(g)));
  }

  static int32_t run(gs_arguments const& g, void* workspace, void* stream_handle) {
    cutlass::Status status = check(g);
    if (status != cutlass::Status::kSuccess) return status_code(status);
    return run_checked(g, workspace, stream_handle);
  }

  /* `run` for arguments whose legality the caller vouches for. */
  static int32_t run_checked(gs_arguments const& g, void* workspace, void* stream_handle) {
    auto stream = static_cast<cudaStream_t>(stream_handle);
    DeviceScope device(g.device);
    if (device.error() != cudaSuccess) return status_code(device.error());
    Arguments arguments = to_arguments(g);
    dim3 cluster(cute::size<0>(ClusterShape{}), cute::size<1>(ClusterShape{}),
                 cute::size<2>(ClusterShape{}));
    /* CUTLASS's guess at how many clusters fit assumes GPCs of 18; the device knows its own. */
    if (kClusterBlocks > 2 && !SplitsWork<SchedulerArguments>::value) {
      int32_t resident = Launch::resident_clusters(Kernel::get_block_shape(), cluster, g.device);
      int32_t allowed = g.sm_count / kClusterBlocks;
      arguments.hw_info.max_active_clusters = resident < allowed ? resident : allowed;
    }
    if (workspace == nullptr && Kernel::get_workspace_size(arguments) > 0) {
      return status_code(cutlass::Status::kErrorWorkspaceNull);
    }
    /* Stream-K's barriers count up and are never reset: this clears them on the stream, before
     * every launch. It does nothing for the other schedulers. */
    cutlass::Status status = Kernel::initialize_workspace(arguments, workspace, stream);
    if (status != cutlass::Status::kSuccess) return status_code(status);
    Params params = Kernel::to_underlying_arguments(arguments, workspace);
    return status_code(Launch::launch(params, Kernel::get_grid_shape(params),
                                      Kernel::get_block_shape(), cluster, g.device, stream));
  }

  /* All of `check` that does not depend on how the operands are aligned. */
  static cutlass::Status check_launch(gs_arguments const& g) {
    using cutlass::Status;
    Status status = check_problem(g, kExtrasOf<EpilogueScalars>);
    if (status != Status::kSuccess) return status;
    if (!splits_supported(g)) return Status::kErrorNotSupported;
    if (!takes_scalars<decltype(EpilogueScalars{}.alpha)>(g)) return Status::kErrorNotSupported;
    if (TakesRowScales<EpilogueScalars>::value && !has_row_scales(g)) {
      return Status::kErrorInvalidProblem;
    }
    if (g.beta != 0.0f && g.c == nullptr) return Status::kErrorInvalidProblem;
    if (!IsPersistent<Params>::value && !fits_grid(g)) return Status::kErrorInvalidProblem;
    return Status::kSuccess;
  }

 private:
  static cutlass::Status check(gs_arguments const& g) {
    using cutlass::Status;
    Status status = check_launch(g);
    if (status != Status::kSuccess) return status;
    status = ProblemOperands(g).check(g.batch);
    if (status != Status::kSuccess) return status;
    return Kernel::can_implement(to_arguments(g)) ? Status::kSuccess : Status::kInvalid;
  }

  /* Splits need a scheduler that can split; data-parallel is what the others do anyway. */
  static bool splits_supported(gs_arguments const& g) {
    if (SplitsWork<SchedulerArguments>::value) return true;
    return g.splits == 1 && (g.decomposition == 0 || g.decomposition == 3);
  }

  /* CUDA's limits on the second (rounded up to a cluster) and third grid dimension. */
  static bool fits_grid(gs_arguments const& g) {
    int32_t extent = Swapped ? g.m : g.n;
    int32_t tile = static_cast<int32_t>(cute::size<1>(TileShape{}));
    return extent / tile < 65528 && g.batch <= 65535;
  }

  static Arguments to_arguments(gs_arguments const& g) {
    ProblemOperands operands(g);
    Operand const& a = Swapped ? operands.b : operands.a;
    Operand const& b = Swapped ? operands.a : operands.b;
    Arguments arguments{};
    arguments.mode = g.batch > 1 ? cutlass::gemm::GemmUniversalMode::kBatched
                                 : cutlass::gemm::GemmUniversalMode::kGemm;
    arguments.problem_shape =
        cute::make_shape(Swapped ? g.n : g.m, Swapped ? g.m : g.n, g.k, g.batch);
    arguments.mainloop.ptr_A = static_cast<decltype(arguments.mainloop.ptr_A)>(a.data);
    arguments.mainloop.ptr_B = static_cast<decltype(arguments.mainloop.ptr_B)>(b.data);
    if constexpr (ReadsUp<typename Kernel::MainloopArguments>::value) {
      arguments.mainloop.ptr_up = static_cast<decltype(arguments.mainloop.ptr_up)>(g.b_up);
    }
    arguments.mainloop.dA = stride_of<typename Kernel::StrideA>(a, g.batch);
    arguments.mainloop.dB = stride_of<typename Kernel::StrideB>(b, g.batch);
    arguments.epilogue.ptr_C = static_cast<ElementC const*>(operands.c.data);
    arguments.epilogue.dC = stride_of<typename Kernel::StrideC>(operands.c, g.batch);
    arguments.epilogue.ptr_D = static_cast<ElementD*>(g.d);
    arguments.epilogue.dD = stride_of<typename Kernel::StrideD>(operands.d, g.batch);
    set_scalars<Swapped>(arguments.epilogue.thread, g);
    arguments.hw_info.device_id = g.device;
    arguments.hw_info.sm_count = g.sm_count;
    set_scheduler(arguments.scheduler, g);
    return arguments;
  }
};

/* An adapter around `Product`: `Rules::check` comes before all that the product checks, which gets
 * the launch that `Rules::product_of` makes of the caller's. */
template <class Product, class Rules>
struct CheckedGemm {
  static int32_t describe(gs_kernel_info& info) { return Product::describe(info); }

  static int32_t can_implement(gs_arguments const& g) {
    cutlass::Status status = Rules::check(g);
    return status == cutlass::Status::kSuccess ? Product::can_implement(Rules::product_of(g))
                                               : status_code(status);
  }

  static int64_t workspace_bytes(gs_arguments const& g) {
    cutlass::Status status = Rules::check(g);
    return status == cutlass::Status::kSuccess ? Product::workspace_bytes(Rules::product_of(g))
                                               : -int64_t(status_code(status));
  }

  static int32_t run(gs_arguments const& g, void* workspace, void* stream) {
    cutlass::Status status = Rules::check(g);
    return status == cutlass::Status::kSuccess
               ? Product::run(Rules::product_of(g), workspace, stream)
               : status_code(status);
  }
};

}  // namespace gemmsmith
