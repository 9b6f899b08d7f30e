/* A kernel pack whose kernels run on the host: lets whole batches be measured without a GPU. */
#include <gemmsmith/abi.h>
#include <stdlib.h>
#include <string.h>

static const char *names[] = {"good",    "other", "wrong", "unwritten",
                              "refuses", "fails", "split", "even", "drifts", "shifted", "placed"};
enum { kGood, kOther, kWrong, kUnwritten, kRefuses, kFails, kSplit, kEven, kDrifts, kShifted, kPlaced,
       kCount };

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

GS_API int32_t gs_abi_version(void) { return GS_ABI_VERSION; }
GS_API int32_t gs_abi_oldest(void) { return GS_ABI_OLDEST; }
GS_API int32_t gs_arguments_bytes(void) { return (int32_t)sizeof(gs_arguments); }
GS_API int32_t gs_kernel_count(void) { return kCount; }
GS_API const char *gs_kernel_name(int32_t i) { return i >= 0 && i < kCount ? names[i] : 0; }
GS_API int32_t gs_kernel_describe(int32_t i, gs_kernel_info *info) { return 0; }
GS_API int32_t gs_can_implement(int32_t i, const gs_arguments *g) { return i == kRefuses ? 4 : 0; }
GS_API int64_t gs_workspace_bytes(int32_t i, const gs_arguments *g) {
  return i == kSplit ? 1000 * g->splits : 0;
}
/* Where the rows of group z end; "even" takes all groups for equal ones. */
static int end_of(int32_t i, const gs_arguments *g, int z) {
  if (z < 0) return 0;
  return i == kEven ? (z + 1) * g->m / g->batch : g->offsets[z];
}
GS_API int32_t gs_run(int32_t i, const gs_arguments *g, void *workspace, void *stream) {
  if (i == kFails) return 1009;
  if ((i == kSplit) != (workspace != 0)) return 6;
  if (workspace) memset(workspace, 0, 1000 * g->splits);
  for (int z = 0; z < g->batch; ++z) {
    int first = g->offsets ? end_of(i, g, z - 1) : 0, last = g->offsets ? end_of(i, g, z) : g->m;
    for (int m = first; m < last - (i == kUnwritten); ++m)
      for (int n = 0; n < g->n; ++n) {
        const uint16_t *a = (const uint16_t *)g->a + z * g->batch_stride_a + m * g->lda;
        const uint16_t *b = (const uint16_t *)g->b + z * g->batch_stride_b + n * g->ldb;
        float sum = 0;
        for (int k = 0; k < g->k; ++k) sum += widen(a[k]) * widen(b[k]);
        if (i == kWrong && n == 1) sum = -sum;
        uint16_t *d = (uint16_t *)g->d + z * g->batch_stride_d + m * g->ldd + n;
        *d = narrow(sum);
        /* Other bits in two columns: with few rows, in a group's first row, or always. Within the
         * tolerance. */
        int differs = i == kShifted || (i == kDrifts && g->m < 16) || (i == kPlaced && m == first);
        if (n < 2 && differs) *d ^= 1;
      }
  }
  return 0;
}
