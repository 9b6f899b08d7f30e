/* C ABI adapter of CUTLASS's pointer-array kernels: one product for each group of tokens.
 *
 * CUTLASS wants a shape, three pointers and three strides for every group. A kernel of ours derives
 * them on the device from where the groups end, so the host never waits for a router; CUTLASS's
 * kernel is launched so that it starts while that one drains. `rows`: the groups' tokens are rows
 * of A and D. `depth`: they are the terms of the sums, and every group has a D of its own.
 */
#pragma once

#include "cutlass/arch/grid_dependency_control.h"
#include "cutlass/gemm/group_array_problem_shape.hpp"
#include "gemmsmith/gemm3x.hpp"

namespace gemmsmith {

/* What CUTLASS reads: arrays with one element for every group. */
template <class Kernel>
struct GroupArrays {
  using Shape = typename Kernel::ProblemShape::UnderlyingProblemShape;

  Shape* shapes;
  typename Kernel::ElementA const** a;
  typename Kernel::ElementB const** b;
  typename Kernel::ElementD** d;
  typename Kernel::InternalStrideA* stride_a;
  typename Kernel::InternalStrideB* stride_b;
  typename Kernel::InternalStrideD* stride_d;

  /* Lays the arrays out from `workspace` on; gives their size. */
  int64_t place(char* workspace, int32_t groups) {
    int64_t at = 0;
    auto take = [&](auto*& array) {
      array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(workspace + at);
      at += (int64_t(groups) * int64_t(sizeof *array) + 255) / 256 * 256;
    };
    take(shapes);
    take(a);
    take(b);
    take(d);
    take(stride_a);
    take(stride_b);
    take(stride_d);
    return at;
  }
};

/* Operands in the problem's orientation, strides in elements. */
template <class Kernel>
struct PrepareParams {
  GroupArrays<Kernel> arrays;
  int32_t const* offsets;
  void const* a;
  void const* b;
  void* d;
  int64_t lda, ldb, ldd;
  int64_t group_stride_b, group_stride_d; /* of rows and of depth */
  int32_t groups, m, n, k;
  bool clears; /* an empty group's D is zeros */
};

constexpr int kPrepareThreads = 128;
constexpr int kClearBlocks = 16; /* that share the clearing of one group's D */

template <class Kernel, class Traits, bool Swapped, bool Depth>
__global__ void __launch_bounds__(kPrepareThreads)
    prepare_groups(CUTLASS_GRID_CONSTANT PrepareParams<Kernel> const p) {
#if defined(__CUDA_ARCH__)
  using ElementA = std::conditional_t<Swapped, typename Kernel::ElementB, typename Kernel::ElementA>;
  using ElementB = std::conditional_t<Swapped, typename Kernel::ElementA, typename Kernel::ElementB>;
  using ElementD = typename Kernel::ElementD;
  cutlass::arch::launch_dependent_grids();
  cutlass::arch::wait_on_dependent_grids();
  int64_t group = blockIdx.x;
  int32_t total = Depth ? p.k : p.m;
  /* Ends that do not ascend or exceed the total would address what is not the caller's. */
  int32_t begin = group > 0 ? min(max(p.offsets[group - 1], 0), total) : 0;
  int32_t tokens = max(min(p.offsets[group], total) - begin, 0);
  auto d = static_cast<ElementD*>(p.d) + (Depth ? group * p.group_stride_d : begin * p.ldd);
  bool empty = Depth && tokens == 0;
  if (blockIdx.y == 0 && threadIdx.x == 0) {
    auto a = static_cast<ElementA const*>(p.a);
    auto b = static_cast<ElementB const*>(p.b);
    if constexpr (Depth) {
      a += Traits::ARowMajor ? begin : begin * p.lda;
      b += Traits::BRowMajor ? begin * p.ldb : begin;
    } else {
      a += begin * p.lda;
      b += group * p.group_stride_b;
    }
    /* No tiles where nothing is to be summed: CUTLASS's accumulators would be left undefined. */
    int32_t m = Depth ? (empty ? 0 : p.m) : tokens;
    int32_t k = Depth ? tokens : p.k;
    typename Kernel::InternalStrideA stride_a{};
    typename Kernel::InternalStrideB stride_b{};
    typename Kernel::InternalStrideD stride_d{};
    set_row_stride(stride_a, Swapped ? p.ldb : p.lda);
    set_row_stride(stride_b, Swapped ? p.lda : p.ldb);
    set_row_stride(stride_d, p.ldd);
    p.arrays.d[group] = d;
    p.arrays.stride_a[group] = stride_a;
    p.arrays.stride_b[group] = stride_b;
    p.arrays.stride_d[group] = stride_d;
    if constexpr (Swapped) {
      p.arrays.shapes[group] = cute::make_shape(p.n, m, k);
      p.arrays.a[group] = b;
      p.arrays.b[group] = a;
    } else {
      p.arrays.shapes[group] = cute::make_shape(m, p.n, k);
      p.arrays.a[group] = a;
      p.arrays.b[group] = b;
    }
  }
  if (empty && p.clears) {
    for (int32_t row = blockIdx.y; row < p.m; row += gridDim.y) {
      for (int32_t column = threadIdx.x; column < p.n; column += kPrepareThreads) {
        d[row * p.ldd + column] = ElementD(0);
      }
    }
  }
#endif
}

/* CUTLASS's kernel, which reads the arrays at once, after the kernel that fills them in. */
template <class Kernel>
__global__ void
__launch_bounds__(Kernel::MaxThreadsPerBlock, Kernel::MinBlocksPerMultiprocessor)
    prepared_entry_point(CUTLASS_GRID_CONSTANT typename Kernel::Params const params) {
#if defined(__CUDA_ARCH__)
  extern __shared__ char shared_storage[];
  cutlass::arch::wait_on_dependent_grids();
  Kernel{}(params, shared_storage);
#endif
}

template <class Kernel, class Traits, bool Swapped, bool Depth>
struct Grouped3x {
  using Arguments = typename Kernel::Arguments;
  using Params = typename Kernel::Params;
  using ClusterShape = typename Kernel::DispatchPolicy::ClusterShape;
  using ElementD = typename Kernel::ElementD;
  using ProblemElementA =
      std::conditional_t<Swapped, typename Kernel::ElementB, typename Kernel::ElementA>;
  using ProblemElementB =
      std::conditional_t<Swapped, typename Kernel::ElementA, typename Kernel::ElementB>;
  using ProblemOperands = Operands<Traits, ProblemElementA, ProblemElementB, ElementD>;
  using Arrays = GroupArrays<Kernel>;
  using Prepare = Launcher<PrepareParams<Kernel>, prepare_groups<Kernel, Traits, Swapped, Depth>, 0,
                           Start::kOverlaps>;
  using Launch =
      Launcher<Params, prepared_entry_point<Kernel>, Kernel::SharedStorageSize, Start::kOverlaps>;
  static constexpr int kClusterBlocks = cute::size(ClusterShape{});

