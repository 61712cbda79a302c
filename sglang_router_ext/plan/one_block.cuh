// The plan of few rows: ids -> which slots an expert gets, in blocks of equal size, in the formats that expert kernels read.
//
// Every planner (a block) learns all ids, works out all of the same tables in its shared memory, and writes its share of them.
//   shared      PlanMemory; a bit per expert and row says who got what, so counting and ranking are popcounts, and neither a
//               sort nor an order of arrival is left in the result: inside an expert, slots ascend
// A slot is row * slots + k. Slots of padded rows and of other ranks' experts are "elsewhere".
#pragma once

#include "../device/launch.cuh"

namespace rx {

enum class PlanFormat {
  kNone,
  kAligned,  // sorted_token_ids, expert_ids, num_tokens_post_padded: what moe_align_block_size gives Triton and Marlin kernels
  kTiles     // trtllm-gen's tables
};

struct PlanParams {
  int rows, slots, topk;    // of a row: topk routed slots, then shared ones, which are experts of their own
  int experts;              // of the model, without shared ones
  int first_local, locals;  // this rank's experts, shared ones included
  int block;                // slots of a block, 8 to 128
  uint32_t* ids;            // [planners, rows, kIdWords] words, kNoIds until there, and kNoIds again for the next launch
  int planners;
  // kAligned. Blocks of slots elsewhere come first, as expert -1; every block ends with the number of slots where it is not
  // full.
  int32_t* sorted_slots;   // [.., at least the padded number]; past that nothing is written
  int32_t* block_experts;  // [blocks]
  int32_t* padded;         // [1] slots in all blocks; or [2], and the number of blocks elsewhere
  bool counts_elsewhere;
  // kTiles. Slots elsewhere are in no tile.
  int32_t* slot_to_place;  // [rows * slots], -1 elsewhere
  int32_t* place_to_row;   // [places + 1], -1 where a tile has no slot, and behind the last tile
  int32_t* tile_experts;   // [tiles] local
  int32_t* tile_ends;      // [tiles] the first place behind a tile's slots
  int32_t* tiles;          // [1]
  int32_t* places;         // [1] places in all tiles
  int32_t* counts;         // [experts] slots of each local expert, 0 for others
};

inline constexpr int kPlanRows = 128, kPlanSlots = 24;  // the most rows, and the most slots of one
inline constexpr uint32_t kNoIds = 0xffffffffu;
inline constexpr uint32_t kPadded = 0xfffeu;  // the id of a padded row in a word; no expert has it
template <int kTopk>
inline constexpr int kIdWords = kTopk / 2;  // two ids in a word

template <int kExperts>
struct alignas(16) PlanMemory {
  static constexpr int kBlocks = kPlanRows * kPlanSlots / 8 + kExperts + 1;  // the most there can be
  static constexpr int kWords = kPlanRows * kPlanSlots / 32;
  uint32_t rows_of[kExperts][kPlanRows / 32];  // bit per row, by local expert
  uint32_t elsewhere[kWords];                  // bit per slot
  int elsewhere_before[kWords];                // slots elsewhere in the words before
  int16_t first[kExperts];                     // block of a local expert
  uint8_t count[kExperts];                     // slots of a local expert
  int warp_sum[kWarp];
  int16_t local_of[kPlanRows * kPlanSlots];  // of a slot; -1 elsewhere
  int16_t expert_of[kBlocks];                // of a block; -1 elsewhere
};

// All threads of the block; the caller synchronises before the first add_slot.
template <int kThreads, int kExperts>
__device__ __forceinline__ void clear_plan(PlanMemory<kExperts>& memory) {
  for (int i = threadIdx.x; i < kExperts * (kPlanRows / 32); i += kThreads) (&memory.rows_of[0][0])[i] = 0;
  for (int i = threadIdx.x; i < PlanMemory<kExperts>::kWords; i += kThreads) memory.elsewhere[i] = 0;
}

template <int kExperts>
__device__ __forceinline__ void add_slot(const PlanParams& params, PlanMemory<kExperts>& memory, int row, int k, uint32_t id) {
  const int slot = row * params.slots + k;
  const uint32_t local = id - params.first_local;
  const bool here = id != kPadded && local < static_cast<uint32_t>(params.locals);
  memory.local_of[slot] = here ? static_cast<int16_t>(local) : -1;
  if (here) {
    atomicOr(&memory.rows_of[local][row / 32], 1u << row % 32);
  } else {
    atomicOr(&memory.elsewhere[slot / 32], 1u << slot % 32);
  }
}

// A warp tells all planners but its own block (-1: it is none) which experts a row got. ids: the winners in order.
template <int kTopk>
__device__ __forceinline__ void tell_planners(
    const PlanParams& params, const int (&ids)[kTopk], bool padded, int row, int own, int lane) {
  const int words = (params.topk + 1) / 2;
  if (lane >= words) return;
  const uint32_t low = padded ? kPadded : ids[2 * lane],
                 high = padded || 2 * lane + 1 >= params.topk ? kPadded : ids[2 * lane + 1];
  for (int planner = 0; planner < params.planners; ++planner) {
    if (planner == own) continue;
    uint32_t* word = params.ids + (static_cast<int64_t>(planner) * params.rows + row) * kIdWords<kTopk> + lane;
    send_word_if(true, word, low | high << 16);
  }
}

// One thread takes what another block told about a row, as soon as it is there.
template <int kTopk, int kExperts>
__device__ __forceinline__ void hear_row(const PlanParams& params, PlanMemory<kExperts>& memory, int row, int planner) {
  uint32_t* words = params.ids + (static_cast<int64_t>(planner) * params.rows + row) * kIdWords<kTopk>;
  const int told = (params.topk + 1) / 2;
  bool padded = false;
#pragma unroll
  for (int i = 0; i < kIdWords<kTopk>; i += 4) {
    if (i >= told) break;
    uint4 four;
    uint32_t word[4];
    bool there;
    do {
      four = load_shared_by_grids(words + i);
      word[0] = four.x, word[1] = four.y, word[2] = four.z, word[3] = four.w;
      there = true;
#pragma unroll
      for (int j = 0; j < 4; ++j) there &= i + j >= told || word[j] != kNoIds;
    } while (!there);
    *reinterpret_cast<uint4*>(words + i) = uint4{kNoIds, kNoIds, kNoIds, kNoIds};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int k = 2 * (i + j) + half;
        const uint32_t id = half ? word[j] >> 16 : word[j] & 0xffffu;
        if (k < params.topk) add_slot(params, memory, row, k, id);
        if (k == 0) padded = id == kPadded;
      }
    }
  }
  for (int k = params.topk; k < params.slots; ++k) {
    add_slot(params, memory, row, k, padded ? kPadded : params.experts + k - params.topk);
  }
}

