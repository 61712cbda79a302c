// Selection: logits -> ids, weights. A team of warps owns one row: one warp a row for many rows, one warp per 128 experts for
// few.
//
//   registers   lane l holds the keys of experts 128 g + 4 l + {0..3} of its warp's share, g < kGroups, as ordered integers
//   shared      RowMemory, one a row
//
// The topk-th largest of the best keys of a warp's lanes is a lower bound of its cut, and few keys reach it: about 9 for
// top-8. These are listed, and each of them counts how many of the team's others are better; that is its place among the
// winners. Of equal keys the earlier one is better, and lists are in the order of ids. So up to about top-24 the time hardly
// depends on topk. Where more keys reach the bound than can be listed, as in a row of ties, the team takes its best key topk
// times instead.
//
// For few rows the time is that of one warp's instructions, about three cycles each: comparisons run on the integer pipe and
// are counted on the FMA pipe, and nothing that can wait stands between a barrier and the next load.
//
// What lost, for one row of 288 experts behind the gate: topk rounds of a warp-wide maximum for every row (the loop body of 85
// instructions takes about 140 cycles); one warp for the row (+0.15 us); a rehearsal of this kernel before its wait, to have
// the instructions there (+1.3 us); polling the gate's sums instead of waiting for its end (+0.1 to 0.3 us); 64-bit words of
// key and id, compared by shuffles (+0.2 us); equal keys found by match.any before the results are written (+0.05 us), or by
// a barrier of the team behind the ranks (+0.1 us for whoever waits for the winners).
#pragma once

#include <limits>
#include <type_traits>

#include "groups.cuh"

