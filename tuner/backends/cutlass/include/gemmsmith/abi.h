/* The C ABI of a kernel pack. No CUTLASS type crosses it; client/gemmsmith/runtime/abi.py mirrors it.
 *
 * A pack is a shared object with `gs_kernel_count()` kernels, addressed by index. Nothing here
 * allocates device memory or synchronizes, so `gs_run` may be captured in a CUDA graph (launch the
 * kernel once before: the driver loads its code on first use). Every call checks its arguments and
 * launches nothing it cannot run; only `gs_run` needs a device.
 * Status codes: 0 success; 1…999 cutlass::Status; 1000 + e a cudaError_t; negative: misuse.
 */
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define GS_ABI_VERSION 1
#define GS_BAD_INDEX (-1)
#define GS_BAD_ABI (-2)

#define GS_API __attribute__((visibility("default")))

/* One launch of D = alpha * scale_a * scale_b * A.B + beta * C, in the problem's own orientation:
 * swapped kernels exchange the operands themselves. Leading and batch strides are in elements. */
typedef struct gs_arguments {
  int32_t abi;               /* GS_ABI_VERSION */
  int32_t m, n, k, batch;
  const void *a, *b, *c;     /* c may equal d; it is read only when beta != 0 */
  void *d;
  int64_t lda, ldb, ldc, ldd;
  int64_t batch_stride_a, batch_stride_b, batch_stride_c, batch_stride_d;
  float alpha, beta;
  const float *scale_a, *scale_b; /* FP8 per-tensor scales on the device; null means 1; other
                                     kernels refuse them */
  /* launch */
  int32_t raster_order;      /* 0 heuristic, 1 along M, 2 along N (kernel's orientation) */
  int32_t swizzle;           /* largest swizzle group: 1, 2, 4, 8 */
  int32_t decomposition;     /* 0 data-parallel, 1 split-K, 2 stream-K, 3 heuristic */
  int32_t splits;
  int32_t device;            /* CUDA ordinal the pointers live on */
  int32_t sm_count;          /* thread blocks a persistent kernel may keep resident; never 0 */
} gs_arguments;

typedef struct gs_kernel_info {
  int32_t abi;
  int32_t threads;           /* per thread block */
  int32_t shared_bytes;      /* dynamic shared memory per thread block */
  int32_t stages;            /* resolved pipeline depth */
  int32_t registers;         /* per thread; -1 until a device has been used */
  int32_t local_bytes;       /* spilled bytes per thread; -1 until a device has been used */
} gs_kernel_info;

GS_API int32_t gs_abi_version(void);
GS_API int32_t gs_kernel_count(void);
GS_API const char *gs_kernel_name(int32_t index);      /* CUTLASS procedural name, or null */
GS_API int32_t gs_kernel_describe(int32_t index, gs_kernel_info *info);
GS_API int32_t gs_can_implement(int32_t index, const gs_arguments *arguments);
GS_API int64_t gs_workspace_bytes(int32_t index, const gs_arguments *arguments); /* < 0: status */
GS_API int32_t gs_run(int32_t index, const gs_arguments *arguments, void *workspace, void *stream);

#ifdef __cplusplus
}
#endif
