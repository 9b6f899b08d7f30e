/* Kernels that another compiler has made as cubins; CUDA's driver loads them on first use.
 *
 * Host code only. The generated unit defines an `Image` for each kernel, and a structure with what
 * its backend says about it (tuner/backends/plugin/cubin.py):
 *
 *   kImage, kAlignment   the image; elements that rows and batches are aligned to
 *   kReads               the `Extra`s of the arguments that it reads (arguments.hpp)
 *   takes(g)             whether it can run the arguments
 *   grid(g)              thread blocks along x, y and z
 *   run(g, launch)       calls launch(…) with the kernel's parameters
 */
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include "cublaslt/library.hpp"
#include "gemmsmith/table.hpp"

namespace gemmsmith::cubin {

constexpr int32_t kMisaligned = 1, kInvalidProblem = 4; /* cutlass::Status */
constexpr int32_t kCudaBase = 1000;
constexpr int32_t kNoDriver = kCudaBase + 35; /* cudaErrorInsufficientDriver */
constexpr int kDevices = 64;

struct Image {
  unsigned char const* code;
  char const* function;
  int32_t threads;      /* per thread block */
  int32_t shared_bytes; /* dynamic shared memory per thread block */
};

struct Grid {
  int64_t x, y, z;
};

/* Elements of A, B and D (and C) that a row or a batch begins at a multiple of, and their bytes. */
struct Alignment {
  int64_t a, b, d;
  int64_t a_bytes, b_bytes, d_bytes;
};

constexpr int64_t tiles(int64_t extent, int64_t tile) { return (extent + tile - 1) / tile; }

/* What of the driver it takes to load a cubin and to launch its function. */
struct Driver {
  cublaslt::Driver contexts;
  int (*ModuleLoadData)(void**, void const*);
  int (*ModuleGetFunction)(void**, void*, char const*);
  int (*FuncSetAttribute)(void*, int, int);
  int (*FuncGetAttribute)(int*, int, void*);
  int (*LaunchKernel)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                      void*, void**, void**);
};

inline bool load(Driver& into) {
  static constexpr char const* kNames[] = {"libcuda.so.1"};
  using cublaslt::find;
  if (!load(into.contexts)) return false;
  void* driver = cublaslt::open_library(kNames);
  return find(driver, "cuModuleLoadData", into.ModuleLoadData) &&
         find(driver, "cuModuleGetFunction", into.ModuleGetFunction) &&
         find(driver, "cuFuncSetAttribute", into.FuncSetAttribute) &&
         find(driver, "cuFuncGetAttribute", into.FuncGetAttribute) &&
         find(driver, "cuLaunchKernel", into.LaunchKernel);
}

/* A kernel's function on each device. It is loaded once and never unloaded. */
template <Image const& kImage>
class Function {
 public:
  template <class... Parameters>
  static int32_t launch(Driver const& driver, int device, Grid grid, void* stream,
                        Parameters... parameters) {
    if (device < 0 || device >= kDevices) return kInvalidProblem;
    Loaded& loaded = loaded_[device];
    if (int32_t status = prepare(driver, device, loaded)) return status;
    cublaslt::ContextScope scope(driver.contexts, loaded.context);
    if (scope.error() != 0) return kCudaBase + scope.error();
    /* Some compilers add pointers to scratch memory, which their kernels use only if they say so.
     * The driver reads as many parameters as the function has. */
    void* none = nullptr;
    void* all[] = {&parameters..., &none, &none};
    int error = driver.LaunchKernel(loaded.function.load(std::memory_order_acquire),
                                    unsigned(grid.x), unsigned(grid.y), unsigned(grid.z),
                                    unsigned(kImage.threads), 1, 1, unsigned(kImage.shared_bytes),
                                    stream, all, nullptr);
    return error == 0 ? 0 : kCudaBase + error; /* the driver's numbers are the runtime's */
  }

  /* Registers and spills, once a device has been used. */
  static void resources(gs_kernel_info& info) {
    constexpr int kLocalBytes = 3, kRegisters = 4; /* CUfunction_attribute */
    info.registers = info.local_bytes = -1;
    Driver const* driver = cublaslt::loaded<Driver>();
    if (!driver) return;
    for (Loaded& loaded : loaded_) {
      void* function = loaded.function.load(std::memory_order_acquire);
      if (!function) continue;
      driver->FuncGetAttribute(&info.registers, kRegisters, function);
      driver->FuncGetAttribute(&info.local_bytes, kLocalBytes, function);
      return;
    }
  }

