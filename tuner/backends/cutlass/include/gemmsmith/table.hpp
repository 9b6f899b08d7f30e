/* The exported functions of a kernel pack, over a table that the generated unit defines.
 *
 * Everything else in a pack has hidden visibility, so that any number of packs can live in one
 * process: the same CUTLASS templates in two packs must never be merged by the dynamic linker.
 */
#pragma once

#include "gemmsmith/abi.h"
#include "gemmsmith/arguments.hpp"

namespace gemmsmith {

/* One kernel of the pack: its procedural name and an adapter's static functions. */
struct Entry {
  const char* name;
  int32_t (*describe)(gs_kernel_info&);
  int32_t (*can_implement)(gs_arguments const&);
  int64_t (*workspace_bytes)(gs_arguments const&);
  int32_t (*run)(gs_arguments const&, void* workspace, void* stream);
};

template <class Adapter>
constexpr Entry entry(const char* name) {
  return {name, Adapter::describe, Adapter::can_implement, Adapter::workspace_bytes, Adapter::run};
}

/* Defined by the generated unit, in the order its caller asked for. */
extern const Entry kernel_table[];
extern const int32_t kernel_table_size;

inline Entry const* find(int32_t index) {
  return index >= 0 && index < kernel_table_size ? kernel_table + index : nullptr;
}

}  // namespace gemmsmith

extern "C" {

GS_API int32_t gs_abi_version(void) { return GS_ABI_VERSION; }

GS_API int32_t gs_abi_oldest(void) { return GS_ABI_OLDEST; }

GS_API int32_t gs_arguments_bytes(void) { return int32_t(sizeof(gs_arguments)); }

GS_API int32_t gs_kernel_count(void) { return gemmsmith::kernel_table_size; }

GS_API const char* gs_kernel_name(int32_t index) {
  auto entry = gemmsmith::find(index);
  return entry ? entry->name : nullptr;
}

GS_API int32_t gs_kernel_describe(int32_t index, gs_kernel_info* info) {
  auto entry = gemmsmith::find(index);
  if (!entry) return GS_BAD_INDEX;
  return gemmsmith::describe_into(info, entry->describe);
}

GS_API int32_t gs_can_implement(int32_t index, const gs_arguments* arguments) {
  auto entry = gemmsmith::find(index);
  if (!entry) return GS_BAD_INDEX;
  gemmsmith::Accepted accepted(arguments);
  if (!accepted) return GS_BAD_ABI;
  return entry->can_implement(*accepted);
}

GS_API int64_t gs_workspace_bytes(int32_t index, const gs_arguments* arguments) {
  auto entry = gemmsmith::find(index);
  if (!entry) return GS_BAD_INDEX;
  gemmsmith::Accepted accepted(arguments);
  if (!accepted) return GS_BAD_ABI;
  return entry->workspace_bytes(*accepted);
}

GS_API int32_t gs_run(int32_t index, const gs_arguments* arguments, void* workspace, void* stream) {
  auto entry = gemmsmith::find(index);
  if (!entry) return GS_BAD_INDEX;
  gemmsmith::Accepted accepted(arguments);
  if (!accepted) return GS_BAD_ABI;
  return entry->run(*accepted, workspace, stream);
}

}  // extern "C"
