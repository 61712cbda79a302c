// The plan of any number of rows, behind a selection that counted: of each range of rows it is known how many slots every local
// expert has. A block has some ranges. It adds up what it needs to know of all the others, and none waits for any. The formats
// are those of one_block.cuh; places that no slot has were emptied by the selection, which has more blocks for it.
//
//   registers   a thread adds up 16 bytes of counts over some of the ranges
//   shared      ManyPlanMemory: what came of that; and 128 rows at a time PlanMemory's bit per expert and row, so that ranks
//   are
//               popcounts and slots ascend
//
// What takes long is 128 ranges' counts on their way to one multiprocessor, and slots' stores, each to a sector of its own. So
// a count is a byte where that is enough, and a block has few rows. What lost (256 rows, 3.4 us behind the selection): 128 rows
// a block (+1.1 us); 1,024 threads (+1.2 us); counts of 16 bits, and padding written here (+1.5 us); all loops unrolled and
// divisions inlined (+2 us: instructions are fetched at about 400 a microsecond); a rehearsal before the wait, to have the
// instructions there (+1.6 us).
#pragma once

#include "one_block.cuh"

namespace rx {

inline constexpr int kManyPlanThreads = 512;
inline constexpr int kByteRows = 255;  // a range of at most so many has counts of one byte

// A size of blocks, 2^shift or three times that.
struct BlockSize {
  int value, shift;
  bool three;

