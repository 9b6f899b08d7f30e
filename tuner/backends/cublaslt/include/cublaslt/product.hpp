/* One product of cuBLASLt's behind the C ABI.
 *
 * Row-major D[M,N] is column-major Dᵀ[N,M] = Bᵀ[N,K] · Aᵀ[K,M] to the library: its A is our B, and
 * its B our A. An operand whose rows lie along N (B) or K (A) is what it wants as it is; the others
 * are transposed by it. A call lays its descriptors out on the stack, takes no lock and allocates
 * nothing.
 */
#pragma once

#include <cmath>
#include <cstring>

#include "cublaslt/library.hpp"
#include "gemmsmith/arguments.hpp"

namespace gemmsmith::cublaslt {

/* What a kernel of the pack computes. Types are cudaDataType_t and cublasComputeType_t. */
struct Operation {
  char const* name;
  int32_t a, b, d;
  int32_t bytes_a, bytes_b, bytes_d;
  int32_t compute, scale;
  bool a_row_major, b_row_major;
  uint32_t scales; /* kScales, kRowScales, or none */
  bool fast_accumulation;
};

constexpr int32_t kInt32 = 10; /* CUDA_R_32I */
constexpr int kAlignment = 16; /* bytes: of every start, whatever the algorithm */

/* cutlass::Status of the C ABI. */
enum Refusal {
  kMisaligned = 1,
  kBadLayout = 3,
  kBadProblem = 4,
  kUnsupported = 5,
  kNoWorkspace = 6,
};

/* An operand as runs of `extent` contiguous elements, `leading` apart. */
struct Run {
  void const* data;
  int64_t rows, extent, leading, batch_stride;

  int64_t stride() const { return rows > 1 ? leading : extent; }
  int32_t check(int32_t batch) const {
    if (stride() < extent || (batch > 1 && batch_stride < 0)) return kBadLayout;
    return reinterpret_cast<uintptr_t>(data) % kAlignment == 0 ? 0 : int32_t(kMisaligned);
  }
};

struct Runs {
  Run a, b, c, d;

  Runs(Operation const& op, gs_arguments const& g)
      : a{g.a, op.a_row_major ? g.m : g.k, op.a_row_major ? g.k : g.m, g.lda, g.batch_stride_a},
        b{g.b, op.b_row_major ? g.k : g.n, op.b_row_major ? g.n : g.k, g.ldb, g.batch_stride_b},
        c{g.c, g.m, g.n, g.ldc, g.batch_stride_c},
        d{g.d, g.m, g.n, g.ldd, g.batch_stride_d} {
    if (g.beta == 0.0f) c = d; /* it is not read */
  }
};

/* A factor in the type that the library computes with. */
inline bool whole_number(float value) {
  return std::nearbyint(value) == value && std::fabs(value) <= 16777216.0f;
}

/* Everything that can be checked without the library. */
inline int32_t check_arguments(Operation const& op, gs_arguments const& g) {
  if (g.m <= 0 || g.n <= 0 || g.k <= 0 || g.batch <= 0 || g.sm_count <= 0) return kBadProblem;
  if (g.device < 0 || g.device >= kDevices || g.workspace_limit < 0) return kBadProblem;
  if (g.beta != 0.0f && g.c == nullptr) return kBadProblem;
  if (!takes_only(g, op.scales | kLibraryAlgorithm)) return kUnsupported;
  /* CUTLASS's launch parameters mean nothing here: the algorithm has its own. */
  if (g.raster_order != 0 || g.swizzle > 1 || g.decomposition != 0 || g.splits > 1) {
    return kUnsupported;
  }
  if (op.scales == kRowScales) {
    if (g.scaling != GS_SCALING_ROW || !g.scale_a || !g.scale_b) return kBadProblem;
    if (g.batch > 1) return kUnsupported;
  }
  if (op.scale == kInt32 && !(whole_number(g.alpha) && whole_number(g.beta))) return kUnsupported;
  Runs runs(op, g);
  for (Run const* run : {&runs.a, &runs.b, &runs.c, &runs.d}) {
    if (int32_t status = run->check(g.batch)) return status;
  }
  return g.batch > 1 && g.batch_stride_d == 0 ? int32_t(kBadLayout) : 0;
}

/* The library's descriptors of a product; `status` is the first error. */
class Descriptors {
 public:
  Descriptors(Library const& library, Device const& device, Operation const& op,
              gs_arguments const& g)
      : library_(library) {
    Runs runs(op, g);
    note(library.MatmulDescInit_internal(&product, sizeof product, op.compute, op.scale));
    set(kTransposeA, int32_t(!op.b_row_major));
    set(kTransposeB, int32_t(!op.a_row_major));
    if (op.fast_accumulation) set(kFastAccumulation, int8_t(1));
    if (op.scales == kRowScales) {
      set(kScaleModeA, kOuterVectorScale);
      set(kScaleModeB, kOuterVectorScale);
    }
    if (g.scale_b) set(kScalePointerA, g.scale_b);
    if (g.scale_a) set(kScalePointerB, g.scale_a);
    if (g.sm_count < device.sm_count) set(kSmCountTarget, g.sm_count);
    lay_out(a, op.b, runs.b, g.batch);
    lay_out(b, op.a, runs.a, g.batch);
    lay_out(c, op.d, runs.c, g.batch);
    lay_out(d, op.d, runs.d, g.batch);
    if (op.scale == kInt32) {
      auto alpha_s32 = static_cast<int32_t>(g.alpha), beta_s32 = static_cast<int32_t>(g.beta);
      std::memcpy(&alpha, &alpha_s32, sizeof alpha);
      std::memcpy(&beta, &beta_s32, sizeof beta);
    } else {
      alpha = g.alpha;
      beta = g.beta;
    }
  }
  Descriptors(Descriptors const&) = delete;
  Descriptors& operator=(Descriptors const&) = delete;

