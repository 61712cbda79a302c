// Hopper's own: tiles that the copy engine (TMA) brings into shared memory, the barriers that say so, and the tensor cores of a
// warpgroup, which multiply from there; the only place that knows these instructions. sm_90a.
#pragma once

#include <cudaTypedefs.h>

#include "launch.cuh"

namespace rx {

inline constexpr int kWarpgroup = 128;  // threads
inline constexpr int kTileK = 64;       // elements of bf16 that make a row of a tile: 128 bytes, the widest swizzle

// Tiles [tile_rows, kTileK] of a bf16 matrix [rows, columns] in global memory, zeros outside of it; swizzled by 128 bytes.
inline CUtensorMap tile_map(const TensorView& matrix, int tile_rows) {
  static PFN_cuTensorMapEncodeTiled_v12000 encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    const char* name = "cuTensorMapEncodeTiled";
    check_cuda(name, cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result));
    TVM_FFI_CHECK(result == cudaDriverEntryPointSuccess, RuntimeError) << name << ": not in this driver";
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found);
  }();
  const cuuint64_t size[2] = {static_cast<cuuint64_t>(matrix.size(1)), static_cast<cuuint64_t>(matrix.size(0))};
  // A matrix of one row may have any stride; the engine wants one of whole 16 bytes.
  const int64_t stride = matrix.size(0) > 1 ? matrix.stride(0) : (matrix.size(1) + 7) / 8 * 8;
  const cuuint64_t row_bytes[1] = {static_cast<cuuint64_t>(stride) * sizeof(__nv_bfloat16)};
  const cuuint32_t tile[2] = {kTileK, static_cast<cuuint32_t>(tile_rows)}, step[2] = {1, 1};
  CUtensorMap map{};
  const CUresult result = encode(
      &map,
      CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      2,
      matrix.data_ptr(),
      size,
      row_bytes,
      tile,
      step,
      CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  TVM_FFI_CHECK(result == CUDA_SUCCESS, RuntimeError)
      << "tensor map of [" << size[1] << ", " << size[0] << "], " << row_bytes[0] << " bytes a row: error " << result;
  return map;
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// A barrier of `arrivals`.
__device__ __forceinline__ void init_barrier(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Until the phase of this parity is over.
__device__ __forceinline__ void wait_for_phase(uint64_t* barrier, int parity) {
  uint32_t done = 0;
  while (!done) {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
  }
}

// One thread arrives. Of the block's scope: what tensor cores have read needs no fence, and one of the cluster's scope waits
// for all of global memory (0.6 us at every arrival).
__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// The tile whose first element is (row, column) goes to `to`, and its bytes are announced at `barrier`.
__device__ __forceinline__ void copy_tile(void* to, const CUtensorMap& map, int row, int column, uint64_t* barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
                   shared_address(to)),
               "l"(&map),
               "r"(column),
               "r"(row),
               "r"(shared_address(barrier))
               : "memory");
}

__device__ __forceinline__ void arrive_in_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_for_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// 16 bytes of the shared memory of block `rank`, in the same place as `mine`.
__device__ __forceinline__ float4 load_four_of(const float* mine, int rank) {
  float4 value;
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %4, %5;\nld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n}"
      : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
      : "r"(shared_address(mine)), "r"(rank)
      : "memory");
  return value;
}

// How a warpgroup finds an operand: rows of 128 bytes, swizzled, eight of them in 1,024 bytes, at which it starts. 16 elements
// of k further on it is kDescribeK more.
inline constexpr uint64_t kDescribeK = 16 * sizeof(__nv_bfloat16) / 16;
__device__ __forceinline__ uint64_t describe_tile(const void* tile) {
  constexpr uint64_t kEightRows = 8 * kTileK * sizeof(__nv_bfloat16), kSwizzle128 = 1;
  return (shared_address(tile) & 0x3ffff) >> 4 | uint64_t{1} << 16 | kEightRows >> 4 << 32 | kSwizzle128 << 62;
}

__device__ __forceinline__ void fence_multiply() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void commit_multiply() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most kOpen groups are not done.
template <int kOpen>
__device__ __forceinline__ void wait_for_multiply() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kOpen) : "memory");
}

// sum[64, kN] (+)= a[64, 16] x b[kN, 16]^T by a warpgroup; without `add` the sum was 0 before. Of a lane's sums, number
// 4 j + {0, 1} are of row lane / 4 of its warp's 16 and columns 8 j + 2 (lane % 4) + {0, 1}; {2, 3} of eight rows below.
template <int kN>
__device__ __forceinline__ void multiply(float (&sum)[kN / 2], uint64_t a, uint64_t b, int add);

#define RX_EIGHT(i)                                                                                                         \
  "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3]), "+f"(sum[i + 4]), "+f"(sum[i + 5]), "+f"(sum[i + 6]), \
      "+f"(sum[i + 7])
