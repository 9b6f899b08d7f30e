/* The caller's structures as this pack knows them: versions, sizes and what an operation reads.
 *
 * Whatever the caller filled in is either read or refused, never dropped.
 */
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "gemmsmith/abi.h"

namespace gemmsmith {

static_assert(sizeof(gs_arguments) >= GS_ARGUMENTS_LEAST_BYTES, "fields are only added");

inline bool accepts_version(int32_t abi) { return abi >= GS_ABI_OLDEST && abi <= GS_ABI_VERSION; }

inline bool all_zero(void const* from, size_t bytes) {
  auto at = static_cast<unsigned char const*>(from);
  unsigned char any = 0;
  for (size_t i = 0; i < bytes; ++i) any |= at[i];
  return any == 0;
}

constexpr int32_t kMostBytes = 1 << 16; /* a size beyond it is not one */

/* Arguments of another version or size, read as this pack's; false where that cannot be. */
class Accepted {
 public:
  explicit Accepted(gs_arguments const* given) {
    if (!given || !accepts_version(given->abi)) return;
    if (given->size < GS_ARGUMENTS_LEAST_BYTES || given->size > kMostBytes) return;
    size_t size = static_cast<size_t>(given->size);
    if (size < sizeof padded_) {
      std::memset(&padded_, 0, sizeof padded_);
      std::memcpy(&padded_, given, size);
      given = &padded_;
    } else if (!all_zero(reinterpret_cast<char const*>(given) + sizeof padded_,
                         size - sizeof padded_)) {
      return;
    }
    if (all_zero(given->reserved, sizeof given->reserved) && given->unused == 0) known_ = given;
  }
  Accepted(Accepted const&) = delete;
  Accepted& operator=(Accepted const&) = delete;

  explicit operator bool() const { return known_ != nullptr; }
  gs_arguments const& operator*() const { return *known_; }

 private:
  gs_arguments padded_; /* filled in only for a caller that knows less */
  gs_arguments const* known_ = nullptr;
};

/* Fills in as much of a description as its caller knows. */
template <class Describe>
int32_t describe_into(gs_kernel_info* into, Describe describe) {
  constexpr size_t kHead = offsetof(gs_kernel_info, threads);
  if (!into || !accepts_version(into->abi) || into->size < int32_t(kHead)) return GS_BAD_ABI;
  gs_kernel_info info{};
  int32_t status = describe(info);
  size_t size = static_cast<size_t>(into->size);
  if (size > sizeof info) size = sizeof info;
  std::memcpy(reinterpret_cast<char*>(into) + kHead, reinterpret_cast<char const*>(&info) + kHead,
              size - kHead);
  return status;
}

/* What an operation may have beside A, B, C and D, by the fields that say it does. */
enum Extra : uint32_t {
  kScales = 1,            /* scale_a, scale_b: one element each */
  kRowScales = 2,         /* … one for each row and column */
  kBlockScales = 4,       /* … one for each block */
  kOutputScale = 8,       /* scale_d */
  kAmax = 16,
  kBias = 32,
  kResidual = 64,
  kAux = 128,
  kGroups = 256,          /* offsets */
  kLibraryAlgorithm = 512, /* algorithm, library_version, workspace_limit */
  kGate = 1024,           /* b_up */
  kActivated = 2048,
  kBiasGradient = 4096,
  kRowFactors = 8192,     /* row_scale */
  kColumnFactors = 16384, /* column_scale */
  kRowGradient = 32768,
};

inline uint32_t extras(gs_arguments const& g) {
  uint32_t found = 0;
  if (g.scaling == GS_SCALING_ROW) found |= kRowScales;
  else if (g.scaling == GS_SCALING_BLOCK) found |= kBlockScales;
  else if (g.scaling != GS_SCALING_TENSOR) found |= 1u << 31; /* no kernel takes an unknown kind */
  else if (g.scale_a || g.scale_b) found |= kScales;
  if (g.scale_d) found |= kOutputScale;
  if (g.amax) found |= kAmax;
  if (g.bias) found |= kBias;
  if (g.residual) found |= kResidual;
  if (g.aux) found |= kAux;
  if (g.activated) found |= kActivated;
  if (g.bias_gradient) found |= kBiasGradient;
  if (g.offsets) found |= kGroups;
  if (g.b_up) found |= kGate;
  if (g.row_scale) found |= kRowFactors;
  if (g.column_scale) found |= kColumnFactors;
  if (g.row_gradient) found |= kRowGradient;
  if (g.library_version || g.workspace_limit || !all_zero(g.algorithm, sizeof g.algorithm)) {
    found |= kLibraryAlgorithm;
  }
  return found;
}

/* Whether nothing is filled in beyond what the operation reads. */
inline bool takes_only(gs_arguments const& g, uint32_t allowed) {
  return (extras(g) & ~allowed) == 0;
}

}  // namespace gemmsmith
