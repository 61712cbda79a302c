// Selection: logits -> ids, weights. A team of warps owns one row: one warp a row for many rows, one warp per 128 experts for
// few.
//
//   registers   lane l holds the keys of experts 128 g + 4 l + {0..3} of its warp's share, g < kGroups, as ordered integers
//   shared      RowMemory, one a row
//
// The topk-th largest of the best keys of a warp's lanes is a lower bound of its cut, and few keys reach it: about 10 for
// top-8. These are listed, and each of them counts how many of the team's others are better. So the time hardly depends on
// topk. Where more keys reach the bound than can be listed, as in a row of ties, the team takes its best key topk times
// instead.
//
// What lost, for one row of 288 experts behind the gate: topk rounds of a warp-wide maximum for every row (the loop body of 85
// instructions takes about 140 cycles); one warp for the row (+0.15 us); a rehearsal of this kernel before its wait, to have
// the instructions there (+1.3 us); polling the gate's sums instead of waiting for its end (+0.1 to 0.3 us).
#pragma once

#include "../device/launch.cuh"
#include "../device/order.cuh"
#include "../device/score.cuh"

namespace rx {

struct WarpSelectParams {
  const float* logits;                  // [rows, experts]; behind small_rows sums [slices, rows, experts]
  const float* bias;                    // [experts]
  float* logits_out;                    // [rows, experts], written behind small_rows
  int32_t* ids;                         // [rows, slots]
  float* weights;                       // [rows, slots]
  const int32_t* num_token_non_padded;  // [1] on the device, or null
  int64_t row_stride;                   // elements, of logits
  int slice_stride;                     // elements, of logits
  int rows, experts, topk;
  int slots;  // topk routed ones, then the shared experts'
  float scale, shared_weight;
  bool renormalize;
};

// Larger is better: the key, then the lower id.
using Ranked = uint64_t;
__device__ __forceinline__ Ranked ranked(uint32_t key, int expert) {
  return static_cast<Ranked>(key) << 32 | ~static_cast<uint32_t>(expert);
}
__device__ __forceinline__ int expert_of(Ranked word) {
  return static_cast<int>(~static_cast<uint32_t>(word));
}

// 16 bytes of shared memory. Volatile, so that all of a thread's loads are under way before the first is used.
__device__ __forceinline__ ulonglong2 load_two(const Ranked* words) {
  ulonglong2 value;
  asm volatile("ld.shared.v2.u64 {%0, %1}, [%2];"
               : "=l"(value.x), "=l"(value.y)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(words)))
               : "memory");
  return value;
}

// A warp lists at most kListed candidates; two neighbouring lanes share one and compare it with half of the others each.
template <int kTopk>
inline constexpr int kListed = kTopk <= 8 ? 16 : 64;

template <int kTeam, int kGroups, int kTopk>
struct alignas(16) RowMemory {
  float logits[kTeam][128 * kGroups];        // by place in the warp's share
  Ranked candidates[kTeam][kListed<kTopk>];  // 0 where there is none
  alignas(16) float score[kTopk];            // of the winners, in order; 0 from topk on
  int id[kTopk];                             // of the winners, in order
  Ranked warp_best[2][kTeam];                // where the team takes one at a time; rounds alternate
};

template <int kTeam>
__device__ __forceinline__ void team_sync() {
  if constexpr (kTeam == 1) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

// Four neighbouring floats, 0 from `past` on. kVector: `base` is 16-byte aligned and whole groups of four may be read.
template <bool kVector>
__device__ __forceinline__ float4 load_four(const float* base, int expert, int past) {
  if constexpr (kVector) {
    if (expert >= past) return float4{};
    const uint4 bits = load_shared_by_grids(base + expert);
    return make_float4(__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z), __uint_as_float(bits.w));
  } else {
    float value[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) value[c] = expert + c < past ? __ldcg(base + expert + c) : 0.0f;
    return make_float4(value[0], value[1], value[2], value[3]);
  }
}

