// Gate, selection and plan in one launch. Producer blocks run small_rows' part and store the sums of their K slices. Consumer
// blocks take the sums of their rows as they come: a word is kEmpty until its sum is there, so no fence, counter or flag stands
// between them, and the reader empties it again for the next launch. The winners go from consumers to planners, which are
// consumers themselves, in the same way.
//
// With many rows the last producers consume once they have produced. Only consumers wait, and all of a launch's other blocks
// end by themselves; so every launch ends while the consumers of all launches at a time are fewer than the multiprocessors. Or
// else consumers come behind all producers, and it is enough that planners are.
//   shared      SingleMemory
//
// What lost, in microseconds for 288 x 4096 with a cold cache: warps without a row that went through the instructions ahead (no
// gain; all warps: +1.4); the gate's operands brought by the copy engine (+0.2 for 96 rows); two blocks that halve a slice,
// have twice the experts each and share the rows through shared memory (+0.4 for 96 rows); later rows asked for or copied to
// shared memory while the first ones come, since all blocks of a slice ask for the same lines and whoever needs them waits
// longer (256 x 7168, 96 rows: +1.7 and +3.5; one block a line, or once the first ones are there: no gain); words that are
// there not asked for again (+0.15 to 0.25), or all of them asked for twice as often (+0.1); whether a slot is elsewhere read
// from shared memory behind the barrier (+0.08); one reader for a row's plan words instead of one for each (+0.3); the weights
// before the plan (+0.2); blocks of more warps, so that one consumer has all of up to 8 rows (+0.5 for 6 rows); twice the
// slices, of half the warps each (256 x 7168: -1.0 for 32 rows, but +0.8 for the pair's 1 to 8, which adds them up in the same
// order).
#pragma once

#include <algorithm>

#include "../gate/small_rows.cuh"
#include "../plan/one_block.cuh"
#include "../selection/warp_select.cuh"

namespace rx {

template <int kTeams, int kTeam, int kTopk, int kExperts, PlanFormat kFormat>
struct alignas(16) ConsumerMemory {
  RowMemory<kTeam, 1, kTopk> rows[kTeams];
  PlanMemory<kFormat == PlanFormat::kNone ? 0 : kExperts> plan;
};

// Of a block, which is one or the other, or first one and then the other.
template <int kWarps, int kTiles, bool kHalved, RowCount kCount, int kTeam, int kTopk, PlanFormat kFormat>
union SingleMemory {
  GateMemory<kBusyWarps<kWarps, kCount, kHalved>, kTiles, kCount, false> producer;
  ConsumerMemory<kWarps / kTeam, kTeam, kTopk, 128 * kTeam, kFormat> consumer;
};

struct SingleParams {
  SmallRowsParams gate;
  WarpSelectParams select;
  PlanParams plan;
  Divisor consumers;     // number b has the rows b, b + consumers, ..
  Divisor columns;       // of experts, one a producer; a division of integers before the first load takes 0.1 us
  int tiles_of_rows;     // how many producers share the rows of one column
  int before_consumers;  // blocks before the first consumer's
  int producers;         // the first of these blocks, or, where consumers are the first, the last
};

// Consumer number `block`: a row for each of its first teams, then the plan, by all warps but those with the weights of a row.
template <
    int kWarps,
    int kParts,
    bool kHalfSlices,
    int kTeam,
    int kTopk,
    bool kVector,
    bool kGrouped,
    Score kScore,
    PlanFormat kFormat,
    typename Memory>
__device__ __forceinline__ void consume(const SingleParams& params, Memory& block_memory, int block) {
  // By shuffles, so that they stay in registers: ptxas asks special registers again, where that is waited for.
  const uint32_t address = __shfl_sync(kAllLanes, shared_address(&block_memory), 0);
  Memory& memory = *static_cast<Memory*>(__cvta_shared_to_generic(address));
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / kWarp, 0);
  const int lane = __shfl_sync(kAllLanes, threadIdx.x % kWarp, threadIdx.x % kWarp), team = warp / kTeam;
  constexpr bool kPlan = kFormat != PlanFormat::kNone;
  const PlanParams plan = kPlan ? in_registers(params.plan) : params.plan;
  const bool lone = kFormat == PlanFormat::kAligned && plan.rows == 1, plans = kPlan && !lone && block < plan.planners;
  if (plans) {
    if (threadIdx.x == 0) ask_for(kFormat == PlanFormat::kAligned ? plan.sorted_slots : plan.place_to_row);
    if (threadIdx.x == 1) ask_for(kFormat == PlanFormat::kAligned ? plan.block_experts : plan.slot_to_place);
    clear_plan(memory.plan, kWarps * kWarp);
    __syncthreads();
  }
  // A consumer has rows of all tiles, so that some are selected before the last ones come.
  const int row = block + team * params.consumers.value;
  const int rows_here = params.consumers.quotient(params.select.rows - block + params.consumers.value - 1);
  const bool has_row = team < rows_here;
  const int idle = kWarps - kTeam * rows_here;  // with one planner they empty all places ahead
  const bool emptied = plan.planners == 1 && idle > 0;
  // The warps without a row come first: they have the time to listen.
  const int busy = kTeam > 1 ? rows_here : 0, busy_before = min(busy, (warp + kTeam - 1) / kTeam);
  const Hands hands = hands_of(plan, block, kWarps - 1 - warp - (busy - busy_before), kWarps - busy, lane);
  bool elsewhere = false;
  if (has_row) {
    auto& own = memory.rows[team];
    if (lone && warp % kTeam == kTeam - 1) {
      wait_for_producer();
      empty_places<kFormat>(plan, lane, kWarp);
    }
    auto plan_row = [&](bool padded) {
      if (warp % kTeam != kTeam - 1) return;
      if (lone) return write_lone_row<kTopk>(plan, own.id, padded, lane);
      if (plans && lane < plan.slots.value) {
        const int id = lane < plan.topk ? own.id[lane % kTopk] : plan.experts + lane - plan.topk;
        elsewhere = add_slot(plan, memory.plan, row, lane, padded ? kPadded : id);
      }
      if (plan.planners > (plans ? 1 : 0)) tell_planners<kTopk>(plan, own.id, padded, row, plans ? block : -1, lane);
    };
    auto select = [&](auto settled) {
      select_row<kTeam, 1, Source::kWords, kParts, kTopk, kVector, kGrouped, kScore, kHalfSlices>(
          params.select, own, row, team, warp % kTeam, lane, settled);
    };
    if constexpr (kPlan) {
      select(plan_row);
    } else {
      select(Nothing{});
    }
  }
  if constexpr (kPlan) {
    const bool weighs = kTeam > 1 && has_row && warp % kTeam == 0;
    if (!plans || weighs) return;
    if (!has_row) wait_for_producer();
    const int waiters = kWarp * idle;
    if (emptied && hands.thread < waiters) empty_places<kFormat>(plan, hands.thread, waiters);
    // More words than these have threads: all listen, since a second word would take long (0.4 us for 96 rows).
    const int listeners = plan.rows * kIdWords<kTopk> <= waiters ? waiters : hands.threads;
    if (hands.thread < listeners) {
      elsewhere |= hear<kTopk>(plan, memory.plan, block, params.consumers, hands.thread, listeners);
    }
    const bool flat = !hands.any(elsewhere) && plan.rows <= plan.block.value;
    if (!flat) {
      count_blocks<kFormat>(plan, memory.plan, hands);
      hands.sync();
    }
    write_plan<kFormat>(plan, memory.plan, block, hands, flat, emptied);
  }
}

