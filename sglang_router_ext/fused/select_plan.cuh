// Selection and plan of any number of rows in two launches: the first selects and counts, the second places.
//
// A block of the selection owns a range of rows, which its teams of warps take in turn: a warp a row, or of sums one per 128
// experts.
//   shared      a RowMemory each team, and how many slots of the range each local expert has
#pragma once

#include "../plan/many_blocks.cuh"
#include "../selection/warp_select.cuh"

namespace rx {

// Warps of a block at most, so that 64 registers a thread are enough, or 80 for teams, or 128.
template <int kTeam, int kGroups, int kTopk>
constexpr int range_warps() {
  if (kTeam > 1) return (kTopk <= 8 ? 24 : 16) / kTeam * kTeam;
  return kGroups <= 3 && kTopk <= 8 ? 32 : 16;
}
template <int kTeam, int kGroups, int kTopk>
inline constexpr int kRangeWarps = range_warps<kTeam, kGroups, kTopk>();

struct SelectPlanParams {
  WarpSelectParams select;
  ManyPlanParams plan;
  uint32_t* counts;  // as ManyPlanParams reads them
  int range_rows;
  int32_t* places;  // [room] of the plan, of which none has a slot yet, and what says so
  unsigned room;
  int none;
};

// kCounts: for a plan.
template <int kTeam, int kGroups, Source kSource, int kTopk, bool kVector, bool kGrouped, Score kScore, bool kCounts>
__global__ __launch_bounds__((kRangeWarps<kTeam, kGroups, kTopk> * kWarp), 1) void select_ranges_kernel(
    const __grid_constant__ SelectPlanParams params) {
  constexpr int kSlices = kSource == Source::kSums ? 8 : 0;  // added by twos, as tensor_core adds them
  extern __shared__ __align__(16) unsigned char bytes[];
  const PlanParams& plan = params.plan.plan;
  const int teams = blockDim.x / (kTeam * kWarp), warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, range = blockIdx.x;
  const int team = warp / kTeam;
  auto* memories = reinterpret_cast<RowMemory<kTeam, kGroups, kTopk>*>(bytes);
  int* counts = reinterpret_cast<int*>(memories + teams);  // elsewhere, then local experts
  let_consumer_start();
  if constexpr (kCounts) {
    for (int i = threadIdx.x; i < params.plan.per * params.plan.pitch; i += blockDim.x) counts[i] = 0;
    __syncthreads();
  }
  const int past = min((range + 1) * params.range_rows, params.select.rows);
#pragma unroll 1
  for (int row = range * params.range_rows + team; row < past; row += teams) {
    RowMemory<kTeam, kGroups, kTopk>& memory = memories[team];
    bool gone = false;
    select_row<kTeam, kGroups, kSource, kSlices, kTopk, kVector, kGrouped, kScore, kSource == Source::kSums>(
        params.select, memory, row, team, warp % kTeam, lane, [&](bool padded) { gone = padded; });
    if constexpr (kCounts) {
      __syncwarp();
      if (warp % kTeam == 0 && lane < params.select.slots) {
        const int id = lane < plan.topk ? memory.id[lane % kTopk] : plan.experts + lane - plan.topk;
        const int local = gone ? -1 : local_of(plan, id);
        atomicAdd(&counts[local < 0 ? 0 : params.plan.per + local], 1);
      }
    }
    team_sync<kTeam>(team);
  }
  if constexpr (kCounts) {
    wait_for_producer();  // a team may have had no row
    const int none = params.none;
#pragma unroll 1
    for (unsigned i = 4 * (range * blockDim.x + threadIdx.x); i < params.room; i += 4 * gridDim.x * blockDim.x) {
      *reinterpret_cast<int4*>(params.places + i) = int4{none, none, none, none};
    }
    __syncthreads();
    uint32_t* out = params.counts + static_cast<int64_t>(range) * params.plan.pitch;
    for (int word = threadIdx.x; word < params.plan.pitch; word += blockDim.x) {
      const int* in = counts + params.plan.per * word;
      uint32_t all = in[0];
      if (word > 0) all |= params.plan.per == 4 ? in[1] << 8 | in[2] << 16 | in[3] << 24 : in[1] << 16;
      out[word] = all;
    }
  }
}

template <int kTeam, int kGroups, Source kSource, bool kVector, bool kGrouped, Score kScore, bool kCounts>
inline void launch_select_ranges(const SelectPlanParams& params, cudaStream_t stream) {
  auto go = [&]<int kTopk>() {
    constexpr int kMostTeams = kRangeWarps<kTeam, kGroups, kTopk> / kTeam;
    const int teams = std::min(kMostTeams, params.range_rows);
    const int ranges = (params.select.rows + params.range_rows - 1) / params.range_rows;
    launch(
        &select_ranges_kernel<kTeam, kGroups, kSource, kTopk, kVector, kGrouped, kScore, kCounts>,
        dim3(ranges),
        dim3(teams * kTeam * kWarp),
        1,
        teams * sizeof(RowMemory<kTeam, kGroups, kTopk>) + params.plan.per * params.plan.pitch * sizeof(int),
        stream,
        params);
  };
  params.select.topk <= 8 ? go.template operator()<8>() : go.template operator()<32>();
}

// What a plan is asked for, and its tensors in the order of the format.
struct PlanAsked {
  int64_t block, first_local, locals, range_rows, block_rows;
};

template <PlanFormat kFormat>
inline void add_plan(SelectPlanParams& params, TensorView counts, const TensorView (&plan_tensors)[7], const PlanAsked& asked) {
  PlanParams& plan = params.plan.plan;
  plan.rows = params.select.rows, plan.topk = params.select.topk, plan.experts = params.select.experts;
  plan.slots = Divisor::of(params.select.slots), params.plan.block = BlockSize::of(static_cast<int>(asked.block));
  plan.first_local = static_cast<int>(asked.first_local), plan.locals = static_cast<int>(asked.locals);
  auto tensor = [&](int i) { return static_cast<int32_t*>(plan_tensors[i].data_ptr()); };
  if constexpr (kFormat == PlanFormat::kAligned) {
    plan.sorted_slots = tensor(0), plan.block_experts = tensor(1), plan.padded = tensor(2);
    plan.counts_elsewhere = plan_tensors[2].size(0) == 2;
    params.places = plan.sorted_slots, params.room = static_cast<unsigned>(plan_tensors[0].size(0));
    params.none = plan.rows * plan.slots.value;
  } else {
    plan.slot_to_place = tensor(0), plan.place_to_row = tensor(1), plan.tile_experts = tensor(2);
    plan.tile_ends = tensor(3), plan.tiles = tensor(4), plan.places = tensor(5), plan.counts = tensor(6);
    params.places = plan.place_to_row, params.room = static_cast<unsigned>(plan_tensors[1].size(0)) - 1, params.none = -1;
  }
  params.counts = static_cast<uint32_t*>(counts.data_ptr());
  params.plan.ids = params.select.ids;
  params.plan.counts = params.counts;
  params.range_rows = static_cast<int>(asked.range_rows);
  params.plan.ranges = static_cast<int>(counts.size(0));
  params.plan.pitch = static_cast<int>(counts.size(1));
  params.plan.per = params.range_rows <= kByteRows ? 4 : 2;
  params.plan.fours = Divisor::of(params.plan.pitch / 4);
  params.plan.parts = kManyPlanThreads / params.plan.fours.value;
  params.plan.block_rows = static_cast<int>(asked.block_rows);
  params.plan.block_ranges = params.plan.block_rows / params.range_rows;
}

template <int kExperts, PlanFormat kFormat>
inline void launch_many_blocks(const SelectPlanParams& params, cudaStream_t stream) {
  auto go = [&]<bool kBytes>() {
    launch(
        &many_blocks_kernel<kExperts, kFormat, kBytes>,
        dim3((params.select.rows + params.plan.block_rows - 1) / params.plan.block_rows),
        dim3(kManyPlanThreads),
        1,
        sizeof(ManyPlanMemory<kExperts>),
        stream,
        params.plan);
  };
  params.plan.per == 4 ? go.template operator()<true>() : go.template operator()<false>();
}

// Entry point of both.
template <int kGroups, bool kVector, bool kGrouped, Score kScore, PlanFormat kFormat>
struct SelectPlan {
  // logits .. image_bias and experts .. image_token: as WarpSelect takes them; counts [ranges, pitch] int32 (written), which
  // ManyPlanParams explains; plan0 .. plan6: the plan's tensors (written), in the order of the format
  static void run(
      TensorView logits,
      TensorView bias,
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
      int64_t block_rows) {
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
    params.select.logits = static_cast<float*>(logits.data_ptr());
    params.select.row_stride = logits.stride(0);
    add_plan<kFormat>(
        params,
        counts,
        {plan0, plan1, plan2, plan3, plan4, plan5, plan6},
        {block, first_local, locals, range_rows, block_rows});
    launch_select_ranges<1, kGroups, Source::kLogits, kVector, kGrouped, kScore, true>(params, stream_of(logits));
    launch_many_blocks<128 * kGroups, kFormat>(params, stream_of(logits));
  }
};

}  // namespace rx