// Takes the team's best key `topk` times.
template <int kTeam, int kGroups, int kTopk>
__device__ void take_one_by_one(
    uint32_t (&key)[4 * kGroups],
    RowMemory<kTeam, kGroups, kTopk>& memory,
    int share,
    int first_expert,
    int topk,
    int warp,
    int lane) {
#pragma unroll 1
  for (int round = 0; round < topk; ++round) {
    Ranked best = 0;
#pragma unroll
    for (int slot = 0; slot < 4 * kGroups; ++slot) {
      best = max(best, ranked(key[slot], first_expert + 128 * (slot / 4) + slot % 4));
    }
    const uint32_t top = __reduce_max_sync(kAllLanes, static_cast<uint32_t>(best >> 32));
    const uint32_t id = __reduce_max_sync(kAllLanes, best >> 32 == top ? static_cast<uint32_t>(best) : 0u);
    Ranked winner = static_cast<Ranked>(top) << 32 | id;
    if constexpr (kTeam > 1) {
      Ranked* warp_best = memory.warp_best[round & 1];
      if (lane == 0) warp_best[warp] = winner;
      team_sync<kTeam>();
#pragma unroll
      for (int w = 0; w < kTeam; ++w) winner = max(winner, warp_best[w]);
    }
    const int expert = expert_of(winner);
#pragma unroll
    for (int slot = 0; slot < 4 * kGroups; ++slot) {
      if (first_expert + 128 * (slot / 4) + slot % 4 == expert) key[slot] = kNoKey;
    }
    if (warp == 0 && lane == 0) {
      memory.id[round] = expert;
      memory.score[round] = sigmoid_to_weigh(memory.logits[expert / share][expert % share]);
    }
  }
}

// The topk-th largest of the lanes' best keys, or the lowest real key there is.
__device__ __forceinline__ uint32_t bound_of_cut(uint32_t best, int topk) {
  uint32_t better = 0;  // bits: sums of comparisons would wait for one another
#pragma unroll
  for (int i = 0; i < kWarp; ++i) better |= __shfl_sync(kAllLanes, best, i) > best ? 1u << i : 0u;
  return max(__reduce_min_sync(kAllLanes, __popc(better) < topk ? best : ~0u), kNoKey + 1);
}

// kSlices > 0: behind small_rows, whose sums of kSlices slices of K are added here, in order; the logits are written too, and
// the bias, complete before small_rows passed its own wait, is read before ours. kSlices = 0: finished logits of anyone.
// kTopk: 8 or 32, the most that topk may be. kVector: bias, logits and logits_out allow 16-byte accesses.
template <int kTeam, int kGroups, int kSlices, int kRowsPerBlock, int kTopk, bool kVector>
__global__ __launch_bounds__(kRowsPerBlock * kTeam * kWarp) void warp_select_kernel(
    const __grid_constant__ WarpSelectParams params) {
  static_assert(kTeam == 1 || kRowsPerBlock == 1, "a team of several warps synchronises as a block");
  constexpr int kSlots = 4 * kGroups, kParts = kSlices > 0 ? kSlices : 1;
  constexpr bool kBehindSmallRows = kSlices > 0;
  __shared__ RowMemory<kTeam, kGroups, kTopk> memories[kRowsPerBlock];
  const int lane = threadIdx.x % kWarp, warp = kTeam == 1 ? 0 : threadIdx.x / kWarp;
  const int row = kTeam == 1 ? blockIdx.x * kRowsPerBlock + threadIdx.x / kWarp : blockIdx.x;
  if (kTeam == 1 && row >= params.rows) return;
  auto& memory = memories[kTeam == 1 ? threadIdx.x / kWarp : 0];
  // A warp's share is [.., past): even shares, since a warp with few experts would list most of them.
  const int share = kTeam == 1 ? params.experts : 4 * (((params.experts + 3) / 4 + kTeam - 1) / kTeam);
  const int first_expert = share * warp + 4 * lane, past = min(share * (warp + 1), params.experts);

  float4 bias[kGroups], part[kParts][kGroups];
  auto load_bias = [&] {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      bias[g] = load_four<kVector>(params.bias, first_expert + 128 * g, past);
    }
  };
  if constexpr (kBehindSmallRows) load_bias();
