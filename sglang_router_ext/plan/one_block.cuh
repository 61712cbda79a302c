// The plan of few rows: ids -> which slots an expert gets, in blocks of equal size, in the formats that expert kernels read.
//
// Every planner (a block) learns all ids, works out all of the same tables in its shared memory, and writes its share of them.
//   shared      PlanMemory; a bit per expert and row says who got what, so counting and ranking are popcounts, and neither a
//               sort nor an order of arrival is left in the result: inside an expert, slots ascend
// A slot is row * slots + k. Slots of padded rows and of other ranks' experts are "elsewhere".
//
// A block of the plan belongs to its first slot: the lanes of that slot write what of the block is not a slot. So nobody needs
// to know which expert a block has, and two barriers are enough. One is, where the plan is flat: no expert has more than one
// block, and no slot is elsewhere, so the blocks before an expert's are the experts before it. A row alone needs none. What
// lost: a table of the blocks' experts behind a third barrier, and a scan by shuffles instead of ballots (1.7 us for one row).
#pragma once

#include "../device/launch.cuh"

namespace rx {

enum class PlanFormat {
  kNone,
  kAligned,  // sorted_token_ids, expert_ids, num_tokens_post_padded: what moe_align_block_size gives Triton and Marlin kernels
  kTiles     // trtllm-gen's tables
};

// A divisor that is only known at run time, of numbers up to 3072 / 128 times itself.
struct Divisor {
  int value;
  uint32_t scaled;  // ceil(2^20 / value)

