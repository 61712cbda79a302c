// Programmatic dependent launch (PDL), the launch itself, and special loads and stores; the only place that knows these.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cstdint>

namespace rx {

inline constexpr int kWarp = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;

using tvm::ffi::TensorView;

// Keeps a value in its register: the compiler would work it out again from the parameters, in a loop that polls or behind a
// barrier.
__device__ __forceinline__ void pin(int32_t& value) {
  asm volatile("" : "+r"(value));
}
__device__ __forceinline__ void pin(uint32_t& value) {
  asm volatile("" : "+r"(value));
}
template <typename T>
__device__ __forceinline__ void pin(T*& value) {
  asm volatile("" : "+l"(value));
}

// Waits until every grid that this one was launched after has completed and its memory is visible. Per thread.
__device__ __forceinline__ void wait_for_producer() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Lets the next grid of the stream start. It orders no memory: that grid's own wait does.
__device__ __forceinline__ void let_consumer_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// 16 bytes that this kernel reads once; the L2 fetches the 256 bytes around them. Not .nc: ptxas moves such loads behind the
// wait, and a weight is to be asked for before it.
__device__ __forceinline__ uint4 load_once(const void* address) {
  uint4 value;
  asm volatile("ld.global.L1::no_allocate.L2::256B.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address)
               : "memory");
  return value;
}

// Has the L2 fetch what is about to be read. Reads nothing itself, so it may come before the wait for whoever writes there.
// Where it is about to be written, the address is translated by then; of a cold page that takes as long as a load.
__device__ __forceinline__ void ask_for(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// 16 bytes that another grid writes or may have written; each of the four words is read whole, from the L2.
__device__ __forceinline__ uint4 load_shared_by_grids(const void* address) {
  uint4 value;
  asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address)
               : "memory");
  return value;
}

// One such word.
__device__ __forceinline__ uint32_t load_word_shared_by_grids(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// Stores under a predicate. Into a branch the compiler would move all that only the store needs, where it comes late.
template <typename T>
__device__ __forceinline__ void store_if(bool condition, T* address, T value) {
  static_assert(sizeof(T) == 4);
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p st.global.b32 [%1], %2;\n}" ::"r"(static_cast<int>(condition)),
               "l"(address),
               "r"(reinterpret_cast<const uint32_t&>(value))
               : "memory");
}

// The same for a word that another block of this grid waits for: it reaches the L2 without waiting for anything.
template <typename T>
__device__ __forceinline__ void send_word_if(bool condition, T* address, T value) {
  static_assert(sizeof(T) == 4);
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p st.relaxed.gpu.global.b32 [%1], %2;\n}" ::"r"(static_cast<int>(condition)),
      "l"(address),
      "r"(reinterpret_cast<const uint32_t&>(value))
      : "memory");
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes of shared memory. Volatile, so that all of a thread's loads are under way before the first is used.
__device__ __forceinline__ uint4 load_four_shared(const void* address) {
  uint4 value;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(shared_address(address))
               : "memory");
  return value;
}

// A barrier in shared memory that opens when the bytes that are expected of it have come. One thread arrives.
__device__ __forceinline__ void init_arrival(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}

// Makes barriers known to the other blocks of the cluster. It waits for all loads before it.
__device__ __forceinline__ void fence_arrivals() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void expect_bytes(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// Until the barrier opens for the first time; the bytes come from other blocks of the cluster.
__device__ __forceinline__ void wait_for_bytes(uint64_t* barrier) {
  uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared_address(barrier))
        : "memory");
  }
}

inline void check_cuda(const char* what, cudaError_t error) {
  TVM_FFI_CHECK(error == cudaSuccess, RuntimeError) << what << ": " << cudaGetErrorString(error);
}

inline cudaStream_t stream_of(const TensorView& tensor) {
  return static_cast<cudaStream_t>(TVMFFIEnvGetStream(tensor.device().device_type, tensor.device().device_id));
}

// Launches `kernel` with the PDL attribute, in clusters of (1, cluster, 1) blocks, with `shared` bytes of dynamic shared
// memory; raises RuntimeError with CUDA's own text.
template <typename... Formal, typename... Actual>
inline void launch(
    void (*kernel)(Formal...),
    dim3 grid,
    dim3 block,
    unsigned cluster,
    size_t shared,
    cudaStream_t stream,
    Actual... arguments) {
  if (shared > 48 * 1024) {
    check_cuda("shared memory", cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  }
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = 1;
  attributes[1].val.clusterDim.y = cluster;
  attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;
  check_cuda("launch", cudaLaunchKernelEx(&config, kernel, arguments...));
}

}  // namespace rx