namespace rx {

struct WarpSelectParams {
  float* logits;                        // [rows, experts]; or sums [rows, slices, 128 * groups], which kWords empties
  const float* bias;                    // [experts]; null for none, with softmax
  float* logits_out;                    // [rows, experts], written from sums
  int32_t* ids;                         // [rows, slots]
  float* weights;                       // [rows, slots]
  int32_t* packed;                      // [rows, slots], id << 16 | weight as bf16, or null
  const int32_t* num_token_non_padded;  // [1] on the device, or null
  const float* image_bias;              // [experts], of rows whose token is an image's; null: no row's is. kSqrtSoftplus
  const uint32_t* tokens;               // of a row: the word at row * token_words
  int token_words;
  uint32_t image_token;
  int64_t row_stride;  // elements, of logits
  int rows, experts, topk;
  int slots, shared;  // of a row: topk routed slots, then `shared` ones
  int groups_kept;    // kGrouped
  float scale, shared_weight;
  float softcap;  // 0: none
  float nan_key;  // what a NaN key ranks as
  bool renormalize;
  bool rounded;  // logits to bf16, as the model's own gate does
};

// Takes the team's best key `topk` times; on ties the lowest id.
template <Score kScore, int kTeam, int kGroups, int kTopk>
__device__ __forceinline__ void take_one_by_one(
    const uint32_t (&key)[4 * kGroups],
    const float (&listed)[4 * kGroups],
    RowMemory<kTeam, kGroups, kTopk>& memory,
    int first_expert,
    int topk,
    int team,
    int warp,
    int lane) {
  uint32_t taken = 0;  // a bit for each slot
  team_sync<kTeam>(team);
#pragma unroll 1
  for (int round = 0; round < topk; ++round) {
    uint32_t best = kNoKey, mine = ~0u;
#pragma unroll
    for (int slot = 0; slot < 4 * kGroups; ++slot) {
      if (key[slot] > best && !(taken >> slot & 1)) best = key[slot], mine = first_expert + 128 * (slot / 4) + slot % 4;
    }
    uint2 winner;  // key, id
    winner.x = __reduce_max_sync(kAllLanes, best);
    winner.y = __reduce_min_sync(kAllLanes, best == winner.x ? mine : ~0u);
    if constexpr (kTeam > 1) {
      uint2* warp_best = memory.warp_best[round & 1];
      if (lane == 0) warp_best[warp] = winner;
      team_sync<kTeam>(team);
#pragma unroll
      for (int w = 0; w < kTeam; ++w) {
        const uint2 rival = warp_best[w];
        if (rival.x > winner.x || (rival.x == winner.x && rival.y < winner.y)) winner = rival;
      }
    }
    if (best == winner.x && mine == winner.y) {  // this lane's
#pragma unroll
      for (int slot = 0; slot < 4 * kGroups; ++slot) {
        if (first_expert + 128 * (slot / 4) + slot % 4 == static_cast<int>(winner.y)) {
          taken |= 1u << slot;
          memory.id[round] = static_cast<int>(winner.y);
          memory.score[round] = to_weigh<kScore>(key[slot], listed[slot]);
        }
      }
    }
  }
}

// An id and its weight in one word, as FlashInfer's routed experts read them.
__device__ __forceinline__ int32_t packed(int id, float weight, bool padded) {
  const uint32_t half = __bfloat16_as_ushort(__float2bfloat16_rn(padded ? 0.0f : weight));
  return static_cast<int32_t>(static_cast<uint32_t>(padded ? -1 : id) << 16 | half);
}

// Where a row's logits come from.
enum class Source {
  kLogits,  // finished ones of anyone
  kSums,    // small_rows' sums of kSlices slices of K, complete once the grid that writes them is
  kWords    // the same from blocks of this grid: kEmpty until they are there, and kEmpty again for the next launch
};

// No sum: the only NaN that arithmetic gives is 0x7fffffff.
inline constexpr uint32_t kEmpty = 0xffffffffu;

// One row by its team. From sums they are added here, in order, and the logits are written too. kTopk: 8 or 32, the most that
// topk may be. kVector: bias, logits and logits_out allow 16-byte accesses. kGrouped: only the best groups of 32 experts take
// part. kHalfSlices: two sums make the one of a slice. Settled: who waits for the winners. Once they stand in memory.id, in
// order, each warp calls settled(whether the row is padded), and they are settled before the weights then.
struct Nothing {
  __device__ __forceinline__ void operator()(bool) const {}
};

template <
    int kTeam,
    int kGroups,
    Source kSource,
    int kSlices,
    int kTopk,
    bool kVector,
    bool kGrouped,
    Score kScore,
    bool kHalfSlices = false,
    typename Settled = Nothing>
__device__ __forceinline__ void select_row(
    const WarpSelectParams& params,
    RowMemory<kTeam, kGroups, kTopk>& memory,
    int row,
    int team,
    int warp,
    int lane,
    Settled settled = {}) {
  constexpr int kSlots = 4 * kGroups, kParts = kSource == Source::kLogits ? 1 : kSlices, kColumns = 128 * kTeam * kGroups;
  // A warp's share is [.., past): even shares, since a warp with few experts would list most of them.
  const int share = kTeam == 1 ? params.experts : 4 * (((params.experts + 3) / 4 + kTeam - 1) / kTeam);
  const int first_expert = share * warp + 4 * lane, past = min(share * (warp + 1), params.experts);

  float4 bias[kGroups], part[kParts][kGroups];
  auto load_bias = [&] {
    const float* base = params.bias;
    if constexpr (kScore == Score::kSqrtSoftplus) {
      if (params.image_bias != nullptr && __ldcg(params.tokens + row * params.token_words) == params.image_token) {
        base = params.image_bias;
      }
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      if (kScore == Score::kSoftmax && base == nullptr) {
        bias[g] = float4{};
      } else {
        bias[g] = load_four<kVector>(base + first_expert + 128 * g, first_expert + 128 * g, past);
      }
    }
  };
  if constexpr (kSource == Source::kSums) load_bias();  // complete before small_rows passed its own wait
#pragma unroll
  for (int i = 0; i < kListed<kTopk>; i += kWarp) memory.key[warp][(lane + i) % kListed<kTopk>] = kNoKey;
  memory.score[lane % kTopk] = kScore == Score::kSoftmax ? __int_as_float(0x7fffffff) : 0.0f;
  memory.id[lane % kTopk] = 0;
  if (lane == 0) memory.overflow[warp] = 0;
  __syncwarp();
  float* source = params.logits + row * params.row_stride + first_expert;
  if constexpr (kSource != Source::kLogits) {
    if (lane == 0) ask_for(params.ids + row * params.slots);
    if (lane == 1) ask_for(params.weights + row * params.slots);
    if (lane == 2) ask_for(params.logits_out + row * params.experts);
  }
  if constexpr (kSource == Source::kWords) pin(source);
  wait_for_producer();
  if constexpr (kSource != Source::kSums) load_bias();
  const bool padded = params.num_token_non_padded != nullptr && row >= __ldcg(params.num_token_non_padded);
  bool there;
  do {
    uint32_t largest = 0;
#pragma unroll
    for (int s = 0; s < kParts; ++s) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        constexpr bool kFour = kVector || kSource != Source::kLogits;
        part[s][g] = load_four<kFour>(source + s * kColumns + 128 * g, first_expert + 128 * g, past);
        if constexpr (kSource == Source::kWords) {
          const float four[4] = {part[s][g].x, part[s][g].y, part[s][g].z, part[s][g].w};
          uint32_t bits[4];
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            bits[c] = kVector || first_expert + 128 * g + c < past ? __float_as_uint(four[c]) : 0u;
          }
          largest = max(largest, max(max(bits[0], bits[1]), max(bits[2], bits[3])));
        }
      }
    }
    there = largest < kEmpty;
  } while (kSource == Source::kWords && !there);
  if constexpr (kSource == Source::kWords) __syncwarp();
  uint32_t key[kSlots], best = kNoKey;
  float logit[kSlots], listed[kSlots];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    constexpr int kEach = kHalfSlices ? 2 : 1;
    float4 sum;