  int status = 0;
  Opaque product, a, b, c, d;
  float alpha, beta; /* or an int32_t's bits */

 private:
  void note(int error) {
    if (status == 0) status = error;
  }

  template <class Value>
  void set(int attribute, Value value) {
    note(library_.MatmulDescSetAttribute(&product, attribute, &value, sizeof value));
  }

  /* A run is a column to the library. */
  void lay_out(Opaque& layout, int32_t type, Run const& run, int32_t batch) {
    note(library_.MatrixLayoutInit_internal(&layout, sizeof layout, type, uint64_t(run.extent),
                                            uint64_t(run.rows), run.stride()));
    if (batch == 1) return;
    note(library_.MatrixLayoutSetAttribute(&layout, kBatchCount, &batch, sizeof batch));
    note(library_.MatrixLayoutSetAttribute(&layout, kBatchOffset, &run.batch_stride,
                                           sizeof run.batch_stride));
  }

  Library const& library_;
};

/* The library, the device and its current context, for the length of a call. */
class Session {
 public:
  /* Arguments that are wrong, and a library that is missing or another, need no device to be told. */
  Session(Operation const& op, gs_arguments const& g, bool with_algorithm) {
    status = check_arguments(op, g);
    if (status != 0) return;
    library = loaded<Library>();
    if (!library) status = GS_NO_LIBRARY;
    else if (with_algorithm && g.library_version != library->version) status = GS_OTHER_LIBRARY;
    else if (with_algorithm && all_zero(g.algorithm, sizeof g.algorithm)) status = GS_NO_ALGORITHM;
    if (status != 0) return;
    driver_ = loaded<Driver>();
    constexpr int kNoDriver = 35; /* cudaErrorInsufficientDriver */
    status = driver_ ? device_of(*library, *driver_, g.device, device) : kCudaBase + kNoDriver;
  }

  Driver const& driver() const { return *driver_; }

  int32_t status;
  Library const* library = nullptr;
  Device const* device = nullptr;

 private:
  Driver const* driver_ = nullptr;
};

inline Algorithm algorithm_of(gs_arguments const& g) {
  Algorithm algorithm;
  std::memcpy(algorithm.words, g.algorithm, sizeof algorithm.words);
  return algorithm;
}

/* Whether the library runs an algorithm for a product, and with what workspace. */
inline int check_algorithm(Library const& library, void* handle, Descriptors& descriptors,
                           Algorithm const& algorithm, Result& result) {
  result = Result{};
  return library.MatmulAlgoCheck(handle, &descriptors.product, &descriptors.a, &descriptors.b,
                                 &descriptors.c, &descriptors.d, &algorithm, &result);
}

inline int32_t can_implement(Operation const& op, gs_arguments const& g) {
  Session session(op, g, true);
  if (session.status != 0) return session.status;
  ContextScope scope(session.driver(), session.device->context);
  if (scope.error() != 0) return kCudaBase + scope.error();
  Descriptors descriptors(*session.library, *session.device, op, g);
  if (descriptors.status != 0) return kCublasBase + descriptors.status;
  Result result;
  int status = check_algorithm(*session.library, session.device->handle, descriptors,
                               algorithm_of(g), result);
  if (status == kInvalidValue || status == kArchMismatch || status == kNotSupported) {
    return GS_NO_ALGORITHM;
  }
  if (status != 0) return kCublasBase + status;
  return result.workspace_bytes <= size_t(g.workspace_limit) ? 0 : GS_NO_ALGORITHM;
}

/* What the algorithm is told it has: a proposal's limit is what it needs. */
inline int64_t workspace_bytes(Operation const& op, gs_arguments const& g) {
  int32_t status = can_implement(op, g);
  return status == 0 ? g.workspace_limit : -int64_t(status);
}

inline int32_t run(Operation const& op, gs_arguments const& g, void* workspace, void* stream) {
  Session session(op, g, true);
  if (session.status != 0) return session.status;
  if (workspace == nullptr && g.workspace_limit > 0) return kNoWorkspace;
  ContextScope scope(session.driver(), session.device->context);
  if (scope.error() != 0) return kCudaBase + scope.error();
  Descriptors descriptors(*session.library, *session.device, op, g);
  if (descriptors.status != 0) return kCublasBase + descriptors.status;
  Algorithm algorithm = algorithm_of(g);
  void const* c = g.beta == 0.0f ? g.d : g.c;
  int status = session.library->Matmul(
      session.device->handle, &descriptors.product, &descriptors.alpha, g.b, &descriptors.a, g.a,
      &descriptors.b, &descriptors.beta, c, &descriptors.c, g.d, &descriptors.d, &algorithm,
      workspace, size_t(g.workspace_limit), stream);
  return status == 0 ? 0 : kCublasBase + status;
}

}  // namespace gemmsmith::cublaslt
