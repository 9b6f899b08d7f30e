/* Operands whose rows TMA cannot read, copied into rows that it can.
 *
 * TMA needs every row to start at a multiple of 16 bytes. An operand that does not is copied into
 * the workspace, row by row at an aligned pitch, and the kernel runs on the copy; what lies
 * between a row's end and the next is never read, because the descriptor's extents are the
 * problem's. The copy is far cheaper than computing with loads of 2 bytes each.
 */
#pragma once

#include "cutlass/arch/grid_dependency_control.h"
#include "cutlass/fast_math.h"
#include "gemmsmith/gemm3x.hpp"

namespace gemmsmith {

constexpr int kCopyBytes = 16; /* what a thread writes at a time, and TMA's alignment */
constexpr int kCopyThreads = 256;

/* One operand to copy: `rows` rows of `extent` bytes in each of `batch` matrices. */
struct RowCopy {
  char const* from;
  char* to;
  int64_t from_stride, from_batch_stride, to_stride; /* bytes */
  int64_t units;                                     /* of kCopyBytes, all batches */
  int32_t rows, extent;
  cutlass::FastDivmod per_row, per_batch; /* units to rows, rows to batches */
};

struct CopyParams {
  RowCopy operand[2];
  int32_t blocks_of_first;
};

/* Sixteen bytes from any address, out of aligned words: all of them inside the operand. */
CUTLASS_DEVICE uint4 load_unaligned(char const* from) {
  auto shift = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(from) & 3);
  auto words = reinterpret_cast<uint32_t const*>(from - shift);
  uint32_t word[5];
#pragma unroll
  for (int i = 0; i < 5; ++i) word[i] = __ldg(words + i);
  uint4 result;
  result.x = __funnelshift_r(word[0], word[1], shift * 8);
  result.y = __funnelshift_r(word[1], word[2], shift * 8);
  result.z = __funnelshift_r(word[2], word[3], shift * 8);
  result.w = __funnelshift_r(word[3], word[4], shift * 8);
  return result;
}

template <int ElementBytes>
__global__ void __launch_bounds__(kCopyThreads)
    copy_rows(CUTLASS_GRID_CONSTANT CopyParams const params) {
  using Element = std::conditional_t<
      ElementBytes == 1, uint8_t, std::conditional_t<ElementBytes == 2, uint16_t, uint32_t>>;
  cutlass::arch::wait_on_dependent_grids();
  bool first = int(blockIdx.x) < params.blocks_of_first;
  RowCopy const& operand = params.operand[first ? 0 : 1];
  int32_t block = int(blockIdx.x) - (first ? 0 : params.blocks_of_first);
  int32_t blocks = first ? params.blocks_of_first : int(gridDim.x) - params.blocks_of_first;
  for (int64_t unit = int64_t(block) * kCopyThreads + threadIdx.x; unit < operand.units;
       unit += int64_t(blocks) * kCopyThreads) {
    int row_of_all, position, batch, row;
    operand.per_row(row_of_all, position, static_cast<int>(unit));
    operand.per_batch(batch, row, row_of_all);
    char const* from = operand.from + batch * operand.from_batch_stride +
                       row * operand.from_stride + int64_t(position) * kCopyBytes;
    char* to = operand.to + row_of_all * operand.to_stride + int64_t(position) * kCopyBytes;
    int32_t left = operand.extent - position * kCopyBytes;
    /* The words read lie in this row, but for up to 3 bytes before it: not in the first row. */
    if (left >= kCopyBytes + 4 && (row_of_all > 0 || position > 0)) {
      *reinterpret_cast<uint4*>(to) = load_unaligned(from);
    } else {
      for (int byte = 0; byte < kCopyBytes && byte < left; byte += ElementBytes) {
        *reinterpret_cast<Element*>(to + byte) = *reinterpret_cast<Element const*>(from + byte);
      }
    }
  }
}

/* `Adapter` is a Gemm3x that reads its operands with TMA; `Traits` are those of any alignment. */
template <class Adapter, class Traits>
struct PaddedGemm {
  using ElementA = typename Adapter::ProblemElementA;
  using ElementB = typename Adapter::ProblemElementB;
  using ProblemOperands = Operands<Traits, ElementA, ElementB, typename Adapter::ElementD>;
  using Copy =
      Launcher<CopyParams, copy_rows<int(sizeof(ElementA))>, 0, Start::kOverlaps>;
  static_assert(sizeof(ElementA) == sizeof(ElementB), "one element size");

  static int32_t describe(gs_kernel_info& info) { return Adapter::describe(info); }

  static int32_t can_implement(gs_arguments const& g) { return status_code(check(g)); }

