// Gate GEMM for more than 16 rows, as a part of single.cuh: the sums of small_rows, bit for bit, for less traffic.
//
// With many rows the L2 sets the pace: small_rows has each slice of the rows read once for every 8 * kTiles experts. Here two
// blocks halve a slice, and each has twice the experts, so the rows come half as often for the same weights in registers.
// small_rows adds up a slice as (s0 + s1) + (s2 + s3), with s_i of its warps i, i + 4, ..; a half is one of these brackets, and
// whoever reads the two adds them.
//
// A pair of warps has one share of K, each for its own 8 * kTiles experts.
//   registers   the weights, as in small_rows
//   shared      HalvedMemory: of 16 rows at a time either warp of a pair fetches 8, in the order in which lanes read them
//
// What lost, in microseconds for 288 x 4096 and 96 rows with a cold cache: the rows through the copy engine, without halves
// (+0.2).
#pragma once

#include "small_rows.cuh"

namespace rx {

template <int kWarps, int kTiles, int kDepth>
struct alignas(16) HalvedMemory {
  static constexpr int kStages = 4, kPairs = kWarps / 2;
  static constexpr int kLogits = 16 * 8 * kTiles;  // of one side of the pairs
  alignas(16) uint32_t rows[kStages][kPairs][2][kDepth][4 * kWarp];
  float partial[2][kWarps][kLogits + 8];
};

// Between the two warps of a pair, whose number is below 15.
__device__ __forceinline__ void pair_sync(int pair) {
  asm volatile("bar.sync %0, %1;" ::"r"(pair + 1), "n"(2 * kWarp) : "memory");
}

// One block's part: the 16 * kTiles experts number `columns`, the half `half` of the slice `slice`, and the 16 rows number
// `first` and every `step`-th 16 after them.
template <int kWarps, int kTiles, int kDepth>
__device__ __forceinline__ void halved_gate_block(
    const SmallRowsParams& params,
    HalvedMemory<kWarps, kTiles, kDepth>& memory,
    int columns,
    int slice,
    int half,
    int first,
    int step) {
  static_assert(kWarps % 4 == 0, "the halves are equal");
  using Memory = HalvedMemory<kWarps, kTiles, kDepth>;
  constexpr int kPairs = Memory::kPairs, kStages = Memory::kStages, kExperts = 8 * kTiles, kLogits = Memory::kLogits;
  const int warp = threadIdx.x / kWarp, in_warp = threadIdx.x % kWarp, group = in_warp / 4, lane = in_warp % 4;
  const int pair = warp % kPairs, side = warp / kPairs;
  const int warp_of_slice = 4 * (pair / 2) + 2 * half + pair % 2;  // small_rows' warp with this share of K
  const int begin = (slice * kWarps + warp_of_slice) * kDepth * 4;
  const int first_expert = columns * 2 * kExperts;

  uint4 weight[kDepth][kTiles];
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const int expert = min(first_expert + side * kExperts + tile * 8 + group, params.experts - 1);
    const auto* row = params.weight + static_cast<int64_t>(expert) * params.weight_stride + (begin + lane) * 8;
#pragma unroll
    for (int i = 0; i < kDepth; ++i) weight[i][tile] = load_once(row + 4 * i * 8);
  }
  if (threadIdx.x == 0) ask_for(params.out + ((2 * slice + half) * params.slice_stride + first_expert));
  wait_for_producer();
  let_consumer_start();

  auto fetch = [&](int n) {
    const int first_row = 16 * (first + n * step);
    if (first_row < params.rows) {
      const int row = min(first_row + 8 * side + group, params.rows - 1);
      const auto* from = params.hidden + static_cast<int64_t>(row) * params.hidden_stride + (begin + lane) * 8;
#pragma unroll
      for (int i = 0; i < kDepth; ++i) {
        copy_to_shared(&memory.rows[n % kStages][pair][side][i][4 * in_warp], from + 4 * i * 8);
      }
    }
    close_copies();
  };
#pragma unroll
  for (int n = 0; n < kStages; ++n) fetch(n);
#pragma unroll 1
  for (int n = 0;; ++n) {
    const int first_row = 16 * (first + n * step), buffer = n % 2;
    wait_for_copies<kStages - 1>();
    pair_sync(pair);
    float sum[kTiles][2][4] = {};
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      const uint4 low = load_four_shared(&memory.rows[n % kStages][pair][0][i][4 * in_warp]);
      const uint4 high = load_four_shared(&memory.rows[n % kStages][pair][1][i][4 * in_warp]);
      const uint32_t first_k[4] = {low.x, high.x, low.y, high.y}, second_k[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        mma_16x8x16(sum[tile][0], first_k, weight[i][tile].x, weight[i][tile].y);
        mma_16x8x16(sum[tile][1], second_k, weight[i][tile].z, weight[i][tile].w);
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int at = group * kExperts + tile * 8 + lane * 2;
      *reinterpret_cast<float2*>(&memory.partial[buffer][warp][at]) =
          make_float2(sum[tile][0][0] + sum[tile][1][0], sum[tile][0][1] + sum[tile][1][1]);
      *reinterpret_cast<float2*>(&memory.partial[buffer][warp][at + 8 * kExperts]) =
          make_float2(sum[tile][0][2] + sum[tile][1][2], sum[tile][0][3] + sum[tile][1][3]);
    }
    __syncthreads();
    fetch(n + kStages);

    const int rows = min(16, params.rows - first_row);
#pragma unroll 1
    for (int logit = threadIdx.x; logit < 2 * kLogits; logit += kWarps * kWarp) {
      const int of_side = logit / kLogits, place = logit % kLogits, row = place / kExperts;
      float even = 0.0f, odd = 0.0f;
#pragma unroll
      for (int p = 0; p < kPairs; p += 2) {
        even += memory.partial[buffer][of_side * kPairs + p][place];
        odd += memory.partial[buffer][of_side * kPairs + p + 1][place];
      }
      const int expert = first_expert + of_side * kExperts + place % kExperts;
      const int at = (2 * slice + half) * params.slice_stride + (first_row + row) * params.out_stride + expert;
      send_word_if(row < rows && expert < params.experts, params.out + at, even + odd);
    }
    if (16 * (first + (n + 1) * step) >= params.rows) return;
  }
}

}  // namespace rx
