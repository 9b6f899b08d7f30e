/* A cuBLASLt whose kernels run on the host, with the library's functions and rules.
 *
 * Algorithms are {id, tile, stages, cluster, splits, reduction, swizzle, custom and inner shape}.
 * It has ids 66 and 67 of four tiles each, which 67 does not tell, and FP8 only as Hopper's has
 * it: A transposed, B not.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { kSuccess = 0, kAllocFailed = 3, kInvalid = 7, kUnsupported = 15 };
enum { kF32 = 0, kF16 = 2, kS8 = 3, kS32 = 10, kBf16 = 14, kE4m3 = 28, kE5m2 = 29 };

typedef struct { uint64_t type, rows, columns, batch; int64_t leading, offset; } layout;
typedef struct {
  int32_t compute, scale, transposed[2], fast, sm_target, scale_mode[2];
  const float *scales[2];
} product;
typedef struct { uint64_t workspace; uint32_t alignment[4]; } preference;
typedef struct { uint64_t words[8]; } algorithm;
typedef struct { algorithm algo; size_t workspace; int state; float waves; int reserved[4]; } result;

static product last;
static int created;
const product *fake_last(void) { return &last; }
int fake_created(void) { return created; }

size_t cublasLtGetVersion(void) { return 139900; }
int cublasLtCreate(void **handle) {
  static int places[64];
  *handle = &places[created++];
  return kSuccess;
}
int cublasLtDestroy(void *handle) {
  (void)handle;
  created--;
  return kSuccess;
}
int cublasLtMatrixLayoutInit_internal(layout *made, size_t size, int type, uint64_t rows,
                                      uint64_t columns, int64_t leading) {
  if (size < sizeof *made) return kAllocFailed;
  *made = (layout){(uint64_t)type, rows, columns, 1, leading, 0};
  return kSuccess;
}
int cublasLtMatrixLayoutSetAttribute(layout *made, int which, const void *value, size_t size) {
  if (which == 5 && size == 4) made->batch = *(const int32_t *)value;
  else if (which == 6 && size == 8) made->offset = *(const int64_t *)value;
  else return kInvalid;
  return kSuccess;
}
int cublasLtMatmulDescInit_internal(product *made, size_t size, int compute, int scale) {
  if (size < sizeof *made) return kAllocFailed;
  memset(made, 0, sizeof *made);
  made->compute = compute;
  made->scale = scale;
  return kSuccess;
}
int cublasLtMatmulDescSetAttribute(product *made, int which, const void *value, size_t size) {
  if ((which == 3 || which == 4) && size == 4) made->transposed[which - 3] = *(const int32_t *)value;
  else if (which == 15 && size == 4) made->sm_target = *(const int32_t *)value;
  else if ((which == 17 || which == 18) && size == 8) memcpy(&made->scales[which - 17], value, 8);
  else if (which == 25 && size == 1) made->fast = *(const int8_t *)value;
  else if ((which == 31 || which == 32) && size == 4)
    made->scale_mode[which - 31] = *(const int32_t *)value;
  else return kInvalid;
  return kSuccess;
}
int cublasLtMatmulPreferenceInit_internal(preference *made, size_t size) {
  if (size < sizeof *made) return kAllocFailed;
  *made = (preference){0, {256, 256, 256, 256}};
  return kSuccess;
}
int cublasLtMatmulPreferenceSetAttribute(preference *made, int which, const void *value,
                                         size_t size) {
  if (which == 1 && size == 8) made->workspace = *(const uint64_t *)value;
  else if (which >= 5 && which <= 8 && size == 4) made->alignment[which - 5] = *(const uint32_t *)value;
  else return kInvalid;
  return kSuccess;
}

static int fp8(uint64_t type) { return type == kE4m3 || type == kE5m2; }

static int supported(const product *p, const layout *a, const layout *b, const layout *d) {
  uint64_t m = p->transposed[0] ? a->columns : a->rows, k = p->transposed[0] ? a->rows : a->columns;
  uint64_t n = p->transposed[1] ? b->rows : b->columns, l = p->transposed[1] ? b->columns : b->rows;
  if (m != d->rows || n != d->columns || k != l || a->batch != d->batch || b->batch != d->batch)
    return kInvalid;
  if (a->leading < (int64_t)a->rows || b->leading < (int64_t)b->rows ||
      d->leading < (int64_t)d->rows)
    return kInvalid;
  if (fp8(a->type) && (!p->transposed[0] || p->transposed[1] || a->rows % 2)) return kUnsupported;
  if (p->scale_mode[0] != p->scale_mode[1]) return kInvalid;
  return kSuccess;
}

int cublasLtMatmulAlgoCheck(void *handle, product *p, layout *a, layout *b, layout *c, layout *d,
                            const algorithm *algo, result *out) {
  const uint64_t *w = algo->words;
  (void)handle, (void)c;
  int status = supported(p, a, b, d);
  if (status) return status;
  if (w[0] != 66 && w[0] != 67) return kInvalid;
  if (w[1] < 20 || w[1] > 23 || w[2] > 2 || (w[3] != 0 && w[3] != 2 && w[3] != 3)) return kUnsupported;
  if (w[4] < 1 || w[4] > 4 || (w[4] > 1) != (w[5] != 0) || w[6] > 1 || w[7] != 0) return kUnsupported;
  out->workspace = w[4] > 1 ? w[4] * d->rows * d->columns * 4 : 0;
  out->waves = (float)w[1] / 10;
  return kSuccess;
}

int cublasLtMatmulAlgoGetHeuristic(void *handle, product *p, layout *a, layout *b, layout *c,
                                   layout *d, preference *wish, int most, result *out, int *count) {
  static const algorithm list[] = {{{66, 21, 1, 2, 1}}, {{66, 22, 0, 0, 2, 2}}, {{67, 20, 2, 3, 1}}};
  *count = 0;
  for (int i = 0; i < 4; ++i)
    if (wish->alignment[i] != 16) return kInvalid;
  for (int i = 0; i < 3 && *count < most; ++i) {
    result found = {list[i], 0, 0, 0, {0}};
    int status = cublasLtMatmulAlgoCheck(handle, p, a, b, c, d, &list[i], &found);
    if (status) return status;
    if (found.workspace <= wish->workspace) out[(*count)++] = found;
  }
  return kSuccess;
}
int cublasLtMatmulAlgoGetIds(void *handle, int compute, int scale, int a, int b, int c, int d,
                             int most, int *ids, int *count) {
  (void)handle, (void)compute, (void)scale, (void)a, (void)b, (void)c, (void)d, (void)most;
  ids[0] = 66, ids[1] = 67, ids[2] = 68;
  *count = 3;
  return kSuccess;
}
int cublasLtMatmulAlgoInit(void *handle, int compute, int scale, int a, int b, int c, int d, int id,
                           algorithm *algo) {
  (void)handle, (void)compute, (void)scale, (void)a, (void)b, (void)c, (void)d;
  if (id == 68) return kUnsupported;
  *algo = (algorithm){{(uint64_t)id, 0, 0, 0, 1}};
  return kSuccess;
}
static int give(const void *from, size_t bytes, void *to, size_t size, size_t *written) {
  if (size == 0) {
    *written = bytes;
    return kSuccess;
  }
  if (size != bytes) return kInvalid;
  memcpy(to, from, bytes);
  *written = bytes;
  return kSuccess;
}
int cublasLtMatmulAlgoCapGetAttribute(const algorithm *algo, int which, void *to, size_t size,
                                      size_t *written) {
  static const uint32_t tiles[] = {19, 20, 21, 22, 23, 24}, stages[] = {0, 1, 2};
  uint32_t one = 1, mask = 2;
  int32_t none = 0, splits = algo->words[0] == 66;
  switch (which) {
    case 0: return give(&splits, 4, to, size, written);
    case 1: return give(&mask, 4, to, size, written);
    case 2: return give(&one, 4, to, size, written);
    case 6: return splits ? give(tiles, sizeof tiles, to, size, written) : kInvalid;
    case 7: return give(&none, 4, to, size, written);
    case 13: return give(stages, sizeof stages, to, size, written);
  }
  return kInvalid;
}
static const struct { int word; size_t bytes; } places[] = {
    {0, 4}, {1, 4}, {4, 4}, {5, 4}, {6, 4}, {7, 4}, {2, 4}, {-1, 2}, {3, 2}};
int cublasLtMatmulAlgoConfigSetAttribute(algorithm *algo, int which, const void *value,
                                         size_t size) {
  if (which < 1 || which > 8 || size != places[which].bytes) return kInvalid;
  if (places[which].word < 0) return *(const uint16_t *)value ? kInvalid : kSuccess;
  algo->words[places[which].word] = 0;
  memcpy(&algo->words[places[which].word], value, size);
  return kSuccess;
}
int cublasLtMatmulAlgoConfigGetAttribute(const algorithm *algo, int which, void *to, size_t size,
                                         size_t *written) {
  uint64_t word = 0;
  if (which < 0 || which > 8) return kInvalid;
  if (places[which].word >= 0) word = algo->words[places[which].word];
  return give(&word, places[which].bytes, to, size, written);
}

static double load(const void *from, uint64_t type, int64_t at) {
  uint32_t bits;
  float value;
  switch (type) {
    case kF32: return ((const float *)from)[at];
    case kS32: return ((const int32_t *)from)[at];
    case kS8: return ((const int8_t *)from)[at];
    case kF16: return (float)((const _Float16 *)from)[at];
    case kBf16:
      bits = (uint32_t)((const uint16_t *)from)[at] << 16;
      memcpy(&value, &bits, 4);
      return value;
  }
  int mantissa_bits = type == kE4m3 ? 3 : 2, bias = type == kE4m3 ? 7 : 15;
  uint8_t byte = ((const uint8_t *)from)[at];
  int exponent = (byte & 127) >> mantissa_bits;
  double mantissa = (double)(byte & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits);
  double size = exponent ? ldexp(1 + mantissa, exponent - bias) : ldexp(mantissa, 1 - bias);
  return byte & 128 ? -size : size;
}
static void store(void *to, uint64_t type, int64_t at, double wide) {
  float value = (float)wide;
  uint32_t bits;
  switch (type) {
    case kF32: ((float *)to)[at] = value; return;
    case kS32: ((int32_t *)to)[at] = (int32_t)wide; return;
    case kF16: ((_Float16 *)to)[at] = (_Float16)value; return;
  }
  memcpy(&bits, &value, 4);
  ((uint16_t *)to)[at] = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

int cublasLtMatmul(void *handle, product *p, const void *alpha, const void *a, layout *A,
                   const void *b, layout *B, const void *beta, const void *c, layout *C, void *d,
                   layout *D, const algorithm *algo, void *workspace, size_t bytes, void *stream) {
  result found = {0};
  int status = cublasLtMatmulAlgoCheck(handle, p, A, B, C, D, algo, &found);
  if (status) return status;
  if (found.workspace != bytes || (bytes && !workspace) || stream != (void *)77) return kInvalid;
  last = *p;
  if (workspace) memset(workspace, 0, bytes);
  double by = p->scale == kS32 ? *(const int32_t *)alpha : *(const float *)alpha;
  double keep = p->scale == kS32 ? *(const int32_t *)beta : *(const float *)beta;
  int64_t depth = p->transposed[0] ? A->rows : A->columns;
  for (int64_t z = 0; z < (int64_t)D->batch; ++z)
    for (int64_t m = 0; m < (int64_t)D->rows; ++m)
      for (int64_t n = 0; n < (int64_t)D->columns; ++n) {
        double sum = 0;
        for (int64_t k = 0; k < depth; ++k)
          sum += load(a, A->type, z * A->offset + (p->transposed[0] ? m * A->leading + k : k * A->leading + m)) *
                 load(b, B->type, z * B->offset + (p->transposed[1] ? k * B->leading + n : n * B->leading + k));
        for (int i = 0; i < 2; ++i)
          if (p->scales[i]) sum *= p->scales[i][p->scale_mode[i] == 3 ? (i ? n : m) : 0];
        sum *= by;
        if (keep != 0) sum += keep * load(c, C->type, z * C->offset + n * C->leading + m);
        store(d, D->type, z * D->offset + n * D->leading + m, sum);
      }
  return kSuccess;
}