  static constexpr bool kAFirst = kFirstModeContiguous<typename Kernel::InternalStrideA>;
  static constexpr bool kBFirst = kFirstModeContiguous<typename Kernel::InternalStrideB>;
  static_assert((Swapped ? kBFirst : kAFirst) == !Traits::ARowMajor, "layout of A");
  static_assert((Swapped ? kAFirst : kBFirst) == Traits::BRowMajor, "layout of B");
  static_assert(kFirstModeContiguous<typename Kernel::InternalStrideD> == Swapped,
                "D is row-major");
  /* Groups start at any token. */
  static_assert(Depth ? !Traits::ARowMajor && Traits::BRowMajor : Traits::ARowMajor,
                "tokens are whole rows");

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
    Arrays arrays;
    int64_t placed = arrays.place(nullptr, g.batch);
    return placed + static_cast<int64_t>(Kernel::get_workspace_size(to_arguments(g, arrays)));
  }

  static int32_t run(gs_arguments const& g, void* workspace, void* stream_handle) {
    cutlass::Status status = check(g);
    if (status != cutlass::Status::kSuccess) return status_code(status);
    if (workspace == nullptr) return status_code(cutlass::Status::kErrorWorkspaceNull);
    auto stream = static_cast<cudaStream_t>(stream_handle);
    DeviceScope device(g.device);
    if (device.error() != cudaSuccess) return status_code(device.error());
    Arrays arrays;
    char* rest = static_cast<char*>(workspace) + arrays.place(static_cast<char*>(workspace), g.batch);
    cudaError_t error = prepare(g, arrays, stream);
    if (error != cudaSuccess) return status_code(error);
    Arguments arguments = to_arguments(g, arrays);
    dim3 cluster(cute::size<0>(ClusterShape{}), cute::size<1>(ClusterShape{}), 1);
    if (kClusterBlocks > 2) {
      int32_t resident = Launch::resident_clusters(Kernel::get_block_shape(), cluster, g.device);
      int32_t allowed = g.sm_count / kClusterBlocks;
      arguments.hw_info.max_active_clusters = resident < allowed ? resident : allowed;
    }
    Params params = Kernel::to_underlying_arguments(arguments, rest);
    return status_code(Launch::launch(params, Kernel::get_grid_shape(params),
                                      Kernel::get_block_shape(), cluster, g.device, stream));
  }

