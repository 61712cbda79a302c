// Gate, selection and plan in one launch. Producer blocks run small_rows' part and store the sums of their K slices. Consumer
// blocks take the sums of their rows as they come: a word is kEmpty until its sum is there, so no fence, counter or flag stands
// between them, and the reader empties it again for the next launch. The winners go from consumers to planners, which are
// consumers themselves, in the same way.
//
// Producers wait for nobody and consumers for producers alone, planners for consumers; so a launch ends if every consumer has a
// place on the GPU, which they have while those of all launches at a time are fewer than its multiprocessors.
//   shared      a producer's GateMemory or a consumer's ConsumerMemory, in the same place
#pragma once

#include <algorithm>

#include "../gate/small_rows.cuh"
#include "../plan/one_block.cuh"
#include "../selection/warp_select.cuh"

namespace rx {

template <int kTeams, int kTeam, int kTopk, int kExperts, PlanFormat kFormat>
struct alignas(16) ConsumerMemory {
  RowMemory<kTeam, kTopk> rows[kTeams];
  PlanMemory<kFormat == PlanFormat::kNone ? 1 : kExperts> plan;
};

struct SingleParams {
  SmallRowsParams gate;
  WarpSelectParams select;
  PlanParams plan;
  int consumers, rows_each;    // a consumer has rows_each rows
  int columns, tiles_of_rows;  // producers: columns of experts, and how many share the rows of one
  bool consumers_first;
};

// Consumer number `block`: a row for each of its first teams, then the plan.
template <int kWarps, int kSlices, int kTeam, int kTopk, bool kVector, PlanFormat kFormat, typename Memory>
__device__ __forceinline__ void consume(const SingleParams& params, Memory& memory, int block) {
  constexpr int kTeams = kWarps / kTeam, kThreads = kWarps * kWarp;
  constexpr bool kPlan = kFormat != PlanFormat::kNone;
  const PlanParams& plan = params.plan;
  const bool plans = kPlan && block < plan.planners;
  if (plans) {
    clear_plan<kThreads>(memory.plan);
    __syncthreads();
  }
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, team = warp / kTeam;
  const int first_row = block * params.rows_each, past_row = min(first_row + params.rows_each, params.select.rows);
  const int row = first_row + team;
  if (team < kTeams && row < past_row) {
    auto& own = memory.rows[team];
    const bool padded =
        select_row<kTeam, 1, Source::kWords, kSlices, kTopk, kVector>(params.select, own, row, team, warp % kTeam, lane);
    if (kPlan && warp % kTeam == 0) {
      if (plans && lane < plan.slots) {
        const int id = lane < plan.topk ? own.id[lane % kTopk] : plan.experts + lane - plan.topk;
        add_slot(plan, memory.plan, row, lane, padded ? kPadded : id);
      }
      tell_planners<kTopk>(plan, own.id, padded, row, plans ? block : -1, lane);
    }
  }
  if constexpr (kPlan) {
    if (!plans) return;
    wait_for_producer();  // also the warps without a row
    for (int other = threadIdx.x; other < params.select.rows; other += kThreads) {
      if (other < first_row || other >= past_row) hear_row<kTopk>(plan, memory.plan, other, block);
    }
    __syncthreads();
    write_plan<kFormat, kThreads>(plan, memory.plan, block);
  }
}

template <
    int kWarps,
    int kTiles,
    int kDepth,
    bool kExact,
    RowCount kCount,
    int kSlices,
    int kTeam,
    int kTopk,
    bool kVector,
    PlanFormat kFormat>
__global__ __launch_bounds__(kWarps* kWarp, 1) void single_kernel(const __grid_constant__ SingleParams params) {
  static_assert(kTeam <= kWarps, "a row's team is a part of a block");
  using Gate = GateMemory<kWarps, kTiles, kCount, false>;
  using Consumer = ConsumerMemory<kWarps / kTeam, kTeam, kTopk, 128 * kTeam, kFormat>;
  __shared__ alignas(16) unsigned char memory[std::max(sizeof(Gate), sizeof(Consumer))];
  const int producers = gridDim.x - params.consumers;
  const int consumer = params.consumers_first ? blockIdx.x : blockIdx.x - producers;
  if (consumer >= 0 && consumer < params.consumers) {
    consume<kWarps, kSlices, kTeam, kTopk, kVector, kFormat>(params, reinterpret_cast<Consumer&>(memory), consumer);
  } else {
    const int producer = params.consumers_first ? blockIdx.x - params.consumers : blockIdx.x;
    const int column = producer % params.columns, rest = producer / params.columns;
    gate_block<kWarps, kTiles, kDepth, kExact, kCount, false, true>(
        params.gate, reinterpret_cast<Gate&>(memory), column, rest % kSlices, kSlices, rest / kSlices, params.tiles_of_rows);
  }
}

template <int kWarps, int kTiles, int kDepth, bool kExact, int kSlices, int kGroups, bool kVector, PlanFormat kFormat>
struct Single {
  // As Pair's, and: sums is kEmpty and id_words kNoIds throughout before the first launch, and after every one. plan: the
  // output tensors of the format, in the order of PlanParams; numbers: block, first_local, locals, consumers, planners,
  // tiles_of_rows, consumers_first.
  static int64_t capture_id(int64_t device) {
    return capture_of(static_cast<int32_t>(device));
  }