  static int64_t workspace_bytes(gs_arguments const& g) {
    cutlass::Status status = check(g);
    if (status != cutlass::Status::kSuccess) return -int64_t(status_code(status));
    ProblemOperands operands(g);
    return copy_bytes(operands.a, g.batch) + copy_bytes(operands.b, g.batch);
  }

  static int32_t run(gs_arguments const& g, void* workspace, void* stream) {
    cutlass::Status status = check(g);
    if (status != cutlass::Status::kSuccess) return status_code(status);
    ProblemOperands operands(g);
    int64_t bytes_a = copy_bytes(operands.a, g.batch);
    int64_t bytes_b = copy_bytes(operands.b, g.batch);
    if (bytes_a + bytes_b == 0) return Adapter::run_checked(g, nullptr, stream);
    if (workspace == nullptr) return status_code(cutlass::Status::kErrorWorkspaceNull);
    gs_arguments aligned = g;
    CopyParams params{};
    char* space = static_cast<char*>(workspace);
    int32_t blocks[2] = {0, 0};
    int32_t most = g.sm_count * (2048 / kCopyThreads);
    if (bytes_a > 0) {
      params.operand[0] = row_copy(operands.a, g.batch, space);
      redirect(operands.a, space, aligned.a, aligned.lda, aligned.batch_stride_a);
      blocks[0] = blocks_for(params.operand[0], most);
    }
    if (bytes_b > 0) {
      params.operand[1] = row_copy(operands.b, g.batch, space + bytes_a);
      redirect(operands.b, space + bytes_a, aligned.b, aligned.ldb, aligned.batch_stride_b);
      blocks[1] = blocks_for(params.operand[1], most);
    }
    params.blocks_of_first = blocks[0];
    {
      DeviceScope device(g.device);
      if (device.error() != cudaSuccess) return status_code(device.error());
      cudaError_t error = Copy::launch(params, dim3(blocks[0] + blocks[1]), dim3(kCopyThreads),
                                       dim3(1), g.device, static_cast<cudaStream_t>(stream));
      if (error != cudaSuccess) return status_code(error);
    }
    return Adapter::run_checked(aligned, nullptr, stream);
  }

 private:
  static cutlass::Status check(gs_arguments const& g) {
    using cutlass::Status;
    Status status = Adapter::check_launch(g);
    if (status != Status::kSuccess) return status;
    ProblemOperands operands(g);
    status = operands.check(g.batch);
    if (status != Status::kSuccess) return status;
    for (Operand const* operand : {&operands.a, &operands.b}) {
      if (operand->rows * g.batch * (pitch(*operand) / kCopyBytes) > INT32_MAX) {
        return Status::kErrorInvalidProblem;
      }
    }
    return Status::kSuccess;
  }

  static bool suits_tma(Operand const& operand, int32_t batch) {
    bool rows = operand.row_stride() * operand.element_bytes % kCopyBytes == 0;
    bool batches = batch == 1 || operand.batch_stride * operand.element_bytes % kCopyBytes == 0;
    return rows && batches && reinterpret_cast<uintptr_t>(operand.data) % kCopyBytes == 0;
  }

  static int64_t pitch(Operand const& operand) {
    int64_t bytes = operand.extent * operand.element_bytes;
    return (bytes + kCopyBytes - 1) / kCopyBytes * kCopyBytes;
  }

  static int64_t copy_bytes(Operand const& operand, int32_t batch) {
    if (suits_tma(operand, batch)) return 0;
    int64_t bytes = operand.rows * batch * pitch(operand);
    return (bytes + 255) / 256 * 256;
  }

  static RowCopy row_copy(Operand const& operand, int32_t batch, char* to) {
    RowCopy copy;
    copy.from = static_cast<char const*>(operand.data);
    copy.to = to;
    copy.from_stride = operand.row_stride() * operand.element_bytes;
    copy.from_batch_stride = batch > 1 ? operand.batch_stride * operand.element_bytes : 0;
    copy.to_stride = pitch(operand);
    copy.rows = static_cast<int32_t>(operand.rows);
    copy.extent = static_cast<int32_t>(operand.extent * operand.element_bytes);
    auto per_row = static_cast<int>(copy.to_stride / kCopyBytes);
    copy.units = operand.rows * batch * per_row;
    copy.per_row = cutlass::FastDivmod(per_row);
    copy.per_batch = cutlass::FastDivmod(copy.rows);
    return copy;
  }

  static void redirect(Operand const& operand, char* to, void const*& data, int64_t& leading,
                       int64_t& batch_stride) {
    data = to;
    leading = pitch(operand) / operand.element_bytes;
    batch_stride = leading * operand.rows;
  }

  static int32_t blocks_for(RowCopy const& copy, int32_t most) {
    int64_t blocks = (copy.units + kCopyThreads - 1) / kCopyThreads;
    return static_cast<int32_t>(blocks < most ? blocks : most);
  }
};

}  // namespace gemmsmith