 private:
  static cutlass::Status check(gs_arguments const& g) {
    using cutlass::Status;
    Status status = check_problem(g, kGroups);
    if (status != Status::kSuccess) return status;
    if (g.splits != 1 || (g.decomposition != 0 && g.decomposition != 3)) {
      return Status::kErrorNotSupported;
    }
    if (!Depth && g.beta != 0.0f) return Status::kErrorNotSupported;
    /* C is D: one array of pointers serves both. */
    if (g.beta != 0.0f && (g.c != g.d || g.ldc != g.ldd)) return Status::kErrorNotSupported;
    if (g.offsets == nullptr || g.batch > GS_MOST_GROUPS) return Status::kErrorInvalidProblem;
    ProblemOperands operands(g);
    for (Status each : {operands.a.check(1), operands.b.check(Depth ? 1 : g.batch),
                        operands.d.check(Depth ? g.batch : 1)}) {
      if (each != Status::kSuccess) return each;
    }
    if (Depth && g.batch > 1 && g.batch_stride_d == 0) return Status::kErrorInvalidLayout;
    return Status::kSuccess;
  }

  static cudaError_t prepare(gs_arguments const& g, Arrays const& arrays, cudaStream_t stream) {
    ProblemOperands operands(g);
    PrepareParams<Kernel> params{arrays,
                                 g.offsets,
                                 g.a,
                                 g.b,
                                 g.d,
                                 operands.a.row_stride(),
                                 operands.b.row_stride(),
                                 operands.d.row_stride(),
                                 g.batch_stride_b,
                                 g.batch_stride_d,
                                 g.batch,
                                 g.m,
                                 g.n,
                                 g.k,
                                 Depth && g.beta == 0.0f};
    dim3 grid(static_cast<unsigned>(g.batch), params.clears ? kClearBlocks : 1);
    return Prepare::launch(params, grid, dim3(kPrepareThreads), dim3(1), g.device, stream);
  }

  static Arguments to_arguments(gs_arguments const& g, Arrays const& arrays) {
    Arguments arguments{};
    arguments.mode = cutlass::gemm::GemmUniversalMode::kGrouped;
    arguments.problem_shape = {g.batch, arrays.shapes, nullptr};
    arguments.mainloop.ptr_A = arrays.a;
    arguments.mainloop.dA = arrays.stride_a;
    arguments.mainloop.ptr_B = arrays.b;
    arguments.mainloop.dB = arrays.stride_b;
    arguments.epilogue.ptr_C = const_cast<typename Kernel::ElementC const**>(arrays.d);
    arguments.epilogue.dC = arrays.stride_d;
    arguments.epilogue.ptr_D = arrays.d;
    arguments.epilogue.dD = arrays.stride_d;
    set_scalars<Swapped>(arguments.epilogue.thread, g);
    arguments.hw_info.device_id = g.device;
    arguments.hw_info.sm_count = g.sm_count;
    set_scheduler(arguments.scheduler, g);
    return arguments;
  }
};

}  // namespace gemmsmith
