// The fused pair: small_rows writes the sums of its K slices, warp_select adds them, in order, and selects. Two launches
// chained by PDL; the sums pass through L2. Adding in the consumer saves the gate the exchange between its blocks. small_rows
// lets warp_select start only after its own wait, so whoever wrote the bias before the pair is done by then.
#pragma once

#include "../gate/small_rows.cuh"
#include "../selection/warp_select.cuh"

namespace rx {

template <
    int kWarps,
    int kTiles,
    int kDepth,
    bool kExact,
    bool kHalved,
    bool kWide,
    int kSlices,
    int kGroups,
    bool kVector,
    bool kGrouped,
    Score kScore>
struct Pair {
  // hidden [rows, hidden] bf16, weight [experts, hidden] bf16 or fp32, bias [experts] fp32 or empty, num_token_non_padded [1]
  // int32 or empty, tokens [rows] int32 or int64 or empty, image_bias [experts] fp32 or empty; written: sums [rows, slices, 128
  // * kGroups] fp32 (scratch), logits [rows, experts] fp32, ids [rows, slots] int32, weights [rows, slots] fp32, packed [rows,
  // slots] int32 or empty; slots is topk and the shared experts
  static void run(
      TensorView hidden,
      TensorView weight,
      TensorView bias,
      TensorView sums,
      TensorView logits,
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
    const cudaStream_t stream = stream_of(hidden);
    SmallRowsParams gate = small_rows_params(hidden, weight);
    gate.out = static_cast<float*>(sums.data_ptr());
    gate.out_stride = kSlices * 128 * kGroups;
    gate.slice_stride = 128 * kGroups;
    launch_small_rows<kWarps, kTiles, kDepth, kExact, kHalved, kWide, false>(gate, kSlices, stream);

    WarpSelectParams select = warp_select_params(
        bias,
        ids,
        weights,
        num_token_non_padded,
        packed,
        tokens,
        image_bias,
        {experts, topk, scale, shared_weight, renormalize, groups_kept, softcap, nan_first, rounded, image_token});
    select.logits = gate.out;
    select.row_stride = gate.out_stride;
    select.logits_out = static_cast<float*>(logits.data_ptr());
    launch_warp_select<kGroups, kSlices, kVector, kGrouped, kScore>(select, stream);
  }
};

}  // namespace rx
