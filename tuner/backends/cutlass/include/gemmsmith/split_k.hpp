/* Split-K in two kernels: an ordinary CUTLASS kernel computes slices of K as if they were batches,
 * with their sums in the workspace; a second kernel adds them up and finishes D.
 *
 * Nothing has to be zeroed, and slices are added in their order, so D is the same bits every time.
 * The second kernel is launched so that it starts while the first one drains.
 */
#pragma once

#include "cutlass/arch/grid_dependency_control.h"
#include "gemmsmith/gemm3x.hpp"
#include "gemmsmith/output.hpp"

namespace gemmsmith {

template <class ElementD, class Sum, bool RowScales>
struct ReduceParams {
  Sum const* partials; /* [splits, M, N] */
  Output<ElementD, RowScales> output;
  int32_t splits;
};

constexpr int kReduceThreads = 256;

/* Two blocks to an SM: without this limit those that start early would crowd on the few SMs that
 * the first kernel leaves idle, instead of spreading over all of them. */
constexpr int kReduceSharedBytes = 96 * 1024;

/* A thread adds four neighbours of D (N is a multiple of four). */
template <class ElementD, class Sum, bool RowScales>
__global__ void __launch_bounds__(kReduceThreads)
    reduce_partials(CUTLASS_GRID_CONSTANT ReduceParams<ElementD, Sum, RowScales> const params) {
  using Four = Quad<Sum>;
  cutlass::arch::launch_dependent_grids();
  auto const& output = params.output;
  int32_t quads = output.n / 4;
  int64_t size = int64_t(output.m) * quads;
  int64_t quad = int64_t(blockIdx.x) * kReduceThreads + threadIdx.x;
  if (quad >= size) return;
  auto partial = reinterpret_cast<Four const*>(params.partials) + quad;
  cutlass::arch::wait_on_dependent_grids();
  auto factor = output.factor();
  Four sum = sum_in_order<Four>(params.splits,
                                [&](int32_t split) { return __ldcg(partial + split * size); });
  auto row = static_cast<int32_t>(quad / quads);
  output.store(row, static_cast<int32_t>(quad - int64_t(row) * quads) * 4, sum, factor);
}

/* `Kernel` writes FP32 or 32-bit integers; `Traits` and `ElementD` are the problem's. */
template <class Kernel, class Traits, bool Swapped, class ElementD, bool RowScales = false>
struct SplitKGemm {
  using Partial = Gemm3x<Kernel,
                         gemmsmith::Traits<Traits::ARowMajor, Traits::BRowMajor, Traits::AlignmentA,
                                           Traits::AlignmentB, 4>,
                         Swapped>;
  using ProblemOperands = Operands<Traits, typename Partial::ProblemElementA,
                                   typename Partial::ProblemElementB, ElementD>;
  using Sum = typename Partial::ElementD;
  using Params = ReduceParams<ElementD, Sum, RowScales>;
  using Reduce = Launcher<Params, reduce_partials<ElementD, Sum, RowScales>, kReduceSharedBytes,
                          Start::kOverlaps>;
  static_assert(std::is_same_v<Sum, float> || std::is_same_v<Sum, int32_t>, "partial sums");
  static constexpr uint32_t kExtras =
      RowScales ? kRowScales : Partial::kTakesScales ? kScales : 0;
  static_assert(Traits::AlignmentD % 4 == 0, "D in quads");

  static int32_t describe(gs_kernel_info& info) { return Partial::describe(info); }

  static int32_t can_implement(gs_arguments const& g) { return status_code(check(g)); }

  static int64_t workspace_bytes(gs_arguments const& g) {
    cutlass::Status status = check(g);
    if (status != cutlass::Status::kSuccess) return -int64_t(status_code(status));
    return int64_t(g.splits) * g.m * g.n * int64_t(sizeof(Sum));
  }

  static int32_t run(gs_arguments const& g, void* workspace, void* stream) {
    cutlass::Status status = check(g);
    if (status != cutlass::Status::kSuccess) return status_code(status);
    if (workspace == nullptr) return status_code(cutlass::Status::kErrorWorkspaceNull);
    int32_t code = Partial::run(slices(g, workspace), nullptr, stream);
    if (code != 0) return code;
    DeviceScope device(g.device);
    if (device.error() != cudaSuccess) return status_code(device.error());
    Params params{static_cast<Sum const*>(workspace),
                  Output<ElementD, RowScales>(g, ProblemOperands(g)), g.splits};
    int64_t quads = int64_t(g.m) * (g.n / 4);
    auto blocks = static_cast<unsigned>((quads + kReduceThreads - 1) / kReduceThreads);
    return status_code(Reduce::launch(params, dim3(blocks), dim3(kReduceThreads), dim3(1), g.device,
                                      static_cast<cudaStream_t>(stream)));
  }

 private:
  static cutlass::Status check(gs_arguments const& g) {
    using cutlass::Status;
    Status status = check_problem(g, kExtras);
    if (status != Status::kSuccess) return status;
    if (!takes_scalars<ElementD>(g)) return Status::kErrorNotSupported;
    if (RowScales && !has_row_scales(g)) return Status::kErrorInvalidProblem;
    if (g.batch > 1 || g.decomposition != 1) return Status::kErrorNotSupported;
    if (g.k % g.splits != 0) return Status::kErrorInvalidProblem;
    if (int64_t(g.m) * (g.n / 4) > int64_t(kReduceThreads) * INT32_MAX) {
      return Status::kErrorInvalidProblem;
    }
    if (g.beta != 0.0f && g.c == nullptr) return Status::kErrorInvalidProblem;
    status = ProblemOperands(g).check(g.batch);
    if (status != Status::kSuccess) return status;
    /* A stand-in for the workspace: an address aligned as one would be. */
    return static_cast<Status>(
        Partial::can_implement(slices(g, reinterpret_cast<void*>(uintptr_t(256)))));
  }

  /* The same product as a batch of slices along K. */
  static gs_arguments slices(gs_arguments const& g, void* workspace) {
    ProblemOperands operands(g);
    gs_arguments partial = g;
    partial.batch = g.splits;
    partial.k = g.k / g.splits;
    partial.batch_stride_a =
        Traits::ARowMajor ? int64_t(partial.k) : partial.k * operands.a.row_stride();
    partial.batch_stride_b =
        Traits::BRowMajor ? partial.k * operands.b.row_stride() : int64_t(partial.k);
    partial.lda = operands.a.row_stride();
    partial.ldb = operands.b.row_stride();
    partial.d = workspace;
    partial.ldd = g.n;
    partial.batch_stride_d = int64_t(g.m) * g.n;
    partial.c = nullptr;
    partial.alpha = 1.0f;
    partial.beta = 0.0f;
    partial.scale_a = partial.scale_b = nullptr;
    partial.scaling = GS_SCALING_TENSOR;
    partial.batch_stride_scale_a = partial.batch_stride_scale_b = 0;
    partial.decomposition = 0;
    partial.splits = 1;
    return partial;
  }
};

}  // namespace gemmsmith
