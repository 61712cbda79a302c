// Gate and selection for some hundred rows in two launches, and the plan in a third: tensor_core's blocks leave the sums of
// their slices of K as they are, and the selection adds them up. That spares the gate a meeting of eight blocks, and them a
// cluster, of which an H200 places fewer blocks at once.
#pragma once

#include "../gate/tensor_core.cuh"
#include "select_plan.cuh"

namespace rx {

// What a block of the gate has; it changes no bit.
enum class Tile {
  kNarrow,  // 64 rows, kNarrow experts; two blocks a multiprocessor
  kMiddle,  // 64 rows, kMiddle experts; the same
  kTall     // 128 rows, kWide experts: the fewest bytes to bring, for rows that fill the GPU so
};

template <int kNarrow, int kMiddle, int kWide, int kGroups, bool kVector, bool kGrouped, Score kScore, PlanFormat kFormat>
struct TensorPair {
  // hidden, weight: as TensorCore takes them; sums [rows, 8, 128 * groups] fp32 (written); logits .. counts: as SelectPlan;
  // plan: kNone for none, then range_rows is 1
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
      TensorView counts,
      TensorView plan0,
      TensorView plan1,
      TensorView plan2,
      TensorView plan3,
      TensorView plan4,
      TensorView plan5,
      TensorView plan6,
      int64_t experts,
      int64_t topk,
      double scale,
      double shared_weight,
      bool renormalize,
      int64_t groups_kept,
      double softcap,
      bool nan_first,
      bool rounded,
      int64_t image_token,
      int64_t block,
      int64_t first_local,
      int64_t locals,
      int64_t range_rows,
      int64_t block_rows,
      int64_t tile) {
    switch (static_cast<Tile>(tile)) {
      case Tile::kNarrow:
        launch_tensor_core<kNarrow, 1, 8, stages_in<kNarrow, 1, 8>(kHalfRoom), true>(hidden, weight, sums);
        break;
      case Tile::kMiddle:
        launch_tensor_core<kMiddle, 1, 8, stages_in<kMiddle, 1, 8>(kHalfRoom), true>(hidden, weight, sums);
        break;
      case Tile::kTall:
        launch_tensor_core<kWide, 2, 8, stages_in<kWide, 2, 8>(kRoom), true>(hidden, weight, sums);
    }
    SelectPlanParams params{};
    params.select = warp_select_params(
        bias,
        ids,
        weights,
        num_token_non_padded,
        packed,
        tokens,
        image_bias,
        {experts, topk, scale, shared_weight, renormalize, groups_kept, softcap, nan_first, rounded, image_token});
    params.select.logits = static_cast<float*>(sums.data_ptr());
    params.select.row_stride = sums.stride(0);
    params.select.logits_out = static_cast<float*>(logits.data_ptr());
    const cudaStream_t stream = stream_of(hidden);
    constexpr bool kPlan = kFormat != PlanFormat::kNone;
    params.range_rows = static_cast<int>(range_rows);
    if constexpr (kPlan) {
      add_plan<kFormat>(
          params,
          counts,
          {plan0, plan1, plan2, plan3, plan4, plan5, plan6},
          {block, first_local, locals, range_rows, block_rows});
    }
    launch_select_ranges<kGroups, 1, Source::kSums, kVector, kGrouped, kScore, kPlan>(params, stream);
    if constexpr (kPlan) launch_many_blocks<128 * kGroups, kFormat>(params, stream);
  }
};

}  // namespace rx
