/* A kernel pack whose kernels run on the host, one for each layout and a few that misbehave. */
#include <gemmsmith/abi.h>
#include <string.h>

static const char *names[] = {"tn", "tt", "nt", "nn", "fp8", "refuses", "fails", "split"};
enum { kTn, kTt, kNt, kNn, kFp8, kRefuses, kFails, kSplit, kCount };
static int64_t runs;

GS_API int64_t runs_so_far(void) { return runs; }

static float widen(uint16_t value) {
  uint32_t bits = (uint32_t)value << 16;
  float result;
  memcpy(&result, &bits, 4);
  return result;
}

static uint16_t narrow(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static float e4m3(uint8_t value) { /* no NaN among the tests' operands */
  int exponent = (value >> 3) & 15;
  float mantissa = (value & 7) / 8.0f, scale = 1;
  for (int i = exponent ? exponent : 1; i > 7; --i) scale *= 2;
  for (int i = exponent ? exponent : 1; i < 7; ++i) scale /= 2;
  return (value & 128 ? -1 : 1) * scale * (mantissa + (exponent ? 1 : 0));
}

GS_API int32_t gs_abi_version(void) { return GS_ABI_VERSION; }
GS_API int32_t gs_abi_oldest(void) { return GS_ABI_OLDEST; }
GS_API int32_t gs_arguments_bytes(void) { return (int32_t)sizeof(gs_arguments); }
GS_API int32_t gs_kernel_count(void) { return kCount; }
GS_API const char *gs_kernel_name(int32_t i) { return i >= 0 && i < kCount ? names[i] : 0; }
GS_API int32_t gs_kernel_describe(int32_t i, gs_kernel_info *info) { return 0; }
GS_API int32_t gs_can_implement(int32_t i, const gs_arguments *g) { return i == kRefuses ? 4 : 0; }
GS_API int64_t gs_workspace_bytes(int32_t i, const gs_arguments *g) {
  return i == kSplit ? 1000 : 0;
}
GS_API int32_t gs_run(int32_t i, const gs_arguments *g, void *workspace, void *stream) {
  if (i == kFails) return 1009;
  if ((i == kSplit) != (workspace != 0) || stream != (void *)77 || g->beta != 0) return 6;
  if (workspace) memset(workspace, 0, 1000);
  int a_rows = i != kNt && i != kNn, b_rows = i == kTt || i == kNt;
  float factor = g->alpha;
  if (g->scale_a) factor *= *g->scale_a * *g->scale_b;
  for (int z = 0; z < g->batch; ++z)
    for (int m = 0; m < g->m; ++m)
      for (int n = 0; n < g->n; ++n) {
        float sum = 0;
        for (int k = 0; k < g->k; ++k) {
          int64_t at_a = z * g->batch_stride_a + (a_rows ? m * g->lda + k : k * g->lda + m);
          int64_t at_b = z * g->batch_stride_b + (b_rows ? k * g->ldb + n : n * g->ldb + k);
          sum += i == kFp8 ? e4m3(((const uint8_t *)g->a)[at_a]) * e4m3(((const uint8_t *)g->b)[at_b])
                           : widen(((const uint16_t *)g->a)[at_a]) *
                                 widen(((const uint16_t *)g->b)[at_b]);
        }
        ((uint16_t *)g->d)[z * g->batch_stride_d + m * g->ldd + n] = narrow(sum * factor);
      }
  ++runs;
  return 0;
}