#pragma unroll
  for (int i = 0; i < kListed<kTopk>; i += kWarp) memory.candidates[warp][(lane + i) % kListed<kTopk>] = 0;
  memory.score[lane % kTopk] = 0.0f;
  const float* source[kParts];
#pragma unroll
  for (int s = 0; s < kParts; ++s) {
    source[s] = params.logits + row * params.row_stride + s * params.slice_stride;
    asm volatile("" : "+l"(source[s]));  // now, not behind the wait
  }
  wait_for_producer();
  if constexpr (!kBehindSmallRows) load_bias();
#pragma unroll
  for (int s = 0; s < kParts; ++s) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      part[s][g] = load_four < kVector || kBehindSmallRows > (source[s], first_expert + 128 * g, past);
    }
  }
  const bool padded = params.num_token_non_padded != nullptr && row >= __ldcg(params.num_token_non_padded);

  uint32_t key[kSlots];
  uint32_t best = kNoKey;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    float4 sum = part[0][g];
#pragma unroll
    for (int s = 1; s < kParts; ++s) {
      sum.x += part[s][g].x, sum.y += part[s][g].y, sum.z += part[s][g].z, sum.w += part[s][g].w;
    }
    const float four[4] = {sum.x, sum.y, sum.z, sum.w}, add[4] = {bias[g].x, bias[g].y, bias[g].z, bias[g].w};
    const int expert = first_expert + 128 * g;
    *reinterpret_cast<float4*>(&memory.logits[warp][128 * g + 4 * lane]) = sum;
    if constexpr (kBehindSmallRows) {
      float* out = params.logits_out + static_cast<int64_t>(row) * params.experts + expert;
      if constexpr (kVector) {
        if (expert < past) *reinterpret_cast<float4*>(out) = sum;
      } else {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          if (expert + c < past) out[c] = four[c];
        }
      }
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      // A mask and not a choice: the compiler would branch around the score.
      const uint32_t inside = expert + (kVector ? 0 : c) < past ? ~0u : 0u;
      key[4 * g + c] = order_of(sigmoid_to_rank(four[c]) + add[c]) & inside;
      best = max(best, key[4 * g + c]);
    }
  }

  // List the keys that reach the bound, in any order.
  const uint32_t bound = bound_of_cut(best, params.topk);
  int place = 0, listed = 0;
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
    const unsigned lanes = __ballot_sync(kAllLanes, key[slot] >= bound);
    place += __popc(lanes & ((1u << lane) - 1));
    listed += __popc(lanes);
  }
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
    const bool reaches = key[slot] >= bound;
    if (reaches && place < kListed<kTopk>) {
      memory.candidates[warp][place] = ranked(key[slot], first_expert + 128 * (slot / 4) + slot % 4);
    }
    place += reaches;
  }
  bool too_many = listed > kListed<kTopk>;
  if constexpr (kTeam > 1) {
    too_many = __syncthreads_or(too_many);
  } else {
    __syncwarp();
  }

  if (!too_many) {
    constexpr int kUnroll = kTopk <= 8 ? 8 : 1;  // long lists would unroll to thousands of instructions
#pragma unroll kUnroll
    for (int first = 0; first < kListed<kTopk>; first += 16) {
      const int mine = first + lane / 2, half = lane % 2;
      const Ranked own = memory.candidates[warp][mine];
      const int id = expert_of(own);
      const float score = sigmoid_to_weigh(memory.logits[warp][mine < listed ? id - share * warp : 0]);
      int rank = 0;
#pragma unroll kUnroll
      for (int w = 0; w < kTeam; ++w) {
        uint32_t better = 0;
#pragma unroll
        for (int i = 0; i < kListed<kTopk> / 4; ++i) {
          const ulonglong2 rival = load_two(&memory.candidates[w][4 * i + 2 * half]);
          better |= (rival.x > own ? 1u << 2 * i % 32 : 0u) | (rival.y > own ? 2u << 2 * i % 32 : 0u);
        }
        rank += __popc(better);
      }
      rank += __shfl_xor_sync(kAllLanes, rank, 1);
      if (half == 0 && mine < listed && rank < params.topk) {
        memory.id[rank] = id;
        memory.score[rank] = score;
      }
    }
  } else {
    take_one_by_one<kTeam, kGroups, kTopk>(key, memory, share, first_expert, params.topk, warp, lane);
  }
  team_sync<kTeam>();
  if (warp > 0 || lane >= params.slots) return;

  const bool routed = lane < params.topk;
  const int id = routed ? memory.id[lane % kTopk] : params.experts + lane - params.topk;
  const float score = memory.score[lane % kTopk];
  float factor = params.scale;
  if (params.renormalize) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kTopk / 8; ++i) {
      const float4 a = reinterpret_cast<const float4*>(memory.score)[2 * i];
      const float4 b = reinterpret_cast<const float4*>(memory.score)[2 * i + 1];
      sum += ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w));
    }
    factor = sum > 0.0f ? __fdividef(params.scale, sum) : 0.0f;
  }
  const int64_t slot = static_cast<int64_t>(row) * params.slots + lane;
  params.ids[slot] = padded ? -1 : id;
  params.weights[slot] = padded ? 0.0f : routed ? score * factor : params.shared_weight;
}

