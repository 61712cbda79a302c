// A row and the team of warps that owns it: their shared memory, and what they do together but for the ranks.
#pragma once

#include "../device/launch.cuh"
#include "../device/order.cuh"
#include "../device/score.cuh"

namespace rx {

// The rule that makes scores of logits.
enum class Score { kSigmoid, kSqrtSoftplus, kSoftmax };

// What a winner is known by until weights are made: its score, or, of a softmax, its key, whose share follows once the largest
// is known (NaN where it has none). `listed`: what it was listed with, a logit; of sqrt-softplus, which ranks by the score that
// it weighs with, that score.
template <Score kScore>
__device__ __forceinline__ float to_weigh(uint32_t key, float listed) {
  if constexpr (kScore == Score::kSoftmax) {
    return key == kNanOrder ? __int_as_float(0x7fffffff) : key_of(key);
  } else if constexpr (kScore == Score::kSqrtSoftplus) {
    return listed == listed ? listed : 0.0f;
  } else {
    return sigmoid_to_weigh(listed);
  }
}

// A warp lists at most kListed candidates, in the order of their ids.
template <int kTopk>
inline constexpr int kListed = kTopk <= 8 ? 16 : 64;

template <int kTeam, int kGroups, int kTopk>
struct alignas(16) RowMemory {
  uint32_t best[kTeam * kGroups][kWarp];            // key of each lane; kGrouped: of each four; then what softmax adds up
  uint32_t key[kTeam][kListed<kTopk>];              // of the candidates; kNoKey where there is none
  int candidate[kTeam][kListed<kTopk>];             // the id, right behind the keys: see list_if
  float listed[kTeam][kListed<kTopk>];              // see to_weigh; right behind the ids
  int overflow[kTeam];                              // whether more reach the bound than the list takes
  alignas(16) float score[kTopk];                   // of the winners, in order; nothing from topk on
  int id[kTopk];                                    // of the winners, in order; 0 from topk on
  alignas(16) uint2 warp_best[2][kTeam];            // key and id, where the team takes one at a time; rounds alternate
  alignas(16) uint32_t group[4 * kTeam * kGroups];  // kGrouped: the score of each group
};

__device__ __forceinline__ float4 as_floats(const uint4& bits) {
  return make_float4(__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z), __uint_as_float(bits.w));
}

__device__ __forceinline__ float4 plus(const float4& a, const float4& b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// Writes one candidate: its key to `at`, its id kPlane bytes behind and what it is listed with as many again. Under a
// predicate, see store_if.
template <int kPlane>
__device__ __forceinline__ void list_if(bool condition, uint32_t* at, uint32_t key, int id, float listed) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p st.shared.b32 [%1], %2;\n@p st.shared.b32 [%1+%5], %3;\n"
      "@p st.shared.b32 [%1+%6], %4;\n}" ::"r"(static_cast<int>(condition)),
      "r"(static_cast<uint32_t>(__cvta_generic_to_shared(at))),
      "r"(key),
      "r"(id),
      "f"(listed),
      "n"(kPlane),
      "n"(2 * kPlane)
      : "memory");
}

// How many keys are better. Floats, so that the FMA pipe counts beside the comparisons on the integer pipe; four of them, since
// additions to one would wait for one another.
struct Counter {
  float part[4] = {};
  __device__ __forceinline__ void add(const uint4& keys, uint32_t than) {
    if (keys.x > than) part[0] += 1.0f;
    if (keys.y > than) part[1] += 1.0f;
    if (keys.z > than) part[2] += 1.0f;
    if (keys.w > than) part[3] += 1.0f;
  }
  // The same; of the first `earlier` keys also those that are equal.
  __device__ __forceinline__ void add(const uint4& keys, uint32_t than, int earlier) {
    if (keys.x > than - (earlier > 0)) part[0] += 1.0f;
    if (keys.y > than - (earlier > 1)) part[1] += 1.0f;
    if (keys.z > than - (earlier > 2)) part[2] += 1.0f;
    if (keys.w > than - (earlier > 3)) part[3] += 1.0f;
  }
  __device__ __forceinline__ float sum() const {
    return (part[0] + part[1]) + (part[2] + part[3]);
  }
};

// A count as an integer: from 2^23 on, the low bits of a float are one. A conversion would take its turn on a slow pipe.
__device__ __forceinline__ int integer(float count) {
  return __float_as_int(count + 0x1p23f) - __float_as_int(0x1p23f);
}

// Among the threads of a row's team, which is number `team` of its block.
template <int kTeam>
__device__ __forceinline__ void team_sync(int team) {
  if constexpr (kTeam == 1) {
    __syncwarp();
  } else {
    asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(kTeam * kWarp) : "memory");
  }
}

// Four neighbouring floats at `base`, those of `expert` and the next; 0 from `past` on. kVector: `base` is 16-byte aligned and
// whole groups of four may be read.
template <bool kVector>
__device__ __forceinline__ float4 load_four(const float* base, int expert, int past) {
  if constexpr (kVector) {
    if (expert >= past) return float4{};
    return as_floats(load_shared_by_grids(base));
  } else {
    float value[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) value[c] = expert + c < past ? __ldcg(base + c) : 0.0f;
    return make_float4(value[0], value[1], value[2], value[3]);
  }
}

// The lowest of the lanes' keys that fewer than topk are better than, and a real one.
__device__ __forceinline__ uint32_t lowest_of_best(uint32_t own, const Counter& better, int topk) {
  const uint32_t real = max(own, kNoKey + 1);
  return __reduce_min_sync(kAllLanes, integer(better.sum()) < topk ? real : ~0u);
}

// The topk-th largest of the lanes' best keys, or the lowest real key there is. `meanwhile` runs while shared memory answers.
template <typename Meanwhile>
__device__ __forceinline__ uint32_t
bound_of_cut(uint32_t best, uint32_t (&of_lanes)[kWarp], int topk, int lane, Meanwhile meanwhile) {
  of_lanes[lane] = best;
  __syncwarp();
  uint4 four[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) four[i] = load_four_shared(of_lanes + 4 * i);
  meanwhile();
  Counter better;
#pragma unroll
  for (int i = 0; i < 4; ++i) better.add(four[i], best);
#pragma unroll
  for (int i = 4; i < 8; ++i) better.add(load_four_shared(of_lanes + 4 * i), best);
  return lowest_of_best(best, better, topk);
}

}  // namespace rx
