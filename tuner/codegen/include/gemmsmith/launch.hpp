/* Launching without allocating or synchronizing, so that a launch can be captured in a graph. */
#pragma once

#include <atomic>
#include <cstdint>

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

/* A `__global__` function with its fixed launch configuration.
 *
 * Shared memory beyond the default 48 KB is asked for once per device. Two threads may both ask
 * the first time: the call is idempotent.
 */
template <class Params, void (*Function)(Params), int SharedBytes>
class Launcher {
 public:
  static cudaError_t launch(Params const& params, dim3 grid, dim3 block, dim3 cluster, int device,
                            cudaStream_t stream) {
    cudaError_t error = configure(device);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {cluster.x, cluster.y, cluster.z};
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = SharedBytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = cluster.x * cluster.y * cluster.z > 1 ? 1 : 0;
    void* arguments[] = {const_cast<Params*>(&params)};
    error = cudaLaunchKernelExC(&config, address(), arguments);
    if (error != cudaSuccess) cudaGetLastError();  // the code is returned; leave no sticky state
    return error;
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
  static void const* address() { return reinterpret_cast<void const*>(Function); }

  static cudaError_t configure(int device) {
    uint64_t bit = device < 64 ? uint64_t(1) << device : 0;
    if (configured_.load(std::memory_order_relaxed) & bit) return cudaSuccess;
    cudaError_t error = cudaFuncSetAttribute(
        address(), cudaFuncAttributeMaxDynamicSharedMemorySize, SharedBytes);
    if (error != cudaSuccess) {
      cudaGetLastError();
      return error;
    }
    configured_.fetch_or(bit, std::memory_order_relaxed);
    return cudaSuccess;
  }

  static inline std::atomic<uint64_t> configured_{0};
};

}  // namespace gemmsmith