#pragma unroll
    for (int s = 0; s < kParts; s += kEach) {
      float4 slice = part[s][g];
      if constexpr (kHalfSlices) slice = plus(slice, part[s + 1][g]);
      sum = s == 0 ? slice : plus(sum, slice);
    }
    const float four[4] = {sum.x, sum.y, sum.z, sum.w}, add[4] = {bias[g].x, bias[g].y, bias[g].z, bias[g].w};
    const int expert = first_expert + 128 * g;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      // A mask and not a choice: the compiler would branch around the score.
      const uint32_t inside = expert + (kVector ? 0 : c) < past ? ~0u : 0u;
      logit[4 * g + c] = four[c];
      if constexpr (kScore == Score::kSoftmax) {
        if (params.rounded) logit[4 * g + c] = __bfloat162float(__float2bfloat16_rn(four[c]));
        float value = logit[4 * g + c];
        if (params.softcap > 0.0f) value = capped(value, params.softcap);
        key[4 * g + c] = order_of(value + add[c] + 0.0f) & inside;  // + 0: a logit may be -0
      } else if constexpr (kScore == Score::kSqrtSoftplus) {
        listed[4 * g + c] = sqrt_softplus(four[c]);
        key[4 * g + c] = order_of(listed[4 * g + c] + add[c], params.nan_key) & inside;
      } else {
        key[4 * g + c] = order_of(sigmoid_to_rank(four[c]) + add[c]) & inside;
      }
      if constexpr (kScore != Score::kSqrtSoftplus) listed[4 * g + c] = logit[4 * g + c];
      if constexpr (!kGrouped) best = max(best, key[4 * g + c]);
    }
  }

  auto write_logits = [&] {
    if constexpr (kSource != Source::kLogits) {
      static_assert(kGroups == 1, "a team that adds up slices has a warp per 128 experts");
      float* out = params.logits_out + (row * params.experts + first_expert);
      if constexpr (kVector) {
        if (first_expert < past) *reinterpret_cast<float4*>(out) = make_float4(logit[0], logit[1], logit[2], logit[3]);
      } else {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          if (first_expert + c < past) out[c] = logit[c];
        }
      }
    }
  };
  // List the keys that reach the bound, in the order of their ids.
  const unsigned below = (1u << lane) - 1;
  uint32_t bound;
  if constexpr (kGrouped) {
    const uint32_t kept = best_groups<kTeam, kGroups, kTopk>(key, memory, params.groups_kept, team, warp, lane);
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      key[slot] = kept >> (4 * (kTeam == 1 ? slot / 4 : warp) + lane / 8) & 1 ? key[slot] : kNoKey;
    }
    bound = bound_of_groups<kTeam, kGroups, kTopk>(memory, kept, params.topk, lane, write_logits);
  } else {
    bound = bound_of_cut(best, memory.best[warp], params.topk, lane, write_logits);
  }
  int end = 0;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    int place = end, mine = 0, earlier[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const bool reaches = key[4 * g + c] >= bound;
      const unsigned lanes = __ballot_sync(kAllLanes, reaches);
      place += __popc(lanes & below);
      if (g + 1 < kGroups) end += __popc(lanes);
      earlier[c] = mine;
      mine += reaches;
    }
    const bool fits = place + mine <= kListed<kTopk>;
    if (!fits) memory.overflow[warp] = 1;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int slot = 4 * g + c;
      list_if<sizeof(memory.key)>(
          fits && key[slot] >= bound,
          memory.key[warp] + (place + earlier[c]),
          key[slot],
          first_expert + 128 * g + c,
          listed[slot]);
    }
  }
  team_sync<kTeam>(team);

  // Rank the candidates: two lanes share one, and each compares it with half of the others. The team's lists in turn, this
  // warp's first, whose earlier keys are as those of lower warps: they are better where they are equal.
  constexpr int kTurns = kListed<kTopk> / 16;
  const bool second = lane % 2;
  int overflow = 0;
