/* A pack whose kernels are cuBLASLt's. The generated unit defines `operations`, in the table's order. */
#pragma once

#include "cublaslt/proposals.hpp"
#include "gemmsmith/table.hpp"

namespace gemmsmith::cublaslt {

extern const Operation operations[];

/* The table's functions of one operation. */
template <int Index>
struct Product {
  /* The library tells nothing of what its kernels occupy. */
  static int32_t describe(gs_kernel_info& info) {
    info.registers = info.local_bytes = -1;
    return 0;
  }
  static int32_t can_implement(gs_arguments const& g) {
    return cublaslt::can_implement(operations[Index], g);
  }
  static int64_t workspace_bytes(gs_arguments const& g) {
    return cublaslt::workspace_bytes(operations[Index], g);
  }
  static int32_t run(gs_arguments const& g, void* workspace, void* stream) {
    return cublaslt::run(operations[Index], g, workspace, stream);
  }
};

}  // namespace gemmsmith::cublaslt

extern "C" {

GS_API int32_t gs_propose(int32_t index, const gs_arguments* arguments, int32_t most,
                          gs_proposal* out, int32_t* count) {
  using namespace gemmsmith;
  if (!find(index)) return GS_BAD_INDEX;
  Accepted accepted(arguments);
  if (!accepted || most <= 0 || !out || !count) return GS_BAD_ABI;
  return cublaslt::list(
      cublaslt::operations[index], *accepted, false, most, out, count,
      [&](cublaslt::Proposals& proposals) { return cublaslt::propose(proposals, most); });
}

GS_API int32_t gs_variants(int32_t index, const gs_arguments* arguments, int32_t most,
                           gs_proposal* out, int32_t* count) {
  using namespace gemmsmith;
  auto entry = find(index);
  if (!entry) return GS_BAD_INDEX;
  Accepted accepted(arguments);
  if (!accepted || most <= 0 || !out || !count) return GS_BAD_ABI;
  auto const& op = cublaslt::operations[index];
  return cublaslt::list(op, *accepted, true, most, out, count,
                        [&](cublaslt::Proposals& proposals) {
                          return cublaslt::variants(proposals, op, *accepted);
                        });
}

}  // extern "C"