  static BlockSize of(int value) {
    int shift = 0;
    while (value % (2 << shift) == 0) ++shift;
    return {value, shift, value >> shift == 3};
  }
  __device__ __forceinline__ int blocks(int slots) const {
    const uint32_t parts = static_cast<uint32_t>(slots + value - 1) >> shift;
    return static_cast<int>(three ? __umulhi(parts, 0xaaaaaaabu) >> 1 : parts);
  }
};

struct ManyPlanParams {
  PlanParams plan;  // `ids`, `planners`, `block` and `room` are of no use here
  BlockSize block;
  const int32_t* ids;      // [rows, slots]
  const uint32_t* counts;  // [ranges, pitch]: slots elsewhere; then `per` local experts a word, four or two
  int ranges, pitch, per;
  Divisor fours;                 // of a range's words, which are a multiple of four
  int parts;                     // that share the ranges: threads over fours
  int block_ranges, block_rows;  // of a block of the plan
};

// The local number of an expert, or -1 elsewhere.
__device__ __forceinline__ int local_of(const PlanParams& params, int id) {
  const unsigned local = static_cast<unsigned>(id - params.first_local);
  return id >= 0 && local < static_cast<unsigned>(params.locals) ? static_cast<int>(local) : -1;
}

template <int kExperts>
struct ManyPlanMemory {
  static constexpr int kGroups = PlanMemory<kExperts>::kGroups, kElsewhere = kWarp * kGroups;  // the last class
  PlanMemory<kExperts> rows;
  int total[kElsewhere + 1];   // slots of a class in all ranges
  int before[kElsewhere + 1];  // in the ranges before this block's, and in these those before the rows at hand
  int block[kElsewhere];       // blocks of the classes before it in its group of 32
  int group[kGroups];          // blocks of a group
  // What threads added up, of total and before, two of a word of counts. Bytes: number 0 and 2, and 1 and 3, share one.
  alignas(16) uint32_t parts[2][8 * kManyPlanThreads];
};

// kBytes: counts are bytes.
template <int kExperts, PlanFormat kFormat, bool kBytes>
__global__ __launch_bounds__(kManyPlanThreads, 1) void many_blocks_kernel(const __grid_constant__ ManyPlanParams params) {
  using Memory = ManyPlanMemory<kExperts>;
  constexpr int kGroups = Memory::kGroups, kElsewhere = Memory::kElsewhere, kThreads = kManyPlanThreads;
  constexpr int kWarps = kThreads / kWarp, kEach = 8, kPer = kBytes ? 4 : 2;
  constexpr bool kAligned = kFormat == PlanFormat::kAligned;
  extern __shared__ __align__(16) unsigned char bytes[];
  Memory& memory = *reinterpret_cast<Memory*>(bytes);
  const PlanParams& plan = params.plan;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int slots = plan.slots.value, size = params.block.value, first_row = blockIdx.x * params.block_rows;
  const int past = min(first_row + params.block_rows, plan.rows);

  clear_plan(memory.rows, kThreads);
  let_consumer_start();
  wait_for_producer();
  __syncthreads();

  // Slots, and the counts of some classes in every n-th range: the first ones are on their way before any is used.
  constexpr int kFlyingIds = 2, kFlying = 5;
  int32_t id[kFlyingIds];
  auto load_ids = [&](int64_t begin, int slot, int here) {
#pragma unroll
    for (int i = 0; i < kFlyingIds; ++i) {
      if (slot + i * kThreads < here) id[i] = __ldcg(params.ids + begin + slot + i * kThreads);
    }
  };
  load_ids(static_cast<int64_t>(first_row) * slots, threadIdx.x, min(kPlanRows, past - first_row) * slots);
  const int fours = params.fours.value, parts = params.parts;
  const int part = params.fours.quotient(threadIdx.x), four = threadIdx.x - part * fours;
  uint4 count[kFlying];
  auto load_counts = [&](int first) {
    const uint32_t* from = params.counts + static_cast<int64_t>(first) * params.pitch + 4 * four;
#pragma unroll
    for (int i = 0; i < kFlying; ++i) {
      count[i] = first + i * parts < params.ranges ? __ldcg(reinterpret_cast<const uint4*>(from)) : uint4{};
      from += parts * params.pitch;
    }
  };
  if (part < parts) load_counts(part);

  int until, of_group, away, of_warp;  // blocks of the groups up to this lane's, of it, elsewhere, and of the first 32 groups
#pragma unroll 1
  for (int first = first_row;;) {  // 128 rows
    const int here = min(kPlanRows, past - first) * slots;
    const int64_t begin = static_cast<int64_t>(first) * slots;
#pragma unroll 1
    for (int next = threadIdx.x; next < here; next += kFlyingIds * kThreads) {
      if (first > first_row || next >= kThreads) load_ids(begin, next, here);
#pragma unroll
      for (int i = 0; i < kFlyingIds; ++i) {
        const int slot = next + i * kThreads;
        if (slot >= here) break;
        const int row = plan.slots.quotient(slot), k = slot - row * slots, local = local_of(plan, id[i]);
        memory.rows.local_of[slot] = static_cast<int16_t>(local);
        atomicOr(
            local < 0 ? &memory.rows.elsewhere[row] : &memory.rows.rows_of[local][row / 32], 1u << (local < 0 ? k : row % 32));
      }
    }
    if (first == first_row) {
      if (part < parts) {
        const int mine_first = blockIdx.x * params.block_ranges;
        uint32_t all[kEach] = {}, before[kEach] = {};
#pragma unroll 1
        for (int r = part; r < params.ranges; r += kFlying * parts) {
          if (r > part) load_counts(r);
#pragma unroll
          for (int i = 0; i < kFlying; ++i) {
            const uint32_t word[4] = {count[i].x, count[i].y, count[i].z, count[i].w};
            uint32_t each[kEach];
#pragma unroll
            for (int w = 0; w < 4; ++w) {
              const uint32_t second = kBytes ? word[w] >> 8 & 0x00ff00ffu : word[w] >> 16;
              const bool whole = w == 0 && four == 0;  // of slots elsewhere
              each[2 * w] = whole ? word[w] : word[w] & (kBytes ? 0x00ff00ffu : 0xffffu);
              each[2 * w + 1] = whole ? 0 : second;
            }
#pragma unroll
            for (int c = 0; c < kEach; ++c) {
              all[c] += each[c];
              if (r + i * parts < mine_first) before[c] += each[c];
            }
          }
        }
#pragma unroll
        for (int c = 0; c < kEach; c += 4) {
          uint32_t* to = memory.parts[0] + kEach * threadIdx.x + c;
          *reinterpret_cast<uint4*>(to) = uint4{all[c], all[c + 1], all[c + 2], all[c + 3]};
          *reinterpret_cast<uint4*>(to + kEach * kThreads) = uint4{before[c], before[c + 1], before[c + 2], before[c + 3]};
        }
      }
      __syncthreads();

      // A class a thread: its sums, and how many blocks it and its group of 32 need. The last group has those elsewhere.
#pragma unroll 1
      for (int group = warp; group <= kGroups; group += kWarps) {
        const int local = group * kWarp + lane, place = group < kGroups ? local + kPer : 0;
        uint32_t all = 0, before = 0;
        if (place < kPer + plan.locals) {
          const uint32_t* from = memory.parts[0] + (place / kPer * 2 + place % 2);
#pragma unroll 4
          for (int i = 0; i < parts; ++i, from += kEach * fours) {
            all += from[0], before += from[kEach * kThreads];
          }
          if (kBytes && place > 0) {
            all = place & 2 ? all >> 16 : all & 0xffffu, before = place & 2 ? before >> 16 : before & 0xffffu;
          }
        }
        const int mine = params.block.blocks(static_cast<int>(all));
        int sum = mine;
#pragma unroll
        for (int apart = 1; apart < kWarp; apart *= 2) {
          const int other = __shfl_up_sync(kAllLanes, sum, apart);
          sum += lane >= apart ? other : 0;
        }
        if (group < kGroups || lane == 0) memory.total[local] = all, memory.before[local] = before;
        if (group < kGroups) memory.block[local] = sum - mine;
        if (group < kGroups && lane == kWarp - 1) memory.group[group] = sum;
      }
    }
    __syncthreads();

    const bool some_away = memory.total[kElsewhere] > 0;
    if (some_away) {
      if (warp == 0) count_elsewhere<PlanFormat::kNone>(plan, memory.rows, lane);
      __syncthreads();
    }
    if (first == first_row) {
      // Every warp has the blocks before each group; those elsewhere come first, and only in aligned plans.
      static_assert(kGroups <= kWarp + 1);
      away = kAligned ? params.block.blocks(memory.total[kElsewhere]) : 0;
      of_group = lane < kGroups ? memory.group[lane] : 0;
      until = of_group;
#pragma unroll
      for (int apart = 1; apart < kWarp; apart *= 2) {
        const int other = __shfl_up_sync(kAllLanes, until, apart);
        until += lane >= apart ? other : 0;
      }
      of_warp = away + __shfl_sync(kAllLanes, until, kWarp - 1);
    }
    // A class's first block; all lanes ask. Of -1, elsewhere: 0.
    auto first_block = [&](int local) {
      const int group = max(local, 0) / kWarp, before = __shfl_sync(kAllLanes, until - of_group, group % kWarp);
      return local < 0 ? 0 : (group == kWarp ? of_warp : away + before) + memory.block[local];
    };
#pragma unroll 1
    for (int slot = threadIdx.x; slot - lane < here; slot += kThreads) {
      const bool mine = slot < here;
      const int row = plan.slots.quotient(slot), local = mine ? memory.rows.local_of[slot] : -1;
      const int block = first_block(local);
      const int rank = mine ? counted_place(memory.rows, local, row, slot - row * slots).rank : 0;
      const int place = block * size + memory.before[local < 0 ? kElsewhere : local] + rank;
      const bool placed = mine && (kAligned || local >= 0);
      if constexpr (kAligned) {
        if (placed) plan.sorted_slots[place] = static_cast<int32_t>(begin + slot);
      } else {
        if (mine) plan.slot_to_place[begin + slot] = placed ? place : -1;
        if (placed) plan.place_to_row[place] = first + row;
      }
    }
    if (first == first_row) {
      // What is about blocks: each class by a thread, its blocks by all blocks in turn; what is about all, by the first.
#pragma unroll 1
      for (int c = threadIdx.x; c - lane < plan.locals + kAligned; c += kThreads) {
        const int local = c < plan.locals ? c : -1, all = memory.total[local < 0 ? kElsewhere : local];
        const int block = first_block(local), blocks = c < plan.locals + kAligned ? params.block.blocks(all) : 0;
#pragma unroll 1
        for (int i = blockIdx.x; i < blocks; i += gridDim.x) {
          if constexpr (kAligned) {
            plan.block_experts[block + i] = local;
          } else {
            plan.tile_experts[block + i] = local;
            plan.tile_ends[block + i] = block * size + min(all, (i + 1) * size);
          }
        }
      }
      if (blockIdx.x == 0) {
        const int blocks = of_warp + (kGroups > kWarp ? memory.group[kGroups - 1] : 0);
        if (threadIdx.x == 0) {
          if constexpr (kAligned) {
            plan.padded[0] = blocks * size;
            if (plan.counts_elsewhere) plan.padded[1] = away;
          } else {
            plan.tiles[0] = blocks, plan.places[0] = blocks * size;
            plan.place_to_row[blocks * size] = -1;  // a kernel may read one too many
          }
        }
        if constexpr (!kAligned) {
#pragma unroll 1
          for (int expert = threadIdx.x; expert < plan.experts; expert += kThreads) {
            const int local = local_of(plan, expert);
            plan.counts[expert] = local < 0 ? 0 : memory.total[local];
          }
        }
      }
    }
    first += kPlanRows;
    if (first >= past) break;
    __syncthreads();
#pragma unroll 1
    for (int c = threadIdx.x; c < kElsewhere; c += kThreads) memory.before[c] += slots_of(memory.rows, c);
    if (some_away && warp == 0) {
      int more = 0;
#pragma unroll
      for (int i = 0; i < kPlanRows / kWarp; ++i) more += __popc(memory.rows.elsewhere[i * kWarp + lane]);
      more = __reduce_add_sync(kAllLanes, more);
      if (lane == 0) memory.before[kElsewhere] += more;
    }
    __syncthreads();
    clear_plan(memory.rows, kThreads);
    __syncthreads();
  }
}

}  // namespace rx
