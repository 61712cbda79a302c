// Hash layers: a row's token names its experts, so a row needs the logits of these few and no others. One launch reads topk
// rows of the gate weight for each row of hidden states, where gate and selection read all of them.
//
//   block       a row of hidden states
//   thread      eight neighbouring elements of it at a time, and the same ones of each expert's weight, asked for at once
//   registers   the sums of a thread's products, one an expert
//   shared      sums of each warp, then nothing: the first warp adds them up, weighs and writes
#pragma once

#include <algorithm>

#include "../selection/warp_select.cuh"

namespace rx {

struct HashRowsParams {
  const __nv_bfloat16* hidden;          // [rows, hidden]
  const __nv_bfloat16* weight;          // [experts, hidden]
  const int32_t* table;                 // [vocabulary, topk]: the experts of a token
  const uint32_t* tokens;               // of a row: the word at row * token_words
  float* logits;                        // [rows, experts]: NaN where they are not computed
  int32_t* ids;                         // [rows, slots]
  float* weights;                       // [rows, slots]
  int32_t* packed;                      // [rows, slots], or null
  const int32_t* num_token_non_padded;  // [1] on the device, or null
  int64_t hidden_stride, weight_stride, table_stride;
  int hidden_size, experts, slots, token_words;
  uint32_t vocabulary;
  float scale, shared_weight;
  bool renormalize;
};

// The sum of eight products, in the order of the elements.
__device__ __forceinline__ float dot_eight(const uint4& a, const uint4& b, float sum) {
  const uint32_t left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum = fmaf(__uint_as_float(left[i] << 16), __uint_as_float(right[i] << 16), sum);
    sum = fmaf(__uint_as_float(left[i] & 0xffff0000u), __uint_as_float(right[i] & 0xffff0000u), sum);
  }
  return sum;
}

// As many as there are registers for.
template <int kTopk>
inline constexpr int kMostHashWarps = kTopk <= 8 ? 32 : 16;

template <int kTopk, Score kScore>
__global__ __launch_bounds__(kMostHashWarps<kTopk>* kWarp, 1) void hash_rows_kernel(
    const __grid_constant__ HashRowsParams params) {
  static_assert(kScore != Score::kSoftmax, "a softmax needs all logits");
  constexpr int kWidth = kTopk <= 8 ? 8 : 16, kShares = kWarp / kWidth;  // lanes of the first warp: experts x shares of warps
  __shared__ float sums[kMostHashWarps<kTopk>][kWidth];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  const int row = blockIdx.x;
  wait_for_producer();
  let_consumer_start();
  const bool real = params.num_token_non_padded == nullptr || row < __ldcg(params.num_token_non_padded);
  const uint32_t token = __ldcg(params.tokens + static_cast<int64_t>(row) * params.token_words);
  const bool padded = !real || token >= params.vocabulary;  // a token that is not in the table names nobody
  const int32_t* experts = params.table + static_cast<int64_t>(padded ? 0 : token) * params.table_stride;
  int id[kTopk];
#pragma unroll
  for (int k = 0; k < kTopk; ++k) id[k] = experts[k];
  float* logits = params.logits + static_cast<int64_t>(row) * params.experts;
  for (int e = threadIdx.x; e < params.experts; e += blockDim.x) logits[e] = __int_as_float(0x7fffffff);

  float sum[kTopk] = {};
  if (!padded) {
    const __nv_bfloat16* hidden = params.hidden + row * params.hidden_stride;
    for (int first = 8 * threadIdx.x; first < params.hidden_size; first += 8 * blockDim.x) {
      const uint4 own = load_shared_by_grids(hidden + first);
      uint4 other[kTopk];
#pragma unroll
      for (int k = 0; k < kTopk; ++k) {
        const bool there = static_cast<uint32_t>(id[k]) < static_cast<uint32_t>(params.experts);
        other[k] = load_once(params.weight + (there ? id[k] : 0) * params.weight_stride + first);
      }
#pragma unroll
      for (int k = 0; k < kTopk; ++k) sum[k] = dot_eight(own, other[k], sum[k]);
    }
  }
#pragma unroll
  for (int k = 0; k < kTopk; ++k) {
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) sum[k] += __shfl_xor_sync(kAllLanes, sum[k], apart);
    if (lane == 0) sums[warp][k] = sum[k];
  }
  __syncthreads();
  if (warp > 0) return;

  const int mine = lane % kWidth;
  float logit = 0.0f;
  if (mine < kTopk) {
    for (int w = lane / kWidth; w < warps; w += kShares) logit += sums[w][mine];
  }