#pragma unroll
  for (int w = 0; w < kTeam; ++w) overflow |= memory.overflow[w];
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int mine = 16 * turn + lane / 2;
    const uint32_t own = memory.key[warp][mine];
    const int id = memory.candidate[warp][mine];
    Counter better;
#pragma unroll 1
    for (int i = second ? 8 : 0; i < kListed<kTopk>; i += 16) {
      uint4 keys[kTeam][2];
#pragma unroll
      for (int w = 0; w < kTeam; ++w) {
        const int of = warp + w < kTeam ? warp + w : warp + w - kTeam;
        keys[w][0] = load_four_shared(&memory.key[of][i]), keys[w][1] = load_four_shared(&memory.key[of][i + 4]);
      }
      better.add(keys[0][0], own, mine - i), better.add(keys[0][1], own, mine - i - 4);
#pragma unroll
      for (int w = 1; w < kTeam; ++w) {
        const uint32_t than = own - (warp + w < kTeam ? 0 : 1);
        better.add(keys[w][0], than), better.add(keys[w][1], than);
      }
    }
    const float score = to_weigh<kScore>(own, memory.listed[warp][mine]);
    float count = better.sum();
    count += __shfl_xor_sync(kAllLanes, count, 1);
    const int rank = integer(count);
    if (!second && own != kNoKey && rank < params.topk) {
      memory.id[rank] = id;
      memory.score[rank] = score;
    }
  }
  team_sync<kTeam>(team);
  if (overflow) {
    take_one_by_one<kScore, kTeam, kGroups, kTopk>(key, listed, memory, first_expert, params.topk, team, warp, lane);
    team_sync<kTeam>(team);
  }
  if constexpr (!std::is_same_v<Settled, Nothing>) settled(padded);

  if constexpr (kScore == Score::kSoftmax) {
    if (!params.renormalize) {  // the sum over all experts: of fours, in an order that no division of the row changes
      float* fours = reinterpret_cast<float*>(memory.best);
      const float largest = memory.score[0];
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        float part[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) part[c] = softmax_part(to_weigh<kScore>(key[4 * g + c], 0.0f), largest);
        const int expert = first_expert + 128 * g;
        if (expert < past) fours[expert / 4] = (part[0] + part[1]) + (part[2] + part[3]);
      }
      team_sync<kTeam>(team);
    }
  }

  const int slot = row * params.slots + lane;
  if (warp == 0) {
    if constexpr (kScore == Score::kSoftmax) {  // the first has the largest key
      const float part = softmax_part(memory.score[lane % kTopk], memory.score[0]);
      __syncwarp();
      memory.score[lane % kTopk] = part;
      __syncwarp();
    }
    float eight[kTopk / 8];
#pragma unroll
    for (int i = 0; i < kTopk / 8; ++i) {
      const float4 a = as_floats(load_four_shared(memory.score + 8 * i));
      const float4 b = as_floats(load_four_shared(memory.score + 8 * i + 4));
      eight[i] = ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w));
    }