  static Divisor of(int value) {
    return {value, static_cast<uint32_t>(((1 << 20) + value - 1) / value)};
  }
  __device__ __forceinline__ int quotient(int number) const {
    return static_cast<int>(number * scaled >> 20);
  }
};

struct PlanParams {
  int rows, topk;           // of a row: topk routed slots, then shared ones, which are experts of their own
  Divisor slots;            // of a row
  Divisor block;            // slots of a block, 8 to 128
  int experts;              // of the model, without shared ones
  int first_local, locals;  // this rank's experts, shared ones included
  uint32_t* ids;            // [planners, rows, kIdWords] words, kNoIds until there, and kNoIds again for the next launch
  int planners;
  int room;  // places that a plan of this form can have
  // kAligned. Blocks of slots elsewhere come first, as expert -1; every block ends with the number of slots where it is not
  // full.
  int32_t* sorted_slots;   // [room]; past the padded number there may be anything
  int32_t* block_experts;  // [blocks]
  int32_t* padded;         // [1] slots in all blocks; or [2], and the number of blocks elsewhere
  bool counts_elsewhere;
  // kTiles. Slots elsewhere are in no tile.
  int32_t* slot_to_place;  // [rows * slots], -1 elsewhere
  int32_t* place_to_row;   // [room + 1], -1 where a tile has no slot, and behind the last tile
  int32_t* tile_experts;   // [tiles] local
  int32_t* tile_ends;      // [tiles] the first place behind a tile's slots
  int32_t* tiles;          // [1]
  int32_t* places;         // [1] places in all tiles
  int32_t* counts;         // [experts] slots of each local expert, 0 for others
};

// The same, there before it is needed.
__device__ __forceinline__ PlanParams in_registers(PlanParams params) {
  pin(params.rows), pin(params.slots.value), pin(params.slots.scaled), pin(params.block.value), pin(params.block.scaled);
  pin(params.first_local), pin(params.locals), pin(params.planners), pin(params.ids);
  pin(params.sorted_slots), pin(params.block_experts), pin(params.place_to_row);
  return params;
}

inline constexpr int kPlanRows = 128, kPlanSlots = 24;  // the most rows, and the most slots of one
inline constexpr uint32_t kNoIds = 0xffffffffu;
inline constexpr uint32_t kPadded = 0xfffeu;  // the id of a padded row in a word; no expert has it
template <int kTopk>
inline constexpr int kIdWords = kTopk / 2;  // two ids in a word

// kExperts: at least those of the model; shared ones come on top.
template <int kExperts>
struct alignas(16) PlanMemory {
  static constexpr int kGroups = kExperts / kWarp + 1;  // a warp counts 32 experts at a time
  static_assert(kPlanSlots <= kWarp && kExperts % kWarp == 0);
  alignas(16) uint32_t rows_of[kWarp * kGroups][kPlanRows / 32];  // bit per row, by local expert
  alignas(16) uint32_t present[(kGroups + 3) / 4 * 4];            // bit per local expert that has a slot
  int counted[kWarp * kGroups];                                   // blocks of a group's experts before it
  int blocks_before[kGroups + 1];             // in all groups before; those of slots elsewhere are before all
  alignas(16) uint32_t elsewhere[kPlanRows];  // bit per slot of a row
  int elsewhere_before[kPlanRows + 1];        // slots in the rows before
  int16_t local_of[kPlanRows * kPlanSlots];   // of a slot; -1 elsewhere
};

// All threads of the block; the caller synchronises before the first add_slot.
template <int kExperts>
__device__ __forceinline__ void clear_plan(PlanMemory<kExperts>& memory, int threads) {
  constexpr int kGroups = PlanMemory<kExperts>::kGroups;
  for (int i = threadIdx.x; i < kWarp * kGroups; i += threads) {
    *reinterpret_cast<uint4*>(memory.rows_of[i]) = uint4{0, 0, 0, 0};
  }
  for (int i = threadIdx.x; i < kPlanRows; i += threads) memory.elsewhere[i] = 0;
  for (int i = threadIdx.x; i <= kGroups; i += threads) memory.blocks_before[i] = 0;
  for (int i = threadIdx.x; i < (kGroups + 3) / 4 * 4; i += threads) memory.present[i] = 0;
}

// As if no place had a slot; by `threads` threads from number 0 on.
template <PlanFormat kFormat>
__device__ __forceinline__ void empty_places(const PlanParams& params, int thread, int threads) {
  constexpr bool kAligned = kFormat == PlanFormat::kAligned;
  const int none = kAligned ? params.rows * params.slots.value : -1;
  int32_t* places = kAligned ? params.sorted_slots : params.place_to_row;
#pragma unroll 1
  for (int i = 4 * thread; i < params.room; i += 4 * threads)
    *reinterpret_cast<int4*>(places + i) = int4{none, none, none, none};
}

// Returns whether the slot is elsewhere.
template <int kExperts>
__device__ __forceinline__ bool add_slot(const PlanParams& params, PlanMemory<kExperts>& memory, int row, int k, uint32_t id) {
  const uint32_t local = id - params.first_local;
  const bool here = id != kPadded && local < static_cast<uint32_t>(params.locals);
  memory.local_of[row * params.slots.value + k] = here ? static_cast<int16_t>(local) : -1;
  uint32_t* word = here ? &memory.rows_of[local][row / 32] : &memory.elsewhere[row];
  atomicOr(word, 1u << (here ? row % 32 : k));
  if (here && params.rows <= params.block.value) atomicOr(&memory.present[local / kWarp], 1u << local % kWarp);
  return !here;
}

// A warp tells all planners but its own block (-1: it is none) which experts a row got. ids: the winners in order.
template <int kTopk>
__device__ __forceinline__ void tell_planners(
    const PlanParams& params, const int (&ids)[kTopk], bool padded, int row, int own, int lane) {
  constexpr int kWords = kIdWords<kTopk>;
  const int word = lane % kWords;
  const uint32_t low = padded ? kPadded : ids[2 * word];
  const uint32_t high = padded || 2 * word + 1 >= params.topk ? kPadded : ids[2 * word + 1];
  const bool told = 2 * word < params.topk;
#pragma unroll 1
  for (int planner = lane / kWords; planner < params.planners; planner += kWarp / kWords) {
    send_word_if(told && planner != own, params.ids + ((planner * params.rows + row) * kWords + word), low | high << 16);
  }
}

// A word of what another block told about a row. Returns whether a slot is elsewhere.
template <int kExperts>
__device__ __forceinline__ bool take_word(
    const PlanParams& params, PlanMemory<kExperts>& memory, int row, int word, uint32_t both) {
  const uint32_t low = both & 0xffffu;
  bool elsewhere = add_slot(params, memory, row, 2 * word, low);
  if (2 * word + 1 < params.topk) elsewhere |= add_slot(params, memory, row, 2 * word + 1, both >> 16);
  if (word > 0) return elsewhere;
#pragma unroll 1
  for (int k = params.topk; k < params.slots.value; ++k) {
    elsewhere |= add_slot(params, memory, row, k, low == kPadded ? kPadded : params.experts + k - params.topk);
  }
  return elsewhere;
}

// What other blocks told, as soon as it is there, by `threads` threads from number 0 on. A warp takes its words all at once,
// when the last is there: otherwise that one would wait for the others to be taken. Row number r is of block r % consumers.
// Returns whether a slot is elsewhere.
template <int kTopk, int kExperts>
__device__ __forceinline__ bool hear(
    const PlanParams& params, PlanMemory<kExperts>& memory, int block, Divisor consumers, int thread, int threads) {
  constexpr int kWords = kIdWords<kTopk>;
  const int words = params.rows * kWords;
  bool elsewhere = false;
#pragma unroll 1
  for (int i = thread; i - thread % kWarp < words; i += threads) {
    const int row = i / kWords, word = i % kWords;
    const bool mine = i < words && 2 * word < params.topk && row - consumers.quotient(row) * consumers.value != block;
    uint32_t* from = params.ids + (block * words + i);
    pin(from);
    uint32_t both;
    do {
      both = mine ? load_word_shared_by_grids(from) : 0;
    } while (both == kNoIds);
    __syncwarp();
    if (!mine) continue;
    *from = kNoIds;
    elsewhere |= take_word(params, memory, row, word, both);
  }
  return elsewhere;
}

// Slots elsewhere, of the rows before each row and in all; a warp.
template <PlanFormat kFormat, int kExperts>
__device__ __forceinline__ void count_elsewhere(const PlanParams& params, PlanMemory<kExperts>& memory, int lane) {
  constexpr int kEach = kPlanRows / kWarp, kGroups = PlanMemory<kExperts>::kGroups;
  const uint4 rows = *reinterpret_cast<const uint4*>(memory.elsewhere + kEach * lane);
  if (!__any_sync(kAllLanes, (rows.x | rows.y | rows.z | rows.w) != 0)) return;
  const int count[kEach] = {__popc(rows.x), __popc(rows.y), __popc(rows.z), __popc(rows.w)};
  int until = (count[0] + count[1]) + (count[2] + count[3]), before = -until;
#pragma unroll
  for (int apart = 1; apart < kWarp; apart *= 2) {
    const int other = __shfl_up_sync(kAllLanes, until, apart);
    until += lane >= apart ? other : 0;
  }
  before += until;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    memory.elsewhere_before[kEach * lane + j] = before;
    before += count[j];
  }
  const int all = __shfl_sync(kAllLanes, until, kWarp - 1);
  if (lane == 0) memory.elsewhere_before[kPlanRows] = all;
  if constexpr (kFormat == PlanFormat::kAligned) {
    const int blocks = params.block.quotient(all + params.block.value - 1);
    for (int i = lane; i <= kGroups; i += kWarp) atomicAdd(&memory.blocks_before[i], blocks);
  }
}