template <
    int kWarps,
    int kTiles,
    int kDepth,
    bool kExact,
    bool kHalved,
    bool kWide,
    RowCount kCount,
    int kSlices,
    int kTeam,
    int kTopk,
    bool kVector,
    bool kGrouped,
    Score kScore,
    PlanFormat kFormat>
__global__ __launch_bounds__(kWarps* kWarp, 1) void single_kernel(const __grid_constant__ SingleParams params) {
  static_assert(kTeam <= kWarps, "a row's team is a part of a block");
  constexpr bool kHalfSlices = kHalfSlicesOf<kCount, kHalved>;
  constexpr int kParts = kHalfSlices ? 2 * kSlices : kSlices;
  using Memory = SingleMemory<kWarps, kTiles, kHalved, kCount, kTeam, kTopk, kFormat>;
  extern __shared__ __align__(16) unsigned char bytes[];
  Memory& memory = *reinterpret_cast<Memory*>(bytes);
  const int consumer = blockIdx.x - params.before_consumers;
  const bool consumes = consumer >= 0 && consumer < params.consumers.value;
  const int producer = params.before_consumers > 0 ? blockIdx.x : blockIdx.x + params.producers - gridDim.x;
  if (producer >= 0 && producer < params.producers) {
    const unsigned rest = params.columns.quotient(producer), column = producer - rest * params.columns.value;
    gate_block<kWarps, kTiles, kDepth, kExact, kHalved, kWide, kCount, false, true>(
        params.gate, memory.producer, column, rest % kParts, kParts, rest / kParts, params.tiles_of_rows);
    if (!consumes) return;
    __syncthreads();
  } else if (kCount == RowCount::kMany) {
    // The sums take three microseconds at the least, and whoever asks for them takes from the producers' share of the L2.
    wait_for_producer();
    __nanosleep(1000);
  }
  consume<kWarps, kParts, kHalfSlices, kTeam, kTopk, kVector, kGrouped, kScore, kFormat>(params, memory.consumer, consumer);
}

template <
    int kWarps,
    int kTiles,
    int kDepth,
    bool kExact,
    bool kHalved,
    bool kWide,
    int kSlices,
    int kManyTiles,
    int kGroups,
    bool kVector,
    bool kGrouped,
    Score kScore,
    PlanFormat kFormat>