#define RX_NAMES_32                                                                                                          \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, " \
  "%26, %27, %28, %29, %30, %31"
#define RX_NAMES_40 RX_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define RX_NAMES_48 RX_NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define RX_NAMES_64 RX_NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define RX_NAMES_72 RX_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define RX_NAMES_80 RX_NAMES_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define RX_NAMES_96 RX_NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define RX_MULTIPLY(columns, names, a_at, b_at, add_at)                                                                     \
  "{\n.reg .pred p;\nsetp.ne.b32 p, %" add_at ", 0;\nwgmma.mma_async.sync.aligned.m64n" columns "k16.f32.bf16.bf16 {" names \
  "}, %" a_at ", %" b_at ", p, 1, 1, 0, 0;\n}"

template <>
__device__ __forceinline__ void multiply<64>(float (&sum)[32], uint64_t a, uint64_t b, int add) {
  asm volatile(RX_MULTIPLY("64", RX_NAMES_32, "32", "33", "34")
               : RX_EIGHT(0), RX_EIGHT(8), RX_EIGHT(16), RX_EIGHT(24)
               : "l"(a), "l"(b), "r"(add));
}
template <>
__device__ __forceinline__ void multiply<80>(float (&sum)[40], uint64_t a, uint64_t b, int add) {
  asm volatile(RX_MULTIPLY("80", RX_NAMES_40, "40", "41", "42")
               : RX_EIGHT(0), RX_EIGHT(8), RX_EIGHT(16), RX_EIGHT(24), RX_EIGHT(32)
               : "l"(a), "l"(b), "r"(add));
}
template <>
__device__ __forceinline__ void multiply<96>(float (&sum)[48], uint64_t a, uint64_t b, int add) {
  asm volatile(RX_MULTIPLY("96", RX_NAMES_48, "48", "49", "50")
               : RX_EIGHT(0), RX_EIGHT(8), RX_EIGHT(16), RX_EIGHT(24), RX_EIGHT(32), RX_EIGHT(40)
               : "l"(a), "l"(b), "r"(add));
}
template <>
__device__ __forceinline__ void multiply<128>(float (&sum)[64], uint64_t a, uint64_t b, int add) {
  asm volatile(RX_MULTIPLY("128", RX_NAMES_64, "64", "65", "66")
               : RX_EIGHT(0), RX_EIGHT(8), RX_EIGHT(16), RX_EIGHT(24), RX_EIGHT(32), RX_EIGHT(40), RX_EIGHT(48), RX_EIGHT(56)
               : "l"(a), "l"(b), "r"(add));
}
template <>
__device__ __forceinline__ void multiply<144>(float (&sum)[72], uint64_t a, uint64_t b, int add) {
  asm volatile(RX_MULTIPLY("144", RX_NAMES_72, "72", "73", "74")
               : RX_EIGHT(0),
                 RX_EIGHT(8),
                 RX_EIGHT(16),
                 RX_EIGHT(24),
                 RX_EIGHT(32),
                 RX_EIGHT(40),
                 RX_EIGHT(48),
                 RX_EIGHT(56),
                 RX_EIGHT(64)
               : "l"(a), "l"(b), "r"(add));
}
template <>
__device__ __forceinline__ void multiply<160>(float (&sum)[80], uint64_t a, uint64_t b, int add) {
  asm volatile(RX_MULTIPLY("160", RX_NAMES_80, "80", "81", "82")
               : RX_EIGHT(0),
                 RX_EIGHT(8),
                 RX_EIGHT(16),
                 RX_EIGHT(24),
                 RX_EIGHT(32),
                 RX_EIGHT(40),
                 RX_EIGHT(48),
                 RX_EIGHT(56),
                 RX_EIGHT(64),
                 RX_EIGHT(72)
               : "l"(a), "l"(b), "r"(add));
}
template <>
__device__ __forceinline__ void multiply<192>(float (&sum)[96], uint64_t a, uint64_t b, int add) {
  asm volatile(RX_MULTIPLY("192", RX_NAMES_96, "96", "97", "98")
               : RX_EIGHT(0),
                 RX_EIGHT(8),
                 RX_EIGHT(16),
                 RX_EIGHT(24),
                 RX_EIGHT(32),
                 RX_EIGHT(40),
                 RX_EIGHT(48),
                 RX_EIGHT(56),
                 RX_EIGHT(64),
                 RX_EIGHT(72),
                 RX_EIGHT(80),
                 RX_EIGHT(88)
               : "l"(a), "l"(b), "r"(add));
}

#undef RX_EIGHT
#undef RX_NAMES_32
#undef RX_NAMES_40
#undef RX_NAMES_48
#undef RX_NAMES_64
#undef RX_NAMES_72
#undef RX_NAMES_80
#undef RX_NAMES_96
#undef RX_MULTIPLY

}  // namespace rx