// The bits below number `bit`, which may be outside of the word.
__device__ __forceinline__ uint32_t below(int bit) {
  return ~__funnelshift_lc(0u, ~0u, max(bit, 0));
}

// The threads of a block that plan, whole warps; the others are busy otherwise. kSlotLanes lanes share a slot. Barrier 15 is
// theirs alone: those of rows' teams are below.
// RX_RACECHECK: for compute-sanitizer's racecheck (2025.3), which reports what was written after a barrier of some warps and
// read after the next one, that of all warps included, until there were two more.
inline constexpr int kSlotLanes = 4;
struct Hands {
  int thread, threads;
  int slot, row;  // the first one of this lane

  __device__ __forceinline__ void sync() const {
    asm volatile("bar.sync 15, %0;" ::"r"(threads) : "memory");
#ifdef RX_RACECHECK
    asm volatile("bar.sync 15, %0;" ::"r"(threads) : "memory");
#endif
  }
  // The same, and whether any thread says so.
  __device__ __forceinline__ bool any(bool mine) const {
    int found;
    asm volatile("{\n.reg .pred p, q;\nsetp.ne.b32 p, %1, 0;\nbar.red.or.pred q, 15, %2, p;\nselp.b32 %0, 1, 0, q;\n}"
                 : "=r"(found)
                 : "r"(static_cast<int>(mine)), "r"(threads)
                 : "memory");
#ifdef RX_RACECHECK
    sync();
#endif
    return found;
  }
};

// Of `warps` warps this is number `warp`. By shuffles, since ptxas would work all of it out where it is waited for.
__device__ __forceinline__ Hands hands_of(const PlanParams& params, int planner, int warp, int warps, int lane) {
  const int slot = planner + params.planners * ((kWarp * warp + lane) / kSlotLanes);
  auto keep = [&](int value) { return __shfl_sync(kAllLanes, value, lane); };
  return {keep(kWarp * warp + lane), kWarp * warps, keep(slot), keep(params.slots.quotient(slot))};
}