struct Single {
  // As Pair's, and: sums is kEmpty and id_words kNoIds throughout before the first launch, and after every one. plan: the
  // output tensors of the format, in the order of PlanParams; numbers: block, first_local, locals, consumers, planners,
  // tiles_of_rows, placing.
  // Consumers: the blocks behind the producers, before them, or the last of them.
  enum Placing { kLast, kFirst, kBoth };

  // Which CUDA graph the stream `handle` is captured into; 0: none. Not of tvm-ffi's current stream, which is PyTorch's in
  // calls with tensors only.
  static int64_t capture_id(int64_t handle) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
    check_cuda("capture", cudaStreamGetCaptureInfo(reinterpret_cast<cudaStream_t>(handle), &status, &id));
    return status == cudaStreamCaptureStatusActive ? static_cast<int64_t>(id) : 0;
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
      TensorView packed,
      TensorView tokens,
      TensorView image_bias,
      TensorView id_words,
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
      int64_t consumers,
      int64_t planners,
      int64_t tiles_of_rows,
      int64_t placing) {
    SingleParams params{};
    params.gate = small_rows_params(hidden, weight);
    params.gate.out = static_cast<float*>(sums.data_ptr());
    const int rows = params.gate.rows;
    const bool many = row_count(rows) == RowCount::kMany;
    const int slices = many && kHalved ? 2 * kSlices : kSlices;
    params.gate.out_stride = slices * 128 * kGroups;
    params.gate.slice_stride = 128 * kGroups;
    params.select = warp_select_params(
        bias,
        ids,
        weights,
        num_token_non_padded,
        packed,
        tokens,
        image_bias,
        {experts, topk, scale, shared_weight, renormalize, groups_kept, softcap, nan_first, rounded, image_token});
    params.select.logits = params.gate.out;
    params.select.row_stride = params.gate.out_stride;
    params.select.logits_out = static_cast<float*>(logits.data_ptr());
    PlanParams& plan = params.plan;
    plan.rows = rows, plan.topk = params.select.topk, plan.experts = params.gate.experts;
    plan.slots = Divisor::of(params.select.slots), plan.block = Divisor::of(std::max(1, static_cast<int>(block)));
    plan.first_local = static_cast<int>(first_local), plan.locals = static_cast<int>(locals);
    plan.planners = static_cast<int>(planners);
    plan.ids = static_cast<uint32_t*>(id_words.data_ptr());
    auto tensor = [](TensorView view) { return static_cast<int32_t*>(view.data_ptr()); };
    if constexpr (kFormat == PlanFormat::kAligned) {
      plan.sorted_slots = tensor(plan0), plan.block_experts = tensor(plan1), plan.padded = tensor(plan2);
      plan.counts_elsewhere = plan2.size(0) == 2, plan.room = static_cast<int>(plan0.size(0));
    } else if constexpr (kFormat == PlanFormat::kTiles) {
      plan.slot_to_place = tensor(plan0), plan.place_to_row = tensor(plan1), plan.tile_experts = tensor(plan2);
      plan.tile_ends = tensor(plan3), plan.tiles = tensor(plan4), plan.places = tensor(plan5), plan.counts = tensor(plan6);
      plan.room = static_cast<int>(plan1.size(0) - 1);
    }
    params.consumers = Divisor::of(static_cast<int>(consumers));
    const int columns = 8 * (many ? kManyTiles : kTiles);
    params.columns = Divisor::of((params.gate.experts + columns - 1) / columns);
    params.tiles_of_rows = static_cast<int>(tiles_of_rows);
    params.producers = params.columns.value * slices * params.tiles_of_rows;
    const int blocks = placing == kBoth ? params.producers : params.producers + params.consumers.value;
    params.before_consumers = placing == kFirst ? 0 : blocks - params.consumers.value;
    auto go = [&]<int kBlockTiles, RowCount kCount, int kTopk>() {
      launch(
          &single_kernel<
              kWarps,
              kBlockTiles,
              kDepth,
              kExact,
              kHalved,
              kWide,
              kCount,
              kSlices,
              kGroups,
              kTopk,
              kVector,
              kGrouped,
              kScore,
              kFormat>,
          dim3(blocks),
          dim3(kWarps * kWarp),
          1,
          sizeof(SingleMemory<kWarps, kBlockTiles, kHalved, kCount, kGroups, kTopk, kFormat>),
          stream_of(hidden),
          params);
    };
    auto go_with = [&]<int kTopk>() {
      switch (row_count(rows)) {
        case RowCount::kEight:
          return go.template operator()<kTiles, RowCount::kEight, kTopk>();
        case RowCount::kSixteen:
          return go.template operator()<kTiles, RowCount::kSixteen, kTopk>();
        default:
          return go.template operator()<kManyTiles, RowCount::kMany, kTopk>();
      }
    };
    topk <= 8 ? go_with.template operator()<8>() : go_with.template operator()<32>();
  }
};

}  // namespace rx
