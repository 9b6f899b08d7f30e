/* A pack whose kernels are cuBLASLt's. The generated unit defines an `Operation` for each of them. */
#pragma once

#include <cstring>

#include "cublaslt/proposals.hpp"
#include "gemmsmith/table.hpp"

namespace gemmsmith::cublaslt {

/* The unit's operations, for whoever asks by a kernel's name. */
class Listed {
 public:
  explicit Listed(Operation const& operation) : operation_(operation), next_(first_) {
    first_ = this;
  }
  static Operation const* find(char const* name) {
    for (Listed const* each = first_; each; each = each->next_) {
      if (std::strcmp(each->operation_.name, name) == 0) return &each->operation_;
    }
    return nullptr;
  }

 private:
  static inline Listed const* first_ = nullptr;
  Operation const& operation_;
  Listed const* next_;
};

/* The table's functions of one operation. */
template <Operation const& kOperation>
struct Product {
  /* The library tells nothing of what its kernels occupy. */
  static int32_t describe(gs_kernel_info& info) {
    info.registers = info.local_bytes = -1;
    return 0;
  }
  static int32_t can_implement(gs_arguments const& g) {
    return cublaslt::can_implement(kOperation, g);
  }
  static int64_t workspace_bytes(gs_arguments const& g) {
    return cublaslt::workspace_bytes(kOperation, g);
  }
  static int32_t run(gs_arguments const& g, void* workspace, void* stream) {
    return cublaslt::run(kOperation, g, workspace, stream);
  }
};

}  // namespace gemmsmith::cublaslt

extern "C" {

GS_API int32_t gs_propose(int32_t index, const gs_arguments* arguments, int32_t most,
                          gs_proposal* out, int32_t* count) {
  using namespace gemmsmith;
  auto entry = find(index);
  if (!entry) return GS_BAD_INDEX;
  Accepted accepted(arguments);
  if (!accepted || most <= 0 || !out || !count) return GS_BAD_ABI;
  return cublaslt::list(
      *cublaslt::Listed::find(entry->name), *accepted, false, most, out, count,
      [&](cublaslt::Proposals& proposals) { return cublaslt::propose(proposals, most); });
}

GS_API int32_t gs_variants(int32_t index, const gs_arguments* arguments, int32_t most,
                           gs_proposal* out, int32_t* count) {
  using namespace gemmsmith;
  auto entry = find(index);
  if (!entry) return GS_BAD_INDEX;
  Accepted accepted(arguments);
  if (!accepted || most <= 0 || !out || !count) return GS_BAD_ABI;
  auto const& op = *cublaslt::Listed::find(entry->name);
  return cublaslt::list(op, *accepted, true, most, out, count,
                        [&](cublaslt::Proposals& proposals) {
                          return cublaslt::variants(proposals, op, *accepted);
                        });
}

}  // extern "C"