  static void run(
      TensorView hidden,
      TensorView weight,
      TensorView bias,
      TensorView sums,
      TensorView logits,
      TensorView ids,
      TensorView weights,
      TensorView num_token_non_padded,
      TensorView id_words,
      TensorView plan0,
      TensorView plan1,
      TensorView plan2,
      TensorView plan3,
      TensorView plan4,
      TensorView plan5,
      TensorView plan6,
      int64_t topk,
      double scale,
      double shared_weight,
      bool renormalize,
      int64_t block,
      int64_t first_local,
      int64_t locals,
      int64_t consumers,
      int64_t planners,
      int64_t tiles_of_rows,
      bool consumers_first) {
    SingleParams params{};
    params.gate = small_rows_params(hidden, weight);
    params.gate.out = static_cast<float*>(sums.data_ptr());
    params.gate.out_stride = kSlices * 128 * kGroups;
    params.gate.slice_stride = 128 * kGroups;
    params.select = warp_select_params(bias, ids, weights, num_token_non_padded, topk, scale, shared_weight, renormalize);
    params.select.logits = params.gate.out;
    params.select.row_stride = params.gate.out_stride;
    params.select.logits_out = static_cast<float*>(logits.data_ptr());
    const int rows = params.gate.rows;
    PlanParams& plan = params.plan;
    plan.rows = rows, plan.slots = params.select.slots, plan.topk = params.select.topk, plan.experts = params.gate.experts;
    plan.first_local = static_cast<int>(first_local), plan.locals = static_cast<int>(locals);
    plan.block = static_cast<int>(block), plan.planners = static_cast<int>(planners);
    plan.ids = static_cast<uint32_t*>(id_words.data_ptr());
    auto tensor = [](TensorView view) { return static_cast<int32_t*>(view.data_ptr()); };
    if constexpr (kFormat == PlanFormat::kAligned) {
      plan.sorted_slots = tensor(plan0), plan.block_experts = tensor(plan1), plan.padded = tensor(plan2);
      plan.counts_elsewhere = plan2.size(0) == 2;
    } else if constexpr (kFormat == PlanFormat::kTiles) {
      plan.slot_to_place = tensor(plan0), plan.place_to_row = tensor(plan1), plan.tile_experts = tensor(plan2);
      plan.tile_ends = tensor(plan3), plan.tiles = tensor(plan4), plan.places = tensor(plan5), plan.counts = tensor(plan6);
    }
    params.consumers = static_cast<int>(consumers);
    params.rows_each = (rows + params.consumers - 1) / params.consumers;
    params.columns = (params.gate.experts + 8 * kTiles - 1) / (8 * kTiles);
    params.tiles_of_rows = static_cast<int>(tiles_of_rows);
    params.consumers_first = consumers_first;
    auto pick = [&]<int kTopk>() {
      switch (row_count(rows)) {
        case RowCount::kEight:
          return &single_kernel<kWarps, kTiles, kDepth, kExact, RowCount::kEight, kSlices, kGroups, kTopk, kVector, kFormat>;
        case RowCount::kSixteen:
          return &single_kernel<kWarps, kTiles, kDepth, kExact, RowCount::kSixteen, kSlices, kGroups, kTopk, kVector, kFormat>;
        default:
          return &single_kernel<kWarps, kTiles, kDepth, kExact, RowCount::kMany, kSlices, kGroups, kTopk, kVector, kFormat>;
      }
    };
    auto* kernel = topk <= 8 ? pick.template operator()<8>() : pick.template operator()<32>();
    const int producers = params.columns * kSlices * params.tiles_of_rows;
    launch(kernel, dim3(params.consumers + producers), dim3(kWarps * kWarp), 1, stream_of(hidden), params);
  }
};

}  // namespace rx
