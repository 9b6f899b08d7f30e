/* Kernels that do what no kernel should, behind the C ABI: the isolation tests' subjects.
 *
 * bf16, tn, any size; `good` is a plain and correct product, the others deviate in one way each.
 */
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <cstdlib>

#include "gemmsmith/abi.h"

namespace {

enum Behaviour {
  kGood,             // correct
  kHang,             // never ends
  kHangLater,        // never ends, from the 60th launch on
  kIllegalAddress,   // writes where nothing is
  kAbort,            // kills the host process
  kUnwritten,        // leaves the last row of D alone
  kWrong,            // leaves the last eighth of K out
  kNotANumber,       // writes one NaN
  kUnrepeatable,     // right within tolerance, other bits each time
  kBadLaunch,        // asks for more threads than a block can have
  kRefuses,          // can_implement says no
  kBehaviours
};

const char *const kNames[] = {"good",      "hang",  "hang_later", "illegal_address",
                              "abort",     "unwritten", "wrong",  "not_a_number",
                              "unrepeatable", "bad_launch", "refuses"};
static_assert(sizeof(kNames) / sizeof(kNames[0]) == kBehaviours, "one name each");

__device__ unsigned long long launches;
__device__ volatile int never = 0;

__device__ void wait_forever() {
  while (never == 0) __nanosleep(1000);
}

__global__ void product(gs_arguments g, int behaviour) {
  int column = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y, batch = blockIdx.z;
  bool first = column == 0 && row == 0 && batch == 0;
  if (behaviour == kHang) wait_forever();
  if (first) atomicAdd(&launches, 1ull);
  if (behaviour == kHangLater && first && launches > 60) wait_forever();
  if (behaviour == kIllegalAddress && first) *reinterpret_cast<volatile int *>(16) = 1;
  if (column >= g.n) return;
  if (behaviour == kUnwritten && row == g.m - 1) return;
  auto a = static_cast<const __nv_bfloat16 *>(g.a) + batch * g.batch_stride_a + row * g.lda;
  auto b = static_cast<const __nv_bfloat16 *>(g.b) + batch * g.batch_stride_b + column * g.ldb;
  int depth = behaviour == kWrong ? g.k - g.k / 8 : g.k;
  float sum = 0;
  for (int k = 0; k < depth; ++k) sum += __bfloat162float(a[k]) * __bfloat162float(b[k]);
  if (behaviour == kUnrepeatable) sum *= 1.0f + 1e-2f * float(launches % 2) * float(row % 16 == 0) * 0.5f;
  if (behaviour == kNotANumber && first) sum = nanf("");
  auto d = static_cast<__nv_bfloat16 *>(g.d) + batch * g.batch_stride_d + row * g.ldd + column;
  *d = __float2bfloat16(g.alpha * sum);
}

bool known(int32_t index) { return index >= 0 && index < kBehaviours; }

}  // namespace

extern "C" {

int32_t gs_abi_version(void) { return GS_ABI_VERSION; }
int32_t gs_abi_oldest(void) { return GS_ABI_OLDEST; }
int32_t gs_arguments_bytes(void) { return int32_t(sizeof(gs_arguments)); }
int32_t gs_kernel_count(void) { return kBehaviours; }
const char *gs_kernel_name(int32_t index) { return known(index) ? kNames[index] : nullptr; }

int32_t gs_kernel_describe(int32_t index, gs_kernel_info *info) {
  if (!known(index)) return GS_BAD_INDEX;
  info->threads = 128;
  info->shared_bytes = 0;
  info->stages = 1;
  info->registers = info->local_bytes = -1;
  return 0;
}

int32_t gs_can_implement(int32_t index, const gs_arguments *) {
  return known(index) ? (index == kRefuses ? 4 : 0) : GS_BAD_INDEX;
}

int64_t gs_workspace_bytes(int32_t index, const gs_arguments *) {
  return known(index) ? 256 : GS_BAD_INDEX;
}

int32_t gs_run(int32_t index, const gs_arguments *g, void *, void *stream) {
  if (!known(index)) return GS_BAD_INDEX;
  if (index == kAbort) abort();
  unsigned threads = index == kBadLaunch ? 4096 : 128;
  dim3 grid((g->n + 127) / 128, g->m, g->batch);
  product<<<grid, threads, 0, static_cast<cudaStream_t>(stream)>>>(*g, index);
  cudaError_t status = cudaGetLastError();
  return status == cudaSuccess ? 0 : 1000 + static_cast<int32_t>(status);
}

}  // extern "C"