// kGroups: groups of 128 experts.
template <int kGroups, int kSlices, bool kVector>
inline void launch_warp_select(const WarpSelectParams& params, cudaStream_t stream) {
  constexpr int kFewRows = 128, kBlockRows = 4;
  const bool top8 = params.topk <= 8;
  if (params.rows <= kFewRows) {
    auto* kernel = top8 ? &warp_select_kernel<kGroups, 1, kSlices, 1, 8, kVector>
                        : &warp_select_kernel<kGroups, 1, kSlices, 1, 32, kVector>;
    launch(kernel, dim3(params.rows), dim3(kGroups * kWarp), 1, stream, params);
  } else {
    auto* kernel = top8 ? &warp_select_kernel<1, kGroups, kSlices, kBlockRows, 8, kVector>
                        : &warp_select_kernel<1, kGroups, kSlices, kBlockRows, 32, kVector>;
    launch(kernel, dim3((params.rows + kBlockRows - 1) / kBlockRows), dim3(kBlockRows * kWarp), 1, stream, params);
  }
}

// What both entry points fill in alike; the caller adds logits and their strides.
inline WarpSelectParams warp_select_params(
    TensorView bias,
    TensorView ids,
    TensorView weights,
    TensorView num_token_non_padded,
    int64_t topk,
    double scale,
    double shared_weight,
    bool renormalize) {
  WarpSelectParams params{};
  params.bias = static_cast<const float*>(bias.data_ptr());
  params.ids = static_cast<int32_t*>(ids.data_ptr());
  params.weights = static_cast<float*>(weights.data_ptr());
  if (num_token_non_padded.numel() > 0) {
    params.num_token_non_padded = static_cast<const int32_t*>(num_token_non_padded.data_ptr());
  }
  params.rows = static_cast<int>(ids.size(0));
  params.experts = static_cast<int>(bias.size(0));
  params.topk = static_cast<int>(topk);
  params.slots = static_cast<int>(ids.size(1));
  params.scale = static_cast<float>(scale);
  params.shared_weight = static_cast<float>(shared_weight);
  params.renormalize = renormalize;
  return params;
}

// Entry point of the selection alone.
template <int kGroups, bool kVector>
struct WarpSelect {
  // logits [rows, experts] fp32, bias [experts] fp32, ids [rows, slots] int32 and weights [rows, slots] fp32 (written),
  // num_token_non_padded [1] int32 or empty for no padding; slots is topk and the shared experts
  static void run(
      TensorView logits,
      TensorView bias,
      TensorView ids,
      TensorView weights,
      TensorView num_token_non_padded,
      int64_t topk,
      double scale,
      double shared_weight,
      bool renormalize) {
    WarpSelectParams params =
        warp_select_params(bias, ids, weights, num_token_non_padded, topk, scale, shared_weight, renormalize);
    params.logits = static_cast<const float*>(logits.data_ptr());
    params.row_stride = logits.stride(0);
    launch_warp_select<kGroups, 0, kVector>(params, stream_of(logits));
  }
};

}  // namespace rx