template <int kExperts>
__device__ __forceinline__ int slots_of(const PlanMemory<kExperts>& memory, int local) {
  const uint4 rows = *reinterpret_cast<const uint4*>(memory.rows_of[local]);
  return (__popc(rows.x) + __popc(rows.y)) + (__popc(rows.z) + __popc(rows.w));
}

// Once all slots are added and seen: the tables. A lane has an expert; the j-th ballot says whose slots need a j-th block.
template <PlanFormat kFormat, int kExperts>
__device__ __forceinline__ void count_blocks(const PlanParams& params, PlanMemory<kExperts>& memory, const Hands& hands) {
  constexpr int kGroups = PlanMemory<kExperts>::kGroups;
  const int warp = hands.thread / kWarp, warps = hands.threads / kWarp, lane = hands.thread % kWarp;
#pragma unroll 1
  for (int group = warp; group * kWarp < params.locals; group += warps) {
    const int local = group * kWarp + lane;
    const int count = slots_of(memory, local);
    int before = 0, all = 0;
    unsigned need = __ballot_sync(kAllLanes, count > 0);
#pragma unroll 1
    for (int filled = params.block.value; need != 0; filled += params.block.value) {
      before += __popc(need & below(lane));
      all += __popc(need);
      need = __ballot_sync(kAllLanes, count > filled);
    }
    memory.counted[local] = before;
#pragma unroll 1
    for (int behind = group + 1 + lane; behind <= kGroups; behind += kWarp) {
      atomicAdd(&memory.blocks_before[behind], all);
    }
  }
  if (warp == warps - 1) count_elsewhere<kFormat>(params, memory, lane);
}

// A slot's place in the plan.
struct Place {
  int block, rank, count;  // its expert's first block, the expert's slots before it, and in all
};

// Of a flat plan; a whole warp. The kSlotLanes lanes of a slot share the words, and add up what they found in one number.
template <int kExperts>
__device__ __forceinline__ Place flat_place(const PlanMemory<kExperts>& memory, int local, int row, int part) {
  static_assert(kSlotLanes == kPlanRows / 32 && kPlanRows < 1 << 9 && kExperts + kWarp < 1 << 13);
  const uint32_t rows = memory.rows_of[local][part];
  int found = __popc(rows) | __popc(rows & below(row - 32 * part)) << 9;
#pragma unroll
  for (int i = 4 * part; i < PlanMemory<kExperts>::kGroups; i += 4 * kSlotLanes) {
    const uint4 four = *reinterpret_cast<const uint4*>(memory.present + i);
    const int bit = local - kWarp * i;
    found += (__popc(four.x & below(bit)) + __popc(four.y & below(bit - 32))) << 18;
    found += (__popc(four.z & below(bit - 64)) + __popc(four.w & below(bit - 96))) << 18;
  }
#pragma unroll
  for (int apart = 1; apart < kSlotLanes; apart *= 2) found += __shfl_xor_sync(kAllLanes, found, apart);
  return {found >> 18, found >> 9 & 0x1ff, found & 0x1ff};
}

// Of any plan, from the tables. local: -1 elsewhere.
template <int kExperts>
__device__ __forceinline__ Place counted_place(const PlanMemory<kExperts>& memory, int local, int row, int k) {
  if (local < 0) {
    const int rank = memory.elsewhere_before[row] + __popc(memory.elsewhere[row] & below(k));
    return {0, rank, memory.elsewhere_before[kPlanRows]};
  }
  const uint4 rows = *reinterpret_cast<const uint4*>(memory.rows_of[local]);
  const uint32_t words[4] = {rows.x, rows.y, rows.z, rows.w};
  Place place{memory.blocks_before[local / kWarp] + memory.counted[local], 0, 0};
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    place.rank += __popc(words[w] & below(row - 32 * w));
    place.count += __popc(words[w]);
  }
  return place;
}