#pragma unroll
  for (int apart = kWidth; apart < kWarp; apart *= 2) logit += __shfl_xor_sync(kAllLanes, logit, apart);
  int expert = -1;
#pragma unroll
  for (int k = 0; k < kTopk; ++k) expert = mine == k ? id[k] : expert;
  const bool there = !padded && mine < kTopk && static_cast<uint32_t>(expert) < static_cast<uint32_t>(params.experts);
  const float score = there ? to_weigh<kScore>(0, kScore == Score::kSqrtSoftplus ? sqrt_softplus(logit) : logit) : 0.0f;
  float total = score;
#pragma unroll
  for (int apart = 1; apart < kWidth; apart *= 2) total += __shfl_xor_sync(kAllLanes, total, apart);
  const float share = total > 0.0f ? score * reciprocal(total) : 0.0f;
  const bool any = __any_sync(kAllLanes, there);
  if (lane >= params.slots) return;
  const bool shared = lane >= kTopk;
  const float weight = shared ? params.shared_weight : (params.renormalize ? share : score) * params.scale;
  const bool nobody = shared ? !any : !there;
  const int chosen = shared ? params.experts + lane - kTopk : expert;
  const int64_t slot = static_cast<int64_t>(row) * params.slots + lane;
  params.ids[slot] = nobody ? -1 : chosen;
  params.weights[slot] = nobody ? 0.0f : weight;
  if (params.packed != nullptr) params.packed[slot] = packed(chosen, weight, nobody);
  if (there && !shared) logits[expert] = logit;
}

template <int kTopk, Score kScore>
struct HashRows {
  // hidden [rows, hidden] bf16, weight [experts, hidden] bf16, table [vocabulary, topk] int32, tokens [rows] int32 or int64,
  // num_token_non_padded [1] int32 or empty; written: logits [rows, experts] fp32, ids [rows, slots] int32, weights [rows,
  // slots] fp32, packed [rows, slots] int32 or empty; slots is topk and the shared experts, at most 32
  static void run(
      TensorView hidden,
      TensorView weight,
      TensorView table,
      TensorView tokens,
      TensorView logits,
      TensorView ids,
      TensorView weights,
      TensorView packed,
      TensorView num_token_non_padded,
      double scale,
      double shared_weight,
      bool renormalize) {
    HashRowsParams params{};
    params.hidden = static_cast<const __nv_bfloat16*>(hidden.data_ptr());
    params.weight = static_cast<const __nv_bfloat16*>(weight.data_ptr());
    params.table = static_cast<const int32_t*>(table.data_ptr());
    params.tokens = static_cast<const uint32_t*>(tokens.data_ptr());
    params.token_words = tokens.dtype().bits / 32;
    params.logits = static_cast<float*>(logits.data_ptr());
    params.ids = static_cast<int32_t*>(ids.data_ptr());
    params.weights = static_cast<float*>(weights.data_ptr());
    if (packed.numel() > 0) params.packed = static_cast<int32_t*>(packed.data_ptr());
    if (num_token_non_padded.numel() > 0) {
      params.num_token_non_padded = static_cast<const int32_t*>(num_token_non_padded.data_ptr());
    }
    params.hidden_stride = hidden.stride(0), params.weight_stride = weight.stride(0), params.table_stride = table.stride(0);
    params.hidden_size = static_cast<int>(hidden.size(1));
    params.experts = static_cast<int>(weight.size(0));
    params.slots = static_cast<int>(ids.size(1));
    params.vocabulary = static_cast<uint32_t>(table.size(0));
    params.scale = static_cast<float>(scale), params.shared_weight = static_cast<float>(shared_weight);
    params.renormalize = renormalize;
    const int warps = (params.hidden_size + 8 * kWarp - 1) / (8 * kWarp);
    launch(
        &hash_rows_kernel<kTopk, kScore>,
        dim3(static_cast<unsigned>(ids.size(0))),
        dim3(std::min(warps, kMostHashWarps<kTopk>) * kWarp),
        1,
        0,
        stream_of(hidden),
        params);
  }
};

}  // namespace rx
