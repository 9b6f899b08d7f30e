/* A kernel pack whose kernels run on the host, for each layout and type, and some that misbehave. */
#include <gemmsmith/abi.h>
#include <math.h>
#include <string.h>

static const char *names[] = {"tn", "tt", "nt", "nn", "fp8", "refuses", "fails", "split",
                              "int8", "int8_bf16", "int8_row", "other_library", "no_algorithm",
                              "f32_tn", "f32_tt", "f32_nt", "f32_nn",
                              "tf32_tn", "tf32_tt", "tf32_nt", "tf32_nn",
                              "rows_tn", "rows_tt", "depth_nt", "rows_fp8", "depth_fp8",
                              "row_fp8", "symmetric_tn", "symmetric_nt",
#define FUSED(name) "then_" name "_tn", "then_" name "_tt"
                              FUSED("bias"), FUSED("bias_gelu_tanh"), FUSED("bias_gelu_tanh_aux"),
                              FUSED("bias_gelu"), FUSED("bias_gelu_aux"), FUSED("bias_silu"),
                              FUSED("bias_silu_aux"), FUSED("bias_relu2"), FUSED("bias_relu2_aux"),
                              FUSED("residual"), FUSED("bias_residual"), FUSED("bias_residual_relu"),
                              FUSED("bias_residual_relu_aux"), FUSED("bias_residual_silu"),
                              FUSED("bias_residual_silu_aux"), FUSED("scale_residual"),
                              FUSED("scale_residual_aux"), FUSED("bias_scale_residual"),
                              FUSED("bias_scale_residual_aux"), FUSED("row_scale"),
                              FUSED("row_scale_bias"), "fp8_then_bias",
#define GATED(name) "then_" name "_gate_tn", "then_" name "_gate_aux_tn"
                              GATED("silu"), GATED("gelu_tanh"), GATED("gelu"), GATED("relu"),
                              GATED("sigmoid"),
#define BACKWARD(name) FUSED(name), FUSED(name "_act"), FUSED(name "_bgrad")
#define BACKWARD_GATED(name) FUSED(name "_gate"), FUSED(name "_gate_act")
                              BACKWARD("dgelu_tanh"), BACKWARD("dgelu"), BACKWARD("dsilu"),
                              BACKWARD("drelu2"), BACKWARD_GATED("dsilu"),
                              BACKWARD_GATED("dgelu_tanh"), BACKWARD_GATED("dgelu"),
                              BACKWARD_GATED("drelu"), BACKWARD_GATED("dsigmoid"),
                              "out_fp8_then_bias", "out_fp8_then_bias_gelu_tanh",
                              "out_fp8_then_bias_silu", "out_fp8_then_silu_gate",
                              "rows_then_silu_gate_tn", "rows_then_silu_gate_aux_tn",
                              "rows_then_dsilu_gate_tn", "rows_then_dsilu_gate_tt",
                              "rows_then_dsilu_gate_act_tn", "rows_then_dsilu_gate_act_tt"};
enum { kTn, kTt, kNt, kNn, kFp8, kRefuses, kFails, kSplit,
       kInt8, kInt8Bf16, kInt8Row, kOtherLibrary, kNoAlgorithm, kF32, kTf32 = kF32 + 4,
       kRowsTn = kTf32 + 4, kRowsTt, kDepthNt, kRowsFp8, kDepthFp8,
       kFp8Row, kSymmetric, kFused = kSymmetric + 2, kFusedEnd = kFused + 42, kFp8Bias = kFusedEnd, kGated,
       kBackward = kGated + 10, kOutFp8 = kBackward + 44, kOutFp8Gate = kOutFp8 + 3,
       kRowsGate, kRowsBackward = kRowsGate + 2, kCount = kRowsBackward + 4 };
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

static uint8_t to_e4m3(float value) { /* the nearest, by trying all; halves go to the even one */
  if (value != value) return 0x7f;
  uint8_t found = 0;
  float off = INFINITY;
  for (int code = 0; code < 0x7f; ++code) {
    float away = fabsf(e4m3(code) - fabsf(value));
    if (away < off || (away == off && code % 2 == 0)) off = away, found = code;
  }
  return found | (signbit(value) ? 128 : 0);
}