// This planner's share of the output, once all slots are added and, but for a flat plan, the tables are there. emptied:
// empty_places was here before.
template <PlanFormat kFormat, int kExperts>
__device__ __forceinline__ void write_plan(
    const PlanParams& params, const PlanMemory<kExperts>& memory, int planner, const Hands& hands, bool flat, bool emptied) {
  constexpr int kGroups = PlanMemory<kExperts>::kGroups;
  constexpr bool kAligned = kFormat == PlanFormat::kAligned;
  const int slots = params.rows * params.slots.value, lane = hands.thread % kWarp, part = lane % kSlotLanes;
  const int step = params.planners * (hands.threads / kSlotLanes), of_warp = params.planners * (lane / kSlotLanes);
#pragma unroll 1
  for (int slot = hands.slot, row = hands.row; slot - of_warp < slots; slot += step, row = params.slots.quotient(slot)) {
    const bool mine = slot < slots, writes = mine && part == 0;
    const int local = mine ? memory.local_of[slot] : 0;
    if (!flat && (!mine || (!kAligned && local < 0))) {
      if constexpr (!kAligned) store_if(writes, params.slot_to_place + slot, -1);
      continue;
    }
    const Place at =
        flat ? flat_place(memory, local, row, part) : counted_place(memory, local, row, slot - row * params.slots.value);
    const int of_expert = params.block.quotient(at.rank), block = at.block + of_expert;
    const int begin = block * params.block.value, place = begin + at.rank - of_expert * params.block.value;
    const bool opens = place == begin;
    const int inside = min(at.count - at.rank, params.block.value);
    if constexpr (kAligned) {
      store_if(writes, params.sorted_slots + place, slot);
      store_if(writes && opens, params.block_experts + block, local);
    } else {
      store_if(writes, params.slot_to_place + slot, place);
      store_if(writes, params.place_to_row + place, row);
      store_if(writes && opens, params.tile_experts + block, local);
      store_if(writes && opens, params.tile_ends + block, begin + inside);
    }
    if (emptied) continue;
#pragma unroll 1
    for (int i = inside + part; i < params.block.value; i += kSlotLanes) {
      if constexpr (kAligned) {
        store_if(mine && opens, params.sorted_slots + (begin + i), slots);
      } else {
        store_if(mine && opens, params.place_to_row + (begin + i), -1);
      }
    }
  }
  if (planner == 0 && hands.thread >= hands.threads - kWarp) {
    int total = 0;
    if (flat) {
#pragma unroll
      for (int i = 0; i < kGroups; i += kWarp) total += i + lane < kGroups ? __popc(memory.present[i + lane]) : 0;
      total = __reduce_add_sync(kAllLanes, total);
    } else {
      total = memory.blocks_before[kGroups];
    }
    const int places = total * params.block.value;
    const bool first = lane == 0;
    if constexpr (kAligned) {
      store_if(first, params.padded, places);
      store_if(first && params.counts_elsewhere, params.padded + 1, flat ? 0 : memory.blocks_before[0]);
    } else {
      store_if(first, params.tiles, total);
      store_if(first, params.places, places);
      store_if(first, params.place_to_row + places, -1);  // a kernel may read one too many
    }
  }
  if constexpr (!kAligned) {
    if (planner > 0) return;
#pragma unroll 1
    for (int expert = hands.thread; expert < params.experts; expert += hands.threads) {
      const uint32_t local = expert - params.first_local;
      params.counts[expert] = local < static_cast<uint32_t>(params.locals) ? slots_of(memory, local) : 0;
    }
  }
}

// The aligned plan of a row alone, by the warp that has its winners: a lane has a slot, and each local one a block. The warp
// called empty_places before.
template <int kTopk>
__device__ __forceinline__ void write_lone_row(const PlanParams& params, const int (&ids)[kTopk], bool padded, int lane) {
  const int slots = params.slots.value, size = params.block.value;
  const bool mine = lane < slots;
  const int id = lane < params.topk ? ids[lane % kTopk] : params.experts + lane - params.topk;
  const bool here = mine && !padded && static_cast<uint32_t>(id - params.first_local) < static_cast<uint32_t>(params.locals);
  const unsigned elsewhere = __ballot_sync(kAllLanes, mine && !here);
  const int away = __popc(elsewhere), blocks_away = params.block.quotient(away + size - 1);
  // Local ones before this: routed, then shared.
  int before = max(0, lane - params.topk - max(0, params.first_local - params.experts));
#pragma unroll
  for (int i = 0; i < kTopk; ++i) before += i < params.topk && ids[i] < id && ids[i] >= params.first_local;
  const int rank = here ? 0 : __popc(elsewhere & ((1u << lane) - 1));
  const int block = here ? blocks_away + before : params.block.quotient(rank);
  const int place = here ? block * size : rank;
  store_if(mine, params.sorted_slots + place, lane);
  store_if(mine && place == block * size, params.block_experts + block, here ? id - params.first_local : -1);
  const int total = blocks_away + __popc(__ballot_sync(kAllLanes, here));
  store_if(lane == 0, params.padded, total * size);
  store_if(lane == 0 && params.counts_elsewhere, params.padded + 1, blocks_away);
}

}  // namespace rx
