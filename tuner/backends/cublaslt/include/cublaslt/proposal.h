/* What a pack of cuBLASLt's kernels exports beside the C ABI of every pack: its algorithms.
 *
 * Only the tuner calls these, with arguments as it would launch them. They take milliseconds and
 * allocate host memory. tuner/backends/cublaslt/proposals.py mirrors the structure.
 */
#pragma once
#include "gemmsmith/abi.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gs_proposal {
  uint64_t algorithm[8];    /* for gs_arguments::algorithm */
  uint64_t library_version; /* for gs_arguments::library_version */
  int64_t workspace_bytes;  /* for gs_arguments::workspace_limit */
  int32_t id;               /* the library's numbers for what it is made of; -1: it does not say */
  int32_t tile_id, stages_id, cluster_id, inner_shape, custom;
  int32_t split_k, reduction, swizzle;
  float waves;              /* how often it fills the device */
  int32_t reserved[2];
} gs_proposal;

/* The heuristics' list, their best guess first. `most`: how many `out` has room for. */
GS_API int32_t gs_propose(int32_t index, const gs_arguments *arguments, int32_t most,
                          gs_proposal *out, int32_t *count);

/* What the library would also run, near `arguments->algorithm`: nearest first, without itself. */
GS_API int32_t gs_variants(int32_t index, const gs_arguments *arguments, int32_t most,
                           gs_proposal *out, int32_t *count);

#ifdef __cplusplus
}
#endif