 private:
  struct Loaded {
    std::atomic<void*> function{nullptr};
    void* context = nullptr;
  };

  static int32_t prepare(Driver const& driver, int device, Loaded& loaded) {
    constexpr int kSharedBytes = 8; /* CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES */
    if (loaded.function.load(std::memory_order_acquire)) return 0;
    std::lock_guard<std::mutex> lock(mutex_);
    if (loaded.function.load(std::memory_order_relaxed)) return 0;
    int number = 0;
    int error = driver.contexts.Init(0);
    if (error == 0) error = driver.contexts.DeviceGet(&number, device);
    if (error == 0 && !loaded.context) {
      error = driver.contexts.DevicePrimaryCtxRetain(&loaded.context, number);
    }
    if (error != 0) return kCudaBase + error;
    cublaslt::ContextScope scope(driver.contexts, loaded.context);
    error = scope.error();
    void *library = nullptr, *function = nullptr;
    if (error == 0) error = driver.ModuleLoadData(&library, kImage.code);
    if (error == 0) error = driver.ModuleGetFunction(&function, library, kImage.function);
    if (error == 0) error = driver.FuncSetAttribute(function, kSharedBytes, kImage.shared_bytes);
    if (error != 0) return kCudaBase + error;
    loaded.function.store(function, std::memory_order_release);
    return 0;
  }

  static inline Loaded loaded_[kDevices];
  static inline std::mutex mutex_;
};

/* Whether an operand's start, rows and batches are where the kernel reads and stores vectors. */
inline bool aligned(void const* data, int64_t row, int64_t batch, int64_t elements, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(data) % uintptr_t(elements * bytes) == 0 &&
         row % elements == 0 && batch % elements == 0;
}

/* The table's functions of one kernel. */
template <class Kernel>
struct Product {
  static int32_t describe(gs_kernel_info& info) {
    info.threads = Kernel::kImage.threads;
    info.shared_bytes = Kernel::kImage.shared_bytes;
    Function<Kernel::kImage>::resources(info);
    return 0;
  }

  static int32_t can_implement(gs_arguments const& g) {
    constexpr int64_t kMostX = INT32_MAX, kMostYZ = 65535;
    if (g.m <= 0 || g.n <= 0 || g.k <= 0 || g.batch <= 0) return kInvalidProblem;
    if (!takes_only(g, Kernel::kReads) || !Kernel::takes(g)) return kInvalidProblem;
    Grid grid = Kernel::grid(g);
    if (grid.x < 1 || grid.y < 1 || grid.z < 1) return kInvalidProblem;
    if (grid.x > kMostX || grid.y > kMostYZ || grid.z > kMostYZ) return kInvalidProblem;
    Alignment const& on = Kernel::kAlignment;
    bool many = g.batch > 1;
    if (!aligned(g.a, g.lda, many ? g.batch_stride_a : 0, on.a, on.a_bytes) ||
        !aligned(g.b, g.ldb, many ? g.batch_stride_b : 0, on.b, on.b_bytes) ||
        !aligned(g.d, g.ldd, many ? g.batch_stride_d : 0, on.d, on.d_bytes)) {
      return kMisaligned;
    }
    if (g.beta != 0.0f && !aligned(g.c, g.ldc, many ? g.batch_stride_c : 0, on.d, on.d_bytes)) {
      return kMisaligned;
    }
    return 0;
  }

  static int64_t workspace_bytes(gs_arguments const& g) { return -int64_t(can_implement(g)); }

  static int32_t run(gs_arguments const& g, void*, void* stream) {
    if (int32_t status = can_implement(g)) return status;
    Driver const* driver = cublaslt::loaded<Driver>();
    if (!driver) return kNoDriver;
    return Kernel::run(g, [&](auto... parameters) {
      return Function<Kernel::kImage>::launch(*driver, g.device, Kernel::grid(g), stream,
                                              parameters...);
    });
  }
};

}  // namespace gemmsmith::cubin