// All threads of a planner, once all slots are added and the block is synchronised: tables, and its share of the output.
template <PlanFormat kFormat, int kThreads, int kExperts>
__device__ __forceinline__ void write_plan(const PlanParams& params, PlanMemory<kExperts>& memory, int planner) {
  constexpr int kWarps = kThreads / kWarp, kEach = (kExperts + kThreads - 1) / kThreads;
  constexpr bool kAligned = kFormat == PlanFormat::kAligned;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int slots = params.rows * params.slots, words = (slots + 31) / 32;

  // Slots elsewhere: every warp counts them, and the first one also those before each word.
  int away = 0;
#pragma unroll
  for (int base = 0; base < PlanMemory<kExperts>::kWords; base += kWarp) {
    if (base >= words) break;
    const int own = base + lane < words ? __popc(memory.elsewhere[base + lane]) : 0;
    int before = own;
#pragma unroll
    for (int apart = 1; apart < kWarp; apart *= 2) {
      const int other = __shfl_up_sync(kAllLanes, before, apart);
      before += lane >= apart ? other : 0;
    }
    if (warp == 0 && base + lane < words) memory.elsewhere_before[base + lane] = away + before - own;
    away += __shfl_sync(kAllLanes, before, kWarp - 1);
  }
  const int blocks_away = kAligned ? (away + params.block - 1) / params.block : 0;

  // Blocks of each local expert, and before it: a thread has kEach neighbours.
  int blocks[kEach], mine = 0;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int local = threadIdx.x * kEach + j;
    int count = 0;
    if (local < kExperts) {
#pragma unroll
      for (int w = 0; w < kPlanRows / 32; ++w) count += __popc(memory.rows_of[local][w]);
      memory.count[local] = static_cast<uint8_t>(count);
    }
    blocks[j] = (count + params.block - 1) / params.block;
    mine += blocks[j];
  }
  int until = mine;