#pragma unroll
    for (int width = kTopk / 16; width > 0; width /= 2) {
#pragma unroll
      for (int i = 0; i < width; ++i) eight[i] += eight[i + width];
    }
    float sum = eight[0];
    if constexpr (kScore == Score::kSoftmax) {
      if (!params.renormalize) {
        const float* fours = reinterpret_cast<const float*>(memory.best);
        sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kTeam * kGroups; ++i) {
          if (128 * i + 4 * lane < params.experts) sum += fours[32 * i + lane];
        }
#pragma unroll
        for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(kAllLanes, sum, apart);
      }
    }
    const float inverse = reciprocal(sum), score = memory.score[lane % kTopk];
    const int id = memory.id[lane % kTopk];
    const float share = sum > 0.0f ? score * inverse : 0.0f;
    const float weight = (kScore == Score::kSoftmax || params.renormalize ? share : score) * params.scale;
    store_if(lane < params.topk, params.ids + slot, padded ? -1 : id);
    store_if(lane < params.topk, params.weights + slot, padded ? 0.0f : weight);
    if (params.packed != nullptr && lane < params.topk) params.packed[slot] = packed(id, weight, padded);
  }
  if (warp == kTeam - 1 && lane < params.shared) {
    params.ids[slot + params.topk] = padded ? -1 : params.experts + lane;
    params.weights[slot + params.topk] = padded ? 0.0f : params.shared_weight;
    if (params.packed != nullptr) {
      params.packed[slot + params.topk] = packed(params.experts + lane, params.shared_weight, padded);
    }
  }
  if constexpr (kSource == Source::kWords) {
    // By now the whole team has read its words. The first and the last warp have other things to do.
    constexpr int kFirst = kTeam > 2 ? 1 : 0, kWarps = kTeam > 2 ? kTeam - 2 : 1;
    if (warp < kFirst || warp >= kFirst + kWarps) return;
    float* words = params.logits + row * params.row_stride + 4 * lane;
#pragma unroll
    for (int i = (warp - kFirst) * 128; i < kParts * kColumns; i += kWarps * 128) {
      *reinterpret_cast<uint4*>(words + i) = uint4{kEmpty, kEmpty, kEmpty, kEmpty};
    }
  }
}

// One block an SM as a bound leaves ptxas the registers that it needs to start all loads at once.
template <int kTeam, int kGroups, int kSlices, int kRowsPerBlock, int kTopk, bool kVector, bool kGrouped, Score kScore>
__global__ __launch_bounds__(
    kRowsPerBlock * kTeam * kWarp,
    kTeam > 1 || kGroups > 4 || kTopk > 8 ? 1 : 0) void warp_select_kernel(const __grid_constant__ WarpSelectParams params) {
  static_assert(kTeam == 1 || kRowsPerBlock == 1, "a team of several warps synchronises as a block");
  constexpr Source kSource = kSlices > 0 ? Source::kSums : Source::kLogits;
  __shared__ RowMemory<kTeam, kGroups, kTopk> memories[kRowsPerBlock];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int row = kTeam == 1 ? blockIdx.x * kRowsPerBlock + warp : blockIdx.x;
  if (kTeam == 1 && row >= params.rows) return;
  select_row<kTeam, kGroups, kSource, kSlices, kTopk, kVector, kGrouped, kScore>(
      params, memories[kTeam == 1 ? warp : 0], row, 0, kTeam == 1 ? 0 : warp, lane);
}