static int grouped(int32_t i) { return (i >= kRowsTn && i <= kDepthFp8) || i >= kRowsGate; }
static int fused(int32_t i) { return i >= kFused; }
static int symmetric(int32_t i) { return i >= kSymmetric && i < kFused; }
/* What an epilogue has, by its name. */
static int has(int32_t i, const char *part) { return fused(i) && strstr(names[i], part) != 0; }
static float activated(int32_t i, float x) {
  if (has(i, "gelu_tanh")) return x / 2 * (1 + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
  if (has(i, "gelu")) return x / 2 * (1 + erff(x * 0.70710678f));
  if (has(i, "silu")) return x / (1 + expf(-x));
  if (has(i, "relu2")) return x < 0 ? 0 : x * x;
  if (has(i, "relu")) return x < 0 ? 0 : x;
  if (has(i, "sigmoid")) return 1 / (1 + expf(-x));
  return x;
}
static float slope(int32_t i, float x) {
  float cubic = 0.79788456f * (x + 0.044715f * x * x * x), t = tanhf(cubic), s = 1 / (1 + expf(-x));
  if (has(i, "gelu_tanh"))
    return (1 + t) / 2 + x / 2 * (1 - t * t) * 0.79788456f * (1 + 3 * 0.044715f * x * x);
  if (has(i, "gelu")) return (1 + erff(x * 0.70710678f)) / 2 + x * 0.39894228f * expf(-x * x / 2);
  if (has(i, "sigmoid")) return s * (1 - s);
  if (has(i, "silu")) return s * (1 + x * (1 - s));
  return x < 0 ? 0 : has(i, "relu2") ? 2 * x : 1;
}
static int gated(int32_t i) {
  return (i >= kGated && i < kBackward) || (i >= kOutFp8Gate && i < kRowsBackward);
}
static int backward(int32_t i) { return (i >= kBackward && i < kOutFp8) || i >= kRowsBackward; }
static int out_fp8(int32_t i) { return i >= kOutFp8 && i < kRowsGate; }
/* D of a backward epilogue, and what else it gives of this element; `p` is the product's. */
static float backwards(int32_t i, const gs_arguments *g, int m, int n, float p) {
  const uint16_t *aux = (const uint16_t *)g->aux + m * g->ld_aux + n;
  float linear = widen(*aux), up = has(i, "_gate") ? widen(aux[g->n]) : 1;
  float value = activated(i, linear), share = g->row_scale ? g->row_scale[m] : 1;
  if (g->row_gradient) {
    float *sum = g->row_gradient + m * ((g->n + 63) / 64) + n / 64;
    *sum = (n % 64 ? *sum : 0) + p * value * up;
  }
  p *= share;
  float gradient = p * up * slope(i, linear);
  uint16_t *d = (uint16_t *)g->d + m * g->ldd + n;
  if (has(i, "_gate")) d[g->n] = narrow(p * value);
  if (g->activated) ((uint16_t *)g->activated)[m * g->ld_activated + n] = narrow(share * value * up);
  *d = narrow(gradient);
  return gradient;
}
static int by_rows(int32_t i) {
  return i == kRowsTn || i == kRowsTt || i == kRowsFp8 || i >= kRowsGate;
}
static int rows_of_fp8(int32_t i) { return i == kRowsFp8 || i == kDepthFp8 || i == kFp8Row; }
static int fp8(int32_t i) { return i == kFp8 || i == kFp8Bias || rows_of_fp8(i) || out_fp8(i); }
static int row_scaled(int32_t i) { return i == kInt8Row || rows_of_fp8(i); }

static float read(int32_t i, const void *from, int64_t at) {
  if (fp8(i)) return e4m3(((const uint8_t *)from)[at]);
  if (i >= kInt8 && i <= kInt8Row) return ((const int8_t *)from)[at];
  if (i < kTf32 || i >= kRowsTn) return widen(((const uint16_t *)from)[at]);
  uint32_t bits = ((const uint32_t *)from)[at] & 0xffffe000u; /* as tensor cores read FP32 */
  float result;
  memcpy(&result, &bits, 4);
  return result;
}

GS_API int32_t gs_abi_version(void) { return GS_ABI_VERSION; }
GS_API int32_t gs_abi_oldest(void) { return GS_ABI_OLDEST; }
GS_API int32_t gs_arguments_bytes(void) { return (int32_t)sizeof(gs_arguments); }
GS_API int32_t gs_kernel_count(void) { return kCount; }
GS_API const char *gs_kernel_name(int32_t i) { return i >= 0 && i < kCount ? names[i] : 0; }
GS_API int32_t gs_kernel_describe(int32_t i, gs_kernel_info *info) { return 0; }
GS_API int32_t gs_can_implement(int32_t i, const gs_arguments *g) {
  if (i == kOtherLibrary) return GS_OTHER_LIBRARY;
  if (i == kNoAlgorithm) return GS_NO_ALGORITHM;
  /* As real kernels: what the operation has must be there, and what it has not must not. */
  if (row_scaled(i) != (g->scaling == GS_SCALING_ROW && g->scale_a && g->scale_b)) return 4;
  if (grouped(i) != (g->offsets != 0)) return 4;
  if (grouped(i) && (g->batch_stride_a || !by_rows(i) != !g->batch_stride_b ||
                     g->batch_stride_d != (by_rows(i) ? 0 : (int64_t)g->m * g->n))) return 4;
  if (has(i, "bias") != !!g->bias || has(i, "residual") != !!g->residual) return 4;
  if (i < kRowsGate && has(i, "row_scale") != !!g->row_scale) return 4;
  if (has(i, "scale_residual") != !!g->column_scale) return 4;
  if ((has(i, "aux") || backward(i)) != !!g->aux || gated(i) != !!g->b_up) return 4;
  if (!out_fp8(i) && (g->scale_d || g->amax)) return 4;
  if (has(i, "_act") != !!g->activated || has(i, "_bgrad") != !!g->bias_gradient) return 4;
  if (backward(i) && has(i, "_gate") && (g->ldd < 2 * g->n || g->ld_aux < 2 * g->n)) return 3;
  if (symmetric(i) && (g->m != g->n || g->a != g->b || g->lda != g->ldb)) return 4;
  return i == kRefuses ? 4 : 0;
}
GS_API int64_t gs_workspace_bytes(int32_t i, const gs_arguments *g) {
  return i == kSplit ? 1000 : 0;
}
GS_API int32_t computes_nothing = 0; /* for measuring a launch alone */

GS_API int32_t gs_run(int32_t i, const gs_arguments *g, void *workspace, void *stream) {
  if (computes_nothing) return 0;
  if (i == kFails) return 1009;
  if ((i == kSplit) != (workspace != 0) || stream != (void *)77) return 6;
  if (g->beta != 0 && !symmetric(i) && (i < kF32 || i >= kRowsTn || g->beta != 1)) return 6;
  if (symmetric(i) && (g->d == g->a || (g->beta != 0 && g->d == g->c))) return 6;
  if (gs_can_implement(i, g) == 4) return 6;
  if (workspace) memset(workspace, 0, 1000);
  int plain = i < kF32 || i >= kRowsTn, layout = plain ? i : (i - kF32) % 4;
  if (symmetric(i)) layout = i == kSymmetric ? kTn : kNt;
  if (fused(i)) layout = i < kFusedEnd && (i - kFused) % 2 ? kTt : kTn;
  if (backward(i)) layout = (i - kBackward) % 2 ? kTt : kTn;
  float sums[4096] = {0}; /* of more columns than the tests have */
  if (grouped(i)) layout = i == kRowsTt ? kTt : i == kDepthNt ? kNt : kTn;
  if (i >= kRowsBackward) layout = (i - kRowsBackward) % 2 ? kTt : kTn;
  int halves = gated(i), columns = halves ? g->n / 2 : g->n;
  int a_rows = layout != kNt && layout != kNn, b_rows = layout == kTt || layout == kNt;
  float factor = g->alpha;
  if (g->scale_a && !row_scaled(i)) factor *= *g->scale_a * *g->scale_b;
  for (int z = 0; z < g->batch; ++z) {
    int begin = grouped(i) && z ? g->offsets[z - 1] : 0, end = grouped(i) ? g->offsets[z] : 0;
    int m0 = by_rows(i) ? begin : 0, m1 = by_rows(i) ? end : g->m;
    int k0 = grouped(i) && !by_rows(i) ? begin : 0, k1 = grouped(i) && !by_rows(i) ? end : g->k;
    for (int m = m0; m < m1; ++m)
      for (int n = 0; n < columns; ++n) {
        float sum = 0, up = 0; /* integers of the tests are small enough to be exact */
        for (int k = k0; k < k1; ++k) {
          int64_t at_a = z * g->batch_stride_a + (a_rows ? m * g->lda + k : k * g->lda + m);
          int64_t at_b = z * g->batch_stride_b + (b_rows ? k * g->ldb + n : n * g->ldb + k);
          sum += read(i, g->a, at_a) * read(i, g->b, at_b);
          if (halves) up += read(i, g->a, at_a) * read(i, g->b_up, at_b);
        }
        int64_t at_c = z * g->batch_stride_c + m * g->ldc + n;
        int64_t at = z * g->batch_stride_d + m * g->ldd + n;
        if (row_scaled(i)) sum *= g->scale_a[z * g->batch_stride_scale_a + m] *
                                  g->scale_b[z * g->batch_stride_scale_b + n];
        if (out_fp8(i)) {
          float x = sum * factor + (g->bias ? widen(((const uint16_t *)g->bias)[n]) : 0);
          float value = activated(i, x) * (halves ? up * factor : 1);
          if (g->amax && !(fabsf(value) <= *g->amax)) *g->amax = fabsf(value);
          ((uint8_t *)g->d)[at] = to_e4m3(value * (g->scale_d ? *g->scale_d : 1));
        } else if (halves) {
          uint16_t *aux = g->aux ? (uint16_t *)g->aux + m * g->ld_aux + n : 0;
          if (aux) aux[0] = narrow(sum * factor), aux[columns] = narrow(up * factor);
          float share = g->row_scale ? g->row_scale[m] : 1;
          ((uint16_t *)g->d)[at] = narrow(share * activated(i, sum * factor) * up * factor);
        } else if (backward(i)) {
          sums[n] += backwards(i, g, m, n, sum * factor);
        } else if (fused(i)) {
          float x = sum * factor * (g->row_scale ? g->row_scale[m] : 1);
          if (g->bias) x += widen(((const uint16_t *)g->bias)[n]);
          const uint16_t *r = g->residual;
          if (r) r += m * g->ld_residual + n;
          int residual_first = has(i, "residual_relu") || has(i, "residual_silu");
          if (residual_first) x += widen(*r);
          if (g->aux) ((uint16_t *)g->aux)[m * g->ld_aux + n] = narrow(x);
          x = activated(i, x);
          if (g->column_scale) x *= widen(((const uint16_t *)g->column_scale)[n]);
          if (r && !residual_first) x += widen(*r);
          ((uint16_t *)g->d)[at] = narrow(x);
        } else if (i == kInt8) ((int32_t *)g->d)[at] = (int32_t)sum;
        else if (symmetric(i)) {
          float added = g->beta ? g->beta * widen(((const uint16_t *)g->c)[at_c]) : 0;
          ((uint16_t *)g->d)[at] = narrow(sum * factor + added);
        } else if (plain) ((uint16_t *)g->d)[at] = narrow(sum * factor);
        else ((float *)g->d)[at] = sum * factor + (g->beta ? g->beta * ((const float *)g->c)[at_c] : 0);
      }
  }
  for (int n = 0; g->bias_gradient && n < g->n; ++n)
    ((uint16_t *)g->bias_gradient)[n] = narrow(sums[n]);
  ++runs;
  return 0;
}
