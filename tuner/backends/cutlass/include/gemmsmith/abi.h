/* The C ABI of a kernel pack. No CUTLASS type crosses it; client/gemmsmith/runtime/abi.py mirrors it.
 *
 * A pack is a shared object with `gs_kernel_count()` kernels, addressed by index. Nothing here
 * allocates device memory or synchronizes, so `gs_run` may be captured in a CUDA graph (launch the
 * kernel once before: the driver loads its code on first use). Every call checks its arguments and
 * launches nothing it cannot run; only `gs_run` needs a device.
 * Status codes: 0 success; 1…999 cutlass::Status; 1000 + e a cudaError_t; 2000 + e a
 * cublasStatus_t; 3000…: of the library that a kernel runs in; negative: misuse.
 *
 * Packs and callers of different ages work together. Both structures begin with the version and
 * the size that their caller knows. Fields are only ever added: at the end, or in `reserved`; zero
 * means that a field is not used. A pack takes every version from `gs_abi_oldest()` to
 * `gs_abi_version()`, reads what the caller does not have as zeros, and refuses arguments that hold
 * anything but zeros where it knows no field (arguments.hpp).
 */
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define GS_ABI_VERSION 2
#define GS_ABI_OLDEST 2              /* the oldest version of a caller that is accepted */
#define GS_ARGUMENTS_LEAST_BYTES 512 /* gs_arguments of version GS_ABI_OLDEST */
#define GS_BAD_INDEX (-1)
#define GS_BAD_ABI (-2)
#define GS_NO_LIBRARY 3000           /* the library that the kernel runs in cannot be loaded */
#define GS_OTHER_LIBRARY 3001        /* another version of it than `library_version` is loaded */
#define GS_NO_ALGORITHM 3002         /* the algorithm is none that this library has for the problem */

#define GS_API __attribute__((visibility("default")))

#define GS_MOST_GROUPS 1024 /* of a grouped product */
#define GS_ROW_GRADIENT_COLUMNS 64 /* that add up to one element of `row_gradient` */

/* `gs_arguments::scaling`: what scale_a and scale_b hold. */
#define GS_SCALING_TENSOR 0 /* one element each; null means 1 */
#define GS_SCALING_ROW 1    /* one for each row of A (M) and each column of B (N) */
#define GS_SCALING_BLOCK 2  /* one for each 1×128 of A and each 128×128 of B */

/* One launch of D = alpha * scale_a * scale_b * A.B + beta * C, in the problem's own orientation:
 * swapped kernels exchange the operands themselves. Leading and batch strides are in elements.
 * All that follows the scales is refused by kernels whose operation does not have it. */
typedef struct gs_arguments {
  int32_t abi;               /* the version the caller speaks */
  int32_t size;              /* sizeof(gs_arguments) as the caller knows it */
  int32_t m, n, k;           /* m (or k, by depth) of a grouped product is the total of its groups */
  int32_t batch;             /* of a grouped product: the number of groups */
  const void *a, *b, *c;     /* c may equal d; it is read only when beta != 0 */
  void *d;
  int64_t lda, ldb, ldc, ldd;
  int64_t batch_stride_a, batch_stride_b, batch_stride_c, batch_stride_d; /* or from group to group */
  float alpha, beta;
  /* scales, on the device */
  const float *scale_a, *scale_b; /* kernels of operations without scales refuse them */
  int64_t ld_scale_a, ld_scale_b; /* of block scales */
  int64_t batch_stride_scale_a, batch_stride_scale_b; /* of row and block scales */
  const float *scale_d;      /* one element, by which D is multiplied before it is rounded */
  int32_t scaling;           /* GS_SCALING_… */
  /* launch */
  int32_t device;            /* CUDA ordinal the pointers live on */
  int32_t sm_count;          /* thread blocks a persistent kernel may keep resident; never 0 */
  int32_t raster_order;      /* 0 heuristic, 1 along M, 2 along N (kernel's orientation) */
  int32_t swizzle;           /* largest swizzle group: 1, 2, 4, 8 */
  int32_t decomposition;     /* 0 data-parallel, 1 split-K, 2 stream-K, 3 heuristic */
  int32_t splits;
  int32_t unused;
  /* launch of a library's kernel */
  uint64_t library_version;  /* of the library that `algorithm` was found with */
  uint64_t algorithm[8];     /* cublasLtMatmulAlgo_t */
  int64_t workspace_limit;   /* bytes it may ask for; 0: 32 MiB */
  /* groups */
  const int32_t *offsets;    /* [batch] on the device: where each group ends; they add up to m or k */
  /* epilogues */
  const void *bias;          /* [N] of D's type, bf16 where that is FP8 */
  int64_t batch_stride_bias;
  const void *residual;      /* [M, N] of D's type, row-major */
  int64_t ld_residual, batch_stride_residual;
  void *aux;                 /* [M, N] of D's type, row-major: what the activation is applied to;
                              * gate and up, whose D has N/2 columns */
  int64_t ld_aux, batch_stride_aux;
  float *amax;               /* one element: the largest |D| before scale_d; the caller zeroes it */
  /* backward epilogues, which read aux: [M, N], or [M, 2N] as gate | up, and then D is that too */
  void *activated;           /* [M, N] of D's type, row-major: what the activation gave forwards */
  int64_t ld_activated;
  void *bias_gradient;       /* [N] of D's type: the sum of D's rows */
  const void *b_up;          /* of gated ones: B's second N/2 columns, up, laid as the first ones are */
  const float *row_scale;    /* [M]: factors of the rows of the product, of a gate's D, or of
                              * a grouped backward gate's D and `activated` */
  const void *column_scale;  /* [N] of D's type: factors of the columns of the product and its bias */
  float *row_gradient;       /* [M, ⌈N/64⌉] of grouped backward gates: sums whose sum is row_scale's
                              * gradient */
  uint64_t reserved[10];     /* zeros */
} gs_arguments;

typedef struct gs_kernel_info {
  int32_t abi;               /* the version the caller speaks */
  int32_t size;              /* sizeof(gs_kernel_info) as the caller knows it: no more is written */
  int32_t threads;           /* per thread block */
  int32_t shared_bytes;      /* dynamic shared memory per thread block */
  int32_t stages;            /* resolved pipeline depth */
  int32_t registers;         /* per thread; -1 until a device has been used */
  int32_t local_bytes;       /* spilled bytes per thread; -1 until a device has been used */
  int32_t reserved[9];       /* zeros */
} gs_kernel_info;

GS_API int32_t gs_abi_version(void);                   /* GS_ABI_VERSION of the pack */
GS_API int32_t gs_abi_oldest(void);                    /* GS_ABI_OLDEST of the pack */
GS_API int32_t gs_arguments_bytes(void);               /* sizeof(gs_arguments) as the pack knows it */
GS_API int32_t gs_kernel_count(void);
GS_API const char *gs_kernel_name(int32_t index);      /* CUTLASS procedural name, or null */
GS_API int32_t gs_kernel_describe(int32_t index, gs_kernel_info *info);
GS_API int32_t gs_can_implement(int32_t index, const gs_arguments *arguments);
GS_API int64_t gs_workspace_bytes(int32_t index, const gs_arguments *arguments); /* < 0: status */
GS_API int32_t gs_run(int32_t index, const gs_arguments *arguments, void *workspace, void *stream);

#ifdef __cplusplus
}
#endif