// kGroups: groups of 128 experts. Behind small_rows there are few rows only.
template <int kGroups, int kSlices, bool kVector, bool kGrouped, Score kScore>
inline void launch_warp_select(const WarpSelectParams& params, cudaStream_t stream) {
  constexpr int kFewRows = 128, kBlockRows = 4;
  const bool top8 = params.topk <= 8;
  if (kSlices > 0 || params.rows <= kFewRows) {
    auto* kernel = top8 ? &warp_select_kernel<kGroups, 1, kSlices, 1, 8, kVector, kGrouped, kScore>
                        : &warp_select_kernel<kGroups, 1, kSlices, 1, 32, kVector, kGrouped, kScore>;
    launch(kernel, dim3(params.rows), dim3(kGroups * kWarp), 1, 0, stream, params);
  } else if constexpr (kSlices == 0) {
    auto* kernel = top8 ? &warp_select_kernel<1, kGroups, 0, kBlockRows, 8, kVector, kGrouped, kScore>
                        : &warp_select_kernel<1, kGroups, 0, kBlockRows, 32, kVector, kGrouped, kScore>;
    launch(kernel, dim3((params.rows + kBlockRows - 1) / kBlockRows), dim3(kBlockRows * kWarp), 1, 0, stream, params);
  }
}

// The numbers of a problem that entry points take, in the order of their callers.
struct Rule {
  int64_t experts, topk;
  double scale, shared_weight;
  bool renormalize;
  int64_t groups_kept;
  double softcap;
  bool nan_first, rounded;
  int64_t image_token;
};

// What all entry points fill in alike; the caller adds logits and their strides.
inline WarpSelectParams warp_select_params(
    TensorView bias,
    TensorView ids,
    TensorView weights,
    TensorView num_token_non_padded,
    TensorView packed,
    TensorView tokens,
    TensorView image_bias,
    const Rule& rule) {
  WarpSelectParams params{};
  if (packed.numel() > 0) params.packed = static_cast<int32_t*>(packed.data_ptr());
  if (image_bias.numel() > 0) params.image_bias = static_cast<const float*>(image_bias.data_ptr());
  params.tokens = static_cast<const uint32_t*>(tokens.data_ptr());
  params.token_words = tokens.dtype().bits / 32;
  params.image_token = static_cast<uint32_t>(rule.image_token);
  if (bias.numel() > 0) params.bias = static_cast<const float*>(bias.data_ptr());
  params.ids = static_cast<int32_t*>(ids.data_ptr());
  params.weights = static_cast<float*>(weights.data_ptr());
  if (num_token_non_padded.numel() > 0) {
    params.num_token_non_padded = static_cast<const int32_t*>(num_token_non_padded.data_ptr());
  }
  params.rows = static_cast<int>(ids.size(0));
  params.experts = static_cast<int>(rule.experts);
  params.topk = static_cast<int>(rule.topk);
  params.slots = static_cast<int>(ids.size(1));
  params.shared = params.slots - params.topk;
  params.groups_kept = static_cast<int>(rule.groups_kept);
  params.scale = static_cast<float>(rule.scale);
  params.shared_weight = static_cast<float>(rule.shared_weight);
  params.softcap = static_cast<float>(rule.softcap);
  params.nan_key = rule.nan_first ? std::numeric_limits<float>::infinity() : kNanKey;
  params.renormalize = rule.renormalize;
  params.rounded = rule.rounded;
  return params;
}

// Entry point of the selection alone.
template <int kGroups, bool kVector, bool kGrouped, Score kScore>
struct WarpSelect {
  // logits [rows, experts] fp32, bias [experts] fp32 or empty, ids [rows, slots] int32 and weights [rows, slots] fp32
  // (written), num_token_non_padded [1] int32 or empty for no padding; slots is topk and the shared experts
  static void run(
      TensorView logits,
      TensorView bias,
      TensorView ids,
      TensorView weights,
      TensorView num_token_non_padded,
      TensorView packed,
      TensorView tokens,
      TensorView image_bias,
      int64_t experts,
      int64_t topk,
      double scale,
      double shared_weight,
      bool renormalize,
      int64_t groups_kept,
      double softcap,
      bool nan_first,
      bool rounded,
      int64_t image_token) {
    WarpSelectParams params = warp_select_params(
        bias,
        ids,
        weights,
        num_token_non_padded,
        packed,
        tokens,
        image_bias,
        {experts, topk, scale, shared_weight, renormalize, groups_kept, softcap, nan_first, rounded, image_token});
    params.logits = static_cast<float*>(logits.data_ptr());
    params.row_stride = logits.stride(0);
    launch_warp_select<kGroups, 0, kVector, kGrouped, kScore>(params, stream_of(logits));
  }
};

}  // namespace rx
