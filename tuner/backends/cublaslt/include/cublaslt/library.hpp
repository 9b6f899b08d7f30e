/* The libcublasLt that the process has loaded already, and CUDA's driver: found, never linked.
 *
 * Types and constants are those of cublasLt.h 13; the functions have been the same since 11.
 * Descriptors are laid out on the stack: 512 bytes suffice for 12.8 (256), 13.0 and 13.10, and a
 * library that needs more refuses to initialize them.
 */
#pragma once

#include <dlfcn.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "gemmsmith/abi.h"

namespace gemmsmith::cublaslt {

constexpr int32_t kCudaBase = 1000;
constexpr int32_t kCublasBase = 2000;
constexpr int kInvalidValue = 7, kArchMismatch = 8, kNotSupported = 15; /* cublasStatus_t */

struct Opaque {
  uint64_t words[64];
};

struct Algorithm {
  uint64_t words[8];
};

/* cublasLtMatmulHeuristicResult_t */
struct Result {
  Algorithm algorithm;
  size_t workspace_bytes;
  int state;
  float waves;
  int reserved[4];
};

enum LayoutAttribute { kBatchCount = 5, kBatchOffset = 6 };
enum ProductAttribute {
  kTransposeA = 3,
  kTransposeB = 4,
  kSmCountTarget = 15,
  kScalePointerA = 17,
  kScalePointerB = 18,
  kFastAccumulation = 25,
  kScaleModeA = 31,
  kScaleModeB = 32,
};
enum PreferenceAttribute { kMaxWorkspace = 1, kMinAlignmentA = 5, kMinAlignmentD = 8 };
enum Capability {
  kSplitKSupport = 0,
  kReductionMask = 1,
  kSwizzlingSupport = 2,
  kTileIds = 6,
  kCustomOptionMax = 7,
  kStagesIds = 13,
};
enum Configuration {
  kId = 0,
  kTile = 1,
  kSplitK = 2,
  kReduction = 3,
  kSwizzling = 4,
  kCustomOption = 5,
  kStages = 6,
  kInnerShape = 7,
  kClusterShape = 8,
};
constexpr int32_t kOuterVectorScale = 3; /* CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F */

struct Library {
  size_t (*GetVersion)();
  int (*Create)(void**);
  int (*MatrixLayoutInit_internal)(Opaque*, size_t, int, uint64_t, uint64_t, int64_t);
  int (*MatrixLayoutSetAttribute)(Opaque*, int, void const*, size_t);
  int (*MatmulDescInit_internal)(Opaque*, size_t, int, int);
  int (*MatmulDescSetAttribute)(Opaque*, int, void const*, size_t);
  int (*MatmulPreferenceInit_internal)(Opaque*, size_t);
  int (*MatmulPreferenceSetAttribute)(Opaque*, int, void const*, size_t);
  int (*MatmulAlgoGetHeuristic)(void*, Opaque*, Opaque*, Opaque*, Opaque*, Opaque*, Opaque*, int,
                                Result*, int*);
  int (*MatmulAlgoGetIds)(void*, int, int, int, int, int, int, int, int*, int*);
  int (*MatmulAlgoInit)(void*, int, int, int, int, int, int, int, Algorithm*);
  int (*MatmulAlgoCheck)(void*, Opaque*, Opaque*, Opaque*, Opaque*, Opaque*, Algorithm const*,
                         Result*);
  int (*MatmulAlgoCapGetAttribute)(Algorithm const*, int, void*, size_t, size_t*);
  int (*MatmulAlgoConfigSetAttribute)(Algorithm*, int, void const*, size_t);
  int (*MatmulAlgoConfigGetAttribute)(Algorithm const*, int, void*, size_t, size_t*);
  int (*Matmul)(void*, Opaque*, void const*, void const*, Opaque*, void const*, Opaque*,
                void const*, void const*, Opaque*, void*, Opaque*, Algorithm const*, void*, size_t,
                void*);
  uint64_t version;
};

/* What of the driver it takes to make a device's context current. */
struct Driver {
  int (*Init)(unsigned);
  int (*DeviceGet)(int*, int);
  int (*DeviceGetAttribute)(int*, int, int);
  int (*DevicePrimaryCtxRetain)(void**, int);
  int (*CtxGetCurrent)(void**);
  int (*CtxPushCurrent)(void*);
  int (*CtxPopCurrent)(void**);
};

template <class Function>
bool find(void* library, char const* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

/* One that is loaded already, else one that the linker finds. It is never closed. */
template <size_t Count>
void* open_library(char const* const (&names)[Count]) {
  for (int mode : {RTLD_NOW | RTLD_NOLOAD, RTLD_NOW}) {
    for (char const* name : names) {
      if (void* library = dlopen(name, mode)) return library;
    }
  }
  return nullptr;
}

inline bool load(Library& into) {
  static constexpr char const* kNames[] = {"libcublasLt.so.13", "libcublasLt.so.12"};
  void* library = open_library(kNames);
  if (!library) return false;
#define GS_FIND(name) find(library, "cublasLt" #name, into.name)
  bool whole = GS_FIND(GetVersion) && GS_FIND(Create) && GS_FIND(MatrixLayoutInit_internal) &&
               GS_FIND(MatrixLayoutSetAttribute) && GS_FIND(MatmulDescInit_internal) &&
               GS_FIND(MatmulDescSetAttribute) && GS_FIND(MatmulPreferenceInit_internal) &&
               GS_FIND(MatmulPreferenceSetAttribute) && GS_FIND(MatmulAlgoGetHeuristic) &&
               GS_FIND(MatmulAlgoGetIds) && GS_FIND(MatmulAlgoInit) && GS_FIND(MatmulAlgoCheck) &&
               GS_FIND(MatmulAlgoCapGetAttribute) && GS_FIND(MatmulAlgoConfigSetAttribute) &&
               GS_FIND(MatmulAlgoConfigGetAttribute) && GS_FIND(Matmul);
#undef GS_FIND
  if (whole) into.version = into.GetVersion();
  return whole;
}

inline bool load(Driver& into) {
  static constexpr char const* kNames[] = {"libcuda.so.1"};
  void* driver = open_library(kNames);
  return driver && find(driver, "cuInit", into.Init) && find(driver, "cuDeviceGet", into.DeviceGet) &&
         find(driver, "cuDeviceGetAttribute", into.DeviceGetAttribute) &&
         find(driver, "cuDevicePrimaryCtxRetain", into.DevicePrimaryCtxRetain) &&
         find(driver, "cuCtxGetCurrent", into.CtxGetCurrent) &&
         find(driver, "cuCtxPushCurrent_v2", into.CtxPushCurrent) &&
         find(driver, "cuCtxPopCurrent_v2", into.CtxPopCurrent);
}

/* Loaded on first use; null where it cannot be, which is tried again the next time. */
template <class Loaded>
Loaded const* loaded() {
  static std::atomic<Loaded const*> known{nullptr};
  static std::mutex mutex;
  static Loaded made;
  if (Loaded const* found = known.load(std::memory_order_acquire)) return found;
  std::lock_guard<std::mutex> lock(mutex);
  if (!known.load(std::memory_order_relaxed) && load(made)) {
    known.store(&made, std::memory_order_release);
  }
  return known.load(std::memory_order_relaxed);
}

/* A device's primary context, which torch uses too, and the library's handle for it. */
struct Device {
  void* context = nullptr;
  void* handle = nullptr;
  int sm_count = 0;
};

/* Makes a device's context current for this scope. */
class ContextScope {
 public:
  ContextScope(Driver const& driver, void* context) : driver_(driver) {
    void* current = nullptr;
    error_ = driver.CtxGetCurrent(&current);
    if (error_ == 0 && current != context) {
      error_ = driver.CtxPushCurrent(context);
      pushed_ = error_ == 0;
    }
  }
  ~ContextScope() {
    void* popped = nullptr;
    if (pushed_) driver_.CtxPopCurrent(&popped);
  }
  ContextScope(ContextScope const&) = delete;
  ContextScope& operator=(ContextScope const&) = delete;
  int error() const { return error_; }

 private:
  Driver const& driver_;
  int error_ = 0;
  bool pushed_ = false;
};

constexpr int kDevices = 64;

/* The device of an ordinal; made on first use, which must not be within a capture. */
inline int32_t device_of(Library const& library, Driver const& driver, int ordinal,
                         Device const*& found) {
  constexpr int kMultiprocessorCount = 16;
  static std::atomic<Device const*> known[kDevices];
  static Device devices[kDevices];
  static std::mutex mutex;
  found = known[ordinal].load(std::memory_order_acquire);
  if (found) return 0;
  std::lock_guard<std::mutex> lock(mutex);
  Device& made = devices[ordinal];
  found = known[ordinal].load(std::memory_order_relaxed);
  if (found) return 0;
  int number = 0;
  int error = driver.Init(0);
  if (error == 0) error = driver.DeviceGet(&number, ordinal);
  if (error == 0) error = driver.DeviceGetAttribute(&made.sm_count, kMultiprocessorCount, number);
  if (error == 0 && !made.context) error = driver.DevicePrimaryCtxRetain(&made.context, number);
  if (error != 0) return kCudaBase + error; /* the driver's numbers are the runtime's */
  ContextScope scope(driver, made.context);
  if (scope.error() != 0) return kCudaBase + scope.error();
  if (int status = library.Create(&made.handle)) return kCublasBase + status;
  known[ordinal].store(&made, std::memory_order_release);
  found = &made;
  return 0;
}

}  // namespace gemmsmith::cublaslt
