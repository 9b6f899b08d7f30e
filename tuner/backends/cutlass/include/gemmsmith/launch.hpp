/* Launching without allocating or synchronizing, so that a launch can be captured in a graph. */
#pragma once

#include <atomic>
#include <cstdint>

#include "cutlass/cutlass.h"
#include "gemmsmith/abi.h"
#include "gemmsmith/operands.hpp"

namespace gemmsmith {

/* Makes `device` current for this scope, as the stream's device must be. */
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    error_ = cudaGetDevice(&previous_);
    if (error_ == cudaSuccess && previous_ != device) {
      error_ = cudaSetDevice(device);
      switched_ = error_ == cudaSuccess;
    }
  }
  ~DeviceScope() {
    if (switched_) cudaSetDevice(previous_);
  }
  DeviceScope(DeviceScope const&) = delete;
  DeviceScope& operator=(DeviceScope const&) = delete;
  cudaError_t error() const { return error_; }

 private:
  int previous_ = 0;
  bool switched_ = false;
  cudaError_t error_ = cudaSuccess;
};

/* Whether a function executes griddepcontrol.wait before it touches what earlier grids wrote. */
enum class Start {
  kInOrder,   /* after all earlier work of the stream */
  kOverlaps,  /* while the grid before it drains: programmatic dependent launch */
};

/* The grid of a CUTLASS 3.x kernel. The host's half of a compilation needs its address only, so it
 * is spared the body: instantiating the mainloop a second time took it ten seconds of 27 (nvcc
 * 13.0.88, 2026-11-21).
 */
template <class Kernel>
__global__ void
__launch_bounds__(Kernel::MaxThreadsPerBlock, Kernel::MinBlocksPerMultiprocessor)
    entry_point(CUTLASS_GRID_CONSTANT typename Kernel::Params const params) {
#if defined(__CUDA_ARCH__)
  extern __shared__ char shared_storage[];
  Kernel{}(params, shared_storage);
#endif
}

/* A `__global__` function with its fixed launch configuration.
 *
 * What a device must be told once (shared memory beyond 48 KB, clusters of more than eight) is
 * told on first use. Two threads may both do so: the calls are idempotent.
 */
template <class Params, void (*Function)(Params), int SharedBytes, Start How>
class Launcher {
 public:
  static cudaError_t launch(Params const& params, dim3 grid, dim3 block, dim3 cluster, int device,
                            cudaStream_t stream) {
    cudaError_t error = configure(device);
    if (error != cudaSuccess) return error;
    Configuration configuration(grid, block, cluster);
    configuration.config.stream = stream;
    void* arguments[] = {const_cast<Params*>(&params)};
    error = cudaLaunchKernelExC(&configuration.config, address(), arguments);
    if (error != cudaSuccess) cudaGetLastError();  // the code is returned; leave no sticky state
    return error;
  }

  /* Clusters that run at once on an idle device; 0 if the device does not say. Asked once. */
  static int32_t resident_clusters(dim3 block, dim3 cluster, int device) {
    if (device >= kDevices || configure(device) != cudaSuccess) return 0;
    int32_t known = clusters_[device].load(std::memory_order_relaxed);
    if (known > 0) return known;
    int found = 0;
    Configuration configuration(cluster, block, cluster);
    if (cudaOccupancyMaxActiveClusters(&found, address(), &configuration.config) != cudaSuccess) {
      cudaGetLastError();
      return 0;
    }
    clusters_[device].store(found, std::memory_order_relaxed);
    return found;
  }

  /* Registers and spills, once a device has been used: asking earlier would create a context. */
  static void resources(gs_kernel_info& info) {
    info.registers = info.local_bytes = -1;
    cudaFuncAttributes attributes;
    if (configured_.load(std::memory_order_relaxed) == 0) return;
    if (cudaFuncGetAttributes(&attributes, address()) != cudaSuccess) {
      cudaGetLastError();
      return;
    }
    info.registers = attributes.numRegs;
    info.local_bytes = static_cast<int32_t>(attributes.localSizeBytes);
  }

 private:
  static constexpr int kDevices = 64;

  struct Configuration {
    cudaLaunchAttribute attributes[2]{};
    cudaLaunchConfig_t config{};

    Configuration(dim3 grid, dim3 block, dim3 cluster) {
      config.gridDim = grid;
      config.blockDim = block;
      config.dynamicSmemBytes = SharedBytes;
      config.attrs = attributes;
      if (cluster.x * cluster.y * cluster.z > 1) {
        cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim = {cluster.x, cluster.y, cluster.z};
      }
      if (How == Start::kOverlaps) {
        cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
        attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attribute.val.programmaticStreamSerializationAllowed = 1;
      }
    }
  };

  static void const* address() { return reinterpret_cast<void const*>(Function); }

  static cudaError_t configure(int device) {
    uint64_t bit = device < kDevices ? uint64_t(1) << device : 0;
    if (configured_.load(std::memory_order_relaxed) & bit) return cudaSuccess;
    cudaError_t error = cudaFuncSetAttribute(
        address(), cudaFuncAttributeMaxDynamicSharedMemorySize, SharedBytes);
    if (error == cudaSuccess) {
      error = cudaFuncSetAttribute(address(), cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    }
    if (error != cudaSuccess) {
      cudaGetLastError();
      return error;
    }
    configured_.fetch_or(bit, std::memory_order_relaxed);
    return cudaSuccess;
  }

  static inline std::atomic<uint64_t> configured_{0};
  static inline std::atomic<int32_t> clusters_[kDevices]{};
};

}  // namespace gemmsmith