#pragma unroll
  for (int apart = 1; apart < kWarp; apart *= 2) {
    const int other = __shfl_up_sync(kAllLanes, until, apart);
    until += lane >= apart ? other : 0;
  }
  if (lane == kWarp - 1) memory.warp_sum[warp] = until;
  __syncthreads();
  const int of_warp = lane < kWarps ? memory.warp_sum[lane] : 0;
  const int before_warp = __reduce_add_sync(kAllLanes, lane < warp ? of_warp : 0);
  const int total = blocks_away + __reduce_add_sync(kAllLanes, of_warp);
  int first = blocks_away + before_warp + until - mine;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int local = threadIdx.x * kEach + j;
    if (local < kExperts) memory.first[local] = static_cast<int16_t>(first);
    for (int i = 0; i < blocks[j]; ++i) memory.expert_of[first + i] = static_cast<int16_t>(local);
    first += blocks[j];
  }
  for (int i = threadIdx.x; i < blocks_away; i += kThreads) memory.expert_of[i] = -1;
  if (planner == 0 && threadIdx.x == 0) {
    if constexpr (kAligned) {
      params.padded[0] = total * params.block;
      if (params.counts_elsewhere) params.padded[1] = blocks_away;
    } else {
      *params.tiles = total;
      *params.places = total * params.block;
      params.place_to_row[total * params.block] = -1;  // a kernel may read one too many
    }
  }
  __syncthreads();

  if constexpr (!kAligned) {
    for (int expert = planner * kThreads + threadIdx.x; expert < params.experts; expert += params.planners * kThreads) {
      const uint32_t local = expert - params.first_local;
      params.counts[expert] = local < static_cast<uint32_t>(params.locals) ? memory.count[local] : 0;
    }
  }

  // What of a block is not a slot, and the block's own entries: a warp a block.
  for (int block = planner * kWarps + warp; block < total; block += params.planners * kWarps) {
    const int local = memory.expert_of[block];
    const int end = local < 0 ? away : memory.first[local] * params.block + memory.count[local];
    const int past = (block + 1) * params.block;
    for (int place = max(end, block * params.block) + lane; place < past; place += kWarp) {
      if constexpr (kAligned) {
        params.sorted_slots[place] = slots;
      } else {
        params.place_to_row[place] = -1;
      }
    }
    if (lane == 0) {
      if constexpr (kAligned) {
        params.block_experts[block] = local;
      } else {
        params.tile_experts[block] = local;
        params.tile_ends[block] = min(end, past);
      }
    }
  }
  for (int slot = planner * kThreads + threadIdx.x; slot < slots; slot += params.planners * kThreads) {
    const int local = memory.local_of[slot], row = slot / params.slots;
    int place = -1;
    if (local >= 0) {
      place = memory.first[local] * params.block + __popc(memory.rows_of[local][row / 32] & ((1u << row % 32) - 1));
      for (int w = 0; w < row / 32; ++w) place += __popc(memory.rows_of[local][w]);
    } else if (kAligned) {
      place = memory.elsewhere_before[slot / 32] + __popc(memory.elsewhere[slot / 32] & ((1u << slot % 32) - 1));
    }
    if constexpr (kAligned) {
      params.sorted_slots[place] = slot;
    } else {
      params.slot_to_place[slot] = place;
      if (place >= 0) params.place_to_row[place] = row;
    }
  }
}

}  // namespace rx
