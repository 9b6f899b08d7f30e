/* C ABI adapter of a CUTLASS 2.x kernel (`cutlass::gemm::kernel::DefaultGemmUniversal`).
 *
 * These serve what TMA and cp.async cannot: any alignment. The kernel's own orientation is the
 * problem's, with row-major D (the emitter transposes the library's column-major convention).
 * The kernel is launched directly, because `device::GemmUniversalBase` queries the device.
 */
#pragma once

#include "cutlass/arch/arch.h"
#include "cutlass/arch/mma.h"
#include "cutlass/cutlass.h"
#include "cutlass/device_kernel.h"
#include "cutlass/gemm/kernel/default_gemm_universal.h"
#include "cutlass/layout/matrix.h"
#include "cutlass/numeric_types.h"
#include "gemmsmith/epilogue.hpp"
#include "gemmsmith/launch.hpp"
#include "gemmsmith/operands.hpp"

namespace gemmsmith {

template <class Kernel, class Traits>
struct Gemm2x {
  using Arguments = typename Kernel::Arguments;
  using Params = typename Kernel::Params;
  using EpilogueScalars = typename Kernel::EpilogueOutputOp::Params;
  using ElementD = typename Kernel::ElementC;
  using ProblemOperands =
      Operands<Traits, typename Kernel::ElementA, typename Kernel::ElementB, ElementD>;
  static constexpr int kSharedBytes = sizeof(typename Kernel::SharedStorage);
  using Launch = Launcher<Params, cutlass::Kernel2<Kernel>, kSharedBytes, Start::kInOrder>;

  template <bool IsRowMajor>
  using LayoutOf =
      std::conditional_t<IsRowMajor, cutlass::layout::RowMajor, cutlass::layout::ColumnMajor>;
  static_assert(std::is_same_v<typename Kernel::LayoutA, LayoutOf<Traits::ARowMajor>>, "A");
  static_assert(std::is_same_v<typename Kernel::LayoutB, LayoutOf<Traits::BRowMajor>>, "B");
  static_assert(std::is_same_v<typename Kernel::LayoutC, cutlass::layout::RowMajor>, "D");
  static_assert(Traits::AlignmentA % Kernel::kAlignmentA == 0, "alignment of A");
  static_assert(Traits::AlignmentB % Kernel::kAlignmentB == 0, "alignment of B");
  static_assert(Traits::AlignmentD % Kernel::kAlignmentC == 0, "alignment of D");

  static int32_t describe(gs_kernel_info& info) {
    info.threads = Kernel::kThreadCount;
    info.shared_bytes = kSharedBytes;
    info.stages = Kernel::kStages;
    Launch::resources(info);
    return 0;
  }

  static int32_t can_implement(gs_arguments const& g) { return status_code(check(g)); }

  static int64_t workspace_bytes(gs_arguments const& g) {
    cutlass::Status status = check(g);
    if (status != cutlass::Status::kSuccess) return -int64_t(status_code(status));
    return static_cast<int64_t>(to_params(g).get_workspace_size());
  }

  static int32_t run(gs_arguments const& g, void* workspace, void* stream_handle) {
    cutlass::Status status = check(g);
    if (status != cutlass::Status::kSuccess) return status_code(status);
    auto stream = static_cast<cudaStream_t>(stream_handle);
    DeviceScope device(g.device);
    if (device.error() != cudaSuccess) return status_code(device.error());
    Params params = to_params(g);
    /* Serial split-K takes turns through semaphores that must start at zero. */
    status = params.init_workspace(workspace, stream);
    if (status != cutlass::Status::kSuccess) return status_code(status);
    return status_code(Launch::launch(params, params.get_grid_dims(), dim3(Kernel::kThreadCount),
                                      dim3(1), g.device, stream));
  }

 private:
  static cutlass::Status check(gs_arguments const& g) {
    using cutlass::Status;
    Status status = check_problem(g, kExtrasOf<EpilogueScalars>);
    if (status != Status::kSuccess) return status;
    /* Split-K shares the third grid dimension with batches; stream-K is another kernel. */
    if (g.decomposition == 2 || (g.splits > 1 && (g.decomposition != 1 || g.batch > 1))) {
      return Status::kErrorNotSupported;
    }
    if (g.beta != 0.0f && g.c == nullptr) return Status::kErrorInvalidProblem;
    status = ProblemOperands(g).check(g.batch);
    if (status != Status::kSuccess) return status;
    dim3 grid = to_params(g).get_grid_dims();
    if (grid.y > 65535 || grid.z > 65535) return Status::kErrorInvalidProblem;
    return Kernel::can_implement(to_arguments(g));
  }

  static Params to_params(gs_arguments const& g) {
    return Params(to_arguments(g), g.sm_count, /*sm_occupancy=*/1);
  }

  static Arguments to_arguments(gs_arguments const& g) {
    ProblemOperands operands(g);
    EpilogueScalars scalars;
    set_scalars(scalars, g);
    return Arguments(g.batch > 1 ? cutlass::gemm::GemmUniversalMode::kBatched
                                 : cutlass::gemm::GemmUniversalMode::kGemm,
                     {g.m, g.n, g.k}, g.batch > 1 ? g.batch : g.splits, scalars, g.a, g.b,
                     operands.c.data, g.d, g.batch_stride_a, g.batch_stride_b,
                     operands.c.batch_stride, g.batch_stride_d, operands.a.row_stride(),
                     operands.b.row_stride(), operands.c.row_stride(), operands.d.row_stride());
  }
};

}  // namespace gemmsmith
