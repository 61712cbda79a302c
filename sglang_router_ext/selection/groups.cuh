// Selection by groups: only the best `kept` groups of 32 neighbouring experts take part. Eight lanes have a group; its score is
// the sum of its two best keys, and of equal scores the lower group is better.
#pragma once

#include "row.cuh"

namespace rx {

// Which groups are kept, a bit for each. Leaves the best key of every lane's four, group by group, in memory.best.
template <int kTeam, int kGroups, int kTopk>
__device__ __forceinline__ uint32_t best_groups(
    const uint32_t (&key)[4 * kGroups], RowMemory<kTeam, kGroups, kTopk>& memory, int kept, int team, int warp, int lane) {
  constexpr int kAll = 4 * kTeam * kGroups;
  static_assert(kAll <= kWarp, "a lane ranks a group");
  const int first = kTeam == 1 ? 0 : warp;  // a team has a warp per 128 experts
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const uint32_t* four = key + 4 * g;
    const uint32_t a = max(four[0], four[1]), b = max(four[2], four[3]);
    uint32_t one = max(a, b), two = max(min(a, b), max(min(four[0], four[1]), min(four[2], four[3])));
    memory.best[first + g][lane] = one;
#pragma unroll
    for (int apart = 1; apart < 8; apart *= 2) {
      const uint32_t other = __shfl_xor_sync(kAllLanes, one, apart);
      const uint32_t second = __shfl_xor_sync(kAllLanes, two, apart);
      two = max(min(one, other), max(two, second));
      one = max(one, other);
    }
    const uint32_t score = one == kNoKey ? kNoKey : order_of(key_of(one) + key_of(two));
    if (lane % 8 == 0) memory.group[4 * (first + g) + lane / 8] = score;
  }
  team_sync<kTeam>(team);
  const uint32_t own = memory.group[lane % kAll];
  int better = 0;
#pragma unroll
  for (int i = 0; i < kAll; i += 4) {
    const uint4 rivals = load_four_shared(memory.group + i);
    better += rivals.x > own || (rivals.x == own && i < lane);
    better += rivals.y > own || (rivals.y == own && i + 1 < lane);
    better += rivals.z > own || (rivals.z == own && i + 2 < lane);
    better += rivals.w > own || (rivals.w == own && i + 3 < lane);
  }
  return __ballot_sync(kAllLanes, lane < kAll && better < kept);
}

// As bound_of_cut, of the whole team and from the fours of the first four groups that are kept. A bound of a warp's own would
// be low where it has few of them, and more keys reach it then than can be listed (256 experts, 8 groups keep 4: +2 us).
template <int kTeam, int kGroups, int kTopk, typename Meanwhile>
__device__ __forceinline__ uint32_t
bound_of_groups(RowMemory<kTeam, kGroups, kTopk>& memory, uint32_t kept, int topk, int lane, Meanwhile meanwhile) {
  const uint32_t* best = &memory.best[0][0];
  uint4 four[8];
  uint32_t own = kNoKey;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int group = __ffs(kept) - 1;
    kept &= kept - 1;
    if (group >= 0) {
      four[2 * i] = load_four_shared(best + 8 * group), four[2 * i + 1] = load_four_shared(best + 8 * group + 4);
      if (lane / 8 == i) own = best[8 * group + lane % 8];
    } else {
      four[2 * i] = four[2 * i + 1] = uint4{kNoKey, kNoKey, kNoKey, kNoKey};
    }
  }
  meanwhile();
  Counter better;
#pragma unroll
  for (int i = 0; i < 8; ++i) better.add(four[i], own);
  return lowest_of_best(own, better, topk);
}

}  // namespace rx
